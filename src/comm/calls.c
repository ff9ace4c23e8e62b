/* The calls on a communicator. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "comm/arguments.h"

/* BLOCKING as request_out means "wait": a blocking call returns no request. Never written. */
static struct shoal_request *blocking;
#define BLOCKING (&blocking)

static uint32_t wait_of(const struct shoal_options *options)
{
    const size_t wanted = offsetof(struct shoal_options, wait_ms) + sizeof options->wait_ms;
    return options && options->struct_bytes >= wanted ? options->wait_ms : 0;
}

/* For calls with operands on a device: their owner works while this thread waits for the request. */
static enum shoal_status launch_on_device(struct shoal_comm *comm, struct shoal_call *calls, size_t count, uint32_t wait_ms,
                                          struct shoal_request **request_out)
{
    struct shoal_request *request;
    void *driver_context;
    SHOAL_TRY(shoal_devices_post(comm, calls, count, &driver_context, &request));
    SHOAL_ASSERT(request && !blocking);
    if (request_out != BLOCKING) {
        *request_out = request;
        const enum shoal_status so_far = wait_ms ? shoal_request_wait(request, wait_ms) : SHOAL_PENDING;
        (void)so_far; /* the request's status counts */
        return SHOAL_OK;
    }
    const enum shoal_status status = shoal_devices_wait(comm, driver_context, request);
    shoal_request_free(request);
    return status;
}

/* Posts one call, or `count` messages in one request. The path of a call forks only here: calls with operands on a device are
 * posted with the device's copies, by which these operands are replaced. Both ways end in the same engine. */
static enum shoal_status launch(struct shoal_comm *comm, struct shoal_call *calls, size_t count,
                                const struct shoal_options *options, struct shoal_request **request_out)
{
    if (SHOAL_UNLIKELY(!request_out))
        return shoal_call_drop(calls, count, shoal_arguments_refuse(comm, calls->name, "request_out is NULL"));
    if (SHOAL_UNLIKELY(comm->devices.ask != NULL)) {
        bool is_on_device;
        const enum shoal_status status = shoal_devices_look(comm, calls, count, &is_on_device);
        if (status != SHOAL_OK)
            return shoal_call_drop(calls, count, status);
        if (is_on_device)
            return launch_on_device(comm, calls, count, wait_of(options), request_out);
    }
    if (SHOAL_LIKELY(request_out == BLOCKING))
        return shoal_engine_run(comm->engine, calls, count);
    const enum shoal_status started = shoal_engine_start(comm->engine, calls, count, wait_of(options), request_out);
    return started == SHOAL_OK ? SHOAL_OK : shoal_call_drop(calls, count, started);
}

static enum shoal_status calls_start(struct shoal_comm *comm, const char *name, struct shoal_call *call,
                                     const struct shoal_options *options, struct shoal_request **request_out)
{
    call->name = name;
    SHOAL_TRY(shoal_arguments_check(comm, call, options));
    return launch(comm, call, 1, options, request_out);
}

static enum shoal_status start_message(struct shoal_comm *comm, const char *name, struct shoal_message message,
                                       const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(shoal_arguments_check_message(comm, name, &message, options, &call));
    return launch(comm, &call, 1, options, request_out);
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
    calls->name = name;
    enum shoal_status status = SHOAL_OK;
    for (size_t i = 0; i < count && status == SHOAL_OK; i++)
        status = shoal_arguments_check_message(comm, name, &messages[i], options, &calls[i]);
    if (status == SHOAL_OK)
        status = launch(comm, calls, count, options, request_out);
    free(calls);
    return status;
}

/* ---- Entry points -------------------------------------------------------------------------------------------------------- */

/* Defines the blocking function and the posting one, NAME_post: START(comm, name, arguments of the call, options,
 * request_out). */
