#include "fusion/reducer/flow.h"

#include <stdlib.h>

#include "base/assert.h"
#include "fusion/reducer/compress.h"
#include "fusion/reducer/device_buffer.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/optimizer.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"
#include "fusion/reducer/tally.h"

enum phase { FILLING, POSTED, DONE };

struct posted_buffer {
    struct shoal_reducer *reducer; /* for the callback */
    enum phase phase;              /* lock */
    struct shoal_request *request; /* lock; NULL if the compressor or the optimizer has it */
};

struct fusion_flow {
    struct posted_buffer *buffers;     /* [parameters]: no layout has more buffers */
    size_t next;                       /* lock: the buffers before it are posted */
    size_t arrived;                    /* lock: with offload.h, the buffers before it have come from the device */
    size_t in_flight_bytes, in_flight; /* lock: posted and not done */
    bool is_posting;                   /* lock: a thread is posting; it looks again before it leaves */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_flow_create(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count;
    struct fusion_flow *flow = reducer->flow = calloc(1, sizeof *flow);
    if (!flow)
        return SHOAL_ERR_MEMORY;
    flow->buffers = calloc(count + 1, sizeof *flow->buffers);
    for (size_t b = 0; flow->buffers && b < count; b++)
        flow->buffers[b].reducer = reducer;
    return flow->buffers ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void fusion_flow_reset(struct shoal_reducer *reducer)
{
    struct fusion_flow *flow = reducer->flow;
    SHOAL_ASSERT(!flow->is_posting);
    for (size_t b = 0; b < reducer->layout->buffer_count; b++) {
        shoal_request_free(flow->buffers[b].request);
        flow->buffers[b].request = NULL;
        flow->buffers[b].phase = FILLING;
    }
    flow->next = flow->arrived = flow->in_flight_bytes = flow->in_flight = 0;
}

void fusion_flow_destroy(struct shoal_reducer *reducer)
{
    if (!reducer->flow)
        return;
    if (reducer->flow->buffers)
        fusion_flow_reset(reducer);
    free(reducer->flow->buffers);
    free(reducer->flow);
}

/* ---- Completions --------------------------------------------------------------------------------------------------------- */

void fusion_buffer_done(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status)
{
    struct fusion_flow *flow = reducer->flow;
    const size_t bytes = reducer->layout->buffers[buffer].bytes;
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, (long)buffer);
        return;
    }
    fusion_lock(reducer);
    SHOAL_ASSERT(flow->buffers[buffer].phase == POSTED && flow->in_flight > 0 && flow->in_flight_bytes >= bytes);
    flow->buffers[buffer].phase = DONE;
    flow->in_flight_bytes -= bytes;
    flow->in_flight--;
    fusion_stats_done(reducer, buffer);
    fusion_advance(reducer);
    pthread_cond_broadcast(&reducer->changed);
    fusion_unlock(reducer);
}

static void allreduce_done(void *arg, enum shoal_status status)
{
    const struct posted_buffer *posted = arg;
    fusion_buffer_done(posted->reducer, (size_t)(posted - posted->reducer->flow->buffers), status);
}

/* ---- Posting ------------------------------------------------------------------------------------------------------------- */

/* All work on the buffer is on streams, which keep it in order, so the buffer counts as done. */
static enum shoal_status post_on_device(struct shoal_reducer *reducer, size_t index)
{
    FUSION_TRY(fusion_device_post(reducer, index));
    fusion_buffer_done(reducer, index, SHOAL_OK);
    return SHOAL_OK;
}

static enum shoal_status post_buffer(struct shoal_reducer *reducer, size_t index)
{
    struct posted_buffer *posted = &reducer->flow->buffers[index];
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    const struct shoal_options options = fusion_options(reducer);
    char *memory = fusion_buffer_memory(reducer, index);
    struct shoal_request *request;
    if (fusion_computes_on_device(reducer))
        return post_on_device(reducer, index);
    if (fusion_is_compressed(reducer, index))
        return fusion_compressed_post(reducer, index, fusion_buffer_done);
    if (reducer->optimizer)
        return fusion_optimizer_post(reducer, index, fusion_buffer_done);
    FUSION_TRY(shoal_allreduce_post(reducer->comm, memory, memory, buffer->bytes / shoal_type_bytes(buffer->type), buffer->type,
                                    reducer->options.op, &options, &request));
    fusion_lock(reducer);
    posted->request = request;
    fusion_unlock(reducer);
    shoal_request_on_done(request, allreduce_done, posted);
    return SHOAL_OK;
}

