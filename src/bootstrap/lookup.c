#include "bootstrap/lookup.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/timed_call.h"

#define PAUSE_MS 100

enum shoal_status shoal_lookup_find(const char *host, const char *what, uint64_t deadline_ns, struct shoal_log *log,
                                    struct shoal_address_list *list_out)
{
    struct shoal_address_list list;
    int error;
    while ((error = shoal_address_ask(host, &list)) == EAI_AGAIN && shoal_clock_ns() < deadline_ns)
        poll(NULL, 0, PAUSE_MS);
    if (error)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "the host name \"%.200s\" in %s cannot be looked up: %s",
                              host, what, shoal_address_ask_error(error));
    if (list.count == 0)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap",
                              "the host name \"%.200s\" in %s has no IPv4 or IPv6 address", host, what);
    *list_out = list;
    return SHOAL_OK;
}

static void lookup_ask(void *data)
{
    struct shoal_lookup *lookup = data;
    struct shoal_log log;
    shoal_log_init_quiet(&log);
    lookup->status = shoal_lookup_find(lookup->host, lookup->what, lookup->until_ns, &log, &lookup->list);
    (void)shoal_log_last_error(&log, lookup->error, sizeof lookup->error);
    shoal_log_fini(&log);
}

static void lookup_run(const char *host, const char *what, uint32_t timeout_ms, struct shoal_lookup *lookup_out)
{
    const uint64_t begin_ns = shoal_clock_ns();
    snprintf(lookup_out->host, sizeof lookup_out->host, "%s", host);
    lookup_out->what = what;
    const enum shoal_status status = shoal_timed_call(lookup_ask, lookup_out, sizeof *lookup_out, timeout_ms);
    lookup_out->took_ms = (uint32_t)((shoal_clock_ns() - begin_ns) / SHOAL_NS_PER_MS);
    if (status == SHOAL_OK)
        return;
    lookup_out->status = status;
    snprintf(lookup_out->error, sizeof lookup_out->error, "the host name \"%.200s\" in %s cannot be looked up: %s", host, what,
             status == SHOAL_ERR_TIMEOUT ? "no answer in time" : "no memory or thread for it");
}

void shoal_lookup_run(const char *host, const char *what, uint32_t timeout_ms, struct shoal_lookup *lookup_out)
{
    memset(lookup_out, 0, sizeof *lookup_out);
    lookup_run(host, what, timeout_ms, lookup_out);
}

enum shoal_status shoal_lookup_list(const char *host, const char *what, uint64_t deadline_ns, struct shoal_log *log,
                                    struct shoal_address_list *list_out)
{
    const uint64_t now_ns = shoal_clock_ns();
    const uint32_t timeout_ms = deadline_ns > now_ns ? (uint32_t)((deadline_ns - now_ns) / SHOAL_NS_PER_MS) + 1 : 1;
    struct shoal_lookup lookup = {.until_ns = deadline_ns};
    lookup_run(host, what, timeout_ms, &lookup);
    if (lookup.status != SHOAL_OK)
        return shoal_log_fail(log, lookup.status, "bootstrap", "%s", lookup.error);
    *list_out = lookup.list;
    return SHOAL_OK;
}

int shoal_port_try(const struct shoal_address *address, uint16_t port)
{
    struct shoal_address at = *address;
    shoal_address_port_put(&at, port);
    const int fd = socket(at.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (at.socket.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &(int){1}, sizeof(int));
    const int error = bind(fd, (const struct sockaddr *)&at.socket, at.bytes) == 0 ? 0 : errno;
    close(fd);
    return error;
}
