#include "sim_progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* On a terminal the first line appears after a second, so that short questions do not flicker. */
enum { TERMINAL_S = 1, FIRST_S = 30, NEXT_S = 60 };

static void draw(struct sim_progress *progress, bool is_terminal, unsigned long seconds)
{
    if (is_terminal)
        fprintf(stderr, "\r\033[Kshoal sim: %s, %lu s so far", progress->text, seconds);
    else
        fprintf(stderr, "shoal sim: %s, %lu s so far\n", progress->text, seconds);
    fflush(stderr);
    progress->is_drawn = is_terminal;
}

/* Needs the lock. Returns true if it must stop. */
static bool sleep_until(struct sim_progress *progress, const struct timespec *begin, unsigned long seconds)
{
    const struct timespec until = {begin->tv_sec + (time_t)seconds, begin->tv_nsec};
    while (!progress->must_stop && pthread_cond_timedwait(&progress->wake, &progress->lock, &until) == 0)
        continue;
    return progress->must_stop;
}

static void *run(void *arg)
{
    struct sim_progress *progress = arg;
    const bool is_terminal = isatty(STDERR_FILENO);
    unsigned long seconds = is_terminal ? TERMINAL_S : FIRST_S;
    struct timespec begin;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    pthread_mutex_lock(&progress->lock);
    while (!sleep_until(progress, &begin, seconds)) {
        draw(progress, is_terminal, seconds);
        seconds += is_terminal ? TERMINAL_S : seconds < NEXT_S ? NEXT_S - seconds : NEXT_S;
    }
    pthread_mutex_unlock(&progress->lock);
    return NULL;
}

void sim_progress_start(struct sim_progress *progress, const char *text)
{
    pthread_condattr_t attributes;
    *progress = (struct sim_progress){0};
    snprintf(progress->text, sizeof progress->text, "%s", text);
    pthread_mutex_init(&progress->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&progress->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    progress->is_started = pthread_create(&progress->thread, NULL, run, progress) == 0;
}

void sim_progress_stop(struct sim_progress *progress)
{
    pthread_mutex_lock(&progress->lock);
    progress->must_stop = true;
    pthread_cond_signal(&progress->wake);
    pthread_mutex_unlock(&progress->lock);
    if (progress->is_started)
        pthread_join(progress->thread, NULL);
    if (progress->is_drawn)
        fputs("\r\033[K", stderr);
    pthread_cond_destroy(&progress->wake);
    pthread_mutex_destroy(&progress->lock);
}
