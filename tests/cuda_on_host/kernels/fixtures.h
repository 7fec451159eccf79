// Kernels for the tests of the shim, called through ctypes: what went wrong, or null.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

inline __device__ int64_t global_thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

template <typename In, typename Out>
const char* message_of(void (*kernel)(const In*, Out*), const In* in, Out* out, int64_t blocks,
                       int threads) {
  static std::string message;
  try {
    cuda_on_host::launch(kernel, blocks, threads, in, out);
  } catch (const std::runtime_error& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

#define FIXTURE(kernel, In, Out)                                                  \
  extern "C" __attribute__((visibility("default")))                               \
  const char* run_##kernel(const In* in, Out* out, int64_t blocks, int threads) { \
    return message_of(&kernel, in, out, blocks, threads);                         \
  }
