/* The noise scale and factors of learning rates: against sums that are computed in two passes, against gradients whose noise is
 * known, and at their limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference.h"
#include "shoal/scaling.h"

#define STEPS_MAX 400

static double uniform(uint64_t *random)
{
    return ((double)(reference_random(random) >> 11) + 0.5) / 0x1p53;
}

static double normal(uint64_t *random)
{
    const double radius = sqrt(-2 * log(uniform(random))), angle = 2 * acos(-1.0) * uniform(random);
    return radius * cos(angle);
}

static void assert_near(double got, double wanted, double relative)
{
    const double off = fabs(got - wanted);
    if (!(off <= relative * fabs(wanted) || off <= 1e-300))
        fail_msg("%.17g, not %.17g", got, wanted);
}

/* ---- One step ------------------------------------------------------------------------------------------------------------ */

static struct shoal_noise_step step_of(double small, double small_squared, double big, double big_squared)
{
    struct shoal_noise_step step = SHOAL_NOISE_STEP_INIT;
    step.small_batch = small;
    step.small_squared = small_squared;
    step.big_batch = big;
    step.big_squared = big_squared;
    return step;
}

/* |G|^2 is 3 and tr(S) 20, and both norms are exactly as expected. */
static void a_step_gives_both_back(void **state)
{
    (void)state;
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    const struct shoal_noise_step step = step_of(4, 3 + 20.0 / 4, 12, 3 + 20.0 / 12);
    assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
    assert_near(average.squared, 3, 1e-14);
    assert_near(average.variance, 20, 1e-14);
    assert_true(average.steps == 1 && average.batch == 12 && average.weight == 1 && average.squared_spread == 0);
}

/* ---- Averages, against sums in two passes -------------------------------------------------------------------------------- */

struct sums {
    double weight, squares, x, y, xx, xy, yy; /* the averages, and the variances of the averages */
};

static struct sums sum_up(const double *x, const double *y, size_t count, double window)
{
    struct sums sums = {0};
    double weights[STEPS_MAX];
    for (size_t i = 0; i < count; i++) {
        weights[i] = pow(1 - 1 / window, (double)(count - 1 - i));
        sums.weight += weights[i];
        sums.squares += weights[i] * weights[i];
        sums.x += weights[i] * x[i];
        sums.y += weights[i] * y[i];
    }
    sums.x /= sums.weight;
    sums.y /= sums.weight;
    for (size_t i = 0; i < count; i++) {
        sums.xx += weights[i] * (x[i] - sums.x) * (x[i] - sums.x);
        sums.xy += weights[i] * (x[i] - sums.x) * (y[i] - sums.y);
        sums.yy += weights[i] * (y[i] - sums.y) * (y[i] - sums.y);
    }
    const double effective = sums.weight * sums.weight / sums.squares, share = 1 / (sums.weight * (effective - 1));
    sums.xx *= share;
    sums.xy *= share;
    sums.yy *= share;
    return sums;
}

/* How far y - q x is from 0, in its own standard deviations, for an end of the range. */
static double deviations(const struct sums *sums, double q)
{
    return fabs(sums->y - q * sums->x) / sqrt(sums->yy - 2 * q * sums->xy + q * q * sums->xx);
}

