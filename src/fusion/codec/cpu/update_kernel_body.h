/* The update kernels; gradient_kernel_body.h includes this once for each instruction set. Not a header for other files.
 *
 * Each rule is written for one element; compilers vectorize the loops. Products are never fused with sums. */
#include "base/floats.h"
#include "fusion/codec/cpu/gradient_formats.h"
#include "fusion/codec/gradient_kernels.h"

/* The rules for one element, in the type REAL. In LION, u - u is zero, or NaN if u is NaN or infinite, which must not
 * vanish. */
#define DEFINE_RULES(REAL, SQUARE_ROOT)                                                                                      \
    struct rates_##REAL {                                                                                                    \
        REAL factor, decay, shrink, keep1, add1, keep2, add2, beta1, rate, root, epsilon, unbias;                            \
        bool is_nesterov;                                                                                                    \
    };                                                                                                                       \
    INLINE struct rates_##REAL rates_of_##REAL(const struct shoal_update *update) {                                          \
        return (struct rates_##REAL){(REAL)update->factor, (REAL)update->decay, (REAL)update->shrink,  (REAL)update->keep1,  \
                                     (REAL)update->add1,   (REAL)update->keep2, (REAL)update->add2,    (REAL)update->beta1,  \
                                     (REAL)update->rate,   (REAL)update->root,  (REAL)update->epsilon, (REAL)update->unbias, \
                                     update->is_nesterov};                                                                   \
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
    INLINE REAL direction_##REAL(const struct rates_##REAL *by, REAL p, REAL m, REAL v)                                      \
    {                                                                                                                        \
        return by->unbias * m / (by->root * SQUARE_ROOT(v) + by->epsilon) + by->decay * p;                                   \
    }                                                                                                                        \
    INLINE void lamb_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                                \
    {                                                                                                                        \
        (void)g;                                                                                                             \
        *p -= by->rate * direction_##REAL(by, *p, *m, *v);                                                                   \
    }                                                                                                                        \
    INLINE void lion_##REAL(const struct rates_##REAL *by, REAL *p, REAL g, REAL *m, REAL *v)                                \
    {                                                                                                                        \
        (void)v;                                                                                                             \
        const REAL u = by->keep1 * *m + by->add1 * g;                                                                        \
        const REAL sign = (REAL)(u > 0) - (REAL)(u < 0) + (u - u);                                                           \
        *p = *p * by->shrink - by->rate * sign;                                                                              \
        *m = by->keep2 * *m + by->add2 * g;                                                                                  \
    }

DEFINE_RULES(float, __builtin_sqrtf)
DEFINE_RULES(double, __builtin_sqrt)

/* Loops over elements have no dependence between elements, although memory that is read may be the memory that is written:
 * compilers need not check for overlaps before they vectorize. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* STATES is a constant after inlining, and so is whether copy is NULL. */
#define DEFINE_LOOP(RULE, STATES, FORMAT, MEMORY, REAL)                                                                     \
    INLINE void RULE##_loop_##FORMAT(const struct rates_##REAL *by, const struct shoal_update_memory *memory, size_t begin, \
                                     const MEMORY *gradient, MEMORY *copy, size_t count)                                    \
    {                                                                                                                       \
        const REAL *from_master = (const REAL *)memory->from_master + begin;                                                \
        const REAL *from_first = (STATES) > 0 ? (const REAL *)memory->from[0] + begin : NULL;                               \
        const REAL *from_second = (STATES) > 1 ? (const REAL *)memory->from[1] + begin : NULL;                              \
        REAL *to_master = (REAL *)memory->to_master + begin;                                                                \
        REAL *to_first = (STATES) > 0 ? (REAL *)memory->to[0] + begin : NULL;                                               \
        REAL *to_second = (STATES) > 1 ? (REAL *)memory->to[1] + begin : NULL;                                              \
        const struct rates_##REAL rates = *by; /* no store can change it */                                                 \
        INDEPENDENT                                                                                                         \
        for (size_t i = 0; i < count; i++) {                                                                                \
            REAL p = from_master[i], m = (STATES) > 0 ? from_first[i] : 0, v = (STATES) > 1 ? from_second[i] : 0;           \
            RULE##_##REAL(&rates, &p, FORMAT##_widen(gradient[i]) * rates.factor, &m, &v);                                  \
            to_master[i] = p;                                                                                               \
            if ((STATES) > 0)                                                                                               \
                to_first[i] = m;                                                                                            \
            if ((STATES) > 1)                                                                                               \
                to_second[i] = v;                                                                                           \
            if (copy)                                                                                                       \
                copy[i] = FORMAT##_narrow(p);                                                                               \
        }                                                                                                                   \
    }

#define DEFINE_WIDE_UPDATE(RULE, FORMAT, REAL)                                                                             \
    static void RULE##_##FORMAT(const struct shoal_update *update, const struct shoal_update_memory *memory, size_t count) \
    {                                                                                                                      \
        SHOAL_DEFAULT_FLOATS;                                                                                              \
        const struct rates_##REAL by = rates_of_##REAL(update);                                                            \
        if (memory->parameter == memory->to_master)                                                                        \
            RULE##_loop_##FORMAT(&by, memory, 0, memory->gradient, NULL, count);                                           \
        else                                                                                                               \
            RULE##_loop_##FORMAT(&by, memory, 0, memory->gradient, memory->parameter, count);                              \
    }

