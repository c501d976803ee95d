// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and the random bits of
// stochastic rounding (NUMERICS 2.2).
#pragma once

#include "types.h"

namespace mxsim {

struct PhiloxWords {
  uint32_t at[4];
};

// Four random words for each 128-bit counter. One round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2),
// hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), and the key grows by the two Weyl constants between rounds.
MXSIM_HD constexpr PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.at[0], c1 = counter.at[1], c2 = counter.at[2], c3 = counter.at[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(c0) * 0xD2511F53u, product1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ key0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
    c3 = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

MXSIM_HD constexpr bool equal_words(PhiloxWords a, PhiloxWords b) {
  return a.at[0] == b.at[0] && a.at[1] == b.at[1] && a.at[2] == b.at[2] && a.at[3] == b.at[3];
}
// Random123's known answers.
static_assert(equal_words(philox4x32({{0, 0, 0, 0}}, 0, 0), {{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}}));
static_assert(equal_words(philox4x32({{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}}, 0xFFFFFFFF, 0xFFFFFFFF),
                          {{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}}));
static_assert(equal_words(philox4x32({{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}}, 0xA4093822, 0x299F31D0),
                          {{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}}));

// Of elements 4 * quad to 4 * quad + 3, counted row by row over the whole tensor.
MXSIM_HD constexpr PhiloxWords random_words(uint64_t quad, uint64_t seed) {
  return philox4x32({{uint32_t(quad), uint32_t(quad >> 32), 0, 0}}, uint32_t(seed), uint32_t(seed >> 32));
}

}  // namespace mxsim
