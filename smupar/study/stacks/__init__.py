"""Runs of a study that are trained as one.

division  which runs are trained together: decided once, and recorded
size      how many runs are trained together: as many as fit into memory, or one if that is faster
training  trains stacks to their end, and writes the results of their runs
ahead     builds the next models while a stack trains
state     the saved state of a stack, from which an interrupted study continues
"""
