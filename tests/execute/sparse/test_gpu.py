"""Sparse layers on a GPU: exact to the rounding of bfloat16 against the masked dense ones, and through a training run."""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.bench.sparse.compare import bench_sparse
from smupar.execute.sparse import auto, gpu, tiles
from smupar.execute.sparse.backends import missing
from smupar.execute.sparse.compression import compress
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.run.train import train as lm_train
from smupar.lm.use.load import load_run
from smupar.model.attached import mask_of
from smupar.model.sparse_linear import SparseLinear
from smupar.plan.masks.patterns import generator, parse_pattern
from tests.execute.sparse.kept import HIDDEN, relative
from tests.support.models import Conv1D, TokenNet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # compilers and drivers warn as they like
]

GPU = torch.device("cuda", 0)
HALF = torch.bfloat16
PATTERNS = {"csr": "random", "2:4": "2:4-transposable", "block": "block-32"}
SHAPES = [(64, 64), (192, 320), (1088, 2112), (2048, 512), (512, 4096)]
ODD = {"csr": (96, 160), "block": (96, 160), "2:4": (192, 320)}  # the smallest sizes that differ and are no powers of 2


def drawn(pattern, shape, density):
    return parse_pattern(pattern).draw(shape, (1,), density, generator(0, "mask", str(shape))).to(GPU)


def mask_for(backend, shape):
    return drawn(PATTERNS[backend], shape, Fraction(1, 2) if backend == "2:4" else Fraction(1, 4))


def layer_for(backend, mask, *, dtype=torch.float32, bias=True, transposed=False):
    """A layer as non-zeros, its matrix (out, in) and its bias as the kernel sees them, in double precision."""
    out_size, in_size = mask.T.shape if transposed else mask.shape
    layer = Conv1D(out_size, in_size) if transposed else nn.Linear(in_size, out_size, bias=bias)
    layer.to(GPU, dtype)
    with torch.no_grad():
        layer.weight.normal_().masked_fill_(~mask, 0)
        if layer.bias is not None:
            layer.bias.normal_()
    matrix = layer.weight.detach().to(HALF).double()
    offset = torch.zeros((), device=GPU) if layer.bias is None else layer.bias.detach().to(HALF).double()
    layer.register_buffer("weight_mask", mask)
    compress(layer, mask, out_dim=int(transposed), backend=backend)
    return layer, matrix.T if transposed else matrix, offset


def poison():
    """What is allocated next and not written to is not a number."""
    blocks = [torch.full((2**24,), torch.nan, device=GPU) for _ in range(4)]
    blocks += [torch.full((size,), torch.nan, device=GPU) for size in (2**8, 2**12, 2**16, 2**20)]
    del blocks


def assert_right(layer, matrix, offset, mask, tokens, *, shape=None):
    in_size, out_size = matrix.shape[1], matrix.shape[0]
    x = torch.randn(*(shape or (tokens,)), in_size, device=GPU).to(HALF).requires_grad_()
    grad = torch.randn(*(shape or (tokens,)), out_size, device=GPU).to(HALF)
    poison()
    with torch.autocast("cuda", HALF):
        y = layer(x)
    y.backward(grad)
    rows, out = x.detach().double().view(-1, in_size), grad.double().view(-1, out_size)
    expected = out.T @ rows if layer.out_dim == 0 else rows.T @ out
    assert y.shape == grad.shape
    assert y.dtype == HALF
    assert relative(y.view(-1, out_size), rows @ matrix.T + offset) < 5e-3
    assert relative(x.grad.view(-1, in_size), out @ matrix) < 5e-3
    assert layer.weight.grad.dtype == layer.weight.dtype
    assert relative(layer.expand(layer.weight.grad), expected.masked_fill(~mask, 0)) < 5e-3
    if layer.bias is not None:
        assert relative(layer.bias.grad, out.sum(0)) < 5e-3


# Products


@pytest.mark.parametrize("backend", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 4099])
def test_products_are_those_of_the_masked_dense_layer(backend, shape, tokens):
    torch.manual_seed(0)
    mask = mask_for(backend, shape)
    layer, matrix, offset = layer_for(backend, mask)
    assert_right(layer, matrix, offset, mask, tokens)


