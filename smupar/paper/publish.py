"""Writes pages of results: what was run, what the paper shows, what came out, and where they differ.

NAME.json holds the numbers, with every run's complete configuration, so that a number can be traced to the hash of its run and
the commit that made it. The page NAME.md is generated from it, except for its last section, which is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smupar.output.files import write_atomic
from smupar.output.json_files import SEAL, read_object, read_text, seal_of
from smupar.paper.catalogue import figure
from smupar.paper.figure import Claim
from smupar.paper.published import read_published, results, run_fields
from smupar.paper.reproduce import MADE_ON, Reproduced
from smupar.paper.results_page import BY_HAND, INDEX_HEADING, index, page_of
from smupar.paper.settings import Scale
from smupar.study.curves.picture import draw_png
from smupar.study.store import Result

_NOTHING_YET = "Nothing to note yet."
_RUN_AGAIN = "delete it, and run the figure again"


def publish(done: Reproduced, scale: Scale, to: str | Path) -> Path:
    """Writes NAME.md, NAME.json and the picture, and the list of all pages."""
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    published = _to_publish(done, scale)
    write_atomic(folder / f"{done.name}.json", _compact(published))
    for picture in sorted(done.folder.glob("*.png")):
        write_atomic(folder / _picture_name(done.name, picture), picture.read_bytes())
    page = _write_page(folder / f"{done.name}.json")
    write_atomic(folder / "README.md", index(folder))
    return page


def rewrite(folder: str | Path) -> None:
    """Makes claims, pictures, pages and the list of pages in a folder again from its rows, for example after a claim has
    changed. ``make docs`` calls this. A README that is not the list of pages stays unchanged."""
    for path in sorted(Path(folder).glob("*.json")):
        fig, published = figure(path.stem), read_published(path)
        measured = measured_in(published)
        if fig.draw:
            draw_png(fig.draw(measured), path.with_suffix(".png"), fig.title, columns=fig.columns)
        write_atomic(path, _compact({**published, **_claimed(fig.claim(measured))}))
        _write_page(path)
    readme = Path(folder) / "README.md"
    if readme.exists() and readme.read_text(encoding="utf-8").startswith(INDEX_HEADING):
        write_atomic(readme, index(Path(folder)))


def measured_in(published: dict[str, Any]) -> Any:
    """The input of the figure's ``draw`` and ``claim``, from the content of a published file."""
    from_published = figure(published["figure"]).from_published
    return from_published(published) if from_published else results(published)


def refuse_other_scale(folder: str | Path, names: Iterable[str], scale: Scale) -> None:
    """Raises if a page would change its scale, because the handwritten section of a page is about one scale."""
    for name in names:
        path = Path(folder) / f"{name}.json"
        if path.exists() and (there := read_published(path)["scale"]) != scale.name:
            raise ValueError(f"{path} was made at scale {there}: publish scale {scale.name} in another folder")


def _to_publish(done: Reproduced, scale: Scale) -> dict[str, Any]:
    configs, made_on = [run_fields(row.config) for row in done.rows], _made_on(done)
    origins = [(row.summary.device, row.summary.versions) for row in done.rows] or (
        [(made_on["device"], made_on)] if made_on else []
    )
    names = list(configs[0]) if configs else []
    varies = [name for name in names if any(config[name] != configs[0][name] for config in configs)]
    rows = [
        {"id": row.config.id, **{n: c[n] for n in varies}, **_ending(row)} for row, c in zip(done.rows, configs, strict=True)
    ]
    return {
        "figure": done.name,
        "scale": scale.name,
        **_claimed(done.claim),
        "minutes": (sum(row.summary.seconds for row in done.rows) + made_on.get("seconds", 0)) / 60,
        "commits": sorted({versions.get("commit", "unknown") for _, versions in origins}),
        "devices": sorted({f"{device}, torch {versions['torch']}" for device, versions in origins}),
        "files": done.files,
        **({"missing": done.missing} if done.missing else {}),
        "common": {name: configs[0][name] for name in names if name not in varies},
        "varies": varies,
        **_table(done),
        **_slopes(done),
        "rows": rows,
    }


def _claimed(claim: Claim) -> dict[str, Any]:
    return {"holds": claim.holds, "claims": [{"holds": part.holds, "text": part.text} for part in claim.parts or (claim,)]}


def _table(done: Reproduced) -> dict[str, Any]:
    """The measured table, if there is one. Tables that need no run are made together with the page."""
    path = done.folder / "table.txt"
    return {"table": path.read_text(encoding="utf-8")} if path.exists() and not figure(done.name).text else {}


def _slopes(done: Reproduced) -> dict[str, Any]:
    """The verdicts and slopes of a coordinate check: sizes over density in hidden layers and blocks, at the first and the last
    step. Other figures have no slopes."""
    path = done.folder / "check.json"
    if not path.exists():
        return {}
    check = read_object(path, remedy=_RUN_AGAIN)
    slopes = check["slopes"]
    steps = {slope["step"] for slope in slopes} - {0}
    shown = {min(steps), max(steps)}
    names = ("rule", "place", "role", "quantity", "step", "slope", "ci", "verdict")
    chosen = [slope for slope in slopes if slope["role"] in ("hidden", "block") and slope["step"] in shown]
    rows = [{name: slope[name] for name in names} for slope in chosen]
    rounded = [{n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()} for row in rows]
    return {"verdicts": check["verdicts"], "slopes": rounded}


def _ending(row: Result) -> dict[str, Any]:
    summary = row.summary
    return {
        "status": summary.status,
        "train_loss": summary.train_loss,
        "valid_loss": summary.valid_loss,
        "gpu_seconds": round(summary.seconds, 3),
        "commit": summary.versions.get("commit", "unknown"),
    }


def _compact(published: dict[str, Any]) -> str:
    """JSON with a seal, and a line for each row."""
    long = {name: published[name] for name in ("slopes", "rows") if name in published}
    short = {name: value for name, value in published.items() if name not in long}
    text = json.dumps({**short, SEAL: seal_of(published)}, indent=1).removesuffix("\n}")
    for name, rows in long.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def _picture_name(name: str, picture: Path) -> str:
    return f"{name}.png" if picture.stem in ("picture", "check") else f"{name}-{picture.name}"


def _write_page(path: Path) -> Path:
    """Writes the page for a published file, beside the file."""
    published, page = read_published(path), path.with_suffix(".md")
    pictures = sorted(picture.name for picture in path.parent.glob(f"{path.stem}*.png"))
    write_atomic(page, page_of(published, pictures, _by_hand(page)))
    return page


def _by_hand(page: Path) -> str:
    if not page.exists():
        return _NOTHING_YET
    return read_text(page, remedy="restore it from a copy").partition(BY_HAND)[2].strip() or _NOTHING_YET


def _made_on(done: Reproduced) -> dict[str, Any]:
    """The device and versions of a measurement without runs."""
    path = done.folder / MADE_ON
    return read_object(path, remedy=_RUN_AGAIN) if path.exists() else {}
