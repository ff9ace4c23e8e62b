/* Every set of kernels of this processor, against one plain loop and against known answers, bit by bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../tools/elements.h"
#include "base/isa.h"
#include "float_states.h"
#include "kernels/kernels.h"

#define COUNT_MAX ((size_t)4097)
#define ARRAYS_MAX 64
#define GUARD_BYTES ((size_t)64) /* before and after each array; what lies there must stay */
#define SHIFT_BYTES ((size_t)64)
#define ARRAY_BYTES (GUARD_BYTES + SHIFT_BYTES + COUNT_MAX * 8 + GUARD_BYTES)
#define GUARD 0xa5
#define POOL_COUNT (4 * COUNT_MAX) /* of random elements of each type, from which sources are cut */

static const size_t counts[] = {0, 1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 127, 257, 1000, COUNT_MAX};
#define COUNTS SHOAL_COUNT_OF(counts)

/* One call: the arrays and their offsets. Pointers are into memory that each test owns. */
struct call {
    enum shoal_type type;
    enum shoal_op op;
    enum shoal_stores stores;
    int source_count;
    int dest_count;
    double argument;
    size_t count;
    size_t bytes;
    void *sources[ARRAYS_MAX];
    void *dests[ARRAYS_MAX];
    void *expected;
};

struct fixture {
    uint64_t random;
    unsigned char *source_memory;
    unsigned char *dest_memory;
    unsigned char *expected;
    unsigned char *pool[SHOAL_TYPE_END];
};

static bool is_integer(enum shoal_type type)
{
    return type == SHOAL_INT64 || type == SHOAL_INT32 || type == SHOAL_INT8 || type == SHOAL_UINT8;
}

/* ---- Instruction sets --------------------------------------------------------------------------------------------------- */

/* Returns true if the line of flags contains all words. */
static bool has_all(const char *flags, const char *const *words)
{
    for (; *words; words++) {
        char wanted[32];
        snprintf(wanted, sizeof wanted, " %s ", *words);
        if (!strstr(flags, wanted))
            return false;
    }
    return true;
}

/* The kernel lists only what it also saves the registers of. */
static void isa_is_what_the_kernel_lists(void **state)
{
    (void)state;
#if !defined(__x86_64__)
    printf("skipped: the instruction sets are those of x86-64; under qemu the file lists the other processor's\n");
    skip();
#endif
    FILE *file = fopen("/proc/cpuinfo", "re");
    char *line = NULL;
    size_t bytes = 0;
    while (file && getline(&line, &bytes, file) > 0 && strncmp(line, "flags\t", 6) != 0)
        ;
    const bool is_listed = line && strncmp(line, "flags\t", 6) == 0;
    if (is_listed) {
        line[strcspn(line, "\n")] = ' ';
        const char *const avx2[] = {"avx2", "f16c", NULL};
        const char *const avx512[] = {"avx2", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", NULL};
        assert_int_equal(shoal_isa_has_avx2(), has_all(line, avx2));
        assert_int_equal(shoal_isa_has_avx512(), has_all(line, avx512));
    }
    free(line);
    if (file)
        fclose(file);
    if (!is_listed)
        skip(); /* another processor, or no /proc */
}

/* ---- Numbers -------------------------------------------------------------------------------------------------- */

static uint32_t float_bits(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof(word));
    return word;
}

static float float_from(uint32_t word)
{
    float x;
    memcpy(&x, &word, sizeof(x));
    return x;
}

static float bfloat16_value(uint16_t half)
{
    return float_from((uint32_t)half << 16);
}

/* Returns the mantissa, a whole number, times a power of two. */
static float float16_value(uint16_t half)
{
    const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3ff, sign = (uint32_t)(half & 0x8000) << 16;
    const float size = exponent ? (float)(fraction | 0x400) * float_from((exponent + 102) << 23) : (float)fraction * 0x1p-24f;
    const float number = exponent < 31 ? size : float_from(fraction ? 0x7fc00000 : 0x7f800000);
    return float_from(float_bits(number) | sign);
}

static float float_get(enum shoal_type type, const void *array, size_t i)
{
    if (type == SHOAL_FLOAT32)
        return ((const float *)array)[i];
    const uint16_t half = ((const uint16_t *)array)[i];
    return type == SHOAL_BFLOAT16 ? bfloat16_value(half) : float16_value(half);
}

static void float_put(enum shoal_type type, void *array, size_t i, float x)
{
    if (type == SHOAL_FLOAT32)
        ((float *)array)[i] = x == x ? x : float_from(0x7fc00000);
    else
        ((uint16_t *)array)[i] = type == SHOAL_BFLOAT16 ? element_bfloat16(x) : element_float16(x);
}

static double double_get(enum shoal_type type, const void *array, size_t i)
{
    (void)type;
    return ((const double *)array)[i];
}

static void double_put(enum shoal_type type, void *array, size_t i, double x)
{
    const uint64_t quiet = 0x7ff8000000000000;
    (void)type;
    memcpy((double *)array + i, x == x ? (const void *)&x : (const void *)&quiet, sizeof(x));
}

static int64_t integer_get(enum shoal_type type, const void *array, size_t i)
{
    if (type == SHOAL_INT64)
        return ((const int64_t *)array)[i];
    if (type == SHOAL_INT32)
        return ((const int32_t *)array)[i];
    return type == SHOAL_INT8 ? ((const int8_t *)array)[i] : ((const uint8_t *)array)[i];
}

static void integer_put(enum shoal_type type, void *array, size_t i, int64_t x)
{
    memcpy((char *)array + i * shoal_type_bytes(type), &x, shoal_type_bytes(type)); /* little endian: the low bytes */
}

/* ---- The plain loop ------------------------------------------------------------------------------------------- */

