/* How two endpoints of a host connect while strangers connect to the socket of one of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "quiet_log.h"
#include "transport/shm/shm_link.h"

#define RANKS 2
#define STRANGERS_MAX 100
/* Each silent stranger once made the others wait for a second. */
#define DEADLINE_NS (20 * SHOAL_NS_PER_S)

struct side {
    struct shoal_bootstrap bootstrap;
    struct shoal_shm_link_meeting meeting;
    struct shoal_segment *doorbell;
    enum shoal_status status;
};

static void open_side(struct side *side, int rank)
{
    const unsigned char id[SHOAL_SHM_LINK_ID_BYTES] = {(unsigned char)(rank + 1)};
    *side = (struct side){.bootstrap = {.rank = rank, .size = RANKS}};
    assert_int_equal(shoal_segment_create(&quiet, "shoal-test", SHOAL_PAGE, &side->doorbell), SHOAL_OK);
    assert_int_equal(shoal_shm_link_meeting_init(&side->meeting, &quiet, &side->bootstrap, id, side->doorbell, ""), SHOAL_OK);
    side->meeting.deadline_ns = shoal_clock_ns() + DEADLINE_NS;
}

static void close_side(struct side *side)
{
    shoal_shm_link_meeting_fini(&side->meeting);
    shoal_segment_put(side->doorbell);
}

static void exchange_blobs(struct side *sides)
{
    for (int r = 0; r < RANKS; r++) {
        for (int other = 0; other < RANKS; other++)
            sides[r].meeting.blobs[other] = sides[other].meeting.blobs[other];
        sides[r].meeting.is_wanted[1 - r] = true;
    }
}

static void *meet(void *arg)
{
    struct side *side = arg;
    side->status = shoal_shm_link_meet(&side->meeting);
    return NULL;
}

static int call_as_stranger(const struct side *side)
{
    struct sockaddr_un address;
    socklen_t length = sizeof address;
    const int caller = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(caller >= 0);
    assert_int_equal(getsockname(side->meeting.listener, (struct sockaddr *)&address, &length), 0);
    assert_int_equal(connect(caller, (struct sockaddr *)&address, length), 0);
    return caller;
}

/* The strangers are ahead of rank 1 in the queue of rank 0. Each sends word, or nothing if it is NULL. */
static void meet_beside_strangers(int strangers, const char *word)
{
    struct side sides[RANKS];
    pthread_t threads[RANKS];
    int callers[STRANGERS_MAX];
    for (int r = 0; r < RANKS; r++)
        open_side(&sides[r], r);
    exchange_blobs(sides);
    for (int i = 0; i < strangers; i++) {
        callers[i] = call_as_stranger(&sides[0]);
        assert_true(!word || send(callers[i], word, strlen(word), MSG_NOSIGNAL) > 0);
    }
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, meet, &sides[r]), 0);
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(pthread_join(threads[r], NULL), 0);
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(sides[r].status, SHOAL_OK);
        assert_true(sides[r].meeting.contacts[1 - r].socket >= 0);
        assert_true(sides[r].meeting.contacts[1 - r].is_same_process);
        shoal_segment_put((struct shoal_segment *)(uintptr_t)sides[r].meeting.contacts[1 - r].doorbell_pointer);
    }
    for (int i = 0; i < strangers; i++)
        close(callers[i]);
    for (int r = 0; r < RANKS; r++)
        close_side(&sides[r]);
}

static void link_is_not_held_up_by_silent_strangers(void **state)
{
    (void)state;
    meet_beside_strangers(30, NULL);
}

static void link_is_not_held_up_by_more_strangers_than_it_listens_to(void **state)
{
    (void)state;
    meet_beside_strangers(STRANGERS_MAX, NULL);
}

static void link_ignores_garbage(void **state)
{
    (void)state;
    meet_beside_strangers(STRANGERS_MAX, "GET / HTTP/1.1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(link_is_not_held_up_by_silent_strangers),
        cmocka_unit_test(link_is_not_held_up_by_more_strangers_than_it_listens_to),
        cmocka_unit_test(link_ignores_garbage),
    };
    return cmocka_run_group_tests(tests, open_log, close_log);
}
