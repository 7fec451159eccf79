// The two who want to hear of accesses: the search for races in shared memory, and the count of
// bytes in global memory.
#pragma once

#include "memory.h"

namespace cuda_on_host {

// A fault when no barrier orders this access to shared memory and an earlier one by another thread,
// and when nobody has written what is read.
void order_block(int threads);
void check_race(const void* p, size_t size, Use use, const void* pc);

void count_block();
void count_traffic(const void* p, size_t size, Use use, const void* pc);

}  // namespace cuda_on_host
