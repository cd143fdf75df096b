"""Makes a plan from Table 1, a model and densities. Nothing here changes a model.

layers, parameters, neighbours  what a model's parameters are
role_table, roles               which row of Table 1 each parameter belongs to
patterns, allocations           which weights are kept, and how many in each layer
sparsity                        the density that each weight ends up with
optimizers                      what is known about optimizers
attention, disguise, values     what follows the width besides shapes: scales of attention, numbers, initial values
make, plan, reminders           ``make_plan``, the plan, and what only the user can set
settings                        settings by parameter name, and choices
"""
