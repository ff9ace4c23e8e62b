#include "transport/fabric/reachability.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

#define LOOK_NS (5 * SHOAL_NS_PER_MS)

/* ---- Addresses ----------------------------------------------------------------------------------------------------------- */

bool shoal_reachability_read_address(const struct shoal_fabric_address *address, struct shoal_address *address_out)
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

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

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

static void check_explain(int error, unsigned port, char text[SHOAL_REACHABILITY_TEXT_MAX])
{
    size_t i = 0;
    while (i < SHOAL_COUNT_OF(causes) && causes[i].error != error)
        i++;
    if (i < SHOAL_COUNT_OF(causes))
        snprintf(text, SHOAL_REACHABILITY_TEXT_MAX, "port %u: %s; it is likely that %s", port, causes[i].what, causes[i].cause);
    else
        snprintf(text, SHOAL_REACHABILITY_TEXT_MAX, "port %u: %s", port, strerror(error));
}

/* ---- The list ------------------------------------------------------------------------------------------------------------ */

static void close_if_asked(struct shoal_reachability *check)
{
    if (check->state == SHOAL_REACHABILITY_ASKED)
        close(check->fd);
    check->state = SHOAL_REACHABILITY_SETTLED;
}

void shoal_reachability_try(struct shoal_reachability_checks *checks, struct shoal_reachability *check,
                            const struct shoal_fabric_address *to, uint64_t now_ns)
{
    check->state = SHOAL_REACHABILITY_SETTLED;
    if (!shoal_reachability_read_address(to, &check->to) || check->to.socket.ss_family != checks->from.socket.ss_family)
        return;
    check->state = SHOAL_REACHABILITY_TRIED;
    check->until_ns = now_ns + SHOAL_REACHABILITY_LEAVE_S * SHOAL_NS_PER_S;
    check->next = checks->open;
    checks->open = check;
}

void shoal_reachability_settle(struct shoal_reachability_checks *checks, struct shoal_reachability *check)
{
    struct shoal_reachability **at = &checks->open;
    while (*at && *at != check)
        at = &(*at)->next;
    if (*at)
        *at = check->next;
    close_if_asked(check);
}

void shoal_reachability_hurry(struct shoal_reachability_checks *checks, struct shoal_reachability *check)
{
    if (check->state != SHOAL_REACHABILITY_TRIED)
        return;
    check->until_ns = 0;
    checks->next_look_ns = 0;
}

void shoal_reachability_close_all(struct shoal_reachability_checks *checks)
{
    for (struct shoal_reachability *check = checks->open; check; check = check->next)
        close_if_asked(check);
    checks->open = NULL;
}

/* ---- Connecting ---------------------------------------------------------------------------------------------------------- */

/* Binds to the address that the endpoint sends from; the endpoint's port is in use. */
static int bind_to(int fd, struct shoal_address from)
{
    shoal_address_port_put(&from, 0);
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &(int){1}, sizeof(int));
    return bind(fd, (const struct sockaddr *)&from.socket, from.bytes);
}

/* Begins to connect. Returns 0 if connected, EINPROGRESS while that takes time, otherwise the error. Also returns 0 if this
 * process lacks a resource, such as descriptors, because that proves nothing about the peer. */
static int check_start(const struct shoal_reachability_checks *checks, struct shoal_reachability *check)
{
    check->fd = socket(check->to.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (check->fd < 0)
        return 0;
    check->state = SHOAL_REACHABILITY_ASKED;
    if (bind_to(check->fd, checks->from) != 0)
        return 0;
    return connect(check->fd, (const struct sockaddr *)&check->to.socket, check->to.bytes) == 0 ? 0 : errno;
}

/* Returns the answer, if it came, however late this looks for it. */
static int check_answer(const struct shoal_reachability *check, uint64_t now_ns)
{
    struct pollfd entry = {check->fd, POLLOUT, 0};
    int error = 0;
    socklen_t bytes = sizeof error;
    if (poll(&entry, 1, 0) < 1)
        return now_ns < check->until_ns ? EINPROGRESS : ETIMEDOUT;
    return getsockopt(check->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

static void check_look(struct shoal_reachability_checks *checks, struct shoal_reachability *check, uint64_t now_ns)
{
    char text[SHOAL_REACHABILITY_TEXT_MAX];
    int error = EINPROGRESS;
    if (check->state == SHOAL_REACHABILITY_ASKED) {
        error = check_answer(check, now_ns);
    } else if (now_ns >= check->until_ns) {
        error = check_start(checks, check);
        check->until_ns = now_ns + SHOAL_REACHABILITY_ANSWER_S * SHOAL_NS_PER_S;
    }
    if (error == EINPROGRESS)
        return;
    shoal_reachability_settle(checks, check);
    if (!error)
        return;
    check_explain(error, port_of(&check->to), text);
    checks->broken(checks->arg, check, text);
}

void shoal_reachability_look_all(struct shoal_reachability_checks *checks, uint64_t now_ns)
{
    struct shoal_reachability *check = checks->open;
    if (now_ns < checks->next_look_ns)
        return;
    checks->next_look_ns = now_ns + LOOK_NS;
    while (check) {
        struct shoal_reachability *next = check->next;
        check_look(checks, check, now_ns);
        check = next;
    }
}
