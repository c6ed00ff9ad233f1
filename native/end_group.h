// end_group.h: ends of one process that share a fate: the first death in a channel of any of them ends the waits of
// all.
#pragma once
#include <mutex>
#include <optional>

#include "errors.h"

namespace penstock {

// The watcher breaks it, for it learns of every death (Watcher::break_group), and then rings the bells of all members.
class EndGroup {
   public:
    bool is_broken() const { return is_broken_.load(RELAXED); }  // the bell orders it
    void break_by(const Error& death) {
        std::lock_guard guard(mutex_);
        if (!death_) death_ = death;
        is_broken_.store(true, RELAXED);
    }
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
    Atomic<bool> is_broken_{false};
};

}  // namespace penstock
