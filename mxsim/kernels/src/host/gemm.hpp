// The GEMM of mxsim/gemm.h over whole matrices: kLanes columns of the output side by side, in floating point.
//
// Where the header shifts integers, these loops multiply by powers of two, so that every operation is exact or is one
// of the rule's roundings: products have 8 bits, terms over q are below 2**25, accumulators have at most 53 bits, or
// are cut into whole numbers and fractions.
// NOTE: needs the compiler to keep IEEE arithmetic (no fast-math), and threads that do not flush subnormals (`Ieee`).
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <vector>

#include "host/parallel.hpp"
#include "mxsim/gemm.h"

namespace mxsim::host {

constexpr int kLanes = 64;        // columns of the output in a tile
constexpr int kGemmRows = 64;     // rows of the output in a tile
constexpr int kTermsAtOnce = 32;  // 32 * 2**25 < 2**31

struct GemmScales {
  const float* at;
  int64_t row_stride;
  int64_t block_stride;
  int rows_per_scale;  // 1, or 128 in tiles
  float operator()(int64_t row, int64_t block) const {
    return at[row / rows_per_scale * row_stride + block * block_stride];
  }
};

struct Gemm {
  const uint8_t* a;
  GemmScales a_scales;
  bool a_is_e5m2;
  const uint8_t* b;
  GemmScales b_scales;
  bool b_is_e5m2;
  int64_t rows, cols, depth;  // M, N, K
  GemmRule rule;
  int products_per_step;
  int64_t interval;  // elements in a span; 0: one span
  PromotionOrder order;
  int64_t split_k;
};

// Round to nearest, subnormals kept, whatever the caller has set: for as long as it lives.
class Ieee {
 public:
  Ieee() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~Ieee() { std::fesetenv(&callers_); }
  Ieee(const Ieee&) = delete;
  Ieee& operator=(const Ieee&) = delete;

 private:
  std::fenv_t callers_;
};

template <typename To, typename From>
To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &x, sizeof(To));
  return bits;
}

// ------------------------------------------------------------------------------------------------- the exact sum
// Sum of d * sa * sb without rounding: a fixed-point number whose last bit is 2**-330, in two's complement.
class ExactSum {
 public:
  // d: a multiple of 2**-32 of 53 bits, infinite or NaN.
  void add(double d, float scale_a, float scale_b) {
    const double scale = double(scale_a) * scale_b;  // 48 bits: exact
    if (!(std::abs(scale) < HUGE_VAL && std::abs(d) < HUGE_VAL)) {
      special_ += d * scale;
      return;
    }
    if (d == 0 || scale == 0) return;
    int exponent, scale_exponent;
    const double fraction = std::frexp(d, &exponent), scale_fraction = std::frexp(scale, &scale_exponent);
    __int128 product = __int128(std::ldexp(fraction, kBits)) * int64_t(std::ldexp(scale_fraction, kScaleBits));
    const int position = exponent - kBits + scale_exponent - kScaleBits - kLastBit;  // of the product's last bit
    const int up = max_int(position, 0);
    // NOTE: where position is negative the product ends in so many zeros.
    if (position < 0) product >>= -position;
    const int shift = up % 64;
    const __int128 low = __int128((unsigned __int128)(product) << shift);
    uint64_t extended[3] = {uint64_t(low), uint64_t((unsigned __int128)(low) >> 64),
                            shift == 0 ? (product < 0 ? ~uint64_t(0) : 0) : uint64_t(product >> (128 - shift))};
    const uint64_t sign = product < 0 ? ~uint64_t(0) : 0;
    uint64_t carry = 0;
    for (int i = up / 64, j = 0; i < kWords; ++i, ++j) {
      const unsigned __int128 sum = (unsigned __int128)(words_[i]) + (j < 3 ? extended[j] : sign) + carry;
      words_[i] = uint64_t(sum);
      carry = uint64_t(sum >> 64);
    }
  }

