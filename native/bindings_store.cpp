// bindings_store.cpp: blocks that are kept under a key.
#include "python.h"

using namespace penstock;
using namespace penstock::python;
using namespace nb::literals;

namespace {

Key key_of(nb::handle bytes) {
    if (!PyBytes_CheckExact(bytes.ptr()) || PyBytes_GET_SIZE(bytes.ptr()) != sizeof(Key)) {
        PyErr_Format(PyExc_ValueError, "expected a key of %zu bytes (content_key makes one), got %.80R", sizeof(Key),
                     bytes.ptr());
        throw nb::python_error();
    }
    Key key;
    std::memcpy(&key, PyBytes_AS_STRING(bytes.ptr()), sizeof key);
    return key;
}

struct Keeper {
    std::shared_ptr<Attachment> by;

    explicit Keeper(std::shared_ptr<Attachment> attachment) : by(std::move(attachment)) {
        by->require_ours();
        Store{*by};  // there is one
    }
    Store store() {
        by->require_ours();
        return Store(*by);
    }
    // Returns the store if begin() gave this lease to be written, and it is neither committed nor abandoned.
    Store store_of(const Lease& lease) {
        by->require_ours();
        lease.require();
        if (lease.by != by || !lease.is_filling)
            throw Error(Fault::value, "expected a lease of a value that this store lets be written, got another lease");
        return Store(*by);
    }
    // The peer that is writing the value under this key, for an error message.
    std::string writer(const Key& key) {
        for (const auto& item : Store(*by).stats().items)
            if (item.is_filling && std::memcmp(&item.key, &key, sizeof key) == 0 && item.taker < by->shape().max_peers)
                return by->describe(item.taker);
        return "another process";
    }
};

// bytes: None: a block without a key, which is neither committed nor abandoned.
nb::tuple begin(Keeper& keeper, nb::handle bytes, u64 nbytes, nb::handle timeout) {
    constexpr u64 LOOK_AGAIN_NS = 50'000'000;  // memory of the machine comes back, and nothing says so
    bool has_key = !bytes.is_none();
    Key key = has_key ? key_of(bytes) : Key{};
    Store store = keeper.store();
    u64 deadline = deadline_of(timeout), started = now_ns();
    struct Waiting {  // for room, seen from outside
        Shared<u64>& since;
        bool is_set = false;
        void set() {
            if (!std::exchange(is_set, true)) since.store(now_ns(), RELAXED);
        }
        ~Waiting() {
            if (is_set) since.store(0, RELAXED);
        }
    } waiting{keeper.by->peer(keeper.by->slot()).take_since_ns};
    Spinner spinner(Latency::eco);
    Waits waits{};
    Atomic<bool> never{false};
    if (nbytes > MAX_NBYTES) nbytes = MAX_NBYTES;
    Extent extent;
    u32 fills_before = 0, returns = 0;
    Store::Begun begun = Store::Begun::fill;
    bool is_full = false;
    auto attempt = [&] {
        returns = store.pool().returns();
        returns -= store.pool().fruitless_returns();
        is_full = false;
        try {
            if (has_key)
                begun = store.begin(key, nbytes, extent, fills_before, deadline);
            else
                store.take(nbytes, extent, deadline);
        } catch (const Error& error) {
            if (error.fault != Fault::memory_exhausted || now_ns() >= deadline || nbytes > store.pool().nbytes()) throw;
            is_full = true;
            waiting.set();
        }
        return is_full || begun == Store::Begun::wait;
    };
    bool must_wait;
    if (nbytes < LONG_COPY) {
        must_wait = attempt();
    } else {  // pages may be claimed
        GilRelease released;
        must_wait = attempt();
    }
    while (must_wait) {
        if (now_ns() >= deadline && !is_full)  // when full, the next attempt throws and names the holders
            throw Error(Fault::timeout, format("what '%s' keeps under this key is being written by %s for %s",
                                               keeper.by->segment().name().c_str(), keeper.writer(key).c_str(),
                                               in_seconds(now_ns() - started).c_str()));
        Woken woken;
        {
            // Woken whenever anything is written or comes back: only for what was waited for is the interpreter asked.
            GilRelease released;
            do {
                u64 until = store.pool().is_growing() ? std::min(deadline, now_ns() + LOOK_AGAIN_NS) : deadline;
                // A return that an attempt has made, as there were no pages, is no reason to try again.
                u32 expected = returns + store.pool().fruitless_returns();
                woken = is_full ? store.pool().wait_for_return(expected, until, spinner, waits, never)
                                : store.wait_for_fill(fills_before, deadline, spinner, waits);
                must_wait = attempt();
            } while (must_wait && woken == Woken::ready && now_ns() < deadline);
        }
        // What was begun must not be lost on the way: with it, a signal is seen after the return.
        if (woken == Woken::interrupted && must_wait) check_signals();
    }
    bool is_new = begun == Store::Begun::fill;
    nb::object lease = make_lease(keeper.by, extent, is_new, is_new && has_key);
    return nb::make_tuple(is_new, lease);
}

// After a commit nothing can write what other peers read: a lease with views is refused, and the lease is read-only.
bool commit(Keeper& keeper, Lease& lease) {
    Store store = keeper.store_of(lease);
    if (lease.exports != 0) {
        PyErr_Format(PyExc_BufferError, "the lease has %d views, which could still write: drop them first",
                     lease.exports);
        throw nb::python_error();
    }
    lease.is_writable = false;  // first: while a lock is waited for, other threads may ask for a view
    bool is_there;
    try {
        is_there = store.commit(lease.extent);
    } catch (...) {
        lease.is_writable = true;
        throw;
    }
    lease.is_filling = false;
    lease.at =
        const_cast<u8*>(keeper.by->segment().read_at(keeper.by->segment().geometry().pool_data + lease.extent.offset));
    return is_there;
}

nb::dict stats_of(Keeper& keeper) {
    keeper.by->require_ours();
    StoreStats s = Store(*keeper.by).stats();
    nb::dict out;
    out["hits"] = s.hits;
    out["misses"] = s.misses;
    out["puts"] = s.puts;
    out["evictions"] = s.evictions;
    out["evicted_nbytes"] = s.evicted_nbytes;
    out["fills_awaited"] = s.fills_awaited;
    out["abandoned"] = s.abandoned;
    nb::list items;
    for (const auto& item : s.items)
        items.append(nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(&item.key), sizeof item.key), item.nbytes,
                                    item.hits, item.holders, static_cast<double>(item.age_ns) / 1e9,
                                    static_cast<double>(item.idle_ns) / 1e9, item.is_filling));
    out["items"] = items;
    return out;
}

}  // namespace

