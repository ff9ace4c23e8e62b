/* The reduction kernels, written once for any instruction set. Each cpu/kernels_<set>.c names its set and includes this file;
 * the build compiles it with that set's flags, and the vectors below take the set's register width. Not a header for others.
 *
 * Same bits everywhere: sources are combined in their order, lane by lane, never across lanes and never fused; a result that is
 * no number is always the one positive quiet NaN (processors differ in sign and payload); of equal maxima the first is taken.
 * One source alone is copied as it is.
 *
 * A new type is a row of TYPES (and of ARITHMETIC, when its lanes are new); a new operator is a case of ARITHMETIC and a word
 * of EACH_OP. Every function below gets type and op as constants, so the compiler removes the choices. Reentrant. */
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "device/kernels.h"

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

/* So many vectors are in work at once: enough to hide the latency of an addition, few enough for 16 registers. */
#define GROUP 4
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif

/* Below this, streaming stores cost more than they save. */
#define STREAMING_BYTES_MIN ((size_t)4096)
#define COPY_CHUNK_BYTES ((size_t)4096)

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define VECTOR __attribute__((vector_size(WIDTH)))

typedef uint64_t bits VECTOR; /* a vector of lanes yet to be named */
typedef bits bits_anywhere __attribute__((aligned(1), may_alias));
typedef uint32_t u32_lanes VECTOR;
typedef float f32_lanes VECTOR;
typedef double f64_lanes VECTOR;
typedef int64_t i64_lanes VECTOR;
typedef uint64_t u64_lanes VECTOR;
typedef float f32_one;
typedef double f64_one;
typedef int64_t i64_one;

/* What all functions share of one call. */
struct work {
    void *const *dests;
    const void *const *sources;
    int dest_count;
    int source_count;
    int ranks;
    double factor; /* 1 / ranks where that is exact (a power of two): then a product has the bits of the quotient; else 0 */
};

/* ---- Lanes: one element, or a vector of them, in the type it is computed in ------------------------------------------- */

#define PICK_ONE(mask, yes, no) ((mask) ? (yes) : (no))
#define PICK_LANES(mask, yes, no) ((__typeof__(no))(((mask) & (__typeof__(mask))(yes)) | (~(mask) & (__typeof__(mask))(no))))

/* lanes, one lane, how it is added (integers wrap), how to choose between two, NaN. The factor of integers is 0, or 1 for one
 * rank: they divide. */
#define ARITHMETIC(LANES, ONE, ADDED, PICK, QUIET_NAN)                                   \
    INLINE LANES LANES##_combine(enum shoal_op op, LANES a, LANES b)                     \
    {                                                                                    \
        switch (op) {                                                                    \
        case SHOAL_MAX:                                                                  \
            return PICK((b > a) | (b != b), b, a);                                       \
        default: /* sum and avg */                                                       \
            return (LANES)((ADDED)a + (ADDED)b);                                         \
        }                                                                                \
    }                                                                                    \
    INLINE LANES LANES##_finish(enum shoal_op op, LANES result, const struct work *work) \
    {                                                                                    \
        const ONE factor = (ONE)work->factor;                                            \
        if (op == SHOAL_AVG)                                                             \
            result = factor != 0 ? result * factor : result / (ONE)work->ranks;          \
        return PICK(result != result, (LANES){0} + (ONE)(QUIET_NAN), result);            \
    }

ARITHMETIC(f32_one, float, float, PICK_ONE, __builtin_nanf(""))
ARITHMETIC(f64_one, double, double, PICK_ONE, __builtin_nan(""))
ARITHMETIC(i64_one, int64_t, uint64_t, PICK_ONE, 0)
ARITHMETIC(f32_lanes, float, f32_lanes, PICK_LANES, __builtin_nanf(""))
ARITHMETIC(f64_lanes, double, f64_lanes, PICK_LANES, __builtin_nan(""))
ARITHMETIC(i64_lanes, int64_t, u64_lanes, PICK_LANES, 0)

#define AS_IT_IS(x) (x)

INLINE float bfloat16_widen(uint16_t half)
{
    const uint32_t word = (uint32_t)half << 16;
    float x;
    memcpy(&x, &word, sizeof(x));
    return x;
}

