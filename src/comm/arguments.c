#include "comm/arguments.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* A call being checked. */
struct attempt {
    const struct shoal_comm *comm;
    struct shoal_call *call;
    const struct shoal_shape *shape;
    size_t element;                   /* bytes; a power of two */
    size_t input_parts, output_parts; /* this rank's parts; 1 for a whole operand, 0 if it has none */
};

/* ---- Arguments ----------------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_arguments_refuse(const struct shoal_comm *comm, const char *call, const char *format, ...)
{
    char why[256];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_ARGUMENT, "comm", "%s on communicator %s: %s", call, comm->name, why);
}

/* Removes the tag from a type. A number that is not a type stays unchanged. */
static void split_type(struct shoal_call *call)
{
    const unsigned type = (unsigned)call->type;
    if (SHOAL_LIKELY(type < SHOAL_TYPE_END) || type >> 16)
        return;
    call->type_tag = (uint8_t)(type >> 8);
    call->type = (enum shoal_type)(type & 0xff);
}

static bool is_integer(enum shoal_type type)
{
    return type == SHOAL_INT8 || type == SHOAL_UINT8 || type == SHOAL_INT32 || type == SHOAL_INT64;
}

static enum shoal_status take_options(const struct attempt *attempt, const struct shoal_options *options)
{
    struct shoal_call *call = attempt->call;
    call->scale = 1;
    if (!options)
        return SHOAL_OK;
    if (options->struct_bytes < offsetof(struct shoal_options, scale))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                      "options->struct_bytes is not set: use SHOAL_OPTIONS_INIT");
    call->timeout_ms = options->timeout_ms;
    call->trace_tag = options->trace_tag;
    if (options->struct_bytes >= offsetof(struct shoal_options, stream) + sizeof options->stream)
        call->stream = options->stream;
    if (options->struct_bytes >= offsetof(struct shoal_options, wait_ms))
        call->scale = options->scale;
    return SHOAL_OK;
}

static enum shoal_status check_operator(const struct attempt *attempt)
{
    const struct shoal_call *call = attempt->call;
    if (SHOAL_UNLIKELY((unsigned)call->op >= SHOAL_OP_END))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "op is %d, none of enum shoal_op", (int)call->op);
    if (SHOAL_UNLIKELY(!attempt->comm->context->kernels->reduce[call->type][call->op]))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "the bitwise operators are only for integers");
    if (SHOAL_LIKELY(call->op != SHOAL_SCALED_SUM) || !is_integer(call->type))
        return SHOAL_OK;
    const bool is_whole = call->scale > -0x1p62 && call->scale < 0x1p62 && (double)(int64_t)call->scale == call->scale;
    if (!is_whole)
        return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                      "the scale of integers is %g, but must be a whole number", call->scale);
    return SHOAL_OK;
}

/* Checks the low bits of the address, because a division would be slower. */
static bool is_aligned(const struct attempt *attempt, const void *operand)
{
    return !((uintptr_t)operand & (attempt->element - 1));
}

static enum shoal_status refuse_unaligned(const struct attempt *attempt, const char *what, const void *operand)
{
    return shoal_arguments_refuse(attempt->comm, attempt->call->name, "%s is %p, not aligned to its elements of %zu bytes",
                                  what, operand, attempt->element);
}

static enum shoal_status refuse_count(const struct attempt *attempt, const char *what, size_t count)
{
    return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                  "%s is %zu, larger than memory can be; was a negative number given?", what, count);
}

/* Checks one pair of operands. input_bytes and output_bytes are the memory from their first to their last element. In place,
 * the operand that is a whole starts at byte own_at of the other. */
static enum shoal_status check_operands(const struct attempt *attempt, const void *input, size_t input_bytes,
                                        const void *output, size_t output_bytes, size_t own_at)
{
    const char *a = input, *b = output;
    if (SHOAL_UNLIKELY(input_bytes && !input))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "input is NULL, but count is not 0");
    if (SHOAL_UNLIKELY(output_bytes && !output))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "output is NULL, but count is not 0");
    if (SHOAL_UNLIKELY(input_bytes && !is_aligned(attempt, input)))
        return refuse_unaligned(attempt, "input", input);
    if (SHOAL_UNLIKELY(output_bytes && !is_aligned(attempt, output)))
        return refuse_unaligned(attempt, "output", output);
    if (!input_bytes || !output_bytes || a + input_bytes <= b || b + output_bytes <= a)
        return SHOAL_OK;
    const bool is_in_place = attempt->shape->is_input_partitioned == attempt->shape->is_output_partitioned ? a == b
                             : attempt->shape->is_output_partitioned                                       ? a == b + own_at
                                                                                                           : b == a + own_at;
    if (SHOAL_LIKELY(is_in_place))
        return SHOAL_OK;
    return shoal_arguments_refuse(
        attempt->comm, attempt->call->name,
        attempt->shape->is_input_partitioned == attempt->shape->is_output_partitioned
            ? "input and output overlap; they must be the same address or apart"
            : "input and output overlap; one must be this rank's part of the other, or they must be apart");
}

