/* Learning rates for another batch, for `shoal advise`: published rules, each with its source and the range in which it was
 * seen to hold. Pure functions; static texts; reentrant. */
#ifndef SHOAL_TOOLS_ADVISE_RATE_H
#define SHOAL_TOOLS_ADVISE_RATE_H

#include <stdbool.h>

#include "step/step_rule.h"

enum { ADVISE_RATES_MAX = 4 };

/* k is the new batch divided by the old one. */
struct advise_rate {
    const char *rule;   /* "linear" */
    const char *text;   /* what to do, in a sentence */
    const char *limits; /* in which the rule was seen to hold */
    const char *source;
    double factor;        /* that multiplies the learning rate */
    double warmup_epochs; /* 0: the rule names none */
    double beta1, beta2;  /* for Adam's defaults of 0.9 and 0.999; 0: unchanged */
    double epsilon;       /* factor; 1: unchanged */
    double decay;         /* factor of weight decay; 1: unchanged */
    bool is_in_range;
};

struct advise_rate_question {
    int optimizer; /* enum step_rule, not NONE */
    double from;   /* the batch for which the learning rate is known */
    double batch;  /* the new one */
};

/* Finds the rules for an optimizer; the first is the one to try first. Returns how many there are, 1 to ADVISE_RATES_MAX. */
int advise_rates_find(const struct advise_rate_question *question, struct advise_rate rates_out[ADVISE_RATES_MAX]);

/* ---- Batch normalization ------------------------------------------------------------------------------------------------- */

/* How bad it is for batch norm to see that few samples. Error of ResNet-50 on ImageNet, 8 GPUs, with 32, 16, 8, 4 and 2 images
 * on each: 23.6, 23.7, 24.8, 27.3, 34.7 %; group norm: 24.1 +- 0.2 (Wu and He 2018, arXiv 1803.08494). */
enum advise_norm { ADVISE_NORM_FINE, ADVISE_NORM_NOTE, ADVISE_NORM_WARNING };
enum advise_norm advise_norm_judge(double samples);

/* Returns how many workers must share statistics so that each layer sees at least 32 samples. samples is above 0. */
double advise_norm_group(double samples);

#endif
