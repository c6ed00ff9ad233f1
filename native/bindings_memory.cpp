// bindings_memory.cpp: segments, leases, and this process as a peer that takes and opens blocks.
#include "python.h"

namespace penstock::python {

using namespace nb::literals;

namespace {

int lease_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    Lease* lease = nb::inst_ptr<Lease>(self);
    view->obj = nullptr;
    if (lease->is_released) {
        PyErr_SetString(PyExc_BufferError, "the lease has been released");
        return -1;
    }
    if (lease->at == nullptr) {
        PyErr_SetString(PyExc_BufferError, "the bytes of this pool do not lie in host memory");
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

// ── a copy out of a lease ──
constexpr const char* COPY_INTO =
    R"(Copies bytes of the lease into a writable buffer. A long copy lets other threads run Python.

Args:
    buffer: contiguous, at least as long as what is copied.
    start: of the first byte to be copied.
    nbytes: to be copied; None: all from `start`.

Returns:
    The number of bytes copied.

Raises:
    ClosedError: the lease has been released.
    ValueError: the lease, or the buffer, is shorter.
    BufferError: the buffer is read-only.

Examples:
    >>> pool = Pool.create(1 << 20)
    >>> with pool.take(5) as lease:
    ...     memoryview(lease)[:] = b'hello'
    ...     part = bytearray(3)
    ...     lease.copy_into(part, start=1, nbytes=3), bytes(part)
    (3, b'ell')
)";
struct Exported {  // what is copied from, and to: neither goes while it is
    Lease& lease;
    Py_buffer to;
    Exported(Lease& from, nb::handle buffer) : lease(from), to(get_buffer(buffer.ptr(), PyBUF_WRITABLE)) {
        ++lease.exports;
    }
    Exported(const Exported&) = delete;
    Exported& operator=(const Exported&) = delete;
    ~Exported() {
        --lease.exports;
        PyBuffer_Release(&to);
    }
};
u64 copy_into(Lease& lease, nb::handle buffer, u64 start, std::optional<u64> nbytes) {
    lease.require();
    if (lease.at == nullptr) throw Error(Fault::value, "the bytes of this pool do not lie in host memory");
    u64 length = lease.extent.nbytes, many = nbytes.value_or(length - std::min(start, length));
    if (start > length || many > length - start)
        throw Error(Fault::value,
                    format("expected at most %s from byte %s of a lease of %s, not %s",
                           counted(length - std::min(start, length), "byte").c_str(), std::to_string(start).c_str(),
                           counted(length, "byte").c_str(), std::to_string(many).c_str()));
    Exported exported(lease, buffer);
    lease.require();  // the buffer's own code may have released it
    if (static_cast<u64>(exported.to.len) < many)
        throw Error(Fault::value, format("expected a buffer of at least %s, got one of %s",
                                         counted(many, "byte").c_str(), std::to_string(exported.to.len).c_str()));
    if (many < LONG_COPY) {
        std::memcpy(exported.to.buf, lease.at + start, many);
    } else {
        GilRelease released;
        std::memcpy(exported.to.buf, lease.at + start, many);
    }
    return many;
}

// ── a segment's own bytes ──
struct Bytes {
    std::shared_ptr<Segment> segment;
    void* at;  // mapped before there is a view: no error can pass through getbuffer
    bool is_writable;
};
int bytes_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    Bytes* bytes = nb::inst_ptr<Bytes>(self);
    return PyBuffer_FillInfo(view, self, bytes->at,
                             static_cast<Py_ssize_t>(bytes->segment->geometry().shape.raw_nbytes),
                             bytes->is_writable ? 0 : 1, flags);
}
PyType_Slot bytes_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(bytes_getbuffer)}, {0, nullptr}};

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

