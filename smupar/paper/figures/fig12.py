"""Figure 12: masks that move. It has the paper's three rules and two columns of ours: SmuPar with the current density (under
gradual pruning), and measured updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import (
    RULES,
    STABLE,
    Claim,
    Figure,
    Rows,
    all_of,
    at_dense_optimum,
    curve,
    edge,
    moving,
    panel,
    runs_of,
    sparsities,
    swept,
    title,
)
from smupar.paper.settings import Scale
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import Panel
from smupar.study.curves.optima import Curve, farthest_move, times
from smupar.study.run_configs import unique
from smupar.study.store import Study

METHODS = {"gmp": "GMP", "rigl": "RigL"}
# The paper's number of steps between moves, and the number of moves in runs that are too short for that.
_EVERY, _MOVES_PER_RUN = 100, 20
_SPARSE = 0.93


def runs(scale: Scale) -> list[RunConfig]:
    """The runs of the rules and of the proxy."""
    columns = [*(_swept(scale, method, "fixed") for method in METHODS), _swept(scale, "gmp", "moment", ("smupar",))]
    return unique([*_proxies(scale), *(run for column in columns for run in column)])


def then(scale: Scale, study: Study) -> list[RunConfig]:
    """The runs that follow the proxy."""
    results = study.results(_proxies(scale))
    if not results:
        raise ValueError("no run of the proxy has finished")
    trace = study.trace_to_follow(min(results, key=lambda result: result.loss).config)
    runs = [run for method in METHODS for run in _swept(scale, method, "moment", ("smupar",))]
    return unique(replace(run, rule="smupar", follow=str(trace)) for run in runs)


def _proxies(scale: Scale) -> list[RunConfig]:
    size = scale.size("dynamic")
    proxy = scale.run("dynamic", rule="mup", width=scale.run("dynamic").base_width)
    return [replace(proxy, lr=2.0**log2, record=True) for log2 in size.log2_values]


def _swept(scale: Scale, method: str, correction: str, rules: Iterable[str] = RULES) -> list[RunConfig]:
    runs = runs_of(scale, "dynamic", rules)
    return swept(scale, "dynamic", [with_moving_masks(run, method, correction) if run.sparsity else run for run in runs])


def with_moving_masks(run: RunConfig, method: str, correction: str) -> RunConfig:
    every = _EVERY if run.steps >= 10 * _EVERY else max(1, round(run.steps / _MOVES_PER_RUN))
    run = replace(run, dynamic=method, mask_every=every)  # type: ignore[arg-type]
    return replace(run, correction=correction) if run.prunes else run  # type: ignore[arg-type]


# Reading


def _curves(rows: Rows, method: str, rule: str, correction: str = "fixed", *, follows: bool = False) -> list[Curve]:
    base = rows[0].config.base_width

    def in_column(config: RunConfig) -> bool:
        if config.sparsity == 0:
            is_target = config.model.width != base
        else:
            is_target = config.dynamic == method and (not config.prunes or config.correction == correction)
        return is_target and (config.follow is not None) == follows

    return [curve(rows, rule, sparsity, keep=in_column) for sparsity in sparsities(rows)]


def _columns(rows: Rows, method: str) -> dict[str, list[Curve]]:
    """The curves of each column of the picture. One column exists only for GMP. It comes last, so that the others align."""
    columns = {title(rule): _curves(rows, method, rule) for rule in RULES}
    columns["measured updates"] = _curves(rows, method, "smupar", "moment", follows=True)
    if method == "gmp":
        columns["density of the moment"] = _curves(rows, method, "smupar", "moment")
    return columns


def _from_dense(columns: dict[str, list[Curve]], name: str) -> list[Curve]:
    """The column's curves, starting with the dense model from which moves are measured, which has the same width. For measured
    updates this is the same dense model as for muP and SmuPar, not the one that follows the proxy."""
    return [columns["SmuPar"][0], *columns[name][1:]] if name == "measured updates" else columns[name]


def draw(rows: Rows) -> list[Panel]:
    """The paper's rules in a row for each method, then what we propose for both."""
    rows_of = [_panels(_columns(rows, method), METHODS[method]) for method in METHODS]
    return [drawn for own in rows_of for drawn in own[: len(RULES)]] + [drawn for own in rows_of for drawn in own[len(RULES) :]]


