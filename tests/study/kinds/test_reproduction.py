"""The study that the figures of a reproduction share."""

import json

from smupar.study.page.view import StudyView
from tests.watch.studies import make_study

SHARED = {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}


def judged(folder, holds, *, parts=(), title="A title", has_page=True):
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(
        json.dumps({"figure": folder.name, "title": title, "runs": 12, "holds": holds, "parts": [{"holds": p} for p in parts]})
    )
    if has_page:
        (folder / "report.html").write_text("")


def cards(folder):
    document = StudyView(folder / "study").document()
    return document["headline"], {card["name"]: card for card in document["answers"]}


def test_every_figure_has_a_card_that_leads_to_its_page(tmp_path):
    make_study(tmp_path / "study", definition=SHARED)
    judged(tmp_path / "fig10", True)
    judged(tmp_path / "fig06", False, parts=(True, False), has_page=False)
    judged(tmp_path / "decay", None)
    (tmp_path / "fig12").mkdir()  # its runs are being trained
    headline, figures = cards(tmp_path)
    assert headline == "1 of 3 figures hold, 1 does not, 1 cannot tell."
    assert list(figures) == ["fig06", "fig10", "fig12", "decay"]
    assert [card["value"] for card in figures.values()] == ["does not hold", "holds", "not judged yet", "cannot tell"]
    assert [card["tone"] for card in figures.values()] == ["bad", "good", "plain", "unclear"]
    assert figures["fig06"]["text"] == "A title\n1 of 2 parts hold; 12 runs"
    assert figures["fig10"]["link"] == "../fig10/report.html"
    assert "link" not in figures["fig06"]
    assert "link" not in figures["fig12"]


def test_card_appears_when_its_figure_is_judged(tmp_path):
    make_study(tmp_path / "study", definition=SHARED)
    view = StudyView(tmp_path / "study")
    assert view.document()["headline"] == "No figure has been judged yet."
    (tmp_path / "fig08").mkdir()
    (tmp_path / "fig08" / "report.html").write_text("")  # its runs are being trained
    (card,) = view.document()["answers"]
    assert (card["value"], card["link"]) == ("not judged yet", "../fig08/report.html")
    before = view.version
    judged(tmp_path / "fig06", True)
    assert view.version != before
    assert view.document()["headline"] == "fig06 holds."


def test_damaged_claim_is_left_out(tmp_path):
    make_study(tmp_path / "study", definition=SHARED)
    judged(tmp_path / "fig06", True)
    (tmp_path / "fig08").mkdir()
    (tmp_path / "fig08" / "claim.json").write_text('{"figure": "fig08", "holds": tr')
    headline, figures = cards(tmp_path)
    assert headline == "fig06 holds."
    assert list(figures) == ["fig06"]
