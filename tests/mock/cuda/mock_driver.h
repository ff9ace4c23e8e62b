/* The inside of the stand-in: the objects of a driver, and what its files call of each other. mock.lock guards all of it; an
 * entry point holds it from ENTER to its end, but for what waits. Parts of operations run without it. */
#ifndef SHOAL_TESTS_MOCK_DRIVER_H
#define SHOAL_TESTS_MOCK_DRIVER_H

#include <pthread.h>

#include "mock_cuda.h"

#define MOCK_API __attribute__((visibility("default")))
#define MOCK_DEVICES_MAX 128
#define MOCK_FIRST_DEVICE 100 /* the handle of device 0, so that nobody takes a handle for a number */
#define MOCK_STACK_MAX 64

/* Every entry point, as mock_MEMBER. */
#define MOCK_DECLARE(member, name, version, need, signature) shoal_cu_result mock_##member signature;
SHOAL_CUDA_CALL_LIST(MOCK_DECLARE)
MOCK_CUDA_EXTRA_LIST(MOCK_DECLARE)
#undef MOCK_DECLARE

/* ---- Modes and state of the whole (mock_start.c, mock_modes.c) ----------------------------------------------------------- */

struct mock_modes {
    int devices, version, memory, peers, nvlink, values, flush, gdrcopy, dmabuf, seed, late, torn, poison, queues, depth, idle,
        pageable, reuse, leaks;
};

struct mock_driver {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation is done, or a context is free again */
    struct mock_modes modes;
    bool is_started;
    bool is_forked; /* started in our parent */
    uint64_t epoch; /* resets so far */
    uint64_t random;
};

extern struct mock_driver mock;

void mock_modes_reset(void);
/* A number below limit > 0. */
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
/* In the callback thread. */
void mock_forbid_callbacks(void);
SHOAL_PRINTF(1, 2) void mock_fault(const char *format, ...);

/* Each entry point begins with this. It gives `call`. */
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

/* A value that no pointer has, and that no later object gets. */
uintptr_t mock_handle_make(enum mock_kind kind, void *object);
/* NULL: there is none, or no more. */
void *mock_handle_find(enum mock_kind kind, uintptr_t handle);
void mock_handle_drop(uintptr_t handle);
/* One object of a kind after another, from *at = 0; NULL: no more. Handles may be dropped between. */
void *mock_handle_next(enum mock_kind kind, size_t *at);
size_t mock_handle_count(enum mock_kind kind);
/* Never fails. */
void *mock_allocate_zeroed(size_t bytes);

/* ---- Contexts (mock_context.c) ------------------------------------------------------------------------------------------- */

struct mock_context {
    shoal_cu_context handle;
    int device;
    bool is_primary;
    unsigned retained;      /* of a primary one */
    shoal_cu_result sticky; /* what all calls answer from now on */
    bool is_held;           /* by a call that waits */
    pthread_t holder;
    uint64_t peers; /* devices whose memory its kernels may use */
    struct mock_context *next_dead;
};

/* NULL: there is none; destroyed ones are still current. */
struct mock_context *mock_current(bool *is_destroyed_out);
/* -1: no such device. */
int mock_device_number(shoal_cu_device device);
/* No other thread can use the context until mock_let_go with the answer. Before waiting on mock.changed. */
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

/* Addresses of a device, and where their bytes are. */
struct mock_region {
    enum mock_region_kind kind;
    shoal_cu_address at;
    size_t bytes;
    size_t room;                  /* of the reserved addresses, from their page on */
    char *alias;                  /* the bytes */
    struct mock_context *context; /* NULL: of none */
    int device;
    unsigned flags;  /* of a registration */
    uint64_t buffer; /* no other gets this number */
    int handle_types;
    unsigned uses;                      /* by operations that are not done */
    bool is_dying;                      /* being freed: nothing new can use it */
    uint64_t offset;                    /* in the device's file */
    int slot;                           /* of the ledger in that file; -1: none */
    struct mock_region *reservation;    /* of mapped memory */
    struct mock_allocation *allocation; /* that is mapped */
    uint64_t readers;                   /* devices that may use mapped memory */
    struct mock_import *import;         /* of imported memory */
};

