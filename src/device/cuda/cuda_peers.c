/* One rank's share of sums among devices: slots in its device's memory, the slots of its peers, and a stream for each work. */
#include <stdlib.h>

#include "base/assert.h"
#include "device/cuda/cuda_scope.h"

struct shoal_gpu_peers {
    struct shoal_cuda_scope scope;
    struct shoal_device_stage stage;
    void *memory; /* holds the counters */
    shoal_cu_address memory_on_device;
    bool is_registered;
    shoal_cu_allocation allocation;                /* this rank's slots; 0 if none */
    size_t bytes;                                  /* size of the slots of one rank */
    shoal_cu_address slots[SHOAL_GPU_SOURCES_MAX]; /* each rank's slots, as addresses of this device; 0: not mapped */
    struct shoal_gpu_kernels *kernels;
    shoal_cu_stream streams[SHOAL_DEVICE_WORKS];
    shoal_cu_event begun;                     /* marks the caller's stream when a call was posted */
    shoal_cu_event ended[SHOAL_DEVICE_WORKS]; /* marks the end of that call's work on each of our streams */
};

/* ---- Memory that peers map ----------------------------------------------------------------------------------------------- */

static struct shoal_cu_location location_of(const struct shoal_gpu_peers *peers)
{
    return (struct shoal_cu_location){SHOAL_CU_LOCATION_DEVICE, peers->scope.device};
}

static enum shoal_status allocate_slots(struct shoal_gpu_peers *peers)
{
    const struct shoal_cu_allocation_properties properties = {
        .type = SHOAL_CU_ALLOCATION_PINNED, .handle_types = SHOAL_CU_HANDLE_POSIX, .location = location_of(peers)};
    size_t granule = 0;
    char doing[128];
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, address_granularity, "cuMemGetAllocationGranularity",
                          "asking for the size of shared memory", &granule, &properties, 0);
    peers->bytes = shoal_round_up(peers->stage.options.slots * peers->stage.options.slot_bytes, granule);
    snprintf(doing, sizeof doing,
             "making %zu bytes of memory that other GPUs reach (a smaller SHOAL_GPU_UNIT_BYTES needs less)", peers->bytes);
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, allocation_create, "cuMemCreate", doing, &peers->allocation, peers->bytes, &properties,
                          0);
    return SHOAL_OK;
}

/* There is no remedy if the driver refuses here. */
static void unmap_slots(struct shoal_gpu_peers *peers, int rank)
{
    const struct shoal_cuda_calls *calls = &peers->scope.gpu->calls;
    if (!peers->slots[rank])
        return;
    (void)calls->address_unmap(peers->slots[rank], peers->bytes);
    (void)calls->address_free(peers->slots[rank], peers->bytes);
    peers->slots[rank] = 0;
}

/* Maps the slots at an address of this process, with access for its device. */
static enum shoal_status map_slots(struct shoal_gpu_peers *peers, int rank, shoal_cu_allocation allocation)
{
    const struct shoal_cu_access access = {location_of(peers), SHOAL_CU_ACCESS_READ_WRITE};
    const struct shoal_cuda_calls *calls = &peers->scope.gpu->calls;
    shoal_cu_address at = 0;
    char doing[64];
    snprintf(doing, sizeof doing, "mapping the GPU memory of rank %d", rank);
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, address_reserve, "cuMemAddressReserve", doing, &at, peers->bytes, 0, 0, 0);
    const shoal_cu_result mapped = calls->address_map(at, peers->bytes, 0, allocation, 0);
    if (mapped != SHOAL_CU_SUCCESS) {
        (void)calls->address_free(at, peers->bytes);
        return shoal_cuda_scope_fail(&peers->scope, "cuMemMap", mapped, doing);
    }
    peers->slots[rank] = at;
    const shoal_cu_result allowed = calls->address_access(at, peers->bytes, &access, 1);
    if (allowed == SHOAL_CU_SUCCESS)
        return SHOAL_OK;
    unmap_slots(peers, rank);
    return shoal_cuda_scope_fail(&peers->scope, "cuMemSetAccess", allowed, doing);
}

