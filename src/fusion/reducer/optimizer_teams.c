/* The communicators of an optimizer in the reduction, and the sums of shards. There are size / degree teams of `degree` ranks:
 *
 *     scatter   reduce-scatter in the team            all of a buffer -> its shard
 *     across    all-reduce over the teams             the shard, with the ranks that have the same one
 *
 * On each communicator buffers follow each other by index. A thread that learns that a buffer is scattered posts everything
 * that can be posted across. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"

static const char *const reach_names[FUSION_REACHES] = {".scatter", ".across", ".parameters"};

/* ---- Teams --------------------------------------------------------------------------------------------------------------- */

int fusion_optimizer_degree(const struct shoal_reducer *reducer)
{
    const int degree = reducer->options.optimizer->degree;
    return degree == SHOAL_DEGREE_HOST ? reducer->local_size : degree ? degree : reducer->size;
}

/* The place of this rank: on its host, or in the communicator. */
int fusion_optimizer_place(const struct shoal_reducer *reducer)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    if (reducer->options.optimizer->degree != SHOAL_DEGREE_HOST)
        return reducer->rank % fusion_optimizer_degree(reducer);
    return shoal_comm_place(reducer->comm, reducer->rank, &place) == SHOAL_OK ? place.local_rank : 0;
}

static int team_of(const struct shoal_reducer *reducer)
{
    struct shoal_place place = SHOAL_PLACE_INIT;
    if (reducer->options.optimizer->degree != SHOAL_DEGREE_HOST)
        return reducer->rank / reducer->optimizer->degree;
    return shoal_comm_place(reducer->comm, reducer->rank, &place) == SHOAL_OK ? place.host : 0;
}

const char *fusion_degree_fault(const struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    const int degree = reducer->options.optimizer->degree;
    struct shoal_place place = SHOAL_PLACE_INIT;
    if (degree != SHOAL_DEGREE_HOST && (degree < 0 || degree > reducer->size || (degree && reducer->size % degree))) {
        snprintf(text, text_bytes, "optimizer->degree is %d, which does not divide the %d ranks", degree, reducer->size);
        return text;
    }
    for (int r = 0; degree == SHOAL_DEGREE_HOST && r < reducer->size; r++) {
        if (shoal_comm_place(reducer->comm, r, &place) == SHOAL_OK && place.local_size == reducer->local_size)
            continue;
        snprintf(text, text_bytes,
                 "optimizer->degree is SHOAL_DEGREE_HOST, which needs equally many ranks on each host: %s has %d",
                 place.host_name, place.local_size);
        return text;
    }
    return NULL;
}

static enum shoal_status open_reach(struct shoal_reducer *reducer, enum fusion_reach reach)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    const struct shoal_options options = fusion_options(reducer);
    const int team = team_of(reducer), place = optimizer->place;
    const bool is_across = reach == FUSION_ACROSS;
    const int32_t own = reducer->rank;
    FUSION_TRY(fusion_split(reducer, reducer->comm, reach_names[reach], is_across ? place : team, is_across ? team : place,
                            &optimizer->comms[reach]));
    return shoal_allgather(optimizer->comms[reach], &own, optimizer->members[reach], 1, SHOAL_INT32, &options);
}

static bool has_teams(const struct shoal_reducer *reducer)
{
    return reducer->optimizer->degree < reducer->size;
}

/* Allocates before the first split, so that no other rank waits in one. */
static enum shoal_status allocate_members(struct fusion_optimizer *optimizer, int size)
{
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++) {
        optimizer->members[reach] = calloc((size_t)size, sizeof *optimizer->members[reach]);
        if (!optimizer->members[reach])
            return SHOAL_ERR_MEMORY;
    }
    return SHOAL_OK;
}

enum shoal_status fusion_optimizer_open(struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    int rank;
    if (!optimizer)
        return SHOAL_OK;
    const enum shoal_status status = fusion_all_ready(reducer, allocate_members(optimizer, reducer->size), &rank);
    if (rank >= 0)
        snprintf(text, text_bytes, "rank %d: no memory for the communicators of the optimizer", rank);
    FUSION_TRY(status);
    optimizer->comms[FUSION_SCATTER] = reducer->comm;
    if (has_teams(reducer)) {
        FUSION_TRY(open_reach(reducer, FUSION_SCATTER));
        FUSION_TRY(open_reach(reducer, FUSION_ACROSS));
    }
    return open_reach(reducer, FUSION_GATHER);
}

/* Returns the communicator if it is the optimizer's own, otherwise NULL. */
static struct shoal_comm *own_comm(const struct shoal_reducer *reducer, enum fusion_reach reach)
{
    struct shoal_comm *comm = reducer->optimizer ? reducer->optimizer->comms[reach] : NULL;
    return comm == reducer->comm ? NULL : comm;
}

void fusion_optimizer_stop(struct shoal_reducer *reducer)
{
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++)
        shoal_comm_free(own_comm(reducer, reach));
}

/* ---- Sums of shards ------------------------------------------------------------------------------------------------------ */

