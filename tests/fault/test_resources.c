/* Shoal's resources: memory beyond 4 GiB, counters beyond 32 bits, no growth, no work while it idles, little while it waits. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "fault_harness.h"

/* ---- Over 4 GiB ---------------------------------------------------------------------------------------------------------- */

#define HUGE_COUNT (((size_t)1 << 30) + 2) /* float32: 4 GiB + 8 bytes */
#define HUGE_STRIDE ((size_t)999983)
#define HUGE_ENDS 64
#define HUGE_NEEDS_KIB (14ul << 20)

static unsigned long available_kib(void)
{
    unsigned long kib = 0;
    char line[256];
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %lu", &kib) == 1)
            break;
    }
    if (file)
        fclose(file);
    return kib;
}

/* Returns true for the sampled elements: both ends, and some at regular distances; 0 everywhere else. */
static bool is_sample(size_t i)
{
    return i < HUGE_ENDS || i >= HUGE_COUNT - HUGE_ENDS || i % HUGE_STRIDE == 0;
}

static size_t next_sample(size_t i)
{
    i++;
    if (is_sample(i))
        return i;
    i = (i / HUGE_STRIDE + 1) * HUGE_STRIDE;
    return i < HUGE_COUNT - HUGE_ENDS ? i : HUGE_COUNT - HUGE_ENDS;
}

