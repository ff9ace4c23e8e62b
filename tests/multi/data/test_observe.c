/* What Shoal reports about itself, in real processes: the flight recorder, the last rank, memory, traffic, registered
 * memory and log files. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "multi_world.h"

#define COUNT 300000

static size_t count_lines(const char *text, const char *with)
{
    size_t lines = 0;
    while ((text = strstr(text, with))) {
        lines++;
        text++;
    }
    return lines;
}

static char *print_flight(struct world *world)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    CHECK(world, out, "no memory");
    shoal_flight_print(world->comm, out);
    fclose(out);
    return text;
}

/* The recorder holds each operation's description and times. It keeps only the last 1,024. */
static void recorder_keeps_the_last_operations(struct world *world)
{
    float x[4] = {1, 2, 3, 4};
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.trace_tag = 77;
    OK(world, shoal_allreduce(world->comm, x, x, 4, SHOAL_FLOAT32, SHOAL_MAX, &options));
    OK(world, shoal_broadcast(world->comm, x, x, 4, SHOAL_FLOAT32, 1, NULL));
    OK(world, shoal_barrier(world->comm, NULL));
    char *text = print_flight(world);
    CHECK(world, count_lines(text, "\n") == 3, "three lines, not:\n%s", text);
    CHECK(world,
          strstr(text, "\"kind\":\"all-reduce\",\"algorithm\":\"direct\",\"count\":4,\"type\":\"FLOAT32\",\"op\":\"MAX\""),
          "%s", text);
    CHECK(world, strstr(text, "\"tag\":77,\"status\":\"SHOAL_OK\""), "%s", text);
    CHECK(world, strstr(text, "\"kind\":\"broadcast\"") && strstr(text, "\"root\":1"), "%s", text);
    CHECK(world, !strstr(text, "null"), "all times are known: %s", text);
    free(text);
    for (int i = 0; i < 1500; i++)
        OK(world, shoal_barrier(world->comm, NULL));
    text = print_flight(world);
    CHECK(world, count_lines(text, "\n") == 1024, "1024 lines, not %zu", count_lines(text, "\n"));
    CHECK(world, !strstr(text, "all-reduce"), "the oldest are gone");
    free(text);
}

static void tracks_are_written_with_their_communicator(struct world *world)
{
    struct shoal_track *first = NULL, *second = NULL;
    const struct shoal_span forward = {"forward", 7, 2, 5}, backward = {"backward", 8, 3, 6};
    CHECK(world, shoal_track_create(world->comm, NULL, &first) == SHOAL_ERR_ARGUMENT, "a track without a name");
    CHECK(world, shoal_track_create(world->comm, "x", NULL) == SHOAL_ERR_ARGUMENT, "no track_out");
    CHECK(world, shoal_track_create(NULL, "x", &first) == SHOAL_ERR_ARGUMENT, "no communicator");
    OK(world, shoal_track_create(world->comm, "one", &first));
    OK(world, shoal_track_create(world->comm, "two \"2\", of a name that is longer than a recorder keeps", &second));
    shoal_track_end(first, SHOAL_OK); /* nothing is under way: nothing happens */
    shoal_track_start(first);
    shoal_track_wait(first, 1, 4);
    shoal_track_begin(first, &forward);
    shoal_track_wait(first, 1, 4);
    shoal_track_begin(first, &backward); /* ends the other one */
    shoal_track_start(first);
    shoal_track_end(first, SHOAL_ERR_TIMEOUT);
    shoal_track_begin(second, &forward);
    char *text = print_flight(world);
    CHECK(world, count_lines(text, "\n") == 3 && count_lines(text, "\"comm\":\"one\"") == 2, "%s", text);
    CHECK(world, strstr(text, "\"sequence\":7,\"kind\":\"forward\",\"algorithm\":\"\",\"count\":2,"), "%s", text);
    CHECK(world, strstr(text, "\"tag\":5,\"status\":\"SHOAL_OK\"") && strstr(text, "\"step\":4,\"peer\":1,"), "%s", text);
    CHECK(world, strstr(text, "\"tag\":6,\"status\":\"SHOAL_ERR_TIMEOUT\""), "%s", text);
    CHECK(world, strstr(text, "{\"comm\":\"two \\\"2\\\", of a name that is long\""), "%s", text);
    CHECK(world, count_lines(text, "\"status\":\"SHOAL_PENDING\"") == 1, "%s", text);
    free(text);
    for (uint64_t i = 0; i < 1500; i++)
        shoal_track_begin(first, &(struct shoal_span){"forward", i, 0, 0});
    OK(world, shoal_barrier(world->comm, NULL));
    text = print_flight(world);
    CHECK(world, count_lines(text, "\n") == 1024 + 1 + 1, "%zu lines", count_lines(text, "\n"));
    free(text);
}

