/* Partitions of pipelines: equal to all divisions compared on many small cases, never below the bound, memory and times by hand,
 * and each input that is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pipeline/partition/partition.h"
#include "reference.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define TEXT 1200
#define STAGES_MAX 128

static struct shoal_profile *new_profile(void)
{
    struct shoal_profile *profile = NULL;
    assert_int_equal(shoal_profile_create("test", &profile), SHOAL_OK);
    return profile;
}

/* Adds a unit whose backward pass takes twice as long as its forward pass. */
static void add(struct shoal_profile *profile, const char *name, double forward, uint64_t parameters, uint64_t kept,
                uint64_t output)
{
    struct shoal_unit unit = SHOAL_UNIT_INIT;
    char text[TEXT] = "";
    unit.name = name;
    unit.forward = unit.input_gradient = unit.weight_gradient = forward;
    unit.parameter_bytes = parameters;
    unit.kept_bytes = kept;
    unit.output_bytes = output;
    if (shoal_profile_add_unit(profile, &unit, text, sizeof text) != SHOAL_OK)
        fail_msg("%s", text);
}

static struct shoal_schedule *new_schedule(enum shoal_schedule_kind kind, uint32_t ranks, uint32_t microbatches)
{
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_schedule *schedule = NULL;
    char text[TEXT] = "";
    options.kind = kind;
    options.ranks = ranks;
    options.microbatches = microbatches;
    if (shoal_schedule_create(&options, &schedule, text, sizeof text) != SHOAL_OK)
        fail_msg("%s", text);
    return schedule;
}

static struct shoal_partition *create(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                      const struct shoal_partition_options *options)
{
    struct shoal_partition *partition = NULL;
    char text[TEXT] = "";
    if (shoal_partition_create(profile, schedule, options, &partition, text, sizeof text) != SHOAL_OK)
        fail_msg("%s", text);
    return partition;
}

static struct shoal_partition_times times_of(const struct shoal_partition *partition)
{
    struct shoal_partition_times times = SHOAL_PARTITION_TIMES_INIT;
    assert_int_equal(shoal_partition_step_times(partition, &times), SHOAL_OK);
    return times;
}

static struct shoal_stage stage_of(const struct shoal_partition *partition, uint32_t number)
{
    struct shoal_stage stage = SHOAL_STAGE_INIT;
    assert_int_equal(shoal_partition_stage(partition, number, &stage), SHOAL_OK);
    return stage;
}

static struct shoal_rank_memory memory_of(const struct shoal_partition *partition, uint32_t rank)
{
    struct shoal_rank_memory memory = SHOAL_RANK_MEMORY_INIT;
    assert_int_equal(shoal_partition_memory(partition, rank, &memory), SHOAL_OK);
    return memory;
}

static bool is_near(double one, double other)
{
    return fabs(one - other) <= 1e-9 * (1 + fabs(other));
}

/* ---- Times of unequal stages --------------------------------------------------------------------------------------------- */

static void equal_stages_take_as_long(void **state)
{
    (void)state;
    for (unsigned kind = 0; kind < SHOAL_SCHEDULE_AUTO; kind++) {
        struct shoal_schedule *schedule = new_schedule((enum shoal_schedule_kind)kind, 4, 8);
        const double stages = shoal_schedule_stages(schedule);
        const struct shoal_stage_costs rank = {3, 2, 1, 0.25};
        struct shoal_stage_costs each[STAGES_MAX];
        struct shoal_schedule_times one = SHOAL_SCHEDULE_TIMES_INIT, other = SHOAL_SCHEDULE_TIMES_INIT;
        for (uint32_t s = 0; s < stages; s++)
            each[s] = (struct shoal_stage_costs){3 * 4 / stages, 2 * 4 / stages, 1 * 4 / stages, 0.25};
        assert_int_equal(shoal_schedule_time(schedule, &rank, 0.5, &one, NULL), SHOAL_OK);
        assert_int_equal(shoal_schedule_time_stages(schedule, each, 0.5, &other, NULL), SHOAL_OK);
        assert_true(is_near(one.step, other.step) && is_near(one.span, other.span) && is_near(one.bubble, other.bubble));
        assert_true(is_near(one.span_bubble, other.span_bubble) && is_near(one.activations, other.activations));
        shoal_schedule_free(schedule);
    }
}

static void unequal_stages_are_timed(void **state)
{
    const struct shoal_stage_costs costs[] = {{1, 2, 4, 0.5}, {8, 16, 32, 0.25}, {64, 128, 256, 1e9}};
    double begins[3][2], *const rows[] = {begins[0], begins[1], begins[2]};
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    struct shoal_stage_costs wrong[3];
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 3, 1);
    (void)state;
    assert_int_equal(shoal_schedule_time_stages(schedule, costs, 1, &times, rows), SHOAL_OK);
    assert_true(times.step == 511 + 2 * 0.75);
    assert_true(begins[1][0] == 1.5 && begins[2][0] == 9.75 && begins[1][1] == 9.75 + 448 + 0.25);
    memcpy(wrong, costs, sizeof wrong);
    wrong[2].weight_gradient = -1;
    assert_int_equal(shoal_schedule_time_stages(schedule, wrong, 1, &times, NULL), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_time_stages(NULL, costs, 1, &times, NULL), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_schedule_time_stages(schedule, NULL, 1, &times, NULL), SHOAL_ERR_ARGUMENT);
    shoal_schedule_free(schedule);
}

/* ---- Small cases, all divisions compared --------------------------------------------------------------------------------- */

struct small_case {
    struct shoal_profile *profile;
    struct shoal_schedule *schedule;
    struct shoal_partition_options options;
    uint64_t memory[8];
    double speeds[8];
};

static void add_random_units(struct small_case *small, uint64_t *random, uint32_t units)
{
    for (uint32_t i = 0; i < units; i++) {
        struct shoal_unit unit = SHOAL_UNIT_INIT;
        char name[16];
        snprintf(name, sizeof name, "u%u", i);
        unit.name = name;
        unit.forward = (double)reference_below(random, 10);
        unit.input_gradient = (double)reference_below(random, 12);
        unit.weight_gradient = (double)reference_below(random, 8);
        unit.parameter_bytes = 8 + reference_below(random, 50);
        unit.kept_bytes = reference_below(random, 30);
        unit.output_bytes = reference_below(random, 40);
        assert_int_equal(shoal_profile_add_unit(small->profile, &unit, NULL, 0), SHOAL_OK);
    }
}

