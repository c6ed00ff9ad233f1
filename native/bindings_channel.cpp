// bindings_channel.cpp: the ends of a channel, and room in it that is filled in place.
#include <algorithm>
#include <optional>

#include "python.h"
#include "tap.h"

namespace penstock::python {

using namespace nb::literals;

namespace {

// However a call ends, its end waits no longer. (wait() keeps the time over an interruption.)
struct Waited {
    Waits& waits;
    u64 started = 0;
    ~Waited() {
        if (started != 0) waits.since_ns.store(0, RELAXED);
    }
};

// One thread at a time uses an end. A second one waits for its turn without the interpreter, or gets would_block.
// The thread that has the turn runs Python only in check_signals(), between two attempts, where no operation on the end
// is half done: so a signal handler may use the end again, and close it.
class Turn {
   public:
    Turn(EndMutex& mutex, u64 deadline, bool may_wait, const char* name) : lock_(mutex, std::try_to_lock) {
        while (!lock_.owns_lock()) {
            if (!may_wait) throw Error(Fault::would_block, format("another thread is using this end of '%s'", name));
            {
                GilRelease released(&lock_);
                lock_ = std::unique_lock(mutex, std::chrono::milliseconds(20));
            }
            check_signals();
            if (!lock_.owns_lock() && now_ns() >= deadline)
                throw Error(Fault::timeout, format("another thread is using this end of '%s'", name));
        }
    }

    std::unique_lock<EndMutex>* lock() { return &lock_; }

   private:
    std::unique_lock<EndMutex> lock_;
};

// ── how an end fails ──
std::string truncated(std::string text, size_t nbytes) {
    if (text.size() <= nbytes) return text;
    while (nbytes > 0 && (static_cast<u8>(text[nbytes]) & 0xc0) == 0x80) --nbytes;  // no part of a character
    text.resize(nbytes);
    return text;
}
// "RuntimeError: no such layer", in FAILURE_NBYTES; of SystemExit: the status. Leaves no exception behind.
std::string failure_of(nb::handle error) {
    try {
        if (PyErr_GivenExceptionMatches(error.ptr(), PyExc_SystemExit) != 0) {
            nb::object code = error.attr("code");
            // As the interpreter reads it: -1 where it does not fit.
            long number = code.is_none() ? 0 : nb::isinstance<nb::int_>(code) ? PyLong_AsLong(code.ptr()) : 1;
            PyErr_Clear();
            u32 status = static_cast<u32>(number) & 0xff;
            return how_in_words(1u + (status << 8)) + (status == 0 ? " without closing" : "");
        }
        std::string name =
            nb::cast<std::string>(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr()))).attr("__qualname__"));
        std::string text;
        try {
            nb::str in_full(error);
            nb::bytes encoded = nb::cast<nb::bytes>(in_full.attr("encode")("utf-8", "backslashreplace"));
            text.assign(encoded.c_str(), encoded.size());
        } catch (const std::exception&) {  // __str__ fails: the name must do
        }
        std::replace_if(text.begin(), text.end(), [](char c) { return static_cast<u8>(c) < ' ' || c == 0x7f; }, ' ');
        return truncated(text.empty() ? name : name + ": " + text, FAILURE_NBYTES);
    } catch (const std::exception&) {
        return "an exception";
    }
}
bool are_abandoned_left_open = false;
// The last reference to an open end goes. An exception may be the reason: it unwinds the frame that held the end.
Abandonment abandoned() {
    if (are_abandoned_left_open) return {Abandoned::leave_open, ""};
#if PY_VERSION_HEX >= 0x030d0000
    bool is_ending = !Py_IsInitialized() || Py_IsFinalizing();
#else
    bool is_ending = !Py_IsInitialized() || _Py_IsFinalizing();
#endif
    if (is_ending) return {Abandoned::leave_open, ""};
    if (!PyGILState_Check()) return {Abandoned::fail, GARBAGE};
    if (PyErr_Occurred() == nullptr) return {Abandoned::fail, PyEval_GetFrame() == nullptr ? GARBAGE_AT_END : GARBAGE};
    nb::python_error raised;  // takes it
    Abandonment abandonment{Abandoned::fail, failure_of(raised.value())};
    raised.restore();
    return abandonment;
}
template <class End>
void fail(End& end, nb::handle error) {
    if (!PyExceptionInstance_Check(error.ptr())) {
        PyErr_Format(PyExc_TypeError, "expected an exception, got %R", error.ptr());
        throw nb::python_error();
    }
    std::string failure = failure_of(error);
    end.begin_close();
    GilRelease released;
    end.close(&failure);
}
template <class End>
void leave_block(End& end, nb::args arguments) {
    if (arguments.size() > 1 && !nb::handle(arguments[1]).is_none()) return fail(end, arguments[1]);
    end.begin_close();
    GilRelease released;
    end.close();
}
// All ends of this process that may be open. Touched with the interpreter held.
template <class End>
std::vector<std::weak_ptr<End>>& open_ends() {
    static auto* ends = new std::vector<std::weak_ptr<End>>;
    return *ends;
}
template <class End>
std::shared_ptr<End> open_end(const std::shared_ptr<Attachment>& by, int index) {
    std::shared_ptr<End> end;
    {
        GilRelease released;  // it may wait until the end's dead owner has been reaped
        end = std::make_shared<End>(by, index);
    }
    auto& ends = open_ends<End>();
    std::erase_if(ends, [](const std::weak_ptr<End>& other) { return other.expired(); });
    ends.push_back(end);
    return end;
}
// Open while Python has a reference to it. Records that are viewed keep it in memory, but not open.
nb::object open_receiver(const std::shared_ptr<Attachment>& by, int index) {
    std::shared_ptr<Receiver> end = open_end<Receiver>(by, index);
    nb::object object = nb::cast(end);
    nb::keep_alive_cb(object, new std::shared_ptr<Receiver>(end), [](void* payload) noexcept {
        auto* held = static_cast<std::shared_ptr<Receiver>*>(payload);
        if ((*held)->abandon()) delete held;
    });
    return object;
}
template <class End>
void fail_all(nb::handle error) {
    std::vector<std::weak_ptr<End>> ends = open_ends<End>();  // a copy: the error's text runs Python
    for (const std::weak_ptr<End>& other : ends)
        if (std::shared_ptr<End> end = other.lock()) fail(*end, error);
}

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
        Py_buffer view = get_buffer(object);
        views_.push_back(view);
        add(view.buf == nullptr ? "" : view.buf, static_cast<u64>(view.len));
    }
    Part one_{"", 0};
    bool has_one_ = false;
    std::vector<Part> parts_;
    std::vector<Py_buffer> views_;
    nb::object keep_;
};

