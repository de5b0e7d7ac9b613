"""The laws: what every mechanism must obey, stated once, for any mechanism and its capabilities.

`test_laws.py` runs them over the registry. Each law takes a variant (an option string).
"""

import copy
import functools
import inspect
import io
import pickle

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import references
import subquad as sq
from subquad.attention.partial import combine
from variants import capabilities, inputs, make, make_mixer, tokens

EXACT = 1e-10
"""Relative tolerance of float64 comparisons. Rounding is 1.1e-16 an operation; a result here
passes fewer than 10^4 of them in a row (sums over ≤ 200 keys × ≤ 64 features, exponents of
size ≤ 100 that amplify by 100), and a clipped normaliser amplifies by at most 1/clip = 10:
1.1e-16 × 10^4 × 10 ≈ 1.1e-11, taken with a margin of ten."""

UNREAD = {"allow_unused": True, "materialize_grads": True}
"""For `torch.autograd.grad`: zeros for what a mechanism does not read, be it q or k."""


def close(found, wanted, tolerance=EXACT):
    """Largest difference within tolerance × the largest wanted value."""
    found, wanted = found.detach().double(), wanted.detach().double()
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert torch.isfinite(found).all(), "not finite"
    error = (found - wanted).abs().max().item()
    bound = tolerance * max(wanted.abs().max().item(), 1e-3)
    assert error <= bound, f"differs by {error:.3e}, allowed {bound:.3e}"


def reference(mech, q, k, v, mask):
    """The naive float64 output."""
    naive = getattr(references, f"ref_{mech.name}")
    allowed = mask.to_dense(q.shape[-2], k.shape[-2], q.device)
    while allowed.dim() < 4:
        allowed = allowed[None] if allowed.dim() < 3 else allowed[:, None]
    # With one query a causal mask opens every key: who treats it apart asks for it.
    asked = {"causal": mask.causal} if "causal" in inspect.signature(naive).parameters else {}
    return naive(mech, q, k, v, allowed=allowed, scale=mech._scale(None), **asked)


