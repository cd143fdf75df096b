"""Packed layers, which only generate: products for one token and for many, what cannot be packed, and what "auto" chooses."""

import pytest
import torch
from torch import nn

from smupar.execute.sparse import packed as subject
from smupar.execute.sparse.library import NoKernel
from smupar.execute.sparse.packed import PackedLinear, pack
from tests.support.models import Conv1D


def _matrix(num_rows, num_columns, density, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    kept = torch.rand(num_rows, num_columns, generator=rng) < density
    return (torch.randn(num_rows, num_columns, generator=rng) * kept).to(dtype)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_products_agree_with_the_dense_layer(tokens, density):
    matrix, bias, x = _matrix(37, 83, density), torch.randn(37), torch.randn(tokens, 83)
    torch.testing.assert_close(PackedLinear(matrix, bias)(x), x @ matrix.T + bias, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once_after_sums_in_fp32():
    matrix, x = _matrix(64, 96, 0.2, torch.bfloat16), torch.randn(2, 3, 96).bfloat16()
    expected = (x.double() @ matrix.double().T).bfloat16()
    torch.testing.assert_close(PackedLinear(matrix, None)(x), expected, rtol=2**-7, atol=1e-6)


def test_not_a_number_stays_with_its_row():
    matrix, x = torch.zeros(3, 40), torch.ones(1, 40)
    matrix[0, 0], matrix[1, 0], matrix[2, 5] = 1, float("nan"), 2
    assert torch.equal(PackedLinear(matrix, None)(x).isnan(), torch.tensor([[False, True, False]]))


def test_memory_is_in_proportion_to_the_non_zeros():
    layer = PackedLinear(_matrix(1000, 1000, 1 / 8, torch.bfloat16), None)
    assert layer.num_bytes == 4 * (layer.num_kept + 16) + 8 * 1001
    assert {name for name, _ in layer.named_parameters()} == set()


def test_both_kinds_of_linear_layers_are_packed():
    model = nn.Sequential(nn.Linear(20, 30), Conv1D(10, 30))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(torch.rand_like(layer.weight) < 0.3)
    x = torch.randn(5, 20)
    expected = model(x)
    assert pack(model, storage="packed").num_packed == 2
    torch.testing.assert_close(model(x), expected.detach(), rtol=1e-5, atol=1e-6)


def test_auto_takes_what_was_faster(monkeypatch):
    for winner, num_packed in (("packed", 1), ("dense", 0)):
        monkeypatch.setattr(subject, "seconds_of", lambda call, num: 1.0)
        times = {"dense": 1.0, "packed": 1.0, winner: 0.5}
        monkeypatch.setattr(subject, "in_turns", lambda *_, times=times, **__: times)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        nn.init.zeros_(model[0].weight)
        report = pack(model)
        assert (report.num_packed, report.num_dense) == (num_packed, 2 - num_packed)


def test_what_cannot_be_packed_is_named_and_stays_dense(monkeypatch):
    full, tied = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.zeros_(tied[0].weight)
    tied[1].weight = tied[0].weight
    hooked, double = nn.Linear(8, 8), nn.Linear(8, 8).double()
    nn.init.zeros_(hooked.weight)
    hooked.register_forward_hook(lambda *_: None)
    for model, why in (
        (nn.Sequential(full), "0 has hardly any zeros"),
        (tied, "0 is tied to another layer"),
        (nn.Sequential(hooked), "0 has hooks: fold its factors"),
        (nn.Sequential(double), "packed layers are float32 or bfloat16"),
        (nn.Sequential(nn.Linear(2**16 + 1, 1)), "has more than 65,536 inputs"),
        (nn.Sequential(nn.ReLU()), "there is no linear layer"),
    ):
        assert pack(model).num_packed == 0
        with pytest.raises(ValueError, match=f"no layer can be packed.*{why}.*use dense"):
            pack(model, storage="packed")

    def missing():
        raise NoKernel("there is no C++ compiler")

    monkeypatch.setattr(subject, "library", missing)
    zeros = nn.Sequential(nn.Linear(8, 8))
    nn.init.zeros_(zeros[0].weight)
    assert pack(zeros).num_packed == 0
    with pytest.raises(ValueError, match="could not be compiled: there is no C"):
        pack(zeros, storage="packed")


def test_input_of_another_dtype_raises():
    with pytest.raises(ValueError, match=r"packed in torch.float32, but the input is torch.bfloat16"):
        PackedLinear(_matrix(4, 4, 0.5), None)(torch.ones(1, 4).bfloat16())
