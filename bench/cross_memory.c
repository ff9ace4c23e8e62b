/* Measures an all-gather of two processes in which each reads the other's input with the kernel's cross-memory copy, from
 * ordinary memory to ordinary memory. docs/decisions/0007 uses the result.
 *     cc -O2 bench/cross_memory.c -o build/cross_memory && build/cross_memory
 * Each iteration rewrites the input (untimed), both processes meet, and the slower one's time counts. Prints the median in
 * microseconds. Sizes are bytes of the whole output, as in `shoal bench allgather --memory plain`, whose times to compare with.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ITERATIONS = 40, RANKS = 2 };
static const size_t sizes[] = {32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20};

struct meeting {
    _Alignas(128) _Atomic unsigned arrived[RANKS];
    _Alignas(128) pid_t pid[RANKS];
    double took_us[RANKS][ITERATIONS];
};

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void meet(struct meeting *meeting, int rank)
{
    const unsigned turn = ++meeting->arrived[rank];
    for (int looks = 0; meeting->arrived[!rank] < turn; looks++)
        if (looks % 1024 == 1023)
            sched_yield();
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void fail(const char *what)
{
    perror(what);
    _exit(1);
}

/* The input has the same address in both processes, because one fork made them. */
static void gather(struct meeting *meeting, int rank, char *input, char *output, size_t half)
{
    const struct iovec from = {input, half}, to = {output + (size_t)!rank * half, half};
    memcpy(output + (size_t)rank * half, input, half);
    if (process_vm_readv(meeting->pid[!rank], &to, 1, &from, 1, 0) != (ssize_t)half)
        fail("process_vm_readv");
}

static void run(struct meeting *meeting, int rank, char *input, char *output)
{
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t half = sizes[s] / RANKS;
        for (int i = 0; i < ITERATIONS; i++) {
            memset(input, i + rank, half);
            meet(meeting, rank);
            const double start = now_us();
            gather(meeting, rank, input, output, half);
            meeting->took_us[rank][i] = now_us() - start;
            meet(meeting, rank);
            if (output[0] != (char)i || output[2 * half - 1] != (char)(i + 1))
                fail("the result is wrong");
        }
        for (int i = 0; i < ITERATIONS && rank == 0; i++)
            if (meeting->took_us[1][i] > meeting->took_us[0][i])
                meeting->took_us[0][i] = meeting->took_us[1][i];
        if (rank == 0) {
            qsort(meeting->took_us[0], ITERATIONS, sizeof(double), by_value);
            printf("%9zu B %10.1f us\n", sizes[s], meeting->took_us[0][ITERATIONS / 2]);
            fflush(stdout);
        }
        meet(meeting, rank);
    }
}

int main(void)
{
    const size_t most = sizes[sizeof sizes / sizeof sizes[0] - 1];
    struct meeting *meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *input = mmap(NULL, most / RANKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *output = mmap(NULL, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED || input == MAP_FAILED || output == MAP_FAILED)
        fail("mmap");
    const pid_t child = fork();
    const int rank = child == 0;
    meeting->pid[rank] = getpid();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    meet(meeting, rank);
    run(meeting, rank, input, output);
    if (rank == 0)
        waitpid(child, NULL, 0);
    return 0;
}
