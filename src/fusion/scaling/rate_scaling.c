/* Factors of learning rates for other batches. See the public header. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/floats.h"
#include "fusion/scaling/impossible.h"
#include "shoal/scaling.h"

enum shoal_status fusion_impossible(char *error, size_t error_bytes, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (error && error_bytes)
        vsnprintf(error, error_bytes, format, args);
    va_end(args);
    return SHOAL_ERR_ARGUMENT;
}

/* ---- Formulas ------------------------------------------------------------------------------------------------------------ */

double shoal_scaling_gain(double old_batch, double batch, double noise_scale)
{
    SHOAL_DEFAULT_FLOATS;
    double gain = batch / old_batch;
    if (!fusion_is_batch(old_batch) || !fusion_is_batch(batch) || !(noise_scale >= 0))
        gain = NAN;
    else if (fusion_is_finite(noise_scale))
        gain *= (noise_scale + old_batch) / (noise_scale + batch);
    SHOAL_FLOATS_PIN(gain);
    return gain;
}

double shoal_scaling_beta(double beta, double k)
{
    SHOAL_DEFAULT_FLOATS;
    double other = 1 - k * (1 - beta);
    SHOAL_FLOATS_PIN(other);
    return other;
}

/* ---- A training ---------------------------------------------------------------------------------------------------------- */

static enum shoal_status scaling_check(const struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise,
                                       char *error, size_t error_bytes)
{
    if ((unsigned)scaling->rule > SHOAL_SCALING_ADASCALE)
        return fusion_impossible(error, error_bytes, "rule is %d, which is none of enum shoal_scaling_rule",
                                 (int)scaling->rule);
    if (!fusion_is_batch(scaling->old_batch))
        return fusion_impossible(error, error_bytes, "old_batch is %g, but must be a number of samples above 0",
                                 scaling->old_batch);
    if (!fusion_is_batch(batch))
        return fusion_impossible(error, error_bytes, "the batch is %g, but must be a number of samples above 0", batch);
    if (!(scaling->warmup >= 0) || !fusion_is_finite(scaling->warmup))
        return fusion_impossible(error, error_bytes, "warmup is %g, but must be a number of steps from 0", scaling->warmup);
    if (!(scaling->iterations >= 0) || !fusion_is_finite(scaling->iterations))
        return fusion_impossible(error, error_bytes, "iterations is %g, but must be a number of steps from 0",
                                 scaling->iterations);
    if (scaling->rule == SHOAL_SCALING_ADASCALE && !shoal_struct_bytes(noise))
        return fusion_impossible(error, error_bytes,
                                 "ADASCALE needs the noise scale: pass what shoal_noise_read or "
                                 "shoal_reducer_noise has written");
    return SHOAL_OK;
}

/* The gain that is sure although the noise scale is not known. */
static double known_noise(const struct shoal_noise *noise, double k)
{
    struct shoal_noise own = SHOAL_NOISE_INIT;
    shoal_struct_copy_in(&own, noise, sizeof own);
    if (own.state == SHOAL_NOISE_KNOWN || own.state == SHOAL_NOISE_UNBOUNDED)
        return own.scale;
    return k < 1 ? INFINITY : 0;
}

static struct shoal_scaling_rate rate_of(const struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise)
{
    SHOAL_DEFAULT_FLOATS;
    struct shoal_scaling_rate rate = SHOAL_SCALING_RATE_INIT;
    const double k = batch / scaling->old_batch;
    rate.gain = rate.factor = k;
    if (scaling->rule == SHOAL_SCALING_NONE)
        rate.factor = 1;
    else if (scaling->rule == SHOAL_SCALING_ADASCALE)
        rate.gain = rate.factor = shoal_scaling_gain(scaling->old_batch, batch, known_noise(noise, k));
    if (scaling->rule == SHOAL_SCALING_SQUARE_ROOT || (scaling->rule == SHOAL_SCALING_ADASCALE && scaling->is_adaptive))
        rate.factor = fusion_square_root(rate.factor);
    if (scaling->iterations < scaling->warmup)
        rate.factor = 1 + (rate.factor - 1) * (scaling->iterations / scaling->warmup);
    return rate;
}

enum shoal_status shoal_scaling_look(const struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise,
                                     struct shoal_scaling_rate *rate_out, char *error, size_t error_bytes)
{
    struct shoal_scaling own = SHOAL_SCALING_INIT;
    if (!shoal_struct_bytes(scaling) || !shoal_struct_bytes(rate_out))
        return fusion_impossible(error, error_bytes,
                                 "scaling or rate_out is NULL, or its struct_bytes is not set: use "
                                 "SHOAL_SCALING_INIT and SHOAL_SCALING_RATE_INIT");
    shoal_struct_copy_in(&own, scaling, sizeof own);
    FUSION_TRY(scaling_check(&own, batch, noise, error, error_bytes));
    const struct shoal_scaling_rate rate = rate_of(&own, batch, noise);
    shoal_struct_copy_out(rate_out, &rate, sizeof rate);
    return SHOAL_OK;
}

enum shoal_status shoal_scaling_step(struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise,
                                     struct shoal_scaling_rate *rate_out, char *error, size_t error_bytes)
{
    struct shoal_scaling own = SHOAL_SCALING_INIT;
    FUSION_TRY(shoal_scaling_look(scaling, batch, noise, rate_out, error, error_bytes));
    SHOAL_DEFAULT_FLOATS;
    shoal_struct_copy_in(&own, scaling, sizeof own);
    own.iterations += rate_of(&own, batch, noise).gain;
    own.steps++;
    shoal_struct_copy_out(scaling, &own, sizeof own);
    return SHOAL_OK;
}
