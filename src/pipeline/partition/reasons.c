/* Why a stage begins where it does: what the step would be if it began one unit earlier or later. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

struct reasons {
    struct problem *problem;
    const uint32_t *division;
    const struct verdict *verdict;
    uint32_t *trial;
};

static const char *unit_name(const struct reasons *reasons, uint32_t unit)
{
    return reasons->problem->profile->units[unit].name;
}

/* Why a pin or a tie forbids that a unit changes its stage. */
static void write_forbidden(const struct reasons *reasons, uint32_t unit, char *to, size_t room)
{
    const int32_t pin = reasons->problem->pins[unit];
    if (pin != SHOAL_ANY_STAGE)
        snprintf(to, room, "%.60s is pinned to stage %d", unit_name(reasons, unit), pin);
    else
        snprintf(to, room, "%.60s must stay with the units that it is tied to", unit_name(reasons, unit));
}

/* Writes what follows if the stage begins at another unit. `unit` changes its stage. */
static enum shoal_status write_other(const struct reasons *reasons, uint32_t stage, uint32_t begin, uint32_t unit, char *to,
                                     size_t room)
{
    struct problem *problem = reasons->problem;
    struct verdict other;
    double lack;
    const char *how = begin < reasons->division[stage] ? "with" : "without";
    memcpy(reasons->trial, reasons->division, ((size_t)problem->stages + 1) * sizeof *reasons->trial);
    reasons->trial[stage] = begin;
    if (!problem_allows(problem, reasons->trial)) {
        write_forbidden(reasons, unit, to, room);
        return SHOAL_OK;
    }
    PARTITION_TRY(problem_judge(problem, reasons->trial, &other));
    if (other.excess > reasons->verdict->excess) {
        const uint32_t rank = problem_neediest(problem, reasons->trial, &lack);
        snprintf(to, room, "%s %.60s, rank %u would lack %.1f MiB", how, unit_name(reasons, unit), rank, lack / (1 << 20));
        return SHOAL_OK;
    }
    const double step = reasons->verdict->step, percent = step > 0 ? 100 * (other.step / step - 1) : 0;
    if (step <= 0 && other.step > 0)
        snprintf(to, room, "%s %.60s, the step would take %.3g us", how, unit_name(reasons, unit), other.step);
    else if (fabs(percent) < 0.05)
        snprintf(to, room, "%s %.60s, the step would be as long", how, unit_name(reasons, unit));
    else
        snprintf(to, room, "%s %.60s, the step would be %.1f %% %s", how, unit_name(reasons, unit), fabs(percent),
                 percent > 0 ? "longer" : "shorter");
    return SHOAL_OK;
}

static enum shoal_status write_reason(const struct reasons *reasons, uint32_t stage, char *reason)
{
    const uint32_t *division = reasons->division;
    const uint32_t begin = division[stage];
    char earlier[160] = "", later[160] = "";
    if (begin == division[stage + 1]) {
        snprintf(reason, PARTITION_REASON, "stage %u is empty: it hands over what it receives", stage);
        return SHOAL_OK;
    }
    if (stage == 0 || begin == 0) {
        snprintf(reason, PARTITION_REASON, "stage %u begins with the first unit, %.60s", stage, unit_name(reasons, begin));
        return SHOAL_OK;
    }
    if (begin > division[stage - 1])
        PARTITION_TRY(write_other(reasons, stage, begin - 1, begin - 1, earlier, sizeof earlier));
    PARTITION_TRY(write_other(reasons, stage, begin + 1, begin, later, sizeof later));
    snprintf(reason, PARTITION_REASON, "stage %u begins at %.60s: %s%s%s", stage, unit_name(reasons, begin), earlier,
             *earlier ? "; " : "", later);
    return SHOAL_OK;
}

/* If timing would take too long: only the stage's share of the time. */
static void write_share(const struct reasons *reasons, uint32_t stage, char *reason)
{
    const uint32_t *division = reasons->division;
    const double work = problem_work(reasons->problem, division[stage], division[stage + 1]);
    const double all = problem_work(reasons->problem, 0, reasons->problem->units);
    snprintf(reason, PARTITION_REASON, "stage %u begins at %.60s, and has %.1f %% of the work", stage,
             division[stage] < reasons->problem->units ? unit_name(reasons, division[stage]) : "the end",
             all > 0 ? 100 * work / all : 0);
}

enum shoal_status reasons_write(struct problem *problem, const uint32_t *division, const struct verdict *verdict,
                                char (*reasons)[PARTITION_REASON])
{
    struct reasons own = {problem, division, verdict, calloc((size_t)problem->stages + 1, sizeof *own.trial)};
    const uint64_t most = problem->spent + problem->options.effort;
    enum shoal_status status = own.trial ? SHOAL_OK : SHOAL_ERR_MEMORY;
    for (uint32_t s = 0; s < problem->stages && status == SHOAL_OK; s++) {
        if (problem->spent < most)
            status = write_reason(&own, s, reasons[s]);
        else
            write_share(&own, s, reasons[s]);
    }
    free(own.trial);
    return status;
}
