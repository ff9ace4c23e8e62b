/* The order of the candidates for a first cause, and which rank decides between them at what time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "alloc_limit.h"
#include "base/clock.h"
#include "comm/settings.h"
#include "membership/causes.h"
#include "membership/membership.h"

#define COMM 77

static struct shoal_failure failure(enum shoal_status status, uint64_t sequence, int rank, int reporter)
{
    return (struct shoal_failure){.struct_bytes = sizeof(struct shoal_failure),
                                  .status = status,
                                  .sequence = sequence,
                                  .rank = rank,
                                  .reporter = reporter};
}

/* Each cause precedes all after it. */
static void causes_are_in_a_total_order(void **state)
{
    const struct shoal_failure ordered[] = {
        failure(SHOAL_ERR_MEMORY, 0, 5, 5),    failure(SHOAL_ERR_MISMATCH, 7, 3, 0),  failure(SHOAL_ERR_MISMATCH, 7, 3, 1),
        failure(SHOAL_ERR_PEER_LOST, 6, 2, 9), failure(SHOAL_ERR_PEER_LOST, 7, 4, 1), failure(SHOAL_ERR_ABORTED, 0, 1, 1),
        failure(SHOAL_ERR_TIMEOUT, 6, 1, 3),   failure(SHOAL_ERR_TIMEOUT, 6, 1, 4),   failure(SHOAL_ERR_TIMEOUT, 6, -1, 0),
        failure(SHOAL_ERR_TIMEOUT, 7, 1, 0),
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(ordered); i++) {
        for (size_t j = 0; j < SHOAL_COUNT_OF(ordered); j++)
            assert_int_equal(shoal_cause_is_before(&ordered[i], &ordered[j]), i < j);
    }
}

/* All ranks keep the same candidate, in whatever order candidates come. */
static void the_best_candidate_is_kept(void **state)
{
    const struct shoal_failure candidates[] = {failure(SHOAL_ERR_TIMEOUT, 5, 1, 0), failure(SHOAL_ERR_TIMEOUT, 5, 2, 1),
                                               failure(SHOAL_ERR_PEER_LOST, 6, 3, 2)};
    (void)state;
    for (int first = 0; first < 3; first++) {
        struct shoal_causes causes = {0};
        bool is_news;
        for (int i = 0; i < 3; i++)
            assert_non_null(shoal_causes_propose(&causes, COMM, &candidates[(first + i) % 3], false, 1, &is_news));
        assert_int_equal(shoal_causes_find(&causes, COMM)->best.status, SHOAL_ERR_PEER_LOST);
        assert_null(shoal_causes_find(&causes, COMM + 1));
        shoal_causes_fini(&causes);
    }
}

static void a_decision_is_final(void **state)
{
    const struct shoal_failure late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 0), lost = failure(SHOAL_ERR_PEER_LOST, 5, 1, 0);
    struct shoal_causes causes = {0};
    bool is_news = true;
    (void)state;
    assert_non_null(shoal_causes_decide(&causes, COMM, &late));
    assert_null(shoal_causes_decide(&causes, COMM, &lost));
    assert_non_null(shoal_causes_propose(&causes, COMM, &lost, true, 1, &is_news));
    assert_false(is_news);
    assert_int_equal(shoal_causes_find(&causes, COMM)->best.status, SHOAL_ERR_TIMEOUT);
    shoal_causes_fini(&causes);
}

