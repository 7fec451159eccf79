// The functions that g++ -fsanitize=thread calls before every access to memory.
#include "accesses.h"

namespace cuda_on_host {

void access(const void* p, size_t size, Use use, const void* pc) {
  if (running.thread < 0 || running.stacks.contains(p)) return;
  if (running.shared.contains(p)) return check_race(p, size, use, pc);
  if (running.library.contains(p) || running.arguments.contains(p)) return;
  count_traffic(p, size, use, pc);
}

void block_has_begun(int threads) {
  order_block(threads);
  count_block();
}

extern "C" {

#define CUDA_ON_HOST_ACCESS(name, size)                                                        \
  void __tsan_read##name(void* p) { access(p, size, Use::read, __builtin_return_address(0)); } \
  void __tsan_write##name(void* p) { access(p, size, Use::write, __builtin_return_address(0)); }
CUDA_ON_HOST_ACCESS(1, 1)
CUDA_ON_HOST_ACCESS(2, 2)
CUDA_ON_HOST_ACCESS(4, 4)
CUDA_ON_HOST_ACCESS(8, 8)
CUDA_ON_HOST_ACCESS(16, 16)
#undef CUDA_ON_HOST_ACCESS
#define CUDA_ON_HOST_ACCESS(size)                             \
  void __tsan_unaligned_read##size(void* p) {                 \
    access(p, size, Use::read, __builtin_return_address(0));  \
  }                                                           \
  void __tsan_unaligned_write##size(void* p) {                \
    access(p, size, Use::write, __builtin_return_address(0)); \
  }
CUDA_ON_HOST_ACCESS(2)
CUDA_ON_HOST_ACCESS(4)
CUDA_ON_HOST_ACCESS(8)
CUDA_ON_HOST_ACCESS(16)
#undef CUDA_ON_HOST_ACCESS

void __tsan_read_range(void* p, size_t size) {
  access(p, size, Use::read, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t size) {
  access(p, size, Use::write, __builtin_return_address(0));
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomics of the code around the kernels, in torch's headers and libstdc++.
#define CUDA_ON_HOST_ATOMIC(bits, T)                                                             \
  T __tsan_atomic##bits##_load(const T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  void __tsan_atomic##bits##_store(T* p, T x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_exchange(T* p, T x, int) {                                             \
    return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                                          \
  }                                                                                              \
  T __tsan_atomic##bits##_fetch_add(T* p, T x, int) {                                            \
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                                           \
  }                                                                                              \
  T __tsan_atomic##bits##_fetch_sub(T* p, T x, int) {                                            \
    return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                                           \
  }                                                                                              \
  int __tsan_atomic##bits##_compare_exchange_strong(T* p, T* old, T x, int, int) {               \
    return __atomic_compare_exchange_n(p, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);    \
  }                                                                                              \
  int __tsan_atomic##bits##_compare_exchange_weak(T* p, T* old, T x, int, int) {                 \
    return __atomic_compare_exchange_n(p, old, x, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);     \
  }
CUDA_ON_HOST_ATOMIC(8, uint8_t)
CUDA_ON_HOST_ATOMIC(32, uint32_t)
CUDA_ON_HOST_ATOMIC(64, uint64_t)
#undef CUDA_ON_HOST_ATOMIC
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"

}  // namespace cuda_on_host
