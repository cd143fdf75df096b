"""The report: words, JSON, pictures, a page; and the command line."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import smupar
from smupar.check.coordinates.readings import CHANGE, GRAD_W, JUDGED, GridPoint, Reading
from smupar.check.coordinates.report import Report
from smupar.check.coordinates.verdict import FAIL, PASS, Slope, decides
from smupar.output.page import read_page
from tests.check.grid import Fork, batches_of, check, power_law

TITLES = {"sp": "SP", "mup": "muP", "smupar": "SmuPar"}


@pytest.fixture(scope="module")
def report():
    return check(
        batches=batches_of(2),
        rules=("sp", "mup", "smupar"),
        base_width=32,
        widths=(32, 64),
        densities=(1, 0.5),
        steps=2,
        seeds=2,
    )


def test_ok_is_about_the_rules_that_are_no_baselines():
    plan = smupar.make_plan(Fork(64), base=Fork(32))

    def made(**exponents):
        readings = [reading for rule, exponent in exponents.items() for reading in power_law(exponent, rule=rule)]
        return Report(readings, faults={}, plans={GridPoint(rule, 64, 1.0, None): plan for rule in exponents})

    both = made(sp=0.5, smupar=0.0)
    assert both.verdicts == {"sp": FAIL, "smupar": PASS}
    assert both.ok
    assert not made(sp=0.0, smupar=0.5).ok
    assert not made(sp=0.5, mup=0.5).ok  # nothing else was asked about
    assert made(mup=0.0).ok
    unclear = made(sp=0.5, smupar=0.3)
    assert not unclear.ok  # more seeds is not a pass
    assert (unclear.headline, unclear.tone) == ("The check cannot tell yet: run it with more seeds.", "unclear")
    assert (made(sp=0.3, smupar=0.5).headline, both.headline) == ("The check does not pass.", "The check passes.")


def test_explain_has_titles_and_verdicts(report):
    words = report.explain()
    for rule, title in TITLES.items():
        assert f"{title}: {report.verdicts[rule].upper()} over width (at density 1, 0.5) and density (at width 64, 32)" in words
    assert "2 steps, 2 seeds" in words
    assert report.verdicts["sp"] == FAIL
    assert "the rule itself does not correct for this axis [" in words  # baselines are there to fail beside SmuPar
    alone = replace(report, plans={point: plan for point, plan in report.plans.items() if point.rule == "sp"})
    assert "the rule itself does not correct for this axis: use rule='smupar' [" in alone.explain()


def strict_json(text):
    """JSON as other languages read it: NaN and Infinity are none."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_number(report, tmp_path):
    text = report.to_json(tmp_path / "check.json")
    assert (tmp_path / "check.json").read_text() == text
    read = strict_json(text)
    assert read["format"] == "smupar-coordinates/2"
    assert (read["ok"], read["verdicts"]) == (report.ok, report.verdicts)
    assert [Reading(**reading) for reading in read["readings"]] == report.readings
    saved = [replace(slope, step=0, is_mean=False) if slope.is_mean else slope for slope in report.slopes]
    assert [Slope(**slope) for slope in read["slopes"]] == saved
    assert [diagnosis["cause"] for diagnosis in read["diagnoses"]] == [diagnosis.cause for diagnosis in report.diagnoses]


def test_json_of_one_seed_is_json():
    read = strict_json(check().to_json())  # one seed has no confidence interval
    assert {slope["num_seeds"] for slope in read["slopes"]} == {1}


def test_plot_writes_a_png(report, tmp_path):
    figure = report.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    panels = [axes for axes in figure.axes if axes.get_lines()]
    assert len(panels) == 3 * 3 * 2  # quantities, rules, axes
    assert all(len(axes.get_lines()) == 2 for axes in panels)  # steps
    assert all((axes.get_xscale(), axes.get_yscale()) == ("log", "log") for axes in panels)
    titles = [axes.get_title("left") for axes in panels if axes.get_title("left")]
    named = [(axis, rule, title) for axis in ("width", "density") for rule, title in TITLES.items()]
    assert titles == [f"{title}: {report.axis_verdict(rule, axis)}" for axis, rule, title in named]


