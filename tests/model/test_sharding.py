"""DDP and FSDP2 with two gloo processes: each layout runs once, writes what it saw, and the tests read that.

The reference is always one ordinary process with the whole batch.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smupar
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import BRANCHES, GPT
from tests.support.loops import assert_same_tensors, loss_of
from tests.support.ranks import WORLD, full, on_two_ranks, share_of

STEPS, CLIP = 5, 0.2
# Odd sizes (25, 65, 75, a vocabulary of 17), so that shards are uneven.
CONFIG = ModelConfig(width=25, depth=2, head_dim=5, vocab_size=17)
SETTINGS = {"density": 0.25, "init_std": 0.087, "alpha_input": 9.17, "alpha_output": 1.095, "seed": 3, "branches": BRANCHES}


def base():
    with torch.device("meta"):
        return GPT(replace(CONFIG, width=10, depth=1))


def finish(model):
    """What parameterize leaves to the user: the attention scale."""
    for block in model.blocks:
        block.attention.scale.fill_(1 / CONFIG.head_dim)


def plain_model():
    model = GPT(CONFIG)
    plan = smupar.parameterize(model, base=base(), **SETTINGS)
    plan.settle("attention_scale")
    finish(model)
    return model, plan


def batch(step, rank=None):
    """The whole batch, or a rank's half of it."""
    tokens = torch.randint(CONFIG.vocab_size, (8, 13), generator=torch.Generator().manual_seed(step))
    tokens = share_of(tokens, rank)
    return tokens[:, :-1], tokens[:, 1:]


def off_mask(model, tensor_of):
    """Largest size where the mask is False, over the whole of all sparse parameters."""
    names = [key for key in model.state_dict() if key.endswith("_mask")]
    assert len(names) == 10
    worst = 0.0
    for key in names:
        values, mask = full(tensor_of(model.get_parameter(key.removesuffix("_mask")))), full(model.get_buffer(key))
        worst = max(worst, values[~mask].abs().max().item())
    return worst


def train(model, plan, rank=None, forward=None):
    """Losses averaged over ranks, gradient norms, and the largest off-mask gradient over all steps."""
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2, weight_decay=0.1))
    pending = smupar.audit(model, plan, optimizer)
    losses, norms, stray = [], [], 0.0
    for step in range(STEPS):
        loss = loss_of(model if forward is None else forward, batch(step, rank))
        loss.backward()
        stray = max(stray, off_mask(model, lambda p: p.grad))
        norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(mean)
            mean /= WORLD
        losses.append(mean.item())
    smupar.audit(model, plan, optimizer)  # also after training
    return {"losses": losses, "norms": norms, "stray gradient": stray, "pending": pending}


def whole_state(model):
    return {key: full(value.detach()) for key, value in model.state_dict().items()}


# What each rank does


def run_ddp(rank):
    model, plan = plain_model()
    seen = {"start": whole_state(model)}
    ddp = DistributedDataParallel(model)
    seen |= train(model, plan, rank, forward=ddp)
    seen["stray weight"] = off_mask(model, lambda p: p)
    seen["end"] = whole_state(model)
    seen["accumulated"] = accumulated(ddp, model, rank)
    seen["bucket view"] = accumulated(DistributedDataParallel(model, gradient_as_bucket_view=True), model, rank)
    # Buffers are copied from rank 0 at each forward in training, unless they are on the ignore list.
    mask = model.blocks[0].mlp.up.weight_mask
    mask[0, 0] = rank == 1
    loss_of(ddp, batch(0, rank))
    seen["own mask entry"] = bool(mask[0, 0])
    return seen


def accumulated(ddp, model, rank):
    """Gradients of two micro-batches, reduced at the second."""
    model.zero_grad()
    with ddp.no_sync():
        (loss_of(ddp, batch(10, rank)) / 2).backward()
    (loss_of(ddp, batch(11, rank)) / 2).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def run_fsdp(rank):
    with torch.device("meta"):
        model = GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # worst-case leftovers in the memory; .data leaves no trace on the tensor
        parameter.data.to_local().fill_(float("nan"))
    model.unembedding.weight = model.embedding.weight  # to_empty makes two tensors of a tied one
    plan = smupar.parameterize(model, base=base(), **SETTINGS)
    plan.settle("attention_scale")
    finish(model)
    seen = {"start": whole_state(model)}
    state = model.state_dict()
    seen["layouts"] = {
        key: (str(mask.placements), str(state[key.removesuffix("_mask")].placements), tuple(mask.to_local().shape))
        for key, mask in state.items()
        if key.endswith("_mask")
    }
    seen["local weights"] = {key: tuple(value.to_local().shape) for key, value in state.items()}
    seen |= train(model, plan, rank)
    seen["stray weight"] = off_mask(model, lambda p: p)
    seen["end"] = whole_state(model)
    seen["checkpoint"] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    seen |= loaded(model, rank)
    return seen


