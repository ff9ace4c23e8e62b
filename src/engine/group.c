/* Several messages in one request. Each message is a request of its own; the last one to end completes the user's request. */
#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/engine_state.h"

struct group {
    struct shoal_request *request; /* the user's */
    size_t left;                   /* members that are not done, plus one while members are being posted */
    enum shoal_status status;      /* the first status that is not OK */
    struct shoal_request members[];
};

static void end_one(void *arg, enum shoal_status status)
{
    struct group *group = arg;
    SHOAL_ASSERT(group->left > 0);
    if (group->status == SHOAL_OK)
        group->status = status;
    if (--group->left > 0)
        return;
    shoal_request_complete(group->request, group->status);
    free(group); /* no code reads a member after its callback */
}

static void group_begin(struct shoal_engine *engine, struct shoal_request *request, uint32_t timeout_ms)
{
    request->engine = engine;
    request->progress = engine->progress;
    request->call = (struct shoal_call){.collective = SHOAL_COLLECTIVE_GROUP, .timeout_ms = timeout_ms};
    request->state = SHOAL_REQUEST_ANNOUNCED;
    request->record = NULL;
    request->excused_ns = 0;
    request->posted_ticks = shoal_clock_ticks();
    request->deadline_ns =
        shoal_engine_time_ns(engine, request->posted_ticks) + (timeout_ms ? timeout_ms : engine->timeout_ms) * SHOAL_NS_PER_MS;
    atomic_store_explicit(&request->awaited, 0, memory_order_relaxed);
    atomic_store_explicit(&request->status, SHOAL_PENDING, memory_order_relaxed);
}

enum shoal_status shoal_engine_post_group(struct shoal_engine *engine, const struct shoal_call *calls, size_t count,
                                          struct shoal_request *request)
{
    struct group *group = calloc(1, sizeof *group + count * sizeof group->members[0]);
    if (!group)
        return shoal_log_fail(engine->log, SHOAL_ERR_MEMORY, "engine", "no memory for %zu messages", count);
    group_begin(engine, request, count ? calls[0].timeout_ms : 0);
    group->request = request;
    group->left = count + 1;
    if (!engine->is_in_progress)
        shoal_engine_heed_failure(engine);
    group->status = engine->is_broken ? shoal_engine_failure(engine)->status : SHOAL_OK;
    for (size_t i = 0; i < count; i++) {
        group->members[i].done_fn = end_one;
        group->members[i].done_arg = group;
        group->members[i].whole = request;
        shoal_engine_post(engine, &calls[i], &group->members[i]);
    }
    end_one(group, group->status);
    return SHOAL_OK;
}