/* A random problem: half of them with a limit, unequal ranks, skips, ties, or pins. */
static void make_small(struct small_case *small, uint64_t *random, enum shoal_schedule_kind kind, uint32_t ranks)
{
    const uint32_t units = 1 + (uint32_t)reference_below(random, 7);
    memset(small, 0, sizeof *small);
    small->profile = new_profile();
    small->schedule = new_schedule(kind, ranks, ranks * (1 + (uint32_t)reference_below(random, 3)));
    small->options = (struct shoal_partition_options)SHOAL_PARTITION_OPTIONS_INIT;
    add_random_units(small, random, units);
    if (units > 3 && reference_below(random, 2))
        assert_int_equal(shoal_profile_add_output(small->profile, 0, units - 1, 25, NULL, 0), SHOAL_OK);
    if (units > 2 && reference_below(random, 2))
        assert_int_equal(shoal_profile_add_tie(small->profile, (const uint32_t[]){0, units - 1}, 2, 8, NULL, 0), SHOAL_OK);
    if (reference_below(random, 4) == 0)
        small->profile->units[units / 2].stage = (int32_t)reference_below(random, shoal_schedule_stages(small->schedule));
    small->options.bytes_per_us = (double)reference_below(random, 3) * 10;
    small->options.latency_us = (double)reference_below(random, 3);
    small->options.kept_share = (double)reference_below(random, 3) / 2;
    small->options.recomputes = reference_below(random, 3) == 0;
    small->options.state_shards = 1 + (uint32_t)reference_below(random, 3);
    for (uint32_t r = 0; r < ranks; r++) {
        small->speeds[r] = 1 + (double)reference_below(random, 3) / 2;
        small->memory[r] = 200 + reference_below(random, 1500);
    }
    if (reference_below(random, 2))
        small->options.rank_speeds = small->speeds;
    if (reference_below(random, 2))
        small->options.rank_memory_bytes = small->memory;
}

static void free_small(struct small_case *small)
{
    shoal_profile_free(small->profile);
    shoal_schedule_free(small->schedule);
}

/* Calls see() with each list of begins. */
static void each_division(uint32_t units, uint32_t stages, uint32_t *division, uint32_t stage,
                          void (*see)(const uint32_t *division, void *arg), void *arg)
{
    if (stage == stages) {
        see(division, arg);
        return;
    }
    for (uint32_t begin = division[stage - 1]; begin <= units; begin++) {
        division[stage] = begin;
        each_division(units, stages, division, stage + 1, see, arg);
    }
}

struct best_step {
    const struct small_case *small;
    double step; /* of the divisions that fit; infinite: none does */
    double lack; /* the least, of all ranks */
};

static void see_step(const uint32_t *division, void *arg)
{
    struct best_step *best = arg;
    const struct small_case *small = best->small;
    struct shoal_partition *partition = NULL;
    double lack = 0;
    if (shoal_partition_create_at(small->profile, small->schedule, &small->options, division, &partition, NULL, 0) != SHOAL_OK)
        return;
    for (uint32_t r = 0; r < shoal_schedule_ranks(small->schedule); r++) {
        const struct shoal_rank_memory memory = memory_of(partition, r);
        if (memory.limit_bytes && memory.total_bytes > memory.limit_bytes)
            lack += (double)(memory.total_bytes - memory.limit_bytes);
    }
    const double step = times_of(partition).step;
    best->lack = lack < best->lack ? lack : best->lack;
    best->step = lack == 0 && step < best->step ? step : best->step;
    assert_true(times_of(partition).lower_bound <= step * (1 + 1e-9) || lack > 0);
    shoal_partition_free(partition);
}

static struct best_step best_of(struct small_case *small)
{
    uint32_t division[STAGES_MAX] = {0};
    struct best_step best = {small, INFINITY, INFINITY};
    small->options.effort = 1; /* reasons without timing */
    each_division(shoal_profile_units(small->profile), shoal_schedule_stages(small->schedule), division, 1, see_step, &best);
    return best;
}

/* The shortest step of all, found by comparing all, and found by searching. */
static void check_small(struct small_case *small, uint64_t effort, bool must_be_best)
{
    struct shoal_partition *partition = NULL;
    char text[TEXT] = "";
    const struct best_step best = best_of(small);
    small->options.effort = effort;
    const enum shoal_status status =
        shoal_partition_create(small->profile, small->schedule, &small->options, &partition, text, sizeof text);
    if (status != SHOAL_OK) {
        assert_int_equal(status, SHOAL_ERR_ARGUMENT);
        if (best.step < INFINITY)
            fail_msg("a step of %g fits, but: %s", best.step, text);
        return;
    }
    const struct shoal_partition_times times = times_of(partition);
    assert_true(best.step < INFINITY);
    assert_true(times.lower_bound <= best.step * (1 + 1e-9));
    assert_true(times.step >= best.step * (1 - 1e-9));
    if (must_be_best && !is_near(times.step, best.step))
        fail_msg("the step is %g, and %g is possible", times.step, best.step);
    shoal_partition_free(partition);
}

static void small_cases_are_optimal(void **state)
{
    uint64_t random = 11;
    (void)state;
    for (unsigned seed = 0; seed < 300; seed++)
        for (unsigned kind = SHOAL_SCHEDULE_GPIPE; kind <= SHOAL_SCHEDULE_1F1B; kind++) {
            struct small_case small;
            make_small(&small, &random, (enum shoal_schedule_kind)kind, 1 + seed % 4);
            check_small(&small, 0, true);
            free_small(&small);
        }
}

static void small_cases_of_all_kinds_are_optimal(void **state)
{
    uint64_t random = 12;
    (void)state;
    for (unsigned seed = 0; seed < 8; seed++)
        for (unsigned kind = SHOAL_SCHEDULE_INTERLEAVED; kind < SHOAL_SCHEDULE_AUTO; kind++) {
            struct small_case small;
            make_small(&small, &random, (enum shoal_schedule_kind)kind, 1 + seed % 3);
            check_small(&small, 0, true);
            free_small(&small);
        }
}

/* With little effort the search looks at few divisions. It must still find one that fits, and report no wrong bound. */
static void searches_end_near_the_optimum(void **state)
{
    uint64_t random = 13;
    uint32_t best = 0, all = 0;
    (void)state;
    for (unsigned seed = 0; seed < 300; seed++) {
        struct small_case small;
        make_small(&small, &random, SHOAL_SCHEDULE_1F1B, 2 + seed % 3);
        const struct best_step known = best_of(&small);
        small.options.effort = 600;
        struct shoal_partition *partition = NULL;
        char text[TEXT] = "";
        const enum shoal_status status =
            shoal_partition_create(small.profile, small.schedule, &small.options, &partition, text, sizeof text);
        if (status == SHOAL_OK) {
            all++;
            best += is_near(times_of(partition).step, known.step);
            assert_true(times_of(partition).lower_bound <= known.step * (1 + 1e-9));
        } else if (known.step < INFINITY && !small.options.recomputes) {
            fail_msg("seed %u: a step of %g fits, but: %s", seed, known.step, text);
        }
        shoal_partition_free(partition);
        free_small(&small);
    }
    print_message("optimal in %u of %u\n", best, all);
    assert_true(all > 100 && best * 10 >= all * 8);
}

/* ---- Stages that are recomputed, all choices compared -------------------------------------------------------------------- */

