"""Indices of the kernels for GPUs, read on a CPU as the kernels read them; and what GPU backends refuse."""

import ctypes
import sys
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

from smupar.execute import cuda_graphs as graphs
from smupar.execute.sparse import backends, block, cslt, gpu, semi, tiles
from smupar.execute.sparse.auto import Timing
from smupar.execute.sparse.backends import kernel_of, missing, refusal
from smupar.execute.sparse.block import Blocks, block_size, blocks_index
from smupar.execute.sparse.compression import compress
from smupar.execute.sparse.cpu import CpuIndex
from smupar.execute.sparse.semi import SemiStructured, tile_codes
from smupar.execute.sparse.tiles import Tiles, shared_bytes, sliced_ell, tile_tokens
from smupar.model.csr import row_index
from smupar.plan.masks.patterns import generator, parse_pattern

GPU = torch.device("cuda", 0)


def drawn(pattern, shape, density=Fraction(1, 2)):
    return parse_pattern(pattern).draw(shape, (1,), density, generator(0, "mask", str(shape)))


def values_in(mask):
    """One number for each non-zero, and the matrix that has them."""
    values = torch.arange(1.0, int(mask.sum()) + 1)
    return values, torch.zeros(mask.shape).masked_scatter(mask, values)


# Tiles


@pytest.mark.parametrize("tokens", [32, 16, 8])
@pytest.mark.parametrize("by_output", [True, False])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
def test_slices_hold_every_non_zero_where_the_kernel_looks(tokens, by_output, density):
    torch.manual_seed(0)
    mask = torch.rand(64, 96) < density
    if density < 1:
        mask[[0, 40]], mask[:, [3, 95]] = False, False
    values, matrix = values_in(mask)
    sides = CpuIndex.of(*row_index(mask), (64, 96), 0)
    side, expected = (sides.by_output, matrix) if by_output else (sides.by_input, matrix.T)
    made = sliced_ell(side, expected.shape[1], tokens)
    found, lines = torch.zeros_like(expected), 32 // (tokens // 8)
    for group in range(len(made.starts) - 1):
        for sub in range(lines):
            line = group * lines // 32 * 32 + int(made.places[group * lines + sub])
            for four in range(int(made.starts[group]) + sub, int(made.starts[group + 1]), lines):
                for entry in range(4 * four, 4 * four + 4):
                    if made.source[entry] >= 0:
                        found[line, made.columns[entry]] += values[made.source[entry]]
    assert torch.equal(found, expected)
    assert int((made.source >= 0).sum()) == len(values)
    assert sorted(made.places.view(-1, 32)[0].tolist()) == list(range(32))


def test_slices_pad_little_at_low_density():
    torch.manual_seed(0)
    mask = torch.rand(1024, 1024) < 1 / 64
    made = sliced_ell(CpuIndex.of(*row_index(mask), (1024, 1024), 0).by_output, 1024, 32)
    assert len(made.source) < 1.3 * int(mask.sum())


CPU = torch.device("cpu")
SHARED = {"H100": 232448, "A100": 166912, "Ada": 101376}


@pytest.mark.parametrize(("gpu", "expected"), [("H100", [32, 16, 8]), ("A100", [16, 8, 8]), ("Ada", [8, 8, None])])
def test_tiles_have_as_many_tokens_as_shared_memory_holds(monkeypatch, gpu, expected):
    monkeypatch.setattr(tiles, "shared_limit", lambda device: SHARED[gpu])
    assert [tile_tokens(size, GPU) for size in (2048, 4096, 8192)] == expected
    for size in range(32, 8193, 32):
        tokens = tile_tokens(size, GPU)
        assert shared_bytes(size, tokens or 8) <= SHARED[gpu] or tokens is None
    assert tile_tokens(8224, GPU) is None
    said = Tiles().refusal(torch.zeros(32, 8192, dtype=torch.bool))
    assert said is None if expected[-1] else f"149504 bytes of shared memory, but this GPU has {SHARED[gpu]}" in said


def test_off_a_gpu_tiles_are_those_of_a_hopper():
    assert tiles.shared_limit(CPU) == SHARED["H100"]
    assert tile_tokens(2048, CPU) == 32


def test_product_takes_the_tokens_that_its_slices_were_made_for(monkeypatch):
    mask = torch.rand(64, 2048) < 0.1
    monkeypatch.setattr(tiles, "shared_limit", lambda device: SHARED["Ada"])
    index = Tiles().index(*row_index(mask), (64, 2048), 0)
    assert (index.forward.tokens, index.back.tokens) == (8, 32)
    monkeypatch.undo()
    launched = []

    def compiled(file, name, device, **settings):
        return lambda grid, threads, arguments: launched.append((grid[0], settings["TOK"], settings["shared"]))

    monkeypatch.setattr(tiles, "compiled", compiled)
    tiles.multiply(torch.zeros(100, 2048), index.forward, torch.zeros(1))
    tiles.multiply(torch.zeros(100, 64), index.back, torch.zeros(1))
    assert launched == [(13, 8, shared_bytes(2048, 8)), (4, 32, shared_bytes(64, 32))]


