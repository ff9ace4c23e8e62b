/* What all kernels share: their attributes, and the state of one call. */
#ifndef SHOAL_TENSORFLOW_KERNEL_H
#define SHOAL_TENSORFLOW_KERNEL_H

#include <shoal/shoal.h>

#include "tf_job.h"
#include "tf_api.h"
#include "world.h"

#define KERNEL_DIMENSIONS_MAX 254 /* TensorFlow's limit */

/* An operation of a graph. It is constant once made, so concurrent steps share it. */
struct kernel {
    char name[64]; /* the node's name in its graph; eager operations have the name of their type */
    int64_t world;
    int64_t operator_; /* enum shoal_op, if the operation has one */
    int64_t root;
    int64_t reducer; /* for gradients */
    int64_t index;
    int64_t marks;
};

void *kernel_create(TF_OpKernelConstruction *construction);
void kernel_delete(void *kernel);

/* A vector with Shoal's type and count. */
struct elements {
    enum shoal_type type;
    size_t count;
};

/* A tensor with its shape. */
struct shaped {
    TF_Tensor *tensor; /* NULL if there is none */
    void *data;
    size_t bytes;
    int type;
    int rank;
    int64_t dims[KERNEL_DIMENSIONS_MAX];
};

/* One run of a start. */
struct call {
    const struct kernel *kernel;
    TF_OpKernelContext *context;
    TF_Status *status;
    struct job *job;
    const struct world *world;
};

/* Begins a call with a job for `tensors` tensors, and enters its communicator. Returns false if the operation has failed. Call
 * call_end in both cases. */
bool call_begin(struct call *call, const struct kernel *kernel, TF_OpKernelContext *context, const char *what, size_t tensors);
void call_end(struct call *call);

/* Leaves the communicator, if the call is still in it. */
void call_leave(struct call *call);

/* Fails the operation. Returns false, so that the caller can return it. */
__attribute__((format(printf, 3, 4))) bool call_refuse(struct call *call, int code, const char *format, ...);

/* Reads the input of this index; the job keeps it. */
bool call_input(struct call *call, int index, struct shaped *input);

/* Allocates the output of this index; the job keeps it. */
bool call_output(struct call *call, int index, int type, const int64_t *dims, int rank, struct shaped *output);

/* Reads the input of this index and allocates an output of the same type and shape; the job keeps both. They share memory if
 * nobody else uses the input: then read all of it before writing anything. */
bool call_in_place(struct call *call, int index, struct shaped *input, struct shaped *output);

/* Sets the handle as the output of this index. */
bool call_handle(struct call *call, int index);

/* Handles the result of a post: the job follows the request, or the operation fails. Then leaves the communicator. */
bool call_posted(struct call *call, enum shoal_status status, struct shoal_request *request);

/* Describes the tensor as an operand of a reduction. Returns false and fails the operation if Shoal cannot reduce the type. */
bool call_reduces(struct call *call, const struct shaped *tensor, struct elements *elements);

/* Describes bytes of any type that are only moved: as elements of Shoal's type if it has one, else as bytes. */
struct elements elements_moved(int type, size_t bytes);

/* Returns the elements of an int64 vector. */
static inline const int64_t *integers_of(const struct shaped *tensor)
{
    return tensor->data;
}

#endif
