"""Figure 3: validation loss over sparsity, with the hyperparameters of the dense model.

SP's hyperparameters do not transfer, so SP gets three chances at every density. The first is the paper's learning rate. The
second is the best learning rate of SP's own dense model. The third is that best rate, with the same product of learning rate
and decay as the other rules. One more run gives SP a faster embedding. Other runs vary the seed, the kind of decay and the
depth. Two runs follow measured updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from smupar.lm.config.run_config import RunConfig
from smupar.output.colours import mixed, rule_colour
from smupar.paper.figure import (
    NUM_SPREADS,
    USUAL_SPREAD,
    Claim,
    Figure,
    Rows,
    all_of,
    over,
    pooled_spread,
    runs_of,
    spread_in_words,
    title,
    valid_loss,
)
from smupar.paper.settings import Scale
from smupar.study.conventions import as_rule, density_in_words
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.run_configs import unique
from smupar.study.store import Study

_CORRELATION = 0.8
_PAPER_GAPS = {"SP": 11.9, "muP": 1.9}  # in %, at 16 weights per neuron
_PAPER_WEIGHTS_PER_NEURON = 16
_PRINTED_SP_LR = 2e-4
_FASTER = "SP, tuned, faster embedding"
_SP_RATES = tuple(2.0**log2 for log2 in range(-12, -7))
_DEEP_MODEL, _DEEP_BATCH = {"width": 512, "depth": 8}, {"batch_size": 64, "seq_len": 512}


def runs(scale: Scale) -> list[RunConfig]:
    asked = runs_of(scale, "pretraining")
    return unique([*asked, *_sp_rates(scale), *_more(scale), _proxy(scale)]) if scale.name == "small" else asked


def _sp_rates(scale: Scale) -> list[RunConfig]:
    """The sweep that finds the best learning rate of SP's dense model."""
    return [replace(scale.run("pretraining", rule="sp"), lr=lr) for lr in _SP_RATES]


def _more(scale: Scale) -> list[RunConfig]:
    """More seeds, coupled decay and twice the depth at the two lowest densities. Also a narrow, deep model."""
    size = scale.size("pretraining")
    sparse = [scale.run("pretraining", rule=rule, sparsity=s) for s in size.sparsities[-2:] for rule in ("mup", "smupar")]
    seeds = [replace(run, seed=seed) for seed in range(1, size.seeds) for run in sparse]
    coupled = [replace(run, decay="coupled") for run in sparse if run.rule == "smupar"]
    deeper = [replace(run, model=replace(run.model, depth=2 * size.depth)) for run in sparse]
    deep = [
        replace(run, model=replace(run.model, **_DEEP_MODEL), **_DEEP_BATCH)  # type: ignore[arg-type]
        for run in runs_of(scale, "pretraining", ("mup", "smupar"))
    ]
    return [*seeds, *coupled, *deeper, *deep]


def _proxy(scale: Scale) -> RunConfig:
    width = scale.run("pretraining").base_width
    return replace(scale.run("pretraining", rule="mup", width=width), record=True)


def then(scale: Scale, study: Study) -> list[RunConfig]:
    """The runs of SP at the best learning rate of its dense model, and those that follow the proxy.

    The first need the whole sweep of SP's learning rate, the second need the proxy. In an unfinished study one of the two
    may be ready before the other.
    """
    if scale.name != "small":
        return []
    following = unique([*_tuned_sp(scale, study), *_followers(scale, study)])
    if not following:
        raise ValueError("the sweep of SP and the proxy have not finished: the same command resumes them")
    return following


def _tuned_sp(scale: Scale, study: Study) -> list[RunConfig]:
    """SP at the best learning rate of its dense model; none until all rates of the sweep have ended."""
    swept = study.results(_sp_rates(scale))
    if len(swept) < len(_SP_RATES):
        return []
    lr = min(swept, key=valid_loss).config.lr
    ours = scale.run("pretraining")
    tuned = [replace(scale.run("pretraining", rule="sp", sparsity=s), lr=lr) for s in scale.size("pretraining").sparsities]
    equal = [replace(run, weight_decay=ours.weight_decay * ours.lr / lr) for run in tuned]
    # SP's learning rate is low because of hidden weights. This run gives all other weights muP's higher rate.
    fast_embedding = replace(tuned[-2], rest_lr=lr * ours.model.width / ours.base_width)
    return [*tuned, *equal, fast_embedding]


