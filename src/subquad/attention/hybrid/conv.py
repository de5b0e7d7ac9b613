"""Convolutional attention: several convolutions make features, each is attended to.

This is **not FAVOR+**. Some texts describe "the Performer" as convolution kernels whose features
attend, with compressed rows and columns, a norm penalty and a skip connection. That is another
mechanism than the Performer of Choromanski et al. (`performer`), and has no random features.
What they describe can be built, and is here, under a name that says what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad import registry
from subquad.attention.base import (
    Absent,
    Capabilities,
    Cost,
    Info,
    Mechanism,
    State,
    Support,
    continued,
    looking,
)
from subquad.attention.exact.engine import clear, sums_dtype
from subquad.attention.masks import Mask
from subquad.errors import OptionError, ShapeError
from subquad.options import (
    Config,
    Spec,
    choice_problem,
    flag_problem,
    integer_problem,
    number_problem,
)

__all__ = ["Conv", "ConvConfig", "ConvState"]

SOFTMAX = Spec("softmax")
INPUTS = ("auto", "qkv", "qk", "qv", "kv", "q", "k", "v")


@dataclass(frozen=True)
class ConvConfig(Config):
    """Options of `Conv`.

    Args:
        kernels: size of each convolution kernel, as many as wanted; sizes may repeat.
        inner: the mechanism that attends to each kernel's features: a name, a spec such as
            ``performer(features=64)``, or a config object.
        combine: "concat" (outputs side by side, then a learned projection back to V, which
            starts as their mean) or "sum".
        residual: scores of kernel i are q·k plus those of the kernels up to i; for inner
            mechanisms in softmax's units.
        conv: "depthwise" (a factor for each tap and channel), "full" (a matrix for each tap) or
            "shared" (a factor for each tap, for all channels of a head).
        sharing: which of q, k, v have one kernel in common: "none", "qk", "kv" or "qkv".
        inputs: which of q, k, v are convolved; "auto": all three, but k and v alone where the
            queries come from elsewhere (`for_use`).
        padding: "same" (taps on both sides, an even size reaches further to the left; a causal
            call leaves out those to the right) or "causal" (all taps to the left); "auto":
            causal in decoders (`for_use`), else same.
        columns: keys and values are projected to so many rows; None: not.
        rows: queries are projected to so many, and the output is expanded again; None: not.
        threshold: τ, the Frobenius norm above which a kernel matrix is penalised; None: that of
            the identity, √D, or 1 with ``conv=shared``.
        noise: standard deviation of the noise with which kernels start around the identity.
    """

    mechanism: ClassVar[str] = "conv"

    kernels: tuple[int, ...] = (1, 3, 5)
    inner: str | Spec | Config = SOFTMAX
    combine: str = "concat"
    residual: bool = False
    conv: str = "depthwise"
    sharing: str = "none"
    inputs: str = "auto"
    padding: str = "auto"
    columns: int | None = None
    rows: int | None = None
    threshold: float | None = None
    noise: float = 0.02

    def __post_init__(self) -> None:
        given: Any = self.kernels
        if isinstance(given, int):
            given = (given,)
        object.__setattr__(self, "kernels", tuple(given) if isinstance(given, list) else given)
        super().__post_init__()
        # One form for all ways to write it: specs compare, hash and print.
        object.__setattr__(self, "inner", self.resolved()[1].spec())

    def problems(self) -> Iterator[str]:
        sizes = self.kernels if isinstance(self.kernels, tuple) else ()
        if not sizes or any(list(integer_problem("", size, 1)) for size in sizes):
            yield f"kernels={self.kernels!r} must be a list of sizes ≥ 1, as in [1, 3, 5]"
        yield from choice_problem("combine", self.combine, ("concat", "sum"))
        yield from flag_problem("residual", self.residual)
        yield from choice_problem("conv", self.conv, ("depthwise", "full", "shared"))
        yield from choice_problem("sharing", self.sharing, ("none", "qk", "kv", "qkv"))
        yield from choice_problem("inputs", self.inputs, INPUTS)
        yield from choice_problem("padding", self.padding, ("auto", "same", "causal"))
        for name in ("columns", "rows"):
            value = getattr(self, name)
            if value is not None:
                yield from integer_problem(name, value, 1)
        if self.threshold is not None:
            yield from number_problem("threshold", self.threshold, 0.0)
        yield from number_problem("noise", self.noise, 0.0)
        try:
            found, own = self.resolved()
        except OptionError as error:
            yield f"inner: {error}"
            return
        reason = self._unfit(found, found.capabilities_for(own))
        if reason:
            yield f"inner={own}: {reason}"

    def _unfit(self, found: type[Mechanism], have: Capabilities) -> str:
        """Why a mechanism cannot be the inner one with these options, or nothing."""
        if not have.qkv:
            return "it mixes tokens and reads no q, k, v"
        if isinstance(have.full_length, Absent):
            return f"outputs of kernels would not line up: {have.full_length.reason}"
        if self.residual and found.name != "softmax" and have.approximates != "softmax":
            return (
                "residual=true adds scores q·k, and its weights do not estimate exp(scale·q·k), "
                "as those of softmax, local or performer do"
            )
        if self.residual and isinstance(have.value_width, Absent):
            return f"residual=true widens q and k beyond v: {have.value_width.reason}"
        if self.compresses:
            needs = {"cross": have.cross, "compact": have.compact, "key": have.key}
            for need, support in needs.items():
                if isinstance(support, Absent):
                    return f"projected rows or columns have no positions; {need}: {support.reason}"
        return ""

    def resolved(self) -> tuple[type[Mechanism], Config]:
        """Class and config of the inner mechanism."""
        return registry.resolve(self.inner)

    def for_use(self, use: str) -> ConvConfig:
        """Causal padding for decoders; queries as they are where keys come from elsewhere."""
        config = replace(self, inner=self.resolved()[1].for_use(use))
        if use == "causal" and self.padding == "auto":
            return replace(config, padding="causal")
        if use == "cross" and self.inputs == "auto":
            return replace(config, inputs="kv")
        return config

    def for_length(self, length: int) -> ConvConfig:
        """The config with the inner mechanism's sizes for this length written out."""
        return replace(self, inner=self.resolved()[1].for_length(length))

    @property
    def roles(self) -> str:
        """Which of q, k and v are convolved."""
        return "qkv" if self.inputs == "auto" else self.inputs

    @property
    def groups(self) -> tuple[str, ...]:
        """The convolved ones, those that share a kernel together: ``("qk", "v")``."""
        tied = "".join(role for role in self.roles if role in self.sharing)
        if self.sharing == "none" or len(tied) < 2:
            return tuple(self.roles)
        return (tied, *(role for role in self.roles if role not in tied))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Tokens to the left and to the right that each kernel reads."""
        if self.padding == "causal":
            return tuple((size - 1, 0) for size in self.kernels)
        return tuple((size // 2, (size - 1) // 2) for size in self.kernels)

    @property
    def left(self) -> int:
        """Tokens to the left that the widest kernel reads."""
        return max(left for left, _ in self.spans)

    @property
    def right(self) -> int:
        """Tokens to the right that the widest kernel reads."""
        return max(right for _, right in self.spans)

    @property
    def compresses(self) -> bool:
        """Whether rows or columns are projected."""
        return self.rows is not None or self.columns is not None

    def width(self, index: int, head_dim: int) -> int:
        """Width of the queries and keys that kernel `index` attends with."""
        return head_dim * (index + 2) if self.residual else head_dim


def _flops(length: int, head_dim: int, value_dim: int, config: ConvConfig) -> float:
    found, own = config.resolved()
    rows, columns = config.rows or length, config.columns or length
    sizes = {"q": head_dim, "k": head_dim, "v": value_dim}
    total = 0.0
    for index, size in enumerate(config.kernels):
        width = config.width(index, head_dim)
        each = sum(sizes[role] ** (2 if config.conv == "full" else 1) for role in config.roles)
        total += 2.0 * size * length * each
        # Pairs of rows and columns; of a linear mechanism, (rows + columns)/2 tokens, which the
        # projections outweigh.
        attended = int((rows * columns) ** 0.5)
        total += found.info.cost.flops(attended, width, value_dim, own)
        if config.columns is not None:
            total += 2.0 * length * columns * (width + value_dim)
        if config.rows is not None:
            total += 2.0 * length * rows * (width + value_dim)
        if config.combine == "concat":
            total += 2.0 * length * value_dim**2
    return total


def _memory(length: int, head_dim: int, value_dim: int, config: ConvConfig) -> float:
    # Padded inputs and one kernel's features, each in two layouts; the sum of outputs.
    found, own = config.resolved()
    width = config.width(len(config.kernels) - 1, head_dim)
    rows, columns = config.rows or length, config.columns or length
    held = 2.0 * (2 * head_dim + value_dim) + 2.0 * width + 3.0 * value_dim
    inner = found.info.cost.memory(int((rows * columns) ** 0.5), width, value_dim, own)
    return 4.0 * length * held + inner


@dataclass(frozen=True, eq=False)
class ConvState(State):
    """The last tokens that later windows read, and the inner states.

    Args:
        tails: the last tokens (B, H or Hkv, `ConvConfig.left`, ·) of each convolved one of q, k
            and v; zeros where masked, and before the first token.
        inner: one state a kernel.
    """

    tails: tuple[Tensor, ...]
    inner: tuple[State, ...]


class Conv(Mechanism):
    """Attention to the features of several convolutions; options in `ConvConfig`.

        φ_m(x)_i = Σ_t W_m,t x_{i+t},   for each of q, k, v and each kernel m = 1 … K
        out_i = Σ_m A(φ_m(q), φ_m(k), φ_m(v))_i P_m

    A is any mechanism of the registry, `inner`. With ``combine=concat`` the outputs stand side by
    side and [P_1; …; P_K] projects them back to V; with ``sum`` P_m is the identity.

    **This is not FAVOR+**, though it goes around under the name Performer (see the module). It is
    as linear as `inner` or the projections make it; with softmax and neither `rows` nor
    `columns` it costs K times exact attention.

    *Residual.* With ``residual=true`` kernel m attends with

        s_ij = scale·(q_i·k_j + Σ_{l ≤ m} φ_l(q)_i·φ_l(k)_j)

    the exact scores, those of the kernels before it and its own. A sum of dot products is
    one dot product of longer vectors, [q, φ_1(q), …]·[k, φ_1(k), …], so that no L×S matrix of
    scores is handed on, and any inner mechanism in softmax's units will do. The scale stays D^-½.
    At the start, with identities, this is (m + 1)·q·k: sharper than softmax.

    *Windows.* A masked token counts as zero in its neighbours' windows, and so do positions
    beyond the ends; in self-attention (L = S) this holds for queries, too. Causal calls read
    no tap to the right; a token before the end cannot depend on a later one. The state keeps the
    last `ConvConfig.left` tokens besides the inner states. Convolved queries need all queries of
    a sequence: L ≠ S is refused, but with ``inputs=kv``, the form for cross-attention.

    *Compression*, needs `max_length` n:

        K̃ = E K,  Ṽ = F V,  E, F ∈ R^(columns×n)
        Q̃ = R Q,  out = X A(Q̃, K̃, Ṽ),  R, Xᵀ ∈ R^(rows×n)

    after the convolutions, one E, F, R, X for all heads and kernels. They start as means over
    windows of n/columns or n/rows tokens, X as their repetition. A summary whose own window, of
    the n/columns tokens that it starts from, has no open key is left out: shorter sequences have
    fewer summaries. Every summary mixes all positions, so that there is no causal form.

    *Penalty.* `penalty` is Σ relu(‖W‖_F − τ) over the kernel matrices: one for each kernel, each
    of q, k, v that has its own, and each head. One that several share is counted once.

    Kernels start as the identity, a one at offset zero, plus noise that makes kernels of one size
    differ. Untrained, with ``combine=concat``, the mechanism is close to `inner`; with ``sum``
    the values' own kernels start at 1/K, for the same reason.

    Cost of each kernel of size w: O(w·L·(2D+V)) for features, O(w·L·(2D²+V²)) with
    ``conv=full``; the inner mechanism's; O(L·(rows + columns)·(D+V)) for projections. Memory
    O(L·(D+V)) and the inner mechanism's.

    When it may help: data whose units are local patterns of several sizes (n-grams, motifs, audio,
    patches): a head can compare patterns rather than tokens. Keys that hold the token before
    find what followed the last time, so that one layer, ``conv(kernels=[2], padding=causal)``,
    learns to continue a repeated sequence; one layer of softmax without positions does not (a
    test does this). It does not make attention cheaper by itself.

    Deviations from the text: it leaves open which kernels' scores a residual adds (here up to
    and with the own one); its projection matrices are transposes of each other, here R and X
    are learned apart, so that they can start as mean and repetition.

    Raises:
        OptionError: wrong options or sizes; all problems at once.
        ShapeError: more tokens than `max_length` with `rows` or `columns`.

    See `Mechanism` for sizes, shapes and what else is raised.

    Example:
        A training step with the penalty in its loss:

        >>> import torch, subquad as sq
        >>> spec = "conv(kernels=[1, 3, 5], inner=performer(features=32))"
        >>> attn = sq.MultiheadAttention(32, 4, batch_first=True, mechanism=spec)
        >>> x, target = torch.randn(2, 50, 32), torch.randn(2, 50, 32)
        >>> out, _ = attn(x, x, x, is_causal=True)
        >>> loss = torch.nn.functional.mse_loss(out, target) + 0.01 * sq.penalties(attn)
        >>> loss.backward()

        The limit, exactly:

        >>> q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
        >>> mech = sq.build("conv(kernels=[1], noise=0)", head_dim=8, num_heads=2)
        >>> torch.allclose(mech(q, k, v), sq.attention(q, k, v, "softmax"), atol=1e-6)
        True
    """

    name = "conv"
    family = "hybrid"
    state_type = ConvState
    Config = ConvConfig
    config: ConvConfig
    projection: nn.Parameter | None
    key_projection: nn.Parameter | None
    value_projection: nn.Parameter | None
    row_projection: nn.Parameter | None
    row_expansion: nn.Parameter | None
    info = Info(
        summary="attention to the features of several convolutions; not FAVOR+, though it goes "
        "around under the name Performer",
        formula="out = Σ_m A(φ_m(q), φ_m(k), φ_m(v)) P_m,  φ_m(x)_i = Σ_t W_m,t x_{i+t}",
        cost=Cost(
            "K × (inner + O(L·w·(D+V))), with compression K × O(L·(rows + columns)·(D+V)), "
            "for K kernels of size w",
            _flops,
            _memory,
        ),
        paper="no paper: described, under the name Performer, in texts on the Web; compare "
        "Choromanski et al. 2020, arXiv 2009.14794, which is `performer`. Projections as in Wang "
        "et al. 2020, arXiv 2006.04768; sums of scores as in He et al. 2020, arXiv 2012.11747",
        limit="its inner mechanism (softmax) with one kernel of size 1 and noise=0, until trained; "
        "so are any kernels with noise=0 and combine=concat, without a residual",
        options={
            "kernels": "size of each convolution kernel, as many as wanted",
            "inner": "the mechanism that attends to each kernel's features",
            "combine": "concat (and project back to V) or sum of the kernels' outputs",
            "residual": "scores of a kernel are q·k plus those of the kernels up to it",
            "conv": "depthwise (a factor for each tap and channel), full (a matrix for each tap) "
            "or shared (a factor for each tap)",
            "sharing": "which of q, k, v have one kernel in common: none, qk, kv or qkv",
            "inputs": "which of q, k, v are convolved; auto: all, in cross-attention k and v",
            "padding": "same (both sides; causal calls leave out the right one), causal (all taps "
            "to the left) or auto (causal in decoders)",
            "columns": "keys and values are projected to so many rows; none: not",
            "rows": "queries are projected to so many and the output expanded; none: not",
            "threshold": "Frobenius norm above which a kernel is penalised; none: the identity's",
            "noise": "standard deviation of the noise around the identity at the start",
        },
        scale="the inner mechanism's; D^-½ with residual=true",
        sample="conv(kernels=[1, 5, 9], conv=shared, combine=sum, noise=0.2)",
        deviations="a kernel's own scores count among a residual's; row compression and "
        "expansion are two matrices; masked tokens count as zeros in windows",
        use="trained from scratch, on data whose units are local patterns of several sizes; with "
        "a linear inner mechanism, or rows= and columns=, where length matters.",
    )

    def __init__(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        super().__init__(device=device, dtype=dtype, **arguments)
        config, count = self.config, len(self.config.kernels)
        per_channel = config.conv != "shared" and "v" in config.roles
        if self.value_dim is None and (per_channel or config.combine == "concat"):
            self.value_dim = self.head_dim
        tied = next((group for group in config.groups if "v" in group and len(group) > 1), "")
        if per_channel and tied and self.value_dim != self.head_dim:
            raise OptionError(
                f"conv: sharing={config.sharing} with conv={config.conv} needs value_dim = "
                f"head_dim, given {self.value_dim} and {self.head_dim}; conv=shared takes any"
            )
        self.kernels = nn.ModuleList(
            nn.ParameterDict(
                {
                    group: nn.Parameter(
                        torch.empty(self._kernel_shape(group, size), device=device, dtype=dtype)
                    )
                    for group in config.groups
                }
            )
            for size in config.kernels
        )
        self.inner = nn.ModuleList(
            registry.build(
                self.config.inner,
                head_dim=config.width(index, self.head_dim),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                value_dim=self.value_dim,
                embed_dim=self.embed_dim,
                max_length=self.max_length,
                seed=self.seed + index,
                device=device,
                dtype=dtype,
            )
            for index in range(count)
        )
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(
            ("projection", "key_projection", "value_projection", "row_projection", "row_expansion")
        )
        if config.combine == "concat":
            assert self.value_dim is not None, "set above"
            shapes["projection"] = (self.num_heads, count, self.value_dim, self.value_dim)
        longest = self.max_length or 0
        for option, size in (("columns", config.columns), ("rows", config.rows)):
            if size is not None and size > longest:
                raise OptionError(f"conv: {option}={size} must be ≤ max_length={longest}")
        if config.columns is not None:
            shapes["key_projection"] = shapes["value_projection"] = (config.columns, longest)
        if config.rows is not None:
            shapes["row_projection"] = (config.rows, longest)
            shapes["row_expansion"] = (longest, config.rows)
        for name, shape in shapes.items():
            parameter = None
            if shape is not None:
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self._reset_own()

    def _kernel_shape(self, group: str, size: int) -> tuple[int, ...]:
        heads = self.num_heads if group == "q" else self.num_kv_heads
        width = self.value_dim if group == "v" else self.head_dim
        if self.config.conv == "shared":
            return heads, size
        assert width is not None, "set before"
        return (heads, size, width, width) if self.config.conv == "full" else (heads, size, width)

    @classmethod
    def capabilities_for(cls, config: ConvConfig) -> Capabilities:
        found, own = config.resolved()
        have = found.capabilities_for(own)
        windowed = config.left + config.right > 0
        keys = windowed and config.roles != "q"
        mixes = (config.compresses, "projected rows and columns mix tokens of all positions")
        rows = (config.rows is not None, "rows are compressed over all queries of a sequence")
        queries = (
            windowed and "q" in config.roles,
            "windows of queries need those before, and cross-attention may bring them one by one: "
            "inputs=kv leaves queries as they are",
        )
        ahead = (
            keys and config.right > 0,
            "windows of a bidirectional call reach to the right, those of a state do not: "
            "padding=causal",
        )
        beyond = (keys, "features of a key hold its neighbours, which the mask may close")
        ends = (windowed, "windows reach across the ends of segments")
        gaps = (windowed, "masked tokens keep their place in the windows, as zeros")
        mixed = (
            config.combine == "concat" or (config.conv != "shared" and "v" in config.roles),
            "channels of the values are filtered apart or projected: no one matrix holds for all; "
            "conv=shared and combine=sum have one",
        )
        reach = have.reach
        if keys:
            reach = f"{reach}, and {config.left} tokens before each of them"
        return replace(
            have,
            causal=_unless(have.causal, mixes),
            prefix=_unless(have.prefix, mixes),
            segments=_unless(have.segments, mixes, ends),
            window=_unless(have.window, mixes, beyond),
            dense=_unless(have.dense, mixes, beyond),
            cross=_unless(have.cross, queries, rows),
            state=_unless(have.state, mixes),
            read=_unless(have.read, queries, ahead),
            partial=Absent("outputs of kernels add, not their sums over keys"),
            merges=Absent("outputs of kernels add, not their sums over keys"),
            weights=_unless(have.weights, mixed),
            approximates=None,
            max_length=have.max_length or config.compresses,
            functional=Absent("its kernels are learned parameters"),
            compact=_unless(have.compact, mixes, gaps),
            reach=reach,
        )

    @classmethod
    def follows_for(cls, config: ConvConfig) -> bool:
        found, own = config.resolved()
        return found.follows_for(own)

    @classmethod
    def answers_alone_for(cls, config: ConvConfig) -> Support:
        """The inner mechanism's, where queries are read as they are."""
        found, own = config.resolved()
        cross = cls.capabilities_for(config).cross
        return cross if isinstance(cross, Absent) else found.answers_alone_for(own)

    @classmethod
    def least_heads(cls, config: ConvConfig) -> int:
        """What the inner mechanism needs."""
        found, own = config.resolved()
        return found.least_heads(own)

    def reset_parameters(self) -> None:
        """Kernels become the identity plus noise by the seed; projections windows' means."""
        self._reset_own()
        for inner in self._inner():
            inner.reset_parameters()

    @torch.no_grad()
    def _reset_own(self) -> None:
        config, kernels = self.config, len(self.config.kernels)
        generator = torch.Generator().manual_seed(self.seed)
        for (left, _), kernel in zip(config.spans, self._kernels(), strict=True):
            for group, weight in kernel.items():
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                # A matrix adds up D channels' noise.
                noise *= config.noise * (weight.shape[-1] ** -0.5 if config.conv == "full" else 1)
                one = 1.0 / kernels if config.combine == "sum" and group == "v" else 1.0
                tap = noise[:, left]
                (tap.diagonal(dim1=-2, dim2=-1) if config.conv == "full" else tap).add_(one)
                if not weight.is_meta:
                    weight.copy_(noise)
        if self.projection is not None and not self.projection.is_meta:
            width = self.projection.shape[-1]
            self.projection.copy_((torch.eye(width) / kernels).expand_as(self.projection))
        for matrix in (self.key_projection, self.value_projection, self.row_projection):
            if matrix is not None and not matrix.is_meta:
                count, longest = matrix.shape
                own = F.one_hot(_home(count, longest, matrix.device), count).to(matrix.dtype)
                matrix.copy_((own / own.sum(0)).mT)
        if self.row_expansion is not None and not self.row_expansion.is_meta:
            longest, rows = self.row_expansion.shape
            home = _home(rows, longest, self.row_expansion.device)
            self.row_expansion.copy_(F.one_hot(home, rows))

    def penalty(self) -> Tensor:
        """Σ relu(‖W‖_F − τ) over kernel matrices, those that q, k, v share counted once."""
        threshold = self.config.threshold
        if threshold is None:
            threshold = 1.0 if self.config.conv == "shared" else self.head_dim**0.5
        norms = [
            weight.to(sums_dtype(weight.dtype)).flatten(1).norm(dim=1)
            for kernel in self._kernels()
            for weight in kernel.values()
        ]
        return F.relu(torch.cat(norms) - threshold).sum()

    def reached(self, t: int, length: int) -> Iterable[int]:
        """Later queries that read a feature which k_t or v_t is in."""
        inner = next(self._inner())
        left = self.config.left if self.config.roles != "q" else 0
        features = range(t, min(t + left + 1, length))
        later = {i for feature in features for i in (feature, *inner.reached(feature, length))}
        return sorted(later - {t})

    @classmethod
    def calibrates_for(cls, config: ConvConfig) -> bool:
        found, own = config.resolved()
        return found.calibrates_for(own)

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, **arguments: Any) -> None:
        """Calibrates each inner mechanism on its kernel's features of bidirectional calls.

        Takes queries (..., H, L, D), keys (..., Hkv, S, D), and what the inner mechanism's own
        `calibrate` takes.

        Raises:
            OptionError: if the inner mechanism takes no statistics from data.
        """
        if not self.calibrates_for(self.config):
            raise OptionError(f"conv: inner={self.config.inner} takes nothing from data")
        v = k.new_zeros(*k.shape[:-1], self.value_dim or 1)
        q, k, _, _, _ = self._check(q, k, v, Mask())
        found = (self._features(role, x, 0, self.config.right) for role, x in _named(q, k))
        for inner, own_q, own_k in zip(self._inner(), *found, strict=True):
            mech: Any = inner
            mech.calibrate(own_q, own_k, **arguments)

    def weights(self, *args: Any, **options: Any) -> Tensor:
        """As `Mechanism.weights`; looking does not count as a training call."""
        with looking(self):
            return super().weights(*args, **options)

    # ---- calls ---------------------------------------------------------------------------

    def _inner(self) -> Iterator[Mechanism]:
        for inner in self.inner:
            assert isinstance(inner, Mechanism)
            yield inner

    def _kernels(self) -> Iterator[nn.ParameterDict]:
        for kernel in self.kernels:
            assert isinstance(kernel, nn.ParameterDict)
            yield kernel

    def _scale(self, scale: float | None) -> Any:
        """One scale a kernel: the given one, or the inner default; a sum's is that of q·k."""
        if scale is None and self.config.residual:
            scale = self.head_dim**-0.5
        return tuple(inner._scale(scale) for inner in self._inner())

    def _features(self, role: str, x: Tensor, before: int, after: int) -> Iterator[Tensor]:
        """What each kernel's attention reads as q, k or v, (B, H, L, ·) of x's dtype.

        Args:
            role: "q", "k" or "v".
            x: (B, H, before + L, ·), what is masked zero.
            before: tokens of a state in front: none, or `ConvConfig.left` of them.
            after: zeros to read behind the end; none in a causal call, which leaves out the taps
                there.
        """
        config, heads, length = self.config, x.shape[1], x.shape[2] - before
        plain = x[:, :, before:]
        read, channels = [plain], None
        if role in config.roles:
            channels = F.pad(x.mT.flatten(1, 2), (config.left - before, after))
        for (left, right), kernel in zip(config.spans, self._kernels(), strict=True):
            feature = plain
            if channels is not None:
                weight = next(own for group, own in kernel.items() if role in group)
                right = min(right, after)
                window = channels[..., config.left - left : config.left + length + right]
                feature = _convolved(window, weight[:, : left + 1 + right], heads).to(x.dtype)
            if config.residual and role != "v":
                read.append(feature)
                feature = torch.cat(read, -1)
            yield feature

    def _cleared(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        """q, k and v with zeros where masked, so that no window or projection reads these."""
        k, v = clear(k, v, mask)
        mixed = self.config.rows is not None or (
            "q" in self.config.roles and self.config.left + self.config.right > 0
        )
        if mixed and mask.key is not None:  # L = S then, see `capabilities_for`
            q = q.masked_fill(~mask.key[:, None, :, None], 0)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: Any) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        inner_mask = mask
        if self.config.compresses:
            self._check_length(queries, keys)
            inner_mask = Mask(key=self._summarised(mask.key, len(k), keys, k.device))
        after = 0 if mask.causal else self.config.right
        tensors = _named(*self._cleared(q, k, v, mask))
        features = (self._features(role, x, 0, after) for role, x in tensors)
        outs = []
        for inner, own, *own_qkv in zip(self._inner(), scale, *features, strict=True):
            own_q, own_k, own_v = own_qkv
            if self.config.compresses:  # a masked token's feature holds its neighbours
                own_q, own_k, own_v = self._cleared(own_q, own_k, own_v, mask)
            if self.row_projection is not None:
                own_q = _projected(self.row_projection[:, :queries], own_q)
            if self.key_projection is not None and self.value_projection is not None:
                own_k = _projected(self.key_projection[:, :keys], own_k)
                own_v = _projected(self.value_projection[:, :keys], own_v)
            out = inner._attend(own_q, own_k, own_v, inner_mask, own)
            if self.row_expansion is not None:
                out = _projected(self.row_expansion[:queries], out)
            outs.append(out)
        return self._combined(outs)

    def _combined(self, outs: list[Tensor]) -> Tensor:
        """The kernels' outputs added, each through its block of the projection if there is one."""
        if self.projection is None:
            return torch.stack(outs).sum(0) if len(outs) > 1 else outs[0]
        dtype = sums_dtype(torch.promote_types(outs[0].dtype, self.projection.dtype))
        blocks = self.projection.to(dtype).unbind(1)
        parts = [out.to(dtype) @ block for out, block in zip(outs, blocks, strict=True)]
        return sum(parts[1:], parts[0]).to(outs[0].dtype)

    def _check_length(self, queries: int, keys: int) -> None:
        assert self.max_length is not None, "checked by the base class"
        used = {"q": queries if self.config.rows else 0, "k": keys if self.config.columns else 0}
        for name, length in used.items():
            if length > self.max_length:
                raise ShapeError(
                    f"conv: {name} has length {length}, longer than max_length={self.max_length}; "
                    "build it with a larger max_length"
                )

    def _summarised(
        self, key: Tensor | None, batch: int, length: int, device: torch.device
    ) -> Tensor | None:
        """(B, columns) which summaries have an open key in their own window; or the key mask."""
        if self.config.columns is None:
            return key
        assert self.max_length is not None, "checked by the base class"
        if key is None and length == self.max_length and not torch.compiler.is_compiling():
            return None
        home = _home(self.config.columns, self.max_length, device)[:length]
        opened = torch.ones(batch, length, device=device) if key is None else key.float()
        counts = opened.new_zeros(batch, self.config.columns)
        return counts.scatter_add(1, home.expand(batch, -1), opened) > 0

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ConvState | None,
        key_mask: Tensor | None,
        scale: Any,
    ) -> tuple[Tensor, State]:
        left = self.config.left
        tensors = dict(_named(*self._cleared(q, k, v, Mask(key=key_mask))))
        if state is None:
            tails = tuple(_nothing(tensors[role], left) for role in self.config.roles)
        else:
            tails = state.tails
        for role, tail in zip(self.config.roles, tails, strict=True):
            tensors[role] = continued(role, tail, tensors[role])
        features = (
            self._features(role, x, left if role in self.config.roles else 0, 0)
            for role, x in tensors.items()
        )
        before = [None] * len(self.inner) if state is None else state.inner
        calls = zip(self._inner(), before, scale, *features, strict=True)
        found = [
            inner._prefill(own_q, own_k, own_v, old, key_mask, own)
            for inner, old, own, own_q, own_k, own_v in calls
        ]
        # Copies: a slice would keep all tokens of the call in memory.
        kept = (tensors[role] for role in self.config.roles)
        new = ConvState(
            tuple(x[:, :, x.shape[2] - left :].clone() for x in kept),
            tuple(after for _, after in found),
        )
        return self._combined([out for out, _ in found]), new

    def _reading(self, q: Tensor, state: ConvState, scale: Any) -> tuple[Tensor, State]:
        features = self._features("q", q, 0, 0)  # of size 1: see `capabilities_for`
        calls = zip(self._inner(), state.inner, scale, features, strict=True)
        found = [inner._reading(own_q, old, own) for inner, old, own, own_q in calls]
        new = replace(state, inner=tuple(after for _, after in found))
        return self._combined([out for out, _ in found]), new

    def _check_state(self, state: State | None, q: Tensor) -> None:
        super()._check_state(state, q)
        if not isinstance(state, ConvState):
            return
        counts = {
            "convolved inputs": (len(state.tails), len(self.config.roles)),
            "kernels": (len(state.inner), len(self.inner)),
        }
        for what, (given, wanted) in counts.items():
            if given != wanted:
                raise ShapeError(f"state must be that of {wanted} {what}, given {given}")
        for tail in state.tails:
            if tail.shape[2] != self.config.left:
                raise ShapeError(
                    f"state must hold the last {self.config.left} tokens, given {tail.shape[2]}"
                )
        for inner, own in zip(self._inner(), state.inner, strict=True):
            inner._check_state(own, q)