def key_mask(batch, keys, seed=7, share=0.3):
    """Random key mask with at least one open key in each row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, keys, generator=generator) > share
    mask[:, 0] = True
    return mask


MASKS = {
    "none": lambda L, S: sq.Mask(),
    "key": lambda L, S: sq.Mask(key=key_mask(2, S)),
    "causal": lambda L, S: sq.Mask(causal=True),
    "causal+key": lambda L, S: sq.Mask(causal=True, key=key_mask(2, S)),
    "prefix": lambda L, S: sq.Mask(causal=True, prefix=min(5, S), key=key_mask(2, S)),
    "prefix rows": lambda L, S: sq.Mask(causal=True, prefix=torch.tensor([3, min(11, S)])),
    "segments": lambda L, S: sq.Mask(segments=(torch.arange(L) * 3 // L, torch.arange(S) * 3 // S)),
    "causal segments": lambda L, S: sq.Mask(
        causal=True, segments=(torch.arange(L) * 3 // L, torch.arange(S) * 3 // S)
    ),
    "window": lambda L, S: sq.Mask(window=(3, 2)),
    "causal window": lambda L, S: sq.Mask(causal=True, window=4, key=key_mask(2, S)),
    "dense": lambda L, S: sq.Mask(
        dense=torch.rand(2, 6, L, S, generator=torch.Generator().manual_seed(3)) > 0.4
    ),
}
LENGTHS = [(71, 71), (17, 71), (71, 17), (1, 23), (1, 1), (23, 1)]


def takes(spec, mask, queries, keys):
    """Whether a variant declares all that a call asks for."""
    have = capabilities(spec)
    return all(getattr(have, kind) for kind in mask.kinds()) and (queries == keys or have.cross)


def parity(spec, kind, queries, keys):
    """Law 1: forward and gradients equal the naive float64 reference."""
    mech = make(spec)
    q, k, v = inputs(queries, keys, grad=True, spec=spec)
    mask = MASKS[kind](queries, keys)
    out = mech(q, k, v, mask=mask)
    wanted = reference(mech, q, k, v, mask)
    close(out, wanted)
    parameters = [p for p in mech.parameters() if p.requires_grad]
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5)).double()
    found = torch.autograd.grad(out, [q, k, v, *parameters], cotangent, allow_unused=True)
    truth = torch.autograd.grad(wanted, [q, k, v, *parameters], cotangent, allow_unused=True)
    for a, b in zip(found, truth, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            close(torch.zeros_like(b) if a is None else a, b, gradient_rounding(mech))


def gradient_rounding(mech):
    """`EXACT`, or eps·κ² where gradients pass through an inverse: dA⁻¹ = −A⁻¹ dA A⁻¹.

    The matrices of landmarks that are inverted here have condition numbers κ ≤ 10⁴.
    """
    inverts = getattr(mech.config, "inverse", None) == "exact"
    return torch.finfo(torch.float64).eps * 1e8 if inverts else EXACT


def gradients(spec):
    """Law 1: numerical differentiation agrees (statistics of the call are held fixed by
    construction where the variant has them calibrated; others are covered by `parity`).

    Inputs are small so that no signed normaliser is clipped: a clipped row passes no gradient
    through its normaliser, by definition, which `parity` checks against the reference.
    """
    mech = make(spec, dim=3)
    causal = bool(capabilities(spec).causal)
    n = 3 if capabilities(spec).cross else 5
    q, k, v = inputs(n, 5, batch=1, dim=3, value=2, grad=True, size=0.3, spec=spec)
    torch.autograd.gradcheck(lambda q, k, v: mech(q, k, v, causal=causal), (q, k, v))


def derivatives(spec, kind):
    """Law 1: what `torch.func` and forward differentiation say is what autograd says.

    Inside of a transform a call takes another path, of differentiable operations alone. Compared
    are the output, the gradient, and the derivative along t, by ⟨ō, J t⟩ = ⟨Jᵀ ō, t⟩.
    """
    mech, mask = make(spec), MASKS[kind](23, 23)
    given = inputs(23, 23, grad=True, spec=spec, size=0.5)
    along = directions(given)

    def call(q, k, v):
        return mech(q, k, v, mask=mask)

    out = call(*given)
    (bar,) = directions([out])
    wanted = torch.autograd.grad(out, given, bar, **UNREAD)
    found = torch.func.grad(lambda *given: (call(*given) * bar).sum(), (0, 1, 2))(*given)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, gradient_rounding(mech))
    same, tangent = torch.func.jvp(call, given, along)
    close(same, out)
    forward, backward = (tangent * bar).sum(), inner(wanted, along)
    # Sums of up to 2,000 products of size 10 that may cancel: 1.1e-16 × 2,000 × 10, and amplified
    # as EXACT says.
    assert abs(forward - backward) <= 1e-8 * max(1.0, abs(backward))


def derivatives_without_keys(spec, causal):
    """Law 4 for transforms: rows with no key to attend have finite derivatives, second ones too,
    and their gradients with a graph are those without.
    """
    mech, opened = make(spec), key_mask(2, 23)
    opened[0, :4] = False
    opened[1] = False
    given = inputs(23, 23, grad=True, spec=spec, size=0.5)
    with sdpa_kernel(SDPBackend.MATH):  # of torch's, the one with second derivatives
        out = mech(*given, causal=causal, key_mask=opened)
    bar, *along = directions([out, *given])
    plain = torch.autograd.grad(out, given, bar, retain_graph=True, **UNREAD)
    first = torch.autograd.grad(out, given, bar, create_graph=True, **UNREAD)
    for one, other in zip(first, plain, strict=True):
        close(one, other, gradient_rounding(mech))
    second = torch.autograd.grad(inner(first, along), given, **UNREAD)
    call = functools.partial(mech, causal=causal, key_mask=opened)
    _, tangent = torch.func.jvp(call, given, tuple(along))
    assert all(torch.isfinite(t).all() for t in (*second, tangent))


def second_derivatives(spec):
    """Law 1 for gradients that have gradients: H t by autograd's graph and forward over reverse,
    and, where the gradient is that of the function, by a symmetric difference of gradients: of
    step h = 1e-5 with an error of h²/6 = 2e-11 times the fourth derivative, and of rounding,
    `gradient_rounding`/h of the gradient at worst. The graph and the difference are those of
    parameters too.
    """
    mech = make(spec)
    causal = bool(capabilities(spec).causal)
    given = inputs(13, 13, grad=True, spec=spec, size=0.3)  # nothing is clipped, see `gradients`
    everything = [*given, *(p for p in mech.parameters() if p.requires_grad)]
    along = directions(everything)
    with sdpa_kernel(SDPBackend.MATH):  # of torch's, the one with second derivatives
        out = mech(*given, causal=causal)
    (bar,) = directions([out])

    def total(*given):
        return (mech(*given, causal=causal) * bar).sum()

    def graph(tensors):
        first = torch.autograd.grad(out, tensors, bar, create_graph=True, **UNREAD)
        return torch.autograd.grad(inner(first, along), tensors, retain_graph=True, **UNREAD)

    def gradient(*given):
        return torch.func.grad(total, (0, 1, 2))(*given)

    _, forward = torch.func.jvp(gradient, given, along[:3])
    for one, other in zip(graph(given), forward, strict=True):
        close(one, other, max(1e-9, gradient_rounding(mech)))
    if not capabilities(spec).exact_gradient:
        return
    found, sides = graph(everything), []
    for step in (1e-5, -2e-5):  # there, and from there to the other side
        with torch.no_grad():
            for x, t in zip(everything, along, strict=True):
                x.add_(step * t)
        sides.append(torch.autograd.grad(total(*given), everything, **UNREAD))
    for one, *both in zip(found, *sides, strict=True):
        close(one, (both[0] - both[1]) / 2e-5, gradient_rounding(mech) / 1e-5)


def vmapped(spec, kind):
    """Law 4: `torch.vmap` over calls of one row is the call of all rows."""
    mech = make(spec)
    q, k, v = inputs(23, 23, spec=spec, batch=3)
    opened = key_mask(3, 23) if kind == "key" else torch.ones(3, 23, dtype=torch.bool)
    rest = {"causal": True} if kind == "causal" else {}

    def call(q, k, v, opened):
        mask = {"key_mask": opened[None]} if kind == "key" else {}
        return mech(q[None], k[None], v[None], **rest, **mask)[0]

    wanted = mech(q, k, v, **rest, **({"key_mask": opened} if kind == "key" else {}))
    close(torch.vmap(call)(q, k, v, opened), wanted)


def directions(tensors, seed=5):
    """Random numbers in the shapes of tensors."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in tensors)


