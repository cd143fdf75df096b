"""Published pages: their rows, claims and pictures, and what is written by hand."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from smupar.lm.data.batches import open_text
from smupar.paper import publish
from smupar.paper.catalogue import figure
from smupar.paper.figure import Claim
from smupar.paper.published import read_published, restore, results
from smupar.paper.reproduce import Reproduced, reproduce
from smupar.paper.results_page import BY_HAND, index, page_of
from smupar.study.config import EngineConfig
from smupar.study.store import Study
from tests.paper.rows import CPU, PAPER, RESULTS, fig06, fig11, parabolas


def test_rows_of_a_published_page_stand_for_their_runs(tmp_path, capsys):
    """Nothing is trained: all runs but the last are published, and that one is missing."""
    with Study.open(tmp_path / "a" / "cpu" / "study", {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}, "") as study:
        for row in parabolas(fig11.runs(CPU), lambda run: -7)[:-1]:
            study.add(row.config, row.summary)
        study.record_checksum("text", "stdlib", open_text(row.config).info.sha256)
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
    published = [json.loads((folder / "fig11.json").read_text()) for folder in (pages, tmp_path / "copies")]
    assert published[0] == published[1]

    del published[0]["seal"]
    for field, value in (("files", {"text stdlib": "of another text"}), ("scale", "small")):
        (pages / "fig11.json").write_text(json.dumps({**published[0], field: value}))
        with pytest.raises(ValueError, match="no run of this figure has ended"):
            reproduce("fig11", CPU, EngineConfig(), out=str(tmp_path / field), published=str(pages), so_far=True)


def test_changed_number_of_a_page_is_noticed(tmp_path):
    published = json.loads((RESULTS / "fig06.json").read_text())
    published["rows"][3]["train_loss"] += 1e-6
    (tmp_path / "fig06.json").write_text(json.dumps(published))
    with pytest.raises(ValueError, match=r"fig06\.json is damaged \(its content does not match its checksum\): publish"):
        read_published(tmp_path / "fig06.json")


def test_row_whose_fields_have_changed_is_named_without_a_seal(tmp_path):
    published = json.loads((RESULTS / "fig06.json").read_text())
    del published["seal"]
    row = published["rows"][3]
    row["lr"] = row["lr"] * 2
    (tmp_path / "fig06.json").write_text(json.dumps(published))
    with pytest.raises(ValueError, match=rf"fig06\.json is damaged \(the fields of run {row['id']} belong to another run\)"):
        read_published(tmp_path / "fig06.json")


def test_rows_never_stand_for_runs_that_record_or_follow_a_trace(tmp_path):
    row = parabolas(fig11.runs(CPU), lambda run: -7)[0]
    configs = [replace(row.config, record=True), replace(row.config, follow="proxy.json"), row.config]
    rows = [replace(row, config=config, summary=replace(row.summary, id=config.id)) for config in configs]
    files = {"text stdlib": open_text(row.config).info.sha256}
    publish.publish(Reproduced("fig11", Claim(True, "said"), tmp_path, rows, files), CPU, tmp_path / "pages")
    with Study.open(tmp_path / "study", {"kind": "test"}, "") as study:
        assert restore(study, tmp_path / "pages", CPU, configs) == 1
        assert [result.config for result in study.results(configs)] == [row.config]


PUBLISHED = pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")


@PUBLISHED
def test_published_numbers_can_be_followed_to_their_runs(path):
    published = json.loads(path.read_text())
    assert [result.config.id for result in results(published)] == [row["id"] for row in published["rows"]]
    assert all(re.fullmatch("[0-9a-f]{7,40}", row["commit"]) for row in published["rows"])  # not unknown, not dirty


@PUBLISHED
def test_published_page_is_what_its_rows_say(path):
    page, published = path.with_suffix(".md").read_text(), json.loads(path.read_text())
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert all((path.parent / name).exists() for name in pictures)
    assert page == page_of(published, pictures, page.partition(BY_HAND)[2].strip())


@PUBLISHED
def test_page_of_runs_without_decay_says_so_in_its_first_line(path):
    decays = {result.config.weight_decay for result in results(json.loads(path.read_text()))}
    first = path.with_suffix(".md").read_text().splitlines()[2]
    assert ("without weight decay" in first) == (decays == {0.0})


@PUBLISHED
def test_published_claims_are_those_of_the_published_rows(path):
    published = json.loads(path.read_text())
    claim = figure(path.stem).claim(publish.measured_in(published))
    assert [(part.holds, part.text) for part in claim.parts or (claim,)] == [
        (c["holds"], c["text"]) for c in published["claims"]
    ]


def test_list_of_results_is_that_of_the_pages():
    assert (RESULTS / "README.md").read_text() == index(RESULTS)


def test_stale_page_and_claim_are_made_again_from_the_rows(tmp_path):
    for name in ("fig11.json", "fig11.md"):
        shutil.copy(RESULTS / name, tmp_path)
    published, page = json.loads((tmp_path / "fig11.json").read_text()), tmp_path / "fig11.md"
    stale = {"holds": not published["holds"], "claims": [{"holds": None, "text": "an older claim"}]}
    unsealed = {name: value for name, value in published.items() if name != "seal"}
    (tmp_path / "fig11.json").write_text(json.dumps(unsealed | stale))
    page.write_text("Stale." + page.read_text().replace("## What came out", "## An older heading"))
    publish.rewrite(tmp_path)
    assert json.loads((tmp_path / "fig11.json").read_text()) == published
    assert page.read_text() == (RESULTS / "fig11.md").read_text()  # with the section that is written by hand
    assert (tmp_path / "fig11.png").exists()
    assert not (tmp_path / "README.md").exists()


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
    published = json.loads((tmp_path / "pages" / "fig05.json").read_text())
    assert (published["minutes"], published["commits"], published["devices"]) == (1.5, ["abc"], ["NVIDIA H200, torch 2.11"])
    assert [(slope["step"], slope["slope"]) for slope in published["slopes"]] == [(1, 0.4988), (10, 0.4988)]


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
    published = json.loads((tmp_path / "pages" / "fig06.json").read_text())
    assert [result.config.id for result in results(published)] == [row.config.id for row in rows]
