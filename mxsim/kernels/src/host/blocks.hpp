// One block: from its elements to scale and codes. Loops of fixed length over small integers, which g++ vectorises.
#pragma once

#include <cstring>

#include "host/tables.hpp"
#include "mxsim/convert.h"
#include "mxsim/stochastic.h"

namespace mxsim::host {

constexpr int kFp4Block = 32;
constexpr int kFp8Block = 128;

template <typename Source>
using BitsOf = std::conditional_t<(Source::mantissa_bits > 10), uint32_t, uint16_t>;

// Loads whatever the alignment.
template <typename T>
T load(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}

// ------------------------------------------------------------------------------------------------- floats -> MXFP4
template <typename Source>
uint32_t fp4_scale_code(uint32_t amax, ScaleRule rule) {
  if constexpr (Source::bias == kE8M0Bias) {
    return e2m1_scale_code<Source>(amax, e2m1_scale_rounding_bias<Source::mantissa_bits>(rule));
  } else {
    return amax >= Source::inf_code ? kE8M0Nan : e8m0_code(scale_exponent<Source, E2M1>(amax, rule));
  }
}

// Packed codes of 32 elements; returns the scale code.
template <typename Source>
inline __attribute__((always_inline)) uint8_t quantize_fp4_block(const BitsOf<Source>* x, ScaleRule rule,
                                                                 const Thresholds<Source>& thresholds, uint8_t* out) {
  using Bits = BitsOf<Source>;
  using Signed = typename Thresholds<Source>::Bits;
  Signed magnitude[kFp4Block];
  Signed amax = 0;
  for (int i = 0; i < kFp4Block; ++i) {
    magnitude[i] = Signed(x[i] & Source::magnitude_mask);
    amax = std::max(amax, magnitude[i]);
  }
  const uint32_t scale_code = fp4_scale_code<Source>(uint32_t(amax), rule);
  if (scale_code == kE8M0Nan) {
    std::memset(out, 0, kFp4Block / 2);
    return kE8M0Nan;
  }
  const auto& above = thresholds.above[scale_code];
  Bits code[kFp4Block];
  for (int i = 0; i < kFp4Block; ++i) {
    Signed passed = 0;
    for (int j = 0; j < Thresholds<Source>::kCount; ++j) passed = Signed(passed + (magnitude[i] > above[j]));
    code[i] = Bits(Bits(passed) | ((x[i] & Source::sign_mask) >> (sizeof(Bits) * 8 - 4)));
  }
  for (int j = 0; j < kFp4Block / 2; ++j) out[j] = uint8_t(code[2 * j] | code[2 * j + 1] << 4);
  return uint8_t(scale_code);
}

// ------------------------------------------------------------------------------------------------- bfloat16 -> FP8
// |x| / 2**X as bfloat16 bits less those of 2**-7 (biased exponent 120): E4M3's first binade is 128 and up, so that
// normal codes are this number rounded to a multiple of 16. Below lie the subnormal codes, by eight thresholds.
constexpr int kFp8Rebias = (BF16::bias - E4M3::bias) << BF16::mantissa_bits;

// The largest of these numbers whose code is less than `code` <= 8.
constexpr int16_t largest_fp8_below(uint32_t code) {
  uint32_t low = 0, high = BF16::inf_code - 1u;
  while (low < high) {
    const uint32_t middle = high - (high - low) / 2u;
    if (encode_scaled<BF16, E4M3>(middle, 0) < code) {
      low = middle;
    } else {
      high = middle - 1u;
    }
  }
  return int16_t(int(low) - kFp8Rebias);
}
constexpr int16_t kFp8Below[8] = {largest_fp8_below(1), largest_fp8_below(2), largest_fp8_below(3),
                                  largest_fp8_below(4), largest_fp8_below(5), largest_fp8_below(6),
                                  largest_fp8_below(7), largest_fp8_below(8)};

// Subnormal bfloat16 inputs do not follow their bits: from this X on all of them underflow, and do in this form too.
constexpr int kMinFastExponent = -116;
static_assert(0x7F - kMinFastExponent * (1 << BF16::mantissa_bits) - kFp8Rebias <= kFp8Below[0]);
static_assert(encode_scaled<BF16, E4M3>(0x7F, kMinFastExponent) == 0);

// offset = (X << 7) + kFp8Rebias, X >= kMinFastExponent, |x| <= 448 * 2**X.
inline uint16_t fp8_code(uint16_t x, int16_t offset) {
  const int16_t n = int16_t(int16_t(x & BF16::magnitude_mask) - offset);
  int16_t subnormal = 0;
  for (int j = 0; j < 8; ++j) subnormal = int16_t(subnormal + (n > kFp8Below[j]));
  const int16_t normal = int16_t(int16_t(n + 7 + ((n >> 4) & 1)) >> 4);
  return uint16_t(std::max(normal, subnormal) | ((x & BF16::sign_mask) >> 8));
}

inline int16_t fp8_offset(int scale_exponent) {
  return int16_t(scale_exponent * (1 << BF16::mantissa_bits) + kFp8Rebias);
}

// NUMERICS 7.1: amax = 0 gives scale 1. amax is finite.
inline int fp8_scale_exponent_of(uint32_t amax) {
  return amax == 0 ? 0 : scale_exponent<BF16, E4M3>(amax, ScaleRule::kRceil);
}

// Codes of `count` elements that share a scale; returns the scale's bits.
inline uint32_t encode_fp8(const uint16_t* x, int count, uint32_t amax, uint8_t* out) {
  if (amax >= BF16::inf_code) {
    std::memset(out, int(kE4M3Nan), size_t(count));
    return kFp32Nan;
  }
  const int exponent = fp8_scale_exponent_of(amax);
  if (exponent >= kMinFastExponent) {
    const int16_t offset = fp8_offset(exponent);
    for (int i = 0; i < count; ++i) out[i] = uint8_t(fp8_code(x[i], offset));
  } else {
    for (int i = 0; i < count; ++i) out[i] = uint8_t(encode_scaled<BF16, E4M3>(x[i], exponent));
  }
  return fp32_power_of_two_bits(exponent);
}

inline uint32_t amax_of(const uint16_t* x, int count, uint32_t amax = 0) {
  int16_t largest = int16_t(amax);
  for (int i = 0; i < count; ++i) largest = std::max(largest, int16_t(x[i] & BF16::magnitude_mask));
  return uint32_t(largest);
}

// ------------------------------------------------------------------------------------------------- stochastic rounding
// Elements first, first + 1, ... of a tensor, all of one block; first is a multiple of 4.
struct Draws {
  uint64_t first;
  uint64_t seed;
};

// code_of(i, its random bits) for i < count, a multiple of 4.
template <typename CodeOf>
void draw_each(Draws draws, int count, const CodeOf& code_of) {
  for (int i = 0; i < count; i += 4) {
    const PhiloxWords random = random_words((draws.first + uint64_t(i)) / 4u, draws.seed);
    for (int j = 0; j < 4; ++j) code_of(i + j, random.at[j]);
  }
}

// Code of one element, as a CUDA kernel finds it.
template <typename Source, typename Element>
uint32_t stochastic_code(uint32_t bits, int scale_exponent, uint32_t random) {
  if constexpr (Source::mantissa_bits == BF16::mantissa_bits) {
    if (scale_exponent >= kMinBf16Exponent<Element>)
      return encode_bf16_stochastic<Element>(bits, scale_exponent, random);
  }
  return encode_scaled_stochastic<Source, Element>(bits, scale_exponent, random);
}

// As quantize_fp4_block.
template <typename Source>
uint8_t draw_fp4_block(const BitsOf<Source>* x, ScaleRule rule, Draws draws, uint8_t* out) {
  uint32_t amax = 0;
  for (int i = 0; i < kFp4Block; ++i) amax = max_uint(amax, x[i] & Source::magnitude_mask);
  const uint32_t scale_code = fp4_scale_code<Source>(amax, rule);
  std::memset(out, 0, kFp4Block / 2);
  if (scale_code == kE8M0Nan) return kE8M0Nan;
  draw_each(draws, kFp4Block, [&](int i, uint32_t random) {
    const uint32_t code = stochastic_code<Source, E2M1>(x[i], int(scale_code) - kE8M0Bias, random);
    out[i / 2] = uint8_t(out[i / 2] | code << (4 * (i % 2)));
  });
  return uint8_t(scale_code);
}

// As encode_fp8.
inline uint32_t draw_fp8(const uint16_t* x, int count, uint32_t amax, Draws draws, uint8_t* out) {
  if (amax >= BF16::inf_code) {
    std::memset(out, int(kE4M3Nan), size_t(count));
    return kFp32Nan;
  }
  const int exponent = fp8_scale_exponent_of(amax);
  draw_each(draws, count,
            [&](int i, uint32_t random) { out[i] = uint8_t(stochastic_code<BF16, E4M3>(x[i], exponent, random)); });
  return fp32_power_of_two_bits(exponent);
}

// ------------------------------------------------------------------------------------------------- MXFP4 -> FP8
// 32 elements times 2**shift; a NaN scale gives NaN.
inline void convert_fp4_block(const uint8_t* codes, bool is_nan, int shift, uint8_t* out) {
  if (is_nan) {
    std::memset(out, int(kE4M3Nan), kFp4Block);
    return;
  }
  const uint16_t* table = fp4_pair_to_fp8()[shift];
  for (int j = 0; j < kFp4Block / 2; ++j) std::memcpy(out + 2 * j, table + codes[j], 2);
}

// Four blocks of 32 to one of 128; returns the scale's bits.
inline uint32_t convert_fp4_to_fp8_block(const uint8_t* codes, const uint8_t* scales, int headroom, uint8_t* out) {
  int shared = kMinScaleExponent;
  for (int i = 0; i < 4; ++i) {
    if (scales[i] != kE8M0Nan) shared = std::max(shared, int(scales[i]) - kE8M0Bias);
  }
  for (int i = 0; i < 4; ++i) {
    const int gap = shared - (int(scales[i]) - kE8M0Bias);
    convert_fp4_block(codes + 16 * i, scales[i] == kE8M0Nan, headroom - gap, out + kFp4Block * i);
  }
  return fp32_power_of_two_bits(shared - headroom);
}

// ------------------------------------------------------------------------------------------------- FP8 -> MXFP4
// 32 elements of a block with the given scale; returns the scale code.
inline uint8_t convert_fp8_to_fp4_block(const uint8_t* codes, Fp8Scale scale, ScaleRule rule, uint8_t* out) {
  uint8_t amax = 0;
  for (int i = 0; i < kFp4Block; ++i) amax = std::max(amax, uint8_t(codes[i] & E4M3::magnitude_mask));
  if (scale.is_nan || amax > E4M3::max_code) {
    std::memset(out, 0, kFp4Block / 2);
    return kE8M0Nan;
  }
  const int exponent = mxsim::scale_exponent<E4M3, E2M1>(amax, rule, scale.exponent);
  const uint8_t* table = fp8_to_fp4()[scale.exponent - exponent];
  for (int j = 0; j < kFp4Block / 2; ++j) out[j] = uint8_t(table[codes[2 * j]] | table[codes[2 * j + 1]] << 4);
  return uint8_t(e8m0_code(exponent));
}

inline bool is_zero_fp8_block(const uint8_t* codes) {
  uint8_t any = 0;
  for (int i = 0; i < kFp8Block; ++i) any = uint8_t(any | codes[i]);
  return (any & E4M3::magnitude_mask) == 0;
}

// ------------------------------------------------------------------------------------------------- MXFP4 -> bfloat16
inline void decode_fp4_block(const uint8_t* codes, uint8_t scale, uint16_t* out) {
  const uint16_t* values = bf16_values().of[scale].data();
  for (int j = 0; j < kFp4Block / 2; ++j) {
    out[2 * j] = values[codes[j] & 15u];
    out[2 * j + 1] = values[codes[j] >> 4];
  }
}

}  // namespace mxsim::host
