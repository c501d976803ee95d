// The rules that turn a block's scale into elements: the FP4 -> FP8 byte table and the quantizing shortcuts.
#pragma once

#include "scale.h"

namespace mxsim {

// ------------------------------------------------------------------------------------------------- scale of a block
// Every rule is one addition: a carry out of the fraction raises the exponent. Added to the bits of amax before its
// exponent field is read, `scale_rounding_bias` carries iff the fraction reaches the rule's threshold (see
// scale_exponent; the threshold is 1.0 for FLOOR, so that it adds 0).
template <int kFractionBits>
MXSIM_HD constexpr uint32_t e2m1_scale_rounding_bias(ScaleRule rule) {
  constexpr uint32_t one = 1u << kFractionBits;
  if (rule == ScaleRule::kRceil) return one / 2u - 1u;  // fraction > 1/2
  if (rule == ScaleRule::kCeil) return one - 1u;        // fraction > 0
  if (rule == ScaleRule::kEven) return one / 4u;        // fraction >= 3/4
  return 0u;
}

// E8M0 code of a bfloat16 or binary32 block for E2M1 elements: 0xFF if amax is infinite or NaN.
// A subnormal amax lies far below 2**-125, the smallest amax whose scale is not clamped, so that it needs no care.
template <typename Source>
MXSIM_HD constexpr uint32_t e2m1_scale_code(uint32_t amax_magnitude, uint32_t rounding_bias) {
  static_assert(Source::bias == kE8M0Bias, "the exponent field is an E8M0 code");
  if (amax_magnitude >= Source::inf_code) return kE8M0Nan;
  const uint32_t rounded = (amax_magnitude + rounding_bias) >> Source::mantissa_bits;
  return max_uint(rounded, uint32_t(E2M1::emax)) - uint32_t(E2M1::emax);
}
static_assert(e2m1_scale_code<BF16>(0x40E0, e2m1_scale_rounding_bias<7>(ScaleRule::kFloor)) == 127, "amax 7");
static_assert(e2m1_scale_code<BF16>(0x40C1, e2m1_scale_rounding_bias<7>(ScaleRule::kRceil)) == 128, "just above 6");
static_assert(e2m1_scale_code<BF16>(0x0001, e2m1_scale_rounding_bias<7>(ScaleRule::kCeil)) == 0, "subnormal");

// Exponent of the FP8 scale of a bfloat16 block (NUMERICS 7.1): RCEIL for E4M3, amax = 0 gives 1. amax must be finite.
MXSIM_HD constexpr int fp8_scale_exponent(uint32_t amax_bf16_magnitude) {
  if (amax_bf16_magnitude == 0) return 0;
  const int rounded = int((amax_bf16_magnitude + 31u) >> BF16::mantissa_bits);  // one more iff the fraction is over 3/4
  return max_int(rounded - BF16::bias - E4M3::emax, kMinScaleExponent);
}
static_assert(fp8_scale_exponent(0x43E0) == 0 && fp8_scale_exponent(0x43E1) == 1, "448 and the next BF16");
static_assert(fp8_scale_exponent(0x0000) == 0 && fp8_scale_exponent(0x0001) == -127 &&
              fp8_scale_exponent(0x7F7F) == 120);

// ------------------------------------------------------------------------------------------------------- FP4 -> FP8
// E4M3 magnitude bytes of the eight E2M1 magnitudes times 2**shift, shift = headroom - gap: byte c of {lo, hi} is for
// magnitude code c.
struct Fp4Table {
  uint32_t lo, hi;
};

// Without E4M3 subnormals (gap <= 5 + headroom, so shift >= -5) every non-zero byte is its byte at shift 0 plus
// 8 * shift, and no byte borrows from its neighbour.
constexpr int kMinPlainShift = -5;

MXSIM_HD constexpr Fp4Table fp4_table_plain(int shift) {
  return {0x3C383000u + uint32_t(shift) * 0x08080800u, 0x4C484440u + uint32_t(shift) * 0x08080808u};
}

MXSIM_HD constexpr Fp4Table fp4_table(int shift) {
  if (shift >= kMinPlainShift) return fp4_table_plain(shift);
  Fp4Table table{0, 0};
  for (int c = 1; c < 4; ++c) table.lo |= rescale<E2M1, E4M3>(uint32_t(c), shift) << (8 * c);
  for (int c = 4; c < 8; ++c) table.hi |= rescale<E2M1, E4M3>(uint32_t(c), shift) << (8 * (c - 4));
  return table;
}
MXSIM_HD constexpr bool fp4_table_is_rescale() {
  for (int shift = -20; shift <= 6; ++shift) {
    const Fp4Table table = fp4_table(shift);
    for (uint32_t c = 0; c < 8; ++c) {
      const uint32_t byte = ((c < 4 ? table.lo : table.hi) >> (8 * (c & 3u))) & 0xFFu;
      if (byte != rescale<E2M1, E4M3>(c, shift)) return false;
    }
  }
  return true;
}
static_assert(fp4_table_is_rescale());

}  // namespace mxsim
