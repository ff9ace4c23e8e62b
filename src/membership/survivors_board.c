#include "membership/survivors_board.h"

void shoal_survivors_board_put(struct shoal_survivors_board *board, int size, const struct shoal_survivors_message *message)
{
    uint64_t words[SHOAL_SURVIVORS_BYTES_MAX / sizeof(uint64_t)] = {0};
    struct shoal_survivors_note *note = &board->notes[message->kind - 1];
    const size_t bytes = shoal_survivors_write(message, size, (unsigned char *)words);
    const uint64_t version = atomic_load_explicit(&note->version, memory_order_relaxed);
    atomic_store_explicit(&note->version, version + 1, memory_order_relaxed);
    /* A reader that sees one of the words below sees an odd version after it; pairs with the fence in get. */
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&note->bytes, bytes, memory_order_relaxed);
    for (size_t i = 0; i * sizeof words[0] < bytes; i++)
        atomic_store_explicit(&note->words[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&note->version, version + 2, memory_order_release); /* pairs with the first load in get */
}

bool shoal_survivors_board_get(const struct shoal_survivors_board *board, enum shoal_survivors_kind kind, int size,
                               uint64_t *version, struct shoal_survivors_message *message_out)
{
    uint64_t words[SHOAL_SURVIVORS_BYTES_MAX / sizeof(uint64_t)];
    const struct shoal_survivors_note *note = &board->notes[kind - 1];
    const uint64_t before = atomic_load_explicit(&note->version, memory_order_acquire);
    if (before == *version || before % 2)
        return false;
    const uint64_t bytes = atomic_load_explicit(&note->bytes, memory_order_relaxed);
    for (size_t i = 0; i < SHOAL_COUNT_OF(words); i++)
        words[i] = atomic_load_explicit(&note->words[i], memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire); /* the words come before the second look */
    if (atomic_load_explicit(&note->version, memory_order_relaxed) != before)
        return false;
    *version = before;
    return bytes <= sizeof words && shoal_survivors_read((const unsigned char *)words, bytes, size, message_out) &&
           message_out->kind == kind;
}
