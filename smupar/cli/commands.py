"""The commands, as plain functions. The commands of studies are in studies.py, those of ``smupar data`` in data.py, and those
of ``smupar eval`` in evaluation.py.

Each command imports what it needs when it runs, so that ``smupar --help`` is fast. ``main`` prints what a command returns, as
text or as JSON.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from smupar import rule_tables
from smupar.cli.answers import Reply, TextLine, table
from smupar.cli.flags import Arg, Typed
from smupar.cli.loading import loading
from smupar.cli.resolve import Request, resolve, resolve_training
from smupar.lm.config.commands import CheckConfig, ExportConfig, GenerateConfig
from smupar.lm.config.run_config import STANDARD_LIBRARY, Execution, MachineConfig, RunConfig
from smupar.lm.run.signals import TERMINATED
from smupar.output.page.document import Tone
from smupar.output.tables import aligned
from smupar.refusals import refuse

if TYPE_CHECKING:
    from smupar.check.coordinates.report import Report
    from smupar.lm.run.folder import Summary

Preset = Annotated[str, Arg("PRESET", positional=True)]
Folder = Annotated[str, Arg("FOLDER", positional=True)]
Run = Annotated[Typed, RunConfig]
EXIT_CODES = {"finished": 0, "diverged": 3, "interrupted": 130, "terminated": TERMINATED}
_BASELINES = ("sp", "mup")
_TONES: dict[str, Tone] = {"pass": "good", "fail": "bad"}


def rules(full: bool = False, markdown: bool = False) -> Reply:
    """Print Table 1: the init, learning rate and forward factor of every role under every rule.

    Args:
        full: Print all rules, SGD, Muon, depth, and where each factor is from.
        markdown: Print Table 1 as the page docs/rules.md.
    """
    names, *rows = rule_tables.table()
    values = {
        "rules": [dict(zip(names, row, strict=True)) for row in rows],
        "depth_rules": rule_tables.depth_table(),
    }
    if markdown:
        return Reply(table(rule_tables.markdown()), values)
    if full:
        return Reply([*table(aligned(rule_tables.table())), TextLine(""), *table(aligned(rule_tables.depth_table()))], values)
    return Reply(_short_rules(), values)


def _short_rules() -> list[TextLine]:
    """Table 1 with a heading for each role, and what its letters mean."""
    header, rows = rule_tables.short_table()
    title, *lines = aligned([header, *(row for _, row in rows)]).splitlines()
    text_lines, last = [_in_role(title)], ""
    for (role, _), line in zip(rows, lines, strict=True):
        text_lines += ([] if role == last else [TextLine("", role)]) + [_in_role(line)]
        last = role
    meaning = (
        "s^2: variance of the init; eta: learning rate; lambda: weight decay; m_in, m_out: number of inputs and outputs, "
        "divided by the base model's; m_rho: density, divided by the base model's. For Adam's family; --full has SGD, Muon, "
        "depth, ablations and sources."
    )
    return [*text_lines, TextLine(""), TextLine(meaning)]


def _in_role(line: str) -> TextLine:
    return TextLine(line, indent="  ", is_table=True)


def generate(config: Annotated[Typed, GenerateConfig]) -> Reply:
    """Sample text from a trained model, and print it while it is generated."""
    with loading():
        from smupar.lm.use.generate import generate as sample

        pieces = sample(GenerateConfig(**config))
        first = next(pieces)  # errors in folder or prompt are raised here

    def text() -> Iterator[str]:
        yield first
        yield from pieces

    return Reply((), {"folder": config["folder"]}, pieces=text())


def export(config: Annotated[Typed, ExportConfig]) -> Reply:
    """Write a model to a folder to share, as safetensors with all factors folded in. For a run, also write a model card.

    From a folder that save_pretrained wrote for a Hugging Face model, make a folder that a plain from_pretrained reads.
    """
    with loading():
        from smupar.lm.use import export as runs

    chosen = ExportConfig(**config)
    if runs.is_of_transformers(chosen):
        from smupar.integrations import huggingface

        line = huggingface.export(chosen.folder, chosen.out, dtype=chosen.dtype)
    else:
        line = runs.export(chosen)
    return Reply([TextLine(line)], {"folder": chosen.folder, "out": chosen.out, "format": chosen.format, "dtype": chosen.dtype})


def check(config: Annotated[Typed, CheckConfig]) -> Reply:
    """Measure whether activations, gradients and updates of the GPT keep their size over width and sparsity.

    With --whole-run 2000 it trains 2000 steps, and reports whether updates keep their size until the end. Prints a verdict with
    a diagnosis, and writes a picture, a page and JSON. Exits with 1 if the check does not pass.
    """
    chosen = CheckConfig(**config)
    with loading():
        from smupar.lm.use.check import check_gpt, files_of

    report = check_gpt(chosen)
    files = files_of(chosen)
    values = {
        "ok": report.ok,
        "verdicts": report.verdicts,
        "diagnoses": report.diagnoses,
        "explanation": {rule: report.explain_rule(rule) for rule in report.rules},
        "folder": chosen.out,
        "files": files,
    }
    where = TextLine(", ".join([f"{chosen.out}/{files[0]}", *files[1:]]))
    return Reply([*_verdict_lines(report), where], values, code=0 if report.ok else 1)


def _verdict_lines(report: Report) -> list[TextLine]:
    """The verdict of the rules under test with the reasons, then the verdicts of the baselines, whose reasons are on the
    page."""
    under_test = [rule for rule in report.rules if rule not in _BASELINES] or report.rules
    lines = [TextLine("", report.headline, report.tone)]
    for rule in [*under_test, *(rule for rule in report.rules if rule not in under_test)]:
        verdict = report.verdicts[rule]
        first, *reasons = report.explain_rule(rule)
        is_tested = rule in under_test
        tone = _TONES.get(verdict, "unclear") if is_tested else "plain"
        text = first.replace(f": {verdict.upper()} over", " over", 1)
        lines += [TextLine(text if is_tested else f"{text}, a baseline", verdict.upper(), tone)]
        if is_tested:
            lines += [TextLine(reason.strip(), indent="      ") for reason in reasons]
    return lines


def bench(
    what: Annotated[
        Literal["parameterize", "train", "updates", "sweep", "data", "sparse", "generate", "attention"],
        Arg("BENCH", positional=True),
    ],
    repeats: int = 3,
    out: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    storage: bool = False,
) -> Reply:
    """Measure time and memory of two or more variants, in turns in one run.

    Args:
        what: parameterize: parameterize, compared with a plain normal_ of the same tensors. train: the 610M model on a GPU with
            masks, compared with the same model without smupar, for causal attention and for ALiBi. updates: the 610M model on
            a GPU, with and without following a trace. sweep: many small models, one by one and stacked. data: how fast
            batches are read from shards. sparse: layers that keep only their non-zeros, compared with dense layers. generate:
            tokens per second: dense, without zeros, and with transformers. attention: stacks of models on a GPU, with fused
            attention and without.
        repeats: Number of runs of each variant.
        out: For sparse, generate and train --storage: a folder for the numbers as JSON, and for the picture of sparse. If you
            run generate or train --storage again, it measures only the missing cases.
        device: For sparse, generate and train --storage: cpu or cuda. Default: a GPU if there is one.
        storage: For train: steps of complete GPTs that keep only their non-zeros, compared with dense ones.
    """
    refuse(not 1 <= repeats <= 10_000, f"--repeats must lie between 1 and 10,000, got {repeats}")
    refuse(storage and what != "train", f"--storage is for bench train, not for {what}: leave it out")
    chooses, these = storage or what in ("sparse", "generate"), "bench sparse, generate and train --storage"
    refuse(out is not None and not chooses, f"--out is for {these}; {what} writes no files: leave it out")
    refuse(device is not None and not chooses, f"--device is for {these}; {what} chooses its device: leave it out")
    with loading():
        from smupar.bench.models import BENCHES

    text = BENCHES["storage" if storage else what](
        repeats=repeats, **{k: v for k, v in {"out": out, "device": device}.items() if v is not None}
    )
    return Reply(table(text), {"bench": what, "repeats": repeats, "lines": text.splitlines()})


def plan(preset: Preset = "demo", /, *, config: Run, hps: str | None = None, full: bool = False) -> Reply:
    """Print the plan of a GPT without building the model: a summary by kind of layer, or every parameter. Takes seconds at any
    size.

    Args:
        preset: The configuration that flags change: demo, 610m, paper-610m or paper-iso.
        hps: best.json of `smupar tune`, for init and alphas. It fits any width and density.
        full: Print every number of every parameter. --json always has them, for smupar.Plan.from_json.
    """
    run = resolve(RunConfig, request_of(config, preset, hps))
    with loading():
        from smupar.lm.model.gpt import plan_on_meta
        from smupar.plan.summary import summary_of

    planned = plan_on_meta(run)
    text = str(planned) if full else f"{summary_of(planned)}\n--full prints every parameter"
    return Reply(table(text), planned.as_json)


def train(
    preset: Preset = "demo",
    /,
    *,
    config: Run,
    how: Annotated[Typed, Execution],
    machine: Annotated[Typed, MachineConfig],
    hps: str | None = None,
    dry_run: bool = False,
) -> Reply:
    """Train a sparse GPT. Without flags it trains on the source of Python's standard library, for a minute on two cores.

    If a run is interrupted or killed, the same command resumes from the last checkpoint. On several devices, run torchrun
    --nproc-per-node 8 -m smupar train ...

    Args:
        preset: The configuration that flags change: demo, 610m, paper-610m or paper-iso.
        hps: best.json of `smupar tune`, for learning rate, init and alphas. It fits any width and density.
        dry_run: Print parameters, FLOPs, memory and hours, and train nothing.
    """
    run = resolve_training(request_of(config, preset, hps), dry_run=dry_run, machine=machine)
    if hps is not None and "lr" not in config:
        from smupar.study.kinds.tune import doubts

        for doubt in doubts(hps, optimizer=run.optimizer, rule=run.rule):
            warnings.warn(doubt, UserWarning, stacklevel=2)
    chosen = Execution(**how)
    with loading():
        from smupar.lm.model.cost import forecast
        from smupar.lm.run.train import train as carry_out
    if dry_run:
        expected = forecast(run, chosen, **asdict(MachineConfig(**machine)))
        return Reply(table(str(expected)), expected.values)
    summary = carry_out(run, chosen)
    code = EXIT_CODES[summary.status]
    if int(os.environ.get("RANK", 0)) > 0:
        return Reply((), code=code)
    return Reply(_ending(summary, run), {**asdict(summary), "config": asdict(run)}, code)


def _ending(summary: Summary, config: RunConfig) -> list[TextLine]:
    if summary.status in ("interrupted", "terminated"):
        done = f"and saved at step {summary.steps} of {config.steps}: run the same command to resume"
        return [TextLine(done, summary.status, "unclear")]
    if summary.status == "diverged":
        text = (
            f"the loss became NaN or infinite at step {summary.steps}, base LR {config.lr:g}: lower --lr, or set --clip; the "
            f"run is recorded in {summary.folder}"
        )
        return [TextLine(text, "diverged:", "bad")]
    losses = f"train loss {summary.train_loss:.3f}, validation loss {summary.valid_loss:.3f}"
    return [
        TextLine(f"{losses} nats per token, {summary.seconds:.0f} s"),
        TextLine(f"rule {config.rule}, {summary.sparsity:.1%} sparsity, base LR {config.lr:g}"),
        TextLine(f"sample from it: smupar generate {shlex.quote(summary.folder)}"),
    ]


def request_of(typed: Typed, preset: str = "demo", hps: str | None = None) -> Request:
    tuned, vocab_size = None, 0
    if hps is not None:
        from smupar.study.kinds.tune import read_hps

        tuned = read_hps(hps)
    if (text := typed.get("data", STANDARD_LIBRARY)) != STANDARD_LIBRARY:
        from smupar.lm.data.shards import read_index

        vocab_size = read_index(text).tokenizer.vocab_size
    return Request(typed, preset, vocab_size, tuned, hps)