void penstock::python::bind_store(nb::module_& m) {
    m.attr("KEY_NBYTES") = sizeof(Key);
    nb::class_<Keeper>(m, "Store", "Blocks of a pool that are kept under a key after their last lease.")
        .def(nb::new_([](const std::shared_ptr<Attachment>& by) { return new Keeper(by); }), "attachment"_a)
        .def(
            "get",
            [](Keeper& keeper, nb::handle key) -> nb::object {
                Extent extent;
                if (!keeper.store().get(key_of(key), extent)) return nb::none();
                return make_lease(keeper.by, extent, false);
            },
            "key"_a.none(), nb::sig("def get(self, key: bytes) -> BlockLease | None"))
        .def(
            "get_value",
            [](Keeper& keeper, nb::handle key, bool is_granted) -> nb::object {
                Extent extent;
                if (!keeper.store().get(key_of(key), extent, is_granted)) return nb::none();
                return make_stored(make_lease(keeper.by, extent, false));
            },
            "key"_a.none(), "is_granted"_a = false,
            nb::sig("def get_value(self, key: bytes, is_granted: bool = False) -> Lease | None"))
        .def_prop_ro(
            "is_ours", [](const Keeper& keeper) { return keeper.by->is_ours(); }, "Not of the process before a fork().")
        .def("begin", &begin, "key"_a.none(), "nbytes"_a, "timeout"_a.none() = nb::none(),
             nb::sig("def begin(self, key: bytes | None, nbytes: int, timeout: float | None = None) -> tuple[bool, "
                     "BlockLease]"),
             "Returns True and a writable lease, to be written and committed; or False and a lease of the value that "
             "is there. Waits while another process writes it, or for room. Without a key: a block that is neither "
             "committed nor abandoned.")
        .def("commit", &commit, "lease"_a,
             "Publishes what was written; the lease, which must have no views, is for reading from now on. Returns "
             "False "
             "if the key was removed meanwhile.")
        .def(
            "abandon",
            [](Keeper& keeper, Lease& lease) {
                keeper.store_of(lease).abandon(lease.extent);
                lease.is_filling = false;
            },
            "lease"_a, "Lets another process write the value, as the end of a lease without a commit does.")
        .def(
            "evict", [](Keeper& keeper, nb::handle key) { return keeper.store().evict_key(key_of(key)); },
            "key"_a.none(), nb::sig("def evict(self, key: bytes) -> bool"))
        .def(
            "remove",
            [](Keeper& keeper, nb::handle bytes) {
                Key key = key_of(bytes);
                return keeper.store().remove(&key) != 0;
            },
            "key"_a.none(), nb::sig("def remove(self, key: bytes) -> bool"))
        .def(
            "count", [](Keeper& keeper, u64 hits, u64 misses) { keeper.store().count(hits, misses); }, "hits"_a,
            "misses"_a, "Counts values that the process holds already, and values that it makes without the store.")
        .def("clear", [](Keeper& keeper) { return keeper.store().remove(nullptr); })
        .def("stats", &stats_of);
}