/* volatile: the compiler must not fuse the product with the sum. */
#define DEFINE_PLAIN_FLOAT(NAME, LANE)                                        \
    static void plain_##NAME(const struct call *call, size_t i)               \
    {                                                                         \
        const bool scaled = call->op == SHOAL_SCALED_SUM;                     \
        LANE result = 0;                                                      \
        for (int s = 0; s < call->source_count; s++) {                        \
            const LANE element = NAME##_get(call->type, call->sources[s], i); \
            const volatile LANE taken = element * (LANE)call->argument;       \
            const LANE x = scaled ? taken : element;                          \
            if (s == 0)                                                       \
                result = x;                                                   \
            else if (call->op == SHOAL_MAX)                                   \
                result = x > result || x != x ? x : result;                   \
            else if (call->op == SHOAL_MIN)                                   \
                result = x < result || x != x ? x : result;                   \
            else                                                              \
                result = call->op == SHOAL_PROD ? result * x : result + x;    \
        }                                                                     \
        if (call->op == SHOAL_AVG)                                            \
            result /= (LANE)call->argument;                                   \
        NAME##_put(call->type, call->expected, i, result);                    \
    }
DEFINE_PLAIN_FLOAT(float, float)
DEFINE_PLAIN_FLOAT(double, double)

/* Computes in 64 bits; the stored result wraps. */
static void plain_integer(const struct call *call, size_t i)
{
    const uint64_t scale = call->op == SHOAL_SCALED_SUM ? (uint64_t)(int64_t)call->argument : 1;
    int64_t result = (int64_t)((uint64_t)integer_get(call->type, call->sources[0], i) * scale);
    for (int s = 1; s < call->source_count; s++) {
        const int64_t x = (int64_t)((uint64_t)integer_get(call->type, call->sources[s], i) * scale);
        result = element_combine(call->op, result, x);
    }
    integer_put(call->type, call->expected, i, result);
    if (call->op == SHOAL_AVG)
        integer_put(call->type, call->expected, i, integer_get(call->type, call->expected, i) / (int64_t)call->argument);
}

static void plain_reduce(const struct call *call)
{
    void (*const element)(const struct call *, size_t) = is_integer(call->type)        ? plain_integer
                                                         : call->type == SHOAL_FLOAT64 ? plain_double
                                                                                       : plain_float;
    const bool changes_one = (call->op == SHOAL_AVG || call->op == SHOAL_SCALED_SUM) && call->argument != 1;
    if (call->source_count == 1 && !changes_one)
        memcpy(call->expected, call->sources[0], call->bytes);
    else
        for (size_t i = 0; i < call->count; i++)
            element(call, i);
}

/* ---- Data ----------------------------------------------------------------------------------------------------- */

static uint64_t random_next(struct fixture *fixture)
{
    fixture->random ^= fixture->random << 13;
    fixture->random ^= fixture->random >> 7;
    fixture->random ^= fixture->random << 17;
    return fixture->random;
}

static int random_below(struct fixture *fixture, int limit)
{
    return (int)((random_next(fixture) >> 33) % (uint64_t)limit);
}

/* Difficult values: zeros, infinities, NaNs, the smallest, the largest, ties. */
static uint64_t odd_element(struct fixture *fixture, enum shoal_type type)
{
    static const uint32_t odd32[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f812345,
                                     0x00000001, 0x807fffff, 0x7f7fffff, 0xff7fffff, 0x7f7f0000, 0x3f808000, 0x3f818000};
    static const uint64_t odd64[] = {0x0000000000000000, 0x8000000000000000, 0x7ff0000000000000, 0xfff0000000000000,
                                     0x7ff8000000000000, 0xfff8000012345678, 0x7ff0000000000001, 0x0000000000000001,
                                     0x7fefffffffffffff, 0xffefffffffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};
    static const uint16_t odd16[] = {0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0xfe34, 0x7c01, 0x0001,
                                     0x83ff, 0x7bff, 0xfbff, 0x0400, 0x8400, 0x3c01, 0x3bff, 0x0200};
    static const uint64_t extreme[] = {0, 1, UINT64_MAX, 0x8080808080808080, 0x7f7f7f7f7f7f7f7f, 1u << 31, INT32_MAX};
    if (type == SHOAL_FLOAT32)
        return odd32[random_below(fixture, SHOAL_COUNT_OF(odd32))];
    if (type == SHOAL_BFLOAT16)
        return odd32[random_below(fixture, SHOAL_COUNT_OF(odd32))] >> 16;
    if (type == SHOAL_FLOAT16)
        return odd16[random_below(fixture, SHOAL_COUNT_OF(odd16))];
    if (type == SHOAL_FLOAT64 || type == SHOAL_INT64)
        return odd64[random_below(fixture, SHOAL_COUNT_OF(odd64))];
    return extreme[random_below(fixture, SHOAL_COUNT_OF(extreme))];
}

/* Draws an ordinary number, and one in eight times an odd one. float16 gets any bits, because it has few values. */
static void fill_element(struct fixture *fixture, enum shoal_type type, void *to)
{
    uint64_t any = random_next(fixture);
    const float single = (float)(int32_t)any * 1.2345e-5f;
    const double wide = (double)(int64_t)any * 1.2345e-9;
    if (random_below(fixture, 8) == 0)
        any = odd_element(fixture, type);
    else if (type == SHOAL_FLOAT32 || type == SHOAL_BFLOAT16)
        any = float_bits(single) >> (type == SHOAL_BFLOAT16 ? 16 : 0);
    else if (type == SHOAL_FLOAT64)
        memcpy(&any, &wide, sizeof(any));
    memcpy(to, &any, shoal_type_bytes(type));
}

static double random_argument(struct fixture *fixture, enum shoal_type type, enum shoal_op op)
{
    static const double divisors[] = {1, 2, 3, 4, 7, 64, 300, 1000};
    static const double scales[] = {1, 0, -1, 0.5, 3, 1.0 / 3, -1e-3, 65536, 1e30};
    static const double wholes[] = {1, 0, -1, 2, 3, -128, 255, 1000003, -4294967297.0, -9223372036854775808.0};
    if (op == SHOAL_AVG)
        return divisors[random_below(fixture, SHOAL_COUNT_OF(divisors))];
    if (op != SHOAL_SCALED_SUM)
        return __builtin_nan(""); /* never read */
    return is_integer(type) ? wholes[random_below(fixture, SHOAL_COUNT_OF(wholes))]
                            : scales[random_below(fixture, SHOAL_COUNT_OF(scales))];
}

static unsigned char *place(unsigned char *memory, int array, size_t shift_bytes)
{
    return memory + (size_t)array * ARRAY_BYTES + GUARD_BYTES + shift_bytes;
}

