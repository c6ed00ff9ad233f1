// end_group.h: ends of one process that share a fate: the first death in a channel of any of them ends the waits of
// all.
#pragma once
#include <memory>
#include <mutex>
#include <optional>

#include "errors.h"
#include "wait.h"

namespace penstock {

// The watcher breaks it, for it learns of every death (Watcher::break_group), and then rings the bells of all members.
// The watcher may drop the last reference, also while the interpreter ends: no reference may be one to a Python object.
// So nanobind shares the object itself, by `shared_from_this`.
class EndGroup : public std::enable_shared_from_this<EndGroup> {
   public:
    bool is_broken() const { return is_broken_.load(RELAXED) != 0; }  // the bell orders it
    void break_by(const Error& death) {
        std::lock_guard guard(mutex_);
        if (!death_) death_ = death;
        is_broken_.store(1, RELAXED);
        futex_wake(&is_broken_, INT_MAX);
    }
    // For a thread that waits in no channel, until the group is broken. Returns an errno below 0 if the deadline has
    // passed, or a signal has come.
    int sleep_until(u64 deadline) { return is_broken() ? 0 : futex_wait(&is_broken_, 0, deadline); }
    std::optional<Error> death() const {
        std::lock_guard guard(mutex_);
        return death_;
    }
    void require_whole() const {
        if (__builtin_expect(is_broken(), 0)) throw *death();
    }

   private:
    mutable std::mutex mutex_;
    std::optional<Error> death_;  // the first
    Shared<u32> is_broken_{0};
};

}  // namespace penstock
