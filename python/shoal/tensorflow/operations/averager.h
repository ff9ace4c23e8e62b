/* Averages the gradients of a step with the gradient engine (shoal/gradients.h). Operations pass it the gradients.
 *
 *     gradient_start of parameter i   ->  its buffer, in any order, on any thread; the step's last one begins its end
 *     a buffer is averaged            ->  the job of each of its parameters is done, while other buffers are under way
 *
 * Each averager has a thread, which waits for the end of a step and fails a step that an error of TensorFlow has ended. Python
 * makes an averager for each list of variables, in the same order on all ranks. */
#ifndef SHOAL_TENSORFLOW_AVERAGER_H
#define SHOAL_TENSORFLOW_AVERAGER_H

#include <shoal/gradients.h>

#include "tf_job.h"
#include "tf_api.h"

#define AVERAGERS_MAX 4096 /* at one time */

/* Makes an averager with a reducer's options; this function sets the callbacks in them. A step fails on every rank if no
 * gradient arrives for as long as the world's operations may take. A collective call, like shoal_reducer_create. Returns the
 * averager's number, which is never used again, or a status below zero with the reason in `error`. */
__attribute__((visibility("default"))) int64_t
shoal_tensorflow_averager_create(int world, const struct shoal_parameter *parameters, size_t parameter_count,
                                 const struct shoal_reducer_options *options, char *error, size_t error_bytes);

/* Ends an averager, and its current step with an error. Returns when none of its code runs. */
__attribute__((visibility("default"))) void shoal_tensorflow_averager_free(int64_t number);

/* Waits until a step whose gradients have all come has ended, and returns the averager's reducer; NULL if the averager has ended.
 * The program must run no step while it uses the reducer, and not free the averager. */
__attribute__((visibility("default"))) struct shoal_reducer *shoal_tensorflow_averager_reducer(int64_t number);

/* The kernel that starts a gradient. Attributes: reducer (the averager's number), index (of the parameter), marks (how many
 * gradients this rank has in the step). */
void gradient_start(void *kernel, TF_OpKernelContext *context);

/* The kernel of a step for which this rank has no gradient. Attribute: reducer. It fails if another rank has a gradient. */
void gradients_none(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done);

#endif
