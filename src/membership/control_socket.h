/* The sockets of control trees: non-blocking, closed on exec, and closed in forked children, because an open one would hide
 * this process's end from its neighbors. A child made by other means than fork() (clone, _Fork) keeps them open. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_SOCKET_H
#define SHOAL_MEMBERSHIP_CONTROL_SOCKET_H

#include "link/address.h"

/* Each returns -errno on failure. A connection in progress is not a failure. Any thread. */
int shoal_control_socket_listen(const struct shoal_address *address);
int shoal_control_socket_accept(int listener);
int shoal_control_socket_connect(const struct shoal_address *to);
void shoal_control_socket_close(int fd);

/* Returns how long ago the other side's kernel last acknowledged anything, or -1 if the connection is ending. If the kernel
 * acknowledges while its process is silent, the process is stopped; with keep-alives it should acknowledge every second. */
int64_t shoal_control_socket_unanswered_ms(int fd);
#define SHOAL_CONTROL_ANSWERED_MS 2500

/* Returns the number of forks between this process and the first that used control trees. Async-signal-safe. */
unsigned shoal_control_socket_generation(void);

#endif
