/* Do all ranks hold the same parameters? */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/reducer.h"

/* The value most ranks have; of several, that of the lowest rank. */
static uint64_t most_common(const uint64_t *values, int count)
{
    int best = 0, best_votes = 0;
    for (int i = 0; i < count; i++) {
        int votes = 0;
        for (int k = 0; k < count; k++)
            votes += values[k] == values[i];
        if (votes > best_votes) {
            best_votes = votes;
            best = i;
        }
    }
    return values[best];
}

static void list_others(const uint64_t *values, int count, char *text, size_t text_bytes)
{
    const uint64_t common = most_common(values, count);
    int listed = 0, others = 0;
    size_t length = 0;
    for (int r = 0; r < count; r++)
        others += values[r] != common;
    for (int r = 0; r < count && listed < 8; r++) {
        if (values[r] == common || length >= text_bytes)
            continue;
        const int written = snprintf(text + length, text_bytes - length, "%s %d", listed ? "," : "", r);
        length += written > 0 ? (size_t)written : 0;
        listed++;
    }
    if (others > listed && length < text_bytes)
        snprintf(text + length, text_bytes - length, " and %d more", others - listed);
}

static enum shoal_status name_difference(struct shoal_reducer *reducer, size_t parameter, uint64_t own)
{
    const struct shoal_options options = fusion_options(reducer);
    char name[FUSION_TEXT_MAX], others[128] = "";
    uint64_t *all = calloc((size_t)reducer->size, sizeof *all);
    if (!all)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for %d ranks", reducer->size);
    const enum shoal_status status = shoal_allgather(reducer->comm, &own, all, 1, SHOAL_INT64, &options);
    if (status == SHOAL_OK)
        list_others(all, reducer->size, others, sizeof others);
    free(all);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return fusion_failure_status(reducer);
    }
    fusion_parameter_text(&reducer->layout->parameters, parameter, name, sizeof name);
    return fusion_refuse(reducer, SHOAL_ERR_MISMATCH,
                         "%s is not the same on all ranks after step %llu: rank%s differ from most", name,
                         (unsigned long long)reducer->steps, others);
}

/* h and ~h: the largest of both are complements just where all are equal. */
static enum shoal_status reduce(struct shoal_reducer *reducer, const uint64_t *hashes, int64_t *largest, size_t count)
{
    const struct shoal_options options = fusion_options(reducer);
    for (size_t i = 0; i < count; i++) {
        memcpy(&largest[i], &hashes[i], sizeof largest[i]);
        largest[count + i] = ~largest[i];
    }
    return shoal_allreduce(reducer->comm, largest, largest, 2 * count, SHOAL_INT64, SHOAL_MAX, &options);
}

enum shoal_status shoal_reducer_compare(struct shoal_reducer *reducer, const uint64_t *hashes)
{
    if (!reducer || !hashes)
        return SHOAL_ERR_ARGUMENT;
    if (fusion_failed(reducer) != SHOAL_OK)
        return fusion_failure_status(reducer);
    if (atomic_load_explicit(&reducer->is_open, memory_order_acquire))
        return fusion_refuse(reducer, SHOAL_ERR_STATE, "shoal_reducer_compare inside a step: call it after finish");
    const size_t count = reducer->layout->parameters.count;
    int64_t *largest = calloc(2 * count + 1, sizeof *largest);
    if (!largest)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for %zu hashes", count);
    const enum shoal_status status = reduce(reducer, hashes, largest, count);
    size_t same = 0;
    while (same < count && largest[same] == ~largest[count + same])
        same++;
    free(largest);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return fusion_failure_status(reducer);
    }
    return same == count ? SHOAL_OK : name_difference(reducer, same, hashes[same]);
}
