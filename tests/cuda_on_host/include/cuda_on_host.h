// What the headers beside this one ask of the runtime, which plays the part of the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>

namespace cuda_on_host {

// Where a kernel calls an intrinsic.
using Site = std::source_location;

enum class Collective { syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all, match_any };
enum class Barrier { plain, any, all, count };
enum class Atomic { add, min, max, exchange, compare };

// The lanes in `mask` meet; every one of them gets its result.
uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int operand, int width,
                         const Site& site);
// All threads of the block meet.
int block_barrier(Barrier kind, int predicate, const Site& site);

// Read-modify-write of 4 or 8 bytes in global or shared memory. They return the old value.
template <typename T>
T atomic(Atomic kind, T* p, T value, T compare = {});
extern template int atomic(Atomic, int*, int, int);
extern template unsigned atomic(Atomic, unsigned*, unsigned, unsigned);
extern template long long atomic(Atomic, long long*, long long, long long);
extern template unsigned long long atomic(Atomic, unsigned long long*, unsigned long long,
                                          unsigned long long);

struct Grid {
  int64_t blocks;
  int threads;
  const void* kernel;     // for messages
  void (*thread)(void*);  // runs the kernel once
  void* arguments;        // of `thread`
  size_t arguments_size;
};
// Runs every thread of every block. A fault of the kernel is a std::runtime_error.
void run(const Grid& grid);

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, const Args&... args) {
  auto call = [kernel, args...] { kernel(args...); };
  run({blocks, threads, reinterpret_cast<const void*>(kernel),
       [](void* arguments) { (*static_cast<decltype(call)*>(arguments))(); }, &call, sizeof(call)});
}

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Values that travel between lanes.
template <typename T>
uint64_t packed(T x) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}
template <typename T>
T unpacked(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace cuda_on_host
