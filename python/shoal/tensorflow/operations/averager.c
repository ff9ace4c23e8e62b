/* Averages gradients: see the header. */
#include "averager.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

enum phase {
    BETWEEN_STEPS,
    OPEN,   /* gradients come */
    ENDING, /* all have come */
};

/* What a step has of a parameter. */
struct gradient {
    struct job *job; /* NULL: none, or it has ended */
    void *output;
    size_t count; /* elements, constant */
    size_t bytes; /* constant */
    char *name;   /* constant */
};

struct averager {
    struct shoal_context *context;
    struct shoal_reducer *reducer;
    int rank;
    size_t count;
    struct gradient *gradients;
    pthread_t thread;

    pthread_mutex_t lock; /* of what follows, and of jobs and outputs */
    pthread_cond_t changed;
    enum phase phase;
    bool stops;
    size_t marks;  /* gradients that this rank has in the step */
    size_t marked; /* of which so many are in their buffers */
};

static struct averager *averagers[AVERAGERS_MAX];
static int64_t averagers_made;
static pthread_rwlock_t table_lock = PTHREAD_RWLOCK_INITIALIZER; /* held for reading while one is in use */

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

static void failure_text(const struct averager *averager, enum shoal_status status, char *text, size_t bytes)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const bool is_known = shoal_reducer_failure(averager->reducer, &failure) == SHOAL_OK && failure.text[0];
    snprintf(text, bytes, "%s", is_known ? failure.text : shoal_status_text(status));
}

/* With the lock. Where this rank lacks a gradient, jobs wait for the step's end, which tells whether others have it. */
static void hand_out(struct averager *averager, size_t index, bool is_end)
{
    struct gradient *const gradient = &averager->gradients[index];
    if (!gradient->job || (averager->marks < averager->count && !is_end))
        return;
    job_end_later(gradient->job, SHOAL_OK, NULL);
    gradient->job = NULL;
}

/* Of the reducer, on its thread or on this averager's. */
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

/* A gradient that this rank lacks and another one has: variables would drift apart. */
static enum shoal_status check_used(struct averager *averager)
{
    for (size_t i = 0; i < averager->count; i++) {
        char text[400];
        if (averager->gradients[i].output || !shoal_reducer_is_used(averager->reducer, i))
            continue;
        snprintf(
            text, sizeof text,
            "the gradient of %s is None on rank %d, but another rank has one: compute the same loss from the same variables on "
            "every rank",
            averager->gradients[i].name, averager->rank);
        shoal_reducer_fail(averager->reducer, SHOAL_ERR_MISMATCH, text);
        return SHOAL_ERR_MISMATCH;
    }
    return SHOAL_OK;
}

