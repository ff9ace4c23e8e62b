/* The reducer's struct, and the functions that its files call in each other. See the public header.
 *
 *     ready (any thread) -> pack -> the buffer's last one? -> flow.c posts full buffers in index order
 *     an operation is done (the thread that makes progress) -> flow.c notes it, posts what had to wait
 *     finish, or the reducer's thread -> out.c puts averages into place, calls on_buffer, in index order
 *
 * Locks. `lock` guards what is marked "lock" below. It is never held in a call to shoal.h that can take the library's own lock,
 * because completions arrive with that lock held and take this one. */
#ifndef SHOAL_FUSION_REDUCER_H
#define SHOAL_FUSION_REDUCER_H

#include <pthread.h>
#include <stdatomic.h>

#include "fusion/gradient_kernels.h"
#include "fusion/gradient_layout.h"

/* ---- Gradients ----------------------------------------------------------------------------------------------------------- */

/* Elements [offset, offset + count) of a parameter, where the caller has them. */
struct fusion_part {
    size_t offset;
    size_t count;
    char *memory;
    struct fusion_part *next;
};

enum fusion_mark { FUSION_UNMARKED, FUSION_WHOLE, FUSION_IN_PARTS, FUSION_UNUSED };

/* One parameter in the current step. Fields without a word belong to the thread that has claimed the mark, until the
 * buffer is full. */
struct fusion_gradient {
    atomic_int mark;          /* enum fusion_mark */
    bool is_ready;            /* all its elements */
    struct fusion_part first; /* all of it, or the first part */
    size_t claimed;           /* lock: elements of parts that were claimed */
    size_t packed;            /* lock: elements of parts that lie in the buffer */
    bool is_nonfinite;        /* lock while in parts: a value was NaN or infinity */
    bool has_sum;             /* LOCAL steps have left something in the buffer */
    bool is_used;             /* by any rank, in the last REDUCE step */
    double local_squared;     /* lock while in parts */
    double squared;           /* of the average */
    uint64_t ready_ns;        /* 0: not */
    uint32_t ready_number;    /* how many were ready before it */
};

/* ---- Buffers ------------------------------------------------------------------------------------------------------------- */

enum fusion_phase { FUSION_FILLING, FUSION_POSTED, FUSION_DONE, FUSION_OUT };

#define FUSION_STAGES_MAX 4

struct fusion_slot {
    struct shoal_reducer *reducer;
    atomic_uint missing; /* parameters that are not ready */
    char *memory;
    size_t elements;         /* with padding */
    enum fusion_phase phase; /* lock, as all below */
    bool has_unused;         /* a parameter of it is unused here: what others have decides */
    struct shoal_request *requests[FUSION_STAGES_MAX];
    uint64_t posted_ns, done_ns, out_ns;
    struct fusion_compressed *compressed; /* NULL: it travels as it is */
};

/* ---- The reducer --------------------------------------------------------------------------------------------------------- */

/* Sent by a rank at fault to the others. */
struct fusion_notice {
    int32_t status;
    int32_t rank; /* that is to blame; mostly the sender */
    char operation[96];
    char text[408];
};

struct shoal_reducer {
    struct shoal_context *context;
    struct shoal_comm *comm;   /* of buffers, and of what is agreed between steps */
    struct shoal_comm *notice; /* on which ranks tell each other what failed */
    struct fusion_notice sent; /* over it, by this rank; with the lock until it was sent */
    struct shoal_reducer_options options;
    char name[24];
    int rank, size;
    int hosts, local_size; /* ranks on this one */
    const struct shoal_gradient_kernels *kernels;
    struct fusion_compressor *compressor; /* NULL: nothing is compressed */

    struct shoal_gradient_layout *layout;
    unsigned layout_number;
    bool has_renewed;                  /* it was asked once whether rank 0's order gives another layout */
    struct fusion_gradient *gradients; /* [parameters] */
    struct fusion_slot *slots;         /* [buffers] */
    char *memory;                      /* of all buffers, from shoal_mem_alloc */
    void *scratch;                     /* of compression, too */

    /* The step. Written by begin and finish alone. */
    enum shoal_step step;
    bool is_joined; /* takes part with no gradient of its own */
    uint64_t steps; /* REDUCE steps that were finished */
    uint64_t begin_ns, finish_ns;
    uint64_t begin_wire_bytes; /* sent before the step */
    double factor;             /* of averages on their way out: 1, or 1 / active */
    double clip;
    int64_t head, head_sum; /* is_uneven: 1 from active ranks, and how many */
    struct shoal_request *head_request;
    double *tail, *tail_sum; /* FUSION_TAIL_* and whether each parameter is used */
    struct shoal_request *tail_request;
    size_t tail_count;                /* 0: steps have no tail */
    struct shoal_step_stats stats;    /* of the last REDUCE step, as what follows */
    struct shoal_buffer_times *times; /* [buffers] */
    double *ready_us;                 /* [parameters] */
    uint32_t *ready_order;            /* [parameters] */
    bool *was_used;                   /* [parameters] */

