// errors.h: how the core says that something went wrong, before anybody knows about Python.
#pragma once
#include <sys/resource.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"

namespace penstock {

// One name for each class in penstock/errors.py; bindings.cpp has the table.
enum class Fault {
    closed,
    end_of_channel,
    would_block,
    timeout,
    peer_died,
    memory_exhausted,
    stale_ref,
    layout_mismatch,
    value,
    os,
    record_corrupt
};

class Error : public std::exception {
   public:
    Error(Fault fault, std::string text) : fault(fault), text(std::move(text)) {}
    Error& with(const char* key, i64 value) {
        numbers.emplace_back(key, value);
        return *this;
    }
    Error& with(const char* key, std::string value) {
        words.emplace_back(key, std::move(value));
        return *this;
    }
    const char* what() const noexcept override { return text.c_str(); }

    Fault fault;
    std::string text;
    std::vector<std::pair<const char*, i64>> numbers;
    std::vector<std::pair<const char*, std::string>> words;
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

inline std::string in_units(u64 nbytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = static_cast<double>(nbytes);
    int unit = 0;
    while (value >= 1024 && unit < 4) value /= 1024, ++unit;
    return unit == 0 ? format("%llu B", static_cast<unsigned long long>(nbytes))
                     : format("%.1f %s", value, units[unit]);
}

// The limit behind the errno of a call that failed, with its value: " (RLIMIT_NOFILE is 256): raise it"; or nothing.
inline std::string limit_behind(const char* call, int error) {
    auto limited = [](decltype(RLIMIT_NOFILE) resource, const char* name, const char* other = "") {
        rlimit limit{};
        bool is_limited = ::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
        std::string value = "unlimited";
        if (is_limited) value = format("%llu", static_cast<unsigned long long>(limit.rlim_cur));
        return format(" (%s is %s%s): raise it", name, value.c_str(), other);
    };
    bool is_thread = std::strstr(call, "pthread_create") != nullptr, is_map = std::strstr(call, "mmap") != nullptr;
    switch (error) {
        case EMFILE: return limited(RLIMIT_NOFILE, "RLIMIT_NOFILE");
        case ENFILE: return " (of the whole machine: fs.file-max): raise it";
        case EFBIG: return limited(RLIMIT_FSIZE, "RLIMIT_FSIZE");
        case EAGAIN:
            if (is_thread) return limited(RLIMIT_NPROC, "RLIMIT_NPROC", "; pids.max of the control group counts too");
            return is_map ? limited(RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK") : "";
        case ENOMEM:
            if (is_map) return limited(RLIMIT_AS, "RLIMIT_AS", "; vm.max_map_count counts too");
            return " (the kernel's own memory, or what the control group allows of it)";
        case ENOSPC: return std::strstr(call, "epoll_ctl") != nullptr ? " (fs.epoll.max_user_watches): raise it" : "";
        case ENOSYS:
        case EPERM: return ": the kernel, or a seccomp filter, does not allow it";
        default: return "";
    }
}
// "pidfd_open: Too many open files (RLIMIT_NOFILE is 256): raise it"
inline std::string describe_failure(const char* call, int error) {
    return format("%s: %s", call, std::strerror(error)) + limit_behind(call, error);
}
// A system call failed and that is all there is to say: an OSError with this errno.
inline Error os_error(const std::string& what, const char* call, int error) {
    return Error(Fault::os, what + ": " + describe_failure(call, error)).with("errno", error);
}

inline std::string counted(u64 many, const char* what) {
    return format("%llu %s%s", static_cast<unsigned long long>(many), what, many == 1 ? "" : "s");
}

inline std::string in_seconds(u64 ns) {
    if (ns < 1'000'000) return format("%.0f us", static_cast<double>(ns) / 1e3);
    if (ns < 1'000'000'000) return format("%.1f ms", static_cast<double>(ns) / 1e6);
    return format("%.1f s", static_cast<double>(ns) / 1e9);
}

}  // namespace penstock
