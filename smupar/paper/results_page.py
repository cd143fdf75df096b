"""The Markdown of a page of results, and of the list of all pages, from published numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.folder import versions
from smupar.paper.catalogue import FIGURES, FINDINGS, figure
from smupar.paper.figure import Claim, Figure
from smupar.paper.published import read_published, results, run_fields
from smupar.paper.settings import CLIP, Scale

BY_HAND = "## Where they differ"  # the heading of the section that is written by hand
INDEX_HEADING = "# Results"
_ANSWERS = {True: "yes", False: "**no**", None: "cannot tell"}
_VERDICTS = {True: "Holds", False: "Does not hold", None: "Cannot tell"}
_FULL_HASH = re.compile(r"^([0-9a-f]{7})[0-9a-f]*")  # what follows, such as -dirty, stays


def index(folder: Path) -> str:
    """The page that lists all pages of a folder, in the paper's order."""
    paths = {name: folder / f"{name}.json" for name in FIGURES}
    pages = {name: read_published(path) for name, path in paths.items() if path.exists()}
    scales = " and ".join(f"`{scale}`" for scale in sorted({page["scale"] for page in pages.values()}))
    lines = [
        INDEX_HEADING,
        "",
        f"What has been run at scale {scales}. A claim that does not hold stays here as it is. Claims have parts, and all",
        'must hold: "in part, 5 of 6" means that five do. Runs have weight decay and clipped gradients unless the table says',
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
    lines += ["", "The paper's findings, and whether they hold here:", ""]
    for number, text in FINDINGS.items():
        claims = [f"[{name}]({name}.md) {_holds(page)}" for name, page in pages.items() if number == figure(name).finding]
        lines.append(f"- Finding {number}: {text}. {', '.join(claims) or 'Not run yet'}.")
    lines += ["", "## Part by part", "", "The numbers of each part are on its page."]
    for name, page in pages.items():
        lines += ["", f"[{name}]({name}.md): {figure(name).title}", ""]
        lines += [f"- {_ANSWERS[part['holds']]}: {Claim(part['holds'], part['text']).statement}" for part in page["claims"]]
    return "\n".join(lines) + "\n"


def claims_table(folder: Path, address: str) -> str:
    """What is claimed and whether it holds, from the pages in a folder: first what holds, then what holds in part, what does
    not, and what these runs cannot tell. ``address`` is the address of a page, with {} for the page's name. A claim that does
    not hold is never left out."""
    rows: dict[str, list[str]] = {answer: [] for answer in ("yes", "in part", "no", "cannot tell")}
    for name in FIGURES:
        if (folder / f"{name}.json").exists():
            fig, page = figure(name), read_published(folder / f"{name}.json")
            if fig.claimed or not page["holds"]:
                answer, count = _answer_of(page)
                mark = " °" if _without(page) else ""
                rows[answer].append(f"| {answer}{count}{mark} | [{fig.claimed or fig.title}]({address.format(name)}) |")
    return "\n".join(["| holds here? | claim |", "|---|---|", *(row for own in rows.values() for row in own)])


def _answer_of(published: dict[str, Any]) -> tuple[str, str]:
    """yes, in part, no or cannot tell; and how many parts hold, if some do."""
    parts = [part["holds"] for part in published["claims"]]
    if published["holds"] is not False:
        return ("yes" if published["holds"] else "cannot tell"), ""
    return ("in part", f", {parts.count(True)} of {len(parts)}") if True in parts else ("no", "")


def _verdict(published: dict[str, Any]) -> str:
    _, count = _answer_of(published)
    return f"Holds in part{count}," if count else _VERDICTS[published["holds"]]


def _holds(published: dict[str, Any]) -> str:
    """The verdict as in the table of claims."""
    answer, count = _answer_of(published)
    return (answer if answer in ("yes", "cannot tell") else f"**{answer}**") + count + _without(published)


def page_of(published: dict[str, Any], pictures: Sequence[str], by_hand: str) -> str:
    name, fig = published["figure"], figure(published["figure"])
    finding = f" This belongs to the paper's Finding {fig.finding}: {FINDINGS[fig.finding]}." if fig.finding else ""
    lines = [
        f"# {_heading(name)}: {fig.title}",
        "",
        f"**{_verdict(published)} at scale {published['scale']}{_without(published)}.**",
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


def _what_was_run(published: dict[str, Any]) -> list[str]:
    configs = [row.config for row in results(published)]
    first = configs[0]
    diverged = sum(row["status"] == "diverged" for row in published["rows"])
    ended_early = f", {diverged} of which diverged" if diverged else ""
    seeds = sorted({str(config.seed) for config in configs})
    batches = " and ".join(sorted({f"{config.batch_size} x {config.seq_len}" for config in configs}))
    return [
        f"{len(configs)} runs{ended_early}{_missing(published)}. Every run, with its configuration and hash, is in "
        f"[{published['figure']}.json]({published['figure']}.json).",
        "",
        f"- **Models**: GPTs of {_distinct(configs, 'model.depth')} layers, width {_distinct(configs, 'model.width')} (base "
        f"{first.base_width}), heads of {first.model.head_dim}, vocabulary {first.model.vocab_size}, density "
        f"{_densities(configs)}.",
        f"- **Training**: {_distinct(configs, 'steps')} steps of {batches} tokens of `{first.data}`, in {first.dtype}, with "
        f"seed{'s' * (len(seeds) > 1)} {_listed(seeds)}.",
        f"- **Optimizer**: {_optimizer(configs)}.",
        f"- **Machine**: {'; '.join(published['devices'])}. Training took {published['minutes']:.1f} minutes, without "
        f"compilation. Runs that several figures share are counted in each. {_made_by(published['commits'])}",
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
    values = sorted({run_fields(config)[name] for config in configs})
    return _listed([f"{value:.4g}" if isinstance(value, float) else str(value) for value in values])


def _densities(configs: Sequence[RunConfig]) -> str:
    values = sorted({1 - (config.sparsity or 0.0) for config in configs}, reverse=True)
    return _listed([f"1/{1 / value:g}" if value < 1 and (1 / value).is_integer() else f"{value:.4g}" for value in values])


def _listed(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