/* To nearest, ties to even; the carry turns what is too large into infinity. A NaN is the quiet one by now and stays so. */
INLINE uint16_t bfloat16_round(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof(word));
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* type, element in memory, lane it is computed in, from memory to lane, and back */
#define TYPES(X)                                               \
    X(FLOAT32, float, f32, AS_IT_IS, AS_IT_IS)                 \
    X(FLOAT64, double, f64, AS_IT_IS, AS_IT_IS)                \
    X(BFLOAT16, uint16_t, f32, bfloat16_widen, bfloat16_round) \
    X(INT64, int64_t, i64, AS_IT_IS, AS_IT_IS)

#define EACH_OP(X, TYPE) X(TYPE, SUM) X(TYPE, AVG) X(TYPE, MAX)

/* ---- Element by element: what is shorter than a vector ---------------------------------------------------------------- */

#define DEFINE_ELEMENTS(TYPE, MEMORY, LANE, GET, PUT)                                                \
    INLINE void TYPE##_elements(enum shoal_op op, const struct work *work, size_t count)             \
    {                                                                                                \
        for (size_t i = 0; i < count; i++) {                                                         \
            LANE##_one result = GET(((const MEMORY *)work->sources[0])[i]);                          \
            for (int s = 1; s < work->source_count; s++)                                             \
                result = LANE##_one_combine(op, result, GET(((const MEMORY *)work->sources[s])[i])); \
            const MEMORY element = PUT(LANE##_one_finish(op, result, work));                         \
            for (int d = 0; d < work->dest_count; d++)                                               \
                ((MEMORY *)work->dests[d])[i] = element;                                             \
        }                                                                                            \
    }
TYPES(DEFINE_ELEMENTS)

INLINE void elements_reduce(enum shoal_type type, enum shoal_op op, const struct work *work, size_t count)
{
    switch (type) {
#define CASE(TYPE, ...)                   \
    case SHOAL_##TYPE:                    \
        TYPE##_elements(op, work, count); \
        break;
        TYPES(CASE)
#undef CASE
    case SHOAL_TYPE_END:
        break;
    }
}

INLINE size_t type_bytes(enum shoal_type type)
{
    switch (type) {
#define CASE(TYPE, MEMORY, ...) \
    case SHOAL_##TYPE:          \
        return sizeof(MEMORY);
        TYPES(CASE)
#undef CASE
    default:
        return 1;
    }
}

/* ---- Vectors ---------------------------------------------------------------------------------------------------------- */

INLINE bits vector_combine(enum shoal_type type, enum shoal_op op, bits a, bits b)
{
    switch (type) {
#define CASE(TYPE, MEMORY, LANE, ...) \
    case SHOAL_##TYPE:                \
        return (bits)LANE##_lanes_combine(op, (LANE##_lanes)a, (LANE##_lanes)b);
        TYPES(CASE)
#undef CASE
    default:
        return a;
    }
}

INLINE bits vector_finish(enum shoal_type type, enum shoal_op op, bits result, const struct work *work)
{
    switch (type) {
#define CASE(TYPE, MEMORY, LANE, ...) \
    case SHOAL_##TYPE:                \
        return (bits)LANE##_lanes_finish(op, (LANE##_lanes)result, work);
        TYPES(CASE)
#undef CASE
    default:
        return result;
    }
}

/* One vector of memory, widened. Of bfloat16, one of a pair is the low half of a 32-bit word and the other the high half: each
 * half with zeros below it is the same number as float32, so nothing needs to change its lane. Other types use low alone. */
struct wide {
    bits low, high;
};

INLINE struct wide wide_load(enum shoal_type type, const char *from)
{
    const bits memory = *(const bits_anywhere *)from;
    if (type != SHOAL_BFLOAT16)
        return (struct wide){memory, memory};
    return (struct wide){(bits)((u32_lanes)memory << 16), (bits)((u32_lanes)memory & 0xffff0000u)};
}

INLINE struct wide wide_combine(enum shoal_type type, enum shoal_op op, struct wide a, struct wide b)
{
    a.low = vector_combine(type, op, a.low, b.low);
    if (type == SHOAL_BFLOAT16)
        a.high = vector_combine(type, op, a.high, b.high);
    return a;
}

/* bfloat16_round in the low half of each word, before the shift. */
INLINE u32_lanes bfloat16_round_lanes(bits lanes)
{
    const u32_lanes words = (u32_lanes)lanes;
    return words + 0x7fff + (words >> 16 & 1);
}

INLINE bits wide_finish(enum shoal_type type, enum shoal_op op, struct wide result, const struct work *work)
{
    const bits low = vector_finish(type, op, result.low, work);
    if (type != SHOAL_BFLOAT16)
        return low;
    const bits high = vector_finish(type, op, result.high, work);
    return (bits)(bfloat16_round_lanes(low) >> 16 | (bfloat16_round_lanes(high) & 0xffff0000u));
}

/* Stores past the caches; to must be a multiple of WIDTH. */
INLINE void vector_stream(char *to, bits x)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)(void *)to, (__m512i)x);
#elif defined(__AVX2__)
    _mm256_stream_si256((__m256i *)(void *)to, (__m256i)x);
