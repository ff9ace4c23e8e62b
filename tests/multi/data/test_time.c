/* Deadlines when clocks misbehave: the processor's counter jumps, all ranks are stopped for a while, or the machine's clock
 * source is not the processor's counter. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/context.h"
#include "engine/progress_state.h"
#include "multi_world.h"

#define SOURCE_FILE "/sys/devices/system/clocksource/clocksource0/current_clocksource"
#define LATE_MS 30000 /* for a rank that comes late on a busy machine; far less than an hour */
#define HOUR_NS (3600 * SHOAL_NS_PER_S)

static enum shoal_status sum(struct shoal_comm *comm, uint32_t timeout_ms)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    float x = 1;
    options.timeout_ms = timeout_ms;
    return shoal_allreduce(comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, &options);
}

static void await(struct world *world, int place)
{
    while (!((volatile uint64_t *)world->board)[place])
        usleep(1000);
}

static void set(struct world *world, int place, uint64_t value)
{
    ((volatile uint64_t *)world->board)[place] = value;
}

/* To the library this looks like a jump: its anchor is the counter's earlier value. */
static void jump(struct world *world, int64_t ns)
{
    struct shoal_progress *progress = world->context->progress;
    shoal_progress_lock(progress);
    progress->anchor.ticks -= (uint64_t)(int64_t)((double)ns / progress->anchor.ns_per_tick);
    shoal_progress_unlock(progress);
}

static void expect_timeout(struct world *world, struct shoal_comm *comm, uint32_t timeout_ms)
{
    const uint64_t start_ns = shoal_clock_ns();
    const enum shoal_status status = sum(comm, timeout_ms);
    const uint64_t took_ms = (shoal_clock_ns() - start_ns) / SHOAL_NS_PER_MS;
    CHECK(world, status == SHOAL_ERR_TIMEOUT, "%s", shoal_status_name(status));
    CHECK(world, took_ms + 50 >= timeout_ms && took_ms < timeout_ms + 60000, "it failed after %llu ms",
          (unsigned long long)took_ms);
}

static void survive_a_jump(struct world *world)
{
    const int64_t ns = *(const int64_t *)world->arg;
    struct shoal_comm *comm;
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &comm));
    jump(world, ns);
    if (world->rank == 1)
        usleep(300000);
    OK(world, sum(comm, LATE_MS)); /* a late rank is not a lost one */
    jump(world, ns);
    if (world->rank == 0)
        expect_timeout(world, comm, 500); /* and a rank that never comes times out */
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_comm_free(comm);
}

enum { PROCESS_OF = 0, WAITS = 8, HAS_GONE_ON };

#define PATIENCE_MS 6000 /* ten times the expected time, because the machine may also stall */
#define STOP_MS 8000

/* Stops both ranks for longer than their deadline, as job control or the machine would. An independent process does it. */
static void stop_all_for_a_while(struct world *world)
{
    const volatile uint64_t *board = world->board;
    const pid_t child = fork();
    if (child) {
        CHECK(world, child > 0, "no process");
        return;
    }
    await(world, WAITS);
    usleep(300000);
    for (int r = 0; r < world->size; r++)
        kill((pid_t)board[PROCESS_OF + r], SIGSTOP);
    usleep(STOP_MS * 1000);
    for (int r = 0; r < world->size; r++)
        kill((pid_t)board[PROCESS_OF + r], SIGCONT);
    usleep(300000);
    set(world, HAS_GONE_ON, 1);
    _exit(0);
}

static void a_long_stop_of_all_ranks_is_excused(struct world *world)
{
    struct shoal_request *request;
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    float given = 1, got = 0;
    options.timeout_ms = PATIENCE_MS;
    set(world, PROCESS_OF + world->rank, (uint64_t)getpid());
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0) {
        OK(world, shoal_recv_post(world->comm, &got, 1, SHOAL_FLOAT32, 1, 7, &options, &request));
        stop_all_for_a_while(world);
        set(world, WAITS, 1);
        OK(world, sum(world->comm, PATIENCE_MS));
        OK(world, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
        CHECK(world, got == 1, "got %g", (double)got);
        return;
    }
    await(world, HAS_GONE_ON);
    OK(world, shoal_send(world->comm, &given, 1, SHOAL_FLOAT32, 0, 7, &options));
    OK(world, sum(world->comm, PATIENCE_MS));
}

#if defined(__x86_64__)
#define HAS_SOURCES true
#else
#define HAS_SOURCES false
#endif

static void works_without_the_counter(struct world *world)
{
    struct shoal_comm *comm;
    const uint64_t before_ns = shoal_clock_ns(), ticks = shoal_clock_ticks(), after_ns = shoal_clock_ns();
    CHECK(world, before_ns <= ticks && ticks <= after_ns, "ticks are not the kernel's");
    OK(world, shoal_comm_split(world->comm, 0, world->rank, NULL, &comm));
    for (int i = 0; i < 1000; i++)
        OK(world, sum(comm, LATE_MS));
    if (world->rank == 0)
        expect_timeout(world, comm, 300);
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_comm_free(comm);
}

/* From now on this process and those that it starts read another name for the clock source. */
static bool name_source(const char *source)
{
    char name[] = "/tmp/shoal-test-XXXXXX";
    const int fd = mkstemp(name);
    if (fd < 0 || write(fd, source, strlen(source)) != (ssize_t)strlen(source) || close(fd) != 0)
        return false;
    const bool is_named = (unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                          mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                          mount(name, SOURCE_FILE, NULL, MS_BIND, NULL) == 0;
    unlink(name);
    return is_named;
}

static void play(const char *name, world_body_fn body, const void *arg)
{
    static const char *const settings[] = {"SHOAL_LOG=warn", NULL};
    memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
    world_run(&(struct world_options){name, 2, settings, body, arg});
}

int main(void)
{
    const int64_t on = HOUR_NS, back = -on;
    play("deadlines_survive_a_jump_of_the_counter_back", survive_a_jump, &back);
    play("deadlines_survive_a_jump_of_the_counter_forward", survive_a_jump, &on);
    play("a_long_stop_of_all_ranks_is_excused", a_long_stop_of_all_ranks_is_excused, NULL);
    if (!HAS_SOURCES)
        world_report(true, "works_without_the_counter # SKIP this processor's counter is the only clock source");
    else if (name_source("hpet\n"))
        play("works_without_the_counter", works_without_the_counter, NULL);
    else
        world_report(true, "works_without_the_counter # SKIP files cannot be mounted here");
    return world_finish();
}