def inner(some, others):
    """The inner product of two lists of tensors."""
    return sum((one * other).sum() for one, other in zip(some, others, strict=False))


def causality(spec):
    """Law 2: token t changes nothing before t, and k_t, v_t alone change something after t."""
    mech = make(spec)
    q, k, v = inputs(71, 71, spec=spec)
    base = mech(q, k, v, causal=True)
    for t in (0, 5, 36, 64, 70):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t] += 1.0
        out = mech(*changed, causal=True)
        if t:  # a later key may move the common scale of its chunk, hence the last digits
            close(out[:, :, :t], base[:, :, :t], 1e-12)
        changed = [x.clone() for x in (k, v)]
        for x in changed:
            x[:, :, t] += 1.0
        out = mech(q, *changed, causal=True)
        moved = (out - base).abs().amax((0, 1, 3)) > 1e-9
        wanted = torch.zeros(71, dtype=torch.bool)
        wanted[list(mech.reached(t, 71))] = True
        chosen = "attention comes back" in mech.capabilities.reach  # further ones by content
        for found, expected in zip(moved[t + 1 :], wanted[t + 1 :], strict=True):
            right = found == expected or (chosen and found)
            assert right, f"key {t} moves {moved.nonzero().flatten().tolist()}"


def streaming(spec):
    """Law 3: whole = chunks = prefill + steps, and a constant state does not grow."""
    mech = make(spec)
    q, k, v = inputs(71, 71, spec=spec)
    mask = key_mask(2, 71)
    whole = mech(q, k, v, causal=True, key_mask=mask)
    sizes = set()
    for pieces in ([71], [64, 7], [1, 1, 69], [13] * 5 + [6], [70, 1]):
        state, parts, at = None, [], 0
        for n in pieces:
            window = slice(at, at + n)
            call = mech.prefill if state is None else mech.step
            args = [x[:, :, window] for x in (q, k, v)]
            if state is None:
                out, state = call(*args, key_mask=mask[:, window])
            else:
                before = state.clone()
                out, new = call(*args, state, key_mask=mask[:, window])
                for name, tensor in before.tensors().items():
                    assert torch.equal(tensor, state.tensors()[name]), "a step changed its input"
                state = new
            parts.append(out)
            at += n
            sizes.add(state.nbytes)
        close(torch.cat(parts, 2), whole)
    if capabilities(spec).state == "constant":
        assert len(sizes) == 1, f"state bytes vary: {sizes}"


def state_operations(spec):
    """Law 3: select, repeat, clone, to and reading without writing."""
    mech = make(spec)
    q, k, v = inputs(19, 19, spec=spec)
    _, state = mech.prefill(q, k, v)
    rows = torch.tensor([1, 0, 1])
    picked = state.select(rows)
    a, _ = mech.step(q[rows], k[rows], v[rows], picked)
    b, _ = mech.step(q, k, v, state)
    close(a, b[rows])
    none, left = mech.prefill(q[:0], k[:0], v[:0], key_mask=key_mask(2, 19)[:0])
    none, left = mech.step(q[:0], k[:0], v[:0], left)
    assert none.shape == (0, *a.shape[1:])
    wanted = {name: (0, *t.shape[1:]) for name, t in mech.step(q, k, v, state)[1].tensors().items()}
    assert {name: tuple(t.shape) for name, t in left.tensors().items()} == wanted
    if capabilities(spec).read:
        assert mech.step(q[:0], None, None, left)[0].shape == (0, *a.shape[1:])
    c, _ = mech.step(*(x.repeat_interleave(2, 0) for x in (q, k, v)), state.repeat(2))
    close(c, b.repeat_interleave(2, 0))
    moved = state.to("cpu").clone()
    if capabilities(spec).read:
        read, moved = mech.step(q[:, :, :3], None, None, moved)
        close(read, mech(q[:, :, :3], k, v))
    assert moved.nbytes == state.nbytes == sum(t.nbytes for t in state.tensors().values())


