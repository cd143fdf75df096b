"""Layers that keep and multiply only their non-zeros: ``SparseLinear`` (``model.sparse_linear``) and its kernels.

convert      ``sparsify_storage`` converts a model's masked linear layers between dense and sparse storage
auto         measures which backend is fastest for a layer
compression  turns a plain linear layer into a sparse one, and back
backends     the table of backends: which masks and dtypes each can hold, and its kernel on each device
cpu          kernels for CPUs: our own, or torch's
library      compiles our kernel for CPUs, ``kernel.cpp``, on first use and loads it
gpu          code that the kernels for NVIDIA GPUs share, with ``bf16.cuh``
tiles        backend "csr" on a GPU, for any mask, with ``tiles.cu``
semi         backend "2:4", with cuSPARSELt and ``semi.cu``
cslt         calls cuSPARSELt
block        backend "block", with the Triton kernels in ``block_kernels``
packed       layers that generate text on a CPU
"""
