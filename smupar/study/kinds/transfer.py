"""Does a hyperparameter transfer? Sweeps it on the dense proxy and on wide, sparse and deep targets, under several rules. Says
how far the optimum moved under each rule, and by how much the loss of a target rises if it keeps the proxy's optimum."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.page.document import Answer, Tone
from smupar.refusals import refuse
from smupar.study.config import TransferConfig
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import LOSS, Line, Panel, Point, line_of
from smupar.study.curves.optima import STABLE, Curve, farthest_move, is_lower_bound, move_in_words, moved, times
from smupar.study.definition import Findings, Stage, StudyDefinition, curve_of, seeds_of, with_more_seeds
from smupar.study.kinds.setups import MEASURED, Setup, proxy_of, run_of, setups_of, title_of
from smupar.study.run_configs import unique
from smupar.study.store import Result, Study

_NAMES = {"lr": "learning rate", "init_std": "init std", "alpha_input": "alpha_input", "alpha_output": "alpha_output"}


@dataclass(frozen=True)
class Verdict:
    """One rule's curves on the proxy and the targets, which show how far its optimum moved."""

    rule: str
    proxy: Curve
    targets: tuple[Curve, ...]

    @property
    def curves(self) -> tuple[Curve, ...]:
        return self.proxy, *self.targets

    @property
    def moved_words(self) -> str:
        return move_in_words(self.curves)

    @property
    def tone(self) -> Tone:
        """Good if the optimum stayed, bad if it moved by more than ``STABLE``. A lower bound that is no larger than ``STABLE``
        decides nothing."""
        if farthest_move(self.curves) > STABLE:
            return "bad"
        return "unclear" if is_lower_bound(self.curves) else "good"

    @property
    def farthest(self) -> Curve:
        """The widest among the sparsest targets, and the deepest of these."""
        return max(self.targets, key=lambda curve: (curve.sparsity, curve.width, curve.depth or 0))


def define_transfer(config: TransferConfig) -> StudyDefinition:
    config = config.normalised

    def read(study: Study) -> Findings:
        results = study.results()
        trace = followed_trace(config, study)
        verdicts = analyse(config, results, trace)
        drawn = panels(config, verdicts, _Ids(config, results, trace))
        answers = [_answer(config, verdict) for verdict in verdicts]
        remarks = (*doubts_about(config, verdicts), *next_steps(config, verdicts))
        text, first = sentence(config, verdicts), headline(verdicts, _NAMES[config.axis])
        return Findings(text, drawn, results, first, answers, remarks)

    runs = proposals(config)
    stages: list[Stage] = [lambda study: runs, partial(measured_proposals, config)]
    return StudyDefinition(
        stored={"kind": "transfer", **asdict(config)},
        stages=with_more_seeds(stages, config.axis, config.seeds),
        read=read,
        title=f"Does the {_NAMES[config.axis]} transfer?",
        read_so_far=partial(_read_so_far, config),
    )


