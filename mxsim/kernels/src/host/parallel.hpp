// Work split over threads that live as long as the call: nothing to keep alive, nothing that a fork could break.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace mxsim::host {

constexpr int64_t kElementsPerThread = 1 << 16;  // fewer are not worth a thread

// body(begin, end) over [0, count) in contiguous pieces, one a thread; an item is that many elements of work.
template <typename Body>
void parallel_for(int64_t count, int64_t elements_per_item, int num_threads, const Body& body) {
  const int64_t worthwhile = count * std::max<int64_t>(elements_per_item, 1) / kElementsPerThread;
  const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>({num_threads, worthwhile, count}));
  std::vector<std::thread> threads;
  threads.reserve(size_t(pieces));
  int64_t begin = 0;
  for (int64_t i = 0; i + 1 < pieces; ++i) {
    const int64_t end = count / pieces * (i + 1) + std::min(i + 1, count % pieces);
    try {
      threads.emplace_back([&body, begin, end] { body(begin, end); });
    } catch (const std::system_error&) {  // no thread to be had: the rest is this one's
      break;
    }
    begin = end;
  }
  body(begin, count);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mxsim::host
