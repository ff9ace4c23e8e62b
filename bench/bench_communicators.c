/* Measures the cost per rank of communicators on one host. As the number of communicators grows, prints descriptors, mappings,
 * anonymous memory, and the memory of segments and of flight recorders: when the communicators are made, when each has summed 8
 * B, and when each has summed 4 MiB. A measurement, not a test: `build/bench/bench_communicators RANKS`. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shoal/shoal.h"

#define COMMS_MAX 64
#define SMALL 2
#define LARGE ((size_t)1 << 20)
#define ROUNDS 40 /* of small sums, so that every arrival record is used */

#define CHECK(call)                                                    \
    do {                                                               \
        if ((call) != SHOAL_OK) {                                      \
            fprintf(stderr, "%s:%d: " #call "\n", __FILE__, __LINE__); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

struct cost {
    int descriptors, mappings;
    long anonymous_kib, segments_kib, recorders_kib;
};

/* Counts the open descriptors, without the one that reads them, and the memory behind the communicators' descriptors. */
static void count_descriptors(struct cost *cost)
{
    char path[300], target[300];
    struct stat file;
    DIR *directory = opendir("/proc/self/fd");
    for (const struct dirent *entry; directory && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        const ssize_t length = readlink(path, target, sizeof target - 1);
        target[length > 0 ? length : 0] = 0;
        cost->descriptors += length > 0;
        if (strstr(target, "memfd:shoal-communicator") && stat(path, &file) == 0)
            cost->segments_kib += (long)file.st_blocks / 2;
        if (strstr(target, "memfd:shoal-flight") && stat(path, &file) == 0)
            cost->recorders_kib += (long)file.st_blocks / 2;
    }
    cost->descriptors--;
    if (directory)
        closedir(directory);
}

static struct cost measure(void)
{
    struct cost cost = {0, 0, 0, 0, 0};
    char line[512];
    count_descriptors(&cost);
    FILE *maps = fopen("/proc/self/maps", "re"), *sums = fopen("/proc/self/smaps_rollup", "re");
    while (maps && fgets(line, sizeof line, maps))
        cost.mappings += strstr(line, "memfd:shoal") != NULL;
    while (sums && fgets(line, sizeof line, sums))
        sscanf(line, "Anonymous: %ld", &cost.anonymous_kib);
    if (maps)
        fclose(maps);
    if (sums)
        fclose(sums);
    return cost;
}

static void print(int rank, int comms, const char *when)
{
    const struct cost cost = measure();
    if (rank == 0)
        printf("%4d  %-10s %5d descriptors %5d mappings %7ld KiB anonymous %7ld KiB of segments %5ld KiB of recorders\n", comms,
               when, cost.descriptors, cost.mappings, cost.anonymous_kib, cost.segments_kib, cost.recorders_kib);
    fflush(stdout);
}

static void sum(struct shoal_comm **comms, int first, int end, size_t count, int rounds)
{
    static float x[LARGE];
    for (int i = first; i < end; i++) {
        for (int round = 0; round < rounds; round++)
            CHECK(shoal_allreduce(comms[i], x, x, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    }
}

static void run(int rank, int ranks, const char *address)
{
    struct shoal_context *context;
    struct shoal_comm *comms[COMMS_MAX];
    CHECK(shoal_context_create(NULL, &context));
    CHECK(shoal_comm_create_at(context, address, rank, ranks, NULL, &comms[0]));
    sum(comms, 0, 1, LARGE, 1); /* touches the memory that all communicators share */
    for (int made = 1, end = 1; end <= COMMS_MAX; end *= 2) {
        const int first = made;
        for (; made < end; made++)
            CHECK(shoal_comm_split(comms[0], 0, rank, NULL, &comms[made]));
        print(rank, made, "made");
        sum(comms, first, made, SMALL, ROUNDS);
        print(rank, made, "8 B");
        sum(comms, first, made, LARGE, 2);
        print(rank, made, "4 MiB");
    }
    for (int i = COMMS_MAX - 1; i >= 0; i--) {
        CHECK(shoal_comm_finalize(comms[i]));
        shoal_comm_free(comms[i]);
    }
    shoal_context_destroy(context);
}

int main(int argc, char **argv)
{
    const int ranks = argc > 1 ? atoi(argv[1]) : 2;
    char address[40];
    int status, failed = 0;
    snprintf(address, sizeof address, "127.0.0.1:%d", 20000 + (int)getpid() % 20000);
    for (int r = 0; r < ranks; r++) {
        if (fork() == 0) {
            run(r, ranks, address);
            exit(0);
        }
    }
    while (wait(&status) > 0)
        failed |= status != 0;
    return failed;
}
