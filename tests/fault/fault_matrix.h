/* The matrix of faults: at some moment one rank, the victim, causes a fault, while the others repeat one call until it fails.
 * Then the parent checks whether each of them learned what happened, who caused it, and soon enough. Each rank checks that its
 * memory does not change after it has freed the communicator. */
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
    size_t large;         /* elements of the larger operand, DURING; 0: 16 Mi, 4 Mi posted, 1 Mi if a deadline ends it */
    unsigned within_ms;   /* DURING: the latest time of the fault; 0: 150 */
    unsigned deadline_ms; /* of stalled victims; 0: FAULT_DEADLINE_MS. The warning comes after a fifth of it */
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
