/* A simulated training step: gradients become ready along a backward pass and are copied into buffers; the buffers are summed
 * in the order of their numbers, and copied back. Knows no network: the caller provides the cost of each operation. Reentrant;
 * no allocation.
 *
 *     backward   |=====t0====t1==========t2=====|
 *     copy in         |0|    |1|         |2|
 *     summed           |---0---|----1----|   |---2---|          one pipe: the next begins when the one before lets it
 *     copy out                 |0|       |1|         |2|
 *                                                      ^ the step ends
 *
 * If the reducer steps the parameters, a buffer passes the pipe up to three times, and one thread steps this rank's shards in
 * between. Operations enter the pipe in the order in which they can begin; those of one kind, in the order of the buffers.
 * Those inside a host may have another pipe than those between hosts:
 *
 *     scattered        |--0--|--1--|     |--2--|      then, over teams, "across" in the same way
 *     stepped                |0|   |1|         |2|
 *     gathered                     |--0--|--1--||--2--|
 */
#ifndef SHOAL_TOOLS_STEP_REPLAY_H
#define SHOAL_TOOLS_STEP_REPLAY_H

#include "step_profile.h"

/* One buffer of the layout. */
struct step_buffer {
    size_t bytes;   /* as summed */
    size_t content; /* bytes of gradients, without padding */

    /* Filled in by the replay: microseconds from the beginning of the backward pass. */
    double ready_us;  /* the last of its gradients is in the buffer */
    double posted_us; /* earlier buffers are posted, and the bytes in flight allow it */
    double begun_us;  /* the pipe starts it */
    double summed_us;
    double put_us;  /* copied back, or stepped */
    double done_us; /* its results are on all ranks */
};

/* The time of an operation on one buffer. */
struct step_cost {
    double alone_us; /* from its beginning to the end on the last rank, with nothing else under way */
    double apart_us; /* from its beginning to the beginning of the next operation, if many follow each other */
};

/* The operations of a buffer. */
enum step_way {
    STEP_WAY_SUM,    /* an all-reduce; with gathers, a reduce-scatter in the team */
    STEP_WAY_ACROSS, /* an all-reduce of this rank's shard over the teams */
    STEP_WAY_GATHER, /* an all-gather of new parameters in the team */
    STEP_WAYS
};

enum { STEP_PIPES = 2 };

struct step_replay {
    const struct step_profile *profile;
    struct step_buffer *buffers;
    size_t buffer_count;
    const size_t *buffer_of;                  /* the buffer of tensor i of the profile; if it spans several, the last */
    const struct step_cost *costs[STEP_WAYS]; /* of buffer b; NULL if steps do not have the operation. Never NULL for sums */
    int pipe[STEP_WAYS];                      /* operations with equal numbers, 0 to STEP_PIPES - 1, take turns */
    double backward_us;
    double copy_us_per_byte;    /* into a buffer; 0: gradients are in the buffers */
    double put_us_per_byte;     /* spent on a summed buffer's content: it is copied out, and its parameters are stepped */
    bool is_late;               /* no buffer is put before all are summed */
    double before_us, after_us; /* with is_late: before the first is put. Then: after the last one */
    size_t in_flight_bytes;     /* limit for posted buffers not yet summed; one is always allowed; 0: no limit */
};

/* Computes the times of the buffers, and returns the time at which the step ends. */
double step_replay_run(const struct step_replay *replay);

#endif
