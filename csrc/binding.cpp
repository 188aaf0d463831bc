// viasd_kernels._native: one module, to which every family adds its functions.
#include "binding.h"

#include <stdexcept>
#include <string>

#include "cpu_level.h"
#include "digest.h"

namespace py = pybind11;

namespace {

constexpr const char* LEVEL_NAMES[] = {"portable", "avx2", "avx512", "amx"};

std::string cpu_level() { return LEVEL_NAMES[static_cast<int>(viasd::cpu_level())]; }

void set_cpu_level(const std::string& name) {
    if (name == "auto") return viasd::set_cpu_level(viasd::highest_cpu_level());
    for (int level = 0; level < 4; ++level) {
        if (name == LEVEL_NAMES[level]) return viasd::set_cpu_level(static_cast<viasd::CpuLevel>(level));
    }
    throw std::invalid_argument("level must be 'auto', 'portable', 'avx2', 'avx512' or 'amx', got '" + name + "'");
}

uint64_t digest(viasd::Address data, int64_t num_bytes, int num_threads) {
    return viasd::digest(viasd::at<const void>(data), num_bytes, num_threads);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "CPU implementations of the viasd_kernels ops; call them through the package's public functions.";
    m.def("cpu_level", &cpu_level, "Which compiled variant runs: 'portable', 'avx2', 'avx512' or 'amx'.");
    m.def("set_cpu_level", &set_cpu_level, py::arg("name"),
          "Force a variant, for tests; 'auto' goes back to the best. ValueError where the processor lacks it.");
    m.def("digest", &digest, viasd::NoGil(), py::arg("data"), py::arg("num_bytes"), py::arg("num_threads"));
    viasd::bind_sampling(m);
    viasd::bind_tree_verify(m);
    viasd::bind_acceptance(m);
    viasd::bind_layer_skip(m);
}
