/* Checks whether a peer can be reached at all. A peer is reachable once the first message to it has completed locally. When
 * that takes too long, the check opens its own TCP connection to the address of the peer's endpoint. The peer's kernel answers
 * it, so a peer that computes or is stopped does not look unreachable; and the kind of failure names the likely cause. Nothing
 * is sent over the connection. A peer that was reachable once is not checked again: from then on the control tree watches it.
 *
 * For providers over TCP. The caller passes the time. One thread at a time; no call blocks. */
#ifndef SHOAL_TRANSPORT_FABRIC_REACHABILITY_H
#define SHOAL_TRANSPORT_FABRIC_REACHABILITY_H

#include "link/address.h"
#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_REACHABILITY_LEAVE_S 2  /* a message that takes longer starts the connection */
#define SHOAL_REACHABILITY_ANSWER_S 3 /* a connection that takes longer has failed */
#define SHOAL_REACHABILITY_TEXT_MAX 200

enum shoal_reachability_state {
    SHOAL_REACHABILITY_NEW,   /* nothing was sent yet */
    SHOAL_REACHABILITY_TRIED, /* a message was sent and has not completed */
    SHOAL_REACHABILITY_ASKED, /* the check's connection is under way */
    SHOAL_REACHABILITY_SETTLED
};

struct shoal_reachability {
    struct shoal_reachability *next; /* while it is tried or asked */
    enum shoal_reachability_state state;
    int fd;                  /* while it is asked */
    uint64_t until_ns;       /* when the current state has taken too long */
    struct shoal_address to; /* including the port */
};

/* The checks of one endpoint. Must be zero at the start, except from, arg and broken. */
struct shoal_reachability_checks {
    struct shoal_address from; /* the endpoint's own address, with any port */
    void *arg;
    void (*broken)(void *arg, struct shoal_reachability *check, const char *text); /* how, and the likely cause */
    struct shoal_reachability *open;                                               /* those that are tried or asked */
    uint64_t next_look_ns;
};

/* Returns false if the address is not an internet address. */
SHOAL_MUST_USE bool shoal_reachability_read_address(const struct shoal_fabric_address *address,
                                                    struct shoal_address *address_out);

/* Call when something is sent for the first time. An address that is not an internet address settles at once. */
void shoal_reachability_try(struct shoal_reachability_checks *checks, struct shoal_reachability *check,
                            const struct shoal_fabric_address *to, uint64_t now_ns);
/* Call when the first message has completed locally, or the answer is no longer needed. */
void shoal_reachability_settle(struct shoal_reachability_checks *checks, struct shoal_reachability *check);
/* Call when the provider has failed: a check that is tried connects at the next look. */
void shoal_reachability_hurry(struct shoal_reachability_checks *checks, struct shoal_reachability *check);

/* Looks at the open checks, at the earliest some milliseconds after the last look; calls broken. */
void shoal_reachability_look_all(struct shoal_reachability_checks *checks, uint64_t now_ns);
void shoal_reachability_close_all(struct shoal_reachability_checks *checks);

#endif
