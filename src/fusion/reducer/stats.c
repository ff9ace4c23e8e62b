#include "fusion/reducer/stats.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/reducer/comms.h"

/* Times of events of a buffer in the step. */
struct moments {
    uint64_t posted_ns, done_ns, out_ns;
};

struct fusion_stats {
    /* The current step. */
    uint64_t begin_ns, finish_ns;
    uint64_t begin_wire_bytes; /* bytes sent before the step */
    atomic_uint_least64_t pack_ns, copied_bytes;
    uint64_t *ready_ns;         /* [parameters]; 0 if not ready. This and the next belong to the thread that marks */
    uint32_t *ready_number;     /* [parameters]: number of parameters that were ready before it */
    struct moments *moments;    /* lock: [parameters], because no layout has more buffers */
    size_t flight_most;         /* lock */
    uint64_t out_ns, called_ns; /* for the thread that puts out */

    /* The last REDUCE step. */
    struct shoal_step_stats kept;
    struct shoal_buffer_times *times; /* [parameters] */
    double *ready_us;                 /* [parameters] */
    uint32_t *ready_order;            /* [parameters] */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_stats_create(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count + 1;
    struct fusion_stats *stats = reducer->stats = calloc(1, sizeof *stats);
    if (!stats)
        return SHOAL_ERR_MEMORY;
    stats->ready_ns = calloc(count, sizeof *stats->ready_ns);
    stats->ready_number = calloc(count, sizeof *stats->ready_number);
    stats->moments = calloc(count, sizeof *stats->moments);
    stats->times = calloc(count, sizeof *stats->times);
    stats->ready_us = calloc(count, sizeof *stats->ready_us);
    stats->ready_order = calloc(count, sizeof *stats->ready_order);
    return stats->ready_ns && stats->ready_number && stats->moments && stats->times && stats->ready_us && stats->ready_order
               ? SHOAL_OK
               : SHOAL_ERR_MEMORY;
}

void fusion_stats_destroy(struct shoal_reducer *reducer)
{
    struct fusion_stats *stats = reducer->stats;
    if (!stats)
        return;
    free(stats->ready_ns);
    free(stats->ready_number);
    free(stats->moments);
    free(stats->times);
    free(stats->ready_us);
    free(stats->ready_order);
    free(stats);
}

void fusion_stats_forget_buffers(struct shoal_reducer *reducer)
{
    memset(reducer->stats->times, 0, reducer->layout->parameters.count * sizeof *reducer->stats->times);
}

/* ---- Events -------------------------------------------------------------------------------------------------------------- */

/* Bytes that this rank has sent to the network so far, for all communicators of the reducer that carry gradients. */
static uint64_t count_wire_bytes(const struct shoal_reducer *reducer)
{
    return reducer->hosts == 1 ? 0 : fusion_comms_wire_bytes(reducer);
}

void fusion_stats_begin(struct shoal_reducer *reducer)
{
    struct fusion_stats *stats = reducer->stats;
    memset(stats->ready_ns, 0, reducer->layout->parameters.count * sizeof *stats->ready_ns);
    stats->flight_most = 0;
    stats->out_ns = stats->called_ns = 0;
    atomic_store_explicit(&stats->pack_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&stats->copied_bytes, 0, memory_order_relaxed);
    stats->begin_wire_bytes = count_wire_bytes(reducer);
    stats->begin_ns = fusion_now_ns();
}

void fusion_stats_finish(struct shoal_reducer *reducer)
{
    reducer->stats->finish_ns = fusion_now_ns();
}

void fusion_stats_packed(struct shoal_reducer *reducer, uint64_t ns)
{
    atomic_fetch_add_explicit(&reducer->stats->pack_ns, ns, memory_order_relaxed);
}

void fusion_stats_ready(struct shoal_reducer *reducer, size_t parameter, uint32_t number)
{
    SHOAL_ASSERT(number < reducer->layout->parameters.count && !reducer->stats->ready_ns[parameter]);
    reducer->stats->ready_ns[parameter] = fusion_now_ns();
    reducer->stats->ready_number[parameter] = number;
}

void fusion_stats_copied(struct shoal_reducer *reducer, size_t bytes)
{
    atomic_fetch_add_explicit(&reducer->stats->copied_bytes, bytes, memory_order_relaxed);
}

void fusion_stats_posted(struct shoal_reducer *reducer, size_t buffer, size_t in_flight)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_stats *stats = reducer->stats;
    stats->moments[buffer].posted_ns = fusion_now_ns();
    stats->flight_most = fusion_max(stats->flight_most, in_flight);
}

void fusion_stats_done(struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    reducer->stats->moments[buffer].done_ns = fusion_now_ns();
}

void fusion_stats_is_out(struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    reducer->stats->moments[buffer].out_ns = fusion_now_ns();
}

void fusion_stats_put_out(struct shoal_reducer *reducer, uint64_t begin_ns)
{
    reducer->stats->out_ns += fusion_now_ns() - begin_ns;
}

