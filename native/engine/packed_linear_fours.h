// packed_linear_fours.h: `multiply` for kernels that compute up to four rows by one panel at a time.
//
// Included after a template `compute_rows<ROWS>`, and before packed_linear_panels.h.
#include "packed_linear.h"

namespace penstock::engine {
namespace {

inline void multiply(const Product& p, float* sums) {
    u64 stride = p.panels * PackedLinear::PANEL;
    for (u64 panel = 0; panel < p.panels; ++panel) {
        const u16* w = p.weights_of(panel);
        for (u64 row = 0; row < p.rows; row += 4) {
            const u16* x = p.inputs_of(row);
            float* out = sums + row * stride + panel * PackedLinear::PANEL;
            if (p.rows - row == 1)
                compute_rows<1>(x, w, p.input_tiles, p.adds, out, stride);
            else if (p.rows - row == 2)
                compute_rows<2>(x, w, p.input_tiles, p.adds, out, stride);
            else if (p.rows - row == 3)
                compute_rows<3>(x, w, p.input_tiles, p.adds, out, stride);
            else
                compute_rows<4>(x, w, p.input_tiles, p.adds, out, stride);
        }
    }
}

}  // namespace
}  // namespace penstock::engine
