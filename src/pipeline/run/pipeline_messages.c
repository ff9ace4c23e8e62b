#include <stdio.h>
#include <stdlib.h>

#include "pipeline/run/pipeline_run.h"

/* ---- Parts --------------------------------------------------------------------------------------------------------------- */

/* Messages of different edges, microbatches and directions have different tags, so they may come in any order. Those of
 * consecutive steps have the same, and come in order. */
static int tag_of(const struct run_message *message, enum run_part_name name)
{
    const struct shoal_pipeline *pipeline = message->pipeline;
    const size_t number = (size_t)pipeline->edges[message->edge].number * pipeline->microbatches + message->microbatch;
    return (int)((number * 2 + message->is_gradient) * RUN_PARTS + name);
}

/* The last access to the message by the callback: once all parts are done, the message may be used again. */
static void finish_part(struct run_part *part, enum shoal_status status)
{
    struct run_message *const message = part->message;
    struct shoal_pipeline *const pipeline = message->pipeline;
    pthread_mutex_lock(&pipeline->lock);
    part->is_done = true;
    if (status != SHOAL_OK && message->status == SHOAL_OK)
        message->status = status;
    message->pending--;
    if (!message->pending && message->is_listed) {
        message->next_sent = pipeline->sent;
        pipeline->sent = message;
    }
    pthread_cond_broadcast(&pipeline->changed);
    pthread_mutex_unlock(&pipeline->lock);
}

static void part_done(void *arg, enum shoal_status status)
{
    finish_part(arg, status);
}

/* Counts parts that will be posted; not counting all of them before one can end would end the message too early. */
static void add_pending(struct run_message *message, unsigned parts)
{
    pthread_mutex_lock(&message->pipeline->lock);
    message->pending += parts;
    pthread_mutex_unlock(&message->pipeline->lock);
}

/* Nobody may be waiting for the message here: only the other ranks miss it. */
static void refuse_part(struct run_part *part, enum shoal_status status, shoal_done_fn done)
{
    char name[RUN_TEXT_MAX];
    run_message_name(part->message, name);
    run_share_cause(part->message->pipeline, status, "%.200s could not be posted (%s)", name, shoal_status_name(status));
    done(part, status);
}

static void post(struct run_message *message, enum run_part_name name, bool is_send, void *buffer, size_t bytes,
                 shoal_done_fn done)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    struct run_part *const part = &message->parts[name];
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    struct shoal_request *request = NULL;
    options.timeout_ms = pipeline->timeout_ms;
    options.trace_tag = message->microbatch;
    const enum shoal_status status = is_send ? shoal_send_post(pipeline->comm, buffer, bytes, SHOAL_UINT8, message->peer,
                                                               tag_of(message, name), &options, &request)
                                             : shoal_recv_post(pipeline->comm, buffer, bytes, SHOAL_UINT8, message->peer,
                                                               tag_of(message, name), &options, &request);
    if (status != SHOAL_OK) {
        refuse_part(part, status, done);
        return;
    }
    pthread_mutex_lock(&pipeline->lock);
    part->request = request;
    pthread_cond_broadcast(&pipeline->changed);
    pthread_mutex_unlock(&pipeline->lock);
    shoal_request_on_done(request, done, part);
}

static void begin_parts(struct run_message *message)
{
    message->status = SHOAL_OK;
    for (int i = 0; i < RUN_PARTS; i++)
        message->parts[i] = (struct run_part){.message = message, .name = (enum run_part_name)i};
}

/* ---- Receiving ----------------------------------------------------------------------------------------------------------- */

/* The peer may be in another step, or have sent nonsense. */
static enum shoal_status check_envelope(const struct run_message *message)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    const struct run_envelope *const envelope = message->envelope;
    char name[RUN_TEXT_MAX];
    if (envelope->step == pipeline->step && envelope->is_forward_only == pipeline->is_forward_only &&
        envelope->note_bytes <= SHOAL_NOTE_BYTES)
        return SHOAL_OK;
    run_message_name(message, name);
    run_share_cause(pipeline, SHOAL_ERR_MISMATCH,
                    "%.200s belongs to step %llu (%s), but rank %d is in step %llu (%s): all ranks must make the same calls",
                    name, (unsigned long long)envelope->step,
                    envelope->is_forward_only ? "shoal_pipeline_forward" : "shoal_pipeline_step", pipeline->rank,
                    (unsigned long long)pipeline->step,
                    pipeline->is_forward_only ? "shoal_pipeline_forward" : "shoal_pipeline_step");
    return SHOAL_ERR_MISMATCH;
}

static enum shoal_status receive_body(struct run_message *message)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    struct run_block *block = NULL;
    char name[RUN_TEXT_MAX];
    const enum shoal_status status = run_block_take(pipeline, message->envelope->bytes, &block);
    if (status != SHOAL_OK) {
        run_message_name(message, name);
        run_share_cause(pipeline, status, "%.200s: %llu bytes could not be allocated (%s)", name,
                        (unsigned long long)message->envelope->bytes, shoal_status_name(status));
        return status;
    }
    message->block = block;
    add_pending(message, 1);
    post(message, RUN_BODY, false, block->memory, message->envelope->bytes, part_done);
    return SHOAL_OK;
}

static void envelope_done(void *arg, enum shoal_status status)
{
    struct run_part *const part = arg;
    struct run_message *const message = part->message;
    if (status == SHOAL_OK)
        status = check_envelope(message);
    if (status == SHOAL_OK && message->envelope->bytes > 0)
        status = receive_body(message);
    finish_part(part, status);
}

