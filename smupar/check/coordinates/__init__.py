"""The coordinate check: do activations, gradients and updates have the same size at every width, density and depth?

grid            the models, at all widths and depths
grid_run        one run of the grid: its model, its training and its sizes
readings        the runs, and the sizes that were read in them
measure         takes the sizes in one run, with hooks; calls: repeats calls of a layer with other weights
places          where sizes are measured: layers, blocks and parts
gradient_sizes  how large gradients should be
depth           which layers are compared between models of different depth
verdict         slopes, thresholds and verdicts
diagnosis       causes and remedies
report          the result in words and as JSON; picture, page: as a picture and as a page
"""
