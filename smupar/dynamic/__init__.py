"""Masks that move while a model trains.

moves         a move decides: when (``Times``), which (a score and ``largest``), how many (``DropAndGrow``, ``Pruning``,
              ``Rounds``), on tensors with a leading dimension of models, so that one model and stacks choose the same weights
movers        carrying a move out on weights, of one model or of a stack of many: what both share, and the stack
sparsifiers   one model and its optimizers: counts steps and calls; RigL, SET
pruning       GMP, IMP
restart       Adam's bias correction of grown weights
at_init       masks made before training, by magnitude or SNIP
"""
