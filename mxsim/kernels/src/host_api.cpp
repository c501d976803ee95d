// Computes: every conversion of mxsim.kernels for CPU tensors; host.py calls these functions through ctypes.
// Contract: bit-equal to mxsim.blocks (the function of the same name, or quantize), group by group in the ragged forms.
// Work split: threads over rows, or over tiles of 128 rows by 64 or 128 columns.
// Strides count elements. group_sizes = null: the dense form. What can refuse a scale returns the row-major index of
// the first one that is neither a power of two nor NaN, and -1 when it has done its work.
#include "host/blocks.hpp"
#include "host/columns.hpp"
#include "host/gemm.hpp"
#include "host/groups.hpp"
#include "host/parallel.hpp"

namespace mxsim::host {

// ------------------------------------------------------------------------------------------------- scales
// Where the scales of an FP8 matrix lie.
struct ScaleMatrix {
  uint32_t* at;
  int64_t row_stride;
  int64_t block_stride;
};
struct ConstScaleMatrix {
  const uint32_t* at;
  int64_t row_stride;
  int64_t block_stride;
  uint32_t bits(int64_t row, int64_t block) const {
    return load<uint32_t>(at + row * row_stride + block * block_stride);
  }
};

int64_t first_refused_scale(const ConstScaleMatrix& scales, int64_t rows, int64_t blocks) {
  int64_t first = -1;
  for (int64_t block = 0; block < blocks; ++block) {  // along the columns of the usual layout
    const int64_t end = first < 0 ? rows : first / blocks + 1;
    for (int64_t row = 0; row < end; ++row) {
      const Fp8Scale scale = unpack_fp8_scale(scales.bits(row, block));
      if (scale.exponent != kNotAPowerOfTwo || scale.is_nan) continue;
      const int64_t index = row * blocks + block;
      if (first < 0 || index < first) first = index;
      break;
    }
  }
  return first;
}

// ------------------------------------------------------------------------------------------------- rows
// FP8 rows, dense or ragged: convert(row, codes, scales of the row, their stride) for each real row; padding is zeros
// with scale 1.
struct RowOutput {
  uint8_t* codes;
  ScaleMatrix dense_scales;
  int64_t cols;
  bool is_ragged;
};

template <typename Convert>
void for_each_row(const RowOutput& out, const Groups& groups, int num_threads, const Convert& convert) {
  const int64_t blocks = out.cols / kFp8Block;
  if (blocks == 0) return;
  parallel_for(groups.padded_rows(), out.cols, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t padded_row = begin; padded_row < end;) {
      const Group& group = groups.at(padded_row);
      const int64_t group_end = std::min(end, group.first_padded + group.padded);
      for (; padded_row < group_end; ++padded_row) {
        const int64_t in_group = padded_row - group.first_padded;
        uint8_t* codes = out.codes + padded_row * out.cols;
        uint32_t* scales = out.is_ragged ? out.dense_scales.at + blocks * group.first_padded + in_group
                                         : out.dense_scales.at + padded_row * out.dense_scales.row_stride;
        const int64_t stride = out.is_ragged ? group.padded : out.dense_scales.block_stride;
        if (in_group < group.size) {
          convert(group.first_row + in_group, codes, scales, stride);
        } else {
          std::memset(codes, 0, size_t(out.cols));
          for (int64_t b = 0; b < blocks; ++b) scales[b * stride] = fp32_power_of_two_bits(0);
        }
      }
    }
  });
}

// How elements are rounded: to nearest, ties to even, or by the random bits of a seed.
struct Rounding {
  bool is_stochastic;
  uint64_t seed;
};

