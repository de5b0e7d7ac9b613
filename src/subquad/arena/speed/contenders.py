"""Who takes part: torch's attention, other libraries, mechanisms that run without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subquad import registry
from subquad.arena.speed import naive, peers
from subquad.arena.speed.cases import DECODE, FORWARD, PREFILL, Case, Sizes
from subquad.arena.speed.naive import Call
from subquad.attention.base import Absent
from subquad.errors import CalibrationError, UnsupportedError

__all__ = ["FLASH", "FLEX", "SDPA", "Contender", "Decoding", "contenders"]

SDPA = "SDPA"
FLASH, FLEX = "SDPA, flash kernel", "FlexAttention"
"""Rivals on a GPU."""


@dataclass(frozen=True)
class Decoding:
    """Generation token by token.

    Args:
        prefill: (q, k, v) → (output, state), causal.
        step: (q, k, v, state, donate) → (output, state), one token or more; with `donate` the
            state may be written over.
        nbytes: bytes that a step has to read of a state.
    """

    prefill: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    step: Callable[[Tensor, Tensor, Tensor, Any, bool], tuple[Tensor, Any]]
    nbytes: Callable[[Any], int]


def _as_given(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


@dataclass(frozen=True)
class Contender:
    """One implementation that is timed.

    Args:
        name: for people; a registered name is that mechanism's.
        call: (q, k, v, causal) → output.
        naive: the same in float64 by a materialised matrix.
        against: what `naive` is, for people.
        flops: of one forward call over a length, all heads; None if nobody counted.
        causal: why there is no causal form, or None.
        bidirectional: why there is no bidirectional form, or None.
        limit: seconds; a call that would take longer is left out.
        longest: greatest length under a (mode, causal) where memory sets one, with why.
        check_length: tokens of the correctness check.
        memory_limit: seconds a training step may take to have its memory measured.
        multiple: what a length has to be a multiple of.
        prepare: what `call` takes in the place of q, k, v; its time does not count.
        decoding: prefill and step, or why there are none.
    """

    name: str
    call: Call
    naive: Call
    against: str
    flops: Callable[[int], float] | None = None
    causal: str | None = None
    bidirectional: str | None = None
    limit: float = 2.0
    longest: dict[tuple[str, bool], tuple[int, str]] = field(default_factory=dict)
    check_length: int = 601
    memory_limit: float = 15.0
    multiple: int = 1
    prepare: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _as_given
    decoding: Decoding | str = "it has no state"

    @property
    def quadratic(self) -> bool:
        """Whether the cost more than doubles (nearly quadruples) with the length."""
        return self.flops is not None and self.flops(2048) > 3 * self.flops(1024)

    def lacks(self, case: Case) -> str | None:
        """Why a case cannot be run, or None."""
        if case.mode in (PREFILL, DECODE):
            return self.decoding if isinstance(self.decoding, str) else None
        return self.causal if case.causal else self.bidirectional


def contenders(
    sizes: Sizes,
    names: Iterable[str] | None = None,
    *,
    peer: bool = True,
    max_length: int = 2**16,
) -> tuple[list[Contender], list[str]]:
    """Rivals and every registered mechanism that runs without data; and who is left out, why.

    Args:
        sizes: the head layout.
        names: registered names or specs; by default all names, and what the floors name.
        peer: whether other libraries take part, where they are installed.
        max_length: for mechanisms that need to know it.
    """
    from subquad.arena.speed.floors import FLOORS  # late: floors name contenders

    found = [_sdpa(sizes)]
    left_out: list[str] = []
    if sizes.device == "cuda":
        found += _fused(sizes)
    for build in (*peers.BUILDERS, *(peers.CUDA if sizes.device == "cuda" else ())) if peer else ():
        try:
            found.append(build(sizes, max_length))
        except ImportError as error:
            left_out.append(f"{error}; pip install 'subquad[peers]'")
    everyone = dict.fromkeys([*registry.MECHANISMS, *(floor.ours.name for floor in FLOORS)])
    for name in everyone if names is None else names:
        try:
            found.append(_registered(name, sizes, max_length))
        except (UnsupportedError, CalibrationError) as error:
            left_out.append(f"{name}: {error}")
    return found, left_out


def _softmax_flops(sizes: Sizes, length: int) -> float:
    return 4.0 * sizes.heads * length * length * sizes.head_dim


class _Cache:
    """Keys and values of past tokens in buffers that are written in place, as servers keep them.

    The buffers are kept from call to call: one state lives at a time.
    """

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
        length = k.shape[2]
        if (
            self.keys.dim() != 4
            or self.keys.shape[2] <= length
            or (self.keys.dtype, self.keys.device) != (k.dtype, k.device)
        ):
            room = (*k.shape[:2], length + 64, k.shape[3])
            self.keys, self.values = k.new_empty(room), v.new_empty(room)
        self.keys[:, :, :length], self.values[:, :, :length] = k, v
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True), length

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, donate: bool
    ) -> tuple[Tensor, int]:
        """One token, written in place in any case."""
        new = length + 1
        self.keys[:, :, length:new], self.values[:, :, length:new] = k, v
        keys, values = self.keys[:, :, :new], self.values[:, :, :new]
        return functional.scaled_dot_product_attention(q, keys, values), new

    def nbytes(self, length: int) -> int:
        row = self.keys.shape[0] * self.keys.shape[1] * self.keys.shape[3]
        return 2 * length * row * self.keys.element_size()


def _sdpa(sizes: Sizes) -> Contender:
    cache = _Cache()
    return Contender(
        SDPA,
        lambda q, k, v, causal: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        naive.softmax,
        "naive softmax, float64",
        flops=functools.partial(_softmax_flops, sizes),
        limit=4.0,
        decoding=Decoding(cache.prefill, cache.step, cache.nbytes),
    )


def _fused(sizes: Sizes) -> list[Contender]:
    """Fused kernels that torch has on a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    # One graph for each length, mask and mode: more than Dynamo allows by default, after which
    # it would run torch's slow definition; fullgraph makes that an error.
    torch._dynamo.config.recompile_limit = 256
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    @functools.cache
    def triangle(length: int) -> Any:
        return create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=sizes.device
        )

    def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=triangle(q.shape[2]) if causal else None)
        return out

    flops = functools.partial(_softmax_flops, sizes)
    return [
        Contender(name, call, naive.softmax, "naive softmax, float64", flops=flops, limit=4.0)
        for name, call in ((FLASH, flash), (FLEX, flex))
    ]


