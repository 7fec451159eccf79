// One kernel source, one object per instruction set, the choice made once at run time.
//
// A file named *_kernel.cpp is compiled once for every capability with FASTRL_CAPABILITY set to its
// name. All that it defines lives in namespace fastrl::FASTRL_CAPABILITY, so that no inline
// function of one object can stand in for that of another. The header beside it declares the entry
// points for all of them and a caller picks with FASTRL_DISPATCH.
#pragma once

#if defined(FASTRL_HAS_AVX512) && defined(FASTRL_HAS_AVX2)
#define FASTRL_FOR_EACH_CAPABILITY(X) X(baseline) X(avx2) X(avx512)
#elif defined(FASTRL_HAS_AVX2)
#define FASTRL_FOR_EACH_CAPABILITY(X) X(baseline) X(avx2)
#else
#define FASTRL_FOR_EACH_CAPABILITY(X) X(baseline)
#endif

namespace fastrl {

enum class Capability { baseline, avx2, avx512 };

// The best one that this build and this processor have; FASTRL_CPU_CAPABILITY=baseline|avx2|avx512
// lowers it.
Capability capability();
const char* capability_name(Capability value);  // "neon" for the baseline of 64-bit Arm

// Use another one from now on; false when this processor or build does not have it. For tests and
// measurements.
bool set_capability(const char* name);

}  // namespace fastrl

#if defined(FASTRL_HAS_AVX512)
#define FASTRL_PICK_AVX512(name)     \
  case ::fastrl::Capability::avx512: \
    return &::fastrl::avx512::name;
#else
#define FASTRL_PICK_AVX512(name)
#endif
#if defined(FASTRL_HAS_AVX2)
#define FASTRL_PICK_AVX2(name)     \
  case ::fastrl::Capability::avx2: \
    return &::fastrl::avx2::name;
#else
#define FASTRL_PICK_AVX2(name)
#endif

// A function pointer to `name` as compiled for this processor.
#define FASTRL_DISPATCH(name)             \
  [] {                                    \
    switch (::fastrl::capability()) {     \
      FASTRL_PICK_AVX512(name)            \
      FASTRL_PICK_AVX2(name)              \
      default:                            \
        return &::fastrl::baseline::name; \
    }                                     \
  }()
