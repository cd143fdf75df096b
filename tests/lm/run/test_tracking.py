"""TensorBoard, Weights & Biases and metrics.jsonl hold the same numbers; studies become plain tables."""

import contextlib
import csv
import io
import json
import multiprocessing
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from smupar.cli.main import main
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo
from smupar.lm.run.tracking import tracked
from smupar.lm.run.train import train
from smupar.study.engines import execute
from smupar.study.store import Study

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.lm.run.train", "smupar.cli.main"])
TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=4, batch_size=2, seq_len=16, valid_batches=1
)


@pytest.fixture
def config(tmp_path):
    """The configuration of a run on a text that takes no time to read."""
    write_tokens(tmp_path / "text", np.arange(4000) % 97, TokenizerInfo("bytes", 256, 0, "b"))
    return replace(TINY, data=str(tmp_path / "text"))


def _events(folder: Path) -> list[dict[str, float]]:
    """What TensorBoard got, as rows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            rows.setdefault(event.step, {"step": event.step})[name] = event.value
    return [rows[step] for step in sorted(rows)]


def _history(folder: Path) -> list[dict[str, float]]:
    """What Weights & Biases got, as rows, from the file that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("offline-run-*/*.wandb")
    store, rows = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")} | {"step": items["_step"]})
    store.close()
    return rows


def _train_offline(config: RunConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train(replace(config, steps=6), Execution(out=str(folder), device="cpu", log_every=2, tensorboard=True, wandb=True))


def test_tensorboard_and_wandb_offline_get_the_rows_of_the_metrics(config, tmp_path):
    process = PROCESSES.Process(target=_train_offline, args=(config, tmp_path / "run"))
    process.start()
    process.join()
    assert process.exitcode == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]  # five validations, and every second step
    assert {"loss", "lr", "tokens", "tokens_per_second", "valid_loss"} < rows[-1].keys()
    assert _history(tmp_path / "run" / "wandb") == rows
    for event, row in zip(_events(tmp_path / "run" / "tensorboard"), rows, strict=True):
        assert event == pytest.approx(row, rel=1e-6)  # TensorBoard keeps float32
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert folder.name.endswith((tmp_path / "run" / "wandb" / "id").read_text())  # goes on under the same id


@pytest.mark.parametrize("flag", ["tensorboard", "wandb"])
def test_missing_tracker_names_its_extra(flag, tmp_path, monkeypatch):
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(ModuleNotFoundError, match=re.escape(f"--{flag} needs {flag}: pip install 'smupar[tracking]'")),
        tracked(tmp_path, TINY, Execution(**{flag: True}), 0),
    ):
        pass


def test_other_ranks_write_nothing(tmp_path):
    with tracked(tmp_path, TINY, Execution(tensorboard=True, wandb=True), 0, writes=False) as track:
        track({"step": 1, "loss": 2.0, "valid_loss": None})
    assert list(tmp_path.iterdir()) == []


def test_study_becomes_csv_and_parquet_with_the_same_rows(config, tmp_path, capsys):
    from pyarrow import parquet

    with Study.open(tmp_path / "study", {"kind": "sweep", "axes": {"lr": [2**-8, 2**-6]}}, "smupar sweep") as study:
        execute(study, [replace(config, lr=2.0**-8), replace(config, lr=2.0**-6)], engine="serial", device="cpu")
    main(["report", str(study.folder), "--parquet"])
    assert "table.csv, table.parquet" in capsys.readouterr().out
    typed = parquet.read_table(study.folder / "table.parquet").to_pylist()
    assert typed == json.loads((study.folder / "table.json").read_text())
    with (study.folder / "table.csv").open() as file:
        plain = list(csv.DictReader(file))
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in typed] == plain
    assert {row["lr"] for row in typed} == {2**-8, 2**-6}


def test_parquet_without_pyarrow_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=re.escape("table.parquet needs pyarrow: pip install 'smupar[data]'")):
        Study(tmp_path).write_parquet()
