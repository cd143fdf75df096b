"""bench generate on a tiny model: its sides, what it counts, and going on in the same folder."""

import pytest
import torch

from smupar.bench.generate import bench_generate
from smupar.bench.models import BENCHES
from smupar.output.json_files import read_object

TINY = {"repeats": 1, "device": "cpu", "width": 64, "depth": 1, "tokens": 2}


def test_table_has_every_side_and_a_second_call_adds_what_is_missing(tmp_path):
    first = bench_generate(**TINY, out=str(tmp_path), densities=(1 / 4,), batches=(1,))
    rows = read_object(tmp_path / "generate.json", remedy="")["rows"]
    sides = {row["side"]: row for row in rows}
    assert {"dense fp32", "dense bf16", "packed fp32", "packed bf16"} <= set(sides)
    assert sides["dense bf16"]["speed"] == 1.0
    assert all(row["floor"] > 0 and side in first for side, row in sides.items())
    again = BENCHES["generate"](**TINY, out=str(tmp_path), densities=(1 / 4,), batches=(1, 2))
    after = read_object(tmp_path / "generate.json", remedy="")["rows"]
    assert after[: len(rows)] == rows
    assert [row["batch"] for row in after] == [1] * len(rows) + [2] * len(rows)
    assert "floor ms" in again


def test_bytes_of_a_packed_model_follow_its_non_zeros():
    table = bench_generate(**{**TINY, "width": 256}, densities=(1 / 2, 1 / 32), batches=(1,))
    sizes = [float(line.split()[-2]) for line in table.splitlines() if " packed bf16" in line and "transformers" not in line]
    embeddings = 2 * 2 * 256 * 256 / 1e6  # both stay dense
    hidden = [size - embeddings for size in sizes]
    assert hidden[0] / hidden[1] == pytest.approx(16, rel=0.35)  # row starts do not shrink


def test_gpu_is_refused_where_there_is_none():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no NVIDIA GPU here"):
            bench_generate(device="cuda")
