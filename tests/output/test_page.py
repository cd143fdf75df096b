"""The page as a file: everything is inside, and no text of a document can become part of its code."""

import re

import pytest

from smupar.output.page import embedded, page, read_page, write_page
from smupar.output.page.document import finite, thinned

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{SCRIPT}}&amp;\u2028"


def document(**changes):
    empty = {"kind": "study", "title": "T", "headline": "H", "sentence": "", "answers": [], "charts": [], "table": None}
    more = {"progress": None, "curves": {}, "command": "", "folder": "", "details": [], "is_live": False, "made": 0.0}
    return {**empty, **more, **changes}


def test_page_holds_everything_and_stays_small():
    html = page([document()])
    assert html.startswith("<!doctype html>")
    assert len(html) < 700_000
    assert "{{" not in html
    ours = re.sub(r'<script id="plotly".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=['\"](?!data:)", ours)
    assert set(re.findall(r"https?://[^\s\"'<)]+", ours)) == {"http://www.w3.org/2000/svg"}  # the name of SVG, not an address
    assert "default-src 'none'" in html


@pytest.mark.parametrize("field", ["title", "headline", "sentence", "command", "folder"])
def test_text_of_a_document_stays_text(field):
    html = page([document(**{field: EVIL})])
    assert "alert(1)</script>" not in html
    assert html.count("<script") == page([document()]).count("<script")
    assert html.count("function pointOf") == 1  # no placeholder in a document is filled


def test_page_gives_its_document_back(tmp_path):
    write_page(tmp_path / "report.html", document(headline=EVIL, folder="ä€"))
    assert read_page(tmp_path / "report.html") == document(headline=EVIL, folder="ä€")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("content", ["", "<html></html>", '<script id="data" type="application/json">{</script>', "\x00"])
def test_other_files_hold_no_document(tmp_path, content):
    (tmp_path / "report.html").write_text(content)
    assert read_page(tmp_path / "report.html") is None
    assert read_page(tmp_path / "none.html") is None


def test_numbers_that_json_does_not_have_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"y": float("nan")})
    assert [finite(value) for value in (float("inf"), None, 1.23456789, 2)] == [None, None, 1.23457, 2]


def test_thinned_keeps_both_ends():
    assert thinned(range(100), 4) == [0, 33, 66, 99]
    assert thinned(range(3), 4) == [0, 1, 2]
