#include "link/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool address_parse_port(const char *text, uint16_t *port_out)
{
    if (strlen(text) == 0 || strlen(text) > 5 || strspn(text, "0123456789") != strlen(text))
        return false;
    const unsigned long port = strtoul(text, NULL, 10);
    if (port == 0 || port > UINT16_MAX)
        return false;
    *port_out = (uint16_t)port;
    return true;
}

bool shoal_address_parse(const char *text, char host[SHOAL_ADDRESS_HOST_MAX], uint16_t *port_out)
{
    const char *colon = strrchr(text, ':');
    if (!colon)
        return false;
    const char *start = text;
    const char *end = colon;
    if (text[0] == '[') {
        start++;
        end--;
        if (end < start || *end != ']')
            return false;
    } else if (memchr(text, ':', (size_t)(colon - text))) {
        return false; /* "::1:4000" is ambiguous without brackets */
    }
    const size_t bytes = (size_t)(end - start);
    if (bytes == 0 || bytes >= SHOAL_ADDRESS_HOST_MAX)
        return false;
    uint16_t port;
    if (!address_parse_port(colon + 1, &port))
        return false;
    memcpy(host, start, bytes);
    host[bytes] = 0;
    *port_out = port;
    return true;
}

static void copy_found(const struct addrinfo *found, struct shoal_address_list *list)
{
    list->count = 0;
    for (; found && list->count < SHOAL_ADDRESS_MAX; found = found->ai_next) {
        if (found->ai_family != AF_INET && found->ai_family != AF_INET6)
            continue;
        struct shoal_address *address = &list->at[list->count++];
        memset(address, 0, sizeof *address);
        memcpy(&address->socket, found->ai_addr, found->ai_addrlen);
        address->bytes = found->ai_addrlen;
    }
}

int shoal_address_ask(const char *host, struct shoal_address_list *list_out)
{
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    const int error = getaddrinfo(host, NULL, &wanted, &found);
    copy_found(error ? NULL : found, list_out);
    if (!error)
        freeaddrinfo(found);
    return error;
}

/* strerror returns a constant for the numbers that the kernel sets; strerrordesc_np needs glibc 2.32. */
const char *shoal_address_ask_error(int error)
{
    return error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error);
}

int shoal_address_listen(int fd, const struct shoal_address *address)
{
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (address->socket.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){1}, sizeof(int));
    const bool does = bind(fd, (const struct sockaddr *)&address->socket, address->bytes) == 0 && listen(fd, SOMAXCONN) == 0;
    return does ? 0 : -errno;
}

int shoal_address_connect(int fd, const struct shoal_address *to)
{
    if (connect(fd, (const struct sockaddr *)&to->socket, to->bytes) == 0)
        return 0;
    return errno == EINTR ? EINPROGRESS : errno;
}

int shoal_address_error(int fd)
{
    int error = 0;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error}) == 0 ? error : errno;
}

void shoal_address_port_put(struct shoal_address *address, uint16_t port)
{
    if (address->socket.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)&address->socket)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)(void *)&address->socket)->sin_port = htons(port);
}

bool shoal_address_is_loopback(const struct shoal_address *address)
{
    if (address->socket.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)&address->socket)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)(const void *)&address->socket)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

void shoal_address_print(const struct shoal_address *address, char text[SHOAL_ADDRESS_TEXT_MAX])
{
    char host[INET6_ADDRSTRLEN + 32], port[16];
    if (getnameinfo((const struct sockaddr *)&address->socket, address->bytes, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        snprintf(text, SHOAL_ADDRESS_TEXT_MAX, "?");
    else
        snprintf(text, SHOAL_ADDRESS_TEXT_MAX, address->socket.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}
