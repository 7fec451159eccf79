// Runs kernels on one thread of the host: every CUDA thread is a fiber, blocks follow one another.
//
// The order of blocks, and of threads between barriers, is drawn from a seed and from the number of
// the launch. Whatever a kernel leaves to chance on a device therefore changes from launch to
// launch here, and comes back with the seed.
#include "device.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"
#include "memory.h"
#include "symbols.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_host {

Running running;

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint32_t next() {  // splitmix64
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return static_cast<uint32_t>(x >> 32);
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(uint64_t{next()} * bound >> 32); }
  template <typename T>
  void shuffle(T* first, int count) {
    for (int i = count - 1; i > 0; --i) std::swap(first[i], first[below(i + 1)]);
  }

 private:
  uint64_t state_;
};

// The blocks of a grid in a random order, without a list of them.
class BlockOrder {
 public:
  BlockOrder(int64_t count, Random& random) : count_(count) {
    first_ = random.next() % count;
    do step_ = random.next() % count + 1;
    while (std::gcd(step_, count) != 1);
  }
  bool next(int64_t& block) {
    if (taken_ == count_) return false;
    block = (first_ + step_ * taken_) % count_;  // below 2^62
    ++taken_;
    return true;
  }

 private:
  int64_t count_, first_, step_, taken_ = 0;
};

enum class State { fresh, ready, in_warp, in_block, done };

struct Thread {
  State state = State::fresh;
  int fiber = -1;
  // What it waits for.
  Site site;
  Collective collective;
  unsigned mask;
  uint64_t value;
  int operand, width;
  // What it gets.
  uint64_t result;
};

struct Warp {
  unsigned present = 0, waiting = 0, done = 0;  // lanes
};

// Threads that can run. Each is here at most once.
class Queue {
 public:
  void clear() { count_ = 0; }
  bool empty() const { return count_ == 0; }
  int pop() {
    const int thread = threads_[first_];
    first_ = (first_ + 1) % kMaxThreads;
    --count_;
    return thread;
  }
  void push_back(int thread) { threads_[(first_ + count_++) % kMaxThreads] = thread; }
  void push_front(int thread) {
    first_ = (first_ + kMaxThreads - 1) % kMaxThreads;
    threads_[first_] = thread;
    ++count_;
  }

 private:
  std::array<int, kMaxThreads> threads_;
  int first_ = 0, count_ = 0;
};

const char* name_of(Collective kind) {
  constexpr const char* kNames[] = {"__syncwarp",       "__shfl_sync",     "__shfl_up_sync",
                                    "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync",
                                    "__any_sync",       "__all_sync",      "__match_any_sync"};
  return kNames[static_cast<int>(kind)];
}

std::string lanes_of(unsigned mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

bool same_place(const Site& a, const Site& b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::string_view(a.file_name()) == b.file_name());
}

class Device {
 public:
  void run(const Grid& grid);
  uint64_t meet_in_warp(Collective kind, unsigned mask, uint64_t value, int operand, int width,
                        const Site& site);
  int meet_in_block(Barrier kind, int predicate, const Site& site);
  [[noreturn]] void stop(const std::string& what);
  void reseed(uint64_t seed) {
    seed_ = seed;
    launches_ = 0;
  }

 private:
  static void fiber_main();
  bool begin_block();
  void end_thread();
  void pause();
  void start(int thread);
  void make_ready(int* threads, int count);
  bool all_arrived(unsigned mask, Thread& self, Warp& warp, int first);
  void deliver(unsigned mask, int first);
  std::string lost_lanes(const Thread& thread, unsigned lanes, int first, bool done) const;
  std::string deadlock() const;

  uint64_t seed_ = std::getenv("FASTRL_CUDA_ON_HOST_SEED") != nullptr
                       ? std::strtoull(std::getenv("FASTRL_CUDA_ON_HOST_SEED"), nullptr, 0)
                       : 0;
  uint64_t launches_ = 0;
  Random random_{0};
  const Grid* grid_ = nullptr;
  std::unique_ptr<BlockOrder> blocks_;

  std::array<Thread, kMaxThreads> threads_;
  std::array<Warp, kMaxThreads / kWarpSize> warps_;
  Queue ready_;
  bool depth_first_ = false;
  int done_ = 0;
  // The barrier of the block.
  int arrived_ = 0, votes_ = 0;
  Barrier barrier_ = Barrier::plain;
  Site barrier_site_;

  Context host_;
  Stacks stacks_{kMaxThreads};
  std::array<Fiber, kMaxThreads> fibers_;
  std::vector<int> idle_;
  int running_fiber_ = -1;
  bool faulted_ = false;
  std::string message_;
  std::mutex mutex_;
};

