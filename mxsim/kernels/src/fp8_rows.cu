// Computes: from FP8 rows (1x128 blocks, power-of-two scales): MXFP4 rows, and the same rows laid out expert by expert.
// Contract: fp8_row_to_fp4_row is bit-equal to mxsim.blocks.fp8_row_to_fp4_row; a scale that is no power of two counts as
//   NaN here. fp8_row_to_ragged copies codes and scales; its padding is code 0x00 and scale 1.
// Work split: a block takes 32 rows by 512 columns, a warp a row, a lane 16 elements.
// Traffic per element: read 33/32 byte, write 17/32 byte (FP4) or 33/32 byte (ragged).
#include "mxsim/device.cuh"

namespace mxsim {

#if __CUDA_ARCH__ >= 890
// Eight E4M3 codes -> eight nibbles. factor: 2**(s8 - X) in both f16 lanes.
__device__ __forceinline__ uint32_t fp4x8_from_fp8x8(uint2 bytes, uint32_t factor) {
  const uint32_t values[4] = {f16x2_from_e4m3x2(uint16_t(bytes.x)), f16x2_from_e4m3x2(uint16_t(bytes.x >> 16)),
                              f16x2_from_e4m3x2(uint16_t(bytes.y)), f16x2_from_e4m3x2(uint16_t(bytes.y >> 16))};
  uint32_t codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    codes[j] = (e2m1x2_from_f16x2(values[j] & kMagnitudes16x2, factor) << 3) | (values[j] & kSigns16x2);
  }
  return pack_nibbles(codes);
}
#endif

// f16 bits of 2**exponent, 0 below 2**-24.  exponent <= 15.
__device__ __forceinline__ uint32_t f16_power_of_two(int exponent) {
  if (exponent >= FP16::emin) return uint32_t(exponent + FP16::bias) << FP16::mantissa_bits;
  return exponent >= -24 ? 0x400u >> (FP16::emin - exponent) : 0u;
}

extern "C" __global__ void __launch_bounds__(kTileThreads) fp8_row_to_fp4_row(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t num_slices = ceil_div(p.cols, kTileCols);
  const int64_t first_row = int64_t(blockIdx.x) / num_slices * kTileRows;
  const int64_t column = int64_t(blockIdx.x) % num_slices * kTileCols + 16 * lane;
  const bool in_columns = column < p.cols;

  uint4 bytes[kRowsPerWarp];
  uint32_t scale_bits[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t row = first_row + warp + i * kTileWarps;
    bytes[i] = {0, 0, 0, 0};
    scale_bits[i] = 0;
    if (row < p.rows && in_columns) {
      bytes[i] = load_streaming_v4(static_cast<const uint8_t*>(p.in_codes) + row * p.cols + column);
      scale_bits[i] = reinterpret_cast<const uint32_t*>(
          p.in_scales)[row * p.in_scale_row_stride + column / 128 * p.in_scale_col_stride];
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const uint32_t words[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      largest = max_u16x2(largest, max_u16x2(words[j] & 0x007F007Fu, (words[j] >> 8) & 0x007F007Fu));
    }
    const uint32_t amax = larger_lane(group_max_u16x2(largest, 2));
    const int source_exponent = fp32_exponent(scale_bits[i]);
    const bool poisoned = amax == kE4M3Nan || source_exponent == kNotAPowerOfTwo;
    const int exponent = scale_exponent<E4M3, E2M1>(amax, ScaleRule(p.rule), source_exponent);
    const int shift = source_exponent - exponent;
    uint2 packed;
#if __CUDA_ARCH__ >= 890
    const uint32_t factor = both_lanes(f16_power_of_two(min_int(shift, 15)));  // above 15 only for zeros
    packed.x = fp4x8_from_fp8x8(uint2{words[0], words[1]}, factor);
    packed.y = fp4x8_from_fp8x8(uint2{words[2], words[3]}, factor);
#else
    packed = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      packed.x |= rescale<E4M3, E2M1>((words[j / 4] >> (8 * (j % 4))) & 0xFFu, shift) << (4 * j);
      packed.y |= rescale<E4M3, E2M1>((words[2 + j / 4] >> (8 * (j % 4))) & 0xFFu, shift) << (4 * j);
    }
#endif
    const int64_t row = first_row + warp + i * kTileWarps;
    if (row < p.rows && in_columns) {
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.out_codes) + (row * p.cols + column) / 2) =
          poisoned ? uint2{0, 0} : packed;
      if (lane % 2 == 0) {
        static_cast<uint8_t*>(p.out_scales)[(row * p.cols + column) / 32] =
            uint8_t(poisoned ? kE8M0Nan : e8m0_code(exponent));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kTileThreads) fp8_row_to_ragged(const __grid_constant__ Params p) {
  __shared__ RowTile tile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t num_slices = ceil_div(p.cols, kTileCols);
  const int64_t first_row = int64_t(blockIdx.x) / num_slices * kTileRows;
  const int64_t first_col = int64_t(blockIdx.x) % num_slices * kTileCols;
  const int64_t column = first_col + 16 * lane;
  if (warp == 0) locate_rows<true>(p, first_row, tile);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int r = warp + i * kTileWarps;
    const int64_t source = tile.rows[r].source;
    if (source == kAbsent || column >= p.cols) continue;
    uint4 codes{0, 0, 0, 0};
    if (source >= 0) {
      codes = load_streaming_v4(static_cast<const uint8_t*>(p.in_codes) + source * p.cols + column);
      if (lane % 8 == 0) {
        tile.scales[lane / 8][r] = reinterpret_cast<const uint32_t*>(
            p.in_scales)[source * p.in_scale_row_stride + column / 128 * p.in_scale_col_stride];
      }
    }
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out_codes) + (first_row + r) * p.cols + column) = codes;
  }
  __syncthreads();
  store_tile_scales(p, p.out_scales, first_col, tile);
}

}  // namespace mxsim