#elif defined(__x86_64__)
    _mm_stream_si128((__m128i *)(void *)to, (__m128i)x);
#else
    *(bits_anywhere *)to = x;
#endif
}

INLINE void stream_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* n vectors, 1 or GROUP. */
struct group {
    bits vector[GROUP];
};

INLINE struct group group_reduce(enum shoal_type type, enum shoal_op op, int n, const struct work *work, size_t at)
{
    struct wide wide[GROUP];
    struct group result;
    const char *from = (const char *)work->sources[0] + at;
    UNROLL
    for (int i = 0; i < n; i++)
        wide[i] = wide_load(type, from + i * WIDTH);
    for (int s = 1; s < work->source_count; s++) {
        from = (const char *)work->sources[s] + at;
        UNROLL
        for (int i = 0; i < n; i++)
            wide[i] = wide_combine(type, op, wide[i], wide_load(type, from + i * WIDTH));
    }
    UNROLL
    for (int i = 0; i < n; i++)
        result.vector[i] = wide_finish(type, op, wide[i], work);
    return result;
}

INLINE void group_store(int n, const struct group *group, const struct work *work, size_t at, bool streaming)
{
    for (int d = 0; d < work->dest_count; d++) {
        char *to = (char *)work->dests[d] + at;
        UNROLL
        for (int i = 0; i < n; i++) {
            if (streaming)
                vector_stream(to + i * WIDTH, group->vector[i]);
            else
                *(bits_anywhere *)(to + i * WIDTH) = group->vector[i];
        }
    }
}

/* Reduces bytes [at, end), at least one group. The last group may overlap the one before it; it is computed first, from inputs
 * that an in-place destination has not overwritten yet, and stored last. */
INLINE void groups_reduce(enum shoal_type type, enum shoal_op op, int n, const struct work *work, size_t at, size_t end,
                          bool streaming)
{
    const size_t step = (size_t)n * WIDTH;
    const struct group last = group_reduce(type, op, n, work, end - step);
    for (; at + step < end; at += step) {
        const struct group group = group_reduce(type, op, n, work, at);
        group_store(n, &group, work, at, streaming);
    }
    group_store(n, &last, work, end - step, false);
}

/* ---- Streaming -------------------------------------------------------------------------------------------------------- */

/* Whether destinations reach a cache line's begin together. */
INLINE bool dests_can_stream(void *const *dests, int dest_count, size_t bytes, enum shoal_stores stores)
{
    if (stores != SHOAL_STORES_STREAMING || bytes < STREAMING_BYTES_MIN)
        return false;
    for (int d = 1; d < dest_count; d++)
        if (((uintptr_t)dests[d] ^ (uintptr_t)dests[0]) % SHOAL_CACHE_LINE != 0)
            return false;
    return true;
}

INLINE size_t bytes_to_line(const void *address)
{
    return -(uintptr_t)address % SHOAL_CACHE_LINE;
}

/* ---- The kernels ------------------------------------------------------------------------------------------------------ */

/* At least a vector's worth of elements. The shape met most often, two into one, gets a loop of its own. */
INLINE void long_reduce(enum shoal_type type, enum shoal_op op, struct work work, size_t count, enum shoal_stores stores)
{
    const size_t bytes = count * type_bytes(type);
    if (op == SHOAL_AVG && (work.ranks & (work.ranks - 1)) == 0)
        work.factor = 1.0 / work.ranks;
    if (bytes < GROUP * WIDTH) {
        groups_reduce(type, op, 1, &work, 0, bytes, false);
        return;
    }
    const bool streaming = dests_can_stream(work.dests, work.dest_count, bytes, stores);
    const size_t head = streaming ? bytes_to_line(work.dests[0]) : 0;
    elements_reduce(type, op, &work, head / type_bytes(type));
    if (work.source_count == 2 && work.dest_count == 1) {
        work.source_count = 2; /* now the compiler knows */
        work.dest_count = 1;
        groups_reduce(type, op, GROUP, &work, head, bytes, streaming);
    } else {
        groups_reduce(type, op, GROUP, &work, head, bytes, streaming);
    }
    if (streaming)
        stream_fence();
}