Device& device() {
  static auto* const only = new Device;  // its stacks outlive every launch
  return *only;
}

void Device::run(const Grid& grid) {
  const std::lock_guard lock(mutex_);
  if (grid.threads < 1 || grid.threads > kMaxThreads || grid.blocks < 1 ||
      grid.blocks > 0x7fffffff) {
    throw std::runtime_error("cuda_on_host: " + function_name(grid.kernel) + ": a grid of " +
                             std::to_string(grid.blocks) + " blocks of " +
                             std::to_string(grid.threads) + " threads is out of range");
  }
  if (idle_.empty()) {  // at first, and after a fault
    for (int i = 0; i < kMaxThreads; ++i) {
      fibers_[i].prepare(stacks_.begin(i), stacks_.size(i), &Device::fiber_main);
      idle_.push_back(kMaxThreads - 1 - i);
    }
  }
  grid_ = &grid;
  random_ = Random(seed_ * 0x2545f4914f6cdd1d + launches_++);
  blocks_ = std::make_unique<BlockOrder>(grid.blocks, random_);
  running.stacks = stacks_.all();
  running.arguments = {static_cast<char*>(grid.arguments), grid.arguments_size};
  find_library(running.library, running.shared);
  blockDim = {static_cast<unsigned>(grid.threads), 1, 1};
  gridDim = {static_cast<unsigned>(grid.blocks), 1, 1};
  faulted_ = false;
  begin_block();
  running_fiber_ = idle_.back();
  idle_.pop_back();
  start(ready_.pop());
  switch_context(host_, fibers_[running_fiber_]);
  running.thread = -1;
  if (faulted_) {
    idle_.clear();
    throw std::runtime_error(message_);
  }
}

// A fiber runs one thread after the other for as long as none of them waits.
void Device::fiber_main() {
  Device& d = device();
  for (;;) {
    d.grid_->thread(d.grid_->arguments);
    d.end_thread();
    if (d.ready_.empty()) {
      if (d.done_ < d.grid_->threads) d.stop(d.deadlock());
      if (!d.begin_block()) {
        const int self = d.running_fiber_;
        d.idle_.push_back(self);
        switch_context(d.fibers_[self], d.host_);
        continue;
      }
    }
    const int next = d.ready_.pop();
    if (d.threads_[next].state == State::fresh) {
      d.start(next);
      continue;
    }
    const int self = d.running_fiber_;
    d.idle_.push_back(self);
    d.start(next);
    switch_context(d.fibers_[self], d.fibers_[d.running_fiber_]);
  }
}

bool Device::begin_block() {
  if (!blocks_->next(running.block)) return false;
  blockIdx = {static_cast<unsigned>(running.block), 0, 0};
  poison_shared_memory();
  const int count = grid_->threads;
  for (int t = 0; t < count; ++t) {
    threads_[t].state = State::fresh;
    threads_[t].fiber = -1;
  }
  const int warps = (count + kWarpSize - 1) / kWarpSize;
  int order[kMaxThreads], warp_order[kMaxThreads / kWarpSize];
  for (int w = 0; w < warps; ++w) {
    const int lanes = std::min(kWarpSize, count - w * kWarpSize);
    warps_[w] = {lanes == kWarpSize ? ~0u : (1u << lanes) - 1, 0, 0};
    warp_order[w] = w;
  }
  // Either warp after warp as far as each gets, or all threads of the block in turns.
  depth_first_ = random_.below(2) == 0;
  ready_.clear();
  if (depth_first_) {
    random_.shuffle(warp_order, warps);
    for (int w = 0; w < warps; ++w) {
      const int first = warp_order[w] * kWarpSize;
      const int lanes = std::min(kWarpSize, count - first);
      std::iota(order, order + lanes, first);
      random_.shuffle(order, lanes);
      for (int i = 0; i < lanes; ++i) ready_.push_back(order[i]);
    }
  } else {
    std::iota(order, order + count, 0);
    random_.shuffle(order, count);
    for (int i = 0; i < count; ++i) ready_.push_back(order[i]);
  }
  done_ = arrived_ = 0;
  block_has_begun(count);
  return true;
}

// Makes a thread the running one; the fiber of a fresh thread is the running fiber unless that one
// is in use.
void Device::start(int thread) {
  Thread& t = threads_[thread];
  if (t.fiber >= 0) running_fiber_ = t.fiber;
  t.fiber = running_fiber_;
  t.state = State::ready;
  running.thread = thread;
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
}

