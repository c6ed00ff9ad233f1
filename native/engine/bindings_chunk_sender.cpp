// bindings_chunk_sender.cpp: the chunks of streamed answers, from the columns of a Delta to sockets.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings_engine.h"
#include "chunk_sender.h"
#include "gil.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

using Words = nb::ndarray<u64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = Array<u16, nb::ndim<1>>;

struct OwnedCounters {
    OwnedCounters(Words words, u64 tokens, u64 histogram, const std::vector<double>& bounds)
        : words(std::move(words)), counters(at(tokens, 1), at(histogram, bounds.size() + 2), bounds) {}

    Counter* at(u64 word, u64 count) {
        if (word > words.size() || count > words.size() - word)
            throw std::invalid_argument(format("word %llu is beyond the row", static_cast<unsigned long long>(word)));
        return reinterpret_cast<Counter*>(words.data() + word);
    }

    Words words;
    TokenCounters counters;
};

nb::object take(ChunkSender& sender, i32 request) {
    std::optional<StreamProgress> taken = sender.take(request);
    if (!taken) return nb::none();
    nb::list ids;
    for (i32 id : taken->ids) ids.append(id);
    return nb::make_tuple(ids, taken->tokens, taken->last);
}

nb::object send(ChunkSender& sender, u64 rows, const Int32Array& numbers, const nb::bytes& text,
                const std::optional<Rows>& counts, const std::optional<Rows>& samples,
                const std::optional<Rows>& finished) {
    if (numbers.size() / 2 < rows || (counts && counts->size() != rows) || (samples && samples->size() != rows))
        throw std::invalid_argument(format("expected columns of %llu rows", static_cast<unsigned long long>(rows)));
    DeltaRows delta{rows,
                    numbers.data(),
                    numbers.size(),
                    text.c_str(),
                    text.size(),
                    counts ? counts->data() : nullptr,
                    samples ? samples->data() : nullptr,
                    finished ? finished->data() : nullptr,
                    finished ? finished->size() : 0};
    std::vector<RowLeft> left;
    std::vector<TextRest> rests;
    {
        std::optional<python::GilRelease> released;  // another thread may keep the interpreter for 5 ms then
        if (sender.size() != 0) released.emplace();
        sender.send(delta, left, rests);
    }
    nb::list rows_left, texts;
    for (const RowLeft& row : left)
        rows_left.append(nb::make_tuple(row.row, row.request, row.sample, row.text_at, row.nbytes, row.id_at, row.ids));
    for (const TextRest& rest : rests) texts.append(nb::make_tuple(rest.request, rest.text_at, rest.nbytes, rest.sent));
    return nb::make_tuple(rows_left, texts);
}

}  // namespace

void bind_chunk_sender(nb::module_& m) {
    nb::class_<OwnedCounters>(m, "TokenCounters", "Counters of an engine's tokens, in the row of a server process.")
        .def(nb::init<Words, u64, u64, const std::vector<double>&>(), "words"_a, "tokens"_a, "histogram"_a, "bounds"_a,
             nb::sig("def __init__(self, words: Any, tokens: int, histogram: int, bounds: "
                     "collections.abc.Sequence[float]) -> None"),
             "`words`: of 64 bits, which stay in memory. `tokens`, `histogram`: indices of words. The histogram has "
             "the seconds from one token to the next, with a "
             "sum in nanoseconds.");
    nb::class_<ChunkSender>(m, "ChunkSender",
                            "The streams of a server process that are written to sockets without the interpreter.")
        .def(nb::init<>())
        .def(
            "add",
            [](ChunkSender& sender, i32 request, int fd, bool is_chunked, bool keeps_ids, const OwnedCounters& counters,
               double last) { sender.add(request, fd, is_chunked, keeps_ids, &counters.counters, last); },
            nb::keep_alive<1, 6>(), "request"_a, "fd"_a, "is_chunked"_a, "keeps_ids"_a, "counters"_a, "last"_a,
            "Adds a stream of a connection without unsent bytes. `is_chunked`: text is framed as a chunk of HTTP/1.1. "
            "`last`: when its last token was passed on, in seconds of `time.monotonic`.")
        .def("take", &take, "request"_a, nb::sig("def take(self, request: int) -> tuple[list[int], int, float] | None"),
             "Returns the ids and the number of tokens since the last call, and when the last token was passed on. "
             "None: the stream was not added.")
        .def("remove", &ChunkSender::remove, "request"_a)
        .def("__len__", &ChunkSender::size)
        .def("send", &send, "rows"_a, "numbers"_a, "text"_a, "counts"_a.none() = nb::none(),
             "samples"_a.none() = nb::none(), "finished"_a.none() = nb::none(),
             nb::sig("def send(self, rows: int, numbers: numpy.typing.NDArray[numpy.int32], text: bytes, counts: "
                     "numpy.typing.NDArray[numpy.uint16] | None = None, samples: numpy.typing.NDArray[numpy.uint16] | "
                     "None = None, finished: numpy.typing.NDArray[numpy.uint16] | None = None) -> "
                     "tuple[list[tuple[int, int, int, int, int, int, int]], list[tuple[int, int, int, int]]]"),
             "Sends the rows of a Delta that are of added streams, but for the last row of a stream. Returns the other "
             "rows: row, request, sample, begin and length of the text, index of the first id, and number of ids; and "
             "rests, which sockets did not take: request, begin and length of the text, and sent bytes of its frame. A "
             "stream with a rest is removed before it is added again.");
}

}  // namespace penstock::engine
