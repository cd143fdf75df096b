"""Layers that keep only their non-zeros: exact against the masked dense ones, through everything that a training run does."""

import copy
import io
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import smupar
from smupar.bench.sparse import gpu as bench_gpu
from smupar.bench.sparse import run as bench_run
from smupar.bench.sparse.rows import Machine
from smupar.bench.sparse.run import bench_sparse
from smupar.execute.sparse import auto, backends, convert, cpu
from smupar.execute.sparse.backends import compress
from smupar.execute.sparse.cpu import Compiled, Torch, best_kernel, to_csc
from smupar.lm.config.run import Execution, ModelConfig, RunConfig
from smupar.lm.model.gpt import build
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World
from smupar.lm.run.train import train as lm_train
from smupar.lm.use.load import load_run
from smupar.model.compressed import SparseLinear
from smupar.model.csr import flat_places, row_index
from smupar.model.parameterize import mask_of

VOCAB = 11
KERNELS = [Compiled(), Torch()]


class Net(nn.Module):
    """Hidden weights of 32 x 32, 64 x 32 and 32 x 64 at width 32; ``down`` stores (in, out), as GPT-2 does."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = Conv1D(width, 2 * width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.gelu(self.mix(self.norm(x)))
        return self.head(x + self.down(F.gelu(self.up(x))))


HIDDEN = ["mix.weight", "up.weight", "down.weight"]


def parameterized(density=0.25, *, dtype=torch.float32, seed=0, **settings):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    return model, smupar.parameterize(model, base=Net(16), density=density, reset=False, seed=seed, **settings)


def pair(density=0.25, **settings):
    """The same model twice, dense with masks and as non-zeros, and their plan."""
    dense, plan = parameterized(density, **settings)
    sparse = copy.deepcopy(dense)
    smupar.attach(dense, plan)
    smupar.sparsify_storage(sparse, plan, backend="csr")
    return dense, sparse, plan


def adamw(model, plan, **settings):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.02, weight_decay=0.1), **settings)


def batch(step, num=16):
    tokens = torch.randint(VOCAB, (num, 8), generator=torch.Generator().manual_seed(step))
    return tokens, (3 * tokens + 1) % VOCAB


def loss_of(model, step):
    tokens, targets = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model, optimizer, steps, *, start=0, after=lambda: None):
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return torch.tensor(losses)


def matrix(model, name):
    """The whole weight, however it is kept."""
    module = model.get_submodule(name.removesuffix(".weight"))
    return module.expand(module.weight.detach()) if isinstance(module, SparseLinear) else module.weight.detach()


def assert_same_weights(a, b, **tolerance):
    for name, one in a.named_parameters():
        first = matrix(a, name) if name in HIDDEN else one
        second = matrix(b, name) if name in HIDDEN else b.get_parameter(name)
        torch.testing.assert_close(first, second, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def layer_pair(mask, *, dtype=torch.float32, bias=True, kernel=None, transposed=False):
    """A dense linear layer and the same one as non-zeros."""
    out_size, in_size = mask.shape if not transposed else mask.T.shape
    dense = (Conv1D(out_size, in_size) if transposed else nn.Linear(in_size, out_size, bias=bias)).to(dtype)
    with torch.no_grad():
        dense.weight.normal_().masked_fill_(~mask, 0)
        if dense.bias is not None:
            dense.bias.normal_()
    sparse = copy.deepcopy(dense)
    sparse.register_buffer("weight_mask", mask)
    compress(sparse, mask, out_dim=int(transposed))
    if kernel is not None:
        sparse.kernel_of = lambda _: kernel
    return dense, sparse


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def assert_same_products(dense, sparse, mask, x, tolerance):
    """Forward and every gradient, relative to the masked dense layer in double precision."""
    grad = torch.randn(*x.shape[:-1], dense(x).shape[-1], dtype=x.dtype)
    exact = copy.deepcopy(dense).double()
    exact_x, sparse_x = x.detach().double().requires_grad_(), x.detach().clone().requires_grad_()
    exact_y, sparse_y = exact(exact_x), sparse(sparse_x)
    exact_y.backward(grad.double())
    sparse_y.backward(grad)
    assert sparse_y.shape == exact_y.shape
    assert relative(sparse_y.double(), exact_y) < tolerance
    assert relative(sparse_x.grad.double(), exact_x.grad) < tolerance
    assert relative(sparse.expand(sparse.weight.grad).double(), exact.weight.grad.masked_fill(~mask, 0)) < tolerance
    if dense.bias is not None:
        assert relative(sparse.bias.grad.double(), exact.bias.grad) < tolerance


# Products


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.125, 0.5, 1.0])
@pytest.mark.parametrize(
    ("out_size", "in_size", "tokens"), [(64, 64, 128), (37, 70, 51), (130, 17, 1), (1, 1, 3), (5, 300, 200)]
)
def test_products_are_those_of_the_masked_dense_layer(kernel, density, out_size, in_size, tokens):
    torch.manual_seed(0)
    mask = torch.rand(out_size, in_size) < density
    dense, sparse = layer_pair(mask, kernel=kernel)
    assert_same_products(dense, sparse, mask, torch.randn(tokens, in_size), 1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_products_with_empty_rows_and_columns_are_those_of_the_dense_layer(kernel):
    torch.manual_seed(0)
    mask = torch.rand(40, 50) < 0.3
    mask[[0, 7, 39]] = False
    mask[:, [0, 20, 49]] = False
    dense, sparse = layer_pair(mask, kernel=kernel)
    assert_same_products(dense, sparse, mask, torch.randn(70, 50), 1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_products_of_a_layer_that_stores_in_out_are_those_of_the_dense_one(kernel):
    torch.manual_seed(0)
    mask = torch.rand(50, 30) < 0.2
    dense, sparse = layer_pair(mask, kernel=kernel, transposed=True)
    assert_same_products(dense, sparse, mask, torch.randn(2, 33, 50), 1e-5)


def test_products_of_large_layers_stay_exact_for_every_tile_size():
    torch.manual_seed(0)
    for out_size, in_size, tokens in ((300, 5000, 40), (5000, 300, 300), (700, 600, 700)):
        mask = torch.rand(out_size, in_size) < 1 / 32
        dense, sparse = layer_pair(mask, bias=False)
        assert_same_products(dense, sparse, mask, torch.randn(tokens, in_size), 1e-5)


def test_products_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    mask = torch.rand(96, 80) < 0.2
    results = []
    for threads in (1, 2, 3):
        torch.manual_seed(1)
        dense, sparse = layer_pair(mask)
        torch.set_num_threads(threads)
        assert_same_products(dense, sparse, mask, torch.randn(333, 80), 1e-5)
        results.append(sparse.weight.grad)
    torch.set_num_threads(1)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_pass_gradcheck(kernel, transposed):
    torch.manual_seed(0)
    mask = torch.rand(9, 13) < 0.4
    _, sparse = layer_pair(mask, dtype=torch.float64, kernel=kernel, transposed=transposed)

    def function(x, values, bias):
        return torch.func.functional_call(sparse, {"weight": values, "bias": bias}, (x,))

    x = torch.randn(3, 5, sparse.matrix_shape[1 - sparse.out_dim], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, sparse.weight, sparse.bias))


def test_gradients_that_nobody_needs_are_not_made():
    mask = torch.rand(20, 30) < 0.3
    dense, sparse = layer_pair(mask)
    x = torch.randn(40, 30)
    sparse(x).sum().backward()
    dense(x).sum().backward()
    torch.testing.assert_close(sparse.expand(sparse.weight.grad), dense.weight.grad.masked_fill(~mask, 0))
    sparse.weight.requires_grad_(False)
    x.requires_grad_()
    sparse(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.weight.sum(0).expand(40, 30))


def test_bfloat16_layers_round_once():
    torch.manual_seed(0)
    mask = torch.rand(64, 96) < 0.25
    dense, sparse = layer_pair(mask, dtype=torch.bfloat16)
    assert_same_products(dense, sparse, mask, torch.randn(70, 96, dtype=torch.bfloat16), 6e-3)
    assert sparse(torch.randn(3, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_gives_what_a_linear_layer_gives():
    mask = torch.rand(64, 96) < 0.25
    dense, sparse = layer_pair(mask)
    x = torch.randn(5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = sparse(x), dense(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.05)


def test_products_are_the_same_bits_each_time():
    torch.manual_seed(0)
    _, sparse = layer_pair(torch.rand(200, 300) < 0.1)
    x = torch.randn(500, 300)
    grads = []
    for _ in range(2):
        sparse.weight.grad = None
        sparse(x).square().sum().backward()
        grads.append(sparse.weight.grad)
    assert torch.equal(*grads)


# The index


def test_index_is_exact_beyond_two_to_the_24():
    """A float32 cannot tell 2^24 from 2^24 + 1."""
    mask = torch.ones(2, 2**23 + 5, dtype=torch.bool)
    mask[0, 1] = False
    starts, columns = row_index(mask)
    assert starts.dtype == torch.int64
    assert columns.dtype == torch.int32
    assert starts.tolist() == [0, 2**23 + 4, 2**24 + 9]
    assert columns[-1] == 2**23 + 4
    assert flat_places(starts, columns, mask.shape[1])[-3:].tolist() == [2**24 + 7, 2**24 + 8, 2**24 + 9]


@pytest.mark.slow
def test_products_beyond_two_to_the_24_non_zeros_are_exact():
    torch.manual_seed(0)
    dense, sparse = layer_pair(mask := torch.rand(4100, 4200) < 0.99, bias=False)
    assert len(sparse.weight) > 2**24
    assert_same_products(dense, sparse, mask, torch.randn(3, 4200), 1e-5)


def test_columns_list_every_non_zero_by_column():
    torch.manual_seed(0)
    mask = torch.rand(11, 7) < 0.4
    mask[:, 3] = False
    starts, columns = row_index(mask)
    view = to_csc(starts, columns, 7)
    expected_starts, expected_rows = row_index(mask.T)
    assert torch.equal(view.starts, expected_starts)
    assert torch.equal(view.indices, expected_rows)
    values = torch.randn(int(mask.sum()))
    weight = torch.zeros(11, 7).masked_scatter(mask, values)
    assert torch.equal(view.values(values), weight.T[mask.T])
    assert torch.equal(view.back(view.values(values)), values)


def test_index_of_raw_memory_is_refused():
    """A kernel would read where it points."""
    _, sparse = layer_pair(torch.rand(8, 8) < 0.5)
    sparse(torch.randn(2, 8))
    with torch.no_grad():
        sparse.weight_columns[0] = 1000
    with pytest.raises(ValueError, match="damaged"):
        sparse(torch.randn(2, 8))


# A model


def test_sparsified_model_gives_the_same_logits_and_report():
    dense, sparse, plan = pair()
    tokens, _ = batch(0)
    torch.testing.assert_close(sparse(tokens), dense(tokens))
    report = smupar.sparsify_storage(sparse, plan, backend="csr")
    assert [(layer.name, layer.backend, layer.density) for layer in report.layers] == [(n, "csr", 0.25) for n in HIDDEN]
    assert "mix.weight" in str(report)


def test_weights_keep_their_names_and_hold_non_zeros_alone():
    dense, sparse, _ = pair(1 / 8)
    assert [name for name, _ in sparse.named_parameters()] == [name for name, _ in dense.named_parameters()]
    for name in HIDDEN:
        assert sparse.get_parameter(name).shape == (int(mask_of(dense, name).sum()),)
        assert torch.equal(mask_of(sparse, name), mask_of(dense, name))


def test_100_adamw_steps_match_the_masked_dense_model():
    dense, sparse, plan = pair()
    losses = [train(model, adamw(model, plan), 100) for model in (dense, sparse)]
    assert losses[0][-1] < 0.5 * losses[0][0]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
    assert_same_weights(dense, sparse, rtol=0, atol=1e-3)


def test_optimizer_state_has_the_size_of_the_non_zeros():
    """Weights and both of AdamW's averages, with all indices, at density 1/128: at most 2.5 % of the dense bytes."""
    model, dense_bytes = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 4)), 3 * 4 * 512 * 512
    base = nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 128), nn.Linear(128, 4))
    plan = smupar.parameterize(model, base=base, density=1 / 128, reset=False)
    smupar.sparsify_storage(model, plan, backend="csr")
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    layer = model[1]
    state = [value for value in optimizer.state[layer.weight].values() if value.ndim]
    assert len(state) == 2
    held = sum(tensor.numel() * tensor.element_size() for tensor in [layer.weight, *state]) + layer.num_index_bytes
    assert held <= 0.025 * dense_bytes


