/* Checks whether a peer can be reached at all. A peer is reachable once the first message to it has completed locally. When
 * that takes too long, the check opens a TCP connection of its own to the address of the peer's endpoint. The peer's kernel
 * answers it, so a peer that computes or is stopped does not look unreachable; and the way it fails names the likely cause.
 * Nothing is sent over the connection. A peer that was reachable once is not checked again: from then on the control tree
 * watches it.
 *
 * For providers over TCP. The caller passes the time. One thread at a time; no call blocks. */
#ifndef SHOAL_TRANSPORT_FABRIC_REACHABILITY_H
#define SHOAL_TRANSPORT_FABRIC_REACHABILITY_H

#include "bootstrap/address.h"
#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_REACHABILITY_LEAVE_S 2  /* a message that takes longer starts the connection */
#define SHOAL_REACHABILITY_ANSWER_S 3 /* a connection that takes longer has failed */
#define SHOAL_REACHABILITY_TEXT_MAX 200

enum shoal_reachability_state {
    SHOAL_REACHABILITY_NEW,   /* nothing was sent yet */
    SHOAL_REACHABILITY_TRIED, /* a message was sent and has not completed */
    SHOAL_REACHABILITY_ASKED, /* our connection is under way */
    SHOAL_REACHABILITY_SETTLED
};

struct shoal_reachability {
    struct shoal_reachability *next; /* while it is tried or asked */
    enum shoal_reachability_state state;
    int fd;                  /* while it is asked */
    uint64_t until_ns;       /* when what is under way has taken too long */
    struct shoal_address to; /* port and all */
};

/* The checks of one endpoint. All zero but from, arg and broken to begin with. */
struct shoal_reachability_checks {
    struct shoal_address from; /* its own address, whatever the port */
    void *arg;
    void (*broken)(void *arg, struct shoal_reachability *check, const char *text); /* how, and the likely cause */
    struct shoal_reachability *open;                                               /* those that are tried or asked */
    uint64_t next_look_ns;
};

/* False where it is no internet address. */
SHOAL_MUST_USE bool shoal_reachability_read_address(const struct shoal_fabric_address *address,
                                                    struct shoal_address *address_out);

/* Something is being sent for the first time. An address that is no internet address settles at once. */
void shoal_reachability_try(struct shoal_reachability_checks *checks, struct shoal_reachability *check,
                            const struct shoal_fabric_address *to, uint64_t now_ns);
/* The first message has completed locally, or nobody wants to know any more. */
void shoal_reachability_settle(struct shoal_reachability_checks *checks, struct shoal_reachability *check);
/* The provider has failed: what is tried is asked at the next look. */
void shoal_reachability_hurry(struct shoal_reachability_checks *checks, struct shoal_reachability *check);

/* Looks at the open checks, some milliseconds after the last look at the earliest; calls broken. */
void shoal_reachability_look_all(struct shoal_reachability_checks *checks, uint64_t now_ns);
void shoal_reachability_close_all(struct shoal_reachability_checks *checks);

#endif
