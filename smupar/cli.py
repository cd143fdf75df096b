"""The command line. Each command imports what it needs when it runs, so that ``smupar --help`` is there at once.

Exit codes, as in docs/command-line.md: 0 done, 1 a check or a claim that does not hold, 2 bad input or a full disk (one line
says what and the remedy), 3 a run that diverged, 130 interrupted, 141 nobody reads on, 143 ended by SIGTERM; a training run
saves before it ends by a signal.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

import tyro

from smupar import rules as table_1
from smupar.flags import checked, twin, unchecked
from smupar.lm.config import (
    CheckConfig,
    EvalConfig,
    Execution,
    ExportConfig,
    GenerateConfig,
    PrepareConfig,
    RunConfig,
    ScoringConfig,
    TasksConfig,
)
from smupar.starts import dashed, start_of
from smupar.study.config import EngineConfig, TransferConfig, TuneConfig

if TYPE_CHECKING:
    from smupar.lm.folder import Summary

if TYPE_CHECKING:
    Run: TypeAlias = RunConfig
    How: TypeAlias = Execution
    Check: TypeAlias = CheckConfig
    Engine: TypeAlias = EngineConfig
    Transfer: TypeAlias = TransferConfig
    Tune: TypeAlias = TuneConfig
    Sample: TypeAlias = GenerateConfig
    Export: TypeAlias = ExportConfig
    Prepare: TypeAlias = PrepareConfig
    Evaluation: TypeAlias = EvalConfig
    Questions: TypeAlias = TasksConfig
    Scoring: TypeAlias = ScoringConfig
else:
    _FLAGS, _POSITIONAL = tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs
    Run, How, Check, Engine, Transfer, Tune, Questions, Scoring = (
        Annotated[twin(config), _FLAGS]
        for config in (RunConfig, Execution, CheckConfig, EngineConfig, TransferConfig, TuneConfig, TasksConfig, ScoringConfig)
    )
    Sample, Export, Prepare, Evaluation = (
        Annotated[twin(config), _FLAGS, _POSITIONAL] for config in (GenerateConfig, ExportConfig, PrepareConfig, EvalConfig)
    )
Recipe = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RECIPE]")]]
_EXIT_CODES = {"finished": 0, "diverged": 3, "interrupted": 130, "terminated": 143}


def rules(markdown: bool = False) -> None:
    """Print Table 1: init, learning rate and forward factor of every kind of tensor under every rule.

    Args:
        markdown: Print the page docs/rules.md.
    """
    print(table_1.markdown() if markdown else table_1.aligned(table_1.table()), end="" if markdown else "\n")


def generate(config: Sample) -> None:
    """Sample text from a run, while it is written."""
    from smupar.lm.generate import generate as sample

    for text in sample(checked(config)):
        print(text, end="", flush=True)
    print()


def export(config: Export) -> None:
    """Write a model as a folder to hand on: safetensors with all factors folded in, and a run's with a model card.

    A model of transformers, saved by save_pretrained, becomes one that a plain from_pretrained reads.
    """
    from smupar.lm.export import is_of_transformers

    wanted = checked(config)
    if is_of_transformers(wanted):
        from smupar.integrations.huggingface import export as write_plain

        print(write_plain(wanted.folder, wanted.out, dtype=wanted.dtype))
        return
    from smupar.lm.export import export as write

    print(write(wanted))


def report(folder: tyro.conf.Positional[str], parquet: bool = False) -> None:
    """Write the page, picture and table of a study again, from the runs that are finished.

    Args:
        folder: Of the study.
        parquet: Write table.parquet beside table.csv and table.json.
    """
    from smupar.study.report import write_report
    from smupar.study.store import Study

    study = Study(folder)
    found = write_report(study)
    if parquet:
        study.write_parquet()
    print(f"{found}{', table.parquet' if parquet else ''}")


def check(config: Check) -> None:
    """Measure whether activations, gradients and updates of the GPT keep their size over width and sparsity.

    Prints a verdict with a diagnosis, writes a picture, a page and JSON; exits with 1 if the check does not pass.
    """
    from smupar.lm.check import check_gpt

    report = check_gpt(checked(config))
    print(report.explain())
    if not report.ok:
        sys.exit(1)


def bench(
    what: tyro.conf.Positional[Literal["parameterize", "train", "updates", "sweep", "data", "sparse"]],
    repeats: int = 3,
    out: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> None:
    """Measure, side by side in one run.

    Args:
        what: parameterize: its cost against a plain normal_ of the same tensors. train: the 610M model on a GPU, masked
            against the same without smupar, causal attention and ALiBi. updates: the same model with and without
            a trace that it follows, on a GPU. sweep: many small models, one by one and stacked. data: how fast shards are
            read. sparse: layers that keep only their non-zeros against dense ones.
        repeats: Runs of each side.
        out: For sparse: a folder for the numbers as JSON and the picture.
        device: For sparse: cpu or cuda; default a GPU if there is one.
    """
    from smupar.bench import BENCHES

    if repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}")
    if out is not None and what != "sparse":
        raise ValueError(f"--out is for bench sparse, {what} writes no files: leave it out")
    if device is not None and what != "sparse":
        raise ValueError(f"--device is for bench sparse, {what} runs where it can: leave it out")
    print(BENCHES[what](repeats=repeats, **{k: v for k, v in {"out": out, "device": device}.items() if v is not None}))


def commands(name: str, start: RunConfig) -> dict[str, Callable[..., None]]:
    """All commands; ``start``, the recipe called ``name``, is where those that take a run begin, before their flags."""
    begin, default_how, default_engine = unchecked(start), unchecked(Execution()), unchecked(EngineConfig())
    short = replace(start, steps=200, warmup=None, valid_batches=1) if name == "demo" else start
    begin_transfer = unchecked(TransferConfig(run=short))
    proxy = replace(short, sparsity=0.0, model=replace(short.model, width=short.base_width))
    begin_tune = unchecked(TuneConfig(run=proxy))

    def plan(recipe: Recipe = "demo", /, *, config: Run = begin, json: bool = False) -> None:
        """Print the plan of a GPT without building it: every number of every parameter, in seconds at any size.

        Args:
            recipe: demo, 610m, paper-610m or paper-iso: where the flags begin.
            json: Print it as JSON, for smupar.Plan.from_json.
        """
        from smupar.lm.gpt import plan_on_meta

        _refuse_late("plan", recipe, name)
        made = plan_on_meta(checked(config))
        print(made.to_json() if json else made)

    def train(
        recipe: Recipe = "demo",
        /,
        *,
        config: Run = begin,
        how: How = default_how,
        hps: str | None = None,
        dry_run: bool = False,
        gpus: int = 1,
        gpu_gib: float = 139.0,
        peak_share: float = 0.45,
    ) -> None:
        """Train a sparse GPT. Without flags: on the source of Python's standard library, a minute on two cores.

        Interrupted or killed, the same command goes on from the last checkpoint. On several devices: torchrun
        --nproc-per-node 8 -m smupar train ...

        Args:
            recipe: demo, 610m, paper-610m or paper-iso: where the flags begin.
            hps: best.json of `smupar tune`: learning rate, init and alphas, for any width, density and depth.
            dry_run: Print parameters, FLOPs, memory and hours; train nothing.
            gpus: Number of GPUs, for --dry-run.
            gpu_gib: Memory of one, for --dry-run; default an H200's.
            peak_share: Share of peak FLOP/s, for --dry-run; the peak is --peak-tflops, default an H200's 990.
        """
        _refuse_late("train", recipe, name)
        config, how = checked(config), checked(how)
        if dry_run:
            from smupar.lm.cost import report

            print(report(config, how, gpus=gpus, gpu_gib=gpu_gib, peak_share=peak_share))
            return
        from smupar.lm.train import train as run

        summary = run(config, how)
        if int(os.environ.get("RANK", 0)) == 0:
            print(_ending(summary, config))
        sys.exit(_EXIT_CODES[summary.status])

    def sweep(
        axes: tyro.conf.Positional[tuple[str, ...]],
        config: Run = begin,
        how: Engine = default_engine,
        out: str = "runs/sweep",
    ) -> None:
        """Run every combination of some fields' values, and write a page with curves and a table.

        Args:
            axes: FIELD=VALUE,VALUE,... for any fields of a run: lr=2^-10..2^-4 rule=sp,smupar sparsity=0,0.75
            out: Folder of the study. Started again, only what is missing is run.
        """
        from smupar.study.run import run_study
        from smupar.study.space import parse_axes
        from smupar.study.sweep import sweep as define

        print(run_study(out, define(checked(config), parse_axes(axes)), _command(), checked(how)))

    def transfer(
        config: Transfer = begin_transfer,
        how: Engine = default_engine,
        out: str = "runs/transfer",
        hps: str | None = None,
    ) -> None:
        """Sweep one hyperparameter on the dense proxy and on wide sparse targets; say how far each rule's optimum moved.

        Args:
            out: Folder of the study: picture.png, report.html, table.csv. Started again, only what is missing is run.
            hps: best.json of `smupar tune`: what is not swept.
        """
        from smupar.study.run import run_study
        from smupar.study.transfer import transfer as define

        print(run_study(out, define(checked(config)), _command(), checked(how)))

    def reproduce(
        figures: tyro.conf.Positional[tuple[str, ...]] = (),
        scale: Literal["cpu", "small", "paper"] = "cpu",
        how: Engine = default_engine,
        data: str | None = None,
        data_dir: str | None = None,
        out: str = "runs/reproduce",
        publish: str | None = None,
        list: bool = False,  # noqa: A002 (the flag)
        settings: bool = False,
        dry_run: bool = False,
    ) -> None:
        """Reproduce figures and tables of the paper: picture, rows, and whether its claim holds here (exit code 1 if not).

        Args:
            figures: fig06, tab01, ...; all: every one, tab02 only with --data-dir.
            scale: cpu: minutes on two cores; small: minutes on one GPU; paper: as printed.
            data: Folder made by `smupar data prepare`; at scale cpu default Python's own source.
            data_dir: tab02: folder with local copies of the tasks as JSONL; default the harness's own, online.
            out: Folder; figures that share runs share them here. Started again, only what is missing is run.
            publish: Folder for a page of results, its rows and its picture, as in docs/results.
            list: Print what there is.
            settings: Print Table 4, and what the smaller scales make of it.
            dry_run: Print runs, parameters, tokens, FLOPs, hours and memory; run nothing.
        """
        from smupar.paper import reproduce as paper
        from smupar.paper.settings import table_4

        if settings or list or not figures:
            print(table_4() if settings else paper.listed())
            return
        offline = [name for name in paper.FIGURES if name != "tab02" or data_dir is not None]
        names = offline if figures == ("all",) else figures
        trained = [name for name in names if paper.figure(name).runs]
        wanted = paper.make_scale(scale, data, reads=bool(trained) and not dry_run)
        if dry_run:
            print("\n".join(paper.dry_run(name, wanted) for name in names))
            return
        if publish is not None:
            from smupar.paper.publish import publish as write_page
            from smupar.paper.publish import refuse_other_scale

            refuse_other_scale(publish, names, wanted)
        ended = []
        for name in names:
            ended.append(paper.reproduce(name, wanted, checked(how), out=out, data_dir=data_dir))
            print(ended[-1], flush=True)
            if publish is not None:
                print(write_page(ended[-1], wanted, publish))
        sys.exit(0 if all(one.claim.holds for one in ended) else 1)

    def tune(config: Tune = begin_tune, how: Engine = default_engine, out: str = "runs/tune") -> None:
        """Search lr, init_std, alpha_input and alpha_output on the dense proxy of base width, as in the paper's Table 3.

        Writes best.json for --hps of train and transfer. Started again, only what is missing is run.

        Args:
            out: Folder of the study.
        """
        from smupar.study.report import write_report
        from smupar.study.store import Study
        from smupar.study.tune import tune as search

        print(search(checked(config), checked(how), out=out, command=_command()).explain())
        print(write_report(Study(out)))

    return {
        "rules": rules,
        "plan": plan,
        "check": check,
        "train": train,
        "generate": generate,
        "export": export,
        "sweep": sweep,
        "tune": tune,
        "transfer": transfer,
        "reproduce": reproduce,
        "report": report,
        "bench": bench,
    }


def _ending(summary: Summary, config: RunConfig) -> str:
    """The last line of a run."""
    if summary.status in ("interrupted", "terminated"):
        return f"{summary.status} and saved at step {summary.steps} of {config.steps}: the same command goes on"
    if summary.status == "diverged":
        return (
            f"diverged: the loss is no number at step {summary.steps}, base LR {config.lr:g}: lower --lr, "
            f"or set --clip; {summary.folder} says so"
        )
    return (
        f"train loss {summary.train_loss:.3f}, validation loss {summary.valid_loss:.3f} nats per token at "
        f"{summary.sparsity:.1%} sparsity, rule {config.rule}, base LR {config.lr:g}; {summary.seconds:.0f} s; "
        f"sample from it: smupar generate {shlex.quote(summary.folder)}"
    )


def data() -> None:
    """Text on disk, as tokens: `smupar data prepare` and `smupar data verify`."""


def prepare(config: Prepare) -> None:
    """Turn text, JSONL, Parquet or a Hugging Face dataset into token shards that `smupar train --data` reads."""
    from smupar.lm.prepare import prepare as make

    index = make(checked(config))
    print(
        f"{index.num_tokens:,} tokens of {index.num_documents:,} documents ({index.tokenizer.name}, vocabulary "
        f"{index.tokenizer.vocab_size:,}) in {len(index.shards)} shard{'s' if len(index.shards) > 1 else ''}: "
        f"smupar train --data {shlex.quote(config.out)}"
    )


def verify(folder: tyro.conf.Positional[str]) -> None:
    """Compare every shard with its checksum, and say what is in the folder.

    Args:
        folder: Made by `smupar data prepare`.
    """
    from smupar.lm.shards import verify as compare

    index = compare(folder)
    print(f"{folder}: {index.num_tokens:,} tokens, {index.num_documents:,} documents, {index.tokenizer.name}: intact")


def evaluate(config: Evaluation) -> None:
    """Evaluate models on ARC-easy, LAMBADA, RACE, PIQA and BoolQ by EleutherAI's harness: the paper's Table 2.

    In three steps, of which only the middle one needs the model and does without the harness: `smupar eval requests`,
    `smupar eval score`, `smupar eval table`.
    """
    from smupar.integrations.lm_eval import evaluate as run

    wanted = checked(config)
    print(f"{run(wanted)}\n{wanted.out}/results.json, table.md, table.csv")


def requests(config: Questions, out: str = "requests.jsonl") -> None:
    """Write all that the tasks ask, for `smupar eval score`. Needs the harness.

    Args:
        out: File to write.
    """
    from smupar.integrations.lm_eval import write_requests

    print(write_requests(checked(config), out))


def score(
    folder: tyro.conf.Positional[str], config: Scoring, requests: str = "requests.jsonl", out: str = "scores.jsonl"
) -> None:
    """Compute the loglikelihoods that a file asks for. Needs no harness; interrupted, the same command goes on.

    Args:
        folder: Of a run, a checkpoint, an export, or a model that transformers reads.
        requests: Made by `smupar eval requests`.
        out: File to append to; what it holds is not computed again.
    """
    from smupar.lm.score import score_file

    print(score_file(folder, requests, out, checked(config)))


def table(
    requests: str = "requests.jsonl",
    scores: tuple[str, ...] = ("scores.jsonl",),
    out: str = "runs/eval",
    data_dir: str | None = None,
) -> None:
    """Turn scores into the table, one row for each file of scores. Needs the harness.

    Args:
        requests: Made by `smupar eval requests`.
        scores: Made by `smupar eval score`, a file for each model.
        out: Folder for results.json, table.md, table.csv.
        data_dir: Where the tasks' local copies are now; default where they were.
    """
    from smupar.integrations.lm_eval import tabulate

    print(f"{tabulate(requests, list(scores), out, data_dir=data_dir)}\n{out}/results.json, table.md, table.csv")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        from smupar.environment import describe

        print(describe())
        return
    # Threads that wait must not spin for long: beside another job on the same cores a step took up to 30 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded
    warnings.showwarning = lambda message, *_, **__: print(f"smupar: note: {message}", file=sys.stderr)
    try:
        _run(argv or ["--help"])
    except BrokenPipeError:  # `smupar ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"smupar: {_told(error)}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if not _is_of_the_machine(error):
            raise
        print(f"smupar: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:  # the system's, not one of ours
        return f"{error.filename}: {error.strerror}. Name another path, or make this one usable"
    return str(error)


def _is_of_the_machine(error: Exception) -> bool:
    """Out of memory or disk, told by libraries in their own words."""
    return type(error).__name__ in ("SafetensorError", "OutOfMemoryError", "MemoryError")


def _run(argv: list[str]) -> None:
    argv = [dashed(word) for word in argv]
    on_data: dict[str, Callable[..., None]] = {"prepare": prepare, "verify": verify}
    if argv[0] == "data":
        tyro.extras.subcommand_cli_from_dict(
            on_data,
            prog="smupar data",
            description="Text on disk, as tokens.",
            args=argv[1:] or ["--help"],
        )
        return
    if argv[0] == "eval":
        steps: dict[str, Callable[..., None]] = {"requests": requests, "score": score, "table": table}
        step = steps.get(argv[1]) if len(argv) > 1 else None
        prog, args = (f"smupar eval {argv[1]}", argv[2:]) if step else ("smupar eval", argv[1:] or ["--help"])
        tyro.cli(step or evaluate, prog=prog, args=args)
        return
    tyro.extras.subcommand_cli_from_dict(
        {
            **commands(*start_of(argv)),
            "data": _with_steps(data, on_data) if "-completion" in argv[0] else data,
            "eval": evaluate,
        },
        prog="smupar",
        description="Tune a small dense model, train wide sparse ones with the same hyperparameters. "
        "--version says what is installed; --tyro-print-completion bash (or zsh) prints what completes these commands.",
        args=argv,
    )


def _with_steps(command: Callable[..., None], steps: dict[str, Callable[..., None]]) -> Callable[..., None]:
    """The command as a shell's completion should know it. Not for running: tyro would put errors of its steps into a box."""

    def nested(step: Any) -> None: ...

    nested.__doc__ = command.__doc__
    named = tuple(Annotated[Any, tyro.conf.subcommand(name=name, constructor=step)] for name, step in steps.items())
    nested.__annotations__["step"] = Union[named]  # noqa: UP007 (made of a tuple)
    return tyro.conf.configure(tyro.conf.OmitSubcommandPrefixes)(nested)


def _command() -> str:
    """What was typed, for the page of a study."""
    return shlex.join(["smupar", *sys.argv[1:]])


def _refuse_late(command: str, given: str, begun: str) -> None:
    if given != begun:
        raise ValueError(f"{given!r} must come first, flags change what it begins with: smupar {command} {given} --...")
