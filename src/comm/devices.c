#include "comm/devices.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "comm/arguments.h"
#include "comm/device_exports.h"
#include "operand/makers.h"
#include "operand/pieces.h"

/* ---- A call under way ---------------------------------------------------------------------------------------------------- */

/* An operand on a device. */
struct side {
    const struct shoal_call *call; /* the call of its struct leg */
    int rank;
    enum shoal_block_operand operand;
    struct shoal_device_ring_operand *ring_operand; /* NULL if in host memory */
    const struct side *own; /* for an output: the input that stays on the device and that it is copied from; or NULL */
};

/* One call. The engine may free the call's layout while copies are still being posted, so a leg has the layout that the call
 * had before: there are the addresses on the device. */
struct leg {
    struct shoal_call call;
    struct side sides[2]; /* enum shoal_block_operand */
};

struct trip {
    struct shoal_comm *comm;
    struct shoal_call *calls; /* several messages, if count is not 1 */
    size_t count;
    void *driver_context; /* NULL until the first operand on a device is found; */
    char first[64];       /* then the name of that operand */
    struct shoal_devices_port *port;
    struct shoal_device_sum *sum;         /* NULL if the communicator's GPUs do not sum among themselves */
    struct leg *legs;                     /* [count] */
    size_t *order;                        /* [count] the order in which messages of a group pass through the rings */
    struct shoal_gpu_transfer *transfers; /* [2 * count] */
    size_t transfer_count;
};

static void name_piece(const struct trip *trip, size_t call, const struct shoal_call_piece *piece, char *name, size_t bytes)
{
    const char *operand = piece->operand == SHOAL_INPUT ? "input" : "output";
    const struct shoal_call *at = &trip->calls[call];
    if (shoal_call_has_tensors(at))
        snprintf(name, bytes, "the %s of tensor %zu", operand, piece->tensor);
    else if (trip->count != 1)
        snprintf(name, bytes, "the buffer of message %zu", call);
    else
        snprintf(name, bytes, "%s", operand);
}

/* The kernel reads the set of signals before it checks the first argument, which is not a valid command, so nothing changes. No
 * known filter of system calls forbids this call. */
bool shoal_devices_is_readable(const char *at)
{
    const size_t set_bytes = 8; /* the kernel's; an aligned set is within one page */
    const uintptr_t set = (uintptr_t)at & ~(uintptr_t)(set_bytes - 1);
    return syscall(SYS_rt_sigprocmask, ~0, set, NULL, set_bytes) == 0 || errno != EFAULT;
}

static enum shoal_status refuse_in_callback(const struct trip *trip, const char *operand)
{
    const struct shoal_comm *comm = trip->comm;
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_STATE, "comm",
                          "%s on communicator %s in a callback: %s is on a device, whose driver must not be called there, or "
                          "was freed; post it from another thread, or copy it to host memory",
                          trip->calls->name, comm->name, operand);
}

/* Finds out which memory a piece is in. A driver does not know freed memory or memory of another process; the engine would
 * treat it as host memory and crash. So this reads the last byte first, which the call would access anyway. In a callback this
 * read is the only check, because the driver may be waiting for this thread. */
static enum shoal_status classify_piece(const struct trip *trip, size_t call, const struct shoal_call_piece *piece,
                                        struct shoal_gpu_pointer *pointer_out)
{
    const struct shoal_comm *comm = trip->comm;
    const bool is_inside = shoal_progress_is_inside(comm->context->progress);
    char name[64];
    *pointer_out = is_inside ? (struct shoal_gpu_pointer){SHOAL_GPU_MEMORY_HOST, -1, NULL, 0}
                             : shoal_gpu_classify(comm->devices.ask, piece->at);
    if (pointer_out->memory != SHOAL_GPU_MEMORY_HOST || shoal_devices_is_readable(piece->at + piece->bytes - 1))
        return SHOAL_OK;
    name_piece(trip, call, piece, name, sizeof name);
    if (is_inside)
        return refuse_in_callback(trip, name);
    if (pointer_out->error)
        return shoal_log_fail(
            &comm->context->log, SHOAL_ERR_SYSTEM, "comm",
            "%s on communicator %s: the driver cannot describe the memory of %s: cuPointerGetAttributes answered "
            "%s",
            trip->calls->name, comm->name, name, shoal_gpu_error_name(pointer_out->error));
    return shoal_arguments_refuse(comm, trip->calls->name,
                                  "%s, %zu bytes at %p, is neither in memory of this process nor on a device that its driver "
                                  "knows: was it freed, or does it belong to another process?",
                                  name, piece->bytes, (const void *)piece->at);
}

