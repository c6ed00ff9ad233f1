// bindings_trace.cpp: the events of a channel's ends, for a tracer.
#include "python.h"
#include "trace.h"

using namespace penstock;
using namespace penstock::python;
using namespace nb::literals;

namespace penstock::python {

namespace {

// The interpreter is held throughout, so one thread reads at a time.
nb::list read_all(TraceReader& reader) {
    std::vector<TraceEvent> events(TRACE_EVENTS);
    nb::list out;
    for (u32 end = 0; end < reader.ends(); ++end) {
        u64 many = reader.read(end, events.data());
        if (many == 0) continue;
        out.append(nb::make_tuple(end, nb::bytes(events.data(), many * sizeof(TraceEvent))));
    }
    return out;
}

}  // namespace

void bind_trace(nb::module_& m) {
    nb::class_<TraceReader>(m, "TraceReader",
                            "Reads the events that the ends of a channel write while they are traced: what was sent, "
                            "taken and waited for, and when. It joins nothing, and no process waits for it.\n\n"
                            "Examples:\n"
                            "    >>> ring = Ring()\n"
                            "    >>> reader = TraceReader(ring._segment)\n"
                            "    >>> reader.extend()\n"
                            "    False\n"
                            "    >>> ring.open_sender().send(b'step')\n"
                            "    >>> [(end, len(events) // TRACE_EVENT_NBYTES) for end, events in reader.read()]\n"
                            "    [(0, 3)]\n")
        .def(nb::init<std::shared_ptr<Segment>>(), "segment"_a,
             "Claims the memory of the events. Raises MemoryExhausted, and ValueError for a segment that is not a "
             "channel, or is mapped for reading only.")
        .def("extend", &TraceReader::extend,
             "Has the ends write events until two seconds from now. Returns False if they did not until now: events "
             "may lack, but at the first call.")
        .def("read", &read_all, nb::sig("def read(self) -> list[tuple[int, bytes]]"),
             "The events since the last call, in order, of each end that has any: the senders first, then the "
             "receivers. Never blocks.")
        .def_prop_ro("missed", &TraceReader::missed, "Events that were overwritten before they were read.")
        .def_prop_ro("corrupt", &TraceReader::corrupt, "Events that no end has written like that.");
    m.attr("TRACE_EVENT_NBYTES") = sizeof(TraceEvent);
}

}  // namespace penstock::python
