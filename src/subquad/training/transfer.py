"""Attention transfer: each layer's mechanism learns its own exact attention's output.

    loss = mean over layers of Σ ‖o − o*‖² / Σ ‖o*‖²

o* is the layer's exact attention on the q, k, v of the exact forward pass, o the mechanism's
output on the same: layers do not disturb each other, and the model's weights are not touched.
Zhang et al. 2024 (Hedgehog), arXiv 2402.04347, section 4.3, match the weights; Zhang et al. 2024
(LoLCATs), arXiv 2410.10254, eq. 6, match the output as here: O(L) memory, no L×S matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from subquad.convert import routing
from subquad.convert.inputs import encoder_decoder, position_mask
from subquad.convert.paths import probed
from subquad.convert.swap import converted_layers
from subquad.errors import OptionError
from subquad.training.distill import call, relative_error

__all__ = ["Transfer", "mechanism_parameters"]


def mechanism_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Learned parameters of the mechanisms of converted layers, by their names in the model."""
    found = {}
    for name, layer in converted_layers(model):
        slot = layer._modules[routing.SLOT]
        assert slot is not None
        for inner, parameter in slot.named_parameters():
            found[f"{name}.{routing.SLOT}.{inner}"] = parameter
    return found


class Transfer:
    """The objective of attention transfer.

    One exact forward pass without a graph shows q, k, v and o* of all layers; the graph of one
    layer's mechanism is built, used and dropped before the next layer is reached.

    Args:
        model: converted; its mechanisms' parameters get the gradients.

    Raises:
        OptionError: no mechanism of the model has learned parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.pair = model, encoder_decoder(model)
        self.layers = {
            id(layer): name
            for name, layer in converted_layers(model)
            if any(True for _ in layer._modules[routing.SLOT].parameters())  # type: ignore[union-attr]  # converted
        }
        if not self.layers:
            raise OptionError(
                "method='transfer' trains the mechanisms' own parameters, and none of this model's "
                "has any: convert with learned feature maps (hedgehog), or use method='lora' or "
                "'full'"
            )

    def step(self, inputs: dict[str, Tensor], share: float = 1.0) -> Tensor:
        """Adds `share` times the loss's gradients to the parameters; returns the loss."""
        losses: list[Tensor] = []

        def watch(
            layer: nn.Module, run: Callable[[], Tensor], exact: Tensor, *unused: object
        ) -> None:
            if id(layer) not in self.layers:
                return
            decoder = self.pair and "decoder" in self.layers[id(layer)].split(".")
            keep = position_mask(inputs, exact.shape[0], exact.shape[2], decoder=decoder)
            with torch.enable_grad():
                out, goal = (t.transpose(1, 2).float() for t in (run(), exact))
                loss = relative_error(out, goal, keep)
                (share / len(self.layers) * loss).backward()
            losses.append(loss.detach())

        with torch.no_grad(), probed(self.model, watch):
            call(self.model, inputs)
        return torch.stack(losses).mean()
