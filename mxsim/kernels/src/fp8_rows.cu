// Computes: from FP8 rows (1x128 blocks, power-of-two scales): MXFP4 rows, and the same rows laid out expert by expert.
// Contract: fp8_row_to_fp4_row is bit-equal to mxsim.blocks.fp8_row_to_fp4_row; a scale that is no power of two counts
// as
//   NaN here. fp8_row_to_ragged copies codes and scales; its padding is code 0x00 and scale 1.
// Work split: see row_tile.cuh; to MXFP4 a lane takes 32 elements, and no scales are shared.
// Traffic per element: read 33/32 byte, write 17/32 byte (FP4) or 33/32 byte (ragged).
#include "mxsim/row_tile.cuh"

namespace mxsim {

// A lane takes whole blocks of 32, so that a warp's row is 1024 columns.
constexpr int kWarpRows = 4;
constexpr int kTileRows = kWarpRows * kTileWarps;

extern "C" __global__ void __launch_bounds__(kTileThreads) fp8_row_to_fp4_row(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first_row = tile_first_row(kTileRows);
  const int64_t column = (int64_t(blockIdx.x) * kWarpSize + lane) * 32;
  const int rows_left = column < p.cols ? int(min(p.rows - first_row, int64_t(kTileRows))) : 0;
  const uint32_t rounding_bias = e2m1_scale_rounding_bias<FP16::mantissa_bits>(ScaleRule(p.rule));
  const int64_t first_element = (first_row + warp) * p.cols + column, row_step = kTileWarps * p.cols;
  const uint8_t* in = static_cast<const uint8_t*>(p.in_codes) + first_element;
  const uint32_t* in_scales = static_cast<const uint32_t*>(p.in_scales) + (first_row + warp) * p.in_scale_row_stride +
                              column / 128 * p.in_scale_col_stride;
  uint8_t* out = static_cast<uint8_t*>(p.out_codes) + first_element / 2;
  uint8_t* out_scales = static_cast<uint8_t*>(p.out_scales) + first_element / 32;

  uint4 bytes[kWarpRows][2];
  uint32_t scale_bits[kWarpRows];
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const bool present = warp + i * kTileWarps < rows_left;
    bytes[i][0] = present ? load_v4(in + i * row_step) : uint4{0, 0, 0, 0};
    bytes[i][1] = present ? load_v4(in + i * row_step + 16) : uint4{0, 0, 0, 0};
    scale_bits[i] = present ? in_scales[i * kTileWarps * p.in_scale_row_stride] : 0u;
  }
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    if (warp + i * kTileWarps >= rows_left) return;
    uint32_t values[4][4];
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint4 b = bytes[i][j / 4];
      const uint32_t words[4] = {b.x, b.y, b.z, b.w};
      values[j / 2][j % 2 * 2] = f16x2_from_lower_e4m3(words[j % 4]);
      values[j / 2][j % 2 * 2 + 1] = f16x2_from_upper_e4m3(words[j % 4]);
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) largest = max_magnitude_f16x2(largest, values[j / 4][j % 4]);
    const uint32_t amax = larger_lane(largest & kMagnitudes16x2);  // normal in f16, or zero
    const int source_exponent = scale_exponent_of_fp32(scale_bits[i]);
    const bool poisoned = amax > FP16::inf_code || source_exponent == kNotAPowerOfTwo;
    int exponent = int((amax + rounding_bias) >> FP16::mantissa_bits) - FP16::bias - E2M1::emax + source_exponent;
    exponent = amax == 0 ? kMinScaleExponent : clamp_int(exponent, kMinScaleExponent, kMaxScaleExponent);
    const uint32_t factor = both_lanes(f16_power_of_two(min_int(source_exponent - exponent, 15)));  // over 15: zeros
    uint4 codes{fp4x8_from_f16x8(values[0], factor), fp4x8_from_f16x8(values[1], factor),
                fp4x8_from_f16x8(values[2], factor), fp4x8_from_f16x8(values[3], factor)};
    if (poisoned) codes = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(out + i * (row_step / 2)) = codes;
    out_scales[i * (row_step / 32)] = uint8_t(poisoned ? kE8M0Nan : e8m0_code(exponent));
  }
}

// Codes and scales as they are.
struct Fp8Copy {
  static constexpr int kWarpRows = 4;
  static constexpr bool kEveryRow = false;
  struct Data {
    uint4 codes;
    uint32_t scale;
  };
  __device__ __forceinline__ static Data load(const Params& p, int64_t row, int64_t element) {
    const int64_t block = (element - row * p.cols) / 128;
    return {load_streaming_v4(static_cast<const uint8_t*>(p.in_codes) + element),
            static_cast<const uint32_t*>(p.in_scales)[row * p.in_scale_row_stride + block * p.in_scale_col_stride]};
  }
  __device__ __forceinline__ static uint32_t convert(const Params&, const Data& data, int64_t, bool, uint4& codes) {
    codes = data.codes;
    return data.scale;
  }
};

extern "C" __global__ void __launch_bounds__(kTileThreads) fp8_row_to_ragged(const __grid_constant__ Params p) {
  convert_rows<Fp8Copy, true>(p, p.out_codes, p.out_scales);
}

}  // namespace mxsim