/* The root comes first; without one, the rank that proposed the best candidate; then everybody. */
static void somebody_decides_in_time(void **state)
{
    const struct shoal_failure late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 3), better = failure(SHOAL_ERR_TIMEOUT, 5, 1, 2);
    const uint64_t start_ns = SHOAL_NS_PER_S, ms = SHOAL_NS_PER_MS;
    struct shoal_causes causes = {0};
    struct shoal_failure aborted;
    bool is_news;
    (void)state;
    shoal_cause_fill_abort(&aborted, 0, "here");
    struct shoal_cause *cause = shoal_causes_propose(&causes, COMM, &late, true, start_ns, &is_news);
    assert_int_equal(shoal_cause_due_ns(&causes, cause, true, 0), start_ns + SHOAL_CAUSES_COLLECT_MS * ms);
    assert_int_equal(shoal_cause_due_ns(&causes, cause, false, 0), start_ns + SHOAL_CAUSES_SETTLE_MS * ms);
    shoal_causes_propose(&causes, COMM, &better, false, start_ns + 5, &is_news);
    assert_int_equal(shoal_cause_due_ns(&causes, cause, false, 0), start_ns + SHOAL_CAUSES_ALONE_MS * ms);
    shoal_causes_propose(&causes, COMM, &aborted, false, start_ns + 6, &is_news);
    assert_int_equal(shoal_cause_due_ns(&causes, cause, true, 0), start_ns);
    assert_int_equal(shoal_cause_due_ns(&causes, cause, true, 2 * start_ns), 2 * start_ns + SHOAL_CAUSES_HEIR_MS * ms);
    shoal_causes_fini(&causes);
}

/* A machine that stood still while its ranks waited for the root: it has sent its decision meanwhile, or will. */
static void time_that_stood_still_is_no_waiting(void **state)
{
    const struct shoal_failure late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 3);
    const uint64_t start_ns = SHOAL_NS_PER_S, ms = SHOAL_NS_PER_MS, now_ns = start_ns + 4000 * ms;
    struct shoal_causes causes = {0};
    bool is_news;
    (void)state;
    struct shoal_cause *early = shoal_causes_propose(&causes, COMM, &late, true, start_ns, &is_news);
    struct shoal_cause *recent = shoal_causes_propose(&causes, COMM + 1, &late, true, now_ns - 10 * ms, &is_news);
    struct shoal_cause *newer = shoal_causes_propose(&causes, COMM + 2, &late, true, now_ns + ms, &is_news);
    shoal_causes_excuse(&causes, 3000 * ms, now_ns);
    assert_int_equal(shoal_cause_due_ns(&causes, early, false, 0), now_ns - 1000 * ms + SHOAL_CAUSES_SETTLE_MS * ms);
    assert_int_equal(shoal_cause_due_ns(&causes, recent, false, 0), now_ns + SHOAL_CAUSES_SETTLE_MS * ms);
    assert_int_equal(shoal_cause_due_ns(&causes, newer, false, 0), now_ns + ms + SHOAL_CAUSES_SETTLE_MS * ms);
    shoal_causes_fini(&causes);
}

/* Hosts that find several causes at once are waited for once, not once for each communicator. */
static void a_process_is_blamed_again_at_once(void **state)
{
    const uint64_t start_ns = SHOAL_NS_PER_S, ms = SHOAL_NS_PER_MS;
    struct shoal_failure lost = failure(SHOAL_ERR_PEER_LOST, 5, 1, 3), other = lost, late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 3);
    struct shoal_causes causes = {0};
    bool is_news;
    (void)state;
    lost.pid = late.pid = 17;
    other.pid = 18;
    const struct shoal_cause *first = shoal_causes_propose(&causes, COMM, &lost, true, start_ns, &is_news);
    const struct shoal_cause *again = shoal_causes_propose(&causes, COMM + 1, &lost, true, start_ns, &is_news);
    assert_int_equal(shoal_cause_due_ns(&causes, first, true, 0), start_ns + SHOAL_CAUSES_COLLECT_MS * ms);
    assert_int_equal(shoal_cause_due_ns(&causes, again, true, 0), start_ns + SHOAL_CAUSES_COLLECT_MS * ms);
    assert_non_null(shoal_causes_decide(&causes, COMM, &lost));
    assert_int_equal(shoal_cause_due_ns(&causes, again, true, 0), start_ns);
    assert_int_equal(shoal_cause_due_ns(&causes, again, false, 0), start_ns + SHOAL_CAUSES_SETTLE_MS * ms);
    const struct shoal_cause *another = shoal_causes_propose(&causes, COMM + 2, &other, true, start_ns, &is_news);
    const struct shoal_cause *timeout = shoal_causes_propose(&causes, COMM + 3, &late, true, start_ns, &is_news);
    assert_int_equal(shoal_cause_due_ns(&causes, another, true, 0), start_ns + SHOAL_CAUSES_COLLECT_MS * ms);
    assert_int_equal(shoal_cause_due_ns(&causes, timeout, true, 0), start_ns + SHOAL_CAUSES_COLLECT_MS * ms);
    shoal_causes_fini(&causes);
}

