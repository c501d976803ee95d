"""Formats whose elements share a scale: element format, block shape, scale format."""

from dataclasses import dataclass

from mxsim.blocks.scale_rule import ScaleRule
from mxsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, INT8, FloatFormat


@dataclass(frozen=True)
class BlockFormat:
    """value = scale * element, one scale for each block of `block_shape` (rows, columns) elements.

    A block of one row or one column runs along any axis of a tensor; a tile covers the last two. Scales are stored as
    E8M0 or E4M3 codes (uint8), or as float32 where `scale` is FP32. `tensor_scaled` formats (NVFP4) multiply by one
    more float32 for the whole tensor.

    Raises:
        TypeError, ValueError: if a field is of another type, or blocks of these parts are not defined: an element of
            more than 8 bits or without a sign, a scale but E8M0 and FP32, `tensor_scaled` but E2M1 with scale E4M3.

    Source: OCP MX v1.0 section 5.1; NVFP4 and the FP8 blocks as in TransformerEngine and DeepGEMM.

    >>> MXFP4.bits_per_element, FP8_1X128.bits_per_element
    (4.25, 8.25)
    """

    name: str
    element: FloatFormat
    block_shape: tuple[int, int]
    scale: FloatFormat
    default_scale_rule: ScaleRule | None
    tensor_scaled: bool = False

    def __post_init__(self) -> None:
        for field, value in (("element", self.element), ("scale", self.scale)):
            if not isinstance(value, FloatFormat):
                raise TypeError(f"{self.name}: {field} is {value!r}, needed a FloatFormat")
        rule = self.default_scale_rule
        if not (rule is None or isinstance(rule, ScaleRule)):
            raise TypeError(f"{self.name}: default_scale_rule is {rule!r}, needed a ScaleRule or None")
        shape = self.block_shape
        if not (isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
            raise ValueError(f"{self.name}: block_shape is {shape!r}, needed two positive integers")
        if self.element.bits > 8 or not self.element.signed:
            raise ValueError(f"{self.name}: element is {self.element}, needed a signed format of at most 8 bits")
        if self.tensor_scaled and (self.element != E2M1 or self.scale != E4M3):
            raise ValueError(f"{self.name}: a tensor scale needs elements E2M1 and scales E4M3")
        if not self.tensor_scaled and self.scale not in (E8M0, FP32):
            raise ValueError(f"{self.name}: scale is {self.scale}, needed E8M0 or FP32")

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        return self.block_shape[0] * self.block_shape[1]

    @property
    def is_tile(self) -> bool:
        """Whether a block covers several rows and several columns."""
        return min(self.block_shape) > 1

    @property
    def default_axis(self) -> int:
        """Axis along which blocks run unless told otherwise: -2 for blocks of one column, else -1."""
        return -2 if self.block_shape[1] == 1 and not self.is_tile else -1

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element in whole blocks; a tensor scale is not counted."""
        return self.element.bits + self.scale.bits / self.block_size

    def block_lengths(self, ndim: int, axis: int) -> tuple[int, ...]:
        """Length of a block along each of ndim axes, for blocks along the (negative) axis."""
        lengths = [1] * ndim
        if self.is_tile:
            lengths[-2:] = self.block_shape
        else:
            lengths[axis] = self.block_size
        return tuple(lengths)

    def scales_shape(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Shape of the scales of a tensor of the given shape: every axis divided by the block's length, rounded up."""
        return tuple(
            -(-size // length) for size, length in zip(shape, self.block_lengths(len(shape), axis), strict=True)
        )

    def __str__(self) -> str:
        return self.name


def _mx(name: str, element: FloatFormat) -> BlockFormat:
    return BlockFormat(name, element, (1, 32), E8M0, ScaleRule.FLOOR)


MXFP4 = _mx("MXFP4", E2M1)
MXFP6_E2M3 = _mx("MXFP6_E2M3", E2M3)
MXFP6_E3M2 = _mx("MXFP6_E3M2", E3M2)
MXFP8_E4M3 = _mx("MXFP8_E4M3", E4M3)
MXFP8_E5M2 = _mx("MXFP8_E5M2", E5M2)
MXINT8 = _mx("MXINT8", INT8)
NVFP4 = BlockFormat("NVFP4", E2M1, (1, 16), E4M3, None, tensor_scaled=True)
FP8_1X128 = BlockFormat("FP8_1X128", E4M3, (1, 128), FP32, ScaleRule.RCEIL)
FP8_128X1 = BlockFormat("FP8_128X1", E4M3, (128, 1), FP32, ScaleRule.RCEIL)
FP8_128X128 = BlockFormat("FP8_128X128", E4M3, (128, 128), FP32, ScaleRule.RCEIL)

BLOCK_FORMATS = {
    fmt.name: fmt
    for fmt in (
        *(MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, MXINT8),
        *(NVFP4, FP8_1X128, FP8_128X1, FP8_128X128),
    )
}