// cols elements, of which the first is element `first` of the tensor.
template <typename Source>
void quantize_fp4_row(const BitsOf<Source>* x, int64_t first, int64_t cols, ScaleRule rule, Rounding rounding,
                      uint8_t* codes, uint8_t* scales) {
  const Thresholds<Source>& table = thresholds<Source>();
  for (int64_t b = 0; b < cols / kFp4Block; ++b) {
    const BitsOf<Source>* block = x + first + b * kFp4Block;
    uint8_t* block_codes = codes + b * (kFp4Block / 2);
    const Draws draws{uint64_t(first + b * kFp4Block), rounding.seed};
    scales[b] = rounding.is_stochastic ? draw_fp4_block<Source>(block, rule, draws, block_codes)
                                       : quantize_fp4_block<Source>(block, rule, table, block_codes);
  }
}

template <typename Source>
void quantize_fp4_rows(const void* x, int64_t rows, int64_t cols, ScaleRule rule, Rounding rounding, uint8_t* codes,
                       uint8_t* scales, int num_threads) {
  const auto* bits = static_cast<const BitsOf<Source>*>(x);
  parallel_for(rows, cols, num_threads, [&](int64_t begin, int64_t end) {
    quantize_fp4_row<Source>(bits, begin * cols, (end - begin) * cols, rule, rounding, codes + begin * (cols / 2),
                             scales + begin * (cols / kFp4Block));
  });
}

void convert_fp4_row(const uint8_t* codes, const uint8_t* scales, int64_t cols, int headroom, uint8_t* out_codes,
                     uint32_t* out_scales, int64_t scale_stride) {
  for (int64_t b = 0; b < cols / kFp8Block; ++b) {
    out_scales[b * scale_stride] =
        convert_fp4_to_fp8_block(codes + b * (kFp8Block / 2), scales + 4 * b, headroom, out_codes + b * kFp8Block);
  }
}

// ------------------------------------------------------------------------------------------------- columns
// FP8 columns, dense or ragged: convert(first row, rows, first column, codes, their stride, scales) for each tile of up
// to 128 rows by kCols columns.
template <int kCols, typename Convert>
void for_each_column_tile(uint8_t* codes, uint32_t* scales, int64_t cols, const Groups& groups, int num_threads,
                          const Convert& convert) {
  const int64_t stripes = ceil_div(cols, kCols);
  const int64_t num_tiles = groups.padded_rows() / kTileRows * stripes;
  parallel_for(num_tiles, kTileRows * kCols, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / stripes, column = i % stripes * kCols;
      const Group& group = groups.at(block * kTileRows);
      const int64_t in_group = block * kTileRows - group.first_padded;
      const int rows = int(std::min<int64_t>(group.size - in_group, kTileRows));
      convert(group.first_row + in_group, rows, column,
              codes + cols * group.first_padded + column * group.padded + in_group, group.padded,
              scales + block * cols + column);
    }
  });
}

}  // namespace mxsim::host

using namespace mxsim;
using namespace mxsim::host;

