"""Other people's implementations, with the extra `peers`.

A builder takes the sizes and the greatest length, and raises ImportError where its library is
not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subquad import registry
from subquad.arena.speed import naive
from subquad.arena.speed.cases import FORWARD, TRAINING, Sizes

if TYPE_CHECKING:
    from subquad.arena.speed.contenders import Contender

__all__ = [
    "BUILDERS",
    "CUDA",
    "FLA",
    "FLA_CHUNK",
    "FLA_FUSED",
    "LINFORMER",
    "LOCAL",
    "NAMES",
    "PERFORMER",
    "WINDOW",
]

PERFORMER, LOCAL, LINFORMER = "performer-pytorch", "local-attention", "linformer (peer)"
FLA = "fla naive chunk"
FLA_CHUNK, FLA_FUSED = "fla chunk", "fla fused chunk"
NAMES = (PERFORMER, LOCAL, LINFORMER, FLA, FLA_CHUNK, FLA_FUSED)
WINDOW = 256
"""Keys on each side that local-attention and its counterpart read."""
ROWS = 256
"""Rows that linformer projects keys and values to, its default."""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _module(name: str, package: str) -> Any:
    """An imported module of another library, which may print."""
    try:
        with _silence():
            return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{name}: not installed ({error})", name=error.name) from error


def performer(sizes: Sizes, max_length: int) -> Contender:
    """performer-pytorch's FastAttention."""
    from subquad.arena.speed.contenders import Contender

    package = _module(PERFORMER, "performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    with _silence():  # it prints on construction
        plain, causal_one = (
            package.FastAttention(sizes.head_dim, sizes.features, causal=causal).to(sizes.device)
            for causal in (False, True)
        )
    causal_one.load_state_dict(plain.state_dict())
    # its CUDA kernel, where somebody has it, does not run on a CPU
    causal_one.causal_linear_fn = package.causal_linear_attention_noncuda
    omega = plain.projection_matrix

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return (causal_one if causal else plain)(q, k, v)

    def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Its own kernel: 1e-4 is added to every feature, 1e-6 to causal normalisers."""
        phi = []
        for x, axes in ((q, (-1,)), (k, (-1, -2))):
            x = x * q.shape[-1] ** -0.25
            u = x @ omega.double().T
            top = u.amax(axes, keepdim=True).detach()
            phi.append((u - top - 0.5 * x.square().sum(-1, keepdim=True)).exp() + 1e-4)
        phi_q, phi_k = (x * omega.shape[0] ** -0.5 for x in phi)
        weights = phi_q @ phi_k.transpose(-1, -2)
        if not causal:
            return naive.mix(weights, v, False)
        weights = weights.tril()
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6 * phi_q.sum(-1, keepdim=True))

    products = "its causal form keeps k vᵀ of every token"
    flops = 8.0 * sizes.heads * sizes.features * sizes.head_dim
    return Contender(
        PERFORMER,
        call,
        definition,
        "materialised φ with its ω and its epsilons, float64",
        flops=lambda n: flops * n,
        limit=4.0,
        longest={(FORWARD, True): (8192, products), (TRAINING, True): (2048, products)},
    )


def local(sizes: Sizes, max_length: int) -> Contender:
    """local-attention's LocalAttention, exact to the token."""
    from subquad.arena.speed.contenders import Contender

    package = _module(LOCAL, "local_attention")
    both = {
        causal: package.LocalAttention(
            dim=sizes.head_dim, window_size=WINDOW, causal=causal, look_backward=1,
            look_forward=0 if causal else 1, exact_windowsize=True, autopad=True,
            use_rotary_pos_emb=False,
        ).eval().to(sizes.device)
        for causal in (False, True)
    }  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return both[causal](q, k, v)

    return Contender(
        LOCAL,
        call,
        naive.windowed(WINDOW),
        "naive windowed softmax, float64",
        flops=lambda n: 4.0 * sizes.heads * n * 3 * WINDOW * sizes.head_dim,
        limit=4.0,
        check_length=3 * WINDOW,  # at other lengths its bidirectional form reads its padding
    )


class _Given(nn.Module):
    """Stands for a projection that was made before."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def linformer(sizes: Sizes, max_length: int) -> Contender:
    """linformer's LinformerSelfAttention between its linear layers, in its layout (B, L, H·D)."""
    from subquad.arena.speed.contenders import Contender

    package = _module(LINFORMER, "linformer")
    width = sizes.heads * sizes.head_dim
    torch.manual_seed(0)
    layer = package.LinformerSelfAttention(width, max_length, k=ROWS, heads=sizes.heads).eval()
    layer.to(sizes.device)
    layer.to_q, layer.to_out = nn.Identity(), nn.Identity()
    layer.to_k, layer.to_v = _Given(), _Given()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)  # gradients to q, k and v, as of all contenders

    def prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
        return q, k, v

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        layer.to_k.value, layer.to_v.value = k, v
        return layer(q).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)

    def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        rows = [p[: k.shape[2]].double().T for p in (layer.proj_k, layer.proj_v)]
        return naive.softmax(q, rows[0] @ k, rows[1] @ v, False)

    return Contender(
        LINFORMER,
        call,
        definition,
        "softmax over projected keys, float64",
        flops=lambda n: 8.0 * sizes.heads * n * ROWS * sizes.head_dim,
        causal="a new key changes every summary",
        limit=4.0,
        prepare=prepare,
    )


