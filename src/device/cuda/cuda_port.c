/* One communicator's path to one device: two streams with a ring each, joined to the caller's stream by events, and a ring
 * without bytes for inputs that stay on the device. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "device/cuda/cuda_host_ops.h"
#include "device/cuda/cuda_scope.h"

struct shoal_gpu_port {
    struct shoal_cuda_scope scope;
    char *memory;
    shoal_cu_address memory_on_device;
    size_t bytes;
    bool is_registered;
    struct shoal_device_ring rings[2]; /* outward, inward */
    struct shoal_device_ring stays;
    shoal_cu_stream streams[2];
    shoal_cu_event begun;    /* marks the caller's stream when a call was posted */
    shoal_cu_event ended[2]; /* marks the end of that call's work on each of our streams */
    bool has_value_waits;    /* false: host functions wait and write, on the first stream alone */
    struct shoal_cuda_host_calls host_calls;
};

/* A driver may run the host functions of all streams of the process one after the other. So posts that need them follow each
 * other, in whichever context of Shoal they are. */
static pthread_mutex_t in_turn = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static const struct shoal_gpu_port *last; /* the port that posted last; NULL if none did, or if its work has ended */

/* ---- Creation and end ---------------------------------------------------------------------------------------------------- */

#define STAYS 16 /* inputs that stay at a time: as many as operations under way */

size_t shoal_gpu_port_bytes(unsigned slots, size_t slot_bytes)
{
    return 2 * shoal_device_ring_bytes(slots, slot_bytes) + shoal_device_ring_bytes(STAYS, 0);
}

static enum shoal_status port_fill(struct shoal_gpu_port *port)
{
    for (int i = 0; i < 2; i++) {
        SHOAL_CUDA_SCOPE_CALL(&port->scope, stream_create, "cuStreamCreateWithPriority", "making a stream", &port->streams[i],
                              SHOAL_CU_STREAM_NON_BLOCKING, 0);
        SHOAL_CUDA_SCOPE_CALL(&port->scope, event_create, "cuEventCreate", "making an event", &port->ended[i],
                              SHOAL_CU_EVENT_NO_TIMING);
    }
    SHOAL_CUDA_SCOPE_CALL(&port->scope, event_create, "cuEventCreate", "making an event", &port->begun,
                          SHOAL_CU_EVENT_NO_TIMING);
    return shoal_cuda_scope_register(&port->scope, port->memory, port->bytes, &port->is_registered, &port->memory_on_device);
}

/* A driver that shuts down refuses; there is no remedy. Returns false if the memory is still registered. */
static bool port_empty(struct shoal_gpu_port *port)
{
    const struct shoal_cuda_calls *calls = &port->scope.gpu->calls;
    if (port->is_registered)
        port->is_registered = calls->host_unregister(port->memory) != SHOAL_CU_SUCCESS;
    if (port->begun)
        (void)calls->event_destroy(port->begun);
    for (int i = 0; i < 2; i++) {
        if (port->ended[i])
            (void)calls->event_destroy(port->ended[i]);
        if (port->streams[i])
            (void)calls->stream_destroy(port->streams[i]);
    }
    return !port->is_registered;
}

static enum shoal_status port_make(struct shoal_gpu_port *port)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(port->scope.gpu, port->scope.context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_scope_fail_entering(&port->scope, entered);
    const enum shoal_status status = port_fill(port);
    if (status != SHOAL_OK)
        (void)port_empty(port);
    shoal_cuda_leave(port->scope.gpu, &visit);
    return status;
}

static enum shoal_status check_device(struct shoal_gpu *gpu, int number)
{
    const struct shoal_gpu_device *device = shoal_gpu_at(gpu, number);
    if (device->can_register)
        return SHOAL_OK;
    return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
                          "device %d (%s) cannot copy to and from host memory that is registered: copy tensors to host memory "
                          "before the call",
                          number, device->name);
}

