// bindings.cpp: the only file that knows Python. It lets go of the interpreter before every wait and every long copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "reap.h"
#include "receiver.h"
#include "sender.h"
#include "snapshot.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace penstock;

namespace {

constexpr u64 LONG_COPY = 64 * 1024;  // from here on a copy lets go of the interpreter: taking it back costs less

// What another process wrote may be anything.
nb::object text_of(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// ── errors ──
void raise_python(const Error& error) {
    static const char* const names[] = {"ClosedError", "EndOfChannel",    "WouldBlock",   "Timeout",
                                        "PeerDied",    "MemoryExhausted", "StaleRef",     "LayoutMismatch",
                                        "ValueError",  "OSError",         "CorruptRecord"};
    const char* name = names[static_cast<int>(error.fault)];
    if (error.fault == Fault::value || error.fault == Fault::os) {
        PyErr_SetString(error.fault == Fault::value ? PyExc_ValueError : PyExc_OSError, error.text.c_str());
        return;
    }
    try {
        nb::object made = nb::module_::import_("penstock.errors").attr(name)(text_of(error.text));
        for (const auto& [key, value] : error.numbers) made.attr(key) = value;
        for (const auto& [key, value] : error.words) made.attr(key) = text_of(value);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    } catch (nb::python_error& wrong) {
        wrong.restore();
    }
}

u64 deadline_of(nb::handle timeout) {
    if (timeout.is_none()) return NEVER;
    double seconds = PyFloat_AsDouble(timeout.ptr());
    if (PyErr_Occurred()) throw nb::python_error();
    if (std::isnan(seconds)) throw Error(Fault::value, "timeout is not a number");
    if (seconds < 0) seconds = 0;
    return seconds > 1e9 ? NEVER : now_ns() + static_cast<u64>(seconds * 1e9);
}
void check_signals() {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}
// However a call ends, its end waits no longer. (wait() keeps the time over an interruption.)
struct Waited {
    Waits& waits;
    u64 started = 0;
    ~Waited() {
        if (started != 0) waits.since_ns.store(0, std::memory_order_relaxed);
    }
};

// One thread at a time in an end. A second one waits its turn without the interpreter, or is told that it would block.
class Turn {
   public:
    Turn(std::timed_mutex& mutex, u64 deadline, bool may_wait, const char* name) : lock_(mutex, std::try_to_lock) {
        while (!lock_.owns_lock()) {
            if (!may_wait) throw Error(Fault::would_block, format("another thread is using this end of '%s'", name));
            {
                nb::gil_scoped_release released;
                lock_ = std::unique_lock(mutex, std::chrono::milliseconds(20));
            }
            check_signals();
            if (!lock_.owns_lock() && now_ns() >= deadline)
                throw Error(Fault::timeout, format("another thread is using this end of '%s'", name));
        }
    }

   private:
    std::unique_lock<std::timed_mutex> lock_;
};

// What is to be sent: anything with a buffer, or a list or tuple of such.
class Parts {
   public:
    explicit Parts(nb::handle record) {
        PyObject* object = record.ptr();
        if (PyBytes_CheckExact(object)) {
            add_bytes(object);
            return;
        }
        try {
            if (PyList_Check(object) || PyTuple_Check(object))
                gather(object);
            else
                add_buffer(object);
        } catch (...) {
            let_go();
            throw;
        }
    }
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;
    ~Parts() { let_go(); }
    const Part* data() const { return parts_.empty() ? &one_ : parts_.data(); }
    size_t size() const { return parts_.empty() ? 1 : parts_.size(); }
    u64 total = 0;

   private:
    void let_go() {
        for (Py_buffer& view : views_) PyBuffer_Release(&view);
        views_.clear();
    }
    void gather(PyObject* object) {
        PyObject* items = PySequence_Tuple(object);  // our own: others may change a list while we wait for room
        if (items == nullptr) throw nb::python_error();
        keep_ = nb::steal(items);
        Py_ssize_t n = PyTuple_GET_SIZE(items);
        parts_.reserve(static_cast<size_t>(n));
        views_.reserve(static_cast<size_t>(n));
        for (Py_ssize_t i = 0; i < n; ++i) {
            PyObject* item = PyTuple_GET_ITEM(items, i);
            if (PyBytes_CheckExact(item))
                add_bytes(item);
            else
                add_buffer(item);
        }
    }
    void add(const void* at, u64 nbytes) {
        if (!has_one_) {
            has_one_ = true;
            one_ = {at, nbytes};
        } else {
            if (parts_.empty()) parts_.push_back(one_);
            parts_.push_back({at, nbytes});
        }
        total += nbytes;
    }
    void add_bytes(PyObject* object) { add(PyBytes_AS_STRING(object), static_cast<u64>(PyBytes_GET_SIZE(object))); }
    void add_buffer(PyObject* object) {
        Py_buffer view;
        if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        views_.push_back(view);
        add(view.buf == nullptr ? "" : view.buf, static_cast<u64>(view.len));
    }
    Part one_{"", 0};
    bool has_one_ = false;
    std::vector<Part> parts_;
    std::vector<Py_buffer> views_;
    nb::object keep_;
};

// ── leases ──
// The right to touch some bytes, and the object that exports them: while a view of it lives, it lives.
struct Lease {
    std::shared_ptr<Attachment> by;
    std::shared_ptr<Receiver> receiver;  // of a record that lies in a ring
    u8* at = nullptr;
    Extent extent{};  // of a block; or .nbytes alone
    u32 lane = 0;
    u64 id = 0;
    bool is_writable = false;
    bool is_released = false;
    int exports = 0;

    Lease() = default;
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { give_back(); }
    void give_back() {
        if (is_released) return;
        is_released = true;
        if (by && by->is_ours()) {
            if (receiver)
                receiver->release_record(lane, id);
            else
                Pool(*by).release(extent.block, extent.generation);
        }
        receiver.reset();
        by.reset();  // the last lease of a peer that has closed lets it leave
    }
    void release() {
        if (exports != 0) {
            PyErr_Format(PyExc_BufferError, "the lease has %d views: drop them first", exports);
            throw nb::python_error();
        }
        give_back();
    }
    void require() const {
        if (is_released) throw Error(Fault::closed, "the lease has been released");
    }
};

int lease_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    Lease* lease = nb::inst_ptr<Lease>(self);
    view->obj = nullptr;
    if (lease->is_released) {
        PyErr_SetString(PyExc_BufferError, "the lease has been released");
        return -1;
    }
    if (PyBuffer_FillInfo(view, self, lease->at, static_cast<Py_ssize_t>(lease->extent.nbytes),
                          lease->is_writable ? 0 : 1, flags) != 0)
        return -1;
    ++lease->exports;
    return 0;
}
void lease_releasebuffer(PyObject* self, Py_buffer*) { --nb::inst_ptr<Lease>(self)->exports; }
PyType_Slot lease_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(lease_getbuffer)},
                             {Py_bf_releasebuffer, reinterpret_cast<void*>(lease_releasebuffer)},
                             {0, nullptr}};

