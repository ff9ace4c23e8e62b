/* Which samples a rank trains on. This header is the manual; it builds on shoal.h, but needs no context and no
 * communicator: the functions compute, and every rank computes the same. It is newer than shoal.h and may still change from
 * one version to the next.
 *
 * A data set is samples 0 to n - 1. An epoch's *order* is all of them, shuffled by a seed and the epoch's number. Ranks take
 * turns in it:
 *
 *     order      | s0 | s1 | s2 | s3 | s4 | s5 | s6 |        n = 7, 2 ranks
 *     rank         0    1    0    1    0    1    0
 *     rank 0     s0 s2 s4 s6        rank 1     s1 s3 s5      the tail is uneven: see enum shoal_tail
 *
 * So a step's global batch is a stretch of the order, whatever the number of ranks. A job that resumes in mid-epoch, even with
 * another number of ranks, says how much of the order has been used, and the ranks share the rest.
 *
 * The order is part of the interface: the same n, seed and epoch give the same order in every version and on every machine. It
 * is computed element by element, so a data set of 2^40 samples takes no memory and no time to begin with.
 */
#ifndef SHOAL_DATA_H
#define SHOAL_DATA_H

#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Samples of a rank ------------------------------------------------------------------------------------------------ */

/* The treatment of the samples that remain when each rank has equally many: name, number, meaning. */
#define SHOAL_TAIL_LIST(X)                                                                                     \
    X(TAIL_PAD, 0, "ranks that would have one less repeat samples from the beginning of the epoch's order")    \
    X(TAIL_DROP, 1, "the last samples of the epoch's order are left out; with a shuffle others in each epoch") \
    X(TAIL_KEEP, 2, "the first ranks have one more: each sample exactly once, as an evaluation wants it")

enum shoal_tail {
#define SHOAL_TAIL_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_TAIL_LIST(SHOAL_TAIL_ENUM)
#undef SHOAL_TAIL_ENUM
};

#define SHOAL_SAMPLES_MAX (UINT64_C(1) << 62)

/* Begins as SHOAL_SAMPLING_INIT. All but rank must be the same on all ranks. */
struct shoal_sampling {
    size_t struct_bytes;
    uint64_t samples; /* n, at most SHOAL_SAMPLES_MAX */
    uint64_t used;    /* of the epoch's order, by all ranks together, before this; 0 at the epoch's begin */
    uint64_t seed;
    uint64_t epoch;
    int rank;
    int ranks;
    int shuffles; /* 1; 0: the order is 0, 1, 2 ... */
    enum shoal_tail tail;
};
#define SHOAL_SAMPLING_INIT                                                \
    {                                                                      \
        sizeof(struct shoal_sampling), 0, 0, 0, 0, 0, 1, 1, SHOAL_TAIL_PAD \
    }

/* How many samples the rank has of those that remain: (samples - used) / ranks, rounded up (PAD), down (DROP), or up on the
 * first (samples - used) modulo ranks of them (KEEP). ERR_ARGUMENT: samples or used is too large, there is no such rank; one
 * line in error, which may be NULL, says what is wrong. */
SHOAL_CALL shoal_sampling_count(const struct shoal_sampling *sampling, uint64_t *count_out, char *error, size_t error_bytes);

/* Writes entries [first, first + count) of the rank's samples: entry k is number used + k * ranks + rank of the epoch's order,
 * which begins again at its end (PAD). As rank 0 of 1 a caller sees the whole order. Takes some 0.3 us an entry, and allocates
 * nothing. Reentrant. ERR_ARGUMENT as above, or: the rank has fewer entries.
 *
 * The shuffle is "swap or not" (Hoang, Morris, Rogaway, CRYPTO 2012): in each of 48 rounds i and key - i (modulo n) change
 * places if a bit, hashed of the larger of both and of the round, says so. */
SHOAL_CALL shoal_sampling_indices(const struct shoal_sampling *sampling, uint64_t first, size_t count, uint64_t *indices_out,
                                  char *error, size_t error_bytes);

/* ---- 2. Batches ---------------------------------------------------------------------------------------------------------- */

/* global batch = hosts * ranks per host * batch per rank. Begins as SHOAL_BATCH_INIT. */
struct shoal_batch {
    size_t struct_bytes;
    uint64_t per_rank;
    uint64_t all_ranks; /* what a step takes: per_rank * hosts * ranks_per_host, at most what was wanted */
    uint64_t left;      /* wanted - all_ranks: less than the number of ranks */
};
#define SHOAL_BATCH_INIT                    \
    {                                       \
        sizeof(struct shoal_batch), 0, 0, 0 \
    }

/* Divides a wanted global batch among all ranks. Every rank gets the same number, because averages over ranks (SHOAL_AVG) are
 * averages over samples only then. The remainder is left out of the batch, and not lost: the next batch begins there.
 * ERR_ARGUMENT: hosts or ranks_per_host is below 1, or a rank would get nothing; error as above. */
SHOAL_CALL shoal_batch_divide(uint64_t wanted, int hosts, int ranks_per_host, struct shoal_batch *batch_out, char *error,
                              size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