/* Regions by their first address; none overlaps another. */
struct mock_ranges {
    struct {
        uint64_t begin, end;
        struct mock_region *region;
    } * items;
    size_t count, room;
};

bool mock_ranges_add(struct mock_ranges *ranges, uint64_t begin, size_t bytes, struct mock_region *region);
void mock_ranges_remove(struct mock_ranges *ranges, uint64_t begin);
/* The region that has the address; NULL: none. */
struct mock_region *mock_ranges_find(const struct mock_ranges *ranges, uint64_t at);
bool mock_ranges_overlap(const struct mock_ranges *ranges, uint64_t begin, size_t bytes);
void mock_ranges_clear(struct mock_ranges *ranges);

/* A part of memory for an operation. */
struct mock_span {
    char *bytes;
    struct mock_region *holder; /* whose `uses` count it; NULL: host memory that is not registered */
};

/* Addresses that no CPU may touch. 0: no more. */
shoal_cu_address mock_reserve(size_t bytes);
void mock_unreserve(shoal_cu_address at, size_t bytes);
/* Whether addresses are, or once were, those of a device. */
bool mock_is_reserved(uint64_t at);

/* A device's memory: a file. */
struct mock_arena {
    bool is_open;
    int fd;
    uint64_t end;
    size_t used;
    void *ledger; /* NULL: nothing was exported */
};

/* NULL: the system gives none. */
struct mock_arena *mock_arena_of(int device);

struct mock_region *mock_region_add(enum mock_region_kind kind, shoal_cu_address at, size_t bytes, char *alias);
/* It is in no list any more, and freed. */
void mock_region_drop(struct mock_region *region);
/* With its bytes; nothing uses it. */
void mock_free_region(struct mock_region *region);
/* Of device addresses; NULL: none. */
struct mock_region *mock_region_find(shoal_cu_address at);
struct mock_region *mock_region_next(const struct mock_region *region); /* NULL: the first */
/* INVALID_VALUE: it is not all memory that a device has. */
shoal_cu_result mock_find_device_span(shoal_cu_address at, size_t bytes, struct mock_span *span);
/* INVALID_VALUE: it is a device's, or only partly registered. */
shoal_cu_result mock_find_host_span(const void *at, size_t bytes, struct mock_span *span);
/* Either. */
shoal_cu_result mock_find_span(shoal_cu_address at, size_t bytes, struct mock_span *span);
/* Waits until no operation uses it. */
void mock_wait_unused(const struct mock_region *region);
void mock_memory_reset(void);
void mock_regions_reset(void);
size_t mock_memory_count(bool is_host);
/* Everything that was allocated or registered in it. */
void mock_memory_forget(const struct mock_context *context);

/* All that the processor has written past the driver and that is still on its way comes (mock_remote.c). */
void mock_remote_flush(void);
void mock_remote_reset(void);
size_t mock_count_remote_writes(void);
size_t mock_count_pins(void);

/* Host memory that is registered, by the host's addresses (mock_host.c). */
struct mock_region *mock_host_find(uint64_t at);
bool mock_host_overlaps(uint64_t begin, size_t bytes);
void mock_host_forget(struct mock_region *region);
void mock_host_reset(void);

/* ---- Streams and operations (mock_stream.c, mock_schedule.c, mock_callback.c) -------------------------------------------- */

/* Where operations wait, in the order in which they were posted. Streams may share one. */
struct mock_queue {
    struct mock_queue *next;
    int device, number; /* number -1: of one stream alone */
    struct mock_op *head, *tail;
    unsigned streams;
};

