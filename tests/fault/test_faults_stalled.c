/* Ranks that are stopped or never call: a warning names them, and then the failure at the deadline. */
#include "fault_matrix.h"

int main(int argc, char **argv)
{
    const struct fault_case cases[] = {
        {"stopped_before_2_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_BEFORE, 2, 0, false, false, 0)},
        {"stopped_before_4_ranks", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_BEFORE, 4, 2, true, true, 0)},
        {"stopped_between_3_ranks", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_BETWEEN, 3, 1, false, true, 0)},
        {"stopped_during_2_ranks_plain", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_DURING, 2, 1, false, false, 2)},
        {"stopped_during_4_ranks_plain_rank_0", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_DURING, 4, 0, false, false, 2)},
        {"stopped_during_4_ranks_shared_posted", fault_play, FAULT_SCENE(FAULT_STOP, FAULT_DURING, 4, 1, true, true, 2)},
        {"absent_before_2_ranks", fault_play, FAULT_SCENE(FAULT_ABSENT, FAULT_BEFORE, 2, 1, false, false, 0)},
        {"absent_between_4_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_ABSENT, FAULT_BETWEEN, 4, 0, true, false, 0)},
        {"absent_during_2_ranks_rank_0", fault_play, FAULT_SCENE(FAULT_ABSENT, FAULT_DURING, 2, 0, true, true, 0)},
        {"absent_during_4_ranks", fault_play, FAULT_SCENE(FAULT_ABSENT, FAULT_DURING, 4, 3, false, true, 0)},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
