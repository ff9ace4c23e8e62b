/* Room for sources: pieces lie in the memory, apart from each other, all of it can be had, and what was given back, in whatever
 * order, can be had again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "transport/fabric/fabric_staging.h"

#define BYTES ((size_t)64 << 10)

/* Pieces that are out, each full of its own byte. */
struct piece {
    uint64_t number;
    unsigned char *at;
    size_t bytes;
    unsigned char content;
};

static int open_staging(void **state)
{
    static struct shoal_fabric_staging staging;
    *state = &staging;
    return shoal_fabric_staging_init(&staging, BYTES) ? 0 : -1;
}

static int close_staging(void **state)
{
    shoal_fabric_staging_fini(*state);
    return 0;
}

static bool take(struct shoal_fabric_staging *staging, size_t bytes, struct piece *piece)
{
    static unsigned char last;
    *piece = (struct piece){.bytes = bytes, .content = ++last};
    piece->at = (unsigned char *)shoal_fabric_staging_take(staging, bytes, &piece->number);
    if (!piece->at)
        return false;
    assert_true((char *)piece->at >= staging->memory && (char *)piece->at + bytes <= staging->memory + BYTES);
    memset(piece->at, piece->content, bytes);
    return true;
}

static void give_back(struct shoal_fabric_staging *staging, const struct piece *piece)
{
    for (size_t i = 0; i < piece->bytes; i++)
        assert_int_equal(piece->at[i], piece->content);
    shoal_fabric_staging_give_back(staging, piece->number);
}

static void staging_gives_all_of_it_and_no_more(void **state)
{
    struct piece whole, more;
    for (int round = 0; round < 3; round++) {
        assert_true(take(*state, BYTES, &whole));
        assert_false(take(*state, 0, &more));
        give_back(*state, &whole);
        assert_true(take(*state, 100, &whole)); /* so that the next whole begins elsewhere */
        assert_false(take(*state, BYTES, &more));
        give_back(*state, &whole);
    }
}

static void staging_counts_pieces_of_no_bytes(void **state)
{
    struct piece pieces[SHOAL_FABRIC_STAGED_MAX], more;
    for (int i = 0; i < SHOAL_FABRIC_STAGED_MAX; i++)
        assert_true(take(*state, 0, &pieces[i]));
    assert_false(take(*state, 0, &more));
    give_back(*state, &pieces[1]);
    assert_false(take(*state, 0, &more)); /* the oldest is still out */
    give_back(*state, &pieces[0]);
    assert_true(take(*state, 0, &pieces[0]) && take(*state, 0, &pieces[1]));
    assert_false(take(*state, 0, &more));
    for (int i = 0; i < SHOAL_FABRIC_STAGED_MAX; i++)
        give_back(*state, &pieces[i]);
}

static void staging_keeps_pieces_apart(void **state)
{
    struct piece pieces[20];
    unsigned out = 0, refused = 0;
    uint32_t random = 1;
    for (int turn = 0; turn < 100000; turn++) {
        random = random * 1664525 + 1013904223;
        const unsigned which = (random >> 8) % SHOAL_COUNT_OF(pieces);
        if (which < out) {
            give_back(*state, &pieces[which]);
            pieces[which] = pieces[--out];
        } else if (take(*state, (random >> 16) % (BYTES / 8), &pieces[out])) {
            out++;
        } else {
            refused++;
        }
    }
    assert_in_range(refused, 1000, 90000);
    while (out > 0)
        give_back(*state, &pieces[--out]);
    assert_true(take(*state, BYTES, &pieces[0]));
    give_back(*state, &pieces[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(staging_gives_all_of_it_and_no_more),
        cmocka_unit_test(staging_counts_pieces_of_no_bytes),
        cmocka_unit_test(staging_keeps_pieces_apart),
    };
    return cmocka_run_group_tests_name("fabric_staging", tests, open_staging, close_staging);
}
