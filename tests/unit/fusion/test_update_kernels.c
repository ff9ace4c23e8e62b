/* The update kernels of every instruction set of this processor, against the formulas of update_kernels.h in double: all rules
 * and types, odd lengths, any alignment, in place and into other memory; and the same bits from each set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "float_states.h"
#include "fusion/codec/gradient_kernels.h"
#include "reference.h"

#define LENGTH_MAX 100
#define STEPS 3

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

static const struct shoal_update updates[] = {
    {1, 0, 1, 0.9, 0.1, 0.999, 0.001, 0.9, 0.01, 3.0, 1e-8, 1.25, false},
    {0.125, 0.01, 0.995, 0.9, 1, 0.99, 0.01, 0.9, 0.3, 1.0, 1e-3, 1, true},
    {-2, 0.5, 0.5, 0, 1, 0.5, 0.5, 0.5, 1, 1.25, 1e-10, 2, false}, /* maximizes; first step of momentum */
};

/* ---- One element, in double ---------------------------------------------------------------------------------------------- */

struct element {
    double p, m, v;
};

static void step_by_moments(const struct shoal_update *by, struct element *at, double g)
{
    at->m = by->keep1 * at->m + by->add1 * g;
    at->v = by->keep2 * at->v + by->add2 * g * g;
    at->p -= by->rate * at->m / (by->root * sqrt(at->v) + by->epsilon);
}

static void step_momentum(const struct shoal_update *by, struct element *at, double g)
{
    g += by->decay * at->p;
    at->m = by->keep1 * at->m + by->add1 * g;
    at->p -= by->rate * (by->is_nesterov ? g + by->beta1 * at->m : at->m);
}

static void step_lion(const struct shoal_update *by, struct element *at, double g)
{
    const double u = by->keep1 * at->m + by->add1 * g;
    at->p = at->p * by->shrink - by->rate * (u > 0 ? 1 : u < 0 ? -1 : 0);
    at->m = by->keep2 * at->m + by->add2 * g;
}

static double direction(const struct shoal_update *by, const struct element *at)
{
    return by->unbias * at->m / (by->root * sqrt(at->v) + by->epsilon) + by->decay * at->p;
}

