"""Tunes lr, init_std, alpha_input and alpha_output together on the small dense proxy, by random search as in Table 3 of the
paper, or by TPE. Wide sparse models of the same rule use the best values (``--hps best.json``)."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smupar import __version__
from smupar.lm.config.fields import flat
from smupar.lm.config.run_config import RunConfig
from smupar.output.files import write_atomic
from smupar.output.json_files import read_object, sealed_json
from smupar.output.optional import optional
from smupar.output.page.document import Answer
from smupar.refusals import refuse
from smupar.study.config import TUNED, TuneConfig
from smupar.study.curves.curves import LOSS, Line, Panel, Point
from smupar.study.definition import Findings, Stage, StudyDefinition, best_in_words
from smupar.study.run_configs import with_fields
from smupar.study.store import Result, Study

FORMAT = "smupar-hps/1"
_SIZES = ("base_width", "base_depth")  # sizes of the proxy
_DIGITS = 6  # significant digits of a sampled value, which is rounded so that its run has the same id on every machine
_CLOSE = 0.01  # a loss this close to the best counts as equally good
_LEAST_SAMPLES = 16  # with fewer samples nothing can be said about what matters
_EDGE = 0.05  # share of a range's logarithm: a best value this close to an end calls for a wider range


@dataclass(frozen=True)
class Sensitivity:
    """How much one hyperparameter matters within its range."""

    # Share of the variance of the losses' ranks that a parabola in its logarithm explains, corrected for chance.
    explained: float
    low: float  # the smallest value among the samples whose loss is within 1 % of the best
    high: float


@dataclass(frozen=True)
class Tuned:
    """The best sample, and how sensitive the loss is to each hyperparameter."""

    config: TuneConfig
    best: Result
    num_samples: int  # all samples in the folder: an earlier search may have been longer
    num_diverged: int
    sensitivities: dict[str, Sensitivity]
    path: Path  # path of best.json

    @property
    def hps(self) -> dict[str, float]:
        return {name: getattr(self.best.config, name) for name in TUNED}

    @property
    def is_small(self) -> bool:
        """Whether there are too few samples to tell how much a hyperparameter matters."""
        return self.num_samples < _LEAST_SAMPLES

    def to_json(self) -> str:
        run, search = self.best.config, self.config
        source = {
            "rule": run.rule,
            "optimizer": run.optimizer,
            "width": run.model.width,
            "depth": run.model.depth,
            "steps": run.steps,
            "batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "data": run.data,
            "run": run.id,
            "loss": self.best.loss,
            "method": search.method,
            "num_samples": self.num_samples,
            "num_diverged": self.num_diverged,
            "version": __version__,
        }
        return sealed_json(
            {
                "format": FORMAT,
                **self.hps,
                "base_width": run.base_width,
                "base_depth": run.base_depth or run.model.depth,
                "source": source,
                "sensitivity": {name: asdict(sensitivity) for name, sensitivity in self.sensitivities.items()},
            }
        )

    def explain(self) -> str:
        run = self.best.config
        lines = [
            f"loss {self.best.loss:.4f} nats per token, the best of {self.num_samples} samples "
            f"({self.num_diverged} diverged), rule {run.rule}, width {run.model.width}, depth {run.model.depth}",
            f"{'':<14}{'best':>9}" + ("" if self.is_small else f"   {'within 1 % of it':<20}  matters"),
        ]
        for name, value in self.hps.items():
            sensitivity = self.sensitivities[name]
            edge = _edge(value, self.config.ranges[name])
            note = "" if edge is None else f"  best near the {edge} end: widen --{name.replace('_', '-')}-range"
            close = f"{sensitivity.low:.3g} .. {sensitivity.high:.3g}"
            shown = "" if self.is_small else f"   {close:<20}  {sensitivity.explained:>6.0%}"
            lines.append(f"{name:<14}{value:>9.4g}{shown}{note}")
        if self.is_small:
            lines.append(
                f"{self.num_samples} samples are too few to tell which hyperparameter matters: at least {_LEAST_SAMPLES} are "
                "needed"
            )
        return "\n".join([*lines, f"use them with --hps {self.path}"])


def define_search(config: TuneConfig) -> StudyDefinition:
    """Defines the search. study.json gets the settings that decide which samples are drawn, as one flat object. Their number is
    left out, so a search can be extended. Random search also leaves out TPE's settings."""
    unused = {"num_samples", *TUNED} | ({"round_size"} if config.method == "random" else set())
    values = asdict(config)
    run = values.pop("run")
    stored = {"kind": "tune", **{name: value for name, value in flat({**values, **run}).items() if name not in unused}}
    samples: list[Stage] = [lambda study: propose(config, {result.config.id: result.loss for result in study.results()})]
    return replace(search_from_json(stored), stages=samples)


