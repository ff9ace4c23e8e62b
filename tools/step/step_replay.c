#include "step_replay.h"

/* The state of a replay. */
struct play {
    const struct step_replay *replay;
    size_t next[STEP_WAYS];     /* the next buffer of each kind of operation */
    double last_us[STEP_WAYS];  /* the end of the latest one */
    double pipe_us[STEP_PIPES]; /* the next operation may begin */
    size_t put;                 /* buffers that are put */
    double put_us;              /* the thread that puts them is free */
    double posted_us;
    size_t oldest, in_flight; /* the oldest buffer in flight, and the bytes of all */
};

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
                    (double)(tensor->elements * replay->profile->element_bytes) * replay->copy_us_per_byte;
        buffer->ready_us = later(buffer->ready_us, copied_us);
    }
}

/* Returns how many buffers are summed. */
static size_t summed(const struct play *play)
{
    return play->next[play->replay->costs[STEP_WAY_ACROSS] ? STEP_WAY_ACROSS : STEP_WAY_SUM];
}

/* Returns true if the next buffer can be posted: enough earlier ones are summed that it fits in flight. Buffers are summed in
 * order. */
static bool can_post(struct play *play)
{
    const struct step_replay *replay = play->replay;
    struct step_buffer *buffer = &replay->buffers[play->next[STEP_WAY_SUM]];
    while (replay->in_flight_bytes && play->in_flight > 0 && play->in_flight + buffer->bytes > replay->in_flight_bytes) {
        if (play->oldest == summed(play))
            return false;
        play->posted_us = later(play->posted_us, replay->buffers[play->oldest].summed_us);
        play->in_flight -= replay->buffers[play->oldest++].bytes;
    }
    buffer->posted_us = later(play->posted_us, buffer->ready_us);
    return true;
}

/* Returns true if the next operation of this kind can begin as soon as the pipe allows it, and since when. */
static bool is_ready(struct play *play, enum step_way way, double *us_out)
{
    const struct step_replay *replay = play->replay;
    const size_t b = play->next[way];
    if (!replay->costs[way] || b == replay->buffer_count)
        return false;
    if (way == STEP_WAY_SUM ? !can_post(play) : b >= (way == STEP_WAY_ACROSS ? play->next[STEP_WAY_SUM] : play->put))
        return false;
    *us_out = way == STEP_WAY_SUM      ? replay->buffers[b].posted_us
              : way == STEP_WAY_ACROSS ? replay->buffers[b].summed_us
                                       : replay->buffers[b].put_us;
    return true;
}

/* Returns the kind of the operation that has been ready for longest, or STEP_WAYS if all are done. Nothing that becomes ready
 * later can be ahead of it. */
static enum step_way take_way(struct play *play, double *us_out)
{
    enum step_way first = STEP_WAYS;
    for (enum step_way way = STEP_WAY_SUM; way < STEP_WAYS; way++) {
        double us;
        if (!is_ready(play, way, &us) || (first != STEP_WAYS && us >= *us_out))
            continue;
        first = way;
        *us_out = us;
    }
    return first;
}

/* One thread puts summed buffers, in order. */
static void put_summed(struct play *play)
{
    const struct step_replay *replay = play->replay;
    if (replay->is_late && summed(play) < replay->buffer_count)
        return;
    for (; play->put < summed(play); play->put++) {
        struct step_buffer *buffer = &replay->buffers[play->put];
        if (replay->is_late && play->put == 0)
            play->put_us = replay->buffers[replay->buffer_count - 1].summed_us + replay->before_us;
        play->put_us = later(play->put_us, buffer->summed_us) + (double)buffer->content * replay->put_us_per_byte;
        buffer->put_us = buffer->done_us = play->put_us;
    }
}

static void serve(struct play *play, enum step_way way, double ready_us)
{
    const struct step_replay *replay = play->replay;
    const size_t b = play->next[way]++;
    const struct step_cost *cost = &replay->costs[way][b];
    struct step_buffer *buffer = &replay->buffers[b];
    double *pipe_us = &play->pipe_us[replay->pipe[way]];
    const double begun_us = later(ready_us, *pipe_us);
    *pipe_us = begun_us + cost->apart_us;
    play->last_us[way] = later(play->last_us[way], begun_us + cost->alone_us);
    if (way == STEP_WAY_GATHER) {
        buffer->done_us = play->last_us[way];
        return;
    }
    buffer->summed_us = play->last_us[way];
    if (way == STEP_WAY_SUM) {
        buffer->begun_us = begun_us;
        play->posted_us = buffer->posted_us;
        play->in_flight += buffer->bytes;
    }
    put_summed(play);
}

double step_replay_run(const struct step_replay *replay)
{
    struct play play = {.replay = replay};
    double ready_us, end_us = replay->backward_us;
    enum step_way way;
    copy_in(replay);
    while ((way = take_way(&play, &ready_us)) != STEP_WAYS)
        serve(&play, way, ready_us);
    for (size_t b = 0; b < replay->buffer_count; b++)
        end_us = later(end_us, replay->buffers[b].done_us);
    return end_us + replay->after_us;
}
