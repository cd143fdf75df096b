"""The commands, as plain functions. The commands of ``smupar data`` and ``smupar eval`` are in data.py and evaluation.py. Each
command imports what it needs when it runs, so that ``smupar --help`` is fast."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from smupar import rules as table_1
from smupar.cli.flags import Typed
from smupar.cli.resolve import Request, resolve, resolve_training
from smupar.lm.config.commands import CheckConfig, ExportConfig, GenerateConfig
from smupar.lm.config.run import STANDARD_LIBRARY, Execution, MachineConfig, RunConfig
from smupar.lm.run.signals import TERMINATED
from smupar.output.tables import aligned
from smupar.plan.settings import refuse
from smupar.study.config import EngineConfig, TransferConfig, TuneConfig

if TYPE_CHECKING:
    from smupar.lm.run.folder import Summary
    from smupar.study.definition import StudyDefinition
    from smupar.study.store import Study

Preset = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[PRESET]")]]
Run = Annotated[Typed, RunConfig]
Engine = Annotated[Typed, EngineConfig]
EXIT_CODES = {"finished": 0, "diverged": 3, "interrupted": 130, "terminated": TERMINATED}


def rules(markdown: bool = False) -> None:
    """Print Table 1: the init, learning rate and forward factor of every role under every rule.

    Args:
        markdown: Print Table 1 as the page docs/rules.md.
    """
    text = f"{aligned(table_1.table())}\n\n{aligned(table_1.depth_table())}\n"
    print(table_1.markdown() if markdown else text, end="")


def generate(config: Annotated[Typed, GenerateConfig]) -> None:
    """Sample text from a trained model, and print it as it is generated."""
    from smupar.lm.use.generate import generate as sample

    for text in sample(GenerateConfig(**config)):
        print(text, end="", flush=True)
    print()


def export(config: Annotated[Typed, ExportConfig]) -> None:
    """Write a model to a folder to share, as safetensors with all factors folded in. For a run, also write a model card.

    From a folder that save_pretrained wrote for a Hugging Face model, make a folder that a plain from_pretrained reads.
    """
    from smupar.lm.use import export as runs

    chosen = ExportConfig(**config)
    if runs.is_of_transformers(chosen):
        from smupar.integrations import huggingface

        print(huggingface.export(chosen.folder, chosen.out, dtype=chosen.dtype))
    else:
        print(runs.export(chosen))


def report(folder: tyro.conf.Positional[str], parquet: bool = False) -> None:
    """Write the page, picture and table of a study again, from its finished runs.

    Args:
        folder: Folder of the study.
        parquet: Write table.parquet beside table.csv and table.json.
    """
    from smupar.study.report import write_report
    from smupar.study.store import Study

    study = Study(folder)
    written = write_report(study)
    if parquet:
        study.write_parquet()
    print(f"{written}{', table.parquet' if parquet else ''}")


def watch(
    folders: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="(required)")
    ],
    host: Annotated[str, tyro.conf.arg(metavar="HOST")] = "127.0.0.1",
    port: Annotated[
        int | None, tyro.conf.arg(metavar="PORT", help_behavior_hint="(default: the first free one from 8765 on)")
    ] = None,
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

    refuse(not folders, "no folder: name that of a study, for example smupar watch runs/transfer")
    serve(folders, host=host, port=port, say=lambda line: print(line, flush=True))


def verify(folder: tyro.conf.Positional[str]) -> None:
    """Compare a run, study, checkpoint, export, trace or prepared text with its checksums, by reading all of it.

    Prints a line for each part that is damaged or missing, and exits with 1 if there is one. Nothing is changed. A run whose
    last checkpoint is damaged goes on from the one before; --from-step chooses an earlier one.

    Args:
        folder: Folder that smupar wrote; or the file of a trace.
    """
    from pathlib import Path

    from smupar.study.verify import verify as compare

    found = compare(Path(folder))
    print("\n".join([*found.wrong, f"{folder}: {found}"]))
    if found.wrong:
        sys.exit(1)


def check(config: Annotated[Typed, CheckConfig]) -> None:
    """Measure whether activations, gradients and updates of the GPT keep their size over width and sparsity.

    Prints a verdict with a diagnosis, and writes a picture, a page and JSON. Exits with 1 if the check does not pass.
    """
    from smupar.lm.use.check import check_gpt

    report = check_gpt(CheckConfig(**config))
    print(report.explain())
    if not report.ok:
        sys.exit(1)


def bench(
    what: tyro.conf.Positional[Literal["parameterize", "train", "updates", "sweep", "data", "sparse", "generate"]],
    repeats: int = 3,
    out: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> None:
    """Measure time and memory of two or more variants, side by side in one run.

    Args:
        what: parameterize: parameterize, compared with a plain normal_ of the same tensors. train: the 610M model on a GPU with
            masks, compared with the same model without smupar, for causal attention and for ALiBi. updates: the 610M model on
            a GPU, with and without following a trace. sweep: many small models, one by one and stacked. data: how fast
            batches are read from shards. sparse: layers that keep only their non-zeros, compared with dense layers. generate:
            tokens per second, dense, without zeros, and by transformers.
        repeats: Number of runs of each variant.
        out: For sparse and generate: a folder for the numbers as JSON, and for the picture of sparse. If you run generate
            again, it measures only what is missing.
        device: For sparse and generate: cpu or cuda. Default: a GPU if there is one.
    """
    from smupar.bench.models import BENCHES

    refuse(not 1 <= repeats <= 10_000, f"--repeats must lie between 1 and 10,000, got {repeats}")
    chooses = what in ("sparse", "generate")
    refuse(out is not None and not chooses, f"--out is for bench sparse and generate, {what} writes no files: leave it out")
    refuse(
        device is not None and not chooses, f"--device is for bench sparse and generate, {what} runs where it can: leave it out"
    )
    print(BENCHES[what](repeats=repeats, **{k: v for k, v in {"out": out, "device": device}.items() if v is not None}))


def plan(preset: Preset = "demo", /, *, config: Run, hps: str | None = None, json: bool = False) -> None:
    """Print the plan of a GPT without building it: every number of every parameter. Takes seconds at any size.

    Args:
        preset: The configuration that flags change: demo, 610m, paper-610m or paper-iso.
        hps: best.json of `smupar tune`, for init and alphas. It holds for any width and density.
        json: Print the plan as JSON, for smupar.Plan.from_json.
    """
    from smupar.lm.model.gpt import plan_on_meta

    planned = plan_on_meta(resolve(RunConfig, request_of(config, preset, hps)))
    print(planned.to_json() if json else planned)


def train(
    preset: Preset = "demo",
    /,
    *,
    config: Run,
    how: Annotated[Typed, Execution],
    machine: Annotated[Typed, MachineConfig],
    hps: str | None = None,
    dry_run: bool = False,
) -> None:
    """Train a sparse GPT. Without flags it trains on the source of Python's standard library, for a minute on two cores.

    If a run is interrupted or killed, the same command resumes from the last checkpoint. On several devices, run torchrun
    --nproc-per-node 8 -m smupar train ...

    Args:
        preset: The configuration that flags change: demo, 610m, paper-610m or paper-iso.
        hps: best.json of `smupar tune`, for learning rate, init and alphas. It holds for any width and density.
        dry_run: Print parameters, FLOPs, memory and hours, and train nothing.
    """
    run = resolve_training(request_of(config, preset, hps), dry_run=dry_run, machine=machine)
    if hps is not None and "lr" not in config:
        from smupar.study.tune import doubts

        for doubt in doubts(hps, optimizer=run.optimizer, rule=run.rule):
            warnings.warn(doubt, UserWarning, stacklevel=2)
    if dry_run:
        from smupar.lm.model.cost import report

        print(report(run, Execution(**how), **asdict(MachineConfig(**machine))))
        return
    from smupar.lm.run.train import train as carry_out

    summary = carry_out(run, Execution(**how))
    if int(os.environ.get("RANK", 0)) == 0:
        print(_ending(summary, run))
    sys.exit(EXIT_CODES[summary.status])


def sweep(
    axes: tyro.conf.Positional[tuple[str, ...]],
    config: Run,
    how: Engine,
    out: str = "runs/sweep",
) -> None:
    """Run every combination of the given values, and write a page with curves and a table.

    Args:
        axes: FIELD=VALUE,VALUE,... for any fields of a run: lr=2^-10..2^-4 rule=sp,smupar sparsity=0,0.75
        out: Folder of the study. If you run the command again, it runs only what is missing.
    """
    from smupar.study.space import parse_axes
    from smupar.study.sweep import define_sweep

    _run_and_report(out, define_sweep(resolve(RunConfig, request_of(config)), parse_axes(axes)), how)


def transfer(
    config: Annotated[Typed, TransferConfig],
    how: Engine,
    out: str = "runs/transfer",
    hps: str | None = None,
) -> None:
    """Sweep one hyperparameter on the dense proxy and on wide sparse targets, and say how far the optimum of each rule moved.

    Args:
        out: Folder for picture.png, report.html and table.csv. If you run the command again, it runs only what is missing.
        hps: best.json of `smupar tune`, for the hyperparameters that are not swept.
    """
    from smupar.study.transfer import define_transfer

    _run_and_report(out, define_transfer(resolve(TransferConfig, request_of(config, hps=hps))), how)


def _run_and_report(
    out: str, definition: StudyDefinition, how: Typed, after: Callable[[Study], None] = lambda study: None
) -> None:
    """Runs the missing runs of a study, calls ``after`` and writes the report. The folder stays locked meanwhile."""
    from smupar.study.engines import run_study
    from smupar.study.report import write_report

    command = shlex.join(["smupar", *sys.argv[1:]])  # the report's page shows the command
    with run_study(out, definition, command, EngineConfig(**how)) as (study, _):
        after(study)
        print(write_report(study, definition))


def reproduce(
    figures: tyro.conf.Positional[tuple[str, ...]] = (),
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
) -> None:
    """Reproduce figures and tables of the paper: draw the picture, write the rows, and decide whether the paper's claim holds
    here (exit code 1 if not).

    Args:
        figures: fig06, tab01, ...; or all (tab02 is included only with --data-dir).
        scale: cpu: minutes on two cores; small: minutes on one GPU; paper: as printed.
        data: Folder made by `smupar data prepare`. Default at scale cpu: the source of Python's standard library.
        data_dir: For tab02: folder with local copies of the tasks as JSONL. Default: the harness downloads its own.
        weight_decay: Weight decay of all runs. Published pages marked "without weight decay" used 0.
        clip: Largest allowed gradient norm in all runs. 0 turns clipping off.
        out: Folder for results, and for runs, which figures share. If you run the command again, it runs only what is missing.
        publish: Also write a page of results, its rows and its picture to this folder, as in docs/results. Runs that the folder
            has rows of are not trained again.
        so_far: Train nothing: draw and judge the runs that have ended.
        list: List the figures and tables.
        settings: Print Table 4, and the settings of the smaller scales.
        dry_run: Print runs, parameters, tokens, FLOPs, hours and memory, and run nothing.
    """
    from smupar.paper import reproduce as paper
    from smupar.paper.settings import table_4

    if settings or list or not figures:
        print(table_4() if settings else paper.listed())
        return
    offline = tuple(name for name in paper.FIGURES if name != "tab02" or data_dir is not None)
    names = offline if figures == ("all",) else figures
    reads = not dry_run and any(paper.figure(name).runs for name in names)
    wanted = paper.make_scale(scale, data, reads=reads, weight_decay=weight_decay, clip=clip or None)
    if dry_run:
        print("\n".join(paper.dry_run(name, wanted) for name in names))
        return
    if publish is not None:
        from smupar.paper import publish as pages

        pages.refuse_other_scale(publish, names, wanted)
    ended = []
    for name in names:
        ended.append(
            paper.reproduce(name, wanted, EngineConfig(**how), out=out, data_dir=data_dir, published=publish, so_far=so_far)
        )
        print(ended[-1], flush=True)
        if publish is not None:
            print(pages.publish(ended[-1], wanted, publish))
    sys.exit(0 if all(done.claim.holds for done in ended) else 1)


def tune(config: Annotated[Typed, TuneConfig], how: Engine, out: str = "runs/tune") -> None:
    """Search lr, init_std, alpha_input and alpha_output on the dense proxy of base width, as in the paper's Table 3.

    Writes best.json for --hps of train and transfer. If you run the command again, it runs only what is missing.

    Args:
        out: Folder of the study.
    """
    from smupar.study.tune import define_search, write_best

    resolved = resolve(TuneConfig, request_of(config))
    _run_and_report(out, define_search(resolved), how, lambda study: print(write_best(resolved, study).explain()))


def _ending(summary: Summary, config: RunConfig) -> str:
    if summary.status in ("interrupted", "terminated"):
        return f"{summary.status} and saved at step {summary.steps} of {config.steps}: run the same command to resume"
    if summary.status == "diverged":
        return (
            f"diverged: the loss became NaN or infinite at step {summary.steps}, base LR {config.lr:g}: lower --lr, "
            f"or set --clip; the run is recorded in {summary.folder}"
        )
    return (
        f"train loss {summary.train_loss:.3f}, validation loss {summary.valid_loss:.3f} nats per token at "
        f"{summary.sparsity:.1%} sparsity, rule {config.rule}, base LR {config.lr:g}; {summary.seconds:.0f} s; "
        f"sample from it: smupar generate {shlex.quote(summary.folder)}"
    )


def request_of(typed: Typed, preset: str = "demo", hps: str | None = None) -> Request:
    tuned, vocab_size = None, 0
    if hps is not None:
        from smupar.study.tune import read_hps

        tuned = read_hps(hps)
    if (text := typed.get("data", STANDARD_LIBRARY)) != STANDARD_LIBRARY:
        from smupar.lm.data.shards import read_index

        vocab_size = read_index(text).tokenizer.vocab_size
    return Request(typed, preset, vocab_size, tuned, hps)
