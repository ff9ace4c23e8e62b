/* A variant of host_rank.c sets these before main, in a constructor. */
#ifndef SHOAL_TESTS_HOST_RANK_H
#define SHOAL_TESTS_HOST_RANK_H

#include "operations.h"

/* The device of operands that are otherwise in shared memory; NULL: shared memory. */
extern const struct twin_device *host_rank_device;

#endif
