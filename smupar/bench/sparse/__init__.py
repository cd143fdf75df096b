"""Measures how much faster sparse execution is, by timing dense and sparse training steps side by side in one run.

The floor of a step or pass is a time that the machine cannot beat. It is computed from two speeds that are measured in the same
run. Memory is counted at the speed of a copy: activations into and out of every layer, weights and optimizer state once. FLOPs
are counted at the speed of a dense product: six for each non-zero and token, or two in a forward product. In a training step,
indices count with 8 bytes for each non-zero. The floors of a layer's passes and of a product leave indices out, so that they
also hold for backends with hardly any index.

compare  ``bench_sparse``: runs all cases for a device, and makes the table and the picture
rows     rows of the table; stacks of hidden layers; the floor
cpu      hidden layers and a GPT on a CPU
gpu      a layer, its product and hidden layers on a GPU
"""