static void assert_guards(const struct call *call, int dest)
{
    unsigned char guard[GUARD_BYTES];
    const unsigned char *begin = call->dests[dest];
    memset(guard, GUARD, sizeof(guard));
    assert_memory_equal(begin - GUARD_BYTES, guard, GUARD_BYTES);
    assert_memory_equal(begin + call->bytes, guard, GUARD_BYTES);
}

static void guard_array(unsigned char *memory, int array, const struct call *call)
{
    memset(place(memory, array, 0) - GUARD_BYTES, GUARD, GUARD_BYTES + SHIFT_BYTES + call->bytes + GUARD_BYTES);
}

/* Chooses the arrays' offsets: each shifted separately, or (streaming needs this) the same for all destinations. */
static void lay_out(struct fixture *fixture, struct call *call, bool alike)
{
    const size_t element_bytes = shoal_type_bytes(call->type);
    const int shifts = (int)(SHIFT_BYTES / element_bytes);
    const int common = random_below(fixture, shifts);
    call->bytes = call->count * element_bytes;
    call->expected = fixture->expected;
    for (int s = 0; s < call->source_count; s++) {
        const size_t from = (size_t)random_below(fixture, (int)(POOL_COUNT - call->count));
        call->sources[s] = place(fixture->source_memory, s, (size_t)random_below(fixture, shifts) * element_bytes);
        guard_array(fixture->source_memory, s, call);
        memcpy(call->sources[s], fixture->pool[call->type] + from * element_bytes, call->bytes);
    }
    for (int d = 0; d < call->dest_count; d++) {
        const int shift = alike ? common : random_below(fixture, shifts);
        call->dests[d] = place(fixture->dest_memory, d, (size_t)shift * element_bytes);
        guard_array(fixture->dest_memory, d, call);
    }
}

static shoal_floats caller_floats = SHOAL_FLOATS_DEFAULT;

static void run_and_compare(const struct shoal_kernels *kernels, const struct call *call)
{
    plain_reduce(call);
    shoal_floats_write(caller_floats);
    kernels->reduce[call->type][call->op](call->dests, call->dest_count, (const void *const *)call->sources, call->source_count,
                                          call->count, call->argument, call->stores);
    assert_true(float_state_has_stayed(caller_floats));
    for (int d = 0; d < call->dest_count; d++) {
        if (memcmp(call->dests[d], call->expected, call->bytes) != 0)
            fail_msg("%s: type %d, op %d, k %d, m %d, count %zu, argument %g, stores %d: destination %d is wrong",
                     kernels->name, (int)call->type, (int)call->op, call->source_count, call->dest_count, call->count,
                     call->argument, (int)call->stores, d);
        assert_guards(call, d);
    }
}

static int fixture_init(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    if (!fixture)
        return -1;
    *state = fixture;
    fixture->random = 0x9e3779b97f4a7c15;
    fixture->source_memory = aligned_alloc(64, shoal_round_up(ARRAYS_MAX * ARRAY_BYTES, 64));
    fixture->dest_memory = aligned_alloc(64, shoal_round_up(ARRAYS_MAX * ARRAY_BYTES, 64));
    fixture->expected = aligned_alloc(64, shoal_round_up(ARRAY_BYTES, 64));
    for (int type = 0; type < SHOAL_TYPE_END; type++) {
        const size_t element_bytes = shoal_type_bytes((enum shoal_type)type);
        fixture->pool[type] = malloc(POOL_COUNT * element_bytes);
        for (size_t i = 0; fixture->pool[type] && i < POOL_COUNT; i++)
            fill_element(fixture, (enum shoal_type)type, fixture->pool[type] + i * element_bytes);
    }
    return fixture->source_memory && fixture->dest_memory && fixture->expected && fixture->pool[SHOAL_TYPE_END - 1] ? 0 : -1;
}

static int fixture_fini(void **state)
{
    struct fixture *fixture = *state;
    for (int type = 0; type < SHOAL_TYPE_END; type++)
        free(fixture->pool[type]);
    free(fixture->source_memory);
    free(fixture->dest_memory);
    free(fixture->expected);
    free(fixture);
    return 0;
}

typedef void (*check_fn)(struct fixture *, const struct shoal_kernels *, struct call *);

/* Calls check for every set, type and operator. */
static void each_kernel(struct fixture *fixture, const struct call *shape, check_fn check)
{
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (int kernel = 0; kernel < SHOAL_TYPE_END * SHOAL_OP_END; kernel++) {
            struct call call = *shape;
            call.type = (enum shoal_type)(kernel / SHOAL_OP_END);
            call.op = (enum shoal_op)(kernel % SHOAL_OP_END);
            if (!kernels->reduce[call.type][call.op])
                continue;
            call.argument = random_argument(fixture, call.type, call.op);
            check(fixture, kernels, &call);
        }
}

/* Calls check also for every count, number of sources and number of destinations. */
static void each_call(struct fixture *fixture, enum shoal_stores stores, check_fn check)
{
    static const int sources[] = {1, 2, 3, 5}, dests[] = {1, 2, 3};
    for (size_t shape = 0; shape < COUNTS * SHOAL_COUNT_OF(sources) * SHOAL_COUNT_OF(dests); shape++) {
        const struct call call = {
            .stores = stores,
            .count = counts[shape % COUNTS],
            .source_count = sources[shape / COUNTS % SHOAL_COUNT_OF(sources)],
            .dest_count = dests[shape / COUNTS / SHOAL_COUNT_OF(sources)],
        };
        each_kernel(fixture, &call, check);
    }
}

/* ---- Against the plain loop ----------------------------------------------------------------------------------- */

static void check_apart(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    lay_out(fixture, call, false);
    run_and_compare(kernels, call);
}

static void kernels_agree_with_plain_loop(void **state)
{
    each_call(*state, SHOAL_STORES_CACHED, check_apart);
}

/* One destination is also a source, any of them; the others are separate. */
static void check_in_place(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    lay_out(fixture, call, random_below(fixture, 4) != 0);
    const int source = random_below(fixture, call->source_count);
    const int dest = random_below(fixture, call->dest_count);
    if (random_below(fixture, 2) == 0) {
        memcpy(call->dests[dest], call->sources[source], call->bytes);
        call->sources[source] = call->dests[dest];
    } else {
        call->dests[dest] = call->sources[source];
    }
    run_and_compare(kernels, call);
}

