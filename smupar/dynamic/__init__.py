"""Masks that move while a model trains.

policies     decide when masks move (``MoveSchedule``), which weights are kept (a score and ``largest``), and how many
             (``DropAndGrow``, ``Pruning``, ``Rounds``), on tensors with a leading dimension of models
moves        carries a policy out on weights of any kind
sparsifiers  ``Sparsifier`` carries it out on one model, and counts the steps of the model's optimizers
stacked      the same for a stack of models
methods      the sparsifiers that users make: ``RigL``, ``SET``, ``GMP``, ``IMP``
refusals     refuses models, optimizers and goals with which masks cannot move
restart      restarts Adam's bias correction for grown weights
at_init      masks made before training, by magnitude or SNIP, and an init for neurons with different numbers of inputs
"""
