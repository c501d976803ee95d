// Computes: MXFP4 rows of bfloat16, binary16 or binary32 values.
// Contract: bit-equal to mxsim.blocks.quantize(x, MXFP4, scale_rule=...).
// Work split: the tensor is flat, since blocks of 32 never straddle rows. bfloat16: a thread takes 16 elements at a
// time,
//   two neighbouring threads a block, and has kLoads of them in flight; the others 8 elements, four threads a block.
// Traffic per element: read 2 bytes (4 for binary32), write 17/32 byte.
#include "mxsim/device.cuh"

namespace mxsim {

constexpr int kThreads = 256;

// bfloat16, by packed arithmetic: see e2m1x2_from_bf16x2.
constexpr int kLoads = 2;
constexpr int kLaneElements = 16;

template <bool kFull>
__device__ __forceinline__ void bf16_to_fp4_row_piece(const Params& p, int64_t first, int64_t num_pieces) {
  const uint32_t rounding_bias = e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule));
  const uint4* in = static_cast<const uint4*>(p.in_codes) + 2 * first;
  uint2* out_codes = static_cast<uint2*>(p.out_codes) + first;
  uint8_t* out_scales = static_cast<uint8_t*>(p.out_scales) + first / 2;
  uint4 x[kLoads][2];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const bool present = kFull || first + i * kThreads < num_pieces;
    x[i][0] = present ? load_v4(in + 2 * i * kThreads) : uint4{0, 0, 0, 0};
    x[i][1] = present ? load_v4(in + 2 * i * kThreads + 1) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t largest = max_magnitude_bf16x2(largest_magnitudes(x[i][0]), largest_magnitudes(x[i][1]));
    const uint32_t scale_code = e2m1_scale_code<BF16>(group_amax_bf16(largest, 2), rounding_bias);
    const uint32_t factor = both_lanes((254u - scale_code) << BF16::mantissa_bits);  // 2**-X; unused in a NaN block
    uint2 codes{fp4x8_from_bf16x8(x[i][0], factor), fp4x8_from_bf16x8(x[i][1], factor)};
    if (scale_code == kE8M0Nan) codes = {0, 0};
    if (kFull || first + i * kThreads < num_pieces) {
      out_codes[i * kThreads] = codes;
      if (threadIdx.x % 2 == 0) out_scales[i * (kThreads / 2)] = uint8_t(scale_code);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp4_row(const __grid_constant__ Params p) {
  const int64_t num_pieces = p.rows * p.cols / kLaneElements;
  const int64_t block_first = int64_t(blockIdx.x) * (kThreads * kLoads);
  const int64_t first = block_first + threadIdx.x;
  if (block_first + kThreads * kLoads <= num_pieces) {
    bf16_to_fp4_row_piece<true>(p, first, num_pieces);
  } else {
    bf16_to_fp4_row_piece<false>(p, first, num_pieces);
  }
}

// binary16 and binary32, by the portable rule.
template <typename Source, typename Storage>
__device__ __forceinline__ void to_fp4_row(const Params& p) {
  constexpr int kElements = 8, kLanesPerBlock = 4;
  const int64_t num_vectors = p.rows * p.cols / kElements;
  const int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  uint32_t bits[kElements] = {};
  if (vector < num_vectors) {
    union {
      uint4 vectors[sizeof(Storage) / 2];
      Storage values[kElements];
    } loaded;
#pragma unroll
    for (int i = 0; i < int(sizeof(Storage) / 2); ++i) {
      loaded.vectors[i] = static_cast<const uint4*>(p.in_codes)[vector * (sizeof(Storage) / 2) + i];
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) bits[i] = loaded.values[i];
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) amax = max_uint(amax, bits[i] & Source::magnitude_mask);
  for (int offset = kLanesPerBlock / 2; offset > 0; offset /= 2) {
    amax = max_uint(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  }
  if (vector >= num_vectors) return;
  const bool poisoned = amax >= Source::inf_code;
  const int exponent = scale_exponent<Source, E2M1>(amax, ScaleRule(p.rule));
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    Unpacked value = unpack<Source>(bits[i] & Source::magnitude_mask);
    value.exponent -= exponent;
    const uint32_t sign = (bits[i] & Source::sign_mask) != 0 ? E2M1::sign_mask : 0u;
    packed |= (round_and_pack<E2M1>(value) | sign) << (4 * i);
  }
  static_cast<uint32_t*>(p.out_codes)[vector] = poisoned ? 0u : packed;
  if (vector % kLanesPerBlock == 0) {
    static_cast<uint8_t*>(p.out_scales)[vector / kLanesPerBlock] = uint8_t(poisoned ? kE8M0Nan : e8m0_code(exponent));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) f16_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP16, uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) f32_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP32, uint32_t>(p);
}

}  // namespace mxsim
