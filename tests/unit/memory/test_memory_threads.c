/* Several threads allocate, look up and free regions: each finds its own, and none is left over. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <string.h>

#include "memory/memory.h"
#include "quiet_log.h"

#define THREADS 4
#define TURNS 300
#define HELD 8 /* regions that a thread holds at once */

struct holder {
    pthread_t thread;
    struct shoal_memory *memory;
    unsigned char number;
    const char *wrong; /* the error; NULL: none */
    char *held[HELD];
    size_t bytes[HELD];
};

static pthread_mutex_t mutex;

static void lock_mutex(void *arg)
{
    pthread_mutex_lock(arg);
}

static void unlock_mutex(void *arg)
{
    pthread_mutex_unlock(arg);
}

static void note_wrong(struct holder *holder, bool is_right, const char *what)
{
    if (!is_right && !holder->wrong)
        holder->wrong = what;
}

static void look_up(struct holder *holder, size_t i)
{
    const char *at = holder->held[i] + holder->bytes[i] / 2;
    shoal_memory_lock(holder->memory);
    const struct shoal_region *region = shoal_memory_find(holder->memory, at, holder->bytes[i] - holder->bytes[i] / 2);
    note_wrong(holder, region && region->begin == holder->held[i] && region->bytes == holder->bytes[i], "found by address");
    note_wrong(holder, region && shoal_memory_at(holder->memory, shoal_region_locate(region, at)) == region, "found by number");
    shoal_memory_unlock(holder->memory);
    for (size_t byte = 0; byte < holder->bytes[i]; byte += 1000)
        note_wrong(holder, (unsigned char)holder->held[i][byte] == holder->number, "contents");
}

static void take(struct holder *holder, size_t i, size_t bytes)
{
    void *address;
    holder->bytes[i] = bytes;
    const enum shoal_status status = shoal_memory_alloc(holder->memory, bytes, &address);
    note_wrong(holder, status == SHOAL_OK, "allocated");
    holder->held[i] = status == SHOAL_OK ? address : NULL;
    if (holder->held[i])
        memset(holder->held[i], holder->number, bytes);
}

static void give_back(struct holder *holder, size_t i, bool may_keep)
{
    shoal_memory_lock(holder->memory);
    const enum shoal_status status =
        may_keep ? shoal_memory_keep(holder->memory, holder->held[i]) : shoal_memory_free(holder->memory, holder->held[i]);
    shoal_memory_unlock(holder->memory);
    note_wrong(holder, status == SHOAL_OK, "given back");
    holder->held[i] = NULL;
}

static void *hold(void *arg)
{
    struct holder *holder = arg;
    for (size_t turn = 0; turn < TURNS && !holder->wrong; turn++) {
        const size_t i = turn % HELD;
        if (holder->held[i])
            give_back(holder, i, turn % 3);
        take(holder, i, 1 + (turn * 7919 + holder->number * 104729u) % 60000);
        for (size_t j = 0; j < HELD && !holder->wrong; j++)
            if (holder->held[j])
                look_up(holder, j);
    }
    for (size_t i = 0; i < HELD; i++)
        if (holder->held[i])
            give_back(holder, i, i % 2);
    return NULL;
}

static void threads_find_their_own_memory(void **state)
{
    struct holder holders[THREADS] = {0};
    struct shoal_memory *memory;
    pthread_mutexattr_t attributes;
    (void)state;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attributes);
    assert_int_equal(shoal_memory_create(&quiet, &settings.memory, &memory), SHOAL_OK);
    shoal_memory_set_guard(memory, (struct shoal_guard){lock_mutex, unlock_mutex, &mutex});
    for (unsigned char i = 0; i < THREADS; i++) {
        holders[i].memory = memory;
        holders[i].number = (unsigned char)(i + 1);
        assert_int_equal(pthread_create(&holders[i].thread, NULL, hold, &holders[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(holders[i].thread, NULL);
        if (holders[i].wrong)
            fail_msg("thread %d: not %s", i, holders[i].wrong);
    }
    const struct shoal_memory_counts counts = shoal_memory_count(memory);
    assert_int_equal(counts.regions, counts.cached);
    shoal_memory_destroy(memory);
    pthread_mutex_destroy(&mutex);
    pthread_mutexattr_destroy(&attributes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(threads_find_their_own_memory)};
    return cmocka_run_group_tests(tests, open_log, close_log);
}