@pytest.mark.parametrize("backend", PATTERNS)
def test_products_of_a_layer_that_stores_in_out_are_those_of_the_dense_one(backend):
    mask = mask_for(backend, ODD[backend])
    layer, matrix, offset = layer_for(backend, mask, transposed=True)
    assert_right(layer, matrix, offset, mask, 33, shape=(3, 11))


@pytest.mark.parametrize("backend", PATTERNS)
def test_products_of_bfloat16_layers_are_those_of_the_dense_one(backend):
    mask = mask_for(backend, (256, 384))
    layer, matrix, offset = layer_for(backend, mask, dtype=HALF, bias=False)
    assert_right(layer, matrix, offset, mask, 130)
    assert layer(torch.randn(5, 384, device=GPU, dtype=HALF)).dtype == HALF  # without autocast


@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_products_of_csr_layers_of_any_density_are_those_of_the_dense_one(density):
    torch.manual_seed(0)
    mask = torch.rand(192, 2080, device=GPU) < density
    if density < 1:
        mask[[0, 191]], mask[:, [0, 77]] = False, False
    layer, matrix, offset = layer_for("csr", mask)
    assert_right(layer, matrix, offset, mask, 100)


def test_products_of_the_widest_csr_layer_are_those_of_the_dense_one():
    mask = torch.rand(8192, 96, device=GPU) < 0.02
    layer, matrix, offset = layer_for("csr", mask)
    assert_right(layer, matrix, offset, mask, 50)


@pytest.mark.parametrize("limit", [166912, 101376])
def test_products_of_tiles_of_smaller_gpus_are_those_of_the_dense_layer(monkeypatch, limit):
    monkeypatch.setattr(tiles, "shared_limit", lambda device: limit)
    mask = mask_for("csr", (1088, 2048))
    layer, matrix, offset = layer_for("csr", mask)
    assert layer.index().forward.tokens < 32
    assert_right(layer, matrix, offset, mask, 300)


def test_rows_beyond_a_grid_are_multiplied_right():
    mask = torch.ones(16, 16, device=GPU, dtype=torch.bool)
    layer, matrix, offset = layer_for("block", mask)
    x = torch.randn(65535 * 128 + 5, 16, device=GPU, dtype=HALF)
    with torch.no_grad(), torch.autocast("cuda", HALF):
        y = layer(x)
    for part in (slice(100), slice(-100, None)):
        assert relative(y[part], x[part].double() @ matrix.T + offset) < 5e-3


def test_products_of_more_lengths_than_plans_are_kept_for_are_right():
    mask = mask_for("2:4", (64, 128))
    layer, matrix, offset = layer_for("2:4", mask)
    for tokens in (16, *range(16, 16 * 80, 16), 16):  # the first comes back when its plan was closed
        layer.zero_grad()
        assert_right(layer, matrix, offset, mask, tokens)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_products_with_blocks_of_any_size_are_those_of_the_dense_one(size):
    keep = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]], device=GPU).bool()  # with an empty row and columns
    mask = keep.repeat_interleave(size, 0).repeat_interleave(size, 1)
    layer, matrix, offset = layer_for("block", mask)
    assert layer.index().size == size
    assert_right(layer, matrix, offset, mask, 300)


@pytest.mark.parametrize("backend", PATTERNS)
def test_views_that_are_not_aligned_are_multiplied_right(backend):
    mask = mask_for(backend, (64, 64))
    layer, matrix, offset = layer_for(backend, mask)
    x = torch.randn(1 + 40 * 64, device=GPU).to(HALF)[1:].view(40, 64)
    assert x.data_ptr() % 16
    with torch.autocast("cuda", HALF):
        assert relative(layer(x), x.double() @ matrix.T + offset) < 5e-3


@pytest.mark.parametrize("backend", PATTERNS)
def test_gradients_that_nobody_needs_are_not_made(backend):
    mask = mask_for(backend, (64, 64))
    layer, matrix, _ = layer_for(backend, mask)
    layer.weight.requires_grad_(False)
    x = torch.randn(40, 64, device=GPU, dtype=HALF, requires_grad=True)
    with torch.autocast("cuda", HALF):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert relative(x.grad, matrix.sum(0).expand(40, 64)) < 5e-3


