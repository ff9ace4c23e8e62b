/* Partitions of pipelines: what the files of this module share. See include/shoal/pipeline.h.
 *
 *     profile.c, profile_json.c, json.c    units of a model, and their text
 *     partition.c                          options, results
 *     model.c                              a problem: times and memory of stages, the predicted step of a division
 *     divide.c                             the best division by a measure of single stages, exactly
 *     bound.c                              such a measure that no step is below
 *     tree.c                               the division by the tree of modules
 *     refine.c                             the search for the shortest predicted step
 *     reasons.c, advice.c                  why a stage begins where it does; what would fit
 *     partition_recompute.c                which stages are recomputed
 *     partition_sums.c                     sums of gradients, in a schedule's own actions
 *     choose.c                             a schedule together with a partition
 *     replicate.c                          also the number of ranks, and which of them are replicated
 *
 * A *division* is a list of stages + 1 numbers: the first unit of each stage, and the number of units. */
#ifndef SHOAL_PIPELINE_PARTITION_H
#define SHOAL_PIPELINE_PARTITION_H

#include <stdbool.h>
#include <stdio.h>

#include "shoal/pipeline.h"

#define PARTITION_TRY(expression)                           \
    do {                                                    \
        const enum shoal_status try_status_ = (expression); \
        if (try_status_ != SHOAL_OK)                        \
            return try_status_;                             \
    } while (0)

#define PROFILE_BYTES_MAX (UINT64_C(1) << 50)
#define PROFILE_NAME_MAX 255
#define PARTITION_REASON 448 /* characters of a reason */
#define PARTITION_NEVER 1e300

/* The text of a failure; `at` may be NULL. */
struct partition_text {
    char *at;
    size_t bytes;
};