/* The shortest step among all divisions and all choices of stages, and what fits. */
static struct best_step best_recomputed(struct small_case *small)
{
    const uint32_t stages = shoal_schedule_stages(small->schedule);
    struct best_step best = {small, INFINITY, INFINITY};
    for (unsigned mask = 0; mask < 1u << stages; mask++) {
        struct small_case other = *small;
        unsigned char recomputed[STAGES_MAX];
        for (uint32_t s = 0; s < stages; s++)
            recomputed[s] = (unsigned char)(mask >> s & 1);
        assert_int_equal(shoal_schedule_recompute(small->schedule, recomputed, &other.schedule), SHOAL_OK);
        other.options.recomputes = SHOAL_RECOMPUTES_AS_SCHEDULED;
        const struct best_step found = best_of(&other);
        best.step = found.step < best.step ? found.step : best.step;
        shoal_schedule_free(other.schedule);
    }
    return best;
}

/* Returns true if a recomputed partition is what its own schedule says. */
static void check_recomputed(const struct small_case *small, const struct shoal_partition *partition)
{
    const uint32_t stages = shoal_schedule_stages(small->schedule);
    struct shoal_partition_options options = small->options;
    struct shoal_partition *again = NULL;
    struct shoal_schedule *schedule = NULL;
    unsigned char recomputed[STAGES_MAX];
    uint32_t first_units[STAGES_MAX];
    for (uint32_t s = 0; s < stages; s++) {
        recomputed[s] = (unsigned char)stage_of(partition, s).recomputes;
        first_units[s] = stage_of(partition, s).first_unit;
    }
    options.recomputes = SHOAL_RECOMPUTES_AS_SCHEDULED;
    assert_int_equal(shoal_schedule_recompute(small->schedule, recomputed, &schedule), SHOAL_OK);
    assert_int_equal(shoal_partition_create_at(small->profile, schedule, &options, first_units, &again, NULL, 0), SHOAL_OK);
    assert_true(is_near(times_of(again).step, times_of(partition).step));
    for (uint32_t r = 0; r < shoal_schedule_ranks(schedule); r++) {
        const struct shoal_rank_memory memory = memory_of(partition, r), other = memory_of(again, r);
        assert_true(memory.total_bytes == other.total_bytes);
        assert_true(!memory.limit_bytes || memory.total_bytes <= memory.limit_bytes);
    }
    shoal_schedule_free(schedule);
    shoal_partition_free(again);
}

static void stages_are_recomputed_if_memory_is_short(void **state)
{
    uint64_t random = 17;
    uint32_t best = 0, all = 0, some = 0, overlooked = 0;
    (void)state;
    for (unsigned seed = 0; seed < 150; seed++) {
        struct small_case small;
        struct shoal_partition *partition = NULL;
        bool recomputes = false;
        make_small(&small, &random, seed % 2 ? SHOAL_SCHEDULE_1F1B : SHOAL_SCHEDULE_ZB_H1, 1 + seed % 3);
        small.options.rank_memory_bytes = small.memory;
        for (uint32_t i = 0; i < small.profile->count; i++)
            small.profile->units[i].kept_bytes *= 12; /* so that activations matter */
        const struct best_step known = best_recomputed(&small);
        small.options.recomputes = SHOAL_RECOMPUTES_IF_SHORT;
        small.options.effort = 0;
        const enum shoal_status status =
            shoal_partition_create(small.profile, small.schedule, &small.options, &partition, NULL, 0);
        assert_true(status == SHOAL_OK || status == SHOAL_ERR_ARGUMENT);
        if (status == SHOAL_OK) {
            check_recomputed(&small, partition);
            assert_true(times_of(partition).step >= known.step * (1 - 1e-9));
            for (uint32_t s = 0; s < shoal_schedule_stages(small.schedule); s++)
                recomputes |= stage_of(partition, s).recomputes != 0;
            assert_true(!recomputes || times_of(partition).lower_bound <= known.step * (1 + 1e-9));
            assert_true(!recomputes || !times_of(partition).is_optimal);
            all++;
            some += recomputes;
            best += recomputes && is_near(times_of(partition).step, known.step);
        }
        overlooked += status != SHOAL_OK && known.step < INFINITY;
        shoal_partition_free(partition);
        free_small(&small);
    }
    print_message("recomputed in %u of %u; optimal in %u; overlooked %u\n", some, all, best, overlooked);
    assert_true(all > 60 && some > 10 && best * 10 >= some * 8 && overlooked * 20 <= all);
}

/* ---- The division with the least bottleneck ------------------------------------------------------------------------------ */

struct best_bottleneck {
    const struct problem *problem;
    double value;
};

static void see_bottleneck(const uint32_t *division, void *arg)
{
    struct best_bottleneck *best = arg;
    const struct problem *problem = best->problem;
    double value = 0;
    if (!problem_allows(problem, division))
        return;
    for (uint32_t s = 0; s < problem->stages; s++) {
        const double parameters = problem_parameters(problem, division[s], division[s + 1]);
        value = fmax(value, measure_time(problem, NULL, s, division[s], division[s + 1]));
        if (problem->uses[s].is_far_ahead)
            value = fmax(value, problem_transfer(problem, s, division[s]));
        if (problem_lack(problem, MEMORY_HOPE, s, division[s], division[s + 1], parameters, NULL) > 0.5)
            return;
    }
    best->value = fmin(best->value, value);
}

struct best_transfers {
    const struct problem *problem;
    double limit, value;
};

static void see_transfers(const uint32_t *division, void *arg)
{
    struct best_transfers *best = arg;
    const struct problem *problem = best->problem;
    double value = 0;
    if (!problem_allows(problem, division))
        return;
    for (uint32_t s = 0; s < problem->stages; s++) {
        const double parameters = problem_parameters(problem, division[s], division[s + 1]);
        value += problem->uses[s].is_far_ahead ? problem_transfer(problem, s, division[s]) : 0;
        if (measure_time(problem, NULL, s, division[s], division[s + 1]) > best->limit ||
            problem_lack(problem, MEMORY_HOPE, s, division[s], division[s + 1], parameters, NULL) > 0.5)
            return;
    }
    best->value = fmin(best->value, value);
}

/* The fewest transfers, if no stage takes longer than a limit that some division keeps, or does not. */
static void check_transfers(const struct problem *problem, double limit)
{
    uint32_t division[STAGES_MAX] = {0}, found[STAGES_MAX];
    double value;
    struct best_transfers best = {problem, limit, PARTITION_NEVER}, again = {problem, limit, PARTITION_NEVER};
    division[problem->stages] = problem->units;
    each_division(problem->units, problem->stages, division, 1, see_transfers, &best);
    assert_int_equal(divide_cheaply(problem, measure_time, NULL, limit, found, &value), SHOAL_OK);
    assert_true(value == best.value);
    if (value < PARTITION_NEVER)
        see_transfers(found, &again);
    assert_true(is_near(again.value, best.value));
}

