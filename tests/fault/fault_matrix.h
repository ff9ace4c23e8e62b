/* The matrix of faults: one rank, the victim, does something at some moment, while the others make one call again and again
 * until it fails. The parent then looks whether each of them was told what happened, by whom, and soon enough; each rank, that
 * its memory is left alone once it has freed the communicator. */
#ifndef SHOAL_TESTS_FAULT_MATRIX_H
#define SHOAL_TESTS_FAULT_MATRIX_H

#include "fault_calls.h"

enum fault_how { FAULT_KILL, FAULT_EXIT, FAULT_FREE, FAULT_ABORT, FAULT_STOP, FAULT_ABSENT };

/* DURING: while a large call runs, after a random time. */
enum fault_when { FAULT_BEFORE, FAULT_BETWEEN, FAULT_DURING };

struct fault_scene {
    enum fault_how how;
    enum fault_when when;
    int size;
    int victim;
    bool is_shared; /* memory */
    bool is_posted; /* several requests at once instead of blocking calls */
    int rounds;
    const struct fault_call *call; /* NULL: all-reduce */
    bool is_apart;                 /* not in place */
    size_t large;         /* elements of the larger operand, DURING; 0: 16 Mi, 4 Mi posted, 1 Mi where a deadline ends it */
    unsigned within_ms;   /* DURING: when, at most; 0: 150 */
    unsigned deadline_ms; /* of stalled victims; 0: FAULT_DEADLINE_MS. A fifth of it passes before the warning */
};

/* One of an all-reduce in place. */
#define FAULT_SCENE(how_, when_, size_, victim_, is_shared_, is_posted_, rounds_)                        \
    &(const struct fault_scene)                                                                          \
    {                                                                                                    \
        .how = (how_), .when = (when_), .size = (size_), .victim = (victim_), .is_shared = (is_shared_), \
        .is_posted = (is_posted_), .rounds = (rounds_)                                                   \
    }

#define FAULT_EXIT_CODE 3
#define FAULT_DEADLINE_MS 1500

/* A case: plays the scene and checks everything. */
void fault_play(struct fault_test *test);

#endif