def transfer_from_json(stored: dict[str, Any]) -> StudyDefinition:
    """Reads a transfer study from study.json."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items() if name != "kind"
    }
    return define_transfer(TransferConfig(**values | {"run": RunConfig.from_json(json.dumps(stored["run"]))}))


def proposals(config: TransferConfig) -> list[RunConfig]:
    """Every run that needs no trace, with the first seed."""
    return _proposed(config, [setup for setup in setups_of(config) if setup.rule != MEASURED or setup.is_proxy])


def measured_proposals(config: TransferConfig, study: Study) -> list[RunConfig]:
    """The runs that follow the updates of the proxy at its best value, once that value is known."""
    trace = followed_trace(config, study)
    targets = [setup for setup in setups_of(config) if setup.rule == MEASURED and not setup.is_proxy]
    return _proposed(config, targets, trace) if trace else []


def followed_trace(config: TransferConfig, study: Study) -> str | None:
    """The trace of the proxy at its best value, if any run follows it. Adding values to the sweep may change which is best."""
    if MEASURED not in config.rules:
        return None
    setup = proxy_of(config, MEASURED)
    proxy = _curve(config, {result.config.id: result for result in study.results()}, setup)
    refuse(proxy.diverged, f"all runs of the proxy diverged: sweep smaller values of {config.axis} (--values)")
    return str(study.trace_to_follow(run_of(config, setup, proxy.best_value)))


def _proposed(config: TransferConfig, setups: Iterable[Setup], trace: str | None = None) -> list[RunConfig]:
    return unique(run_of(config, setup, value, trace) for setup in setups for value in config.values)


def analyse(config: TransferConfig, results: Iterable[Result], trace: str | None = None) -> list[Verdict]:
    """One verdict per rule, from the results so far. ``trace`` is the trace that measured updates follow."""
    by_id = {result.config.id: result for result in results}
    verdicts = []
    for rule in config.rules:
        proxy, *targets = (_curve(config, by_id, setup, trace) for setup in setups_of(config) if setup.rule == rule)
        refuse(proxy.diverged, f"all runs of {rule} on the proxy diverged: sweep smaller values of {config.axis} (--values)")
        verdicts.append(Verdict(rule, proxy, tuple(targets)))
    return verdicts


def sentence(config: TransferConfig, verdicts: Sequence[Verdict]) -> str:
    """The findings in one sentence with their numbers, followed by the doubts."""
    name = _NAMES[config.axis]
    moves = ", ".join(f"{_possessive(title_of(verdict.rule))} {verdict.moved_words}" for verdict in verdicts)
    deep = "" if config.base_depth is None else f" and depth {config.base_depth}"
    first = f"From the dense proxy of width {config.run.base_width}{deep} the best {name} moved: {moves}"
    far = verdicts[0].farthest
    costs = ", ".join(
        f"{title_of(verdict.rule)} {_percent(verdict.farthest.excess(verdict.proxy.best_value))}" for verdict in verdicts
    )
    second = f"at {_size_of(far)}, the proxy's best swept {name} costs {costs}"
    return " ".join([f"{first}; {second}.", *doubts_about(config, verdicts)])


def doubts_about(config: TransferConfig, verdicts: Sequence[Verdict]) -> list[str]:
    """Sentences on where no optimum was found, or where it may lie beyond the grid."""
    name = _NAMES[config.axis]
    curves = [curve for verdict in verdicts for curve in verdict.curves]
    lost = _named(curve for curve in curves if curve.diverged)
    edges = _named(curve for curve in curves if curve.on_edge and not curve.diverged)
    doubts = [f"Every run diverged, so there is no best {name}: {lost}."] if lost else []
    doubts += [f"On the edge of the grid, so the best may lie beyond it (more --values would tell): {edges}."] if edges else []
    return doubts


def next_steps(config: TransferConfig, verdicts: Sequence[Verdict]) -> list[str]:
    """What to do with the findings, in a sentence; none if these runs cannot tell."""
    name, flag = _NAMES[config.axis], f"--{config.axis.replace('_', '-')}"
    stays = [verdict for verdict in verdicts if verdict.tone == "good" and verdict.rule != "sp"]
    if stays:
        kept = stays[-1]
        value = f"{kept.proxy.best_value:.3g}"
        return [f"Next: under {title_of(kept.rule)}, give wide and sparse models the proxy's best {name}, {flag} {value} here."]
    if all(verdict.tone == "bad" for verdict in verdicts):
        return [f"Next: train longer (--steps) or wider targets (--widths) before you rely on the proxy's {name}."]
    return []


def headline(verdicts: Sequence[Verdict], name: str, *, so_far: bool = False, unsettled: Collection[str] = ()) -> str:
    """Under which rules the best value transfers. The cards say how far it moved. ``so_far`` is for an unfinished study, and
    ``unsettled`` are the rules whose optima may still move."""
    tones = {verdict.rule: verdict.tone for verdict in verdicts}
    tones |= {rule: "plain" for rule in unsettled if tones.get(rule) == "good"}
    good, bad, unclear, open_ = (
        _listed([title_of(rule) for rule, own in tones.items() if own == tone]) for tone in ("good", "bad", "unclear", "plain")
    )
    said: list[str] = []
    if good:
        said.append(f"the {name} transfers under {good} (its best stays within {times(STABLE)})")
    if bad:
        said.append(f"not under {bad}" if good else f"the {name} does not transfer under {bad}")
    if unclear:
        said.append(f"these runs cannot tell about {unclear}")
    decided, stays = ", ".join(said), "stays" if list(tones.values()).count("plain") == 1 else "stay"
    text = "; ".join(filter(None, [decided, open_ and f"{open_} {stays} within {times(STABLE)}, with runs to come"]))
    return f"So far {text}." if text and so_far else f"{text[:1].upper()}{text[1:]}." if text else ""


def _listed(names: Sequence[str]) -> str:
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def _answer(config: TransferConfig, verdict: Verdict) -> Answer:
    """The card of a rule: the farthest move, also in octaves, and the most that the proxy's best swept value costs."""
    far = _farthest_moved(verdict)
    octaves = 0.0 if far.diverged else round(math.log2(far.best / verdict.proxy.best), 1)
    moved_to = "every run diverged" if far.diverged else f"{far.best:.3g} ({octaves + 0.0:+.1f} octaves)"  # never -0.0
    words = verdict.moved_words
    return {
        "name": title_of(verdict.rule),
        "value": f"moves {words}" if words[:1].isdigit() else words,
        "text": f"best {_NAMES[config.axis]} {verdict.proxy.best:.3g} on the dense proxy\n{moved_to} at {_size_of(far)}\n"
        f"{_cost_in_words(verdict)}",
        "tone": verdict.tone,
        "rule": title_of(verdict.rule),
    }


