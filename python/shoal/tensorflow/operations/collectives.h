/* Kernels of the collectives: starts, the finish of all of them, and the barrier. */
#ifndef SHOAL_TENSORFLOW_COLLECTIVES_H
#define SHOAL_TENSORFLOW_COLLECTIVES_H

#include "tf_api.h"

void allreduce_start(void *kernel, TF_OpKernelContext *context);
void broadcast_start(void *kernel, TF_OpKernelContext *context);
void allgather_start(void *kernel, TF_OpKernelContext *context);
void reduce_scatter_start(void *kernel, TF_OpKernelContext *context);
void alltoall_start(void *kernel, TF_OpKernelContext *context);
void finish(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done);
void barrier(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done);

#endif