static enum shoal_status look_for_device(const struct trip *trip, size_t call, bool *is_found_out)
{
    const struct shoal_call *at = &trip->calls[call];
    for (size_t i = 0; i < shoal_call_count_pieces(at) && !*is_found_out; i++) {
        const struct shoal_call_piece piece = shoal_call_piece(at, trip->comm->rank, trip->comm->size, i);
        struct shoal_gpu_pointer pointer;
        if (!piece.at)
            continue;
        SHOAL_TRY(classify_piece(trip, call, &piece, &pointer));
        *is_found_out = pointer.memory != SHOAL_GPU_MEMORY_HOST;
    }
    return SHOAL_OK;
}

enum shoal_status shoal_devices_look(struct shoal_comm *comm, struct shoal_call *calls, size_t count, bool *is_found_out)
{
    const struct trip trip = {.comm = comm, .calls = calls, .count = count};
    *is_found_out = false;
    for (size_t i = 0; i < count && !*is_found_out; i++)
        SHOAL_TRY(look_for_device(&trip, i, is_found_out));
    return SHOAL_OK;
}

/* Finds the driver context in which a piece is used, which must be the same for all pieces. *is_on_device_out is false for host
 * memory. */
static enum shoal_status look_at_piece(struct trip *trip, size_t call, const struct shoal_call_piece *piece,
                                       bool *is_on_device_out)
{
    struct shoal_comm *comm = trip->comm;
    struct shoal_drivers *drivers = &comm->context->drivers;
    struct shoal_gpu_pointer pointer;
    char name[64];
    void *found = NULL;
    SHOAL_TRY(classify_piece(trip, call, piece, &pointer));
    *is_on_device_out = pointer.memory != SHOAL_GPU_MEMORY_HOST;
    if (!*is_on_device_out)
        return SHOAL_OK;
    name_piece(trip, call, piece, name, sizeof name);
    pthread_mutex_lock(&drivers->lock);
    const enum shoal_status status = shoal_gpu_find_context(drivers->gpu, &pointer, trip->calls->stream, name, &found);
    pthread_mutex_unlock(&drivers->lock);
    SHOAL_TRY(status);
    if (trip->driver_context && trip->driver_context != found)
        return shoal_arguments_refuse(comm, trip->calls->name,
                                      "%s and %s are on different devices, or in different contexts of the driver: use one "
                                      "call for each",
                                      trip->first, name);
    if (!trip->driver_context)
        snprintf(trip->first, sizeof trip->first, "%s", name);
    trip->driver_context = found;
    return SHOAL_OK;
}

/* Several tensors count as one vector, because one function looks up their addresses. */
static enum shoal_status look_at_call(struct trip *trip, size_t call)
{
    const struct shoal_call *at = &trip->calls[call];
    struct leg *leg = &trip->legs[call];
    bool is_any_on_device = false, is_any_in_host = false, is_on_device[2] = {false, false};
    for (size_t i = 0; i < shoal_call_count_pieces(at); i++) {
        const struct shoal_call_piece piece = shoal_call_piece(at, trip->comm->rank, trip->comm->size, i);
        bool is_there = false;
        if (!piece.at)
            continue;
        SHOAL_TRY(look_at_piece(trip, call, &piece, &is_there));
        is_on_device[piece.operand] |= is_there;
        is_any_on_device |= is_there;
        is_any_in_host |= !is_there;
    }
    if (shoal_call_has_tensors(at) && is_any_on_device && is_any_in_host)
        return shoal_arguments_refuse(trip->comm, trip->calls->name,
                                      "some of the tensors are in host memory, but %s is on a device: use one call for each",
                                      trip->first);
    for (int operand = 0; operand < 2; operand++)
        leg->sides[operand] = (struct side){.call = is_on_device[operand] ? &leg->call : NULL,
                                            .rank = trip->comm->rank,
                                            .operand = (enum shoal_block_operand)operand};
    return SHOAL_OK;
}

/* ---- Opening ------------------------------------------------------------------------------------------------------------- */

/* Replaces operands of a call. The leg has the call as it was: with the operands that are copied. */
static bool put_operands(struct trip *trip, size_t i, struct shoal_operand *input, struct shoal_operand *output)
{
    struct shoal_call *const before = &trip->legs[i].call;
    SHOAL_ASSERT(!before->layout);
    *before = trip->calls[i];
    before->layout = NULL;
    return shoal_call_put_operands(&trip->calls[i], trip->comm->rank, trip->comm->size, input, output, &before->layout);
}

