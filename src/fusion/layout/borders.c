#include "fusion/layout/borders.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/floats.h"
#include "fusion/layout/hash.h"

#define WHOLE_MAX (UINT64_C(1) << 32) /* so that products of a share and a smaller number fit into 64 bits */

/* ---- Weights ------------------------------------------------------------------------------------------------------------- */

const char *fusion_weights_fault(const double *weights, int shards, char *text, size_t text_bytes)
{
    SHOAL_DEFAULT_FLOATS;
    double sum = 0;
    for (int i = 0; weights && i < shards; i++) {
        sum += weights[i];
        if (weights[i] >= 0 && weights[i] - weights[i] == 0)
            continue;
        snprintf(text, text_bytes, "optimizer->weights: weight %d is %g: it must be a number from 0", i, weights[i]);
        return text;
    }
    if (!weights || (sum > 0 && sum - sum == 0))
        return NULL;
    snprintf(text, text_bytes, "optimizer->weights: the sum of the %d weights is %g: it must be above 0, and finite", shards,
             sum);
    return text;
}

struct fusion_option fusion_weights_list(const double *weights, int shards)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, (uint64_t)shards);
    for (int i = 0; i < shards; i++) {
        const double weight = weights ? weights[i] + 0.0 : 1; /* -0 becomes 0 */
        uint64_t word;
        memcpy(&word, &weight, sizeof word);
        hash = fusion_hash_word(hash, word);
    }
    return fusion_list_option("the optimizer's weight", hash, weights, (size_t)(unsigned)shards);
}

uint64_t fusion_granules_hash(const size_t *granules, const struct fusion_parameters *parameters)
{
    uint64_t hash = FUSION_HASH_BEGIN;
    for (size_t i = 0; i < parameters->count; i++)
        hash = fusion_hash_word(hash, fusion_min(fusion_granule(granules, i), fusion_max(parameters->items[i].count, 1)));
    return hash;
}

/* ---- The divider --------------------------------------------------------------------------------------------------------- */

struct fusion_divider {
    int shards;
    uint64_t whole;    /* at most WHOLE_MAX */
    uint64_t *shares;  /* [shards + 1]: shard i is to have (shares[i + 1] - shares[i]) / whole of everything */
    uint64_t elements; /* in the buffers so far */
    bool is_even;      /* shares are equal, and so are the shards of all buffers so far */
    uint64_t *owned;   /* [shards]: elements of each shard so far */
    uint64_t *wanted;  /* [shards + 1]: elements that shards 0 to i - 1 want of the buffer that is being cut */
};

static bool are_equal(const double *weights, int shards)
{
    for (int i = 1; weights && i < shards; i++)
        if (weights[i] != weights[0])
            return false;
    return true;
}

/* Equal shares are exact, others have 32 bits: whole numbers, so that all machines compute the same. */
static void set_shares(struct fusion_divider *divider, const double *weights)
{
    const int shards = divider->shards;
    SHOAL_DEFAULT_FLOATS;
    double sum = 0, before = 0;
    divider->is_even = are_equal(weights, shards);
    divider->whole = divider->is_even ? (uint64_t)(unsigned)shards : WHOLE_MAX;
    for (int i = 0; !divider->is_even && i < shards; i++)
        sum += weights[i];
    for (int i = 0; i < shards; i++) {
        before += divider->is_even ? 0 : weights[i];
        divider->shares[i + 1] = divider->is_even ? (uint64_t)(unsigned)i + 1 : (uint64_t)(before / sum * (double)WHOLE_MAX);
    }
}

struct fusion_divider *fusion_divider_create(const double *weights, int shards)
{
    struct fusion_divider *divider = calloc(1, sizeof *divider);
    if (!divider)
        return NULL;
    divider->shards = shards;
    divider->shares = calloc((size_t)shards + 1, sizeof *divider->shares);
    divider->owned = calloc((size_t)shards, sizeof *divider->owned);
    divider->wanted = calloc((size_t)shards + 1, sizeof *divider->wanted);
    if (!divider->shares || !divider->owned || !divider->wanted) {
        fusion_divider_free(divider);
        return NULL;
    }
    set_shares(divider, weights);
    SHOAL_ASSERT(divider->shares[shards] <= divider->whole);
    return divider;
}

void fusion_divider_free(struct fusion_divider *divider)
{
    if (!divider)
        return;
    free(divider->shares);
    free(divider->owned);
    free(divider->wanted);
    free(divider);
}

/* ---- What each shard wants of a buffer ----------------------------------------------------------------------------------- */

/* Returns n * part / whole, rounded down. part is at most whole, whole at most WHOLE_MAX. */
static uint64_t border_share(uint64_t n, uint64_t part, uint64_t whole)
{
    SHOAL_ASSERT(whole > 0 && part <= whole && whole <= WHOLE_MAX);
    return n / whole * part + n % whole * part / whole;
}

/* Each shard wants what it lacks of its share of all buffers so far and of this one. Together they want at least this buffer;
 * more if earlier granules gave some shards more than their shares. */
static void add_up_wanted(struct fusion_divider *divider, uint64_t elements)
{
    const uint64_t all = divider->elements + elements;
    for (int i = 0; i < divider->shards; i++) {
        const uint64_t share =
            border_share(all, divider->shares[i + 1], divider->whole) - border_share(all, divider->shares[i], divider->whole);
        divider->wanted[i + 1] = divider->wanted[i] + (share > divider->owned[i] ? share - divider->owned[i] : 0);
    }
}

