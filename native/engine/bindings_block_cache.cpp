// bindings_block_cache.cpp: the block cache and the prefix hasher for the core, and its count of generated tokens.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <utility>

#include "bindings_engine.h"
#include "prefix_hasher.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

constexpr const char* PUBLISHED_UNUSED = "a block was published that is not in use";

[[noreturn]] void raise_assertion(const char* what) {
    PyErr_SetString(PyExc_AssertionError, what);
    throw nb::python_error();
}

std::vector<BlockHash> parse_hashes(nb::bytes bytes) {
    if (bytes.size() % sizeof(BlockHash) != 0)
        throw std::invalid_argument(
            format("expected hashes of %zu bytes each, got %zu bytes", sizeof(BlockHash), bytes.size()));
    std::vector<BlockHash> hashes(bytes.size() / sizeof(BlockHash));
    if (!hashes.empty()) std::memcpy(hashes.data(), bytes.c_str(), bytes.size());
    return hashes;
}
nb::bytes to_bytes(const BlockHash* hashes, size_t count) {
    return nb::bytes(reinterpret_cast<const char*>(hashes), count * sizeof(BlockHash));
}

using LedgerBytes = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

BlockLedger ledger_of(const LedgerBytes& bytes, u32 num_blocks, u32 num_slots, u32 block_size) {
    u64 nbytes = BlockLedger::nbytes(num_blocks, num_slots, block_size);
    if (bytes.size() != nbytes || reinterpret_cast<uintptr_t>(bytes.data()) % alignof(LedgerEntry) != 0)
        throw std::invalid_argument(format("expected an aligned ledger of %llu bytes, got %zu bytes",
                                           static_cast<unsigned long long>(nbytes), bytes.size()));
    return {reinterpret_cast<LedgerEntry*>(bytes.data()), num_blocks, num_slots, block_size};
}

template <class Number>
nb::object to_array(std::vector<Number> numbers) {
    auto* owned = new std::vector<Number>(std::move(numbers));
    nb::capsule owner(owned, [](void* vector) noexcept { delete static_cast<std::vector<Number>*>(vector); });
    return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

u32 require_below(i64 number, u64 limit, const char* noun) {
    if (number < 0 || static_cast<u64>(number) >= limit)
        throw std::invalid_argument(format("there is no %s %lld", noun, static_cast<long long>(number)));
    return static_cast<u32>(number);
}
u32 require_block(const BlockCache& cache, i64 block) { return require_below(block, cache.num_blocks(), "block"); }
u32 require_slot(const PrefixHasher& hasher, i64 slot) { return require_below(slot, hasher.num_slots(), "slot"); }
void require_slots(const PrefixHasher& hasher, size_t count) {
    if (count != hasher.num_slots())
        throw std::invalid_argument(format("expected a row for each of %u slots, got %zu", hasher.num_slots(), count));
}

// By hashlib, which takes 0.4 us for a block of 16 tokens.
BlockHash hash_block(const BlockHash& parent, const i32* token_ids, u64 num_tokens, const void* extra,
                     u64 extra_nbytes) {
    static const nb::object& sha256 = *new nb::object(nb::module_::import_("hashlib").attr("sha256"));
    u64 ids_nbytes = num_tokens * sizeof(i32);
    auto nbytes = static_cast<Py_ssize_t>(parent.size() + ids_nbytes + extra_nbytes);
    nb::object message = nb::steal(PyBytes_FromStringAndSize(nullptr, nbytes));
    if (!message.is_valid()) throw nb::python_error();
    char* to = PyBytes_AS_STRING(message.ptr());
    std::memcpy(to, parent.data(), parent.size());
    std::memcpy(to + parent.size(), token_ids, ids_nbytes);
    if (extra_nbytes != 0) std::memcpy(to + parent.size() + ids_nbytes, extra, extra_nbytes);
    nb::bytes digest(sha256(message).attr("digest")());
    BlockHash hash;
    if (digest.size() != hash.size()) raise_assertion("a SHA-256 has 32 bytes");
    std::memcpy(hash.data(), digest.c_str(), hash.size());
    return hash;
}

nb::bytes hash_blocks(nb::bytes root, const Int32Array& token_ids, u64 block_size, const nb::sequence& extra) {
    std::vector<BlockHash> chain = parse_hashes(root);
    if (chain.size() != 1 || block_size == 0)
        throw std::invalid_argument("expected one root hash, and a block size above 0");
    u64 num_blocks = token_ids.size() / block_size, num_extra = nb::len(extra);
    if (num_extra != 0 && num_extra != num_blocks)
        throw std::invalid_argument(format("expected none or %llu extra keys, one for each block, got %llu",
                                           (unsigned long long)num_blocks, (unsigned long long)num_extra));
    for (u64 block = 0; block < num_blocks; ++block) {
        nb::bytes keys = num_extra == 0 ? nb::bytes("", 0) : nb::cast<nb::bytes>(extra[block]);
        chain.push_back(
            hash_block(chain.back(), token_ids.data() + block * block_size, block_size, keys.c_str(), keys.size()));
    }
    return to_bytes(chain.data(), chain.size());
}

nb::object count_tokens(nb::ndarray<i32, nb::ndim<1>, nb::c_contig, nb::device::cpu> counts, const Int32Array& limits,
                        const Array<u8, nb::ndim<1>>& stop_bits, const Int64Array& slots, const Int32Array& token_ids) {
    u64 num_slots = std::min(counts.size(), limits.size()), low_bits = stop_bits.size() * 8 - 1;
    if (slots.size() != token_ids.size() || !std::has_single_bit(stop_bits.size()))
        throw std::invalid_argument("expected a token id for each slot, and 2^n bytes of stop bits");
    std::vector<i64> candidates;
    for (u64 row = 0; row < slots.size(); ++row) {
        u32 slot = require_below(slots.data()[row], num_slots, "slot");
        i32 count = ++counts.data()[slot];
        u64 bit = static_cast<u32>(token_ids.data()[row]) & low_bits;
        if (count >= limits.data()[slot] || (stop_bits.data()[bit / 8] >> (bit % 8) & 1) != 0)
            candidates.push_back(static_cast<i64>(row));
    }
    return candidates.empty() ? nb::none() : to_array(std::move(candidates));
}

}  // namespace

