/* Formats: how elements in memory become lanes, and lanes elements. A format has widen and round for one element, and load and
 * pack for a vector of memory. NaN is the one quiet NaN by the time it is rounded or packed. Only kernels include this header.
 * Reentrant. */
#ifndef SHOAL_KERNELS_FORMATS_H
#define SHOAL_KERNELS_FORMATS_H

#if defined(__CUDA__) /* a GPU has none of this processor's instructions */
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/lanes.h"

/* ---- Plain: the element is the lane ----------------------------------------------------------------------------------- */

/* One vector of memory, in lanes. 16-bit types need two vectors of them; other types use low alone. */
struct wide {
    bits low, high;
};

#define plain_widen(x) (x)
#define plain_round(x) (x)

INLINE struct wide plain_load(const char *from)
{
    const bits memory = *(const bits_anywhere *)from;
    return (struct wide){memory, memory};
}

INLINE bits plain_pack(struct wide wide)
{
    return wide.low;
}

/* ---- The bits of a float32 -------------------------------------------------------------------------------------------- */

INLINE f32_one f32_one_from(u32_one word)
{
    f32_one x;
    __builtin_memcpy(&x, &word, sizeof(x));
    return x;
}

INLINE u32_one f32_one_bits(f32_one x)
{
    u32_one word;
    __builtin_memcpy(&word, &x, sizeof(word));
    return word;
}

INLINE f32_lanes f32_lanes_from(u32_lanes words)
{
    return (f32_lanes)words;
}

INLINE u32_lanes f32_lanes_bits(f32_lanes x)
{
    return (u32_lanes)x;
}

/* ---- bfloat16: the upper half of a float32 ---------------------------------------------------------------------------- */

/* Rounds in the upper half of the word: to nearest, ties to even (below an odd half, a tie becomes slightly more than one). The
 * carry turns values that are too large into infinity. NaN stays NaN. */
#define BFLOAT16_ROUND(word) (((word) | ((word) >> 16 & 1)) + 0x7fff)

INLINE f32_one bfloat16_widen(uint16_t half)
{
    return f32_one_from((u32_one)half << 16);
}

INLINE uint16_t bfloat16_round(f32_one x)
{
    return (uint16_t)(BFLOAT16_ROUND(f32_one_bits(x)) >> 16);
}

/* One element of a pair is the low half of a 32-bit word, the other the high half. Each half followed by zeros is the same
 * number as a float32, so no element changes its lane. */
INLINE struct wide bfloat16_load(const char *from)
{
    const u32_lanes memory = (u32_lanes)plain_load(from).low;
    return (struct wide){(bits)(memory << 16), (bits)(memory & 0xffff0000u)};
}

#if WIDTH == 32
/* Works in 16-bit lanes, on low and high at once. It subtracts one from the bits that are cut off if the bits that are kept are
 * even: the difference reaches half a step exactly when the kept bits are rounded up. */
INLINE bits bfloat16_pack(struct wide wide)
{
    const __m256i low = (__m256i)wide.low, high = (__m256i)wide.high;
    const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa);
    const __m256i cut = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
    const __m256i less = _mm256_subs_epu16(cut, _mm256_andnot_si256(kept, _mm256_set1_epi16(1)));
    return (bits)_mm256_add_epi16(kept, _mm256_srli_epi16(less, 15));
}
#else
INLINE bits bfloat16_pack(struct wide wide)
{
    return (bits)(BFLOAT16_ROUND((u32_lanes)wide.low) >> 16 | (BFLOAT16_ROUND((u32_lanes)wide.high) & 0xffff0000u));
}
#endif

/* ---- float16 ---------------------------------------------------------------------------------------------------------- */

#if defined(__CUDA__)

