// What the kernels share: packed conversions in registers, and the map from output rows to experts.
#pragma once

#include "convert.h"
#include "params.h"
#include "ptx.cuh"

namespace mxsim {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr uint32_t kSigns16x2 = 0x80008000u;
constexpr uint32_t kMagnitudes16x2 = 0x7FFF7FFFu;
constexpr uint32_t kNegativeZeros16x2 = 0x80008000u;  // a * b as fma(a, b, -0): exact, and +0 stays +0

__device__ __forceinline__ uint32_t both_lanes(uint32_t x) {
  return x * 0x00010001u;
}
__device__ __forceinline__ uint32_t larger_lane(uint32_t x) {
  return max_uint(x & 0xFFFFu, x >> 16);
}

// Maximum over 2**k neighbouring lanes (width = 2**k), in every lane of the group.
__device__ __forceinline__ uint32_t group_max_u16x2(uint32_t x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) x = max_u16x2(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Eight nibbles from four registers of two codes each, every code (sign included) in the top four bits of its 16-bit
// lane; element 2j is register j's low lane. Result: element i in bits 4i to 4i + 3.
__device__ __forceinline__ uint32_t pack_nibbles(const uint32_t (&c)[4]) {
  const uint32_t q0 = prmt(c[0], c[1], 0x7351);  // elements 0, 2, 1, 3
  const uint32_t q1 = prmt(c[2], c[3], 0x7351);  // elements 4, 6, 5, 7
  const uint32_t even = prmt(q0, q1, 0x5410);    // elements 0, 2, 4, 6
  const uint32_t odd = prmt(q0, q1, 0x7632);     // elements 1, 3, 5, 7
  return select_bits(0x0F0F0F0Fu, even >> 4, odd);
}

// ------------------------------------------------------------------------------------------------- E2M1 from floats
// y = |x| * 2**-X, at most 6 after clamping. E2M1 steps by 1/2 below 2, by 1 below 4, by 2 above: by p/2, where
// p = 2**floor(log2(max(y, 1))). Adding a power of two whose ulp is that step rounds y to nearest even. All of it is
// done 2**-126 (bfloat16) or 2**-14 (f16) times smaller, where 1.0 is the smallest normal number and 0.5 a subnormal:
// what is left after taking the power of two off again has the E2M1 code in the bits that follow its sign's place.

// Codes of two bfloat16, each at bits 6 to 8 of its lane, the sign in bit 15 except on what rounds to zero. factor =
// 2**-X. y and p carry x's sign, so that no separate magnitude is needed.
__device__ __forceinline__ uint32_t e2m1x2_from_bf16x2(uint32_t x, uint32_t factor) {
  constexpr uint32_t kSix = 0x40C040C0u, kOne = 0x3F803F80u, kSignAndExponent = 0xFF80FF80u, kMinusOne = 0xBF80BF80u;
  constexpr uint32_t kMinNormal = 0x00800080u;  // 2**-126
  constexpr uint32_t kMagic = 0x03800380u;      // 2**-120 = 2**-126 * 2**7 / 2: ulp p/2 once multiplied by p
  const uint32_t y = min_magnitude_bf16x2(fma_bf16x2(x, factor, kNegativeZeros16x2), kSix);
  const uint32_t p = max_magnitude_bf16x2(y, kOne) & kSignAndExponent;
  const uint32_t magic = fma_bf16x2(p, kMagic, kNegativeZeros16x2);
  const uint32_t sum = fma_bf16x2(y, kMinNormal, magic);
  return fma_bf16x2(magic, kMinusOne, sum);
}

// The largest of eight bfloat16 magnitudes in the lower or the upper lane, signs unspecified; NaN wins.
__device__ __forceinline__ uint32_t largest_magnitudes(uint4 x) {
  return max_magnitude_bf16x2(max_magnitude_bf16x2(x.x, x.y), max_magnitude_bf16x2(x.z, x.w));
}

// Magnitude bits of the largest bfloat16 over groups of `width` neighbouring lanes, from each lane's candidates.
__device__ __forceinline__ uint32_t group_amax_bf16(uint32_t candidates, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    candidates = max_magnitude_bf16x2(candidates, __shfl_xor_sync(kAllLanes, candidates, offset));
  }
  return larger_lane(candidates & kMagnitudes16x2);
}

// MXFP4 nibbles of eight bfloat16.
__device__ __forceinline__ uint32_t fp4x8_from_bf16x8(uint4 x, uint32_t factor) {
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
  uint32_t codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) codes[j] = select_bits(kSigns16x2, pairs[j], e2m1x2_from_bf16x2(pairs[j], factor) << 6);
  return pack_nibbles(codes);
}

