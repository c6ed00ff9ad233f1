// bindings_values.cpp: arrays over leased bytes, and trees of them as a block holds them: what is read most often, and
// by a process that has just been woken and has nothing in its caches. So: few objects, few calls, few pages.
//
// Which numbers there are, and how a tree is laid out, is said in penstock/tensor (kinds.py, tree.py, stored.py). This
// reads what is plain, checks all of it on a copy, and has the rest read, or refused with a reason, over there.
#include "msgpack.h"
#include "python.h"

using namespace penstock;
using namespace penstock::python;
using namespace nb::literals;

namespace {

constexpr u64 MAX_LAYOUT_NBYTES = 1024;  // longer ones are read over there
constexpr u64 ALIGN = LINE;              // of tensors, from the start of their block; they need not be more
constexpr int MAX_LEVELS = 32;

// ── arrays ──
// NumPy's own table of functions, which it gives in a capsule and to which it only appends: none of its headers are
// needed, and any version will do.
struct NumPy {
    static constexpr size_t NEW_FROM_DESCR = 94, SET_BASE_OBJECT = 282;
    static constexpr int C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400;
    struct Array {  // how every array begins
        PyObject head;
        u8* data;
        int dimensions;
        Py_intptr_t *sizes, *strides;
        PyObject *base, *dtype;
        int flags;
    };
    PyTypeObject* array_type;
    PyObject* (*new_from_descr)(PyTypeObject*, PyObject*, int, Py_intptr_t*, Py_intptr_t*, void*, int, PyObject*);
    int (*set_base_object)(PyObject*, PyObject*);

    explicit NumPy(void** table)
        : array_type(static_cast<PyTypeObject*>(table[2])),
          new_from_descr(reinterpret_cast<decltype(new_from_descr)>(table[NEW_FROM_DESCR])),
          set_base_object(reinterpret_cast<decltype(set_base_object)>(table[SET_BASE_OBJECT])) {}
};

// What penstock/tensor says to us when it is imported. Never given back: arrays outlive the module.
struct Known {
    struct Kind {
        u64 itemsize;
        nb::object bits, numpy;  // dtypes; numpy: none until its first use
    };
    NumPy numpy;
    std::vector<Kind> kinds;  // by code, from 1
    nb::object numpy_of, torch_of, ref_of, read;
};
Known* known = nullptr;

enum class As { numpy, bits, torch };
bool as_of(nb::handle name, As& out) {
    for (auto [text, as] : {std::pair{"numpy", As::numpy}, {"torch", As::torch}, {"bits", As::bits}})
        if (PyUnicode_Check(name.ptr()) && PyUnicode_CompareWithASCIIString(name.ptr(), text) == 0)
            return out = as, true;
    return false;
}

struct Sizes {
    static constexpr int MOST = 32;  // dimensions: of NumPy before 2.0
    Py_intptr_t sizes[MOST];
    int count = 0;
    u64 product = 1;

    bool add(u64 size) {  // False: there is no such array, or nothing in it
        if (count == MOST || size == 0 || size > MAX_NBYTES || product > MAX_NBYTES / size) return false;
        sizes[count++] = static_cast<Py_intptr_t>(size);
        product *= size;
        return true;
    }
};

// An array over these bytes, which `base` holds. Null, perhaps with an error: not a plain one, or not so many bytes.
nb::object array_of(u64 code, const Sizes& sizes, u8* at, u64 nbytes, nb::handle base, bool is_writable, As as) {
    if (code == 0 || code > known->kinds.size()) return {};
    Known::Kind& kind = known->kinds[code - 1];
    if (sizes.product * kind.itemsize > nbytes || reinterpret_cast<u64>(at) % ALIGN != 0) return {};
    if (as == As::numpy && kind.numpy.is_none()) kind.numpy = known->numpy_of(code);
    nb::object dtype = as == As::numpy ? kind.numpy : kind.bits;
    int flags = NumPy::C_CONTIGUOUS | NumPy::ALIGNED | (is_writable ? NumPy::WRITEABLE : 0);
    nb::object made =
        nb::steal(known->numpy.new_from_descr(known->numpy.array_type, dtype.release().ptr(), sizes.count,
                                              const_cast<Py_intptr_t*>(sizes.sizes), nullptr, at, flags, nullptr));
    if (!made.is_valid() || known->numpy.set_base_object(made.ptr(), nb::object(nb::borrow(base)).release().ptr()) != 0)
        return {};
    return as == As::torch ? known->torch_of(made, code) : made;
}

// ── trees ──
enum class Node : u64 { tensor, list, tuple, dict };

// Builds one tree. Returns null where something is not plain; the caller then calls `read`, which is slower.
class Tree {
   public:
    Tree(Atoms atoms, nb::handle lease, u64 tensors_at, As as) : atoms_(atoms), base_(lease), as_(as) {
        const Lease& held = *nb::inst_ptr<Lease>(lease);
        at_ = held.at + tensors_at;
        nbytes_ = held.extent.nbytes - tensors_at;
    }
    bool has_arrays() const { return has_arrays_; }
    nb::object whole() {
        nb::object made = node(0);
        return made.is_valid() && atoms_.is_at_end() ? made : nb::object();
    }

