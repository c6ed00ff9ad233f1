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
    static constexpr int C_CONTIGUOUS = 0x1, ALIGNED = 0x100;
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
nb::object array_of(u64 code, const Sizes& sizes, u8* at, u64 nbytes, nb::handle base, As as) {
    if (code == 0 || code > known->kinds.size()) return {};
    Known::Kind& kind = known->kinds[code - 1];
    if (sizes.product * kind.itemsize > nbytes || reinterpret_cast<u64>(at) % ALIGN != 0) return {};
    if (as == As::numpy && kind.numpy.is_none()) kind.numpy = known->numpy_of(code);
    nb::object dtype = as == As::numpy ? kind.numpy : kind.bits;
    int flags = NumPy::C_CONTIGUOUS | NumPy::ALIGNED;
    nb::object array =
        nb::steal(known->numpy.new_from_descr(known->numpy.array_type, dtype.release().ptr(), sizes.count,
                                              const_cast<Py_intptr_t*>(sizes.sizes), nullptr, at, flags, nullptr));
    if (!array.is_valid() ||
        known->numpy.set_base_object(array.ptr(), nb::object(nb::borrow(base)).release().ptr()) != 0)
        return {};
    return as == As::torch ? known->torch_of(array, code) : array;
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
        nb::object value = node(0);
        return value.is_valid() && atoms_.is_at_end() ? value : nb::object();
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
                nb::object list = nb::steal(PyList_New(0));
                for (u64 i = 1; i < items; ++i) {
                    nb::object item = node(level + 1);
                    if (!item.is_valid() || PyList_Append(list.ptr(), item.ptr()) != 0) return {};
                }
                return static_cast<Node>(what.number) == Node::list ? list : nb::steal(PyList_AsTuple(list.ptr()));
            }
            case Node::dict: return items % 2 == 0 ? nb::object() : keyed(items / 2, level);
            default: return {};
        }
    }
    nb::object keyed(u64 pairs, int level) {
        nb::object dict = nb::steal(PyDict_New());
        for (u64 i = 0; i < pairs; ++i) {
            nb::object key = node(MAX_LEVELS + 1);
            if (!key.is_valid() || !(PyUnicode_CheckExact(key.ptr()) || PyLong_CheckExact(key.ptr()))) return {};
            if (PyDict_Contains(dict.ptr(), key.ptr()) != 0) return {};
            nb::object item = node(level + 1);
            if (!item.is_valid() || PyDict_SetItem(dict.ptr(), key.ptr(), item.ptr()) != 0) return {};
        }
        return dict;
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
        return array_of(code, sizes, at_ + offset, nbytes_ - offset, base_, as_);
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
    nb::object value = tree.whole();
    if (!value.is_valid() || !tree.has_arrays()) held.is_shown = was_shown;
    return value;
}

nb::object value_of(const Stored& stored, nb::handle as, bool writable) {
    nb::object holder = stored.held();
    if (!writable && !stored.is_inline) {
        nb::object value = plain_value(holder, as);
        if (value.is_valid()) return value;
        PyErr_Clear();
    }
    return known->read(holder, as, writable);
}

nb::object ref_of(const Stored& stored) {
    if (stored.is_inline) return stored.held();
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
    Known* result = new Known{NumPy(table), {}, std::move(numpy_of), std::move(torch_of), nb::none(), nb::none()};
    for (nb::handle kind : kinds)
        result->kinds.push_back({nb::cast<u64>(kind[0]), nb::borrow(kind[1]), nb::borrow(kind[2])});
    known = result;
}

}  // namespace

nb::object penstock::python::make_stored(nb::object lease) {
    static const nb::handle type = nb::type<Stored>();
    nb::object stored = nb::inst_alloc(type);
    new (nb::inst_ptr<Stored>(stored)) Stored(std::move(lease));
    nb::inst_mark_ready(stored);
    return stored;
}

namespace {

constexpr const char* LEASE =
    R"(A value, held: the memory is not reused while the lease, or an array of the value, lives.

Examples:
    >>> store = Store(1 << 20)
    >>> with store.put({"pixels": np.arange(4)}) as lease:
    ...     lease.value()["pixels"]
    array([0, 1, 2, 3])
)";
constexpr const char* VALUE =
    R"(Returns the value, with tensors that are read-only views of the memory where it lies, which they hold.

Args:
    as_: the library that the tensors are of: "numpy"; "torch"; or "bits", where kinds that NumPy has no word for are
        unsigned integers. A write through a torch tensor ends this process: torch has no read-only tensors.
    writable: the tensors are private copies.

Raises:
    DecodeError: the bytes are no value; the text has the path to what is wrong.
    ClosedError: the lease has been released.

Examples:
    >>> lease = Store(1 << 20).put([np.zeros(2), "text"])
    >>> lease.value()
    [array([0., 0.]), 'text']
)";

}  // namespace

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
                "collections.abc.Callable[[typing.Any, typing.Any, bool], typing.Any]) -> None"),
        "Sets the class of references, made of five numbers, and the function that reads a value that is not plain.");
    nb::class_<Stored>(m, "Lease", nb::pooled(), LEASE)
        .def(
            "__init__",
            [](Stored* self, nb::object block) {
                if (!nb::isinstance<Lease>(block)) throw nb::type_error("expected a BlockLease");
                new (self) Stored(std::move(block));
            },
            "block"_a, nb::sig("def __init__(self, block: BlockLease) -> None"))
        .def_static(
            "of_message", [](nb::object message, u64 nbytes) { return new Stored(std::move(message), nbytes); },
            "message"_a, "nbytes"_a, nb::sig("def of_message(message: typing.Any, nbytes: int) -> Lease"),
            "Of a value that travels inline, which holds its message.")
        .def("value", &value_of, "as_"_a = "numpy", nb::kw_only(), "writable"_a = false,
             nb::sig("def value(self, as_: typing.Literal['numpy', 'torch', 'bits'] = 'numpy', *, writable: bool = "
                     "False) -> typing.Any"),
             VALUE)
        .def_prop_ro("ref", &ref_of, nb::sig("def ref(self, /) -> typing.Any"),
                     "Where the value lies: numbers of a block, or the message that it came in.")
        .def_prop_ro(
            "nbytes", [](const Stored& stored) { return stored.extent.nbytes; }, "Of the value, its layout included.")
        .def(
            "hold",
            [](const Stored& stored) {
                nb::object holder = stored.held();
                return stored.is_inline ? nb::cast(Stored(std::move(holder), stored.extent.nbytes))
                                        : make_stored(std::move(holder));
            },
            nb::sig("def hold(self) -> Lease"), "The same value, held once more: each hold is released by itself.")
        .def(
            "release", [](Stored& stored) { stored.let_go(); },
            "Holds the value no longer. Arrays that were taken from it still do, each until it is gone.\n\n"
            "Examples:\n"
            "    >>> lease = Store(1 << 20).put(np.zeros(3))\n"
            "    >>> zeros = lease.value()\n"
            "    >>> lease.release()\n"
            "    >>> float(zeros.sum())\n"
            "    0.0\n")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Lease"))
        .def("__exit__", [](Stored& stored, nb::args) { stored.let_go(); })
        .def(
            "__repr__",
            [](const Stored& stored) {
                return format("Lease(%llu bytes%s)", static_cast<unsigned long long>(stored.extent.nbytes),
                              stored.holder.is_none() ? ", released" : "");
            },
            nb::sig("def __repr__(self) -> str"));
}