// The same for f16 of at most 4 significant bits, each code at bits 9 to 11 of its lane. Here the power of two may keep
// y's other bits: they are even multiples of the step, so that ties still go to the even code.
__device__ __forceinline__ uint32_t e2m1x2_from_f16x2(uint32_t x, uint32_t factor) {
  constexpr uint32_t kSix = 0x46004600u, kMinusOne = 0xBC00BC00u;
  constexpr uint32_t kMinNormal = 0x04000400u;  // 2**-14
  constexpr uint32_t kMagic = 0x28002800u;      // 2**-5 = 2**-14 * 2**10 / 2
  const uint32_t y = min_magnitude_f16x2(fma_f16x2(x, factor, kNegativeZeros16x2), kSix);
  const uint32_t magic = max_magnitude_f16x2(fma_f16x2(y, kMagic, kNegativeZeros16x2), kMagic);
  const uint32_t sum = fma_f16x2(y, kMinNormal, magic);
  return fma_f16x2(magic, kMinusOne, sum);
}

// MXFP4 nibbles of eight f16, two a word.
__device__ __forceinline__ uint32_t fp4x8_from_f16x8(const uint32_t (&pairs)[4], uint32_t factor) {
  uint32_t codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) codes[j] = select_bits(kSigns16x2, pairs[j], e2m1x2_from_f16x2(pairs[j], factor) << 3);
  return pack_nibbles(codes);
}

// f16 bits of 2**exponent, 0 below 2**-24.  exponent <= 15.
__device__ __forceinline__ uint32_t f16_power_of_two(int exponent) {
  if (exponent >= FP16::emin) return uint32_t(exponent + FP16::bias) << FP16::mantissa_bits;
  return exponent >= -24 ? 0x400u >> (FP16::emin - exponent) : 0u;
}

// Out of line: subnormal scales are rare.
__device__ __noinline__ int subnormal_fp32_exponent(uint32_t bits) {
  return fp32_exponent(bits);
}

__device__ __forceinline__ int scale_exponent_of_fp32(uint32_t bits) {
  if (bits < 0x00800000u) return subnormal_fp32_exponent(bits);
  return bits < FP32::inf_code && (bits & 0x007FFFFFu) == 0 ? int(bits >> 23) - FP32::bias : kNotAPowerOfTwo;
}

// ------------------------------------------------------------------------------------------------- E4M3 from E2M1
struct ExpandTable {
  Fp4Table magnitudes;
  uint32_t sign_mask;  // 0x80808080, or 0 where signs are dropped (a NaN block)
};

// Out of line: scale gaps this large are rare, and their code is long.
__device__ __noinline__ Fp4Table fp4_table_with_subnormals(int shift) {
  return fp4_table(shift);
}

// For one block of 32 whose scale code is `code`, in a group whose largest exponent is `shared` (E + 127).
__device__ __forceinline__ ExpandTable expand_table(uint32_t code, int shared, int headroom) {
  if (code == kE8M0Nan) return {{0x7F7F7F7Fu, 0x7F7F7F7Fu}, 0u};
  const int shift = headroom + int(code) - shared;
  return {shift >= kMinPlainShift ? fp4_table_plain(shift) : fp4_table_with_subnormals(shift), 0x80808080u};
}

// Four nibbles (low 16 bits) -> four bytes. A selector's low three bits choose a magnitude byte; its top bit, the
// sign, turns 0x80 into 0xFF, of which a left shift leaves the sign in place.
__device__ __forceinline__ uint32_t expand_fp4x4(uint32_t nibbles, uint32_t magnitude_nibbles,
                                                 const ExpandTable& table) {
  const uint32_t magnitudes = prmt(table.magnitudes.lo, table.magnitudes.hi, magnitude_nibbles);
  const uint32_t signs = prmt(0x80808080u, 0x80808080u, nibbles);
  return magnitudes | ((signs << 1) & table.sign_mask);
}

// Eight nibbles -> eight bytes.
__device__ __forceinline__ uint2 expand_fp4x8(uint32_t nibbles, const ExpandTable& table) {
  const uint32_t magnitude_nibbles = nibbles & 0x77777777u;
  return {expand_fp4x4(nibbles, magnitude_nibbles, table), expand_fp4x4(nibbles >> 16, magnitude_nibbles >> 16, table)};
}

// Largest of four E8M0 codes, NaN left out (all NaN: 0). One added modulo 256 turns NaN into the smallest.
__device__ __forceinline__ uint32_t shared_scale_code(uint32_t four_codes) {
  const uint32_t even = ((four_codes & 0x00FF00FFu) + 0x00010001u) & 0x00FF00FFu;
  const uint32_t odd = ((four_codes >> 8 & 0x00FF00FFu) + 0x00010001u) & 0x00FF00FFu;
  return max_uint(larger_lane(max_u16x2(even, odd)), 1u) - 1u;
}