  // Nearest binary32, ties to even; a zero is +0.
  float rounded() const {
    if (special_ != 0) return float(special_);  // infinite or NaN
    uint64_t words[kWords];
    const bool negative = words_[kWords - 1] >> 63;
    uint64_t carry = negative;
    for (int i = 0; i < kWords; ++i) {
      words[i] = (negative ? ~words_[i] : words_[i]) + carry;
      carry = carry && words[i] == 0;
    }
    int top = kWords - 1;
    while (top >= 0 && words[top] == 0) --top;
    if (top < 0) return 0;
    // The leading 64 bits, the last of which stands for everything below: enough for one rounding.
    const int leading = 63 - __builtin_clzll(words[top]);
    uint64_t significand = words[top] << (63 - leading);
    if (top > 0 && leading < 63) significand |= words[top - 1] >> (leading + 1);
    bool rest = top > 0 && leading < 63 && (words[top - 1] << (63 - leading)) != 0;
    if (top > 0 && leading == 63) rest = words[top - 1] != 0;
    for (int i = 0; i + 1 < top; ++i) rest = rest || words[i] != 0;
    significand |= rest;
    const int exponent = 64 * top + leading + kLastBit;  // of the leading bit
    if (exponent > 127) return negative ? -HUGE_VALF : HUGE_VALF;
    const int dropped = exponent >= FP32::emin ? 40 : std::min(40 + FP32::emin - exponent, 66);
    const uint64_t kept = dropped > 64 ? 0 : shift_rne(significand, dropped);
    const float magnitude = std::ldexp(float(kept), exponent - 63 + dropped);
    return negative ? -magnitude : magnitude;
  }

 private:
  static constexpr int kBits = 53, kScaleBits = 48;
  static constexpr int kLastBit = -330;
  static constexpr int kWords = 11;

  // x / 2**shift, ties to even.  0 < shift <= 64.
  static uint64_t shift_rne(uint64_t x, int shift) {
    const uint64_t below = shift == 64 ? 0 : x >> shift;
    const uint64_t rest = shift == 64 ? x : x & ((uint64_t(1) << shift) - 1u);
    const uint64_t half = uint64_t(1) << (shift - 1);
    return below + (rest > half || (rest == half && (below & 1u)));
  }

  uint64_t words_[kWords] = {};
  double special_ = 0;
};

// ------------------------------------------------------------------------------------------------- one step
// What a code stands for, by code.
struct ElementTable {
  float value[256];  // 0 for what is not finite: what NaN touches is overwritten, what infinity touches is `limit`'s
  int8_t exponent[256];         // e(x); so low for a zero that no product with one is the largest
  float limit[256];             // infinity, NaN, and the sign of all else, which is all of it that counts beside them
  uint8_t infinity, first_nan;  // without the sign; no code without one is 0x80
};
template <typename Format>
ElementTable element_table(uint32_t infinity, uint32_t first_nan) {
  ElementTable table;
  table.infinity = uint8_t(infinity);
  table.first_nan = uint8_t(first_nan);
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t magnitude = code & Format::magnitude_mask;
    const float sign = code & Format::sign_mask ? -1.0f : 1.0f;
    const bool is_number = magnitude != 0 && magnitude < min_uint(infinity, first_nan);
    const Unpacked x = unpack<Format>(magnitude);
    table.value[code] = is_number ? sign * std::ldexp(float(x.significand), x.exponent) : 0.0f;
    table.exponent[code] = int8_t(is_number ? x.exponent + Format::mantissa_bits : -64);
    table.limit[code] = magnitude == 0          ? 0.0f
                        : magnitude == infinity ? sign * HUGE_VALF
                        : magnitude < first_nan ? sign
                                                : std::nanf("");
  }
  return table;
}
inline const ElementTable& table_of(bool is_e5m2) {
  static const ElementTable e4m3 = element_table<E4M3>(0x80, kE4M3Nan);
  static const ElementTable e5m2 = element_table<E5M2>(E5M2::inf_code, E5M2::inf_code + 1);
  return is_e5m2 ? e5m2 : e4m3;
}

