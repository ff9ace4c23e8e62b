#include "base/timed_call.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

struct call {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    void (*work)(void *data);
    bool is_done, is_given_up; /* who comes second frees it */
    _Alignas(64) unsigned char data[];
};

static void timed_call_destroy(struct call *call)
{
    pthread_cond_destroy(&call->ended);
    pthread_mutex_destroy(&call->lock);
    free(call);
}

static void *thread_main(void *arg)
{
    struct call *call = arg;
    call->work(call->data);
    pthread_mutex_lock(&call->lock);
    const bool is_given_up = call->is_given_up;
    call->is_done = true;
    pthread_cond_signal(&call->ended);
    pthread_mutex_unlock(&call->lock);
    if (is_given_up)
        timed_call_destroy(call);
    return NULL;
}

static struct call *timed_call_make(void (*work)(void *data), const void *data, size_t bytes)
{
    pthread_condattr_t attributes;
    struct call *call = aligned_alloc(64, shoal_round_up(sizeof *call + bytes, 64));
    if (!call)
        return NULL;
    memset(call, 0, sizeof *call);
    call->work = work;
    memcpy(call->data, data, bytes);
    pthread_mutex_init(&call->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&call->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    return call;
}

/* The program's signals are for its own threads. */
static bool timed_call_start(struct call *call)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool has_started = pthread_create(&thread, NULL, thread_main, call) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (has_started)
        pthread_detach(thread);
    return has_started;
}

/* Whether it was done in time. */
static bool timed_call_await(struct call *call, uint64_t deadline_ns)
{
    const struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / SHOAL_NS_PER_S),
                                      .tv_nsec = (long)(deadline_ns % SHOAL_NS_PER_S)};
    int error = 0;
    pthread_mutex_lock(&call->lock);
    while (!call->is_done && error == 0)
        error = pthread_cond_timedwait(&call->ended, &call->lock, &deadline);
    const bool is_done = call->is_done;
    call->is_given_up = !is_done;
    pthread_mutex_unlock(&call->lock);
    return is_done;
}

enum shoal_status shoal_timed_call(void (*work)(void *data), void *data, size_t bytes, uint32_t timeout_ms)
{
    const uint64_t deadline_ns = shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS;
    struct call *call = timed_call_make(work, data, bytes);
    if (!call)
        return SHOAL_ERR_MEMORY;
    if (!timed_call_start(call)) {
        timed_call_destroy(call);
        return SHOAL_ERR_MEMORY;
    }
    if (!timed_call_await(call, deadline_ns))
        return SHOAL_ERR_TIMEOUT;
    memcpy(data, call->data, bytes);
    timed_call_destroy(call);
    return SHOAL_OK;
}
