"""Studies of many runs.

stages          ``run_study``: each stage proposes runs, engines train them, and their results may lead to further runs
definition      what a kind of study says: which runs it needs, and how it reads them
kinds           sweep, tune, transfer, reproduction
engines         train runs one by one or stacked (stacks)
ray_engine      trains runs on a Ray cluster
store           results on disk
verify          compares results on disk with their checksums
curves          losses over a hyperparameter, their optima, their picture
report          what a study leaves in its folder
page            the page of a study, also while it runs
live, progress  what a running study is doing
config          configurations of studies
run_configs     lists of the configurations of runs
axes            grids of runs
conventions     how rules and densities are compared and written
forecast        what a study would cost
"""
