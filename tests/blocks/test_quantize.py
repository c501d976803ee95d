"""quantize is the specification's arithmetic, bit for bit: against Fractions on hard blocks, against tables on many."""

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import (
    BLOCK_FORMATS,
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP8_E4M3,
    MXINT8,
    NVFP4,
    NonFinite,
    ScaleOrder,
    ScaleRule,
    quantize,
)
from mxsim.formats import E2M1, Rounding, philox_bits
from tests import oracle
from tests.blocks.adversarial import adversarial_blocks, random_bit_patterns, wide_range
from tests.blocks.oracle_blocks import FP8, LAYOUTS, MX, quantize_by_fractions
from tests.blocks.oracle_table import quantize_by_table
from tests.blocks.pairs import RULES, assert_quantized_equal, quantize_as_named

POWER_OF_TWO = [*MX, "FP8_1X128"]
EACH_RULE = pytest.mark.parametrize("rule", [rule.name for rule in RULES])
INF, NAN = np.inf, np.nan


def size_of(name: str) -> int:
    return LAYOUTS[name].block[0] * LAYOUTS[name].block[1]


# ------------------------------------------------------------------------------------------------------------ by hand
def test_MXFP4_by_hand():
    t = quantize([[1.0, -2.5, 7.0, 0.3, -0.0, 5.0, -5.5]], MXFP4)
    assert t.scales.tolist() == [[127]]
    assert t.codes.tolist() == [[2, 12, 7, 1, 8, 6, 15]]
    assert quantize([[7.0]], MXFP4, scale_rule=ScaleRule.RCEIL).codes.tolist() == [[6]]  # 3.5 ties to 4


def test_MXINT8_by_hand():
    t = quantize([[1.0, -1.0, 1.99, -1.99, 1 / 64, -1 / 64, 1 / 128, 3 / 128, -0.0]], MXINT8)
    assert t.scales.tolist() == [[127]]
    assert t.codes.tolist() == [[64, 192, 127, 129, 1, 255, 0, 2, 0]]  # never 0x80: -127 is the lowest


def test_FP8_by_hand():
    t = quantize([[448.0] * 128 + [1.0, -7.0]], FP8_1X128)
    assert t.scales.tolist() == [[1.0, 2.0**-6]]
    assert t.codes.tolist() == [[0x7E] * 128 + [0x68, 0xFE]]
    t = quantize(np.diag([448.0, 449.0]), FP8_128X128)
    assert (t.codes.tolist(), t.scales.tolist()) == ([[0x76, 0], [0, 0x76]], [[2.0]])


def test_a_block_of_zeros_keeps_their_signs():
    zeros = [[0.0, -0.0, 0.0]]
    assert [quantize(zeros, MXFP4, scale_rule=r).codes.tolist() for r in RULES] == [[[0, 8, 0]]] * 4
    assert quantize(zeros, MXFP4).scales.tolist() == [[0]]
    assert quantize(zeros, MXFP8_E4M3).codes.tolist() == [[0, 0x80, 0]]
    assert quantize(zeros, MXINT8).codes.tolist() == [[0, 0, 0]]
    for order in (None, ScaleOrder.TE, ScaleOrder.DEEPGEMM):
        t = quantize(zeros, FP8_1X128, scale_order=order)
        assert (t.codes.tolist(), t.scales.tolist()) == ([[0, 0x80, 0]], [[1.0]])


def test_a_subnormal_amax_underflows_by_one_rounding():
    # X = -127; 2**-128 is 0.5 of the scale, 2**-129 a tie to 0, the next number above it rounds up
    above = np.nextafter(np.float32(2**-129), np.float32(1))
    t = quantize(np.array([[2**-128, 2**-129, -above, -(2**-149)]], np.float32), MXFP4)
    assert (t.codes.tolist(), t.scales.tolist()) == ([[1, 0, 9, 8]], [[0]])


