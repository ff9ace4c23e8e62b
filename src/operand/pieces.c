#include "operand/pieces.h"

#include "base/assert.h"

size_t shoal_call_count_pieces(const struct shoal_call *call)
{
    return 2 * (shoal_call_has_tensors(call) ? call->arrays->tensor_count : 1);
}

static bool has_operand(const struct shoal_call *call, int rank, enum shoal_block_operand operand)
{
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    if (shoal_call_has_peer(call->collective))
        return (operand == SHOAL_INPUT) == (call->collective == SHOAL_COLLECTIVE_SEND);
    return operand == SHOAL_INPUT ? shoal_shape_contributes(shape, rank, call->root)
                                  : shoal_shape_receives(shape, rank, call->root);
}

struct shoal_call_piece shoal_call_piece(const struct shoal_call *call, int rank, int size, size_t index)
{
    struct shoal_call_piece piece = {.operand = index % 2 == 0 ? SHOAL_INPUT : SHOAL_OUTPUT, .tensor = index / 2};
    const size_t element_bytes = shoal_type_bytes(call->type);
    const struct shoal_tensor whole = {call->input, call->output, 0};
    const struct shoal_tensor *tensor = shoal_call_has_tensors(call) ? &call->arrays->tensors[piece.tensor] : &whole;
    SHOAL_ASSERT(index < shoal_call_count_pieces(call));
    if (!has_operand(call, rank, piece.operand))
        return piece;
    const size_t parts = shoal_call_is_partitioned(call, piece.operand) ? (size_t)size : 1;
    piece.bytes = tensor == &whole ? shoal_call_bytes(call, piece.operand, rank, size, element_bytes, rank)
                                   : parts * tensor->count * element_bytes;
    if (piece.bytes)
        piece.at = piece.operand == SHOAL_INPUT ? tensor->input : tensor->output;
    return piece;
}
