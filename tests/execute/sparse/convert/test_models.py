"""Models that keep only non-zeros: training, state dicts, checkpoints, runs."""

import copy
import io
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.model.gpt import build
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World
from smupar.lm.run.train import train as lm_train
from smupar.lm.use.load import load_run
from smupar.model.attached import mask_of
from smupar.model.sparse_linear import SparseLinear
from tests.execute.sparse.kept import HIDDEN, adamw, assert_same_weights, batch, loss_of, net, pair, parameterized, train
from tests.support.models import VOCAB, Conv1D


def gpt():
    model = ModelConfig(width=64, depth=1, head_dim=16, vocab_size=VOCAB)
    made, plan = build(RunConfig(model=model, base_width=32, sparsity=0.75))
    smupar.sparsify_storage(made, plan, backend="csr")
    return made, plan


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
        values = [[{k: v for k, v in group.items() if k != "params"} for group in groups] for groups in both]
        assert values[0] == values[1]


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
    other = net(16)
    plan = smupar.parameterize(other, base=net(8), density=0.25, reset=False)
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
    for converted, backend in zip((model, again), backends, strict=True):
        smupar.sparsify_storage(converted, plan, backend=backend)
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
    layer.move_nonzeros(new)
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