static void kernels_in_place_agree_with_plain_loop(void **state)
{
    each_call(*state, SHOAL_STORES_CACHED, check_in_place);
}

/* Only long arrays are streamed, and only if all destinations have the same alignment: most do here, and in every other call
 * one of them is a source. */
static void check_streaming(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    if (random_below(fixture, 2)) {
        check_in_place(fixture, kernels, call);
        return;
    }
    lay_out(fixture, call, random_below(fixture, 4) != 0);
    run_and_compare(kernels, call);
}

static void kernels_streaming_agree_with_plain_loop(void **state)
{
    each_call(*state, SHOAL_STORES_STREAMING, check_streaming);
}

static void kernels_of_many_sources_agree_with_plain_loop(void **state)
{
    static const size_t many_counts[] = {1, 33, 257};
    for (size_t i = 0; i < SHOAL_COUNT_OF(many_counts); i++) {
        const struct call eight = {.count = many_counts[i], .source_count = 8, .dest_count = 8};
        const struct call many = {.count = many_counts[i], .source_count = ARRAYS_MAX, .dest_count = ARRAYS_MAX};
        each_kernel(*state, &eight, check_apart);
        each_kernel(*state, &many, check_apart);
    }
}

static void check_one_source_twice(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    lay_out(fixture, call, false);
    for (int s = 1; s < call->source_count; s++)
        call->sources[s] = call->sources[0];
    run_and_compare(kernels, call);
}

static void kernels_accept_one_source_many_times(void **state)
{
    for (size_t c = 0; c < COUNTS; c++)
        for (int k = 2; k <= 5; k++) {
            const struct call call = {.count = counts[c], .source_count = k, .dest_count = 1};
            each_kernel(*state, &call, check_one_source_twice);
        }
}

/* One rank's threads may be in another state than those of the others. */
static void kernels_give_the_same_bits_in_any_floating_point_state(void **state)
{
    for (size_t i = 0; i < SHOAL_COUNT_OF(float_states); i++) {
        caller_floats = float_states[i];
        for (size_t c = 0; c < COUNTS; c++)
            for (int k = 1; k <= 3; k++) {
                const struct call call = {.count = counts[c], .source_count = k, .dest_count = 1};
                each_kernel(*state, &call, check_apart);
            }
    }
    caller_floats = SHOAL_FLOATS_DEFAULT;
}

/* ---- Known answers, so that a mistake shared with the plain loop cannot hide ---------------------------------- */

/* count times the same element in each of two sources; returns the last result when all are alike. */
static uint64_t reduce_alike(const struct shoal_kernels *kernels, enum shoal_type type, enum shoal_op op,
                             const uint64_t *elements, int source_count, size_t count, double argument)
{
    const size_t bytes = shoal_type_bytes(type);
    unsigned char memory[3][70 * 8];
    void *dests[] = {memory[2]};
    const void *sources[] = {memory[0], memory[1]};
    uint64_t result = 0;
    for (size_t i = 0; i < count; i++)
        for (int s = 0; s < source_count; s++)
            memcpy(memory[s] + i * bytes, &elements[s], bytes);
    kernels->reduce[type][op](dests, 1, sources, source_count, count, argument, SHOAL_STORES_CACHED);
    for (size_t i = 1; i < count; i++)
        assert_memory_equal(memory[2], memory[2] + i * bytes, bytes);
    memcpy(&result, memory[2], bytes);
    return result;
}

/* Tests one element alone, and more than fill a vector. */
static void assert_two(enum shoal_type type, enum shoal_op op, uint64_t a, uint64_t b, double argument, uint64_t expected)
{
    const uint64_t elements[] = {a, b};
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        assert_int_equal(reduce_alike(kernels, type, op, elements, 2, 1, argument), expected);
        assert_int_equal(reduce_alike(kernels, type, op, elements, 2, 70, argument), expected);
    }
}

/* The results for two 16-bit elements. */
struct answers {
    uint16_t a, b, sum, max, min, prod, avg3;
};

static void assert_answers(enum shoal_type type, const struct answers *rows, size_t count)
{
    for (const struct answers *row = rows; row < rows + count; row++) {
        assert_two(type, SHOAL_SUM, row->a, row->b, 0, row->sum);
        assert_two(type, SHOAL_MAX, row->a, row->b, 0, row->max);
        assert_two(type, SHOAL_MIN, row->a, row->b, 0, row->min);
        assert_two(type, SHOAL_PROD, row->a, row->b, 0, row->prod);
        assert_two(type, SHOAL_AVG, row->a, row->b, 3, row->avg3);
    }
}

static void kernels_bfloat16_known_answers(void **state)
{
    (void)state;
    static const struct answers rows[] = {
        {0x3f80, 0x3f80, 0x4000, 0x3f80, 0x3f80, 0x3f80, 0x3f2b}, /* 1 + 1 = 2; 2 / 3 rounds up */
        {0x3f80, 0x3b80, 0x3f80, 0x3f80, 0x3b80, 0x3b80, 0x3eab}, /* 1 + 2^-8: a tie, to even: down */
        {0x3f81, 0x3b80, 0x3f82, 0x3f81, 0x3b80, 0x3b81, 0x3ead}, /* an odd one: up */
        {0x7f7f, 0x7f7f, 0x7f80, 0x7f7f, 0x7f7f, 0x7f80, 0x7f80}, /* the largest twice overflows */
        {0x7f80, 0xff80, 0x7fc0, 0x7f80, 0xff80, 0xff80, 0x7fc0}, /* inf - inf */
        {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x0000, 0x8000}, /* -0 stays -0 */
    };
    assert_answers(SHOAL_BFLOAT16, rows, SHOAL_COUNT_OF(rows));
}

