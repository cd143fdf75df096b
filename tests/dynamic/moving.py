"""A small net whose masks move, and what the tests ask about it."""

import torch

import smupar
from smupar.model.attached import mask_of
from tests.support.loops import adamw, make_step, state_of, tokens_of
from tests.support.models import TokenNet, on_meta

SIZES = {"mix.weight": 256, "up.weight": 512, "down.weight": 512}  # hidden weights of the net


def make(density=0.25, *, dtype=torch.float32, **settings):
    """A parameterized net of twice the base width, and its plan."""
    torch.manual_seed(0)
    model = TokenNet().to(dtype)
    return model, smupar.parameterize(model, base=on_meta(TokenNet, 8), density=density, **settings)


def ready(density=0.25, *, dtype=torch.float32, **settings):
    """A parameterized net, its plan, and an AdamW."""
    model, plan = make(density, dtype=dtype, **settings)
    return model, plan, adamw(model, plan)


def moving(kind, *, start_from=None, optimizer=adamw, plan_settings=None, **settings):
    """A net, its optimizer and its sparsifier; RigL and SET start with a quarter of the weights, GMP and IMP with all."""
    model, plan = make(start_from or (0.25 if kind in ("RigL", "SET") else 1.0), **(plan_settings or {}))
    made = optimizer(model, plan)
    return model, made, getattr(smupar, kind)(model, plan, made, **settings)


def optimize(model, optimizer, step):
    """One step of training without the sparsifier's; gradients stay."""
    make_step(model, optimizer, tokens_of(step))


def train(model, optimizer, sparsifier, steps):
    """Whether masks moved, by step."""
    moved = []
    for step in steps:
        optimize(model, optimizer, step)
        moved.append(sparsifier.step())
    return moved


def masks_of(model):
    return {name: mask_of(model, name).clone() for name in SIZES if mask_of(model, name) is not None}


def hidden_of(model):
    return {name: model.get_parameter(name).detach().clone() for name in SIZES}


def counts(masks):
    """How many weights are kept, of a model or of masks by name."""
    masks = masks_of(masks) if isinstance(masks, torch.nn.Module) else masks
    return {name: int(mask.sum()) for name, mask in masks.items()}


def share(fraction):
    """So many weights of each layer."""
    return {name: int(fraction * size) for name, size in SIZES.items()}


def assert_nothing_off_mask(model, optimizers=()):
    for name, mask in masks_of(model).items():
        parameter = model.get_parameter(name)
        assert not parameter[~mask].any(), name
        for optimizer in optimizers:
            for value in state_of(optimizer, parameter).values() if parameter in optimizer.state else ():
                assert not value[~mask].any(), name
