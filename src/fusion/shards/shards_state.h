/* Sharded parameters: shared by the files of struct shoal_shards. See the public header.
 *
 * A unit is a range of bytes: its parameters one after the other, each at a multiple of 64 bytes, padded to a multiple of 64
 * bytes times ranks. Rank r owns the r-th shard (layout/borders.h): all are equally long without weights and granules. A unit
 * that stays whole has one shard, which every rank owns.
 *
 *     unit   | p0 | p1      | p2 |padding|
 *     owner  |   rank 0   |   rank 1     |
 *
 * Gathers and sums have a communicator each; on both, operations follow each other in the order of the calls, which is the same
 * on all ranks. One thread at a time. */
#ifndef SHOAL_FUSION_SHARDS_STATE_H
#define SHOAL_FUSION_SHARDS_STATE_H

#include "fusion/codec/wide_kernels.h"
#include "fusion/layout/borders.h"
#include "fusion/layout/parameters.h"
#include "fusion/optimizer/loss_scale.h"
#include "fusion/optimizer/optimizer_group.h"
#include "shoal/shards.h"

#define SHARDS_STATES (1 + SHOAL_UPDATE_STATES) /* the master is number 0 */
#define SHARDS_GRADIENTS 2                      /* units that may wait for gradients at a time */
#define SHARDS_NO_SLOT UINT32_MAX

struct shards_unit {
    enum shoal_type type;
    uint32_t first, count;         /* its parameters, in `members` */
    size_t bytes;                  /* with padding */
    size_t shard_begin;            /* the offset of this rank's shard, in bytes */
    size_t shard_bytes;            /* with padding */
    struct fusion_borders borders; /* without any if it is whole */
    bool is_whole;                 /* every rank has all of it */
    char *own;                     /* this rank's shard of the parameters */
    char *gradient;                /* this rank's shard of the summed gradients */
    char *states[SHARDS_STATES];   /* NULL: the rule does not use this one. Only 16-bit types have a master */
    uint32_t slot;                 /* the last slot in which it was gathered; SHARDS_NO_SLOT: none */
    uint32_t gradient_slot;        /* has the gradients that have come so far */
    uint32_t missing;              /* parameters without a gradient in this step */
    struct shoal_request *sum;     /* the sum under way; NULL: none */
    bool is_summed;                /* or being summed, in this step */
};

/* Memory for one live unit. */
struct shards_slot {
    char *memory;
    uint32_t unit;                 /* SHOAL_SHARDS_NONE: none */
    struct shoal_request *request; /* the gather; NULL: it is here */
    bool is_live;                  /* gathered by the caller, and not released */
    uint64_t used;                 /* number of its last use: the smallest makes room */
};

/* Memory for the gradients of one unit, until they are summed. */
struct shards_gradients {
    char *memory;
    uint32_t unit;   /* SHOAL_SHARDS_NONE: free, or being summed */
    uint32_t busy;   /* the unit whose sum reads it; SHOAL_SHARDS_NONE: none */
    uint64_t posted; /* when that sum began, as the number of a use */
};

struct shoal_shards {
    struct shoal_context *context;
    struct shoal_comm *gathers, *sums;
    struct shoal_shards_options options;
    struct shoal_optimizer given; /* what options.optimizer points to, until the shards are made */
    char name[24];
    int rank, size;
    const struct shoal_gradient_kernels *kernels;
    struct fusion_parameters parameters;
    enum shoal_optimizer_rule rule;
    struct shoal_optimizer_group *groups;
    size_t group_count;
    uint32_t *group_of, *unit_of, *members; /* [parameters] */
    size_t *offsets;                        /* [parameters]: bytes in their unit */
    uint64_t *steps;                        /* [parameters] */
    double *norms;                          /* with LAMB: two squared norms of each parameter, followed by those of each rank */
    bool *is_ready;                         /* [parameters] */
    bool *is_begun;                         /* [parameters]: in this step its gradient's memory was zeroed, or it is ready */
    struct shards_unit *units;
    uint32_t unit_count;
    struct shards_slot *slots; /* [options.live_units] */
    struct shards_gradients gradients[SHARDS_GRADIENTS];
    char *shared, *local; /* what units and slots point to: of shoal_mem_alloc, and ordinary memory */
    size_t largest;       /* bytes of the largest unit that is not whole */
    double scale;         /* factor of gradients: the caller's, or 1 / loss scale */
    struct fusion_loss_scale loss;
    uint64_t uses;
    uint64_t step;
    enum shoal_status failed; /* the status that all calls return after an operation has failed, and why */
    char failure[FUSION_TEXT_MAX];
};

/* Elements [begin, begin + count) of a parameter. */
struct shards_range {
    size_t begin, count;
};

static inline size_t shards_real_bytes(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float);
}

static inline struct shards_unit *shards_unit_of(const struct shoal_shards *shards, size_t parameter)
{
    return &shards->units[shards->unit_of[parameter]];
}

/* Returns the elements of a parameter in the shard of a rank. */
struct shards_range shards_range_of(const struct shoal_shards *shards, size_t parameter, int rank);

/* Returns the offset of an element in this rank's shard, in elements. The shard must have it. */
size_t shards_offset(const struct shoal_shards *shards, size_t parameter, size_t element);

/* Returns the address of an element of this rank's shard: of a state, or of the parameter if it has no master. */
char *shards_value_at(const struct shoal_shards *shards, size_t parameter, enum shoal_optimizer_state state, size_t element);

/* Sets a range of a parameter to its master, rounded. Does nothing if it has no master. */
void shards_round_master(const struct shoal_shards *shards, size_t parameter, const struct shards_range *range);

/* Logs a refusal that changes nothing. Returns status. */
enum shoal_status shards_refuse(const struct shoal_shards *shards, enum shoal_status status, const char *format, ...)
    FUSION_PRINTF(3, 4);

/* For an operation that has failed: the shards stay failed. Returns status. */
enum shoal_status shards_fail(struct shoal_shards *shards, enum shoal_status status, uint32_t unit, const char *what);

/* Returns the status of an operation that failed earlier, or ERR_ARGUMENT for NULL. */
SHOAL_MUST_USE enum shoal_status shards_check(const struct shoal_shards *shards);

/* Like shards_check(), and ERR_STATE if a unit is live or gradients are ready. */
SHOAL_MUST_USE enum shoal_status shards_check_between(const struct shoal_shards *shards, const char *call);

/* Waits for a request and frees it. Does nothing if it is NULL. */
SHOAL_MUST_USE enum shoal_status shards_wait(struct shoal_request **request);

/* Waits for the sums of all units. */
SHOAL_MUST_USE enum shoal_status shards_wait_for_sums(struct shoal_shards *shards);

/* Forgets which units are in slots. None may be live or being gathered. */
SHOAL_MUST_USE enum shoal_status shards_forget_slots(struct shoal_shards *shards);

#endif