def _cost_in_words(verdict: Verdict) -> str:
    """The most that the proxy's best swept value costs on a target. A target counts once it has been run up to this value."""
    value = verdict.proxy.best_value
    costs = {_size_of(curve): curve.excess(value) for curve in verdict.targets if curve.values[0] <= value <= curve.values[-1]}
    if not costs:
        return f"what keeping {value:.3g}, the proxy's best, costs is not known yet"
    where = max(costs, key=lambda size: costs[size])
    cost = f"at most {_percent(costs[where])} ({where})" if costs[where] else "nothing on any target"
    return f"keeping {value:.3g}, the proxy's best, costs {cost}"


def _farthest_moved(verdict: Verdict) -> Curve:
    return max(verdict.targets, key=lambda curve: moved(verdict.proxy, curve))


def _read_so_far(config: TransferConfig, study: Study) -> Findings:
    """The findings of an unfinished study: curves with the points so far, and moves between settled optima."""
    results = study.results()
    trace = None
    with contextlib.suppress(ValueError, OSError):  # the proxy has no best value yet
        trace = followed_trace(config, study)
    ids = _Ids(config, results, trace)
    verdicts, drawn, open_setups = list[Verdict](), list[Panel](), list[Setup]()
    for rule in config.rules:
        setups = [setup for setup in setups_of(config) if setup.rule == rule]
        curves = {setup: curve for setup in setups if (curve := ids.curve(setup)) is not None}
        settled = {setup: curve for setup, curve in curves.items() if ids.is_settled(setup, curve)}
        open_setups += [setup for setup in setups if setup not in settled]
        panel = _panel(config, rule, list(curves.values()), ids)
        proxy = settled.get(setups[0])
        # A dense target of base width is the proxy itself, which cannot show that anything transfers.
        if proxy and not proxy.diverged and any(ids.runs(setup) != ids.runs(setups[0]) for setup in settled):
            verdicts.append(Verdict(rule, proxy, tuple(curve for curve in settled.values() if not curve.is_proxy)))
            panel = _with_move(panel, verdicts[-1])
        drawn.append(panel)
    name = _NAMES[config.axis]
    if not verdicts:
        return Findings(_what_to_see(name), drawn, results, f"Not known yet: no target has its best {name}.")
    doubt = _unsettled(open_setups, len(drawn) * len(drawn[0].lines), name) if open_setups else ""
    first = headline(verdicts, name, so_far=True, unsettled=[setup.rule for setup in open_setups])
    answers = [_answer(config, verdict) for verdict in verdicts]
    return Findings(doubt, drawn, results, first, answers, (doubt,) if doubt else ())


def _what_to_see(name: str) -> str:
    """How to read the curves, for a reader who has no verdict yet."""
    return (
        f"Each curve is the loss of one model over the {name}. Under a rule by which the {name} transfers, all curves are "
        "lowest where the proxy's is, at the dotted line."
    )


def _unsettled(setups: Sequence[Setup], num_curves: int, name: str) -> str:
    """Which best values may still move; their number, if there are many."""
    if len(setups) > 2:
        return f"{len(setups)} of {num_curves} curves may still get another best {name}."
    several = "s" if len(setups) > 1 else ""
    return f"The best {name} may still move on {len(setups)} curve{several}: {_named(setups)}."


class _Ids:
    """Finds the runs of a curve's points, by setup."""

    def __init__(self, config: TransferConfig, results: Iterable[Result], trace: str | None) -> None:
        self.config, self.trace = config, trace
        self.by_id = {result.config.id: result for result in results}

    def curve(self, setup: Setup) -> Curve | None:
        """The curve of the runs that have ended; None if there is none."""
        if not self.is_known(setup) or not any(run.id in self.by_id for runs in self.runs(setup).values() for run in runs):
            return None
        return _curve(self.config, self.by_id, setup, self.trace)

    def is_settled(self, setup: Setup, curve: Curve) -> bool:
        """Whether both neighbours of the optimum are worse, or the runs of all values have ended."""
        is_complete = all(any(run.id in self.by_id for run in runs) for runs in self.runs(setup).values())
        return is_complete or not (curve.on_edge or curve.diverged)

    def is_known(self, setup: Setup) -> bool:
        """Whether the configurations are known. Those that follow a trace are unknown until the trace exists."""
        return setup.rule != MEASURED or setup.is_proxy or self.trace is not None

    def runs(self, setup: Setup) -> dict[float, list[RunConfig]]:
        """The runs at each value; at least the first seed."""
        config = self.config
        return {value: seeds_of(run_of(config, setup, value, self.trace), config.seeds) for value in config.values}

    def on(self, line: Line, setup: Setup) -> Line:
        """The line with the ids of its runs, and with waiting points."""
        runs = self.runs(setup)
        points = tuple(
            replace(point, runs=tuple(run.id for run in runs[point.x] if run.id in self.by_id)) for point in line.points
        )
        ended = {point.x for point in points}
        waiting = tuple(Point(x, math.nan, runs=(seeds[0].id,)) for x, seeds in runs.items() if x not in ended)
        return replace(line, points=points, waiting=waiting)


