"""parameterize and attach: what is added to a model, what is not, and what survives copies, casts, checkpoints, optimizers."""

import copy
import hashlib
import io
import pickle
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lion_pytorch import Lion
from torch import nn

import smupar
from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.model.gpt import GPT, build
from smupar.model.parameterize import mask_updates
from smupar.model.seam import seam_of

VOCAB = 11
HIDDEN = ("hidden.0.weight", "hidden.1.weight")
MASKS = {f"{name}_mask" for name in HIDDEN}
GPT_CONFIG = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=8, vocab_size=VOCAB), base_width=16, sparsity=0.75)


class Net(nn.Module):
    """Every role with biases: lookup, pre-norm residual hidden layers, an untied head."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.hidden, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


class Outer(nn.Module):
    """A model inside another one."""

    def __init__(self, width=32):
        super().__init__()
        self.inner = Net(width)

    def forward(self, tokens):
        return self.inner(tokens)


def on_meta(cls, *args, **kwargs):
    with torch.device("meta"):
        return cls(*args, **kwargs)


def make(*, model=None, global_seed=0, **settings):
    """A parameterized Net and its plan: width 32 against 16, a quarter of the hidden weights kept."""
    if model is None:
        torch.manual_seed(global_seed)
        model = Net()
    settings = {"base": on_meta(Net, 16), "density": 0.25, "alpha_input": 5.0, "alpha_output": 3.0, **settings}
    return model, smupar.parameterize(model, **settings)


def batch(step=0, size=8, length=6):
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (size, length + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, data):
    tokens, targets = data
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model, optimizers, steps, forward=None):
    losses = []
    for step in range(steps):
        loss = loss_of(model if forward is None else forward, batch(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def masks_of(model):
    return {key.removesuffix("_mask"): mask for key, mask in model.state_dict().items() if key.endswith("_mask")}


def off_mask(model, tensor_of):
    """Largest size of ``tensor_of(parameter)`` where the mask is False, over all sparse parameters."""
    parameters, masks = dict(model.named_parameters()), masks_of(model)
    assert masks
    return max(tensor_of(parameters[name])[~mask].abs().max().item() for name, mask in masks.items())


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def frozen_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def hooks_of(model):
    """All hooks of all modules and parameters."""
    hooks = {
        (path, kind): list(found.values())
        for path, module in model.named_modules()
        for kind, found in vars(module).items()
        if kind.endswith("_hooks") and isinstance(found, dict)
    }
    for name, parameter in model.named_parameters():
        hooks[name, "gradient"] = list((parameter._post_accumulate_grad_hooks or {}).values())
    return hooks


def assert_same_tensors(found, expected):
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def assert_close(found, expected, *, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# What a model looks like afterwards


def test_parameters_keep_names_shapes_dtypes_and_requires_grad():
    model = Net()
    model.hidden[0].bias.requires_grad_(False)
    identity = {name: id(p) for name, p in model.named_parameters()}
    look = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    make(model=model)
    assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()] == look
    # An optimizer made before parameterize still holds the right tensors.
    assert {name: id(p) for name, p in model.named_parameters()} == identity


def test_state_dict_gains_mask_keys_and_nothing_else():
    plain = Net().state_dict()
    model, _ = make()
    state = model.state_dict()
    assert state.keys() - plain.keys() == MASKS
    assert [key for key in state if key in plain] == list(plain)
    assert {key: (value.shape, value.dtype) for key, value in state.items() if key in plain} == {
        key: (value.shape, value.dtype) for key, value in plain.items()
    }
    assert all(state[key].dtype == torch.bool and state[key].shape == (32, 32) for key in MASKS)


def test_state_dict_of_a_dense_model_keeps_its_keys():
    model, _ = make(density=1.0)
    assert list(model.state_dict()) == list(Net().state_dict())


def test_tied_gpt_keeps_its_tie_and_keys():
    model, _ = build(GPT_CONFIG)
    assert model.unembedding.weight is model.embedding.weight
    plain = GPT(GPT_CONFIG.model).state_dict()
    added = model.state_dict().keys() - plain.keys()
    assert plain.keys() <= model.state_dict().keys()
    leaves = ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    assert added == {f"blocks.0.{leaf}.weight_mask" for leaf in leaves}


def test_masks_keep_a_quarter_and_weights_are_zero_off_them():
    model, _ = make()
    for name, mask in masks_of(model).items():
        weight = model.get_parameter(name)
        assert mask.sum() == 256  # a quarter of 32 x 32, exactly
        assert torch.count_nonzero(weight) == 256
        # sigma = 1 / sqrt(16) of the base, m_in = 2 and m_rho = 1/4: 0.25 / sqrt(2 / 4); 256 samples scatter by 4.4 %
        assert weight[mask].std().item() == pytest.approx(0.25 * 2**0.5, rel=0.2)
    assert off_mask(model, lambda p: p) == 0


def test_vectors_keep_the_values_of_the_model():
    model = Net()
    with torch.no_grad():
        model.norms[0].weight.fill_(3.0)
        model.head.bias.fill_(0.5)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
    make(model=model)
    for name, values in kept.items():
        assert torch.equal(model.get_parameter(name), values), name


@pytest.mark.parametrize("arrival", ["deepcopy", "assign", "pickle"])
def test_vectors_of_a_copied_or_loaded_model_keep_their_values(arrival):
    source = Net()
    with torch.no_grad():
        source.norms[0].weight.fill_(3.0)
        source.hidden[0].bias.fill_(0.5)
    if arrival == "deepcopy":
        model = copy.deepcopy(source)
    elif arrival == "pickle":
        model = pickle.loads(pickle.dumps(source))
    else:
        model = Net()
        model.load_state_dict(frozen_state(source), assign=True)
    # A copy cannot be told from raw memory by itself (no parameter was ever written in place): the user says which it is.
    make(model=model, reset=False)
    assert model.norms[0].weight.unique().tolist() == [3.0]
    assert model.hidden[0].bias.unique().tolist() == [0.5]


def test_fresh_values_for_a_model_that_was_never_written_come_with_a_warning():
    model = copy.deepcopy(Net())
    with pytest.warns(smupar.PlanWarning, match="norms and biases.*get fresh values. Pass reset=True to say so") as seen:
        make(model=model)
    assert model.norms[0].weight.unique().tolist() == [1.0]
    assert any("reset=False" in str(warning.message) for warning in seen)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no parameter of the model")
        make(model=copy.deepcopy(Net()), reset=True)


def test_bias_set_as_a_fresh_parameter_keeps_its_value():
    model = Net()
    model.hidden[0].bias = nn.Parameter(torch.full((32,), 0.5))  # as one sets the forget gate of an LSTM
    make(model=model)
    assert model.hidden[0].bias.unique().tolist() == [0.5]


def test_forward_stays_plain_up_to_the_two_factors():
    model, _ = make()
    tokens, _ = batch()
    x = 5.0 * F.embedding(tokens, model.embedding.weight)
    for norm, layer in zip(model.norms, model.hidden, strict=True):
        x = x + F.gelu(F.linear(F.layer_norm(x, (32,), norm.weight, norm.bias), layer.weight, layer.bias))
    # alpha_output / m_d = 3 / 2 on the head's input, so that its bias is not scaled
    assert torch.equal(model(tokens), F.linear(1.5 * x, model.head.weight, model.head.bias))
    assert type(model.hidden[0]) is nn.Linear
    assert not model.hidden[0]._forward_hooks
    assert not model.hidden[0]._forward_pre_hooks


# Forward factors


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
def test_forward_factors_apply_in_every_mode(mode):
    model, _ = make()
    model.train(mode == "train")
    x, tokens = torch.ones(2, 32), torch.tensor([1, 4])
    context = {"no_grad": torch.no_grad(), "inference": torch.inference_mode()}.get(mode, torch.enable_grad())
    with context:
        assert torch.equal(model.head(x), F.linear(1.5 * x, model.head.weight, model.head.bias))
        assert torch.equal(model.embedding(tokens), 5.0 * model.embedding.weight[tokens])


def test_forward_factor_leaves_the_bias_of_the_head():
    model, _ = make()
    assert torch.equal(model.head(torch.zeros(1, 32))[0], model.head.bias)


def test_forward_factor_applies_to_keyword_calls():
    model, _ = make()
    x, tokens = torch.ones(2, 32), torch.tensor([1, 4])
    assert torch.equal(model.head(input=x), model.head(x))
    assert torch.equal(model.embedding(input=tokens), model.embedding(tokens))


def test_forward_factors_of_a_tied_weight_differ_by_use():
    model, plan = build(GPT_CONFIG)
    x, tokens = torch.ones(2, 32), torch.tensor([1, 4])
    assert_close(model.embedding(tokens), 9.17 * model.embedding.weight[tokens])
    assert_close(model.unembedding(x), 1.095 / 2 * F.linear(x, model.embedding.weight))
    assert dict(plan["embedding.weight"].forward) == {"embedding": 9.17, "unembedding": 0.5475}


# dtypes, copies, meta


def test_bf16_model_stays_bf16_and_trains():
    model = Net().bfloat16()
    model, plan = make(model=model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(batch()[0]).dtype == torch.bfloat16
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2))
    smupar.audit(model, plan, optimizer)
    losses = train(model, [optimizer], 20)
    assert losses[-1] < losses[0]
    assert off_mask(model, lambda p: p.float()) == 0
    reference, _ = make()  # masks depend on seed and name, not on the dtype
    assert_same_tensors(masks_of(model), masks_of(reference))


def test_bf16_after_parameterize_rounds_the_factor_and_attach_restores_it():
    model, plan = make(alpha_output=1.095)
    masks = masks_of(model)
    model.bfloat16()
    assert float(model.head.smupar_factor) != pytest.approx(0.5475, rel=1e-4)  # bf16 has 8 bits: the reason to attach
    smupar.attach(model, plan)
    assert model.head.smupar_factor.dtype == torch.float32
    assert model.head.smupar_factor.item() == torch.tensor(0.5475).item()
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    scaled = (x.float() * 0.5475).bfloat16()  # one rounding, of the product
    assert torch.equal(model.head(x), F.linear(scaled, model.head.weight, model.head.bias))
    assert_same_tensors(masks_of(model), masks)
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad.float()) == 0


def test_attach_twice_changes_nothing():
    model, plan = make()
    state, hooks = frozen_state(model), hooks_of(model)
    smupar.attach(model, plan)
    smupar.attach(model, plan)
    assert_same_tensors(model.state_dict(), state)
    assert hooks_of(model) == hooks


def test_deepcopy_then_attach_masks_gradients_with_the_copys_own_mask():
    model, plan = make()
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    smupar.audit(twin, plan)
    before = frozen_state(model)
    twin.hidden[0].weight_mask[0] = False
    loss_of(twin, batch()).backward()
    assert off_mask(twin, lambda p: p.grad) == 0
    assert not twin.hidden[0].weight.grad[0].any()
    assert all(p.grad is None for p in model.parameters())
    assert_same_tensors(model.state_dict(), before)


def test_deepcopy_then_attach_trains_as_the_original():
    model, plan = make()
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    runs = [
        train(one, [torch.optim.AdamW(smupar.param_groups(one, plan, lr=1e-2, weight_decay=0.1))], 5) for one in (model, twin)
    ]
    assert runs[0] == runs[1]
    assert_same_tensors(twin.state_dict(), model.state_dict())


def test_deepcopy_loads_checkpoints_by_its_own_masks():
    model, _ = make()
    twin = copy.deepcopy(model)
    twin.hidden[0].weight_mask[0] = False
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        twin.load_state_dict({key: torch.ones_like(value) for key, value in Net().state_dict().items()})
    assert not twin.hidden[0].weight[0].any()
    assert model.hidden[0].weight_mask[0].any()


def test_meta_model_is_refused_with_the_remedy():
    model = on_meta(Net)
    with pytest.raises(ValueError, match=r"'embedding.weight'.*to_empty"):
        make(model=model)
    assert not list(model.buffers())


def raw_memory(model):
    """to_empty, with worst-case leftovers in the memory; through .data, as the allocator leaves no trace on a tensor."""
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def test_target_from_meta_equals_one_built_normally():
    model, plan = make(model=raw_memory(on_meta(Net)))
    assert model.norms[0].weight.unique().tolist() == [1.0]
    for bias in (model.norms[1].bias, model.hidden[0].bias, model.head.bias):
        assert bias.unique().tolist() == [0.0]
    reference = Net()
    for layer in (*reference.hidden, reference.head):  # nn.Linear draws its bias from the global RNG, and it would be kept
        nn.init.zeros_(layer.bias)
    make(model=reference)
    assert_same_tensors(model.state_dict(), reference.state_dict())
    assert torch.equal(model(batch()[0]), reference(batch()[0]))
    smupar.audit(model, plan)


def test_gpt_from_meta_equals_one_built_normally():
    model = raw_memory(on_meta(GPT, GPT_CONFIG.model))
    base = on_meta(GPT, ModelConfig(width=16, depth=1, head_dim=8, vocab_size=VOCAB))
    with pytest.raises(ValueError, match=r"unembedding\.weight"):  # to_empty makes two tensors of a tied one
        smupar.parameterize(model, base=base, density=0.25)
    model.unembedding.weight = model.embedding.weight
    smupar.parameterize(model, base=base, density=0.25, init_std=0.087, alpha_input=9.17, alpha_output=1.095)
    reference, _ = build(GPT_CONFIG)
    assert_same_tensors(model.state_dict(), reference.state_dict())


# Gradients


def test_off_mask_gradients_are_exactly_zero_and_others_are_plain():
    model, _ = make()
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad) == 0
    parameters = dict(model.named_parameters())
    plain = torch.autograd.grad(loss_of(model, batch()), list(parameters.values()))
    for (name, parameter), expected in zip(parameters.items(), plain, strict=True):
        masked = expected * masks_of(model)[name] if name in HIDDEN else expected
        assert torch.equal(parameter.grad, masked), name
    assert plain[list(parameters).index("hidden.0.weight")].ne(0).all()  # so there was something to mask


def test_gradient_accumulation_equals_one_big_batch():
    model, _ = make()
    tokens, targets = batch(size=8)
    loss_of(model, (tokens, targets)).backward()
    whole = gradients(model)
    model.zero_grad()
    for start in range(0, 8, 2):
        (loss_of(model, (tokens[start : start + 2], targets[start : start + 2])) / 4).backward()
        assert off_mask(model, lambda p: p.grad) == 0
    assert_close(gradients(model), whole)


def test_clip_grad_norm_sees_masked_gradients_only():
    model, _ = make()
    plain = torch.autograd.grad(loss_of(model, batch()), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    masks = masks_of(model)
    kept = [g[masks[name]] if name in masks else g.flatten() for name, g in zip(names, plain, strict=True)]
    expected, dense = (torch.cat([g.flatten() for g in some]).norm().item() for some in (kept, plain))
    loss_of(model, batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), expected / 2)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    assert dense > 1.02 * expected  # the test can tell the two apart
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert clipped == pytest.approx(expected / 2, rel=1e-4)


def test_double_backward_keeps_off_mask_gradients_zero():
    model, _ = make()
    # torch warns that create_graph makes a reference cycle between parameter and gradient; zero_grad below breaks it.
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss_of(model, batch()).backward(create_graph=True)
    penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
    penalty.backward()
    assert off_mask(model, lambda p: p.grad) == 0
    model.zero_grad()


# Optimizers


def optimizers_of(kind, model, plan):
    def groups(optimizer, lr, **options):
        return smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, optimizer=optimizer, **options)

    if kind == "adamw":
        return [torch.optim.AdamW(groups("adamw", 1e-2))]
    if kind == "sgd":
        return [torch.optim.SGD(groups("sgd", 1e-2), momentum=0.9, nesterov=True)]
    if kind == "lion":
        return [Lion(groups("lion", 1e-3))]
    muon = torch.optim.Muon(groups("muon", 1e-2, only="hidden"))
    return [muon, torch.optim.AdamW(groups("adamw", 1e-2, only="rest"))]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "muon"])
def test_off_mask_weights_stay_exactly_zero_for_50_steps(kind):
    model, plan = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    start = frozen_state(model)
    optimizers = optimizers_of(kind, model, plan)
    smupar.audit(model, plan, optimizers)
    losses = train(model, optimizers, 50)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert off_mask(model, lambda p: p) == 0
    assert_same_tensors(masks_of(model), masks)
    for name in HIDDEN:  # every kept weight did train
        moved = model.get_parameter(name) != start[name]
        assert torch.equal(moved, masks[name])
    smupar.audit(model, plan, optimizers)


def test_adam_state_off_mask_is_exactly_zero():
    model, plan = make()
    [optimizer] = optimizers_of("adamw", model, plan)
    train(model, [optimizer], 50)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert off_mask(model, lambda p, moment=moment: optimizer.state[p][moment]) == 0
        kept = [optimizer.state[model.get_parameter(name)][moment][mask] for name, mask in masks_of(model).items()]
        assert all(values.ne(0).all() for values in kept)


def test_attach_masks_the_weights_of_any_optimizer_once():
    model, plan = make()
    for optimizer in (optimizers_of("muon", model, plan)[0], optimizers_of("adamw", model, plan)[0]):
        smupar.attach(model, plan, optimizer)
        smupar.attach(model, plan, [optimizer])
        assert seam_of(optimizer).owners("mask") == [mask_updates]


# torch.compile


def check_compiled(model, plan, forward, steps=3):
    """The same loss, gradients and training as the eager twin."""
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    loss, eager = loss_of(forward, batch()), loss_of(twin, batch())
    loss.backward()
    eager.backward()
    assert_close(loss, eager)
    assert_close(gradients(model), gradients(twin), rtol=1e-4)
    assert off_mask(model, lambda p: p.grad) == 0
    model.zero_grad()
    twin.zero_grad()
    run, eager_run = (
        train(one, [torch.optim.AdamW(smupar.param_groups(one, plan, lr=1e-2))], steps, forward=call)
        for one, call in ((model, forward), (twin, twin))
    )
    assert run == pytest.approx(eager_run, rel=1e-4)
    assert off_mask(model, lambda p: p) == 0


# torch's own: importing inductor defines script methods, which torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_trains_as_eager(backend):
    torch._dynamo.reset()
    model, plan = make()
    check_compiled(model, plan, torch.compile(model, fullgraph=True, backend=backend))


def test_compiled_gpt_trains_as_eager():
    torch._dynamo.reset()
    model, plan = build(GPT_CONFIG)
    check_compiled(model, plan, torch.compile(model, fullgraph=True, backend="aot_eager"))


def test_compiled_model_keeps_its_factors_beside_a_plain_twin_that_was_compiled_before():
    torch._dynamo.reset()
    tokens = batch()[0]
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # torch's default
        torch.compile(Net(), backend="eager")(tokens)
        model, _ = make()
        assert_close(torch.compile(model, backend="eager")(tokens), model(tokens))


def test_attach_and_param_groups_take_a_compiled_model():
    torch._dynamo.reset()
    model, plan = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiled(batch()[0])
    smupar.attach(compiled, plan)  # rebuilds the factors, which the compiled forward must still apply
    assert torch.equal(compiled(batch()[0]), before)
    groups, plain = (smupar.param_groups(one, plan, lr=1e-2) for one in (compiled, model))
    assert [group["lr"] for group in groups] == [group["lr"] for group in plain]
    assert [list(map(id, group["params"])) for group in groups] == [list(map(id, group["params"])) for group in plain]


def test_compiled_model_is_refused():
    model = Net()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"OptimizedModule.*parameterize first"):
        smupar.parameterize(compiled, base=on_meta(Net, 16), density=0.25)
    assert not list(model.buffers())


@pytest.mark.parametrize("part", ["", "inner"])
def test_model_compiled_in_place_is_refused(part):
    # A compiled forward that has run ignores hooks added later: the factors would be missing without a word.
    torch._dynamo.reset()
    model = Outer()
    model.get_submodule(part).compile(backend="eager")
    model(batch()[0])
    before = frozen_state(model)
    with pytest.raises(ValueError, match="compile"):
        make(model=model, base=on_meta(Outer, 16))
    assert_same_tensors(model.state_dict(), before)


# Wrapped, and a second time


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_wrapped_model_is_refused(one_process_group):
    model = Net()
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*parameterize first"):
        make(model=nn.parallel.DistributedDataParallel(model))
    assert not list(model.buffers())


def test_data_parallel_model_is_refused():
    with pytest.raises(ValueError, match=r"DataParallel.*parameterize first"):
        make(model=nn.DataParallel(Net()))


@pytest.mark.parametrize("density", [0.25, 1.0])
def test_second_parameterize_is_refused(density):
    model, _ = make(density=density)
    before, hooks = frozen_state(model), hooks_of(model)
    with pytest.raises(ValueError, match=r"parameterized already.*smupar\.attach"):
        make(model=model, density=density, seed=1)
    assert_same_tensors(model.state_dict(), before)
    assert hooks_of(model) == hooks


def test_parameterize_of_a_copy_is_refused():
    model, _ = make()
    with pytest.raises(ValueError, match="parameterized already"):
        make(model=copy.deepcopy(model))


def test_model_around_a_parameterized_one_is_refused():
    model = Outer()
    make(model=model.inner)
    with pytest.raises(ValueError, match="'inner' is parameterized already"):
        make(model=model, base=on_meta(Outer, 16))


def test_part_of_a_parameterized_model_is_refused():
    model, _ = make()
    before = frozen_state(model)
    with pytest.raises(ValueError, match="parameterized already"):
        smupar.parameterize(model.hidden, base=on_meta(Net, 16).hidden, density=0.5, seed=1)
    assert_same_tensors(model.state_dict(), before)


@pytest.mark.parametrize(
    ("other", "message"), [(Net(48), "48"), (Net(depth=1), r"norms\.1\.weight"), (nn.Linear(2, 2), "embedding")]
)
def test_attach_of_another_models_plan_is_refused(other, message):
    _, plan = make()
    other = copy.deepcopy(other)
    hooks = hooks_of(other)
    with pytest.raises(ValueError, match=message):
        smupar.attach(other, plan)
    assert not list(other.buffers())
    assert hooks_of(other) == hooks


# Checkpoints


def test_state_dict_restores_masks_and_logits_over_another_seed():
    model, plan = make(seed=0)
    train(model, [torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2))], 3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh, _ = make(seed=1, global_seed=1)
    assert not torch.equal(fresh.hidden[0].weight_mask, model.hidden[0].weight_mask)
    result = fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_tensors(fresh.state_dict(), model.state_dict())
    assert torch.equal(fresh(batch()[0]), model(batch()[0]))
    loss_of(fresh, batch()).backward()
    loss_of(model, batch()).backward()
    assert_same_tensors(gradients(fresh), gradients(model))


def test_checkpoint_of_a_dense_model_loads_with_a_warning():
    model, _ = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    checkpoint = Net().state_dict()
    copied = {key: value.clone() for key, value in checkpoint.items()}
    with pytest.warns(smupar.PlanWarning, match=r"no mask for 2 sparse parameters \('hidden.0.weight'"):
        result = model.load_state_dict(checkpoint, strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_tensors(checkpoint, copied)
    assert_same_tensors(masks_of(model), masks)
    for key, value in copied.items():
        assert torch.equal(model.state_dict()[key], value * masks[key] if key in masks else value), key
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad) == 0


def test_warning_about_a_dense_checkpoint_points_at_the_callers_line():
    model, _ = make()
    with pytest.warns(smupar.PlanWarning, match="no mask") as caught:
        model.load_state_dict(Net().state_dict())
    assert [item.filename for item in caught] == [__file__]


def test_off_mask_weights_become_zero_whatever_was_loaded():
    model, _ = make()
    checkpoint = Net().state_dict()
    checkpoint["hidden.0.weight"] = torch.full((32, 32), float("inf"))  # 0 * inf is nan: a product would not do
    with pytest.warns(smupar.PlanWarning):
        model.load_state_dict(checkpoint)
    mask = model.hidden[0].weight_mask
    assert model.hidden[0].weight[~mask].eq(0).all()
    assert model.hidden[0].weight[mask].isinf().all()


def test_checkpoint_through_a_wrapper_loads_alike():
    model = Outer()
    make(model=model.inner)
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        result = model.load_state_dict(Outer().state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert off_mask(model, lambda p: p) == 0


def test_partial_load_leaves_the_rest():
    model, _ = make()
    before = frozen_state(model)
    model.load_state_dict({"head.bias": torch.ones(VOCAB)}, strict=False)
    assert_same_tensors(model.state_dict(), {**before, "head.bias": torch.ones(VOCAB)})


def test_load_with_assign_keeps_gradient_masking():
    source, _ = make(seed=1)
    model, plan = make(seed=0)
    model.load_state_dict(frozen_state(source), assign=True)
    assert_same_tensors(model.state_dict(), source.state_dict())
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad) == 0
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2))
    smupar.audit(model, plan, optimizer)
    train(model, [optimizer], 5)
    assert off_mask(model, lambda p: p) == 0


def test_dense_checkpoint_with_assign_keeps_masks_and_masking():
    model, _ = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        model.load_state_dict(Net().state_dict(), assign=True)
    assert_same_tensors(masks_of(model), masks)
    assert off_mask(model, lambda p: p) == 0
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad) == 0


def test_plan_from_json_attaches_to_a_fresh_model_with_a_checkpoint():
    model, plan = make()
    fresh = Net()
    smupar.attach(fresh, smupar.Plan.from_json(plan.to_json()))
    fresh.load_state_dict(model.state_dict())
    smupar.audit(fresh, plan)
    assert torch.equal(fresh(batch()[0]), model(batch()[0]))
    loss_of(fresh, batch()).backward()
    assert off_mask(fresh, lambda p: p.grad) == 0


@pytest.mark.parametrize("way", ["torch.save", "pickle"])
def test_pickled_model_keeps_logits_and_masks_gradients_after_attach(way):
    model, plan = make()
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(batch()[0]), model(batch()[0]))
    smupar.attach(loaded, plan)
    smupar.audit(loaded, plan)
    loss_of(loaded, batch()).backward()
    assert off_mask(loaded, lambda p: p.grad) == 0


# Randomness


def matrices(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.ndim == 2}


def test_same_seed_gives_same_weights_and_masks_whatever_the_global_rng():
    one, _ = make(global_seed=1, seed=7)
    two, _ = make(global_seed=2, seed=7)
    assert_same_tensors(matrices(one), matrices(two))
    assert_same_tensors(masks_of(one), masks_of(two))


def test_other_seed_gives_other_weights_and_masks():
    one, _ = make(seed=0)
    two, _ = make(seed=1)
    for name, mask in masks_of(one).items():
        # Two random quarters of 1024 share 64 +- 6 positions.
        assert 30 < (mask & masks_of(two)[name]).sum() < 100
    assert not any(torch.equal(a, b) for a, b in zip(matrices(one).values(), matrices(two).values(), strict=True))


def test_layers_of_one_shape_get_masks_of_their_own():
    model, _ = make()
    assert 30 < (model.hidden[0].weight_mask & model.hidden[1].weight_mask).sum() < 100


def test_global_rng_is_untouched():
    for model in (Net(), raw_memory(on_meta(Net))):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        make(model=model)
        assert torch.equal(torch.get_rng_state(), before)


DIGEST = """
import hashlib, sys, torch
from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.model.gpt import build
torch.manual_seed(int(sys.argv[1]))
config = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=8, vocab_size=11), base_width=16, sparsity=0.75)
digest = hashlib.sha256()
for value in build(config)[0].state_dict().values():
    digest.update(value.numpy().tobytes())
