/* The intake's lists, for the files that ask what is under way and what was called. */
#include "base/assert.h"
#include "engine/engine_state.h"

void shoal_intake_init(struct shoal_engine *engine, uint64_t start)
{
    struct shoal_intake *intake = &engine->intake;
    intake->next_sequence = start + 1;
    intake->done_sequence = intake->agreed_sequence = intake->acknowledged_sequence = intake->completed_by_all = start;
}

struct shoal_request *shoal_intake_first(const struct shoal_engine *engine)
{
    SHOAL_ASSERT(!engine->intake.active_count == !engine->intake.active_head || engine->size == 1);
    return engine->intake.active_head ? engine->intake.active_head : engine->intake.queue_head;
}

struct shoal_request *shoal_intake_next(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return request->next || request->state == SHOAL_REQUEST_QUEUED ? request->next : engine->intake.queue_head;
}

struct shoal_request *shoal_intake_first_announced(const struct shoal_engine *engine)
{
    return engine->intake.active_head;
}

bool shoal_intake_is_alone(const struct shoal_engine *engine, const struct shoal_request *request)
{
    return engine->intake.active_head == request && !request->next;
}

struct shoal_request *shoal_intake_next_to_start(struct shoal_engine *engine)
{
    struct shoal_request *request = engine->intake.start_next;
    while (request && (request->state == SHOAL_REQUEST_DONE ||
                       (request->state == SHOAL_REQUEST_RUNNING && request->chunks_started == request->chunk_count)))
        request = request->next;
    engine->intake.start_next = request;
    SHOAL_ASSERT(!request || request->state != SHOAL_REQUEST_RUNNING || request->chunks_started < request->chunk_count);
    return request && request->state == SHOAL_REQUEST_RUNNING ? request : NULL;
}

struct shoal_request *shoal_intake_drop(struct shoal_engine *engine)
{
    struct shoal_intake *intake = &engine->intake;
    struct shoal_request *const first = shoal_intake_first(engine);
    if (intake->active_head)
        intake->active_tail->next = intake->queue_head;
    intake->active_head = intake->queue_head = intake->start_next = NULL;
    intake->active_count = 0;
    return first;
}

uint64_t shoal_intake_done(const struct shoal_engine *engine)
{
    return engine->intake.done_sequence;
}

uint64_t shoal_intake_acknowledged(const struct shoal_engine *engine)
{
    return engine->intake.acknowledged_sequence;
}

uint64_t shoal_intake_first_queued(const struct shoal_engine *engine)
{
    return engine->intake.queue_head ? engine->intake.queue_head->sequence : engine->intake.next_sequence;
}

const struct shoal_descriptor *shoal_intake_called(const struct shoal_engine *engine, uint64_t sequence)
{
    SHOAL_ASSERT(shoal_intake_first_queued(engine) - sequence - 1 < SHOAL_ANNOUNCEMENTS); /* it is still kept */
    return &engine->intake.called[sequence % SHOAL_ANNOUNCEMENTS];
}

const struct shoal_peer_set *shoal_intake_met(const struct shoal_engine *engine, uint64_t sequence)
{
    SHOAL_ASSERT(shoal_intake_first_queued(engine) - sequence - 1 < SHOAL_ANNOUNCEMENTS); /* it is still kept */
    return engine->intake.met[sequence % SHOAL_ANNOUNCEMENTS];
}

void shoal_intake_leave(struct shoal_engine *engine)
{
    if (engine->intake.acknowledged_sequence < engine->intake.done_sequence)
        engine->ops->complete(engine->transport, engine->intake.done_sequence);
}
