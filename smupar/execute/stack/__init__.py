"""Many models of equal shapes, trained as one.

stack       ``Stack``: one step of all models; ``train_stacked``
gather      makes the tensors of a stack from models, plans and hyperparameters
loss        losses and gradients of all models
optimizers  the updates
weight      ``StackedWeight``: the same weight in all models, with the interface of a weight in one

Masks that move in a stack are in ``dynamic/stacked``, measured updates in ``updates/stacked``, GPTs and their runs in
``lm/run/stack``, and which runs are trained together in ``study/stacks``.
"""