# -------------------------------------------------------------------------------------------------- against Fractions
@pytest.mark.parametrize("name", POWER_OF_TWO)
@EACH_RULE
def test_every_tie_and_neighbour_under_every_rule(name, rule):
    x = adversarial_blocks(LAYOUTS[name].element, rule, 3, np.float32, size=size_of(name))
    assert_quantized_equal(quantize_as_named(x, name, rule=rule), quantize_by_fractions(x, name, rule=rule), x)


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("rounding", oracle.DETERMINISTIC_ROUNDINGS[1:])
def test_every_tie_and_neighbour_under_every_rounding(name, rounding):
    x = adversarial_blocks(LAYOUTS[name].element, "FLOOR", -3, np.float32, size=size_of(name))
    want = quantize_by_fractions(x, name, rule="FLOOR", rounding=rounding)
    assert_quantized_equal(quantize_as_named(x, name, rule="FLOOR", rounding=rounding), want, x)


@pytest.mark.parametrize("name", POWER_OF_TWO)
@EACH_RULE
@pytest.mark.parametrize("exponent", [-125, -131, 127], ids=["clamped", "subnormal", "largest"])
def test_every_tie_and_neighbour_at_the_ends_of_the_range(name, rule, exponent):
    x = adversarial_blocks(LAYOUTS[name].element, rule, exponent, np.float32, size=size_of(name))[::2]
    assert_quantized_equal(quantize_as_named(x, name, rule=rule), quantize_by_fractions(x, name, rule=rule), x)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize(
    "dtype, exponents",
    [
        (np.float16, (0, 15, -20)),
        (ml_dtypes.bfloat16, (0, 127, -126, -130)),
        (np.float64, (0, 127, 140, 1023, -130, -1040)),
    ],
    ids=["float16", "bfloat16", "float64"],
)
def test_every_tie_and_neighbour_in_every_dtype(name, dtype, exponents):
    for i, exponent in enumerate(exponents):
        rule = RULES[i % 4].name
        x = adversarial_blocks(LAYOUTS[name].element, rule, exponent, dtype)[::2]
        rounding = oracle.DETERMINISTIC_ROUNDINGS[i % 5]
        want = quantize_by_fractions(x, name, rule=rule, rounding=rounding)
        label = f"{name} {rule} {rounding} 2**{exponent}"
        assert_quantized_equal(quantize_as_named(x, name, rule=rule, rounding=rounding), want, x, label)


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("rounding", oracle.DETERMINISTIC_ROUNDINGS)
def test_float64_elements_far_below_amax_round_as_tiny_values_do(name, rounding):
    x = np.array([[2.0**1000, 5e-324, -5e-324, 2.0**-1000, -(2.0**-1000), 0.0, -0.0], [2.0**127, *[5e-324] * 6]])
    want = quantize_by_fractions(x, name, rounding=rounding)
    assert_quantized_equal(quantize_as_named(x, name, rounding=rounding), want, x)


@pytest.mark.parametrize("name", [*MX, *FP8])
def test_mixed_magnitudes_and_tails(name):
    rng = np.random.default_rng(5)
    rows, columns = (3, 150) if name in FP8[:1] else (5, 75) if name in MX else (140, 3)
    x = (rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-12, 12, (rows, columns))).astype(np.float32)
    axis = -2 if name == "FP8_128X1" else -1
    assert_quantized_equal(quantize_as_named(x, name), quantize_by_fractions(x, name, axis=axis), x)


