/* Lanes: one element, or a vector of them, in the type it is computed in. Each type has <lane>_one and <lane>_lanes, and for
 * both the three steps of a reduction: take, combine, finish. Only kernels include this header: a vector is as wide as the
 * registers of the instruction set for which the file is compiled. Reentrant. */
#ifndef SHOAL_KERNELS_LANES_H
#define SHOAL_KERNELS_LANES_H

#include <string.h>

#include "base/compiler.h"

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

#if defined(__CUDA__) /* compiled for a GPU */
#define INLINE static inline __attribute__((always_inline, host, device))
#else
#define INLINE static inline __attribute__((always_inline))
#endif
#define NOINLINE static __attribute__((noinline, unused))
#define VECTOR __attribute__((vector_size(WIDTH)))

typedef uint64_t bits VECTOR; /* a vector of lanes of any type */
typedef bits bits_anywhere __attribute__((aligned(1), may_alias));

/* The arguments that all functions share. */
struct work {
    void *const *dests;
    int dest_count;
    const void *const *sources;
    int source_count;
    double argument; /* number of ranks, or scale */
    double factor;   /* 1 / ranks if that is exact (a power of two): the product then has the bits of the quotient; else 0 */
};

/* ---- Steps ------------------------------------------------------------------------------------------------------------ */

#define PICK_ONE(mask, yes, no) ((mask) ? (yes) : (no))
#define PICK_LANES(mask, yes, no) ((__typeof__(no))(((mask) & (__typeof__(mask))(yes)) | (~(mask) & (__typeof__(mask))(no))))

/* Combines two values. Integers are added and multiplied in the unsigned type WRAPPING; for floats this is the float itself. */
#define DEFINE_COMBINE(T, WRAPPING, PICK, MORE_CASES) \
    INLINE T T##_combine(enum shoal_op op, T a, T b)  \
    {                                                 \
        switch (op) {                                 \
        case SHOAL_MAX:                               \
            return PICK((b > a) | (b != b), b, a);    \
        case SHOAL_MIN:                               \
            return PICK((b < a) | (b != b), b, a);    \
        case SHOAL_PROD:                              \
            return (T)((WRAPPING)a * (WRAPPING)b);    \
            MORE_CASES                                \
        default: /* sum, avg, scaled sum */           \
            return (T)((WRAPPING)a + (WRAPPING)b);    \
        }                                             \
    }

#define NO_MORE_CASES
#define BITWISE_CASES(T)   \
    case SHOAL_BITAND:     \
        return (T)(a & b); \
    case SHOAL_BITOR:      \
        return (T)(a | b); \
    case SHOAL_BITXOR:     \
        return (T)(a ^ b);

/* Returns the factor of a work for an average. */
INLINE double exact_inverse(double ranks)
{
    const int64_t whole = (int64_t)ranks;
    return (whole & (whole - 1)) == 0 ? 1 / ranks : 0;
}

/* Divides in the type QUOTIENT. */
#define AVERAGE(QUOTIENT, sum, work) \
    ((QUOTIENT)(work)->factor != 0 ? (sum) * (QUOTIENT)(work)->factor : (sum) / (QUOTIENT)(work)->argument)

/* take: what an element contributes to the result. finish: what remains to be done with the result; less if the result is known
 * to be ordered (no NaN). */
#define DEFINE_FLOAT_FORM(T, ONE, PICK, QUIET_NAN)                              \
    DEFINE_COMBINE(T, T, PICK, NO_MORE_CASES)                                   \
    INLINE T T##_take(enum shoal_op op, T x, const struct work *work)           \
    {                                                                           \
        if (op == SHOAL_SCALED_SUM)                                             \
            return x * (ONE)work->argument;                                     \
        return x;                                                               \
    }                                                                           \
    INLINE T T##_finish_ordered(enum shoal_op op, T x, const struct work *work) \
    {                                                                           \
        if (op == SHOAL_AVG)                                                    \
            return AVERAGE(ONE, x, work);                                       \
        return x;                                                               \
    }                                                                           \
    INLINE T T##_finish(enum shoal_op op, T x, const struct work *work)         \
    {                                                                           \
        x = T##_finish_ordered(op, x, work);                                    \
        return PICK(x != x, (T){0} + (ONE)(QUIET_NAN), x);                      \
    }

