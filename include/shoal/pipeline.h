/* Pipelines: a model is cut into stages, which ranks compute one after the other, for several microbatches at a time. This
 * header is the manual of schedules (which rank computes what in which order) and of pipelines, which run them. It builds on
 * shoal.h. Only section 6 needs a context and a communicator: the other functions only compute. It is new and may still change.
 *
 * A *stage* is a part of the model, on one rank of a schedule; a rank may have several stages, and be several ranks of a
 * communicator (its replicas). Each microbatch goes forward through all stages and backward again. A backward pass may be
 * split: the gradient of a stage's input, for which the stage before it waits, and the gradients of its weights, for which
 * nobody waits.
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
    SHOAL_RECOMPUTE = 4, /* repeats the forward pass of a stage that has kept only its inputs, before its backward pass */
    /* The others are of a stage, not of a microbatch. See shoal_schedule_add_sums. */
    SHOAL_SUM_REPLICAS = 5, /* begins to sum the stage's gradients over its replicas */
    SHOAL_SUM_TIED = 6,     /* begins to sum gradients that the stage shares with stages of other ranks */
    SHOAL_UPDATE = 7,       /* steps the stage's parameters: waits for its sums */
};

struct shoal_action {
    enum shoal_action_kind kind;
    uint32_t stage;
    uint32_t microbatch; /* of SUM_TIED: the number of the tie. Of SUM_REPLICAS and UPDATE: 0 */
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
    X(AUTO, 9, "auto", "the one with the shortest step, of those that keep at most `activations`")

enum shoal_schedule_kind {
#define SHOAL_SCHEDULE_ENUM(name, number, word, text) SHOAL_SCHEDULE_##name = (number),
    SHOAL_SCHEDULE_LIST(SHOAL_SCHEDULE_ENUM)
#undef SHOAL_SCHEDULE_ENUM
};

/* Times of one microbatch, in any unit. */
struct shoal_stage_costs {
    double forward; /* these three are of one rank, whose stages share them equally */
    double input_gradient;
    double weight_gradient;
    double transfer;     /* from a stage to one on another rank, while both compute */
    double sum_replicas; /* to sum a rank's gradients over its replicas. The rank computes meanwhile, as during all sums */
    double sum_tied;     /* to sum the gradients of one tie; the longest time among the stages of the tie counts */
    double update;       /* to step a rank's parameters */
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
#define SHOAL_SCHEDULE_OPTIONS_INIT                                                                         \
    {                                                                                                       \
        sizeof(struct shoal_schedule_options), SHOAL_SCHEDULE_1F1B, 0, 0, 0, {0, 0, 0, 0, 0, 0, 0}, 0, 1, 0 \
    }

/* Makes a schedule. Stage s is on rank s % ranks, and with the V kinds on rank min(s, stages - 1 - s). ERR_ARGUMENT: options
 * that are impossible, or too few activations for the kind. Ranks and microbatches may be 65536 each, and stages times
 * microbatches 2^24. ERR_MEMORY. */
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

/* Makes a copy of a schedule in which exactly the stages with stages[s] other than 0 are recomputed; if stages is NULL, all of
 * them. Such a stage keeps only its inputs after a forward pass. Just before each backward pass, an action RECOMPUTE repeats
 * the forward pass. That action needs nothing from other ranks, so it fills the time in which the rank would wait for the
 * gradient. ERR_ARGUMENT: another pointer is NULL; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_recompute(const struct shoal_schedule *schedule, const unsigned char *stages,
                                    struct shoal_schedule **schedule_out);

/* Returns 1 if the stage, which must exist, is recomputed, or else 0. */
SHOAL_API int shoal_schedule_recomputes(const struct shoal_schedule *schedule, uint32_t stage);

/* A rank of a schedule may be several ranks of a communicator, its *replicas*. All of them have the rank's stages and run its
 * actions, each with a share of the samples of each microbatch (shoal_replica_share). Ranks of the communicator are numbered
 * replica by replica: first all replicas of rank 0, then those of rank 1.
 *
 * Makes a copy in which rank r has replicas[r] of them, 1 to 65536, in all at most 2^24; if replicas is NULL, each rank has
 * one. ERR_ARGUMENT: another number, or another pointer is NULL; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_replicate(const struct shoal_schedule *schedule, const uint32_t *replicas,
                                    struct shoal_schedule **schedule_out);

/* Returns the replicas of a rank, which must exist. */
SHOAL_API uint32_t shoal_schedule_replicas(const struct shoal_schedule *schedule, uint32_t rank);

/* Returns the replicas of all ranks: the size of the communicator that runs the schedule. */
SHOAL_API uint32_t shoal_schedule_size(const struct shoal_schedule *schedule);

/* Finds the rank of the schedule that a rank of the communicator is, and which of its replicas. ERR_ARGUMENT: member is not
 * below the size, or a pointer is NULL. */
SHOAL_CALL shoal_schedule_place(const struct shoal_schedule *schedule, uint32_t member, uint32_t *rank_out,
                                uint32_t *replica_out);

/* The samples of a microbatch that a replica has: *count_out of them, from number *first_out on. Shares follow each other and
 * differ by at most one sample; if there are fewer samples than replicas, some have none. replica must be below replicas. */
SHOAL_API void shoal_replica_share(uint64_t samples, uint32_t replicas, uint32_t replica, uint64_t *first_out,
                                   uint64_t *count_out);

/* A stage that shares parameters with stages of other ranks: a member of the tie with this number. */
struct shoal_tied_stage {
    uint32_t tie; /* below 65536 */
    uint32_t stage;
};

/* Makes a copy of a schedule with actions that follow a stage's last gradient:
 *
 *     SUM_REPLICAS    one for each stage, if a rank has several replicas or sums_replicas is 1 (for replicas of the pipeline)
 *     SUM_TIED        one for each tie and rank that has one of its stages; by the last of them
 *     UPDATE          one for each stage, if updates is 1
 *
 * A sum only begins with its action, and runs alongside later actions. The sums of a rank run one after the other. So sums of a
 * stage overlap with the computation of others. Each rank begins its ties in the order of their numbers, so that ranks which
 * share several ties do not wait for each other. UPDATE waits for the sums of its stage. Updates are last on their rank, those
 * of tied stages behind the others, and behind the update of the stage that has begun their sum.
 * Actions of these kinds that the schedule has already are left out. Without ties and with both numbers 0 the copy of a
 * schedule without replicas has none.
 *
 * ERR_ARGUMENT: a stage that does not exist; a tie whose stages are all on one rank, or twice the same; a pointer is NULL.
 * ERR_MEMORY. */
SHOAL_CALL shoal_schedule_add_sums(const struct shoal_schedule *schedule, const struct shoal_tied_stage *tied,
                                   size_t tied_count, int sums_replicas, int updates, struct shoal_schedule **schedule_out);

/* Makes a copy that others can read: one replica of each rank, no stage recomputed, without sums and updates. ERR_ARGUMENT: a
 * pointer is NULL; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_plain(const struct shoal_schedule *schedule, struct shoal_schedule **schedule_out);

/* Returns the kind's word in SHOAL_SCHEDULE_LIST, or NULL. */
SHOAL_API const char *shoal_schedule_name(enum shoal_schedule_kind kind);

/* ---- 2. Text ------------------------------------------------------------------------------------------------------------- */

/* Prints a schedule as torch.distributed.pipelining stores one (format="compute_only"): a line for each rank, with its actions
 * separated by commas: "0F0,0F1,0I0,0W0,0B1" are stage, letter and microbatch. Shoal's own are the letters R for RECOMPUTE, S
 * for SUM_REPLICAS, T for SUM_TIED (with the number of the tie) and U for UPDATE, and a first cell "x2" of a rank with two
 * replicas. For readers that know torch's letters only, print shoal_schedule_plain's copy. ERR_SYSTEM: out cannot be
 * written. */
SHOAL_CALL shoal_schedule_print(const struct shoal_schedule *schedule, FILE *out);

/* Reads that form, from text of `bytes` bytes without a final zero. Empty cells mean a pause and are left out, and so are
 * torch's actions for sending, receiving and sharding, which follow from the others. A pair that torch overlaps is read as two
 * actions, one after the other. ERR_ARGUMENT: text that is no schedule (its line and cell are told), or one with a fault
 * (shoal_schedule_check). ERR_MEMORY. */
SHOAL_CALL shoal_schedule_read(const char *bytes, size_t byte_count, struct shoal_schedule **schedule_out, char *text,
                               size_t text_bytes);

/* ---- 3. Faults and times ------------------------------------------------------------------------------------------------- */

/* Looks for the first fault: a stage on two ranks; an action that is missing or there twice; a backward pass before its forward
 * pass; a stage that is recomputed for some microbatches only, or not between both passes; a sum or an update before the last
 * gradient of its stage, twice, or of some stages only; a tie that only one rank sums; an update before a sum; or ranks that
 * wait for each other for ever (text has the circle), also because they begin sums in different orders. Each stage can hold
 * `slots` microbatches that have arrived and were not used yet, and a rank waits while the next stage has no free slot. 0: as
 * many as come. Returns OK if there is none; ERR_ARGUMENT; ERR_MEMORY. */
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
    double activations; /* most that a rank keeps at a time. A recomputed stage keeps them from RECOMPUTE on; the inputs that it
                           keeps before do not count */
};
#define SHOAL_SCHEDULE_TIMES_INIT                          \
    {                                                      \
        sizeof(struct shoal_schedule_times), 0, 0, 0, 0, 0 \
    }

/* Times a schedule whose ranks begin each action as soon as they can. RECOMPUTE takes as long as a forward pass. A sum begins
 * when all its ranks have come to its action, and when earlier sums of these ranks have ended; a rank that begins one continues
 * with its next action. The step ends with the last action or sum. A rank with k replicas takes a k-th of the times of passes,
 * and a transfer between k and l replicas as long as the larger share of the two takes. kept_share as in the options.
 * begins_out may be NULL, or has an entry for each rank: room for the begin of each of its actions. ERR_ARGUMENT: costs that
 * are negative or not finite; ERR_MEMORY. */
SHOAL_CALL shoal_schedule_time(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs, double kept_share,
                               struct shoal_schedule_times *times_out, double *const *begins_out);

/* Like shoal_schedule_time, but each stage has costs of its own: costs has an entry for each stage, whose times are those of
 * this stage on one replica of its rank. Its transfer is from the stage to the next one and, for gradients, back; that of the
 * last stage does not count. times_out->activations stays a number of microbatches, as if all stages were equal. */
SHOAL_CALL shoal_schedule_time_stages(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs,
                                      double kept_share, struct shoal_schedule_times *times_out, double *const *begins_out);

/* Divides costs of a rank among its stages and replicas, as shoal_schedule_time does. each_out has room for each stage.
 * ERR_ARGUMENT: a pointer is NULL. */
SHOAL_CALL shoal_schedule_stage_costs(const struct shoal_schedule *schedule, const struct shoal_stage_costs *costs,
                                      struct shoal_stage_costs *each_out);

/* Returns the time that an action takes, with the costs of its stage on one replica (shoal_schedule_stage_costs). RECOMPUTE
 * takes as long as a forward pass. Sums also have a time here, although their rank computes meanwhile. */
SHOAL_API double shoal_schedule_action_cost(const struct shoal_action *action, const struct shoal_stage_costs *costs);

/* ---- 4. Profiles --------------------------------------------------------------------------------------------------------- */

/* A profile describes a model as *units*, the smallest parts with which a stage can begin, in the order in which they run.
 * Times are microseconds, of one microbatch on a rank of speed 1. Sizes are bytes. Threads may read a profile that no thread
 * changes.
 *
 * Units are numbered from 0. Each sends its output to the next one. An output that is read behind that one, a *skip*, counts
 * at each cut between stages that it crosses, as if the stages in between handed it on. Units that share parameters are *tied*:
 * each counts them among its own, and a rank that has several of them keeps them once. */
struct shoal_profile;

#define SHOAL_ANY_STAGE (-1)
#define SHOAL_PROFILE_UNITS_MAX 65536

/* Begins as SHOAL_UNIT_INIT. */
struct shoal_unit {
    size_t struct_bytes;
    const char *name; /* unique, not empty. A tree of modules has dots: "h.3.mlp" */
    double forward;
    double input_gradient;
    double weight_gradient;
    int backward_is_halved;   /* 1: only the sum of both gradients is known, and each is half of it */
    int32_t stage;            /* the stage to which the unit is pinned, or SHOAL_ANY_STAGE */
    uint64_t parameter_bytes; /* 2^50 at most, as all sizes */
    uint64_t kept_bytes;      /* of one microbatch, from its forward pass to its backward pass */
    uint64_t output_bytes;    /* of one microbatch, to the next unit; that of the last unit does not count */
};
#define SHOAL_UNIT_INIT                                                    \
    {                                                                      \
        sizeof(struct shoal_unit), 0, 0, 0, 0, 0, SHOAL_ANY_STAGE, 0, 0, 0 \
    }

/* Makes a profile without units. The name is copied; NULL is "model". ERR_ARGUMENT: profile_out is NULL, or the name is empty,
 * longer than 255 bytes or has a control character. ERR_MEMORY. */
SHOAL_CALL shoal_profile_create(const char *name, struct shoal_profile **profile_out);

/* NULL is allowed. */
SHOAL_API void shoal_profile_free(struct shoal_profile *profile);

/* Adds a unit behind the others, and copies its name. ERR_ARGUMENT: a name that is empty, taken, longer than 255 bytes or not
 * printable; a time that is negative or not finite; a size above 2^50; one unit too many. ERR_MEMORY. After an error the
 * profile is as before. */
SHOAL_CALL shoal_profile_add_unit(struct shoal_profile *profile, const struct shoal_unit *unit, char *text, size_t text_bytes);

/* Adds an output of a unit that is read behind the next unit: a skip. An output with several readers is added once, for the
 * last of them. ERR_ARGUMENT: a unit that does not exist; a reader that runs before the unit, which would be a cycle.
 * ERR_MEMORY. */
SHOAL_CALL shoal_profile_add_output(struct shoal_profile *profile, uint32_t from, uint32_t to, uint64_t bytes, char *text,
                                    size_t text_bytes);

/* Ties `count` different units, in rising order, which share parameters of `bytes`. ERR_ARGUMENT: fewer than two units, one
 * that does not exist or is not above the one before, or has fewer parameter_bytes. ERR_MEMORY. */
SHOAL_CALL shoal_profile_add_tie(struct shoal_profile *profile, const uint32_t *units, uint32_t count, uint64_t bytes,
                                 char *text, size_t text_bytes);

SHOAL_API const char *shoal_profile_name(const struct shoal_profile *profile);
SHOAL_API uint32_t shoal_profile_units(const struct shoal_profile *profile);

/* Copies a unit. Its name is valid as long as the profile. ERR_ARGUMENT: the unit does not exist, or unit_out is not set. */
SHOAL_CALL shoal_profile_unit(const struct shoal_profile *profile, uint32_t number, struct shoal_unit *unit_out);

/* Finds a unit by its name. Returns its number, or SHOAL_PROFILE_UNITS_MAX if there is none. */
SHOAL_API uint32_t shoal_profile_find(const struct shoal_profile *profile, const char *name);

/* Prints a profile as JSON, which shoal_profile_read reads. ERR_SYSTEM: out cannot be written. */
SHOAL_CALL shoal_profile_print(const struct shoal_profile *profile, FILE *out);

/* Reads a profile from JSON of byte_count bytes, without a final zero:
 *
 *     {"name": "tiny",
 *      "units": [{"name": "wte", "forward_us": 2, "backward_us": 9, "parameter_bytes": 4096, "kept_bytes": 64,
 *                 "output_bytes": 512, "stage": 0, "outputs": [{"to": "head", "bytes": 512}]},
 *                {"name": "h.0", "forward_us": 80, "input_gradient_us": 75, "weight_gradient_us": 40, ...},
 *                {"name": "head", ...}],
 *      "ties": [{"units": ["wte", "head"], "bytes": 4096}]}
 *
 * A unit has a name, forward_us, and either backward_us or both gradients' times. Whatever else is left out is 0, or absent.
 * ERR_ARGUMENT: text that is not such a profile; the message names the line. ERR_MEMORY. */
SHOAL_CALL shoal_profile_read(const char *bytes, size_t byte_count, struct shoal_profile **profile_out, char *text,
                              size_t text_bytes);

/* ---- 5. Partitions ------------------------------------------------------------------------------------------------------- */

/* A partition gives each stage of a schedule a range of units, in their order. A range may be empty: the stage then only hands
 * over what it receives. It never changes; any thread may read it.
 *
 * The memory of a rank, in bytes:
 *
 *     parameters    of its units, tied ones once, divided by parameter_shards
 *     gradients     gradient_ratio times the parameters, divided by gradient_shards
 *     states        state_ratio times the parameters, divided by state_shards: those of the optimizer
 *     activations   most that it keeps at a time, in the order of its actions. A stage that is recomputed keeps only its
 *                   input, and everything from RECOMPUTE to the backward pass
 *     buffers       `slots` for what comes to each of its stages from other ranks, in both passes
 *
 * A rank of the schedule may be several ranks of the machine, its *replicas*. Each of them has all units of the rank and an
 * equal share of the samples of each microbatch. Times, kept bytes, buffers and messages are divided by their number;
 * parameters are not. A message from 2 replicas to 3 takes as long as half of it takes between two ranks.
 *
 * The predicted step is that of shoal_schedule_time_stages. Then follow the sums of gradients that tied units on different
 * ranks share, and the sums among replicas, for all stages at once. Shards change the memory only: sums among replicas of the
 * whole pipeline are not in the step. */

struct shoal_partition;

/* How units are divided: name, number, word for options and messages, meaning. */
#define SHOAL_PARTITION_LIST(X)                                                                      \
    X(SHORTEST, 0, "shortest", "the shortest step that fits into memory")                            \
    X(TREE, 1, "tree", "by the tree of modules, weighing memory against time (Karakus et al. 2021)") \
    X(EQUAL, 2, "equal", "the same number of units for each stage")

enum shoal_partition_method {
#define SHOAL_PARTITION_ENUM(name, number, word, text) SHOAL_PARTITION_##name = (number),
    SHOAL_PARTITION_LIST(SHOAL_PARTITION_ENUM)
#undef SHOAL_PARTITION_ENUM
};

/* Which stages are recomputed (shoal_schedule_recompute). */
enum shoal_recomputes {
    SHOAL_RECOMPUTES_AS_SCHEDULED = 0, /* those that the schedule recomputes */
    SHOAL_RECOMPUTES_ALL = 1,
    SHOAL_RECOMPUTES_IF_SHORT = 2, /* none if that fits into the memory; otherwise those that make it fit at a short step */
};

/* Begins as SHOAL_PARTITION_OPTIONS_INIT. */
struct shoal_partition_options {
    size_t struct_bytes;
    enum shoal_partition_method method;
    double memory_weight;              /* for TREE, 0 (time only) to 1 */
    uint64_t memory_bytes;             /* of each rank; 0: as much as is needed */
    const uint64_t *rank_memory_bytes; /* [ranks] instead of memory_bytes, or NULL */
    const double *rank_speeds;         /* [ranks], or NULL: all 1. A rank of speed 2 takes half the time */
    double bytes_per_us;               /* between ranks, in each direction; 0: a transfer takes no time for its bytes */
    double latency_us;                 /* of each transfer */
    double gradient_ratio;
    double state_ratio; /* 2: Adam with states of the parameters' type */
    uint32_t parameter_shards;
    uint32_t gradient_shards;
    uint32_t state_shards;
    double kept_share;             /* as in shoal_schedule_options */
    uint32_t slots;                /* 0: the fewest with which the schedule comes to its end */
    int recomputes;                /* one of enum shoal_recomputes */
    int keeps_ties_together;       /* 1: tied units must be on one rank */
    uint64_t effort;               /* actions that a search may simulate; 0: 8 million, some tenths of a second */
    const uint32_t *rank_replicas; /* [ranks], 1 to 65536 each, or NULL: the schedule's. Speeds and memory are of one replica */
};
#define SHOAL_PARTITION_OPTIONS_INIT                                                                                          \
    {                                                                                                                         \
        sizeof(struct shoal_partition_options), SHOAL_PARTITION_SHORTEST, 0.8, 0, 0, 0, 0, 0, 1, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0 \
    }

/* Divides a model among the stages of a schedule. Both are only used during the call. If `recomputes` is not AS_SCHEDULED, the
 * partition determines which stages are recomputed (stage.recomputes), and shoal_schedule_recompute makes the schedule to run.
 * IF_SHORT begins with the first stages, whose activations are kept longest, and then removes stages one by one; it does not
 * compare all choices. ERR_ARGUMENT: options that are impossible; pins that contradict the order of stages, or tied units that
 * must be on one rank and are pinned to two; units that do not fit into the memory: text, best of 1,000 bytes, names the rank,
 * what is short, by how much, and what would help. ERR_MEMORY. */
SHOAL_CALL shoal_partition_create(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                  const struct shoal_partition_options *options, struct shoal_partition **partition_out,
                                  char *text, size_t text_bytes);

/* Makes the partition whose stage s begins with unit first_units[s] and ends before first_units[s + 1]. first_units[0] must be
 * 0, and numbers must not fall. options->method does not matter; units that do not fit into memory are allowed, see
 * shoal_partition_memory. ERR_ARGUMENT: as above, or first_units that are no such list. ERR_MEMORY. */
SHOAL_CALL shoal_partition_create_at(const struct shoal_profile *profile, const struct shoal_schedule *schedule,
                                     const struct shoal_partition_options *options, const uint32_t *first_units,
                                     struct shoal_partition **partition_out, char *text, size_t text_bytes);

/* Makes a schedule and a partition for it. The costs in schedule_options do not matter: they follow from the profile. AUTO
 * tries all kinds, and returns the pair with the shortest step that fits. options->recomputes determines which stages the
 * schedule recomputes; AS_SCHEDULED means none. kind_out may be NULL. Errors as of shoal_schedule_create and
 * shoal_partition_create. */
SHOAL_CALL shoal_partition_choose(const struct shoal_profile *profile, const struct shoal_schedule_options *schedule_options,
                                  const struct shoal_partition_options *options, struct shoal_schedule **schedule_out,
                                  struct shoal_partition **partition_out, enum shoal_schedule_kind *kind_out, char *text,
                                  size_t text_bytes);

/* Like shoal_partition_choose, but schedule_options->ranks is the number of ranks of the machine. The function also chooses the
 * number of ranks of the schedule, and how many replicas each of them has (struct shoal_stage). It tries each number of ranks:
 * from one rank that has all replicas, which is data parallelism, to all of them without replicas. It moves replicas from one
 * rank to another as long as the step gets shorter, and does not compare all choices. Orders that have to be found are tried as
 * 1F1B. The schedule that it makes has these replicas. ERR_ARGUMENT: as above; also if options have rank_memory_bytes,
 * rank_speeds or rank_replicas, or if there are more than 1,024 ranks. */
SHOAL_CALL shoal_partition_replicate(const struct shoal_profile *profile, const struct shoal_schedule_options *schedule_options,
                                     const struct shoal_partition_options *options, struct shoal_schedule **schedule_out,
                                     struct shoal_partition **partition_out, enum shoal_schedule_kind *kind_out, char *text,
                                     size_t text_bytes);

/* NULL is allowed. */
SHOAL_API void shoal_partition_free(struct shoal_partition *partition);

/* One stage. Begins as SHOAL_STAGE_INIT. */
struct shoal_stage {
    size_t struct_bytes;
    uint32_t rank;
    uint32_t first_unit;
    uint32_t unit_count;
    double forward; /* microseconds of one microbatch on this rank, as the next three */
    double input_gradient;
    double weight_gradient;
    double transfer;          /* to the next stage; 0 if that is on the same rank, or there is none */
    uint64_t parameter_bytes; /* tied units count once */
    uint64_t kept_bytes;      /* of one microbatch */
    uint64_t received_bytes;  /* of one microbatch, from the stage before */
    int recomputes;           /* 1: the stage is recomputed, which takes `forward` once more */
    uint32_t replicas;        /* replicas of its rank; times, kept and received bytes are those of one */
    double sum_replicas;      /* microseconds, of the sum of its gradients over the replicas; 0 if there is one */
    double sum_tied;          /* microseconds, of the longest sum of a tie with stages of other ranks; 0: there is none */
};
#define SHOAL_STAGE_INIT                                                     \
    {                                                                        \
        sizeof(struct shoal_stage), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/* The memory of one rank, in bytes. Begins as SHOAL_RANK_MEMORY_INIT. */
struct shoal_rank_memory {
    size_t struct_bytes;
    uint64_t parameter_bytes;
    uint64_t gradient_bytes;
    uint64_t state_bytes;
    uint64_t activation_bytes;
    uint64_t buffer_bytes;
    uint64_t total_bytes;
    uint64_t limit_bytes; /* 0: none */
};
#define SHOAL_RANK_MEMORY_INIT                                \
    {                                                         \
        sizeof(struct shoal_rank_memory), 0, 0, 0, 0, 0, 0, 0 \
    }

/* Times of a partition, in microseconds. Begins as SHOAL_PARTITION_TIMES_INIT. */
struct shoal_partition_times {
    size_t struct_bytes;
    double step;        /* predicted */
    double tied;        /* the part of it after the schedule: sums of the gradients of tied units */
    double bubble;      /* share of the schedule's time in which a rank does nothing, on average over the ranks */
    double bottleneck;  /* of one microbatch: the longest time of a stage, or of a transfer */
    double lower_bound; /* no partition for this schedule and memory has a shorter predicted step */
    int is_optimal;     /* 1: all partitions were compared, and none is better */
    double replicas;    /* the part of the step after the schedule and after `tied`: sums of gradients among replicas */
    double overlapped;  /* the step with sums that begin in the schedule (shoal_partition_add_sums), and run alongside it */
};
#define SHOAL_PARTITION_TIMES_INIT                                   \
    {                                                                \
        sizeof(struct shoal_partition_times), 0, 0, 0, 0, 0, 0, 0, 0 \
    }

SHOAL_API uint32_t shoal_partition_stages(const struct shoal_partition *partition);

/* These copy a result. ERR_ARGUMENT: the stage or rank does not exist, or the struct is not set. */
SHOAL_CALL shoal_partition_stage(const struct shoal_partition *partition, uint32_t stage, struct shoal_stage *stage_out);
SHOAL_CALL shoal_partition_memory(const struct shoal_partition *partition, uint32_t rank, struct shoal_rank_memory *memory_out);
SHOAL_CALL shoal_partition_step_times(const struct shoal_partition *partition, struct shoal_partition_times *times_out);

/* Makes a copy of the partition's schedule with the sums that its stages need (shoal_schedule_add_sums): over replicas, and
 * over ties between ranks. Ties have the numbers of the profile, in the order in which they were added. ERR_ARGUMENT: a pointer
 * is NULL, or the schedule has other stages; ERR_MEMORY. */
SHOAL_CALL shoal_partition_add_sums(const struct shoal_partition *partition, const struct shoal_schedule *schedule, int updates,
                                    struct shoal_schedule **schedule_out);

/* Returns a line about why the stage begins where it does. The stage must exist. Valid as long as the partition. */
SHOAL_API const char *shoal_partition_reason(const struct shoal_partition *partition, uint32_t stage);

/* Returns the method's word in SHOAL_PARTITION_LIST, or NULL. */
SHOAL_API const char *shoal_partition_method_name(enum shoal_partition_method method);
/* ---- 6. Running ---------------------------------------------------------------------------------------------------------- */

/* A pipeline runs a schedule on a communicator: rank r of the schedule is rank r of the communicator, if no rank has replicas
 * (shoal_schedule_place). It calls the program for each action of this rank, in the schedule's order, and hands messages from
 * stage to stage:
 *
 *     rank 0, stage 0    F0 F1 F2 ...          computes F3, microbatch 3; the pipeline sends the output meanwhile
 *     rank 1, stage 1       F0 F1 F2 ...       reads the output of F3 as the input of its own F3
 *                                              gradients travel the same way back
 *
 * An *edge* leads from a stage to a later one. On each edge one message per microbatch goes forward, and one, its gradient,
 * comes back. A message is any number of bytes, also none, and a short note, in which a front-end may put shapes and types.
 * Sizes travel with the message, so microbatches may differ.
 *
 * *Replicas* of a rank have the same stages, and each of them computes its share of the samples of each microbatch
 * (shoal_replica_share). Two replicas of different stages exchange a message on an edge if they share samples, whatever their
 * number: the pair is fixed, and the message may be empty. So 2 replicas that send to 3 have 4 messages in each direction:
 *
 *     stage 0, replica 0 [ 0 1 2 ] -> replica 0 of stage 1 [ 0 1 ], and replica 1 [ 2 3 ]      6 samples
 *              replica 1 [ 3 4 5 ] ->                               replica 1 [ 2 3 ], and replica 2 [ 4 5 ]
 *
 * The program cuts and joins what it sends and receives.
 *
 * The program does the rest in its own calls: the first stage reads the batch, the last one computes the loss. Parameters that
 * two stages share, and gradients that are summed over replicas of a stage, are summed on another communicator: by a reducer
 * (gradients.h) whose functions compute() calls, or after the step. A schedule may say when (shoal_schedule_add_sums); without
 * such actions is_last_gradient does:
 *
 *     static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
 *     {
 *         enum shoal_status status = compute_stage(work);
 *         if (status == SHOAL_OK && work->is_last_gradient)
 *             status = shoal_reducer_ready(reducer_of(work->action.stage), 0, gradients, count);
 *         return status;
 *     }
 *
 * How fast. On one host a message is written once by its producer and read once by its receiver, if it is in memory from
 * shoal_pipeline_alloc or shoal_mem_alloc; other memory is copied on the way. Between stages of one rank nothing is copied.
 * Messages travel during the computation: the context's progress thread moves them, so each rank needs a core for it at these
 * moments. In the flight recorder the trace_tag of a message is its microbatch. One thread at a time calls functions on a
 * struct shoal_pipeline. */
struct shoal_pipeline;

struct shoal_edge {
    uint32_t from; /* a stage */
    uint32_t to;   /* a later stage */
};

/* All fields must be the same on all ranks, except struct_bytes and name. Begins as SHOAL_PIPELINE_OPTIONS_INIT. */
struct shoal_pipeline_options {
    size_t struct_bytes;
    const char *name;               /* in messages; NULL: "pipeline". At most 23 bytes are kept */
    const struct shoal_edge *edges; /* each at most once; NULL: from each stage to the next one */
    size_t edge_count;
    uint32_t ahead; /* a rank receives for this many of its next actions before their turn, at most 256; 0: 4. Their messages
                               are in memory while an earlier action is computed. Times the replicas to which a rank sends, it
                               must be at most 4096 */
    uint32_t timeout_ms; /* deadline of each message, from the time at which this rank is ready to send or receive it. It must
                               be longer than a step; 0: SHOAL_TIMEOUT_MS */
};
#define SHOAL_PIPELINE_OPTIONS_INIT                          \
    {                                                        \
        sizeof(struct shoal_pipeline_options), 0, 0, 0, 0, 0 \
    }

/* Makes a pipeline; a collective call on comm, from which it splits a communicator of its own. comm may be freed before the
 * pipeline, and so may the schedule; context must outlive both. Errors are the same on every rank: ERR_MISMATCH, if schedules
 * or options differ (names the rank and what differs); ERR_ARGUMENT, if the schedule has a fault, needs another number of ranks
 * than comm has, or an edge is invalid; ERR_MEMORY; the errors of shoal_comm_split. */
SHOAL_CALL shoal_pipeline_create(struct shoal_context *context, struct shoal_comm *comm, const struct shoal_schedule *schedule,
                                 const struct shoal_pipeline_options *options, struct shoal_pipeline **pipeline_out);

/* Frees the pipeline and its communicator; a local call, not inside compute. Messages under way fail on the other ranks with
 * ERR_PEER_LOST. NULL is allowed. */
SHOAL_API void shoal_pipeline_free(struct shoal_pipeline *pipeline);

#define SHOAL_NOTE_BYTES 1024

/* A message on an edge. */
struct shoal_parcel {
    void *data; /* NULL if bytes is 0 */
    size_t bytes;
    void *owner;    /* only in outputs: passed to `released`; NULL: it is not called */
    uint32_t stage; /* set by the pipeline: the stage from or to which the message goes, and its replica */
    uint32_t replica;
    uint32_t note_bytes; /* at most SHOAL_NOTE_BYTES */
    char note[SHOAL_NOTE_BYTES];
};

/* What to compute. Edges are in the order of the options; the messages of an edge follow each other, one for each replica of
 * the other stage that shares samples.
 *
 *     kind                 inputs                                       outputs
 *     FORWARD              activations: one for each edge to the stage  activations: one for each edge from the stage
 *     BACKWARD             gradients: one for each edge from the stage  gradients: one for each edge to the stage
 *     INPUT_GRADIENT       the same                                     the same
 *     WEIGHT_GRADIENT      those of INPUT_GRADIENT, once more           none
 *     RECOMPUTE            those of FORWARD, once more                  none
 *     SUM_REPLICAS         none                                         none
 *     SUM_TIED             none                                         none
 *     UPDATE               none                                         none
 *
 * The last three are not part of shoal_pipeline_forward. SUM_REPLICAS and SUM_TIED should begin a sum and return: the rank's
 * next action waits meanwhile. UPDATE should wait for the sums of its stage. The program must wait for all other sums after the
 * step.
 *
 * Inputs, of forward and backward actions alike, stay valid until the last backward action of this stage and microbatch has
 * returned: BACKWARD or WEIGHT_GRADIENT. In shoal_pipeline_forward they stay valid until this call has returned. They must not
 * be written: another stage may share them.
 *
 * Outputs begin without bytes and note; their data are in host memory. If compute returns an error they stay the program's.
 * Otherwise their memory must stay unchanged until it is released. Memory from shoal_pipeline_alloc is taken back by the
 * pipeline. An input of this stage and microbatch, or a part of one, is kept as long as needed. For any other memory the
 * pipeline calls released with the owner. Several outputs may share memory; each is released by itself. */
struct shoal_work {
    struct shoal_action action;
    uint32_t input_count;
    uint32_t output_count;
    const struct shoal_parcel *inputs;
    struct shoal_parcel *outputs;
    int is_last_gradient; /* 1: the last action of this step that computes gradients of this stage's weights */
    int is_recomputed;    /* 1: RECOMPUTE repeats the forward passes of this stage, so FORWARD need not keep anything */
    uint32_t replica;     /* the number of this replica */
    uint32_t replicas;    /* how many its rank has */
};

/* Computes an action. If it returns an error, it may write the reason to text, at most text_bytes with the final zero. */
typedef enum shoal_status (*shoal_compute_fn)(void *user, const struct shoal_work *work, char *text, size_t text_bytes);

/* An output with an owner is no longer read. Called once for each such output. */
typedef void (*shoal_released_fn)(void *user, void *owner);

/* The program's functions. They are called on the thread that called shoal_pipeline_step or shoal_pipeline_forward, and may
 * call functions of Shoal, on other communicators also collective ones. Begins as SHOAL_PIPELINE_CALLS_INIT. */
struct shoal_pipeline_calls {
    size_t struct_bytes;
    shoal_compute_fn compute;
    shoal_released_fn released; /* may be NULL */
    void *user;
};
#define SHOAL_PIPELINE_CALLS_INIT                    \
    {                                                \
        sizeof(struct shoal_pipeline_calls), 0, 0, 0 \
    }

/* Runs all actions of this rank once; a collective call on the pipeline's ranks. Returns when this rank has computed all of
 * them, and everything that it sent has arrived: then all outputs are released.
 *
 * If compute returns an error, the step fails on all ranks with that status (ERR_INTERNAL for PENDING and unknown ones) and
 * with a text that names rank, stage and microbatch (shoal_pipeline_failure). The other ranks find out when they next wait for
 * a message: a rank whose part of the step is over returns OK, and its next call fails. Other errors: ERR_MISMATCH (another
 * rank called shoal_pipeline_forward), ERR_PEER_LOST, ERR_TIMEOUT, ERR_MEMORY. Each breaks the pipeline: later calls return the
 * same error. Outputs that were not released are then released by shoal_pipeline_free, with the functions of this call. Other
 * communicators, on which peers may wait for this rank, stay as they are: the program must abort those itself. ERR_ARGUMENT:
 * calls or compute is NULL. ERR_STATE: called inside compute. */
SHOAL_CALL shoal_pipeline_step(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls);

/* Like shoal_pipeline_step, but runs only the forward actions, as for an evaluation. */
SHOAL_CALL shoal_pipeline_forward(struct shoal_pipeline *pipeline, const struct shoal_pipeline_calls *calls);

/* Writes the first cause of the pipeline's failure, the same on every rank; its rank is the rank in the pipeline. failure_out
 * begins as SHOAL_FAILURE_INIT. Returns PENDING if nothing has failed. */
SHOAL_CALL shoal_pipeline_failure(const struct shoal_pipeline *pipeline, struct shoal_failure *failure_out);

/* Returns memory for outputs that peers on this host read directly, aligned to 4096 bytes, with undefined contents. Only inside
 * compute. The pipeline keeps it for reuse, and takes it back by itself: when the call of compute returns, unless an output is
 * in it. ERR_ARGUMENT: 0 bytes, or more than shoal_mem_alloc allows. ERR_STATE: not inside compute. ERR_MEMORY. */
SHOAL_CALL shoal_pipeline_alloc(struct shoal_pipeline *pipeline, size_t bytes, void **memory_out);

/* Times of an action on this rank, in microseconds since the step began here. */
struct shoal_action_times {
    struct shoal_action action;
    double waited_us; /* for its inputs, just before it began */
    double begin_us;
    double end_us;
};

/* Times of the last step, also of one that failed. Begins as SHOAL_PIPELINE_TIMES_INIT. */
struct shoal_pipeline_times {
    size_t struct_bytes;
    uint64_t step;     /* number of this step, from 1 on; 0: none yet */
    uint64_t begin_ns; /* when the step began on this rank, of CLOCK_MONOTONIC: comparable between ranks of a host */
    double step_us;
    double computed_us;  /* in compute */
    double waited_us;    /* for inputs */
    double sending_us;   /* after the last action, until all outputs had arrived */
    double bubble;       /* share of the step in which this rank did not compute */
    uint64_t sent_bytes; /* this and the next one: between this rank and others, without notes */
    uint64_t received_bytes;
    const struct shoal_action_times *actions; /* in the order in which they ran; valid until the next step */
    uint32_t action_count;
};
#define SHOAL_PIPELINE_TIMES_INIT                                            \
    {                                                                        \
        sizeof(struct shoal_pipeline_times), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }
SHOAL_CALL shoal_pipeline_step_times(const struct shoal_pipeline *pipeline, struct shoal_pipeline_times *times_out);

#ifdef __cplusplus
}
#endif

#endif
