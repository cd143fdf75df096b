"""Pages of results: what was run, what the paper shows, what came out, and where they differ.

A page is made from the runs. Only its last section is written by hand, and is kept. The rows hold the whole configuration of
every run, so that a number can be traced to the hash of its run and to the commit that made it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smupar.lm.config.run import RunConfig
from smupar.lm.run.folder import versions
from smupar.output.files import write_atomic
from smupar.paper.reproduce import FIGURES, FINDINGS, MADE_ON, Reproduced, figure
from smupar.paper.settings import Scale
from smupar.study.store import Result

BY_HAND = "## Where they differ"
_NOTHING_YET = "Nothing to note yet."


def publish(done: Reproduced, scale: Scale, into: str | Path) -> Path:
    """Writes NAME.md, NAME.json and the picture, and the list of all pages."""
    folder = Path(into)
    folder.mkdir(parents=True, exist_ok=True)
    facts = _facts(done, scale)
    write_atomic(folder / f"{done.name}.json", _compact(facts))
    for picture in sorted(done.folder.glob("*.png")):
        shutil.copyfile(picture, folder / _picture_name(done.name, picture))
    table = done.folder / "table.txt"
    page = folder / f"{done.name}.md"
    write_atomic(page, _page(done, scale, facts, table.read_text() if table.exists() else None, _by_hand(page)))
    write_atomic(folder / "README.md", index(folder))
    return page


def refuse_other_scale(into: str | Path, names: Iterable[str], scale: Scale) -> None:
    """Raises if a page would change its scale: the section that is written by hand is about the numbers of one scale."""
    for name in names:
        path = Path(into) / f"{name}.json"
        if path.exists() and (there := json.loads(path.read_text())["scale"]) != scale.name:
            raise ValueError(f"{path} is of scale {there}: publish scale {scale.name} in another folder")


def index(folder: Path) -> str:
    """The list of pages, in the paper's order, from the files beside it."""
    pages = {name: folder / f"{name}.json" for name in FIGURES}
    published = {name: json.loads(path.read_text()) for name, path in pages.items() if path.exists()}
    scales = " and ".join(f"`{scale}`" for scale in sorted({facts["scale"] for facts in published.values()}))
    lines = [
        "# Results",
        "",
        f"What has been run at scale {scales}. A claim that does not hold stays here as it is.",
        "How to run them, and what the scales are: [reproduce](../reproduce.md).",
        "",
        "| | what | finding | holds here | runs | GPU minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name in FIGURES:
        fig, facts = figure(name), published.get(name)
        about = f"{fig.title} | {fig.finding or ''}"
        if facts is None:
            lines.append(f"| {name} | {about} | not run yet | | |")
        else:
            lines.append(f"| [{name}]({name}.md) | {about} | {_holds(facts)} | {len(facts['rows'])} | {facts['minutes']:.1f} |")
    lines += ["", "The paper's findings, and what was found of each here:", ""]
    for number, text in FINDINGS.items():
        claims = [f"[{name}]({name}.md) {_holds(facts)}" for name, facts in published.items() if number == figure(name).finding]
        lines.append(f"- Finding {number}: {text}. {', '.join(claims) or 'Not run yet'}.")
    return "\n".join(lines) + "\n"


def _holds(facts: dict[str, Any]) -> str:
    return "yes" if facts["holds"] else "**no**"


def _facts(done: Reproduced, scale: Scale) -> dict[str, Any]:
    configs, made_on = [_fields(row.config) for row in done.rows], _made_on(done)
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
        "holds": done.claim.holds,
        "claims": [{"holds": part.holds, "text": part.text} for part in done.claim.parts or (done.claim,)],
        "minutes": (sum(row.summary.seconds for row in done.rows) + made_on.get("seconds", 0)) / 60,
        "commits": sorted({versions.get("commit", "unknown") for _, versions in origins}),
        "devices": sorted({f"{device}, torch {versions['torch']}" for device, versions in origins}),
        "files": done.files,
        "common": {name: configs[0][name] for name in names if name not in varies},
        "varies": varies,
        **_slopes(done),
        "rows": rows,
    }


def _slopes(done: Reproduced) -> dict[str, Any]:
    """How sizes in hidden layers and blocks grow with density, at the first and at the last step. Only a coordinate check has
    these."""
    path = done.folder / "check.json"
    if not path.exists():
        return {}
    slopes = json.loads(path.read_text())["slopes"]
    steps = {slope["step"] for slope in slopes} - {0}
    shown = {min(steps), max(steps)}
    names = ("rule", "place", "quantity", "step", "slope", "ci", "verdict")
    chosen = [slope for slope in slopes if slope["role"] in ("hidden", "block") and slope["step"] in shown]
    rows = [{name: slope[name] for name in names} for slope in chosen]
    return {"slopes": [{n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()} for row in rows]}


def _fields(config: RunConfig) -> dict[str, Any]:
    """The fields of a run by name; the model's begin with "model."."""
    values = asdict(config.portable)
    model = {f"model.{name}": value for name, value in values.pop("model").items()}
    return {**model, **values, "betas": list(config.betas)}