static void reduce_huge(struct fault_rank *self)
{
    float *buffer = fault_floats(self, true, HUGE_COUNT);
    if (!buffer)
        return;
    for (size_t i = 0; i < HUGE_COUNT; i = next_sample(i))
        buffer[i] = (float)(i % 4096 + (size_t)self->rank);
    const enum shoal_status status = shoal_allreduce(self->comm, buffer, buffer, HUGE_COUNT, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    fault_check(self, status == SHOAL_OK, "all-reduce: %s", shoal_status_name(status));
    for (size_t i = 0; i < HUGE_COUNT; i = next_sample(i)) {
        if (!fault_check(self, buffer[i] == (float)(2 * (i % 4096) + 1), "element %zu is %g", i, (double)buffer[i]))
            return;
    }
    for (size_t i = HUGE_ENDS + 1; i < HUGE_COUNT - HUGE_ENDS; i += 100003)
        fault_check(self, is_sample(i) || buffer[i] == 0, "element %zu is %g, not 0", i, (double)buffer[i]);
}

static void over_4_gib(struct fault_test *test)
{
    const struct fault_job job = {.size = 2, .body = reduce_huge, .limit_ms = 90000};
    if (available_kib() < HUGE_NEEDS_KIB)
        fault_skip(test, "%lu MiB of memory are available, 14 GiB are needed", available_kib() >> 10);
    else
        fault_run(test, &job);
}

/* ---- Mixed operations ---------------------------------------------------------------------------------------------------- */

struct buffers {
    float *plain;
    float *shared;
};

#define MOST ((size_t)100000)

static void pass_on(struct fault_rank *self, struct shoal_comm *comm, float *buffer, size_t count)
{
    const int rank = shoal_comm_rank(comm), size = shoal_comm_size(comm), to = (rank + 1) % size,
              from = (rank + size - 1) % size;
    struct shoal_request *request = NULL;
    enum shoal_status status = shoal_recv_post(comm, buffer + count, count, SHOAL_FLOAT32, from, 3, NULL, &request);
    for (size_t i = 0; i < count; i++)
        buffer[i] = (float)rank;
    if (status == SHOAL_OK)
        status = shoal_send(comm, buffer, count, SHOAL_FLOAT32, to, 3, NULL);
    if (status == SHOAL_OK)
        status = shoal_request_wait(request, SHOAL_FOREVER);
    shoal_request_free(request);
    fault_check(self, status == SHOAL_OK, "messages of %zu: %s", count, shoal_status_name(status));
    fault_check(self, buffer[count] == (float)from && buffer[2 * count - 1] == (float)from, "a message is wrong");
}

static void post_several(struct fault_rank *self, struct shoal_comm *comm, float *buffer)
{
    enum { POSTS = 20, COUNT = 3000 };
    struct shoal_request *requests[POSTS] = {NULL};
    for (int i = 0; i < POSTS; i++) {
        buffer[i * COUNT] = (float)i;
        const enum shoal_status status = shoal_allreduce_post(comm, buffer + i * COUNT, buffer + i * COUNT, COUNT,
                                                              SHOAL_FLOAT32, SHOAL_MAX, NULL, &requests[i]);
        fault_check(self, status == SHOAL_OK, "post %d: %s", i, shoal_status_name(status));
    }
    for (int i = 0; i < POSTS && requests[i]; i++) {
        const enum shoal_status status = shoal_request_wait(requests[i], SHOAL_FOREVER);
        fault_check(self, status == SHOAL_OK && buffer[i * COUNT] == (float)i, "request %d: %s", i, shoal_status_name(status));
        shoal_request_free(requests[i]);
    }
}

static void broadcast_once(struct fault_rank *self, struct shoal_comm *comm, float *buffer, size_t count, int root)
{
    buffer[0] = buffer[count - 1] = (float)shoal_comm_rank(comm);
    const enum shoal_status status = shoal_broadcast(comm, buffer, buffer, count, SHOAL_FLOAT32, root, NULL);
    fault_check(self, status == SHOAL_OK, "broadcast of %zu: %s", count, shoal_status_name(status));
    fault_check(self, buffer[0] == (float)root && buffer[count - 1] == (float)root, "a broadcast is wrong");
}

static void split_once(struct fault_rank *self, struct shoal_comm *comm)
{
    struct shoal_comm *group = NULL;
    float x[10];
    const enum shoal_status status = shoal_comm_split(comm, 0, 0, NULL, &group);
    if (!fault_check(self, status == SHOAL_OK, "shoal_comm_split: %s", shoal_status_name(status)))
        return;
    fault_allreduce_once(self, group, x, 10);
    fault_check(self, shoal_comm_finalize(group) == SHOAL_OK, "shoal_comm_finalize");
    shoal_comm_free(group);
}

static void take_and_give_memory(struct fault_rank *self, struct shoal_comm *comm)
{
    float *memory = fault_floats(self, true, 20000);
    if (!memory)
        return;
    fault_allreduce_once(self, comm, memory, 20000);
    fault_check(self, shoal_barrier(comm, NULL) == SHOAL_OK, "shoal_barrier"); /* the others have also read it */
    fault_check(self, shoal_mem_free(self->context, memory) == SHOAL_OK, "shoal_mem_free");
}

/* Runs the i-th operation of a mixture; the same on every rank. */
static void run_mixed(struct fault_rank *self, struct shoal_comm *comm, const struct buffers *buffers, unsigned i)
{
    float *buffer = i & 1 ? buffers->shared : buffers->plain;
    if (i % 200 == 40)
        split_once(self, comm);
    else if (i % 100 == 60)
        take_and_give_memory(self, comm);
    else if (i % 50 == 10)
        fault_allreduce_once(self, comm, buffer, MOST);
    else if (i % 50 == 20)
        post_several(self, comm, buffer);
    else if (i % 7 == 1)
        pass_on(self, comm, buffer, i % 5 ? 100 : 5000);
    else if (i % 7 == 2)
        broadcast_once(self, comm, buffer, i % 3 ? 300 : 6000, (int)i % shoal_comm_size(comm));
    else if (i % 7 == 3)
        fault_check(self, shoal_barrier(comm, NULL) == SHOAL_OK, "shoal_barrier");
    else
        fault_allreduce_once(self, comm, buffer, i % 3 == 0 ? 2 : i % 3 == 1 ? 900 : 4000);
}

static bool make_buffers(struct fault_rank *self, struct buffers *buffers)
{
    buffers->plain = fault_floats(self, false, MOST);
    buffers->shared = fault_floats(self, true, MOST);
    if (!buffers->plain || !buffers->shared)
        return false;
    memset(buffers->plain, 0, MOST * sizeof(float));
    memset(buffers->shared, 0, MOST * sizeof(float));
    return true;
}

static void run_100(struct fault_rank *self)
{
    struct buffers buffers;
    if (!make_buffers(self, &buffers))
        return;
    for (unsigned i = 0; i < 100 && !self->mine->why[0]; i++)
        run_mixed(self, self->comm, &buffers, i);
    free(buffers.plain);
}

static void counters_near_2_to_32(struct fault_test *test)
{
    static const char *const settings[] = {"SHOAL_COUNTER_START=4294967290", NULL};
    const struct fault_job job = {.size = *(const int *)test->parameters, .body = run_100, .settings = settings};
    fault_run(test, &job);
}

/* ---- Nothing grows ------------------------------------------------------------------------------------------------------- */

#define WARM_UP 2000
#define ITERATIONS 10000

static void iterate(struct fault_rank *self)
{
    struct buffers buffers;
    if (!make_buffers(self, &buffers))
        return;
    for (unsigned i = 0; i < WARM_UP && !self->mine->why[0]; i++)
        run_mixed(self, self->comm, &buffers, i);
    const struct fault_holdings before = fault_holdings();
    const size_t resident = fault_resident_bytes();
    for (unsigned i = 0; i < ITERATIONS && !self->mine->why[0]; i++)
        run_mixed(self, self->comm, &buffers, i);
    const struct fault_holdings after = fault_holdings();
    const size_t now = fault_resident_bytes();
#ifndef __SANITIZE_ADDRESS__ /* ASan keeps freed memory for a while; it checks for leaks itself */
    fault_check(self, now <= resident + (1 << 20), "resident memory grew from %zu to %zu bytes", resident, now);
#endif
    fault_check(self, after.descriptors == before.descriptors, "descriptors: %d, then %d", before.descriptors,
                after.descriptors);
    fault_check(self, after.threads == before.threads, "threads: %d, then %d", before.threads, after.threads);
    /* One more or less: the news that a peer has freed its memory is read when this rank next passes memory. */
    fault_check(self, abs(after.mappings - before.mappings) <= 1, "segments: %d, then %d", before.mappings, after.mappings);
    self->mine->number = (double)now - (double)resident;
    free(buffers.plain);
}

static void flat_over_10000(struct fault_test *test)
{
    const struct fault_job job = {.size = *(const int *)test->parameters, .body = iterate, .limit_ms = 60000};
    if (fault_run(test, &job))
        printf("# resident memory of rank 0 changed by %.0f bytes\n", test->shared->results[0].number);
}

/* ---- Idle and waiting ---------------------------------------------------------------------------------------------------- */

static long switches_of(const char *task)
{
    char path[300], line[256];
    long switches = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "voluntary_ctxt_switches: %ld", &switches) == 1)
            break;
    }
    if (file)
        fclose(file);
    return switches;
}

