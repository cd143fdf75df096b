"""``smupar reproduce``: figures and tables of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from smupar.cli.answers import Reply, TextLine, table
from smupar.cli.flags import Arg
from smupar.cli.loading import loading
from smupar.cli.studies import Engine, note_missing_pictures
from smupar.output.page.document import Tone
from smupar.output.pictures import missing_pictures
from smupar.output.terminal import say
from smupar.refusals import refuse
from smupar.study.config import EngineConfig

if TYPE_CHECKING:
    from smupar.paper.reproduce import Reproduced
    from smupar.paper.settings import Scale

_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "unclear"}


def reproduce(
    figures: Annotated[tuple[str, ...], Arg("FIGURE", positional=True)] = (),
    *,
    how: Engine,
    scale: Literal["cpu", "small", "paper"] = "cpu",
    data: str | None = None,
    data_dir: str | None = None,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    out: str = "runs/reproduce",
    publish: str | None = None,
    so_far: bool = False,
    list: bool = False,  # noqa: A002 (the flag)
    settings: bool = False,
    dry_run: bool = False,
) -> Reply:
    """Reproduce figures and tables of the paper: draw the picture, write the rows, and decide whether the paper's claim holds
    here (if not, the exit code is 1).

    Args:
        figures: fig06, tab01, ...; or all (tab02 is included only with --data-dir). Without a name, they are listed.
        scale: cpu: minutes on two cores; small: minutes on one GPU; paper: as printed.
        data: Folder made by `smupar data prepare`. Default at scale cpu: the source of Python's standard library.
        data_dir: For tab02: folder with local copies of the tasks as JSONL. Default: the harness downloads its own.
        weight_decay: Weight decay of all runs. Published pages marked "without weight decay" used 0.
        clip: Largest allowed gradient norm in all runs. 0 turns clipping off.
        out: Folder for results, and for the runs, which figures share. If you run the command again, it runs only what is
             missing.
        publish: Also write a page of results, its rows and its picture to this folder, as in docs/results. Runs with rows in
                 this folder are not trained again, unless the figure needs their weights.
        so_far: Train nothing: draw and judge the runs that have ended.
        list: List the figures and tables.
        settings: Print Table 4, and the settings of the smaller scales.
        dry_run: Print the cost (runs, parameters, tokens, FLOPs, time and memory), and run nothing.
    """
    with loading():
        from smupar.paper import catalogue
        from smupar.paper.cost import cost_of
        from smupar.paper.reproduce import make_scale, reproduce
        from smupar.paper.settings import table_4

    if settings or list or not figures:
        text = table_4() if settings else catalogue.listed()
        return Reply(table(text), {"lines": text.splitlines()} if settings else {"figures": catalogue.list_values()})
    offline = tuple(name for name in catalogue.FIGURES if name != "tab02" or data_dir is not None)
    names = offline if figures == ("all",) else figures
    reads = not dry_run and any(catalogue.figure(name).runs for name in names)
    wanted = make_scale(scale, data, reads=reads, weight_decay=weight_decay, clip=clip or None)
    engine = EngineConfig(**how)
    if dry_run:
        costs = [cost_of(name, wanted, engine, out=out) for name in names]
        return Reply(table("\n".join(map(str, costs))), {"figures": [cost.values for cost in costs]})
    if publish is not None:
        from smupar.paper.publish import refuse_other_scale

        refuse_other_scale(publish, names, wanted)
        refuse(bool(missing_pictures()), f"--publish shows the picture: {missing_pictures()}")
    note_missing_pictures()
    carry_out = partial(reproduce, scale=wanted, how=engine, out=out, data_dir=data_dir, published=publish, so_far=so_far)
    return _carried_out(names, carry_out, wanted, publish)


def _carried_out(names: Sequence[str], carry_out: Callable[[str], Reproduced], wanted: Scale, publish: str | None) -> Reply:
    ended = []
    for name in names:
        ended.append(carry_out(name))
        if len(names) > 1:
            say(f"{ended[-1].verdict} {name}: {ended[-1].title}")
        _publish(ended[-1], wanted, publish)
    holds = all(done.claim.holds for done in ended)
    return Reply(
        [line for done in ended for line in _reproduced(done)], {"figures": [done.values for done in ended]}, int(not holds)
    )


def _publish(done: Reproduced, scale: Scale, folder: str | None) -> None:
    if folder is not None:
        from smupar.paper.publish import publish

        say(str(publish(done, scale, folder)))


def _reproduced(done: Reproduced) -> list[TextLine]:
    from smupar.paper.reproduce import verdict_of

    parts = done.claim.parts or (done.claim,)
    missing = f" ({done.missing} runs are missing)" if done.missing else ""
    lines = [TextLine(f"{done.name}: {done.title}{missing}", done.verdict, _TONES[done.claim.holds])]
    several = len(parts) > 1
    for part in parts:
        lines.append(TextLine(part.statement, verdict_of(part) if several else "", _TONES[part.holds], indent="  "))
        if part.numbers:
            lines.append(TextLine(part.numbers, indent="    "))
    return [*lines, TextLine(str(done.folder))]
