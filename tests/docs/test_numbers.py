"""Numbers in sentences of README, docs/decay.md, docs/depth.md and docs/lab/measured-updates.md, computed again from the
published rows."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from smupar.paper.catalogue import figure
from smupar.paper.published import results
from smupar.rules import get_rule

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def rows(name):
    return results(json.loads((RESULTS / f"{name}.json").read_text()))


def words(page):
    """The text of a page with single spaces, so that line breaks do not matter."""
    return " ".join((ROOT / page).read_text().split())


def losses(name, *, kind=lambda run: True, by):
    """Mean validation losses of the runs of that kind, by what ``by`` gives for a run."""
    found = defaultdict(list)
    for row in rows(name):
        if kind(row.config):
            found[by(row.config)].append(row.summary.valid_loss)
    return {key: fmean(values) for key, values in found.items()}


def percent(share, digits=1):
    return f"{100 * share:.{digits}f} %"


def density(run):
    return 1 - run.sparsity


# Figure 3, on README and docs/decay.md


def usual(run, width=2048, depth=2):
    """Whether a run of Figure 3 has the usual decay, follows no trace, and is of this size."""
    size = (run.model.width, run.model.depth)
    return size == (width, depth) and run.decay == "independent" and run.weight_decay == 0.1 and not run.follow


def figure_3():
    """Losses by line and density. muP and SmuPar are the same at density 1."""
    tuned = min((row for row in rows("fig03") if row.config.rule == "sp" and row.config.sparsity == 0 and usual(row.config)),
                key=lambda row: row.summary.valid_loss).config.lr  # fmt: skip
    lines = {rule: losses("fig03", kind=lambda run, rule=rule: run.rule == rule and usual(run), by=density)
             for rule in ("mup", "smupar")}  # fmt: skip
    is_tuned = lambda run: usual(run) and (run.rule, run.lr, run.rest_lr) == ("sp", tuned, None)  # noqa: E731
    lines["sp"] = losses("fig03", kind=is_tuned, by=density)
    lines["smupar"][1.0] = lines["mup"][1.0]
    return lines


def above_smupar(rule):
    lines = figure_3()
    return {density: percent(loss / lines["smupar"][density] - 1) for density, loss in lines[rule].items()}


def test_readme_has_the_gaps_of_figure_3():
    mup, sp = above_smupar("mup"), above_smupar("sp")
    readme = words("README.md")
    assert f"muP's is {mup[1 / 8]}, {mup[1 / 32]} and {mup[1 / 128]} at 1/8, 1/32 and 1/128" in readme
    assert f"is {sp[1.0]} when dense and {sp[1 / 32]} at 1/32" in readme


def test_page_of_figure_3_says_how_far_seeds_differ():
    seeds = defaultdict(list)
    for row in rows("fig03"):
        if row.config.rule in ("mup", "smupar") and usual(row.config) and density(row.config) in (1 / 32, 1 / 128):
            seeds[row.config.rule, density(row.config)].append(row.summary.valid_loss)
    spread = percent(max(max(own) / min(own) for own in seeds.values()) - 1)
    assert f"Three for muP and SmuPar at 1/32 and 1/128, which differ by at most {spread}" in words("docs/results/fig03.md")
    assert [len(own) for own in seeds.values()] == [3, 3, 3, 3]


def test_page_of_figure_3_has_the_runs_beside_the_main_ones():
    page, ours = words("docs/results/fig03.md"), figure_3()
    (fast,) = losses("fig03", kind=lambda run: run.rest_lr is not None, by=density).values()
    assert f"ends at {fast:.3f} at density 1/32, as muP does ({ours['mup'][1 / 32]:.3f})" in page
    assert {percent(1 - ours["smupar"][1 / 32] / loss) for loss in (fast, ours["mup"][1 / 32])} == {"5.1 %"}
    assert "SmuPar ends 5.1 % below both" in page
    following = losses("fig03", kind=lambda run: bool(run.follow), by=density)
    assert f"end at {following[1 / 32]:.3f} at 1/32 and {following[1 / 128]:.3f} at 1/128" in page
    assert "With 8 layers of width 512 it ends 1.9 %, 2.3 % and 0.8 % above" in page  # these are tested for docs/decay.md
    assert "With 4 layers of width 2048 muP ends 6.2 % and 5.0 % above" in page


def test_decay_page_has_the_gaps_of_figure_3_and_of_coupled_decay_there():
    mup, page = above_smupar("mup"), words("docs/decay.md")
    assert f"with 2 layers, muP ends {mup[1 / 8]}, {mup[1 / 32]} and {mup[1 / 128]} above SmuPar at these densities" in page
    ours = figure_3()["smupar"]
    coupled = losses("fig03", kind=lambda run: run.decay == "coupled", by=density)
    lost = {density: percent(loss / ours[density] - 1) for density, loss in coupled.items()}
    assert f"At width 2048 it loses {lost[1 / 32]} at 1/32 and {lost[1 / 128]} at 1/128" in page


def test_decay_page_has_what_decay_does_to_the_deep_models_of_figure_3():
    by = lambda run: (run.rule, density(run))  # noqa: E731
    old, page = losses("without-decay/fig03", by=by), words("docs/decay.md")
    new = losses("fig03", kind=lambda run: usual(run, 512, 8), by=by)
    few = (1 / 8, 1 / 32, 1 / 128)
    falls = {rule: [percent(1 - new[rule, density] / old[rule, density]) for density in few] for rule in ("smupar", "mup")}
    assert "SmuPar's loss falls by {}, {} and {}".format(*falls["smupar"]) in page
    assert "and muP's by {}, {} and {}.".format(*falls["mup"]) in page
    now, before = ([of["mup", density] / of["smupar", density] - 1 for density in few] for of in (new, old))
    assert "So muP ends above SmuPar by {}, {} and {}.".format(*map(percent, now)) in page
    sides = [f"{percent(abs(gap))} {'above' if gap > 0 else 'below'}" for gap in before]
    assert "Without decay and clipping it ended {}, {} and {}.".format(*sides) in page


def test_decay_page_has_the_deeper_models_and_the_followers_of_figure_3():
    deeper = losses("fig03", kind=lambda run: usual(run, 2048, 4), by=lambda run: (run.rule, density(run)))
    gaps = [percent(deeper["mup", density] / deeper["smupar", density] - 1) for density in (1 / 32, 1 / 128)]
    page = words("docs/decay.md")
    assert f"With 4 layers it ends {gaps[0]} above at 1/32 and {gaps[1]} at 1/128 (one seed)." in page
    following, ours = losses("fig03", kind=lambda run: bool(run.follow), by=density), figure_3()["smupar"]
    gains = [percent(1 - following[density] / ours[density]) for density in (1 / 32, 1 / 128)]
    assert f"end {gains[0]} and {gains[1]} below SmuPar at 1/32 and 1/128 (one seed)" in page


# The decay study


def study(width=512, steps=2000, **fields):
    """Losses by density and amount of decay. ``fields`` replace the usual kind of decay, the parameters that decay, and the
    learning rate."""
    asked = {"decay": "independent", "decayed": "all", "lr": 2**-6, **fields}

    def is_asked(run):
        return (run.model.width, run.steps) == (width, steps) and all(getattr(run, name) == asked[name] for name in asked)

    return losses("decay", kind=is_asked, by=lambda run: (density(run), run.weight_decay))


def scan(of, density):
    return {amount: loss for (own, amount), loss in of.items() if own == density}


def best(of):
    return min(of, key=of.get)


def test_decay_page_has_the_best_amount_and_what_none_costs():
    main, page = study(), words("docs/decay.md")
    assert {best(scan(main, density)) for density in (1, 1 / 8, 1 / 32, 1 / 128)} == {0.1}
    costs = [percent(main[density, 0.0] / main[density, 0.1] - 1) for density in (1, 1 / 8, 1 / 32, 1 / 128)]
    assert f"Without decay the loss is {costs[0]}, {costs[1]}, {costs[2]} and {costs[3]} higher." in page
    assert sorted({amount for _, amount in main}) == [0.0, 0.03, 0.1, 0.2, 0.4]
    assert f"({len(rows('decay'))} runs)" in page


def test_decay_page_has_what_the_amount_costs_elsewhere():
    elsewhere = [study(width=256), study(steps=500), study(steps=8000)]
    scans = [scan(of, density) for of in elsewhere for density in {own for own, _ in of}]
    cost = max(own[0.1] / min(own.values()) - 1 for own in scans)
    page = words("docs/decay.md")
    where = "At width 256, and in runs of 500 and of 8000 steps,"
    assert f"{where} its loss is at most {percent(cost, 2)} above the loss with the best amount there" in page
    short, long = study(steps=500), study(steps=8000)
    assert best(scan(short, 1 / 32)) == max(amount for _, amount in short)
    assert (best(scan(long, 1.0)), best(scan(long, 1 / 32))) == (0.03, 0.2)
    assert "In 8000 steps the dense model is best at 0.03 and the sparse one at 0.2" in page


def test_decay_page_has_what_wider_models_want():
    widths, page = (256, 512, 1024, 2048), words("docs/decay.md")
    wide = {width: study(width=width) for width in widths}
    dense, sparse = ([best(scan(wide[width], density)) for width in widths] for density in (1.0, 1 / 32))
    assert f"the best amount for dense models is {', '.join(map(str, dense[:-1]))} and {dense[-1]}" in page
    assert f"At density 1/32 the best amount is {', '.join(map(str, sparse[:-1]))} and {sparse[-1]}" in page
    assert min(amount for _, amount in wide[2048]) == 0.03
    cost = lambda width, density: wide[width][density, 0.1] / min(scan(wide[width], density).values()) - 1  # noqa: E731
    assert (
        f"dense model {percent(cost(1024, 1.0))} at width 1024, and {percent(cost(2048, 1.0), 2)} or more at width 2048" in page
    )
    assert f"It costs the sparse one at most {percent(max(cost(width, 1 / 32) for width in (1024, 2048)))}" in page


def test_decay_page_is_right_that_half_and_twice_the_learning_rate_are_worse():
    main = study()
    for density in (1, 1 / 8, 1 / 32):
        assert all(study(lr=lr)[density, 0.1] > main[density, 0.1] for lr in (2**-7, 2**-5))


def test_decay_page_has_what_coupled_decay_and_decay_of_some_parameters_cost():
    main, page = study(), words("docs/decay.md")

    def lost(density, **fields):
        return percent(study(**fields)[density, 0.1] / main[density, 0.1] - 1)

    coupled = [lost(density, decay="coupled") for density in (1 / 8, 1 / 32, 1 / 128)]
    assert f"loses** {coupled[0]} at density 1/8, {coupled[1]} at 1/32 and {coupled[2]} at 1/128" in page
    matrices, hidden = ([lost(density, decayed=part) for density in (1 / 8, 1 / 32)] for part in ("matrices", "hidden"))
    assert f"the loss is {matrices[0]} higher at density 1/8 and {matrices[1]} at 1/32" in page
    assert f"If only hidden weights decay, it is {hidden[0]} and {hidden[1]} higher" in page
    norms = [lost(density, decayed="vectors") for density in (1 / 8, 1 / 32)]
    assert f"If only norms decay, it is {norms[0]} and {norms[1]} higher." in page
    assert study(decayed="hidden")[1 / 32, 0.1] == pytest.approx(main[1 / 32, 0.0], rel=1e-3)  # "level with no decay"
    dense = [abs(study(decayed=part)[1, 0.1] / main[1, 0.1] - 1) for part in ("matrices", "hidden")]
    assert f"For dense models the difference is {percent(max(dense))} at most" in page


def test_decay_page_has_the_ends_of_drift():
    published = json.loads((RESULTS / "drift.json").read_text())
    ratios = figure("drift").from_published(published)
    ends = {name: own[max(own)] for name, own in ratios.items()}
    none, independent = (f"{ends[f'{way}, density 1/32']:.2g}" for way in ("no decay", "independent"))
    page = words("docs/decay.md")
    assert f"At density 1/32 the multiple is {none} at the end without decay, and {independent} with decay 0.1." in page
    widths = {row.config.model.width for row in results(published)}
    assert widths == {512}


def test_page_of_first_results_has_what_no_decay_costs_sparse_models():
    main = study()
    costs = [100 * (main[density, 0.0] / main[density, 0.1] - 1) for density in (1 / 8, 1 / 32, 1 / 128)]
    page = words("docs/results/without-decay/README.md")
    assert f"without it sparse models end {min(costs):.1f} % to {max(costs):.1f} % higher" in page


# Tables of docs/lab/measured-updates.md whose rows are kept


def curve(name, kind):
    """Mean training losses by log2 of the learning rate."""
    found = defaultdict(list)
    for row in rows(name):
        if kind(row.config):
            found[math.log2(row.config.lr)].append(math.inf if row.summary.train_loss is None else row.summary.train_loss)
    return {lr: fmean(values) for lr, values in found.items()}


def masked(masks, line):
    """The curves at densities 1/4, 1/16 and 1/64 of a line of the tables."""
    rule = {"SP": "sp", "muP": "mup"}.get(line, "smupar")
    follows, moment = line == "measured", line in ("measured", "SmuPar, density of the moment")

    def kind(density, run):
        is_column = run.dynamic == masks and (masks != "gmp" or (run.correction == "moment") == moment)
        return run.rule == rule and 1 - run.sparsity == density and is_column and (run.follow is not None) == follows

    name = "without-decay/fig06" if masks == "none" else "fig12"
    return [curve(name, lambda run, density=density: kind(density, run)) for density in (1 / 4, 1 / 16, 1 / 64)]


LAB = "docs/lab/measured-updates.md"
KEPT = {"static": "none", "RigL": "rigl", "GMP": "gmp"}


@pytest.mark.parametrize("masks", KEPT)
def test_lab_page_has_the_losses_of_kept_rows(masks):
    lines = re.findall(rf"^\| {masks}: (.+?) \| (.+?) \| (.+?) \| (.+?) \|", (ROOT / LAB).read_text(), re.MULTILINE)
    compared = 0
    for line, *shown in lines:
        if masks == "static" and line == "measured":
            continue  # no rows kept
        name = "SmuPar" if line == "SmuPar as in the paper" else line
        at = -9 if line == "SP" else -6
        assert [number.strip("*") for number in shown] == [f"{own[at]:.3f}" for own in masked(KEPT[masks], name)]
        compared += 1
    assert compared == {"static": 3, "RigL": 4, "GMP": 5}[masks]


@pytest.mark.parametrize("masks", KEPT)
def test_lab_page_has_the_best_learning_rates_of_kept_rows(masks):
    (line,) = re.findall(rf"^\| {masks} \|(.+)\|$", (ROOT / LAB).read_text(), re.MULTILINE)
    columns = dict(zip(("SP", "muP", "SmuPar", "SmuPar, density of the moment", "measured"), line.split("|"), strict=True))
    if masks == "static":
        del columns["measured"]  # no rows kept
    for name, shown in columns.items():
        if shown.strip():
            best_rates = [min(own, key=own.get) for own in masked(KEPT[masks], name)]
            assert [int(number) for number in re.findall(r"-\d+", shown)[:3]] == best_rates


def test_lab_page_says_which_rows_are_not_kept():
    page = (ROOT / LAB).read_text()
    without = ["Other optimizers", "Another depth", "Another length", "Iterative magnitude pruning", "What it costs"]
    for heading in without:
        assert page.partition(f"## {heading}\n\n")[2].startswith("*No rows kept.*"), heading


# The check over depth, in docs/depth.md


def test_depth_page_has_the_steepest_slopes_of_the_check():
    read = json.loads((ROOT / "docs/lab/depth-check.json").read_text())
    rows = [dict(zip(read["columns"], row, strict=True)) for row in read["rows"]]
    titles = {"completep": "CompleteP", "depth-mup": "depth-muP", "none": "none"}
    for rule, depth in (("smupar", "completep"), ("smupar", "depth-mup"), ("smupar", "none"), ("mup", "none")):
        own = [row for row in rows if (row["rule"], row["depth_rule"]) == (rule, depth)]
        worst = [max((row for row in own if row["density"] == at), key=lambda row: abs(row["slope"])) for at in (1, 1 / 16)]
        cells = [
            f"{row['slope']:+.2f} +- {row['ci']:.2f} ({row['quantity']} of {row['place']}, "
            f"{'step 1' if row['step'] else 'later steps'})"
            for row in worst
        ]
        verdict = "pass" if {row["verdict"] for row in own} == {"pass"} else "fail"
        assert f"| {get_rule(rule).title} | {titles[depth]} | {verdict} | {'; '.join(cells)} |" in words("docs/depth.md")
        assert (max(abs(row["slope"]) for row in own) < 0.2) == (verdict == "pass")


# Depth, on docs/depth.md, docs/limitations.md, README and the page of results


def _depth_curves():
    """Mean training losses by depth rule, density and depth, and then by log2 of the learning rate."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows("depth"):
        run = row.config
        for rule in ("completep", "none"):
            if run.depth_rule in (None, rule):
                found[rule, density(run), run.model.depth][math.log2(run.lr)].append(row.loss)
    return {key: {rate: fmean(seeds) for rate, seeds in own.items()} for key, own in found.items()}


