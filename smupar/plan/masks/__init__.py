"""Decides which weights are kept.

allocations  divides one density among layers
patterns     how many weights of a tensor are kept, and which
sparsity     the density of every weight, from all settings together
"""