#define DEFINE_UPDATES(RULE, STATES)                     \
    DEFINE_LOOP(RULE, STATES, float32, float, float)     \
    DEFINE_LOOP(RULE, STATES, float64, double, double)   \
    DEFINE_LOOP(RULE, STATES, bfloat16, uint16_t, float) \
    DEFINE_LOOP(RULE, STATES, float16, uint16_t, float)  \
    DEFINE_WIDE_UPDATE(RULE, float32, float)             \
    DEFINE_WIDE_UPDATE(RULE, float64, double)            \
    DEFINE_WIDE_UPDATE(RULE, bfloat16, float)            \
    DEFINE_WIDE_UPDATE(RULE, float16, float)

DEFINE_UPDATES(sgd, 0)
DEFINE_UPDATES(momentum, 1)
DEFINE_UPDATES(adam, 2)
DEFINE_UPDATES(adamw, 2)
DEFINE_UPDATES(adagrad, 1)
DEFINE_UPDATES(lion, 1)
DEFINE_UPDATES(lamb, 2)

/* Element i of a range always goes to partial sum i % GROUP of its chunk, and the chunks' sums are added in order. */
#define DEFINE_MOMENTS(FORMAT, MEMORY, REAL)                                                                                  \
    INLINE void moments_of_##FORMAT(const struct rates_##REAL *by, const struct shoal_update_memory *memory, size_t begin,    \
                                    size_t count, double *masters, double *directions)                                        \
    {                                                                                                                         \
        const MEMORY *gradient = (const MEMORY *)memory->gradient + begin;                                                    \
        const REAL *master = (const REAL *)memory->from_master + begin;                                                       \
        const REAL *from_first = (const REAL *)memory->from[0] + begin, *from_second = (const REAL *)memory->from[1] + begin; \
        REAL *to_first = (REAL *)memory->to[0] + begin, *to_second = (REAL *)memory->to[1] + begin;                           \
        INDEPENDENT                                                                                                           \
        for (size_t k = 0; k < count; k++) {                                                                                  \
            const REAL g = FORMAT##_widen(gradient[k]) * by->factor;                                                          \
            const REAL m = by->keep1 * from_first[k] + by->add1 * g, v = by->keep2 * from_second[k] + by->add2 * (g * g);     \
            const double p = (double)master[k], u = (double)direction_##REAL(by, master[k], m, v);                            \
            to_first[k] = m;                                                                                                  \
            to_second[k] = v;                                                                                                 \
            masters[k] += p * p;                                                                                              \
            directions[k] += u * u;                                                                                           \
        }                                                                                                                     \
    }                                                                                                                         \
    static void moments_##FORMAT(const struct shoal_update *update, const struct shoal_update_memory *memory, size_t count,   \
                                 double squared[2])                                                                           \
    {                                                                                                                         \
        SHOAL_DEFAULT_FLOATS;                                                                                                 \
        const struct rates_##REAL by = rates_of_##REAL(update);                                                               \
        for (size_t i = 0; i < count;) {                                                                                      \
            const size_t end = fusion_min(count, i + SHOAL_GRADIENT_SQUARED_CHUNK);                                           \
            double masters[GROUP] = {0}, directions[GROUP] = {0};                                                             \
            for (; i + GROUP <= end; i += GROUP)                                                                              \
                moments_of_##FORMAT(&by, memory, i, GROUP, masters, directions);                                              \
            moments_of_##FORMAT(&by, memory, i, end - i, masters, directions);                                                \
            i = end;                                                                                                          \
            squared[0] += add_up(masters);                                                                                    \
            squared[1] += add_up(directions);                                                                                 \
        }                                                                                                                     \
    }

DEFINE_MOMENTS(float32, float, float)
DEFINE_MOMENTS(float64, double, double)
DEFINE_MOMENTS(bfloat16, uint16_t, float)
DEFINE_MOMENTS(float16, uint16_t, float)

#define UPDATES_OF(RULE)                                                                                        \
    {                                                                                                           \
        [SHOAL_FLOAT32] = RULE##_float32, [SHOAL_FLOAT64] = RULE##_float64, [SHOAL_BFLOAT16] = RULE##_bfloat16, \
        [SHOAL_FLOAT16] = RULE##_float16                                                                        \
    }
#define UPDATE_KERNELS                                                                                                         \
    {                                                                                                                          \
        [SHOAL_RULE_SGD] = UPDATES_OF(sgd), [SHOAL_RULE_MOMENTUM] = UPDATES_OF(momentum),                                      \
        [SHOAL_RULE_ADAM] = UPDATES_OF(adam), [SHOAL_RULE_ADAMW] = UPDATES_OF(adamw),                                          \
        [SHOAL_RULE_ADAGRAD] = UPDATES_OF(adagrad), [SHOAL_RULE_LION] = UPDATES_OF(lion), [SHOAL_RULE_LAMB] = UPDATES_OF(lamb) \
    }
#define MOMENT_KERNELS                                                                                             \
    {                                                                                                              \
        [SHOAL_FLOAT32] = moments_float32, [SHOAL_FLOAT64] = moments_float64, [SHOAL_BFLOAT16] = moments_bfloat16, \
        [SHOAL_FLOAT16] = moments_float16                                                                          \
    }
