/* The agent of host 0: it accepts the others, and passes their messages to the hub. */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "run_agents_state.h"

/* If no descriptor is left, wait this long before accepting connections again. */
enum { ACCEPT_PAUSE_MS = 100 };

void run_agents_hub_send(void *arg, int host, const struct run_message *message)
{
    struct run_agents *agents = arg;
    if (host == agents->index) {
        run_agents_own(agents, message);
        return;
    }
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (!run_link_is_open(link) || link->host != host)
            continue;
        run_link_say(link, message);
        return;
    }
}

/* Returns 0, or the errno of the most informative attempt. */
static int listener_try(struct run_agents *agents)
{
    int error = EADDRINUSE;
    for (int offset = 0; offset < run_agents_ports(agents); offset++) {
        for (int i = 0; i < agents->search.found.list.count; i++) {
            struct shoal_address address = agents->search.found.list.at[i];
            shoal_address_port_put(&address, (uint16_t)run_agents_port(agents, offset));
            const int fd = socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (fd < 0)
                continue;
            const int failure = -shoal_address_listen(fd, &address);
            if (!failure) {
                agents->listener = fd;
                /* For example, if /etc/hosts maps this host's name to 127.0.1.1. */
                if (shoal_address_is_loopback(&address))
                    run_search_note(&agents->search, 3, "that is a loopback address of this host, which no other reaches");
                return 0;
            }
            error = failure == EADDRINUSE ? error : failure;
            close(fd);
        }
    }
    return error;
}

static void listener_open(struct run_agents *agents)
{
    const struct run_place *place = &agents->options->place;
    char text[RUN_REFUSAL_MAX];
    if (!run_agents_look_up(agents)) {
        agents->accept_at = run_agents_now_ms() + LOOKUP_MS;
        return;
    }
    const int error = listener_try(agents);
    if (!error)
        return;
    if (error == EADDRNOTAVAIL)
        snprintf(text, sizeof text,
                 "host 0 cannot listen at %s, which is not an address of this host; --meet, or MASTER_ADDR, names host 0",
                 place->meet);
    else
        snprintf(text, sizeof text, "host 0 cannot listen at %s, ports %d to %d: %s; choose another port to meet at",
                 place->meet, place->port + 1, place->port + run_agents_ports(agents), strerror(error));
    agents->accept_at = NEVER;
    run_agents_own_refusal(agents, text);
}

/* Reports one refusal, and leaves the host time to read it. */
static void refusal_report(struct run_agents *agents, struct run_link *link, const char *text)
{
    struct run_host host;
    if (!agents->is_refusing && run_host_read(&link->link, &host))
        run_output_say(agents->output, "%s, which wants to join as host %d of %u, is refused: %s", host.name, host.index,
                       link->link.client.size, text);
    agents->is_refusing = true;
    link->link.state = SHOAL_LINK_CLOSING;
    run_link_until(link, run_agents_now_ms() + CLOSING_MS);
}

/* Logs nothing about another job, because jobs may share a meeting point. */
static void host_refused(struct run_agents *agents, struct run_link *link)
{
    char text[RUN_REFUSAL_MAX];
    if (link->link.verdict == SHOAL_LINK_NOT_OURS)
        return;
    run_agents_print_refusal(&link->link, text);
    refusal_report(agents, link, text);
}

/* Returns false if no agent sends such a greeting. */
static bool host_opened(struct run_agents *agents, struct run_link *link)
{
    struct run_message message = {.kind = RUN_REFUSED};
    struct run_host host;
    if (!run_host_read(&link->link, &host))
        return false;
    link->host = host.index;
    if (run_hub_join(&agents->hub, &host, message.refusal.text))
        return true;
    link->host = -1;
    run_link_say(link, &message);
    refusal_report(agents, link, message.refusal.text);
    return true;
}

static void link_drop(struct run_agents *agents, struct run_link *link, int error)
{
    const int host = link->host;
    const bool has_left = error == 0 || error == ECONNRESET || error == EPIPE || error == EPROTO;
    run_link_close(link);
    if (host >= 0)
        run_hub_lose(&agents->hub, host, has_left ? RUN_HUB_LEFT : RUN_HUB_SILENT, run_agents_now_ms());
}

