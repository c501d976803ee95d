"""What MXFP4 does to the activations of a model in training: error, saturation, spread of scales, by layer and kind.

Computed where the model is. R rows of K elements; an FP8 block of 128 holds four MXFP4 blocks of 32.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64, Int, UInt8
from torch import Tensor

from mxsim import kernels
from mxsim.formats import E2M1, E8M0, Rounding
from mxsim.kernels import Fp4Rows
from mxsim.kernels.layouts import FP4_BLOCK, FP8_BLOCK
from mxsim.moe import Activation, Groups, Recipe, observe_activations
from mxsim.moe.expert_gemms import dequantize
from mxsim.moe.ragged import ROW_MULTIPLE, cols_of_expert, rows_of_expert
from mxsim.moe.stored import columns_from_fp4, rows_from_fp4, to_fp4
from mxsim.train.model import LanguageModel

_NO_EXPONENT = 1000  # beyond any difference of scale codes


@dataclass(frozen=True)
class Diagnosis:
    """One activation of one layer in MXFP4.

    Args:
        is_stored: whether the recipe keeps it so. If not, the figures say what MXFP4 would do to it.
        sqnr_db: 10 log10(sum x**2 / sum (q - x)**2).
        saturated: share of elements beyond the largest value of their block.
        zeroed: share of elements that became zero and were not.
        mean_spread, max_spread: of the scale exponents of the four blocks that become one FP8 block; blocks of zeros
            and NaN are left out.
        inexact_rows, inexact_columns: share of FP8 blocks, along rows and along columns, that hold other values than
            the MXFP4 codes they came from. NaN where no GEMM reads them: SwiGLU's input.
    """

    layer: int
    activation: str
    is_stored: bool
    sqnr_db: float
    saturated: float
    zeroed: float
    mean_spread: float
    max_spread: float
    inexact_rows: float
    inexact_columns: float


@torch.no_grad()
def diagnose(model: LanguageModel, tokens_BS: Int[Tensor, "B S"]) -> list[Diagnosis]:
    """A forward pass over some tokens, layer by layer, in the model's recipe and not compiled.

    An activation is measured by its layer's recipe where that keeps it in MXFP4, else by `Recipe.MXFP4`. EXPERT_INPUT:
    the tokens in their order, so that 128 rows are neighbours and not those of one expert. SWIGLU_INPUT and DOWN_INPUT:
    the rows of the routed experts, by expert. LINEAR_INPUT: that of the attention's first projection, where it computes
    in FP8. Rows that are no multiple of 128 long are left out. Stochastic rounding takes a fixed seed, and training
    goes on with the random numbers that it would have had.
    """
    found: list[tuple[int, Activation, Recipe, Tensor]] = []
    random_state = torch.get_rng_state()
    with torch.compiler.set_stance("force_eager"):
        x_BSH = model.embed(tokens_BS)
        for layer, block in enumerate(model.blocks):
            seen: dict[Activation, Tensor] = {}
            with observe_activations(seen.setdefault):
                x_BSH = block(x_BSH)
            for activation, x_RK in seen.items():
                module = block.attention.qkv if activation is Activation.LINEAR_INPUT else block.mlp
                if x_RK.shape[1] % FP8_BLOCK == 0:
                    found.append((layer, activation, module.recipe, x_RK))
    torch.set_rng_state(random_state)
    if not found:
        return []
    figures = [
        _figures(x_RK, activation, recipe if recipe.keeps_fp4(activation) else Recipe.MXFP4)
        for _, activation, recipe, x_RK in found
    ]
    return [
        Diagnosis(layer, activation.value, recipe.keeps_fp4(activation), _decibels(signal, noise), *others)
        for (layer, activation, recipe, _), (signal, noise, *others) in zip(
            found, torch.stack(figures).tolist(), strict=True
        )
    ]


def _decibels(signal: float, noise: float) -> float:
    if not (signal > 0 and noise >= 0):
        return math.nan
    return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf


def _figures(x_RK: Float[Tensor, "R K"], activation: Activation, recipe: Recipe) -> Float64[Tensor, " 8"]:
    """Signal, noise, then what `Diagnosis` has after sqnr_db."""
    fp4 = to_fp4(x_RK, recipe, 0 if recipe.rounding is Rounding.STOCHASTIC else None)
    q_RK, x_RK = kernels.fp4_to_bf16(*fp4).float(), x_RK.float()
    magnitudes_RK = torch.stack([fp4.codes, fp4.codes >> 4], dim=2).flatten(1) & E2M1.magnitude_mask
    # Cut off is what has the largest code and is larger than what that stands for.
    is_saturated = (magnitudes_RK == E2M1.max_code) & (x_RK.abs() > q_RK.abs())
    is_zeroed = (q_RK == 0) & (x_RK != 0)
    spread = _exponent_spread(fp4.scales, magnitudes_RK)
    has_blocks = spread >= 0
    nan = torch.tensor(math.nan, dtype=torch.float64, device=x_RK.device)
    inexact = (nan, nan) if activation is Activation.SWIGLU_INPUT else _inexact(fp4, q_RK, recipe)
    return torch.stack(
        [
            x_RK.square().sum(dtype=torch.float64),
            (q_RK - x_RK).square().sum(dtype=torch.float64),
            is_saturated.double().mean(),
            is_zeroed.double().mean(),
            (spread * has_blocks).sum() / has_blocks.sum().double(),
            spread.max().double(),
            *inexact,
        ]
    )


def _exponent_spread(scales: UInt8[Tensor, "R K/32"], magnitudes_RK: UInt8[Tensor, "R K"]) -> Int[Tensor, "R K/128"]:
    """Largest minus smallest scale exponent of four blocks, blocks of zeros and NaN left out; -1 without any other."""
    is_left_out = (magnitudes_RK.unflatten(1, (-1, FP4_BLOCK)).amax(2) == 0) | (scales == E8M0.nan_code)
    exponents = scales.int()
    of_four = (-1, FP8_BLOCK // FP4_BLOCK)
    highest = exponents.masked_fill(is_left_out, -_NO_EXPONENT).unflatten(1, of_four).amax(2)
    lowest = exponents.masked_fill(is_left_out, _NO_EXPONENT).unflatten(1, of_four).amin(2)
    return (highest - lowest).clamp_min(-1)


def _inexact(fp4: Fp4Rows, q_RK: Float32[Tensor, "R K"], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Shares of FP8 blocks that differ from q, along rows and along columns."""
    num_rows = len(q_RK)
    groups = Groups((num_rows,), q_RK.device)
    rows = rows_of_expert(rows_from_fp4(fp4, recipe, groups.sizes), groups.spans(ROW_MULTIPLE)[0])
    columns = cols_of_expert(columns_from_fp4(fp4, recipe, groups.sizes), groups.spans(FP8_BLOCK)[0])
    by_rows = _differs(dequantize(rows)[:num_rows], q_RK)
    by_columns = F.pad(_differs(dequantize(columns)[:, :num_rows].t(), q_RK), (0, 0, 0, -num_rows % FP8_BLOCK))
    return (
        by_rows.unflatten(1, (-1, FP8_BLOCK)).any(2).double().mean(),
        by_columns.unflatten(0, (-1, FP8_BLOCK)).any(1).double().mean(),
    )


def _differs(x_RK: Float32[Tensor, "R K"], q_RK: Float32[Tensor, "R K"]) -> Tensor:
    return (x_RK != q_RK) & ~(x_RK.isnan() & q_RK.isnan())