// Lets others run until this thread's turn comes.
void Device::pause() {
  if (ready_.empty()) stop(deadlock());
  const int self = running_fiber_, next = ready_.pop();
  if (next == running.thread) return start(next);
  if (threads_[next].state == State::fresh) {
    running_fiber_ = idle_.back();
    idle_.pop_back();
  }
  start(next);
  switch_context(fibers_[self], fibers_[running_fiber_]);
}

void Device::make_ready(int* threads, int count) {
  random_.shuffle(threads, count);
  for (int i = 0; i < count; ++i) {
    threads_[threads[i]].state = State::ready;
    if (depth_first_) {
      ready_.push_front(threads[i]);
    } else {
      ready_.push_back(threads[i]);
    }
  }
}

void Device::end_thread() {
  Warp& warp = warps_[running.thread / kWarpSize];
  const int first = running.thread / kWarpSize * kWarpSize;
  const unsigned lane = 1u << (running.thread % kWarpSize);
  threads_[running.thread].state = State::done;
  warp.done |= lane;
  ++done_;
  if (arrived_ > 0) {
    stop("returned while other threads wait at the barrier of " + line_of(barrier_site_));
  }
  for (unsigned waiting = warp.waiting; waiting != 0; waiting &= waiting - 1) {
    const Thread& other = threads_[first + std::countr_zero(waiting)];
    if (other.mask & lane) {
      stop("returned while lanes of its warp wait for it in " +
           std::string(name_of(other.collective)) + " of " + line_of(other.site) + " (mask " +
           lanes_of(other.mask) + ")");
    }
  }
}

int Device::meet_in_block(Barrier kind, int predicate, const Site& site) {
  if (done_ > 0) {
    stop("waits at the barrier of " + line_of(site) + " while " + std::to_string(done_) +
         " threads of its block have returned");
  }
  if (arrived_ == 0) {
    barrier_ = kind;
    barrier_site_ = site;
    votes_ = 0;
  } else if (kind != barrier_ || !same_place(site, barrier_site_)) {
    stop("waits at the barrier of " + line_of(site) + " while other threads wait at that of " +
         line_of(barrier_site_));
  }
  Thread& self = threads_[running.thread];
  self.state = State::in_block;
  self.site = site;
  votes_ += predicate != 0;
  const int count = grid_->threads;
  if (++arrived_ == count) {
    int order[kMaxThreads];
    std::iota(order, order + count, 0);
    const int result = kind == Barrier::count ? votes_
                       : kind == Barrier::any ? votes_ > 0
                                              : votes_ == count;
    for (int t = 0; t < count; ++t) threads_[t].result = static_cast<uint64_t>(result);
    arrived_ = 0;
    make_ready(order, count);
    block_has_met();
  }
  pause();
  return static_cast<int>(self.result);
}

uint64_t Device::meet_in_warp(Collective kind, unsigned mask, uint64_t value, int operand,
                              int width, const Site& site) {
  const int lane = running.thread % kWarpSize, first = running.thread - lane;
  Warp& warp = warps_[running.thread / kWarpSize];
  Thread& self = threads_[running.thread];
  const auto complain = [&](const std::string& what) {
    stop(std::string(name_of(kind)) + " of " + line_of(site) + " (mask " + lanes_of(mask) + ") " +
         what);
  };
  if ((mask >> lane & 1) == 0) complain("does not name the lane that calls it");
  if (width < 1 || width > kWarpSize || (width & (width - 1)) != 0) {
    complain("has width " + std::to_string(width) + ", which is no power of two up to 32");
  }
  if ((mask & ~warp.present) != 0) {
    complain("names lanes " + lanes_of(mask & ~warp.present) + ", which the block does not have");
  }
  if ((mask & warp.done) != 0) {
    complain("names lanes " + lanes_of(mask & warp.done) + ", which have returned");
  }
  self.state = State::in_warp;
  self.site = site;
  self.collective = kind;
  self.mask = mask;
  self.value = value;
  self.operand = operand;
  self.width = width;
  warp.waiting |= 1u << lane;
  if (all_arrived(mask, self, warp, first)) {
    warp.waiting &= ~mask;
    deliver(mask, first);
    if (kind == Collective::syncwarp) warp_has_met(first, mask);
    int order[kWarpSize], count = 0;
    for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
      order[count++] = first + std::countr_zero(lanes);
    }
    make_ready(order, count);
  }
  pause();
  return self.result;
}