/* A type has at most 8 bytes, so sums of counts that pass this check never overflow. */
static bool is_count(const struct shoal_comm *comm, size_t count)
{
    size_t product;
    return !__builtin_mul_overflow(count, 16 * (size_t)comm->size, &product);
}

static enum shoal_status check_plain(const struct attempt *attempt)
{
    const struct shoal_call *call = attempt->call;
    const size_t part = call->count * attempt->element;
    if (SHOAL_UNLIKELY(!is_count(attempt->comm, call->count)))
        return refuse_count(attempt, "count", call->count);
    return check_operands(attempt, call->input, part * attempt->input_parts, call->output, part * attempt->output_parts,
                          (size_t)attempt->comm->rank * part);
}

/* ---- Parts of different lengths ------------------------------------------------------------------------------------------ */

struct stretch {
    size_t begin, end;
};

static int compare_begins(const void *a, const void *b)
{
    const struct stretch *one = a, *other = b;
    return (one->begin > other->begin) - (one->begin < other->begin);
}

/* Parts of the output may be anywhere, but must not overlap. */
static enum shoal_status check_apart(const struct attempt *attempt, const size_t *counts, const size_t *at)
{
    const int size = attempt->comm->size;
    struct stretch *parts = malloc((size_t)size * sizeof *parts);
    int used = 0;
    bool is_apart = true;
    if (!parts)
        return shoal_log_fail(&attempt->comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s: no memory", attempt->call->name);
    for (int i = 0; i < size; i++) {
        if (counts[i])
            parts[used++] = (struct stretch){at[i], at[i] + counts[i]};
    }
    SHOAL_ASSERT(used <= size);
    qsort(parts, (size_t)used, sizeof *parts, compare_begins);
    for (int i = 1; i < used; i++)
        is_apart &= parts[i - 1].end <= parts[i].begin;
    free(parts);
    return is_apart ? SHOAL_OK : shoal_arguments_refuse(attempt->comm, attempt->call->name, "parts of the output overlap");
}

/* *end_out: elements from the operand's start to the end of its last part; *own_at_out: start of this rank's part. */
static enum shoal_status check_counts(const struct attempt *attempt, const size_t *counts, const size_t *at, size_t *end_out,
                                      size_t *own_at_out)
{
    size_t row = 0;
    *end_out = 0;
    for (int i = 0; i < attempt->comm->size; i++) {
        if (!is_count(attempt->comm, counts[i]))
            return refuse_count(attempt, "a count", counts[i]);
        if (at && counts[i] && at[i] > SIZE_MAX / 32)
            return refuse_count(attempt, "an offset", at[i]);
        const size_t begin = at ? at[i] : row;
        if (i == attempt->comm->rank)
            *own_at_out = begin;
        *end_out = counts[i] ? shoal_max_size(*end_out, begin + counts[i]) : *end_out;
        attempt->call->count = shoal_max_size(attempt->call->count, counts[i]);
        row += counts[i];
    }
    return SHOAL_OK;
}

/* In place, each rank overwrites the elements that it has just sent. */
static enum shoal_status check_same_parts(const struct attempt *attempt)
{
    const struct shoal_call_arrays *arrays = attempt->call->arrays;
    const size_t bytes = (size_t)attempt->comm->size * sizeof(size_t);
    const bool has_same_counts = memcmp(arrays->sent, arrays->received, bytes) == 0;
    const bool has_same_places = !arrays->sent_at == !arrays->received_at &&
                                 (!arrays->sent_at || memcmp(arrays->sent_at, arrays->received_at, bytes) == 0);
    if (has_same_counts && has_same_places)
        return SHOAL_OK;
    return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                  "in place, counts and offsets of input and output must be equal");
}

