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

// One tile of rows by one or two panels.
inline void compute_tile(const u16* x, const u16* w, u64 panels, u64 input_tiles, float* sums, u64 stride) {
    u64 panel_size = input_tiles * PackedLinear::TILE;
    _tile_zero(0);
    _tile_zero(1);
    for (u64 tile = 0; tile < input_tiles; ++tile) {
        const u16* at = w + tile * PackedLinear::TILE;
        _tile_loadd(4, x + tile * PackedLinear::TILE, 64);
        fetch(at);
        _tile_loadd(6, at, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (panels == 2) {
            fetch(at + panel_size);
            _tile_loadd(7, at + panel_size, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums, stride * sizeof(float));
    if (panels == 2) _tile_stored(1, sums + PackedLinear::PANEL, stride * sizeof(float));
}

// Two tiles of rows by two panels: each tile that is loaded is used twice.
inline void compute_four(const u16* x, const u16* w, u64 input_tiles, float* sums, u64 stride) {
    u64 panel_size = input_tiles * PackedLinear::TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (u64 tile = 0; tile < input_tiles; ++tile) {
        u64 at = tile * PackedLinear::TILE;
        _tile_loadd(4, x + at, 64);
        _tile_loadd(6, w + at, 64);
        _tile_loadd(7, w + panel_size + at, 64);
        _tile_loadd(5, x + panel_size + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float* lower = sums + PackedLinear::TILE_ROWS * stride;
    _tile_stored(0, sums, stride * sizeof(float));
    _tile_stored(1, sums + PackedLinear::PANEL, stride * sizeof(float));
    _tile_stored(2, lower, stride * sizeof(float));
    _tile_stored(3, lower + PackedLinear::PANEL, stride * sizeof(float));
}

inline void multiply(const u16* tiles, u64 rows, const u16* weights, u64 panels, u64 input_tiles, float* sums) {
    u64 stride = panels * PackedLinear::PANEL, panel_size = input_tiles * PackedLinear::TILE;
    configure();
    for (u64 panel = 0; panel < panels; panel += 2) {
        u64 together = panels - panel >= 2 ? 2 : 1;
        const u16* w = weights + panel * panel_size;
        float* out = sums + panel * PackedLinear::PANEL;
        if (rows > PackedLinear::TILE_ROWS && together == 2) {
            compute_four(tiles, w, input_tiles, out, stride);
            continue;
        }
        for (u64 row = 0; row < rows; row += PackedLinear::TILE_ROWS)
            compute_tile(tiles + row / PackedLinear::TILE_ROWS * panel_size, w, together, input_tiles,
                         out + row * stride, stride);
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