    atomic_bool is_open;
    atomic_uint ready_count; /* parameters ready in this step */
    atomic_uint mark_count;  /* marks in this step */
    atomic_uint_least64_t pack_ns, copied_bytes;
    uint64_t out_ns, callback_ns; /* who puts out */

    pthread_mutex_t lock;
    pthread_cond_t changed;                           /* something below has changed */
    size_t next_post;                                 /* lock: buffers before it are posted */
    size_t next_out;                                  /* lock: buffers before it are in place */
    size_t flight_bytes, flight_buffers, flight_most; /* lock */
    bool is_posting;                                  /* lock: a thread is posting; it looks again before it leaves */
    bool is_putting_out;                              /* lock */
    bool is_tail_posted, is_tail_done;                /* lock */
    bool is_factor_known;                             /* lock */
    bool is_ending;                                   /* lock: the thread has to end */
    bool is_armed;                                    /* lock: a REDUCE step is under way: the thread may put out */
    pthread_t thread;
    bool has_thread;

    atomic_int failed;            /* enum shoal_status */
    bool is_told;                 /* lock: `failure` holds the cause that all ranks agree on */
    bool is_own_fault;            /* lock: a thread of this rank settles it */
    bool must_tell;               /* lock: and has to tell the others first */
    struct shoal_failure failure; /* lock */
};

enum { FUSION_TAIL_NONFINITE, FUSION_TAIL_SQUARED, FUSION_TAIL_FIELDS };

static inline void fusion_lock(struct shoal_reducer *reducer)
{
    pthread_mutex_lock(&reducer->lock);
}

static inline void fusion_unlock(struct shoal_reducer *reducer)
{
    pthread_mutex_unlock(&reducer->lock);
}

static inline enum shoal_status fusion_failed(const struct shoal_reducer *reducer)
{
    return (enum shoal_status)atomic_load_explicit(&reducer->failed, memory_order_acquire);
}

static inline char *fusion_view(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    return reducer->slots[place->buffer].memory + place->offset;
}

static inline const struct shoal_parameter *fusion_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    return &reducer->layout->parameters.items[parameter];
}

/* Monotonic. */
uint64_t fusion_now_ns(void);

/* Options of an operation of the reducer. */
struct shoal_options fusion_options(const struct shoal_reducer *reducer);

/* ---- reducer.c ---- */

/* Takes over the layout: memory and slots of it. On an error nothing has changed and the layout is still the caller's. */
SHOAL_MUST_USE enum shoal_status fusion_install(struct shoal_reducer *reducer, struct shoal_gradient_layout *layout);

/* ---- agree.c: collective on `comm` ---- */

/* Collects each rank's verdict on its arguments: status and text. Returns the status that all ranks agree on; its text is
 * reported. */
SHOAL_MUST_USE enum shoal_status fusion_agree(struct shoal_reducer *reducer, const struct fusion_parameters *parameters,
                                              enum shoal_status status, const char *text);

/* OK when all ranks are ready for what comes next; else the status of the lowest rank that is not, and *rank_out is that rank.
 * *rank_out is -1 where the exchange itself failed. Allocates nothing. */
SHOAL_MUST_USE enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out);

/* A layout from rank 0's order of readiness. */
SHOAL_MUST_USE enum shoal_status fusion_rebuild(struct shoal_reducer *reducer);

/* ---- flow.c ---- */

/* Posts what can be posted. Called with the lock, returns with it, lets go of it meanwhile. */
void fusion_advance(struct shoal_reducer *reducer);

/* Any thread, without the lock: an operation of the reducer has failed, as it does on the other ranks. buffer -1 is the end of
 * a step, -2 its begin. */
