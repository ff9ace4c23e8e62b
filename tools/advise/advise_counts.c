#include "advise_counts.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

static size_t divided_up(size_t number, size_t by)
{
    return number / by + (number % by > 0);
}

static bool has_zero(const struct advise_job *job)
{
    return !job->machines || !job->per_machine || !job->degree || !job->batch || !job->samples || !(job->epochs > 0);
}

enum advise_fault advise_counts_find(const struct advise_job *job, struct advise_counts *counts_out)
{
    struct advise_counts counts = {.workers = 0};
    if (has_zero(job))
        return ADVISE_FAULT_ZERO;
    if (job->machines > SIZE_MAX / job->per_machine)
        return ADVISE_FAULT_HUGE;
    counts.workers = job->machines * job->per_machine;
    if (counts.workers % job->degree)
        return ADVISE_FAULT_DEGREE;
    counts.replicas = counts.workers / job->degree;
    *counts_out = counts;
    if (job->batch < counts.replicas)
        return ADVISE_FAULT_BATCH;
    if (job->batch > job->samples)
        return ADVISE_FAULT_SAMPLES;
    counts.least = job->batch / counts.replicas;
    counts.most = divided_up(job->batch, counts.replicas);
    counts.with_most = job->batch % counts.replicas ? job->batch % counts.replicas : counts.replicas;
    counts.dropped = job->samples / job->batch;
    counts.kept = divided_up(job->samples, job->batch);
    counts.last = job->samples % job->batch;
    counts.steps = ceil(job->epochs * (double)counts.kept);
    counts.samples_seen = job->epochs * (double)job->samples;
    *counts_out = counts;
    return ADVISE_FAULT_NONE;
}

double advise_samples_factor(double from, double batch, double critical)
{
    return critical > 0 ? (critical + batch) / (critical + from) : 1;
}
