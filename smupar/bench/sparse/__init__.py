"""What sparse execution buys: training steps, dense and sparse side by side in one run.

The floor is what the machine cannot beat: activations cross memory once into and once out of every layer, weights and optimizer
state once, at the speed of a copy; every non-zero takes six FLOPs for a token, two in a product alone, at the speed of a dense
product. Both speeds are measured in the same run. Indices count in a training step, with 8 bytes for a non-zero; the floors of
a layer's passes and of a product count none, so that they hold for backends that need next to none.

run     ``bench_sparse``, for the device at hand
rows    what is measured, as rows of a table; stacks of hidden layers; the floor
cpu     hidden layers and a GPT on a CPU
gpu     a layer, its product and hidden layers on a GPU
show    the table and the picture
"""