// A lock that a stopped peer holds is, for a call that may not wait, as good as no room.
template <class Do>
auto unless_locked(bool may_wait, Do&& attempt) {
    try {
        return attempt();
    } catch (Error& error) {
        if (!may_wait && error.fault == Fault::timeout) error.fault = Fault::would_block;
        throw;
    }
}

// ── sender ──
// attempt(turn, deadline): whether it is over.
template <class Try>
bool send_loop(Sender& sender, nb::handle timeout, bool may_wait, Try&& attempt) {
    u64 deadline = may_wait ? deadline_of(timeout) : 0;
    sender.channel().require_ours();
    Turn turn(sender.mutex(), deadline, may_wait, sender.name());
    Waited waited{sender.channel().lane(sender.index()).waits};
    for (;;) {
        if (unless_locked(may_wait, [&] { return attempt(turn, deadline); })) return true;
        if (!may_wait) return false;
        if (waited.started == 0) waited.started = now_ns();
        Woken woken;
        {
            GilRelease released(turn.lock());
            woken = sender.wait(deadline);
        }
        if (woken == Woken::interrupted) check_signals();
        if (woken == Woken::deadline) {
            if (attempt(turn, deadline)) return true;
            throw sender.timeout(now_ns() - waited.started);
        }
    }
}

// Returns `otherwise` where the attempt would block.
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
    return send_loop(sender, timeout, may_wait, [&](Turn& turn, u64 deadline) {
        if (parts.total < LONG_COPY) return sender.try_send(parts.data(), parts.size(), parts.total, deadline);
        GilRelease released(turn.lock());
        return sender.try_send(parts.data(), parts.size(), parts.total, deadline);
    });
}

// Room in the channel itself, to be filled in place. Visible with commit(), never after abort().
struct OpenReservation {
    std::shared_ptr<Sender> sender;
    Reservation* room = nullptr;  // the sender's
    u8* at = nullptr;
    u64 nbytes = 0;
    bool is_open = true;

