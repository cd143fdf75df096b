"""Exports: a plain GPT with the logits of the run, in both formats, and its card."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smupar.lm.config.commands import ExportConfig
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.tokenizer import Tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run.train import train
from smupar.lm.use.export import export
from smupar.lm.use.load import load_model, load_run
from smupar.model.attached import is_parameterized, mask_of

TEXT = b"Tune a small dense model, train wide sparse ones with the same hyperparameters. " * 50
ROOM = "Make room there (delete files, or have the quota raised) or name another path, then run the same command again"
MODEL = ModelConfig(width=64, depth=1, biases=True, context=16)
TINY = RunConfig(model=MODEL, base_width=32, sparsity=0.9375, steps=5, batch_size=4, seq_len=16, valid_batches=1)
KINDS = {
    "smupar-alibi": TINY,
    "smupar-learned": replace(TINY, model=replace(MODEL, positions="learned")),
    "sp-alibi": replace(TINY, rule="sp"),
    "sp-learned": replace(TINY, rule="sp", model=replace(MODEL, positions="learned")),
    "untied": replace(TINY, model=replace(MODEL, tied=False, residual_factor=True, depth=2)),
    "plain": replace(TINY, model=replace(MODEL, biases=False, activation="gelu", positions="rotary"), sparsity=0.0),
    "deep": replace(TINY, model=replace(MODEL, depth=4), base_depth=2),
    "deep with its own factor": replace(TINY, model=replace(MODEL, depth=4, residual_factor=True), base_depth=1),
    "neuron": replace(TINY, pattern="neuron", sparsity=0.5),
    # So large a rate that training makes the model worse.
    "overshot": replace(TINY, lr=1.0, warmup=4, schedule="constant"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of each kind of run, trained when first asked for."""
    root = tmp_path_factory.mktemp("runs")
    write_tokens(root / "text", np.frombuffer(TEXT, dtype=np.uint8), Tokenizer("bytes").info)

    def folder(kind):
        out = root / kind
        if not out.exists():
            how = Execution(out=str(out), device="cpu", valid_every=1, keep=1, peak_tflops=1.0)
            train(replace(KINDS[kind], data=str(root / "text")), how)
        return str(out)

    return folder


def _exported(runs, kind, out, **options):
    export(ExportConfig(runs(kind), str(out), **options))
    return out


def test_export_that_does_not_fit_is_removed_and_says_what_to_do(runs, tmp_path, small_files, command):
    folder = runs("plain")
    with small_files(4096):
        done = command("export", folder, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == f"smupar: {tmp_path / 'out'}: File too large. {ROOM}\n"
    assert list(tmp_path.iterdir()) == []


def test_export_leaves_a_folder_of_the_user_alone(runs, tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "thesis.tex").write_text("dear")
    _exported(runs, "plain", tmp_path / "out")
    assert (tmp_path / "out.unfinished" / "thesis.tex").read_text() == "dear"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "sums.json",
    ]


def _tokens(vocab_size=256):
    return torch.randint(vocab_size, (4, 16), generator=torch.Generator().manual_seed(0))


def _plain_gpt(folder):
    """The exported model as somebody without the rest of the package would load it."""
    config = json.loads((folder / "config.json").read_text())
    model = GPT(ModelConfig(**config["model"]))
    tensors = load_file(folder / "model.safetensors")
    state = {}
    for name, parameter in model.named_parameters():
        if name in tensors:
            state[name] = tensors.pop(name).float()
        else:
            state[name] = _csr(tensors, name, parameter.shape).to_dense().float()
    assert not tensors
    model.load_state_dict(state)
    assert not is_parameterized(model)
    return model


def _csr(tensors, name, shape):
    crow, col, values = (tensors.pop(f"{name}.{part}") for part in ("crow_indices", "col_indices", "values"))
    return torch.sparse_csr_tensor(crow.long(), col.long(), values, shape, check_invariants=True)


def _logits(model):
    with torch.no_grad():
        return model(_tokens())


# Weights


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("storage", ["dense", "sparse"])
@pytest.mark.parametrize(
    "kind",
    [*("smupar-alibi", "smupar-learned", "sp-alibi", "sp-learned", "untied", "plain", "deep", "deep with its own factor")],
)
def test_exported_plain_gpt_gives_the_logits_of_the_run(runs, tmp_path, kind, storage):
    out = _exported(runs, kind, tmp_path / "out", format=storage)
    expected = _logits(load_run(runs(kind)).model)
    assert expected.std() > 0.01
    for model in (_plain_gpt(out), load_model(out)[0]):
        torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


