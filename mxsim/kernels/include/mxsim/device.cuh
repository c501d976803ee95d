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

__device__ __forceinline__ uint32_t both_lanes(uint32_t x) { return x * 0x00010001u; }
__device__ __forceinline__ uint32_t larger_lane(uint32_t x) { return max_uint(x & 0xFFFFu, x >> 16); }

// Maximum over 2**k neighbouring lanes (width = 2**k), in every lane of the group.
__device__ __forceinline__ uint32_t group_max_u16x2(uint32_t x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) x = max_u16x2(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// ------------------------------------------------------------------------------------------------- E2M1 from floats
// |x| * 2**-X lies in [0, 8). E2M1 steps by 1/2 below 2, by 1 below 4 and by 2 above: half of p = 2**floor(log2(max(y, 1))).
// Adding a power of two whose ulp is that step rounds y to nearest even. All is done a factor 2**-126 (bfloat16) or
// 2**-14 (f16) down, where 1.0 becomes the smallest normal number, so that what is left after taking the power of two
// off again is a bit pattern whose top three bits under the sign's place are the E2M1 code: 0.5 is a subnormal there.

// Codes of two bfloat16 magnitudes, each at bits 6 to 8 of its lane. factor = 2**-X, exact in bfloat16.
__device__ __forceinline__ uint32_t e2m1x2_from_bf16x2(uint32_t magnitudes, uint32_t factor) {
  constexpr uint32_t kSix = 0x40C040C0u, kOne = 0x3F803F80u, kExponents = 0x7F807F80u, kMinusOne = 0xBF80BF80u;
  constexpr uint32_t kMinNormal = 0x00800080u;  // 2**-126
  constexpr uint32_t kMagic = 0x03800380u;      // 2**-120 = 2**-126 * 2**7 / 2: ulp p/2 once multiplied by p
  const uint32_t y = min_bf16x2(fma_bf16x2(magnitudes, factor, kNegativeZeros16x2), kSix);
  const uint32_t p = max_bf16x2(y, kOne) & kExponents;
  const uint32_t magic = fma_bf16x2(p, kMagic, kNegativeZeros16x2);
  const uint32_t sum = fma_bf16x2(y, kMinNormal, magic);
  return fma_bf16x2(magic, kMinusOne, sum);
}

// The same for f16, each code at bits 9 to 11 of its lane.
__device__ __forceinline__ uint32_t e2m1x2_from_f16x2(uint32_t magnitudes, uint32_t factor) {
  constexpr uint32_t kSix = 0x46004600u, kOne = 0x3C003C00u, kExponents = 0x7C007C00u, kMinusOne = 0xBC00BC00u;
  constexpr uint32_t kMinNormal = 0x04000400u;  // 2**-14
  constexpr uint32_t kMagic = 0x28002800u;      // 2**-5 = 2**-14 * 2**10 / 2
  const uint32_t y = min_f16x2(fma_f16x2(magnitudes, factor, kNegativeZeros16x2), kSix);
  const uint32_t p = max_f16x2(y, kOne) & kExponents;
  const uint32_t magic = fma_f16x2(p, kMagic, kNegativeZeros16x2);
  const uint32_t sum = fma_f16x2(y, kMinNormal, magic);
  return fma_f16x2(magic, kMinusOne, sum);
}

// Eight nibbles from four registers of two codes each, every code (sign included) in the top four bits of its 16-bit
// lane and zeros below; element 2j is register j's low lane. Result: element i in bits 4i to 4i + 3.
__device__ __forceinline__ uint32_t pack_nibbles(const uint32_t (&c)[4]) {
  const uint32_t q0 = __byte_perm(c[0], c[1], 0x7351);  // elements 0, 2, 1, 3
  const uint32_t q1 = __byte_perm(c[2], c[3], 0x7351);  // elements 4, 6, 5, 7
  const uint32_t even = __byte_perm(q0, q1, 0x5410);    // elements 0, 2, 4, 6
  const uint32_t odd = __byte_perm(q0, q1, 0x7632);     // elements 1, 3, 5, 7
  return (even >> 4) | odd;
}

// ------------------------------------------------------------------------------------------------- E4M3 from E2M1
struct ExpandTable {
  Fp4Table magnitudes;
  uint32_t sign_mask;  // 0x80808080, or 0 where signs are dropped (a NaN block)
};

// For one block of 32 whose scale code is `code`, in a group whose largest exponent is `shared` (E + 127).
__device__ __forceinline__ ExpandTable expand_table(uint32_t code, int shared, int headroom) {
  if (code == kE8M0Nan) return {{0x7F7F7F7Fu, 0x7F7F7F7Fu}, 0u};
  return {fp4_table(headroom + int(code) - shared), 0x80808080u};
}

// Four nibbles (low 16 bits) -> four bytes. A selector's low three bits choose a magnitude byte; its top bit, the
// sign, turns 0x80 into 0xFF, of which a left shift leaves the sign in place.
__device__ __forceinline__ uint32_t expand_fp4x4(uint32_t nibbles, uint32_t magnitude_nibbles, const ExpandTable& table) {
  const uint32_t magnitudes = __byte_perm(table.magnitudes.lo, table.magnitudes.hi, magnitude_nibbles);
  const uint32_t signs = __byte_perm(0x80808080u, 0x80808080u, nibbles);
  return magnitudes | ((signs << 1) & table.sign_mask);
}

// Eight nibbles -> eight bytes.
__device__ __forceinline__ uint2 expand_fp4x8(uint32_t nibbles, const ExpandTable& table) {
  const uint32_t magnitude_nibbles = nibbles & 0x77777777u;
  return {expand_fp4x4(nibbles, magnitude_nibbles, table),
          expand_fp4x4(nibbles >> 16, magnitude_nibbles >> 16, table)};
}

// Largest of four E8M0 codes, NaN left out (all NaN: 0).
__device__ __forceinline__ uint32_t shared_scale_code(uint32_t four_codes) {
  uint32_t shared = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = (four_codes >> (8 * i)) & 0xFFu;
    shared = max_uint(shared, code == kE8M0Nan ? 0u : code);
  }
  return shared;
}

