"""Transfer studies: optima, moves, sentences, seeds and depths."""

import math
from dataclasses import asdict, replace

import pytest

from smupar.cli.main import main
from smupar.study.axes import parse_axes
from smupar.study.config import EngineConfig, TransferConfig
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.curves.optima import Curve, move_in_words, moved
from smupar.study.curves.picture import draw_png
from smupar.study.definition import more_seeds
from smupar.study.engines import execute
from smupar.study.kinds.transfer import Verdict, _answer, analyse, headline, next_steps, panels, proposals, sentence
from smupar.study.report import write_report
from smupar.study.stages import run_until_complete
from smupar.study.store import Study
from tests.study.tiny import TINY, TINY_FLAGS, summary


def curve(optimum, sparsity=0.0, rule="sp", is_proxy=False, floor=3.0):
    values = tuple(2.0**exponent for exponent in range(-11, -3))
    losses = tuple(floor + 0.1 * (math.log2(value) - optimum) ** 2 for value in values)
    return Curve(rule, 64 if is_proxy else 256, sparsity, values, losses, is_proxy)


@pytest.mark.parametrize(
    ("optima", "words"),
    [
        ((-7, -6, -7.5), "2x"),
        ((-7, -6, -2), "8x or further"),
        ((-2, -6), "4x or further"),
        ((-2, -1, -3), "?x (edge of the grid)"),
        ((-2, -20), "128x or further"),
    ],
)
def test_moves_to_the_edge_of_the_grid_are_not_said_to_be_known(optima, words):
    assert move_in_words([curve(optimum) for optimum in optima]) == words


@pytest.mark.parametrize(
    ("optima", "told", "tone"),
    [
        ((-7, -6), "The learning rate transfers under SmuPar (its best stays within 2x).", "good"),
        ((-7, -5.5), "The learning rate does not transfer under SmuPar.", "bad"),
        ((-5, -4), "These runs cannot tell about SmuPar.", "unclear"),
        ((-4, -4), "These runs cannot tell about SmuPar.", "unclear"),
        ((-6, -4), "The learning rate does not transfer under SmuPar.", "bad"),
    ],
)
def test_lower_bound_of_a_move_is_no_pass(optima, told, tone):
    proxy, target = (curve(optimum) for optimum in optima)  # the grid ends at 2^-4
    verdict = Verdict("smupar", proxy, (target,))
    assert headline([verdict], "learning rate") == told
    assert verdict.tone == tone


def test_smooth_minimum_is_the_vertex_of_the_parabola():
    assert curve(-7.3).best == pytest.approx(2**-7.3)
    assert not curve(-7.3).on_edge
    assert curve(-12).on_edge
    assert curve(-12).best == 2.0**-11


def test_neighbour_that_diverged_leaves_the_best_on_the_grid():
    steep = curve(-6.3)
    losses = tuple(math.inf if value > 2**-6 else loss for value, loss in zip(steep.values, steep.losses, strict=True))
    assert replace(steep, losses=losses).best == 2.0**-6


def test_excess_is_relative_to_the_best_loss():
    assert curve(-7).excess(2**-9) == pytest.approx(0.4 / 3.0)
    assert curve(-7).excess(2**-8.5) == pytest.approx((0.1 + 0.4) / 2 / 3.0)


def test_sentence_says_how_far_optima_moved_and_what_it_costs():
    config = TransferConfig(run=TINY, rules=("sp", "smupar"))
    verdicts = [
        Verdict("sp", curve(-10, is_proxy=True), (curve(-10), curve(-6, 0.9375))),
        Verdict("smupar", curve(-7, is_proxy=True), (curve(-7, rule="smupar"), curve(-6, 0.9375, "smupar"))),
    ]
    assert moved(verdicts[0].proxy, verdicts[0].targets[1]) == pytest.approx(16)
    text = sentence(config, verdicts)
    assert "SP's 16x, SmuPar's 2x" in text
    assert "at density 1/16, width 256, the proxy's best swept learning rate costs SP 53.3%, SmuPar 3.3%" in text
    assert "edge" not in text


