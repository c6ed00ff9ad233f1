// packed_linear_fours.h: `multiply` for kernels that compute up to four rows by one panel at a time.
//
// Included after a template `compute_rows<ROWS>`, and before packed_linear_panels.h.
#include "packed_linear.h"

namespace penstock::engine {
namespace {

inline void multiply(const u16* tiles, u64 rows, const u16* weights, u64 panels, u64 input_tiles, float* sums) {
    u64 stride = panels * PackedLinear::PANEL, panel_size = input_tiles * PackedLinear::TILE;
    for (u64 panel = 0; panel < panels; ++panel) {
        const u16* w = weights + panel * panel_size;
        for (u64 row = 0; row < rows; row += 4) {
            const u16* x = tiles + row / PackedLinear::TILE_ROWS * panel_size +
                           row % PackedLinear::TILE_ROWS * PackedLinear::TILE_INPUTS;
            float* out = sums + row * stride + panel * PackedLinear::PANEL;
            if (rows - row == 1)
                compute_rows<1>(x, w, input_tiles, out, stride);
            else if (rows - row == 2)
                compute_rows<2>(x, w, input_tiles, out, stride);
            else if (rows - row == 3)
                compute_rows<3>(x, w, input_tiles, out, stride);
            else
                compute_rows<4>(x, w, input_tiles, out, stride);
        }
    }
}

}  // namespace
}  // namespace penstock::engine
