#include "fault_matrix.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POSTED 4
#define LARGE ((size_t)16 << 20) /* elements of all calls in progress: 64 MiB of float32 */
#define SMALL ((size_t)80)       /* of each part or tensor: all fit with the announcement */
#define FAULT_COMES_NS UINT64_C(20000000000) /* its thread may get no processor for long */

static bool is_stalled(const struct fault_scene *scene)
{
    return scene->how == FAULT_STOP || scene->how == FAULT_ABSENT;
}

static bool is_dead(const struct fault_scene *scene)
{
    return scene->how == FAULT_KILL || scene->how == FAULT_EXIT;
}

static unsigned deadline_of(const struct fault_scene *scene)
{
    return (scene->deadline_ms ? scene->deadline_ms : FAULT_DEADLINE_MS) * FAULT_SLOW;
}

static const struct fault_call *call_of(const struct fault_scene *scene)
{
    return scene->call ? scene->call : &fault_calls[FAULT_ALLREDUCE];
}

/* Returns how many calls are in progress at once. */
static int held_by(const struct fault_scene *scene)
{
    return scene->is_posted ? POSTED : 1;
}

/* Stalled ranks are found at the deadline of the operation, which must be long enough for the operations before. */
static size_t count_of(const struct fault_scene *scene)
{
    const size_t most = is_stalled(scene) ? LARGE / 16 : LARGE / (size_t)held_by(scene);
    if (scene->when != FAULT_DURING)
        return SMALL;
    return fault_count_for(call_of(scene), scene->size, scene->large ? scene->large : most);
}

static bool make_operands(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    const int root = (scene->victim + 1 + (int)scene->how / 2) % scene->size; /* sometimes the victim */
    const struct fault_load load = {call_of(scene), root, count_of(scene), scene->is_shared, !scene->is_apart};
    for (int i = 0; i < held_by(scene); i++) {
        if (!fault_operands_make(self, &load, &held[i]))
            return false;
    }
    return true;
}

/* One survivor wakes the stopped victim, once. A second SIGCONT could reach the victim while it exits and the leak checker
 * holds its threads stopped, and would leave it stopped for ever. */
static bool wakes_victim(const struct fault_rank *self, const struct fault_scene *scene)
{
    return scene->how == FAULT_STOP && self->rank == (scene->victim == 0 ? 1 : 0);
}

/* Once a rank has freed the communicator, no other rank writes to its memory, even if a stopped victim continues afterwards. */
static void look_after_memory(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    shoal_comm_free(self->comm);
    self->comm = NULL;
    for (int i = 0; i < held_by(scene); i++)
        fault_operands_mark(&held[i]);
    fault_reach(self, 2);
    if (wakes_victim(self, scene) && fault_await(self, 2, scene->victim))
        kill(self->shared->results[scene->victim].pid, SIGCONT);
    fault_await(self, 2, is_dead(scene) ? scene->victim : -1);
    for (int i = 0; i < held_by(scene); i++)
        fault_check(self, fault_operands_are_marked(&held[i]), "memory was written after shoal_comm_free");
}

/* ---- The victim ---------------------------------------------------------------------------------------------------------- */

static void end_now(struct fault_rank *self, enum fault_how how)
{
    fault_act(self);
    if (how == FAULT_KILL)
        kill(getpid(), SIGKILL);
    else if (how == FAULT_STOP)
        kill(getpid(), SIGSTOP);
    else if (how == FAULT_EXIT)
        exit(FAULT_EXIT_CODE);
    else if (how == FAULT_ABORT)
        shoal_comm_abort(self->comm);
}

struct later {
    struct fault_rank *self;
    enum fault_how how;
    unsigned delay_us;
};

static void *end_later(void *arg)
{
    const struct later *later = arg;
    const struct timespec delay = {later->delay_us / 1000000, (long)(later->delay_us % 1000000) * 1000};
    nanosleep(&delay, NULL);
    end_now(later->self, later->how);
    return NULL;
}