extern "C" {

void mxsim_to_fp4_row(const void* x, int source, int64_t rows, int64_t cols, int rule, uint8_t* codes, uint8_t* scales,
                      int is_stochastic, uint64_t seed, int num_threads) {
  const auto quantize = source == 0   ? quantize_fp4_rows<BF16>
                        : source == 1 ? quantize_fp4_rows<FP16>
                                      : quantize_fp4_rows<FP32>;
  quantize(x, rows, cols, ScaleRule(rule), {is_stochastic != 0, seed}, codes, scales, num_threads);
}

void mxsim_fp4_row_to_fp8_row(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, int headroom,
                              uint8_t* out_codes, uint32_t* out_scales, int64_t out_row_stride,
                              int64_t out_block_stride, const int64_t* group_sizes, int64_t num_groups,
                              int64_t row_multiple, int64_t* padded_sizes, int num_threads) {
  const Groups groups(group_sizes, num_groups, rows, row_multiple, padded_sizes);
  const RowOutput out{out_codes, {out_scales, out_row_stride, out_block_stride}, cols, group_sizes != nullptr};
  for_each_row(out, groups, num_threads, [&](int64_t row, uint8_t* row_codes, uint32_t* row_scales, int64_t stride) {
    convert_fp4_row(codes + row * (cols / 2), scales + row * (cols / kFp4Block), cols, headroom, row_codes, row_scales,
                    stride);
  });
}

void mxsim_to_fp8_row(const uint16_t* x, int64_t rows, int64_t cols, uint8_t* out_codes, uint32_t* out_scales,
                      int64_t out_row_stride, int64_t out_block_stride, const int64_t* group_sizes, int64_t num_groups,
                      int64_t row_multiple, int64_t* padded_sizes, int is_stochastic, uint64_t seed, int num_threads) {
  const Groups groups(group_sizes, num_groups, rows, row_multiple, padded_sizes);
  const RowOutput out{out_codes, {out_scales, out_row_stride, out_block_stride}, cols, group_sizes != nullptr};
  for_each_row(out, groups, num_threads, [&](int64_t row, uint8_t* row_codes, uint32_t* row_scales, int64_t stride) {
    for (int64_t b = 0; b < cols / kFp8Block; ++b) {
      const int64_t first = row * cols + b * kFp8Block;
      const uint32_t amax = amax_of(x + first, kFp8Block);
      uint8_t* block_codes = row_codes + b * kFp8Block;
      row_scales[b * stride] = is_stochastic
                                   ? draw_fp8(x + first, kFp8Block, amax, {uint64_t(first), seed}, block_codes)
                                   : encode_fp8(x + first, kFp8Block, amax, block_codes);
    }
  });
}

void mxsim_to_fp4_and_fp8_row(const uint16_t* x, int64_t rows, int64_t cols, int rule, int headroom, uint8_t* fp4_codes,
                              uint8_t* fp4_scales, uint8_t* out_codes, uint32_t* out_scales, int64_t out_row_stride,
                              int64_t out_block_stride, const int64_t* group_sizes, int64_t num_groups,
                              int64_t row_multiple, int64_t* padded_sizes, int is_stochastic, uint64_t seed,
                              int num_threads) {
  const Groups groups(group_sizes, num_groups, rows, row_multiple, padded_sizes);
  const RowOutput out{out_codes, {out_scales, out_row_stride, out_block_stride}, cols, group_sizes != nullptr};
  for_each_row(out, groups, num_threads, [&](int64_t row, uint8_t* row_codes, uint32_t* row_scales, int64_t stride) {
    uint8_t* codes = fp4_codes + row * (cols / 2);
    uint8_t* scales = fp4_scales + row * (cols / kFp4Block);
    quantize_fp4_row<BF16>(x, row * cols, cols, ScaleRule(rule), {is_stochastic != 0, seed}, codes, scales);
    convert_fp4_row(codes, scales, cols, headroom, row_codes, row_scales, stride);
  });
}

int64_t mxsim_fp8_row_to_fp4_row(const uint8_t* codes, const uint32_t* scales, int64_t row_stride, int64_t block_stride,
                                 int64_t rows, int64_t cols, int rule, uint8_t* out_codes, uint8_t* out_scales,
                                 int num_threads) {
  const ConstScaleMatrix in_scales{scales, row_stride, block_stride};
  const int64_t blocks = cols / kFp8Block;
  const int64_t refused = first_refused_scale(in_scales, rows, blocks);
  if (refused >= 0) return refused;
  parallel_for(rows, cols, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t b = 0; b < 4 * blocks; ++b) {
        const int64_t block = row * 4 * blocks + b;
        out_scales[block] =
            convert_fp8_to_fp4_block(codes + block * kFp4Block, unpack_fp8_scale(in_scales.bits(row, b / 4)),
                                     ScaleRule(rule), out_codes + block * (kFp4Block / 2));
      }
    }
  });
  return -1;
}