static void check_estimate(const struct shoal_noise *noise, const struct sums *sums)
{
    const double ratio = sums->y / sums->x;
    assert_int_equal(noise->state, isfinite(noise->high) ? SHOAL_NOISE_KNOWN : SHOAL_NOISE_UNBOUNDED);
    assert_near(noise->squared, sums->x, 1e-9);
    assert_near(noise->variance, sums->y, 1e-9);
    assert_near(noise->squared_error, sqrt(sums->xx), 1e-9);
    assert_near(noise->variance_error, sqrt(sums->yy), 1e-9);
    if (noise->state == SHOAL_NOISE_UNBOUNDED) {
        assert_true(isinf(noise->error) && isinf(noise->scale) == (sums->x <= 0));
        if (sums->x > 0)
            assert_near(noise->scale, fmax(ratio, 0), 1e-8);
        assert_true(sums->x < 1.96 * sqrt(sums->xx) * 1.000001);
        return;
    }
    assert_near(noise->scale, fmax(ratio * (1 + sums->xy / (sums->x * sums->y)) / (1 + sums->xx / (sums->x * sums->x)), 0),
                1e-8);
    assert_near(noise->error, sqrt(sums->yy - 2 * ratio * sums->xy + ratio * ratio * sums->xx) / sums->x, 1e-8);
    assert_near(deviations(sums, noise->high), 1.959963984540054, 1e-6);
    if (noise->low > 0)
        assert_near(deviations(sums, noise->low), 1.959963984540054, 1e-6);
    else
        assert_true(sums->y < 1.96 * sqrt(sums->yy) * 1.000001);
}

static void averages_are_those_of_two_passes(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t random = seed;
        static double x[STEPS_MAX], y[STEPS_MAX];
        struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
        struct shoal_noise noise = SHOAL_NOISE_INIT;
        const size_t count = SHOAL_NOISE_STEPS_MIN + reference_below(&random, STEPS_MAX - SHOAL_NOISE_STEPS_MIN);
        const double scale = pow(10, (double)reference_below(&random, 60) - 30);
        average.window = 1.5 + 200 * uniform(&random);
        for (size_t i = 0; i < count; i++) {
            const double small = 1 + 30 * uniform(&random), big = small * (1.5 + 8 * uniform(&random));
            const double n_small = scale * (2 + uniform(&random)), n_big = scale * (0.5 + uniform(&random));
            const struct shoal_noise_step step = step_of(small, n_small, big, n_big);
            x[i] = (big * n_big - small * n_small) / (big - small);
            y[i] = (n_small - n_big) / (1 / small - 1 / big);
            assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
        }
        const struct sums sums = sum_up(x, y, count, average.window);
        assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
        assert_near(average.weight, sums.weight, 1e-9);
        check_estimate(&noise, &sums);
        assert_true(noise.steps == count && noise.left_out == 0);
    }
}

/* ---- Gradients whose noise is known -------------------------------------------------------------------------------------- */

#define RANKS 4
#define SIZE 24

/* The gradient of one sample is G plus normal noise of variance 1 in each of SIZE elements. Each of RANKS has `batch` samples. */
static struct shoal_noise_step draw_step(uint64_t *random, double squared, double batch)
{
    double mean[SIZE] = {0}, own = 0, all = 0;
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < SIZE; i++) {
            const double element = sqrt(squared / SIZE) + normal(random) / sqrt(batch);
            own += element * element / RANKS;
            mean[i] += element / RANKS;
        }
    }
    for (int i = 0; i < SIZE; i++)
        all += mean[i] * mean[i];
    return step_of(batch, own, RANKS * batch, all);
}

static struct shoal_noise measure(uint64_t seed, double squared, double batch, int steps)
{
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    uint64_t random = seed;
    for (int s = 0; s < steps; s++) {
        const struct shoal_noise_step step = draw_step(&random, squared, batch);
        assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
    }
    assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
    return noise;
}

/* Of 400 trainings the estimate is within two errors, and the truth in the range, as often as a normal distribution says: 95 %.
 * 400 draws of that stray by 1.1 %. The mean of the estimates is not biased by more than it strays itself. */
