"""Table 4 of the paper as data, and its reduction to smaller scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from smupar.lm.config.presets import TABLE_3
from smupar.lm.config.run_config import STANDARD_LIBRARY, ModelConfig, RunConfig
from smupar.output.tables import aligned
from smupar.study.conventions import sp_init_std

ScaleName = Literal["cpu", "small", "paper"]


@dataclass(frozen=True)
class Printed:
    """A row of Table 4, as printed. None stands for a value that varies in the figure."""

    figures: tuple[str, ...]
    width: int | None
    depth: int
    head_dim: int
    batch_size: int
    lr: dict[str, float] | None
    init_std: dict[str, float] | None
    alphas: tuple[float, float] | None
    schedule: str
    warmup: int
    steps: int
    tokens: str


_INIT = {"sp": 2.166e-2, "mup": 0.087, "smupar": 0.087}
_INIT_02 = {"sp": 0.02, "mup": 0.087, "smupar": 0.087}
_ALPHAS = (9.1705, 1.095)
TABLE_4: dict[str, Printed] = {
    "sweep": Printed(
        ("fig01", "fig06", "fig08", "fig14"), 4096, 2, 64, 128, None, _INIT, _ALPHAS, "10x linear", 116, 1169, "306M"
    ),
    "init": Printed(("fig07", "fig13"), 4096, 2, 64, 8, {"all": 1.62e-2}, None, _ALPHAS, "constant", 0, 100, "1.6M"),
    "pretraining": Printed(
        ("fig03", "tab02"),
        2048,
        10,
        64,
        504,
        {"sp": 2e-4, "mup": 1.62e-2, "smupar": 1.62e-2},
        _INIT_02,
        _ALPHAS,
        "to zero",
        1175,
        11752,
        "12.13B",
    ),
    "coordinates": Printed(
        ("fig05",),
        2048,
        2,
        32,
        4,
        {"sp": 1.68e-2, "mup": 1.62e-2, "smupar": 1.62e-2},
        {"all": 0.101},
        (11.22, 1.0),
        "constant",
        0,
        10,
        "82K",
    ),
    "iso": Printed(("fig09",), None, 2, 64, 128, None, _INIT_02, _ALPHAS, "10x linear", 116, 1169, "306M"),
    "iso-pretraining": Printed(
        ("fig10",),
        None,
        10,
        64,
        256,
        {"sp": 6e-4, "mup": 1.62e-2, "smupar": 1.62e-2},
        _INIT_02,
        _ALPHAS,
        "10x linear",
        190,
        1907,
        "1B",
    ),
    "wpn": Printed(("fig11",), None, 2, 64, 128, None, {"sp": 0.087}, None, "10x linear", 116, 1169, "306M"),
    "dynamic": Printed(("fig12",), 1024, 2, 64, 128, None, _INIT, _ALPHAS, "10x linear", 116, 1169, "306M"),
}
# The paper does not print betas, epsilon, decay, clipping, the MLP's width, the vocabulary, the grids of its sweeps, the widths
# of its Iso figures, or when RigL and GMP stop. Betas, the amount of decay and clipping come from the paper's code. The rest is
# our choice: decay that is independent of the learning rate, an MLP of 8/3 of the width, GPT-2's vocabulary, and the sizes
# below.
WEIGHT_DECAY, CLIP = 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """The size of one experiment at one scale."""

    width: int
    depth: int
    batch_size: int
    seq_len: int
    steps: int
    sparsities: tuple[float, ...]
    log2_values: tuple[float, ...] = ()  # log2 of the swept hyperparameter's values
    seeds: int = 1


_PAPER_SPARSITIES = (0.0, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.9921875)
_RATES = tuple(float(exponent) for exponent in range(-11, -3))
_SIZES: dict[str, dict[str, Size]] = {
    "sweep": {
        "paper": Size(4096, 2, 128, 2048, 1169, _PAPER_SPARSITIES, tuple(map(float, range(-13, -2))), 3),
        "small": Size(1024, 2, 32, 256, 500, (0.0, 0.75, 0.9375, 0.984375), _RATES, 3),
        "cpu": Size(128, 2, 8, 64, 100, (0.0, 0.75, 0.9375), _RATES),
    },
    "init": {
        "paper": Size(4096, 2, 8, 2048, 100, _PAPER_SPARSITIES, tuple(map(float, range(-8, 3))), 3),
        "small": Size(1024, 2, 32, 256, 100, (0.0, 0.75, 0.9375, 0.984375), tuple(map(float, range(-8, 2))), 3),
        "cpu": Size(128, 2, 8, 64, 40, (0.0, 0.75, 0.9375), tuple(map(float, range(-7, 1)))),
    },
    "pretraining": {
        "paper": Size(2048, 10, 504, 2048, 11752, _PAPER_SPARSITIES),
        "small": Size(2048, 2, 32, 256, 2000, (0.0, 0.875, 0.96875, 0.9921875), seeds=3),
        "cpu": Size(128, 4, 8, 64, 100, (0.5, 0.75, 0.875, 0.9375)),
    },
    "coordinates": {
        "paper": Size(2048, 2, 4, 2048, 10, (0.0, 0.5, 0.75, 0.875, 0.9375, 0.96875), seeds=10),
        "small": Size(1024, 2, 4, 256, 10, (0.0, 0.5, 0.75, 0.875, 0.9375, 0.96875), seeds=5),
        "cpu": Size(256, 2, 8, 64, 10, (0.0, 0.75, 0.9375), seeds=3),
    },
    "iso": {
        "paper": Size(1024, 2, 128, 2048, 1169, (0.0, 0.5, 0.75, 0.875, 0.9375), tuple(map(float, range(-13, -2))), 3),
        "small": Size(512, 2, 32, 256, 500, (0.0, 0.5, 0.75, 0.875, 0.9375), _RATES, 3),
        "cpu": Size(64, 2, 8, 64, 80, (0.0, 0.5, 0.75), (-9.0, -8.0, -7.0, -6.0, -5.0, -4.0)),
    },
    "iso-pretraining": {
        "paper": Size(768, 10, 256, 2048, 1907, (0.0, 0.5, 0.75, 0.875)),
        "small": Size(384, 6, 64, 512, 1000, (0.0, 0.5, 0.75, 0.875)),
        "cpu": Size(64, 4, 8, 64, 120, (0.0, 0.5, 0.75)),
    },
    "wpn": {
        "paper": Size(512, 2, 128, 2048, 1169, (0.0, 0.5, 0.75, 0.875), tuple(map(float, range(-11, -2))), 3),
        "small": Size(256, 2, 32, 256, 500, (0.0, 0.5, 0.75, 0.875), _RATES, 3),
        "cpu": Size(64, 2, 8, 64, 80, (0.0, 0.5, 0.75), (-10.0, -9.0, -8.0, -7.0, -6.0, -5.0)),
    },
    "dynamic": {
        "paper": Size(1024, 2, 128, 2048, 1169, _PAPER_SPARSITIES[:-1], tuple(map(float, range(-13, -2))), 3),
        "small": Size(1024, 2, 32, 256, 500, (0.0, 0.75, 0.9375, 0.984375), _RATES[1:], 3),
        "cpu": Size(128, 2, 8, 64, 60, (0.0, 0.9375), (-9.0, -8.0, -7.0, -6.0, -5.0)),
    },
}
# Scale small shares its runs with the studies of docs/lab/measured-updates.md, which use rounded values of init and alpha.
_SMALL_INIT, _SMALL_ALPHA_INPUT = 0.0866, 9.17
# Width and best learning rate of a dense model under SP, from Figure 6 at each scale. SP's best rate falls as 1 / width. The
# paper's printed rate for pretraining was tuned for wider models and far longer runs, and would make SP look bad here.
_SP_TUNED = {
    "pretraining": {"cpu": (128, 2**-8)},  # at scale small, Figure 3 sweeps the rate
    "iso-pretraining": {"small": (1024, 2**-9), "cpu": (128, 2**-8)},
}
_HEAD_DIM = {"cpu": 32, "small": 64, "paper": 64}
_BASE = {"cpu": 64, "small": 256, "paper": 256}
_SCHEDULES = {"10x linear": "linear", "constant": "constant", "to zero": "linear-to-zero"}


@dataclass(frozen=True)
class Scale:
    """A scale of the experiments: cpu (minutes on two cores), small (minutes on one GPU), or paper (as printed)."""

    name: ScaleName
    data: str = STANDARD_LIBRARY
    vocab_size: int = 256
    weight_decay: float = WEIGHT_DECAY
    clip: float | None = CLIP

    @property
    def folder(self) -> str:
        """The name of the folder for the scale's runs and results."""
        parts: list[str] = [self.name]
        if self.weight_decay != WEIGHT_DECAY:
            parts.append(f"decay-{self.weight_decay:g}")
        if self.clip != CLIP:
            parts.append("no-clip" if self.clip is None else f"clip-{self.clip:g}")
        return "-".join(parts)

    def size(self, experiment: str) -> Size:
        return _SIZES[experiment][self.name]

    def run(self, experiment: str, *, rule: str = "smupar", width: int | None = None, sparsity: float = 0.0) -> RunConfig:
        """A run of an experiment of Table 4 with the printed hyperparameters, reduced to this scale."""
        printed, size = TABLE_4[experiment], self.size(experiment)
        width, base = width or size.width, _BASE[self.name]
        printed_warmup = printed.warmup / printed.steps
        head_dim = 32 if experiment == "coordinates" else _HEAD_DIM[self.name]
        alphas = printed.alphas or (1.0, 1.0)
        if self.name == "small" and alphas == _ALPHAS:
            alphas = (_SMALL_ALPHA_INPUT, alphas[1])
        run = RunConfig(
            model=ModelConfig(
                width=width,
                depth=size.depth,
                head_dim=head_dim,
                vocab_size=self.vocab_size,
                residual_factor=self.name == "small",
            ),
            base_width=base,
            rule=rule,
            sparsity=sparsity,
            lr=self._lr(experiment, rule, width),
            init_std=self._init_std(experiment, rule, width),
            alpha_input=alphas[0],
            alpha_output=alphas[1],
            schedule=_SCHEDULES[printed.schedule],  # type: ignore[arg-type]
            warmup=None if round(printed_warmup, 1) == 0.1 else round(printed_warmup * size.steps),
            steps=size.steps,
            batch_size=size.batch_size,
            seq_len=size.seq_len,
            weight_decay=self.weight_decay,
            clip=self.clip,
            dtype="fp32" if self.name == "cpu" else "bf16",
            data=self.data,
            valid_batches=1 if printed.lr is None else 20,
        )
        if self.name == "paper":
            run = replace(run, model=replace(run.model, ff_multiple=1, biases=True))
        return run

    def _lr(self, experiment: str, rule: str, width: int) -> float:
        tuned = _SP_TUNED.get(experiment, {}).get(self.name)
        if tuned and rule == "sp":
            tuned_width, lr = tuned
            return lr * tuned_width / width
        return _for_rule(TABLE_4[experiment].lr, rule, TABLE_3["lr"])

    def _init_std(self, experiment: str, rule: str, width: int) -> float:
        """The printed init std. Where SP's init std depends on the width, it is converted to the width of the scale."""
        printed = TABLE_4[experiment]
        value = _for_rule(printed.init_std, rule, TABLE_3["init_std"])
        if self.name == "paper":
            return value
        tuned = _SMALL_INIT if self.name == "small" else TABLE_3["init_std"]
        if rule == "sp" and value == _INIT["sp"]:
            return sp_init_std(tuned, _BASE[self.name], width)
        if rule == "sp" and value == _INIT_02["sp"] and printed.width is not None:
            return sp_init_std(0.02, printed.width, width)
        return tuned if self.name == "small" and value == _INIT["smupar"] else value


