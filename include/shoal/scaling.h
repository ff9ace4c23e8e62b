/* Batch sizes and learning rates: how noisy gradients are, what a larger batch costs, and which rate fits it. This header is
 * the manual. It builds on shoal.h, but needs no context and no communicator: the functions only compute, and ranks that pass
 * the same numbers get the same bits. It is newer than shoal.h and may still change from one version to the next.
 *
 *     the gradient's squared norm,    shoal_noise_add     an average      shoal_noise_read     the noise scale, with its error
 *     over two batch sizes         ------------------->   over steps   ------------------->    shoal_noise_text: one sentence
 *                                                                               |
 *     the batch that the learning rate was tuned for                            v
 *     the batch of this step       -----------------------------------> shoal_scaling_step --> a factor for the rate
 *
 * A reducer measures the norms in each step and keeps the average (gradients.h, options.noise_window). docs/batch-size.md is
 * the guide.
 *
 * All functions are reentrant. A function that writes a struct allows concurrent calls on other structs only. */
#ifndef SHOAL_SCALING_H
#define SHOAL_SCALING_H

#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. The noise scale ------------------------------------------------------------------------------------------------- */

/* Let G be the gradient of the loss over all possible samples, and S the covariance matrix of the gradient of one sample. The
 * gradient of B samples then has the expected squared norm |G|^2 + tr(S) / B. The *noise scale* is tr(S) / |G|^2, a number of
 * samples: at a batch of that size, noise and gradient are equally large. Far below it twice the batch saves nearly half of
 * the steps; far above it twice the batch saves nearly nothing (McCandlish et al. 2018, arXiv 1812.06162).
 *
 * From the squared norms n of two batch sizes b < B follow unbiased estimates (appendix A.1 there):
 *
 *     |G|^2 = (B n_B - b n_b) / (B - b)          tr(S) = (n_b - n_B) / (1 / b - 1 / B)
 *
 * The estimates of one step are very noisy, and that of |G|^2 may be negative. So each is averaged over many steps, with
 * weights that fall by a factor of 1 - 1 / window for each step. The noise scale is the quotient of the averages. */

/* The two squared norms of one step. Begins as SHOAL_NOISE_STEP_INIT. */
struct shoal_noise_step {
    size_t struct_bytes;
    double small_batch;   /* b, samples; above 0 */
    double small_squared; /* n_b: the squared norm of a gradient of that many samples, or the mean of several such norms */
    double big_batch;     /* B */
    double big_squared;   /* n_B */
};
#define SHOAL_NOISE_STEP_INIT                       \
    {                                               \
        sizeof(struct shoal_noise_step), 0, 0, 0, 0 \
    }

/* Averages over steps. The fields may be saved with a checkpoint and restored from it; a program need not read them. Begins as
 * SHOAL_NOISE_AVERAGE_INIT. */
