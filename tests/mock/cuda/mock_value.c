/* Streams that wait for values in memory, and write them. */
#include "mock_driver.h"

#define COMPARISON 3u
#define AND 2u
#define FLUSH ((unsigned)SHOAL_CU_WAIT_FLUSH)

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

/* Acquire: copies after the wait see everything that was written before the value. */
static uint64_t load_value(const struct mock_value *value)
{
    if (value->is_32)
        return __atomic_load_n((const uint32_t *)value->at, __ATOMIC_ACQUIRE);
    return __atomic_load_n((const uint64_t *)value->at, __ATOMIC_ACQUIRE);
}

/* Compares as signed numbers: a value that is 2^63 ahead is behind. */
static bool is_at_least(const struct mock_value *value, uint64_t is)
{
    if (value->is_32)
        return (int32_t)((uint32_t)is - (uint32_t)value->value) >= 0;
    return (int64_t)(is - value->value) >= 0;
}

bool mock_value_is_there(const struct mock_value *value)
{
    const uint64_t is = load_value(value), wanted = value->is_32 ? (uint32_t)value->value : value->value;
    switch (value->comparison) {
    case SHOAL_CU_WAIT_GEQ:
        return is_at_least(value, is);
    case SHOAL_CU_WAIT_EQ:
        return is == wanted;
    default:
        return (is & wanted) != 0;
    }
}

/* Release: the stream's earlier copies are in memory first. */
void mock_value_write(const struct mock_value *value)
{
    if (value->is_32)
        __atomic_store_n((uint32_t *)value->at, (uint32_t)value->value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint64_t *)value->at, value->value, __ATOMIC_RELEASE);
}

/* ---- Posting ------------------------------------------------------------------------------------------------------------- */

static bool is_wait(const union shoal_cu_memory_op *op)
{
    return op->operation == SHOAL_CU_OP_WAIT_32 || op->operation == SHOAL_CU_OP_WAIT_64;
}

static bool is_write(const union shoal_cu_memory_op *op)
{
    return op->operation == SHOAL_CU_OP_WRITE_32 || op->operation == SHOAL_CU_OP_WRITE_64;
}

static bool is_32(const union shoal_cu_memory_op *op)
{
    return op->operation == SHOAL_CU_OP_WAIT_32 || op->operation == SHOAL_CU_OP_WRITE_32;
}

/* Accepts device memory or registered memory, by the device's address; never managed memory. */
static shoal_cu_result check_op(const union shoal_cu_memory_op *op, struct mock_span *span)
{
    const size_t bytes = is_32(op) ? sizeof(uint32_t) : sizeof(uint64_t);
    if (!is_wait(op) && !is_write(op))
        return SHOAL_CU_INVALID_VALUE;
    if (op->value.address % bytes || (is_wait(op) && (op->value.flags & ~FLUSH) > AND) || (is_write(op) && op->value.flags))
        return SHOAL_CU_INVALID_VALUE;
    if ((op->value.flags & FLUSH) && !mock.modes.flush)
        return SHOAL_CU_NOT_SUPPORTED;
    MOCK_TRY(mock_find_device_span(op->value.address, bytes, span));
    return span->holder->kind == MOCK_MANAGED_MEMORY ? SHOAL_CU_INVALID_VALUE : SHOAL_CU_SUCCESS;
}

static struct mock_op *make_op(const union shoal_cu_memory_op *op, const struct mock_span *span)
{
    struct mock_op *made = mock_op_make(is_wait(op) ? MOCK_WAIT_VALUE : MOCK_WRITE_VALUE, span->holder, NULL);
    made->value = (struct mock_value){.at = span->bytes,
                                      .value = op->value.value,
                                      .comparison = op->value.flags & COMPARISON,
                                      .is_32 = is_32(op),
                                      .flushes = (op->value.flags & FLUSH) != 0};
    return made;
}

static shoal_cu_result post_ops(const struct mock_call *call, shoal_cu_stream handle, unsigned count,
                                const union shoal_cu_memory_op *ops)
{
    struct mock_stream *stream;
    struct mock_span spans[SHOAL_CU_BATCH_MAX];
    struct mock_op *made[SHOAL_CU_BATCH_MAX];
    MOCK_TRY(mock_stream_for_work(call, handle, &stream));
    if (!mock.modes.values)
        return SHOAL_CU_NOT_SUPPORTED;
    for (unsigned i = 0; i < count; i++)
        MOCK_TRY(check_op(&ops[i], &spans[i]));
    for (unsigned i = 0; i < count; i++) /* before one waits for room, so that none loses its memory meanwhile */
        made[i] = make_op(&ops[i], &spans[i]);
    for (unsigned i = 0; i < count; i++)
        mock_post(stream, made[i]);
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_memory_ops(shoal_cu_stream stream, unsigned count, union shoal_cu_memory_op *ops, unsigned flags)
{
    ENTER("cuStreamBatchMemOp", MOCK_CURRENT);
    if (count > SHOAL_CU_BATCH_MAX || flags)
        return SHOAL_CU_INVALID_VALUE;
    return post_ops(&call, stream, count, ops);
}

static union shoal_cu_memory_op single_op(unsigned operation, shoal_cu_address address, uint64_t value, unsigned flags)
{
    union shoal_cu_memory_op op = {.bytes = {0}};
    op.value.operation = operation;
    op.value.address = address;
    op.value.value = value;
    op.value.flags = flags;
    return op;
}

shoal_cu_result mock_wait_value(shoal_cu_stream stream, shoal_cu_address address, uint64_t value, unsigned flags)
{
    ENTER("cuStreamWaitValue64", MOCK_CURRENT);
    const union shoal_cu_memory_op op = single_op(SHOAL_CU_OP_WAIT_64, address, value, flags);
    return post_ops(&call, stream, 1, &op);
}

shoal_cu_result mock_write_value(shoal_cu_stream stream, shoal_cu_address address, uint64_t value, unsigned flags)
{
    ENTER("cuStreamWriteValue64", MOCK_CURRENT);
    const union shoal_cu_memory_op op = single_op(SHOAL_CU_OP_WRITE_64, address, value, flags);
    return post_ops(&call, stream, 1, &op);
}
