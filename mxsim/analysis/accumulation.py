"""What a narrow accumulator costs a dot product: its error against the exact sum, and beside that of quantizing.

    accumulation   the accumulator's result against the exact dot product of the same quantized operands
    quantization   the exact dot product of the quantized operands against that of their sources
    total          the accumulator's result against the dot product of the sources

An accumulator that is never promoted, or after several 128-blocks, needs one scale for all of them; so the sweep takes
E4M3 rows with a single power of two each (`quantize_row`), and all accumulators see the same codes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from jaxtyping import Float, Float64

from mxsim.blocks import FP8_1X128, MXFP4, BlockTensor, ScaleRule, fp4_row_to_fp8_row, quantize, scale_exponent
from mxsim.blocks.gemm import HOPPER, Accumulator, fp8_gemm
from mxsim.formats import E4M3, encode, philox_bits

FRACTION_BITS = tuple(range(8, 24))
PROMOTION_INTERVALS = (32, 64, 128, 256, 512, None)
NUM_PRODUCTS = (128, 256, 512, 1024, 2048, 4096, 7168)  # K; the last is DeepSeek-V3's hidden size
ROW_SCALE = "E4M3 rows"  # `quantize_row`; the other operands have their block formats' names

_SIGNIFICANT_DIGITS = 6  # of the errors: what is left does not depend on the order in which float64 sums are taken


class ErrorOf(Enum):
    ACCUMULATION = "accumulation"
    QUANTIZATION = "quantization"
    TOTAL = "total"


@dataclass(frozen=True)
class AccumulationRow:
    """One accumulator on one set of dot products of k products each.

    operands: what was multiplied; "MXFP4 x FP8_1X128" is an MXFP4 activation, converted to FP8, by an FP8 weight.
    fraction_bits: None: the sum is exact (quantization).
    promotion_interval: in elements of K; None: never.
    relative_frobenius_error: |result - reference| / |reference|, norms over all the dot products.
    mean_signed_relative_error: sum sign(reference) * (result - reference) / sum |reference|; negative: toward zero.
        Of positive data the mean relative error, but for their spread; of others it stays defined where single dot
        products cancel.
    """

    data: str
    k: int
    operands: str
    error_of: ErrorOf
    fraction_bits: int | None
    promotion_interval: int | None
    relative_frobenius_error: float
    mean_signed_relative_error: float


# -------------------------------------------------------------------------------------------------------------- data
class Distribution(Enum):
    """Of the source's elements; every one is a formula of Philox bits, so that all machines draw the same."""

    NORMAL = "normal"
    POSITIVE_NORMAL = "positive normal"  # |N(0,1)|
    STUDENT_T4 = "Student t, 4 degrees"  # heavy tails
    UNIFORM = "uniform [0, 1)"
    UNIFORM_1_2 = "uniform [1, 2)"  # products of few fraction bits
    LOG_UNIFORM = "log-uniform, 16 binades"  # positive; E4M3's range


def sample(distribution: Distribution, shape: tuple[int, int], *, seed: int = 0) -> Float64[np.ndarray, "rows k"]:
    """Independent draws.

    >>> sample(Distribution.UNIFORM, (1, 3)).round(3)
    array([[0.399, 0.881, 0.736]])
    """
    u = (philox_bits(seed, (4, *shape)) + 0.5) * 2.0**-32  # in (0, 1)
    match distribution:
        case Distribution.UNIFORM:
            return u[0]
        case Distribution.UNIFORM_1_2:
            return 1 + u[0]
        case Distribution.LOG_UNIFORM:
            return np.exp2(16 * u[0])
    normal = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    match distribution:
        case Distribution.NORMAL:
            return normal
        case Distribution.POSITIVE_NORMAL:
            return np.abs(normal)
        case Distribution.STUDENT_T4:
            return normal / np.sqrt(-np.log(u[2] * u[3]) / 2)  # chi-squared of 4 degrees: -2 log(u2 * u3)
    raise TypeError(f"sample: distribution is {distribution!r}, needed a Distribution")


