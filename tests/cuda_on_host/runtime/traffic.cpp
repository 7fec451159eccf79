// Bytes that kernels load from and store to global memory: everything that is neither shared memory
// nor a stack nor an argument.
#include <bitset>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "accesses.h"

#define CUDA_ON_HOST_API extern "C" __attribute__((visibility("default")))

namespace cuda_on_host {
namespace {

constexpr size_t kPage = 4096;

struct Page {
  std::bitset<kPage> loaded, stored;
};

// As Python reads it: see traffic.py.
struct Counts {
  uint64_t loaded, stored, distinct_loaded, distinct_stored, accesses, wide_accesses;
};

struct Buffer {
  Range range;
  Counts counts{};
};

Counts total{};
std::vector<Buffer> buffers;
std::unordered_map<uintptr_t, Page> pages;
uintptr_t last_number = 0;
Page* last_page = nullptr;

Page& page_of(uintptr_t number) {
  if (last_page == nullptr || number != last_number) {
    last_page = &pages[number];
    last_number = number;
  }
  return *last_page;
}

void add(Counts& counts, size_t size, Use use) {
  if (use != Use::write) counts.loaded += size;
  if (use != Use::read) counts.stored += size;
  ++counts.accesses;
  counts.wide_accesses += size == 16;
}

}  // namespace

void count_traffic(const void* p, size_t size, Use use) {
  add(total, size, use);
  for (Buffer& buffer : buffers) {
    if (buffer.range.contains(p)) add(buffer.counts, size, use);
  }
  const auto begin = reinterpret_cast<uintptr_t>(p);
  for (uintptr_t at = begin; at < begin + size; ++at) {
    Page& page = page_of(at / kPage);
    if (use != Use::write) page.loaded.set(at % kPage);
    if (use != Use::read) page.stored.set(at % kPage);
  }
}

// Counts from here on.
CUDA_ON_HOST_API void cuda_on_host_reset_traffic() {
  total = {};
  buffers.clear();
  pages.clear();
  last_page = nullptr;
}

// Buffers have numbers in the order in which they are named.
CUDA_ON_HOST_API void cuda_on_host_watch(void* p, size_t size) {
  buffers.push_back({{static_cast<char*>(p), size}, {}});
}

// Of a buffer, or for -1 of all global memory.
CUDA_ON_HOST_API void cuda_on_host_read_traffic(int buffer, Counts* out) {
  *out = buffer < 0 ? total : buffers[buffer].counts;
  for (const auto& [number, page] : pages) {
    for (size_t i = 0; i < kPage; ++i) {
      const auto* const p = reinterpret_cast<const void*>(number * kPage + i);
      if (buffer >= 0 && !buffers[buffer].range.contains(p)) continue;
      out->distinct_loaded += page.loaded[i];
      out->distinct_stored += page.stored[i];
    }
  }
}

}  // namespace cuda_on_host
