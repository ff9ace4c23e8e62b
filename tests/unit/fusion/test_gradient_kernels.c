/* The gradient kernels of every instruction set of this processor, against plain loops: all types, odd lengths, any alignment,
 * special values; and the same bits from each set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "float_states.h"
#include "fusion/codec/gradient_kernels.h"
#include "reference.h"

#define LENGTH_MAX 700
#define ROUNDS 600
#define BYTES (LENGTH_MAX * 8 + 64)

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* ---- The reference: each value alone, in double ------------------------------------------------------------------------- */

static double value_at(enum shoal_type type, const void *values, size_t i)
{
    if (type == SHOAL_FLOAT64) {
        double x;
        memcpy(&x, (const char *)values + 8 * i, sizeof x);
        return x;
    }
    if (type == SHOAL_FLOAT32) {
        float x;
        memcpy(&x, (const char *)values + 4 * i, sizeof x);
        return (double)x;
    }
    uint16_t half;
    memcpy(&half, (const char *)values + 2 * i, sizeof half);
    const int exponent_bits = type == SHOAL_FLOAT16 ? 5 : 8, mantissa_bits = 15 - exponent_bits;
    const int exponent = half >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = half & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    double x =
        exponent ? ldexp(1 + ldexp(mantissa, -mantissa_bits), exponent - bias) : ldexp(mantissa, 1 - bias - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1)
        x = mantissa ? (double)NAN : (double)INFINITY;
    return half >> 15 ? -x : x;
}

/* Rounds to the type's nearest number, ties to even: rint counts steps between neighbors. */
static double rounded(enum shoal_type type, double x)
{
    if (type == SHOAL_FLOAT64)
        return x;
    if (type == SHOAL_FLOAT32)
        return (double)(float)x;
    const int mantissa_bits = type == SHOAL_FLOAT16 ? 10 : 7, least = type == SHOAL_FLOAT16 ? -14 : -126;
    const double largest = type == SHOAL_FLOAT16 ? 65504 : ldexp(2 - ldexp(1, -7), 127);
    int exponent;
    if (isnan(x) || isinf(x) || x == 0)
        return x;
    frexp(x, &exponent);
    exponent = exponent - 1 < least ? least : exponent - 1;
    const double step = ldexp(1, exponent - mantissa_bits), y = rint(x / step) * step;
    return fabs(y) > largest ? copysign((double)INFINITY, x) : y;
}

static bool same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

/* The library computes in float32, float64 in float64. */
static double computed(enum shoal_type type, double x)
{
    return type == SHOAL_FLOAT64 ? x : (double)(float)x;
}

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

/* Draws ordinary values and some zeros; if has_any, bit patterns of all kinds. */
static void draw_values(uint64_t *random, enum shoal_type type, void *values, size_t count, bool has_any)
{
    char *at = values;
    for (size_t i = 0; i < count; i++, at += shoal_type_bytes(type)) {
        const uint64_t bits = reference_random(random);
        const double number = ((double)(bits >> 11) / 0x1p53 - 0.5) * (i % 7 ? 2 : 1000);
        const float single = (float)number;
        uint32_t word;
        memcpy(&word, &single, sizeof word);
        uint16_t half = (uint16_t)(word >> 16);
        if (type == SHOAL_FLOAT16)
            half = (uint16_t)((half & 0x83ff) | (8 + bits % 12) << 10);
        if (has_any && i % 3 == 0) {
            memcpy(at, &bits, shoal_type_bytes(type));
            continue;
        }
        if (type == SHOAL_FLOAT64)
            memcpy(at, &number, sizeof number);
        else if (type == SHOAL_FLOAT32)
            memcpy(at, &single, sizeof single);
        else
            memcpy(at, &half, sizeof half);
    }
}

struct move {
    enum shoal_type type;
    size_t count, dest_at, source_at;
    double factor;
    bool adds, writes, in_place;
    const char *dest, *source; /* [BYTES] before the call */
};

