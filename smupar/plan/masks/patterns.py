"""Patterns of masks: how many weights of a tensor are kept at a density, and which. ``allocations`` decides the densities.

A mask is a bool tensor, True where the weight is kept. It is a pure function of (seed, parameter name), drawn on the CPU and
never from the global random state. So it is the same on every device, rank and run. Counts are known without drawing a mask
(only Bernoulli masks have random counts), so plans can be made for models on the meta device.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor

from smupar.output.optional import first_line
from smupar.plan.masks.allocations import round_half_up
from smupar.plan.roles.parameters import Shape
from smupar.refusals import refuse

Dims = tuple[int, ...]  # input dimensions, input channel first: (1,) for a Linear, (1, 2, 3) for a Conv2d


def generator(seed: int, purpose: str, name: str) -> torch.Generator:
    """A CPU generator that is seeded by its three arguments."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


# Patterns

PATTERNS = '"random" | "bernoulli" | "fan_in" | "2:4" (any N:M) | "2:4-transposable" | "block-16" (any size) | "neuron"'


@dataclass(frozen=True)
class Pattern:
    """Keeps an exact number of uniformly chosen weights. Other patterns override its methods."""

    name: str = "random"
    # Whether whole neurons are removed, which changes the widths and leaves a dense network.
    whole_neurons: ClassVar[bool] = False
    takes_any_density: ClassVar[bool] = True

    @property
    def default_density(self) -> float:
        return 1.0

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        """The number of weights that ``draw`` keeps; None if it is random. Raises ValueError if the pattern does not fit the
        shape."""
        return round_half_up(density * math.prod(shape))

    def mask(self, row: Any, live_neurons: tuple[int, int], seed: int) -> Tensor:
        """Draws the mask of a parameter, which depends only on its row in the plan, ``live_neurons`` and the seed."""
        return self.draw(row.shape, row.in_dims, row.density, generator(seed, "mask", row.name))

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        return _exact_random(math.prod(shape), round_half_up(density * math.prod(shape)), rng).view(shape)


class Bernoulli(Pattern):
    """Keeps each weight with probability rho, as in the paper's reference code, so the count is random."""

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        return None

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float32) < float(density)


class ConstantFanIn(Pattern):
    """Every output neuron keeps the same number of inputs."""

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        fan_in = math.prod(shape[dim] for dim in in_dims)
        return round_half_up(density * fan_in) * (math.prod(shape) // fan_in)

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        outs = [dim for dim in range(len(shape)) if dim not in in_dims]
        num_out, fan_in = math.prod(shape[dim] for dim in outs), math.prod(shape[dim] for dim in in_dims)
        kept = (
            torch.rand(num_out, fan_in, generator=rng, dtype=torch.float32).topk(round_half_up(density * fan_in), dim=1).indices
        )
        mask = torch.zeros(num_out, fan_in, dtype=torch.bool).scatter_(1, kept, True)
        order = [*outs, *in_dims]  # the mask was drawn with its input dimensions last
        return mask.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))]).contiguous()


@dataclass(frozen=True)
class NM(Pattern):
    """Keeps N of every M consecutive inputs of a neuron (2:4 on NVIDIA GPUs)."""

    n: int = 2
    m: int = 4
    takes_any_density = False

    @property
    def default_density(self) -> float:
        return self.n / self.m

    def _check(self, size: int, density: Fraction) -> None:
        refuse(
            size % self.m,
            f"{self.name} needs dimensions divisible by {self.m}, this one is {size}; keep such a weight dense with "
            "density={'NAME': 1, '*': ...}",
        )
        refuse(
            density != Fraction(self.n, self.m),
            f"{self.name} keeps exactly {self.n}/{self.m} of the weights, not {float(density):g}; "
            f"pass density={self.n}/{self.m} (sparsity {1 - self.n / self.m:g}) or leave it out",
        )

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        self._check(shape[in_dims[0]], density)
        return math.prod(shape) * self.n // self.m

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        groups = math.prod(shape) // self.m
        kept = torch.rand(groups, self.m, generator=rng, dtype=torch.float32).topk(self.n, dim=1).indices
        mask = torch.zeros(groups, self.m, dtype=torch.bool).scatter_(1, kept, True)
        others = [size for dim, size in enumerate(shape) if dim != in_dims[0]]
        return mask.view(*others, shape[in_dims[0]]).movedim(-1, in_dims[0]).contiguous()