def state_of_another_seed():
    other = GPT(CONFIG)
    smupar.parameterize(other, base=base(), **{**SETTINGS, "seed": 4})
    return other.state_dict()


def loaded(model, rank):
    """After a full checkpoint of another seed, masks and all, has been loaded into the sharded model."""
    set_model_state_dict(model, state_of_another_seed(), options=StateDictOptions(full_state_dict=True))
    model.zero_grad()
    loss_of(model, batch(0, rank)).backward()
    return {"loaded": whole_state(model), "stray gradient after load": off_mask(model, lambda p: p.grad)}


def work(rank):
    return {"ddp": run_ddp(rank), "fsdp": run_fsdp(rank)}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each rank found: one start of two processes for all."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ddp(both):
    return [found["ddp"] for found in both]


@pytest.fixture(scope="module")
def fsdp(both):
    return [found["fsdp"] for found in both]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ranks(request, both):
    return [found[request.param] for found in both]


@pytest.fixture(scope="module")
def single():
    model, plan = plain_model()
    seen = {"start": whole_state(model)}
    seen |= train(model, plan)
    return {**seen, "end": whole_state(model), "model": model}


def assert_trained_alike(seen, single):
    assert seen["losses"] == pytest.approx(single["losses"], rel=1e-5)
    assert seen["norms"] == pytest.approx(single["norms"], rel=1e-4)
    torch.testing.assert_close(dict(seen["end"]), dict(single["end"]), rtol=1e-3, atol=1e-4)


def test_reference_learns_and_clips(single):
    assert single["losses"][-1] < single["losses"][0]
    assert max(single["norms"]) > CLIP


# Both


def test_ranks_have_the_weights_and_masks_of_one_process_before_any_broadcast(ranks, single):
    for seen in ranks:
        assert_same_tensors(seen["start"], single["start"])


def test_ranks_train_as_one_process(ranks, single):
    for seen in ranks:
        assert_trained_alike(seen, single)
    assert_same_tensors(ranks[0]["end"], ranks[1]["end"])


def test_off_mask_gradients_and_weights_are_exactly_zero(ranks):
    for seen in ranks:
        assert seen["stray gradient"] == 0
        assert seen["stray weight"] == 0


# DDP


@pytest.mark.parametrize("way", ["accumulated", "bucket view"])
def test_ddp_accumulates_masked_gradients_over_micro_batches(ddp, single, way):
    model = single["model"]
    model.load_state_dict(ddp[0]["end"])
    model.zero_grad()
    for step in (10, 11):
        (loss_of(model, batch(step)) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for seen in ddp:
        torch.testing.assert_close(seen[way], expected, rtol=1e-4, atol=1e-6)
        for name in expected:
            mask = ddp[0]["end"].get(f"{name}_mask")
            assert mask is None or not seen[way][name][~mask].any(), name


def test_ddp_does_not_broadcast_masks(ddp):
    assert [seen["own mask entry"] for seen in ddp] == [False, True]


# FSDP2


def test_fsdp_norms_have_values_after_to_empty(fsdp):
    norms = {key: value for key, value in fsdp[0]["start"].items() if "norm" in key}
    assert len(norms) == 5
    assert all(value.unique().tolist() == [1.0] for value in norms.values())


def test_fsdp_masks_are_sharded_like_their_weights(fsdp):
    for seen in fsdp:
        assert len(seen["layouts"]) == 10
        for key, (mask_placements, weight_placements, local_shape) in seen["layouts"].items():
            assert mask_placements == weight_placements == "(Shard(dim=0),)"
            assert local_shape == seen["local weights"][key.removesuffix("_mask")]
    # 75 rows of qkv over two ranks: 38 and 37
    shapes = [seen["layouts"]["blocks.0.attention.qkv.weight_mask"][2] for seen in fsdp]
    assert shapes == [(38, 25), (37, 25)]


def test_fsdp_audit_passes_with_nothing_pending(fsdp):
    assert [seen["pending"] for seen in fsdp] == [[], []]


def test_fsdp_state_dict_holds_masks_and_loads_into_one_process(fsdp, single):
    assert fsdp[0]["end"].keys() == single["start"].keys()
    checkpoint = fsdp[0]["checkpoint"]
    assert_same_tensors(checkpoint, fsdp[0]["end"])
    model, _ = plain_model()
    result = model.load_state_dict(checkpoint)
    assert result.missing_keys == result.unexpected_keys == []
    assert off_mask(model, lambda p: p) == 0


def test_fsdp_loads_a_full_checkpoint_with_its_masks(fsdp):
    for seen in fsdp:
        assert_same_tensors(seen["loaded"], state_of_another_seed())
        assert seen["stray gradient after load"] == 0
