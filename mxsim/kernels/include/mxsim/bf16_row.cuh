// A lane's 16 bfloat16 of a row, and what follows once their MXFP4 codes are known.
#pragma once

#include "row_tile.cuh"

namespace mxsim {

struct Bf16x16 {
  uint4 low, high;
};
__device__ __forceinline__ Bf16x16 load_bf16x16(const Params& p, int64_t element) {
  const uint4* in = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.in_codes) + element);
  return {load_v4(in), load_v4(in + 1)};
}
__device__ __forceinline__ uint32_t largest_magnitudes(const Bf16x16& x) {
  return max_magnitude_bf16x2(largest_magnitudes(x.low), largest_magnitudes(x.high));
}

// Store the MXFP4 codes if present, and convert them to FP8; returns the FP8 scale's bits. element: index of the first.
__device__ __forceinline__ uint32_t store_fp4_and_expand(const Params& p, uint2 nibbles, uint32_t scale_code,
                                                         int64_t element, bool present, uint4& codes) {
  if (present) {
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out_codes) + uint64_t(element) / 2) = nibbles;
    if (threadIdx.x % 2 == 0) static_cast<uint8_t*>(p.out_scales)[uint64_t(element) / 32] = uint8_t(scale_code);
  }
  uint32_t shared = scale_code == kE8M0Nan ? 0u : scale_code;
  shared = max_uint(shared, __shfl_xor_sync(kAllLanes, shared, 2));
  shared = max_uint(shared, __shfl_xor_sync(kAllLanes, shared, 4));
  const ExpandTable table = expand_table(scale_code, int(shared), p.headroom);
  const uint2 low = expand_fp4x8(nibbles.x, table), high = expand_fp4x8(nibbles.y, table);
  codes = {low.x, low.y, high.x, high.y};
  return fp32_power_of_two_bits(int(shared) - kE8M0Bias - p.headroom);
}

}  // namespace mxsim
