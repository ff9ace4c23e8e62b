#include "transport/fabric/fabric_bounce.h"

#include <stdlib.h>

#include "base/assert.h"

bool shoal_fabric_bounce_init(struct shoal_fabric_bounce *bounce, size_t bytes)
{
    *bounce = (struct shoal_fabric_bounce){.bytes = bytes, .memory = aligned_alloc(SHOAL_PAGE, bytes)};
    return bounce->memory;
}

void shoal_fabric_bounce_fini(struct shoal_fabric_bounce *bounce)
{
    free(bounce->memory);
    bounce->memory = NULL;
}

/* Returns the first position from `end` on that is followed by `room` bytes before the memory ends. */
static uint64_t find_row(const struct shoal_fabric_bounce *bounce, size_t room)
{
    const size_t left = bounce->bytes - bounce->end % bounce->bytes;
    SHOAL_ASSERT(left % SHOAL_CACHE_LINE == bounce->bytes % SHOAL_CACHE_LINE); /* buffers begin at cache lines */
    return room <= left ? bounce->end : bounce->end + left;
}

char *shoal_fabric_bounce_take(struct shoal_fabric_bounce *bounce, size_t bytes, uint64_t *number_out)
{
    SHOAL_ASSERT(bytes <= bounce->bytes);
    const size_t room = shoal_round_up(shoal_max_size(bytes, 1), SHOAL_CACHE_LINE);
    const bool is_empty = bounce->first == bounce->next;
    const uint64_t begin = find_row(bounce, room);
    const uint64_t oldest = is_empty ? begin : bounce->begins[bounce->first % SHOAL_FABRIC_BOUNCED_MAX];
    if (bounce->next - bounce->first == SHOAL_FABRIC_BOUNCED_MAX || begin + room - oldest > bounce->bytes)
        return NULL;
    SHOAL_ASSERT(bounce->next - bounce->first < SHOAL_FABRIC_BOUNCED_MAX);
    bounce->begins[bounce->next % SHOAL_FABRIC_BOUNCED_MAX] = begin;
    bounce->is_back[bounce->next % SHOAL_FABRIC_BOUNCED_MAX] = false;
    bounce->end = begin + room;
    *number_out = bounce->next++;
    return bounce->memory + begin % bounce->bytes;
}

void shoal_fabric_bounce_give_back(struct shoal_fabric_bounce *bounce, uint64_t number)
{
    SHOAL_ASSERT(number - bounce->first < bounce->next - bounce->first); /* it was taken */
    SHOAL_ASSERT(!bounce->is_back[number % SHOAL_FABRIC_BOUNCED_MAX]);   /* and is given back only once */
    bounce->is_back[number % SHOAL_FABRIC_BOUNCED_MAX] = true;
    while (bounce->first != bounce->next && bounce->is_back[bounce->first % SHOAL_FABRIC_BOUNCED_MAX])
        bounce->first++;
}
