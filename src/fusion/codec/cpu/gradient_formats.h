/* Conversion between elements in memory and computed values, for the kernels of src/fusion/codec. Only the body files of the
 * kernels include this; GROUP elements are converted at a time. Compilers vectorize the loops. */
#ifndef SHOAL_FUSION_GRADIENT_FORMATS_H
#define SHOAL_FUSION_GRADIENT_FORMATS_H

#include <math.h>
#include <string.h>

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

#include "fusion/fusion.h"

#define GROUP 16
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float x)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

INLINE float float_of(uint32_t word)
{
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

INLINE float bfloat16_widen(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* Rounds to nearest, ties to even; the carry turns values that are too large into infinity. */
INLINE uint16_t bfloat16_narrow(float x)
{
    const uint32_t word = bits_of(x);
    const uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

/* After Marat Dukhan's library FP16: the exponent's bias changes from 15 to 127. A subnormal has no exponent; it gets a leading
 * 1 that is then subtracted. */
INLINE float float16_widen(uint16_t half)
{
    const uint32_t word = (uint32_t)half << 16, sign = word & 0x80000000u, twice = word + word;
    const float normal = float_of((twice >> 4) + (UINT32_C(0xe0) << 23)) * 0x1.0p-112f;
    const float subnormal = float_of((twice >> 17) | (UINT32_C(126) << 23)) - 0.5f;
    return float_of(sign | bits_of(twice < (UINT32_C(1) << 27) ? subnormal : normal));
}

/* Adds a power of two of suitable size to x, so that the bits that float16 keeps are, rounded, at the end of the sum's
 * mantissa. */
INLINE uint16_t float16_narrow(float x)
{
    const uint32_t word = bits_of(x), twice = word + word, sign = word & 0x80000000u;
    const uint32_t exponent = twice & 0xff000000u, floor = exponent < 0x71000000u ? 0x71000000u : exponent;
    const float base = fabsf(x) * 0x1.0p+112f * 0x1.0p-110f;
    const uint32_t sum = bits_of(float_of((floor >> 1) + 0x07800000u) + base);
    const uint32_t rounded = (sum >> 13 & 0x7c00u) + (sum & 0x0fffu);
    return (uint16_t)(twice > 0xff000000u ? 0x7e00u : sign >> 16 | rounded);
}

INLINE void copy_float32(float *to, const float *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = from[i];
}
#define load_float32 copy_float32
#define store_float32 copy_float32

INLINE void copy_float64(double *to, const double *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = from[i];
}
#define load_float64 copy_float64
#define store_float64 copy_float64

INLINE void load_bfloat16(float *to, const uint16_t *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = bfloat16_widen(from[i]);
}

INLINE void store_bfloat16(uint16_t *to, const float *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = bfloat16_narrow(from[i]);
}

#if defined(__F16C__) && defined(__AVX2__)
INLINE void load_float16(float *to, const uint16_t *from)
{
    for (size_t i = 0; i < GROUP; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + i))));
}

INLINE void store_float16(uint16_t *to, const float *from)
{
    const __m256 nan = _mm256_set1_ps(__builtin_nanf(""));
    for (size_t i = 0; i < GROUP; i += 8) {
        const __m256 x = _mm256_loadu_ps(from + i), canonical = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(void *)(to + i), _mm256_cvtps_ph(canonical, _MM_FROUND_TO_NEAREST_INT));
    }
}
#else
INLINE void load_float16(float *to, const uint16_t *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = float16_widen(from[i]);
}

INLINE void store_float16(uint16_t *to, const float *from)
{
    for (size_t i = 0; i < GROUP; i++)
        to[i] = float16_narrow(from[i]);
}
#endif

#define float32_widen(x) (x)
#define float32_narrow(x) (x)
#define float64_widen(x) (x)
#define float64_narrow(x) (x)

/* True if rounding may make an element in memory differ from the computed value. */
#define float32_rounds false
#define float64_rounds false
#define bfloat16_rounds true
#define float16_rounds true

/* Adds in a fixed order. */
INLINE double add_up(const double *partial)
{
    double half[GROUP / 2], quarter[GROUP / 4];
    for (size_t i = 0; i < GROUP / 2; i++)
        half[i] = partial[i] + partial[i + GROUP / 2];
    for (size_t i = 0; i < GROUP / 4; i++)
        quarter[i] = half[i] + half[i + GROUP / 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

#endif
