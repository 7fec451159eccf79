// From torch's stable tensors to the raw views of views.h, with the checks that keep a direct
// caller of torch.ops.fastrl.* from reading out of bounds. Python has already given users better
// messages.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <optional>
#include <vector>

#include "common/views.h"

namespace fastrl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Kind kind_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Kind::f32;
    case ScalarType::BFloat16:
      return Kind::bf16;
    case ScalarType::Half:
      return Kind::f16;
    case ScalarType::Double:
      return Kind::f64;
    default:
      STD_TORCH_CHECK(false, "fastrl: ", name, " must be float32, bfloat16, float16 or float64");
  }
}

// The dtype of results: float64 for float64 input, float32 for the rest.
inline ScalarType compute_type(Kind kind) {
  return kind == Kind::f64 ? ScalarType::Double : ScalarType::Float;
}

// Kernels walk rows with unit stride; other layouts (time first, expanded) are copied once by
// torch.
inline Tensor unit_stride_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.dim() > 0 && (t.stride(last) == 1 || t.size(last) <= 1)) return t;
  return torch::stable::contiguous(t);
}

inline int64_t row_stride_of(const Tensor& t) { return t.dim() == 2 ? t.stride(0) : 0; }

inline FloatView float_view(const Tensor& t, const char* name) {
  return FloatView{t.const_data_ptr(), kind_of(t, name), row_stride_of(t)};
}

inline MaskView mask_view(const Tensor& t) {
  const ScalarType type = t.scalar_type();
  const auto width = static_cast<int32_t>(t.element_size());
  const bool floating = type == ScalarType::Float || type == ScalarType::Double ||
                        type == ScalarType::Half || type == ScalarType::BFloat16;
  STD_TORCH_CHECK(width <= 8, "fastrl: mask must be bool, integer or floating");
  const uint64_t significant = floating ? ~(uint64_t{1} << (8 * width - 1)) : ~uint64_t{0};
  return MaskView{t.const_data_ptr(), width, significant, row_stride_of(t)};
}

inline void check_same_shape(const Tensor& t, const Tensor& like, const char* name) {
  bool same = t.dim() == like.dim();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == like.size(d);
  STD_TORCH_CHECK(same, "fastrl: ", name, " has another shape than the first tensor");
}

// Rows of a [B, T] tensor, or of a packed [N] tensor with its offsets, whose values are not looked
// at.
inline Rows unchecked_rows_of(const Tensor& t, const std::optional<Tensor>& cu_seqlens) {
  Rows rows;
  if (!cu_seqlens.has_value()) {
    STD_TORCH_CHECK(t.dim() == 2, "fastrl: expected [B, T], or [N] with cu_seqlens");
    rows.count = t.size(0);
    rows.length = t.size(1);
    return rows;
  }
  const Tensor& offsets = *cu_seqlens;
  STD_TORCH_CHECK(t.dim() == 1 && offsets.dim() == 1 && offsets.numel() > 0,
                  "fastrl: with cu_seqlens the tensors must be [N] and cu_seqlens [B+1]");
  STD_TORCH_CHECK(offsets.is_contiguous(), "fastrl: cu_seqlens must be contiguous");
  rows.count = offsets.numel() - 1;
  rows.tokens = t.numel();
  if (offsets.scalar_type() == ScalarType::Int) {
    rows.offsets32 = static_cast<const int32_t*>(offsets.const_data_ptr());
  } else {
    STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Long,
                    "fastrl: cu_seqlens must be int32 or int64");
    rows.offsets64 = static_cast<const int64_t*>(offsets.const_data_ptr());
  }
  return rows;
}

// The same on CPU, with the offsets checked end to end.
inline Rows rows_of(const Tensor& t, const std::optional<Tensor>& cu_seqlens) {
  const Rows rows = unchecked_rows_of(t, cu_seqlens);
  if (!rows.packed()) return rows;
  bool ordered = rows.begin(0, 0) == 0 && rows.begin(rows.count, 0) == t.numel();
  for (int64_t row = 0; ordered && row < rows.count; ++row) ordered = rows.size(row) >= 0;
  STD_TORCH_CHECK(ordered, "fastrl: cu_seqlens must rise from 0 to the number of tokens");
  return rows;
}

// A fresh tensor on the device of `like`. torch::stable::new_empty looks the operator up by name at
// every call, which costs more than the allocation and shows in calls on few elements.
inline Tensor new_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()),
                                                         sizes.data(), strides.data(), dtype,
                                                         device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// A fresh tensor for results. The first touch of fresh memory costs as much as the arithmetic, most
// of it per page: large results ask for huge pages, which is a hint and changes nothing else.
inline Tensor new_output(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         ScalarType type) {
  Tensor out = new_tensor(like, sizes, type);
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const size_t bytes = static_cast<size_t>(out.numel()) * out.element_size();
  if (bytes >= 2 * kHugePage) {
    const auto begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
    const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
    const uintptr_t last = (begin + bytes) & ~(kHugePage - 1);
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return out;
}

// From here on results bypass the caches: about half of a last-level cache.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

// Rows per thread so that a task is worth its dispatch: about 16k elements.
inline int64_t row_grain(int64_t rows, int64_t elements) {
  if (rows <= 0) return 1;
  const int64_t per_row = elements / rows + 1;
  return 16384 / per_row + 1;
}

}  // namespace fastrl
