/* Chooses the next operation to run. One thread, the worker, looks at the first operation of each queue, picks one that may run
 * by a random number, and runs one part of it. So parts of operations of different streams mix in every allowed order.
 *
 * Like a device, the worker can only poll for values: between polls it naps. A CPU thread that waits for an operation is
 * notified. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mock_driver.h"

#define NAP_NS 20000u
#define LONG_NAP_NS 200000u
#define NAPS 100u        /* short ones, then long ones */
#define FAVOUR_SHARE 16u /* one in this many picks changes the preferred queue */
#define NS_PER_US 1000u
#define NS_PER_S 1000000000u

static struct {
    struct mock_queue *queues;
    pthread_cond_t work; /* for the worker: new work, or its end */
    pthread_cond_t rest; /* a part has run, or the worker has ended */
    bool has_worker, is_ending;
    bool is_held;    /* by a test */
    bool is_running; /* a part is running, without the lock */
    struct mock_queue *favourite;
    uint64_t posted;
    unsigned naps;
    size_t operations, launches;
    int break_nth; /* 0: none */
    shoal_cu_result break_result;
} schedule = {.work = PTHREAD_COND_INITIALIZER, .rest = PTHREAD_COND_INITIALIZER};

/* The worker naps by a clock that cannot be set. */
static void make_conditions(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&schedule.work, &attributes);
    pthread_cond_init(&schedule.rest, NULL);
    pthread_condattr_destroy(&attributes);
}

__attribute__((constructor)) static void begin_schedule(void)
{
    make_conditions();
}

/* ---- Queues -------------------------------------------------------------------------------------------------------------- */

static struct mock_queue *find_queue(int device, int number)
{
    struct mock_queue *queue = schedule.queues;
    while (queue && (number < 0 || queue->device != device || queue->number != number))
        queue = queue->next;
    return queue;
}

struct mock_queue *mock_queue_for(int device)
{
    const int number = mock.modes.queues ? (int)mock_draw((uint64_t)mock.modes.queues) : -1;
    struct mock_queue *queue = find_queue(device, number);
    if (!queue) {
        queue = mock_allocate_zeroed(sizeof *queue);
        queue->device = device;
        queue->number = number;
        queue->next = schedule.queues;
        schedule.queues = queue;
    }
    queue->streams++;
    return queue;
}

/* A stream leaves when none of its operations is in the queue. */
void mock_queue_leave(struct mock_queue *queue)
{
    struct mock_queue **link = &schedule.queues;
    if (--queue->streams)
        return;
    while (*link != queue)
        link = &(*link)->next;
    *link = queue->next;
    if (schedule.favourite == queue)
        schedule.favourite = NULL;
    free(queue);
}

/* ---- Operations ---------------------------------------------------------------------------------------------------------- */

size_t mock_count_operations(void)
{
    return schedule.operations;
}

bool mock_has_launches(void)
{
    return schedule.launches != 0;
}

struct mock_op *mock_op_make(enum mock_op_kind kind, struct mock_region *first, struct mock_region *second)
{
    struct mock_op *op = mock_allocate_zeroed(sizeof *op);
    op->kind = kind;
    op->uses[0] = first;
    op->uses[1] = second;
    for (int i = 0; i < 2; i++)
        if (op->uses[i])
            op->uses[i]->uses++;
    schedule.operations++;
    schedule.launches += kind == MOCK_LAUNCH;
    return op;
}

static void free_op(struct mock_op *op)
{
    for (int i = 0; i < 2; i++)
        if (op->uses[i])
            op->uses[i]->uses--;
    if (op->kind == MOCK_RECORD || op->kind == MOCK_WAIT_MARK)
        mock_mark_drop(op->mark);
    if (op->kind == MOCK_LAUNCH)
        mock_launch_free(op->launch);
    schedule.operations--;
    schedule.launches -= op->kind == MOCK_LAUNCH;
    free(op);
}

static void unlink_op(struct mock_queue *queue, struct mock_op *op)
{
    struct mock_op *before = NULL;
    for (struct mock_op *other = queue->head; other != op; other = other->next)
        before = other;
    *(before ? &before->next : &queue->head) = op->next;
    if (queue->tail == op)
        queue->tail = before;
}

