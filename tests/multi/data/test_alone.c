/* Calls of one rank that are early, late or alone must not hold up the others, nor reach into memory that they have taken
 * back. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "comm/context.h"
#include "engine/engine_state.h"
#include "engine/progress_state.h"
#include "multi_world.h"

#define SENDS 100
#define FLOATS ((size_t)1 << 20)
#define LONG_S 60 /* far longer than a call takes on a busy machine, far below the deadline of 600 s */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* More messages than the queue holds are sent before any is received, with a barrier in between. */
static void small_sends_do_not_wait_for_their_receives(struct world *world)
{
    static char message[SHOAL_EAGER_BYTES];
    for (int i = 0; i < SENDS && world->rank == 1; i++) {
        memset(message, i, sizeof message);
        OK(world, shoal_send(world->comm, message, sizeof message / 8, SHOAL_INT64, 0, 7, NULL));
    }
    OK(world, shoal_barrier(world->comm, NULL));
    for (int i = 0; i < SENDS && world->rank == 0; i++) {
        OK(world, shoal_recv(world->comm, message, sizeof message / 8, SHOAL_INT64, 1, 7, NULL));
        CHECK(world, message[0] == (char)i && message[sizeof message - 1] == (char)i, "message %d came out of order", i);
    }
}

/* One rank has no memory for its part of a new communicator. It gets that error, the others learn that it failed; nobody
 * waits. */
static void split_that_one_rank_cannot_make_fails_everywhere(struct world *world)
{
    struct shoal_comm *half = NULL;
    void *memory;
    for (size_t bytes = 1 << 20; world->rank == 1 && bytes >= 4096;) /* uses up all memory */
        bytes = shoal_mem_alloc(world->context, bytes, &memory) == SHOAL_OK ? bytes : bytes / 2;
    const double start = seconds();
    const enum shoal_status status = shoal_comm_split(world->comm, 0, 0, NULL, &half);
    CHECK(world, status == (world->rank == 1 ? SHOAL_ERR_MEMORY : SHOAL_ERR_PEER_LOST), "%s", shoal_status_name(status));
    CHECK(world, seconds() - start < LONG_S, "it took %.1f s", seconds() - start);
    OK(world, shoal_barrier(world->comm, NULL)); /* the parent is unchanged */
}

/* Waits until a signal has stopped the process. */
static void await_stop(pid_t pid)
{
    char path[64], state = '?';
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    for (; state != 'T'; usleep(1000)) {
        FILE *stat = fopen(path, "r");
        if (!stat || fscanf(stat, "%*d (%*[^)]) %c", &state) != 1)
            state = '?';
        if (stat)
            fclose(stat);
    }
}

/* Counts in its memory until it is told to stop. */
struct counting {
    pthread_t thread;
    _Atomic uint64_t *at;
    uint64_t counted;
    atomic_bool must_stop;
};

static void *count_on(void *arg)
{
    struct counting *counting = arg;
    while (!atomic_load(&counting->must_stop)) {
        if (atomic_fetch_add(counting->at, 1) != counting->counted++)
            break;
    }
    return NULL;
}

static void free_beside_a_thread(struct world *world, struct shoal_comm *comm)
{
    struct counting counting = {.counted = 0};
    void *memory;
    OK(world, shoal_mem_alloc(world->context, 4096, &memory));
    counting.at = memory;
    atomic_store(counting.at, 0);
    CHECK(world, pthread_create(&counting.thread, NULL, count_on, &counting) == 0, "no thread");
    shoal_comm_free(comm);
    atomic_store(&counting.must_stop, true);
    pthread_join(counting.thread, NULL);
    CHECK(world, atomic_load(counting.at) == counting.counted, "a write to other memory is lost");
    OK(world, shoal_mem_free(world->context, memory));
}

