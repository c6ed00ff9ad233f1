// control_group.h: what the control groups above this process allow it, read from /proc/self/cgroup and /sys/fs/cgroup.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "clock.h"

namespace penstock {

inline u64 read_number(const char* path, const char* key = nullptr) {  // NEVER: no such file, or "max"
    int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NEVER;
    char text[4096];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return NEVER;
    text[n] = 0;
    const char* at = text;
    if (key != nullptr) {
        at = std::strstr(text, key);
        if (at == nullptr) return NEVER;
        at += std::strlen(key);
        while (*at == ' ' || *at == ':' || *at == '\t') ++at;
    }
    if (*at < '0' || *at > '9') return NEVER;
    return std::strtoull(at, nullptr, 10);
}

// Calls visit(folder, is_v2) for each folder that may be a group of this process, its own first and then those above
// it. In a container the path may be one that its mount does not have: then the mount's own folder is the group. False:
// the groups cannot be found out.
template <class Visit>
bool visit_control_groups(const char* controller, Visit&& visit) {
    int fd = ::open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    std::string text(8192, 0);
    ssize_t n = ::read(fd, text.data(), text.size());
    ::close(fd);
    if (n <= 0) return false;
    text.resize(static_cast<size_t>(n));
    for (size_t from = 0; from < text.size();) {
        size_t to = std::min(text.find('\n', from), text.size());
        std::string line = text.substr(from, to - from);
        from = to + 1;
        size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
        bool is_v2 = controllers.empty();
        if (!is_v2 && ("," + controllers + ",").find("," + std::string(controller) + ",") == std::string::npos)
            continue;
        const std::string roots[] = {is_v2 ? "" : "/" + std::string(controller),
                                     is_v2 ? "/unified" : "/" + controllers};
        for (const std::string& root : roots) {
            for (std::string group = path;;) {
                visit("/sys/fs/cgroup" + root + (group == "/" ? std::string() : group), is_v2);
                size_t slash = group.find_last_of('/');
                if (group == "/" || slash == std::string::npos) break;
                group = slash == 0 ? "/" : group.substr(0, slash);
            }
        }
    }
    return true;
}

// Why the processor time of this process is limited, or may be, in words; null: it is not.
inline const char* cpu_quota() {
    const char* why = nullptr;
    bool is_known = visit_control_groups("cpu", [&](const std::string& folder, bool is_v2) {
        errno = 0;  // "max 100000" or "200000 100000"; of version 1, "-1" or "200000"
        u64 quota = read_number((folder + (is_v2 ? "/cpu.max" : "/cpu.cfs_quota_us")).c_str());
        if (quota != NEVER) why = "a control group limits processor time";
        if (quota == NEVER && errno != 0 && errno != ENOENT && why == nullptr) why = "a control group cannot be read";
    });
    return is_known ? why : "control groups cannot be read";
}

}  // namespace penstock