def _for_rule(values: dict[str, float] | None, rule: str, default: float) -> float:
    if values is None:
        return default
    printed = rule if rule in values else "smupar"  # the ablations use SmuPar's values
    return values.get(printed, values.get("all", default))


def iso_width(width: int, sparsity: float, head_dim: int) -> int:
    """The width at which a sparse model keeps as many hidden weights as the dense model of ``width`` (Iso-Parameter), rounded
    to whole heads."""
    return max(1, round(width / math.sqrt(1 - sparsity) / head_dim)) * head_dim


def wpn_width(width: int, sparsity: float) -> int:
    """The width at which a sparse model keeps as many weights per neuron as the dense model of ``width`` (Iso-WPN)."""
    return round(width / (1 - sparsity))


def table_4() -> str:
    """Table 4 as text, and how the smaller scales reduce it."""
    header = ["experiment", "figures", "scale", "width", "depth", "head", "batch x T", "steps", "LR", "init std", "schedule"]
    lines = [header]
    for name, printed in TABLE_4.items():
        for scale in ("paper", "small", "cpu"):
            size = _SIZES[name][scale]
            head = 32 if name == "coordinates" else _HEAD_DIM[scale]
            lines.append(
                [
                    name,
                    " ".join(printed.figures),
                    scale,
                    str(size.width) + ("" if printed.width else " and wider"),
                    *(str(size.depth), str(head), f"{size.batch_size} x {size.seq_len}", str(size.steps)),
                    _words(_values_at(name, scale, printed.lr, "lr"), size),
                    _words(_values_at(name, scale, printed.init_std, "init_std"), size),
                    f"{printed.schedule}, warm-up {round(printed.warmup / printed.steps * size.steps)}",
                ]
            )
    about = RunConfig()
    every = (
        f"adamw, betas {about.betas}, epsilon {about.eps:g}, {about.decay} weight decay {WEIGHT_DECAY:g}, clipping at {CLIP:g}"
    )
    return f"{aligned(lines)}\n\nunless a page says otherwise: {every}"


def _values_at(experiment: str, scale: str, printed: dict[str, float] | None, name: str) -> dict[str, float] | None:
    """The value that a scale uses for a printed hyperparameter, at the experiment's width."""
    if printed is None:
        return None
    at = Scale(scale)  # type: ignore[arg-type]
    rules = {"all": "smupar", **{rule: rule for rule in printed if rule != "all"}}
    return {label: getattr(at.run(experiment, rule=rules[label]), name) for label in printed}


def _words(values: dict[str, float] | None, size: Size) -> str:
    if values is None:
        return f"2^{size.log2_values[0]:g} .. 2^{size.log2_values[-1]:g}"
    return ", ".join(f"{value:.4g}" if rule == "all" else f"{rule} {value:.4g}" for rule, value in values.items())
