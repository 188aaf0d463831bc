#include "binding.h"
#include "sampling/philox.h"

namespace py = pybind11;

namespace viasd {

namespace {

void uniforms(Address seeds, Address draws, Address out, int64_t num_sequences, int64_t num_slots) {
    uniforms_cpu(at<const int64_t>(seeds), at<const int64_t>(draws), at<double>(out), num_sequences, num_slots);
}

}  // namespace

void bind_sampling(py::module_& m) {
    m.def("uniforms", &uniforms, NoGil(), py::arg("seeds"), py::arg("draws"), py::arg("out"),
          py::arg("num_sequences"), py::arg("num_slots"));
}

}  // namespace viasd
