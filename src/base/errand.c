#include "base/errand.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

struct errand {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    void (*work)(void *data);
    bool is_done, is_given_up; /* who comes second frees it */
    _Alignas(64) unsigned char data[];
};

static void destroy(struct errand *errand)
{
    pthread_cond_destroy(&errand->ended);
    pthread_mutex_destroy(&errand->lock);
    free(errand);
}

static void *thread_main(void *arg)
{
    struct errand *errand = arg;
    errand->work(errand->data);
    pthread_mutex_lock(&errand->lock);
    const bool is_given_up = errand->is_given_up;
    errand->is_done = true;
    pthread_cond_signal(&errand->ended);
    pthread_mutex_unlock(&errand->lock);
    if (is_given_up)
        destroy(errand);
    return NULL;
}

static struct errand *make(void (*work)(void *data), const void *data, size_t bytes)
{
    pthread_condattr_t attributes;
    struct errand *errand = aligned_alloc(64, shoal_round_up(sizeof *errand + bytes, 64));
    if (!errand)
        return NULL;
    memset(errand, 0, sizeof *errand);
    errand->work = work;
    memcpy(errand->data, data, bytes);
    pthread_mutex_init(&errand->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&errand->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    return errand;
}

/* The program's signals are for its own threads. */
static bool start(struct errand *errand)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool has_started = pthread_create(&thread, NULL, thread_main, errand) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (has_started)
        pthread_detach(thread);
    return has_started;
}

/* Whether it was done in time. */
static bool await(struct errand *errand, uint64_t deadline_ns)
{
    const struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / SHOAL_NS_PER_S),
                                      .tv_nsec = (long)(deadline_ns % SHOAL_NS_PER_S)};
    int error = 0;
    pthread_mutex_lock(&errand->lock);
    while (!errand->is_done && error == 0)
        error = pthread_cond_timedwait(&errand->ended, &errand->lock, &deadline);
    const bool is_done = errand->is_done;
    errand->is_given_up = !is_done;
    pthread_mutex_unlock(&errand->lock);
    return is_done;
}

enum shoal_status shoal_errand_run(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct errand *errand = make(work, data, bytes);
    if (!errand)
        return SHOAL_ERR_MEMORY;
    if (!start(errand)) {
        destroy(errand);
        return SHOAL_ERR_MEMORY;
    }
    if (!await(errand, deadline_ns))
        return SHOAL_ERR_TIMEOUT;
    memcpy(data, errand->data, bytes);
    destroy(errand);
    return SHOAL_OK;
}