/* Makes a communicator, and uses shared memory with it. */
static float *share_memory(struct world *world, struct shoal_comm **comm_out)
{
    void *memory;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, comm_out));
    OK(world, shoal_mem_alloc(world->context, FLOATS * sizeof(float), &memory));
    OK(world, shoal_allreduce(*comm_out, memory, memory, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    return memory;
}

/* Rank 1 stops in the middle of writing to rank 0's memory, and continues when rank 0 lets it. */
static void stop_while_writing(struct world *world, struct shoal_comm *comm)
{
    struct shoal_transport *transport = comm->engine->transport;
    enum shoal_status error = SHOAL_OK;
    const struct shoal_announcement *announcement = transport->ops->announcement(transport, 0, shoal_intake_done(comm->engine));
    float *theirs = transport->ops->reach(transport, 0, announcement->output, FLOATS * sizeof(float), &error);
    CHECK(world, theirs && transport->ops->enter(transport), "no reach");
    world->board[1] = (uint64_t)getpid();
    raise(SIGSTOP);
    for (size_t i = 0; i < FLOATS; i++)
        theirs[i] = -1;
    transport->ops->leave(transport);
    world->board[2] = 1;
}

/* Waits until rank 1 has stopped, fills the memory, and breaks the communicator. */
static void break_without_rank_1(struct world *world, struct shoal_comm *comm, float *x)
{
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    soon.timeout_ms = 300;
    while (!((volatile uint64_t *)world->board)[1])
        usleep(1000);
    await_stop((pid_t)world->board[1]);
    for (size_t i = 0; i < FLOATS; i++)
        x[i] = (float)(i % 100);
    CHECK(world, shoal_allreduce(comm, x, x, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, &soon) == SHOAL_ERR_TIMEOUT, "no time-out");
}

/* Lets rank 1 continue: what it writes must not be seen. */
static void check_late_writes(struct world *world, const float *x)
{
    CHECK(world, kill((pid_t)world->board[1], SIGCONT) == 0, "rank 1 is gone");
    while (!((volatile uint64_t *)world->board)[2])
        usleep(1000);
    for (size_t i = 0; i < FLOATS; i++)
        CHECK(world, x[i] == (float)(i % 100), "element %zu was overwritten with %g", i, (double)x[i]);
}

/* Rank 1 continues after rank 0 has freed the communicator. Meanwhile a thread of rank 0 writes to other memory. None of these
 * writes is lost; writes to the same memory may be, see shoal_comm_free. */
static void memory_taken_back_is_out_of_reach(struct world *world)
{
    struct shoal_comm *comm;
    float *x = share_memory(world, &comm);
    if (world->rank == 1) {
        stop_while_writing(world, comm);
        shoal_comm_free(comm);
        return;
    }
    break_without_rank_1(world, comm, x);
    const double start = seconds();
    free_beside_a_thread(world, comm);
    CHECK(world, seconds() - start > 0.5 && seconds() - start < LONG_S, "freeing took %.1f s", seconds() - start);
    check_late_writes(world, x);
    OK(world, shoal_mem_free(world->context, x));
}

/* Rank 1 continues after rank 0 has made a communicator without it, which uses the same memory. */
static void memory_of_a_shrunk_communicator_is_out_of_reach(struct world *world)
{
    const int excluded = 1;
    struct shoal_comm *comm, *smaller = NULL;
    float *x = share_memory(world, &comm);
    if (world->rank == 1) {
        stop_while_writing(world, comm);
        const enum shoal_status status = shoal_comm_shrink(comm, NULL, 0, NULL, &smaller);
        CHECK(world, status == SHOAL_ERR_PEER_LOST && !smaller, "%s", shoal_status_name(status));
        shoal_comm_free(comm);
        return;
    }
    break_without_rank_1(world, comm, x);
    OK(world, shoal_comm_shrink(comm, &excluded, 1, NULL, &smaller));
    for (size_t i = 0; i < FLOATS; i++)
        x[i] = (float)(i % 100);
    check_late_writes(world, x);
    OK(world, shoal_allreduce(smaller, x, x, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(world, x[FLOATS - 1] == (float)((FLOATS - 1) % 100), "a sum of one rank is %g", (double)x[FLOATS - 1]);
    shoal_comm_free(comm);
    shoal_comm_free(smaller);
    OK(world, shoal_mem_free(world->context, x));
}

/* Makes an all-reduce in place on `count` floats of shared memory, and checks the exact result. */
static float *use_memory(struct world *world, size_t count)
{
    void *memory;
    OK(world, shoal_mem_alloc(world->context, count * sizeof(float), &memory));
    float *x = memory;
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(world->rank + (int)(i % 9));
    OK(world, shoal_allreduce(world->comm, x, x, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK(world, x[i] == (float)(world->size * (int)(i % 9) + world->size * (world->size - 1) / 2), "element %zu is %g", i,
              (double)x[i]);
    return x;
}

#define MIB ((size_t)1 << 20)
#define MIB_FLOATS (MIB / sizeof(float))

static void freed_memory_is_kept_for_the_next_use(struct world *world)
{
    float *first = use_memory(world, MIB_FLOATS);
    OK(world, shoal_mem_free(world->context, first));
    CHECK(world, shoal_mem_free(world->context, first) == SHOAL_ERR_ARGUMENT, "freed twice");
    float *small = use_memory(world, MIB_FLOATS / 8);
    CHECK(world, small != first, "an eighth of it took it all");
    for (int i = 0; i < 20; i++) { /* ranks free first in turn, and allocate less, then more */
        const size_t count = MIB_FLOATS - (size_t)(i % 5) * 1000;
        float *again = use_memory(world, count);
        CHECK(world, again == first, "it was not used again");
        if (world->rank == i % world->size)
            OK(world, shoal_mem_free(world->context, again));
        OK(world, shoal_barrier(world->comm, NULL));
        if (world->rank != i % world->size)
            OK(world, shoal_mem_free(world->context, again));
    }
    OK(world, shoal_mem_free(world->context, small));
    const struct shoal_memory_counts counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.regions == 2, "%zu pieces of memory are there", counts.regions);
}

static void memory_kept_has_a_limit(struct world *world)
{
    float *memory[4];
    for (int i = 0; i < 4; i++)
        memory[i] = use_memory(world, 3 * MIB_FLOATS);
    for (int i = 0; i < 4; i++)
        OK(world, shoal_mem_free(world->context, memory[i]));
    struct shoal_memory_counts counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached_bytes == 6 * MIB && counts.regions == 2, "%zu pieces, %llu bytes are kept", counts.regions,
          (unsigned long long)counts.cached_bytes);
    float *last = use_memory(world, 3 * MIB_FLOATS), *large = use_memory(world, 9 * MIB_FLOATS);
    CHECK(world, last == memory[2] || last == memory[3], "what was freed last is not there");
    OK(world, shoal_mem_free(world->context, large));
    counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached_bytes == 3 * MIB && counts.regions == 2, "%zu pieces, %llu bytes after a large one",
          counts.regions, (unsigned long long)counts.cached_bytes);
    void *small[300];
    for (int i = 0; i < 300; i++)
        OK(world, shoal_mem_alloc(world->context, 64, &small[i]));
    for (int i = 0; i < 300; i++)
        OK(world, shoal_mem_free(world->context, small[i]));
    counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached == 256 && counts.regions == 257, "%zu small pieces are kept", counts.cached);
    float *use = use_memory(world, 7 * MIB_FLOATS);
    OK(world, shoal_mem_free(world->context, use)); /* leaves room for only one MiB */
    counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached == 256 && counts.cached_bytes == 7 * MIB + 255 * 4096, "%zu pieces, %llu bytes", counts.cached,
          (unsigned long long)counts.cached_bytes);
    OK(world, shoal_mem_free(world->context, last));
}