enum shoal_status shoal_gpu_peers_export(struct shoal_gpu_peers *peers, int *descriptor_out)
{
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, allocation_export, "cuMemExportToShareableHandle", "sharing GPU memory",
                          descriptor_out, peers->allocation, SHOAL_CU_HANDLE_POSIX, 0);
    return SHOAL_OK;
}

/* The mapping keeps the memory alive. */
enum shoal_status shoal_gpu_peers_import(struct shoal_gpu_peers *peers, int rank, int descriptor)
{
    shoal_cu_allocation allocation = 0;
    SHOAL_ASSERT(rank >= 0 && rank < peers->stage.options.ranks && rank != peers->stage.options.rank);
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, allocation_import, "cuMemImportFromShareableHandle", "taking a peer's GPU memory",
                          &allocation, (void *)(uintptr_t)(unsigned)descriptor, SHOAL_CU_HANDLE_POSIX);
    const enum shoal_status status = map_slots(peers, rank, allocation);
    (void)peers->scope.gpu->calls.allocation_release(allocation);
    return status;
}

/* ---- Creation and end ---------------------------------------------------------------------------------------------------- */

static int works_of(const struct shoal_gpu_peers *peers)
{
    return (int)peers->stage.works;
}

static enum shoal_status make_streams(struct shoal_gpu_peers *peers)
{
    for (int i = 0; i < works_of(peers); i++) {
        SHOAL_CUDA_SCOPE_CALL(&peers->scope, stream_create, "cuStreamCreateWithPriority", "making a stream", &peers->streams[i],
                              SHOAL_CU_STREAM_NON_BLOCKING, 0);
        SHOAL_CUDA_SCOPE_CALL(&peers->scope, event_create, "cuEventCreate", "making an event", &peers->ended[i],
                              SHOAL_CU_EVENT_NO_TIMING);
    }
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, event_create, "cuEventCreate", "making an event", &peers->begun,
                          SHOAL_CU_EVENT_NO_TIMING);
    return SHOAL_OK;
}

static enum shoal_status peers_fill(struct shoal_gpu_peers *peers)
{
    SHOAL_TRY(make_streams(peers));
    SHOAL_TRY(shoal_cuda_scope_register(&peers->scope, peers->memory, shoal_device_stage_bytes(&peers->stage.options),
                                        &peers->is_registered, &peers->memory_on_device));
    SHOAL_TRY(shoal_gpu_kernels_open(peers->scope.gpu, peers->scope.context, &peers->kernels));
    SHOAL_TRY(allocate_slots(peers));
    return map_slots(peers, peers->stage.options.rank, peers->allocation);
}

static void end_streams(struct shoal_gpu_peers *peers)
{
    const struct shoal_cuda_calls *calls = &peers->scope.gpu->calls;
    if (peers->begun)
        (void)calls->event_destroy(peers->begun);
    for (int i = 0; i < works_of(peers); i++) {
        if (peers->ended[i])
            (void)calls->event_destroy(peers->ended[i]);
        if (peers->streams[i])
            (void)calls->stream_destroy(peers->streams[i]);
    }
}

/* Needs no context. */
static void end_slots(struct shoal_gpu_peers *peers)
{
    for (int r = 0; r < peers->stage.options.ranks; r++)
        unmap_slots(peers, r);
    if (peers->allocation)
        (void)peers->scope.gpu->calls.allocation_release(peers->allocation);
    shoal_gpu_kernels_close(peers->kernels);
}

/* Slots and kernels go first, because a driver may wait for streams when it frees them. Returns false if the counters are still
 * registered. */
static bool peers_empty(struct shoal_gpu_peers *peers)
{
    const struct shoal_cuda_calls *calls = &peers->scope.gpu->calls;
    end_slots(peers);
    if (peers->is_registered)
        peers->is_registered = calls->host_unregister(peers->memory) != SHOAL_CU_SUCCESS;
    end_streams(peers);
    return !peers->is_registered;
}

