/* Averages gradients: see the header. */
#include "averager.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernel.h"

#define WATCH_MS 100 /* between two checks of a step that lacks gradients */
#define HAS_ENDED "its reducer has ended: shoal.tensorflow.shutdown() was called, or its variables are gone"

enum phase {
    BETWEEN_STEPS,
    BEGINNING, /* a thread is in shoal_reducer_begin */
    OPEN,      /* gradients arrive */
    ENDING,    /* no further one will be copied: all have arrived, or the reducer has failed */
};

/* A step's state of one parameter. */
struct gradient {
    struct job *job; /* NULL if there is none, or it has ended */
    void *output;
    size_t count; /* elements, constant */
    size_t bytes; /* constant */
    char *name;   /* for messages, constant */
};

struct averager {
    int64_t number;
    size_t users; /* kernels that use it; guarded by table_lock */
    struct shoal_reducer *reducer;
    uint32_t timeout_ms; /* deadline of the wait for the next gradient */
    int rank;
    size_t count;
    struct gradient *gradients; /* [count + 1]: the last one is for a rank without any gradient */
    pthread_t thread;

    pthread_mutex_t lock; /* guards what follows, jobs and outputs */
    pthread_cond_t changed;
    enum phase phase;
    bool stops;
    int64_t step;       /* TensorFlow's number of the run to which the step belongs */
    size_t marks;       /* gradients that this rank has in the step */
    size_t claimed;     /* those that have arrived */
    size_t marked;      /* those that are in their buffers */
    uint64_t marked_ms; /* when the latest one was marked, or the step began */
};

/* By number % AVERAGERS_MAX. A number is never used again, because a graph may keep that of an averager that has ended. */
static struct averager *averagers[AVERAGERS_MAX];
static int64_t averagers_made;
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t was_left = PTHREAD_COND_INITIALIZER;

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- Failures ------------------------------------------------------------------------------------------------------------ */

/* Writes why the reducer failed. Returns the status of that failure if it is known, else the given status. */
static enum shoal_status failure_text(const struct averager *averager, enum shoal_status status, char *text, size_t bytes)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const bool is_known = shoal_reducer_failure(averager->reducer, &failure) == SHOAL_OK && failure.text[0];
    snprintf(text, bytes, "%s", is_known ? failure.text : status == SHOAL_ERR_STATE ? HAS_ENDED : shoal_status_text(status));
    return is_known ? failure.status : status;
}

/* Fails the reducer on every rank, and wakes the thread that ends steps. Call it without the lock, as it may wait until
 * the hosts agree on the cause. Returns the status. */
__attribute__((format(printf, 3, 4))) static enum shoal_status fail_reducer(struct averager *averager, enum shoal_status status,
                                                                            const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    shoal_reducer_fail(averager->reducer, status, text);
    pthread_mutex_lock(&averager->lock);
    pthread_cond_broadcast(&averager->changed);
    pthread_mutex_unlock(&averager->lock);
    return status;
}

/* ---- The end of a step --------------------------------------------------------------------------------------------------- */

/* Call it with the lock. If this rank lacks a gradient, jobs wait for the end of the step: only then is it known whether other
 * ranks have that gradient. */
static void hand_out(struct averager *averager, size_t index, bool is_end)
{
    struct gradient *const gradient = &averager->gradients[index];
    if (!gradient->job || (averager->marks < averager->count && !is_end))
        return;
    job_end_later(gradient->job, SHOAL_OK, NULL);
    gradient->job = NULL;
}

/* Called by the reducer, on its thread or on this averager's. */
static enum shoal_status buffer_done(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count)
{
    struct averager *const averager = arg;
    (void)buffer;
    for (size_t i = 0; i < parameter_count; i++) {
        const struct gradient *const gradient = &averager->gradients[parameters[i]];
        if (gradient->job && gradient->bytes)
            memcpy(gradient->output, shoal_reducer_view(averager->reducer, parameters[i]), gradient->bytes);
        pthread_mutex_lock(&averager->lock);
        hand_out(averager, parameters[i], false);
        pthread_mutex_unlock(&averager->lock);
    }
    return SHOAL_OK;
}

