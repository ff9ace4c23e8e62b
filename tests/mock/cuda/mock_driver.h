/* The inside of the stand-in: the objects of a driver, and the functions that its files share. mock.lock guards all of it. An
 * entry point holds it from ENTER to its end, except while it waits. Parts of operations run without it. */
#ifndef SHOAL_TESTS_MOCK_DRIVER_H
#define SHOAL_TESTS_MOCK_DRIVER_H

#include <pthread.h>

#include "mock_cuda.h"

#define MOCK_API __attribute__((visibility("default")))
#define MOCK_DEVICES_MAX 128
#define MOCK_FIRST_DEVICE 100 /* the handle of device 0, so that a number is not mistaken for a handle */
#define MOCK_STACK_MAX 64

/* Every entry point, as mock_MEMBER. */
#define MOCK_DECLARE(member, name, version, need, signature) shoal_cu_result mock_##member signature;
SHOAL_CUDA_CALL_LIST(MOCK_DECLARE)
MOCK_CUDA_EXTRA_LIST(MOCK_DECLARE)
#undef MOCK_DECLARE

/* ---- Modes and global state (mock_start.c, mock_modes.c) ----------------------------------------------------------------- */

struct mock_modes {
    int devices, version, memory, peers, nvlink, values, flush, gdrcopy, dmabuf, seed, late, torn, poison, queues, depth, idle,
        pageable, reuse, leaks;
};

struct mock_driver {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation is done, or a context is free again */
    struct mock_modes modes;
    bool is_started;
    bool is_forked; /* started in the parent process */
    uint64_t epoch; /* resets so far */
    uint64_t random;
};

extern struct mock_driver mock;

void mock_modes_reset(void);
/* Returns a random number below limit, which is > 0. */
uint64_t mock_draw(uint64_t limit);
uint64_t mock_now_ns(void);

/* ---- Calls (mock_call.c) ------------------------------------------------------------------------------------------------- */

enum mock_needs {
    MOCK_ANYTIME = 1, /* also before cuInit */
    MOCK_CURRENT = 2, /* a current context that has not failed */
    MOCK_UNSAFE = 4,  /* not while another stream is being captured */
};

struct mock_call {
    shoal_cu_result result;
    bool is_locked;
    struct mock_context *context; /* the current one, with MOCK_CURRENT */
};

struct mock_call mock_enter(const char *name, unsigned needs);
void mock_leave(const struct mock_call *call);
void mock_calls_reset(void);
size_t mock_count_calls(void);
/* Forbids driver calls in the callback thread. */
void mock_forbid_callbacks(void);
SHOAL_PRINTF(1, 2) void mock_fault(const char *format, ...);

/* Each entry point begins with this. It defines `call`. */
#define ENTER(name, needs)                                                          \
    SHOAL_SCOPED(mock_leave) const struct mock_call call = mock_enter(name, needs); \
    if (call.result != SHOAL_CU_SUCCESS)                                            \
    return call.result

#define MOCK_TRY(expression)                               \
    do {                                                   \
        const shoal_cu_result mock_result_ = (expression); \
        if (mock_result_ != SHOAL_CU_SUCCESS)              \
            return mock_result_;                           \
    } while (0)

/* ---- Handles (mock_handle.c) --------------------------------------------------------------------------------------------- */

enum mock_kind { MOCK_CONTEXT = 1, MOCK_STREAM, MOCK_EVENT, MOCK_MODULE, MOCK_FUNCTION, MOCK_ALLOCATION, MOCK_KINDS };

/* Returns a value that no pointer has and that no later object gets. */
uintptr_t mock_handle_make(enum mock_kind kind, void *object);
/* Returns NULL if the handle is unknown or was dropped. */
void *mock_handle_find(enum mock_kind kind, uintptr_t handle);
void mock_handle_drop(uintptr_t handle);
/* Returns the objects of a kind one after the other, from *at = 0, then NULL. Handles may be dropped between calls. */
void *mock_handle_next(enum mock_kind kind, size_t *at);
size_t mock_handle_count(enum mock_kind kind);
/* Never fails. */
void *mock_allocate_zeroed(size_t bytes);

