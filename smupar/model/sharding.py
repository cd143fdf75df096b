"""Helpers for tensors that FSDP2 may have sharded: the full tensor, this rank's shard, a tensor sharded like another, and
masking in place."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """``tensor`` on the device of ``parameter``, and under FSDP2 sharded in the same way. Every rank passes the same full
    tensor."""
    if not is_sharded(parameter):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


def sharded_like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A tensor that is sharded like a parameter. ``shard`` is this rank's part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank, if FSDP2 has sharded it; otherwise the tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def in_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def num_ranks() -> int:
    return dist.get_world_size() if in_process_group() else 1


def zero_off_mask(tensor: Tensor, mask: Tensor) -> None:
    """Sets weights off the mask to 0, in place. (A product with the mask would turn an inf into nan.)"""
    tensor.masked_fill_(mask.logical_not(), 0)