static void bottlenecks_are_least(void **state)
{
    uint64_t random = 14;
    (void)state;
    for (unsigned seed = 0; seed < 1500; seed++) {
        struct small_case small;
        struct problem problem;
        uint32_t division[STAGES_MAX] = {0}, found[STAGES_MAX];
        double value;
        make_small(&small, &random, SHOAL_SCHEDULE_1F1B, 1 + seed % 5);
        small.options.keeps_ties_together = seed % 3 == 0;
        small.options.slots = 1 + seed % 2;
        if (problem_open(&problem, small.profile, small.schedule, &small.options, (struct partition_text){NULL, 0}) ==
            SHOAL_OK) {
            struct best_bottleneck best = {&problem, PARTITION_NEVER}, again = {&problem, PARTITION_NEVER};
            division[problem.stages] = problem.units;
            each_division(problem.units, problem.stages, division, 1, see_bottleneck, &best);
            assert_int_equal(divide(&problem, MEMORY_HOPE, measure_time, NULL, true, found, &value), SHOAL_OK);
            assert_true(value == best.value);
            if (value < PARTITION_NEVER)
                see_bottleneck(found, &again);
            assert_true(again.value == best.value);
            check_transfers(&problem, 20 + 10 * (seed % 7));
        }
        problem_close(&problem);
        free_small(&small);
    }
}

/* ---- By hand ------------------------------------------------------------------------------------------------------------- */

/* Four units of 100, 100, 100 and 300: two stages are best cut behind the third. */
static void bytes_are_counted(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 4);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    (void)state;
    add(profile, "a", 100, 1000, 10, 7);
    add(profile, "b", 100, 2000, 20, 8);
    add(profile, "c", 100, 4000, 40, 9);
    add(profile, "d", 300, 8000, 80, 1);
    assert_int_equal(shoal_profile_add_output(profile, 0, 3, 100, NULL, 0), SHOAL_OK);
    assert_int_equal(shoal_profile_add_tie(profile, (const uint32_t[]){0, 1, 3}, 3, 500, NULL, 0), SHOAL_OK);
    options.bytes_per_us = 10;
    options.latency_us = 0.5;
    options.state_shards = 4;
    options.slots = 3;
    struct shoal_partition *partition = create(profile, schedule, &options);
    const struct shoal_stage first = stage_of(partition, 0), second = stage_of(partition, 1);
    const struct shoal_rank_memory one = memory_of(partition, 0), other = memory_of(partition, 1);
    assert_true(first.first_unit == 0 && first.unit_count == 3 && second.first_unit == 3 && second.unit_count == 1);
    assert_true(first.forward == 300 && first.parameter_bytes == 6500 && first.kept_bytes == 70 && first.received_bytes == 0);
    assert_true(is_near(first.transfer, 0.5 + 10.9) && second.transfer == 0 && second.received_bytes == 109);
    assert_true(one.parameter_bytes == 6500 && one.gradient_bytes == 6500 && one.state_bytes == 3250);
    assert_true(one.activation_bytes == 140 && one.buffer_bytes == 327 && one.total_bytes == 16717 && one.limit_bytes == 0);
    assert_true(other.parameter_bytes == 8000 && other.activation_bytes == 80 && other.buffer_bytes == 327);
    assert_true(is_near(times_of(partition).tied, 2 * (0.5 + 250 / 10.0)) && times_of(partition).is_optimal);
    assert_true(is_near(times_of(partition).bottleneck, 900));
    shoal_partition_free(partition);
    options.recomputes = 1;
    partition = create(profile, schedule, &options);
    assert_true(memory_of(partition, 0).activation_bytes == 70 && memory_of(partition, 1).activation_bytes == 109 + 80);
    assert_true(stage_of(partition, 0).input_gradient == 300 && stage_of(partition, 0).forward == 300);
    assert_true(stage_of(partition, 0).recomputes == 1 && first.recomputes == 0);
    assert_true(is_near(times_of(partition).bottleneck, 1200));
    shoal_partition_free(partition);
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

static void ranks_may_be_unequal_and_empty(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 3, 6);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    const double speeds[] = {1, 4, 1};
    (void)state;
    for (int i = 0; i < 6; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 2, 0, 0, 0);
    }
    options.rank_speeds = speeds;
    struct shoal_partition *partition = create(profile, schedule, &options);
    assert_true(stage_of(partition, 0).unit_count == 1 && stage_of(partition, 1).unit_count == 4);
    assert_true(stage_of(partition, 1).forward == 2 && stage_of(partition, 2).unit_count == 1);
    shoal_partition_free(partition);
    options.latency_us = 1e6; /* as many transfers, but no reason to use the slow ranks */
    partition = create(profile, schedule, &options);
    assert_true(stage_of(partition, 1).unit_count == 6);
    assert_non_null(strstr(shoal_partition_reason(partition, 2), "stage 2 is empty"));
    shoal_partition_free(partition);
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

static void pins_and_ties_are_kept(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *line = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 4), *v = new_schedule(SHOAL_SCHEDULE_V_ZB, 2, 4);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    (void)state;
    for (int i = 0; i < 8; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 1, 100, 1, 1);
    }
    assert_int_equal(shoal_profile_add_tie(profile, (const uint32_t[]){0, 7}, 2, 100, NULL, 0), SHOAL_OK);
    options.keeps_ties_together = 1;
    for (int effort = 0; effort < 2; effort++) {
        options.effort = effort ? 400 : 0;
        struct shoal_partition *partition = create(profile, line, &options);
        assert_true(stage_of(partition, 0).unit_count == 8 || stage_of(partition, 1).unit_count == 8);
        shoal_partition_free(partition);
        partition = create(profile, v, &options); /* stages 0 and 3 are on rank 0 */
        assert_true(stage_of(partition, 0).unit_count > 0 && stage_of(partition, 3).unit_count > 0);
        assert_true(memory_of(partition, 0).parameter_bytes % 100 == 0 && times_of(partition).tied == 0);
        assert_true(memory_of(partition, 0).parameter_bytes + memory_of(partition, 1).parameter_bytes == 700);
        shoal_partition_free(partition);
    }
    profile->units[2].stage = 1;
    options.keeps_ties_together = 0;
    struct shoal_partition *partition = create(profile, line, &options);
    assert_true(stage_of(partition, 1).first_unit == 2);
    assert_non_null(strstr(shoal_partition_reason(partition, 1), "u2 is pinned to stage 1"));
    shoal_partition_free(partition);
    shoal_schedule_free(line);
    shoal_schedule_free(v);
    shoal_profile_free(profile);
}

