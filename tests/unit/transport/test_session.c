/* SipHash against its paper, and the messages that sessions of the data plane accept: each once, whole, from one sender. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "transport/fabric/session.h"

#define ROOM (sizeof(struct shoal_seal) + 16500)

static const struct shoal_siphash_key job = {{0x0123456789abcdef, 0xfedcba9876543210}};

/* Two processes, and each one's session for the other. */
struct pair {
    struct shoal_session ours, theirs;
    unsigned char message[ROOM];
};

static struct shoal_session_side side_of(uint32_t rank)
{
    return (struct shoal_session_side){.nonce = {(unsigned char)(7 * rank), 3}, .rank = rank};
}

static void open_pair(struct pair *pair)
{
    const struct shoal_session_side own = side_of(0), peer = side_of(1);
    shoal_session_open(&pair->ours, &job, &own, &peer);
    shoal_session_open(&pair->theirs, &job, &peer, &own);
    for (size_t i = 0; i < ROOM; i++)
        pair->message[i] = (unsigned char)(i * 31 + i / 256);
}

/* ---- SipHash ---- */

/* Appendix A of the paper, and rows 0, 1, 8 and 63 of the authors' vectors. */
static void siphash_is_that_of_the_paper(void **state)
{
    static const struct {
        size_t bytes;
        uint64_t hash;
    } rows[] = {{15, 0xa129ca6149be45e5},
                {0, 0x726fdb47dd0e0e31},
                {1, 0x74f839c593dc67fd},
                {8, 0x93f5f5799a932462},
                {63, 0x958a324ceb064572}};
    unsigned char key[16], message[64];
    (void)state;
    for (unsigned i = 0; i < 64; i++)
        message[i] = (unsigned char)i;
    memcpy(key, message, sizeof key);
    const struct shoal_siphash_key read = shoal_siphash_key_read(key);
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++)
        assert_true(shoal_siphash(&read, message, rows[i].bytes) == rows[i].hash);
}

/* ---- Sessions ---- */

static const size_t lengths[] = {0,   1,    48,   72,   111,  112,  113,  127,  128,  200,  272,   976,
                                 999, 1000, 1001, 1007, 1008, 1024, 2024, 2032, 2033, 8264, 16400, 16500};

static void message_is_good_once(void **state)
{
    static struct pair pair;
    (void)state;
    open_pair(&pair);
    for (size_t i = 0; i < SHOAL_COUNT_OF(lengths); i++) {
        const size_t bytes = sizeof(struct shoal_seal) + lengths[i];
        shoal_session_seal(&pair.ours, pair.message, bytes);
        assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes), SHOAL_SESSION_GOOD);
        assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes), SHOAL_SESSION_REPLAYED);
    }
}

/* Any changed bit, in the seal or elsewhere, and any shorter or longer message, is a forgery. */
static void changed_message_is_forged(void **state)
{
    static struct pair pair;
    (void)state;
    open_pair(&pair);
    for (size_t i = 0; i < SHOAL_COUNT_OF(lengths); i++) {
        const size_t bytes = sizeof(struct shoal_seal) + lengths[i];
        shoal_session_seal(&pair.ours, pair.message, bytes);
        for (size_t at = 0; at < bytes; at += at < 100 ? 1 : 37) {
            pair.message[at] ^= (unsigned char)(1u << at % 8);
            assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes), SHOAL_SESSION_FORGED);
            pair.message[at] ^= (unsigned char)(1u << at % 8);
        }
        for (size_t cut = 1; cut <= bytes; cut += cut < 40 ? 1 : 211)
            assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes - cut), SHOAL_SESSION_FORGED);
        if (bytes < ROOM)
            assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes + 1), SHOAL_SESSION_FORGED);
        assert_int_equal(shoal_session_check(&pair.theirs, pair.message, bytes), SHOAL_SESSION_GOOD);
    }
}

static void expect_other(struct pair *pair, const struct shoal_siphash_key *key, struct shoal_session_side own,
                         struct shoal_session_side peer)
{
    struct shoal_session other;
    shoal_session_open(&other, key, &own, &peer);
    assert_true(other.to.session != pair->ours.to.session);
    pair->message[0] = 1;
    for (size_t bytes = 100; bytes < 4000; bytes += 1500) {
        shoal_session_seal(&other, pair->message, bytes);
        assert_int_equal(shoal_session_check(&pair->theirs, pair->message, bytes), SHOAL_SESSION_FORGED);
    }
}