static void kernels_float16_known_answers(void **state)
{
    (void)state;
    static const struct answers rows[] = {
        {0x3c00, 0x3c00, 0x4000, 0x3c00, 0x3c00, 0x3c00, 0x3955}, /* 1 + 1 = 2; 2 / 3 rounds down */
        {0x3c00, 0x1000, 0x3c00, 0x3c00, 0x1000, 0x1000, 0x3556}, /* 1 + 2^-11: a tie, to even: down */
        {0x3c01, 0x1000, 0x3c02, 0x3c01, 0x1000, 0x1001, 0x3557}, /* an odd one: up */
        {0x7bff, 0x4c00, 0x7c00, 0x7bff, 0x4c00, 0x7c00, 0x7555}, /* 65504 + 16: half way to 65536, which is infinity */
        {0x7bff, 0x4bff, 0x7bff, 0x7bff, 0x4bff, 0x7c00, 0x7555}, /* slightly less */
        {0x0001, 0x0001, 0x0002, 0x0001, 0x0001, 0x0000, 0x0001}, /* the smallest; its square is zero */
        {0x03ff, 0x0001, 0x0400, 0x03ff, 0x0001, 0x0000, 0x0155}, /* subnormals that become normal */
        {0x8400, 0x0001, 0x83ff, 0x0001, 0x8400, 0x8000, 0x8155}, /* and back */
        {0x7c00, 0xfc00, 0x7e00, 0x7c00, 0xfc00, 0xfc00, 0x7e00}, /* inf - inf */
        {0x7c00, 0x0000, 0x7c00, 0x7c00, 0x0000, 0x7e00, 0x7c00}, /* inf times 0 */
        {0x3c00, 0xfd55, 0x7e00, 0x7e00, 0x7e00, 0x7e00, 0x7e00}, /* a signaling NaN */
        {0x8000, 0x8000, 0x8000, 0x8000, 0x8000, 0x0000, 0x8000}, /* -0 stays -0 */
    };
    assert_answers(SHOAL_FLOAT16, rows, SHOAL_COUNT_OF(rows));
}

static void kernels_of_equal_zeros_take_the_first(void **state)
{
    (void)state;
    static const struct {
        enum shoal_type type;
        uint64_t minus;
    } rows[] = {{SHOAL_FLOAT32, 1ull << 31}, {SHOAL_FLOAT64, 1ull << 63}, {SHOAL_BFLOAT16, 0x8000}, {SHOAL_FLOAT16, 0x8000}};
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++)
        for (int max = 0; max < 2; max++) {
            assert_two(rows[i].type, max ? SHOAL_MAX : SHOAL_MIN, 0, rows[i].minus, 0, 0);
            assert_two(rows[i].type, max ? SHOAL_MAX : SHOAL_MIN, rows[i].minus, 0, 0, rows[i].minus);
        }
}

static const struct {
    enum shoal_type type;
    enum shoal_op op;
    int64_t a, b;
    double argument;
    int64_t expected;
} integer_answers[] = {
    {SHOAL_INT64, SHOAL_SUM, INT64_MIN, -1, 0, INT64_MAX},
    {SHOAL_INT64, SHOAL_AVG, -1, -6, 2, -3},
    {SHOAL_INT64, SHOAL_AVG, INT64_MIN, 0, 1, INT64_MIN},
    {SHOAL_INT64, SHOAL_AVG, INT64_MAX, -1, 3, 3074457345618258602},
    {SHOAL_INT64, SHOAL_MAX, -6, -1, 0, -1},
    {SHOAL_INT64, SHOAL_MIN, -6, -1, 0, -6},
    {SHOAL_INT64, SHOAL_PROD, INT64_MAX, 2, 0, -2},
    {SHOAL_INT64, SHOAL_BITAND, -6, 3, 0, 2},
    {SHOAL_INT64, SHOAL_SCALED_SUM, INT64_MAX, 3, 2, 4},
    {SHOAL_INT32, SHOAL_SUM, INT32_MIN, -1, 0, INT32_MAX},
    {SHOAL_INT32, SHOAL_AVG, INT32_MAX, 2, 3, -715827882},
    {SHOAL_INT32, SHOAL_AVG, INT32_MAX, 0, 2, 1073741823},
    {SHOAL_INT32, SHOAL_AVG, -7, 0, 2, -3},
    {SHOAL_INT32, SHOAL_AVG, -7, 0, 65536, 0},
    {SHOAL_INT32, SHOAL_PROD, INT32_MAX, 2, 0, -2},
    {SHOAL_INT32, SHOAL_BITOR, -8, 3, 0, -5},
    {SHOAL_INT32, SHOAL_SCALED_SUM, 3, 4, 4294967298.0, 14}, /* 2^32 + 2 */
    {SHOAL_INT8, SHOAL_SUM, 100, 100, 0, -56},
    {SHOAL_INT8, SHOAL_AVG, 100, 100, 2, -28},
    {SHOAL_INT8, SHOAL_AVG, -128, 0, 300, 0}, /* more ranks than the type has numbers */
    {SHOAL_INT8, SHOAL_MAX, -1, 1, 0, 1},
    {SHOAL_INT8, SHOAL_MIN, -128, 127, 0, -128},
    {SHOAL_INT8, SHOAL_PROD, -128, -1, 0, -128},
    {SHOAL_INT8, SHOAL_SCALED_SUM, 1, 2, -100, -44},
    {SHOAL_UINT8, SHOAL_SUM, 200, 100, 0, 44},
    {SHOAL_UINT8, SHOAL_AVG, 200, 50, 3, 83},
    {SHOAL_UINT8, SHOAL_MAX, 255, 1, 0, 255},
    {SHOAL_UINT8, SHOAL_MIN, 255, 1, 0, 1},
    {SHOAL_UINT8, SHOAL_PROD, 16, 17, 0, 16},
    {SHOAL_UINT8, SHOAL_BITXOR, 0xf0, 0xff, 0, 0x0f},
    {SHOAL_UINT8, SHOAL_SCALED_SUM, 1, 2, -1, 253},
};

static void kernels_integers_known_answers(void **state)
{
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(integer_answers); i++) {
        uint64_t expected = 0;
        memcpy(&expected, &integer_answers[i].expected, shoal_type_bytes(integer_answers[i].type));
        assert_two(integer_answers[i].type, integer_answers[i].op, (uint64_t)integer_answers[i].a,
                   (uint64_t)integer_answers[i].b, integer_answers[i].argument, expected);
    }
}