/* Returns the element at which border `number` of a buffer should be. */
static uint64_t find_target(const struct fusion_divider *divider, int number, uint64_t elements)
{
    uint64_t part = divider->wanted[number], whole = divider->wanted[divider->shards];
    if (whole == elements)
        return part;
    while (whole > WHOLE_MAX) {
        part >>= 1;
        whole >>= 1;
    }
    return border_share(elements, part, whole);
}

/* ---- Borders ------------------------------------------------------------------------------------------------------------- */

/* Elements with one granule: a parameter with the padding after it, or the padding at the end of the buffer. Possible borders
 * are begin, begin + granule ... below begin + count, and end. */
struct run {
    uint64_t begin, end, count, granule;
};

/* Returns the run of a parameter, or of the padding after the last one if index is span_count. */
static struct run run_of(const struct fusion_span *spans, size_t span_count, size_t index, size_t bytes, size_t element_bytes)
{
    const uint64_t line = FUSION_ALIGNMENT / element_bytes;
    const uint64_t all = bytes / element_bytes;
    if (span_count == 0)
        return (struct run){0, all, all, line};
    const struct fusion_span *span = &spans[fusion_min(index, span_count - 1)];
    const uint64_t begin = span->offset / element_bytes, end = fusion_round_up(begin + span->count, line);
    if (index == span_count)
        return (struct run){end, all, all - end, line};
    if (span->granule <= 1)
        return (struct run){begin, end, end - begin, line};
    return (struct run){begin, end, span->count, fusion_min(span->granule, fusion_max(span->count, 1))};
}

/* Returns the possible border that is nearest to an element of the run, the lower one of two. */
static uint64_t border_near(const struct run *run, uint64_t element)
{
    SHOAL_ASSERT(element >= run->begin && element < run->end && run->granule > 0);
    const uint64_t before = (element - run->begin) / run->granule * run->granule;
    const uint64_t lower = run->begin + before;
    const uint64_t upper = before + run->granule < run->count ? lower + run->granule : run->end;
    if (before > 0 && before >= run->count) /* the element is in the padding */
        return run->end;
    return element - lower <= upper - element ? lower : upper;
}

static void find_borders(struct fusion_divider *divider, const struct fusion_span *spans, size_t span_count, size_t bytes,
                         size_t element_bytes, size_t *begins)
{
    const uint64_t elements = bytes / element_bytes;
    size_t index = 0;
    struct run run = run_of(spans, span_count, 0, bytes, element_bytes);
    add_up_wanted(divider, elements);
    for (int i = 1; i < divider->shards; i++) {
        const uint64_t target = find_target(divider, i, elements);
        while (target >= run.end && index < span_count)
            run = run_of(spans, span_count, ++index, bytes, element_bytes);
        begins[i] = (target < run.end ? border_near(&run, target) : run.end) * element_bytes;
        SHOAL_ASSERT(begins[i] >= begins[i - 1] && begins[i] <= bytes);
    }
    begins[divider->shards] = bytes;
}

static bool is_even(const size_t *begins, int shards)
{
    for (int i = 1; i <= shards; i++)
        if (begins[i] != begins[1] * (size_t)i)
            return false;
    return true;
}

/* Returns true if find_borders() would cut the buffer into equal parts, as nearly always: there may be many buffers, and many
 * shards of each. */
static bool is_plain(const struct fusion_divider *divider, const struct fusion_span *spans, size_t span_count, size_t bytes)
{
    for (size_t i = 0; i < span_count; i++)
        if (spans[i].granule > 1)
            return false;
    return divider->is_even && bytes % (FUSION_ALIGNMENT * (size_t)divider->shards) == 0;
}

/* Allocates the arrays of borders that are not equal. */
static enum shoal_status cut_unequal(struct fusion_divider *divider, const struct fusion_span *spans, size_t span_count,
                                     size_t bytes, size_t element_bytes, struct fusion_borders *borders)
{
    const size_t shards = (size_t)divider->shards;
    size_t *begins = calloc(2 * shards + 1, sizeof *begins);
    if (!begins)
        return SHOAL_ERR_MEMORY;
    find_borders(divider, spans, span_count, bytes, element_bytes, begins);
    borders->begins = begins;
    borders->counts = begins + shards + 1;
    for (size_t i = 0; i < shards; i++)
        borders->counts[i] = (begins[i + 1] - begins[i]) / element_bytes;
    if (is_even(begins, divider->shards))
        fusion_borders_free(borders);
    return SHOAL_OK;
}

enum shoal_status fusion_divider_cut(struct fusion_divider *divider, const struct fusion_span *spans, size_t span_count,
                                     size_t bytes, size_t element_bytes, struct fusion_borders *borders_out)
{
    const size_t shards = (size_t)divider->shards;
    SHOAL_ASSERT(bytes % FUSION_ALIGNMENT == 0);
    *borders_out = (struct fusion_borders){bytes / shards, NULL, NULL};
    if (!is_plain(divider, spans, span_count, bytes))
        FUSION_TRY(cut_unequal(divider, spans, span_count, bytes, element_bytes, borders_out));
    for (size_t i = 0; i < shards; i++)
        divider->owned[i] += borders_out->counts ? borders_out->counts[i] : borders_out->each / element_bytes;
    divider->elements += bytes / element_bytes;
    divider->is_even = divider->is_even && !borders_out->counts;
    return SHOAL_OK;
}

void fusion_borders_free(struct fusion_borders *borders)
{
    free(borders->begins); /* counts are in the same memory */
    borders->begins = borders->counts = NULL;
}
