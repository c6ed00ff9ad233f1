/* A CUDA driver without a device. tests/support/libcuda.py compiles and loads it as libcuda.so.1, for cuda-bindings.

Two devices. Memory is a memfd, which a handle or a descriptor opens in another process. A stream keeps its work in a queue and does as
much as is due when a call asks about the stream or adds to it. The clock of the streams moves by TICK when a question
is answered with "not ready", and in a call that waits: no test depends on real time.

Names that begin with `double_` are for tests: they set what a device would do by itself, and read what is held. What a
program does wrong, and a driver need not report, is a fault: double_fault() has the text. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEVICES = 2, RANGES = 65536, REGISTERED = 256, FAULTS = 32, DEPTH = 64 };
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};
static const uint64_t TICK = 1000 * 1000; /* cycles */

typedef int Result;
typedef unsigned long long Address;
typedef void (*HostFunction)(void *);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* never held while a host function runs */
static int contexts[DEVICES];                             /* retained; the address is the context */
static _Thread_local void *current[DEPTH];
static _Thread_local int depth;
static int can_reach[DEVICES][DEVICES] = {{1, 1}, {1, 1}};
static const size_t memory_nbytes = (size_t)1 << 30;
static char faults[FAULTS][160];
static int fault_count;

static void fault(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(faults[fault_count % FAULTS], sizeof *faults, format, arguments);
    va_end(arguments);
    fault_count++;
}

/* ── errors at the n-th call ── */
static long calls, failing_call; /* from 1 on; 0: no call fails */
static Result failing_result;
static char failing_name[64]; /* empty: calls of all names count */

static Result begin(const char *name) {
    pthread_mutex_lock(&mutex);
    size_t length = strlen(failing_name);
    if (length && (strncmp(failing_name, name, length) || (name[length] && strcmp(name + length, "_v2"))))
        return OK;
    return ++calls == failing_call ? failing_result : OK;
}

static Result end(Result result) {
    pthread_mutex_unlock(&mutex);
    return result;
}

static int device_of_context(void) { return (int)((int *)current[depth - 1] - contexts); }

/* The first statement of a call: an injected error, or none. */
#define BEGIN \
    Result failure = begin(__func__); \
    if (failure) \
        return end(failure)
/* The same, for calls that need a context on the calling thread. */
#define BEGIN_IN_CONTEXT \
    BEGIN; \
    if (!depth) \
        return end(INVALID_CONTEXT)

/* ── memory ── */
/* ADOPTED: of torch's allocator, which this library does not manage. RESERVED: addresses without memory. */
enum { FREE, OWN, OPENED, ADOPTED, RESERVED };
static struct Range {
    Address address;
    size_t nbytes;
    int kind, fd, device, opens;
    ino_t inode;
    uint64_t serial;  /* of this use of the entry */
    unsigned readers; /* of memory of cuMemMap: a bit for each device with access */
} ranges[RANGES];
static int range_end; /* behind the last entry in use */
static uint64_t serials;
static struct { char *address; size_t nbytes; } registered[REGISTERED];

static struct Range *range_at(Address address, size_t nbytes) {
    for (struct Range *range = ranges; range < ranges + range_end; range++)
        if (range->kind && address - range->address < range->nbytes && nbytes <= range->nbytes - (address - range->address))
            return range;
    return NULL;
}

static struct Range *new_range(Address address, size_t nbytes, int kind) {
    struct Range *range = ranges;
    while (range < ranges + RANGES && range->kind)
        range++;
    if (range == ranges + RANGES)
        return NULL;
    if (range - ranges >= range_end)
        range_end = (int)(range - ranges) + 1;
    *range = (struct Range){.address = address, .nbytes = nbytes, .kind = kind, .fd = -1, .serial = ++serials};
    return range;
}

static struct Range *map(int fd, size_t nbytes, int kind, int device) {
    void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct stat status;
    struct Range *range = address == MAP_FAILED ? NULL : new_range((Address)address, nbytes, kind);
    if (!range || fstat(fd, &status)) {
        close(fd);
        return NULL;
    }
    range->fd = fd;
    range->device = device;
    range->inode = status.st_ino;
    range->opens = 1;
    return range;
}