    OpenReservation(std::shared_ptr<Sender> sender, Reservation* room)
        : sender(std::move(sender)), room(room), at(room->at), nbytes(room->nbytes) {}
    OpenReservation(const OpenReservation&) = delete;
    OpenReservation& operator=(const OpenReservation&) = delete;
    ~OpenReservation() { abort(); }
    void commit(u64 sent_nbytes) {
        if (sent_nbytes > nbytes)
            throw Error(Fault::value,
                        format("the reservation has %llu bytes: %llu cannot be committed",
                               static_cast<unsigned long long>(nbytes), static_cast<unsigned long long>(sent_nbytes)));
        if (!is_open) throw Error(Fault::closed, "the reservation has been committed or aborted");
        if (sender->views() != 0) {
            PyErr_Format(PyExc_BufferError, "the reservation has %d views: drop them first", sender->views());
            throw nb::python_error();
        }
        is_open = false;
        sender->channel().require_ours();
        Turn turn(sender->mutex(), NEVER, true, sender->name());
        if (sender->is_closed()) throw Error(Fault::closed, "the sender was closed: the reservation is lost");
        sender->shrink(sent_nbytes);
        try {
            sender->commit(*room);
        } catch (...) {  // a stopped peer holds a lock: it may be tried again
            is_open = true;
            throw;
        }
    }
    // The room is free with the last view.
    void abort() noexcept {
        if (!std::exchange(is_open, false) || sender->is_closed()) return;
        in_turn([&] { sender->abort(); });
    }
    void view_dropped() noexcept {
        if (sender->drop_view()) in_turn([&] { sender->finish_abort(); });
    }

   private:
    template <class Do>
    void in_turn(Do&& what) {
        if (!sender->channel().is_ours()) return;
        GilRelease released;
        std::lock_guard guard(sender->mutex());
        what();
    }
};
int reservation_getbuffer(PyObject* self, Py_buffer* view, int flags) {
    OpenReservation* r = nb::inst_ptr<OpenReservation>(self);
    view->obj = nullptr;
    if (!r->is_open || r->sender->is_closed()) {
        PyErr_SetString(PyExc_BufferError, "the reservation has been committed or aborted");
        return -1;
    }
    if (PyBuffer_FillInfo(view, self, r->at, static_cast<Py_ssize_t>(r->nbytes), 0, flags) != 0) return -1;
    r->sender->add_view();
    return 0;
}
void reservation_releasebuffer(PyObject* self, Py_buffer*) { nb::inst_ptr<OpenReservation>(self)->view_dropped(); }
PyType_Slot reservation_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(reservation_getbuffer)},
                                   {Py_bf_releasebuffer, reinterpret_cast<void*>(reservation_releasebuffer)},
                                   {0, nullptr}};

// ── receiver ──
// Finds the next record, waiting if it may; false: none, and it may not wait.
bool find_loop(Receiver& receiver, Turn& turn, bool may_wait, u64 deadline, FoundRecord& record) {
    Waited waited{receiver.channel().receiver(receiver.index()).waits};
    for (;;) {
        if (unless_locked(may_wait, [&] { return receiver.try_find(record, deadline); })) return true;
        if (!may_wait) return false;
        if (waited.started == 0) waited.started = now_ns();
        Woken woken;
        {
            GilRelease released(turn.lock());
            woken = receiver.wait(deadline);
        }
        if (woken == Woken::interrupted) check_signals();
        if (woken == Woken::deadline) {
            if (receiver.try_find(record, deadline)) return true;
            throw receiver.timeout(now_ns() - waited.started);
        }
    }
}
nb::object copy_out(Receiver& receiver, Turn& turn, const FoundRecord& record) {
    nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(record.nbytes)));
    if (!bytes.is_valid()) {
        receiver.accept(record);
        throw nb::python_error();
    }
    char* to = PyBytes_AS_STRING(bytes.ptr());
    if (record.nbytes < LONG_COPY) {
        std::memcpy(to, record.at, record.nbytes);
        receiver.accept(record);
    } else {
        GilRelease released(turn.lock());
        std::memcpy(to, record.at, record.nbytes);
        receiver.accept(record);
    }
    return bytes;
}
enum class As { copy, view, frame };  // frame: a copy, but what lies in the pool is leased there

