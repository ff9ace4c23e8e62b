/* The reducer: what all of its parts know, and the parts. See the public header.
 *
 *     ready (any thread) -> marks.c packs it -> the buffer's last one? -> flow.c posts full buffers in index order, then the
 *                                                                         tally; compress.c: in stages, where it is compressed
 *     an operation is done (the thread that makes progress) -> flow.c notes it, posts what had to wait
 *     finish, or the reducer's thread -> out.c puts averages into place, calls on_buffer, in index order
 *
 * Where gradients lie on a device reducer_device.c does all of this for a full buffer, in the order of a stream, and measure.c
 * takes norms.
 *
 * step.c begins and ends steps. stats.c is told what happens when. reducer_failure.c settles who is to blame.
 *
 * Parts. Each struct is its own file's: others call the functions of its header, which say what they do, not what it holds.
 *
 * Locks. `lock` guards what is marked "lock" here and in the parts. It is never held in a call to shoal.h that can take the
 * library's own lock, because completions arrive with that lock held and take this one. */
#ifndef SHOAL_FUSION_REDUCER_H
#define SHOAL_FUSION_REDUCER_H

#include <pthread.h>

#include "fusion/gradient_kernels.h"
#include "fusion/gradient_layout.h"

struct shoal_reducer {
    /* Constant once it is made. */
    struct shoal_context *context;
    struct shoal_comm *comm; /* of buffers, and of what is agreed between steps */
    struct shoal_reducer_options options;
    char name[24];
    int rank, size;
    int hosts, local_size; /* ranks on this one */
    const struct shoal_gradient_kernels *kernels;

    /* Where gradients lie. fusion_install changes it, between steps. */
    struct shoal_gradient_layout *layout;
    unsigned layout_number;
    char *memory; /* of all buffers: from shoal_mem_alloc, or on the device */

    /* Which step it is. step.c writes it. */
    enum shoal_step step; /* the last one that began */
    uint64_t steps;       /* REDUCE steps that were finished */
    bool has_renewed;     /* it was asked once whether rank 0's order gives another layout */
    bool is_armed;        /* lock: a REDUCE step is under way: threads may post, compute and put out */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* something that the lock guards has changed */

    struct fusion_marks *marks;
    struct fusion_flow *flow;
    struct fusion_device *device;         /* NULL: gradients lie in host memory */
    struct fusion_compressor *compressor; /* NULL: nothing is compressed */
    struct fusion_measure *measure;       /* NULL: no norms are taken on a device */
    struct fusion_tally *tally;
    struct fusion_out *out;
    struct fusion_stats *stats;
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

/* Averages over all ranks are scaled on their way out, once it is known how many of them have not joined. Sums would overflow
 * in 16 bits. */
static inline bool fusion_scales_late(const struct shoal_reducer *reducer)
{
    return reducer->options.is_uneven && reducer->options.divides_by_active && reducer->options.op == SHOAL_AVG;
}

static inline char *fusion_buffer_memory(const struct shoal_reducer *reducer, size_t buffer)
{
    return reducer->memory + reducer->layout->buffers[buffer].begin;
}

static inline char *fusion_view(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    return fusion_buffer_memory(reducer, place->buffer) + place->offset;
}

static inline const struct shoal_parameter *fusion_parameter(const struct shoal_reducer *reducer, size_t parameter)
{
    return &reducer->layout->parameters.items[parameter];
}

/* ---- reducer.c ---- */

/* Options of an operation of the reducer. */
struct shoal_options fusion_options(const struct shoal_reducer *reducer);

/* The same of one on a buffer: with the stream of its lane, where it lies on a device. */
struct shoal_options fusion_buffer_options(const struct shoal_reducer *reducer, size_t buffer);

/* A communicator of ranks of the reducer's, named as it is with a suffix. Collective on comm. */
SHOAL_MUST_USE enum shoal_status fusion_split(const struct shoal_reducer *reducer, struct shoal_comm *comm, const char *suffix,
                                              int color, int key, struct shoal_comm **comm_out);

/* Takes over the layout, with memory for it. On an error nothing has changed and the layout is still the caller's. */
SHOAL_MUST_USE enum shoal_status fusion_install(struct shoal_reducer *reducer, struct shoal_gradient_layout *layout);

/* Memory of zeros where gradients lie. */
SHOAL_MUST_USE enum shoal_status fusion_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out);
/* NULL is allowed. */
void fusion_free_memory(const struct shoal_reducer *reducer, void *memory);

/* A collective call. Returns OK if all ranks are ready for the next exchange; else the status of the lowest rank that is not,
 * and *rank_out is that rank. *rank_out is -1 if the exchange itself failed. Allocates nothing. */
SHOAL_MUST_USE enum shoal_status fusion_all_ready(struct shoal_reducer *reducer, enum shoal_status own, int *rank_out);

#endif
