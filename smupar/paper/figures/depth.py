"""Beyond the paper: does the best learning rate transfer over depth, at several densities, and over width, depth and density
together?

The paper has two layers and varies widths and densities. CompleteP (Dey et al., 2025), by some of its authors, is about the
depth of dense models. Here both are combined, and compared with depth-muP and with models without any depth factor. At the
base's depth all three are the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import MORE, STABLE, Claim, Figure, Rows, all_of, edge, moving, panel
from smupar.paper.settings import Scale
from smupar.rules import DEPTH_RULES
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import LOSS, Panel
from smupar.study.curves.optima import Curve, farthest_move, times
from smupar.study.definition import curve_of
from smupar.study.run_configs import unique, with_fields
from smupar.study.store import Result

_NEAR = 0.005  # a learning rate is near the best one if its loss is higher by no more than this share
_SLOWER = 3  # the longer warm-up, in usual ones
_RULES = ("completep", "none", "depth-mup")  # the last one is for comparison, and its runs come last


@dataclass(frozen=True)
class _DepthStudy:
    width: int
    depths: tuple[int, ...]  # the first one is the base's
    densities: tuple[float, ...]
    steps: int
    rates: tuple[int, ...]  # log2 of the learning rates
    corner: tuple[int, int, float]  # width, depth and density that are all far from the base's
    corner_steps: int
    corner_rates: tuple[int, ...]


_SIZES = {
    "cpu": _DepthStudy(64, (2, 8), (1.0, 1 / 8), 50, (-8, -7, -6, -5), (128, 4, 1 / 8), 80, (-7, -6, -5)),
    "small": _DepthStudy(
        256, (2, 4, 8, 16, 32), (1.0, 1 / 4, 1 / 16), 500, tuple(range(-10, -3)), (1024, 16, 1 / 16), 2000, (-8, -7, -6, -5)
    ),
    "paper": _DepthStudy(
        256, (2, 8, 32, 64), (1.0, 1 / 4, 1 / 16), 2000, tuple(range(-10, -3)), (2048, 32, 1 / 32), 11752, (-8, -7, -6, -5)
    ),
}


def _run(scale: Scale, rule: str, depth: int, density: float, width: int | None = None, **fields: object) -> RunConfig:
    size = _SIZES[scale.name]
    start = scale.run("sweep", rule="mup" if density == 1 else "smupar", width=width or size.width, sparsity=1 - density)
    is_deeper = depth != size.depths[0]
    about_depth = {"base_depth": size.depths[0] if is_deeper else None, "depth_rule": rule if is_deeper else None}
    others = {"base_width": size.width, "residual_factor": False, "steps": size.steps}
    return with_fields(start, {"depth": depth, **about_depth, **others, **fields})


def runs(scale: Scale) -> list[RunConfig]:
    """The runs that decide the claim, shallow models first, so that an interrupted study has complete curves."""
    return _curves_of(scale, _RULES[:2])


def last(scale: Scale) -> list[RunConfig]:
    """The corner, the runs with a longer warm-up, and then the depth rule that is compared without further seeds."""
    return [*corner(scale), *slower(scale), *_curves_of(scale, _RULES[2:])]


def _curves_of(scale: Scale, rules: Sequence[str]) -> list[RunConfig]:
    size = _SIZES[scale.name]
    models = [(rule, depth, density) for depth in size.depths for rule in rules for density in size.densities]
    return unique(_run(scale, *model, lr=2.0**rate) for model in models for rate in size.rates)


def corner(scale: Scale) -> list[RunConfig]:
    """The dense base, trained for as many steps as the model in the corner, and that model."""
    size = _SIZES[scale.name]
    width, depth, density = size.corner
    steps, rates = {"steps": size.corner_steps, "seed": 0}, [2.0**rate for rate in size.corner_rates]
    base = [_run(scale, "completep", size.depths[0], 1.0, lr=lr, **steps) for lr in rates]
    return [*base, *(_run(scale, rule, depth, density, width, lr=lr, **steps) for rule in _RULES[:2] for lr in rates)]


def slower(scale: Scale) -> list[RunConfig]:
    """The dense base and the deepest dense model with a longer warm-up. They tell whether a learning rate that fits the base is
    too large for the deep model only in its first steps."""
    size = _SIZES[scale.name]
    warmup = {"warmup": _SLOWER * (size.steps // 10), "seed": 0}
    return [
        _run(scale, "completep", depth, 1.0, lr=2.0**rate, **warmup)
        for depth in (size.depths[0], size.depths[-1])
        for rate in (-7, -6)
    ]


# Reading


@dataclass(frozen=True)
class _Curves:
    """The curves of a study for each depth rule: over depth at each sparsity, and in the corner."""

    study: dict[tuple[str, float], list[Curve]]
    corner: dict[str, list[Curve]]  # the dense base's curve, then the corner's
    slower: list[Curve]  # over depth, with the longer warm-up

    @property
    def proxy(self) -> Curve:
        return next(iter(self.study.values()))[0]


def _read(every: Rows) -> _Curves:
    rows = [row for row in every if row.config.warmup is None]
    lengths = sorted({row.config.steps for row in rows})
    study = [row for row in rows if row.config.steps == lengths[0]]
    longer = [row for row in rows if row.config.steps == lengths[-1] != lengths[0]]
    sparsities = sorted({row.config.sparsity or 0.0 for row in study})
    by_rule = {(rule, sparsity): _over_depth(study, rule, [sparsity]) for rule in _RULES for sparsity in sparsities}
    far = sorted({row.config.sparsity or 0.0 for row in longer})
    return _Curves(
        by_rule,
        {rule: _over_depth(longer, rule, far) for rule in _RULES[:2]} if longer else {},
        _over_depth([row for row in every if row.config.warmup is not None], "completep", [0.0]),
    )


def _over_depth(rows: Sequence[Result], rule: str, sparsities: Sequence[float]) -> list[Curve]:
    """A curve for each depth under a depth rule. Models of the base's depth are the same under all depth rules."""
    found: dict[tuple[int, float], dict[float, list[Result]]] = {}
    for row in rows:
        run = row.config
        if run.depth_rule in (None, rule) and (run.sparsity or 0.0) in sparsities:
            found.setdefault((run.model.depth, run.sparsity or 0.0), {}).setdefault(run.lr, []).append(row)
    return [
        curve_of(own, rule=rule, width=_width(own), sparsity=sparsity, depth=depth)
        for (depth, sparsity), own in sorted(found.items())
    ]


