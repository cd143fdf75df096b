"""The coordinate check: are activations, gradients and updates of the same size at every width and density?

``measure`` takes the sizes, ``verdict`` fits slopes and judges them, ``diagnosis`` says what is wrong and what to do,
``report`` tells it (text, picture, page, JSON), ``check`` is ``coord_check``.
"""
