// The one parameter block that every kernel takes; device.py packs it in this order.
#pragma once

#include "types.h"

namespace mxsim {

struct Params {
  const void* in_codes;  // or values
  const void* in_scales;
  void* out_codes;
  void* out_scales;
  void* out_codes_fp8;  // second output of the fused kernel
  void* out_scales_fp8;
  const int64_t* group_sizes;   // null: dense
  int64_t* padded_sizes;        // null: not wanted
  int64_t rows;                 // of the input
  int64_t cols;                 // K
  int64_t in_scale_row_stride;  // elements
  int64_t in_scale_col_stride;
  int64_t out_scale_row_stride;
  int64_t out_scale_col_stride;
  int64_t out_scale_batch_stride;
  int32_t num_groups;
  int32_t row_multiple;
  int32_t rule;  // ScaleRule
  int32_t headroom;
  uint64_t seed;  // of stochastic rounding
};

}  // namespace mxsim