/* Call with the lock held. */
static bool can_post_buffer(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct fusion_flow *flow = reducer->flow;
    if (flow->next >= reducer->layout->buffer_count || !fusion_marks_fill(reducer, flow->next))
        return false;
    if (reducer->offload && flow->next >= flow->arrived)
        return false;
    const size_t bytes = reducer->layout->buffers[flow->next].bytes;
    return flow->in_flight == 0 || flow->in_flight_bytes + bytes <= reducer->options.flight_bytes;
}

/* Returns the buffer, which the caller has to post. Call with the lock held. */
static size_t take_next(struct shoal_reducer *reducer)
{
    struct fusion_flow *flow = reducer->flow;
    const size_t index = flow->next++;
    SHOAL_ASSERT(flow->buffers[index].phase == FILLING && (index == 0 || flow->buffers[index - 1].phase != FILLING));
    flow->buffers[index].phase = POSTED;
    flow->in_flight_bytes += reducer->layout->buffers[index].bytes;
    flow->in_flight++;
    SHOAL_ASSERT(flow->in_flight == 1 || flow->in_flight_bytes <= reducer->options.flight_bytes);
    fusion_stats_posted(reducer, index, flow->in_flight);
    return index;
}

/* Posts one operation. Returns false if none can be posted. Call with the lock held; it is released meanwhile. */
static bool post_next(struct shoal_reducer *reducer)
{
    enum shoal_status status;
    long which = -1;
    if (fusion_failed(reducer) != SHOAL_OK || !reducer->is_armed)
        return false;
    if (can_post_buffer(reducer)) {
        const size_t index = take_next(reducer);
        which = (long)index;
        fusion_unlock(reducer);
        status = post_buffer(reducer, index);
    } else if (reducer->flow->next == reducer->layout->buffer_count && fusion_tally_claim_tail(reducer)) {
        fusion_unlock(reducer);
        status = fusion_tally_post_tail(reducer);
    } else {
        return false;
    }
    if (status != SHOAL_OK)
        fusion_operation_not_posted(reducer, status, which);
    fusion_lock(reducer);
    return true;
}

void fusion_advance(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    if (reducer->flow->is_posting)
        return; /* the thread that posts looks again, with the lock */
    reducer->flow->is_posting = true;
    while (post_next(reducer))
        continue;
    reducer->flow->is_posting = false;
    pthread_cond_broadcast(&reducer->changed);
}

void fusion_flow_arrive(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    SHOAL_ASSERT(reducer->offload && reducer->flow->arrived < reducer->layout->buffer_count);
    reducer->flow->arrived++;
    fusion_advance(reducer);
}

/* ---- Queries ------------------------------------------------------------------------------------------------------------- */

bool fusion_flow_is_done(const struct shoal_reducer *reducer, size_t buffer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->flow->buffers[buffer].phase == DONE;
}

bool fusion_flow_is_posting(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->flow->is_posting || fusion_optimizer_is_posting(reducer);
}

static struct shoal_request *request_of(const struct shoal_reducer *reducer, size_t buffer)
{
    if (fusion_is_compressed(reducer, buffer))
        return fusion_compressed_request(reducer, buffer);
    return reducer->optimizer ? fusion_optimizer_reduction(reducer, buffer) : reducer->flow->buffers[buffer].request;
}

struct shoal_request *fusion_flow_oldest(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    const struct fusion_flow *flow = reducer->flow;
    for (size_t b = 0; b < flow->next; b++) {
        if (flow->buffers[b].phase == POSTED)
            return request_of(reducer, b);
    }
    struct shoal_request *tail = fusion_tally_request(reducer);
    return tail ? tail : fusion_optimizer_request(reducer);
}
