/* The progress of one epoch on stdout: on a terminal a bar that is redrawn in place, elsewhere a line every 5 s. Shows images
 * per second and the mean loss since the epoch began. Rank 0 only; one thread. */
#ifndef PROGRESS_BAR_H
#define PROGRESS_BAR_H

#include <stdbool.h>
#include <stdint.h>

struct progress_bar {
    bool on_terminal;
    int epoch; /* counted from 1 */
    int epochs;
    uint32_t images;
    uint32_t done;
    double loss_sum; /* each step's loss times its images */
    double begun_s;
    double stepped_s;
    double drawn_s;
};

/* Returns seconds of a monotonic clock. */
double clock_seconds(void);

void progress_bar_init(struct progress_bar *bar, int epoch, int epochs, uint32_t images);
void progress_bar_step(struct progress_bar *bar, uint32_t images, float loss);

/* Clears the bar and prints the epoch's result. */
void progress_bar_finish(struct progress_bar *bar, double accuracy_percent);

#endif
