#include "progress_bar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define REDRAW_S 0.1
#define LINE_S 5.0 /* without a terminal, each drawing adds a line */

double clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void progress_bar_init(struct progress_bar *bar, int epoch, int epochs, uint32_t images)
{
    const double now_s = clock_seconds();
    *bar = (struct progress_bar){.on_terminal = isatty(STDOUT_FILENO) || getenv("SHOAL_RUN_TERMINAL"),
                                 .epoch = epoch,
                                 .epochs = epochs,
                                 .images = images,
                                 .begun_s = now_s,
                                 .drawn_s = now_s};
}

static void draw(const struct progress_bar *bar)
{
    static const char full[] = "####################";
    static const char empty[] = "--------------------";
    int filled = (int)((uint64_t)bar->done * 20 / bar->images);
    printf("%sepoch %2d/%d [%.*s%.*s] %3u %%  %7.0f images/s  loss %.4f%s", bar->on_terminal ? "\r" : "", bar->epoch,
           bar->epochs, filled, full, 20 - filled, empty, (unsigned)((uint64_t)bar->done * 100 / bar->images),
           bar->done / (bar->stepped_s - bar->begun_s), bar->loss_sum / bar->done, bar->on_terminal ? "\033[K" : "\n");
    fflush(stdout);
}

void progress_bar_step(struct progress_bar *bar, uint32_t images, float loss)
{
    bar->done += images;
    bar->loss_sum += (double)loss * images;
    bar->stepped_s = clock_seconds();
    if (bar->stepped_s - bar->drawn_s < (bar->on_terminal ? REDRAW_S : LINE_S))
        return;
    draw(bar);
    bar->drawn_s = bar->stepped_s;
}

void progress_bar_finish(struct progress_bar *bar, double accuracy_percent)
{
    double training_s = bar->stepped_s - bar->begun_s;
    printf("%sepoch %2d/%d  loss %.4f  test accuracy %.2f %%  %.0f images/s  %.1f s\n", bar->on_terminal ? "\r\033[K" : "",
           bar->epoch, bar->epochs, bar->loss_sum / bar->done, accuracy_percent, bar->done / training_s,
           clock_seconds() - bar->begun_s);
    fflush(stdout);
}