def test_param_groups_give_the_values_the_factors_of_the_weight():
    dense, sparse, plan = pair()
    for optimizer in ("adamw", "sgd"):
        both = [smupar.param_groups(m, plan, lr=0.1, weight_decay=0.1, optimizer=optimizer) for m in (dense, sparse)]
        facts = [[{k: v for k, v in group.items() if k != "params"} for group in groups] for groups in both]
        assert facts[0] == facts[1]


def test_audit_passes_and_sees_a_wrong_init():
    _, sparse, plan = pair(0.5)
    smupar.audit(sparse, plan, adamw(sparse, plan))
    with torch.no_grad():
        sparse.up.weight.mul_(2)
    with pytest.raises(smupar.AuditError, match=r"up.weight.*init std"):
        smupar.audit(sparse, plan)


def test_audit_sees_an_optimizer_made_before():
    model, plan = parameterized()
    optimizer = adamw(model, plan)
    smupar.sparsify_storage(model, plan, backend="csr")
    with pytest.raises(smupar.AuditError, match="in no optimizer group"):
        smupar.audit(model, plan, optimizer)


def test_hooks_and_identity_of_a_layer_stay():
    model, plan = parameterized()
    layer = model.up
    layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    tokens, _ = batch(0)
    expected = model(tokens)
    smupar.sparsify_storage(model, plan, backend="csr")
    assert model.up is layer
    assert isinstance(layer, SparseLinear)
    torch.testing.assert_close(model(tokens), expected)


