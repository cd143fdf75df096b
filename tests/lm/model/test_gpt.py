"""The built-in GPT: attention by hand, caches, positions, sizes, and what parameterizing it does to its logits."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from smupar.lm.config.presets import preset
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import (
    GPT,
    Attention,
    Cache,
    TransformerBlock,
    alibi_slopes,
    build,
    on_meta,
    plan_on_meta,
    rotate,
    use_flex_attention,
)
from smupar.lm.run.distributed import World, build_on_device

POSITIONS = ("alibi", "rotary", "learned", "none")
SMALL = ModelConfig(width=64, depth=2, head_dim=16, vocab_size=101, context=32)
RUN = RunConfig(model=ModelConfig(width=64, depth=1), base_width=32, sparsity=0.75, steps=5, batch_size=2, seq_len=16)


def _model(**options):
    torch.manual_seed(0)
    return GPT(replace(SMALL, **options))


def _tokens(length, *, batch=2):
    return torch.randint(SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def _with(config=RUN, **options):
    """The run with other options of its model."""
    return replace(config, model=replace(config.model, **options))


# Attention


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_does_not_look_ahead(positions):
    model = _model(positions=positions)
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6:] = 99
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0, :6], model(changed)[0, :6], rtol=0, atol=0)
        assert (model(tokens)[0, 6:] != model(changed)[0, 6:]).any(1).all()


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_sees_the_order_of_earlier_tokens_where_it_has_positions(positions):
    model = _model(positions=positions, depth=1)
    with torch.no_grad():
        difference = (model(torch.tensor([[1, 2, 3]])) - model(torch.tensor([[2, 1, 3]])))[0, -1].abs().max()
    assert (difference < 1e-5) == (positions == "none")


def test_attention_of_two_tiny_heads_equals_the_hand_computed_one():
    attention = Attention(ModelConfig(width=2, head_dim=1))
    with torch.no_grad():
        attention.qkv.weight.copy_(torch.eye(2).repeat(3, 1))  # queries, keys and values are the inputs
        attention.out.weight.copy_(torch.eye(2))
        attention.scale.fill_(0.5)
        y = attention(torch.tensor([[[1.0, 2.0], [3.0, -1.0]]]))[0]
    assert y[0].tolist() == [1.0, 2.0]  # the first token sees itself alone
    # Second token, head 1 (slope 2^-4): logits 0.5 * 3 * 1 - 1/16 and 0.5 * 3 * 3; head 2 (slope 2^-8) likewise.
    for head, far, near, values in ((0, 1.5 - 1 / 16, 4.5, (1, 3)), (1, -1 - 1 / 256, 0.5, (2, -1))):
        a, b = math.exp(far), math.exp(near)
        assert y[1, head].item() == pytest.approx((a * values[0] + b * values[1]) / (a + b), rel=1e-6)


def test_attention_scale_is_one_over_the_root_of_the_head_before_a_rule_is_chosen():
    assert Attention(SMALL).scale.item() == 0.25


@pytest.mark.parametrize(("rule", "scale"), [("smupar", 1 / 32), ("mup", 1 / 32), ("sp", 32**-0.5)])
def test_built_gpt_has_the_attention_scale_of_its_rule(rule, scale):
    model, plan = build(replace(RUN, rule=rule))
    assert model.blocks[0].attention.scale.item() == pytest.approx(scale, rel=1e-7)
    assert not plan.pending


@pytest.mark.parametrize("positions", POSITIONS)
def test_logits_with_a_cache_equal_those_of_the_whole_text_at_once(positions):
    model, tokens = _model(positions=positions), _tokens(13)
    cache = Cache(len(model.blocks))
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in tokens.split([4, 1, 5, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=1e-5, atol=1e-5)
    assert len(cache) == 13


# Positions


def test_alibi_slopes_of_eight_heads_are_powers_of_two():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_alibi_slopes_go_down_to_2_to_the_minus_8_for_any_number_of_heads():
    assert alibi_slopes(4).tolist() == [2.0**-i for i in (2, 4, 6, 8)]
    assert alibi_slopes(3).tolist() == pytest.approx([2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8])


def test_rotation_turns_a_pair_by_its_position_in_radians():
    turned = rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    expected = [[1, 0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_rotation_turns_later_pairs_more_slowly():
    turned = rotate(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), start=3)  # pairs (0, 2) and (1, 3)
    expected = [[math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_rotary_products_depend_on_relative_positions_only():
    q, k = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    here, there = (rotate(q, start) @ rotate(k, start).T for start in (0, 41))
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    assert (here - q @ k.T).abs()[1, 0] > 1e-2  # and they do depend on them
    torch.testing.assert_close(rotate(q).norm(dim=1), q.norm(dim=1), rtol=1e-6, atol=1e-6)


def test_learned_positions_are_added_to_the_embedding():
    model = _model(positions="learned", depth=1)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = _tokens(5)
    model(tokens)
    torch.testing.assert_close(seen[0], model.embedding.weight[tokens] + model.position.weight[:5], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_logits_of_the_bias():
    model, tokens = _model(), _tokens(24)
    with torch.no_grad():
        by_bias = model(tokens)
        use_flex_attention(model, 24)
        assert all(block.attention.block_mask is not None for block in model.blocks)
        torch.testing.assert_close(model(tokens), by_bias, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has no backward on the CPU")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_gradients_of_the_bias():
    model, tokens = _model().cuda(), _tokens(24).cuda()
    gradients = []
    for _ in range(2):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        use_flex_attention(model, 24)
    for by_bias, by_flex in zip(*gradients, strict=True):
        torch.testing.assert_close(by_flex, by_bias, rtol=1e-5, atol=1e-5)


# Blocks and sizes


def test_residual_factor_divides_both_outputs_by_the_root_of_twice_the_depth():
    block = TransformerBlock(replace(SMALL, depth=8, residual_factor=True))
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    middle = x + 0.25 * block.attention(block.norm_attention(x))  # 1 / sqrt(2 * 8)
    torch.testing.assert_close(block(x), middle + 0.25 * block.mlp(block.norm_mlp(middle)))
    assert TransformerBlock(replace(SMALL, depth=8)).factor == 1


def test_swiglu_and_gelu_mlps_are_what_their_names_say():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    gated, plain = (_model(activation=activation, biases=True).blocks[0].mlp for activation in ("swiglu", "gelu"))
    torch.testing.assert_close(gated(x), gated.down(F.silu(gated.gate(x)) * gated.up(x)))
    torch.testing.assert_close(plain(x), plain.down(F.gelu(plain.up(x))))
    assert not hasattr(plain, "gate")


def test_biases_are_in_linear_layers_and_norms_and_never_in_the_unembedding():
    layers = ["norm_attention", "attention.qkv", "attention.out", "norm_mlp", "mlp.gate", "mlp.up", "mlp.down"]
    expected = [f"blocks.{number}.{layer}.bias" for number in (0, 1) for layer in layers] + ["norm.bias"]
    for tied in (True, False):
        names = [name for name, _ in on_meta(replace(SMALL, biases=True, tied=tied)).named_parameters()]
        assert [name for name in names if name.endswith("bias")] == expected
        assert not any(name.endswith("bias") for name, _ in on_meta(replace(SMALL, tied=tied)).named_parameters())


def test_tied_model_has_one_matrix_for_both_and_untied_two():
    tied, untied = _model(), _model(tied=False)
    assert tied.unembedding.weight is tied.embedding.weight
    assert untied.unembedding.weight is not untied.embedding.weight
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == 101 * 64


def test_tie_makes_one_tensor_again_after_to_empty():
    model = on_meta(SMALL).to_empty(device="cpu")
    model.tie()
    assert model.unembedding.weight is model.embedding.weight


def test_610m_model_has_the_parameters_of_the_paper():
    d, inner, vocab, depth = 2048, 5461, 50257, 10  # 12.13B tokens of Table 4 are 20 for each of them
    block = (4 * d * d + 4 * d) + (3 * d * inner + 2 * inner + d) + 4 * d  # attention, MLP, norms, all with biases
    assert vocab * d + depth * block + 2 * d == 606_519_972
    config = preset("paper-610m")
    assert (config.model.width, config.model.depth, config.model.inner_width, config.model.vocab_size) == (
        d,
        depth,
        inner,
        vocab,
    )
    assert sum(parameter.numel() for parameter in on_meta(config.model).parameters()) == 606_519_972


@pytest.mark.parametrize(
    ("options", "inner_width"),
    [
        ({"width": 2048, "head_dim": 64, "ff_multiple": 1}, 5461),  # 5461.33
        ({"width": 2048, "head_dim": 64}, 5440),  # 85.3 heads
        ({"width": 768, "head_dim": 64}, 2048),  # 8/3 exactly
        ({"width": 256, "ff_multiple": 128}, 640),  # 5.3 times 128
        ({"width": 256, "activation": "gelu"}, 1024),
        ({"width": 256, "activation": "gelu", "ff_ratio": 2.5}, 640),
        ({"width": 256, "ff_ratio": 3.5, "ff_multiple": 1}, 896),
        ({"width": 320, "ff_ratio": 2.3}, 736),  # 23 times 32; the binary number nearest to 2.3 is a little less
        ({"width": 32, "ff_ratio": 0.5}, 32),  # never 0
    ],
)
def test_inner_width_is_the_ratio_rounded_down_to_the_multiple(options, inner_width):
    config = ModelConfig(**options)
    assert config.inner_width == inner_width
    assert on_meta(config).blocks[0].mlp.down.weight.shape == (config.width, inner_width)


# Parameterized


def test_built_logits_are_the_last_hidden_state_times_the_output_factor():
    for tied, vocab_size in itertools.product((True, False), (64, 256)):
        model, _ = build(_with(tied=tied, vocab_size=vocab_size))
        hidden = []
        model.norm.register_forward_hook(lambda module, args, output, hidden=hidden: hidden.append(output))
        tokens = _tokens(9) % vocab_size
        trained, evaluated = model.train()(tokens), model.eval()(tokens)
        assert torch.equal(trained, evaluated)
        # alpha_output / m_d, with a width of twice the base's
        torch.testing.assert_close(trained, 1.095 / 2 * hidden[0] @ model.unembedding.weight.T, rtol=1e-5, atol=1e-6)


def test_built_embeddings_are_multiplied_by_alpha_input():
    model, _ = build(_with(positions="learned"))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = _tokens(9)
    model(tokens)
    torch.testing.assert_close(seen[0], 9.17 * (model.embedding.weight[tokens] + model.position.weight[:9]))


def test_sp_has_no_factors_at_all():
    model, _ = build(replace(RUN, rule="sp"))
    plain = GPT(RUN.model)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.endswith("_mask")})
    with torch.no_grad():
        assert torch.equal(model(_tokens(9)), plain(_tokens(9)))


def test_models_of_one_configuration_are_built_equal_and_with_biases_of_zero():
    config = _with(biases=True, positions="learned")
    model, other = build(config)[0], build(config)[0]
    for (name, own), value in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(own, value), name
        assert not name.endswith("bias") or not own.any(), name


def test_built_weights_have_the_spread_of_the_rule():
    model, plan = build(replace(_with(width=256), base_width=64, sparsity=0.9375))
    row = plan["blocks.0.attention.qkv.weight"]
    assert row.init_std == pytest.approx(0.087 / math.sqrt(4 / 16))  # m_d = 4, m_rho = 1 / 16
    kept = model.blocks[0].attention.qkv.weight.detach()
    kept = kept[kept != 0]
    assert len(kept) == 3 * 256 * 256 // 16
    assert kept.std().item() == pytest.approx(0.174, rel=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(0.087, rel=0.02)


@pytest.mark.parametrize(
    "config",
    [
        *(replace(RUN, rule=rule) for rule in ("sp", "mup", "smupar", "smupar-init-only", "smupar-lr-only")),
        *(replace(RUN, pattern=pattern) for pattern in ("bernoulli", "fan_in", "block-16", "neuron")),
        *(replace(RUN, pattern=pattern, sparsity=None) for pattern in ("random", "2:4", "2:4-transposable")),
        *(replace(RUN, allocation=allocation) for allocation in ("er", "erk")),
        *(_with(positions=positions) for positions in POSITIONS),
        _with(activation="gelu", biases=True, residual_factor=True),
        _with(tied=False, ff_ratio=2.0, ff_multiple=8),
        replace(RUN, sparsity=0.0),
        replace(RUN, base_width=64),
        replace(RUN, seed=7, init_std=0.02, alpha_input=1.0, alpha_output=2.0),
    ],
)
def test_plan_on_meta_equals_the_plan_of_the_built_model(config):
    planned, built = plan_on_meta(config), build(config)[1]
    assert planned.diff(built) == []
    assert planned.pending == built.pending == {}


@pytest.mark.parametrize(
    ("base_width", "tied"),
    [
        (32, True),
        (32, False),
        (64, True),  # as wide as the model
        (64, False),
    ],
)
def test_every_kind_of_gpt_is_parameterized_without_asking_for_roles(base_width, tied):
    # Sizes that coincide with the width must not mislead: positions 64, vocabulary 64.
    coincident = ModelConfig(width=64, depth=1, vocab_size=64, context=64, tied=tied)
    for positions, activation, biases in itertools.product(POSITIONS, ("swiglu", "gelu"), (False, True)):
        model = replace(coincident, positions=positions, activation=activation, biases=biases)
        plan = plan_on_meta(replace(RUN, model=model, base_width=base_width))
        for row in plan:
            if row.name in ("embedding.weight", "position.weight"):
                expected = "embedding"
            elif row.name == "unembedding.weight":
                expected = "unembedding"
            else:
                expected = "hidden" if len(row.shape) == 2 else "vector"
            assert row.role == expected, row.name
        assert {row.name for row in plan if row.masked} == {row.name for row in plan if row.role == "hidden"}


def test_erk_keeps_the_share_of_the_whole_and_small_layers_denser():
    plan = plan_on_meta(replace(RUN, allocation="erk"))
    assert plan.hidden_sparsity == pytest.approx(0.75, abs=1e-3)
    assert plan["blocks.0.attention.out.weight"].density > plan["blocks.0.attention.qkv.weight"].density


def test_model_that_does_not_fit_into_memory_is_named():
    huge = RunConfig(model=ModelConfig(width=2**20, depth=32, vocab_size=64), base_width=64, sparsity=0.5)
    with pytest.raises(MemoryError, match=r"the model does not fit into memory .*: choose a smaller one"):
        build_on_device(huge, World(0, 1, torch.device("cpu"), "ddp"))
