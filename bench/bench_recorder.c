/* Measures the cost of the flight recorder: prints nanoseconds per operation for the stores of a record, and for the clock
 * readings that go with it (posted, arrived, done). A measurement, not a test: `build/bench/bench_recorder`. */
#include <stdio.h>

#include "base/clock.h"
#include "observe/recorder.h"

#define OPERATIONS 20000000

/* The fields the engine sets (engine.c: start_record, note_last_rank; completion.c). */
static void record(struct shoal_recorder *recorder, uint64_t sequence, uint64_t posted, uint64_t arrived, uint64_t done)
{
    struct shoal_record *r = shoal_recorder_next(recorder);
    *r = (struct shoal_record){.sequence = sequence,
                               .count = 2,
                               .posted = posted,
                               .collective = "all-reduce",
                               .algorithm = "direct",
                               .last_rank = -1,
                               .step = -1,
                               .peer = -1};
    __asm__ volatile("" ::"r"(r) : "memory");
    r->arrived = arrived;
    r->last_rank = 1;
    r->late = 256;
    r->done = done;
    r->status = 0;
    shoal_recorder_count(recorder, 8, r->last_rank == 1, r->late);
    __asm__ volatile("" ::"r"(r) : "memory");
}

static double time_of(struct shoal_recorder *recorder, int with_clock)
{
    const uint64_t start = shoal_clock_ns();
    for (uint64_t i = 1; i <= OPERATIONS; i++) {
        if (with_clock)
            record(recorder, i, shoal_clock_ticks(), shoal_clock_ticks(), shoal_clock_ticks());
        else
            record(recorder, i, i, i, i);
    }
    return (double)(shoal_clock_ns() - start) / OPERATIONS;
}

int main(void)
{
    struct shoal_recorder recorder;
    if (shoal_recorder_open(&recorder, shoal_flights_create()) != SHOAL_OK)
        return 1;
    time_of(&recorder, 0);
    const double stores = time_of(&recorder, 0), all = time_of(&recorder, 1);
    printf("flight recorder: %.1f ns per operation, %.1f ns with three readings of the clock\n", stores, all);
    shoal_recorder_fini(&recorder);
    return 0;
}
