"""Ways to run a step faster.

stacked         many models of one shape as one; batched: runs them, attention and products: their kernels
cuda_graphs     a step as one CUDA graph
sparse          layers that keep only their non-zeros
timing          the time of a step
compiler_cache  a folder for torch.compile's cache; threads: their number
"""
