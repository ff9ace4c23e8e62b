#include "base/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Bits of the register XCR0: which registers the system saves when it switches threads. */
#define AVX_STATE 0x06u    /* of SSE and AVX */
#define AVX512_STATE 0xe6u /* also the masks, and what AVX-512 adds to both */

static unsigned saved_registers(void)
{
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Returns the bits of the extended features, in EBX of leaf 7. */
static unsigned extended_features(void)
{
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) ? ebx : 0;
}

static bool has_f16c(void)
{
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool shoal_isa_has_avx2(void)
{
    return (saved_registers() & AVX_STATE) == AVX_STATE && (extended_features() & bit_AVX2) && has_f16c();
}

bool shoal_isa_has_avx512(void)
{
    const unsigned wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    return shoal_isa_has_avx2() && (saved_registers() & AVX512_STATE) == AVX512_STATE &&
           (extended_features() & wanted) == wanted;
}
#else
bool shoal_isa_has_avx2(void)
{
    return false;
}

bool shoal_isa_has_avx512(void)
{
    return false;
}
#endif