// ── a segment's own bytes ──
struct Bytes {
    std::shared_ptr<Segment> segment;
    bool is_writable;
};
int bytes_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    Bytes* bytes = nb::inst_ptr<Bytes>(self);
    const Geometry& g = bytes->segment->geometry();
    void* at = bytes->is_writable ? bytes->segment->write_at(g.data) : const_cast<u8*>(bytes->segment->read_at(g.data));
    return PyBuffer_FillInfo(view, self, at, static_cast<Py_ssize_t>(g.shape.raw_nbytes), bytes->is_writable ? 0 : 1,
                             flags);
}
PyType_Slot bytes_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(bytes_getbuffer)}, {0, nullptr}};

nb::object make_lease(const std::shared_ptr<Attachment>& by, const Extent& extent, bool is_writable) {
    nb::object made = nb::cast(new Lease, nb::rv_policy::take_ownership);
    Lease* lease = nb::inst_ptr<Lease>(made);
    lease->by = by;
    lease->extent = extent;
    u64 offset = by->segment().geometry().pool_data + extent.offset;
    lease->is_writable = is_writable;
    lease->at = is_writable ? by->segment().write_at(offset) : const_cast<u8*>(by->segment().read_at(offset));
    return made;
}

// ── sender ──
template <class Try>
bool send_loop(Sender& sender, nb::handle timeout, bool may_wait, Try&& attempt) {
    u64 deadline = may_wait ? deadline_of(timeout) : 0;
    sender.channel().require_ours();
    Turn turn(sender.mutex(), deadline, may_wait, sender.name());
    Waited waited{sender.channel().lane(sender.index()).waits};
    for (;;) {
        if (attempt()) return true;
        if (!may_wait) return false;
        if (waited.started == 0) waited.started = now_ns();
        Woken woken;
        {
            nb::gil_scoped_release released;
            woken = sender.wait(deadline);
        }
        if (woken == Woken::interrupted) check_signals();
        if (woken == Woken::deadline) {
            if (attempt()) return true;
            throw sender.timeout(now_ns() - waited.started);
        }
    }
}

