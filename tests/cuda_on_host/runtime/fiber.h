// Stacks to switch between: one per thread of a block, kept from launch to launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_host {

// What is left of a computation that has been switched away from.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t state;
#endif
  // For AddressSanitizer, which wants to know where the stack is.
  const void* stack = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;
};

// From the running computation, which `from` will hold, to another.
void switch_context(Context& from, Context& to);

class Fiber : public Context {
 public:
  // Starts over at `entry`, which must never return, when it is next switched to.
  void prepare(void* stack_begin, size_t size, void (*entry)());
};

// Room for the stacks of all threads of a block, with a page between them that faults.
class Stacks {
 public:
  static constexpr size_t kSize = size_t{256} << 10;

  explicit Stacks(int count);
  void* begin(int index) const { return base_ + index * stride_ + guard_; }
  // Tops differ in their place within a page, so that hot frames do not compete for cache sets.
  size_t size(int index) const { return kSize - static_cast<size_t>(index % 16) * 256; }
  Range all() const { return {base_, bytes_}; }

 private:
  size_t guard_, stride_, bytes_;
  char* base_;
};

}  // namespace cuda_on_host
