/* The calls on a communicator. */
#include <stdlib.h>
#include <string.h>

#include "comm/arguments.h"

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* One call, or a group of messages. */
struct batch {
    const struct shoal_call *calls;
    size_t count;
    bool is_group;
    uint32_t wait_ms; /* of options */
};

/* Under the lock. */
static enum shoal_status calls_begin(struct shoal_comm *comm, const struct batch *batch, struct shoal_request *request)
{
    if (batch->is_group)
        SHOAL_TRY(shoal_engine_post_group(comm->engine, batch->calls, batch->count, request));
    else
        shoal_engine_post(comm->engine, batch->calls, request);
    shoal_progress_note_posted(&comm->context->progress, comm->engine);
    if (batch->calls->timeout_ms)
        shoal_progress_check_by(&comm->context->progress, request->deadline_ns);
    return SHOAL_OK;
}

static enum shoal_status calls_run(struct shoal_comm *comm, const struct batch *batch)
{
    struct shoal_progress *progress = &comm->context->progress;
    struct shoal_request request;
    request.is_detached = false;
    request.done_fn = NULL;
    request.done_arg = NULL;
    request.whole = NULL;
    shoal_progress_lock(progress);
    const enum shoal_status status = calls_begin(comm, batch, &request);
    if (SHOAL_LIKELY(status == SHOAL_OK))
        shoal_progress_spin(progress, comm->engine, &request);
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
    return status == SHOAL_OK ? shoal_progress_wait(progress, &request, UINT64_MAX) : status;
}

enum shoal_status shoal_comm_run(struct shoal_comm *comm, const struct shoal_call *call)
{
    return calls_run(comm, &(struct batch){call, 1, false, 0});
}

/* Frees a call that was not posted. */
static enum shoal_status drop(const struct batch *batch, enum shoal_status status)
{
    shoal_layout_free(batch->calls->layout);
    return status;
}

static enum shoal_status calls_post(struct shoal_comm *comm, const struct batch *batch, struct shoal_request **request_out)
{
    struct shoal_progress *progress = &comm->context->progress;
    const enum shoal_status started = shoal_progress_start_thread(progress);
    if (started != SHOAL_OK)
        return drop(batch, started);
    struct shoal_request *request = calloc(1, sizeof *request);
    if (!request)
        return drop(batch, shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "no memory for a request"));
    shoal_progress_lock(progress);
    const enum shoal_status status = calls_begin(comm, batch, request);
    if (batch->wait_ms && status == SHOAL_OK) {
        shoal_progress_spin(progress, comm->engine, request);
    } else {
        shoal_engine_progress(comm->engine);
        shoal_engine_flush(comm->engine);
    }
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
    if (status != SHOAL_OK) {
        free(request);
        return status;
    }
    *request_out = request;
    if (!batch->wait_ms || shoal_request_wait(request, batch->wait_ms) == SHOAL_PENDING)
        shoal_progress_wake_thread(progress);
    return SHOAL_OK;
}

/* Stands for "wait": a blocking call has no request to give out. Never written. */
static struct shoal_request *blocking;
#define BLOCKING (&blocking)

static enum shoal_status launch(struct shoal_comm *comm, const char *name, const struct batch *batch,
                                struct shoal_request **request_out)
{
    if (SHOAL_LIKELY(request_out == BLOCKING))
        return calls_run(comm, batch);
    return request_out ? calls_post(comm, batch, request_out)
                       : drop(batch, shoal_call_refuse(comm, name, "request_out is NULL"));
}

static uint32_t wait_of(const struct shoal_options *options)
{
    const size_t wanted = offsetof(struct shoal_options, wait_ms) + sizeof options->wait_ms;
    return options && options->struct_bytes >= wanted ? options->wait_ms : 0;
}

static enum shoal_status calls_start(struct shoal_comm *comm, const char *name, struct shoal_call *call,
                                     const struct shoal_extra *extra, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    SHOAL_TRY(shoal_call_check(comm, name, call, extra, options));
    return launch(comm, name, &(struct batch){call, 1, false, wait_of(options)}, request_out);
}

