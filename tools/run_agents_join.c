/* The agents of the other hosts: they look for host 0 and receive its messages. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "base/timed_call.h"
#include "link/auth.h"
#include "run_agents_state.h"

enum { CONNECT_MS = 2000, PAUSE_MS_MAX = 1000, PORT_MAX = 65535 };
/* Every WIDE_EVERY rounds all ports are tried. */
enum { WIDE_EVERY = 8 };

/* ---- finding host 0 ---- */

void run_address_port_put(struct run_address *address, int port)
{
    if (address->socket.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&address->socket)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)&address->socket)->sin_port = htons((uint16_t)port);
}

int run_agents_ports(const struct run_agents *agents)
{
    const int after = PORT_MAX - agents->options->place.port;
    return after < PORTS_AFTER_MEETING ? after : PORTS_AFTER_MEETING;
}

int run_agents_port(const struct run_agents *agents, int offset)
{
    return agents->options->place.port + run_agents_ports(agents) - offset;
}

bool run_address_is_loopback(const struct run_address *address)
{
    if (address->socket.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address->socket)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)&address->socket)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

void run_search_note(struct run_search *search, int weight, const char *reason)
{
    if (weight < search->weight)
        return;
    search->weight = weight;
    snprintf(search->reason, sizeof search->reason, "%s", reason);
}

struct lookup {
    char name[RUN_MEET_MAX];
    struct run_addresses found;
};

static void lookup_ask(void *data)
{
    struct lookup *lookup = data;
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct run_addresses *found = &lookup->found;
    struct addrinfo *list = NULL;
    const int error = getaddrinfo(lookup->name, NULL, &wanted, &list);
    /* strerror returns a constant for the numbers that the kernel sets; strerrordesc_np needs glibc 2.32. */
    found->reason = error == EAI_SYSTEM ? strerror(errno) : error ? gai_strerror(error) : "it has no address";
    for (const struct addrinfo *one = error ? NULL : list; one && found->count < ADDRESSES_MAX; one = one->ai_next) {
        if (one->ai_family != AF_INET && one->ai_family != AF_INET6)
            continue;
        struct run_address *address = &found->at[found->count++];
        memcpy(&address->socket, one->ai_addr, one->ai_addrlen);
        address->bytes = one->ai_addrlen;
    }
    if (!error)
        freeaddrinfo(list);
}

static struct shoal_timed_call *lookup_begin(const char *name)
{
    struct lookup lookup = {.found.count = 0};
    snprintf(lookup.name, sizeof lookup.name, "%s", name);
    return shoal_timed_call_begin(lookup_ask, &lookup, sizeof lookup);
}

/* While a name server does not answer, the addresses found earlier stay in use. */
bool run_agents_look_up(struct run_agents *agents)
{
    struct run_search *search = &agents->search;
    struct lookup lookup;
    char reason[RUN_REFUSAL_MAX];
    if (!search->lookup)
        search->lookup = lookup_begin(agents->options->place.meet);
    const bool is_done = search->lookup && shoal_timed_call_wait(search->lookup, LOOKUP_WAIT_MS, &lookup);
    snprintf(reason, sizeof reason, "the name cannot be looked up: %s",
             is_done          ? lookup.found.reason
             : search->lookup ? "no answer from the name server"
                              : "no memory or thread for it");
    if (is_done) {
        shoal_timed_call_close(search->lookup);
        search->lookup = NULL;
        search->found = lookup.found;
    }
    if (search->found.count == 0)
        run_search_note(search, 2, reason);
    return search->found.count > 0;
}

/* ---- the other hosts ---- */

/* Moves to the next port or address; after the last one, pauses. Ports other than the first are tried if something else answers
 * at the first, and from time to time. */
static void search_go_on(struct run_search *search, int ports)
{
    if (++search->at < search->found.count)
        return;
    search->at = 0;
    if ((search->is_wide || search->round % WIDE_EVERY == WIDE_EVERY - 1) && ++search->offset < ports)
        return;
    search->offset = 0;
    search->is_wide = false;
    search->round++;
    search->next_at = run_agents_now_ms() + search->pause_ms;
    search->pause_ms = search->pause_ms * 3 / 2 < PAUSE_MS_MAX ? search->pause_ms * 3 / 2 : PAUSE_MS_MAX;
}

/* weight: how informative the reason is. If something else answered, the other ports are also worth trying. */
static void search_miss(struct run_agents *agents, int weight, const char *reason)
{
    run_search_note(&agents->search, weight, reason);
    agents->search.is_wide |= weight > 1;
    run_link_close(&agents->links[0]);
    search_go_on(&agents->search, run_agents_ports(agents));
}