def test_pages_have_what_the_bases_learning_rate_costs_deep_models():
    curves = _depth_curves()
    assert min(curves["completep", 1, 2], key=curves["completep", 1, 2].get) == -6

    def cost(rate, kind):
        return {
            key[1:]: own[rate] / min(own.values()) - 1
            for key, own in curves.items()
            if key[0] == "completep" and kind(*key[1:])
        }

    dense, sparse = cost(-6, lambda kept, depth: kept == 1), cost(-6, lambda kept, depth: kept < 1)
    deep, most = f"{percent(dense[1, 16])} and {percent(dense[1, 32])}", percent(max(sparse.values()))
    assert max(dense[1, 2], dense[1, 4], dense[1, 8]) == 0
    for page, said in {
        "docs/depth.md": f"lose {deep} at the learning rate of the base, 2^-6, and sparse ones at most {most}",
        "docs/results/depth.md": f"Sparse models lose at most {most} at the dense base's learning rate, 2^-6.",
        "README.md": f"dense models of 16 and 32 layers lose {deep} at the tuned one",
        "docs/limitations.md": f"dense models of 16 and more layers lose {percent(dense[1, 16])} and more at the tuned one",
    }.items():
        assert said in words(page), page
    half = cost(-7, lambda kept, depth: True)
    assert percent(half[1, 2]) == "0.5 %"
    assert max(half.values()) < 0.02