/* Returns how often threads of this process went to sleep, which is how often they woke. */
static long count_switches(void)
{
    DIR *tasks = opendir("/proc/self/task");
    const struct dirent *entry;
    long switches = 0;
    while (tasks && (entry = readdir(tasks)))
        switches += entry->d_name[0] == '.' ? 0 : switches_of(entry->d_name);
    if (tasks)
        closedir(tasks);
    return switches;
}

static void idle(struct fault_rank *self)
{
    struct buffers buffers;
    if (!make_buffers(self, &buffers))
        return;
    post_several(self, self->comm, buffers.plain);
    long woken = 4;
    for (int turn = 0; turn < 5 && woken > 3; turn++) { /* a rank may still have to become idle */
        fault_sleep_ms(300);
        const long before = count_switches();
        fault_sleep_ms(2000);
        woken = count_switches() - before;
    }
    self->mine->number = (double)woken;
    fault_check(self, woken <= 3, "an idle process woke %ld times in 2 s", woken);
    fault_check(self, shoal_barrier(self->comm, NULL) == SHOAL_OK, "shoal_barrier");
    free(buffers.plain);
}

static void idle_sleeps(struct fault_test *test)
{
    const struct fault_job job = {.size = 2, .body = idle};
    fault_run(test, &job);
}

