/* Measures the cost per rank of large communicators: engines over the simulated transport, hosts of 8 ranks, all in this
 * process. Prints the processor time per rank of some small operations, and the memory of an engine. A measurement that also
 * checks the sums, not a test: `build/bench/bench_ranks 1024` (2,048 ranks need 4 GiB of memory, 4,096 need 16). A second
 * argument of 1 measures only the first operation. The times include the simulation's own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "engine/engine_state.h"
#include "sim/sim_transport.h"

#define RANKS_PER_HOST 8
#define COUNT 512 /* float32 elements of an operand */
#define EVENTS_PER_RANK 64

struct worker {
    struct shoal_engine *engine;
    struct shoal_request request;
    float *input, *output;
};

struct crowd {
    int size;
    struct shoal_sim *sim;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    struct shoal_log log;
    struct worker *workers;
    size_t sim_bytes, engine_bytes; /* of the process when they are made */
};

static uint64_t now_ns(void *arg)
{
    return shoal_sim_now_ns(arg);
}

/* Returns the processor time of this process, because other processes may use the machine at the same time. */
static uint64_t processor_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * SHOAL_NS_PER_S + (uint64_t)now.tv_nsec;
}

static size_t resident_bytes(void)
{
    size_t whole = 0, pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fscanf(file, "%zu %zu", &whole, &pages) != 2)
        pages = 0;
    if (file)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static bool open_worker(struct crowd *crowd, int rank)
{
    struct worker *worker = &crowd->workers[rank];
    const struct shoal_engine_options options = {.name = "crowd",
                                                 .transport = shoal_sim_transport(crowd->sim, rank),
                                                 .kernels = shoal_kernels_find("auto"),
                                                 .settings = &crowd->settings.engine,
                                                 .warn_ms = crowd->settings.bootstrap.warn_ms,
                                                 .tuning = &crowd->tuning,
                                                 .log = &crowd->log,
                                                 .now_ns = now_ns,
                                                 .now_arg = crowd->sim,
                                                 .timeout_ms = 600000};
    worker->input = calloc(COUNT, sizeof(float));
    worker->output = calloc(COUNT, sizeof(float));
    return worker->input && worker->output && shoal_engine_create(&options, &worker->engine) == SHOAL_OK;
}

