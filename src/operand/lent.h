/* An operand that a peer of this host lends (plan/plan.h), as this process has mapped it. The peer's own object of the operand
 * returns where it begins (`lent_at`, operand/operand.h), and the peer announces that location. A card describes the memory
 * around it, from which a borrower computes the address of every element:
 *
 *   the peer's segment    | card |  ...  first element  ...  |
 *
 * The engine maps both, and asks for addresses while it borrows. It never looks into a card. */
#ifndef SHOAL_OPERAND_LENT_H
#define SHOAL_OPERAND_LENT_H

#include "memory/location.h"
#include "plan/collective_type.h"

/* The location of a peer's card. */
struct shoal_lent_card {
    shoal_location at;
    size_t bytes;
};
/* Returns the location of the card of the operand that begins at `first`. */
struct shoal_lent_card shoal_lent_card_of(shoal_location first);

/* A peer's operand. */
struct shoal_lent {
    const void *card;  /* mapped here, like `first`; constant while the peer lends */
    const char *first; /* its first element */
    enum shoal_block_operand operand;
    int most_parts; /* the number of parts of the call's input or output, whichever has more */
    size_t element_bytes;
};
/* Returns the address of element `at` of a part, in a range that the peer has lent. *run is reduced to the number of contiguous
 * elements from there. Any thread may call it. */
char *shoal_lent_address(const struct shoal_lent *lent, int part, size_t at, size_t *run);

#endif
