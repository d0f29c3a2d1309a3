// A walk over many small records whose objects lie outside the processor's caches: those of later records are fetched meanwhile.

#pragma once

#include <algorithm>
#include <cstddef>

namespace cudal1 {

constexpr size_t line = 64;   // bytes that the processor fetches at once
constexpr size_t ahead = 12;  // records: about as many lines as it waits for at a time

inline void fetch_line(const void* place, size_t offset = 0) {  // harmless where nothing lies there any more
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(place) + offset);
#endif
}

// Whether `test` is true of every record; `fetch` is told of records that come later.
template <typename Records, typename Fetch, typename Test>
bool each(Records& records, Fetch fetch, Test test) {
  const size_t size = records.size();
  for (size_t i = 0; i < std::min(ahead, size); ++i) fetch(records[i]);
  for (size_t i = 0; i < size; ++i) {
    if (i + ahead < size) fetch(records[i + ahead]);
    if (!test(records[i])) return false;
  }
  return true;
}

}  // namespace cudal1