/* A tree with a heavy embedding: "wte" | "h.0 h.1" | "h.2 h.3" | "head", by time alone. */
static void trees_are_divided(void **state)
{
    static const struct {
        const char *name;
        double time;
        uint64_t parameters;
    } units[] = {{"wte", 1, 600}, {"h.0.a", 5, 20}, {"h.0.b", 5, 20}, {"h.1", 10, 40},
                 {"h.2", 10, 40}, {"h.3", 10, 40},  {"head", 9, 40}};
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 4, 4);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    (void)state;
    for (size_t i = 0; i < COUNT_OF(units); i++)
        add(profile, units[i].name, units[i].time, units[i].parameters, 0, 0);
    options.method = SHOAL_PARTITION_TREE;
    options.memory_weight = 0;
    struct shoal_partition *partition = create(profile, schedule, &options);
    /* segments wte | h | head cost 1, 40, 9: D'Hondt gives 4 stages to h (40, 20, 13, 10), and none to the others */
    static const uint32_t by_time[] = {0, 3, 4, 5};
    for (uint32_t s = 0; s < 4; s++)
        assert_int_equal(stage_of(partition, s).first_unit, by_time[s]);
    shoal_partition_free(partition);
    options.memory_weight = 1;
    partition = create(profile, schedule, &options);
    static const uint32_t by_memory[] = {0, 1, 1, 1}; /* wte has 600 of 800: three stages, and cannot use them */
    for (uint32_t s = 0; s < 4; s++)
        assert_int_equal(stage_of(partition, s).first_unit, by_memory[s]);
    shoal_partition_free(partition);
    options.method = SHOAL_PARTITION_EQUAL;
    partition = create(profile, schedule, &options);
    static const uint32_t equal[] = {0, 1, 3, 5};
    for (uint32_t s = 0; s < 4; s++)
        assert_int_equal(stage_of(partition, s).first_unit, equal[s]);
    shoal_partition_free(partition);
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* ---- Large cases --------------------------------------------------------------------------------------------------------- */

static struct shoal_profile *large_profile(uint32_t units, uint64_t random)
{
    struct shoal_profile *profile = new_profile();
    for (uint32_t i = 0; i < units; i++) {
        char name[24];
        snprintf(name, sizeof name, "layer.%u", i);
        const double forward = 10 + (double)reference_below(&random, 90);
        const uint64_t parameters = 1000 + reference_below(&random, 100000);
        const uint64_t kept = reference_below(&random, 1000);
        add(profile, name, forward, parameters, kept, reference_below(&random, 1000));
    }
    return profile;
}

/* 1,000 units on 64 stages, with a limit that leaves little room. */
static void large_cases_are_fast_and_near_the_bound(void **state)
{
    struct shoal_profile *profile = large_profile(1000, 15);
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 64, 256);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct timespec begin, end;
    (void)state;
    for (int is_limited = 0; is_limited < 2; is_limited++) {
        options.memory_bytes = is_limited ? 5500000 : 0;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
        struct shoal_partition *partition = create(profile, schedule, &options);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        const struct shoal_partition_times times = times_of(partition);
        print_message("step %.0f, bound %.0f, %.2f s\n", times.step, times.lower_bound,
                      (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec));
        assert_true(times.step <= 1.05 * times.lower_bound && times.step >= times.lower_bound);
        assert_true(end.tv_sec - begin.tv_sec < 60); /* a second without sanitizers and emulators */
        for (uint32_t r = 0; r < 64; r++)
            assert_true(!is_limited || memory_of(partition, r).total_bytes <= options.memory_bytes);
        shoal_partition_free(partition);
    }
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* A rank without a stage beside one with two: a tie of both stages of one rank costs nothing, and may stay together. */
static void ties_on_one_of_idle_ranks_cost_nothing(void **state)
{
    const char *order = "0F0,0F1,2F0,2B0,0B0,2F1,2B1,0B1\n\n1F0,1F1,1B0,1B1";
    struct shoal_profile *profile = NULL;
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    const uint32_t tied[] = {0, 5};
    char why[400] = "";
    (void)state;
    assert_int_equal(shoal_profile_create("tied", &profile), SHOAL_OK);
    for (uint32_t i = 0; i < 6; i++) {
        char name[8];
        struct shoal_unit unit = SHOAL_UNIT_INIT;
        snprintf(name, sizeof name, "u%u", i);
        unit.name = name;
        unit.forward = unit.input_gradient = unit.weight_gradient = 1;
        unit.parameter_bytes = 1000000;
        unit.stage = i == 0 ? 0 : i == 5 ? 2 : SHOAL_ANY_STAGE;
        assert_int_equal(shoal_profile_add_unit(profile, &unit, why, sizeof why), SHOAL_OK);
    }
    assert_int_equal(shoal_profile_add_tie(profile, tied, 2, 1000000, why, sizeof why), SHOAL_OK);
    assert_int_equal(shoal_schedule_read(order, strlen(order), &schedule, why, sizeof why), SHOAL_OK);
    options.bytes_per_us = 1;
    for (options.keeps_ties_together = 0; options.keeps_ties_together < 2; options.keeps_ties_together++) {
        struct shoal_partition *partition = create(profile, schedule, &options);
        const struct shoal_partition_times times = times_of(partition);
        assert_true(times.tied == 0 && times.lower_bound <= times.step && times.step < 100);
        shoal_partition_free(partition);
    }
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* Never worse than equal numbers, the tree, or the least bottleneck, however little effort. */
static void searches_are_never_worse_than_other_methods(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct shoal_profile *profile = large_profile(40 + (uint32_t)seed, seed);
        struct shoal_schedule *schedule = new_schedule(seed % 2 ? SHOAL_SCHEDULE_ZB_H1 : SHOAL_SCHEDULE_1F1B, 6, 12);
        struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
        double steps[3];
        options.effort = 1;
        for (unsigned method = 0; method < 3; method++) {
            options.method = (enum shoal_partition_method)method;
            struct shoal_partition *partition = create(profile, schedule, &options);
            steps[method] = times_of(partition).step;
            shoal_partition_free(partition);
        }
        assert_true(steps[SHOAL_PARTITION_SHORTEST] <= steps[SHOAL_PARTITION_TREE]);
        assert_true(steps[SHOAL_PARTITION_SHORTEST] <= steps[SHOAL_PARTITION_EQUAL]);
        shoal_schedule_free(schedule);
        shoal_profile_free(profile);
    }
}

static void refuse(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                   const struct shoal_partition_options *options, const char *told)
{
    struct shoal_partition *partition = NULL;
    char text[TEXT] = "";
    assert_int_equal(shoal_partition_create(profile, schedule, options, &partition, text, sizeof text), SHOAL_ERR_ARGUMENT);
    if (!strstr(text, told) || partition)
        fail_msg("not \"%s\", but: %s", told, text);
}