void bind_memory(nb::module_& m) {
    nb::class_<Segment>(m, "Segment", "One anonymous shared mapping: sized, its pages claimed, sealed.")
        .def_static(
            "create",
            [](const std::string& name, nb::dict shape, u64 huge_nbytes, bool huge_required, int numa_node,
               bool numa_required, bool prefault, nb::bytes schema) {
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
                s.buckets = static_cast<u32>(number("buckets", 0));
                s.elsewhere = static_cast<u32>(number("elsewhere", 0));
                SegmentOptions options{name,
                                       huge_nbytes,
                                       huge_required,
                                       numa_node,
                                       numa_required,
                                       prefault,
                                       {schema.c_str(), schema.size()}};
                GilRelease released;
                auto segment = Segment::create(s, options);
                if (s.kind == static_cast<u32>(SegmentKind::channel)) Channel::lay_out(*segment);
                return segment;
            },
            "name"_a, "shape"_a, "huge_nbytes"_a = 0, "huge_required"_a = false, "numa_node"_a = -1,
            "numa_required"_a = false, "prefault"_a = true, "schema"_a = nb::bytes("", 0))
        .def_static(
            "adopt", [](int fd, bool is_observer) { return Segment::adopt(fd, !is_observer, is_observer); }, "fd"_a,
            "is_observer"_a = false,
            "Takes the descriptor over. An observer maps everything read-only, so it cannot join as a peer.")
        .def_static(
            "attach",
            [](int pid, u64 start, int fd, u64 inode, u64 nonce) {
                return Segment::attach({pid, start, fd, inode, nonce});
            },
            "pid"_a, "start"_a, "fd"_a, "inode"_a, "nonce"_a)
        .def("ticket", [](const Segment& s) { return ticket_of(s); })
        .def(
            "bytes",
            [](const std::shared_ptr<Segment>& s, bool is_writable) {
                u64 data = s->geometry().data;
                return Bytes{s, is_writable ? s->write_at(data) : const_cast<u8*>(s->read_at(data)), is_writable};
            },
            "is_writable"_a)
        .def(
            "mapping",
            [](Segment& s, bool is_writable, bool is_made) -> nb::object {
                u64 nbytes = s.data_nbytes();
                if (nbytes == 0) return nb::none();
                if (is_writable && is_made) s.write_at(s.geometry().data);
                const u8* at = is_writable ? s.write_mapping() : s.read_mapping();
                if (at == nullptr) return nb::none();
                return nb::make_tuple(reinterpret_cast<u64>(at), nbytes);
            },
            "is_writable"_a, "is_made"_a = false,
            nb::sig("def mapping(self, is_writable: bool, is_made: bool = False) -> tuple[int, int] | None"),
            "Where the data part is mapped in this process, and how long it is. is_made: mapped for it, if it is not.")
        .def_prop_ro("fd", &Segment::fd)
        .def_prop_ro(
            "name", [](const Segment& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"))
        .def_prop_ro("nonce", &Segment::nonce)
        .def_prop_ro("nbytes", &Segment::nbytes)
        .def_prop_ro("claimed_nbytes",
                     [](const Segment& s) {
                         const Geometry& g = s.geometry();
                         return g.shape.granule_nbytes == 0
                                    ? g.trace
                                    : g.pool_data + s.at<PoolHeader>(g.pool)->claimed_nbytes.load(RELAXED);
                     })
        .def(
            "claim_all",
            [](const std::shared_ptr<Segment>& s) {
                GilRelease released;
                const Geometry& g = s->geometry();
                if (g.pool != 0 && g.shape.elsewhere == 0) Granules(*s).claim(0, g.shape.pool_nbytes);
            },
            "Claims all pages of a pool that grows, as registering them with a device would.")
        .def_prop_ro("page_nbytes", [](const Segment& s) { return s.geometry().shape.page; })
        .def_prop_ro("fallback", &Segment::fallback)
        .def_prop_ro("pool_nbytes", [](const Segment& s) { return s.geometry().shape.pool_nbytes; })
        .def_prop_ro("is_elsewhere", [](const Segment& s) { return s.geometry().shape.elsewhere != 0; })
        .def_prop_ro("keeps", [](const Segment& s) { return s.geometry().shape.buckets != 0; })
        .def_prop_ro("kind", [](const Segment& s) { return s.geometry().shape.kind; })
        .def_prop_ro(
            "schema",
            [](const Segment& s) {
                std::string schema = s.schema();
                return nb::bytes(schema.data(), schema.size());
            },
            nb::sig("def schema(self, /) -> typing_extensions.Buffer"))
        .def_prop_ro("style", [](const Segment& s) { return s.geometry().shape.style; })
        .def_prop_ro("lanes", [](const Segment& s) { return s.geometry().shape.lanes; })
        .def_prop_ro("receivers", [](const Segment& s) { return s.geometry().shape.receivers; })
        .def_prop_ro("inline_limit", [](const Segment& s) { return s.geometry().shape.inline_limit; });
    nb::class_<Bytes>(m, "Bytes", nb::type_slots(bytes_slots));

    nb::class_<Lease>(m, "BlockLease", nb::type_slots(lease_slots), nb::pooled(),
                      "The right to touch some shared bytes, as an object that exports them. Released once; by itself "
                      "with its last view.\n\n"
                      "Examples:\n"
                      "    >>> pool = Pool.create(1 << 20)\n"
                      "    >>> with pool.take(5) as lease:\n"
                      "    ...     memoryview(lease)[:] = b'hello'\n"
                      "    ...     bytes(lease)\n"
                      "    b'hello'\n")
        .def("release", &Lease::release)
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> BlockLease"))
        .def("__exit__",
             [](Lease& lease, nb::args arguments) {
                 bool is_failing = !nb::handle(arguments[0]).is_none();
                 if (!is_failing || (lease.exports == 0 && !lease.is_shown))
                     lease.release();  // else: with the last view, after the traceback
             })
        .def("copy_into", &copy_into, "buffer"_a, "start"_a = 0, "nbytes"_a = nb::none(),
             nb::sig("def copy_into(self, buffer: typing_extensions.Buffer, start: int = 0, nbytes: int | None = None) "
                     "-> int"),
             COPY_INTO)
        .def("__len__", [](const Lease& lease) { return lease.extent.nbytes; })
        .def(
            "__repr__",
            [](const Lease& lease) {
                return format("BlockLease(%llu bytes%s%s)", static_cast<unsigned long long>(lease.extent.nbytes),
                              lease.is_writable ? ", writable" : "", lease.is_released ? ", released" : "");
            },
            nb::sig("def __repr__(self) -> str"))
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

    nb::class_<EndGroup>(
        m, "EndGroup",
        "Ends of this process that share a fate. The first death in a channel of one of them ends the waits of all: "
        "each raises PeerDied with that death, a receiver after the last record that is there. A death is final for "
        "the group; one that a channel ignores, or that came before its end was opened, breaks no group.\n\n"
        "Examples:\n"
        "    >>> steps, replies = Broadcast(receivers=2), [Ring() for rank in range(2)]\n"
        "    >>> group = EndGroup()\n"
        "    >>> sender = steps.open_sender(group=group)\n"
        "    >>> receivers = [ring.open_receiver(group=group) for ring in replies]\n"
        "    >>> steps.open_receiver(1, name='worker 1').fail(RuntimeError('no such layer'))\n"
        "    >>> receivers[0].receive()\n"
        "    Traceback (most recent call last):\n"
        "        ...\n"
        "    penstock.errors.PeerDied: receiver 1 of 'broadcast', 'worker 1' ...\n")
        .def(nb::new_([] { return std::make_shared<EndGroup>(); }))
        .def(
            "wait",
            [](EndGroup& group, nb::handle timeout) {
                u64 deadline = deadline_of(timeout);
                for (int result = 0; !group.is_broken() && result != -ETIMEDOUT;) {
                    {
                        GilRelease released;
                        result = group.sleep_until(deadline);
                    }
                    if (result == -EINTR) check_signals();
                }
                group.require_whole();
            },
            "timeout"_a.none() = nb::none(),
            "Waits in no channel. Raises PeerDied at the first death, and returns when the timeout has passed.\n\n"
            "Args:\n"
            "    timeout: seconds; None: for ever.\n\n"
            "Raises:\n"
            "    PeerDied: an end in a channel of the group has died.\n\n"
            "Examples:\n"
            "    >>> ring, group = Ring(), EndGroup()\n"
            "    >>> sender = ring.open_sender(group=group)\n"
            "    >>> group.wait(timeout=0.01)\n"
            "    >>> ring.open_receiver(name='worker 1').fail(RuntimeError('no such layer'))\n"
            "    >>> group.wait()\n"
            "    Traceback (most recent call last):\n"
            "        ...\n"
            "    penstock.errors.PeerDied: receiver 0 of 'ring', 'worker 1' ...\n",
            nb::sig("def wait(self, timeout: float | None = None) -> None"))
        .def(
            "__repr__",
            [](const EndGroup& group) {
                std::optional<Error> death = group.death();
                return text_of(death ? "EndGroup(broken: " + death->text + ")" : std::string("EndGroup()"));
            },
            nb::sig("def __repr__(self) -> str"));

    nb::class_<Attachment>(m, "Attachment", "This process in a segment, as one of its peers.")
        .def(nb::new_([](const std::shared_ptr<Segment>& segment, const std::string& name,
                         const std::shared_ptr<EndGroup>& group) { return Attachment::join(segment, name, group); }),
             "segment"_a, "name"_a = "", "group"_a.none() = nb::none())
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
                    ~Waiting() { since.store(0, RELAXED); }
                } waiting{by->peer(by->slot()).take_since_ns};
                Pool pool(*by);
                Spinner spinner(Latency::eco);
                Waits waits{};
                Atomic<bool> never{false};
                Extent extent;
                for (;;) {
                    u32 returns = pool.returns();
                    if (pool.try_take(nbytes, extent, deadline)) break;
                    if (now_ns() >= deadline) {
                        pool.header().exhaustions.add();
                        throw pool.exhausted(nbytes);
                    }
                    if (waiting.since.load(RELAXED) == 0) waiting.since.store(now_ns(), RELAXED);
                    Woken woken;
                    {
                        GilRelease released;
                        woken = pool.wait_for_return(returns, deadline, spinner, waits, never);
                    }
                    if (woken == Woken::interrupted) check_signals();
                }
                return make_lease(by, extent, true);
            },
            "nbytes"_a, "timeout"_a.none() = 0,
            nb::sig("def take(self, nbytes: int, timeout: float | None = 0) -> BlockLease"))
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
            nb::sig(
                "def open(self, segment: int, block: int, generation: int, offset: int, nbytes: int) -> BlockLease"))
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
            "grant_all",
            [](Attachment& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes, nb::handle to) {
                by.require_ours();
                if (segment != by.segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                Extent ref{block, generation, offset, nbytes};
                if (to.is_none()) return Pool(by).grant_all(ref);
                std::vector<u32> peers;
                for (nb::handle peer : to) peers.push_back(nb::cast<u32>(peer));
                return Pool(by).grant_all(ref, peers);
            },
            "segment"_a, "block"_a, "generation"_a, "offset"_a, "nbytes"_a, "to"_a.none(),
            nb::sig("def grant_all(self, segment: int, block: int, generation: int, offset: int, nbytes: int, to: "
                    "list[int] | None) -> int"),
            "To each of these peers, or to none; None: to every other peer that is live. Returns the number of grants.")
        .def(
            "revoke",
            [](Attachment& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes, u32 to) {
                by.require_ours();
                if (segment != by.segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                return Pool(by).revoke({block, generation, offset, nbytes}, to);
            },
            "segment"_a, "block"_a, "generation"_a, "offset"_a, "nbytes"_a, "to"_a)
        .def(
            "unused_grants",
            [](Attachment& by, u64 segment, u32 block, u32 generation, u64 offset, u64 nbytes, u32 to) {
                by.require_ours();
                if (segment != by.segment().nonce())
                    throw Error(Fault::stale_ref, "the reference is to another segment");
                return Pool(by).unused_grants({block, generation, offset, nbytes}, to);
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
}

}  // namespace penstock::python