def concatenate_rows(
    x: Float[np.ndarray, "rows n"], shape: tuple[int, int], *, seed: int = 0
) -> Float64[np.ndarray, "m k"]:
    """Long rows from short ones: each is rows of x, drawn at random, one after another, cut to k elements.

    Column j of x stays at positions j, j + n, ...: a dot product of two such rows is the sum of dot products of x's
    rows, and channels with outliers meet the weights that belong to them.

    Raises:
        ValueError: if x has no elements.
    """
    if x.size == 0:
        raise ValueError(f"concatenate_rows: x has the shape {x.shape}, needed at least one element")
    m, k = shape
    num_pieces = -(-k // x.shape[1])
    rows = philox_bits(seed, (m, num_pieces)).astype(np.int64) % x.shape[0]
    return np.asarray(x, np.float64)[rows].reshape(m, num_pieces * x.shape[1])[:, :k]


def quantize_row(x: Float[np.ndarray, "rows k"]) -> BlockTensor:
    """E4M3 with one scale a row, the smallest power of two s with amax(row) <= 448 * s, in all of its 128-blocks.

    >>> quantize_row(np.r_[448.0, np.ones(255)][None]).scales
    array([[1., 1.]], dtype=float32)
    """
    x = np.asarray(x, np.float64)
    exponent = scale_exponent(np.abs(x).max(axis=-1, keepdims=True), E4M3, ScaleRule.RCEIL)
    codes = encode(np.ldexp(x, -exponent), E4M3)
    num_blocks = -(-x.shape[-1] // FP8_1X128.block_size)
    scales = np.broadcast_to(np.ldexp(np.float32(1), exponent), (x.shape[0], num_blocks))
    return BlockTensor(codes, np.ascontiguousarray(scales, np.float32), FP8_1X128)


# ------------------------------------------------------------------------------------------------------------- sweep
@dataclass(frozen=True)
class Case:
    """One point of the sweep: K, and what HOPPER's arithmetic is changed to."""

    k: int
    fraction_bits: int = 13
    promotion_interval: int | None = 128

    @property
    def accumulator(self) -> Accumulator:
        promotion = "never" if self.promotion_interval is None else self.promotion_interval
        return replace(
            HOPPER,
            name=f"{self.fraction_bits} bits, promotion {promotion}",
            fraction_bits=self.fraction_bits,
            promotion_interval=self.promotion_interval,
        )


def default_cases(
    *, k: int = 7168, fraction_bits: Sequence[int] = FRACTION_BITS, num_products: Sequence[int] = NUM_PRODUCTS
) -> list[Case]:
    """Two cuts through the space: fraction bits at one K, promoted at 128 and never; intervals and K at 13 bits."""
    across_bits = [Case(k, bits, interval) for interval in (128, None) for bits in fraction_bits]
    across_k = [Case(each, promotion_interval=interval) for interval in PROMOTION_INTERVALS for each in num_products]
    return list(dict.fromkeys(across_bits + across_k))


def sweep(
    data: str, a: Float[np.ndarray, "m k"], b: Float[np.ndarray, "n k"], cases: Iterable[Case]
) -> Iterator[AccumulationRow]:
    """The error of accumulation in each case, over the m * n dot products of a's and b's rows.

    A case's K takes the first K elements of the rows.

    Raises:
        ValueError: if a case needs more elements than the rows have.
    """
    operands: dict[int, tuple[BlockTensor, BlockTensor]] = {}
    exact: dict[int, np.ndarray] = {}
    results: dict[Case, np.ndarray] = {}
    for case in cases:
        k = case.k
        if k > a.shape[-1]:
            raise ValueError(f"sweep: a case has k = {k}, but rows have {a.shape[-1]} elements")
        if k not in operands:
            operands[k] = quantize_row(a[:, :k]), quantize_row(b[:, :k])
            exact[k] = exact_dot(*operands[k])
        # An interval of at least K promotes once, at the end, as none does.
        promotes = case.promotion_interval is not None and case.promotion_interval < k
        same = case if promotes else replace(case, promotion_interval=None)
        if same not in results:
            results[same] = fp8_gemm(*operands[k], accumulator=same.accumulator)
        errors = dot_errors(results[same], exact[k])
        yield AccumulationRow(
            data, k, ROW_SCALE, ErrorOf.ACCUMULATION, case.fraction_bits, case.promotion_interval, *errors
        )


def exact_dot(a: BlockTensor, b: BlockTensor) -> Float64[np.ndarray, "m n"]:
    """a @ b.T in float64: exact, in whatever order it is summed, where rows have one scale (`quantize_row`).

    Products are multiples of 2**-18 below 2**18, so that their sum, at K < 2**17, is a multiple of 2**-18 below 2**35.
    """
    return _dot(a.dequantize(np.float64), b.dequantize(np.float64))


def _dot(a: Float64[np.ndarray, "m k"], b: Float64[np.ndarray, "n k"]) -> Float64[np.ndarray, "m n"]:
    """a @ b.T without BLAS, whose threads cost more than they save at these sizes and order sums as they like."""
    return np.einsum("mk,nk->mn", a, b)


def dot_errors(result: Float[np.ndarray, "m n"], reference: Float64[np.ndarray, "m n"]) -> tuple[float, float]:
    """Relative Frobenius error and mean signed relative error, as `AccumulationRow` defines them.

    >>> dot_errors(np.array([[0.75, -1.5]]), np.array([[1.0, -1.0]]))
    (0.395285, 0.125)
    """
    error = np.asarray(result, np.float64) - reference
    frobenius = np.sqrt(np.square(error).sum() / np.square(reference).sum())
    signed = (np.sign(reference) * error).sum() / np.abs(reference).sum()
    return _rounded(frobenius), _rounded(signed)


def _rounded(x: float) -> float:
    return float(f"{x:.{_SIGNIFICANT_DIGITS}g}")


# ------------------------------------------------------------------------------------ beside the error of quantizing
def compare_with_quantization(
    data: str,
    a: Float[np.ndarray, "m k"],
    b: Float[np.ndarray, "n k"],
    *,
    accumulators: Sequence[Accumulator] = (HOPPER,),
) -> Iterator[AccumulationRow]:
    """Quantization, accumulation and total error of a @ b.T for each choice of operands.

    MXFP4 operands reach the tensor core as FP8, by the direct conversion. Accumulators that promote less often than
    the scales change are skipped.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    source = _dot(a, b)
    for operands, (a_q, b_q) in quantized_operands(a, b).items():
        exact = exact_dot(a_q, b_q)
        k = a.shape[-1]
        yield AccumulationRow(data, k, operands, ErrorOf.QUANTIZATION, None, None, *dot_errors(exact, source))
        for accumulator in accumulators:
            interval = accumulator.promotion_interval
            if operands != ROW_SCALE and (interval is None or interval > FP8_1X128.block_size):
                continue
            result = fp8_gemm(a_q, b_q, accumulator=accumulator)
            for error_of, reference in ((ErrorOf.ACCUMULATION, exact), (ErrorOf.TOTAL, source)):
                yield AccumulationRow(
                    data, k, operands, error_of, accumulator.fraction_bits, interval, *dot_errors(result, reference)
                )


def quantized_operands(
    a: Float[np.ndarray, "m k"], b: Float[np.ndarray, "n k"]
) -> Mapping[str, tuple[BlockTensor, BlockTensor]]:
    """Operands of one GEMM by name: E4M3 with one scale a row or one for 128, MXFP4 for a only, MXFP4 for both."""
    a_fp8, b_fp8 = quantize(a, FP8_1X128), quantize(b, FP8_1X128)
    a_fp4, b_fp4 = (fp4_row_to_fp8_row(quantize(x, MXFP4)) for x in (a, b))
    return {
        ROW_SCALE: (quantize_row(a), quantize_row(b)),
        FP8_1X128.name: (a_fp8, b_fp8),
        f"{MXFP4.name} x {FP8_1X128.name}": (a_fp4, b_fp8),
        MXFP4.name: (a_fp4, b_fp4),
    }