# ------------------------------------------------------------------------------------------------------- non-finite
@pytest.mark.parametrize("name", [*LAYOUTS])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
def test_a_non_finite_element_poisons_its_own_block_only(name, bad):
    size = size_of(name)
    rows, columns = LAYOUTS[name].block
    shape = (3, 2 * size + 5) if rows == 1 else (2 * rows + 5, 2 * columns + 3)
    axis = -2 if columns == 1 else -1
    clean = wide_range(shape, 11, (-3, 3))
    places = [(0, 0), (0, columns - 1), (rows - 1, columns), (shape[0] - 1, shape[1] - 1)]  # first, last, the tail
    for place in places:
        x = clean.copy()
        x[place] = bad
        got = quantize_as_named(x, name)
        want = quantize_by_fractions if x.size < 300 else quantize_by_table
        assert_quantized_equal(got, want(x, name, axis=axis), x)
        decoded = got.dequantize()
        assert np.isnan(decoded[place])
        block = np.zeros(shape, bool)
        top, left = place[0] // rows * rows, place[1] // columns * columns
        block[top : top + rows, left : left + columns] = True
        assert (np.isnan(decoded) == block).all()


def test_every_kind_of_NaN_poisons():
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    x = np.zeros((6, 4), np.float32)
    x[:, 2] = bits.view(np.float32)
    assert (quantize(x, MXFP4).scales == 0xFF).all()
    x = np.zeros((4, 4), np.uint16)
    x[:, 3] = [0x7F81, 0x7FC0, 0xFF81, 0xFFFF]
    assert (quantize(x.view(ml_dtypes.bfloat16), MXFP4).scales == 0xFF).all()


@pytest.mark.parametrize("name", [*LAYOUTS])
def test_RAISE_names_the_first_index_in_row_major_order(name):
    x = np.ones((2, 130, 40), np.float32)
    x[1, 7, 3], x[1, 6, 39], x[1, 129, 0] = NAN, -INF, INF
    with pytest.raises(ValueError, match=r"quantize: x has -inf at index \(1, 6, 39\), needed finite values"):
        quantize(x, BLOCK_FORMATS[name], nonfinite=NonFinite.RAISE)
    with pytest.raises(ValueError, match=r"x has -inf at index \(6, 1, 39\)"):
        quantize(x.transpose(1, 0, 2), BLOCK_FORMATS[name], nonfinite=NonFinite.RAISE)
    finite = np.nan_to_num(x)
    got = quantize(finite, BLOCK_FORMATS[name], nonfinite=NonFinite.RAISE)
    assert (got.codes == quantize(finite, BLOCK_FORMATS[name]).codes).all()


def test_RAISE_takes_vectors_and_every_dtype():
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        x = np.zeros(70, dtype)
        x[65] = NAN
        with pytest.raises(ValueError, match=r"x has nan at index \(65,\)"):
            quantize(x, MXFP4, nonfinite=NonFinite.RAISE)


# -------------------------------------------------------------------------------------------------------- stochastic
@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("k", [1, 7, 32])
def test_stochastic_rounding_is_the_oracle_draw_by_draw(name, k):
    x = adversarial_blocks(LAYOUTS[name].element, "FLOOR", 0, np.float32, size=size_of(name))[:12]
    words = philox_bits(2**40 + k, x.shape)
    # each draw beside the exact position: the largest that rounds up, the smallest that rounds down, both ends
    words = np.where(np.arange(x.shape[1]) % 4 == 0, np.uint32(0), words)
    words = np.where(np.arange(x.shape[1]) % 4 == 1, np.uint32(0xFFFFFFFF), words)
    want = quantize_by_fractions(x, name, rounding="STOCHASTIC", random_words=words, k=k)
    assert_quantized_equal(quantize_as_named(x, name, rounding="STOCHASTIC", random_words=words, k=k), want, x)