// For the words whose answer to "not now" is a value.
template <class Do, class Otherwise>
Otherwise unless_busy(Do&& attempt, Otherwise otherwise) {
    try {
        return attempt();
    } catch (const Error& error) {
        if (error.fault != Fault::would_block) throw;
        return otherwise;
    }
}

bool send(Sender& sender, nb::handle record, nb::handle timeout, bool may_wait) {
    Parts parts(record);
    return send_loop(sender, timeout, may_wait, [&] {
        if (parts.total < LONG_COPY) return sender.try_send(parts.data(), parts.size(), parts.total);
        nb::gil_scoped_release released;
        return sender.try_send(parts.data(), parts.size(), parts.total);
    });
}

// Room in the channel itself, to be filled in place. Visible with commit(), never after abort().
struct Reservation {
    std::shared_ptr<Sender> sender;
    u8* at = nullptr;
    u64 nbytes = 0;
    bool is_open = true;
    bool is_given_up = false;  // aborted while views of it live: the room is free with the last of them
    int exports = 0;

    Reservation(std::shared_ptr<Sender> sender, u8* at, u64 nbytes)
        : sender(std::move(sender)), at(at), nbytes(nbytes) {}
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    ~Reservation() {
        if (is_open) drop();
    }
    void commit() {
        if (!is_open) throw Error(Fault::closed, "the reservation has been committed or aborted");
        if (exports != 0) {
            PyErr_Format(PyExc_BufferError, "the reservation has %d views: drop them first", exports);
            throw nb::python_error();
        }
        is_open = false;
        if (sender->is_closed()) throw Error(Fault::closed, "the sender was closed: the reservation is lost");
        sender->channel().require_ours();
        Turn turn(sender->mutex(), NEVER, true, sender->name());
        sender->commit();
    }
    void abort() {
        if (!is_open) return;
        is_open = false;
        if (exports != 0)
            is_given_up = true;
        else
            drop();
    }
    void view_dropped() {
        if (--exports != 0 || !is_given_up) return;
        is_given_up = false;
        drop();
    }

   private:
    void drop() noexcept {
        is_open = false;
        if (sender->is_closed() || !sender->channel().is_ours()) return;
        {
            nb::gil_scoped_release released;
            std::lock_guard guard(sender->mutex());
            sender->abort();
        }
    }
};
int reservation_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    Reservation* r = nb::inst_ptr<Reservation>(self);
    view->obj = nullptr;
    if (!r->is_open || r->sender->is_closed()) {
        PyErr_SetString(PyExc_BufferError, "the reservation has been committed or aborted");
        return -1;
    }
    if (PyBuffer_FillInfo(view, self, r->at, static_cast<Py_ssize_t>(r->nbytes), 0, flags) != 0) return -1;
    ++r->exports;
    return 0;
}
void reservation_releasebuffer(PyObject* self, Py_buffer*) { nb::inst_ptr<Reservation>(self)->view_dropped(); }
PyType_Slot reservation_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(reservation_getbuffer)},
                                   {Py_bf_releasebuffer, reinterpret_cast<void*>(reservation_releasebuffer)},
                                   {0, nullptr}};