void mxsim_fp8_row_to_ragged(const uint8_t* codes, const uint32_t* scales, int64_t row_stride, int64_t block_stride,
                             int64_t rows, int64_t cols, uint8_t* out_codes, uint32_t* out_scales,
                             const int64_t* group_sizes, int64_t num_groups, int64_t row_multiple,
                             int64_t* padded_sizes, int num_threads) {
  const ConstScaleMatrix in_scales{scales, row_stride, block_stride};
  const Groups groups(group_sizes, num_groups, rows, row_multiple, padded_sizes);
  const RowOutput out{out_codes, {out_scales, 0, 0}, cols, true};
  for_each_row(out, groups, num_threads, [&](int64_t row, uint8_t* row_codes, uint32_t* row_scales, int64_t stride) {
    std::memcpy(row_codes, codes + row * cols, size_t(cols));
    for (int64_t b = 0; b < cols / kFp8Block; ++b) row_scales[b * stride] = in_scales.bits(row, b);
  });
}

void mxsim_fp4_row_to_fp8_col(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, int headroom,
                              uint8_t* out_codes, uint32_t* out_scales, const int64_t* group_sizes, int64_t num_groups,
                              int64_t* padded_sizes, int num_threads) {
  const Groups groups(group_sizes, num_groups, rows, kTileRows, padded_sizes);
  for_each_column_tile<kTileCols>(
      out_codes, out_scales, cols, groups, num_threads,
      [&](int64_t row, int num_rows, int64_t column, uint8_t* out, int64_t out_stride, uint32_t* column_scales) {
        convert_fp4_columns(codes + (row * cols + column) / 2, cols / 2, scales + (row * cols + column) / kFp4Block,
                            cols / kFp4Block, num_rows, int(std::min<int64_t>(cols - column, kTileCols)), headroom, out,
                            out_stride, column_scales);
      });
}

int64_t mxsim_fp8_row_to_fp8_col(const uint8_t* codes, const uint32_t* scales, int64_t row_stride, int64_t block_stride,
                                 int64_t rows, int64_t cols, uint8_t* out_codes, uint32_t* out_scales,
                                 const int64_t* group_sizes, int64_t num_groups, int64_t* padded_sizes,
                                 int num_threads) {
  const ConstScaleMatrix in_scales{scales, row_stride, block_stride};
  const int64_t refused = first_refused_scale(in_scales, rows, cols / kFp8Block);
  if (refused >= 0) return refused;
  const Groups groups(group_sizes, num_groups, rows, kTileRows, padded_sizes);
  for_each_column_tile<kFp8Block>(
      out_codes, out_scales, cols, groups, num_threads,
      [&](int64_t row, int num_rows, int64_t column, uint8_t* out, int64_t out_stride, uint32_t* column_scales) {
        const auto scale_of_row = [&](int r) { return unpack_fp8_scale(in_scales.bits(row + r, column / kFp8Block)); };
        convert_fp8_columns(codes + row * cols + column, cols, num_rows, scale_of_row, out, out_stride, column_scales);
      });
  return -1;
}

void mxsim_to_fp8_col(const uint16_t* x, int64_t rows, int64_t cols, uint8_t* out_codes, uint32_t* out_scales,
                      const int64_t* group_sizes, int64_t num_groups, int64_t* padded_sizes, int num_threads) {
  const Groups groups(group_sizes, num_groups, rows, kTileRows, padded_sizes);
  for_each_column_tile<kTileCols>(
      out_codes, out_scales, cols, groups, num_threads,
      [&](int64_t row, int num_rows, int64_t column, uint8_t* out, int64_t out_stride, uint32_t* column_scales) {
        quantize_fp8_columns(x + row * cols + column, cols, num_rows, int(std::min<int64_t>(cols - column, kTileCols)),
                             out, out_stride, column_scales);
      });
}