static void say_host_functions(struct shoal_gpu *gpu, int number)
{
    if (gpu->has_said_host_functions)
        return;
    gpu->has_said_host_functions = true;
    shoal_log_line(
        gpu->log, SHOAL_LOG_WARN, "gpu",
        "device %d (%s) or its driver cannot wait for values in memory on a stream: host functions wait instead, at about 100 "
        "us for each copy, and calls with operands on a device run one after the other, so all ranks must make them in the "
        "same order",
        number, shoal_gpu_at(gpu, number)->name);
}

static void init_rings(struct shoal_gpu_port *port, unsigned slots, size_t slot_bytes, uint64_t counter_start)
{
    const size_t bytes = shoal_device_ring_bytes(slots, slot_bytes);
    for (int i = 0; i < 2; i++)
        shoal_device_ring_init(&port->rings[i], i == 1, slots, slot_bytes, counter_start, port->memory + (size_t)i * bytes);
    shoal_device_ring_init(&port->stays, true, STAYS, 0, counter_start, port->memory + 2 * bytes);
}

enum shoal_status shoal_gpu_port_open(struct shoal_gpu *gpu, const struct shoal_gpu_port_options *options,
                                      struct shoal_gpu_port **port_out)
{
    int device = 0;
    SHOAL_TRY(shoal_cuda_find_device(gpu, options->context, &device));
    SHOAL_TRY(check_device(gpu, device));
    struct shoal_gpu_port *port = calloc(1, sizeof *port);
    if (!port)
        return shoal_log_fail(gpu->log, SHOAL_ERR_MEMORY, "gpu", "no memory for the way to device %d", device);
    port->scope = (struct shoal_cuda_scope){gpu, options->context, device};
    port->memory = options->memory;
    port->bytes = shoal_gpu_port_bytes(options->slots, options->slot_bytes);
    port->has_value_waits = shoal_gpu_at(gpu, device)->has_value_waits;
    init_rings(port, options->slots, options->slot_bytes, options->counter_start);
    const enum shoal_status status = port_make(port);
    if (status != SHOAL_OK) {
        free(port);
        return status;
    }
    if (!port->has_value_waits)
        say_host_functions(gpu, device);
    *port_out = port;
    return SHOAL_OK;
}

bool shoal_gpu_port_is_at_work(const struct shoal_gpu_port *port)
{
    return shoal_cuda_scope_is_at_work(&port->scope, port->streams, 2);
}

bool shoal_gpu_port_is_idle(const struct shoal_gpu_port *port)
{
    return !shoal_gpu_port_is_at_work(port) && !shoal_cuda_host_is_running(&port->host_calls);
}

enum shoal_status shoal_gpu_port_look(const struct shoal_gpu_port *port)
{
    return shoal_cuda_scope_look(&port->scope, port->streams, 2);
}

bool shoal_gpu_port_renew(struct shoal_gpu_port *port, uint64_t counter_start)
{
    struct shoal_cuda_visit visit;
    if (shoal_cuda_visit(port->scope.gpu, port->scope.context, &visit) != SHOAL_CU_SUCCESS)
        return false;
    const bool is_usable = shoal_cuda_scope_query(&port->scope, port->streams, 2) == SHOAL_CU_SUCCESS;
    shoal_cuda_leave(port->scope.gpu, &visit);
    if (is_usable)
        init_rings(port, port->rings[0].slots, port->rings[0].slot_bytes, counter_start);
    return is_usable;
}

/* Later posts need not wait for this port. */
static void leave_turn(const struct shoal_gpu_port *port)
{
    pthread_mutex_lock(&in_turn);
    if (last == port)
        last = NULL;
    pthread_mutex_unlock(&in_turn);
}

/* Returns false if the memory is still registered. */
static bool port_give_back(struct shoal_gpu_port *port)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(port->scope.gpu, port->scope.context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_scope_is_gone(entered);
    const bool is_empty = port_empty(port);
    shoal_cuda_leave(port->scope.gpu, &visit);
    return is_empty;
}