   private:
    nb::object node(int level) {
        Atom atom;
        if (!atoms_.next(atom)) return {};
        switch (atom.kind) {
            case Atom::Kind::nothing: return nb::none();
            case Atom::Kind::boolean: return nb::bool_(atom.number != 0);
            case Atom::Kind::positive: return nb::steal(PyLong_FromUnsignedLongLong(atom.number));
            case Atom::Kind::negative: return nb::steal(PyLong_FromLongLong(static_cast<i64>(atom.number)));
            case Atom::Kind::real: return nb::steal(PyFloat_FromDouble(atom.real));
            case Atom::Kind::text:
                return nb::steal(PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(atom.at),
                                                      static_cast<Py_ssize_t>(atom.number), nullptr));
            case Atom::Kind::bytes:
                return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(atom.at),
                                                           static_cast<Py_ssize_t>(atom.number)));
            case Atom::Kind::array: return level > MAX_LEVELS ? nb::object() : branch(atom.number, level);
        }
        return {};
    }
    nb::object branch(u64 items, int level) {
        Atom what;
        if (items == 0 || !atoms_.next(what) || what.kind != Atom::Kind::positive) return {};
        switch (static_cast<Node>(what.number)) {
            case Node::tensor: return tensor(items - 1);
            case Node::list:
            case Node::tuple: {
                nb::object made = nb::steal(PyList_New(0));
                for (u64 i = 1; i < items; ++i) {
                    nb::object one = node(level + 1);
                    if (!one.is_valid() || PyList_Append(made.ptr(), one.ptr()) != 0) return {};
                }
                return static_cast<Node>(what.number) == Node::list ? made : nb::steal(PyList_AsTuple(made.ptr()));
            }
            case Node::dict: return items % 2 == 0 ? nb::object() : keyed(items / 2, level);
            default: return {};
        }
    }
    nb::object keyed(u64 pairs, int level) {
        nb::object made = nb::steal(PyDict_New());
        for (u64 i = 0; i < pairs; ++i) {
            nb::object key = node(MAX_LEVELS + 1);
            if (!key.is_valid() || !(PyUnicode_CheckExact(key.ptr()) || PyLong_CheckExact(key.ptr()))) return {};
            if (PyDict_Contains(made.ptr(), key.ptr()) != 0) return {};
            nb::object one = node(level + 1);
            if (!one.is_valid() || PyDict_SetItem(made.ptr(), key.ptr(), one.ptr()) != 0) return {};
        }
        return made;
    }
    nb::object tensor(u64 numbers) {
        u64 code = 0, offset = 0;
        Sizes sizes;
        if (numbers < 2 || !number(code) || !number(offset)) return {};
        for (u64 i = 2; i < numbers; ++i) {
            u64 size = 0;
            if (!number(size) || !sizes.add(size)) return {};
        }
        if (offset > nbytes_) return {};
        has_arrays_ = true;
        return array_of(code, sizes, at_ + offset, nbytes_ - offset, base_, false, as_);
    }
    bool number(u64& out) {
        Atom atom;
        if (!atoms_.next(atom) || atom.kind != Atom::Kind::positive) return false;
        out = atom.number;
        return true;
    }

    Atoms atoms_;
    nb::handle base_;
    As as_;
    u8* at_;
    u64 nbytes_;
    bool has_arrays_ = false;
};

