/* Samples of ranks, and batches: arithmetic alone. See the public header. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/struct_bytes.h"
#include "shoal/data.h"

#define ROUNDS 48
#define BLOCK ((size_t)128) /* entries that go through the rounds together: a core works on several at once */

__attribute__((format(printf, 3, 4))) static enum shoal_status refuse(char *error, size_t error_bytes, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (error && error_bytes)
        vsnprintf(error, error_bytes, format, args);
    va_end(args);
    return SHOAL_ERR_ARGUMENT;
}

/* ---- The shuffle --------------------------------------------------------------------------------------------------------- */

struct shuffle {
    uint64_t samples;
    uint64_t keys[ROUNDS];  /* below samples */
    uint64_t salts[ROUNDS]; /* of the bits */
};

/* The next number of a sequence, after Steele, Lea and Flood's SplitMix64. */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* A value below `bound`: the upper half of a product. All are equally likely, except for one part in 2^64 / bound. */
static uint64_t draw_below(uint64_t *state, uint64_t bound)
{
    const uint64_t x = draw(state), low = UINT32_MAX;
    const uint64_t carry = ((x & low) * (bound & low)) >> 32;
    const uint64_t middle = (x >> 32) * (bound & low) + carry, other = (x & low) * (bound >> 32) + (middle & low);
    return (x >> 32) * (bound >> 32) + (middle >> 32) + (other >> 32);
}

static void open_shuffle(struct shuffle *shuffle, const struct shoal_sampling *sampling)
{
    uint64_t state = sampling->seed;
    state = draw(&state) ^ sampling->epoch;
    state = draw(&state) ^ sampling->samples;
    shuffle->samples = sampling->samples;
    for (size_t r = 0; r < ROUNDS; r++) {
        shuffle->keys[r] = draw_below(&state, shuffle->samples);
        shuffle->salts[r] = draw(&state);
    }
}

/* Returns all ones or all zeros: copies of the hash's highest bit. */
static uint64_t swap_mask(uint64_t larger, uint64_t salt)
{
    uint64_t z = (larger ^ salt) * UINT64_C(0xff51afd7ed558ccd);
    z = (z ^ z >> 32) * UINT64_C(0xc4ceb9fe1a85ec53);
    return 0 - (z >> 63);
}

/* Turns positions of the order into the samples there. Has no branches, because none could be predicted. */
static void run_rounds(const struct shuffle *shuffle, uint64_t *indices, size_t count)
{
    for (size_t r = 0; r < ROUNDS; r++) {
        const uint64_t key = shuffle->keys[r], salt = shuffle->salts[r], samples = shuffle->samples;
        for (size_t i = 0; i < count; i++) {
            const uint64_t index = indices[i], partner = key - index + (samples & (0 - (uint64_t)(key < index)));
            const uint64_t both = index ^ partner, larger = index ^ (both & (0 - (uint64_t)(index < partner)));
            indices[i] = index ^ (both & swap_mask(larger, salt));
        }
    }
}

/* ---- Samples of a rank --------------------------------------------------------------------------------------------------- */

static enum shoal_status sampling_check(const struct shoal_sampling *sampling, char *error, size_t error_bytes)
{
    if (!sampling || sampling->struct_bytes < sizeof *sampling)
        return refuse(error, error_bytes, "sampling is NULL, or its struct_bytes is not set: use SHOAL_SAMPLING_INIT");
    if (sampling->samples > SHOAL_SAMPLES_MAX)
        return refuse(error, error_bytes, "%" PRIu64 " samples are more than %" PRIu64, sampling->samples, SHOAL_SAMPLES_MAX);
    if (sampling->used > sampling->samples)
        return refuse(error, error_bytes, "%" PRIu64 " samples cannot be used of %" PRIu64, sampling->used, sampling->samples);
    if (sampling->ranks < 1 || sampling->rank < 0 || sampling->rank >= sampling->ranks)
        return refuse(error, error_bytes, "rank %d is out of range: there are %d ranks", sampling->rank, sampling->ranks);
    if ((unsigned)sampling->tail > SHOAL_TAIL_KEEP)
        return refuse(error, error_bytes, "tail is %d, which is none of enum shoal_tail", (int)sampling->tail);
    return SHOAL_OK;
}

static uint64_t count_of(const struct shoal_sampling *sampling)
{
    const uint64_t left = sampling->samples - sampling->used, ranks = (uint64_t)sampling->ranks;
    const uint64_t more = left % ranks;
    if (sampling->tail == SHOAL_TAIL_DROP)
        return left / ranks;
    return left / ranks + (sampling->tail == SHOAL_TAIL_PAD ? more > 0 : (uint64_t)sampling->rank < more);
}

enum shoal_status shoal_sampling_count(const struct shoal_sampling *sampling, uint64_t *count_out, char *error,
                                       size_t error_bytes)
{
    const enum shoal_status status = sampling_check(sampling, error, error_bytes);
    if (status != SHOAL_OK)
        return status;
    if (!count_out)
        return refuse(error, error_bytes, "count_out is NULL");
    *count_out = count_of(sampling);
    return SHOAL_OK;
}

enum shoal_status shoal_sampling_indices(const struct shoal_sampling *sampling, uint64_t first, size_t count,
                                         uint64_t *indices_out, char *error, size_t error_bytes)
{
    struct shuffle shuffle = {0};
    const enum shoal_status status = sampling_check(sampling, error, error_bytes);
    if (status != SHOAL_OK)
        return status;
    const uint64_t all = count_of(sampling), ranks = (uint64_t)sampling->ranks;
    if (first > all || count > all - first)
        return refuse(error, error_bytes, "rank %d has %" PRIu64 " samples, not %zu from %" PRIu64 " on", sampling->rank, all,
                      count, first);
    if (count == 0)
        return SHOAL_OK;
    if (!indices_out)
        return refuse(error, error_bytes, "indices_out is NULL");
    if (sampling->shuffles)
        open_shuffle(&shuffle, sampling);
    for (size_t done = 0; done < count; done += BLOCK) {
        const size_t length = count - done < BLOCK ? count - done : BLOCK;
        uint64_t *indices = indices_out + done;
        for (size_t i = 0; i < length; i++)
            indices[i] = (sampling->used + (first + done + i) * ranks + (uint64_t)sampling->rank) % sampling->samples;
        if (sampling->shuffles)
            run_rounds(&shuffle, indices, length);
    }
    return SHOAL_OK;
}

/* ---- Batches ------------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_batch_divide(uint64_t wanted, int hosts, int ranks_per_host, struct shoal_batch *batch_out, char *error,
                                     size_t error_bytes)
{
    if (!shoal_struct_bytes(batch_out))
        return refuse(error, error_bytes, "batch_out is NULL, or its struct_bytes is not set: use SHOAL_BATCH_INIT");
    if (hosts < 1 || ranks_per_host < 1)
        return refuse(error, error_bytes, "%d hosts with %d ranks each: both must be at least 1", hosts, ranks_per_host);
    const uint64_t ranks = (uint64_t)hosts * (uint64_t)ranks_per_host;
    if (wanted < ranks)
        return refuse(error, error_bytes,
                      "a global batch of %" PRIu64
                      " leaves nothing for some of %d hosts * %d ranks: it must be at least %" PRIu64,
                      wanted, hosts, ranks_per_host, ranks);
    const struct shoal_batch batch = {sizeof batch, wanted / ranks, wanted / ranks * ranks, wanted % ranks};
    shoal_struct_copy_out(batch_out, &batch, sizeof batch);
    return SHOAL_OK;
}
