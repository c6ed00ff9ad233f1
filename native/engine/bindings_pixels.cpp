// bindings_pixels.cpp: resizing of frames, and patches of frames, as arrays.
#include <nanobind/stl/pair.h>

#include <stdexcept>

#include "bindings_engine.h"
#include "gil.h"
#include "pixels.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using Frames = Array<u8, nb::shape<-1, -1, -1, COLOURS>>;
using FramesToWrite = nb::ndarray<u8, nb::shape<-1, -1, -1, COLOURS>, nb::c_contig, nb::device::cpu>;
using Weights = Array<i16, nb::ndim<2>>;
using Numbers = Array<float, nb::shape<COLOURS, LEVELS>>;
using NumbersToWrite = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool is_right, const char* expected) {
    if (!is_right) throw std::invalid_argument(expected);
}

void resize(const Frames& frames, const Int32Array& first, const Weights& weights, u32 shift, bool is_along_width,
            const FramesToWrite& out) {
    u64 size = first.shape(0), taps = weights.shape(1), from = frames.shape(is_along_width ? 2 : 1);
    require(
        out.shape(0) == frames.shape(0) && out.shape(is_along_width ? 1 : 2) == frames.shape(is_along_width ? 1 : 2),
        "expected frames to write of the shape of the frames but for the resized axis");
    require(weights.shape(0) == size && out.shape(is_along_width ? 2 : 1) == size,
            "expected a first pixel and weights for each pixel of the resized axis");
    require(shift >= 1 && shift <= 22, "expected weights with 1 to 22 binary places");
    require(taps >= 1, "expected at least one weight for each pixel");
    for (u64 i = 0; i < size; ++i)
        require(first.data()[i] >= 0 && static_cast<u64>(first.data()[i]) + taps <= from,
                "expected weights for pixels of the frames only");
    python::GilRelease released;
    compute_resize({is_along_width, frames.data(), frames.shape(0), frames.shape(1), frames.shape(2), out.data(), size,
                    first.data(), taps, weights.data(), shift});
}

void patches(const Frames& frames, const Numbers& numbers, std::pair<u64, u64> patch, u64 merge, u64 group,
             const NumbersToWrite& out) {
    auto [height, width] = patch;
    require(height > 0 && width > 0 && merge > 0 && group > 0, "expected patches of at least one pixel and frame");
    u64 tall = height * merge, wide = width * merge, count = frames.shape(0);
    require(frames.shape(1) % tall == 0 && frames.shape(2) % wide == 0, "expected frames of whole tokens");
    u64 rows = frames.shape(1) / tall, columns = frames.shape(2) / wide;
    require(out.shape(0) == (count + group - 1) / group * rows * columns * merge * merge &&
                out.shape(1) == COLOURS * group * height * width,
            "expected room for all patches of the frames, and no more");
    python::GilRelease released;
    write_patches({frames.data(), count, rows, columns, merge, group, height, width, numbers.data(), out.data()});
}

}  // namespace

void bind_pixels(nb::module_& m) {
    m.def(
        "resize", &resize, "frames"_a, "first"_a, "weights"_a, "shift"_a, "is_along_width"_a, "out"_a,
        "Resizes frames [count, height, width, 3] along one axis. Each result is a sum of pixels from `first` on times "
        "`weights`, divided by 1 << shift.");
    m.def(
        "write_patches", &patches, "frames"_a, "numbers"_a, "patch"_a, "merge"_a, "group"_a, "out"_a,
        "Writes the patches of frames [count, height, width, 3], as Qwen-VL orders them: the number of each colour and "
        "byte, from `numbers` [3, 256]. `patch`: height and width. The last frame fills its group.");
}

}  // namespace penstock::engine