// ── arrays in place ──
bool shape_of(nb::handle shape, Sizes& out) {
    if (!PyTuple_CheckExact(shape.ptr())) return false;
    for (nb::handle size : nb::borrow<nb::tuple>(shape)) {
        if (!PyLong_CheckExact(size.ptr())) return false;
        u64 number = PyLong_AsUnsignedLongLong(size.ptr());
        if (PyErr_Occurred()) return PyErr_Clear(), false;
        if (!out.add(number)) return false;
    }
    return true;
}

// What is to be filled: it exports the lease, so that nothing is committed or released while it can still write.
nb::object array_to_fill(nb::object lease, u64 code, nb::handle shape, nb::handle as) {
    Lease& held = nb::cast<Lease&>(lease);
    held.require();
    Sizes sizes;
    As how;
    if (known == nullptr || !held.is_writable || held.at == nullptr || !shape_of(shape, sizes) || !as_of(as, how))
        return nb::none();
    nb::object exported = nb::steal(PyMemoryView_FromObject(lease.ptr()));
    if (!exported.is_valid()) throw nb::python_error();
    nb::object made = array_of(code, sizes, held.at, held.extent.nbytes, exported, true, how);
    if (!made.is_valid()) return PyErr_Clear(), nb::none();
    held.is_made = true;
    Lease::made_leases()[reinterpret_cast<u64>(held.at)] = lease;
    return made;
}

// Returns this peer's lease of array_to_fill() that these bytes lie in. It lives while the caller holds the bytes.
nb::handle lease_of(const Attachment& by, u64 address, u64 nbytes) {
    auto& made = Lease::made_leases();
    auto after = made.upper_bound(address);
    if (after == made.begin()) return {};
    nb::handle lease = std::prev(after)->second;
    const Lease& held = *nb::inst_ptr<Lease>(lease);
    u64 offset = address - reinterpret_cast<u64>(held.at);
    bool is_within = offset <= held.extent.nbytes && nbytes <= held.extent.nbytes - offset;
    return is_within && held.by.get() == &by ? lease : nb::handle();
}

// An array, and what it is a view of, say from now on that they are read-only.
void forbid_writing(nb::handle array) {
    for (PyObject* at = array.ptr(); at != nullptr && known != nullptr;) {
        if (PyObject_TypeCheck(at, known->numpy.array_type)) {  // also what is made of arrays by others
            auto* one = reinterpret_cast<NumPy::Array*>(at);
            one->flags &= ~NumPy::WRITEABLE;
            at = one->base;
        } else {
            at = PyMemoryView_Check(at) ? PyMemoryView_GET_BASE(at) : nullptr;
        }
    }
}

// What a plain array that lies in such a lease is: code, shape, and the numbers of a reference to it. None: it is not
// plain, or not in one.
nb::object place_of(const Attachment& by, nb::handle given) {
    if (known == nullptr || Py_TYPE(given.ptr()) != known->numpy.array_type) return nb::none();
    const auto& array = *reinterpret_cast<NumPy::Array*>(given.ptr());
    if ((array.flags & NumPy::C_CONTIGUOUS) == 0) return nb::none();
    u64 code = 0;
    while (code < known->kinds.size() && known->kinds[code].numpy.ptr() != array.dtype) ++code;
    if (code == known->kinds.size()) return nb::none();
    u64 nbytes = known->kinds[code].itemsize;
    nb::object shape = nb::steal(PyTuple_New(array.dimensions));
    for (int i = 0; i < array.dimensions; ++i) {
        nbytes *= static_cast<u64>(array.sizes[i]);
        PyTuple_SET_ITEM(shape.ptr(), i, PyLong_FromSsize_t(array.sizes[i]));
    }
    nb::handle lease = lease_of(by, reinterpret_cast<u64>(array.data), nbytes);
    if (!lease.is_valid()) return nb::none();
    const Lease& held = *nb::inst_ptr<Lease>(lease);
    u64 offset = held.extent.offset + static_cast<u64>(array.data - held.at);
    return nb::make_tuple(code + 1, shape, by.segment().nonce(), held.extent.block, held.extent.generation, offset,
                          nbytes);
}