static void step(enum shoal_rule rule, const struct shoal_update *by, struct element *at, double g)
{
    g *= by->factor;
    switch (rule) {
    case SHOAL_RULE_SGD:
        at->p -= by->rate * (g + by->decay * at->p);
        break;
    case SHOAL_RULE_MOMENTUM:
        step_momentum(by, at, g);
        break;
    case SHOAL_RULE_ADAM:
        step_by_moments(by, at, g + by->decay * at->p);
        break;
    case SHOAL_RULE_ADAMW:
        at->p *= by->shrink;
        step_by_moments(by, at, g);
        break;
    case SHOAL_RULE_ADAGRAD:
        g += by->decay * at->p;
        at->m += g * g;
        at->p -= by->rate * g / (sqrt(at->m) + by->epsilon);
        break;
    case SHOAL_RULE_LION:
        step_lion(by, at, g);
        break;
    case SHOAL_RULE_LAMB:
        at->p -= by->rate * direction(by, at);
        break;
    case SHOAL_RULE_END:
        break;
    }
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* Bytes, so that ranges can begin at any element; the first one is left out and must stay as it is. */
struct arrays {
    char gradient[(LENGTH_MAX + 2) * 8], master[(LENGTH_MAX + 2) * 8], states[2][(LENGTH_MAX + 2) * 8];
    char parameter[(LENGTH_MAX + 2) * 8];
};

static size_t real_bytes(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? 8 : 4;
}

static double real_at(enum shoal_type type, const char *array, size_t i)
{
    double wide;
    float narrow;
    if (type == SHOAL_FLOAT64)
        return memcpy(&wide, array + 8 * i, 8), wide;
    return (double)(memcpy(&narrow, array + 4 * i, 4), narrow);
}

static void put_real(enum shoal_type type, char *array, size_t i, double value)
{
    const float narrow = (float)value;
    if (type == SHOAL_FLOAT64)
        memcpy(array + 8 * i, &value, 8);
    else
        memcpy(array + 4 * i, &narrow, 4);
}

/* Small multiples of 1/8, which every type represents. */
static double gradient_of(size_t i, int step)
{
    return (double)((int)((i * 7 + (size_t)step * 3) % 23) - 11) / 8;
}

static void put_gradient(const struct shoal_gradient_kernels *kernels, enum shoal_type type, char *array, size_t i,
                         double value)
{
    const float narrow = (float)value;
    uint16_t half;
    if (type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64) {
        put_real(type, array, i, value);
        return;
    }
    (type == SHOAL_FLOAT16 ? kernels->to_float16 : kernels->to_bfloat16)(&half, &narrow, 1, 1);
    memcpy(array + 2 * i, &half, 2);
}

static void fill(enum shoal_type type, struct arrays *arrays, struct element *elements, size_t count)
{
    memset(arrays, 0x5a, sizeof *arrays);
    for (size_t i = 0; i < count; i++) {
        elements[i] = (struct element){(double)((int)(i % 9) - 4) / 4, 0, 0};
        put_real(type, arrays->master, i + 1, elements[i].p);
        put_real(type, arrays->states[0], i + 1, 0);
        put_real(type, arrays->states[1], i + 1, 0);
    }
}

static void run(const struct shoal_gradient_kernels *kernels, enum shoal_rule rule, enum shoal_type type,
                const struct shoal_update *by, struct arrays *from, struct arrays *to, size_t count)
{
    const size_t real = real_bytes(type), bytes = shoal_type_bytes(type);
    const struct shoal_update_memory memory = {from->gradient + bytes,
                                               from->master + real,
                                               {from->states[0] + real, from->states[1] + real},
                                               to->master + real,
                                               {to->states[0] + real, to->states[1] + real},
                                               to->parameter + bytes};
    kernels->update[rule][type](by, &memory, count);
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void expect_near(enum shoal_type type, double value, double wanted)
{
    const double error = fabs(value - wanted), unit = type == SHOAL_FLOAT64 ? 1e-13 : 4e-6;
    if (!(error <= unit * (1 + fabs(wanted))))
        fail_msg("type %d: %.9g instead of %.9g", (int)type, value, wanted);
}

static void check_elements(enum shoal_rule rule, enum shoal_type type, const struct arrays *arrays,
                           const struct element *elements, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        expect_near(type, real_at(type, arrays->master, i + 1), elements[i].p);
        if (rule != SHOAL_RULE_SGD)
            expect_near(type, real_at(type, arrays->states[0], i + 1), elements[i].m);
        if (rule == SHOAL_RULE_ADAM || rule == SHOAL_RULE_ADAMW)
            expect_near(type, real_at(type, arrays->states[1], i + 1), elements[i].v);
    }
}

/* The parameter is the master, rounded once to its type. */
static void check_copy(const struct shoal_gradient_kernels *kernels, enum shoal_type type, const struct arrays *arrays,
                       size_t count)
{
    const size_t bytes = shoal_type_bytes(type);
    for (size_t i = 1; i <= count; i++) {
        char wanted[16] = {0};
        put_gradient(kernels, type, wanted, 0, real_at(type, arrays->master, i));
        assert_memory_equal(arrays->parameter + i * bytes, wanted, bytes);
    }
}

static void check_margins(enum shoal_type type, const struct arrays *arrays, size_t count)
{
    const size_t real = real_bytes(type), bytes = shoal_type_bytes(type);
    static const char untouched[8] = {0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a};
    assert_memory_equal(arrays->master, untouched, real);
    assert_memory_equal(arrays->master + (count + 1) * real, untouched, real);
    assert_memory_equal(arrays->states[0] + (count + 1) * real, untouched, real);
    assert_memory_equal(arrays->parameter, untouched, bytes);
    assert_memory_equal(arrays->parameter + (count + 1) * bytes, untouched, bytes);
}

/* Element `from` takes the place of `to`, so that the next step continues in the same memory. */
static void check_steps(const struct shoal_gradient_kernels *kernels, enum shoal_rule rule, enum shoal_type type,
                        const struct shoal_update *by, size_t count)
{
    static struct arrays arrays, other;
    static struct element elements[LENGTH_MAX];
    fill(type, &arrays, elements, count);
    for (int s = 0; s < STEPS; s++) {
        for (size_t i = 0; i < count; i++) {
            put_gradient(kernels, type, arrays.gradient, i + 1, gradient_of(i, s));
            step(rule, by, &elements[i], gradient_of(i, s));
        }
        other = arrays;
        run(kernels, rule, type, by, &arrays, &other, count);
        run(kernels, rule, type, by, &arrays, &arrays, count);
        assert_memory_equal(&arrays, &other, sizeof arrays);
        check_elements(rule, type, &arrays, elements, count);
        check_copy(kernels, type, &arrays, count);
        check_margins(type, &arrays, count);
    }
}

static void each_rule_follows_its_formula(void **state)
{
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++)
        for (enum shoal_rule rule = 0; rule < SHOAL_RULE_END; rule++)
            for (size_t t = 0; t < SHOAL_COUNT_OF(types); t++)
                for (size_t u = 0; u < SHOAL_COUNT_OF(updates); u++)
                    for (size_t count = 0; count <= LENGTH_MAX; count += count < 35 ? 1 : 13)
                        check_steps(kernels, rule, types[t], &updates[u], count);
}

