// Computes: FP8 columns (128x1 blocks, transposed output) from MXFP4 rows, FP8 rows and bfloat16.
// Contract: bit-equal to mxsim.blocks.fp4_row_to_fp8_col, fp8_row_to_fp8_col and quantize(x.T, FP8_1X128), expert by
//   expert in the ragged form. Padding is fused: columns past an expert's rows are code 0x00.
// Work split: a block makes one tile of 128 rows (one expert's) by kCols columns. A thread holds 4 rows by 32, 16 or 8
//   columns (16 bytes a row), converts and transposes them (transpose.cuh).
// Grid: x row blocks of a band, y stripes of kCols columns, z bands. Blocks that run together cover a band and many
//   stripes: whole input rows, and output runs of band * 128 bytes. Without bands all would write at one stride, often
//   a power of two, and crowd a few memory channels.
// Traffic per element: read 17/32, 33/32 or 2 bytes, write 33/32.
#include "mxsim/transpose.cuh"

namespace mxsim {

// Where a tile lies.
struct ColumnTile {
  int64_t first_row;  // of the input
  int64_t first_col;
  int num_rows;          // real ones, 0 to 128; -1: no tile here
  uint8_t* out_codes;    // of the tile's first column
  int64_t out_stride;    // between columns
  uint32_t* out_scales;  // of the tile's first column; contiguous
};

template <bool kRagged, int kCols>
__device__ __forceinline__ ColumnTile locate_tile(const Params& p) {
  const int64_t block = int64_t(blockIdx.z) * gridDim.x + blockIdx.x;
  ColumnTile tile;
  tile.first_col = int64_t(blockIdx.y) * kCols;
  Expert expert{0, p.rows, 0, round_up(p.rows, kBlockRows)};
  if (kRagged) expert = find_expert(p, kBlockRows, block * kBlockRows);
  const int64_t in_expert = block * kBlockRows - expert.first_padded;
  const int64_t rows_left = expert.size - in_expert;
  tile.first_row = expert.first_row + in_expert;
  tile.num_rows = expert.size < 0 || rows_left <= 0 ? -1 : int(min(rows_left, int64_t(kBlockRows)));
  tile.out_codes =
      static_cast<uint8_t*>(p.out_codes) + p.cols * expert.first_padded + tile.first_col * expert.padded + in_expert;
  tile.out_stride = expert.padded;
  tile.out_scales = static_cast<uint32_t*>(p.out_scales) + block * p.cols + tile.first_col;
  return tile;
}

// What Op does to a tile:
//   kCols, Data, Shared
//   load(p, tile) -> Data                            this thread's elements, zeros where there are none
//   reduce(data, shared)                             leave this warp's part of the maxima in shared
//   scales(p, tile, shared)                          after a barrier: store the scales
//   kNeedsScales                                     whether convert must wait for what `scales` leaves in shared
//   convert(p, tile, data, shared, transposed)       leave words of four rows in shared memory
template <typename Op, bool kRagged>
__device__ __forceinline__ void convert_columns(const Params& p) {
  __shared__ Transposed<Op::kCols> transposed;
  __shared__ typename Op::Shared shared;
  const ColumnTile tile = locate_tile<kRagged, Op::kCols>(p);
  if (tile.num_rows < 0) return;
  const typename Op::Data data = Op::load(p, tile);
  Op::reduce(data, shared);
  __syncthreads();
  Op::scales(p, tile, shared);
  if (Op::kNeedsScales) __syncthreads();
  Op::convert(p, tile, data, shared, transposed);
  __syncthreads();
  transposed.store(tile.out_codes, tile.out_stride, p.cols - tile.first_col);
}

// --------------------------------------------------------------------------------------------------------- from MXFP4
struct Fp4Columns {
  static constexpr int kCols = kColGroups * 32;
  static constexpr bool kNeedsScales = false;
  struct Data {
    uint4 nibbles[4];
    uint32_t codes[4];  // scale codes
  };
  struct Shared {
    uint32_t warp_max[kWarps][kColGroups];
  };
  static_assert(kCols == kThreads, "one thread a column stores the scales");

