// Numbers of strings and integers as Python and numpy hold them, straight from their memory.
//
// Only exact str and int objects are looked at: no code of the caller runs, so borrowed references
// stay good. For anything else the answer is None, and Python's own dict does the work and words
// the errors.
#include "group_ids/group_ids.h"

#include <pybind11/numpy.h>

#include <vector>

#include "group_ids/first_seen.h"

namespace py = pybind11;

namespace fastrl {
namespace {

using Numbers = py::array_t<int64_t>;

// Labels are usually made once per prompt, but scattered over the heap: fetch this many objects
// ahead.
constexpr int64_t kPrefetch = 8;

struct Text {
  const void* data;
  int64_t size;   // bytes
  int32_t width;  // bytes per character: equal strings have the same, the narrowest that fits
};

Text text_of(PyObject* label) {
  const auto width = static_cast<int32_t>(PyUnicode_KIND(label));
  return {PyUnicode_DATA(label), static_cast<int64_t>(PyUnicode_GET_LENGTH(label)) * width, width};
}

bool is_text(PyObject* label) {
  if (label == nullptr || !PyUnicode_CheckExact(label)) return false;
#if PY_VERSION_HEX < 0x030C0000
  if (PyUnicode_READY(label) != 0) {
    PyErr_Clear();
    return false;
  }
#endif
  return true;
}

bool number_texts(PyObject* const* labels, int64_t count, int64_t* numbers) {
  FirstSeen seen;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kPrefetch < count) __builtin_prefetch(labels[i + kPrefetch]);
    PyObject* const label = labels[i];
    if (i > 0 && label == labels[i - 1]) {  // the samples of one prompt share its label object
      numbers[i] = numbers[i - 1];
      continue;
    }
    if (!is_text(label)) return false;
    const Text text = text_of(label);
    numbers[i] = seen.number(hash_bytes(text.data, text.size), i, [&](int64_t j) {
      if (labels[j] == label) return true;
      const Text other = text_of(labels[j]);
      return other.size == text.size && other.width == text.width &&
             std::memcmp(other.data, text.data, static_cast<size_t>(text.size)) == 0;
    });
  }
  return true;
}

bool number_int_objects(PyObject* const* labels, int64_t count, int64_t* numbers) {
  std::vector<int64_t> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    if (labels[i] == nullptr || !PyLong_CheckExact(labels[i])) return false;
    int overflow = 0;
    keys[static_cast<size_t>(i)] = PyLong_AsLongLongAndOverflow(labels[i], &overflow);
    if (overflow != 0) return false;
  }
  number_ints(keys.data(), count, numbers);
  return true;
}

bool number_objects(PyObject* const* labels, int64_t count, int64_t* numbers) {
  if (count == 0) return true;
  return is_text(labels[0]) ? number_texts(labels, count, numbers)
                            : number_int_objects(labels, count, numbers);
}

// `labels`: list, tuple, or a contiguous one-dimensional array of objects, int64, str or bytes.
py::object group_ids(const py::object& labels) {
  if (py::isinstance<py::array>(labels)) {
    const auto array = py::reinterpret_borrow<py::array>(labels);
    const int64_t count = array.size(), width = array.itemsize();
    const char kind = array.dtype().kind();
    Numbers numbers(count);
    int64_t* const out = numbers.mutable_data();
    if (array.ndim() != 1 || (array.flags() & py::array::c_style) == 0) return py::none();
    if (kind == 'O') {
      const bool done = number_objects(static_cast<PyObject* const*>(array.data()), count, out);
      return done ? py::object(numbers) : py::none();
    }
    if (kind == 'i' && width == 8) {
      number_ints(static_cast<const int64_t*>(array.data()), count, out);
      return numbers;
    }
    if (kind == 'U' ||
        kind == 'S') {  // padded with zeros to one width, so equal labels have equal bytes
      const auto* const bytes = static_cast<const char*>(array.data());
      FirstSeen seen;
      for (int64_t i = 0; i < count; ++i) {
        const char* const label = bytes + i * width;
        out[i] = seen.number(hash_bytes(label, width), i, [&](int64_t j) {
          return std::memcmp(bytes + j * width, label, static_cast<size_t>(width)) == 0;
        });
      }
      return numbers;
    }
    return py::none();
  }
  if (!PyList_CheckExact(labels.ptr()) && !PyTuple_CheckExact(labels.ptr())) return py::none();
  const int64_t count = PySequence_Fast_GET_SIZE(labels.ptr());
  Numbers numbers(count);
  const bool done =
      number_objects(PySequence_Fast_ITEMS(labels.ptr()), count, numbers.mutable_data());
  return done ? py::object(numbers) : py::none();
}

}  // namespace

void bind_group_ids(py::module_& module) {
  module.def("group_ids", &group_ids, py::arg("labels"),
             "Dense numbers by first appearance, int64, or None for labels that need a dict.");
}

}  // namespace fastrl
