// bindings_table_writer.cpp: the texts of a message to an output processor, where all are texts of the vocabulary's
// tables. One pass over the rows joins the texts: Python would make a text of each row first, and join these.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings_engine.h"

namespace penstock::engine {

using namespace nb::literals;

namespace {

template <class Element>
using Column = nb::ndarray<Element, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// `frames` has an item for each slot. None: the slot has no sample, or the sample's text is not from the tables. An
// empty tuple: the text goes out as it is. Other tuples are joined by the text, escaped.
class TableWriter {
   public:
    TableWriter(nb::list texts, nb::list quoted, Column<const bool> is_whole, Column<const u64> masks, nb::list frames,
                Column<const i32> bases, Column<const u64> firsts, Column<const u64> marks, Column<const u16> servers,
                Column<const i32> requests, Column<const u16> samples, Column<i32> generated)
        : texts_(std::move(texts)),
          quoted_(std::move(quoted)),
          is_whole_(std::move(is_whole)),
          masks_(std::move(masks)),
          frames_(std::move(frames)),
          bases_(std::move(bases)),
          firsts_(std::move(firsts)),
          marks_(std::move(marks)),
          servers_(std::move(servers)),
          requests_(std::move(requests)),
          samples_(std::move(samples)),
          generated_(std::move(generated)),
          places_(texts_.size()),
          slots_(frames_.size()) {
        bool fit = quoted_.size() == places_ && is_whole_.size() == places_ && masks_.size() == places_ && places_ != 0;
        for (u64 size : {bases_.size(), firsts_.size(), marks_.size(), servers_.size(), requests_.size(),
                         samples_.size(), generated_.size()})
            fit = fit && size == slots_;
        if (!fit) throw std::invalid_argument("expected tables of one size, and columns of one size");
    }

    // Returns the server, the numbers of the Delta, its text, and its samples or None. Returns None, and changes
    // nothing, if a row has no text of the tables, or the rows are of several servers.
    nb::object write(const Array<i64, nb::ndim<1>>& slots, const Int32Array& ids) {
        u64 size = slots.size();
        if (ids.size() != size) throw std::invalid_argument(format("expected %zu ids, got %zu", size, ids.size()));
        rows_.clear();
        u64 nbytes = 0;
        bool has_samples = false;
        for (u64 row = 0; row < size; ++row) {
            u64 slot = static_cast<u64>(slots.data()[row]);
            if (slot >= slots_) throw std::invalid_argument(format("expected a slot below %zu", slots_));
            PyObject* frame = PyList_GET_ITEM(frames_.ptr(), static_cast<Py_ssize_t>(slot));
            if (frame == Py_None || servers_.data()[slot] != servers_.data()[slots.data()[0]]) return nb::none();
            u64 stride = places_ / TABLES;
            u64 place =
                static_cast<u64>(bases_.data()[slot]) + std::min<u64>(static_cast<u32>(ids.data()[row]), stride - 1);
            if (place >= places_) throw std::invalid_argument(format("expected a base below %zu", places_));
            u64 marks = firsts_.data()[slot] | marks_.data()[slot];
            if (!is_whole_.data()[place] || (marks & masks_.data()[place]) != 0) return nb::none();
            PyObject* text = PyList_GET_ITEM(texts_.ptr(), static_cast<Py_ssize_t>(place));
            Row added{frame, text, 0};
            if (u64 parts = parts_of(frame)) {
                if (size_of(text) == 0) return nb::none();  // a chunk without text is not written
                added.text = PyList_GET_ITEM(quoted_.ptr(), static_cast<Py_ssize_t>(place));
                added.nbytes = (parts - 1) * size_of(added.text);
                for (u64 part = 0; part < parts; ++part) added.nbytes += size_of(part_of(frame, part));
            } else {
                added.nbytes = size_of(text);
            }
            nbytes += added.nbytes;
            has_samples = has_samples || samples_.data()[slot] != 0;
            rows_.push_back(added);
        }
        nb::bytes text = empty(nbytes), numbers = empty(3 * size * sizeof(i32));
        join(PyBytes_AS_STRING(text.ptr()));
        fill(slots, ids, reinterpret_cast<i32*>(PyBytes_AS_STRING(numbers.ptr())));
        nb::object samples = has_samples ? nb::object(samples_of(slots)) : nb::object(nb::none());
        return nb::make_tuple(size == 0 ? 0 : servers_.data()[slots.data()[0]], numbers, text, samples);
    }

   private:
    static constexpr u64 TABLES = 3;

    // The lists own the objects, and no code of Python runs before they are copied.
    struct Row {
        PyObject* frame;
        PyObject* text;
        u64 nbytes;
    };

