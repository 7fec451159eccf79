// The state of the launch that runs: threads, what they wait for, and what went wrong.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_on_host.h"

namespace cuda_on_host {

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;

// Ends the launch with a message; its kernel, block and thread are added.
[[noreturn]] void fault(const std::string& what);

// The thread that runs, by its number in the block; -1 while none does.
int running_thread();
int64_t running_block();
std::string thread_name(int thread);
std::string line_of(const Site& site);

// Memory that a kernel uses beside its buffers.
bool is_stack(const void* p);
struct Range {
  char* begin = nullptr;
  size_t size = 0;

  bool contains(const void* p) const { return p >= begin && p < begin + size; }
};
Range shared_memory();  // of all kernels of this library, for the thread of the host
Range launch_arguments();

}  // namespace cuda_on_host
