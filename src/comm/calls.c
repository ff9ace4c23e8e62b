/* The calls on a communicator. */
#include <stdlib.h>
#include <string.h>

#include "comm/arguments.h"

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_comm_run(struct shoal_comm *comm, const struct shoal_call *call)
{
    return shoal_engine_run(comm->engine, &(struct shoal_batch){call, 1, false, 0});
}

/* Stands for "wait": a blocking call has no request to give out. Never written. */
static struct shoal_request *blocking;
#define BLOCKING (&blocking)

static uint32_t wait_of(const struct shoal_options *options)
{
    const size_t wanted = offsetof(struct shoal_options, wait_ms) + sizeof options->wait_ms;
    return options && options->struct_bytes >= wanted ? options->wait_ms : 0;
}

static void *calls_stream_of(const struct shoal_options *options)
{
    const size_t wanted = offsetof(struct shoal_options, stream) + sizeof options->stream;
    return options && options->struct_bytes >= wanted ? options->stream : NULL;
}

/* Copies to and from the device are posted first, then it is waited for. */
static enum shoal_status launch_on_device(struct shoal_comm *comm, const struct shoal_posting *posting, uint32_t wait_ms,
                                          struct shoal_request **request_out)
{
    struct shoal_request *request;
    void *driver_context;
    SHOAL_TRY(shoal_devices_post(comm, posting, &driver_context, &request));
    if (request_out != BLOCKING) {
        *request_out = request;
        const enum shoal_status so_far = wait_ms ? shoal_request_wait(request, wait_ms) : SHOAL_PENDING;
        (void)so_far; /* the request's own */
        return SHOAL_OK;
    }
    const enum shoal_status status = shoal_devices_wait(comm, driver_context, request);
    shoal_request_free(request);
    return status;
}

static enum shoal_status launch(struct shoal_comm *comm, const struct shoal_posting *posting,
                                const struct shoal_options *options, struct shoal_request **request_out)
{
    const struct shoal_batch batch = {posting->calls, posting->count, posting->is_group, wait_of(options)};
    if (SHOAL_UNLIKELY(!request_out))
        return shoal_posting_drop(posting, shoal_arguments_refuse(comm, posting->name, "request_out is NULL"));
    if (SHOAL_UNLIKELY(comm->devices.ask != NULL)) {
        bool is_on_device;
        const enum shoal_status status = shoal_devices_look(comm, posting, &is_on_device);
        if (status != SHOAL_OK)
            return shoal_posting_drop(posting, status);
        if (is_on_device)
            return launch_on_device(comm, posting, batch.wait_ms, request_out);
    }
    if (SHOAL_LIKELY(request_out == BLOCKING))
        return shoal_engine_run(comm->engine, &batch);
    const enum shoal_status started = shoal_engine_start(comm->engine, &batch, request_out);
    return started == SHOAL_OK ? SHOAL_OK : shoal_posting_drop(posting, started);
}

static enum shoal_status calls_start(struct shoal_comm *comm, const char *name, struct shoal_call *call,
                                     const struct shoal_extra *extra, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    SHOAL_TRY(shoal_arguments_check(comm, name, call, extra, options));
    return launch(comm, &(struct shoal_posting){name, call, 1, false, extra, calls_stream_of(options)}, options, request_out);
}

static enum shoal_status start_message(struct shoal_comm *comm, const char *name, struct shoal_message message,
                                       const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(shoal_arguments_check_message(comm, name, &message, options, &call));
    return launch(comm, &(struct shoal_posting){name, &call, 1, false, NULL, calls_stream_of(options)}, options, request_out);
}

static enum shoal_status start_exchange(struct shoal_comm *comm, const char *name, const struct shoal_message *messages,
                                        size_t count, const struct shoal_options *options, struct shoal_request **request_out)
{
    SHOAL_TRY(shoal_comm_check(comm, name));
    if (count && !messages)
        return shoal_arguments_refuse(comm, name, "messages is NULL, but their number is not 0");
    struct shoal_call *calls = count < SIZE_MAX / 4096 ? calloc(count + 1, sizeof *calls) : NULL;
    if (!calls)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s: no memory for %zu messages", name, count);
    enum shoal_status status = SHOAL_OK;
    for (size_t i = 0; i < count && status == SHOAL_OK; i++)
        status = shoal_arguments_check_message(comm, name, &messages[i], options, &calls[i]);
    if (status == SHOAL_OK)
        status = launch(comm, &(struct shoal_posting){name, calls, count, true, NULL, calls_stream_of(options)}, options,
                        request_out);
    free(calls);
    return status;
}