void fusion_stats_called_back(struct shoal_reducer *reducer, uint64_t begin_ns)
{
    reducer->stats->called_ns += fusion_now_ns() - begin_ns;
}

/* ---- Kept at the end of a step ------------------------------------------------------------------------------------------- */

static double us_since(const struct fusion_stats *stats, uint64_t ns)
{
    return ns > stats->begin_ns ? (double)(ns - stats->begin_ns) / 1e3 : 0;
}

static void keep_buffer(struct shoal_reducer *reducer, size_t index)
{
    struct fusion_stats *stats = reducer->stats;
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const struct moments *moments = &stats->moments[index];
    uint64_t first_ns = UINT64_MAX, last_ns = 0;
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint64_t ready_ns = stats->ready_ns[reducer->layout->order[buffer->first + i]];
        first_ns = ready_ns && ready_ns < first_ns ? ready_ns : first_ns;
        last_ns = ready_ns > last_ns ? ready_ns : last_ns;
    }
    stats->times[index] = (struct shoal_buffer_times){
        sizeof stats->times[index],          us_since(stats, last_ns ? first_ns : 0), us_since(stats, last_ns),
        us_since(stats, moments->posted_ns), us_since(stats, moments->done_ns),       us_since(stats, moments->out_ns)};
}

/* First the parameters that became ready, in their order, then the others in a layout's default order. */
static void keep_order(struct fusion_stats *stats, size_t count)
{
    uint32_t next = 0;
    for (size_t i = 0; i < count; i++)
        next += stats->ready_ns[i] != 0;
    for (size_t i = count; i-- > 0;) {
        const uint64_t ready_ns = stats->ready_ns[i];
        stats->ready_order[ready_ns ? stats->ready_number[i] : next++] = (uint32_t)i;
        stats->ready_us[i] = ready_ns ? us_since(stats, ready_ns) : -1;
    }
    SHOAL_ASSERT(next == count); /* each parameter has one place in the order */
}

void fusion_stats_keep(struct shoal_reducer *reducer, const struct shoal_step_stats *counted)
{
    struct fusion_stats *stats = reducer->stats;
    struct shoal_step_stats kept = *counted;
    const size_t count = reducer->layout->parameters.count;
    uint64_t last_ns = 0;
    for (size_t i = 0; i < count; i++)
        last_ns = stats->ready_ns[i] > last_ns ? stats->ready_ns[i] : last_ns;
    kept.step = reducer->steps;
    kept.step_us = us_since(stats, fusion_now_ns());
    kept.backward_us = us_since(stats, last_ns && last_ns < stats->finish_ns ? last_ns : stats->finish_ns);
    kept.exposed_us = kept.step_us - kept.backward_us;
    kept.pack_us = (double)atomic_load_explicit(&stats->pack_ns, memory_order_relaxed) / 1e3;
    kept.unpack_us = (double)stats->out_ns / 1e3;
    kept.callback_us = (double)stats->called_ns / 1e3;
    kept.copied_bytes = atomic_load_explicit(&stats->copied_bytes, memory_order_relaxed);
    kept.flight_buffers = stats->flight_most;
    kept.wire_bytes = count_wire_bytes(reducer) - stats->begin_wire_bytes;
    stats->kept = kept;
    keep_order(stats, count);
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        keep_buffer(reducer, b);
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_reducer_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes_out)
{
    if (!reducer || !bytes_out)
        return SHOAL_ERR_ARGUMENT;
    memset(bytes_out, 0, (size_t)reducer->size * sizeof *bytes_out);
    return fusion_comms_add_sent_to(reducer, bytes_out);
}

enum shoal_status shoal_reducer_stats(const struct shoal_reducer *reducer, struct shoal_step_stats *stats_out)
{
    if (!reducer || !shoal_struct_bytes(stats_out))
        return SHOAL_ERR_ARGUMENT;
    if (reducer->steps == 0)
        return SHOAL_PENDING;
    shoal_struct_copy_out(stats_out, &reducer->stats->kept, sizeof reducer->stats->kept);
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_buffer_times(const struct shoal_reducer *reducer, size_t buffer,
                                             struct shoal_buffer_times *times_out)
{
    if (!reducer || !shoal_struct_bytes(times_out) || buffer >= reducer->layout->buffer_count)
        return SHOAL_ERR_ARGUMENT;
    const struct shoal_buffer_times *times = &reducer->stats->times[buffer];
    if (reducer->steps == 0 || times->struct_bytes == 0)
        return SHOAL_PENDING;
    shoal_struct_copy_out(times_out, times, sizeof *times);
    return SHOAL_OK;
}

double shoal_reducer_ready_us(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer && reducer->steps && parameter < reducer->layout->parameters.count ? reducer->stats->ready_us[parameter]
                                                                                      : -1;
}

void fusion_stats_order(const struct shoal_reducer *reducer, uint32_t *order_out)
{
    memcpy(order_out, reducer->stats->ready_order, reducer->layout->parameters.count * sizeof *order_out);
}
