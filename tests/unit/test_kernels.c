/* Every set of kernels this processor has, against one plain loop, bit by bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/kernels.h"

#define COUNT_MAX ((size_t)4097)
#define ARRAYS_MAX 64
#define GUARD_BYTES ((size_t)64) /* before and after each array; what lies there must stay */
#define SHIFT_BYTES ((size_t)64)
#define ARRAY_BYTES (GUARD_BYTES + SHIFT_BYTES + COUNT_MAX * 8 + GUARD_BYTES)
#define GUARD 0xa5

static const size_t counts[] = {0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 257, 1000, COUNT_MAX};

/* One call: the arrays and how they lie. Pointers are into memory that each test owns. */
struct call {
    enum shoal_type type;
    enum shoal_op op;
    enum shoal_stores stores;
    int source_count;
    int dest_count;
    int ranks;
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
};

/* ---- The plain loop ------------------------------------------------------------------------------------------- */

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

static float float_quiet(float x)
{
    return x == x ? x : float_from(0x7fc00000);
}

static double double_quiet(double x)
{
    const uint64_t word = 0x7ff8000000000000;
    if (x != x)
        memcpy(&x, &word, sizeof(x));
    return x;
}

static int64_t int64_same(int64_t x)
{
    return x;
}

static float bfloat16_value(uint16_t half)
{
    return float_from((uint32_t)half << 16);
}

/* Nearest bfloat16, found by comparing the rest with one half; a carry out of the mantissa is the exponent's. */
static uint16_t bfloat16_nearest(float x)
{
    const uint32_t word = float_bits(x);
    const uint32_t kept = word >> 16;
    const uint32_t rest = word & 0xffff;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (kept & 1));
    return (uint16_t)(x != x ? 0x7fc0 : kept + up);
}

#define DEFINE_PLAIN(NAME, MEMORY, LANE, ADDED, GET, PUT)                                                 \
    static void plain_##NAME(const struct call *call, size_t i)                                           \
    {                                                                                                     \
        LANE result = GET(((const MEMORY *)call->sources[0])[i]);                                         \
        for (int s = 1; s < call->source_count; s++) {                                                    \
            const LANE x = GET(((const MEMORY *)call->sources[s])[i]);                                    \
            if (call->op != SHOAL_MAX)                                                                    \
                result = (LANE)((ADDED)result + (ADDED)x);                                                \
            else if (x > result || x != x)                                                                \
                result = x;                                                                               \
        }                                                                                                 \
        ((MEMORY *)call->expected)[i] = PUT(call->op == SHOAL_AVG ? result / (LANE)call->ranks : result); \
    }
DEFINE_PLAIN(f32, float, float, float, (float), float_quiet)
DEFINE_PLAIN(f64, double, double, double, (double), double_quiet)
DEFINE_PLAIN(bf16, uint16_t, float, float, bfloat16_value, bfloat16_nearest)
DEFINE_PLAIN(i64, int64_t, int64_t, uint64_t, (int64_t), int64_same)

static void plain_element(const struct call *call, size_t i)
{
    if (call->type == SHOAL_FLOAT32)
        plain_f32(call, i);
    else if (call->type == SHOAL_FLOAT64)
        plain_f64(call, i);
    else if (call->type == SHOAL_BFLOAT16)
        plain_bf16(call, i);
    else
        plain_i64(call, i);
}

