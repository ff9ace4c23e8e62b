/* Network addresses as text and as the kernel expects them. Libc only. */
#ifndef SHOAL_LINK_ADDRESS_H
#define SHOAL_LINK_ADDRESS_H

#include <sys/socket.h>

#include "base/log.h"

#define SHOAL_ADDRESS_MAX 8
#define SHOAL_ADDRESS_HOST_MAX 256
#define SHOAL_ADDRESS_TEXT_MAX 320

struct shoal_address {
    struct sockaddr_storage socket;
    socklen_t bytes;
};

/* The addresses of a host name: IPv4 and IPv6, in the resolver's order, with port 0. */
struct shoal_address_list {
    struct shoal_address at[SHOAL_ADDRESS_MAX];
    int count;
};

/* Parses "host:port" or "[v6]:port". Returns false if the text is neither, or if the port is 0. */
bool shoal_address_parse(const char *text, char host[SHOAL_ADDRESS_HOST_MAX], uint16_t *port_out);

/* Looks a name up, once, within the resolver's own time limit. Returns 0, or an error of getaddrinfo(). The list may be
 * empty. */
int shoal_address_ask(const char *host, struct shoal_address_list *list_out);
/* Returns the text of such an error, in static storage. Call it at once: it may refer to errno. */
const char *shoal_address_ask_error(int error);

/* Makes a new TCP socket listen at exactly this address. Returns 0 or -errno. */
int shoal_address_listen(int fd, const struct shoal_address *address);

/* Begins to connect a non-blocking socket. Returns 0, EINPROGRESS, or the errno of a failure. */
int shoal_address_connect(int fd, const struct shoal_address *to);

/* Returns the result of a connection that was in progress: 0 or an errno. */
int shoal_address_error(int fd);

void shoal_address_port_put(struct shoal_address *address, uint16_t port);
bool shoal_address_is_loopback(const struct shoal_address *address);

/* Prints "127.0.0.1:4000" or "[::1]:4000". */
void shoal_address_print(const struct shoal_address *address, char text[SHOAL_ADDRESS_TEXT_MAX]);

#endif
