/* Bounce buffers: buffers are inside the memory and do not overlap, all of the memory can be used, and returned buffers can be
 * used again, in any order of return. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "transport/fabric/fabric_bounce.h"

#define BYTES ((size_t)64 << 10)

/* Buffers in use, each filled with its own byte. */
struct buffer {
    uint64_t number;
    unsigned char *at;
    size_t bytes;
    unsigned char content;
};

static int open_bounce(void **state)
{
    static struct shoal_fabric_bounce bounce;
    *state = &bounce;
    return shoal_fabric_bounce_init(&bounce, BYTES) ? 0 : -1;
}

static int close_bounce(void **state)
{
    shoal_fabric_bounce_fini(*state);
    return 0;
}

static bool take(struct shoal_fabric_bounce *bounce, size_t bytes, struct buffer *buffer)
{
    static unsigned char last;
    *buffer = (struct buffer){.bytes = bytes, .content = ++last};
    buffer->at = (unsigned char *)shoal_fabric_bounce_take(bounce, bytes, &buffer->number);
    if (!buffer->at)
        return false;
    assert_true((char *)buffer->at >= bounce->memory && (char *)buffer->at + bytes <= bounce->memory + BYTES);
    memset(buffer->at, buffer->content, bytes);
    return true;
}

static void give_back(struct shoal_fabric_bounce *bounce, const struct buffer *buffer)
{
    for (size_t i = 0; i < buffer->bytes; i++)
        assert_int_equal(buffer->at[i], buffer->content);
    shoal_fabric_bounce_give_back(bounce, buffer->number);
}

static void bounce_gives_all_of_it_and_no_more(void **state)
{
    struct buffer whole, more;
    for (int round = 0; round < 3; round++) {
        assert_true(take(*state, BYTES, &whole));
        assert_false(take(*state, 0, &more));
        give_back(*state, &whole);
        assert_true(take(*state, 100, &whole)); /* so that the next whole buffer begins at another offset */
        assert_false(take(*state, BYTES, &more));
        give_back(*state, &whole);
    }
}

static void bounce_counts_buffers_of_no_bytes(void **state)
{
    struct buffer buffers[SHOAL_FABRIC_BOUNCED_MAX], more;
    for (int i = 0; i < SHOAL_FABRIC_BOUNCED_MAX; i++)
        assert_true(take(*state, 0, &buffers[i]));
    assert_false(take(*state, 0, &more));
    give_back(*state, &buffers[1]);
    assert_false(take(*state, 0, &more)); /* the oldest is still in use */
    give_back(*state, &buffers[0]);
    assert_true(take(*state, 0, &buffers[0]) && take(*state, 0, &buffers[1]));
    assert_false(take(*state, 0, &more));
    for (int i = 0; i < SHOAL_FABRIC_BOUNCED_MAX; i++)
        give_back(*state, &buffers[i]);
}

static void bounce_keeps_buffers_apart(void **state)
{
    struct buffer buffers[20];
    unsigned out = 0, refused = 0;
    uint32_t random = 1;
    for (int turn = 0; turn < 100000; turn++) {
        random = random * 1664525 + 1013904223;
        const unsigned which = (random >> 8) % SHOAL_COUNT_OF(buffers);
        if (which < out) {
            give_back(*state, &buffers[which]);
            buffers[which] = buffers[--out];
        } else if (take(*state, (random >> 16) % (BYTES / 8), &buffers[out])) {
            out++;
        } else {
            refused++;
        }
    }
    assert_in_range(refused, 1000, 90000);
    while (out > 0)
        give_back(*state, &buffers[--out]);
    assert_true(take(*state, BYTES, &buffers[0]));
    give_back(*state, &buffers[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounce_gives_all_of_it_and_no_more),
        cmocka_unit_test(bounce_counts_buffers_of_no_bytes),
        cmocka_unit_test(bounce_keeps_buffers_apart),
    };
    return cmocka_run_group_tests_name("fabric_bounce", tests, open_bounce, close_bounce);
}