/* Writes the reason and returns the status. */
SHOAL_MUST_USE enum shoal_status partition_refuse(struct partition_text text, enum shoal_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- profile.c ---- */

struct profile_output {
    uint32_t from;
    uint32_t to;
    uint64_t bytes;
};

struct profile_tie {
    uint32_t *units; /* rising */
    uint32_t count;
    uint64_t bytes;
};

struct shoal_profile {
    char *name;
    struct shoal_unit *units;
    uint64_t *tied; /* [count]: bytes that a unit shares in all its ties */
    uint32_t count, room;
    uint32_t *slots; /* hash table of units + 1 by name; 0: free */
    uint32_t slot_count;
    struct profile_output *outputs;
    size_t output_count, output_room;
    struct profile_tie *ties;
    size_t tie_count, tie_room;
};

/* Returns true if the text is not empty, short enough, UTF-8 as far as its bytes show, and has no control characters. */
bool profile_is_name(const char *name);

/* ---- json.c: reads JSON from the front ---- */

enum json_kind { JSON_OBJECT, JSON_ARRAY, JSON_TEXT, JSON_NUMBER, JSON_WORD, JSON_BAD };

struct json {
    const char *at, *end;
    uint32_t line;
    const char *error; /* NULL: none yet */
    int depth;
};

/* The next value is opened, or read: a text into `text` with a final zero, a number into `number`. */
struct json_value {
    enum json_kind kind;
    double number;
    char text[PROFILE_NAME_MAX + 1];
};

void json_open(struct json *json, const char *bytes, size_t count);
enum json_kind json_value(struct json *json, struct json_value *value_out);

/* After the begin of an object or array: moves to its next member or element. Returns false at its end or at an error. `first`
 * is true for the first one. key has room for PROFILE_NAME_MAX + 1. */
bool json_member(struct json *json, bool first, char *key);
bool json_element(struct json *json, bool first);

/* Skips a value, with everything in it. */
bool json_skip(struct json *json);

/* Returns true if nothing but space follows. */
bool json_ends(struct json *json);

/* ---- model.c ---- */

/* The rank of a stage, and how much the stage keeps in the order of its actions. */
struct stage_use {
    uint32_t rank;
    double inputs;     /* most microbatches that it keeps from their forward to their backward pass */
    double weights;    /* most that it keeps from their input gradient to their weight gradient */
    double flying;     /* most of both at a time, of the latter only kept_share */
    double recomputed; /* most that it keeps from their recomputation to their backward pass */
    bool is_far_ahead; /* the stage before is on another rank */
    bool is_far_back;  /* the stage behind is on another rank */
};

/* Two units of a tie that has none in between. */
struct shared_pair {
    uint32_t first, second;
    double bytes;
};

struct problem {
    const struct shoal_profile *profile;
    const struct shoal_schedule *schedule;
    struct shoal_partition_options options; /* complete: slots and effort are set */
    uint32_t units, stages, ranks;
    double *forward, *input, *weight, *parameters, *kept; /* [units + 1]: sums of the units before */
    double *cut;                                          /* [units + 1]: bytes that cross the begin of a unit */
    int32_t *pins;                                        /* [units]: stage or SHOAL_ANY_STAGE */
    bool *is_glued;                                       /* [units + 1]: no stage may begin here */
    struct stage_use *uses;                               /* [stages] */
    double *limits, *speeds;                              /* [ranks]: a replica's; that of all replicas together */
    double *shares;                                       /* [ranks]: the part of a microbatch that a replica has */
    uint32_t *replicas;                                   /* [ranks] */
    uint32_t *rank_stages;                                /* [ranks]: how many */
    bool is_one_each;                                     /* no rank has two stages */
    bool recomputes_all;                                  /* all stages are recomputed */
    struct shared_pair *pairs;                            /* by their first unit */
    uint32_t *pair_at;                                    /* [units + 2]: the first pair of a unit */
    double memory_ratio;                                  /* bytes on a rank for each byte of parameters */
    uint32_t actions;                                     /* of the schedule */
    struct shoal_stage_costs *costs;                      /* [stages]: room for problem_time() */
    uint64_t spent;                                       /* actions simulated so far */
};

/* The memory of a rank. */
struct memory_need {
    double parameters, gradients, states, activations, buffers;
};

SHOAL_MUST_USE enum shoal_status problem_open(struct problem *problem, const struct shoal_profile *profile,
                                              const struct shoal_schedule *schedule,
                                              const struct shoal_partition_options *options, struct partition_text text);
void problem_close(struct problem *problem);

/* Returns the time of units for a microbatch, at least: if only some stages are recomputed, without recomputation. */
static inline double problem_work(const struct problem *problem, uint32_t from, uint32_t to)
{
    const double passes = problem->recomputes_all ? 2 : 1;
    return passes * (problem->forward[to] - problem->forward[from]) + problem->input[to] - problem->input[from] +
           problem->weight[to] - problem->weight[from];
}

/* Returns the time of a transfer to a stage, which is not the first one, from the rank of the stage before. The stage begins
 * with the unit. */
double problem_transfer(const struct problem *problem, uint32_t stage, uint32_t unit);

/* Returns parameters of the units from `from` to before `to`, tied ones once. */
double problem_parameters(const struct problem *problem, uint32_t from, uint32_t to);

/* Compares a stage with the memory of its rank. ANY: not at all. HOPE: its own need with all of it, as if the rank had no other
 * stage. SURE: no less than its need with its share, so that the rank surely has enough. */
enum memory_rule { MEMORY_ANY, MEMORY_HOPE, MEMORY_SURE };

/* Returns the bytes that a stage lacks, or 0. `parameters` are those of its units. *grows_out, which may be NULL, is the same
 * without buffers: it does not fall when the stage gets more units. */
double problem_lack(const struct problem *problem, enum memory_rule rule, uint32_t stage, uint32_t from, uint32_t to,
                    double parameters, double *grows_out);

/* How good a division is. */
struct verdict {
    double excess; /* bytes that the neediest rank lacks */
    double step, tied, replicas, bubble;
};

/* Returns true if `one` is better: it has less excess, or the same and a shorter step. */
bool verdict_is_better(const struct verdict *one, const struct verdict *other);

/* Times a division and compares its memory. */
SHOAL_MUST_USE enum shoal_status problem_judge(struct problem *problem, const uint32_t *division, struct verdict *verdict_out);

/* Times of a division: the costs of each stage. */
void problem_costs(const struct problem *problem, const uint32_t *division, struct shoal_stage_costs *costs_out);

struct memory_need problem_need(const struct problem *problem, const uint32_t *division, uint32_t rank);
double problem_total(const struct memory_need *need);

/* Returns the rank that lacks most, and how much. */
uint32_t problem_neediest(const struct problem *problem, const uint32_t *division, double *lack_out);

/* Returns what the neediest rank lacks, 0 if it is less than a byte. */
double problem_excess(const struct problem *problem, const uint32_t *division);

/* Returns the stage of a unit: the last one that begins at it or before, of those that are not empty. */
uint32_t division_stage(const struct problem *problem, const uint32_t *division, uint32_t unit);

/* Returns how many ranks sum a tie's gradients, with their replicas; 1 if no two ranks of the schedule have units of it. */
uint32_t problem_members(const struct problem *problem, const uint32_t *division, const struct profile_tie *tie);

/* Returns the time of the sum of the gradients of some parameters among the replicas of a rank: a ring, 2 (k - 1) transfers of
 * a k-th of the bytes. */
double problem_replica_time(const struct problem *problem, uint32_t rank, double parameters);

/* Returns the time of the sum of a tie's gradients among `ranks` ranks: such a ring. */
double problem_sum_time(const struct problem *problem, const struct profile_tie *tie, uint32_t ranks);

/* Returns true if a division respects pins and ties that must stay together. */
bool problem_allows(const struct problem *problem, const uint32_t *division);

/* ---- divide.c, bound.c ---- */

/* A measure of a stage. It must not fall when the stage gets more units at its begin. */
typedef double (*stage_measure)(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to);

/* Finds a division with the least maximum of a measure among those that respect pins, glue and memory. *value_out is
 * PARTITION_NEVER if there is none. has_transfers: transfers count as well. */
SHOAL_MUST_USE enum shoal_status divide(const struct problem *problem, enum memory_rule rule, stage_measure measure,
                                        const void *arg, bool has_transfers, uint32_t *division_out, double *value_out);

/* Finds the least sum of the times of transfers, once over each begin of a stage, among those divisions for whose stages the
 * measure is not above the limit. *value_out is PARTITION_NEVER if there is none. division_out may be NULL. */
SHOAL_MUST_USE enum shoal_status divide_cheaply(const struct problem *problem, stage_measure measure, const void *arg,
                                                double limit, uint32_t *division_out, double *value_out);

/* The time of a stage for a microbatch; no arg. */
double measure_time(const struct problem *problem, const void *arg, uint32_t stage, uint32_t from, uint32_t to);

/* Finds a time below which no step is, and the division for which it is. The latter stays unset if there is none. */
SHOAL_MUST_USE enum shoal_status bound_find(struct problem *problem, uint32_t *division_out, double *bound_out);

/* ---- tree.c, refine.c ---- */

SHOAL_MUST_USE enum shoal_status tree_divide(const struct problem *problem, uint32_t *division_out);
void equal_divide(const struct problem *problem, uint32_t *division_out);

/* Finds the division with the best verdict. *is_optimal_out: all were compared. */
SHOAL_MUST_USE enum shoal_status refine(struct problem *problem, const uint32_t *bound_division, uint32_t *division_out,
                                        struct verdict *verdict_out, bool *is_optimal_out);

/* ---- partition_fits.c ---- */

/* Looks for a division that fits, whatever its step. With several stages on a rank it may overlook one. If options->recomputes
 * is not AS_SCHEDULED, all stages are recomputed. */
SHOAL_MUST_USE enum shoal_status fits_at_all(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                             const struct shoal_partition_options *options, bool *fits_out);

/* Finds how many first stages must be recomputed, and how many may be, so that a division fits. Both are 0 if none was found
 * that fits even if all stages are recomputed, or all but the last. */
SHOAL_MUST_USE enum shoal_status recompute_range(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                 const struct shoal_partition_options *options, uint32_t *fewest_out,
                                                 uint32_t *most_out);

/* ---- reasons.c, advice.c ---- */

/* Writes a line for each stage. */
SHOAL_MUST_USE enum shoal_status reasons_write(struct problem *problem, const uint32_t *division, const struct verdict *verdict,
                                               char (*reasons)[PARTITION_REASON]);

/* Writes what is short in a division that does not fit, and what would fit. Returns ERR_ARGUMENT, or ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status advice_refuse(const struct problem *problem, const uint32_t *division,
                                               struct partition_text text);

/* ---- partition_sums.c ---- */

/* Stages that share parameters with stages of other ranks, and what their sums take. */
struct partition_sums {
    struct shoal_tied_stage *tied; /* owned by the partition */
    size_t tied_count;
};

/* Lists the tied stages of a division, and sets sum_replicas and sum_tied of each stage. */
SHOAL_MUST_USE enum shoal_status partition_sums_find(const struct problem *problem, const uint32_t *division,
                                                     struct shoal_stage *stages, struct partition_sums *sums_out);

/* Times the schedule with these sums in it. */
SHOAL_MUST_USE enum shoal_status partition_sums_time(const struct problem *problem, const struct shoal_stage *stages,
                                                     const struct partition_sums *sums, double *step_out);

/* ---- partition.c ---- */

/* These make a partition for the schedule's own recomputed stages. The options are complete and checked. */
SHOAL_MUST_USE enum shoal_status partition_make_for(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                    const struct shoal_partition_options *options,
                                                    struct shoal_partition **partition_out, bool *lacks_out,
                                                    struct partition_text text);
SHOAL_MUST_USE enum shoal_status partition_make_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                   const struct shoal_partition_options *options, const uint32_t *first_units,
                                                   struct shoal_partition **partition_out, struct partition_text text);