static void copy(void *const *dests, int dest_count, const void *source, size_t bytes, enum shoal_stores stores);

/* The short path comes first and stays free of vectors: an all-reduce of 8 bytes spends its time elsewhere. */
#define DEFINE_KERNEL(TYPE, OP)                                                                                        \
    NOINLINE void reduce_##TYPE##_##OP##_long(void *const *dests, int dest_count, const void *const *sources,          \
                                              int source_count, size_t count, int ranks, enum shoal_stores stores)     \
    {                                                                                                                  \
        const struct work work = {dests, sources, dest_count, source_count, ranks, 0};                                 \
        long_reduce(SHOAL_##TYPE, SHOAL_##OP, work, count, stores);                                                    \
    }                                                                                                                  \
    static void reduce_##TYPE##_##OP(void *const *dests, int dest_count, const void *const *sources, int source_count, \
                                     size_t count, int ranks, enum shoal_stores stores)                                \
    {                                                                                                                  \
        const struct work work = {dests, sources, dest_count, source_count, ranks, 0};                                 \
        if (source_count == 1 && (SHOAL_##OP != SHOAL_AVG || ranks == 1))                                              \
            copy(dests, dest_count, sources[0], count *type_bytes(SHOAL_##TYPE), stores);                              \
        else if (count < WIDTH / type_bytes(SHOAL_##TYPE))                                                             \
            elements_reduce(SHOAL_##TYPE, SHOAL_##OP, &work, count);                                                   \
        else                                                                                                           \
            reduce_##TYPE##_##OP##_long(dests, dest_count, sources, source_count, count, ranks, stores);               \
    }
#define DEFINE_KERNELS(TYPE, ...) EACH_OP(DEFINE_KERNEL, TYPE)
TYPES(DEFINE_KERNELS)

/* memcpy promises nothing for the same array twice, nor for no array at all; callers may pass both. */
INLINE void bytes_copy(void *to, const void *from, size_t bytes)
{
    if (to != from && bytes > 0)
        memcpy(to, from, bytes);
}

/* Chunks stay in the first cache from one destination to the next. */
NOINLINE void copy_cached(void *const *dests, int dest_count, const char *source, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += COPY_CHUNK_BYTES)
        for (int d = 0; d < dest_count; d++)
            bytes_copy((char *)dests[d] + at, source + at, shoal_min_size(COPY_CHUNK_BYTES, bytes - at));
}

/* The sum of one source of integers is a copy. */
NOINLINE void copy_streaming(void *const *dests, int dest_count, const char *source, size_t bytes)
{
    const struct work work = {dests, (const void *const *)&source, dest_count, 1, 1, 0};
    const size_t head = bytes_to_line(dests[0]);
    copy_cached(dests, dest_count, source, head);
    groups_reduce(SHOAL_INT64, SHOAL_SUM, GROUP, &work, head, bytes, true);
    stream_fence();
}

static void copy(void *const *dests, int dest_count, const void *source, size_t bytes, enum shoal_stores stores)
{
    if (dests_can_stream(dests, dest_count, bytes, stores))
        copy_streaming(dests, dest_count, source, bytes);
    else if (dest_count == 1)
        bytes_copy(dests[0], source, bytes);
    else
        copy_cached(dests, dest_count, source, bytes);
}

extern const struct shoal_kernels KERNELS_SYMBOL;
const struct shoal_kernels KERNELS_SYMBOL = {
    .name = KERNELS_NAME,
#define ENTRY(TYPE, OP) [SHOAL_##TYPE][SHOAL_##OP] = reduce_##TYPE##_##OP,
#define ENTRIES(TYPE, ...) EACH_OP(ENTRY, TYPE)
    .reduce = {TYPES(ENTRIES)},
    .copy = copy,
};
