"""Cases of the FP8 GEMM: shapes, the codes and scales that strain its arithmetic, and what is sampled.

Operands are drawn on the device, since the largest have 10**8 codes: they follow from the case's name and the type of
the device.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

import torch
from torch import Tensor

from mxsim.blocks import HOPPER, Accumulator
from mxsim.formats import E4M3, E5M2, FloatFormat
from mxsim.validate.generators import Size

SCALED_MM = "scaled_mm"  # the name of the op
BLOCK = 128
_FP8_NAN = 0x7F
_SIGN = 0x80
Elements = tuple[FloatFormat, FloatFormat]  # of a and b
_DTYPE_OF = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


class GemmLayout(Enum):
    """Which elements share a scale in a and in b, both [rows, K]."""

    ROWS = "1x128 by 1x128"
    TILES = "1x128 by 128x128"
    TENSOR = "tensor-wise"  # all; it is 1


class Accumulation(Enum):
    """What torch's use_fast_accum chooses between, where there is no scale to promote for."""

    PROMOTED = "promoted"
    FAST = "fast"


@dataclass(frozen=True)
class Operands:
    """uint8 codes and float32 scales: a [m, k], [m, k/128]; b [n, k], [n, k/128] or by tiles [n/128, k/128].

    layout says in which order scales multiply. Sampled tiles keep their layout and have a scale for every row.
    """

    a: Tensor
    a_scales: Tensor
    b: Tensor
    b_scales: Tensor
    layout: GemmLayout
    elements: Elements = (E4M3, E4M3)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order that `kernels.fp8_gemm_emulated` takes them; codes of E5M2 as float8_e5m2."""
        a, b = (
            x.view(torch.float8_e5m2) if fmt == E5M2 else x
            for x, fmt in zip((self.a, self.b), self.elements, strict=True)
        )
        return a, self.a_scales, b, self.b_scales

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order that a candidate takes them; tensor-wise scales have no axes."""
        a, a_scales, b, b_scales = self.tensors
        if self.layout is GemmLayout.TENSOR:
            return a, a_scales.new_ones(()), b, b_scales.new_ones(())
        return a, a_scales, b, b_scales

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)"""
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]

    def select(self, rows: Tensor, columns: Tensor) -> "Operands":
        """The operands of these rows and columns of the result."""
        has_tiles = self.b_scales.shape[0] != self.b.shape[0]
        b_scales = self.b_scales[columns // BLOCK if has_tiles else columns]
        return Operands(self.a[rows], self.a_scales[rows], self.b[columns], b_scales, self.layout, self.elements)

    def first_rows(self, count: int) -> "Operands":
        """The operands of the first rows of the result."""
        return replace(self, a=self.a[:count], a_scales=self.a_scales[:count])

    def cpu(self) -> "Operands":
        """On the CPU."""
        return replace(self, a=self.a.cpu(), a_scales=self.a_scales.cpu(), b=self.b.cpu(), b_scales=self.b_scales.cpu())


class Draw:
    """Random tensors of one case."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32."""
        return torch.randn(shape, device=self.device, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, device=self.device, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """In [low, high)."""
        return torch.randint(low, high, shape, device=self.device, generator=self._generator, dtype=dtype)

    def some(self, size: int, most: int) -> Tensor:
        """Ascending indices below size: all of them, or `most`, the first and the last among them."""
        if size <= most:
            return torch.arange(size, device=self.device)
        inner = torch.randperm(size - 2, device=self.device, generator=self._generator)[: most - 2] + 1
        return torch.cat([inner, torch.tensor([0, size - 1], device=self.device)]).sort().values


# --------------------------------------------------------------------------------------------------------------- codes
_Codes = tuple[Tensor, Tensor]


def _max_code(fmt: FloatFormat) -> int:
    return 0x7E if fmt == E4M3 else 0x7B


def _encoded(x: Tensor, fmt: FloatFormat) -> Tensor:
    return x.clamp(-fmt.max_finite, fmt.max_finite).to(_DTYPE_OF[fmt]).view(torch.uint8)


def _signed(draw: Draw, magnitudes: Tensor) -> Tensor:
    return magnitudes | draw.integers(0, 2, *magnitudes.shape, dtype=torch.uint8) << 7


def _each(make: Callable[[Draw, int, int, FloatFormat], Tensor]) -> Callable[[Draw, int, int, int, Elements], _Codes]:
    """Both operands alike."""
    return lambda draw, m, n, k, elements: (make(draw, m, k, elements[0]), make(draw, n, k, elements[1]))


def _wide(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    binades = (-10, 8) if fmt == E4M3 else (-18, 15)
    return _encoded(draw.normal(rows, k) * torch.exp2(draw.integers(*binades, rows, k).float()), fmt)


def _sparse(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    return _encoded(draw.normal(rows, k) * 50 * (draw.uniform(rows, k) < 0.02), fmt)


def _any_number(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    codes = draw.integers(0, 256, rows, k, dtype=torch.uint8)
    return torch.where(codes & _FP8_NAN > _max_code(fmt), 0, codes)


def _subnormal(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    return _signed(draw, draw.integers(0, 1 << fmt.mantissa_bits, rows, k, dtype=torch.uint8))


def _largest(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    return _signed(draw, torch.full((rows, k), _max_code(fmt), dtype=torch.uint8, device=draw.device))


def _largest_beside_smallest(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    return _signed(draw, torch.where(draw.integers(0, 2, rows, k) == 0, 0x01, _max_code(fmt)).to(torch.uint8))


def _cancelling(distance: int) -> Callable[[Draw, int, int, int, Elements], _Codes]:
    """Each product meets its negative, up to a rounding or two, `distance` places later."""

    def make(draw: Draw, m: int, n: int, k: int, elements: Elements) -> _Codes:
        a, b = (draw.normal(rows, k // (2 * distance), distance) * 40 for rows in (m, n))
        almost = 1 + draw.normal(*a.shape) * 0.03
        return (
            _encoded(torch.stack([a, -a * almost], dim=2).reshape(m, k), elements[0]),
            _encoded(torch.stack([b, b], dim=2).reshape(n, k), elements[1]),
        )

    return make


def _with_specials(draw: Draw, rows: int, k: int, fmt: FloatFormat) -> Tensor:
    """One code of every eighth row is NaN or, of E5M2, an infinity in turn; there two of every other eighth are."""
    codes = _encoded(draw.normal(rows, k) * 40, fmt)
    kinds = [_FP8_NAN, _FP8_NAN | _SIGN] if fmt == E4M3 else [0x7F, 0x7C, 0xFD, 0xFC]
    chosen = codes[3::8]
    specials = torch.tensor(kinds, dtype=torch.uint8, device=draw.device).repeat(-(-max(len(chosen), 1) // len(kinds)))
    chosen.scatter_(1, draw.integers(0, k, len(chosen), 1), specials[: len(chosen), None])
    if fmt == E5M2:
        codes[draw.uniform(rows, k) < 0.01] &= _SIGN  # zeros for infinities to meet
        pairs = codes[5::8]
        infinities = _signed(draw, torch.full((len(pairs), 2), 0x7C, dtype=torch.uint8, device=draw.device))
        pairs.scatter_(1, draw.integers(0, k, len(pairs), 2), infinities)
    return codes


CODES: dict[str, Callable[[Draw, int, int, int, Elements], _Codes]] = {
    "normal": _each(lambda draw, rows, k, fmt: _encoded(draw.normal(rows, k) * 40, fmt)),
    "wide range": _each(_wide),
    "all positive": _each(lambda draw, rows, k, fmt: _encoded(draw.uniform(rows, k) * 400, fmt)),
    "all subnormal": _each(_subnormal),
    "sparse": _each(_sparse),
    "random codes": _each(_any_number),
    "+-largest": _each(_largest),
    "largest beside smallest": _each(_largest_beside_smallest),
    "cancelling in a step": _cancelling(1),
    "cancelling between steps": _cancelling(64),
}


# -------------------------------------------------------------------------------------------------------------- scales
def _exponents(low: int, high: int) -> Callable[[Draw, int, int], Tensor]:
    """Arbitrary significands; each row keeps to a few binades in [2**low, 2**high)."""

    def make(draw: Draw, rows: int, blocks: int) -> Tensor:
        exponents = draw.integers(low, high - 3, rows, 1) + draw.integers(0, 4, rows, blocks)
        return torch.ldexp(1 + draw.uniform(rows, blocks), exponents)

    return make


def _one_subnormal(draw: Draw, rows: int, blocks: int) -> Tensor:
    """Ones, and in each row one subnormal."""
    bits = torch.ones(rows, blocks, device=draw.device).view(torch.int32)
    subnormals = draw.integers(1, 1 << 23, rows, 1, dtype=torch.int32)
    return bits.scatter_(1, draw.integers(0, blocks, rows, 1), subnormals).view(torch.float32)


def _special(draw: Draw, rows: int, blocks: int) -> Tensor:
    """Every eighth row (the second of few) has one scale that is infinity, zero, -infinity or NaN."""
    scales = 1 + draw.uniform(rows, blocks)
    chosen = scales[5 if rows > 5 else 1 :: 8]
    values = torch.tensor([float("inf"), 0.0, float("-inf"), float("nan")], device=draw.device)
    kinds = torch.arange(len(chosen), device=draw.device)[:, None] % 4
    chosen.scatter_(1, draw.integers(0, blocks, len(chosen), 1), values[kinds])
    return scales


SCALES: dict[str, Callable[[Draw, int, int], Tensor]] = {
    "1": lambda draw, rows, blocks: torch.ones(rows, blocks, device=draw.device),
    "powers of two": lambda draw, rows, blocks: torch.exp2(draw.integers(-20, 21, rows, blocks).float()),
    "one subnormal": _one_subnormal,
    "any float32": lambda draw, rows, blocks: draw.uniform(rows, blocks) * 10 + 1e-3,
    "near overflow": _exponents(44, 70),
    "near underflow": _exponents(-92, -60),
}
_SPECIAL = "NaN and infinity"


# --------------------------------------------------------------------------------------------------------------- cases
@dataclass(frozen=True)
class GemmCase:
    """Compared are all outputs, or those of at most so many rows and columns."""

    m: int
    n: int
    k: int
    layout: GemmLayout
    out_dtype: torch.dtype
    codes: str
    scales: str
    most_rows: int = 1 << 30
    most_columns: int = 1 << 30
    elements: Elements = (E4M3, E4M3)
    accumulation: Accumulation = Accumulation.PROMOTED  # tensor-wise only

    op = SCALED_MM

    @property
    def shape(self) -> str:
        """ "MxNxK" """
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def name(self) -> str:
        """Says everything."""
        dtype = str(self.out_dtype).removeprefix("torch.")
        return f"{self.shape}, {self.kind}, {dtype}, {self.codes}, scales {self.scales}"

    @property
    def kind(self) -> str:
        """Layout, and elements and accumulation where they are not what block scales have."""
        is_tensor_wise = self.layout is GemmLayout.TENSOR
        elements = [" by ".join(map(str, self.elements))] if is_tensor_wise or self.elements != (E4M3, E4M3) else []
        return ", ".join([self.layout.value, *elements, *([self.accumulation.value] if is_tensor_wise else [])])

    @property
    def accumulator(self) -> Accumulator:
        """Of the model."""
        is_fast = self.accumulation is Accumulation.FAST
        return replace(HOPPER, name="Hopper, fast", promotion_interval=None) if is_fast else HOPPER

    @property
    def keywords(self) -> dict[str, bool]:
        """Of the candidate."""
        is_tensor_wise = self.layout is GemmLayout.TENSOR
        return {"use_fast_accum": self.accumulation is Accumulation.FAST} if is_tensor_wise else {}

    @property
    def is_whole(self) -> bool:
        """Whether every output is compared."""
        return self.m <= self.most_rows and self.n <= self.most_columns

    def operands(self, device: torch.device) -> Operands:
        """The same at every call."""
        draw = Draw(self.name, device)
        codes = _each(_with_specials) if self.codes == _SPECIAL else CODES[self.codes]
        a, b = codes(draw, self.m, self.n, self.k, self.elements)
        make = _special if self.scales == _SPECIAL else SCALES[self.scales]
        scale_rows = -(-self.n // BLOCK) if self.layout is GemmLayout.TILES else self.n
        blocks = self.k // BLOCK
        a_scales, b_scales = make(draw, self.m, blocks), make(draw, scale_rows, blocks)
        return Operands(a, a_scales, b, b_scales, self.layout, self.elements)

    def sample(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(rows, columns) to compare; None: all."""
        if self.is_whole:
            return None
        draw = Draw(f"sample of {self.name}", device)
        return draw.some(self.m, self.most_rows), draw.some(self.n, self.most_columns)


_TINY = ((4, 16, 128), (12, 48, 256), (64, 128, 384))
_SMALL = (*_TINY, (128, 256, 1024), (256, 128, 7168))
_MIDDLE = ((512, 512, 7168), (64, 4096, 7168), (16, 7168, 2048), (1004, 7168, 2048), (2048, 2048, 512))
_LARGE = ((4096, 2048, 7168), (4096, 7168, 4096), (8192, 4096, 7168), (8192, 7168, 2048), (8192, 7168, 7168))
_QUICK_LARGE = ((512, 512, 7168), (8192, 7168, 7168))
_MOST = 2048  # rows and columns of a large case
_MOST_ON_CPU = (16, 32)
_DTYPES = (torch.float32, torch.bfloat16)
_BLOCK_LAYOUTS = (GemmLayout.ROWS, GemmLayout.TILES)
# Tensor-wise: one 128-block, which shows the instruction, and more. NumPy checks the emulation of the first of each.
_ONE_BLOCK, _MORE_BLOCKS = ((16, 32, 128), (64, 128, 128)), ((16, 32, 256), (64, 128, 256), (128, 128, 512))


def gemm_cases(size: Size, device_type: str) -> list[GemmCase]:
    """What is compared on a device of this type."""
    if device_type != "cuda":
        cases = [*_all_pairs(_TINY[:2] if size is Size.QUICK else _TINY, size), *_special_cases(_TINY[2:])]
        if size is Size.FULL:
            cases += _each_codes(((128, 256, 1024),), _DTYPES[:1])
        return [_sampled(case, *_MOST_ON_CPU) for case in cases]
    if size is Size.QUICK:
        cases = [*_all_pairs(_SMALL, size), *_each_codes(_QUICK_LARGE, _DTYPES[:1])]
        return [_sampled(case, 512, 512) for case in (*cases, *_special_cases(_SMALL[2:]))]
    cases = [
        *_all_pairs(_SMALL, size),
        *_special_cases((*_SMALL[2:], (1004, 7168, 2048))),
        *_each_codes(_MIDDLE, _DTYPES),
        *(_sampled(case, _MOST, _MOST) for case in _each_codes(_LARGE, _DTYPES[:1])),
        *(_sampled(case, _MOST, _MOST) for case in _each_codes(_LARGE[-1:], _DTYPES[1:])),
    ]
    return list(cases)


def e5m2_cases(size: Size, device_type: str) -> list[GemmCase]:
    """E5M2 in one operand or both, block-scaled, and tensor-wise beside E4M3 alone: accumulators as they are.

    Tensor-wise K above 128 is compared with fast accumulation only: its one accumulator is the instruction's.
    """
    num = 1 if size is Size.QUICK else 3
    kinds = (*CODES, _SPECIAL)
    cases = []
    for of_a, of_b in product((E4M3, E5M2), repeat=2):
        elements = of_a, of_b
        if E5M2 in elements:
            for shape, layout, dtype in product(_TINY[:num], _BLOCK_LAYOUTS, _DTYPES):
                for i, codes in enumerate(kinds):
                    scales = (*SCALES, _SPECIAL)[i % (len(SCALES) + 1)]
                    cases.append(GemmCase(*shape, layout, dtype, codes, scales, elements=elements))
        plan = [*product(_ONE_BLOCK[:num], Accumulation), *product(_MORE_BLOCKS[:num], (Accumulation.FAST,))]
        for (shape, accumulation), dtype, codes in product(plan, _DTYPES, kinds):
            case = GemmCase(*shape, GemmLayout.TENSOR, dtype, codes, "1", elements=elements, accumulation=accumulation)
            cases.append(case)
    return cases if device_type == "cuda" else [_sampled(case, *_MOST_ON_CPU) for case in cases]


def _all_pairs(shapes: tuple[tuple[int, int, int], ...], size: Size) -> Iterator[GemmCase]:
    """Codes by scales; of the quick ones each once."""
    for shape, layout, dtype in product(shapes, _BLOCK_LAYOUTS, _DTYPES):
        if size is Size.QUICK:
            yield from _each_codes((shape,), (dtype,), (layout,), tuple(SCALES))
        else:
            yield from (GemmCase(*shape, layout, dtype, codes, scales) for codes, scales in product(CODES, SCALES))


def _each_codes(
    shapes: tuple[tuple[int, int, int], ...],
    dtypes: tuple[torch.dtype, ...],
    layouts: tuple[GemmLayout, ...] = _BLOCK_LAYOUTS,
    scales: tuple[str, ...] = ("any float32", "powers of two", "near overflow", "near underflow"),
) -> Iterator[GemmCase]:
    """Every kind of codes with one kind of scales, in turn; another one in the next shape or layout."""
    for i, (shape, layout, dtype) in enumerate(product(shapes, layouts, dtypes)):
        for j, codes in enumerate(CODES):
            yield GemmCase(*shape, layout, dtype, codes, scales[(i + j) % len(scales)])


def _special_cases(shapes: tuple[tuple[int, int, int], ...]) -> Iterator[GemmCase]:
    for shape, layout, dtype in product(shapes, _BLOCK_LAYOUTS, _DTYPES):
        yield GemmCase(*shape, layout, dtype, _SPECIAL, "1")
        yield GemmCase(*shape, layout, dtype, "normal", _SPECIAL)
        yield GemmCase(*shape, layout, dtype, _SPECIAL, _SPECIAL)


def _sampled(case: GemmCase, most_rows: int, most_columns: int) -> GemmCase:
    return replace(case, most_rows=most_rows, most_columns=most_columns)
