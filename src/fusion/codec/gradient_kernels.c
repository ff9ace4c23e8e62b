#include "fusion/codec/gradient_kernels.h"

#include "base/isa.h"

/* Each is defined in its file cpu/gradient_kernels_<set>.c. */
extern const struct shoal_gradient_kernels shoal_gradient_kernels_avx512;
extern const struct shoal_gradient_kernels shoal_gradient_kernels_avx2;
extern const struct shoal_gradient_kernels shoal_gradient_kernels_baseline;

static bool has_baseline(void)
{
    return true;
}

/* Best first. */
static const struct {
    const struct shoal_gradient_kernels *kernels;
    bool (*can_run)(void);
} sets[] = {
#if SHOAL_X86_KERNELS
    {&shoal_gradient_kernels_avx512, shoal_isa_has_avx512},
    {&shoal_gradient_kernels_avx2, shoal_isa_has_avx2},
#endif
    {&shoal_gradient_kernels_baseline, has_baseline},
};

const struct shoal_gradient_kernels *shoal_gradient_kernels_at(int index)
{
    for (size_t i = 0; i < FUSION_COUNT_OF(sets); i++)
        if (sets[i].can_run() && index-- == 0)
            return sets[i].kernels;
    return NULL;
}
