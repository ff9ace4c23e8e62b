#include "fusion/reducer/measure.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/floats.h"
#include "device/gpu_packer.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_device.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/reducer_memory.h"

enum which { OWN, AVERAGES, WHICH };

/* Two numbers for a chunk of a parameter's elements, as the device writes them. */
struct chunk {
    double squared;
    double bad; /* NaN if a value is not finite; otherwise 0 */
};

struct fusion_measure {
    size_t *first;              /* [parameters + 1]: the number of chunks of earlier parameters */
    struct chunk *there, *here; /* [WHICH][all chunks]: on the device, and the host's copy */
};

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static bool asks_for(const struct shoal_reducer *reducer, enum which which)
{
    const struct shoal_reducer_options *options = &reducer->options;
    return options->has_norms || (which == OWN ? options->checks_finite : options->max_norm > 0);
}

static size_t measure_chunks(const struct shoal_reducer *reducer)
{
    return reducer->measure->first[reducer->layout->parameters.count];
}

static size_t measure_bytes(const struct shoal_reducer *reducer)
{
    return WHICH * measure_chunks(reducer) * sizeof(struct chunk);
}

enum shoal_status fusion_measure_create(struct shoal_reducer *reducer)
{
    const size_t count = reducer->layout->parameters.count;
    void *there;
    if (!fusion_measures(reducer))
        return SHOAL_OK;
    struct fusion_measure *measure = reducer->measure = calloc(1, sizeof *measure);
    if (!measure || !(measure->first = calloc(count + 1, sizeof *measure->first)))
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        const size_t elements = fusion_parameter(reducer, i)->count;
        const size_t chunks = elements / SHOAL_GRADIENT_SQUARED_CHUNK + (elements % SHOAL_GRADIENT_SQUARED_CHUNK > 0);
        measure->first[i + 1] = measure->first[i] + chunks;
    }
    measure->here = calloc(WHICH * measure_chunks(reducer) + 1, sizeof *measure->here);
    if (!measure->here)
        return SHOAL_ERR_MEMORY;
    FUSION_TRY(fusion_allocate(reducer, measure_bytes(reducer) + sizeof *measure->there, &there));
    measure->there = there;
    return SHOAL_OK;
}

void fusion_measure_destroy(struct shoal_reducer *reducer)
{
    if (!reducer->measure)
        return;
    fusion_free_memory(reducer, reducer->measure->there);
    free(reducer->measure->here);
    free(reducer->measure->first);
    free(reducer->measure);
}

/* ---- On the lanes -------------------------------------------------------------------------------------------------------- */

/* Returns true if this rank contributes to the average of a parameter. */
static bool has_own(const struct shoal_reducer *reducer, size_t parameter)
{
    return fusion_marks_parts(reducer, parameter) || fusion_marks_have_sum(reducer, parameter);
}

static size_t chunk_of(const struct shoal_reducer *reducer, enum which which, size_t parameter)
{
    SHOAL_ASSERT(reducer->measure->first[parameter] <= reducer->measure->first[parameter + 1]);
    return (which == OWN ? 0 : measure_chunks(reducer)) + reducer->measure->first[parameter];
}

static enum shoal_status put_squares(struct shoal_reducer *reducer, size_t index, enum which which, double factor)
{
    const struct fusion_buffer *buffer = &reducer->layout->buffers[index];
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = reducer->layout->order[buffer->first + i];
        struct chunk *chunks = reducer->measure->there + chunk_of(reducer, which, parameter);
        if (which == AVERAGES || has_own(reducer, parameter))
            FUSION_TRY(shoal_gpu_packer_square(fusion_device_packer(reducer), fusion_device_lane(index), buffer->type,
                                               &chunks->squared, fusion_view(reducer, parameter),
                                               fusion_parameter(reducer, parameter)->count, factor));
    }
    return SHOAL_OK;
}

enum shoal_status fusion_measure_own(struct shoal_reducer *reducer, size_t buffer)
{
    return reducer->measure && asks_for(reducer, OWN) ? put_squares(reducer, buffer, OWN, 1) : SHOAL_OK;
}

