// Computes: FP8 rows (1x128 blocks) and BF16 rows from MXFP4 rows.
// Contract: fp4_row_to_fp8_row is bit-equal to mxsim.blocks.fp4_row_to_fp8_row, expert by expert in the ragged form,
// whose
//   padding is code 0x00 and scale 1; fp4_to_bf16 to mxsim.blocks.dequantize(..., bfloat16).
// Work split: FP8: see row_tile.cuh; ragged tiles are twice as high, to pay for finding their experts. BF16: flat, a
//   thread 8 elements.
// Traffic per element: read 17/32 byte, write 33/32 byte (FP8) or 2 bytes (BF16).
#include "mxsim/row_tile.cuh"

namespace mxsim {

template <int kRows>
struct Fp4ToFp8 {
  static constexpr int kWarpRows = kRows;
  static constexpr bool kEveryRow = false;
  struct Data {
    uint2 nibbles;
    uint32_t four_codes;  // scale codes of the 128-block
  };
  __device__ __forceinline__ static Data load(const Params& p, int64_t, int64_t element) {
    return {load_streaming_v2(static_cast<const uint8_t*>(p.in_codes) + uint64_t(element) / 2),
            static_cast<const uint32_t*>(p.in_scales)[uint64_t(element) / 128]};
  }
  __device__ __forceinline__ static uint32_t convert(const Params& p, const Data& data, int64_t, bool, uint4& codes) {
    const uint32_t shared = shared_scale_code(data.four_codes);
    const uint32_t code = prmt(data.four_codes, 0, 0x4440u | (threadIdx.x / 2 % 4));
    const ExpandTable table = expand_table(code, int(shared), p.headroom);
    const uint2 low = expand_fp4x8(data.nibbles.x, table), high = expand_fp4x8(data.nibbles.y, table);
    codes = {low.x, low.y, high.x, high.y};
    return fp32_power_of_two_bits(int(shared) - kE8M0Bias - p.headroom);
  }
};

extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_row_to_fp8_row_dense(const __grid_constant__ Params p) {
  convert_rows<Fp4ToFp8<4>, false>(p, p.out_codes, p.out_scales);
}
extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_row_to_fp8_row_ragged(const __grid_constant__ Params p) {
  convert_rows<Fp4ToFp8<8>, true>(p, p.out_codes, p.out_scales);
}

// Two byte tables hold the bfloat16 of each E2M1 magnitude; times 2**X.
extern "C" __global__ void __launch_bounds__(kTileThreads) fp4_to_bf16(const __grid_constant__ Params p) {
  constexpr uint32_t kUpperLo = 0x3F3F3F00u, kUpperHi = 0x40404040u;  // 0, 0.5, 1, 1.5 | 2, 3, 4, 6
  constexpr uint32_t kLowerLo = 0xC0800000u, kLowerHi = 0xC0804000u;
  const int64_t vector = int64_t(blockIdx.x) * kTileThreads + threadIdx.x;
  if (vector >= p.rows * p.cols / 8) return;
  const uint32_t nibbles = reinterpret_cast<const uint32_t*>(p.in_codes)[vector];
  const uint32_t code = static_cast<const uint8_t*>(p.in_scales)[vector / 4];
  // 2**X in bfloat16; 2**-127 is a subnormal. The product rounds once, and overflows to infinity.
  const uint32_t factor = both_lanes(code == 0 ? 0x0040u : code << BF16::mantissa_bits);
  uint32_t out[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = nibbles >> (16 * half);
    const uint32_t magnitudes = four & 0x7777u;
    const uint32_t upper =
        prmt(kUpperLo, kUpperHi, magnitudes) | ((prmt(0x80808080u, 0x80808080u, four) << 1) & 0x80808080u);
    const uint32_t lower = prmt(kLowerLo, kLowerHi, magnitudes);
    const uint32_t pairs[2] = {prmt(lower, upper, 0x5140), prmt(lower, upper, 0x7362)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // a * b as fma(a, b, c) with c the zero of the product's sign, so that -0 stays -0
      const uint32_t product = fma_bf16x2(pairs[j], factor, pairs[j] & kSigns16x2);
      out[2 * half + j] = code == kE8M0Nan ? 0x7FC07FC0u : product;
    }
  }
  reinterpret_cast<uint4*>(p.out_codes)[vector] = uint4{out[0], out[1], out[2], out[3]};
}

}  // namespace mxsim