def reading(spec):
    """Law 3 for cross-attention: queries that read a state are answered as in one call, in any
    split; those before are not changed by those behind. The state that is read stays as it is.
    """
    mech = make(spec)
    q, k, v = inputs(17, 71, spec=spec)
    mask = key_mask(2, 71)
    whole = mech(q, k, v, key_mask=mask)
    _, filled = mech.prefill(q[:, :, :1], k, v, key_mask=mask)
    before = filled.clone()
    for pieces in ([17], [1, 5, 11]):
        state, parts = filled, []
        for piece in q.split(pieces, 2):
            out, state = mech.step(piece, None, None, state)
            parts.append(out)
        close(torch.cat(parts, 2), whole)
        assert state.nbytes == filled.nbytes
    for name, tensor in before.tensors().items():
        assert torch.equal(tensor, filled.tensors()[name]), "a step changed its input"
    changed = q.clone()
    changed[:, :, 11:] += 1.0
    close(mech(changed, k, v, key_mask=mask)[:, :, :11], whole[:, :, :11])


def largest(scale):
    """A scale, or the largest of those that a mechanism has for its parts."""
    return max(map(largest, scale)) if isinstance(scale, tuple) else scale


def junk(spec):
    """Law 4a: what masked keys contain never matters, in output or gradient."""
    mech = make(spec)
    mask = key_mask(2, 71)
    for causal in (False, True):
        if causal and not capabilities(spec).causal:
            continue
        results = []
        for fill in (0.0, float("nan"), float("inf"), -float("inf"), 1e30):
            q, k, v = inputs(17 if capabilities(spec).cross else 71, 71, spec=spec)
            k.masked_fill_(~mask[:, None, :, None], fill)
            v.masked_fill_(~mask[:, None, :, None], fill)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = mech(*leaves, key_mask=mask, causal=causal)
            grads = torch.autograd.grad(out.square().sum(), leaves, **UNREAD)
            assert not grads[1].masked_select(~mask[:, None, :, None]).any()
            results.append((out, *grads))
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                assert torch.equal(x, y), "a masked key's content mattered"


def right_padding(spec):
    """Law 4b: right-padding equals the unpadded call, row by row with ragged lengths."""
    mech = make(spec)
    lengths = (53, 71)
    q, k, v = inputs(71, 71, spec=spec)
    mask = torch.arange(71) < torch.tensor(lengths)[:, None]
    for causal in (False, True):
        if causal and not capabilities(spec).causal:
            continue
        out = mech(q, k, v, key_mask=mask, causal=causal)
        for row, n in enumerate(lengths):
            alone = mech(*(x[row : row + 1, :, :n] for x in (q, k, v)), causal=causal)
            close(out[row : row + 1, :, :n], alone)


def other_padding(spec):
    """Law 4c: left and middle padding equal the compacted row."""
    mech = make(spec)
    q, k, v = inputs(71, 71, spec=spec)
    mask = key_mask(2, 71)
    mask[0] = torch.arange(71) >= 29
    for causal in (False, True):
        if causal and not capabilities(spec).causal:
            continue
        out = mech(q, k, v, key_mask=mask, causal=causal)
        for row in range(2):
            open_ = mask[row]
            alone = mech(*(x[row : row + 1, :, open_] for x in (q, k, v)), causal=causal)
            close(out[row : row + 1, :, open_], alone)
        if causal:
            assert not out[0, :, :29].any(), "rows before the first key must be zero"


def no_key(spec):
    """Law 4: a row with no key to attend gives zeros, and gradients of zero."""
    mech = make(spec)
    q, k, v = inputs(71, 71, spec=spec)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    empty = mech(*leaves, key_mask=torch.zeros(2, 71, dtype=torch.bool))
    assert not empty.any(), "rows without keys must be zero"
    for grad in torch.autograd.grad(empty.sum(), leaves, allow_unused=True):
        assert grad is None or not grad.any()


def partials(spec):
    """Partial sums over disjoint keys merge to the whole, gradients included.

    Keys are told apart by masks; where positions do not matter, also by slices.
    """
    mech = make(spec)
    q, k, v = inputs(17, 71, grad=True, spec=spec)
    mask = key_mask(2, 71)
    mask[0, :29] = False  # the first part of row 0 is empty
    cuts = [slice(0, 29), slice(29, 30), slice(30, 71)]
    within = [mask & torch.isin(torch.arange(71), torch.arange(71)[c]) for c in cuts]
    _merged(mech, q, k, v, mask, [mech.partial(q, k, v, key_mask=own) for own in within])
    empty = mech.partial(q[:0], k[:0], v[:0])
    assert empty.num.shape == (0, *q.shape[1:3], v.shape[-1]) and empty.num.dtype == q.dtype
    if mech.family in ("exact", "kernel"):
        slices = [mech.partial(q, k[:, :, c], v[:, :, c], key_mask=mask[:, c]) for c in cuts]
        _merged(mech, q, k, v, mask, slices)


