"""Makes a plan from Table 1, a model and densities. Nothing here changes a model.

make, plan, summary    ``make_plan``, the plan, and the plan in a few lines
settings               what ``make_plan`` and ``parameterize`` take
remarks                what a plan remarks, with the notes of the parts below
reminders              what only the user can set, because hooks cannot
initial_values         the initial values of parameters
masks                  which weights are kept, and how many of each layer
roles                  which row of Table 1 each parameter belongs to
depth                  which layers of model and base correspond; residual branches
forward                one forward pass, and how it uses each parameter
scales                 numbers in the model that follow its width: attention scales and others
facts                  what is known about layers and optimizers
notes, globs           a remark, as text and for programs; settings by parameter name
"""
