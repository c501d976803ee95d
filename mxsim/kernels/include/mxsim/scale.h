// How a block's scale exponent follows from its largest magnitude (NUMERICS 3.2, 7.1), and how scales are stored.
#pragma once

#include "formats.h"

namespace mxsim {

enum class ScaleRule : int { kFloor = 0, kRceil = 1, kCeil = 2, kEven = 3 };

// Scale exponent X of a block whose amax is the given finite magnitude of Source, clamped to [-127, 127].
// amax = (1 + fraction) * 2**e: FLOOR gives e - emax, and the others one more where the fraction is
// RCEIL: above that of the largest element; CEIL: above zero; EVEN: at least 1 - 2**-(mantissa_bits + 1).
template <typename Source, typename Element>
MXSIM_HD constexpr int scale_exponent(uint32_t amax_magnitude, ScaleRule rule, int source_exponent = 0) {
  const Unpacked amax = unpack<Source>(amax_magnitude);
  if (amax.significand == 0) return kMinScaleExponent;
  const int leading = floor_log2(amax.significand);
  constexpr int kBits = Source::mantissa_bits;  // more than the element has
  static_assert(kBits > Element::mantissa_bits);
  const uint32_t fraction = (amax.significand << (kBits - leading)) & ((1u << kBits) - 1u);
  const uint32_t max_fraction = Element::max_code & ((1u << Element::mantissa_bits) - 1u);
  bool carry = false;
  if (rule == ScaleRule::kRceil) carry = fraction > max_fraction << (kBits - Element::mantissa_bits);
  if (rule == ScaleRule::kCeil) carry = fraction > 0;
  if (rule == ScaleRule::kEven) carry = fraction >= (1u << kBits) - (1u << (kBits - Element::mantissa_bits - 1));
  const int exponent = leading + amax.exponent + source_exponent - Element::emax + (carry ? 1 : 0);
  return clamp_int(exponent, kMinScaleExponent, kMaxScaleExponent);
}
static_assert(scale_exponent<BF16, E2M1>(0x40E0, ScaleRule::kFloor) == 0, "amax 7");
static_assert(scale_exponent<BF16, E2M1>(0x40C0, ScaleRule::kRceil) == 0, "amax 6 needs no more");
static_assert(scale_exponent<BF16, E2M1>(0x40C1, ScaleRule::kRceil) == 1, "the next BF16 does");
static_assert(scale_exponent<BF16, E2M1>(0x40E0, ScaleRule::kEven) == 1, "1.75 carries");
static_assert(scale_exponent<FP32, E4M3>(0x43E00000, ScaleRule::kRceil) == 0, "448");
static_assert(scale_exponent<FP32, E2M1>(0x7F7FFFFF, ScaleRule::kRceil) == 126, "FLT_MAX");

MXSIM_HD constexpr uint32_t e8m0_code(int exponent) {
  return uint32_t(exponent + kE8M0Bias);
}

// binary32 bits of 2**exponent.  -149 <= exponent <= 127.
MXSIM_HD constexpr uint32_t fp32_power_of_two_bits(int exponent) {
  return exponent >= FP32::emin ? uint32_t(exponent + FP32::bias) << FP32::mantissa_bits : 1u << (exponent + 149);
}
static_assert(fp32_power_of_two_bits(-133) == 0x00010000u && fp32_power_of_two_bits(0) == 0x3F800000u);

constexpr uint32_t kFp32Nan = 0x7FC00000u;
constexpr int kNotAPowerOfTwo = -1000;  // NaN, and on the device everything else that is no power of two

// Exponent of a binary32 power of two, subnormals included; kNotAPowerOfTwo for all other bits.
MXSIM_HD constexpr int fp32_exponent(uint32_t bits) {
  const uint32_t fraction = bits & 0x007FFFFFu;
  if (bits >= 0x00800000u)
    return bits < FP32::inf_code && fraction == 0 ? int(bits >> 23) - FP32::bias : kNotAPowerOfTwo;
  return fraction != 0 && (fraction & (fraction - 1u)) == 0 ? floor_log2(fraction) - 149 : kNotAPowerOfTwo;
}
static_assert(fp32_exponent(0x3F800000u) == 0 && fp32_exponent(1u) == -149 &&
              fp32_exponent(0xBF800000u) == kNotAPowerOfTwo);
static_assert(fp32_exponent(0u) == kNotAPowerOfTwo && fp32_exponent(kFp32Nan) == kNotAPowerOfTwo);

}  // namespace mxsim
