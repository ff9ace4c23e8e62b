#include "advise_rate.h"

#include <math.h>
#include <shoal/scaling.h>

enum { GOYAL_BATCH = 8192, LARGE_BATCH = 32768, LAMB_BATCH = 512, NORM_SAMPLES = 32, NORM_NOTE = 16, NORM_WARNING = 8 };
static const double warmup_epochs = 5; /* in the paper of the linear rule */

/* The factor that a front end applies while it trains (shoal/scaling.h). */
static double factor_of(enum shoal_scaling_rule rule, double k)
{
    struct shoal_scaling scaling = SHOAL_SCALING_INIT;
    struct shoal_scaling_rate rate = SHOAL_SCALING_RATE_INIT;
    scaling.rule = rule;
    scaling.old_batch = 1;
    return shoal_scaling_look(&scaling, k, NULL, &rate, NULL, 0) == SHOAL_OK ? rate.factor : 0;
}

static double root_of(double k)
{
    return factor_of(SHOAL_SCALING_SQUARE_ROOT, k);
}

static struct advise_rate rate_of(double factor, bool is_in_range)
{
    return (struct advise_rate){.factor = factor, .epsilon = 1, .decay = 1, .is_in_range = is_in_range};
}

/* ---- Momentum ------------------------------------------------------------------------------------------------------------ */

static struct advise_rate linear(double k, double batch)
{
    struct advise_rate rate = rate_of(factor_of(SHOAL_SCALING_LINEAR, k), batch <= GOYAL_BATCH);
    rate.rule = "linear";
    rate.text = "multiply the rate by k, and warm up from the old rate";
    rate.limits =
        "up to 8192 samples in a step, ResNet-50 on ImageNet; average over the global batch, scale of each block's last "
        "norm begins with 0";
    rate.source = "Goyal et al. 2017, arXiv 1706.02677";
    rate.warmup_epochs = k > 1 ? warmup_epochs : 0;
    return rate;
}

static struct advise_rate root(double k)
{
    struct advise_rate rate = rate_of(root_of(k), true);
    rate.rule = "square root";
    rate.text = "multiply the rate by the square root of k";
    rate.limits = "keeps the variance of an update; its author found k itself better in practice";
    rate.source = "Krizhevsky 2014, arXiv 1404.5997";
    return rate;
}

static struct advise_rate legw(double k)
{
    struct advise_rate rate = rate_of(root_of(k), true);
    rate.rule = "LEGW";
    rate.text = "multiply the rate by the square root of k, and the epochs of warm-up by k";
    rate.limits = "shown for recurrent networks and ResNet-50; assumes that the old run has a warm-up";
    rate.source = "You et al. 2019, arXiv 1901.08256";
    return rate;
}

static struct advise_rate lars(double k, double batch)
{
    struct advise_rate rate = rate_of(k, batch <= LARGE_BATCH);
    rate.rule = "LARS";
    rate.text = "change to LARS: a rate for each layer, by the norms of its weights and gradients; tune the rate anew";
    rate.limits = "up to 32768 samples in a step, convolutional networks";
    rate.source = "You et al. 2017, arXiv 1708.03888";
    rate.warmup_epochs = warmup_epochs;
    return rate;
}

static int momentum_find(double k, double batch, struct advise_rate *rates)
{
    rates[0] = linear(k, batch);
    rates[1] = root(k);
    rates[2] = legw(k);
    if (batch <= GOYAL_BATCH)
        return 3;
    rates[3] = lars(k, batch);
    return 4;
}

/* ---- Adam ---------------------------------------------------------------------------------------------------------------- */

/* The betas must stay in [0, 1): k < 1 / (1 - 0.9). */
static struct advise_rate adam_root(double k)
{
    struct advise_rate rate = rate_of(root_of(k), k < 10);
    rate.rule = "square root, with betas";
    rate.text =
        "multiply the rate by the square root of k, 1 - beta1 and 1 - beta2 by k, and divide epsilon by the square root";
    rate.limits =
        "k below 1 / (1 - beta1), which is 10 for 0.9; noise must dominate the gradients, as it does in small batches";
    rate.source = "Malladi et al. 2022, arXiv 2205.10287";
    rate.beta1 = rate.is_in_range ? shoal_scaling_beta(0.9, k) : 0;
    rate.beta2 = rate.is_in_range ? shoal_scaling_beta(0.999, k) : 0;
    rate.epsilon = 1 / root_of(k);
    return rate;
}

static struct advise_rate adam_decay(double k)
{
    struct advise_rate rate = rate_of(1, true);
    rate.rule = "decay instead of rate";
    rate.text = "keep the rate, and multiply the weight decay by k";
    rate.limits = "language models that are trained with AdamW on few epochs";
    rate.source = "Bergsma et al. 2025, arXiv 2505.13738";
    rate.decay = k;
    return rate;
}

static struct advise_rate adam_peak(double k)
{
    struct advise_rate rate = rate_of(root_of(k), false);
    rate.rule = "rise and fall";
    rate.text =
        "the best rate rises with the square root of the batch up to the noise scale, and falls beyond it: try both sides";
    rate.limits = "optimizers whose updates are like signs of gradients: Adam, Lion; the noise scale is not known here";
    rate.source = "Li et al. 2024, arXiv 2405.14578";
    return rate;
}

/* ---- LAMB ---------------------------------------------------------------------------------------------------------------- */

static struct advise_rate lamb(double k, double batch)
{
    struct advise_rate rate = rate_of(root_of(k), batch >= LAMB_BATCH && batch <= LARGE_BATCH);
    rate.rule = "LAMB, square root";
    rate.text = "multiply the rate by the square root of k; for BERT: 0.005 / 8 x sqrt(batch / 512), warming up for "
                "batch / 512 / 320 of all steps";
    rate.limits = "512 to 32768 samples in a step, pre-training of BERT";
    rate.source = "You et al. 2019, arXiv 1904.00962";
    return rate;
}

static int adam_find(int optimizer, double k, double batch, struct advise_rate *rates)
{
    int count = 0;
    if (optimizer != STEP_RULE_LION)
        rates[count++] = adam_root(k);
    rates[count++] = adam_peak(k);
    if (optimizer == STEP_RULE_ADAMW)
        rates[count++] = adam_decay(k);
    if (batch > GOYAL_BATCH && optimizer != STEP_RULE_LION)
        rates[count++] = lamb(k, batch);
    return count;
}

int advise_rates_find(const struct advise_rate_question *question, struct advise_rate rates_out[ADVISE_RATES_MAX])
{
    const double k = question->batch / question->from;
    switch (question->optimizer) {
    case STEP_RULE_ADAM:
    case STEP_RULE_ADAMW:
    case STEP_RULE_LION:
        return adam_find(question->optimizer, k, question->batch, rates_out);
    case STEP_RULE_LAMB:
        rates_out[0] = lamb(k, question->batch);
        return 1;
    case STEP_RULE_ADAGRAD:
        rates_out[0] = root(k);
        return 1;
    default:
        return momentum_find(k, question->batch, rates_out);
    }
}

enum advise_norm advise_norm_judge(double samples)
{
    return samples < NORM_WARNING ? ADVISE_NORM_WARNING : samples < NORM_NOTE ? ADVISE_NORM_NOTE : ADVISE_NORM_FINE;
}

double advise_norm_group(double samples)
{
    return samples >= NORM_SAMPLES ? 1 : ceil(NORM_SAMPLES / samples);
}