static void errors_are_as_large_as_they_say(void **state)
{
    (void)state;
    const double squared = 0.5, truth = SIZE / squared;
    int within = 0, in_range = 0;
    double sum = 0, errors = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        const struct shoal_noise noise = measure(seed, squared, 8, 150);
        assert_int_equal(noise.state, SHOAL_NOISE_KNOWN); /* |G|^2 is 10 of its errors from 0 */
        within += fabs(noise.scale - truth) < 2 * noise.error;
        in_range += noise.low <= truth && truth <= noise.high;
        sum += noise.scale / 400;
        errors += noise.error / 400;
    }
    assert_in_range(within, 400 * 91 / 100, 400 * 98 / 100);
    assert_in_range(in_range, 400 * 91 / 100, 400 * 98 / 100);
    assert_true(fabs(sum - truth) < 4 * errors / sqrt(400.0));
    assert_true(errors < 0.2 * truth);
}

/* A gradient that its noise hides is not given a number that looks sure. */
static void a_hidden_gradient_has_no_upper_bound(void **state)
{
    (void)state;
    int unbounded = 0;
    char text[256];
    for (uint64_t seed = 1; seed <= 50; seed++) {
        const struct shoal_noise noise = measure(seed, 1e-6, 1, 30);
        unbounded += noise.state == SHOAL_NOISE_UNBOUNDED;
        assert_true((noise.state == SHOAL_NOISE_UNBOUNDED) == (isinf(noise.high) != 0) && noise.low < SIZE / 1e-6);
        if (noise.state == SHOAL_NOISE_UNBOUNDED)
            assert_true(shoal_noise_text(&noise, text, sizeof text) > 0 && strstr(text, "your global batch has 4;"));
    }
    assert_true(unbounded > 40);
}

/* ---- Steps that are left out --------------------------------------------------------------------------------------------- */

static void steps_without_norms_are_left_out(void **state)
{
    (void)state;
    const struct shoal_noise_step bad[] = {step_of(8, 1, 8, 1),      step_of(8, NAN, 16, 1), step_of(8, 1, 16, INFINITY),
                                           step_of(8, 1e151, 16, 1), step_of(8, -1, 16, 1),  step_of(8, 1, 16, NAN)};
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT, before;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    uint64_t random = 1;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(shoal_noise_add(&average, &bad[i]), SHOAL_OK);
    assert_true(average.single == 1 && average.not_finite == 5 && average.steps == 0 && average.weight == 0);
    for (int s = 0; s < 20; s++) {
        const struct shoal_noise_step step = draw_step(&random, 1, 2);
        assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
    }
    before = average;
    assert_int_equal(shoal_noise_add(&average, &bad[1]), SHOAL_OK);
    assert_true(average.not_finite == 6 && average.squared == before.squared && average.weight == before.weight);
    assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
    assert_true(noise.state == SHOAL_NOISE_KNOWN && noise.left_out == 7 && noise.steps == 20);
}

static enum shoal_noise_state state_after(const struct shoal_noise_step *steps, size_t count)
{
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    char text[256];
    for (size_t i = 0; i < count; i++)
        assert_int_equal(shoal_noise_add(&average, &steps[i]), SHOAL_OK);
    assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
    assert_true(isnan(noise.scale) && isnan(noise.error));
    assert_true(shoal_noise_text(&noise, text, sizeof text) > 20 && strstr(text, "not known"));
    return noise.state;
}

static void an_unknown_scale_says_why(void **state)
{
    (void)state;
    const struct shoal_noise_step one = step_of(8, 1, 8, 1), nan = step_of(8, NAN, 16, 1), good = step_of(8, 2, 16, 1);
    const struct shoal_noise_step both[] = {nan, one};
    assert_int_equal(state_after(NULL, 0), SHOAL_NOISE_FEW_STEPS);
    assert_int_equal(state_after(&one, 1), SHOAL_NOISE_ONE_BATCH);
    assert_int_equal(state_after(&nan, 1), SHOAL_NOISE_NOT_FINITE);
    assert_int_equal(state_after(both, 2), SHOAL_NOISE_ONE_BATCH);
    assert_int_equal(state_after(&good, 1), SHOAL_NOISE_FEW_STEPS);
}

