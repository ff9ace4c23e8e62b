/* Kernels of the collectives. tf_operations.c describes their inputs. */
#include "collectives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

/* An operation of at most this many bytes is waited for where it is posted, for up to INLINE_MS: waking a thread for the result
 * costs more than the operation. */
#define INLINE_BYTES ((size_t)16 << 10)
#define INLINE_MS 1

static struct shoal_options options_for(size_t bytes)
{
    struct shoal_options options = SHOAL_OPTIONS_INIT;
    options.wait_ms = bytes <= INLINE_BYTES ? INLINE_MS : 0;
    return options;
}

/* ---- Tensors of one shape: all-reduce, broadcast ------------------------------------------------------------------------- */

/* The operands of N tensors. */
struct operands {
    struct shoal_tensor *tensors;
    size_t count;
    size_t bytes;
    enum shoal_type type;
};

static bool gather_operand(struct call *call, int index, bool reduces, struct operands *operands)
{
    struct shaped input, output;
    struct elements elements;
    if (!call_input(call, index, &input))
        return false;
    elements = elements_moved(input.type, input.bytes);
    if (reduces && !call_reduces(call, &input, &elements))
        return false;
    if (!call_output(call, index, input.type, input.dims, input.rank, &output))
        return false;
    operands->tensors[index] = (struct shoal_tensor){input.data, output.data, elements.count};
    operands->type = elements.type;
    operands->bytes += input.bytes;
    return true;
}

static bool gather_operands(struct call *call, bool reduces, struct operands *operands)
{
    operands->tensors = calloc(operands->count, sizeof *operands->tensors);
    if (!operands->tensors)
        return call_refuse(call, TF_RESOURCE_EXHAUSTED, "no memory for %zu tensors", operands->count);
    for (size_t i = 0; i < operands->count; i++) {
        if (!gather_operand(call, (int)i, reduces, operands))
            return false;
    }
    return call_handle(call, (int)operands->count);
}

static enum shoal_status post_allreduce(const struct call *call, const struct operands *operands,
                                        struct shoal_request **request_out)
{
    const struct shoal_options options = options_for(operands->bytes);
    const enum shoal_op op = (enum shoal_op)call->kernel->operator_;
    const struct shoal_tensor *const first = operands->tensors;
    if (operands->count == 1)
        return shoal_allreduce_post(call->world->comm, first->input, first->output, first->count, operands->type, op, &options,
                                    request_out);
    return shoal_allreduce_coalesced_post(call->world->comm, first, operands->count, operands->type, op, &options, request_out);
}

static enum shoal_status post_broadcast(const struct call *call, const struct operands *operands,
                                        struct shoal_request **request_out)
{
    const struct shoal_options options = options_for(operands->bytes);
    const int root = (int)call->kernel->root;
    const struct shoal_tensor *const first = operands->tensors;
    if (operands->count == 1)
        return shoal_broadcast_post(call->world->comm, first->input, first->output, first->count, operands->type, root,
                                    &options, request_out);
    return shoal_broadcast_coalesced_post(call->world->comm, first, operands->count, operands->type, root, &options,
                                          request_out);
}

static void start_same_shape(const struct kernel *kernel, TF_OpKernelContext *context, bool reduces)
{
    struct call call;
    struct operands operands = {.count = (size_t)tf.NumInputs(context)};
    struct shoal_request *request = NULL;
    if (call_begin(&call, kernel, context, reduces ? "all-reduce" : "broadcast", 2 * operands.count) &&
        gather_operands(&call, reduces, &operands)) {
        const enum shoal_status status =
            reduces ? post_allreduce(&call, &operands, &request) : post_broadcast(&call, &operands, &request);
        call_posted(&call, status, request);
    }
    free(operands.tensors);
    call_end(&call);
}

void allreduce_start(void *kernel, TF_OpKernelContext *context)
{
    start_same_shape(kernel, context, true);
}

void broadcast_start(void *kernel, TF_OpKernelContext *context)
{
    start_same_shape(kernel, context, false);
}

/* ---- Tensors in rows: all-gather, reduce-scatter, all-to-all ------------------------------------------------------------- */

/* The rows of each rank, from the second input. */
struct rows {
    size_t *counts; /* in elements */
    int64_t total;  /* in rows */
};

