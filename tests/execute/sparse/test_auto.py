"""Which backend is chosen, and what happens without a compiler."""

import pytest
import torch

import smupar
from smupar.execute.sparse import auto, library
from smupar.execute.sparse.cpu import best_kernel
from smupar.model.sparse_linear import SparseLinear
from tests.execute.sparse.kept import batch, convnet, pair, parameterized
from tests.support.ranks import on_two_ranks


def test_auto_says_what_it_chose_and_measures_each_kind_of_layer_once():
    model, plan = parameterized()
    expected = model(batch(0)[0])
    report = smupar.sparsify_storage(model, plan, tokens=64)
    for layer in report.layers:
        assert layer.seconds.keys() == {"dense", "csr"}
        assert layer.backend == min(layer.seconds, key=layer.seconds.get)
        assert isinstance(model.get_submodule(layer.name.removesuffix(".weight")), SparseLinear) == (layer.backend == "csr")
    torch.testing.assert_close(model(batch(0)[0]), expected)


def test_auto_leaves_random_numbers_alone():
    model, plan = parameterized()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    smupar.sparsify_storage(model, plan, tokens=8)
    assert torch.equal(torch.rand(3), expected)


def choose(rank):
    """On a rank that measures other times than the other one."""
    auto._measured = lambda *_: auto.Timing({"dense": 1.0, "csr": 0.5 + rank}, {})
    return [layer.backend for layer in smupar.sparsify_storage(*parameterized()).layers]


def test_ranks_choose_what_the_first_measured(tmp_path):
    assert on_two_ranks(choose, tmp_path) == [["csr"] * 3] * 2


def test_auto_leaves_layers_dense_that_cannot_be_sparse():
    model = convnet(16)
    plan = smupar.parameterize(model, base=convnet(8), density=0.5, reset=False)
    (layer,) = smupar.sparsify_storage(model, plan).layers
    assert layer.backend == "dense"
    assert "Conv2d is not a plain linear layer" in layer.note


def test_without_a_compiler_torch_does_it_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for cached in (library._library, best_kernel):
        cached.cache_clear()
    with pytest.warns(smupar.SparseWarning, match=r"no C\+\+ compiler"):
        dense, sparse, _ = pair()
    tokens, _ = batch(0)
    torch.testing.assert_close(sparse(tokens), dense(tokens))
    for cached in (library._library, best_kernel):
        cached.cache_clear()


def test_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: out of ink' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    library._library.cache_clear()
    with pytest.raises(library.NoKernel, match="out of ink"):
        library.library()
    library._library.cache_clear()
