/* How survivors tell each other where they stand, where all ranks of a world are on one host: a board for each rank in shared
 * memory. Its owner keeps the last message of each kind on it, and all others read. A rank that dies while it writes leaves a
 * message that nobody reads. Any thread. */
#ifndef SHOAL_MEMBERSHIP_SURVIVORS_BOARD_H
#define SHOAL_MEMBERSHIP_SURVIVORS_BOARD_H

#include <stdatomic.h>

#include "membership/survivors.h"

#define SHOAL_SURVIVORS_BOARD_KINDS (SHOAL_SURVIVORS_KIND_END - 1)

struct shoal_survivors_note {
    _Atomic uint64_t version; /* odd while it is written; 0: nothing was */
    _Atomic uint64_t world;
    _Atomic uint64_t bytes;
    _Atomic uint64_t words[SHOAL_SURVIVORS_BYTES_MAX / sizeof(uint64_t)];
};
_Static_assert(SHOAL_SURVIVORS_BYTES_MAX % sizeof(uint64_t) == 0, "a message is whole words");

/* New memory is zero: an empty board. A process may belong to several worlds: each message names its own, and the
 * last one of each kind stays. Where two worlds agree at once, what one of them loses by that is written again. */
struct shoal_survivors_board {
    _Atomic uint64_t left_world; /* the last one that its owner has left */
    struct shoal_survivors_note notes[SHOAL_SURVIVORS_BOARD_KINDS];
};
#define SHOAL_SURVIVORS_BOARD_BYTES (2 * (size_t)SHOAL_PAGE)
_Static_assert(sizeof(struct shoal_survivors_board) <= SHOAL_SURVIVORS_BOARD_BYTES, "a board is two pages");

void shoal_survivors_board_put(struct shoal_survivors_board *board, uint64_t world, int size,
                               const struct shoal_survivors_message *message);

/* A message of that kind and world that is newer than *version, which follows. False: there is none now. */
bool shoal_survivors_board_get(const struct shoal_survivors_board *board, enum shoal_survivors_kind kind, uint64_t world,
                               int size, uint64_t *version, struct shoal_survivors_message *message_out);

#endif
