"""The error of an FP8 GEMM as a sum of parts: what each step of its operands' chains adds, then the accumulator's."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float64

from mxsim.analysis.chains import Part
from mxsim.analysis.decomposition import Decomposition, telescope
from mxsim.analysis.group_sums import multiply
from mxsim.blocks import EXACT, HOPPER, Accumulator, fp8_gemm

_BITS = 51  # of an output's largest state: differences of multiples of that fit float64


def decompose_gemm(a: Decomposition, b: Decomposition, *, accumulator: Accumulator = HOPPER) -> Decomposition:
    """The parts of the error of a @ b.T, computed by `fp8_gemm`, against the exact product of the sources.

    States: the exact dot products of the operands' states, both operands taking a step at once (one whose chain lacks
    it stays where it is); `FP32 output`, that of the quantized operands rounded to float32 once; `accumulation`, what
    the accumulator makes of them. The exact dot products are rounded to multiples of 2**(e - 51), where 2**e is above
    every state of that output: so far the parts are true, and they add up exactly.

    Operands that are columns are contracted along their sources' rows: a = [m, K], b = [m, N] give [K, N].

    Raises:
        TypeError: if a or b is no Decomposition.
        ValueError: if one operand is columns and the other rows; if the operands are not FP8 or do not fit; if float64
            does not hold a difference exactly (a result far smaller than the others).
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Decomposition):
            raise TypeError(f"decompose_gemm: {name} is a {type(operand).__name__}, needed a Decomposition")
    if a.quantized is None or b.quantized is None:
        raise ValueError("decompose_gemm: a or b is no decomposition of a quantized tensor")
    is_column = [d.quantized is not None and d.quantized.source_rows is not None for d in (a, b)]
    if is_column[0] != is_column[1]:
        raise ValueError("decompose_gemm: one of a and b is columns and the other rows, needed both alike")
    results = {
        Part.FP32_OUTPUT: fp8_gemm(a.quantized, b.quantized, accumulator=EXACT),
        Part.ACCUMULATION: fp8_gemm(a.quantized, b.quantized, accumulator=accumulator),
    }
    steps = [part for part in Part if part in a.states or part in b.states]
    paths = [
        [matrix.T if column else matrix for matrix in _along(d, steps)]
        for d, column in zip((a, b), is_column, strict=True)
    ]
    exact = [exact_dot(state_a, state_b) for state_a, state_b in zip(*paths, strict=True)]
    outputs = {part: result.astype(np.float64) for part, result in results.items()}
    _, exponent = np.frexp(np.max(np.abs([*exact, *outputs.values()]), axis=0))
    exact = [np.ldexp(np.rint(np.ldexp(y, _BITS - exponent)), exponent - _BITS) for y in exact]
    return telescope(exact[0], dict(zip(steps, exact[1:], strict=True)) | outputs)


def exact_dot(a: Float64[np.ndarray, "m k"], b: Float64[np.ndarray, "n k"]) -> Float64[np.ndarray, "m n"]:
    """a @ b.T, every dot product exact and rounded to float64 once."""
    rows = []
    for row in a:
        terms = np.concatenate(multiply(row[None, :], b), axis=1)
        rows.append([math.fsum(products) for products in terms.tolist()])
    return np.array(rows)


def _along(d: Decomposition, steps: list[Part]) -> list[Float64[np.ndarray, "rows columns"]]:
    """x and the state after each step, the one before where the chain lacks it."""
    states: Mapping[Part, np.ndarray] = d.states
    path = [d.x.reshape(-1, d.x.shape[-1])]
    for part in steps:
        path.append(states[part].reshape(path[0].shape) if part in states else path[-1])
    return path
