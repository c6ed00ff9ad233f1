// bindings_file_mapping.cpp: maps files in memory so that the kernel can put large pages into them.
//
// A page of 2 MiB of a file is mapped as one page only where its address is a multiple of 2 MiB. Large pages of files
// in memory are off by default (shmem_enabled is "never"); MADV_COLLAPSE, of Linux 6.1, does not ask for that setting.
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#include "bindings_engine.h"
#include "gil.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace penstock::engine {

using namespace nb::literals;

namespace {

constexpr std::size_t LARGE_PAGE = 2 << 20;
using Bytes = nb::ndarray<u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Mapping {
    u8* address;
    std::size_t nbytes;
};

[[noreturn]] void raise_os_error() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

nb::object map_file(int fd, std::size_t nbytes, bool is_writable) {
    // The kernel chooses no aligned address for a file, so a larger range is reserved, and its ends are given back.
    void* reserved =
        ::mmap(nullptr, nbytes + LARGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) raise_os_error();
    u8* begin = static_cast<u8*>(reserved);
    std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % LARGE_PAGE;
    u8* address = begin + before;
    int access = PROT_READ | (is_writable ? PROT_WRITE : 0);
    if (::mmap(address, nbytes, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int error = errno;
        ::munmap(reserved, nbytes + LARGE_PAGE);
        errno = error;
        raise_os_error();
    }
    constexpr std::size_t PAGE = 4096;
    std::size_t end = (before + nbytes + PAGE - 1) / PAGE * PAGE;
    if (before != 0) ::munmap(begin, before);
    if (end < nbytes + LARGE_PAGE) ::munmap(begin + end, nbytes + LARGE_PAGE - end);
    ::madvise(address, nbytes, MADV_HUGEPAGE);
    ::madvise(address, nbytes, MADV_DONTDUMP);
    nb::capsule owner(new Mapping{address, nbytes}, [](void* mapping) noexcept {
        auto* mapped = static_cast<Mapping*>(mapping);
        ::munmap(mapped->address, mapped->nbytes);
        delete mapped;
    });
    return nb::cast(nb::ndarray<nb::numpy, u8, nb::ndim<1>>(address, {nbytes}, owner));
}

// A range without any page cannot be collapsed, so each large page is touched first.
bool claim_large_pages(const Bytes& mapping) {
    python::GilRelease released;
    bool is_complete = true;
    for (std::size_t at = 0; at + LARGE_PAGE <= mapping.size(); at += LARGE_PAGE) {
        u8* page = mapping.data() + at;
        *const_cast<volatile u8*>(page) = 0;
        is_complete &= ::madvise(page, LARGE_PAGE, MADV_COLLAPSE) == 0;
    }
    return is_complete;
}

void protect(const Bytes& mapping) {
    if (::mprotect(mapping.data(), mapping.size(), PROT_READ) != 0) raise_os_error();
}

}  // namespace

void bind_file_mapping(nb::module_& m) {
    m.attr("LARGE_PAGE_NBYTES") = LARGE_PAGE;
    m.def("map_file", &map_file, "fd"_a, "nbytes"_a, "is_writable"_a,
          nb::sig("def map_file(fd: int, nbytes: int, is_writable: bool) -> numpy.typing.NDArray[numpy.uint8]"),
          "Maps a file for all processes at a multiple of 2 MiB. NumPy writes to each array: without `is_writable`, a "
          "write is a SIGSEGV. Raises OSError.");
    m.def(
        "claim_large_pages", &claim_large_pages, "mapping"_a,
        nb::sig("def claim_large_pages(mapping: numpy.typing.NDArray[numpy.uint8]) -> bool"),
        "Writes a zero to each page of 2 MiB of a mapping, and asks the kernel for large ones. False: for some of the "
        "mapping there are none.");
    m.def("protect", &protect, "mapping"_a, nb::sig("def protect(mapping: numpy.typing.NDArray[numpy.uint8]) -> None"),
          "Makes a mapping read-only. Raises OSError.");
}

}  // namespace penstock::engine
