// Bytes that kernels load from and store to global memory: everything that is neither shared memory
// nor a stack nor an argument.
//
// Lanes of a warp that load the same address with the same instruction load it once, as on a
// device. Lanes run one after the other here, so "at the same time" is told by counting: the n-th
// load of one lane and the n-th load of another are the same one.
#include <array>
#include <bitset>
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

// How often the lanes of one warp have loaded from one address with one instruction.
struct WarpLoad {
  const void* pc = nullptr;
  const void* p = nullptr;
  int warp = 0;
  uint64_t block = 0;
  uint32_t most = 0;
  std::array<uint32_t, kWarpSize> by_lane{};
};

// An open hash table; what earlier blocks have left counts as free.
class WarpLoads {
 public:
  void next_block() {
    ++block_;
    used_ = 0;
  }
  // Whether no other lane has loaded this for the warp.
  bool is_new(const void* p, const void* pc) {
    if (2 * used_ >= slots_.size()) grow();
    const int warp = running.thread / kWarpSize, lane = running.thread % kWarpSize;
    WarpLoad& load = find(p, pc, warp);
    if (load.block != block_) {
      load = {pc, p, warp, block_, 0, {}};
      ++used_;
    }
    if (++load.by_lane[lane] <= load.most) return false;
    ++load.most;
    return true;
  }

 private:
  WarpLoad& find(const void* p, const void* pc, int warp) {
    uint64_t hash = reinterpret_cast<uintptr_t>(p) * 0x9e3779b97f4a7c15 +
                    reinterpret_cast<uintptr_t>(pc) * 0xbf58476d1ce4e5b9 + warp;
    hash ^= hash >> 32;
    for (size_t i = hash;; ++i) {
      WarpLoad& slot = slots_[i & (slots_.size() - 1)];
      if (slot.block != block_ || (slot.p == p && slot.pc == pc && slot.warp == warp)) return slot;
    }
  }
  void grow() {
    std::vector<WarpLoad> old(slots_.size() * 2);
    old.swap(slots_);
    for (const WarpLoad& load : old) {
      if (load.block == block_) find(load.p, load.pc, load.warp) = load;
    }
  }

  std::vector<WarpLoad> slots_ = std::vector<WarpLoad>(1 << 12);
  size_t used_ = 0;
  uint64_t block_ = 1;
};

bool is_counting = false;
WarpLoads warp_loads;

void add(Counts& counts, size_t size, Use use) {
  if (use != Use::write) counts.loaded += size;
  if (use != Use::read) counts.stored += size;
  ++counts.accesses;
  counts.wide_accesses += size == 16;
}

}  // namespace

void count_block() { warp_loads.next_block(); }

void count_traffic(const void* p, size_t size, Use use, const void* pc) {
  if (!is_counting || (use == Use::read && !warp_loads.is_new(p, pc))) return;
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
  is_counting = true;
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
