"""Curves of losses over a hyperparameter.

curves   the curves of a study, and their charts
optima   the best value on a curve, and how far it moves between curves
picture  draws curves
"""