def _merged(mech, q, k, v, mask, parts):
    sums, truth = combine(parts), mech.partial(q, k, v, key_mask=mask)
    factor = torch.exp(sums.log_scale - truth.log_scale)
    close(sums.den * factor, truth.den)
    close(sums.num * factor[..., None], truth.num)
    signed = mech.name == "kernel_nystrom" or getattr(mech.config, "estimator", None) == "trig"
    if signed:  # a ratio is ill-conditioned
        merged, whole = sums.num * factor[..., None], truth.num
    else:
        merged, whole = sq.merge(parts), mech(q, k, v, key_mask=mask)
        close(merged, whole)
    cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(6)).double()
    for a, b in zip(
        torch.autograd.grad(merged, (q, k, v), cotangent, **UNREAD),
        torch.autograd.grad(whole, (q, k, v), cotangent, **UNREAD),
        strict=True,
    ):
        close(a, b)


def implied_weights(spec):
    """`weights` is the matrix that gives the output, closed where the mask is."""
    mech = make(spec)
    q, k, v = inputs(23, 23, spec=spec)
    causal = bool(capabilities(spec).causal)
    weights = mech.weights(q, k, causal=causal)
    groups = q.shape[1] // k.shape[1]
    close(weights @ v.repeat_interleave(groups, 1), mech(q, k, v, causal=causal))
    if causal:
        assert not weights.triu(1).any()
    rows = mech.weights(q, k, causal=causal, rows=[0, 22])
    close(rows, weights[:, :, [0, 22]])
    sized = make(spec, value_dim=v.shape[-1])  # the matrix has S columns, whatever V is
    assert torch.equal(sized.weights(q, k, causal=causal), weights)


def dtypes(spec, dtype):
    """Law 7: half precision within its rounding of the same inputs in float64."""
    mech = make(spec, dtype=torch.float32)
    q, k, v = inputs(71, 71, dtype=dtype, size=0.7, spec=spec)
    causal = bool(capabilities(spec).causal)
    out = mech(q, k, v, causal=causal)
    assert out.dtype == dtype
    exact = copy.deepcopy(mech).double()(q.double(), k.double(), v.double(), causal=causal)
    # Inputs are the same numbers: what differs is arithmetic, float32 inside for kernels,
    # and the output's rounding, half an ulp: eps/2. torch's fused half-precision softmax
    # also rounds its weights to the input dtype, an error of ≤ 71·eps/2 of a convex sum in
    # the worst case, √71·eps/2 ≈ 4 eps when roundings are independent; 8 eps is allowed.
    # A float32 clipped normaliser amplifies 1e-6 by 1/clip = 10: 1e-5. Data-aware maps take
    # moments and a balance of condition ≤ 10^3^½ ≈ 30 (jitter 1e-3) in float32 besides: 1e-4.
    bound = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
    close(out, exact, max(bound, 1e-4))


def huge_logits(spec):
    """Law 7: logits up to ±1e4 stay finite, forward and backward, float32."""
    mech = make(spec, dtype=torch.float32)
    scale = largest(mech._scale(None))  # of the parts' the largest brings its part to the bound
    q, k, v = inputs(71, 71, dtype=torch.float32, spec=spec)
    factor = (1e4 / (scale * (q.square().sum(-1).max() * k.square().sum(-1).max()).sqrt())) ** 0.5
    causal = bool(capabilities(spec).causal)
    leaves = [(x * f).requires_grad_() for x, f in ((q, factor), (k, factor), (v, 1.0))]
    out = mech(*leaves, causal=causal)
    assert torch.isfinite(out).all()
    for grad in torch.autograd.grad(out.sum(), leaves, **UNREAD):
        assert torch.isfinite(grad).all()


def citizenship(spec):
    """Law 8: state_dict, pickle, deepcopy, meta-device init, moves, leading dims, strides."""
    mech = make(spec)
    q, k, v = inputs(23, 23, spec=spec)
    wanted = mech(q, k, v)
    twin = make(spec, seed=99)
    twin.load_state_dict(mech.state_dict())
    close(twin(q, k, v), wanted, 0.0)
    buffer = io.BytesIO()
    torch.save(mech.state_dict(), buffer)
    buffer.seek(0)
    twin = make(spec, seed=98)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    close(twin(q, k, v), wanted, 0.0)
    for other in (copy.deepcopy(mech), pickle.loads(pickle.dumps(mech))):  # our own bytes
        close(other(q, k, v), wanted, 0.0)
    with torch.device("meta"):
        empty = sq.build(
            spec, head_dim=5, num_heads=6, num_kv_heads=mech.num_kv_heads, max_length=1024,
            dtype=torch.float64,
        ).eval()  # fmt: skip
    assert all(t.is_meta for t in (*empty.parameters(), *empty.buffers()))
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(mech.state_dict())
    close(empty(q, k, v), wanted, 0.0)
    empty.reset_parameters()
    single = mech(q[0], k[0], v[0])
    close(single, wanted[0])
    many = [x.unflatten(0, (1, 2, 1)) for x in (q, k, v)]
    close(mech(*many), wanted.unflatten(0, (1, 2, 1)))
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not swapped[0].is_contiguous()
    close(mech(*swapped), wanted)


