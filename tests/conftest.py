"""Two test processes share two cores: one thread each. Models here are small, more threads only cost."""

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


@pytest.fixture
def one_process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