/* ---- Gradients without noise, and none at all ---------------------------------------------------------------------------- */

static void constant_gradients_have_no_noise(void **state)
{
    (void)state;
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT, none = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    char text[256];
    for (int s = 0; s < 10; s++) {
        const struct shoal_noise_step step = step_of(8, 4, 32, 4), zero = step_of(8, 0, 32, 0);
        assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
        assert_int_equal(shoal_noise_add(&none, &zero), SHOAL_OK);
    }
    assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
    assert_true(noise.state == SHOAL_NOISE_KNOWN && noise.scale == 0 && noise.error == 0 && noise.low == 0 && noise.high == 0);
    assert_true(shoal_noise_text(&noise, text, sizeof text) > 0 && strstr(text, "no noise"));
    assert_int_equal(shoal_noise_read(&none, &noise), SHOAL_OK);
    assert_int_equal(noise.state, SHOAL_NOISE_UNBOUNDED);
}

/* A window of one step keeps the newest one alone. */
static void one_step_has_no_error(void **state)
{
    (void)state;
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    average.window = 1;
    for (int s = 0; s < 10; s++) {
        const struct shoal_noise_step step = step_of(8, 2 + s, 32, 1);
        assert_int_equal(shoal_noise_add(&average, &step), SHOAL_OK);
    }
    assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_OK);
    assert_true(noise.state == SHOAL_NOISE_UNBOUNDED && isinf(noise.error) && noise.low == 0 && isinf(noise.squared_error));
    assert_near(noise.variance, (11 - 1) / (1.0 / 8 - 1.0 / 32), 1e-14);
}

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

static void the_sentence_has_the_cost(void **state)
{
    (void)state;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    char text[256], few[20];
    noise.state = SHOAL_NOISE_KNOWN;
    noise.scale = 1000;
    noise.error = 52;
    noise.batch = 300;
    const int length = shoal_noise_text(&noise, text, sizeof text);
    assert_string_equal(text,
                        "your global batch is 0.3 times the noise scale (1000 samples, error 52): doubling it should cost "
                        "23 % more samples and save 38 % of the steps");
    assert_int_equal(length, strlen(text));
    assert_int_equal(shoal_noise_text(&noise, few, sizeof few), length);
    assert_int_equal(strlen(few), sizeof few - 1);
    assert_true(shoal_noise_text(NULL, text, sizeof text) > 0);
}

/* ---- Bad input ----------------------------------------------------------------------------------------------------------- */

static void impossible_averages_are_refused(void **state)
{
    (void)state;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    const struct shoal_noise_step good = step_of(8, 2, 16, 1);
    char error[200];
    for (int fault = 0; fault < 9; fault++) {
        struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
        double *fields[] = {&average.window, &average.weight,        &average.squared, &average.variance_spread,
                            &average.window, &average.common_spread, &average.weight,  &average.batch};
        const double values[] = {0.5, -1, NAN, INFINITY, NAN, NAN, 3, -2};
        if (fault < 8)
            *fields[fault] = values[fault];
        else
            average.steps = 4; /* without weights */
        error[0] = 0;
        assert_int_equal(shoal_noise_check(&average, error, sizeof error), SHOAL_ERR_ARGUMENT);
        assert_true(strlen(error) > 20);
        assert_int_equal(shoal_noise_add(&average, &good), SHOAL_ERR_ARGUMENT);
        assert_int_equal(shoal_noise_read(&average, &noise), SHOAL_ERR_ARGUMENT);
    }
    assert_int_equal(shoal_noise_check(NULL, NULL, 0), SHOAL_ERR_ARGUMENT);
}

