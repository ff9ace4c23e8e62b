/* Which worker `shoal run` blames, from the lines that ranks log. Workers 0 to 3 are processes 10 to 13. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "../../../tools/run/run_blame.h"

enum { WORKERS = 4 };

static const pid_t pids[WORKERS] = {10, 11, 12, 13};

#define BROKEN(rank, pid) "shoal: rank " rank " (host:" pid ") [engine] communicator world is broken"

struct said {
    int worker;
    const char *line;
};

static int blamed(const struct said *said, size_t count, int first)
{
    struct run_blame blames[WORKERS] = {0};
    for (size_t i = 0; i < count; i++)
        run_blame_hear(&blames[said[i].worker], said[i].line, strlen(said[i].line));
    return run_blame_find(blames, pids, WORKERS, -1, first);
}

static void blame_of_a_peer_that_ended(void **state)
{
    (void)state;
    const struct said said[] = {{0, BROKEN("0", "10") ": rank 2 (process 12 on host) exited with code 0, before it had done"}};
    assert_int_equal(blamed(said, 1, 0), 2);
    assert_int_equal(blamed(said, 1, 1), 1); /* it has logged nothing: it is blamed for its own end */
}

static void blame_that_the_line_names_first(void **state)
{
    (void)state;
    const struct said said[] = {
        {0, BROKEN("0", "10") " by rank 3 (process 13): ranks called different operations: rank 1 (process 11 on host) called"},
        {3, BROKEN("3", "13") " by rank 3 (process 13): rank 0 waited 500 ms for this rank"}};
    assert_int_equal(blamed(said, 2, 0), 3);
    assert_int_equal(blamed(said, 2, 3), 3);
}

/* Rank 0 has noticed that rank 1 left, which left because of rank 2: a second communicator logs the earlier cause. */
static void blame_is_followed(void **state)
{
    (void)state;
    const struct said said[] = {
        {0, BROKEN("0", "10") ": rank 1 (process 11 on host) exited with code 1"},
        {1, "shoal: rank 1 (host:11) [engine] communicator world/1 is broken by rank 0 (process 12): ranks"}};
    assert_int_equal(blamed(said, 2, 0), 2);
}

static void blame_of_each_other_ends(void **state)
{
    (void)state;
    const struct said said[] = {{0, BROKEN("0", "10") ": rank 1 (process 11 on host) exited with code 1"},
                                {1, BROKEN("1", "11") ": rank 0 (process 10 on host) exited with code 1"}};
    assert_in_range(blamed(said, 2, 0), 0, 1);
}

static void blame_of_nobody(void **state)
{
    (void)state;
    const struct said said[] = {{1, BROKEN("1", "11") ": ranks called different operations as number 2"}};
    assert_int_equal(blamed(said, 1, 1), -1);
}

/* A rank may be a child of its worker: its own lines name its process. A rank that has logged nothing is unknown. */
static void blame_of_a_process_below_a_worker(void **state)
{
    (void)state;
    const struct said said[] = {{0, BROKEN("0", "100") ": rank 2 (process 102 on host) exited with code 1"},
                                {2, "shoal: rank 2 (host:102) [shm] no memory to keep a segment of process 100"}};
    assert_int_equal(blamed(said, 2, 0), 2);
    assert_int_equal(blamed(said, 1, 0), 0);
}

/* On several hosts, processes of other hosts may have the same ids as ours: the rank and the host decide. */
static void blame_of_another_host(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        int blamed;
    } cases[] = {
        {BROKEN("4", "10") ": rank 1 (process 11 on other) exited with code 1", RUN_BLAME_ELSEWHERE},
        {BROKEN("4", "10") ": rank 1 (process 11 on host) exited with code 1", RUN_BLAME_ELSEWHERE},
        {BROKEN("4", "10") " by rank 8 (process 11): ranks called different operations", RUN_BLAME_ELSEWHERE},
        {BROKEN("4", "10") " by rank 7 (process 13): ranks called different operations", 3},
        {BROKEN("4", "10") ": rank 5 (process 11 on host, alive) did not come", 1},
        {"shoal: rank 0 (host:10) [engine] communicator world/1 is broken: rank 1 (process 11 on other) ended",
         RUN_BLAME_ELSEWHERE},
        {"shoal: rank 0 (host:10) [engine] communicator world/1 is broken: rank 1 (process 11 on host) ended", 1},
        {"shoal: rank 4 (host:10) [engine] communicator torch.0 is broken: rank 1 (process 11 on host) ended",
         RUN_BLAME_ELSEWHERE},
        {"shoal: rank 4 (host:10) [engine] communicator torch.0 is broken: rank 5 (process 11 on host) ended", 1},
        {"shoal: rank 0 (host:10) [engine] communicator torch.01 is broken: rank 1 (process 11 on host) ended", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct run_blame blames[WORKERS] = {0};
        run_blame_hear(&blames[0], cases[i].line, strlen(cases[i].line));
        assert_int_equal(run_blame_find(blames, pids, WORKERS, 4, 0), cases[i].blamed);
    }
}

static void other_lines_change_nothing(void **state)
{
    (void)state;
    struct run_blame blame = {0};
    const struct run_blame untouched = {0};
    const char *const lines[] = {"",
                                 "shoal: rank ",
                                 "shoal: no rank",
                                 "my vase is broken: rank 1 (process 11",
                                 "shoal: rank x (h:1) y",
                                 "a shoal: rank 0 (host:10) [engine] communicator world is broken: rank 1 (process 11"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        run_blame_hear(&blame, lines[i], strlen(lines[i]));
    assert_memory_equal(&blame, &untouched, sizeof blame);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blame_of_a_peer_that_ended),
        cmocka_unit_test(blame_that_the_line_names_first),
        cmocka_unit_test(blame_is_followed),
        cmocka_unit_test(blame_of_each_other_ends),
        cmocka_unit_test(blame_of_nobody),
        cmocka_unit_test(blame_of_a_process_below_a_worker),
        cmocka_unit_test(blame_of_another_host),
        cmocka_unit_test(other_lines_change_nothing),
    };
    return cmocka_run_group_tests_name("blame", tests, NULL, NULL);
}