/* Sizes and times at their limits: results are large, but finite. */
static void limits_do_not_overflow(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 64);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    const uint64_t largest = UINT64_C(1) << 50;
    (void)state;
    for (int i = 0; i < 5; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 1e15, largest, largest, largest);
    }
    options.bytes_per_us = 1e-3;
    options.state_ratio = 1e6;
    options.recomputes = 1;
    struct shoal_partition *partition = create(profile, schedule, &options);
    const struct shoal_partition_times times = times_of(partition);
    assert_true(times.step > 64 * 5e15 && times.step < 1e20 && times.lower_bound <= times.step);
    uint64_t parameters = 0;
    for (uint32_t r = 0; r < 2; r++) {
        parameters += memory_of(partition, r).parameter_bytes;
        assert_true(memory_of(partition, r).state_bytes <= UINT64_C(1) << 63);
    }
    assert_true(parameters == 5 * largest);
    shoal_partition_free(partition);
    options.memory_bytes = 1;
    refuse(profile, schedule, &options, "Neither recomputation nor shards");
    options.memory_bytes = UINT64_MAX;
    refuse(profile, schedule, &options, "are short");
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* A division that is given keeps its units. Stages are recomputed only if it does not fit without. */
static void given_divisions_are_recomputed(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 4);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition *partition = NULL;
    const uint32_t first_units[] = {0, 1};
    (void)state;
    for (int i = 0; i < 2; i++)
        add(profile, i ? "b" : "a", 30, 0, 100, 10);
    options.recomputes = SHOAL_RECOMPUTES_IF_SHORT;
    options.slots = 1;
    const struct {
        uint64_t memory;
        int first, second; /* recomputed */
        uint64_t bytes;    /* expected activations on rank 0 */
    } cases[] = {{0, 0, 0, 200}, {210, 0, 0, 200}, {209, 1, 0, 100}, {50, 1, 1, 100}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        options.memory_bytes = cases[i].memory;
        assert_int_equal(shoal_partition_create_at(profile, schedule, &options, first_units, &partition, NULL, 0), SHOAL_OK);
        assert_int_equal(stage_of(partition, 0).recomputes, cases[i].first);
        assert_int_equal(stage_of(partition, 1).recomputes, cases[i].second);
        assert_int_equal(memory_of(partition, 0).activation_bytes, cases[i].bytes);
        shoal_partition_free(partition);
        partition = NULL;
    }
    options.recomputes = 3;
    refuse(profile, schedule, &options, "recomputes is 3");
    options.recomputes = -1;
    refuse(profile, schedule, &options, "recomputes is -1");
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* A chosen schedule recomputes what its partition does, whatever its kind. */
static void chosen_schedules_are_recomputed(void **state)
{
    struct shoal_profile *profile = new_profile();
    (void)state;
    for (int i = 0; i < 16; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 100, 1000, 1000, 10);
    }
    for (unsigned kind = 0; kind <= SHOAL_SCHEDULE_AUTO; kind++) {
        struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
        struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
        struct shoal_schedule *schedule = NULL;
        struct shoal_partition *partition = NULL;
        char text[TEXT] = "";
        uint32_t count = 0;
        wanted.kind = (enum shoal_schedule_kind)kind;
        wanted.ranks = 4;
        wanted.microbatches = 8;
        options.effort = 100000;
        options.recomputes = SHOAL_RECOMPUTES_IF_SHORT;
        options.memory_bytes = 23500;
        wanted.kept_share = options.kept_share = 0.1; /* otherwise weight gradients that wait keep as much */
        if (shoal_partition_choose(profile, &wanted, &options, &schedule, &partition, NULL, text, sizeof text) != SHOAL_OK)
            fail_msg("%s: %s", shoal_schedule_name(wanted.kind), text);
        assert_int_equal(shoal_schedule_check(schedule, 0, text, sizeof text), SHOAL_OK);
        for (uint32_t s = 0; s < shoal_schedule_stages(schedule); s++) {
            assert_int_equal(shoal_schedule_recomputes(schedule, s), stage_of(partition, s).recomputes);
            count += shoal_schedule_recomputes(schedule, s) != 0;
        }
        assert_true(kind == SHOAL_SCHEDULE_AUTO || kind == SHOAL_SCHEDULE_V_MIN || kind == SHOAL_SCHEDULE_V_HALF || count > 0);
        shoal_partition_free(partition);
        shoal_schedule_free(schedule);
    }
    shoal_profile_free(profile);
}

/* ---- Ranks that are replicated ------------------------------------------------------------------------------------------- */

static void replicas_share_each_microbatch(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 4);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition *partition = NULL;
    uint32_t replicas[] = {2, 1};
    const uint32_t first_units[] = {0, 2};
    (void)state;
    add(profile, "a", 100, 1000, 10, 7);
    add(profile, "b", 100, 2000, 20, 8);
    add(profile, "c", 100, 4000, 40, 9);
    options.bytes_per_us = 10;
    options.latency_us = 0.5;
    options.slots = 3;
    options.rank_replicas = replicas;
    assert_int_equal(shoal_partition_create_at(profile, schedule, &options, first_units, &partition, NULL, 0), SHOAL_OK);
    const struct shoal_stage first = stage_of(partition, 0), second = stage_of(partition, 1);
    const struct shoal_rank_memory one = memory_of(partition, 0), other = memory_of(partition, 1);
    assert_true(first.replicas == 2 && second.replicas == 1);
    assert_true(first.forward == 100 && first.weight_gradient == 100 && second.forward == 100);
    assert_true(first.kept_bytes == 15 && second.kept_bytes == 40 && second.received_bytes == 8);
    assert_true(is_near(first.transfer, 0.5 + 0.8)); /* a replica of rank 1 receives all of it */
    assert_true(one.parameter_bytes == 3000 && one.activation_bytes == 30 && one.buffer_bytes == 12);
    assert_true(other.activation_bytes == 40 && other.buffer_bytes == 24);
    assert_true(is_near(times_of(partition).replicas, 2 * (0.5 + 1500 / 10.0)));
    const struct shoal_stage_costs costs[] = {{100, 100, 100, 1.3}, {100, 100, 100, 0}};
    struct shoal_schedule_times times = SHOAL_SCHEDULE_TIMES_INIT;
    assert_int_equal(shoal_schedule_time_stages(schedule, costs, 1, &times, NULL), SHOAL_OK);
    assert_true(is_near(times_of(partition).step, times.step + 301));
    shoal_partition_free(partition);
    replicas[1] = 4;
    partition = NULL;
    assert_int_equal(shoal_partition_create_at(profile, schedule, &options, first_units, &partition, NULL, 0), SHOAL_OK);
    assert_true(is_near(stage_of(partition, 0).transfer, 0.5 + 0.4) && stage_of(partition, 1).forward == 25);
    assert_true(is_near(times_of(partition).replicas, 2 * 3 * (0.5 + 1000 / 10.0)));
    shoal_partition_free(partition);
    replicas[1] = 0;
    refuse(profile, schedule, &options, "rank 1 has 0 replicas");
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