def test_factors_are_folded_into_embedding_queries_and_unembedding(runs, tmp_path):
    model = load_run(runs("smupar-alibi")).model
    tensors = load_file(_exported(runs, "smupar-alibi", tmp_path / "out") / "model.safetensors")
    torch.testing.assert_close(tensors["embedding.weight"], 9.17 * model.embedding.weight)
    torch.testing.assert_close(tensors["unembedding.weight"], 1.095 / 2 * model.embedding.weight)
    # Queries: 1 / head_dim over the plain model's 1 / sqrt(head_dim). Keys and values stay.
    factor = torch.tensor([32**-0.5] * 64 + [1.0] * 128)
    qkv = model.blocks[0].attention.qkv
    assert qkv.bias[:64].abs().min() > 0  # trained, so that a factor shows
    torch.testing.assert_close(tensors["blocks.0.attention.qkv.weight"], factor[:, None] * qkv.weight)
    torch.testing.assert_close(tensors["blocks.0.attention.qkv.bias"], factor * qkv.bias)
    assert torch.equal(tensors["blocks.0.mlp.down.weight"], model.blocks[0].mlp.down.weight)


def test_export_leaves_the_run_as_it_was(runs, tmp_path):
    before = _logits(load_run(runs("smupar-alibi")).model)
    _exported(runs, "smupar-alibi", tmp_path / "out")
    assert torch.equal(_logits(load_run(runs("smupar-alibi")).model), before)


def test_dense_export_stores_zeros_where_the_mask_is_off(runs, tmp_path):
    run = load_run(runs("smupar-alibi"))
    tensors = load_file(_exported(runs, "smupar-alibi", tmp_path / "out") / "model.safetensors")
    assert not [name for name in tensors if "mask" in name]
    for row in run.plan:
        if row.masked:
            assert torch.equal(tensors[row.name] != 0, mask_of(run.model, row.name))


@pytest.mark.parametrize("storage", ["dense", "sparse"])
def test_bf16_export_is_near_and_half_as_large(runs, tmp_path, storage):
    out = _exported(runs, "smupar-alibi", tmp_path / "bf16", format=storage, dtype="bf16")
    stored = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()} == {torch.bfloat16}
    expected = _logits(load_run(runs("smupar-alibi")).model)
    error = (_logits(load_model(out)[0]) - expected).norm() / expected.norm()
    assert 0 < error < 0.02  # bf16 has 8 bits
    if storage == "dense":
        full = _exported(runs, "smupar-alibi", tmp_path / "fp32")
        sizes = [(folder / "model.safetensors").stat().st_size for folder in (out, full)]
        assert sizes[0] == pytest.approx(sizes[1] / 2, rel=0.05)


# The sparse format


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_csr_parts_rebuild_the_matrix(runs, tmp_path):
    dense = load_file(_exported(runs, "smupar-alibi", tmp_path / "dense") / "model.safetensors")
    sparse = load_file(_exported(runs, "smupar-alibi", tmp_path / "sparse", format="sparse") / "model.safetensors")
    masked = [row for row in load_run(runs("smupar-alibi")).plan if row.masked]
    assert len(masked) == 5
    for row in masked:
        assert len(sparse[f"{row.name}.values"]) == row.num_kept == round(row.shape[0] * row.shape[1] / 16)
        csr = _csr(sparse, row.name, row.shape)
        assert torch.equal(csr.to_dense(), dense[row.name])
        x = torch.randn(row.shape[1], 3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(csr @ x, dense[row.name] @ x)
    for name in sparse:
        assert torch.equal(sparse[name], dense[name])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_csr_parts_are_a_torch_tensor_as_they_are(runs, tmp_path):
    sparse = load_file(_exported(runs, "smupar-alibi", tmp_path / "out", format="sparse") / "model.safetensors")
    parts = [sparse[f"blocks.0.mlp.down.weight.{part}"] for part in ("crow_indices", "col_indices", "values")]
    torch.sparse_csr_tensor(*parts, (64, 160), check_invariants=True)


def test_sparse_file_is_smaller_at_a_sixteenth_of_the_weights(runs, tmp_path):
    sizes = {}
    for storage in ("dense", "sparse"):
        out = _exported(runs, "smupar-alibi", tmp_path / storage, format=storage)
        tensors = load_file(out / "model.safetensors")
        hidden = [t for name, t in tensors.items() if name.startswith("blocks") and ".weight" in name and "norm" not in name]
        sizes[storage] = sum(tensor.numel() * tensor.element_size() for tensor in hidden)
        assert (out / "model.safetensors").stat().st_size > sizes[storage]
    assert sizes["dense"] == 4 * (4 * 64 * 64 + 3 * 64 * 160)
    # Values and columns are 8 bytes for each sixteenth, so half of a quarter, and each row has its end.
    assert sizes["sparse"] < sizes["dense"] / 6


def test_dense_run_has_nothing_to_store_sparsely(runs, tmp_path):
    stored = load_file(_exported(runs, "plain", tmp_path / "out", format="sparse") / "model.safetensors")
    assert not [name for name in stored if name.endswith("values")]


def test_run_with_whole_neurons_cut_can_be_exported_sparsely(runs, tmp_path):
    out = _exported(runs, "neuron", tmp_path / "out", format="sparse")
    torch.testing.assert_close(_logits(load_model(out)[0]), _logits(load_run(runs("neuron")).model), rtol=1e-5, atol=1e-5)


# The folder


def test_export_says_what_it_wrote(runs, tmp_path):
    line = export(ExportConfig(runs("smupar-alibi"), str(tmp_path / "deep" / "out"), format="sparse"))
    assert line.startswith(f"step 5 of {runs('smupar-alibi')}, sparse, ")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]
    files = sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    assert files == ["README.md", "config.json", "model.safetensors", "sums.json"]


