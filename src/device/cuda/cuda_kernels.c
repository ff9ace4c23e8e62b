/* The kernels of cuda/kernels in one context: a module of the driver, its functions, and their launches. */
#include <stdlib.h>

#include "base/assert.h"
#include "device/cuda/cuda_gpu.h"
#include "device/cuda/kernels/gpu_kernels.h"
#include "kernels/kernel_lists.h"
#include "kernels/kernels.h"

#define OLDEST_MAJOR 7 /* compute capability of the code in kernels.ptx.xz */

struct shoal_gpu_kernels {
    struct shoal_gpu *gpu;
    shoal_cu_context context;
    int device;
    shoal_cu_module module;
    shoal_cu_function reduce[SHOAL_TYPE_END][SHOAL_OP_END]; /* NULL: the type has no such operator */
#define MEMBER(NAME, ARGS) shoal_cu_function NAME;
    SHOAL_GPU_KERNEL_LIST(MEMBER)
#undef MEMBER
};

/* The type whose loops serve an operator of another type. */
static const enum shoal_type loops_of[SHOAL_TYPE_END][SHOAL_OP_END] = {
#define ROW(TYPE, OP, LOOPS) [SHOAL_##TYPE][SHOAL_##OP] = SHOAL_##LOOPS,
#define ROWS(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(ROW, TYPE, UNSIGNED)
    TYPES(ROWS)
#undef ROWS
#undef ROW
};

/* The kernels to find in the module: the name of each, and the member that stores its function. */
static const struct {
    const char *name;
    size_t offset;
} functions[] = {
#define ROW(TYPE, OP, LOOPS) {"reduce_" #LOOPS "_" #OP, offsetof(struct shoal_gpu_kernels, reduce[SHOAL_##TYPE][SHOAL_##OP])},
#define ROWS(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(ROW, TYPE, UNSIGNED)
    TYPES(ROWS)
#undef ROWS
#undef ROW
#define ROW(NAME, ARGS) {#NAME, offsetof(struct shoal_gpu_kernels, NAME)},
        SHOAL_GPU_KERNEL_LIST(ROW)
#undef ROW
};

static enum shoal_status kernels_fail(const struct shoal_gpu_kernels *kernels, const char *call, shoal_cu_result result,
                                      const char *doing)
{
    char text[128];
    snprintf(text, sizeof text, "%s (device %d)", doing, kernels->device);
    return shoal_cuda_fail(kernels->gpu->log, &kernels->gpu->calls, call, result, text);
}

/* ---- Loading ------------------------------------------------------------------------------------------------------------- */

/* With lazy loading, the driver loads a function when it is requested here. */
static enum shoal_status find_functions(struct shoal_gpu_kernels *kernels)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(functions); i++) {
        shoal_cu_function *function = (shoal_cu_function *)(void *)((char *)kernels + functions[i].offset);
        char doing[64];
        const shoal_cu_result result = kernels->gpu->calls.module_function(function, kernels->module, functions[i].name);
        snprintf(doing, sizeof doing, "looking for kernel %s", functions[i].name);
        if (result != SHOAL_CU_SUCCESS)
            return kernels_fail(kernels, "cuModuleGetFunction", result, doing);
    }
    return SHOAL_OK;
}

static enum shoal_status load_module(struct shoal_gpu_kernels *kernels)
{
    const struct shoal_cuda_calls *calls = &kernels->gpu->calls;
    const shoal_cu_result result = calls->module_load(&kernels->module, shoal_gpu_kernels_ptx);
    if (result != SHOAL_CU_SUCCESS)
        return kernels_fail(kernels, "cuModuleLoadData", result, "loading kernels");
    const enum shoal_status status = find_functions(kernels);
    if (status != SHOAL_OK)
        (void)calls->module_unload(kernels->module); /* there is no remedy if a driver that shuts down refuses */
    return status;
}

static enum shoal_status load_in_context(struct shoal_gpu_kernels *kernels)
{
    struct shoal_cuda_visit visit;
    const shoal_cu_result result = shoal_cuda_visit(kernels->gpu, kernels->context, &visit);
    if (result != SHOAL_CU_SUCCESS)
        return kernels_fail(kernels, "cuCtxPushCurrent", result, "entering a context");
    const enum shoal_status status = load_module(kernels);
    shoal_cuda_leave(kernels->gpu, &visit);
    return status;
}

static enum shoal_status check_can_run(struct shoal_gpu *gpu, int number)
{
    const struct shoal_cuda_calls *calls = &gpu->calls;
    const struct shoal_gpu_device *device = shoal_gpu_at(gpu, number);
    if (!calls->module_load || !calls->module_function || !calls->module_unload || !calls->launch)
        return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu", "the CUDA driver cannot load kernels: install it again");
    if (device->major < OLDEST_MAJOR)
        return shoal_log_fail(gpu->log, SHOAL_ERR_UNSUPPORTED, "gpu",
                              "device %d (%s) has compute capability %d.%d, and kernels need %d.0 or more", number,
                              device->name, device->major, device->minor, OLDEST_MAJOR);
    return SHOAL_OK;
}