/* Bytes of an operand that is a single piece. */
static size_t operand_bytes(const struct shoal_comm *comm, const struct shoal_call *call, enum shoal_block_operand operand)
{
    const size_t element_bytes = shoal_type_bytes(call->type);
    return shoal_call_bytes(call, operand, comm->rank, comm->size, element_bytes, comm->rank);
}

/* Returns true if the plan of a call lets its input stay where it is. */
static bool may_stay(struct trip *trip, size_t i, bool *copies_out)
{
    struct shoal_comm *comm = trip->comm;
    const struct shoal_call *call = &trip->calls[i];
    const uint64_t least = comm->context->settings.fabric.gpudirect_bytes;
    if (!least || !comm->context->network || !shoal_network_exports(comm->context->network) ||
        shoal_call_has_peer(call->collective) || !trip->legs[i].sides[SHOAL_INPUT].call || shoal_call_has_tensors(call) ||
        operand_bytes(comm, call, SHOAL_INPUT) < least)
        return false;
    shoal_progress_lock(comm->context->progress);
    const bool may = shoal_engine_only_puts_input(comm->engine, call, copies_out);
    shoal_progress_unlock(comm->context->progress);
    return may;
}

/* Opens an input that stays on the device. Returns false if it has to pass through host memory. */
static bool open_stay(struct trip *trip, size_t i)
{
    struct side *sides = trip->legs[i].sides;
    const struct shoal_call *call = &trip->calls[i];
    struct shoal_device_ring *ring = shoal_gpu_port_stays(trip->port->port);
    bool copies;
    if (!ring || !may_stay(trip, i, &copies) || (copies && !sides[SHOAL_OUTPUT].call))
        return false;
    atomic_int *registration =
        shoal_devices_hold_export(trip->comm, (uintptr_t)call->input, operand_bytes(trip->comm, call, SHOAL_INPUT));
    struct side *input = &sides[SHOAL_INPUT];
    input->ring_operand = registration ? shoal_device_ring_open_stay(ring, call->count, registration) : NULL;
    if (registration && !input->ring_operand)
        atomic_fetch_sub_explicit(registration, 1, memory_order_release);
    sides[SHOAL_OUTPUT].own = input->ring_operand && copies ? input : NULL;
    return input->ring_operand != NULL;
}

static void open_in_ring(struct trip *trip, const struct shoal_call *call, struct side *side)
{
    const int size = trip->comm->size;
    const bool is_any_partitioned =
        shoal_call_is_partitioned(call, SHOAL_INPUT) || shoal_call_is_partitioned(call, SHOAL_OUTPUT);
    struct shoal_device_ring *ring = shoal_gpu_port_ring(trip->port->port, side->operand == SHOAL_INPUT);
    SHOAL_ASSERT(!side->ring_operand && side->call);
    side->ring_operand = shoal_device_ring_open(ring, shoal_call_is_partitioned(call, side->operand) ? size : 1,
                                                is_any_partitioned ? size : 1, call->count, shoal_type_bytes(call->type));
}

/* Returns the operand that the engine sees. Returns NULL if out of memory. */
static struct shoal_operand *open_side(struct trip *trip, size_t i, struct side *side)
{
    if (side->operand != SHOAL_INPUT || !open_stay(trip, i))
        open_in_ring(trip, &trip->calls[i], side);
    struct shoal_operand *operand = side->ring_operand ? shoal_operand_of_device_copy(side->ring_operand) : NULL;
    if (!operand)
        shoal_device_ring_leave(side->ring_operand); /* on the engine's behalf */
    return operand;
}

static enum shoal_status open_leg(struct trip *trip, size_t i)
{
    struct shoal_comm *comm = trip->comm;
    struct side *sides = trip->legs[i].sides;
    struct shoal_operand *operands[2] = {NULL, NULL};
    bool has_all = true;
    for (int operand = 0; operand < 2 && has_all; operand++) {
        operands[operand] = sides[operand].call ? open_side(trip, i, &sides[operand]) : NULL;
        has_all = !sides[operand].call || operands[operand];
    }
    if (has_all && put_operands(trip, i, operands[SHOAL_INPUT], operands[SHOAL_OUTPUT]))
        return SHOAL_OK;
    shoal_operand_drop(operands[SHOAL_INPUT]);
    shoal_operand_drop(operands[SHOAL_OUTPUT]);
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s on communicator %s: no memory", trip->calls->name,
                          comm->name);
}