static double expected_value(const struct move *move, size_t i)
{
    const double factor = computed(move->type, move->factor);
    const double product = computed(move->type, value_at(move->type, move->source + move->source_at, i) * factor);
    if (!move->adds)
        return move->writes ? rounded(move->type, product) : product;
    return rounded(move->type, computed(move->type, value_at(move->type, move->dest + move->dest_at, i) + product));
}

static void check_move(const struct shoal_gradient_kernels *kernels, const struct move *move, double *squared)
{
    static char dest[BYTES], source[BYTES];
    double expected = 0;
    memcpy(dest, move->dest, sizeof dest);
    memcpy(source, move->source, sizeof source);
    char *to = move->in_place ? source + move->source_at : dest + move->dest_at;
    kernels->move[move->type](move->writes ? to : NULL, source + move->source_at, move->count, move->factor, move->adds,
                              squared);
    for (size_t i = 0; i < move->count; i++) {
        const double value = expected_value(move, i);
        if (move->writes && !same(value_at(move->type, to, i), value))
            fail_msg("%s, type %d, element %zu of %zu: %a, not %a", kernels->name, (int)move->type, i, move->count,
                     value_at(move->type, to, i), value);
        expected += value * value;
    }
    if (!move->in_place) {
        const size_t end = move->dest_at + (move->writes ? move->count * shoal_type_bytes(move->type) : 0);
        assert_memory_equal(dest, move->dest, move->dest_at);
        assert_memory_equal(dest + end, move->dest + end, sizeof dest - end);
    }
    if (!squared)
        return;
    if (isfinite(expected) ? fabs(*squared - expected) > 1e-12 * expected : isfinite(*squared))
        fail_msg("%s, type %d: squares are %a, not %a", kernels->name, (int)move->type, *squared, expected);
}

/* Draws any combination that the reducer uses. A factor of 1 copies bits. */
static struct move draw_move(uint64_t *random, char *dest, char *source)
{
    static const double factors[] = {1, 0.5, 1.0 / 3, 0.0123, 1};
    struct move move = {.type = types[reference_below(random, 4)], .dest = dest, .source = source};
    const size_t bytes = shoal_type_bytes(move.type);
    move.count = reference_below(random, LENGTH_MAX);
    move.dest_at = bytes * reference_below(random, 64 / bytes);
    move.source_at = bytes * reference_below(random, 64 / bytes);
    move.factor = factors[reference_below(random, 5)];
    move.writes = reference_below(random, 4) > 0;
    move.adds = move.writes && reference_below(random, 3) == 0;
    move.in_place = move.writes && !move.adds && reference_below(random, 4) == 0;
    draw_values(random, move.type, dest + move.dest_at, move.count, false);
    draw_values(random, move.type, source + move.source_at, move.count, reference_below(random, 2));
    return move;
}

static void move_is_exact_in_every_set(void **state)
{
    static char dest[BYTES], source[BYTES];
    uint64_t random = 5;
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct move move = draw_move(&random, dest, source);
        const bool has_squares = !move.writes || reference_below(&random, 2);
        double first = 0;
        const struct shoal_gradient_kernels *kernels;
        for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++) {
            double squared = 0;
            check_move(kernels, &move, has_squares ? &squared : NULL);
            if (k == 0)
                first = squared;
            assert_true(same(first, squared) || (isnan(first) && isnan(squared)));
        }
    }
}

/* ---- Casts --------------------------------------------------------------------------------------------------------------- */