  __device__ __forceinline__ static Data load(const Params& p, const ColumnTile& tile) {
    Data data;
    const int64_t column = tile.first_col + 32 * my_col_group();
    const int64_t first = ((tile.first_row + 4 * my_row_group()) * p.cols + column) / 32;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool present = 4 * my_row_group() + r < tile.num_rows && column < p.cols;
      const int64_t block = first + r * (p.cols / 32);
      data.nibbles[r] = present ? load_streaming_v4(static_cast<const uint4*>(p.in_codes) + block) : uint4{0, 0, 0, 0};
      data.codes[r] = present ? static_cast<const uint8_t*>(p.in_scales)[block] : 0u;
    }
    return data;
  }
  __device__ __forceinline__ static void reduce(const Data& data, Shared& shared) {
    uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) largest = max_uint(largest, data.codes[r] == kE8M0Nan ? 0u : data.codes[r]);
    for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
      largest = max_uint(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    }
    if (threadIdx.x % kWarpSize < kColGroups) shared.warp_max[threadIdx.x / kWarpSize][my_col_group()] = largest;
  }
  __device__ __forceinline__ static uint32_t largest(const Shared& shared, int col_group) {
    uint32_t code = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) code = max_uint(code, shared.warp_max[w][col_group]);
    return code;
  }
  __device__ __forceinline__ static void scales(const Params& p, const ColumnTile& tile, Shared& shared) {
    if (tile.first_col + threadIdx.x >= p.cols) return;
    const int exponent = int(largest(shared, threadIdx.x / 32)) - kE8M0Bias;
    tile.out_scales[threadIdx.x] = fp32_power_of_two_bits(exponent - p.headroom);
  }
  __device__ __forceinline__ static void convert(const Params& p, const ColumnTile& tile, const Data& data,
                                                 const Shared& shared, Transposed<kCols>& transposed) {
    const int col_group = my_col_group(), row_group = my_row_group();
    const int code = int(largest(shared, col_group));
    ExpandTable tables[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      tables[r] = expand_table(data.codes[r], code, p.headroom);
      if (4 * row_group + r >= tile.num_rows) tables[r] = {{0, 0}, 0};
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint2 expanded[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t words[4] = {data.nibbles[r].x, data.nibbles[r].y, data.nibbles[r].z, data.nibbles[r].w};
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
  }
};

// ----------------------------------------------------------------------------------------------------------- from FP8
// Four E4M3 codes times 2**-gap, one rounding; NaN and signs kept.  gap >= 0, factor = 2**-gap in both f16 lanes.
__device__ __forceinline__ uint32_t lower_e4m3x4(uint32_t codes, int gap, uint32_t factor) {
  if (gap == 0) return codes;
#if __CUDA_ARCH__ >= 890
  // v has four significant bits, so v * 2**-gap is exact in f16 unless it is under 2**-21: far below 2**-10, where E4M3
  // rounds to zero. A NaN's sign is lost on the way.
  const uint32_t low = fma_f16x2(f16x2_from_lower_e4m3(codes), factor, kNegativeZeros16x2);
  const uint32_t high = fma_f16x2(f16x2_from_upper_e4m3(codes), factor, kNegativeZeros16x2);
  return select_bits(0x7F7F7F7Fu, e4m3x4_from_f16x2(low, high), codes);
#else
  uint32_t lowered = 0;
  for (int i = 0; i < 4; ++i) lowered |= rescale<E4M3, E4M3>((codes >> (8 * i)) & 0xFFu, -gap) << (8 * i);
  return lowered;
#endif
}

struct Fp8Columns {
  static constexpr int kCols = kColGroups * 16;  // one 128-block of every row
  static constexpr bool kNeedsScales = false;
  struct Data {
    uint4 bytes[4];
    uint32_t scale_bits[4];
  };
  struct Shared {
    int warp_max[kWarps];
  };

  __device__ __forceinline__ static Data load(const Params& p, const ColumnTile& tile) {
    Data data;
    const int64_t row = tile.first_row + 4 * my_row_group();
    const uint8_t* codes =
        static_cast<const uint8_t*>(p.in_codes) + row * p.cols + tile.first_col + 16 * my_col_group();
    const uint32_t* scales = static_cast<const uint32_t*>(p.in_scales) + row * p.in_scale_row_stride +
                             tile.first_col / 128 * p.in_scale_col_stride;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool present = 4 * my_row_group() + r < tile.num_rows;
      data.bytes[r] = present ? load_streaming_v4(codes + r * p.cols) : uint4{0, 0, 0, 0};
      data.scale_bits[r] = present ? scales[r * p.in_scale_row_stride] : fp32_power_of_two_bits(0);
    }
    return data;
  }
  __device__ __forceinline__ static void reduce(const Data& data, Shared& shared) {
    // Rows whose 128 codes are all zeros do not count (NUMERICS 5.4): bit r says that row r has something else.
    uint32_t non_zero_rows = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint4 b = data.bytes[r];
      non_zero_rows |= (((b.x | b.y | b.z | b.w) & 0x7F7F7F7Fu) != 0 ? 1u : 0u) << r;
    }
    for (int offset = 1; offset < kColGroups; offset *= 2) {
      non_zero_rows |= __shfl_xor_sync(kAllLanes, non_zero_rows, offset);
    }
    int largest = kNotAPowerOfTwo;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (non_zero_rows >> r & 1u) largest = max_int(largest, scale_exponent_of_fp32(data.scale_bits[r]));
    }
    for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
      largest = max_int(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    }
    if (threadIdx.x % kWarpSize == 0) shared.warp_max[threadIdx.x / kWarpSize] = largest;
  }
  __device__ __forceinline__ static int largest(const Shared& shared) {
    int exponent = kNotAPowerOfTwo;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) exponent = max_int(exponent, shared.warp_max[w]);
    return exponent == kNotAPowerOfTwo ? 0 : exponent;
  }
  __device__ __forceinline__ static void scales(const Params&, const ColumnTile& tile, Shared& shared) {
    if (threadIdx.x < kCols) tile.out_scales[threadIdx.x] = fp32_power_of_two_bits(largest(shared));
  }
  __device__ __forceinline__ static void convert(const Params&, const ColumnTile&, const Data& data,
                                                 const Shared& shared, Transposed<kCols>& transposed) {
    const int exponent = largest(shared);
    int gaps[4];
    uint32_t factors[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int mine = scale_exponent_of_fp32(data.scale_bits[r]);
      gaps[r] = mine == kNotAPowerOfTwo ? -1 : max_int(exponent - mine, 0);  // below 0 only where the row is all zeros
      factors[r] = both_lanes(f16_power_of_two(-min_int(gaps[r], 24)));      // beyond 24 all codes round to zero, too
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t rows[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t words[4] = {data.bytes[r].x, data.bytes[r].y, data.bytes[r].z, data.bytes[r].w};
        rows[r] = gaps[r] < 0 ? 0x7F7F7F7Fu : lower_e4m3x4(words[word], gaps[r], factors[r]);
      }
      uint32_t columns[4];
      transpose_4x4(rows, columns);
#pragma unroll
      for (int c = 0; c < 4; ++c) transposed.at(my_col_group(), 4 * word + c, my_row_group()) = columns[c];
    }
  }
};