enum shoal_status fusion_measure_averages(struct shoal_reducer *reducer, size_t buffer, double factor)
{
    return reducer->measure && asks_for(reducer, AVERAGES) ? put_squares(reducer, buffer, AVERAGES, factor) : SHOAL_OK;
}

/* ---- The end of a step --------------------------------------------------------------------------------------------------- */

bool fusion_measure_has_own(const struct shoal_reducer *reducer)
{
    return reducer->measure && asks_for(reducer, OWN);
}

static enum shoal_status put_late(struct shoal_reducer *reducer, double factor)
{
    for (size_t b = 0; fusion_scales_late(reducer) && b < reducer->layout->buffer_count; b++)
        FUSION_TRY(fusion_measure_averages(reducer, b, factor));
    return SHOAL_OK;
}

/* All lanes must be done, and then the lane that copies. */
static enum shoal_status read_chunks(struct shoal_reducer *reducer)
{
    const struct fusion_measure *measure = reducer->measure;
    struct shoal_gpu_packer *packer = fusion_device_packer(reducer);
    FUSION_TRY(shoal_gpu_packer_settle(packer));
    if (!measure_chunks(reducer))
        return SHOAL_OK;
    const enum shoal_status status = shoal_gpu_packer_fetch(packer, 0, measure->here, measure->there, measure_bytes(reducer));
    const enum shoal_status settled = shoal_gpu_packer_settle(packer); /* also if it was refused, as it may be under way */
    return status == SHOAL_OK ? settled : status;
}

/* Adds in the same order as the processor's kernel. */
static struct chunk add_chunks(const struct shoal_reducer *reducer, enum which which, size_t parameter)
{
    const struct fusion_measure *measure = reducer->measure;
    const size_t count = measure->first[parameter + 1] - measure->first[parameter];
    struct chunk sum = {0, 0};
    for (size_t c = 0; c < count; c++) {
        const struct chunk *chunk = &measure->here[chunk_of(reducer, which, parameter) + c];
        sum.squared += chunk->squared;
        sum.bad += chunk->bad;
    }
    return sum;
}

static enum shoal_status fail_measuring(struct shoal_reducer *reducer, enum shoal_status status)
{
    char why[FUSION_TEXT_MAX];
    fusion_tell_why(reducer, status, why, sizeof why);
    return fusion_fail(reducer, status, -1, "norms could not be taken: %.360s", why);
}

enum shoal_status fusion_measure_wait(struct shoal_reducer *reducer, double factor)
{
    enum shoal_status status = put_late(reducer, factor);
    if (status == SHOAL_OK && fusion_device_wait(reducer, SHOAL_FOREVER) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (status == SHOAL_OK)
        status = read_chunks(reducer);
    return status == SHOAL_OK ? SHOAL_OK : fail_measuring(reducer, status);
}

static void measured_sum(const struct shoal_reducer *reducer, enum which which, size_t parameter,
                         struct fusion_measured *measured_out)
{
    SHOAL_DEFAULT_FLOATS; /* all ranks add alike */
    const struct chunk sum = add_chunks(reducer, which, parameter);
    *measured_out = (struct fusion_measured){sum.squared, sum.bad != 0};
}

bool fusion_measure_own_of(const struct shoal_reducer *reducer, size_t parameter, struct fusion_measured *measured_out)
{
    SHOAL_ASSERT(reducer->measure);
    const bool is_there = asks_for(reducer, OWN) && has_own(reducer, parameter);
    if (is_there)
        measured_sum(reducer, OWN, parameter, measured_out);
    return is_there;
}

bool fusion_measure_average_of(const struct shoal_reducer *reducer, size_t parameter, struct fusion_measured *measured_out)
{
    SHOAL_ASSERT(reducer->measure);
    const bool is_there = asks_for(reducer, AVERAGES);
    if (is_there)
        measured_sum(reducer, AVERAGES, parameter, measured_out);
    return is_there;
}
