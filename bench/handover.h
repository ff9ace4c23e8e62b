/* Shared by the programs of bench_handover.py. Rank 0 writes a message and hands it over to rank 1, which reads it and answers
 * with the time at which the message arrived. Both ranks are on one host, so they read one clock. */
#ifndef SHOAL_BENCH_HANDOVER_H
#define SHOAL_BENCH_HANDOVER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { WARMUPS = 5 };

/* Of one message, in nanoseconds: from the last byte written to the message being there, and until the answer. */
struct handover {
    uint64_t written_ns, there_ns, answered_ns;
};

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static inline void message_write(uint64_t *data, size_t count, uint64_t turn)
{
    for (size_t i = 0; i < count; i++)
        data[i] = turn + i;
}

/* Ends the program if the message is not that of the turn. */
static inline void message_read(const uint64_t *data, size_t count, uint64_t turn)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += data[i];
    if (sum == count * turn + (uint64_t)count * (count - 1) / 2)
        return;
    fprintf(stderr, "turn %llu: the message has other bytes\n", (unsigned long long)turn);
    exit(1);
}

static inline int by_time(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the medians, in microseconds: of handing over, and of handing over, reading and answering. */
static inline void handovers_print(const struct handover *all, size_t turns)
{
    double *handed = calloc(turns, sizeof *handed), *whole = calloc(turns, sizeof *whole);
    if (!handed || !whole)
        exit(1);
    for (size_t i = 0; i < turns; i++) {
        handed[i] = (double)(int64_t)(all[i].there_ns - all[i].written_ns) / 1e3;
        whole[i] = (double)(all[i].answered_ns - all[i].written_ns) / 1e3;
    }
    qsort(handed, turns, sizeof *handed, by_time);
    qsort(whole, turns, sizeof *whole, by_time);
    printf("{\"handed_us\":%.1f,\"whole_us\":%.1f,\"least_handed_us\":%.1f}\n", handed[turns / 2], whole[turns / 2], handed[0]);
    free(handed);
    free(whole);
}

#endif