static unsigned random_us(unsigned most)
{
    unsigned seed = (unsigned)fault_now_ns() ^ (unsigned)getpid();
    return (unsigned)rand_r(&seed) % most;
}

/* ---- All ranks ----------------------------------------------------------------------------------------------------------- */

/* Posts several calls and waits for all: after the first that fails all fail, with the same status. */
static enum shoal_status post_some(struct fault_rank *self, struct fault_operands held[POSTED], int posts)
{
    struct shoal_request *requests[POSTED];
    enum shoal_status first = SHOAL_OK;
    int posted = 0;
    for (; posted < posts; posted++) {
        const enum shoal_status status = fault_operands_call(&held[posted], self->comm, &requests[posted]);
        if (!fault_check(self, status == SHOAL_OK, "the post: %s", shoal_status_name(status)))
            break;
    }
    for (int i = 0; i < posted; i++) {
        const enum shoal_status status = shoal_request_wait(requests[i], SHOAL_FOREVER);
        fault_check(self, first == SHOAL_OK || status == first, "request %d: %s after %s", i, shoal_status_name(status),
                    shoal_status_name(first));
        first = first == SHOAL_OK ? status : first;
        shoal_request_free(requests[i]);
    }
    return first;
}

static enum shoal_status call_once(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    return scene->is_posted ? post_some(self, held, POSTED) : fault_operands_call(&held[0], self->comm, NULL);
}

static void call_until_it_fails(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const uint64_t until_ns = fault_now_ns() + FAULT_COMES_NS;
    enum shoal_status status = SHOAL_OK;
    while (status == SHOAL_OK && fault_now_ns() < until_ns)
        status = call_once(self, held);
    fault_note(self, status);
    const enum shoal_status again = shoal_barrier(self->comm, NULL);
    fault_check(self, again == status, "the next call returns %s after %s", shoal_status_name(again),
                shoal_status_name(status));
}

static void leave_during(struct fault_rank *self, struct fault_operands held[POSTED])
{
    struct shoal_request *request;
    enum shoal_status status;
    for (int i = 0; i < 2 && call_once(self, held) == SHOAL_OK; i++)
        continue;
    status = fault_operands_call(&held[0], self->comm, &request);
    if (!fault_check(self, status == SHOAL_OK, "the post: %s", shoal_status_name(status)))
        return;
    status = shoal_request_wait(request, random_us(20000) / 1000);
    fault_act(self);
    shoal_comm_free(self->comm);
    self->comm = NULL;
    status = shoal_request_test(request);
    fault_check(self, status != SHOAL_PENDING, "a request of the freed communicator is not done");
    shoal_request_free(request);
}

static void act_during(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    struct later later = {self, scene->how, random_us((scene->within_ms ? scene->within_ms : 150) * 1000)};
    pthread_t thread;
    if (scene->how == FAULT_FREE) {
        leave_during(self, held);
        return;
    }
    if (!fault_check(self, pthread_create(&thread, NULL, end_later, &later) == 0, "no thread"))
        return;
    call_until_it_fails(self, held);
    pthread_join(thread, NULL);
}

/* The others post one call more than the victim. */
static void stay_away_during(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    const bool is_victim = self->rank == scene->victim;
    const int most = held_by(scene);
    const enum shoal_status status = post_some(self, held, is_victim ? most - 1 : most);
    if (is_victim) {
        fault_check(self, status == SHOAL_OK, "the calls that all made: %s", shoal_status_name(status));
        fault_act(self);
        fault_await(self, 1, self->rank);
        fault_note(self, shoal_barrier(self->comm, NULL));
        return;
    }
    fault_note(self, status);
    fault_reach(self, 1);
}

