// bindings_packed_linear.cpp: linear layers with packed weights, for tensors of torch, which are given by their
// addresses.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_engine.h"
#include "gil.h"
#include "packed_linear.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using Rows = nb::ndarray<nb::ro, u16, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Buffer = nb::ndarray<u16, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bias = nb::ndarray<nb::ro, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class Linear {
   public:
    Linear(u64 inputs, u64 outputs, Buffer buffer, std::optional<Bias> bias, bool is_gated) : buffer_(buffer) {
        linear_.inputs = inputs, linear_.outputs = outputs, linear_.is_gated = is_gated;
        linear_.weights = buffer.data(), linear_.bias = nullptr;
        if (inputs == 0 || outputs == 0) throw std::invalid_argument("expected at least one input and one output");
        if (is_gated && outputs % (2 * PackedLinear::PANEL) != 0)
            throw std::invalid_argument("expected a multiple of 32 outputs with a gate");
        if (buffer.size() < linear_.size() || reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 != 0)
            throw std::invalid_argument(format("expected a buffer of %llu elements at a multiple of 64 bytes",
                                               (unsigned long long)linear_.size()));
        if (bias) {
            if (bias->size() != outputs || is_gated)
                throw std::invalid_argument("expected a bias for each output, and no gate");
            bias_.assign(bias->data(), bias->data() + outputs);
            bias_.resize(linear_.panels() * PackedLinear::PANEL);
            linear_.bias = bias_.data();
        }
    }

    void pack(const Rows& rows, u64 first_panel, u64 step, u64 threads) {
        u64 panels = PackedLinear::divide_up(rows.shape(0), PackedLinear::PANEL);
        if (rows.shape(1) != linear_.inputs || step == 0 || panels == 0 ||
            first_panel + (panels - 1) * step >= linear_.panels())
            throw std::invalid_argument("expected rows of all inputs, for panels that are there");
        python::GilRelease released;
        pack_weights(linear_, buffer_.data(), rows.data(), rows.shape(0), first_panel, step, threads);
    }

    void compute(u64 x_address, u64 x_stride, u64 rows, u64 out_address, u64 out_stride, u64 threads) const {
        const u16* x = reinterpret_cast<const u16*>(x_address);
        u16* out = reinterpret_cast<u16*>(out_address);
        python::GilRelease released;
        compute_linear(linear_, x, x_stride, rows, out, out_stride, threads);
    }

    u64 inputs() const { return linear_.inputs; }
    u64 results() const { return linear_.results(); }

   private:
    PackedLinear linear_{};
    Buffer buffer_;
    std::vector<float> bias_;
};

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

u64 packed_size(u64 inputs, u64 outputs) {
    PackedLinear linear{};
    linear.inputs = inputs, linear.outputs = outputs;
    return linear.size();
}

}  // namespace

void bind_packed_linear(nb::module_& m) {
    nb::class_<Linear>(m, "PackedLinear",
                       "y = x W^T + b in bfloat16, with W packed into panels of 16 outputs. Sums are float32.")
        .def(nb::init<u64, u64, Buffer, std::optional<Bias>, bool>(), "inputs"_a, "outputs"_a, "buffer"_a,
             "bias"_a = nb::none(), "is_gated"_a = false,
             nb::sig("def __init__(self, inputs: int, outputs: int, buffer: numpy.typing.NDArray[numpy.uint16], bias: "
                     "numpy.typing.NDArray[numpy.float32] | None = None, is_gated: bool = False) -> None"),
             "Packs into `buffer`, of at least `packed_size` elements at a multiple of 64 bytes, and keeps it alive. "
             "`is_gated`: W has panels of a gate and of an up projection in turn, and y = silu(gate) * up.")
        .def("pack", &Linear::pack, "rows"_a, "first_panel"_a = 0, "step"_a = 1, "threads"_a = 1,
             nb::sig("def pack(self, rows: numpy.typing.NDArray[numpy.uint16], first_panel: int = 0, step: int = 1, "
                     "threads: int = 1) -> None"),
             "Packs rows of W, the bits of bfloat16, into the panels `first_panel`, `first_panel + step`, …")
        .def("compute", &Linear::compute, "x_address"_a, "x_stride"_a, "rows"_a, "out_address"_a, "out_stride"_a,
             "threads"_a,
             "Computes rows of y. The caller checks that `x_address` has `rows` rows of `inputs` elements, and "
             "`out_address` room for as many of `results`; strides are in elements.")
        .def_prop_ro("inputs", &Linear::inputs)
        .def_prop_ro("results", &Linear::results);
    m.def("packed_size", &packed_size, "inputs"_a, "outputs"_a, "Elements of a buffer for these packed weights.");
    m.def("forget_pages", &forget_pages, "address"_a, "nbytes"_a,
          "Unmaps the whole pages of a tensor that nothing reads any more: of a file, they are read again if need be; "
          "anonymous ones lose their contents.");
    m.def("linear_kernel", [] { return std::string(linear_kernel().name); }, "Name of the kernel in use.");
    m.def("linear_kernels", &kernel_names, "Names of the kernels that this processor can run, the fastest first.");
    m.def("choose_linear_kernel", &choose, "name"_a, "Chooses the kernel of this process. Raises ValueError.");
}

}  // namespace penstock::engine
