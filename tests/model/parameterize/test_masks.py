"""Masks and values from seeds and names, and masks of the user's own."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

import smupar
from smupar.lm.model.gpt import build
from smupar.plan.masks.patterns import read_masks
from tests.model.parameterize.nets import GPT_CONFIG, Net, Tables, make, masks_of, off_mask, raw_memory
from tests.support.loops import assert_same_tensors, loss_of, tokens_of
from tests.support.models import on_meta


def matrices(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.ndim == 2}


def test_same_seed_gives_same_weights_and_masks_whatever_the_global_rng():
    first, _ = make(global_seed=1, seed=7)
    second, _ = make(global_seed=2, seed=7)
    assert_same_tensors(matrices(first), matrices(second))
    assert_same_tensors(masks_of(first), masks_of(second))


def test_other_seed_gives_other_weights_and_masks():
    first, _ = make(seed=0)
    second, _ = make(seed=1)
    for name, mask in masks_of(first).items():
        # Two random quarters of 1024 share 64 +- 6 positions.
        assert 30 < (mask & masks_of(second)[name]).sum() < 100
    assert not any(torch.equal(a, b) for a, b in zip(matrices(first).values(), matrices(second).values(), strict=True))


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
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import build
torch.manual_seed(int(sys.argv[1]))
torch.set_num_threads(2)
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
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest.hexdigest()


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
    loss_of(model, tokens_of()).backward()
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
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"pipe\.safetensors is not a file"):
        smupar.make_plan(Tables(64), base=Tables(16), masks=tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match="cannot be read as a state dict"):
        smupar.make_plan(Tables(64), base=Tables(16), masks=tmp_path / "junk.pt")


class Noisy(nn.Module):
    """Its own init is random."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)


def test_random_resets_follow_the_seed_of_the_plan_and_leave_torchs_generators_alone(monkeypatch):
    def build(width):
        return nn.Sequential(nn.Linear(5, width), Noisy(width), nn.Linear(width, width), nn.Linear(width, 3))

    gains, seeded_gpus = [], []
    for global_seed, seed in ((0, 0), (1, 0), (0, 1)):
        with torch.device("meta"):
            model, base = build(32), build(8)
        model.to_empty(device="cpu")
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "manual_seed_all", seeded_gpus.append)
            smupar.parameterize(model, base=base, reset=True, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        gains.append(model[1].gain.detach())
    assert seeded_gpus == []
    assert torch.equal(gains[0], gains[1])
    assert not torch.equal(gains[0], gains[2])


def test_changed_bits_in_a_file_of_masks_are_noticed(tmp_path):
    path = tmp_path / "masks.pt"
    torch.save({"2.weight_mask": torch.ones(64, 64, dtype=torch.bool)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(bytes([1]) * 64) + 7] = 0
    path.write_bytes(data)
    assert not torch.load(path)["2.weight_mask"].all()
    with pytest.raises(ValueError, match=r"cannot be read as a state dict or file of masks: .* does not match its checksum"):
        read_masks(path)
