/* Reports on stderr what `shoal sim` is doing during a long prediction: on a terminal in one line that is updated each second
 * and erased in the end, elsewhere as a line after half a minute and then each minute. A separate thread prints it, because the
 * prediction is one call of the library. Only the main thread calls start and stop. */
#ifndef SHOAL_TOOLS_SIM_PROGRESS_H
#define SHOAL_TOOLS_SIM_PROGRESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct sim_progress {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool is_started, must_stop, is_drawn;
    char text[128]; /* "64 hosts, 1 GiB (row 3 of 8)" */
};

/* If no thread can be created, the prediction runs without reports. */
void sim_progress_start(struct sim_progress *progress, const char *text);
void sim_progress_stop(struct sim_progress *progress);

#endif
