"""Parts against Fractions, one element at a time, and their sum against the total, bit for bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis.chains import CHAINS, Chain, Part
from mxsim.analysis.decomposition import Decomposition, decompose, ideal_scale, sum_of_squares
from mxsim.blocks import MXFP4, MXFP8_E5M2, MXINT8, NVFP4, ScaleRule, quantize
from mxsim.formats import E2M1, E4M3
from tests import oracle
from tests.blocks.adversarial import adversarial_blocks, wide_range
from tests.oracle import Spec

ENDLESS = {spec: Spec("", 10, spec.mantissa_bits, spec.bias) for spec in (oracle.E2M1, oracle.E4M3)}
FIRST = [Part.UNDERFLOW, Part.GRID, Part.SCALE_RULE, Part.CLIPPING]
CONVERTED = [chain for chain in CHAINS.values() if chain.conversions]


def clamped_and_subnormal() -> np.ndarray:
    """BF16 blocks at both ends of E8M0's range, subnormal numbers, saturation, zeros of both signs."""
    random = np.random.default_rng(3)
    x = random.standard_normal((9, 128))
    x *= np.ldexp(1.0, np.array([-140, -133, -128, -126, -3, 0, 0, 120, 125]))[:, None]
    x[3, 32:64] = 0
    x[4, ::3] = -0.0
    x[5, ::32], x[6] = 7.0, np.tile([1.0, 7.9, -7.9, 0.1], 32)
    return x.astype(ml_dtypes.bfloat16)


INPUTS = {
    "normal": np.random.default_rng(0).standard_normal((130, 34)).astype(ml_dtypes.bfloat16),
    "wide": wide_range((130, 34), 1, (-12, 12)),
    "very wide": wide_range((20, 64), 2, (-60, 60)),
    "ends": clamped_and_subnormal(),
    "ties": adversarial_blocks(oracle.E2M1, "FLOOR", 3, ml_dtypes.bfloat16),
    "zeros": np.array([[0.0, -0.0] * 20]),
}


def assert_adds_up(d: Decomposition) -> None:
    so_far = np.zeros(d.x.shape)
    for part in d.parts.values():
        so_far = so_far + part
    assert so_far.tobytes() == d.total.tobytes()
    want = [Fraction(float(r)) - Fraction(float(x)) for r, x in zip(d._last.flat, d.x.flat, strict=True)]
    assert [Fraction(float(e)) for e in d.total.flat] == want
    squared = d.squared_error()
    assert sum(squared.values()) == sum(error**2 for error in want)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_parts_add_up_to_the_total_bit_for_bit(name, chain):
    if name == "ends" and "published" in chain.name:  # 2**-140 in one tile with 2**125
        with pytest.raises(ValueError, match="float64 does not hold the difference of the state after transpose"):
            decompose(INPUTS[name], chain)
        return
    d = decompose(INPUTS[name], chain)
    assert list(d.states) == [*FIRST, *(conversion.part for conversion in chain.conversions)]
    assert_adds_up(d)


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name)
def test_parts_add_up_under_every_rule(rule):
    for name in ("normal", "ends", "ties"):
        assert_adds_up(decompose(INPUTS[name], Chain("", MXFP4, scale_rule=rule)))


