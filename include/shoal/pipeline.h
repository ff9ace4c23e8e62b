/* Pipelines: a model is cut into stages, which ranks compute one after the other, for several microbatches at a time. This
 * header is the manual of schedules: which rank computes what in which order. It builds on shoal.h, but needs no context and no
 * communicator: the functions only compute. It is new and may still change.
 *
 * A *stage* is a part of the model, on one rank; a rank may have several. Each microbatch goes forward through all stages and
 * backward again. A backward pass may be split: the gradient of a stage's input, for which the stage before it waits, and the
 * gradients of its weights, for which nobody waits.
 *
 *     rank 0   F0 F1 F2 F3             I0 W0 F4 I1 W1 F5 ...      F forward, I input gradient, W weight gradient, B both
 *     rank 1      F0 F1 F2          I0 F3 W0 I1 F4 W1 ...         the number is the microbatch's
 *     rank 2         F0 F1       I0 F2 I1 W0 ...
 *     rank 3            F0 I0 F1 I1 W0 ...                        time without an action is the bubble
 *
 * A schedule is a list of actions for each rank. It can be made here, printed and read in the form of torch's pipelines,
 * checked, and timed, whoever made it.
 *
 * The rules of shoal.h also hold here: statuses, outputs named *_out, struct_bytes and *_INIT. A schedule never changes, so any
 * thread may read it. A function with text writes the reason of a failure there, at most text_bytes with the final zero; text
 * may be NULL. */
#ifndef SHOAL_PIPELINE_H
#define SHOAL_PIPELINE_H

#include <shoal/shoal.h>

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Schedules -------------------------------------------------------------------------------------------------------- */

/* Lists of actions. Opaque; made by shoal_schedule_create or shoal_schedule_read. */
struct shoal_schedule;

/* What a rank computes for one microbatch of one stage. */
enum shoal_action_kind {
    SHOAL_FORWARD = 0,
    SHOAL_BACKWARD = 1,       /* both gradients */
    SHOAL_INPUT_GRADIENT = 2, /* the rest follows as SHOAL_WEIGHT_GRADIENT */
    SHOAL_WEIGHT_GRADIENT = 3,
};

struct shoal_action {
    enum shoal_action_kind kind;
    uint32_t stage;
    uint32_t microbatch;
};

/* How a schedule is made: name, number, word for options and messages, meaning. Ranks p, microbatches m. "Activations" are what
 * a rank keeps of a microbatch from its forward to its backward pass. */
#define SHOAL_SCHEDULE_LIST(X)                                                                                              \
    X(GPIPE, 0, "gpipe", "all forward passes, then all backward passes; keeps m activations (Huang et al. 2019)")           \
    X(1F1B, 1, "1f1b", "one forward, one backward; keeps p activations on the first rank (Narayanan et al. 2019)")          \
    X(INTERLEAVED, 2, "interleaved", "1F1B of several stages per rank, in turns of p microbatches (Narayanan et al. 2021)") \
    X(BREADTH_FIRST, 3, "breadth-first", "all forward passes of a stage, then those of the next one (Lamy-Poirier 2022)")   \
    X(ZB_H1, 4, "zb-h1", "weight gradients fill the bubble; keeps p activations (Qi et al. 2023)")                          \
    X(ZB_H2, 5, "zb-h2", "more forward passes at the beginning; keeps 2 p activations (Qi et al. 2023)")                    \
    X(V_MIN, 6, "v-min", "two stages per rank, forth and back; keeps about p / 3 activations (Qi et al. 2024)")             \
    X(V_HALF, 7, "v-half", "as V_MIN, and keeps about p / 2 activations")                                                   \
    X(V_ZB, 8, "v-zb", "as V_MIN, and keeps p activations, with hardly a bubble")                                           \
    X(AUTO, 9, "auto", "the one of the shortest step among all of these that keep at most `activations`")

enum shoal_schedule_kind {
#define SHOAL_SCHEDULE_ENUM(name, number, word, text) SHOAL_SCHEDULE_##name = (number),
    SHOAL_SCHEDULE_LIST(SHOAL_SCHEDULE_ENUM)
#undef SHOAL_SCHEDULE_ENUM
};

/* Times of one microbatch, in any unit. */
struct shoal_stage_costs {
    double forward; /* this and the next two: of one rank, which its stages share equally */
    double input_gradient;
    double weight_gradient;
    double transfer; /* from a stage to one on another rank, while both compute */
};