static void unmap(struct Range *range) {
    munmap((void *)range->address, range->nbytes);
    close(range->fd);
    range->kind = FREE;
}

/* ── memory behind descriptors ── */
enum { MEMORIES = 256, GRANULARITY = 2 << 20 };
static struct Memory {
    int fd, device, is_own, references; /* references: the handle, and each mapping */
    size_t nbytes;
} memories[MEMORIES];

static size_t used(int device) {
    size_t nbytes = 0;
    for (int i = 0; i < MEMORIES; i++)
        if (memories[i].references && memories[i].is_own && memories[i].device == device)
            nbytes += memories[i].nbytes;
    for (int i = 0; i < range_end; i++)
        if (ranges[i].kind == OWN && !ranges[i].readers && ranges[i].device == device)
            nbytes += ranges[i].nbytes;
    return nbytes;
}

Result cuMemAlloc_v2(Address *address, size_t nbytes) {
    BEGIN_IN_CONTEXT;
    int device = device_of_context();
    if (!nbytes)
        return end(INVALID_VALUE);
    if (nbytes > memory_nbytes - used(device))
        return end(OUT_OF_MEMORY);
    int fd = memfd_create("penstock-device", MFD_CLOEXEC);
    if (fd < 0)
        return end(OUT_OF_MEMORY);
    struct Range *range = ftruncate(fd, (off_t)nbytes) ? NULL : map(fd, nbytes, OWN, device);
    if (!range)
        return end(OUT_OF_MEMORY);
    *address = range->address;
    return end(OK);
}

Result cuMemFree_v2(Address address) {
    BEGIN_IN_CONTEXT;
    struct Range *range = range_at(address, 1);
    if (!range || range->address != address || range->kind != OWN || range->opens < 1)
        return end(INVALID_VALUE);
    if (flock(range->fd, LOCK_EX | LOCK_NB)) /* a process that has it open holds a shared lock, until it ends */
        fault("memory was freed that another process has open");
    unmap(range);
    return end(OK);
}

Result cuMemGetInfo_v2(size_t *free_nbytes, size_t *total) {
    BEGIN_IN_CONTEXT;
    *total = memory_nbytes;
    *free_nbytes = memory_nbytes - used(device_of_context());
    return end(OK);
}

Result cuMemGetAddressRange_v2(Address *first, size_t *nbytes, Address address) {
    BEGIN_IN_CONTEXT;
    struct Range *range = range_at(address, 1);
    if (!range || range->kind == ADOPTED)
        return end(NOT_FOUND);
    *first = range->address;
    *nbytes = range->nbytes;
    return end(OK);
}

/* Declared as cuda.h has them: cuda-bindings passes structs by address. */
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *windows; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
enum { PINNED = 1, DEVICE = 1, DESCRIPTOR = 1, READ_WRITE = 3 };

static struct Memory *memory_of(uint64_t handle) {
    return handle && handle <= MEMORIES && memories[handle - 1].references ? &memories[handle - 1] : NULL;
}

static uint64_t new_memory(int fd, int device, int is_own, size_t nbytes) {
    for (int i = 0; i < MEMORIES; i++)
        if (!memories[i].references) {
            memories[i] = (struct Memory){fd, device, is_own, 1, nbytes};
            return (uint64_t)i + 1;
        }
    close(fd);
    return 0;
}

static void forget_memory(struct Memory *memory) {
    if (!--memory->references)
        close(memory->fd);
}

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN;
    (void)device;
    *value = attribute == 102 || attribute == 103; /* memory behind descriptors */
    return end(OK);
}

Result cuMemGetAllocationGranularity(size_t *granularity, const Properties *properties, int option) {
    BEGIN;
    (void)option;
    *granularity = GRANULARITY;
    return end(properties->location.id < DEVICES ? OK : INVALID_DEVICE);
}