static enum shoal_status peers_make(struct shoal_gpu_peers *peers)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(peers->scope.gpu, peers->scope.context, &visit);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_scope_fail_entering(&peers->scope, entered);
    const enum shoal_status status = peers_fill(peers);
    if (status != SHOAL_OK)
        (void)peers_empty(peers);
    shoal_cuda_leave(peers->scope.gpu, &visit);
    return status;
}

enum shoal_status shoal_gpu_peers_can(const struct shoal_gpu *gpu, int number)
{
    const struct shoal_cuda_calls *calls = &gpu->calls;
    const struct shoal_gpu_device *device = shoal_gpu_at(gpu, number);
    const bool can_share = calls->allocation_create && calls->allocation_release && calls->allocation_export &&
                           calls->allocation_import && calls->address_granularity;
    const bool can_map =
        calls->address_reserve && calls->address_free && calls->address_map && calls->address_unmap && calls->address_access;
    if (!device->can_register || !device->has_value_waits)
        return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
                              "device %d (%s) or its driver cannot wait for values in host memory on a stream", number,
                              device->name);
    if (!can_share || !can_map)
        return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
                              "the CUDA driver cannot share memory of a device between processes");
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_peers_open(struct shoal_gpu *gpu, const struct shoal_gpu_peers_options *options,
                                       struct shoal_gpu_peers **peers_out)
{
    int device = 0;
    SHOAL_ASSERT(options->stage.ranks <= SHOAL_GPU_SOURCES_MAX);
    SHOAL_TRY(shoal_cuda_find_device(gpu, options->context, &device));
    SHOAL_TRY(shoal_gpu_peers_can(gpu, device));
    struct shoal_gpu_peers *peers = calloc(1, sizeof *peers);
    if (!peers)
        return shoal_log_fail(gpu->log, SHOAL_ERR_MEMORY, "gpu", "no memory for sums on device %d", device);
    peers->scope = (struct shoal_cuda_scope){gpu, options->context, device};
    peers->memory = options->memory;
    shoal_device_stage_init(&peers->stage, &options->stage, options->memory);
    const enum shoal_status status = peers_make(peers);
    if (status != SHOAL_OK) {
        free(peers);
        return status;
    }
    *peers_out = peers;
    return SHOAL_OK;
}

bool shoal_gpu_peers_is_at_work(const struct shoal_gpu_peers *peers)
{
    return shoal_cuda_scope_is_at_work(&peers->scope, peers->streams, works_of(peers));
}

enum shoal_status shoal_gpu_peers_look(const struct shoal_gpu_peers *peers)
{
    return shoal_cuda_scope_look(&peers->scope, peers->streams, works_of(peers));
}

/* If the program has destroyed the context, streams and events are also gone, but slots are not. Returns false if the counters
 * are still registered. */
static bool peers_give_back(struct shoal_gpu_peers *peers)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result entered = shoal_cuda_visit(peers->scope.gpu, peers->scope.context, &visit);
    if (shoal_cuda_scope_is_gone(entered))
        end_slots(peers);
    if (entered != SHOAL_CU_SUCCESS)
        return shoal_cuda_scope_is_gone(entered);
    const bool is_empty = peers_empty(peers);
    shoal_cuda_leave(peers->scope.gpu, &visit);
    return is_empty;
}

bool shoal_gpu_peers_close(struct shoal_gpu_peers *peers)
{
    const bool is_over = !shoal_gpu_peers_is_at_work(peers) && peers_give_back(peers);
    if (!is_over)
        shoal_log_line(peers->scope.gpu->log, SHOAL_LOG_WARN, "gpu",
                       "device %d has not ended its sums, or its context has failed: %zu bytes of its memory stay until the "
                       "process ends",
                       peers->scope.device, peers->bytes);
    free(peers);
    return is_over;
}

const void *shoal_gpu_peers_context(const struct shoal_gpu_peers *peers)
{
    return peers->scope.context;
}