/* LAMB's first pass, at any length and alignment; the second one is a rule like the others. */
static void moments_and_norms_follow_their_formula(void **state)
{
    static struct arrays arrays;
    static struct element elements[LENGTH_MAX];
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++)
        for (size_t t = 0; t < SHOAL_COUNT_OF(types); t++)
            for (size_t count = 0; count <= LENGTH_MAX; count += 7) {
                const size_t real = real_bytes(types[t]), bytes = shoal_type_bytes(types[t]);
                double squared[2] = {2, 3}, wanted[2] = {2, 3};
                fill(types[t], &arrays, elements, count);
                for (size_t i = 0; i < count; i++) {
                    put_gradient(kernels, types[t], arrays.gradient, i + 1, gradient_of(i, 1) + 4);
                    const double g = (gradient_of(i, 1) + 4) * updates[1].factor;
                    elements[i].m = updates[1].keep1 * elements[i].m + updates[1].add1 * g;
                    elements[i].v = updates[1].keep2 * elements[i].v + updates[1].add2 * g * g;
                    wanted[0] += elements[i].p * elements[i].p;
                    wanted[1] += direction(&updates[1], &elements[i]) * direction(&updates[1], &elements[i]);
                }
                char *first = arrays.states[0] + real, *second = arrays.states[1] + real;
                const struct shoal_update_memory memory = {
                    arrays.gradient + bytes, arrays.master + real, {first, second}, NULL, {first, second}, NULL};
                kernels->moments[types[t]](&updates[1], &memory, count, squared);
                expect_near(types[t], squared[0], wanted[0]);
                expect_near(SHOAL_FLOAT32, squared[1], wanted[1]);
                check_elements(SHOAL_RULE_ADAM, types[t], &arrays, elements, count);
            }
}

static void parameter_may_be_the_master(void **state)
{
    static struct arrays apart, arrays;
    static struct element elements[LENGTH_MAX];
    const struct shoal_gradient_kernels *kernels = shoal_gradient_kernels_at(0);
    (void)state;
    for (enum shoal_rule rule = 0; rule < SHOAL_RULE_END; rule++) {
        fill(SHOAL_FLOAT32, &arrays, elements, LENGTH_MAX);
        for (size_t i = 0; i < LENGTH_MAX; i++)
            put_gradient(kernels, SHOAL_FLOAT32, arrays.gradient, i + 1, gradient_of(i, 0));
        apart = arrays;
        run(kernels, rule, SHOAL_FLOAT32, &updates[0], &apart, &apart, LENGTH_MAX);
        const struct shoal_update_memory memory = {arrays.gradient + 4,
                                                   arrays.master + 4,
                                                   {arrays.states[0] + 4, arrays.states[1] + 4},
                                                   arrays.master + 4,
                                                   {arrays.states[0] + 4, arrays.states[1] + 4},
                                                   arrays.master + 4};
        kernels->update[rule][SHOAL_FLOAT32](&updates[0], &memory, LENGTH_MAX);
        assert_memory_equal(arrays.master, apart.master, sizeof arrays.master);
        assert_memory_equal(arrays.states, apart.states, sizeof arrays.states);
    }
}

/* Values whose results are rounded, subnormal, infinite or NaN: one step of each rule and type. */
static void make_all(const struct shoal_gradient_kernels *kernels, enum shoal_rule rule, enum shoal_type type,
                     shoal_floats floats, struct arrays *arrays)
{
    static struct element elements[LENGTH_MAX];
    static const double odd[] = {1.0 / 3, -1e-39, 1e-42, INFINITY, -3.7e4, NAN, 1e30, 5.0 / 7};
    fill(type, arrays, elements, LENGTH_MAX);
    for (size_t i = 0; i < LENGTH_MAX; i++) {
        put_gradient(kernels, type, arrays->gradient, i + 1, odd[i % SHOAL_COUNT_OF(odd)] * (double)(i + 1));
        put_real(type, arrays->states[0], i + 1, odd[(i + 2) % 3]);
        put_real(type, arrays->states[1], i + 1, fabs(odd[(i + 1) % 3]));
    }
    shoal_floats_write(floats);
    run(kernels, rule, type, &updates[1], arrays, arrays, LENGTH_MAX);
    assert_true(float_state_has_stayed(floats));
}

