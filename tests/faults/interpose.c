// interpose.c: a preloaded library that counts a process's system calls by kind, and makes the n-th of a kind fail.
// It stands before libc's functions, so that it also meets what the core calls through syscall(2). What libc calls by
// itself passes it by: so a thread is met at pthread_create, which is where its clone3 would fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

#define KINDS(X)                                                                                                        \
    X(pidfd_open) X(openat) X(read) X(write) X(close) X(mmap) X(ftruncate) X(fallocate) X(fchmod) X(fcntl) X(futex_wait) \
    X(futex_wake) X(epoll_create1) X(epoll_ctl) X(epoll_wait) X(pipe2) X(dup) X(clone3) X(memfd_create) X(eventfd)      \
    X(fstat) X(stat) X(getrandom) X(madvise) X(mbind) X(poll) X(waitid) X(ioctl) X(timerfd) X(set_robust_list) X(futex_waitv)          \
    X(other)
#define AS_CONSTANT(name) KIND_##name,
#define AS_TEXT(name) #name,
enum { KINDS(AS_CONSTANT) KIND_COUNT };
static const char *const NAMES[] = {KINDS(AS_TEXT)};

enum { CORE, PYTHON, CALLERS };
static atomic_bool is_counting;
static atomic_long counts[KIND_COUNT][CALLERS], fired;
static long plan_first, plan_times;
static int plan_kind, plan_caller, plan_error;
static atomic_bool *is_lifted;  // nothing fails any longer: shared with the processes that are forked from this one
static const void *core, *standard;                                             // where these two libraries begin
static __thread bool is_exempt __attribute__((tls_model("initial-exec")));  // this thread works for the test now

const char *faults_name(int kind) { return kind < KIND_COUNT ? NAMES[kind] : NULL; }
long faults_count(int kind, int caller) { return counts[kind][caller]; }
long faults_fired(void) { return fired; }
void faults_exempt(int exempt) { is_exempt = exempt != 0; }
void faults_lift(int lifted) { *is_lifted = lifted != 0; }
void faults_stop(void) { is_counting = false; }

