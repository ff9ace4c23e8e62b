#include "kernels/kernels.h"

#include <string.h>

#include "base/isa.h"

static const char *const wishes[] = {"auto", "baseline", "avx2", "avx512", NULL};

#define OF(field) offsetof(struct shoal_kernels_settings, field)
static const struct shoal_setting settings_of_kernels[] = {
    {.name = "SHOAL_KERNELS",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(kernels),
     .preset = "auto",
     .words = wishes,
     .text = "instruction set of the reduction kernels: auto or a name from `shoal info --topology`"},
};
#undef OF
const struct shoal_setting_table shoal_kernels_setting_table = {settings_of_kernels, SHOAL_COUNT_OF(settings_of_kernels)};

/* ---- Passes over several hosts ------------------------------------------------------------------------------------------- */

static double power_of_two_from(double ranks)
{
    double power = 1;
    while (power < ranks)
        power *= 2;
    return power;
}

struct shoal_reduction shoal_kernels_pass(enum shoal_type type, struct shoal_reduction whole, enum shoal_pass pass)
{
    const struct shoal_reduction sum = {SHOAL_SUM, 0};
    if (whole.op == SHOAL_SCALED_SUM)
        return pass == SHOAL_PASS_FIRST ? whole : sum;
    if (whole.op != SHOAL_AVG)
        return whole;
    if (type != SHOAL_FLOAT16)
        return pass == SHOAL_PASS_LAST ? whole : sum;
    const double power = power_of_two_from(whole.argument);
    return pass == SHOAL_PASS_FIRST    ? (struct shoal_reduction){SHOAL_SCALED_SUM, 1 / power}
           : pass == SHOAL_PASS_MIDDLE ? sum
                                       : (struct shoal_reduction){SHOAL_AVG, whole.argument / power};
}

/* ---- Instruction sets ---------------------------------------------------------------------------------------------------- */

/* One for each file kernels_<set>.c. */
extern const struct shoal_kernels shoal_kernels_avx512;
extern const struct shoal_kernels shoal_kernels_avx2;
extern const struct shoal_kernels shoal_kernels_baseline;

static bool kernels_has_baseline(void)
{
    return true;
}

/* In order of preference. */
static const struct {
    const struct shoal_kernels *kernels;
    bool (*can_run)(void);
} sets[] = {
#if SHOAL_X86_KERNELS
    {&shoal_kernels_avx512, shoal_isa_has_avx512},
    {&shoal_kernels_avx2, shoal_isa_has_avx2},
#endif
    {&shoal_kernels_baseline, kernels_has_baseline},
};

const struct shoal_kernels *shoal_kernels_at(int index)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(sets); i++)
        if (sets[i].can_run() && index-- == 0)
            return sets[i].kernels;
    return NULL;
}

const struct shoal_kernels *shoal_kernels_find(const char *name)
{
    if (strcmp(name, "auto") == 0)
        return shoal_kernels_at(0);
    const struct shoal_kernels *kernels;
    for (int i = 0; (kernels = shoal_kernels_at(i)) != NULL; i++)
        if (strcmp(kernels->name, name) == 0)
            return kernels;
    return NULL;
}
