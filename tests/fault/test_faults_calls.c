/* Every call that ranks make together, with every fault: each survivor names the rank that is lost, leaves, aborts, is stopped
 * or stays away. Sizes, memory, places and victims alternate. */
#include "fault_matrix.h"

/* Other tests cover the all-reduce. */
#define FIRST FAULT_REDUCE

static const char *const faults[] = {
    [FAULT_KILL] = "killed",   [FAULT_EXIT] = "exited",  [FAULT_FREE] = "freed",
    [FAULT_ABORT] = "aborted", [FAULT_STOP] = "stopped", [FAULT_ABSENT] = "absent",
};

static const struct mode {
    const char *name;
    enum fault_when when;
    bool is_shared, is_in_place, is_posted;
} modes[] = {
    {"small_before", FAULT_BEFORE, true, false, false},           {"large_plain", FAULT_DURING, false, false, true},
    {"small_between_in_place", FAULT_BETWEEN, false, true, true}, {"large_shared", FAULT_DURING, true, false, false},
    {"large_shared_in_place", FAULT_DURING, true, true, true},
};

#define LARGE ((size_t)1 << 20)
#define TRIED ((size_t)(FAULT_CALLS - FIRST))
#define ROWS (TRIED * FAULT_COUNT_OF(faults))

/* Each call and each fault meets each mode. */
static struct fault_scene compose(size_t call, size_t fault)
{
    const struct mode *mode = &modes[(call + fault) % FAULT_COUNT_OF(modes)];
    const int size = 2 + (int)(call + fault / 2) % 3;
    return (struct fault_scene){.how = (enum fault_how)fault,
                                .when = mode->when,
                                .size = size,
                                .victim = (int)(call / 2 + fault) % size,
                                .is_shared = mode->is_shared,
                                .is_posted = mode->is_posted,
                                .call = &fault_calls[FIRST + call],
                                .is_apart = !mode->is_in_place,
                                .large = LARGE,
                                .within_ms = 15,
                                .deadline_ms = 1500};
}

int main(int argc, char **argv)
{
    static struct fault_scene scenes[ROWS];
    static char names[ROWS][96];
    struct fault_case cases[ROWS];
    for (size_t i = 0; i < ROWS; i++) {
        const size_t call = i % TRIED, fault = i / TRIED;
        scenes[i] = compose(call, fault);
        snprintf(names[i], sizeof names[i], "%s_%s_%s_%d_ranks_rank_%d", faults[fault], fault_calls[FIRST + call].name,
                 modes[(call + fault) % FAULT_COUNT_OF(modes)].name, scenes[i].size, scenes[i].victim);
        cases[i] = (struct fault_case){names[i], fault_play, &scenes[i]};
    }
    return fault_main(argc, argv, cases, ROWS);
}
