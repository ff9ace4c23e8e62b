/* An error on this worker, and how all workers learn of it. A function that fails writes one line that names the cause and the
 * remedy. Then fault_agree makes every worker stop together, and exactly one of them print its line. Not for failures of Shoal
 * itself: Shoal logs those, and every worker sees them. Main thread only. */
#ifndef TRAIN_FAULT_H
#define TRAIN_FAULT_H

#include <shoal/shoal.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct fault {
    int exit_code; /* 0: nothing has failed */
    char text[768];
};

/* Keeps the line unless there is an earlier one, and returns -1, so that callers write `return fault_set(...)`. */
int fault_set(struct fault *fault, int exit_code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* A collective call. Returns 0 if no worker has failed. Otherwise the failed worker of the lowest rank prints its line, and
 * every worker returns that worker's exit code. If Shoal itself fails, returns EXIT_FAILED and prints nothing. */
int fault_agree(const struct fault *fault, struct shoal_comm *comm);

#endif
