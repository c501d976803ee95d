"""The walk through a dot product adds up, and arrives where `fp8_gemm` does."""

from fractions import Fraction

import numpy as np
import pytest

from mxsim.analysis.dot_trace import trace_dot
from mxsim.blocks import FP8_1X128, FP8_128X128, HOPPER, BlockTensor, fp8_gemm, quantize
from mxsim.formats import E4M3, E5M2, encode
from tests.blocks import oracle_gemm as oracle
from tests.blocks.gemm_cases import ACCUMULATORS, case


def test_two_steps_by_hand():
    values = np.zeros((1, 64))
    values[0, [0, 1, 2, 40]] = [256, 2.0**-6, 1.5 * 2.0**-5, 3]
    ones = np.ones((1, 1), np.float32)
    a, b = (BlockTensor(encode(x, E4M3), ones, FP8_1X128) for x in (values, np.ones((1, 64))))
    t = trace_dot(a, b)
    first, second = t.spans[0].steps
    assert (first.start, first.stop, first.exponent, first.quantum) == (0, 32, 8, 2.0**-5)
    assert first.products == 256 + 2.0**-6 + 1.5 * 2.0**-5
    assert (first.num_products, first.num_cut, first.num_vanished) == (3, 2, 1)
    assert (first.lost_in_terms, first.lost_in_sum) == (2.0**-6 + 0.5 * 2.0**-5, 0)
    assert (second.c_before, second.exponent, second.num_products) == (first.c_after, 8, 1)
    assert (t.result, t.exact, t.spans[0].lost) == (259 + 2.0**-5, 259 + 2.0**-4, 2.0**-5)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2)], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
@pytest.mark.parametrize("codes", ["wide", "cancelling", "largest beside smallest", "zeros"])
def test_steps_add_up_and_end_in_d(codes, accumulator, formats):
    a, b = case(codes, "float32 near 1", 1, 1, 300, seed=3, formats=formats).operands()
    t = trace_dot(a, b, accumulator=accumulator)
    assert t.result == fp8_gemm(a, b, accumulator=accumulator)[0, 0] == t.spans[-1].sum_after
    rule = oracle.Rule(
        accumulator.products_per_step,
        accumulator.fraction_bits,
        accumulator.term_rounding and accumulator.term_rounding.name,
        accumulator.sum_rounding.name,
    )
    elements_of = tuple(oracle.ELEMENTS[fmt.name] for fmt in formats)
    for span in t.spans:
        stop = span.steps[-1].stop
        elements = slice(span.steps[0].start, stop)
        codes_of = (x.codes[0, elements].tolist() for x in (a, b))
        assert span.d == oracle.accumulate(*codes_of, rule, elements_of)
        c = Fraction(0)
        for step in span.steps:
            assert step.c_before == c
            c = c + step.products - step.lost_in_terms - step.lost_in_sum
            assert step.c_after == c
        assert span.d == c
    lost = sum((span.lost for span in t.spans), Fraction(0))
    exact = sum((s.d * Fraction(s.scale_a) * Fraction(s.scale_b) for s in t.spans), Fraction(0))
    assert t.exact == exact + lost


def test_refused():
    t = quantize(np.ones((1, 128)), FP8_1X128)
    with pytest.raises(ValueError, match="a and b have 2 and 1 rows, needed 1 each"):
        trace_dot(quantize(np.ones((2, 128)), FP8_1X128), t)
    with pytest.raises(ValueError, match="b is FP8_128X128, needed FP8_1X128"):
        trace_dot(t, quantize(np.ones((1, 128)), FP8_128X128))
    with pytest.raises(ValueError, match="b holds NaN or infinities"):
        trace_dot(t, BlockTensor(t.codes, np.float32([[np.inf]]), FP8_1X128), accumulator=HOPPER)
