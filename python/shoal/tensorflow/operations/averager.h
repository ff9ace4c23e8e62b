/* Averages the gradients of a step by the gradient engine (shoal/gradients.h), fed by operations.
 *
 *     gradient_start of parameter i   ->  its buffer, in any order, on any thread; the step's last one begins its end
 *     a buffer is averaged            ->  the job of each of its parameters is done, while other buffers are under way
 *
 * Each has a thread, which waits for the end of a step and fails one that an error of TensorFlow has ended. Python makes one for
 * each list of variables, on all ranks alike. */
#ifndef SHOAL_TENSORFLOW_AVERAGER_H
#define SHOAL_TENSORFLOW_AVERAGER_H

#include <shoal/gradients.h>

#include "tf_job.h"
#include "tf_api.h"

#define AVERAGERS_MAX 4096 /* at one time */

/* Makes one with the options of a reducer; this fills in what calls back. A step fails on every rank when no further gradient
 * comes for as long as the world's operations may take. A collective call, as shoal_reducer_create is. Returns its number, which
 * is never used again, or a status below zero with the reason in error. */
__attribute__((visibility("default"))) int64_t
shoal_tensorflow_averager_create(int world, const struct shoal_parameter *parameters, size_t parameter_count,
                                 const struct shoal_reducer_options *options, char *error, size_t error_bytes);

/* Ends one, and with an error the step that it is in. Returns when nothing of it runs. */
__attribute__((visibility("default"))) void shoal_tensorflow_averager_free(int64_t number);

/* The kernel of a start: attributes reducer (the averager's number), index (of the parameter), marks (how many gradients this
 * rank has in the step). */
void gradient_start(void *kernel, TF_OpKernelContext *context);

/* The kernel of a step for which this rank has no gradient: attribute reducer. It fails if another rank has one. */
void gradients_none(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done);

#endif