@pytest.mark.parametrize("name, axis", [("MXFP4", -1), ("MXFP4", -2), ("MXFP6_E3M2", 0), ("FP8_128X1", -2)])
def test_random_bits_belong_to_the_row_major_index_of_the_element(name, axis):
    shape, seed = (2, 34, 5), 77
    x = wide_range(shape, 3, (-2, 2))
    words = np.array([oracle.random_word(i, seed) for i in range(x.size)], np.uint32).reshape(shape)
    want = quantize_by_fractions(
        x, name, axis=axis if axis < 0 else axis - 3, rounding="STOCHASTIC", random_words=words
    )
    got = quantize_as_named(x, name, axis=axis, rounding="STOCHASTIC", random_words=philox_bits(seed, shape))
    assert_quantized_equal(got, want, x)
    # ... whatever the strides of either array
    apart = quantize_as_named(
        np.asfortranarray(x), name, axis=axis, rounding="STOCHASTIC", random_words=np.asfortranarray(words)
    )
    assert_quantized_equal(apart, want, x)


def test_float64_elements_far_below_amax_round_up_with_the_draw_zero_only():
    x = np.array([[2.0**1000, 5e-324, 5e-324, -5e-324]])
    words = np.array([[0, 0, 1, 0]], np.uint32)
    want = quantize_by_fractions(x, "MXFP4", rounding="STOCHASTIC", random_words=words)
    assert want.codes.tolist() == [[7, 1, 0, 9]]
    assert_quantized_equal(quantize_as_named(x, "MXFP4", rounding="STOCHASTIC", random_words=words), want, x)


def test_stochastic_rounding_of_float64_sees_all_its_bits():
    x = np.array([[6.0, 0.25 + 2**-33, 0.25 + 2**-34, 0.25]])
    words = np.full((1, 4), 2**31, np.uint32)
    want = quantize_by_fractions(x, "MXFP4", rounding="STOCHASTIC", random_words=words)
    assert_quantized_equal(quantize_as_named(x, "MXFP4", rounding="STOCHASTIC", random_words=words), want)
    assert want.codes.tolist() == [[7, 1, 1, 0]]


def test_stochastic_rounding_is_unbiased():
    x = np.full((1000, 32), 1.3, np.float32)
    x[:, 0] = 6
    t = quantize(x, MXFP4, rounding=Rounding.STOCHASTIC, random_bits=philox_bits(1, x.shape))
    assert abs(t.dequantize()[:, 1:].mean() - 1.3) < 4 * np.sqrt(0.3 * 0.2 / 31_000)


# ------------------------------------------------------------------------------------------------------ large sweeps
@pytest.mark.parametrize("name", [*MX, *FP8])
@EACH_RULE
def test_the_table_is_the_oracle(name, rule):
    axis = -2 if name == "FP8_128X1" else -1
    x = adversarial_blocks(LAYOUTS[name].element, rule, -124, np.float32, size=size_of(name) % 100 or 32)[:6]
    x = x.T if axis == -2 else x
    want = quantize_by_fractions(x, name, axis=axis, rule=rule)
    got = quantize_by_table(x, name, axis=axis, rule=rule)
    assert (got.codes == want.codes).all()
    assert (got.scales == want.scales).all()


@pytest.mark.parametrize("name", POWER_OF_TWO)
@EACH_RULE
def test_random_bit_patterns_under_every_rounding(name, rule):
    for seed, rounding in enumerate(oracle.ROUNDINGS):
        shape = (64, 4 * size_of(name))
        x = random_bit_patterns(shape, seed)
        words = philox_bits(seed, shape) if rounding == "STOCHASTIC" else None
        k = 5 + seed
        want = quantize_by_table(x, name, rule=rule, rounding=rounding, random_words=words, k=k)
        got = quantize_as_named(x, name, rule=rule, rounding=rounding, random_words=words, k=k)
        assert_quantized_equal(got, want, x, f"{name} {rule} {rounding}")


