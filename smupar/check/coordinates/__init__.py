"""The coordinate check: do activations, gradients and updates have the same size at every width, density and depth?

check      ``coord_check``: trains the models of a grid
grid_run   one run of the grid: its model, its training and its sizes
grid       the models, at all widths and depths
measure    the sizes in one run; calls: repeats calls of a layer with other weights
depth      which layers are compared between models of different depth
verdict    slopes, thresholds and verdicts
diagnosis  causes and remedies
report     the result as text, picture and JSON; page: as a page
"""
