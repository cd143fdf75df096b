"""The study that all figures of a reproduction share. Its runs are unlike each other, so it has no best run. It shows a card
for each figure, with the verdict in its claim.json, and leads to its page. The folders of figures are beside the study's
folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smupar.output.files import changed_at
from smupar.output.json_files import WRONG_TYPES, read_object
from smupar.output.page.document import Answer, Tone
from smupar.study.definition import Findings, Stage, StudyDefinition
from smupar.study.store import Study

CLAIM, PAGE = "claim.json", "report.html"
_VALUES: dict[bool | None, tuple[str, Tone]] = {
    True: ("holds", "good"),
    False: ("does not hold", "bad"),
    None: ("cannot tell", "unclear"),
}


def define_reproduction(stored: dict[str, Any], stages: Sequence[Stage]) -> StudyDefinition:
    return StudyDefinition(stored, stages, _read, title="All figures", beside=_state)


def reproduction_from_json(stored: dict[str, Any]) -> StudyDefinition:
    """Reads the study from study.json. Only a command knows which runs its figures propose."""
    return define_reproduction(stored, ())


def _read(study: Study) -> Findings:
    cards = [card for folder in _figures(study) if (card := _card(folder)) is not None]
    told = _counted(cards)
    return Findings(told, (), study.results(), told, cards)


def _state(study: Study) -> object:
    return [(folder.name, changed_at(folder / CLAIM), (folder / PAGE).exists()) for folder in _figures(study)]


def _figures(study: Study) -> list[Path]:
    """The folders beside the study's: figures and tables of the paper first."""
    folders = (path for path in study.folder.parent.glob("*") if path.is_dir() and path.name != study.folder.name)
    return sorted(folders, key=lambda path: (not re.fullmatch(r"(fig|tab)\d+", path.name), path.name))


def _card(folder: Path) -> Answer | None:
    """The card of a figure; None if its claim is damaged."""
    link = f"../{folder.name}/{PAGE}" if (folder / PAGE).exists() else ""
    if not (folder / CLAIM).exists():
        card: Answer = {"name": folder.name, "value": "not judged yet", "text": "", "tone": "plain", "rule": ""}
        return {**card, "link": link} if link else card
    try:
        claim = read_object(folder / CLAIM, remedy="")
        value, tone = _VALUES[claim["holds"]]
        holding = [part["holds"] for part in claim["parts"]]
        parts = f"{holding.count(True)} of {len(holding)} parts hold" if not all(holding) else ""
        runs = f"{claim['runs']} runs" if claim["runs"] else ""
        text = "\n".join(filter(None, (claim.get("title"), "; ".join(filter(None, (parts, runs))))))
        card = {"name": claim["figure"], "value": value, "text": text, "tone": tone, "rule": ""}
    except (ValueError, OSError, *WRONG_TYPES):
        return None
    return {**card, "link": link} if link else card


def _counted(cards: Sequence[Answer]) -> str:
    """How many figures hold, in a sentence."""
    counts = Counter(card["value"] for card in cards)
    hold, do_not, open_ = (counts[value] for value, _ in _VALUES.values())
    judged = [card for card in cards if card["tone"] != "plain"]
    if len(judged) < 2:
        return f"{judged[0]['name']} {judged[0]['value']}." if judged else "No figure has been judged yet."
    others = [f"{do_not} do{'es' if do_not == 1 else ''} not"] if do_not else []
    others += [f"{open_} cannot tell"] if open_ else []
    return f"{hold} of {len(judged)} figures hold{''.join(f', {other}' for other in others)}."
