// Integer helpers: everything rounds through shift_right_rne.
#pragma once

#include "types.h"

namespace mxsim {

MXSIM_HD constexpr int max_int(int a, int b) {
  return a > b ? a : b;
}
MXSIM_HD constexpr int min_int(int a, int b) {
  return a < b ? a : b;
}
MXSIM_HD constexpr int clamp_int(int x, int low, int high) {
  return min_int(max_int(x, low), high);
}
MXSIM_HD constexpr uint32_t max_uint(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}
MXSIM_HD constexpr uint32_t min_uint(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

MXSIM_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
MXSIM_HD constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

// floor(log2(x)).  x > 0.
MXSIM_HD constexpr int floor_log2(uint32_t x) {
  int log = 0;
  for (int step = 16; step > 0; step >>= 1) {
    if (x >> step) {
      x >>= step;
      log += step;
    }
  }
  return log;
}
static_assert(floor_log2(1) == 0 && floor_log2(0x00FFFFFF) == 23 && floor_log2(0x80000000u) == 31);

// round(x / 2**shift), ties to even.  0 < shift < 32, and x + 2**(shift-1) must fit 32 bits.
MXSIM_HD constexpr uint32_t shift_right_rne(uint32_t x, int shift) {
  const uint32_t kept_lsb = (x >> shift) & 1u;
  const uint32_t just_below_half = (1u << (shift - 1)) - 1u;
  return (x + just_below_half + kept_lsb) >> shift;
}
static_assert(shift_right_rne(0b0110, 2) == 0b10, "1.5 ties to 2");
static_assert(shift_right_rne(0b0010, 2) == 0b00, "0.5 ties to 0");
static_assert(shift_right_rne(0b1010, 2) == 0b10 && shift_right_rne(0b1011, 2) == 0b11, "2.5 ties to 2, 2.75 is 3");

// x / 2**shift, rounded up iff random < frac * 2**32.  shift > 0; x has at most 24 bits.
MXSIM_HD constexpr uint32_t shift_right_stochastic(uint32_t x, int shift, uint32_t random) {
  if (shift <= 32) return (x >> min_int(shift, 31)) + (random < x << (32 - shift) ? 1u : 0u);
  // All of x is fraction, and frac * 2**32 = x / 2**(shift - 32). random is an integer: compare it with the next one.
  const int below = min_int(shift - 32, 24);
  return random < (x + (1u << below) - 1u) >> below ? 1u : 0u;
}
static_assert(shift_right_stochastic(0b1011, 2, 0xBFFFFFFFu) == 3, "2.75 is 3 in three cases of four");
static_assert(shift_right_stochastic(0b1011, 2, 0xC0000000u) == 2, "and 2 in the fourth");
static_assert(shift_right_stochastic(8, 2, 0) == 2 && shift_right_stochastic(0, 40, 0) == 0, "exact");
static_assert(shift_right_stochastic(5, 32, 4) == 1 && shift_right_stochastic(5, 32, 5) == 0);
static_assert(shift_right_stochastic(5, 33, 2) == 1 && shift_right_stochastic(5, 33, 3) == 0, "2.5");
static_assert(shift_right_stochastic(1, 300, 0) == 1 && shift_right_stochastic(0xFFFFFF, 300, 1) == 0, "tiny, not 0");

}  // namespace mxsim
