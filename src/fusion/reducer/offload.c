#include "fusion/reducer/offload.h"

#include <stdlib.h>

#include "base/assert.h"
#include "device/gpu_packer.h"
#include "fusion/reducer/device_buffer.h"
#include "fusion/reducer/flow.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/optimizer_shards.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/stats.h"

struct fusion_offload {
    void **memory; /* [parameters]: the caller's, on the device; NULL: not given yet */
    void **points; /* [parameters, because no layout has more buffers]: on its lane, after the copies of a buffer's gradients */
    bool registered[2];              /* the gradients' memory, the parameters' */
    size_t fetched, arrived, stored; /* lock: the buffers before it are on their way down, have come, are on their way up */
    bool is_working;                 /* lock */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static struct shoal_gpu_packer *packer_of(const struct shoal_reducer *reducer)
{
    return fusion_device_packer(reducer);
}

enum shoal_status fusion_offload_create(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count, bytes = reducer->layout->bytes + FUSION_ALIGNMENT;
    if (!reducer->device || !reducer->optimizer)
        return SHOAL_OK;
    struct fusion_offload *offload = reducer->offload = calloc(1, sizeof *offload);
    if (!offload)
        return SHOAL_ERR_MEMORY;
    offload->memory = calloc(count + 1, sizeof *offload->memory);
    offload->points = calloc(count + 1, sizeof *offload->points);
    if (!offload->memory || !offload->points)
        return SHOAL_ERR_MEMORY;
    FUSION_TRY(shoal_gpu_packer_register(packer_of(reducer), reducer->memory, bytes));
    offload->registered[0] = true;
    FUSION_TRY(shoal_gpu_packer_register(packer_of(reducer), reducer->optimizer->parameters, bytes));
    offload->registered[1] = true;
    return SHOAL_OK;
}

void fusion_offload_destroy(struct shoal_reducer *reducer)
{
    struct fusion_offload *offload = reducer->offload;
    if (!offload)
        return;
    if (offload->registered[0])
        shoal_gpu_packer_unregister(packer_of(reducer), reducer->memory);
    if (offload->registered[1])
        shoal_gpu_packer_unregister(packer_of(reducer), reducer->optimizer->parameters);
    for (size_t b = 0; offload->points && b < reducer->layout->parameters.count; b++)
        shoal_gpu_packer_forget(packer_of(reducer), offload->points[b]);
    free(offload->points);
    free(offload->memory);
    free(offload);
}

/* ---- The caller's memory ------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_reducer_use_parameter(struct shoal_reducer *reducer, size_t parameter, void *memory)
{
    static const char call[] = "shoal_reducer_use_parameter";
    char wrong[256], text[FUSION_TEXT_MAX];
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (!reducer->offload)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the reducer was not made with is_on_device and an optimizer", call);
    FUSION_TRY(fusion_marks_check_none(reducer, call));
    if (parameter >= reducer->layout->parameters.count || !memory)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: memory is NULL, or parameter %zu is out of range: there are %zu",
                             call, parameter, reducer->layout->parameters.count);
    const enum shoal_status status = fusion_device_check_mark(reducer, memory, wrong, sizeof wrong);
    if (status != SHOAL_OK)
        return fusion_refuse(reducer, status, "%s: %s %s", call,
                             fusion_parameter_text(&reducer->layout->parameters, parameter, text, sizeof text), wrong);
    reducer->offload->memory[parameter] = memory;
    return SHOAL_OK;
}

static bool has_memory(const struct shoal_reducer *reducer, size_t parameter)
{
    return reducer->offload->memory[parameter] || fusion_parameter(reducer, parameter)->count == 0;
}

enum shoal_status fusion_offload_check(const struct shoal_reducer *reducer, enum shoal_step step)
{
    char text[FUSION_TEXT_MAX];
    if (!reducer->offload)
        return SHOAL_OK;
    if (step == SHOAL_STEP_LOCAL)
        return fusion_refuse(reducer, SHOAL_ERR_UNSUPPORTED,
                             "LOCAL steps are not for an optimizer with is_on_device: add gradients on the device, and mark "
                             "their sums in one step");
    for (size_t i = 0; i < reducer->layout->parameters.count; i++)
        if (!has_memory(reducer, i))
            return fusion_refuse(reducer, SHOAL_ERR_STATE,
                                 "%s has no memory on the device: call shoal_reducer_use_parameter for each parameter",
                                 fusion_parameter_text(&reducer->layout->parameters, i, text, sizeof text));
    return SHOAL_OK;
}

static enum shoal_status offload_copy_all(const struct shoal_reducer *reducer, bool is_up)
{
    struct shoal_gpu_packer *packer = packer_of(reducer);
    FUSION_TRY(shoal_gpu_packer_begin(packer, 0));
    for (size_t i = 0; i < reducer->layout->parameters.count; i++) {
        const size_t bytes = fusion_parameter_bytes(fusion_parameter(reducer, i));
        char *host = fusion_parameter_at(reducer, i);
        void *memory = reducer->offload->memory[i];
        if (bytes > 0)
            FUSION_TRY(is_up ? shoal_gpu_packer_store(packer, 0, memory, host, bytes)
                             : shoal_gpu_packer_fetch(packer, 0, host, memory, bytes));
    }
    return SHOAL_OK;
}

/* Copies all parameters, and waits for the device. */
static enum shoal_status exchange_parameters(struct shoal_reducer *reducer, bool is_up)
{
    char why[FUSION_TEXT_MAX];
    if (!reducer->offload)
        return SHOAL_OK;
    FUSION_TRY(fusion_offload_check(reducer, SHOAL_STEP_REDUCE));
    const enum shoal_status status = offload_copy_all(reducer, is_up);
    const enum shoal_status settled = shoal_gpu_packer_settle(packer_of(reducer)); /* also what was put there before an error */
    const enum shoal_status first = status == SHOAL_OK ? settled : status;
    if (first == SHOAL_OK)
        return SHOAL_OK;
    fusion_tell_why(reducer, first, why, sizeof why);
    return fusion_fail(reducer, first, -1, "parameters could not be %s the device: %.360s", is_up ? "written to" : "read from",
                       why);
}

enum shoal_status fusion_offload_load(struct shoal_reducer *reducer)
{
    return exchange_parameters(reducer, false);
}

enum shoal_status fusion_offload_store(struct shoal_reducer *reducer)
{
    return exchange_parameters(reducer, true);
}

/* ---- A buffer ------------------------------------------------------------------------------------------------------------ */

void fusion_offload_reset(struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    SHOAL_ASSERT(!reducer->offload || !reducer->offload->is_working);
    struct fusion_offload *offload = reducer->offload;
    if (offload)
        offload->fetched = offload->arrived = offload->stored = 0;
}

static enum shoal_status fetch_part(struct shoal_reducer *reducer, size_t parameter, const struct fusion_part *part, char *view,
                                    int lane)
{
    const size_t bytes = part->count * shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
    fusion_stats_copied(reducer, bytes);
    return shoal_gpu_packer_fetch(packer_of(reducer), lane, view, part->memory, bytes);
}

static enum shoal_status fetch_buffer(struct shoal_reducer *reducer, size_t buffer)
{
    const int lane = fusion_device_lane(buffer);
    enum shoal_status status = shoal_gpu_packer_begin(packer_of(reducer), lane);
    if (status == SHOAL_OK)
        status = fusion_device_copy_parts(reducer, buffer, fetch_part);
    if (status == SHOAL_OK)
        status = shoal_gpu_packer_mark(packer_of(reducer), lane, &reducer->offload->points[buffer]);
    return status == SHOAL_OK ? SHOAL_OK : fusion_device_fail(reducer, buffer, status, "read from the device");
}

/* Returns PENDING if the gradients are still under way. */
static enum shoal_status take_buffer(struct shoal_reducer *reducer, size_t buffer)
{
    const enum shoal_status status = shoal_gpu_packer_look(packer_of(reducer), reducer->offload->points[buffer]);
    if (status == SHOAL_OK)
        fusion_marks_take_buffer(reducer, buffer);
    return status == SHOAL_OK || status == SHOAL_PENDING ? status
                                                         : fusion_device_fail(reducer, buffer, status, "read from the device");
}

static enum shoal_status store_parameter(const struct shoal_reducer *reducer, size_t parameter, int lane)
{
    const size_t bytes = fusion_parameter_bytes(fusion_parameter(reducer, parameter));
    if (bytes == 0 || !fusion_marks_use(reducer, parameter))
        return SHOAL_OK;
    return shoal_gpu_packer_store(packer_of(reducer), lane, reducer->offload->memory[parameter],
                                  fusion_parameter_at(reducer, parameter), bytes);
}

/* The lane has waited for all kernels that came before the last mark of the buffer, so none of them still reads the old
 * parameters. */
static enum shoal_status store_buffer(struct shoal_reducer *reducer, size_t buffer)
{
    const struct fusion_buffer *found = &reducer->layout->buffers[buffer];
    enum shoal_status status = SHOAL_OK;
    for (uint32_t i = 0; i < found->count && status == SHOAL_OK; i++)
        status = store_parameter(reducer, reducer->layout->order[found->first + i], fusion_device_lane(buffer));
    return status == SHOAL_OK ? SHOAL_OK : fusion_device_fail(reducer, buffer, status, "written to the device");
}

/* ---- In order ------------------------------------------------------------------------------------------------------------ */

typedef enum shoal_status (*work_fn)(struct shoal_reducer *reducer, size_t buffer);

/* Returns true if nothing in this step can change the buffer's parameters any more. Call with the lock held. */
static bool is_final(const struct shoal_reducer *reducer, size_t buffer)
{
    return !fusion_optimizer_awaits_verdict(reducer) && !reducer->optimizer->is_atomic &&
           reducer->optimizer->shards[buffer].is_gathered;
}

/* Chooses the next piece of work; looks: also whether gradients have come. Call with the lock held. */
static work_fn choose_work(struct shoal_reducer *reducer, bool looks, size_t **next_out)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    struct fusion_offload *offload = reducer->offload;
    const size_t count = reducer->layout->buffer_count;
    if (fusion_failed(reducer) != SHOAL_OK || !reducer->is_armed)
        return NULL;
    SHOAL_ASSERT(offload->arrived <= offload->fetched && offload->stored <= offload->arrived && offload->fetched <= count);
    *next_out = &offload->fetched;
    if (offload->fetched < count && fusion_marks_fill(reducer, offload->fetched))
        return fetch_buffer;
    *next_out = &offload->stored;
    if (offload->stored < count && is_final(reducer, offload->stored))
        return store_buffer;
    *next_out = &offload->arrived;
    return looks && offload->arrived < offload->fetched ? take_buffer : NULL;
}

