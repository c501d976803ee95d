"""What the generators claim to cover, counted."""

import numpy as np
import pytest

from mxsim.blocks import ScaleRule
from mxsim.formats import E2M1, E4M3, Rounding, unpack
from mxsim.validate import OPS
from mxsim.validate.cases import SizesForm, View
from mxsim.validate.generators import Size, cases_of
from mxsim.validate.reference import expected


def _case(op, name):
    (case,) = [c for c in cases_of(op, Size.FULL, "cpu") if c.name == name]
    return case


@pytest.mark.parametrize("rule", ScaleRule)
def test_every_bf16_value_meets_every_mxfp4_scale(rule):
    """All finite values that a scale allows: those up to the largest amax with that scale."""
    case = _case("bf16_to_fp4_row", f"every BF16 value at every scale, {rule.name}")
    inputs = case.inputs()
    x = inputs["x"]
    scales = expected(case.op, inputs, dict(case.options))[1].bits
    met = np.zeros((256, 2**16), bool)
    met[np.repeat(scales, 32, axis=-1), x] = True
    largest = np.array([int(met[s, :0x7F80].nonzero()[0].max(initial=-1)) for s in range(256)])
    reachable = np.flatnonzero(largest >= 0)
    assert reachable.size >= 252
    assert largest.max() == 0x7F7F
    assert np.all(np.diff(largest[reachable]) > 0)
    for scale in reachable:
        for sign in (0, 0x8000):
            assert met[scale, sign : sign + largest[scale] + 1].all()


@pytest.mark.parametrize("op", ["bf16_to_fp8_row", "bf16_to_fp8_col"])
def test_every_bf16_value_meets_every_fp8_scale(op):
    case = _case(op, "every BF16 value at every scale")
    inputs = case.inputs()
    leaves = expected(op, inputs, {})
    x = inputs["x"]
    scale_bits = np.repeat(leaves[1].bits, 128, axis=-1 if op.endswith("row") else 0)
    assert scale_bits.shape == x.shape
    biased = (scale_bits >> 23).astype(np.int64)
    met = np.zeros((256, 2**16), bool)
    met[biased, x] = True
    for scale in np.flatnonzero(met.any(axis=1)):
        largest = int(met[scale, :0x7F80].nonzero()[0].max())
        assert met[scale, : largest + 1].all()
        assert met[scale, 0x8000 : 0x8001 + largest].all()
    assert np.flatnonzero(met.any(axis=1)).size >= 246


@pytest.mark.parametrize("op", ["fp4_row_to_fp8_row", "fp4_row_to_fp8_col"])
def test_every_fp4_code_meets_every_pair_of_scales(op):
    """(largest scale of the block, own scale, code), for all headrooms."""
    names = [c.name for c in cases_of(op, Size.FULL, "cpu")]
    assert [n for n in names if "every pair" in n] == [
        f"every code at every pair of scales, headroom {h}" for h in range(7)
    ]
    inputs = _case(op, "every code at every pair of scales, headroom 6").inputs()
    scales = inputs["scales"].astype(np.int64)
    codes = unpack(inputs["codes"], E2M1, 32 * scales.shape[1])
    if op.endswith("row"):
        blocks = scales.reshape(-1, 4)
        ignored = np.where(blocks == 255, -1, blocks)
        largest = np.repeat(ignored.max(axis=1), 4).reshape(scales.shape)
    else:
        blocks = scales.reshape(-1, 128, scales.shape[1])
        ignored = np.where(blocks == 255, -1, blocks)
        largest = np.repeat(ignored.max(axis=1), 128, axis=0)
    met = np.zeros((256, 256, 16), bool)
    met[np.repeat(largest, 32, axis=-1), np.repeat(scales, 32, axis=-1), codes] = True
    for top in range(255):
        assert met[top, : top + 1].all()
    assert met[:, 255].any(axis=0).all()


