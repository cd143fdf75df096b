"""Studies of many runs.

stages      ``run_study``: each stage proposes runs, engines train them, and their results may lead to further runs
definition  what a kind of study says: which runs it needs, and how it reads them
kinds       sweep, tune, transfer, reproduction
engines     train runs: one by one, stacked (stacks), on a Ray cluster (ray_engine)
store       results on disk; verify: compares them with their checksums
curves      losses over a hyperparameter, their optima, their picture
report      what a study leaves in its folder; page: its page, also while it runs; live, progress: what it is doing
config      configurations of studies; run_configs, axes, conventions: of their runs
forecast    what a study would cost
"""