/* ---- Entry points -------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_allreduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allreduce", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_allreduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allreduce_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_reduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                               enum shoal_op op, int root, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE,
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
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE,
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
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE_SCATTER,
                              .type = type,
                              .op = op,
                              .input = input,
                              .output = output,
                              .count = count};
    return calls_start(comm, "shoal_reduce_scatter", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                            enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                            struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE_SCATTER,
                              .type = type,
                              .op = op,
                              .input = input,
                              .output = output,
                              .count = count};
    return calls_start(comm, "shoal_reduce_scatter_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_broadcast(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_broadcast", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_broadcast_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, int root, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_broadcast_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_allgather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allgather", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_allgather_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_allgather_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_gather(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                               int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_GATHER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_gather", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_gather_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                    enum shoal_type type, int root, const struct shoal_options *options,
                                    struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_GATHER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_gather_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_scatter(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                int root, const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_SCATTER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_scatter", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_scatter_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                     enum shoal_type type, int root, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_SCATTER, .type = type, .root = root, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_scatter_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_alltoall(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                 const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_alltoall", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_alltoall_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                      enum shoal_type type, const struct shoal_options *options,
                                      struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output, .count = count};
    return calls_start(comm, "shoal_alltoall_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_barrier(struct shoal_comm *comm, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER};
    return calls_start(comm, "shoal_barrier", &call, NULL, options, BLOCKING);
}

enum shoal_status shoal_barrier_post(struct shoal_comm *comm, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BARRIER};
    return calls_start(comm, "shoal_barrier_post", &call, NULL, options, request_out);
}

enum shoal_status shoal_allgatherv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                   const size_t *offsets, enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {.received = counts, .received_at = offsets};
    return calls_start(comm, "shoal_allgatherv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allgatherv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                        const size_t *offsets, enum shoal_type type, const struct shoal_options *options,
                                        struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {.received = counts, .received_at = offsets};
    return calls_start(comm, "shoal_allgatherv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_reduce_scatterv(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                        enum shoal_type type, enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output};
    const struct shoal_extra extra = {.sent = counts};
    return calls_start(comm, "shoal_reduce_scatterv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatterv_post(struct shoal_comm *comm, const void *input, void *output, const size_t *counts,
                                             enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                             struct shoal_request **request_out)
{
    struct shoal_call call = {
        .collective = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op, .input = input, .output = output};
    const struct shoal_extra extra = {.sent = counts};
    return calls_start(comm, "shoal_reduce_scatterv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_alltoallv(struct shoal_comm *comm, const void *input, const size_t *input_counts,
                                  const size_t *input_offsets, void *output, const size_t *output_counts,
                                  const size_t *output_offsets, enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {
        .sent = input_counts, .sent_at = input_offsets, .received = output_counts, .received_at = output_offsets};
    return calls_start(comm, "shoal_alltoallv", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_alltoallv_post(struct shoal_comm *comm, const void *input, const size_t *input_counts,
                                       const size_t *input_offsets, void *output, const size_t *output_counts,
                                       const size_t *output_offsets, enum shoal_type type, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLTOALL, .type = type, .input = input, .output = output};
    const struct shoal_extra extra = {
        .sent = input_counts, .sent_at = input_offsets, .received = output_counts, .received_at = output_offsets};
    return calls_start(comm, "shoal_alltoallv_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_allreduce_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allreduce_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allreduce_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                 const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allreduce_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_reduce_scatter_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                 const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_reduce_scatter_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_reduce_scatter_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                      size_t tensor_count, enum shoal_type type, enum shoal_op op,
                                                      const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_REDUCE_SCATTER, .type = type, .op = op};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_reduce_scatter_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_broadcast_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, int root, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_broadcast_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_broadcast_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, int root,
                                                 const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_BROADCAST, .type = type, .root = root};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_broadcast_coalesced_post", &call, &extra, options, request_out);
}

enum shoal_status shoal_allgather_coalesced(struct shoal_comm *comm, const struct shoal_tensor *tensors, size_t tensor_count,
                                            enum shoal_type type, const struct shoal_options *options)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type};
    const struct shoal_extra extra = {.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true};
    return calls_start(comm, "shoal_allgather_coalesced", &call, &extra, options, BLOCKING);
}

enum shoal_status shoal_allgather_coalesced_post(struct shoal_comm *comm, const struct shoal_tensor *tensors,
                                                 size_t tensor_count, enum shoal_type type, const struct shoal_options *options,
                                                 struct shoal_request **request_out)
{
    struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLGATHER, .type = type};
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
