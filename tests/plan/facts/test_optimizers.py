"""The table of optimizers: each row says what torch's class does."""

import inspect
from pathlib import Path

import pytest
import torch
from lion_pytorch import Lion
from torch import nn

from smupar.execute.stack.gather import SUPPORTED
from smupar.execute.stack.optimizers import CHANGES
from smupar.plan.facts.optimizers import FAMILIES, OPTIMIZERS, facts_of, names_with


def test_page_shows_the_table():
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert "| Muon | muon | 1 | yes |  |  | yes | yes |" in page


def _class(name):
    return Lion if name == "lion" else getattr(torch.optim, OPTIMIZERS[name].name)


@pytest.mark.parametrize("name", FAMILIES)
def test_facts_are_those_of_the_class(name):
    facts, options = OPTIMIZERS[name], inspect.signature(_class(name)).parameters
    assert facts.name == _class(name).__name__
    assert facts.betas == ("betas" in options)
    assert facts.fused == ("fused" in options)
    # RMSprop has a momentum that a run does not set; Muon's epsilon is that of a norm.
    assert facts.momentum == ("momentum" in options) or name == "rmsprop"
    assert facts.eps == ("eps" in options) or name == "muon"
    # Others are capturable too; the trainer's graphs are tested with these.
    assert not facts.capturable or "capturable" in options


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", FAMILIES)
def test_number_of_states_is_what_the_optimizer_keeps(name, momentum):
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = _class(name)([parameter], lr=0.01, **({"momentum": momentum} if OPTIMIZERS[name].momentum else {}))
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.ndim]
    assert len(kept) == OPTIMIZERS[name].num_states_with(momentum)


@pytest.mark.parametrize("name", FAMILIES)
def test_decay_is_decoupled_where_the_table_says_so(name):
    # A decay that is added to the gradient, here 0, shows in what the optimizer remembers of it.
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    optimizer = _class(name)([parameter], lr=0.1, weight_decay=0.5, **({"momentum": 0.9} if OPTIMIZERS[name].momentum else {}))
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.ndim]
    assert bool(states)
    assert all(not state.any() for state in states) == OPTIMIZERS[name].decoupled
    assert (parameter != 1).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_only_optimizers_that_mix_entries_move_weights_without_gradient(name):
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).triu()
    _class(name)([parameter], lr=0.1).step()
    assert bool(parameter.detach().tril(-1).any()) == OPTIMIZERS[name].mixes_entries


def test_stack_has_the_updates_that_the_table_says():
    assert tuple(name.lower() for name in CHANGES) == names_with("stackable") == SUPPORTED


def test_optimizer_is_known_by_name_class_and_instance():
    muon = OPTIMIZERS["muon"]
    parameter = nn.Parameter(torch.ones(2, 2))
    for given in ("muon", "Muon", torch.optim.Muon, torch.optim.Muon([parameter])):
        assert facts_of(given) is muon
    stranger = facts_of(type("Soap", (torch.optim.AdamW,), {})([parameter]))
    assert (stranger.name, stranger.family, stranger.mixes_entries) == ("Soap", None, True)