static void impossible_batches_are_refused(void **state)
{
    (void)state;
    const double bad[] = {0, -1, NAN, INFINITY};
    struct shoal_noise_average average = SHOAL_NOISE_AVERAGE_INIT;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct shoal_noise_step small = step_of(bad[i], 1, 8, 1), big = step_of(8, 1, bad[i], 1);
        assert_int_equal(shoal_noise_add(&average, &small), SHOAL_ERR_ARGUMENT);
        assert_int_equal(shoal_noise_add(&average, &big), SHOAL_ERR_ARGUMENT);
        assert_true(isnan(shoal_scaling_gain(bad[i], 8, 1)) && isnan(shoal_scaling_gain(8, bad[i], 1)));
    }
    assert_int_equal(shoal_noise_add(&average, NULL), SHOAL_ERR_ARGUMENT);
    assert_true(average.steps + average.single + average.not_finite == 0);
    assert_true(isnan(shoal_scaling_gain(8, 16, -1)) && isnan(shoal_scaling_gain(8, 16, NAN)));
}

/* ---- Gains --------------------------------------------------------------------------------------------------------------- */

/* The formula of the paper, in its own terms. */
static void the_gain_is_adascales(void **state)
{
    (void)state;
    uint64_t random = 7;
    for (int i = 0; i < 1000; i++) {
        const double old = 1 + 500 * uniform(&random), k = 0.1 + 40 * uniform(&random);
        const double trace = 100 * uniform(&random), squared = uniform(&random);
        const double s2 = trace / old, gain = shoal_scaling_gain(old, k * old, trace / squared);
        assert_near(gain, (s2 + squared) / (s2 / k + squared), 1e-12);
        assert_true(gain >= fmin(1, k) * (1 - 1e-12) && gain <= fmax(1, k) * (1 + 1e-12));
    }
    assert_true(shoal_scaling_gain(32, 256, 0) == 1);
    assert_true(shoal_scaling_gain(32, 256, INFINITY) == 8);
    assert_true(shoal_scaling_gain(32, 32, 100) == 1);
}

static void moments_keep_their_half_life(void **state)
{
    (void)state;
    assert_near(shoal_scaling_beta(0.999, 8), 0.992, 1e-15);
    assert_near(shoal_scaling_beta(0.9, 1), 0.9, 1e-15);
    assert_true(shoal_scaling_beta(0.9, 11) < 0);
}

/* ---- A training ---------------------------------------------------------------------------------------------------------- */

static struct shoal_scaling_rate next_rate(struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise)
{
    struct shoal_scaling_rate rate = SHOAL_SCALING_RATE_INIT, look = SHOAL_SCALING_RATE_INIT;
    char error[200] = "";
    assert_int_equal(shoal_scaling_look(scaling, batch, noise, &look, error, sizeof error), SHOAL_OK);
    assert_int_equal(shoal_scaling_step(scaling, batch, noise, &rate, error, sizeof error), SHOAL_OK);
    assert_true(look.factor == rate.factor && look.gain == rate.gain);
    return rate;
}

static void rules_differ_in_the_rate_alone(void **state)
{
    (void)state;
    const struct {
        enum shoal_scaling_rule rule;
        double factor;
    } rules[] = {{SHOAL_SCALING_NONE, 1}, {SHOAL_SCALING_LINEAR, 4}, {SHOAL_SCALING_SQUARE_ROOT, 2}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        struct shoal_scaling scaling = SHOAL_SCALING_INIT;
        scaling.rule = rules[i].rule;
        scaling.old_batch = 16;
        for (int s = 0; s < 3; s++)
            assert_near(next_rate(&scaling, 64, NULL).factor, rules[i].factor, 1e-15);
        assert_true(scaling.iterations == 12 && scaling.steps == 3);
    }
}

/* Ten steps of the old batch are warm-up: the factor rises in a line, and a step of the new batch is four of them. */
static void a_warmup_counts_steps_of_the_old_batch(void **state)
{
    (void)state;
    const double factors[] = {1, 1 + 3 * 0.4, 1 + 3 * 0.8, 4, 4};
    struct shoal_scaling scaling = SHOAL_SCALING_INIT;
    scaling.old_batch = 16;
    scaling.warmup = 10;
    for (size_t s = 0; s < sizeof factors / sizeof *factors; s++)
        assert_near(next_rate(&scaling, 64, NULL).factor, factors[s], 1e-15);
}