static size_t row_bytes(const struct shaped *tensor)
{
    size_t bytes = tf.DataTypeSize(tensor->type);
    for (int i = 1; i < tensor->rank; i++)
        bytes *= (size_t)tensor->dims[i];
    return bytes;
}

/* Adds the count of one rank's rows. It comes from another rank, so it may be any number. */
static bool add_rows(struct call *call, size_t rank, int64_t count, size_t elements_per_row, struct rows *rows)
{
    if (count < 0 || __builtin_mul_overflow((size_t)count, elements_per_row, &rows->counts[rank]) ||
        __builtin_add_overflow(rows->total, count, &rows->total))
        return call_refuse(call, TF_INVALID_ARGUMENT, "rank %zu is given %lld rows of %zu elements", rank, (long long)count,
                           elements_per_row);
    return true;
}

/* Reads each rank's rows from a vector of int64, as counts of elements. The caller frees `rows`, also after a failure. */
static bool read_rows(struct call *call, const struct shaped *vector, size_t elements_per_row, struct rows *rows)
{
    const size_t size = (size_t)call->world->size;
    if (vector->bytes != size * sizeof(int64_t))
        return call_refuse(call, TF_INVALID_ARGUMENT, "%zu numbers of rows were given for %zu ranks: give one for each rank",
                           vector->bytes / sizeof(int64_t), size);
    rows->counts = calloc(size, sizeof *rows->counts);
    if (!rows->counts)
        return call_refuse(call, TF_RESOURCE_EXHAUSTED, "no memory");
    for (size_t i = 0; i < size; i++) {
        if (!add_rows(call, i, integers_of(vector)[i], elements_per_row, rows))
            return false;
    }
    return true;
}

/* Reads input 0 as rows; it needs at least one dimension. */
static bool input_rows(struct call *call, struct shaped *input)
{
    if (!call_input(call, 0, input))
        return false;
    if (input->rank == 0)
        return call_refuse(call, TF_INVALID_ARGUMENT, "a scalar has no rows");
    return true;
}

/* Allocates an output of `rows` rows with the input's width, and the handle. */
static bool output_rows(struct call *call, const struct shaped *input, int64_t rows, struct shaped *output)
{
    int64_t dims[KERNEL_DIMENSIONS_MAX];
    memcpy(dims, input->dims, (size_t)input->rank * sizeof *dims);
    dims[0] = rows;
    return call_output(call, 0, input->type, dims, input->rank, output) && call_handle(call, 1);
}

/* An all-gather of tensors of one shape. The result has one row for each rank. */
static bool gather_equal(struct call *call, struct shoal_request **request_out, enum shoal_status *status_out)
{
    struct shaped input, output;
    if (!call_input(call, 0, &input))
        return false;
    if (input.rank + 1 >= KERNEL_DIMENSIONS_MAX)
        return call_refuse(call, TF_INVALID_ARGUMENT, "a tensor of %d dimensions", input.rank);
    int64_t dims[KERNEL_DIMENSIONS_MAX] = {call->world->size};
    memcpy(dims + 1, input.dims, (size_t)input.rank * sizeof *dims);
    if (!call_output(call, 0, input.type, dims, input.rank + 1, &output) || !call_handle(call, 1))
        return false;
    const struct elements elements = elements_moved(input.type, input.bytes);
    const struct shoal_options options = options_for(output.bytes);
    *status_out =
        shoal_allgather_post(call->world->comm, input.data, output.data, elements.count, elements.type, &options, request_out);
    return true;
}

/* Prints "[2, 3]" for a tensor's rank and its first dimensions; "..." replaces those that are missing. */
static void print_shape(const int64_t *numbers, int64_t columns, char *text, size_t bytes)
{
    size_t length = (size_t)snprintf(text, bytes, "[");
    for (int64_t i = 0; i < numbers[0] && length + 32 < bytes; i++) {
        length += (size_t)snprintf(text + length, bytes - length, i ? ", " : "");
        if (i + 1 == columns) {
            length += (size_t)snprintf(text + length, bytes - length, "...");
            break;
        }
        length += (size_t)snprintf(text + length, bytes - length, "%lld", (long long)numbers[i + 1]);
    }
    snprintf(text + length, bytes - length, "]");
}

