// Computes: FP8 columns (128x1 blocks, transposed output) from MXFP4 rows, FP8 rows and bfloat16.
// Contract: bit-equal to mxsim.blocks.fp4_row_to_fp8_col, fp8_row_to_fp8_col and quantize(x.T, FP8_1X128), expert by
//   expert in the ragged form. Padding is fused: columns past an expert's rows are code 0x00.
// Work split: a block makes one tile of 128 rows (one expert's) by kCols columns. A thread holds 4 rows by 32, 16 or 8
//   columns (16 bytes a row); it converts, transposes 4x4 bytes in registers, and leaves words of four rows in shared
//   memory, from where each column's 128 bytes go out in one run.
// Traffic per element: read 17/32, 33/32 or 2 bytes, write 33/32.
#include "mxsim/transpose.cuh"

namespace mxsim {

// Where a block's tile lies.
struct ColumnTile {
  int64_t first_row;     // of the input
  int num_rows;          // real ones, 0 to 128; -1: no tile here
  int64_t first_col;
  uint8_t* out_codes;    // of the tile's first column
  int64_t out_stride;    // between columns
  uint32_t* out_scales;  // of the tile's first column; contiguous
};

template <bool kRagged, int kCols>
__device__ __forceinline__ ColumnTile locate_tile(const Params& p) {
  const int64_t num_stripes = ceil_div(p.cols, kCols);
  const int64_t block = int64_t(blockIdx.x) / num_stripes;
  ColumnTile tile;
  tile.first_col = int64_t(blockIdx.x) % num_stripes * kCols;
  Expert expert{0, p.rows, 0, round_up(p.rows, kBlockRows)};
  if (kRagged) expert = find_expert(p, kBlockRows, block * kBlockRows);
  const int64_t in_expert = block * kBlockRows - expert.first_padded;
  tile.first_row = expert.first_row + in_expert;
  tile.num_rows = expert.size < 0 ? -1 : int(min(expert.size - in_expert, int64_t(kBlockRows)));
  tile.out_codes = static_cast<uint8_t*>(p.out_codes) + p.cols * expert.first_padded + tile.first_col * expert.padded + in_expert;
  tile.out_stride = expert.padded;
  tile.out_scales = static_cast<uint32_t*>(p.out_scales) + block * p.cols + tile.first_col;
  return tile;
}

// --------------------------------------------------------------------------------------------------------- from MXFP4
constexpr int kFp4Cols = kColGroups * 32;

template <bool kRagged>
__device__ __forceinline__ void fp4_row_to_fp8_col(const Params& p) {
  __shared__ Transposed<kFp4Cols> transposed;
  __shared__ uint32_t warp_max[kWarps][kColGroups];
  const ColumnTile tile = locate_tile<kRagged, kFp4Cols>(p);
  if (tile.num_rows < 0) return;
  const int col_group = my_col_group(), row_group = my_row_group();
  const int64_t column = tile.first_col + 32 * col_group;

  uint4 nibbles[4];
  uint32_t codes[4];
  uint32_t shared = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    nibbles[r] = {0, 0, 0, 0};
    codes[r] = 0;
    if (4 * row_group + r < tile.num_rows && column < p.cols) {
      const int64_t block = ((tile.first_row + 4 * row_group + r) * p.cols + column) / 32;
      nibbles[r] = load_streaming_v4(static_cast<const uint4*>(p.in_codes) + block);
      codes[r] = static_cast<const uint8_t*>(p.in_scales)[block];
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) shared = max_uint(shared, codes[r] == kE8M0Nan ? 0u : codes[r]);
  for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
    shared = max_uint(shared, __shfl_xor_sync(kAllLanes, shared, offset));
  }
  if (threadIdx.x % kWarpSize < kColGroups) warp_max[threadIdx.x / kWarpSize][col_group] = shared;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) shared = max_uint(shared, warp_max[w][col_group]);

  ExpandTable tables[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    tables[r] = expand_table(codes[r], int(shared), p.headroom);
    if (kRagged || 4 * row_group + r >= tile.num_rows) {
      if (4 * row_group + r >= tile.num_rows) tables[r] = {{0, 0}, 0};
    }
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint2 expanded[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t words[4] = {nibbles[r].x, nibbles[r].y, nibbles[r].z, nibbles[r].w};
      expanded[r] = expand_fp4x8(words[word], tables[r]);
    }
    uint32_t columns[4];
    transpose_4x4({expanded[0].x, expanded[1].x, expanded[2].x, expanded[3].x}, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) transposed.at(col_group, 8 * word + c, row_group) = columns[c];
    transpose_4x4({expanded[0].y, expanded[1].y, expanded[2].y, expanded[3].y}, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) transposed.at(col_group, 8 * word + 4 + c, row_group) = columns[c];
  }
  __syncthreads();
  transposed.store(tile.out_codes, tile.out_stride, p.cols - tile.first_col);
  // One scale a column; thread t's column lies in group t / 32, whose maximum warp t / 32 can read off.
  uint32_t mine = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) mine = max_uint(mine, warp_max[w][threadIdx.x / 32]);
  if (tile.first_col + threadIdx.x < p.cols) {
    tile.out_scales[threadIdx.x] = fp32_power_of_two_bits(int(mine) - kE8M0Bias - p.headroom);
  }
}
static_assert(kFp4Cols == kThreads, "one thread a column stores the scales");

