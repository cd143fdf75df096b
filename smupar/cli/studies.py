"""The commands of studies (sweep, tune, transfer), and those that read folders (watch, report, verify)."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from smupar.cli.answers import Reply, TextLine, cards, table
from smupar.cli.commands import Folder, Run, request_of
from smupar.cli.flags import Arg, Typed
from smupar.cli.loading import loading
from smupar.cli.resolve import resolve
from smupar.lm.config.run_config import RunConfig
from smupar.output.pictures import missing_pictures
from smupar.refusals import refuse
from smupar.study.config import EngineConfig, TransferConfig, TuneConfig

if TYPE_CHECKING:
    from smupar.study.definition import StudyDefinition
    from smupar.study.report import Reported
    from smupar.study.store import Study

Engine = Annotated[Typed, EngineConfig]


def sweep(
    axes: Annotated[tuple[str, ...], Arg("FIELD=VALUE,...", positional=True)] = (),
    *,
    config: Run,
    how: Engine,
    out: str = "runs/sweep",
    dry_run: bool = False,
) -> Reply:
    """Run every combination of the given values, and write a page with curves and a table.

    An axis is a field of a run and its values: smupar sweep lr=2^-10..2^-4 rule=sp,smupar sparsity=0,0.75

    Args:
        axes: Any fields of a run, with values separated by commas, or a range of powers such as 2^-10..2^-4.
        out: Folder of the study. If you run the command again, it runs only what is missing.
        dry_run: Print the number of runs, their time and their memory, and run nothing.
    """
    from smupar.study.axes import parse_axes

    refuse(not axes, "sweep needs an axis: name a field and its values, for example smupar sweep lr=2^-10..2^-4")
    run, asked = resolve(RunConfig, request_of(config)), parse_axes(axes)

    def define() -> StudyDefinition:
        from smupar.study.kinds.sweep import define_sweep

        return define_sweep(run, asked)

    return _study(out, define, how, dry_run)


def transfer(
    config: Annotated[Typed, TransferConfig],
    how: Engine,
    out: str = "runs/transfer",
    hps: str | None = None,
    dry_run: bool = False,
) -> Reply:
    """Sweep one hyperparameter on the dense proxy and on wide sparse targets, and say how far the optimum of each rule moved.

    Args:
        out: Folder for picture.png, report.html and table.csv. If you run the command again, it runs only what is missing.
        hps: best.json of `smupar tune`, for the hyperparameters that are not swept.
        dry_run: Print the number of runs, their time and their memory, and run nothing.
    """
    resolved = resolve(TransferConfig, request_of(config, hps=hps))

    def define() -> StudyDefinition:
        from smupar.study.kinds.transfer import define_transfer

        return define_transfer(resolved)

    return _study(out, define, how, dry_run)


def tune(config: Annotated[Typed, TuneConfig], how: Engine, out: str = "runs/tune", dry_run: bool = False) -> Reply:
    """Search lr, init_std, alpha_input and alpha_output on the dense proxy of base width, as in the paper's Table 3.

    Writes best.json for --hps of train and transfer. If you run the command again, it runs only what is missing.

    Args:
        out: Folder of the study.
        dry_run: Print the number of runs, their time and their memory, and run nothing.
    """
    resolved = resolve(TuneConfig, request_of(config))

    def define() -> StudyDefinition:
        from smupar.study.kinds.tune import define_search

        return define_search(resolved)

    def best(study: Study) -> tuple[list[TextLine], dict[str, Any]]:
        from smupar.study.kinds.tune import write_best

        tuned = write_best(resolved, study)
        values = {"hps": tuned.hps, "base_width": tuned.best.config.base_width, "sensitivity": tuned.sensitivities}
        return table(tuned.explain()), {**values, "best_json": tuned.path}

    return _study(out, define, how, dry_run, best)


def _study(
    out: str,
    define: Callable[[], StudyDefinition],
    how: Typed,
    dry_run: bool,
    after: Callable[[Study], tuple[list[TextLine], dict[str, Any]]] | None = None,
) -> Reply:
    """Executes the missing runs of a study and writes its report, or prints their cost. The folder stays locked until ``after``
    and the report are done."""
    engine = EngineConfig(**how)
    with loading():
        from smupar.study.forecast import forecast
        from smupar.study.report import write_report
        from smupar.study.stages import run_study

        definition = define()
    if dry_run:
        expected = forecast(out, definition, engine)
        return Reply(table(str(expected)), expected.values)
    note_missing_pictures()
    command = shlex.join(["smupar", *sys.argv[1:]])  # the report's page shows the command
    with run_study(out, definition, command, engine) as (study, _):
        lines, values = after(study) if after else ([], {})
        reported = write_report(study, definition)
    return Reply(_lines(reported, lines), {**reported.values, **values})


def _lines(reported: Reported, result: list[TextLine] | None = None) -> list[TextLine]:
    """The answer of a study: finding, reasons and doubts, then the files."""
    findings = reported.findings
    lines = result or (cards(findings.answers) if findings.answers else [])
    why = findings.remarks if lines else (findings.sentence,)
    notes = [TextLine(note) for note in (*why, *reported.notes) if note]
    return [TextLine("", findings.headline), *lines, *notes, TextLine(reported.where)]


def report(folder: Folder, parquet: bool = False) -> Reply:
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
    note_missing_pictures()
    return Reply(_lines(reported), reported.values)


def watch(
    folders: Annotated[tuple[str, ...], Arg(positional=True)],
    host: str = "127.0.0.1",
    port: Annotated[int | None, Arg(default="the first free one from 8765 on")] = None,
) -> None:
    """Show studies, runs, checks, reproductions and traces on a local web page that fills in while they run.

    Start it in another terminal while a study runs: smupar watch runs/transfer. It shows the loss over the learning rate, the
    optima and how far they moved, loss curves, what is running and the time left. If you name a parent folder (smupar watch
    runs), it shows everything below. It only reads, and writes no files. From another machine: ssh -L 8765:localhost:8765
    MACHINE.

    Args:
        folders: Folders of studies, runs, checks or reproductions, or folders that hold some.
        host: Address to listen on. By default only this machine can see the page; 0.0.0.0 shows it to everyone in the network.
        port: Port to listen on; 0: any free port.
    """
    from smupar.watch.server import watch as serve

    serve(folders, host=host, port=port, say=lambda line: print(line, flush=True))


def verify(folder: Folder) -> Reply:
    """Compare a run, study, checkpoint, export, trace or prepared text with its checksums, by reading all of it.

    Prints a line for each part that is damaged or missing, and exits with 1 if there is one. Nothing is changed. If the last
    checkpoint of a run is damaged, the run continues from the one before; --from-step chooses an earlier one.

    Args:
        folder: Folder that smupar wrote, or the file of a trace.
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
    verdict = TextLine(str(found), f"{folder}:", "good" if is_intact else "bad")
    return Reply([verdict, *map(TextLine, found.wrong)], values, code=int(not is_intact))


def note_missing_pictures() -> None:
    if missing := missing_pictures():
        warnings.warn(missing, UserWarning, stacklevel=3)