enum shoal_status shoal_gpu_kernels_open(struct shoal_gpu *gpu, void *context, struct shoal_gpu_kernels **kernels_out)
{
    int device = 0;
    SHOAL_TRY(shoal_cuda_find_device(gpu, context, &device));
    SHOAL_TRY(check_can_run(gpu, device));
    struct shoal_gpu_kernels *kernels = calloc(1, sizeof *kernels);
    if (!kernels)
        return shoal_log_fail(gpu->log, SHOAL_ERR_MEMORY, "gpu", "no memory for the kernels of device %d", device);
    kernels->gpu = gpu;
    kernels->context = context;
    kernels->device = device;
    const enum shoal_status status = load_in_context(kernels);
    if (status == SHOAL_OK)
        *kernels_out = kernels;
    else
        free(kernels);
    return status;
}

/* If the program has destroyed the context, its modules are also gone. */
void shoal_gpu_kernels_close(struct shoal_gpu_kernels *kernels)
{
    struct shoal_cuda_visit visit;
    if (kernels && shoal_cuda_visit(kernels->gpu, kernels->context, &visit) == SHOAL_CU_SUCCESS) {
        (void)kernels->gpu->calls.module_unload(kernels->module);
        shoal_cuda_leave(kernels->gpu, &visit);
    }
    free(kernels);
}

/* ---- Launching ----------------------------------------------------------------------------------------------------------- */

/* One item to put on a stream: a kernel and its arguments, or a copy. */
struct job {
    shoal_cu_function function; /* NULL: a copy */
    void *args;
    uint64_t threads; /* threads that have work */
    const char *name;
    uint64_t dest, source; /* for a copy */
    size_t bytes;
};

static unsigned blocks_for(uint64_t threads)
{
    const uint64_t blocks = (threads + SHOAL_GPU_THREADS - 1) / SHOAL_GPU_THREADS;
    return blocks < SHOAL_GPU_BLOCKS_MAX ? (unsigned)blocks : SHOAL_GPU_BLOCKS_MAX;
}

static enum shoal_status put_job(const struct shoal_gpu_kernels *kernels, const struct job *job, shoal_cu_stream stream)
{
    const struct shoal_cuda_calls *calls = &kernels->gpu->calls;
    void *arguments[] = {job->args};
    const shoal_cu_result result = job->function ? calls->launch(job->function, blocks_for(job->threads), 1, 1,
                                                                 SHOAL_GPU_THREADS, 1, 1, 0, stream, arguments, NULL)
                                                 : calls->copy(job->dest, job->source, job->bytes, stream);
    if (result != SHOAL_CU_SUCCESS)
        return kernels_fail(kernels, job->function ? "cuLaunchKernel" : "cuMemcpyAsync", result, job->name);
    return SHOAL_OK;
}

static enum shoal_status put_in_context(const struct shoal_gpu_kernels *kernels, const struct job *job, void *stream)
{
    shoal_cu_context popped;
    const shoal_cu_result result = kernels->gpu->calls.context_push(kernels->context);
    if (result != SHOAL_CU_SUCCESS)
        return kernels_fail(kernels, "cuCtxPushCurrent", result, "entering a context");
    const enum shoal_status status = put_job(kernels, job, shoal_cuda_stream(stream));
    (void)kernels->gpu->calls.context_pop(&popped);
    return status;
}

/* ---- Reductions ---------------------------------------------------------------------------------------------------------- */

/* Returns true if all arrays have packet boundaries at the same elements. */
static bool lie_alike(const struct shoal_gpu_reduction *reduction)
{
    uint64_t differences = 0;
    for (int s = 0; s < reduction->source_count; s++)
        differences |= reduction->dest ^ reduction->sources[s];
    return differences % SHOAL_GPU_PACKET_BYTES == 0;
}

/* Divides `count` elements into those before the first packet, those in packets, and those after the last packet. */
static void divide_reduction(struct shoal_gpu_reduce_args *args, uint64_t count, size_t element, bool has_packets)
{
    const uint64_t before = (SHOAL_GPU_PACKET_BYTES - args->dest % SHOAL_GPU_PACKET_BYTES) % SHOAL_GPU_PACKET_BYTES / element;
    const uint64_t each = SHOAL_GPU_PACKET_BYTES / element;
    args->head = has_packets && before < count ? before : count;
    args->packets = (count - args->head) / each;
    args->tail = (count - args->head) % each;
}

