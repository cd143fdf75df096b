"""Masks that move while training, cut along their joints.

moves         when (``Times``), which (a score and ``largest``), how many (``DropAndGrow``, ``Pruning``, ``Rounds``): functions
              of tensors with a leading dimension of models, so that one model and stacks of many choose the same weights
sparsifiers   carrying it out on a model and its optimizers: what all kinds share, RigL, SET
pruning       GMP, IMP
stacks        the same on a stack of models
at_init       masks made before training, by magnitude or SNIP
"""