/* All ranks must come to the same answer. Their kinds of memory decide it; ranks that differ find out when their calls are
 * compared. */
static bool goes_among_gpus(const struct trip *trip)
{
    const struct shoal_devices_port *peers = trip->comm->devices.peers;
    const struct shoal_call *call = &trip->calls[0];
    const struct side *sides = trip->legs[0].sides;
    return peers && call->collective == SHOAL_COLLECTIVE_ALLREDUCE && sides[0].call && sides[1].call &&
           call->count * shoal_type_bytes(call->type) >= trip->comm->context->settings.gpu.peer_bytes &&
           trip->driver_context == shoal_gpu_peers_context(peers->peers);
}

static enum shoal_status prepare_sum(struct trip *trip)
{
    struct shoal_comm *comm = trip->comm;
    struct shoal_gpu_peers *peers = comm->devices.peers->peers;
    struct shoal_call *call = &trip->calls[0];
    SHOAL_ASSERT(trip->count == 1 && !trip->port && !trip->sum);
    SHOAL_TRY(shoal_gpu_peers_check(peers, trip->calls->stream));
    trip->sum = shoal_device_sum_open(shoal_gpu_peers_stage(peers), call->count, shoal_type_bytes(call->type));
    struct shoal_operand *both = trip->sum ? shoal_operand_of_device_sum(trip->sum) : NULL;
    if (both && put_operands(trip, 0, both, both))
        return SHOAL_OK;
    if (both)
        shoal_operand_drop(both);
    else
        shoal_device_sum_leave(trip->sum); /* on the engine's behalf */
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s on communicator %s: no memory", trip->calls->name,
                          comm->name);
}

static unsigned long long find_element(const void *arg, int part, size_t at, size_t *run)
{
    const struct side *side = arg;
    const struct shoal_call *call = side->call;
    const int peer = shoal_call_is_partitioned(call, side->operand) ? part : side->rank;
    const bool is_input = side->operand == SHOAL_INPUT;
    const size_t length = shoal_call_has_peer(call->collective) ? call->count
                          : is_input                            ? shoal_call_length(call, side->rank, side->rank, peer)
                                                                : shoal_call_length(call, side->rank, peer, side->rank);
    SHOAL_ASSERT(part >= 0);
    *run = at < length ? shoal_min_size(*run, length - at) : 0;
    if (!*run)
        return 0;
    return (uintptr_t)shoal_call_address(call, side->rank, shoal_type_bytes(call->type), side->operand, part, at, run);
}

/* Returns the address, in the input, of an element of the output that comes from this rank; 0 if it comes from another rank. */
static unsigned long long find_own_element(const void *arg, int part, size_t at, size_t *run)
{
    const struct side *side = arg;
    const bool is_in_parts = shoal_call_is_partitioned(side->call, SHOAL_OUTPUT);
    SHOAL_ASSERT(side->own && side->operand == SHOAL_OUTPUT);
    if (side->rank != (is_in_parts ? part : side->call->root))
        return 0;
    return find_element(side->own, shoal_call_is_partitioned(side->call, SHOAL_INPUT) ? side->rank : 0, at, run);
}

/* ---- Posting ------------------------------------------------------------------------------------------------------------- */

/* Returns the position of a message in its group. A sends to B at the position at which B receives from A, so both ends of all
 * messages of a group pass through the rings in one order, whatever the order of the calls. A rank's messages to itself come
 * first, so that each is on its way in before a stream waits for it on the way out. */
static int position_of(const struct shoal_comm *comm, const struct shoal_call *call)
{
    const int from = call->collective == SHOAL_COLLECTIVE_SEND ? comm->rank : call->root;
    const int to = call->collective == SHOAL_COLLECTIVE_SEND ? call->root : comm->rank;
    SHOAL_ASSERT(shoal_call_has_peer(call->collective) && call->root >= 0 && call->root < comm->size);
    return to >= from ? to - from : to - from + comm->size;
}

/* Messages of one pair and tag keep their order, because they are matched in this order. Insertion sort, because groups are
 * short and mostly in order. */
