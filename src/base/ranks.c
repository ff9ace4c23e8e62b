#include "base/ranks.h"

const uint8_t shoal_no_ranks[SHOAL_RANKS_MAX];

enum shoal_status shoal_size_check(struct shoal_log *log, const char *module, const char *what, long rank, long size)
{
    if (size < 1 || size > SHOAL_RANKS_MAX)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, module,
                              "%s: the number of ranks is %ld, but may be 1 to %d (the limit of this build, SHOAL_RANKS_MAX)",
                              what, size, SHOAL_RANKS_MAX);
    if (rank < 0 || rank >= size)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, module, "%s: rank %ld of %ld: ranks are 0 to %ld", what, rank, size,
                              size - 1);
    return SHOAL_OK;
}
