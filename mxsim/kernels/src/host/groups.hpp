// The experts of a ragged call: which rows each one has, and where its padded rows begin.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mxsim/bits.h"

namespace mxsim::host {

struct Group {
  int64_t first_row;     // in the input
  int64_t size;          // real rows
  int64_t first_padded;  // in the output
  int64_t padded;        // size rounded up
};

// Groups padded to a multiple each; sizes = null is one group of all the rows.
class Groups {
 public:
  Groups(const int64_t* sizes, int64_t num_groups, int64_t rows, int64_t multiple, int64_t* padded_sizes) {
    if (sizes == nullptr) {
      groups_.push_back({0, rows, 0, round_up(rows, multiple)});
    } else {
      int64_t row = 0, padded_row = 0;
      for (int64_t e = 0; e < num_groups; ++e) {
        groups_.push_back({row, sizes[e], padded_row, round_up(sizes[e], multiple)});
        row += sizes[e];
        padded_row += groups_.back().padded;
        if (padded_sizes != nullptr) padded_sizes[e] = groups_.back().padded;
      }
    }
  }

  int64_t padded_rows() const { return groups_.empty() ? 0 : groups_.back().first_padded + groups_.back().padded; }

  // The group that holds an existing padded row: the last one that begins at or before it. Empty ones hold none.
  const Group& at(int64_t padded_row) const {
    const auto after = std::upper_bound(groups_.begin(), groups_.end(), padded_row,
                                        [](int64_t row, const Group& g) { return row < g.first_padded; });
    return *(after - 1);
  }

 private:
  std::vector<Group> groups_;
};

}  // namespace mxsim::host