Result cuMemCreate(uint64_t *handle, size_t nbytes, const Properties *properties, uint64_t flags) {
    (void)flags;
    BEGIN_IN_CONTEXT;
    int device = properties->location.id;
    if (!nbytes || nbytes % GRANULARITY || properties->type != PINNED ||
        properties->location.type != DEVICE || properties->handle_types != DESCRIPTOR || device >= DEVICES)
        return end(INVALID_VALUE);
    if (nbytes > memory_nbytes - used(device))
        return end(OUT_OF_MEMORY);
    char name[32];
    snprintf(name, sizeof name, "penstock-device-%d", device);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes))
        return end(OUT_OF_MEMORY);
    return end((*handle = new_memory(fd, device, 1, nbytes)) ? OK : OUT_OF_MEMORY);
}

Result cuMemRelease(uint64_t handle) {
    BEGIN_IN_CONTEXT;
    struct Memory *memory = memory_of(handle);
    if (!memory)
        return end(INVALID_VALUE);
    forget_memory(memory);
    return end(OK);
}

Result cuMemExportToShareableHandle(int *fd, uint64_t handle, int kind, uint64_t flags) {
    (void)flags;
    BEGIN_IN_CONTEXT;
    struct Memory *memory = memory_of(handle);
    if (!memory || kind != DESCRIPTOR)
        return end(INVALID_VALUE);
    *fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
    return end(*fd < 0 ? OUT_OF_MEMORY : OK);
}

Result cuMemImportFromShareableHandle(uint64_t *handle, void *shareable, int kind) {
    BEGIN_IN_CONTEXT;
    char path[64], target[64] = "";
    int device;
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)shareable);
    if (kind != DESCRIPTOR || readlink(path, target, sizeof target - 1) < 0 ||
        sscanf(target, "/memfd:penstock-device-%d", &device) != 1)
        return end(INVALID_VALUE);
    int fd = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    if (fd < 0 || fstat(fd, &status))
        return end(OUT_OF_MEMORY);
    return end((*handle = new_memory(fd, device, 0, (size_t)status.st_size)) ? OK : OUT_OF_MEMORY);
}

Result cuMemAddressReserve(Address *address, size_t nbytes, size_t alignment, Address wish, uint64_t flags) {
    (void)alignment, (void)wish, (void)flags;
    BEGIN_IN_CONTEXT;
    void *reserved = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (nbytes % GRANULARITY || reserved == MAP_FAILED || !new_range((Address)reserved, nbytes, RESERVED))
        return end(OUT_OF_MEMORY);
    *address = (Address)reserved;
    return end(OK);
}

static struct Range *whole_range(Address address, size_t nbytes) {
    struct Range *range = range_at(address, nbytes);
    return range && range->address == address && range->nbytes == nbytes ? range : NULL;
}

Result cuMemAddressFree(Address address, size_t nbytes) {
    BEGIN_IN_CONTEXT;
    struct Range *range = whole_range(address, nbytes);
    if (!range || range->kind != RESERVED)
        return end(INVALID_VALUE);
    munmap((void *)address, nbytes);
    range->kind = FREE;
    return end(OK);
}

Result cuMemMap(Address address, size_t nbytes, size_t offset, uint64_t handle, uint64_t flags) {
    (void)flags;
    BEGIN_IN_CONTEXT;
    struct Range *range = whole_range(address, nbytes);
    struct Memory *memory = memory_of(handle);
    if (!range || range->kind != RESERVED || !memory || offset || nbytes > memory->nbytes)
        return end(INVALID_VALUE);
    memory->references++;
    range->kind = memory->is_own ? OWN : OPENED;
    range->device = memory->device;
    range->fd = (int)(memory - memories);
    range->opens = 0; /* not to be freed or closed as memory of cuMemAlloc is */
    range->readers = 1u << DEVICES; /* no device, and not memory of cuMemAlloc */
    range->serial = ++serials;
    return end(OK);
}