def _named(curves: Iterable[Curve | Setup]) -> str:
    return ", ".join(
        f"{title_of(curve.rule)} {'on the proxy' if curve.is_proxy else f'at {_size_of(curve)}'}" for curve in curves
    )


def _size_of(curve: Curve | Setup) -> str:
    return f"density {density_in_words(curve.sparsity)}, width {curve.width}{_deep(curve)}"


def _deep(curve: Curve | Setup) -> str:
    """The depth of a model in words, where depths are compared."""
    return "" if curve.depth is None else f", depth {curve.depth}"


def panels(config: TransferConfig, verdicts: Sequence[Verdict], ids: _Ids | None = None) -> list[Panel]:
    drawn = [(_panel(config, verdict.rule, [verdict.proxy, *verdict.targets], ids), verdict) for verdict in verdicts]
    return [_with_move(panel, verdict) for panel, verdict in drawn]


def _with_move(panel: Panel, verdict: Verdict) -> Panel:
    """The panel of a rule, with how far its optimum moved."""
    return replace(panel, finding=f"best moves {verdict.moved_words}")


def _panel(config: TransferConfig, rule: str, curves: Sequence[Curve], ids: _Ids | None) -> Panel:
    """The curves of one rule so far. With ``ids`` it also has the waiting points."""
    setups = [setup for setup in setups_of(config) if setup.rule == rule]
    by_setup = {None if curve.is_proxy else (curve.width, curve.sparsity, curve.depth): curve for curve in curves}
    targets = sorted((setup for setup in setups if not setup.is_proxy), key=lambda setup: (setup.width, *setup[2:]))
    lines, several = [], len({setup.width for setup in targets}) > 1
    for number, setup in enumerate([setups[0], *targets]):
        label = f"proxy, width {setup.width}" if setup.is_proxy else _size(setup, with_width=several)
        label += _deep(setup)
        shade = max(0, number - 1) / (len(targets) - 1) if len(targets) > 1 else 1.0  # the last line has the full colour
        curve = by_setup.get(None if setup.is_proxy else (setup.width, setup.sparsity, setup.depth))
        line = Line(label, (), shade, dashed=setup.is_proxy) if curve is None else line_of(curve, label, shade)
        lines.append(ids.on(line, setup) if ids is not None and ids.is_known(setup) else line)
    proxy = by_setup.get(None)
    best = None if proxy is None or proxy.diverged else proxy.best
    return Panel(
        title=title_of(rule),
        x_label=_NAMES[config.axis],
        y_label=LOSS,
        lines=tuple(lines),
        marked_x=best,
        marked_label="" if best is None else "best on the proxy",
        rule=title_of(rule),
    )


def _size(setup: Setup, *, with_width: bool) -> str:
    size = f"density {density_in_words(setup.sparsity)}" if setup.sparsity else "dense"
    return f"width {setup.width}, {size}" if with_width else size


def _curve(config: TransferConfig, by_id: dict[str, Result], setup: Setup, trace: str | None = None) -> Curve:
    rule, width, sparsity, depth, is_proxy = setup
    finished = {}
    for value in config.values:
        seeds = seeds_of(run_of(config, setup, value, trace), config.seeds)
        if results := [by_id[run.id] for run in seeds if run.id in by_id]:
            finished[value] = results
    refuse(not finished, f"no finished run of {rule} at width {width}, sparsity {sparsity:g}: start the same command again")
    return curve_of(finished, rule=rule, width=width, sparsity=sparsity, is_proxy=is_proxy, depth=depth)


def _possessive(title: str) -> str:
    return f"{title}'" if title.endswith("s") else f"{title}'s"


def _percent(share: float) -> str:
    return "a diverged run" if math.isinf(share) else f"{share:.1%}"
