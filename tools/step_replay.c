#include "step_replay.h"

#include <stdint.h>

static double later(double a, double b)
{
    return a > b ? a : b;
}

/* One thread copies gradients as they become ready. */
static void copy_in(const struct step_replay *replay)
{
    double copied_us = 0;
    for (size_t b = 0; b < replay->buffer_count; b++)
        replay->buffers[b].ready_us = 0;
    for (size_t i = 0; i < replay->profile->count; i++) {
        const struct step_tensor *tensor = &replay->profile->tensors[i];
        struct step_buffer *buffer = &replay->buffers[replay->buffer_of[i]];
        copied_us = later(copied_us, tensor->ready * replay->backward_us) +
                    (double)(tensor->elements * STEP_ELEMENT_BYTES) * replay->copy_us_per_byte;
        buffer->ready_us = later(buffer->ready_us, copied_us);
    }
}

/* Returns when enough earlier buffers have been summed that buffer b fits in flight. Buffers are summed in order. */
static double room_us(const struct step_replay *replay, size_t b, size_t *oldest, size_t *in_flight)
{
    const size_t most = replay->in_flight_bytes ? replay->in_flight_bytes : SIZE_MAX;
    double us = 0;
    *in_flight += replay->buffers[b].bytes;
    while (*in_flight > most && *oldest < b) {
        us = replay->buffers[*oldest].summed_us;
        *in_flight -= replay->buffers[(*oldest)++].bytes;
    }
    return us;
}

double step_replay_run(const struct step_replay *replay)
{
    double posted_us = 0, pipe_us = 0, summed_us = 0, done_us = 0;
    size_t oldest = 0, in_flight = 0;
    copy_in(replay);
    for (size_t b = 0; b < replay->buffer_count; b++) {
        struct step_buffer *buffer = &replay->buffers[b];
        posted_us = later(posted_us, later(buffer->ready_us, room_us(replay, b, &oldest, &in_flight)));
        buffer->posted_us = posted_us;
        buffer->begun_us = later(posted_us, pipe_us);
        pipe_us = buffer->begun_us + replay->costs[b].apart_us;
        summed_us = later(summed_us, buffer->begun_us + replay->costs[b].alone_us);
        buffer->summed_us = summed_us;
        done_us = later(done_us, summed_us) + (double)buffer->content * replay->copy_us_per_byte;
        buffer->done_us = done_us;
    }
    return later(done_us, replay->backward_us);
}
