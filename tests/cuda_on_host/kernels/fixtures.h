// Fixtures are called through ctypes: they return what went wrong, or null.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define FIXTURE extern "C" __attribute__((visibility("default"))) const char*

template <typename... Params, typename... Args>
const char* message_of(void (*kernel)(Params...), int64_t blocks, int threads, Args... args) {
  static std::string message;
  try {
    cuda_on_host::launch(kernel, blocks, threads, args...);
  } catch (const std::runtime_error& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