extern "C" __global__ void __launch_bounds__(kThreads) fp4_row_to_fp8_col_dense(const __grid_constant__ Params p) {
  fp4_row_to_fp8_col<false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) fp4_row_to_fp8_col_ragged(const __grid_constant__ Params p) {
  fp4_row_to_fp8_col<true>(p);
}

// ----------------------------------------------------------------------------------------------------------- from FP8
constexpr int kFp8Cols = kColGroups * 16;  // one 128-block of every row

// Four E4M3 codes times 2**-gap, one rounding.  gap >= 0.
__device__ __forceinline__ uint32_t lower_e4m3x4(uint32_t codes, int gap, uint32_t factor) {
  if (gap == 0) return codes;
#if __CUDA_ARCH__ >= 890
  // v has four significant bits, so v * 2**-gap is exact in f16 unless it is under 2**-21: far below 2**-10, where E4M3
  // rounds to zero.
  const uint32_t low = fma_f16x2(f16x2_from_e4m3x2(uint16_t(codes)), factor, kNegativeZeros16x2);
  const uint32_t high = fma_f16x2(f16x2_from_e4m3x2(uint16_t(codes >> 16)), factor, kNegativeZeros16x2);
  uint32_t lowered = uint32_t(e4m3x2_from_f16x2(low)) | uint32_t(e4m3x2_from_f16x2(high)) << 16;
  lowered = (lowered & 0x7F7F7F7Fu) | (codes & 0x80808080u);
  const uint32_t nan = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  return lowered | (nan - (nan >> 7));  // 0x7F where the code is a NaN
#else
  uint32_t lowered = 0;
  for (int i = 0; i < 4; ++i) lowered |= rescale<E4M3, E4M3>((codes >> (8 * i)) & 0xFFu, -gap) << (8 * i);
  return lowered;
#endif
}

// f16 bits of 2**-gap in both lanes; beyond 2**-24 all codes round to zero, as they do there.
__device__ __forceinline__ uint32_t f16x2_power_of_two(int gap) {
  return both_lanes(gap <= 14 ? uint32_t(15 - gap) << FP16::mantissa_bits : 0x400u >> (min_int(gap, 24) - 14));
}

template <bool kRagged>
__device__ __forceinline__ void fp8_row_to_fp8_col(const Params& p) {
  __shared__ Transposed<kFp8Cols> transposed;
  __shared__ int warp_max[kWarps];
  const ColumnTile tile = locate_tile<kRagged, kFp8Cols>(p);
  if (tile.num_rows < 0) return;
  const int col_group = my_col_group(), row_group = my_row_group();
  const int64_t column = tile.first_col + 16 * col_group;

  uint4 bytes[4];
  uint32_t scale_bits[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    bytes[r] = {0, 0, 0, 0};
    scale_bits[r] = 0x3F800000u;
    if (4 * row_group + r < tile.num_rows) {
      const int64_t row = tile.first_row + 4 * row_group + r;
      bytes[r] = load_streaming_v4(static_cast<const uint8_t*>(p.in_codes) + row * p.cols + column);
      scale_bits[r] = reinterpret_cast<const uint32_t*>(
          p.in_scales)[row * p.in_scale_row_stride + tile.first_col / 128 * p.in_scale_col_stride];
    }
  }
  // Rows whose 128 codes are all zeros do not count (NUMERICS 5.4): bit r says that row r has something else.
  uint32_t non_zero_rows = 0;
  int exponents[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const uint32_t any = (bytes[r].x | bytes[r].y | bytes[r].z | bytes[r].w) & 0x7F7F7F7Fu;
    non_zero_rows |= (any != 0 ? 1u : 0u) << r;
    exponents[r] = fp32_exponent(scale_bits[r]);
  }
  for (int offset = 1; offset < kColGroups; offset *= 2) {
    non_zero_rows |= __shfl_xor_sync(kAllLanes, non_zero_rows, offset);
  }
  int shared = kNotAPowerOfTwo;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (non_zero_rows >> r & 1u) shared = max_int(shared, exponents[r]);
  }
  for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
    shared = max_int(shared, __shfl_xor_sync(kAllLanes, shared, offset));
  }
  if (threadIdx.x % kWarpSize == 0) warp_max[threadIdx.x / kWarpSize] = shared;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) shared = max_int(shared, warp_max[w]);
  if (shared == kNotAPowerOfTwo) shared = 0;

  uint32_t factors[4];
  int gaps[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    gaps[r] = max_int(shared - exponents[r], 0);  // negative only where the row is all zeros
    factors[r] = f16x2_power_of_two(gaps[r]);
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t rows[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t words[4] = {bytes[r].x, bytes[r].y, bytes[r].z, bytes[r].w};
      rows[r] = exponents[r] == kNotAPowerOfTwo ? 0x7F7F7F7Fu : lower_e4m3x4(words[word], gaps[r], factors[r]);
    }
    uint32_t columns[4];
    transpose_4x4(rows, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) transposed.at(col_group, 4 * word + c, row_group) = columns[c];
  }
  __syncthreads();
  transposed.store(tile.out_codes, tile.out_stride, p.cols - tile.first_col);
  if (threadIdx.x < kFp8Cols) tile.out_scales[threadIdx.x] = fp32_power_of_two_bits(shared);
}

