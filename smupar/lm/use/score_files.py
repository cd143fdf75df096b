"""Files of requests and of scores, as JSONL.

requests.jsonl   a header; then task, doc, index, context, continuation
scores.jsonl     a header that names the model; then task, doc, index, key of the texts, loglikelihood, is_greedy
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smupar.output.files import write_atomic
from smupar.output.json_files import DamagedFileError, parse_object, read_text, sealed_json
from smupar.refusals import refuse

REQUESTS_FORMAT, SCORES_FORMAT = "smupar-requests/1", "smupar-scores/1"
_COUNT = "num_requests"  # field of the header of a file of requests


@dataclass(frozen=True)
class ScoreRequest:
    """A question to a model: how likely is ``continuation`` after ``context``?"""

    task: str
    doc: int
    index: int  # which of the document's choices
    context: str
    continuation: str

    @property
    def where(self) -> str:
        return f"document {self.doc} of {self.task}"

    @property
    def key(self) -> str:
        """A hash of the texts alone, so scores stay valid if --tasks or --limit change."""
        return hashlib.sha256(json.dumps([self.context, self.continuation]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Score:
    loglikelihood: float
    is_greedy: bool  # whether every token of the continuation was the most likely one


def begin_scores(path: Path, header: dict[str, Any]) -> dict[str, Score]:
    """The scores that exist already. Raises if they belong to another model, or were computed with other settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = read_text(path, remedy="choose another --out") if path.exists() else ""
    if not text.strip():
        write_atomic(path, score_line(header))
        return {}
    if not text.endswith("\n"):  # the process was killed while writing this line
        write_atomic(path, text[: text.rfind("\n") + 1])
    old, answered = read_scores(path)
    for name in ("weights", "tokenizer", "dtype", "max_length"):
        refuse(
            old.get(name) != header[name],
            f"{path} holds scores of {old.get('folder')} with {name} {old.get(name)}, not {header[name]}: choose another --out",
        )
    return answered


def write_requests(path: Path, header: dict[str, Any], requests: list[ScoreRequest]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"format": REQUESTS_FORMAT, _COUNT: len(requests), **header}, *(asdict(request) for request in requests)]
    write_atomic(path, "".join(map(score_line, rows)))


def score_line(row: dict[str, Any]) -> str:
    return sealed_json(row, indent=None) + "\n"


def read_requests(path: str | Path) -> tuple[dict[str, Any], list[ScoreRequest]]:
    remedy = "make it with smupar eval requests"
    header, rows = _read(Path(path), REQUESTS_FORMAT, remedy)
    asked = [_from_row(ScoreRequest, row, path, number) for number, row in rows]
    expected = header.get(_COUNT, len(asked))  # older versions did not count them
    if len(asked) != expected:
        raise DamagedFileError(f"{path} is damaged ({len(asked)} requests, expected {expected}): {remedy}")
    return header, asked


def read_scores(path: str | Path) -> tuple[dict[str, Any], dict[str, Score]]:
    """The header, and scores by ``ScoreRequest.key``."""
    header, rows = _read(Path(path), SCORES_FORMAT, "make it with smupar eval score")
    names = ("loglikelihood", "is_greedy")
    return header, {
        str(row.get("key", "")): _from_row(Score, {name: row.get(name) for name in names}, path, number) for number, row in rows
    }


def _read(path: Path, form: str, remedy: str) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    refuse(not path.is_file(), f"no file {path}: {remedy}")
    (_, header), *rows = [*read_lines(path, remedy)] or [(0, {})]
    refuse(header.get("format") != form, f"{path} does not begin with {form}: {remedy}")
    return header, rows


def _from_row(kind: type[Any], row: dict[str, Any], path: str | Path, number: int) -> Any:
    hints = {"str": str, "int": int, "float": float, "bool": bool}
    fields = {name: hints[hint] for name, hint in kind.__annotations__.items()}
    refuse(
        row.keys() != fields.keys() or not all(type(row[name]) is fields[name] for name in fields),
        f"{path}, line {number}: expected {', '.join(fields)}, got {', '.join(row) or 'nothing'}",
    )
    return kind(**row)


def read_lines(path: Path, remedy: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSONL file without their seals, and the numbers of their lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            source = f"{path}, line {number},"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DamagedFileError(f"{source} is not UTF-8 text: {remedy}") from error
            if text.strip():
                yield number, parse_object(text, source=source, remedy=remedy)
