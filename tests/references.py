"""Naive float64 references, one for each mechanism: written for reading, not for speed.

Every one is ``ref_<name>(mech, q, k, v, *, allowed, scale) -> out`` for q (B, H, L, D),
k (B, Hkv, S, D) and v (B, Hkv, S, V). `allowed` is a bool (B or 1, H or 1, L, S), True =
attend; `mech` supplies parameters and buffers. Differentiable by autograd.
"""

import inspect
import itertools
import math

import torch

from subquad.attention.hybrid.stream import DECAY
from subquad.attention.masks import Mask
from subquad.attention.summary.key_clusters import Beside


def per_head(q, k, v):
    """float64, with keys and values repeated for each query head of their group."""
    groups = q.shape[1] // k.shape[1]
    return q.double(), *(t.double().repeat_interleave(groups, 1) for t in (k, v))


def weighted_mean(logits, v, allowed):
    """Σ_j exp(logit_ij) v_j / Σ_j exp(logit_ij) over allowed keys; zeros where there is none."""
    allowed = allowed.expand_as(logits)
    top = logits.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.where(allowed, torch.exp(logits.masked_fill(~allowed, 0.0) - top), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total == 0, 1.0, total)


def ref_softmax(mech, q, k, v, *, allowed, scale, bias=None):
    """softmax(scale·q·k + bias) v, Vaswani et al. 2017, eq. 1."""
    q, k, v = per_head(q, k, v)
    logits = scale * torch.einsum("bhid,bhjd->bhij", q, k)
    return weighted_mean(logits if bias is None else logits + bias.double(), v, allowed)


def ref_additive(mech, q, k, v, *, allowed, scale=1.0, bias=None):
    """softmax(scale·wᵀ tanh(W_q q_i + W_k k_j + b)) v, Bahdanau et al. 2014, A.1.2."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = per_head(q, k, v)
    w_q, w_k, b, w = (
        parameter.double().repeat_interleave(groups, 0)
        for parameter in (mech.query_weight, mech.key_weight, mech.bias, mech.score_weight)
    )
    from_q = torch.einsum("hud,bhid->bhiu", w_q, q)
    from_k = torch.einsum("hud,bhjd->bhju", w_k, k)
    units = torch.tanh(from_q[:, :, :, None] + from_k[:, :, None] + b[:, None, None])
    logits = scale * torch.einsum("hu,bhiju->bhij", w, units)
    return weighted_mean(logits if bias is None else logits + bias.double(), v, allowed)


def ref_location(mech, q, k, v, *, allowed, scale=1.0, bias=None):
    """softmax(scale·wᵀ tanh(W_q q_t + W_k k_j + U f_tj + b)) v with f_tj = Σ_r F_r α_{t−1, j+r}.

    Query after query, Chorowski et al. 2015, eq. 8 and 9; α_0 = 0 and zeros
    beyond both ends.
    """
    groups, side = q.shape[1] // k.shape[1], mech.config.kernel // 2
    q, k, v = per_head(q, k, v)
    w_q, w_k, b, w, filters, u = (
        parameter.double().repeat_interleave(groups, 0)
        for parameter in (
            mech.query_weight, mech.key_weight, mech.bias, mech.score_weight,
            mech.filter_weight, mech.location_weight,
        )
    )  # fmt: skip
    keys, outputs = k.shape[2], []
    shift = torch.stack(
        [torch.eye(2 * side + keys, dtype=torch.float64)[r : r + keys] for r in range(2 * side + 1)]
    )[:, :, side : side + keys]  # 1 where i = j + r
    before = torch.zeros(*q.shape[:2], keys, dtype=torch.float64)
    one_hot = torch.eye(keys, dtype=torch.float64).expand(*q.shape[:2], -1, -1)
    allowed = allowed.expand(*q.shape[:3], keys)
    for t in range(q.shape[2]):
        seen = torch.einsum("hfr,rji,bhi->bhjf", filters, shift, before)
        units = torch.tanh(
            torch.einsum("hud,bhd->bhu", w_q, q[:, :, t])[:, :, None]
            + torch.einsum("hud,bhjd->bhju", w_k, k)
            + torch.einsum("huf,bhjf->bhju", u, seen)
            + b[:, None]
        )
        logits = scale * torch.einsum("hu,bhju->bhj", w, units)[:, :, None]
        if bias is not None:
            logits = logits + bias.double().expand(*q.shape[:3], keys)[:, :, t : t + 1]
        now = weighted_mean(logits, one_hot, allowed[:, :, t : t + 1])
        outputs.append(now @ v)
        before = before + now[:, :, 0] if mech.config.cumulative else now[:, :, 0]
    return torch.cat(outputs, 2)


def ref_performer(mech, q, k, v, *, allowed, scale, logarithms=False):
    """Random-feature attention with every φ materialised; see `subquad...performer`.

    With `logarithms` ln κ_ij themselves, estimates of scale·q_i·k_j (positive estimators).

    The projection, and with data-aware options the gauge and the proposal, are taken from
    `mech` as given; of these a learned projection alone carries a gradient. The features are
    built from their definitions.
    """
    config, heads, root = mech.config, mech.num_kv_heads, scale**0.5
    groups = q.shape[1] // heads
    plain_q, plain_k = q, k
    q, k, v = per_head(q, k, v)
    omega = mech.projection.double()
    log_weight = torch.zeros(omega.shape[:-1], dtype=torch.float64)
    x, y = q * root, k * root
    tilt, row = torch.zeros_like(y[..., 0]), torch.zeros_like(x[..., 0])
    if config.uses_moments:
        # Per call, statistics leave out keys that no query may read.
        mask = Mask(key=allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2))
        gauge = mech._gauge(plain_q.detach(), plain_k.detach(), mask, root)
        if config.estimator in ("oprf", "derf"):
            omega, log_weight = mech._proposal(omega, gauge)

        def spread(t, rank):  # per head, with or without a batch dimension
            t = t.double()
            return t.repeat_interleave(groups, t.dim() - rank - 1)

        shift_q, shift_k = spread(gauge.shift_q, 1), spread(gauge.shift_k, 1)
        row = (x * shift_k[..., None, :]).sum(-1)
        x, y = x - shift_q[..., None, :], y - shift_k[..., None, :]
        tilt = (y * shift_q[..., None, :]).sum(-1)
        if gauge.transform is not None:
            x, y = x @ spread(gauge.transform, 2), y @ spread(gauge.inverse, 2)
    omega = omega.repeat_interleave(groups, omega.dim() - 3)
    log_weight = log_weight.repeat_interleave(groups, log_weight.dim() - 2)
    from_x, from_y = x @ omega.mT, y @ omega.mT
    if config.estimator == "relu":
        kernel = (from_x.relu() + 1e-3) @ (from_y.relu() + 1e-3).mT
        return signed_mean(kernel, v, allowed)
    if config.estimator == "trig":
        cosine = torch.cos(from_x[:, :, :, None] - from_y[:, :, None]).mean(-1)
        logits = 0.5 * y.square().sum(-1) + tilt
        top = logits.amax(-1, keepdim=True).detach()
        mass = torch.exp(logits - top)[:, :, None]
        return signed_mean(cosine * mass, v, allowed, floor=config.clip * mass)
    if config.estimator == "hyperbolic":
        from_x, from_y = (torch.cat([t, -t], -1) for t in (from_x, from_y))
        log_weight = torch.cat([log_weight, log_weight], -1)
    pairs = from_x[:, :, :, None] + from_y[:, :, None] + log_weight[..., None, None, :]
    logits = pairs.logsumexp(-1) + (tilt - 0.5 * y.square().sum(-1))[:, :, None]
    if logarithms:  # the mean over features, and what is constant in a row
        row = row - 0.5 * x.square().sum(-1) - math.log(pairs.shape[-1])
        return logits + row[..., None]
    return weighted_mean(logits, v, allowed)


def signed_mean(kernel, v, allowed, floor=None):
    """Σ_j K_ij v_j / max(Σ_j K_ij, Σ_j floor_ij) over allowed keys; zeros where there is none."""
    kernel = torch.where(allowed, kernel, 0.0)
    total = kernel.sum(-1, keepdim=True)
    if floor is not None:
        least = torch.where(allowed, floor, 0.0).sum(-1, keepdim=True).detach()
        total = torch.where(total < least, least, total)
    return kernel @ v / torch.where(total == 0, 1.0, total)


def ref_gaussian(mech, q, k, v, *, allowed, scale):
    """Σ_j K_ij v_j / Σ_j K_ij with K_ij = Σ_m exp(−|q_i − a_m|²/2σ²) exp(−|k_j − a_m|²/2σ²)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = per_head(q, k, v)
    anchors = mech.anchors.double().repeat_interleave(groups, 0)[:, None]
    from_q, from_k = (
        -(scale**0.5 * t[..., None, :] - anchors).square().sum(-1) / (2 * mech.config.sigma**2)
        for t in (q, k)
    )
    logits = (from_q[:, :, :, None] + from_k[:, :, None]).logsumexp(-1)
    return weighted_mean(logits, v, allowed)