def _features(sizes: Sizes) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """φ of q and k with our `performer`'s ω, (B, H, L, M), of the widest dtype of the input."""
    mechanism: Any = registry.build(
        "performer", head_dim=sizes.head_dim, num_heads=sizes.heads, features=sizes.features,
        device=sizes.device,
    )  # fmt: skip

    def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        logs = naive.performer_logs(q.to(wide), k.to(wide), mechanism.projection)
        return naive.features(*logs)

    return both


def _fla(name: str, sizes: Sizes, kernel: Callable[..., Any]) -> Contender:
    """A function of flash-linear-attention fed with φ, in its layout (B, L, H, ·)."""
    from subquad.arena.speed.contenders import Contender

    phi = _features(sizes)

    def prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.to(v.dtype).transpose(1, 2).contiguous() for t in (*phi(q, k), v))
        return q, k, v

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = kernel(q, k, v, scale=1.0, normalize=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        phi_q, phi_k = phi(q, k)
        weights = (phi_q @ phi_k.transpose(-1, -2)).tril()
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-10)

    flops = 4.0 * sizes.heads * sizes.features * sizes.head_dim  # φ is given
    return Contender(
        name,
        call,
        definition,
        "materialised φ, its epsilon, float64",
        flops=lambda n: flops * n,
        bidirectional="it is causal",
        limit=4.0,
        check_length=576,
        multiple=64,  # whole chunks
        prepare=prepare,
    )


def fla_naive(sizes: Sizes, max_length: int) -> Contender:
    """flash-linear-attention's chunks in torch operations.

    Its package cannot be imported without Triton; this file of it needs torch alone.
    """
    package = importlib.util.find_spec("fla")
    places = [Path(place) for place in (package and package.submodule_search_locations) or ()]
    for file in (place / "ops" / "linear_attn" / "naive.py" for place in places):
        if file.exists():
            spec = importlib.util.spec_from_file_location("subquad_fla_naive", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return _fla(FLA, sizes, module.naive_chunk_linear_attn)
    raise ImportError(f"{FLA}: not installed (no fla/ops/linear_attn/naive.py)", name="fla")


def fla_chunk(sizes: Sizes, max_length: int) -> Contender:
    """flash-linear-attention's chunk kernel on a GPU."""
    package = _module(FLA_CHUNK, "fla.ops.linear_attn")
    return _fla(FLA_CHUNK, sizes, package.chunk_linear_attn)


def fla_fused(sizes: Sizes, max_length: int) -> Contender:
    """flash-linear-attention's fused chunk kernel on a GPU."""
    package = _module(FLA_FUSED, "fla.ops.linear_attn")
    return _fla(FLA_FUSED, sizes, package.fused_chunk_linear_attn)


BUILDERS = (performer, local, linformer, fla_naive)
CUDA = (fla_chunk, fla_fused)
