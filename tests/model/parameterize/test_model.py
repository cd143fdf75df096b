"""What a model looks like after parameterize: names, values, forward factors, copies, dtypes, meta."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import GPT, build
from tests.model.parameterize.nets import (
    GPT_CONFIG,
    HIDDEN,
    Net,
    Tables,
    assert_close,
    frozen_state,
    hooks_of,
    make,
    masks_of,
    off_mask,
    raw_memory,
    train,
)
from tests.support.loops import adamw, assert_same_tensors, loss_of, tokens_of
from tests.support.models import VOCAB, on_meta

MASKS = {f"{name}_mask" for name in HIDDEN}


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
        model.hidden[0].bias.normal_(0, 0.01)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
    make(model=model)
    for name, values in kept.items():
        factor = 2**0.5 if name == "hidden.1.bias" else 1  # torch's own init shrinks as 1 / sqrt(width)
        assert torch.equal(model.get_parameter(name), values * factor), name


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
    with pytest.warns(smupar.PlanWarning, match="norms and biases.*get fresh values. Pass reset=True to confirm this") as seen:
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
    tokens, _ = tokens_of()
    x = 5.0 * F.embedding(tokens, model.embedding.weight)
    for norm, layer in zip(model.norms, model.hidden, strict=True):
        x = x + F.gelu(F.linear(F.layer_norm(x, (32,), norm.weight, norm.bias), layer.weight, layer.bias))
    # alpha_output / m_d = 3 / 2 on the head's input, so that its bias is not scaled
    assert torch.equal(model(tokens), F.linear(1.5 * x, model.head.weight, model.head.bias))
    assert type(model.hidden[0]) is nn.Linear
    assert not model.hidden[0]._forward_hooks
    assert not model.hidden[0]._forward_pre_hooks


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


class Positions(nn.Embedding):
    """Returns the rows and the positions, as ProphetNet's tables do."""

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[-1])
        return super().forward(positions), positions


class Positioned(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.positions, self.head = nn.Embedding(9, width), Positions(9, width), nn.Linear(width, 9)

    def forward(self, tokens):
        return self.head(self.table(tokens) + self.positions(tokens)[0])


def test_forward_factor_of_a_table_that_returns_a_tuple_scales_its_rows_alone():
    model, tokens = Positioned(16), torch.tensor([[1, 4, 2]])
    smupar.parameterize(model, base=Positioned(8), alpha_input=5.0, example=tokens)
    rows, positions = model.positions(tokens)
    assert torch.equal(rows, 5.0 * model.positions.weight[:3])
    assert positions.tolist() == [0, 1, 2]


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru, self.last = nn.GRU(5, width, batch_first=True), nn.Linear(width, 3)


def test_input_factor_is_on_the_input_in_whichever_order_keywords_come():
    model = Recurrent(16)
    smupar.parameterize(model, base=Recurrent(8), alpha_input=5.0)
    x, state = torch.randn(2, 4, 5), torch.ones(1, 2, 16)
    torch.testing.assert_close(model.gru(hx=state, input=x)[0], model.gru(x, state)[0])


def test_bf16_model_stays_bf16_and_trains():
    model = Net().bfloat16()
    model, plan = make(model=model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(tokens_of()[0]).dtype == torch.bfloat16
    optimizer = adamw(model, plan)
    smupar.audit(model, plan, optimizer)
    losses = train(model, optimizer, 20)
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
    loss_of(model, tokens_of()).backward()
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
    loss_of(twin, tokens_of()).backward()
    assert off_mask(twin, lambda p: p.grad) == 0
    assert not twin.hidden[0].weight.grad[0].any()
    assert all(p.grad is None for p in model.parameters())
    assert_same_tensors(model.state_dict(), before)


def test_deepcopy_then_attach_trains_as_the_original():
    model, plan = make()
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    runs = [train(net, adamw(net, plan), 5) for net in (model, twin)]
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
    assert torch.equal(model(tokens_of()[0]), reference(tokens_of()[0]))
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


def test_padding_row_stays_zero_and_passes_the_audit():
    model = Tables(64)
    plan = smupar.parameterize(model, base=Tables(16), density=1 / 2)
    assert torch.count_nonzero(model.tokens.weight[3]) == 0
    assert torch.count_nonzero(model.tokens.weight) == 29 * 64
    assert smupar.audit(model, plan) == []
