/* Worlds that come and go in one context, as the process groups of a program do: what a world needs goes with its last
 * communicator. Ranks are processes, on one host and on two. */
#include <dirent.h>
#include <malloc.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../free_port.h"
#include "multi_world.h"

#define TURNS 16
#define WARM 6 /* turns after which nothing may grow */
#define FLOATS ((size_t)1 << 18)
/* May be kept of each world: texts of the recorder, the rounding of malloc, an address and a connection of libfabric. Before
 * worlds ended with their last communicator they left 100 KiB. */
#define HEAP_BYTES ((size_t)8192)

struct size {
    int descriptors, threads;
    size_t heap_bytes;
};

static int count_entries(const char *path)
{
    int count = 0;
    DIR *folder = opendir(path);
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

static struct size measure(void)
{
    return (struct size){count_entries("/proc/self/fd"), count_entries("/proc/self/task"), mallinfo2().uordblks};
}

/* Rank 0 writes the port of the meeting to the board. */
static struct shoal_comm *make_world(struct world *world, uint64_t turn)
{
    _Atomic uint64_t *where = (_Atomic uint64_t *)world->board;
    char address[64];
    struct shoal_comm *comm;
    if (world->rank == 0) {
        const int port = free_port();
        CHECK(world, port > 0, "no port");
        atomic_store(where, turn << 16 | (uint64_t)port);
    }
    while (atomic_load(where) >> 16 != turn)
        usleep(500);
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)(atomic_load(where) & 0xffff));
    OK(world, shoal_comm_create_at(world->context, address, world->rank, world->size, NULL, &comm));
    return comm;
}

static void use_world(struct world *world, struct shoal_comm *comm)
{
    static float x[FLOATS];
    const int size = shoal_comm_size(comm);
    for (size_t i = 0; i < FLOATS; i++)
        x[i] = 1;
    OK(world, shoal_allreduce(comm, x, x, FLOATS, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(world, x[0] == (float)size && x[FLOATS - 1] == (float)size, "the sum is %g", (double)x[0]);
}

/* The memory is exported to peers that go and come. */
static void use_shared_memory(struct world *world, struct shoal_comm *comm, float *x)
{
    for (size_t i = 0; i < 1000; i++)
        x[i] = 2;
    OK(world, shoal_allreduce(comm, x, x, 1000, SHOAL_FLOAT32, SHOAL_SUM, NULL));
    CHECK(world, x[0] == 2 * (float)world->size, "the sum is %g", (double)x[0]);
}

static void expect_level(const struct world *world, const struct size *before)
{
    const struct size now = measure();
    /* A leak is one at least for each world. libfabric may close the socket of a process that has ended a little later. */
    const int some = (TURNS - WARM) / 2;
    CHECK(world, now.descriptors < before->descriptors + some, "%d descriptors after %d worlds, %d after %d", now.descriptors,
          TURNS, before->descriptors, WARM);
    CHECK(world, now.threads < before->threads + some, "%d threads, %d before", now.threads, before->threads);
    CHECK(world, now.heap_bytes < before->heap_bytes + (TURNS - WARM) * HEAP_BYTES, "%zu bytes of heap for each world",
          (now.heap_bytes - before->heap_bytes) / (TURNS - WARM));
}

/* The first world of the process goes, too, so that no later one shares anything with it. */
static void end_first_world(struct world *world)
{
    OK(world, shoal_comm_finalize(world->comm));
    shoal_comm_free(world->comm);
    world->comm = NULL;
}

static void worlds_come_and_go(struct world *world)
{
    struct size before = {0};
    void *memory;
    end_first_world(world);
    OK(world, shoal_mem_alloc(world->context, 4096, &memory));
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        struct shoal_comm *comm = make_world(world, turn);
        use_world(world, comm);
        use_shared_memory(world, comm, memory);
        if (turn % 2)
            OK(world, shoal_comm_finalize(comm));
        shoal_comm_free(comm);
        if (turn == WARM)
            before = measure();
    }
    expect_level(world, &before);
    world->comm = make_world(world, TURNS + 1); /* for the end of the test */
    OK(world, shoal_mem_free(world->context, memory));
}

/* A split keeps what its world needs. */
static void a_split_outlives_the_communicator_that_it_came_from(struct world *world)
{
    struct size before = {0};
    end_first_world(world);
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        struct shoal_comm *comm = make_world(world, turn), *split, *part;
        OK(world, shoal_comm_split(comm, 0, -world->rank, NULL, &split));
        OK(world, shoal_comm_finalize(comm));
        shoal_comm_free(comm);
        OK(world, shoal_comm_split(split, world->rank % 2, 0, NULL, &part));
        use_world(world, split);
        use_world(world, part);
        OK(world, shoal_comm_finalize(split));
        shoal_comm_free(split);
        use_world(world, part);
        shoal_comm_free(part);
        if (turn == WARM)
            before = measure();
    }
    expect_level(world, &before);
    world->comm = make_world(world, TURNS + 1); /* for the end of the test */
}

