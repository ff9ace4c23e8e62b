/* A dynamic loss scale with the rule of PyTorch's GradScaler: it grows after many finite steps in a row, and shrinks after each
 * step that was not finite. Pure functions. All ranks call them with the same verdicts, so they keep the same scale. */
#ifndef SHOAL_FUSION_LOSS_SCALE_H
#define SHOAL_FUSION_LOSS_SCALE_H

#include "fusion/fusion.h"

struct fusion_loss_scale {
    float scale; /* float32, as in PyTorch; 0 if the optimizer has no loss scale */
    double growth, backoff;
    uint32_t interval;     /* finite steps in a row after which the scale grows */
    uint32_t finite_steps; /* in a row, since the scale has last changed */
};

/* Returns NULL if the settings are possible, otherwise what is wrong: static storage. */
const char *fusion_loss_scale_fault(const struct shoal_optimizer *optimizer, bool checks_finite);

/* Returns the scale of the first step. The settings are possible. */
struct fusion_loss_scale fusion_loss_scale_begin(const struct shoal_optimizer *optimizer);

/* Returns the factor of gradients: 1 / scale. The optimizer has a loss scale. */
double fusion_loss_scale_factor(const struct fusion_loss_scale *loss);

/* Ends a step. Returns false, and nothing has changed, if the scale would become 0. Does nothing without a loss scale. */
SHOAL_MUST_USE bool fusion_loss_scale_end(struct fusion_loss_scale *loss, bool is_finite);

/* Takes over the state of a checkpoint. Returns NULL, or what is wrong: static storage; nothing has changed then. */
const char *fusion_loss_scale_set(struct fusion_loss_scale *loss, double scale, uint32_t finite_steps);

#endif
