/* Looking a host name up within a time, whatever the system's resolver takes; and whether a port is free. Set-up and tools
 * only; any thread. */
#ifndef SHOAL_BOOTSTRAP_LOOKUP_H
#define SHOAL_BOOTSTRAP_LOOKUP_H

#include "bootstrap/address.h"

struct shoal_lookup {
    char host[SHOAL_ADDRESS_HOST_MAX];
    const char *what;               /* where the name came from, for the error; static storage */
    uint64_t until_ns;              /* while the resolver says "try again", it is asked again until then */
    enum shoal_status status;       /* ERR_TIMEOUT: no answer in time */
    struct shoal_address_list list; /* empty where status is not OK */
    uint32_t took_ms;
    char error[SHOAL_LOG_TEXT_MAX];
};

void shoal_lookup_run(const char *host, const char *what, uint32_t timeout_ms, struct shoal_lookup *lookup_out);

/* The same for who needs the addresses: asks again until deadline_ns, and logs why there are none: ERR_ARGUMENT,
 * ERR_TIMEOUT. */
SHOAL_MUST_USE enum shoal_status shoal_lookup_list(const char *host, const char *what, uint64_t deadline_ns,
                                                   struct shoal_log *log, struct shoal_address_list *list_out);

/* 0 where a rank could listen at that address and port now, else errno. Listens nowhere. */
int shoal_port_try(const struct shoal_address *address, uint16_t port);

#endif