void bind_block_cache(nb::module_& m) {
    m.def("hash_blocks", hash_blocks, "root"_a, "token_ids"_a, "block_size"_a, "extra"_a = nb::make_tuple(),
          nb::sig("def hash_blocks(root: bytes, token_ids: numpy.typing.NDArray[numpy.int32], block_size: int, extra: "
                  "collections.abc.Sequence[bytes] = ()) -> bytes"),
          "Returns `root` and the hash of each full block of these ids, 32 bytes each: SHA-256 of the parent's hash, "
          "the ids, and the block's `extra` keys.");

    m.def("count_tokens", count_tokens, "counts"_a.noconvert(), "limits"_a, "stop_bits"_a, "slots"_a, "token_ids"_a,
          nb::sig("def count_tokens(counts: numpy.typing.NDArray[numpy.int32], limits: "
                  "numpy.typing.NDArray[numpy.int32], stop_bits: numpy.typing.NDArray[numpy.uint8], slots: "
                  "numpy.typing.NDArray[numpy.int64], token_ids: numpy.typing.NDArray[numpy.int32]) -> "
                  "numpy.typing.NDArray[numpy.int64] | None"),
          "Adds 1 to the count of each slot. Returns the rows of slots that have reached their limit, and of token "
          "ids that may be stop tokens: the bit that an id's low bits name is set. None: no row.");

    m.def("ledger_nbytes", &BlockLedger::nbytes, "num_blocks"_a, "num_slots"_a = 0, "block_size"_a = 0,
          "Returns the size of the ledger of a cache.");

    nb::class_<BlockCache>(m, "BlockCache",
                           "The blocks of the KV cache by number. A block is in use, or cached (no references, and "
                           "found by its hash), or empty. Every operation takes constant time per block.")
        .def(
            "__init__",
            [](BlockCache* self, u32 num_blocks, std::optional<LedgerBytes> ledger, u32 num_slots, u32 block_size) {
                if (ledger)
                    new (self) BlockCache(num_blocks, ledger_of(*ledger, num_blocks, num_slots, block_size));
                else
                    new (self) BlockCache(num_blocks);
            },
            "num_blocks"_a, "ledger"_a.noconvert() = nb::none(), "num_slots"_a = 0, "block_size"_a = 0,
            nb::keep_alive<1, 3>(),
            nb::sig("def __init__(self, num_blocks: int, ledger: numpy.typing.NDArray[numpy.uint8] | None = None, "
                    "num_slots: int = 0, block_size: int = 0) -> None"),
            "`ledger`: of `ledger_nbytes()`, which outlive the core. The cache begins with the blocks that are valid "
            "there, and keeps the ledger up to date. `num_slots`: for unfinished blocks; 0: they are not in the "
            "ledger.")
        .def_prop_ro("num_adopted", &BlockCache::num_adopted, "Blocks that the cache has begun with.")
        .def_prop_ro("damage", &BlockCache::damage, "Why the ledger was cleared; empty: it was not.")
        .def_prop_ro("num_blocks", &BlockCache::num_blocks)
        .def_prop_ro("num_free", &BlockCache::num_free, "Cached and empty blocks: as many can be taken.")
        .def(
            "ref_count",
            [](const BlockCache& cache, i64 block) { return cache.ref_count(require_block(cache, block)); }, "block"_a)
        .def(
            "match",
            [](BlockCache& cache, nb::bytes hashes) {
                std::vector<i32> blocks;
                u32 block;
                for (const BlockHash& hash : parse_hashes(hashes)) {
                    if (!cache.find(hash, block)) break;
                    blocks.push_back(static_cast<i32>(block));
                }
                return to_array(std::move(blocks));
            },
            "hashes"_a, nb::sig("def match(self, hashes: bytes) -> numpy.typing.NDArray[numpy.int32]"),
            "Returns the blocks with these hashes, up to the first hash that no block has, and adds a reference to "
            "each.")
        .def(
            "take",
            [](BlockCache& cache, u64 count) -> nb::object {
                if (count > cache.num_free()) return nb::none();
                std::vector<i32> blocks(count);
                cache.take(count, blocks.data());
                return to_array(std::move(blocks));
            },
            "count"_a, nb::sig("def take(self, count: int) -> numpy.typing.NDArray[numpy.int32] | None"),
            "Takes `count` blocks with one reference each: empty blocks first, then the least recently used cached "
            "blocks, which lose their hash. None, and nothing is taken, if fewer are free.")
        .def(
            "release",
            [](BlockCache& cache, const Int32Array& blocks) {
                for (size_t i = blocks.size(); i-- > 0;)
                    if (!cache.release(require_block(cache, blocks.data()[i])))
                        raise_assertion("a block was released more often than it was taken");
            },
            "blocks"_a, nb::sig("def release(self, blocks: numpy.typing.NDArray[numpy.int32]) -> None"),
            "Removes a reference from each, the last first: so the end of a prefix is evicted before its beginning, "
            "without which it cannot be found.")
        .def(
            "publish",
            [](BlockCache& cache, i64 block, nb::bytes hash) {
                std::vector<BlockHash> hashes = parse_hashes(hash);
                if (hashes.size() != 1) throw std::invalid_argument("expected one hash");
                if (!cache.publish(require_block(cache, block), hashes[0])) raise_assertion(PUBLISHED_UNUSED);
            },
            "block"_a, "hash"_a,
            "Makes a block in use findable by its hash, unless another block has that hash already.")
        .def(
            "take_tail",
            [](BlockCache& cache, nb::bytes parent, const Int32Array& ids) -> nb::object {
                std::vector<BlockHash> hashes = parse_hashes(parent);
                if (hashes.size() != 1) throw std::invalid_argument("expected one hash");
                u32 block, matched;
                cache.take_tail(hashes[0], ids.data(), static_cast<u32>(ids.size()), block, matched);
                if (matched == 0) return nb::none();
                return nb::make_tuple(block, matched);
            },
            "parent"_a, "ids"_a,
            nb::sig("def take_tail(self, parent: bytes, ids: numpy.typing.NDArray[numpy.int32]) -> tuple[int, int] | "
                    "None"),
            "Takes the unfinished block of a former life that follows the block of the hash `parent` and begins with "
            "the most of these ids. Returns the block and their number; None: there is no block.")
        .def(
            "check",
            [](const BlockCache& cache) {
                if (const char* broken = cache.broken_invariant()) raise_assertion(broken);
            },
            "For tests: raises AssertionError where an invariant is broken.");

    nb::class_<PrefixHasher>(m, "PrefixHasher",
                             "Hashes the blocks of each slot's sequence as they fill, and publishes them in the cache "
                             "once they are computed.")
        .def(
            "__init__",
            [](PrefixHasher* self, BlockCache& cache, u32 num_slots, u32 block_size) {
                new (self) PrefixHasher(cache, num_slots, block_size, &hash_block);
            },
            "cache"_a, "num_slots"_a, "block_size"_a, nb::keep_alive<1, 2>())
        .def(
            "add_sequence",
            [](PrefixHasher& hasher, i64 slot, nb::bytes chain, const Int32Array& tail, nb::bytes extra) {
                std::vector<BlockHash> hashes = parse_hashes(chain);
                if (hashes.empty() || tail.size() >= hasher.block_size())
                    throw std::invalid_argument("expected a root hash, and a tail that does not fill a block");
                const u8* keys = reinterpret_cast<const u8*>(extra.c_str());
                hasher.add_sequence(require_slot(hasher, slot), std::move(hashes), tail.data(), tail.size(),
                                    {keys, keys + extra.size()});
            },
            "slot"_a, "chain"_a, "tail"_a, "extra"_a = nb::bytes("", 0),
            nb::sig("def add_sequence(self, slot: int, chain: bytes, tail: numpy.typing.NDArray[numpy.int32], extra: "
                    "bytes = b'') -> None"),
            "Puts a new sequence into the slot: the `chain` of its prompt by hash_blocks(), the `tail` of ids after "
            "its full blocks, and the `extra` keys of the block that the tail begins.")
        .def(
            "allocate",
            [](PrefixHasher& hasher, i64 slot, u64 num_cached) {
                hasher.allocate(require_slot(hasher, slot), num_cached);
            },
            "slot"_a, "num_cached"_a,
            "The sequence has been given blocks, also after a preemption; the first `num_cached` are published "
            "already.")
        .def(
            "schedule",
            [](PrefixHasher& hasher, i64 slot, i64 step) { hasher.schedule(require_slot(hasher, slot), step); },
            "slot"_a, "step"_a, "Sets the step that first uses the blocks given by allocate().")
        .def(
            "finish", [](PrefixHasher& hasher, i64 slot) { hasher.finish(require_slot(hasher, slot)); }, "slot"_a,
            "Ends the sequence: tokens that still arrive for it are ignored.")
        .def(
            "first_step",
            [](const PrefixHasher& hasher, i64 slot) { return hasher.first_step(require_slot(hasher, slot)); },
            "slot"_a, "Returns the sequence's first step; 2^63 - 1 before it is scheduled and after its end.")
        .def(
            "num_tokens",
            [](const PrefixHasher& hasher, i64 slot) { return hasher.num_tokens(require_slot(hasher, slot)); },
            "slot"_a, "Returns how many tokens of the sequence are known, the prompt's included.")
        .def(
            "hashes",
            [](const PrefixHasher& hasher, i64 slot) {
                const std::vector<BlockHash>& chain = hasher.chain(require_slot(hasher, slot));
                return to_bytes(chain.data() + 1, chain.size() - 1);
            },
            "slot"_a, nb::sig("def hashes(self, slot: int) -> bytes"), "Returns the hashes of its full blocks.")
        .def(
            "publish",
            [](PrefixHasher& hasher, i64 step, const Int32Array& num_computed, const Array<u8, nb::ndim<1>>& status,
               u8 running, const Array<i32, nb::ndim<2>>& block_tables) {
                require_slots(hasher, num_computed.size());
                require_slots(hasher, status.size());
                require_slots(hasher, block_tables.shape(0));
                u64 width = block_tables.shape(1);
                bool are_in_use = hasher.publish(
                    step, num_computed.data(), [&](u32 slot) { return status.data()[slot] == running; },
                    [&](u32 slot, u32 index) {
                        if (index >= width)
                            throw std::invalid_argument(format("there is no block %u of slot %u", index, slot));
                        return require_block(hasher.cache(), block_tables.data()[slot * width + index]);
                    });
                if (!are_in_use) raise_assertion(PUBLISHED_UNUSED);
            },
            "step"_a, "num_computed"_a, "status"_a, "running"_a, "block_tables"_a,
            nb::sig("def publish(self, step: int, num_computed: numpy.typing.NDArray[numpy.int32], status: "
                    "numpy.typing.NDArray[numpy.uint8], running: int, block_tables: numpy.typing.NDArray[numpy.int32]) "
                    "-> None"),
            "The step is done, and with it `num_computed` tokens of each slot: publishes the blocks that are full by "
            "it. Skips slots with a `status` other than `running`, and those that got their blocks after that step.")
        .def(
            "append",
            [](PrefixHasher& hasher, i64 step, const Int64Array& slots, const Int32Array& token_ids) -> nb::object {
                if (slots.size() != token_ids.size()) throw std::invalid_argument("expected a token id for each slot");
                for (size_t row = 0; row < slots.size(); ++row) require_slot(hasher, slots.data()[row]);
                if (hasher.append(step, slots.data(), token_ids.data(), slots.size())) return nb::none();
                std::vector<i64> alive;
                for (size_t row = 0; row < slots.size(); ++row)
                    if (hasher.first_step(require_slot(hasher, slots.data()[row])) <= step)
                        alive.push_back(static_cast<i64>(row));
                return to_array(std::move(alive));
            },
            "step"_a, "slots"_a, "token_ids"_a,
            nb::sig("def append(self, step: int, slots: numpy.typing.NDArray[numpy.int64], token_ids: "
                    "numpy.typing.NDArray[numpy.int32]) -> numpy.typing.NDArray[numpy.int64] | None"),
            "Appends the id that the step sampled for each slot. Returns the rows of sequences that have not "
            "finished before; None: all of them.")
        .def(
            "filled",
            [](PrefixHasher& hasher) {
                nb::list slots;
                hasher.report_filled([&](u32 slot, u64 num_tokens) { slots.append(nb::make_tuple(slot, num_tokens)); });
                return slots;
            },
            nb::sig("def filled(self) -> list[tuple[int, int]]"),
            "Returns (slot, tokens in its full blocks) of each sequence that has filled a block since the last call.");
}

}  // namespace penstock::engine
