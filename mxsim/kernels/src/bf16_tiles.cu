// Computes: FP8 tiles (128x128 blocks) of bfloat16 matrices [batch, N, K], as they lie or transposed.
// Contract: bit-equal to mxsim.blocks.quantize(w, FP8_128X128); transposed, the codes of that with N and K exchanged.
// Work split: a block makes one tile; a thread holds 4 rows by 16 columns.
// Traffic per element: read 2 bytes, write 1 byte. Weights are small beside activations: written for any N and K first.
#include "mxsim/transpose.cuh"

namespace mxsim {

constexpr int kTileSide = 128;
constexpr int kMyCols = kTileSide / kColGroups;  // 16

template <bool kTranspose>
__device__ __forceinline__ void bf16_to_fp8_tile(const Params& p) {
  __shared__ Transposed<kTileSide> transposed;
  __shared__ uint32_t warp_max[kWarps];
  const int64_t tiles_k = ceil_div(p.cols, kTileSide), tiles_n = ceil_div(p.rows, kTileSide);
  const int64_t tile_k = int64_t(blockIdx.x) % tiles_k;
  const int64_t tile_n = int64_t(blockIdx.x) / tiles_k % tiles_n;
  const int64_t batch = int64_t(blockIdx.x) / tiles_k / tiles_n;
  const int col_group = my_col_group(), row_group = my_row_group();
  const int64_t row = tile_n * kTileSide + 4 * row_group, column = tile_k * kTileSide + kMyCols * col_group;
  const int real_rows = int(max(int64_t(0), min(p.rows - row, int64_t(4))));
  const int real_cols = int(max(int64_t(0), min(p.cols - column, int64_t(kMyCols))));
  const uint16_t* in = static_cast<const uint16_t*>(p.in_codes) + (batch * p.rows + row) * p.cols + column;

  uint32_t x[4][kMyCols / 2] = {};  // pairs of columns
  uint32_t largest = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (r >= real_rows) continue;
    if (real_cols == kMyCols && p.cols % 8 == 0) {
#pragma unroll
      for (int i = 0; i < kMyCols / 8; ++i) {
        const uint4 v = load_streaming_v4(in + r * p.cols + 8 * i);
        x[r][4 * i] = v.x, x[r][4 * i + 1] = v.y, x[r][4 * i + 2] = v.z, x[r][4 * i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMyCols; ++i) {
        if (i < real_cols) x[r][i / 2] |= uint32_t(in[r * p.cols + i]) << (16 * (i % 2));
      }
    }
#pragma unroll
    for (int i = 0; i < kMyCols / 2; ++i) largest = max_u16x2(largest, x[r][i] & kMagnitudes16x2);
  }
  uint32_t amax = larger_lane(group_max_u16x2(largest, kWarpSize));
  if (threadIdx.x % kWarpSize == 0) warp_max[threadIdx.x / kWarpSize] = amax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max_uint(amax, warp_max[w]);
  const bool poisoned = amax >= BF16::inf_code;
  const int exponent = fp8_scale_exponent(amax);
  const float factor = __uint_as_float(fp32_power_of_two_bits(-exponent));
  if (threadIdx.x == 0) {
    static_cast<uint32_t*>(p.out_scales)[batch * p.out_scale_batch_stride + tile_n * p.out_scale_row_stride +
                                         tile_k * p.out_scale_col_stride] =
        poisoned ? kFp32Nan : fp32_power_of_two_bits(exponent);
  }

  uint32_t codes[4][kMyCols / 4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int i = 0; i < kMyCols / 4; ++i) {
      codes[r][i] = poisoned ? 0x7F7F7F7Fu : e4m3x4_from_bf16(x[r][2 * i], x[r][2 * i + 1], factor);
    }
  }
  uint8_t* out = static_cast<uint8_t*>(p.out_codes) + batch * p.rows * p.cols;
  if (!kTranspose) {
    out += row * p.cols + column;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (r >= real_rows) continue;
      if (real_cols == kMyCols && p.cols % 16 == 0) {
        *reinterpret_cast<uint4*>(out + r * p.cols) = uint4{codes[r][0], codes[r][1], codes[r][2], codes[r][3]};
      } else {
#pragma unroll
        for (int i = 0; i < kMyCols; ++i) {
          if (i < real_cols) out[r * p.cols + i] = uint8_t(codes[r][i / 4] >> (8 * (i % 4)));
        }
      }
    }
    return;
  }
#pragma unroll
  for (int word = 0; word < kMyCols / 4; ++word) {
    uint32_t columns[4];
    transpose_4x4({codes[0][word], codes[1][word], codes[2][word], codes[3][word]}, columns);
#pragma unroll
    for (int c = 0; c < 4; ++c) transposed.at(col_group, 4 * word + c, row_group) = columns[c];
  }
  __syncthreads();
  const int64_t num_cols = p.cols - tile_k * kTileSide, num_rows = p.rows - tile_n * kTileSide;
  out += tile_k * kTileSide * p.rows + tile_n * kTileSide;
  if (num_rows >= kTileSide && p.rows % 16 == 0) return transposed.store(out, p.rows, num_cols);
  for (int i = threadIdx.x; i < kTileSide * kTileSide; i += kThreads) {
    const int c = i / kTileSide, r = i % kTileSide;
    if (c >= num_cols || r >= num_rows) continue;
    out[c * p.rows + r] = transposed.code(c, r);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp8_tile_plain(const __grid_constant__ Params p) {
  bf16_to_fp8_tile<false>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp8_tile_transposed(const __grid_constant__ Params p) {
  bf16_to_fp8_tile<true>(p);
}

}  // namespace mxsim