extern "C" __global__ void __launch_bounds__(kThreads) fp8_row_to_fp8_col_dense(const __grid_constant__ Params p) {
  fp8_row_to_fp8_col<false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) fp8_row_to_fp8_col_ragged(const __grid_constant__ Params p) {
  fp8_row_to_fp8_col<true>(p);
}

// ------------------------------------------------------------------------------------------------------ from bfloat16
constexpr int kBf16Cols = kColGroups * 8;

template <bool kRagged>
__device__ __forceinline__ void bf16_to_fp8_col(const Params& p) {
  __shared__ Transposed<kBf16Cols> transposed;
  __shared__ uint4 warp_max[kWarps][kColGroups];  // amax bits of eight columns, two a word
  const ColumnTile tile = locate_tile<kRagged, kBf16Cols>(p);
  if (tile.num_rows < 0) return;
  const int col_group = my_col_group(), row_group = my_row_group();
  const int64_t column = tile.first_col + 8 * col_group;

  uint4 x[4];
  uint4 largest{0, 0, 0, 0};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    x[r] = {0, 0, 0, 0};
    if (4 * row_group + r < tile.num_rows && column < p.cols) {
      const int64_t row = tile.first_row + 4 * row_group + r;
      x[r] = load_streaming_v4(static_cast<const uint16_t*>(p.in_codes) + row * p.cols + column);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    largest.x = max_u16x2(largest.x, x[r].x & kMagnitudes16x2);
    largest.y = max_u16x2(largest.y, x[r].y & kMagnitudes16x2);
    largest.z = max_u16x2(largest.z, x[r].z & kMagnitudes16x2);
    largest.w = max_u16x2(largest.w, x[r].w & kMagnitudes16x2);
  }
  for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
    largest.x = max_u16x2(largest.x, __shfl_xor_sync(kAllLanes, largest.x, offset));
    largest.y = max_u16x2(largest.y, __shfl_xor_sync(kAllLanes, largest.y, offset));
    largest.z = max_u16x2(largest.z, __shfl_xor_sync(kAllLanes, largest.z, offset));
    largest.w = max_u16x2(largest.w, __shfl_xor_sync(kAllLanes, largest.w, offset));
  }
  if (threadIdx.x % kWarpSize < kColGroups) warp_max[threadIdx.x / kWarpSize][col_group] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint4 other = warp_max[w][col_group];
    largest.x = max_u16x2(largest.x, other.x);
    largest.y = max_u16x2(largest.y, other.y);
    largest.z = max_u16x2(largest.z, other.z);
    largest.w = max_u16x2(largest.w, other.w);
  }
  const uint32_t amax_pairs[4] = {largest.x, largest.y, largest.z, largest.w};
  uint32_t scales[8];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t in[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t pairs[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
      in[r] = pairs[pair];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t amax = half == 0 ? amax_pairs[pair] & 0xFFFFu : amax_pairs[pair] >> 16;
      const bool poisoned = amax >= BF16::inf_code;
      const int exponent = fp8_scale_exponent(amax);
      // The same column of rows 0 and 1, and of rows 2 and 3.
      const uint32_t selector = half == 0 ? 0x5410u : 0x7632u;
      uint32_t codes = e4m3x2_from_bf16x2(__byte_perm(in[0], in[1], selector), exponent) |
                       e4m3x2_from_bf16x2(__byte_perm(in[2], in[3], selector), exponent) << 16;
      if (poisoned) {  // real rows only: the padding stays 0x00
        const int real = min_int(max_int(tile.num_rows - 4 * row_group, 0), 4);
        codes = real == 4 ? 0x7F7F7F7Fu : 0x7F7F7F7Fu & ((1u << (8 * real)) - 1u);
      }
      transposed.at(col_group, 2 * pair + half, row_group) = codes;
      scales[2 * pair + half] = poisoned ? kFp32Nan : fp32_power_of_two_bits(exponent);
    }
  }
  __syncthreads();
  transposed.store(tile.out_codes, tile.out_stride, p.cols - tile.first_col);
  if (row_group == 0 && column < p.cols) {
#pragma unroll
    for (int c = 0; c < 8; ++c) tile.out_scales[8 * col_group + c] = scales[c];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp8_col_dense(const __grid_constant__ Params p) {
  bf16_to_fp8_col<false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp8_col_ragged(const __grid_constant__ Params p) {
  bf16_to_fp8_col<true>(p);
}

}  // namespace mxsim
