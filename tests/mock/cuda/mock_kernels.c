/* The kernels for GPUs (src/device/cuda/kernels) as functions of the host: the same source, compiled with -ffp-contract=off as
 * for devices. */
#include "device/cuda/kernels/gpu_kernel_body.h"

#include "mock_driver.h"

/* Replaces a device's address by the host's. Returns false if the device may not use that memory. */
static bool mock_kernel_find(const struct mock_cuda_block *block, uint64_t *address, uint64_t bytes)
{
    *address = (uintptr_t)mock_cuda_look_up(block, *address, bytes);
    return *address != 0;
}

static bool mock_find_reduce(const struct mock_cuda_block *block, struct shoal_gpu_reduce_args *args, size_t element)
{
    const uint64_t bytes = (args->head + args->tail) * element + args->packets * SHOAL_GPU_PACKET_BYTES;
    bool is_there = mock_kernel_find(block, &args->dest, bytes);
    for (int64_t s = 0; s < args->source_count; s++)
        is_there = is_there && mock_kernel_find(block, &args->sources[s], bytes);
    return is_there;
}

static bool mock_find_cast(const struct mock_cuda_block *block, struct shoal_gpu_cast_args *args, size_t dest, size_t source)
{
    return mock_kernel_find(block, &args->dest, args->count * dest) &&
           mock_kernel_find(block, &args->source, args->count * source);
}

static uint64_t mock_scale_bytes(uint64_t count)
{
    return (count + SHOAL_GPU_QUANTIZED_BLOCK - 1) / SHOAL_GPU_QUANTIZED_BLOCK * sizeof(float);
}

static bool mock_find_quantize(const struct mock_cuda_block *block, struct shoal_gpu_quantize_args *args)
{
    const uint64_t bytes = args->count * sizeof(float);
    return mock_kernel_find(block, &args->values, args->count) &&
           mock_kernel_find(block, &args->scales, mock_scale_bytes(args->count)) &&
           mock_kernel_find(block, &args->source, bytes) && (!args->error || mock_kernel_find(block, &args->error, bytes));
}

static bool mock_find_dequantize(const struct mock_cuda_block *block, struct shoal_gpu_dequantize_args *args)
{
    return mock_kernel_find(block, &args->dest, args->count * sizeof(float)) &&
           mock_kernel_find(block, &args->values, args->count) &&
           mock_kernel_find(block, &args->scales, mock_scale_bytes(args->count));
}

static bool mock_find_square(const struct mock_cuda_block *block, struct shoal_gpu_square_args *args, size_t element)
{
    const uint64_t chunks = (args->count + SHOAL_GPU_SQUARED_CHUNK - 1) / SHOAL_GPU_SQUARED_CHUNK;
    return mock_kernel_find(block, &args->sums, chunks * 2 * sizeof(double)) &&
           mock_kernel_find(block, &args->source, args->count * element);
}

#define MOCK_KERNEL(NAME, ARGS, FOUND)                                                                 \
    static void mock_##NAME(const struct mock_cuda_block *block, void *const *arguments)               \
    {                                                                                                  \
        struct ARGS args = *(const struct ARGS *)arguments[0];                                         \
        const struct place place = {block->index[0], block->grid[0]};                                  \
        if (block->block[0] != SHOAL_GPU_THREADS)                                                      \
            mock_fault("a kernel of Shoal's was launched with blocks of %u threads", block->block[0]); \
        else if (FOUND)                                                                                \
            NAME(place, &args);                                                                        \
    }
MOCK_KERNEL(to_bfloat16, shoal_gpu_cast_args, mock_find_cast(block, &args, sizeof(uint16_t), sizeof(float)))
MOCK_KERNEL(to_float16, shoal_gpu_cast_args, mock_find_cast(block, &args, sizeof(uint16_t), sizeof(float)))
MOCK_KERNEL(from_bfloat16, shoal_gpu_cast_args, mock_find_cast(block, &args, sizeof(float), sizeof(uint16_t)))
MOCK_KERNEL(from_float16, shoal_gpu_cast_args, mock_find_cast(block, &args, sizeof(float), sizeof(uint16_t)))
MOCK_KERNEL(quantize, shoal_gpu_quantize_args, mock_find_quantize(block, &args))
MOCK_KERNEL(square_float32, shoal_gpu_square_args, mock_find_square(block, &args, sizeof(float)))
MOCK_KERNEL(square_float64, shoal_gpu_square_args, mock_find_square(block, &args, sizeof(double)))
MOCK_KERNEL(square_bfloat16, shoal_gpu_square_args, mock_find_square(block, &args, sizeof(uint16_t)))
MOCK_KERNEL(square_float16, shoal_gpu_square_args, mock_find_square(block, &args, sizeof(uint16_t)))
MOCK_KERNEL(dequantize, shoal_gpu_dequantize_args, mock_find_dequantize(block, &args))

#define MOCK_REDUCE(TYPE, OP, LOOPS) \
    OWN_LOOPS(TYPE, LOOPS,           \
              MOCK_KERNEL(reduce_##TYPE##_##OP, shoal_gpu_reduce_args, mock_find_reduce(block, &args, sizeof(MOCK_##TYPE))))
#define MOCK_REDUCES(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) \
    typedef MEMORY MOCK_##TYPE;                               \
    OPS(MOCK_REDUCE, TYPE, UNSIGNED)
TYPES(MOCK_REDUCES)

const struct mock_cuda_kernel mock_own_kernels[] = {
#define MOCK_ROW(NAME, ARGS) {#NAME, mock_##NAME, 1, {sizeof(struct ARGS)}},
    SHOAL_GPU_KERNEL_LIST(MOCK_ROW)
#define MOCK_REDUCE_ROW(TYPE, OP, LOOPS) OWN_LOOPS(TYPE, LOOPS, MOCK_ROW(reduce_##TYPE##_##OP, shoal_gpu_reduce_args))
#define MOCK_REDUCE_ROWS(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(MOCK_REDUCE_ROW, TYPE, UNSIGNED)
        TYPES(MOCK_REDUCE_ROWS)};
const size_t mock_own_kernel_count = SHOAL_COUNT_OF(mock_own_kernels);
