"""Puts a plan into a model, and gives the packages above access to its weights.

parameterize     ``parameterize``, ``attach``: masks, init, forward factors, hooks
hooks            puts hooks and buffers on a model; attached: the mark of a parameterized model, and questions about it
attention_scale  ``set_attention_scale``
queries          finds the layer that makes the queries of an attention module, by watching a forward pass
factors          forward factors: the buffers and hooks that multiply by them
weights          one interface to a weight, however it is kept: dense or compressed here, stacked in ``execute/stack``
gradients        masked gradients, and dense ones on request
sparse_linear    a layer that keeps only its non-zeros
csr              the format of the non-zeros
relayout         adapts optimizers to weights that change their format
seam             everything that runs before and after ``optimizer.step()``
init             initial values, from (seed, parameter name)
sharding         full tensors and shards, under FSDP2
"""
