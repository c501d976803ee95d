"""The parts of the layer's forward and backward pass, each as a call of its own on the same tensors.

R routed rows, H hidden, F intermediate, E experts; h = x w1^T, a = swiglu(h), y = a w2^T.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.bench.cases import flat
from mxsim.bench.moe.fused_fp8 import Fused
from mxsim.bench.moe.workload import LayerShape, Tokens
from mxsim.kernels.layouts import Fp4Rows, Fp8Tiles, RaggedFp8Rows
from mxsim.moe import (
    Activation,
    Gemm,
    Groups,
    Recipe,
    grouped_gemm,
    grouped_wgrad,
    permute,
    permute_rows,
    swiglu,
    swiglu_backward,
    unpermute_sum,
)
from mxsim.moe.stored import columns_of, quantize_input, rows_from_fp4, to_fp4
from mxsim.moe.weights import Fp8Weight, quantize_weight

ALL = (Recipe.BF16, Recipe.FP8, Recipe.MXFP4)
BOTH_FP8 = (Recipe.FP8, Recipe.MXFP4)


class Kind(Enum):
    """What a part does."""

    QUANTIZE = "quantize"
    CONVERT = "convert"
    FPROP = "GEMM Fprop"
    DGRAD = "GEMM Dgrad"
    WGRAD = "GEMM Wgrad"
    SWIGLU_FORWARD = "SwiGLU forward"
    SWIGLU_BACKWARD = "SwiGLU backward"
    PERMUTE = "permute, unpermute"
    WEIGHTS = "quantize weights"  # beside the step
    DENSE = "dense"  # no part of it

    @property
    def is_in_step(self) -> bool:
        """Whether the step contains it where weights are made outside."""
        return self not in (Kind.WEIGHTS, Kind.DENSE)


@dataclass(frozen=True)
class Part:
    """One call. key: what figures refer to it by. recipes: those that make it, each once a step."""

    key: str
    kind: Kind
    recipes: tuple[Recipe, ...]
    name: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    flops: int = 0

    def num_bytes(self) -> int:
        """Inputs read once and results written once, as they lie in memory."""
        return sum(x.numel() * x.element_size() for x in (*flat(self.inputs), *flat(self.run(*self.inputs))))


@dataclass(frozen=True)
class Weights:
    """Expert weights in BF16, [E, 2F, H] and [E, H, F], and their FP8 copies."""

    w1: Tensor
    w2: Tensor
    fp8_w1: Fp8Weight
    fp8_w2: Fp8Weight

    @classmethod
    def of(cls, w1: Tensor, w2: Tensor) -> "Weights":
        """With copies made now."""
        return cls(w1.detach(), w2.detach(), quantize_weight(w1), quantize_weight(w2))


@torch.no_grad()
def parts_of_layer(shape: LayerShape, tokens: Tokens, weights: Weights) -> list[Part]:
    """Every part once; recipes share those that are the same work."""
    permutation, groups, recipe = tokens.permutation, tokens.groups, Recipe.MXFP4
    sizes, w1, w2 = groups.sizes, weights.w1, weights.w2
    x_TH, dy_TH, probs = tokens.x_TH.detach(), tokens.dy_TH, tokens.probs_R.detach()
    x = permute(x_TH, permutation)
    h = grouped_gemm(x, w1, groups)
    a = swiglu(h, probs)
    y = grouped_gemm(a, w2, groups)
    dy = permute(dy_TH, permutation)
    da = grouped_gemm(dy, w2.transpose(1, 2), groups)
    dh, _ = swiglu_backward(da, h, probs)

    tokens_fp4 = to_fp4(x_TH, recipe, None)
    x_fp4 = Fp4Rows(*(permute_rows(t, permutation) for t in tokens_fp4))
    h_fp4 = to_fp4(h, recipe, None)
    a_rows, a_kept = quantize_input(a, Activation.DOWN_INPUT, recipe, sizes, None)
    a_fp4 = Fp4Rows(*a_kept)

    def to_rows(t: Tensor) -> RaggedFp8Rows:
        return kernels.bf16_to_fp8_row(t, group_sizes=sizes)

    def to_cols(t: Tensor) -> Any:
        return kernels.bf16_to_fp8_col(t, group_sizes=sizes)

    def permuted_fp4(*fp4: Tensor) -> tuple[Tensor, ...]:
        return tuple(permute_rows(t, permutation) for t in fp4)

    def cols_from_fp4(*fp4: Tensor) -> Any:
        return columns_of(fp4, Activation.EXPERT_INPUT, recipe, sizes)

    found = [
        Part("permute.bf16", Kind.PERMUTE, (Recipe.BF16, Recipe.FP8), "permute x, BF16", _permute, (x_TH, permutation)),
        Part("permute.fp4", Kind.PERMUTE, (Recipe.MXFP4,), "permute x, MXFP4", permuted_fp4, tuple(tokens_fp4)),
        Part("unpermute.y", Kind.PERMUTE, ALL, "unpermute y", _unpermute, (y, permutation)),
        Part("permute.dy", Kind.PERMUTE, ALL, "permute dy", _permute, (dy_TH, permutation)),
        Part("unpermute.dx", Kind.PERMUTE, ALL, "unpermute dx", _unpermute, (dy, permutation)),
        Part("x.fp8.rows", Kind.QUANTIZE, (Recipe.FP8,), "x: BF16 -> FP8 rows", to_rows, (x,)),
        Part("x.fp8.cols", Kind.QUANTIZE, (Recipe.FP8,), "x: BF16 -> FP8 columns", to_cols, (x,)),
        Part(
            "tokens.fp4",
            Kind.QUANTIZE,
            (Recipe.MXFP4,),
            "x: BF16 -> MXFP4, once a token",
            lambda t: to_fp4(t, recipe, None),
            (x_TH,),
        ),
        Part(
            "x.fp4.rows",
            Kind.CONVERT,
            (Recipe.MXFP4,),
            "x: MXFP4 -> FP8 rows",
            lambda *fp4: rows_from_fp4(Fp4Rows(*fp4), recipe, sizes),
            tuple(x_fp4),
        ),
        Part("x.fp4.cols", Kind.CONVERT, (Recipe.MXFP4,), "x: MXFP4 -> FP8 columns", cols_from_fp4, tuple(x_fp4)),
        Part(
            "h.fp4",
            Kind.QUANTIZE,
            (Recipe.MXFP4,),
            "SwiGLU input: BF16 -> MXFP4",
            lambda t: to_fp4(t, recipe, None),
            (h,),
        ),
        Part("a.fp8.rows", Kind.QUANTIZE, (Recipe.FP8,), "2nd GEMM's input: BF16 -> FP8 rows", to_rows, (a,)),
        Part("a.fp8.cols", Kind.QUANTIZE, (Recipe.FP8,), "2nd GEMM's input: BF16 -> FP8 columns", to_cols, (a,)),
        Part(
            "a.fp4.rows",
            Kind.QUANTIZE,
            (Recipe.MXFP4,),
            "2nd GEMM's input: BF16 -> MXFP4 and FP8 rows",
            lambda t: quantize_input(t, Activation.DOWN_INPUT, recipe, sizes, None),
            (a,),
        ),
        Part(
            "a.fp4.cols", Kind.CONVERT, (Recipe.MXFP4,), "2nd GEMM's input: MXFP4 -> FP8 columns", cols_from_fp4, a_fp4
        ),
        Part("dy.rows", Kind.QUANTIZE, BOTH_FP8, "dy: BF16 -> FP8 rows", to_rows, (dy,)),
        Part("dy.cols", Kind.QUANTIZE, BOTH_FP8, "dy: BF16 -> FP8 columns", to_cols, (dy,)),
        Part("dh.rows", Kind.QUANTIZE, BOTH_FP8, "dh: BF16 -> FP8 rows", to_rows, (dh,)),
        Part("dh.cols", Kind.QUANTIZE, BOTH_FP8, "dh: BF16 -> FP8 columns", to_cols, (dh,)),
        Part("swiglu", Kind.SWIGLU_FORWARD, ALL, "SwiGLU", swiglu, (h, probs)),
        Part(
            "swiglu.bf16",
            Kind.SWIGLU_BACKWARD,
            (Recipe.BF16, Recipe.FP8),
            "SwiGLU backward from BF16",
            swiglu_backward,
            (da, h, probs),
        ),
        Part(
            "swiglu.fp4",
            Kind.SWIGLU_BACKWARD,
            (Recipe.MXFP4,),
            "SwiGLU backward from MXFP4",
            swiglu_backward,
            (da, h_fp4, probs),
        ),
        Part("w1", Kind.WEIGHTS, BOTH_FP8, "w1 -> FP8 tiles, both ways", quantize_weight, (w1,)),
        Part("w2", Kind.WEIGHTS, BOTH_FP8, "w2 -> FP8 tiles, both ways", quantize_weight, (w2,)),
    ]
    x_rows, x_cols, a_cols = to_rows(x), to_cols(x), to_cols(a)
    dy_rows, dy_cols, dh_rows, dh_cols = to_rows(dy), to_cols(dy), to_rows(dh), to_cols(dh)
    fp8_w1, fp8_w2 = weights.fp8_w1, weights.fp8_w2
    up = 4 * shape.rows * shape.hidden * shape.intermediate
    down = up // 2

    def gemm(a: Any, b: Any) -> Tensor:
        return grouped_gemm(a, b, groups)

    def wgrad(a: Any, b: Any) -> Tensor:
        return grouped_wgrad(a, b, groups)

    for kind, run, name, flops, bf16, fp8 in (
        (Kind.FPROP, gemm, "x w1^T", up, (x, w1), (x_rows, fp8_w1.tiles())),
        (Kind.FPROP, gemm, "a w2^T", down, (a, w2), (a_rows, fp8_w2.tiles())),
        (Kind.DGRAD, gemm, "dy w2", down, (dy, w2.transpose(1, 2)), (dy_rows, fp8_w2.tiles_t())),
        (Kind.DGRAD, gemm, "dh w1", up, (dh, w1.transpose(1, 2)), (dh_rows, fp8_w1.tiles_t())),
        (Kind.WGRAD, wgrad, "dy^T a", down, (dy, a), (dy_cols, a_cols)),
        (Kind.WGRAD, wgrad, "dh^T x", up, (dh, x), (dh_cols, x_cols)),
    ):
        found.append(Part(f"bf16 {name}", kind, (Recipe.BF16,), f"{name}, BF16", run, bf16, flops))
        found.append(Part(f"fp8 {name}", kind, BOTH_FP8, f"{name}, FP8", run, fp8, flops))
    return found


def _permute(x: Tensor, permutation: Any) -> Tensor:
    return permute(x, permutation)


def _unpermute(y: Tensor, permutation: Any) -> Tensor:
    return unpermute_sum(y, permutation)


# --------------------------------------------------------------------------------------------------------------- dense
@torch.no_grad()
def dense_parts(shape: LayerShape, tokens: Tokens, weights: Weights, fused: dict[int, Fused]) -> Iterator[Part]:
    """The same rows as one matrix: quantizers of a dense linear layer, the one-read baseline, and GEMMs."""
    recipe = Recipe.MXFP4
    x = permute(tokens.x_TH.detach(), tokens.permutation)
    options = {"scale_rule": recipe.scale_rule, "headroom": recipe.headroom}

    def part(key: str, name: str, run: Callable[..., Any], inputs: Sequence[Any], flops: int = 0) -> Part:
        return Part(f"dense.{key}", Kind.DENSE, (), name, run, tuple(inputs), flops)

    yield part("fp8.rows", "BF16 -> FP8 rows", kernels.bf16_to_fp8_row, [x])
    yield part("fp8.cols", "BF16 -> FP8 columns", kernels.bf16_to_fp8_col, [x])
    yield part("fp4.rows", "BF16 -> MXFP4 and FP8 rows", lambda t: kernels.bf16_to_fp4_and_fp8_row(t, **options), [x])
    yield part(
        "fp4.cols",
        "MXFP4 -> FP8 columns",
        lambda *fp4: kernels.fp4_row_to_fp8_col(*fp4, headroom=recipe.headroom),
        to_fp4(x, recipe, None),
    )
    for num_warps, run in fused.items():
        yield part(f"fused.{num_warps}", f"BF16 -> FP8 rows and columns, one read, {num_warps} warps", run, [x])

    # One group of all rows: the dense GEMM of the same backend.
    one = Groups((shape.rows,), x.device)
    is_hopper = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) == (9, 0)
    backend = Gemm.SCALED_MM if is_hopper else Gemm.AUTO
    w, tiles = weights.w1[0], Fp8Tiles(*(t[:1] for t in weights.fp8_w1.tiles()))
    y = x @ w.t()
    flops = 4 * shape.rows * shape.hidden * shape.intermediate
    rows, x_cols, y_cols = (
        f(t, group_sizes=one.sizes)
        for f, t in ((kernels.bf16_to_fp8_row, x), (kernels.bf16_to_fp8_col, x), (kernels.bf16_to_fp8_col, y))
    )
    yield part("gemm.bf16", "x w^T, BF16 matmul", lambda a, b: a @ b.t(), [x, w], flops)
    yield part("wgrad.bf16", "dy^T x, BF16 matmul", lambda a, b: a.t() @ b, [y, x], flops)
    yield part("gemm.fp8", "x w^T, FP8", lambda a, b: grouped_gemm(a, b, one, gemm=backend), [rows, tiles], flops)
    yield part("wgrad.fp8", "dy^T x, FP8", lambda a, b: grouped_wgrad(a, b, one, gemm=backend), [y_cols, x_cols], flops)
