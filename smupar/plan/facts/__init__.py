"""Tables of what is known about layers and optimizers. Everybody else asks these tables.

layers      kinds of layers, and ``register_layer`` for the user's own
optimizers  kinds of optimizers; needs the standard library only
"""