Result cuMemSetAccess(Address address, size_t nbytes, const Access *access, size_t count) {
    BEGIN_IN_CONTEXT;
    struct Range *range = whole_range(address, nbytes);
    if (!range || !range->readers)
        return end(INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        int device = access[i].location.id;
        if (device >= DEVICES || access[i].location.type != DEVICE || access[i].flags != READ_WRITE ||
            !can_reach[device][range->device])
            return end(INVALID_DEVICE);
        range->readers |= 1u << device;
    }
    int fd = memories[range->fd].fd;
    void *mapped = mmap((void *)address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    return end(mapped == MAP_FAILED ? OUT_OF_MEMORY : OK);
}

Result cuMemUnmap(Address address, size_t nbytes) {
    BEGIN_IN_CONTEXT;
    struct Range *range = whole_range(address, nbytes);
    if (!range || !range->readers)
        return end(INVALID_VALUE);
    mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    forget_memory(&memories[range->fd]);
    range->kind = RESERVED;
    range->readers = 0;
    range->fd = -1;
    return end(OK);
}

/* Whether a device may touch memory. Memory of cuMemAlloc is a matter of its handle. */
static int is_accessible(const struct Range *range, int device) {
    return !range->readers || (range->readers & 1u << device);
}

/* ── handles ── */
typedef struct { uint64_t pid, fd, inode, device, reserved[4]; } Handle; /* 64 bytes, as CUipcMemHandle */

Result cuIpcGetMemHandle(Handle *handle, Address address) {
    BEGIN_IN_CONTEXT;
    struct Range *range = range_at(address, 1);
    if (!range || range->kind != OWN || range->opens < 1)
        return end(INVALID_VALUE);
    *handle = (Handle){(uint64_t)getpid(), (uint64_t)range->fd, range->inode, (uint64_t)range->device, {0}};
    return end(OK);
}

Result cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags) {
    BEGIN_IN_CONTEXT;
    if (handle.pid == (uint64_t)getpid())
        return end(INVALID_CONTEXT);
    if (handle.device >= DEVICES)
        return end(INVALID_HANDLE);
    int device = device_of_context();
    if (handle.device != (uint64_t)device && !((flags & 1) && can_reach[device][handle.device]))
        return end(PEER_ACCESS_UNSUPPORTED);
    for (int i = 0; i < range_end; i++)
        if (ranges[i].kind == OPENED && ranges[i].opens && ranges[i].inode == handle.inode) { /* one mapping, which is counted */
            ranges[i].opens++;
            *address = ranges[i].address;
            return end(OK);
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (Address)handle.pid, (Address)handle.fd);
    struct stat status;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return end(INVALID_HANDLE);
    if (fstat(fd, &status) || status.st_ino != handle.inode || flock(fd, LOCK_SH | LOCK_NB)) {
        close(fd);
        return end(INVALID_HANDLE);
    }
    struct Range *range = map(fd, (size_t)status.st_size, OPENED, (int)handle.device);
    if (!range)
        return end(OUT_OF_MEMORY);
    *address = range->address;
    return end(OK);
}

Result cuIpcCloseMemHandle(Address address) {
    BEGIN_IN_CONTEXT;
    struct Range *range = range_at(address, 1);
    if (!range || range->address != address || range->kind != OPENED || range->opens < 1)
        return end(INVALID_VALUE);
    if (!--range->opens)
        unmap(range);
    return end(OK);
}

/* ── host memory ── */
static int registered_index(const char *address, size_t nbytes) {
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].nbytes && address < registered[i].address + registered[i].nbytes && registered[i].address < address + nbytes)
            return i;
    return -1;
}

static int is_registered(const char *address, size_t nbytes) {
    int i = registered_index(address, nbytes);
    return i >= 0 && address >= registered[i].address && address + nbytes <= registered[i].address + registered[i].nbytes;
}

static int is_mapped(char *address, size_t nbytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)address & -page;
    return !msync((void *)first, (uintptr_t)address + nbytes - first, MS_ASYNC);
}

