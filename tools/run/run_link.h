/* One TCP connection between two agents: a link (link/link.h) whose frames are messages (run_wire.h). The kernel's keep-alives
 * watch the other host: if it acknowledges nothing for RUN_LINK_SILENT_MS, the connection ends. So a host that is cut off is
 * noticed. An agent that is merely slow, stopped or suspended keeps its connection. Never blocks; one thread. */
#ifndef SHOAL_TOOLS_RUN_LINK_H
#define SHOAL_TOOLS_RUN_LINK_H

#include <poll.h>

#include "link/address.h"
#include "run_wire.h"

enum { RUN_LINK_SILENT_MS = 3000 };

struct run_link {
    struct shoal_link link; /* its fd is -1 while this is not connected */
    int host;               /* at host 0: the member's host; -1: a stranger */
};

/* Returns true if the link has a connection. */
static inline bool run_link_is_open(const struct run_link *link)
{
    return link->link.fd >= 0;
}

/* Takes ownership of the socket. */
void run_link_open(struct run_link *link, const struct shoal_link_identity *own, int fd, bool is_client, uint64_t now_ms);
void run_link_close(struct run_link *link);

/* Begins a connection, which ends at until_ms if it is not complete. Returns 0, or an errno; then the link is not open. */
int run_link_connect(struct run_link *link, const struct shoal_link_identity *own, const struct shoal_address *address,
                     uint64_t until_ms);

/* Sets the time at which the link ends: that of a stranger, or of one that is closing. UINT64_MAX: never. */
void run_link_until(struct run_link *link, uint64_t until_ms);
/* Returns that time, rounded up. */
uint64_t run_link_deadline(const struct run_link *link);
bool run_link_is_late(const struct run_link *link, uint64_t now_ms);

/* Returns the entry for poll(). */
struct pollfd run_link_poll(const struct run_link *link);

/* Queues a message, and sends as much as the socket accepts. If the connection cannot be written to, the next poll() shows
 * it. */
void run_link_say(struct run_link *link, const struct run_message *message);

/* Acts on poll()'s events: receives once, or sends queued bytes if nothing came. So the last messages of a peer that has closed
 * are read before the error of sending to it. A link that is closing discards what it receives. */
void run_link_serve(struct run_link *link, short events);

/* Returns the next event of the link; with FRAME, the message. The reason of BROKEN is in link->link.error. */
enum shoal_link_event run_link_next(struct run_link *link, uint64_t now_ms, struct run_message *message_out);

#endif
