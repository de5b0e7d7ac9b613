"""Pieces of the kernels: tiles of rows, keys, features; products of rounded operands."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels run as Python on the CPU: fixed when triton is imported."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EMPTY = tl.constexpr(-1e30)
LOWEST = tl.constexpr(-2e30)  # below every sum of two finite logarithms
TINY = tl.constexpr(2.0**-64)
EMULATE = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, DOT: tl.constexpr):
    """x as the operand that `product` makes of it, in float32.

    A weight that is rounded before both sums, numerator and normaliser, stays a weight: the
    row's average keeps its weights' sum of 1.
    """
    return x.to(DOT).to(tl.float32)


@triton.jit
def product(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """ab, operands rounded to `DOT`, summed in float32."""
    if EMULATE:  # the interpreter multiplies bfloat16 as integers
        return tl.dot(rounded(a, DOT), rounded(b, DOT), input_precision="ieee")
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def exponents(x, w, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """xW for exponents, which a half-precision W would spoil: W enters as high + low part."""
    if DOT == tl.float32:  # noqa: SIM300 - DOT is no constant of ours
        return product(x, w, DOT, PRECISION)
    high = rounded(w, DOT)
    return product(x, high, DOT, PRECISION) + product(x, w - high, DOT, PRECISION)


@triton.jit
def load_rows(base, rows, open, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Tile (n, BLOCK) of rows of adjacent numbers. What is not open is not read: it is 0."""
    column = tl.arange(0, BLOCK)
    at = base + rows.to(tl.int64)[:, None] * stride + column[None, :]
    tile = tl.load(at, mask=open[:, None] & (column < WIDTH)[None, :], other=0.0)
    return tile.to(tl.float32)


@triton.jit
def store_rows(base, rows, open, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse, into rows of `WIDTH` numbers without gaps."""
    column = tl.arange(0, BLOCK)
    at = base + rows.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = open[:, None] & (column < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_map(w, m, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns m of W, (BLOCK_D, BLOCK_M)."""
    d = tl.arange(0, BLOCK_D)
    mask = (d < D)[:, None] & (m < M)[None, :]
    return tl.load(w + d[:, None] * M + m[None, :], mask=mask, other=0.0)


@triton.jit
def load_sums(s, m, column, M: tl.constexpr, V: tl.constexpr):
    """Rows m and columns of a state's S (M, V)."""
    mask = (m < M)[:, None] & (column < V)[None, :]
    return tl.load(s + m[:, None] * V + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_sums(s, m, column, tile, M: tl.constexpr, V: tl.constexpr):
    """The reverse."""
    mask = (m < M)[:, None] & (column < V)[None, :]
    tl.store(s + m[:, None] * V + column[None, :], tile, mask=mask)


@triton.jit
def load_features(x, m, M: tl.constexpr):
    """Entries m of one number a feature."""
    return tl.load(x + m, mask=m < M, other=0.0)


@triton.jit
def open_keys(key_mask, rows, end, stride):
    """Which keys of `rows` exist and may be attended."""
    open = rows < end
    if key_mask is not None:
        flag = tl.load(key_mask + rows.to(tl.int64) * stride, mask=open, other=0)
        open = open & (flag != 0)
    return open


@triton.jit
def key_levels(x, key_bias, rows, open, stride, quad):
    """log2-weight of each key, −∞ where it is closed."""
    level = tl.sum(x * x, 1) * (-quad * LOG2E)
    if key_bias is not None:
        bias = tl.load(key_bias + rows.to(tl.int64) * stride, mask=open, other=0.0)
        level += bias.to(tl.float32) * LOG2E
    return tl.where(open, level, float("-inf"))


@triton.jit
def flagged(low, begin, end, BLOCK: tl.constexpr):
    """How many rows begin, … of a block to look at: none unless one of them is flagged."""
    at = begin + tl.arange(0, BLOCK)
    some = tl.max(tl.load(low + at, mask=at < end, other=0).to(tl.int32), 0)
    return some * (tl.minimum(begin + BLOCK, end) - begin)


@triton.jit
def load_row(base, columns, WIDTH: tl.constexpr):
    """One row of `WIDTH` adjacent numbers."""
    return tl.load(base + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def row_logs(x, w, b, m, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `logs`, of a single row x (BLOCK_D,) and in plain float32."""
    u = tl.sum(x[:, None] * load_map(w, m, D, M, BLOCK_D), 0)
    if b is not None:
        u += load_features(b, m, M)
    return tl.where(m < M, u, float("-inf"))


@triton.jit
def logs(
    x, w, b, m,
    D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """u = xW + b of features m in base 2 (W and b are scaled), −∞ beyond M."""
    u = exponents(x, load_map(w, m, D, M, BLOCK_D), DOT, MAP)
    if b is not None:
        u += load_features(b, m, M)[None, :]
    return tl.where((m < M)[None, :], u, float("-inf"))