static enum shoal_status check_parts(const struct attempt *attempt)
{
    const struct shoal_call_arrays *arrays = attempt->call->arrays;
    const struct shoal_call *call = attempt->call;
    const int rank = attempt->comm->rank;
    const size_t element = attempt->element;
    size_t sent_end = 0, received_end = 0, own_at = 0;
    if ((attempt->shape->is_input_partitioned && !arrays->sent) || (attempt->shape->is_output_partitioned && !arrays->received))
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "an array of counts is NULL");
    const int most_locals = shoal_engine_most_locals(attempt->comm->engine);
    if (arrays->sent && arrays->received && (size_t)most_locals > SHOAL_CALL_PARTS_MAX)
        return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                      "%d ranks on one host are too many for parts of different lengths; at most %zu",
                                      most_locals, SHOAL_CALL_PARTS_MAX);
    if (arrays->sent)
        SHOAL_TRY(check_counts(attempt, arrays->sent, arrays->sent_at, &sent_end, &own_at));
    if (arrays->received)
        SHOAL_TRY(check_counts(attempt, arrays->received, arrays->received_at, &received_end, &own_at));
    if (arrays->received && arrays->received_at)
        SHOAL_TRY(check_apart(attempt, arrays->received, arrays->received_at));
    const size_t input = arrays->sent ? sent_end : arrays->received[rank],
                 output = arrays->received ? received_end : arrays->sent[rank];
    SHOAL_TRY(check_operands(attempt, call->input, input * element, call->output, output * element, own_at * element));
    if (arrays->sent && arrays->received && arrays->sent[rank] != arrays->received[rank])
        return shoal_arguments_refuse(attempt->comm, attempt->call->name,
                                      "this rank sends %zu elements to itself, but receives %zu from itself",
                                      arrays->sent[rank], arrays->received[rank]);
    const bool is_in_place = input && output && call->input == call->output;
    return arrays->sent && arrays->received && is_in_place ? check_same_parts(attempt) : SHOAL_OK;
}

/* ---- Several tensors ----------------------------------------------------------------------------------------------------- */

/* The memory of one operand of one tensor, to find operands that overlap. */
struct range {
    uintptr_t begin, end;
    size_t tensor;
    bool is_output;
};

static int compare_ranges(const void *a, const void *b)
{
    const struct range *one = a, *other = b;
    return (one->begin > other->begin) - (one->begin < other->begin);
}

static size_t add_range(struct range *ranges, size_t used, const void *begin, size_t bytes, size_t tensor, bool is_output)
{
    if (bytes)
        ranges[used++] = (struct range){(uintptr_t)begin, (uintptr_t)begin + bytes, tensor, is_output};
    return used;
}

/* Among the ranges that begin earlier in memory: the one that ends last, and the one of another tensor that ends last. */
struct furthest {
    const struct range *first, *other;
};

static void add_to_furthest(struct furthest *furthest, const struct range *range)
{
    const struct range *first = furthest->first, *other = furthest->other;
    if (!first || range->end > first->end) {
        if (first && first->tensor != range->tensor)
            furthest->other = first;
        furthest->first = range;
    } else if (range->tensor != first->tensor && (!other || range->end > other->end)) {
        furthest->other = range;
    }
}

/* Returns true if a range of another tensor contains the start of this range. */
static bool reaches_into(const struct furthest *furthest, const struct range *range)
{
    const bool is_first = furthest->first && furthest->first->tensor != range->tensor;
    const struct range *before = is_first ? furthest->first : furthest->other;
    SHOAL_ASSERT(!before || before->tensor != range->tensor);
    return before && range->begin < before->end;
}

/* Expects ranges in memory order. Returns true if no range begins inside another tensor's output and no output begins inside
 * another tensor's input. */
static bool are_apart(const struct range *ranges, size_t count)
{
    struct furthest inputs = {NULL, NULL}, outputs = {NULL, NULL};
    for (size_t i = 0; i < count; i++) {
        const struct range *range = &ranges[i];
        SHOAL_ASSERT(i == 0 || ranges[i - 1].begin <= range->begin);
        if (reaches_into(&outputs, range) || (range->is_output && reaches_into(&inputs, range)))
            return false;
        add_to_furthest(range->is_output ? &outputs : &inputs, range);
    }
    return true;
}

static enum shoal_status check_tensors_apart(const struct attempt *attempt)
{
    const struct shoal_call_arrays *arrays = attempt->call->arrays;
    const size_t element = attempt->element;
    struct range *ranges = malloc((2 * arrays->tensor_count + 1) * sizeof *ranges);
    size_t used = 0;
    if (!ranges)
        return shoal_log_fail(&attempt->comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s: no memory", attempt->call->name);
    for (size_t t = 0; t < arrays->tensor_count; t++) {
        const struct shoal_tensor *tensor = &arrays->tensors[t];
        const size_t part = tensor->count * element;
        used = add_range(ranges, used, tensor->input, part * attempt->input_parts, t, false);
        used = add_range(ranges, used, tensor->output, part * attempt->output_parts, t, true);
    }
    SHOAL_ASSERT(used <= 2 * arrays->tensor_count);
    qsort(ranges, used, sizeof *ranges, compare_ranges);
    const bool is_apart = are_apart(ranges, used);
    free(ranges);
    return is_apart
               ? SHOAL_OK
               : shoal_arguments_refuse(attempt->comm, attempt->call->name, "an output overlaps an operand of another tensor");
}

static enum shoal_status check_tensors(const struct attempt *attempt)
{
    const struct shoal_call_arrays *arrays = attempt->call->arrays;
    struct shoal_call *call = attempt->call;
    if (arrays->tensor_count && !arrays->tensors)
        return shoal_arguments_refuse(attempt->comm, attempt->call->name, "tensors is NULL, but their number is not 0");
    size_t total = 0;
    for (size_t t = 0; t < arrays->tensor_count; t++) {
        struct shoal_call one = *call;
        struct attempt alone = *attempt;
        alone.call = &one;
        one.input = arrays->tensors[t].input;
        one.output = arrays->tensors[t].output;
        one.count = arrays->tensors[t].count;
        SHOAL_TRY(check_plain(&alone));
        total += one.count;
        if (!is_count(attempt->comm, total))
            return shoal_arguments_refuse(attempt->comm, attempt->call->name, "the tensors are larger than memory can be");
    }
    call->count = total;
    return check_tensors_apart(attempt);
}

/* ---- Checking a whole call ----------------------------------------------------------------------------------------------- */

static enum shoal_status lay_out_call(const struct shoal_comm *comm, struct shoal_call *call)
{
    if (shoal_call_lay_out(call, comm->rank, comm->size))
        return SHOAL_OK;
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_MEMORY, "comm", "%s on communicator %s: no memory", call->name,
                          comm->name);
}

