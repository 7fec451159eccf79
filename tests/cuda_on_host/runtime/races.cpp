// Accesses to shared memory that nothing orders.
//
// __syncthreads orders everything before it and everything after it. Between two of them a lane
// knows of the accesses of other lanes of its warp up to their last common __syncwarp: a vector
// clock per lane. Shuffles and votes order nothing, as CUDA's guide says.
#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <vector>

#include "accesses.h"
#include "symbols.h"

namespace cuda_on_host {
namespace {

struct Access {
  uint64_t epoch = 0;
  const void* pc = nullptr;
  uint32_t clock = 0;
  int16_t thread = 0;
  bool atomic = false;
};

// The last write of a byte, and who has read it since.
struct Byte {
  bool is_watched = true;
  Access write;
  std::vector<Access> reads;
};

uint64_t epoch = 0, epoch_of_block = 0;  // barriers passed by all blocks so far
std::array<std::array<uint32_t, kWarpSize>, kMaxThreads> clocks;
std::vector<Byte> bytes;

bool is_ordered(const Access& earlier, int thread) {
  if (earlier.thread == thread || earlier.epoch < epoch) return true;
  return earlier.thread / kWarpSize == thread / kWarpSize &&
         clocks[thread][earlier.thread % kWarpSize] >= earlier.clock;
}

[[noreturn]] void report(const char* now, const char* before, const Access& earlier, size_t offset,
                         const void* pc) {
  fault("race in shared memory: " + std::string(now) + " " + variable_name(offset) + " at " +
        line_name(pc) + ", which thread " + std::to_string(earlier.thread) + " " + before + " at " +
        line_name(earlier.pc) + ", and no barrier orders the two");
}

}  // namespace

void order_block(int threads) {
  epoch_of_block = ++epoch;
  if (bytes.empty()) {
    bytes.resize(running.shared.size);
    for (const Variable& v : variables()) {
      for (size_t i = 0; i < v.size; ++i) bytes[v.offset + i].is_watched = !v.is_guard;
    }
  }
  for (int t = 0; t < threads; ++t) {
    clocks[t].fill(0);
    clocks[t][t % kWarpSize] = 1;
  }
}

void block_has_met() { ++epoch; }

void warp_has_met(int first_thread, unsigned lanes) {
  std::array<uint32_t, kWarpSize> known{};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const auto& clock = clocks[first_thread + std::countr_zero(rest)];
    for (int i = 0; i < kWarpSize; ++i) known[i] = std::max(known[i], clock[i]);
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    clocks[first_thread + lane] = known;
    ++clocks[first_thread + lane][lane];
  }
}

void check_race(const void* p, size_t size, Use use, const void* pc) {
  const size_t begin = static_cast<const char*>(p) - running.shared.begin;
  const size_t end = std::min(begin + size, bytes.size());
  const int thread = running.thread;
  const Access now{epoch, pc, clocks[thread][thread % kWarpSize], static_cast<int16_t>(thread),
                   use == Use::atomic};
  const char* const doing = use == Use::read ? "reads" : use == Use::write ? "writes" : "updates";
  for (size_t offset = begin; offset < end; ++offset) {
    Byte& byte = bytes[offset];
    if (!byte.is_watched) continue;
    const bool written = byte.write.epoch >= epoch_of_block;
    if (!written && use != Use::write) {
      fault(std::string(doing) + " " + variable_name(offset) + " at " + line_name(pc) +
            ", which no thread of the block has written");
    }
    if (written && !(now.atomic && byte.write.atomic) && !is_ordered(byte.write, thread)) {
      report(doing, byte.write.atomic ? "updated" : "wrote", byte.write, offset, pc);
    }
    if (use == Use::read) {
      // A thread runs on until it waits, so its reads come one after the other.
      if (!byte.reads.empty() && byte.reads.back().epoch < epoch) byte.reads.clear();
      if (byte.reads.empty() || byte.reads.back().thread != thread) byte.reads.push_back(now);
      byte.reads.back() = now;
      continue;
    }
    for (const Access& read : byte.reads) {
      if (!is_ordered(read, thread)) report(doing, "read", read, offset, pc);
    }
    byte.reads.clear();
    byte.write = now;
  }
}

}  // namespace cuda_on_host
