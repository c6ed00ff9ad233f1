// errors.h: how the core says that something went wrong, before anybody knows about Python.
#pragma once
#include <sys/resource.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
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

// "pidfd_open: Too many open files (RLIMIT_NOFILE is 256): raise it"
inline std::string describe_failure(const char* call, int error) {
    std::string text = format("%s: %s", call, std::strerror(error));
    auto limit_of = [](decltype(RLIMIT_NOFILE) resource) {
        rlimit limit{};
        bool is_limited = ::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
        return is_limited ? format("%llu", static_cast<unsigned long long>(limit.rlim_cur)) : std::string("unlimited");
    };
    if (error == EMFILE) text += format(" (RLIMIT_NOFILE is %s): raise it", limit_of(RLIMIT_NOFILE).c_str());
    if (error == ENFILE) text += " (on this machine, fs.file-max): raise it";
    if (error == EAGAIN)
        text += format(" (RLIMIT_NPROC is %s; pids.max of the control group counts too): raise it",
                       limit_of(RLIMIT_NPROC).c_str());
    if (error == ENOSYS || error == EPERM) text += ": the kernel, or a seccomp filter, does not allow it";
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

inline std::string counted(u64 many, const char* what) {
    return format("%llu %s%s", static_cast<unsigned long long>(many), what, many == 1 ? "" : "s");
}

inline std::string in_seconds(u64 ns) {
    if (ns < 1'000'000) return format("%.0f us", static_cast<double>(ns) / 1e3);
    if (ns < 1'000'000'000) return format("%.1f ms", static_cast<double>(ns) / 1e6);
    return format("%.1f s", static_cast<double>(ns) / 1e9);
}

}  // namespace penstock
