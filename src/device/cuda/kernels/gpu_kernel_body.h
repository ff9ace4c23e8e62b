/* The kernels for GPUs, written once. dev/ptx.py compiles them for devices, into kernels.ptx.xz in this folder; tests compile
 * them for the host, where the stand-in driver runs them. Lanes, formats and operators are those of the processor's kernels
 * (src/kernels), so the bits are the same. Casts and blocks of 8 bits produce the bits of src/fusion. No other file includes
 * this one.
 *
 * A kernel runs for one block. EACH_THREAD runs its statement for each thread of the block, and all threads have finished it
 * before the next statement: on a device with a barrier, on the host as a loop. No thread waits for another block, so blocks
 * may run in any order and any number at once. */
#include "device/cuda/kernels/gpu_kernels.h"
#include "kernels/formats.h"
#include "kernels/kernel_lists.h"

struct place {
    uint32_t block, blocks;
};

#if defined(__CUDA__)

#define SHARED __attribute__((shared))
#define UNROLL _Pragma("clang loop unroll(full)")
#define EACH_THREAD(thread) \
    for (uint32_t thread = (uint32_t)__nvvm_read_ptx_sreg_tid_x(), again = 1; again != 0; again = 0, __syncthreads())
#define KERNEL(NAME, ARGS)                                                                                                \
    INLINE void NAME##_in(struct place place, const struct ARGS *args);                                                   \
    extern "C" __attribute__((global, launch_bounds(SHOAL_GPU_THREADS, 1))) void NAME(struct ARGS args)                   \
    {                                                                                                                     \
        const struct place place = {(uint32_t)__nvvm_read_ptx_sreg_ctaid_x(), (uint32_t)__nvvm_read_ptx_sreg_nctaid_x()}; \
        NAME##_in(place, &args);                                                                                          \
    }                                                                                                                     \
    INLINE void NAME##_in(struct place place, const struct ARGS *args)

#else

#define SHARED
#define UNROLL
#define EACH_THREAD(thread) for (uint32_t thread = 0; thread < SHOAL_GPU_THREADS; thread++)
#define KERNEL(NAME, ARGS) static void NAME(struct place place, const struct ARGS *args)

#endif

#define AT(TYPE, address) ((TYPE *)(uintptr_t)(address))

/* Threads divide elements one by one: neighbors in time and place. */
INLINE uint64_t first_of(struct place place, uint32_t thread)
{
    return (uint64_t)place.block * SHOAL_GPU_THREADS + thread;
}

INLINE uint64_t threads_of(struct place place)
{
    return (uint64_t)place.blocks * SHOAL_GPU_THREADS;
}

/* ---- Reductions --------------------------------------------------------------------------------------------------------- */

#define HALF_BYTES 8 /* of a packet; elements are extracted from numbers: arrays would use local memory of a device */

/* Converts half a packet to lanes, and back. */
#define DEFINE_HALF(TYPE, MEMORY, LANE, FORM, ...)                                                       \
    INLINE void TYPE##_open(enum shoal_op op, const struct work *work, LANE##_one *lanes, uint64_t half) \
    {                                                                                                    \
        UNROLL                                                                                           \
        for (int i = 0; i < HALF_BYTES / (int)sizeof(MEMORY); i++) {                                     \
            const uint64_t shifted = half >> (8 * (int)sizeof(MEMORY) * i);                              \
            MEMORY element;                                                                              \
            __builtin_memcpy(&element, &shifted, sizeof element);                                        \
            lanes[i] = LANE##_one_take(op, FORM##_widen(element), work);                                 \
        }                                                                                                \
    }                                                                                                    \
    INLINE uint64_t TYPE##_close(enum shoal_op op, const struct work *work, const LANE##_one *lanes)     \
    {                                                                                                    \
        uint64_t half = 0;                                                                               \
        UNROLL                                                                                           \
        for (int i = 0; i < HALF_BYTES / (int)sizeof(MEMORY); i++) {                                     \
            const MEMORY element = FORM##_round(LANE##_one_finish(op, lanes[i], work));                  \
            uint64_t number = 0;                                                                         \
            __builtin_memcpy(&number, &element, sizeof element);                                         \
            half |= number << (8 * (int)sizeof(MEMORY) * i);                                             \
        }                                                                                                \
        return half;                                                                                     \
    }
TYPES(DEFINE_HALF)

/* Packets of each source that a thread processes at once: few blocks have to keep many loads under way. With more, lanes of 8
 * bits would need more registers than there are. */
