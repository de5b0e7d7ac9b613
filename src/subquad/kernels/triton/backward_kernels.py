"""Kernels of the backward pass. φ is made again from the inputs and each row's scale.

With g = ō/den and δ = d̄en − Σ g∘out of a row:

    ln φ_q:  (g Sᵀ + δ zᵀ + P φ_k)∘φ_q,   P = tril(g vᵀ + δ)
    ln φ_k:  (v S̄ᵀ + z̄ + Pᵀ φ_q)∘φ_k,     S̄ = Σ φ_qᵀ g,  z̄ = Σ φ_qᵀ δ over later queries
    v̄ = φ_k S̄ + Aᵀ g,                     A = tril(φ_q φ_kᵀ)

δ is stored by the kernels that make q̄ and read by the others. Rows flagged in `low` have φ_q = 0
in all sums of features; kernels named repair add what they give. Conventions as forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.triton.tiles import (
    LN2,
    flagged,
    key_levels,
    load_features,
    load_map,
    load_row,
    load_rows,
    load_sums,
    logs,
    open_keys,
    product,
    row_logs,
    store_rows,
    store_sums,
)
from subquad.kernels.triton.tuning import kernel


@triton.jit
def inverse(den, at, open):
    """1/den of rows; 0 where there is no key, which passes nothing."""
    value = tl.load(den + at, mask=open, other=0.0)
    return tl.where(value == 0, 0.0, 1.0 / tl.where(value == 0, 1.0, value))


@triton.jit
def outer(
    out, out_bar, den, den_bar, delta, at, open, o_n,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """g and δ of rows; stores δ."""
    g = load_rows(out_bar, at, open, o_n, V, BLOCK_V) * inverse(den, at, open)[:, None]
    change = -tl.sum(g * load_rows(out, at, open, V, V, BLOCK_V), 1)
    if den_bar is not None:
        change += tl.load(den_bar + at, mask=open, other=0.0)
    tl.store(delta + at, change, mask=open)
    return g, change


@triton.jit
def scales(scale, low, at, open):
    """log2 scale of rows; +∞, hence φ_q = 0, for rows that do not exist or are redone apart."""
    if low is not None:
        open = open & (tl.load(low + at, mask=open, other=0) == 0)
    return tl.load(scale + at, mask=open, other=float("inf"))


@kernel("read_backward")
def read_backward_kernel(
    q, w, b, s, z, c, out, den, scale, out_bar, den_bar, q_bar, delta,
    q_b, q_h, q_n, o_b, o_h, o_n, w_b, w_h, heads, groups, queries, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q̄ and δ of queries before `end`. Grid: blocks of queries × (B·H)."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups
    open = at < end
    q += batch * q_b + head * q_h
    out_bar += batch * o_b + head * o_h
    w += batch * w_b + head // groups * w_h
    if b is not None:
        b += n * M
    if den_bar is not None:
        den_bar += row * queries
    to = row * queries
    x = load_rows(q, at, open, q_n, D, BLOCK_D)
    g, change = outer(
        out + to * V, out_bar, den + to, den_bar, delta + to, at, open, o_n, V, BLOCK_V
    )
    top = scales(scale + to, None, at, open)
    column = tl.arange(0, BLOCK_V)
    bar = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        u = logs(x, w, b, m, D, M, BLOCK_D, DOT, MAP) + load_features(c + n * M, m, M)[None, :]
        phi = tl.exp2(u - top[:, None])
        state = load_sums(s + n * M * V, m, column, M, V)
        phi_bar = product(g, tl.trans(state), DOT, SUM)
        phi_bar += change[:, None] * load_features(z + n * M, m, M)[None, :]
        back = tl.trans(load_map(w, m, D, M, BLOCK_D))
        bar += product(phi_bar * phi, back, DOT, SUM)
    # W is log2(e) times the map's: the cotangent of ln φ takes it back.
    store_rows(q_bar + to * D, at, open, bar * LN2, D, BLOCK_D)


@kernel("cotangent")
def cotangent_kernel(
    q, w, b, c, den, scale, low, out_bar, delta, s_bar, z_bar,
    q_b, q_h, q_n, o_b, o_h, o_n, w_b, w_h, c_t, heads, groups, queries, first, end, tokens,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ φ_qᵀ g and Σ φ_qᵀ δ of parts of `tokens` queries each, part t at the scale c + t·c_t.

    Grid: parts × tiles of features × (B·H).
    """
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, head = row // heads, row % heads
    n = row // groups
    q += batch * q_b + head * q_h
    out_bar += batch * o_b + head * o_h
    w += batch * w_b + head // groups * w_h
    if b is not None:
        b += n * M
    to = row * queries
    if low is not None:
        low += to
    level = load_features(c + part.to(tl.int64) * c_t + n * M, m, M)
    begin = first + part * tokens
    stop = tl.minimum(begin + tokens, end)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in range(begin, stop, BLOCK_N):
        at = i + tl.arange(0, BLOCK_N)
        open = at < stop
        x = load_rows(q, at, open, q_n, D, BLOCK_D)
        g = load_rows(out_bar, at, open, o_n, V, BLOCK_V) * inverse(den + to, at, open)[:, None]
        change = tl.load(delta + to + at, mask=open, other=0.0)
        u = logs(x, w, b, m, D, M, BLOCK_D, DOT, MAP) + level[None, :]
        phi = tl.exp2(u - scales(scale + to, low, at, open)[:, None])
        sums += product(tl.trans(phi), g, DOT, SUM)
        total += tl.sum(phi * change[:, None], 0)
    to = part.to(tl.int64) * tl.num_programs(2) + row
    store_sums(s_bar + to * M * V, m, tl.arange(0, BLOCK_V), sums, M, V)
    tl.store(z_bar + to * M + m, total, mask=m < M)


