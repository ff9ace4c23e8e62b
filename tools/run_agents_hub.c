/* The agent of host 0: it accepts the others, and passes their messages to the hub. */
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "link/auth.h"
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
        if (link->fd < 0 || link->host != host)
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
        for (int i = 0; i < agents->search.found.count; i++) {
            struct run_address address = agents->search.found.at[i];
            run_address_port_put(&address, run_agents_port(agents, offset));
            const int fd = socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (fd < 0)
                continue;
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
            if (bind(fd, (struct sockaddr *)&address.socket, address.bytes) == 0 && listen(fd, SOMAXCONN) == 0) {
                agents->listener = fd;
                /* For example, if /etc/hosts maps this host's name to 127.0.1.1. */
                if (run_address_is_loopback(&address))
                    run_search_note(&agents->search, 3, "that is a loopback address of this host, which no other reaches");
                return 0;
            }
            error = errno == EADDRINUSE ? error : errno;
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

static void link_refuse(struct run_agents *agents, struct run_link *link, bool is_final, const char *text)
{
    struct run_message message = {.kind = RUN_REFUSED, .refusal.is_final = is_final};
    snprintf(message.refusal.text, sizeof message.refusal.text, "%s", text);
    if (!agents->is_refusing)
        run_output_say(agents->output, "%s, which wants to join as host %d of %d, is refused: %s", link->hello.name,
                       link->hello.index, link->hello.hosts, text);
    agents->is_refusing = true;
    run_link_say(link, &message);
    link->state = RUN_LINK_CLOSING;
    link->until = run_agents_now_ms() + CLOSING_MS;
}

/* Logs nothing about another job, because jobs may share a meeting point. */
static void hello_take(struct run_agents *agents, struct run_link *link, const struct run_hello *hello)
{
    struct run_message message = {.kind = RUN_CHALLENGE, .challenge.has_secret = agents->secret.is_set};
    link->hello = *hello;
    if (memcmp(hello->job, agents->self.job, sizeof hello->job) != 0) {
        run_link_close(link);
        return;
    }
    if (hello->has_secret != agents->self.has_secret) {
        link_refuse(agents, link, false,
                    hello->has_secret ? "it has a SHOAL_SECRET, host 0 has none; set the same on all hosts"
                                      : "it has no SHOAL_SECRET, host 0 has one; set the same on all hosts");
        return;
    }
    if (shoal_auth_random(message.challenge.nonce, sizeof message.challenge.nonce) != SHOAL_OK ||
        !run_proof_make(&agents->secret, true, hello, &message.challenge, message.challenge.proof)) {
        run_link_close(link);
        return;
    }
    link->challenge = message.challenge;
    link->state = RUN_LINK_PROOF;
    run_link_say(link, &message);
}

static void proof_take(struct run_agents *agents, struct run_link *link, const unsigned char *proof)
{
    char text[RUN_REFUSAL_MAX];
    if (!run_proof_check(&agents->secret, false, &link->hello, &link->challenge, proof)) {
        link_refuse(agents, link, false, "its SHOAL_SECRET is not that of host 0; set the same on all hosts");
        return;
    }
    link->host = link->hello.index;
    link->state = RUN_LINK_MEMBER;
    link->until = NEVER;
    if (run_hub_join(&agents->hub, &link->hello, run_agents_now_ms(), text))
        return;
    link->host = -1;
    link_refuse(agents, link, true, text);
}

/* Returns false if the link has ended because of the message. */
static bool member_take(struct run_agents *agents, struct run_link *link, const struct run_message *message)
{
    if (link->state == RUN_LINK_MEMBER && link->host < 0)
        return true; /* this host has left */
    if (link->state == RUN_LINK_MEMBER)
        run_hub_hear(&agents->hub, link->host, message, run_agents_now_ms());
    else if (link->state == RUN_LINK_HELLO && message->kind == RUN_HELLO)
        hello_take(agents, link, &message->hello);
    else if (link->state == RUN_LINK_PROOF && message->kind == RUN_PROOF)
        proof_take(agents, link, message->proof);
    else
        return false;
    return link->fd >= 0;
}

static void link_drop(struct run_agents *agents, struct run_link *link, int error)
{
    const int host = link->host;
    run_link_close(link);
    if (host >= 0)
        run_hub_lose(&agents->hub, host, error > 0 && error != ECONNRESET && error != EPIPE ? RUN_HUB_SILENT : RUN_HUB_LEFT,
                     run_agents_now_ms());
}

static void host_link_serve(struct run_agents *agents, struct run_link *link, short events)
{
    struct run_message message;
    const int error = run_link_serve(link, events);
    enum run_parsed parsed = RUN_PARSED_MORE;
    while (link->state != RUN_LINK_CLOSING && (parsed = run_link_next(link, &message)) == RUN_PARSED_FRAME)
        if (!member_take(agents, link, &message)) {
            link_drop(agents, link, ECONNRESET);
            return;
        }
    if (link->state == RUN_LINK_CLOSING)
        link->in_bytes = 0;
    if (error || parsed == RUN_PARSED_BAD || run_agents_now_ms() >= link->until)
        link_drop(agents, link, parsed == RUN_PARSED_BAD ? ECONNRESET : error);
}

/* Returns a free link, or that of the stranger whose time ends first. */
static struct run_link *place_find(struct run_agents *agents)
{
    struct run_link *oldest = NULL;
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (link->fd < 0)
            return link;
        if (link->host < 0 && (!oldest || link->until < oldest->until))
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
        (void)run_link_open(place_find(agents), fd, RUN_LINK_HELLO, now + HANDSHAKE_MS);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
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
        if (link->fd >= 0 && polls[1 + i].fd == link->fd && (polls[1 + i].revents || now >= link->until))
            host_link_serve(agents, link, polls[1 + i].revents);
    }
    if (polls[0].fd >= 0 && polls[0].revents)
        connection_accept(agents);
    if (agents->listener < 0 && agents->hub.phase == RUN_HUB_MEETING && now >= agents->hub.meet_at)
        deaf_refuse(agents);
    run_hub_expire(&agents->hub, now);
}
