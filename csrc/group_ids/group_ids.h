// The host helper behind fastrl.group_ids.
#pragma once

#include <pybind11/pybind11.h>

namespace fastrl {

void bind_group_ids(pybind11::module_& module);

}  // namespace fastrl
