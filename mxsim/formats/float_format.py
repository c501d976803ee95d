"""The record that describes an element or scale format. Every constant of a format is derived from it."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np


class Specials(Enum):
    """Which codes of a format are not finite numbers."""

    NONE = "none"  # every code is finite (E2M1)
    NAN_ALL_ONES = "nan_all_ones"  # exponent and mantissa all ones is NaN, no infinity (OCP E4M3, E8M0)
    NAN_IS_NEGATIVE_ZERO = "nan_is_negative_zero"  # the code of -0 is the only NaN, no infinity ("fnuz" formats)
    INF_AND_NAN = "inf_and_nan"  # the top exponent holds infinity and NaN, as in IEEE 754 (E5M2)


class CodeForm(Enum):
    """How sign and magnitude are written into a code."""

    SIGN_MAGNITUDE = "sign_magnitude"
    TWOS_COMPLEMENT = "twos_complement"


@dataclass(frozen=True)
class FloatFormat:
    """A binary format: value = (-1)**sign * significand * 2**(exponent - mantissa_bits).

    With biased exponent ``b`` and stored fraction ``f``: a normal value (b > 0) has significand
    ``2**mantissa_bits + f`` and exponent ``b - bias``; b = 0 holds zero and the subnormals (significand ``f``,
    exponent ``1 - bias``) or, with ``has_subnormals=False``, one more normal binade and no zero.

    ``bias`` defaults to ``2**(exponent_bits - 1) - 1``. ``nan_code`` is the positive NaN that `encode` writes; by
    default the all-ones code, the code of -0, or IEEE's quiet NaN, as ``specials`` has it.

    A fixed-point integer is a float whose only normal binade continues the subnormals: INT8 is
    ``FloatFormat("INT8", 1, 6, bias=1, code_form=CodeForm.TWOS_COMPLEMENT)``, value = code / 64.

    Raises:
        ValueError: if a field is out of range, or float64 cannot hold every value of the format exactly.

    Source: OCP OFP8 v1.0, OCP MX v1.0 section 5.3, IEEE 754-2019 section 3.4.

    >>> FloatFormat("E3M4", 3, 4).max_finite
    31.0
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    specials: Specials = Specials.NONE
    signed: bool = True
    has_subnormals: bool = True
    code_form: CodeForm = CodeForm.SIGN_MAGNITUDE
    nan_code: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.exponent_bits <= 11:
            raise ValueError(f"{self.name}: exponent_bits is {self.exponent_bits}, needed 1 to 11")
        if not 0 <= self.mantissa_bits <= 52:
            raise ValueError(f"{self.name}: mantissa_bits is {self.mantissa_bits}, needed 0 to 52")
        if self.specials is Specials.INF_AND_NAN and (self.mantissa_bits == 0 or not self.signed):
            raise ValueError(f"{self.name}: infinity and NaN need a mantissa bit and a sign")
        if self.specials is Specials.NAN_IS_NEGATIVE_ZERO and not self.signed:
            raise ValueError(f"{self.name}: NaN at negative zero needs a sign")
        if self.code_form is CodeForm.TWOS_COMPLEMENT:
            if not self.signed or self.specials is not Specials.NONE:
                raise ValueError(f"{self.name}: two's complement needs a sign and has no code for NaN or infinity")
            if self.exponent_bits != 1 or not self.has_subnormals:
                raise ValueError(f"{self.name}: two's complement is for fixed point: exponent_bits 1, with subnormals")
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if self.nan_code is None:
            object.__setattr__(self, "nan_code", self._default_nan_code())
        elif not self._is_nan_code(self.nan_code):
            raise ValueError(f"{self.name}: nan_code {self.nan_code:#x} is not a NaN of this format")
        if self.max_code < int(self.has_subnormals):
            raise ValueError(f"{self.name}: this format has no value but zero and NaN")
        if self.emax > 1023 or self.emin - self.mantissa_bits < -1074:
            raise ValueError(f"{self.name}: float64 cannot hold every value of this format exactly")

    def _check_types(self) -> None:
        needed: dict[str, tuple[type, ...]] = {
            "name": (str,),
            "exponent_bits": (int,),
            "mantissa_bits": (int,),
            "bias": (int, type(None)),
            "specials": (Specials,),
            "signed": (bool,),
            "has_subnormals": (bool,),
            "code_form": (CodeForm,),
            "nan_code": (int, type(None)),
        }
        for field, types in needed.items():
            value = getattr(self, field)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                wanted = " or ".join("None" if t is type(None) else t.__name__ for t in types)
                raise TypeError(f"FloatFormat: {field} is {value!r}, needed {wanted}")

    def _default_nan_code(self) -> int | None:
        if self.specials is Specials.NAN_ALL_ONES:
            return self.magnitude_mask
        if self.specials is Specials.NAN_IS_NEGATIVE_ZERO:
            return self.sign_mask
        if self.specials is Specials.INF_AND_NAN:
            return self._top_exponent | 1 << (self.mantissa_bits - 1)
        return None

    def _is_nan_code(self, code: int) -> bool:
        if self.specials is Specials.INF_AND_NAN:
            return self._top_exponent < code <= self.magnitude_mask
        return code == self._default_nan_code()

    @property
    def _top_exponent(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    # ------------------------------------------------------------------ codes
    @property
    def bits(self) -> int:
        """Bits of one code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def num_codes(self) -> int:
        """2**bits, special codes included."""
        return 1 << self.bits

    @property
    def sign_mask(self) -> int:
        """The sign bit, or 0 in an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def magnitude_mask(self) -> int:
        """Exponent and mantissa bits."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        if self.specials is Specials.INF_AND_NAN:
            return self._top_exponent - 1
        return self.magnitude_mask - (self.specials is Specials.NAN_ALL_ONES)

    @property
    def inf_code(self) -> int | None:
        """Code of +infinity, None where there is none."""
        return self._top_exponent if self.has_inf else None

    @property
    def code_dtype(self) -> np.dtype:
        """The smallest unsigned NumPy dtype that holds a code."""
        return np.dtype(f"u{next(size for size in (1, 2, 4, 8) if 8 * size >= self.bits)}")

    # ----------------------------------------------------------------- values
    @property
    def has_nan(self) -> bool:
        """Whether a code decodes to NaN."""
        return self.specials is not Specials.NONE

    @property
    def has_inf(self) -> bool:
        """Whether a code decodes to infinity."""
        return self.specials is Specials.INF_AND_NAN

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return (
            self.signed
            and self.has_subnormals
            and self.code_form is CodeForm.SIGN_MAGNITUDE
            and self.specials is not Specials.NAN_IS_NEGATIVE_ZERO
        )

    @property
    def emin(self) -> int:
        """Unbiased exponent of the smallest normal value."""
        return int(self.has_subnormals) - self._bias

    @cached_property
    def emax(self) -> int:
        """Unbiased exponent of the largest finite value."""
        biased_exponent = self.max_code >> self.mantissa_bits
        return max(biased_exponent, int(self.has_subnormals)) - self._bias

    @cached_property
    def max_finite(self) -> float:
        """Largest finite value."""
        return self._magnitude(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest normal value, 2**emin."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; equal to min_normal in a format without subnormals."""
        return 2.0 ** (self.emin - self.mantissa_bits) if self.has_subnormals else self.min_normal

    @cached_property
    def value_dtype(self) -> np.dtype:
        """float32 if it holds every value exactly, else float64."""
        fits = self.mantissa_bits <= 23 and self.emax <= 127 and self.emin - self.mantissa_bits >= -149
        return np.dtype(np.float32 if fits else np.float64)

    @property
    def _bias(self) -> int:
        assert self.bias is not None  # set by __post_init__
        return self.bias

    def _magnitude(self, code: int) -> float:
        biased_exponent = code >> self.mantissa_bits
        significand = code & ((1 << self.mantissa_bits) - 1)
        if biased_exponent > 0 or not self.has_subnormals:
            significand |= 1 << self.mantissa_bits
        return significand * 2.0 ** (max(biased_exponent - self._bias, self.emin) - self.mantissa_bits)

    def __str__(self) -> str:
        return self.name
