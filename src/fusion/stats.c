/* The measurements of the last step, kept until the next one ends. */
#include <stdlib.h>
#include <string.h>

#include "fusion/reducer.h"

static double us_since(const struct shoal_reducer *reducer, uint64_t ns)
{
    return ns > reducer->begin_ns ? (double)(ns - reducer->begin_ns) / 1e3 : 0;
}

static void keep_buffer(struct shoal_reducer *reducer, size_t index)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const struct fusion_slot *slot = &reducer->slots[index];
    uint64_t first_ns = UINT64_MAX, last_ns = 0;
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint64_t ready_ns = reducer->gradients[reducer->layout->order[buffer->first + i]].ready_ns;
        first_ns = ready_ns && ready_ns < first_ns ? ready_ns : first_ns;
        last_ns = ready_ns > last_ns ? ready_ns : last_ns;
    }
    reducer->times[index] = (struct shoal_buffer_times){
        sizeof reducer->times[index],       us_since(reducer, last_ns ? first_ns : 0), us_since(reducer, last_ns),
        us_since(reducer, slot->posted_ns), us_since(reducer, slot->done_ns),          us_since(reducer, slot->out_ns)};
}

/* Those that became ready in their order, then the others as a layout takes them by default. */
static void keep_order(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count;
    const uint32_t ready = atomic_load_explicit(&reducer->ready_count, memory_order_relaxed);
    uint32_t next = ready;
    for (size_t i = count; i-- > 0;) {
        const struct fusion_gradient *gradient = &reducer->gradients[i];
        reducer->ready_order[gradient->ready_ns ? gradient->ready_number : next++] = (uint32_t)i;
        reducer->ready_us[i] = gradient->ready_ns ? us_since(reducer, gradient->ready_ns) : -1;
        reducer->was_used[i] = gradient->is_used;
    }
}

/* As owners reduce: of each buffer a rank sends all but its own share to its owners, and its own share to all others. A
 * compressed one is reduced so inside the host, and then between hosts. */
static void count_bytes(const struct shoal_reducer *reducer, struct shoal_step_stats *stats)
{
    const uint64_t size = (uint64_t)reducer->size, hosts = (uint64_t)reducer->hosts, local = (uint64_t)reducer->local_size;
    uint64_t total = 0, most = 0; /* in all buffers, and in the largest shares of their owners */
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        const uint64_t bytes = reducer->layout->buffers[b].bytes;
        const bool is_compressed = reducer->slots[b].compressed != NULL;
        const uint64_t network_bytes =
            is_compressed ? fusion_compressed_network_bytes(reducer, b) : 2 * (hosts - 1) * (bytes / local / hosts);
        stats->sent_bytes +=
            is_compressed ? 2 * (local - 1) * (bytes / local) + network_bytes : 2 * (size - 1) * (bytes / size);
        stats->network_bytes += network_bytes;
        total += bytes;
        most += (bytes / FUSION_ALIGNMENT + size - 1) / size * FUSION_ALIGNMENT;
    }
    stats->received_bytes = stats->sent_bytes;
    stats->balance = total ? (double)(most * size) / (double)total : 1;
}

uint64_t fusion_wire_bytes(const struct shoal_reducer *reducer)
{
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    if (reducer->hosts == 1 || shoal_comm_traffic(reducer->comm, &traffic) != SHOAL_OK)
        return 0;
    return traffic.sent_bytes + fusion_compressor_wire_bytes(reducer);
}

enum shoal_status fusion_add_sent_to(struct shoal_comm *comm, const int *members, uint64_t *bytes)
{
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    const size_t size = (size_t)shoal_comm_size(comm);
    traffic.sent_to = calloc(size, sizeof *traffic.sent_to);
    if (!traffic.sent_to)
        return SHOAL_ERR_MEMORY;
    const enum shoal_status status = shoal_comm_traffic(comm, &traffic);
    for (size_t r = 0; r < size; r++)
        bytes[members ? (size_t)members[r] : r] += traffic.sent_to[r];
    free(traffic.sent_to);
    return status;
}

enum shoal_status shoal_reducer_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes_out)
{
    if (!reducer || !bytes_out)
        return SHOAL_ERR_ARGUMENT;
    memset(bytes_out, 0, (size_t)reducer->size * sizeof *bytes_out);
    FUSION_TRY(fusion_add_sent_to(reducer->comm, NULL, bytes_out));
    return fusion_compressor_add_sent_to(reducer, bytes_out);
}

void fusion_keep_stats(struct shoal_reducer *reducer)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    uint64_t last_ns = 0;
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        const uint64_t ready_ns = reducer->gradients[i].ready_ns;
        last_ns = ready_ns > last_ns ? ready_ns : last_ns;
    }
    stats.step = reducer->steps;
    stats.step_us = us_since(reducer, fusion_now_ns());
    stats.backward_us = us_since(reducer, last_ns && last_ns < reducer->finish_ns ? last_ns : reducer->finish_ns);
    stats.exposed_us = stats.step_us - stats.backward_us;
    stats.pack_us = (double)atomic_load_explicit(&reducer->pack_ns, memory_order_relaxed) / 1e3;
    stats.unpack_us = (double)reducer->out_ns / 1e3;
    stats.callback_us = (double)reducer->callback_ns / 1e3;
    stats.copied_bytes = atomic_load_explicit(&reducer->copied_bytes, memory_order_relaxed);
    stats.flight_buffers = reducer->flight_most;
    stats.wire_bytes = fusion_wire_bytes(reducer) - reducer->begin_wire_bytes;
    count_bytes(reducer, &stats);
    reducer->stats = stats;
    keep_order(reducer);
    for (size_t b = 0; b < reducer->layout->buffer_count; b++)
        keep_buffer(reducer, b);
}

enum shoal_status shoal_reducer_stats(const struct shoal_reducer *reducer, struct shoal_step_stats *stats_out)
{
    if (!reducer || !stats_out || stats_out->struct_bytes < sizeof *stats_out)
        return SHOAL_ERR_ARGUMENT;
    if (reducer->steps == 0)
        return SHOAL_PENDING;
    *stats_out = reducer->stats;
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_buffer_times(const struct shoal_reducer *reducer, size_t buffer,
                                             struct shoal_buffer_times *times_out)
{
    if (!reducer || !times_out || times_out->struct_bytes < sizeof *times_out || buffer >= reducer->layout->buffer_count)
        return SHOAL_ERR_ARGUMENT;
    if (reducer->steps == 0 || reducer->times[buffer].struct_bytes == 0)
        return SHOAL_PENDING;
    *times_out = reducer->times[buffer];
    return SHOAL_OK;
}

double shoal_reducer_ready_us(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer && reducer->steps && parameter < reducer->layout->parameters.count ? reducer->ready_us[parameter] : -1;
}

enum shoal_status shoal_reducer_order(const struct shoal_reducer *reducer, uint32_t *order_out)
{
    if (!reducer || !order_out)
        return SHOAL_ERR_ARGUMENT;
    if (reducer->steps == 0)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_order: no step has been finished");
    memcpy(order_out, reducer->ready_order, reducer->layout->parameters.count * sizeof *order_out);
    return SHOAL_OK;
}

/* During a step, which a callback may be in, what is known of it; else of the last one. */
int shoal_reducer_is_used(const struct shoal_reducer *reducer, size_t parameter)
{
    if (!reducer || parameter >= reducer->layout->parameters.count)
        return 0;
    return atomic_load_explicit(&reducer->is_open, memory_order_acquire) ? reducer->gradients[parameter].is_used
                                                                         : reducer->was_used[parameter];
}
