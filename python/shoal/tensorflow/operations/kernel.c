/* Functions that all kernels share. */
#include "kernel.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void read_attribute(TF_OpKernelConstruction *construction, const char *name, int64_t *value, TF_Status *status)
{
    if (tf.OpKernelConstruction_HasAttr(construction, name, status))
        tf.OpKernelConstruction_GetAttrInt64(construction, name, value, status);
}

void *kernel_create(TF_OpKernelConstruction *construction)
{
    struct kernel *const kernel = calloc(1, sizeof *kernel);
    TF_Status *const status = tf.NewStatus();
    if (kernel) {
        const TF_StringView name = tf.OpKernelConstruction_GetName(construction);
        snprintf(kernel->name, sizeof kernel->name, "%.*s", (int)name.length, name.data);
        read_attribute(construction, "world", &kernel->world, status);
        read_attribute(construction, "operator", &kernel->operator_, status);
        read_attribute(construction, "root", &kernel->root, status);
        read_attribute(construction, "reducer", &kernel->reducer, status);
        read_attribute(construction, "index", &kernel->index, status);
        read_attribute(construction, "marks", &kernel->marks, status);
    } else {
        tf.SetStatus(status, TF_RESOURCE_EXHAUSTED, "shoal: no memory for an operation");
    }
    if (tf.GetCode(status) != TF_OK)
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
    return kernel;
}

void kernel_delete(void *kernel)
{
    free(kernel);
}

bool call_begin(struct call *call, const struct kernel *kernel, TF_OpKernelContext *context, const char *what, size_t tensors)
{
    char name[128];
    snprintf(name, sizeof name, "%s \"%s\"", what, kernel->name);
    *call = (struct call){kernel, context, tf.NewStatus(), job_create(name, kernel->world, tensors), NULL};
    if (!call->job)
        return call_refuse(call, TF_RESOURCE_EXHAUSTED, "no memory");
    call->world = world_enter(kernel->world);
    if (!call->world)
        return call_refuse(call, TF_FAILED_PRECONDITION,
                           "there is no communicator: shoal.tensorflow.init() was not called, or "
                           "shutdown() was");
    return true;
}

void call_leave(struct call *call)
{
    if (call->world)
        world_leave();
    call->world = NULL;
}

void call_end(struct call *call)
{
    call_leave(call);
    if (call->job)
        job_release(call->job);
    tf.DeleteStatus(call->status);
}

static bool failed(struct call *call)
{
    tf.OpKernelContext_Failure(call->context, call->status);
    return false;
}

bool call_refuse(struct call *call, int code, const char *format, ...)
{
    char text[JOB_TEXT_BYTES], line[JOB_TEXT_BYTES + 128];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(line, sizeof line, "shoal: \"%s\": %s", call->kernel->name, text);
    tf.SetStatus(call->status, code, line);
    return failed(call);
}

static void describe(TF_Tensor *tensor, struct shaped *shaped)
{
    shaped->tensor = tensor;
    shaped->data = tf.TensorData(tensor);
    shaped->bytes = tf.TensorByteSize(tensor);
    shaped->type = tf.TensorType(tensor);
    shaped->rank = tf.NumDims(tensor);
    for (int i = 0; i < shaped->rank && i < KERNEL_DIMENSIONS_MAX; i++)
        shaped->dims[i] = tf.Dim(tensor, i);
}

bool call_input(struct call *call, int index, struct shaped *input)
{
    TF_Tensor *tensor = NULL;
    tf.GetInput(call->context, index, &tensor, call->status);
    if (tf.GetCode(call->status) != TF_OK)
        return failed(call);
    job_keep(call->job, tensor);
    describe(tensor, input);
    return true;
}

bool call_output(struct call *call, int index, int type, const int64_t *dims, int rank, struct shaped *output)
{
    size_t bytes = tf.DataTypeSize(type);
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 0 || __builtin_mul_overflow(bytes, (size_t)dims[i], &bytes))
            return call_refuse(call, TF_INVALID_ARGUMENT, "the result has more bytes than there is memory");
    }
    TF_Tensor *const tensor = tf.AllocateOutput(call->context, index, type, dims, rank, bytes, call->status);
    if (tf.GetCode(call->status) != TF_OK)
        return failed(call);
    job_keep(call->job, tensor);
    describe(tensor, output);
    return true;
}

/* TensorFlow passes on the input's memory only if nobody else has a reference to it, so this releases ours first. */
bool call_in_place(struct call *call, int index, struct shaped *input, struct shaped *output)
{
    int forwarded = -1;
    TF_Tensor *tensor = NULL;
    tf.GetInput(call->context, index, &tensor, call->status);
    if (tf.GetCode(call->status) != TF_OK)
        return failed(call);
    describe(tensor, input);
    tf.DeleteTensor(tensor);
    tensor =
        tf.ForwardInputOrAllocateOutput(call->context, &index, 1, index, input->dims, input->rank, &forwarded, call->status);
    if (tf.GetCode(call->status) != TF_OK)
        return failed(call);
    job_keep(call->job, tensor);
    describe(tensor, output);
    if (forwarded != index)
        return call_input(call, index, input);
    *input = *output;
    return true;
}

bool call_handle(struct call *call, int index)
{
    TF_Tensor *const handle = job_handle(call->job);
    if (!handle)
        return call_refuse(call, TF_RESOURCE_EXHAUSTED, "no memory");
    tf.SetOutput(call->context, index, handle, call->status);
    tf.DeleteTensor(handle);
    return tf.GetCode(call->status) == TF_OK || failed(call);
}

bool call_posted(struct call *call, enum shoal_status status, struct shoal_request *request)
{
    char text[JOB_TEXT_BYTES];
    if (status == SHOAL_OK)
        job_follow(call->job, request);
    else
        world_failure_text(call->kernel->world, status, text, sizeof text);
    call_leave(call); /* from here on a shutdown may free the communicator and its requests */
    return status == SHOAL_OK || call_refuse(call, world_code(status), "%s", text);
}

/* Finds Shoal's type for one of TensorFlow's. */
static bool shoal_type_of(int type, enum shoal_type *type_out)
{
    static const struct {
        int type;
        enum shoal_type shoal;
    } table[] = {{TF_FLOAT, SHOAL_FLOAT32}, {TF_DOUBLE, SHOAL_FLOAT64}, {TF_BFLOAT16, SHOAL_BFLOAT16}, {TF_INT64, SHOAL_INT64},
                 {TF_HALF, SHOAL_FLOAT16},  {TF_INT32, SHOAL_INT32},    {TF_INT8, SHOAL_INT8},         {TF_UINT8, SHOAL_UINT8}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (table[i].type == type) {
            *type_out = table[i].shoal;
            return true;
        }
    }
    return false;
}

bool call_reduces(struct call *call, const struct shaped *tensor, struct elements *elements)
{
    if (!shoal_type_of(tensor->type, &elements->type))
        return call_refuse(call, TF_UNIMPLEMENTED, "tensors of this type (number %d of TensorFlow's) cannot be reduced",
                           tensor->type);
    elements->count = tensor->bytes / shoal_type_bytes(elements->type);
    return true;
}

struct elements elements_moved(int type, size_t bytes)
{
    struct elements elements = {SHOAL_TYPE_TAGGED(SHOAL_UINT8, type), bytes}; /* else ranks could mix int16 and uint16 */
    if (shoal_type_of(type, &elements.type))
        elements.count = bytes / shoal_type_bytes(elements.type);
    return elements;
}