static void old_decisions_are_forgotten_and_open_ones_are_not(void **state)
{
    const struct shoal_failure late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 0);
    struct shoal_causes causes = {0};
    bool is_news;
    (void)state;
    assert_non_null(shoal_causes_propose(&causes, COMM, &late, true, 1, &is_news));
    for (uint64_t comm = 1000; comm < 1000 + 4 * SHOAL_CAUSES_KEPT; comm++)
        assert_non_null(shoal_causes_decide(&causes, comm, &late));
    assert_non_null(shoal_causes_find(&causes, COMM));
    assert_null(shoal_causes_find(&causes, 1000));
    assert_non_null(shoal_causes_find(&causes, 1000 + 4 * SHOAL_CAUSES_KEPT - 1));
    shoal_causes_fini(&causes);
}

static void note_wake(void *arg)
{
    ++*(int *)arg;
}

static void without_memory_nobody_waits_for_an_agreement(void **state)
{
    struct shoal_bootstrap bootstrap = {.size = 1, .launcher = "test"};
    struct shoal_settings settings;
    struct shoal_log log;
    struct shoal_failure told = {0};
    const struct shoal_failure late = failure(SHOAL_ERR_TIMEOUT, 5, 1, 3);
    struct shoal_cause_board board = {0};
    int wakes = 0;
    struct shoal_membership_comm member = {.comm = COMM, .host = "here", .board = &board, .arg = &wakes, .wake = note_wake};
    struct shoal_membership *world = NULL;
    char error[256];
    (void)state;
    shoal_log_init_quiet(&log);
    assert_int_equal(shoal_settings_load(&settings, NULL, error, sizeof error), SHOAL_OK);
    const struct shoal_membership_options options = {.log = &log, .ports = settings.bootstrap.ports, .timeout_ms = 1000};
    assert_int_equal(shoal_membership_open(&bootstrap, &options, &world), SHOAL_OK);
    shoal_membership_join(world, &member);
    const uint64_t start_ns = shoal_clock_ns();
    alloc_left = 0;
    shoal_membership_fail(&member, &late);
    alloc_left = LONG_MAX;
    assert_true(shoal_clock_ns() - start_ns < SHOAL_NS_PER_S);
    assert_true(shoal_membership_failed(&member, &told) && wakes > 0);
    assert_int_equal(told.status, SHOAL_ERR_TIMEOUT);
    shoal_membership_leave(world, &member);
    shoal_membership_close(world);
    shoal_log_fini(&log);
}

/* ---- The board of a host ---- */

#define WRITERS 4
#define ROUNDS 200

struct writer {
    struct shoal_cause_board *board;
    pthread_barrier_t *start;
    int number;
    struct shoal_failure read;
    bool has_read;
};

/* All write at the same moment; one writes as shoal_comm_abort would. */
static void *write_one(void *arg)
{
    struct writer *writer = arg;
    struct shoal_failure own = failure(SHOAL_ERR_TIMEOUT, (uint64_t)writer->number, writer->number, writer->number);
    memset(own.text, 'a' + writer->number, sizeof own.text - 1);
    pthread_barrier_wait(writer->start);
    if (writer->number == 0)
        shoal_cause_fill_abort(&own, 0, "here");
    shoal_cause_board_write(writer->board, &own);
    writer->has_read = shoal_cause_board_read(writer->board, &writer->read);
    return NULL;
}