/* Every 16-bit pattern, and every float32 near the middle between two of them. */
static void casts_round_to_nearest_even(void **state)
{
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++) {
        for (uint32_t t = 2; t < 4; t++) {
            const enum shoal_type type = types[t];
            for (uint32_t pattern = 0; pattern < 65536; pattern += 17) {
                uint16_t halves[17];
                float wide[17], near[17];
                for (uint32_t i = 0; i < 17; i++)
                    halves[i] = (uint16_t)(pattern + i);
                (type == SHOAL_FLOAT16 ? kernels->from_float16 : kernels->from_bfloat16)(wide, halves, 17, 1);
                for (uint32_t i = 0; i < 17; i++) {
                    assert_true(same((double)wide[i], value_at(type, halves, i)));
                    near[i] = i + 1 < 17 && i % 3 ? (wide[i] + wide[i + 1]) / 2 : wide[i];
                    if (i % 3 == 2)
                        near[i] = nextafterf(near[i], i % 2 ? 1e30f : -1e30f);
                }
                (type == SHOAL_FLOAT16 ? kernels->to_float16 : kernels->to_bfloat16)(halves, near, 17, 1);
                for (uint32_t i = 0; i < 17; i++)
                    if (!same(value_at(type, halves, i), rounded(type, (double)near[i])))
                        fail_msg("%s: %a became %a, not %a", kernels->name, (double)near[i], value_at(type, halves, i),
                                 rounded(type, (double)near[i]));
            }
        }
    }
}

/* ---- Blocks of 8 bits ---------------------------------------------------------------------------------------------------- */

static void check_block(const float *source, const float *before, const float *after, const int8_t *values, float scale,
                        size_t count)
{
    float largest = 0;
    for (size_t i = 0; i < count; i++)
        largest = fmaxf(largest, fabsf(source[i] + before[i]));
    assert_true(scale == largest / 127);
    for (size_t i = 0; i < count; i++) {
        const float u = source[i] + before[i];
        assert_true(fabsf(u - (float)values[i] * scale) <= scale * 0.5001f);
        assert_true(after[i] == u - (float)values[i] * scale);
    }
}

static void quantizing_keeps_what_it_cuts_off(void **state)
{
    enum { COUNT = 1000 };
    static float source[COUNT], before[COUNT], error[COUNT], scales[4], back[COUNT], first_scales[4];
    static int8_t values[COUNT], first[COUNT];
    uint64_t random = 8;
    (void)state;
    for (int round = 0; round < 100; round++) {
        const size_t count = 1 + reference_below(&random, COUNT);
        draw_values(&random, SHOAL_FLOAT32, source, count, false);
        draw_values(&random, SHOAL_FLOAT32, before, count, false);
        const struct shoal_gradient_kernels *kernels;
        for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++) {
            memcpy(error, before, sizeof error);
            kernels->quantize(values, scales, source, error, count);
            for (size_t at = 0; at < count; at += SHOAL_GRADIENT_BLOCK)
                check_block(source + at, before + at, error + at, values + at, scales[at / SHOAL_GRADIENT_BLOCK],
                            count - at < SHOAL_GRADIENT_BLOCK ? count - at : SHOAL_GRADIENT_BLOCK);
            kernels->dequantize(back, values, scales, count, 0.5f, false);
            kernels->dequantize(back, values, scales, count, 0.5f, true);
            for (size_t i = 0; i < count; i++) {
                const float half = (float)values[i] * (scales[i / SHOAL_GRADIENT_BLOCK] * 0.5f);
                assert_true(back[i] == half + half);
            }
            if (k == 0) {
                memcpy(first, values, sizeof first);
                memcpy(first_scales, scales, sizeof first_scales);
            }
            assert_memory_equal(first, values, count);
            assert_memory_equal(first_scales, scales, (count + SHOAL_GRADIENT_BLOCK - 1) / SHOAL_GRADIENT_BLOCK * 4);
        }
    }
}