/* ---- Contexts (mock_context.c) ------------------------------------------------------------------------------------------- */

struct mock_context {
    shoal_cu_context handle;
    int device;
    bool is_primary;
    unsigned retained;      /* for a primary context */
    shoal_cu_result sticky; /* the result of all calls from now on */
    bool is_held;           /* by a call that waits */
    pthread_t holder;
    uint64_t peers; /* devices whose memory its kernels may use */
    struct mock_context *next_dead;
};

/* Returns NULL if there is none; a destroyed context is still current. */
struct mock_context *mock_current(bool *is_destroyed_out);
/* Returns -1 if there is no such device. */
int mock_device_number(shoal_cu_device device);
/* Keeps all other threads from using the context until mock_let_go is called with the result. Call it before waiting on
 * mock.changed. */
bool mock_hold(struct mock_context *context);
void mock_let_go(struct mock_context *context, bool is_ours);
void mock_contexts_reset(void);
size_t mock_stack_depth(void);

/* ---- Memory (mock_range.c, mock_region.c, mock_memory.c) ----------------------------------------------------------------- */

enum mock_region_kind {
    MOCK_PLAIN_MEMORY,
    MOCK_MANAGED_MEMORY,
    MOCK_POOL_MEMORY,
    MOCK_HOST_MEMORY,     /* registered */
    MOCK_MAPPED_MEMORY,   /* an allocation without an address, at a reserved one */
    MOCK_IMPORTED_MEMORY, /* of another process */
    MOCK_RESERVATION,     /* addresses only */
};

/* Addresses of a device, and the location of their bytes. */
struct mock_region {
    enum mock_region_kind kind;
    shoal_cu_address at;
    size_t bytes;
    size_t room;                  /* of the reserved addresses, from their page on */
    char *alias;                  /* the bytes */
    struct mock_context *context; /* NULL: no context */
    int device;
    unsigned flags;  /* of a registration */
    uint64_t buffer; /* unique number */
    int handle_types;
    unsigned uses;                      /* by operations that are not done */
    bool is_dying;                      /* being freed: no new operation can use it */
    uint64_t offset;                    /* in the device's file */
    int slot;                           /* in that file's ledger; -1: none */
    struct mock_region *reservation;    /* of mapped memory */
    struct mock_allocation *allocation; /* the mapped allocation */
    uint64_t readers;                   /* bit set of devices that may use mapped memory */
    struct mock_import *import;         /* of imported memory */
};

/* Regions by their first address, without overlaps. */
struct mock_ranges {
    struct {
        uint64_t begin, end;
        struct mock_region *region;
    } * items;
    size_t count, room;
};

bool mock_ranges_add(struct mock_ranges *ranges, uint64_t begin, size_t bytes, struct mock_region *region);
void mock_ranges_remove(struct mock_ranges *ranges, uint64_t begin);
/* Returns the region that contains the address, or NULL. */
struct mock_region *mock_ranges_find(const struct mock_ranges *ranges, uint64_t at);
bool mock_ranges_overlap(const struct mock_ranges *ranges, uint64_t begin, size_t bytes);
void mock_ranges_clear(struct mock_ranges *ranges);

/* A part of memory for an operation. */
struct mock_span {
    char *bytes;
    struct mock_region *holder; /* the region whose `uses` count it; NULL: unregistered host memory */
};

/* Returns addresses that no CPU may touch, or 0 if there are none left. */
shoal_cu_address mock_reserve(size_t bytes);
void mock_unreserve(shoal_cu_address at, size_t bytes);
/* Returns true if an address is, or once was, one of a device. */
bool mock_is_reserved(uint64_t at);

/* A device's memory: a file. */
struct mock_arena {
    bool is_open;
    int fd;
    uint64_t end;
    size_t used;
    void *ledger; /* NULL: nothing was exported */
};

