"""Ways to run a step faster.

stack              trains many models of one shape as one
attention_kernels  attention that can be stacked
cpu_products       products of linear layers on a CPU
cuda_graphs        captures a step as one CUDA graph
sparse             layers that keep only their non-zeros
timing             measures the time of a step
compiler_cache     a folder for torch.compile's cache
threads            sets the number of CPU threads
"""