/* All averages of 8-bit numbers. */
static void kernels_8_bit_averages_are_exact(void **state)
{
    (void)state;
    static const double divisors[] = {2, 3, 5, 6, 7, 9, 11, 100, 127, 128, 129, 255, 256, 1000, 100000};
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t d = 0; d < SHOAL_COUNT_OF(divisors); d++) {
            uint8_t in[256], out[256];
            const void *sources[] = {in};
            void *dests[] = {out};
            for (int i = 0; i < 256; i++)
                in[i] = (uint8_t)i;
            kernels->reduce[SHOAL_INT8][SHOAL_AVG](dests, 1, sources, 1, 256, divisors[d], SHOAL_STORES_CACHED);
            for (int i = 0; i < 256; i++)
                assert_int_equal((int8_t)out[i], (int8_t)i / (int)divisors[d]);
            kernels->reduce[SHOAL_UINT8][SHOAL_AVG](dests, 1, sources, 1, 256, divisors[d], SHOAL_STORES_CACHED);
            for (int i = 0; i < 256; i++)
                assert_int_equal(out[i], i / (int)divisors[d]);
        }
}

/* -s + (1 + e)(1 + e) with s = 1 + e: a fused operation would keep e^2. */
static void kernels_scaled_sum_is_not_fused(void **state)
{
    (void)state;
    const double e = 0x1p-27, minus_one = -1, one_and_e = 1 + e;
    uint64_t words[3];
    memcpy(&words[0], &minus_one, sizeof(minus_one));
    memcpy(&words[1], &one_and_e, sizeof(one_and_e));
    memcpy(&words[2], &e, sizeof(e));
    assert_two(SHOAL_FLOAT64, SHOAL_SCALED_SUM, words[0], words[1], one_and_e, words[2]);
    assert_two(SHOAL_FLOAT32, SHOAL_SCALED_SUM, float_bits(-1), float_bits(1 + 0x1p-12f), 1 + 0x1p-12, float_bits(0x1p-12f));
}

static void kernels_scaled_sum_of_one_source_multiplies(void **state)
{
    (void)state;
    const uint64_t half = 0x3c00, number = float_bits(3), nan = 0xff800001, integer = 5;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t count = 1; count <= 70; count += 69) {
            assert_int_equal(reduce_alike(kernels, SHOAL_FLOAT32, SHOAL_SCALED_SUM, &number, 1, count, 0.5), float_bits(1.5f));
            assert_int_equal(reduce_alike(kernels, SHOAL_FLOAT32, SHOAL_SCALED_SUM, &nan, 1, count, 2), 0x7fc00000);
            assert_int_equal(reduce_alike(kernels, SHOAL_FLOAT32, SHOAL_SCALED_SUM, &nan, 1, count, 1), nan);
            assert_int_equal(reduce_alike(kernels, SHOAL_FLOAT16, SHOAL_SCALED_SUM, &half, 1, count, 1.0 / 3), 0x3555);
            assert_int_equal(reduce_alike(kernels, SHOAL_BFLOAT16, SHOAL_SCALED_SUM, &half, 1, count, -1), 0xbc00);
            assert_int_equal(reduce_alike(kernels, SHOAL_INT32, SHOAL_SCALED_SUM, &integer, 1, count, -3), 0xfffffff1);
        }
}

/* ---- Passes over several hosts -------------------------------------------------------------------------------- */

/* A pass over `count` equal elements. */
static uint16_t run_pass(int ranks, enum shoal_pass pass, const uint16_t *elements, int count)
{
    const struct shoal_reduction operation =
        shoal_kernels_pass(SHOAL_FLOAT16, (struct shoal_reduction){SHOAL_AVG, ranks}, pass);
    const void *sources[ARRAYS_MAX];
    uint16_t result;
    void *dest = &result;
    for (int s = 0; s < count; s++)
        sources[s] = &elements[s];
    shoal_kernels_find("auto")->reduce[SHOAL_FLOAT16][operation.op](&dest, 1, sources, count, 1, operation.argument,
                                                                    SHOAL_STORES_CACHED);
    return result;
}

/* The largest float16 of all ranks, over hosts of that many, one host after the other. */
static uint16_t average_in_passes(int ranks, int host_ranks, uint16_t element)
{
    uint16_t elements[ARRAYS_MAX], pair[2] = {0};
    for (int i = 0; i < ARRAYS_MAX; i++)
        elements[i] = element;
    for (int first = 0; first < ranks; first += host_ranks) {
        const int left = ranks - first, count = left < host_ranks ? left : host_ranks;
        pair[1] = run_pass(ranks, SHOAL_PASS_FIRST, elements, count);
        pair[0] = first ? run_pass(ranks, left > host_ranks ? SHOAL_PASS_MIDDLE : SHOAL_PASS_LAST, pair, 2) : pair[1];
    }
    return pair[0];
}

static void kernels_averages_of_float16_in_passes_do_not_overflow(void **state)
{
    static const int sizes[] = {2, 3, 5, 6, 7, 9, 15, 31, 33, 100, 511, 1000, 1500, 2047, 2048};
    static const int host_ranks[] = {1, 2, 3, 7, 8, 63, 64};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(sizes); i++)
        for (size_t h = 0; h < SHOAL_COUNT_OF(host_ranks) && host_ranks[h] < sizes[i]; h++) {
            const uint16_t average = average_in_passes(sizes[i], host_ranks[h], 0x7bff);
            assert_in_range(average, 1, 0x7bff);
            assert_int_equal(average_in_passes(sizes[i], host_ranks[h], 0xfbff), average | 0x8000);
            assert_int_equal(average_in_passes(sizes[i], host_ranks[h], 0x7c00), 0x7c00); /* infinity stays that */
        }
    assert_int_equal(average_in_passes(4, 2, 0x78e2), 0x78e2);
    assert_int_equal(average_in_passes(3, 1, 0x78e2), 0x78e2);
    assert_int_equal(average_in_passes(4, 2, 0x0002), 0x0002); /* 2^-23: halves of a sum of two are there still */
}

