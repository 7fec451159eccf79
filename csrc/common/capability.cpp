#include "common/capability.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace fastrl {
namespace {

Capability supported() {
#if defined(FASTRL_HAS_AVX512)
  // vbmi2 is not needed: compress and expand of 32-bit lanes are part of avx512f.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("fma")) {
    return Capability::avx512;
  }
#endif
#if defined(FASTRL_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return Capability::avx2;
  }
#endif
  return Capability::baseline;
}

// `fallback` unless `name` is a capability that this machine has.
Capability by_name(const char* name, Capability fallback) {
  if (name == nullptr) return fallback;
  const Capability best = supported();
  for (Capability level : {Capability::baseline, Capability::avx2, Capability::avx512}) {
    if (level <= best && std::strcmp(name, capability_name(level)) == 0) return level;
  }
  return fallback;
}

std::atomic<Capability>& chosen() {
  static std::atomic<Capability> value{by_name(std::getenv("FASTRL_CPU_CAPABILITY"), supported())};
  return value;
}

}  // namespace

const char* capability_name(Capability value) {
  if (value == Capability::avx512) return "avx512";
  if (value == Capability::avx2) return "avx2";
#if defined(__aarch64__)
  return "neon";
#else
  return "baseline";
#endif
}

Capability capability() { return chosen().load(std::memory_order_relaxed); }

bool set_capability(const char* name) {
  const Capability level = by_name(name, capability());
  if (std::strcmp(name, capability_name(level)) != 0) return false;
  chosen().store(level, std::memory_order_relaxed);
  return true;
}

}  // namespace fastrl
