/* Compares lists of parameters over the ranks. */
#include "fusion/layout/lists.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/layout/hash.h"

uint64_t fusion_parameters_hash(const struct fusion_parameters *parameters)
{
    uint64_t hash = fusion_hash_word(FUSION_HASH_BEGIN, parameters->count);
    for (size_t i = 0; i < parameters->count; i++) {
        const struct shoal_parameter *each = &parameters->items[i];
        hash = fusion_hash_word(hash, each->count);
        hash = fusion_hash_word(hash, (uint64_t)each->type);
        hash = fusion_hash_word(hash, shoal_bytes_hash(each->name, strlen(each->name)));
    }
    return hash;
}

/* ---- Are all ranks ready? ------------------------------------------------------------------------------------------------ */

enum shoal_status fusion_ranks_ready(struct shoal_comm *comm, const struct shoal_options *options, enum shoal_status own,
                                     int *rank_out)
{
    const int size = shoal_comm_size(comm);
    const int64_t word = own == SHOAL_OK ? 0 : (int64_t)(size - shoal_comm_rank(comm)) << 32 | (int64_t)own;
    int64_t lowest = 0; /* of the lowest rank that is not ready: the largest of all words */
    *rank_out = -1;
    FUSION_TRY(shoal_allreduce(comm, &word, &lowest, 1, SHOAL_INT64, SHOAL_MAX, options));
    if (lowest == 0)
        return SHOAL_OK;
    *rank_out = size - (int)(lowest >> 32);
    return (enum shoal_status)(lowest & INT32_MAX);
}

enum shoal_status fusion_ranks_have_memory(struct shoal_comm *comm, const struct shoal_options *options, bool has_memory,
                                           char *text, size_t text_bytes)
{
    int rank;
    const enum shoal_status status = fusion_ranks_ready(comm, options, has_memory ? SHOAL_OK : SHOAL_ERR_MEMORY, &rank);
    if (rank >= 0)
        snprintf(text, text_bytes, "rank %d: no memory for what %d ranks tell each other", rank, shoal_comm_size(comm));
    return status;
}

/* ---- The first parameter that differs ------------------------------------------------------------------------------------ */

struct entry {
    uint64_t count;
    int64_t type;
    char name[FUSION_NAME_MAX];
};

/* A rank's first difference from rank 0; parameter is -1 if the lists are equal. */
struct difference {
    int64_t parameter;
    char text[FUSION_TEXT_MAX];
};

static void describe_entry(const struct entry *entry, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%" PRIu64 " elements of %s%s%s%s", entry->count, fusion_type_name((enum shoal_type)entry->type),
             *entry->name ? " (" : "", entry->name, *entry->name ? ")" : "");
}

static struct entry *list_entries(const struct fusion_parameters *parameters, size_t room)
{
    struct entry *entries = calloc(room + 1, sizeof *entries);
    for (size_t i = 0; entries && i < parameters->count && i < room; i++) {
        entries[i].count = parameters->items[i].count;
        entries[i].type = (int64_t)parameters->items[i].type;
        snprintf(entries[i].name, sizeof entries[i].name, "%s", parameters->items[i].name);
    }
    return entries;
}

static struct difference find_difference(const struct entry *first, size_t first_count, const struct entry *own,
                                         size_t own_count, int rank)
{
    struct difference difference = {-1, ""};
    char there[256], here[256];
    const size_t both = fusion_min(first_count, own_count);
    size_t i = 0;
    while (i < both && memcmp(&first[i], &own[i], sizeof *first) == 0)
        i++;
    if (i == both && first_count == own_count)
        return difference;
    difference.parameter = (int64_t)i;
    snprintf(there, sizeof there, "no such parameter (it has %zu)", first_count);
    snprintf(here, sizeof here, "no such parameter (it has %zu)", own_count);
    if (i < first_count)
        describe_entry(&first[i], there, sizeof there);
    if (i < own_count)
        describe_entry(&own[i], here, sizeof here);
    snprintf(difference.text, sizeof difference.text, "parameter %zu differs: rank 0 has %.180s, rank %d has %.180s", i, there,
             rank, here);
    return difference;
}

static enum shoal_status gather_differences(struct shoal_comm *comm, const struct shoal_options *options,
                                            const struct difference *own, struct difference *all, char *text, size_t text_bytes)
{
    const int size = shoal_comm_size(comm);
    int64_t first = INT64_MAX;
    const enum shoal_status status = shoal_allgather(comm, own, all, sizeof *own, SHOAL_UINT8, options);
    for (int r = 0; r < size && status == SHOAL_OK; r++) {
        if (all[r].parameter < 0 || all[r].parameter >= first)
            continue;
        first = all[r].parameter;
        snprintf(text, text_bytes, "%.*s", (int)sizeof all[r].text - 1, all[r].text);
    }
    return status;
}

enum shoal_status fusion_lists_compare(struct shoal_comm *comm, const struct shoal_options *options,
                                       const struct fusion_parameters *parameters, size_t first_count, char *text,
                                       size_t text_bytes)
{
    const int rank = shoal_comm_rank(comm);
    struct entry *own = list_entries(parameters, parameters->count), *first = list_entries(parameters, first_count);
    struct difference *all = calloc((size_t)shoal_comm_size(comm), sizeof *all);
    enum shoal_status status = fusion_ranks_have_memory(comm, options, own && first && all, text, text_bytes);
    if (status == SHOAL_OK)
        status = shoal_broadcast(comm, first, first, first_count * sizeof *first, SHOAL_UINT8, 0, options);
    if (status == SHOAL_OK) {
        const struct difference difference = find_difference(first, first_count, own, parameters->count, rank);
        status = gather_differences(comm, options, &difference, all, text, text_bytes);
    }
    free(own);
    free(first);
    free(all);
    return status;
}

/* ---- Values that differ -------------------------------------------------------------------------------------------------- */

int fusion_most_common(const void *items, size_t bytes, int count)
{
    const char *all = items;
    int best = 0, best_votes = 0;
    for (int i = 0; i < count && best_votes * 2 <= count; i++) {
        int votes = 0;
        for (int k = 0; k < count; k++)
            votes += memcmp(all + (size_t)k * bytes, all + (size_t)i * bytes, bytes) == 0;
        best = votes > best_votes ? i : best;
        best_votes = votes > best_votes ? votes : best_votes;
    }
    return best;
}

void fusion_list_others(const uint64_t *values, int count, char *text, size_t text_bytes)
{
    const uint64_t common = values[fusion_most_common(values, sizeof *values, count)];
    int listed = 0, others = 0;
    size_t length = 0;
    for (int r = 0; r < count; r++)
        others += values[r] != common;
    for (int r = 0; r < count && listed < 8 && length < text_bytes; r++) {
        if (values[r] == common)
            continue;
        const int written = snprintf(text + length, text_bytes - length, "%s %d",
                                     listed       ? ","
                                     : others > 1 ? "ranks"
                                                  : "rank",
                                     r);
        length += written > 0 ? (size_t)written : 0;
        listed++;
    }
    if (length < text_bytes)
        snprintf(text + length, text_bytes - length, "%s from most",
                 others > listed ? " and more differ"
                 : others > 1    ? " differ"
                                 : " differs");
}
