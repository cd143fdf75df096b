"""Puts a plan into a model, and holds the weights that the packages above change afterwards.

parameterize   ``parameterize``, ``attach``: masks, init, forward factors, hooks
attention      ``set_attention_scale``; queries: finds the layer that makes them, in a forward pass
factors        forward factors: the buffers and hooks that multiply by them
weights        one interface to weights that are dense and masked, compressed, or stacked (stacked_weight)
gradients      masked gradients, and dense ones on request
compressed     a layer that keeps only its non-zeros; csr: the format; relayout: adapts optimizers to a change of layout
seam           the seam around ``optimizer.step()``
init, sharding values from (seed, name); whole tensors and shards
"""
