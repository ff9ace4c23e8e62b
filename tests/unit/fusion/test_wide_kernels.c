/* Kernels of gradients and optimizers on several threads: the same bits as on one, for every length and form. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fusion/codec/wide_kernels.h"
#include "reference.h"

#define MOST ((size_t)5 << 20) /* elements: more than one batch of sums */

static const size_t counts[] = {0, 1, 4097, 65535, 65536, 65537, 100003, 1 << 20, MOST - 3};
static const enum shoal_type floats[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

static struct shoal_context *context;
static struct fusion_wide wide;
static char *source, *one[4], *many[4];

/* Random finite values of a type. */
static void fill(void *memory, enum shoal_type type, size_t count, uint64_t seed)
{
    uint64_t random = seed;
    for (size_t i = 0; i < count; i++) {
        const float value = (float)reference_below(&random, 1 << 20) / 3e5f - 1.7f;
        const double precise = (double)value * 1.000000001;
        if (type == SHOAL_FLOAT64)
            memcpy((char *)memory + i * 8, &precise, 8);
        else if (type == SHOAL_FLOAT32)
            memcpy((char *)memory + i * 4, &value, 4);
        else
            memcpy((char *)memory + i * 2, &(uint16_t){(uint16_t)(0x3c00 + reference_below(&random, 1000))}, 2);
    }
}

static void assert_same(const void *a, const void *b, size_t bytes)
{
    assert_true(memcmp(a, b, bytes) == 0); /* assert_memory_equal would print every byte */
}

/* ---- Moves ---- */

static void move_both(enum shoal_type type, size_t count, bool has_dest, bool adds, bool has_sum)
{
    double sums[2] = {0.1, 0.1};
    void *const to_one = has_dest ? one[0] : NULL, *const to_many = has_dest ? many[0] : NULL;
    fill(one[0], type, count, 5);
    memcpy(many[0], one[0], count * shoal_type_bytes(type));
    wide.kernels->move[type](to_one, source, count, 0.3, adds, has_sum ? &sums[0] : NULL);
    fusion_wide_move(wide, type, to_many, source, count, 0.3, adds, has_sum ? &sums[1] : NULL);
    assert_same(one[0], many[0], count * shoal_type_bytes(type));
    assert_same(&sums[0], &sums[1], sizeof sums[0]);
    assert_true(!has_sum || !count || sums[0] > 0.1);
}

static void moves_have_the_same_bits(void **state)
{
    (void)state;
    for (size_t t = 0; t < FUSION_COUNT_OF(floats); t++) {
        fill(source, floats[t], MOST, t + 1);
        for (size_t c = 0; c < FUSION_COUNT_OF(counts); c++) {
            move_both(floats[t], counts[c], true, false, false);
            move_both(floats[t], counts[c], true, false, true);
            move_both(floats[t], counts[c], true, true, true);
            move_both(floats[t], counts[c], false, false, true);
        }
    }
}

/* ---- Casts and 8 bits ---- */

static void casts_have_the_same_bits(void **state)
{
    (void)state;
    fill(source, SHOAL_FLOAT32, MOST, 9);
    for (size_t c = 0; c < FUSION_COUNT_OF(counts); c++) {
        for (int is_float16 = 0; is_float16 < 2; is_float16++) {
            const shoal_gradient_narrow_fn narrow = is_float16 ? wide.kernels->to_float16 : wide.kernels->to_bfloat16;
            const shoal_gradient_widen_fn widen = is_float16 ? wide.kernels->from_float16 : wide.kernels->from_bfloat16;
            narrow((uint16_t *)(void *)one[0], (const float *)(const void *)source, counts[c], 0.7f);
            fusion_wide_narrow(wide, is_float16, (uint16_t *)(void *)many[0], (const float *)(const void *)source, counts[c],
                               0.7f);
            assert_same(one[0], many[0], counts[c] * 2);
            widen((float *)(void *)one[1], (const uint16_t *)(const void *)one[0], counts[c], 0.7f);
            fusion_wide_widen(wide, is_float16, (float *)(void *)many[1], (const uint16_t *)(const void *)many[0], counts[c],
                              0.7f);
            assert_same(one[1], many[1], counts[c] * 4);
        }
    }
}

static void quantize_both(size_t count, bool has_error)
{
    const size_t scales = (count + SHOAL_GRADIENT_BLOCK - 1) / SHOAL_GRADIENT_BLOCK;
    fill(one[2], SHOAL_FLOAT32, count, 12);
    memcpy(many[2], one[2], count * 4);
    wide.kernels->quantize((int8_t *)one[0], (float *)(void *)one[1], (const float *)(const void *)source,
                           has_error ? (float *)(void *)one[2] : NULL, count);
    fusion_wide_quantize(wide, (int8_t *)many[0], (float *)(void *)many[1], (const float *)(const void *)source,
                         has_error ? (float *)(void *)many[2] : NULL, count);
    assert_same(one[0], many[0], count);
    assert_same(one[1], many[1], scales * 4);
    assert_same(one[2], many[2], count * 4);
    wide.kernels->dequantize((float *)(void *)one[2], (const int8_t *)one[0], (const float *)(const void *)one[1], count, 0.5f,
                             has_error);
    fusion_wide_dequantize(wide, (float *)(void *)many[2], (const int8_t *)many[0], (const float *)(const void *)many[1], count,
                           0.5f, has_error);
    assert_same(one[2], many[2], count * 4);
}

static void eight_bits_have_the_same_bits(void **state)
{
    (void)state;
    fill(source, SHOAL_FLOAT32, MOST, 11);
    for (size_t c = 0; c < FUSION_COUNT_OF(counts); c++) {
        quantize_both(counts[c], false);
        quantize_both(counts[c], true);
    }
}

/* ---- Updates ---- */

static void update_both(enum shoal_rule rule, enum shoal_type type, size_t count, bool is_in_place)
{
    const struct shoal_update update = {1, 0.01, 0.999, 0.9, 0.1, 0.99, 0.01, 0.9, 0.003, 1.1, 1e-8, 1.2, false};
    const enum shoal_type master = type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32;
    const size_t bytes = count * shoal_type_bytes(master);
    char *const *areas[2] = {one, many};
    static char *before; /* the values of the step before, if the update is not in place */
    before = before ? before : malloc(MOST * 8);
    fill(before, master, count, 21);
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 3; i++)
            fill(areas[s][i], master, count, 31 + (uint64_t)i);
        memset(areas[s][3], 0x55, count * shoal_type_bytes(type));
        const struct shoal_update_memory memory = {source,
                                                   is_in_place ? areas[s][0] : before,
                                                   {is_in_place ? areas[s][1] : before, is_in_place ? areas[s][2] : before},
                                                   areas[s][0],
                                                   {areas[s][1], areas[s][2]},
                                                   type == master ? areas[s][0] : areas[s][3]};
        if (s == 0)
            wide.kernels->update[rule][type](&update, &memory, count);
        else
            fusion_wide_update(wide, rule, type, &update, &memory, count);
    }
    for (int i = 0; i < 3; i++)
        assert_same(one[i], many[i], bytes);
    assert_same(one[3], many[3], count * shoal_type_bytes(type));
}