def _unless(have: Any, *obstacles: tuple[bool, str]) -> Any:
    """A capability of the inner mechanism, or the first obstacle, of those there are, to it."""
    return next((Absent(reason) for there, reason in obstacles if there), have)


def _named(*tensors: Tensor) -> Iterator[tuple[str, Tensor]]:
    """q, k and v, as many as given, with their names."""
    return zip("qkv", tensors, strict=False)


def _nothing(x: Tensor, tokens: int) -> Tensor:
    """Zeros in place of so many tokens before x (B, H, S, ·)."""
    return x.new_zeros(*x.shape[:2], tokens, x.shape[3])


def _home(count: int, length: int, device: torch.device) -> Tensor:
    """For each of `length` positions the window that it is in, of `count` nearly equal ones."""
    return torch.arange(length, device=device) * count // length


def _projected(weight: Tensor, x: Tensor) -> Tensor:
    """weight (m, n) · x (B, H, n, ·), in x's dtype."""
    dtype = sums_dtype(torch.promote_types(x.dtype, weight.dtype))
    return torch.einsum("mn,bhnd->bhmd", weight.to(dtype), x.to(dtype)).to(x.dtype)


def _convolved(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Σ_t W_t x_{i+t} of x (B, heads·W, n + T − 1) as (B, heads, n, W), in the sums' dtype.

    Args:
        x: channels of one head after the other.
        weight: T taps for each head, or for each group of heads: (·, T), (·, T, W) a factor for
            each channel, or (·, T, W, W) a matrix.
        heads: how many heads x has.
    """
    dtype = sums_dtype(torch.promote_types(x.dtype, weight.dtype))
    weight = weight.to(dtype).repeat_interleave(heads // len(weight), 0)
    width, groups = x.shape[1] // heads, x.shape[1]
    if weight.dim() == 2:
        weight = weight[:, None, None].expand(-1, width, -1, -1)
    elif weight.dim() == 3:
        weight = weight.mT[:, :, None]
    else:
        weight, groups = weight.permute(0, 2, 3, 1), heads
    out = F.conv1d(x.to(dtype), weight.flatten(0, 1), groups=groups)
    return out.unflatten(1, (heads, width)).mT.contiguous()
