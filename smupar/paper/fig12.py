"""Figure 12: masks that move. It has the paper's three rules and two columns of ours: SmuPar with the current density (under
gradual pruning), and measured updates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from smupar.lm.config.run import RunConfig
from smupar.paper.figure import (
    RULES,
    STABLE,
    Claim,
    Figure,
    Rows,
    all_of,
    at_dense_optimum,
    curve,
    panel,
    runs_of,
    sparsities,
    swept,
    title,
)
from smupar.paper.settings import Scale
from smupar.study.curves import Panel
from smupar.study.optima import Curve, moved
from smupar.study.space import unique
from smupar.study.store import Study

METHODS = {"gmp": "GMP", "rigl": "RigL"}
# The paper's number of steps between moves, and the number of moves in runs that are too short for that.
_EVERY, _MOVES_PER_RUN = 100, 20
_FALLS = 4.0
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
    return swept(scale, "dynamic", [_moving(run, method, correction) if run.sparsity else run for run in runs])


def _moving(run: RunConfig, method: str, correction: str) -> RunConfig:
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
    columns = {title(rule): _curves(rows, method, rule) for rule in RULES}
    if method == "gmp":
        columns["density of the moment"] = _curves(rows, method, "smupar", "moment")
    columns["measured updates"] = _curves(rows, method, "smupar", "moment", follows=True)
    return columns


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves, f"{METHODS[m]}, {name}") for m in METHODS for name, curves in _columns(rows, m).items()]


def claim(rows: Rows) -> Claim:
    return all_of(*(part for method in METHODS for part in _claims(rows, method)))


def _claims(rows: Rows, method: str) -> list[Claim]:
    columns, name = _columns(rows, method), METHODS[method]
    smupar, measured = columns["SmuPar"], columns["measured updates"]
    fell = moved(smupar[0], smupar[-1])
    falls = Claim(
        fell >= _FALLS and smupar[-1].best < smupar[0].best,
        f"{name}: SmuPar's best learning rate falls {fell:.2g}x from dense to the sparsest, {_FALLS:g}x asked",
    )
    proxy = curve(rows, "mup", 0.0, keep=lambda config: config.model.width == config.base_width)
    move = max(moved(proxy, target) for target in measured)
    stays = Claim(
        move <= STABLE, f"{name}: that of measured updates moves {move:.2g}x from the proxy's, at most {STABLE:g}x asked"
    )
    wins = []
    for index, target in enumerate(measured):
        if target.sparsity >= _SPARSE:
            ours = at_dense_optimum([proxy, *measured], index + 1)
            others = {rule: at_dense_optimum(columns[rule], index) for rule in ("SP", "muP", "SmuPar")}
            words = ", ".join(f"{rule} {loss:.3f}" for rule, loss in others.items())
            text = f"{name} at {target.sparsity:.4g}, each at its dense-tuned learning rate: measured {ours:.3f}, {words}"
            wins.append(Claim(ours < min(others.values()), text))
    return [falls, stays, *wins]


FIGURE = Figure(
    title="Learning-rate transfer under RigL and gradual pruning",
    shows="None of SP, muP and SmuPar keeps its best learning rate; SmuPar over-corrects, and its best falls with sparsity.",
    runs=runs,
    then=then,
    swept=("dynamic", "lr"),
    draw=draw,
    columns=5,
    claim=claim,
)