/* What is divided by less than 1, as the last pass does. */
static void kernels_float16_averages_divide_by_fractions(void **state)
{
    (void)state;
    assert_two(SHOAL_FLOAT16, SHOAL_AVG, 0x3c00, 0x3c00, 0.75, 0x4155);  /* 2 / 0.75 */
    assert_two(SHOAL_FLOAT16, SHOAL_AVG, 0x3c00, 0x3c00, 0.625, 0x4266); /* 2 / 0.625 = 3.2 */
    assert_two(SHOAL_FLOAT16, SHOAL_AVG, 0x3c00, 0x3c00, 1, 0x4000);
}

/* ---- Every 16-bit number -------------------------------------------------------------------------------------- */

/* Each of the 65536 combined with some that show what it was taken for; so many at once that vectors come in groups. */
static void check_every_half(const struct shoal_kernels *kernels, enum shoal_type type, enum shoal_op op, uint16_t other)
{
    enum { COUNT = 256 };
    uint16_t in[COUNT], others[COUNT], out[COUNT], expected[COUNT];
    struct call call = {.type = type, .op = op, .source_count = 2, .dest_count = 1, .argument = 3, .count = COUNT};
    call.bytes = sizeof(in);
    call.sources[0] = in;
    call.sources[1] = others;
    call.dests[0] = out;
    call.expected = expected;
    for (uint32_t first = 0; first < 65536; first += COUNT) {
        for (uint32_t i = 0; i < COUNT; i++) {
            in[i] = (uint16_t)(first + i);
            others[i] = other;
        }
        plain_reduce(&call);
        kernels->reduce[type][op](call.dests, 1, (const void *const *)call.sources, 2, COUNT, 3, SHOAL_STORES_CACHED);
        assert_memory_equal(out, expected, sizeof(out));
    }
}

static void kernels_widen_every_half(void **state)
{
    (void)state;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (int type = SHOAL_BFLOAT16; type <= SHOAL_FLOAT16; type += SHOAL_FLOAT16 - SHOAL_BFLOAT16) {
            check_every_half(kernels, (enum shoal_type)type, SHOAL_SUM, 0x8000);
            check_every_half(kernels, (enum shoal_type)type, SHOAL_SUM, 0x3c01);
            check_every_half(kernels, (enum shoal_type)type, SHOAL_PROD, 0x3c01);
            check_every_half(kernels, (enum shoal_type)type, SHOAL_PROD, 0x7001);
            check_every_half(kernels, (enum shoal_type)type, SHOAL_AVG, 0x0001);
            check_every_half(kernels, (enum shoal_type)type, SHOAL_MAX, 0x0001);
        }
}

/* 1 times any float32 is that float32, rounded; both as one element alone and in a vector. */
static void assert_rounded(const struct shoal_kernels *kernels, enum shoal_type type, float x, uint32_t expected)
{
    const uint64_t one = type == SHOAL_BFLOAT16 ? 0x3f80 : 0x3c00;
    for (int sign = 0; sign < 2; sign++) {
        const double scale = sign ? -(double)x : (double)x;
        const uint64_t signed_half = expected | (uint64_t)sign << 15;
        assert_int_equal(reduce_alike(kernels, type, SHOAL_SCALED_SUM, &one, 1, 1, scale), signed_half);
        assert_int_equal(reduce_alike(kernels, type, SHOAL_SCALED_SUM, &one, 1, 32, scale), signed_half);
    }
}

/* Each number, the middle between it and the next one, and the float32 below and above that middle. After the largest comes
 * infinity; the middle before it is where the next number would be if the exponent had more room. */
static void kernels_round_every_tie(void **state)
{
    (void)state;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        for (uint32_t half = 0; half < 0x7c00; half++) {
            const float x = float16_value((uint16_t)half), next = half < 0x7bff ? float16_value((uint16_t)(half + 1)) : 65536;
            const uint32_t tie = float_bits(x + (next - x) / 2);
            assert_rounded(kernels, SHOAL_FLOAT16, float_from(tie - 1), half);
            assert_rounded(kernels, SHOAL_FLOAT16, float_from(tie), half + (half & 1));
            assert_rounded(kernels, SHOAL_FLOAT16, float_from(tie + 1), half + 1);
        }
        for (uint32_t half = 0; half < 0x7f80; half++) {
            const uint32_t tie = half << 16 | 0x8000;
            assert_rounded(kernels, SHOAL_BFLOAT16, float_from(tie - 1), half);
            assert_rounded(kernels, SHOAL_BFLOAT16, float_from(tie), half + (half & 1));
            assert_rounded(kernels, SHOAL_BFLOAT16, float_from(tie + 1), half + 1);
        }
        assert_rounded(kernels, SHOAL_FLOAT16, 0x1p-40f, 0);
        assert_rounded(kernels, SHOAL_FLOAT16, float_from(1), 0);
        assert_rounded(kernels, SHOAL_FLOAT16, 1e38f, 0x7c00);
        assert_rounded(kernels, SHOAL_FLOAT16, float_from(0x7f800000), 0x7c00);
        assert_rounded(kernels, SHOAL_BFLOAT16, float_from(0x7f800000), 0x7f80);
    }
}

/* ---- NaN ------------------------------------------------------------------------------------------------------ */

/* Types with a NaN: an ordinary number, a negative signaling NaN, the one quiet NaN. */
static const struct {
    enum shoal_type type;
    uint64_t number, nan, quiet;
} nan_rows[] = {
    {SHOAL_FLOAT32, 0x40400000, 0xff800001, 0x7fc00000},
    {SHOAL_FLOAT64, 0x4008000000000000, 0xfff0000000000001, 0x7ff8000000000000},
    {SHOAL_BFLOAT16, 0x4040, 0xff81, 0x7fc0},
    {SHOAL_FLOAT16, 0x4200, 0xfc01, 0x7e00},
};

/* more than fill a group of vectors */
#define NAN_COUNT 150

/* The NaN among k sources, at each position of the vectors and of the sources; the result has the one quiet NaN, only there. */
static void check_nan_at(const struct shoal_kernels *kernels, size_t row, enum shoal_op op, int source, size_t at)
{
    enum { K = 3 };
    unsigned char x[K][NAN_COUNT * 8], out[NAN_COUNT * 8];
    void *dests[] = {out};
    const void *sources[K] = {x[0], x[1], x[2]};
    const size_t bytes = shoal_type_bytes(nan_rows[row].type);
    for (size_t i = 0; i < NAN_COUNT; i++)
        for (int k = 0; k < K; k++)
            memcpy(x[k] + i * bytes, i == at && k == source ? &nan_rows[row].nan : &nan_rows[row].number, bytes);
    kernels->reduce[nan_rows[row].type][op](dests, 1, sources, K, NAN_COUNT, 3, SHOAL_STORES_CACHED);
    for (size_t i = 0; i < NAN_COUNT; i++)
        assert_int_equal(memcmp(out + i * bytes, &nan_rows[row].quiet, bytes) == 0, i == at);
}

