"""Does a hyperparameter transfer? Sweeps it on the dense proxy and on wide sparse targets under several rules, and says how far
each rule's optimum moved and what the proxy's optimum costs on the targets."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smupar.lm.config.run import RunConfig
from smupar.lm.run.folder import TRACE_FILE
from smupar.output.files import write_atomic
from smupar.rules import get_rule
from smupar.study.config import TransferConfig
from smupar.study.curves import LOSS, Panel, Point, Series
from smupar.study.kind import Found, Kind, Stage
from smupar.study.optima import Curve, move_in_words
from smupar.study.space import with_fields
from smupar.study.store import Result, Study

MEASURED, MOMENT = "measured", "moment"
_OURS = {MEASURED: "measured updates", MOMENT: "SmuPar, density of the moment"}
_NAMES = {"lr": "learning rate", "init_std": "init std", "alpha_input": "alpha_input", "alpha_output": "alpha_output"}


@dataclass(frozen=True)
class Verdict:
    """How one rule did."""

    rule: str
    proxy: Curve
    targets: tuple[Curve, ...]

    @property
    def moved_words(self) -> str:
        return move_in_words((self.proxy, *self.targets))

    @property
    def farthest(self) -> Curve:
        """The sparsest target, of the widest."""
        return max(self.targets, key=lambda curve: (curve.sparsity, curve.width))


def transfer(config: TransferConfig) -> Kind:
    config = replace(config, values=tuple(axis_values(config)))  # also default ones are remembered, and may be added to

    def read(study: Study) -> Found:
        results = study.results()
        verdicts = analyse(config, results, followed_trace(config, study))
        return Found(sentence(config, verdicts), panels(config, verdicts), results)

    stages: list[Stage] = [
        lambda study: proposals(config),
        lambda study: more_seeds(study, proposals(config), config.axis, config.seeds),
        lambda study: measured_proposals(config, study),
        lambda study: more_seeds(study, measured_proposals(config, study), config.axis, config.seeds),
    ]
    return Kind({"kind": "transfer", **asdict(config)}, stages, read, needs_all_runs=True)


def read_transfer(definition: dict[str, Any]) -> Kind:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in definition.items() if name != "kind"
    }
    run = RunConfig.from_json(json.dumps(values.pop("run")))
    return transfer(TransferConfig(run=run, **values))


def more_seeds(study: Study, first: Sequence[RunConfig], axis: str, seeds: int) -> list[RunConfig]:
    """Further seeds where they count: at the best value of every curve and its two neighbours. Which is best their own results
    may change, so a study asks again until none is missing."""
    curves: dict[str, list[RunConfig]] = {}
    for config in first:
        curves.setdefault(with_fields(config, {axis: 1.0}).id, []).append(config)
    runs = []
    for curve in curves.values():
        curve.sort(key=lambda config: getattr(config, axis))
        own = [[replace(config, seed=config.seed + number) for number in range(seeds)] for config in curve]
        known = [study.results(same) for same in own]
        means = [sum(result.loss for result in some) / len(some) if some else math.inf for some in known]
        best = min(range(len(curve)), key=lambda index: means[index])
        for index, same in enumerate(own):
            there = {result.config.id for result in known[index]}
            runs += [config for config in same[1:] if abs(index - best) <= 1 or config.id in there]
    return runs


def proposals(config: TransferConfig) -> list[RunConfig]:
    """Every run that needs no trace, with the first seed. A dense model under SmuPar is the one under muP: it is run once."""
    return _proposed(config, [wanted for wanted in _curves_wanted(config) if wanted.rule != MEASURED or wanted.is_proxy])


def measured_proposals(config: TransferConfig, study: Study) -> list[RunConfig]:
    """The runs that follow the updates of the proxy at its best value, once that is known."""
    trace = followed_trace(config, study)
    targets = [wanted for wanted in _curves_wanted(config) if wanted.rule == MEASURED and not wanted.is_proxy]
    return _proposed(config, targets, trace) if trace else []


def followed_trace(config: TransferConfig, study: Study) -> str | None:
    """That of the proxy at its best value, if anything follows it. As a study grows it may become another."""
    if MEASURED not in config.rules:
        return None
    wanted = _Wanted(MEASURED, config.run.base_width, 0.0, is_proxy=True)
    proxy = _curve(config, {result.config.id: result for result in study.results()}, wanted)
    if proxy.diverged:
        raise ValueError(f"all runs of the proxy diverged: sweep smaller values of {config.axis} (--values)")
    return str(write_trace(study, _run(config, wanted, proxy.best_value)))


def write_trace(study: Study, proxy: RunConfig) -> Path:
    """The trace of a finished run of the study, in the study's folder, under a name made from its content."""
    text = (study.runs / proxy.id / TRACE_FILE).read_text()
    path = study.folder.resolve() / f"proxy-{hashlib.sha256(text.encode()).hexdigest()[:8]}.trace.json"
    if not path.exists():
        write_atomic(path, text)
    return path