def test_dense_backend_goes_all_the_way_back():
    dense, sparse, plan = pair()
    report = smupar.sparsify_storage(sparse, plan, backend="dense")
    assert {layer.backend for layer in report.layers} == {"dense"}
    assert type(sparse.up) is nn.Linear
    assert type(sparse.down) is Conv1D
    assert dense.state_dict().keys() == sparse.state_dict().keys()
    assert all(torch.equal(value, dense.state_dict()[key]) for key, value in sparse.state_dict().items())
    losses = [train(model, adamw(model, plan), 5) for model in (dense, sparse)]
    assert torch.equal(*losses)


def test_frozen_weights_stay_frozen():
    model, plan = parameterized()
    model.up.weight.requires_grad_(False)
    smupar.sparsify_storage(model, plan, backend="csr")
    assert not model.up.weight.requires_grad
    loss_of(model, 0).backward()
    assert model.up.weight.grad is None


def test_deepcopy_is_a_model_of_its_own():
    _, sparse, plan = pair()
    tokens, _ = batch(0)
    before = sparse(tokens)
    twin = copy.deepcopy(sparse)
    smupar.attach(twin, plan)
    train(twin, adamw(twin, plan), 3)
    torch.testing.assert_close(sparse(tokens), before)
    assert not torch.allclose(twin(tokens), before)