def search_from_json(stored: dict[str, Any]) -> StudyDefinition:
    """Reads a search from study.json, which does not hold the number of samples."""
    return StudyDefinition(stored, (), lambda study: _read(study.results()), title="Search on the dense proxy")


def _read(results: Sequence[Result]) -> Findings:
    ended = [result for result in results if math.isfinite(result.loss)]
    headline = (
        f"The best of {len(results)} samples has a loss of {min(map(_loss, ended)):.4f}." if ended else "Every run diverged."
    )
    return Findings(
        best_in_words(results), tune_panels(results), results, headline, [_answer(name, ended) for name in TUNED if ended]
    )


def _loss(result: Result) -> float:
    return result.loss


def _answer(name: str, ended: Sequence[Result]) -> Answer:
    """The card of a hyperparameter: its best value, and the range of samples that are as good."""
    best = min(ended, key=_loss)
    close = [getattr(result.config, name) for result in ended if result.loss <= best.loss * (1 + _CLOSE)]
    near = f"{len(close)} samples lie within 1 % of the best loss, from {min(close):.3g} to {max(close):.3g}."
    return {
        "name": name.replace("_", " ").replace("lr", "learning rate"),
        "value": f"{getattr(best.config, name):.4g}",
        "text": near if len(close) > 1 else "No other sample lies within 1 % of the best loss.",
        "tone": "plain",
        "rule": "",
    }


def tune_panels(results: Sequence[Result]) -> list[Panel]:
    """Loss over each hyperparameter, with one point per sample."""
    best = min(results, key=lambda result: result.loss).config
    panels = []
    for name in TUNED:
        points = tuple(Point(getattr(result.config, name), result.loss, runs=(result.config.id,)) for result in results)
        panels.append(Panel(name, name, LOSS, (Line("samples", points, 0.3, best=getattr(best, name), joined=False),)))
    return panels


def propose(config: TuneConfig, losses: Mapping[str, float] | None = None) -> list[RunConfig]:
    """The samples to run: all for random search; for TPE, those up to the first unfinished round. ``losses`` has the losses of
    finished runs by id, infinite for diverged runs. The same arguments give the same samples."""
    if config.method == "random":
        return [_random_sample(config, index) for index in range(config.num_samples)]
    return _tpe_samples(config, losses or {})


def _random_sample(config: TuneConfig, index: int) -> RunConfig:
    # A string is hashed, so that samples with close indices are independent.
    draw = random.Random(f"{config.search_seed} {index}")
    ranges = config.ranges.items()
    return with_fields(
        config.run, {name: _rounded(low * (high / low) ** draw.random(), low, high) for name, (low, high) in ranges}
    )


def _tpe_samples(config: TuneConfig, losses: Mapping[str, float]) -> list[RunConfig]:
    """Asks TPE for one round after another, and tells it the losses of each."""
    optuna = optional("optuna", "--method tpe", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=config.search_seed))
    spaces = {name: optuna.distributions.FloatDistribution(*ends, log=True) for name, ends in config.ranges.items()}
    samples: list[RunConfig] = []
    while len(samples) < config.num_samples:
        trials = [search.ask(spaces) for _ in range(min(config.round_size, config.num_samples - len(samples)))]
        values = [{name: _rounded(trial.params[name], *config.ranges[name]) for name in TUNED} for trial in trials]
        in_round = [with_fields(config.run, fields) for fields in values]
        samples += in_round
        if any(sample.id not in losses for sample in in_round):
            break
        for trial, sample in zip(trials, in_round, strict=True):
            search.tell(trial, losses[sample.id])
    return samples


def _rounded(value: float, low: float, high: float) -> float:
    return min(max(float(f"{value:.{_DIGITS}g}"), low), high)


