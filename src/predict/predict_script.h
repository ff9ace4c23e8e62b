/* Scripts: plans as the simulation runs them. Blocks have become bytes, and consecutive steps that only compute have been
 * merged. A rank has two scripts: one for meeting the others, and one for each chunk. If the data travel with the
 * announcements, the rank only has the first. */
#ifndef SHOAL_PREDICT_PREDICT_SCRIPT_H
#define SHOAL_PREDICT_PREDICT_SCRIPT_H

#include "predict/predict_copiers.h"

/* The size of an announcement without data: struct shoal_network_announcement. */
#define SHOAL_SCRIPT_ANNOUNCEMENT_BYTES 56

enum shoal_act_kind {
    SHOAL_ACT_WORK,
    SHOAL_ACT_SEND,      /* increments the counter of a remote rank */
    SHOAL_ACT_INCREMENT, /* increments the counter of a rank of this host */
    SHOAL_ACT_PUBLISH,   /* increments the counters of all other ranks of this host */
    SHOAL_ACT_DEVICE,    /* work of the rank's GPU, for which the rank waits */
    SHOAL_ACT_WAIT
};

/* A full chunk, and the last one, which may be shorter. */
enum shoal_length { SHOAL_LENGTH_FULL, SHOAL_LENGTH_LAST, SHOAL_LENGTHS };

/* The rank's own operands, on a GPU, that an act touches. */
enum shoal_act_needs { SHOAL_ACT_NEEDS_INPUT = 1, SHOAL_ACT_NEEDS_OUTPUT = 2 };

struct shoal_act {
    uint8_t kind;
    uint8_t needs;
    uint8_t link; /* device: enum shoal_copy_link */
    uint16_t peer;
    uint32_t value;                /* wait: as in plans */
    uint64_t bytes[SHOAL_LENGTHS]; /* work: read and written; send: sent; device: on the link */
};

struct shoal_script {
    struct shoal_act *acts;
    uint32_t count;
    uint32_t capacity;
};

struct shoal_script_rank {
    struct shoal_script meet;
    struct shoal_script chunk;
    uint32_t *owed;   /* owed[i]: how often its i-th source increments its counter in one chunk */
    uint16_t sources; /* how many ranks it receives from */
};

struct shoal_cast {
    const struct shoal_case *asked;
    int size;
    int local; /* ranks of a host */
    size_t chunks;
    size_t chunk_elements;           /* of an operand, or of each part */
    struct shoal_script_rank *ranks; /* [size] */
    uint16_t *index;                 /* index[rank * size + peer]: 1 + the peer's index among the rank's sources, or 0 */
    struct shoal_load *loads;        /* [size], filled in by shoal_cast_load() */
};

/* Builds all scripts. The caller owns them and frees them with shoal_cast_fini(), even after an error. */
SHOAL_MUST_USE enum shoal_status shoal_cast_init(struct shoal_cast *cast, const struct shoal_case *asked);
void shoal_cast_fini(struct shoal_cast *cast);

/* Adds up the work of each rank over all chunks. */
void shoal_cast_load(struct shoal_cast *cast);

static inline int shoal_cast_host(const struct shoal_cast *cast, int rank)
{
    return rank / cast->local;
}

/* Returns the bytes of `elements` elements of a rank's operand (or of each of its parts), or 0 if the rank has no such
 * operand. */
size_t shoal_cast_bytes(const struct shoal_cast *cast, int rank, bool is_input, size_t elements);

/* Returns the index, among the counters of `rank`, of the one that `peer` increments. */
static inline uint16_t shoal_cast_index(const struct shoal_cast *cast, int rank, int peer)
{
    return (uint16_t)(cast->index[(size_t)rank * (size_t)cast->size + (size_t)peer] - 1);
}

#endif
