"""The coordinate check: are activations, gradients and updates of the same size at every width and density?

``measure`` measures sizes, ``verdict`` fits slopes and judges them, ``diagnosis`` says what is wrong and what to do, ``report``
writes the result (text, picture, page, JSON), and ``check`` has ``coord_check``.
"""