INLINE f32_one float16_widen(uint16_t half)
{
    f32_one x;
    __asm__("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

/* The instruction returns another NaN. */
INLINE uint16_t float16_round(f32_one x)
{
    uint16_t half;
    __asm__("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return x != x ? (uint16_t)0x7e00 : half;
}

#elif defined(__F16C__) && WIDTH > 16

INLINE f32_one float16_widen(uint16_t half)
{
    return _cvtsh_ss(half);
}

INLINE uint16_t float16_round(f32_one x)
{
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

#if WIDTH == 64
typedef __m256i half_vector;

INLINE bits halves_widen(const half_vector *halves)
{
    return (bits)_mm512_cvtph_ps(_mm256_loadu_si256(halves));
}

INLINE half_vector halves_round(bits lanes)
{
    return _mm512_maskz_cvtps_ph(0xffff, (__m512)lanes, _MM_FROUND_TO_NEAREST_INT); /* all lanes; gcc -O0 warns if unmasked */
}

INLINE bits halves_join(half_vector low, half_vector high)
{
    return (bits)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#else
typedef __m128i half_vector;

INLINE bits halves_widen(const half_vector *halves)
{
    return (bits)_mm256_cvtph_ps(_mm_loadu_si128(halves));
}

INLINE half_vector halves_round(bits lanes)
{
    return _mm256_cvtps_ph((__m256)lanes, _MM_FROUND_TO_NEAREST_INT);
}

INLINE bits halves_join(half_vector low, half_vector high)
{
    return (bits)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#endif

INLINE struct wide float16_load(const char *from)
{
    const half_vector *halves = (const half_vector *)(const void *)from;
    bits low = halves_widen(halves), high = halves_widen(halves + 1);
    __asm__("" : "+v"(low), "+v"(high)); /* otherwise clang compares the halves, for which it has no vectors */
    return (struct wide){low, high};
}

INLINE bits float16_pack(struct wide wide)
{
    return halves_join(halves_round(wide.low), halves_round(wide.high));
}

#elif defined(__aarch64__)

INLINE f32_one float16_widen(uint16_t half)
{
    __fp16 x;
    memcpy(&x, &half, sizeof(x));
    return (f32_one)x;
}

INLINE uint16_t float16_round(f32_one x)
{
    const __fp16 rounded = (__fp16)x;
    uint16_t half;
    memcpy(&half, &rounded, sizeof(half));
    return half;
}

INLINE struct wide float16_load(const char *from)
{
    const float16x8_t halves = (float16x8_t)plain_load(from).low;
    return (struct wide){(bits)vcvt_f32_f16(vget_low_f16(halves)), (bits)vcvt_high_f32_f16(halves)};
}

INLINE bits float16_pack(struct wide wide)
{
    return (bits)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)wide.low), (float32x4_t)wide.high);
}

#else

/* For processors without such instructions. Exponents count from -15 in float16 and from -127 in float32.
 *
 * To widen, from the upper half of a word: the exponent is raised by 112. It is raised by 112 again if it was the exponent of
 * infinity and NaN. If it was zero (subnormal), a leading 1 is put in front and then subtracted.
 *
 * To round, to the lower half: 2^13 times the power of two at or below x is added. The end of the sum's mantissa is then the 11
 * bits of x that float16 keeps, rounded as additions are. Below 2^-14 float16 keeps fewer bits. From 2^16 on the result is
 * infinity, or NaN. */
#define DEFINE_FLOAT16(FORM, PICK)                                                                             \
    INLINE f32_##FORM float16_widen_##FORM(u32_##FORM word)                                                    \
    {                                                                                                          \
        const u32_##FORM none = {0}, magnitude = (word & 0x7fffffff) >> 3;                                     \
        const u32_##FORM more = PICK((i32_##FORM)magnitude >= 0x7c00 << 13, none + (112u << 23), none);        \
        const u32_##FORM lead = PICK((i32_##FORM)magnitude < 0x0400 << 13, none + (1u << 23), none);           \
        const u32_##FORM away = PICK((i32_##FORM)magnitude < 0x0400 << 13, none + (113u << 23), none);         \
        const f32_##FORM raised = f32_##FORM##_from(magnitude + (112u << 23) + more + lead);                   \
        const u32_##FORM result = f32_##FORM##_bits(raised - f32_##FORM##_from(away));                         \
        return f32_##FORM##_from(result | (word & 0x80000000u));                                               \
    }                                                                                                          \
    INLINE u32_##FORM float16_round_##FORM(f32_##FORM x)                                                       \
    {                                                                                                          \
        const u32_##FORM none = {0}, least = none + (113u << 23), most = none + (143u << 23);                  \
        const u32_##FORM word = f32_##FORM##_bits(x), magnitude = word & 0x7fffffff;                           \
        const u32_##FORM capped = PICK((i32_##FORM)magnitude > 143 << 23, most, magnitude);                    \
        const u32_##FORM power = PICK((i32_##FORM)capped > 113 << 23, capped & 0x7f800000, least);             \
        const u32_##FORM base = power + (13u << 23);                                                           \
        const u32_##FORM kept = f32_##FORM##_bits(f32_##FORM##_from(base) + f32_##FORM##_from(capped)) - base; \
        const u32_##FORM half = (word >> 16 & 0x8000) + ((power - least) >> 13) + kept;                        \
        return half | PICK((i32_##FORM)magnitude > 0x7f800000, none + 0x0200, none);                           \
    }
DEFINE_FLOAT16(one, PICK_ONE)
DEFINE_FLOAT16(lanes, PICK_LANES)

INLINE f32_one float16_widen(uint16_t half)
{
    return float16_widen_one((u32_one)half << 16);
}

INLINE uint16_t float16_round(f32_one x)
{
    return (uint16_t)float16_round_one(x);
}

/* Out of line, because these functions are long. */
NOINLINE struct wide float16_load(const char *from)
{
    const u32_lanes memory = (u32_lanes)plain_load(from).low;
    return (struct wide){(bits)float16_widen_lanes(memory << 16), (bits)float16_widen_lanes(memory & 0xffff0000u)};
}

NOINLINE bits float16_pack(struct wide wide)
{
    return (bits)(float16_round_lanes((f32_lanes)wide.low) | float16_round_lanes((f32_lanes)wide.high) << 16);
}

#endif

#endif