def test_best_swept_value_costs_nothing():
    off = curve(-7.4)
    assert off.best_value == 2**-7
    assert off.excess(off.best_value) == 0


def test_target_of_which_every_run_diverged_counts_against_its_rule():
    config = TransferConfig(run=TINY, rules=("sp", "smupar"))
    lost = replace(curve(-6, 0.9375), losses=(math.inf,) * 8)
    verdicts = [
        Verdict("sp", curve(-10, is_proxy=True), (curve(-10), lost)),
        Verdict("smupar", curve(-7, is_proxy=True), (curve(-7, rule="smupar"), curve(-6, 0.9375, "smupar"))),
    ]
    text = sentence(config, verdicts)
    assert "SP's out of reach, SmuPar's 2x" in text
    assert "at density 1/16, width 256, the proxy's best swept learning rate costs SP a diverged run, SmuPar 3.3%" in text
    assert "Every run diverged, so there is no best learning rate: SP at density 1/16, width 256." in text
    assert "edge" not in text
    assert panels(config, verdicts)[0].lines[-1].best is None


def test_proposals_share_the_dense_runs_of_mup_and_smupar():
    config = TransferConfig(run=TINY, widths=(64,), sparsities=(0.0, 0.75), values=(0.001, 0.002, 0.004))
    runs = proposals(config)
    # SP: proxy, dense, sparse. muP and SmuPar: proxy and dense together, each a sparse one.
    assert len(runs) == 3 * (3 + 2 + 2)
    assert {run.init_std for run in runs if run.rule == "sp" and run.model.width == 64} == {0.087 * math.sqrt(32 / 64)}


def test_other_axes_are_swept_around_the_tuned_value():
    assert TransferConfig(run=TINY, axis="alpha_output").normalised.values[3] == TINY.alpha_output
    assert len(TransferConfig(run=TINY, axis="init_std").normalised.values) == 7


def test_axes_are_given_once():
    assert parse_axes(["lr=2^-3,0.5", "rule=sp"]) == {"lr": [0.125, 0.5], "rule": ["sp"]}
    with pytest.raises(ValueError, match="the axis lr is given twice: write lr=first,second"):
        parse_axes(["lr=0.01", "lr=0.02"])


def test_further_seeds_follow_an_optimum_that_they_move(tmp_path):
    curve = [replace(TINY, lr=2.0**power) for power in range(-6, -1)]
    luck = {
        0: (5.0, 4.0, 4.5, 4.1, 4.6),
        1: (5.0, 4.4, 4.5, 4.1, 4.6),
        2: (5.0, 4.4, 4.5, 4.1, 4.6),
    }  # by seed, over the values

    def number(config):
        return curve.index(replace(config, seed=0))

    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        asked = []
        while missing := study.missing(more_seeds(study, curve, "lr", 3) if asked else curve):
            asked.append({number(config) for config in missing})
            for config in missing:
                study.add(config, summary(config, luck[config.seed][number(config)]))
        # The first seed's best is value 1; with three seeds it is value 3, which then gets its own, and its other neighbour.
        assert asked == [{0, 1, 2, 3, 4}, {0, 1, 2}, {3, 4}]
        seeds = more_seeds(study, curve, "lr", 3)
        assert {(number(config), config.seed) for config in seeds} == {(value, seed) for value in range(5) for seed in (1, 2)}
        assert (
            run_until_complete(study, lambda study: seeds, EngineConfig(device="cpu")) == seeds
        )  # nothing is missing: nothing is run


def test_further_seeds_do_not_depend_on_where_a_round_was_interrupted(tmp_path):
    curve = [replace(TINY, lr=2.0**power) for power in range(-6, -1)]
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        for config, loss in zip(curve, (5.0, 4.0, 4.5, 4.1, 4.6), strict=True):
            study.add(config, summary(config, loss))
        whole = more_seeds(study, curve, "lr", 3)
        assert {config.lr for config in whole} == {2.0**-6, 2.0**-5, 2.0**-4}
        for config in whole[2:4]:  # of the best value, which is no longer the best by now
            study.add(config, summary(config, 5.0))
            assert more_seeds(study, curve, "lr", 3) == whole


