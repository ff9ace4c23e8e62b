/* Copies, by an engine of the device that sees both memories, or of host memory. */
#include <stdint.h>
#include <string.h>

#include "mock_driver.h"

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static void copy_rows(const struct mock_copy *copy, size_t begin, size_t end)
{
    for (size_t row = begin; row < end; row++)
        memmove(copy->dest + row * copy->dest_pitch, copy->source + row * copy->source_pitch, copy->row_bytes);
}

static void poison_all(const struct mock_copy *copy)
{
    for (size_t row = 0; row < copy->rows; row++)
        memset(copy->dest + row * copy->dest_pitch, MOCK_CUDA_POISON, copy->row_bytes);
}

/* Parts are runs of rows, or runs of bytes if there is one row. */
static void copy_part(const struct mock_copy *copy, unsigned part)
{
    const size_t all = copy->rows > 1 ? copy->rows : copy->row_bytes;
    const size_t begin = all / copy->parts * part, end = part + 1 == copy->parts ? all : begin + all / copy->parts;
    if (copy->rows > 1)
        copy_rows(copy, begin, end);
    else
        memmove(copy->dest + begin, copy->source + begin, end - begin);
}

bool mock_copy_part(struct mock_copy *copy)
{
    if (copy->is_to_poison) {
        copy->is_to_poison = false;
        poison_all(copy);
        return false;
    }
    const unsigned turn = copy->is_backward ? copy->parts - 1 - copy->next : copy->next;
    copy_part(copy, (turn + copy->first) % copy->parts);
    return ++copy->next == copy->parts;
}

/* ---- Posting ------------------------------------------------------------------------------------------------------------- */

/* Chooses at random which part comes first and in which order the parts run. */
static void tear(struct mock_copy *copy)
{
    const size_t all = copy->rows > 1 ? copy->rows : copy->row_bytes;
    copy->parts = (unsigned)shoal_min_size((size_t)mock.modes.torn, all);
    copy->first = (unsigned)mock_draw(copy->parts);
    copy->is_backward = mock_draw(2);
    copy->is_to_poison = mock.modes.poison;
}

static bool do_overlap(const struct mock_copy *copy)
{
    const uintptr_t dest = (uintptr_t)copy->dest, source = (uintptr_t)copy->source;
    return copy->rows == 1 && dest != source && dest < source + copy->row_bytes && source < dest + copy->row_bytes;
}

static shoal_cu_result post_copy(const struct mock_call *call, shoal_cu_stream handle, struct mock_copy copy,
                                 const struct mock_span *dest, const struct mock_span *source)
{
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(call, handle, &stream));
    if (!copy.rows || !copy.row_bytes)
        return SHOAL_CU_SUCCESS;
    copy.dest = dest->bytes;
    copy.source = source->bytes;
    if (do_overlap(&copy))
        mock_fault("a copy's source and destination overlap");
    tear(&copy);
    if (copy.dest == copy.source)
        copy.is_to_poison = false;
    struct mock_op *op = mock_op_make(MOCK_COPY, dest->holder, source->holder);
    op->copy = copy;
    mock_post(stream, op);
    const bool is_pageable = !dest->holder || !source->holder;
    return is_pageable && mock.modes.pageable ? mock_wait_stream(stream) : SHOAL_CU_SUCCESS;
}

static struct mock_copy plain_copy(size_t bytes)
{
    return (struct mock_copy){.row_bytes = bytes, .rows = 1};
}

static shoal_cu_result to_host(const struct mock_call *call, void *dest, shoal_cu_address source, size_t bytes,
                               shoal_cu_stream stream)
{
    struct mock_span to, from;
    if (!bytes)
        return SHOAL_CU_SUCCESS;
    MOCK_TRY(mock_find_host_span(dest, bytes, &to));
    MOCK_TRY(mock_find_device_span(source, bytes, &from));
    return post_copy(call, stream, plain_copy(bytes), &to, &from);
}

static shoal_cu_result to_device(const struct mock_call *call, shoal_cu_address dest, const void *source, size_t bytes,
                                 shoal_cu_stream stream)
{
    struct mock_span to, from;
    if (!bytes)
        return SHOAL_CU_SUCCESS;
    MOCK_TRY(mock_find_device_span(dest, bytes, &to));
    MOCK_TRY(mock_find_host_span(source, bytes, &from));
    return post_copy(call, stream, plain_copy(bytes), &to, &from);
}

