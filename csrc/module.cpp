// The compiled module fastrl._C. Importing it registers the kernels; the functions here are host
// helpers in Python's own terms that have no tensor form.
#include <pybind11/pybind11.h>

#include "common/capability.h"
#include "group_ids/group_ids.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["capability"] = fastrl::capability_name(fastrl::capability());
  py::list built;
#define FASTRL_APPEND(name) built.append(fastrl::capability_name(fastrl::Capability::name));
  FASTRL_FOR_EACH_CAPABILITY(FASTRL_APPEND)
#undef FASTRL_APPEND
  info["capabilities_built"] = built;
  info["compiler"] = __VERSION__;
  info["torch_target"] = FASTRL_TORCH_TARGET;
  info["sanitizer"] = FASTRL_SANITIZER;
#if defined(FASTRL_CUDA_ARCHS)
  info["cuda_archs"] = py::str(FASTRL_CUDA_ARCHS).attr("split")(",");
  info["nvcc"] = FASTRL_NVCC;
#else
  info["cuda_archs"] = py::list();
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastrl; importing this module registers them with torch.";
  m.def("build_info", &build_info, "How this module was built and which instruction set it uses.");
  m.def(
      "set_capability", [](const char* name) { return fastrl::set_capability(name); },
      py::arg("name"),
      "Use another instruction set from now on; False when it is not there. For tests.");
  fastrl::bind_group_ids(m);
}
