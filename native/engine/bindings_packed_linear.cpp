// bindings_packed_linear.cpp: linear layers with packed weights, for tensors of torch, which are given by their
// addresses.
#include "bindings_packed_linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace penstock::engine {

using namespace nb::literals;

namespace {

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (u64 index = 0; index < linear_kernels().count; ++index)
        names.emplace_back(linear_kernels().kernels[index].name);
    return names;
}

void choose(const std::string& name) {
    if (!choose_linear_kernel(name.c_str()))
        throw std::invalid_argument(format("this processor has no kernel %s", name.c_str()));
}

// The pages of a file stay resident while a tensor maps them, though nothing reads them again.
void forget_pages(u64 address, u64 nbytes) {
    u64 page = static_cast<u64>(::sysconf(_SC_PAGESIZE));
    u64 first = PackedLinear::divide_up(address, page) * page, last = (address + nbytes) / page * page;
    if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

u64 packed_size(u64 inputs, u64 outputs, bool is_float32) {
    PackedLinear linear{};
    linear.inputs = inputs, linear.outputs = outputs;
    linear.dtype = is_float32 ? DType::float32 : DType::bfloat16;
    return linear.size();
}

}  // namespace

void bind_packed_linear(nb::module_& m) {
    nb::class_<Linear>(
        m, "PackedLinear",
        "y = x W^T + b in bfloat16 or float32, with W packed into panels of 16 outputs. Sums are float32.")
        .def(nb::init<u64, u64, Buffer, std::optional<Bias>, bool, bool, bool>(), "inputs"_a, "outputs"_a, "buffer"_a,
             "bias"_a = nb::none(), "is_gated"_a = false, "is_float32"_a = false, "is_gelu"_a = false,
             nb::sig("def __init__(self, inputs: int, outputs: int, buffer: numpy.typing.NDArray[numpy.uint16], bias: "
                     "numpy.typing.NDArray[numpy.float32] | None = None, is_gated: bool = False, is_float32: bool = "
                     "False, is_gelu: bool = False) -> None"),
             "Packs into `buffer`, of at least `packed_size` elements at a multiple of 64 bytes, and keeps it alive. "
             "`is_gated`: W has panels of a gate and of an up projection in turn, and y = silu(gate) * up; with "
             "`is_gelu`, y = gelu(gate) * up, by tanh.")
        .def("pack", &Linear::pack, "rows"_a, "first_panel"_a = 0, "step"_a = 1, "threads"_a = 1,
             nb::sig("def pack(self, rows: numpy.typing.NDArray[numpy.uint16], first_panel: int = 0, step: int = 1, "
                     "threads: int = 1) -> None"),
             "Packs rows of W, the bits of its elements, into the panels `first_panel`, `first_panel + step`, …")
        .def("compute", &Linear::compute, "x_address"_a, "x_stride"_a, "rows"_a, "out_address"_a, "out_stride"_a,
             "threads"_a, "added_address"_a = 0, "added_stride"_a = 0,
             "Computes rows of y. The caller checks that `x_address` has `rows` rows of `inputs` elements, and "
             "`out_address` room for as many of `results`; strides are in elements. `added_address`: as many rows of "
             "`outputs` elements, which are added to x W^T, before the gate; 0: none are.")
        .def_prop_ro("inputs", &Linear::inputs)
        .def_prop_ro("outputs", &Linear::outputs)
        .def_prop_ro("results", &Linear::results);
    m.def("packed_size", &packed_size, "inputs"_a, "outputs"_a, "is_float32"_a = false,
          "Elements of 2 bytes of a buffer for these packed weights.");
    m.def("forget_pages", &forget_pages, "address"_a, "nbytes"_a,
          "Unmaps the whole pages of a tensor that nothing reads any more: of a file, they are read again if need be; "
          "anonymous ones lose their contents.");
    m.def("linear_kernel", [] { return std::string(linear_kernel().name); }, "Name of the kernel in use.");
    m.def("linear_kernels", &kernel_names, "Names of the kernels that this processor can run, the fastest first.");
    m.def("choose_linear_kernel", &choose, "name"_a, "Chooses the kernel of this process. Raises ValueError.");
}

}  // namespace penstock::engine