def test_index_of_a_shape_that_does_not_fit_is_refused_without_a_matrix_of_it():
    starts, columns = torch.zeros(2**20 + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"beyond 8192 features"):
        Tiles().index(starts, columns, (2**20, 2**30), 0)


# 2:4


def picked(matrix, codes):
    """As ``pick`` in semi.cu."""
    rows = []
    for row in range(matrix.shape[0]):
        kept = []
        for tile in range(codes.shape[1]):
            nibble = int(codes[row // 4, tile]) >> 4 * (row % 4) & 15
            kept += [matrix[row, 4 * tile + c] for c in range(4) if nibble >> c & 1]
        rows.append(torch.stack(kept))
    return torch.stack(rows).flatten()


def turned(values, codes):
    """As ``turn`` in semi.cu."""
    row_tiles, column_tiles = codes.shape
    by_row, made = values.view(4 * row_tiles, 2 * column_tiles), torch.zeros(4 * column_tiles, 2 * row_tiles)
    for row in range(row_tiles):
        for column in range(column_tiles):
            code, taken = int(codes[row, column]), [0] * 4
            for c in range(4):
                place = 0
                for r in range(4):
                    if code >> (4 * r + c) & 1:
                        made[4 * column + c, 2 * row + place] = by_row[4 * row + r, 2 * column + taken[r]]
                        taken[r], place = taken[r] + 1, place + 1
    return made.flatten()


def test_tile_codes_pick_and_turn_the_values():
    mask = drawn("2:4-transposable", (32, 64))
    values, matrix = values_in(mask)
    codes = tile_codes(mask)
    assert codes.shape == (8, 16)
    assert torch.equal(picked(matrix, codes), values)
    assert torch.equal(turned(values, codes), matrix.T[mask.T])


@pytest.fixture
def searches(monkeypatch):
    """Sizes of every search for an algorithm. A plan, which needs a GPU, is its name here."""
    found = []

    def faster(plan, matrix, rows):
        found.append((len(matrix), *rows.shape))
        return f"searched {plan}"

    monkeypatch.setattr(semi.cslt, "MatmulPlan", lambda shape, num_rows, device: f"{shape} x {num_rows}")
    monkeypatch.setattr(semi, "_faster", faster)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_algorithm_is_searched_for_sizes_that_come_back(searches):
    kernel, matrix = SemiStructured(), torch.zeros(64, 36)
    used = [kernel._plan(matrix, torch.zeros(16, 128)) for _ in range(5)]
    assert used == ["(64, 128) x 16"] * 2 + ["searched (64, 128) x 16"] * 3
    assert searches == [(64, 16, 128)]
    assert kernel._plan(torch.zeros(128, 36), torch.zeros(16, 64)) == "(128, 64) x 16"


def test_lengths_that_do_not_come_back_cost_no_search_and_no_memory(searches):
    kernel, matrix = SemiStructured(), torch.zeros(64, 36)
    for _ in range(3):
        kernel._plan(matrix, torch.zeros(16, 64))
    for rows in range(32, 32 + 16 * 1000, 16):
        assert kernel._plan(matrix, torch.zeros(rows, 64)) == f"(64, 64) x {rows}"
        assert kernel._plan(matrix, torch.zeros(16, 64)) == "searched (64, 64) x 16"  # the one that is used stays
    assert searches == [(64, 16, 64)]
    assert len(kernel._plans) == 64


def test_no_algorithm_is_searched_during_capture(searches, monkeypatch):
    kernel, arguments = SemiStructured(), (torch.zeros(64, 36), torch.zeros(16, 64))
    plain, searched = "(64, 64) x 16", "searched (64, 64) x 16"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [kernel._plan(*arguments) for _ in range(5)] == [plain] * 5
    assert searches == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [kernel._plan(*arguments) for _ in range(3)] == [plain, plain, searched]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel._plan(*arguments) == searched
    assert kernel._captured == {plain, searched}  # graphs may replay both


def test_warm_up_of_a_graph_is_long_enough_for_the_search():
    assert graphs.WARM_UP >= semi.SEARCH_AT


def test_cusparselt_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert "torch was built without" in cslt.missing().replace(f"torch {torch.__version__}", "torch")
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(torch, "_cslt_compress", None, raising=False)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 400)
    assert "version 500 or later" in cslt.missing()
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 800)
    cslt._library.cache_clear()
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open")))
    assert "libcusparseLt.so.0: cannot open" in cslt.missing()


