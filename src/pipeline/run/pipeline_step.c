#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/struct_bytes.h"
#include "pipeline/run/pipeline_run.h"

/* ---- Actions ------------------------------------------------------------------------------------------------------------- */

/* Edges of a stage, and which of their messages an action has. */
struct run_ways {
    const uint32_t *edges;
    uint32_t count;
    bool is_gradient;
};

/* Returns true if an earlier action of this stage and microbatch had the same inputs. Such actions have no outputs. */
static bool repeats_inputs(const struct shoal_action *action)
{
    return action->kind == SHOAL_WEIGHT_GRADIENT || action->kind == SHOAL_RECOMPUTE;
}

/* Returns true for sums and updates, which have no messages. */
static bool is_of_stage(const struct shoal_action *action)
{
    return action->kind >= SHOAL_SUM_REPLICAS;
}

static struct run_ways inputs_of(const struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    const struct run_stage *const stage = &pipeline->stages[action->stage];
    if (is_of_stage(action))
        return (struct run_ways){stage->edges, 0, false};
    if (action->kind == SHOAL_FORWARD || action->kind == SHOAL_RECOMPUTE)
        return (struct run_ways){stage->edges, stage->in_count, false};
    return (struct run_ways){stage->edges + stage->in_count, stage->out_count, true};
}

static struct run_ways outputs_of(const struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    const struct run_stage *const stage = &pipeline->stages[action->stage];
    if (action->kind == SHOAL_FORWARD)
        return (struct run_ways){stage->edges + stage->in_count, stage->out_count, false};
    return (struct run_ways){stage->edges, repeats_inputs(action) || is_of_stage(action) ? 0 : stage->in_count, true};
}

static struct run_message *message_at(const struct shoal_pipeline *pipeline, struct run_ways ways, uint32_t i,
                                      uint32_t microbatch)
{
    return run_message_of(&pipeline->edges[ways.edges[i]], microbatch, ways.is_gradient);
}

static bool is_left_out(const struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    return pipeline->is_forward_only && action->kind != SHOAL_FORWARD;
}

/* Returns true if the action has inputs of other ranks that have not been received for an earlier action. */
static bool must_receive(const struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    const struct run_ways ways = inputs_of(pipeline, action);
    if (repeats_inputs(action))
        return false;
    for (uint32_t i = 0; i < ways.count; i++)
        if (message_at(pipeline, ways, i, action->microbatch)->peer != pipeline->rank)
            return true;
    return false;
}

static const char *const action_names[] = {"forward",   "backward",    "input gradient", "weight gradient",
                                           "recompute", "replica sum", "tied sum",       "update"};

/* "input gradient of microbatch 3 on stage 1", "tied sum 0 on stage 1, replica 2" */
static void name_action(const struct shoal_pipeline *pipeline, const struct shoal_action *action, char *name, size_t bytes)
{
    const char *const of = !is_of_stage(action) ? " of microbatch" : action->kind == SHOAL_SUM_TIED ? "" : NULL;
    char number[48] = "", replica[24] = "";
    if (of)
        snprintf(number, sizeof number, "%s %u", of, action->microbatch);
    if (pipeline->replicas > 1)
        snprintf(replica, sizeof replica, ", replica %u", pipeline->replica);
    snprintf(name, bytes, "%s%s on stage %u%s", action_names[action->kind], number, action->stage, replica);
}

/* Fills in the stage and the replica that a parcel comes from or goes to. */
static void name_peer(const struct shoal_pipeline *pipeline, const struct shoal_action *action,
                      const struct run_message *message, struct shoal_parcel *parcel)
{
    const struct run_edge *const edge = &pipeline->edges[message->edge];
    const bool is_from = edge->from == action->stage; /* it leads to a later stage */
    parcel->stage = is_from ? edge->to : edge->from;
    parcel->replica = is_from ? edge->to_replica : edge->from_replica;
}

/* ---- Spans in the flight recorder ---------------------------------------------------------------------------------------- */