def ref_hedgehog(mech, q, k, v, *, allowed, scale):
    """Σ_j K_ij v_j / Σ_j K_ij with K_ij = φ_q(q_i)·φ_k(k_j), φ(x) = [σ(Wx), σ(−Wx)].

    σ is softmax over features; with map=exp φ(x) = [exp(Wx + b), exp(−Wx − b)].
    """
    groups = q.shape[1] // k.shape[1]
    q, k, v = per_head(q, k, v)
    logs = []
    for x, weight, bias in ((q, mech.weight_q, mech.bias_q), (k, mech.weight_k, mech.bias_k)):
        weight = weight.double().repeat_interleave(groups, 0)
        y = torch.einsum("bhnd,hmd->bhnm", scale**0.5 * x, weight)
        if bias is None:
            logs.append(torch.cat([y.log_softmax(-1), (-y).log_softmax(-1)], -1))
        else:
            y = y + bias.double().repeat_interleave(groups, 0)[:, None]
            logs.append(torch.cat([y, -y], -1))
    logits = (logs[0][:, :, :, None] + logs[1][:, :, None]).logsumexp(-1)
    return weighted_mean(logits, v, allowed)


def ref_mixed(mech, q, k, v, *, allowed, scale, causal=False):
    """Each part's reference on that part's heads and key/value heads, with its own scale."""
    outs, head, groups = [None] * q.shape[1], 0, q.shape[1] // k.shape[1]
    for index, part in enumerate(mech.config.parts):
        kv_heads = range(head // groups, (head + part.count) // groups)
        if mech.config.kv_heads is not None:
            kv_heads = mech.config.kv_heads[index]
        kv_heads = list(kv_heads)
        heads = [h for h in range(q.shape[1]) if h // groups in kv_heads]
        heads.sort(key=lambda h: kv_heads.index(h // groups))
        mine = allowed if allowed.shape[1] == 1 else allowed[:, heads]
        naive = globals()[f"ref_{part.spec.name}"]
        asked = {"causal": causal} if "causal" in inspect.signature(naive).parameters else {}
        own = (q[:, heads], k[:, kv_heads], v[:, kv_heads])
        out = naive(mech.parts[index], *own, allowed=mine, scale=scale[index], **asked)
        for place, row in zip(heads, out.unbind(1), strict=True):
            outs[place] = row
        head += part.count
    return torch.stack(outs, 1)


def ref_auto(mech, q, k, v, *, allowed, scale, causal=False):
    """Softmax if 2·L·S / (L + S), or `length`, is below the crossover, else the linear side's."""
    queries, keys, config = q.shape[2], k.shape[2], mech.config
    tokens = config.length or 2 * queries * keys / (queries + keys)
    crossover = config.crossover
    if crossover is None:  # then it is the device's
        crossover = mech.explain(queries, keys, causal=causal).crossover.length
    if tokens < crossover:
        return ref_softmax(mech.exact, q, k, v, allowed=allowed, scale=scale[0])
    naive = globals()[f"ref_{mech.linear.name}"]
    asked = {"causal": causal} if "causal" in inspect.signature(naive).parameters else {}
    return naive(mech.linear, q, k, v, allowed=allowed, scale=scale[1], **asked)


@torch.no_grad()
def held_keys(config, q, k, *, opened, scale):
    """Which keys (B, H, L, S) each query of a causal call reads exactly, token by token."""
    window, heavy, sinks = config.near(True), config.hitters, config.first(True)
    block, size = max(1, min(8, window // 4)), window + heavy + sinks
    (batch, heads, queries, _), (kv, keys) = q.shape, k.shape[1:3]
    read = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for g in range(kv):
            held, mass = [], {}
            for j in range(keys):
                if opened[b, j]:
                    held.append(j)
                    mass[j] = 0.0
                i = j - (keys - queries)
                for h in range(g * heads // kv, (g + 1) * heads // kv) if i >= 0 and held else ():
                    read[b, h, i, held] = True
                    weights = torch.softmax(scale * k[b, g, held] @ q[b, h, i], 0)
                    if opened[b, j]:
                        mass = {n: mass[n] + w for n, w in zip(held, weights.tolist(), strict=True)}
                if len(held) == size:
                    judged = sorted(held[sinks : sinks + heavy + block], key=mass.get)
                    held = [n for n in held if n not in judged[:block]]
                    mass = {n: mass[n] * DECAY**block for n in held}
    return read


def ref_near_far(mech, q, k, v, *, allowed, scale, causal=False):
    """Σ_j w_ij v_j / Σ_j w_ij with w = e^s in the window and at listed keys, κ elsewhere.

    Which keys are heavy is taken from `mech`: a hard selection.
    """
    config = mech.config
    far = mech.far if config.far_field(causal) else None
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    allowed = allowed.expand(len(q), q.shape[1], -1, -1)
    opened = allowed[:, 0].any(-2)
    if causal and config.hold():
        exact = held_keys(config, q, k, opened=opened, scale=scale)
        return exact_or_estimated(far, q, k, v, exact=exact, allowed=allowed, scale=scale)
    if not causal and config.few(queries, keys):
        return ref_softmax(mech, q, k, v, allowed=allowed, scale=scale)
    exact = torch.zeros_like(allowed)
    gap = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
    rows = []
    for b in range(len(q)):
        sizes = config.of_length(int(opened[b].sum()))
        window = (config.near(causal) or -1) if causal else sizes.window
        near = gap <= window
        exact[b] = near
        mask = Mask(causal=causal, key=opened[b : b + 1])
        fixed = [t[b : b + 1].detach() for t in (q, k)]
        mass = None if causal else mech._mass(*fixed, mask, scale, window, sizes.heavy)
        at, found = mech._listed(fixed[1], mask, sizes.heavy, mass)
        closed = torch.zeros(1, k.shape[1], keys, dtype=torch.bool)
        for h in range(q.shape[1]):
            own = h // groups % at.shape[1]
            exact[b, h, :, at[0, own][found[0, own]]] = True
            closed[0, h // groups, at[0, own][found[0, own]]] = True
        if far is not None and far.name == "key_clusters" and not causal:
            beside = Beside(
                window=window, closed=closed, mass=mass, clusters=sizes.clusters,
                members=sizes.members,
            )  # fmt: skip
            mine = [t[b : b + 1] for t in (q, k)]
            rows.append(clustered_logits(far, *mine, mask.key, scale, beside, near))
    if rows:
        logits = scale * torch.einsum("bhid,bhjd->bhij", q.double(), per_head(q, k, v)[1])
        logits = torch.where(exact, logits, torch.cat(rows))
        return weighted_mean(logits, per_head(q, k, v)[2], allowed)
    return exact_or_estimated(far, q, k, v, exact=exact, allowed=allowed, scale=scale)


def clustered_logits(mech, q, k, opened, scale, beside=None, near=None):
    """ln w_ij (B, H, L, S) of clusters of keys, 0 where a key is in none; see `KeyClusters`.

    Clusters, μ, L and members are taken from `mech` as given: they carry no gradient. Members
    where `near` (L, S) is True are not refined: another part reads them.
    """
    groups, open_k = q.shape[1] // k.shape[1], k.masked_fill(~opened[:, None, :, None], 0.0)
    chosen = mech.select(q.detach(), open_k.detach(), Mask(key=opened), scale, beside)
    rows = []
    for b, h in itertools.product(range(len(q)), range(q.shape[1])):
        at = (b, h // groups)
        x, y = scale * q[b, h].double(), open_k[at].double()
        mean, metric, inverse = (
            t[at].double() for t in (chosen.mean, chosen.metric, chosen.whiten)
        )
        logits, exact = torch.zeros(len(x), len(y)).double(), x @ y.mT
        estimates = {}
        for m in range(chosen.base.shape[-1]):
            inside = (chosen.held[at] & (chosen.cluster[at] == m)).nonzero()[:, 0]
            if not len(inside):
                continue
            t = torch.exp(y[inside] @ mean - chosen.base[at][m])
            centre = t @ y[inside] / t.sum()
            spread = t @ ((y[inside] - centre) @ metric).square() / t.sum()
            more = 0.5 * ((x - mean) @ inverse).square() @ spread
            estimate = x @ centre + chosen.base[at][m] - mean @ centre
            estimates[m] = estimate + torch.log1p(more.clamp_max(8.0))
            logits = logits.index_add(1, inside, estimates[m][:, None] + t.log())
        if estimates and mech.config.refine:
            names, table = list(estimates), torch.stack(list(estimates.values()), 1)
            count = min(mech.config.refine, len(names))
            refined = torch.zeros_like(logits, dtype=torch.bool)
            for i, best in enumerate(table.detach().topk(count, 1).indices):
                found = chosen.members[at][[names[n] for n in best]].flatten()
                refined[i, found[found >= 0]] = True
            if near is not None:
                refined &= ~near
            logits = torch.where(refined, exact, logits)
        rows.append(logits)
    return torch.stack(rows).unflatten(0, q.shape[:2])


def ref_key_clusters(mech, q, k, v, *, allowed, scale):
    """Σ_j w_ij v_j / Σ_j w_ij with w = e^s for refined members and φ t for other keys."""
    opened = open_keys(allowed, len(q))
    logits = clustered_logits(mech, q, k, opened, scale)
    return weighted_mean(logits, per_head(q, k, v)[2], allowed)


def exact_or_estimated(far, q, k, v, *, exact, allowed, scale):
    """Σ_j w_ij v_j / Σ_j w_ij with w = e^s for `exact` pairs, and of `far`, or none, elsewhere."""
    opened = allowed[:, 0].any(-2)
    logits = scale * torch.einsum("bhid,bhjd->bhij", q.double(), per_head(q, k, v)[1])
    if far is None:
        allowed = allowed & exact
    elif far.name == "kernel_nystrom":  # limited among the far keys
        positive, negative = ref_kernel_nystrom(
            far, q, k, v, allowed=opened[:, None, None], scale=scale, estimates=True
        )
        above, below = (torch.where(allowed & ~exact, w, 0.0) for w in (positive, negative))
        total, less = above.sum(-1, keepdim=True), below.sum(-1, keepdim=True)
        share = (1 - far.config.clip) * total / torch.where(less == 0, 1.0, less)
        share = torch.where(less == 0, 1.0, share).clamp_max(1.0)
        weights = torch.where(exact & allowed, logits.exp(), 0.0) + above - share * below
        return signed_mean(weights, per_head(q, k, v)[2], allowed)
    elif far.name == "performer":
        estimates = ref_performer(
            far, q, k, v, allowed=opened[:, None, None], scale=scale, logarithms=True
        )
        logits = torch.where(exact, logits, estimates)
    return weighted_mean(logits, per_head(q, k, v)[2], allowed)


def ref_linear(mech, q, k, v, *, allowed, scale):
    """Σ_j K_ij v_j / Σ_j K_ij with K_ij = φ_q(√scale q_i)·φ_k(√scale k_j)."""
    named = {
        "elu": lambda x: torch.where(x > 0, x + 1.0, x.clamp_max(0.0).exp()),
        "relu": lambda x: x.clamp_min(0.0) + 1e-3,
        "softplus": lambda x: torch.log(1.0 + x.exp()),
        "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
        "square": lambda x: x * x,
        "exp": torch.exp,
    }
    q, k, v = per_head(q, k, v)
    first, second = mech.config.map, mech.config.key_map or mech.config.map
    phi_q = named.get(first, first)(scale**0.5 * q)
    phi_k = named.get(second, second)(scale**0.5 * k)
    return signed_mean(torch.einsum("bhim,bhjm->bhij", phi_q, phi_k), v, allowed)


def ref_efficient(mech, q, k, v, *, allowed, scale):
    """ρ_q(q) ρ_k(k)ᵀ v: each query's softmax over positions takes those that it may read."""
    q, k, v = per_head(q, k, v)
    rho_q = torch.softmax(scale**0.5 * q, -1)
    logits = (scale**0.5 * k)[:, :, None].expand(*q.shape[:3], *k.shape[2:])
    opened = allowed.expand(*q.shape[:3], k.shape[2])[..., None]
    empty = ~opened.any(-2, keepdim=True)
    rho_k = torch.softmax(logits.masked_fill(~(opened | empty), -torch.inf), -2)
    rho_k = rho_k.masked_fill(empty, 0.0)
    return torch.einsum("bhim,bhijm->bhij", rho_q, rho_k) @ v


def ref_rfa(mech, q, k, v, *, allowed, scale):
    """Random Fourier features of q/|q|, k/|k|; with a gate S ← g_j S + (1 − g_j) φ(k_j) v_jᵀ.

    The recurrence runs over the keys that a row may read; unrolled from the last to the first,
    key j weighs (1 − g_j) times the gates after it.
    """
    config, groups = mech.config, q.shape[1] // k.shape[1]
    q, k, v = per_head(q, k, v)
    omega = mech.projection.double()
    if config.learned:
        omega = omega * mech.deviation.double()[:, None]
    omega = omega.repeat_interleave(groups, 0)
    phi_q, phi_k = (
        torch.cat([torch.cos(angle), torch.sin(angle)], -1) / (config.features / 2) ** 0.5
        for angle in (scale**0.5 * (t / t.norm(dim=-1, keepdim=True)) @ omega.mT for t in (q, k))
    )
    kernel = phi_q @ phi_k.mT
    mass = torch.ones_like(kernel)
    if config.gate:
        weight, bias = (
            t.double().repeat_interleave(groups, 0) for t in (mech.gate_weight, mech.gate_bias)
        )
        gate = torch.sigmoid((k * weight[:, None]).sum(-1) + bias[:, None])
        opened = allowed.expand_as(kernel)
        after, columns = torch.ones_like(kernel[..., 0]), []
        for j in reversed(range(k.shape[2])):
            here = gate[:, :, None, j]
            columns.append((1.0 - here) * after)
            after = torch.where(opened[..., j], here * after, after)
        mass = torch.stack(columns[::-1], -1)
    mass = torch.where(allowed, mass, 0.0)
    total = torch.maximum((kernel * mass).sum(-1), config.clip * mass.sum(-1))[..., None]
    return (kernel * mass) @ v / torch.where(total == 0, 1.0, total)


def ref_local(mech, q, k, v, *, allowed, scale):
    """Softmax over keys p_i + d·n, −left ≤ n ≤ right, p_i = i + S − L."""
    window, steps = mech.config.window, mech.config.dilation
    left, right = (window, window) if isinstance(window, int) else window
    queries, keys = q.shape[2], k.shape[2]
    near = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for n in range(-left, right + 1):
            j = i + keys - queries + steps * n
            if 0 <= j < keys:
                near[i, j] = True
    return ref_softmax(mech, q, k, v, allowed=allowed & near, scale=scale)


def ref_strided(mech, q, k, v, *, allowed, scale):
    """Softmax over the union of two key sets, pair by pair; Child et al. 2019, §4.2."""
    config, s = mech.config, mech.config.stride
    queries, keys = q.shape[2], k.shape[2]
    far = keys + queries if config.reach is None else config.reach
    read = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        p = i + keys - queries
        for j in range(keys):
            if config.pattern == "fixed":
                own, column = p // s == j // s, j % s in range(s - config.columns, s)
                read[i, j] = own or (column and abs(p // s - j // s) <= far)
            else:
                near = config.pattern == "sparse" and abs(p - j) < s
                read[i, j] = near or ((p - j) % s == 0 and abs(p - j) <= s * far)
    return ref_softmax(mech, q, k, v, allowed=allowed & read, scale=scale)


def ref_bigbird(mech, q, k, v, *, allowed, scale, causal):
    """Softmax over window, global tokens and blocks, random blocks: a set of keys a query.

    The draw of random blocks is taken from `mech`.
    """
    config, heads = mech.config, k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    long = config.preset == "longformer"
    size = 1 if long else config.block or 64
    window = config.window if config.window is not None else 256 if long else 3
    if isinstance(window, int):
        window = (window, window) if long else (window // 2, window // 2)
    steps = config.dilation if isinstance(config.dilation, tuple) else [config.dilation] * heads
    tokens = config.global_tokens if config.global_tokens is not None else (0,) if long else ()
    marked = config.global_blocks if config.global_blocks is not None else () if long else (0, -1)
    opened = allowed.expand(len(q), -1, -1, -1).any(-2)[:, 0]
    read = torch.zeros(len(q), heads, queries, keys, dtype=torch.bool)
    for b in range(len(q)):
        end = keys if causal else max([1, *(j + 1 for j in range(keys) if opened[b, j])])
        blocks = -(-end // size)
        # A global place counted from the end has none under a causal mask.
        counted = [n if n >= 0 else n + end for n in tokens if n >= 0 or not causal]
        whole = [n if n >= 0 else n + blocks for n in marked if n >= 0 or not causal]
        everywhere = {j for j in range(keys) if j in counted or (not long and j // size in whole)}
        for h, own in itertools.product(range(heads), range(queries)):
            p = own + keys - queries
            near = range(-window[0], (0 if causal else window[1]) + 1)
            if p in everywhere:
                found = range(keys)
            elif long:
                found = everywhere | {p + n * steps[h] for n in near}
            else:
                at = torch.tensor([p // size]), torch.tensor([blocks])
                drawn = mech.random_blocks(*at, causal=causal)[0, h, 0].tolist()
                drawn = [n for n in drawn if n >= 0]
                inner = {p // size + n for n in near}
                assert len(set(drawn) - inner - set(whole)) == len(drawn), "read twice"
                found = everywhere | {j for j in range(keys) if j // size in inner | set(drawn)}
            read[b, h, own, [j for j in found if 0 <= j < keys]] = True
    read = read.repeat_interleave(q.shape[1] // heads, 1)
    return ref_softmax(mech, q, k, v, allowed=allowed & read, scale=scale)


def ref_global(mech, q, k, v, *, allowed, scale):
    """Softmax over all keys for a global query; over global tokens, extra and own key else."""
    config, queries, keys = mech.config, q.shape[2], k.shape[2]
    if config.tokens == "marked":
        marks = mech._marks.expand(len(q), keys).tolist()
    else:
        listed = range(config.tokens) if isinstance(config.tokens, int) else config.tokens
        listed = [p if p >= 0 else keys + p for p in listed]
        marks = [[j in listed for j in range(keys)]] * len(q)
    read = torch.zeros(len(q), 1, queries, keys, dtype=torch.bool)
    for b in range(len(q)):
        for i in range(queries):
            p = i + keys - queries
            for j in range(keys):
                read[b, 0, i, j] = (
                    marks[b][j] or (p >= 0 and marks[b][p]) or (config.own and j == p)
                )
    if not config.extra:
        return ref_softmax(mech, q, k, v, allowed=allowed & read, scale=scale)
    groups = q.shape[1] // k.shape[1]
    u = mech.extra_query.double().repeat_interleave(groups, 0).expand(len(q), -1, -1, -1)
    key, value = (t.double().repeat_interleave(groups, 1) for t in (k, v))
    opened = allowed.expand(len(q), 1, queries, keys)[:, :, :1]
    logits = scale * u @ key.mT
    keys_of, values_of = (weighted_mean(logits, t, opened) for t in (key, value))
    there = opened.any(-1, keepdim=True).expand(len(q), 1, queries, config.extra)
    read = torch.cat([allowed & read, there], -1)
    key, value = torch.cat([key, keys_of], 2), torch.cat([value, values_of], 2)
    return ref_softmax(mech, q, key, value, allowed=read, scale=scale)


def ref_nystrom(mech, q, k, v, *, allowed, scale):
    """softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v (+ convolution), a row and head at a time."""
    config, same = mech.config, q.shape[2] == k.shape[2]
    q, k, v = per_head(q, k, v)

    def means(x):
        count = min(config.landmarks, len(x))
        parts = [[i for i in range(len(x)) if i * count // len(x) == s] for s in range(count)]
        return torch.stack([x[part].mean(0) for part in parts])

    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(len(q)):
        opened = allowed.expand(len(q), -1, -1, -1)[b, 0].any(0)
        if not opened.any():
            continue
        for h in range(q.shape[1]):
            key, value = k[b, h][opened], v[b, h][opened]
            marks = means(key)
            marks_q = means(q[b, h][opened] if same else q[b, h])
            first, middle, last = (
                torch.softmax(scale * left @ right.T, -1)
                for left, right in ((q[b, h], marks), (marks_q, marks), (marks_q, key))
            )
            if config.inverse == "exact":
                z = torch.linalg.pinv(middle)
            else:
                z = middle.T / (middle.sum(0).max() * middle.sum(1).max())
                eye = torch.eye(len(middle), dtype=torch.float64)
                for _ in range(config.iterations):
                    az = middle @ z
                    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
            out[b, h] = first @ z @ (last @ value)
    if config.conv_kernel is None:
        return out
    taps = mech.conv_weight.double()
    half, n = taps.shape[1] // 2, v.shape[2]
    closed = ~allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2)
    v = v.masked_fill(closed[:, None, :, None], 0.0)
    rows = []
    for i in range(n):
        near = range(max(0, i - half), min(n, i + half + 1))
        rows.append(sum(taps[:, j - i + half, None] * v[:, :, j] for j in near))
    return out + torch.stack(rows, 2)


def ref_linformer(mech, q, k, v, *, allowed, scale):
    """softmax(scale·q (E k)ᵀ) F v with E and F written out, a row and head at a time."""
    groups, config = q.shape[1] // k.shape[1], mech.config
    opened = allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2)
    k, v = (t.double().masked_fill(~opened[:, None, :, None], 0.0) for t in (k, v))
    width = -(-mech.max_length // config.k)

    def matrix(weight, head, here):
        keys = len(here)
        if config.projection == "learned":
            return weight[head % len(weight), :, :keys].double()
        rows = []
        for start in range(0, keys, width):
            at = torch.arange(start, min(start + width, keys))
            if not here[at].any():
                continue
            row = torch.zeros(keys, dtype=torch.float64)
            if config.projection == "mean":
                row[at] = here[at].double() / here[at].sum()
            else:
                row[at] = weight[head % len(weight), : len(at)].double()
            rows.append(row)
        return torch.stack(rows)

    out = []
    for b in range(len(q)):
        for h in range(q.shape[1]):
            kv = h // groups
            first, second = mech.key_projection, mech.value_projection
            e = matrix(first, kv, opened[b])
            f = matrix(first if second is None else second, kv, opened[b])
            weights = torch.softmax(scale * q[b, h].double() @ (e @ k[b, kv]).T, -1)
            out.append(weights @ (f @ v[b, kv]))
    return torch.stack(out).reshape(*q.shape[:3], v.shape[-1])


def ref_sinkhorn(mech, q, k, v, *, allowed, scale, causal):
    """Softmax over the own block and the blocks sorted to it, block by block."""
    config, size, top = mech.config, mech.config.block, mech.config.top
    groups, keys, offset = q.shape[1] // k.shape[1], k.shape[2], k.shape[2] - q.shape[2]
    opened = allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2)
    q, (k, v) = q.double(), (t.double() for t in (k, v))
    k, v = (t.masked_fill(~opened[:, None, :, None], 0.0) for t in (k, v))
    position = torch.arange(q.shape[2]) + offset
    rows = sorted({p // size for p in position.tolist()})
    count = -(-keys // size)

    def summary(x, chosen):
        return x[chosen].mean(0) if chosen.any() else torch.zeros(x.shape[-1]).double()

    def window(u, counted):
        """Which queries tell what block u needs."""
        if config.sortcut:
            return counted
        if not causal:
            return counted & (position // size == u)
        late = (position > (u - 1) * size) & (position <= u * size)
        return counted & late & (u * size >= offset)

    def matrix(b, h, counted):
        """P, with zeros where a block cannot be sorted."""
        held = [(torch.arange(keys) // size == w) & opened[b] for w in range(count)]
        c = torch.stack([summary(k[b, h // groups], own) for own in held])
        p, pairs = [], []
        for u in rows[:1] if config.sortcut else rows:
            told = window(u, counted)
            a = summary(q[b, h], told)
            number, weight = torch.arange(count), mech.sort_weight
            if config.sort == "linear":
                logits = weight[h, :count].double() @ a
            else:
                logits = scale * c @ (a if weight is None else a @ weight[h].double())
            pair = torch.stack([own.any() for own in held]) & told.any()
            if causal:
                pair = pair & (number < u)
            if config.hard:
                pair = pair & (number != u)
            p.append(torch.where(pair, torch.exp(logits / config.temperature), 0.0))
            pairs.append(pair)
        p = torch.stack(p)
        steps = 0 if causal or config.sortcut or offset else config.iterations
        for dim in [1, 0] * steps or [1]:
            total = p.sum(dim, keepdim=True)
            p = p / torch.where(total == 0, 1.0, total)
        return p, torch.stack(pairs)

    def sorted_to(p, pairs, key, x, y):
        """Sorted keys and values and which are read, for one row of P."""

        def tokens(w):
            return torch.arange(w * size, min(keys, (w + 1) * size))

        if top is None:
            mixed = [torch.zeros(size, t.shape[-1]).double() for t in (x, y)]
            read = torch.zeros(size, dtype=torch.bool)
            for w in pairs.nonzero().flatten().tolist():
                at = tokens(w)
                fill = [torch.zeros(size - len(at), t.shape[-1]).double() for t in (x, y)]
                mixed = [
                    m + p[w] * torch.cat([t[at], f])
                    for m, t, f in zip(mixed, (x, y), fill, strict=True)
                ]
                read[: len(at)] |= key[at]
            return *mixed, read
        left, found = pairs, []
        for _ in range(min(top, int(pairs.sum()))):
            share = p / p[left].sum()
            w = int(share.detach().masked_fill(~left, -1.0).argmax())
            factor = share[w] - share[w].detach() + 1 if config.hard else share[w]
            found.append((factor * x[tokens(w)], factor * y[tokens(w)], key[tokens(w)]))
            left = left & (torch.arange(count) != w)
        if not found:
            return x[:0], y[:0], key[:0]
        return tuple(torch.cat(part) for part in zip(*found, strict=True))

    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, h in itertools.product(range(len(q)), range(q.shape[1])):
        counted = opened[b] if offset == 0 else torch.ones(q.shape[2], dtype=torch.bool)
        x, y = k[b, h // groups], v[b, h // groups]
        p, pairs = matrix(b, h, counted)
        for n, u in enumerate(rows):
            n = 0 if config.sortcut else n
            far_k, far_v, read = sorted_to(p[n], pairs[n], opened[b], x, y)
            i = position // size == u
            own = torch.arange(keys) // size == u
            near = opened[b][own].expand(int(i.sum()), -1)
            if causal:
                near = near & (torch.arange(keys)[own] <= position[i][:, None])
            seen = torch.cat([near, read.expand(len(near), -1)], 1)
            logits = scale * q[b, h, i] @ torch.cat([x[own], far_k]).T
            both = torch.cat([y[own], far_v])
            if len(both):
                out[b, h, i] = weighted_mean(logits, both, seen)
    return out


def ref_kernel_nystrom(mech, q, k, v, *, allowed, scale, estimates=False):
    """Softmax weights by g(x, Z)(K + ε I)^-1 g(Z, y), negative ones limited; all pairs explicit.

    With `estimates` the positive and the negative part of the estimates of exp(scale·q_i·k_j).

    Gauge and landmarks are taken from `mech` as given; learned landmarks carry a gradient.
    """
    config, heads, root = mech.config, mech.num_kv_heads, scale**0.5
    groups = q.shape[1] // heads
    mask = Mask(key=allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2))
    gauge, marks_q, marks_k = mech._gauge(q.detach(), k.detach(), mask, root)
    q, k, v = per_head(q, k, v)

    def spread(t, rank):  # per head, with or without a batch dimension
        t = t.double().expand(len(q), *t.shape[t.dim() - rank - 1 :])
        return t.repeat_interleave(groups, 1)

    def coordinates(t, side):
        shift = getattr(gauge, f"shift_{side}")
        turn = gauge.transform if side == "q" else gauge.inverse
        t = t * root - spread(shift, 1)[..., None, :]
        return t if turn is None else t @ spread(turn, 2)

    def gaussian(a, b):
        return torch.exp(-(a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / 2)

    x, y = coordinates(q, "q"), coordinates(k, "k")
    z = torch.cat([coordinates(spread(marks_q, 2), "q"), coordinates(spread(marks_k, 2), "k")], 2)
    centred = k * root - spread(gauge.shift_k, 1)[..., None, :]
    tilt = centred @ spread(gauge.shift_q, 1)[..., None]
    mass = torch.exp(y.square().sum(-1) / 2 + tilt[..., 0])
    ridge = config.ridge * torch.eye(z.shape[2], dtype=torch.float64)
    alpha = gaussian(x, z) @ torch.linalg.inv(gaussian(z, z) + ridge)
    pairs = gaussian(z, y) * mass[..., None, :]
    if estimates:
        row = (q * root * spread(gauge.shift_k, 1)[..., None, :]).sum(-1)
        row = torch.exp(row + x.square().sum(-1) / 2)[..., None]
        return [row * (side.clamp_min(0) @ pairs) for side in (alpha, -alpha)]
    positive, negative = (
        torch.where(allowed, side.clamp_min(0) @ pairs, 0.0) for side in (alpha, -alpha)
    )
    above, below = positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True)
    share = (1 - config.clip) * above / torch.where(below == 0, 1.0, below)
    share = torch.where(below == 0, 1.0, share).clamp_max(1.0)
    return signed_mean(positive - share * negative, v, allowed)


def ref_compressed(mech, q, k, v, *, allowed, scale, causal):
    """softmax over convolved keys, and for causal queries the tokens since the last whole block."""
    groups, config, keys = q.shape[1] // k.shape[1], mech.config, k.shape[2]
    q, stride, width = q.double(), config.stride, config.width
    opened = allowed.expand(len(q), -1, -1, -1)[:, 0].any(-2)
    k, v = (t.double().masked_fill(~opened[:, None, :, None], 0.0) for t in (k, v))

    def window(m):  # (tap, position) of the tokens there are
        start = (m + 1) * stride - width
        return [(t, start + t) for t in range(width) if 0 <= start + t < keys]

    def apply(x, weight, m):
        total = torch.zeros(x.shape[-1], dtype=torch.float64)
        for t, j in window(m):
            tap = weight[t].double()
            total = total + (tap @ x[j] if config.conv == "full" else tap * x[j])
        return total

    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(len(q)):
        there = [m for m in range(-(-keys // stride)) if any(opened[b, j] for _, j in window(m))]
        for h in range(q.shape[1]):
            kv = h // groups
            short_k = {m: apply(k[b, kv], mech.key_weight[kv], m) for m in there}
            short_v = {m: apply(v[b, kv], mech.value_weight[kv], m) for m in there}
            for i in range(q.shape[2]):
                at = i + keys - q.shape[2]
                read = [m for m in there if not causal or (m + 1) * stride - 1 <= at]
                near = []
                if causal and config.current and at >= 0:
                    near = [j for j in range((at + 1) // stride * stride, at + 1) if opened[b, j]]
                if read or near:
                    of_k = torch.stack([short_k[m] for m in read] + [k[b, kv, j] for j in near])
                    of_v = torch.stack([short_v[m] for m in read] + [v[b, kv, j] for j in near])
                    out[b, h, i] = torch.softmax(scale * of_k @ q[b, h, i], 0) @ of_v
    return out + 0.0 * (q.sum() + k.sum() + v.sum())  # a graph where nothing is read, too


def open_keys(allowed, batch):
    """The key mask (B, S) behind `allowed`, for selections that are taken from the mechanism."""
    return allowed.expand(batch, -1, -1, -1)[:, 0].any(-2)


def ref_sampled(mech, q, k, v, *, allowed, scale):
    """Softmax over the selected keys, each with the sum of the weights with which it was drawn.

    Which keys, and their weights, are taken from `mech` as given: they carry no gradient.
    """
    groups = q.shape[1] // k.shape[1]
    mask = Mask(key=open_keys(allowed, len(q)))
    chosen = mech.select(q.detach(), k.detach(), mask, scale)
    total = torch.zeros(k.shape[:3], dtype=torch.float64)
    for row, head, at in torch.cartesian_prod(*map(torch.arange, chosen.index.shape)):
        weight = chosen.log_weight[row, head, at].double().exp()
        total[row, head, chosen.index[row, head, at]] += weight
    total = total.repeat_interleave(groups, 1)[:, :, None]
    return ref_softmax(mech, q, k, v, allowed=allowed & (total > 0), scale=scale, bias=total.log())


def ref_routing(mech, q, k, v, *, allowed, scale, causal=False):
    """Roy et al. 2020, section 4: the keys of each query counted out, cluster by cluster.

    Clusters, or the members of each, are taken from `mech` as given: they carry no gradient.
    """
    config, (batch, heads, length, dim) = mech.config, q.shape
    k = q if config.shared else k
    keys, per = k.shape[2], heads // k.shape[1]
    mask = Mask(key=open_keys(allowed, batch))
    of_q, of_k = mech.assign(q.detach(), k.detach(), mask)
    clusters = torch.zeros(batch, heads, config.clusters, length, keys, dtype=torch.bool)
    if config.membership == "balanced" or (config.membership == "auto" and not causal):
        in_q, in_k = mech.members(q.detach(), k.detach(), mask)
        for b, h in itertools.product(range(batch), range(heads)):
            members = [set(found.tolist()) - {-1} for found in in_q[b, h]]
            for i in range(length):
                mine = [c for c, held in enumerate(members) if i in held]
                if not mine and config.rest == "nearest":
                    mine = [min(int(of_q[b, h, i]), len(members) - 1)]
                for c in mine:
                    read = in_k[b, h // per, c]
                    clusters[b, h, c, i, read[read >= 0]] = True
    else:
        size, near = config.window, config.neighbours
        for b, h, i in itertools.product(range(batch), range(heads), range(length)):
            line = (of_k[b, h // per] == of_q[b, h, i]).nonzero().flatten()
            chunk = torch.arange(len(line)) // size
            before = int((line <= i + keys - length).sum())
            own = max(before - 1, 0) // size
            read = line[(chunk >= own - near) & (chunk <= own + (0 if causal else near))]
            clusters[b, h, 0, i, read] = True
    clusters = clusters & allowed.expand(batch, heads, -1, -1)[:, :, None]
    q, k, v = per_head(q, k, v)

    def normal(x):
        x = x - x.mean(-1, keepdim=True) if config.norm == "layer" else x
        return x * (dim / x.square().sum(-1, keepdim=True)).sqrt()

    if config.normalise == "both":
        q, k = normal(q), normal(k)
    elif config.normalise == "keys":
        k = normal(k)
    logits = scale * torch.einsum("bhid,bhjd->bhij", q, k)
    if config.own == "last" or (config.own == "auto" and config.shared):
        at = torch.arange(length)[:, None] + keys - length
        logits = logits - 5e4 * (at == torch.arange(keys))
    if config.merge == "lse":
        times = clusters.double().sum(2)
        return weighted_mean(logits + times.clamp_min(1).log(), v, times > 0)
    each = [weighted_mean(logits, v, one) for one in clusters.unbind(2)]
    number = clusters.any(-1).sum(2)[..., None]
    return sum(each) / number.clamp_min(1)


def ref_clustered(mech, q, k, v, *, allowed, scale):
    """Vyas et al. 2020, section 3, one cluster after the other; or clusters of keys.

    Assignments, and the mass by which keys are averaged, are taken from `mech` as given: they
    carry no gradient.
    """
    config, groups = mech.config, q.shape[1] // k.shape[1]
    key = open_keys(allowed, len(q))
    cluster = mech.assign(q.detach(), k.detach(), Mask(key=key))
    if config.cluster == "keys":
        return _clustered_keys(mech, q, k, v, key, cluster, scale)
    plain_q = q
    q, k, v = per_head(plain_q, k, v)
    rows = []
    for row in range(len(q)):
        # Queries at masked positions of self-attention are padding: centroids leave them out.
        counted = key[row] if q.shape[2] == k.shape[2] else torch.ones(q.shape[2]).bool()
        heads = [
            _clustered_queries(config, q[row, h], k[row, h], v[row, h], key[row], counted, c, scale)
            for h, c in enumerate(cluster[row])
        ]
        rows.append(torch.stack(heads))
    assert groups * mech.num_kv_heads == len(rows[0])
    return torch.stack(rows)


def _clustered_queries(config, q, k, v, key, counted, cluster, scale):
    """One head: q (L, D), k (S, D), v (S, V), open keys (S,), clusters (L,)."""
    if not key.any():
        return 0.0 * (q @ k[:1].mT) * v[:1]
    k, v = k[key], v[key]
    out = [None] * len(q)
    for c in cluster.unique():
        members = (cluster == c).nonzero().flatten()
        # As many clusters as queries: each is its own centroid, padding too.
        own = members if config.clusters >= len(q) else members[counted[members]]
        centroid = q[own].mean(0)
        shared = torch.softmax(scale * k @ centroid, 0)
        topk = 0 if config.cluster == "keys" else 32 if config.topk is None else config.topk
        top = shared.detach().topk(min(topk, len(k))).indices
        for i in members:
            weights = shared
            if topk:
                exact = shared[top].sum() * torch.softmax(scale * k[top] @ q[i], 0)
                weights = shared.index_put((top,), exact)
            out[i] = weights @ v
    return torch.stack(out)


def _clustered_keys(mech, q, k, v, key, cluster, scale):
    """Each cluster as one key: weighted means, and the entropy of the weights as log-weight."""
    groups = q.shape[1] // k.shape[1]
    if mech.config.weights == "mass":
        share = mech.shares(q.detach(), k.detach(), Mask(key=key), scale, cluster).double()
    q, k, v = q.double(), k.double(), v.double()
    out = []
    for row, head in torch.cartesian_prod(torch.arange(len(q)), torch.arange(q.shape[1])):
        own, of = head // groups, cluster[row, head // groups]
        keys, values, logs = [k[row, own, :0]], [v[row, own, :0]], []
        for c in of[key[row]].unique():
            members = (key[row] & (of == c)).nonzero().flatten()
            w = torch.full((len(members),), 1.0 / len(members), dtype=torch.float64)
            if mech.config.weights == "mass":
                w = share[row, own, members]
            keys.append((w @ k[row, own, members])[None])
            values.append((w @ v[row, own, members])[None])
            logs.append(-(w * w.log()).sum())
        logits = scale * q[row, head] @ torch.cat(keys).mT + torch.tensor(logs).double()
        out.append(torch.softmax(logits, -1) @ torch.cat(values))
    return torch.stack(out).unflatten(0, q.shape[:2])


# ---- token mixers: ref_<name>(mech, x, *, key, causal) for x (B, L, C), key (B, L) bool --------


def ref_fnet(mech, x, *, key, causal):
    """Re(F x F) with both matrices written out, a row at a time, over the tokens that it has."""
    assert not causal, "there is no causal form"
    compact, ortho = mech.config.padding == "compact", mech.config.norm == "ortho"

    def fourier(n):
        place = torch.arange(n)
        angle = 2 * math.pi * torch.outer(place, place).double() / n
        return torch.complex(torch.cos(angle), -torch.sin(angle))

    rows = []
    for tokens, own in zip(x.double(), key, strict=True):
        here = torch.arange(len(own))[own] if compact else torch.arange(len(own))
        tokens = tokens.masked_fill(~own[:, None], 0.0)[here]
        row = torch.zeros_like(x[0], dtype=torch.float64)
        if len(here):
            changed = (fourier(len(here)) @ tokens.to(torch.complex128) @ fourier(x.shape[2])).real
            row = row.index_copy(0, here, changed / changed.numel() ** 0.5 if ortho else changed)
        rows.append(row.masked_fill(~own[:, None], 0.0))
    return torch.stack(rows)


def ref_gmlp(mech, x, *, key, causal):
    """(Z1 ⊙ (W LayerNorm(Z2) + b + attention)) V with W as a matrix, group by group."""
    config, length = mech.config, x.shape[1]
    own = {name: parameter.double() for name, parameter in mech.named_parameters()}
    x = x.double().masked_fill(~key[..., None], 0.0)
    z = x @ own["in_weight"].T + own["in_bias"]
    z = z * (1 + torch.erf(z / math.sqrt(2))) / 2  # gelu
    carried, gate = z.chunk(2, -1)
    spread = gate.var(-1, unbiased=False, keepdim=True)
    gate = (gate - gate.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-5)
    gate = gate * own["norm_weight"] + own["norm_bias"]
    groups = gate.chunk(config.heads, -1)
    mixed = []
    for weight, bias, group in zip(own["spatial_weight"], own["spatial_bias"], groups, strict=True):
        place = torch.arange(length)
        if config.weights == "toeplitz":
            matrix = weight[place[:, None] - place + mech.max_length - 1]
        else:
            matrix = weight[:length, :length]
        matrix = matrix.tril() if causal else matrix
        matrix = matrix * key[:, None].double()  # masked tokens are read by none
        mixed.append(torch.einsum("bij,bje->bie", matrix, group) + bias[:length, None])
    gate = torch.cat(mixed, -1)
    if config.attention is not None:
        q, k, v = (x @ own["attention_in"].T)[:, None].chunk(3, -1)
        allowed = Mask(causal=causal, key=key).to_dense(length, length)
        allowed = allowed[:, None] if allowed.dim() == 3 else allowed
        read = ref_softmax(None, q, k, v, allowed=allowed, scale=config.attention**-0.5)
        gate = gate + read[:, 0] @ own["attention_out"].T + own["attention_bias"]
    out = (carried * gate) @ own["out_weight"].T + own["out_bias"]
    return out.masked_fill(~key[..., None], 0.0)


def ref_mlp_mixer(mech, x, *, key, causal):
    """W2 gelu(W1 x + b1) + b2, a channel at a time."""
    w1, b1, w2, b2 = (
        parameter.double()
        for parameter in (mech.in_weight, mech.in_bias, mech.out_weight, mech.out_bias)
    )
    if causal:
        w1, w2 = w1.tril(), w2.tril()
    length = x.shape[1]
    x = x.double().masked_fill(~key[..., None], 0.0)
    channels = []
    for c in range(x.shape[2]):
        units = x[:, :, c] @ w1[:, :length].T + b1
        units = units * (1 + torch.erf(units / math.sqrt(2))) / 2  # gelu
        channels.append(units @ w2[:length].T + b2[:length])
    return torch.stack(channels, -1).masked_fill(~key[..., None], 0.0)


def ref_synthesizer(mech, q, k, v, *, allowed, scale, bias=None):
    """softmax(Σ_n α_n S_n) v, Tay et al. 2020, section 3, one head and one pair at a time."""
    groups = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    config = mech.config
    q, k, v = per_head(q, k, v)
    alpha = torch.ones(mech.num_kv_heads, 1, dtype=torch.float64)
    if len(config.kinds) > 1:
        alpha = torch.softmax(mech.mixture.double(), -1)
    frame = max(queries, keys)  # both end together: positions of queries i and keys j
    i = torch.arange(frame - queries, frame)[:, None]
    j = torch.arange(frame - keys, frame)[None]

    def mlp(x, head, hidden, out):
        w1, b1, w2, b2 = (
            getattr(mech, f"{name}_{part}")[head].double()
            for name in (hidden, out)
            for part in ("weight", "bias")
        )
        return torch.relu(x @ w1.mT + b1) @ w2.mT + b2

    heads = []
    for head in range(q.shape[1]):
        own, x = head // groups, q[:, head]
        logits = torch.zeros(len(q), queries, keys, dtype=torch.float64)
        for kind, share in zip(config.kinds, alpha[own], strict=True):
            if kind == "dense":
                score = mlp(x, own, "hidden", "column")[..., :keys]
            elif kind == "factorised_dense":
                first = mlp(x, own, "factor_hidden", "first")
                second = mlp(x, own, "factor_hidden", "second")
                score = (first[..., :, None] * second[..., None, :]).flatten(-2)[..., :keys]
            elif kind == "random":
                score = mech.random_logits[own].double()[i, j]
            elif kind == "factorised_random":
                score = (mech.random_rows[own] @ mech.random_columns[own].mT).double()[i, j]
            else:
                score = scale * x @ k[:, head].mT
            logits = logits + share * score
        heads.append(logits)
    logits = torch.stack(heads, 1)
    return weighted_mean(logits if bias is None else logits + bias.double(), v, allowed)


def ref_aft(mech, q, k, v, *, allowed, scale=1.0):
    """σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij), Zhai et al. 2021, eq. 2.

    Each channel is a head of its own whose logits are k_jc + w_ij.
    """
    groups = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    q, k, v = per_head(q, k, v)
    frame = max(queries, keys)  # both end together: positions of queries i and keys j
    bias = torch.zeros(mech.num_kv_heads, queries, keys, dtype=torch.float64)
    if mech.config.kind != "simple":
        i = torch.arange(frame - queries, frame)[:, None]
        j = torch.arange(frame - keys, frame)[None]
        bias = aft_bias(mech, frame)[:, i, j]
    bias = bias.repeat_interleave(groups, 0)
    channels = [
        weighted_mean(scale * k[:, :, None, :, c] + bias, v[..., c : c + 1], allowed)
        for c in range(v.shape[-1])
    ]
    return torch.sigmoid(q) * torch.cat(channels, -1)


def aft_bias(mech, length):
    """w of all pairs of `length` positions, (Hkv, length, length)."""
    config = mech.config
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    left, right = (config.window,) * 2 if isinstance(config.window, int) else config.window
    inside = (j - i >= -left) & (j - i <= right)
    column = (j - i + left).clamp(0, left + right)
    if config.kind == "conv":
        w = mech.weight.double()
        if config.normalise:
            spread = w.std(-1, keepdim=True, correction=0)
            w = mech.gain[:, None] * (w - w.mean(-1, keepdim=True)) / spread + mech.shift[:, None]
        return torch.where(inside, w[:, column], 0.0)
    if config.rank is not None:
        w = (mech.rows.double() @ mech.columns.double().mT)[:, :length, :length]
    elif config.kind == "full":
        w = mech.weight.double()[:, :length, :length]
    else:
        w = mech.weight.double()[:, i, column]
    return w if config.kind == "full" else torch.where(inside, w, 0.0)


def ref_conv(mech, q, k, v, *, allowed, scale, causal=False):
    """The inner reference on each kernel's features, token by token and tap by tap."""
    config, (queries, keys) = mech.config, allowed.shape[-2:]
    opened = open_keys(allowed, len(q))
    plain = {"q": q.double(), "k": k.double(), "v": v.double()}
    # In self-attention queries are masked, too, where others read them.
    mixed = queries == keys and ("q" in config.roles or config.rows)

    def cleared(role, x):
        alone = max(config.kernels) == 1 and not config.compresses
        if alone or (role == "q" and not mixed):
            return x
        return x.masked_fill(~opened[:, None, :, None], 0.0)

    def feature(role, index):
        group = next((own for own in mech.kernels[index] if role in own), None)
        x = cleared(role, plain[role])
        if group is None:
            return x
        weight = mech.kernels[index][group].double()
        weight = weight.repeat_interleave(x.shape[1] // len(weight), 0)
        size, tokens = config.kernels[index], []
        before = size - 1 if config.padding == "causal" else size // 2
        for i in range(x.shape[2]):
            token = torch.zeros_like(x[:, :, 0])
            for t, j in enumerate(range(i - before, i - before + size)):
                if 0 <= j < x.shape[2] and (j <= i or not causal):
                    if config.conv == "full":
                        token = token + torch.einsum("hde,bhe->bhd", weight[:, t], x[:, :, j])
                    elif config.conv == "depthwise":
                        token = token + weight[:, t] * x[:, :, j]
                    else:
                        token = token + weight[:, t, None] * x[:, :, j]
            tokens.append(token)
        made = torch.stack(tokens, 2)
        return cleared(role, made) if config.compresses else made

    naive = globals()[f"ref_{config.inner.name}"]
    asked = {"causal": causal} if "causal" in inspect.signature(naive).parameters else {}
    if config.columns:
        # A summary is there if a key of its own window is: windows of nearly equal size.
        home = [j * config.columns // mech.max_length for j in range(keys)]
        there = [[j for j in range(keys) if home[j] == m] for m in range(config.columns)]
        allowed = torch.stack([opened[:, own].any(-1) for own in there], -1)[:, None, None]
    if config.rows and not config.columns:
        allowed = opened[:, None, None]
    if config.compresses:
        allowed = allowed.expand(-1, -1, config.rows or queries, -1)
    total, pairs = 0.0, tuple([cleared(role, plain[role])] for role in "qk")
    for index in range(len(config.kernels)):
        own_q, own_k, own_v = (feature(role, index) for role in "qkv")
        if config.residual:
            for read, own in zip(pairs, (own_q, own_k), strict=True):
                read.append(own)
            own_q, own_k = (torch.cat(read, -1) for read in pairs)
        if config.rows:
            own_q = mech.row_projection[:, :queries].double() @ own_q
        if config.columns:
            own_k = mech.key_projection[:, :keys].double() @ own_k
            own_v = mech.value_projection[:, :keys].double() @ own_v
        own = {"allowed": allowed, "scale": scale[index], **asked}
        out = naive(mech.inner[index], own_q, own_k, own_v, **own)
        if config.rows:
            out = mech.row_expansion[:queries].double() @ out
        if config.combine == "concat":
            out = torch.einsum("bhiv,hvw->bhiw", out, mech.projection[:, index].double())
        total = total + out
    return total


def ref_reformer(mech, q, k, v, *, allowed, scale):
    """Softmax over the keys that any round's chunks hold, query by query; hashes as given.

    Shared keys are k_j = q_j / √(mean q_j² + 1e-6), and a token that reads other keys leaves
    itself out.
    """
    config = mech.config
    hash_q = hash_k = mech.hash(q.detach())
    if config.shared:
        q, _, v = per_head(q, v, v)
        k = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    else:
        hash_k = mech.hash(k.detach()).repeat_interleave(q.shape[1] // k.shape[1], 2)
        q, k, v = per_head(q, k, v)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    allowed = allowed.expand(batch, heads, -1, -1)
    position, other = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    count = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for from_q, from_k in zip(hash_q, hash_k, strict=True):
        if config.chunks == "sorted":  # who stands before whom in one line of open tokens
            members = allowed & allowed.any(2)[:, :, None]
            code = from_k * keys + other
            earlier = code[..., None, :] < code[..., None]  # (B, H, S, S')
            rank = torch.einsum("bhis,bhjs->bhij", members.double(), earlier.double()).long()
            place = rank.diagonal(dim1=2, dim2=3)
        else:  # who stands before whom among the keys of a query's bucket
            members = allowed & (from_q[..., None] == from_k[..., None, :])
            rank = members.long().cumsum(-1) - 1
            place = ((members & (other <= position)).sum(-1) - 1).clamp_min(0)
        away = rank // config.chunk - place[..., None] // config.chunk
        count += members & (away >= -config.before) & (away <= config.after)
    if config.shared:  # a masked token reads nothing
        count = count * allowed.diagonal(dim1=2, dim2=3)[..., None]
    if config.last:
        others = count * (1 - torch.eye(keys, dtype=torch.float64))
        count = torch.where(others.sum(-1, keepdim=True) > 0, others, count)
    if config.duplicates == "once":
        count = count.clamp_max(1)
    logits = scale * torch.einsum("bhid,bhjd->bhij", q, k)
    return weighted_mean(logits + count.clamp_min(1).log(), v, count > 0)
