/* One TCP connection between two agents: frames (run_wire.h) in and out, without blocking. The kernel's keep-alives watch the
 * other host: if it acknowledges nothing for RUN_LINK_SILENT_MS, the connection ends. So a host that is cut off is noticed. An
 * agent that is merely slow, stopped or suspended keeps its connection. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_LINK_H
#define SHOAL_TOOLS_RUN_LINK_H

#include <poll.h>
#include <sys/socket.h>

#include "run_wire.h"

enum { RUN_LINK_SILENT_MS = 3000 };

enum run_link_state {
    RUN_LINK_CONNECTING, /* to host 0 */
    RUN_LINK_GREETED,    /* HELLO sent, CHALLENGE awaited */
    RUN_LINK_HELLO,      /* at host 0: HELLO awaited */
    RUN_LINK_PROOF,      /* at host 0: PROOF awaited */
    RUN_LINK_MEMBER,
    RUN_LINK_CLOSING /* sends queued bytes, then ends */
};

struct run_link {
    int fd; /* -1: no connection */
    enum run_link_state state;
    int error;      /* how the connection ended, while frames were left to read: an errno, -1: closed; 0: not ended */
    int host;       /* at host 0: the member's host; -1: a stranger */
    uint64_t until; /* when a stranger or a closing link is dropped; UINT64_MAX: never */
    struct run_hello hello;
    struct run_challenge challenge;
    unsigned char *in, *out;
    size_t in_bytes, out_bytes, out_capacity;
};

/* Takes ownership of the socket. Returns false if out of memory; then the socket is closed. */
bool run_link_open(struct run_link *link, int fd, enum run_link_state state, uint64_t until);
void run_link_close(struct run_link *link);

/* Begins a connection. Returns 0, or an errno; then the link is not open. */
int run_link_connect(struct run_link *link, const struct sockaddr_storage *address, socklen_t bytes, uint64_t until);

/* Returns the entry for poll(). */
struct pollfd run_link_poll(const struct run_link *link);

/* Queues a message, and sends as much as the socket accepts. */
void run_link_say(struct run_link *link, const struct run_message *message);

/* Acts on poll()'s events: receives once, or sends queued bytes if nothing came. So the last messages of a peer that has closed
 * are read before the error of sending to it. Returns 0, an errno, or -1 at the end of the connection. */
int run_link_serve(struct run_link *link, short events);

/* Reads the next frame of the received bytes. */
enum run_parsed run_link_next(struct run_link *link, struct run_message *message_out);

#endif
