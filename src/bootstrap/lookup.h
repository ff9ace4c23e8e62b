/* Looks a host name up within a time limit, however long the system's resolver needs, and tests whether a port is free. Set-up
 * and tools only; any thread. */
#ifndef SHOAL_BOOTSTRAP_LOOKUP_H
#define SHOAL_BOOTSTRAP_LOOKUP_H

#include "link/address.h"

struct shoal_lookup {
    char host[SHOAL_ADDRESS_HOST_MAX];
    const char *what;               /* source of the name, for errors; static storage */
    uint64_t until_ns;              /* retries until then while the resolver answers "try again" */
    enum shoal_status status;       /* ERR_TIMEOUT if no answer came in time */
    struct shoal_address_list list; /* empty unless status is OK */
    uint32_t took_ms;
    char error[SHOAL_LOG_TEXT_MAX];
};

void shoal_lookup_run(const char *host, const char *what, uint32_t timeout_ms, struct shoal_lookup *lookup_out);

/* Like shoal_lookup_run(), but for callers that need the addresses: retries until deadline_ns, and logs a failure:
 * ERR_ARGUMENT, ERR_TIMEOUT. */
SHOAL_MUST_USE enum shoal_status shoal_lookup_list(const char *host, const char *what, uint64_t deadline_ns,
                                                   struct shoal_log *log, struct shoal_address_list *list_out);

/* Looks a name up within the resolver's own time limit, and retries until the deadline while the resolver answers "try again".
 * Logs a failure: ERR_ARGUMENT. */
SHOAL_MUST_USE enum shoal_status shoal_lookup_find(const char *host, const char *what, uint64_t deadline_ns,
                                                   struct shoal_log *log, struct shoal_address_list *list_out);

/* Returns 0 if a rank could listen at that address and port now, else errno. Does not listen. */
int shoal_port_try(const struct shoal_address *address, uint16_t port);

#endif
