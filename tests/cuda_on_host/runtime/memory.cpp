#include "memory.h"

#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cuda_on_host {
namespace {

thread_local volatile char some_variable = 0;

struct Search {
  Range image, thread_local_variables;
};

int take_if_ours(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  Range image{reinterpret_cast<char*>(info->dlpi_addr), 0}, variables;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_LOAD) image.size = std::max(image.size, part.p_vaddr + part.p_memsz);
    if (part.p_type == PT_TLS) variables = {static_cast<char*>(info->dlpi_tls_data), part.p_memsz};
  }
  if (!image.contains(reinterpret_cast<const void*>(&take_if_ours))) return 0;
  search = {image, variables};
  return 1;
}

}  // namespace

void find_library(Range& image, Range& thread_local_variables) {
  some_variable = 1;  // the memory comes with the first use
  Search search;
  dl_iterate_phdr(&take_if_ours, &search);
  image = search.image;
  thread_local_variables = search.thread_local_variables;
}

void poison_shared_memory() { std::memset(running.shared.begin, 0xff, running.shared.size); }

template <typename T>
T atomic(Atomic kind, T* p, T value, T compare) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) fault("misaligned address of an atomic");
#if defined(CUDA_ON_HOST_CHECKED)
  access(p, sizeof(T), Use::atomic, __builtin_return_address(0));
#endif
  const T old = *p;
  switch (kind) {
    case Atomic::add:
      *p = static_cast<T>(static_cast<unsigned long long>(old) +
                          static_cast<unsigned long long>(value));
      break;
    case Atomic::min:
      *p = std::min(old, value);
      break;
    case Atomic::max:
      *p = std::max(old, value);
      break;
    case Atomic::exchange:
      *p = value;
      break;
    case Atomic::compare:
      if (old == compare) *p = value;
      break;
  }
  return old;
}
template int atomic(Atomic, int*, int, int);
template unsigned atomic(Atomic, unsigned*, unsigned, unsigned);
template long long atomic(Atomic, long long*, long long, long long);
template unsigned long long atomic(Atomic, unsigned long long*, unsigned long long,
                                   unsigned long long);

#if !defined(CUDA_ON_HOST_ADDRESS)

// -fsanitize=alignment calls this; in the build with sanitizers their own runtime answers.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeMismatch {
  SourceLocation location;
  const void* type;
  unsigned char log_alignment, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t p) {
  const std::string file = data->location.file;
  const std::string what = "misaligned address: an access at " + file.substr(file.rfind('/') + 1) +
                           ":" + std::to_string(data->location.line) + " needs a multiple of " +
                           std::to_string(1 << data->log_alignment) + ", it is " +
                           std::to_string(p % (uintptr_t{1} << data->log_alignment)) +
                           " beyond one";
  if (running.thread >= 0) fault(what);
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

#endif

}  // namespace cuda_on_host
