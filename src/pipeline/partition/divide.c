/* The best division by a measure of single stages: the least maximum over all stages, or the fewest transfers with a limit for
 * the measure. By dynamic programming over how many units the first stages have. For s stages and n units this takes at most
 * s n^2 / 2 measures; since a measure grows with the stage, most of them need not be looked at. */
#include <stdlib.h>
#include <string.h>

#include "pipeline/partition/partition.h"

struct table {
    const struct problem *problem;
    enum memory_rule rule;
    stage_measure measure;
    const void *arg;
    bool has_transfers;
    bool is_sum; /* transfers are added, and the measure has a limit */
    double limit;
    double *before, *now; /* [units + 1]: least value of the stages up to the last one and up to this one */
    uint32_t *begins;     /* [stages][units + 1]: the begin of this stage for it */
};

/* A stage that ends before unit `to`, and grows at its begin. */
struct growing {
    uint32_t stage, from, to;
    double parameters;
};

/* Gives the stage one unit more. Returns false if that is pinned to another stage. */
static bool stage_grow(const struct problem *problem, struct growing *growing)
{
    const uint32_t unit = growing->from - 1;
    if (problem->pins[unit] != SHOAL_ANY_STAGE && (uint32_t)problem->pins[unit] != growing->stage)
        return false;
    growing->from = unit;
    growing->parameters += problem->parameters[unit + 1] - problem->parameters[unit];
    for (uint32_t i = problem->pair_at[unit]; i < problem->pair_at[unit + 1]; i++)
        growing->parameters -= problem->pairs[i].second < growing->to ? problem->pairs[i].bytes : 0;
    return true;
}

static double larger(double one, double other)
{
    return one > other ? one : other;
}

/* Compares the division that ends with this stage. Returns false if no larger stage can be better. */
static bool compare(const struct table *table, const struct growing *growing, uint32_t *begin_out)
{
    const struct problem *problem = table->problem;
    const uint32_t s = growing->stage, from = growing->from;
    double *best = &table->now[growing->to], grows;
    const double measure = table->measure(problem, table->arg, s, from, growing->to), before = table->before[from];
    if (table->is_sum ? measure > table->limit : measure >= *best)
        return false;
    const double lack = problem_lack(problem, table->rule, s, from, growing->to, growing->parameters, &grows);
    if (grows > 0.5)
        return false;
    const double transfer = table->has_transfers && problem->uses[s].is_far_ahead ? problem_transfer(problem, s, from) : 0;
    const double value = table->is_sum ? before + transfer : larger(larger(before, measure), transfer);
    if (lack > 0.5 || value >= *best || (s > 0 && problem->is_glued[from]))
        return true;
    *best = value;
    *begin_out = from;
    return true;
}

static void table_fill_stage(struct table *table, uint32_t stage)
{
    const uint32_t units = table->problem->units;
    const uint32_t first = stage + 1 == table->problem->stages ? units : 0; /* the last stage has all units that are left */
    for (uint32_t to = 0; to < first; to++)
        table->now[to] = PARTITION_NEVER;
    for (uint32_t to = first; to <= units; to++) {
        struct growing growing = {stage, to, to, 0};
        uint32_t *begin = &table->begins[(size_t)stage * (units + 1) + to];
        table->now[to] = PARTITION_NEVER;
        while (compare(table, &growing, begin) && growing.from > 0 && stage_grow(table->problem, &growing))
            continue;
    }
}

static void division_follow(const struct table *table, uint32_t *division_out)
{
    const uint32_t units = table->problem->units;
    uint32_t to = units;
    division_out[table->problem->stages] = units;
    for (uint32_t s = table->problem->stages; s-- > 0;)
        division_out[s] = to = table->begins[(size_t)s * (units + 1) + to];
}

/* Fills the table. division_out may be NULL. */
static enum shoal_status fill_table(struct table *table, uint32_t *division_out, double *value_out)
{
    const struct problem *problem = table->problem;
    const size_t row = (size_t)problem->units + 1;
    table->before = calloc(row, sizeof *table->before);
    table->now = calloc(row, sizeof *table->now);
    table->begins = calloc(problem->stages, row * sizeof *table->begins);
    const bool is_there = table->before && table->now && table->begins;
    for (size_t i = 1; is_there && i < row; i++)
        table->before[i] = PARTITION_NEVER;
    for (uint32_t s = 0; is_there && s < problem->stages; s++) {
        table_fill_stage(table, s);
        double *const now = table->now;
        table->now = table->before;
        table->before = now;
    }
    if (is_there) {
        *value_out = table->before[problem->units];
        if (*value_out < PARTITION_NEVER && division_out)
            division_follow(table, division_out);
    }
    free(table->before);
    free(table->now);
    free(table->begins);
    return is_there ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

enum shoal_status divide(const struct problem *problem, enum memory_rule rule, stage_measure measure, const void *arg,
                         bool has_transfers, uint32_t *division_out, double *value_out)
{
    struct table table = {problem, rule, measure, arg, has_transfers, false, 0, NULL, NULL, NULL};
    return fill_table(&table, division_out, value_out);
}

enum shoal_status divide_cheaply(const struct problem *problem, stage_measure measure, const void *arg, double limit,
                                 uint32_t *division_out, double *value_out)
{
    struct table table = {problem, MEMORY_HOPE, measure, arg, true, true, limit, NULL, NULL, NULL};
    return fill_table(&table, division_out, value_out);
}

double measure_time(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to)
{
    (void)arg;
    return problem_work(problem, from, to) / problem->speeds[problem->uses[stage].rank];
}