enum shoal_status shoal_gpu_reduce(struct shoal_gpu_kernels *kernels, const struct shoal_gpu_reduction *reduction, void *stream)
{
    const size_t bytes = reduction->count * shoal_type_bytes(reduction->type);
    const size_t element = shoal_type_bytes(loops_of[reduction->type][reduction->op]);
    const bool copies = reduction->source_count == 1 && shoal_kernels_copy_one(reduction->op, reduction->argument);
    struct shoal_gpu_reduce_args args = {
        .dest = reduction->dest, .argument = reduction->argument, .source_count = reduction->source_count};
    SHOAL_ASSERT(reduction->source_count >= 1 && reduction->source_count <= SHOAL_GPU_SOURCES_MAX);
    SHOAL_ASSERT(kernels->reduce[reduction->type][reduction->op]);
    if (bytes == 0 || (copies && reduction->dest == reduction->sources[0]))
        return SHOAL_OK;
    for (int s = 0; s < reduction->source_count; s++)
        args.sources[s] = reduction->sources[s];
    divide_reduction(&args, bytes / element, element, lie_alike(reduction));
    const struct job job = {.function = copies ? NULL : kernels->reduce[reduction->type][reduction->op],
                            .args = &args,
                            .threads = args.packets > args.head + args.tail ? args.packets : args.head + args.tail,
                            .name = copies ? "copying on a device" : "reducing on a device",
                            .dest = reduction->dest,
                            .source = reduction->sources[0],
                            .bytes = bytes};
    return put_in_context(kernels, &job, stream);
}

/* ---- Gradients ----------------------------------------------------------------------------------------------------------- */

/* Launches a kernel whose threads each process several elements at once. */
static enum shoal_status put_elements(const struct shoal_gpu_kernels *kernels, shoal_cu_function function, void *args,
                                      uint64_t count, const char *name, void *stream)
{
    const struct job job = {
        .function = function, .args = args, .threads = (count + SHOAL_GPU_ELEMENTS - 1) / SHOAL_GPU_ELEMENTS, .name = name};
    return count ? put_in_context(kernels, &job, stream) : SHOAL_OK;
}

enum shoal_status shoal_gpu_narrow(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest, uint64_t source,
                                   size_t count, float factor, void *stream)
{
    struct shoal_gpu_cast_args args = {dest, source, count, factor};
    SHOAL_ASSERT(type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16);
    return put_elements(kernels, type == SHOAL_BFLOAT16 ? kernels->to_bfloat16 : kernels->to_float16, &args, count,
                        "casting to 16 bits on a device", stream);
}

enum shoal_status shoal_gpu_widen(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t dest, uint64_t source,
                                  size_t count, float factor, void *stream)
{
    struct shoal_gpu_cast_args args = {dest, source, count, factor};
    SHOAL_ASSERT(type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16);
    return put_elements(kernels, type == SHOAL_BFLOAT16 ? kernels->from_bfloat16 : kernels->from_float16, &args, count,
                        "casting from 16 bits on a device", stream);
}

enum shoal_status shoal_gpu_quantize(struct shoal_gpu_kernels *kernels, uint64_t values, uint64_t scales, uint64_t source,
                                     uint64_t error, size_t count, void *stream)
{
    struct shoal_gpu_quantize_args args = {values, scales, source, error, count};
    return put_elements(kernels, kernels->quantize, &args, count, "quantizing on a device", stream);
}

enum shoal_status shoal_gpu_dequantize(struct shoal_gpu_kernels *kernels, uint64_t dest, uint64_t values, uint64_t scales,
                                       size_t count, float factor, bool adds, void *stream)
{
    struct shoal_gpu_dequantize_args args = {dest, values, scales, count, factor, adds};
    return put_elements(kernels, kernels->dequantize, &args, count, "dequantizing on a device", stream);
}

enum shoal_status shoal_gpu_square(struct shoal_gpu_kernels *kernels, enum shoal_type type, uint64_t sums, uint64_t source,
                                   size_t count, double factor, void *stream)
{
    const shoal_cu_function functions_of[SHOAL_TYPE_END] = {[SHOAL_FLOAT32] = kernels->square_float32,
                                                            [SHOAL_FLOAT64] = kernels->square_float64,
                                                            [SHOAL_BFLOAT16] = kernels->square_bfloat16,
                                                            [SHOAL_FLOAT16] = kernels->square_float16};
    struct shoal_gpu_square_args args = {sums, source, count, factor};
    const struct job job = {.function = functions_of[type],
                            .args = &args,
                            .threads = (count + SHOAL_GPU_SQUARED_CHUNK - 1) / SHOAL_GPU_SQUARED_CHUNK * SHOAL_GPU_SQUARED_TEAM,
                            .name = "adding up squares on a device"};
    SHOAL_ASSERT(job.function);
    return count ? put_in_context(kernels, &job, stream) : SHOAL_OK;
}