static void begin_span(struct shoal_pipeline *pipeline, const char *kind, uint32_t stage, uint32_t microbatch)
{
    const struct shoal_span span = {kind, pipeline->step, stage, microbatch};
    shoal_track_begin(pipeline->track, &span);
}

/* The message is from or to another rank. */
static void note_wait(struct shoal_pipeline *pipeline, const struct run_message *message)
{
    const struct run_edge *const edge = &pipeline->edges[message->edge];
    shoal_track_wait(pipeline->track, message->peer, (int)(edge->from_rank == pipeline->rank ? edge->to : edge->from));
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

/* Ends a step that failed: here first, or on another rank. */
static enum shoal_status end_failed(struct shoal_pipeline *pipeline, enum shoal_status status)
{
    char line[sizeof pipeline->failure.text + RUN_TEXT_MAX + 64], name[RUN_TEXT_MAX] = "";
    enum shoal_status each = shoal_last_failure(pipeline->context, pipeline->comm, &pipeline->failure);
    if (each == SHOAL_PENDING) /* a call was refused before it reached the communicator */
        run_share_cause(pipeline, status, "%s", shoal_status_text(status));
    for (size_t i = 0; i < pipeline->message_count; i++)
        if (pipeline->messages[i].envelope)
            each = run_message_wait(&pipeline->messages[i]);
    (void)each; /* the communicator has the first cause */
    pipeline->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    if (shoal_last_failure(pipeline->context, pipeline->comm, &pipeline->failure) != SHOAL_OK) {
        pipeline->failure.status = status;
        snprintf(pipeline->failure.text, sizeof pipeline->failure.text, "%s, rank %d: %s", pipeline->name, pipeline->rank,
                 shoal_status_text(status));
    }
    pipeline->failed = pipeline->failure.status;
    if (pipeline->waits_for)
        run_message_name(pipeline->waits_for, name);
    snprintf(line, sizeof line, "step %llu failed: %s%s%s", (unsigned long long)pipeline->step, pipeline->failure.text,
             *name ? "; here it waited for " : "", name);
    return shoal_report(pipeline->context, pipeline->failed, "pipeline", line);
}

static enum shoal_status fail_action(struct shoal_pipeline *pipeline, const struct shoal_action *action,
                                     enum shoal_status status, const char *text)
{
    char name[128];
    const bool is_error = status != SHOAL_PENDING && (unsigned)status <= SHOAL_ERR_INTERNAL;
    const enum shoal_status shared = is_error ? status : SHOAL_ERR_INTERNAL;
    name_action(pipeline, action, name, sizeof name);
    run_share_cause(pipeline, shared, "%s failed: %.280s (%s)", name, *text ? text : "no reason was given",
                    shoal_status_name(shared));
    return shared;
}

/* ---- Inputs -------------------------------------------------------------------------------------------------------------- */

/* Gives credit for the messages of the next actions, in their order. */
static enum shoal_status receive_ahead(struct shoal_pipeline *pipeline)
{
    for (; pipeline->receiving < pipeline->ahead && pipeline->next_receive < pipeline->action_count; pipeline->next_receive++) {
        const struct shoal_action *const action = &pipeline->actions[pipeline->next_receive];
        if (is_left_out(pipeline, action) || !must_receive(pipeline, action))
            continue;
        const struct run_ways ways = inputs_of(pipeline, action);
        for (uint32_t i = 0; i < ways.count; i++) {
            struct run_message *const message = message_at(pipeline, ways, i, action->microbatch);
            if (message->peer != pipeline->rank && run_message_receive(message) != SHOAL_OK)
                return fail_action(pipeline, action, SHOAL_ERR_MEMORY, "no memory for its inputs");
        }
        pipeline->receiving++;
    }
    return SHOAL_OK;
}

/* Takes over a message that has arrived. */
static enum shoal_status accept_message(struct run_message *message)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    if (message->peer == pipeline->rank || !message->block)
        return SHOAL_OK;
    message->hold = run_hold_make(message->block, NULL, NULL);
    if (!message->hold)
        return SHOAL_ERR_MEMORY;
    message->data = message->block->memory;
    message->block = NULL;
    pipeline->times.received_bytes += message->envelope->bytes;
    return SHOAL_OK;
}