/* Memory that another stream still uses is not freed. */
static void free_memory(const struct mock_op *op)
{
    if (op->region->uses == 0)
        mock_free_region(op->region);
    else if (!op->stream->context->sticky)
        mock_fault("memory was freed on a stream while another stream's work uses it");
}

/* Also ends an operation that did nothing: threads that wait for its mark continue. */
void mock_op_end(struct mock_op *op)
{
    struct mock_stream *stream = op->stream;
    if (op->kind == MOCK_RECORD)
        mock_mark_reach(op->mark);
    if (op->kind == MOCK_FREE_MEMORY)
        free_memory(op);
    unlink_op(stream->queue, op);
    free_op(op);
    mock_stream_step(stream);
    pthread_cond_broadcast(&mock.changed);
    pthread_cond_signal(&schedule.work);
}

/* ---- Breaking ------------------------------------------------------------------------------------------------------------ */

/* Finds an operation of the context that is not running. */
static struct mock_op *find_op_of(const struct mock_context *context)
{
    for (struct mock_queue *queue = schedule.queues; queue; queue = queue->next)
        for (struct mock_op *op = queue->head; op; op = op->next)
            if (op->stream->context == context && !op->is_running)
                return op;
    return NULL;
}

static bool is_running_of(const struct mock_context *context)
{
    for (struct mock_queue *queue = schedule.queues; queue; queue = queue->next)
        for (struct mock_op *op = queue->head; op; op = op->next)
            if (op->stream->context == context)
                return true;
    return false;
}

static void break_context(struct mock_context *context, shoal_cu_result result)
{
    struct mock_op *op;
    context->sticky = result;
    while ((op = find_op_of(context)))
        mock_op_end(op);
    pthread_cond_broadcast(&mock.changed);
}

void mock_break_context(struct mock_context *context, shoal_cu_result result)
{
    break_context(context, result);
    while (is_running_of(context))
        pthread_cond_wait(&mock.changed, &mock.lock);
}

MOCK_API void mock_cuda_break(int nth, int result)
{
    size_t at = 0;
    struct mock_context *context;
    pthread_mutex_lock(&mock.lock);
    schedule.break_nth = nth;
    schedule.break_result = result;
    while (nth == 0 && (context = mock_handle_next(MOCK_CONTEXT, &at)))
        break_context(context, result);
    pthread_mutex_unlock(&mock.lock);
}

static bool breaks_now(struct mock_op *op)
{
    if (!schedule.break_nth || --schedule.break_nth)
        return false;
    break_context(op->stream->context, schedule.break_result); /* this also frees the operation */
    return true;
}

/* ---- Picking ------------------------------------------------------------------------------------------------------------- */

/* The legacy stream and the blocking streams of a context wait for each other's earlier work. */
static bool comes_after(const struct mock_op *op, bool is_after_legacy)
{
    for (struct mock_stream *other = mock_stream_next(NULL); other; other = mock_stream_next(other)) {
        const bool counts = other->context == op->stream->context && other->pending && other != op->stream &&
                            (is_after_legacy ? other->is_legacy : other->is_blocking);
        for (const struct mock_op *it = counts ? other->queue->head : NULL; it && it->number < op->number; it = it->next)
            if (it->stream == other)
                return true;
    }
    return false;
}

static bool is_ordered(const struct mock_op *op)
{
    if (op->stream->is_legacy)
        return !comes_after(op, false);
    return !op->stream->is_blocking || !comes_after(op, true);
}

static bool can_run(const struct mock_op *op)
{
    if (op->is_running || !is_ordered(op))
        return false;
    switch (op->kind) {
    case MOCK_WAIT_VALUE:
        return mock_value_is_there(&op->value);
    case MOCK_WAIT_MARK:
        return op->mark->is_reached;
    case MOCK_CALL_HOST:
        return mock_callback_is_free();
    case MOCK_COPY:
    case MOCK_WRITE_VALUE:
    case MOCK_RECORD:
    case MOCK_FREE_MEMORY:
    case MOCK_LAUNCH:
        return true;
    }
    return false;
}