@pytest.mark.parametrize("backend", PATTERNS)
def test_input_without_rows_gives_an_output_without_rows(backend):
    mask = mask_for(backend, ODD[backend])
    layer, _, _ = layer_for(backend, mask)
    with torch.autocast("cuda", HALF):
        y = layer(torch.randn(2, 0, mask.shape[1], device=GPU))
    assert y.shape == (2, 0, mask.shape[0])
    y.sum().backward()
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("backend", PATTERNS)
def test_products_are_the_same_bits_each_time(backend):
    layer, _, _ = layer_for(backend, mask_for(backend, (512, 512)))
    x = torch.randn(1000, 512, device=GPU, dtype=HALF)
    seen = []
    for _ in range(5):
        layer.weight.grad = None
        with torch.autocast("cuda", HALF):
            y = layer(x)
        y.square().sum().backward()
        seen.append((y.detach(), layer.weight.grad))
    assert torch.equal(seen[-2][0], seen[-1][0])  # the first ones may be those of another algorithm
    assert torch.equal(seen[-2][1], seen[-1][1])


@pytest.mark.parametrize("backend", PATTERNS)
def test_weights_written_to_behind_torch_are_multiplied_as_they_are(backend):
    """As other libraries' optimizers do."""
    layer, matrix, offset = layer_for(backend, mask_for(backend, (64, 64)))
    x = torch.randn(20, 64, device=GPU, dtype=HALF)
    with torch.autocast("cuda", HALF):
        layer(x)
        layer.weight.data.mul_(2)
        assert relative(layer(x), x.double() @ (2 * matrix).T + offset) < 5e-3


@pytest.mark.parametrize("backend", PATTERNS)
def test_captured_passes_give_the_results_of_plain_ones(backend):
    mask = mask_for(backend, (256, 256))
    layer, _, _ = layer_for(backend, mask)
    x, grad = (torch.randn(128, 256, device=GPU, dtype=HALF) for _ in range(2))

    def passes():
        layer.weight.grad = None
        with torch.autocast("cuda", HALF):
            y = layer(x)
        y.backward(grad)
        return y.detach(), layer.weight.grad

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            passes()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = passes()
    with torch.no_grad():
        layer.weight.normal_()
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    ours = [tensor.clone() for tensor in captured]
    for mine, other in zip(ours, passes(), strict=True):
        assert relative(mine, other.double()) < 5e-3


# Models


def net(width=64):
    return TokenNet(width, vocab=16, down=Conv1D)


def parameterized(backend, **settings):
    torch.manual_seed(0)
    model = net()
    density = {} if backend == "2:4" else {"density": 0.25}
    plan = smupar.parameterize(model, base=net(32), pattern=PATTERNS[backend], reset=False, **density, **settings)
    return model.to(GPU), plan


def pair(backend):
    dense, plan = parameterized(backend)
    sparse = copy.deepcopy(dense)
    smupar.attach(dense, plan)
    smupar.sparsify_storage(sparse, plan, backend=backend, dtype=HALF)
    return dense, sparse, plan


def adamw(model, plan):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01), fused=True)


def train(model, optimizer, steps, *, parts=1, after=lambda: None):
    losses = []
    for step in range(steps):
        tokens = torch.randint(16, (32, 8), generator=torch.Generator().manual_seed(step)).to(GPU)
        total = 0.0
        for part in tokens.chunk(parts):
            with torch.autocast("cuda", HALF):
                loss = F.cross_entropy(model(part).flatten(0, 1).float(), ((3 * part + 1) % 16).flatten()) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(total)
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("backend", PATTERNS)
@pytest.mark.parametrize("parts", [1, 2])
def test_100_adamw_steps_match_the_masked_dense_model(backend, parts):
    """To 1e-2 of the first loss, not to 1e-4 as on a CPU: both round activations to bfloat16, 4e-3 apart, in another order."""
    dense, sparse, plan = pair(backend)
    losses = [train(model, adamw(model, plan), 100, parts=parts) for model in (dense, sparse)]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert ((losses[0] - losses[1]).abs() / losses[0][0]).max() < 1e-2


@pytest.mark.parametrize("backend", PATTERNS)
def test_dense_and_sparse_models_hold_the_same_bits(backend):
    dense, sparse, plan = pair(backend)
    expected = dense.state_dict()
    made = smupar.dense_state_dict(sparse)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in expected)
    dense.load_state_dict(sparse.state_dict())
    sparse.load_state_dict(dense.state_dict())
    smupar.sparsify_storage(sparse, plan, backend="dense")
    assert type(sparse.up) is nn.Linear
    assert all(torch.equal(value, expected[key]) for key, value in sparse.state_dict().items())