def test_plot_takes_other_quantities(report, tmp_path):
    figure = report.plot(tmp_path / "flow.pdf", quantities=(GRAD_W, CHANGE))
    assert (tmp_path / "flow.pdf").read_bytes().startswith(b"%PDF")
    assert len([axes for axes in figure.axes if axes.get_lines()]) == 2 * 3 * 2


def test_html_is_one_page_that_needs_no_other_file(report, tmp_path):
    report.to_html(tmp_path / "check.html")
    page = (tmp_path / "check.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    shown = read_page(tmp_path / "check.html")
    assert [(card["name"], card["value"]) for card in shown["answers"]] == [
        (TITLES[rule], report.verdicts[rule].upper()) for rule in sorted(report.rules, key=lambda rule: rule in ("sp", "mup"))
    ]
    table = [dict(zip(shown["table"]["columns"], row, strict=True)) for row in shown["table"]["rows"]]
    deciding = [slope for slope in report.slopes if slope.quantity in JUDGED and decides(slope)]
    assert sorted(row["slope"] for row in table) == pytest.approx(sorted(slope.slope for slope in deciding), rel=1e-5)
    assert {row["place"] for row in table} >= {"left", "logits"}
    assert len(shown["charts"]) == 3 * 3 * 2  # quantities, rules, axes
    first = shown["charts"][0]
    assert (first["title"], first["falls"], first["group"]) == ("SmuPar: outputs (Y) over width", False, "width Y")
    assert [line["label"] for line in first["lines"]] == ["step 1", "step 2"]


def test_missing_matplotlib_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import smupar, torch; from torch import nn\n"
        "make_model = lambda width: nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 2))\n"
        "loss = lambda model, batch: model(batch).square().mean()\n"
        "settings = dict(base_width=16, densities=(1, 0.5), steps=1, seeds=2, progress=False)\n"
        "report = smupar.coord_check(make_model, loss, [torch.ones(8, 4)], **settings)\n"
        "print(report.explain(), len(report.to_json()))\n"  # words and numbers need no picture
        "report.plot()\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "SmuPar: " in done.stdout
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("Error: the picture needs matplotlib: pip install 'smupar[plot]'")


TINY = (
    *("--base-width", "64", "--widths", "128", "--sparsities", "0", "0.75", "--depth", "1"),
    *("--steps", "2", "--seeds", "3", "--batch-size", "4", "--seq-len", "32"),
)


@pytest.mark.parametrize(("rules", "code"), [(("sp", "smupar"), 0), (("sp",), 1), (("smupar-lr-only",), 1)])
def test_command_exits_with_the_verdict_and_writes_three_files(command, tmp_path, rules, code):
    done = command("check", *TINY, "--out", tmp_path / "new" / "folder", "--rules", *rules)
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["check.html", "check.json", "check.png"]
    written = strict_json((tmp_path / "new" / "folder" / "check.json").read_text())
    assert list(written["verdicts"]) == list(rules)
    assert written["ok"] == (code == 0)
    verdict, first, *_ = done.stdout.splitlines()
    assert verdict == ("The check passes." if code == 0 else "The check does not pass.")
    title = "SmuPar" if "smupar" in rules else "SP" if "sp" in rules else "muP"
    assert first.startswith(f"{'PASS' if code == 0 else 'FAIL'} {title}")
    if len(rules) > 1:
        assert "\nFAIL SP over density" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sparsities", "0"), "nothing to compare"),
        (("--steps", "0"), "steps must be a positive whole number"),
        (("--rules", "super"), "unknown rule 'super'"),
    ],
)
def test_command_with_bad_input_exits_with_2_and_one_line(command, tmp_path, args, message):
    done = command("check", *TINY, "--out", tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
