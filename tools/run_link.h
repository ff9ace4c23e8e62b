/* One TCP connection between two agents: frames (run_wire.h) in and out, without blocking. The kernel's keep-alives watch the
 * other host: where it acknowledges nothing for RUN_LINK_SILENT_MS, the connection ends. So a host that is cut off is noticed,
 * and an agent that is merely slow, stopped or suspended is not taken for one. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_LINK_H
#define SHOAL_TOOLS_RUN_LINK_H

#include <poll.h>
#include <sys/socket.h>

#include "run_wire.h"

enum { RUN_LINK_SILENT_MS = 3000 };

enum run_link_state {
    RUN_LINK_CONNECTING, /* to host 0 */
    RUN_LINK_GREETED,    /* HELLO is said, CHALLENGE awaited */
    RUN_LINK_HELLO,      /* at host 0: HELLO is awaited */
    RUN_LINK_PROOF,      /* at host 0: PROOF is awaited */
    RUN_LINK_MEMBER,
    RUN_LINK_CLOSING /* what is queued goes out, then it ends */
};

struct run_link {
    int fd; /* -1: there is no connection */
    enum run_link_state state;
    int error;      /* how the connection has ended, with frames left to take: an errno, -1: it was closed; 0: it has not */
    int host;       /* at host 0: of the member; -1: a stranger */
    uint64_t until; /* a stranger, or one that closes, is dropped then; UINT64_MAX: never */
    struct run_hello hello;
    struct run_challenge challenge;
    unsigned char *in, *out;
    size_t in_bytes, out_bytes, out_capacity;
};

/* Takes the socket over. Returns false without memory; then the socket is closed. */
bool run_link_open(struct run_link *link, int fd, enum run_link_state state, uint64_t until);
void run_link_close(struct run_link *link);

/* Begins a connection. Returns 0, or an errno; then there is no link. */
int run_link_connect(struct run_link *link, const struct sockaddr_storage *address, socklen_t bytes, uint64_t until);

/* The entry for poll(). */
struct pollfd run_link_poll(const struct run_link *link);

/* Queues a message, and sends what the socket takes. */
void run_link_say(struct run_link *link, const struct run_message *message);

/* Sends queued bytes; returns 0 or an errno. */
int run_link_flush(struct run_link *link);

/* Receives once. Returns 0, an errno, or -1 at the end of the connection. */
int run_link_receive(struct run_link *link);

/* Takes the next frame out of what was received. */
enum run_parsed run_link_next(struct run_link *link, struct run_message *message_out);

#endif