static void plain_reduce(const struct call *call)
{
    const bool copies = call->source_count == 1 && (call->op != SHOAL_AVG || call->ranks == 1);
    if (copies)
        memcpy(call->expected, call->sources[0], call->bytes);
    else
        for (size_t i = 0; i < call->count; i++)
            plain_element(call, i);
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

/* Ordinary numbers, and one time in eight something that arithmetic likes to get wrong. */
static void fill_element(struct fixture *fixture, enum shoal_type type, void *to)
{
    static const uint32_t odd32[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f812345,
                                     0x00000001, 0x807fffff, 0x7f7fffff, 0xff7fffff, 0x7f7f0000, 0x3f808000, 0x3f818000};
    static const uint64_t odd64[] = {0x0000000000000000, 0x8000000000000000, 0x7ff0000000000000, 0xfff0000000000000,
                                     0x7ff8000000000000, 0xfff8000012345678, 0x7ff0000000000001, 0x0000000000000001,
                                     0x7fefffffffffffff, 0xffefffffffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};
    const bool odd = random_below(fixture, 8) == 0;
    const uint64_t any = random_next(fixture);
    const float single =
        odd ? float_from(odd32[random_below(fixture, SHOAL_COUNT_OF(odd32))]) : (float)(int32_t)any * 1.2345e-5f;
    const double wide = (double)(int64_t)any * 1.2345e-9;
    const uint64_t odd_word = odd64[random_below(fixture, SHOAL_COUNT_OF(odd64))];
    const uint16_t half = (uint16_t)(float_bits(single) >> 16);
    if (type == SHOAL_FLOAT32)
        memcpy(to, &single, sizeof(single));
    else if (type == SHOAL_BFLOAT16)
        memcpy(to, &half, sizeof(half));
    else if (odd)
        memcpy(to, &odd_word, sizeof(odd_word));
    else if (type == SHOAL_FLOAT64)
        memcpy(to, &wide, sizeof(wide));
    else
        memcpy(to, &any, sizeof(any));
}

static unsigned char *place(unsigned char *memory, int array, size_t shift_elements, size_t element_bytes)
{
    return memory + (size_t)array * ARRAY_BYTES + GUARD_BYTES + shift_elements * element_bytes;
}

static void assert_guards(const struct call *call, int dest)
{
    const unsigned char *begin = call->dests[dest];
    for (size_t i = 1; i <= GUARD_BYTES; i++)
        assert_int_equal(begin[-(ptrdiff_t)i], GUARD);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        assert_int_equal(begin[call->bytes + i], GUARD);
}

/* Where the arrays lie: each shifted on its own, or (what streaming asks for) all destinations alike. */
static void lay_out(struct fixture *fixture, struct call *call, bool alike)
{
    const size_t element_bytes = shoal_type_bytes(call->type);
    const int common = random_below(fixture, 4);
    call->bytes = call->count * element_bytes;
    call->expected = fixture->expected;
    for (int s = 0; s < call->source_count; s++) {
        const size_t shift = (size_t)random_below(fixture, 4);
        call->sources[s] = place(fixture->source_memory, s, shift, element_bytes);
        memset(place(fixture->source_memory, s, 0, 1) - GUARD_BYTES, GUARD, ARRAY_BYTES - COUNT_MAX * 8 + call->bytes);
        for (size_t i = 0; i < call->count; i++)
            fill_element(fixture, call->type, (char *)call->sources[s] + i * element_bytes);
    }
    for (int d = 0; d < call->dest_count; d++) {
        const size_t shift = (size_t)(alike ? common : random_below(fixture, 4));
        call->dests[d] = place(fixture->dest_memory, d, shift, element_bytes);
        memset(place(fixture->dest_memory, d, 0, 1) - GUARD_BYTES, GUARD, ARRAY_BYTES - COUNT_MAX * 8 + call->bytes);
    }
}

static void run_and_compare(const struct shoal_kernels *kernels, const struct call *call)
{
    plain_reduce(call);
    kernels->reduce[call->type][call->op](call->dests, call->dest_count, (const void *const *)call->sources, call->source_count,
                                          call->count, call->ranks, call->stores);
    for (int d = 0; d < call->dest_count; d++) {
        if (memcmp(call->dests[d], call->expected, call->bytes) != 0)
            print_error("%s: type %d, op %d, k %d, m %d, count %zu, ranks %d, stores %d: destination %d is wrong\n",
                        kernels->name, (int)call->type, (int)call->op, call->source_count, call->dest_count, call->count,
                        call->ranks, (int)call->stores, d);
        assert_int_equal(memcmp(call->dests[d], call->expected, call->bytes), 0);
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
    return fixture->source_memory && fixture->dest_memory && fixture->expected ? 0 : -1;
}

static int fixture_fini(void **state)
{
    struct fixture *fixture = *state;
    free(fixture->source_memory);
    free(fixture->dest_memory);
    free(fixture->expected);
    free(fixture);
    return 0;
}

/* Calls check for every set, type, operator and count, with k, m and ranks drawn. */
static void each_call(struct fixture *fixture, int repeats,
                      void (*check)(struct fixture *, const struct shoal_kernels *, struct call *))
{
    static const int sizes[] = {2, 2, 2, 1, 3, 4, 5, 8, 17, ARRAYS_MAX};
    static const int divisors[] = {1, 2, 3, 4, 7, 64, 1000};
    const struct shoal_kernels *kernels;
    struct call call;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (int variant = 0; variant < SHOAL_TYPE_END * SHOAL_OP_END * repeats; variant++)
            for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
                memset(&call, 0, sizeof(call));
                call.type = (enum shoal_type)(variant % SHOAL_TYPE_END);
                call.op = (enum shoal_op)(variant / SHOAL_TYPE_END % SHOAL_OP_END);
                call.count = counts[c];
                /* Long arrays are met in small numbers only: the test has to end soon. */
                const int choices = counts[c] < 1000 ? (int)SHOAL_COUNT_OF(sizes) : 6;
                call.source_count = sizes[random_below(fixture, choices)];
                call.dest_count = sizes[random_below(fixture, choices)];
                call.ranks = divisors[random_below(fixture, SHOAL_COUNT_OF(divisors))];
                check(fixture, kernels, &call);
            }
}

/* ---- Cases ---------------------------------------------------------------------------------------------------- */

static void check_shifted(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    lay_out(fixture, call, false);
    run_and_compare(kernels, call);
}

static void kernels_agree_with_plain_loop(void **state)
{
    each_call(*state, 8, check_shifted);
}

static void check_streaming(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    call->stores = SHOAL_STORES_STREAMING;
    lay_out(fixture, call, random_below(fixture, 4) != 0);
    run_and_compare(kernels, call);
}

static void kernels_streaming_agree_with_plain_loop(void **state)
{
    each_call(*state, 8, check_streaming);
}

/* One destination is a source, any of them; the others lie apart. */
static void check_in_place(struct fixture *fixture, const struct shoal_kernels *kernels, struct call *call)
{
    call->stores = random_below(fixture, 2) ? SHOAL_STORES_STREAMING : SHOAL_STORES_CACHED;
    lay_out(fixture, call, true);
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
    each_call(*state, 8, check_in_place);
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
    each_call(*state, 1, check_one_source_twice);
}

/* The NaN among k sources, at each place of the vector and of the sources; result the one quiet NaN. */
static void kernels_nan_at_any_place_gives_quiet_nan(void **state)
{
    (void)state;
    enum { K = 5, COUNT = 70 };
    float x[K][COUNT];
    float out[COUNT];
    void *dests[] = {out};
    const void *sources[K] = {x[0], x[1], x[2], x[3], x[4]};
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (int op = 0; op < SHOAL_OP_END; op++)
            for (int at = 0; at < K * COUNT; at++) {
                for (int i = 0; i < K * COUNT; i++)
                    x[i / COUNT][i % COUNT] = (float)i;
                const uint32_t signaling = 0xff800001;
                memcpy(&x[at / COUNT][at % COUNT], &signaling, sizeof(signaling));
                kernels->reduce[SHOAL_FLOAT32][op](dests, 1, sources, K, COUNT, 3, SHOAL_STORES_CACHED);
                for (int i = 0; i < COUNT; i++)
                    assert_int_equal(float_bits(out[i]) == 0x7fc00000, i == at % COUNT);
            }
}

/* Known answers, so that a mistake shared with the plain loop cannot hide. */
static void reduce_two(const struct shoal_kernels *kernels, enum shoal_type type, enum shoal_op op, const void *a,
                       const void *b, void *out, int ranks)
{
    void *dests[] = {out};
    const void *sources[] = {a, b};
    kernels->reduce[type][op](dests, 1, sources, 2, 1, ranks, SHOAL_STORES_CACHED);
}

static void kernels_bfloat16_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint16_t a, b, sum, max, avg3;
    } rows[] = {
        {0x3f80, 0x3f80, 0x4000, 0x3f80, 0x3f2b}, /* 1 + 1 = 2; 2 / 3 rounds up */
        {0x3f80, 0x3b80, 0x3f80, 0x3f80, 0x3eab}, /* 1 + 2^-8: a tie, to even: down */
        {0x3f81, 0x3b80, 0x3f82, 0x3f81, 0x3ead}, /* an odd one: up */
        {0x7f7f, 0x7f7f, 0x7f80, 0x7f7f, 0x7f80}, /* the largest twice overflows */
        {0x7f80, 0xff80, 0x7fc0, 0x7f80, 0x7fc0}, /* inf - inf */
        {0x8000, 0x8000, 0x8000, 0x8000, 0x8000}, /* -0 stays -0 */
    };
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
            uint16_t out = 0;
            reduce_two(kernels, SHOAL_BFLOAT16, SHOAL_SUM, &rows[i].a, &rows[i].b, &out, 2);
            assert_int_equal(out, rows[i].sum);
            reduce_two(kernels, SHOAL_BFLOAT16, SHOAL_MAX, &rows[i].a, &rows[i].b, &out, 2);
            assert_int_equal(out, rows[i].max);
            reduce_two(kernels, SHOAL_BFLOAT16, SHOAL_AVG, &rows[i].a, &rows[i].b, &out, 3);
            assert_int_equal(out, rows[i].avg3);
        }
}