/* The session of another job, another run of the same job, another sender, another receiver, the other direction. */
static void message_of_another_session_is_forged(void **state)
{
    static struct pair pair;
    struct shoal_session_side later = side_of(0);
    (void)state;
    open_pair(&pair);
    later.nonce[15] ^= 1;
    expect_other(&pair, &(struct shoal_siphash_key){{job.words[0], job.words[1] ^ 1}}, side_of(0), side_of(1));
    expect_other(&pair, &job, later, side_of(1));
    expect_other(&pair, &job, side_of(0), (struct shoal_session_side){.rank = 1});
    expect_other(&pair, &job, side_of(2), side_of(1));
    expect_other(&pair, &job, side_of(0), side_of(2));
    expect_other(&pair, &job, side_of(1), side_of(0));
}

#define MESSAGES 5000
#define SMALL (sizeof(struct shoal_seal) + 8)

static void shuffle(unsigned *order, unsigned count, unsigned span)
{
    unsigned random = 1;
    for (unsigned i = 0; i < count; i++)
        order[i] = i;
    for (unsigned i = 0; i + span < count; i++) {
        const unsigned other = i + (unsigned)rand_r(&random) % span, kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
}

/* Each message is accepted once and never again, in any order within the window. */
static void messages_may_overtake_each_other(void **state)
{
    static struct pair pair;
    static unsigned char messages[MESSAGES][SMALL];
    static unsigned order[MESSAGES];
    (void)state;
    open_pair(&pair);
    for (unsigned i = 0; i < MESSAGES; i++)
        shoal_session_seal(&pair.ours, messages[i], SMALL);
    shuffle(order, MESSAGES, 60);
    for (unsigned i = 0; i < MESSAGES; i++) {
        assert_int_equal(shoal_session_check(&pair.theirs, messages[order[i]], SMALL), SHOAL_SESSION_GOOD);
        for (unsigned j = i < 1200 ? 0 : i - 1200; j <= i; j += 97)
            assert_int_equal(shoal_session_check(&pair.theirs, messages[order[j]], SMALL), SHOAL_SESSION_REPLAYED);
    }
}

/* The window's edges, and a step that is wider than the window. */
static void window_tells_old_from_new(void **state)
{
    static struct pair pair;
    static unsigned char messages[2 * SHOAL_SESSION_WINDOW + 2][SMALL];
    (void)state;
    open_pair(&pair);
    for (unsigned i = 0; i < SHOAL_COUNT_OF(messages); i++)
        shoal_session_seal(&pair.ours, messages[i], SMALL);
    assert_int_equal(shoal_session_check(&pair.theirs, messages[SHOAL_SESSION_WINDOW], SMALL), SHOAL_SESSION_GOOD);
    assert_int_equal(shoal_session_check(&pair.theirs, messages[0], SMALL), SHOAL_SESSION_REPLAYED); /* as far as the window
                                                                                                      * can tell */
    assert_int_equal(shoal_session_check(&pair.theirs, messages[1], SMALL), SHOAL_SESSION_GOOD);
    assert_int_equal(shoal_session_check(&pair.theirs, messages[2 * SHOAL_SESSION_WINDOW + 1], SMALL), SHOAL_SESSION_GOOD);
    for (unsigned i = 0; i < SHOAL_SESSION_WINDOW + 2; i++)
        assert_int_equal(shoal_session_check(&pair.theirs, messages[i], SMALL), SHOAL_SESSION_REPLAYED);
    for (unsigned i = SHOAL_SESSION_WINDOW + 2; i < 2 * SHOAL_SESSION_WINDOW + 1; i++)
        assert_int_equal(shoal_session_check(&pair.theirs, messages[i], SMALL), SHOAL_SESSION_GOOD);
}

/* ---- Cost ---- */

/* Prints the number for docs/decisions/0014, without an assertion. */
static void print_cost(void)
{
    static struct pair pair;
    open_pair(&pair);
    for (size_t i = 2; i < SHOAL_COUNT_OF(lengths); i++) {
        const size_t bytes = sizeof(struct shoal_seal) + lengths[i];
        uint64_t best_ns = UINT64_MAX;
        for (int round = 0; round < 300; round++) {
            const uint64_t begun_ns = shoal_clock_ns();
            for (int k = 0; k < 100; k++)
                shoal_session_seal(&pair.ours, pair.message, bytes);
            const uint64_t took_ns = (shoal_clock_ns() - begun_ns) / 100;
            best_ns = took_ns < best_ns ? took_ns : best_ns;
        }
        printf("%zu bytes: %llu ns\n", lengths[i], (unsigned long long)best_ns);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(siphash_is_that_of_the_paper),     cmocka_unit_test(message_is_good_once),
        cmocka_unit_test(changed_message_is_forged),        cmocka_unit_test(message_of_another_session_is_forged),
        cmocka_unit_test(messages_may_overtake_each_other), cmocka_unit_test(window_tells_old_from_new),
    };
    if (argc > 1 && strcmp(argv[1], "cost") == 0) {
        print_cost();
        return 0;
    }
    return cmocka_run_group_tests_name("session", tests, NULL, NULL);
}
