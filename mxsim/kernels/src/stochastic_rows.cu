// Computes: MXFP4 rows, FP8 rows (1x128 blocks), or both, with stochastic rounding of a seed's random bits.
// Contract: bit-equal to mxsim.blocks.quantize(x, MXFP4 or FP8_1X128, rounding=STOCHASTIC, random_bits=
//   philox_bits(seed, x.shape)); the FP8 rows of the fused form are fp4_row_to_fp8_row of its MXFP4 rows. Element i of
//   the input draws the same bits in the dense and the ragged form: padding draws none.
// Work split: to_fp4_row: the tensor is flat, since blocks of 32 never straddle rows; a thread takes 8 elements, four
//   threads a block. The others: see row_tile.cuh. A thread draws the four words of a counter at once.
// Traffic per element: as in to_fp4_row.cu and bf16_rows.cu. Bound by arithmetic: Philox takes 15 instructions an
//   element.
#include "mxsim/bf16_row.cuh"
#include "mxsim/stochastic.h"

namespace mxsim {

// Codes of four elements, `kBits` bits each; `first` is the first one's index.
template <int kBits, typename CodeOf>
__device__ __forceinline__ uint32_t draw_four(const Params& p, uint64_t first, CodeOf code_of) {
  const PhiloxWords random = random_words(first / 4, p.seed);
  return code_of(0, random.at[0]) | code_of(1, random.at[1]) << kBits | code_of(2, random.at[2]) << (2 * kBits) |
         code_of(3, random.at[3]) << (3 * kBits);
}

// Codes of four bfloat16 in order, over 2**scale_exponent.
template <typename Element, int kBits>
__device__ __forceinline__ uint32_t draw_bf16x4(const Params& p, uint64_t first, uint32_t low, uint32_t high,
                                                int scale_exponent) {
  return draw_four<kBits>(p, first, [&](int i, uint32_t random) {
    const uint32_t pair = i < 2 ? low : high;
    return encode_bf16_stochastic<Element>(i % 2 == 0 ? pair & 0xFFFFu : pair >> 16, scale_exponent, random);
  });
}

// MXFP4 nibbles of eight bfloat16.
__device__ __forceinline__ uint32_t draw_fp4x8(const Params& p, uint64_t first, uint4 x, int scale_exponent) {
  return draw_bf16x4<E2M1, 4>(p, first, x.x, x.y, scale_exponent) |
         draw_bf16x4<E2M1, 4>(p, first + 4, x.z, x.w, scale_exponent) << 16;
}

// ------------------------------------------------------------------------------------------------- MXFP4 rows
constexpr int kThreads = 256;
constexpr int kElements = 8;
constexpr int kLanesPerBlock = 4;

extern "C" __global__ void __launch_bounds__(kThreads) stochastic_bf16_to_fp4_row(const __grid_constant__ Params p) {
  const int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const bool present = vector < p.rows * p.cols / kElements;
  const uint4 x = present ? load_v4(static_cast<const uint4*>(p.in_codes) + vector) : uint4{0, 0, 0, 0};
  const uint32_t rounding_bias = e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule));
  const uint32_t amax = group_amax_bf16(largest_magnitudes(x), kLanesPerBlock);
  const uint32_t scale_code = e2m1_scale_code<BF16>(amax, rounding_bias);
  if (!present) return;
  const uint32_t codes = draw_fp4x8(p, uint64_t(vector) * kElements, x, int(scale_code) - kE8M0Bias);
  static_cast<uint32_t*>(p.out_codes)[vector] = scale_code == kE8M0Nan ? 0u : codes;
  if (vector % kLanesPerBlock == 0) static_cast<uint8_t*>(p.out_scales)[vector / kLanesPerBlock] = uint8_t(scale_code);
}

// binary16 and binary32, by the portable rule.
template <typename Source, typename Storage>
__device__ __forceinline__ void to_fp4_row(const Params& p) {
  const int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const bool present = vector < p.rows * p.cols / kElements;
  union {
    uint4 vectors[sizeof(Storage) / 2];
    Storage values[kElements];
  } x = {};
  uint32_t amax = 0;
  if (present) {
#pragma unroll
    for (int i = 0; i < int(sizeof(Storage) / 2); ++i) {
      x.vectors[i] = load_v4(static_cast<const uint4*>(p.in_codes) + vector * (sizeof(Storage) / 2) + i);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) amax = max_uint(amax, x.values[i] & Source::magnitude_mask);
  }
  for (int offset = kLanesPerBlock / 2; offset > 0; offset /= 2) {
    amax = max_uint(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  }
  if (!present) return;
  const bool poisoned = amax >= Source::inf_code;
  const int exponent = scale_exponent<Source, E2M1>(amax, ScaleRule(p.rule));
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    codes |= draw_four<4>(p, uint64_t(vector) * kElements + i,
                          [&](int j, uint32_t random) {
                            return encode_scaled_stochastic<Source, E2M1>(x.values[i + j], exponent, random);
                          })
             << (4 * i);
  }
  static_cast<uint32_t*>(p.out_codes)[vector] = poisoned ? 0u : codes;
  if (vector % kLanesPerBlock == 0) {
    static_cast<uint8_t*>(p.out_scales)[vector / kLanesPerBlock] = uint8_t(poisoned ? kE8M0Nan : e8m0_code(exponent));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) stochastic_f16_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP16, uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) stochastic_f32_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP32, uint32_t>(p);
}