static void end_step(struct averager *averager)
{
    char text[JOB_TEXT_BYTES] = "";
    enum shoal_status status = shoal_reducer_finish(averager->reducer, NULL);
    if (status == SHOAL_OK && averager->marks < averager->count)
        status = check_used(averager);
    if (status != SHOAL_OK)
        failure_text(averager, status, text, sizeof text);
    pthread_mutex_lock(&averager->lock);
    for (size_t i = 0; i < averager->count; i++) {
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
    pthread_mutex_unlock(&averager->lock);
}

static void *end_steps(void *arg)
{
    struct averager *const averager = arg;
    pthread_mutex_lock(&averager->lock);
    while (!averager->stops) {
        if (averager->phase != ENDING) {
            pthread_cond_wait(&averager->changed, &averager->lock);
            continue;
        }
        pthread_mutex_unlock(&averager->lock);
        end_step(averager);
        pthread_mutex_lock(&averager->lock);
    }
    pthread_mutex_unlock(&averager->lock);
    return NULL;
}

/* ---- A gradient ---------------------------------------------------------------------------------------------------------- */

static bool refuse_reducers(struct call *call, struct averager *averager, enum shoal_status status)
{
    char text[JOB_TEXT_BYTES];
    failure_text(averager, status, text, sizeof text);
    return call_refuse(call, world_code(status), "%s", text);
}

/* With the lock. The first gradient begins a step; the end of the step before may not be over. */
static bool enter_step(struct call *call, struct averager *averager)
{
    while (averager->phase == ENDING)
        pthread_cond_wait(&averager->changed, &averager->lock);
    if (averager->phase == OPEN)
        return true;
    const enum shoal_status status = shoal_reducer_begin(averager->reducer, SHOAL_STEP_REDUCE);
    if (status != SHOAL_OK)
        return refuse_reducers(call, averager, status);
    averager->phase = OPEN;
    averager->marks = (size_t)call->kernel->marks;
    averager->marked = 0;
    return true;
}

/* With the lock. */
static bool claim(struct call *call, struct averager *averager, struct gradient *gradient, void *output)
{
    if (!enter_step(call, averager))
        return false;
    if (gradient->output) {
        char text[400];
        snprintf(
            text, sizeof text,
            "rank %d: the gradient of %s came twice before the step's other gradients: an exception ended a step, or two tapes "
            "average the same variables at once",
            averager->rank, gradient->name);
        shoal_reducer_fail(averager->reducer, SHOAL_ERR_STATE, text);
        return refuse_reducers(call, averager, SHOAL_ERR_STATE);
    }
    gradient->job = call->job;
    gradient->output = output;
    job_hold(call->job);
    return true;
}

static void note_mark(struct averager *averager)
{
    pthread_mutex_lock(&averager->lock);
    if (++averager->marked == averager->marks) {
        averager->phase = ENDING;
        pthread_cond_broadcast(&averager->changed);
    }
    pthread_mutex_unlock(&averager->lock);
}

static bool mark(struct call *call, struct averager *averager, struct shaped *input, struct shaped *output)
{
    const size_t index = (size_t)call->kernel->index;
    struct gradient *const gradient = &averager->gradients[index];
    if (input->bytes != gradient->bytes) {
        char text[400];
        snprintf(text, sizeof text, "rank %d: the gradient of %s has %zu bytes, but its variable has %zu", averager->rank,
                 gradient->name, input->bytes, gradient->bytes);
        shoal_reducer_fail(averager->reducer, SHOAL_ERR_ARGUMENT, text);
        return call_refuse(call, TF_INVALID_ARGUMENT, "%s", text);
    }
    pthread_mutex_lock(&averager->lock);
    const bool is_claimed = claim(call, averager, gradient, output->data ? output->data : gradient);
    pthread_mutex_unlock(&averager->lock);
    if (!is_claimed)
        return false;
    /* The gradient is read before this returns, so that its memory may be the output's. A failure is the reducer's, and is told
     * at the end of the step, to which the other gradients go on. */
    const enum shoal_status status = shoal_reducer_ready(averager->reducer, index, input->data, gradient->count);
    (void)status;
    note_mark(averager);
    return true;
}

static struct averager *find(int64_t number, int64_t index)
{
    struct averager *const averager = number >= 0 && number < averagers_made ? averagers[number] : NULL;
    return averager && index >= 0 && (size_t)index < averager->count ? averager : NULL;
}

void gradient_start(void *kernel, TF_OpKernelContext *context)
{
    const struct kernel *const k = kernel;
    struct call call;
    struct shaped input, output;
    pthread_rwlock_rdlock(&table_lock);
    struct averager *const averager = find(k->reducer, k->index);
    if (call_begin(&call, kernel, context, "average of gradients", 2)) {
        if (!averager)
            call_refuse(&call, TF_FAILED_PRECONDITION, "its reducer has ended: shoal.tensorflow.shutdown() was called");
        else if (call_in_place(&call, 0, &input, &output) && call_handle(&call, 1))
            mark(&call, averager, &input, &output);
    }
    call_end(&call);
    pthread_rwlock_unlock(&table_lock);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void destroy(struct averager *averager)
{
    if (!averager)
        return;
    shoal_reducer_free(averager->reducer);
    for (size_t i = 0; averager->gradients && i < averager->count; i++)
        free(averager->gradients[i].name);
    free(averager->gradients);
    pthread_cond_destroy(&averager->changed);
    pthread_mutex_destroy(&averager->lock);
    free(averager);
}

static struct averager *create(const struct world *world, const struct shoal_parameter *parameters, size_t parameter_count)
{
    struct averager *const averager = calloc(1, sizeof *averager);
    if (!averager)
        return NULL;
    averager->context = world->context;
    averager->rank = world->rank;
    averager->count = parameter_count;
    averager->gradients = calloc(parameter_count ? parameter_count : 1, sizeof *averager->gradients);
    pthread_mutex_init(&averager->lock, NULL);
    pthread_cond_init(&averager->changed, NULL);
    bool is_complete = averager->gradients != NULL;
    for (size_t i = 0; is_complete && i < parameter_count; i++) {
        struct gradient *const gradient = &averager->gradients[i];
        gradient->count = parameters[i].count;
        gradient->bytes = parameters[i].count * shoal_type_bytes(parameters[i].type);
        gradient->name = strdup(parameters[i].name ? parameters[i].name : "");
        is_complete = gradient->name != NULL;
    }
    if (is_complete)
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

/* Its number, -1 where there is no more room. */
static int64_t enlist(struct averager *averager)
{
    int64_t number = -1;
    pthread_rwlock_wrlock(&table_lock);
    if (averagers_made < AVERAGERS_MAX) {
        number = averagers_made++;
        averagers[number] = averager;
    }
    pthread_rwlock_unlock(&table_lock);
    return number;
}

static void stop(struct averager *averager)
{
    pthread_mutex_lock(&averager->lock);
    averager->stops = true;
    pthread_cond_broadcast(&averager->changed);
    pthread_mutex_unlock(&averager->lock);
    pthread_join(averager->thread, NULL);
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
    snprintf(error, error_bytes, "this process has averaged the gradients of %d lists of variables, which is the most",
             AVERAGERS_MAX);
    return -SHOAL_ERR_UNSUPPORTED;
}

void shoal_tensorflow_averager_free(int64_t number)
{
    pthread_rwlock_wrlock(&table_lock);
    struct averager *const averager = find(number, 0);
    if (averager)
        averagers[number] = NULL;
    pthread_rwlock_unlock(&table_lock);
    if (averager)
        stop(averager);
}