def test_card_says_what_the_model_is_and_what_to_be_careful_with(runs, tmp_path):
    card = (_exported(runs, "smupar-alibi", tmp_path / "out") / "README.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")] for line in card.splitlines() if line.startswith("|")]
    rows = {what: text for _, what, text, _ in cells}
    assert rows["rule"] == "smupar, tuned at width 32: LR 0.015625, init std 0.087, alphas 9.17 and 1.095"
    assert rows["density of hidden weights"].startswith("0.0625 (random masks")
    model = load_run(runs("smupar-alibi")).model
    total = sum(parameter.numel() for parameter in model.parameters())
    kept = total - (4 * 64 * 64 + 3 * 64 * 160) * 15 // 16
    assert rows["parameters"] == f"{total:,}, of which the masks keep {kept:,}"
    assert "4,000 tokens, tokenizer bytes, sha256" in rows["data"]
    assert rows["trained"] == "5 of 5 steps of 4 x 16 tokens, fp32"
    assert rows["validation loss"].endswith("nats per token")
    assert "kWh" in card
    assert "on 1 x cpu, at 100 W each" in card
    assert "What to be careful with" in card
    assert "rare facts" in card


def test_existing_folder_is_refused_and_left_untouched(runs, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already and is not overwritten: choose another folder"):
        _exported(runs, "smupar-alibi", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.txt", "mine")]


def test_folder_that_is_no_run_raises_with_the_remedy(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="is not the folder of a run: it has no config"):
            export(ExportConfig(str(folder), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_export_of_an_export_is_refused(runs, tmp_path):
    out = _exported(runs, "smupar-alibi", tmp_path / "out")
    with pytest.raises(ValueError, match="not the configuration of a run"):
        export(ExportConfig(str(out), str(tmp_path / "again")))


# Which checkpoint


def test_best_is_the_step_with_the_lowest_validation_loss(runs, tmp_path):
    folder = runs("overshot")
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    losses = {row["step"]: row["valid_loss"] for row in map(json.loads, lines)}
    best = min(losses, key=losses.get)
    assert 1 <= best < 5
    card = (_exported(runs, "overshot", tmp_path / "best", best=True) / "README.md").read_text()
    assert f"| trained | {best} of 5 steps" in card
    assert f"| validation loss | {losses[best]:.4f} nats" in card
    expected = _logits(load_run(f"{folder}/checkpoints/step-{best:08d}").model)
    torch.testing.assert_close(_logits(_plain_gpt(tmp_path / "best")), expected, rtol=1e-5, atol=1e-5)
    last = (_exported(runs, "overshot", tmp_path / "last") / "README.md").read_text()
    assert "| trained | 5 of 5 steps" in last


def test_checkpoint_folder_is_that_step(runs, tmp_path):
    run = load_run(runs("overshot"), best=True)
    line = export(ExportConfig(f"{run.folder}/checkpoints/step-{run.step:08d}", str(tmp_path / "out")))
    assert line.startswith(f"step {run.step} of {run.folder}")
