/* The only memory that ranks lend each other is a ring of a device, with its card at the beginning of the same segment
 * (operand/device_memory.c). */
#include "operand/lent.h"

#include "device/device_ring.h"

struct shoal_lent_card shoal_lent_card_of(shoal_location first)
{
    return (struct shoal_lent_card){.at = shoal_location_of(shoal_location_segment(first), 0),
                                    .bytes = sizeof(struct shoal_device_card)};
}

char *shoal_lent_address(const struct shoal_lent *lent, int part, size_t at, size_t *run)
{
    const struct shoal_device_lent in_ring = {.card = lent->card,
                                              .is_inward = lent->operand == SHOAL_INPUT,
                                              .first = lent->first,
                                              .most_parts = lent->most_parts,
                                              .element_bytes = lent->element_bytes};
    return shoal_device_lent_address(&in_ring, part, at, run);
}