Result cuMemHostRegister_v2(char *address, size_t nbytes, unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT;
    if (!nbytes || !is_mapped(address, nbytes))
        return end(INVALID_VALUE);
    if (registered_index(address, nbytes) >= 0)
        return end(ALREADY_REGISTERED);
    for (int i = 0; i < REGISTERED; i++)
        if (!registered[i].nbytes) {
            registered[i].address = address;
            registered[i].nbytes = nbytes;
            return end(OK);
        }
    return end(OUT_OF_MEMORY);
}

Result cuMemHostUnregister(char *address) {
    BEGIN_IN_CONTEXT;
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].nbytes && registered[i].address == address) {
            if (!is_mapped(address, registered[i].nbytes))
                fault("host memory was unmapped while it was registered");
            registered[i].nbytes = 0;
            return end(OK);
        }
    return end(NOT_REGISTERED);
}

/* ── streams ── */
enum Kind { COPY_UP, COPY_BACK, COPY_ACROSS, CALL, SLEEP, WAIT };
typedef struct Event { struct Stream *stream; uint64_t position; } Event;
typedef struct Work {
    enum Kind kind;
    struct Work *next;
    Address device_address;
    uint64_t serial; /* of the range of device_address */
    Address source; /* of COPY_ACROSS */
    uint64_t source_serial;
    int is_adopted;
    char *host, *snapshot; /* snapshot: of pageable memory, which is read when the call is made */
    uint64_t amount;       /* bytes, or cycles */
    HostFunction function;
    void *argument;
    Event event;
} Work;
typedef struct Stream {
    struct Stream *next;
    Work *first, **last;
    uint64_t added, done; /* pieces of work */
    int is_stopped, is_running;
} Stream;
static Stream null_stream = {.last = &null_stream.first};
static Stream *streams = &null_stream;

static Stream *stream_of(void *stream) { return stream ? stream : &null_stream; }

static void copy(Work *work) {
    struct Range *range = range_at(work->device_address, work->amount);
    if (!range || range->serial != work->serial) {
        /* torch's allocator gives memory back in the order of its stream: no tensor has the result. */
        if (!work->is_adopted)
            fault("memory of the device was freed before its copy was done");
    } else if (work->kind == COPY_ACROSS) {
        struct Range *source = range_at(work->source, work->amount);
        if (!source || source->serial != work->source_serial)
            fault("memory of another device was closed before its copy was done");
        else
            memcpy((void *)work->device_address, (void *)work->source, work->amount);
    } else if (!work->snapshot && !is_registered(work->host, work->amount))
        fault("host memory was unregistered before its copy was done");
    else if (work->kind == COPY_UP)
        memcpy((void *)work->device_address, work->snapshot ? work->snapshot : work->host, work->amount);
    else
        memcpy(work->host, (void *)work->device_address, work->amount);
}

static void catch_up(Stream *stream) {
    while (stream->first && !stream->is_stopped && !stream->is_running) {
        Work *work = stream->first;
        if (work->kind == SLEEP && work->amount)
            return;
        if (work->kind == WAIT) {
            stream->is_running = 1; /* two streams that wait for each other */
            catch_up(work->event.stream);
            stream->is_running = 0;
            if (work->event.stream->done < work->event.position)
                return;
        }
        if (!(stream->first = work->next))
            stream->last = &stream->first;
        if (work->kind == CALL) {
            stream->is_running = 1;
            pthread_mutex_unlock(&mutex);
            work->function(work->argument);
            pthread_mutex_lock(&mutex);
            stream->is_running = 0;
        } else if (work->kind <= COPY_ACROSS)
            copy(work);
        stream->done++;
        free(work->snapshot);
        free(work);
    }
}

static void tick(uint64_t cycles) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->first && stream->first->kind == SLEEP && !stream->is_stopped)
            stream->first->amount -= stream->first->amount < cycles ? stream->first->amount : cycles;
}

static Result ask(Stream *stream, uint64_t position) {
    catch_up(stream);
    if (stream->done >= position)
        return OK;
    tick(TICK);
    return NOT_READY;
}