static void order_messages(struct trip *trip)
{
    const struct shoal_call *calls = trip->calls;
    for (size_t i = 0; i < trip->count; i++) {
        const int position = position_of(trip->comm, &calls[i]);
        size_t at = i;
        for (; at > 0; at--) {
            const struct shoal_call *before = &calls[trip->order[at - 1]];
            const int its_position = position_of(trip->comm, before);
            if (its_position < position || (its_position == position && before->tag <= calls[i].tag))
                break;
            trip->order[at] = trip->order[at - 1];
        }
        trip->order[at] = i;
    }
}

/* From here on each unit must be posted, or its ring released. */
static void reserve_all(struct trip *trip)
{
    if (trip->sum) {
        shoal_device_sum_reserve(trip->sum);
        return;
    }
    if (trip->count != 1)
        order_messages(trip);
    for (size_t i = 0; i < trip->count; i++) {
        struct leg *leg = &trip->legs[trip->order[i]];
        for (int operand = 0; operand < 2; operand++) {
            struct side *side = &leg->sides[operand];
            if (!side->ring_operand)
                continue;
            SHOAL_ASSERT(trip->transfer_count < 2 * trip->count);
            shoal_device_ring_reserve(side->ring_operand);
            trip->transfers[trip->transfer_count++] =
                (struct shoal_gpu_transfer){.operand = side->ring_operand,
                                            .input = operand == SHOAL_OUTPUT ? leg->sides[SHOAL_INPUT].ring_operand : NULL,
                                            .find = find_element,
                                            .find_own = side->own ? find_own_element : NULL,
                                            .arg = side};
        }
    }
}

/* Other ranks wait for data that will not come. */
static void fail_posted(struct shoal_comm *comm, struct shoal_request *request, enum shoal_status status)
{
    struct shoal_progress *progress = comm->context->progress;
    SHOAL_ASSERT(status != SHOAL_OK && status != SHOAL_PENDING);
    shoal_progress_lock(progress);
    shoal_engine_fail_request(comm->engine, request, status);
    shoal_progress_wake(progress);
    shoal_progress_unlock(progress);
}

static bool has_failed(struct shoal_comm *comm)
{
    shoal_progress_lock(comm->context->progress);
    const bool has = shoal_engine_failure(comm->engine) != NULL;
    shoal_progress_unlock(comm->context->progress);
    return has;
}

/* By now the arguments are accepted, so an error of the driver is not ERR_ARGUMENT. */
static enum shoal_status of_driver(enum shoal_status status)
{
    return status == SHOAL_ERR_MEMORY ? status : SHOAL_ERR_SYSTEM;
}

/* Call if nothing was posted and the engine has not dropped its operands yet. */
static void take_back(struct trip *trip)
{
    if (trip->sum)
        shoal_device_sum_give_back(trip->sum);
    while (trip->transfer_count)
        shoal_device_ring_give_back(trip->transfers[--trip->transfer_count].operand);
}

static enum shoal_status post_sum(struct trip *trip)
{
    const struct shoal_call *call = &trip->legs[0].call;
    const struct shoal_gpu_sum sum = {.sum = trip->sum,
                                      .type = call->type,
                                      .op = call->op,
                                      .argument = call->op == SHOAL_AVG ? trip->comm->size : call->scale,
                                      .find = find_element,
                                      .input = &trip->legs[0].sides[SHOAL_INPUT],
                                      .output = &trip->legs[0].sides[SHOAL_OUTPUT]};
    return shoal_gpu_peers_post(trip->comm->devices.peers->peers, &sum, trip->calls->stream);
}

static enum shoal_status post_on_streams(struct trip *trip)
{
    return trip->sum ? post_sum(trip)
                     : shoal_gpu_port_post(trip->port->port, trip->transfers, trip->transfer_count, trip->calls->stream);
}

static enum shoal_status devices_post_all(struct trip *trip, struct shoal_request **request_out)
{
    reserve_all(trip);
    if (!trip->sum)
        shoal_gpu_port_map(trip->port->port, trip->transfers, trip->transfer_count,
                           (size_t)trip->comm->context->settings.gpu.gdrcopy_bytes);
    enum shoal_status status = shoal_engine_start(trip->comm->engine, trip->calls, trip->count, 0, request_out);
    if (status != SHOAL_OK) {
        take_back(trip);
        return shoal_call_drop(trip->calls, trip->count, status);
    }
    if (trip->sum)
        shoal_device_sum_put_on_streams(trip->sum);
    if (has_failed(trip->comm)) /* the request has also failed, and its rings are released */
        return SHOAL_OK;
    status = post_on_streams(trip);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    status = of_driver(status);
    fail_posted(trip->comm, *request_out, status);
    if (shoal_request_test(*request_out) == SHOAL_OK) /* the request was done: the driver refused later work */
        return SHOAL_OK;
    shoal_request_free(*request_out);
    return status;
}

