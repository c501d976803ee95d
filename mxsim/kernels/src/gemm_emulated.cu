// Computes: out[m, n] = sum over k of a[m, k] * b[n, k] with the arithmetic of a block-scaled FP8 GEMM, bit by bit:
// Hopper's, or that of another accumulator. Elements are E4M3 or E5M2.
// Contract: bit-equal to mxsim.blocks.fp8_gemm with the same accumulator.
// Work split: a block makes 64 x 64 outputs, a thread 4 x 4. 32 columns of the operands at a time lie in shared memory
// as values and exponents; the next 32 are on their way meanwhile.
// Traffic: not the point; four arithmetic instructions a product.
//
// The arithmetic (NUMERICS 9), on operands scaled by 2**-16 each, which keeps products below 1. A step has products
// p_i = a_i * b_i, of 8 bits, and the accumulator c:
//   1. E = max over the non-zero products of e(a_i) + e(b_i), and of floor(log2 |c|);  q = 2**(E - fraction_bits)
//   2. t = sum of round(p_i / q) * q + round(c / q) * q. What is added to a number whose ulp is q is rounded to a
//      multiple of q, once: see `Terms`. Their sum is exact in Real.
//   3. c = t rounded to fraction_bits bits after its leading one.
// Real is float where 33 terms, 32 * 1.875**2 + 2 times 2**fraction_bits * q, stay below 2**23 * q, else double.
#include "mxsim/device.cuh"

