"""Layers that keep and multiply only their non-zeros: ``SparseLinear`` (``model.compressed``) and its kernels.

convert    ``sparsify_storage``: a model's masked linear layers, from one way of keeping them to another, and back
auto       which of the backends is faster for a layer, by measuring
backends   the ways there are, which layers each can hold, and the kernel that multiplies on a device
cpu        the kernels for CPUs: our own (``kernel.cpp``, compiled when it is first needed), or torch's
gpu        what the kernels for NVIDIA GPUs have in common, ``bf16.cuh`` with it
tiles      csr on a GPU: non-zeros anywhere, ``tiles.cu``
semi       2:4, by cuSPARSELt and ``semi.cu``
block      blocks, by Triton, ``block_kernels``
"""