def test_rigl_moves_csr_masks_as_those_of_the_dense_model():
    dense, sparse, plan = pair("csr")
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        sparsifier = smupar.RigL(model, plan, optimizer, every=5, stop=20)
        losses = train(model, optimizer, 25, after=sparsifier.step)
        assert losses[-1] < losses[0]
    start = parameterized("csr")[0]
    for name in HIDDEN:
        assert not torch.equal(mask_of(sparse, name), mask_of(start, name))
        assert mask_of(sparse, name).sum() == mask_of(start, name).sum()
        agree = (mask_of(sparse, name) & mask_of(dense, name)).sum() / mask_of(dense, name).sum()
        assert agree > 0.7  # rounding decides between weights that are nearly as small
    layer = sparse.up
    x = torch.randn(30, 64, device=GPU, dtype=HALF)
    with torch.autocast("cuda", HALF):
        y = layer(x)
    assert relative(y, x.double() @ layer.expand(layer.weight.detach()).to(HALF).double().T + layer.bias.double()) < 5e-3


def test_measured_updates_are_those_of_the_dense_model():
    dense, sparse, plan = pair("csr")
    traces = []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        with smupar.record_updates(model, plan, optimizer) as trace:
            train(model, optimizer, 6)
        traces.append(trace)
    for name in HIDDEN:
        expected, ours = (torch.tensor(trace.effects[name]) for trace in traces)
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("backend", ["2:4", "block"])
def test_masks_that_a_backend_cannot_hold_do_not_move_it(backend):
    _, sparse, _ = pair(backend)
    before = sparse.up.weight_mask
    with pytest.raises(ValueError, match=r"cannot hold the moved mask.*backend='csr'"):
        sparse.up.move_nonzeros(torch.rand(128, 64, device=GPU) < 0.5)
    assert torch.equal(sparse.up.weight_mask, before)


def test_sparse_layers_follow_a_model_between_devices():
    dense, sparse, _ = pair("csr")
    tokens = torch.randint(16, (4, 8))
    torch.testing.assert_close(sparse.cpu()(tokens), dense.cpu()(tokens), rtol=1e-4, atol=1e-5)
    with torch.autocast("cuda", HALF):
        ours, theirs = sparse.to(GPU)(tokens.to(GPU)), dense.to(GPU)(tokens.to(GPU))
    assert relative(ours, theirs.double()) < 1e-2
    _, sparse, _ = pair("2:4")
    with pytest.raises(ValueError, match="'2:4' needs an NVIDIA GPU"):
        sparse.cpu()(tokens)


# Choosing


@pytest.mark.parametrize("backend", PATTERNS)
def test_auto_never_keeps_what_it_measured_as_slower(backend):
    model, plan = parameterized(backend)
    report = smupar.sparsify_storage(model, plan, tokens=512, dtype=HALF)
    for layer in report.layers:
        assert layer.seconds.keys() >= {"dense", "csr"}
        assert layer.backend == "dense" or layer.seconds[layer.backend] < layer.seconds["dense"]
        kept = isinstance(model.get_submodule(layer.name.removesuffix(".weight")), SparseLinear)
        assert kept == (layer.backend != "dense")


