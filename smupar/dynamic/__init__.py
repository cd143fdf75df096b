"""Masks that move while training, cut along their joints.

moves         when (``Times``), which (a score and ``largest``), how many (``DropAndGrow``, ``Pruning``, ``Rounds``): functions
              of tensors with a leading dimension of models, so that one model and stacks of many choose the same weights
sparsifiers   one model and its optimizers: RigL, SET
pruning       GMP, IMP
movers        carrying a move out on weights, of one model or of a stack of many: what all kinds share, and the stack
at_init       masks made before training, by magnitude or SNIP
"""