/* Leaves the message in waits_for if it fails. */
static enum shoal_status wait_for_message(struct run_message *message)
{
    struct shoal_pipeline *const pipeline = message->pipeline;
    pipeline->waits_for = message;
    RUN_TRY(run_message_wait(message));
    pipeline->waits_for = NULL;
    return SHOAL_OK;
}

static enum shoal_status wait_for_inputs(struct shoal_pipeline *pipeline, const struct shoal_action *action,
                                         struct shoal_action_times *times)
{
    const struct run_ways ways = inputs_of(pipeline, action);
    const uint64_t begin_ns = run_now_ns();
    for (uint32_t i = 0; i < ways.count; i++) {
        struct run_message *const message = message_at(pipeline, ways, i, action->microbatch);
        SHOAL_ASSERT(message->envelope); /* schedules without this order are refused */
        if (message->peer != pipeline->rank && !repeats_inputs(action))
            note_wait(pipeline, message);
        RUN_TRY(wait_for_message(message));
        if (accept_message(message) != SHOAL_OK)
            return fail_action(pipeline, action, SHOAL_ERR_MEMORY, "no memory for its inputs");
        struct shoal_parcel *const input = &pipeline->inputs[i];
        input->data = message->data;
        input->bytes = message->envelope->bytes;
        input->note_bytes = message->envelope->note_bytes;
        memcpy(input->note, message->envelope->note, input->note_bytes);
        name_peer(pipeline, action, message, input);
    }
    times->waited_us = (double)(run_now_ns() - begin_ns) / 1e3;
    return SHOAL_OK;
}

/* The messages that a stage has received of a microbatch are no longer needed. */
static void end_inputs(struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    const struct run_stage *const stage = &pipeline->stages[action->stage];
    for (uint32_t i = 0; i < stage->in_count + stage->out_count; i++) {
        const struct run_edge *const edge = &pipeline->edges[stage->edges[i]];
        struct run_message *const message = run_message_of(edge, action->microbatch, i >= stage->in_count);
        if (message->envelope && !(pipeline->is_forward_only && message->is_gradient))
            run_message_end(message);
    }
}

/* ---- Outputs ------------------------------------------------------------------------------------------------------------- */

static bool is_within(const void *data, const void *memory, size_t bytes)
{
    return data >= memory && (const char *)data < (const char *)memory + bytes;
}

/* Returns the hold of memory that the pipeline gave to compute: in this call, or as an input of the stage and microbatch. NULL:
 * the memory is the program's. */
static struct run_hold *find_hold(const struct shoal_pipeline *pipeline, const struct shoal_action *action, const void *data)
{
    const struct run_stage *const stage = &pipeline->stages[action->stage];
    for (struct run_hold *hold = pipeline->taken; hold; hold = hold->next)
        if (is_within(data, hold->block->memory, hold->block->capacity))
            return hold;
    for (uint32_t i = 0; i < stage->in_count + stage->out_count; i++) {
        const struct run_edge *const edge = &pipeline->edges[stage->edges[i]];
        const struct run_message *const message = run_message_of(edge, action->microbatch, i >= stage->in_count);
        if (message->hold && is_within(data, message->data, message->envelope->bytes))
            return message->hold;
    }
    return NULL;
}

static enum shoal_status prepare_output(struct shoal_pipeline *pipeline, const struct shoal_action *action,
                                        const struct shoal_parcel *output, struct run_message *message)
{
    struct run_envelope *const envelope = message->envelope = calloc(1, sizeof *envelope);
    if (!envelope)
        return SHOAL_ERR_MEMORY;
    message->hold = run_hold_make(NULL, NULL, output->bytes ? find_hold(pipeline, action, output->data) : NULL);
    if (!message->hold)
        return SHOAL_ERR_MEMORY;
    message->data = output->bytes ? output->data : NULL;
    envelope->step = pipeline->step;
    envelope->is_forward_only = pipeline->is_forward_only;
    envelope->bytes = output->bytes;
    envelope->note_bytes = output->note_bytes;
    memcpy(envelope->note, output->note, output->note_bytes);
    return SHOAL_OK;
}

