// Computes: FP8 rows (1x128 blocks) of bfloat16; and, in one read, MXFP4 rows with the FP8 rows converted from them.
// Contract: bf16_to_fp8_row is bit-equal to mxsim.blocks.quantize(x, FP8_1X128), bf16_to_fp4_and_fp8_row to
//   quantize(x, MXFP4) followed by fp4_row_to_fp8_row; expert by expert in the ragged forms, whose FP8 padding is code
//   0x00 and scale 1. MXFP4 rows are never padded.
// Work split: a block makes 32 output rows by 512 columns, a warp a row, a lane 8 elements of each half: 16 lanes hold a
//   128-block, four a 32-block.
// Traffic per element: read 2 bytes, write 33/32 byte, fused 33/32 + 17/32.
#include "mxsim/device.cuh"

namespace mxsim {

constexpr int kHalves = kTileCols / (kWarpSize * 8);
constexpr int kLoads = kHalves * kRowsPerWarp;

struct Bf16Fp8Row {
  // Eight elements of a 128-block -> eight codes; returns the block's scale.
  __device__ __forceinline__ static uint32_t convert(const Params&, uint4 x, int64_t, uint2& codes) {
    const uint32_t largest = max_u16x2(max_u16x2(x.x & kMagnitudes16x2, x.y & kMagnitudes16x2),
                                       max_u16x2(x.z & kMagnitudes16x2, x.w & kMagnitudes16x2));
    const uint32_t amax = larger_lane(group_max_u16x2(largest, 16));
    const bool poisoned = amax >= BF16::inf_code;
    const int exponent = fp8_scale_exponent(amax);
    codes.x = e4m3x2_from_bf16x2(x.x, exponent) | e4m3x2_from_bf16x2(x.y, exponent) << 16;
    codes.y = e4m3x2_from_bf16x2(x.z, exponent) | e4m3x2_from_bf16x2(x.w, exponent) << 16;
    if (poisoned) codes = {0x7F7F7F7Fu, 0x7F7F7F7Fu};
    return poisoned ? kFp32Nan : fp32_power_of_two_bits(exponent);
  }
};

struct Bf16Fp4Fp8Row {
  // The same, by way of the MXFP4 codes, which are stored at element `index`.
  __device__ __forceinline__ static uint32_t convert(const Params& p, uint4 x, int64_t index, uint2& codes) {
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    uint32_t magnitudes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) magnitudes[j] = pairs[j] & kMagnitudes16x2;
    const uint32_t largest = max_u16x2(max_u16x2(magnitudes[0], magnitudes[1]), max_u16x2(magnitudes[2], magnitudes[3]));
    const uint32_t amax = larger_lane(group_max_u16x2(largest, 4));
    const uint32_t scale_code =
        e2m1_scale_code<BF16>(amax, e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule)));
    const uint32_t factor = both_lanes((254u - scale_code) << BF16::mantissa_bits);
    uint32_t lanes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) lanes[j] = (e2m1x2_from_bf16x2(magnitudes[j], factor) << 6) | (pairs[j] & kSigns16x2);
    const uint32_t nibbles = scale_code == kE8M0Nan ? 0u : pack_nibbles(lanes);
    if (index >= 0) {
      reinterpret_cast<uint32_t*>(p.out_codes)[index / 8] = nibbles;
      if (index % 32 == 0) static_cast<uint8_t*>(p.out_scales)[index / 32] = uint8_t(scale_code);
    }
    uint32_t shared = scale_code == kE8M0Nan ? 0u : scale_code;
    shared = max_uint(shared, __shfl_xor_sync(kAllLanes, shared, 4));
    shared = max_uint(shared, __shfl_xor_sync(kAllLanes, shared, 8));
    codes = expand_fp4x8(nibbles, expand_table(scale_code, int(shared), p.headroom));
    return fp32_power_of_two_bits(int(shared) - kE8M0Bias - p.headroom);
  }
};

template <typename Row, bool kRagged>
__device__ __forceinline__ void rows_from_bf16(const Params& p, void* out_codes, void* out_scales) {
  __shared__ RowTile tile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t num_slices = ceil_div(p.cols, kTileCols);
  const int64_t first_row = int64_t(blockIdx.x) / num_slices * kTileRows;
  const int64_t first_col = int64_t(blockIdx.x) % num_slices * kTileCols;
  if (warp == 0) locate_rows<kRagged>(p, first_row, tile);
  __syncthreads();

  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t source = tile.rows[warp + i / kHalves * kTileWarps].source;
    const int64_t column = first_col + (i % kHalves) * (kWarpSize * 8) + 8 * lane;
    x[i] = {0, 0, 0, 0};
    if (source >= 0 && column < p.cols) {
      x[i] = load_streaming_v4(static_cast<const uint16_t*>(p.in_codes) + source * p.cols + column);
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int r = warp + i / kHalves * kTileWarps, half = i % kHalves;
    const int64_t column = first_col + half * (kWarpSize * 8) + 8 * lane;
    const int64_t source = tile.rows[r].source;
    const bool in_columns = column < p.cols;
    uint2 codes;
    const uint32_t scale = Row::convert(p, x[i], source >= 0 && in_columns ? source * p.cols + column : -1, codes);
    if (source == kAbsent || !in_columns) continue;
    if (kRagged && source == kPadding) codes = {0, 0};
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(out_codes) + (first_row + r) * p.cols + column) = codes;
    if (lane % 16 == 0) tile.scales[2 * half + lane / 16][r] = scale;
  }
  __syncthreads();
  store_tile_scales(p, out_scales, first_col, tile);
}

extern "C" __global__ void __launch_bounds__(kTileThreads) bf16_to_fp8_row_dense(const __grid_constant__ Params p) {
  rows_from_bf16<Bf16Fp8Row, false>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads) bf16_to_fp8_row_ragged(const __grid_constant__ Params p) {
  rows_from_bf16<Bf16Fp8Row, true>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    bf16_to_fp4_and_fp8_row_dense(const __grid_constant__ Params p) {
  rows_from_bf16<Bf16Fp4Fp8Row, false>(p, p.out_codes_fp8, p.out_scales_fp8);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    bf16_to_fp4_and_fp8_row_ragged(const __grid_constant__ Params p) {
  rows_from_bf16<Bf16Fp4Fp8Row, true>(p, p.out_codes_fp8, p.out_scales_fp8);
}

}  // namespace mxsim
