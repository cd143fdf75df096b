"""A small net kept dense with masks and as non-zeros, and single layers likewise."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.execute.sparse.compression import compress
from smupar.execute.sparse.cpu import Compiled, Torch
from smupar.model.sparse_linear import SparseLinear
from tests.support import loops
from tests.support.models import VOCAB, Conv1D, TokenNet

KERNELS = [Compiled(), Torch()]


HIDDEN = ["mix.weight", "up.weight", "down.weight"]


def net(width=32):
    """Hidden weights of 32 x 32, 64 x 32 and 32 x 64 at width 32; ``down`` stores (in, out), as GPT-2 does."""
    return TokenNet(width, down=Conv1D)


def adamw(model, plan, **settings):
    return loops.adamw(model, plan, 0.02, **settings)


def relative(a, b):
    return ((a.detach().double() - b).norm() / b.norm().clamp(min=1e-30)).item()


def parameterized(density=0.25, *, dtype=torch.float32, seed=0, **settings):
    torch.manual_seed(seed)
    model = net().to(dtype)
    return model, smupar.parameterize(model, base=net(16), density=density, reset=False, seed=seed, **settings)


def pair(density=0.25, **settings):
    """The same model twice, dense with masks and as non-zeros, and their plan."""
    dense, plan = parameterized(density, **settings)
    sparse = copy.deepcopy(dense)
    smupar.attach(dense, plan)
    smupar.sparsify_storage(sparse, plan, backend="csr")
    return dense, sparse, plan


def batch(step, num=16):
    tokens = torch.randint(VOCAB, (num, 8), generator=torch.Generator().manual_seed(step))
    return tokens, (3 * tokens + 1) % VOCAB


def loss_of(model, step):
    tokens, targets = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model, optimizer, steps, *, start=0, after=lambda: None):
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return torch.tensor(losses)


def matrix(model, name):
    """The whole weight, however it is kept."""
    module = model.get_submodule(name.removesuffix(".weight"))
    return module.expand(module.weight.detach()) if isinstance(module, SparseLinear) else module.weight.detach()


def assert_same_weights(a, b, **tolerance):
    for name, parameter in a.named_parameters():
        first = matrix(a, name) if name in HIDDEN else parameter
        second = matrix(b, name) if name in HIDDEN else b.get_parameter(name)
        torch.testing.assert_close(first, second, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def layer_pair(mask, *, dtype=torch.float32, bias=True, kernel=None, transposed=False):
    """A dense linear layer and the same one as non-zeros."""
    out_size, in_size = mask.shape if not transposed else mask.T.shape
    dense = (Conv1D(out_size, in_size) if transposed else nn.Linear(in_size, out_size, bias=bias)).to(dtype)
    with torch.no_grad():
        dense.weight.normal_().masked_fill_(~mask, 0)
        if dense.bias is not None:
            dense.bias.normal_()
    sparse = copy.deepcopy(dense)
    sparse.register_buffer("weight_mask", mask)
    compress(sparse, mask, out_dim=int(transposed))
    if kernel is not None:
        sparse.kernel_of = lambda _: kernel
    return dense, sparse


def assert_same_products(dense, sparse, mask, x, tolerance):
    """Forward and every gradient, relative to the masked dense layer in double precision."""
    grad = torch.randn(*x.shape[:-1], dense(x).shape[-1], dtype=x.dtype)
    exact = copy.deepcopy(dense).double()
    exact_x, sparse_x = x.detach().double().requires_grad_(), x.detach().clone().requires_grad_()
    exact_y, sparse_y = exact(exact_x), sparse(sparse_x)
    exact_y.backward(grad.double())
    sparse_y.backward(grad)
    assert sparse_y.shape == exact_y.shape
    assert relative(sparse_y.double(), exact_y) < tolerance
    assert relative(sparse_x.grad.double(), exact_x.grad) < tolerance
    assert relative(sparse.expand(sparse.weight.grad).double(), exact.weight.grad.masked_fill(~mask, 0)) < tolerance
    if dense.bias is not None:
        assert relative(sparse.bias.grad.double(), exact.bias.grad) < tolerance


def convnet(width):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(16 * width, 4))
