// A tile of 128 rows turned by 90 degrees through shared memory, without bank conflicts.
//
// A thread holds 4 rows by some neighbouring columns. It transposes 4x4 bytes in registers and leaves words of four
// rows; each column's 128 bytes then leave in one run. Word (column, row / 4) lies at 32 * column + (row / 4 ^
// swizzle(column group)): the lanes of a warp differ in the low bits of row / 4 or in the column group, so their writes
// hit 32 banks, and 16-byte reads stay whole.
#pragma once

#include "device.cuh"

namespace mxsim {

constexpr int kThreads = 256;
constexpr int kBlockRows = 128;
constexpr int kRowGroups = kBlockRows / 4;         // threads along the rows
constexpr int kColGroups = kThreads / kRowGroups;  // and along the columns
constexpr int kRowGroupsPerWarp = kWarpSize / kColGroups;
constexpr int kWarps = kThreads / kWarpSize;

template <int kCols>
struct alignas(16) Transposed {
  static constexpr int kPieces = kBlockRows / 16;
  uint32_t words[kCols * kRowGroups];

  __device__ __forceinline__ static int swizzle(int col_group) { return col_group * kRowGroupsPerWarp; }
  __device__ __forceinline__ uint32_t& at(int col_group, int col, int row_group) {
    return words[(col_group * (kCols / kColGroups) + col) * kRowGroups + (row_group ^ swizzle(col_group))];
  }
  // Sixteen rows of a column.
  __device__ __forceinline__ uint4 piece(int column, int piece) const {
    const int swizzled = piece ^ swizzle(column / (kCols / kColGroups)) / 4;
    return reinterpret_cast<const uint4*>(words)[column * kPieces + swizzled];
  }
  // One code.
  __device__ __forceinline__ uint8_t code(int column, int row) const {
    const int word = column * kRowGroups + (row / 4 ^ swizzle(column / (kCols / kColGroups)));
    return reinterpret_cast<const uint8_t*>(words)[4 * word + row % 4];
  }
  // The first num_cols columns, 128 bytes each at multiples of `stride` (of 16) from `out`: eight threads a column.
  __device__ __forceinline__ void store(uint8_t* out, int64_t stride, int64_t num_cols) const {
#pragma unroll
    for (int i = threadIdx.x; i < kCols * kPieces; i += kThreads) {
      const int column = i / kPieces;
      if (column >= num_cols) break;
      *reinterpret_cast<uint4*>(out + column * stride + 16 * (i % kPieces)) = piece(column, i % kPieces);
    }
  }
};

// Four words of four bytes, transposed.
__device__ __forceinline__ void transpose_4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t a = prmt(rows[0], rows[1], 0x5140), b = prmt(rows[2], rows[3], 0x5140);
  const uint32_t c = prmt(rows[0], rows[1], 0x7362), d = prmt(rows[2], rows[3], 0x7362);
  columns[0] = prmt(a, b, 0x5410);
  columns[1] = prmt(a, b, 0x7632);
  columns[2] = prmt(c, d, 0x5410);
  columns[3] = prmt(c, d, 0x7632);
}

// A thread's place in the tile.
__device__ __forceinline__ int my_col_group() {
  return threadIdx.x % kColGroups;
}
__device__ __forceinline__ int my_row_group() {
  return threadIdx.x / kColGroups;
}
constexpr int kRowLanes = kColGroups;  // lanes that differ by this or more hold other rows of the same columns

}  // namespace mxsim
