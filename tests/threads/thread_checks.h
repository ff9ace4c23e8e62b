/* Checks for ranks that are threads of one test program. `who` points to a struct with an int `rank`. */
#ifndef SHOAL_TESTS_THREADS_THREAD_CHECKS_H
#define SHOAL_TESTS_THREADS_THREAD_CHECKS_H

#include <stdio.h>
#include <stdlib.h>

#include "shoal/shoal.h"

/* cmocka's assertions work only on the first thread. A failure on another thread ends the program with its reason. */
#define CHECK(who, condition, ...)                                                                \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "rank %d, %s:%d: %s: ", (who)->rank, __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                                         \
            fprintf(stderr, "\n");                                                                \
            abort();                                                                              \
        }                                                                                         \
    } while (0)
#define EXPECT(who, wanted, call)                                                 \
    do {                                                                          \
        const enum shoal_status status_ = (call);                                 \
        CHECK((who), status_ == (wanted), "gave %s", shoal_status_name(status_)); \
    } while (0)
#define OK(who, call) EXPECT((who), SHOAL_OK, (call))

#endif
