// Computes: FP8 rows (1x128 blocks) of bfloat16; and, in one read, MXFP4 rows with the FP8 rows converted from them.
// Contract: bf16_to_fp8_row is bit-equal to mxsim.blocks.quantize(x, FP8_1X128), bf16_to_fp4_and_fp8_row to
//   quantize(x, MXFP4) followed by fp4_row_to_fp8_row; expert by expert in the ragged forms, whose FP8 padding is code
//   0x00 and scale 1. MXFP4 rows are never padded.
// Work split: see row_tile.cuh.
// Traffic per element: read 2 bytes, write 33/32 byte, fused 33/32 + 17/32.
#include "mxsim/bf16_row.cuh"

namespace mxsim {

struct Bf16ToFp8 {
  static constexpr int kWarpRows = 4;
  static constexpr bool kEveryRow = false;
  using Data = Bf16x16;
  __device__ __forceinline__ static Data load(const Params& p, int64_t, int64_t element) {
    return load_bf16x16(p, element);
  }
  __device__ __forceinline__ static uint32_t convert(const Params&, const Data& x, int64_t, bool, uint4& codes) {
    const uint32_t amax = group_amax_bf16(largest_magnitudes(x), 8);
    if (amax >= BF16::inf_code) {
      codes = {0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu};
      return kFp32Nan;
    }
    const int exponent = fp8_scale_exponent(amax);
    const float factor = __uint_as_float(fp32_power_of_two_bits(-exponent));
    codes = {e4m3x4_from_bf16(x.low.x, x.low.y, factor), e4m3x4_from_bf16(x.low.z, x.low.w, factor),
             e4m3x4_from_bf16(x.high.x, x.high.y, factor), e4m3x4_from_bf16(x.high.z, x.high.w, factor)};
    return fp32_power_of_two_bits(exponent);
  }
};

// By way of the MXFP4 codes, which are stored too.
struct Bf16ToFp4AndFp8 {
  static constexpr int kWarpRows = 4;
  static constexpr bool kEveryRow = true;
  using Data = Bf16x16;
  __device__ __forceinline__ static Data load(const Params& p, int64_t, int64_t element) {
    return load_bf16x16(p, element);
  }
  __device__ __forceinline__ static uint32_t convert(const Params& p, const Data& x, int64_t element, bool present,
                                                     uint4& codes) {
    const uint32_t rounding_bias = e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule));
    const uint32_t scale_code = e2m1_scale_code<BF16>(group_amax_bf16(largest_magnitudes(x), 2), rounding_bias);
    const uint32_t factor = both_lanes((254u - scale_code) << BF16::mantissa_bits);
    uint2 nibbles{fp4x8_from_bf16x8(x.low, factor), fp4x8_from_bf16x8(x.high, factor)};
    if (scale_code == kE8M0Nan) nibbles = {0, 0};
    return store_fp4_and_expand(p, nibbles, scale_code, element, present, codes);
  }
};

extern "C" __global__ void __launch_bounds__(kTileThreads) bf16_to_fp8_row_dense(const __grid_constant__ Params p) {
  convert_rows<Bf16ToFp8, false>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads) bf16_to_fp8_row_ragged(const __grid_constant__ Params p) {
  convert_rows<Bf16ToFp8, true>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    bf16_to_fp4_and_fp8_row_dense(const __grid_constant__ Params p) {
  convert_rows<Bf16ToFp4AndFp8, false>(p, p.out_codes_fp8, p.out_scales_fp8);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    bf16_to_fp4_and_fp8_row_ragged(const __grid_constant__ Params p) {
  convert_rows<Bf16ToFp4AndFp8, true>(p, p.out_codes_fp8, p.out_scales_fp8);
}

}  // namespace mxsim
