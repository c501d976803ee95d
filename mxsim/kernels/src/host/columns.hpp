// Tiles of 128 rows: codes are made row by row into a buffer, then every column leaves it in one run.
#pragma once

#include "host/blocks.hpp"

namespace mxsim::host {

constexpr int kTileRows = 128;
constexpr int kTileCols = 64;

// ------------------------------------------------------------------------------------------------- transpose
using Bytes16 = uint8_t __attribute__((vector_size(16)));

inline Bytes16 interleave_low(Bytes16 a, Bytes16 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return __builtin_shuffle(a, b, Bytes16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}
inline Bytes16 interleave_high(Bytes16 a, Bytes16 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return __builtin_shuffle(a, b, Bytes16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// 16 x 16 bytes. Each step interleaves rows that lie 8 apart: four steps rotate the 8-bit index (row, column) by four.
inline void transpose_16x16(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], in + i * in_stride, 16);
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = interleave_low(a[i], a[i + 8]);
      b[2 * i + 1] = interleave_high(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) std::memcpy(out + i * out_stride, &a[i], 16);
}

// Columns of a tile of codes: out[c * out_stride + r] = tile[r][c], r < 128, c < cols; cols % 16 == 0.
template <int kCols>
void store_columns(const uint8_t (&tile)[kTileRows][kCols], int cols, uint8_t* out, int64_t out_stride) {
  for (int c = 0; c < cols; c += 16) {
    for (int r = 0; r < kTileRows; r += 16) {
      transpose_16x16(&tile[r][c], kCols, out + c * out_stride + r, out_stride);
    }
  }
}

// ------------------------------------------------------------------------------------------------- from MXFP4
// Up to 64 columns (whole groups of 32) of up to 128 rows; rows lie code_stride and scale_stride bytes apart.
inline void convert_fp4_columns(const uint8_t* codes, int64_t code_stride, const uint8_t* scales, int64_t scale_stride,
                                int rows, int cols, int headroom, uint8_t* out, int64_t out_stride,
                                uint32_t* out_scales) {
  alignas(32) uint8_t tile[kTileRows][kTileCols];
  for (int g = 0; g < cols / kFp4Block; ++g) {
    int shared = kMinScaleExponent;
    for (int r = 0; r < rows; ++r) {
      const uint8_t scale = scales[r * scale_stride + g];
      if (scale != kE8M0Nan) shared = std::max(shared, int(scale) - kE8M0Bias);
    }
    for (int r = 0; r < rows; ++r) {
      const uint8_t scale = scales[r * scale_stride + g];
      const int gap = shared - (int(scale) - kE8M0Bias);
      convert_fp4_block(codes + r * code_stride + g * (kFp4Block / 2), scale == kE8M0Nan, headroom - gap,
                        &tile[r][g * kFp4Block]);
    }
    std::fill_n(out_scales + g * kFp4Block, kFp4Block, fp32_power_of_two_bits(shared - headroom));
  }
  std::memset(&tile[0][0] + rows * kTileCols, 0, size_t((kTileRows - rows) * kTileCols));
  store_columns(tile, cols, out, out_stride);
}

// ------------------------------------------------------------------------------------------------- from FP8
// 128 columns of up to 128 rows: E over the rows that are neither NaN nor all zero (none: scale 1).
template <typename ScaleOfRow>
void convert_fp8_columns(const uint8_t* codes, int64_t code_stride, int rows, const ScaleOfRow& scale_of_row,
                         uint8_t* out, int64_t out_stride, uint32_t* out_scales) {
  alignas(32) uint8_t tile[kTileRows][kFp8Block];
  Fp8Scale scales[kTileRows];
  constexpr int kNone = kNotAPowerOfTwo;
  int shared = kNone;
  for (int r = 0; r < rows; ++r) {
    scales[r] = scale_of_row(r);
    if (!scales[r].is_nan && scales[r].exponent > shared && !is_zero_fp8_block(codes + r * code_stride)) {
      shared = scales[r].exponent;
    }
  }
  if (shared == kNone) shared = 0;
  for (int r = 0; r < rows; ++r) {
    const uint8_t* row = codes + r * code_stride;
    if (scales[r].is_nan) {
      std::memset(tile[r], int(kE4M3Nan), kFp8Block);
    } else if (scales[r].exponent == shared) {
      std::memcpy(tile[r], row, kFp8Block);
    } else {
      // A block of zeros may have a larger scale than E; its zeros stay zeros under every shift.
      const uint8_t* table = fp8_to_fp8()[scales[r].exponent - shared];
      for (int c = 0; c < kFp8Block; ++c) tile[r][c] = table[row[c]];
    }
  }
  std::memset(tile[0] + rows * kFp8Block, 0, size_t((kTileRows - rows) * kFp8Block));
  std::fill_n(out_scales, kFp8Block, fp32_power_of_two_bits(shared));
  store_columns(tile, kFp8Block, out, out_stride);
}

// ------------------------------------------------------------------------------------------------- from bfloat16
// Up to 64 columns of up to 128 rows, each column its own block.
inline void quantize_fp8_columns(const uint16_t* x, int64_t stride, int rows, int cols, uint8_t* out,
                                 int64_t out_stride, uint32_t* out_scales) {
  alignas(32) uint8_t tile[kTileRows][kTileCols];
  alignas(32) int16_t amax[kTileCols] = {};
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; ++c) amax[c] = std::max(amax[c], int16_t(x[r * stride + c] & BF16::magnitude_mask));
  }
  alignas(32) int16_t offset[kTileCols] = {};
  bool is_fast = true;
  for (int c = 0; c < cols; ++c) {
    const bool poisoned = uint32_t(amax[c]) >= BF16::inf_code;
    const int exponent = poisoned ? 0 : fp8_scale_exponent_of(uint32_t(amax[c]));
    out_scales[c] = poisoned ? kFp32Nan : fp32_power_of_two_bits(exponent);
    is_fast = is_fast && !poisoned && exponent >= kMinFastExponent;
    offset[c] = fp8_offset(std::max(exponent, kMinFastExponent));
  }
  if (is_fast) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) tile[r][c] = uint8_t(fp8_code(x[r * stride + c], offset[c]));
    }
  } else {
    for (int c = 0; c < cols; ++c) {
      const bool poisoned = uint32_t(amax[c]) >= BF16::inf_code;
      const int exponent = poisoned ? 0 : fp8_scale_exponent_of(uint32_t(amax[c]));
      for (int r = 0; r < rows; ++r) {
        tile[r][c] = uint8_t(poisoned ? kE4M3Nan : encode_scaled<BF16, E4M3>(x[r * stride + c], exponent));
      }
    }
  }
  std::memset(&tile[0][0] + rows * kTileCols, 0, size_t((kTileRows - rows) * kTileCols));
  store_columns(tile, cols, out, out_stride);
}

// A tile of up to 128 x 128 elements, one block; out of the same orientation, or transposed.
inline uint32_t quantize_fp8_tile(const uint16_t* x, int64_t stride, int rows, int cols, bool transpose, uint8_t* out,
                                  int64_t out_stride) {
  uint32_t amax = 0;
  for (int r = 0; r < rows; ++r) amax = amax_of(x + r * stride, cols, amax);
  alignas(32) uint8_t tile[kTileRows][kFp8Block];
  uint32_t scale = 0;
  for (int r = 0; r < rows; ++r) {
    scale = encode_fp8(x + r * stride, cols, amax, transpose ? tile[r] : out + r * out_stride);
  }
  if (!transpose) return scale;
  if (rows == kTileRows && cols == kFp8Block) {
    store_columns(tile, cols, out, out_stride);
  } else {
    for (int c = 0; c < cols; ++c) {
      for (int r = 0; r < rows; ++r) out[c * out_stride + r] = tile[r][c];
    }
  }
  return scale;
}

}  // namespace mxsim::host