print(digest.hexdigest())
"""


def test_same_seed_gives_the_same_model_in_another_process():
    digest = hashlib.sha256()
    for value in build(GPT_CONFIG)[0].state_dict().values():
        digest.update(value.numpy().tobytes())
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DIGEST, "123"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest.hexdigest()


# Masks of the user's own


def checkerboard(size=32):
    return torch.arange(size)[:, None].add(torch.arange(size)) % 2 == 0


@pytest.mark.parametrize("suffix", ["", "_mask"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_user_masks_are_used_as_given(suffix, dtype):
    given = checkerboard().to(dtype)
    with pytest.warns(smupar.PlanWarning, match="masks of your own"):
        model, plan = make(masks={f"hidden.0.weight{suffix}": given}, density=1.0)
    assert plan["hidden.0.weight"].density == 0.5
    assert not plan["hidden.1.weight"].masked
    assert model.hidden[0].weight_mask.dtype == torch.bool
    assert torch.equal(model.hidden[0].weight_mask, checkerboard())
    assert torch.equal(model.hidden[0].weight != 0, checkerboard())
    loss_of(model, batch()).backward()
    assert off_mask(model, lambda p: p.grad) == 0


def test_user_mask_is_copied():
    given = checkerboard()
    model, _ = make(masks={"hidden.0.weight": given})
    given.fill_(False)
    assert model.hidden[0].weight_mask.sum() == 512


def test_masks_of_a_state_dict_are_taken_whole():
    source, _ = make(seed=3)
    masks = {key: value for key, value in source.state_dict().items() if key.endswith("_mask")}
    model, plan = make(masks=masks, density=1.0, seed=3)
    assert_same_tensors(model.state_dict(), source.state_dict())  # the same seed: also the same weights
    assert plan["hidden.1.weight"].density == 0.25


def test_user_masks_and_density_share_a_model():
    model, plan = make(masks={"hidden.0.weight": checkerboard()}, density=0.25)
    assert (model.hidden[0].weight_mask.sum(), model.hidden[1].weight_mask.sum()) == (512, 256)
    assert (plan["hidden.0.weight"].pattern, plan["hidden.1.weight"].pattern) == ("given", "random")


# Bad input leaves the model as it was

ONES = torch.ones(32, 32)
NAN = float("nan")
BAD = {
    "density 0": ({"density": 0.0}, "density must lie in"),
    "density -1": ({"density": -1}, "density must lie in"),
    "density 1.5": ({"density": 1.5}, "density must lie in"),
    "density nan": ({"density": NAN}, "density must lie in"),
    "density of a layer nan": ({"density": {"hidden.0.*": NAN, "*": 0.5}}, r"density\['hidden.0.\*'\]"),
    "erk of 0": ({"density": smupar.erk(0.0)}, "density must lie in"),
    "base density 0": ({"base_density": 0.0}, "base_density must lie in"),
    "no weight left": ({"density": 1e-4}, r"'hidden.0.weight' of shape \(32, 32\) would lose every weight"),
    "no weight left in one layer": ({"density": {"hidden.1.*": 1e-4, "*": 0.5}}, "'hidden.1.weight'.*lose every weight"),
    "no weight left per neuron": ({"density": 0.01, "pattern": "fan_in"}, "lose every weight"),
    "no neuron left": ({"density": 0.01, "pattern": "neuron"}, "leaves none of 32 neurons"),
    "empty bernoulli draw": ({"density": 1e-7, "pattern": "bernoulli"}, "'hidden.0.weight' keeps no weight"),
    "empty bernoulli draw late": (
        {"density": {"hidden.1.*": 1e-7, "*": 0.5}, "pattern": "bernoulli"},
        "'hidden.1.weight' keeps no weight",
    ),
    "density glob": ({"density": {"layers.*": 0.5}}, r"density: 'layers.\*' matches none"),
    "density glob of a norm": ({"density": {"norms.*": 0.5}}, r"density: 'norms.\*' matches none"),
    "roles glob": ({"roles": {"layers.*": "hidden"}}, r"roles: 'layers.\*' matches none"),
    "unknown role": ({"roles": {"head.weight": "output"}}, "'head.weight'.*'output'"),
    "init_std glob": ({"init_std": {"layers.*": 0.1, "*": 0.1}}, r"init_std: 'layers.\*' matches none"),
    "init_std incomplete": ({"init_std": {"hidden.*": 0.1}}, "says nothing about embedding.weight, head.weight"),
    "init_std nan": ({"init_std": NAN}, "init_std must be a finite number"),
    "init_std -1": ({"init_std": -1.0}, "init_std must not be negative"),
    "init_std text": ({"init_std": "kaiming"}, "'kaiming'"),
    "alpha nan": ({"alpha_output": NAN}, "alpha_output must be a finite number"),
    "base of other class": ({"base": nn.Linear(2, 2)}, "base is a Linear, the model a Net"),
    "base of other depth": ({"base": Net(16, depth=3)}, "only in base: hidden.2"),
    "N:M does not divide": ({"density": None, "pattern": "4:9"}, "4:9 needs dimensions divisible by 9, this one is 32"),
    "N:M at another density": ({"density": 0.25, "pattern": "2:4"}, "2:4 keeps exactly 2/4"),
    "block does not divide": ({"pattern": "block-24"}, "divisible by 24"),
    "unknown rule": ({"rule": "mu"}, "unknown rule 'mu'"),
    "unknown pattern": ({"pattern": "checkerboard"}, "unknown pattern 'checkerboard'"),
    "mask of another model": ({"masks": {"layers.0.weight": ONES}}, "'layers.0.weight' is no parameter of this model"),
    "mask of another width": ({"masks": {"hidden.0.weight": ONES[:16]}}, r"\(16, 32\), the parameter \(32, 32\)"),
    "mask without a one": ({"masks": {"hidden.0.weight": 0 * ONES}}, "'hidden.0.weight' keeps no weight"),
    "mask of other values": ({"masks": {"hidden.0.weight": 2 * ONES}}, "values other than 0 and 1"),
    "mask of an embedding": ({"masks": {"embedding.weight": torch.ones(VOCAB, 32)}}, "only hidden weights"),
    "second mask bad": ({"masks": {"hidden.0.weight": ONES, "hidden.1.weight": 0 * ONES}}, "'hidden.1.weight' keeps no"),
}


def assert_refused_untouched(model, settings, message, error=ValueError):
    tensors = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    hooks, versions = hooks_of(model), [p._version for p in model.parameters()]
    state_keys = list(model.state_dict())
    rng = torch.get_rng_state()
    with pytest.raises(error, match=message):
        make(model=model, **settings)
    assert list(model.state_dict()) == state_keys
    assert_same_tensors(dict((*model.named_parameters(), *model.named_buffers())), tensors)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert hooks_of(model) == hooks
    assert [p._version for p in model.parameters()] == versions  # nothing was written, not even the same values
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_leaves_the_model_untouched(settings, message):
    assert_refused_untouched(Net(), settings, message)


@pytest.mark.parametrize("taken", ["buffer", "attribute"])
def test_name_of_a_mask_that_is_taken_leaves_the_model_untouched(taken):
    # A masked layer of the user's own may well call its mask weight_mask.
    model = Net()
    if taken == "buffer":
        model.hidden[1].register_buffer("weight_mask", torch.ones(32, 32))
    else:
        model.hidden[1].weight_mask = "mine"
    assert_refused_untouched(model, {}, "weight_mask")


def test_refused_model_can_be_parameterized_with_better_input():
    model = Net()
    assert_refused_untouched(model, {"density": 1e-4}, "lose every weight")
    _, plan = make(model=model)
    smupar.audit(model, plan)


# Edge cases


class Tables(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(30, width, padding_idx=3)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 7)

    def forward(self, ids):
        return self.head(self.hidden(self.tokens(ids)).relu())


def test_padding_row_stays_zero_and_passes_the_audit():
    model = Tables(64)
    plan = smupar.parameterize(model, base=Tables(16), density=1 / 2)
    assert torch.count_nonzero(model.tokens.weight[3]) == 0
    assert torch.count_nonzero(model.tokens.weight) == 29 * 64
    assert smupar.audit(model, plan) == []


def test_parameter_frozen_at_first_is_masked_once_it_trains():
    model = Tables(64)
    model.hidden.weight.requires_grad_(False)
    plan = smupar.parameterize(model, base=Tables(16), density=1 / 2)
    assert not model.hidden.weight.requires_grad
    model.hidden.weight.requires_grad_(True)
    model(torch.arange(30)).square().mean().backward()
    assert torch.count_nonzero(model.hidden.weight.grad[~model.hidden.weight_mask]) == 0
    assert smupar.audit(model, plan) == []


@pytest.mark.parametrize("pattern", ["random", "bernoulli", "fan_in", "2:4", "2:4-transposable", "block-4"])
def test_masks_do_not_depend_on_default_dtype_or_device(pattern):
    def mask():
        return smupar.make_plan(Tables(64), base=Tables(16), density=1 / 2, pattern=pattern).draw_mask("hidden.weight")

    usual = mask()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(mask(), usual)
    finally:
        torch.set_default_dtype(torch.float32)
    model = Tables(64)
    base = Tables(16)
    with torch.device("meta"):  # as where a larger model is being built around this one
        smupar.parameterize(model, base=base, density=1 / 2, pattern=pattern)
    assert torch.equal(model.hidden.weight_mask, usual)


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.first = nn.Linear(5, width)
        self.gain = nn.Parameter(torch.ones(width))


def test_reset_of_parameters_without_an_init_of_their_own_is_refused_by_name():
    with torch.device("meta"):
        model, base = OwnNorm(32), OwnNorm(8)
    model.to_empty(device="cpu")
    roles = {"first.weight": "embedding", "head.weight": "unembedding"}
    with pytest.raises(ValueError, match="reset=True, but gain belong to modules without reset_parameters"):
        smupar.parameterize(model, base=base, roles=roles, reset=True)
    with pytest.warns(smupar.PlanWarning, match="Left as they are, without an init of their own: gain"):
        smupar.parameterize(model, base=base, roles=roles)


def test_warnings_as_errors_leave_the_model_untouched():
    model = Tables(64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", smupar.PlanWarning)
        with pytest.raises(smupar.PlanWarning):
            smupar.parameterize(model, base=Tables(16), density=1 / 32)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_masks_from_a_file(tmp_path):
    model = Tables(64)
    smupar.parameterize(model, base=Tables(16), density=1 / 4)
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "compiled.pt")
    again = Tables(64)
    plan = smupar.parameterize(again, base=Tables(16), masks=tmp_path / "compiled.pt", seed=5)
    assert torch.equal(again.hidden.weight_mask, model.hidden.weight_mask)
    assert plan["hidden.weight"].density == Fraction(1, 4)
    fresh = Tables(64)
    smupar.attach(fresh, plan, masks=tmp_path / "compiled.pt")
    assert torch.equal(fresh.hidden.weight_mask, model.hidden.weight_mask)
    torch.save(Tables(64).state_dict(), tmp_path / "dense.pt")
    with pytest.raises(ValueError, match="holds no masks"):
        smupar.make_plan(Tables(64), base=Tables(16), masks=tmp_path / "dense.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be read as a state dict"):
        smupar.make_plan(Tables(64), base=Tables(16), masks=tmp_path / "junk.pt")


def test_unknown_setting_is_named_with_the_known_ones():
    with pytest.raises(TypeError, match=r"unknown setting 'sparsity'; settings are rule, density.*1 - sparsity"):
        smupar.parameterize(Tables(64), base=Tables(16), sparsity=0.9)


def test_other_zeros_than_those_of_the_drawn_mask_are_warned_of():
    model, plan = make()
    moved = {name: mask.roll(1, 1) for name, mask in masks_of(model).items()}
    with torch.no_grad():
        for name, mask in moved.items():
            model.get_parameter(name).copy_(mask.float())
    fresh = Net()
    fresh.load_state_dict(model.state_dict(), strict=False)
    with pytest.warns(smupar.PlanWarning, match="has other zeros than the mask that the plan draws"):
        smupar.attach(fresh, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", smupar.PlanWarning)
        smupar.attach(Net(), plan)  # to be loaded afterwards
        given = Net()
        given.load_state_dict(model.state_dict(), strict=False)
        smupar.attach(given, plan, masks=moved)


def test_gradients_stay_masked_where_conversions_swap_parameters():
    model, plan = make()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2))
    train(model, [optimizer], 2)
    assert off_mask(model, lambda parameter: parameter) == 0


class Noisy(nn.Module):
    """Its own init is random."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)