#define GROUP(MEMORY) (sizeof(MEMORY) == 1 ? 2 : 4)
#define LANES(MEMORY) (HALF_BYTES / (int)sizeof(MEMORY)) /* in half a packet */

/* n packets, 1 or GROUP, with `step` bytes from one to the next. */
#define DEFINE_PACKETS(TYPE, MEMORY, LANE, FORM, ...)                                                                          \
    INLINE void TYPE##_load(enum shoal_op op, const struct work *work, int n, LANE##_one *lanes, uint64_t from, uint64_t step) \
    {                                                                                                                          \
        bits packets[GROUP(MEMORY)];                                                                                           \
        UNROLL                                                                                                                 \
        for (int p = 0; p < n; p++)                                                                                            \
            packets[p] = *AT(const bits, from + (uint64_t)p * step);                                                           \
        UNROLL                                                                                                                 \
        for (int p = 0; p < n; p++) {                                                                                          \
            TYPE##_open(op, work, lanes + 2 * p * LANES(MEMORY), packets[p][0]);                                               \
            TYPE##_open(op, work, lanes + (2 * p + 1) * LANES(MEMORY), packets[p][1]);                                         \
        }                                                                                                                      \
    }                                                                                                                          \
    INLINE void TYPE##_store(enum shoal_op op, const struct work *work, int n, const LANE##_one *lanes, uint64_t to,           \
                             uint64_t step)                                                                                    \
    {                                                                                                                          \
        UNROLL                                                                                                                 \
        for (int p = 0; p < n; p++)                                                                                            \
            *AT(bits, to + (uint64_t)p * step) = (bits){TYPE##_close(op, work, lanes + 2 * p * LANES(MEMORY)),                 \
                                                        TYPE##_close(op, work, lanes + (2 * p + 1) * LANES(MEMORY))};          \
    }                                                                                                                          \
    INLINE void TYPE##_packets(enum shoal_op op, const struct work *work, int n, const struct shoal_gpu_reduce_args *args,     \
                               uint64_t at, uint64_t step)                                                                     \
    {                                                                                                                          \
        LANE##_one result[2 * GROUP(MEMORY) * LANES(MEMORY)], next[2 * GROUP(MEMORY) * LANES(MEMORY)];                         \
        TYPE##_load(op, work, n, result, args->sources[0] + at, step);                                                         \
        for (int64_t s = 1; s < args->source_count; s++) {                                                                     \
            TYPE##_load(op, work, n, next, args->sources[s] + at, step);                                                       \
            UNROLL                                                                                                             \
            for (int i = 0; i < 2 * n * LANES(MEMORY); i++)                                                                    \
                result[i] = LANE##_one_combine(op, result[i], next[i]);                                                        \
        }                                                                                                                      \
        TYPE##_store(op, work, n, result, args->dest + at, step);                                                              \
    }
TYPES(DEFINE_PACKETS)

/* Element by element, for elements outside the packets, or arrays whose packet boundaries differ. */
#define DEFINE_THREAD(TYPE, MEMORY, LANE, FORM, ...)                                                                    \
    INLINE LANE##_one TYPE##_taken(enum shoal_op op, const struct work *work, uint64_t from, uint64_t i)                \
    {                                                                                                                   \
        return LANE##_one_take(op, FORM##_widen(AT(const MEMORY, from)[i]), work);                                      \
    }                                                                                                                   \
    INLINE void TYPE##_element(enum shoal_op op, const struct work *work, const struct shoal_gpu_reduce_args *args,     \
                               uint64_t i)                                                                              \
    {                                                                                                                   \
        LANE##_one result = TYPE##_taken(op, work, args->sources[0], i);                                                \
        for (int64_t s = 1; s < args->source_count; s++)                                                                \
            result = LANE##_one_combine(op, result, TYPE##_taken(op, work, args->sources[s], i));                       \
        AT(MEMORY, args->dest)[i] = FORM##_round(LANE##_one_finish(op, result, work));                                  \
    }                                                                                                                   \
    INLINE void TYPE##_thread(enum shoal_op op, const struct shoal_gpu_reduce_args *args, uint64_t first, uint64_t all) \
    {                                                                                                                   \
        const double factor = op == SHOAL_AVG ? exact_inverse(args->argument) : 0;                                      \
        const struct work work = {NULL, 0, NULL, 0, args->argument, factor};                                            \
        const uint64_t head = args->head * sizeof(MEMORY), step = all * SHOAL_GPU_PACKET_BYTES;                         \
        const uint64_t past = args->packets * (SHOAL_GPU_PACKET_BYTES / sizeof(MEMORY));                                \
        uint64_t i = first;                                                                                             \
        for (; i + (GROUP(MEMORY) - 1) * all < args->packets; i += GROUP(MEMORY) * all)                                 \
            TYPE##_packets(op, &work, GROUP(MEMORY), args, head + i * SHOAL_GPU_PACKET_BYTES, step);                    \
        for (; i < args->packets; i += all)                                                                             \
            TYPE##_packets(op, &work, 1, args, head + i * SHOAL_GPU_PACKET_BYTES, step);                                \
        for (i = first; i < args->head + args->tail; i += all)                                                          \
            TYPE##_element(op, &work, args, i < args->head ? i : i + past);                                             \
    }
