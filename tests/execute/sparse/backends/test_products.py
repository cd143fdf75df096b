"""Products and gradients of layers that keep only non-zeros, exact against the masked dense ones."""

import pytest
import torch

from smupar.execute.sparse.cpu import to_csc
from smupar.model.csr import flat_places, row_index
from tests.execute.sparse.kept import KERNELS, assert_same_products, layer_pair


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.125, 0.5, 1.0])
@pytest.mark.parametrize(
    ("out_size", "in_size", "tokens"), [(64, 64, 128), (37, 70, 51), (130, 17, 1), (1, 1, 3), (5, 300, 200)]
)
def test_products_are_those_of_the_masked_dense_layer(kernel, density, out_size, in_size, tokens):
    torch.manual_seed(0)
    mask = torch.rand(out_size, in_size) < density
    dense, sparse = layer_pair(mask, kernel=kernel)
    assert_same_products(dense, sparse, mask, torch.randn(tokens, in_size), 1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_products_with_empty_rows_and_columns_are_those_of_the_dense_layer(kernel):
    torch.manual_seed(0)
    mask = torch.rand(40, 50) < 0.3
    mask[[0, 7, 39]] = False
    mask[:, [0, 20, 49]] = False
    dense, sparse = layer_pair(mask, kernel=kernel)
    assert_same_products(dense, sparse, mask, torch.randn(70, 50), 1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_products_of_a_layer_that_stores_in_out_are_those_of_the_dense_one(kernel):
    torch.manual_seed(0)
    mask = torch.rand(50, 30) < 0.2
    dense, sparse = layer_pair(mask, kernel=kernel, transposed=True)
    assert_same_products(dense, sparse, mask, torch.randn(2, 33, 50), 1e-5)


def test_products_of_large_layers_stay_exact_for_every_tile_size():
    torch.manual_seed(0)
    for out_size, in_size, tokens in ((300, 5000, 40), (5000, 300, 300), (700, 600, 700)):
        mask = torch.rand(out_size, in_size) < 1 / 32
        dense, sparse = layer_pair(mask, bias=False)
        assert_same_products(dense, sparse, mask, torch.randn(tokens, in_size), 1e-5)


def test_products_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    mask = torch.rand(96, 80) < 0.2
    results = []
    for threads in (1, 2, 3):
        torch.manual_seed(1)
        dense, sparse = layer_pair(mask)
        torch.set_num_threads(threads)
        assert_same_products(dense, sparse, mask, torch.randn(333, 80), 1e-5)
        results.append(sparse.weight.grad)
    torch.set_num_threads(1)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_pass_gradcheck(kernel, transposed):
    torch.manual_seed(0)
    mask = torch.rand(9, 13) < 0.4
    _, sparse = layer_pair(mask, dtype=torch.float64, kernel=kernel, transposed=transposed)

    def function(x, values, bias):
        return torch.func.functional_call(sparse, {"weight": values, "bias": bias}, (x,))

    x = torch.randn(3, 5, sparse.matrix_shape[1 - sparse.out_dim], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, sparse.weight, sparse.bias))


def test_gradients_that_nobody_needs_are_not_made():
    mask = torch.rand(20, 30) < 0.3
    dense, sparse = layer_pair(mask)
    x = torch.randn(40, 30)
    sparse(x).sum().backward()
    dense(x).sum().backward()
    torch.testing.assert_close(sparse.expand(sparse.weight.grad), dense.weight.grad.masked_fill(~mask, 0))
    sparse.weight.requires_grad_(False)
    x.requires_grad_()
    sparse(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.weight.sum(0).expand(40, 30))


def test_bfloat16_layers_round_once():
    torch.manual_seed(0)
    mask = torch.rand(64, 96) < 0.25
    dense, sparse = layer_pair(mask, dtype=torch.bfloat16)
    assert_same_products(dense, sparse, mask, torch.randn(70, 96, dtype=torch.bfloat16), 6e-3)
    assert sparse(torch.randn(3, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_gives_what_a_linear_layer_gives():
    mask = torch.rand(64, 96) < 0.25
    dense, sparse = layer_pair(mask)
    x = torch.randn(5, 96)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = sparse(x), dense(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.05)


def test_products_are_the_same_bits_each_time():
    torch.manual_seed(0)
    _, sparse = layer_pair(torch.rand(200, 300) < 0.1)
    x = torch.randn(500, 300)
    grads = []
    for _ in range(2):
        sparse.weight.grad = None
        sparse(x).square().sum().backward()
        grads.append(sparse.weight.grad)
    assert torch.equal(*grads)


def test_index_is_exact_beyond_two_to_the_24():
    """A float32 cannot tell 2^24 from 2^24 + 1."""
    mask = torch.ones(2, 2**23 + 5, dtype=torch.bool)
    mask[0, 1] = False
    starts, columns = row_index(mask)
    assert starts.dtype == torch.int64
    assert columns.dtype == torch.int32
    assert starts.tolist() == [0, 2**23 + 4, 2**24 + 9]
    assert columns[-1] == 2**23 + 4
    assert flat_places(starts, columns, mask.shape[1])[-3:].tolist() == [2**24 + 7, 2**24 + 8, 2**24 + 9]


@pytest.mark.slow
def test_products_beyond_two_to_the_24_non_zeros_are_exact():
    torch.manual_seed(0)
    dense, sparse = layer_pair(mask := torch.rand(4100, 4200) < 0.99, bias=False)
    assert len(sparse.weight) > 2**24
    assert_same_products(dense, sparse, mask, torch.randn(3, 4200), 1e-5)


def test_columns_list_every_non_zero_by_column():
    torch.manual_seed(0)
    mask = torch.rand(11, 7) < 0.4
    mask[:, 3] = False
    starts, columns = row_index(mask)
    view = to_csc(starts, columns, 7)
    expected_starts, expected_rows = row_index(mask.T)
    assert torch.equal(view.starts, expected_starts)
    assert torch.equal(view.indices, expected_rows)
    values = torch.randn(int(mask.sum()))
    weight = torch.zeros(11, 7).masked_scatter(mask, values)
    assert torch.equal(view.values(values), weight.T[mask.T])
    assert torch.equal(view.back(view.values(values)), values)


def test_index_of_raw_memory_is_refused():
    """A kernel would read where it points."""
    _, sparse = layer_pair(torch.rand(8, 8) < 0.5)
    sparse(torch.randn(2, 8))
    with torch.no_grad():
        sparse.weight_columns[0] = 1000
    with pytest.raises(ValueError, match="damaged"):
        sparse(torch.randn(2, 8))
