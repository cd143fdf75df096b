"""Sparsity that is real: layers that keep and multiply only their non-zeros.

convert    ``sparsify_storage``: a model's masked linear layers, from one way of keeping them to another, and back
backends   the ways there are, what each of them needs, and which layers it can hold
auto       which of them is faster for a layer, by measuring
csr        the layer that keeps non-zeros row by row, its index, and what becomes of both when masks move
products   the layer's products and their gradients, by our own kernel or by torch's
compiled   our own kernel, ``kernel.cpp``, compiled when it is first needed
"""
