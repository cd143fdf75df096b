"""The kinds of study: what each runs, and how it reads the results.

sweep         every combination of some fields' values
tune          searches for the best hyperparameters of the proxy
transfer      how far an optimum moves from the proxy to its targets
setups        the models and rules that a transfer study compares
reproduction  the study that all figures of the paper share
"""
