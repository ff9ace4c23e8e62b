/* A job: started by a start operation, and awaited by a finish operation.
 *
 *     start (stateful, does not block)  ->  pending tensors, handle     the memory of the results, which are not there yet
 *     finish (stateless, asynchronous)  <-  pending tensors, handle     the same tensors, once the job is done
 *
 * Starts run in the program's order on every rank, as TensorFlow orders stateful operations. Finishes run in parallel with each
 * other and with everything else. The handle is a tensor that holds the job's number. Its memory holds a reference: a job whose
 * finish is pruned from a graph, or never comes, is freed with the handle.
 *
 * A thread of this library ends jobs and runs what waited for them, so that neither TensorFlow's code nor the release of large
 * tensors runs under Shoal's progress lock. Any thread may call these functions. */
#ifndef SHOAL_TENSORFLOW_TF_JOB_H
#define SHOAL_TENSORFLOW_TF_JOB_H

#include <shoal/shoal.h>

#include "tf_api.h"

#define JOB_TEXT_BYTES 800

struct job;

/* Makes a job with room for `tensors` tensors. `name` is the operation's name in messages. The caller owns one reference.
 * Returns NULL if out of memory. */
struct job *job_create(const char *name, int64_t world, size_t tensors);
void job_hold(struct job *job);
void job_release(struct job *job);

/* Gives the job the caller's reference to the tensor, which it keeps until it is done. */
void job_keep(struct job *job, TF_Tensor *tensor);

/* Makes a scalar tensor that names the job and holds a reference. Returns NULL if out of memory. */
TF_Tensor *job_handle(struct job *job);

/* Returns the job that a handle names, with a reference for the caller. Returns NULL if the job is over or this is not a
 * handle. */
struct job *job_of(const TF_Tensor *handle);

/* Ties the job's end to that of a request that was posted for it. Takes ownership of the request. */
void job_follow(struct job *job, struct shoal_request *request);

/* Ends the job on the calling thread: frees its tensors and lets finish operations continue. `text` may be NULL with
 * SHOAL_OK. */
void job_end(struct job *job, enum shoal_status status, const char *text);

/* Like job_end, but on the thread that ends jobs, for callers that must not run waiting operations. Takes one of the caller's
 * references. With an error and no text, the job reports the communicator's failure. */
void job_end_later(struct job *job, enum shoal_status status, const char *text);

/* Ends the kernel of a finish operation when the job is done, with the job's error if it has one. */
void job_wait(struct job *job, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *callback);

#endif
