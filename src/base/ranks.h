/* How many ranks there may be, in one place: of a job, a communicator, a plan, a simulation. Pure functions, any thread. */
#ifndef SHOAL_BASE_RANKS_H
#define SHOAL_BASE_RANKS_H

#include "base/log.h"

#define SHOAL_RANKS_MAX 4096

/* ERR_ARGUMENT, logged with the limit, where a size that `what` gave is no number of ranks, or rank is none of them. */
SHOAL_MUST_USE enum shoal_status shoal_ranks_check(struct shoal_log *log, const char *room, const char *what, long rank,
                                                   long size);

#endif
