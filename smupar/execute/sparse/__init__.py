"""Sparsity that is real: layers that keep and multiply only their non-zeros.

convert    ``sparsify_storage``: a model's masked linear layers, from one way of keeping them to another, and back
backends   the ways there are, and which layers each can hold
auto       which of them is faster for a layer, by measuring
linear     the layer that keeps non-zeros row by row, its index, and what becomes of both when masks move
kernels    which kernel multiplies for a backend on a device
products   the layer's products and their gradients, and the kernels for CPUs: our own, or torch's
compiled   our own kernel for CPUs, ``kernel.cpp``, compiled when it is first needed
gpu        what the kernels for NVIDIA GPUs have in common, ``bf16.cuh`` with it
tiles      csr on a GPU: non-zeros anywhere, ``tiles.cu``
semi       2:4, by cuSPARSELt and ``semi.cu``
block      blocks, by Triton, ``block_kernels``
"""
