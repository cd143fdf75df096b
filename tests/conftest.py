"""Two test processes share two cores: one thread each. Models here are small, more threads only cost."""

import torch

torch.set_num_threads(1)