/* Until the stream has come to a position. A stopped stream would never: its caller gets an error. */
static Result await(Stream *stream, uint64_t position) {
    for (long round = 0; ask(stream, position) == NOT_READY; round++) {
        if (stream->is_running) { /* by another thread */
            pthread_mutex_unlock(&mutex);
            usleep(100);
            pthread_mutex_lock(&mutex);
        }
        if (stream->is_stopped || round > 100000)
            return LAUNCH_TIMEOUT;
    }
    return OK;
}

static Result add(void *to, Work work) {
    Stream *stream = stream_of(to);
    Work *added = malloc(sizeof work);
    if (!added)
        return OUT_OF_MEMORY;
    *added = work;
    *stream->last = added;
    stream->last = &added->next;
    stream->added++;
    catch_up(stream);
    return OK;
}

static Result add_copy(enum Kind kind, Address address, char *host, size_t nbytes, void *stream) {
    struct Range *range = range_at(address, nbytes);
    if (!range)
        return INVALID_VALUE;
    Work work = {
        .kind = kind, .device_address = address, .serial = range->serial, .is_adopted = range->kind == ADOPTED,
        .host = host, .amount = nbytes,
    };
    if (is_registered(host, nbytes))
        return add(stream, work);
    if (kind == COPY_UP) {
        if (!(work.snapshot = malloc(nbytes)))
            return OUT_OF_MEMORY;
        memcpy(work.snapshot, host, nbytes);
        return add(stream, work);
    }
    Result result = await(stream_of(stream), stream_of(stream)->added);
    if (!result)
        memcpy(host, (void *)address, nbytes);
    return result;
}

Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t nbytes, void *stream) {
    BEGIN_IN_CONTEXT;
    return end(add_copy(COPY_UP, to, (char *)from, nbytes, stream));
}

Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t nbytes, void *stream) {
    BEGIN_IN_CONTEXT;
    return end(add_copy(COPY_BACK, from, to, nbytes, stream));
}

Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t nbytes, void *stream) {
    BEGIN_IN_CONTEXT;
    struct Range *target = range_at(to, nbytes), *source = range_at(from, nbytes);
    if (!target || !source || source->kind == RESERVED)
        return end(INVALID_VALUE);
    if (!is_accessible(source, device_of_context()) || !is_accessible(target, device_of_context()))
        return end(ILLEGAL_ADDRESS);
    return end(add(stream, (Work){
        .kind = COPY_ACROSS, .device_address = to, .serial = target->serial, .is_adopted = target->kind == ADOPTED,
        .source = from, .source_serial = source->serial, .amount = nbytes,
    }));
}

Result cuLaunchHostFunc(void *stream, HostFunction function, void *argument) {
    BEGIN;
    return end(add(stream, (Work){.kind = CALL, .function = function, .argument = argument}));
}

Result cuStreamCreate(Stream **stream, unsigned flags) {
    (void)flags;
    BEGIN;
    Stream *created = calloc(1, sizeof *created); /* kept: an event may name it */
    if (!created)
        return end(OUT_OF_MEMORY);
    created->last = &created->first;
    created->next = null_stream.next;
    null_stream.next = *stream = created;
    return end(OK);
}

Result cuStreamQuery(void *stream) {
    BEGIN;
    return end(ask(stream_of(stream), stream_of(stream)->added));
}

Result cuStreamSynchronize(void *stream) {
    BEGIN;
    return end(await(stream_of(stream), stream_of(stream)->added));
}

Result cuEventCreate(Event **event, unsigned flags) {
    (void)flags;
    BEGIN;
    *event = calloc(1, sizeof **event);
    if (!*event)
        return end(OUT_OF_MEMORY);
    (*event)->stream = &null_stream;
    return end(OK);
}

Result cuEventRecord(Event *event, void *stream) {
    BEGIN;
    *event = (Event){stream_of(stream), stream_of(stream)->added};
    return end(OK);
}

