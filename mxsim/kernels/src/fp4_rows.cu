// Computes: FP8 rows (1x128 blocks) and BF16 rows from MXFP4 rows.
// Contract: fp4_row_to_fp8_row is bit-equal to mxsim.blocks.fp4_row_to_fp8_row, expert by expert in the ragged form, whose
//   padding is code 0x00 and scale 1; fp4_to_bf16 to mxsim.blocks.dequantize(..., bfloat16).
// Work split: FP8: a block makes 32 output rows by 512 columns, a warp a row, a lane 16 elements. BF16: flat, a thread
//   8 elements.
// Traffic per element: read 17/32 byte, write 33/32 byte (FP8) or 2 bytes (BF16).
#include "mxsim/device.cuh"

namespace mxsim {

template <bool kRagged>
__device__ __forceinline__ void fp4_row_to_fp8_row(const Params& p) {
  __shared__ RowTile tile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t num_slices = ceil_div(p.cols, kTileCols);
  const int64_t first_row = int64_t(blockIdx.x) / num_slices * kTileRows;
  const int64_t first_col = int64_t(blockIdx.x) % num_slices * kTileCols;
  const int64_t column = first_col + 16 * lane;
  const bool in_columns = column < p.cols;
  if (warp == 0) locate_rows<kRagged>(p, first_row, tile);
  __syncthreads();

  uint2 nibbles[kRowsPerWarp] = {};
  uint32_t four_codes[kRowsPerWarp] = {};
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t source = tile.rows[warp + i * kTileWarps].source;
    if (source >= 0 && in_columns) {
      nibbles[i] = load_streaming_v2(static_cast<const uint8_t*>(p.in_codes) + (source * p.cols + column) / 2);
      four_codes[i] = reinterpret_cast<const uint32_t*>(p.in_scales)[(source * p.cols + column) / 128];
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int r = warp + i * kTileWarps;
    const uint32_t shared = shared_scale_code(four_codes[i]);
    const uint32_t code = (four_codes[i] >> (8 * (lane / 2 % 4))) & 0xFFu;
    const ExpandTable table = expand_table(code, int(shared), p.headroom);
    const uint2 low = expand_fp4x8(nibbles[i].x, table), high = expand_fp4x8(nibbles[i].y, table);
    const int64_t out_row = first_row + r;
    const int64_t source = tile.rows[r].source;
    if (in_columns && source != kAbsent) {
      const bool padding = kRagged && source == kPadding;
      const uint4 codes = padding ? uint4{0, 0, 0, 0} : uint4{low.x, low.y, high.x, high.y};
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out_codes) + out_row * p.cols + column) = codes;
      if (lane % 8 == 0) tile.scales[lane / 8][r] = fp32_power_of_two_bits(int(shared) - kE8M0Bias - p.headroom);
    }
  }
  __syncthreads();
  store_tile_scales(p, p.out_scales, first_col, tile);
}

extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_row_to_fp8_row_dense(const __grid_constant__ Params p) {
  fp4_row_to_fp8_row<false>(p);
}
extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_row_to_fp8_row_ragged(const __grid_constant__ Params p) {
  fp4_row_to_fp8_row<true>(p);
}

// Two byte tables hold the bfloat16 of each E2M1 magnitude; times 2**X.
extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_to_bf16(const __grid_constant__ Params p) {
  constexpr uint32_t kUpperLo = 0x3F3F3F00u, kUpperHi = 0x40404040u;  // 0, 0.5, 1, 1.5 | 2, 3, 4, 6
  constexpr uint32_t kLowerLo = 0xC0800000u, kLowerHi = 0xC0804000u;
  const int64_t vector = int64_t(blockIdx.x) * kTileThreads + threadIdx.x;
  if (vector >= p.rows * p.cols / 8) return;
  const uint32_t nibbles = reinterpret_cast<const uint32_t*>(p.in_codes)[vector];
  const uint32_t code = static_cast<const uint8_t*>(p.in_scales)[vector / 4];
  // 2**X in bfloat16; 2**-127 is a subnormal. The product rounds once, and overflows to infinity.
  const uint32_t factor = both_lanes(code == 0 ? 0x0040u : code << BF16::mantissa_bits);
  uint32_t out[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = nibbles >> (16 * half);
    const uint32_t magnitudes = four & 0x7777u;
    const uint32_t upper = __byte_perm(kUpperLo, kUpperHi, magnitudes) |
                           ((__byte_perm(0x80808080u, 0x80808080u, four) << 1) & 0x80808080u);
    const uint32_t lower = __byte_perm(kLowerLo, kLowerHi, magnitudes);
    const uint32_t pairs[2] = {__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // a * b as fma(a, b, c) with c the zero of the product's sign, so that -0 stays -0
      const uint32_t product = fma_bf16x2(pairs[j], factor, pairs[j] & kSigns16x2);
      out[2 * half + j] = code == kE8M0Nan ? 0x7FC07FC0u : product;
    }
  }
  reinterpret_cast<uint4*>(p.out_codes)[vector] = uint4{out[0], out[1], out[2], out[3]};
}

}  // namespace mxsim