/* Call with the lock held; it is released meanwhile. */
static void offload_work(struct shoal_reducer *reducer)
{
    bool looks = true;
    size_t *next;
    for (work_fn work; (work = choose_work(reducer, looks, &next)) != NULL;) {
        const size_t buffer = *next;
        fusion_unlock(reducer);
        const enum shoal_status status = work(reducer, buffer);
        fusion_lock(reducer);
        if (status == SHOAL_PENDING)
            looks = false; /* another thread may have filled a buffer meanwhile */
        else if (status == SHOAL_OK)
            ++*next;
        if (status == SHOAL_OK && work == take_buffer)
            fusion_flow_arrive(reducer);
    }
}

enum shoal_status fusion_offload_advance(struct shoal_reducer *reducer)
{
    struct fusion_offload *offload = reducer->offload;
    if (!offload)
        return SHOAL_OK;
    fusion_lock(reducer);
    if (!offload->is_working) {
        offload->is_working = true;
        offload_work(reducer);
        offload->is_working = false;
        pthread_cond_broadcast(&reducer->changed);
    }
    fusion_unlock(reducer);
    return fusion_failed(reducer) == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}

enum shoal_status fusion_offload_finish(struct shoal_reducer *reducer, bool is_skipped)
{
    struct fusion_offload *offload = reducer->offload;
    enum shoal_status status = SHOAL_OK;
    if (!offload)
        return SHOAL_OK;
    SHOAL_ASSERT(offload->arrived == reducer->layout->buffer_count);
    for (; !is_skipped && offload->stored < reducer->layout->buffer_count; offload->stored++)
        FUSION_TRY(store_buffer(reducer, offload->stored));
    for (int lane = 0; lane < SHOAL_GPU_LANES && status == SHOAL_OK; lane++)
        status = shoal_gpu_packer_join(packer_of(reducer), lane);
    return status == SHOAL_OK ? SHOAL_OK : fusion_device_fail(reducer, 0, status, "waited for");
}

bool fusion_offload_awaits_device(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->offload && reducer->offload->arrived < reducer->offload->fetched;
}

bool fusion_offload_is_working(const struct shoal_reducer *reducer)
{
    SHOAL_ASSERT(fusion_has_lock(reducer));
    return reducer->offload && reducer->offload->is_working;
}

enum shoal_status fusion_post_full(struct shoal_reducer *reducer)
{
    FUSION_TRY(fusion_offload_advance(reducer));
    fusion_lock(reducer);
    fusion_advance(reducer);
    fusion_unlock(reducer);
    return fusion_failed(reducer) == SHOAL_OK ? SHOAL_OK : fusion_failure_status(reducer);
}