// scale (batch, i, j) of the output's tiles lies at batch * batch_stride + i * row_stride + j * col_stride.
void mxsim_to_fp8_tile(const uint16_t* w, int64_t num_matrices, int64_t rows, int64_t cols, int transpose,
                       uint8_t* out_codes, uint32_t* out_scales, int64_t batch_stride, int64_t row_stride,
                       int64_t col_stride, int num_threads) {
  const int64_t tile_rows = ceil_div(rows, kTileRows), tile_cols = ceil_div(cols, kFp8Block);
  if (transpose) std::swap(row_stride, col_stride);
  parallel_for(
      num_matrices * tile_rows * tile_cols, kTileRows * kFp8Block, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t batch = i / (tile_rows * tile_cols), tile = i % (tile_rows * tile_cols);
          const int64_t tile_row = tile / tile_cols, tile_col = tile % tile_cols;
          const int64_t row = tile_row * kTileRows, col = tile_col * kFp8Block;
          const int64_t matrix = batch * rows * cols;
          const int64_t out_stride = transpose ? rows : cols;
          out_scales[batch * batch_stride + tile_row * row_stride + tile_col * col_stride] =
              quantize_fp8_tile(w + matrix + row * cols + col, cols, int(std::min<int64_t>(rows - row, kTileRows)),
                                int(std::min<int64_t>(cols - col, kFp8Block)), transpose != 0,
                                out_codes + matrix + (transpose ? col * rows + row : row * cols + col), out_stride);
        }
      });
}

void mxsim_fp4_to_bf16(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, uint16_t* out,
                       int num_threads) {
  parallel_for(rows * (cols / kFp4Block), kFp4Block, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      decode_fp4_block(codes + b * (kFp4Block / 2), scales[b], out + b * kFp4Block);
    }
  });
}

// The rule of NUMERICS 9: out = a @ b.T, elements E4M3 or E5M2. rounding: see gemm_rule. interval 0: one span. Scales
// are checked by the caller.
void mxsim_fp8_gemm_emulated(const uint8_t* a, const float* a_scales, int64_t a_row_stride, int64_t a_block_stride,
                             int a_is_e5m2, const uint8_t* b, const float* b_scales, int64_t b_row_stride,
                             int64_t b_block_stride, int b_rows_per_scale, int b_is_e5m2, int64_t rows, int64_t cols,
                             int64_t depth, int fraction_bits, int products_per_step, int rounding, int64_t interval,
                             int order, int64_t split_k, int is_bf16, void* out, int num_threads) {
  const Gemm gemm = {a,
                     {a_scales, a_row_stride, a_block_stride, 1},
                     a_is_e5m2 != 0,
                     b,
                     {b_scales, b_row_stride, b_block_stride, b_rows_per_scale},
                     b_is_e5m2 != 0,
                     rows,
                     cols,
                     depth,
                     gemm_rule(fraction_bits, rounding),
                     products_per_step,
                     interval,
                     PromotionOrder(order),
                     split_k};
  if (is_bf16) {
    run_gemm(gemm, num_threads, [out](int64_t i, uint32_t bits) {
      const uint32_t rounded = bits == kGemmNan ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
      static_cast<uint16_t*>(out)[i] = uint16_t(rounded);
    });
  } else {
    run_gemm(gemm, num_threads, [out](int64_t i, uint32_t bits) { static_cast<uint32_t*>(out)[i] = bits; });
  }
}

// ------------------------------------------------------------------------------------------------- the plain rules
// The portable header's own functions over arrays, without the loops above: what the tests hold the loops against.
// source: 0 BF16, 1 FP16, 2 FP32. element: 0 E2M1, 1 E4M3.

void mxsim_rule_encode(const uint32_t* bits, const int32_t* scale_exponents, int64_t count, int source, int element,
                       uint8_t* out) {
  const auto encode = source == 0   ? (element == 0 ? encode_scaled<BF16, E2M1> : encode_scaled<BF16, E4M3>)
                      : source == 1 ? (element == 0 ? encode_scaled<FP16, E2M1> : encode_scaled<FP16, E4M3>)
                                    : (element == 0 ? encode_scaled<FP32, E2M1> : encode_scaled<FP32, E4M3>);
  for (int64_t i = 0; i < count; ++i) out[i] = uint8_t(encode(bits[i], scale_exponents[i]));
}

