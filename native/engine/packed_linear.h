// packed_linear.h: y = x W^T + b in bfloat16 or float32 on CPUs, with W in the order in which the kernels read it.
//
// W is divided into panels of 16 outputs. A panel stores pairs of inputs: [inputs / 2][16 outputs][2], the operand of
// vdpbf16ps, bfdot and TDPBF16PS alike. So one layout serves every kernel, and a decode step reads W once, in order.
// Inputs are padded with zeros to a multiple of 32, outputs to a multiple of 16.
//
// x is copied into tiles of 16 rows by 32 inputs: [rows / 16][inputs / 32][16][32].
//
// A number of float32 takes the room of a pair. So all layouts are in halves: elements of 2 bytes, of which a row of
// float32 has two for each input.
//
// Sums are float32, and each output adds its products in the order of the inputs. The kernels of one processor give the
// same bits for a row, whatever the number of rows, of threads and of chunks.
//
// The kernels are compiled once per instruction set; paged_attention.h says what that forbids.
#pragma once
#include <cstdint>

#include "paged_attention.h"

namespace penstock::engine {

struct PackedLinear {
    static constexpr u64 PANEL = 16;                      // outputs
    static constexpr u64 TILE_ROWS = 16;                  // rows of x
    static constexpr u64 TILE_INPUTS = 32;                // halves
    static constexpr u64 TILE = TILE_ROWS * TILE_INPUTS;  // elements of a tile of x, and of a panel for its inputs
    static constexpr u64 MAX_ROWS = 512;                  // rows of x: a kernel keeps their sums
    static constexpr u64 MAX_PANELS = 4;                  // panels of these sums
    static constexpr u64 BLOCK_NBYTES = 1 << 20;          // of x: half of a core's second-level cache

    const u16* weights;   // [panels][input_tiles][TILE]
    const float* bias;    // [panels][PANEL], nullptr: none
    u64 inputs, outputs;  // of W; with a gate, `outputs` is a multiple of 32
    // W has the panels of a gate and of an up projection in turn, and y = silu(gate) * up: half as many outputs.
    bool is_gated;
    DType dtype = DType::bfloat16;  // of W, x and y. Biases are float32
    bool is_gelu = false;           // the gate is GELU with tanh, instead of SiLU

    [[gnu::always_inline]] static u64 divide_up(u64 number, u64 unit) { return (number + unit - 1) / unit; }
    [[gnu::always_inline]] u64 width() const { return dtype == DType::float32 ? 2 : 1; }  // halves of an element
    [[gnu::always_inline]] u64 halves() const { return inputs * width(); }                // of a row of W
    [[gnu::always_inline]] u64 input_tiles() const { return divide_up(halves(), TILE_INPUTS); }
    [[gnu::always_inline]] u64 panels() const { return divide_up(outputs, PANEL); }
    [[gnu::always_inline]] u64 panel_size() const { return input_tiles() * TILE; }
    [[gnu::always_inline]] u64 results() const { return is_gated ? outputs / 2 : outputs; }
    u64 size() const { return panels() * panel_size(); }  // halves of `weights`
    // Rows of x that stay in the cache while all panels are multiplied with them: the most that fit, in equal blocks.
    u64 block_rows(u64 rows) const {
        constexpr u64 UNIT = 2 * TILE_ROWS;
        u64 fitting = BLOCK_NBYTES / (input_tiles() * TILE_INPUTS * sizeof(u16)) / UNIT * UNIT;
        u64 most = fitting < UNIT ? UNIT : fitting > MAX_ROWS ? MAX_ROWS : fitting;
        return divide_up(divide_up(rows, divide_up(rows, most)), UNIT) * UNIT;
    }
};

// Writes rows [outputs, halves] of a weight matrix to the panels `first`, `first + step`, …, in several threads.
void pack_weights(const PackedLinear& linear, u16* weights, const u16* rows, u64 outputs, u64 first, u64 step,
                  u64 threads = 1);

// Copies `rows` rows of x into one row of tiles; the rest of the tiles becomes zeros.
void pack_rows(const u16* x, u64 row_stride, u64 rows, u64 halves, u16* tiles);

// Numbers that are added to the sums before a gate and before rounding: for each row one of W's dtype for each output.
struct Addend {
    const void* numbers = nullptr;  // nullptr: nothing is added
    u64 stride = 0;                 // elements from row to row

    [[gnu::always_inline]] Addend from_row(const PackedLinear& linear, u64 row) const {
        if (numbers == nullptr) return *this;
        return {static_cast<const u16*>(numbers) + row * stride * linear.width(), stride};
    }
};

// Computes all of y with the kernel in use. Strides are in elements. Nothing is checked.
void compute_linear(const PackedLinear& linear, const void* x, u64 x_stride, u64 rows, void* out, u64 out_stride,
                    u64 threads, const Addend& addend = {});

// Computes the panels [first, last) for all rows. `tiles`: these rows of x. Nothing is checked. With a gate, `first`
// and `last` are even.
using LinearKernel = void(const PackedLinear& linear, const u16* tiles, u64 rows, u64 first, u64 last, void* out,
                          u64 out_stride, const Addend& addend);
LinearKernel packed_linear_portable;
#if defined(__x86_64__)
LinearKernel packed_linear_avx2;
LinearKernel packed_linear_avx512;
LinearKernel packed_linear_avx512_bf16;
LinearKernel packed_linear_amx;
bool allow_amx();  // asks for the tile registers of this process; false: there are none
#elif defined(__aarch64__)
LinearKernel packed_linear_bfdot;
#endif

// Sums and tiles have room for an even number of tiles of rows.
struct Product {
    const u16* tiles;  // [rows / 16][tile_stride][TILE]
    u64 tile_stride;
    u64 rows;
    const u16* weights;  // [panels][weight_stride][TILE]
    u64 weight_stride, panels;
    u64 input_tiles;  // that are multiplied
    bool adds;        // to the sums. Otherwise they are overwritten

    [[gnu::always_inline]] const u16* inputs_of(u64 row) const {
        return tiles + row / PackedLinear::TILE_ROWS * tile_stride * PackedLinear::TILE +
               row % PackedLinear::TILE_ROWS * PackedLinear::TILE_INPUTS;
    }
    [[gnu::always_inline]] const u16* weights_of(u64 panel) const {
        return weights + panel * weight_stride * PackedLinear::TILE;
    }
};
// Computes sums[row * panels * 16 + output].
using SumsKernel = void(const Product& product, float* sums);
SumsKernel packed_linear_portable_sums;
#if defined(__x86_64__)
SumsKernel packed_linear_avx2_sums;
SumsKernel packed_linear_avx512_sums;
SumsKernel packed_linear_avx512_bf16_sums;
SumsKernel packed_linear_amx_sums;
#elif defined(__aarch64__)
SumsKernel packed_linear_bfdot_sums;
#endif

struct NamedKernel {
    const char* name;
    LinearKernel* kernel;
    SumsKernel* sums;
};
// The kernels that this processor can run, the fastest first.
struct LinearKernels {
    NamedKernel kernels[5];
    u64 count;
};
const LinearKernels& linear_kernels();

// The kernel in use: the fastest one, or that of this name. False: this processor has no kernel of this name.
const NamedKernel& linear_kernel();
bool choose_linear_kernel(const char* name);

}  // namespace penstock::engine
