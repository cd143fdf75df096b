"""The page: one template for studies, runs, checks, reproductions and traces.

A page shows a *document*, plain JSON that `document` describes: a sentence, answers, charts, a table of runs, their progress,
and the command that continues them. `study/page/view`, `check/coordinates/page`, `updates/page`, `paper/page` and `watch/runs`
make documents. The template draws all documents, so there is one look, one set of controls, and one place for keyboard, colours
and downloads.

A page contains everything: documents, style, script and the plotting library (plotly.js, MIT, in assets). So it opens from a
disk and needs no network, and its content-security policy forbids requests. ``write_page`` writes such a file. `smupar watch`
serves the same page without documents; the page requests them from that server, and nothing else.

Texts of a document (names of runs, errors, paths) are data: they are escaped when the page is made, and the script puts them
into text nodes only.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from smupar.output.colours import RULE_STYLES, RuleStyle
from smupar.output.files import write_atomic
from smupar.output.json_files import parse_json, read_text
from smupar.output.page.document import Document

FORMAT = "smupar-page/1"
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("words", "charts", "explore", "curves", "table", "source", "places", "run", "page")  # in this order, as one script
_BEFORE, _AFTER = '<script id="data" type="application/json">', "</script>"


def page(documents: Sequence[Document], *, live: bool = False) -> str:
    """The page as HTML. A ``live`` page asks the server that it came from for newer documents."""
    data = {"format": FORMAT, "live": live, "documents": documents}
    parts = {
        "STYLE": _asset("page.css"),
        "DATA": f"{_BEFORE}{embedded(data)}{_AFTER}",
        "PLOTLY": _plotly(),
        "SCRIPT": f'"use strict";\nconst RULES = {_rules()};\n' + "".join(_asset(f"{name}.js") for name in _SCRIPTS),
    }
    # All placeholders are replaced in one pass, so that text in a document is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def write_page(path: Path, document: Document) -> None:
    """Writes the page of one document atomically."""
    write_atomic(path, page([document]))


def read_page(path: Path) -> Document | None:
    """The document of a page; None if the file is not a page of this format."""
    try:
        text = read_text(path, remedy="").partition(_BEFORE)[2].partition(_AFTER)[0]
        values = parse_json(text, source=str(path), remedy="")
        return values["documents"][0] if values["format"] == FORMAT else None
    except (ValueError, LookupError, TypeError):
        return None


def embedded(values: object) -> str:
    """JSON for a script element, escaped so that no text in it can end the element."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _rules() -> str:
    """The colours and dashes of rules as JSON: light, dark and dash, each by the rule's title."""
    return embedded({kind: {rule: getattr(style, kind) for rule, style in RULE_STYLES.items()} for kind in RuleStyle._fields})


@cache
def _plotly() -> str:
    """The plotting library, compressed, which halves the size of a page. Browsers unpack it."""
    return base64.b64encode(gzip.compress(_asset("plotly-basic.min.js").encode(), mtime=0)).decode()