static void one_writer_of_a_board_wins_and_all_read_its_cause(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        struct shoal_cause_board board = {0};
        struct shoal_failure first;
        struct writer writers[WRITERS];
        pthread_t threads[WRITERS];
        pthread_barrier_t start;
        assert_false(shoal_cause_board_is_written(&board) || shoal_cause_board_read(&board, &first));
        pthread_barrier_init(&start, NULL, WRITERS);
        for (int i = 0; i < WRITERS; i++) {
            writers[i] = (struct writer){.board = &board, .start = &start, .number = i};
            assert_int_equal(pthread_create(&threads[i], NULL, write_one, &writers[i]), 0);
        }
        for (int i = 0; i < WRITERS; i++)
            pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&start);
        assert_true(shoal_cause_board_is_written(&board) && shoal_cause_board_read(&board, &first));
        for (int i = 0; i < WRITERS; i++) {
            assert_true(!writers[i].has_read || writers[i].read.rank == first.rank);
            assert_true(!writers[i].has_read || strcmp(writers[i].read.text, first.text) == 0);
        }
        assert_true(first.rank == 0 ? first.status == SHOAL_ERR_ABORTED : first.text[0] == 'a' + first.rank);
        assert_true(first.rank == 0 || strlen(first.text) == sizeof first.text - 1);
    }
}

/* It leaves a draft that nobody reads. A writer that finds all drafts taken gives up after a while. */
static void a_rank_that_dies_while_it_writes_costs_no_cause(void **state)
{
    struct shoal_cause_board board = {0};
    struct shoal_failure told = {0};
    const struct shoal_failure lost = failure(SHOAL_ERR_PEER_LOST, 5, 1, 3);
    (void)state;
    atomic_store(&board.drafts[0].is_taken, 1);
    assert_false(shoal_cause_board_is_written(&board) || shoal_cause_board_read(&board, &told));
    assert_true(shoal_cause_board_is_drafted(&board));
    shoal_cause_board_write(&board, &lost);
    assert_true(shoal_cause_board_is_written(&board) && shoal_cause_board_read(&board, &told));
    assert_true(told.status == SHOAL_ERR_PEER_LOST && told.reporter == 3);
    shoal_cause_fill_abort(&told, 2, "here");
    shoal_cause_board_write(&board, &told);
    assert_true(shoal_cause_board_read(&board, &told) && told.status == SHOAL_ERR_PEER_LOST);
    board = (struct shoal_cause_board){0};
    for (int i = 0; i < SHOAL_CAUSE_DRAFTS; i++)
        atomic_store(&board.drafts[i].is_taken, 1);
    shoal_cause_board_write(&board, &lost);
    assert_false(shoal_cause_board_read(&board, &told));
}

/* Without the printf family, as a signal handler may write it. */
static void an_abort_is_worded_for_any_rank(void **state)
{
    static const int ranks[] = {0, 9, 10, 409, 4095, 2147483647};
    char host[256], wanted[64];
    (void)state;
    memset(host, 'h', sizeof host - 1);
    host[sizeof host - 1] = 0;
    for (size_t i = 0; i < SHOAL_COUNT_OF(ranks); i++) {
        struct shoal_failure told;
        memset(&told, 0xAA, sizeof told);
        shoal_cause_fill_abort(&told, ranks[i], i % 2 ? host : "node-7");
        snprintf(wanted, sizeof wanted, "rank %d called shoal_comm_abort", ranks[i]);
        assert_string_equal(told.text, wanted);
        assert_true(told.rank == ranks[i] && told.reporter == ranks[i] && told.step == -1 && told.pid == (int)getpid());
        assert_int_equal(strlen(told.host), i % 2 ? sizeof told.host - 1 : strlen("node-7"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(causes_are_in_a_total_order),
        cmocka_unit_test(the_best_candidate_is_kept),
        cmocka_unit_test(a_decision_is_final),
        cmocka_unit_test(somebody_decides_in_time),
        cmocka_unit_test(time_that_stood_still_is_no_waiting),
        cmocka_unit_test(without_memory_nobody_waits_for_an_agreement),
        cmocka_unit_test(a_process_is_blamed_again_at_once),
        cmocka_unit_test(old_decisions_are_forgotten_and_open_ones_are_not),
        cmocka_unit_test(a_rank_that_dies_while_it_writes_costs_no_cause),
        cmocka_unit_test(one_writer_of_a_board_wins_and_all_read_its_cause),
        cmocka_unit_test(an_abort_is_worded_for_any_rank),
    };
    return cmocka_run_group_tests_name("causes", tests, NULL, NULL);
}
