"""The benchmark of sparse layers; that for GPUs on a CPU, which has csr and nothing else."""

import json
from types import SimpleNamespace

import pytest
import torch

from smupar.bench.sparse import compare
from smupar.bench.sparse import gpu as bench_gpu
from smupar.bench.sparse.compare import bench_sparse
from smupar.bench.sparse.rows import Machine
from smupar.execute.sparse.cpu import Compiled
from smupar.lm.config.run_config import ModelConfig
from tests.support.models import VOCAB


def test_benchmark_writes_table_numbers_and_picture(tmp_path):
    tiny = ModelConfig(width=64, depth=1, head_dim=16, vocab_size=VOCAB)
    table = bench_sparse(
        repeats=1, out=str(tmp_path), device="cpu", densities=(1 / 8,), widths=(32,), width=64, tokens=32, depth=1, gpt=tiny
    )
    numbers = json.loads((tmp_path / "sparse.json").read_text())
    found = {(row["what"], row["width"], round(1 / row["density"]), row["side"]) for row in numbers["rows"]}
    for side in ("dense fp32", "dense bf16", "torch csr", "csr"):
        assert ("layers", 64, 8, side) in found
        assert ("layers", 32, 32, side) in found
    assert ("gpt", 64, 32, "auto") in found
    assert (tmp_path / "sparse.png").read_bytes().startswith(b"\x89PNG")
    assert len([line for line in table.splitlines() if line.startswith(("layers", "gpt"))]) == len(numbers["rows"])


@pytest.fixture
def no_gpu(monkeypatch):
    """The benchmark for GPUs on a CPU, which has csr and nothing else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(bench_gpu, "_GPU", torch.device("cpu"))
    monkeypatch.setattr(compare, "measure_machine", lambda device: Machine(1e9, 1e9))
    monkeypatch.setattr(bench_gpu, "_peak_bytes", lambda call: (call(), 5_000_000)[1])
    monkeypatch.setattr(bench_gpu, "captured_call", lambda call, device: call)
    monkeypatch.setattr(bench_gpu, "synced_seconds_of", lambda call, num: (call(), 2e-3)[1])
    monkeypatch.setattr(bench_gpu, "gc", SimpleNamespace(collect=lambda: None))  # takes long in a process full of tests


TINY = {"repeats": 1, "device": "cuda", "width": 128, "widths": (128,), "densities": (1 / 8,), "tokens": 16, "depth": 1}


def test_benchmark_goes_on_without_backends_and_says_why(tmp_path, no_gpu):
    table = bench_sparse(out=str(tmp_path), **TINY)
    numbers = json.loads((tmp_path / "sparse.json").read_text())
    found = {(row["what"], row["side"]) for row in numbers["rows"]}
    for side in ("dense bf16", "dense bf16 captured", "csr", "csr captured"):
        assert ("layer", side) in found
        assert ("layers", side) in found
    assert ("product", "dense bf16 captured") in found
    assert ("layers", "masked dense captured") in found
    assert not any(side.startswith(("2:4", "block")) for _, side in found)
    for line in (
        "not measured: 2:4 at 128, 1/2: backend '2:4' needs an NVIDIA GPU",
        "not measured: block-64 at 256, 1/32: backend 'block' needs an NVIDIA GPU",
        "not measured: block at 128, 1/8: backend 'block' needs an NVIDIA GPU",
        "not measured: csr at 128, 1/128: ",  # a product, for want of a compiler
    ):
        assert any(missed.startswith(line) for missed in numbers["missed"]), line
        assert f"\n{line}" in table
    assert {row["peak_bytes"] for row in numbers["rows"]} == {5_000_000}
    assert "peak MB" in table
    assert (tmp_path / "sparse.png").exists()


def test_benchmark_notes_kernels_that_fail_and_goes_on(monkeypatch, no_gpu):
    def fails(*_, **__):
        raise RuntimeError("illegal instruction\nand much more")

    monkeypatch.setattr(Compiled, "forward", fails)
    table = bench_sparse(**TINY)
    assert "\nnot measured: csr at 128, 1/8: RuntimeError: illegal instruction\n" in table
    assert "\nproduct" in table
    assert "auto: dense" in table
    monkeypatch.setattr(bench_gpu, "captured_call", fails)
    table = bench_sparse(**TINY)
    assert "\nnot measured: dense bf16 captured at 128, 1/8: RuntimeError: illegal instruction\n" in table
    monkeypatch.setattr(bench_gpu, "_timed", fails)
    assert bench_sparse(**TINY).count("illegal instruction") > 10


def test_interrupted_benchmark_keeps_what_it_has(monkeypatch, tmp_path, no_gpu):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "_product", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_sparse(out=str(tmp_path), **TINY)
    assert {row["what"] for row in json.loads((tmp_path / "sparse.json").read_text())["rows"]} == {"layer", "layers"}


def test_masks_of_the_benchmark_have_their_density_in_every_line(monkeypatch):
    monkeypatch.setattr(bench_gpu, "_GPU", torch.device("cpu"))
    blocks = bench_gpu._mask("block-64", 4096, 1 / 32)
    assert blocks.float().mean() == 1 / 32
    assert blocks.any(1).float().mean() > 0.75  # a mask of 1024 repeated would have a quarter of its lines
    semi = bench_gpu._mask("2:4-transposable", 2048, 1 / 2)
    assert bool((semi.view(512, 4, 2048).sum(1) == 2).all())
    random = bench_gpu._mask("random", 512, 1 / 8)
    assert torch.equal(random, bench_gpu._mask("random", 512, 1 / 8))
    assert random.float().mean().item() == pytest.approx(1 / 8, rel=0.05)
