/* The update kernels; gradient_kernel_body.h includes this once for each instruction set. Not a header for other files.
 *
 * A kernel passes over groups of GROUP elements, so that compilers vectorize each rule. The last elements are copied into a
 * group of their own, which is padded with zeros. Products are never fused with sums. */
#include "base/floats.h"
#include "fusion/codec/cpu/gradient_formats.h"
#include "fusion/codec/update_kernels.h"

/* The rules for one element, in the type REAL. In LION a NaN has no sign, but must not vanish: it passes through. */
#define DEFINE_RULES(REAL, SQUARE_ROOT)                                                                                      \
    struct rates_##REAL {                                                                                                    \
        REAL factor, decay, shrink, keep1, add1, keep2, add2, beta1, rate, root, epsilon;                                    \
        bool is_nesterov;                                                                                                    \
    };                                                                                                                       \
    INLINE struct rates_##REAL rates_of_##REAL(const struct shoal_update *update) {                                          \
        return (struct rates_##REAL){(REAL)update->factor, (REAL)update->decay, (REAL)update->shrink,  (REAL)update->keep1,  \
                                     (REAL)update->add1,   (REAL)update->keep2, (REAL)update->add2,    (REAL)update->beta1,  \
                                     (REAL)update->rate,   (REAL)update->root,  (REAL)update->epsilon, update->is_nesterov}; \
    } INLINE void sgd_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                               \
    {                                                                                                                        \
        (void)m, (void)v;                                                                                                    \
        *p -= by->rate * (g + by->decay * *p);                                                                               \
    }                                                                                                                        \
    INLINE void momentum_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                            \
    {                                                                                                                        \
        (void)v;                                                                                                             \
        g += by->decay * *p;                                                                                                 \
        *m = by->keep1 * *m + by->add1 * g;                                                                                  \
        *p -= by->rate * (by->is_nesterov ? g + by->beta1 * *m : *m);                                                        \
    }                                                                                                                        \
    INLINE void step_by_moments_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                     \
    {                                                                                                                        \
        *m = by->keep1 * *m + by->add1 * g;                                                                                  \
        *v = by->keep2 * *v + by->add2 * (g * g);                                                                            \
        *p -= by->rate * (*m / (by->root * SQUARE_ROOT(*v) + by->epsilon));                                                  \
    }                                                                                                                        \
    INLINE void adam_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                                \
    {                                                                                                                        \
        step_by_moments_##REAL(by, p, g + by->decay * *p, m, v);                                                             \
    }                                                                                                                        \
    INLINE void adamw_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                               \
    {                                                                                                                        \
        *p *= by->shrink;                                                                                                    \
        step_by_moments_##REAL(by, p, g, m, v);                                                                              \
    }                                                                                                                        \
    INLINE void adagrad_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                             \
    {                                                                                                                        \
        (void)v;                                                                                                             \
        g += by->decay * *p;                                                                                                 \
        *m += g * g;                                                                                                         \
        *p -= by->rate * (g / (SQUARE_ROOT(*m) + by->epsilon));                                                              \
    }                                                                                                                        \
    INLINE void lion_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                                \
    {                                                                                                                        \
        (void)v;                                                                                                             \
        const REAL u = by->keep1 * *m + by->add1 * g;                                                                        \
        const REAL sign = u > 0 ? (REAL)1 : u < 0 ? (REAL)-1 : u;                                                            \
        *p = *p * by->shrink - by->rate * sign;                                                                              \
        *m = by->keep2 * *m + by->add2 * g;                                                                                  \
    }

DEFINE_RULES(float, __builtin_sqrtf)
DEFINE_RULES(double, __builtin_sqrt)

/* The addresses of a range, in the types of a kernel. */
#define DEFINE_RANGE(FORMAT, MEMORY, VALUE)                                                                         \
    struct range_##FORMAT {                                                                                         \
        const MEMORY *gradient;                                                                                     \
        const VALUE *from_master, *from_first, *from_second;                                                        \
        VALUE *to_master, *to_first, *to_second;                                                                    \
        MEMORY *parameter;                                                                                          \
    };                                                                                                              \
    INLINE struct range_##FORMAT range_of_##FORMAT(const struct shoal_update_memory *memory) {                      \
        return (struct range_##FORMAT){memory->gradient,  memory->from_master, memory->from[0], memory->from[1],    \
                                       memory->to_master, memory->to[0],       memory->to[1],   memory->parameter}; \
    }

DEFINE_RANGE(float32, float, float)
DEFINE_RANGE(float64, double, double)
DEFINE_RANGE(bfloat16, uint16_t, float)
DEFINE_RANGE(float16, uint16_t, float)