// ------------------------------------------------------------------------------------------------- E4M3 from BF16
// Codes of two bfloat16 times 2**-exponent: `low` of the pair in the low byte. Ties to even; amax <= 448 * 2**exponent.
__device__ __forceinline__ uint32_t e4m3x2_from_bf16x2(uint32_t pair, int exponent) {
#if __CUDA_ARCH__ >= 890
  const float factor = __uint_as_float(fp32_power_of_two_bits(-exponent));
  const float low = __fmul_rn(__uint_as_float(pair << 16), factor);
  const float high = __fmul_rn(__uint_as_float(pair & 0xFFFF0000u), factor);
  return e4m3x2_from_f32(high, low);
#else
  uint32_t codes = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = (pair >> (16 * i)) & 0xFFFFu;
    Unpacked x = unpack<BF16>(bits & BF16::magnitude_mask);
    x.exponent -= exponent;
    codes |= (round_and_pack<E4M3>(x) | (bits >> 15 << 7)) << (8 * i);
  }
  return codes;
#endif
}

// ------------------------------------------------------------------------------------------------------ ragged rows
struct Expert {
  int64_t first_row;     // of the input
  int64_t size;          // rows
  int64_t first_padded;  // output row (row kernels) or column (column kernels) at which it starts
  int64_t padded;        // size rounded up
};