def test_random_resets_follow_the_seed_of_the_plan_and_leave_torchs_generator_alone():
    def build(width):
        return nn.Sequential(nn.Linear(5, width), Noisy(width), nn.Linear(width, width), nn.Linear(width, 3))

    gains = []
    for global_seed, seed in ((0, 0), (1, 0), (0, 1)):
        with torch.device("meta"):
            model, base = build(32), build(8)
        model.to_empty(device="cpu")
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        smupar.parameterize(model, base=base, reset=True, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        gains.append(model[1].gain.detach())
    assert torch.equal(gains[0], gains[1])
    assert not torch.equal(gains[0], gains[2])


# Several places, several models


class Repeated(nn.Module):
    """One layer in three places: a state dict has it, and its mask, under three names."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width)] * 3)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = F.relu(block(x))
        return self.last(x)


def make_repeated(seed=0):
    model = Repeated(32)
    return model, smupar.parameterize(model, base=Repeated(16), density=0.25, seed=seed)


def test_checkpoint_without_masks_loads_into_a_layer_in_several_places():
    model, _ = make_repeated()
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        model.load_state_dict(Repeated(32).state_dict())
    assert not model.blocks[0].weight.detach()[~model.blocks[0].weight_mask].any()


def test_checkpoint_of_non_zeros_loads_into_a_layer_in_several_places():
    (sparse, plan), (dense, _) = make_repeated(), make_repeated(1)
    smupar.sparsify_storage(sparse, plan, backend="csr")
    dense.load_state_dict(sparse.state_dict())
    x = torch.randn(4, 8)
    torch.testing.assert_close(dense(x), sparse(x))


def test_masks_of_a_state_dict_are_taken_for_a_layer_in_several_places():
    model, _ = make_repeated()
    masks = {name: mask for name, mask in model.state_dict().items() if name.endswith("_mask")}
    assert len(masks) == 3
    again = Repeated(32)
    with pytest.warns(smupar.PlanWarning, match="masks of your own"):
        smupar.parameterize(again, base=Repeated(16), masks=masks)
    assert torch.equal(again.blocks[2].weight_mask, model.blocks[0].weight_mask)


def test_muon_that_trains_two_models_keeps_both_on_their_masks():
    pairs = [make(), make(model=Net(), seed=1)]
    groups = [group for m, p in pairs for group in smupar.param_groups(m, p, lr=0.02, optimizer="muon", only="hidden")]
    muon = torch.optim.Muon(groups)
    tokens, _ = batch()
    sum(model(tokens).square().mean() for model, _ in pairs).backward()
    muon.step()
    for model, _ in pairs:
        for layer in model.hidden:
            assert not layer.weight.detach()[~layer.weight_mask].any()


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru, self.last = nn.GRU(5, width, batch_first=True), nn.Linear(width, 3)


def test_input_factor_is_on_the_input_in_whichever_order_keywords_come():
    model = Recurrent(16)
    smupar.parameterize(model, base=Recurrent(8), alpha_input=5.0)
    x, state = torch.randn(2, 4, 5), torch.ones(1, 2, 16)
    torch.testing.assert_close(model.gru(hx=state, input=x)[0], model.gru(x, state)[0])
