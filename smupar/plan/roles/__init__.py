"""Decides which row of Table 1 each parameter belongs to.

parameters  the parameters of model and base by name, with their shapes at both widths
neighbours  which parameters come first and last, and which sizes layers read and write
evidence    what the forward pass of an example shows about the parameters; two_widths: what a second pass adds
table       the ordered table of conditions that decides
infer       ``infer_roles``, which asks the user where the table cannot decide
"""
