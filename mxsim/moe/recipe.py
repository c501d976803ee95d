"""What a training recipe computes in and what it keeps for the backward pass."""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from mxsim.blocks import ScaleRule
from mxsim.formats import Rounding


class Compute(Enum):
    """What the GEMMs multiply."""

    BF16 = "bf16"
    FP8 = "fp8"  # E4M3; 1x128 activations and gradients, 128x128 weights, power-of-two scales; FP32 promotion


class Activation(Enum):
    """An activation that an expert (or a linear layer: LINEAR_INPUT) keeps for its backward pass."""

    LINEAR_INPUT = "linear_input"
    EXPERT_INPUT = "expert_input"  # of the first GEMM: also what a dispatch sends
    SWIGLU_INPUT = "swiglu_input"  # gate and up projection
    DOWN_INPUT = "down_input"  # of the second GEMM


_NAMES = {
    Activation.LINEAR_INPUT: "linear input",
    Activation.EXPERT_INPUT: "expert input",
    Activation.SWIGLU_INPUT: "SwiGLU input",
    Activation.DOWN_INPUT: "second GEMM's input",
}


@dataclass(frozen=True)
class Recipe:
    """Three presets, `Recipe.BF16`, `Recipe.FP8` and `Recipe.MXFP4`, and everything between by `dataclasses.replace`.

    BF16: every GEMM in BF16; every activation is kept in BF16.

    FP8: GEMM inputs are quantized to FP8 twice, by rows for the forward GEMM and by columns for Wgrad; the columns are
    kept. The SwiGLU input is kept in BF16. Gradients are quantized to FP8 by rows (Dgrad) and by columns (Wgrad).

    An activation of `stored_fp4` is quantized once, to MXFP4, and only its codes and scales are kept. The forward GEMM
    reads FP8 rows converted from those codes, Wgrad reads FP8 columns converted from the same codes (lossless within
    a scale spread of 2**(8 + headroom)). SwiGLU's forward uses BF16, its backward the dequantized copy. Gradients stay
    FP8.

    Args:
        stored_fp4: activations kept in MXFP4; needs compute FP8.
        scale_rule: of the MXFP4 blocks; None is the format's own, FLOOR.
        headroom: of the conversions from MXFP4 to FP8, 0 to 6; 0 is the paper's literal rule.
        rounding: of the MXFP4 elements, TIES_TO_EVEN or STOCHASTIC.

    Raises:
        TypeError: for a field of another type.
        ValueError: for a headroom outside 0 to 6, another rounding, or stored_fp4 with compute BF16.

    Source: arXiv 2603.02731, sections 1 and 3 of the method; which scale rule it uses is unknown: EVEN has the best
    SQNR of the four on normal data and on the transformer slices of this repository, at the same speed.

    >>> print(Recipe.MXFP4)
    MXFP4: GEMMs in FP8; linear input, expert input, SwiGLU input and second GEMM's input kept in MXFP4 (scale rule \
EVEN, headroom 6, ties to even); gradients in FP8
    """

    name: str
    compute: Compute
    stored_fp4: frozenset[Activation] = frozenset()
    scale_rule: ScaleRule | None = None
    headroom: int = 6
    rounding: Rounding = Rounding.TIES_TO_EVEN
    key: str = field(init=False, repr=False, compare=False)  # all but the name, for an operator's argument

    BF16: ClassVar["Recipe"]
    FP8: ClassVar["Recipe"]
    MXFP4: ClassVar["Recipe"]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Recipe: name is {self.name!r}, needed a string")
        if not isinstance(self.compute, Compute):
            raise TypeError(f"Recipe: compute is {self.compute!r}, needed a Compute")
        if not isinstance(self.stored_fp4, frozenset) or not all(isinstance(a, Activation) for a in self.stored_fp4):
            raise TypeError(f"Recipe: stored_fp4 is {self.stored_fp4!r}, needed a frozenset of Activation")
        if not (self.scale_rule is None or isinstance(self.scale_rule, ScaleRule)):
            raise TypeError(f"Recipe: scale_rule is {self.scale_rule!r}, needed a ScaleRule or None")
        if type(self.headroom) is not int or not 0 <= self.headroom <= 6:
            raise ValueError(f"Recipe: headroom is {self.headroom!r}, needed an integer from 0 to 6")
        if self.rounding not in (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC):
            raise ValueError(f"Recipe: rounding is {self.rounding!r}, needed TIES_TO_EVEN or STOCHASTIC")
        if self.stored_fp4 and self.compute is not Compute.FP8:
            raise ValueError(f"Recipe: stored_fp4 with compute {self.compute.name}, needed FP8 or an empty stored_fp4")
        stored = ",".join(a.value for a in Activation if a in self.stored_fp4)
        rule = self.scale_rule.value if self.scale_rule else ""
        key = f"{self.compute.value};{stored};{rule};{self.headroom};{self.rounding.value}"
        object.__setattr__(self, "key", key)

    def keeps_fp4(self, activation: Activation) -> bool:
        """Whether the activation is kept in MXFP4."""
        return activation in self.stored_fp4

    def __str__(self) -> str:
        if self.compute is Compute.BF16:
            return f"{self.name}: GEMMs in BF16; activations kept in BF16"
        gemms = f"{self.name}: GEMMs in FP8"
        if not self.stored_fp4:
            return f"{gemms}; GEMM inputs kept as FP8 columns, SwiGLU input in BF16; gradients in FP8"
        *names, last = (_NAMES[a] for a in Activation if a in self.stored_fp4)
        kept = f"{', '.join(names)} and {last}" if names else last
        rule = (self.scale_rule or ScaleRule.FLOOR).name
        rounding = self.rounding.name.lower().replace("_", " ")
        return (
            f"{gemms}; {kept} kept in MXFP4 (scale rule {rule}, headroom {self.headroom}, {rounding}); gradients in FP8"
        )


Recipe.BF16 = Recipe("BF16", Compute.BF16)
Recipe.FP8 = Recipe("FP8", Compute.FP8)
Recipe.MXFP4 = Recipe("MXFP4", Compute.FP8, stored_fp4=frozenset(Activation), scale_rule=ScaleRule.EVEN)
