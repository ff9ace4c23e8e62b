/* Which samples a rank trains on. This header is the manual. It builds on shoal.h, but needs no context and no communicator:
 * the functions only compute, and all ranks get consistent results. It is newer than shoal.h and may still change from one
 * version to the next.
 *
 * A data set is samples 0 to n - 1. An epoch's *order* is all of them, shuffled by a seed and the epoch's number. Ranks take
 * turns in it:
 *
 *     order      | s0 | s1 | s2 | s3 | s4 | s5 | s6 |        n = 7, 2 ranks
 *     rank         0    1    0    1    0    1    0
 *     rank 0     s0 s2 s4 s6        rank 1     s1 s3 s5      the tail is uneven: see enum shoal_tail
 *
 * So a step's global batch is a range of the order, whatever the number of ranks. A job that resumes in mid-epoch passes how
 * much of the order has been used, and the ranks share the rest. The number of ranks may have changed.
 *
 * The order is part of the interface: the same n, seed and epoch produce the same order in every version and on every machine.
 * It is computed element by element, so a data set of 2^40 samples needs no memory and no preparation. */
#ifndef SHOAL_DATA_H
#define SHOAL_DATA_H

#include <shoal/shoal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Samples of a rank ------------------------------------------------------------------------------------------------ */

/* What happens to the samples that remain when each rank has equally many: name, number, meaning. */
#define SHOAL_TAIL_LIST(X)                                                                                            \
    X(TAIL_PAD, 0, "ranks with one sample fewer repeat samples from the beginning of the epoch's order")              \
    X(TAIL_DROP, 1, "the last samples of the epoch's order are left out; with a shuffle, these differ in each epoch") \
    X(TAIL_KEEP, 2, "the first ranks have one sample more; each sample is used exactly once, as in an evaluation")

enum shoal_tail {
#define SHOAL_TAIL_ENUM(name, number, text) SHOAL_##name = (number),
    SHOAL_TAIL_LIST(SHOAL_TAIL_ENUM)
#undef SHOAL_TAIL_ENUM
};

#define SHOAL_SAMPLES_MAX (UINT64_C(1) << 62)

/* Initialize with SHOAL_SAMPLING_INIT. All fields except rank must be equal on all ranks. */
struct shoal_sampling {
    size_t struct_bytes;
    uint64_t samples; /* n, at most SHOAL_SAMPLES_MAX */
    uint64_t used;    /* samples of the epoch's order that all ranks together have used so far; 0 at the start of the epoch */
    uint64_t seed;
    uint64_t epoch;
    int rank;
    int ranks;
    int shuffles; /* 1: shuffled; 0: the order is 0, 1, 2 ... */
    enum shoal_tail tail;
};
#define SHOAL_SAMPLING_INIT                                                \
    {                                                                      \
        sizeof(struct shoal_sampling), 0, 0, 0, 0, 0, 1, 1, SHOAL_TAIL_PAD \
    }

/* Computes how many of the remaining samples the rank has: (samples - used) / ranks, rounded up (PAD), down (DROP), or up on
 * the first (samples - used) modulo ranks of them (KEEP). Returns ERR_ARGUMENT if samples or used is too large, or rank is out
 * of range. `error`, which may be NULL, then receives one line with the reason. */
SHOAL_CALL shoal_sampling_count(const struct shoal_sampling *sampling, uint64_t *count_out, char *error, size_t error_bytes);

/* Writes entries [first, first + count) of the rank's samples. Entry k is number used + k * ranks + rank of the epoch's order,
 * which starts again at its end (PAD). Rank 0 of 1 sees the whole order. Takes about 0.3 us per entry, and allocates nothing.
 * Reentrant. Returns ERR_ARGUMENT as above, and if the rank has fewer entries.
 *
 * The shuffle is "swap or not" (Hoang, Morris, Rogaway, CRYPTO 2012): there are 48 rounds. In each, i and key - i (modulo n)
 * change places if a certain bit is set; the bit is hashed from the larger of the two and the round. */
SHOAL_CALL shoal_sampling_indices(const struct shoal_sampling *sampling, uint64_t first, size_t count, uint64_t *indices_out,
                                  char *error, size_t error_bytes);

/* ---- 2. Batches ---------------------------------------------------------------------------------------------------------- */

/* global batch = hosts * ranks per host * batch per rank. Initialize with SHOAL_BATCH_INIT. */
struct shoal_batch {
    size_t struct_bytes;
    uint64_t per_rank;
    uint64_t all_ranks; /* samples of a step: per_rank * hosts * ranks_per_host, at most the number wanted */
    uint64_t left;      /* wanted - all_ranks: less than the number of ranks */
};
#define SHOAL_BATCH_INIT                    \
    {                                       \
        sizeof(struct shoal_batch), 0, 0, 0 \
    }

/* Divides a wanted global batch among all ranks. Every rank gets the same number, because only then are averages over ranks
 * (SHOAL_AVG) averages over samples. The remainder is left out of the batch, but not lost: the next batch begins there. Returns
 * ERR_ARGUMENT if hosts or ranks_per_host is below 1, or if a rank would get nothing; `error` as above. */
SHOAL_CALL shoal_batch_divide(uint64_t wanted, int hosts, int ranks_per_host, struct shoal_batch *batch_out, char *error,
                              size_t error_bytes);

#ifdef __cplusplus
}
#endif

#endif