class TransposableNM(NM):
    """Keeps N of every M along the inputs and along the outputs, so that the backward pass is N:M as well. Every M x M tile is
    a circulant matrix with shuffled rows and columns, so each row and column of the tile has N ones."""

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        refuse(len(shape) != 2, f"{self.name} is for matrices, this tensor has shape {shape}")
        self._check(shape[1 - in_dims[0]], density)
        return super().count(shape, in_dims, density)

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        m, rows, cols = self.m, shape[0] // self.m, shape[1] // self.m
        step = torch.arange(m)
        tile = (step[None] - step[:, None]) % m < self.n
        order = torch.rand(2, rows * cols, m, generator=rng, dtype=torch.float32).argsort(-1)
        tiles = tile[order[0][:, :, None], order[1][:, None, :]]
        return tiles.view(rows, cols, m, m).transpose(1, 2).reshape(shape)


@dataclass(frozen=True)
class SquareBlocks(Pattern):
    """Keeps or drops entire square blocks."""

    size: int = 16

    def _blocks(self, shape: Shape) -> tuple[int, int]:
        refuse(
            len(shape) != 2 or shape[0] % self.size or shape[1] % self.size,
            f"{self.name} needs a matrix with both dimensions divisible by {self.size}, not shape {shape}",
        )
        return shape[0] // self.size, shape[1] // self.size

    def count(self, shape: Shape, in_dims: Dims, density: Fraction) -> int | None:
        return round_half_up(density * math.prod(self._blocks(shape))) * self.size**2

    def draw(self, shape: Shape, in_dims: Dims, density: Fraction, rng: torch.Generator) -> Tensor:
        rows, cols = self._blocks(shape)
        blocks = _exact_random(rows * cols, round_half_up(density * rows * cols), rng).view(rows, 1, cols, 1)
        return blocks.expand(rows, self.size, cols, self.size).reshape(shape)


