// The plain rules of the portable header, tabulated once a process: the loops look elements up.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "mxsim/encode.h"

namespace mxsim::host {

// ------------------------------------------------------------------------------------------- floats -> E2M1
// A code grows with the magnitude, so that it counts the thresholds that are passed. They are compared as integers:
// code of m = how many of the seven numbers above[scale code] lie below m.
template <typename Source>
struct Thresholds {
  using Bits = std::conditional_t<(Source::mantissa_bits > 10), int32_t, int16_t>;  // magnitudes are never negative
  static constexpr int kCount = int(E2M1::max_code);
  std::array<std::array<Bits, 8>, 255> above;

  Thresholds() {
    for (int scale_code = 0; scale_code < 255; ++scale_code) {
      for (uint32_t code = 1; code <= uint32_t(kCount); ++code) {
        uint32_t low = 0, high = Source::inf_code - 1u;  // the largest magnitude whose code is less lies in [low, high]
        while (low < high) {
          const uint32_t middle = high - (high - low) / 2u;
          if (encode_scaled<Source, E2M1>(middle, scale_code - kE8M0Bias) < code) {
            low = middle;
          } else {
            high = middle - 1u;
          }
        }
        above[size_t(scale_code)][code - 1u] = Bits(low);
      }
      above[size_t(scale_code)][7] = 0;
    }
  }
};

template <typename Source>
const Thresholds<Source>& thresholds() {
  static const Thresholds<Source> table;
  return table;
}

// ------------------------------------------------------------------------------------------- codes -> codes
// rescale<Source, Target>(code, shift) for every shift that matters: below kMin all underflows, above kMax all
// saturates.
template <typename Source, typename Target, int kMin, int kMax, typename Entry, typename Fill>
struct ShiftTable {
  std::vector<std::array<Entry, 256>> rows;
  explicit ShiftTable(Fill fill) : rows(size_t(kMax - kMin + 1)) {
    for (int shift = kMin; shift <= kMax; ++shift) {
      for (uint32_t i = 0; i < 256; ++i) rows[size_t(shift - kMin)][i] = Entry(fill(i, shift));
    }
  }
  const Entry* operator[](int shift) const { return rows[size_t(clamp_int(shift, kMin, kMax) - kMin)].data(); }
};

// A byte of two E2M1 codes -> two E4M3 codes, the low nibble's in the low byte. 6 * 2**-13 rounds to zero; shift <= 6.
inline const auto& fp4_pair_to_fp8() {
  constexpr auto fill = [](uint32_t byte, int shift) {
    return rescale<E2M1, E4M3>(byte & 15u, shift) | rescale<E2M1, E4M3>(byte >> 4, shift) << 8;
  };
  static_assert(rescale<E2M1, E4M3>(7, -13) == 0);
  static const ShiftTable<E2M1, E4M3, -13, 6, uint16_t, decltype(fill)> table(fill);
  return table;
}

// E4M3 -> E4M3. 448 * 2**-19 rounds to zero; shift <= 0.
inline const auto& fp8_to_fp8() {
  constexpr auto fill = [](uint32_t code, int shift) { return rescale<E4M3, E4M3>(code, shift); };
  static_assert(rescale<E4M3, E4M3>(0x7E, -19) == 0);
  static const ShiftTable<E4M3, E4M3, -19, 0, uint8_t, decltype(fill)> table(fill);
  return table;
}

// E4M3 -> E2M1, NaN to 0. 448 * 2**-11 rounds to zero, 2**-9 * 2**12 to 6.
inline const auto& fp8_to_fp4() {
  constexpr auto fill = [](uint32_t code, int shift) { return rescale<E4M3, E2M1>(code, shift); };
  static_assert(rescale<E4M3, E2M1>(0x7E, -11) == 0 && rescale<E4M3, E2M1>(0x01, 12) == 7);
  static const ShiftTable<E4M3, E2M1, -11, 12, uint8_t, decltype(fill)> table(fill);
  return table;
}

// ------------------------------------------------------------------------------------------- E2M1 -> bfloat16
// bfloat16 bits of the 16 codes under each E8M0 scale: exact; 2**128 and more is infinite, a NaN scale the quiet NaN.
struct Bf16Values {
  std::array<std::array<uint16_t, 16>, 256> of;
  Bf16Values() {
    for (int scale_code = 0; scale_code < 256; ++scale_code) {
      for (uint32_t code = 0; code < 16; ++code) of[size_t(scale_code)][code] = uint16_t(value(code, scale_code));
    }
  }
  static constexpr uint32_t value(uint32_t code, int scale_code) {
    if (scale_code == int(kE8M0Nan)) return 0x7FC0;
    const uint32_t sign = (code & E2M1::sign_mask) != 0 ? BF16::sign_mask : 0u;
    const Unpacked x = unpack<E2M1>(code & E2M1::magnitude_mask);
    if (x.significand == 0) return sign;
    const int leading = floor_log2(x.significand);
    const int exponent = x.exponent + leading + scale_code - kE8M0Bias;
    if (exponent > 127) return sign | BF16::inf_code;
    const uint32_t significand = x.significand << (BF16::mantissa_bits - leading);    // 1.f, the implicit bit at bit 7
    if (exponent < BF16::emin) return sign | significand >> (BF16::emin - exponent);  // at most 2 bits, both kept
    return sign | ((significand & 0x7Fu) + (uint32_t(exponent + BF16::bias) << BF16::mantissa_bits));
  }
};
static_assert(Bf16Values::value(0x7, 127) == 0x40C0 && Bf16Values::value(0xF, 254) == 0xFF80, "6, and -6 * 2**127");
static_assert(Bf16Values::value(0x1, 0) == 0x0020 && Bf16Values::value(0x3, 0) == 0x0060, "0.5 and 1.5 * 2**-127");

inline const Bf16Values& bf16_values() {
  static const Bf16Values table;
  return table;
}

}  // namespace mxsim::host
