"""The configurations of studies, as frozen dataclasses. This file does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.config.validation import check_not_negative, check_not_too_large
from smupar.refusals import refuse

# The hyperparameters that are tuned on a dense proxy and transfer to other models.
Tuned = Literal["lr", "init_std", "alpha_input", "alpha_output"]
TUNED: tuple[str, ...] = get_args(Tuned)
# The runs of a study are shorter than the demo.
SHORT: dict[str, Any] = {"steps": 200, "warmup": None, "valid_batches": 1}

EngineName = Literal["auto", "serial", "stacked", "ray"]


@dataclass(frozen=True)
class EngineConfig:
    """How the runs of a study are executed. The results depend on it only up to rounding."""

    engine: EngineName = "auto"
    """serial: one run after the other. stacked: as many at once as fit. auto: the faster of these two. ray: on a cluster."""
    device: str = "auto"
    """auto: a GPU if there is one."""
    threads: int = 0
    """Threads of the CPU; 0: one for each core, or OMP_NUM_THREADS. Use fewer if other jobs run on this machine."""
    address: str = "auto"
    """Address of the Ray cluster; local starts a cluster on this machine."""

    def __post_init__(self) -> None:
        check_not_negative(self, "threads")


@dataclass(frozen=True)
class TransferConfig:
    """One hyperparameter, swept on the dense proxy of base width and base depth, and on targets over widths, sparsities and
    depths."""

    run: RunConfig = field(default_factory=lambda: RunConfig(**SHORT))
    axis: Tuned = "lr"
    """Hyperparameter to sweep."""
    values: tuple[float, ...] = ()
    """Values to sweep. Default: 2^-11 .. 2^-4 for lr, and 1/8 to 8 times the tuned value for others."""
    rules: tuple[str, ...] = ("sp", "mup", "smupar")
    """Rules to compare: the rules of `smupar train --rule`, and two more.
    measured: SmuPar's init, with learning rates at which updates have the same effect as in the proxy's best run.
    moment, only with --dynamic gmp or imp: SmuPar with the current density (smupar uses the final density, as in the paper)."""
    sparsities: tuple[float, ...] = (0.0, 0.75, 0.9375)
    """Sparsities of the targets."""
    widths: tuple[int, ...] = (256,)
    """Widths of the targets."""
    depths: tuple[int, ...] = ()
    """Depths of the targets. Default: --depth alone. The proxy has --base-depth, by default the smallest of these."""
    seeds: int = 1
    """Number of seeds at the best value of each curve and its two neighbours; other values have one seed."""
    proxy_depth: int | None = None
    """Depth of the proxy. Default: the depth of the targets."""
    proxy_steps: int | None = None
    """Steps of the proxy's runs. Default: the steps of a target's run, or with --dynamic imp the steps of one round."""

    def __post_init__(self) -> None:
        for name in ("rules", "sparsities", "widths"):
            refuse(not getattr(self, name), f"{name} is empty: give at least one")
        refuse(
            "moment" in self.rules and not self.run.prunes,
            "moment is SmuPar with the current density of masks that move: it needs --dynamic gmp or imp",
        )
        refuse(
            self.seeds < 1 or min(self.widths) < 1,
            f"seeds and widths must be at least 1, got {self.seeds} and {min(self.widths)}",
        )
        check_not_too_large("seeds", self.seeds)
        check_not_too_large("width", *self.widths)
        check_not_too_large("depth", self.proxy_depth or 1, *self.depths)
        refuse(
            self.depths and min(self.depths) < (self.run.base_depth or 1),
            f"depths must be whole numbers, at least the base depth {self.run.base_depth or 1}, got {self.depths}: tune on a "
            "model that is not deeper than those you train",
        )
        refuse(
            self.depths and self.proxy_depth is not None,
            "with --depths the proxy has the base depth: set --base-depth, and leave out --proxy-depth",
        )
        check_not_too_large("steps", self.proxy_steps or 1)
        refuse(
            self.values and (len(set(self.values)) < 3 or min(self.values) <= 0),
            "values needs three or more different numbers above 0: an optimum must have two neighbours",
        )

    @property
    def normalised(self) -> TransferConfig:
        """The same study with its default values filled in, and without duplicates."""
        if self.axis == "lr":
            values = [2.0**exponent for exponent in range(-11, -3)]
        else:
            values = [getattr(self.run, self.axis) * 2.0**exponent for exponent in range(-3, 4)]
        return replace(
            self,
            run=self.run.normalised,
            values=tuple(sorted(set(self.values or values))),
            rules=tuple(dict.fromkeys(self.rules)),
            sparsities=tuple(dict.fromkeys(self.sparsities)),
            widths=tuple(dict.fromkeys(self.widths)),
            depths=tuple(dict.fromkeys(self.depths)),
        )

    @property
    def base_depth(self) -> int | None:
        """The depth of the proxy if factors follow the depth, else None."""
        return self.run.base_depth or (min(self.depths) if self.depths else None)


@dataclass(frozen=True)
class TuneConfig:
    """A search for lr, init_std, alpha_input and alpha_output on a small dense proxy, as in Table 3 of the paper."""

    run: RunConfig = field(default_factory=lambda: RunConfig(model=ModelConfig(width=64), sparsity=0.0, **SHORT))
    """The proxy; its own values of the searched hyperparameters do not matter."""
    num_samples: int = 350
    """Number of runs. You can extend a search later; it keeps its finished runs."""
    method: Literal["random", "tpe"] = "random"
    """random: independent samples; tpe: Optuna's sampler, which learns from earlier rounds."""
    # The paper does not print its ranges. These are ours, around its best values. All samples are log-uniform.
    lr_range: tuple[float, float] = (2**-10, 2**-3)
    """Range of the learning rate."""
    init_std_range: tuple[float, float] = (0.02, 0.35)
    """Range of the init std."""
    alpha_input_range: tuple[float, float] = (1.0, 30.0)
    """Range of the factor on the embedded input."""
    alpha_output_range: tuple[float, float] = (0.1, 10.0)
    """Range of the factor on the logits."""
    search_seed: int = 0
    """Seed of the samples; --seed is the seed of the runs."""
    round_size: int = 16
    """For tpe: how many samples run at once."""

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("round_size", 1), ("search_seed", 0)):
            refuse(getattr(self, name) < least, f"{name} must be at least {least}, got {getattr(self, name)}")
            check_not_too_large(name, getattr(self, name))
        refuse(self.method not in ("random", "tpe"), f"method must be random or tpe, got {self.method!r}")
        for name, (low, high) in self.ranges.items():
            refuse(
                not 0 < low < high < math.inf,
                f"{name}_range must be two numbers above 0, the smaller first, got {low:g} and {high:g}",
            )

    @property
    def normalised(self) -> TuneConfig:
        return replace(self, run=self.run.normalised)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        return {name: getattr(self, f"{name}_range") for name in TUNED}