/* Every rank sees the shapes of all ranks, so all refuse the same ones. */
static bool check_shapes(struct call *call, const struct shaped *shapes)
{
    const int64_t columns = shapes->dims[1], *const first = integers_of(shapes);
    for (int r = 1; r < call->world->size; r++) {
        const int64_t *const other = first + r * columns;
        char one[256], another[256];
        if (first[0] == other[0] && memcmp(first + 2, other + 2, (size_t)(columns - 2) * sizeof *first) == 0)
            continue;
        print_shape(first, columns, one, sizeof one);
        print_shape(other, columns, another, sizeof another);
        return call_refuse(
            call, TF_INVALID_ARGUMENT,
            "tensors that are gathered may differ in the first dimension only: that of rank 0 has the shape %s, that "
            "of rank %d %s",
            one, r, another);
    }
    return true;
}

/* Reads each rank's rows from a vector of them, or from a matrix of shapes. */
static bool read_rows_or_shapes(struct call *call, const struct shaped *vector, size_t elements_per_row, struct rows *rows)
{
    const size_t size = (size_t)call->world->size;
    if (vector->rank != 2)
        return read_rows(call, vector, elements_per_row, rows);
    if (vector->dims[0] != (int64_t)size || vector->dims[1] < 2)
        return call_refuse(call, TF_INVALID_ARGUMENT, "%lld shapes were given for %zu ranks", (long long)vector->dims[0], size);
    rows->counts = calloc(size, sizeof *rows->counts);
    if (!rows->counts)
        return call_refuse(call, TF_RESOURCE_EXHAUSTED, "no memory");
    for (size_t i = 0; i < size; i++) {
        if (!add_rows(call, i, integers_of(vector)[(int64_t)i * vector->dims[1] + 1], elements_per_row, rows))
            return false;
    }
    return check_shapes(call, vector);
}

static bool gather_rows(struct call *call, const struct shaped *vector, struct rows *rows, struct shoal_request **request_out,
                        enum shoal_status *status_out)
{
    struct shaped input, output;
    if (!input_rows(call, &input))
        return false;
    const struct elements per_row = elements_moved(input.type, row_bytes(&input));
    if (!read_rows_or_shapes(call, vector, per_row.count, rows))
        return false;
    if (rows->counts[call->world->rank] != per_row.count * (size_t)input.dims[0])
        return call_refuse(call, TF_INVALID_ARGUMENT, "rank %d has %lld rows, and was said to have another number",
                           call->world->rank, (long long)input.dims[0]);
    if (!output_rows(call, &input, rows->total, &output))
        return false;
    const struct shoal_options options = options_for(output.bytes);
    *status_out = shoal_allgatherv_post(call->world->comm, input.data, output.data, rows->counts, NULL, per_row.type, &options,
                                        request_out);
    return true;
}

void allgather_start(void *kernel, TF_OpKernelContext *context)
{
    struct call call;
    struct shaped vector;
    struct rows rows = {0};
    struct shoal_request *request = NULL;
    enum shoal_status status = SHOAL_OK;
    if (call_begin(&call, kernel, context, "all-gather", 3) && call_input(&call, 1, &vector) &&
        (vector.bytes == 0 ? gather_equal(&call, &request, &status) : gather_rows(&call, &vector, &rows, &request, &status)))
        call_posted(&call, status, request);
    free(rows.counts);
    call_end(&call);
}

static bool scatter_rows(struct call *call, struct rows *rows, struct shoal_request **request_out,
                         enum shoal_status *status_out)
{
    struct shaped vector, input, output;
    struct elements elements;
    if (!input_rows(call, &input) || !call_input(call, 1, &vector) || !call_reduces(call, &input, &elements))
        return false;
    if (!read_rows(call, &vector, row_bytes(&input) / shoal_type_bytes(elements.type), rows))
        return false;
    if (rows->total != input.dims[0])
        return call_refuse(call, TF_INVALID_ARGUMENT, "%lld rows are to be scattered, but the tensor has %lld",
                           (long long)rows->total, (long long)input.dims[0]);
    if (!output_rows(call, &input, integers_of(&vector)[call->world->rank], &output))
        return false;
    const struct shoal_options options = options_for(input.bytes);
    *status_out = shoal_reduce_scatterv_post(call->world->comm, input.data, output.data, rows->counts, elements.type,
                                             (enum shoal_op)call->kernel->operator_, &options, request_out);
    return true;
}

