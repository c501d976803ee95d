// Stochastic rounding of one element of a block (NUMERICS 2.2): IEEE bits over the block's scale -> element code.
#pragma once

#include "philox.h"
#include "scale.h"

namespace mxsim {

// Code of value(bits) / 2**scale_exponent: the magnitude rounds up iff random < frac * 2**32; saturating, sign kept.
// bits are finite.
template <typename Source, typename Element>
MXSIM_HD constexpr uint32_t encode_scaled_stochastic(uint32_t bits, int scale_exponent, uint32_t random) {
  Unpacked x = unpack<Source>(bits & Source::magnitude_mask);
  x.exponent -= scale_exponent;
  return round_and_pack<Element, true>(x, random) | ((bits & Source::sign_mask) != 0 ? Element::sign_mask : 0u);
}
static_assert(encode_scaled_stochastic<BF16, E2M1>(0x4030, 0, 0xBFFFFFFFu) == 0x5, "2.75 is 3 in three cases of four");
static_assert(encode_scaled_stochastic<BF16, E2M1>(0xC030, 0, 0xC0000000u) == 0xC, "and -2 in the fourth");
static_assert(encode_scaled_stochastic<FP32, E2M1>(0x00000001, 127, 0) == 0x1, "2**-276 rounds up for random 0");
static_assert(encode_scaled_stochastic<FP32, E2M1>(0x00000001, 127, 1) == 0x0, "and for no other");
static_assert(encode_scaled_stochastic<FP16, E4M3>(0x5F40, 0, 0x3FFFFFFFu) == 0x7E, "464 saturates");

// The same for bfloat16 without a search for the leading bit. 2**d is value's binade over Element's smallest normal
// one. A subnormal is read as twice its fraction with exponent field 0: what it holds above the true leading bit are
// zeros, which do no harm where d <= 0, so that the ulp is the smallest. That is so from kMinBf16Exponent<Element> on.
template <typename Element>
constexpr int kMinBf16Exponent = -BF16::bias - Element::emin;

template <typename Element>
MXSIM_HD constexpr uint32_t encode_bf16_stochastic(uint32_t bits, int scale_exponent, uint32_t random) {
  constexpr int kBits = BF16::mantissa_bits;
  const uint32_t magnitude = bits & BF16::magnitude_mask;
  const int field = int(magnitude >> kBits);
  const uint32_t significand = field > 0 ? (magnitude & ((1u << kBits) - 1u)) | 1u << kBits : magnitude << 1;
  const int d = field - BF16::bias - scale_exponent - Element::emin;
  const int shift = kBits - Element::mantissa_bits + max_int(-d, 0);
  const uint32_t num_ulps = shift_right_stochastic(significand, shift, random);
  const uint32_t code = min_uint(num_ulps + (uint32_t(max_int(d, 0)) << Element::mantissa_bits), Element::max_code);
  return code | ((bits & BF16::sign_mask) != 0 ? Element::sign_mask : 0u);
}
static_assert(encode_bf16_stochastic<E2M1>(0x4030, 0, 0xBFFFFFFFu) == 0x5);
static_assert(encode_bf16_stochastic<E2M1>(0xC030, 0, 0xC0000000u) == 0xC);
static_assert(encode_bf16_stochastic<E2M1>(0x007F, -127, 0xF7FFFFFFu) == 0x4, "127/64 = 3.97 halves: 2, and");
static_assert(encode_bf16_stochastic<E2M1>(0x007F, -127, 0xF8000000u) == 0x3, "1.5 for the last 32nd");
static_assert(encode_bf16_stochastic<E4M3>(0x43E8, 0, 0) == 0x7E, "464 saturates");

}  // namespace mxsim