Result cuEventQuery(Event *event) {
    BEGIN;
    return end(ask(event->stream, event->position));
}

Result cuEventSynchronize(Event *event) {
    BEGIN;
    return end(await(event->stream, event->position));
}

Result cuEventDestroy_v2(Event *event) {
    BEGIN;
    free(event);
    return end(OK);
}

Result cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)flags;
    BEGIN;
    return end(add(stream, (Work){.kind = WAIT, .event = *event}));
}

/* ── devices and contexts ── */
static _Atomic int is_initialized;

Result cuInit(unsigned flags) {
    (void)flags;
    BEGIN;
    is_initialized = 1;
    return end(OK);
}

Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return OK;
}

Result cuDeviceGetCount(int *count) {
    if (!is_initialized)
        return NOT_INITIALIZED;
    *count = DEVICES;
    return OK;
}

Result cuDeviceGet(int *device, int number) {
    BEGIN;
    if (number < 0 || number >= DEVICES)
        return end(INVALID_DEVICE);
    *device = number;
    return end(OK);
}

Result cuDeviceGetUuid_v2(void *uuid, int device) {
    BEGIN;
    memset(uuid, 0x40 + device, 16);
    return end(OK);
}

Result cuDeviceGetName(char *name, int size, int device) {
    BEGIN;
    snprintf(name, size, "double %d", device);
    return end(OK);
}

Result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    BEGIN;
    *can = device != peer && can_reach[device][peer];
    return end(OK);
}

Result cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN;
    contexts[device]++;
    *context = &contexts[device];
    return end(OK);
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN;
    if (!contexts[device])
        return end(INVALID_CONTEXT);
    contexts[device]--;
    return end(OK);
}

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    BEGIN;
    *flags = 0;
    *is_active = contexts[device] > 0;
    return end(OK);
}

Result cuCtxPushCurrent_v2(void *context) {
    BEGIN;
    int device = (int)((int *)context - contexts);
    if (device < 0 || device >= DEVICES || !contexts[device] || depth == DEPTH)
        return end(INVALID_CONTEXT);
    current[depth++] = context;
    return end(OK);
}

Result cuCtxPopCurrent_v2(void **context) { /* no injected error: it would leave the context where it is */
    if (!depth)
        return INVALID_CONTEXT;
    *context = current[--depth];
    return OK;
}

Result cuGetErrorString(Result result, const char **text) {
    (void)result;
    *text = "an error of a driver without a device";
    return OK;
}

/* ── for tests ── */
void double_fail(const char *name, long call, Result result) {
    pthread_mutex_lock(&mutex);
    snprintf(failing_name, sizeof failing_name, "%s", name);
    calls = 0;
    failing_call = call;
    failing_result = result;
    pthread_mutex_unlock(&mutex);
}

long double_calls(void) { return calls; }

void double_reach(int device, int peer, int can) { can_reach[device][peer] = can; }

/* What this process holds: allocations, opened handles, registered ranges, contexts of this thread, addresses without
 * memory, memory behind descriptors. */
int double_held(int what) {
    static const int kinds[] = {OWN, OPENED, FREE, FREE, RESERVED, FREE};
    int count = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < range_end; i++)
        count += kinds[what] && ranges[i].kind == kinds[what];
    for (int i = 0; i < MEMORIES; i++)
        count += what == 5 && memories[i].references;
    for (int i = 0; i < REGISTERED; i++)
        count += what == 2 && registered[i].nbytes;
    pthread_mutex_unlock(&mutex);
    return what == 3 ? depth : count;
}

/* FREE, OWN, OPENED, ADOPTED or RESERVED. Memory without access for a device counts as RESERVED. */
int double_kind(Address address, size_t nbytes, int device) {
    pthread_mutex_lock(&mutex);
    struct Range *range = range_at(address, nbytes);
    return end(!range ? FREE : is_accessible(range, device) ? range->kind : RESERVED);
}

int double_is_registered(char *address, size_t nbytes) {
    pthread_mutex_lock(&mutex);
    return end(is_registered(address, nbytes));
}