static double used_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void wait_for_a_late_rank(struct fault_rank *self)
{
    const bool is_posted = *(const bool *)self->parameters;
    struct shoal_request *request = NULL;
    float x[2] = {1, 1};
    for (int i = 0; i < 10; i++)
        fault_allreduce_once(self, self->comm, x, 2);
    const double before_s = used_s();
    if (self->rank == self->size - 1) {
        fault_sleep_ms(1000);
        fault_act(self);
    }
    enum shoal_status status = SHOAL_OK;
    if (is_posted) {
        status = shoal_allreduce_post(self->comm, x, x, 2, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request);
        while (status == SHOAL_OK && self->rank < self->size - 1 &&
               !atomic_load(&self->shared->results[self->size - 1].action_ns))
            fault_sleep_ms(100); /* nobody waits: the progress thread makes progress */
    } else {
        status = shoal_allreduce(self->comm, x, x, 2, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    }
    if (request)
        status = shoal_request_wait(request, SHOAL_FOREVER);
    self->mine->failed_ns = fault_now_ns();
    self->mine->number = used_s() - before_s;
    fault_check(self, status == SHOAL_OK, "all-reduce: %s", shoal_status_name(status));
    shoal_request_free(request);
}

static double ms_after(const struct fault_test *test, int rank)
{
    return (double)(test->shared->results[rank].failed_ns - test->shared->results[2].action_ns) / 1e6;
}

/* Other programs may keep a rank from its core for a while, so the best of some jobs counts. */
static void waiting_is_cheap(struct fault_test *test)
{
    const bool is_posted = *(const bool *)test->parameters;
    const struct fault_job job = {.size = 3, .body = wait_for_a_late_rank, .parameters = test->parameters};
    const double most_ms = (is_posted ? 120 : 20) * FAULT_SLOW;
    for (int i = 0; i < 8; i++) {
        if (!fault_run(test, &job))
            return;
        if (ms_after(test, 0) < most_ms && ms_after(test, 1) < most_ms)
            break;
    }
    for (int r = 0; r < 2; r++) {
        const struct fault_result *result = &test->shared->results[r];
        const double after_ms = ms_after(test, r);
        fault_expect(test, result->number < 0.05 * FAULT_SLOW, "rank %d used %.1f %% of a core", r, result->number * 100);
        fault_expect(test, after_ms < most_ms, "rank %d was done %.3f ms after the late rank came",
                     r, after_ms);
        printf("# rank %d used %.2f %% of a core, was done %.3f ms after the late rank came\n", r, result->number * 100,
               after_ms);
    }
}

/* ---- The limit ----------------------------------------------------------------------------------------------------------- */

#define LIMIT_MIB 8
#define MIB ((size_t)1 << 20)

static void exceed_limit(struct fault_rank *self)
{
    struct shoal_failure failure = {.struct_bytes = sizeof failure};
    void *first = NULL, *second = NULL;
    float x[2];
    enum shoal_status status = shoal_mem_alloc(self->context, 16 * MIB, &first);
    fault_check(self, status == SHOAL_ERR_MEMORY && !first, "16 MiB of %d: %s", LIMIT_MIB, shoal_status_name(status));
    fault_check(self, shoal_last_failure(self->context, NULL, &failure) == SHOAL_OK && failure.status == SHOAL_ERR_MEMORY,
                "shoal_last_failure does not tell");
    fault_check(self, strstr(failure.text, "16777216") && strstr(failure.text, "SHOAL_MEMORY_LIMIT"), "the text: %s",
                failure.text);
    fault_check(self, strstr(self->mine->log, "16777216") != NULL, "the log: %s", self->mine->log);
    fault_allreduce_once(self, self->comm, x, 2);
    status = shoal_mem_alloc(self->context, 4 * MIB, &first);
    fault_check(self, status == SHOAL_OK, "4 MiB of %d: %s", LIMIT_MIB, shoal_status_name(status));
    status = shoal_mem_alloc(self->context, 5 * MIB, &second);
    fault_check(self, status == SHOAL_ERR_MEMORY, "5 MiB more than 4 of %d: %s", LIMIT_MIB, shoal_status_name(status));
    if (first && status == SHOAL_ERR_MEMORY) {
        fault_check(self, shoal_mem_free(self->context, first) == SHOAL_OK, "shoal_mem_free");
        status = shoal_mem_alloc(self->context, 5 * MIB, &second);
        fault_check(self, status == SHOAL_OK, "5 MiB of %d again: %s", LIMIT_MIB, shoal_status_name(status));
    }
    fault_allreduce_once(self, self->comm, x, 2);
}

static void limit_exceeded(struct fault_test *test)
{
    static const char *const settings[] = {"SHOAL_MEMORY_LIMIT=8M", NULL};
    const struct fault_job job = {.size = 2, .body = exceed_limit, .settings = settings};
    fault_run(test, &job);
}

/* One rank has no memory for its staging buffer: all ranks learn that, and which rank it is. */
static void exceed_by_staging(struct fault_rank *self)
{
    static const char *const tight[] = {"SHOAL_MEMORY_LIMIT=600K", NULL};
    const size_t count = MIB;
    enum shoal_status status = fault_context(self, self->rank == 1 ? tight : NULL, &self->context);
    if (status == SHOAL_OK)
        status = shoal_comm_create_at(self->context, self->address, self->rank, self->size, NULL, &self->comm);
    if (!fault_check(self, status == SHOAL_OK, "the communicator: %s", shoal_status_name(status)))
        return;
    float *buffer = calloc(count, sizeof *buffer);
    fault_allreduce_once(self, self->comm, buffer, 2);
    fault_note(self, shoal_allreduce(self->comm, buffer, buffer, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    free(buffer);
    shoal_comm_free(self->comm);
    shoal_context_destroy(self->context);
}

static void limit_exceeded_by_staging(struct fault_test *test)
{
    const struct fault_job job = {.size = 3, .body = exceed_by_staging, .is_bare = true};
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < 3; r++) {
        const struct fault_result *result = &test->shared->results[r];
        fault_expect(test, result->status == SHOAL_ERR_MEMORY && result->failure.rank == 1, "rank %d got %s, rank %d is named",
                     r, shoal_status_name(result->status), result->failure.rank);
        fault_expect(test, strstr(result->failure.text, "SHOAL_MEMORY_LIMIT") && strstr(result->failure.text, "614400"),
                     "rank %d: %s", r, result->failure.text);
    }
}

int main(int argc, char **argv)
{
    static const int two = 2, three = 3;
    static const bool blocking = false, posted = true;
    const struct fault_case cases[] = {
        {"resources_counters_near_2_to_32_2_ranks", counters_near_2_to_32, &two},
        {"resources_counters_near_2_to_32_3_ranks", counters_near_2_to_32, &three},
        {"resources_flat_over_10000_iterations", flat_over_10000, &two},
        {"resources_idle_process_sleeps", idle_sleeps, NULL},
        {"resources_waiting_is_cheap", waiting_is_cheap, &blocking},
        {"resources_waiting_is_cheap_posted", waiting_is_cheap, &posted},
        {"resources_limit_exceeded", limit_exceeded, NULL},
        {"resources_limit_exceeded_by_staging", limit_exceeded_by_staging, NULL},
        {"resources_over_4_gib_in_place", over_4_gib, NULL},
    };
    return fault_main(argc, argv, cases, FAULT_COUNT_OF(cases));
}