static void kernels_int64_wrap_and_divide_toward_zero(void **state)
{
    (void)state;
    const int64_t least = INT64_MIN, minus_one = -1, minus_six = -6, zero = 0;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        int64_t out = 0;
        reduce_two(kernels, SHOAL_INT64, SHOAL_SUM, &least, &minus_one, &out, 2);
        assert_true(out == INT64_MAX);
        reduce_two(kernels, SHOAL_INT64, SHOAL_AVG, &minus_one, &minus_six, &out, 2);
        assert_true(out == -3);
        reduce_two(kernels, SHOAL_INT64, SHOAL_AVG, &least, &zero, &out, 1);
        assert_true(out == INT64_MIN);
        reduce_two(kernels, SHOAL_INT64, SHOAL_MAX, &minus_six, &minus_one, &out, 2);
        assert_true(out == -1);
    }
}

static void kernels_copy_every_length(void **state)
{
    struct fixture *fixture = *state;
    const struct shoal_kernels *kernels;
    struct call call;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++)
        for (size_t bytes = 0; bytes < 20000; bytes = bytes < 300 ? bytes + 1 : bytes + 911)
            for (int stores = SHOAL_STORES_CACHED; stores <= SHOAL_STORES_STREAMING; stores++) {
                memset(&call, 0, sizeof(call));
                call.type = SHOAL_BFLOAT16; /* of shifts; an odd byte is copied too */
                call.count = bytes / 2 + 1;
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
        for (int k = 1; k <= 2; k++)
            for (int op = 0; op < SHOAL_OP_END; op++)
                kernels->reduce[SHOAL_FLOAT32][op](dests, k, sources, k, 0, 1, SHOAL_STORES_STREAMING);
        kernels->copy(dests, 1, NULL, 0, SHOAL_STORES_CACHED);
        kernels->copy(dests, 2, NULL, 0, SHOAL_STORES_STREAMING);
    }
}

static void kernels_tables_are_whole(void **state)
{
    (void)state;
    const struct shoal_kernels *kernels;
    for (int set = 0; (kernels = shoal_kernels_at(set)) != NULL; set++) {
        for (int type = 0; type < SHOAL_TYPE_END; type++)
            for (int op = 0; op < SHOAL_OP_END; op++)
                assert_non_null(kernels->reduce[type][op]);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_find_knows_names),
        cmocka_unit_test(kernels_tables_are_whole),
        cmocka_unit_test(kernels_of_nothing_touch_nothing),
        cmocka_unit_test(kernels_agree_with_plain_loop),
        cmocka_unit_test(kernels_streaming_agree_with_plain_loop),
        cmocka_unit_test(kernels_in_place_agree_with_plain_loop),
        cmocka_unit_test(kernels_accept_one_source_many_times),
        cmocka_unit_test(kernels_nan_at_any_place_gives_quiet_nan),
        cmocka_unit_test(kernels_bfloat16_known_answers),
        cmocka_unit_test(kernels_int64_wrap_and_divide_toward_zero),
        cmocka_unit_test(kernels_copy_every_length),
    };
    return cmocka_run_group_tests_name("kernels", tests, fixture_init, fixture_fini);
}