/* The candidates while the queues are examined. */
struct choice {
    struct mock_op *prompt, *late; /* each one of several, at random */
    unsigned prompts, lates;
    uint64_t now_ns, next_ns; /* when the next late copy is due; 0: none */
    bool has_to_poll;
};

static void choose(struct mock_op **chosen, unsigned *count, struct mock_op *op)
{
    if (mock_draw(++*count) == 0)
        *chosen = op;
}

/* A late copy, and each of its parts, is delayed by a random time from when it could run. A test that holds everything does
 * not wait for time. */
static void consider_late(struct choice *choice, struct mock_op *op)
{
    if (!op->due_ns)
        op->due_ns = choice->now_ns + mock_draw((uint64_t)mock.modes.late * NS_PER_US);
    if (op->due_ns <= choice->now_ns || schedule.is_held)
        choose(&choice->late, &choice->lates, op);
    else if (!choice->next_ns || op->due_ns < choice->next_ns)
        choice->next_ns = op->due_ns;
}

static void consider(struct choice *choice, struct mock_op *op)
{
    if (!can_run(op))
        choice->has_to_poll |= op->kind == MOCK_WAIT_VALUE;
    else if (op->kind == MOCK_COPY && mock.modes.late)
        consider_late(choice, op);
    else
        choose(&choice->prompt, &choice->prompts, op);
}

/* Prefers one queue after another for a while, as devices do with streams, so that one gets far ahead of the others. */
static struct mock_op *pick(struct choice *choice)
{
    unsigned queues = 0;
    const bool is_new = mock_draw(FAVOUR_SHARE) == 0;
    for (struct mock_queue *queue = schedule.queues; queue; queue = queue->next) {
        if (is_new && mock_draw(++queues) == 0)
            schedule.favourite = queue;
        if (queue->head)
            consider(choice, queue->head);
    }
    struct mock_op *favourite = schedule.favourite ? schedule.favourite->head : NULL;
    const bool is_late = favourite && favourite->kind == MOCK_COPY && mock.modes.late;
    if (favourite && !is_late && can_run(favourite))
        return favourite;
    return choice->prompt ? choice->prompt : choice->late;
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* Runs without the lock. */
static bool run_unlocked(struct mock_op *op)
{
    if (op->kind == MOCK_COPY)
        return mock_copy_part(&op->copy);
    if (op->kind == MOCK_LAUNCH)
        return mock_launch_part(op->launch);
    mock_value_write(&op->value);
    return true;
}

static void run_part(struct mock_op *op)
{
    op->is_running = schedule.is_running = true;
    pthread_mutex_unlock(&mock.lock);
    const bool is_over = run_unlocked(op);
    pthread_mutex_lock(&mock.lock);
    op->is_running = schedule.is_running = false;
    op->due_ns = 0;
    pthread_cond_broadcast(&schedule.rest);
    if (op->kind == MOCK_LAUNCH && mock_launch_result(op->launch) != SHOAL_CU_SUCCESS)
        break_context(op->stream->context, mock_launch_result(op->launch));
    else if (is_over || op->stream->context->sticky)
        mock_op_end(op);
}

static void run_op(struct mock_op *op)
{
    if (breaks_now(op))
        return;
    if (op->kind == MOCK_WAIT_VALUE && op->value.flushes)
        mock_remote_flush();
    if (op->kind == MOCK_CALL_HOST)
        mock_callback_run(op);
    else if (op->kind == MOCK_COPY || op->kind == MOCK_WRITE_VALUE || op->kind == MOCK_LAUNCH)
        run_part(op);
    else
        mock_op_end(op);
}

/* ---- The worker ---------------------------------------------------------------------------------------------------------- */

static void nap_until(uint64_t moment_ns)
{
    const struct timespec moment = {(time_t)(moment_ns / NS_PER_S), (long)(moment_ns % NS_PER_S)};
    pthread_cond_timedwait(&schedule.work, &mock.lock, &moment);
}

static void rest(const struct choice *choice)
{
    uint64_t until_ns = choice->next_ns;
    if (choice->has_to_poll) {
        const uint64_t nap_ns = choice->now_ns + (schedule.naps++ < NAPS ? NAP_NS : LONG_NAP_NS);
        until_ns = until_ns && until_ns < nap_ns ? until_ns : nap_ns;
    }
    if (until_ns)
        nap_until(until_ns);
    else
        pthread_cond_wait(&schedule.work, &mock.lock);
}

static void *work(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&mock.lock);
    while (!schedule.is_ending) {
        struct choice choice = {.now_ns = mock_now_ns()};
        struct mock_op *op = schedule.is_held ? NULL : pick(&choice);
        if (op) {
            schedule.naps = 0;
            run_op(op);
        } else {
            rest(&choice);
        }
    }
    schedule.has_worker = false;
    pthread_cond_broadcast(&schedule.rest);
    pthread_mutex_unlock(&mock.lock);
    return NULL;
}

