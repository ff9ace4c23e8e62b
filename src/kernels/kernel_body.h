/* The reduction kernels, written once for all instruction sets. Each kernels_<set>.c names its set and includes this file;
 * the build compiles it with that set's flags, and vectors have the set's register width. No other file includes it.
 *
 * Results have the same bits on every processor. Sources are combined in their order, lane by lane, never across lanes and
 * never fused. A result that is not a number is always the one positive quiet NaN (processors differ in sign and payload). Of
 * equal maxima or minima the first is used. A single source is copied unchanged, unless there is something to divide or
 * multiply. The caller's floating-point state has no effect and is not changed.
 *
 * Types and operators are listed in kernel_lists.h. Every function below receives type and op as constants, so the compiler
 * removes the branches on them. Reentrant. */
#include "base/floats.h"
#include "kernels/formats.h"
#include "kernels/kernel_lists.h"
#include "kernels/kernels.h"

/* Vectors that are computed at once: enough to hide the latency of an addition, few enough for 16 registers. */
#define GROUP 4
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif

/* Below this, streaming stores cost more than they save. */
#define STREAMING_BYTES_MIN ((size_t)4096)
#define COPY_CHUNK_BYTES ((size_t)4096)

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

/* ---- Element by element, for data shorter than a vector --------------------------------------------------------------- */

