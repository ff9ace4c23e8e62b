/* Jobs: see the header. */
#include "tf_job.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "done.h"
#include "world.h"

#define BUCKETS 256
#define HANDLE_ALIGNMENT 64 /* with less alignment TensorFlow would copy */
#define NAME_BYTES 96

/* A finish operation that waits for a job. */
struct waiter {
    struct waiter *next;
    TF_OpKernelContext *context;
    struct done done;
};

struct job {
    uint64_t number;
    struct job *next_in_bucket;
    struct job *next_to_end;
    int references;
    int64_t world;
    bool is_done;
    enum shoal_status status;
    struct waiter *waiters;
    char name[NAME_BYTES];
    char text[JOB_TEXT_BYTES];
    size_t kept;
    TF_Tensor *tensors[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below, and the fields of jobs except tensors */
static pthread_cond_t has_ended = PTHREAD_COND_INITIALIZER;
static struct job *buckets[BUCKETS];
static uint64_t jobs_made;
static struct job *first_to_end, **last_to_end = &first_to_end; /* the jobs whose requests are done */
static bool has_thread;

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

struct job *job_create(const char *name, int64_t world, size_t tensors)
{
    struct job *const job = calloc(1, sizeof *job + tensors * sizeof *job->tensors);
    if (!job)
        return NULL;
    snprintf(job->name, sizeof job->name, "%s", name);
    job->world = world;
    job->references = 1;
    pthread_mutex_lock(&lock);
    job->number = ++jobs_made;
    job->next_in_bucket = buckets[job->number % BUCKETS];
    buckets[job->number % BUCKETS] = job;
    pthread_mutex_unlock(&lock);
    return job;
}

static void drop_tensors(struct job *job)
{
    for (size_t i = 0; i < job->kept; i++)
        tf.DeleteTensor(job->tensors[i]);
    job->kept = 0;
}

void job_release(struct job *job)
{
    pthread_mutex_lock(&lock);
    const bool is_last = --job->references == 0;
    if (is_last) {
        struct job **at = &buckets[job->number % BUCKETS];
        while (*at != job)
            at = &(*at)->next_in_bucket;
        *at = job->next_in_bucket;
    }
    pthread_mutex_unlock(&lock);
    if (!is_last)
        return;
    drop_tensors(job);
    free(job);
}

void job_hold(struct job *job)
{
    pthread_mutex_lock(&lock);
    job->references++;
    pthread_mutex_unlock(&lock);
}

void job_keep(struct job *job, TF_Tensor *tensor)
{
    job->tensors[job->kept++] = tensor;
}

/* ---- Handles ------------------------------------------------------------------------------------------------------------- */

static void drop_handle(void *data, size_t bytes, void *arg)
{
    (void)bytes;
    free(data);
    job_release(arg);
}

TF_Tensor *job_handle(struct job *job)
{
    void *memory;
    if (posix_memalign(&memory, HANDLE_ALIGNMENT, HANDLE_ALIGNMENT) != 0)
        return NULL;
    memcpy(memory, &job->number, sizeof job->number);
    job_hold(job);
    return tf.NewTensor(TF_INT64, NULL, 0, memory, sizeof(int64_t), drop_handle, job);
}

struct job *job_of(const TF_Tensor *handle)
{
    uint64_t number;
    memcpy(&number, tf.TensorData(handle), sizeof number);
    pthread_mutex_lock(&lock);
    struct job *job = buckets[number % BUCKETS];
    while (job && job->number != number)
        job = job->next_in_bucket;
    if (job)
        job->references++;
    pthread_mutex_unlock(&lock);
    return job;
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

static void fail(TF_OpKernelContext *context, const struct job *job)
{
    char text[NAME_BYTES + JOB_TEXT_BYTES + 16];
    TF_Status *const status = tf.NewStatus();
    snprintf(text, sizeof text, "shoal: %s: %s", job->name, job->text);
    tf.SetStatus(status, world_code(job->status), text);
    tf.OpKernelContext_Failure(context, status);
    tf.DeleteStatus(status);
}

void job_end(struct job *job, enum shoal_status status, const char *text)
{
    drop_tensors(job);
    pthread_mutex_lock(&lock);
    job->is_done = true;
    job->status = status;
    snprintf(job->text, sizeof job->text, "%s", text ? text : "");
    struct waiter *waiter = job->waiters;
    job->waiters = NULL;
    pthread_mutex_unlock(&lock);
    while (waiter) {
        struct waiter *const next = waiter->next;
        if (status != SHOAL_OK)
            fail(waiter->context, job);
        done_run(&waiter->done);
        free(waiter);
        waiter = next;
    }
}

/* Ends a job with the arguments of job_end_later, on the thread that ends jobs. */
static void end_and_release(struct job *job, enum shoal_status status)
{
    char text[JOB_TEXT_BYTES];
    memcpy(text, job->text, sizeof text);
    if (status != SHOAL_OK && !text[0])
        world_failure_text(job->world, status, text, sizeof text);
    job_end(job, status, text);
    job_release(job);
}

static void *end_jobs(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!first_to_end)
            pthread_cond_wait(&has_ended, &lock);
        struct job *const job = first_to_end;
        first_to_end = job->next_to_end;
        if (!first_to_end)
            last_to_end = &first_to_end;
        const enum shoal_status status = job->status;
        pthread_mutex_unlock(&lock);
        end_and_release(job, status);
        pthread_mutex_lock(&lock);
    }
    return unused;
}

/* Starts the thread that ends jobs. Returns false if that fails; the calling thread then ends the job. Call it with the
 * lock. */
static bool ensure_thread(void)
{
    pthread_t thread;
    if (!has_thread && pthread_create(&thread, NULL, end_jobs, NULL) == 0) {
        pthread_detach(thread);
        has_thread = true;
    }
    return has_thread;
}

void job_end_later(struct job *job, enum shoal_status status, const char *text)
{
    pthread_mutex_lock(&lock);
    snprintf(job->text, sizeof job->text, "%s", text ? text : "");
    const bool is_queued = ensure_thread();
    if (is_queued) {
        job->status = status;
        job->next_to_end = NULL;
        *last_to_end = job;
        last_to_end = &job->next_to_end;
        pthread_cond_signal(&has_ended);
    }
    pthread_mutex_unlock(&lock);
    if (!is_queued)
        end_and_release(job, status);
}

/* Runs on the thread that makes progress. */
static void request_done(void *arg, enum shoal_status status)
{
    job_end_later(arg, status, NULL);
}

void job_follow(struct job *job, struct shoal_request *request)
{
    job_hold(job);
    const enum shoal_status status = shoal_request_test(request);
    if (status == SHOAL_PENDING)
        shoal_request_on_done(request, request_done, job);
    else
        end_and_release(job, status);
    shoal_request_free(request);
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------- */

/* Returns true if the job will run the waiter. */
static bool enqueue(struct job *job, struct waiter *waiter)
{
    pthread_mutex_lock(&lock);
    const bool waits = !job->is_done;
    if (waits) {
        waiter->next = job->waiters;
        job->waiters = waiter;
    }
    pthread_mutex_unlock(&lock);
    return waits;
}

static void end_now(struct job *job, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *callback)
{
    if (job->status != SHOAL_OK)
        fail(context, job);
    tf.RunAsyncOpKernelDoneCallback(callback);
}

static void refuse(TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *callback, int code, const char *text)
{
    TF_Status *const status = tf.NewStatus();
    tf.SetStatus(status, code, text);
    tf.OpKernelContext_Failure(context, status);
    tf.DeleteStatus(status);
    tf.RunAsyncOpKernelDoneCallback(callback);
}

void job_wait(struct job *job, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *callback)
{
    pthread_mutex_lock(&lock);
    const bool is_done = job->is_done;
    pthread_mutex_unlock(&lock);
    if (is_done) {
        end_now(job, context, callback);
        return;
    }
    struct waiter *const waiter = calloc(1, sizeof *waiter);
    if (!waiter || !done_copy(&waiter->done, callback)) {
        refuse(context, callback, TF_UNIMPLEMENTED,
               "shoal: this TensorFlow was not built with libstdc++: its callbacks cannot be kept until an operation is done");
        free(waiter);
        return;
    }
    waiter->context = context;
    if (enqueue(job, waiter))
        return;
    if (job->status != SHOAL_OK)
        fail(context, job);
    done_run(&waiter->done);
    free(waiter);
}