// Whether all lanes of `mask` wait for one another. Lanes that wait for this one in another call
// would never meet it.
bool Device::all_arrived(unsigned mask, Thread& self, Warp& warp, int first) {
  const int lane = running.thread % kWarpSize;
  const bool complete = (mask & warp.waiting) == mask;
  for (unsigned lanes = mask & warp.waiting; lanes != 0; lanes &= lanes - 1) {
    const Thread& other = threads_[first + std::countr_zero(lanes)];
    if (other.mask == mask && other.collective == self.collective &&
        (self.collective == Collective::syncwarp || same_place(other.site, self.site))) {
      if (!complete) return false;  // the last to come looks at all of them
      continue;
    }
    if ((other.mask >> lane & 1) == 0) return false;
    stop("the lanes of a warp diverge: this one calls " + std::string(name_of(self.collective)) +
         " of " + line_of(self.site) + " (mask " + lanes_of(mask) + ") while lane " +
         std::to_string(std::countr_zero(lanes)) + " waits in " + name_of(other.collective) +
         " of " + line_of(other.site) + " (mask " + lanes_of(other.mask) + ")");
  }
  return complete;
}

void Device::deliver(unsigned mask, int first) {
  unsigned votes = 0;
  for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    votes |= static_cast<unsigned>(threads_[first + lane].value != 0) << lane;
  }
  for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    Thread& t = threads_[first + lane];
    const int start = lane & ~(t.width - 1), offset = t.operand & (kWarpSize - 1);
    int source = lane;
    switch (t.collective) {
      case Collective::syncwarp:
        break;
      case Collective::shfl:
        source = start | (t.operand & (t.width - 1));
        break;
      case Collective::shfl_up:
        if (lane - offset >= start) source = lane - offset;
        break;
      case Collective::shfl_down:
        if (lane + offset < start + t.width) source = lane + offset;
        break;
      case Collective::shfl_xor:
        if ((lane ^ offset) < start + t.width) source = lane ^ offset;
        break;
      case Collective::ballot:
        t.result = votes;
        continue;
      case Collective::any:
        t.result = votes != 0;
        continue;
      case Collective::all:
        t.result = votes == mask;
        continue;
      case Collective::match_any: {
        unsigned equal = 0;
        for (unsigned others = mask; others != 0; others &= others - 1) {
          const int other = std::countr_zero(others);
          equal |= static_cast<unsigned>(threads_[first + other].value == t.value) << other;
        }
        t.result = equal;
        continue;
      }
    }
    if ((mask >> source & 1) == 0) {
      stop(std::string(name_of(t.collective)) + " of " + line_of(t.site) + ": lane " +
           std::to_string(lane) + " reads lane " + std::to_string(source) + ", which its mask " +
           lanes_of(mask) + " does not name");
    }
    t.result = threads_[first + source].value;
  }
}

std::string Device::deadlock() const {
  std::string text = "no thread can go on:";
  for (int t = 0; t < grid_->threads;) {
    const Thread& thread = threads_[t];
    int end = t + 1;
    while (end < grid_->threads && threads_[end].state == thread.state &&
           (thread.state == State::done || same_place(threads_[end].site, thread.site))) {
      ++end;
    }
    text += "\n  threads " + std::to_string(t) + " to " + std::to_string(end - 1) + " ";
    if (thread.state == State::done) {
      text += "have returned";
    } else if (thread.state == State::in_block) {
      text += "wait at the barrier of " + line_of(thread.site);
    } else {
      text += "wait in " + std::string(name_of(thread.collective)) + " of " + line_of(thread.site) +
              " (mask " + lanes_of(thread.mask) + ")";
    }
    t = end;
  }
  return text;
}

void Device::stop(const std::string& what) {
  message_ = "cuda_on_host: " + function_name(grid_->kernel) + ", block " +
             std::to_string(running.block) + ", thread " + std::to_string(running.thread) + ": " +
             what;
  faulted_ = true;
  // Nobody comes back to the fibers of this launch.
  Context abandoned;
  switch_context(abandoned, host_);
  __builtin_unreachable();
}

}  // namespace

void run(const Grid& grid) { device().run(grid); }

uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int operand, int width,
                         const Site& site) {
  return device().meet_in_warp(kind, mask, value, operand, width, site);
}

int block_barrier(Barrier kind, int predicate, const Site& site) {
  return device().meet_in_block(kind, predicate, site);
}

void fault(const std::string& what) { device().stop(what); }

std::string line_of(const Site& site) {
  const std::string file = site.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

extern "C" __attribute__((visibility("default"))) void cuda_on_host_reseed(uint64_t seed) {
  device().reseed(seed);
}

}  // namespace cuda_on_host