nb::object receive(const std::shared_ptr<Receiver>& receiver, nb::handle timeout, bool may_wait, As as) {
    u64 deadline = may_wait ? deadline_of(timeout) : 0;
    receiver->channel().require_ours();
    std::unique_ptr<Lease> lease;
    {
        Turn turn(receiver->mutex(), deadline, may_wait, receiver->name());
        FoundRecord record;
        if (!find_loop(*receiver, turn, may_wait, deadline, record)) return nb::none();
        if (as == As::copy || (as == As::frame && !record.is_spilled)) return copy_out(*receiver, turn, record);
        lease = std::make_unique<Lease>();
        lease->by = receiver->channel().by;
        lease->at = const_cast<u8*>(record.at);
        lease->lane = record.lane;
        lease->id = receiver->lease(record);
        if (record.is_spilled)
            lease->extent = record.extent;
        else
            lease->receiver = receiver, lease->extent.nbytes = record.nbytes;
    }
    // Not in turn: making an object may collect garbage, and so run Python.
    nb::object object = nb::cast(lease.get(), nb::rv_policy::take_ownership);
    (void)lease.release();
    return object;
}

nb::object try_receive(const std::shared_ptr<Receiver>& receiver, As as) {
    return unless_busy([&] { return receive(receiver, nb::none(), false, as); }, nb::object(nb::none()));
}

// ── tap ──
// Through a read-only mapping of its own, so that nothing it does can be seen in the channel.
class TapOfAll {
   public:
    TapOfAll(const Segment& segment, bool is_from_start) : tap_(look_at(segment), is_from_start) {}
    nb::list read(u64 most) {
        std::unique_lock guard(mutex_, std::try_to_lock);
        if (!guard) throw Error(Fault::would_block, format("another thread reads this tap of '%s'", tap_.name()));
        nb::list out;
        if (corrupt_) throw *std::exchange(corrupt_, std::nullopt);
        try {
            for (TappedRecord record; out.size() < most && tap_.find(record);) {
                nb::object frame = copy(record);
                if (frame.is_valid())
                    out.append(nb::make_tuple(record.lane, record.sequence, record.committed_ns, std::move(frame)));
            }
        } catch (const Error& error) {
            corrupt_ = error;  // after what came before it
        }
        missed_.store(tap_.missed(), RELAXED);
        if (corrupt_ && out.size() == 0) throw *std::exchange(corrupt_, std::nullopt);
        return out;
    }
    u64 missed() const { return missed_.load(RELAXED); }
    const char* name() const { return tap_.name(); }

   private:
    static std::shared_ptr<Segment> look_at(const Segment& segment) {
        int fd = ::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0);
        if (fd < 0) throw os_error("tapping '" + segment.name() + "'", "fcntl", errno);
        return Segment::adopt(fd, false, true);
    }
    // The record's bytes; None: of a long one that is gone; nothing: it was missed.
    nb::object copy(const TappedRecord& record) {
        nb::object bytes;
        if (!record.is_gone) {
            bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(record.nbytes)));
            if (!bytes.is_valid()) {
                tap_.copy(record, nullptr);
                throw nb::python_error();
            }
        }
        u8* to = bytes.is_valid() ? reinterpret_cast<u8*>(PyBytes_AS_STRING(bytes.ptr())) : nullptr;
        bool is_whole;
        if (record.nbytes < LONG_COPY || to == nullptr) {
            is_whole = tap_.copy(record, to);
        } else {
            GilRelease released;
            is_whole = tap_.copy(record, to);
        }
        if (is_whole) return bytes;
        return record.is_spilled ? nb::object(nb::none()) : nb::object();
    }

    Tap tap_;
    std::mutex mutex_;
    std::optional<Error> corrupt_;
    Atomic<u64> missed_{0};
};

// The native ends are the ends of bytes: channel/ends.py registers them as Sender and Receiver.
template <class End>
nb::object repr_of(const char* type, const End& end) {
    return text_of(format("%s(%u of '%s', bytes%s)", type, end.index(), end.name(), end.is_closed() ? ", closed" : ""));
}

[[noreturn]] void would_block(const char* what, const char* name) {
    throw Error(Fault::would_block, format("%s '%s'", what, name));
}

}  // namespace

