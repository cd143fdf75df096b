"""What a study is made of, as frozen dataclasses; no torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from smupar.lm.config import RunConfig


@dataclass(frozen=True)
class EngineConfig:
    """How the runs of a study are executed; the results are the same."""

    engine: Literal["auto", "serial", "stacked", "ray"] = "auto"
    """serial: one after the other; stacked: as many at once as fit; auto: the faster, measured; ray: on a cluster."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    address: str = "auto"
    """Of the Ray cluster; local starts one on this machine."""


@dataclass(frozen=True)
class TransferConfig:
    """One hyperparameter, swept on the dense proxy of base width and on targets over widths and sparsities."""

    run: RunConfig = field(default_factory=lambda: RunConfig(steps=200, valid_batches=1))
    axis: Literal["lr", "init_std", "alpha_input", "alpha_output"] = "lr"
    values: tuple[float, ...] = ()
    """Default: 2^-11 .. 2^-4 for lr, an eighth to eight times the tuned value for others."""
    rules: tuple[str, ...] = ("sp", "mup", "smupar")
    sparsities: tuple[float, ...] = (0.0, 0.75, 0.9375)
    """Of the targets."""
    widths: tuple[int, ...] = (256,)
    """Of the targets."""
    seeds: int = 1

    def __post_init__(self) -> None:
        for name in ("rules", "sparsities", "widths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.values and (len(set(self.values)) < 3 or min(self.values) <= 0):
            raise ValueError("values needs three or more different numbers above 0: an optimum has neighbours")