def checkpointed(spec):
    """Law 8: activation checkpointing gives the same gradients."""
    from torch.utils.checkpoint import checkpoint

    mech = make(spec)
    q, k, v = inputs(71, 71, grad=True, spec=spec)
    causal = bool(capabilities(spec).causal)
    plain = mech(q, k, v, causal=causal)
    again = checkpoint(mech, q, k, v, causal=causal, use_reentrant=False)
    for a, b in zip(
        torch.autograd.grad(again.square().sum(), (q, k, v), **UNREAD),
        torch.autograd.grad(plain.square().sum(), (q, k, v), **UNREAD),
        strict=True,
    ):
        close(a, b, 0.0)


def same_seed(spec):
    """Law 6: determined by the seed, identical in eval."""
    q, k, v = inputs(23, 23, spec=spec)
    first, again = make(spec, seed=3), make(spec, seed=3)
    wanted = first(q, k, v)
    close(again(q, k, v), wanted, 0.0)
    close(first(q, k, v), wanted, 0.0)


def autocast(spec):
    """Law 8: autocast equals casting the inputs, as it does for torch's own attention."""
    mech = make(spec, dtype=torch.float32)
    q, k, v = inputs(71, 71, dtype=torch.float32, size=0.7, spec=spec, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mech(q, k, v)
        # Training loops have backward() inside; torch then rounds products of its own as well.
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v), **UNREAD)
    assert out.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
    close(out, mech(q.bfloat16(), k.bfloat16(), v.bfloat16()), 0.0)


def compiled(spec):
    """Law 8: fullgraph compilation, no recompilation per length, and export."""
    from torch._dynamo.testing import CompileCounter

    mech = make(spec, dtype=torch.float32)
    causal = bool(capabilities(spec).causal)
    torch._dynamo.reset()
    counter = CompileCounter()
    run = torch.compile(
        lambda q, k, v: mech(q, k, v, causal=causal), backend=counter, fullgraph=True
    )
    for length in (29, 43, 67, 131, 139):
        q, k, v = inputs(length, length, dtype=torch.float32, spec=spec)
        close(run(q, k, v), mech(q, k, v, causal=causal), 1e-5)  # same operations in float32
    # One graph for the first length, one with a symbolic length for all others; where the length
    # chooses between two sides, one with a symbolic length for each.
    graphs = 3 if mech.name == "auto" and mech.config.length is None else 2
    assert counter.frame_count <= graphs, f"compiled {counter.frame_count} times"
    torch._dynamo.reset()


def exported(spec):
    """Law 8: torch.export with a dynamic length."""
    mech = make(spec, dtype=torch.float32)
    q, k, v = inputs(37, 37, dtype=torch.float32, spec=spec)
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in ("q", "k", "v")}
    program = torch.export.export(mech, (q, k, v), dynamic_shapes=shapes)
    q, k, v = inputs(97, 97, dtype=torch.float32, spec=spec)
    close(program.module()(q, k, v), mech(q, k, v), 1e-5)  # same operations in float32


# ---- token mixers: the same laws for x (B, L, C) in place of q, k, v ----------------------------


def mixer_calls(spec):
    """(causal, key mask or None) of every kind of call that a mixer takes."""
    causal = [False, True] if capabilities(spec).causal else [False]
    return [(c, m) for c in causal for m in (None, key_mask(2, 71))]


def mixer_reference(mixer, x, key, causal):
    """The naive float64 output."""
    naive = getattr(references, f"ref_{mixer.name}")
    key = torch.ones(x.shape[:2], dtype=torch.bool) if key is None else key
    return naive(mixer, x, key=key, causal=causal)


def mixer_parity(spec):
    """Law 1: forward and gradients, of parameters too, equal the naive float64 reference."""
    mixer = make_mixer(spec)
    for length in (71, 1, 2, 64):
        for causal, key in mixer_calls(spec):
            x = tokens(length, grad=True)
            key = None if key is None else key[:, :length]
            out, wanted = (
                mixer(x, causal=causal, key_mask=key),
                mixer_reference(mixer, x, key, causal),
            )
            close(out, wanted)
            leaves = [x, *mixer.parameters()]
            cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).double()
            found = torch.autograd.grad(out, leaves, cotangent)
            truth = torch.autograd.grad(wanted, leaves, cotangent)
            for a, b in zip(found, truth, strict=True):
                close(a, b)


def mixer_gradients(spec):
    """Law 1: numerical differentiation agrees."""
    mixer = make_mixer(spec, most=7)
    mask = torch.tensor([[True, False, True, True, True]])
    for causal in {False, bool(capabilities(spec).causal)}:
        x = tokens(5, batch=1, grad=True)
        torch.autograd.gradcheck(lambda x, c=causal: mixer(x, causal=c, key_mask=mask), x)


