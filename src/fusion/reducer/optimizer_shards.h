/* The state that the files of the optimizer share, and the addresses of a parameter's values. See optimizer.h. */
#ifndef SHOAL_FUSION_OPTIMIZER_SHARDS_H
#define SHOAL_FUSION_OPTIMIZER_SHARDS_H

#include "base/assert.h"
#include "fusion/layout/borders.h"
#include "fusion/optimizer/loss_scale.h"
#include "fusion/optimizer/optimizer_group.h"
#include "fusion/reducer/optimizer.h"

#define FUSION_STATES (1 + SHOAL_UPDATE_STATES) /* the master is number 0 */

/* A buffer: the states of this rank's shard, one value for each element, and the gather of its parameters. */
struct fusion_shard {
    struct shoal_reducer *reducer; /* for the callback */
    fusion_done_fn *done;
    struct fusion_borders borders; /* between the shards of a team's ranks */
    char *states[FUSION_STATES];   /* of the last step that succeeded; NULL if the buffer has no such state */
    char *next[FUSION_STATES];     /* a step writes here and, if it succeeds, exchanges both; NULL: it writes to `states` */
    char *kept;                    /* with steps_early: the gradient of the shard, for a second attempt */
    struct shoal_request *scatter; /* lock, as all that follows */
    struct shoal_request *across;
    struct shoal_request *gather;
    bool is_scattered, is_gathered;
};

/* The communicators. A team shares one copy of the states: all ranks, or `degree` of them. */
enum fusion_reach {
    FUSION_SCATTER, /* the team, for sums of shards; the reducer's own if the team is all ranks */
    FUSION_ACROSS,  /* the ranks of other teams with the same shard, for sums over teams; NULL if there is one team */
    FUSION_GATHER,  /* the team, for new parameters */
    FUSION_REACHES,
};

struct fusion_optimizer {
    enum shoal_optimizer_rule rule;
    bool steps_early, is_atomic;
    struct shoal_optimizer_group *groups;
    size_t group_count;
    uint32_t *group_of; /* [parameters] */
    uint64_t *steps;    /* [parameters]: steps that succeeded */
    int degree, place;  /* ranks of a team, and this rank among them: the number of its shard */
    struct shoal_comm *comms[FUSION_REACHES];
    char *parameters; /* those of all buffers, laid out as the gradients are */
    char *memory;     /* the memory of all shards */
    size_t bytes;     /* the size of `memory` */
    double scale;     /* factor of gradients: the caller's, or 1 / loss scale */
    struct fusion_loss_scale loss;
    double *norms; /* with LAMB: the two squared norms of each parameter, followed by room for those of all ranks of a team */
    struct fusion_shard *shards; /* [buffers] */
    size_t posted, gathered;     /* lock: gathers of this step */
    size_t next_across;          /* lock: buffers before it are posted there */
    bool is_posting;             /* lock: a thread is posting there; it looks again before it leaves */
};

/* Elements [begin, begin + count) of a parameter. */
struct fusion_range {
    size_t begin, count;
};

/* Return the offset of this rank's shard in a buffer, and its length, in bytes. */
static inline size_t fusion_shard_begin(const struct shoal_reducer *reducer, size_t buffer)
{
    return fusion_border(&reducer->optimizer->shards[buffer].borders, reducer->optimizer->place);
}

static inline size_t fusion_shard_bytes(const struct shoal_reducer *reducer, size_t buffer)
{
    return fusion_shard_length(&reducer->optimizer->shards[buffer].borders, reducer->optimizer->place);
}

/* Returns the elements of a parameter in the shard with that number of its buffer. */
static inline struct fusion_range fusion_range_of(const struct shoal_reducer *reducer, size_t parameter, int number)
{
    SHOAL_ASSERT(number >= 0 && number < reducer->optimizer->degree);
    const struct fusion_place *place = &reducer->layout->places[parameter];
    const struct shoal_parameter *each = fusion_parameter(reducer, parameter);
    const struct fusion_borders *borders = &reducer->optimizer->shards[place->buffer].borders;
    const size_t unit = shoal_type_bytes(each->type);
    const size_t begin = fusion_max(fusion_border(borders, number), place->offset);
    const size_t end = fusion_min(fusion_border(borders, number + 1), place->offset + each->count * unit);
    if (begin >= end)
        return (struct fusion_range){0, 0};
    SHOAL_ASSERT((begin - place->offset) % unit == 0 && (end - begin) % unit == 0); /* borders do not cut elements */
    return (struct fusion_range){(begin - place->offset) / unit, (end - begin) / unit};
}

/* Masters and states are computed in float32, or in float64 if the parameter is. */
static inline size_t fusion_real_bytes(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? sizeof(double) : sizeof(float);
}

/* A 16-bit parameter is rounded, so its exact value is kept as well. If a step may be undone, so is any value before it. */
static inline bool fusion_has_master(const struct fusion_optimizer *optimizer, enum shoal_type type)
{
    return type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16 || optimizer->steps_early || optimizer->is_atomic;
}

/* Returns the offset of a parameter's element in this rank's shard, in elements. The shard must have the element. */
static inline size_t fusion_shard_offset(const struct shoal_reducer *reducer, size_t parameter, size_t element)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    const size_t unit = shoal_type_bytes(fusion_parameter(reducer, parameter)->type);
    SHOAL_ASSERT(place->offset + element * unit >= fusion_shard_begin(reducer, place->buffer));
    SHOAL_ASSERT(place->offset + element * unit <
                 fusion_shard_begin(reducer, place->buffer) + fusion_shard_bytes(reducer, place->buffer));
    return place->offset / unit + element - fusion_shard_begin(reducer, place->buffer) / unit;
}

/* Returns the address of an element in an array of states of its shard, or NULL if there is no such array. */
static inline char *fusion_state_at(const struct shoal_reducer *reducer, size_t parameter, char *array, size_t element)
{
    const size_t unit = fusion_real_bytes(fusion_parameter(reducer, parameter)->type);
    return array ? array + fusion_shard_offset(reducer, parameter, element) * unit : NULL;
}

static inline struct fusion_shard *fusion_shard_of(const struct shoal_reducer *reducer, size_t parameter)
{
    return &reducer->optimizer->shards[reducer->layout->places[parameter].buffer];
}

static inline char *fusion_parameter_at(const struct shoal_reducer *reducer, size_t parameter)
{
    const struct fusion_place *place = &reducer->layout->places[parameter];
    return reducer->optimizer->parameters + reducer->layout->buffers[place->buffer].begin + place->offset;
}

/* ---- optimizer_borders.c ---- */

/* Computes the borders of all buffers. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status fusion_optimizer_cut(struct shoal_reducer *reducer);
void fusion_optimizer_forget_borders(struct shoal_reducer *reducer);

/* Post the sum of a buffer in the team, which leaves this rank's shard in its place, and the gather of the team's shards, which
 * are in `memory` as in a buffer. */
SHOAL_MUST_USE enum shoal_status fusion_shard_scatter(const struct shoal_reducer *reducer, size_t buffer,
                                                      struct shoal_request **request_out);
SHOAL_MUST_USE enum shoal_status fusion_shard_gather(const struct shoal_reducer *reducer, size_t buffer, char *memory,
                                                     struct shoal_request **request_out);

#endif