int shoal_gpu_peers_device(const struct shoal_gpu_peers *peers)
{
    return peers->scope.device;
}

struct shoal_device_stage *shoal_gpu_peers_stage(struct shoal_gpu_peers *peers)
{
    return &peers->stage;
}

/* ---- Works on streams ---------------------------------------------------------------------------------------------------- */

struct posting {
    struct shoal_gpu_peers *peers;
    const struct shoal_gpu_sum *call;
};

/* Elements [begin, begin + length) of a unit. */
struct slice {
    size_t begin, length;
};

static struct slice slice_of(const struct posting *posting, const struct shoal_device_stage_unit *unit, int rank)
{
    struct slice slice;
    slice.begin = shoal_device_sum_slice(posting->call->sum, unit, rank, &slice.length);
    return slice;
}

static shoal_cu_address slot_address(const struct posting *posting, const struct shoal_device_stage_unit *unit, int rank,
                                     size_t element)
{
    const struct shoal_gpu_peers *peers = posting->peers;
    return peers->slots[rank] + unit->slot * peers->stage.options.slot_bytes + element * posting->call->sum->element_bytes;
}

/* Returns the device's address of counters and slices in host memory. */
static shoal_cu_address on_device(const struct shoal_gpu_peers *peers, const void *at)
{
    return peers->memory_on_device + (shoal_cu_address)((const char *)at - (const char *)peers->memory);
}

static enum shoal_status copy_between(const struct posting *posting, enum shoal_device_work work, shoal_cu_address there,
                                      shoal_cu_address slot, size_t bytes)
{
    static const char *const doing[SHOAL_DEVICE_WORKS] = {[SHOAL_DEVICE_BRING] = "copying an input",
                                                          [SHOAL_DEVICE_GATHER] = "copying an output",
                                                          [SHOAL_DEVICE_HAND_OUT] = "copying a slice to host memory",
                                                          [SHOAL_DEVICE_TAKE_BACK] = "copying a slice from host memory"};
    const struct shoal_gpu_peers *peers = posting->peers;
    const bool is_inward = work == SHOAL_DEVICE_BRING || work == SHOAL_DEVICE_TAKE_BACK;
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, copy, "cuMemcpyAsync", doing[work], is_inward ? slot : there, is_inward ? there : slot,
                          bytes, peers->streams[work]);
    return SHOAL_OK;
}

/* Copies between an operand and the slots of a rank. */
static enum shoal_status copy_slice(const struct posting *posting, enum shoal_device_work work,
                                    const struct shoal_device_stage_unit *unit, int rank, struct slice slice)
{
    const struct shoal_gpu_sum *call = posting->call;
    const void *const operand = work == SHOAL_DEVICE_BRING ? call->input : call->output;
    for (size_t at = slice.begin, run; at < slice.begin + slice.length; at += run) {
        run = slice.begin + slice.length - at;
        const shoal_cu_address there = call->find(operand, 0, unit->begin + at, &run);
        SHOAL_ASSERT(run > 0);
        SHOAL_TRY(copy_between(posting, work, there, slot_address(posting, unit, rank, at), run * call->sum->element_bytes));
    }
    return SHOAL_OK;
}

static enum shoal_status bring(const struct posting *posting, const struct shoal_device_stage_unit *unit)
{
    const int own = posting->peers->stage.options.rank;
    return copy_slice(posting, SHOAL_DEVICE_BRING, unit, own, (struct slice){0, unit->end - unit->begin});
}

/* Reduces in the order of ranks, as all kernels do, so that the bits are those of sums in host memory. Over several hosts this
 * is the first pass of the reduction. */