// The tree of a value, or null.
nb::object plain_value(const nb::object& lease, nb::handle name) {
    Lease& held = *nb::inst_ptr<Lease>(lease);
    As as;
    u64 nbytes = held.extent.nbytes;
    if (known == nullptr || held.is_writable || held.at == nullptr || nbytes < 8 || !as_of(name, as)) return {};
    u32 head[2];
    std::memcpy(head, held.at, sizeof head);
    u64 layout_nbytes = head[0], tensors_at = round_up(sizeof head + layout_nbytes, ALIGN);
    if (head[1] != 0 || layout_nbytes > MAX_LAYOUT_NBYTES || tensors_at > nbytes) return {};
    u8 layout[MAX_LAYOUT_NBYTES];  // a copy: others could change it while it is read
    std::memcpy(layout, held.at + sizeof head, layout_nbytes);
    // Before anything is made: what ends meanwhile, in whatever way, must not release it.
    bool was_shown = std::exchange(held.is_shown, true);
    Tree tree({layout, layout_nbytes}, lease, tensors_at, as);
    nb::object made = tree.whole();
    if (!made.is_valid() || !tree.has_arrays()) held.is_shown = was_shown;
    return made;
}

nb::object value_of(const Stored& stored, nb::handle as, bool writable) {
    nb::object lease = stored.held();
    if (!writable) {
        nb::object made = plain_value(lease, as);
        if (made.is_valid()) return made;
        PyErr_Clear();
    }
    return known->read(lease, as, writable);
}

nb::object ref_of(const Stored& stored) {
    const Extent& e = stored.extent;
    return known->ref_of(stored.segment, e.block, e.generation, e.offset, e.nbytes);
}

void use(nb::list kinds, nb::object numpy_of, nb::object torch_of) {
    if (known != nullptr) return;
    nb::object core;
    try {
        core = nb::module_::import_("numpy._core._multiarray_umath");
    } catch (const nb::python_error&) {  // before 2.0
        core = nb::module_::import_("numpy.core._multiarray_umath");
    }
    nb::object capsule = core.attr("_ARRAY_API");
    void** table = static_cast<void**>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (table == nullptr) throw nb::python_error();
    Known* made = new Known{NumPy(table), {}, std::move(numpy_of), std::move(torch_of), nb::none(), nb::none()};
    for (nb::handle kind : kinds)
        made->kinds.push_back({nb::cast<u64>(kind[0]), nb::borrow(kind[1]), nb::borrow(kind[2])});
    known = made;
}

}  // namespace

nb::object penstock::python::make_stored(nb::object lease) {
    static const nb::handle type = nb::type<Stored>();
    nb::object made = nb::inst_alloc(type);
    new (nb::inst_ptr<Stored>(made)) Stored(std::move(lease));
    nb::inst_mark_ready(made);
    return made;
}