static bool open_crowd(struct crowd *crowd)
{
    static const char *const overrides[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=1", NULL};
    static uint16_t host[SHOAL_RANKS_MAX];
    char error[256];
    for (int r = 0; r < crowd->size; r++)
        host[r] = (uint16_t)(r / RANKS_PER_HOST);
    const struct shoal_sim_options options = {.seed = 1, .size = crowd->size, .delay_ns_max = 10000, .host = host};
    const size_t before = resident_bytes();
    crowd->workers = calloc((size_t)crowd->size, sizeof *crowd->workers);
    if (!crowd->workers || shoal_settings_load(&crowd->settings, overrides, error, sizeof error) != SHOAL_OK ||
        shoal_tuning_load(&crowd->tuning, "", error, sizeof error) != SHOAL_OK ||
        shoal_sim_create(&options, &crowd->sim) != SHOAL_OK)
        return false;
    shoal_log_init(&crowd->log, &crowd->settings.log, NULL, NULL);
    crowd->sim_bytes = resident_bytes() - before;
    bool is_open = true;
    for (int r = 0; r < crowd->size && is_open; r++)
        is_open = open_worker(crowd, r);
    crowd->engine_bytes = resident_bytes() - before - crowd->sim_bytes;
    return is_open;
}

static bool are_done(const struct crowd *crowd)
{
    for (int r = 0; r < crowd->size; r++) {
        if (shoal_request_status(&crowd->workers[r].request) == SHOAL_PENDING)
            return false;
    }
    return true;
}

/* Each rank notifies all others at the end of an operation, so there are many events. Every turn of all ranks handles many
 * events per rank. */
static void drive(struct crowd *crowd)
{
    while (!are_done(crowd)) {
        for (int r = 0; r < crowd->size; r++) {
            (void)shoal_engine_progress(crowd->workers[r].engine);
            shoal_engine_flush(crowd->workers[r].engine);
        }
        for (int i = 0; i < EVENTS_PER_RANK * crowd->size && shoal_sim_advance(crowd->sim); i++)
            continue;
    }
}

static bool is_right(const struct crowd *crowd, const struct shoal_call *call)
{
    const float sum = (float)crowd->size * (float)(crowd->size + 1) / 2;
    for (int r = 0; r < crowd->size; r++) {
        if (shoal_request_status(&crowd->workers[r].request) != SHOAL_OK)
            return false;
        for (size_t i = 0; call->collective == SHOAL_COLLECTIVE_ALLREDUCE && i < call->count; i++) {
            if (crowd->workers[r].output[i] != sum)
                return false;
        }
    }
    return true;
}

static bool run(struct crowd *crowd, const char *name, struct shoal_call call)
{
    uint64_t took_ns[2];
    for (int round = 0; round < 2; round++) { /* the second round has the plans and peers of the first */
        const uint64_t begin_ns = processor_ns();
        for (int r = 0; r < crowd->size; r++) {
            struct worker *worker = &crowd->workers[r];
            for (size_t i = 0; i < COUNT; i++)
                worker->input[i] = (float)(r + 1);
            call.input = call.collective == SHOAL_COLLECTIVE_BARRIER ? NULL : worker->input;
            call.output = call.collective == SHOAL_COLLECTIVE_BARRIER ? NULL : worker->output;
            memset(&worker->request, 0, sizeof worker->request);
            shoal_engine_post(worker->engine, &call, &worker->request);
        }
        drive(crowd);
        took_ns[round] = processor_ns() - begin_ns;
        if (!is_right(crowd, &call)) {
            fprintf(stderr, "%s of %d ranks: wrong\n", name, crowd->size);
            return false;
        }
    }
    printf("%5d ranks  %-20s %9.1f us per rank the first time, %9.1f then\n", crowd->size, name,
           (double)took_ns[0] / 1e3 / crowd->size, (double)took_ns[1] / 1e3 / crowd->size);
    return true;
}

int main(int argc, char **argv)
{
    struct crowd crowd = {.size = argc > 1 ? atoi(argv[1]) : 1024};
    if (crowd.size < RANKS_PER_HOST || crowd.size > SHOAL_RANKS_MAX || !open_crowd(&crowd)) {
        fprintf(stderr, "usage: bench_ranks [RANKS], %d to %d; or no memory\n", RANKS_PER_HOST, SHOAL_RANKS_MAX);
        return 2;
    }
    const struct shoal_call sum = {
        .collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .scale = 1, .count = 2};
    struct shoal_call large = sum;
    large.count = COUNT;
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER, .scale = 1};
    printf("%5d ranks  %.0f KiB per rank for the simulation, %.0f KiB for the engine at first\n", crowd.size,
           (double)crowd.sim_bytes / 1024 / crowd.size, (double)crowd.engine_bytes / 1024 / crowd.size);
    const struct {
        const char *name;
        const struct shoal_call *call;
    } operations[] = {{"all-reduce of 8 B", &sum}, {"barrier", &barrier}, {"all-reduce of 2 KiB", &large}};
    const int count = argc > 2 ? atoi(argv[2]) : (int)SHOAL_COUNT_OF(operations);
    bool is_good = true;
    for (int i = 0; i < count && i < (int)SHOAL_COUNT_OF(operations) && is_good; i++)
        is_good = run(&crowd, operations[i].name, *operations[i].call);
    printf("%5d ranks  %.0f KiB per rank in all at the end\n", crowd.size, (double)resident_bytes() / 1024 / crowd.size);
    return is_good ? 0 : 1;
}
