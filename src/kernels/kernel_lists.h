/* The types and operators of the reduction kernels, for the processor (kernel_body.h) and for GPUs
 * (device/cuda/kernels/gpu_kernel_body.h). Only kernels include this header.
 *
 * A new type is a row of TYPES (and one of lanes.h if its lanes are new). A new operator is a case of combine in lanes.h and a
 * row of FLOAT_OPS or INTEGER_OPS. Afterwards run dev/ptx.py, which writes the GPU kernels again. */
#ifndef SHOAL_KERNELS_KERNEL_LISTS_H
#define SHOAL_KERNELS_KERNEL_LISTS_H

/* type, element in memory, lane it is computed in, format between the two, operators, and the type whose loops serve the
 * operators that do not depend on a sign */
#define TYPES(X)                                              \
    X(FLOAT32, float, f32, plain, FLOAT_OPS, FLOAT32)         \
    X(FLOAT64, double, f64, plain, FLOAT_OPS, FLOAT64)        \
    X(BFLOAT16, uint16_t, f32, bfloat16, FLOAT_OPS, BFLOAT16) \
    X(FLOAT16, uint16_t, f32, float16, FLOAT_OPS, FLOAT16)    \
    X(INT64, int64_t, i64, plain, INTEGER_OPS, INT64)         \
    X(INT32, int32_t, i32, plain, INTEGER_OPS, INT32)         \
    X(INT8, int8_t, i8, plain, INTEGER_OPS, UINT8)            \
    X(UINT8, uint8_t, u8, plain, INTEGER_OPS, UINT8)

/* type, operator, type whose loops serve; the bitwise operators do not even depend on a width */
#define FLOAT_OPS(X, TYPE, UNSIGNED) \
    X(TYPE, SUM, TYPE)               \
    X(TYPE, AVG, TYPE)               \
    X(TYPE, MAX, TYPE)               \
    X(TYPE, MIN, TYPE)               \
    X(TYPE, PROD, TYPE)              \
    X(TYPE, SCALED_SUM, TYPE)
#define INTEGER_OPS(X, TYPE, UNSIGNED) \
    X(TYPE, SUM, UNSIGNED)             \
    X(TYPE, AVG, TYPE)                 \
    X(TYPE, MAX, TYPE)                 \
    X(TYPE, MIN, TYPE)                 \
    X(TYPE, PROD, UNSIGNED)            \
    X(TYPE, BITAND, UINT8)             \
    X(TYPE, BITOR, UINT8)              \
    X(TYPE, BITXOR, UINT8)             \
    X(TYPE, SCALED_SUM, UNSIGNED)

/* Expands to the arguments that follow if the operator's loops are the type's own, and to nothing if another type's loops
 * serve. */
#define OWN_LOOPS(TYPE, LOOPS, ...) OWN_##TYPE##_##LOOPS(__VA_ARGS__)
#define OWN_FLOAT32_FLOAT32(...) __VA_ARGS__
#define OWN_FLOAT64_FLOAT64(...) __VA_ARGS__
#define OWN_BFLOAT16_BFLOAT16(...) __VA_ARGS__
#define OWN_FLOAT16_FLOAT16(...) __VA_ARGS__
#define OWN_INT64_INT64(...) __VA_ARGS__
#define OWN_INT32_INT32(...) __VA_ARGS__
#define OWN_INT8_INT8(...) __VA_ARGS__
#define OWN_UINT8_UINT8(...) __VA_ARGS__
#define OWN_INT64_UINT8(...)
#define OWN_INT32_UINT8(...)
#define OWN_INT8_UINT8(...)

#endif
