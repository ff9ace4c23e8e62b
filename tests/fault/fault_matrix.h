/* The matrix of faults: one rank, the victim, does something at some moment, while the others call all-reduce until it fails.
 * The parent then looks whether each of them was told what happened, by whom, and soon enough. */
#ifndef SHOAL_TESTS_FAULT_MATRIX_H
#define SHOAL_TESTS_FAULT_MATRIX_H

#include "fault_harness.h"

enum fault_how { FAULT_KILL, FAULT_EXIT, FAULT_FREE, FAULT_STOP, FAULT_ABSENT };

/* DURING: while a large all-reduce runs, after a random time. */
enum fault_when { FAULT_BEFORE, FAULT_BETWEEN, FAULT_DURING };

struct fault_scene {
    enum fault_how how;
    enum fault_when when;
    int size;
    int victim;
    bool is_shared; /* memory */
    bool is_posted; /* several requests at once instead of blocking calls */
    int rounds;
};

#define FAULT_EXIT_CODE 3
#define FAULT_WARN_MS 500
#define FAULT_DEADLINE_MS 1500

/* A case: plays the scene and checks everything. */
void fault_play(struct fault_test *test);

#endif
