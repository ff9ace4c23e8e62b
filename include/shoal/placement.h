/* Which rank has which part of a model and of a batch. This header is the manual. It builds on shoal.h, but needs no context
 * and no communicator: the functions only compute, and get consistent results on all ranks. It is newer than shoal.h and may
 * still change from one version to the next.
 *
 * A job may divide its ranks in three ways at once: into the stages of a pipeline, into the parts of tensors, and into replicas
 * of the whole model. A *strategy* is the order of these three, written as the letters D (replicas), P (pipeline) and T
 * (tensors). The right-most letter varies fastest from rank to rank. Neighboring ranks share a host, so the right-most letter
 * should be the one that needs the most bandwidth. With 8 ranks and degrees of 2:
 *
 *     "DPT"    rank   0 1 2 3 4 5 6 7        "PTD"    rank   0 1 2 3 4 5 6 7
 *              rdp    0 0 0 0 1 1 1 1                 rdp    0 1 0 1 0 1 0 1
 *              pp     0 0 1 1 0 0 1 1                 pp     0 0 0 0 1 1 1 1
 *              tp     0 1 0 1 0 1 0 1                 tp     0 0 1 1 0 0 1 1
 *
 * Letters, names and tables are those of SageMaker's model-parallel library, version 1. */
#ifndef SHOAL_PLACEMENT_H
#define SHOAL_PLACEMENT_H

#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Placements ------------------------------------------------------------------------------------------------------- */

/* Initialize with SHOAL_PLACEMENT_INIT. All fields must be equal on all ranks. The number of replicas is
 * ranks / (pipeline * tensor). */
struct shoal_placement {
    size_t struct_bytes;
    int ranks;
    int pipeline;         /* stages of the model */
    int tensor;           /* parts of each divided tensor */
    int shards;           /* neighbors among the replicas that divide parameters and optimizer states; 1: none do */
    const char *strategy; /* "cluster" ("DPT"), "spread" ("TPD"), or the letters D, P and T in any order; NULL: cluster */
};
#define SHOAL_PLACEMENT_INIT                             \
    {                                                    \
        sizeof(struct shoal_placement), 1, 1, 1, 1, NULL \
    }

/* ---- 2. Ranks and groups ------------------------------------------------------------------------------------------------- */

/* Kinds of groups: name, number, which ranks are in one group. */
#define SHOAL_GROUP_LIST(X)                                                                         \
    X(GROUP_WORLD, 0, "all ranks")                                                                  \
    X(GROUP_PIPELINE, 1, "PP: the stages of one pipeline; ranks that differ in pp only")            \
    X(GROUP_TENSOR, 2, "TP: the parts of the same tensors; ranks that differ in tp only")           \
    X(GROUP_REPLICAS, 3, "RDP: the same part of the model; ranks that differ in rdp only")          \
    X(GROUP_DATA, 4, "DP: the same stage; TP and RDP together")                                     \
    X(GROUP_MODEL, 5, "MP: one replica of the model; PP and TP together")                           \
    X(GROUP_SHARDS, 6, "the shards of the same part of the model; ranks that differ in shard only") \
    X(GROUP_SHARD_REPLICAS, 7, "the same shard of it; ranks that differ in shard_replica only")

enum shoal_group {
#define SHOAL_GROUP_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_GROUP_LIST(SHOAL_GROUP_ENUM)
#undef SHOAL_GROUP_ENUM
};

/* A rank's number in its group of each kind, from 0 on. Within a group, numbers follow the order of ranks. Initialize with
 * SHOAL_COORDINATES_INIT. */
struct shoal_coordinates {
    size_t struct_bytes;
    int pp;
    int tp;
    int rdp;
    int dp;
    int mp;
    int shard;         /* rdp modulo placement.shards */
    int shard_replica; /* rdp / placement.shards, rounded down */
};
#define SHOAL_COORDINATES_INIT                                \
    {                                                         \
        sizeof(struct shoal_coordinates), 0, 0, 0, 0, 0, 0, 0 \
    }

/* Computes the numbers of a rank. Returns ERR_ARGUMENT if a degree is below 1, if pipeline * tensor does not divide the number
 * of ranks, if shards does not divide the number of replicas, if the strategy is not one of those above, or if the rank is out
 * of range. `error`, which may be NULL, then receives one line with the reason. */
SHOAL_CALL shoal_placement_locate(const struct shoal_placement *placement, int rank, struct shoal_coordinates *coordinates_out,
                                  char *error, size_t error_bytes);

/* Finds the group of a kind to which this rank belongs. Writes its ranks, in ascending order, and their number. ranks_out has
 * room for `capacity` ranks; if it is NULL, only the number is computed. Returns ERR_ARGUMENT as above, and if the group is
 * larger than capacity. The time is proportional to the size of the group. */
SHOAL_CALL shoal_placement_group(const struct shoal_placement *placement, enum shoal_group kind, int rank, int *ranks_out,
                                 size_t capacity, size_t *count_out, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
