// packed_linear_amx.cpp: the kernel of packed_linear.h by the tile registers of AMX. Calls only intrinsics and system
// calls; paged_attention.h says why.
#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "packed_linear.h"

namespace penstock::engine {
namespace {

constexpr u64 AHEAD = 4096;  // bytes: a panel's part that is fetched before it is needed
constexpr u64 SLICE = 8;     // input tiles: those of two panels stay in the first-level cache beside two tiles of rows

struct alignas(64) TileConfig {
    u8 palette = 1, start_row = 0, reserved[14] = {};
    u16 row_nbytes[16] = {};
    u8 rows[16] = {};
};

// Tiles 0 to 3: sums. 4, 5: x. 6, 7: weights. All have 16 rows of 64 bytes: a row of x beyond the last one is zeros.
void configure() {
    TileConfig config;
    for (u64 tile = 0; tile < 8; ++tile) config.row_nbytes[tile] = 64, config.rows[tile] = 16;
    asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic reads 8 bytes, as far as the compiler knows
    _tile_loadconfig(&config);
}

inline void fetch(const u16* at) {
    for (u64 line = 0; line < PackedLinear::TILE * sizeof(u16); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at) + AHEAD + line, _MM_HINT_T0);
}

// The input tiles [first, last) of up to two tiles of rows and two panels. Each tile of sums exists if both its row
// and its panel do.
template <u64 ROW_TILES, u64 PANELS>
inline void compute_block(const Product& p, const u16* x, const u16* w, u64 first, u64 last, bool adds, float* sums) {
    u64 stride = p.panels * PackedLinear::PANEL * sizeof(float);
    const u16 *lower = x + p.tile_stride * PackedLinear::TILE, *right = w + p.weight_stride * PackedLinear::TILE;
    float* lower_sums = sums + PackedLinear::TILE_ROWS * p.panels * PackedLinear::PANEL;
    if (adds) {
        _tile_loadd(0, sums, stride);
        if constexpr (PANELS == 2) _tile_loadd(1, sums + PackedLinear::PANEL, stride);
        if constexpr (ROW_TILES == 2) _tile_loadd(2, lower_sums, stride);
        if constexpr (ROW_TILES == 2 && PANELS == 2) _tile_loadd(3, lower_sums + PackedLinear::PANEL, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (u64 tile = first; tile < last; ++tile) {
        u64 at = tile * PackedLinear::TILE;
        _tile_loadd(4, x + at, 64);
        if constexpr (ROW_TILES == 1) fetch(w + at);  // with more rows, products take longer than memory
        _tile_loadd(6, w + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (PANELS == 2) {
            if constexpr (ROW_TILES == 1) fetch(right + at);
            _tile_loadd(7, right + at, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(5, lower + at, 64);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (PANELS == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    if constexpr (PANELS == 2) _tile_stored(1, sums + PackedLinear::PANEL, stride);
    if constexpr (ROW_TILES == 2) _tile_stored(2, lower_sums, stride);
    if constexpr (ROW_TILES == 2 && PANELS == 2) _tile_stored(3, lower_sums + PackedLinear::PANEL, stride);
}

// Fetches a part of the weights that are multiplied next into the second-level cache: those of the input tiles from
// `last` on, or of the next panels.
inline void fetch_next(const Product& p, const u16* w, u64 last, u64 row, u64 panels) {
    constexpr u64 LINES = SLICE * PackedLinear::TILE * sizeof(u16) / 64, ROWS = 2 * PackedLinear::TILE_ROWS;
    u64 panel_size = p.weight_stride * PackedLinear::TILE;
    const u16* next = last < p.input_tiles ? w + last * PackedLinear::TILE : w + panels * panel_size;
    u64 each = LINES / PackedLinear::divide_up(p.rows, ROWS) + 1, begin = row / ROWS * each;
    for (u64 line = begin; line < begin + each; ++line)
        for (u64 panel = 0; panel < panels; ++panel)
            _mm_prefetch(reinterpret_cast<const char*>(next + panel * panel_size) + line * 64, _MM_HINT_T1);
}

template <u64 PANELS>
inline void multiply_panels(const Product& p, const u16* w, float* sums) {
    u64 stride = p.panels * PackedLinear::PANEL, slice = p.rows > 2 * PackedLinear::TILE_ROWS ? SLICE : p.input_tiles;
    for (u64 first = 0; first < p.input_tiles; first += slice) {
        u64 last = p.input_tiles - first < slice ? p.input_tiles : first + slice;
        bool adds = p.adds || first != 0;
        for (u64 row = 0; row < p.rows; row += 2 * PackedLinear::TILE_ROWS) {
            if (p.rows - row <= PackedLinear::TILE_ROWS) {
                compute_block<1, PANELS>(p, p.inputs_of(row), w, first, last, adds, sums + row * stride);
            } else {
                fetch_next(p, w, last, row, PANELS);
                compute_block<2, PANELS>(p, p.inputs_of(row), w, first, last, adds, sums + row * stride);
            }
        }
    }
}

inline void multiply(const Product& p, float* sums) {
    configure();
    for (u64 panel = 0; panel < p.panels; panel += 2) {
        float* out = sums + panel * PackedLinear::PANEL;
        if (p.panels - panel >= 2)
            multiply_panels<2>(p, p.weights_of(panel), out);
        else
            multiply_panels<1>(p, p.weights_of(panel), out);
    }
    _tile_release();
}

}  // namespace

bool allow_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // namespace penstock::engine

#define PENSTOCK_KERNEL packed_linear_amx
#include "packed_linear_panels.h"
#endif