static enum shoal_status start_message(struct shoal_comm *comm, const char *name, struct shoal_message message,
                                       const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(shoal_call_check_message(comm, name, &message, options, &call));
    return launch(comm, name, &(struct batch){&call, 1, false, wait_of(options)}, request_out);
}

static enum shoal_status start_exchange(struct shoal_comm *comm, const char *name, const struct shoal_message *messages,
                                        size_t count, const struct shoal_options *options, struct shoal_request **request_out)
{
    SHOAL_TRY(shoal_comm_check(comm, name));
    if (count && !messages)
        return shoal_call_refuse(comm, name, "messages is NULL, but their number is not 0");
    struct shoal_call *calls = count < SIZE_MAX / 4096 ? calloc(count + 1, sizeof *calls) : NULL;
    if (!calls)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s: no memory for %zu messages", name, count);
    enum shoal_status status = SHOAL_OK;
    for (size_t i = 0; i < count && status == SHOAL_OK; i++)
        status = shoal_call_check_message(comm, name, &messages[i], options, &calls[i]);
    if (status == SHOAL_OK)
        status = launch(comm, name, &(struct batch){calls, count, true, wait_of(options)}, request_out);
    free(calls);
    return status;
}

/* ---- Entry points -------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_allreduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allreduce", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_allreduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allreduce_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_reduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                               enum shoal_op op, int root, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_REDUCE,
                              .type = type,
                              .op = op,
                              .root = root,
                              .input = input,
                              .output = output,
                              .count = count};
    return calls_start(comm, "shoal_reduce", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_reduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                    enum shoal_type type, enum shoal_op op, int root, const struct shoal_options *options,
                                    struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_REDUCE,
                              .type = type,
                              .op = op,
                              .root = root,
                              .input = input,
                              .output = output,
                              .count = count};
    return calls_start(comm, "shoal_reduce_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_reduce_scatter(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_reduce_scatter", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                            enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                            struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_reduce_scatter_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_broadcast(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_broadcast", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_broadcast_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, int root, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_broadcast_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_allgather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allgather", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_allgather_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allgather_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_gather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                               int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_GATHER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_gather", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_gather_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                    enum shoal_type type, int root, const struct shoal_options *options,
                                    struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_GATHER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_gather_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_scatter(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_SCATTER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_scatter", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                     enum shoal_type type, int root, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_SCATTER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_scatter_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_alltoall(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                 const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_alltoall", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_alltoall_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                      enum shoal_type type, const struct shoal_options *options,
                                      struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_alltoall_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_barrier(struct shoal_comm *comm, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_BARRIER};
    return calls_start(comm, "shoal_barrier", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_barrier_post(struct shoal_comm *comm, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_BARRIER};
    return calls_start(comm, "shoal_barrier_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_allgatherv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                   const size_t *offsets, enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {.taken = counts, .taken_at = offsets};
    return calls_start(comm, "shoal_allgatherv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allgatherv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                        const size_t *offsets, enum shoal_type type, const struct shoal_options *options,
                                        struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {.taken = counts, .taken_at = offsets};
    return calls_start(comm, "shoal_allgatherv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_reduce_scatterv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                        enum shoal_type type, enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output};
    const struct shoal_extra extra = {.given = counts};
    return calls_start(comm, "shoal_reduce_scatterv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatterv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                             enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                             struct shoal_request **request_out)
{
    struct shoal_call call = {
        .kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output};
    const struct shoal_extra extra = {.given = counts};
    return calls_start(comm, "shoal_reduce_scatterv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_alltoallv(struct shoal_comm *comm, const void *input, const size_t *input_counts,
                                  const size_t *input_offsets, void *output, const size_t *output_counts,
                                  const size_t *output_offsets, enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {
        .given = input_counts, .given_at = input_offsets, .taken = output_counts, .taken_at = output_offsets};
    return calls_start(comm, "shoal_alltoallv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_alltoallv_post(struct shoal_comm *comm, const void *input, const size_t *input_counts,
                                       const size_t *input_offsets, void *output, const size_t *output_counts,
                                       const size_t *output_offsets, enum shoal_type type, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {
        .given = input_counts, .given_at = input_offsets, .taken = output_counts, .taken_at = output_offsets};
    return calls_start(comm, "shoal_alltoallv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_allreduce_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allreduce_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allreduce_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                 const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allreduce_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_reduce_scatter_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                 const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_reduce_scatter_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatter_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                      size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                      const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_reduce_scatter_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_broadcast_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, int root, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_broadcast_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_broadcast_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, int root,
                                                 const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_broadcast_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_allgather_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allgather_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allgather_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, const struct shoal_options *options,
                                                 struct shoal_request **request_out)
{
    struct shoal_call call = {.kind = SHOAL_COLLECTIVE_ALLGATHER, .type = type};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allgather_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_send(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                             const struct shoal_options *options)
{
    const struct shoal_message message = {true, (void *)(uintptr_t)buffer, count, type, peer, tag};
    return start_message(comm, "shoal_send", message, options, BLOCKING);
}

enum shoal_status shoal_recv(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                             const struct shoal_options *options)
{
    const struct shoal_message message = {false, buffer, count, type, peer, tag};
    return start_message(comm, "shoal_recv", message, options, BLOCKING);
}

enum shoal_status shoal_send_post(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer,
                                  int tag, const struct shoal_options *options, struct shoal_request **request_out)
{
    const struct shoal_message message = {true, (void *)(uintptr_t)buffer, count, type, peer, tag};
    return start_message(comm, "shoal_send_post", message, options, request_out);
}

enum shoal_status shoal_recv_post(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                                  const struct shoal_options *options, struct shoal_request **request_out)
{
    const struct shoal_message message = {false, buffer, count, type, peer, tag};
    return start_message(comm, "shoal_recv_post", message, options, request_out);
}

enum shoal_status shoal_exchange_post(struct shoal_comm *comm, const struct shoal_message *messages, size_t message_count,
                                      const struct shoal_options *options, struct shoal_request **request_out)
{
    return start_exchange(comm, "shoal_exchange_post", messages, message_count, options, request_out);
}

enum shoal_status shoal_exchange(struct shoal_comm *comm, const struct shoal_message *messages, size_t message_count,
                                 const struct shoal_options *options)
{
    return start_exchange(comm, "shoal_exchange", messages, message_count, options, BLOCKING);
}

/* ---- Requests ------------------------------------------------------------------------------------------------------------ */