void reduce_scatter_start(void *kernel, TF_OpKernelContext *context)
{
    struct call call;
    struct rows rows = {0};
    struct shoal_request *request = NULL;
    enum shoal_status status = SHOAL_OK;
    if (call_begin(&call, kernel, context, "reduce-scatter", 3) && scatter_rows(&call, &rows, &request, &status))
        call_posted(&call, status, request);
    free(rows.counts);
    call_end(&call);
}

static bool exchange_rows(struct call *call, struct rows *sent, struct rows *received, struct shoal_request **request_out,
                          enum shoal_status *status_out)
{
    struct shaped input, output, splits, received_splits;
    if (!input_rows(call, &input) || !call_input(call, 1, &splits) || !call_input(call, 2, &received_splits))
        return false;
    const struct elements per_row = elements_moved(input.type, row_bytes(&input));
    if (!read_rows(call, &splits, per_row.count, sent) || !read_rows(call, &received_splits, per_row.count, received))
        return false;
    if (sent->total != input.dims[0])
        return call_refuse(call, TF_INVALID_ARGUMENT, "the splits add up to %lld rows, but the tensor has %lld",
                           (long long)sent->total, (long long)input.dims[0]);
    if (!output_rows(call, &input, received->total, &output))
        return false;
    const struct shoal_options options = options_for(input.bytes);
    *status_out = shoal_alltoallv_post(call->world->comm, input.data, sent->counts, NULL, output.data, received->counts, NULL,
                                       per_row.type, &options, request_out);
    return true;
}

void alltoall_start(void *kernel, TF_OpKernelContext *context)
{
    struct call call;
    struct rows sent = {0}, received = {0};
    struct shoal_request *request = NULL;
    enum shoal_status status = SHOAL_OK;
    if (call_begin(&call, kernel, context, "all-to-all", 4) && exchange_rows(&call, &sent, &received, &request, &status))
        call_posted(&call, status, request);
    free(sent.counts);
    free(received.counts);
    call_end(&call);
}

/* ---- The end ------------------------------------------------------------------------------------------------------------- */

/* Passes input `index` on as an output. The outputs are read once the kernel is done. */
static bool hand_on(TF_OpKernelContext *context, int index, TF_Status *status)
{
    TF_Tensor *tensor = NULL;
    tf.GetInput(context, index, &tensor, status);
    if (tf.GetCode(status) != TF_OK)
        return false;
    tf.SetOutput(context, index, tensor, status);
    tf.DeleteTensor(tensor);
    return tf.GetCode(status) == TF_OK;
}

static struct job *find_job(TF_OpKernelContext *context, int index, TF_Status *status)
{
    TF_Tensor *handle = NULL;
    tf.GetInput(context, index, &handle, status);
    if (tf.GetCode(status) != TF_OK)
        return NULL;
    struct job *const job = job_of(handle);
    tf.DeleteTensor(handle);
    if (!job)
        tf.SetStatus(status, TF_INTERNAL, "shoal: a handle of an operation that is over: please report it");
    return job;
}

void finish(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done)
{
    (void)kernel;
    TF_Status *const status = tf.NewStatus();
    const int tensors = tf.NumInputs(context) - 1;
    bool is_handed_on = true;
    for (int i = 0; i < tensors && is_handed_on; i++)
        is_handed_on = hand_on(context, i, status);
    struct job *const job = is_handed_on ? find_job(context, tensors, status) : NULL;
    if (job) {
        job_wait(job, context, done);
        job_release(job);
    } else {
        tf.OpKernelContext_Failure(context, status);
        tf.RunAsyncOpKernelDoneCallback(done);
    }
    tf.DeleteStatus(status);
}

void barrier(void *kernel, TF_OpKernelContext *context, TF_AsyncOpKernelDoneCallback *done)
{
    struct call call;
    struct shoal_request *request = NULL;
    bool is_posted = call_begin(&call, kernel, context, "barrier", 0);
    if (is_posted) {
        const struct shoal_options options = options_for(0);
        const enum shoal_status status = shoal_barrier_post(call.world->comm, &options, &request);
        is_posted = call_posted(&call, status, request);
    }
    if (is_posted)
        job_wait(call.job, context, done);
    else
        tf.RunAsyncOpKernelDoneCallback(done);
    call_end(&call);
}
