/* The noise scale: averages of two estimates over steps, and their quotient with its error. See the public header. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/floats.h"
#include "fusion/fusion.h"
#include "fusion/scaling/impossible.h"
#include "shoal/scaling.h"

#define NORMAL_95 1.959963984540054 /* 95 % of a normal distribution are within this many standard deviations */
#define NUMBER_MAX 32

static double from_zero(double x)
{
    return x > 0 ? x : 0;
}

/* ---- The average --------------------------------------------------------------------------------------------------------- */

static const char *average_fault(const struct shoal_noise_average *average)
{
    const double sums[] = {average->weight, average->weight_squared, average->squared_spread, average->variance_spread,
                           average->batch};
    const double averages[] = {average->squared, average->variance, average->common_spread};
    if (!(average->window >= 1) || !fusion_is_finite(average->window))
        return "window is below 1, or not finite";
    for (size_t i = 0; i < FUSION_COUNT_OF(sums); i++)
        if (!(sums[i] >= 0) || !fusion_is_finite(sums[i]))
            return "a weight, a spread or the batch is negative, or not finite";
    for (size_t i = 0; i < FUSION_COUNT_OF(averages); i++)
        if (!fusion_is_finite(averages[i]))
            return "an average is not finite";
    if ((average->steps > 0) != (average->weight > 0) || (average->steps > 0) != (average->weight_squared > 0))
        return "the weights do not fit the number of steps";
    return NULL;
}

enum shoal_status shoal_noise_check(const struct shoal_noise_average *average, char *error, size_t error_bytes)
{
    struct shoal_noise_average own = SHOAL_NOISE_AVERAGE_INIT;
    if (!shoal_struct_bytes(average))
        return fusion_impossible(error, error_bytes,
                                 "the average is NULL, or its struct_bytes is not set: use SHOAL_NOISE_AVERAGE_INIT");
    shoal_struct_copy_in(&own, average, sizeof own);
    const char *fault = average_fault(&own);
    return fault ? fusion_impossible(error, error_bytes, "a noise average is impossible: %s", fault) : SHOAL_OK;
}

/* West, Comm. ACM 22, 1979: averages and sums of squared deviations in one pass, here with weights that fall. */
static void average_take(struct shoal_noise_average *average, double squared, double variance)
{
    const double keep = 1 - 1 / average->window;
    const double weight = keep * average->weight + 1;
    const double squared_off = squared - average->squared, variance_off = variance - average->variance;
    average->squared += squared_off / weight;
    average->variance += variance_off / weight;
    const double left = variance - average->variance;
    average->squared_spread = keep * average->squared_spread + squared_off * (squared - average->squared);
    average->common_spread = keep * average->common_spread + squared_off * left;
    average->variance_spread = keep * average->variance_spread + variance_off * left;
    average->weight = weight;
    average->weight_squared = keep * keep * average->weight_squared + 1;
    average->steps++;
}

static bool is_measurable(double squared)
{
    return squared >= 0 && squared <= SHOAL_NOISE_SQUARED_MAX; /* NaN is not */
}

static void average_add(struct shoal_noise_average *average, const struct shoal_noise_step *step)
{
    SHOAL_DEFAULT_FLOATS;
    const double small = step->small_batch, big = step->big_batch;
    const double squared = (big * step->big_squared - small * step->small_squared) / (big - small);
    const double variance = (step->small_squared - step->big_squared) / (1 / small - 1 / big);
    if (!(big > small))
        average->single++;
    else if (!is_measurable(step->small_squared) || !is_measurable(step->big_squared) || !is_measurable(fabs(squared)) ||
             !is_measurable(fabs(variance)))
        average->not_finite++;
    else {
        average_take(average, squared, variance);
        average->batch = big;
    }
}

enum shoal_status shoal_noise_add(struct shoal_noise_average *average, const struct shoal_noise_step *step)
{
    struct shoal_noise_average own = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise_step given = SHOAL_NOISE_STEP_INIT;
    const enum shoal_status status = shoal_noise_check(average, NULL, 0);
    if (status != SHOAL_OK || !shoal_struct_bytes(step))
        return SHOAL_ERR_ARGUMENT;
    shoal_struct_copy_in(&own, average, sizeof own);
    shoal_struct_copy_in(&given, step, sizeof given);
    if (!fusion_is_batch(given.small_batch) || !fusion_is_batch(given.big_batch))
        return SHOAL_ERR_ARGUMENT;
    average_add(&own, &given);
    shoal_struct_copy_out(average, &own, sizeof own);
    return SHOAL_OK;
}

/* ---- The estimate -------------------------------------------------------------------------------------------------------- */

/* Two averages with their variances and covariance, as averages. */
struct pair {
    double x, y, xx, xy, yy;
};

/* A window of one step has no spread, so nothing is known of its error. */
static struct pair pair_of(const struct shoal_noise_average *average)
{
    const double effective = average->weight * average->weight / average->weight_squared;
    const double share = 1 / (average->weight * (effective - 1));
    if (!(effective > 1))
        return (struct pair){average->squared, average->variance, INFINITY, 0, INFINITY};
    return (struct pair){average->squared, average->variance, average->squared_spread * share, average->common_spread * share,
                         average->variance_spread * share};
}

/* Fieller: the quotients q for which y - q x is within NORMAL_95 of its own standard deviations from 0. They are between the
 * roots of a q^2 - 2 b q + c if a is positive; otherwise there is no largest one. */