// ── receiver ──
// Finds the next record, waiting if it may; false: none, and it may not wait.
bool find_loop(Receiver& receiver, bool may_wait, u64 deadline, Found& found) {
    Waited waited{receiver.channel().receiver(receiver.index()).waits};
    for (;;) {
        if (receiver.try_find(found)) return true;
        if (!may_wait) return false;
        if (waited.started == 0) waited.started = now_ns();
        Woken woken;
        {
            nb::gil_scoped_release released;
            woken = receiver.wait(deadline);
        }
        if (woken == Woken::interrupted) check_signals();
        if (woken == Woken::deadline) {
            if (receiver.try_find(found)) return true;
            throw receiver.timeout(now_ns() - waited.started);
        }
    }
}
nb::object copy_out(Receiver& receiver, const Found& found) {
    nb::object made = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(found.nbytes)));
    if (!made.is_valid()) {
        receiver.accept(found);
        throw nb::python_error();
    }
    char* to = PyBytes_AS_STRING(made.ptr());
    if (found.nbytes < LONG_COPY) {
        std::memcpy(to, found.at, found.nbytes);
        receiver.accept(found);
    } else {
        nb::gil_scoped_release released;
        std::memcpy(to, found.at, found.nbytes);
        receiver.accept(found);
    }
    return made;
}
nb::object receive(const std::shared_ptr<Receiver>& receiver, nb::handle timeout, bool may_wait, bool as_view) {
    u64 deadline = may_wait ? deadline_of(timeout) : 0;
    receiver->channel().require_ours();
    Turn turn(receiver->mutex(), deadline, may_wait, receiver->name());
    Found found;
    if (!find_loop(*receiver, may_wait, deadline, found)) return nb::none();
    if (!as_view) return copy_out(*receiver, found);
    nb::object made = nb::cast(new Lease, nb::rv_policy::take_ownership);
    Lease* lease = nb::inst_ptr<Lease>(made);
    lease->by = receiver->channel().by;
    lease->at = const_cast<u8*>(found.at);
    lease->lane = found.lane;
    lease->id = receiver->lease(found);
    if (found.is_spilled)
        lease->extent = found.extent;
    else
        lease->receiver = receiver, lease->extent.nbytes = found.nbytes;
    return made;
}

[[noreturn]] void would_block(const char* what, const char* name) {
    throw Error(Fault::would_block, format("%s '%s'", what, name));
}

template <class T>
nb::object plain(T value) {
    return nb::int_(value);
}

nb::dict to_dict(const snapshot::Node& node) {
    nb::dict out;
    for (const auto& [key, value] : node.numbers) out[key.c_str()] = plain(value);
    for (const auto& [key, value] : node.words) out[key.c_str()] = text_of(value);
    for (const auto& [key, list] : node.lists) {
        nb::list items;
        for (const auto& item : list) items.append(to_dict(item));
        out[key.c_str()] = items;
    }
    return out;
}

