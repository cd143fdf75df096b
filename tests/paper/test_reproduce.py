"""The paper's figures: their settings are the printed ones, figures share runs, and claims can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smupar.lm.config.commands import ExportConfig
from smupar.lm.config.presets import TABLE_3
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import plan_on_meta
from smupar.lm.use.export import export
from smupar.output.page import read_page
from smupar.paper import publish
from smupar.paper.catalogue import FIGURES, FINDINGS, figure, listed
from smupar.paper.cost import cost_of
from smupar.paper.figure import Place, curve
from smupar.paper.figures import tab02
from smupar.paper.figures.fig14 import WITH_ABLATIONS
from smupar.paper.page import GrowingPage
from smupar.paper.reproduce import make_scale, reproduce
from smupar.paper.settings import TABLE_4, Scale, iso_width, wpn_width
from smupar.study.config import EngineConfig
from smupar.study.engines import execute
from smupar.study.store import Study
from tests.paper.rows import CPU, PAPER, RESULTS, fig06, fig10, fig11, parabolas, tab01, tab04

# Settings


def test_table_1_is_executed_as_printed():
    assert tab01.claim(()).holds
    assert "all 7 rows that the paper prints" in tab01.claim(()).text


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


# Running


def test_list_names_every_figure_and_finding():
    text = listed()
    assert all(f"{name}  " in text for name in FIGURES)
    assert all(f"Finding {number}: " in text for number in FINDINGS)


def test_dry_run_at_scale_paper_counts_runs_and_hours():
    def cost(name, scale):
        return str(cost_of(name, scale, EngineConfig(), out="unused"))

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
    assert done.values["text"].startswith("SP's best learning rate moves by 1x")
    document = read_page(done.folder / "report.html")
    assert document["command"] == f"smupar reproduce fig11 --scale cpu --out {tmp_path}"
    with Study.open(tmp_path / "cpu" / "study", {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}, "") as study:
        study.record_checksum("trace", "proxy.json", "abc")
        assert study.files([replace(done.rows[0].config, follow="runs/proxy.json")]) == {
            **done.files,
            "trace proxy.json": "abc",
        }
    publish.publish(done, CPU, tmp_path / "pages")
    assert list(json.loads((tmp_path / "pages" / "fig11.json").read_text())["files"]) == ["text stdlib"]


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


def test_page_of_a_figure_fills_in_while_its_runs_are_trained(tmp_path):
    fig, place = figure("fig06"), Place(CPU, tmp_path / "fig06", tmp_path / "study" / "runs")
    place.folder.mkdir()
    (place.folder / "claim.json").write_text("{}")  # of an earlier command, about fewer runs
    rows = parabolas(fig11.runs(CPU), lambda run: -7)
    runs = [row.config for row in rows]
    fig = replace(fig, swept=("wpn", "lr"))
    page = GrowingPage("fig06", fig, place, "smupar reproduce fig06")

    def document():
        page.write()
        return read_page(place.folder / "report.html")

    with Study.open(tmp_path / "study", {"kind": "reproduce"}, "") as study:
        page.announcing(lambda study: runs)(study)
        assert not (place.folder / "claim.json").exists()
        assert (document()["progress"]["done"], document()["progress"]["total"]) == (0, len(runs))
        for row in rows[:-1]:
            study.add(row.config, row.summary)
        shown = document()
        assert (shown["headline"], shown["answers"]) == ("Not judged yet.", [])
        assert (shown["progress"]["done"], shown["progress"]["waiting"]) == (len(runs) - 1, 1)
        assert [chart["title"] for chart in shown["charts"]] == [
            "SP"
        ]  # muP and SmuPar have no runs here, so fig06 has no charts
        points = [point for line in shown["charts"][0]["lines"] for point in line["points"]]
        assert {run for point in points for run in point["runs"]} == {run.id for run in runs}
        study.add(rows[-1].config, rows[-1].summary)
        (place.folder / "report.html").unlink()
        page.write()
    assert not (place.folder / "report.html").exists()  # the figure is judged now
