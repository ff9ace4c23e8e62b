/* An error on this worker, and how all workers learn of it. A function that fails writes one line that names the cause and what
 * to do; fault_agree then makes every worker stop together, and exactly one of them print its line. Not for failures of Shoal
 * itself: those have been logged and reach every worker on their own. Main thread only. */
#ifndef TRAIN_FAULT_H
#define TRAIN_FAULT_H

#include <shoal/shoal.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct fault {
    int exit_code; /* 0: nothing has failed */
    char text[768];
};

/* Keeps the line unless an earlier one is there, and returns -1, so that callers write `return fault_set(...)`. */
int fault_set(struct fault *fault, int exit_code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* A collective call. Returns 0 when no worker has failed. Otherwise the failed worker of the lowest rank prints its line, and
 * every worker returns its exit code. When Shoal itself fails: EXIT_FAILED, without a line. */
int fault_agree(const struct fault *fault, struct shoal_comm *comm);

#endif