static void quantizing_tells_of_nan_and_infinity(void **state)
{
    static const float special[] = {NAN, INFINITY, -INFINITY};
    float source[300] = {0}, error[300], scales[2], back[300];
    int8_t values[300];
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++) {
        for (size_t s = 0; s < 3; s++) {
            for (size_t at = 0; at < 256; at += 5) {
                memset(error, 0, sizeof error);
                memset(source, 0, sizeof source);
                source[at] = special[s];
                kernels->quantize(values, scales, source, error, 300);
                kernels->dequantize(back, values, scales, 300, 1, false);
                assert_true(isnan(scales[0]) && isnan(back[0]) && isnan(back[at]));
                assert_true(scales[1] == 0 && back[299] == 0);
                for (size_t i = 0; i < 300; i++)
                    assert_true(error[i] == 0);
            }
        }
        for (size_t i = 0; i < 300; i++)
            source[i] = i % 2 ? 1e-40f : -3e-42f; /* only subnormals remain for later */
        memset(error, 0, sizeof error);
        kernels->quantize(values, scales, source, error, 300);
        kernels->dequantize(back, values, scales, 300, 1, false);
        for (size_t i = 0; i < 300; i++)
            assert_true(fabsf(back[i] + error[i] - source[i]) <= 1e-44f);
    }
}

/* ---- The caller's floating-point state ----------------------------------------------------------------------------------- */

/* What all kernels of a set make of some values, in a state. */
struct made {
    double squared[4];
    char moved[4][BYTES];
    uint16_t halves[2][LENGTH_MAX];
    float wide[3][LENGTH_MAX], scales[3], error[LENGTH_MAX];
    int8_t values[LENGTH_MAX];
};

static void make_all(const struct shoal_gradient_kernels *kernels, size_t count, shoal_floats floats, struct made *made)
{
    static char source[BYTES], gradients[BYTES];
    uint64_t random = 3;
    memset(made, 0, sizeof *made);
    shoal_floats_write(SHOAL_FLOATS_DEFAULT);
    for (size_t t = 0; t < SHOAL_COUNT_OF(types); t++) {
        draw_values(&random, types[t], source, count, true);
        draw_values(&random, types[t], made->moved[t], count, true);
        shoal_floats_write(floats);
        kernels->move[types[t]](made->moved[t], source, count, 1.0 / 3, true, &made->squared[t]);
        assert_true(float_state_has_stayed(floats));
    }
    draw_values(&random, SHOAL_FLOAT32, gradients, count, false);
    for (size_t i = 0; i < count; i += 3)
        memcpy(gradients + 4 * i, &(float){1e-40f}, 4);
    shoal_floats_write(floats);
    kernels->to_float16(made->halves[0], (const float *)(const void *)gradients, count, 1.0f / 3);
    kernels->to_bfloat16(made->halves[1], (const float *)(const void *)gradients, count, 1.0f / 3);
    kernels->from_float16(made->wide[0], made->halves[0], count, 1.0f / 3);
    kernels->from_bfloat16(made->wide[1], made->halves[1], count, 1.0f / 3);
    kernels->quantize(made->values, made->scales, (const float *)(const void *)gradients, made->error, count);
    kernels->dequantize(made->wide[2], made->values, made->scales, count, 1.0f / 3, true);
    assert_true(float_state_has_stayed(floats));
}

static void any_floating_point_state_gives_the_same_bits(void **state)
{
    static const size_t counts[] = {1, 5, 16, 100, LENGTH_MAX};
    static struct made wanted, made;
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++)
        for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
            make_all(kernels, counts[c], SHOAL_FLOATS_DEFAULT, &wanted);
            for (size_t i = 0; i < SHOAL_COUNT_OF(float_states); i++) {
                make_all(kernels, counts[c], float_states[i], &made);
                assert_memory_equal(&made, &wanted, sizeof made);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(move_is_exact_in_every_set),
        cmocka_unit_test(casts_round_to_nearest_even),
        cmocka_unit_test(quantizing_keeps_what_it_cuts_off),
        cmocka_unit_test(quantizing_tells_of_nan_and_infinity),
        cmocka_unit_test(any_floating_point_state_gives_the_same_bits),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