void fusion_operation_failed(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* The same for one that this rank alone could not post: the others have to be told. */
void fusion_operation_not_posted(struct shoal_reducer *reducer, enum shoal_status status, long buffer);

/* The buffer is reduced: notes it and posts what had to wait. Without the lock. */
void fusion_buffer_done(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status);

/* Waits for one operation that is under way. Without the lock. */
SHOAL_MUST_USE enum shoal_status fusion_wait(struct shoal_reducer *reducer, struct shoal_request **request);

/* Frees the requests of a step, and makes slots ready for the next. */
void fusion_reset_slots(struct shoal_reducer *reducer);

/* ---- compress.c ---- */

/* Collective, where buffers are compressed between hosts; else nothing. *text says what a rank finds wrong. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_open(struct shoal_reducer *reducer, char *text, size_t text_bytes);
SHOAL_MUST_USE enum shoal_status fusion_compressor_start(struct shoal_reducer *reducer);

/* Ends its thread and frees its communicators: nothing is called back any more. */
void fusion_compressor_stop(struct shoal_reducer *reducer);
void fusion_compressor_free(struct shoal_reducer *reducer);

/* Scratch memory for the slots of a layout, and errors of nothing. */
SHOAL_MUST_USE enum shoal_status fusion_compressor_prepare(struct shoal_reducer *reducer,
                                                           const struct shoal_gradient_layout *layout,
                                                           struct fusion_slot *slots, void **scratch_out);

/* The operation of a buffer that is under way; NULL while something is computed between two. With the lock. */
struct shoal_request *fusion_compressed_request(const struct fusion_slot *slot);

/* Begins what a buffer goes through, instead of an all-reduce. The stages of all buffers go in index order. */
SHOAL_MUST_USE enum shoal_status fusion_compressed_post(struct shoal_reducer *reducer, size_t buffer);
void fusion_compressor_begin_step(struct shoal_reducer *reducer);

/* The failure of one of its communicators, with rank as the reducer counts; false: there is none. */
bool fusion_compressor_failure(const struct shoal_reducer *reducer, struct shoal_failure *failure);
void fusion_compressor_abort(const struct shoal_reducer *reducer);
uint64_t fusion_compressor_wire_bytes(const struct shoal_reducer *reducer);
SHOAL_MUST_USE enum shoal_status fusion_compressor_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes);

/* The errors of quantizing a buffer, for a checkpoint. sent NULL: none are kept. */
struct fusion_residuals {
    float *sent, *sum;
    size_t sent_count, sum_count; /* elements */
};
struct fusion_residuals fusion_compressed_residuals(const struct shoal_reducer *reducer, size_t buffer);

/* Whose they are. Leaves both as they are where nothing is compressed. */
void fusion_compressor_place(const struct shoal_reducer *reducer, int32_t *host_out, int32_t *local_rank_out);

/* Payload of a buffer that this rank sends to other hosts. */
uint64_t fusion_compressed_network_bytes(const struct shoal_reducer *reducer, size_t buffer);

/* ---- out.c ---- */

/* Puts out all buffers that can be, in order. With the lock, which it lets go of meanwhile. */
void fusion_put_out(struct shoal_reducer *reducer);

/* With max_norm: the pass that multiplies, when the norm is known. */
void fusion_clip(struct shoal_reducer *reducer);

/* ---- stats.c ---- */

/* Bytes that this rank has handed to the network so far, for all communicators of the reducer that carry gradients. */
uint64_t fusion_wire_bytes(const struct shoal_reducer *reducer);

/* Adds to bytes, which has an entry for each rank of the reducer, what this rank has sent over comm. members holds the
 * reducer's rank of each of comm's ranks; NULL: they are the same. */
SHOAL_MUST_USE enum shoal_status fusion_add_sent_to(struct shoal_comm *comm, const int *members, uint64_t *bytes);

/* At the end of a REDUCE step. */
void fusion_keep_stats(struct shoal_reducer *reducer);

/* ---- failure.c ---- */

/* This rank is at fault: notes the first cause and tells the other ranks. Without the lock, not in a completion. Returns the
 * reducer's status. parameter < 0: none. */
enum shoal_status fusion_fail(struct shoal_reducer *reducer, enum shoal_status status, long parameter, const char *format, ...)
    FUSION_PRINTF(4, 5);

/* The same where this rank could not post what the others wait for, also in a completion: there nothing may wait, so whoever
 * asks for the failure next tells them. Without the lock. */
void fusion_post_failed(struct shoal_reducer *reducer, enum shoal_status status, const char *operation);

/* A thread of the reducer's own: tells what a completion could not. With the lock, which it lets go of. */
void fusion_tell_late(struct shoal_reducer *reducer);

/* The same without telling others: they know. With the lock. */
void fusion_note(struct shoal_reducer *reducer, enum shoal_status status, const char *operation);

/* The reducer's failure, once it is known what the other ranks say. Without the lock, not in a completion. */
enum shoal_status fusion_failure_status(struct shoal_reducer *reducer);

/* One of several reducers of the same ranks has failed, or what they belong to: the others fail with this cause, here and on
 * all ranks, so that no rank blames the one that frees them. Those that are NULL, or have told of a failure, are left out. All
 * notices leave before the first abort, within a second in all; status and text of each are the cause's. count: at most 64.
 * Without locks. */
void fusion_pass_on(struct shoal_reducer *const *reducers, size_t count, const struct shoal_failure *cause);

/* The cause that a rank has passed on, or the reducer's own failure, as *cause. False: neither has come, and *cause is as it
 * was. */
bool fusion_take_cause(struct shoal_reducer *reducer, int from, struct shoal_failure *cause);

/* Logs, makes it this thread's last failure, and returns status: for refusals that leave the reducer as it was. */
enum shoal_status fusion_refuse(const struct shoal_reducer *reducer, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

#endif
