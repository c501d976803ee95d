// One PTX instruction per wrapper.
#pragma once

#include "types.h"

namespace mxsim {

__device__ __forceinline__ uint4 load_streaming_v4(const void* gmem) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(gmem));
  return v;
}

// Kept in L1: two threads' accesses share a sector.
__device__ __forceinline__ uint4 load_v4(const void* gmem) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(gmem));
  return v;
}

__device__ __forceinline__ uint2 load_streaming_v2(const void* gmem) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(gmem));
  return v;
}

// Byte i of the result: byte (selector nibble i, low three bits) of {a, b}, or, where the nibble's top bit is set,
// eight copies of that byte's top bit. __byte_perm, by contrast, masks that bit away.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// a where mask is 1, else b. In one instruction: written with & and |, a constant mask makes two of it.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
  return d;
}

// Per 16-bit lane.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return __vmaxu2(a, b);
#endif
}

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The smaller, the larger magnitude, with the sign of a * b. The larger: NaN (of unspecified sign) if either is.
__device__ __forceinline__ uint32_t min_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return d | ((a ^ b) & 0x80008000u);
#endif
}
__device__ __forceinline__ uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return d | ((a ^ b) & 0x80008000u);
#endif
}

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t min_magnitude_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return d | ((a ^ b) & 0x80008000u);
#endif
}
__device__ __forceinline__ uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return d | ((a ^ b) & 0x80008000u);
#endif
}

// The lower, the upper two of four E4M3 codes as exact f16, the lower byte in the lower lane.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint32_t f16x2_from_lower_e4m3(uint32_t codes) {
  uint32_t d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(d) : "r"(codes));
  return d;
}
__device__ __forceinline__ uint32_t f16x2_from_upper_e4m3(uint32_t codes) {
  uint32_t d;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(d) : "r"(codes));
  return d;
}
#else
// The exponent field keeps its place under the sign; 2**8 makes up for the other bias, subnormals included.
__device__ __forceinline__ uint32_t f16x2_from_e4m3_in_upper_bytes(uint32_t lanes) {
  const uint32_t magnitudes = (lanes >> 1) & 0x3F803F80u;
  const uint32_t value = fma_f16x2(magnitudes | (lanes & 0x80008000u), 0x5C005C00u, 0x80008000u);
  const uint32_t nan = ((magnitudes + 0x00800080u) >> 14 & 0x00010001u) * 0x7FFFu;
  return value | nan;
}
__device__ __forceinline__ uint32_t f16x2_from_lower_e4m3(uint32_t codes) {
  return f16x2_from_e4m3_in_upper_bytes(prmt(codes, 0, 0x1404));
}
__device__ __forceinline__ uint32_t f16x2_from_upper_e4m3(uint32_t codes) {
  return f16x2_from_e4m3_in_upper_bytes(prmt(codes, 0, 0x3424));
}
#endif

#if __CUDA_ARCH__ >= 890
// E4M3 codes of four f16, the first in the lowest byte, ties to even, saturating; NaN becomes 0x7F.
__device__ __forceinline__ uint32_t e4m3x4_from_f16x2(uint32_t low, uint32_t high) {
  uint32_t d;
  asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f16x2 a, %1; cvt.rn.satfinite.e4m3x2.f16x2 b, %2; mov.b32 %0, {a, b}; "
      "}"
      : "=r"(d)
      : "r"(low), "r"(high));
  return d;
}
// The same of four binary32.
__device__ __forceinline__ uint32_t e4m3x4_from_f32(float x0, float x1, float x2, float x3) {
  uint32_t d;
  asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, %2, %1; cvt.rn.satfinite.e4m3x2.f32 b, %4, %3; mov.b32 %0, {a, "
      "b}; }"
      : "=r"(d)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}
#endif

}  // namespace mxsim
