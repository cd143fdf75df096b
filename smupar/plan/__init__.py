"""Makes a plan from Table 1, a model and densities. Nothing here changes a model.

make, plan, summary    ``make_plan``, the plan, and the plan in a few lines
reminders              what only the user can set, because no hook reaches it
values                 what the model's initial values tell
masks                  which weights are kept, and how many in each layer
roles                  which row of Table 1 each parameter belongs to
depth                  which layers of model and base correspond; residual branches
forward                one forward pass, and how it uses each parameter
scales                 what follows the width besides shapes: attention scales, numbers of the model's own
facts                  what is known about layers and optimizers
notes, settings        remarks on a plan; checks of settings: choices, and values by parameter name
"""
