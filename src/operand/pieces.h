/* The memory of which a call's operands consist, for a caller that must know where it is: an operand is one piece of memory,
 * or has a piece for each of several tensors. Any thread. */
#ifndef SHOAL_OPERAND_PIECES_H
#define SHOAL_OPERAND_PIECES_H

#include "operand/call.h"

struct shoal_call_piece {
    const char *at;
    size_t bytes; /* from there to the end of the memory that the rank may access */
    enum shoal_block_operand operand;
    size_t tensor;
};

/* Returns the number of pieces of both operands, including those that the rank does not have. */
size_t shoal_call_count_pieces(const struct shoal_call *call);
/* Returns a piece of a rank of `size`, as long as the call is not posted. `at` is NULL if the rank has no bytes of it. */
struct shoal_call_piece shoal_call_piece(const struct shoal_call *call, int rank, int size, size_t index);

#endif
