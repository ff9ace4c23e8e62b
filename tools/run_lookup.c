#include "run_lookup.h"

#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct run_lookup {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool is_done, is_given_up; /* who comes second frees it */
    struct run_addresses addresses;
    char name[];
};

static void lookup_destroy(struct run_lookup *lookup)
{
    pthread_cond_destroy(&lookup->ended);
    pthread_mutex_destroy(&lookup->lock);
    free(lookup);
}

static void lookup_ask(const char *name, struct run_addresses *addresses)
{
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    const int error = getaddrinfo(name, NULL, &wanted, &found);
    addresses->reason = error == EAI_SYSTEM ? strerrordesc_np(errno) : error ? gai_strerror(error) : "it has no address";
    for (const struct addrinfo *one = error ? NULL : found; one && addresses->count < RUN_ADDRESSES_MAX; one = one->ai_next) {
        if (one->ai_family != AF_INET && one->ai_family != AF_INET6)
            continue;
        struct run_address *address = &addresses->at[addresses->count++];
        memcpy(&address->socket, one->ai_addr, one->ai_addrlen);
        address->bytes = one->ai_addrlen;
    }
    if (!error)
        freeaddrinfo(found);
}

static void *lookup_main(void *arg)
{
    struct run_lookup *lookup = arg;
    struct run_addresses addresses = {.count = 0};
    lookup_ask(lookup->name, &addresses);
    pthread_mutex_lock(&lookup->lock);
    lookup->addresses = addresses;
    lookup->is_done = true;
    const bool is_given_up = lookup->is_given_up;
    pthread_cond_signal(&lookup->ended);
    pthread_mutex_unlock(&lookup->lock);
    if (is_given_up)
        lookup_destroy(lookup);
    return NULL;
}

/* Signals are for the thread that takes them for the command. */
static bool thread_start(struct run_lookup *lookup)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&thread, NULL, lookup_main, lookup);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_detach(thread);
    return !error;
}

struct run_lookup *run_lookup_begin(const char *name)
{
    const size_t bytes = strlen(name) + 1;
    struct run_lookup *lookup = calloc(1, sizeof *lookup + bytes);
    pthread_condattr_t clock;
    if (!lookup)
        return NULL;
    memcpy(lookup->name, name, bytes);
    pthread_mutex_init(&lookup->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&lookup->ended, &clock);
    pthread_condattr_destroy(&clock);
    if (thread_start(lookup))
        return lookup;
    lookup_destroy(lookup);
    return NULL;
}

bool run_lookup_wait(struct run_lookup *lookup, unsigned ms, struct run_addresses *addresses_out)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += (time_t)(ms / 1000) + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lookup->lock);
    while (!lookup->is_done && pthread_cond_timedwait(&lookup->ended, &lookup->lock, &until) == 0)
        continue;
    const bool is_done = lookup->is_done;
    if (is_done)
        *addresses_out = lookup->addresses;
    pthread_mutex_unlock(&lookup->lock);
    return is_done;
}

void run_lookup_close(struct run_lookup *lookup)
{
    if (!lookup)
        return;
    pthread_mutex_lock(&lookup->lock);
    lookup->is_given_up = true;
    const bool is_done = lookup->is_done;
    pthread_mutex_unlock(&lookup->lock);
    if (is_done)
        lookup_destroy(lookup);
}