def mixer_causality(spec):
    """Law 2: token t changes nothing before t, and something at every token from t on."""
    mixer, x = make_mixer(spec), tokens(71)
    base = mixer(x, causal=True)
    for t in (0, 5, 36, 64, 70):
        changed = x.clone()
        changed[:, t] += tokens(1, seed=9)[:, 0]
        out = mixer(changed, causal=True)
        if t:  # a Fourier transform rounds all rows alike: the last digits
            close(out[:, :t], base[:, :t], 1e-12)
        moved = (out - base).abs().amax((0, 2))[t + 1 :] > 1e-9
        assert moved[[later - t - 1 for later in mixer.reached(t, 71)]].all()


def mixer_streaming(spec):
    """Law 3: whole = chunks = prefill + steps; a state grows by the same bytes a token."""
    mixer, x, mask = make_mixer(spec), tokens(71), key_mask(2, 71)
    whole = mixer(x, causal=True, key_mask=mask)
    for pieces in ([71], [64, 7], [1, 1, 69], [13] * 5 + [6], [70, 1], [3, 68]):
        state, parts, at = None, [], 0
        for n in pieces:
            before = None if state is None else state.clone()
            call = {"key_mask": mask[:, at : at + n], "state": state}
            out, new = (mixer.prefill if state is None else mixer.step)(x[:, at : at + n], **call)
            for name, tensor in ({} if before is None else before.tensors()).items():
                assert torch.equal(tensor, state.tensors()[name]), "a step changed its input"
            state = new
            parts.append(out)
            at += n
        close(torch.cat(parts, 1), whole)
        per_token = state.nbytes / 71
    _, half = mixer.prefill(x[:, :36], key_mask=mask[:, :36])
    assert half.nbytes == 36 * per_token


def mixer_state_operations(spec):
    """Law 3: select, repeat, clone, to, and rows that are not there."""
    mixer, x = make_mixer(spec), tokens(19)
    _, state = mixer.prefill(x)
    rows = torch.tensor([1, 0, 1])
    a, _ = mixer.step(x[rows], state=state.select(rows))
    b, later = mixer.step(x, state=state.to("cpu").clone())
    close(a, b[rows])
    c, _ = mixer.step(x.repeat_interleave(2, 0), state=state.repeat(2))
    close(c, b.repeat_interleave(2, 0))
    none, left = mixer.prefill(x[:0], key_mask=key_mask(2, 19)[:0])
    none, left = mixer.step(x[:0], state=left)
    assert none.shape == (0, *x.shape[1:])
    wanted = {name: (0, *t.shape[1:]) for name, t in later.tensors().items()}
    assert {name: tuple(t.shape) for name, t in left.tensors().items()} == wanted


def mixer_junk(spec):
    """Law 4a: what masked tokens contain never matters, and their rows are zeros."""
    mixer, mask = make_mixer(spec), key_mask(2, 71)
    for causal in {False, bool(capabilities(spec).causal)}:
        results = []
        for fill in (0.0, float("nan"), float("inf"), -float("inf"), 1e30):
            x = tokens(71).masked_fill(~mask[..., None], fill).requires_grad_()
            out = mixer(x, key_mask=mask, causal=causal)
            grads = torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()])
            assert not out[~mask].any() and not grads[0][~mask].any()
            results.append((out, *grads))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b), "a masked token's content mattered"


def mixer_right_padding(spec):
    """Law 4b: right-padding equals the unpadded call, row by row with ragged lengths."""
    mixer, x, lengths = make_mixer(spec), tokens(71), (53, 71)
    mask = torch.arange(71) < torch.tensor(lengths)[:, None]
    for causal in {False, bool(capabilities(spec).causal)}:
        out = mixer(x, key_mask=mask, causal=causal)
        for row, n in enumerate(lengths):
            close(out[row : row + 1, :n], mixer(x[row : row + 1, :n], causal=causal))


def mixer_other_padding(spec):
    """Law 4c: left and middle padding equal the compacted row."""
    mixer, x, mask = make_mixer(spec), tokens(71), key_mask(2, 71)
    mask[0] = torch.arange(71) >= 29
    out = mixer(x, key_mask=mask)
    for row in range(2):
        here = mask[row]
        close(out[row : row + 1, here], mixer(x[row : row + 1, here]))


def mixer_no_token(spec):
    """Law 4: a row without any token gives zeros and gradients of zero, beside a row with some."""
    mixer = make_mixer(spec)
    mask = torch.zeros(2, 71, dtype=torch.bool)
    mask[1, 3:] = True
    for causal in {False, bool(capabilities(spec).causal)}:
        x = tokens(71, grad=True)
        out = mixer(x, key_mask=mask, causal=causal)
        assert not out[0].any() and out[1, 3:].any()
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert not grad[0].any() and torch.isfinite(grad).all()


