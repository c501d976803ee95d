// Computes: MXFP4 rows of bfloat16, binary16 or binary32 values.
// Contract: bit-equal to mxsim.blocks.quantize(x, MXFP4, scale_rule=...).
// Work split: the tensor is flat, since blocks of 32 never straddle rows; a thread takes 8 elements at a time, four
//   neighbouring threads a block. kVectorsPerThread independent 16-byte loads are in flight before the first use.
// Traffic per element: read 2 bytes (4 for binary32), write 17/32 byte.
#include "mxsim/device.cuh"

namespace mxsim {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;
constexpr int kElements = 8;           // a thread's share of a vector
constexpr int kLanesPerBlock = 4;      // 32 elements

__device__ __forceinline__ void store_block(const Params& p, int64_t vector, uint32_t codes, uint32_t scale_code) {
  reinterpret_cast<uint32_t*>(p.out_codes)[vector] = codes;
  if (vector % kLanesPerBlock == 0) {
    reinterpret_cast<uint8_t*>(p.out_scales)[vector / kLanesPerBlock] = uint8_t(scale_code);
  }
}

// bfloat16, by packed arithmetic: see e2m1x2_from_bf16x2.
extern "C" __global__ void __launch_bounds__(kThreads) bf16_to_fp4_row(const __grid_constant__ Params p) {
  const int64_t num_vectors = p.rows * p.cols / kElements;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kVectorsPerThread) + threadIdx.x;
  const uint32_t rounding_bias = e2m1_scale_rounding_bias<BF16::mantissa_bits>(ScaleRule(p.rule));

  uint4 x[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t vector = first + i * kThreads;
    x[i] = vector < num_vectors ? load_streaming_v4(reinterpret_cast<const uint4*>(p.in_codes) + vector) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const uint32_t pairs[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    uint32_t magnitudes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) magnitudes[j] = pairs[j] & kMagnitudes16x2;
    const uint32_t largest = max_u16x2(max_u16x2(magnitudes[0], magnitudes[1]), max_u16x2(magnitudes[2], magnitudes[3]));
    const uint32_t amax = larger_lane(group_max_u16x2(largest, kLanesPerBlock));  // bits order like magnitudes
    const uint32_t scale_code = e2m1_scale_code<BF16>(amax, rounding_bias);
    const uint32_t factor = both_lanes((254u - scale_code) << BF16::mantissa_bits);  // 2**-X; unused in a NaN block
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      codes[j] = (e2m1x2_from_bf16x2(magnitudes[j], factor) << 6) | (pairs[j] & kSigns16x2);
    }
    const int64_t vector = first + i * kThreads;
    if (vector < num_vectors) {
      store_block(p, vector, scale_code == kE8M0Nan ? 0u : pack_nibbles(codes), scale_code);
    }
  }
}

// binary16 and binary32, by the portable rule.
template <typename Source, typename Storage>
__device__ __forceinline__ void to_fp4_row(const Params& p) {
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
      loaded.vectors[i] = reinterpret_cast<const uint4*>(p.in_codes)[vector * (sizeof(Storage) / 2) + i];
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
  if (amax >= Source::inf_code) return store_block(p, vector, 0u, kE8M0Nan);
  const int exponent = scale_exponent<Source, E2M1>(amax, ScaleRule(p.rule));
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    Unpacked value = unpack<Source>(bits[i] & Source::magnitude_mask);
    value.exponent -= exponent;
    const uint32_t sign = (bits[i] & Source::sign_mask) != 0 ? E2M1::sign_mask : 0u;
    packed |= (round_and_pack<E2M1>(value) | sign) << (4 * i);
  }
  store_block(p, vector, packed, e8m0_code(exponent));
}

extern "C" __global__ void __launch_bounds__(kThreads) f16_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP16, uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) f32_to_fp4_row(const __grid_constant__ Params p) {
  to_fp4_row<FP32, uint32_t>(p);
}

}  // namespace mxsim