def test_auto_says_which_backend_failed_and_goes_on(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no kernel for this shape")

    model, plan = parameterized("csr")
    monkeypatch.setattr(gpu.GpuKernel, "forward", fails)
    for layer in smupar.sparsify_storage(model, plan, tokens=64, dtype=HALF).layers:
        assert layer.backend == "dense"
        assert "csr: RuntimeError: no kernel for this shape" in layer.note


@pytest.mark.parametrize("backend", PATTERNS)
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_kernel_that_fails_shows_at_once_and_leaves_the_model_as_it_was(monkeypatch, backend, what):
    def fails(*_, **__):
        raise RuntimeError("no kernel for this GPU")

    model, plan = parameterized(backend)
    before = list(model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(gpu.GpuKernel, what, fails)
        with pytest.raises(RuntimeError, match="no kernel for this GPU"):
            smupar.sparsify_storage(model, plan, backend=backend, dtype=HALF)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert type(model.mix) is nn.Linear
    smupar.sparsify_storage(model, plan, backend=backend, dtype=HALF)
    train(model, adamw(model, plan), 2)


@pytest.mark.parametrize("captured", [False, True])
def test_auto_times_every_backend_that_can_hold_a_layer(captured):
    mask = drawn("block-128", (1024, 1024), Fraction(1, 32))
    layer = nn.Linear(1024, 1024, bias=False).to(GPU)
    timing = auto.timing_of(layer, mask, ["csr", "block"], auto.Work(1024, dtype=HALF, captured=captured), {})
    assert timing.failures == {}
    assert timing.seconds.keys() == {"dense", "csr", "block"}


def test_dtype_comes_from_autocast_or_the_weights():
    model, plan = parameterized("csr")
    with pytest.raises(ValueError, match=r"'mix.weight'.*activations are torch.float32.*dtype=torch.bfloat16"):
        smupar.sparsify_storage(model, plan, backend="csr")
    assert type(model.mix) is nn.Linear
    with torch.autocast("cuda", HALF):
        smupar.sparsify_storage(model, plan, backend="csr")
    assert isinstance(model.mix, SparseLinear)
    with pytest.raises(ValueError, match=r"multiplies torch.bfloat16 on a GPU, the input is torch.float32"):
        model(torch.randint(16, (2, 8), device=GPU))
    with pytest.raises(ValueError, match=r"pattern=.2:4-transposable"):
        smupar.sparsify_storage(model, plan, backend="2:4", dtype=HALF)
    assert missing("csr", GPU) is None
    assert model.mix.backend == "csr"


# Runs


@pytest.mark.parametrize("storage", ["csr", "2:4", "block", "auto"])
@pytest.mark.parametrize("way", [{}, {"compile": True}, {"graph": True}], ids=["plain", "compiled", "graph"])
def test_runs_train_however_they_are_stored(tmp_path, storage, way):
    pattern = PATTERNS.get(storage, "random")
    run = RunConfig(
        model=ModelConfig(width=128, depth=1, head_dim=64),
        base_width=64,
        pattern=pattern,
        sparsity=None if storage == "2:4" else 0.75,
        steps=20,
        batch_size=8,
        seq_len=64,
        dtype="bf16",
    )
    how = Execution(device="cuda", compile=False, valid_every=10)
    dense = lm_train(run, replace(how, out=str(tmp_path / "dense")))
    sparse = lm_train(run, replace(how, out=str(tmp_path / "sparse"), storage=storage, **way))
    assert sparse.train_loss == pytest.approx(dense.train_loss, rel=1e-2)
    assert load_run(tmp_path / "sparse").plan == load_run(tmp_path / "dense").plan


def test_run_in_fp32_says_what_a_gpu_needs(tmp_path):
    run = RunConfig(model=ModelConfig(width=128, depth=1, head_dim=64), base_width=64, sparsity=0.75, steps=4)
    with pytest.raises(ValueError, match="--dtype bf16"):
        lm_train(run, Execution(out=str(tmp_path / "run"), device="cuda", compile=False, storage="csr"))


# The benchmark


def test_benchmark_writes_table_numbers_and_picture(tmp_path):
    table = bench_sparse(repeats=1, out=str(tmp_path), device="cuda", width=256, widths=(256,), tokens=512)
    numbers = json.loads((tmp_path / "sparse.json").read_text())
    rows, found = numbers["rows"], {(row["what"], row["side"]) for row in numbers["rows"]}
    for side in ("dense bf16", "csr", "2:4", "block-64", "block-128"):
        assert {("layer", side), ("layer", f"{side} captured")} <= found
    for side in ("dense bf16", "masked dense", "csr", "2:4", "block"):
        assert {("layers", side), ("layers", f"{side} captured")} <= found
    assert any(what == "layers" and side.startswith("auto: ") for what, side in found)
    assert {("product", "csr captured"), ("product", "csr with packing"), ("product", "cuSPARSE")} <= found
    assert [line for line in numbers["missed"] if "cuSPARSE captured" not in line] == []
    assert all(row["peak_bytes"] > 0 for row in rows)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "sparse.png").read_bytes().startswith(b"\x89PNG")
    assert table.count("\n") > len(rows)
