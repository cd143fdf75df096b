"""The page in a real browser: Debian's Chromium, driven by Playwright. `make test-browser` installs both and runs this file."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from smupar.output.page import write_page
from smupar.study.page.view import StudyView
from smupar.watch.server import serving
from tests.support.browser import chromium, contrast, needs_chromium
from tests.watch.studies import RUN, end_run, make_study

pytestmark = needs_chromium
EVIL = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a server for a finished study, one that is not finished, and two runs with a name that is no name."""
    folder = tmp_path_factory.mktemp("watched")
    make_study(folder / "all")
    left = make_study(folder / "part", num_left_out=6, command=f"smupar transfer --out '{EVIL}'")
    end_run(folder / "part" / "runs" / left[5].id, left[5], status="diverged")
    for name in (EVIL, "second"):
        end_run(folder / "runs" / name, RUN)
    with serving([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server, folder
        server.shutdown()
        thread.join()


@pytest.fixture
def visit(browser):
    """Opens a page and waits until its charts are drawn. Requests that leave the page, and errors in it, fail the test."""
    contexts, wrong = [], []

    def open_page(address, *, width=1280, height=900, dark=False, wait="#documents button, .chart .plot .main-svg"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
        contexts.append(context)
        page = context.new_page()
        origin = address.rpartition("/")[0]
        page.on("request", lambda request: None if _is_own(request.url, origin) else wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.set_default_timeout(15_000)
        page.goto(address)
        page.wait_for_selector(wait)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def _is_own(url, origin):
    return url.startswith((origin, "data:", "blob:"))


def choose(page, name):
    """Shows the document whose folder ends with a name."""
    page.locator("#documents button", has_text=name).first.click()
    page.wait_for_function("name => page.doc && page.doc.folder.endsWith(name)", arg=name)
    page.wait_for_selector(".chart .plot .main-svg")


def explore(page):
    """Opens the filters, by keyboard."""
    page.locator(".explore > summary").focus()
    page.keyboard.press("Enter")


def test_study_fills_in_while_it_runs(visit, tmp_path):
    flags = (
        "--width 32 --base-width 32 --head-dim 16 --depth 1 --steps 60 --batch-size 2 --seq-len 16 --engine serial --device cpu"
    )
    command = [sys.executable, "-m", "smupar", "sweep", "lr=2^-9..2^-4", *flags.split(), "--valid-batches", "1"]
    study = subprocess.Popen(
        [*command, "--out", str(tmp_path / "study")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    with study, serving_when_it_has_begun(study, tmp_path) as server:
        page = visit(server.url, wait=".progress, .chart")
        page.wait_for_selector(".counts >> text=of 6")
        hollow = page.evaluate("page.doc.progress.total - page.doc.progress.done")
        assert study.wait(timeout=120) == 0
        page.wait_for_function("() => page.doc.progress.done === 6 && !page.doc.is_live", timeout=10_000)
    assert hollow > 0
    assert page.locator(".counts").inner_text().startswith("6 of 6 runs done")
    assert page.evaluate("page.doc.charts[0].lines[0].points.filter((point) => point.y !== null).length") == 6
    page.wait_for_function("() => document.querySelectorAll('#charts .plot')[0]?.data?.[0].x.length === 6")
    curves = page.locator("section[aria-label='Loss curves'] .plot")
    page.wait_for_function("() => document.querySelector(\"section[aria-label='Loss curves'] .plot\")?.data?.length === 6")
    assert curves.count() == 1


class serving_when_it_has_begun:  # noqa: N801 (a context manager, as serving is)
    """A server for a study, once its command has said that it begins."""

    def __init__(self, study, folder):
        self.study, self.folder = study, folder

    def __enter__(self):
        assert "6 runs, 0 of them done" in self.study.stderr.readline()
        self.context = serving([self.folder], port=0)
        self.server = self.context.__enter__()
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self.server

    def __exit__(self, *ended):
        self.server.shutdown()
        self.thread.join()
        self.context.__exit__(*ended)


def test_points_tell_and_lead_to_their_runs(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="SmuPar"))
    marks = chart.locator(".scatterlayer .trace").nth(0).locator("path.point")
    marks.nth(2).hover(force=True)
    said = chart.locator(".hoverlayer").text_content()
    for words in ("SmuPar, proxy, width 32", "learning rate 0.0078125 (2⁻⁷)", "loss 3.1", "run "):
        assert words in said
    box = marks.nth(2).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    dialog = page.get_by_role("dialog")
    dialog.locator(".plot .main-svg").first.wait_for()
    assert dialog.get_by_role("heading").first.inner_text().startswith("SmuPar, sparsity 0, width 32, learning rate 0.0078125")
    assert dialog.locator("a", has_text="metrics.jsonl").count() == 1
    page.keyboard.press("Escape")
    assert not dialog.is_visible()


def test_rows_above_the_curves_say_how_far_each_optimum_is(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    plots = "[...document.querySelectorAll('#charts .plot')]"
    assert page.evaluate(f"{plots}.map((plot) => plot.layout.annotations.map((note) => note.text))") == [
        ["\N{MINUS SIGN}2.0 octaves"],
        ["+0.5 octaves"],
    ]
    labels = page.locator("#charts .plot").first.locator(".y2tick").all_text_contents()
    assert sorted(labels) == ["density 1/4", "proxy, width 32"]


def test_keyboard_reaches_points_and_runs(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    page.locator(".plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert "SP, proxy, width 32; learning rate 0.0019531 (2⁻⁹)" in page.locator("#said").text_content()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("BUTTON", "DIV")


def test_waiting_points_are_hollow_and_diverged_ones_are_crosses(visit, served):
    page = visit(served[0].url)
    choose(page, "part")
    symbols = page.evaluate(
        "[...document.querySelectorAll('#charts .plot')].map((plot) => plot.data.map((t) => t.marker.symbol))"
    )
    assert ["circle-open"] * 5 in symbols[1]
    assert "x-thin" in symbols[1]
    assert page.locator(".headline").inner_text() == "So far the learning rate does not transfer under SP."
    assert page.locator(".counts").inner_text().split("\n") == ["19 of 24 runs done", "5 waiting", "1 diverged"]


def test_filter_colour_and_sort(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    assert page.locator("tbody tr").count() == 24
    explore(page)
    page.locator(".menu[data-field=rule] summary").click()
    page.locator(".menu[data-field=rule] label", has_text="SP").locator("input").uncheck()
    assert page.locator("tbody tr").count() == 12
    assert page.evaluate("document.querySelectorAll('#charts .plot')[0].data.every((trace) => trace.x.length === 0)")
    page.keyboard.press("Escape")
    page.select_option("#colour", "sparsity")
    titles = page.locator("#charts h3").all_inner_texts()
    assert titles == ["loss"]
    assert page.locator("#charts .keys li").all_inner_texts()[:2] == ["sparsity 0", "sparsity 0.75"]
    left = "(plot) => [plot._fullLayout.width - plot.clientWidth, plot._fullLayout.height - plot.clientHeight]"
    sizes = f"[...document.querySelectorAll('#charts .plot')].flatMap({left})"
    page.wait_for_function(
        f"() => {sizes}.every((left) => Math.abs(left) <= 1)"
    )  # the chart fills its frame, which is wider now
    at = page.evaluate("[...document.querySelectorAll('thead button')].findIndex((button) => button.id === 'sort-loss')")
    losses = f"[...document.querySelectorAll('tbody tr')].map((row) => Number(row.cells[{at}].textContent))"
    column = page.locator("th", has=page.locator("#sort-loss"))
    for order, falls in (("ascending", False), ("descending", True)):
        column.get_by_role("button").click()
        assert column.get_attribute("aria-sort") == order
        shown = page.evaluate(losses)
        assert shown == sorted(shown, reverse=falls)
        assert len(set(shown)) > 3


def test_downloads(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    with page.expect_download() as got:
        page.click("#csv")
    lines = Path(got.value.path()).read_text().splitlines()
    assert lines[0].startswith("id,state,rule,sparsity,width,lr")
    assert len(lines) == 25
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        with page.expect_download() as got:
            page.get_by_role("button", name=f"Download this chart as {kind}").first.click()
        assert Path(got.value.path()).read_bytes().startswith(start)


def test_studies_are_compared(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    key = page.evaluate("page.source.list().find((each) => each.folder.endsWith('part')).key")
    before = page.evaluate("document.querySelectorAll('#charts .plot')[0].data.length")
    explore(page)
    page.select_option("#compare", key)
    page.wait_for_selector(".comparison")
    assert "So far the learning rate does not transfer under SP." in page.locator(".comparison").inner_text()
    assert page.evaluate("document.querySelectorAll('#charts .plot')[0].data.length") > before
    assert page.locator("#charts .keys li", has_text="compared: density 1/4").count() == 2


@pytest.mark.parametrize("dark", [False, True])
def test_every_mark_has_contrast(visit, served, dark):
    page = visit(served[0].url, dark=dark)
    choose(page, "part")
    background = page.evaluate("css('--raised')")
    traces = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.data || [])"
    marks = page.evaluate(
        f"{traces}.flatMap((trace) => [trace.marker, trace.line]).map((of) => of && of.color).filter(Boolean)"
    )
    every = page.evaluate("[...SERIES[theme()], ...Object.values(RULES[theme()])]")
    assert len(marks) > 10
    assert min(contrast(colour, background) for colour in (*marks, *every)) >= 3
    for words in ("--text", "--muted", "--good", "--bad", "--unclear", "--accent"):
        assert (
            min(contrast(page.evaluate(f"css('{words}')"), page.evaluate(f"css('{place}')")) for place in ("--bg", "--surface"))
            >= 4.5
        )
    assert (contrast(background, "#ffffff") > 10) == dark


def test_theme_can_be_switched(visit, served):
    page = visit(served[0].url)
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == ["light", "dark", "light"]  # light, dark, and as the system has it


def test_phone_needs_no_sideways_scrolling(visit, served):
    page = visit(served[0].url, width=390, height=844)
    for name in ("all", "part", "runs"):
        choose(page, name)
        page.wait_for_selector(".plot .main-svg")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for box in [plot.bounding_box() for plot in page.locator(".plot").all()]:
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390


def test_text_of_a_folder_is_shown_as_text(visit, served):
    page = visit(served[0].url)
    choose(page, "part")
    assert EVIL in page.locator(".command code").inner_text()
    choose(page, "runs")
    assert EVIL in page.locator("tbody").inner_text()
    page.wait_for_selector(".plot .main-svg")
    page.locator("tbody button", has_text="<img").click()
    page.get_by_role("dialog").locator(".plot .main-svg").first.wait_for()
    assert page.locator("img").count() == 0
    assert "broken" not in page.title()


def test_page_works_from_a_disk(visit, served, tmp_path):
    folder = served[1]
    write_page(tmp_path / "report.html", StudyView(folder / "all").document())
    page = visit((tmp_path / "report.html").as_uri())
    assert (
        page.locator(".headline").inner_text()
        == "The learning rate transfers under SmuPar (its best stays within 2x), not under SP."
    )
    assert page.locator("#charts .plot").count() == 2
    page.locator("tbody .open").first.click()
    page.get_by_role("dialog").locator(".plot .main-svg").first.wait_for()
    page.keyboard.press("Escape")
    write_page(tmp_path / "other.html", StudyView(folder / "part").document())
    explore(page)
    with page.expect_file_chooser() as chooser:
        page.select_option("#compare", "pick")
    chooser.value.set_files(tmp_path / "other.html")
    page.wait_for_selector(".comparison")


def test_zoom_survives_new_data(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    ends = "document.querySelector('.plot').layout.xaxis.range"
    whole, area = page.evaluate(ends), page.locator(".plot .nsewdrag").first.bounding_box()
    page.mouse.move(area["x"] + 100, area["y"] + 50)
    page.mouse.down()
    page.mouse.move(area["x"] + 250, area["y"] + 150, steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => {ends}[0] > {whole[0]}")
    zoomed = page.evaluate(ends)
    page.evaluate("draw()")
    assert page.evaluate(ends) == zoomed
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]


def test_overview_leads_to_each_source_and_back(visit, served):
    page = visit(served[0].url)
    page.wait_for_selector("#main a >> text=part")
    page.wait_for_function(
        "() => document.querySelector('#main tbody').innerText.includes('So far the learning rate does not transfer under SP.')"
    )
    assert page.locator("#main tbody tr").count() == 3
    assert "not finished, 19 of 24 runs" in page.locator("#main tbody tr", has_text="part").inner_text()
    listed = [
        {"key": key, "is_live": key == "live", "changed": at, "folder": f"runs/{key}"}
        for key, at in (("old", 1), ("new", 3), ("live", 2))
    ]
    assert page.evaluate("(listed) => inOrder(listed).map((each) => each.key)", listed) == ["live", "new", "old"]
    assert page.evaluate("(listed) => [firstShown(listed), firstShown(listed.slice(0, 2))]", listed) == ["", "new"]
    page.locator("#main a", has_text="part").click()
    page.wait_for_selector(".chart .plot .main-svg")
    assert page.url.endswith("/part")
    choose(page, "all")
    page.go_back()
    page.wait_for_function("() => page.doc && page.doc.folder.endsWith('part')")
    page.go_back()
    page.wait_for_selector("#main a >> text=part")


def test_overview_is_sorted_by_place_or_by_a_column(visit, served):
    page = visit(served[0].url)
    folders = {"a/fig10": 1, "a/fig9": 5, "a/study": 2, "b/x": 9, "c/y": 3}
    listed = [{"key": name, "is_live": name == "c/y", "changed": at, "folder": name} for name, at in folders.items()]
    assert page.evaluate("(listed) => byPlace(listed).map((each) => each.key)", listed) == [
        "c/y", "b/x", "a/study", "a/fig9", "a/fig10",
    ]  # fmt: skip
    page.wait_for_function("() => document.querySelectorAll('#main tbody td.verdict').length === 3")
    names = "[...document.querySelectorAll('#main tbody td:first-child')].map((cell) => cell.innerText)"
    by_place = page.evaluate(names)
    page.get_by_role("button", name="name").click()
    assert page.evaluate(names) == sorted(by_place)
    page.get_by_role("button", name="name").click()
    assert page.evaluate(names) == sorted(by_place, reverse=True)
    page.get_by_role("button", name="name").click()
    assert page.evaluate(names) == by_place


def test_cards_of_a_reproduction_lead_to_figures(visit, tmp_path):
    make_study(tmp_path / "cpu" / "study", definition={"kind": "reproduce", "scale": "cpu", "data": "stdlib"})
    make_study(tmp_path / "cpu" / "fig06")
    page_of_figure = StudyView(tmp_path / "cpu" / "fig06").document() | {"kind": "reproduction", "folder": "where/it/was"}
    shutil.rmtree(tmp_path / "cpu" / "fig06")
    (tmp_path / "cpu" / "fig06").mkdir()
    write_page(tmp_path / "cpu" / "fig06" / "report.html", page_of_figure)
    claim = {"figure": "fig06", "title": "A title", "runs": 24, "holds": True, "parts": []}
    (tmp_path / "cpu" / "fig06" / "claim.json").write_text(json.dumps(claim))
    with serving([tmp_path], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        page = visit(server.url)
        page.locator("#documents button", has_text="study").click()
        page.wait_for_selector(".answer a")
        assert page.locator(".headline").inner_text() == "fig06 holds."
        assert "follow its card" in page.locator(".empty").first.inner_text()  # unlike runs are not drawn unasked
        page.get_by_role("link", name="fig06").click()
        page.wait_for_selector(".chart .plot .main-svg")
        assert page.url.endswith("#cpu/fig06")
        page.close()
        server.shutdown()
        thread.join()
    write_page(tmp_path / "cpu" / "study" / "report.html", StudyView(tmp_path / "cpu" / "study").document())
    page = visit((tmp_path / "cpu" / "study" / "report.html").as_uri(), wait=".answer")
    assert page.get_by_role("link", name="fig06").get_attribute("href") == "../fig06/report.html"


def test_explored_lines_join_only_runs_that_differ_in_x(visit, served):
    page = visit(served[0].url)
    rows = [
        {"id": f"{number}", "state": "finished", "lr": lr, "width": width, "seed": seed, "sparsity": 0, "loss": 3 + number}
        for number, (lr, width, seed) in enumerate([(1, 64, 0), (2, 64, 0), (2, 64, 1), (1, 128, 0), (2, 128, 0), (4, 256, 0)])
    ]
    made = page.evaluate(
        "(rows) => exploredCharts(rows, ['lr', 'width', 'seed'], { x: 'lr', y: 'loss', colour: 'sparsity', panel: '' })", rows
    )
    assert [(line["is_joined"], [run for p in line["points"] for run in p["runs"]]) for line in made[0]["lines"]] == [
        (True, ["0", "1"]), (True, ["3", "4"]), (False, ["5"]),
    ]  # fmt: skip


def test_address_keeps_what_readers_chose(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    explore(page)
    page.locator(".menu[data-field=rule] summary").click()
    page.locator(".menu[data-field=rule] label", has_text="SP").locator("input").uncheck()
    page.keyboard.press("Escape")
    page.select_option("#colour", "sparsity")
    assert page.url.endswith("/all?only.rule=SmuPar&colour=sparsity")
    page.reload()
    page.wait_for_selector(".chart .plot .main-svg")
    assert page.locator("tbody tr").count() == 12
    assert page.input_value("#colour") == "sparsity"


def test_first_charts_need_no_scrolling(visit, served):
    page = visit(served[0].url, width=1400)
    choose(page, "all")
    axis = page.locator("#charts .plot").first.locator(".xtitle").bounding_box()
    assert axis["y"] + axis["height"] < 900
    assert page.locator("#below .counts").is_visible()
    choose(page, "part")
    assert page.locator("#above .counts").is_visible()


def test_columns_have_one_format(visit, served):
    page = visit(served[0].url)
    choose(page, "all")
    assert page.locator("thead button").last.inner_text() == "run"
    form = "([name, values]) => values.map(formatOf(name, values))"
    assert page.evaluate(form, ["lr", [2**-11, 2**-4, 2]]) == ["2⁻¹¹", "2⁻⁴", "2¹"]
    assert page.evaluate(form, ["tokens_per_second", [15632, 14418.3, None]]) == ["15,632", "14,418", "\N{EN DASH}"]
    assert page.evaluate(form, ["seconds", [0.12283, 0.2]]) == ["0.123", "0.200"]
    assert page.evaluate(form, ["sparsity", [0, 0.75, 0.9375]]) == ["0", "0.7500", "0.9375"]
    assert page.evaluate(form, ["loss", [3.21801, 2.9]]) == ["3.2180", "2.9000"]


def test_check_shows_the_slopes_that_do_not_pass_and_one_legend(visit, tmp_path):
    make_study(tmp_path / "study")
    line = {"shade": 0, "is_reference": False, "is_joined": True, "best": None}
    points = [{"x": x, "y": 1, "runs": []} for x in (32, 64)]
    chart = {
        "rule": "SP",
        "x_label": "width",
        "y_label": "Y",
        "log_x": True,
        "log_y": True,
        "lines": [line | {"label": "step 1", "points": points}],
    }
    table = {
        "title": "Slopes",
        "columns": ["verdict", "slope"],
        "rows": [["fail", 0.5], ["pass", 0.01], ["drift", 0.1]],
        "varied": ["verdict"],
        "numeric": [],
    }
    document = StudyView(tmp_path / "study").document() | {
        "kind": "check",
        "answers": [],
        "charts": [chart | {"title": f"SP: {name} over width"} for name in "abc"],
        "table": table,
    }
    write_page(tmp_path / "check.html", document)
    page = visit((tmp_path / "check.html").as_uri())
    assert page.locator(".keys li").all_inner_texts() == ["step 1"]
    assert page.locator("tbody tr").all_inner_texts() == ["fail\t0.500", "drift\t0.100"]
    page.click("#all-slopes")
    assert page.locator("tbody tr").count() == 3
