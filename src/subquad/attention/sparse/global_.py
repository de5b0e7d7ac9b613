"""Global attention: a few tokens read all and are read by all; the others read these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad.attention.base import Absent, Capabilities, Cost, Info, Mechanism, State
from subquad.attention.exact.engine import (
    CHUNK_BYTES,
    KeyValueState,
    as_partial,
    clear,
    explicit,
    sums_dtype,
)
from subquad.attention.masks import Mask
from subquad.attention.partial import EMPTY_LOG_SCALE, Partial, combine
from subquad.errors import DtypeError, OptionError, ShapeError
from subquad.kernels.transforms import recomputes
from subquad.options import Config, flag_problem, integer_problem

__all__ = ["Global", "GlobalConfig", "LeadingState"]


@dataclass(frozen=True)
class GlobalConfig(Config):
    """Options of `Global`.

    Args:
        tokens: which tokens are global: positions, negative ones from the end; the number of
            leading tokens; or ``"marked"``: those in `Global.marked`, call by call.
        own: whether every query also reads its own position.
        extra: n, learned global tokens in addition to those of the sequence.
    """

    mechanism: ClassVar[str] = "global"

    tokens: int | tuple[int, ...] | str = (0,)
    own: bool = True
    extra: int = 0

    def problems(self) -> Iterator[str]:
        tokens = self.tokens
        listed = tokens if isinstance(tokens, tuple | list) else (tokens,)
        if tokens != "marked" and any(
            not isinstance(t, int) or isinstance(t, bool) for t in listed
        ):
            yield f"tokens={tokens!r} must be positions [0, 5, -1], a number or marked"
        elif isinstance(tokens, int) and tokens < 0:
            yield f"tokens={tokens!r} must be ≥ 0: it is the number of leading global tokens"
        elif isinstance(tokens, tuple | list) and len(set(tokens)) < len(tokens):
            yield f"tokens={tokens!r} names a position twice"
        yield from flag_problem("own", self.own)
        yield from integer_problem("extra", self.extra, 0)
        if tokens in ((), [], 0) and self.extra == 0:
            yield "tokens are empty and extra=0: there must be a global token"

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of global tokens as given, negative ones from the end."""
        if isinstance(self.tokens, int):
            return tuple(range(self.tokens))
        return () if isinstance(self.tokens, str) else tuple(self.tokens)


def _flops(length: int, head_dim: int, value_dim: int, config: GlobalConfig) -> float:
    # Columns and rows of the global tokens, the own keys; extra tokens sum keys and values.
    count = len(config.positions)
    pairs = (2 * count + 2 * config.extra + config.own) * (head_dim + value_dim)
    return 2.0 * length * (pairs + config.extra * head_dim)


def _memory(length: int, head_dim: int, value_dim: int, config: GlobalConfig) -> float:
    # the rows' weights, and about three outputs; keys beside values for the extra tokens
    more = head_dim + value_dim if config.extra else 0
    return 4.0 * length * (2 * len(config.positions) + 3 * config.extra + 3 * value_dim + more)


@dataclass(frozen=True, eq=False)
class LeadingState(State):
    """The first W keys and values and how many tokens have been read: constant size.

    Args:
        k: (B, Hkv, W, D), zero where `key` is False.
        v: (B, Hkv, W, V), likewise.
        key: (B, W) bool; False also where no token has been read yet.
        seen: tokens read so far.
    """

    k: Tensor
    v: Tensor
    key: Tensor
    seen: int