def test_pages_have_how_far_learning_rates_move_without_a_factor_on_the_branches():
    text = " ".join(part.text for part in figure("depth").claim(rows("depth")).parts)
    ours, none, cost = re.search(r"moves by ([\d.]+)x.*no factor ([\d.]+)x, ([\d.]+)%", text).groups()
    page, results_page = words("docs/depth.md"), words("docs/results/depth.md")
    assert (
        f"the best learning rate moves by {none}x, hardly farther, and the base's learning rate costs at most {cost} %." in page
    )
    assert f"moves by {none}x, hardly farther than CompleteP's {ours}x." in results_page
    assert f"at most {cost} % of the best loss without a factor, and" in results_page


def test_pages_have_what_a_factor_on_the_branches_gains():
    lowest = {key: min(own.values()) for key, own in _depth_curves().items()}
    gains = [percent(1 - lowest["completep", kept, 32] / lowest["none", kept, 32]) for kept in (1, 1 / 4, 1 / 16)]
    assert "its best loss is {} lower when dense, and {} and {} lower at densities 1/4 and 1/16".format(*gains) in words(
        "docs/depth.md"
    )
    assert "by {} when dense, {} at density 1/4, and {} at 1/16".format(*gains) in words("docs/results/depth.md")
    assert lowest["none", 1, 32] > lowest["none", 1, 4]


def test_page_of_figure_6_has_how_much_easier_the_batches_of_seed_0_are():
    seeds = defaultdict(dict)
    for row in rows("fig06"):
        seeds[replace(row.config, seed=0).id][row.config.seed] = row.loss
    shares = [own[0] / fmean(own.values()) - 1 for own in seeds.values() if len(own) == 3]
    assert len(shares) == 30
    claims = json.loads((RESULTS / "fig06.json").read_text())["claims"]
    gaps = {at: float(gap) for gap, at in re.findall(r"muP \+([\d.]+)% at (1/\d+)", claims[-1]["text"])}
    assert f"At its dense-tuned learning rate its gap is largest at density {max(gaps, key=gaps.get)}." in words(
        "docs/results/fig06.md"
    )
    assert f"it ends {percent(-fmean(shares))} below the mean of three seeds" in words("docs/results/fig06.md")