/* Two worlds share the connections of a host, and the memory that was passed over them. */
static void a_world_takes_nothing_from_another(struct world *world)
{
    void *memory;
    OK(world, shoal_mem_alloc(world->context, 4096, &memory));
    use_shared_memory(world, world->comm, memory);
    for (uint64_t turn = 1; turn <= 3; turn++) {
        struct shoal_comm *comm = make_world(world, turn);
        use_world(world, comm);
        shoal_comm_free(comm);
        use_world(world, world->comm);
        use_shared_memory(world, world->comm, memory);
    }
    OK(world, shoal_mem_free(world->context, memory));
}

/* As a program does that makes its group anew when a rank was lost. */
static void broken_worlds_come_and_go(struct world *world)
{
    struct size before = {0};
    _Atomic uint64_t *used = (_Atomic uint64_t *)&world->board[1]; /* by how many ranks, in all turns */
    end_first_world(world);
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        struct shoal_comm *comm = make_world(world, turn);
        float x = 1;
        use_world(world, comm);
        atomic_fetch_add(used, 1);
        while (world->rank == 1 && atomic_load(used) < turn * (uint64_t)world->size)
            usleep(500);
        if (world->rank == 1)
            shoal_comm_abort(comm);
        const enum shoal_status status = shoal_allreduce(comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL);
        CHECK(world, status == SHOAL_ERR_ABORTED, "%s", shoal_status_name(status));
        shoal_comm_free(comm);
        if (turn == WARM)
            before = measure();
    }
    expect_level(world, &before);
    world->comm = make_world(world, TURNS + 1); /* for the end of the test */
}

#define QUIET "SHOAL_LOG_FILE=/dev/null" /* some ranks are lost on purpose */
/* Not libfabric 1.17's "net": with it, the first message to a new process is lost now and then. */
#define BETWEEN_HOSTS "SHOAL_PROVIDER=tcp;ofi_rxm"

/* The last rank is a process of its own in each turn, as after a loss. */
static void processes_come_and_go(struct world *world)
{
    const int *ranks_per_host = world->arg;
    struct size before = {0};
    char host[64];
    end_first_world(world);
    snprintf(host, sizeof host, "SHOAL_HOST_ID=host-%d", *ranks_per_host ? world->rank / *ranks_per_host : 0);
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        const bool is_replaced = world->rank == world->size - 1;
        const pid_t child = is_replaced ? fork() : 0;
        int status = 0;
        if (child == 0) {
            const char *const settings[] = {QUIET, BETWEEN_HOSTS, *ranks_per_host ? host : NULL, NULL};
            struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
            options.settings = settings;
            if (is_replaced)
                OK(world, shoal_context_create(&options, &world->context));
            struct shoal_comm *comm = make_world(world, turn);
            use_world(world, comm);
            OK(world, shoal_comm_finalize(comm));
            shoal_comm_free(comm);
        }
        if (child == 0 && is_replaced) {
            shoal_context_destroy(world->context);
            _exit(0);
        }
        CHECK(world, child == 0 || (waitpid(child, &status, 0) == child && status == 0), "the process ended with %d", status);
        if (turn == WARM)
            before = measure();
    }
    expect_level(world, &before);
    world->comm = make_world(world, TURNS + 1); /* for the end of the test */
}

int main(int argument_count, char **arguments)
{
    static const struct {
        const char *name;
        world_body_fn body;
    } cases[] = {
        {"worlds_come_and_go", worlds_come_and_go},
        {"a_split_outlives_the_communicator_that_it_came_from", a_split_outlives_the_communicator_that_it_came_from},
        {"a_world_takes_nothing_from_another", a_world_takes_nothing_from_another},
        {"broken_worlds_come_and_go", broken_worlds_come_and_go},
        {"processes_come_and_go", processes_come_and_go},
    };
    static const char *const settings[] = {QUIET, BETWEEN_HOSTS, NULL};
    static const int sizes[] = {2, 4, 3}, ranks_per_host[] = {1, 2, 0};
    world_choose(argument_count, arguments);
    for (int layout = 0; layout < 3; layout++) {
        world_divide(ranks_per_host[layout]);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            char name[128];
            snprintf(name, sizeof name, "%s: %d ranks, %d on a host", cases[i].name, sizes[layout],
                     ranks_per_host[layout] ? ranks_per_host[layout] : sizes[layout]);
            memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
            world_run(&(struct world_options){name, sizes[layout], settings, cases[i].body, &ranks_per_host[layout]});
        }
    }
    return world_finish();
}