// One row of a against kLanes rows of b, over the elements of at most one block.
struct GemmPiece {
  alignas(64) float a[kGemmBlock];
  int8_t a_exponent[kGemmBlock];
  alignas(64) float b[kGemmBlock][kLanes];
  alignas(64) int8_t b_exponent[kGemmBlock][kLanes];
};

// c to its leading fraction_bits + 1 bits.
inline void round_lanes(double* c, const GemmRule& rule) {
  if (rule.fraction_bits < 0) return;
  const int shift = 52 - rule.fraction_bits;
  const bool nearest = rule.total == GemmRounding::kTiesToEven;
  const uint64_t just_below_half = nearest ? (uint64_t(1) << (shift - 1)) - 1u : 0, lsb = nearest ? 1 : 0;
  for (int l = 0; l < kLanes; ++l) {
    const uint64_t bits = bit_cast<uint64_t>(c[l]);
    c[l] = bit_cast<double>((bits + just_below_half + ((bits >> shift) & lsb)) >> shift << shift);
  }
}

// The terms are added as they are: E4M3's are multiples of 2**-18 below 2**18.
inline void exact_step(const GemmPiece& piece, int begin, int end, const GemmRule& rule, double* c) {
  for (int k = begin; k < end; ++k) {
    for (int l = 0; l < kLanes; ++l) c[l] += double(piece.a[k] * piece.b[k][l]);
  }
  round_lanes(c, rule);
}