bool shoal_gpu_port_close(struct shoal_gpu_port *port)
{
    const bool is_idle = shoal_gpu_port_is_idle(port);
    leave_turn(port);
    const bool is_over = is_idle && port_give_back(port);
    if (is_idle)
        shoal_cuda_host_free(&port->host_calls);
    if (!is_over)
        shoal_log_line(
            port->scope.gpu->log, SHOAL_LOG_WARN, "gpu",
            "device %d has not ended its copies, or its context has failed: %zu bytes of host memory stay registered "
            "until the process ends",
            port->scope.device, port->bytes);
    free(port);
    return is_over;
}

const void *shoal_gpu_port_context(const struct shoal_gpu_port *port)
{
    return port->scope.context;
}

struct shoal_device_ring *shoal_gpu_port_ring(struct shoal_gpu_port *port, bool is_inward)
{
    return &port->rings[is_inward];
}

struct shoal_device_ring *shoal_gpu_port_stays(struct shoal_gpu_port *port)
{
    return port->has_value_waits ? &port->stays : NULL;
}

/* ---- Outputs that the engine writes -------------------------------------------------------------------------------------- */

#define RUNS_MAX 64

/* The contiguous runs of an output on the device. */
struct runs {
    size_t count;
    shoal_cu_address devices[RUNS_MAX];
    struct shoal_device_ring_write all[RUNS_MAX];
};

/* Returns false if there are none, or too many. */
static bool find_runs(const struct shoal_gpu_transfer *transfer, struct runs *runs)
{
    const struct shoal_device_ring_operand *operand = transfer->operand;
    for (int part = 0; part < operand->parts; part++) {
        for (size_t at = 0, run; at < operand->count; at += run) {
            run = operand->count - at;
            const shoal_cu_address device = transfer->find(transfer->arg, part, at, &run);
            if (!run)
                break;
            if (runs->count == RUNS_MAX)
                return false;
            runs->devices[runs->count] = device;
            runs->all[runs->count++] = (struct shoal_device_ring_write){.from = shoal_device_ring_at(operand, part, at),
                                                                        .bytes = run * operand->element_bytes};
        }
    }
    return runs->count > 0;
}

/* If several runs are in one mapping, the driver is asked once. */
static struct shoal_cuda_mapping *hold_mapping(const struct shoal_gpu_port *port, struct shoal_cuda_mapping *previous,
                                               shoal_cu_address at, size_t bytes)
{
    if (!previous || !shoal_cuda_mapping_has(previous, at, bytes))
        return shoal_cuda_mapping_hold(port->scope.gpu, port->scope.device, at, bytes);
    atomic_fetch_add_explicit(&previous->base.holders, 1, memory_order_relaxed);
    return previous;
}

/* Each run holds its mapping. Returns false, and holds nothing, if a run has no mapping. */
static bool hold_runs(const struct shoal_gpu_port *port, struct runs *runs)
{
    struct shoal_cuda_mapping *mapping = NULL;
    size_t held = 0;
    for (; held < runs->count; held++) {
        struct shoal_device_ring_write *run = &runs->all[held];
        mapping = hold_mapping(port, mapping, runs->devices[held], run->bytes);
        if (!mapping)
            break;
        run->mapping = &mapping->base;
        run->to = shoal_cuda_mapping_at(mapping, runs->devices[held]);
    }
    if (held == runs->count)
        return true;
    while (held-- > 0)
        atomic_fetch_sub_explicit(&runs->all[held].mapping->holders, 1, memory_order_release);
    return false;
}

static void map_output(const struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfer)
{
    struct runs runs = {.count = 0};
    if (!find_runs(transfer, &runs))
        return;
    struct shoal_device_ring_write *writes = malloc(runs.count * sizeof *writes);
    if (!writes || !hold_runs(port, &runs)) {
        free(writes);
        return;
    }
    memcpy(writes, runs.all, runs.count * sizeof *writes);
    shoal_device_ring_write_out(transfer->operand, transfer->input, writes, runs.count);
}

