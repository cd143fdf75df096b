"""Puts a plan into a model, and holds the weights that the packages above change afterwards.

parameterize   ``parameterize``, ``attach``: masks, init, forward factors, hooks
attention      ``set_attention_scale``; queries: which layer makes them, seen in a forward pass
weights        a weight however it is kept: dense and masked, compressed, stacked
gradients      masked gradients, and dense ones where somebody asks
compressed     a layer that keeps only its non-zeros; csr: their one codec; relayout: optimizers when they change layout
seam           the one seam round ``optimizer.step()``
init, sharding values from (seed, name); whole tensors and shards
"""
