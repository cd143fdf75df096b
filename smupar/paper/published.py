"""Reads the rows of published pages, so that a study can continue from rows on a machine that has none of their runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.model.cost import estimate
from smupar.lm.run.folder import Summary
from smupar.output.json_files import DamagedFileError, as_record, read_object
from smupar.paper.settings import Scale
from smupar.study.store import Result, Study

_PUBLISH_AGAIN = "publish the figure again, or restore it from a copy"
_TEXT = "text "  # prefix of the names of texts among the files of a page


@dataclass(frozen=True)
class _Rows:
    """The part of a published file that holds runs."""

    common: dict[str, Any]
    varies: list[str]
    rows: list[dict[str, Any]]


def read_published(path: Path) -> dict[str, Any]:
    """The content of a published file. Files of earlier versions have no seal."""
    published = read_object(path, remedy=_PUBLISH_AGAIN)
    if not isinstance(published.get("scale"), str):
        raise DamagedFileError(f"{path} is damaged (it does not say at which scale it was made): {_PUBLISH_AGAIN}")
    part = {name: published[name] for name in ("common", "varies", "rows") if name in published}
    if part.get("rows"):
        table = as_record(_Rows, part, source=str(path), remedy=_PUBLISH_AGAIN)
        needed = {*table.varies, "id", "status", "train_loss", "valid_loss", "gpu_seconds", "commit"}
        for number, row in enumerate(table.rows):
            if missing := needed - row.keys():
                raise DamagedFileError(f"{path} is damaged (row {number} has no {min(missing)!r}): {_PUBLISH_AGAIN}")
        try:
            others = [result.summary.id for result in results(published) if result.config.id != result.summary.id]
        except ValueError as error:
            raise DamagedFileError(f"{path} is damaged ({error}): {_PUBLISH_AGAIN}") from error
        if others:
            raise DamagedFileError(f"{path} is damaged (the fields of run {others[0]} belong to another run): {_PUBLISH_AGAIN}")
    return published


def results(published: dict[str, Any]) -> list[Result]:
    """The results in a published file. Their summaries have only the fields that the file holds."""
    return [_result(published, row) for row in published.get("rows", [])]


def _result(published: dict[str, Any], row: dict[str, Any]) -> Result:
    values = {**published["common"], **{name: row[name] for name in published["varies"]}}
    values["model"] = {name.removeprefix("model."): values.pop(name) for name in list(values) if name.startswith("model.")}
    config = RunConfig.from_json(json.dumps(values), source=f"run {row['id']}")
    made_on = published.get("devices", [])  # "device, torch version", if all rows have the same
    device, _, torch = made_on[0].partition(", torch ") if len(made_on) == 1 else ("", "", "")
    summary = Summary(
        id=row["id"],
        status=row["status"],
        folder="",
        steps=config.steps,
        num_tokens=config.num_tokens,
        num_parameters=0,
        sparsity=config.sparsity or 0.0,
        train_loss=row["train_loss"],
        valid_loss=row["valid_loss"],
        best_valid_loss=None,
        best_step=None,
        seconds=row["gpu_seconds"],
        tokens_per_second=0.0,
        device=device,
        num_ranks=1,
        num_threads=1,
        versions={"commit": row["commit"], **({"torch": torch} if torch else {})},
    )
    return Result(config, summary)


def restore(study: Study, folder: str | Path, scale: Scale, configs: Sequence[RunConfig]) -> int:
    """Adds to the study the results of missing runs that have rows in a folder of pages. Returns their number.

    A row counts only if its run read the same text as the study. Runs that record or follow a trace are left out, because
    traces are not published.
    """
    wanted = {config.id: config for config in study.missing(configs) if not (config.record or config.follow)}
    if not wanted:
        return 0
    here = _texts(wanted.values())
    found: dict[str, Result] = {}
    for path in sorted(Path(folder).glob("*.json")):
        published = read_published(path)
        read = {name: sha256 for name, sha256 in published.get("files", {}).items() if name.startswith(_TEXT)}
        if published["scale"] == scale.name and read and read.items() <= here.items():
            found |= {result.config.id: result for result in results(published) if result.config.id in wanted}
    if found:
        for name, sha256 in here.items():
            study.record_checksum(_TEXT.strip(), name.removeprefix(_TEXT), sha256)
    for run, result in found.items():
        num_parameters = estimate(wanted[run]).num_parameters
        study.add(wanted[run], replace(result.summary, num_parameters=num_parameters))
    return len(found)


def _texts(configs: Iterable[RunConfig]) -> dict[str, str]:
    """The sha256 of the texts of these runs, under the names that a study gives them."""
    distinct = {(config.data, config.valid_data): config for config in configs}.values()
    return {_TEXT + info.name: info.sha256 for info in (open_text(config, check=False).info for config in distinct)}


def run_fields(config: RunConfig) -> dict[str, Any]:
    """The fields of a run by name. Names of the model's fields begin with "model."."""
    values = asdict(config.portable)
    model = {f"model.{name}": value for name, value in values.pop("model").items()}
    return {**model, **values, "betas": list(config.betas)}
