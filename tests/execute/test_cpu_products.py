"""Products by oneDNN, and updates in one pass, give the numbers of exact arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smupar.execute import cpu_products
from smupar.execute.stack.optimizers import adam_in_place
from smupar.plan.facts.optimizers import facts_of


@pytest.fixture
def by_onednn():
    """The replacement, whatever the processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with cpu_products.OneDNNMode():
        yield


def passes(layer, x, dtype):
    layer, x = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).to(dtype), x.to(dtype, copy=True)
    nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, sum(p.numel() for p in layer.parameters())).sin().to(dtype), layer.parameters()
    )
    y = layer(x.requires_grad_())
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (2, 3, 4, 24), (1, 24)])
def test_product_and_gradients_agree_with_double_precision(by_onednn, bias, shape):
    layer, x = nn.Linear(24, 40, bias), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for ours, exact in zip(passes(layer, x, torch.float32), passes(layer, x, torch.float64), strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (1, 0), (0, None)])
def test_products_of_a_stack_are_those_of_its_models(by_onednn, in_dims):
    shape, rng = [4, 5, 128], torch.Generator().manual_seed(0)
    if in_dims[0] is not None:
        shape.insert(in_dims[0], 3)
    x = torch.randn(shape, generator=rng).requires_grad_()
    weight = torch.randn([3, 160, 128] if in_dims[1] == 0 else [160, 128], generator=rng).requires_grad_()
    grads = torch.autograd.grad(torch.vmap(F.linear, in_dims)(x, weight).square().sum(), (x, weight))
    exactly = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(torch.vmap(torch.matmul, in_dims)(exactly[0], exactly[1].mT).square().sum(), exactly)
    for ours, exact in zip(grads, expected, strict=True):
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_transposed_inputs_are_multiplied_as_they_are(by_onednn):
    x, weight = torch.randn(24, 6), torch.randn(40, 24)
    torch.testing.assert_close(F.linear(x.T, weight), x.T @ weight.T)
    torch.testing.assert_close(F.linear(x.T, weight.T.contiguous().T), x.T @ weight.T)


def test_only_fp32_layers_are_replaced(by_onednn, monkeypatch):
    monkeypatch.setattr(cpu_products._Product, "apply", lambda *args: pytest.fail("replaced"))
    x, weight = torch.randn(6, 24), torch.randn(40, 24)
    F.linear(x.bfloat16(), weight.bfloat16())
    F.linear(x.double(), weight.double())
    F.linear(x[0], weight)
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(x, weight)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_update_in_one_pass_is_that_of_torch_and_leaves_dead_models_alone(name):
    lr, decay, eps = (torch.tensor(values) for values in ([0.1, 0.2, 0.3], [0.0, 0.1, 0.1], [1e-8, 1e-8, 1e-3]))
    param, alive = torch.randn(3, 4, 5), torch.tensor([True, True, False])
    state = [torch.zeros(3, 4, 5) for _ in range(2)]
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    theirs = [nn.Parameter(values.clone()) for values in param]
    optimizers = [
        classes[name]([their], lr=lr[k].item(), weight_decay=decay[k].item(), eps=eps[k].item(), betas=(0.8, 0.9))
        for k, their in enumerate(theirs)
    ]
    start = param.clone()
    for step in range(1, 4):
        grad = torch.randn(3, 5, 4).mT  # gradients of products have other strides than weights
        number = torch.full((3,), float(step))
        adam_in_place(param, grad, state, lr, decay, eps, number, alive, (0.8, 0.9), facts_of(name))
        for k, optimizer in enumerate(optimizers):
            theirs[k].grad = grad[k].clone()
            optimizer.step()
    for k in range(2):
        torch.testing.assert_close(param[k], theirs[k].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(param[2], start[2])


@pytest.mark.filterwarnings("error")
def test_compiling_a_step_says_nothing_of_caches():
    """Dynamo warns of each cached function that it meets."""

    @torch.compile(backend="eager")
    def step(x, weight):
        with cpu_products.fast_products():
            return F.linear(x, weight)

    torch._dynamo.reset()
    step(torch.ones(2, 3), torch.ones(4, 3))
