/* How the survivors of a communicator on one host pass messages: each rank has a board in shared memory. Its owner keeps its
 * last message of each kind there, and all others read them. A rank that dies while it writes leaves a message that nobody
 * reads. One thread writes a board; any thread reads it. */
#ifndef SHOAL_MEMBERSHIP_SURVIVORS_BOARD_H
#define SHOAL_MEMBERSHIP_SURVIVORS_BOARD_H

#include <stdatomic.h>

#include "membership/survivors.h"

#define SHOAL_SURVIVORS_BOARD_KINDS (SHOAL_SURVIVORS_KIND_END - 1)

struct shoal_survivors_note {
    _Atomic uint64_t version; /* odd while it is written; 0: nothing was */
    _Atomic uint64_t bytes;
    _Atomic uint64_t words[SHOAL_SURVIVORS_BYTES_MAX / sizeof(uint64_t)];
};
_Static_assert(SHOAL_SURVIVORS_BYTES_MAX % sizeof(uint64_t) == 0, "a message is whole words");

/* Zeroed memory is an empty board. */
struct shoal_survivors_board {
    struct shoal_survivors_note notes[SHOAL_SURVIVORS_BOARD_KINDS];
};

/* Puts a message of a communicator of `size` ranks on the board. */
void shoal_survivors_board_put(struct shoal_survivors_board *board, int size, const struct shoal_survivors_message *message);

/* Stores a message of that kind that is newer than *version, which it updates. Returns false if there is none now. */
bool shoal_survivors_board_get(const struct shoal_survivors_board *board, enum shoal_survivors_kind kind, int size,
                               uint64_t *version, struct shoal_survivors_message *message_out);

#endif