// ------------------------------------------------------------------------------------------------- FP8 rows, and both
// Blocks of hardly more than subnormals: rare, out of line.
__device__ __noinline__ uint32_t draw_tiny_fp8x4(const Params& p, uint64_t first, uint32_t low, uint32_t high,
                                                 int scale_exponent) {
  return draw_four<8>(p, first, [&](int i, uint32_t random) {
    const uint32_t pair = i < 2 ? low : high;
    const uint32_t bits = i % 2 == 0 ? pair & 0xFFFFu : pair >> 16;
    return encode_scaled_stochastic<BF16, E4M3>(bits, scale_exponent, random);
  });
}
__device__ __forceinline__ uint32_t draw_fp8x4(const Params& p, uint64_t first, uint32_t low, uint32_t high,
                                               int scale_exponent) {
  if (scale_exponent < kMinBf16Exponent<E4M3>) return draw_tiny_fp8x4(p, first, low, high, scale_exponent);
  return draw_bf16x4<E4M3, 8>(p, first, low, high, scale_exponent);
}

struct StochasticBf16ToFp8 {
  static constexpr int kWarpRows = 4;
  static constexpr bool kEveryRow = false;
  using Data = Bf16x16;
  __device__ __forceinline__ static Data load(const Params& p, int64_t, int64_t element) {
    return load_bf16x16(p, element);
  }
  __device__ __forceinline__ static uint32_t convert(const Params& p, const Data& x, int64_t element, bool,
                                                     uint4& codes) {
    const uint32_t amax = group_amax_bf16(largest_magnitudes(x), 8);
    if (amax >= BF16::inf_code) {
      codes = {0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu, 0x7F7F7F7Fu};
      return kFp32Nan;
    }
    const int exponent = fp8_scale_exponent(amax);
    const uint64_t first = uint64_t(element);
    codes = {draw_fp8x4(p, first, x.low.x, x.low.y, exponent), draw_fp8x4(p, first + 4, x.low.z, x.low.w, exponent),
             draw_fp8x4(p, first + 8, x.high.x, x.high.y, exponent),
             draw_fp8x4(p, first + 12, x.high.z, x.high.w, exponent)};
    return fp32_power_of_two_bits(exponent);
  }
};

struct StochasticBf16ToFp4AndFp8 {
  static constexpr int kWarpRows = 4;
  static constexpr bool kEveryRow = true;
  using Data = Bf16x16;
  __device__ __forceinline__ static Data load(const Params& p, int64_t, int64_t element) {
    return load_bf16x16(p, element);
  }
  __device__ __forceinline__ static uint32_t convert(const Params& p, const Data& x, int64_t element, bool present,
                                                     uint4& codes) {
    const uint32_t rounding_bias = e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule));
    const uint32_t scale_code = e2m1_scale_code<BF16>(group_amax_bf16(largest_magnitudes(x), 2), rounding_bias);
    const int exponent = int(scale_code) - kE8M0Bias;
    uint2 nibbles{draw_fp4x8(p, uint64_t(element), x.low, exponent),
                  draw_fp4x8(p, uint64_t(element) + 8, x.high, exponent)};
    if (scale_code == kE8M0Nan) nibbles = {0, 0};
    return store_fp4_and_expand(p, nibbles, scale_code, element, present, codes);
  }
};

extern "C" __global__ void __launch_bounds__(kTileThreads)
    stochastic_bf16_to_fp8_row_dense(const __grid_constant__ Params p) {
  convert_rows<StochasticBf16ToFp8, false>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    stochastic_bf16_to_fp8_row_ragged(const __grid_constant__ Params p) {
  convert_rows<StochasticBf16ToFp8, true>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    stochastic_bf16_to_fp4_and_fp8_row_dense(const __grid_constant__ Params p) {
  convert_rows<StochasticBf16ToFp4AndFp8, false>(p, p.out_codes_fp8, p.out_scales_fp8);
}
extern "C" __global__ void __launch_bounds__(kTileThreads)
    stochastic_bf16_to_fp4_and_fp8_row_ragged(const __grid_constant__ Params p) {
  convert_rows<StochasticBf16ToFp4AndFp8, true>(p, p.out_codes_fp8, p.out_scales_fp8);
}

}  // namespace mxsim
