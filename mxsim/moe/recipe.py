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


class Conversion(Enum):
    """How FP8 rows and columns come from MXFP4 codes."""

    DIRECT = "direct"  # in integers, with the recipe's headroom; at most one rounding
    THROUGH_BF16 = "through_bf16"  # dequantized to BF16, then quantized again by a fresh amax: double quantization


class Gradients(Enum):
    """What the gradients that the GEMMs of the backward pass read went through."""

    FP8 = "fp8"  # FP8 rows and FP8 columns, both from BF16
    MXFP4 = "mxfp4"  # MXFP4 once, then FP8 rows and columns from those codes, as activations


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

    Two fields exist to show what the preset avoids: conversion THROUGH_BF16 and gradients MXFP4.

    Args:
        stored_fp4: activations kept in MXFP4; needs compute FP8.
        scale_rule: of the MXFP4 blocks; None is the format's own, FLOOR.
        headroom: of the DIRECT conversions from MXFP4 to FP8, 0 to 6; 0 is the paper's literal rule.
        rounding: of the MXFP4 elements, TIES_TO_EVEN or STOCHASTIC.
        conversion: from MXFP4 to FP8.
        gradients: MXFP4 needs compute FP8; they share scale rule, headroom, rounding and conversion with activations.

    Raises:
        TypeError: for a field of another type.
        ValueError: for a headroom outside 0 to 6, another rounding, or anything in MXFP4 with compute BF16.

    Source: arXiv 2603.02731, sections 1 and 3 of the method; which scale rule it uses is unknown: EVEN has the best
    SQNR of the four on normal data and on the transformer slices of this repository, and a smaller error of the
    gradient in training than FLOOR and RCEIL, at the same speed. The preset's other choices: "Ablation" in
    benchmarks/results/train_h200.md.

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
    conversion: Conversion = Conversion.DIRECT
    gradients: Gradients = Gradients.FP8
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
        if not isinstance(self.conversion, Conversion):
            raise TypeError(f"Recipe: conversion is {self.conversion!r}, needed a Conversion")
        if not isinstance(self.gradients, Gradients):
            raise TypeError(f"Recipe: gradients is {self.gradients!r}, needed a Gradients")
        if self.stored_fp4 and self.compute is not Compute.FP8:
            raise ValueError(f"Recipe: stored_fp4 with compute {self.compute.name}, needed FP8 or an empty stored_fp4")
        if self.gradients is Gradients.MXFP4 and self.compute is not Compute.FP8:
            raise ValueError(f"Recipe: gradients MXFP4 with compute {self.compute.name}, needed compute FP8")
        stored = ",".join(a.value for a in Activation if a in self.stored_fp4)
        rule = self.scale_rule.value if self.scale_rule else ""
        numbers = f"{self.headroom};{self.rounding.value};{self.conversion.value};{self.gradients.value}"
        object.__setattr__(self, "key", f"{self.compute.value};{stored};{rule};{numbers}")

    def keeps_fp4(self, activation: Activation) -> bool:
        """Whether the activation is kept in MXFP4."""
        return activation in self.stored_fp4

    def __str__(self) -> str:
        if self.compute is Compute.BF16:
            return f"{self.name}: GEMMs in BF16; activations kept in BF16"
        gemms = f"{self.name}: GEMMs in FP8"
        rule = (self.scale_rule or ScaleRule.FLOOR).name
        conversion = f"headroom {self.headroom}" if self.conversion is Conversion.DIRECT else "to FP8 through BF16"
        how = f"(scale rule {rule}, {conversion}, {self.rounding.name.lower().replace('_', ' ')})"
        gradients = "FP8" if self.gradients is Gradients.FP8 else "MXFP4" if self.stored_fp4 else f"MXFP4 {how}"
        if not self.stored_fp4:
            return f"{gemms}; GEMM inputs kept as FP8 columns, SwiGLU input in BF16; gradients in {gradients}"
        *names, last = (_NAMES[a] for a in Activation if a in self.stored_fp4)
        kept = f"{', '.join(names)} and {last}" if names else last
        return f"{gemms}; {kept} kept in MXFP4 {how}; gradients in {gradients}"


Recipe.BF16 = Recipe("BF16", Compute.BF16)
Recipe.FP8 = Recipe("FP8", Compute.FP8)
Recipe.MXFP4 = Recipe("MXFP4", Compute.FP8, stored_fp4=frozenset(Activation), scale_rule=ScaleRule.EVEN)
