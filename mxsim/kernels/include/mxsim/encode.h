// The plain rule for one element of a block: IEEE bits over the block's scale -> element code.
#pragma once

#include "scale.h"

namespace mxsim {

// Code of value(bits) / 2**scale_exponent: one rounding, ties to even, saturating, sign kept. bits are finite.
template <typename Source, typename Element>
MXSIM_HD constexpr uint32_t encode_scaled(uint32_t bits, int scale_exponent) {
  Unpacked x = unpack<Source>(bits & Source::magnitude_mask);
  x.exponent -= scale_exponent;
  return round_and_pack<Element>(x) | ((bits & Source::sign_mask) != 0 ? Element::sign_mask : 0u);
}
static_assert(encode_scaled<BF16, E2M1>(0x3F40, 0) == 0x2 && encode_scaled<BF16, E2M1>(0xC0A0, 0) == 0xE, "0.75, -5");
static_assert(encode_scaled<FP32, E4M3>(0x43E80000, 0) == 0x7E && encode_scaled<FP32, E4M3>(0x80000001, -127) == 0x80);
static_assert(encode_scaled<FP16, E2M1>(0x0001, -24) == 0x2 && encode_scaled<BF16, E2M1>(0x8000, 5) == 0x8,
              "2**-24, -0");

// binary32 bits of an FP8 scale -> (exponent, is it NaN); what is neither a power of two nor NaN: kNotAPowerOfTwo,
// false.
struct Fp8Scale {
  int exponent;
  bool is_nan;
};
MXSIM_HD constexpr Fp8Scale unpack_fp8_scale(uint32_t bits) {
  return {fp32_exponent(bits), (bits & FP32::magnitude_mask) > FP32::inf_code};
}

}  // namespace mxsim
