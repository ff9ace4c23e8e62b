#include "transport/fabric/fabric_staging.h"

#include <stdlib.h>

bool shoal_fabric_staging_init(struct shoal_fabric_staging *staging, size_t bytes)
{
    *staging = (struct shoal_fabric_staging){.bytes = bytes, .memory = aligned_alloc(SHOAL_PAGE, bytes)};
    return staging->memory;
}

void shoal_fabric_staging_fini(struct shoal_fabric_staging *staging)
{
    free(staging->memory);
    staging->memory = NULL;
}

/* The first position from `end` on behind which so much follows before the memory ends. */
static uint64_t find_row(const struct shoal_fabric_staging *staging, size_t room)
{
    const size_t left = staging->bytes - staging->end % staging->bytes;
    return room <= left ? staging->end : staging->end + left;
}

char *shoal_fabric_staging_take(struct shoal_fabric_staging *staging, size_t bytes, uint64_t *number_out)
{
    const size_t room = shoal_round_up(shoal_max_size(bytes, 1), SHOAL_CACHE_LINE);
    const bool is_empty = staging->first == staging->next;
    const uint64_t begin = find_row(staging, room);
    const uint64_t oldest = is_empty ? begin : staging->begins[staging->first % SHOAL_FABRIC_STAGED_MAX];
    if (staging->next - staging->first == SHOAL_FABRIC_STAGED_MAX || begin + room - oldest > staging->bytes)
        return NULL;
    staging->begins[staging->next % SHOAL_FABRIC_STAGED_MAX] = begin;
    staging->is_back[staging->next % SHOAL_FABRIC_STAGED_MAX] = false;
    staging->end = begin + room;
    *number_out = staging->next++;
    return staging->memory + begin % staging->bytes;
}

void shoal_fabric_staging_give_back(struct shoal_fabric_staging *staging, uint64_t number)
{
    staging->is_back[number % SHOAL_FABRIC_STAGED_MAX] = true;
    while (staging->first != staging->next && staging->is_back[staging->first % SHOAL_FABRIC_STAGED_MAX])
        staging->first++;
}