def write_best(config: TuneConfig, study: Study) -> Tuned:
    """Writes the best sample and the sensitivities into best.json in the study's folder."""
    results = study.results()
    losses = [result.loss for result in results]
    refuse(
        not any(map(math.isfinite, losses)),
        f"all {len(losses)} samples diverged: lower --lr-range, now {config.lr_range[0]:g} .. {config.lr_range[1]:g}",
    )
    best = min(results, key=lambda result: result.loss)
    sensitivities = {name: sensitivity([getattr(result.config, name) for result in results], losses) for name in TUNED}
    tuned = Tuned(config, best, len(results), sum(map(math.isinf, losses)), sensitivities, study.folder / "best.json")
    write_atomic(tuned.path, tuned.to_json())
    return tuned


def sensitivity(values: Sequence[float], losses: Sequence[float]) -> Sensitivity:
    """How sensitive the loss is to one hyperparameter. It uses ranks, because losses close to divergence would dominate."""
    close = [value for value, loss in zip(values, losses, strict=True) if loss <= min(losses) * (1 + _CLOSE)]
    return Sensitivity(_explained(np.log(np.asarray(values)), _ranks(losses)), min(close), max(close))


def _explained(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """The R² of a parabola, adjusted for its two coefficients; 0 if there are too few points."""
    num, variance = len(x), float(y.var())
    if num < 4 or variance == 0 or np.ptp(x) == 0:
        return 0.0
    x = (x - x.mean()) / x.std()
    design = np.stack([np.ones(num), x, x**2], 1)
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    unexplained = float((residual**2).mean()) / variance
    return max(0.0, 1 - unexplained * (num - 1) / (num - 3))


def _ranks(losses: Sequence[float]) -> np.ndarray[Any, Any]:
    """The rank of each loss. Equal losses, such as those of diverged runs, share the mean of their ranks."""
    _, inverse, counts = np.unique(losses, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _edge(value: float, ends: tuple[float, float]) -> str | None:
    place = math.log(value / ends[0]) / math.log(ends[1] / ends[0])
    return "lower" if place < _EDGE else "upper" if place > 1 - _EDGE else None


def doubts(path: str | Path, *, optimizer: str, rule: str) -> list[str]:
    """Why the hyperparameters in a best.json may not fit a run."""
    source, reasons = _read_best(path)["source"], []
    if source.get("optimizer", optimizer).lower() != optimizer.lower():
        reasons.append(
            f"{path} was tuned with {source['optimizer']}, this run uses {optimizer}, which needs another learning rate"
        )
    if (source.get("rule", rule) == "sp") != (rule == "sp"):  # on a dense proxy all rules but SP are the same
        reasons.append(f"{path} was tuned under {source['rule']}, this run uses {rule}: the values may not fit it")
    return reasons


def read_hps(path: str | Path) -> dict[str, float]:
    """Reads the hyperparameters in a best.json, given the file or its study's folder. They are fields of a run, to be set
    together. base_width and base_depth, at which they were tuned, are among them; earlier versions did not write the depth."""
    values = _read_best(path)
    sizes = {name: int(values[name]) for name in _SIZES if name in values}
    return {**{name: float(values[name]) for name in TUNED}, **sizes}


def _read_best(path: str | Path) -> dict[str, Any]:
    file, remedy = Path(path) / "best.json" if Path(path).is_dir() else Path(path), "`smupar tune` writes it again"
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}: `smupar tune` writes it when its search is done")
    values = read_object(file, remedy=remedy, may_be_edited=True)
    refuse(
        values.get("format") != FORMAT,
        f"{file} was not written by `smupar tune` of this version: it does not say {FORMAT}",
    )
    values.setdefault("source", {})
    wrong = _wrong_field(values)
    refuse(wrong is not None, f"{file} is damaged: {wrong}: {remedy}")
    return values


def _wrong_field(values: Mapping[str, Any]) -> str | None:
    """What is wrong with the first field that a best.json cannot have; None if all are usable."""
    sizes = [name for name in _SIZES if name in values]
    for name in (*TUNED, "base_width", *sizes):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            return f"{name} must be a number above 0, got {_short(value)}"
    for name in sizes:
        if values[name] % 1 != 0:
            return f"{name} must be a whole number"
    source = values["source"]
    if not isinstance(source, dict):
        return f"source must have fields, got {_short(source)}"
    for name in ("optimizer", "rule"):
        value = source.get(name, "")
        if not isinstance(value, str):
            return f"{name} must be text, got {_short(value)}"
    return None


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number that is too large"
    return text if len(text) <= 40 else f"{text[:37]}..."