class Library:
    """Stands for cuSPARSELt: notes what is called with which structures."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            places = [arg._as_parameter_.value for arg in args if isinstance(arg, cslt.Struct)]
            self.calls.append((name.removeprefix("cusparseLt"), places))
            return 3 if name == "cusparseLtMatmulSearch" else 0

        return call


def test_plan_gives_back_what_it_took_and_says_which_call_failed(monkeypatch):
    library = Library()
    monkeypatch.setattr(cslt, "_library", lambda: library)
    monkeypatch.setattr(cslt, "_handle", lambda device: cslt.Struct())
    monkeypatch.setattr(cslt, "current_stream", lambda device: ctypes.c_void_p(0))
    plan = cslt.MatmulPlan((64, 128), 16, CPU)
    assert all(place % 16 == 0 for _, places in library.calls for place in places)
    made = {name: places[1] for name, places in library.calls if name.endswith("Init")}
    with pytest.raises(RuntimeError, match="cusparseLtMatmulSearch failed with code 3"):
        plan.search(torch.zeros(64, 72), torch.zeros(16, 128))
    assert plan(torch.zeros(64, 72), torch.zeros(16, 128)).shape == (16, 64)
    library.calls.clear()
    del plan
    gone = [(name, *places) for name, places in library.calls]
    assert gone[:2] == [
        ("MatmulPlanDestroy", made["MatmulPlanInit"]),
        ("MatmulAlgSelectionDestroy", made["MatmulAlgSelectionInit"]),
    ]
    assert [name for name, _ in gone[2:]] == ["MatDescriptorDestroy"] * 3
    assert {made["StructuredDescriptorInit"], made["DenseDescriptorInit"]} < {place for _, place in gone[2:]}


# Blocks


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_blocks_are_found_among_the_values_from_both_sides(size):
    torch.manual_seed(0)
    keep = torch.rand(3, 5) < 0.5
    keep[1], keep[:, 2] = False, False
    keep[0, 0], keep[0, 1], keep[2, 0] = True, False, True
    mask = keep.repeat_interleave(size, 0).repeat_interleave(size, 1)
    assert block_size(mask) == size
    values, matrix = values_in(mask)
    index = blocks_index(mask, size, 0)
    offsets = torch.arange(size)
    for lines, expected, turn in ((index.rows, matrix, False), (index.columns, matrix.T, True)):
        found = torch.zeros_like(expected)
        for line in range(len(lines.starts) - 1):
            for k in range(int(lines.starts[line]), int(lines.starts[line + 1])):
                at = int(lines.origins[k]) * size + offsets[:, None] * int(lines.strides[k]) * size + offsets
                other = int(lines.indices[k]) * size
                block = values[at]
                found[line * size : (line + 1) * size, other : other + size] = block.T if turn else block
        assert torch.equal(found, expected)
    assert torch.equal(index.row_of, keep.nonzero()[:, 0].int())


def test_block_size_is_the_largest_that_fits():
    assert block_size(drawn("block-16", (256, 256), Fraction(1, 8))) == 16
    assert block_size(torch.ones(256, 384, dtype=torch.bool)) == 128
    assert block_size(torch.zeros(64, 96, dtype=torch.bool)) == 32
    assert block_size(torch.ones(40, 64, dtype=torch.bool)) is None
    assert block_size(torch.rand(64, 64) < 0.5) is None


def test_rows_beyond_a_grid_are_multiplied_in_parts(monkeypatch):
    launched = []

    class Gathered:
        def __getitem__(self, grid):
            return lambda x, values, y, *rest, **settings: (launched.append((grid, len(x), rest[4])), y.copy_(x))

    monkeypatch.setattr(block, "_kernels", lambda: type("Kernels", (), {"gathered": Gathered()}))
    monkeypatch.setattr(block, "_MOST_PROGRAMS", 2)
    mask = torch.ones(16, 16, dtype=torch.bool)
    index = Blocks().index(*row_index(mask), (16, 16), 0)
    rows = torch.randn(600, 16).bfloat16()
    assert torch.equal(Blocks().product(rows, index, torch.zeros(256), back=False), rows)
    assert launched == [((1, 2), 256, 256), ((1, 2), 256, 256), ((1, 1), 88, 88)]


# Refusals


def test_masks_that_a_kernel_cannot_hold_are_refused_with_a_remedy():
    random = torch.rand(64, 64) < 0.5
    assert "2:4-transposable" in SemiStructured().refusal(random)
    assert "2:4-transposable" in SemiStructured().refusal(drawn("2:4", (64, 64)))  # along rows only
    assert "multiples of 64" in SemiStructured().refusal(drawn("2:4-transposable", (96, 64)))
    assert SemiStructured().refusal(drawn("2:4-transposable", (64, 192))) is None
    assert "block-64" in Blocks().refusal(random)
    assert Blocks().refusal(drawn("block-16", (64, 96))) is None
    assert "multiples of 32" in Tiles().refusal(torch.rand(64, 48) < 0.5)
    assert "8192 features" in Tiles().refusal(torch.zeros(32, 8224, dtype=torch.bool))
    assert Tiles().refusal(random) is None


def test_index_of_a_mask_that_a_kernel_cannot_hold_is_refused():
    """Such as that of a checkpoint."""
    starts, columns = row_index(torch.rand(64, 64) < 0.5)
    for kernel, says in ((SemiStructured(), "2:4-transposable"), (Blocks(), "block-64")):
        with pytest.raises(ValueError, match=says):
            kernel.index(starts, columns, (64, 64), 0)
    with pytest.raises(ValueError, match="multiples of 32"):
        Tiles().index(*row_index(torch.rand(40, 64) < 0.5), (40, 64), 0)


def sparse_layer(mask, kernel):
    layer = nn.Linear(mask.shape[1], mask.shape[0], bias=False)
    layer.register_buffer("weight_mask", mask)
    compress(layer, mask, out_dim=0, backend="2:4")
    layer.kernel_of = lambda _: kernel
    return layer


def test_move_that_a_kernel_cannot_hold_leaves_the_layer_as_it_was():
    mask = drawn("2:4-transposable", (64, 64))
    layer = sparse_layer(mask, SemiStructured())
    weight, before = layer.weight, layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'2:4' cannot hold the moved mask: .*backend='csr'.*'dense'"):
        layer.move_nonzeros(torch.rand(64, 64) < 0.5)
    assert layer.weight is weight
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight_mask, mask)


def test_input_that_is_not_bfloat16_is_refused_by_kernels_for_gpus():
    layer = sparse_layer(drawn("2:4-transposable", (64, 64)), SemiStructured())
    with pytest.raises(ValueError, match=r"'2:4' multiplies torch.bfloat16 on a GPU.*torch.float32.*torch.autocast\('cuda'"):
        layer(torch.randn(3, 64))


class Dtyped:
    """A layer whose weight says that it lies on a GPU."""

    def __init__(self, dtype):
        self.weight = type("Weight", (), {"dtype": dtype, "device": GPU})()


def test_backends_on_a_gpu_want_bfloat16_activations(monkeypatch):
    monkeypatch.setattr(gpu, "missing", lambda device: None)
    backends._missing_on_gpu.cache_clear()
    mask = torch.rand(64, 64) < 0.5
    csr = partial(refusal, "csr")
    assert csr(Dtyped(torch.float32), mask, torch.bfloat16) is None
    assert csr(Dtyped(torch.bfloat16), mask, torch.bfloat16) is None
    for dtype in (torch.float32, torch.float16):
        said = csr(Dtyped(torch.float32), mask, dtype)
        assert f"its activations are {dtype}" in said
        assert "dtype=torch.bfloat16" in said
    assert "its weight is torch.float64" in csr(Dtyped(torch.float64), mask, torch.bfloat16)
    backends._missing_on_gpu.cache_clear()


def test_devices_without_a_kernel_say_what_is_missing(monkeypatch):
    assert missing("csr", torch.device("cpu")) is None
    assert "runs on a CPU or an NVIDIA GPU, but the model is on mps" in missing("csr", torch.device("mps"))
    with pytest.raises(ValueError, match="'block' needs an NVIDIA GPU, but the model is on cpu: use 'csr' there"):
        kernel_of("block", torch.device("cpu"))
    monkeypatch.delattr(torch.cuda, "_compile_kernel", raising=False)
    assert "torch.cuda._compile_kernel" in gpu.missing(GPU)
    monkeypatch.setattr(sys, "platform", "win32")
    assert gpu.missing(GPU) == "Linux"


# Choosing


def test_a_gpu_keeps_a_layer_dense_unless_a_backend_gains_more_than_its_clock_wanders():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for gain, on_gpu, on_cpu in ((0.5, "block", "block"), (0.98, "dense", "block"), (1.01, "dense", "dense")):
        timing = Timing({"dense": 1.0, "csr": 2.0, "block": gain}, {})
        assert timing.fastest(gpu) == on_gpu
        assert timing.fastest(cpu) == on_cpu
