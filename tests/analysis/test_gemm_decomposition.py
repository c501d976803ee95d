"""Parts of a GEMM's error: exact dot products in Fractions, and the sum of the parts bit for bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis.chains import CHAINS, Chain, Part
from mxsim.analysis.decomposition import decompose
from mxsim.analysis.gemm_decomposition import decompose_gemm, exact_dot
from mxsim.blocks import EXACT, FP8_128X128, fp8_gemm
from tests.blocks.adversarial import wide_range

RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((140, 5)).astype(ml_dtypes.bfloat16)
B = RANDOM.standard_normal((140, 3)).astype(np.float32)
WEIGHT = Chain("FP8 tile", FP8_128X128)
ROWS = [name for name in CHAINS if "row" in name and "column" not in name]
COLUMNS = [name for name in CHAINS if "column" in name]


def fraction_dot(a, b):
    return [[sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(r, s, strict=True)) for s in b] for r in a]


def assert_adds_up(d):
    so_far = np.zeros(d.x.shape)
    for part in d.parts.values():
        so_far = so_far + part
    assert so_far.tobytes() == d.total.tobytes()
    squared = sum(Fraction(float(e)) ** 2 for e in d.total.flat)
    assert sum(d.squared_error().values()) == squared


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("weight", [CHAINS["FP8 row"], WEIGHT], ids=str)
def test_rows(name, weight):
    a, b = decompose(A.T, CHAINS[name]), decompose(B.T, weight)
    d = decompose_gemm(a, b)
    assert list(d.states) == [*a.states, Part.FP32_OUTPUT, Part.ACCUMULATION]
    assert d.states[Part.ACCUMULATION].tolist() == fp8_gemm(a.quantized, b.quantized).tolist()
    assert_adds_up(d)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_contracted_along_the_rows_of_their_sources(name):
    a, b = decompose(A, CHAINS[name]), decompose(B, CHAINS["FP8 row -> FP8 column"])
    d = decompose_gemm(a, b)
    assert d.x.shape == (5, 3)
    np.testing.assert_allclose(d.x, np.float64(A).T @ B, rtol=1e-12)
    result = fp8_gemm(a.quantized, b.quantized)
    assert d.states[Part.ACCUMULATION].tolist() == result.tolist()
    assert_adds_up(d)


def test_states_are_the_exact_dot_products_of_the_operands_states_to_51_bits():
    a, b = decompose(A.T, CHAINS["FP4 -> FP8 row, headroom 0"]), decompose(B.T, CHAINS["FP8 row"])
    d = decompose_gemm(a, b)
    want = {None: fraction_dot(a.x, b.x)}
    for part in (Part.UNDERFLOW, Part.GRID, Part.SCALE_RULE, Part.CLIPPING, Part.SECOND_ROUNDING):
        want[part] = fraction_dot(a.states[part], b.states.get(part, b.states[Part.CLIPPING]))
    got = {None: d.x, **d.states}
    largest = np.max(np.abs(list(got.values())), axis=0)
    for part, exact in want.items():
        for i, j in np.ndindex(d.x.shape):
            error = abs(Fraction(float(got[part][i, j])) - exact[i][j])
            assert error <= Fraction(float(largest[i, j])) / 2**50, part


def test_an_exact_accumulator_has_no_accumulation_part():
    a, b = decompose(A.T, CHAINS["FP8 row"]), decompose(B.T, CHAINS["FP8 row"])
    assert not decompose_gemm(a, b, accumulator=EXACT).parts[Part.ACCUMULATION].any()
    assert decompose_gemm(a, b).parts[Part.ACCUMULATION].any()


def test_a_result_of_minus_zero_is_no_error():
    # The sources' product cancels exactly, the quantized one is -2**-163, which float32 rounds to -0.
    a, b = (np.ldexp(np.float32([v]), -80) for v in ([1.0625, 1.0], [1.0625, -1.12890625]))
    d = decompose_gemm(decompose(a, CHAINS["FP8 row"]), decompose(b, CHAINS["FP8 row"]))
    assert (d.x.item(), str(d.states[Part.ACCUMULATION].item())) == (0, "-0.0")
    assert d.states[Part.CLIPPING].item() == -(2.0**-163)
    assert not np.signbit(d.total).any()
    assert_adds_up(d)


def test_exact_dot_rounds_once():
    a, b = (
        wide_range((4, 50), 1, (-60, 60)).astype(float),
        wide_range((3, 50), 2, (-60, 60)).astype(float) * (1 + 2.0**-30),
    )
    want = [[float(y) for y in row] for row in fraction_dot(a, b)]
    assert exact_dot(a, b).tolist() == want


def test_refusals():
    row, column, fp4 = decompose(A, CHAINS["FP8 row"]), decompose(A, CHAINS[COLUMNS[0]]), decompose(A, CHAINS["FP4"])
    with pytest.raises(ValueError, match="one of a and b is columns and the other rows"):
        decompose_gemm(row, column)
    with pytest.raises(ValueError, match="MXFP4"):
        decompose_gemm(fp4, row)
    with pytest.raises(ValueError, match="no decomposition of a quantized tensor"):
        decompose_gemm(decompose_gemm(row, row), row)
    with pytest.raises(TypeError, match="decompose_gemm: b is a ndarray, needed a Decomposition"):
        decompose_gemm(row, A)