class Neuron(Pattern):
    """Removes whole neurons, so that the network becomes a narrower dense one.

    A neuron is an index along a dimension that follows the width. All tensors share one set of live indices, which repeats with
    a period, the greatest common divisor of all these dimensions. So the layer that writes a neuron, its bias, and all layers
    that read the neuron agree, even if layers are fused, gated or grouped.
    """

    whole_neurons = True

    def draw_live(self, num_live: int, period: int, seed: int) -> Tensor:
        return _exact_random(period, num_live, generator(seed, "neurons", str(period)))

    def mask(self, row: Any, live_neurons: tuple[int, int], seed: int) -> Tensor:
        live = self.draw_live(*live_neurons, seed)
        mask = torch.ones((), dtype=torch.bool)
        for dim, size in enumerate(row.shape):
            kept = live.repeat(size // len(live)) if dim in row.scaling else torch.ones(size, dtype=torch.bool)
            mask = mask[..., None] & kept
        return mask


def num_live_neurons(period: int, density: Fraction) -> int:
    """The number of live neurons in each period. Raises ValueError if their share is more than 10 % away from the density."""
    num_live = round_half_up(density * period)
    refuse(num_live == 0, f"density {float(density):g} leaves none of {period} neurons; raise it")
    near = Fraction(9, 10) * density <= Fraction(num_live, period) <= Fraction(11, 10) * density
    refuse(
        not near or num_live == period,
        f"density {float(density):g} cannot be reached with whole neurons: the greatest common divisor of all widths is "
        f"{period}, so the nearest is {num_live}/{period}; choose another density, or widths with a larger common divisor",
    )
    return num_live


def _exact_random(num: int, num_kept: int, rng: torch.Generator) -> Tensor:
    """A flat mask with exactly ``num_kept`` ones, uniform over all such masks.

    Bernoulli draws of 16 bits, four from each 64-bit random number, come close to the count. Uniformly chosen entries are then
    flipped until it is exact. This is several times faster than a permutation or a sort.
    """
    threshold = round(num_kept / num * 2**16)
    words = torch.empty(-(-num // 4), dtype=torch.int64).random_(-(2**63), None, generator=rng)
    mask = words.view(torch.int16)[:num] < threshold - 2**15 if threshold < 2**16 else torch.ones(num, dtype=torch.bool)
    surplus = int(torch.count_nonzero(mask)) - num_kept
    if surplus:
        _flip(mask, surplus > 0, abs(surplus), rng)
    return mask


def _flip(mask: Tensor, state: bool, num_flips: int, rng: torch.Generator) -> None:
    """Flips ``num_flips`` uniformly chosen entries of ``mask`` that are in ``state``."""
    num_in_state = int(torch.count_nonzero(mask)) if state else mask.numel() - int(torch.count_nonzero(mask))
    if num_in_state < 64 * num_flips + 1024 or num_in_state < mask.numel() // 64:  # few candidates: list them all
        positions = (mask if state else ~mask).nonzero().flatten()
        chosen = positions[torch.rand(len(positions), generator=rng, dtype=torch.float32).topk(num_flips).indices]
        mask[chosen] = not state
        return
    while num_flips:  # many candidates: draw positions and use those in the state
        guesses = torch.randint(mask.numel(), (4 * num_flips,), generator=rng)
        fresh = guesses[mask[guesses] == state].unique()
        chosen = fresh[torch.randperm(len(fresh), generator=rng)[:num_flips]]
        mask[chosen] = not state
        num_flips -= len(chosen)


def parse_pattern(text: str | Pattern) -> Pattern:
    """Parses the name of a pattern, such as "2:4"; ``PATTERNS`` lists the names."""
    if isinstance(text, Pattern):
        return text
    plain = {"random": Pattern, "bernoulli": Bernoulli, "fan_in": ConstantFanIn, "neuron": Neuron}
    if text in plain:
        return plain[text](text)
    if match := re.fullmatch(r"(\d+):(\d+)(-transposable)?", text):
        n, m = int(match[1]), int(match[2])
        refuse(not 0 < n < m, f"pattern {text!r}: N:M needs 0 < N < M")
        return (TransposableNM if match[3] else NM)(text, n, m)
    if match := re.fullmatch(r"block-(\d*[1-9]\d*)", text):
        return SquareBlocks(text, int(match[1]))
    raise ValueError(f"unknown pattern {text!r}: choose one of {PATTERNS}.")


def read_masks(masks: Mapping[str, Tensor] | str | PathLike[str] | None) -> dict[str, Tensor]:
    """Masks by parameter name, from a mapping or from a file. The file holds masks, or a state dict whose ``<param>_mask``
    entries are read. The file was written by torch.save or safetensors. From a file of torch.save only plain tensors are
    unpickled."""
    if masks is None or isinstance(masks, Mapping):
        return {name: torch.as_tensor(mask) for name, mask in (masks or {}).items()}
    path = Path(masks)
    refuse(not path.is_file(), f"{path} is not a file: name a file of masks or a state dict")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            if is_zipfile(path):  # torch does not compare the checksums that a zip archive has
                damaged = ZipFile(path).testzip()
                refuse(damaged is not None, f"{damaged} in it does not match its checksum")
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers may raise anything on a damaged or foreign file
        raise ValueError(f"{path} cannot be read as a state dict or file of masks: {first_line(error)}") from error
    refuse(
        not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()),
        f"{path} does not hold a state dict: pass a file with a state dict, or with masks by parameter name",
    )
    saved = {name: tensor for name, tensor in tensors.items() if name.endswith("_mask")}
    saved = saved or {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bool}
    refuse(not saved, f"{path} holds no masks: no entry is named <param>_mask or holds bools")
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in saved.items()}