def _followers(scale: Scale, study: Study) -> list[RunConfig]:
    """Measured updates at the two lowest densities; none until the proxy has ended."""
    if not study.results([_proxy(scale)]):
        return []
    trace = study.trace_to_follow(_proxy(scale))
    ours = scale.run("pretraining")
    return [replace(ours, sparsity=s, follow=str(trace)) for s in scale.size("pretraining").sparsities[-2:]]


# Reading


def _line_of(run: RunConfig, usual_decay: float, sp_rates: set[float]) -> str | None:
    """The line of the picture that a run belongs to; None for the proxy, and for runs of SP's sweep that are not the best."""
    if run.record:
        return None
    if run.rule == "sp":
        if run.rest_lr:
            return _FASTER
        if run.weight_decay != usual_decay:
            return "SP, tuned, LR x decay as the others"
        if run.lr not in sp_rates:
            return None
        return "SP, 2e-4" if run.lr == _PRINTED_SP_LR else "SP, tuned"
    name = "measured updates" if run.follow else title(run.rule)
    return f"{name}, coupled decay" if run.decay == "coupled" else name


def _groups(rows: Rows) -> dict[tuple[int, int], dict[str, dict[float, list[float]]]]:
    """Losses of all seeds by shape, line and sparsity. A shape is (width, depth); the shape with the most runs comes first."""
    usual_decay = next(row.config.weight_decay for row in rows if row.config.rule == "smupar")
    sp_rates = {row.config.lr for row in rows if row.config.rule == "sp" and row.config.sparsity}
    groups: dict[tuple[int, int], dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        run, name = row.config, _line_of(row.config, usual_decay, sp_rates)
        # muP and SmuPar are the same at density 1.
        names = ("muP", "SmuPar") if run.rule == as_rule("smupar", 0.0) and run.sparsity == 0 and name else (name,)
        for line in names:
            if line is not None:
                shape = groups.setdefault((run.model.width, run.model.depth), {})
                shape.setdefault(line, {}).setdefault(run.sparsity or 0.0, []).append(valid_loss(row))
    return dict(sorted(groups.items(), key=lambda item: -sum(map(len, item[1].values()))))


def _means(lines: dict[str, dict[float, list[float]]]) -> dict[str, dict[float, float]]:
    return {name: {s: fmean(seeds) for s, seeds in sorted(own.items())} for name, own in sorted(lines.items())}


# Drawing


def draw(rows: Rows) -> list[Panel]:
    """Loss over weights per neuron for each shape, and for the first shape also the other rules' excess over SmuPar."""
    groups = _groups(rows)
    panels = [_loss_panel(width, depth, lines) for (width, depth), lines in groups.items() if "SmuPar" in lines]
    (width, _), lines = next(iter(groups.items()))
    return [panels[0], _gap_panel(width, lines), *panels[1:]]


_ORDER = ("SP", "muP", "SmuPar", "measured updates")
# Lines of a rule's variants have a darker or a lighter colour than the rule.
_VARIANTS = {
    "SP, 2e-4": mixed(rule_colour("SP"), "#000000", 0.5),
    _FASTER: mixed(rule_colour("SP"), "#000000", 0.25),
    "SP, tuned, LR x decay as the others": mixed(rule_colour("SP"), "#ffffff", 0.45),
    "SmuPar, coupled decay": mixed(rule_colour("SmuPar"), "#ffffff", 0.4),
}


def _loss_panel(width: int, depth: int, lines: dict[str, dict[float, list[float]]]) -> Panel:
    return _panel(f"width {width}, {depth} layers", "validation loss", width, lines)


def _gap_panel(width: int, lines: dict[str, dict[float, list[float]]]) -> Panel:
    """The excess of the other lines' loss over SmuPar's, here and in the paper."""
    ours = _means(lines)["SmuPar"]
    gaps = {
        name: {s: [100 * (loss / ours[s] - 1) for loss in seeds] for s, seeds in own.items() if s in ours}
        for name, own in lines.items()
        if name != "SmuPar"
    }
    in_paper = tuple(
        Line(f"{name} in the paper", (Point(_PAPER_WEIGHTS_PER_NEURON, gap),), rule_colour(name), joined=False, marker="D")
        for name, gap in _PAPER_GAPS.items()
    )
    drawn = _panel("how far others end above SmuPar", "loss above SmuPar's, %", width, gaps)
    return replace(drawn, lines=(*drawn.lines, *in_paper))


def _panel(heading: str, y_label: str, width: int, lines: dict[str, dict[float, list[float]]]) -> Panel:
    """Lines over weights per neuron, the dense model on the left."""
    ordered = dict(sorted(lines.items(), key=lambda item: (_ORDER.index(item[0].partition(",")[0]), item[0])))
    sparsities = {sparsity for own in ordered.values() for sparsity in own}
    drawn = over({sparsity: width * (1 - sparsity) for sparsity in sparsities}, ordered)
    coloured = tuple(
        replace(line, colour=_VARIANTS.get(line.label, line.colour), marker="s" if line.label == _FASTER else line.marker)
        for line in drawn
    )
    return Panel(heading, "weights per neuron", y_label, coloured, falling_x=True)


def _gaps(theirs: dict[float, float], ours: dict[float, float]) -> dict[float, float]:
    return {sparsity: loss / ours[sparsity] - 1 for sparsity, loss in theirs.items() if sparsity in ours}


# Claiming


def claim(rows: Rows) -> Claim:
    lines = next(iter(_groups(rows).values()))
    means, spread = _means(lines), pooled_spread(seeds for own in lines.values() for seeds in own.values())
    rivals = [name for name in means if name == "muP" or name.startswith("SP")]
    gaps = {name: {s: gap for s, gap in _gaps(means[name], means["SmuPar"]).items() if s} for name in rivals}
    over_density = [name for name, own in gaps.items() if len(own) > 1]
    ahead = [_is_ahead(name, gaps[name], spread) for name in over_density]
    return all_of(*ahead, *(_grows(name, gaps[name]) for name in over_density))


def _is_ahead(name: str, gaps: dict[float, float], spread: float | None) -> Claim:
    asked = NUM_SPREADS * (spread or USUAL_SPREAD)
    words = ", ".join(f"{gap:+.1%} at {density_in_words(sparsity)}" for sparsity, gap in gaps.items())
    than = f"more than {NUM_SPREADS} x {spread or USUAL_SPREAD:.2%}, {spread_in_words(spread)}"
    return Claim(min(gaps.values()) > asked, f"{_quoted(name)} ends above SmuPar at every density below 1, by {than}: {words}")


def _grows(name: str, gaps: dict[float, float]) -> Claim:
    shares = list(gaps.values())
    correlation = _rank_correlation(shares)
    text = f"the gap of {_quoted(name)} grows steadily with sparsity, from {shares[0]:+.1%} to {shares[-1]:+.1%} "
    text += f"(rank correlation {correlation:.2f}, more than {_CORRELATION:g} is needed)"
    return Claim(shares[-1] > shares[0] and correlation > _CORRELATION, text)


def _quoted(name: str) -> str:
    return f"'{name}'" if "," in name else name


def _rank_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation of values with their order."""
    ranks = [sorted(values).index(value) for value in values]
    n = len(values)
    return 1 - 6 * sum((rank - index) ** 2 for index, rank in enumerate(ranks)) / (n * (n**2 - 1)) if n > 1 else 0.0


FIGURE = Figure(
    title="Language models over sparsity, no tuning",
    claimed="With the dense model's hyperparameters, SmuPar is ahead of SP and muP, and the more so the sparser the model",
    shows="SmuPar has the best loss at every sparsity, and SP and muP fall behind further as sparsity grows.",
    finding=4,
    runs=runs,
    then=then,
    keeps_weights=True,  # for Table 2
    draw=draw,
    columns=2,
    claim=claim,
)
