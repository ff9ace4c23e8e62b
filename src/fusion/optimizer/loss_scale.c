#include "fusion/optimizer/loss_scale.h"

#include "base/floats.h"

/* Also false for NaN, for infinity, and for numbers that float32 rounds to 0 or infinity. */
static bool is_scale(double scale)
{
    SHOAL_DEFAULT_FLOATS;
    const float rounded = (float)scale;
    return rounded > 0 && rounded - rounded == 0;
}

const char *fusion_loss_scale_fault(const struct shoal_optimizer *optimizer, bool checks_finite)
{
    const double growth = optimizer->scale_growth, backoff = optimizer->scale_backoff;
    if (optimizer->loss_scale == 0)
        return NULL;
    if (!is_scale(optimizer->loss_scale))
        return "optimizer->loss_scale is negative, or float32 cannot hold it";
    if (!checks_finite)
        return "optimizer->loss_scale needs to know whether a step is finite: set checks_finite";
    if (!(growth > 1) || growth - growth != 0)
        return "optimizer->scale_growth is not above 1, or not finite";
    if (!(backoff > 0) || !(backoff < 1))
        return "optimizer->scale_backoff is not between 0 and 1";
    return optimizer->scale_interval > 0 ? NULL : "optimizer->scale_interval is 0";
}

struct fusion_loss_scale fusion_loss_scale_begin(const struct shoal_optimizer *optimizer)
{
    SHOAL_DEFAULT_FLOATS;
    return (struct fusion_loss_scale){.scale = (float)optimizer->loss_scale,
                                      .growth = optimizer->scale_growth,
                                      .backoff = optimizer->scale_backoff,
                                      .interval = optimizer->scale_interval};
}

double fusion_loss_scale_factor(const struct fusion_loss_scale *loss)
{
    SHOAL_DEFAULT_FLOATS;
    double factor = 1 / (double)loss->scale;
    SHOAL_FLOATS_PIN(factor);
    return factor;
}

static bool loss_scale_shrink(struct fusion_loss_scale *loss)
{
    SHOAL_DEFAULT_FLOATS;
    const float scale = (float)((double)loss->scale * loss->backoff);
    if (scale == 0)
        return false;
    loss->scale = scale;
    loss->finite_steps = 0;
    return true;
}

/* A scale that would become infinite stays. */
static void loss_scale_grow(struct fusion_loss_scale *loss)
{
    SHOAL_DEFAULT_FLOATS;
    const float scale = (float)((double)loss->scale * loss->growth);
    if (scale - scale == 0)
        loss->scale = scale;
    loss->finite_steps = 0;
}

bool fusion_loss_scale_end(struct fusion_loss_scale *loss, bool is_finite)
{
    if (loss->scale == 0)
        return true;
    if (!is_finite)
        return loss_scale_shrink(loss);
    if (++loss->finite_steps == loss->interval)
        loss_scale_grow(loss);
    return true;
}

const char *fusion_loss_scale_set(struct fusion_loss_scale *loss, double scale, uint32_t finite_steps)
{
    if (!is_scale(scale))
        return "the scale is not a positive number that float32 can hold";
    if (finite_steps >= loss->interval)
        return "that many finite steps in a row would have made the scale grow";
    loss->scale = (float)scale;
    loss->finite_steps = finite_steps;
    return NULL;
}