static void sets_and_floating_point_states_give_the_same_bits(void **state)
{
    static struct arrays wanted, arrays;
    const struct shoal_gradient_kernels *kernels;
    (void)state;
    for (enum shoal_rule rule = 0; rule < SHOAL_RULE_END; rule++)
        for (size_t t = 0; t < SHOAL_COUNT_OF(types); t++) {
            make_all(shoal_gradient_kernels_at(0), rule, types[t], SHOAL_FLOATS_DEFAULT, &wanted);
            for (int k = 0; (kernels = shoal_gradient_kernels_at(k)) != NULL; k++) {
                make_all(kernels, rule, types[t], SHOAL_FLOATS_DEFAULT, &arrays);
                assert_memory_equal(&arrays, &wanted, sizeof arrays);
                for (size_t i = 0; i < SHOAL_COUNT_OF(float_states); i++) {
                    make_all(kernels, rule, types[t], float_states[i], &arrays);
                    assert_memory_equal(&arrays, &wanted, sizeof arrays);
                }
            }
        }
}

/* ---- The public function ------------------------------------------------------------------------------------------------- */

static struct shoal_optimizer_range range_of(enum shoal_type type, struct arrays *arrays, size_t count)
{
    struct shoal_optimizer_range range = SHOAL_OPTIMIZER_RANGE_INIT;
    range.type = type;
    range.count = count;
    range.gradient = arrays->gradient + shoal_type_bytes(type);
    range.parameter = arrays->parameter + shoal_type_bytes(type);
    range.master = arrays->master + real_bytes(type);
    range.first = arrays->states[0] + real_bytes(type);
    range.second = arrays->states[1] + real_bytes(type);
    return range;
}

static void update_corrects_the_bias(void **state)
{
    static struct arrays arrays;
    static struct element elements[LENGTH_MAX];
    const struct shoal_gradient_kernels *kernels = shoal_gradient_kernels_at(0);
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    (void)state;
    for (size_t t = 0; t < SHOAL_COUNT_OF(types); t++) {
        fill(types[t], &arrays, elements, LENGTH_MAX);
        for (uint64_t s = 1; s <= 20; s++) {
            const struct shoal_optimizer_range range = range_of(types[t], &arrays, LENGTH_MAX);
            const struct shoal_update by = {.factor = 0.5,
                                            .shrink = 1,
                                            .keep1 = 0.9,
                                            .add1 = 0.1,
                                            .keep2 = 0.999,
                                            .add2 = 0.001,
                                            .rate = 0.001 / (1 - pow(0.9, (double)s)),
                                            .root = 1 / sqrt(1 - pow(0.999, (double)s)),
                                            .epsilon = 1e-8};
            for (size_t i = 0; i < LENGTH_MAX; i++) {
                put_gradient(kernels, types[t], arrays.gradient, i + 1, gradient_of(i, (int)s));
                step(SHOAL_RULE_ADAM, &by, &elements[i], gradient_of(i, (int)s));
            }
            assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, s, 0.5, &range), SHOAL_OK);
            check_elements(SHOAL_RULE_ADAM, types[t], &arrays, elements, LENGTH_MAX);
            check_copy(kernels, types[t], &arrays, LENGTH_MAX);
        }
    }
}

static void update_refuses_what_is_wrong(void **state)
{
    static struct arrays arrays;
    struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT, odd = SHOAL_OPTIMIZER_GROUP_INIT;
    struct shoal_optimizer_range range = range_of(SHOAL_FLOAT32, &arrays, 3), wrong;
    (void)state;
    odd.rate = -1;
    assert_int_equal(shoal_optimizer_update((enum shoal_optimizer_rule)0, &group, 1, 1, &range), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, NULL, 1, 1, &range), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &odd, 1, 1, &range), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 0, 1, &range), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, NULL), SHOAL_ERR_ARGUMENT);
    wrong = range, wrong.struct_bytes = 0;
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, &wrong), SHOAL_ERR_ARGUMENT);
    wrong = range, wrong.second = NULL;
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, &wrong), SHOAL_ERR_ARGUMENT);
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAGRAD, &group, 1, 1, &wrong), SHOAL_OK);
    wrong = range, wrong.type = SHOAL_BFLOAT16, wrong.master = NULL;
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, &wrong), SHOAL_ERR_ARGUMENT);
    wrong = range, wrong.type = SHOAL_INT32;
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, &wrong), SHOAL_ERR_ARGUMENT);
    wrong = (struct shoal_optimizer_range)SHOAL_OPTIMIZER_RANGE_INIT;
    assert_int_equal(shoal_optimizer_update(SHOAL_ADAM, &group, 1, 1, &wrong), SHOAL_OK); /* no elements */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rule_follows_its_formula),
        cmocka_unit_test(parameter_may_be_the_master),
        cmocka_unit_test(moments_and_norms_follow_their_formula),
        cmocka_unit_test(sets_and_floating_point_states_give_the_same_bits),
        cmocka_unit_test(update_corrects_the_bias),
        cmocka_unit_test(update_refuses_what_is_wrong),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