static void kernels_nan_at_any_place_gives_quiet_nan(void **state)
{
    (void)state;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t row = 0; row < SHOAL_COUNT_OF(nan_rows); row++)
            for (int op = 0; op < SHOAL_OP_END; op++)
                for (size_t at = 0; !element_is_bitwise((enum shoal_op)op) && at < 3 * NAN_COUNT; at++)
                    check_nan_at(kernels, row, (enum shoal_op)op, (int)(at / NAN_COUNT), at % NAN_COUNT);
}

/* ---- Other tests ---------------------------------------------------------------------------------------------- */

static void kernels_copy_every_length(void **state)
{
    struct fixture *fixture = *state;
    const struct shoal_kernels *kernels;
    struct call call;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t bytes = 0; bytes < 20000; bytes = bytes < 300 ? bytes + 1 : bytes + 911)
            for (int stores = SHOAL_STORES_CACHED; stores <= SHOAL_STORES_STREAMING; stores++) {
                memset(&call, 0, sizeof(call));
                call.type = SHOAL_INT64;
                call.count = bytes / 8 + 1;
                call.source_count = 1;
                call.dest_count = 1 + random_below(fixture, 3);
                lay_out(fixture, &call, random_below(fixture, 2));
                memset((char *)call.sources[0] + bytes, GUARD, GUARD_BYTES);
                call.bytes = bytes;
                const bool in_place = random_below(fixture, 4) == 0;
                if (in_place)
                    memcpy(call.dests[0], call.sources[0], bytes);
                kernels->copy(call.dests, call.dest_count, in_place ? call.dests[0] : call.sources[0], bytes,
                              (enum shoal_stores)stores);
                for (int d = 0; d < call.dest_count; d++) {
                    assert_int_equal(memcmp(call.dests[d], call.sources[0], bytes), 0);
                    assert_guards(&call, d);
                }
            }
}

static void kernels_of_nothing_touch_nothing(void **state)
{
    (void)state;
    void *dests[] = {NULL, NULL};
    const void *sources[] = {NULL, NULL};
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        for (int kernel = 0; kernel < SHOAL_TYPE_END * SHOAL_OP_END; kernel++)
            for (int k = 1; k <= 2; k++)
                if (kernels->reduce[kernel / SHOAL_OP_END][kernel % SHOAL_OP_END])
                    kernels->reduce[kernel / SHOAL_OP_END][kernel % SHOAL_OP_END](dests, k, sources, k, 0, 2,
                                                                                  SHOAL_STORES_STREAMING);
        kernels->copy(dests, 1, NULL, 0, SHOAL_STORES_CACHED);
        kernels->copy(dests, 2, NULL, 0, SHOAL_STORES_STREAMING);
    }
}

static void kernels_tables_lack_only_bitwise_floats(void **state)
{
    (void)state;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        for (int type = 0; type < SHOAL_TYPE_END; type++)
            for (int op = 0; op < SHOAL_OP_END; op++)
                assert_int_equal(kernels->reduce[type][op] != NULL,
                                 is_integer((enum shoal_type)type) || !element_is_bitwise((enum shoal_op)op));
        assert_non_null(kernels->copy);
    }
}

static void kernels_find_knows_names(void **state)
{
    (void)state;
    assert_ptr_equal(shoal_kernels_find("auto"), shoal_kernels_at(0));
    assert_non_null(shoal_kernels_find("baseline"));
    assert_string_equal(shoal_kernels_find("baseline")->name, "baseline");
    assert_null(shoal_kernels_find("mmx"));
    assert_null(shoal_kernels_find(""));
    int sets = 0;
    while (shoal_kernels_at(sets) != NULL) {
        assert_ptr_equal(shoal_kernels_find(shoal_kernels_at(sets)->name), shoal_kernels_at(sets));
        sets++;
    }
    assert_string_equal(shoal_kernels_at(sets - 1)->name, "baseline");
    assert_null(shoal_kernels_at(sets));
}

/* With an argument: runs only cases whose names match it, for example "kernels_*". */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_find_knows_names),
        cmocka_unit_test(kernels_tables_lack_only_bitwise_floats),
        cmocka_unit_test(kernels_of_nothing_touch_nothing),
        cmocka_unit_test(kernels_agree_with_plain_loop),
        cmocka_unit_test(kernels_in_place_agree_with_plain_loop),
        cmocka_unit_test(kernels_streaming_agree_with_plain_loop),
        cmocka_unit_test(kernels_of_many_sources_agree_with_plain_loop),
        cmocka_unit_test(isa_is_what_the_kernel_lists),
        cmocka_unit_test(kernels_accept_one_source_many_times),
        cmocka_unit_test(kernels_give_the_same_bits_in_any_floating_point_state),
        cmocka_unit_test(kernels_bfloat16_known_answers),
        cmocka_unit_test(kernels_float16_known_answers),
        cmocka_unit_test(kernels_of_equal_zeros_take_the_first),
        cmocka_unit_test(kernels_integers_known_answers),
        cmocka_unit_test(kernels_8_bit_averages_are_exact),
        cmocka_unit_test(kernels_scaled_sum_is_not_fused),
        cmocka_unit_test(kernels_scaled_sum_of_one_source_multiplies),
        cmocka_unit_test(kernels_averages_of_float16_in_passes_do_not_overflow),
        cmocka_unit_test(kernels_float16_averages_divide_by_fractions),
        cmocka_unit_test(kernels_widen_every_half),
        cmocka_unit_test(kernels_round_every_tie),
        cmocka_unit_test(kernels_nan_at_any_place_gives_quiet_nan),
        cmocka_unit_test(kernels_copy_every_length),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("kernels", tests, fixture_init, fixture_fini);
}