/* Fails the reducer if another rank has a gradient that this rank lacks, because variables would differ from then on. */
static enum shoal_status check_used(struct averager *averager)
{
    for (size_t i = 0; i < averager->count; i++) {
        if (averager->gradients[i].output || !shoal_reducer_is_used(averager->reducer, i))
            continue;
        return fail_reducer(averager, SHOAL_ERR_MISMATCH,
                            "the gradient of %s is None on rank %d, but another rank has one: compute the same loss from the "
                            "same variables on every rank",
                            averager->gradients[i].name, averager->rank);
    }
    return SHOAL_OK;
}

/* Ends a step, after success or failure. shoal_reducer_finish, with any status, returns only when the reducer's threads have
 * left buffer_done and read no gradient (shoal/gradients.h), and no mark is in progress. So from there on nothing uses the
 * memory of gradients and outputs, and jobs may let TensorFlow free it. Call it with the lock, which it releases in between. */
static void end_step(struct averager *averager)
{
    char text[JOB_TEXT_BYTES] = "";
    pthread_mutex_unlock(&averager->lock);
    enum shoal_status status = shoal_reducer_finish(averager->reducer, NULL);
    if (status == SHOAL_OK && averager->marks < averager->count)
        status = check_used(averager);
    if (status != SHOAL_OK)
        status = failure_text(averager, status, text, sizeof text);
    pthread_mutex_lock(&averager->lock);
    for (size_t i = 0; i <= averager->count; i++) {
        struct gradient *const gradient = &averager->gradients[i];
        if (status == SHOAL_OK)
            hand_out(averager, i, true);
        else if (gradient->job)
            job_end_later(gradient->job, status, text);
        gradient->job = NULL;
        gradient->output = NULL;
    }
    averager->phase = BETWEEN_STEPS;
    pthread_cond_broadcast(&averager->changed);
}

/* ---- The thread that ends steps ------------------------------------------------------------------------------------------ */

/* Ends an open step whose missing gradients will not arrive. After an operation has failed, TensorFlow starts no other and
 * sends no notice, while the other ranks wait for this one's gradients. Call it with the lock, which it releases in between. */
static void look_after_step(struct averager *averager)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const size_t marked = averager->marked, marks = averager->marks;
    const bool stops = averager->stops, is_late = now_ms() - averager->marked_ms >= averager->timeout_ms;
    pthread_mutex_unlock(&averager->lock);
    if (stops)
        fail_reducer(averager, SHOAL_ERR_ABORTED,
                     "averaging ended within a step, after %zu of its %zu gradients: an exception ended the step on this rank, "
                     "and shoal.tensorflow.shutdown() was called",
                     marked, marks);
    else if (is_late)
        fail_reducer(averager, SHOAL_ERR_TIMEOUT,
                     "only %zu of %zu gradients of a step came, and no further one for %u ms: an exception ended the step on "
                     "this rank, or its backward pass is slower than SHOAL_TIMEOUT_MS or timeout_s of init() allows",
                     marked, marks, averager->timeout_ms);
    const bool has_failed = shoal_reducer_failure(averager->reducer, &failure) == SHOAL_OK;
    pthread_mutex_lock(&averager->lock);
    if (has_failed && averager->phase == OPEN)
        averager->phase = ENDING;
}

/* Waits for a change. In an open step it returns after a moment. In the other phases the wait is bounded or waits for the
 * program: begins are local, and marks in progress only copy. Call it with the lock, which it releases in between. */
