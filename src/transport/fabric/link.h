/* Whether a peer can be reached at all: the first that is sent to it tells, when it leaves. What has not left for a while makes
 * us try a TCP connection of our own to the address of the peer's endpoint. The kernel there answers it, so a peer that
 * computes, or is stopped, is not taken for one that cannot be reached; and how it fails names the likely cause. Nothing is
 * sent over it. A link that was made once is not looked at again: that is the control tree's matter.
 *
 * For providers over TCP. It is told the time. One thread at a time; no call blocks. */
#ifndef SHOAL_TRANSPORT_FABRIC_LINK_H
#define SHOAL_TRANSPORT_FABRIC_LINK_H

#include "bootstrap/address.h"
#include "transport/fabric/fabric_endpoint.h"

#define SHOAL_LINK_LEAVE_S 2  /* what has not left by then is looked into */
#define SHOAL_LINK_ANSWER_S 3 /* no answer by then is none */
#define SHOAL_LINK_TEXT_MAX 200

enum shoal_link_state {
    SHOAL_LINK_NEW,   /* nothing was sent yet */
    SHOAL_LINK_TRIED, /* something was, and nothing has left */
    SHOAL_LINK_ASKED, /* our connection is under way */
    SHOAL_LINK_SETTLED
};

struct shoal_link {
    struct shoal_link *next; /* while it is tried or asked */
    enum shoal_link_state state;
    int fd;                  /* while it is asked */
    uint64_t until_ns;       /* when what is under way has taken too long */
    struct shoal_address to; /* port and all */
};

/* The links of one endpoint. All zero but from, arg and broken to begin with. */
struct shoal_links {
    struct shoal_address from; /* its own address, whatever the port */
    void *arg;
    void (*broken)(void *arg, struct shoal_link *link, const char *text); /* how, and the likely cause */
    struct shoal_link *open;                                              /* those that are tried or asked */
    uint64_t next_look_ns;
};

/* False where it is no internet address. */
SHOAL_MUST_USE bool shoal_link_read_address(const struct shoal_fabric_address *address, struct shoal_address *address_out);

/* Something is being sent for the first time. What is no internet address settles at once. */
void shoal_link_try(struct shoal_links *links, struct shoal_link *link, const struct shoal_fabric_address *to, uint64_t now_ns);
/* It has left, or nobody wants to know any more. */
void shoal_link_settle(struct shoal_links *links, struct shoal_link *link);
/* The provider has failed: what is tried is asked at the next look. */
void shoal_link_hurry(struct shoal_links *links, struct shoal_link *link);

/* Looks at the open links, some milliseconds after the last look at the earliest; calls broken. */
void shoal_links_look(struct shoal_links *links, uint64_t now_ns);
void shoal_links_close(struct shoal_links *links);

#endif