static enum shoal_status reduce_slice(const struct posting *posting, const struct shoal_device_stage_unit *unit)
{
    const struct shoal_gpu_peers *peers = posting->peers;
    const struct shoal_device_stage_options *options = &peers->stage.options;
    const struct slice slice = slice_of(posting, unit, options->rank);
    const struct shoal_reduction whole = {posting->call->op, posting->call->argument},
                                 pass = options->hosts > 1 ? shoal_kernels_pass(posting->call->type, whole, SHOAL_PASS_FIRST)
                                                           : whole;
    struct shoal_gpu_reduction reduction = {.type = posting->call->type,
                                            .op = pass.op,
                                            .dest = slot_address(posting, unit, options->rank, slice.begin),
                                            .source_count = options->ranks,
                                            .count = slice.length,
                                            .argument = pass.argument};
    for (int r = 0; r < options->ranks; r++)
        reduction.sources[r] = slot_address(posting, unit, r, slice.begin);
    return shoal_gpu_reduce(peers->kernels, &reduction, peers->streams[SHOAL_DEVICE_REDUCE]);
}

static enum shoal_status pass_slice(const struct posting *posting, enum shoal_device_work work,
                                    const struct shoal_device_stage_unit *unit)
{
    const struct shoal_device_sum *sum = posting->call->sum;
    const int own = posting->peers->stage.options.rank;
    const struct slice slice = slice_of(posting, unit, own);
    if (slice.length == 0)
        return SHOAL_OK;
    const char *there = shoal_device_sum_address(sum, unit, work == SHOAL_DEVICE_HAND_OUT, slice.begin);
    return copy_between(posting, work, on_device(posting->peers, there), slot_address(posting, unit, own, slice.begin),
                        slice.length * sum->element_bytes);
}

static enum shoal_status hand_out(const struct posting *posting, const struct shoal_device_stage_unit *unit)
{
    return pass_slice(posting, SHOAL_DEVICE_HAND_OUT, unit);
}

static enum shoal_status peers_take_back(const struct posting *posting, const struct shoal_device_stage_unit *unit)
{
    return pass_slice(posting, SHOAL_DEVICE_TAKE_BACK, unit);
}

/* Starts with the next rank, so that not all ranks read from one first. */
static enum shoal_status gather(const struct posting *posting, const struct shoal_device_stage_unit *unit)
{
    const struct shoal_device_stage_options *options = &posting->peers->stage.options;
    for (int i = 1; i <= options->ranks; i++) {
        const int rank = (options->rank + i) % options->ranks;
        SHOAL_TRY(copy_slice(posting, SHOAL_DEVICE_GATHER, unit, rank, slice_of(posting, unit, rank)));
    }
    return SHOAL_OK;
}

static enum shoal_status post_memory_op(const struct posting *posting, enum shoal_device_work work, bool is_wait,
                                        const struct shoal_device_ring_counter *counter, uint64_t value)
{
    const struct shoal_gpu_peers *peers = posting->peers;
    union shoal_cu_memory_op op = {.bytes = {0}};
    op.value.operation = is_wait ? SHOAL_CU_OP_WAIT_64 : SHOAL_CU_OP_WRITE_64;
    op.value.address = on_device(peers, counter);
    op.value.value = value;
    op.value.flags = is_wait ? SHOAL_CU_WAIT_GEQ : 0;
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, memory_ops, "cuStreamBatchMemOp", "posting waits and writes", peers->streams[work], 1,
                          &op, 0);
    return SHOAL_OK;
}

/* See the picture in device/device_stage.h. */
static enum shoal_status post_work(const struct posting *posting, enum shoal_device_work work, uint64_t number)
{
    static enum shoal_status (*const works[SHOAL_DEVICE_WORKS])(
        const struct posting *, const struct shoal_device_stage_unit *) = {[SHOAL_DEVICE_BRING] = bring,
                                                                           [SHOAL_DEVICE_REDUCE] = reduce_slice,
                                                                           [SHOAL_DEVICE_GATHER] = gather,
                                                                           [SHOAL_DEVICE_HAND_OUT] = hand_out,
                                                                           [SHOAL_DEVICE_TAKE_BACK] = peers_take_back};
    const struct shoal_device_stage *stage = &posting->peers->stage;
    const struct shoal_device_stage_unit unit = shoal_device_sum_unit(posting->call->sum, number);
    SHOAL_TRY(post_memory_op(posting, work, true, &stage->begin[work][unit.slot], unit.number));
    SHOAL_TRY(works[work](posting, &unit));
    return post_memory_op(posting, work, false, &stage->ended[work][unit.slot], unit.number);
}