static void act(struct fault_rank *self, struct fault_operands held[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    if (scene->when == FAULT_DURING) {
        act_during(self, held);
        return;
    }
    end_now(self, scene->how);
    if (scene->how == FAULT_FREE) {
        shoal_comm_free(self->comm);
        self->comm = NULL;
        return;
    }
    if (scene->how == FAULT_ABSENT)
        fault_await(self, 1, self->rank);
    call_until_it_fails(self, held);
}

/* No rank continues before all have made the calls. */
static void call_well(struct fault_rank *self, struct fault_operands held[POSTED])
{
    for (int i = 0; i < held_by(self->parameters); i++)
        fault_operands_call_well(self, &held[i], self->comm);
    const enum shoal_status status = shoal_barrier(self->comm, NULL);
    fault_check(self, status == SHOAL_OK, "a barrier before the fault: %s", shoal_status_name(status));
}

static void body(struct fault_rank *self)
{
    const struct fault_scene *scene = self->parameters;
    struct fault_operands held[POSTED] = {0};
    if (!make_operands(self, held))
        return;
    if (scene->when == FAULT_BETWEEN)
        call_well(self, held);
    if (scene->how == FAULT_ABSENT && scene->when == FAULT_DURING)
        stay_away_during(self, held);
    else if (self->rank == scene->victim)
        act(self, held);
    else
        call_until_it_fails(self, held);
    fault_reach(self, 1);
    look_after_memory(self, held);
    for (int i = 0; i < held_by(scene); i++)
        fault_operands_free(&held[i]);
}

/* ---- The parent's checks ------------------------------------------------------------------------------------------------- */

/* The failure that survivors must report. */
static const struct {
    const char *way;
    enum shoal_status status;
} endings[] = {
    [FAULT_KILL] = {"killed by signal 9", SHOAL_ERR_PEER_LOST},
    [FAULT_EXIT] = {"exited with code 3", SHOAL_ERR_PEER_LOST},
    [FAULT_FREE] = {"freed the communicator", SHOAL_ERR_PEER_LOST},
    [FAULT_ABORT] = {"called shoal_comm_abort", SHOAL_ERR_ABORTED},
    [FAULT_STOP] = {"stopped", SHOAL_ERR_TIMEOUT},
    [FAULT_ABSENT] = {"passed its deadline", SHOAL_ERR_TIMEOUT},
};

static void check_failure(struct fault_test *test, const struct fault_scene *scene, int rank)
{
    const struct fault_result *mine = &test->shared->results[rank], *victim = &test->shared->results[scene->victim];
    const struct shoal_failure *failure = &mine->failure;
    const enum shoal_status wanted = endings[scene->how].status;
    const bool knows_process = scene->how != FAULT_ABORT; /* a signal handler may have composed the text */
    char name[32], process[32];
    snprintf(name, sizeof name, "rank %d", scene->victim);
    snprintf(process, sizeof process, "process %d", (int)victim->pid);
    fault_expect(test, mine->status == wanted, "rank %d got %s, not %s", rank, shoal_status_name(mine->status),
                 shoal_status_name(wanted));
    if (!fault_expect(test, mine->has_failure, "rank %d has no failure record", rank))
        return;
    fault_expect(test,
                 failure->status == wanted && failure->rank == scene->victim && failure->host[0] &&
                     (failure->pid == victim->pid || !knows_process),
                 "rank %d's record: status %d, rank %d, process %d (not %d), host \"%s\": %s", rank, failure->status,
                 failure->rank, failure->pid, (int)victim->pid, failure->host, failure->text);
    fault_expect(test, strstr(failure->text, name) && strstr(failure->text, endings[scene->how].way),
                 "rank %d's text does not tell \"%s\" and \"%s\": %s", rank, name, endings[scene->how].way, failure->text);
    fault_expect(test, !knows_process || (strstr(failure->text, process) && strstr(failure->text, failure->host)),
                 "rank %d's text does not tell \"%s\" and the host: %s", rank, process, failure->text);
    fault_expect(test, strstr(mine->log, "broken") != NULL, "rank %d has logged nothing", rank);
}

static void check_time(struct fault_test *test, const struct fault_scene *scene, int rank)
{
    const struct fault_result *mine = &test->shared->results[rank];
    const int64_t took_ms =
        ((int64_t)mine->failed_ns - (int64_t)test->shared->results[scene->victim].action_ns) / (int64_t)FAULT_MS;
    /* A deadline that began anew would take twice as long. */
    const int64_t most_ms = is_stalled(scene) ? 2 * deadline_of(scene) - 100 : FAULT_KNOWN_MS * FAULT_SLOW;
    fault_expect(test, took_ms <= most_ms, "rank %d knew after %lld ms, %lld are allowed", rank, (long long)took_ms,
                 (long long)most_ms);
}

/* Returns true if a warning names the victim, and if it or a later line has the state that the scene leaves the victim in. On a
 * busy machine the victim may stop after the warning. */
static bool is_victim_named(const char *log, const struct fault_scene *scene, const char *name)
{
    for (const char *line = strstr(log, "has waited"); line; line = strstr(line + 1, "has waited")) {
        const char *end = strchr(line, '\n'), *found = strstr(line, name);
        if (end && found && found < end)
            return scene->how != FAULT_STOP || strstr(found, "stopped");
    }
    return false;
}

/* Each rank prints the warning before the end, and the warning names the victim. With messages, a rank may wait for one that
 * itself waits. */
static void check_warnings(struct fault_test *test, const struct fault_scene *scene)
{
    const int wanted = call_of(scene)->is_exchange ? 1 : scene->size - 1;
    char name[32];
    int warned = 0, named = 0;
    snprintf(name, sizeof name, "rank %d (process %d", scene->victim, (int)test->shared->results[scene->victim].pid);
    for (int r = 0; r < scene->size; r++) {
        const char *log = test->shared->results[r].log;
        if (r == scene->victim)
            continue;
        warned += strstr(log, "has waited") != NULL;
        named += is_victim_named(log, scene, name);
    }
    fault_expect(test, warned == scene->size - 1 && named >= wanted, "%d ranks warned, %d of them of %s%s)", warned, named,
                 name, scene->how == FAULT_STOP ? ", stopped" : "");
}

/* Checks what the victim itself reports. */
static void check_victim(struct fault_test *test, const struct fault_scene *scene)
{
    const struct fault_result *victim = &test->shared->results[scene->victim];
    fault_expect(test, victim->status == endings[scene->how].status, "the victim itself got %s afterwards",
                 shoal_status_name(victim->status));
    fault_expect(test, !is_stalled(scene) || strstr(victim->log, "ms for this rank: "), "the victim was not told: %s",
                 victim->log);
}

static void play_once(struct fault_test *test)
{
    static char deadline[64], warning[64];
    const struct fault_scene *scene = test->parameters;
    const char *const settings[] = {deadline, warning, NULL};
    struct fault_job job = {
        .size = scene->size, .body = body, .parameters = scene, .settings = is_stalled(scene) ? settings : NULL};
    snprintf(deadline, sizeof deadline, "SHOAL_TIMEOUT_MS=%u", deadline_of(scene));
    snprintf(warning, sizeof warning, "SHOAL_WARN_MS=%u", deadline_of(scene) / 5);
    job.killed_by[scene->victim] = scene->how == FAULT_KILL ? SIGKILL : 0;
    job.exits_with[scene->victim] = scene->how == FAULT_EXIT ? FAULT_EXIT_CODE : 0;
    if (!fault_run(test, &job))
        return;
    for (int r = 0; r < scene->size; r++) {
        if (r == scene->victim)
            continue;
        check_failure(test, scene, r);
        check_time(test, scene, r);
    }
    if (is_stalled(scene))
        check_warnings(test, scene);
    if (is_stalled(scene) || scene->how == FAULT_ABORT)
        check_victim(test, scene);
}

void fault_play(struct fault_test *test)
{
    const struct fault_scene *scene = test->parameters;
    for (int i = 0; i < (scene->rounds ? scene->rounds : 1) && !test->has_failed && !test->skip[0]; i++)
        play_once(test);
}