// ------------------------------------------------------------------------------------------------------ from bfloat16
// Per bfloat16, the larger magnitude, of unspecified sign; NaN wins.
__device__ __forceinline__ uint4 max_magnitudes(uint4 a, uint4 b) {
  return {max_magnitude_bf16x2(a.x, b.x), max_magnitude_bf16x2(a.y, b.y), max_magnitude_bf16x2(a.z, b.z),
          max_magnitude_bf16x2(a.w, b.w)};
}

struct Bf16Columns {
  static constexpr int kCols = kColGroups * 8;
  static constexpr bool kNeedsScales = true;
  struct Data {
    uint4 x[4];
  };
  struct Shared {
    uint4 warp_max[kWarps][kColGroups];  // amax of eight columns, two a word, signs unspecified
    float factors[kCols];                // 2**-exponent, NaN where the column is poisoned
  };

  __device__ __forceinline__ static Data load(const Params& p, const ColumnTile& tile) {
    Data data;
    const int64_t column = tile.first_col + 8 * my_col_group();
    const uint16_t* in =
        static_cast<const uint16_t*>(p.in_codes) + (tile.first_row + 4 * my_row_group()) * p.cols + column;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool present = 4 * my_row_group() + r < tile.num_rows && column < p.cols;
      data.x[r] = present ? load_streaming_v4(in + r * p.cols) : uint4{0, 0, 0, 0};
    }
    return data;
  }
  __device__ __forceinline__ static void reduce(const Data& data, Shared& shared) {
    uint4 largest = max_magnitudes(max_magnitudes(data.x[0], data.x[1]), max_magnitudes(data.x[2], data.x[3]));
    for (int offset = kRowLanes; offset < kWarpSize; offset *= 2) {
      largest = max_magnitudes(
          largest, {__shfl_xor_sync(kAllLanes, largest.x, offset), __shfl_xor_sync(kAllLanes, largest.y, offset),
                    __shfl_xor_sync(kAllLanes, largest.z, offset), __shfl_xor_sync(kAllLanes, largest.w, offset)});
    }
    if (threadIdx.x % kWarpSize < kColGroups) shared.warp_max[threadIdx.x / kWarpSize][my_col_group()] = largest;
  }
  // A thread two columns.
  __device__ __forceinline__ static void scales(const Params& p, const ColumnTile& tile, Shared& shared) {
    const int pair = threadIdx.x;
    if (pair >= kCols / 2) return;
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      largest = max_magnitude_bf16x2(largest, reinterpret_cast<const uint32_t*>(shared.warp_max[w])[pair]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t amax = (half == 0 ? largest : largest >> 16) & BF16::magnitude_mask;
      const int exponent = fp8_scale_exponent(amax);
      const bool poisoned = amax >= BF16::inf_code;
      shared.factors[2 * pair + half] = __uint_as_float(poisoned ? kFp32Nan : fp32_power_of_two_bits(-exponent));
      if (tile.first_col + 2 * pair < p.cols) {
        tile.out_scales[2 * pair + half] = poisoned ? kFp32Nan : fp32_power_of_two_bits(exponent);
      }
    }
  }
  __device__ __forceinline__ static void convert(const Params&, const ColumnTile& tile, const Data& data,
                                                 const Shared& shared, Transposed<kCols>& transposed) {
    const int real_rows = min_int(max_int(tile.num_rows - 4 * my_row_group(), 0), 4);
    const uint32_t real_mask = real_rows == 4 ? 0xFFFFFFFFu : (1u << (8 * real_rows)) - 1u;  // padding stays 0x00
    const float* factors = shared.factors + 8 * my_col_group();
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t pairs[4] = {data.x[r].x, data.x[r].y, data.x[r].z, data.x[r].w};
        x[r] = pairs[pair];
      }
      const float lower = factors[2 * pair], upper = factors[2 * pair + 1];
      transposed.at(my_col_group(), 2 * pair, my_row_group()) =
          real_mask & e4m3x4(__fmul_rn(lower_bf16(x[0]), lower), __fmul_rn(lower_bf16(x[1]), lower),
                             __fmul_rn(lower_bf16(x[2]), lower), __fmul_rn(lower_bf16(x[3]), lower));
      transposed.at(my_col_group(), 2 * pair + 1, my_row_group()) =
          real_mask & e4m3x4(__fmul_rn(upper_bf16(x[0]), upper), __fmul_rn(upper_bf16(x[1]), upper),
                             __fmul_rn(upper_bf16(x[2]), upper), __fmul_rn(upper_bf16(x[3]), upper));
    }
  }
};

#define MXSIM_COLUMN_KERNELS(name, Op)                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_dense(const __grid_constant__ Params p) {  \
    convert_columns<Op, false>(p);                                                                         \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_ragged(const __grid_constant__ Params p) { \
    convert_columns<Op, true>(p);                                                                          \
  }
MXSIM_COLUMN_KERNELS(fp4_row_to_fp8_col, Fp4Columns)
MXSIM_COLUMN_KERNELS(fp8_row_to_fp8_col, Fp8Columns)
MXSIM_COLUMN_KERNELS(bf16_to_fp8_col, Bf16Columns)

}  // namespace mxsim
