"""Device memory of one layer and of a stack of layers, as `torch.cuda` counts it."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from mxsim.bench.moe.layer import Layer
from mxsim.bench.moe.workload import LayerShape, Routing, make_tokens, make_weights
from mxsim.moe import Recipe


@dataclass(frozen=True)
class Peak:
    """Bytes of a forward and backward pass of x = x + layer(x), layer after layer, gradients accumulating.

    resting: before the pass: weights, their FP8 copies, gradients, input.
    after_forward, peak: above resting.
    """

    recipe: str
    num_layers: int
    resting: int
    after_forward: int
    peak: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def measure_peak(recipe: Recipe, shape: LayerShape, num_layers: int, device: torch.device) -> Peak | None:
    """Of the second pass, when gradients and whatever is allocated once exist; None on the CPU, which counts none."""
    tokens = make_tokens(Routing.BALANCED, shape, device)
    layers = [Layer(recipe, shape, make_weights(shape, device, seed)) for seed in range(num_layers)]

    def forward() -> torch.Tensor:
        y = tokens.x_TH
        for layer in layers:
            y = y + layer.forward(y, tokens)
        return y

    forward().backward(tokens.dy_TH)
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device)
    y = forward()
    after_forward = torch.cuda.memory_allocated(device) - resting
    y.backward(tokens.dy_TH)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - resting
    return Peak(recipe.name, num_layers, resting, after_forward, peak)