def _panels(columns: dict[str, list[Curve]], method: str) -> list[Panel]:
    panels = []
    for name, own in columns.items():
        measured_from = _from_dense(columns, name)
        drawn = panel(own, f"{method}, {name}")
        panels.append(replace(drawn, finding=moving(measured_from), marked_x=measured_from[0].best))
    return panels


def claim(rows: Rows) -> Claim:
    return all_of(*(part for method in METHODS for part in _claims(rows, method)))


def _claims(rows: Rows, method: str) -> list[Claim]:
    """All moves are measured from the dense model of the same width, under the same rule."""
    columns, name = _columns(rows, method), METHODS[method]
    proxy = curve(rows, "mup", 0.0, keep=lambda config: config.model.width == config.base_width)
    return [
        _falls(columns["SmuPar"], name),
        *(_rises(columns[rule], f"{name}: {rule}") for rule in ("SP", "muP")),
        _stays(_from_dense(columns, "measured updates"), proxy, name),
        *_wins(columns, proxy, name),
    ]


def _falls(smupar: list[Curve], method: str) -> Claim:
    """Whether the optimum falls from each sparsity to the next, and by more than one step of the grid in all."""
    optima = [curve.best for curve in smupar]
    steadily = all(later <= earlier for earlier, later in itertools.pairwise(optima))
    step = smupar[0].values[1] / smupar[0].values[0]
    text = (
        f"{method}: SmuPar's best learning rate falls with sparsity ({_listed(optima)}), by {optima[0] / optima[-1]:.4g}x in "
        f"all (more than {step:g}x is needed, one step of the grid)"
    )
    return Claim(steadily and optima[-1] < optima[0] / step, text)


def _rises(curves: list[Curve], whose: str) -> Claim:
    """Whether the optimum of SP or muP rises, as in the paper. This is unknown if the optimum has risen by only one step and
    lies on the edge of the grid."""
    optima, step = [curve.best for curve in curves], curves[0].values[1] / curves[0].values[0]
    rise = optima[-1] / optima[0]
    text = (
        f"{whose}'s best learning rate rises with sparsity ({_listed(optima)}), by {rise:.3g}x in all{edge(curves[-1:])} "
        f"(more than {step:g}x is needed, one step of the grid)"
    )
    return Claim(True if rise > step else None if curves[-1].on_edge and rise > 1 else False, text)


def _stays(measured: list[Curve], proxy: Curve, method: str) -> Claim:
    from_dense, from_proxy = farthest_move(measured), farthest_move([proxy, *measured[1:]])
    text = (
        f"{method}: the best learning rate of measured updates moves by {times(from_dense)} from the dense model's and by "
        f"{times(from_proxy)} from the proxy's (at most {STABLE:g}x is allowed)"
    )
    return Claim(max(from_dense, from_proxy) <= STABLE, text)


def _wins(columns: dict[str, list[Curve]], proxy: Curve, method: str) -> list[Claim]:
    """Whether measured updates at the proxy's best learning rate are ahead of each rule at its dense-tuned one."""
    measured, wins = columns["measured updates"], []
    for index, target in enumerate(measured):
        if target.sparsity >= _SPARSE:
            ours = at_dense_optimum([proxy, *measured], index + 1)
            others = {rule: at_dense_optimum(columns[rule], index) for rule in ("SP", "muP", "SmuPar")}
            words = ", ".join(f"{rule} {loss:.3f}" for rule, loss in others.items())
            text = (
                f"{method} at density {density_in_words(target.sparsity)}: measured updates have the lowest loss, with every "
                f"rule at its dense-tuned learning rate: measured {ours:.3f}, {words}"
            )
            wins.append(Claim(ours < min(others.values()), text))
    return wins


def _listed(optima: list[float]) -> str:
    return ", ".join(f"2^{math.log2(value):.2f}" for value in optima)


FIGURE = Figure(
    title="Learning-rate transfer under RigL and gradual pruning",
    claimed="RigL and gradual pruning move the best learning rates as in the paper",
    shows="No rule keeps its best learning rate. SP's and muP's rise with sparsity; SmuPar over-corrects, so its falls.",
    runs=runs,
    then=then,
    swept=("dynamic", "lr"),
    draw=draw,
    columns=3,
    claim=claim,
)