/* Begins as SHOAL_SCHEDULE_OPTIONS_INIT. */
struct shoal_schedule_options {
    size_t struct_bytes;
    enum shoal_schedule_kind kind;
    uint32_t ranks;
    uint32_t microbatches;
    uint32_t stages_per_rank;       /* for INTERLEAVED and BREADTH_FIRST: 2 or more, 0 is 2. 0 for all others */
    struct shoal_stage_costs costs; /* decide the order for all kinds from ZB_H1 on. All 0: three passes of equal time */
    double activations;             /* most that a rank may keep; 0: what the kind keeps by its definition */
    double kept_share; /* share of an activation that is kept from an input gradient to its weight gradient, 0 to 1 */
    int shortens_span; /* 1: the kinds from ZB_H1 on shorten `span` instead of `step`; see section 3 */
};
#define SHOAL_SCHEDULE_OPTIONS_INIT                                                                \
    {                                                                                              \
        sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 0, 0, 0, {0, 0, 0, 0}, 0, 1, 0 \
    }

/* Makes a schedule. Stage s is on rank s % ranks, and with the V kinds on rank min(s, stages - 1 - s). ERR_ARGUMENT: options
 * that are impossible, or too few activations for the kind; text says how many would do. ERR_MEMORY. */
SHOAL_CALL shoal_schedule_create(const struct shoal_schedule_options *options, struct shoal_schedule **schedule_out, char *text,
                                 size_t text_bytes);

/* NULL is allowed. */
SHOAL_API void shoal_schedule_free(struct shoal_schedule *schedule);

SHOAL_API uint32_t shoal_schedule_ranks(const struct shoal_schedule *schedule);
SHOAL_API uint32_t shoal_schedule_stages(const struct shoal_schedule *schedule);
SHOAL_API uint32_t shoal_schedule_microbatches(const struct shoal_schedule *schedule);

/* Returns the rank of a stage, which must exist. */
SHOAL_API uint32_t shoal_schedule_rank_of(const struct shoal_schedule *schedule, uint32_t stage);

/* Returns a rank's actions in their order. The rank must exist. Valid as long as the schedule. */
SHOAL_API const struct shoal_action *shoal_schedule_actions(const struct shoal_schedule *schedule, uint32_t rank,
                                                            uint32_t *count_out);

/* Returns the kind's word in SHOAL_SCHEDULE_LIST, or NULL. */
SHOAL_API const char *shoal_schedule_name(enum shoal_schedule_kind kind);

/* ---- 2. Text ------------------------------------------------------------------------------------------------------------- */

/* Prints a schedule as torch.distributed.pipelining stores one (format="compute_only"): a line for each rank, with its actions
 * separated by commas: "0F0,0F1,0I0,0W0,0B1" are stage, letter and microbatch. ERR_SYSTEM: out cannot be written. */
SHOAL_CALL shoal_schedule_print(const struct shoal_schedule *schedule, FILE *out);

/* Reads that form, from text of `bytes` bytes without a final zero. Empty cells mean a pause and are left out, and so are
 * torch's actions for sending, receiving and sharding, which follow from the others. ERR_ARGUMENT: text that is no schedule
 * (its line and cell are told), or one with a fault (shoal_schedule_check). ERR_MEMORY. */
SHOAL_CALL shoal_schedule_read(const char *bytes, size_t byte_count, struct shoal_schedule **schedule_out, char *text,
                               size_t text_bytes);

/* ---- 3. Faults and times ------------------------------------------------------------------------------------------------- */

/* Looks for the first fault: a stage on two ranks; an action that is missing or there twice; a backward pass before its forward
 * pass; or ranks that wait for each other for ever (text has the circle), when each stage can hold `slots` microbatches that
 * have arrived and were not used yet, and a rank waits while the next stage has no free slot. 0: as many as come. Returns OK if
 * there is none; ERR_ARGUMENT; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_check(const struct shoal_schedule *schedule, uint32_t slots, char *text, size_t text_bytes);

/* Finds the fewest slots that shoal_schedule_check accepts. ERR_ARGUMENT: a pointer is NULL; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_slots(const struct shoal_schedule *schedule, uint32_t *slots_out);

/* A schedule's times and memory. Begins as SHOAL_SCHEDULE_TIMES_INIT. */
struct shoal_schedule_times {
    size_t struct_bytes;
    double step;        /* from the first action of all to the last one */
    double span;        /* the longest time of a rank from its first to its last action. Steps that begin on each rank when its
                               own parameters are ready follow each other so (Qi et al. 2023) */
    double bubble;      /* share of the step in which a rank does nothing, on average over the ranks */
    double span_bubble; /* share of the span; the published rates are this one */
    double activations; /* most that a rank keeps at a time */
};
#define SHOAL_SCHEDULE_TIMES_INIT                          \
    {                                                      \
        sizeof(struct shoal_schedule_times), 0, 0, 0, 0, 0 \
    }

/* Times a schedule whose ranks begin each action as soon as they can. kept_share as in the options. begins_out may be NULL, or
 * has an entry for each rank: room for the begin of each of its actions. ERR_ARGUMENT: costs that are negative or not finite;
 * ERR_MEMORY. */
SHOAL_CALL shoal_schedule_time(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs, double kept_share,
                               struct shoal_schedule_times *times_out, double *const *begins_out);

#ifdef __cplusplus
}
#endif

#endif