/* Returns NULL if the system has no memory. */
struct mock_arena *mock_arena_of(int device);

struct mock_region *mock_region_add(enum mock_region_kind kind, shoal_cu_address at, size_t bytes, char *alias);
/* Removes the region from its list and frees it. */
void mock_region_drop(struct mock_region *region);
/* Frees the region and its bytes; no operation may use it. */
void mock_free_region(struct mock_region *region);
/* Finds a region by its device address; returns NULL if there is none. */
struct mock_region *mock_region_find(shoal_cu_address at);
struct mock_region *mock_region_next(const struct mock_region *region); /* NULL: the first */
/* Returns INVALID_VALUE if not all of it is device memory. */
shoal_cu_result mock_find_device_span(shoal_cu_address at, size_t bytes, struct mock_span *span);
/* Returns INVALID_VALUE if it is device memory, or only partly registered. */
shoal_cu_result mock_find_host_span(const void *at, size_t bytes, struct mock_span *span);
/* Accepts either kind of memory. */
shoal_cu_result mock_find_span(shoal_cu_address at, size_t bytes, struct mock_span *span);
/* Waits until no operation uses the region. */
void mock_wait_unused(const struct mock_region *region);
void mock_memory_reset(void);
void mock_regions_reset(void);
size_t mock_memory_count(bool is_host);
/* Frees everything that was allocated or registered in the context. */
void mock_memory_forget(const struct mock_context *context);

/* Delivers all of the processor's writes past the driver that are still on their way (mock_remote.c). */
void mock_remote_flush(void);
void mock_remote_reset(void);
size_t mock_count_remote_writes(void);
size_t mock_count_pins(void);

/* Finds registered host memory by the host's address (mock_host.c). */
struct mock_region *mock_host_find(uint64_t at);
bool mock_host_overlaps(uint64_t begin, size_t bytes);
void mock_host_forget(struct mock_region *region);
void mock_host_reset(void);

/* ---- Streams and operations (mock_stream.c, mock_schedule.c, mock_callback.c) -------------------------------------------- */

/* Operations that wait, in the order in which they were posted. Streams may share a queue. */
struct mock_queue {
    struct mock_queue *next;
    int device, number; /* number -1: of one stream alone */
    struct mock_op *head, *tail;
    unsigned streams;
};

struct mock_stream {
    struct mock_stream *next; /* in the list of live or dead streams */
    shoal_cu_stream handle;
    struct mock_context *context;
    struct mock_queue *queue;
    bool is_legacy, is_per_thread;
    bool is_blocking; /* ordered with the legacy stream */
    bool is_destroyed;
    pthread_t thread; /* of a per-thread stream */
    int capture;
    unsigned pending; /* operations */
};

/* A position in a stream that an event has marked. */
struct mock_mark {
    unsigned holders;
    bool is_reached;
};

struct mock_copy {
    char *dest;
    const char *source;
    size_t dest_pitch, source_pitch, row_bytes, rows;
    unsigned parts, next; /* the number of parts of a torn copy, and those done */
    unsigned first;       /* the part that runs first */
    bool is_backward, is_to_poison;
};

struct mock_value {
    void *at;
    uint64_t value;
    unsigned comparison;
    bool is_32, flushes;
};

struct mock_host_call {
    shoal_cu_host_fn function;
    void *arg;
};

enum mock_op_kind {
    MOCK_COPY,
    MOCK_WAIT_VALUE,
    MOCK_WRITE_VALUE,
    MOCK_RECORD,
    MOCK_WAIT_MARK,
    MOCK_CALL_HOST,
    MOCK_FREE_MEMORY,
    MOCK_LAUNCH,
};

