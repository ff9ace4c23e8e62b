/* A simulated training step: gradients become ready along a backward pass and are copied into buffers; the buffers are summed
 * in the order of their numbers, and copied back. Knows no network: the caller provides the cost of each sum. Reentrant; no
 * allocation.
 *
 *     backward   |=====t0====t1==========t2=====|
 *     copy in         |0|    |1|         |2|
 *     summed           |---0---|----1----|   |---2---|          one pipe: the next begins when the one before lets it
 *     copy out                 |0|       |1|         |2|
 *                                                      ^ the step ends
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
    double done_us; /* copied back */
};

/* The time of summing one buffer. */
struct step_cost {
    double alone_us; /* from its beginning to the end on the last rank, with nothing else under way */
    double apart_us; /* from its beginning to the beginning of the next buffer, if many are summed one after the other */
};

struct step_replay {
    const struct step_profile *profile;
    struct step_buffer *buffers;
    size_t buffer_count;
    const size_t *buffer_of;       /* the buffer of tensor i of the profile; if it spans several, the last */
    const struct step_cost *costs; /* of buffer b */
    double backward_us;
    double copy_us_per_byte; /* into a buffer, and again out of it; 0: gradients are in the buffers */
    size_t in_flight_bytes;  /* limit for posted buffers not yet summed; one is always allowed; 0: no limit */
};

/* Computes the times of the buffers, and returns the time at which the step ends. */
double step_replay_run(const struct step_replay *replay);

#endif