def _proposed(config: TransferConfig, curves: Iterable[_Wanted], trace: str | None = None) -> list[RunConfig]:
    runs = [_run(config, wanted, value, trace) for wanted in curves for value in axis_values(config)]
    return list({run.id: run for run in runs}.values())


def axis_values(config: TransferConfig) -> list[float]:
    if config.values:
        return sorted(config.values)
    if config.axis == "lr":
        return [2.0**exponent for exponent in range(-11, -3)]
    tuned = getattr(config.run, config.axis)
    return [tuned * 2.0**exponent for exponent in range(-3, 4)]


def analyse(config: TransferConfig, results: Iterable[Result], trace: str | None = None) -> list[Verdict]:
    """One verdict per rule, from the results that are there; ``trace``: the one that measured updates follow."""
    by_id = {result.config.id: result for result in results}
    verdicts = []
    for rule in config.normalised.rules:
        proxy, *targets = (_curve(config, by_id, wanted, trace) for wanted in _curves_wanted(config) if wanted.rule == rule)
        if proxy.diverged:
            raise ValueError(f"all runs of {rule} on the proxy diverged: sweep smaller values of {config.axis} (--values)")
        verdicts.append(Verdict(rule, proxy, tuple(targets)))
    return verdicts


def sentence(config: TransferConfig, verdicts: Sequence[Verdict]) -> str:
    """The study in one sentence, with the numbers it measured, and what to doubt about them."""
    name = _NAMES[config.axis]
    moves = ", ".join(f"{_whose(_title(one.rule))} {one.moved_words}" for one in verdicts)
    first = f"From the dense proxy of width {config.run.base_width} the best {name} moved: {moves}"
    far = verdicts[0].farthest
    costs = ", ".join(f"{_title(one.rule)} {_percent(one.farthest.excess(one.proxy.best_value))}" for one in verdicts)
    second = f"at {far.sparsity:.4g} sparsity and width {far.width} the proxy's best swept {name} costs {costs}"
    curves = [curve for one in verdicts for curve in (one.proxy, *one.targets)]
    lost = _named(curve for curve in curves if curve.diverged)
    edges = _named(curve for curve in curves if curve.on_edge and not curve.diverged)
    doubts = [f"No run ended, so there is no best {name}: {lost}."] if lost else []
    doubts += [f"On the edge of the grid, so the best may lie beyond it (more --values would tell): {edges}."] if edges else []
    return " ".join([f"{first}; {second}.", *doubts])


def _named(curves: Iterable[Curve]) -> str:
    return ", ".join(
        f"{_title(curve.rule)} {'on the proxy' if curve.is_proxy else f'at sparsity {curve.sparsity:g}, width {curve.width}'}"
        for curve in curves
    )


