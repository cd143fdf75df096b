"""What a run will cost, against the paper's numbers and against real tensors and products."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from smupar.lm.config.presets import preset
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.model.cost import estimate, fitting_micro_batch, forecast, peak_flops
from smupar.lm.model.gpt import build
from smupar.lm.run.optimizers import make_optimizers
from smupar.lm.run.step import next_token_loss
from smupar.model.attached import mask_of

TINY = RunConfig(model=ModelConfig(width=64, depth=2), base_width=32, sparsity=0.75, steps=1, batch_size=2, seq_len=16)
PAPER = preset("paper-610m")


def _with(**options):
    return replace(TINY, model=replace(TINY.model, **options))


def _backward(model, config):
    tokens = torch.randint(256, (config.batch_size, config.seq_len + 1), generator=torch.Generator().manual_seed(0))
    next_token_loss(model, (tokens[:, :-1], tokens[:, 1:])).backward()


# Against the paper


def test_610m_run_has_twenty_tokens_for_each_parameter():
    cost = estimate(PAPER)
    assert cost.num_parameters == 606_519_972
    assert cost.num_tokens == 11752 * 504 * 2048
    assert cost.num_tokens / cost.num_parameters == pytest.approx(20, rel=1e-4)


def test_610m_run_keeps_a_sixteenth_of_its_hidden_weights():
    hidden = 10 * (4 * 2048**2 + 3 * 2048 * 5461)
    assert estimate(PAPER).num_nonzeros == 606_519_972 - hidden * 15 // 16


def test_figure_10_widest_model_has_about_twice_the_flops_of_the_dense_one():
    dense = preset("paper-iso")
    wide = replace(dense, sparsity=0.875, model=replace(dense.model, width=2176))
    assert 1.85 < estimate(wide).sparse_flops / estimate(dense).sparse_flops < 2.0


def test_dense_run_has_no_zeros_to_save():
    cost = estimate(preset("paper-iso"))
    assert cost.sparse_flops == cost.dense_flops
    assert cost.num_nonzeros == cost.num_parameters


# Against the real thing


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False},
        {"activation": "gelu", "biases": True},
        {"positions": "learned"},
        {"positions": "rotary", "depth": 3},
        {"width": 96, "head_dim": 16, "vocab_size": 300},
    ],
)
def test_flops_are_those_of_a_counted_forward_and_backward(options):
    # The plain kernel, since torch counts no fused one on the CPU. It computes the masked half of the attention matrix
    # too, which is the convention of the estimate: all T keys for each query.
    config = _with(**options)
    model, _ = build(config)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        _backward(model, config)
    assert estimate(config).dense_flops == counter.get_total_flops()


def test_flops_grow_with_tokens_and_attention_with_their_square():
    short, long = estimate(TINY).dense_flops, estimate(replace(TINY, seq_len=32)).dense_flops
    attention = 12 * 2 * 2 * 64 * 16**2  # of the short run: depth, sequences, width, T^2
    assert long - 2 * short == 2 * attention
    assert estimate(replace(TINY, steps=7)).dense_flops == 7 * short


def test_nonzeros_are_those_of_the_built_model():
    for config in (TINY, replace(TINY, allocation="erk"), replace(TINY, pattern="2:4", sparsity=None)):
        model, plan = build(config)
        masks = {row.name: mask_of(model, row.name) for row in plan}
        kept = sum(p.numel() if masks[name] is None else masks[name].sum().item() for name, p in model.named_parameters())
        assert estimate(config).num_nonzeros == kept


@pytest.mark.parametrize("rest_lr", [None, 0.01])
@pytest.mark.parametrize(
    "optimizer", ["adamw", "adam", "sgd", "muon", "lion", "nadam", "radam", "adamax", "rmsprop", "adagrad"]
)
def test_state_bytes_are_those_of_all_tensors_after_a_step(optimizer, rest_lr):
    config = replace(TINY, optimizer=optimizer, rest_lr=rest_lr)
    model, plan = build(config)
    optimizers = make_optimizers(model, plan, config)
    _backward(model, config)
    for optimizer in optimizers:
        optimizer.step()
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    tensors += [mask_of(model, row.name) for row in plan if row.masked]
    tensors += [v for optimizer in optimizers for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert estimate(config).state_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_bf16_adds_a_copy_of_every_matrix():
    matrices = sum(p.numel() for p in build(TINY)[0].parameters() if p.dim() == 2)
    assert estimate(replace(TINY, dtype="bf16")).state_bytes - estimate(TINY).state_bytes == 2 * matrices


def test_sharded_state_is_divided_among_ranks_and_whole_models_are_not():
    config = replace(TINY, batch_size=4)
    alone, ddp, fsdp = (estimate(config, num_ranks=n, sharded=sharded) for n, sharded in ((1, False), (4, False), (4, True)))
    assert (ddp.state_bytes, fsdp.state_bytes) == (alone.state_bytes, alone.state_bytes / 4)
    assert ddp.activation_bytes == fsdp.activation_bytes == alone.activation_bytes / 4
    assert ddp.num_tokens == alone.num_tokens


# Arithmetic


def test_hours_are_six_flops_per_parameter_and_token_over_the_speed():
    cost = estimate(PAPER)
    flops = 6 * 606_519_972 * 11752 * 504 * 2048
    assert cost.usual_flops == pytest.approx(flops)
    assert cost.hours() == pytest.approx(flops / (990e12 * 0.45) / 3600)
    assert cost.hours() == pytest.approx(27.5, abs=0.1)
    assert cost.hours(num_gpus=8, peak_tflops=312, share=0.9) == pytest.approx(cost.hours() * (990 * 0.45) / (8 * 312 * 0.9))


def test_fitting_micro_batch_is_the_largest_divisor_that_fits():
    config = replace(TINY, batch_size=24)

    def fitting(memory, num_ranks=1):
        return fitting_micro_batch(config, num_ranks=num_ranks, sharded=False, memory=memory)

    def needed(size):
        cost = estimate(config, micro_batch=size)
        return (cost.state_bytes + cost.activation_bytes) / 0.8  # a fifth of the memory is left alone

    assert fitting(1e12) == 24
    assert fitting(1e12, num_ranks=4) == 6
    assert fitting(0) == 1
    assert [fitting(needed(size) + 1) for size in (24, 12, 8, 6)] == [24, 12, 8, 6]
    assert [fitting(needed(size) - 1) for size in (24, 12, 8, 6)] == [12, 8, 6, 4]
    assert fitting(needed(11) + 1) == 8  # 9, 10 and 11 do not divide 24


def test_report_has_the_numbers():
    text = str(forecast(PAPER, Execution(), gpus=8, gpu_gib=139, peak_share=0.45))
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "width 2048, depth 10, 32 heads of 64, MLP of 5461, vocabulary 50,257" in lines["model"]
    assert "smupar, base width 256; 0.9375 of the hidden weights are zero" in lines["rule"]
    assert "606,519,972" in lines["parameters"]
    assert "134,679,972 (22.2%)" in lines["non-zeros"]
    assert "12,130,320,384 = 11,752 steps of 504 x 2048; 20 for each parameter" in lines["tokens"]
    assert "the usual 6 x parameters x tokens: 4.41e+19" in lines["FLOPs"]
    assert lines["machine"].split(",")[0].split()[1:] == ["8", "H200s"]
    assert "3.4 hours on 8 GPUs at 45% of 990 TFLOP/s" in lines["time"]


def test_report_says_when_it_does_not_fit():
    huge = replace(PAPER, model=replace(PAPER.model, width=16384))
    assert "TOO MUCH" in str(forecast(huge, Execution(), gpus=1, gpu_gib=80, peak_share=0.45))
    sharded = str(forecast(huge, Execution(parallel="fsdp"), gpus=252, gpu_gib=80, peak_share=0.45))
    assert "TOO MUCH" not in sharded
    assert "(a shard of them)" in sharded


def test_peak_is_as_given_or_measured():
    cpu = torch.device("cpu")
    assert peak_flops(cpu, "fp32", 2.5) == 2.5e12
    assert peak_flops(cpu, "fp32") > 0