@triton.jit
def finish_key(
    k_bar, v_bar, bias_bar, bar, y_bar, weight_bar, x, at, inside, quad,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Stores k̄, v̄ and the log-weight's cotangent; a closed key has φ_k = 0, hence zeros."""
    bar = bar * LN2 - 2.0 * quad * weight_bar[:, None] * x
    store_rows(k_bar, at, inside, bar, D, BLOCK_D)
    store_rows(v_bar, at, inside, y_bar, V, BLOCK_V)
    if bias_bar is not None:
        tl.store(bias_bar + at, weight_bar, mask=inside)


@kernel("absorb_backward")
def absorb_backward_kernel(
    k, v, w, b, key_bias, key_mask, c, s_bar, z_bar, k_bar, v_bar, bias_bar,
    k_b, k_h, k_n, v_b, v_h, v_n, w_b, w_h, bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, keys, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """k̄, v̄ of keys before `end`, from the cotangent of the state. Grid: blocks of keys × rows."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.program_id(1).to(tl.int64)
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
    if bias_bar is not None:
        bias_bar += n * keys
    open = open_keys(key_mask, at, end, mask_n)
    x = load_rows(k, at, open, k_n, D, BLOCK_D)
    y = load_rows(v, at, open, v_n, V, BLOCK_V)
    levels = key_levels(x, key_bias, at, open, bias_n, quad)
    column = tl.arange(0, BLOCK_V)
    bar = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    y_bar = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    weight_bar = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        u = logs(x, w, b, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
        phi = tl.exp2(u - load_features(c + n * M, m, M)[None, :])
        state_bar = load_sums(s_bar + n * M * V, m, column, M, V)
        phi_bar = product(y, tl.trans(state_bar), DOT, SUM)
        phi_bar = (phi_bar + load_features(z_bar + n * M, m, M)[None, :]) * phi
        y_bar += product(phi, state_bar, DOT, SUM)
        weight_bar += tl.sum(phi_bar, 1)
        bar += product(phi_bar, tl.trans(load_map(w, m, D, M, BLOCK_D)), DOT, SUM)
    finish_key(
        k_bar + n * keys * D, v_bar + n * keys * V, bias_bar, bar, y_bar, weight_bar, x, at,
        at < end, quad, D, V, BLOCK_D, BLOCK_V,
    )  # fmt: skip


@kernel("causal_query")
def causal_query_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, out, den, scale, low, out_bar, den_bar,
    q_bar, delta,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, heads, groups, queries, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q̄ and δ of causal queries, as `causal_kernel`. Grid: blocks of queries × (B·H)."""
    part = tl.program_id(0) * BLOCK_N
    t = (part // CHUNK).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups
    rows = tl.num_programs(1) // groups
    q += batch * q_b + head * q_h
    k += batch * k_b + head // groups * k_h
    v += batch * v_b + head // groups * v_h
    out_bar += batch * o_b + head * o_h
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
    to = row * queries
    if den_bar is not None:
        den_bar += to
    column = tl.arange(0, BLOCK_V)
    at = first + part + tl.arange(0, BLOCK_N)
    inside = at < end
    x = load_rows(q, at + shift, inside, q_n, D, BLOCK_D)
    g, change = outer(
        out + to * V, out_bar, den + to, den_bar, delta + to, at + shift, inside, o_n, V, BLOCK_V
    )
    top = scales(scale + to, low + to, at + shift, inside)
    bar = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        new_c = load_features(after, m, M)
        decay = tl.exp2(load_features(before, m, M) - new_c)
        u = logs(x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
        phi = tl.exp2(u - top[:, None])
        state = load_sums(s, m, column, M, V) * decay[:, None]
        phi_bar = product(g, tl.trans(state), DOT, SUM)
        phi_bar += change[:, None] * (load_features(z, m, M) * decay)[None, :]
        back = tl.trans(load_map(wq, m, D, M, BLOCK_D))
        bar += product(phi_bar * phi, back, DOT, SUM)
    for j in range(first + part // CHUNK * CHUNK, first + part + BLOCK_N, BLOCK_N):
        keys = j + tl.arange(0, BLOCK_N)
        open = open_keys(key_mask, keys, end, mask_n)
        y = load_rows(v, keys, open, v_n, V, BLOCK_V)
        k_x = load_rows(k, keys, open, k_n, D, BLOCK_D)
        levels = key_levels(k_x, key_bias, keys, open, bias_n, quad)
        pair = product(g, tl.trans(y), DOT, SUM) + change[:, None]
        pair = tl.where((keys[None, :] <= at[:, None]) & open[None, :], pair, 0.0)
        for i in range(0, M, BLOCK_M):
            m = i + tl.arange(0, BLOCK_M)
            new_c = load_features(after, m, M)
            u_q = logs(x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
            u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
            phi_q, phi_k = tl.exp2(u_q - top[:, None]), tl.exp2(u_k - new_c[None, :])
            phi_bar = product(pair, phi_k, DOT, SUM) * phi_q
            bar += product(phi_bar, tl.trans(load_map(wq, m, D, M, BLOCK_D)), DOT, SUM)
    store_rows(q_bar + to * D, at + shift, inside, bar * LN2, D, BLOCK_D)


@kernel()
def reverse_scan_kernel(
    s_bar, z_bar, hz, c, s_end, z_end, s_first, z_first,
    q, w, b, den, scale, low, out_bar, delta,
    q_b, q_h, q_n, o_b, o_h, o_n, w_b, w_h, heads, groups, queries, rows, first, end, count,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Turns each chunk's Σ φ_qᵀ g into S̄ *after* the chunk, summing from the end.

    Flagged rows, which are left out there, read the state *before* their chunk and are added
    on the way. c holds one entry more, as in `causal_kernel`; z̄ goes to hz. Grid as `scan_kernel`.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.program_id(0).to(tl.int64)
    own = m < tl.where(tl.program_id(2) == 0, M, 0)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if s_end is not None:
        sums = load_sums(s_end + n * M * V, m, column, M, V)
    if z_end is not None:
        total = load_features(z_end + n * M, m, M)
    kv = heads // groups
    w += n // kv * w_b + n % kv * w_h
    if b is not None:
        b += n * M
    columns = tl.arange(0, BLOCK_D)
    for r in range(count):
        t = count - 1 - r
        at = t * rows + n
        part = load_sums(s_bar + at * M * V, m, column, M, V)
        part_total = load_features(z_bar + at * M, m, M)
        store_sums(s_bar + at * M * V, m, column, sums, M, V)
        tl.store(hz + at * M + m, total, mask=own)
        level = load_features(c + at * M, m, M)
        decay = tl.exp2(level - load_features(c + (at + rows) * M, m, M))
        sums = (sums + part) * decay[:, None]
        total = (total + part_total) * decay
        begin = first + t * CHUNK
        for h in range(groups):
            row = n * groups + h
            to = row * queries
            q_row = q + row // heads * q_b + row % heads * q_h
            o_row = out_bar + row // heads * o_b + row % heads * o_h
            for i in range(begin, begin + flagged(low + to, begin, end, CHUNK)):
                for _ in range(tl.load(low + to + i).to(tl.int32)):  # once, or not at all
                    x = load_row(q_row + tl.cast(i, tl.int64) * q_n, columns, D)
                    g = load_row(o_row + tl.cast(i, tl.int64) * o_n, column, V) / tl.load(
                        den + to + i
                    )
                    u_q = row_logs(x, w, b, m, D, M, BLOCK_D)
                    past = tl.exp2(u_q + level - tl.load(scale + to + i))
                    sums += past[:, None] * g[None, :]
                    total += past * tl.load(delta + to + i)
    store_sums(s_first + n * M * V, m, column, sums, M, V)
    tl.store(z_first + n * M + m, total, mask=own)


@kernel("causal_key")
def causal_key_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, c, den, scale, low, out_bar, delta, s_bar, z_bar,
    k_bar, v_bar, bias_bar,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, groups, queries, keys, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """k̄, v̄ of causal keys: from the state's cotangent after their chunk, and from the queries
    of the chunk that follow them. Grid: blocks of keys × rows.
    """
    part = tl.program_id(0) * BLOCK_N
    t = (part // CHUNK).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    batch, head = n // kv, n % kv
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    wq += batch * wq_b + head * wq_h
    wk += batch * wk_b + head * wk_h
    if bq is not None:
        bq += n * M
    if bk is not None:
        bk += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    if bias_bar is not None:
        bias_bar += n * keys
    s_bar += (t * rows + n) * M * V
    z_bar += (t * rows + n) * M
    c += ((t + 1) * rows + n) * M
    column = tl.arange(0, BLOCK_V)
    at = first + part + tl.arange(0, BLOCK_N)
    open = open_keys(key_mask, at, end, mask_n)
    x = load_rows(k, at, open, k_n, D, BLOCK_D)
    y = load_rows(v, at, open, v_n, V, BLOCK_V)
    levels = key_levels(x, key_bias, at, open, bias_n, quad)
    bar = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    y_bar = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    weight_bar = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, M, BLOCK_M):
        m = i + tl.arange(0, BLOCK_M)
        u = logs(x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
        phi = tl.exp2(u - load_features(c, m, M)[None, :])
        state_bar = load_sums(s_bar, m, column, M, V)
        phi_bar = product(y, tl.trans(state_bar), DOT, SUM)
        phi_bar = (phi_bar + load_features(z_bar, m, M)[None, :]) * phi
        y_bar += product(phi, state_bar, DOT, SUM)
        weight_bar += tl.sum(phi_bar, 1)
        bar += product(phi_bar, tl.trans(load_map(wk, m, D, M, BLOCK_D)), DOT, SUM)
    last = tl.minimum(first + (part // CHUNK + 1) * CHUNK, end)
    for h in range(groups):
        row = n * groups + h
        to = row * queries
        q_h_ptr = q + batch * q_b + (head * groups + h) * q_h
        bar_ptr = out_bar + batch * o_b + (head * groups + h) * o_h
        for i0 in range(first + part, last, BLOCK_N):
            later = i0 + tl.arange(0, BLOCK_N)
            inside = later < end
            q_at = later + shift
            q_x = load_rows(q_h_ptr, q_at, inside, q_n, D, BLOCK_D)
            g = load_rows(bar_ptr, q_at, inside, o_n, V, BLOCK_V)
            g *= inverse(den + to, q_at, inside)[:, None]
            change = tl.load(delta + to + q_at, mask=inside, other=0.0)
            top = scales(scale + to, low + to, q_at, inside)
            visible = (at[:, None] <= later[None, :]) & open[:, None]
            pair = product(y, tl.trans(g), DOT, SUM) + change[None, :]
            pair = tl.where(visible, pair, 0.0)
            inner = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
            for i in range(0, M, BLOCK_M):
                m = i + tl.arange(0, BLOCK_M)
                new_c = load_features(c, m, M)
                u_q = logs(q_x, wq, bq, m, D, M, BLOCK_D, DOT, MAP) + new_c[None, :]
                u_k = logs(x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
                phi_q, phi_k = tl.exp2(u_q - top[:, None]), tl.exp2(u_k - new_c[None, :])
                inner += product(phi_k, tl.trans(phi_q), DOT, SUM)
                phi_bar = product(pair, phi_q, DOT, SUM) * phi_k
                weight_bar += tl.sum(phi_bar, 1)
                bar += product(phi_bar, tl.trans(load_map(wk, m, D, M, BLOCK_D)), DOT, SUM)
            y_bar += product(tl.where(visible, inner, 0.0), g, DOT, SUM)
    finish_key(
        k_bar + n * keys * D, v_bar + n * keys * V, bias_bar, bar, y_bar, weight_bar, x, at,
        at < end, quad, D, V, BLOCK_D, BLOCK_V,
    )  # fmt: skip


@kernel()
def repair_query_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, s, z, c, den, scale, low, out_bar, q_bar, delta,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, heads, groups, queries, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q̄ of the rows flagged in `low`, by weights of pairs. Grid as `causal_kernel`."""
    part = tl.program_id(0) * BLOCK_N
    t = (part // CHUNK).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    n = row // groups
    rows = tl.num_programs(1) // groups
    q += batch * q_b + head * q_h
    k += batch * k_b + head // groups * k_h
    v += batch * v_b + head // groups * v_h
    out_bar += batch * o_b + head * o_h
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
        for _ in range(tl.load(low + to + at).to(tl.int32)):
            place = tl.cast(at + shift, tl.int64)
            x = load_row(q + place * q_n, columns, D)
            g = load_row(out_bar + place * o_n, column, V) / tl.load(den + to + at)
            change, top = tl.load(delta + to + at), tl.load(scale + to + at)
            bar = tl.zeros([BLOCK_D], tl.float32)
            for i in range(0, M, BLOCK_M):
                m = i + tl.arange(0, BLOCK_M)
                u_q = row_logs(x, wq, bq, m, D, M, BLOCK_D) - top
                phi_bar = tl.sum(load_sums(s, m, column, M, V) * g[None, :], 1)
                phi_bar += change * load_features(z, m, M)
                phi_bar *= tl.exp2(u_q + load_features(c, m, M))
                for j in range(start, at + 1, BLOCK_N):
                    keys = j + tl.arange(0, BLOCK_N)
                    open = open_keys(key_mask, keys, at + 1, mask_n)
                    k_x = load_rows(k, keys, open, k_n, D, BLOCK_D)
                    y = load_rows(v, keys, open, v_n, V, BLOCK_V)
                    levels = key_levels(k_x, key_bias, keys, open, bias_n, quad)
                    u_k = logs(k_x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
                    pair = tl.sum(y * g[None, :], 1) + change
                    phi_bar += tl.sum(tl.exp2(u_q[None, :] + u_k) * pair[:, None], 0)
                bar += tl.sum(load_map(wq, m, D, M, BLOCK_D) * phi_bar[None, :], 1)
            bar = (bar * LN2).to(q_bar.dtype.element_ty)
            tl.store(q_bar + (to + at) * D + columns, bar, mask=columns < D)


@kernel()
def repair_key_kernel(
    q, k, v, wq, bq, wk, bk, key_bias, key_mask, den, scale, low, out_bar, delta,
    k_bar, v_bar, bias_bar,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, wq_b, wq_h, wk_b, wk_h,
    bias_b, bias_h, bias_n, mask_b, mask_n,
    quad, kv, groups, queries, keys, first, shift, end,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, DOT: tl.constexpr, MAP: tl.constexpr,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds to k̄ and v̄ what the rows flagged in `low` give. Grid as `causal_key_kernel`."""
    part = tl.program_id(0) * BLOCK_N
    n = tl.program_id(1).to(tl.int64)
    batch, head = n // kv, n % kv
    q += batch * q_b + head * groups * q_h
    out_bar += batch * o_b + head * groups * o_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    wq += batch * wq_b + head * wq_h
    wk += batch * wk_b + head * wk_h
    if bq is not None:
        bq += n * M
    if bk is not None:
        bk += n * M
    if key_bias is not None:
        key_bias += batch * bias_b + head * bias_h
    if key_mask is not None:
        key_mask += batch * mask_b
    k_bar += n * keys * D
    v_bar += n * keys * V
    if bias_bar is not None:
        bias_bar += n * keys
    begin = first + part
    chunk = first + part // CHUNK * CHUNK
    at = begin + tl.arange(0, BLOCK_N)
    columns, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for h in range(groups):
        to = (n * groups + h) * queries + shift
        some = tl.minimum(flagged(low + to, chunk, end, CHUNK), 1)
        for _ in range(some):
            inside = at < end
            open = open_keys(key_mask, at, end, mask_n)
            x = load_rows(k, at, open, k_n, D, BLOCK_D)
            y = load_rows(v, at, open, v_n, V, BLOCK_V)
            levels = key_levels(x, key_bias, at, open, bias_n, quad)
            bar = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            y_bar = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            weight_bar = tl.zeros([BLOCK_N], tl.float32)
            for i in range(begin, tl.minimum(chunk + CHUNK, end)):
                for __ in range(tl.load(low + to + i).to(tl.int32)):
                    place = tl.cast(i + shift, tl.int64)
                    q_x = load_row(q + h * q_h + place * q_n, columns, D)
                    g = load_row(out_bar + h * o_h + place * o_n, column, V)
                    g /= tl.load(den + to + i)
                    top = tl.load(scale + to + i)
                    pair = tl.sum(y * g[None, :], 1) + tl.load(delta + to + i)
                    pair = tl.where(at <= i, pair, 0.0)
                    for f in range(0, M, BLOCK_M):
                        m = f + tl.arange(0, BLOCK_M)
                        u_q = row_logs(q_x, wq, bq, m, D, M, BLOCK_D) - top
                        u_k = logs(x, wk, bk, m, D, M, BLOCK_D, DOT, MAP) + levels[:, None]
                        u_k = tl.where((at <= i)[:, None], u_k, float("-inf"))
                        phi = tl.exp2(u_q[None, :] + u_k)
                        y_bar += tl.sum(phi, 1)[:, None] * g[None, :]
                        phi_bar = phi * pair[:, None]
                        weight_bar += tl.sum(phi_bar, 1)
                        back = tl.trans(load_map(wk, m, D, M, BLOCK_D))
                        bar += product(phi_bar, back, DOT, SUM)
            bar = bar * LN2 - 2.0 * quad * weight_bar[:, None] * x
            bar += load_rows(k_bar, at, inside, D, D, BLOCK_D)
            y_bar += load_rows(v_bar, at, inside, V, V, BLOCK_V)
            store_rows(k_bar, at, inside, bar, D, BLOCK_D)
            store_rows(v_bar, at, inside, y_bar, V, BLOCK_V)
            if bias_bar is not None:
                weight_bar += tl.load(bias_bar + at, mask=inside, other=0.0)
                tl.store(bias_bar + at, weight_bar, mask=inside)