def test_model_that_evaluated_first_trains_the_same():
    (_, sparse, plan), (_, other, _) = pair(), pair()
    for module in sparse.modules():
        if isinstance(module, SparseLinear):
            module.forget_index()
    with torch.inference_mode():
        sparse(batch(0)[0])
    for model in (sparse, other):
        train(model, adamw(model, plan), 2)
    assert all(torch.equal(own, its) for own, its in zip(sparse.parameters(), other.parameters(), strict=True))


def test_conversion_to_double_gives_a_double_model():
    dense, sparse, _ = pair()
    tokens, _ = batch(0)
    torch.testing.assert_close(sparse.double()(tokens), dense.double()(tokens))


# State dicts


def test_state_dict_of_either_kind_loads_into_either_kind():
    sources = pair(seed=1)[:2]
    for source in sources:
        for target in pair(seed=0)[:2]:
            target.load_state_dict(source.state_dict())
            assert_same_weights(source, target)
            assert all(torch.equal(mask_of(source, name), mask_of(target, name)) for name in HIDDEN)


def test_dense_state_dict_is_that_of_the_dense_model():
    dense, sparse, _ = pair()
    made, expected = smupar.dense_state_dict(sparse), dense.state_dict()
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in made)


def test_state_dict_with_another_number_of_non_zeros_loads():
    _, few, _ = pair(0.1)
    _, many, _ = pair(0.4)
    parameter = many.up.weight
    many.load_state_dict(few.state_dict())
    assert many.up.weight is parameter
    assert_same_weights(few, many)
    tokens, _ = batch(0)
    torch.testing.assert_close(many(tokens), few(tokens))


def test_state_dict_without_masks_loads_with_a_warning():
    dense, sparse, _ = pair()
    state = {key: value for key, value in dense.state_dict().items() if not key.endswith("_mask")}
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        sparse.load_state_dict(state)
    assert_same_weights(dense, sparse)


def test_state_dict_of_another_width_is_refused():
    _, sparse, _ = pair()
    other = Net(16)
    plan = smupar.parameterize(other, base=Net(8), density=0.25, reset=False)
    for backend in ("dense", "csr"):
        smupar.sparsify_storage(other, plan, backend=backend)
        with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|does not fit"):
            sparse.load_state_dict(other.state_dict())