static __attribute__((constructor)) void share(void) {
    is_lifted = (atomic_bool *)mmap64(NULL, sizeof *is_lifted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static const void *base_of(const void *address) {
    Dl_info found;
    return dladdr(address, &found) != 0 ? found.dli_fbase : NULL;
}

// Calls from the two libraries that these addresses lie in (the extension module, and the C++ library that makes its
// threads) are the core's, all others are Python's. kind < 0: nothing fails, all is counted.
void faults_arm(const void *in_core, const void *in_standard, int kind, int caller, long first, long times, int error) {
    core = base_of(in_core), standard = base_of(in_standard);
    for (int i = 0; i < KIND_COUNT; ++i)
        for (int j = 0; j < CALLERS; ++j) counts[i][j] = 0;
    fired = 0;
    plan_kind = kind, plan_caller = caller, plan_error = error;
    plan_first = first;
    plan_times = times;
    is_counting = true;
}

// The errno with which this call fails, or 0.
static int fault(int kind, const void *from) {
    if (!is_counting || is_exempt) return 0;
    const void *base = base_of(from);
    int caller = base == core || base == standard ? CORE : PYTHON;
    long number = atomic_fetch_add(&counts[kind][caller], 1) + 1;
    if (kind != plan_kind || caller != plan_caller || *is_lifted) return 0;
    if (number < plan_first || number >= plan_first + plan_times) return 0;
    fired++;
    return plan_error;
}

#define MAY_FAIL(kind)                                           \
    do {                                                         \
        int error = fault((kind), __builtin_return_address(0)); \
        if (error != 0) {                                        \
            errno = error;                                       \
            return -1;                                           \
        }                                                        \
    } while (0)

// A function of libc with these parameters and arguments.
#define BEFORE(kind, result, name, parameters, arguments)           \
    result name parameters;                                         \
    result name parameters {                                        \
        static result(*real) parameters;                            \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name);           \
        MAY_FAIL(KIND_##kind);                                      \
        return real arguments;                                      \
    }
#define BEFORE_OPEN(name, first, first_argument)                    \
    int name(first const char *path, int flags, ...);               \
    int name(first const char *path, int flags, ...) {              \
        static int (*real)(first const char *, int, ...);           \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name);           \
        va_list list;                                               \
        va_start(list, flags);                                      \
        unsigned mode = va_arg(list, unsigned);                     \
        va_end(list);                                               \
        MAY_FAIL(KIND_openat);                                      \
        return real(first_argument path, flags, mode);              \
    }
#define AT int at,
#define AT_ARGUMENT at,

BEFORE_OPEN(open, , )
BEFORE_OPEN(open64, , )
BEFORE_OPEN(openat, AT, AT_ARGUMENT)
BEFORE_OPEN(openat64, AT, AT_ARGUMENT)
BEFORE(read, ssize_t, read, (int fd, void *to, size_t size), (fd, to, size))
BEFORE(read, ssize_t, pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
BEFORE(read, ssize_t, pread64, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
BEFORE(write, ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size))
BEFORE(ftruncate, int, ftruncate, (int fd, off_t size), (fd, size))
BEFORE(ftruncate, int, ftruncate64, (int fd, off_t size), (fd, size))
BEFORE(fallocate, int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
BEFORE(fallocate, int, fallocate64, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
BEFORE(fchmod, int, fchmod, (int fd, mode_t mode), (fd, mode))
BEFORE(epoll_create1, int, epoll_create1, (int flags), (flags))
BEFORE(epoll_ctl, int, epoll_ctl, (int epoll, int op, int fd, struct epoll_event *event), (epoll, op, fd, event))
BEFORE(epoll_wait, int, epoll_wait, (int epoll, struct epoll_event *to, int many, int ms), (epoll, to, many, ms))
BEFORE(pipe2, int, pipe2, (int ends[2], int flags), (ends, flags))
BEFORE(dup, int, dup, (int fd), (fd))
BEFORE(memfd_create, int, memfd_create, (const char *name, unsigned flags), (name, flags))
BEFORE(eventfd, int, eventfd, (unsigned value, int flags), (value, flags))
BEFORE(fstat, int, fstat, (int fd, struct stat *to), (fd, to))
BEFORE(fstat, int, fstat64, (int fd, struct stat64 *to), (fd, to))
BEFORE(stat, int, stat, (const char *path, struct stat *to), (path, to))
BEFORE(stat, int, stat64, (const char *path, struct stat64 *to), (path, to))
BEFORE(stat, int, fstatat, (int at, const char *path, struct stat *to, int flags), (at, path, to, flags))
BEFORE(getrandom, ssize_t, getrandom, (void *to, size_t size, unsigned flags), (to, size, flags))
BEFORE(madvise, int, madvise, (void *at, size_t size, int advice), (at, size, advice))
BEFORE(poll, int, poll, (struct pollfd *fds, nfds_t many, int ms), (fds, many, ms))
BEFORE(poll, int, ppoll, (struct pollfd *fds, nfds_t many, const struct timespec *for_, const sigset_t *mask),
       (fds, many, for_, mask))
BEFORE(waitid, int, waitid, (idtype_t type, id_t id, siginfo_t *to, int options), (type, id, to, options))
BEFORE(timerfd, int, timerfd_create, (clockid_t clock, int flags), (clock, flags))
BEFORE(timerfd, int, timerfd_settime,
       (int fd, int flags, const struct itimerspec *to, struct itimerspec *before), (fd, flags, to, before))

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "mmap");
    int error = fault(KIND_mmap, __builtin_return_address(0));
    if (error == 0) return real(at, size, protection, flags, fd, offset);
    errno = error;
    return (void *)-1;
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset) __attribute__((alias("mmap")));

// A close that fails has closed all the same, on Linux.
int close(int fd) {
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "close");
    int error = fault(KIND_close, __builtin_return_address(0)), result = real(fd);
    if (error == 0) return result;
    errno = error;
    return -1;
}

int fcntl(int fd, int command, ...) {
    static int (*real)(int, int, ...);
    if (real == NULL) real = dlsym(RTLD_NEXT, "fcntl");
    va_list list;
    va_start(list, command);
    long argument = va_arg(list, long);
    va_end(list);
    MAY_FAIL(KIND_fcntl);
    return real(fd, command, argument);
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

int ioctl(int fd, unsigned long request, ...) {
    static int (*real)(int, unsigned long, ...);
    if (real == NULL) real = dlsym(RTLD_NEXT, "ioctl");
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    MAY_FAIL(KIND_ioctl);
    return real(fd, request, argument);
}

int pthread_create(pthread_t *to, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_create");
    int error = fault(KIND_clone3, __builtin_return_address(0));
    return error != 0 ? error : real(to, attributes, run, argument);
}

static int kind_of(long number, long operation) {
    switch (number) {
        case SYS_futex:
            operation &= FUTEX_CMD_MASK;
            return operation == FUTEX_WAIT || operation == FUTEX_WAIT_BITSET ? KIND_futex_wait : KIND_futex_wake;
        case 434: return KIND_pidfd_open;  // these two on every architecture; the headers may be older
        case 449: return KIND_futex_waitv;
        case SYS_memfd_create: return KIND_memfd_create;
        case SYS_mbind: return KIND_mbind;
        case SYS_waitid: return KIND_waitid;
        case SYS_openat: return KIND_openat;
        case SYS_set_robust_list: return KIND_set_robust_list;
        default: return KIND_other;
    }
}
long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (real == NULL) real = dlsym(RTLD_NEXT, "syscall");
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long), d = va_arg(list, long),
         e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    if (number != SYS_gettid) MAY_FAIL(kind_of(number, b));
    return real(number, a, b, c, d, e, f);
}