#define DEFINE_BOTH(NAME, PARAMETERS, START, ...)                                                                \
    enum shoal_status NAME(struct shoal_comm *comm, LIST PARAMETERS, const struct shoal_options *options)        \
    {                                                                                                            \
        return START(comm, #NAME, __VA_ARGS__, options, BLOCKING);                                               \
    }                                                                                                            \
    enum shoal_status NAME##_post(struct shoal_comm *comm, LIST PARAMETERS, const struct shoal_options *options, \
                                  struct shoal_request **request_out)                                            \
    {                                                                                                            \
        return START(comm, #NAME "_post", __VA_ARGS__, options, request_out);                                    \
    }
#define LIST(...) __VA_ARGS__

#define CALL(COLLECTIVE, ...)                                    \
    &(struct shoal_call)                                         \
    {                                                            \
        .collective = SHOAL_COLLECTIVE_##COLLECTIVE, __VA_ARGS__ \
    }
#define ARRAYS(...)                             \
    .arrays = &(const struct shoal_call_arrays) \
    {                                           \
        __VA_ARGS__                             \
    }
#define OPERANDS .type = type, .input = input, .output = output
#define TENSORS ARRAYS(.tensors = tensors, .tensor_count = tensor_count, .has_tensors = true)

DEFINE_BOTH(shoal_allreduce, (const void *input, void *output, size_t count, enum shoal_type type, enum shoal_op op),
            calls_start, CALL(ALLREDUCE, OPERANDS, .count = count, .op = op))
DEFINE_BOTH(shoal_reduce, (const void *input, void *output, size_t count, enum shoal_type type, enum shoal_op op, int root),
            calls_start, CALL(REDUCE, OPERANDS, .count = count, .op = op, .root = root))
DEFINE_BOTH(shoal_reduce_scatter, (const void *input, void *output, size_t count, enum shoal_type type, enum shoal_op op),
            calls_start, CALL(REDUCE_SCATTER, OPERANDS, .count = count, .op = op))
DEFINE_BOTH(shoal_broadcast, (const void *input, void *output, size_t count, enum shoal_type type, int root), calls_start,
            CALL(BROADCAST, OPERANDS, .count = count, .root = root))
DEFINE_BOTH(shoal_allgather, (const void *input, void *output, size_t count, enum shoal_type type), calls_start,
            CALL(ALLGATHER, OPERANDS, .count = count))
DEFINE_BOTH(shoal_gather, (const void *input, void *output, size_t count, enum shoal_type type, int root), calls_start,
            CALL(GATHER, OPERANDS, .count = count, .root = root))
DEFINE_BOTH(shoal_scatter, (const void *input, void *output, size_t count, enum shoal_type type, int root), calls_start,
            CALL(SCATTER, OPERANDS, .count = count, .root = root))
DEFINE_BOTH(shoal_alltoall, (const void *input, void *output, size_t count, enum shoal_type type), calls_start,
            CALL(ALLTOALL, OPERANDS, .count = count))

DEFINE_BOTH(shoal_allgatherv,
            (const void *input, void *output, const size_t *counts, const size_t *offsets, enum shoal_type type), calls_start,
            CALL(ALLGATHER, OPERANDS, ARRAYS(.received = counts, .received_at = offsets)))
DEFINE_BOTH(shoal_reduce_scatterv,
            (const void *input, void *output, const size_t *counts, enum shoal_type type, enum shoal_op op), calls_start,
            CALL(REDUCE_SCATTER, OPERANDS, .op = op, ARRAYS(.sent = counts)))
DEFINE_BOTH(shoal_alltoallv,
            (const void *input, const size_t *input_counts, const size_t *input_offsets, void *output,
             const size_t *output_counts, const size_t *output_offsets, enum shoal_type type),
            calls_start,
            CALL(ALLTOALL, OPERANDS,
                 ARRAYS(.sent = input_counts, .sent_at = input_offsets, .received = output_counts,
                        .received_at = output_offsets)))

DEFINE_BOTH(shoal_allreduce_coalesced,
            (const struct shoal_tensor *tensors, size_t tensor_count, enum shoal_type type, enum shoal_op op), calls_start,
            CALL(ALLREDUCE, .type = type, .op = op, TENSORS))
DEFINE_BOTH(shoal_reduce_scatter_coalesced,
            (const struct shoal_tensor *tensors, size_t tensor_count, enum shoal_type type, enum shoal_op op), calls_start,
            CALL(REDUCE_SCATTER, .type = type, .op = op, TENSORS))
DEFINE_BOTH(shoal_broadcast_coalesced,
            (const struct shoal_tensor *tensors, size_t tensor_count, enum shoal_type type, int root), calls_start,
            CALL(BROADCAST, .type = type, .root = root, TENSORS))
DEFINE_BOTH(shoal_allgather_coalesced, (const struct shoal_tensor *tensors, size_t tensor_count, enum shoal_type type),
            calls_start, CALL(ALLGATHER, .type = type, TENSORS))

DEFINE_BOTH(shoal_send, (const void *buffer, size_t count, enum shoal_type type, int peer, int tag), start_message,
            (struct shoal_message){true, (void *)(uintptr_t)buffer, count, type, peer, tag})
DEFINE_BOTH(shoal_recv, (void *buffer, size_t count, enum shoal_type type, int peer, int tag), start_message,
            (struct shoal_message){false, buffer, count, type, peer, tag})
DEFINE_BOTH(shoal_exchange, (const struct shoal_message *messages, size_t message_count), start_exchange, messages,
            message_count)

enum shoal_status shoal_barrier(struct shoal_comm *comm, const struct shoal_options *options)
{
    return calls_start(comm, "shoal_barrier", CALL(BARRIER, .count = 0), options, BLOCKING);
}

enum shoal_status shoal_barrier_post(struct shoal_comm *comm, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    return calls_start(comm, "shoal_barrier_post", CALL(BARRIER, .count = 0), options, request_out);
}