@pytest.mark.parametrize("name", POWER_OF_TWO)
@EACH_RULE
def test_hard_blocks_of_every_binade_under_every_rounding(name, rule):
    # Blocks made at 2**0 and moved, in float64 and rounded to float32: where they become subnormal, new ties arise.
    blocks = adversarial_blocks(LAYOUTS[name].element, rule, 0, np.float32, size=size_of(name)).astype(np.float64)
    with np.errstate(under="ignore"):
        x = np.concatenate([np.ldexp(blocks[e % 9 :: 9], e).astype(np.float32) for e in range(-149, 128)])
    for rounding in oracle.DETERMINISTIC_ROUNDINGS:
        want = quantize_by_table(x, name, rule=rule, rounding=rounding)
        got = quantize_as_named(x, name, rule=rule, rounding=rounding)
        assert_quantized_equal(got, want, x, f"{name} {rule} {rounding}")


@pytest.mark.parametrize("name, rule", [*zip(MX, ["FLOOR", "RCEIL", "CEIL", "EVEN", "RCEIL", "EVEN"], strict=True)])
def test_every_BF16_value_as_amax_and_as_element(name, rule):
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[(np.arange(2**16) & 0x7F80) != 0x7F80]
    ordered = np.sort(np.abs(finite)).repeat(32).reshape(-1, 32)  # one block a magnitude
    ordered[:, 1:] = np.random.default_rng(0).choice(finite, (len(ordered), 31))
    ordered[:, 1:] = np.where(np.abs(ordered[:, 1:]) <= ordered[:, :1], ordered[:, 1:], ordered[:, :1] * finite[300])
    near = np.sort(finite)[: len(finite) // 32 * 32].reshape(-1, 32)  # neighbours share a block
    x = np.concatenate([ordered, near])
    assert_quantized_equal(quantize_as_named(x, name, rule=rule), quantize_by_table(x, name, rule=rule), x)


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_a_scalar_is_refused(fmt):
    with pytest.raises(ValueError, match=r"quantize: the tensor has 0 axes, needed at least [12] for"):
        quantize(1.0, fmt)


@pytest.mark.parametrize("name", ["FP8_128X1", "FP8_128X128"])
def test_a_vector_has_no_columns_and_no_tiles(name):
    with pytest.raises(ValueError, match=f"quantize: the tensor has 1 axes, needed at least 2 for {name}"):
        quantize(np.ones(5), BLOCK_FORMATS[name])


@pytest.mark.parametrize("axis", [2, -3, 100])
def test_an_axis_that_is_not_there_is_refused(axis):
    with pytest.raises(ValueError, match=rf"quantize: axis is {axis}, needed -2 to 1 for a tensor of 2 axes"):
        quantize(np.ones((2, 3)), MXFP4, axis=axis)


def test_an_axis_that_does_not_fit_the_block_is_refused():
    x = np.ones((2, 3, 4))
    for axis in (0, -3):
        with pytest.raises(ValueError, match="axis is -3, but blocks of FP8_128X128 cover the last two axes"):
            quantize(x, FP8_128X128, axis=axis)
    for axis in (0, 2, -1):
        with pytest.raises(ValueError, match=r"axis is -[13], needed -2 for FP8_128X1, whose blocks run down a column"):
            quantize(x, BLOCK_FORMATS["FP8_128X1"], axis=axis)


@pytest.mark.parametrize("axis", ["0", 1.0, [0]])
def test_an_axis_that_is_no_integer_is_refused(axis):
    with pytest.raises(TypeError, match="axis"):
        quantize(np.ones((2, 3)), MXFP4, axis=axis)


def test_NVFP4_has_no_rule_and_FP32_scales_have_none():
    for rule in RULES:
        with pytest.raises(ValueError, match=f"quantize: scale_rule is {rule.name}, but the scales of NVFP4 are no"):
            quantize(np.ones(16), NVFP4, scale_rule=rule)
        with pytest.raises(ValueError, match=f"quantize: scale_rule is {rule.name}, but the scales of FP8_1X128"):
            quantize(np.ones(128), FP8_1X128, scale_rule=rule, scale_order=ScaleOrder.TE)


@pytest.mark.parametrize(
    "name, order, needed",
    [
        ("MXFP4", "TE", "needed None for MXFP4"),
        ("MXINT8", "PAPER", "needed None for MXINT8"),
        ("NVFP4", "DEEPGEMM", "needed None or PAPER or TE for NVFP4"),
        ("FP8_1X128", "PAPER", "needed None or TE or DEEPGEMM for FP8_1X128"),
    ],
)
def test_an_order_that_a_format_does_not_have_is_refused(name, order, needed):
    with pytest.raises(ValueError, match=f"quantize: scale_order is {order}, {needed}"):
        quantize(np.ones(16), BLOCK_FORMATS[name], scale_order=ScaleOrder[order])


@pytest.mark.parametrize(
    "x",
    [1j * np.ones(3), np.array(["1"]), np.array([None]), np.array([True]), np.ones(3, np.longdouble), [[1.0], ["a"]]],
    ids=["complex", "text", "object", "bool", "longdouble", "mixed"],
)
def test_what_is_no_real_number_is_refused(x):
    with pytest.raises(TypeError, match=r"quantize: x has dtype .*, needed a real floating-point array"):
        quantize(x, MXFP4)


def test_integers_that_float64_does_not_hold_are_refused():
    assert quantize([2**53, -(2**53)], MXFP4).codes.tolist() == [6, 14]
    with pytest.raises(ValueError, match=r"quantize: x holds an integer beyond 2\*\*53"):
        quantize([2**53 + 1], MXFP4)


def test_stochastic_rounding_needs_bits_of_the_shape_of_x():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="random_bits"):
        quantize(x, MXFP4, rounding=Rounding.STOCHASTIC)
    with pytest.raises(ValueError, match=r"quantize: random_bits has shape \(3, 2\), needed \(2, 3\)"):
        quantize(x, MXFP4, rounding=Rounding.STOCHASTIC, random_bits=philox_bits(0, (3, 2)))
    with pytest.raises(ValueError, match="random_bits"):
        quantize(x, MXFP4, random_bits=philox_bits(0, (2, 3)))
    for k in (0, 33, -1):
        with pytest.raises(ValueError, match=f"num_random_bits is {k}, needed 1 to 32"):
            quantize(x, MXFP4, rounding=Rounding.STOCHASTIC, random_bits=philox_bits(0, (2, 3)), num_random_bits=k)


