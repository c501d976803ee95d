// The element formats as records, and how each unpacks itself exactly into significand * 2**exponent.
#pragma once

#include "bits.h"

namespace mxsim {

template <int kExponentBits, int kMantissaBits, int kBias, bool kNanAllOnes>
struct SmallFloat {  // signed, subnormals, at most 8 bits; the all-ones code is NaN or finite, and there is no infinity
  static constexpr int mantissa_bits = kMantissaBits;
  static constexpr int bias = kBias;
  static constexpr int emin = 1 - kBias;
  static constexpr int emax = (1 << kExponentBits) - 1 - kBias;
  static constexpr uint32_t sign_mask = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t magnitude_mask = sign_mask - 1u;
  static constexpr uint32_t max_code = magnitude_mask - (kNanAllOnes ? 1u : 0u);
  static constexpr bool has_nan = kNanAllOnes;
};
using E2M1 = SmallFloat<2, 1, 1, false>;
using E4M3 = SmallFloat<4, 3, 7, true>;
static_assert(E2M1::emax == 2 && E2M1::max_code == 0x7 && E4M3::emax == 8 && E4M3::max_code == 0x7E);

constexpr uint32_t kE4M3Nan = 0x7F;
constexpr uint32_t kE8M0Nan = 0xFF;
constexpr int kE8M0Bias = 127;
constexpr int kMinScaleExponent = -127;
constexpr int kMaxScaleExponent = 127;

template <int kExponentBits, int kMantissaBits>
struct IeeeFloat {  // binary16, bfloat16, binary32, E5M2
  static constexpr int mantissa_bits = kMantissaBits;
  static constexpr int bias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int emin = 1 - bias;
  static constexpr uint32_t sign_mask = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t magnitude_mask = sign_mask - 1u;
  static constexpr uint32_t inf_code = ((1u << kExponentBits) - 1u) << kMantissaBits;  // and above: NaN
};
using FP16 = IeeeFloat<5, 10>;
using BF16 = IeeeFloat<8, 7>;
using FP32 = IeeeFloat<8, 23>;
using E5M2 = IeeeFloat<5, 2>;
static_assert(E5M2::emin == -14 && E5M2::sign_mask == 0x80 && E5M2::inf_code == 0x7C);

struct Unpacked {
  uint32_t significand;  // with the implicit bit; at most 24 bits
  int exponent;          // of the significand's last bit
};

// Exact value of a finite magnitude code: the implicit bit is materialised, a subnormal has none.
template <typename Format>
MXSIM_HD constexpr Unpacked unpack(uint32_t magnitude) {
  const int biased_exponent = int(magnitude >> Format::mantissa_bits);
  const uint32_t fraction = magnitude & ((1u << Format::mantissa_bits) - 1u);
  const uint32_t implicit_bit = biased_exponent > 0 ? 1u << Format::mantissa_bits : 0u;
  return {fraction | implicit_bit, max_int(biased_exponent, 1) - Format::bias - Format::mantissa_bits};
}
static_assert(unpack<E2M1>(1).significand == 1 && unpack<E2M1>(1).exponent == -1, "0.5");
static_assert(unpack<E4M3>(0x7E).significand == 14 && unpack<E4M3>(0x7E).exponent == 5, "448");

// Magnitude code of significand * 2**exponent in Format: one rounding, then overflow saturates. Ties to even; or
// stochastic: up iff random < frac * 2**32.
template <typename Format, bool kStochastic = false>
MXSIM_HD constexpr uint32_t round_and_pack(Unpacked x, [[maybe_unused]] uint32_t random = 0) {
  if (x.significand == 0) return 0;
  // Count ulps, then add the binade's offset. In a normal value the implicit bit is one of the ulps and turns binade
  // index k into biased exponent k + 1; a rounding carry moves into the exponent by itself.
  const int binade = max_int(floor_log2(x.significand) + x.exponent - Format::emin, 0);
  const int shift = Format::emin + binade - Format::mantissa_bits - x.exponent;
  if (binade > Format::emax - Format::emin) return Format::max_code;
  uint32_t num_ulps = 0;
  if constexpr (kStochastic) {
    num_ulps = shift > 0 ? shift_right_stochastic(x.significand, shift, random) : x.significand << -shift;
  } else {
    if (shift > 25) return 0;  // under half of the smallest subnormal
    num_ulps = shift > 0 ? shift_right_rne(x.significand, shift) : x.significand << -shift;
  }
  return min_uint(num_ulps + (uint32_t(binade) << Format::mantissa_bits), Format::max_code);
}
static_assert(round_and_pack<E2M1>({1, -2}) == 0 && round_and_pack<E2M1>({3, -2}) == 2, "0.25 -> 0, 0.75 -> 1");
static_assert(round_and_pack<E2M1>({5, -1}) == 4 && round_and_pack<E2M1>({7, -1}) == 6, "2.5 -> 2, 3.5 -> 4");
static_assert(round_and_pack<E2M1>({5, 0}) == 6 && round_and_pack<E2M1>({7, 0}) == 7, "5 -> 4, 7 saturates at 6");
static_assert(round_and_pack<E4M3>({29, 4}) == 0x7E && round_and_pack<E4M3>({1, -10}) == 0, "464 and 2**-10");
static_assert(round_and_pack<E4M3>({15, -14}) == 0x00 && round_and_pack<E4M3>({15, -11}) == 0x04, "NUMERICS 5.4");

// Code of code * 2**shift in another format, sign kept; NaN becomes the target's NaN, or +0 where it has none.
template <typename Source, typename Target>
MXSIM_HD constexpr uint32_t rescale(uint32_t code, int shift) {
  const uint32_t magnitude = code & Source::magnitude_mask;
  const bool negative = (code & Source::sign_mask) != 0;
  if (Source::has_nan && magnitude > Source::max_code) {
    return Target::has_nan ? Target::magnitude_mask | (negative ? Target::sign_mask : 0u) : 0u;
  }
  Unpacked x = unpack<Source>(magnitude);
  x.exponent += shift;
  return round_and_pack<Target>(x) | (negative ? Target::sign_mask : 0u);
}
static_assert(rescale<E2M1, E4M3>(0x1, 6) == 0x60 && rescale<E2M1, E4M3>(0xF, 6) == 0xFC, "0.5 * 64 and -6 * 64");
static_assert(rescale<E2M1, E4M3>(0x8, 6) == 0x80 && rescale<E2M1, E4M3>(0x1, -9) == 0x00, "-0, and 2**-10 ties to 0");
static_assert(rescale<E4M3, E4M3>(0x0F, -5) == 0x00 && rescale<E4M3, E4M3>(0x0F, -2) == 0x04, "1.875 * 2**-6 shifted");
static_assert(rescale<E4M3, E4M3>(0xFF, -2) == 0xFF && rescale<E4M3, E2M1>(0x7F, 0) == 0, "NaN");

}  // namespace mxsim
