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
#include "fusion/reducer/comms.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_failure.h"

static const char *const reach_names[FUSION_REACHES] = {".scatter", ".across", ".parameters"};

/* ---- Teams --------------------------------------------------------------------------------------------------------------- */

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
    const int team = team_of(reducer), place = optimizer->place;
    SHOAL_ASSERT(!optimizer->comms[reach] || reach == FUSION_SCATTER);
    const bool is_across = reach == FUSION_ACROSS;
    return fusion_comms_add(reducer, reach_names[reach], is_across ? place : team, is_across ? team : place,
                            &optimizer->comms[reach]);
}

static bool has_teams(const struct shoal_reducer *reducer)
{
    return reducer->optimizer->degree < reducer->size;
}

enum shoal_status fusion_optimizer_open(struct shoal_reducer *reducer)
{
    struct fusion_optimizer *optimizer = reducer->optimizer;
    if (!optimizer)
        return SHOAL_OK;
    optimizer->comms[FUSION_SCATTER] = reducer->comm;
    if (has_teams(reducer)) {
        FUSION_TRY(open_reach(reducer, FUSION_SCATTER));
        FUSION_TRY(open_reach(reducer, FUSION_ACROSS));
    }
    return open_reach(reducer, FUSION_GATHER);
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
    shard->done(shard->reducer, buffer_of(shard), status);
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
    SHOAL_ASSERT(shard->is_scattered);
    fusion_unlock(reducer);
    shoal_request_on_done(request, across_done, shard);
    return SHOAL_OK;
}

/* Posts across what is scattered, in index order. Call with the lock held; it is released meanwhile. */
static void advance_across(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    SHOAL_ASSERT(has_teams(reducer));
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
        shard->done(reducer, buffer_of(shard), status);
        return;
    }
    fusion_lock(reducer);
    shard->is_scattered = true;
    SHOAL_ASSERT(buffer_of(shard) >= reducer->optimizer->next_across);
    advance_across(reducer);
    fusion_unlock(reducer);
}

enum shoal_status fusion_optimizer_post(struct shoal_reducer *reducer, size_t buffer, fusion_done_fn *done)
{
    struct fusion_shard *shard = &reducer->optimizer->shards[buffer];
    struct shoal_request *request;
    shard->done = done;
    FUSION_TRY(fusion_shard_scatter(reducer, buffer, &request));
    fusion_lock(reducer);
    shard->scatter = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, scatter_done, shard);
    return SHOAL_OK;
}

struct shoal_request *fusion_optimizer_reduction(const struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct fusion_shard *shard = &reducer->optimizer->shards[buffer];
    return shard->across ? shard->across : shard->is_scattered ? NULL : shard->scatter;
}

bool fusion_optimizer_is_posting(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->optimizer && reducer->optimizer->is_posting;
}