void double_adopt(Address address, size_t nbytes) {
    pthread_mutex_lock(&mutex);
    if (!new_range(address, nbytes, ADOPTED))
        fault("too many tensors");
    pthread_mutex_unlock(&mutex);
}

void double_forget(Address address) {
    pthread_mutex_lock(&mutex);
    struct Range *range = range_at(address, 1);
    if (range && range->kind == ADOPTED)
        range->kind = FREE;
    pthread_mutex_unlock(&mutex);
}

void double_sleep(void *stream, uint64_t cycles) {
    pthread_mutex_lock(&mutex);
    add(stream, (Work){.kind = SLEEP, .amount = cycles});
    pthread_mutex_unlock(&mutex);
}

void double_stop(void *stream, int is_stopped) {
    pthread_mutex_lock(&mutex);
    stream_of(stream)->is_stopped = is_stopped;
    catch_up(stream_of(stream));
    pthread_mutex_unlock(&mutex);
}

/* Whether a stream has nothing to do: no question, so the clock stays. */
int double_is_idle(void *stream) {
    pthread_mutex_lock(&mutex);
    catch_up(stream_of(stream));
    return end(!stream_of(stream)->first && !stream_of(stream)->is_running && !stream_of(stream)->is_stopped);
}

void double_add_fault(const char *text) {
    pthread_mutex_lock(&mutex);
    fault("%s", text);
    pthread_mutex_unlock(&mutex);
}

/* The text of a fault by its number, oldest first; NULL: there are not so many. All are forgotten after `clear`. */
const char *double_fault(int number) { return number < fault_count && number < FAULTS ? faults[number] : NULL; }

void double_clear_faults(void) { fault_count = 0; }

#define ENTRY(name) {#name, name}
#define ENTRY_V2(name) {#name, name##_v2}
static const struct { const char *name; void *function; } table[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetCount), ENTRY_V2(cuDeviceGetUuid),
    ENTRY(cuDeviceCanAccessPeer), ENTRY(cuDevicePrimaryCtxRetain), ENTRY_V2(cuDevicePrimaryCtxRelease),
    ENTRY(cuDevicePrimaryCtxGetState), ENTRY_V2(cuCtxPushCurrent), ENTRY_V2(cuCtxPopCurrent), ENTRY_V2(cuMemAlloc),
    ENTRY_V2(cuMemFree), ENTRY_V2(cuMemGetInfo), ENTRY_V2(cuMemGetAddressRange), ENTRY(cuIpcGetMemHandle),
    ENTRY_V2(cuIpcOpenMemHandle), ENTRY(cuIpcCloseMemHandle), ENTRY_V2(cuMemHostRegister), ENTRY(cuMemHostUnregister),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuMemGetAllocationGranularity), ENTRY(cuMemCreate), ENTRY(cuMemRelease),
    ENTRY(cuMemExportToShareableHandle), ENTRY(cuMemImportFromShareableHandle), ENTRY(cuMemAddressReserve),
    ENTRY(cuMemAddressFree), ENTRY(cuMemMap), ENTRY(cuMemUnmap), ENTRY(cuMemSetAccess), ENTRY_V2(cuMemcpyDtoDAsync),
    ENTRY_V2(cuMemcpyHtoDAsync), ENTRY_V2(cuMemcpyDtoHAsync), ENTRY(cuLaunchHostFunc), ENTRY(cuStreamCreate),
    ENTRY(cuStreamQuery), ENTRY(cuStreamSynchronize), ENTRY(cuStreamWaitEvent), ENTRY(cuEventCreate),
    ENTRY(cuEventRecord), ENTRY(cuEventQuery), ENTRY(cuEventSynchronize), ENTRY_V2(cuEventDestroy),
    ENTRY(cuGetErrorString),
};

Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *function = strcmp(name, "cuGetProcAddress") ? NULL : (void *)cuGetProcAddress_v2;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            *function = table[i].function;
    if (status)
        *status = !*function;
    return *function ? OK : NOT_FOUND;
}
