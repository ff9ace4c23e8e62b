/* A job: what a start operation began and a finish operation waits for.
 *
 *     start (stateful, does not block)  ->  pending tensors, handle     the memory of the results, which are not there yet
 *     finish (stateless, asynchronous)  <-  pending tensors, handle     the same tensors, once the job is done
 *
 * Starts run in the program's order on every rank, as TensorFlow orders stateful operations; finishes overlap with each other
 * and with all else. The handle is a tensor that holds the job's number and, by its memory, a reference: a job whose finish is
 * pruned from a graph, or never comes, is freed with it. A thread of this library's own ends jobs and runs what waited for
 * them, so neither TensorFlow's code nor the release of large tensors runs under Shoal's progress lock. Functions may be called
 * from any thread. */
#ifndef SHOAL_TENSORFLOW_TF_JOB_H
#define SHOAL_TENSORFLOW_TF_JOB_H

#include <shoal/shoal.h>

#include "tf_api.h"

#define JOB_TEXT_BYTES 800

struct job;

/* A job with room for so many tensors; name is that of the operation in messages. One reference is the caller's. NULL: no
 * memory. */
struct job *job_create(const char *name, int64_t world, size_t tensors);
void job_hold(struct job *job);
void job_release(struct job *job);

/* The job keeps the tensor until it is done; the reference is the job's from now on. */
void job_keep(struct job *job, TF_Tensor *tensor);

/* A scalar tensor that names the job and holds a reference. NULL: no memory. */
TF_Tensor *job_handle(struct job *job);

/* The job that a handle names, with a reference for the caller. NULL: it is over, or this is no handle. */
struct job *job_of(const TF_Tensor *handle);

/* Takes over a request that was posted for the job, which ends with it. */
void job_follow(struct job *job, struct shoal_request *request);

/* Ends the job on the calling thread: frees its tensors, and lets finishes go on. text may be NULL with SHOAL_OK. */
void job_end(struct job *job, enum shoal_status status, const char *text);

/* The same on the thread that ends jobs, for callers that must not run what waits. Takes over a reference of the caller's. With
 * an error and no text the communicator's failure is told. */
void job_end_later(struct job *job, enum shoal_status status, const char *text);

/* Ends the kernel of a finish when the job is done, with the job's error if it has one. */
void job_wait(struct job *job, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *callback);

#endif