def test_every_e4m3_code_meets_every_pair_of_scales():
    inputs = _case("fp8_row_to_fp8_col", "every code at every pair of scales").inputs()
    exponents = np.frexp(inputs["scales"])[1] + 148  # 2**-149 is 0
    blocks = exponents.reshape(-1, 128, exponents.shape[1])
    largest = np.repeat(blocks.max(axis=1), 128, axis=0)
    met = np.zeros((277, 277, 256), bool)
    met[np.repeat(largest, 128, axis=-1), np.repeat(exponents, 128, axis=-1), inputs["codes"]] = True
    for top in range(277):
        assert met[top, : top + 1].all()


def test_every_e4m3_code_meets_every_amax_at_every_scale():
    inputs = _case("fp8_row_to_fp4_row", "every code and amax at every scale, FLOOR").inputs()
    codes = inputs["codes"].reshape(-1, 32)
    exponents = np.repeat(np.frexp(inputs["scales"])[1] + 148, 4, axis=-1).reshape(-1)
    amax = (codes & 0x7F).max(axis=1)
    met = np.zeros((277, 128, 256), bool)
    met[exponents[:, None], amax[:, None], codes] = True
    for largest in range(E4M3.max_code + 1):
        assert met[:, largest, : largest + 1].all()
        assert met[:, largest, 0x80 : 0x81 + largest].all()


@pytest.mark.parametrize("op", OPS)
def test_names_are_unique_and_inputs_repeatable(op):
    for size in Size:
        cases = cases_of(op, size, "cuda")
        names = [c.name for c in cases]
        assert len(set(names)) == len(names)
    for case in cases_of(op, Size.QUICK, "cpu")[-8:]:
        first, second = case.inputs(), case.inputs()
        assert all(first[k].tobytes() == second[k].tobytes() for k in first)


@pytest.mark.parametrize("op", OPS)
def test_options_views_and_forms_are_all_there(op):
    cases = cases_of(op, Size.FULL, "cpu")
    if op not in ("bf16_to_fp8_tile", "fp4_to_bf16", "fp8_row_to_fp4_row", "bf16_to_fp4_row"):
        assert {c.sizes_form for c in cases if "group_sizes" in c.options} == set(SizesForm)
    views = set(View) - ({View.SMALL_FLOATS} if op.startswith("bf16") else set())
    views -= {View.LEADING_AXES} if op.endswith("tile") else set()
    assert {c.view for c in cases} == views
    with_rule = op in ("bf16_to_fp4_row", "fp8_row_to_fp4_row", "bf16_to_fp4_and_fp8_row")
    rules = {c.options.get("scale_rule", ScaleRule.FLOOR) for c in cases}
    assert rules == (set(ScaleRule) if with_rule else {ScaleRule.FLOOR})


@pytest.mark.parametrize("op", ["bf16_to_fp4_row", "bf16_to_fp8_row", "bf16_to_fp4_and_fp8_row"])
def test_stochastic_cases_draw_from_many_seeds_and_are_never_repeated(op):
    for size in Size:
        cases = [c for c in cases_of(op, size, "cuda") if c.name.startswith("stochastic: ")]
        assert {c.options["rounding"] for c in cases} == {Rounding.STOCHASTIC}
        seeds = {c.options["seed"] for c in cases}
        assert {0, 2**32, 2**63, 2**64 - 1} <= seeds
        assert all(c.repeat == 1 and not c.bad_input for c in cases)
        assert any("every BF16 value at every scale" in c.name for c in cases)
        assert (op == "bf16_to_fp4_row") != any("group_sizes" in c.options for c in cases)


def test_only_ops_that_round_a_source_are_stochastic():
    with_seed = {op for op in OPS if any("seed" in c.options for c in cases_of(op, Size.QUICK, "cpu"))}
    assert with_seed == {"bf16_to_fp4_row", "bf16_to_fp8_row", "bf16_to_fp4_and_fp8_row"}