// x + y to odd: the nearest double or, if that is even and not the sum, its neighbour on the other side of the sum. To
// round it again to fewer bits is to round x + y once.
inline double add_to_odd(double x, double y) {
  const double sum = x + y, of_y = sum - x, lost = (x - (sum - of_y)) + (y - of_y);
  const uint64_t bits = bit_cast<uint64_t>(sum);
  if (lost == 0 || (bits & 1u) != 0) return sum;
  return bit_cast<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// The same where a double does not hold the sum, multiples of 2**-32 below 2**49: whole numbers in c, the rest in rest.
inline void exact_wide_step(const GemmPiece& piece, int begin, int end, const GemmRule& rule, double* c, double* rest) {
  constexpr double kUlpOne = 3.0 * (int64_t(1) << 51);  // x + kUlpOne - kUlpOne is the nearest integer
  for (int l = 0; l < kLanes; ++l) {
    const double whole = c[l] + kUlpOne - kUlpOne;
    rest[l] += c[l] - whole;
    c[l] = whole;
  }
  for (int k = begin; k < end; ++k) {
    for (int l = 0; l < kLanes; ++l) {
      const double product = double(piece.a[k] * piece.b[k][l]);
      const double whole = product + kUlpOne - kUlpOne;
      c[l] += whole;
      rest[l] += product - whole;
    }
  }
  if (rule.fraction_bits < 0) return;
  for (int l = 0; l < kLanes; ++l) c[l] = add_to_odd(c[l], rest[l]);
  std::memset(rest, 0, kLanes * sizeof(double));
  round_lanes(c, rule);
}

// sum[l] += the integer next to a * b * inverse_q, toward zero or nearest.
template <bool kNearest>
inline void add_terms(const GemmPiece& piece, int begin, int end, const float* inverse_q, int32_t* sum) {
  for (int k = begin; k < end; ++k) {
    for (int l = 0; l < kLanes; ++l) {
      const float term = piece.a[k] * piece.b[k][l] * inverse_q[l];
      sum[l] += int32_t(kNearest ? __builtin_rintf(term) : term);
    }
  }
}

template <bool kNearest>
inline void aligned_step(const GemmPiece& piece, int begin, int end, const GemmRule& rule, double* c) {
  alignas(64) int8_t product_exponent[kLanes];
  std::memset(product_exponent, -128, sizeof(product_exponent));
  for (int k = begin; k < end; ++k) {
    for (int l = 0; l < kLanes; ++l) {
      product_exponent[l] = std::max(product_exponent[l], int8_t(piece.a_exponent[k] + piece.b_exponent[k][l]));
    }
  }
  alignas(64) float inverse_q[kLanes];
  alignas(64) double q[kLanes], total[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    // c = 0 has the field 0. Where all terms are 0, any power of two serves.
    const int of_c = int(bit_cast<uint64_t>(c[l]) >> 52 & 0x7FF) - 1023;
    const int exponent = std::max({of_c, int(product_exponent[l]), -64});
    inverse_q[l] = bit_cast<float>(uint32_t(127 + rule.fraction_bits - exponent) << 23);
    q[l] = bit_cast<double>(uint64_t(1023 - rule.fraction_bits + exponent) << 52);
  }
  for (int l = 0; l < kLanes; ++l) {
    const double scaled = c[l] * double(inverse_q[l]);  // below 2**24
    total[l] = double(kNearest ? int32_t(__builtin_rint(scaled)) : int32_t(scaled));
  }
  for (int k = begin; k < end; k += kTermsAtOnce) {
    alignas(64) int32_t sum[kLanes] = {};
    add_terms<kNearest>(piece, k, std::min(k + kTermsAtOnce, end), inverse_q, sum);
    for (int l = 0; l < kLanes; ++l) total[l] += double(sum[l]);
  }
  for (int l = 0; l < kLanes; ++l) c[l] = total[l] * q[l];
  round_lanes(c, rule);
}

inline void gemm_steps(const GemmPiece& piece, int count, const Gemm& g, double* c, double* rest) {
  const GemmRule& rule = g.rule;
  const bool exact = rule.fraction_bits < 0 || rule.term == GemmRounding::kNone;
  for (int k = 0; k < count; k += g.products_per_step) {
    const int end = std::min(k + g.products_per_step, count);
    if (exact && (g.a_is_e5m2 || g.b_is_e5m2)) {
      exact_wide_step(piece, k, end, rule, c, rest);
    } else if (exact) {
      exact_step(piece, k, end, rule, c);
    } else if (rule.term == GemmRounding::kTiesToEven) {
      aligned_step<true>(piece, k, end, rule, c);
    } else {
      aligned_step<false>(piece, k, end, rule, c);
    }
  }
}

// ------------------------------------------------------------------------------------------------- one tile
struct GemmTile {
  GemmPiece piece;
  alignas(64) double c[kGemmRows][kLanes];
  alignas(64) double rest[kGemmRows][kLanes];  // c + rest is the accumulator
  alignas(64) float limit[kGemmRows][kLanes];  // what infinities make of it; else 0
  alignas(64) float part[kGemmRows][kLanes];
  alignas(64) float total[kGemmRows][kLanes];
  std::vector<ExactSum> exact;
};

// acc takes in d and starts the next span.
inline void promote(const Gemm& g, float scale_a, const float* scale_b, int row, GemmTile& tile) {
  double *c = tile.c[row], *rest = tile.rest[row];
  float *acc = tile.part[row], *limit = tile.limit[row];
  const bool is_wide = g.a_is_e5m2 || g.b_is_e5m2;
  if (is_wide) {
    for (int l = 0; l < kLanes; ++l) {
      const bool is_limit = limit[l] != 0;
      if (g.order != PromotionOrder::kExact) c[l] = add_to_odd(c[l], rest[l]);
      c[l] = is_limit ? limit[l] : c[l];
      rest[l] = is_limit ? 0 : rest[l];
    }
    std::memset(limit, 0, kLanes * sizeof(float));
  }
  if (g.order == PromotionOrder::kAThenB) {
    for (int l = 0; l < kLanes; ++l) {
      const float scaled = float(c[l]) * scale_a;
      acc[l] = __builtin_fmaf(scaled, scale_b[l], acc[l]);
    }
  } else if (g.order == PromotionOrder::kScalesFirst) {
    for (int l = 0; l < kLanes; ++l) {
      const float scale = scale_a * scale_b[l];
      acc[l] = __builtin_fmaf(float(c[l]), scale, acc[l]);
    }
  } else {
    for (int l = 0; l < kLanes; ++l) {
      ExactSum& exact = tile.exact[size_t(row) * kLanes + l];
      exact.add(c[l], scale_a, scale_b[l]);
      if (is_wide && rest[l] != 0) exact.add(rest[l], scale_a, scale_b[l]);
    }
  }
  std::memset(c, 0, kLanes * sizeof(double));
  if (is_wide) std::memset(rest, 0, kLanes * sizeof(double));
}

// The sums of IEEE arithmetic that are not finite, for one row of a.
inline void add_limits(const uint8_t* a, const Gemm& g, int64_t col, int num_cols, int64_t k, int depth, float* limit) {
  const float* of_a = table_of(g.a_is_e5m2).limit;
  const float* of_b = table_of(g.b_is_e5m2).limit;
  for (int l = 0; l < num_cols; ++l) {
    const uint8_t* b = g.b + (col + l) * g.depth + k;
    float sum = 0;
    for (int i = 0; i < depth; ++i) sum += of_a[a[i]] * of_b[b[i]];
    if (!(std::abs(sum) < HUGE_VALF)) limit[l] += sum;
  }
}

// Which rows of an operand hold a NaN code or scale, and which an infinite code.
struct GemmRows {
  std::vector<uint8_t> has_nan, has_infinity;
};
inline GemmRows special_rows(const uint8_t* codes, bool is_e5m2, const GemmScales& scales, int64_t rows, int64_t depth,
                             int num_threads) {
  const uint8_t infinity = table_of(is_e5m2).infinity, first_nan = table_of(is_e5m2).first_nan;
  GemmRows found{std::vector<uint8_t>(size_t(rows), 0), std::vector<uint8_t>(size_t(rows), 0)};
  parallel_for(rows, depth, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t has_nan = 0, has_infinity = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const uint8_t magnitude = codes[row * depth + k] & 0x7F;
        has_nan |= uint8_t(magnitude >= first_nan);
        has_infinity |= uint8_t(magnitude == infinity);
      }
      for (int64_t block = 0; block < depth / kGemmBlock; ++block) {
        const float scale = scales(row, block);
        has_nan |= uint8_t(scale != scale);
      }
      found.has_nan[size_t(row)] = has_nan;
      found.has_infinity[size_t(row)] = has_infinity;
    }
  });
  return found;
}