TYPES(DEFINE_THREAD)

#define DEFINE_REDUCE(TYPE, OP)                                                      \
    KERNEL(reduce_##TYPE##_##OP, shoal_gpu_reduce_args)                              \
    {                                                                                \
        EACH_THREAD(thread)                                                          \
        TYPE##_thread(SHOAL_##OP, args, first_of(place, thread), threads_of(place)); \
    }
#define DEFINE_OWN(TYPE, OP, LOOPS) OWN_LOOPS(TYPE, LOOPS, DEFINE_REDUCE(TYPE, OP))
#define EACH_REDUCE(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(DEFINE_OWN, TYPE, UNSIGNED)
TYPES(EACH_REDUCE)

/* ---- Casts -------------------------------------------------------------------------------------------------------------- */

/* Turns every NaN into the one quiet NaN, which is the only one that is rounded. */
INLINE float without_payload(float x)
{
    return f32_one_finish(SHOAL_SUM, x, NULL);
}

/* A thread loads several elements before it stores the first. */
#define DEFINE_CAST(NAME, FROM, TO, RESULT)                                                         \
    INLINE void NAME##_thread(const struct shoal_gpu_cast_args *args, uint64_t first, uint64_t all) \
    {                                                                                               \
        for (uint64_t at = first; at < args->count; at += SHOAL_GPU_ELEMENTS * all) {               \
            FROM from[SHOAL_GPU_ELEMENTS] = {0};                                                    \
            UNROLL                                                                                  \
            for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)                                       \
                if (at + k * all < args->count)                                                     \
                    from[k] = AT(const FROM, args->source)[at + k * all];                           \
            UNROLL                                                                                  \
            for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)                                       \
                if (at + k * all < args->count)                                                     \
                    AT(TO, args->dest)[at + k * all] = RESULT(from[k], args->factor);               \
        }                                                                                           \
    }                                                                                               \
    KERNEL(NAME, shoal_gpu_cast_args)                                                               \
    {                                                                                               \
        EACH_THREAD(thread)                                                                         \
        NAME##_thread(args, first_of(place, thread), threads_of(place));                            \
    }

#define TO_BFLOAT16(x, factor) bfloat16_round(without_payload((x) * (factor)))
#define TO_FLOAT16(x, factor) float16_round(without_payload((x) * (factor)))
#define FROM_BFLOAT16(x, factor) (bfloat16_widen(x) * (factor))
#define FROM_FLOAT16(x, factor) (float16_widen(x) * (factor))
DEFINE_CAST(to_bfloat16, float, uint16_t, TO_BFLOAT16)
DEFINE_CAST(to_float16, float, uint16_t, TO_FLOAT16)
DEFINE_CAST(from_bfloat16, uint16_t, float, FROM_BFLOAT16)
DEFINE_CAST(from_float16, uint16_t, float, FROM_FLOAT16)

/* ---- Blocks of 8 bits --------------------------------------------------------------------------------------------------- */

/* A team of threads processes a block of elements; each thread has every TEAM-th element. */
#define TEAM (SHOAL_GPU_QUANTIZED_BLOCK / SHOAL_GPU_ELEMENTS)
#define TEAMS (SHOAL_GPU_THREADS / TEAM)
#define ROUNDER 0x1.8p+23f /* adding and then subtracting it rounds to a whole number, to nearest even, up to 2^22 */

/* Returns the index of element k of a thread; the last block may be short. */
INLINE uint64_t element_of(uint64_t team, uint32_t thread, uint32_t k)
{
    return team * SHOAL_GPU_QUANTIZED_BLOCK + k * TEAM + thread % TEAM;
}

INLINE float value_of(const struct shoal_gpu_quantize_args *args, uint64_t i)
{
    const float x = AT(const float, args->source)[i];
    return args->error ? x + AT(const float, args->error)[i] : x;
}

