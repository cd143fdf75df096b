"""The paper's figures: their settings are the printed ones, figures share runs, and claims can fail."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev

import pytest
import torch

from smupar.check.coordinates.verdict import Slope
from smupar.lm.config.commands import ExportConfig
from smupar.lm.config.presets import TABLE_3
from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.model.gpt import plan_on_meta
from smupar.lm.run.folder import Summary
from smupar.lm.use.export import export
from smupar.paper import fig05 as fig05_module
from smupar.paper import fig12 as fig12_module
from smupar.paper import publish, tab02, tab03
from smupar.paper.fig14 import WITH_ABLATIONS
from smupar.paper.figure import RULES, USUAL_SPREAD, Claim, Place, all_of, curve, curves
from smupar.paper.published import restore
from smupar.paper.reproduce import FIGURES, FINDINGS, Reproduced, dry_run, figure, listed, make_scale, reproduce
from smupar.paper.settings import TABLE_4, Scale, iso_width, wpn_width
from smupar.study.config import EngineConfig
from smupar.study.engines import execute
from smupar.study.optima import Curve, farthest_move
from smupar.study.store import Result, Study

fig01, fig03, fig05, fig06, fig07 = map(figure, ("fig01", "fig03", "fig05", "fig06", "fig07"))
fig08, fig09, fig10, fig11, fig12 = map(figure, ("fig08", "fig09", "fig10", "fig11", "fig12"))
fig13, tab01, tab04, patterns, thin = map(figure, ("fig13", "tab01", "tab04", "patterns", "thin"))
depth = figure("depth")
PAPER = Scale("paper", "data/slimpajama", 50257)
CPU = Scale("cpu")


def finished(config, loss, valid_loss=None):
    status = "finished" if math.isfinite(loss) else "diverged"
    ended = Summary(
        id=config.id,
        status=status,
        folder="",
        steps=config.steps,
        num_tokens=config.num_tokens,
        num_parameters=1,
        sparsity=config.sparsity,
        train_loss=loss if math.isfinite(loss) else None,
        valid_loss=(valid_loss or loss) if math.isfinite(loss) else None,
        best_valid_loss=None,
        best_step=None,
        seconds=1.0,
        tokens_per_second=1.0,
        device="cpu",
        num_ranks=1,
        num_threads=1,
        versions={"torch": "2"},
    )
    return Result(config, ended)


def parabolas(runs, best, floor=lambda config: 4.0, axis="lr"):
    """Losses with the optimum, log2, that ``best`` gives for a run."""
    return [finished(run, floor(run) + 0.05 * (math.log2(getattr(run, axis)) - best(run)) ** 2) for run in runs]


# Settings


def test_table_1_is_executed_as_printed():
    assert tab01.claim(()).holds
    assert "all 7 printed rows" in tab01.claim(()).text


def test_table_4_gives_the_printed_tokens_and_the_610m_model():
    assert tab04.claim(()).holds
    assert "606,519,972" in tab04.claim(()).text
    assert "fig03 tab02" in tab04.text()


@pytest.mark.parametrize(
    ("experiment", "width", "depth", "head", "batch", "steps", "warmup", "schedule"),
    [
        ("sweep", 4096, 2, 64, 128, 1169, 116, "linear"),
        ("init", 4096, 2, 64, 8, 100, 0, "constant"),
        ("pretraining", 2048, 10, 64, 504, 11752, 1175, "linear-to-zero"),
        ("coordinates", 2048, 2, 32, 4, 10, 0, "constant"),
        ("iso-pretraining", 768, 10, 64, 256, 1907, 190, "linear"),
        ("dynamic", 1024, 2, 64, 128, 1169, 116, "linear"),
    ],
)
def test_runs_at_scale_paper_have_the_printed_numbers(experiment, width, depth, head, batch, steps, warmup, schedule):
    run = PAPER.run(experiment)
    assert (run.model.width, run.model.depth, run.model.head_dim) == (width, depth, head)
    assert (run.batch_size, run.seq_len, run.steps, run.warmup_steps, run.schedule) == (batch, 2048, steps, warmup, schedule)
    assert run.base_width == 256


def test_sp_has_its_printed_init_and_rates():
    assert PAPER.run("sweep", rule="sp").init_std == pytest.approx(2.166e-2, rel=1e-3)
    assert PAPER.run("pretraining", rule="sp").init_std == 0.02
    assert PAPER.run("pretraining", rule="sp").lr == 2e-4
    assert PAPER.run("pretraining", rule="mup").lr == 1.62e-2
    assert PAPER.run("wpn", rule="sp").init_std == 0.087
    assert PAPER.run("sweep").init_std == TABLE_4["sweep"].init_std["smupar"]
    assert TABLE_3["lr"] == 1.62e-2


def test_sp_is_tuned_at_scale_small_where_it_is_compared_without_a_sweep():
    small = Scale("small", "data/text", 8192)
    assert CPU.run("pretraining", rule="sp").lr == 2**-8  # width 128
    assert small.run("pretraining", rule="sp").lr == 2e-4  # as printed; Figure 3 sweeps it too
    assert {run.model.width * run.lr for run in fig10.runs(small) if run.rule == "sp"} == {2.0}
    assert small.run("pretraining", rule="mup").lr == 1.62e-2


def test_iso_widths_keep_the_number_of_weights_or_of_weights_per_neuron():
    assert [iso_width(768, sparsity, 64) for sparsity in (0, 0.5, 0.75, 0.875)] == [768, 1088, 1536, 2176]
    assert [wpn_width(512, sparsity) for sparsity in (0, 0.5, 0.75, 0.875)] == [512, 1024, 2048, 4096]
    widths = {(run.rule, run.sparsity): (run.model.width, run.lr) for run in fig10.runs(PAPER)}
    assert widths["sp", 0.5] == (1088, 6e-4)
    assert widths["sp", 0.75] == (1536, 2e-4)
    assert widths["smupar", 0.875] == (2176, 1.62e-2)


def test_every_run_of_every_figure_can_be_planned_at_every_scale():
    for scale in (CPU, Scale("small", "data/text", 8192), PAPER):
        for name in FIGURES:
            wanted = figure(name)
            if wanted.runs:
                kinds = {(run.model, run.rule, run.sparsity, run.dynamic): run for run in wanted.runs(scale)}
                assert len(plan_on_meta(list(kinds.values())[-1])) > 10


# Sharing


def test_figures_share_their_runs():
    ids = {name: {run.id for run in figure(name).runs(CPU)} for name in ("fig01", "fig06", "fig08", "fig14", "fig07", "fig13")}
    assert ids["fig01"] < ids["fig06"] < ids["fig14"]
    assert ids["fig08"] == ids["fig06"]
    assert ids["fig07"] < ids["fig13"]


def test_a_dense_model_is_run_once_for_mup_and_smupar():
    runs = fig06.runs(CPU)
    assert not any(run.rule == "smupar" and run.sparsity == 0 for run in runs)
    rows = parabolas(runs, lambda run: -7)
    assert curve(rows, "smupar", 0.0).losses == curve(rows, "mup", 0.0).losses


def test_ablations_have_one_half_of_smupar_each():
    plans = {rule: plan_on_meta(CPU.run("sweep", rule=rule, sparsity=0.9375)) for rule in WITH_ABLATIONS}
    name = "blocks.0.mlp.up.weight"
    init, rate = (
        {rule: f(plan[name]) for rule, plan in plans.items()} for f in (lambda r: r.init_std, lambda r: r.lr_factors["adam"])
    )
    assert init["smupar-init-only"] == init["smupar"] != init["mup"] == init["smupar-lr-only"]
    assert rate["smupar-lr-only"] == rate["smupar"] != rate["mup"] == rate["smupar-init-only"]


def test_figure_11_has_constant_weights_per_neuron_and_sps_hidden_rates():
    for run in fig11.runs(CPU):
        assert run.model.width * (1 - run.sparsity) == CPU.size("wpn").width
        assert run.rule == "sp"


# Claims


def moving(run):
    """SP and muP go up with sparsity, SmuPar stays."""
    return -7 if run.rule.startswith("smupar") or run.sparsity == 0 else -7 + 1.5 * run.sparsity


def test_figure_6_holds_where_smupar_stays_and_the_others_move():
    floor = lambda run: 4.0 if run.rule == "smupar" or run.sparsity == 0 else 4.2  # noqa: E731
    rows = parabolas(fig06.runs(CPU), moving, floor)
    assert fig06.claim(rows).holds
    assert farthest_move(curves(rows, "sp")) == pytest.approx(2 ** (1.5 * 0.9375), rel=1e-6)
    assert fig01.claim([row for row in rows if row.config.rule != "mup" or row.config.sparsity == 0]).holds
    assert fig08.claim(rows).holds
    assert len(fig06.draw(rows)) == 3


def test_figure_6_fails_where_another_is_better_at_its_dense_tuned_rate():
    floor = lambda run: 3.0 if run.rule == "sp" and run.sparsity > 0 else 4.0  # noqa: E731
    claim = fig06.claim(parabolas(fig06.runs(CPU), moving, floor))
    assert [part.holds for part in claim.parts] == [True, True, True, False]


def sizes(**changed):
    """Slopes of an MLP and its layer as the paper has them: 0.5 under SP and muP, 0 under SmuPar. ``changed`` gives slopes of a
    rule and quantity another value."""

    def slope(rule, what, role, step):
        size = changed.get(f"{rule}_{what.replace(' ', '_')}", 0.0 if rule == "smupar" else 0.5)
        place = "blocks.0.mlp" if role == "block" else "blocks.0.mlp.down"
        return Slope(rule, "density", place, role, role, what, step, width=256, slope=size, ci=0.0, num_seeds=3)

    slopes = [slope(rule, what, role, step) for rule in RULES for what in ("Y", "grad X", "dY") for role in ("block", "hidden")
              for step in (1, 10)]  # fmt: skip
    return fig05_module.SlopesOverDensity(slopes, {"sp": "fail", "mup": "fail", "smupar": "pass"})


@pytest.mark.parametrize(
    ("changed", "answers"),
    [
        ({}, [True] * 6),
        ({"sp_grad_X": -0.5}, [True, False, True, True, True, True]),
        ({"mup_grad_X": 0.1}, [True, True, True, False, True, True]),  # flat, by the check's own threshold
        ({"sp_Y": -0.5}, [False, True, True, True, True, True]),
        ({"sp_dY": -0.5}, [True] * 6),  # not asked for
        ({"smupar_grad_X": 0.3}, [True, True, True, True, True, False]),  # gradients depend on weights
    ],
    ids=["all fall", "gradients grow", "gradients stay", "activations grow", "updates grow", "dependent at init"],
)
def test_figure_5_wants_activations_and_gradients_that_fall(changed, answers):
    assert [part.holds for part in fig05.claim(sizes(**changed)).parts] == answers


def test_figure_5_reads_gradients_at_layers_and_activations_at_blocks():
    slopes = [replace(s, slope=-0.5) if s.role == "hidden" and s.quantity == "grad X" and s.rule == "sp" else s
              for s in sizes().slopes]  # fmt: skip
    grown = fig05.claim(replace(sizes(), slopes=slopes)).parts[1]
    assert (grown.holds, "in 0 of 1" in grown.text) == (False, True)
    blocks = [replace(s, slope=-0.5) if s.role == "block" and s.quantity == "grad X" else s for s in sizes().slopes]
    assert fig05.claim(replace(sizes(), slopes=blocks)).holds


def test_figure_5_is_measured_with_the_settings_of_its_row():
    run = PAPER.run("coordinates", rule="sp")
    assert (run.lr, run.init_std, run.alpha_input, run.alpha_output) == (1.68e-2, 0.101, 11.22, 1.0)
    assert PAPER.run("coordinates").lr == 1.62e-2


def test_figure_6_fails_where_smupar_moves():
    rows = parabolas(fig06.runs(CPU), lambda run: -7 + 1.5 * run.sparsity)
    claim = fig06.claim(rows)
    assert not claim.holds
    assert "NO: SmuPar's best learning rate moves 2.7x" in claim.text


def test_figure_8_fails_where_smupar_is_worse():
    rows = parabolas(fig06.runs(CPU), moving, lambda run: 4.1 if run.rule == "smupar" else 4.0)
    assert not fig08.claim(rows).holds


def test_figure_8_leaves_out_density_1():
    sp_loses_when_dense = parabolas(fig06.runs(CPU), moving, lambda run: 5.0 if run.rule == "sp" and run.sparsity == 0 else 4.0)
    assert [part.holds for part in fig08.claim(sp_loses_when_dense).parts] == [False, False]
    ahead = parabolas(fig06.runs(CPU), lambda run: -7, lambda run: 4.0 if run.rule == "smupar" else 4.04)
    assert fig08.claim(ahead).holds
    assert "SP is +1.0% from SmuPar on average, more than 0.4% asked: +1.0% at 0.75, +1.0% at 0.9375" in fig08.claim(ahead).text


def test_figures_7_and_13_read_the_init():
    runs = fig13.runs(CPU)
    best = lambda run: -3 if run.rule == "smupar" or run.sparsity == 0 else -3 - 2.5 * run.sparsity  # noqa: E731
    rows = parabolas(runs, best, axis="init_std")
    assert fig07.claim(rows).holds
    assert fig13.claim(rows).holds
    assert not fig13.claim(parabolas(runs, lambda run: -3, axis="init_std")).holds


@pytest.mark.parametrize(
    ("move", "floor", "answers"),
    [
        (2.5, 4.0, [True, True, True, True]),
        (0.0, 4.5, [False, True, False, True]),  # loses without moving
        (2.5, 3.0, [True, False, True, False]),  # moves and is better all the same
        (0.1, 4.005, [False, False, False, False]),  # 1.07x and 0.14 % are no more than chance
    ],
)
def test_ablations_must_move_farther_and_lose_more(move, floor, answers):
    is_ablation = lambda run: run.rule.startswith("smupar-") and run.sparsity > 0  # noqa: E731
    rows = parabolas(
        fig13.runs(CPU),
        lambda run: -3 - move * run.sparsity / 0.9375 if is_ablation(run) else -3,
        lambda run: floor if is_ablation(run) else 4.0,
        axis="init_std",
    )
    assert [part.holds for part in fig13.claim(rows).parts] == answers


def test_figure_9_wants_a_loss_that_holds():
    runs = fig09.runs(CPU)
    better = lambda run: 4.0 - 0.1 * run.sparsity  # noqa: E731
    optimum = lambda run: -7 if run.rule == "smupar" else -7 + 2 * run.sparsity  # noqa: E731
    assert fig09.claim(parabolas(runs, optimum, better)).holds
    assert not fig09.claim(parabolas(runs, lambda run: -7, better)).holds  # SP's and muP's stay as well
    hardly = lambda run: -7 + (0.2 if run.rule == "smupar" else 0.3) * run.sparsity / 0.75  # noqa: E731
    assert not fig09.claim(parabolas(runs, hardly, better)).holds  # 1.23x is not said to be more than 1.15x
    assert not fig09.claim(parabolas(runs, optimum, lambda run: 4.0 + 0.1 * run.sparsity)).holds


def test_figure_10_compares_at_every_width():
    losses = {"sp": 4.2, "mup": 4.1, "smupar": 4.0}
    rows = [finished(run, losses[run.rule]) for run in fig10.runs(CPU)]
    assert fig10.claim(rows).holds
    worse = [finished(row.config, 4.3) if row.config.rule == "smupar" and row.config.sparsity == 0.5 else row for row in rows]
    assert not fig10.claim(worse).holds


@pytest.mark.parametrize(("seed_adds", "holds"), [(None, True), (0.001, True), (0.1, False)])
def test_figure_10_asks_for_a_lead_of_twice_the_spread_of_seeds(seed_adds, holds):
    """SmuPar leads by 1 %. One seed has the usual spread, 0.2 %; 0.1 between two seeds is a spread of 1.8 %."""
    rows = [finished(run, 4.0 if run.rule == "smupar" else 4.04) for run in fig10.runs(CPU)]
    more = [finished(replace(row.config, seed=1), row.loss + seed_adds) for row in rows] if seed_adds else []
    assert fig10.claim([*rows, *more]).holds is holds
    close = [finished(run, 4.0 if run.rule == "smupar" else 4.012) for run in fig10.runs(CPU)]  # 0.3 %
    assert not fig10.claim(close).holds


def test_usual_spread_of_seeds_is_that_of_figures_6_and_12():
    """The median over configurations with several seeds of the standard deviation over the mean, rounded to 0.1 %."""
    groups = {}
    for name in ("fig06", "fig12"):
        facts = json.loads((RESULTS / f"{name}.json").read_text())
        for row in publish.results(facts):
            if row.summary.train_loss is not None:
                groups.setdefault(replace(row.config, seed=0).id, {})[row.config.seed] = row.summary.train_loss
    shares = [stdev(seeds.values()) / fmean(seeds.values()) for seeds in groups.values() if len(seeds) > 1]
    assert len(shares) > 100
    assert round(median(shares), 3) == USUAL_SPREAD


def test_figure_3_wants_gaps_that_grow():
    gap = {"sp": 0.2, "mup": 0.1, "smupar": 0.0}
    assert fig03.claim([finished(run, 4 + gap[run.rule] * run.sparsity) for run in fig03.runs(CPU)]).holds
    assert not fig03.claim([finished(run, 4 + gap[run.rule] * (1 - run.sparsity)) for run in fig03.runs(CPU)]).holds


def figure_3_rows(ours=0.0, sp=0.2, seeds=0.001):
    """Rows of all runs at scale small: rules apart by a share that grows with sparsity, and what seeds add."""
    gap = {"sp": sp, "mup": 0.1, "smupar": ours}
    first = fig03.runs(Scale("small", "data/text", 8192))
    tuned = [replace(run, lr=2**-10, weight_decay=decay) for run in first if run.lr == 2e-4 for decay in (0.1, 1.0)]
    return [finished(run, 4 * (1 + gap[run.rule] * run.sparsity) + seeds * run.seed) for run in [*first, *tuned]]


def test_figure_3_asks_whether_the_lead_is_more_than_the_spread_of_seeds():
    assert fig03.claim(figure_3_rows()).holds
    noisy = fig03.claim(figure_3_rows(seeds=0.5))
    assert not any(part.holds for part in noisy.parts[:4])
    assert "muP ends above SmuPar at every density" in noisy.parts[3].text
    assert not fig03.claim(figure_3_rows(sp=-0.1)).holds


def test_figure_3_has_a_line_for_each_chance_of_sp():
    loss, gaps, *others = fig03.draw(figure_3_rows())
    names = {line.label: [point.x for point in line.points] for line in loss.lines}
    assert set(names) == {
        *("SP, 2e-4", "SP, tuned", "SP, tuned, LR x decay as the others", "muP", "SmuPar", "SmuPar, coupled decay"),
    }
    assert names["SmuPar"] == [2048, 256, 64, 16]
    assert {line.label: line.points[0].y for line in gaps.lines}["SP in the paper"] == 11.9
    assert [panel.title for panel in others] == ["width 512, 8 layers", "width 2048, 4 layers"]


def test_runs_of_every_figure_have_the_decay_and_clipping_that_were_asked_for():
    for scale, numbers in ((Scale("cpu"), {(0.1, 1.0)}), (Scale("cpu", weight_decay=0.0, clip=None), {(0.0, None)})):
        for name in FIGURES:
            if name not in ("decay", "drift") and (runs := figure(name).runs):
                assert {(run.weight_decay, run.clip) for run in runs(scale)} == numbers
    assert [Scale("cpu").folder, Scale("cpu", weight_decay=0.0, clip=None).folder] == ["cpu", "cpu-decay-0-no-clip"]


def test_figure_12_moves_masks_as_the_paper_and_as_often_in_short_runs():
    assert {run.mask_every for run in fig12.runs(PAPER) if run.dynamic != "none"} == {100}
    assert {run.steps / run.mask_every for run in fig12.runs(CPU) if run.dynamic != "none"} == {20}


def test_figure_12_reads_five_columns():
    def follows(run):
        ours = run.rule == "smupar" and (run.correction == "moment" or not run.prunes)
        return run.model.width > run.base_width and (ours or (run.sparsity == 0 and run.rule == "mup"))

    measured = [replace(run, rule="smupar", follow="proxy-0.trace.json") for run in fig12.runs(CPU) if follows(run)]

    def best(run):
        if run.follow or run.sparsity == 0 or (run.prunes and run.correction == "moment"):
            return -6
        return -6 - 2.5 * run.sparsity if run.rule == "smupar" else -6 + run.sparsity

    rows = parabolas([*fig12.runs(CPU), *measured], lambda run: best(run) - 1)
    assert [part.holds for part in fig12.claim(rows).parts] == 2 * [True, False, False, True, True]  # SP and muP rise by 1.9x
    rising = parabolas([*fig12.runs(CPU), *measured], lambda run: -12 - best(run) if best(run) < -6 else best(run))
    assert [part.holds for part in fig12.claim(rising).parts if "falls" in part.text] == [False, False]
    farther = parabolas([*fig12.runs(CPU), *measured], lambda run: best(run) - 1 + 0.3 * (best(run) > -6))
    assert fig12.claim(farther).holds
    at_edge = parabolas([*fig12.runs(CPU), *measured], lambda run: best(run) + 0.3 * (best(run) > -6))
    assert [part.holds for part in fig12.claim(at_edge).parts] == 2 * [True, None, None, True, True]
    assert [panel.title.partition(":")[0] for panel in fig12.draw(rows)] == [
        *("GMP, SP", "GMP, muP", "GMP, SmuPar", "GMP, measured updates", "GMP, density of the moment"),
        *("RigL, SP", "RigL, muP", "RigL, SmuPar", "RigL, measured updates"),
    ]


@pytest.mark.parametrize(
    ("optima", "holds"), [((-6, -7, -8), True), ((-6, -5, -8), False), ((-6, -6.4, -6.9), False)],
    ids=["falls", "not monotone", "less than a step"],
)  # fmt: skip
def test_figure_12_wants_smupar_to_fall_all_the_way_by_more_than_a_step(optima, holds):
    values = tuple(2.0**log2 for log2 in range(-10, -2))
    curves = [
        Curve("smupar", 128, sparsity, values, tuple(4 + (math.log2(value) - best) ** 2 for value in values))
        for sparsity, best in zip((0.0, 0.75, 0.9375), optima, strict=True)
    ]
    assert fig12_module._falls(curves, "RigL").holds is holds


@pytest.mark.parametrize(("per_octave", "holds"), [(1.0, True), (0.26, False)], ids=["in proportion", "as we found for SP"])
def test_learning_rate_in_proportion_to_weights_per_neuron_is_told_from_less(per_octave, holds):
    runs = figure("wpn").runs(CPU)
    rows = parabolas(runs, lambda run: -9 - per_octave * math.log2(1 - run.sparsity))
    claim = figure("wpn").claim(rows)
    assert claim.holds is holds
    assert f"an exponent of {per_octave:.2f}" in claim.text
    assert [point.x for point in figure("wpn").draw(rows)[0].lines[0].points] == [128, 32, 8]


def test_exponent_at_the_edge_of_the_grid_is_a_lower_bound():
    rows = parabolas(figure("wpn").runs(CPU), lambda run: -5 - 0.3 * math.log2(1 - run.sparsity))
    assert [part.holds for part in figure("wpn").claim(rows).parts] == [None, None]
    assert "or further (edge of the grid)" in figure("wpn").claim(rows).text


def test_one_answer_of_no_decides_and_cannot_tell_comes_next():
    yes, no, unknown = Claim(True, "a"), Claim(False, "b"), Claim(None, "c")
    assert all_of(yes, yes).holds is True
    assert all_of(yes, unknown).holds is None
    assert all_of(unknown, no).holds is False
    assert all_of(yes, no, unknown).text == "yes: a; NO: b; CANNOT TELL: c"


TABLE_2 = """model   ARC-easy    BoolQ       average
random  25.0        50.0        31.2
muP 0   70.0 ± 1.0  70.0 ± 1.0  70.0 ± 1.0
SP 0    70.0 ± 1.0  70.0 ± 1.0  70.0 ± 1.0
{}