/* On an error the caller frees the layouts of the calls. */
static enum shoal_status devices_prepare(struct trip *trip)
{
    struct shoal_comm *comm = trip->comm;
    SHOAL_TRY(shoal_drivers_open(comm->context));
    for (size_t i = 0; i < trip->count; i++) {
        trip->order[i] = i;
        SHOAL_TRY(look_at_call(trip, i));
    }
    if (goes_among_gpus(trip))
        return prepare_sum(trip);
    SHOAL_TRY(shoal_devices_find_port(comm, trip->driver_context, &trip->port));
    SHOAL_TRY(shoal_gpu_port_check(trip->port->port, trip->calls->stream));
    for (size_t i = 0; i < trip->count; i++)
        SHOAL_TRY(open_leg(trip, i));
    return SHOAL_OK;
}

static enum shoal_status prepare_and_post(struct trip *trip, struct shoal_request **request_out)
{
    enum shoal_status status = devices_prepare(trip);
    status = status == SHOAL_OK ? devices_post_all(trip, request_out) : shoal_call_drop(trip->calls, trip->count, status);
    shoal_device_sum_leave(trip->sum);
    for (size_t i = 0; i < trip->count; i++) {
        shoal_layout_free(trip->legs[i].call.layout);
        for (int operand = 0; operand < 2; operand++)
            shoal_device_ring_leave(trip->legs[i].sides[operand].ring_operand);
    }
    return status;
}

/* Call with the lock for posting held. */
static enum shoal_status post_in_order(struct trip *trip, struct shoal_request **request_out)
{
    trip->legs = calloc(trip->count, sizeof *trip->legs);
    trip->order = calloc(trip->count, sizeof *trip->order);
    trip->transfers = calloc(2 * trip->count, sizeof *trip->transfers);
    const bool has_all = trip->legs && trip->order && trip->transfers;
    const enum shoal_status status =
        has_all ? prepare_and_post(trip, request_out)
                : shoal_call_drop(trip->calls, trip->count,
                                  shoal_log_fail(&trip->comm->context->log, SHOAL_ERR_MEMORY, "comm",
                                                 "%s on communicator %s: no memory", trip->calls->name, trip->comm->name));
    free(trip->legs);
    free(trip->order);
    free(trip->transfers);
    return status;
}

enum shoal_status shoal_devices_post(struct shoal_comm *comm, struct shoal_call *calls, size_t count, void **driver_context_out,
                                     struct shoal_request **request_out)
{
    struct trip trip = {.comm = comm, .calls = calls, .count = count};
    pthread_mutex_lock(&comm->devices.posting);
    const enum shoal_status status = post_in_order(&trip, request_out);
    pthread_mutex_unlock(&comm->devices.posting);
    *driver_context_out = trip.driver_context;
    return status;
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------- */

#define LOOK_MS 100

/* The communicator has no port if all calls with memory of that context have gone among GPUs. */
static enum shoal_status look_at_streams(const struct shoal_comm *comm, const void *driver_context)
{
    const struct shoal_devices_port *port = shoal_devices_port_of(comm, driver_context), *peers = comm->devices.peers;
    if (port)
        SHOAL_TRY(shoal_gpu_port_look(port->port));
    return peers && shoal_gpu_peers_context(peers->peers) == driver_context ? shoal_gpu_peers_look(peers->peers) : SHOAL_OK;
}

/* Does not look while another thread posts, because that thread may wait in the driver. */
static enum shoal_status look_at_port(struct shoal_comm *comm, const void *driver_context)
{
    if (pthread_mutex_trylock(&comm->devices.posting) != 0)
        return SHOAL_OK;
    const enum shoal_status status = look_at_streams(comm, driver_context);
    pthread_mutex_unlock(&comm->devices.posting);
    return status;
}

enum shoal_status shoal_devices_wait(struct shoal_comm *comm, const void *driver_context, struct shoal_request *request)
{
    enum shoal_status status;
    while ((status = shoal_request_wait(request, LOOK_MS)) == SHOAL_PENDING) {
        const enum shoal_status looked = look_at_port(comm, driver_context);
        if (looked != SHOAL_OK)
            fail_posted(comm, request, of_driver(looked));
    }
    return status;
}