void penstock::python::bind_values(nb::module_& m) {
    m.def("use_kinds", &use, "kinds"_a, "numpy_of"_a, "torch_of"_a,
          nb::sig("def use_kinds(kinds: list[tuple[int, typing.Any, typing.Any]], numpy_of: "
                  "collections.abc.Callable[[int], typing.Any], "
                  "torch_of: collections.abc.Callable[[typing.Any, int], typing.Any]) -> None"),
          "Says, once, which numbers there are: for each code from 1 the itemsize, the dtype of its bits, and that of "
          "NumPy or None: then `numpy_of` gives it. torch_of: makes a tensor of an array of bits.");
    m.def(
        "use_values",
        [](nb::object ref_of, nb::object read) {
            known->ref_of = std::move(ref_of);
            known->read = std::move(read);
        },
        "ref_of"_a, "read"_a,
        nb::sig("def use_values(ref_of: collections.abc.Callable[..., typing.Any], read: "
                "collections.abc.Callable[[Lease, typing.Any, bool], typing.Any]) -> None"),
        "Says what makes a reference of five numbers, and who reads a value that is not plain.");
    m.def(
        "array",
        [](nb::object lease, u64 code, nb::handle shape, nb::handle as) -> nb::object {
            Lease& held = nb::cast<Lease&>(lease);
            held.require();
            Sizes sizes;
            As how;
            if (known == nullptr || held.is_writable || held.at == nullptr || !shape_of(shape, sizes) ||
                !as_of(as, how))
                return nb::none();
            bool was_shown = std::exchange(held.is_shown, true);
            nb::object made = array_of(code, sizes, held.at, held.extent.nbytes, lease, false, how);
            if (made.is_valid()) return made;
            held.is_shown = was_shown;
            PyErr_Clear();
            return nb::none();
        },
        "lease"_a, "code"_a, "shape"_a, "as_"_a,
        nb::sig("def array(lease: Lease, code: int, shape: tuple[int, ...], as_: str) -> typing.Any"),
        "The tensor that lies there, read-only; from now on the lease goes with its last view, and not before. None: "
        "not a plain one.");
    m.def("array_to_fill", &array_to_fill, "lease"_a, "code"_a, "shape"_a, "as_"_a,
          nb::sig("def array_to_fill(lease: Lease, code: int, shape: tuple[int, ...], as_: str) -> typing.Any"),
          "The same of a writable lease, writable: as long as it lives the lease is not released.");
    m.def("place_of", &place_of, "by"_a, "array"_a,
          nb::sig("def place_of(by: Attachment, array: typing.Any) -> "
                  "tuple[int, tuple[int, ...], int, int, int, int, int] | None"),
          "Of an array that lies in one of array_to_fill(): code, shape, and the numbers of a reference. None: not a "
          "plain one, or it lies elsewhere.");
    m.def("forbid_writing", &forbid_writing, "array"_a,
          "An array, and what it is a view of, say from now on that they are read-only.");
    m.def(
        "lease_of",
        [](const Attachment& by, u64 address, u64 nbytes) -> nb::object {
            nb::handle lease = lease_of(by, address, nbytes);
            return lease.is_valid() ? nb::borrow(lease) : nb::none();
        },
        "by"_a, "address"_a, "nbytes"_a,
        nb::sig("def lease_of(by: Attachment, address: int, nbytes: int) -> Lease | None"),
        "The lease of array_to_fill() that these bytes lie in.");
    m.def(
        "nbytes_of",
        [](u64 code, nb::handle shape) -> u64 {
            Sizes sizes;
            if (known == nullptr || code == 0 || code > known->kinds.size() || !shape_of(shape, sizes)) return 0;
            u64 nbytes = sizes.product * known->kinds[code - 1].itemsize;
            return nbytes > MAX_NBYTES ? 0 : nbytes;
        },
        "code"_a, "shape"_a, nb::sig("def nbytes_of(code: int, shape: tuple[int, ...]) -> int"),
        "Of a plain tensor; 0: it is none, or has no bytes.");
    nb::class_<Stored>(m, "Stored", nb::pooled(),
                       "A value of the store, held: it is not evicted while this, or an array of it, lives.")
        .def(
            "__init__",
            [](Stored* self, nb::object lease) {
                nb::cast<Lease&>(lease);
                new (self) Stored(std::move(lease));
            },
            "lease"_a, nb::sig("def __init__(self, lease: Lease) -> None"))
        .def("value", &value_of, "as_"_a = "numpy", nb::kw_only(), "writable"_a = false,
             nb::sig("def value(self, as_: typing.Literal['numpy', 'torch', 'bits'] = 'numpy', *, writable: bool = "
                     "False) -> typing.Any"),
             "The tree, its tensors read-only views of shared memory, which hold it; copies if `writable`. Raises "
             "DecodeError, with the path, for what is no value.")
        .def_prop_ro("ref", &ref_of, nb::sig("def ref(self, /) -> typing.Any"),
                     "Plain data, for any message: `Store.open_stored` over there.")
        .def_prop_ro(
            "nbytes", [](const Stored& stored) { return stored.extent.nbytes; }, "Of the block, its layout included.")
        .def(
            "hold", [](const Stored& stored) { return make_stored(stored.held()); },
            nb::sig("def hold(self) -> Stored"), "The same value, held once more: each hold is released by itself.")
        .def(
            "release", [](Stored& stored) { stored.let_go(); },
            "Holds it no longer; arrays that were taken from it still do, each until it is gone.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Stored"))
        .def("__exit__", [](Stored& stored, nb::args) { stored.let_go(); });
}