def test_resumed_run_has_the_bits_of_the_uninterrupted_one():
    _, sparse, plan = pair()
    optimizer = adamw(sparse, plan)
    train(sparse, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": sparse.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = train(sparse, optimizer, 5, start=5)
    _, again, _ = pair(seed=0)
    resumed = adamw(again, plan)
    file.seek(0)
    saved = torch.load(file)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(train(again, resumed, 5, start=5), straight)


def gpt():
    model = ModelConfig(width=64, depth=1, head_dim=16, vocab_size=VOCAB)
    made, plan = build(RunConfig(model=model, base_width=32, sparsity=0.75))
    smupar.sparsify_storage(made, plan, backend="csr")
    return made, plan


def test_checkpoint_brings_back_masks_that_moved_and_became_fewer(tmp_path):
    world = World(0, 1, torch.device("cpu"), "ddp")
    model, plan = gpt()
    optimizer = adamw(model, plan)
    sparsifier = smupar.GMP(model, plan, optimizer, density=0.1, every=2, stop=4)
    straight = train(model, optimizer, 3, after=sparsifier.step)
    checkpoint.save(tmp_path, 3, model, [optimizer], {}, world)
    straight = train(model, optimizer, 1, start=3)
    again, _ = gpt()
    resumed = adamw(again, plan)
    checkpoint.load(checkpoint.latest(tmp_path), again, [resumed])
    assert torch.equal(train(again, resumed, 1, start=3), straight)


@pytest.mark.parametrize("backends", [("csr", "dense"), ("dense", "csr")], ids=" then ".join)
def test_checkpoint_is_read_by_a_model_that_keeps_its_weights_another_way(tmp_path, backends):
    world = World(0, 1, torch.device("cpu"), "ddp")
    (model, plan), (again, _) = gpt(), gpt()
    for one, backend in zip((model, again), backends, strict=True):
        smupar.sparsify_storage(one, plan, backend=backend)
    optimizer, resumed = adamw(model, plan), adamw(again, plan)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path, 3, model, [optimizer], {}, world)
    checkpoint.load(checkpoint.latest(tmp_path), again, [resumed])
    ours, theirs = smupar.dense_state_dict(again), smupar.dense_state_dict(model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = train(again, resumed, 2, start=3), train(model, optimizer, 2, start=3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_run_is_the_same_however_it_is_stored_and_goes_on_either_way(tmp_path):
    model = ModelConfig(width=64, depth=1, head_dim=16)
    run = RunConfig(model=model, base_width=32, sparsity=0.75, steps=6, batch_size=2, seq_len=32, dynamic="rigl", mask_every=2)
    how = Execution(device="cpu", save_every=3, keep=9)
    dense = lm_train(run, replace(how, out=str(tmp_path / "dense")))
    sparse = lm_train(run, replace(how, out=str(tmp_path / "sparse"), storage="csr"))
    assert sparse.train_loss == pytest.approx(dense.train_loss, rel=1e-5)
    assert load_run(tmp_path / "sparse").plan == load_run(tmp_path / "dense").plan
    (tmp_path / "sparse" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "sparse" / "checkpoints" / checkpoint.folder_name(6))
    again = lm_train(run, replace(how, out=str(tmp_path / "sparse"), storage="dense"))
    assert again.train_loss == pytest.approx(dense.train_loss, rel=1e-5)
    weights = (load_run(tmp_path / name).model.state_dict() for name in ("sparse", "dense"))
    for ours, theirs in zip(*(state.values() for state in weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("change", "says"), [({"dynamic": "gmp"}, "starts dense"), ({"optimizer": "muon"}, "whole matrices")])
def test_runs_that_need_matrices_say_so(tmp_path, change, says):
    run = RunConfig(model=ModelConfig(width=64, depth=1, head_dim=16), base_width=32, sparsity=0.75, steps=4, mask_every=1)
    with pytest.raises(ValueError, match=f"{says}.*: leave out --storage csr"):
        lm_train(replace(run, **change), Execution(out=str(tmp_path / "run"), device="cpu", storage="csr"))
    assert not (tmp_path / "run" / "config.json").exists()


# Masks that move


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_moving_masks_follow_those_of_the_dense_model(kind):
    dense, sparse, plan = pair()
    losses = []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        sparsifier = getattr(smupar, kind)(model, plan, optimizer, every=3, stop=20, restart_bias_correction=True)
        losses.append(train(model, optimizer, 25, after=sparsifier.step))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
    start = parameterized()[0]
    for name in HIDDEN:
        assert torch.equal(mask_of(dense, name), mask_of(sparse, name))
        assert not torch.equal(mask_of(sparse, name), mask_of(start, name))
        assert mask_of(sparse, name).sum() == mask_of(start, name).sum()


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_moved_masks_keep_values_and_state_of_what_stays(kind):
    _, sparse, plan = pair()
    optimizer = adamw(sparse, plan)
    sparsifier = getattr(smupar, kind)(sparse, plan, optimizer, every=4, stop=20)
    train(sparse, optimizer, 3, after=sparsifier.step)
    optimizer.zero_grad()
    loss_of(sparse, 3).backward()
    optimizer.step()
    layer = sparse.up
    tensors = {"weight": layer.weight.detach(), **{k: v for k, v in optimizer.state[layer.weight].items() if v.ndim}}
    before, old = {name: layer.expand(tensor) for name, tensor in tensors.items()}, layer.weight_mask
    assert sparsifier.step()
    new = layer.weight_mask
    assert not torch.equal(old, new)
    state = optimizer.state[layer.weight]
    for name, matrix_before in before.items():
        now = layer.expand(layer.weight.detach() if name == "weight" else state[name])
        assert torch.equal(now, matrix_before.masked_fill(~(old & new), 0))


@pytest.mark.parametrize("pool", ["layer", "global"])
def test_gradual_pruning_follows_that_of_the_dense_model(pool):
    dense, sparse, plan = pair(0.5)
    losses = []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        sparsifier = smupar.GMP(model, plan, optimizer, density=0.1, every=3, stop=15, pool=pool)
        losses.append(train(model, optimizer, 20, after=sparsifier.step))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
    assert sum(len(sparse.get_parameter(name)) for name in HIDDEN) == pytest.approx(0.1 * 5120, abs=2)
    for name in HIDDEN:
        assert torch.equal(mask_of(dense, name), mask_of(sparse, name))


def test_iterative_pruning_goes_back_to_the_same_weights():
    dense, sparse, plan = pair(0.5)
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        sparsifier = smupar.IMP(model, plan, optimizer, density=0.1, rounds=2, every=4, rewind=1)
        train(model, optimizer, 8, after=sparsifier.step)
    assert_same_weights(dense, sparse, rtol=0, atol=1e-6)


def test_dense_gradient_is_made_only_in_steps_that_need_it():
    _, sparse, plan = pair()
    optimizer = adamw(sparse, plan)
    sparsifier = smupar.RigL(sparse, plan, optimizer, every=2, stop=4)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(sparse, step).backward()
        seen.append(sparse.up.dense.value is not None)
        optimizer.step()
        sparsifier.step()
    assert seen == [False, True, False, True, False, False]


def test_products_after_a_mask_change_are_those_of_the_dense_layer():
    """The columns must move along."""
    torch.manual_seed(0)
    for density in (0.3, 0.1, 0.8):
        _, sparse = layer_pair(torch.rand(40, 30) < 0.3)
        sparse(torch.randn(4, 30))
        mask = torch.rand(40, 30) < density
        sparse.set_mask(mask)
        with torch.no_grad():
            sparse.weight.normal_()
        dense = nn.Linear(30, 40)
        dense.load_state_dict({"weight": sparse.expand(sparse.weight.detach()), "bias": sparse.bias.detach()})
        assert_same_products(dense, sparse, mask, torch.randn(20, 30), 1e-5)


def test_masks_given_to_attach_are_taken():
    _, sparse, plan = pair(masks={name: torch.rand(64, 32) < 0.3 for name in ["up.weight"]}, density=None)
    mask = torch.rand(64, 32) < 0.3
    smupar.attach(sparse, plan, masks={"up.weight": mask})
    assert torch.equal(sparse.up.weight_mask, mask)


def test_fan_in_init_scales_as_in_the_dense_model():
    dense, sparse, plan = pair()
    for model in (dense, sparse):
        smupar.fan_in_init(model, plan)
    assert_same_weights(dense, sparse)


# Measured updates


def test_measured_updates_are_those_of_the_dense_model():
    dense, sparse, plan = pair()
    traces = []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        with smupar.record_updates(model, plan, optimizer) as trace:
            train(model, optimizer, 6)
        traces.append(trace)
    for name in HIDDEN:
        assert traces[0].shapes[name] == traces[1].shapes[name]
        torch.testing.assert_close(
            torch.tensor(traces[0].effects[name]), torch.tensor(traces[1].effects[name]), rtol=1e-3, atol=0
        )


def test_following_a_trace_gives_the_run_of_the_dense_model():
    proxy = Net(16)
    proxy_plan = smupar.parameterize(proxy, base=Net(8), reset=False)
    optimizer = adamw(proxy, proxy_plan)
    with smupar.record_updates(proxy, proxy_plan, optimizer) as trace:
        train(proxy, optimizer, 12)
    dense, sparse, plan = pair()
    losses = []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        smupar.follow_updates(model, plan, optimizer, trace=trace)
        losses.append(train(model, optimizer, 12))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-4)


# Choosing


def test_auto_says_what_it_chose_and_measures_each_kind_of_layer_once():
    model, plan = parameterized()
    expected = model(batch(0)[0])
    report = smupar.sparsify_storage(model, plan, tokens=64)
    for layer in report.layers:
        assert layer.seconds.keys() == {"dense", "csr"}
        assert layer.backend == min(layer.seconds, key=layer.seconds.get)
        assert isinstance(model.get_submodule(layer.name.removesuffix(".weight")), SparseLinear) == (layer.backend == "csr")
    torch.testing.assert_close(model(batch(0)[0]), expected)


def test_auto_leaves_random_numbers_alone():
    model, plan = parameterized()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    smupar.sparsify_storage(model, plan, tokens=8)
    assert torch.equal(torch.rand(3), expected)


def _choose(rank, folder):
    """On a rank that measures other times than the other one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2)
    auto._measured = lambda *_: auto.Timing({"dense": 1.0, "csr": 0.5 + rank}, {})
    model, plan = parameterized()
    report = smupar.sparsify_storage(model, plan)
    (folder / str(rank)).write_text(" ".join(layer.backend for layer in report.layers))
    dist.destroy_process_group()


def test_ranks_choose_what_the_first_measured(tmp_path):
    mp.spawn(_choose, (tmp_path,), 2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["csr csr csr"] * 2


def convnet(width):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(16 * width, 4))


def test_auto_leaves_layers_dense_that_cannot_be_sparse():
    model = convnet(16)
    plan = smupar.parameterize(model, base=convnet(8), density=0.5, reset=False)
    (layer,) = smupar.sparsify_storage(model, plan).layers
    assert layer.backend == "dense"
    assert "Conv2d is not a plain linear layer" in layer.note


# Without a compiler


def test_without_a_compiler_torch_does_it_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for cached in (cpu._library, best_kernel):
        cached.cache_clear()
    with pytest.warns(smupar.SparseWarning, match=r"no C\+\+ compiler"):
        dense, sparse, _ = pair()
    tokens, _ = batch(0)
    torch.testing.assert_close(sparse(tokens), dense(tokens))
    for cached in (cpu._library, best_kernel):
        cached.cache_clear()


def test_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: out of ink' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    cpu._library.cache_clear()
    with pytest.raises(cpu.NoKernel, match="out of ink"):
        cpu.library()
    cpu._library.cache_clear()


# Bad input


def assert_untouched(model, call, match):
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=match):
        call()
    assert kinds == [type(module) for module in model.modules()]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("backend", ["2:4", "block"])
def test_backend_for_another_device_says_what_is_missing(backend):
    model, plan = parameterized()
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend=backend), f"'{backend}' needs an NVIDIA GPU")


def test_unknown_backend_is_refused():
    model, plan = parameterized()
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="coo"), "'auto', 'dense', 'csr'")


def test_layer_kind_that_cannot_be_held_is_refused():
    model = convnet(16)
    plan = smupar.parameterize(model, base=convnet(8), density=0.5, reset=False)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), r"'1.weight'.*Conv2d is not")


def test_layer_whose_weight_is_read_without_calling_it_is_refused():
    def encoder(width):
        layer = nn.TransformerEncoderLayer(width, width // 16, 2 * width, batch_first=True)
        return nn.Sequential(nn.Linear(4, width), layer, nn.Linear(width, 4))

    model = encoder(64)
    density = {"*linear1.weight": 0.25, "*": 1.0}
    plan = smupar.parameterize(model, base=encoder(32), density=density, reset=False)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), "without calling it when it evaluates")


def test_weight_that_two_layers_share_is_refused():
    def tied(width):
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4))
        model[2].weight = model[1].weight
        return model

    model = tied(32)
    plan = smupar.parameterize(model, base=tied(16), density=0.5, reset=False)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), "tied to another layer")


def test_dtype_that_cannot_be_multiplied_is_refused():
    model, plan = parameterized(dtype=torch.float16)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), r"'mix.weight'.*torch.float16")


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.int64, "one of torch.float16.*torch.int64"),
        (torch.float8_e4m3fn, "got torch.float8_e4m3fn"),
        ("bf16", "got 'bf16'"),
        (torch.float64, r"'mix.weight' is torch.float32.*model.double\(\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "csr", "dense"])
def test_dtype_that_activations_do_not_have_is_refused(dtype, says, backend):
    dense, sparse, plan = pair()
    for model in (dense, sparse):
        assert_untouched(model, lambda model=model: smupar.sparsify_storage(model, plan, backend=backend, dtype=dtype), says)


def test_double_activations_go_with_double_weights():
    model, plan = parameterized(dtype=torch.float64)
    smupar.sparsify_storage(model, plan, backend="csr", dtype=torch.float64)
    assert isinstance(model.mix, SparseLinear)


def failing_at(call, number):
    """Raises at a call of a function, counted from 1."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise ValueError("no room for this one")
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("place", ["conversion", "index"])
def test_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch, place, number):
    dense, sparse, plan = pair()
    expected = dense(batch(0)[0])
    for model in (dense, sparse):
        with monkeypatch.context() as patch:
            if place == "conversion":
                patch.setattr(backends, "compress", failing_at(compress, number))
            else:
                patch.setattr(Compiled, "index", failing_at(Compiled.index, number))
            assert_untouched(model, lambda model=model: smupar.sparsify_storage(model, plan, backend="csr"), "no room")
        torch.testing.assert_close(model(batch(0)[0]), expected)
        smupar.sparsify_storage(model, plan, backend="csr")
        torch.testing.assert_close(model(batch(0)[0]), expected)
        train(model, adamw(model, plan), 2)
        assert not matrix(model, "up.weight")[~mask_of(model, "up.weight")].any()
        expected = dense(batch(0)[0]) if model is sparse else expected


def test_interrupted_measuring_leaves_the_model_as_it_was(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    _, sparse, plan = pair()
    before = list(sparse.parameters())
    monkeypatch.setattr(convert, "timing_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smupar.sparsify_storage(sparse, plan)
    assert all(a is b for a, b in zip(before, sparse.parameters(), strict=True))
    assert isinstance(sparse.up, SparseLinear)


def test_auto_measures_a_sparse_model_as_the_dense_one_and_keeps_its_weights():
    dense, sparse, plan = pair()
    report = smupar.sparsify_storage(sparse, plan, tokens=8)
    assert all(layer.seconds.keys() == {"dense", "csr"} for layer in report.layers)
    assert_same_weights(dense, sparse)
    torch.testing.assert_close(sparse(batch(0)[0]), dense(batch(0)[0]))


def test_plan_of_another_model_is_refused():
    model, _ = parameterized()
    other = smupar.make_plan(Net(64), base=Net(16), density=0.25)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, other, backend="csr"), "of another model or width")


def test_model_without_a_plan_or_masks_is_refused():
    model = Net()
    plan = smupar.make_plan(model, base=Net(16), density=0.25)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), "not parameterized")
    model, plan = parameterized(1.0)
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend="csr"), "has a mask")


