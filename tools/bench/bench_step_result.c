/* Numbers that follow from the options and results of `shoal bench step`. */
#include "bench_step.h"

const char *const bench_step_compressions[] = {"none", "fp16", "bf16", "int8", NULL};

const char *bench_step_compression_name(int compression)
{
    return bench_step_compressions[compression];
}

/* int8 is sent in blocks of 256 values with a scale of 4 bytes each. */
double bench_step_wire_ratio(int compression, int hosts)
{
    static const double ratios[] = {1, 2, 2, 4 / (1 + 4 / 256.0)};
    return hosts > 1 ? ratios[compression] : 1;
}

struct step_times step_result_times(const struct step_result *result, int rank)
{
    const size_t tensors = result->options->profile.count;
    const size_t numbers = tensors + STEP_BUFFER_TIMES * shoal_gradient_layout_buffers(result->layout);
    const double *times = result->times + (size_t)rank * numbers;
    return (struct step_times){times, times + tensors};
}
