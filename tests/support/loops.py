"""Training of a few steps: optimizers by name, batches by number, one step, and what the weights are."""

import torch
import torch.nn.functional as F
from lion_pytorch import Lion

import smupar
from smupar.optim.layer_rates import group_of_weight
from tests.support.models import VOCAB

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, 0.01, {}),
    "adam": (torch.optim.Adam, 0.01, {}),
    "sgd": (torch.optim.SGD, 0.1, {"momentum": 0.9}),
    "lion": (Lion, 0.002, {}),
    "adagrad": (torch.optim.Adagrad, 0.05, {}),
    "muon": (torch.optim.Muon, 0.02, {}),
}


def optimizers_of(name, model, plan, *, lr=None, weight_decay=0.1, **settings):
    """One optimizer, or Muon and an AdamW for the rest, as a user would make them."""
    kind, usual_lr, options = OPTIMIZERS[name]
    settings |= {"lr": usual_lr if lr is None else lr, "optimizer": name, "weight_decay": weight_decay}
    if name != "muon":
        return [kind(smupar.param_groups(model, plan, **settings), **options)]
    hidden = kind(smupar.param_groups(model, plan, **settings, only="hidden"), **options)
    return [hidden, adamw(model, plan, only="rest")]


def adamw(model, plan, lr=0.01, weight_decay=0.1, *, only=None, **options):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=lr, weight_decay=weight_decay, only=only), **options)


def tokens_of(step=0, size=8, length=6, vocab=VOCAB):
    """Inputs, and as targets the tokens after them."""
    tokens = torch.randint(vocab, (size, length + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, pair):
    inputs, targets = pair
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def make_step(model, optimizers, pair):
    """One step; gradients stay."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, pair)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def used_lrs(optimizer):
    """The learning rates of hidden weights at the last step, by name: hooks of an optimizer run after the seam's."""
    used = {}
    optimizer.register_step_pre_hook(
        lambda *_: used.update({name: float(group["lr"]) for name, group in group_of_weight(optimizer).items()})
    )
    return used


def weights_of(model, names=None):
    """Copies of parameters, all or those named."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if names is None or name in names}


def state_of(optimizer, parameter):
    """The tensors of an optimizer's state that have an entry for each weight."""
    return {key: value.clone() for key, value in optimizer.state[parameter].items() if value.shape == parameter.shape}


def relative_error(ours, theirs):
    """The largest relative difference between two tensors."""
    return (ours / theirs - 1).abs().max().item()


def assert_same_tensors(found, expected):
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
