// gil.h: letting go of Python's interpreter for the time of a scope.
#pragma once
#include <Python.h>
#include <unistd.h>

#include <mutex>

namespace penstock::python {

// Releases the interpreter until the end of the scope. CPython before 3.14 ends a thread that asks for it back while
// the program ends, by pthread_exit. That would unwind through destructors of ours and a catch (...) of nanobind's,
// which is SIGABRT; so such a thread stays here until the process is gone, as in CPython 3.14. `turn`: the lock of an
// end that the thread holds. It is unlocked then, as the main thread may still close that end.
class GilRelease {
   public:
    using Turn = std::unique_lock<std::recursive_timed_mutex>;
    explicit GilRelease(Turn* turn = nullptr) : turn_(turn), thread_(PyEval_SaveThread()) {}
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;
    ~GilRelease() {
        try {
            PyEval_RestoreThread(thread_);
        } catch (...) {  // unwinding, which ends only with the thread: it may not be left, and is not
            if (turn_ != nullptr && turn_->owns_lock()) turn_->unlock();
            for (;;) ::pause();
        }
    }
    // For threads of which it is not known here whether they have it.
    static void* release_if_held() {
        return PyGILState_GetThisThreadState() != nullptr && PyGILState_Check() ? new GilRelease : nullptr;
    }
    static void retake(void* released) { delete static_cast<GilRelease*>(released); }

   private:
    Turn* turn_;
    PyThreadState* thread_;
};

}  // namespace penstock::python
