/* The instruction sets of this x86-64 processor, for which the kernels are compiled. They are asked of the processor itself:
 * what __builtin_cpu_supports answers depends on the compiler's runtime, and ziglang's always answers no. Any thread. */
#ifndef SHOAL_BASE_ISA_H
#define SHOAL_BASE_ISA_H

#include "base/compiler.h"

/* Returns true if AVX2 and F16C can be used: the processor has them, and the system saves their registers. */
bool shoal_isa_has_avx2(void);

/* Like shoal_isa_has_avx2(), but also AVX-512 F, BW, VL and DQ. */
bool shoal_isa_has_avx512(void);

#endif