static void wait_for_change(struct averager *averager)
{
    struct timespec until;
    if (averager->phase != OPEN) {
        pthread_cond_wait(&averager->changed, &averager->lock);
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += WATCH_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(&averager->changed, &averager->lock, &until);
}

static void *end_steps(void *arg)
{
    struct averager *const averager = arg;
    pthread_mutex_lock(&averager->lock);
    while (averager->phase != BETWEEN_STEPS || !averager->stops) {
        if (averager->phase == ENDING && averager->claimed == averager->marked)
            end_step(averager);
        else
            wait_for_change(averager);
        if (averager->phase == OPEN)
            look_after_step(averager);
    }
    pthread_mutex_unlock(&averager->lock);
    return NULL;
}

/* ---- A gradient ---------------------------------------------------------------------------------------------------------- */

static bool refuse_reducers(struct call *call, struct averager *averager, enum shoal_status status)
{
    char text[JOB_TEXT_BYTES];
    status = failure_text(averager, status, text, sizeof text);
    return call_refuse(call, world_code(status), "%s", text);
}

/* Enters a step; the first gradient begins one. If the step before is still ending, this waits for it, at most until the
 * deadlines of its operations. Call it with the lock, which it releases in between. */
static enum shoal_status enter_step(struct averager *averager, const struct call *call)
{
    while (averager->phase == ENDING || averager->phase == BEGINNING)
        pthread_cond_wait(&averager->changed, &averager->lock);
    if (averager->stops)
        return SHOAL_ERR_STATE;
    if (averager->phase == OPEN)
        return SHOAL_OK;
    averager->phase = BEGINNING;
    pthread_mutex_unlock(&averager->lock);
    const enum shoal_status status = shoal_reducer_begin(averager->reducer, SHOAL_STEP_REDUCE);
    pthread_mutex_lock(&averager->lock);
    averager->phase = status == SHOAL_OK ? OPEN : BETWEEN_STEPS;
    averager->step = tf.StepId(call->context);
    averager->marks = (size_t)call->kernel->marks;
    averager->claimed = averager->marked = 0;
    averager->marked_ms = now_ms();
    pthread_cond_broadcast(&averager->changed);
    return status;
}

/* Enters the gradient in the step; note_mark follows. */
static enum shoal_status claim(struct averager *averager, struct call *call, struct gradient *gradient, void *output)
{
    pthread_mutex_lock(&averager->lock);
    const enum shoal_status status = enter_step(averager, call);
    const bool is_of_step = averager->step == tf.StepId(call->context) && !gradient->output;
    const size_t marked = averager->marked, marks = averager->marks;
    if (status == SHOAL_OK && is_of_step) {
        gradient->job = call->job;
        gradient->output = output;
        job_hold(call->job);
        averager->claimed++;
    }
    pthread_mutex_unlock(&averager->lock);
    if (status != SHOAL_OK || is_of_step)
        return status;
    return fail_reducer(averager, SHOAL_ERR_STATE,
                        "%s came after %zu of the %zu gradients of another step: an exception ended that step, or two tapes "
                        "average the same variables at once",
                        gradient->name, marked, marks);
}

static void note_mark(struct averager *averager)
{
    pthread_mutex_lock(&averager->lock);
    averager->marked++;
    averager->marked_ms = now_ms();
    if (averager->phase == OPEN && averager->marked >= averager->marks)
        averager->phase = ENDING;
    if (averager->phase == ENDING)
        pthread_cond_broadcast(&averager->changed);
    pthread_mutex_unlock(&averager->lock);
}

static bool mark(struct call *call, struct averager *averager, struct shaped *input, struct shaped *output)
{
    const size_t index = (size_t)call->kernel->index;
    struct gradient *const gradient = &averager->gradients[index];
    enum shoal_status status;
    if (input->bytes == gradient->bytes)
        status = claim(averager, call, gradient, output->data ? output->data : gradient);
    else
        status = fail_reducer(averager, SHOAL_ERR_ARGUMENT, "the gradient of %s has %zu bytes, but its variable has %zu",
                              gradient->name, input->bytes, gradient->bytes);
    if (status != SHOAL_OK)
        return refuse_reducers(call, averager, status);
    /* The reducer reads the gradient before this returns, so its memory may be the output's. The reducer keeps a failure, which
     * ends the step. */
    status = shoal_reducer_ready(averager->reducer, index, input->data, gradient->count);
    (void)status;
    note_mark(averager);
    return true;
}

/* Enters a step without a gradient, and waits for the other ranks, which may have one. */
static bool mark_none(struct call *call, struct averager *averager)
{
    struct gradient *const none = &averager->gradients[averager->count];
    const enum shoal_status status = claim(averager, call, none, none);
    if (status != SHOAL_OK)
        return refuse_reducers(call, averager, status);
    note_mark(averager);
    return true;
}

/* ---- Kernels ------------------------------------------------------------------------------------------------------------- */

/* Call it with the table's lock. */
static struct averager *find(int64_t number)
{
    struct averager *const averager = number >= 0 ? averagers[number % AVERAGERS_MAX] : NULL;
    return averager && averager->number == number ? averager : NULL;
}

/* Returns the averager, which stays alive until averager_leave, or NULL if there is none of that number. */
static struct averager *averager_enter(int64_t number)
{
    pthread_mutex_lock(&table_lock);
    struct averager *const averager = find(number);
    if (averager)
        averager->users++;
    pthread_mutex_unlock(&table_lock);
    return averager;
}

static void averager_leave(struct averager *averager)
{
    pthread_mutex_lock(&table_lock);
    if (averager && --averager->users == 0)
        pthread_cond_broadcast(&was_left);
    pthread_mutex_unlock(&table_lock);
}

struct shoal_reducer *shoal_tensorflow_averager_reducer(int64_t number)
{
    struct averager *const averager = averager_enter(number);
    if (!averager)
        return NULL;
    pthread_mutex_lock(&averager->lock);
    while (averager->phase == ENDING)
        pthread_cond_wait(&averager->changed, &averager->lock);
    struct shoal_reducer *const reducer = averager->stops ? NULL : averager->reducer;
    pthread_mutex_unlock(&averager->lock);
    averager_leave(averager);
    return reducer;
}

/* Leaves the communicator at once, because a gradient may wait for the end of the previous step. */
static bool gradient_begin(struct call *call, const struct kernel *kernel, TF_OpKernelContext *context, size_t tensors)
{
    if (!call_begin(call, kernel, context, "average of gradients", tensors))
        return false;
    call_leave(call);
    return true;
}

void gradient_start(void *kernel, TF_OpKernelContext *context)
{
    const struct kernel *const k = kernel;
    struct call call;
    struct shaped input, output;
    struct averager *const averager = averager_enter(k->reducer);
    if (gradient_begin(&call, kernel, context, 2)) {
        if (!averager || k->index < 0 || (size_t)k->index >= averager->count)
            call_refuse(&call, TF_FAILED_PRECONDITION, "%s", HAS_ENDED);
        else if (call_in_place(&call, 0, &input, &output) && call_handle(&call, 1))
            mark(&call, averager, &input, &output);
    }
    call_end(&call);
    averager_leave(averager);
}

void gradients_none(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done)
{
    const struct kernel *const k = kernel;
    struct call call;
    struct averager *const averager = averager_enter(k->reducer);
    bool waits = gradient_begin(&call, kernel, context, 0);
    if (waits)
        waits = averager ? mark_none(&call, averager) : call_refuse(&call, TF_FAILED_PRECONDITION, "%s", HAS_ENDED);
    if (waits)
        job_wait(call.job, context, done);
    else
        tf.RunAsyncOpKernelDoneCallback(done);
    call_end(&call);
    averager_leave(averager);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* Call it after the last step has ended. */
static void destroy(struct averager *averager)
{
    if (!averager)
        return;
    shoal_reducer_free(averager->reducer);
    for (size_t i = 0; averager->gradients && i <= averager->count; i++)
        free(averager->gradients[i].name);
    free(averager->gradients);
    pthread_cond_destroy(&averager->changed);
    pthread_mutex_destroy(&averager->lock);
    free(averager);
}

static void init_lock(struct averager *averager)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&averager->lock, NULL);
    pthread_cond_init(&averager->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Sets the constant fields of gradients. Returns false if out of memory. */
static bool describe(struct averager *averager, const struct shoal_parameter *parameters)
{
    for (size_t i = 0; i < averager->count; i++) {
        struct gradient *const gradient = &averager->gradients[i];
        gradient->count = parameters[i].count;
        gradient->bytes = parameters[i].count * shoal_type_bytes(parameters[i].type);
        gradient->name = strdup(parameters[i].name ? parameters[i].name : "");
        if (!gradient->name)
            return false;
    }
    struct gradient *const none = &averager->gradients[averager->count];
    none->name = strdup("a step without gradients");
    return none->name != NULL;
}

static struct averager *create(const struct world *world, const struct shoal_parameter *parameters, size_t parameter_count)
{
    struct averager *const averager = calloc(1, sizeof *averager);
    if (!averager)
        return NULL;
    averager->rank = world->rank;
    averager->timeout_ms = world->timeout_ms;
    averager->count = parameter_count;
    averager->gradients = calloc(parameter_count + 1, sizeof *averager->gradients);
    init_lock(averager);
    if (averager->gradients && describe(averager, parameters))
        return averager;
    destroy(averager);
    return NULL;
}

static enum shoal_status start(struct averager *averager, const struct world *world, const struct shoal_parameter *parameters,
                               const struct shoal_reducer_options *options, char *error, size_t error_bytes)
{
    struct shoal_reducer_options chosen = *options;
    chosen.keeps_layout = 1;
    chosen.results_in_views = 1;
    chosen.allows_unused = 1;
    chosen.has_thread = 1;
    chosen.on_buffer = buffer_done;
    chosen.on_buffer_arg = averager;
    const enum shoal_status status =
        shoal_reducer_create(world->context, world->comm, parameters, averager->count, &chosen, &averager->reducer);
    if (status != SHOAL_OK) {
        struct shoal_failure failure = SHOAL_FAILURE_INIT;
        const bool is_known = shoal_last_failure(world->context, NULL, &failure) == SHOAL_OK && failure.text[0];
        snprintf(error, error_bytes, "%s", is_known ? failure.text : shoal_status_text(status));
        return status;
    }
    if (pthread_create(&averager->thread, NULL, end_steps, averager) == 0)
        return SHOAL_OK;
    snprintf(error, error_bytes, "no thread can be had");
    return SHOAL_ERR_SYSTEM;
}

/* Returns the averager's number, or -1 if the table is full. */
static int64_t enlist(struct averager *averager)
{
    int64_t number = -1;
    pthread_mutex_lock(&table_lock);
    for (int64_t tries = 0; tries < AVERAGERS_MAX && number < 0; tries++) {
        if (!averagers[averagers_made % AVERAGERS_MAX])
            number = averagers_made;
        averagers_made++;
    }
    if (number >= 0) {
        averager->number = number;
        averagers[number % AVERAGERS_MAX] = averager;
    }
    pthread_mutex_unlock(&table_lock);
    return number;
}

/* Ends an averager that kernels can no longer find. Kernels that use it return soon: a step ends by the deadlines of its
 * operations, and no step begins. */
static void stop(struct averager *averager)
{
    pthread_mutex_lock(&averager->lock);
    averager->stops = true;
    pthread_cond_broadcast(&averager->changed);
    pthread_mutex_unlock(&averager->lock);
    pthread_join(averager->thread, NULL);
    pthread_mutex_lock(&table_lock);
    while (averager->users > 0)
        pthread_cond_wait(&was_left, &table_lock);
    pthread_mutex_unlock(&table_lock);
    destroy(averager);
}

int64_t shoal_tensorflow_averager_create(int world_number, const struct shoal_parameter *parameters, size_t parameter_count,
                                         const struct shoal_reducer_options *options, char *error, size_t error_bytes)
{
    enum shoal_status status = SHOAL_ERR_MEMORY;
    const struct world *const world = world_enter(world_number);
    if (!world) {
        snprintf(error, error_bytes, "there is no communicator: shoal.tensorflow.init() was not called, or shutdown() was");
        return -SHOAL_ERR_STATE;
    }
    struct averager *const averager = create(world, parameters, parameter_count);
    snprintf(error, error_bytes, "no memory for %zu gradients", parameter_count);
    if (averager)
        status = start(averager, world, parameters, options, error, error_bytes);
    world_leave();
    if (status != SHOAL_OK) {
        destroy(averager);
        return -(int64_t)status;
    }
    const int64_t number = enlist(averager);
    if (number >= 0)
        return number;
    stop(averager);
    snprintf(error, error_bytes,
             "this process averages the gradients of %d lists of variables, which is the limit: average those of the same "
             "variables together, and free models that are no longer used",
             AVERAGERS_MAX);
    return -SHOAL_ERR_UNSUPPORTED;
}

void shoal_tensorflow_averager_free(int64_t number)
{
    pthread_mutex_lock(&table_lock);
    struct averager *const averager = find(number);
    if (averager)
        averagers[number % AVERAGERS_MAX] = NULL;
    pthread_mutex_unlock(&table_lock);
    if (averager)
        stop(averager);
}