void shoal_gpu_port_map(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers, size_t count,
                        size_t most_bytes)
{
    for (size_t i = 0; i < count && port->has_value_waits; i++) {
        const struct shoal_device_ring_operand *operand = transfers[i].operand;
        const bool is_small =
            operand->units == 1 && operand->count * operand->element_bytes * (size_t)operand->parts <= most_bytes;
        if (is_small && !operand->ring->is_inward && !transfers[i].find_own)
            map_output(port, &transfers[i]);
    }
}

/* ---- Putting work on the streams ----------------------------------------------------------------------------------------- */

/* One of the two streams while a call is posted to it. The write of a unit is passed to the driver together with the waits of
 * the next unit: until then only the writes of earlier units are needed. */
struct poster {
    struct shoal_gpu_port *port;
    bool is_inward;
    const struct shoal_gpu_transfer *first;
    const struct shoal_gpu_transfer *transfer;      /* the next transfer of its direction, */
    const struct shoal_gpu_transfer *end;           /* before this one; equal to it at the end */
    uint64_t next;                                  /* next unit of that transfer */
    uint64_t posted;                                /* units of all transfers */
    const struct shoal_device_ring_operand *opened; /* last output of which this stream must publish `opening`; NULL: none */
    unsigned count;
    struct shoal_cuda_op ops[SHOAL_CUDA_OPS_MAX];
};

static struct shoal_device_ring_operand *operand_of(const struct poster *poster)
{
    return poster->transfer->operand;
}

/* Host functions run in the order of one stream only, so both directions share it. */
static int stream_index(const struct poster *poster)
{
    return poster->is_inward && poster->port->has_value_waits;
}

static shoal_cu_stream stream_of(const struct poster *poster)
{
    return poster->port->streams[stream_index(poster)];
}

static bool has_more(const struct poster *poster)
{
    return poster->transfer < poster->end;
}

/* Advances to a unit that was not posted: skips transfers of the other direction, and those without further units. */
static void find_next(struct poster *poster)
{
    while (has_more(poster) &&
           (operand_of(poster)->ring->is_inward != poster->is_inward || poster->next == operand_of(poster)->units)) {
        poster->transfer++;
        poster->next = 0;
    }
}

static struct poster begin_poster(struct shoal_gpu_port *port, bool is_inward, const struct shoal_gpu_transfer *transfers,
                                  size_t count)
{
    struct poster poster = {
        .port = port, .is_inward = is_inward, .first = transfers, .transfer = transfers, .end = transfers + count};
    find_next(&poster);
    return poster;
}

static enum shoal_status post_memory_ops(const struct poster *poster, unsigned count)
{
    const struct shoal_gpu_port *port = poster->port;
    union shoal_cu_memory_op ops[SHOAL_CUDA_OPS_MAX] = {{.bytes = {0}}};
    for (unsigned i = 0; i < count; i++) {
        const struct shoal_cuda_op *op = &poster->ops[i];
        ops[i].value.operation = op->is_wait ? SHOAL_CU_OP_WAIT_64 : SHOAL_CU_OP_WRITE_64;
        ops[i].value.address = port->memory_on_device + (shoal_cu_address)((const char *)op->counter - port->memory);
        ops[i].value.value = op->value;
        ops[i].value.flags = (op->is_wait ? SHOAL_CU_WAIT_GEQ : 0) | (op->flushes ? SHOAL_CU_WAIT_FLUSH : 0);
    }
    SHOAL_CUDA_SCOPE_CALL(&port->scope, memory_ops, "cuStreamBatchMemOp", "posting waits and writes", stream_of(poster), count,
                          ops, 0);
    return SHOAL_OK;
}