struct mock_op {
    struct mock_op *next;
    struct mock_stream *stream;
    enum mock_op_kind kind;
    uint64_t number; /* unique in the process */
    uint64_t due_ns; /* when a late copy runs; 0: not set yet */
    bool is_running;
    struct mock_region *uses[2];
    union {
        struct mock_copy copy;
        struct mock_value value;
        struct mock_mark *mark;
        struct mock_host_call call;
        struct mock_region *region;
        struct mock_launch *launch;
    };
};

/* Finds a program's stream; returns NULL if there is none. Special streams are those of the current context. */
struct mock_stream *mock_stream_find(const struct mock_call *call, shoal_cu_stream stream);
/* Like mock_stream_find(), for a stream that gets work. */
shoal_cu_result mock_stream_for_work(const struct mock_call *call, shoal_cu_stream stream, struct mock_stream **stream_out);
struct mock_stream *mock_stream_next(struct mock_stream *stream); /* NULL: the first */
/* Called when one of the stream's operations ends: a destroyed stream is freed with its last operation. */
void mock_stream_step(struct mock_stream *stream);
/* Frees the context's streams. NULL: frees all streams, including those that a thread may still have waited for. */
void mock_streams_forget(const struct mock_context *context);
/* Returns true if a stream is being captured that forbids unsafe calls to this thread; such captures become invalid. */
bool mock_capture_forbids(void);
bool mock_is_capturing(const struct mock_context *context);

struct mock_op *mock_op_make(enum mock_op_kind kind, struct mock_region *first, struct mock_region *second);
/* Takes ownership of the operation. Waits if the stream is full. */
void mock_post(struct mock_stream *stream, struct mock_op *op);
/* Waits until the stream is empty, or its context has failed. */
shoal_cu_result mock_wait_stream(const struct mock_stream *stream);
/* Waits for all work of the context's device if the mode `idle` is on; meanwhile no other thread can use the context. */
void mock_wait_idle(const struct mock_call *call);
/* Stops all work on the context's streams; posted operations are dropped. */
void mock_break_context(struct mock_context *context, shoal_cu_result result);
struct mock_queue *mock_queue_for(int device);
void mock_queue_leave(struct mock_queue *queue);
size_t mock_count_operations(void);
bool mock_has_launches(void);
/* Resets the scheduler after the worker has ended. */
void mock_schedule_reset(void);
void mock_schedule_forked(void);

/* Ends the operation and wakes all waiters. */
void mock_op_end(struct mock_op *op);
bool mock_callback_is_free(void);
void mock_callback_run(struct mock_op *op);
/* Called in a forked child, in which the parent's threads do not exist. */
void mock_callback_forked(void);

struct mock_mark *mock_mark_hold(struct mock_mark *mark);
void mock_mark_drop(struct mock_mark *mark);
void mock_mark_reach(struct mock_mark *mark);
void mock_events_forget(const struct mock_context *context);

/* Run parts of operations (mock_copy.c, mock_value.c, mock_module.c). Return true after the last part. */
bool mock_copy_part(struct mock_copy *copy);
bool mock_value_is_there(const struct mock_value *value);
void mock_value_write(const struct mock_value *value);
bool mock_launch_part(struct mock_launch *launch);
shoal_cu_result mock_launch_result(const struct mock_launch *launch);
void mock_launch_free(struct mock_launch *launch);

/* ---- Kernels (mock_module.c) --------------------------------------------------------------------------------------------- */

void mock_modules_forget(const struct mock_context *context);
void mock_modules_reset(void);
/* Shoal's kernels (mock_kernels.c), which a program need not define. */
extern const struct mock_cuda_kernel mock_own_kernels[];
extern const size_t mock_own_kernel_count;
size_t mock_most_blocks(void);

/* ---- Memory of other processes, and memory without an address (mock_ipc.c, mock_virtual.c) ------------------------------- */

/* Call it before the memory is freed: afterwards no other process can open it. */
void mock_ledger_close(struct mock_region *region);
void mock_ledger_unmap(void *ledger);
void mock_import_forget(struct mock_region *region);
void mock_virtual_reset(void);

#endif
