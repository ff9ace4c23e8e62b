/* Threads of a program that mark the gradients of a step at once. Each of them may complete a buffer. */
#ifndef SHOAL_TESTS_MARKING_THREADS_H
#define SHOAL_TESTS_MARKING_THREADS_H

#include <pthread.h>

#include "multi_world.h"

#define MARKING_THREADS 3

typedef void (*mark_fn)(void *job, size_t parameter);

struct marking_thread {
    mark_fn mark;
    void *job;
    size_t first, parameters;
    pthread_t id;
};

static inline void *mark_some(void *arg)
{
    const struct marking_thread *thread = arg;
    for (size_t i = thread->first; i < thread->parameters; i += MARKING_THREADS)
        thread->mark(thread->job, i);
    return NULL;
}

/* Marks each parameter once, in several threads. Returns when all have ended. */
static inline void mark_in_threads(struct world *world, mark_fn mark, void *job, size_t parameters)
{
    struct marking_thread threads[MARKING_THREADS];
    for (size_t t = 0; t < MARKING_THREADS; t++) {
        threads[t] = (struct marking_thread){mark, job, t, parameters, 0};
        CHECK(world, pthread_create(&threads[t].id, NULL, mark_some, &threads[t]) == 0, "no thread");
    }
    for (size_t t = 0; t < MARKING_THREADS; t++)
        pthread_join(threads[t].id, NULL);
}

#endif