static enum shoal_status post_host_function(const struct poster *poster, unsigned count)
{
    struct shoal_gpu_port *port = poster->port;
    struct shoal_cuda_host_call *call = shoal_cuda_host_take(&port->host_calls, poster->ops, count);
    if (!call)
        return shoal_log_fail(port->scope.gpu->log, SHOAL_ERR_MEMORY, "gpu", "no memory for a host function (device %d)",
                              port->scope.device);
    const shoal_cu_result result = port->scope.gpu->calls.launch_host(stream_of(poster), shoal_cuda_host_run, call);
    if (result == SHOAL_CU_SUCCESS)
        return SHOAL_OK;
    shoal_cuda_host_drop(call);
    return shoal_cuda_scope_fail(&port->scope, "cuLaunchHostFunc", result, "posting waits and writes");
}

static enum shoal_status flush_ops(struct poster *poster)
{
    const unsigned count = poster->count;
    poster->count = 0;
    if (!count)
        return SHOAL_OK;
    return poster->port->has_value_waits ? post_memory_ops(poster, count) : post_host_function(poster, count);
}

static void add_op(struct poster *poster, bool is_wait, struct shoal_device_ring_counter *counter, uint64_t value)
{
    SHOAL_ASSERT(poster->count < SHOAL_CUDA_OPS_MAX);
    poster->ops[poster->count++] = (struct shoal_cuda_op){counter, value, is_wait, false};
}

static enum shoal_status copy_run(const struct poster *poster, char *host, shoal_cu_address device, size_t bytes)
{
    const struct shoal_gpu_port *port = poster->port;
    if (operand_of(poster)->ring->is_inward)
        SHOAL_CUDA_SCOPE_CALL(&port->scope, copy_to_host, "cuMemcpyDtoHAsync", "copying an input", host, device, bytes,
                              stream_of(poster));
    else
        SHOAL_CUDA_SCOPE_CALL(&port->scope, copy_to_device, "cuMemcpyHtoDAsync", "copying an output", device, host, bytes,
                              stream_of(poster));
    return SHOAL_OK;
}

/* In place there is nothing to copy. */
static enum shoal_status copy_own(const struct poster *poster, shoal_cu_address to, shoal_cu_address from, size_t bytes)
{
    if (to != from)
        SHOAL_CUDA_SCOPE_CALL(&poster->port->scope, copy, "cuMemcpyAsync", "copying an input to an output", to, from, bytes,
                              stream_of(poster));
    return SHOAL_OK;
}

static enum shoal_status copy_unit(const struct poster *poster, const struct shoal_device_ring_unit *unit)
{
    const struct shoal_device_ring_operand *operand = operand_of(poster);
    const struct shoal_gpu_transfer *transfer = poster->transfer;
    for (int part = 0; part < operand->parts; part++) {
        for (size_t at = unit->begin, run; at < unit->end; at += run) {
            run = unit->end - at;
            const shoal_cu_address device = transfer->find(transfer->arg, part, at, &run);
            if (!run)
                break;
            const shoal_cu_address own = transfer->find_own ? transfer->find_own(transfer->arg, part, at, &run) : 0;
            SHOAL_TRY(own ? copy_own(poster, device, own, run * operand->element_bytes)
                          : copy_run(poster, shoal_device_ring_at(operand, part, at), device, run * operand->element_bytes));
        }
    }
    return SHOAL_OK;
}

/* In place, the same elements of the input must have been read before. The engine's counter usually implies this, but not if
 * the output's elements come from other ranks only. */
static void wait_for_input(struct poster *poster, uint64_t number)
{
    const struct shoal_device_ring_operand *input = poster->transfer->input;
    if (!input || number >= input->units)
        return;
    const struct shoal_device_ring_unit unit = shoal_device_ring_unit(input, number);
    add_op(poster, true, &input->ring->by_stream[unit.slot], unit.number);
}

static enum shoal_status post_copy(struct poster *poster, const struct shoal_device_ring_unit *unit)
{
    const struct shoal_device_ring *ring = operand_of(poster)->ring;
    if (!ring->is_inward || !unit->is_first_use)
        add_op(poster, true, &ring->by_engine[unit->slot], ring->is_inward ? unit->number - 1 : unit->number);
    wait_for_input(poster, poster->next);
    SHOAL_TRY(flush_ops(poster));
    return copy_unit(poster, unit);
}