static enum shoal_status check_outputs(struct shoal_pipeline *pipeline, const struct shoal_action *action, uint32_t count)
{
    char text[160];
    for (uint32_t i = 0; i < count; i++) {
        const struct shoal_parcel *const output = &pipeline->outputs[i];
        if (output->bytes && !output->data)
            snprintf(text, sizeof text, "output %u has %zu bytes, but its data is NULL", i, output->bytes);
        else if (output->note_bytes > SHOAL_NOTE_BYTES)
            snprintf(text, sizeof text, "output %u has a note of %u bytes; at most %d are allowed", i, output->note_bytes,
                     SHOAL_NOTE_BYTES);
        else
            continue;
        return fail_action(pipeline, action, SHOAL_ERR_ARGUMENT, text);
    }
    return SHOAL_OK;
}

static enum shoal_status prepare_outputs(struct shoal_pipeline *pipeline, const struct shoal_action *action,
                                         struct run_ways ways)
{
    RUN_TRY(check_outputs(pipeline, action, ways.count));
    for (uint32_t i = 0; i < ways.count; i++) {
        struct run_message *const message = message_at(pipeline, ways, i, action->microbatch);
        if (prepare_output(pipeline, action, &pipeline->outputs[i], message) != SHOAL_OK)
            return fail_action(pipeline, action, SHOAL_ERR_MEMORY, "no memory for its outputs");
    }
    return SHOAL_OK;
}

/* No output was sent, so all can be released at once. */
static void release_outputs(struct shoal_pipeline *pipeline, uint32_t count)
{
    for (uint32_t i = 0; i < count && pipeline->calls.released; i++)
        if (pipeline->outputs[i].owner)
            pipeline->calls.released(pipeline->calls.user, pipeline->outputs[i].owner);
}

/* All outputs are prepared before the first one is sent: either all of them are, or none. */
static enum shoal_status take_outputs(struct shoal_pipeline *pipeline, const struct shoal_action *action)
{
    const struct run_ways ways = outputs_of(pipeline, action);
    const enum shoal_status status = prepare_outputs(pipeline, action, ways);
    if (status != SHOAL_OK) {
        release_outputs(pipeline, ways.count);
        return status;
    }
    for (uint32_t i = 0; i < ways.count; i++) {
        struct run_message *const message = message_at(pipeline, ways, i, action->microbatch);
        message->hold->owner = pipeline->outputs[i].owner;
        if (message->peer == pipeline->rank)
            continue;
        pipeline->times.sent_bytes += message->envelope->bytes;
        run_message_send(message);
    }
    return SHOAL_OK;
}

static void drop_taken(struct shoal_pipeline *pipeline)
{
    while (pipeline->taken) {
        struct run_hold *const hold = pipeline->taken;
        pipeline->taken = hold->next;
        run_hold_drop(pipeline, hold);
    }
}