class Global(Mechanism):
    """Softmax attention through a few global tokens G.

        i ∉ G:  out_i = Σ_{j ∈ G ∪ {i}} exp(scale·q_i·k_j) v_j / Σ_{j ∈ G ∪ {i}} exp(scale·q_i·k_j)
        i ∈ G:  out_i = the same sums over all keys j

    Global tokens gather the sequence in one layer and hand it out in the next: two layers
    connect any two tokens. ``own=false`` leaves {i} out of the first line, so that a token
    reads global tokens and nothing else, as some texts have it; a lone global token then gives
    all others one and the same output, and a causal query before the first global token zeros.
    In causal form only j ≤ i is read. Positions are aligned to the end where L ≠ S: query i
    stands at p = i + S − L, and is a global query where p ∈ G.

    *Tokens of the sequence*: ``tokens=[0, 5, -1]`` are positions (absent ones beyond the
    sequence are left out), ``tokens=4`` are the first four. With ``tokens=marked`` every call
    takes them from a mask, as tokens of a question are in Longformer::

        with mech.marked(mask):  # (S,) or (..., S) bool, True = global
            out = mech(q, k, v)  # or a model that calls it

    *Extra tokens*, ``extra=n``, are not in the sequence. Each has a learned query u_g for every
    key/value head, gathers all keys and values, and is then read by everyone as one more key:

        a_gj = exp(scale·u_g·k_j) / Σ_j exp(scale·u_g·k_j),  k̃_g = Σ_j a_gj k_j,  ṽ_g = Σ_j a_gj v_j

    so that information passes through them within one layer. That is pack and unpack attention
    as in Luna, or the Set Transformer's induced attention, without a projection in between. It
    sums the whole sequence, hence has no causal form. u is drawn from N(0, 1) by the seed.

    Cost: 2·L·(2g + 1)·(D+V) FLOPs for g global tokens and 2·L·n·(3D + 2V) for n extra ones;
    O(L·(g+n)) memory, 64 MiB at a time. Decoding keeps the first max(G) + 1 keys, whatever the
    length: after the last global query nothing else can be read again.

    Papers: Beltagy et al. 2020, arXiv 2004.05150, §3.1 (global attention on chosen tokens);
    Ainslie et al. 2020, arXiv 2004.08483 (added global tokens); Ma et al. 2021, arXiv
    2106.01540, §3.1 (pack and unpack).

    Args:
        tokens: positions, a number of leading tokens, or ``"marked"``.
        own: whether {i} is read.
        extra: n.

    See `Mechanism` for sizes, shapes and what is raised.

    Example:
        >>> import torch, subquad as sq
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> mech = sq.build("global(tokens=[1])", head_dim=64, num_heads=8)
        >>> mech(q, k, v).shape
        torch.Size([1, 8, 1000, 64])
        >>> mech.weights(q[:, :, :4], k[:, :, :4])[0, 0].ne(0).int()
        tensor([[1, 1, 0, 0],
                [1, 1, 1, 1],
                [0, 1, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)
    """

    name = "global"
    family = "sparse"
    state_type = LeadingState
    Config = GlobalConfig
    config: GlobalConfig
    extra_query: nn.Parameter | None
    info = Info(
        summary="a few global tokens read all keys and are read by all queries",
        formula="out_i = Σ_{j ∈ N(i)} exp(scale·q_i·k_j) v_j / Σ_{j ∈ N(i)} exp(scale·q_i·k_j),  "
        "N(i) = all keys for i ∈ G, G ∪ {i} else;  an extra token g adds one key to each N(i): "
        "k̃_g = Σ_j a_gj k_j, ṽ_g = Σ_j a_gj v_j, a_g = softmax(scale·u_g·k_j), u_g learned",
        cost=Cost("O(L·(g + n)·(D+V))", _flops, _memory),
        paper="Beltagy et al. 2020, arXiv 2004.05150, §3.1; Ainslie et al. 2020, arXiv 2004.08483; "
        "extra tokens: Ma et al. 2021, arXiv 2106.01540, §3.1",
        limit="all tokens global: softmax",
        options={
            "tokens": "positions of global tokens, the number of leading ones, or marked",
            "own": "whether a query also reads its own position",
            "extra": "n, learned global tokens beside those of the sequence",
        },
        deviations="global tokens share the projections of the others (Longformer has a second "
        "set); no window is included: merge with local for that",
        sample="global(tokens=[0, 23])",
        use="beside another mechanism, for tokens that everything should read: [CLS], a question, "
        "separators.",
    )

    @classmethod
    def capabilities_for(cls, config: GlobalConfig) -> Capabilities:
        whole = Absent("an extra token sums the whole sequence, later tokens included")
        sums = Absent("an extra token is one softmax over all keys")
        marked, positions = config.tokens == "marked", config.positions
        if config.extra:
            state: Any = whole
        elif marked:
            state = Absent("marks belong to one call and its keys; positions need none")
        elif any(position < 0 for position in positions):
            state = Absent("a position counted from the end is known at the end")
        else:
            state = "constant"
        return Capabilities(
            causal=whole if config.extra else True,
            prefix=whole if config.extra else True,
            segments=Absent("an extra token sums one sequence; call once for each segment")
            if config.extra
            else True,
            window=sums if config.extra else True,
            state=state,
            read=Absent("global queries read all keys, the state holds the leading ones"),
            partial=sums if config.extra else True,
            approximates="softmax",
            compile=Absent("how many tokens are marked is known from the mask alone")
            if marked
            else True,
            functional=Absent("extra tokens have learned queries: build the module with sq.build")
            if config.extra
            else True,
            pad_invariant=Absent("a position counted from the end counts padding")
            if any(position < 0 for position in positions)
            else True,
            compact=Absent("positions of global tokens count masked tokens") if positions else True,
            reach="global tokens reach every later token, others later global tokens alone",
        )

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes_and_options: Any,
    ) -> None:
        super().__init__(device=device, dtype=dtype, **sizes_and_options)
        self._marks: Tensor | None = None
        self.register_parameter("extra_query", None)
        if self.config.extra:
            shape = (self.num_kv_heads, self.config.extra, self.head_dim)
            self.extra_query = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the extra tokens' queries from N(0, 1)."""
        if self.extra_query is None or self.extra_query.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.extra_query.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            self.extra_query.copy_(drawn)

    @contextmanager
    def marked(self, mask: Tensor) -> Iterator[None]:
        """Within this context the tokens that `mask` marks are the global ones.

        Args:
            mask: (S,) or (..., S) bool with the leading dimensions of k, True = global.

        Raises:
            OptionError: unless the mechanism was built with ``tokens=marked``.
            DtypeError: if the mask is not bool.

        Example:
            >>> import torch, subquad as sq
            >>> q = k = v = torch.eye(3)[None, None]
            >>> mech = sq.build("global(tokens=marked, own=false)", head_dim=3, num_heads=1)
            >>> with mech.marked(torch.tensor([False, True, False])):
            ...     out = mech(q, k, v)
            >>> out[0, 0, 0]  # a token that is not marked reads the one that is
            tensor([0., 1., 0.])
        """
        if self.config.tokens != "marked":
            raise OptionError(
                f"{self.name}: marked() needs tokens=marked, given tokens={self.config.tokens}"
            )
        if mask.dtype != torch.bool:
            raise DtypeError(f"marked() takes bool with True = global, given {mask.dtype}")
        before, self._marks = self._marks, mask
        try:
            yield
        finally:
            self._marks = before

    def reached(self, t: int, length: int) -> Iterable[int]:
        found = {p if p >= 0 else length + p for p in self.config.positions}
        return range(t + 1, length) if t in found else [p for p in found if t < p < length]

    # ---- which tokens are global ---------------------------------------------------------

    def _tokens(self, batch: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions (B or 1, g) of global tokens, and whether each is one, once."""
        if self.config.tokens == "marked":
            return self._marked(batch, keys, device)
        index = torch.tensor(self.config.positions, dtype=torch.long, device=device)
        index = torch.where(index < 0, index + keys, index)
        ordered, order = index.sort(stable=True)  # −1 and S − 1 may be one token
        again = torch.zeros_like(ordered, dtype=torch.bool)
        again[1:] = ordered[1:] == ordered[:-1]
        twice = torch.zeros_like(again).scatter(0, order, again)
        return index[None], ((index >= 0) & (index < keys) & ~twice)[None]

    def _marked(self, batch: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._marks is None:
            raise OptionError(
                f"{self.name}: tokens=marked needs the global tokens of the call: "
                "with mech.marked(mask): mech(q, k, v)"
            )
        marks = self._marks.to(device).reshape(-1, self._marks.shape[-1])
        if marks.shape[1] != keys or marks.shape[0] not in (1, batch):
            raise ShapeError(
                f"marked tokens must be (S={keys},) or (..., S={keys}) with k's leading "
                f"dimensions, given {tuple(self._marks.shape)}"
            )
        most = max(1, int(marks.sum(1).max()))
        # Marked ones first, in their order; rows with fewer are filled up.
        index = (~marks).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        return index, marks.gather(1, index)

    # ---- attention -----------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        return self._partial(q, k, v, mask, scale).output().to(q.dtype)

    def _partial(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Partial:
        k, v = clear(k, v, mask)
        keys, offset = k.shape[2], k.shape[2] - q.shape[2]
        index, real = self._tokens(len(q), keys, q.device)
        extra = self._extra(k, v, mask, scale)
        if not index.shape[1]:
            return _others(q, k, v, mask, scale, self.config.own, index, real, None, extra)
        place = (index - offset).clamp(0, q.shape[2] - 1)  # of the global queries
        asks = real & (place == index - offset)
        rows = _rows(q, k, v, mask, scale, place, asks, extra)
        ones = torch.zeros(len(index), q.shape[2], dtype=torch.long, device=q.device)
        taken = ones.scatter_add(1, place, asks.long()) > 0
        rest = _others(q, k, v, mask, scale, self.config.own, index, real, taken, extra)
        # Rows of global queries hold zeros: what belongs there is added.
        to = place[:, None].expand(len(q), q.shape[1], -1)
        asks = asks[:, None]
        num, den, log_scale = (
            rest.num.scatter_add(
                2,
                to[..., None].expand(-1, -1, -1, v.shape[-1]),
                rows.num.masked_fill(~asks[..., None], 0.0),
            ),
            rest.den.scatter_add(2, to, rows.den.masked_fill(~asks, 0.0)),
            rest.log_scale.masked_fill(taken[:, None], 0.0).scatter_add(
                2, to, rows.log_scale.masked_fill(~asks, 0.0)
            ),
        )
        return Partial(num, den, log_scale)

    def _extra(
        self, k: Tensor, v: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """k̃ (B, Hkv, n, D), ṽ (B, Hkv, n, V) and whether there is a key (B or 1, n)."""
        if self.extra_query is None:
            return None
        dtype = sums_dtype(k.dtype)
        u = self.extra_query.to(dtype).expand(len(k), -1, -1, -1)
        key = mask.key
        if key is None:
            key = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        opened = key[:, None].expand(-1, u.shape[2], -1)

        def allowed(first: int, last: int) -> Tensor:
            return opened[:, :, first:last]

        both = _gather(u, k, torch.cat([k, v], -1), scale, allowed).output()
        present = torch.ones(1, u.shape[2], dtype=torch.bool, device=k.device)
        if mask.key is not None:
            present = mask.key.any(-1, keepdim=True) & present
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], present

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LeadingState | None,
        key_mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, State]:
        old = None
        if state is not None:
            held = min(state.seen, state.k.shape[2])
            old = KeyValueState(state.k[:, :, :held], state.v[:, :, :held], state.key[:, :held])
        both = KeyValueState.extend(old, k, v, key_mask)
        # Where keys are missing in between, all global positions lie before them: that the
        # later ones move up changes nothing.
        out = self._attend(q, both.k, both.v, Mask(causal=True, key=both.key), scale)
        size = max(self.config.positions) + 1
        key = both.key
        if key is None:
            key = k.new_ones(len(k), both.k.shape[2], dtype=torch.bool)
        pad = max(0, size - both.k.shape[2])
        new = LeadingState(
            F.pad(both.k[:, :, :size], (0, 0, 0, pad)).clone(),  # a view would keep all keys
            F.pad(both.v[:, :, :size], (0, 0, 0, pad)).clone(),
            F.pad(key[:, :size], (0, pad)).clone(),
            k.shape[2] + (0 if state is None else state.seen),
        )
        return out, new


Extra = tuple[Tensor, Tensor, Tensor] | None


def _pick(t: Tensor, index: Tensor) -> Tensor:
    """t (B, n, ...) at index (B or 1, m): (B, m, ...)."""
    if len(index) == 1:
        return t[:, index[0]]
    return t[torch.arange(len(t), device=t.device)[:, None], index]


def _visible(mask: Mask, offset: int, i: Tensor, j: Tensor) -> Tensor:
    """Whether queries i (B or 1, n) may read keys j (B or 1, m): bool (B or 1, n, m)."""
    at, to = i[:, :, None] + offset, j[:, None]
    allowed = torch.ones_like(at == to)
    if mask.causal:
        allowed = to <= at
        if mask.prefix is not None:
            prefix = torch.as_tensor(mask.prefix, device=i.device)
            allowed = allowed | (to < prefix.reshape(-1, 1, 1))
    if mask.window is not None:
        left, right = mask.window_sides()
        allowed = allowed & (at - to <= left) & (to - at <= right)
    if mask.key is not None:
        allowed = allowed & _pick(mask.key, j)[:, None]
    if mask.segments is not None:
        assert isinstance(mask.segments, tuple), "masks are flattened by now"
        first, second = mask.segments
        allowed = allowed & (_pick(first, i)[:, :, None] == _pick(second, j)[:, None])
    return allowed


def _gather(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Callable[[int, int], Tensor]
) -> Partial:
    """Exact attention of a few queries over many keys: a chunk of keys at a time, merged.

    `allowed` (first, last) gives the mask (B or 1, L, last − first) of a range of keys.
    """
    dtype, keys = sums_dtype(q.dtype), k.shape[2]

    def run(first: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        opened = allowed(first, first + k.shape[2])[:, None]
        return explicit(q, k, v, opened, None, scale=scale, dtype=dtype)

    step = max(1, CHUNK_BYTES // (8 * dtype.itemsize * q.shape[0] * q.shape[1] * q.shape[2]))
    if step >= keys or torch.compiler.is_compiling():
        return as_partial(run(0, q, k, v))
    parts = []
    # `split`, not slices: the gradient of a slice is as long as all keys.
    for n, (some_k, some_v) in enumerate(zip(k.split(step, 2), v.split(step, 2), strict=True)):
        parts.append(as_partial(_again(run, n * step, q, some_k, some_v)))
    return combine(parts)


def _again(run: Callable[..., tuple[Tensor, ...]], start: int, *tensors: Tensor) -> Any:
    """`run`, computed again in the backward pass instead of keeping what is in between."""
    if not recomputes():
        return run(start, *tensors)
    return checkpoint(run, start, *tensors, use_reentrant=False, preserve_rng_state=False)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, place: Tensor, asks: Tensor,
    extra: Extra,
) -> Partial:  # fmt: skip
    """Exact attention of the global queries, over all keys and the extra tokens."""
    few = _pick(q.transpose(1, 2), place).transpose(1, 2)
    offset = k.shape[2] - q.shape[2]

    def allowed(first: int, last: int) -> Tensor:
        return _visible(mask, offset, place, torch.arange(first, last, device=q.device)[None])

    parts = [_gather(few, k, v, scale, allowed)]
    if extra is not None:
        there = extra[2][:, None].expand(-1, few.shape[2], -1)
        parts.append(_gather(few, extra[0], extra[1], scale, lambda a, b: there[:, :, a:b]))
    return combine(parts)


def _others(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, own: bool, index: Tensor,
    real: Tensor, taken: Tensor | None, extra: Extra,
) -> Partial:  # fmt: skip
    """Attention to global tokens, to extra ones and to the own key; zeros where `taken`."""
    queries, keys = q.shape[2], k.shape[2]
    offset = keys - queries
    index = index.clamp(0, keys - 1)
    few = [_pick(t.transpose(1, 2), index).transpose(1, 2) for t in (k, v)]
    if extra is not None:
        few = [torch.cat([t.to(new.dtype), new], 2) for t, new in zip(few, extra[:2], strict=True)]
    near: list[Tensor] = []  # the key at the query's own position
    if own:
        near = [t[:, :, offset:] if offset >= 0 else F.pad(t, (0, 0, -offset, 0)) for t in (k, v)]
    opened = _own_open(mask, queries, keys, q.device) if own else None

    def allowed(start: int, stop: int) -> Tensor:
        i = torch.arange(start, stop, device=q.device)[None]
        parts = [_visible(mask, offset, i, index) & real[:, None]]
        if extra is not None:
            parts.append(extra[2][:, None].expand(-1, stop - start, -1))
        if opened is not None:
            parts.append(opened[:, start:stop, None])
        batch = max(map(len, parts))
        joined = torch.cat([part.expand(batch, -1, -1) for part in parts], -1)
        return joined if taken is None else joined & ~taken[:, start:stop, None]

    def run(start: int, q: Tensor, *near: Tensor) -> tuple[Tensor, ...]:
        opened = allowed(start, start + q.shape[2])[:, None]
        return _sums(q, few[0], few[1], near, opened, scale)

    width = 2 * (few[0].shape[2] + 1) + q.shape[-1] + 2 * v.shape[-1]
    step = max(1, CHUNK_BYTES // (4 * q.shape[0] * q.shape[1] * width))
    if step >= queries or torch.compiler.is_compiling():
        return as_partial(run(0, q, *near))
    pieces = zip(*(t.split(step, 2) for t in (q, *near)), strict=True)
    parts = [_again(run, n * step, *tensors) for n, tensors in enumerate(pieces)]
    return as_partial(tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)))


def _own_open(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """(B or 1, L) whether there is an open key at the query's own position."""
    ahead = max(0, queries - keys)  # queries before the first key
    opened = (torch.arange(queries, device=device) >= ahead)[None]
    first = max(0, keys - queries)
    if mask.key is not None:
        opened = opened & F.pad(mask.key[:, first:], (ahead, 0))
    if mask.segments is not None:
        assert isinstance(mask.segments, tuple), "masks are flattened by now"
        opened = opened & (mask.segments[0] == F.pad(mask.segments[1][:, first:], (ahead, 0)))
    return opened


def _sums(
    q: Tensor, k: Tensor, v: Tensor, near: tuple[Tensor, ...], allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """num, den, log_scale over the keys k (B, Hkv, m, D) and a key for each query in `near`.

    `allowed` is (B or 1, 1, l, m), or m + 1 with `near`, whose column is the last.
    """
    dtype, many = sums_dtype(q.dtype), k.shape[2]
    grouped = scale * q.to(dtype).unflatten(1, (k.shape[1], -1))  # (B, Hkv, G, l, D)
    logits = grouped @ k.to(dtype)[:, :, None].mT
    if near:
        alone = (grouped * near[0].to(dtype)[:, :, None]).sum(-1, keepdim=True)
        logits = torch.cat([logits, alone], -1)
    logits = logits.flatten(1, 2)
    empty = ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    weights = torch.exp(logits - lse).masked_fill(empty, 0.0)
    weights = weights.unflatten(1, (k.shape[1], -1))
    num = weights[..., :many] @ v.to(dtype)[:, :, None]
    if near:
        num = num + weights[..., many:] * near[1].to(dtype)[:, :, None]
    den = torch.ones_like(lse).masked_fill(empty, 0.0).squeeze(-1)
    return num.flatten(1, 2), den, lse.masked_fill(empty, EMPTY_LOG_SCALE).squeeze(-1)
