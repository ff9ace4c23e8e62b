/* What kernels share: their attributes, and one call under way. */
#ifndef SHOAL_TENSORFLOW_KERNEL_H
#define SHOAL_TENSORFLOW_KERNEL_H

#include <shoal/shoal.h>

#include "tf_job.h"
#include "tf_api.h"
#include "world.h"

#define KERNEL_DIMENSIONS_MAX 254 /* TensorFlow's limit */

/* An operation of a graph, constant once made: concurrent steps share it. */
struct kernel {
    char name[64]; /* the node's in its graph; eager operations have that of their type */
    int64_t world;
    int64_t operator_; /* enum shoal_op, where the operation has one */
    int64_t root;
    int64_t reducer; /* of gradients */
    int64_t index;
    int64_t marks;
};

void *kernel_create(TF_OpKernelConstruction *construction);
void kernel_delete(void *kernel);

/* A vector in Shoal's terms. */
struct elements {
    enum shoal_type type;
    size_t count;
};

/* A tensor with its shape. */
struct shaped {
    TF_Tensor *tensor; /* NULL: none */
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

/* Begins a call with a job for so many tensors, and enters its communicator. False: the operation has failed and call_end is
 * to be called, as in any case. */
bool call_begin(struct call *call, const struct kernel *kernel, TF_OpKernelContext *context, const char *what, size_t tensors);
void call_end(struct call *call);

/* Leaves the communicator, if the call is still in it. */
void call_leave(struct call *call);

/* Fails the operation; returns false, for the caller to hand on. */
__attribute__((format(printf, 3, 4))) bool call_refuse(struct call *call, int code, const char *format, ...);

/* Input of this index; the job keeps it. */
bool call_input(struct call *call, int index, struct shaped *input);

/* Output of this index; the job keeps it. */
bool call_output(struct call *call, int index, int type, const int64_t *dims, int rank, struct shaped *output);

/* Input and output of this index, of one type and shape; the job keeps both. They are one memory where nobody else has the
 * input's: then read all of it before anything is written. */
bool call_in_place(struct call *call, int index, struct shaped *input, struct shaped *output);

/* The handle as output of this index. */
bool call_handle(struct call *call, int index);

/* What a post returned: the job follows the request, or the operation fails. Then the communicator is left. */
bool call_posted(struct call *call, enum shoal_status status, struct shoal_request *request);

/* As an operand of a reduction: false, and the operation fails, where Shoal cannot reduce the type. */
bool call_reduces(struct call *call, const struct shaped *tensor, struct elements *elements);

/* As bytes that are moved, of any type: elements of Shoal's where it has the type, else bytes. */
struct elements elements_moved(int type, size_t bytes);

/* Elements of an int64 vector. */
static inline const int64_t *integers_of(const struct shaped *tensor)
{
    return tensor->data;
}

#endif