enum shoal_status shoal_pipeline_alloc(struct shoal_pipeline *pipeline, size_t bytes, void **memory_out)
{
    struct run_block *block = NULL;
    if (!pipeline)
        return SHOAL_ERR_ARGUMENT;
    if (!memory_out || !bytes)
        return shoal_report(pipeline->context, SHOAL_ERR_ARGUMENT, "pipeline",
                            "shoal_pipeline_alloc: memory_out is NULL or bytes is 0");
    if (!pipeline->is_computing)
        return shoal_report(pipeline->context, SHOAL_ERR_STATE, "pipeline", "shoal_pipeline_alloc: not called inside compute");
    RUN_TRY(run_block_take(pipeline, bytes, &block));
    struct run_hold *const hold = run_hold_make(block, NULL, NULL);
    if (!hold) {
        run_block_give_back(pipeline, block);
        return shoal_report(pipeline->context, SHOAL_ERR_MEMORY, "pipeline", "shoal_pipeline_alloc: no memory");
    }
    hold->next = pipeline->taken;
    pipeline->taken = hold;
    *memory_out = block->memory;
    return SHOAL_OK;
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

static enum shoal_status compute_action(struct shoal_pipeline *pipeline, uint32_t index, struct shoal_action_times *times)
{
    const struct shoal_action *const action = &pipeline->actions[index];
    const struct run_ways inputs = inputs_of(pipeline, action), outputs = outputs_of(pipeline, action);
    char text[RUN_TEXT_MAX] = "";
    for (uint32_t i = 0; i < outputs.count; i++) {
        struct shoal_parcel *const output = &pipeline->outputs[i];
        output->data = output->owner = NULL;
        output->bytes = output->note_bytes = 0;
        name_peer(pipeline, action, message_at(pipeline, outputs, i, action->microbatch), output);
    }
    const struct shoal_work work = {
        .action = *action,
        .input_count = inputs.count,
        .output_count = outputs.count,
        .inputs = pipeline->inputs,
        .outputs = pipeline->outputs,
        .is_last_gradient = !pipeline->is_forward_only && index == pipeline->stages[action->stage].last_gradient,
        .is_recomputed = pipeline->stages[action->stage].is_recomputed,
        .replica = pipeline->replica,
        .replicas = pipeline->replicas,
    };
    const uint64_t begin_ns = run_now_ns();
    pipeline->is_computing = true;
    enum shoal_status status = pipeline->calls.compute(pipeline->calls.user, &work, text, sizeof text);
    pipeline->is_computing = false;
    times->begin_us = (double)(begin_ns - pipeline->times.begin_ns) / 1e3;
    times->end_us = (double)(run_now_ns() - pipeline->times.begin_ns) / 1e3;
    text[sizeof text - 1] = '\0';
    status = status == SHOAL_OK ? take_outputs(pipeline, action) : fail_action(pipeline, action, status, text);
    drop_taken(pipeline);
    return status;
}

static void add_times(struct shoal_pipeline *pipeline, const struct shoal_action_times *times)
{
    pipeline->times.action_count++;
    pipeline->times.computed_us += times->end_us - times->begin_us;
    pipeline->times.waited_us += times->waited_us;
}

static enum shoal_status run_action(struct shoal_pipeline *pipeline, uint32_t index)
{
    const struct shoal_action *const action = &pipeline->actions[index];
    struct shoal_action_times *const times = &pipeline->action_times[pipeline->times.action_count];
    *times = (struct shoal_action_times){.action = *action};
    begin_span(pipeline, action_names[action->kind], action->stage, action->microbatch);
    RUN_TRY(wait_for_inputs(pipeline, action, times));
    if (must_receive(pipeline, action))
        pipeline->receiving--;
    RUN_TRY(receive_ahead(pipeline));
    shoal_track_start(pipeline->track);
    const enum shoal_status status = compute_action(pipeline, index, times);
    shoal_track_end(pipeline->track, status);
    add_times(pipeline, times);
    if (status == SHOAL_OK &&
        (pipeline->is_forward_only || action->kind == SHOAL_BACKWARD || action->kind == SHOAL_WEIGHT_GRADIENT))
        end_inputs(pipeline, action);
    run_end_sent(pipeline);
    return status;
}

/* Waits until the peer has taken an output. Most have been taken by then, and leave no span. */
static enum shoal_status wait_for_send(struct shoal_pipeline *pipeline, struct run_message *message)
{
    const struct run_edge *const edge = &pipeline->edges[message->edge];
    const bool is_under_way = run_message_is_under_way(message);
    if (is_under_way) {
        begin_span(pipeline, "hand over", message->is_gradient ? edge->to : edge->from, message->microbatch);
        note_wait(pipeline, message);
    }
    RUN_TRY(wait_for_message(message));
    if (is_under_way)
        shoal_track_end(pipeline->track, SHOAL_OK);
    return SHOAL_OK;
}

static enum shoal_status wait_for_sends(struct shoal_pipeline *pipeline)
{
    for (size_t i = 0; i < pipeline->message_count; i++)
        if (pipeline->messages[i].envelope)
            RUN_TRY(wait_for_send(pipeline, &pipeline->messages[i]));
    run_end_sent(pipeline);
    return SHOAL_OK;
}

static enum shoal_status run_actions(struct shoal_pipeline *pipeline)
{
    RUN_TRY(receive_ahead(pipeline));
    for (uint32_t i = 0; i < pipeline->action_count; i++)
        if (!is_left_out(pipeline, &pipeline->actions[i]))
            RUN_TRY(run_action(pipeline, i));
    const uint64_t begin_ns = run_now_ns();
    RUN_TRY(wait_for_sends(pipeline));
    pipeline->times.sending_us = (double)(run_now_ns() - begin_ns) / 1e3;
    return SHOAL_OK;
}

static void begin_step(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls, bool is_forward_only)
{
    shoal_struct_copy_in(&pipeline->calls, calls, sizeof pipeline->calls);
    pipeline->step++;
    pipeline->is_forward_only = is_forward_only;
    pipeline->next_receive = pipeline->receiving = 0;
    pipeline->times = (struct shoal_pipeline_times)SHOAL_PIPELINE_TIMES_INIT;
    pipeline->times.step = pipeline->step;
    pipeline->times.actions = pipeline->action_times;
    pipeline->times.begin_ns = run_now_ns();
}

static void end_times(struct shoal_pipeline *pipeline)
{
    struct shoal_pipeline_times *const times = &pipeline->times;
    times->step_us = (double)(run_now_ns() - times->begin_ns) / 1e3;
    times->bubble = times->step_us > 0 ? 1 - times->computed_us / times->step_us : 0;
}

static enum shoal_status check_step_call(const struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls,
                                         const char *name)
{
    char line[sizeof pipeline->failure.text + 64];
    struct shoal_pipeline_calls own = SHOAL_PIPELINE_CALLS_INIT;
    if (!pipeline)
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_in(&own, calls, sizeof own);
    if (!own.compute) {
        snprintf(line, sizeof line, "%s: calls, its struct_bytes or compute is not set", name);
        return shoal_report(pipeline->context, SHOAL_ERR_ARGUMENT, "pipeline", line);
    }
    if (pipeline->is_computing) {
        snprintf(line, sizeof line, "%s: called inside compute", name);
        return shoal_report(pipeline->context, SHOAL_ERR_STATE, "pipeline", line);
    }
    if (pipeline->failed == SHOAL_OK)
        return SHOAL_OK;
    snprintf(line, sizeof line, "%s failed before: %s", pipeline->name, pipeline->failure.text);
    return shoal_report(pipeline->context, pipeline->failed, "pipeline", line);
}

static enum shoal_status step(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls, bool is_forward_only,
                              const char *name)
{
    RUN_TRY(check_step_call(pipeline, calls, name));
    begin_step(pipeline, calls, is_forward_only);
    const enum shoal_status status = run_actions(pipeline);
    end_times(pipeline);
    if (status != SHOAL_OK) {
        shoal_track_end(pipeline->track, status);
        return end_failed(pipeline, status);
    }
    run_blocks_trim(pipeline, false);
    return SHOAL_OK;
}

enum shoal_status shoal_pipeline_step(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls)
{
    return step(pipeline, calls, false, "shoal_pipeline_step");
}

enum shoal_status shoal_pipeline_forward(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls)
{
    return step(pipeline, calls, true, "shoal_pipeline_forward");
}

/* ---- Reports ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_pipeline_failure(const struct shoal_pipeline *pipeline, struct shoal_failure *failure_out)
{
    if (!pipeline || !shoal_struct_bytes(failure_out))
        return SHOAL_ERR_ARGUMENT;
    if (pipeline->failed == SHOAL_OK)
        return SHOAL_PENDING;
    shoal_struct_copy_out(failure_out, &pipeline->failure, sizeof pipeline->failure);
    return SHOAL_OK;
}

enum shoal_status shoal_pipeline_step_times(const struct shoal_pipeline *pipeline, struct shoal_pipeline_times *times_out)
{
    if (!pipeline || !shoal_struct_bytes(times_out))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_out(times_out, &pipeline->times, sizeof pipeline->times);
    return SHOAL_OK;
}