constexpr const char* FAIL =
    "Ends the channel by an error: the other side gets PeerDied with the error's class and text.";

void bind_channel(nb::module_& m) {
    on_abandoned = abandoned;
    m.def(
        "leave_abandoned_ends_open", [] { are_abandoned_left_open = true; },
        "From now on, open ends of this process stay open until the process ends, also without a reference.");
    m.def(
        "fail_open_ends",
        [](nb::handle error) {
            fail_all<Sender>(error);
            fail_all<Receiver>(error);
        },
        "error"_a, nb::sig("def fail_open_ends(error: BaseException) -> None"),
        "Ends all open ends of this process by an error: for a process that is about to end.");
    nb::class_<OpenReservation>(m, "Reservation", nb::type_slots(reservation_slots),
                                "Room for one record, filled in place: `ByteSender.reserve`. Visible after commit(); a "
                                "`with` block commits, or "
                                "aborts if it raises.\n\n"
                                "Examples:\n"
                                "    >>> ring = Ring()\n"
                                "    >>> room = ring.open_sender().reserve(100)\n"
                                "    >>> with memoryview(room) as view:\n"
                                "    ...     view[:5] = b'hello'\n"
                                "    >>> room.commit(5)\n"
                                "    >>> ring.open_receiver().receive()\n"
                                "    b'hello'\n")
        .def(
            "commit",
            [](OpenReservation& r, nb::handle nbytes) {
                r.commit(nbytes.is_none() ? r.nbytes : nb::cast<u64>(nbytes));
            },
            "nbytes"_a.none() = nb::none(), nb::sig("def commit(self, nbytes: int | None = None) -> None"),
            "Sends the record: the first `nbytes` of the room; None: all of them. Raises BufferError while a view "
            "lives, "
            "which could still write.")
        .def("abort", &OpenReservation::abort)
        .def("__len__", [](const OpenReservation& r) { return r.nbytes; })
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Reservation"))
        .def("__exit__",
             [](OpenReservation& r, nb::args arguments) {
                 if (!r.is_open) return;
                 if (nb::handle(arguments[0]).is_none())
                     r.commit(r.nbytes);
                 else
                     r.abort();
             })
        .def(
            "__repr__",
            [](const OpenReservation& r) {
                return format("Reservation(%llu bytes%s)", static_cast<unsigned long long>(r.nbytes),
                              r.is_open ? "" : ", committed or aborted");
            },
            nb::sig("def __repr__(self) -> str"));

    nb::class_<Sender>(
        m, "Sender", nb::is_weak_referenceable(),
        "The end of a channel that sends bytes: besides the methods of `Sender`, `reserve` lends room for a record.\n\n"
        "Examples:\n"
        "    >>> ring = Ring()\n"
        "    >>> sender = ring.open_sender()\n"
        "    >>> with sender.reserve(4) as room:\n"
        "    ...     memoryview(room)[:] = b'step'\n"
        "    >>> ring.open_receiver().receive()\n"
        "    b'step'\n")
        .def(nb::new_(&open_end<Sender>), "attachment"_a, "index"_a = -1)
        .def(
            "send", [](Sender& s, nb::handle record, nb::handle timeout) { send(s, record, timeout, true); },
            "message"_a, "timeout"_a.none() = nb::none(),
            nb::sig("def send(self, message: typing_extensions.Buffer | "
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
            "message"_a,
            nb::sig("def send_nowait(self, message: typing_extensions.Buffer | "
                    "collections.abc.Sequence[typing_extensions.Buffer]) -> None"),
            "The same, but raises WouldBlock instead of blocking; also where a stopped peer holds a lock, which it "
            "names. "
            "(It waits for such a lock for at most 1 ms, or 20 ms while the holder is runnable.)")
        .def(
            "try_send",
            [](Sender& s, nb::handle record) {
                return unless_busy([&] { return send(s, record, nb::none(), false); }, false);
            },
            "message"_a,
            nb::sig("def try_send(self, message: typing_extensions.Buffer | "
                    "collections.abc.Sequence[typing_extensions.Buffer]) -> bool"))
        .def(
            "reserve",
            [](const std::shared_ptr<Sender>& s, u64 nbytes, nb::handle timeout) {
                Reservation* room = nullptr;
                send_loop(*s, timeout, true,
                          [&](Turn&, u64 deadline) { return (room = s->try_reserve(nbytes, deadline)) != nullptr; });
                return new OpenReservation(s, room);
            },
            "nbytes"_a, "timeout"_a.none() = nb::none(),
            nb::sig("def reserve(self, nbytes: int, timeout: float | None = None) -> Reservation"),
            "Room for one record of `nbytes`, to be filled in place and committed.")
        .def_prop_ro("is_locked_out", &Sender::is_locked_out,
                     "Whether the last attempt found a lock held by a stopped peer: nothing wakes for that.")
        .def("arm", &Sender::arm)
        .def("disarm", &Sender::disarm, "is_over"_a)
        .def(
            "timeout_error", [](Sender& s, double waited) { throw s.timeout(static_cast<u64>(waited * 1e9)); },
            "waited"_a)
        .def(
            "close",
            [](Sender& s) {
                s.begin_close();
                GilRelease released;
                s.close();
            },
            "Ends the channel in peace: receivers read what is there, then EndOfChannel.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Sender"))
        .def("__exit__", &leave_block<Sender>)
        .def("fail", &fail<Sender>, "error"_a, FAIL)
        .def_prop_ro("is_closed", &Sender::is_closed)
        .def_prop_ro("index", &Sender::index)
        .def(
            "__repr__", [](const Sender& end) { return repr_of("Sender", end); }, nb::sig("def __repr__(self) -> str"))
        .def_prop_ro("name", [](const Sender& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"));

    nb::class_<Receiver>(
        m, "Receiver", nb::is_weak_referenceable(),
        "The end of a channel that receives bytes: besides the methods of `Receiver`, `receive_view` leases a "
        "record where it lies.\n\n"
        "Examples:\n"
        "    >>> ring = Ring()\n"
        "    >>> ring.open_sender().send(b'step')\n"
        "    >>> with ring.open_receiver().receive_view() as lease:\n"
        "    ...     bytes(lease)\n"
        "    b'step'\n")
        .def(nb::new_(&open_receiver), "attachment"_a, "index"_a = -1)
        .def(
            "receive",
            [](const std::shared_ptr<Receiver>& r, nb::handle timeout) { return receive(r, timeout, true, As::copy); },
            "timeout"_a.none() = nb::none(), nb::sig("def receive(self, timeout: float | None = None) -> bytes"),
            "The next record, copied. Blocks until there is one, or `timeout` seconds have passed.\n"
            "Raises Timeout, PeerDied after the last record of a sender that died, EndOfChannel after the last of one "
            "that closed.")
        .def(
            "receive_view",
            [](const std::shared_ptr<Receiver>& r, nb::handle timeout) { return receive(r, timeout, true, As::view); },
            "timeout"_a.none() = nb::none(),
            nb::sig("def receive_view(self, timeout: float | None = None) -> BlockLease"),
            "The next record where it lies: a read-only lease. A record in the ring keeps its room until the lease is "
            "released.")
        .def(
            "receive_nowait",
            [](const std::shared_ptr<Receiver>& r) {
                nb::object got = receive(r, nb::none(), false, As::copy);
                if (got.is_none()) would_block("no record now in", r->name());
                return got;
            },
            nb::sig("def receive_nowait(self) -> bytes"))
        .def(
            "receive_view_nowait",
            [](const std::shared_ptr<Receiver>& r) {
                nb::object got = receive(r, nb::none(), false, As::view);
                if (got.is_none()) would_block("no record now in", r->name());
                return got;
            },
            nb::sig("def receive_view_nowait(self) -> BlockLease"))
        .def(
            "receive_frame",
            [](const std::shared_ptr<Receiver>& r, nb::handle timeout) { return receive(r, timeout, true, As::frame); },
            "timeout"_a.none() = nb::none(),
            nb::sig("def receive_frame(self, timeout: float | None = None) -> bytes | BlockLease"),
            "The next record: a short one copied, one that lies in the pool where it lies.")
        .def(
            "receive_frame_nowait",
            [](const std::shared_ptr<Receiver>& r) {
                nb::object got = receive(r, nb::none(), false, As::frame);
                if (got.is_none()) would_block("no record now in", r->name());
                return got;
            },
            nb::sig("def receive_frame_nowait(self) -> bytes | BlockLease"))
        .def(
            "try_receive", [](const std::shared_ptr<Receiver>& r) { return try_receive(r, As::copy); },
            nb::sig("def try_receive(self) -> bytes | None"))
        .def(
            "try_receive_view", [](const std::shared_ptr<Receiver>& r) { return try_receive(r, As::view); },
            nb::sig("def try_receive_view(self) -> BlockLease | None"))
        .def(
            "try_receive_frame", [](const std::shared_ptr<Receiver>& r) { return try_receive(r, As::frame); },
            nb::sig("def try_receive_frame(self) -> bytes | BlockLease | None"))
        .def_prop_ro("is_locked_out", &Receiver::is_locked_out,
                     "Whether the last attempt found a lock held by a stopped peer: nothing wakes for that.")
        .def("arm", &Receiver::arm)
        .def("disarm", &Receiver::disarm, "is_over"_a)
        .def(
            "timeout_error", [](Receiver& r, double waited) { throw r.timeout(static_cast<u64>(waited * 1e9)); },
            "waited"_a)
        .def(
            "close",
            [](Receiver& r) {
                r.begin_close();
                GilRelease released;
                r.close();
            },
            "Leaves the channel: the sender no longer waits for this receiver.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Receiver"))
        .def("__exit__", &leave_block<Receiver>)
        .def("fail", &fail<Receiver>, "error"_a, FAIL)
        .def(
            "__iter__",  // without close(), which `yield from` would call as its generator is abandoned
            [](nb::handle self) { return nb::steal(PyCallIter_New(self.attr("__next__").ptr(), Py_None)); },
            nb::sig("def __iter__(self) -> collections.abc.Iterator[bytes]"))
        .def(
            "__next__",
            [](const std::shared_ptr<Receiver>& r) {
                try {
                    return receive(r, nb::none(), true, As::copy);
                } catch (const Error& error) {
                    if (error.fault != Fault::end_of_channel) throw;
                    GilRelease released;
                    r->exhaust();
                }
                throw nb::stop_iteration();
            },
            nb::sig("def __next__(self) -> bytes"))
        .def_prop_ro("is_closed", &Receiver::is_closed)
        .def(
            "exhaust",
            [](Receiver& r) {
                GilRelease released;
                r.exhaust();
            },
            "Closes an end after EndOfChannel. Further calls, also of other threads, raise EndOfChannel.")
        .def_prop_ro("index", &Receiver::index)
        .def_prop_ro("source", &Receiver::source, "The sender (its index) of the record that was received last.")
        .def(
            "__repr__", [](const Receiver& end) { return repr_of("Receiver", end); },
            nb::sig("def __repr__(self) -> str"))
        .def_prop_ro("name", [](const Receiver& x) { return text_of(x.name()); }, nb::sig("def name(self, /) -> str"));

    nb::class_<TapOfAll>(m, "Tap",
                         "Looks at the records of a channel as they pass, without a trace in it: it joins nothing, "
                         "writes nothing, and no process waits for it.\n"
                         "It sees what is sent from now on; from_start: what some receiver has still to read, too.\n\n"
                         "Examples:\n"
                         "    >>> import os\n"
                         "    >>> from penstock._native import Segment as NativeSegment\n"
                         "    >>> ring = Ring()\n"
                         "    >>> tap = Tap(NativeSegment.adopt(os.dup(ring.fd), is_observer=True))\n"
                         "    >>> ring.open_sender().send(b'step')\n"
                         "    >>> [record for *_, record in tap.read()]\n"
                         "    [b'step']\n")
        .def(nb::init<const Segment&, bool>(), "segment"_a, "from_start"_a = false)
        .def("read", &TapOfAll::read, "most"_a = 1024,
             nb::sig("def read(self, most: int = 1024) -> list[tuple[int, int, int, bytes | None]]"),
             "Up to `most` records that have come since the last time: lane, sequence, when it was committed (ns, "
             "monotonic), and its bytes; None in their place where a long record was given back before it could be "
             "copied. Never blocks. Raises CorruptRecord for what is no record, and goes on after it.")
        .def_prop_ro("missed", &TapOfAll::missed,
                     "Records that were overwritten before they were read, as of the last read().")
        .def(
            "__repr__", [](const TapOfAll& tap) { return text_of(format("Tap('%s')", tap.name())); },
            nb::sig("def __repr__(self) -> str"));
}

}  // namespace penstock::python
