"""Products with blocks, in Triton. A block of values starts at its origin, and its rows are one stride apart. Both are given in
units of the block size, so that the compiler knows that addresses are aligned."""

# ruff: noqa: N803  # matrices and constants are capitals

import triton
import triton.language as tl


@triton.jit
def gathered(
    X,
    V,
    Y,
    starts,
    indices,
    origins,
    strides,
    num_tokens,
    num_in,
    num_out,
    TRANSPOSED: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Y[tokens, line] = the sum over the line's blocks k of X[tokens, indices[k]] @ block_k, or @ block_k.T if TRANSPOSED."""
    line = tl.program_id(0)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = (token < num_tokens)[:, None]
    offsets = tl.arange(0, SIZE)
    total = tl.zeros((TOKENS, SIZE), dtype=tl.float32)
    for k in range(tl.load(starts + line), tl.load(starts + line + 1)):
        other = tl.load(indices + k)
        block = V + tl.load(origins + k).to(tl.int64) * SIZE
        stride = tl.load(strides + k).to(tl.int64) * SIZE
        x = tl.load(X + token[:, None] * num_in + (other * SIZE + offsets)[None, :], mask=inside, other=0.0)
        if TRANSPOSED:
            w = tl.load(block + offsets[None, :] * stride + offsets[:, None])
        else:
            w = tl.load(block + offsets[:, None] * stride + offsets[None, :])
        total = tl.dot(x, w, total)
    tl.store(Y + token[:, None] * num_out + (line * SIZE + offsets)[None, :], total.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def sampled(
    A,
    B,
    D,
    rows,
    columns,
    origins,
    strides,
    num_tokens,
    num_a,
    num_b,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Each program computes one block of A.T @ B and writes it to its place among the values D."""
    k = tl.program_id(0)
    row, column = tl.load(rows + k), tl.load(columns + k)
    offsets = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for first in range(0, num_tokens, TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        inside = token < num_tokens
        a = tl.load(A + token[None, :] * num_a + (row * SIZE + offsets)[:, None], mask=inside[None, :], other=0.0)
        b = tl.load(B + token[:, None] * num_b + (column * SIZE + offsets)[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    block = D + tl.load(origins + k).to(tl.int64) * SIZE
    stride = tl.load(strides + k).to(tl.int64) * SIZE
    tl.store(block + offsets[:, None] * stride + offsets[None, :], total.to(D.dtype.element_ty))
