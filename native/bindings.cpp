// bindings.cpp: the module: its errors as Python's, and what belongs to no object. Its classes: bindings_*.cpp.
#include "crc32c.h"
#include "python.h"

using namespace penstock;
using namespace penstock::python;
using namespace nb::literals;

namespace {

void raise_python(const Error& error) {
    static const char* const names[] = {"ClosedError", "EndOfChannel",    "WouldBlock",   "Timeout",
                                        "PeerDied",    "MemoryExhausted", "StaleRef",     "LayoutMismatch",
                                        "ValueError",  "OSError",         "CorruptRecord"};
    const char* name = names[static_cast<int>(error.fault)];
    if (error.fault == Fault::value) return PyErr_SetString(PyExc_ValueError, error.text.c_str());
    try {
        if (error.fault == Fault::os) {  // with an errno, Python chooses the class: PermissionError, BlockingIOError …
            nb::object cls = nb::borrow(PyExc_OSError);
            nb::object exception = error.numbers.empty() ? cls(text_of(error.text))
                                                         : cls(error.numbers.front().second, text_of(error.text));
            return PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
        }
        nb::object exception = nb::module_::import_("penstock.errors").attr(name)(text_of(error.text));
        for (const auto& [key, value] : error.numbers) exception.attr(key) = value;
        for (const auto& [key, value] : error.words) exception.attr(key) = text_of(value);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    } catch (nb::python_error& wrong) {
        wrong.restore();
    }
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native core of penstock: segments, pools, peers, channels. Use it through the package.";
    interpreter = {&GilRelease::release_if_held, &GilRelease::retake};
    // Off for users: a tensor of torch in a global variable, or a daemon thread, holds a lease beyond the interpreter's
    // end, and that is no leak of ours. Tests switch it on.
    nb::set_leak_warnings(std::getenv("PENSTOCK_LEAK_WARNINGS") != nullptr);
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
    m.attr("MAX_NBYTES") = MAX_NBYTES;
    m.attr("MAX_SCHEMA_NBYTES") = MAX_SCHEMA_NBYTES;
    m.attr("MAX_NAME_NBYTES") = NAME_NBYTES - 1;
    m.attr("MAX_GRANULES") = GRANULES;
    m.attr("SEGMENT") = static_cast<u32>(SegmentKind::raw);
    m.attr("POOL") = static_cast<u32>(SegmentKind::pool);
    m.attr("CHANNEL") = static_cast<u32>(SegmentKind::channel);
    m.attr("RING") = static_cast<u32>(ChannelStyle::ring);
    m.attr("BROADCAST") = static_cast<u32>(ChannelStyle::broadcast);
    m.attr("INBOX") = static_cast<u32>(ChannelStyle::inbox);
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
    m.def(
        "memory_available",
        [] {
            Available available = memory_available();
            return nb::make_tuple(available.nbytes, available.owner);
        },
        nb::sig("def memory_available() -> tuple[int, str]"), "Bytes, and what limits them: a part of a sentence.");
    m.def(
        "max_spin",
        [] {
            const Processors& processors = Processors::get();
            return nb::make_tuple(processors.max_spin_ns(), processors.spin_limit());
        },
        nb::sig("def max_spin() -> tuple[int, str | None]"),
        "Nanoseconds that a wait spins at most with latency=\"auto\", and what limits them: a sentence.");
    m.def("total_memory", [] {
        struct sysinfo info{};
        ::sysinfo(&info);
        return static_cast<u64>(info.totalram) * info.mem_unit;
    });
    m.def("process_identity", [] { return nb::make_tuple(process()->pid.load(RELAXED), own_start()); });
    m.def(
        "start_ticks",
        [](int pid) {
            ProcessStat stat = read_stat(pid);
            if (stat.error != 0) throw os_error(format("pid %d", pid), "reading /proc/PID/stat", stat.error);
            return stat.start;
        },
        "pid"_a, "Clock ticks since boot at which a process started. Raises OSError if that cannot be read.");
    m.def(
        "open_process",
        [](int pid, u64 start) {
            int pidfd = -1;
            Sight sight = look_at(pid, start, &pidfd);
            if (sight.liveness == Liveness::unknown)
                throw Error(Fault::os, format("pid %d: %s", pid, sight.why().c_str()));
            return pidfd;
        },
        "pid"_a, "start"_a,
        "A pidfd of the process with this pid and start time, which the caller closes; -1: it is gone. Raises OSError "
        "if "
        "that cannot be found out.");
    m.def(
        "snapshot", [](int fd) { return to_dict(snapshot::take(fd)); }, "fd"_a,
        "Everything a segment tells of itself, read-only, without joining it. Takes the descriptor over.");
    m.def(
        "crc32c",
        [](nb::handle data, u32 before) {
            Py_buffer view;
            if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
            u32 crc = crc32c::compute(view.buf, static_cast<u64>(view.len), before);
            PyBuffer_Release(&view);
            return crc;
        },
        "data"_a, "before"_a = 0, nb::sig("def crc32c(data: Buffer, before: int = 0) -> int"),
        "The CRC-32C of bytes; before: that of the bytes before them.");
    m.def("require_numbers", &require_numbers, "format"_a,
          "Raises TypeError unless a buffer of this format holds bytes or numbers.");
    m.def("nothing", [] {}, "Does nothing: what a call costs.");

    bind_memory(m);
    bind_channel(m);
    bind_store(m);
    bind_trace(m);
    bind_values(m);
}
