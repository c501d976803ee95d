// Computes: out[m, n] = sum over k of a[m, k] * b[n, k] with the arithmetic of a block-scaled FP8 GEMM, bit by bit:
// Hopper's,
//   or that of another accumulator.
// Contract: bit-equal to mxsim.blocks.fp8_gemm with the same accumulator.
// Work split: a block makes 64 x 64 outputs, a thread 4 x 4. A step's operands lie in shared memory as values and
// exponents. Traffic: not the point; five or six arithmetic instructions a product.
//
// The arithmetic (NUMERICS 9). A step has products p_i = a_i * b_i, exact in Real, and the accumulator c:
//   1. E = max over the non-zero products of e(a_i) + e(b_i), and of floor(log2 |c|);  q = 2**(E - fraction_bits)
//   2. t = sum of round(p_i / q) + round(c / q): adding and taking off a power of two whose ulp is 1 rounds to an
//   integer
//      in the direction of that addition, toward zero or to nearest even. The sum of the integers is exact in Real.
//   3. c = t * q, rounded to fraction_bits bits after its leading one.
// Real is float where 33 integers below 2**(fraction_bits + 2) sum exactly, else double.
#include "mxsim/device.cuh"

namespace mxsim {

struct GemmParams {
  const uint8_t* a;
  const uint8_t* b;
  const float* a_scales;
  const float* b_scales;
  void* out;
  int64_t m, n, k;
  int64_t a_scale_row_stride, a_scale_col_stride;
  int64_t b_scale_row_stride, b_scale_col_stride;
  int32_t b_rows_per_scale;  // 1, or 128 for tiles
  int32_t out_is_bf16;
  int32_t fraction_bits;
  int32_t products_per_step;   // at most kMaxStep
  int32_t promotion_interval;  // a multiple of products_per_step; 0: never
  int32_t scales_first;        // acc = FMA(d, RN(sa * sb), acc); else FMA(RN(d * sa), sb, acc)
  int32_t split_k;
};

constexpr int kTile = 64;
constexpr int kSide = 4;  // outputs of a thread along each axis
constexpr int kGemmThreads = (kTile / kSide) * (kTile / kSide);
constexpr int kMaxStep = 32;
constexpr int kNoExponent = -100;  // of a zero operand: below every sum of two real ones

template <typename Real>
struct Float;
template <>
struct Float<float> {
  static constexpr int mantissa_bits = 23;
  static constexpr float kUlpOne = 8388608.0f;  // 2**23
  __device__ __forceinline__ static float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
  __device__ __forceinline__ static int exponent(float x) { return (__float_as_int(x) >> 23 & 0xFF) - 127; }
  __device__ __forceinline__ static float with_sign_of(float magnitude, float x) {
    return __int_as_float(__float_as_int(magnitude) | (__float_as_int(x) & int(0x80000000)));
  }
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
  static constexpr double kUlpOne = 4503599627370496.0;  // 2**52
  __device__ __forceinline__ static double power_of_two(int e) { return __longlong_as_double(int64_t(e + 1023) << 52); }
  __device__ __forceinline__ static int exponent(double x) { return (__double2hiint(x) >> 20 & 0x7FF) - 1023; }
  __device__ __forceinline__ static double with_sign_of(double magnitude, double x) {
    return __hiloint2double(__double2hiint(magnitude) | (__double2hiint(x) & int(0x80000000)),
                            __double2loint(magnitude));
  }
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

struct alignas(16) Operand {
  float values[kMaxStep][kTile];       // exact
  int16_t exponents[kMaxStep][kTile];  // floor(log2 |x|), at least -6; kNoExponent for zero
};

// One step's codes of 64 rows, decoded. Rows and columns beyond the matrix are zeros. nan[row] is set where a code is
// NaN.
__device__ __forceinline__ void load_operand(const uint8_t* codes, int64_t num_rows, int64_t k, int64_t first_row,
                                             int64_t first_k, int64_t end_k, int step, Operand& operand, int* nan) {
  for (int i = threadIdx.x; i < kTile * step; i += kGemmThreads) {
    const int row = i / step, column = i % step;
    const int64_t global_row = first_row + row, global_k = first_k + column;
    const uint32_t code = global_row < num_rows && global_k < end_k ? codes[global_row * k + global_k] : 0u;
    const uint32_t magnitude = code & E4M3::magnitude_mask;
    float value = 0.0f;
    int exponent = kNoExponent;
    if (magnitude == kE4M3Nan) {
      nan[row] = 1;
    } else if (magnitude != 0) {
      const Unpacked x = unpack<E4M3>(magnitude);
      value = float(x.significand) * Float<float>::power_of_two(x.exponent);
      value = (code & E4M3::sign_mask) != 0 ? -value : value;
      exponent = max_int(int(magnitude >> E4M3::mantissa_bits), 1) - E4M3::bias;
    }
    operand.values[column][row] = value;
    operand.exponents[column][row] = int16_t(exponent);
  }
}

template <typename Real, bool kNearest>
__device__ __forceinline__ void gemm_emulated(const GemmParams& p) {
  using F = Float<Real>;
  __shared__ Operand a, b;
  __shared__ int a_nan[kTile], b_nan[kTile];
  const int tile_row = threadIdx.x / (kTile / kSide) * kSide, tile_col = threadIdx.x % (kTile / kSide) * kSide;
  const int64_t first_m = int64_t(blockIdx.y) * kTile, first_n = int64_t(blockIdx.x) * kTile;
  for (int i = threadIdx.x; i < kTile; i += kGemmThreads) a_nan[i] = b_nan[i] = 0;
  __syncthreads();

  float total[kSide][kSide] = {};
  const int64_t part = ceil_div(ceil_div(p.k, 128), p.split_k) * 128;  // whole 128-blocks
  for (int s = 0; s < p.split_k; ++s) {
    const int64_t begin = s * part, end = min(begin + part, p.k);
    if (s > 0 && begin >= p.k) break;
    float acc[kSide][kSide] = {};
    Real c[kSide][kSide] = {};
    for (int64_t k0 = begin; k0 < end; k0 += p.products_per_step) {
      load_operand(p.a, p.m, p.k, first_m, k0, end, p.products_per_step, a, a_nan);
      load_operand(p.b, p.n, p.k, first_n, k0, end, p.products_per_step, b, b_nan);
      __syncthreads();

      int largest[kSide][kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) largest[i][j] = c[i][j] != Real(0) ? F::exponent(c[i][j]) : 2 * kNoExponent;
      }
      for (int k = 0; k < p.products_per_step; ++k) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            largest[i][j] = max_int(largest[i][j], a.exponents[k][tile_row + i] + b.exponents[k][tile_col + j]);
          }
        }
      }
      Real inverse_q[kSide][kSide], t[kSide][kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          largest[i][j] = max_int(largest[i][j], -40);  // all zero: any q will do
          inverse_q[i][j] = F::power_of_two(p.fraction_bits - largest[i][j]);
          const Real big = F::with_sign_of(F::kUlpOne, c[i][j]);
          t[i][j] =
              (kNearest ? F::fma_rn(c[i][j], inverse_q[i][j], big) : F::fma_rz(c[i][j], inverse_q[i][j], big)) - big;
        }
      }
      for (int k = 0; k < p.products_per_step; ++k) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) {
            const Real product = Real(a.values[k][tile_row + i] * b.values[k][tile_col + j]);  // 8 bits: exact
            const Real big = F::with_sign_of(F::kUlpOne, product);
            t[i][j] +=
                (kNearest ? F::fma_rn(product, inverse_q[i][j], big) : F::fma_rz(product, inverse_q[i][j], big)) - big;
          }
        }
      }
      const bool promote = k0 + p.products_per_step >= end ||
                           (p.promotion_interval > 0 && (k0 - begin + p.products_per_step) % p.promotion_interval == 0);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const int64_t m = first_m + tile_row + i;
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const int64_t n = first_n + tile_col + j;
          const Real sum = t[i][j] * F::power_of_two(largest[i][j] - p.fraction_bits);
          c[i][j] = F::template cut<kNearest>(sum, p.fraction_bits);
          if (!promote || m >= p.m || n >= p.n) continue;
          const int64_t block = k0 / 128;
          const float sa = p.a_scales[m * p.a_scale_row_stride + block * p.a_scale_col_stride];
          const float sb = p.b_scales[n / p.b_rows_per_scale * p.b_scale_row_stride + block * p.b_scale_col_stride];
          const float d = float(c[i][j]);  // at most 24 bits: exact
          acc[i][j] =
              p.scales_first ? __fmaf_rn(d, __fmul_rn(sa, sb), acc[i][j]) : __fmaf_rn(__fmul_rn(d, sa), sb, acc[i][j]);
          c[i][j] = Real(0);
        }
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
      if ((bits & FP32::magnitude_mask) > FP32::inf_code || a_nan[tile_row + i] || b_nan[tile_col + j])
        bits = 0x7FFFFFFFu;
      if (p.out_is_bf16) {
        const bool is_nan = bits == 0x7FFFFFFFu;
        const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        static_cast<uint16_t*>(p.out)[m * p.n + n] = uint16_t(is_nan ? 0x7FFFu : rounded);
      } else {
        static_cast<uint32_t*>(p.out)[m * p.n + n] = bits;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kGemmThreads)
    gemm_emulated_toward_zero(const __grid_constant__ GemmParams p) {
  gemm_emulated<float, false>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads) gemm_emulated_to_even(const __grid_constant__ GemmParams p) {
  gemm_emulated<float, true>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads)
    gemm_emulated_wide_toward_zero(const __grid_constant__ GemmParams p) {
  gemm_emulated<double, false>(p);
}
extern "C" __global__ void __launch_bounds__(kGemmThreads)
    gemm_emulated_wide_to_even(const __grid_constant__ GemmParams p) {
  gemm_emulated<double, true>(p);
}

}  // namespace mxsim
