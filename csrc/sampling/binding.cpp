#include "binding.h"
#include "sampling/philox.h"
#include "sampling/scalar_math.h"

namespace py = pybind11;

namespace viasd {

namespace {

void uniforms(Address seeds, Address draws, Address out, int64_t num_sequences, int64_t num_slots) {
    uniforms_cpu(at<const int64_t>(seeds), at<const int64_t>(draws), at<double>(out), num_sequences, num_slots);
}

template <class Real>
void exp_row(Address values, Address out, int64_t count) {
    row_kernels<Real>().weigh(at<const Real>(values), count, {0, 1}, at<Real>(out));
}

void exp_rows(Address values, Address out, int64_t count, bool is_float64) {
    (is_float64 ? exp_row<double> : exp_row<float>)(values, out, count);
}

}  // namespace

void bind_sampling(py::module_& m) {
    m.def("uniforms", &uniforms, NoGil(), py::arg("seeds"), py::arg("draws"), py::arg("out"), py::arg("num_sequences"),
          py::arg("num_slots"));
    m.def("exp_nonpositive", &exp_rows, NoGil(), py::arg("values"), py::arg("out"), py::arg("count"),
          py::arg("is_float64"), "exp of values <= 0 as the row kernels compute it: its accuracy is tested.");
    m.def("log_positive", &log_positive, py::arg("x"), "log of one number, likewise.");
}

}  // namespace viasd
