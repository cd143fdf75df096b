"""Runs of a study that are trained as one.

division  which runs are trained together: decided once, and recorded
training  trains one stack to its end, and writes the results of its runs
state     the saved state of a stack, from which an interrupted study continues
"""
