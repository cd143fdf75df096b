"""Decides which weights are kept.

allocations  divides one density among layers
patterns     how many weights of a tensor are kept, and which
sparsity     the density of every weight, from all settings together
"""

# The patterns whose masks may move, since they allow any mask of a density. Configurations read this without torch.
UNSTRUCTURED = ("random", "bernoulli")
