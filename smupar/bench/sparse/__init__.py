"""Measures how much faster sparse execution is: training steps, dense and sparse side by side in one run.

The floor is a time that the machine cannot beat. It counts memory at the speed of a copy: activations into and out of every
layer, weights and optimizer state once. And it counts FLOPs at the speed of a dense product: six for each non-zero and token,
or two in a product alone. Both speeds are measured in the same run. In a training step indices count too, with 8 bytes for each
non-zero. They do not count in the floors of a layer's passes and of a product, so that these hold for backends with hardly any
index.

run     ``bench_sparse``, for the device at hand; its table and its picture
rows    what is measured, as rows of a table; stacks of hidden layers; the floor
cpu     hidden layers and a GPT on a CPU
gpu     a layer, its product and hidden layers on a GPU
"""