namespace mxsim {

struct GemmParams {
  const uint8_t* a;  // 16-byte aligned, like b
  const uint8_t* b;
  const float* a_scales;
  const float* b_scales;
  void* out;
  int64_t m, n, k;  // k is a multiple of 128
  int64_t a_scale_row_stride, a_scale_col_stride;
  int64_t b_scale_row_stride, b_scale_col_stride;
  int32_t b_rows_per_scale;  // 1, or 128 for tiles
  int32_t a_is_e5m2, b_is_e5m2;
  int32_t out_is_bf16;
  int32_t fraction_bits;
  int32_t products_per_step;   // a power of two, at most kColumns
  int32_t promotion_interval;  // a multiple of products_per_step; 0: never
  int32_t scales_first;        // acc = FMA(d, RN(sa * sb), acc); else FMA(RN(d * sa), sb, acc)
  int32_t split_k;
};

constexpr int kTile = 64;
constexpr int kSide = 4;  // outputs of a thread along each axis
constexpr int kGemmThreads = (kTile / kSide) * (kTile / kSide);
constexpr int kBlocksPerSm = 2;
constexpr int kColumns = 32;             // of the operands at a time
constexpr int kCodesAtOnce = 16;         // that a thread loads and decodes
constexpr int kScale = -16;              // exponent of what a and b are scaled by each
constexpr int kNoExponent = -100;        // of a zero operand: with any other, below kLowestExponent
constexpr int kLowestExponent = -96;     // below every E, for a step of zeros
constexpr uint32_t kSign = 0x80000000u;  // of a float
constexpr uint32_t kNanBits = 0x7FFFFFFFu;
static_assert(2 * kTile * kColumns == kGemmThreads * kCodesAtOnce);

template <typename Real>
struct Float;
template <>
struct Float<float> {
  static constexpr int mantissa_bits = 23;
  __device__ __forceinline__ static float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
  __device__ __forceinline__ static int exponent(float x) { return (__float_as_int(x) >> 23 & 0xFF) - 127; }
  __device__ __forceinline__ static float flip_sign(float x, uint32_t sign) {
    return __uint_as_float(__float_as_uint(x) ^ sign);
  }
  __device__ __forceinline__ static uint32_t sign_of(float x) { return __float_as_uint(x) & kSign; }
  __device__ __forceinline__ static float fma_rz(float a, float b, float c) { return __fmaf_rz(a, b, c); }
  __device__ __forceinline__ static float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  // x with fraction_bits bits after the leading one.
  template <bool kNearest>
  __device__ __forceinline__ static float cut(float x, int fraction_bits) {
    const int drop = mantissa_bits - fraction_bits;
    uint32_t bits = __float_as_uint(x);
    if (kNearest && drop > 0) bits += (1u << (drop - 1)) - 1u + (bits >> drop & 1u);
    return __uint_as_float(bits & ~((1u << drop) - 1u));
  }
};
template <>
struct Float<double> {
  static constexpr int mantissa_bits = 52;
  __device__ __forceinline__ static double power_of_two(int e) { return __longlong_as_double(int64_t(e + 1023) << 52); }
  __device__ __forceinline__ static int exponent(double x) { return (__double2hiint(x) >> 20 & 0x7FF) - 1023; }
  __device__ __forceinline__ static double flip_sign(double x, uint32_t sign) {
    return __hiloint2double(__double2hiint(x) ^ int(sign), __double2loint(x));
  }
  __device__ __forceinline__ static uint32_t sign_of(double x) { return uint32_t(__double2hiint(x)) & kSign; }
  __device__ __forceinline__ static double fma_rz(double a, double b, double c) { return __fma_rz(a, b, c); }
  __device__ __forceinline__ static double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
  template <bool kNearest>
  __device__ __forceinline__ static double cut(double x, int fraction_bits) {
    const int drop = mantissa_bits - fraction_bits;
    uint64_t bits = uint64_t(__double_as_longlong(x));
    if (kNearest) bits += (uint64_t(1) << (drop - 1)) - 1u + (bits >> drop & 1u);
    return __longlong_as_double(int64_t(bits & ~((uint64_t(1) << drop) - 1u)));
  }
};

// ------------------------------------------------------------------------------------------------- the terms of a step
// t of one step, from c and the products x * y. power is 2**mantissa_bits * q: q is the ulp of the numbers from it to
// twice as much.
//
// To nearest, half as much again has that ulp on both sides, and toward zero the power with the sign of the product:
// fma(x, y, big) rounds the product to a multiple of q, and taking big off again is exact.
template <typename Real, bool kNearest>
struct Terms {
  using F = Float<Real>;
  Real big, sum;
  __device__ __forceinline__ void start(Real c, Real power) {
    big = kNearest ? power * Real(1.5) : power;
    sum = Real(0);
    add(c, Real(1));
  }
  __device__ __forceinline__ void add(Real x, Real y) {
    const Real signed_big = kNearest ? big : F::flip_sign(big, F::sign_of(x) ^ F::sign_of(y));
    sum += (kNearest ? F::fma_rn(x, y, signed_big) : F::fma_rz(x, y, signed_big)) - signed_big;
  }
  __device__ __forceinline__ Real total() const { return sum; }
};

// Toward zero in float, without a look at signs: sums from the power on only grow, by what is not below the next
// multiple of q. From the positive terms P and all magnitudes A, t = P - (A - P).
template <>
struct Terms<float, false> {
  float positive, all;
  __device__ __forceinline__ void start(float c, float power) {
    positive = __fadd_rz(power, fmaxf(c, 0.0f));
    all = __fadd_rz(power, fabsf(c));
  }
  __device__ __forceinline__ void add(float x, float y) {
    positive = __fadd_rz(positive, __saturatef(__fmul_rn(x, y)));  // max(x * y, 0): products are below 1
    all = __fmaf_rz(fabsf(x), fabsf(y), all);
  }
  __device__ __forceinline__ float total() const {
    const float power = __uint_as_float(__float_as_uint(all) & FP32::inf_code);  // below the next one: see the top
    return 2.0f * (positive - power) - (all - power);
  }
};

// ------------------------------------------------------------------------------------------------- operands
struct alignas(16) Operands {
  float a[kColumns][kTile], b[kColumns][kTile];  // scaled, exact; 0 for what is not finite
  uint32_t a_exponents[kColumns][kTile];         // e(x), scaled, or kNoExponent for zero, in both halves
  uint16_t b_exponents[kColumns][kTile];
  int has_nan[2][kTile];
};

// How a code without its sign becomes a float: shifted to where that has its exponent, and scaled for the bias and by
// 2**kScale.
struct Decoder {
  int mantissa_bits, bias;
  uint32_t first_nan, infinity;
  __device__ explicit Decoder(bool is_e5m2)
      : mantissa_bits(is_e5m2 ? E5M2::mantissa_bits : E4M3::mantissa_bits),
        bias(is_e5m2 ? E5M2::bias : E4M3::bias),
        first_nan(is_e5m2 ? E5M2::inf_code + 1 : kE4M3Nan),
        infinity(is_e5m2 ? E5M2::inf_code : kE4M3Nan + 1) {}
  __device__ __forceinline__ float value(uint32_t magnitude) const {
    const float shifted = __uint_as_float(magnitude << (FP32::mantissa_bits - mantissa_bits));
    return __fmul_rn(shifted, Float<float>::power_of_two(FP32::bias - bias + kScale));
  }
  __device__ __forceinline__ int exponent(uint32_t magnitude) const {
    return max_int(int(magnitude >> mantissa_bits), 1) - bias + kScale;
  }
  // What counts of a code beside infinities: they, and the signs of all else.
  __device__ __forceinline__ float limit(uint32_t code) const {
    const uint32_t magnitude = code & E4M3::magnitude_mask;
    const uint32_t bits = magnitude == 0 ? 0u : magnitude == infinity ? FP32::inf_code : __float_as_uint(1.0f);
    return __uint_as_float(bits | (code & E4M3::sign_mask) << 24);
  }
};

// The part of the operands that a thread brings: 16 columns of one row of a or b.
struct Share {
  bool is_b;
  int row, first_column;
  __device__ Share()
      : is_b(threadIdx.x >= kGemmThreads / 2),
        row(threadIdx.x % kTile),
        first_column(threadIdx.x / kTile % (kColumns / kCodesAtOnce) * kCodesAtOnce) {}
};

// Rows beyond the matrix are zeros.
__device__ __forceinline__ uint4 load_share(const GemmParams& p, const Share& share, int64_t k0) {
  const int64_t row = int64_t(share.is_b ? blockIdx.x : blockIdx.y) * kTile + share.row;
  if (row >= (share.is_b ? p.n : p.m)) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>((share.is_b ? p.b : p.a) + row * p.k + k0 + share.first_column);
}

// Returns whether an infinity is among them.
__device__ __forceinline__ bool store_share(const Share& share, const Decoder& decoder, uint4 codes, Operands& out) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  bool has_nan = false, has_infinity = false;
#pragma unroll
  for (int i = 0; i < kCodesAtOnce; ++i) {
    const uint32_t code = words[i / 4] >> (8 * (i % 4)) & 0xFFu;
    uint32_t magnitude = code & E4M3::magnitude_mask;
    has_nan |= magnitude >= decoder.first_nan;
    has_infinity |= magnitude == decoder.infinity;
    if (magnitude >= min_uint(decoder.first_nan, decoder.infinity)) magnitude = 0;
    const float value = Float<float>::flip_sign(decoder.value(magnitude), (code & E4M3::sign_mask) << 24);
    const uint32_t exponent = uint32_t(magnitude == 0 ? kNoExponent : decoder.exponent(magnitude)) & 0xFFFFu;
    const int column = share.first_column + i;
    if (share.is_b) {
      out.b[column][share.row] = value;
      out.b_exponents[column][share.row] = uint16_t(exponent);
    } else {
      out.a[column][share.row] = value;
      out.a_exponents[column][share.row] = both_lanes(exponent);
    }
  }
  if (has_nan) out.has_nan[share.is_b][share.row] = 1;
  return has_infinity;
}

