/* The limit of ranks in the public header, SHOAL_RANKS_MAX, inside the library. Pure functions, any thread. */
#ifndef SHOAL_BASE_RANKS_H
#define SHOAL_BASE_RANKS_H

#include "base/log.h"

/* An empty set of ranks, with one flag per rank. A caller that finds this address need not look at the flags. */
extern const uint8_t shoal_no_ranks[SHOAL_RANKS_MAX];

/* Returns ERR_ARGUMENT if size is not 1 to SHOAL_RANKS_MAX, or rank is not 0 to size - 1. `what` names the source of the two
 * numbers in the log line. */
SHOAL_MUST_USE enum shoal_status shoal_size_check(struct shoal_log *log, const char *module, const char *what, long rank,
                                                  long size);

#endif