struct mock_stream {
    struct mock_stream *next; /* of the living, or of the dead */
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

/* A place in a stream that an event has marked. */
struct mock_mark {
    unsigned holders;
    bool is_reached;
};

struct mock_copy {
    char *dest;
    const char *source;
    size_t dest_pitch, source_pitch, row_bytes, rows;
    unsigned parts, next; /* of those that a torn copy has */
    unsigned first;       /* the part that comes first */
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
    uint64_t number; /* of all operations of the process */
    uint64_t due_ns; /* a late copy's; 0: not looked at yet */
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

/* What a program calls a stream; NULL: none. The special streams are those of the current context. */
struct mock_stream *mock_stream_find(const struct mock_call *call, shoal_cu_stream stream);
/* As mock_stream_find, for a stream that gets work. */
shoal_cu_result mock_stream_for_work(const struct mock_call *call, shoal_cu_stream stream, struct mock_stream **stream_out);
struct mock_stream *mock_stream_next(struct mock_stream *stream); /* NULL: the first */
/* An operation of it is over: a destroyed one goes with its last. */
void mock_stream_step(struct mock_stream *stream);
/* NULL: all of them, and those that somebody may still have waited for. */
void mock_streams_forget(const struct mock_context *context);
/* Whether a stream is being captured that keeps this thread from unsafe calls; those streams' captures become invalid. */
bool mock_capture_forbids(void);
bool mock_is_capturing(const struct mock_context *context);

struct mock_op *mock_op_make(enum mock_op_kind kind, struct mock_region *first, struct mock_region *second);
/* Takes the operation. Waits where the stream is full. */
void mock_post(struct mock_stream *stream, struct mock_op *op);
/* Until it is empty, or its context has failed. */
shoal_cu_result mock_wait_stream(const struct mock_stream *stream);
/* All of the context's device, where the mode says so, while nobody else can use the context. */
void mock_wait_idle(const struct mock_call *call);
/* Nothing runs any more on its streams; what had been posted is gone. */
void mock_break_context(struct mock_context *context, shoal_cu_result result);
struct mock_queue *mock_queue_for(int device);
void mock_queue_leave(struct mock_queue *queue);
size_t mock_count_operations(void);
bool mock_has_launches(void);
/* The worker has ended, with all its state. */
void mock_schedule_reset(void);
void mock_schedule_forked(void);

/* The operation is over: everybody is told. */
void mock_op_end(struct mock_op *op);
bool mock_callback_is_free(void);
void mock_callback_run(struct mock_op *op);
/* Of a child: its parent's threads are not there. */
void mock_callback_forked(void);

struct mock_mark *mock_mark_hold(struct mock_mark *mark);
void mock_mark_drop(struct mock_mark *mark);
void mock_mark_reach(struct mock_mark *mark);
void mock_events_forget(const struct mock_context *context);

/* Parts of operations (mock_copy.c, mock_value.c, mock_module.c). True: it was the last. */
bool mock_copy_part(struct mock_copy *copy);
bool mock_value_is_there(const struct mock_value *value);
void mock_value_write(const struct mock_value *value);
bool mock_launch_part(struct mock_launch *launch);
shoal_cu_result mock_launch_result(const struct mock_launch *launch);
void mock_launch_free(struct mock_launch *launch);

/* ---- Kernels (mock_module.c) --------------------------------------------------------------------------------------------- */

void mock_modules_forget(const struct mock_context *context);
void mock_modules_reset(void);
/* Those of Shoal (mock_kernels.c), which a program need not give. */
extern const struct mock_cuda_kernel mock_own_kernels[];
extern const size_t mock_own_kernel_count;
size_t mock_most_blocks(void);

/* ---- Memory of other processes, and memory without an address (mock_ipc.c, mock_virtual.c) ------------------------------- */

/* Before the memory is freed: no other process can open it any more. */
void mock_ledger_close(struct mock_region *region);
void mock_ledger_unmap(void *ledger);
void mock_import_forget(struct mock_region *region);
void mock_virtual_reset(void);

#endif
