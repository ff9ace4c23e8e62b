/* Floating-point states that programs leave their threads in: numbers below the smallest normal one are flushed to zero, as
 * torch.set_flush_denormal(True) and libraries built with -ffast-math do it; rounding is changed; exceptions end the program. */
#ifndef SHOAL_TESTS_FLOAT_STATES_H
#define SHOAL_TESTS_FLOAT_STATES_H

#include "base/floats.h"

#if defined(__x86_64__)
static const shoal_floats float_states[] = {
    0x1f80 | 0x8040,          /* FTZ and DAZ */
    0x1f80 | 0x2000,          /* down */
    0x1f80 | 0x4000,          /* up */
    0x1f80 | 0x6000 | 0x8000, /* toward zero, FTZ */
    0,                        /* all exceptions */
};
#else
static const shoal_floats float_states[] = {
    1 << 24 | 1 << 19, /* FZ and FZ16 */
    1 << 22,           /* up */
    2 << 22,           /* down */
    3 << 22 | 1 << 24, /* toward zero, FZ */
    1 << 25 | 1 << 26, /* default NaN, halves without infinity */
};
#endif

/* Returns true if a call has left the state alone. Sets the default again. */
static inline bool float_state_has_stayed(shoal_floats state)
{
    const shoal_floats now = shoal_floats_read();
    shoal_floats_write(SHOAL_FLOATS_DEFAULT);
    return ((now ^ state) & SHOAL_FLOATS_CONTROL) == 0;
}

#endif