@pytest.mark.parametrize(
    "name, value",
    [("scale_rule", "rceil"), ("rounding", "up"), ("nonfinite", "raise"), ("scale_order", "te"), ("scale_rule", 0)],
)
def test_a_choice_that_is_no_member_of_its_enum_is_refused(name, value):
    with pytest.raises(TypeError, match=f"quantize: {name} is {value!r}, needed"):
        quantize(np.ones((2, 40), np.float32), MXFP4, **{name: value})


@pytest.mark.parametrize("fmt", [E2M1, "MXFP4", None], ids=["element", "name", "None"])
def test_a_format_that_is_no_BlockFormat_is_refused(fmt):
    with pytest.raises(TypeError, match=r"quantize: fmt is .*, needed a BlockFormat"):
        quantize(np.ones(3), fmt)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rounding": Rounding.STOCHASTIC}, ValueError),
        ({"rounding": Rounding.STOCHASTIC, "random_bits": np.zeros((0, 32))}, TypeError),
        ({"random_bits": np.zeros((0, 32), np.uint32)}, ValueError),
    ],
)
def test_an_empty_tensor_does_not_hide_a_wrong_choice(options, error):
    with pytest.raises(error):
        quantize(np.zeros((0, 32)), MXFP4, **options)


def test_a_thread_that_flushes_subnormals_is_refused_not_wrong():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="quantize: this thread flushes subnormal numbers to zero"):
            quantize([1e-40] * 32, MXFP4)
    finally:
        torch.set_flush_denormal(False)
    assert quantize([1e-40] * 32, MXFP4).scales.tolist() == [0]