/* Each piece of freed memory holds a descriptor. When a process can open no more, these pieces go: as memory is made, as a peer's
 * arrives, and as a communicator is made. */
static void freed_memory_gives_its_descriptors_back(struct world *world)
{
    const int lowest = dup(0);
    const struct rlimit few = {(rlim_t)lowest + 24, (rlim_t)lowest + 24};
    CHECK(world, lowest >= 0 && close(lowest) == 0 && setrlimit(RLIMIT_NOFILE, &few) == 0, "no limit");
    for (size_t i = 1; i <= 100; i++)
        OK(world, shoal_mem_free(world->context, use_memory(world, i * 1100)));
    const struct shoal_memory_counts counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached > 0 && counts.cached < 30, "%zu pieces are kept", counts.cached);
    struct shoal_comm *half;
    for (int i = 0; i < 30; i++) {
        OK(world, shoal_comm_split(world->comm, 0, 0, NULL, &half));
        OK(world, shoal_mem_free(world->context, use_memory(world, (200 + (size_t)i) * 1100)));
        shoal_comm_free(half);
    }
}

/* What this rank's segments have reserved. */
static uint64_t reserved(const struct world *world)
{
    return shoal_memory_count(world->context->memory).reserved_bytes;
}

static void check_cost(struct world *world, struct shoal_comm *comm, uint64_t without, bool has_staging)
{
    struct shoal_memory_usage usage = SHOAL_MEMORY_USAGE_INIT;
    OK(world, shoal_comm_memory(comm, &usage));
    const uint64_t cost = reserved(world) - without;
    CHECK(world, cost == usage.control_bytes + usage.staging_bytes, "%llu bytes are reserved, %zu and %zu are told",
          (unsigned long long)cost, usage.control_bytes, usage.staging_bytes);
    CHECK(world, usage.control_bytes <= 96 << 10, "%zu bytes of control", usage.control_bytes);
    CHECK(world, has_staging ? usage.staging_bytes >= MIB : usage.staging_bytes == 0, "%zu bytes of staging",
          usage.staging_bytes);
}