shoal_cu_result mock_copy_to_host(void *dest, shoal_cu_address source, size_t bytes, shoal_cu_stream stream)
{
    ENTER("cuMemcpyDtoHAsync", MOCK_CURRENT);
    return to_host(&call, dest, source, bytes, stream);
}

shoal_cu_result mock_copy_to_device(shoal_cu_address dest, const void *source, size_t bytes, shoal_cu_stream stream)
{
    ENTER("cuMemcpyHtoDAsync", MOCK_CURRENT);
    return to_device(&call, dest, source, bytes, stream);
}

shoal_cu_result mock_copy_to_host_now(void *dest, shoal_cu_address source, size_t bytes)
{
    ENTER("cuMemcpyDtoH", MOCK_CURRENT | MOCK_UNSAFE);
    MOCK_TRY(to_host(&call, dest, source, bytes, SHOAL_CU_STREAM_LEGACY));
    return mock_wait_stream(mock_stream_find(&call, SHOAL_CU_STREAM_LEGACY));
}

shoal_cu_result mock_copy_to_device_now(shoal_cu_address dest, const void *source, size_t bytes)
{
    ENTER("cuMemcpyHtoD", MOCK_CURRENT | MOCK_UNSAFE);
    MOCK_TRY(to_device(&call, dest, source, bytes, SHOAL_CU_STREAM_LEGACY));
    return mock_wait_stream(mock_stream_find(&call, SHOAL_CU_STREAM_LEGACY));
}

/* Each side is a device's memory, or the host's. */
shoal_cu_result mock_copy(shoal_cu_address dest, shoal_cu_address source, size_t bytes, shoal_cu_stream stream)
{
    ENTER("cuMemcpyAsync", MOCK_CURRENT);
    struct mock_span to, from;
    if (!bytes)
        return SHOAL_CU_SUCCESS;
    MOCK_TRY(mock_find_span(dest, bytes, &to));
    MOCK_TRY(mock_find_span(source, bytes, &from));
    return post_copy(&call, stream, plain_copy(bytes), &to, &from);
}

/* ---- Rows ---------------------------------------------------------------------------------------------------------------- */

/* One side of a copy of rows. */
struct side {
    unsigned type;
    const void *host;
    shoal_cu_address device;
    size_t x, y, pitch;
};

static shoal_cu_result find_side(const struct side *side, const struct shoal_cu_copy_2d *copy, struct mock_span *span)
{
    const size_t begin = side->y * side->pitch + side->x, bytes = (copy->rows - 1) * side->pitch + copy->row_bytes;
    if (side->pitch < side->x + copy->row_bytes)
        return SHOAL_CU_INVALID_VALUE;
    if (side->type == SHOAL_CU_MEMORY_HOST)
        return mock_find_host_span((const char *)side->host + begin, bytes, span);
    if (side->type == SHOAL_CU_MEMORY_DEVICE)
        return mock_find_device_span(side->device + begin, bytes, span);
    return SHOAL_CU_INVALID_VALUE;
}

shoal_cu_result mock_copy_2d(const struct shoal_cu_copy_2d *copy, shoal_cu_stream stream)
{
    ENTER("cuMemcpy2DAsync", MOCK_CURRENT);
    const struct side to = {copy->dest_type, copy->dest_host, copy->dest_device, copy->dest_x, copy->dest_y, copy->dest_pitch};
    const struct side from = {copy->source_type, copy->source_host, copy->source_device,
                              copy->source_x,    copy->source_y,    copy->source_pitch};
    struct mock_span dest, source;
    if (!copy->rows || !copy->row_bytes)
        return SHOAL_CU_SUCCESS;
    MOCK_TRY(find_side(&to, copy, &dest));
    MOCK_TRY(find_side(&from, copy, &source));
    const struct mock_copy rows = {
        .dest_pitch = to.pitch, .source_pitch = from.pitch, .row_bytes = copy->row_bytes, .rows = copy->rows};
    return post_copy(&call, stream, rows, &dest, &source);
}