def test_wrapped_model_is_refused():
    model, plan = parameterized()
    wrapped = nn.DataParallel(model)
    assert_untouched(model, lambda: smupar.sparsify_storage(wrapped, plan, backend="csr"), "wrapped in a DataParallel")


def test_muon_is_refused_for_non_zeros():
    _, sparse, plan = pair()
    with pytest.raises(ValueError, match="Muon takes matrices only"):
        smupar.param_groups(sparse, plan, lr=0.01, optimizer="muon", only="hidden")


def test_input_of_another_size_or_dtype_is_refused():
    _, sparse = layer_pair(torch.rand(8, 6) < 0.5)
    with pytest.raises(ValueError, match="reads 6 features"):
        sparse(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"torch.float64.*torch.float32"):
        sparse(torch.randn(3, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="the input is on meta"):
        sparse(torch.randn(3, 6, device="meta"))


def test_input_without_rows_gives_an_output_without_rows():
    _, sparse = layer_pair(torch.rand(8, 6) < 0.5)
    y = sparse(torch.randn(2, 0, 6))
    assert y.shape == (2, 0, 8)
    y.sum().backward()
    assert not sparse.weight.grad.any()


# The benchmark


def test_benchmark_writes_table_numbers_and_picture(tmp_path):
    tiny = ModelConfig(width=64, depth=1, head_dim=16, vocab_size=VOCAB)
    table = bench_sparse(
        repeats=1, out=str(tmp_path), device="cpu", densities=(1 / 8,), widths=(32,), width=64, tokens=32, depth=1, gpt=tiny
    )
    facts = json.loads((tmp_path / "sparse.json").read_text())
    found = {(row["what"], row["width"], round(1 / row["density"]), row["side"]) for row in facts["rows"]}
    for side in ("dense fp32", "dense bf16", "torch csr", "csr"):
        assert ("layers", 64, 8, side) in found
        assert ("layers", 32, 32, side) in found
    assert ("gpt", 64, 32, "auto") in found
    assert (tmp_path / "sparse.png").read_bytes().startswith(b"\x89PNG")
    assert len([line for line in table.splitlines() if line.startswith(("layers", "gpt"))]) == len(facts["rows"])


@pytest.fixture
def no_gpu(monkeypatch):
    """The benchmark for GPUs on a CPU, which has csr and nothing else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(bench_gpu, "_GPU", torch.device("cpu"))
    monkeypatch.setattr(bench_run, "measure_machine", lambda device: Machine(1e9, 1e9))
    monkeypatch.setattr(bench_gpu, "_peak_bytes", lambda call: (call(), 5_000_000)[1])
    monkeypatch.setattr(bench_gpu, "_captured", lambda call: call)
    monkeypatch.setattr(bench_gpu, "synced_seconds_of", lambda call, num: (call(), 2e-3)[1])
    monkeypatch.setattr(bench_gpu, "gc", SimpleNamespace(collect=lambda: None))  # takes long in a process full of tests


TINY = {"repeats": 1, "device": "cuda", "width": 128, "widths": (128,), "densities": (1 / 8,), "tokens": 16, "depth": 1}


def test_benchmark_goes_on_without_backends_and_says_why(tmp_path, no_gpu):
    table = bench_sparse(out=str(tmp_path), **TINY)
    facts = json.loads((tmp_path / "sparse.json").read_text())
    found = {(row["what"], row["side"]) for row in facts["rows"]}
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
        assert any(missed.startswith(line) for missed in facts["missed"]), line
        assert f"\n{line}" in table
    assert {row["peak_bytes"] for row in facts["rows"]} == {5_000_000}
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
    monkeypatch.setattr(bench_gpu, "_captured", fails)
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


@pytest.mark.parametrize("backend", ["csr", "dense"])
def test_optimizer_of_replaced_weights_is_refused(backend):
    model, plan = parameterized()
    if backend == "dense":
        smupar.sparsify_storage(model, plan, backend="csr")
    optimizer = adamw(model, plan)
    smupar.audit(model, plan, optimizer)
    train(model, optimizer, 1)
    smupar.sparsify_storage(model, plan, backend=backend)
    with pytest.raises(ValueError, match="sparsify_storage has replaced, and would train nothing: make param_groups"):
        train(model, optimizer, 1)
    train(model, adamw(model, plan), 1)


def test_gradients_go_along_with_weights_that_move():
    model, plan = parameterized()
    smupar.sparsify_storage(model, plan, backend="csr")
    layer = model.mix
    layer.weight.grad = torch.arange(1.0, len(layer.weight) + 1)
    before, old = layer.expand(layer.weight.grad), layer.weight_mask
    new = old.roll(1, 1)
    layer.set_mask(new)
    torch.testing.assert_close(layer.expand(layer.weight.grad), before.masked_fill(~(old & new), 0))


@pytest.mark.parametrize(("saved", "resumed"), [("dense", "csr"), ("csr", "dense"), ("csr", "csr")])
def test_optimizer_state_goes_on_whichever_way_weights_were_kept(saved, resumed):
    def start(backend):
        model, plan = parameterized(dtype=torch.float64)
        smupar.sparsify_storage(model, plan, backend=backend)
        return model, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1))

    def steps(model, optimizer, numbers):
        for number in numbers:
            tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(number))
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, optimizer = start("dense")
    steps(whole, optimizer, range(6))
    first, optimizer = start(saved)
    steps(first, optimizer, range(3))
    model, again = start(resumed)
    steps(model, again, [99])  # a step before the state is loaded, so that it is looked at again
    model.load_state_dict(first.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, again, range(3, 6))
    for name, tensor in smupar.dense_state_dict(model).items():
        torch.testing.assert_close(tensor, whole.state_dict()[name])


def test_copy_of_a_sparse_model_takes_optimizer_state_of_matrices():
    model, plan = parameterized()
    before = adamw(model, plan)
    model(torch.arange(VOCAB)[None]).sum().backward()
    before.step()
    smupar.sparsify_storage(model, plan, backend="csr")
    again = copy.deepcopy(model)
    optimizer = adamw(again, plan)
    optimizer.load_state_dict(before.state_dict())
    again(torch.arange(VOCAB)[None]).sum().backward()
    optimizer.step()
    assert optimizer.state[again.mix.weight]["exp_avg"].shape == again.mix.weight.shape
