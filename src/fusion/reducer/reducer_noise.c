#include "fusion/reducer/reducer_noise.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_failure.h"
#include "fusion/reducer/tally.h"

struct fusion_noise {
    struct shoal_noise_average average;
    double scale; /* by which the program wants gradients multiplied */
};

bool fusion_noise_can_have(double window)
{
    return window == 0 || (window >= 1 && window - window == 0);
}

enum shoal_status fusion_noise_create(struct shoal_reducer *reducer)
{
    if (reducer->options.noise_window == 0)
        return SHOAL_OK;
    struct fusion_noise *noise = reducer->noise = calloc(1, sizeof *noise);
    if (!noise)
        return SHOAL_ERR_MEMORY;
    noise->average = (struct shoal_noise_average)SHOAL_NOISE_AVERAGE_INIT;
    noise->average.window = reducer->options.noise_window;
    noise->scale = 1;
    fusion_tally_set_samples(reducer, 1);
    return SHOAL_OK;
}

void fusion_noise_destroy(struct shoal_reducer *reducer)
{
    free(reducer->noise);
}

/* The averages of a step are sums over active ranks, divided by this. */
static double noise_divisor(const struct shoal_reducer *reducer, int active)
{
    SHOAL_ASSERT(active > 0);
    if (reducer->options.op == SHOAL_SUM)
        return 1;
    return fusion_scales_late(reducer) ? active : reducer->size;
}

/* Watchers see the newest estimate. The step has succeeded, whatever becomes of this. */
static void publish(const struct shoal_reducer *reducer)
{
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    struct shoal_training training = SHOAL_TRAINING_INIT;
    if (shoal_noise_read(&reducer->noise->average, &noise) != SHOAL_OK)
        return;
    training.batch = noise.batch;
    if (noise.state == SHOAL_NOISE_KNOWN) {
        training.noise_scale = noise.scale;
        training.noise_error = noise.error;
    }
    if (shoal_comm_publish(reducer->comm, &training) != SHOAL_OK)
        return;
}

void fusion_noise_take(struct shoal_reducer *reducer, const struct shoal_step_result *result)
{
    SHOAL_DEFAULT_FLOATS;
    struct fusion_noise *noise = reducer->noise;
    struct shoal_noise_step step = SHOAL_NOISE_STEP_INIT;
    if (!noise)
        return;
    const double active = result->active, scale = noise->scale, mean = noise_divisor(reducer, result->active) / active;
    step.small_batch = active / fusion_tally_inverse(reducer);
    step.small_squared = result->local_squared * (scale * scale);
    step.big_batch = active * step.small_batch;
    step.big_squared = result->squared * (scale * scale) * (mean * mean);
    if (shoal_noise_add(&noise->average, &step) == SHOAL_OK) /* otherwise a batch is so small that its inverse is infinite */
        publish(reducer);
}

/* ---- Calls --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status noise_check(const struct shoal_reducer *reducer, const char *call, const void *argument)
{
    if (!reducer)
        return SHOAL_ERR_ARGUMENT;
    if (!reducer->noise)
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "%s: the reducer was made without noise_window", call);
    return argument ? SHOAL_OK : fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "%s: an argument is NULL", call);
}

enum shoal_status shoal_reducer_set_batch(struct shoal_reducer *reducer, double samples, double gradient_scale)
{
    FUSION_TRY(noise_check(reducer, "shoal_reducer_set_batch", reducer));
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    FUSION_TRY(fusion_marks_check_none(reducer, "shoal_reducer_set_batch"));
    if (!(samples > 0) || samples - samples != 0 || !(gradient_scale > 0) || gradient_scale - gradient_scale != 0)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_set_batch: %g samples and a gradient scale of %g: both must be above 0 and finite",
                             samples, gradient_scale);
    fusion_tally_set_samples(reducer, samples);
    reducer->noise->scale = gradient_scale;
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_noise(const struct shoal_reducer *reducer, struct shoal_noise *noise_out)
{
    FUSION_TRY(noise_check(reducer, "shoal_reducer_noise", noise_out));
    return shoal_noise_read(&reducer->noise->average, noise_out);
}

enum shoal_status shoal_reducer_noise_average(const struct shoal_reducer *reducer, struct shoal_noise_average *average_out)
{
    FUSION_TRY(noise_check(reducer, "shoal_reducer_noise_average", average_out));
    if (!shoal_struct_bytes(average_out))
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT,
                             "shoal_reducer_noise_average: struct_bytes is not set: use SHOAL_NOISE_AVERAGE_INIT");
    shoal_struct_copy_out(average_out, &reducer->noise->average, sizeof reducer->noise->average);
    return SHOAL_OK;
}

enum shoal_status shoal_reducer_set_noise_average(struct shoal_reducer *reducer, const struct shoal_noise_average *average)
{
    char error[FUSION_TEXT_MAX];
    FUSION_TRY(noise_check(reducer, "shoal_reducer_set_noise_average", average));
    if (shoal_noise_check(average, error, sizeof error) != SHOAL_OK)
        return fusion_refuse(reducer, SHOAL_ERR_ARGUMENT, "shoal_reducer_set_noise_average: %.400s", error);
    shoal_struct_copy_in(&reducer->noise->average, average, sizeof *average);
    reducer->noise->average.window = reducer->options.noise_window;
    return SHOAL_OK;
}