nb::tuple ticket_of(const Segment& segment) {
    TicketNumbers t = segment.ticket();
    return nb::make_tuple(t.pid, t.start, t.fd, t.inode, t.nonce);
}
nb::dict stats_of(Attachment& by) {
    PoolStats s = Pool(by).stats();
    nb::dict out;
    out["nbytes"] = s.nbytes;
    out["taken_nbytes"] = s.taken_nbytes;
    out["free_nbytes"] = s.free_nbytes;
    out["largest_free_nbytes"] = s.largest_free_nbytes;
    out["claimed_nbytes"] = s.claimed_nbytes;
    out["blocks"] = s.blocks;
    out["takes"] = s.takes;
    out["taken_nbytes_total"] = s.taken_nbytes_total;
    out["exhaustions"] = s.exhaustions;
    out["recoveries"] = s.recoveries;
    out["stale_refs"] = s.stale_refs;
    nb::list holders;
    for (const auto& h : s.holders)
        holders.append(nb::make_tuple(h.slot, text_of(by.name_of(h.slot)), h.blocks, h.nbytes, h.granted));
    out["holders"] = holders;
    return out;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native core of penstock: segments, pools, peers, channels. Use it through the package.";
    nb::set_leak_warnings(false);  // leases may outlive the interpreter's last look at them
    nb::register_exception_translator([](const std::exception_ptr& caught, void*) {
        try {
            std::rethrow_exception(caught);
        } catch (const Error& error) {
            raise_python(error);
        }
    });
    m.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
    m.attr("LAYOUT_FINGERPRINT") = layout_fingerprint();
    m.attr("MAX_PEERS") = MAX_PEERS;
    m.attr("MAX_RECEIVERS") = MAX_RECEIVERS;
    m.attr("MAX_SENDERS") = MAX_LANES;
    m.attr("MAX_BLOCKS") = MAX_BLOCKS;
    nb::list points;
    for (const char* name : points::NAMES) points.append(nb::str(name));
    m.attr("POINTS") = nb::tuple(points);
    m.def(
        "arm_point",
        [](const char* name, const char* action, int countdown, int delay_us) {
            std::string word = action;
            auto what = word == "kill"    ? points::Action::kill
                        : word == "stop"  ? points::Action::stop
                        : word == "delay" ? points::Action::delay
                                          : points::Action::none;
            if (!points::arm(name, what, countdown, delay_us)) throw Error(Fault::value, format("no point '%s'", name));
        },
        "name"_a, "action"_a, "countdown"_a = 1, "delay_us"_a = 0,
        "For tests: what happens when this process passes the point for the countdown-th time.");
    m.def("memory_available", [] { return memory_available(); });
    m.def("total_memory", [] {
        struct sysinfo info{};
        ::sysinfo(&info);
        return static_cast<u64>(info.totalram) * info.mem_unit;
    });
    m.def("process_identity", [] { return nb::make_tuple(process()->pid.load(), process()->start.load()); });
    m.def("start_ticks", [](int pid) { return start_ticks(pid); }, "pid"_a);
    m.def(
        "snapshot", [](int fd) { return to_dict(snapshot::take(fd)); }, "fd"_a,
        "Everything a segment tells of itself, read-only, without joining it. Takes the descriptor over.");
    m.def("nothing", [] {}, "Does nothing: what a call costs.");

    nb::class_<Segment>(m, "Segment", "One anonymous shared mapping: sized, its pages claimed, sealed.")
        .def_static(
            "create",
            [](const std::string& name, nb::dict shape, u64 huge_nbytes, bool huge_required, int numa_node,
               bool numa_required, bool prefault) {
                Shape s{};
                auto number = [&](const char* key, u64 otherwise) {
                    return shape.contains(key) ? nb::cast<u64>(shape[key]) : otherwise;
                };
                s.kind = static_cast<u32>(number("kind", 1));
                s.max_peers = static_cast<u32>(number("max_peers", 1));
                s.max_blocks = static_cast<u32>(number("max_blocks", 0));
                s.has_grants = static_cast<u32>(number("has_grants", 0));
                s.lanes = static_cast<u32>(number("lanes", 0));
                s.receivers = static_cast<u32>(number("receivers", 0));
                s.latency = static_cast<u32>(number("latency", 1));
                s.receiver_death = static_cast<u32>(number("receiver_death", 0));
                s.sender_death = static_cast<u32>(number("sender_death", 0));
                s.style = static_cast<u32>(number("style", 0));
                s.page = PAGE;
                s.lane_nbytes = number("lane_nbytes", 0);
                s.inline_limit = number("inline_limit", 0);
                s.pool_nbytes = number("pool_nbytes", 0);
                s.granule_nbytes = number("granule_nbytes", 0);
                s.raw_nbytes = number("raw_nbytes", 0);
                SegmentOptions options{name, huge_nbytes, huge_required, numa_node, numa_required, prefault};
                nb::gil_scoped_release released;
                auto made = Segment::create(s, options);
                if (s.kind == static_cast<u32>(SegmentKind::channel)) Channel::lay_out(*made);
                return made;
            },
            "name"_a, "shape"_a, "huge_nbytes"_a = 0, "huge_required"_a = false, "numa_node"_a = -1,
            "numa_required"_a = false, "prefault"_a = true)
        .def_static(
            "adopt", [](int fd) { return Segment::adopt(fd); }, "fd"_a, "Takes the descriptor over.")
        .def_static(
            "attach",
            [](int pid, u64 start, int fd, u64 inode, u64 nonce) {
                return Segment::attach({pid, start, fd, inode, nonce});
            },
            "pid"_a, "start"_a, "fd"_a, "inode"_a, "nonce"_a)
        .def("ticket", [](const Segment& s) { return ticket_of(s); })
        .def(
            "bytes", [](const std::shared_ptr<Segment>& s, bool is_writable) { return Bytes{s, is_writable}; },
            "is_writable"_a)
        .def_prop_ro("fd", &Segment::fd)
        .def_prop_ro(
            "name", [](const Segment& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"))
        .def_prop_ro("nonce", &Segment::nonce)
        .def_prop_ro("nbytes", &Segment::nbytes)
        .def_prop_ro("claimed_nbytes",
                     [](const Segment& s) {
                         const Geometry& g = s.geometry();
                         return g.shape.granule_nbytes == 0
                                    ? g.total
                                    : g.pool_data + s.at<PoolHeader>(g.pool)->claimed_nbytes.load();
                     })
        .def_prop_ro("page_nbytes", [](const Segment& s) { return s.geometry().shape.page; })
        .def_prop_ro("fallback", &Segment::fallback)
        .def_prop_ro("kind", [](const Segment& s) { return s.geometry().shape.kind; })
        .def_prop_ro("style", [](const Segment& s) { return s.geometry().shape.style; })
        .def_prop_ro("lanes", [](const Segment& s) { return s.geometry().shape.lanes; })
        .def_prop_ro("receivers", [](const Segment& s) { return s.geometry().shape.receivers; })
        .def_prop_ro("inline_limit", [](const Segment& s) { return s.geometry().shape.inline_limit; });
    nb::class_<Bytes>(m, "Bytes", nb::type_slots(bytes_slots));

    nb::class_<Lease>(m, "Lease", nb::type_slots(lease_slots),
                      "The right to touch some shared bytes, as an object that exports them. Released once; by itself "
                      "with its last view.")
        .def("release", &Lease::release)
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Lease"))
        .def("__exit__",
             [](Lease& lease, nb::args arguments) {
                 bool is_failing = !nb::handle(arguments[0]).is_none();
                 if (!is_failing || lease.exports == 0)
                     lease.release();  // else: with the last view, after the traceback
             })
        .def("__len__", [](const Lease& lease) { return lease.extent.nbytes; })
        .def_prop_ro("nbytes", [](const Lease& lease) { return lease.extent.nbytes; })
        .def_prop_ro("is_writable", [](const Lease& lease) { return lease.is_writable; })
        .def_prop_ro("is_released", [](const Lease& lease) { return lease.is_released; })
        .def("ref_numbers",
             [](const Lease& lease) {
                 lease.require();
                 if (lease.receiver)
                     throw Error(Fault::value, "a record that lies in a ring cannot be shared: copy it into a pool");
                 return nb::make_tuple(lease.by->segment().nonce(), lease.extent.block, lease.extent.generation,
                                       lease.extent.offset, lease.extent.nbytes);
             })
        .def(
            "grant",
            [](const Lease& lease, u32 to) {
                lease.require();
                if (lease.receiver)
                    throw Error(Fault::value, "a record that lies in a ring cannot be shared: copy it into a pool");
                lease.by->require_ours();
                Pool(*lease.by).grant(lease.extent, to);
            },
            "to"_a);

    nb::class_<Attachment>(m, "Attachment", "This process in a segment, as one of its peers.")
        .def(nb::new_([](const std::shared_ptr<Segment>& segment, const std::string& name) {
                 return Attachment::join(segment, name);
             }),
             "segment"_a, "name"_a = "")
        .def_prop_ro("slot", &Attachment::slot)
        .def_prop_ro("epoch", &Attachment::epoch)
        .def_prop_ro("is_ours", &Attachment::is_ours)
        .def("bell_fd", &Attachment::bell_fd)
        .def("peers",
             [](Attachment& by) {
                 by.require_ours();
                 by.refresh();
                 nb::list out;
                 for (const auto& node : snapshot::peers(by)) out.append(to_dict(node));
                 return out;
             })
        .def(
            "take",
            [](const std::shared_ptr<Attachment>& by, u64 nbytes, nb::handle timeout) {
                by->require_ours();
                if (nbytes > MAX_NBYTES) nbytes = MAX_NBYTES;
                u64 deadline = deadline_of(timeout);
                struct Waiting {  // seen from outside
                    Shared<u64>& since;
                    ~Waiting() { since.store(0, std::memory_order_relaxed); }
                } waiting{by->peer(by->slot()).take_since_ns};
                Pool pool(*by);
                Spinner spinner(Latency::eco);
                Waits waits{};
                std::atomic<bool> never{false};
                Extent extent;
                for (;;) {
                    u32 seen = pool.returns();
                    if (pool.try_take(nbytes, extent)) break;
                    if (now_ns() >= deadline) {
                        pool.header().exhaustions.fetch_add(1);
                        throw pool.exhausted(nbytes);
                    }
                    if (waiting.since.load(std::memory_order_relaxed) == 0) waiting.since.store(now_ns());
                    Woken woken;
                    {
                        nb::gil_scoped_release released;
                        woken = pool.wait_for_return(seen, deadline, spinner, waits, never);
                    }
                    if (woken == Woken::interrupted) check_signals();
                }
                return make_lease(by, extent, true);
            },
            "nbytes"_a, "timeout"_a.none() = 0,
            nb::sig("def take(self, nbytes: int, timeout: float | None = 0) -> Lease"))
        .def(
            "open",
            [](const std::shared_ptr<Attachment>& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes) {
                by->require_ours();
                if (segment != by->segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                Extent extent{block, generation, offset, nbytes};
                Pool(*by).open(extent);
                return make_lease(by, extent, false);
            },
            "segment"_a, "block"_a, "generation"_a, "offset"_a, "nbytes"_a,
            nb::sig("def open(self, segment: int, block: int, generation: int, offset: int, nbytes: int) -> Lease"))
        .def(
            "grant",
            [](Attachment& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes, u32 to) {
                by.require_ours();
                if (segment != by.segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                Pool(by).grant({block, generation, offset, nbytes}, to);
            },
            "segment"_a, "block"_a, "generation"_a, "offset"_a, "nbytes"_a, "to"_a)
        .def(
            "revoke",
            [](Attachment& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes, u32 to) {
                by.require_ours();
                if (segment != by.segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                return Pool(by).revoke({block, generation, offset, nbytes}, to);
            },
            "segment"_a, "block"_a, "generation"_a, "offset"_a, "nbytes"_a, "to"_a)
        .def("stats",
             [](Attachment& by) {
                 by.require_ours();
                 by.refresh();
                 return stats_of(by);
             })
        .def(
            "trim",
            [](Attachment& by, u64 keep) {
                by.require_ours();
                return Pool(by).trim(keep);
            },
            "keep"_a = 0);

    nb::class_<Reservation>(
        m, "Reservation", nb::type_slots(reservation_slots),
        "Room for one record, filled in place. Visible after commit(); a `with` block commits, or aborts if it raises.")
        .def("commit", &Reservation::commit)
        .def("abort", &Reservation::abort)
        .def("__len__", [](const Reservation& r) { return r.nbytes; })
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Reservation"))
        .def("__exit__", [](Reservation& r, nb::args arguments) {
            if (!r.is_open) return;
            if (nb::handle(arguments[0]).is_none())
                r.commit();
            else
                r.abort();
        });

    nb::class_<Sender>(m, "Sender", nb::is_weak_referenceable(), "The end of a channel that sends.")
        .def(nb::new_(
                 [](const std::shared_ptr<Attachment>& by, int index) { return std::make_shared<Sender>(by, index); }),
             "attachment"_a, "index"_a = -1)
        .def(
            "send", [](Sender& s, nb::handle record, nb::handle timeout) { send(s, record, timeout, true); },
            "record"_a, "timeout"_a.none() = nb::none(),
            nb::sig("def send(self, record: typing_extensions.Buffer | "
                    "collections.abc.Sequence[typing_extensions.Buffer], timeout: float | None = None) -> None"),
            "Sends one record: a buffer, or several gathered into one. Blocks while there is no room, until `timeout` "
            "seconds have passed.\n"
            "Raises Timeout naming the slowest receiver, PeerDied once per receiver that died, EndOfChannel when all "
            "have closed.")
        .def(
            "send_nowait",
            [](Sender& s, nb::handle record) {
                if (!send(s, record, nb::none(), false)) would_block("no room now in", s.name());
            },
            "record"_a,
            nb::sig("def send_nowait(self, record: typing_extensions.Buffer | "
                    "collections.abc.Sequence[typing_extensions.Buffer]) -> None"),
            "The same, but raises WouldBlock instead of blocking.")
        .def(
            "try_send",
            [](Sender& s, nb::handle record) {
                return unless_busy([&] { return send(s, record, nb::none(), false); }, false);
            },
            "record"_a,
            nb::sig("def try_send(self, record: typing_extensions.Buffer | "
                    "collections.abc.Sequence[typing_extensions.Buffer]) -> bool"))
        .def(
            "reserve",
            [](const std::shared_ptr<Sender>& s, u64 nbytes, nb::handle timeout) {
                u8* at = nullptr;
                send_loop(*s, timeout, true, [&] { return (at = s->try_reserve(nbytes)) != nullptr; });
                return new Reservation(s, at, nbytes);
            },
            "nbytes"_a, "timeout"_a.none() = nb::none(),
            nb::sig("def reserve(self, nbytes: int, timeout: float | None = None) -> Reservation"),
            "Room for one record of `nbytes`, to be filled in place and committed.")
        .def("arm", &Sender::arm)
        .def("disarm", &Sender::disarm, "is_over"_a)
        .def(
            "timeout_error", [](Sender& s, double waited) { throw s.timeout(static_cast<u64>(waited * 1e9)); },
            "waited"_a)
        .def(
            "close",
            [](Sender& s) {
                s.begin_close();
                nb::gil_scoped_release released;
                s.close();
            },
            "Ends the channel in peace: receivers read what is there, then EndOfChannel.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Sender"))
        .def("__exit__",
             [](Sender& s, nb::args) {
                 s.begin_close();
                 nb::gil_scoped_release released;
                 s.close();
             })
        .def_prop_ro("is_closed", &Sender::is_closed)
        .def_prop_ro("index", &Sender::index)
        .def_prop_ro("name", [](const Sender& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"));

    nb::class_<Receiver>(m, "Receiver", nb::is_weak_referenceable(), "The end of a channel that receives.")
        .def(nb::new_([](const std::shared_ptr<Attachment>& by, int index) {
                 return std::make_shared<Receiver>(by, index);
             }),
             "attachment"_a, "index"_a = -1)
        .def(
            "receive",
            [](const std::shared_ptr<Receiver>& r, nb::handle timeout) { return receive(r, timeout, true, false); },
            "timeout"_a.none() = nb::none(), nb::sig("def receive(self, timeout: float | None = None) -> bytes"),
            "The next record, copied. Blocks until there is one, or `timeout` seconds have passed.\n"
            "Raises Timeout, PeerDied after the last record of a sender that died, EndOfChannel after the last of one "
            "that closed.")
        .def(
            "receive_view",
            [](const std::shared_ptr<Receiver>& r, nb::handle timeout) { return receive(r, timeout, true, true); },
            "timeout"_a.none() = nb::none(), nb::sig("def receive_view(self, timeout: float | None = None) -> Lease"),
            "The next record where it lies: a read-only lease. A record in the ring keeps its room until the lease is "
            "released.")
        .def(
            "receive_nowait",
            [](const std::shared_ptr<Receiver>& r) {
                nb::object got = receive(r, nb::none(), false, false);
                if (got.is_none()) would_block("no record now in", r->name());
                return got;
            },
            nb::sig("def receive_nowait(self) -> bytes"))
        .def(
            "receive_view_nowait",
            [](const std::shared_ptr<Receiver>& r) {
                nb::object got = receive(r, nb::none(), false, true);
                if (got.is_none()) would_block("no record now in", r->name());
                return got;
            },
            nb::sig("def receive_view_nowait(self) -> Lease"))
        .def(
            "try_receive",
            [](const std::shared_ptr<Receiver>& r, bool as_view) {
                return unless_busy([&] { return receive(r, nb::none(), false, as_view); }, nb::object(nb::none()));
            },
            "as_view"_a = false, nb::sig("def try_receive(self, as_view: bool = False) -> bytes | Lease | None"))
        .def("arm", &Receiver::arm)
        .def("disarm", &Receiver::disarm, "is_over"_a)
        .def(
            "timeout_error", [](Receiver& r, double waited) { throw r.timeout(static_cast<u64>(waited * 1e9)); },
            "waited"_a)
        .def(
            "close",
            [](Receiver& r) {
                r.begin_close();
                nb::gil_scoped_release released;
                r.close();
            },
            "Leaves the channel: the sender no longer waits for this receiver.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Receiver"))
        .def("__exit__",
             [](Receiver& r, nb::args) {
                 r.begin_close();
                 nb::gil_scoped_release released;
                 r.close();
             })
        .def(
            "__iter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __iter__(self) -> collections.abc.Iterator[bytes]"))
        .def(
            "__next__",
            [](const std::shared_ptr<Receiver>& r) {
                try {
                    return receive(r, nb::none(), true, false);
                } catch (const Error& error) {
                    if (error.fault == Fault::end_of_channel) throw nb::stop_iteration();
                    throw;
                }
            },
            nb::sig("def __next__(self) -> bytes"))
        .def_prop_ro("is_closed", &Receiver::is_closed)
        .def_prop_ro("index", &Receiver::index)
        .def_prop_ro("source", &Receiver::source, "The sender (its index) of the record that was received last.")
        .def_prop_ro("name", [](const Receiver& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"));
}
