/* The gradient kernels; the file of each instruction set includes this once. Not a header for other files.
 *
 * Loops run over groups of GROUP elements; compilers vectorize the inner loops. Element i of a call always goes to partial sum
 * i % GROUP, and products are never fused with sums. So all instruction sets compute the same bits, whatever the caller's
 * floating-point state. */
#include "base/floats.h"
#include "fusion/codec/cpu/gradient_formats.h"
#include "fusion/codec/cpu/update_kernel_body.h"
#include "fusion/codec/gradient_kernels.h"

/* ---- Moves -------------------------------------------------------------------------------------------------------------- */

/* The flags are compile-time constants after inlining. */
#define DEFINE_MOVE(FORMAT, MEMORY, VALUE)                                                                                \
    INLINE void move_any_##FORMAT(MEMORY *dest, const MEMORY *source, size_t count, VALUE factor, bool writes, bool adds, \
                                  double *squared)                                                                        \
    {                                                                                                                     \
        for (size_t i = 0; i < count;) {                                                                                  \
            const size_t end = fusion_min(count, i + SHOAL_GRADIENT_SQUARED_CHUNK);                                       \
            double partial[GROUP] = {0};                                                                                  \
            for (; i + GROUP <= end; i += GROUP) {                                                                        \
                VALUE value[GROUP], old[GROUP];                                                                           \
                load_##FORMAT(value, source + i);                                                                         \
                if (adds)                                                                                                 \
                    load_##FORMAT(old, dest + i);                                                                         \
                for (size_t k = 0; k < GROUP; k++)                                                                        \
                    value[k] = adds ? old[k] + value[k] * factor : value[k] * factor;                                     \
                if (writes)                                                                                               \
                    store_##FORMAT(dest + i, value);                                                                      \
                if (writes && squared && FORMAT##_rounds)                                                                 \
                    load_##FORMAT(value, dest + i);                                                                       \
                for (size_t k = 0; k < GROUP && squared; k++)                                                             \
                    partial[k] += (double)value[k] * (double)value[k];                                                    \
            }                                                                                                             \
            for (size_t k = 0; i < end; i++, k++) {                                                                       \
                VALUE value = FORMAT##_widen(source[i]) * factor;                                                         \
                if (adds)                                                                                                 \
                    value = FORMAT##_widen(dest[i]) + value;                                                              \
                const MEMORY rounded = FORMAT##_narrow(value);                                                            \
                if (writes)                                                                                               \
                    dest[i] = rounded;                                                                                    \
                value = writes ? FORMAT##_widen(rounded) : value;                                                         \
                partial[k] += (double)value * (double)value;                                                              \
            }                                                                                                             \
            if (squared)                                                                                                  \
                *squared += add_up(partial);                                                                              \
        }                                                                                                                 \
    }                                                                                                                     \
    static void move_##FORMAT(void *dest, const void *source, size_t count, double factor, bool adds, double *squared)    \
    {                                                                                                                     \
        SHOAL_DEFAULT_FLOATS;                                                                                             \
        SHOAL_FLOATS_PIN(factor);                                                                                         \
        const VALUE by = (VALUE)factor;                                                                                   \
        if (!dest)                                                                                                        \
            move_any_##FORMAT(NULL, source, count, by, false, false, squared);                                            \
        else if (adds && squared)                                                                                         \
            move_any_##FORMAT(dest, source, count, by, true, true, squared);                                              \
        else if (adds)                                                                                                    \
            move_any_##FORMAT(dest, source, count, by, true, true, NULL);                                                 \
        else if (squared)                                                                                                 \
            move_any_##FORMAT(dest, source, count, by, true, false, squared);                                             \
        else if (factor != 1)                                                                                             \
            move_any_##FORMAT(dest, source, count, by, true, false, NULL);                                                \
        else if (dest != source)                                                                                          \
            memcpy(dest, source, count * sizeof(MEMORY));                                                                 \
    }

DEFINE_MOVE(float32, float, float)
DEFINE_MOVE(float64, double, double)
DEFINE_MOVE(bfloat16, uint16_t, float)
DEFINE_MOVE(float16, uint16_t, float)

/* ---- Casts -------------------------------------------------------------------------------------------------------------- */

#define DEFINE_CASTS(FORMAT)                                                                   \
    static void to_##FORMAT(uint16_t *dest, const float *source, size_t count, float factor)   \
    {                                                                                          \
        SHOAL_DEFAULT_FLOATS;                                                                  \
        size_t i = 0;                                                                          \
        for (; i + GROUP <= count; i += GROUP) {                                               \
            float value[GROUP];                                                                \
            for (size_t k = 0; k < GROUP; k++)                                                 \
                value[k] = source[i + k] * factor;                                             \
            store_##FORMAT(dest + i, value);                                                   \
        }                                                                                      \
        for (; i < count; i++)                                                                 \
            dest[i] = FORMAT##_narrow(source[i] * factor);                                     \
    }                                                                                          \
    static void from_##FORMAT(float *dest, const uint16_t *source, size_t count, float factor) \
    {                                                                                          \
        SHOAL_DEFAULT_FLOATS;                                                                  \
        size_t i = 0;                                                                          \
        for (; i + GROUP <= count; i += GROUP) {                                               \
            float value[GROUP];                                                                \
            load_##FORMAT(value, source + i);                                                  \
            for (size_t k = 0; k < GROUP; k++)                                                 \
                dest[i + k] = value[k] * factor;                                               \
        }                                                                                      \
        for (; i < count; i++)                                                                 \
            dest[i] = FORMAT##_widen(source[i]) * factor;                                      \
    }

DEFINE_CASTS(bfloat16)
DEFINE_CASTS(float16)

/* ---- 8-bit blocks ------------------------------------------------------------------------------------------------------- */

#define ROUNDER 0x1.8p+23f /* adding and subtracting it rounds to an integer, to nearest even, up to 2^22 */

/* Returns the largest |source + error|, or NaN if any is not finite. */
INLINE float largest(const float *source, const float *error, size_t count)
{
    float most[GROUP] = {0}, bad[GROUP] = {0};
    size_t i = 0;
    for (; i + GROUP <= count; i += GROUP)
        for (size_t k = 0; k < GROUP; k++) {
            const float u = error ? source[i + k] + error[i + k] : source[i + k], size = fabsf(u);
            most[k] = size > most[k] ? size : most[k];
            bad[k] += u - u;
        }
    for (size_t k = 0; i < count; i++, k++) {
        const float u = error ? source[i] + error[i] : source[i], size = fabsf(u);
        most[k] = size > most[k] ? size : most[k];
        bad[k] += u - u;
    }
    float all = 0, is_bad = 0;
    for (size_t k = 0; k < GROUP; k++) {
        all = most[k] > all ? most[k] : all;
        is_bad += bad[k];
    }
    return all + is_bad;
}

INLINE void quantize_block(int8_t *values, float scale, const float *source, float *error, size_t count)
{
    const float inverse = scale > 0 ? 1 / scale : 0;      /* also 0 for NaN */
    const float part = inverse < 0x1p+126f ? inverse : 0; /* a block of subnormals quantizes to zero; `error` keeps it */
    for (size_t i = 0; i < count; i++) {
        const float u = error ? source[i] + error[i] : source[i];
        float whole = (u * part + ROUNDER) - ROUNDER;
        whole = whole > 127 ? 127 : whole;
        whole = whole < -127 ? -127 : whole;
        values[i] = (int8_t)(part > 0 ? (int)whole : 0);
        if (error)
            error[i] = scale == scale ? u - (part > 0 ? whole * scale : 0) : 0;
    }
}

static void quantize(int8_t *values, float *scales, const float *source, float *error, size_t count)
{
    SHOAL_DEFAULT_FLOATS;
    for (size_t at = 0; at < count; at += SHOAL_GRADIENT_BLOCK, scales++) {
        const size_t n = count - at < SHOAL_GRADIENT_BLOCK ? count - at : SHOAL_GRADIENT_BLOCK;
        *scales = largest(source + at, error ? error + at : NULL, n) / 127;
        quantize_block(values + at, *scales, source + at, error ? error + at : NULL, n);
    }
}

static void dequantize(float *dest, const int8_t *values, const float *scales, size_t count, float factor, bool adds)
{
    SHOAL_DEFAULT_FLOATS;
    for (size_t at = 0; at < count; at += SHOAL_GRADIENT_BLOCK, scales++) {
        const size_t n = count - at < SHOAL_GRADIENT_BLOCK ? count - at : SHOAL_GRADIENT_BLOCK;
        const float scale = *scales * factor;
        for (size_t i = at; i < at + n; i++)
            dest[i] = adds ? dest[i] + (float)values[i] * scale : (float)values[i] * scale;
    }
}

extern const struct shoal_gradient_kernels KERNELS_SYMBOL;
const struct shoal_gradient_kernels KERNELS_SYMBOL = {
    .name = KERNELS_NAME,
    .move = {[SHOAL_FLOAT32] = move_float32,
             [SHOAL_FLOAT64] = move_float64,
             [SHOAL_BFLOAT16] = move_bfloat16,
             [SHOAL_FLOAT16] = move_float16},
    .to_float16 = to_float16,
    .to_bfloat16 = to_bfloat16,
    .from_float16 = from_float16,
    .from_bfloat16 = from_bfloat16,
    .quantize = quantize,
    .dequantize = dequantize,
    .update = UPDATE_KERNELS,
    .moments = MOMENT_KERNELS,
};
