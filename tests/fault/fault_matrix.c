#include "fault_matrix.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POSTED 4
#define LARGE ((size_t)16 << 20) /* elements: 64 MiB of float32 */
#define SMALL ((size_t)1000)
#define ROUND_TRIES 1000

static bool is_stalled(const struct fault_scene *scene)
{
    return scene->how == FAULT_STOP || scene->how == FAULT_ABSENT;
}

/* Stalled ranks are found at the deadline of the operation; it has to be long enough for the operations before. */
static size_t count_of(const struct fault_scene *scene)
{
    if (scene->when != FAULT_DURING)
        return SMALL;
    return is_stalled(scene) ? LARGE / 16 : LARGE;
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

/* ---- Everyone ------------------------------------------------------------------------------------------------------------ */

/* Posts several, waits for all: after the first that fails all fail, with the same status. */
static enum shoal_status post_some(struct fault_rank *self, float *buffers[POSTED], size_t count, int posts)
{
    struct shoal_request *requests[POSTED];
    enum shoal_status first = SHOAL_OK;
    int posted = 0;
    for (; posted < posts; posted++) {
        const enum shoal_status status = shoal_allreduce_post(self->comm, buffers[posted], buffers[posted], count,
                                                              SHOAL_FLOAT32, SHOAL_SUM, NULL, &requests[posted]);
        if (!fault_check(self, status == SHOAL_OK, "shoal_allreduce_post: %s", shoal_status_name(status)))
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

static enum shoal_status call_once(struct fault_rank *self, float *buffers[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    if (scene->is_posted)
        return post_some(self, buffers, count_of(scene), POSTED);
    return shoal_allreduce(self->comm, buffers[0], buffers[0], count_of(scene), SHOAL_FLOAT32, SHOAL_SUM, NULL);
}

static void call_until_it_fails(struct fault_rank *self, float *buffers[POSTED])
{
    enum shoal_status status = SHOAL_OK;
    for (int turns = 0; turns < ROUND_TRIES && status == SHOAL_OK; turns++)
        status = call_once(self, buffers);
    fault_note(self, status);
    const enum shoal_status again = shoal_barrier(self->comm, NULL);
    fault_check(self, again == status, "the next call returns %s after %s", shoal_status_name(again),
                shoal_status_name(status));
}

static void leave_during(struct fault_rank *self, float *buffers[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    struct shoal_request *request;
    enum shoal_status status;
    for (int i = 0; i < 2 && call_once(self, buffers) == SHOAL_OK; i++)
        continue;
    status =
        shoal_allreduce_post(self->comm, buffers[0], buffers[0], count_of(scene), SHOAL_FLOAT32, SHOAL_SUM, NULL, &request);
    if (!fault_check(self, status == SHOAL_OK, "shoal_allreduce_post: %s", shoal_status_name(status)))
        return;
    status = shoal_request_wait(request, random_us(20000) / 1000);
    fault_act(self);
    shoal_comm_free(self->comm);
    self->comm = NULL;
    status = shoal_request_test(request);
    fault_check(self, status != SHOAL_PENDING, "a request of the freed communicator is not done");
    shoal_request_free(request);
}

static void act_during(struct fault_rank *self, float *buffers[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    struct later later = {self, scene->how, random_us(150000)};
    pthread_t thread;
    if (scene->how == FAULT_FREE) {
        leave_during(self, buffers);
        return;
    }
    if (!fault_check(self, pthread_create(&thread, NULL, end_later, &later) == 0, "no thread"))
        return;
    call_until_it_fails(self, buffers);
    pthread_join(thread, NULL);
}

/* The others post one more than the victim calls. */
static void stay_away_during(struct fault_rank *self, float *buffers[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    const bool is_victim = self->rank == scene->victim;
    const enum shoal_status status = post_some(self, buffers, count_of(scene), is_victim ? POSTED - 1 : POSTED);
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

static void act(struct fault_rank *self, float *buffers[POSTED])
{
    const struct fault_scene *scene = self->parameters;
    if (scene->when == FAULT_DURING) {
        act_during(self, buffers);
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
    call_until_it_fails(self, buffers);
}

static void body(struct fault_rank *self)
{
    const struct fault_scene *scene = self->parameters;
    const size_t count = count_of(scene);
    const int held = scene->is_posted ? POSTED : 1;
    float *buffers[POSTED] = {NULL};
    for (int i = 0; i < held; i++) {
        buffers[i] = fault_floats(self, scene->is_shared, count);
        if (!buffers[i])
            return;
        memset(buffers[i], 0, count * sizeof(float));
    }
    for (int i = 0; i < 3 && scene->when == FAULT_BETWEEN; i++)
        fault_allreduce_once(self, self->comm, buffers[0], count);
    if (scene->how == FAULT_ABSENT && scene->when == FAULT_DURING)
        stay_away_during(self, buffers);
    else if (self->rank == scene->victim)
        act(self, buffers);
    else
        call_until_it_fails(self, buffers);
    fault_reach(self, 1);
    for (int i = 0; i < held && !scene->is_shared; i++)
        free(buffers[i]);
}

/* ---- The parent's look --------------------------------------------------------------------------------------------------- */

static const char *way_of(const struct fault_scene *scene)
{
    static const char *const ways[] = {"killed by signal 9", "exited with code 3", "freed the communicator", "stopped", "rank"};
    return ways[scene->how];
}

static void check_failure(struct fault_test *test, const struct fault_scene *scene, int rank)
{
    const struct fault_result *mine = &test->shared->results[rank], *victim = &test->shared->results[scene->victim];
    const struct shoal_failure *failure = &mine->failure;
    const enum shoal_status wanted = is_stalled(scene) ? SHOAL_ERR_TIMEOUT : SHOAL_ERR_PEER_LOST;
    char name[32], process[32];
    snprintf(name, sizeof name, "rank %d", scene->victim);
    snprintf(process, sizeof process, "process %d", (int)victim->pid);
    fault_expect(test, mine->status == wanted, "rank %d got %s, not %s", rank, shoal_status_name(mine->status),
                 shoal_status_name(wanted));
    if (!fault_expect(test, mine->has_failure, "rank %d has no failure record", rank))
        return;
    fault_expect(test,
                 failure->status == wanted && failure->rank == scene->victim && failure->pid == victim->pid && failure->host[0],
                 "rank %d's record: status %d, rank %d, process %d (not %d), host \"%s\"", rank, failure->status, failure->rank,
                 failure->pid, (int)victim->pid, failure->host);
    fault_expect(test,
                 strstr(failure->text, name) && strstr(failure->text, process) && strstr(failure->text, failure->host) &&
                     strstr(failure->text, way_of(scene)),
                 "rank %d's text does not tell \"%s\", \"%s\", \"%s\": %s", rank, name, process, way_of(scene), failure->text);
    fault_expect(test, strstr(mine->log, "broken") != NULL, "rank %d has logged nothing", rank);
}

static void check_time(struct fault_test *test, const struct fault_scene *scene, int rank)
{
    const struct fault_result *mine = &test->shared->results[rank];
    const int64_t took_ms =
        ((int64_t)mine->failed_ns - (int64_t)test->shared->results[scene->victim].action_ns) / (int64_t)FAULT_MS;
    const int64_t most_ms = is_stalled(scene) ? FAULT_DEADLINE_MS * FAULT_SLOW + 700 * FAULT_SLOW : 2000 * FAULT_SLOW;
    fault_expect(test, took_ms <= most_ms, "rank %d knew after %lld ms, %lld are allowed", rank, (long long)took_ms,
                 (long long)most_ms);
}

/* The warning comes before the end, from at least one rank that waited for the victim itself. */
static void check_warnings(struct fault_test *test, const struct fault_scene *scene)
{
    char name[32];
    int warned = 0, named = 0;
    snprintf(name, sizeof name, "rank %d (process %d", scene->victim, (int)test->shared->results[scene->victim].pid);
    for (int r = 0; r < scene->size; r++) {
        const char *line = r == scene->victim ? NULL : strstr(test->shared->results[r].log, "has waited");
        const char *end = line ? strchr(line, '\n') : NULL;
        const char *found = end ? strstr(line, name) : NULL;
        const char *state = found && scene->how == FAULT_STOP ? strstr(found, "stopped") : found;
        warned += line != NULL;
        named += found && found < end && state && state < end;
    }
    fault_expect(test, warned == scene->size - 1 && named == warned, "%d ranks warned, %d of them of %s%s)", warned, named,
                 name, scene->how == FAULT_STOP ? ", stopped" : "");
}

static void play_once(struct fault_test *test)
{
    static char deadline[64], warning[64];
    const struct fault_scene *scene = test->parameters;
    const char *const settings[] = {deadline, warning, NULL};
    struct fault_job job = {
        .size = scene->size, .body = body, .parameters = scene, .settings = is_stalled(scene) ? settings : NULL};
    snprintf(deadline, sizeof deadline, "SHOAL_TIMEOUT_MS=%d", FAULT_DEADLINE_MS * FAULT_SLOW);
    snprintf(warning, sizeof warning, "SHOAL_WARN_MS=%d", FAULT_WARN_MS * FAULT_SLOW);
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
    if (!is_stalled(scene))
        return;
    check_warnings(test, scene);
    fault_expect(test, test->shared->results[scene->victim].status == SHOAL_ERR_TIMEOUT, "the victim itself got %s afterwards",
                 shoal_status_name(test->shared->results[scene->victim].status));
}

void fault_play(struct fault_test *test)
{
    const struct fault_scene *scene = test->parameters;
    for (int i = 0; i < (scene->rounds ? scene->rounds : 1) && !test->has_failed && !test->skip[0]; i++)
        play_once(test);
}