static enum shoal_status post_stay(struct poster *poster, const struct shoal_device_ring_unit *unit)
{
    if (!unit->is_first_use)
        add_op(poster, true, &operand_of(poster)->ring->by_engine[unit->slot], unit->number - 1);
    return SHOAL_OK;
}

/* Makes the stream wait for a unit that the engine writes. The wait is passed to the driver together with the write after
 * it. */
static enum shoal_status post_wait(struct poster *poster, const struct shoal_device_ring_unit *unit)
{
    const struct shoal_gpu_port *port = poster->port;
    add_op(poster, true, &operand_of(poster)->ring->by_engine[unit->slot], unit->number);
    poster->ops[poster->count - 1].flushes = shoal_gpu_at(port->scope.gpu, port->scope.device)->can_flush;
    return SHOAL_OK;
}

/* Posts the next unit: see the picture in device/device_ring.h. */
static enum shoal_status post_unit(struct poster *poster)
{
    const struct shoal_device_ring_operand *operand = operand_of(poster);
    const struct shoal_device_ring_unit unit = shoal_device_ring_unit(operand, poster->next);
    if (poster->count + 2 > SHOAL_CUDA_OPS_MAX) /* two before a copy, or two without a copy */
        SHOAL_TRY(flush_ops(poster));
    SHOAL_TRY((operand->stays ? post_stay : operand->writes ? post_wait : post_copy)(poster, &unit));
    add_op(poster, false, &operand->ring->by_stream[unit.slot], unit.number);
    poster->next++;
    poster->posted++;
    find_next(poster);
    return has_more(poster) ? SHOAL_OK : flush_ops(poster);
}

/* Returns true if the inward stream's next unit comes before the outward stream's. Streams may share a queue of the device, in
 * which everything after a wait also waits. So inputs lead by one unit less than the ring has slots. A unit of an input then
 * never waits for outputs behind it, and the engine has the inputs that it needs for each output. */
static bool is_inward_next(const struct poster *in, const struct poster *out)
{
    if (!has_more(in) || !has_more(out))
        return has_more(in);
    return in->posted < out->posted + operand_of(in)->ring->slots - 1;
}

static enum shoal_status post_units(struct poster *in, struct poster *out)
{
    while (has_more(in) || has_more(out))
        SHOAL_TRY(post_unit(is_inward_next(in, out) ? in : out));
    return SHOAL_OK;
}

/* At the end of a call, so that outputs are taken before. It is on the outward stream, so that inputs of later calls need not
 * wait. */
static enum shoal_status await_adapters(struct poster *out)
{
    for (const struct shoal_gpu_transfer *transfer = out->first; transfer < out->end; transfer++) {
        const struct shoal_device_ring_operand *operand = transfer->operand;
        if (!operand->stays)
            continue;
        const struct shoal_device_ring_unit unit = shoal_device_ring_unit(operand, 0);
        add_op(out, true, &operand->ring->by_engine[unit.slot], unit.number);
        out->posted++;
        SHOAL_TRY(flush_ops(out));
    }
    return SHOAL_OK;
}

static enum shoal_status begin_after(struct poster *poster)
{
    const struct shoal_gpu_port *port = poster->port;
    const struct shoal_device_ring_operand *opened = poster->opened;
    if (has_more(poster) || opened)
        SHOAL_CUDA_SCOPE_CALL(&port->scope, stream_wait_event, "cuStreamWaitEvent", "ordering a stream after the caller's",
                              stream_of(poster), port->begun, 0);
    if (opened)
        add_op(poster, false, opened->ring->opening, opened->opening_value);
    return has_more(poster) ? SHOAL_OK : flush_ops(poster);
}