/* Returns the largest size that a thread finds, or NaN if any is not finite. */
INLINE float largest_of(const struct shoal_gpu_quantize_args *args, uint64_t team, uint32_t thread)
{
    float u[SHOAL_GPU_ELEMENTS] = {0}, most = 0, bad = 0;
    UNROLL
    for (uint32_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)
        if (element_of(team, thread, k) < args->count)
            u[k] = value_of(args, element_of(team, thread, k));
    UNROLL
    for (uint32_t k = 0; k < SHOAL_GPU_ELEMENTS; k++) {
        most = __builtin_fabsf(u[k]) > most ? __builtin_fabsf(u[k]) : most;
        bad += u[k] - u[k];
    }
    return most + bad;
}

INLINE float scale_of(const float *largest)
{
    float most = 0, bad = 0;
    for (uint32_t i = 0; i < TEAM; i++) {
        most = largest[i] > most ? largest[i] : most;
        bad += largest[i] - largest[i];
    }
    return without_payload((most + bad) / 127);
}

INLINE void quantize_element(const struct shoal_gpu_quantize_args *args, uint64_t i, float scale)
{
    const float inverse = scale > 0 ? 1 / scale : 0;      /* also 0 if scale is NaN */
    const float part = inverse < 0x1p+126f ? inverse : 0; /* subnormals quantize to zero, and survive only in error */
    const float u = value_of(args, i);
    float whole = (u * part + ROUNDER) - ROUNDER;
    whole = whole > 127 ? 127 : whole;
    whole = whole < -127 ? -127 : whole;
    AT(int8_t, args->values)[i] = (int8_t)(part > 0 ? (int)whole : 0);
    if (args->error)
        AT(float, args->error)[i] = scale == scale ? u - (part > 0 ? whole * scale : 0) : 0;
}

INLINE void quantize_thread(const struct shoal_gpu_quantize_args *args, uint64_t team, uint32_t thread, float scale)
{
    UNROLL
    for (uint32_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)
        if (element_of(team, thread, k) < args->count)
            quantize_element(args, element_of(team, thread, k), scale);
    if (thread % TEAM == 0 && element_of(team, thread, 0) < args->count)
        AT(float, args->scales)[team] = scale;
}

KERNEL(quantize, shoal_gpu_quantize_args)
{
    SHARED float largest[SHOAL_GPU_THREADS];
    const uint64_t teams = (args->count + SHOAL_GPU_QUANTIZED_BLOCK - 1) / SHOAL_GPU_QUANTIZED_BLOCK;
    for (uint64_t base = (uint64_t)place.block * TEAMS; base < teams; base += (uint64_t)place.blocks * TEAMS) {
        EACH_THREAD(thread)
        largest[thread] = largest_of(args, base + thread / TEAM, thread);
        EACH_THREAD(thread)
        quantize_thread(args, base + thread / TEAM, thread, scale_of(largest + thread / TEAM * TEAM));
    }
}

INLINE float dequantized(const struct shoal_gpu_dequantize_args *args, uint64_t i)
{
    const float scale = AT(const float, args->scales)[i / SHOAL_GPU_QUANTIZED_BLOCK] * args->factor;
    const float x = (float)AT(const int8_t, args->values)[i] * scale;
    return args->adds ? AT(const float, args->dest)[i] + x : x;
}

INLINE void dequantize_thread(const struct shoal_gpu_dequantize_args *args, uint64_t first, uint64_t all)
{
    for (uint64_t at = first; at < args->count; at += SHOAL_GPU_ELEMENTS * all) {
        float x[SHOAL_GPU_ELEMENTS] = {0};
        UNROLL
        for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)
            if (at + k * all < args->count)
                x[k] = dequantized(args, at + k * all);
        UNROLL
        for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)
            if (at + k * all < args->count)
                AT(float, args->dest)[at + k * all] = x[k];
    }
}

KERNEL(dequantize, shoal_gpu_dequantize_args)
{
    EACH_THREAD(thread)
    dequantize_thread(args, first_of(place, thread), threads_of(place));
}

/* ---- Squares ------------------------------------------------------------------------------------------------------------ */

/* A team of threads processes a chunk. Each thread has every SHOAL_GPU_SQUARED_TEAM-th element, and adds the squares in
 * order. */
#define SQUARED_TEAMS (SHOAL_GPU_THREADS / SHOAL_GPU_SQUARED_TEAM)