/* A staging buffer has no pages until an operation needs it. Small operations and those on shared memory do not. All memory
 * is returned. */
static void a_communicator_costs_kilobytes_until_it_is_used(struct world *world)
{
    struct shoal_comm *comm;
    float *plain = calloc(MIB_FLOATS, sizeof(float)), *shared = use_memory(world, MIB_FLOATS);
    const uint64_t without = reserved(world);
    OK(world, shoal_comm_split(world->comm, 0, 0, NULL, &comm));
    check_cost(world, comm, without, false);
    OK(world, shoal_allreduce(comm, plain, plain, 4, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    OK(world, shoal_allreduce(comm, shared, shared, MIB_FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    check_cost(world, comm, without, false);
    OK(world, shoal_allreduce(comm, plain, plain, MIB_FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    check_cost(world, comm, without, true);
    shoal_comm_free(comm);
    CHECK(world, reserved(world) == without, "%llu bytes are left", (unsigned long long)(reserved(world) - without));
    OK(world, shoal_mem_free(world->context, shared));
    free(plain);
}

/* Kept memory does not count against the limit of 16 MiB. */
static void memory_kept_gives_way(struct world *world)
{
    struct shoal_comm *comm;
    OK(world, shoal_mem_free(world->context, use_memory(world, 8 * MIB_FLOATS)));
    float *large = use_memory(world, 12 * MIB_FLOATS);
    CHECK(world, shoal_memory_count(world->context->memory).cached_bytes == 0, "more is kept than the limit leaves");
    OK(world, shoal_mem_free(world->context, large));
    OK(world, shoal_comm_split(world->comm, 0, 0, NULL, &comm));
    float *x = calloc(MIB_FLOATS, sizeof(float));
    OK(world, shoal_allreduce(comm, x, x, MIB_FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL)); /* needs staging buffers */
    free(x);
    shoal_comm_free(comm);
}

/* A rank that has not yet noticed that a communicator broke may still write to the memory of its operations. */
static void memory_of_a_broken_communicator_is_not_kept(struct world *world)
{
    struct shoal_options soon = SHOAL_OPTIONS_INIT;
    struct shoal_comm *comm;
    soon.timeout_ms = 100;
    OK(world, shoal_comm_split(world->comm, 0, 0, NULL, &comm));
    float *used = use_memory(world, FLOATS), *other = use_memory(world, FLOATS);
    if (world->rank == 0)
        CHECK(world, shoal_allreduce(comm, used, used, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, &soon) == SHOAL_ERR_TIMEOUT,
              "no time-out");
    const size_t kept = (world->rank == 0 ? 0 : 1) * FLOATS * sizeof(float);
    OK(world, shoal_mem_free(world->context, used));
    const struct shoal_memory_counts counts = shoal_memory_count(world->context->memory);
    CHECK(world, counts.cached_bytes == kept, "%llu bytes are kept", (unsigned long long)counts.cached_bytes);
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_comm_free(comm);
    if (world->rank == 0) { /* a stopped peer may continue after the communicator is freed */
        OK(world, shoal_mem_free(world->context, other));
        CHECK(world, shoal_memory_count(world->context->memory).cached_bytes == 0, "memory is kept after a failure");
    }
}

/* Ranks report their progress on the board. While a rank waits there, it reads no messages. */
static void come_to(struct world *world, uint64_t stage)
{
    volatile uint64_t *board = world->board;
    board[world->rank] = stage;
    for (int other = 0; other < world->size; other++) {
        while (board[other] < stage)
            usleep(1000);
    }
}

/* Returns the number of pages behind the peer's mappings on this rank. */
static size_t count_pages(struct world *world, const struct shoal_shm_peer *peer)
{
    static unsigned char is_there[64 * MIB / 4096];
    size_t pages = 0;
    for (size_t i = 0; i < peer->mapped_count; i++) {
        const struct shoal_segment *segment = peer->mapped[i].segment;
        const size_t count = segment->bytes / 4096;
        CHECK(world, count <= sizeof is_there && mincore(segment->base, segment->bytes, is_there) == 0, "no mincore");
        for (size_t at = 0; at < count; at++)
            pages += is_there[at] & 1;
    }
    return pages;
}

/* The peer computes and reads no messages. That does not delay the release of its memory to the machine. */
static void memory_that_is_not_kept_loses_its_pages_at_once(struct world *world)
{
    const struct shoal_shm_peer *peer = world->context->endpoint->peers[0];
    float *x = use_memory(world, 9 * MIB_FLOATS);
    OK(world, shoal_barrier(world->comm, NULL));
    CHECK(world, count_pages(world, peer) == 9 * MIB / 4096, "%zu pages are mapped", count_pages(world, peer));
    come_to(world, 1);
    if (world->rank == 1)
        OK(world, shoal_mem_free(world->context, x));
    come_to(world, 2);
    if (world->rank == 0) {
        CHECK(world, count_pages(world, peer) == 0, "%zu pages are there", count_pages(world, peer));
        OK(world, shoal_mem_free(world->context, x));
    }
}

/* Rank 0 is about to read memory of rank 1, as a helper may be while another thread calls. Rank 1 frees the memory, and a call
 * of rank 0 learns of it. */
static void memory_freed_by_a_peer_stays_mapped_while_a_rank_reads(struct world *world)
{
    struct shoal_transport *transport = world->comm->engine->transport;
    const struct shoal_shm_peer *peer = world->context->endpoint->peers[0];
    float *x = use_memory(world, FLOATS);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0)
        CHECK(world, peer->mapped_count == 1 && transport->ops->enter(transport), "%zu mappings", peer->mapped_count);
    come_to(world, 1);
    if (world->rank == 1)
        OK(world, shoal_mem_free(world->context, x));
    come_to(world, 2);
    if (world->rank == 1)
        return;
    const struct shoal_segment *theirs = peer->mapped[0].segment;
    OK(world, shoal_mem_free(world->context, x));
    CHECK(world, peer->mapped_count == 1 && peer->mapped[0].has_ended, "%zu mappings", peer->mapped_count);
    for (size_t at = 0; at < theirs->bytes; at += 4096) /* pages that were given back read as zero */
        CHECK(world, ((volatile const char *)theirs->base)[at] == 0, "byte %zu", at);
    transport->ops->leave(transport);
    CHECK(world, peer->mapped_count == 0, "%zu mappings are left", peer->mapped_count);
}

#define PIECES 1000

/* While rank 1 reads nothing, more is passed and freed than the link between the two can hold. */
static void memory_is_unmapped_though_the_link_was_full(struct world *world)
{
    static void *pieces[PIECES];
    struct shoal_shm_endpoint *endpoint = world->context->endpoint;
    struct shoal_shm_peer *peers[] = {world->rank ? endpoint->peers[0] : NULL, world->rank ? NULL : endpoint->peers[0]};
    const struct shoal_shm_group group = {1, peers, 2};
    int passed = 0;
    for (int i = 0; i < PIECES && world->rank == 0; i++) {
        OK(world, shoal_mem_alloc(world->context, 4096, &pieces[i]));
        passed += shoal_shm_endpoint_locate(endpoint, &group, pieces[i], 1) != 0;
    }
    for (int i = 0; i < PIECES && world->rank == 0; i++)
        OK(world, shoal_mem_free(world->context, pieces[i]));
    CHECK(world, world->rank == 1 || (passed > 10 && passed < PIECES && endpoint->peers[0]->unsaid_count > 0),
          "%d pieces were passed, %zu could not be taken back", passed, endpoint->peers[0]->unsaid_count);
    come_to(world, 1);
    const double start = seconds();
    for (int i = 0;
         seconds() - start < LONG_S && (i < 10 || endpoint->peers[0]->mapped_count || endpoint->peers[0]->unsaid_count); i++) {
        shoal_shm_endpoint_drain(endpoint);
        usleep(100);
    }
    CHECK(world, endpoint->peers[0]->mapped_count == 0 && endpoint->peers[0]->unsaid_count == 0, "%zu pieces are mapped",
          endpoint->peers[0]->mapped_count);
    come_to(world, 2);
    OK(world, shoal_mem_free(world->context, use_memory(world, FLOATS))); /* the link works again */
}

/* An input on a device that is ready when its rank has slept a few times for it. */
#define NAPS 5

static const struct shoal_doorbell_ops *doorbell;
static const struct shoal_engine *napping; /* its engine */
static unsigned naps;                      /* while it waits for the device, not for the other rank */
static uint64_t longest_nap_ns;
static float late_input[FLOATS];

static void note_sleep(void *arg, uint64_t timeout_ns)
{
    if (napping->awaits_operand && naps++ < NAPS)
        longest_nap_ns = timeout_ns > longest_nap_ns ? timeout_ns : longest_nap_ns;
    doorbell->sleep_for(arg, timeout_ns);
}

static bool late_is_ready(const struct shoal_operand *operand, size_t begin, size_t end)
{
    (void)operand, (void)begin, (void)end;
    return naps >= NAPS;
}

static char *late_address(const struct shoal_operand *operand, int part, size_t at, size_t *run)
{
    (void)operand, (void)part, (void)run;
    return (char *)&late_input[at];
}

static void late_release(struct shoal_operand *operand, size_t begin, size_t end)
{
    (void)operand, (void)begin, (void)end;
}

static void late_drop(struct shoal_operand *operand)
{
    (void)operand;
}

/* A copy's end on a device wakes nobody, so a rank that waits for one looks again soon. */
static void waits_for_a_device_are_short(struct world *world)
{
    static const struct shoal_operand_ops late_ops = {
        .is_ready = late_is_ready, .address = late_address, .release = late_release, .drop = late_drop};
    static float output[FLOATS];
    struct shoal_operand late = {.ops = &late_ops};
    struct shoal_progress *progress = world->context->progress;
    struct shoal_doorbell_ops noting = *progress->doorbell.ops;
    doorbell = progress->doorbell.ops;
    napping = world->comm->engine;
    noting.sleep_for = note_sleep;
    for (size_t count = 1; count <= FLOATS && world->rank == 0; count *= FLOATS) {
        struct shoal_call call = {
            .collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = count, .output = output};
        naps = 0;
        longest_nap_ns = 0;
        late_input[count - 1] = 3;
        progress->doorbell.ops = &noting;
        struct shoal_layout *former;
        CHECK(world, shoal_call_put_operands(&call, 0, world->size, &late, NULL, &former) && !former, "no memory");
        OK(world, shoal_engine_run(world->comm->engine, &call, 1));
        progress->doorbell.ops = doorbell;
        CHECK(world, naps >= NAPS && longest_nap_ns <= 50000, "%u naps, the longest of %llu ns", naps,
              (unsigned long long)longest_nap_ns);
        CHECK(world, output[count - 1] == 3 + 1, "%zu: the sum is %g", count, (double)output[count - 1]);
    }
    for (size_t count = 1; count <= FLOATS && world->rank == 1; count *= FLOATS) {
        late_input[count - 1] = 1;
        OK(world, shoal_allreduce(world->comm, late_input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    }
    OK(world, shoal_barrier(world->comm, NULL));
}

int main(void)
{
    static const char *const limited[] = {"SHOAL_MEMORY_LIMIT=16M", NULL};
    world_board();
    world_run(&(struct world_options){"small_sends_do_not_wait_for_their_receives", 2, NULL,
                                      small_sends_do_not_wait_for_their_receives, NULL});
    world_run(&(struct world_options){"split_that_one_rank_cannot_make_fails_everywhere", 3, limited,
                                      split_that_one_rank_cannot_make_fails_everywhere, NULL});
    world_run(&(struct world_options){"waits_for_a_device_are_short", 2, NULL, waits_for_a_device_are_short, NULL});
    world_run(&(struct world_options){"a_communicator_costs_kilobytes_until_it_is_used", 3, NULL,
                                      a_communicator_costs_kilobytes_until_it_is_used, NULL});
    static const char *const keeping[] = {"SHOAL_MEMORY_KEPT=8M", NULL};
    world_run(
        &(struct world_options){"freed_memory_is_kept_for_the_next_use", 3, NULL, freed_memory_is_kept_for_the_next_use, NULL});
    world_run(&(struct world_options){"freed_memory_gives_its_descriptors_back", 2, NULL,
                                      freed_memory_gives_its_descriptors_back, NULL});
    world_run(&(struct world_options){"memory_kept_has_a_limit", 2, keeping, memory_kept_has_a_limit, NULL});
    world_run(&(struct world_options){"memory_kept_gives_way", 2, limited, memory_kept_gives_way, NULL});
    world_run(&(struct world_options){"memory_of_a_broken_communicator_is_not_kept", 2, NULL,
                                      memory_of_a_broken_communicator_is_not_kept, NULL});
    static const char *const keeping_none[] = {"SHOAL_MEMORY_KEPT=0", NULL};
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_that_is_not_kept_loses_its_pages_at_once", 2, keeping,
                                      memory_that_is_not_kept_loses_its_pages_at_once, NULL});
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_freed_by_a_peer_stays_mapped_while_a_rank_reads", 2, keeping_none,
                                      memory_freed_by_a_peer_stays_mapped_while_a_rank_reads, NULL});
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_is_unmapped_though_the_link_was_full", 2, keeping_none,
                                      memory_is_unmapped_though_the_link_was_full, NULL});
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_taken_back_is_out_of_reach", 2, NULL, memory_taken_back_is_out_of_reach, NULL});
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){"memory_of_a_shrunk_communicator_is_out_of_reach", 2, NULL,
                                      memory_of_a_shrunk_communicator_is_out_of_reach, NULL});
    return world_finish();
}
