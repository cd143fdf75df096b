"""The coordinate check: do activations, gradients and updates have the same size at every width, density and depth?

``check`` has ``coord_check``. ``measure`` measures sizes, ``verdict`` fits slopes and judges them, ``diagnosis`` names causes
and remedies, and ``report`` writes the result (text, picture, page, JSON).
"""
