#include "multi_world.h"

#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../free_port.h"

#define RANK_SECONDS_MAX 240 /* a rank that runs longer counts as hung */
#define SETTINGS_MAX 16
#define SKIPPED 77

static int count, failed, ranks_per_host;
static int killed_rank; /* 0: none */
static uint64_t *board; /* WORLD_BOARD numbers, and one for world_meet() */
static char **words; /* parts of the names of worlds to run, NULL at the end; NULL: run all */

uint64_t *world_board(void)
{
    if (!board)
        board = mmap(NULL, (WORLD_BOARD + 1) * sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return board;
}

void world_fail(const struct world *world, const char *file, int line, const char *format, ...)
{
    char text[1024], seed[40] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (world->seed)
        snprintf(seed, sizeof seed, "seed %llu, ", (unsigned long long)world->seed);
    fprintf(stderr, "# %srank %d of %d, %s:%d: %s\n", seed, world->rank, world->size, file, line, text);
    _exit(1);
}

void world_meet(struct world *world)
{
    _Atomic uint64_t *const come = (_Atomic uint64_t *)&world->board[WORLD_BOARD]; /* calls of all ranks */
    const uint64_t size = (uint64_t)world->size, turn = atomic_fetch_add(come, 1) / size;
    while (atomic_load(come) < (turn + 1) * size)
        usleep(100);
}

void world_agree(struct world *world, enum shoal_status status)
{
    world->board[world->rank] = (uint64_t)status;
    OK(world, shoal_barrier(world->comm, NULL));
    for (int rank = 0; rank < world->size; rank++)
        CHECK(world, world->board[rank] == (uint64_t)status, "%s here, and %s on rank %d", shoal_status_name(status),
              shoal_status_name((enum shoal_status)world->board[rank]), rank);
    OK(world, shoal_barrier(world->comm, NULL));
}

static const char *const *add_host(const struct world_options *options, int rank, const char **settings, char *host,
                                   size_t host_bytes)
{
    int own = 0;
    for (; options->settings && options->settings[own] && own < SETTINGS_MAX - 1; own++)
        settings[own] = options->settings[own];
    snprintf(host, host_bytes, "SHOAL_HOST_ID=host-%d", rank / ranks_per_host);
    settings[own] = host;
    settings[own + 1] = NULL;
    return settings;
}

__attribute__((noreturn)) static void run_rank(const struct world_options *options, int rank, const char *address)
{
    struct world world = {.rank = rank, .size = options->size, .board = board, .arg = options->arg};
    struct shoal_context_options context_options = SHOAL_CONTEXT_OPTIONS_INIT;
    struct shoal_comm_options comm_options = SHOAL_COMM_OPTIONS_INIT;
    const char *settings[SETTINGS_MAX + 1];
    char host[40];
    context_options.settings = options->settings;
    if (ranks_per_host)
        context_options.settings = add_host(options, rank, settings, host, sizeof host);
    comm_options.timeout_ms = 60000;
    alarm(RANK_SECONDS_MAX);
    OK(&world, shoal_context_create(&context_options, &world.context));
    const enum shoal_status met = shoal_comm_create_at(world.context, address, rank, options->size, &comm_options, &world.comm);
    if (ranks_per_host && met == SHOAL_ERR_UNSUPPORTED)
        exit(SKIPPED);
    OK(&world, met);
    options->body(&world);
    OK(&world, shoal_comm_finalize(world.comm));
    shoal_comm_free(world.comm);
    shoal_context_destroy(world.context);
    exit(0); /* not _exit: the leak checker runs at exit */
}

/* ---- In a body ----------------------------------------------------------------------------------------------------------- */

struct world_group world_all(const struct world *world)
{
    struct world_group group = {world->comm, world->size, {0}};
    for (int r = 0; r < world->size; r++)
        group.members[r] = r;
    return group;
}

/* Orders members by key, then by rank, as shoal_comm_split must. */
static struct world_group expect_group(const struct world_group *parent, const int *colors, const int *keys, int own)
{
    struct world_group group = {NULL, 0, {0}};
    bool is_taken[WORLD_RANKS_MAX] = {false};
    for (int turn = 0; turn < parent->size && colors[own] >= 0; turn++) {
        int next = -1;
        for (int r = 0; r < parent->size; r++) {
            if (!is_taken[r] && colors[r] == colors[own] && (next < 0 || keys[r] < keys[next]))
                next = r;
        }
        if (next < 0)
            break;
        is_taken[next] = true;
        group.members[group.size++] = parent->members[next];
    }
    return group;
}

struct world_group world_split(struct world *world, const struct world_group *parent, const int *colors, const int *keys)
{
    const int own = shoal_comm_rank(parent->comm);
    struct world_group group = expect_group(parent, colors, keys, own);
    OK(world, shoal_comm_split(parent->comm, colors[own], keys[own], NULL, &group.comm));
    if (colors[own] < 0) {
        CHECK(world, !group.comm, "a negative color gave a communicator");
        return group;
    }
    CHECK(world, shoal_comm_size(group.comm) == group.size, "%d members, not %d", shoal_comm_size(group.comm), group.size);
    CHECK(world, group.members[shoal_comm_rank(group.comm)] == world->rank, "number %d is not mine",
          shoal_comm_rank(group.comm));
    return group;
}

struct team world_team(const struct world_group *group)
{
    return (struct team){group->size, shoal_comm_rank(group->comm), group->members};
}

#define CACHE_LINE 64

struct areas world_open_areas(struct world *world, size_t bytes)
{
    struct areas areas = {.bytes = bytes, .device = world->device};
    for (int i = 0; i < 2; i++) {
        void *memory;
        areas.plain[i] = aligned_alloc(CACHE_LINE, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
        CHECK(world, areas.plain[i], "no memory");
        OK(world, shoal_mem_alloc(world->context, bytes, &memory));
        areas.shared[i] = memory;
        if (world->device) {
            areas.twins[i] = world->device->allocate(bytes);
            world->device->pin(areas.shared[i], bytes);
        }
    }
    return areas;
}

void world_close_areas(struct world *world, struct areas *areas)
{
    for (int i = 0; i < 2; i++) {
        free(areas->plain[i]);
        if (areas->device) {
            areas->device->unpin(areas->shared[i]);
            areas->device->release(areas->twins[i]);
        }
        OK(world, shoal_mem_free(world->context, areas->shared[i]));
    }
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* Waits for all ranks. When one has failed, the others learn it through Shoal; those that do not within a second are killed. */
static bool gather(const struct world_options *options, pid_t *ranks, bool *is_skipped)
{
    bool is_ok = true;
    *is_skipped = false;
    for (int left = options->size; left > 0; left--) {
        int status;
        const pid_t pid = wait(&status);
        for (int r = 0; r < options->size; r++) {
            if (ranks[r] != pid)
                continue;
            ranks[r] = 0;
            const bool is_killed = killed_rank && r == killed_rank;
            if (is_killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 0)
                continue;
            if (ranks_per_host && WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
                *is_skipped = true;
                continue;
            }
            fprintf(stderr, "# %s: rank %d ended with %s %d\n", options->name, r, WIFSIGNALED(status) ? "signal" : "code",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            if (is_ok) {
                sleep(1);
                for (int other = 0; other < options->size; other++) {
                    if (ranks[other] > 0)
                        kill(ranks[other], SIGKILL);
                }
            }
            is_ok = false;
        }
    }
    return is_ok;
}

void world_report(bool is_ok, const char *name)
{
    failed += !is_ok;
    printf("%s %d - %s\n", is_ok ? "ok" : "not ok", ++count, name);
    fflush(stdout);
}

/* A leak checker reads this. Memory that libfabric keeps until the process ends is not a leak of the tests. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libfabric.so\n";
}

void world_expect_kill(int rank)
{
    killed_rank = rank;
}

void world_divide(int ranks)
{
    ranks_per_host = ranks;
}

void world_choose(int argument_count, char **arguments)
{
    words = argument_count > 1 ? arguments + 1 : NULL;
}

static bool is_chosen(const char *name)
{
    for (char **word = words; word && *word; word++)
        if (strstr(name, *word))
            return true;
    return !words;
}

bool world_run(const struct world_options *options)
{
    char address[32];
    pid_t ranks[WORLD_RANKS_MAX];
    if (!is_chosen(options->name))
        return true;
    const int port = free_port();
    if (port < 0) {
        perror("no free port");
        exit(1);
    }
    world_board()[WORLD_BOARD] = 0;
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    for (int r = 0; r < options->size; r++) {
        ranks[r] = fork();
        if (ranks[r] == 0)
            run_rank(options, r, address);
        if (ranks[r] < 0) {
            perror("fork");
            exit(1);
        }
    }
    char name[256];
    bool is_skipped;
    const bool is_ok = gather(options, ranks, &is_skipped);
    snprintf(name, sizeof name, "%s%s", options->name, is_ok && is_skipped ? " # SKIP no network joins several hosts" : "");
    world_report(is_ok, name);
    return is_ok;
}

int world_finish(void)
{
    printf("1..%d\n", count);
    return failed > 0 || (words && count == 0);
}