def mixer_dtypes(spec, dtype):
    """Law 7: half precision within its rounding of the same inputs in float64."""
    mixer = make_mixer(spec, dtype=torch.float32)
    x = tokens(71, dtype=dtype, size=0.7)
    mask = key_mask(2, 71)
    out = mixer(x, key_mask=mask)
    assert out.dtype == dtype
    exact = copy.deepcopy(mixer).double()(x.double(), key_mask=mask)
    # Float32 inside, the output rounded once: eps/2 of each number. Float32 itself: the longest
    # way is a Bluestein transform, three transforms of 142 places (log2 142 ≈ 7 roundings each),
    # channels (4), and the products before and behind: 30 roundings of 6e-8, and a channel
    # projection of up to 44 terms, a norm and a gate of 71 terms in others: below 200·6e-8.
    close(out, exact, max(torch.finfo(dtype).eps, 200 * 6e-8))


def mixer_huge(spec):
    """Law 7: tokens of size 1e4 stay finite, forward and backward, in float32."""
    mixer = make_mixer(spec, dtype=torch.float32)
    x = tokens(71, dtype=torch.float32, size=1e4, grad=True)
    out = mixer(x, causal=bool(capabilities(spec).causal))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.isfinite(out).all() and torch.isfinite(grad).all()


def mixer_citizenship(spec):
    """Law 8: state_dict, pickle, deepcopy, meta-device init, leading dims, strides, modes."""
    mixer, x = make_mixer(spec), tokens(23)
    wanted = mixer(x)
    close(make_mixer(spec)(x), wanted, 0.0)  # law 6: the seed decides
    twin = make_mixer(spec, seed=99)
    twin.load_state_dict(mixer.state_dict())
    close(twin(x), wanted, 0.0)
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):  # our own bytes
        close(other(x), wanted, 0.0)
    with torch.device("meta"):
        empty = make_mixer(spec)
    assert all(t.is_meta for t in (*empty.parameters(), *empty.buffers()))
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(mixer.state_dict())
    close(empty(x), wanted, 0.0)
    empty.reset_parameters()
    fresh = sq.build(spec, embed_dim=11, max_length=83, dtype=torch.float64)
    for name, value in fresh.state_dict().items():
        assert torch.equal(empty.state_dict()[name], value), f"{name} is not drawn by the seed"
    close(mixer(x[0]), wanted[0])
    close(mixer(x.unflatten(0, (1, 2, 1))), wanted.unflatten(0, (1, 2, 1)))
    swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not swapped.is_contiguous()
    close(mixer(swapped), wanted)
    nothing = tokens(23)[:0].requires_grad_()
    assert mixer(nothing).shape == (0, 23, 11)
    mixer(nothing).sum().backward()
    by_heads = sq.build(spec, head_dim=11, num_heads=3, max_length=83)
    assert by_heads(torch.randn(1, 7, 33)).shape == (1, 7, 33)


def mixer_checkpointed(spec):
    """Law 8: activation checkpointing gives the same gradients."""
    from torch.utils.checkpoint import checkpoint

    mixer, x = make_mixer(spec), tokens(71, grad=True)
    again = checkpoint(mixer, x, use_reentrant=False)
    leaves = [x, *mixer.parameters()]
    for a, b in zip(
        torch.autograd.grad(again.square().sum(), leaves),
        torch.autograd.grad(mixer(x).square().sum(), leaves),
        strict=True,
    ):
        close(a, b, 0.0)


def mixer_autocast(spec):
    """Law 8: autocast equals casting the inputs."""
    mixer, x = make_mixer(spec, dtype=torch.float32), tokens(71, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixer(x)
    assert out.dtype == torch.bfloat16
    close(out, mixer(x.bfloat16()), 0.0)


def mixer_compiled(spec):
    """Law 8: fullgraph compilation, no recompilation per length."""
    from torch._dynamo.testing import CompileCounter

    mixer = make_mixer(spec, dtype=torch.float32, most=149)
    for causal, masked in ((False, False), (bool(capabilities(spec).causal), True)):
        torch._dynamo.reset()
        counter = CompileCounter()

        def call(x, mask, causal=causal):
            return mixer(x, causal=causal, key_mask=mask)

        run = torch.compile(call, backend=counter, fullgraph=True)
        for length in (29, 67, 131):
            x = tokens(length, dtype=torch.float32)
            mask = key_mask(2, length) if masked else None
            close(run(x, mask), call(x, mask), 1e-5)  # same operations in float32
        # One graph for the first length, one with a symbolic length for all others.
        assert counter.frame_count <= 2, f"compiled {counter.frame_count} times"
    torch._dynamo.reset()


def mixer_exported(spec):
    """Law 8: torch.export with a dynamic length."""
    mixer = make_mixer(spec, dtype=torch.float32, most=601)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        mixer, (tokens(37, dtype=torch.float32),), dynamic_shapes={"x": {1: length}}
    )
    x = tokens(97, dtype=torch.float32)
    close(program.module()(x), mixer(x), 1e-5)  # same operations in float32
