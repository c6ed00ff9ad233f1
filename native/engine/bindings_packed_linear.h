// bindings_packed_linear.h: the class PackedLinear of Python, which layers of a decoder keep, too.
#pragma once
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings_engine.h"
#include "gil.h"
#include "packed_linear.h"

namespace penstock::engine {

using Weights = nb::ndarray<nb::ro, u16, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Buffer = nb::ndarray<u16, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bias = nb::ndarray<nb::ro, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class Linear {
   public:
    Linear(u64 inputs, u64 outputs, Buffer buffer, std::optional<Bias> bias, bool is_gated, bool is_float32,
           bool is_gelu)
        : buffer_(buffer) {
        linear_.inputs = inputs, linear_.outputs = outputs, linear_.is_gated = is_gated, linear_.is_gelu = is_gelu;
        linear_.dtype = is_float32 ? DType::float32 : DType::bfloat16;
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

    void pack(const Weights& rows, u64 first_panel, u64 step, u64 threads) {
        u64 panels = PackedLinear::divide_up(rows.shape(0), PackedLinear::PANEL);
        if (rows.shape(1) != linear_.halves() || step == 0 || panels == 0 ||
            first_panel + (panels - 1) * step >= linear_.panels())
            throw std::invalid_argument("expected rows of all inputs, for panels that are there");
        python::GilRelease released;
        pack_weights(linear_, buffer_.data(), rows.data(), rows.shape(0), first_panel, step, threads);
    }

    void compute(u64 x_address, u64 x_stride, u64 rows, u64 out_address, u64 out_stride, u64 threads, u64 added_address,
                 u64 added_stride) const {
        const void* x = reinterpret_cast<const void*>(x_address);
        void* out = reinterpret_cast<void*>(out_address);
        python::GilRelease released;
        Addend addend{reinterpret_cast<const void*>(added_address), added_stride};
        compute_linear(linear_, x, x_stride, rows, out, out_stride, threads, addend);
    }

    const PackedLinear& get() const { return linear_; }
    u64 inputs() const { return linear_.inputs; }
    u64 outputs() const { return linear_.outputs; }
    u64 results() const { return linear_.results(); }

   private:
    PackedLinear linear_{};
    Buffer buffer_;
    std::vector<float> bias_;
};

}  // namespace penstock::engine