# --------------------------------------------------------------------------------------------------------- the states
def by_hand(values: list[float], spec: Spec, rule: str) -> list[dict[Part, Fraction]]:
    """The first states of each element of one block, in rationals."""
    exact = [Fraction(v) for v in values]
    amax = max(abs(v) for v in exact)
    limit = oracle.magnitude(oracle.max_code(spec), spec)
    ideal = Fraction(1)
    if amax:
        ideal = amax / limit
        unit = Fraction(2) ** -200
        while ideal / unit >= 2**24:
            unit *= 2
        ideal = unit * -(-ideal // unit)
    scale = oracle.power_of_two(oracle.scale_exponent(amax, spec, rule)) if amax else Fraction(1)

    def rounded(v, by, fmt):
        return oracle.decode(oracle.encode(oracle.number(v / by), fmt), fmt).value * by

    return [
        {
            Part.UNDERFLOW: v if rounded(v, ideal, spec) else Fraction(0),
            Part.GRID: rounded(v, ideal, spec),
            Part.SCALE_RULE: rounded(v, scale, ENDLESS[spec]),
            Part.CLIPPING: rounded(v, scale, spec),
        }
        for v in exact
    ]


@pytest.mark.parametrize(
    "chain, spec, rule",
    [
        *((Chain("", MXFP4, scale_rule=rule), oracle.E2M1, rule.name) for rule in ScaleRule),
        (CHAINS["FP8 row"], oracle.E4M3, "RCEIL"),
    ],
)
def test_every_state_is_its_definition(chain, spec, rule):
    size = chain.fmt.block_size
    for x in (INPUTS["normal"][:5], INPUTS["ends"], INPUTS["wide"][:2, :128], INPUTS["ties"][:8]):
        states = decompose(x, chain).states
        for row, start in np.ndindex(x.shape[0], -(-x.shape[1] // size)):
            block = slice(size * start, size * start + size)
            for column, want in enumerate(by_hand(x[row, block].astype(float).tolist(), spec, rule), size * start):
                got = {part: Fraction(float(states[part][row, column])) for part in FIRST}
                assert got == want, (row, column)


def test_hand_computed_parts():
    # FLOOR: scale 1. 7 -> 8 without an end, 6 with it. Ideal scale 7/6: 7 stays, 1.1 -> 7/6, 0.2 vanishes.
    d = decompose(np.float32([[7.0, 0.2, 1.0, -0.0]]), CHAINS["FP4"])
    parts = {part: values[0].tolist() for part, values in d.parts.items()}
    ideal = float(np.ceil(7 / 6 * 2**23) / 2**23)
    assert parts[Part.UNDERFLOW] == [0, -float(np.float32(0.2)), 0, 0]
    assert parts[Part.GRID] == [6 * ideal - 7, 0, ideal - 1, 0]
    assert parts[Part.SCALE_RULE] == [8 - 6 * ideal, 0, 1 - ideal, 0]
    assert parts[Part.CLIPPING] == [-2, 0, 0, 0]
    assert not any(np.signbit(values[0, 3]) for values in d.parts.values())


def test_the_last_first_state_is_the_quantized_tensor_and_clipping_only_saturates():
    for name in ("normal", "wide", "ends", "ties"):
        d = decompose(INPUTS[name], CHAINS["FP4"])
        t = quantize(INPUTS[name], MXFP4)
        assert d.states[Part.CLIPPING].tobytes() == t.dequantize(np.float64).tobytes()
        limit = np.repeat(6 * t.scale_values(), 32, axis=1)[:, : t.shape[1]]
        want = np.clip(d.states[Part.SCALE_RULE], -limit, limit)
        np.testing.assert_array_equal(d.states[Part.CLIPPING], want)


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=str)
def test_ideal_scale_is_the_smallest_of_24_bits_that_clips_nothing(element):
    random = np.random.default_rng(4)
    amax = np.r_[np.ldexp(random.integers(1, 2**24, 300), random.integers(-149, 100, 300)), element.max_finite, 1.0]
    limit = Fraction(element.max_finite)
    for a, scale in zip(amax.tolist(), ideal_scale(amax, element).tolist(), strict=True):
        fraction, exponent = np.frexp(scale)
        assert np.ldexp(fraction, 24) == int(np.ldexp(fraction, 24))
        below = Fraction(scale) - Fraction(2) ** (int(exponent) - 24)
        assert limit * below < Fraction(a) <= limit * Fraction(scale)
    assert ideal_scale(np.array([element.max_finite, 0.0]), element).tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------------- the claims
@pytest.mark.parametrize("chain", CONVERTED, ids=str)
def test_the_last_state_is_the_result_in_the_order_of_the_source(chain):
    x = INPUTS["wide"]
    t = quantize(x, chain.fmt)
    for conversion in chain.conversions:
        t = conversion.convert(t)
    values = t.dequantize(np.float64)
    want = values if t.source_rows is None else values.T[: t.source_rows]
    d = decompose(x, chain)
    np.testing.assert_array_equal(d._last, want)
    assert d.quantized.equal(t)


def test_headroom_6_adds_nothing_where_headroom_0_does():
    random = np.random.default_rng(5)  # exponents of neighbouring blocks differ by up to 10: above 8, below 8 + 6
    exponents = random.integers(-5, 6, (128, 4)).repeat(32, axis=1)
    x = np.ldexp(random.uniform(-1, 1, (128, 128)), exponents).astype(np.float32)
    for kind in ("row", "column"):
        added = {h: decompose(x, CHAINS[f"FP4 -> FP8 {kind}, headroom {h}"]).squared_error() for h in (0, 6)}
        assert added[0][Part.SECOND_ROUNDING] != 0 == added[6][Part.SECOND_ROUNDING]


def test_the_published_transpose_adds_more_than_one_that_rounds():
    x = INPUTS["wide"]
    rounds, published = (
        decompose(x, CHAINS[f"FP8 row -> {name}"]).squared_error()[Part.TRANSPOSE]
        for name in ("FP8 column", "published column")
    )
    assert published > 2 * rounds > 0


def test_table_has_the_exact_numbers_and_shares_add_up():
    d = decompose(INPUTS["normal"], CHAINS["FP4"])
    table = d.table().set_index("part")
    exact = d.squared_error()
    assert table["squared_error"].tolist() == [float(value) for value in exact.values()]
    assert table["share"].sum() == pytest.approx(1, rel=1e-12)
    relative = float(exact[Part.GRID] / sum_of_squares(d.x))
    assert table.loc["grid rounding", "relative_squared_error"] == relative
    assert table.loc["clipping", "num_elements"] == np.count_nonzero(d.parts[Part.CLIPPING])


def test_an_exact_tensor_has_no_parts():
    table = decompose(np.array([[6.0, -0.5, 0.0, 3.0]]), CHAINS["FP4"]).table()
    assert (table[["num_elements", "squared_error", "share"]] == 0).all(axis=None)


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "x, error, words",
    [
        (np.arange(32), TypeError, "x has dtype int64"),
        (np.zeros((0, 32)), ValueError, r"x has the shape \(0, 32\)"),
        (np.float32(1), ValueError, r"x has the shape \(\)"),
        (np.array([[1.0, np.nan]]), ValueError, r"x holds nan at \(0, 1\)"),
        (np.full((1, 4), np.inf), ValueError, r"x holds inf at \(0, 0\)"),
        (np.array([[1.0, 0.1]]), ValueError, r"x holds .*0.1.* at \(0, 1\), needed numbers that float32 holds"),
        (np.array([[1e300]]), ValueError, "needed numbers that float32 holds"),
    ],
)
def test_refusals_name_x(x, error, words):
    with pytest.raises(error, match=words):
        decompose(x, CHAINS["FP4"])


def test_refusals_name_the_chain_and_the_state():
    x = np.ones((1, 32), np.float32)
    with pytest.raises(TypeError, match="chain is a str"):
        decompose(x, "FP4")
    for fmt in (NVFP4, MXINT8):
        with pytest.raises(ValueError, match=f"chain begins with {fmt}"):
            decompose(x, Chain("", fmt))
    with pytest.raises(ValueError, match=r"the state after second rounding is not finite at \(0, 0\)"):
        decompose(np.full((1, 32), np.finfo(np.float32).max), CHAIN_RCEIL)
    assert_adds_up(decompose(x, Chain("", MXFP8_E5M2)))


CHAIN_RCEIL = Chain("", MXFP4, CHAINS["FP4 -> BF16 -> FP8 row"].conversions, ScaleRule.RCEIL)
