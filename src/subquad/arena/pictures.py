"""`subquad picture`: the attention matrix that a mechanism implies, beside softmax.

A sequence with something to see (neighbours are alike, three motifs return) goes through the
mechanism untrained; drawn is √weight for every query (row) and key (column), bidirectional
and, where the mechanism has it, causal. Cells that the mechanism never reads are hatched
grey, so that a small weight and no weight can be told apart.

Where each channel has weights of its own (`channel_weights`), their mean is drawn.

A token mixer has no weights. In their place is how much each token of the output moves with
each token of the input: ‖∂out_i/∂x_j‖ (`Mixer.influence`), rows summing to one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad import registry
from subquad.arena.figures import COLOURS, figure
from subquad.attention.base import Absent, Mechanism
from subquad.attention.mixer.base import Mixer
from subquad.errors import UnsupportedError

__all__ = ["draw", "sample_sequence", "save"]

DIM = 16


def sample_sequence(length: int = 48) -> Tensor:
    """(1, 1, length, 16): neighbours are alike, and three motifs return."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(length + 8, DIM, generator=generator)
    smooth = noise.unfold(0, 9, 1).mean(-1) * 3
    motifs = torch.randn(3, DIM, generator=generator)
    for start in range(6, length - 3, 16):
        smooth[start : start + 3] = motifs
    x = torch.nn.functional.normalize(smooth[:length], dim=-1) * DIM**0.5
    return x[None, None]


@torch.no_grad()
def draw(spec: str, length: int = 48) -> Any:
    """A matplotlib figure of a mechanism's implied attention; see the module.

    Args:
        spec: name, with options if wanted: windows and blocks have to be small against
            `length` to be seen.
        length: tokens.

    Raises:
        UnsupportedError: for attention without implied weights.
        ImportError: matplotlib is not installed.
    """
    about = registry.describe(spec)
    have = about.capabilities
    by_channel = hasattr(registry.get(about.name), "channel_weights")
    if have.qkv and isinstance(have.weights, Absent) and not by_channel:
        reason, other = have.weights.reason, about.info.sample
        if other:
            reason += f"; draw {other!r}"
        raise UnsupportedError(about.name, "a picture", reason, registry.capable("weights"))
    x = sample_sequence(length)
    heads = registry.get(about.name).least_heads(about.config)
    x = x.expand(1, heads, length, DIM)
    sizes = {
        "head_dim": DIM, "num_heads": heads, "embed_dim": DIM * heads, "max_length": length,
    }  # fmt: skip
    exact, mechanism = (registry.build(one, **sizes).eval() for one in ("softmax", spec))
    if mechanism.calibrates_for(mechanism.config) and have.functional is not True:
        calibrated: Any = mechanism
        calibrated.calibrate(x, x)

    def mean_weights(one: Any) -> Callable[[bool], Tensor]:
        return lambda causal: one.channel_weights(x, x, causal=causal)[0, 0].mean(-1)

    def weights(one: Mechanism, head: int) -> Callable[[bool], Tensor]:
        return lambda causal: one.weights(x, x, causal=causal)[0, head]

    def influence(mixer: Mixer) -> Callable[[bool], Tensor]:
        def shares(causal: bool) -> Tensor:
            moved = mixer.influence(x[0, 0], causal=causal)
            share = moved / moved.sum(-1, keepdim=True)
            # a Fourier transform rounds: what it leaves of a zero is no influence
            return share.masked_fill(share < torch.finfo(share.dtype).eps, 0)

        return shares

    columns = [("softmax", weights(exact, 0))]
    if isinstance(mechanism, Mixer):
        columns.append((f"{spec}: influence", influence(mechanism)))
    elif by_channel:
        columns.append((f"{spec}: mean over channels", mean_weights(mechanism)))
    elif about.name != "softmax":
        columns += [
            (
                str(spec) if heads == 1 else f"{about.name}, head {head + 1}",
                weights(mechanism, head),
            )
            for head in range(heads)
        ]
    rows = [False, True] if have.causal else [False]
    page, axes = figure(3.2 * len(columns), 3.3 * len(rows), len(rows), len(columns))
    for line, causal in zip(axes, rows, strict=True):
        for axis, (title, matrix_of) in zip(line, columns, strict=True):
            matrix = matrix_of(causal)
            unread = torch.where(matrix == 0, 1.0, float("nan"))
            axis.grid(False)
            axis.imshow(matrix.clamp_min(0).sqrt().numpy(), cmap="Blues", vmin=0, vmax=0.7)
            axis.imshow(unread.numpy(), cmap="Greys", vmin=0, vmax=6, interpolation="nearest")
            axis.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
            shown = textwrap.fill(title + (", causal" if causal else ""), 36)
            axis.set_title(shown, fontsize=9)
            for spine in axis.spines.values():
                spine.set(visible=True, color=COLOURS["grey"])
    return page


def save(spec: str, path: Path, length: int = 48) -> None:
    """Draws and writes a picture; the file's ending chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(spec, length).savefig(path)
