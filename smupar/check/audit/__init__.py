"""The audit before step 0 compares a model and its optimizer with the plan.

audit       ``audit`` itself
findings    what it raises
weights     shapes, masks, initial values
forward     forward factors and factors of branches
optimizers  groups, learning rates, options
"""