/* Returns false if the link ends because of the event. */
static bool host_event_take(struct run_agents *agents, struct run_link *link, enum shoal_link_event event,
                            const struct run_message *message)
{
    if (event == SHOAL_LINK_OPENED)
        return host_opened(agents, link);
    if (event == SHOAL_LINK_REFUSED)
        host_refused(agents, link);
    else if (event == SHOAL_LINK_FRAME && link->host >= 0) /* otherwise this host has left */
        run_hub_hear(&agents->hub, link->host, message, run_agents_now_ms());
    return event != SHOAL_LINK_BROKEN;
}

static void host_link_serve(struct run_agents *agents, struct run_link *link, short events)
{
    struct run_message message;
    enum shoal_link_event event;
    run_link_serve(link, events);
    while (run_link_is_open(link) && (event = run_link_next(link, run_agents_now_ms(), &message)) != SHOAL_LINK_NOTHING)
        if (!host_event_take(agents, link, event, &message))
            link_drop(agents, link, link->link.error);
    const bool is_over = link->link.state == SHOAL_LINK_CLOSING && link->link.error;
    if (run_link_is_open(link) && (is_over || run_link_is_late(link, run_agents_now_ms())))
        link_drop(agents, link, link->link.error);
}

/* Returns a free link, or that of the stranger whose time ends first. */
static struct run_link *place_find(struct run_agents *agents)
{
    struct run_link *oldest = NULL;
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (!run_link_is_open(link))
            return link;
        if (link->host < 0 && (!oldest || run_link_deadline(link) < run_link_deadline(oldest)))
            oldest = link;
    }
    run_link_close(oldest);
    return oldest;
}

static void connection_accept(struct run_agents *agents)
{
    const int fd = accept4(agents->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    const uint64_t now = run_agents_now_ms();
    if (fd >= 0)
        run_link_open(place_find(agents), &agents->own, fd, false, now);
    else if (shoal_link_is_exhausted(errno))
        agents->accept_at = now + ACCEPT_PAUSE_MS;
}

static void missing_say(struct run_agents *agents)
{
    char missing[96];
    run_hub_missing_print(&agents->hub, missing, sizeof missing);
    run_output_say(agents->output, "waiting for %s of %d at %s, port %d%s%s", missing, agents->hosts,
                   agents->options->place.meet, agents->options->place.port, agents->search.reason[0] ? ": " : "",
                   agents->search.reason);
}

/* No host can connect if host 0 does not listen. That is the first cause, and is reported before the hub reports the missing
 * hosts. */
static void deaf_refuse(struct run_agents *agents)
{
    char text[RUN_REFUSAL_MAX];
    snprintf(text, sizeof text, "host 0 could not listen at %.200s within %g s (--meet-timeout): %.400s",
             agents->options->place.meet, (double)agents->options->meet_ms / 1000.0, agents->search.reason);
    run_agents_own_refusal(agents, text);
}

void run_agents_serve_hosts(struct run_agents *agents, const struct pollfd *polls)
{
    const uint64_t now = run_agents_now_ms();
    if (agents->hub.phase != RUN_HUB_MEETING)
        agents->word_at = NEVER;
    if (now >= agents->word_at) {
        agents->word_at = NEVER;
        missing_say(agents);
    }
    if (agents->listener < 0 && now >= agents->accept_at)
        listener_open(agents);
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (run_link_is_open(link) && polls[1 + i].fd == link->link.fd && (polls[1 + i].revents || run_link_is_late(link, now)))
            host_link_serve(agents, link, polls[1 + i].revents);
    }
    if (polls[0].fd >= 0 && polls[0].revents)
        connection_accept(agents);
    if (agents->listener < 0 && agents->hub.phase == RUN_HUB_MEETING && now >= agents->hub.meet_at)
        deaf_refuse(agents);
    run_hub_expire(&agents->hub, now);
}
