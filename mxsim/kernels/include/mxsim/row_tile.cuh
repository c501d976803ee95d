// A block's tile of FP8 rows: kWarpRows rows a warp, every eighth, by 512 columns; a lane 16 neighbouring elements.
// Eight lanes hold a 128-block, two a 32-block. Scales go through shared memory so that they leave in runs along the
// rows: they lie column by column (MN-major). Grid: x slices of columns, y and z tiles of rows.
#pragma once

#include "device.cuh"

namespace mxsim {

constexpr int kTileCols = 512;
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarpSize;
constexpr int kTileScales = kTileCols / 128;
constexpr int kLaneElements = 16;

struct OutputRow {
  int64_t source;        // input row; kPadding: zeros; kAbsent: nothing there
  int64_t scale_offset;  // of its first scale
  int64_t scale_stride;  // to the next scale of the row
};
constexpr int64_t kPadding = -1;
constexpr int64_t kAbsent = -2;

template <int kTileRows>
struct RaggedRows {
  OutputRow rows[kTileRows];
  Expert experts[kWarpSize];  // scratch of locate_rows
};
struct DenseRows {};

__device__ __forceinline__ int64_t tile_first_row(int tile_rows) {
  return (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * tile_rows;
}

// Fill `found` for output rows first_row ..; one warp. An expert's scales are a chunk [K/128, padded rows] of their
// own.
template <bool kWithRest, int kTileRows>
__device__ __forceinline__ void locate_rows(const Params& p, int64_t first_row, RaggedRows<kTileRows>& found) {
  const int lane = threadIdx.x % kWarpSize;
  for (int r = lane; r < kTileRows; r += kWarpSize) found.rows[r] = {kAbsent, 0, 0};
  for_experts<kWithRest>(p, p.row_multiple, [&](const Expert& expert, int64_t begin, int64_t end) {
    if (begin < first_row + kTileRows && end > first_row) {
      found.experts[lane] = expert;
      __syncwarp();
      for (int r = lane; r < kTileRows; r += kWarpSize) {
        const int64_t target = first_row + r;
        int last = 0;  // the last of these experts that starts at or before the target; empty ones start there too
        for (int step = kWarpSize / 2; step > 0; step /= 2) {
          if (found.experts[last + step].first_padded <= target) last += step;
        }
        const Expert e = found.experts[last];
        const int64_t in_expert = target - e.first_padded;
        if (in_expert >= 0 && in_expert < e.padded) {
          found.rows[r] = {in_expert < e.size ? e.first_row + in_expert : kPadding,
                           p.cols / 128 * e.first_padded + in_expert, e.padded};
        }
      }
      __syncwarp();
    }
    return end >= first_row + kTileRows;
  });
}

template <bool kRagged, int kTileRows>
struct RowsOf {
  using Type = DenseRows;
};
template <int kTileRows>
struct RowsOf<true, kTileRows> {
  using Type = RaggedRows<kTileRows>;
};

// What Op does to one lane's elements of one row:
//   kWarpRows                        rows a warp: as many loads in flight
//   kEveryRow                        whether rows of no expert are converted, too (past the last chunk)
//   Data                             what it loads
//   load(p, row, element) -> Data    row: input row; element: index of the lane's first element in the input
//   convert(p, data, element, present, codes) -> binary32 bits of the 128-block's scale; all lanes of the warp call it
// and here the FP8 codes and scales are stored: dense, output row r is input row r; ragged, as NUMERICS 8 lays it out.
template <typename Op, bool kRagged>
__device__ __forceinline__ void convert_rows(const Params& p, void* out_codes, void* out_scales) {
  constexpr int kTileRows = Op::kWarpRows * kTileWarps;
  __shared__ typename RowsOf<kRagged, kTileRows>::Type ragged;
  __shared__ uint32_t tile_scales[kTileScales][kTileRows];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first_row = tile_first_row(kTileRows);
  const int64_t first_col = int64_t(blockIdx.x) * kTileCols;
  const int64_t column = first_col + kLaneElements * lane;
  const int rows_left = column < p.cols ? int(min(p.rows - first_row, int64_t(kTileRows))) : 0;  // dense
  if constexpr (kRagged) {
    if (warp == 0) locate_rows<Op::kEveryRow>(p, first_row, ragged);
    __syncthreads();
  }

  const int64_t first_element = (first_row + warp) * p.cols + column;
  const int64_t row_step = kTileWarps * p.cols;
  typename Op::Data data[Op::kWarpRows];
#pragma unroll
  for (int i = 0; i < Op::kWarpRows; ++i) {
    const int r = warp + i * kTileWarps;
    if constexpr (kRagged) {
      const int64_t row = ragged.rows[r].source;
      data[i] = row >= 0 && column < p.cols ? Op::load(p, row, row * p.cols + column) : typename Op::Data{};
    } else {
      data[i] = r < rows_left ? Op::load(p, first_row + r, first_element + i * row_step) : typename Op::Data{};
    }
  }
  uint8_t* out = static_cast<uint8_t*>(out_codes) + first_element;
#pragma unroll
  for (int i = 0; i < Op::kWarpRows; ++i) {
    const int r = warp + i * kTileWarps;
    uint4 codes;
    bool stored = r < rows_left;
    uint32_t scale;
    if constexpr (kRagged) {
      const int64_t row = ragged.rows[r].source;
      scale = Op::convert(p, data[i], row * p.cols + column, row >= 0 && column < p.cols, codes);
      if (row == kPadding) codes = {0, 0, 0, 0};
      stored = row != kAbsent && column < p.cols;
    } else {
      scale = Op::convert(p, data[i], first_element + i * row_step, stored, codes);
    }
    if (stored) *reinterpret_cast<uint4*>(out + i * row_step) = codes;
    if (lane % 8 == 0) tile_scales[lane / 8][r] = scale;
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kTileScales * kTileRows; i += kTileThreads) {
    const int r = i % kTileRows;
    const int64_t block = first_col / 128 + i / kTileRows;
    uint32_t scale = tile_scales[i / kTileRows][r];
    int64_t offset = (first_row + r) * p.out_scale_row_stride + block * p.out_scale_col_stride;
    bool stored = block * 128 < p.cols && first_row + r < p.rows;
    if constexpr (kRagged) {
      const OutputRow row = ragged.rows[r];
      if (row.source == kPadding) scale = fp32_power_of_two_bits(0);
      offset = row.scale_offset + block * row.scale_stride;
      stored = block * 128 < p.cols && row.source != kAbsent;
    }
    if (stored) static_cast<uint32_t*>(out_scales)[offset] = scale;
  }
}

}  // namespace mxsim