/* Calls itself for each way to divide ranks among those of a schedule. Returns the shortest step; INFINITY: none fits. */
static double best_replicas(const struct small_case *small, const struct shoal_schedule_options *wanted, uint32_t *replicas,
                            uint32_t count, uint32_t left)
{
    double best = INFINITY;
    if (left == 0) {
        struct shoal_schedule_options own = *wanted;
        struct shoal_partition_options options = small->options;
        struct shoal_schedule *schedule = NULL;
        struct shoal_partition *partition = NULL;
        own.ranks = count;
        options.rank_replicas = replicas;
        if (shoal_partition_choose(small->profile, &own, &options, &schedule, &partition, NULL, NULL, 0) == SHOAL_OK)
            best = times_of(partition).step;
        shoal_partition_free(partition);
        shoal_schedule_free(schedule);
        return best;
    }
    for (replicas[count] = 1; replicas[count] <= left; replicas[count]++) {
        const uint32_t own = replicas[count];
        const double step = best_replicas(small, wanted, replicas, count + 1, left - own);
        best = step < best ? step : best;
        replicas[count] = own;
    }
    return best;
}

/* Like the last layers of AlexNet: much to sum for little to compute, so that only the others should be replicated. */
static void make_replicated(struct small_case *small, uint64_t *random, struct shoal_schedule_options *wanted, unsigned seed)
{
    make_small(small, random, SHOAL_SCHEDULE_1F1B, 1);
    for (uint32_t i = 0; i < small->profile->count; i++)
        small->profile->units[i].stage = SHOAL_ANY_STAGE;
    small->profile->units[small->profile->count - 1].parameter_bytes *= 1 + reference_below(random, 20);
    small->options.memory_bytes = small->options.rank_memory_bytes ? small->memory[0] : 0;
    small->options.rank_memory_bytes = NULL;
    small->options.rank_speeds = NULL;
    small->options.recomputes = 0;
    *wanted = (struct shoal_schedule_options)SHOAL_SCHEDULE_OPTIONS_INIT;
    wanted->ranks = 2 + seed % 4;
    wanted->microbatches = 1 + seed % 9;
}

/* Returns true if the partition has several ranks, one of them replicated. All replicas together must be `all`. */
static bool is_mixed(const struct shoal_partition *partition, uint32_t all)
{
    uint32_t sum = 0, most = 0;
    for (uint32_t s = 0; s < shoal_partition_stages(partition); s++) {
        const uint32_t own = stage_of(partition, s).replicas;
        sum += own;
        most = own > most ? own : most;
    }
    assert_int_equal(sum, all);
    return most > 1 && most < all;
}

static void replicas_are_chosen(void **state)
{
    uint64_t random = 19;
    uint32_t all = 0, optimal = 0, mixed = 0;
    (void)state;
    for (unsigned seed = 0; seed < 60; seed++) {
        struct small_case small;
        struct shoal_schedule_options wanted;
        struct shoal_schedule *schedule = NULL;
        struct shoal_partition *partition = NULL;
        uint32_t replicas[8];
        make_replicated(&small, &random, &wanted, seed);
        const double known = best_replicas(&small, &wanted, replicas, 0, wanted.ranks);
        const enum shoal_status status =
            shoal_partition_replicate(small.profile, &wanted, &small.options, &schedule, &partition, NULL, NULL, 0);
        assert_true((status == SHOAL_OK) == (known < INFINITY));
        if (status == SHOAL_OK) {
            assert_true(times_of(partition).step >= known * (1 - 1e-9));
            all++;
            optimal += is_near(times_of(partition).step, known);
            mixed += is_mixed(partition, wanted.ranks);
        }
        shoal_partition_free(partition);
        shoal_schedule_free(schedule);
        free_small(&small);
    }
    print_message("optimal in %u of %u; %u mix stages and replicas\n", optimal, all, mixed);
    assert_true(all > 30 && mixed > 3 && optimal * 10 >= all * 9);
}

static void wrong_replications_are_refused(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *partition = NULL;
    const double speeds[] = {1, 1};
    char text[TEXT] = "";
    (void)state;
    add(profile, "a", 100, 1000, 10, 7);
    wanted.ranks = 2;
    wanted.microbatches = 2;
    options.rank_speeds = speeds;
    assert_int_equal(shoal_partition_replicate(profile, &wanted, &options, &schedule, &partition, NULL, text, sizeof text),
                     SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(text, "leave them out"));
    options.rank_speeds = NULL;
    wanted.ranks = 1025;
    assert_int_equal(shoal_partition_replicate(profile, &wanted, &options, &schedule, &partition, NULL, text, sizeof text),
                     SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(text, "1025 ranks: there must be 1 to 1024"));
    wanted.ranks = 2;
    options.memory_bytes = 10;
    assert_int_equal(shoal_partition_replicate(profile, &wanted, &options, &schedule, &partition, NULL, text, sizeof text),
                     SHOAL_ERR_ARGUMENT);
    assert_non_null(strstr(text, "are short"));
    assert_int_equal(shoal_partition_replicate(NULL, &wanted, &options, &schedule, &partition, NULL, NULL, 0),
                     SHOAL_ERR_ARGUMENT);
    assert_true(!schedule && !partition);
    shoal_profile_free(profile);
}

/* ---- A schedule with it -------------------------------------------------------------------------------------------------- */

static void the_best_kind_is_chosen(void **state)
{
    struct shoal_profile *profile = large_profile(24, 16);
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    double chosen = 0;
    (void)state;
    wanted.ranks = 4;
    wanted.microbatches = 8;
    options.effort = 100000;
    for (unsigned kind = SHOAL_SCHEDULE_AUTO + 1; kind-- > 0;) {
        struct shoal_schedule *schedule = NULL;
        struct shoal_partition *partition = NULL;
        char text[TEXT] = "";
        enum shoal_schedule_kind found;
        wanted.kind = (enum shoal_schedule_kind)kind;
        if (shoal_partition_choose(profile, &wanted, &options, &schedule, &partition, &found, text, sizeof text) != SHOAL_OK)
            fail_msg("%s", text);
        assert_true(kind == SHOAL_SCHEDULE_AUTO || found == wanted.kind);
        assert_int_equal(shoal_schedule_stages(schedule), shoal_partition_stages(partition));
        chosen = kind == SHOAL_SCHEDULE_AUTO ? times_of(partition).step : chosen;
        assert_true(chosen <= times_of(partition).step);
        shoal_partition_free(partition);
        shoal_schedule_free(schedule);
    }
    shoal_profile_free(profile);
}

/* ---- What is refused ----------------------------------------------------------------------------------------------------- */

static void refuse_memory(struct shoal_profile *profile, uint64_t bytes, const char *told, const char *also)
{
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_schedule *schedule = NULL;
    struct shoal_partition *partition = NULL;
    char text[TEXT] = "";
    wanted.ranks = 2;
    wanted.microbatches = 4;
    options.memory_bytes = bytes;
    assert_int_equal(shoal_partition_choose(profile, &wanted, &options, &schedule, &partition, NULL, text, sizeof text),
                     SHOAL_ERR_ARGUMENT);
    if (!strstr(text, told) || !strstr(text, also) || schedule || partition)
        fail_msg("%s", text);
}