/* STATES and has_copy are constants after inlining. */
#define DEFINE_UPDATE(RULE, STATES, FORMAT, MEMORY, VALUE)                                                                    \
    INLINE void RULE##_group_##FORMAT(const struct rates_##VALUE *by, const struct range_##FORMAT *at, size_t i,              \
                                      bool has_copy)                                                                          \
    {                                                                                                                         \
        VALUE g[GROUP], p[GROUP], m[GROUP] = {0}, v[GROUP] = {0};                                                             \
        load_##FORMAT(g, at->gradient + i);                                                                                   \
        memcpy(p, at->from_master + i, sizeof p);                                                                             \
        if ((STATES) > 0)                                                                                                     \
            memcpy(m, at->from_first + i, sizeof m);                                                                          \
        if ((STATES) > 1)                                                                                                     \
            memcpy(v, at->from_second + i, sizeof v);                                                                         \
        for (size_t k = 0; k < GROUP; k++)                                                                                    \
            RULE##_##VALUE(by, p + k, g[k] * by->factor, m + k, v + k);                                                       \
        memcpy(at->to_master + i, p, sizeof p);                                                                               \
        if ((STATES) > 0)                                                                                                     \
            memcpy(at->to_first + i, m, sizeof m);                                                                            \
        if ((STATES) > 1)                                                                                                     \
            memcpy(at->to_second + i, v, sizeof v);                                                                           \
        if (has_copy)                                                                                                         \
            store_##FORMAT(at->parameter + i, p);                                                                             \
    }                                                                                                                         \
    INLINE void RULE##_rest_##FORMAT(const struct rates_##VALUE *by, const struct range_##FORMAT *at, size_t i, size_t count, \
                                     bool has_copy)                                                                           \
    {                                                                                                                         \
        MEMORY gradient[GROUP] = {0}, parameter[GROUP] = {0};                                                                 \
        VALUE master[GROUP] = {0}, first[GROUP] = {0}, second[GROUP] = {0};                                                   \
        const struct range_##FORMAT local = {gradient, master, first, second, master, first, second, parameter};              \
        memcpy(gradient, at->gradient + i, count * sizeof *gradient);                                                         \
        memcpy(master, at->from_master + i, count * sizeof *master);                                                          \
        if ((STATES) > 0)                                                                                                     \
            memcpy(first, at->from_first + i, count * sizeof *first);                                                         \
        if ((STATES) > 1)                                                                                                     \
            memcpy(second, at->from_second + i, count * sizeof *second);                                                      \
        RULE##_group_##FORMAT(by, &local, 0, true);                                                                           \
        memcpy(at->to_master + i, master, count * sizeof *master);                                                            \
        if ((STATES) > 0)                                                                                                     \
            memcpy(at->to_first + i, first, count * sizeof *first);                                                           \
        if ((STATES) > 1)                                                                                                     \
            memcpy(at->to_second + i, second, count * sizeof *second);                                                        \
        if (has_copy)                                                                                                         \
            memcpy(at->parameter + i, parameter, count * sizeof *parameter);                                                  \
    }                                                                                                                         \
    INLINE void RULE##_all_##FORMAT(const struct rates_##VALUE *by, const struct range_##FORMAT *at, size_t count,            \
                                    bool has_copy)                                                                            \
    {                                                                                                                         \
        size_t i = 0;                                                                                                         \
        for (; i + GROUP <= count; i += GROUP)                                                                                \
            RULE##_group_##FORMAT(by, at, i, has_copy);                                                                       \
        if (i < count)                                                                                                        \
            RULE##_rest_##FORMAT(by, at, i, count - i, has_copy);                                                             \
    }                                                                                                                         \
    static void RULE##_##FORMAT(const struct shoal_update *update, const struct shoal_update_memory *memory, size_t count)    \
    {                                                                                                                         \
        SHOAL_DEFAULT_FLOATS;                                                                                                 \
        const struct rates_##VALUE by = rates_of_##VALUE(update);                                                             \
        const struct range_##FORMAT at = range_of_##FORMAT(memory);                                                           \
        if ((void *)at.parameter == (void *)at.to_master)                                                                     \
            RULE##_all_##FORMAT(&by, &at, count, false);                                                                      \
        else                                                                                                                  \
            RULE##_all_##FORMAT(&by, &at, count, true);                                                                       \
    }

#define DEFINE_UPDATES(RULE, STATES)                       \
    DEFINE_UPDATE(RULE, STATES, float32, float, float)     \
    DEFINE_UPDATE(RULE, STATES, float64, double, double)   \
    DEFINE_UPDATE(RULE, STATES, bfloat16, uint16_t, float) \
    DEFINE_UPDATE(RULE, STATES, float16, uint16_t, float)

DEFINE_UPDATES(sgd, 0)
DEFINE_UPDATES(momentum, 1)
DEFINE_UPDATES(adam, 2)
DEFINE_UPDATES(adamw, 2)
DEFINE_UPDATES(adagrad, 1)
DEFINE_UPDATES(lion, 1)

#define UPDATES_OF(RULE)                                                                                        \
    {                                                                                                           \
        [SHOAL_FLOAT32] = RULE##_float32, [SHOAL_FLOAT64] = RULE##_float64, [SHOAL_BFLOAT16] = RULE##_bfloat16, \
        [SHOAL_FLOAT16] = RULE##_float16                                                                        \
    }
#define UPDATE_KERNELS                                                                    \
    {                                                                                     \
        [SHOAL_RULE_SGD] = UPDATES_OF(sgd), [SHOAL_RULE_MOMENTUM] = UPDATES_OF(momentum), \
        [SHOAL_RULE_ADAM] = UPDATES_OF(adam), [SHOAL_RULE_ADAMW] = UPDATES_OF(adamw),     \
        [SHOAL_RULE_ADAGRAD] = UPDATES_OF(adagrad), [SHOAL_RULE_LION] = UPDATES_OF(lion)  \
    }
