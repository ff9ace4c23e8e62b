#include "transport/fabric/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define LOOK_NS (5 * SHOAL_NS_PER_MS)

/* ---- Addresses ----------------------------------------------------------------------------------------------------------- */

bool shoal_link_read_address(const struct shoal_fabric_address *address, struct shoal_address *address_out)
{
    memset(address_out, 0, sizeof *address_out);
    address_out->bytes = address->bytes;
    memcpy(&address_out->socket, address->at, sizeof address->at);
    const sa_family_t family = address_out->socket.ss_family;
    return (family == AF_INET && address->bytes >= sizeof(struct sockaddr_in)) ||
           (family == AF_INET6 && address->bytes >= sizeof(struct sockaddr_in6));
}

static unsigned port_of(const struct shoal_address *address)
{
    const void *at = &address->socket;
    return ntohs(address->socket.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)at)->sin6_port
                                                       : ((const struct sockaddr_in *)at)->sin_port);
}

/* ---- What is told -------------------------------------------------------------------------------------------------------- */

static const struct {
    int error;
    const char *what, *cause;
} causes[] = {
    {ETIMEDOUT, "no answer",
     "a firewall drops what goes there (open SHOAL_PORTS), or the interface is the wrong one (SHOAL_NIC)"},
    {ECONNREFUSED, "refused", "a firewall rejects it (open SHOAL_PORTS), or that is another host's address (SHOAL_NIC)"},
    {EHOSTUNREACH, "no route", "a firewall rejects it (open SHOAL_PORTS), or the interface is the wrong one (SHOAL_NIC)"},
    {ENETUNREACH, "no route from here", "the interface, here or there, is the wrong one (SHOAL_NIC)"},
    {EACCES, "forbidden here", "a firewall of this host rejects it (open SHOAL_PORTS)"},
};

static void link_explain(int error, unsigned port, char text[SHOAL_LINK_TEXT_MAX])
{
    size_t i = 0;
    while (i < SHOAL_COUNT_OF(causes) && causes[i].error != error)
        i++;
    if (i < SHOAL_COUNT_OF(causes))
        snprintf(text, SHOAL_LINK_TEXT_MAX, "port %u: %s; it is likely that %s", port, causes[i].what, causes[i].cause);
    else
        snprintf(text, SHOAL_LINK_TEXT_MAX, "port %u: %s", port, strerror(error));
}

/* ---- The list ------------------------------------------------------------------------------------------------------------ */

static void close_if_asked(struct shoal_link *link)
{
    if (link->state == SHOAL_LINK_ASKED)
        close(link->fd);
    link->state = SHOAL_LINK_SETTLED;
}

void shoal_link_try(struct shoal_links *links, struct shoal_link *link, const struct shoal_fabric_address *to, uint64_t now_ns)
{
    link->state = SHOAL_LINK_SETTLED;
    if (!shoal_link_read_address(to, &link->to) || link->to.socket.ss_family != links->from.socket.ss_family)
        return;
    link->state = SHOAL_LINK_TRIED;
    link->until_ns = now_ns + SHOAL_LINK_LEAVE_S * SHOAL_NS_PER_S;
    link->next = links->open;
    links->open = link;
}

void shoal_link_settle(struct shoal_links *links, struct shoal_link *link)
{
    struct shoal_link **at = &links->open;
    while (*at && *at != link)
        at = &(*at)->next;
    if (*at)
        *at = link->next;
    close_if_asked(link);
}

void shoal_link_hurry(struct shoal_links *links, struct shoal_link *link)
{
    if (link->state != SHOAL_LINK_TRIED)
        return;
    link->until_ns = 0;
    links->next_look_ns = 0;
}

void shoal_links_close(struct shoal_links *links)
{
    for (struct shoal_link *link = links->open; link; link = link->next)
        close_if_asked(link);
    links->open = NULL;
}

/* ---- Asking -------------------------------------------------------------------------------------------------------------- */

/* From the address that the endpoint sends from, whose port is in use. */
static int bind_to(int fd, struct shoal_address from)
{
    shoal_address_port_put(&from, 0);
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &(int){1}, sizeof(int));
    return bind(fd, (const struct sockaddr *)&from.socket, from.bytes);
}

/* Begins to connect. 0 when it is connected, EINPROGRESS while that takes time, else why not. What this process lacks for it,
 * such as a descriptor, says nothing about the link. */
static int link_start(const struct shoal_links *links, struct shoal_link *link)
{
    link->fd = socket(link->to.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (link->fd < 0)
        return 0;
    link->state = SHOAL_LINK_ASKED;
    if (bind_to(link->fd, links->from) != 0)
        return 0;
    return connect(link->fd, (const struct sockaddr *)&link->to.socket, link->to.bytes) == 0 ? 0 : errno;
}

/* The answer, if it came, however long nobody looked. */
static int link_hear(const struct shoal_link *link, uint64_t now_ns)
{
    struct pollfd entry = {link->fd, POLLOUT, 0};
    int error = 0;
    socklen_t bytes = sizeof error;
    if (poll(&entry, 1, 0) < 1)
        return now_ns < link->until_ns ? EINPROGRESS : ETIMEDOUT;
    return getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

static void link_look(struct shoal_links *links, struct shoal_link *link, uint64_t now_ns)
{
    char text[SHOAL_LINK_TEXT_MAX];
    int error = EINPROGRESS;
    if (link->state == SHOAL_LINK_ASKED) {
        error = link_hear(link, now_ns);
    } else if (now_ns >= link->until_ns) {
        error = link_start(links, link);
        link->until_ns = now_ns + SHOAL_LINK_ANSWER_S * SHOAL_NS_PER_S;
    }
    if (error == EINPROGRESS)
        return;
    shoal_link_settle(links, link);
    if (!error)
        return;
    link_explain(error, port_of(&link->to), text);
    links->broken(links->arg, link, text);
}

void shoal_links_look(struct shoal_links *links, uint64_t now_ns)
{
    struct shoal_link *link = links->open;
    if (now_ns < links->next_look_ns)
        return;
    links->next_look_ns = now_ns + LOOK_NS;
    while (link) {
        struct shoal_link *next = link->next;
        link_look(links, link, now_ns);
        link = next;
    }
}
