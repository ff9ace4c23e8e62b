/* The calls on a communicator: arguments are checked here, once, before anything is done. */
#include <stdlib.h>
#include <string.h>

#include "comm/context.h"

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

static enum shoal_status refuse(const struct shoal_comm *comm, const char *call, const char *why)
{
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_ARGUMENT, "comm", "%s on communicator %s: %s", call, comm->name, why);
}

static bool overlap(const void *input, const void *output, size_t bytes)
{
    const char *a = input, *b = output;
    return a != b && a < b + bytes && b < a + bytes;
}

static enum shoal_status check_buffers(const struct shoal_comm *comm, const struct shoal_call *call, bool needs_input,
                                       bool needs_output, const char *name)
{
    const size_t element = shoal_type_bytes(call->type);
    if (SHOAL_UNLIKELY((unsigned)call->type >= SHOAL_TYPE_END))
        return refuse(comm, name, "type is none of enum shoal_type");
    if (SHOAL_UNLIKELY(call->count > SIZE_MAX / 16)) /* no type is larger than 8 bytes */
        return refuse(comm, name, "count is larger than memory can be; was a negative number given?");
    if (!call->count)
        return SHOAL_OK;
    if (SHOAL_UNLIKELY(needs_input && !call->input))
        return refuse(comm, name, "input is NULL, but count is not 0");
    if (SHOAL_UNLIKELY(needs_output && !call->output))
        return refuse(comm, name, "output is NULL, but count is not 0");
    if (SHOAL_UNLIKELY(((uintptr_t)call->input | (uintptr_t)call->output) & (element - 1)))
        return refuse(comm, name, "a pointer is not aligned to its element type");
    if (SHOAL_UNLIKELY(needs_input && needs_output && overlap(call->input, call->output, call->count * element)))
        return refuse(comm, name, "input and output overlap; they must be the same address or apart");
    return SHOAL_OK;
}

static enum shoal_status take_options(const struct shoal_comm *comm, const struct shoal_options *options,
                                      struct shoal_call *call, const char *name)
{
    if (!options)
        return SHOAL_OK;
    if (options->struct_bytes < sizeof *options)
        return refuse(comm, name, "options->struct_bytes is not set: use SHOAL_OPTIONS_INIT");
    call->timeout_ms = options->timeout_ms;
    call->trace_tag = options->trace_tag;
    return SHOAL_OK;
}

static enum shoal_status make_allreduce(const struct shoal_comm *comm, const void *input, void *output, size_t count,
                                        enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                        struct shoal_call *call)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_allreduce"));
    *call = (struct shoal_call){SHOAL_KIND_ALLREDUCE, type, op, 0, 0, input, output, count, 0, 0};
    if (SHOAL_UNLIKELY((unsigned)op >= SHOAL_OP_END))
        return refuse(comm, "shoal_allreduce", "op is none of enum shoal_op");
    SHOAL_TRY(check_buffers(comm, call, true, true, "shoal_allreduce"));
    return take_options(comm, options, call, "shoal_allreduce");
}

static enum shoal_status make_broadcast(const struct shoal_comm *comm, const void *input, void *output, size_t count,
                                        enum shoal_type type, int root, const struct shoal_options *options,
                                        struct shoal_call *call)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_broadcast"));
    const bool is_root = root == comm->rank;
    *call = (struct shoal_call){SHOAL_KIND_BROADCAST, type, SHOAL_SUM, root, 0, is_root ? input : output, output, count, 0, 0};
    if (SHOAL_UNLIKELY(root < 0 || root >= comm->size))
        return refuse(comm, "shoal_broadcast", "root is no rank of the communicator");
    SHOAL_TRY(check_buffers(comm, call, is_root, true, "shoal_broadcast"));
    return take_options(comm, options, call, "shoal_broadcast");
}

static enum shoal_status make_barrier(const struct shoal_comm *comm, const struct shoal_options *options,
                                      struct shoal_call *call)
{
    SHOAL_TRY(shoal_comm_check(comm, "shoal_barrier"));
    *call = (struct shoal_call){.kind = SHOAL_KIND_BARRIER};
    return take_options(comm, options, call, "shoal_barrier");
}

static enum shoal_status make_message(const struct shoal_comm *comm, struct shoal_call message,
                                      const struct shoal_options *options, struct shoal_call *call)
{
    const bool is_send = message.kind == SHOAL_KIND_SEND;
    const char *name = is_send ? "shoal_send" : "shoal_recv";
    SHOAL_TRY(shoal_comm_check(comm, name));
    *call = message;
    if (call->root < 0 || call->root >= comm->size || call->root == comm->rank)
        return refuse(comm, name, "peer is no other rank of the communicator");
    if (call->tag < 0)
        return refuse(comm, name, "tag is negative");
    SHOAL_TRY(check_buffers(comm, call, is_send, !is_send, name));
    return take_options(comm, options, call, name);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_comm_run(struct shoal_comm *comm, const struct shoal_call *call)
{
    struct shoal_driver *driver = &comm->context->driver;
    struct shoal_request request;
    request.is_detached = false;
    request.done_fn = NULL;
    request.done_arg = NULL;
    shoal_driver_lock(driver);
    shoal_engine_post(comm->engine, call, &request);
    if (call->timeout_ms)
        shoal_driver_check_by(driver, request.deadline_ns);
    shoal_driver_spin(driver, comm->engine, &request);
    shoal_driver_wake(driver);
    shoal_driver_unlock(driver);
    return shoal_driver_wait(driver, &request, UINT64_MAX);
}

static enum shoal_status post(struct shoal_comm *comm, const struct shoal_call *call, struct shoal_request **request_out)
{
    struct shoal_driver *driver = &comm->context->driver;
    if (!request_out)
        return refuse(comm, "a *_post call", "request_out is NULL");
    SHOAL_TRY(shoal_driver_start_thread(driver));
    struct shoal_request *request = calloc(1, sizeof *request);
    if (!request)
        return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "no memory for a request");
    shoal_driver_lock(driver);
    shoal_engine_post(comm->engine, call, request);
    if (call->timeout_ms)
        shoal_driver_check_by(driver, request->deadline_ns);
    shoal_engine_progress(comm->engine);
    shoal_engine_flush(comm->engine);
    shoal_driver_wake(driver);
    shoal_driver_unlock(driver);
    *request_out = request;
    shoal_driver_wake_thread(driver);
    return SHOAL_OK;
}