static size_t buffer_of(const struct fusion_shard *shard)
{
    return (size_t)(shard - shard->reducer->optimizer->shards);
}

static char *own_shard(const struct shoal_reducer *reducer, size_t buffer)
{
    return fusion_buffer_memory(reducer, buffer) + fusion_shard_begin(reducer, buffer);
}

static void across_done(void *arg, enum shoal_status status)
{
    const struct fusion_shard *shard = arg;
    fusion_buffer_done(shard->reducer, buffer_of(shard), status);
}

static enum shoal_status post_across(struct shoal_reducer *reducer, size_t buffer)
{
    const enum shoal_type type = reducer->layout->buffers[buffer].type;
    struct fusion_shard *shard = &reducer->optimizer->shards[buffer];
    const struct shoal_options options = fusion_options(reducer);
    char *own = own_shard(reducer, buffer);
    struct shoal_request *request;
    FUSION_TRY(shoal_allreduce_post(reducer->optimizer->comms[FUSION_ACROSS], own, own,
                                    fusion_shard_bytes(reducer, buffer) / shoal_type_bytes(type), type, reducer->options.op,
                                    &options, &request));
    fusion_lock(reducer);
    shard->across = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, across_done, shard);
    return SHOAL_OK;
}

/* Posts across what is scattered, in index order. Call with the lock held; it is released meanwhile. */
static void advance_across(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (optimizer->is_posting)
        return; /* the thread that posts looks again, with the lock */
    optimizer->is_posting = true;
    while (optimizer->next_across < reducer->layout->buffer_count && optimizer->shards[optimizer->next_across].is_scattered &&
           fusion_failed(reducer) == SHOAL_OK && reducer->is_armed) {
        const size_t buffer = optimizer->next_across++;
        fusion_unlock(reducer);
        const enum shoal_status status = post_across(reducer, buffer);
        if (status != SHOAL_OK)
            fusion_operation_not_posted(reducer, status, (long)buffer);
        fusion_lock(reducer);
    }
    optimizer->is_posting = false;
    pthread_cond_broadcast(&reducer->changed);
}

static void scatter_done(void *arg, enum shoal_status status)
{
    struct fusion_shard *shard = arg;
    struct shoal_reducer *reducer = shard->reducer;
    if (status != SHOAL_OK || !has_teams(reducer)) {
        fusion_buffer_done(reducer, buffer_of(shard), status);
        return;
    }
    fusion_lock(reducer);
    shard->is_scattered = true;
    advance_across(reducer);
    fusion_unlock(reducer);
}

enum shoal_status fusion_optimizer_post(struct shoal_reducer *reducer, size_t buffer)
{
    struct fusion_shard *shard = &reducer->optimizer->shards[buffer];
    struct shoal_request *request;
    FUSION_TRY(fusion_shard_scatter(reducer, buffer, &request));
    fusion_lock(reducer);
    shard->scatter = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, scatter_done, shard);
    return SHOAL_OK;
}

struct shoal_request *fusion_optimizer_reduction(const struct shoal_reducer *reducer, size_t buffer)
{
    const struct fusion_shard *shard = &reducer->optimizer->shards[buffer];
    return shard->across ? shard->across : shard->is_scattered ? NULL : shard->scatter;
}

bool fusion_optimizer_is_posting(const struct shoal_reducer *reducer)
{
    return reducer->optimizer && reducer->optimizer->is_posting;
}

/* ---- Failures and statistics --------------------------------------------------------------------------------------------- */

void fusion_optimizer_fail(const struct shoal_reducer *reducer, const struct shoal_failure *cause)
{
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++)
        if (own_comm(reducer, reach))
            shoal_comm_fail(own_comm(reducer, reach), cause);
}

bool fusion_optimizer_failure(const struct shoal_reducer *reducer, struct shoal_failure *cause_out)
{
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++) {
        struct shoal_comm *comm = own_comm(reducer, reach);
        if (!comm || shoal_last_failure(reducer->context, comm, cause_out) != SHOAL_OK)
            continue;
        if (!cause_out->is_given && cause_out->rank >= 0 && cause_out->rank < shoal_comm_size(comm))
            fusion_translate_rank(cause_out, reducer->optimizer->members[reach][cause_out->rank]);
        return true;
    }
    return false;
}

uint64_t fusion_optimizer_wire_bytes(const struct shoal_reducer *reducer)
{
    uint64_t bytes = 0;
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++) {
        struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
        if (own_comm(reducer, reach) && shoal_comm_traffic(own_comm(reducer, reach), &traffic) == SHOAL_OK)
            bytes += traffic.sent_bytes;
    }
    return bytes;
}

enum shoal_status fusion_optimizer_add_sent_to(const struct shoal_reducer *reducer, uint64_t *bytes)
{
    for (enum fusion_reach reach = FUSION_SCATTER; reach < FUSION_REACHES; reach++)
        if (own_comm(reducer, reach))
            FUSION_TRY(fusion_add_sent_to(own_comm(reducer, reach), reducer->optimizer->members[reach], bytes));
    return SHOAL_OK;
}