struct squared {
    double sum;
    double bad; /* 0, or NaN if an element is not finite */
};

#define DEFINE_SQUARED_THREAD(FORMAT, MEMORY, VALUE, FORM)                                                                 \
    INLINE struct squared FORMAT##_squared(const struct shoal_gpu_square_args *args, uint64_t first, uint64_t end)         \
    {                                                                                                                      \
        const VALUE factor = (VALUE)args->factor;                                                                          \
        struct squared squared = {0, 0};                                                                                   \
        for (uint64_t at = first; at < end; at += SHOAL_GPU_ELEMENTS * SHOAL_GPU_SQUARED_TEAM) {                           \
            VALUE value[SHOAL_GPU_ELEMENTS] = {0};                                                                         \
            UNROLL                                                                                                         \
            for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++)                                                              \
                if (at + k * SHOAL_GPU_SQUARED_TEAM < end)                                                                 \
                    value[k] = FORM##_widen(AT(const MEMORY, args->source)[at + k * SHOAL_GPU_SQUARED_TEAM]) * factor;     \
            UNROLL                                                                                                         \
            for (uint64_t k = 0; k < SHOAL_GPU_ELEMENTS; k++) {                                                            \
                squared.sum += (double)value[k] * (double)value[k]; /* past the end: 0, which changes no sum of squares */ \
                squared.bad += (double)(value[k] - value[k]);                                                              \
            }                                                                                                              \
        }                                                                                                                  \
        return squared;                                                                                                    \
    }
DEFINE_SQUARED_THREAD(float32, float, float, plain)
DEFINE_SQUARED_THREAD(float64, double, double, plain)
DEFINE_SQUARED_THREAD(bfloat16, uint16_t, float, bfloat16)
DEFINE_SQUARED_THREAD(float16, uint16_t, float, float16)

INLINE uint64_t squared_end(const struct shoal_gpu_square_args *args, uint64_t chunk)
{
    const uint64_t end = (chunk + 1) * SHOAL_GPU_SQUARED_CHUNK;
    return end < args->count ? end : args->count;
}

/* Adds in the order of the processor's kernel: halves, then quarters, and so on. */
INLINE double add_squared(const double *partial)
{
    double quarter[SHOAL_GPU_SQUARED_TEAM / 4];
    UNROLL
    for (int i = 0; i < SHOAL_GPU_SQUARED_TEAM / 4; i++)
        quarter[i] = (partial[i] + partial[i + 8]) + (partial[i + 4] + partial[i + 12]);
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

INLINE void store_squared(const struct shoal_gpu_square_args *args, uint64_t chunk, const double *sums, const double *bads)
{
    AT(double, args->sums)[2 * chunk] = add_squared(sums);
    AT(double, args->sums)[2 * chunk + 1] = add_squared(bads);
}

#define DEFINE_SQUARE(FORMAT)                                                                              \
    KERNEL(square_##FORMAT, shoal_gpu_square_args)                                                         \
    {                                                                                                      \
        SHARED double sums[SHOAL_GPU_THREADS], bads[SHOAL_GPU_THREADS];                                    \
        const uint64_t chunks = (args->count + SHOAL_GPU_SQUARED_CHUNK - 1) / SHOAL_GPU_SQUARED_CHUNK;     \
        for (uint64_t base = (uint64_t)place.block * SQUARED_TEAMS; base < chunks;                         \
             base += (uint64_t)place.blocks * SQUARED_TEAMS) {                                             \
            EACH_THREAD(thread)                                                                            \
            {                                                                                              \
                const uint64_t chunk = base + thread / SHOAL_GPU_SQUARED_TEAM;                             \
                const uint64_t first = chunk * SHOAL_GPU_SQUARED_CHUNK + thread % SHOAL_GPU_SQUARED_TEAM;  \
                const struct squared squared = FORMAT##_squared(args, first, squared_end(args, chunk));    \
                sums[thread] = squared.sum;                                                                \
                bads[thread] = squared.bad;                                                                \
            }                                                                                              \
            EACH_THREAD(thread)                                                                            \
            if (thread % SHOAL_GPU_SQUARED_TEAM == 0 && base + thread / SHOAL_GPU_SQUARED_TEAM < chunks)   \
                store_squared(args, base + thread / SHOAL_GPU_SQUARED_TEAM, sums + thread, bads + thread); \
        }                                                                                                  \
    }
DEFINE_SQUARE(float32)
DEFINE_SQUARE(float64)
DEFINE_SQUARE(bfloat16)
DEFINE_SQUARE(float16)