#define DEFINE_FLOAT(LANE, ONE, QUIET_NAN)                  \
    typedef ONE LANE##_one;                                 \
    typedef ONE LANE##_lanes VECTOR;                        \
    DEFINE_FLOAT_FORM(LANE##_one, ONE, PICK_ONE, QUIET_NAN) \
    DEFINE_FLOAT_FORM(LANE##_lanes, ONE, PICK_LANES, QUIET_NAN)

#define DEFINE_INTEGER_FORM(T, WRAPPING, UNSIGNED, PICK)                 \
    DEFINE_COMBINE(T, WRAPPING, PICK, BITWISE_CASES(T))                  \
    INLINE T T##_take(enum shoal_op op, T x, const struct work *work)    \
    {                                                                    \
        if (op == SHOAL_SCALED_SUM)                                      \
            return (T)((WRAPPING)x * (UNSIGNED)(int64_t)work->argument); \
        return x;                                                        \
    }

/* No processor divides vectors of integers, so averages are computed one by one, out of line. If there is a float type that is
 * wider than the integer, the division uses it: compilers make vectors of it, and the truncated quotient is exact. The function
 * is pure, so that unused averages are removed. */
#define DEFINE_INTEGER(LANE, ONE, UNSIGNED, QUOTIENT)                                                         \
    typedef ONE LANE##_one;                                                                                   \
    typedef ONE LANE##_lanes VECTOR;                                                                          \
    typedef UNSIGNED LANE##_wrapping VECTOR;                                                                  \
    DEFINE_INTEGER_FORM(LANE##_one, UNSIGNED, UNSIGNED, PICK_ONE)                                             \
    DEFINE_INTEGER_FORM(LANE##_lanes, LANE##_wrapping, UNSIGNED, PICK_LANES)                                  \
    INLINE LANE##_one LANE##_one_finish(enum shoal_op op, LANE##_one x, const struct work *work)              \
    {                                                                                                         \
        if (op == SHOAL_AVG)                                                                                  \
            return (ONE)AVERAGE(QUOTIENT, (QUOTIENT)x, work);                                                 \
        return x;                                                                                             \
    }                                                                                                         \
    __attribute__((pure)) NOINLINE LANE##_lanes LANE##_lanes_average(LANE##_lanes x, const struct work *work) \
    {                                                                                                         \
        LANE##_one *each = (LANE##_one *)&x;                                                                  \
        for (size_t i = 0; i < sizeof(x) / sizeof(*each); i++)                                                \
            each[i] = LANE##_one_finish(SHOAL_AVG, each[i], work);                                            \
        return x;                                                                                             \
    }                                                                                                         \
    INLINE LANE##_lanes LANE##_lanes_finish(enum shoal_op op, LANE##_lanes x, const struct work *work)        \
    {                                                                                                         \
        if (op == SHOAL_AVG)                                                                                  \
            return LANE##_lanes_average(x, work);                                                             \
        return x;                                                                                             \
    }

/* ---- The lanes -------------------------------------------------------------------------------------------------------- */

DEFINE_FLOAT(f32, float, __builtin_nanf(""))
DEFINE_FLOAT(f64, double, __builtin_nan(""))
DEFINE_INTEGER(i64, int64_t, uint64_t, int64_t)
DEFINE_INTEGER(i32, int32_t, uint32_t, double)
DEFINE_INTEGER(i8, int8_t, uint8_t, float)
DEFINE_INTEGER(u8, uint8_t, uint8_t, float)

/* The bits of f32; only formats compute with them. */
typedef uint32_t u32_one;
typedef u32_one u32_lanes VECTOR;

#endif
