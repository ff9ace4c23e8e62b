/* Checks that all ranks hold the same parameters. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/layout/lists.h"
#include "fusion/reducer/marks.h"
#include "fusion/reducer/reducer_failure.h"

static enum shoal_status name_difference(struct shoal_reducer *reducer, size_t parameter, uint64_t own)
{
    const struct shoal_options options = fusion_options(reducer);
    char name[FUSION_TEXT_MAX], others[128] = "";
    uint64_t *all = calloc((size_t)reducer->size, sizeof *all);
    if (!all)
        return fusion_fail(reducer, SHOAL_ERR_MEMORY, -1, "no memory for %d ranks", reducer->size);
    const enum shoal_status status = shoal_allgather(reducer->comm, &own, all, 1, SHOAL_INT64, &options);
    if (status == SHOAL_OK)
        fusion_list_others(all, reducer->size, others, sizeof others);
    free(all);
    if (status != SHOAL_OK) {
        fusion_operation_failed(reducer, status, -1);
        return fusion_failure_status(reducer);
    }
    fusion_parameter_text(&reducer->layout->parameters, parameter, name, sizeof name);
    return fusion_refuse(reducer, SHOAL_ERR_MISMATCH, "%s is not the same on all ranks after step %llu: %s", name,
                         (unsigned long long)reducer->steps, others);
}

/* Reduces h and ~h by maximum: the two results are complements exactly if all ranks have the same h. */
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
    if (fusion_marks_are_open(reducer))
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