def _width(results: dict[float, list[Result]]) -> int:
    return next(iter(results.values()))[0].config.model.width


# Drawing


def draw(rows: Rows) -> list[Panel]:
    """One panel for each depth rule and density, in rows of one rule, and the corner last. A depth rule appears once a deeper
    model has ended, and the first one at once."""
    found = _read(rows)
    begun = [key for key, curves in found.study.items() if len(curves) > 1 or key[0] == _RULES[0]]
    ordered = sorted(begun, key=lambda key: (_RULES.index(key[0]), key[1]))
    panels = [
        _panel(f"{_title(rule)}, density {density_in_words(sparsity)}", found.study[rule, sparsity], found.proxy)
        for rule, sparsity in ordered
    ]
    far = [_panel(f"{_title(rule)}, all at once", curves, curves[0]) for rule, curves in found.corner.items()]
    return panels + [replace(panel, y_label=f"{LOSS}, longer runs") for panel in far]


def _panel(heading: str, curves: Sequence[Curve], proxy: Curve) -> Panel:
    drawn = panel(curves, heading, label=_label if len({curve.width for curve in curves}) > 1 else _depth)
    found = moving([proxy, *curves])
    return replace(drawn, finding=found, marked_x=proxy.best, marked_label="best for the dense base")


def _depth(curve: Curve) -> str:
    return f"depth {curve.depth}"


def _label(curve: Curve) -> str:
    return f"width {curve.width}, depth {curve.depth}, density {density_in_words(curve.sparsity)}"


def _title(rule: str) -> str:
    return "no factor" if rule == "none" else DEPTH_RULES[rule].title


# Claiming


def claim(rows: Rows) -> Claim:
    found = _read(rows)
    ended = [rule for rule in _RULES if len(_against(found, rule)) > 1]
    if ended[:2] != list(_RULES[:2]):
        return Claim(None, "CompleteP or no factor has no deeper model whose runs have ended")
    moves = {rule: farthest_move(_against(found, rule)) for rule in ended}
    costs = {rule: max(curve.excess(found.proxy.best_value) for curve in _against(found, rule)[1:]) for rule in ended}
    ours = _against(found, "completep")
    others = "; ".join(
        f"{_title(rule)} {times(moves[rule])}{edge(_against(found, rule))}, {costs[rule]:.1%}" for rule in ended[1:]
    )
    return all_of(
        Claim(
            moves["completep"] <= STABLE,
            f"under CompleteP with SmuPar the best learning rate moves by {times(moves['completep'])}{edge(ours)} from the "
            f"dense base over all depths and densities (at most {STABLE:g}x is allowed)",
        ),
        Claim(
            costs["completep"] <= _NEAR,
            f"the dense base's best learning rate costs at most {costs['completep']:.2%} at any depth and density ({_NEAR:.1%} "
            f"is allowed{_with_longer_warm_up(found)})",
        ),
        Claim(
            moves["none"] > MORE * moves["completep"],
            f"without a factor the best learning rate moves farther (moves and costs: {others})",
        ),
        *([_corner(found.corner)] if all(len(curves) > 1 for curves in found.corner.values()) and found.corner else []),
    )


def _against(found: _Curves, rule: str) -> list[Curve]:
    """The curves of the dense base and of all deeper models under a depth rule."""
    return [found.proxy, *(curve for (of, _), curves in found.study.items() if of == rule for curve in curves[1:])]


def _with_longer_warm_up(found: _Curves) -> str:
    """What the base's learning rate costs the deepest dense model with a longer warm-up, in words; "" if it has not ended."""
    if len(found.slower) < 2:
        return ""
    deep = found.slower[-1]
    cost = deep.excess(found.proxy.best_value)
    return f"; with {_SLOWER} times the warm-up it costs {cost:.2%} in the dense model of depth {deep.depth}"


def _corner(curves: dict[str, list[Curve]]) -> Claim:
    base, ours = curves["completep"]
    none, tuned = curves["none"][-1], base.best_value
    cost = ours.excess(tuned)
    lead = none.at(tuned) / ours.at(tuned) - 1
    return Claim(
        cost <= _NEAR and lead > 0,
        f"tuned at {_label(base)}, the model of {_label(ours)} ends {cost:.2%} above its loss at its own best learning rate "
        f"({_NEAR:.1%} is allowed); without a factor its loss is {lead:+.1%} from there",
    )


FIGURE = Figure(
    title="Depth, width and density",
    shows="The paper has two layers and does not vary the depth.",
    claimed="The learning rate of 2 dense layers fits 4 to 32 layers, dense and sparse",
    runs=runs,
    last=last,
    swept=("sweep", "lr"),
    draw=draw,
    columns=3,
    claim=claim,
)
