// bindings_growth.cpp: blocks that are found by what lies in them, and rows that fill them.
#include <nanobind/ndarray.h>

#include <bit>
#include <utility>

#include "growth.h"
#include "python.h"

namespace penstock::python {

using namespace nb::literals;

namespace {

template <class Number, class... Shape>
using Column = nb::ndarray<const Number, Shape..., nb::c_contig, nb::device::cpu>;
using Numbers = Column<i32, nb::ndim<1>>;

constexpr const char* PUBLISHED_UNUSED = "a block is published that nobody uses";

[[noreturn]] void assertion(const char* what) {
    PyErr_SetString(PyExc_AssertionError, what);
    throw nb::python_error();
}

// As many digests, one after the other.
std::vector<Digest> digests_of(nb::bytes bytes) {
    if (bytes.size() % sizeof(Digest) != 0)
        throw Error(Fault::value, format("hashes have %zu bytes each, not %zu in all", sizeof(Digest), bytes.size()));
    std::vector<Digest> out(bytes.size() / sizeof(Digest));
    if (!out.empty()) std::memcpy(out.data(), bytes.c_str(), bytes.size());
    return out;
}
nb::bytes bytes_of(const Digest* digests, size_t count) {
    return nb::bytes(reinterpret_cast<const char*>(digests), count * sizeof(Digest));
}

template <class Number>
nb::object array_of(std::vector<Number> numbers) {
    auto* owned = new std::vector<Number>(std::move(numbers));
    nb::capsule owner(owned, [](void* at) noexcept { delete static_cast<std::vector<Number>*>(at); });
    return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

u32 block_of(const CachedBlocks& cache, i64 block) {
    if (block < 0 || block >= cache.blocks())
        throw Error(Fault::value, format("there is no block %lld", static_cast<long long>(block)));
    return static_cast<u32>(block);
}
u32 row_of(const Growth& growth, i64 row) {
    if (row < 0 || row >= growth.rows())
        throw Error(Fault::value, format("there is no row %lld", static_cast<long long>(row)));
    return static_cast<u32>(row);
}
void require_rows(const Growth& growth, size_t rows) {
    if (rows != growth.rows()) throw Error(Fault::value, format("expected %u rows, got %zu", growth.rows(), rows));
}

// The hashes of all full blocks of these numbers, after that which the first of them follows. `more`: what else lies
// in each block; empty: in none.
nb::bytes chain(nb::bytes before, const Numbers& numbers, u64 size, const nb::sequence& more) {
    std::vector<Digest> out = digests_of(before);
    if (out.size() != 1 || size == 0)
        throw Error(Fault::value, "expected one hash to begin with, and blocks of a size");
    u64 blocks = numbers.size() / size, others = nb::len(more);
    if (others != 0 && others != blocks)
        throw Error(Fault::value, format("expected what lies in %llu blocks", (unsigned long long)blocks));
    for (u64 block = 0; block < blocks; ++block) {
        nb::bytes its = others == 0 ? nb::bytes("", 0) : nb::cast<nb::bytes>(more[block]);
        out.push_back(
            hash_after(out.back(), numbers.data() + block * size, size * sizeof(i32), its.c_str(), its.size()));
    }
    return bytes_of(out.data(), out.size());
}

// Where in these columns a row has reached its limit with this number, or may end by it.
nb::object count_up(nb::ndarray<i32, nb::ndim<1>, nb::c_contig, nb::device::cpu> counts, const Numbers& limits,
                    const Column<u8, nb::ndim<1>>& marks, const Column<i64, nb::ndim<1>>& rows,
                    const Numbers& numbers) {
    u64 most = std::min(counts.size(), limits.size()), low_bits = marks.size() * 8 - 1;
    if (rows.size() != numbers.size() || !std::has_single_bit(marks.size()))
        throw Error(Fault::value, "expected a number for each row, and a power of two of marks");
    std::vector<i64> found;
    for (u64 i = 0; i < rows.size(); ++i) {
        auto row = static_cast<u64>(rows.data()[i]);
        if (row >= most) throw Error(Fault::value, format("there is no row %lld", static_cast<long long>(row)));
        i32 after = ++counts.data()[row];
        u64 bit = static_cast<u32>(numbers.data()[i]) & low_bits;
        if (after >= limits.data()[row] || (marks.data()[bit / 8] >> (bit % 8) & 1) != 0)
            found.push_back(static_cast<i64>(i));
    }
    return found.empty() ? nb::none() : array_of(std::move(found));
}

}  // namespace

void bind_growth(nb::module_& m) {
    m.def(
        "chain", chain, "before"_a, "numbers"_a, "size"_a, "more"_a = nb::make_tuple(),
        nb::sig("def chain(before: bytes, numbers: numpy.typing.NDArray[numpy.int32], size: int, more: "
                "collections.abc.Sequence[bytes] = ()) -> bytes"),
        "`before`, and then the hash of each full block of `size` numbers: SHA-256 of the hash before it, the numbers "
        "and what else lies there, one `more` for each block. 32 bytes each.");

    m.def("count_up", count_up, "counts"_a.noconvert(), "limits"_a, "marks"_a, "rows"_a, "numbers"_a,
          nb::sig("def count_up(counts: numpy.typing.NDArray[numpy.int32], limits: numpy.typing.NDArray[numpy.int32], "
                  "marks: numpy.typing.NDArray[numpy.uint8], rows: numpy.typing.NDArray[numpy.int64], numbers: "
                  "numpy.typing.NDArray[numpy.int32]) -> numpy.typing.NDArray[numpy.int64] | None"),
          "Counts one more of each row. Returns where in these columns a row has reached its limit, or the bit "
          "that the low bits of its number name is marked; None: nowhere.");

    nb::class_<CachedBlocks>(m, "BlockCache",
                             "Blocks, by number: each is in use by somebody, or kept (nobody uses it, and it can be "
                             "found), or empty. All operations take the same time for each block, however many there "
                             "are.")
        .def(nb::init<u32>(), "blocks"_a)
        .def_prop_ro("blocks", &CachedBlocks::blocks)
        .def_prop_ro("free", &CachedBlocks::free, "How many can be taken.")
        .def(
            "references", [](const CachedBlocks& c, i64 block) { return c.references[block_of(c, block)]; }, "block"_a,
            "How many use it.")
        .def(
            "match",
            [](CachedBlocks& c, nb::bytes hashes) {
                std::vector<i32> found;
                u32 block;
                for (const Digest& digest : digests_of(hashes)) {
                    if (!c.find(digest, block)) break;
                    found.push_back(static_cast<i32>(block));
                }
                return array_of(std::move(found));
            },
            "hashes"_a, nb::sig("def match(self, hashes: bytes) -> numpy.typing.NDArray[numpy.int32]"),
            "The blocks in which these lie, up to the first that nobody has. Each has one user more.")
        .def(
            "take",
            [](CachedBlocks& c, u64 count) -> nb::object {
                if (count > c.free()) return nb::none();
                std::vector<i32> out(count);
                c.take(count, out.data());
                return array_of(std::move(out));
            },
            "count"_a, nb::sig("def take(self, count: int) -> numpy.typing.NDArray[numpy.int32] | None"),
            "So many blocks for one user each; None, and nothing is taken, if there are fewer. Empty ones first; then "
            "those that nobody has used for the longest time, which can be found no more.")
        .def(
            "release",
            [](CachedBlocks& c, const Numbers& blocks) {
                for (size_t i = blocks.size(); i-- > 0;)
                    if (!c.release(block_of(c, blocks.data()[i])))
                        assertion("a block was released more often than it was taken");
            },
            "blocks"_a, nb::sig("def release(self, blocks: numpy.typing.NDArray[numpy.int32]) -> None"),
            "One user less of each. Of a prefix the last are emptied before the first, without which they are lost.")
        .def(
            "publish",
            [](CachedBlocks& c, i64 block, nb::bytes hash) {
                std::vector<Digest> digests = digests_of(hash);
                if (digests.size() != 1) throw Error(Fault::value, "expected one hash");
                if (!c.publish(block_of(c, block), digests[0])) assertion(PUBLISHED_UNUSED);
            },
            "block"_a, "hash"_a,
            "What lies in the block, which somebody uses, can be found by its hash from now on. If it lies in another "
            "block already, that one is found.")
        .def(
            "check",
            [](const CachedBlocks& c) {
                if (const char* wrong = c.wrong()) assertion(wrong);
            },
            "For tests: raises AssertionError where the parts contradict each other.");

    nb::class_<Growth>(m, "Growth",
                       "Rows of numbers that grow by one at a time, and lie in blocks of a cache: when one has become "
                       "full, its hash is computed, and from then on the block is found by it.")
        .def(nb::init<CachedBlocks&, u32, u32>(), "cache"_a, "rows"_a, "size"_a, nb::keep_alive<1, 2>())
        .def(
            "join",
            [](Growth& g, i64 row, nb::bytes chain, const Numbers& tail, nb::bytes more) {
                std::vector<Digest> digests = digests_of(chain);
                if (digests.empty() || tail.size() >= g.size())
                    throw Error(Fault::value, "expected a hash to begin with, and a tail that does not fill a block");
                const u8* at = reinterpret_cast<const u8*>(more.c_str());
                g.join(row_of(g, row), std::move(digests), tail.data(), tail.size(), {at, at + more.size()});
            },
            "row"_a, "chain"_a, "tail"_a, "more"_a = nb::bytes("", 0),
            nb::sig("def join(self, row: int, chain: bytes, tail: numpy.typing.NDArray[numpy.int32], more: bytes = "
                    "b'') -> None"),
            "It begins anew: with a `chain`, the numbers after its full blocks, and what else lies where they lie.")
        .def(
            "begin", [](Growth& g, i64 row, u64 published) { g.begin(row_of(g, row), published); }, "row"_a,
            "published"_a, "It has got blocks, so many of which are published.")
        .def(
            "since", [](Growth& g, i64 row, i64 step) { g.since(row_of(g, row), step); }, "row"_a, "step"_a,
            "The step with which it got them; with the first of those it is born.")
        .def(
            "end", [](Growth& g, i64 row) { g.end(row_of(g, row)); }, "row"_a,
            "What comes for it from now on is nobody's.")
        .def(
            "born", [](const Growth& g, i64 row) { return g.born(row_of(g, row)); }, "row"_a,
            "The step with which it was born; later than any other: it has not been, or has ended.")
        .def(
            "count", [](const Growth& g, i64 row) { return g.count(row_of(g, row)); }, "row"_a,
            "How many of its numbers are known.")
        .def(
            "hashes",
            [](const Growth& g, i64 row) {
                const std::vector<Digest>& chain = g.chain(row_of(g, row));
                return bytes_of(chain.data() + 1, chain.size() - 1);
            },
            "row"_a, nb::sig("def hashes(self, row: int) -> bytes"), "Of its full blocks, one after the other.")
        .def(
            "publish",
            [](Growth& g, i64 step, const Numbers& computed, const Column<u8, nb::ndim<1>>& status, u8 running,
               const Column<i32, nb::ndim<2>>& table) {
                require_rows(g, computed.size());
                require_rows(g, status.size());
                require_rows(g, table.shape(0));
                u64 columns = table.shape(1);
                bool are_used = g.publish(
                    step, computed.data(), [&](u32 row) { return status.data()[row] == running; },
                    [&](u32 row, u32 at) {
                        if (at >= columns) throw Error(Fault::value, format("row %u has no block %u", row, at));
                        return block_of(g.cache(), table.data()[row * columns + at]);
                    });
                if (!are_used) assertion(PUBLISHED_UNUSED);
            },
            "step"_a, "computed"_a, "status"_a, "running"_a, "table"_a,
            nb::sig("def publish(self, step: int, computed: numpy.typing.NDArray[numpy.int32], "
                    "status: numpy.typing.NDArray[numpy.uint8], running: int, table: "
                    "numpy.typing.NDArray[numpy.int32]) -> None"),
            "A step is done, and with it so many numbers of each row are `computed`: blocks that are full by it are "
            "published. Whose `status` is not `running`, or got its blocks later, has none of those any more.")
        .def(
            "keep",
            [](Growth& g, i64 step, const Column<i64, nb::ndim<1>>& rows, const Numbers& numbers) -> nb::object {
                if (rows.size() != numbers.size()) throw Error(Fault::value, "expected a number for each row");
                for (size_t i = 0; i < rows.size(); ++i) row_of(g, rows.data()[i]);
                if (g.keep(step, rows.data(), numbers.data(), rows.size())) return nb::none();
                std::vector<i64> theirs;
                for (size_t i = 0; i < rows.size(); ++i)
                    if (g.born(row_of(g, rows.data()[i])) <= step) theirs.push_back(static_cast<i64>(i));
                return array_of(std::move(theirs));
            },
            "step"_a, "rows"_a, "numbers"_a,
            nb::sig("def keep(self, step: int, rows: numpy.typing.NDArray[numpy.int64], numbers: "
                    "numpy.typing.NDArray[numpy.int32]) -> numpy.typing.NDArray[numpy.int64] | None"),
            "A step has brought a number for each of these rows. Returns where in these columns it was theirs, as some "
            "have ended; None: everywhere.")
        .def(
            "filled",
            [](Growth& g) {
                nb::list out;
                g.tell_full([&](u32 row, u64 numbers) { out.append(nb::make_tuple(row, numbers)); });
                return out;
            },
            nb::sig("def filled(self) -> list[tuple[int, int]]"),
            "Rows of which blocks have become full since this was asked last, and how many numbers are in all of "
            "their full ones.");
}

}  // namespace penstock::python
