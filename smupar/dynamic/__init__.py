"""Masks that move while a model trains.

policies      what decides: when masks move (``Times``), which weights are kept (a score and ``largest``), how many
              (``DropAndGrow``, ``Pruning``, ``Rounds``), on tensors with a leading dimension of models
sparsifiers   what carries a policy out: on one model, whose optimizers' steps it counts (``Sparsifier``), or on a stack
methods       what users hold: ``RigL``, ``SET``, ``GMP``, ``IMP``
restart       Adam's bias correction of grown weights
at_init       masks made before training, by magnitude or SNIP
"""