// ------------------------------------------------------------------------------------------------- E4M3 from BF16
// Bits of the lower, the upper bfloat16 of a pair as binary32.
__device__ __forceinline__ float lower_bf16(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float upper_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// E4M3 codes of four values that a power of two has scaled into range: ties to even; NaN becomes 0x7F.
__device__ __forceinline__ uint32_t e4m3x4(float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 890
  return e4m3x4_from_f32(x0, x1, x2, x3);
#else
  const float x[4] = {x0, x1, x2, x3};
  uint32_t codes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __float_as_uint(x[i]), magnitude = bits & FP32::magnitude_mask;
    const uint32_t code = round_and_pack<E4M3>(unpack<FP32>(magnitude)) | (bits >> 31 << 7);
    codes |= (magnitude > FP32::inf_code ? kE4M3Nan : code) << (8 * i);
  }
  return codes;
#endif
}

// Four bfloat16 in order times factor, a power of two.
__device__ __forceinline__ uint32_t e4m3x4_from_bf16(uint32_t first, uint32_t second, float factor) {
  return e4m3x4(__fmul_rn(lower_bf16(first), factor), __fmul_rn(upper_bf16(first), factor),
                __fmul_rn(lower_bf16(second), factor), __fmul_rn(upper_bf16(second), factor));
}

// ------------------------------------------------------------------------------------------------------ ragged rows
struct Expert {
  int64_t first_row;     // of the input
  int64_t size;          // rows
  int64_t first_padded;  // output row (row kernels) or column (column kernels) at which it starts
  int64_t padded;        // size rounded up
};

// Run through the experts 32 at a time, a lane each, in one warp; `visit(expert, begin, end)` sees this lane's expert
// (empty past the last) and the padded rows that these 32 span, and says whether to stop, alike in all lanes. Sizes are
// clamped in order to the rows there are. kWithRest: rows that belong to no expert come last, unpadded.
template <bool kWithRest = false, typename Visit>
__device__ __forceinline__ void for_experts(const Params& p, int multiple, Visit visit) {
  const int lane = threadIdx.x % kWarpSize;
  const bool writes_sizes = p.padded_sizes != nullptr && (blockIdx.x | blockIdx.y | blockIdx.z) == 0;
  int64_t rows_before = 0, padded_before = 0;
  for (int first = 0; first < p.num_groups + (kWithRest ? 1 : 0); first += kWarpSize) {
    const int e = first + lane;
    const bool is_rest = kWithRest && e == p.num_groups;
    int64_t size = e < p.num_groups ? p.group_sizes[e] : (is_rest ? p.rows : 0);
    size = size < 0 ? 0 : (size > p.rows ? p.rows : size);
    int64_t rows_to_here = size;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, rows_to_here, offset);
      if (lane >= offset) rows_to_here += before;
    }
    const int64_t start = rows_before + rows_to_here - size;
    const int64_t end = rows_before + rows_to_here;
    Expert expert;
    expert.first_row = start < p.rows ? start : p.rows;
    expert.size = (end < p.rows ? end : p.rows) - expert.first_row;
    expert.padded = is_rest ? expert.size : round_up(expert.size, multiple);
    int64_t padded_to_here = expert.padded;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, padded_to_here, offset);
      if (lane >= offset) padded_to_here += before;
    }
    expert.first_padded = padded_before + padded_to_here - expert.padded;
    if (writes_sizes && e < p.num_groups) p.padded_sizes[e] = expert.padded;
    const int64_t rows_in_chunk = __shfl_sync(kAllLanes, rows_to_here, kWarpSize - 1);
    const int64_t padded_in_chunk = __shfl_sync(kAllLanes, padded_to_here, kWarpSize - 1);
    const bool stop = visit(expert, padded_before, padded_before + padded_in_chunk);
    if (stop && !writes_sizes) return;  // the first block goes on to the last size
    rows_before += rows_in_chunk;
    padded_before += padded_in_chunk;
  }
}

// The value of `x` in lane `lane`.
__device__ __forceinline__ Expert broadcast(const Expert& x, int lane) {
  return {__shfl_sync(kAllLanes, x.first_row, lane), __shfl_sync(kAllLanes, x.size, lane),
          __shfl_sync(kAllLanes, x.first_padded, lane), __shfl_sync(kAllLanes, x.padded, lane)};
}

// The expert whose padded range holds `target`; size -1 if there is none. One whole warp; the result in every lane.
__device__ __forceinline__ Expert find_expert(const Params& p, int multiple, int64_t target) {
  Expert found{0, -1, 0, 0};
  for_experts(p, multiple, [&](const Expert& expert, int64_t, int64_t) {
    const bool mine = target >= expert.first_padded && target < expert.first_padded + expert.padded;
    const uint32_t lanes = __ballot_sync(kAllLanes, mine);
    if (lanes != 0) found = broadcast(expert, __ffs(int(lanes)) - 1);
    return lanes != 0;
  });
  return found;
}

}  // namespace mxsim
