// python.h: what every file that knows Python needs of it. It and bindings*.cpp are the only ones that do; they let go
// of the interpreter before every wait and every long copy.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "gil.h"
#include "reap.h"
#include "receiver.h"
#include "sender.h"
#include "snapshot.h"

namespace penstock::python {

namespace nb = nanobind;

// Each binds what its file is about: bindings_memory.cpp, bindings_channel.cpp, ….
void bind_memory(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_store(nb::module_& m);
void bind_trace(nb::module_& m);
void bind_values(nb::module_& m);

constexpr u64 LONG_COPY = 64 * 1024;  // from here on a copy lets go of the interpreter: taking it back costs less

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

// Python objects and pointers are addresses of this process. `format` is of PEP 3118: names stand between colons.
inline void require_numbers(const char* format) {
    bool is_name = false;
    for (const char* code = format; *code != '\0'; ++code) {
        if (*code == ':') is_name = !is_name;
        bool is_complex = *code == 'Z' && std::memchr("fdg", code[1], 3) != nullptr;
        if (!is_name && !is_complex && std::strchr("OPXzZ&", *code) != nullptr) {
            PyErr_Format(
                PyExc_TypeError,
                "expected bytes or numbers, got a buffer of format '%s': objects and pointers are addresses of "
                "this process",
                format);
            throw nb::python_error();
        }
    }
}
// The bytes of `object`, which PyBuffer_Release lets go.
inline Py_buffer get_buffer(PyObject* object, int flags = PyBUF_SIMPLE) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_ND | PyBUF_FORMAT | flags) == 0) {
        try {
            if (view.format != nullptr) require_numbers(view.format);
        } catch (...) {
            PyBuffer_Release(&view);
            throw;
        }
        return view;
    }
    PyErr_Clear();  // perhaps a dtype that PEP 3118 does not have: bfloat16, datetime64
    if (PyObject_GetBuffer(object, &view, flags) != 0) throw nb::python_error();
    return view;
}

// The right to touch some bytes, and the object that exports them: while a view of it lives, it lives.
struct Lease {
    std::shared_ptr<Attachment> by;
    std::shared_ptr<Receiver> receiver;  // of a record that lies in a ring
    u8* at = nullptr;                    // null: the bytes of its pool lie elsewhere
    Extent extent{};                     // of a block; or .nbytes alone
    u32 lane = 0;
    u64 id = 0;
    bool is_writable = false;
    bool is_released = false;
    bool is_shown = false;    // by arrays that hold it without an export: it goes with the last of them, and not before
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
        if (is_shown && !is_released) {
            PyErr_SetString(PyExc_BufferError, "the lease has views: it goes with the last of them");
            throw nb::python_error();
        }
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

// If it cannot be made (no address space to write in), its block is given back; if it is_filling, peers that wait for
// the value are woken.
inline nb::object make_lease(const std::shared_ptr<Attachment>& by, const Extent& extent, bool is_writable,
                             bool is_filling = false) {
    static const nb::handle type = nb::type<Lease>();
    nb::object object = nb::inst_alloc(type);
    Lease* lease = new (nb::inst_ptr<Lease>(object)) Lease;
    nb::inst_mark_ready(object);
    lease->by = by;
    lease->extent = extent;
    lease->is_writable = is_writable;
    lease->is_filling = is_filling;
    if (by->segment().geometry().shape.elsewhere != 0) return object;  // there is nothing to point at
    u64 offset = by->segment().geometry().pool_data + extent.offset;
    if (is_writable && !by->segment().is_populated(offset, extent.nbytes)) {
        GilRelease released;
        by->segment().populate(offset, extent.nbytes);
    }
    lease->at = is_writable ? by->segment().write_at(offset) : const_cast<u8*>(by->segment().read_at(offset));
    return object;
}

// A value, held: where it lies in a store, or with the message that it came in. For Python this is `Lease`, and what
// Lease is here is `BlockLease`.
struct Stored {
    nb::object holder;  // a Lease; or what holds the message; none: released
    bool is_inline;
    u64 segment = 0;
    Extent extent{};

    explicit Stored(nb::object held) : holder(std::move(held)), is_inline(false) {
        const Lease& lease = *nb::inst_ptr<Lease>(holder);
        lease.require();
        if (lease.receiver) throw Error(Fault::value, "a record that lies in a ring is no value of a store");
        segment = lease.by->segment().nonce();
        extent = lease.extent;
    }
    Stored(nb::object message, u64 nbytes) : holder(std::move(message)), is_inline(true) { extent.nbytes = nbytes; }
    nb::object held() const {
        if (holder.is_none()) throw Error(Fault::closed, "the value has been released");
        if (!is_inline) nb::inst_ptr<Lease>(holder)->require();  // another owner may have released it
        return holder;
    }
    void let_go() { nb::object last = std::exchange(holder, nb::none()); }  // what it holds may go with it
};
nb::object make_stored(nb::object lease);

}  // namespace penstock::python
