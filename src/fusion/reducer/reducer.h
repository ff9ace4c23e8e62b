/* The reducer: what its parts share, and the parts themselves. See the public header.
 *
 *     ready (any thread) -> marks.c packs it -> the buffer's last one? -> flow.c posts full buffers in index order, then the
 *                                                                         tally; compress.c: in stages, if it is compressed
 *     an operation is done (the thread that makes progress) -> flow.c notes it, posts what had to wait
 *     finish, or the reducer's thread -> out.c puts averages into place, calls on_buffer, in index order; or, with an optimizer
 *                                        (optimizer.c), steps this rank's shard and has the parameters gathered
 *
 * For gradients on a device, device_buffer.c puts all of this for a full buffer on a stream, in order, and measure.c computes
 * norms; with an optimizer, offload.c takes them to the host and the new parameters back.
 *
 * step.c begins and ends steps; relayout.c changes the layout between two. stats.c records times and bytes. reducer_noise.c
 * estimates the noise scale. reducer_failure.c determines the first cause of a failure. Files call only files below them: what
 * is done is reported upward by events (fusion_full_fn, fusion_done_fn).
 *
 * Parts. Each struct belongs to its own file. Other files call the functions in its header and do not see its fields.
 *
 * Locks. `lock` guards fields marked "lock" here and in the parts. No thread holds it while it calls a function of shoal.h that
 * can take the library's own lock, because completions arrive with that lock held and take this one. */
#ifndef SHOAL_FUSION_REDUCER_H
#define SHOAL_FUSION_REDUCER_H

#include <pthread.h>

#include "base/assert.h"
#include "fusion/codec/wide_kernels.h"
#include "fusion/layout/gradient_layout.h"

/* Called without the lock when a buffer is reduced, or its operation has failed. */
typedef void fusion_done_fn(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status);

struct shoal_reducer {
    /* Constant once the reducer is made. */
    struct shoal_context *context;
    struct shoal_comm *comm; /* for buffers, and for agreement between steps */
    struct shoal_reducer_options options;
    struct shoal_optimizer given; /* what options.optimizer points to, until the reducer is made */
    char name[24];
    int rank, size;
    int hosts, local_size; /* ranks on this host */
    const struct shoal_gradient_kernels *kernels;

    /* The layout of the gradients. fusion_install changes it, between steps. */
    struct shoal_gradient_layout *layout;
    unsigned layout_number;
    char *memory; /* of all buffers: from shoal_mem_alloc, or on the device */

    /* The current step. step.c writes it. */
    enum shoal_step step; /* the last step that began */
    uint64_t steps;       /* finished REDUCE steps */
    bool has_renewed;     /* the layout was checked once against rank 0's order */
    bool is_armed;        /* lock: a REDUCE step is under way: threads may post, compute and put out */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* signals that a guarded field has changed */

    struct fusion_comms *comms; /* the communicators in addition to `comm` */
    struct fusion_marks *marks;
    struct fusion_flow *flow;
    struct fusion_device *device;         /* NULL if gradients are in host memory */
    struct fusion_compressor *compressor; /* NULL if nothing is compressed */
    struct fusion_optimizer *optimizer;   /* NULL if the caller steps the parameters */
    struct fusion_offload *offload;       /* NULL unless gradients are on a device and there is an optimizer */
    struct fusion_measure *measure;       /* NULL if a device computes no norms */
    struct fusion_tally *tally;
    struct fusion_out *out;
    struct fusion_stats *stats;
    struct fusion_noise *noise; /* NULL if nobody asks for the noise scale */
    struct fusion_fault *fault;
};

static inline void fusion_lock(struct shoal_reducer *reducer)
{
    pthread_mutex_lock(&reducer->lock);
}

static inline void fusion_unlock(struct shoal_reducer *reducer)
{
    pthread_mutex_unlock(&reducer->lock);
}

/* Returns true if a thread holds the lock: for assertions of functions that are called with the lock held. If it returns false
 * it has taken the lock, but then the assertion ends the process. */
static inline bool fusion_has_lock(const struct shoal_reducer *reducer)
{
    return pthread_mutex_trylock(&((struct shoal_reducer *)(uintptr_t)reducer)->lock) != 0;
}

/* Returns true if buffers are on the device as well, and it computes there. */
static inline bool fusion_computes_on_device(const struct shoal_reducer *reducer)
{
    return reducer->device && !reducer->options.optimizer;
}

/* Returns true if averages are scaled on their way out, when the number of ranks that have not joined is known. Until then they
 * are averages over all ranks, because sums would overflow in 16 bits. */
static inline bool fusion_scales_late(const struct shoal_reducer *reducer)
{
    return reducer->options.is_uneven && reducer->options.divides_by_active && reducer->options.op == SHOAL_AVG;
}

/* Returns true if a device copies averages back only in finish, which knows their factor. */
static inline bool fusion_puts_back_late(const struct shoal_reducer *reducer)
{
    return fusion_scales_late(reducer) || reducer->options.max_norm > 0;
}

/* The kernels, on all threads of the rank. */
static inline struct fusion_wide fusion_wide(const struct shoal_reducer *reducer)
{
    return (struct fusion_wide){reducer->context, reducer->kernels};
}

static inline char *fusion_buffer_memory(const struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(buffer < reducer->layout->buffer_count);
    return reducer->memory + reducer->layout->buffers[buffer].begin;
}

static inline char *fusion_view(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    SHOAL_ASSERT(place->offset < reducer->layout->buffers[place->buffer].bytes ||
                 !reducer->layout->parameters.items[parameter].count);
    return fusion_buffer_memory(reducer, place->buffer) + place->offset;
}

static inline const struct shoal_parameter *fusion_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    SHOAL_ASSERT(parameter < reducer->layout->parameters.count);
    return &reducer->layout->parameters.items[parameter];
}

/* Returns the options of an operation of the reducer. */
static inline struct shoal_options fusion_options(const struct shoal_reducer *reducer)
{
    return fusion_deadline(reducer->options.timeout_ms);
}

#endif
