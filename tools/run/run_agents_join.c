/* The agents of the other hosts: they look for host 0 and receive its messages. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "base/timed_call.h"
#include "run_agents_state.h"

enum { CONNECT_MS = 2000, PAUSE_MS_MAX = 1000, PORT_MAX = 65535 };
/* Every WIDE_EVERY rounds all ports are tried. */
enum { WIDE_EVERY = 8 };

/* ---- finding host 0 ---- */

int run_agents_ports(const struct run_agents *agents)
{
    const int after = PORT_MAX - agents->options->place.port;
    return after < PORTS_AFTER_MEETING ? after : PORTS_AFTER_MEETING;
}

int run_agents_port(const struct run_agents *agents, int offset)
{
    return agents->options->place.port + run_agents_ports(agents) - offset;
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
    const int error = shoal_address_ask(lookup->name, &lookup->found.list);
    lookup->found.reason = error ? shoal_address_ask_error(error) : "it has no address";
}

static struct shoal_timed_call *lookup_begin(const char *name)
{
    struct lookup lookup = {.found.reason = NULL};
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
    if (search->found.list.count == 0)
        run_search_note(search, 2, reason);
    return search->found.list.count > 0;
}

/* ---- the other hosts ---- */

/* Moves to the next port or address; after the last one, pauses. Ports other than the first are tried if something else answers
 * at the first, and from time to time. */
static void search_go_on(struct run_search *search, int ports)
{
    if (++search->at < search->found.list.count)
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
    if (!search->found.list.count || now >= search->lookup_at) {
        search->lookup_at = now + 10 * LOOKUP_MS;
        if (!run_agents_look_up(agents)) {
            search->next_at = now + LOOKUP_MS;
            search->lookup_at = 0;
            return;
        }
        search->at = search->at < search->found.list.count ? search->at : 0;
    }
    struct shoal_address address = search->found.list.at[search->at];
    shoal_address_port_put(&address, (uint16_t)run_agents_port(agents, search->offset));
    const int error = run_link_connect(&agents->links[0], &agents->own, &address, now + CONNECT_MS);
    if (error)
        search_miss(agents, 1, strerror(error));
}

static void greet(struct run_agents *agents, struct run_link *link)
{
    int error = shoal_address_error(link->link.fd);
    if (!error && !shoal_link_greet(&link->link))
        error = link->link.error;
    if (error) {
        search_miss(agents, error == ECONNREFUSED ? 0 : 1, strerror(error));
        return;
    }
    run_link_until(link, run_agents_now_ms() + SHOAL_LINK_HANDSHAKE_MS);
}

static void refusal_take(struct run_agents *agents, const struct run_message *message)
{
    run_agents_own(agents, message);
    run_link_close(&agents->links[0]);
    agents->search.next_at = NEVER;
}

/* Only this job's host 0 ends the search: without the same secret, it may be that of another job. */
static void refused(struct run_agents *agents, const struct shoal_link *link)
{
    struct run_message message = {.kind = RUN_REFUSED};
    char text[RUN_REFUSAL_MAX];
    run_agents_print_refusal(link, text);
    const bool is_secret = link->verdict == SHOAL_LINK_SECRET_ONE_SIDED || link->verdict == SHOAL_LINK_SECRET_WRONG;
    if (link->verdict == SHOAL_LINK_NOT_OURS) {
        search_miss(agents, 2, "another job's `shoal run` listens there");
    } else if (is_secret || (link->own->hello.has_secret && !link->is_other_proved)) {
        secret_miss(agents, text);
    } else {
        snprintf(message.refusal.text, sizeof message.refusal.text, "host 0 at %s refuses this host: %.480s",
                 agents->options->place.meet, text);
        refusal_take(agents, &message);
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
    else
        member_hear(agents, link, message);
    return message->kind != RUN_REFUSED;
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
        search_miss(agents, 2,
                    error == EPROTO       ? "something else answers there"
                    : error == ECONNRESET ? "something there ends each connection"
                                          : strerror(error));
        return;
    }
    agents->search.next_at = NEVER;
    agents->search.weight = 0;
    const bool is_gone = error == ECONNRESET || error == EPIPE || error == EPROTO;
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
    enum shoal_link_event event = SHOAL_LINK_SHAKEN;
    while (run_link_is_open(link) && event != SHOAL_LINK_NOTHING) {
        event = run_link_next(link, run_agents_now_ms(), message_out);
        if (event == SHOAL_LINK_FRAME && word_of_host_0_take(agents, link, message_out))
            return true;
        if (event == SHOAL_LINK_REFUSED)
            refused(agents, &link->link);
        else if (event == SHOAL_LINK_BROKEN)
            host_0_lose(agents, link->link.error);
    }
    return false;
}

static void link_to_host_0_serve(struct run_agents *agents, struct run_link *link, short events)
{
    if (link->link.state == SHOAL_LINK_CONNECTING && events)
        greet(agents, link);
    if (!run_link_is_open(link))
        return;
    run_link_serve(link, events);
    if (link->link.state == SHOAL_LINK_CLOSING && link->link.error)
        run_link_close(link);
    else if (!link->link.error && run_link_is_late(link, run_agents_now_ms()))
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
    if (run_link_is_open(link) && !link->link.error && (polls[0].revents || run_link_is_late(link, now)))
        link_to_host_0_serve(agents, link, polls[0].revents);
    if (run_link_is_open(link) && !link->link.error && now >= agents->answer_at)
        link->link.error = ETIME;
    if (agents->is_started)
        agents->word_at = NEVER;
    if (now >= agents->word_at) {
        agents->word_at = NEVER;
        run_output_say(agents->output, "waiting for %s at %s, port %d%s%s",
                       link->link.state == SHOAL_LINK_OPEN ? "the other hosts, with host 0" : "host 0",
                       agents->options->place.meet, agents->options->place.port, agents->search.reason[0] ? ": " : "",
                       agents->search.reason);
    }
    if (run_link_is_open(link) || agents->search.next_at == NEVER)
        return;
    if (now >= agents->search.give_up_at)
        search_give_up(agents);
    else if (now >= agents->search.next_at)
        search_try(agents);
}
