"""The formats of NUMERICS section 1, each one record.

Source: OCP MX v1.0 section 5.3 (E2M1, E2M3, E3M2, E8M0, INT8), OCP OFP8 v1.0 (E4M3, E5M2), IEEE 754-2019.
Departs: E5M2's NaN is 0x7F, as torch writes it (ml_dtypes writes 0x7E).
"""

from mxsim.formats.float_format import CodeForm, FloatFormat, Specials

E2M1 = FloatFormat("E2M1", 2, 1)
E2M3 = FloatFormat("E2M3", 2, 3)
E3M2 = FloatFormat("E3M2", 3, 2)
E4M3 = FloatFormat("E4M3", 4, 3, specials=Specials.NAN_ALL_ONES)
E5M2 = FloatFormat("E5M2", 5, 2, specials=Specials.INF_AND_NAN, nan_code=0x7F)
E8M0 = FloatFormat("E8M0", 8, 0, specials=Specials.NAN_ALL_ONES, signed=False, has_subnormals=False)
BF16 = FloatFormat("BF16", 8, 7, specials=Specials.INF_AND_NAN)
FP16 = FloatFormat("FP16", 5, 10, specials=Specials.INF_AND_NAN)
FP32 = FloatFormat("FP32", 8, 23, specials=Specials.INF_AND_NAN)
INT8 = FloatFormat("INT8", 1, 6, bias=1, code_form=CodeForm.TWOS_COMPLEMENT)

FORMATS = {fmt.name: fmt for fmt in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, BF16, FP16, FP32, INT8)}