/* A different secret may be that of another job at this port, so the search continues; but a person should see it at once. */
static void secret_miss(struct run_agents *agents, const char *reason)
{
    if (!agents->search.has_warned)
        run_output_say(agents->output, "host 0 at %s: %s; trying on", agents->options->place.meet, reason);
    agents->search.has_warned = true;
    search_miss(agents, 4, reason);
}

static void search_try(struct run_agents *agents)
{
    struct run_search *search = &agents->search;
    const uint64_t now = run_agents_now_ms();
    if (!search->found.count || now >= search->lookup_at) {
        search->lookup_at = now + 10 * LOOKUP_MS;
        if (!run_agents_look_up(agents)) {
            search->next_at = now + LOOKUP_MS;
            search->lookup_at = 0;
            return;
        }
        search->at = search->at < search->found.count ? search->at : 0;
    }
    struct run_address address = search->found.at[search->at];
    run_address_port_put(&address, run_agents_port(agents, search->offset));
    const int error = run_link_connect(&agents->links[0], &address.socket, address.bytes, now + CONNECT_MS);
    if (error)
        search_miss(agents, 1, strerror(error));
}

static void greet(struct run_agents *agents, struct run_link *link)
{
    struct run_message message = {.kind = RUN_HELLO, .hello = agents->self};
    int error = 0;
    getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
    if (!error && shoal_auth_random(message.hello.nonce, sizeof message.hello.nonce) != SHOAL_OK)
        error = ENOSYS;
    if (error) {
        search_miss(agents, error == ECONNREFUSED ? 0 : 1, strerror(error));
        return;
    }
    link->hello = message.hello;
    link->state = RUN_LINK_GREETED;
    link->until = run_agents_now_ms() + HANDSHAKE_MS;
    run_link_say(link, &message);
}

/* Host 0 proves itself first. */
static void challenge_take(struct run_agents *agents, struct run_link *link, const struct run_challenge *challenge)
{
    struct run_message message = {.kind = RUN_PROOF};
    if (!run_proof_check(&agents->secret, true, &link->hello, challenge, challenge->proof)) {
        secret_miss(agents, "its SHOAL_SECRET is not that of this host; set the same on all hosts");
        return;
    }
    if (!run_proof_make(&agents->secret, false, &link->hello, challenge, message.proof)) {
        search_miss(agents, 3, "no proof can be made");
        return;
    }
    link->state = RUN_LINK_MEMBER;
    link->until = NEVER;
    run_link_say(link, &message);
}

static void refusal_take(struct run_agents *agents, const struct run_message *message)
{
    if (message->refusal.is_final) {
        run_agents_own(agents, message);
        run_link_close(&agents->links[0]);
        agents->search.next_at = NEVER;
    } else {
        secret_miss(agents, message->refusal.text);
    }
}

/* Any message except a note shows that host 0 acts. STOP is answered at once, however long the workers need to end. */
static void member_hear(struct run_agents *agents, struct run_link *link, const struct run_message *message)
{
    if (message->kind == RUN_START) {
        agents->is_started = true;
        agents->start = message->start;
        agents->has_ended = agents->has_stop = false;
    } else if (message->kind == RUN_STOP) {
        const struct run_message answer = {.kind = RUN_STOPPING, .stopping.attempt = message->event.attempt};
        agents->has_stop = true;
        run_link_say(link, &answer);
    }
    if (message->kind != RUN_NOTE)
        agents->answer_at = NEVER;
    if (message->kind == RUN_STOP && agents->has_ended)
        run_agents_await(agents, RUN_ENDED);
}

/* Returns true when the message is for run.c. */
static bool word_of_host_0_take(struct run_agents *agents, struct run_link *link, const struct run_message *message)
{
    if (message->kind == RUN_REFUSED)
        refusal_take(agents, message);
    else if (link->state == RUN_LINK_GREETED && message->kind == RUN_CHALLENGE)
        challenge_take(agents, link, &message->challenge);
    else if (link->state != RUN_LINK_MEMBER)
        search_miss(agents, 2, "something else answers there");
    else
        member_hear(agents, link, message);
    return link->state == RUN_LINK_MEMBER && message->kind != RUN_REFUSED && message->kind != RUN_CHALLENGE;
}

