"""What sparsify_storage refuses, leaving the model as it was."""

import pytest
import torch
from torch import nn

import smupar
from smupar.execute.sparse import compression, convert
from smupar.execute.sparse.compression import compress
from smupar.execute.sparse.cpu import Compiled
from smupar.model.attached import mask_of
from smupar.model.sparse_linear import SparseLinear
from tests.execute.sparse.kept import (
    adamw,
    assert_same_weights,
    batch,
    convnet,
    layer_pair,
    matrix,
    net,
    pair,
    parameterized,
    train,
)
from tests.support.wiring import wiring


def assert_untouched(model, call, match):
    before, kinds, keys = wiring(model), [type(module) for module in model.modules()], list(model.state_dict())
    with pytest.raises(ValueError, match=match):
        call()
    assert wiring(model) == before
    assert kinds == [type(module) for module in model.modules()]
    assert keys == list(model.state_dict())


def made(build, width, density=0.5):
    model = build(width)
    return model, smupar.parameterize(model, base=build(width // 2), density=density, reset=False)


def encoder(width):
    layer = nn.TransformerEncoderLayer(width, width // 16, 2 * width, batch_first=True)
    return nn.Sequential(nn.Linear(4, width), layer, nn.Linear(width, 4))


def tied(width):
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4))
    model[2].weight = model[1].weight
    return model


def planned_only():
    return (model := net()), smupar.make_plan(model, base=net(16), density=0.25)


def of_another_model():
    return parameterized()[0], smupar.make_plan(net(64), base=net(16), density=0.25)


REFUSED = {
    "2:4 off a GPU": (parameterized, "2:4", "'2:4' needs an NVIDIA GPU"),
    "blocks off a GPU": (parameterized, "block", "'block' needs an NVIDIA GPU"),
    "unknown backend": (parameterized, "coo", "'auto', 'dense', 'csr'"),
    "convolution": (lambda: made(convnet, 16), "csr", r"'1.weight'.*Conv2d is not"),
    "weight that is read without a call": (
        lambda: made(encoder, 64, {"*linear1.weight": 0.25, "*": 1.0}),
        "csr",
        "without calling the layer in evaluation",
    ),
    "tied weight": (lambda: made(tied, 32), "csr", "tied to another layer"),
    "half precision": (lambda: parameterized(dtype=torch.float16), "csr", r"'mix.weight'.*torch.float16"),
    "plan of another model": (of_another_model, "csr", "belongs to another model or width"),
    "no plan in the model": (planned_only, "csr", "not parameterized"),
    "no masks": (lambda: parameterized(1.0), "csr", "has a mask"),
}


@pytest.mark.parametrize(("make", "backend", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_as_non_zeros_is_refused(make, backend, message):
    model, plan = make()
    assert_untouched(model, lambda: smupar.sparsify_storage(model, plan, backend=backend), message)


def test_wrapped_model_is_refused():
    model, plan = parameterized()
    wrapped = nn.DataParallel(model)
    assert_untouched(model, lambda: smupar.sparsify_storage(wrapped, plan, backend="csr"), "wrapped in a DataParallel")


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.int64, "one of torch.float16.*torch.int64"),
        (torch.float8_e4m3fn, "got torch.float8_e4m3fn"),
        ("bf16", "got 'bf16'"),
        (torch.float64, r"'mix.weight' is torch.float32.*model.double\(\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "csr", "dense"])
def test_dtype_that_activations_do_not_have_is_refused(dtype, says, backend):
    dense, sparse, plan = pair()
    for model in (dense, sparse):
        assert_untouched(model, lambda model=model: smupar.sparsify_storage(model, plan, backend=backend, dtype=dtype), says)


def test_double_activations_go_with_double_weights():
    model, plan = parameterized(dtype=torch.float64)
    smupar.sparsify_storage(model, plan, backend="csr", dtype=torch.float64)
    assert isinstance(model.mix, SparseLinear)


def failing_at(call, number):
    """Raises at a call of a function, counted from 1."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise ValueError("no room for this one")
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("place", ["conversion", "index"])
def test_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch, place, number):
    dense, sparse, plan = pair()
    expected = dense(batch(0)[0])
    for model in (dense, sparse):
        with monkeypatch.context() as patch:
            if place == "conversion":
                patch.setattr(compression, "compress", failing_at(compress, number))
            else:
                patch.setattr(Compiled, "index", failing_at(Compiled.index, number))
            assert_untouched(model, lambda model=model: smupar.sparsify_storage(model, plan, backend="csr"), "no room")
        torch.testing.assert_close(model(batch(0)[0]), expected)
        smupar.sparsify_storage(model, plan, backend="csr")
        torch.testing.assert_close(model(batch(0)[0]), expected)
        train(model, adamw(model, plan), 2)
        assert not matrix(model, "up.weight")[~mask_of(model, "up.weight")].any()
        expected = dense(batch(0)[0]) if model is sparse else expected


def test_interrupted_measuring_leaves_the_model_as_it_was(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    _, sparse, plan = pair()
    before = list(sparse.parameters())
    monkeypatch.setattr(convert, "timing_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smupar.sparsify_storage(sparse, plan)
    assert all(a is b for a, b in zip(before, sparse.parameters(), strict=True))
    assert isinstance(sparse.up, SparseLinear)


def test_auto_measures_a_sparse_model_as_the_dense_one_and_keeps_its_weights():
    dense, sparse, plan = pair()
    report = smupar.sparsify_storage(sparse, plan, tokens=8)
    assert all(layer.seconds.keys() == {"dense", "csr"} for layer in report.layers)
    assert_same_weights(dense, sparse)
    torch.testing.assert_close(sparse(batch(0)[0]), dense(batch(0)[0]))


def test_muon_is_refused_for_non_zeros():
    _, sparse, plan = pair()
    with pytest.raises(ValueError, match="Muon takes matrices only"):
        smupar.param_groups(sparse, plan, lr=0.01, optimizer="muon", only="hidden")


def test_input_of_another_size_or_dtype_is_refused():
    _, sparse = layer_pair(torch.rand(8, 6) < 0.5)
    with pytest.raises(ValueError, match="reads 6 features"):
        sparse(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"torch.float64.*torch.float32"):
        sparse(torch.randn(3, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="the input is on meta"):
        sparse(torch.randn(3, 6, device="meta"))


def test_input_without_rows_gives_an_output_without_rows():
    _, sparse = layer_pair(torch.rand(8, 6) < 0.5)
    y = sparse(torch.randn(2, 0, 6))
    assert y.shape == (2, 0, 8)
    y.sum().backward()
    assert not sparse.weight.grad.any()