static void adascale_counts_by_the_gain(void **state)
{
    (void)state;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    struct shoal_scaling sgd = SHOAL_SCALING_INIT, adam = SHOAL_SCALING_INIT;
    sgd.rule = adam.rule = SHOAL_SCALING_ADASCALE;
    sgd.old_batch = adam.old_batch = 16;
    adam.is_adaptive = 1;
    assert_true(next_rate(&sgd, 64, &noise).factor == 1 && sgd.iterations == 1); /* not known yet */
    noise.state = SHOAL_NOISE_KNOWN;
    noise.scale = 80;
    const double gain = 4.0 * (80 + 16) / (80 + 64);
    assert_near(next_rate(&sgd, 64, &noise).factor, gain, 1e-15);
    assert_near(sgd.iterations, 1 + gain, 1e-15);
    assert_near(next_rate(&adam, 64, &noise).factor, sqrt(gain), 1e-15);
    assert_near(adam.iterations, gain, 1e-15);
    noise.state = SHOAL_NOISE_UNBOUNDED;
    noise.scale = INFINITY;
    assert_true(next_rate(&sgd, 64, &noise).factor == 4);
    noise.state = SHOAL_NOISE_FEW_STEPS;
    noise.scale = NAN;
    assert_true(next_rate(&sgd, 8, &noise).factor == 0.5); /* a smaller batch: the gain that is sure */
}

static void impossible_trainings_are_refused(void **state)
{
    (void)state;
    struct shoal_noise noise = SHOAL_NOISE_INIT;
    char error[200];
    for (int fault = 0; fault < 8; fault++) {
        struct shoal_scaling scaling = SHOAL_SCALING_INIT;
        struct shoal_scaling_rate rate = SHOAL_SCALING_RATE_INIT;
        scaling.old_batch = fault == 0 ? 0 : fault == 1 ? NAN : 16;
        scaling.rule = fault == 2 ? (enum shoal_scaling_rule)9 : fault == 3 ? SHOAL_SCALING_ADASCALE : SHOAL_SCALING_LINEAR;
        scaling.warmup = fault == 4 ? -1 : 0;
        scaling.iterations = fault == 5 ? INFINITY : 0;
        scaling.struct_bytes = fault == 7 ? 0 : sizeof scaling;
        error[0] = 0;
        assert_int_equal(
            shoal_scaling_step(&scaling, fault == 6 ? -4 : 64, fault == 3 ? NULL : &noise, &rate, error, sizeof error),
            SHOAL_ERR_ARGUMENT);
        assert_true(strlen(error) > 20 && scaling.steps == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_gives_both_back),
        cmocka_unit_test(averages_are_those_of_two_passes),
        cmocka_unit_test(errors_are_as_large_as_they_say),
        cmocka_unit_test(a_hidden_gradient_has_no_upper_bound),
        cmocka_unit_test(steps_without_norms_are_left_out),
        cmocka_unit_test(an_unknown_scale_says_why),
        cmocka_unit_test(constant_gradients_have_no_noise),
        cmocka_unit_test(one_step_has_no_error),
        cmocka_unit_test(the_sentence_has_the_cost),
        cmocka_unit_test(impossible_averages_are_refused),
        cmocka_unit_test(impossible_batches_are_refused),
        cmocka_unit_test(the_gain_is_adascales),
        cmocka_unit_test(moments_keep_their_half_life),
        cmocka_unit_test(rules_differ_in_the_rate_alone),
        cmocka_unit_test(a_warmup_counts_steps_of_the_old_batch),
        cmocka_unit_test(adascale_counts_by_the_gain),
        cmocka_unit_test(impossible_trainings_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
