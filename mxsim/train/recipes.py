"""Recipes by name: the three presets, and what an ablation of the MXFP4 recipe changes, one thing at a time."""

from dataclasses import replace

from mxsim.blocks import ScaleRule
from mxsim.formats import Rounding
from mxsim.moe import Activation, Conversion, Gradients, Recipe

PRESETS = {"bf16": Recipe.BF16, "fp8": Recipe.FP8, "mxfp4": Recipe.MXFP4}

_CHANGES = {
    # How MXFP4 is scaled. The preset: EVEN.
    "mxfp4-floor": {"scale_rule": ScaleRule.FLOOR},
    "mxfp4-rceil": {"scale_rule": ScaleRule.RCEIL},
    # How MXFP4 becomes FP8. The preset: directly, headroom 6.
    "mxfp4-headroom0": {"headroom": 0},
    "mxfp4-through-bf16": {"conversion": Conversion.THROUGH_BF16},
    # What is stored in MXFP4. The preset: everything.
    "mxfp4-expert-input": {"stored_fp4": frozenset({Activation.EXPERT_INPUT})},
    "mxfp4-swiglu-input": {"stored_fp4": frozenset({Activation.SWIGLU_INPUT})},
    "mxfp4-down-input": {"stored_fp4": frozenset({Activation.DOWN_INPUT})},
    "mxfp4-gemm-inputs": {"stored_fp4": frozenset({Activation.EXPERT_INPUT, Activation.DOWN_INPUT})},
    # How the stored copy is rounded. The preset: ties to even.
    "mxfp4-stochastic": {"rounding": Rounding.STOCHASTIC},
    # What gradients go through. The preset: FP8.
    "mxfp4-gradients": {"gradients": Gradients.MXFP4},
    "mxfp4-gradients-stochastic": {"gradients": Gradients.MXFP4, "rounding": Rounding.STOCHASTIC},
}

ABLATION: dict[str, Recipe] = {
    name: replace(Recipe.MXFP4, name=name, **change)  # type: ignore[arg-type]
    for name, change in _CHANGES.items()
}

RECIPES: dict[str, Recipe] = PRESETS | ABLATION