enum shoal_status run_message_receive(struct run_message *message)
{
    static const char credit = 1;
    message->envelope = calloc(1, sizeof *message->envelope);
    if (!message->envelope)
        return SHOAL_ERR_MEMORY;
    begin_parts(message);
    message->pending = 2;
    message->is_listed = false;
    post(message, RUN_ENVELOPE, false, message->envelope, sizeof *message->envelope, envelope_done);
    post(message, RUN_CREDIT, true, (void *)(uintptr_t)&credit, sizeof credit, part_done); /* only read */
    return SHOAL_OK;
}

/* ---- Sending ------------------------------------------------------------------------------------------------------------- */

static void credit_done(void *arg, enum shoal_status status)
{
    struct run_part *const part = arg;
    struct run_message *const message = part->message;
    const bool has_body = message->envelope->bytes > 0;
    if (status == SHOAL_OK) {
        add_pending(message, has_body ? 2 : 1);
        post(message, RUN_ENVELOPE, true, message->envelope, sizeof *message->envelope, part_done);
        if (has_body)
            post(message, RUN_BODY, true, message->data, message->envelope->bytes, part_done);
    }
    finish_part(part, status);
}

/* Makes progress with a message that begins to be sent. If its credit has come, its envelope and its body leave now, before
 * this rank computes its next action. Later the progress thread would do it, which first waits for the core that computes. */
static void push(struct run_message *message)
{
    for (int i = 0; i < RUN_PARTS; i++) {
        struct run_part *const part = &message->parts[i];
        pthread_mutex_lock(&message->pipeline->lock);
        struct shoal_request *const request = part->request;
        pthread_mutex_unlock(&message->pipeline->lock);
        if (!request)
            return;
        const enum shoal_status status = shoal_request_test(request);
        (void)status; /* the callback has it as well */
    }
}

void run_message_send(struct run_message *message)
{
    begin_parts(message);
    message->pending = 1;
    message->is_listed = true;
    post(message, RUN_CREDIT, false, &message->credit, sizeof message->credit, credit_done);
    push(message);
}

void run_end_sent(struct shoal_pipeline *pipeline)
{
    struct run_message *next;
    pthread_mutex_lock(&pipeline->lock);
    struct run_message *message = pipeline->sent;
    pipeline->sent = NULL;
    pthread_mutex_unlock(&pipeline->lock);
    for (; message; message = next) {
        next = message->next_sent;
        if (message->status == SHOAL_OK) /* otherwise a peer may still read the memory */
            run_message_end(message);
    }
}

/* ---- Waiting and ending -------------------------------------------------------------------------------------------------- */

/* Returns a part whose request the step's thread has not waited for, or NULL. */
static struct run_part *find_part_under_way(struct run_message *message)
{
    for (int i = 0; i < RUN_PARTS; i++) {
        struct run_part *const part = &message->parts[i];
        if (part->request && !part->is_done && !part->is_waited_for)
            return part;
    }
    return NULL;
}

bool run_message_is_under_way(struct run_message *message)
{
    pthread_mutex_lock(&message->pipeline->lock);
    const bool is_under_way = message->pending > 0;
    pthread_mutex_unlock(&message->pipeline->lock);
    return is_under_way;
}

/* Waiting for a request makes progress. Its callback may then still run on another thread, which signals `changed`. */
enum shoal_status run_message_wait(struct run_message *message)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    pthread_mutex_lock(&pipeline->lock);
    while (message->pending) {
        struct run_part *const part = find_part_under_way(message);
        if (!part) {
            pthread_cond_wait(&pipeline->changed, &pipeline->lock);
            continue;
        }
        struct shoal_request *const request = part->request;
        part->is_waited_for = true;
        pthread_mutex_unlock(&pipeline->lock);
        const enum shoal_status status = shoal_request_wait(request, SHOAL_FOREVER); /* its own deadline ends it */
        (void)status;                                                                /* the callback has it as well */
        pthread_mutex_lock(&pipeline->lock);
    }
    const enum shoal_status status = message->status;
    pthread_mutex_unlock(&pipeline->lock);
    return status;
}

void run_message_end(struct run_message *message)
{
    for (int i = 0; i < RUN_PARTS; i++) {
        shoal_request_free(message->parts[i].request);
        message->parts[i].request = NULL;
    }
    if (message->block)
        run_block_give_back(message->pipeline, message->block);
    run_hold_drop(message->pipeline, message->hold);
    free(message->envelope);
    message->block = NULL;
    message->hold = NULL;
    message->envelope = NULL;
    message->data = NULL;
}

/* "rank 3", or "rank 3, replica 1" of a rank of the schedule with several */
static void name_end(const struct run_message *message, bool is_begin, char name[48])
{
    const struct run_edge *const edge = &message->pipeline->edges[message->edge];
    const uint32_t replica = is_begin ? edge->from_replica : edge->to_replica;
    const int rank = is_begin ? edge->from_rank : edge->to_rank;
    if ((is_begin ? edge->from_replicas : edge->to_replicas) > 1)
        snprintf(name, 48, "rank %d, replica %u", rank, replica);
    else
        snprintf(name, 48, "rank %d", rank);
}

void run_message_name(const struct run_message *message, char name[RUN_TEXT_MAX])
{
    const struct run_edge *const edge = &message->pipeline->edges[message->edge];
    const bool is_gradient = message->is_gradient;
    char from[48], to[48];
    name_end(message, !is_gradient, from);
    name_end(message, is_gradient, to);
    snprintf(name, RUN_TEXT_MAX, "the %s of microbatch %u from stage %u (%s) to stage %u (%s)",
             is_gradient ? "gradient" : "activation", message->microbatch, is_gradient ? edge->to : edge->from, from,
             is_gradient ? edge->from : edge->to, to);
}
