"""Naive float64 references, one for each mechanism: written for reading, not for speed.

Every one is ``ref_<name>(mech, q, k, v, *, allowed, scale) -> out`` for q (B, H, L, D),
k (B, Hkv, S, D) and v (B, Hkv, S, V). `allowed` is a bool (B or 1, H or 1, L, S), True =
attend; `mech` supplies parameters and buffers. Differentiable by autograd.
"""

import torch

from subquad.attention.masks import Mask


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


def ref_performer(mech, q, k, v, *, allowed, scale):
    """Random-feature attention with every φ materialised; see `subquad...performer`.

    The projection, and with data-aware options the gauge and the proposal, are taken from
    `mech` as given: they carry no gradient. The features are built from their definitions.
    """
    config, heads, root = mech.config, mech.num_kv_heads, scale**0.5
    groups = q.shape[1] // heads
    plain_q, plain_k = q, k
    q, k, v = per_head(q, k, v)
    omega = mech.projection.detach().double()
    log_weight = torch.zeros(omega.shape[:-1], dtype=torch.float64)
    x, y = q * root, k * root
    tilt = torch.zeros_like(y[..., 0])
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