static void start_worker(void)
{
    pthread_t worker;
    if (schedule.has_worker)
        return;
    if (pthread_create(&worker, NULL, work, NULL) != 0)
        abort();
    pthread_detach(worker);
    schedule.has_worker = true;
}

/* ---- Posting and waiting ------------------------------------------------------------------------------------------------- */

static void append_op(struct mock_queue *queue, struct mock_op *op)
{
    if (queue->tail)
        queue->tail->next = op;
    else
        queue->head = op;
    queue->tail = op;
}

static bool is_full(const struct mock_stream *stream)
{
    return stream->pending >= (unsigned)mock.modes.depth && !stream->context->sticky;
}

static void wait_for_room(const struct mock_stream *stream)
{
    const bool is_ours = mock_hold(stream->context);
    while (is_full(stream))
        pthread_cond_wait(&mock.changed, &mock.lock);
    mock_let_go(stream->context, is_ours);
}

void mock_post(struct mock_stream *stream, struct mock_op *op)
{
    if (is_full(stream))
        wait_for_room(stream);
    if (stream->context->sticky || !stream->queue) { /* failed or ended meanwhile */
        if (op->kind == MOCK_RECORD)
            mock_mark_reach(op->mark);
        free_op(op);
        return;
    }
    op->stream = stream;
    op->number = ++schedule.posted;
    stream->pending++;
    append_op(stream->queue, op);
    schedule.naps = 0;
    start_worker();
    pthread_cond_signal(&schedule.work);
}

static bool is_idle(int device)
{
    for (const struct mock_queue *queue = schedule.queues; queue; queue = queue->next)
        if (queue->device == device && queue->head)
            return false;
    return true;
}

void mock_wait_idle(const struct mock_call *call)
{
    if (!mock.modes.idle)
        return;
    const bool is_ours = mock_hold(call->context);
    while (!call->context->sticky && !is_idle(call->context->device))
        pthread_cond_wait(&mock.changed, &mock.lock);
    mock_let_go(call->context, is_ours);
}

/* ---- Step by step -------------------------------------------------------------------------------------------------------- */

MOCK_API void mock_cuda_hold(bool is_held)
{
    pthread_mutex_lock(&mock.lock);
    schedule.is_held = is_held;
    while (schedule.is_running)
        pthread_cond_wait(&schedule.rest, &mock.lock);
    pthread_cond_signal(&schedule.work);
    pthread_mutex_unlock(&mock.lock);
}

MOCK_API unsigned mock_cuda_step(unsigned parts)
{
    unsigned done = 0;
    struct mock_op *op = NULL;
    pthread_mutex_lock(&mock.lock);
    do {
        struct choice choice = {.now_ns = mock_now_ns()};
        op = done < parts ? pick(&choice) : NULL;
        if (op) {
            run_op(op);
            done++;
        }
    } while (op);
    pthread_mutex_unlock(&mock.lock);
    return done;
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

void mock_schedule_reset(void)
{
    schedule.is_ending = true;
    pthread_cond_signal(&schedule.work);
    while (schedule.has_worker)
        pthread_cond_wait(&schedule.rest, &mock.lock);
    schedule.is_ending = schedule.is_held = false;
    schedule.favourite = NULL;
    schedule.break_nth = 0;
    schedule.naps = 0;
}

void mock_schedule_forked(void)
{
    make_conditions();
    schedule.has_worker = schedule.is_running = false;
    for (struct mock_queue *queue = schedule.queues; queue; queue = queue->next)
        for (struct mock_op *op = queue->head; op; op = op->next)
            op->is_running = false;
}
