#ifndef SHOAL_TESTS_EMULATED_H
#define SHOAL_TESTS_EMULATED_H

/* Skips cases that the emulator of another processor cannot run, because qemu 7.2 lacks what they need. */
#include <stdlib.h>

#define FORKS_BESIDE_THREADS "qemu 7.2 cannot start a thread in a child that was forked beside other threads"
#define LITTLE_TCP_INFO "qemu 7.2 hands on 4 bytes of TCP_INFO, so a rank that is stopped is not told from one that is slow"

/* Include this file after cmocka. `meson test` and dev/test.py set the variable in builds whose programs run under qemu. */
#define SKIP_IF_EMULATED(reason)                    \
    do {                                            \
        if (getenv("SHOAL_TEST_EMULATED")) {        \
            print_message("skipped: %s\n", reason); \
            skip();                                 \
        }                                           \
    } while (0)

#endif
