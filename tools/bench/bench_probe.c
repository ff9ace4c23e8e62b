#include "bench.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { CHUNKS = 10, CHUNK_ROUNDS = 500, ROUNDS = (CHUNKS + 1) * CHUNK_ROUNDS, SPINS = 4096 };

struct line {
    _Alignas(128) _Atomic uint64_t value; /* written by one rank only */
};

struct bench_area {
    struct line side[2]; /* the turn that rank 0 or rank 1 has reached; never reset */
    struct line done;    /* number of probes that have ended; written by rank 0 */
};

double bench_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct bench_area *bench_area_create(void)
{
    void *area = mmap(NULL, sizeof(struct bench_area), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return area == MAP_FAILED ? NULL : area;
}

void bench_area_destroy(struct bench_area *area)
{
    if (area)
        munmap(area, sizeof *area);
}

/* Spins, as a bare exchange does, but yields between bursts, so that two ranks on one core also finish. Acquire pairs with the
 * release in exchange(): only the turn itself is passed, so the pair only keeps the compiler from moving the loop. */
static bool turn_wait(struct line *line, uint64_t turn, double deadline)
{
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++)
            if (atomic_load_explicit(&line->value, memory_order_acquire) >= turn)
                return true;
        if (bench_now() > deadline)
            return false;
        sched_yield();
    }
}

static bool exchange(struct bench_area *area, int rank, uint64_t turn, double deadline)
{
    atomic_store_explicit(&area->side[rank].value, turn, memory_order_release);
    return turn_wait(&area->side[!rank], turn, deadline);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Takes the median over chunks, so that one preemption spoils only one chunk. The first chunk, in which the ranks meet, does
 * not count. */
static bool ping_pong(struct bench_area *area, int rank, uint64_t turn, double deadline, double *ns_out)
{
    double took[CHUNKS];
    for (int chunk = -1; chunk < CHUNKS; chunk++) {
        const double start = bench_now();
        for (int round = 0; round < CHUNK_ROUNDS; round++)
            if (!exchange(area, rank, ++turn, deadline))
                return false;
        if (chunk >= 0)
            took[chunk] = (bench_now() - start) * 1e9 / CHUNK_ROUNDS;
    }
    qsort(took, CHUNKS, sizeof took[0], by_value);
    *ns_out = took[CHUNKS / 2];
    return true;
}

/* Ranks that do not take part sleep, because a spinning rank would take the core from those that do. */
static bool bystander_wait(struct bench_area *area, uint64_t number, double deadline)
{
    while (atomic_load_explicit(&area->done.value, memory_order_acquire) < number) {
        if (bench_now() > deadline)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return true;
}

bool bench_exchange_measure(struct bench_area *area, int rank, uint64_t number, double timeout_s, double *ns_out)
{
    const double deadline = bench_now() + timeout_s;
    if (rank > 1)
        return bystander_wait(area, number, deadline);
    if (!ping_pong(area, rank, number * ROUNDS, deadline, ns_out))
        return false;
    if (rank == 0)
        atomic_store_explicit(&area->done.value, number, memory_order_release);
    return true;
}

/* Uses vectors, because -O2 leaves a plain loop scalar, and then the loop would be the limit instead of the memory. */
typedef uint32_t lanes __attribute__((vector_size(32), aligned(1), may_alias));

void bench_memory_touch(void *memory, size_t bytes)
{
    lanes *vector = memory;
    const size_t count = bytes / sizeof *vector;
    for (size_t i = 0; i < count; i++)
        vector[i] += 1;
    unsigned char *rest = (unsigned char *)memory + count * sizeof *vector;
    for (size_t i = 0; i < bytes % sizeof *vector; i++)
        rest[i]++;
    __asm__ volatile("" ::"r"(memory) : "memory");
}
