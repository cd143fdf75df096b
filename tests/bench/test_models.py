"""Benchmarks of complete models, tiny and on a CPU: rows are measured once, and what cannot be measured is named."""

import json

import pytest

from smupar.bench import storage
from smupar.bench.attention import bench_attention
from smupar.bench.storage import bench_storage
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import on_meta

TINY = {"repeats": 1, "device": "cpu", "widths": (32,), "depth": 1, "tokens": 32, "seq_len": 16}


def test_storage_measures_every_side_once_and_goes_on(tmp_path, monkeypatch):
    real = storage._row

    def third_time_killed(case, *args, done=[]):  # noqa: B006
        done.append(case)
        if len(done) == 3:
            raise KeyboardInterrupt
        return real(case, *args)

    monkeypatch.setattr(storage, "_row", third_time_killed)
    with pytest.raises(KeyboardInterrupt):
        bench_storage(out=str(tmp_path), **TINY)
    before = json.loads((tmp_path / "storage.json").read_text())
    assert len(before["rows"]) == 2
    monkeypatch.setattr(storage, "_row", real)
    table = bench_storage(out=str(tmp_path), **TINY)
    after = json.loads((tmp_path / "storage.json").read_text())
    assert after["rows"][:2] == before["rows"]
    found = {(round(1 / row["case"]["density"]), row["case"]["storage"]) for row in after["rows"]}
    assert found == {(2**power, side) for power in range(3, 8) for side in ("csr", "auto")}
    assert after["hardware"].startswith("CPU")
    assert len([line for line in table.splitlines() if line.lstrip().startswith("32 ")]) == 10
    assert bench_storage(out=str(tmp_path), **TINY).splitlines()[1:] == table.splitlines()[1:]


def test_floor_of_a_step_is_its_flops_or_its_bytes():
    case = storage.StorageCase(64, 2, 64, 16, "random", 1 / 8, "csr", captured=False, threads=1)
    config = storage._config(case, storage.torch.device("cpu"))
    hidden = sum(p.numel() for name, p in on_meta(config.model).named_parameters() if p.ndim == 2 and "embedding" not in name)
    kept, unembedding, attention = hidden / 8, 256 * 64, 12 * 2 * 16 * 64
    flops = 64 * (6 * (kept + unembedding) + attention)
    assert storage._floor(config, storage.Machine(1e30, 1e9)) == pytest.approx(flops / 1e9, rel=1e-3)
    dense = storage.replace(config, sparsity=0.0)
    more_bytes = 28 * (hidden - kept)
    only_bytes = storage.Machine(1e9, 1e30)
    assert storage._floor(dense, only_bytes) - storage._floor(config, only_bytes) == pytest.approx(more_bytes / 1e9, rel=1e-3)


def test_storage_names_what_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(storage, "_ON_CPU", (("2:4", "2:4-transposable", 1 / 2),))
    table = bench_storage(**TINY)
    assert "not measured: 2:4 at 32, 1/2: backend '2:4' needs an NVIDIA GPU" in table


def test_attention_compares_both_kernels_at_each_length():
    table = bench_attention(
        repeats=1, lengths=(16, 8), model=ModelConfig(width=32, depth=1, head_dim=16), tokens=32, num_models=2, num_steps=1
    )
    rows = [line.split()[:2] for line in table.splitlines()[2:]]
    assert rows == [["16", "products"], ["16", "fused"], ["8", "products"], ["8", "fused"]]
