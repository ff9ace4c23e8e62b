/* Looks a host name up on a thread of its own: a name server that is slow, or does not answer, holds nobody up. Any thread. */
#ifndef SHOAL_TOOLS_RUN_LOOKUP_H
#define SHOAL_TOOLS_RUN_LOOKUP_H

#include <stdbool.h>
#include <sys/socket.h>

enum { RUN_ADDRESSES_MAX = 8 };

struct run_address {
    struct sockaddr_storage socket;
    socklen_t bytes;
};

/* count 0: reason says why, in static storage. */
struct run_addresses {
    struct run_address at[RUN_ADDRESSES_MAX];
    int count;
    const char *reason;
};

struct run_lookup;

/* NULL: no memory, or no thread, for it. */
struct run_lookup *run_lookup_begin(const char *name);

/* Waits for the answer, so many milliseconds at most. True: it is in addresses_out. */
bool run_lookup_wait(struct run_lookup *lookup, unsigned ms, struct run_addresses *addresses_out);

/* One that has not ended goes on, and frees itself. Takes NULL. */
void run_lookup_close(struct run_lookup *lookup);

#endif