void run_agents_own_loss(struct run_agents *agents, enum run_kind kind)
{
    struct run_message message = {.kind = kind};
    if (kind == RUN_STOP)
        message.event = (struct run_event){.cause = RUN_CAUSE_LOST, .rank = -1, .code = 128 + SIGKILL};
    else
        message.cause = (struct run_cause){.kind = RUN_CAUSE_LOST, .rank = -1, .code = 128 + SIGKILL};
    if (kind == RUN_VERDICT)
        snprintf(message.cause.words, sizeof message.cause.words, "%s", agents->search.reason);
    if (kind == RUN_VERDICT)
        snprintf(message.cause.name, sizeof message.cause.name, "%.63s", agents->options->place.meet);
    run_agents_own(agents, &message);
}

/* Before START the search begins again, because the agent of host 0 may be started a second time. */
static void host_0_lose(struct run_agents *agents, int error)
{
    run_link_close(&agents->links[0]);
    if (!agents->is_started) {
        search_miss(agents, 2, error > 0 ? strerror(error) : "something there ends each connection");
        return;
    }
    agents->search.next_at = NEVER;
    agents->search.weight = 0;
    const bool is_gone = error < 0 || error == ECONNRESET || error == EPIPE;
    run_search_note(&agents->search, 0,
                    is_gone          ? "its `shoal run` ended without a word"
                    : error == ETIME ? "it does not answer: `shoal run` there is stopped or starved"
                                     : "it no longer answers");
    agents->is_partitioned = true;
    if (!agents->has_left)
        run_agents_own_loss(agents, agents->has_ended ? RUN_VERDICT : RUN_STOP);
}

bool run_agents_host_0_next(struct run_agents *agents, struct run_message *message_out)
{
    struct run_link *link = &agents->links[0];
    enum run_parsed parsed = RUN_PARSED_MORE;
    while (link->fd >= 0 && link->state != RUN_LINK_CLOSING && (parsed = run_link_next(link, message_out)) == RUN_PARSED_FRAME)
        if (word_of_host_0_take(agents, link, message_out))
            return true;
    if (link->fd >= 0 && (link->error || parsed == RUN_PARSED_BAD))
        host_0_lose(agents, link->error ? link->error : ECONNRESET);
    return false;
}

static void link_to_host_0_serve(struct run_agents *agents, struct run_link *link, short events)
{
    if (link->state == RUN_LINK_CONNECTING && events)
        greet(agents, link);
    if (link->fd < 0)
        return;
    const int error = run_link_serve(link, events);
    const bool is_closing = link->state == RUN_LINK_CLOSING;
    link->error = error;
    if (is_closing)
        link->in_bytes = 0;
    if (is_closing && error)
        run_link_close(link);
    else if (!error && run_agents_now_ms() >= link->until)
        search_miss(agents, 1, "no answer in time");
}

static void search_give_up(struct run_agents *agents)
{
    const struct run_place *place = &agents->options->place;
    char text[RUN_REFUSAL_MAX];
    snprintf(text, sizeof text, "host 0 of %d did not answer at %s, ports %d to %d, within %g s (--meet-timeout): %.400s",
             agents->hosts, place->meet, place->port + 1, place->port + run_agents_ports(agents),
             (double)agents->options->meet_ms / 1000.0, agents->search.reason);
    agents->search.next_at = NEVER;
    run_link_close(&agents->links[0]);
    run_agents_own_refusal(agents, text);
}

void run_agents_serve_host_0(struct run_agents *agents, const struct pollfd *polls)
{
    struct run_link *link = &agents->links[0];
    const uint64_t now = run_agents_now_ms();
    if (link->fd >= 0 && !link->error && (polls[0].revents || now >= link->until))
        link_to_host_0_serve(agents, link, polls[0].revents);
    if (link->fd >= 0 && !link->error && now >= agents->answer_at)
        link->error = ETIME;
    if (agents->is_started)
        agents->word_at = NEVER;
    if (now >= agents->word_at) {
        agents->word_at = NEVER;
        run_output_say(agents->output, "waiting for %s at %s, port %d%s%s",
                       link->state == RUN_LINK_MEMBER ? "the other hosts, with host 0" : "host 0", agents->options->place.meet,
                       agents->options->place.port, agents->search.reason[0] ? ": " : "", agents->search.reason);
    }
    if (link->fd >= 0 || agents->search.next_at == NEVER)
        return;
    if (now >= agents->search.give_up_at)
        search_give_up(agents);
    else if (now >= agents->search.next_at)
        search_try(agents);
}