def test_panels_share_a_legend_only_if_their_series_do(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    def panel(*labels):
        return Panel("", "x", "y", tuple(Line(label, (Point(1, 1), Point(2, 2)), 0.5) for label in labels))

    draw_png([panel("0", "0.5"), panel("0", "0.9"), panel("0", "0.9")], tmp_path / "x.png", "")
    legends = [axis.get_legend() for axis in drawn[0].axes]
    assert [legend and [text.get_text() for text in legend.get_texts()] for legend in legends] == [
        ["0", "0.5"],
        None,
        ["0", "0.9"],
    ]


def test_transfer_study_runs_from_end_to_end(tmp_path):
    config = TransferConfig(run=TINY, rules=("sp", "smupar"), widths=(64,), sparsities=(0.75,), values=(0.002, 0.008, 0.03))
    with Study.open(tmp_path / "study", {"kind": "transfer", **asdict(config)}, "smupar transfer") as study:
        execute(study, proposals(config), engine="stacked", device="cpu")
        found = write_report(study).findings.sentence
    assert found == sentence(config, analyse(config, study.results()))
    assert "SmuPar" in found


def test_all_runs_diverged_is_said_with_the_remedy(tmp_path):
    wild = replace(TINY, optimizer="sgd", lr=1.0)
    config = TransferConfig(run=wild, rules=("sp",), widths=(64,), sparsities=(0.5,), values=(1e11, 1e12, 1e13))
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        execute(study, proposals(config), engine="stacked", device="cpu")
        with pytest.raises(ValueError, match="all runs of sp on the proxy diverged: sweep smaller values"):
            analyse(config, study.results())


# Ids, and with them the order of the runs, differ.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_measured_updates_of_a_grown_study_are_judged_by_the_trace_of_its_best_proxy(seed, tmp_path, capsys):
    flags = ["--widths", "64", "--sparsities", "0.5", "--rules", "measured", "--seed", str(seed)]
    few, more = ("0.0001", "0.0002", "0.0004"), ("0.0001", "0.0002", "0.0004", "0.004")

    def transfer(out, values):
        main(["transfer", *TINY_FLAGS, *flags, "--values", *values, "--out", str(tmp_path / out)])
        return capsys.readouterr().out.splitlines()[:-1]

    transfer("grown", few)
    assert transfer("grown", more) == transfer("fresh", more)


def test_transfer_over_depth_has_a_shallow_proxy_and_deep_targets():
    config = TransferConfig(run=TINY, rules=("smupar",), widths=(64, 128), sparsities=(0.75,), depths=(2, 4)).normalised
    runs = proposals(config)
    assert {(run.model.width, run.model.depth, run.base_depth, run.sparsity) for run in runs} == {
        (TINY.base_width, 2, None, 0.0),  # the proxy has the id of a run without depth
        *((width, depth, base, 0.75) for width in (64, 128) for depth, base in ((2, None), (4, 2))),
    }
    deeper = TransferConfig(run=replace(TINY, base_depth=1), rules=("smupar",), widths=(64,), sparsities=(0.0,), depths=(2,))
    assert [(run.model.depth, run.base_depth) for run in proposals(deeper.normalised)[:: len(deeper.normalised.values)]] == [
        (1, None),
        (2, 1),
    ]


def test_transfer_over_depth_says_which_depth():
    values = (0.001, 0.002, 0.004)
    config = TransferConfig(run=TINY, rules=("smupar",), widths=(64,), sparsities=(0.75,), depths=(2, 4), values=values)
    shallow, deep = (2.5, 2.0, 3.0), (4.0, 3.0, 2.0)
    proxy = Curve("smupar", 32, 0.0, values, shallow, is_proxy=True, depth=2)
    targets = tuple(Curve("smupar", 64, 0.75, values, losses, depth=depth) for depth, losses in ((2, shallow), (4, deep)))
    verdicts = [Verdict("smupar", proxy, targets)]
    told = sentence(config.normalised, verdicts)
    assert told.startswith("From the dense proxy of width 32 and depth 2 the best learning rate moved")
    assert "at density 1/4, width 64, depth 4, the proxy's best swept learning rate costs SmuPar 50.0%" in told
    lines = [line.label for line in panels(config.normalised, verdicts)[0].lines]
    assert lines == ["proxy, width 32, depth 2", *(f"density 1/4, depth {depth}" for depth in (2, 4))]


def test_transfer_to_depths_below_the_base_is_refused():
    with pytest.raises(ValueError, match=r"at least the base depth 2, got \(1, 4\): tune on a model that is not deeper"):
        TransferConfig(run=replace(TINY, model=replace(TINY.model, depth=4), base_depth=2), depths=(1, 4))
    with pytest.raises(ValueError, match="leave out --proxy-depth"):
        TransferConfig(run=TINY, depths=(2, 4), proxy_depth=2)


def test_headline_names_the_rules_under_which_the_best_value_transfers():
    optima = {"sp": -4.5, "mup": -5, "smupar": -7.5}  # from -7: moves of 5.7x, 4x and 1.4x on a grid that ends at 2^-4
    verdicts = [Verdict(rule, curve(-7), (curve(optimum),)) for rule, optimum in optima.items()]
    whole = "transfers under SmuPar (its best stays within 2x), not under SP and muP."
    assert headline(verdicts, "learning rate") == f"The learning rate {whole}"
    assert headline(verdicts, "init std", so_far=True) == f"So far the init std {whole}"
    assert headline(verdicts[:2], "learning rate") == "The learning rate does not transfer under SP and muP."
    assert headline(verdicts, "learning rate", so_far=True, unsettled=["smupar", "sp"]) == (
        "So far the learning rate does not transfer under SP and muP; SmuPar stays within 2x, with runs to come."
    )
    assert headline([], "learning rate") == ""


def test_finding_says_what_to_do_next():
    config = TransferConfig(run=TINY)

    def said(**optima):  # from -7, on a grid that ends at 2^-4
        return " ".join(next_steps(config, [Verdict(rule, curve(-7), (curve(optimum),)) for rule, optimum in optima.items()]))

    keep = "Next: under SmuPar, give wide and sparse models the proxy's best learning rate, --lr 0.00781 here."
    assert said(sp=-4.5, mup=-7, smupar=-7) == said(sp=-7, smupar=-7.5) == keep
    assert said(sp=-4.5, smupar=-4.5).startswith("Next: train longer (--steps)")
    assert (
        said(sp=-4.5, mup=-3)
        == "Next: train longer (--steps) or wider targets (--widths) before you rely on the proxy's learning rate."
    )
    assert said(sp=-7) == ""


def test_card_has_the_largest_cost_of_the_proxys_best_value():
    values = (0.001, 0.002, 0.004)
    config = TransferConfig(run=TINY, rules=("sp",), widths=(64,), sparsities=(0.0, 0.75), values=values).normalised
    proxy = Curve("sp", 32, 0.0, values, (2.5, 2.0, 3.0), is_proxy=True)
    dense = Curve("sp", 64, 0.0, values, (2.0, 3.0, 4.0))
    sparse, begun = Curve("sp", 64, 0.75, values, (4.0, 2.2, 2.0)), Curve("sp", 64, 0.75, values[:1], (4.0,))

    def cost(*targets):
        return _answer(config, Verdict("sp", proxy, targets))["text"].splitlines()[-1]

    assert cost(dense, sparse) == "keeping 0.002, the proxy's best, costs at most 50.0% (density 1, width 64)"
    assert cost(sparse) == "keeping 0.002, the proxy's best, costs at most 10.0% (density 1/4, width 64)"
    assert cost(begun) == "what keeping 0.002, the proxy's best, costs is not known yet"