static void set_range(const struct pair *pair, struct shoal_noise *noise)
{
    const double z = NORMAL_95 * NORMAL_95;
    const double a = pair->x * pair->x - z * pair->xx, b = pair->x * pair->y - z * pair->xy,
                 c = pair->y * pair->y - z * pair->yy;
    const double root = fusion_square_root(from_zero(b * b - a * c));
    noise->high = a > 0 && pair->x > 0 ? from_zero((b + root) / a) : INFINITY;
    /* The smaller root, in the form that does not divide by a, which may be near 0. */
    noise->low = c > 0 && b + root > 0 ? c / (b + root) : 0;
}

static void set_scale(const struct pair *pair, struct shoal_noise *noise)
{
    const double x = pair->x, ratio = pair->y / x;
    set_range(pair, noise);
    noise->squared = x;
    noise->squared_error = fusion_square_root(pair->xx);
    noise->variance = pair->y;
    noise->variance_error = fusion_square_root(pair->yy);
    noise->state = fusion_is_finite(noise->high) ? SHOAL_NOISE_KNOWN : SHOAL_NOISE_UNBOUNDED;
    noise->scale = x > 0 ? from_zero(ratio) : INFINITY;
    noise->error = INFINITY;
    if (noise->state == SHOAL_NOISE_KNOWN) {
        noise->scale = from_zero((pair->y * x + pair->xy) / (x * x + pair->xx));
        noise->error = fusion_square_root(from_zero(pair->yy - 2 * ratio * pair->xy + ratio * ratio * pair->xx)) / x;
    }
}

static enum shoal_noise_state why_unknown(const struct shoal_noise_average *average)
{
    if (average->steps > 0 || average->single + average->not_finite == 0)
        return SHOAL_NOISE_FEW_STEPS;
    return average->single > 0 ? SHOAL_NOISE_ONE_BATCH : SHOAL_NOISE_NOT_FINITE;
}

enum shoal_status shoal_noise_read(const struct shoal_noise_average *average, struct shoal_noise *noise_out)
{
    struct shoal_noise_average own = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    const enum shoal_status status = shoal_noise_check(average, NULL, 0);
    if (status != SHOAL_OK || !shoal_struct_bytes(noise_out))
        return SHOAL_ERR_ARGUMENT;
    SHOAL_DEFAULT_FLOATS;
    shoal_struct_copy_in(&own, average, sizeof own);
    const struct pair pair = pair_of(&own);
    noise.steps = own.steps;
    noise.left_out = own.single + own.not_finite;
    noise.batch = own.batch;
    if (own.steps < SHOAL_NOISE_STEPS_MIN) {
        noise.state = why_unknown(&own);
        noise.scale = noise.error = noise.low = noise.high = noise.squared = noise.squared_error = noise.variance =
            noise.variance_error = NAN;
    } else
        set_scale(&pair, &noise);
    shoal_struct_copy_out(noise_out, &noise, sizeof noise);
    return SHOAL_OK;
}

/* ---- For people ---------------------------------------------------------------------------------------------------------- */

static const char *state_text(enum shoal_noise_state state)
{
    switch (state) {
#define CASE(name, number, text) \
    case SHOAL_##name:           \
        return text;
        SHOAL_NOISE_STATE_LIST(CASE)
#undef CASE
    }
    return "unknown";
}

/* Writes a number as people read it: 0.31, 42, 1234, 1.23e+07. */
static const char *number_text(double number, char text[NUMBER_MAX])
{
    const bool is_plain = number >= 10 && number < 1e6;
    snprintf(text, NUMBER_MAX, is_plain ? "%.0f" : number < 10 ? "%.2g" : "%.3g", number);
    return text;
}

static int known_text(const struct shoal_noise *noise, char *text, size_t bytes)
{
    const double gain = shoal_scaling_gain(noise->batch, 2 * noise->batch, noise->scale);
    char times[NUMBER_MAX], scale[NUMBER_MAX], error[NUMBER_MAX];
    if (noise->scale == 0)
        return snprintf(text, bytes, "gradients show no noise: a larger batch saves no steps");
    return snprintf(
        text, bytes,
        "your global batch is %s times the noise scale (%s samples, error %s): doubling it should cost %.0f %% more "
        "samples and save %.0f %% of the steps",
        number_text(noise->batch / noise->scale, times), number_text(noise->scale, scale), number_text(noise->error, error),
        100 * (2 / gain - 1), 100 * (1 - 1 / gain));
}

int shoal_noise_text(const struct shoal_noise *noise, char *text, size_t bytes)
{
    struct shoal_noise own = SHOAL_NOISE_INIT;
    char low[NUMBER_MAX], batch[NUMBER_MAX];
    if (!shoal_struct_bytes(noise))
        return snprintf(text, bytes,
                        "no noise scale: the struct is NULL, or its struct_bytes is not set: use SHOAL_NOISE_INIT");
    shoal_struct_copy_in(&own, noise, sizeof own);
    if (own.state == SHOAL_NOISE_KNOWN)
        return known_text(&own, text, bytes);
    if (own.state == SHOAL_NOISE_UNBOUNDED)
        return snprintf(text, bytes, "%s (it is above %s samples, and your global batch has %s; %" PRIu64 " steps)",
                        state_text(own.state), number_text(own.low, low), number_text(own.batch, batch), own.steps);
    if (own.state == SHOAL_NOISE_FEW_STEPS)
        return snprintf(text, bytes, "the noise scale is not known yet: %s (%" PRIu64 ", and it takes %d)",
                        state_text(own.state), own.steps, SHOAL_NOISE_STEPS_MIN);
    return snprintf(text, bytes, "the noise scale is not known: %s", state_text(own.state));
}