// With stochastic rounding. quick: as the loops do it.
void mxsim_rule_encode_stochastic(const uint32_t* bits, const int32_t* scale_exponents, const uint32_t* random,
                                  int64_t count, int source, int element, int quick, uint8_t* out) {
  const auto of = [&](uint32_t x, int exponent, uint32_t r) {
    if (quick && source == 0) {
      return element == 0 ? stochastic_code<BF16, E2M1>(x, exponent, r) : stochastic_code<BF16, E4M3>(x, exponent, r);
    }
    if (source == 0) {
      return element == 0 ? encode_scaled_stochastic<BF16, E2M1>(x, exponent, r)
                          : encode_scaled_stochastic<BF16, E4M3>(x, exponent, r);
    }
    if (source == 1) {
      return element == 0 ? encode_scaled_stochastic<FP16, E2M1>(x, exponent, r)
                          : encode_scaled_stochastic<FP16, E4M3>(x, exponent, r);
    }
    return element == 0 ? encode_scaled_stochastic<FP32, E2M1>(x, exponent, r)
                        : encode_scaled_stochastic<FP32, E4M3>(x, exponent, r);
  };
  for (int64_t i = 0; i < count; ++i) out[i] = uint8_t(of(bits[i], scale_exponents[i], random[i]));
}

// The random bits of elements first, first + 1, ...; first is a multiple of 4.
void mxsim_rule_random_bits(int64_t count, uint64_t first, uint64_t seed, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = random_words((first + uint64_t(i)) / 4u, seed).at[i % 4];
}

void mxsim_rule_scale_exponent(const uint32_t* amax_bits, int64_t count, int source, int element, int rule,
                               int32_t* out) {
  const auto of = [&](uint32_t amax) {
    const ScaleRule r = ScaleRule(rule);
    if (source == 0) return element == 0 ? scale_exponent<BF16, E2M1>(amax, r) : scale_exponent<BF16, E4M3>(amax, r);
    if (source == 1) return element == 0 ? scale_exponent<FP16, E2M1>(amax, r) : scale_exponent<FP16, E4M3>(amax, r);
    return element == 0 ? scale_exponent<FP32, E2M1>(amax, r) : scale_exponent<FP32, E4M3>(amax, r);
  };
  for (int64_t i = 0; i < count; ++i) out[i] = of(amax_bits[i]);
}

// Accumulators as binary32 bits after a span of products_per_step at a time: count pairs of rows of depth finite codes.
void mxsim_rule_gemm(const uint8_t* a, const uint8_t* b, int a_is_e5m2, int b_is_e5m2, int64_t count, int64_t depth,
                     int fraction_bits, int products_per_step, int rounding, uint32_t* out) {
  const GemmRule rule = gemm_rule(fraction_bits, rounding);
  const auto step = a_is_e5m2 ? (b_is_e5m2 ? gemm_step<E5M2, E5M2> : gemm_step<E5M2, E4M3>)
                              : (b_is_e5m2 ? gemm_step<E4M3, E5M2> : gemm_step<E4M3, E4M3>);
  for (int64_t i = 0; i < count; ++i) {
    Units c = 0;
    for (int64_t k = 0; k < depth; k += products_per_step) {
      const int size = int(std::min<int64_t>(products_per_step, depth - k));
      c = step(a + i * depth + k, b + i * depth + k, size, c, rule);
    }
    out[i] = gemm_fp32_bits(c);
  }
}

void mxsim_rule_rescale(const uint8_t* codes, const int32_t* shifts, int64_t count, int source, int target,
                        uint8_t* out) {
  const auto convert = source == 0 ? (target == 0 ? rescale<E2M1, E2M1> : rescale<E2M1, E4M3>)
                                   : (target == 0 ? rescale<E4M3, E2M1> : rescale<E4M3, E4M3>);
  for (int64_t i = 0; i < count; ++i) out[i] = uint8_t(convert(codes[i], shifts[i]));
}

}  // extern "C"