def _registered(name: str, sizes: Sizes, max_length: int) -> Contender:
    about = registry.describe(name)
    if not about.capabilities.qkv:
        raise UnsupportedError(name, "q, k and v: it mixes tokens")
    free = isinstance(getattr(about.config, "features", None), int) and name == about.name
    options = {"features": sizes.features} if free else {}
    # Evaluation: noise and dropout of training would make every call another one.
    mechanism = registry.build(
        name,
        head_dim=sizes.head_dim,
        num_heads=sizes.heads,
        value_dim=sizes.head_dim,
        embed_dim=sizes.heads * sizes.head_dim,
        max_length=max_length,
        device=sizes.device,
        **options,
    ).eval()
    have = mechanism.capabilities
    with torch.no_grad():  # what needs data first says so here
        q, k, v, _ = sizes.inputs(64)
        mechanism(q, k, v)
    build, against, check_length = naive.NAIVE.get(about.name, naive.OWN)
    cost = registry.describe(mechanism.config)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return mechanism(q, k, v, causal=causal)

    def step(q: Tensor, k: Tensor, v: Tensor, state: Any, donate: bool) -> tuple[Tensor, Any]:
        return mechanism.step(q, k, v, state, donate=donate)

    return Contender(
        name,
        call,
        build(mechanism),
        against,
        flops=lambda n: sizes.heads * cost.flops(n, sizes.head_dim, sizes.head_dim),
        causal=have.causal.reason if isinstance(have.causal, Absent) else None,
        check_length=check_length,
        decoding=have.state.reason
        if isinstance(have.state, Absent)
        else Decoding(mechanism.prefill, step, lambda state: state.nbytes),
    )


def find(case: Case, sizes: Sizes, max_length: int = 2**16) -> Contender:
    """The contender of one case.

    Raises:
        UnsupportedError: there is none of that name here, with the reason.
    """
    ours = [] if case.name in _RIVALS or case.name in peers.NAMES else [case.name]
    found, left_out = contenders(sizes, ours, peer=case.name in peers.NAMES, max_length=max_length)
    for contender in found:
        if contender.name == case.name:
            return contender
    raise UnsupportedError(case.name, FORWARD, "; ".join(left_out))


_RIVALS = (SDPA, FLASH, FLEX)
