// From torch's call to a kernel launch: device, current stream, errors. For *_cuda.cu files.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/tensors.h"

#if defined(FASTRL_CUDA_ON_HOST)
// The tests compile the same files for the host: kernels then run on CPU tensors, and the operators
// stand beside those of the CPU.
#define FASTRL_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(fastrl_cuda_on_host, CPU, m)
#else
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#define FASTRL_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(fastrl, CUDA, m)
#endif

namespace fastrl::cuda {

constexpr int64_t kMaxBlocks = 2147483647;  // of a grid along x

inline void check_cuda(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "fastrl: CUDA error: ", cudaGetErrorString(error));
}

#if defined(FASTRL_CUDA_ON_HOST)

class Launcher {
 public:
  explicit Launcher(const Tensor&) {}

  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), int64_t blocks, int threads, const Args&... args) {
    STD_TORCH_CHECK(blocks <= kMaxBlocks, "fastrl: too many rows for one launch");
    if (blocks > 0) cuda_on_host::launch(kernel, blocks, threads, args...);
  }
};

#else

// torch's current stream. The symbol lives in torch's CUDA library and is looked up at the first
// launch, so that a build with CUDA loads beside a torch without it.
inline cudaStream_t current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const auto getter =
      reinterpret_cast<Getter>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  STD_TORCH_CHECK(getter != nullptr, "fastrl: this torch was built without CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int32_t device_of(const Tensor& t) {
  int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device));
  return device;
}

// Launches on the device and the current stream of a tensor, for as long as it lives.
class Launcher {
 public:
  explicit Launcher(const Tensor& t)
      : guard_(device_of(t)), stream_(current_stream(device_of(t))) {}

  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), int64_t blocks, int threads, const Args&... args) {
    STD_TORCH_CHECK(blocks <= kMaxBlocks, "fastrl: too many rows for one launch");
    if (blocks == 0) return;
    const auto grid = static_cast<unsigned>(blocks), block = static_cast<unsigned>(threads);
    // clang-format off
    kernel<<<grid, block, 0, stream_>>>(args...);
    // clang-format on
    check_cuda(cudaGetLastError());
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

#endif

}  // namespace fastrl::cuda
