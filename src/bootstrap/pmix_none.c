#include <stdlib.h>

#include "bootstrap/sources.h"

/* Replaces pmix_store.c if the PMIx header was not found at build time. */

bool shoal_pmix_is_present(void)
{
    return getenv("PMIX_NAMESPACE") != NULL;
}

enum shoal_status shoal_pmix_check(struct shoal_log *log)
{
    return shoal_log_fail(
        log, SHOAL_ERR_UNSUPPORTED, "bootstrap",
        "this program was started through PMIx (PMIX_NAMESPACE is set), but this build of Shoal is without it; "
        "install libpmix-dev and build again, or start with `shoal run`, torchrun or srun --mpi=none");
}

enum shoal_status shoal_pmix_store_open(struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    (void)timeout_ms, (void)bootstrap;
    return shoal_pmix_check(log);
}