// tile.total for the rows from `row` on, and the columns from `col` on.
inline void gemm_tile(const Gemm& g, int64_t row, int num_rows, int64_t col, int num_cols, const GemmRows& a_rows,
                      const GemmRows& b_rows, GemmTile& tile) {
  const ElementTable &a_table = table_of(g.a_is_e5m2), &b_table = table_of(g.b_is_e5m2);
  bool b_has_infinity = false;
  for (int l = 0; l < num_cols; ++l) b_has_infinity |= b_rows.has_infinity[size_t(col + l)] != 0;
  const int64_t num_blocks = g.depth / kGemmBlock;
  const int64_t part_depth = std::max<int64_t>((num_blocks + g.split_k - 1) / g.split_k, 1) * kGemmBlock;
  const int piece_depth = int(g.interval == 0 ? kGemmBlock : std::min<int64_t>(g.interval, kGemmBlock));
  std::memset(tile.total, 0, sizeof(tile.total));
  std::memset(tile.piece.b, 0, sizeof(tile.piece.b));
  std::memset(tile.piece.b_exponent, -64, sizeof(tile.piece.b_exponent));
  for (int64_t part = 0; part < g.depth; part += part_depth) {
    const int64_t part_end = std::min(part + part_depth, g.depth);
    std::memset(tile.c, 0, sizeof(tile.c));
    std::memset(tile.rest, 0, sizeof(tile.rest));
    std::memset(tile.limit, 0, sizeof(tile.limit));
    std::memset(tile.part, 0, sizeof(tile.part));
    if (g.order == PromotionOrder::kExact) tile.exact.assign(size_t(kGemmRows) * kLanes, ExactSum());
    for (int64_t k = part; k < part_end; k += piece_depth) {
      for (int l = 0; l < num_cols; ++l) {
        const uint8_t* codes = g.b + (col + l) * g.depth + k;
        for (int i = 0; i < piece_depth; ++i) {
          tile.piece.b[i][l] = b_table.value[codes[i]];
          tile.piece.b_exponent[i][l] = b_table.exponent[codes[i]];
        }
      }
      // The scales of a span are those of its first block: all are equal.
      const int64_t end = k + piece_depth, since = end - part;
      const bool is_whole_span = end == part_end || (g.interval != 0 && since % g.interval == 0);
      const int64_t block = k / kGemmBlock;
      alignas(64) float scale_b[kLanes] = {};
      for (int l = 0; l < num_cols; ++l) scale_b[l] = g.b_scales(col + l, block);
      for (int r = 0; r < num_rows; ++r) {
        const uint8_t* codes = g.a + (row + r) * g.depth + k;
        for (int i = 0; i < piece_depth; ++i) {
          tile.piece.a[i] = a_table.value[codes[i]];
          tile.piece.a_exponent[i] = a_table.exponent[codes[i]];
        }
        gemm_steps(tile.piece, piece_depth, g, tile.c[r], tile.rest[r]);
        if (b_has_infinity || a_rows.has_infinity[size_t(row + r)]) {
          add_limits(codes, g, col, num_cols, k, piece_depth, tile.limit[r]);
        }
        if (is_whole_span) promote(g, g.a_scales(row + r, block), scale_b, r, tile);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      for (int l = 0; l < kLanes; ++l) {
        const float sum =
            g.order == PromotionOrder::kExact ? tile.exact[size_t(r) * kLanes + l].rounded() : tile.part[r][l];
        // Parts are added to +0, which turns a first part of -0 into +0; a whole K is not.
        const float before = part == 0 ? 0.0f : tile.total[r][l];
        tile.total[r][l] = part_depth >= g.depth ? sum : before + sum;
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------- the matrices
// store(index in the output, binary32 bits) for every element.
template <typename Store>
void run_gemm(const Gemm& g, int num_threads, const Store& store) {
  const GemmRows a_rows = special_rows(g.a, g.a_is_e5m2, g.a_scales, g.rows, g.depth, num_threads);
  const GemmRows b_rows = special_rows(g.b, g.b_is_e5m2, g.b_scales, g.cols, g.depth, num_threads);
  const int64_t col_tiles = ceil_div(g.cols, kLanes);
  const int64_t tiles = ceil_div(g.rows, kGemmRows) * col_tiles;
  const int64_t work = std::min<int64_t>(g.rows, kGemmRows) * kLanes * std::max<int64_t>(g.depth, 1) / 16;
  parallel_for(tiles, work, num_threads, [&](int64_t begin, int64_t end) {
    const Ieee ieee;
    std::vector<GemmTile> tile(1);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / col_tiles * kGemmRows, col = i % col_tiles * kLanes;
      const int num_rows = int(std::min<int64_t>(g.rows - row, kGemmRows));
      const int num_cols = int(std::min<int64_t>(g.cols - col, kLanes));
      gemm_tile(g, row, num_rows, col, num_cols, a_rows, b_rows, tile[0]);
      for (int r = 0; r < num_rows; ++r) {
        for (int l = 0; l < num_cols; ++l) {
          uint32_t bits = bit_cast<uint32_t>(tile[0].total[r][l]);
          const bool is_nan = (bits & FP32::magnitude_mask) > FP32::inf_code;
          if (is_nan || a_rows.has_nan[size_t(row + r)] || b_rows.has_nan[size_t(col + l)]) bits = kGemmNan;
          store((row + r) * g.cols + col + l, bits);
        }
      }
    }
  });
}

}  // namespace mxsim::host