// Run through the experts 32 at a time, a lane each, in one warp; `visit(expert, lanes)` sees this lane's expert (empty
// past the last) and says whether to stop, alike in all lanes. Sizes are clamped in order to the rows there are.
template <typename Visit>
__device__ __forceinline__ void for_experts(const Params& p, int multiple, Visit visit) {
  const int lane = threadIdx.x % kWarpSize;
  int64_t rows_before = 0, padded_before = 0;
  for (int first = 0; first < p.num_groups; first += kWarpSize) {
    const int e = first + lane;
    int64_t size = e < p.num_groups ? p.group_sizes[e] : 0;
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
    expert.padded = round_up(expert.size, multiple);
    int64_t padded_to_here = expert.padded;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, padded_to_here, offset);
      if (lane >= offset) padded_to_here += before;
    }
    expert.first_padded = padded_before + padded_to_here - expert.padded;
    if (p.padded_sizes != nullptr && blockIdx.x == 0 && e < p.num_groups) p.padded_sizes[e] = expert.padded;
    const int64_t rows_in_chunk = __shfl_sync(kAllLanes, rows_to_here, kWarpSize - 1);
    const int64_t padded_in_chunk = __shfl_sync(kAllLanes, padded_to_here, kWarpSize - 1);
    const bool stop = visit(expert, padded_before, padded_before + padded_in_chunk);
    if (stop && !(p.padded_sizes != nullptr && blockIdx.x == 0)) return;  // block 0 goes on to write every size
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

// ------------------------------------------------------------------------------------------------ tiles of FP8 rows
// A block makes kTileRows output rows by kTileCols columns: a warp takes every eighth row. Scales go through shared
// memory so that they leave in runs of kTileRows: they lie column by column (MN-major).
constexpr int kTileRows = 32;
constexpr int kTileCols = 512;
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarpSize;
constexpr int kRowsPerWarp = kTileRows / kTileWarps;
constexpr int kTileScales = kTileCols / 128;

struct OutputRow {
  int64_t source;        // input row; kPadding: zeros; kAbsent: nothing there
  int64_t scale_offset;  // of its first scale
  int64_t scale_stride;  // to the next scale of the row
};
constexpr int64_t kPadding = -1;
constexpr int64_t kAbsent = -2;

struct RowTile {
  OutputRow rows[kTileRows];
  uint32_t scales[kTileScales][kTileRows];
};

// Fill tile.rows for output rows first_row ..; one warp. Dense: output row = input row, all scales in one matrix.
// Ragged: an expert's scales are a chunk [K/128, padded rows] of their own.
template <bool kRagged>
__device__ __forceinline__ void locate_rows(const Params& p, int64_t first_row, RowTile& tile) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t target = first_row + lane;
  OutputRow row{kAbsent, 0, 0};
  if (!kRagged) {
    if (target < p.rows) row = {target, target * p.out_scale_row_stride, p.out_scale_col_stride};
  } else {
    const int64_t num_scales = p.cols / 128;
    for_experts(p, p.row_multiple, [&](const Expert& expert, int64_t begin, int64_t end) {
      if (end <= first_row || begin >= first_row + kTileRows) return begin >= first_row + kTileRows;
      for (int i = 0; i < kWarpSize; ++i) {
        const Expert e = broadcast(expert, i);
        const int64_t in_expert = target - e.first_padded;
        if (in_expert >= 0 && in_expert < e.padded) {
          row.source = in_expert < e.size ? e.first_row + in_expert : kPadding;
          row.scale_offset = num_scales * e.first_padded + in_expert;
          row.scale_stride = e.padded;
        }
      }
      return end >= first_row + kTileRows;
    });
  }
  tile.rows[lane] = row;
}

// Write the tile's scales; every thread of the block, after a barrier.
__device__ __forceinline__ void store_tile_scales(const Params& p, void* out_scales, int64_t first_col, const RowTile& tile) {
  for (int i = threadIdx.x; i < kTileScales * kTileRows; i += kTileThreads) {
    const int r = i % kTileRows, block = i / kTileRows;
    const OutputRow& row = tile.rows[r];
    const int64_t column = first_col / 128 + block;
    if (row.source == kAbsent || column >= p.cols / 128) continue;
    reinterpret_cast<uint32_t*>(out_scales)[row.scale_offset + column * row.scale_stride] =
        row.source == kPadding ? fp32_power_of_two_bits(0) : tile.scales[block][r];
  }
}

}  // namespace mxsim