/* Not done, and will never be: made by the parent of this process. */
static bool is_parents(struct shoal_request *request)
{
    return shoal_request_status(request) == SHOAL_PENDING && !*request->progress->is_parent;
}

enum shoal_status shoal_request_wait(struct shoal_request *request, uint32_t timeout_ms)
{
    if (!request)
        return SHOAL_ERR_ARGUMENT;
    const enum shoal_status status = shoal_request_status(request);
    if (status != SHOAL_PENDING)
        return status;
    if (is_parents(request))
        return SHOAL_ERR_STATE;
    struct shoal_progress *progress = request->progress;
    const uint64_t until_ns = timeout_ms == SHOAL_FOREVER ? UINT64_MAX : shoal_clock_ns() + timeout_ms * UINT64_C(1000000);
    return shoal_progress_wait(progress, request, until_ns);
}

enum shoal_status shoal_request_test(struct shoal_request *request)
{
    if (!request)
        return SHOAL_ERR_ARGUMENT;
    if (is_parents(request))
        return SHOAL_ERR_STATE;
    if (shoal_request_status(request) == SHOAL_PENDING)
        shoal_progress_poll(request->progress);
    return shoal_request_status(request);
}

void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg)
{
    if (!request || !fn || is_parents(request))
        return;
    struct shoal_progress *progress = request->progress;
    if (shoal_request_status(request) == SHOAL_PENDING) {
        shoal_progress_lock(progress);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        if (is_pending) {
            request->done_fn = fn;
            request->done_arg = arg;
        }
        shoal_progress_unlock(progress);
        if (is_pending)
            return;
    }
    fn(arg, shoal_request_status(request));
}

void shoal_request_free(struct shoal_request *request)
{
    if (!request || is_parents(request))
        return;
    if (shoal_request_status(request) == SHOAL_PENDING) {
        struct shoal_progress *progress = request->progress;
        shoal_progress_lock(progress);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        request->is_detached = is_pending;
        shoal_progress_unlock(progress);
        if (is_pending)
            return;
    }
    free(request);
}