def _ending(row: Result) -> dict[str, Any]:
    summary = row.summary
    return {
        "status": summary.status,
        "train_loss": summary.train_loss,
        "valid_loss": summary.valid_loss,
        "gpu_seconds": round(summary.seconds, 3),
        "commit": summary.versions.get("commit", "unknown"),
    }


def _compact(facts: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    long = {name: facts[name] for name in ("slopes", "rows") if name in facts}
    text = json.dumps({name: value for name, value in facts.items() if name not in long}, indent=1).removesuffix("\n}")
    for name, rows in long.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def _picture_name(name: str, picture: Path) -> str:
    return f"{name}.png" if picture.stem in ("picture", "check") else f"{name}-{picture.name}"


def _by_hand(page: Path) -> str:
    if not page.exists():
        return _NOTHING_YET
    return page.read_text().partition(BY_HAND)[2].strip() or _NOTHING_YET


def _page(done: Reproduced, scale: Scale, facts: dict[str, Any], table: str | None, by_hand: str) -> str:
    fig = figure(done.name)
    finding = f" It belongs to Finding {fig.finding}: {FINDINGS[fig.finding]}." if fig.finding else ""
    pictures = [_picture_name(done.name, picture) for picture in sorted(done.folder.glob("*.png"))]
    data = f" --data {scale.data}" if done.rows else ""
    tasks = " --data-dir TASKS" if fig.prepare else ""
    lines = [
        f"# {_heading(done.name)}: {fig.title}",
        "",
        f"**{'Holds' if done.claim.holds else 'Does not hold'} at scale {scale.name}.**",
        "",
        *(line for picture in pictures for line in (f"![{fig.title}]({picture})", "")),
        *(["```text", table.rstrip(), "```", ""] if table else []),
        "## What the paper shows",
        "",
        f"{fig.shows}{finding}",
        "",
        "## What was run",
        "",
        *(_what_was_run(done.rows, facts) if done.rows else _what_was_measured(done, scale)),
        "",
        "```sh",
        f"smupar reproduce {done.name} --scale {scale.name}{data}{tasks} --publish docs/results",
        "```",
        "",
        "## What came out",
        "",
        *(f"- {'yes' if part.holds else '**no**'}: {part.text}" for part in done.claim.parts or (done.claim,)),
        "",
        BY_HAND,
        "",
        by_hand,
    ]
    return "\n".join(lines) + "\n"


def _heading(name: str) -> str:
    words = {"fig": "Figure", "tab": "Table"}
    return f"{words[name[:3]]} {int(name[3:])}" if name[:3] in words else name.capitalize()


def _what_was_measured(done: Reproduced, scale: Scale) -> list[str]:
    what = figure(done.name).what
    if not what:
        return [f"Nothing is trained for it. Made by commit {versions().get('commit', 'unknown')}."]
    made_on = _made_on(done)
    where = f"{made_on['device']}, torch {made_on['torch']}, {made_on.get('seconds', 0) / 60:.1f} minutes in all"
    return [f"{what(scale)} {where}. Made by commit {made_on.get('commit', 'unknown')}."]


def _made_on(done: Reproduced) -> dict[str, Any]:
    """The device and versions of a measurement that is not made of runs."""
    path = done.folder / MADE_ON
    return json.loads(path.read_text()) if path.exists() else {}


def _what_was_run(rows: Sequence[Result], facts: dict[str, Any]) -> list[str]:
    configs = [row.config for row in rows]
    first = configs[0]
    diverged = sum(row.summary.status == "diverged" for row in rows)
    tokens = f"{_some(configs, 'steps')} steps of {first.batch_size} x {first.seq_len} tokens"
    ended_early = f", {diverged} of which diverged" if diverged else ""
    return [
        f"{len(rows)} runs{ended_early}: GPTs of {_some(configs, 'model.depth')} layers, "
        f"width {_some(configs, 'model.width')} (base {first.base_width}), heads of {first.model.head_dim}, vocabulary "
        f"{first.model.vocab_size}, {tokens} of `{first.data}`, {first.dtype}; density {_densities(configs)}; seeds "
        f"{_some(configs, 'seed')}.",
        f"{'; '.join(facts['devices'])}. {facts['minutes']:.1f} minutes of training on it, compilation not counted; runs that "
        f"several figures share are counted in each. Made by commit {', '.join(facts['commits'])}. Every run with its "
        f"configuration and hash: [{facts['figure']}.json]({facts['figure']}.json).",
    ]


def _some(configs: Sequence[RunConfig], name: str) -> str:
    values = sorted({_fields(config)[name] for config in configs})
    return ", ".join(map(str, values))


def _densities(configs: Sequence[RunConfig]) -> str:
    values = sorted({1 - (config.sparsity or 0.0) for config in configs}, reverse=True)
    return ", ".join(f"1/{1 / value:g}" if value < 1 and (1 / value).is_integer() else f"{value:.4g}" for value in values)
