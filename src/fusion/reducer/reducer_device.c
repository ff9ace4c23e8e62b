#include "fusion/reducer/reducer_device.h"

#include <stdio.h>
#include <stdlib.h>

#include "comm/packers.h"
#include "fusion/reducer/comms.h"
#include "fusion/reducer/measure.h"
#include "fusion/reducer/reducer_failure.h"

#define NS_PER_MS UINT64_C(1000000)

/* An operation that has not been seen to end. */
struct operation {
    struct operation *next;
    struct shoal_request *request;
    size_t buffer;
};

/* Used by one thread at a time: the one that posts, or that begins or ends a step. */
struct fusion_device {
    struct shoal_gpu_packer *packer; /* NULL if it could not be opened */
    enum shoal_status opened;
    char why[FUSION_TEXT_MAX]; /* why it could not be opened */
    struct operation *first, **last;
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_device_open(struct shoal_reducer *reducer)
{
    if (!reducer->options.is_on_device)
        return SHOAL_OK;
    struct fusion_device *device = reducer->device = calloc(1, sizeof *device);
    if (!device)
        return SHOAL_ERR_MEMORY;
    device->last = &device->first;
    device->opened = shoal_packer_open(reducer->context, reducer->options.stream, &device->packer);
    if (device->opened != SHOAL_OK)
        fusion_tell_why(reducer, device->opened, device->why, sizeof device->why);
    return SHOAL_OK;
}

enum shoal_status fusion_device_check(const struct shoal_reducer *reducer, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%s", reducer->device->why);
    return reducer->device->opened;
}

enum shoal_status fusion_device_load(struct shoal_reducer *reducer)
{
    const bool computes = reducer->compressor || fusion_puts_back_late(reducer) || fusion_measures(reducer);
    return fusion_computes_on_device(reducer) && computes ? shoal_gpu_packer_load(reducer->device->packer) : SHOAL_OK;
}

static void drop_oldest(struct fusion_device *device)
{
    struct operation *operation = device->first;
    device->first = operation->next;
    if (!device->first)
        device->last = &device->first;
    shoal_request_free(operation->request);
    free(operation);
}

void fusion_device_close(struct shoal_reducer *reducer)
{
    if (!reducer->device)
        return;
    while (reducer->device->first)
        drop_oldest(reducer->device);
    shoal_gpu_packer_close(reducer->device->packer);
    free(reducer->device);
    reducer->device = NULL;
}

enum shoal_status fusion_device_check_mark(const struct shoal_reducer *reducer, const void *gradient, char *wrong,
                                           size_t wrong_bytes)
{
    return shoal_packer_check(reducer->comm, reducer->device ? reducer->device->packer : NULL, gradient, wrong, wrong_bytes);
}

enum shoal_status fusion_device_allocate(const struct shoal_reducer *reducer, size_t bytes, void **memory_out)
{
    return shoal_gpu_packer_allocate(reducer->device->packer, bytes, memory_out);
}

void fusion_device_release(const struct shoal_reducer *reducer, void *memory)
{
    shoal_gpu_packer_release(reducer->device->packer, memory);
}

struct shoal_gpu_packer *fusion_device_packer(const struct shoal_reducer *reducer)
{
    return reducer->device->packer;
}

int fusion_device_lane(size_t buffer)
{
    return (int)(buffer % SHOAL_GPU_LANES);
}

void *fusion_device_stream(const struct shoal_reducer *reducer, size_t buffer)
{
    return shoal_gpu_packer_lane(reducer->device->packer, fusion_device_lane(buffer));
}

struct shoal_options fusion_buffer_options(const struct shoal_reducer *reducer, size_t buffer)
{
    struct shoal_options options = fusion_options(reducer);
    if (reducer->device)
        options.stream = fusion_device_stream(reducer, buffer);
    return options;
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

enum shoal_status fusion_device_keep(struct shoal_reducer *reducer, size_t buffer, struct shoal_request *request)
{
    struct fusion_device *device = reducer->device;
    struct operation *operation = malloc(sizeof *operation);
    if (!operation) {
        shoal_request_free(request);
        return shoal_report(reducer->context, SHOAL_ERR_MEMORY, "fusion", "no memory for an operation of a reducer");
    }
    *operation = (struct operation){NULL, request, buffer};
    *device->last = operation;
    device->last = &operation->next;
    return SHOAL_OK;
}

/* Waits for the first. Operations end in the order in which they were posted, or nearly so. */
static enum shoal_status wait_for_first(struct shoal_reducer *reducer, uint32_t timeout_ms)
{
    struct fusion_device *device = reducer->device;
    struct shoal_request *request = device->first->request;
    const enum shoal_status status = timeout_ms ? shoal_request_wait(request, timeout_ms) : shoal_request_test(request);
    if (status == SHOAL_PENDING)
        return status;
    if (status != SHOAL_OK)
        fusion_operation_failed(reducer, status, (long)device->first->buffer);
    drop_oldest(device);
    return status;
}

enum shoal_status fusion_device_wait(struct shoal_reducer *reducer, uint32_t timeout_ms)
{
    const uint64_t begin_ns = fusion_now_ns();
    enum shoal_status status = SHOAL_OK;
    while (reducer->device->first && status == SHOAL_OK) {
        const uint64_t passed_ms = (fusion_now_ns() - begin_ns) / NS_PER_MS;
        const uint32_t left_ms = passed_ms < timeout_ms ? timeout_ms - (uint32_t)passed_ms : 0;
        status = wait_for_first(reducer, timeout_ms == SHOAL_FOREVER ? SHOAL_FOREVER : left_ms);
    }
    return status;
}

enum shoal_status fusion_device_look(struct shoal_reducer *reducer)
{
    const enum shoal_status status = fusion_device_wait(reducer, 0);
    return status == SHOAL_PENDING ? SHOAL_OK : status;
}

/* Determines why work was refused. If a communicator has failed, all ranks learn the cause from it, otherwise from this
 * rank. */
enum shoal_status fusion_device_fail(struct shoal_reducer *reducer, size_t buffer, enum shoal_status status, const char *doing)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    char why[FUSION_TEXT_MAX];
    fusion_tell_why(reducer, status, why, sizeof why);
    if (shoal_last_failure(reducer->context, reducer->comm, &failure) == SHOAL_OK ||
        fusion_comms_failure(reducer, &failure)) {
        fusion_operation_failed(reducer, status, (long)buffer);
        return fusion_failure_status(reducer);
    }
    return fusion_fail(reducer, status, (long)reducer->layout->order[reducer->layout->buffers[buffer].first],
                       "buffer %zu could not be %s: %.360s", buffer, doing, why);
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

/* If an operation has also failed, that is the cause. */
static enum shoal_status fail_begin(struct shoal_reducer *reducer, enum shoal_status status)
{
    char why[FUSION_TEXT_MAX];
    fusion_tell_why(reducer, status, why, sizeof why);
    return fusion_fail(reducer, status, -1, "the step could not begin: %.360s", why);
}

/* Loading may wait until the device is idle. Other ranks' threads, which an operation of this rank may need, would then wait
 * also. So this waits for the operations first. */
static enum shoal_status load_for_sums(struct shoal_reducer *reducer)
{
    struct shoal_gpu_packer *packer = reducer->device->packer;
    if (shoal_gpu_packer_has_kernels(packer))
        return SHOAL_OK;
    FUSION_TRY(fusion_device_wait(reducer, SHOAL_FOREVER));
    return shoal_gpu_packer_load(packer);
}

enum shoal_status fusion_device_begin(struct shoal_reducer *reducer, enum shoal_step step)
{
    if (fusion_device_look(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    enum shoal_status status = shoal_gpu_packer_check(reducer->device->packer);
    if (status == SHOAL_ERR_UNSUPPORTED)
        return status; /* a stream is being captured: the caller may try again */
    if (status == SHOAL_OK && step == SHOAL_STEP_LOCAL)
        status = load_for_sums(reducer);
    if (status == SHOAL_OK)
        return SHOAL_OK;
    return fail_begin(reducer, status);
}

enum shoal_status fusion_device_leave_views(struct shoal_reducer *reducer)
{
    enum shoal_status status = fusion_device_wait(reducer, SHOAL_FOREVER);
    if (status == SHOAL_OK)
        status = shoal_gpu_packer_begin(reducer->device->packer, 0);
    return status == SHOAL_OK ? SHOAL_OK : fail_begin(reducer, status);
}
