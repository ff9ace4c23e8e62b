#include "fusion/codec/gradient_kernels.h"

#if SHOAL_X86_KERNELS
#include <cpuid.h>
#endif

/* Each is defined in its file cpu/gradient_kernels_<set>.c. */
extern const struct shoal_gradient_kernels shoal_gradient_kernels_avx512;
extern const struct shoal_gradient_kernels shoal_gradient_kernels_avx2;
extern const struct shoal_gradient_kernels shoal_gradient_kernels_baseline;

#if SHOAL_X86_KERNELS
/* Clang does not know this feature's name. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && has_f16c();
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

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
    {&shoal_gradient_kernels_avx512, has_avx512},
    {&shoal_gradient_kernels_avx2, has_avx2},
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
