/* What `shoal advise` knows about a model: its profile, and facts that a profile does not have. Reentrant. */
#ifndef SHOAL_TOOLS_ADVISE_MODEL_H
#define SHOAL_TOOLS_ADVISE_MODEL_H

#include "advise_memory.h"
#include "step/step_profile.h"

struct advise_facts {
    struct advise_model model;
    double sample_flop;    /* of a training step for each sample; 0: not known */
    double forward_share;  /* of that, in the forward pass */
    double use_16, use_32; /* assumed shares of a GPU's peak that training reaches */
    int batch_norms;       /* layers of batch normalization; -1: not known */
    int optimizer;         /* enum step_rule with which the model is usually trained */
};

/* Finds the facts of a profile by its name. For files only the tensors are known. */
struct advise_facts advise_facts_of(const struct step_profile *profile);

/* Returns the operations of a training step of a transformer, for each sample: 72 L s h^2 (1 + s / (6 h) + v / (12 h L))
 * (Korthikanti et al. 2022, arXiv 2205.05198). */
double advise_transformer_flop(const struct advise_model *model);

#endif