static enum shoal_status end_before(const struct poster *poster, shoal_cu_stream stream)
{
    const struct shoal_gpu_port *port = poster->port;
    const shoal_cu_event ended = port->ended[stream_index(poster)];
    if (!poster->posted)
        return SHOAL_OK;
    SHOAL_CUDA_SCOPE_CALL(&port->scope, event_record, "cuEventRecord", "marking the end of a call", ended, stream_of(poster));
    SHOAL_CUDA_SCOPE_CALL(&port->scope, stream_wait_event, "cuStreamWaitEvent", "ordering the caller's stream after a call",
                          stream, ended, 0);
    return SHOAL_OK;
}

static enum shoal_status post_all(struct shoal_gpu_port *port, struct poster *in, struct poster *out, shoal_cu_stream stream)
{
    SHOAL_CUDA_SCOPE_CALL(&port->scope, event_record, "cuEventRecord", "marking the caller's stream", port->begun, stream);
    SHOAL_TRY(begin_after(in));
    SHOAL_TRY(begin_after(out));
    SHOAL_TRY(post_units(in, out));
    SHOAL_TRY(await_adapters(out));
    SHOAL_TRY(end_before(in, stream));
    return end_before(out, stream);
}

/* A refusal matters only if there is something to wait for: the last port's context may have failed, or have ended. */
static enum shoal_status begin_after_last(const struct poster *poster)
{
    const struct shoal_gpu_port *port = poster->port;
    const shoal_cu_result result =
        last ? port->scope.gpu->calls.stream_wait_event(stream_of(poster), last->ended[0], 0) : SHOAL_CU_SUCCESS;
    if (result == SHOAL_CU_SUCCESS)
        return SHOAL_OK;
    if (shoal_gpu_port_is_at_work(last))
        return shoal_cuda_scope_fail(&port->scope, "cuStreamWaitEvent", result, "ordering a call after the one before");
    last = NULL;
    return SHOAL_OK;
}

/* Posts of all ports follow each other, so that a host function that waits does not delay an earlier call. A call that is
 * refused does not become the last one: its ring is released, so its functions do not wait. */
static enum shoal_status post_in_turn(struct shoal_gpu_port *port, struct poster *in, struct poster *out,
                                      shoal_cu_stream stream)
{
    pthread_mutex_lock(&in_turn);
    enum shoal_status status = begin_after_last(in);
    if (status == SHOAL_OK)
        status = post_all(port, in, out, stream);
    if (status == SHOAL_OK && (in->posted || out->posted))
        last = port;
    pthread_mutex_unlock(&in_turn);
    return status;
}

/* Returns the last output that becomes accessible to the engine through the ring's own counter, not through an input's
 * counter. */
static const struct shoal_device_ring_operand *find_opened(const struct shoal_gpu_transfer *transfers, size_t count)
{
    for (size_t i = count; i-- > 0;) {
        const struct shoal_device_ring_operand *operand = transfers[i].operand;
        if (operand->writes && operand->opening == operand->ring->opening)
            return operand;
    }
    return NULL;
}

enum shoal_status shoal_gpu_port_post(struct shoal_gpu_port *port, const struct shoal_gpu_transfer *transfers, size_t count,
                                      void *stream)
{
    struct poster in = begin_poster(port, true, transfers, count), out = begin_poster(port, false, transfers, count);
    in.opened = find_opened(transfers, count);
    SHOAL_TRY(shoal_cuda_scope_enter(&port->scope));
    const enum shoal_status status =
        (port->has_value_waits ? post_all : post_in_turn)(port, &in, &out, shoal_cuda_stream(stream));
    if (status != SHOAL_OK)
        shoal_cuda_scope_join(&port->scope, port->streams, port->ended, 2, shoal_cuda_stream(stream));
    shoal_cuda_scope_exit(&port->scope);
    return status;
}

enum shoal_status shoal_gpu_port_check(struct shoal_gpu_port *port, void *stream)
{
    SHOAL_TRY(shoal_cuda_scope_enter(&port->scope));
    const enum shoal_status status = shoal_cuda_check_capture(port->scope.gpu, port->scope.device, shoal_cuda_stream(stream));
    shoal_cuda_scope_exit(&port->scope);
    return status;
}