    static u64 parts_of(PyObject* frame) {
        if (!PyTuple_CheckExact(frame)) throw nb::type_error("expected a tuple as a frame");
        return static_cast<u64>(PyTuple_GET_SIZE(frame));
    }
    static PyObject* part_of(PyObject* frame, u64 part) {
        return PyTuple_GET_ITEM(frame, static_cast<Py_ssize_t>(part));
    }
    static u64 size_of(PyObject* text) {
        if (!PyBytes_CheckExact(text)) throw nb::type_error("expected bytes");
        return static_cast<u64>(PyBytes_GET_SIZE(text));
    }
    static nb::bytes empty(u64 nbytes) {
        PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
        if (bytes == nullptr) throw nb::python_error();
        return nb::steal<nb::bytes>(bytes);
    }
    static char* copy(char* to, PyObject* text) {
        u64 nbytes = static_cast<u64>(PyBytes_GET_SIZE(text));
        std::memcpy(to, PyBytes_AS_STRING(text), nbytes);
        return to + nbytes;
    }

    void join(char* to) const {
        for (const Row& row : rows_) {
            u64 parts = parts_of(row.frame);
            if (parts == 0) to = copy(to, row.text);
            for (u64 part = 0; part < parts; ++part) {
                if (part != 0) to = copy(to, row.text);
                to = copy(to, part_of(row.frame, part));
            }
        }
    }

    // The numbers of a Delta: requests, lengths of the texts, and ids.
    void fill(const Array<i64, nb::ndim<1>>& slots, const Int32Array& ids, i32* numbers) {
        u64 size = rows_.size();
        for (u64 row = 0; row < size; ++row) {
            i64 slot = slots.data()[row];
            numbers[row] = requests_.data()[slot];
            numbers[size + row] = static_cast<i32>(rows_[row].nbytes);
            numbers[2 * size + row] = ids.data()[row];
            generated_.data()[slot] += 1;
        }
    }

    nb::bytes samples_of(const Array<i64, nb::ndim<1>>& slots) const {
        nb::bytes samples = empty(slots.size() * sizeof(u16));
        u16* to = reinterpret_cast<u16*>(PyBytes_AS_STRING(samples.ptr()));
        for (u64 row = 0; row < slots.size(); ++row) to[row] = samples_.data()[slots.data()[row]];
        return samples;
    }

    nb::list texts_, quoted_;
    Column<const bool> is_whole_;
    Column<const u64> masks_;
    nb::list frames_;
    Column<const i32> bases_;
    Column<const u64> firsts_, marks_;
    Column<const u16> servers_;
    Column<const i32> requests_;
    Column<const u16> samples_;
    Column<i32> generated_;
    u64 places_, slots_;
    std::vector<Row> rows_;
};

}  // namespace

void bind_table_writer(nb::module_& m) {
    nb::class_<TableWriter>(m, "TableWriter",
                            "Writes the rows of a message to an output processor that all have texts of the tables.")
        .def(
            nb::init<nb::list, nb::list, Column<const bool>, Column<const u64>, nb::list, Column<const i32>,
                     Column<const u64>, Column<const u64>, Column<const u16>, Column<const i32>, Column<const u16>,
                     Column<i32>>(),
            nb::kw_only(), "texts"_a, "quoted"_a, "is_whole"_a, "masks"_a, "frames"_a, "bases"_a, "firsts"_a, "marks"_a,
            "servers"_a, "requests"_a, "samples"_a, "generated"_a,
            nb::sig("def __init__(self, *, texts: list[bytes], quoted: list[bytes], is_whole: Any, masks: Any, frames: "
                    "Any, bases: Any, firsts: Any, marks: Any, servers: Any, requests: Any, samples: Any, generated: "
                    "Any) -> None"),
            "The first four are the tables of a `Vocabulary`. The others have an item for each slot, and may change "
            "between calls. `frames`: None has no text of the tables; an empty tuple has the text alone; the parts of "
            "others are joined by the escaped text.")
        .def("write", &TableWriter::write, "slots"_a, "ids"_a,
             nb::sig("def write(self, slots: numpy.typing.NDArray[numpy.intp], ids: numpy.typing.NDArray[numpy.int32]) "
                     "-> tuple[int, bytes, bytes, bytes | None] | None"),
             "Returns the server, the numbers of the Delta (of 32 bits), its text, and the samples of its rows (of 16 "
             "bits; None: all 0), and counts an id for each slot. Returns None, and changes nothing, if a row has no "
             "text of the tables, or the rows are of several servers.");
}

}  // namespace penstock::engine
