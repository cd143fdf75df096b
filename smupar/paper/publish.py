"""Writes pages of results: what was run, what the paper shows, what came out, and where they differ.

NAME.json holds the numbers, with every run's complete configuration, so that a number can be traced to the hash of its run and
the commit that made it. The page NAME.md is generated from it, except for its last section, which is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.folder import versions
from smupar.output.files import write_atomic
from smupar.output.json_files import SEAL, read_object, read_text, seal_of
from smupar.paper.catalogue import FIGURES, FINDINGS, figure
from smupar.paper.figure import Claim, Figure
from smupar.paper.published import read_published, results
from smupar.paper.reproduce import MADE_ON, Reproduced
from smupar.paper.settings import CLIP, Scale
from smupar.study.picture import draw_png
from smupar.study.store import Result

BY_HAND = "## Where they differ"
_INDEX_HEADING = "# Results"
_NOTHING_YET = "Nothing to note yet."
_ANSWERS = {True: "yes", False: "**no**", None: "cannot tell"}
_VERDICTS = {True: "Holds", False: "Does not hold", None: "Cannot tell"}
_FULL_HASH = re.compile(r"^([0-9a-f]{7})[0-9a-f]*")  # what follows, such as -dirty, stays
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
    if readme.exists() and readme.read_text(encoding="utf-8").startswith(_INDEX_HEADING):
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


def index(folder: Path) -> str:
    """The page that lists all pages of a folder, in the paper's order."""
    paths = {name: folder / f"{name}.json" for name in FIGURES}
    pages = {name: read_published(path) for name, path in paths.items() if path.exists()}
    scales = " and ".join(f"`{scale}`" for scale in sorted({page["scale"] for page in pages.values()}))
    lines = [
        _INDEX_HEADING,
        "",
        f"What has been run at scale {scales}. A claim that does not hold stays here as it is. Claims have parts, and all",
        "must hold: (5 of 6) means that five do. Runs have weight decay and clipped gradients unless the table says",
        "otherwise.",
        "How to run them, and what the scales are: [reproduce](../reproduce.md).",
        "",
        "| | what | finding | holds here | runs | GPU minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name in FIGURES:
        fig, page = figure(name), pages.get(name)
        about = f"{fig.title} | {fig.finding or ''}"
        if page is None:
            lines.append(f"| {name} | {about} | not run yet | | |")
        else:
            lines.append(f"| [{name}]({name}.md) | {about} | {_holds(page)} | {len(page['rows'])} | {page['minutes']:.1f} |")
    lines += ["", "The paper's findings, and what was found of each here:", ""]
    for number, text in FINDINGS.items():
        claims = [f"[{name}]({name}.md) {_holds(page)}" for name, page in pages.items() if number == figure(name).finding]
        lines.append(f"- Finding {number}: {text}. {', '.join(claims) or 'Not run yet'}.")
    return "\n".join(lines) + "\n"


def _holds(published: dict[str, Any]) -> str:
    """The verdict, with the number of parts that hold if the parts differ."""
    answers = [part["holds"] for part in published["claims"]]
    num_yes = answers.count(True)
    parts = f" ({num_yes} of {len(answers)})" if 0 < num_yes < len(answers) else ""
    return _ANSWERS[published["holds"]] + parts + _without(published)


def _to_publish(done: Reproduced, scale: Scale) -> dict[str, Any]:
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


def _fields(config: RunConfig) -> dict[str, Any]:
    """The fields of a run by name. Names of the model's fields begin with "model."."""
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


def page_of(published: dict[str, Any], pictures: Sequence[str], by_hand: str) -> str:
    name, fig = published["figure"], figure(published["figure"])
    finding = f" It belongs to Finding {fig.finding}: {FINDINGS[fig.finding]}." if fig.finding else ""
    lines = [
        f"# {_heading(name)}: {fig.title}",
        "",
        f"**{_VERDICTS[published['holds']]} at scale {published['scale']}{_without(published)}.**",
        "",
        *(line for picture in pictures for line in (f"![{fig.title}]({picture})", "")),
        *(["```text", table.rstrip(), "```", ""] if (table := fig.text() if fig.text else published.get("table")) else []),
        "## What the paper shows",
        "",
        f"{fig.shows}{finding}",
        "",
        "## What was run",
        "",
        *(_what_was_run(published) if published["rows"] else [_what_was_measured(fig, published)]),
        "",
        "```sh",
        _command(fig, published),
        "```",
        "",
        "## What came out",
        "",
        *(line for part in published["claims"] for line in _came_out(Claim(part["holds"], part["text"]))),
        "",
        BY_HAND,
        "",
        by_hand,
    ]
    return "\n".join(lines) + "\n"


def _came_out(part: Claim) -> list[str]:
    """The answer of a part and its statement, then its numbers on a line of their own."""
    return [f"- {_ANSWERS[part.holds]}: {part.statement}", *([f"    - {part.numbers}"] if part.numbers else [])]


def _without(published: dict[str, Any]) -> str:
    """The words ", without ..." if no run has weight decay, or if no run clips gradients."""
    missing = [
        what
        for name, what in (("weight_decay", "weight decay"), ("clip", "clipping"))
        if published["common"].get(name, 1) in (0, None)
    ]
    return f", without {' and '.join(missing)}" if missing else ""


def _command(fig: Figure, published: dict[str, Any]) -> str:
    common = published["common"]
    flags = [f"--scale {published['scale']}"]
    if published["rows"]:
        flags.append(f"--data {common['data']}")
    if common.get("weight_decay") == 0:
        flags.append("--weight-decay 0")
    if published["rows"] and common.get("clip", CLIP) is None:
        flags.append("--clip 0")
    if fig.prepare:
        flags.append("--data-dir TASKS")
    return f"smupar reproduce {published['figure']} {' '.join(flags)} --publish docs/results"


def _heading(name: str) -> str:
    words = {"fig": "Figure", "tab": "Table"}
    return f"{words[name[:3]]} {int(name[3:])}" if name[:3] in words else name.capitalize()


def _what_was_measured(fig: Figure, published: dict[str, Any]) -> str:
    made_by = _made_by(published["commits"] or [versions().get("commit", "unknown")])
    if not fig.what:
        return "No model is trained."
    return (
        f"{fig.what(Scale(published['scale']))} {published['devices'][0]}, {published['minutes']:.1f} minutes in all. {made_by}"
    )


def _made_by(commits: Sequence[str]) -> str:
    short = [_FULL_HASH.sub(r"\1", commit) for commit in commits]
    return f"Made by commit{'s' * (len(short) > 1)} {_listed(short)}."


def _made_on(done: Reproduced) -> dict[str, Any]:
    """The device and versions of a measurement without runs."""
    path = done.folder / MADE_ON
    return read_object(path, remedy=_RUN_AGAIN) if path.exists() else {}


def _what_was_run(published: dict[str, Any]) -> list[str]:
    configs = [row.config for row in results(published)]
    first = configs[0]
    diverged = sum(row["status"] == "diverged" for row in published["rows"])
    ended_early = f", {diverged} of which diverged" if diverged else ""
    seeds = sorted({str(config.seed) for config in configs})
    batches = " and ".join(sorted({f"{config.batch_size} x {config.seq_len}" for config in configs}))
    return [
        f"{len(configs)} runs{ended_early}{_missing(published)}: GPTs of {_distinct(configs, 'model.depth')} layers, "
        f"width {_distinct(configs, 'model.width')} (base {first.base_width}), heads of {first.model.head_dim}, vocabulary "
        f"{first.model.vocab_size}; {_distinct(configs, 'steps')} steps of {batches} tokens of `{first.data}`, {first.dtype}; "
        f"density {_densities(configs)}; seed{'s' * (len(seeds) > 1)} {_listed(seeds)}; {_optimizer(configs)}.",
        f"{'; '.join(published['devices'])}. {published['minutes']:.1f} minutes of training on it, compilation not counted; "
        f"runs that several figures share are counted in each. {_made_by(published['commits'])} Every run with its "
        f"configuration and hash: [{published['figure']}.json]({published['figure']}.json).",
    ]


def _missing(published: dict[str, Any]) -> str:
    return f" ({published['missing']} more are planned)" if published.get("missing") else ""


def _optimizer(configs: Sequence[RunConfig]) -> str:
    kinds = sorted({config.decay for config in configs if config.weight_decay})
    decay = f"weight decay {_distinct(configs, 'weight_decay')} ({' and '.join(kinds)})" if kinds else "no weight decay"
    clips = sorted({config.clip for config in configs if config.clip is not None})
    clipping = f"clipping at {', '.join(f'{clip:g}' for clip in clips)}" if clips else "no clipping"
    return f"{_distinct(configs, 'optimizer')}, betas {configs[0].betas}, {decay}, {clipping}"


def _distinct(configs: Sequence[RunConfig], name: str) -> str:
    values = sorted({_fields(config)[name] for config in configs})
    return _listed([f"{value:.4g}" if isinstance(value, float) else str(value) for value in values])


def _densities(configs: Sequence[RunConfig]) -> str:
    values = sorted({1 - (config.sparsity or 0.0) for config in configs}, reverse=True)
    return _listed([f"1/{1 / value:g}" if value < 1 and (1 / value).is_integer() else f"{value:.4g}" for value in values])


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
