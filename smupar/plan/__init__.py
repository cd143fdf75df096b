"""Makes a plan from Table 1, a model and densities. Nothing here changes a model.

layers, parameters, neighbours  what a model's parameters are
role_table, roles               which row of Table 1 each parameter belongs to
patterns, allocations           which weights are kept, and how many in each layer
sparsity                        the density that each weight ends up with
optimizers                      what is known about optimizers
attention, disguise, values     what follows the width besides shapes: attention scales, numbers, initial values
make, plan, reminders           ``make_plan``, the plan, and reminders of what only the user can set
settings                        checks of settings: choices, and values by parameter name
"""