#define DEFINE_ELEMENTS(TYPE, MEMORY, LANE, FORM, ...)                                                \
    INLINE LANE##_one TYPE##_element(enum shoal_op op, const struct work *work, int source, size_t i) \
    {                                                                                                 \
        return LANE##_one_take(op, FORM##_widen(((const MEMORY *)work->sources[source])[i]), work);   \
    }                                                                                                 \
    INLINE void TYPE##_elements(enum shoal_op op, const struct work *work, size_t count)              \
    {                                                                                                 \
        for (size_t i = 0; i < count; i++) {                                                          \
            LANE##_one result = TYPE##_element(op, work, 0, i);                                       \
            for (int s = 1; s < work->source_count; s++)                                              \
                result = LANE##_one_combine(op, result, TYPE##_element(op, work, s, i));              \
            const MEMORY element = FORM##_round(LANE##_one_finish(op, result, work));                 \
            for (int d = 0; d < work->dest_count; d++)                                                \
                ((MEMORY *)work->dests[d])[i] = element;                                              \
        }                                                                                             \
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

/* ---- Vectors ---------------------------------------------------------------------------------------------------------- */

/* If a vector of memory is one vector of lanes, `high` is never read, and the compiler removes it. */
#define DEFINE_WIDE(TYPE, MEMORY, LANE, FORM, ...)                                                        \
    INLINE struct wide TYPE##_wide_load(enum shoal_op op, const char *from, const struct work *work)      \
    {                                                                                                     \
        const struct wide x = FORM##_load(from);                                                          \
        return (struct wide){(bits)LANE##_lanes_take(op, (LANE##_lanes)x.low, work),                      \
                             (bits)LANE##_lanes_take(op, (LANE##_lanes)x.high, work)};                    \
    }                                                                                                     \
    INLINE struct wide TYPE##_wide_combine(enum shoal_op op, struct wide a, struct wide b)                \
    {                                                                                                     \
        return (struct wide){(bits)LANE##_lanes_combine(op, (LANE##_lanes)a.low, (LANE##_lanes)b.low),    \
                             (bits)LANE##_lanes_combine(op, (LANE##_lanes)a.high, (LANE##_lanes)b.high)}; \
    }                                                                                                     \
    INLINE bits TYPE##_wide_finish(enum shoal_op op, struct wide x, const struct work *work)              \
    {                                                                                                     \
        return FORM##_pack((struct wide){(bits)LANE##_lanes_finish(op, (LANE##_lanes)x.low, work),        \
                                         (bits)LANE##_lanes_finish(op, (LANE##_lanes)x.high, work)});     \
    }
TYPES(DEFINE_WIDE)

INLINE struct wide wide_load(enum shoal_type type, enum shoal_op op, const char *from, const struct work *work)
{
    switch (type) {
#define CASE(TYPE, ...) \
    case SHOAL_##TYPE:  \
        return TYPE##_wide_load(op, from, work);
        TYPES(CASE)
#undef CASE
    default:
        return plain_load(from);
    }
}

INLINE struct wide wide_combine(enum shoal_type type, enum shoal_op op, struct wide a, struct wide b)
{
    switch (type) {
#define CASE(TYPE, ...) \
    case SHOAL_##TYPE:  \
        return TYPE##_wide_combine(op, a, b);
        TYPES(CASE)
#undef CASE
    default:
        return a;
    }
}

INLINE bits wide_finish(enum shoal_type type, enum shoal_op op, struct wide x, const struct work *work)
{
    switch (type) {
#define CASE(TYPE, ...) \
    case SHOAL_##TYPE:  \
        return TYPE##_wide_finish(op, x, work);
        TYPES(CASE)
#undef CASE
    default:
        return x.low;
    }
}

/* Returns true if n vectors of 16-bit floats are ordered (no NaN), as they nearly always are. One test of all costs less than
 * making NaN quiet in each. Also returns false if no instruction tests two vectors at once. */
INLINE bool halves_are_ordered(int n, const struct wide *wide)
{
#if defined(__AVX512F__)
    __mmask16 ordered = 0xffff;
    UNROLL
    for (int i = 0; i < n; i++)
        ordered = _mm512_mask_cmp_ps_mask(ordered, (__m512)wide[i].low, (__m512)wide[i].high, _CMP_ORD_Q);
    return ordered == 0xffff;
#elif defined(__AVX2__)
    __m256i unordered = _mm256_setzero_si256();
    UNROLL
    for (int i = 0; i < n; i++)
        unordered |= (__m256i)_mm256_cmp_ps((__m256)wide[i].low, (__m256)wide[i].high, _CMP_UNORD_Q);
    return _mm256_testz_si256(unordered, unordered);
#else
    (void)n;
    (void)wide;
    return false;
#endif
}

INLINE bits halves_finish_ordered(enum shoal_type type, enum shoal_op op, struct wide x, const struct work *work)
{
    const struct wide result = {(bits)f32_lanes_finish_ordered(op, (f32_lanes)x.low, work),
                                (bits)f32_lanes_finish_ordered(op, (f32_lanes)x.high, work)};
    return type == SHOAL_BFLOAT16 ? bfloat16_pack(result) : float16_pack(result);
}

/* Stores past the caches; `to` must be a multiple of WIDTH. */
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
        wide[i] = wide_load(type, op, from + i * WIDTH, work);
    for (int s = 1; s < work->source_count; s++) {
        from = (const char *)work->sources[s] + at;
        UNROLL
        for (int i = 0; i < n; i++)
            wide[i] = wide_combine(type, op, wide[i], wide_load(type, op, from + i * WIDTH, work));
    }
    if ((type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16) && SHOAL_LIKELY(halves_are_ordered(n, wide))) {
        UNROLL
        for (int i = 0; i < n; i++)
            result.vector[i] = halves_finish_ordered(type, op, wide[i], work);
    } else {
        UNROLL
        for (int i = 0; i < n; i++)
            result.vector[i] = wide_finish(type, op, wide[i], work);
    }
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

/* Reduces groups of n vectors, starting at byte `at`, as long as more data follow them. Returns the byte at which it
 * stopped. */
INLINE size_t groups_reduce(enum shoal_type type, enum shoal_op op, int n, const struct work *work, size_t at, size_t end,
                            bool streaming)
{
    const size_t step = (size_t)n * WIDTH;
    for (; at + step < end; at += step) {
        const struct group group = group_reduce(type, op, n, work, at);
        group_store(n, &group, work, at, streaming);
    }
    return at;
}

/* Reduces bytes [at, end), at least one vector. The last vector may overlap the one before it. It is computed first, from
 * inputs that an in-place destination has not overwritten yet, and stored last. The most frequent shape, two sources and one
 * destination, has its own loop. */
INLINE void bytes_reduce(enum shoal_type type, enum shoal_op op, const struct work *work, size_t at, size_t end, bool streaming)
{
    const struct group last = group_reduce(type, op, 1, work, end - WIDTH);
    if (work->source_count == 2 && work->dest_count == 1) {
        const struct work pair = {work->dests, 1, work->sources, 2, work->argument, work->factor};
        at = groups_reduce(type, op, GROUP, &pair, at, end, streaming);
    } else {
        at = groups_reduce(type, op, GROUP, work, at, end, streaming);
    }
    groups_reduce(type, op, 1, work, at, end, false);
    group_store(1, &last, work, end - WIDTH, false);
    if (streaming)
        stream_fence();
}

/* ---- Streaming -------------------------------------------------------------------------------------------------------- */

/* Returns true if all destinations have the same offset in a cache line, so that streaming can start at the same byte. */
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

/* ---- Copy ------------------------------------------------------------------------------------------------------------- */

/* memcpy is undefined for overlapping arrays and for NULL; callers may pass the same array twice, or NULL. */
INLINE void bytes_copy(void *to, const void *from, size_t bytes)
{
    if (to != from && bytes > 0)
        memcpy(to, from, bytes);
}

/* A chunk stays in the first-level cache from one destination to the next. */
NOINLINE void copy_cached(void *const *dests, int dest_count, const char *source, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += COPY_CHUNK_BYTES)
        for (int d = 0; d < dest_count; d++)
            bytes_copy((char *)dests[d] + at, source + at, shoal_min_size(COPY_CHUNK_BYTES, bytes - at));
}

/* A single source is copied. */
NOINLINE void copy_streaming(void *const *dests, int dest_count, const char *source, size_t bytes)
{
    const struct work work = {dests, dest_count, (const void *const *)&source, 1, 1, 0};
    const size_t head = bytes_to_line(dests[0]);
    copy_cached(dests, dest_count, source, head);
    bytes_reduce(SHOAL_UINT8, SHOAL_BITOR, &work, head, bytes, true);
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

/* ---- The kernels ------------------------------------------------------------------------------------------------------ */

#define KERNEL(NAME, LENGTH)                                                                                   \
    void NAME(void *const *dests, int dest_count, const void *const *sources, int source_count, size_t LENGTH, \
              double argument, enum shoal_stores stores)

/* The loops of a type and an operator, over bytes. The compiler drops those that no kernel calls. The short path comes first
 * and contains no vectors, because an all-reduce of 8 bytes spends its time elsewhere. */
#define DEFINE_LOOPS(TYPE, OP, ...)                                                                             \
    __attribute__((unused)) static KERNEL(loops_##TYPE##_##OP, bytes);                                          \
    NOINLINE KERNEL(loops_##TYPE##_##OP##_long, bytes)                                                          \
    {                                                                                                           \
        const double factor = SHOAL_##OP == SHOAL_AVG && argument >= 1 ? exact_inverse(argument) : 0;           \
        const struct work work = {dests, dest_count, sources, source_count, argument, factor};                  \
        const bool streaming = dests_can_stream(dests, dest_count, bytes, stores);                              \
        const size_t head = streaming ? bytes_to_line(dests[0]) : 0;                                            \
        if (head > 0)                                                                                           \
            loops_##TYPE##_##OP(dests, dest_count, sources, source_count, head, argument, SHOAL_STORES_CACHED); \
        bytes_reduce(SHOAL_##TYPE, SHOAL_##OP, &work, head, bytes, streaming);                                  \
    }                                                                                                           \
    static KERNEL(loops_##TYPE##_##OP, bytes)                                                                   \
    {                                                                                                           \
        const struct work work = {dests, dest_count, sources, source_count, argument, 0};                       \
        if (source_count == 1 && shoal_kernels_copy_one(SHOAL_##OP, argument))                                  \
            copy(dests, dest_count, sources[0], bytes, stores);                                                 \
        else if (bytes < WIDTH)                                                                                 \
            elements_reduce(SHOAL_##TYPE, SHOAL_##OP, &work, bytes / type_bytes(SHOAL_##TYPE));                 \
        else                                                                                                    \
            loops_##TYPE##_##OP##_long(dests, dest_count, sources, source_count, bytes, argument, stores);      \
    }
#define EACH_LOOPS(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(DEFINE_LOOPS, TYPE, UNSIGNED)
TYPES(EACH_LOOPS)

#define DEFINE_REDUCE(TYPE, OP, LOOPS)                                                           \
    static KERNEL(reduce_##TYPE##_##OP, count)                                                   \
    {                                                                                            \
        SHOAL_DEFAULT_FLOATS;                                                                    \
        SHOAL_FLOATS_PIN(argument);                                                              \
        const size_t bytes = count * type_bytes(SHOAL_##TYPE);                                   \
        loops_##LOOPS##_##OP(dests, dest_count, sources, source_count, bytes, argument, stores); \
    }
#define EACH_REDUCE(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(DEFINE_REDUCE, TYPE, UNSIGNED)
TYPES(EACH_REDUCE)

extern const struct shoal_kernels KERNELS_SYMBOL;
const struct shoal_kernels KERNELS_SYMBOL = {
    .name = KERNELS_NAME,
#define ENTRY(TYPE, OP, ...) [SHOAL_##TYPE][SHOAL_##OP] = reduce_##TYPE##_##OP,
#define ENTRIES(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(ENTRY, TYPE, UNSIGNED)
    .reduce = {TYPES(ENTRIES)},
    .copy = copy,
};
