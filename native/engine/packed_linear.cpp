// packed_linear.cpp: packing, and the choice of a kernel.
#include "packed_linear.h"

#include <cstring>

#include "atomic.h"
#include "cpu_features.h"
#include "scratch.h"
#include "thread_team.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace penstock::engine {
namespace {

constexpr u64 MIN_PARALLEL_TILES = 8;  // rows of tiles that are worth copying in several threads
constexpr u64 MAX_SMALL = 64;          // rows up to which small chunks, which end together, are the best ones
constexpr u64 PANEL = PackedLinear::PANEL, TILE = PackedLinear::TILE, TILE_INPUTS = PackedLinear::TILE_INPUTS;

LinearKernels find_kernels() {
    LinearKernels kernels{};
    auto add = [&](const char* name, LinearKernel* kernel, SumsKernel* sums) {
        kernels.kernels[kernels.count++] = {name, kernel, sums};
    };
#if defined(__x86_64__)
#if defined(PENSTOCK_COMPILES_BF16)
    if (has_avx512_bf16()) {
        u32 a = 7, b = 0, c = 0, d = 0;  // CPUID 7.0: bits 22 and 24 of EDX are AMX-BF16 and AMX-TILE
        asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        if ((d >> 22 & 1) != 0 && (d >> 24 & 1) != 0 && allow_amx())
            add("amx", packed_linear_amx, packed_linear_amx_sums);
        add("avx512_bf16", packed_linear_avx512_bf16, packed_linear_avx512_bf16_sums);
    }
#endif
    if (has_avx512()) add("avx512", packed_linear_avx512, packed_linear_avx512_sums);
    if (has_avx2()) add("avx2", packed_linear_avx2, packed_linear_avx2_sums);
#elif defined(__aarch64__)
#if defined(HWCAP2_BF16)
    if ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0) add("bfdot", packed_linear_bfdot, packed_linear_bfdot_sums);
#endif
#endif
    add("portable", packed_linear_portable, packed_linear_portable_sums);
    return kernels;
}

Atomic<u64> chosen{0};  // an index into linear_kernels(); no other memory depends on its order

// Writes up to 16 rows [outputs, halves] of a weight matrix to a panel; the rest of the panel becomes zeros.
void pack_panel(const PackedLinear& linear, u16* to, const u16* rows, u64 outputs) {
    u64 halves = linear.halves(), whole = outputs < PANEL ? 0 : halves / TILE_INPUTS;
    for (u64 tile = 0; tile < whole; ++tile)  // reads a cache line of each row, writes a whole tile
        for (u64 pair = 0; pair < TILE_INPUTS / 2; ++pair)
            for (u64 lane = 0; lane < PANEL; ++lane)
                std::memcpy(to + tile * TILE + (pair * PANEL + lane) * 2,
                            rows + lane * halves + tile * TILE_INPUTS + pair * 2, 2 * sizeof(u16));
    for (u64 input = whole * TILE_INPUTS; input < linear.input_tiles() * TILE_INPUTS; ++input)
        for (u64 lane = 0; lane < PANEL; ++lane)
            to[(input / 2 * PANEL + lane) * 2 + input % 2] =
                lane < outputs && input < halves ? rows[lane * halves + input] : u16{0};
}

}  // namespace

const LinearKernels& linear_kernels() {
    static const LinearKernels kernels = find_kernels();
    return kernels;
}

const NamedKernel& linear_kernel() { return linear_kernels().kernels[chosen.load(RELAXED)]; }

bool choose_linear_kernel(const char* name) {
    const LinearKernels& all = linear_kernels();
    for (u64 index = 0; index < all.count; ++index)
        if (std::strcmp(all.kernels[index].name, name) == 0) {
            chosen.store(index, RELAXED);
            return true;
        }
    return false;
}

void pack_weights(const PackedLinear& linear, u16* weights, const u16* rows, u64 outputs, u64 first, u64 step,
                  u64 threads) {
    ThreadTeam::get().run(threads, PackedLinear::divide_up(outputs, PANEL), [&](u64 panel) {
        u64 row = panel * PANEL, left = outputs - row;
        pack_panel(linear, weights + (first + panel * step) * linear.panel_size(), rows + row * linear.halves(),
                   left < PANEL ? left : PANEL);
    });
}

void pack_rows(const u16* x, u64 row_stride, u64 rows, u64 halves, u16* tiles) {
    u64 whole = halves / TILE_INPUTS, rest = halves % TILE_INPUTS;
    for (u64 row = 0; row < PackedLinear::TILE_ROWS; ++row) {
        u16* to = tiles + row * TILE_INPUTS;
        if (row >= rows) {
            for (u64 tile = 0; tile < whole + (rest != 0); ++tile) std::memset(to + tile * TILE, 0, TILE_INPUTS * 2);
            continue;
        }
        const u16* from = x + row * row_stride;
        for (u64 tile = 0; tile < whole; ++tile)
            std::memcpy(to + tile * TILE, from + tile * TILE_INPUTS, TILE_INPUTS * 2);
        if (rest != 0) {
            std::memset(to + whole * TILE, 0, TILE_INPUTS * 2);
            std::memcpy(to + whole * TILE, from + whole * TILE_INPUTS, rest * 2);
        }
    }
}

void compute_linear(const PackedLinear& linear, const void* x, u64 x_stride, u64 rows, void* out, u64 out_stride,
                    u64 threads, const Addend& addend) {
    if (rows == 0) return;
    u64 row_tiles = PackedLinear::divide_up(rows, PackedLinear::TILE_ROWS);
    u16* tiles = scratch<PackedLinear, u16>(row_tiles * linear.panel_size());
    u64 x_halves = x_stride * linear.width(), out_halves = out_stride * linear.width();
    const u16* inputs = static_cast<const u16*>(x);
    u16* results = static_cast<u16*>(out);
    ThreadTeam& team = ThreadTeam::get();
    team.run(row_tiles < MIN_PARALLEL_TILES ? 1 : threads, row_tiles, [&](u64 tile) {
        u64 row = tile * PackedLinear::TILE_ROWS;
        u64 count = rows - row < PackedLinear::TILE_ROWS ? rows - row : PackedLinear::TILE_ROWS;
        pack_rows(inputs + row * x_halves, x_halves, count, linear.halves(), tiles + tile * linear.panel_size());
    });
    u64 block = linear.block_rows(rows), blocks = PackedLinear::divide_up(rows, block);
    u64 panels = PackedLinear::MAX_PANELS * (rows > MAX_SMALL ? 4 : 1);
    while (panels > PackedLinear::MAX_PANELS && blocks * PackedLinear::divide_up(linear.panels(), panels) < 2 * threads)
        panels /= 2;
    u64 chunks = PackedLinear::divide_up(linear.panels(), panels);
    LinearKernel* kernel = linear_kernel().kernel;
    // Either each block of rows passes over all weights, or each slice of the weights over all rows: what reads
    // less.
    bool is_by_rows = linear.size() * blocks <= row_tiles * linear.panel_size() * chunks;
    team.run(threads, blocks * chunks, [&](u64 number) {
        u64 row = (is_by_rows ? number / chunks : number % blocks) * block;
        u64 first = (is_by_rows ? number % chunks : number / blocks) * panels, last = first + panels;
        u64 count = rows - row < block ? rows - row : block;
        kernel(linear, tiles + row / PackedLinear::TILE_ROWS * linear.panel_size(), count, first,
               last < linear.panels() ? last : linear.panels(), results + row * out_halves, out_stride,
               addend.from_row(linear, row));
    });
}

}  // namespace penstock::engine
