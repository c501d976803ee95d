"""One dot product of a block-scaled FP8 GEMM, step by step: where its bits went. Data only."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mxsim.blocks import FP8_1X128, HOPPER, Accumulator, BlockTensor, fp8_gemm
from mxsim.formats import FloatFormat, Rounding, decode

_BLOCK = FP8_1X128.block_size


@dataclass(frozen=True)
class Step:
    """One instruction: c_after = c_before + products - lost_in_terms - lost_in_sum, all of it exact.

    exponent: E, the largest exponent among the terms; None: all are 0, or nothing is rounded.
    quantum: q = 2**(E - fraction_bits), what terms are rounded to.
    products: exact sum of the products. num_products, num_cut, num_vanished: of the non-zero ones, how many there are,
        how many of them lose bits, and how many of these become 0.
    lost_in_terms, lost_in_sum: by rounding the terms (c among them), and then their sum.
    """

    start: int
    stop: int
    exponent: int | None
    quantum: Fraction | None
    c_before: Fraction
    products: Fraction
    num_products: int
    num_cut: int
    num_vanished: int
    lost_in_terms: Fraction
    lost_in_sum: Fraction
    c_after: Fraction


@dataclass(frozen=True)
class Span:
    """The steps between two promotions; sum_after is the float32 sum, which has taken in d * scale_a * scale_b."""

    steps: tuple[Step, ...]
    d: Fraction
    scale_a: float
    scale_b: float
    sum_after: float

    @property
    def lost(self) -> Fraction:
        """What the steps lost, times the scales."""
        steps = sum((s.lost_in_terms + s.lost_in_sum for s in self.steps), Fraction(0))
        return steps * Fraction(self.scale_a) * Fraction(self.scale_b)


@dataclass(frozen=True)
class DotTrace:
    """A dot product: result, the exact one of the same codes and scales, and the way there."""

    accumulator: Accumulator
    spans: tuple[Span, ...]
    result: float
    exact: Fraction


def trace_dot(a: BlockTensor, b: BlockTensor, *, accumulator: Accumulator = HOPPER) -> DotTrace:
    """Walk through fp8_gemm(a, b, accumulator=accumulator) of one row each.

    Args:
        a, b: FP8_1X128 [1, K], or such blocks of E5M2; finite.

    Raises:
        ValueError: if they are not finite or not one row each; and what `fp8_gemm` refuses.

    >>> from mxsim.blocks import quantize
    >>> t = trace_dot(quantize([[256.0] + [2.0**-6] * 31], FP8_1X128), quantize(np.ones((1, 32)), FP8_1X128))
    >>> step = t.spans[0].steps[0]
    >>> step.exponent, step.num_vanished, t.result, float(t.exact)
    (16, 31, 256.0, 256.484375)
    """
    products = fp8_gemm(a, b, accumulator=accumulator)
    if products.shape != (1, 1):
        raise ValueError(f"trace_dot: a and b have {a.shape[0]} and {b.shape[0]} rows, needed 1 each")
    if b.format.is_tile:
        raise ValueError(f"trace_dot: b is {b.format}, needed FP8_1X128")
    for name, t in (("a", a), ("b", b)):
        if not np.isfinite(t.dequantize(np.float64)).all():
            raise ValueError(f"trace_dot: {name} holds NaN or infinities, needed finite numbers")
    depth = a.shape[1]
    length = accumulator.promotion_interval or max(depth, 1)
    spans = []
    for start in range(0, depth, length):
        stop = min(start + length, depth)
        factors_a, factors_b = (_factors(t.codes[0, start:stop], t.format.element) for t in (a, b))
        steps = _steps(factors_a, factors_b, start, accumulator)
        # The float32 sum so far is that of the GEMM over the first `stop` elements.
        head = [BlockTensor(t.codes[:, :stop], t.scales[:, : -(-stop // _BLOCK)], t.format) for t in (a, b)]
        so_far = float(fp8_gemm(*head, accumulator=accumulator)[0, 0])
        scales = (float(t.scales[0, start // _BLOCK]) for t in (a, b))
        spans.append(Span(steps, steps[-1].c_after, *scales, so_far))
    values = (t.dequantize(np.float64)[0].tolist() for t in (a, b))
    exact = sum((Fraction(x) * Fraction(y) for x, y in zip(*values, strict=True)), Fraction(0))
    return DotTrace(accumulator, tuple(spans), float(products[0, 0]), exact)


_Factor = tuple[Fraction, int]  # value, e(x)


def _factors(codes: np.ndarray, fmt: FloatFormat) -> list[_Factor]:
    """e(x) = floor(log2 |x|), but at least that of the smallest normal number."""
    values = [Fraction(x) for x in decode(codes, fmt).tolist()]
    return [(x, max(_floor_log2(x), fmt.emin) if x else fmt.emin) for x in values]


def _steps(a: list[_Factor], b: list[_Factor], first: int, accumulator: Accumulator) -> tuple[Step, ...]:
    products = [(x * y, e_x + e_y) for (x, e_x), (y, e_y) in zip(a, b, strict=True)]
    steps = []
    c = Fraction(0)
    for start in range(0, len(products), accumulator.products_per_step):
        stop = min(start + accumulator.products_per_step, len(products))
        terms = [(p, e) for p, e in products[start:stop] if p != 0]
        step = _step(first + start, first + stop, terms, c, accumulator)
        c = step.c_after
        steps.append(step)
    return tuple(steps)


def _step(start: int, stop: int, terms: list[tuple[Fraction, int]], c: Fraction, accumulator: Accumulator) -> Step:
    products = [p for p, _ in terms]
    exact = sum(products, c)
    exponents = [e for _, e in terms] + ([_floor_log2(c)] if c else [])
    bits = accumulator.fraction_bits
    exponent = max(exponents) if exponents and bits is not None else None
    if exponent is None or bits is None:
        return Step(start, stop, None, None, c, exact - c, len(products), 0, 0, Fraction(0), Fraction(0), exact)
    quantum = None if accumulator.term_rounding is None else Fraction(2) ** (exponent - bits)
    kept = [_round(x, quantum, accumulator.term_rounding) for x in products]
    total = sum(kept, _round(c, quantum, accumulator.term_rounding))
    ulp = Fraction(2) ** (_floor_log2(total) - bits) if total else None
    after = _round(total, ulp, accumulator.sum_rounding)
    num_cut = sum(x != y for x, y in zip(products, kept, strict=True))
    return Step(
        start=start,
        stop=stop,
        exponent=exponent,
        quantum=quantum,
        c_before=c,
        products=exact - c,
        num_products=len(products),
        num_cut=num_cut,
        num_vanished=kept.count(Fraction(0)),
        lost_in_terms=exact - total,
        lost_in_sum=total - after,
        c_after=after,
    )


def _floor_log2(x: Fraction) -> int:
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= abs(x) else exponent - 1


def _round(x: Fraction, quantum: Fraction | None, rounding: Rounding | None) -> Fraction:
    """x rounded to a multiple of quantum; None: x."""
    if quantum is None or rounding is None:
        return x
    units = x / quantum
    return quantum * (round(units) if rounding is Rounding.TIES_TO_EVEN else int(units))
