"""FP8 copies of weight matrices: both operands that a layer multiplies by, and when they are made."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxsim import kernels
from mxsim.kernels import Fp8Tiles


class Fp8Weight(NamedTuple):
    """128 x 128 tiles of w [E, N, K] and of its transpose: for y = x w^T (contracts K) and dx = dy w (contracts N)."""

    codes: Tensor
    scales: Tensor
    codes_t: Tensor
    scales_t: Tensor

    def tiles(self) -> Fp8Tiles:
        """w, [E, N, K]."""
        return Fp8Tiles(self.codes, self.scales)

    def tiles_t(self) -> Fp8Tiles:
        """Its transpose, [E, K, N]."""
        return Fp8Tiles(self.codes_t, self.scales_t)


def quantize_weight(w: Float[Tensor, "E N K"] | Float[Tensor, "N K"]) -> Fp8Weight:
    """`bf16_to_fp8_tile` of w and of its transpose, E = 1 for a matrix; float32 is rounded to bfloat16 first."""
    w = w.detach().to(torch.bfloat16)
    w = w.unsqueeze(0) if w.ndim == 2 else w
    return Fp8Weight(*kernels.bf16_to_fp8_tile(w), *kernels.bf16_to_fp8_tile(w, transpose=True))


class Fp8WeightCache:
    """FP8 copies of a module's weights between `prepare` and the next change of the weight.

    Without `prepare` every forward pass makes its own copies. A weight's version counter tells when an optimizer has
    changed it; the copies are then dropped. FSDP2 changes weights behind that counter: there, prepare after each step
    or not at all. Under torch.compile the copies are always made anew.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Tensor, int, Fp8Weight]] = {}

    def prepare(self, name: str, weight: nn.Parameter) -> None:
        """Make the copies of a weight, to be used until it changes."""
        self._made[name] = (weight, weight._version, quantize_weight(weight))

    def clear(self) -> None:
        """Drop all copies."""
        self._made.clear()

    def get(self, name: str, weight: nn.Parameter) -> Fp8Weight:
        """The prepared copies where they are the weight's, new ones otherwise."""
        if torch.compiler.is_compiling():
            return quantize_weight(weight)
        made = self._made.get(name)
        if made is not None:
            source, version, copies = made
            if source is weight and version == weight._version and copies.codes.device == weight.device:
                return copies
            del self._made[name]
        return quantize_weight(weight)
