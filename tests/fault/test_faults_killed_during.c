/* SIGKILL at random moments of a 64 MiB all-reduce, several rounds of each kind. */
#include "fault_matrix.h"

#define SCENE(...)              \
    &(const struct fault_scene) \
    {                           \
        __VA_ARGS__             \
    }
#define ROUNDS 4

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"killed_during_2_ranks_plain", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 2, 1, false, false, ROUNDS)},
        {"killed_during_2_ranks_plain_posted_rank_0", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 2, 0, false, true, ROUNDS)},
        {"killed_during_2_ranks_shared_rank_0", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 2, 0, true, false, ROUNDS)},
        {"killed_during_2_ranks_shared_posted", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 2, 1, true, true, ROUNDS)},
        {"killed_during_4_ranks_plain_rank_0", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 4, 0, false, false, ROUNDS)},
        {"killed_during_4_ranks_plain_posted", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 4, 2, false, true, ROUNDS)},
        {"killed_during_4_ranks_shared", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 4, 3, true, false, ROUNDS)},
        {"killed_during_4_ranks_shared_posted_rank_0", fault_play, SCENE(FAULT_KILL, FAULT_DURING, 4, 0, true, true, ROUNDS)},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
