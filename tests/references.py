"""Naive float64 references, one for each mechanism: written for reading, not for speed.

Every one is ``ref_<name>(mech, q, k, v, *, allowed, scale) -> out`` for q (B, H, L, D),
k (B, Hkv, S, D) and v (B, Hkv, S, V). `allowed` is a bool (B or 1, H or 1, L, S), True =
attend; `mech` supplies parameters and buffers. Differentiable by autograd.
"""

import torch


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
