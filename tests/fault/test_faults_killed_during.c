/* SIGKILL at random moments of all-reduces of 64 MiB, several rounds of each kind. */
#include "fault_matrix.h"

#define ROUNDS 4

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"killed_during_2_ranks_plain", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 2, 1, false, false, ROUNDS)},
        {"killed_during_2_ranks_plain_posted_rank_0", fault_play,
         FAULT_SCENE(FAULT_KILL, FAULT_DURING, 2, 0, false, true, ROUNDS)},
        {"killed_during_2_ranks_shared_rank_0", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 2, 0, true, false, ROUNDS)},
        {"killed_during_2_ranks_shared_posted", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 2, 1, true, true, ROUNDS)},
        {"killed_during_4_ranks_plain_rank_0", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 4, 0, false, false, ROUNDS)},
        {"killed_during_4_ranks_plain_posted", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 4, 2, false, true, ROUNDS)},
        {"killed_during_4_ranks_shared", fault_play, FAULT_SCENE(FAULT_KILL, FAULT_DURING, 4, 3, true, false, ROUNDS)},
        {"killed_during_4_ranks_shared_posted_rank_0", fault_play,
         FAULT_SCENE(FAULT_KILL, FAULT_DURING, 4, 0, true, true, ROUNDS)},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