/* The order of works on a unit. */
static const enum shoal_device_work orders[][SHOAL_DEVICE_WORKS] = {
    {SHOAL_DEVICE_BRING, SHOAL_DEVICE_REDUCE, SHOAL_DEVICE_GATHER},
    {SHOAL_DEVICE_BRING, SHOAL_DEVICE_REDUCE, SHOAL_DEVICE_HAND_OUT, SHOAL_DEVICE_TAKE_BACK, SHOAL_DEVICE_GATHER}};

/* Streams may share a queue of the device, in which everything after a wait also waits. So each work is one unit behind the
 * work before it, if there are enough slots. The last work comes first, because it frees a slot. Each work then waits only for
 * works that are before it in the queue, and for those of other ranks that are before it in their queues. With fewer slots,
 * units are processed one by one. */
static enum shoal_status post_works(const struct posting *posting)
{
    const struct shoal_device_stage *stage = &posting->peers->stage;
    const enum shoal_device_work *order = orders[stage->options.hosts > 1];
    const uint64_t units = posting->call->sum->units, behind = stage->options.slots >= stage->works - 1;
    for (uint64_t turn = 0; turn < units + (stage->works - 1) * behind; turn++) {
        for (unsigned i = 0; i < stage->works; i++) {
            const unsigned nth = behind ? stage->works - 1 - i : i;
            if (turn >= nth * behind && turn - nth * behind < units)
                SHOAL_TRY(post_work(posting, order[nth], turn - nth * behind));
        }
    }
    return SHOAL_OK;
}

static enum shoal_status peers_post_sum(const struct posting *posting, shoal_cu_stream stream)
{
    const struct shoal_gpu_peers *peers = posting->peers;
    SHOAL_CUDA_SCOPE_CALL(&peers->scope, event_record, "cuEventRecord", "marking the caller's stream", peers->begun, stream);
    for (int i = 0; i < works_of(peers); i++)
        SHOAL_CUDA_SCOPE_CALL(&peers->scope, stream_wait_event, "cuStreamWaitEvent", "ordering a stream after the caller's",
                              peers->streams[i], peers->begun, 0);
    SHOAL_TRY(post_works(posting));
    for (int i = 0; i < works_of(peers); i++) {
        SHOAL_CUDA_SCOPE_CALL(&peers->scope, event_record, "cuEventRecord", "marking the end of a call", peers->ended[i],
                              peers->streams[i]);
        SHOAL_CUDA_SCOPE_CALL(&peers->scope, stream_wait_event, "cuStreamWaitEvent",
                              "ordering the caller's stream after a call", stream, peers->ended[i], 0);
    }
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_peers_post(struct shoal_gpu_peers *peers, const struct shoal_gpu_sum *sum, void *stream)
{
    const struct posting posting = {.peers = peers, .call = sum};
    SHOAL_TRY(shoal_cuda_scope_enter(&peers->scope));
    const enum shoal_status status = peers_post_sum(&posting, shoal_cuda_stream(stream));
    if (status != SHOAL_OK)
        shoal_cuda_scope_join(&peers->scope, peers->streams, peers->ended, works_of(peers), shoal_cuda_stream(stream));
    shoal_cuda_scope_exit(&peers->scope);
    return status;
}

enum shoal_status shoal_gpu_peers_check(const struct shoal_gpu_peers *peers, void *stream)
{
    SHOAL_TRY(shoal_cuda_scope_enter(&peers->scope));
    const enum shoal_status status = shoal_cuda_check_capture(peers->scope.gpu, peers->scope.device, shoal_cuda_stream(stream));
    shoal_cuda_scope_exit(&peers->scope);
    return status;
}