enum shoal_status shoal_allreduce(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  enum shoal_op op, const struct shoal_options *options)
{
    struct shoal_call call;
    SHOAL_TRY(make_allreduce(comm, input, output, count, type, op, options, &call));
    return shoal_comm_run(comm, &call);
}

enum shoal_status shoal_allreduce_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, enum shoal_op op, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(make_allreduce(comm, input, output, count, type, op, options, &call));
    return post(comm, &call, request_out);
}

enum shoal_status shoal_broadcast(struct shoal_comm *comm, const void *input, void *output, size_t count, enum shoal_type type,
                                  int root, const struct shoal_options *options)
{
    struct shoal_call call;
    SHOAL_TRY(make_broadcast(comm, input, output, count, type, root, options, &call));
    return shoal_comm_run(comm, &call);
}

enum shoal_status shoal_broadcast_post(struct shoal_comm *comm, const void *input, void *output, size_t count,
                                       enum shoal_type type, int root, const struct shoal_options *options,
                                       struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(make_broadcast(comm, input, output, count, type, root, options, &call));
    return post(comm, &call, request_out);
}

enum shoal_status shoal_barrier(struct shoal_comm *comm, const struct shoal_options *options)
{
    struct shoal_call call;
    SHOAL_TRY(make_barrier(comm, options, &call));
    return shoal_comm_run(comm, &call);
}

enum shoal_status shoal_barrier_post(struct shoal_comm *comm, const struct shoal_options *options,
                                     struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(make_barrier(comm, options, &call));
    return post(comm, &call, request_out);
}

/* ---- Send and receive ---------------------------------------------------------------------------------------------------- */

static struct shoal_call send_of(const void *buffer, size_t count, enum shoal_type type, int peer, int tag)
{
    return (struct shoal_call){SHOAL_KIND_SEND, type, SHOAL_SUM, peer, tag, buffer, NULL, count, 0, 0};
}

static struct shoal_call receive_of(void *buffer, size_t count, enum shoal_type type, int peer, int tag)
{
    return (struct shoal_call){SHOAL_KIND_RECV, type, SHOAL_SUM, peer, tag, NULL, buffer, count, 0, 0};
}

enum shoal_status shoal_send(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                             const struct shoal_options *options)
{
    struct shoal_call call;
    SHOAL_TRY(make_message(comm, send_of(buffer, count, type, peer, tag), options, &call));
    return shoal_comm_run(comm, &call);
}

enum shoal_status shoal_recv(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                             const struct shoal_options *options)
{
    struct shoal_call call;
    SHOAL_TRY(make_message(comm, receive_of(buffer, count, type, peer, tag), options, &call));
    return shoal_comm_run(comm, &call);
}

enum shoal_status shoal_send_post(struct shoal_comm *comm, const void *buffer, size_t count, enum shoal_type type, int peer,
                                  int tag, const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(make_message(comm, send_of(buffer, count, type, peer, tag), options, &call));
    return post(comm, &call, request_out);
}

enum shoal_status shoal_recv_post(struct shoal_comm *comm, void *buffer, size_t count, enum shoal_type type, int peer, int tag,
                                  const struct shoal_options *options, struct shoal_request **request_out)
{
    struct shoal_call call;
    SHOAL_TRY(make_message(comm, receive_of(buffer, count, type, peer, tag), options, &call));
    return post(comm, &call, request_out);
}

/* ---- Requests ------------------------------------------------------------------------------------------------------------ */

/* Not done, and will never be: made by the parent of this process. */
static bool is_parents(struct shoal_request *request)
{
    return shoal_request_status(request) == SHOAL_PENDING && !*request->driver->is_parent;
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
    struct shoal_driver *driver = request->driver;
    const uint64_t until_ns =
        timeout_ms == SHOAL_FOREVER ? UINT64_MAX : shoal_driver_now_ns(driver) + timeout_ms * UINT64_C(1000000);
    return shoal_driver_wait(driver, request, until_ns);
}

enum shoal_status shoal_request_test(struct shoal_request *request)
{
    if (!request)
        return SHOAL_ERR_ARGUMENT;
    if (is_parents(request))
        return SHOAL_ERR_STATE;
    if (shoal_request_status(request) == SHOAL_PENDING)
        shoal_driver_poll(request->driver);
    return shoal_request_status(request);
}

void shoal_request_on_done(struct shoal_request *request, shoal_done_fn fn, void *arg)
{
    if (!request || !fn || is_parents(request))
        return;
    struct shoal_driver *driver = request->driver;
    if (shoal_request_status(request) == SHOAL_PENDING) {
        shoal_driver_lock(driver);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        if (is_pending) {
            request->done_fn = fn;
            request->done_arg = arg;
        }
        shoal_driver_unlock(driver);
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
        struct shoal_driver *driver = request->driver;
        shoal_driver_lock(driver);
        const bool is_pending = shoal_request_status(request) == SHOAL_PENDING;
        request->is_detached = is_pending;
        shoal_driver_unlock(driver);
        if (is_pending)
            return;
    }
    free(request);
}