/* Replaces the lower bound, and forgets that a partition is optimal. */
void partition_set_bound(struct shoal_partition *partition, double bound);
void partition_first_units(const struct shoal_partition *partition, uint32_t *first_units_out);
/* Returns true if each rank's need is within its limit. */
bool partition_fits(const struct shoal_partition *partition);

/* ---- partition_recompute.c: options are complete and checked ---- */

/* Like partition_make_for(), but also chooses the recomputed stages, by options->recomputes. */
SHOAL_MUST_USE enum shoal_status partition_recompute(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                     const struct shoal_partition_options *options,
                                                     struct shoal_partition **partition_out, bool *lacks_out,
                                                     struct partition_text text);
SHOAL_MUST_USE enum shoal_status partition_recompute_at(const struct shoal_profile *profile,
                                                        const struct shoal_schedule *schedule,
                                                        const struct shoal_partition_options *options,
                                                        const uint32_t *first_units, struct shoal_partition **partition_out,
                                                        struct partition_text text);

/* ---- partition_create.c ---- */

/* Like shoal_partition_create(), with *lacks_out: units do not fit into the memory. */
SHOAL_MUST_USE enum shoal_status partition_make(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                                const struct shoal_partition_options *options,
                                                struct shoal_partition **partition_out, bool *lacks_out,
                                                struct partition_text text);

#endif