__device__ __forceinline__ void load4(const float* from, float (&x)[kSide]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// What infinities among the products of a span make of an output: the sum of IEEE arithmetic; 0 where it is finite.
__device__ __noinline__ float sum_of_limits(const GemmParams& p, int64_t m, int64_t n, int64_t begin, int64_t end) {
  if (m >= p.m || n >= p.n) return 0.0f;
  const Decoder decoder_a(p.a_is_e5m2 != 0), decoder_b(p.b_is_e5m2 != 0);
  float sum = 0.0f;
  for (int64_t k = begin; k < end; ++k) sum += decoder_a.limit(p.a[m * p.k + k]) * decoder_b.limit(p.b[n * p.k + k]);
  return (__float_as_uint(sum) & FP32::magnitude_mask) < FP32::inf_code ? 0.0f : sum;
}

// ------------------------------------------------------------------------------------------------- the kernel
template <typename Real, bool kNearest>
__device__ __forceinline__ void gemm_emulated(const GemmParams& p) {
  using F = Float<Real>;
  __shared__ Operands operands;
  const int tile_row = threadIdx.x / (kTile / kSide) * kSide, tile_col = threadIdx.x % (kTile / kSide) * kSide;
  const int64_t first_m = int64_t(blockIdx.y) * kTile, first_n = int64_t(blockIdx.x) * kTile;
  const Share share;
  const Decoder decoder((share.is_b ? p.b_is_e5m2 : p.a_is_e5m2) != 0);
  if (threadIdx.x < 2 * kTile) operands.has_nan[threadIdx.x / kTile][threadIdx.x % kTile] = 0;
  __syncthreads();

  float total[kSide][kSide] = {};
  bool met_infinity = false;                                           // in the span, by some thread
  const int64_t part = ceil_div(ceil_div(p.k, 128), p.split_k) * 128;  // whole 128-blocks
  for (int s = 0; s < p.split_k; ++s) {
    const int64_t begin = s * part, end = min(begin + part, p.k);
    if (s > 0 && begin >= p.k) break;
    float acc[kSide][kSide] = {};
    Real c[kSide][kSide] = {};
    int in_span = 0;
    uint4 codes = begin < end ? load_share(p, share, begin) : make_uint4(0, 0, 0, 0);
    for (int64_t k0 = begin; k0 < end; k0 += kColumns) {
      met_infinity |= __syncthreads_or(store_share(share, decoder, codes, operands)) != 0;
      if (k0 + kColumns < end) codes = load_share(p, share, k0 + kColumns);

      for (int first = 0; first < kColumns; first += p.products_per_step) {
        const int last = first + p.products_per_step;
        uint32_t largest[kSide][kSide / 2];  // of two columns each
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide / 2; ++j) largest[i][j] = both_lanes(uint32_t(kLowestExponent) & 0xFFFFu);
        }
#pragma unroll 4
        for (int k = first; k < last; ++k) {
          const uint4 x = *reinterpret_cast<const uint4*>(&operands.a_exponents[k][tile_row]);
          const uint2 y = *reinterpret_cast<const uint2*>(&operands.b_exponents[k][tile_col]);
          const uint32_t of_a[kSide] = {x.x, x.y, x.z, x.w}, of_b[kSide / 2] = {y.x, y.y};
#pragma unroll
          for (int i = 0; i < kSide; ++i) {
#pragma unroll
            for (int j = 0; j < kSide / 2; ++j) largest[i][j] = __viaddmax_s16x2(of_a[i], of_b[j], largest[i][j]);
          }
        }
        Terms<Real, kNearest> terms[kSide][kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            const int of_products = j % 2 == 0 ? int16_t(largest[i][j / 2] & 0xFFFFu) : int(largest[i][j / 2]) >> 16;
            const int exponent = max_int(of_products, F::exponent(c[i][j]));  // that of 0 is lower than all
            terms[i][j].start(c[i][j], F::power_of_two(exponent - p.fraction_bits + F::mantissa_bits));
          }
        }
#pragma unroll 4
        for (int k = first; k < last; ++k) {
          float x[kSide], y[kSide];
          load4(&operands.a[k][tile_row], x);
          load4(&operands.b[k][tile_col], y);
#pragma unroll
          for (int i = 0; i < kSide; ++i) {
#pragma unroll
            for (int j = 0; j < kSide; ++j) terms[i][j].add(Real(x[i]), Real(y[j]));
          }
        }
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            c[i][j] = F::template cut<kNearest>(terms[i][j].total(), p.fraction_bits);
          }
        }
        in_span += p.products_per_step;
        if (in_span != p.promotion_interval && k0 + last != end) continue;
        const int64_t block = k0 / 128;
        float scales_b[kSide];
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const int64_t n = first_n + tile_col + j;
          const int64_t row = p.b_rows_per_scale == 1 ? n : n / 128;
          scales_b[j] = n < p.n ? p.b_scales[row * p.b_scale_row_stride + block * p.b_scale_col_stride] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          const int64_t m = first_m + tile_row + i;
          const float sa = m < p.m ? p.a_scales[m * p.a_scale_row_stride + block * p.a_scale_col_stride] : 0.0f;
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            float d = float(c[i][j]) * Float<float>::power_of_two(-2 * kScale);  // at most 24 bits: exact
            if (met_infinity) {
              const float limit = sum_of_limits(p, m, first_n + tile_col + j, k0 + last - in_span, k0 + last);
              d = limit != 0.0f ? limit : d;
            }
            const float sb = scales_b[j];
            acc[i][j] = p.scales_first ? __fmaf_rn(d, __fmul_rn(sa, sb), acc[i][j])
                                       : __fmaf_rn(__fmul_rn(d, sa), sb, acc[i][j]);
            c[i][j] = Real(0);
          }
        }
        in_span = 0;
        met_infinity = met_infinity && last < kColumns;
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        // Parts are added to +0, which turns a first part of -0 into +0; a whole K is not.
        total[i][j] = p.split_k == 1 ? acc[i][j] : __fadd_rn(total[i][j], acc[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int64_t m = first_m + tile_row + i, n = first_n + tile_col + j;
      if (m >= p.m || n >= p.n) continue;
      uint32_t bits = __float_as_uint(total[i][j]);
      const bool is_nan = (bits & FP32::magnitude_mask) > FP32::inf_code;
      if (is_nan || operands.has_nan[0][tile_row + i] || operands.has_nan[1][tile_col + j]) {
        bits = kNanBits;
      }
      if (p.out_is_bf16) {
        const uint32_t rounded = bits == kNanBits ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        static_cast<uint16_t*>(p.out)[m * p.n + n] = uint16_t(rounded);
      } else {
        static_cast<uint32_t*>(p.out)[m * p.n + n] = bits;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kGemmThreads, kBlocksPerSm)
    gemm_emulated_toward_zero(const __grid_constant__ GemmParams p) {
  gemm_emulated<float, false>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads, kBlocksPerSm)
    gemm_emulated_to_even(const __grid_constant__ GemmParams p) {
  gemm_emulated<float, true>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_emulated_wide_toward_zero(const __grid_constant__ GemmParams p) {
  gemm_emulated<double, false>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_emulated_wide_to_even(const __grid_constant__ GemmParams p) {
  gemm_emulated<double, true>(p);
}

}  // namespace mxsim
