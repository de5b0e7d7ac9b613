"""Kernels of a forward call: partial states, their merge and scan, reads, causal chunks, steps.

φ lives in registers only. All pointers are to the first number of a tensor; strides are of
tokens (_n), heads (_h) and batch rows (_b). Rows of q, k, v are dense, states are contiguous.
"""

from __future__ import annotations

import triton.language as tl

from subquad.kernels.triton.tiles import (
    EMPTY,
    LOWEST,
    TINY,
    flagged,
    key_levels,
    load_features,
    load_row,
    load_rows,
    load_sums,
    logs,
    open_keys,
    product,
    rounded,
    row_logs,
    store_rows,
    store_sums,
)
from subquad.kernels.triton.tuning import kernel


@kernel("absorb")
def absorb_kernel(
    k, v, w, b, key_bias, key_mask, s, z, c,
    k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h, bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, rows, first, end, tokens,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """States (S, z, c) of parts of `tokens` keys each, relative to the part's own maximum.

    Grid: parts × tiles of features × rows.
    """
    part, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head = n // kv, n % kv
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    w += batch * w_b + head * w_h
    if b is not None:
        b += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    begin = first + part * tokens
    stop = tl.minimum(begin + tokens, end)
    top = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for i in range(begin, stop, BLOCK_N):
        at = i + tl.arange(0, BLOCK_N)
        open = open_keys(key_mask, at, stop, mask_n)
        x = load_rows(k, at, open, k_n, D, BLOCK_D)
        y = load_rows(v, at, open, v_n, V, BLOCK_V)
        u = logs(x, w, b, m, D, M, BLOCK_D, DOT, MAP)
        u += key_levels(x, key_bias, at, open, bias_n, quad)[:, None]
        new = tl.maximum(top, tl.max(u, 0))
        phi = rounded(tl.exp2(u - new[None, :]), DOT)
        fade = tl.exp2(top - new)
        sums = sums * fade[:, None] + product(tl.trans(phi), y, DOT, SUM)
        total = total * fade + tl.sum(phi, 0)
        top = new
    to = part.to(tl.int64) * rows + n
    store_sums(s + to * M * V, m, tl.arange(0, BLOCK_V), sums, M, V)
    tl.store(z + to * M + m, total, mask=m < M)
    tl.store(c + to * M + m, top, mask=m < M)


@kernel()
def scan_kernel(
    s, z, c, s0, z0, c0, hz, hc, s_end, z_end, c_end, rows, count, segment,
    M: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds up the states of `count` parts in order, each segment of parts from its own (S, z, c)0.

    With `hz`, part t's S becomes the state *before* it, whose z and c go to hz and hc. Grid:
    (segments · rows) × tiles of features × tiles of values.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.program_id(0).to(tl.int64)  # segment · rows + n
    n = start % rows
    first = start // rows * segment
    own = m < tl.where(tl.program_id(2) == 0, M, 0)
    if s0 is None:
        sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], EMPTY, tl.float32)
    else:
        sums = load_sums(s0 + start * M * V, m, column, M, V)
        total = load_features(z0 + start * M, m, M)
        top = load_features(c0 + start * M, m, M)
    for t in range(first, tl.minimum(first + segment, count)):
        at = t * rows + n
        part = load_sums(s + at * M * V, m, column, M, V)
        part_total = load_features(z + at * M, m, M)
        part_top = load_features(c + at * M, m, M)
        if hz is not None:
            store_sums(s + at * M * V, m, column, sums, M, V)
            tl.store(hz + at * M + m, total, mask=own)
            tl.store(hc + at * M + m, top, mask=own)
        new = tl.maximum(top, part_top)
        old_fade, fade = tl.exp2(top - new), tl.exp2(part_top - new)
        sums = sums * old_fade[:, None] + part * fade[:, None]
        total = total * old_fade + part_total * fade
        top = new
    if s_end is not None:
        store_sums(s_end + n * M * V, m, column, sums, M, V)
        tl.store(z_end + n * M + m, total, mask=own)
        tl.store(c_end + n * M + m, top, mask=own)