struct shoal_noise_average {
    size_t struct_bytes;
    double window;                 /* steps, at least 1: a step weighs 1 / e of the newest one after that many */
    double weight, weight_squared; /* sums of the steps' weights, and of the squares of these */
    double squared, variance;      /* averages of |G|^2 and of tr(S) */
    double squared_spread;         /* weighted sums of squared deviations of |G|^2, of tr(S), and of their products */
    double variance_spread;
    double common_spread;
    double batch;        /* B of the newest step that was measured */
    uint64_t steps;      /* that were measured */
    uint64_t single;     /* left out: there was only one batch size, as with one active rank */
    uint64_t not_finite; /* left out: a norm was NaN, infinite or above SHOAL_NOISE_SQUARED_MAX */
};
#define SHOAL_NOISE_AVERAGE_INIT                                                 \
    {                                                                            \
        sizeof(struct shoal_noise_average), 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

#define SHOAL_NOISE_SQUARED_MAX 1e150 /* products of two such norms still fit into a double */
#define SHOAL_NOISE_STEPS_MIN 8       /* the spread of fewer steps is not reliable */

/* Adds a step. A step that cannot be measured is counted in `single` or `not_finite` and changes nothing else. Returns
 * ERR_ARGUMENT, and changes nothing, if a batch is not above 0 or not finite, or if shoal_noise_check refuses the average. */
SHOAL_CALL shoal_noise_add(struct shoal_noise_average *average, const struct shoal_noise_step *step);

/* Returns ERR_ARGUMENT if a field of the average is impossible, as in a damaged checkpoint: a window below 1, a number that is
 * not finite, a negative sum. `error`, which may be NULL, then receives one line with the reason. */
SHOAL_CALL shoal_noise_check(const struct shoal_noise_average *average, char *error, size_t error_bytes);

/* What is known of the noise scale: name, number, meaning. */
#define SHOAL_NOISE_STATE_LIST(X)                                                                            \
    X(NOISE_KNOWN, 0, "the noise scale is known")                                                            \
    X(NOISE_UNBOUNDED, 1, "the gradient cannot be told from its noise: the noise scale has no upper bound")  \
    X(NOISE_FEW_STEPS, 2, "too few steps have been measured")                                                \
    X(NOISE_ONE_BATCH, 3,                                                                                    \
      "there is only one batch size, because one rank alone has gradients: the noise scale needs two ranks") \
    X(NOISE_NOT_FINITE, 4, "no step had finite gradients")

enum shoal_noise_state {
#define SHOAL_NOISE_STATE_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_NOISE_STATE_LIST(SHOAL_NOISE_STATE_ENUM)
#undef SHOAL_NOISE_STATE_ENUM
};

/* An estimate. Begins as SHOAL_NOISE_INIT. */
struct shoal_noise {
    size_t struct_bytes;
    enum shoal_noise_state state;
    uint64_t steps;    /* that were measured, since the average began */
    uint64_t left_out; /* steps that could not be measured */
    double scale;      /* samples. UNBOUNDED: the plain quotient, infinite if |G|^2 is not above 0. NaN if nothing is known */
    double error;      /* standard error of scale; infinite if UNBOUNDED, NaN if nothing is known */
    double low, high;  /* scale is in this range with a probability of 95 %; high may be infinite */
    double squared;    /* the estimate of |G|^2, and its standard error */
    double squared_error;
    double variance; /* the estimate of tr(S), for one sample, and its standard error */
    double variance_error;
    double batch; /* samples of the newest step that was measured, over all ranks */
};
#define SHOAL_NOISE_INIT                                                                   \
    {                                                                                      \
        sizeof(struct shoal_noise), SHOAL_NOISE_FEW_STEPS, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* Computes the estimate. The quotient of two averages is a ratio estimator. Its standard error is that of the delta method
 * (Cochran, Sampling Techniques, 1977, section 6.3): from the spread of the steps, divided by their effective number. That
 * number is the squared sum of the weights over the sum of their squares (Kish, Survey Sampling, 1965). The bias is removed to
 * first order (Beale 1962, as in Tin, J. Am. Stat. Assoc. 60, 1965). The range is that of Fieller's theorem (J. R. Stat. Soc. B
 * 16, 1954), which has no upper end while |G|^2 may be 0. All three assume that steps are independent, as steps with different
 * samples are. A change of the noise scale within the window counts as spread. Returns ERR_ARGUMENT if shoal_noise_check
 * refuses the average. */
SHOAL_CALL shoal_noise_read(const struct shoal_noise_average *average, struct shoal_noise *noise_out);

/* Writes one line for people, at most bytes - 1 bytes of it: the batch in units of the noise scale, and what twice that batch
 * would cost. If the noise scale is not known, the line says why. Returns the length of the whole line, as snprintf does. */
SHOAL_API int shoal_noise_text(const struct shoal_noise *noise, char *text, size_t bytes);

/* ---- 2. Learning rates --------------------------------------------------------------------------------------------------- */

/* A rate that was tuned for one batch size needs a factor at another one. k is the new batch over the old one: */
#define SHOAL_SCALING_RULE_LIST(X)                                                                               \
    X(SCALING_NONE, 0, "keeps the rate")                                                                         \
    X(SCALING_LINEAR, 1, "multiplies the rate by k; for SGD and momentum (Goyal et al. 2017, arXiv 1706.02677)") \
    X(SCALING_SQUARE_ROOT, 2,                                                                                    \
      "multiplies the rate by the root of k; for Adam and its like (Krizhevsky 2014, arXiv 1404.5997; "          \
      "Malladi et al. 2022, arXiv 2205.10287)")                                                                  \
    X(SCALING_ADASCALE, 3,                                                                                       \
      "multiplies the rate by the gain, which follows the measured noise (Johnson et al. 2020, "                 \
      "arXiv 2007.05105)")

enum shoal_scaling_rule {
#define SHOAL_SCALING_RULE_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_SCALING_RULE_LIST(SHOAL_SCALING_RULE_ENUM)
#undef SHOAL_SCALING_RULE_ENUM
};

/* Returns AdaScale's gain: how many steps with the old batch one step with the new batch is worth, from 1 to k.
 *
 *     gain = (s^2 + m^2) / (s^2 / k + m^2)          s^2 = tr(S) / old batch,  m^2 = |G|^2
 *
 * With N for the noise scale this is k (N + old) / (N + new). So to make the same progress, the new batch needs k / gain times
 * as many samples, and 1 / gain times as many steps. noise_scale is from 0 to infinity. Returns NaN if a batch is not above 0
 * and finite, or if noise_scale is negative or NaN. */
SHOAL_API double shoal_scaling_gain(double old_batch, double batch, double noise_scale);

/* Returns a moment's decay rate for k times the batch: 1 - k (1 - beta). If the rate is also multiplied by the root of k, and
 * epsilon divided by that root, Adam keeps its course (Malladi et al. 2022, arXiv 2205.10287). The result must be below 1,
 * and is impossible below 0: the rule needs k <= 1 / (1 - beta). */
SHOAL_API double shoal_scaling_beta(double beta, double k);

/* A training whose learning rate and schedule were tuned for old_batch, and which runs with another batch. Begins as
 * SHOAL_SCALING_INIT. The last two fields change in each step; a checkpoint holds them. */
struct shoal_scaling {
    size_t struct_bytes;
    enum shoal_scaling_rule rule;
    double old_batch;  /* samples; above 0 */
    int is_adaptive;   /* 1: the optimizer divides by the size of gradients, as Adam does. ADASCALE then takes the root of the
                          gain for the rate */
    double warmup;     /* steps of the old batch in which the factor goes from 1 to its full value; 0: at once */
    double iterations; /* steps of the old batch that the training is worth so far. Look the schedule up there: it may have been
                          written for steps of the old batch, and ends when iterations reaches their number */
    uint64_t steps;
};
#define SHOAL_SCALING_INIT                                                \
    {                                                                     \
        sizeof(struct shoal_scaling), SHOAL_SCALING_LINEAR, 0, 0, 0, 0, 0 \
    }

/* What the next step needs. Begins as SHOAL_SCALING_RATE_INIT. */
struct shoal_scaling_rate {
    size_t struct_bytes;
    double factor; /* for the rate that the schedule has at `iterations` */
    double gain;   /* by which the step raises `iterations`: k, or with ADASCALE the gain */
};
#define SHOAL_SCALING_RATE_INIT                 \
    {                                           \
        sizeof(struct shoal_scaling_rate), 1, 1 \
    }

/* Computes the factor of the next step, which has `batch` samples over all ranks. noise may be NULL, except with ADASCALE. A
 * noise scale that is not known counts as 0: the gain is then 1 (or k, if k is below 1). Returns ERR_ARGUMENT if a field or the
 * batch is impossible; `error`, which may be NULL, then receives one line with the reason. */
SHOAL_CALL shoal_scaling_look(const struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise,
                              struct shoal_scaling_rate *rate_out, char *error, size_t error_bytes);

/* Like shoal_scaling_look, but also counts the step. Call it once for each step of the optimizer. */
SHOAL_CALL shoal_scaling_step(struct shoal_scaling *scaling, double batch, const struct shoal_noise *noise,
                              struct shoal_scaling_rate *rate_out, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