static void late_rank_is_named(struct world *world)
{
    float x = 1;
    struct shoal_operation operation = {.struct_bytes = sizeof operation};
    OK(world, shoal_barrier(world->comm, NULL));
    struct shoal_request *request;
    for (int r = 0; world->rank == 1 && r < world->size; r++) {
        while (r != 1 && !((volatile uint64_t *)world->board)[r]) /* until the others have called, however long they take */
            usleep(1000);
    }
    if (world->rank == 1)
        usleep(100000);
    OK(world, shoal_allreduce_post(world->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request));
    ((volatile uint64_t *)world->board)[world->rank] = 1;
    OK(world, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
    OK(world, shoal_last_operation(world->comm, &operation));
    CHECK(world, operation.last_rank == 1, "rank %d was named", operation.last_rank);
    CHECK(world, operation.late_us > 50e3 && operation.late_us < 5e6, "late by %.0f us", operation.late_us);
    CHECK(world, strcmp(operation.algorithm, "direct") == 0, "%s", operation.algorithm);
}

static void memory_is_counted(struct world *world)
{
    struct shoal_memory_usage before = {.struct_bytes = sizeof before}, after = before;
    float *x = calloc(COUNT, sizeof *x);
    OK(world, shoal_comm_memory(world->comm, &before));
    CHECK(world, before.control_bytes > 0 && before.local_bytes > 0 && before.staging_bytes == 0, "%zu %zu %zu",
          before.control_bytes, before.local_bytes, before.staging_bytes);
    OK(world, shoal_allreduce(world->comm, x, x, COUNT, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    OK(world, shoal_comm_memory(world->comm, &after));
    CHECK(world, after.staging_bytes >= 1 << 20, "the staging buffer is %zu bytes", after.staging_bytes);
    free(x);
}

/* Rank 0 sends to the last rank only. Bytes that leave the host are counted in all and for each receiver; no others are. */
static void traffic_is_counted_by_receiver(struct world *world)
{
    static float x[COUNT];
    uint64_t before[4], after[4], sum = 0;
    const int last = world->size - 1;
    struct shoal_place own = SHOAL_PLACE_INIT, place = SHOAL_PLACE_INIT;
    struct shoal_traffic traffic = SHOAL_TRAFFIC_INIT;
    traffic.sent_to = before;
    OK(world, shoal_comm_traffic(world->comm, &traffic));
    if (world->rank == 0)
        OK(world, shoal_send(world->comm, x, COUNT, SHOAL_FLOAT32, last, 0, NULL));
    if (world->rank == last)
        OK(world, shoal_recv(world->comm, x, COUNT, SHOAL_FLOAT32, 0, 0, NULL));
    traffic.sent_to = after;
    OK(world, shoal_comm_traffic(world->comm, &traffic));
    OK(world, shoal_comm_place(world->comm, world->rank, &own));
    for (int r = 0; r < world->size; r++) {
        const bool is_message = own.hosts > 1 && world->rank == 0 && r == last;
        OK(world, shoal_comm_place(world->comm, r, &place));
        CHECK(world, place.host != own.host || after[r] == 0, "%zu bytes left the host to rank %d", (size_t)after[r], r);
        CHECK(world, (after[r] - before[r] >= sizeof x) == is_message, "%zu bytes to rank %d", (size_t)(after[r] - before[r]),
              r);
        sum += after[r];
    }
    CHECK(world, sum == traffic.sent_bytes, "%zu bytes to all ranks, %zu in all", (size_t)sum, (size_t)traffic.sent_bytes);
    traffic.struct_bytes = offsetof(struct shoal_traffic, sent_to); /* a program that does not know this field */
    memset(after, 0xff, sizeof after);
    OK(world, shoal_comm_traffic(world->comm, &traffic));
    CHECK(world, after[last] == UINT64_MAX, "memory of a field that the program does not know was written");
}

/* The caller's own shared memory, registered with its descriptor, is accessible to the other ranks like memory of
 * shoal_mem_alloc. */
static void registered_memory_is_shared(struct world *world)
{
    const size_t bytes = COUNT * sizeof(float);
    const int fd = memfd_create("test", MFD_CLOEXEC);
    CHECK(world, fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "no memfd");
    float *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(world, x != MAP_FAILED, "no mapping");
    OK(world, shoal_mem_register(world->context, x, bytes, fd, 0));
    close(fd);
    for (size_t i = 0; i < COUNT; i++)
        x[i] = (float)world->rank + (float)(i % 5);
    OK(world, shoal_allreduce(world->comm, x, x, COUNT, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    for (size_t i = 0; i < COUNT; i++)
        CHECK(world, x[i] == (float)(world->size * (int)(i % 5) + world->size * (world->size - 1) / 2), "element %zu is %g", i,
              (double)x[i]);
    struct shoal_operation operation = {.struct_bytes = sizeof operation};
    OK(world, shoal_last_operation(world->comm, &operation));
    CHECK(world, strcmp(operation.algorithm, "owners-shared") == 0, "it ran as %s", operation.algorithm);
    OK(world, shoal_mem_deregister(world->context, x));
    CHECK(world, shoal_mem_deregister(world->context, x) == SHOAL_ERR_ARGUMENT, "twice");
    OK(world, shoal_allreduce(world->comm, x, x, COUNT, SHOAL_FLOAT32, SHOAL_MAX, NULL));
    OK(world, shoal_last_operation(world->comm, &operation));
    CHECK(world, strcmp(operation.algorithm, "owners-staged") == 0, "after that it ran as %s", operation.algorithm);
    munmap(x, bytes);
}

static char folder[] = "/tmp/shoal-observe-XXXXXX";

static char *read_file(const char *name)
{
    char path[256];
    static char text[1 << 16];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[length] = 0;
    if (file)
        fclose(file);
    unlink(path);
    return text;
}

static void abort_from_rank_1(struct world *world)
{
    float x = 1;
    OK(world, shoal_allreduce(world->comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    world_meet(world);
    if (world->rank == 1)
        shoal_comm_abort(world->comm);
    CHECK(world, shoal_barrier(world->comm, NULL) == SHOAL_ERR_ABORTED, "no abort");
    shoal_comm_free(world->comm);
    shoal_context_destroy(world->context);
    exit(0); /* there is nothing left to finalize */
}

/* All ranks except rank 1 have nothing posted. They learn of the abort because they ask. */
static void idle_ranks_ask(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    enum shoal_status status = SHOAL_PENDING;
    OK(world, shoal_barrier(world->comm, NULL));
    CHECK(world, shoal_last_failure(world->context, world->comm, &failure) == SHOAL_PENDING, "a failure before the abort");
    world->board[world->rank] = 1;
    for (int r = 0; world->rank == 1 && r < world->size; r++) {
        while (!world->board[r])
            usleep(1000);
    }
    if (world->rank == 1)
        shoal_comm_abort(world->comm);
    for (int ms = 0; ms < 30000 && status == SHOAL_PENDING; ms++) {
        usleep(1000);
        status = shoal_last_failure(world->context, world->comm, &failure);
    }
    CHECK(world, status == SHOAL_OK && failure.status == SHOAL_ERR_ABORTED && failure.rank == 1, "%s: %s, rank %d: %s",
          shoal_status_name(status), shoal_status_name(failure.status), failure.rank, failure.text);
    shoal_comm_free(world->comm);
    shoal_context_destroy(world->context);
    exit(0);
}

/* Each rank writes one file, named by the pattern, when its communicator fails and when that is freed. Its line on the communicator has what a reader needs. */
static void check_files(void)
{
    bool is_ok = true;
    for (int rank = 0; rank < 2; rank++) {
        char name[32];
        snprintf(name, sizeof name, "log.%d", rank);
        const char *log = read_file(name);
        is_ok &= strstr(log, "communicator world: 2 ranks on 1 host") && strstr(log, "shared memory, because") &&
                 strstr(log, shoal_version()) && strstr(log, "rank 1 called shoal_comm_abort");
        snprintf(name, sizeof name, "flight.%d", rank);
        const char *flight = read_file(name);
        is_ok &= count_lines(flight, "\"kind\":\"all-reduce\"") == 2;
    }
    rmdir(folder);
    world_report(is_ok, "log_and_recorder_files_are_written_for_each_rank");
}

int main(void)
{
    static char log_file[128], recorder_file[128];
    setvbuf(stdout, NULL, _IOLBF, 0); /* else a rank that exits would print our buffered lines again */
    static const char *files[] = {"SHOAL_LOG=info", log_file, recorder_file, NULL};
    world_run(&(struct world_options){"recorder_keeps_the_last_operations", 2, NULL, recorder_keeps_the_last_operations, NULL});
    world_run(&(struct world_options){"tracks_are_written_with_their_communicator", 2, NULL,
                                      tracks_are_written_with_their_communicator, NULL});
    world_run(&(struct world_options){"late_rank_is_named", 3, NULL, late_rank_is_named, NULL});
    memset(world_board(), 0, 4 * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_is_counted", 2, NULL, memory_is_counted, NULL});
    world_run(&(struct world_options){"traffic_is_counted_by_receiver", 4, NULL, traffic_is_counted_by_receiver, NULL});
    world_run(&(struct world_options){"registered_memory_is_shared", 3, NULL, registered_memory_is_shared, NULL});
    if (!mkdtemp(folder))
        return 1;
    snprintf(log_file, sizeof log_file, "SHOAL_LOG_FILE=%s/log.%%r", folder);
    snprintf(recorder_file, sizeof recorder_file, "SHOAL_TRACE_FILE=%s/flight.%%r", folder);
    world_run(&(struct world_options){"abort_reaches_all", 2, files, abort_from_rank_1, NULL});
    check_files();
    world_run(&(struct world_options){"idle_ranks_ask_for_a_failure", 3, NULL, idle_ranks_ask, NULL});
    memset(world_board(), 0, 4 * sizeof(uint64_t));
    world_divide(2);
    world_run(
        &(struct world_options){"traffic_is_counted_by_receiver, 2 hosts", 4, NULL, traffic_is_counted_by_receiver, NULL});
    world_run(&(struct world_options){"idle_ranks_ask_for_a_failure, 2 hosts", 4, NULL, idle_ranks_ask, NULL});
    return world_finish();
}
