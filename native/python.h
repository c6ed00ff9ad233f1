// python.h: what every file that knows Python needs of it. It and bindings*.cpp are the only ones that do; they let go
// of the interpreter before every wait and every long copy.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "reap.h"
#include "receiver.h"
#include "sender.h"
#include "snapshot.h"

namespace penstock::python {

namespace nb = nanobind;

// Each binds what its file is about: bindings_memory.cpp, and so on.
void bind_memory(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_store(nb::module_& m);
void bind_growth(nb::module_& m);

// What another process wrote may be anything.
inline nb::object text_of(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

inline u64 deadline_of(nb::handle timeout) {
    if (timeout.is_none()) return NEVER;
    double seconds = PyFloat_AsDouble(timeout.ptr());
    if (PyErr_Occurred()) throw nb::python_error();
    if (std::isnan(seconds)) throw Error(Fault::value, "timeout is not a number");
    if (seconds < 0) seconds = 0;
    return seconds > 1e9 ? NEVER : now_ns() + static_cast<u64>(seconds * 1e9);
}
inline void check_signals() {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

inline nb::dict to_dict(const snapshot::Node& node) {
    nb::dict out;
    for (const auto& [key, value] : node.numbers) out[key.c_str()] = nb::int_(value);
    for (const auto& [key, value] : node.words) out[key.c_str()] = text_of(value);
    for (const auto& [key, list] : node.lists) {
        nb::list items;
        for (const auto& item : list) items.append(to_dict(item));
        out[key.c_str()] = items;
    }
    return out;
}

// The right to touch some bytes, and the object that exports them: while a view of it lives, it lives.
struct Lease {
    std::shared_ptr<Attachment> by;
    std::shared_ptr<Receiver> receiver;  // of a record that lies in a ring
    u8* at = nullptr;                    // null: of a pool whose bytes lie elsewhere
    Extent extent{};                     // of a block; or .nbytes alone
    u32 lane = 0;
    u64 id = 0;
    bool is_writable = false;
    bool is_released = false;
    bool is_filling = false;  // of what a store keeps, once this writer commits it; gone without a word: abandoned
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
            else if (is_filling)
                Store(*by).give_up(extent);
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

// If it cannot be made (no address space to write in), what it would have held is given back: with a word to those who
// wait for it, if it is_filling.
inline nb::object make_lease(const std::shared_ptr<Attachment>& by, const Extent& extent, bool is_writable,
                             bool is_filling = false) {
    nb::object made = nb::cast(new Lease, nb::rv_policy::take_ownership);
    Lease* lease = nb::inst_ptr<Lease>(made);
    lease->by = by;
    lease->extent = extent;
    lease->is_writable = is_writable;
    lease->is_filling = is_filling;
    if (by->segment().geometry().shape.elsewhere != 0) return made;  // there is nothing to point at
    u64 offset = by->segment().geometry().pool_data + extent.offset;
    lease->at = is_writable ? by->segment().write_at(offset) : const_cast<u8*>(by->segment().read_at(offset));
    return made;
}

}  // namespace penstock::python