@kernel("read")
def read_kernel(
    q, w, b, s, z, c, out, den, scale,
    q_b, q_h, q_n, w_b, w_h, heads, groups, queries, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries before `end` answered from one state. Grid: blocks of queries × (B·H)."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups  # heads are groups of a key/value head
    open = at < end
    q += batch * q_b + head * q_h
    w += batch * w_b + head // groups * w_h
    if b is not None:
        b += n * M
    column = tl.arange(0, BLOCK_V)
    x = load_rows(q, at, open, q_n, D, BLOCK_D)
    top = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        u = logs(x, w, b, m, D, M, BLOCK_D, DOT, MAP) + load_features(c + n * M, m, M)[None, :]
        new = tl.maximum(top, tl.max(u, 1))
        phi = rounded(tl.exp2(u - new[:, None]), DOT)
        fade = tl.exp2(top - new)
        state = load_sums(s + n * M * V, m, column, M, V)
        sums = sums * fade[:, None] + product(phi, state, DOT, SUM)
        total = total * fade + tl.sum(phi * load_features(z + n * M, m, M)[None, :], 1)
        top = new
    to = row * queries
    store_rows(out + to * V, at, open, sums / tl.where(total == 0, 1.0, total)[:, None], V, BLOCK_V)
    tl.store(den + to + at, total, mask=open)
    tl.store(scale + to + at, top, mask=open)


@kernel("causal")
def causal_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, out, den, scale, low,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, heads, groups, queries, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries of a causal chunk: the state before it, and its own keys up to each query.

    c holds one entry more than s and z: the maximum after chunk t is that before t + 1. Flags
    rows in `low` whose normaliser underflows because a later key of the chunk is far larger.
    Grid: blocks of queries × (B·H).
    """
    part = tl.program_id(0) * BLOCK_N
    t = (part // CHUNK).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups
    rows = tl.num_programs(1) // groups
    q += batch * q_b + head * q_h
    k += batch * k_b + head // groups * k_h
    v += batch * v_b + head // groups * v_h
    wq += batch * wq_b + head // groups * wq_h
    wk += batch * wk_b + head // groups * wk_h
    if bq is not None:
        bq += n * M
    if bk is not None:
        bk += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head // groups * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    s += (t * rows + n) * M * V
    z += (t * rows + n) * M
    before, after = c + (t * rows + n) * M, c + ((t + 1) * rows + n) * M
    column = tl.arange(0, BLOCK_V)
    at = first + part + tl.arange(0, BLOCK_N)  # as keys; as queries they lie `shift` further
    inside = at < end
    x = load_rows(q, at + shift, inside, q_n, D, BLOCK_D)
    top = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    level = EMPTY
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        old, new_c = load_features(before, m, M), load_features(after, m, M)
        level = tl.maximum(level, tl.max(tl.where(m < M, old, EMPTY), 0))
        u = logs(x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
        new = tl.maximum(top, tl.max(u, 1))
        phi = rounded(tl.exp2(u - new[:, None]), DOT)
        fade, decay = tl.exp2(top - new), tl.exp2(old - new_c)
        state = load_sums(s, m, column, M, V) * decay[:, None]
        sums = sums * fade[:, None] + product(phi, state, DOT, SUM)
        total = total * fade + tl.sum(phi * (load_features(z, m, M) * decay)[None, :], 1)
        top = new
    seen = tl.zeros([BLOCK_N], tl.int32) + (level > 0.5 * EMPTY).to(tl.int32)
    for j in range(first + part // CHUNK * CHUNK, first + part + BLOCK_N, BLOCK_N):
        keys = j + tl.arange(0, BLOCK_N)
        open = open_keys(key_mask, keys, end, mask_n)
        y = load_rows(v, keys, open, v_n, V, BLOCK_V)
        k_x = load_rows(k, keys, open, k_n, D, BLOCK_D)
        levels = key_levels(k_x, key_bias, keys, open, bias_n, quad)
        inner = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
        for i in range(0, M, BLOCK_M):
            m = i + tl.arange(0, BLOCK_M)
            new_c = load_features(after, m, M)
            u_q = logs(x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
            u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
            phi_q, phi_k = tl.exp2(u_q - top[:, None]), tl.exp2(u_k - new_c[None, :])
            inner += product(phi_q, tl.trans(phi_k), DOT, SUM)
        visible = (keys[None, :] <= at[:, None]) & open[None, :]
        inner = rounded(tl.where(visible, inner, 0.0), DOT)
        seen += tl.sum(visible.to(tl.int32), 1)
        sums += product(inner, y, DOT, SUM)
        total += tl.sum(inner, 1)
    to = row * queries
    at += shift
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    store_rows(out + to * V, at, inside, sums, V, BLOCK_V)
    tl.store(den + to + at, total, mask=inside)
    tl.store(scale + to + at, top, mask=inside)
    tl.store(low + to + at, ((total < TINY) & (seen > 0)).to(tl.uint8), mask=inside)


@kernel()
def repair_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, out, den, scale, low,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, heads, groups, queries, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Redoes each row flagged in `low` in log space: weights of pairs, not of features.

    O(M·CHUNK) exponentials a row. c holds the maxima before each chunk. Grid as `causal_kernel`.
    """
    part = tl.program_id(0) * BLOCK_N
    t = (part // CHUNK).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups
    rows = tl.num_programs(1) // groups
    k += batch * k_b + head // groups * k_h
    v += batch * v_b + head // groups * v_h
    wq += batch * wq_b + head // groups * wq_h
    wk += batch * wk_b + head // groups * wk_h
    if bq is not None:
        bq += n * M
    if bk is not None:
        bk += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head // groups * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    s += (t * rows + n) * M * V
    z += (t * rows + n) * M
    c += (t * rows + n) * M
    start = first + part // CHUNK * CHUNK
    begin = first + part
    to = row * queries + shift
    columns, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for at in range(begin, begin + flagged(low + to, begin, end, BLOCK_N)):
        for _ in range(tl.load(low + to + at).to(tl.int32)):  # once, or not at all
            x = load_row(
                q + batch * q_b + head * q_h + tl.cast(at + shift, tl.int64) * q_n, columns, D
            )
            top = tl.max(tl.full([BLOCK_N], LOWEST, tl.float32), 0)
            for i in range(0, M, BLOCK_M):
                m = i + tl.arange(0, BLOCK_M)
                u_q = row_logs(x, wq, bq, m, D, M, BLOCK_D)
                top = tl.maximum(top, tl.max(u_q + load_features(c, m, M), 0))
                for j in range(start, at + 1, BLOCK_N):
                    keys = j + tl.arange(0, BLOCK_N)
                    open = open_keys(key_mask, keys, at + 1, mask_n)
                    k_x = load_rows(k, keys, open, k_n, D, BLOCK_D)
                    levels = key_levels(k_x, key_bias, keys, open, bias_n, quad)
                    u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
                    top = tl.maximum(top, tl.max(tl.max(u_q[None, :] + u_k, 1), 0))
            total = tl.zeros([BLOCK_V], tl.float32)
            sums = tl.zeros([BLOCK_V], tl.float32)
            for i in range(0, M, BLOCK_M):
                m = i + tl.arange(0, BLOCK_M)
                u_q = row_logs(x, wq, bq, m, D, M, BLOCK_D) - top
                past = tl.exp2(u_q + load_features(c, m, M))
                sums += tl.sum(past[:, None] * load_sums(s, m, column, M, V), 0)
                total += tl.sum(past * load_features(z, m, M), 0)
                for j in range(start, at + 1, BLOCK_N):
                    keys = j + tl.arange(0, BLOCK_N)
                    open = open_keys(key_mask, keys, at + 1, mask_n)
                    k_x = load_rows(k, keys, open, k_n, D, BLOCK_D)
                    y = load_rows(v, keys, open, v_n, V, BLOCK_V)
                    levels = key_levels(k_x, key_bias, keys, open, bias_n, quad)
                    u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
                    weight = tl.sum(tl.exp2(u_q[None, :] + u_k), 1)
                    sums += tl.sum(weight[:, None] * y, 0)
                    total += tl.sum(weight, 0)
            answer = (sums / total).to(out.dtype.element_ty)
            tl.store(out + (to + at) * V + column, answer, mask=column < V)
            tl.store(den + to + at, tl.max(total, 0))
            tl.store(scale + to + at, top)


@kernel()
def step_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, s0, z0, c0, s, z, c, out, den, scale, low,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, heads, groups, queries, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A causal phase of at most BLOCK_N tokens in one launch. Grid: (B·H) × tiles of values.

    Every query head of a group needs the new state; the first one of each stores it.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    batch, head = row // heads, row % heads
    n = row // groups
    q += batch * q_b + head * q_h
    k += batch * k_b + head // groups * k_h
    v += batch * v_b + head // groups * v_h
    wq += batch * wq_b + head // groups * wq_h
    wk += batch * wk_b + head // groups * wk_h
    if bq is not None:
        bq += n * M
    if bk is not None:
        bk += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head // groups * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    at = first + tl.arange(0, BLOCK_N)
    inside = at < end
    open = open_keys(key_mask, at, end, mask_n)
    x = load_rows(q, at + shift, inside, q_n, D, BLOCK_D)
    k_x = load_rows(k, at, open, k_n, D, BLOCK_D)
    levels = key_levels(k_x, key_bias, at, open, bias_n, quad)
    values = v + at.to(tl.int64)[:, None] * v_n + column[None, :]
    y = tl.load(values, mask=open[:, None] & (column < V)[None, :], other=0.0).to(tl.float32)
    top = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    inner = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    level = EMPTY
    stores = head % groups == 0
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        if s0 is None:
            old = tl.full([BLOCK_M], EMPTY, tl.float32)
            old_z = tl.zeros([BLOCK_M], tl.float32)
            state = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        else:
            old, old_z = load_features(c0 + n * M, m, M), load_features(z0 + n * M, m, M)
            state = load_sums(s0 + n * M * V, m, column, M, V)
        level = tl.maximum(level, tl.max(tl.where(m < M, old, EMPTY), 0))
        u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
        new_c = tl.maximum(old, tl.max(u_k, 0))
        phi_k = rounded(tl.exp2(u_k - new_c[None, :]), DOT)
        decay = tl.exp2(old - new_c)
        state, old_z = state * decay[:, None], old_z * decay
        u_q = logs(x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
        new = tl.maximum(top, tl.max(u_q, 1))
        phi_q = rounded(tl.exp2(u_q - new[:, None]), DOT)
        fade = tl.exp2(top - new)
        sums = sums * fade[:, None] + product(phi_q, state, DOT, SUM)
        inner = inner * fade[:, None] + product(phi_q, tl.trans(phi_k), DOT, SUM)
        total = total * fade + tl.sum(phi_q * old_z[None, :], 1)
        top = new
        state += product(tl.trans(phi_k), y, DOT, SUM)
        own = m < tl.where(stores, M, 0)
        store = own[:, None] & (column < V)[None, :]
        tl.store(s + n * M * V + m[:, None] * V + column[None, :], state, mask=store)
        own = m < tl.where(stores & (tl.program_id(1) == 0), M, 0)
        tl.store(z + n * M + m, old_z + tl.sum(phi_k, 0), mask=own)
        tl.store(c + n * M + m, new_c, mask=own)
    visible = (at[None, :] <= at[:, None]) & open[None, :]
    inner = rounded(tl.where(visible, inner, 0.0), DOT)
    seen = tl.sum(visible.to(tl.int32), 1) + (level > 0.5 * EMPTY).to(tl.int32)
    total += tl.sum(inner, 1)
    sums += product(inner, y, DOT, SUM)
    to = row * queries
    at += shift
    answers = out + (to + at)[:, None] * V + column[None, :]
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    mask = inside[:, None] & (column < V)[None, :]
    tl.store(answers, sums.to(out.dtype.element_ty), mask=mask)
    inside = at < tl.where(tl.program_id(1) == 0, queries, 0)
    tl.store(den + to + at, total, mask=inside)
    tl.store(scale + to + at, top, mask=inside)
    tl.store(low + to + at, ((total < TINY) & (seen > 0)).to(tl.uint8), mask=inside)