static size_t count_parts(const struct shoal_comm *comm, bool has_operand, bool is_partitioned)
{
    return !has_operand ? 0 : is_partitioned ? (size_t)comm->size : 1;
}

enum shoal_status shoal_arguments_check(const struct shoal_comm *comm, struct shoal_call *call,
                                        const struct shoal_options *options)
{
    SHOAL_TRY(shoal_comm_check(comm, call->name));
    split_type(call);
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    const struct attempt whole = {.comm = comm,
                                  .call = call,
                                  .shape = shape,
                                  .element = shoal_type_bytes(call->type),
                                  .input_parts = count_parts(comm, shoal_shape_contributes(shape, comm->rank, call->root),
                                                             shape->is_input_partitioned),
                                  .output_parts = count_parts(comm, shoal_shape_receives(shape, comm->rank, call->root),
                                                              shape->is_output_partitioned)},
                         *attempt = &whole;
    SHOAL_TRY(take_options(attempt, options));
    if (SHOAL_UNLIKELY((unsigned)call->type >= SHOAL_TYPE_END))
        return shoal_arguments_refuse(comm, call->name, "type is %d, none of enum shoal_type", (int)call->type);
    if (attempt->shape->is_reduced)
        SHOAL_TRY(check_operator(attempt));
    if (SHOAL_UNLIKELY(call->root < 0 || call->root >= comm->size))
        return shoal_arguments_refuse(comm, call->name, "root is %d, but there are %d ranks, from 0", call->root, comm->size);
    call->input = attempt->input_parts ? call->input : NULL;
    call->output = attempt->output_parts ? call->output : NULL;
    if (SHOAL_LIKELY(!call->arrays))
        return check_plain(attempt);
    SHOAL_TRY(call->arrays->has_tensors ? check_tensors(attempt) : check_parts(attempt));
    return lay_out_call(comm, call);
}

enum shoal_status shoal_arguments_check_message(const struct shoal_comm *comm, const char *name,
                                                const struct shoal_message *message, const struct shoal_options *options,
                                                struct shoal_call *call)
{
    const struct attempt attempt = {.comm = comm, .call = call, .element = shoal_type_bytes(message->type)};
    const char *operand = message->is_send ? "input" : "output";
    SHOAL_TRY(shoal_comm_check(comm, name));
    *call = (struct shoal_call){.name = name,
                                .collective = message->is_send ? SHOAL_COLLECTIVE_SEND : SHOAL_COLLECTIVE_RECV,
                                .type = message->type,
                                .root = message->peer,
                                .tag = message->tag,
                                .input = message->is_send ? message->buffer : NULL,
                                .output = message->is_send ? NULL : message->buffer,
                                .count = message->count};
    split_type(call);
    SHOAL_TRY(take_options(&attempt, options));
    if (message->peer < 0 || message->peer >= comm->size)
        return shoal_arguments_refuse(comm, name, "peer is %d, but must be one of the %d ranks, from 0", message->peer,
                                      comm->size);
    if (message->tag < 0)
        return shoal_arguments_refuse(comm, name, "tag is %d, but must not be negative", message->tag);
    if (!attempt.element)
        return shoal_arguments_refuse(comm, name, "type is %d, none of enum shoal_type", (int)message->type);
    if (!is_count(comm, message->count))
        return refuse_count(&attempt, "count", message->count);
    if (message->count && !message->buffer)
        return shoal_arguments_refuse(comm, name, "%s is NULL, but count is not 0", operand);
    if (message->count && !is_aligned(&attempt, message->buffer))
        return refuse_unaligned(&attempt, operand, message->buffer);
    return SHOAL_OK;
}
