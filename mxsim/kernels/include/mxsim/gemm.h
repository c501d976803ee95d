// One dot product of E4M3 codes as a tensor core adds it up (NUMERICS 9), in integers.
//
// Everything is a multiple of 2**-18, the product of two of the smallest subnormals: a product is an integer below
// 2**36 of these units, an accumulator one below 2**63, and rounding to q = 2**(E - fraction_bits) is rounding away the
// last E - fraction_bits + 18 bits.
#pragma once

#include "formats.h"

namespace mxsim {

constexpr int kGemmBlock = 128;
constexpr int kGemmUnitExponent = 2 * (E4M3::emin - E4M3::mantissa_bits);
static_assert(kGemmUnitExponent == -18);
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

// floor(log2(x)).  x > 0.
MXSIM_HD constexpr int floor_log2_64(uint64_t x) {
  return x >> 32 ? 32 + floor_log2(uint32_t(x >> 32)) : floor_log2(uint32_t(x));
}

// x rounded to a multiple of 2**shift, by magnitude.  shift < 63.
MXSIM_HD constexpr int64_t round_to_multiple(int64_t x, int shift, GemmRounding rounding) {
  if (shift <= 0 || rounding == GemmRounding::kNone) return x;
  uint64_t magnitude = x < 0 ? uint64_t(-x) : uint64_t(x);
  if (rounding == GemmRounding::kTiesToEven) {
    magnitude += ((uint64_t(1) << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u);
  }
  const int64_t kept = int64_t(magnitude >> shift << shift);
  return x < 0 ? -kept : kept;
}
static_assert(round_to_multiple(-13, 2, GemmRounding::kTowardZero) == -12);
static_assert(round_to_multiple(6, 2, GemmRounding::kTiesToEven) == 8, "1.5 ties to 2");
static_assert(round_to_multiple(-10, 2, GemmRounding::kTiesToEven) == -8, "2.5 ties to 2");

// e(a) + e(b): a subnormal code has the exponent of the smallest normal one. The codes are not zero.
MXSIM_HD constexpr int product_exponent(uint32_t a, uint32_t b) {
  return unpack<E4M3>(a & E4M3::magnitude_mask).exponent + unpack<E4M3>(b & E4M3::magnitude_mask).exponent +
         2 * E4M3::mantissa_bits;
}

// a * b in units.  Neither is NaN.
MXSIM_HD constexpr int64_t product_units(uint32_t a, uint32_t b) {
  const Unpacked x = unpack<E4M3>(a & E4M3::magnitude_mask), y = unpack<E4M3>(b & E4M3::magnitude_mask);
  const int64_t magnitude = int64_t(x.significand * y.significand) << (x.exponent + y.exponent - kGemmUnitExponent);
  return ((a ^ b) & E4M3::sign_mask) != 0 ? -magnitude : magnitude;
}
static_assert(product_units(0x01, 0x81) == -1 && product_units(0x38, 0x38) == 1 << 18, "2**-9 * -2**-9, 1 * 1");
static_assert(product_units(0x7E, 0x7E) == int64_t(448 * 448) << 18);

// The accumulator, in units, after one step of `count` products.
MXSIM_HD constexpr int64_t gemm_step(const uint8_t* a, const uint8_t* b, int count, int64_t c, GemmRule rule) {
  constexpr int kLowest = -1000;
  int exponent = c == 0 ? kLowest : floor_log2_64(c < 0 ? uint64_t(-c) : uint64_t(c)) + kGemmUnitExponent;
  for (int i = 0; i < count; ++i) {
    if (product_units(a[i], b[i]) != 0) exponent = max_int(exponent, product_exponent(a[i], b[i]));
  }
  if (exponent == kLowest) return 0;
  const int shift = rule.fraction_bits < 0 ? 0 : exponent - rule.fraction_bits - kGemmUnitExponent;
  int64_t total = round_to_multiple(c, shift, rule.term);
  for (int i = 0; i < count; ++i) total += round_to_multiple(product_units(a[i], b[i]), shift, rule.term);
  if (total == 0 || rule.fraction_bits < 0) return total;
  const int leading = floor_log2_64(total < 0 ? uint64_t(-total) : uint64_t(total));
  return round_to_multiple(total, leading - rule.fraction_bits, rule.total);
}

namespace gemm_examples {
constexpr int64_t kOne = 1 << 18;
constexpr uint8_t kOnes[2] = {0x38, 0x38};
constexpr uint8_t kLargeAndSmall[2] = {0x78, 0x08};  // 256 and 2**-6: below 2**(8 - 13)
constexpr uint8_t kLargeAndKept[2] = {0x78, 0x10};   // 256 and 2**-5
constexpr uint8_t kSubnormals[2] = {0x01, 0x00};     // 2**-9, with the exponent -6
constexpr uint8_t kOpposite[2] = {0x38, 0xB8};       // 1 and -1
static_assert(gemm_step(kLargeAndSmall, kOnes, 2, 0, kHopper) == 256 * kOne, "2**-6 is lost beside 256");
static_assert(gemm_step(kLargeAndKept, kOnes, 2, 0, kHopper) == 256 * kOne + kOne / 32);
static_assert(gemm_step(kSubnormals, kOnes, 2, 0, kHopper) == kOne / 512);
static_assert(gemm_step(kOpposite, kOnes, 2, 0, kHopper) == 0);
static_assert(gemm_step(kOpposite, kOnes, 2, kOne / 8192, kHopper) == kOne / 8192, "2**-13 beside 1 is kept");
static_assert(gemm_step(kOpposite, kOnes, 2, kOne / 16384, kHopper) == 0, "2**-14 is not");
static_assert(gemm_step(kOnes, kOnes, 2, 16383 * kOne, kHopper) == 16384 * kOne, "16385 needs 14 fraction bits");
}  // namespace gemm_examples

// binary32 bits of an accumulator, ties to even. 24 bits or less are exact.
MXSIM_HD constexpr uint32_t gemm_fp32_bits(int64_t units) {
  if (units == 0) return 0;
  const uint64_t magnitude = units < 0 ? uint64_t(-units) : uint64_t(units);
  const int leading = floor_log2_64(magnitude);
  const int shift = leading - FP32::mantissa_bits;
  const uint32_t significand =
      shift > 0 ? uint32_t(uint64_t(round_to_multiple(int64_t(magnitude), shift, GemmRounding::kTiesToEven)) >> shift)
                : uint32_t(magnitude << -shift);
  // The implicit bit, or a rounding carry, adds one to the exponent field.
  const uint32_t magnitude_bits =
      (uint32_t(leading + kGemmUnitExponent + FP32::bias - 1) << FP32::mantissa_bits) + significand;
  return magnitude_bits | (units < 0 ? FP32::sign_mask : 0u);
}
static_assert(gemm_fp32_bits(1 << 18) == 0x3F800000u && gemm_fp32_bits(-3) == 0xB7400000u, "1, -3 * 2**-18");
static_assert(gemm_fp32_bits((int64_t(1) << 25) - 1) == 0x43000000u, "128 - 2**-18 rounds to 128");

}  // namespace mxsim
