// What kernels do to memory: shared memory that starts as garbage, atomics, and in the checked
// build every single access.
#pragma once

#include "device.h"

namespace cuda_on_host {

// The library in memory, and its thread-local variables: nothing but shared memory, and a byte that
// makes sure there are some.
void find_library(Range& image, Range& thread_local_variables);
// A block finds in shared memory what looks like NaN, -1 and true.
void poison_shared_memory();

#if defined(CUDA_ON_HOST_CHECKED)

enum class Use { read, write, atomic };
// One access of the running thread, from the machine code at `pc`.
void access(const void* p, size_t size, Use use, const void* pc);

// What orders accesses to shared memory.
void block_has_begun(int threads);
void block_has_met();
void warp_has_met(int first_thread, unsigned lanes);

#else

inline void block_has_begun(int) {}
inline void block_has_met() {}
inline void warp_has_met(int, unsigned) {}

#endif

}  // namespace cuda_on_host