static void updates_have_the_same_bits(void **state)
{
    (void)state;
    for (size_t t = 0; t < FUSION_COUNT_OF(floats); t++) {
        fill(source, floats[t], MOST, t + 40);
        for (enum shoal_rule rule = 0; rule < SHOAL_RULE_END; rule++) {
            update_both(rule, floats[t], 70001, true);
            update_both(rule, floats[t], 70001, false);
            update_both(rule, floats[t], 65535, true);
        }
        update_both(SHOAL_RULE_ADAMW, floats[t], MOST - 1, true);
    }
}

/* ---- A program's own work ---- */

static void count_run(void *arg, size_t part)
{
    atomic_fetch_add((_Atomic uint64_t *)arg, part);
}

static void parts_of_a_program(void **state)
{
    _Atomic uint64_t sum = 0;
    (void)state;
    assert_int_equal(shoal_context_threads(context), 3);
    assert_int_equal(shoal_context_threads(NULL), 1);
    assert_int_equal(shoal_context_run(context, count_run, &sum, 0), SHOAL_OK);
    assert_int_equal(atomic_load(&sum), 0);
    assert_int_equal(shoal_context_run(context, count_run, &sum, 200001), SHOAL_OK); /* more than one job */
    assert_int_equal(atomic_load(&sum), UINT64_C(200000) * 200001 / 2);
    assert_int_equal(shoal_context_run(context, NULL, &sum, 1), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_context_run(NULL, count_run, &sum, 1), SHOAL_ERR_ARGUMENT);
    const pid_t child = fork();
    if (child == 0)
        _exit(shoal_context_threads(context) == 1 && shoal_context_run(context, count_run, &sum, 1) == SHOAL_ERR_STATE ? 0 : 1);
    int ended = -1;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
}

static void swallow(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

static int open_all(void **state)
{
    struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
    (void)state;
    options.log = swallow;
    options.threads = 3;
    source = calloc(MOST, 8);
    for (int i = 0; i < 4; i++) {
        one[i] = calloc(MOST, 8);
        many[i] = calloc(MOST, 8);
    }
    if (shoal_context_create(&options, &context) != SHOAL_OK)
        return -1;
    wide = (struct fusion_wide){context, shoal_gradient_kernels_at(0)};
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    shoal_context_destroy(context);
    free(source);
    for (int i = 0; i < 4; i++) {
        free(one[i]);
        free(many[i]);
    }
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moves_have_the_same_bits),
        cmocka_unit_test(casts_have_the_same_bits),
        cmocka_unit_test(eight_bits_have_the_same_bits),
        cmocka_unit_test(updates_have_the_same_bits),
        cmocka_unit_test(parts_of_a_program),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