4 models, 2 tasks, 10 documents, lm-eval 1
"""


@pytest.mark.parametrize(
    ("smupar", "sp", "holds", "said"),
    [
        ("60.0 ± 1.0", "50.0 ± 1.0", True, "SmuPar 2, muP 0, SP 0; in 2 of them"),
        ("50.0 ± 1.0", "60.0 ± 1.0", False, "SmuPar 0, muP 0, SP 2; in 2 of them"),
        ("50.5 ± 1.0", "50.0 ± 1.0", None, "SmuPar 2, muP 2, SP 2; in 0 of them"),  # all at chance
    ],
)
def test_table_2_cannot_tell_where_all_rules_are_alike(smupar, sp, holds, said):
    lines = [f"SmuPar 0.5  {smupar}  {smupar}  1.0", "muP 0.5  50.0 ± 1.0  50.0 ± 1.0  1.0", f"SP 0.5  {sp}  {sp}  1.0"]
    claim = tab02.claim(TABLE_2.format("\n".join(lines)))
    assert claim.holds is holds
    assert said in claim.text


def test_drift_asks_about_the_end_of_the_run():
    def table(last):
        ends = {"no decay": 9.0, "independent": last, "coupled": 2.0}
        return "\n".join(["step  1  2000", *(f"{way}, density 1/8  1.0  {end}" for way, end in ends.items())])

    drift = figure("drift")
    assert drift.claim(drift.from_facts({"table": table(1.9)})).holds
    ends_larger = drift.claim(drift.from_facts({"table": table(2.4)}))
    assert [part.holds for part in ends_larger.parts] == [False, True, True, True]
    assert "step 2000: 2.4x at density 1/8, at most 2x asked" in ends_larger.parts[0].text


def test_table_3_compares_the_best_sample_with_defaults():
    runs = tab03.runs(CPU)
    assert len(runs) == 2 + tab03.NUM_SAMPLES["cpu"]
    assert runs[1].lr == TABLE_3["lr"]
    assert tab03.claim([finished(run, 5.0 if run is runs[0] else 4.5) for run in runs]).holds
    assert not tab03.claim([finished(run, 4.0 if run is runs[0] else 4.5) for run in runs]).holds
    assert len({run.id for run in tab03.runs(PAPER)}) == 352


def depth_rows(best, floor=lambda run: 4.0):
    return parabolas([*depth.runs(CPU), *depth.last(CPU)], best, floor)


def test_depth_is_judged_by_the_dense_bases_optimum():
    moved = depth_rows(lambda run: -6.5 - (2 if run.depth_rule == "none" else 0), lambda run: 4.0 + (run.depth_rule == "none"))
    claimed = depth.claim(moved)
    assert claimed.holds
    assert "CompleteP with SmuPar the best learning rate moves 1x from the dense base" in claimed.text
    assert "depth-muP (alpha 1/2) 1x" in claimed.text
    with_width = depth_rows(lambda run: -6.5 if run.model.width == 64 else -5.1, lambda run: 4.0)
    assert [part.holds for part in depth.claim(with_width).parts] == [True, True, False, False]
    first = depth.claim([row for row in moved if row.config.depth_rule != "depth-mup"])
    assert first.holds
    assert "depth-muP" not in first.text
    shallow = [row for row in moved if row.config.model.depth == 2]
    assert depth.claim(shallow).holds is None
    titles = [each.title.partition(":")[0] for each in depth.draw(moved)]
    assert titles[0] == "CompleteP (alpha 1), density 1"
    assert len(titles) == 2 * 3 + 2


def test_depth_study_has_every_model_of_base_depth_once():
    runs = depth.runs(Scale("small"))
    assert len({run.id for run in runs}) == len(runs) == 7 * 3 * (1 + 4 * 2)
    compared = {run.id for run in depth.last(Scale("small")) if run.depth_rule == "depth-mup"}
    assert len(compared) == 7 * 3 * 4
    assert not compared & {run.id for run in runs}
    shallow = [run for run in runs if run.model.depth == 2]
    assert {(run.base_depth, run.depth_rule) for run in shallow} == {(None, None)}
    assert {(run.weight_decay, run.decay, run.clip, run.steps, run.model.width) for run in runs} == {
        (0.1, "independent", 1.0, 500, 256)
    }
    assert not any(run.model.residual_factor for run in runs)
    far = [run for run in depth.last(Scale("small")) if run.steps == 2000 and run.model.depth == 16]
    assert {(run.model.width, run.sparsity, run.steps, run.base_width, run.base_depth) for run in far} == {
        (1024, 15 / 16, 2000, 256, 2)
    }


def test_patterns_and_thin_masks_are_compared_with_the_dense_model():
    rows = parabolas(patterns.runs(CPU), lambda run: -7 + (0.5 if run.allocation == "erk" else 0))
    assert patterns.claim(rows).holds
    assert "ERK: the best learning rate moves 1.4x" in patterns.claim(rows).text
    thinner = parabolas(thin.runs(CPU), lambda run: -7 if run.sparsity < 1 - 10 / 128 else -9)
    assert thin.claim(thinner).holds
    assert "8: 4x" in thin.claim(thinner).text
    assert not thin.claim(parabolas(thin.runs(CPU), lambda run: -7 - 2 * (run.sparsity > 0))).holds


# Running


def test_list_names_every_figure_and_finding():
    text = listed()
    assert all(f"{name}  " in text for name in FIGURES)
    assert all(f"Finding {number}: " in text for number in FINDINGS)


def test_dry_run_at_scale_paper_counts_runs_and_hours():
    def cost(name, scale):
        return str(dry_run(name, scale, EngineConfig(), out="unused"))

    text = cost("fig03", make_scale("paper", None, reads=False))
    assert "runs        23" in text
    assert "606,519,972" in text
    assert "633.1 GPU-hours" in text
    assert cost("tab01", PAPER) == "tab01: nothing is trained"
    assert "width 2048 (base 256), at sparsity 0, 0.5" in cost("fig05", PAPER)


def test_tables_are_written_without_training(tmp_path):
    done = reproduce("tab01", CPU, EngineConfig(), out=str(tmp_path))
    assert done.claim.holds
    assert "hidden init variance" in (tmp_path / "cpu" / "tab01" / "table.txt").read_text()


def test_figure_is_drawn_from_the_runs_that_are_there(tmp_path):
    with Study.open(tmp_path / "cpu" / "study", {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}, "") as study:
        for row in parabolas(fig11.runs(CPU), lambda run: -7):
            study.add(row.config, row.summary)
    reproduce("tab01", CPU, EngineConfig(), out=str(tmp_path))
    done = reproduce("fig11", CPU, EngineConfig(), out=str(tmp_path))
    assert done.claim.holds
    assert {path.name for path in done.folder.iterdir()} == {
        *("picture.png", "report.html", "rows.csv", "rows.json", "claim.json")
    }
    assert done.verdict == "HOLDS"
    assert done.values["text"].startswith("SP's best learning rate moves 1x")
    with Study.open(tmp_path / "cpu" / "study", {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}, "") as study:
        study.remember("trace", "proxy.json", "abc")
        assert study.files([replace(done.rows[0].config, follow="runs/proxy.json")]) == {
            **done.files,
            "trace proxy.json": "abc",
        }
    publish.publish(done, CPU, tmp_path / "pages")
    assert list(json.loads((tmp_path / "pages" / "fig11.json").read_text())["files"]) == ["text stdlib"]


def test_rows_of_a_published_page_stand_for_their_runs(tmp_path, capsys):
    """Nothing is trained: all runs but the last are published, and that one is missing."""
    with Study.open(tmp_path / "a" / "cpu" / "study", {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}, "") as study:
        for row in parabolas(fig11.runs(CPU), lambda run: -7)[:-1]:
            study.add(row.config, row.summary)
        study.remember("text", "stdlib", open_text(row.config).facts.sha256)
    made = reproduce("fig11", CPU, EngineConfig(), out=str(tmp_path / "a"), so_far=True)
    pages = tmp_path / "pages"
    page = publish.publish(made, CPU, pages)
    assert made.missing == 1
    assert f"{len(made.rows)} runs (1 more are planned)" in page.read_text()

    again = reproduce("fig11", CPU, EngineConfig(), out=str(tmp_path / "b"), published=str(pages), so_far=True)
    assert f"{len(made.rows)} runs are taken from the rows in {pages}" in capsys.readouterr().err
    assert [(row.config, row.loss) for row in again.rows] == [(row.config, row.loss) for row in made.rows]
    assert (again.missing, again.claim) == (1, made.claim)
    publish.publish(again, CPU, tmp_path / "copies")
    facts = [json.loads((folder / "fig11.json").read_text()) for folder in (pages, tmp_path / "copies")]
    assert facts[0] == facts[1]

    for field, value in (("files", {"text stdlib": "of another text"}), ("scale", "small")):
        (pages / "fig11.json").write_text(json.dumps({**facts[0], field: value}))
        with pytest.raises(ValueError, match="no run of this figure has ended"):
            reproduce("fig11", CPU, EngineConfig(), out=str(tmp_path / field), published=str(pages), so_far=True)


def test_rows_never_stand_for_runs_that_record_or_follow_a_trace(tmp_path):
    row = parabolas(fig11.runs(CPU), lambda run: -7)[0]
    configs = [replace(row.config, record=True), replace(row.config, follow="proxy.json"), row.config]
    rows = [replace(row, config=config, summary=replace(row.summary, id=config.id)) for config in configs]
    files = {"text stdlib": open_text(row.config).facts.sha256}
    publish.publish(Reproduced("fig11", Claim(True, "said"), tmp_path, rows, files), CPU, tmp_path / "pages")
    with Study.open(tmp_path / "study", {"kind": "test"}, "") as study:
        assert restore(study, tmp_path / "pages", CPU, configs) == 1
        assert [result.config for result in study.results(configs)] == [row.config]


def test_unknown_figure_and_missing_text_are_named():
    with pytest.raises(ValueError, match="fig04 is a diagram"):
        figure("fig04")
    with pytest.raises(ValueError, match="no figure or table is called 'fig99': choose one of tab01, fig01"):
        figure("fig99")
    with pytest.raises(ValueError, match="scale small needs text: make some with `smupar data prepare`"):
        make_scale("small", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_scale_for_a_gpu_is_refused_without_one(tmp_path):
    with pytest.raises(ValueError, match="scale small is for a GPU and torch sees none: try --scale cpu"):
        reproduce("fig06", Scale("small"), EngineConfig(), out=str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_docs_list_rules_and_reductions_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    assert tab04.text() in page
    assert tab04.text() in (RESULTS / "tab04.md").read_text()
    assert tab01.text() in (RESULTS / "tab01.md").read_text()


RESULTS = Path(__file__).parents[2] / "docs" / "results"


PUBLISHED = pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")


@PUBLISHED
def test_published_numbers_can_be_followed_to_their_runs(path):
    facts = json.loads(path.read_text())
    assert [result.config.id for result in publish.results(facts)] == [row["id"] for row in facts["rows"]]
    assert all(re.fullmatch("[0-9a-f]{7,40}", row["commit"]) for row in facts["rows"])  # not unknown, not dirty


@PUBLISHED
def test_published_page_is_what_its_facts_say(path):
    page, facts = path.with_suffix(".md").read_text(), json.loads(path.read_text())
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert all((path.parent / name).exists() for name in pictures)
    assert page == publish.page_of(facts, pictures, page.partition(publish.BY_HAND)[2].strip())


@PUBLISHED
def test_page_of_runs_without_decay_says_so_in_its_first_line(path):
    decays = {result.config.weight_decay for result in publish.results(json.loads(path.read_text()))}
    first = path.with_suffix(".md").read_text().splitlines()[2]
    assert ("without weight decay" in first) == (decays == {0.0})


@PUBLISHED
def test_published_claims_are_those_of_the_published_rows(path):
    facts = json.loads(path.read_text())
    claim = figure(path.stem).claim(publish.measured_in(facts))
    assert [(part.holds, part.text) for part in claim.parts or (claim,)] == [(c["holds"], c["text"]) for c in facts["claims"]]


def test_list_of_results_is_that_of_the_pages():
    assert (RESULTS / "README.md").read_text() == publish.index(RESULTS)


def test_page_of_a_check_says_where_it_was_made_and_holds_its_slopes(tmp_path):
    made = {"device": "NVIDIA H200", "torch": "2.11", "commit": "abc", "seconds": 90}
    slope = {
        "rule": "sp",
        "place": "up",
        "kind": "layer",
        "role": "hidden",
        "quantity": "Y",
        "slope": 0.49876,
        "ci": 0.0,
        "verdict": "fail",
    }
    slopes = [{**slope, "step": step} for step in (0, 1, 2, 10)] + [{**slope, "step": 1, "role": "embedding"}]
    (tmp_path / "made-on.json").write_text(json.dumps(made))
    (tmp_path / "check.json").write_text(json.dumps({"slopes": slopes, "verdicts": {"sp": "fail"}}))
    page = publish.publish(Reproduced("fig05", Claim(True, "said"), tmp_path), CPU, tmp_path / "pages")
    assert "NVIDIA H200, torch 2.11, 1.5 minutes in all. Made by commit abc." in page.read_text()
    facts = json.loads((tmp_path / "pages" / "fig05.json").read_text())
    assert (facts["minutes"], facts["commits"], facts["devices"]) == (1.5, ["abc"], ["NVIDIA H200, torch 2.11"])
    assert [(one["step"], one["slope"]) for one in facts["slopes"]] == [(1, 0.4988), (10, 0.4988)]


def test_publishing_again_keeps_what_was_written_by_hand(tmp_path):
    rows = parabolas(fig06.runs(CPU), lambda run: -6)
    (tmp_path / "fig06").mkdir()
    done = Reproduced("fig06", fig06.claim(rows), tmp_path / "fig06", rows)
    page = publish.publish(done, CPU, tmp_path / "pages")
    page.write_text(page.read_text().replace("Nothing to note yet.", "Ours are *smaller*."))
    assert publish.publish(done, CPU, tmp_path / "pages").read_text().endswith("## Where they differ\n\nOurs are *smaller*.\n")
    with pytest.raises(ValueError, match="was made at scale cpu: publish scale paper in another folder"):
        publish.refuse_other_scale(tmp_path / "pages", ["fig05", "fig06"], PAPER)
    publish.refuse_other_scale(tmp_path / "pages", ["fig05", "fig06"], CPU)
    facts = json.loads((tmp_path / "pages" / "fig06.json").read_text())
    assert [result.config.id for result in publish.results(facts)] == [row.config.id for row in rows]


def test_table_2_evaluates_the_runs_that_a_study_kept(tmp_path, capsys):
    tiny = RunConfig(model=ModelConfig(width=64, head_dim=32), steps=2, batch_size=2, seq_len=32, valid_batches=1)
    with Study.open(tmp_path / "study", {"kind": "test"}, "", keeps_weights=True) as study:
        runs = [replace(tiny, rule=rule, sparsity=0.75) for rule in ("sp", "smupar")]
        execute(study, runs, engine="stacked")
    asked = tmp_path / "tasks"
    asked.mkdir()
    for task in ("arc_easy", "piqa", "boolq"):
        (asked / f"{task}.jsonl").write_text(json.dumps({"query": "Question: a?", "choices": ["b", "c"], "gold": 0}) + "\n")
    (asked / "lambada_openai.jsonl").write_text(json.dumps({"context": "one two", "continuation": " three"}) + "\n")
    export(ExportConfig(str(study.runs / runs[0].id), str(tmp_path / "exported")))
    rows = study.results(runs)
    measured = rows[0].summary.valid_loss
    assert f"{measured:.4f} nats per token" in (tmp_path / "exported" / "README.md").read_text()
    table = figure("tab02").measure(Place(CPU, tmp_path / "out", study.runs, "cpu", str(asked)), rows)
    assert "2 models, 4 tasks, 4 documents, lm-eval" in tab02.claim(table).text
    assert (tmp_path / "out" / "table.txt").read_text() == table == capsys.readouterr().out
    assert "SP 0.75" in table
    assert "SmuPar 0.75" in table
    assert "random" in table


# Decay


def decayed(scan, other=lambda config: 1.0):
    """Rows of the decay study, with a loss for each amount, times what ``other`` gives for the rest of a configuration."""
    runs = figure("decay").runs(Scale("small", "data/wiki8k", 8192))
    return [finished(run, scan(run.weight_decay) * other(run)) for run in runs]


def test_decay_holds_only_if_the_dense_optimum_serves_every_density():
    claim = figure("decay").claim

    def valley(best):
        return lambda decay: 4 + 10 * (decay - best) ** 2

    def worse(run):
        return 1.01 if run.decay == "coupled" or run.decayed != "all" or run.lr != 2**-6 else 1.0

    assert claim(decayed(valley(0.1), worse)).holds
    assert not claim(decayed(valley(0.1))).holds  # coupled decay is no worse
    assert not claim(decayed(valley(0.0), worse)).holds  # none is best
    moved = [finished(row.config, valley(0.1 if row.config.sparsity == 0 else 0.4)(row.config.weight_decay) * worse(row.config))
             for row in decayed(valley(0.1), worse)]  # fmt: skip
    assert not claim(moved).holds
