#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

#if defined(CUDA_ON_HOST_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_host {
namespace {

// A stack's first frame. The sanitizer hears here that the switch has arrived.
void (*entry_point)() = nullptr;
Context* left = nullptr;

void arrived(Context* at) {
  (void)at;
#if defined(CUDA_ON_HOST_ADDRESS)
  // The stack that was left says where it is: the host's own is not known otherwise.
  __sanitizer_finish_switch_fiber(at == nullptr ? nullptr : at->fake_stack, &left->stack,
                                  &left->stack_size);
#endif
}

void begin_fiber() {
  arrived(nullptr);
  entry_point();
  __builtin_trap();
}

}  // namespace

#if defined(__x86_64__)

// Saves what a call must preserve on the stack, and continues from the other stack.
extern "C" void cuda_on_host_switch(void** from, void* to);
asm(R"(
.text
.type cuda_on_host_switch, @function
cuda_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_host_switch, .-cuda_on_host_switch
)");

#endif

void switch_context(Context& from, Context& to) {
  left = &from;
#if defined(CUDA_ON_HOST_ADDRESS)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_size);
#endif
#if defined(__x86_64__)
  cuda_on_host_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.state, &to.state);
#endif
  arrived(&from);
}

void Fiber::prepare(void* stack_begin, size_t size, void (*entry)()) {
  entry_point = entry;
  stack = stack_begin;
  stack_size = size;
#if defined(CUDA_ON_HOST_ADDRESS)
  __asan_unpoison_memory_region(stack_begin, size);
#endif
#if defined(__x86_64__)
  // What cuda_on_host_switch takes: six registers and where to return to. The stack is then
  // aligned as a call leaves it.
  auto* const top = reinterpret_cast<void**>(static_cast<char*>(stack_begin) + size);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&begin_fiber);
  stack_pointer = top - 8;
#else
  getcontext(&state);
  state.uc_stack.ss_sp = stack_begin;
  state.uc_stack.ss_size = size;
  state.uc_link = nullptr;
  makecontext(&state, &begin_fiber, 0);
#endif
}

Stacks::Stacks(int count) : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  stride_ = guard_ + kSize;
  bytes_ = count * stride_ + guard_;
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cuda_on_host: no memory for stacks");
  base_ = static_cast<char*>(memory);
  for (int i = 0; i <= count; ++i) mprotect(base_ + i * stride_, guard_, PROT_NONE);
}

}  // namespace cuda_on_host
