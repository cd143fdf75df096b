"""The commands of studies: sweep, tune, transfer, reproduce; and those that look at what is on disk: watch, report, verify."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from smupar.cli.answers import Answer, Line, cards, table
from smupar.cli.commands import Folder, Run, request_of
from smupar.cli.flags import Arg, Typed
from smupar.cli.resolve import resolve
from smupar.lm.config.run import RunConfig
from smupar.output.pictures import missing_pictures
from smupar.output.progress import loading
from smupar.output.terminal import say
from smupar.plan.settings import refuse
from smupar.study.config import EngineConfig, TransferConfig, TuneConfig

if TYPE_CHECKING:
    from smupar.paper.reproduce import Reproduced
    from smupar.study.definition import StudyDefinition
    from smupar.study.report import Reported
    from smupar.study.store import Study

Engine = Annotated[Typed, EngineConfig]
_TONES: dict[bool | None, Any] = {True: "good", False: "bad", None: "unclear"}


def sweep(
    axes: Annotated[tuple[str, ...], Arg("FIELD=VALUE,...", positional=True)] = (),
    *,
    config: Run,
    how: Engine,
    out: str = "runs/sweep",
    dry_run: bool = False,
) -> Answer:
    """Run every combination of the given values, and write a page with curves and a table.

    An axis is a field of a run and its values: smupar sweep lr=2^-10..2^-4 rule=sp,smupar sparsity=0,0.75

    Args:
        axes: Any fields of a run, with values that are separated by commas, or a range of powers such as 2^-10..2^-4.
        out: Folder of the study. If you run the command again, it runs only what is missing.
        dry_run: Say how many runs there are, how long they take and how much memory they need, and run nothing.
    """
    from smupar.study.space import parse_axes

    refuse(not axes, "sweep needs an axis: name a field and its values, for example smupar sweep lr=2^-10..2^-4")
    run, asked = resolve(RunConfig, request_of(config)), parse_axes(axes)

    def define() -> StudyDefinition:
        from smupar.study.sweep import define_sweep

        return define_sweep(run, asked)

    return _study(out, define, how, dry_run)


def transfer(
    config: Annotated[Typed, TransferConfig],
    how: Engine,
    out: str = "runs/transfer",
    hps: str | None = None,
    dry_run: bool = False,
) -> Answer:
    """Sweep one hyperparameter on the dense proxy and on wide sparse targets, and say how far the optimum of each rule moved.

    Args:
        out: Folder for picture.png, report.html and table.csv. If you run the command again, it runs only what is missing.
        hps: best.json of `smupar tune`, for the hyperparameters that are not swept.
        dry_run: Say how many runs there are, how long they take and how much memory they need, and run nothing.
    """
    resolved = resolve(TransferConfig, request_of(config, hps=hps))

    def define() -> StudyDefinition:
        from smupar.study.transfer import define_transfer

        return define_transfer(resolved)

    return _study(out, define, how, dry_run)


def tune(config: Annotated[Typed, TuneConfig], how: Engine, out: str = "runs/tune", dry_run: bool = False) -> Answer:
    """Search lr, init_std, alpha_input and alpha_output on the dense proxy of base width, as in the paper's Table 3.

    Writes best.json for --hps of train and transfer. If you run the command again, it runs only what is missing.

    Args:
        out: Folder of the study.
        dry_run: Say how many runs there are, how long they take and how much memory they need, and run nothing.
    """
    resolved = resolve(TuneConfig, request_of(config))

    def define() -> StudyDefinition:
        from smupar.study.tune import define_search

        return define_search(resolved)

    def best(study: Study) -> tuple[list[Line], dict[str, Any]]:
        from smupar.study.tune import write_best

        tuned = write_best(resolved, study)
        values = {"hps": tuned.hps, "base_width": tuned.best.config.base_width, "sensitivity": tuned.sensitivities}
        return table(tuned.explain()), {**values, "best_json": tuned.path}

    return _study(out, define, how, dry_run, best)


def _study(
    out: str,
    define: Callable[[], StudyDefinition],
    how: Typed,
    dry_run: bool,
    after: Callable[[Study], tuple[list[Line], dict[str, Any]]] | None = None,
) -> Answer:
    """Runs the missing runs of a study and writes its report, or says what they would cost. The folder stays locked until
    ``after`` and the report are done."""
    engine = EngineConfig(**how)
    with loading():
        from smupar.study.engines import run_study
        from smupar.study.forecast import forecast
        from smupar.study.report import write_report

        definition = define()
    if dry_run:
        expected = forecast(out, definition, engine)
        return Answer(table(str(expected)), expected.values)
    if missing := missing_pictures():
        warnings.warn(f"{missing}; the study goes on without", UserWarning, stacklevel=2)
    command = shlex.join(["smupar", *sys.argv[1:]])  # the report's page shows the command
    with run_study(out, definition, command, engine) as (study, _):
        lines, values = after(study) if after else ([], {})
        reported = write_report(study, definition)
    return Answer(_lines(reported, lines), {**reported.values, **values})


def _lines(reported: Reported, own: list[Line] | None = None) -> list[Line]:
    """What a study found: the answer, why, and what to doubt; then where it is."""
    findings = reported.findings
    told = own or (cards(findings.answers) if findings.answers else [])
    why = findings.doubts if told else (findings.sentence,)
    notes = [Line(note) for note in (*why, *reported.notes) if note]
    return [Line("", findings.headline), *told, *notes, Line(reported.where)]


def report(folder: Folder, parquet: bool = False) -> Answer:
    """Write the page, picture and table of a study again, from its finished runs.

    Args:
        folder: Folder of the study.
        parquet: Write table.parquet beside table.csv and table.json.
    """
    with loading("reading the study"):
        from smupar.study.report import write_report
        from smupar.study.store import Study

        study = Study(folder)
        reported = write_report(study)
        if parquet:
            study.write_parquet()
            reported = reported.with_file("table.parquet")
    if missing := missing_pictures():
        warnings.warn(missing, UserWarning, stacklevel=2)
    return Answer(_lines(reported), reported.values)


def watch(
    folders: Annotated[tuple[str, ...], Arg(positional=True)],
    host: str = "127.0.0.1",
    port: Annotated[int | None, Arg(default="the first free one from 8765 on")] = None,
) -> None:
    """Show studies, runs, checks, reproductions and traces on a local web page that fills in while they run.

    Start it beside a running study, in another terminal: smupar watch runs/transfer. It shows the loss over the learning rate,
    the optima and how far they moved, loss curves, what is running and the time left. A folder of folders (smupar watch runs)
    shows everything below. It only reads, and it leaves nothing behind. On another machine: ssh -L 8765:localhost:8765 MACHINE.

    Args:
        folders: Folders of studies, runs, checks or reproductions, or folders that hold some.
        host: Address to listen on. By default only this machine can see the page; 0.0.0.0 shows it to everyone in the network.
        port: Port to listen on; 0: any that is free.
    """
    from smupar.watch.server import watch as serve

    serve(folders, host=host, port=port, say=lambda line: print(line, flush=True))


def verify(folder: Folder) -> Answer:
    """Compare a run, study, checkpoint, export, trace or prepared text with its checksums, by reading all of it.

    Prints a line for each part that is damaged or missing, and exits with 1 if there is one. Nothing is changed. A run whose
    last checkpoint is damaged goes on from the one before; --from-step chooses an earlier one.

    Args:
        folder: Folder that smupar wrote; or the file of a trace.
    """
    from pathlib import Path

    with loading():
        from smupar.study.verify import verify as compare

    found = compare(Path(folder))
    is_intact = not found.wrong
    values = {
        "folder": folder,
        "intact": is_intact,
        "wrong": found.wrong,
        "counts": found.counts,
        "bytes_read": found.num_bytes,
        "without_checksums": found.unchecked,
    }
    verdict = Line(str(found), f"{folder}:", "good" if is_intact else "bad")
    return Answer([verdict, *map(Line, found.wrong)], values, code=int(not is_intact))


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
    list: bool = False,  # noqa: A002 (the flag)
    settings: bool = False,
    dry_run: bool = False,
) -> Answer:
    """Reproduce figures and tables of the paper: draw the picture, write the rows, and decide whether the paper's claim holds
    here (exit code 1 if not).

    Args:
        figures: fig06, tab01, ...; or all (tab02 is included only with --data-dir). Without one, they are listed.
        scale: cpu: minutes on two cores; small: minutes on one GPU; paper: as printed.
        data: Folder made by `smupar data prepare`. Default at scale cpu: the source of Python's standard library.
        data_dir: For tab02: folder with local copies of the tasks as JSONL. Default: the harness downloads its own.
        weight_decay: Weight decay of all runs. Published pages marked "without weight decay" used 0.
        clip: Largest allowed gradient norm in all runs. 0 turns clipping off.
        out: Folder for results, and for runs, which figures share. If you run the command again, it runs only what is missing.
        publish: Also write a page of results, its rows and its picture to this folder, as in docs/results.
        list: List the figures and tables.
        settings: Print Table 4, and the settings of the smaller scales.
        dry_run: Say what it would cost: runs, parameters, tokens, FLOPs, time and memory; and run nothing.
    """
    with loading():
        from smupar.paper import reproduce as paper
        from smupar.paper.settings import table_4

    if settings or list or not figures:
        said = table_4() if settings else paper.listed()
        return Answer(table(said), {"lines": said.splitlines()} if settings else {"figures": paper.list_values()})
    offline = tuple(name for name in paper.FIGURES if name != "tab02" or data_dir is not None)
    names = offline if figures == ("all",) else figures
    reads = not dry_run and any(paper.figure(name).runs for name in names)
    wanted, engine = (
        paper.make_scale(scale, data, reads=reads, weight_decay=weight_decay, clip=clip or None),
        EngineConfig(**how),
    )
    if dry_run:
        costs = [paper.dry_run(name, wanted, engine, out=out) for name in names]
        return Answer(table("\n".join(map(str, costs))), {"figures": [cost.values for cost in costs]})
    if publish is not None:
        from smupar.paper import publish as pages

        pages.refuse_other_scale(publish, names, wanted)
        refuse(bool(missing_pictures()), f"--publish shows the picture: {missing_pictures()}")
    if missing := missing_pictures():
        warnings.warn(f"{missing}; the figures go on without", UserWarning, stacklevel=2)
    ended = []
    for name in names:
        done = paper.reproduce(name, wanted, engine, out=out, data_dir=data_dir)
        page = pages.publish(done, wanted, publish) if publish is not None else None
        ended.append((done, page))
        if len(names) > 1:
            say(f"{done.verdict} {name}: {done.claim.text}")
    lines = [line for done, page in ended for line in _reproduced(done, page)]
    values = [{**done.values, "page": page} for done, page in ended]
    return Answer(lines, {"figures": values}, code=0 if all(done.claim.holds for done, _ in ended) else 1)


def _reproduced(done: Reproduced, page: Any) -> list[Line]:
    from smupar.paper.reproduce import verdict_of

    parts = done.claim.parts or (done.claim,)
    lines = [Line(f"{done.name}: {done.title}", done.verdict, _TONES[done.claim.holds])]
    several = len(parts) > 1
    lines += [Line(part.text, verdict_of(part) if several else "", _TONES[part.holds], indent="  ") for part in parts]
    return [*lines, Line(str(done.folder)), *([Line(str(page))] if page else [])]