/* Two units for each of two ranks: parameters 2000, gradients 2000, states 4000, activations 2 * 1000. */
static void lack_of_memory_is_explained(void **state)
{
    struct shoal_profile *profile = new_profile();
    (void)state;
    for (int i = 0; i < 4; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 1, 1000, 500, 10);
    }
    refuse_memory(profile, 9100,
                  "rank 0 needs 9.8 KiB and has 8.9 KiB, so 910 B are short (parameters 2.0 KiB, gradients 2.0 KiB",
                  "It would fit if activations of stage 0 are recomputed, or with gradients and states in 2 shards. With 1f1b "
                  "it would fit "
                  "on 3 ranks");
    refuse_memory(profile, 7100, "It would fit with gradients and states in 2 shards", "on 4 ranks");
    refuse_memory(profile, 3800, "if activations are recomputed, with gradients and states in 8 shards", "");
    refuse_memory(profile, 100, "Neither recomputation nor shards", "parameter shards");
    shoal_profile_free(profile);
}

static void pins_are_checked(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 3, 3);
    struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    (void)state;
    for (int i = 0; i < 4; i++) {
        char name[8];
        snprintf(name, sizeof name, "u%d", i);
        add(profile, name, 1, 100, 1, 1);
    }
    assert_int_equal(shoal_profile_add_tie(profile, (const uint32_t[]){0, 3}, 2, 100, NULL, 0), SHOAL_OK);
    profile->units[1].stage = 3;
    refuse(profile, schedule, &options, "unit u1 is pinned to stage 3, but there are 3 stages");
    profile->units[1].stage = 2;
    profile->units[3].stage = 1;
    refuse(profile, schedule, &options, "unit u3 is pinned to stage 1, but unit u1, which runs before it, to stage 2");
    options.keeps_ties_together = 1;
    profile->units[1].stage = 0;
    refuse(profile, schedule, &options, "a tie spans a pin"); /* u1 is between u0 and u3 */
    profile->units[1].stage = SHOAL_ANY_STAGE;
    profile->units[0].stage = 0;
    refuse(profile, schedule, &options, "unit u0 is pinned to stage 0 (rank 0) and unit u3 to stage 1 (rank 1)");
    options.method = SHOAL_PARTITION_EQUAL;
    options.keeps_ties_together = 0;
    refuse(profile, schedule, &options, "method equal found no partition that respects pins and ties");
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

static void options_are_checked(void **state)
{
    struct shoal_profile *profile = new_profile(), *empty = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 2);
    const struct shoal_partition_options good = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition_options options = good;
    const double speeds[] = {1, 0};
    const uint64_t memory[] = {1, 0};
    (void)state;
    add(profile, "a", 1, 1, 1, 1);
    refuse(NULL, schedule, &good, "NULL");
    refuse(profile, NULL, &good, "NULL");
    refuse(empty, schedule, &good, "no units");
#define WITH(field, value, told) \
    options = good;              \
    options.field = (value);     \
    refuse(profile, schedule, &options, told)
    WITH(struct_bytes, 0, "SHOAL_PARTITION_OPTIONS_INIT");
    WITH(method, (enum shoal_partition_method)3, "there is no method 3");
    WITH(memory_weight, 1.5, "memory_weight 1.5");
    WITH(kept_share, -1, "kept_share -1");
    WITH(bytes_per_us, NAN, "bytes_per_us");
    WITH(latency_us, INFINITY, "latency_us");
    WITH(gradient_ratio, -1, "gradient_ratio -1");
    WITH(state_ratio, INFINITY, "state_ratio");
    WITH(state_shards, 0, "shards is 0");
    WITH(rank_speeds, speeds, "the speed of rank 1 is 0");
    WITH(rank_memory_bytes, memory, "rank 1 has no memory");
#undef WITH
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
    shoal_profile_free(empty);
}

static void refuse_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule, const uint32_t *first_units,
                      const char *told)
{
    const struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition *partition = NULL;
    char text[TEXT] = "";
    assert_int_equal(shoal_partition_create_at(profile, schedule, &options, first_units, &partition, text, sizeof text),
                     SHOAL_ERR_ARGUMENT);
    if (!strstr(text, told))
        fail_msg("not \"%s\", but: %s", told, text);
}

static void given_divisions_are_checked(void **state)
{
    struct shoal_profile *profile = new_profile();
    struct shoal_schedule *schedule = new_schedule(SHOAL_SCHEDULE_1F1B, 2, 2);
    struct shoal_stage stage = {0};
    (void)state;
    add(profile, "a", 1, 1, 1, 1);
    add(profile, "b", 1, 1, 1, 1);
    refuse_at(profile, schedule, (const uint32_t[]){1, 1}, "stage 0 must begin with unit 0");
    refuse_at(profile, schedule, (const uint32_t[]){0, 3}, "stage 1 begins with unit 3, behind 2");
    refuse_at(profile, schedule, NULL, "NULL");
    profile->units[1].stage = 0;
    refuse_at(profile, schedule, (const uint32_t[]){0, 1}, "contradict a pin");
    const struct shoal_partition_options options = SHOAL_PARTITION_OPTIONS_INIT;
    struct shoal_partition *partition = create(profile, schedule, &options);
    assert_int_equal(shoal_partition_stage(partition, 0, &stage), SHOAL_ERR_ARGUMENT); /* struct_bytes is not set */
    stage.struct_bytes = sizeof stage;
    assert_int_equal(shoal_partition_stage(partition, 2, &stage), SHOAL_ERR_ARGUMENT);
    shoal_partition_free(partition);
    shoal_schedule_free(schedule);
    shoal_profile_free(profile);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_stages_take_as_long),
        cmocka_unit_test(unequal_stages_are_timed),
        cmocka_unit_test(small_cases_are_optimal),
        cmocka_unit_test(stages_are_recomputed_if_memory_is_short),
        cmocka_unit_test(given_divisions_are_recomputed),
        cmocka_unit_test(small_cases_of_all_kinds_are_optimal),
        cmocka_unit_test(searches_end_near_the_optimum),
        cmocka_unit_test(bottlenecks_are_least),
        cmocka_unit_test(bytes_are_counted),
        cmocka_unit_test(ranks_may_be_unequal_and_empty),
        cmocka_unit_test(pins_and_ties_are_kept),
        cmocka_unit_test(trees_are_divided),
        cmocka_unit_test(large_cases_are_fast_and_near_the_bound),
        cmocka_unit_test(searches_are_never_worse_than_other_methods),
        cmocka_unit_test(ties_on_one_of_idle_ranks_cost_nothing),
        cmocka_unit_test(limits_do_not_overflow),
        cmocka_unit_test(replicas_share_each_microbatch),
        cmocka_unit_test(replicas_are_chosen),
        cmocka_unit_test(wrong_replications_are_refused),
        cmocka_unit_test(the_best_kind_is_chosen),
        cmocka_unit_test(chosen_schedules_are_recomputed),
        cmocka_unit_test(lack_of_memory_is_explained),
        cmocka_unit_test(pins_are_checked),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(given_divisions_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