def panels(config: TransferConfig, verdicts: Sequence[Verdict]) -> list[Panel]:
    name = _NAMES[config.axis]
    made = []
    for verdict in verdicts:
        curves = sorted(verdict.targets, key=lambda curve: (curve.width, curve.sparsity))
        series = [_series(verdict.proxy, f"dense proxy, width {verdict.proxy.width}", 0.0)]
        for number, curve in enumerate(curves):
            label = f"sparsity {curve.sparsity:.4g}" + (f", width {curve.width}" if len(config.widths) > 1 else "")
            series.append(_series(curve, label, number / max(1, len(curves) - 1)))
        title = f"{_title(verdict.rule)}: best moves {verdict.moved_words}"
        marked = f"best on the proxy: {verdict.proxy.best:.4g}"
        made.append(Panel(title, name, LOSS, tuple(series), verdict.proxy.best, marked))
    return made


def _series(curve: Curve, label: str, colour: float) -> Series:
    points = tuple(Point(x, y) for x, y in zip(curve.values, curve.losses, strict=True))
    return Series(label, points, colour, dashed=curve.is_proxy, best=None if curve.diverged else curve.best_value)


class _Wanted(NamedTuple):
    """A curve: one model under one rule."""

    rule: str
    width: int
    sparsity: float
    is_proxy: bool = False


def _curves_wanted(config: TransferConfig) -> list[_Wanted]:
    """Of every rule, the proxy first."""
    config, wanted = config.normalised, []
    for rule in config.rules:
        title = _title(rule)  # names an unknown one
        if config.axis.startswith("alpha") and rule not in _OURS and not get_rule(rule).has_alphas:
            raise ValueError(f"{title} has no {config.axis} to sweep: leave it out of --rules")
        wanted.append(_Wanted(rule, config.run.base_width, 0.0, is_proxy=True))
        wanted += [_Wanted(rule, width, sparsity) for width in config.widths for sparsity in config.sparsities]
    return wanted


def _run(config: TransferConfig, wanted: _Wanted, value: float, trace: str | None = None) -> RunConfig:
    rule, width, sparsity, is_proxy = wanted
    fields: dict[str, object] = {"rule": "smupar" if rule in _OURS else rule, "width": width, "sparsity": sparsity}
    if sparsity == 0:  # no masks to move: the run of a study of static ones
        fields |= {"dynamic": "none", "mask_every": RunConfig.mask_every, "steps": config.run.round_steps}
    elif config.run.prunes:
        fields["correction"] = "moment" if rule in _OURS else "fixed"
    if is_proxy:
        fields |= {"depth": config.proxy_depth or config.run.model.depth, "record": rule != "sp" and MEASURED in config.rules}
        fields["steps"] = config.proxy_steps or config.run.round_steps
    if rule == MEASURED and not is_proxy:
        fields["follow"] = trace
    elif sparsity == 0 and rule != "sp":
        fields["rule"] = "mup"
    if rule == "sp":  # is given the init that fits its width, as in the paper's Table 4: 0.087 / sqrt(16) at width 4096
        fields["init_std"] = config.run.init_std * math.sqrt(config.run.base_width / width)
    fields[config.axis] = value
    return with_fields(config.run, fields)


def _curve(config: TransferConfig, by_id: dict[str, Result], wanted: _Wanted, trace: str | None = None) -> Curve:
    rule, width, sparsity, is_proxy = wanted
    values, losses = [], []
    for value in axis_values(config):
        run = _run(config, wanted, value, trace)
        seeds = [replace(run, seed=run.seed + number).id for number in range(config.seeds)]
        found = [by_id[id_].loss for id_ in seeds if id_ in by_id]
        if found:
            values.append(value)
            losses.append(sum(found) / len(found))
    if not values:
        raise ValueError(f"no finished run of {rule} at width {width}, sparsity {sparsity:g}: start the same command again")
    return Curve(rule, width, sparsity, tuple(values), tuple(losses), is_proxy)


def _title(rule: str) -> str:
    return _OURS[rule] if rule in _OURS else get_rule(rule).title


def _whose(title: str) -> str:
    return f"{title}'" if title.endswith("s") else f"{title}'s"


def _percent(share: float) -> str:
    return "a diverged run" if math.isinf(share) else f"{share:.1%}"
