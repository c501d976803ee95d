// One dot product of E4M3 and E5M2 codes as a tensor core adds it up (NUMERICS 9), in integers; host only.
//
// Everything is a multiple of 2**-32, the product of E5M2's smallest subnormals: a product is an integer below 2**64 of
// these units, a sum of 2**17 of them one below 2**81, and rounding to q = 2**(E - fraction_bits) is rounding away the
// last E - fraction_bits + 32 bits.
#pragma once

#include "formats.h"

namespace mxsim {

constexpr int kGemmBlock = 128;
constexpr int kGemmUnitExponent = 2 * (E5M2::emin - E5M2::mantissa_bits);
static_assert(kGemmUnitExponent == -32);
using Units = __int128;
constexpr uint32_t kGemmNan = 0x7FFFFFFFu;

enum class GemmRounding : int { kTowardZero = 0, kTiesToEven = 1, kNone = 2 };

// Order of the float32 operations that take in d: fma(round(d * sa), sb, acc), fma(d, round(sa * sb), acc), or the
// exact sum of all d * sa * sb.
enum class PromotionOrder : int { kAThenB = 0, kScalesFirst = 1, kExact = 2 };

struct GemmRule {
  int fraction_bits;   // of the accumulator; negative: nothing is rounded
  GemmRounding term;   // of each term to q
  GemmRounding total;  // of their sum to fraction_bits of its own exponent
};
constexpr GemmRule kHopper = {13, GemmRounding::kTowardZero, GemmRounding::kTowardZero};

// Roundings of (term, total) as Python numbers them: 0 both toward zero, 1 both to nearest; terms as they are and the
// total 2 toward zero, 3 to nearest; 4 toward zero, then to nearest; 5 to nearest, then toward zero.
MXSIM_HD constexpr GemmRule gemm_rule(int fraction_bits, int number) {
  const GemmRounding term = number == 2 || number == 3   ? GemmRounding::kNone
                            : number == 1 || number == 5 ? GemmRounding::kTiesToEven
                                                         : GemmRounding::kTowardZero;
  const bool is_nearest = number == 1 || number == 3 || number == 4;
  return {fraction_bits, term, is_nearest ? GemmRounding::kTiesToEven : GemmRounding::kTowardZero};
}

MXSIM_HD constexpr Units magnitude_of(Units x) {
  return x < 0 ? -x : x;
}

// floor(log2 |x|).  x is not 0.
MXSIM_HD constexpr int floor_log2_units(Units x) {
  const Units magnitude = magnitude_of(x);
  int log = 0;
  while (magnitude >> log >> 32 != 0) log += 32;
  return log + floor_log2(uint32_t(magnitude >> log));
}

// x rounded to a multiple of 2**shift, by magnitude.  shift < 126.
MXSIM_HD constexpr Units round_to_multiple(Units x, int shift, GemmRounding rounding) {
  if (shift <= 0 || rounding == GemmRounding::kNone) return x;
  Units magnitude = magnitude_of(x);
  if (rounding == GemmRounding::kTiesToEven) {
    magnitude += ((Units(1) << (shift - 1)) - 1) + ((magnitude >> shift) & 1);
  }
  const Units kept = magnitude >> shift << shift;
  return x < 0 ? -kept : kept;
}
static_assert(round_to_multiple(-13, 2, GemmRounding::kTowardZero) == -12);
static_assert(round_to_multiple(6, 2, GemmRounding::kTiesToEven) == 8, "1.5 ties to 2");
static_assert(round_to_multiple(-10, 2, GemmRounding::kTiesToEven) == -8, "2.5 ties to 2");

// e(x): a subnormal code has the exponent of the smallest normal one.  The code is finite, and not zero.
template <typename Format>
MXSIM_HD constexpr int operand_exponent(uint32_t code) {
  return unpack<Format>(code & Format::magnitude_mask).exponent + Format::mantissa_bits;
}

// a * b in units.  Both are finite.
template <typename A, typename B>
MXSIM_HD constexpr Units product_units(uint32_t a, uint32_t b) {
  const Unpacked x = unpack<A>(a & A::magnitude_mask), y = unpack<B>(b & B::magnitude_mask);
  const Units magnitude = Units(x.significand * y.significand) << (x.exponent + y.exponent - kGemmUnitExponent);
  return ((a & A::sign_mask) != 0) != ((b & B::sign_mask) != 0) ? -magnitude : magnitude;
}
static_assert(product_units<E5M2, E5M2>(0x01, 0x81) == -1 && product_units<E4M3, E4M3>(0x38, 0x38) == Units(1) << 32);
static_assert(product_units<E4M3, E4M3>(0x7E, 0x7E) == Units(448 * 448) << 32);
static_assert(product_units<E5M2, E4M3>(0x7B, 0x01) == Units(57344 / 512) << 32, "57344 * 2**-9");

// The accumulator, in units, after one step of `count` products.
template <typename A, typename B>
MXSIM_HD constexpr Units gemm_step(const uint8_t* a, const uint8_t* b, int count, Units c, GemmRule rule) {
  constexpr int kLowest = -1000;
  int exponent = c == 0 ? kLowest : floor_log2_units(c) + kGemmUnitExponent;
  for (int i = 0; i < count; ++i) {
    if (product_units<A, B>(a[i], b[i]) != 0) {
      exponent = max_int(exponent, operand_exponent<A>(a[i]) + operand_exponent<B>(b[i]));
    }
  }
  if (exponent == kLowest) return 0;
  const int shift = rule.fraction_bits < 0 ? 0 : exponent - rule.fraction_bits - kGemmUnitExponent;
  Units total = round_to_multiple(c, shift, rule.term);
  for (int i = 0; i < count; ++i) total += round_to_multiple(product_units<A, B>(a[i], b[i]), shift, rule.term);
  if (total == 0 || rule.fraction_bits < 0) return total;
  return round_to_multiple(total, floor_log2_units(total) - rule.fraction_bits, rule.total);
}

namespace gemm_examples {
constexpr Units kOne = Units(1) << 32;
constexpr uint8_t kOnes[2] = {0x38, 0x38};
constexpr uint8_t kLargeAndSmall[2] = {0x78, 0x08};   // 256 and 2**-6: below 2**(8 - 13)
constexpr uint8_t kLargeAndKept[2] = {0x78, 0x10};    // 256 and 2**-5
constexpr uint8_t kSubnormals[2] = {0x01, 0x00};      // 2**-9, with the exponent -6
constexpr uint8_t kOpposite[2] = {0x38, 0xB8};        // 1 and -1
constexpr uint8_t kE5M2Subnormal[2] = {0x01, 0x04};   // 2**-16 with the exponent -14, and 2**-14
constexpr uint8_t kTimesSubnormal[2] = {0x78, 0x08};  // E4M3: 256 and 2**-6
static_assert(gemm_step<E4M3, E4M3>(kLargeAndSmall, kOnes, 2, 0, kHopper) == 256 * kOne, "2**-6 is lost beside 256");
static_assert(gemm_step<E4M3, E4M3>(kLargeAndKept, kOnes, 2, 0, kHopper) == 256 * kOne + kOne / 32);
static_assert(gemm_step<E4M3, E4M3>(kSubnormals, kOnes, 2, 0, kHopper) == kOne / 512);
static_assert(gemm_step<E4M3, E4M3>(kOpposite, kOnes, 2, 0, kHopper) == 0);
static_assert(gemm_step<E4M3, E4M3>(kOpposite, kOnes, 2, kOne / 8192, kHopper) == kOne / 8192, "2**-13 stays beside 1");
static_assert(gemm_step<E4M3, E4M3>(kOpposite, kOnes, 2, kOne / 16384, kHopper) == 0, "2**-14 does not");
static_assert(gemm_step<E4M3, E4M3>(kOnes, kOnes, 2, 16383 * kOne, kHopper) == 16384 * kOne, "16385 has 14 bits");
static_assert(gemm_step<E5M2, E4M3>(kE5M2Subnormal, kTimesSubnormal, 2, 0, kHopper) == kOne / 256, "E = -14 + 8");
}  // namespace gemm_examples

// binary32 bits of an accumulator, ties to even. 24 bits or less are exact.
MXSIM_HD constexpr uint32_t gemm_fp32_bits(Units units) {
  if (units == 0) return 0;
  const Units magnitude = magnitude_of(units);
  const int leading = floor_log2_units(units);
  const int shift = leading - FP32::mantissa_bits;
  const uint32_t significand = uint32_t(
      shift > 0 ? round_to_multiple(magnitude, shift, GemmRounding::kTiesToEven) >> shift : magnitude << -shift);
  // The implicit bit, or a rounding carry, adds one to the exponent field.
  const uint32_t magnitude_bits =
      (uint32_t(leading + kGemmUnitExponent + FP32::bias - 1) << FP32::mantissa_bits) + significand;
  return magnitude_bits | (units < 0 ? FP32::sign_mask : 0u);
}
static_assert(gemm_fp32_bits(Units(1) << 32) == 0x3F800000u && gemm_fp32_bits(-3) == 0xB0400000u, "1, -3 * 2**-32");
static_assert(gemm_fp32_bits((Units(1) << 39) - 1) == 0x43000000u, "128 - 2**-32 rounds to 128");

}  // namespace mxsim
