"""Masks that move while a model trains.

policies      decide when masks move (``MoveSchedule``), which weights are kept (a score and ``largest``), and how many
              (``DropAndGrow``, ``Pruning``, ``Rounds``), on tensors with a leading dimension of models
moves         carries a policy out on weights of any kind
sparsifiers   do this for one model, whose optimizers' steps they count (``Sparsifier``); stacked: for a stack
methods       the sparsifiers that users make: ``RigL``, ``SET``, ``GMP``, ``IMP``
refusals      models, optimizers and goals with which masks cannot move
restart       restarts Adam's bias correction for grown weights
at_init       masks made before training, by magnitude or SNIP; an init for neurons with different numbers of inputs
"""
