#include "run_agents.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bootstrap/auth.h"
#include "run_hub.h"
#include "run_link.h"
#include "run_secret.h"

#define NEVER UINT64_MAX

enum { STRANGERS_MAX = 32, PORTS_AFTER_MEETING = 16, PORT_MAX = 65535, ADDRESSES_MAX = 8 };
enum { HANDSHAKE_MS = 5000, CONNECT_MS = 2000, CLOSING_MS = 2000, LOOKUP_MS = 500, ACCEPT_PAUSE_MS = 100 };
/* Pauses between looks for host 0: short ones at first, as all hosts are started at once. */
enum { PAUSE_MS_MIN = 10, PAUSE_MS_MAX = 1000, WIDE_EVERY = 8 };
/* After so long it says whom it waits for. */
enum { WORD_MS = 10000 };
/* Workers that hang in the kernel are waited for so long (run.c), and this much is for slowness. */
enum { END_MS_MORE = 20000 };
enum { QUEUE_MAX = 16 };

struct address {
    struct sockaddr_storage socket;
    socklen_t bytes;
};

/* How an agent looks for host 0. */
struct search {
    struct address list[ADDRESSES_MAX];
    int count;
    int at, offset; /* the address and the port that are tried: PORT + 16 - offset */
    int round;
    bool is_wide; /* other ports, too */
    uint64_t pause_ms, next_at, give_up_at, lookup_at;
    bool has_warned;
    char reason[RUN_REFUSAL_MAX]; /* why the most telling try failed */
    int weight;
};

struct run_agents {
    const struct run_options *options;
    struct run_output *output;
    struct run_secret secret;
    struct run_hello self;
    int index, hosts;
    bool has_left;
    uint64_t word_at;
    /* for this host */
    struct run_message *queue;
    size_t first, queued;
    /* of host 0 */
    struct run_hub hub;
    bool is_refusing; /* a connection was refused, and that was said */
    int listener;
    uint64_t accept_at;
    /* of host 0: for all hosts, then strangers; else one, to host 0 */
    struct run_link *links;
    int link_count;
    struct search search;
    bool is_started, is_cut; /* host 0 was lost after START */
    bool has_ended;          /* ENDED was said of this attempt */
};

static uint64_t agents_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static bool is_host_0(const struct run_agents *agents)
{
    return agents->index == 0;
}

/* What does not fit is one of many signals. */
static void queue_put(struct run_agents *agents, const struct run_message *message)
{
    if (agents->queued < QUEUE_MAX)
        agents->queue[(agents->first + agents->queued++) % QUEUE_MAX] = *message;
}

bool run_agents_next(struct run_agents *agents, struct run_message *message_out)
{
    if (!agents->queued)
        return false;
    *message_out = agents->queue[agents->first];
    agents->first = (agents->first + 1) % QUEUE_MAX;
    agents->queued--;
    return true;
}

static void refusal_queue(struct run_agents *agents, const char *text)
{
    struct run_message message = {.kind = RUN_REFUSED, .refusal.is_final = true};
    snprintf(message.refusal.text, sizeof message.refusal.text, "%s", text);
    queue_put(agents, &message);
}

/* ---- addresses ---- */

static void port_put(struct address *address, int port)
{
    if (address->socket.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&address->socket)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)&address->socket)->sin_port = htons((uint16_t)port);
}

static int ports_count(const struct run_agents *agents)
{
    const int after = PORT_MAX - agents->options->place.port;
    return after < PORTS_AFTER_MEETING ? after : PORTS_AFTER_MEETING;
}

/* The last port first: the ranks' store takes the first that is free. */
static int port_at(const struct run_agents *agents, int offset)
{
    return agents->options->place.port + ports_count(agents) - offset;
}

static void reason_note(struct search *search, int weight, const char *reason)
{
    if (weight < search->weight)
        return;
    search->weight = weight;
    snprintf(search->reason, sizeof search->reason, "%s", reason);
}

/* Returns false when the name is not known, or not yet: names of Kubernetes' services come with their pods. */
static bool addresses_find(struct run_agents *agents)
{
    const struct addrinfo wanted = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    struct search *search = &agents->search;
    char reason[RUN_REFUSAL_MAX];
    const int error = getaddrinfo(agents->options->place.meet, NULL, &wanted, &found);
    search->count = 0;
    for (const struct addrinfo *one = error ? NULL : found; one && search->count < ADDRESSES_MAX; one = one->ai_next) {
        struct address *address = &search->list[search->count];
        if (one->ai_family != AF_INET && one->ai_family != AF_INET6)
            continue;
        memcpy(&address->socket, one->ai_addr, one->ai_addrlen);
        address->bytes = one->ai_addrlen;
        search->count++;
    }
    if (!error)
        freeaddrinfo(found);
    if (search->count)
        return true;
    snprintf(reason, sizeof reason, "the name cannot be looked up: %s",
             error == EAI_SYSTEM ? strerror(errno)
             : error             ? gai_strerror(error)
                                 : "it has no address");
    reason_note(search, 2, reason);
    return false;
}

/* ---- host 0 ---- */

static void hub_send_to(void *arg, int host, const struct run_message *message)
{
    struct run_agents *agents = arg;
    if (host == agents->index) {
        queue_put(agents, message);
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

/* Returns 0, or the errno of the most telling try. */
static int listener_try(struct run_agents *agents)
{
    int error = EADDRINUSE;
    for (int offset = 0; offset < ports_count(agents); offset++) {
        for (int i = 0; i < agents->search.count; i++) {
            struct address address = agents->search.list[i];
            port_put(&address, port_at(agents, offset));
            const int fd = socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (fd < 0)
                continue;
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
            if (bind(fd, (struct sockaddr *)&address.socket, address.bytes) == 0 && listen(fd, SOMAXCONN) == 0) {
                agents->listener = fd;
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
    if (!addresses_find(agents)) {
        agents->accept_at = agents_now_ms() + LOOKUP_MS;
        return;
    }
    const int error = listener_try(agents);
    if (!error)
        return;
    if (error == EADDRNOTAVAIL)
        snprintf(text, sizeof text,
                 "host 0 cannot listen at %s, which is no address of this host; --meet, or MASTER_ADDR, names host 0",
                 place->meet);
    else
        snprintf(text, sizeof text, "host 0 cannot listen at %s, ports %d to %d: %s; choose another port to meet at",
                 place->meet, place->port + 1, place->port + ports_count(agents), strerror(error));
    agents->accept_at = NEVER;
    refusal_queue(agents, text);
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
    link->until = agents_now_ms() + CLOSING_MS;
}

/* Another job is no word worth: jobs may share a meeting point. */
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
    if (run_hub_join(&agents->hub, &link->hello, agents_now_ms(), text))
        return;
    link->host = -1;
    link_refuse(agents, link, true, text);
}

/* Returns false when the link has ended by it. */
static bool member_take(struct run_agents *agents, struct run_link *link, const struct run_message *message)
{
    if (link->state == RUN_LINK_MEMBER && link->host < 0)
        return true; /* this host has left */
    if (link->state == RUN_LINK_MEMBER)
        run_hub_hear(&agents->hub, link->host, message, agents_now_ms());
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
                     agents_now_ms());
}

static void host_link_serve(struct run_agents *agents, struct run_link *link, short events)
{
    struct run_message message;
    int error = run_link_flush(link);
    if (!error && (events & (POLLIN | POLLERR | POLLHUP)))
        error = run_link_receive(link);
    enum run_parsed parsed = RUN_PARSED_MORE;
    while (link->state != RUN_LINK_CLOSING && (parsed = run_link_next(link, &message)) == RUN_PARSED_FRAME)
        if (!member_take(agents, link, &message)) {
            link_drop(agents, link, ECONNRESET);
            return;
        }
    if (link->state == RUN_LINK_CLOSING)
        link->in_bytes = 0;
    if (error || parsed == RUN_PARSED_BAD || agents_now_ms() >= link->until)
        link_drop(agents, link, parsed == RUN_PARSED_BAD ? ECONNRESET : error);
}

/* A free place, or that of a stranger: the one whose time ends first. */
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
    const uint64_t now = agents_now_ms();
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

static void host_0_serve(struct run_agents *agents, const struct pollfd *polls)
{
    const uint64_t now = agents_now_ms();
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
    run_hub_expire(&agents->hub, now);
}

/* ---- the other hosts ---- */

/* The next port or address; after the last one, a pause. Other ports than the first are tried where something else is at it, and
 * from time to time. */
static void search_go_on(struct search *search, int ports)
{
    if (++search->at < search->count)
        return;
    search->at = 0;
    if ((search->is_wide || search->round % WIDE_EVERY == WIDE_EVERY - 1) && ++search->offset < ports)
        return;
    search->offset = 0;
    search->is_wide = false;
    search->round++;
    search->next_at = agents_now_ms() + search->pause_ms;
    search->pause_ms = search->pause_ms * 3 / 2 < PAUSE_MS_MAX ? search->pause_ms * 3 / 2 : PAUSE_MS_MAX;
}

/* weight: how telling the reason is. What somebody else answered also makes the other ports worth a try. */
static void search_miss(struct run_agents *agents, int weight, const char *reason)
{
    reason_note(&agents->search, weight, reason);
    agents->search.is_wide |= weight > 1;
    run_link_close(&agents->links[0]);
    search_go_on(&agents->search, ports_count(agents));
}

/* A secret that differs may be that of another job at this port, so the search goes on; a person should see it at once. */
static void secret_miss(struct run_agents *agents, const char *reason)
{
    if (!agents->search.has_warned)
        run_output_say(agents->output, "host 0 at %s: %s; trying on", agents->options->place.meet, reason);
    agents->search.has_warned = true;
    search_miss(agents, 4, reason);
}

static void search_try(struct run_agents *agents)
{
    struct search *search = &agents->search;
    const uint64_t now = agents_now_ms();
    if (!search->count || now >= search->lookup_at) {
        search->lookup_at = now + 10 * LOOKUP_MS;
        if (!addresses_find(agents)) {
            search->next_at = now + LOOKUP_MS;
            search->lookup_at = 0;
            return;
        }
        search->at = search->at < search->count ? search->at : 0;
    }
    struct address address = search->list[search->at];
    port_put(&address, port_at(agents, search->offset));
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
    link->until = agents_now_ms() + HANDSHAKE_MS;
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
        queue_put(agents, message);
        run_link_close(&agents->links[0]);
        agents->search.next_at = NEVER;
    } else {
        secret_miss(agents, message->refusal.text);
    }
}

static void word_of_host_0_take(struct run_agents *agents, struct run_link *link, const struct run_message *message)
{
    if (message->kind == RUN_REFUSED) {
        refusal_take(agents, message);
    } else if (link->state == RUN_LINK_GREETED && message->kind == RUN_CHALLENGE) {
        challenge_take(agents, link, &message->challenge);
    } else if (link->state == RUN_LINK_MEMBER) {
        agents->is_started |= message->kind == RUN_START;
        agents->has_ended &= message->kind != RUN_START;
        queue_put(agents, message);
    } else {
        search_miss(agents, 2, "something else answers there");
    }
}

static void loss_queue(struct run_agents *agents, enum run_kind kind)
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
    queue_put(agents, &message);
}

/* Before START the search begins again: the agent of host 0 may have been started a second time. */
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
    reason_note(&agents->search, 0, is_gone ? "its `shoal run` ended without a word" : "it no longer answers");
    agents->is_cut = true;
    if (!agents->has_left)
        loss_queue(agents, agents->has_ended ? RUN_VERDICT : RUN_STOP);
}

static void link_to_host_0_serve(struct run_agents *agents, struct run_link *link, short events)
{
    struct run_message message;
    if (link->state == RUN_LINK_CONNECTING && events)
        greet(agents, link);
    if (link->fd < 0)
        return;
    int error = run_link_flush(link);
    if (!error && (events & (POLLIN | POLLERR | POLLHUP)))
        error = run_link_receive(link);
    enum run_parsed parsed = RUN_PARSED_MORE;
    while (link->fd >= 0 && link->state != RUN_LINK_CLOSING && agents->queued < QUEUE_MAX &&
           (parsed = run_link_next(link, &message)) == RUN_PARSED_FRAME)
        word_of_host_0_take(agents, link, &message);
    if (link->fd < 0)
        return;
    if (error || parsed == RUN_PARSED_BAD)
        host_0_lose(agents, error ? error : ECONNRESET);
    else if (agents_now_ms() >= link->until)
        search_miss(agents, 1, "no answer in time");
}

static void search_give_up(struct run_agents *agents)
{
    const struct run_place *place = &agents->options->place;
    char text[RUN_REFUSAL_MAX];
    snprintf(text, sizeof text, "host 0 of %d did not answer at %s, ports %d to %d, within %g s (--meet-timeout): %.400s",
             agents->hosts, place->meet, place->port + 1, place->port + ports_count(agents),
             (double)agents->options->meet_ms / 1000.0, agents->search.reason);
    agents->search.next_at = NEVER;
    run_link_close(&agents->links[0]);
    refusal_queue(agents, text);
}

static void other_host_serve(struct run_agents *agents, const struct pollfd *polls)
{
    struct run_link *link = &agents->links[0];
    const uint64_t now = agents_now_ms();
    if (link->fd >= 0 && (polls[0].revents || now >= link->until))
        link_to_host_0_serve(agents, link, polls[0].revents);
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

/* ---- both ---- */

size_t run_agents_polls(const struct run_agents *agents)
{
    return (size_t)agents->link_count + 1;
}

/* Host 0: the listener, then the links. */
void run_agents_fill(const struct run_agents *agents, struct pollfd *polls)
{
    const bool accepts = agents->listener >= 0 && agents_now_ms() >= agents->accept_at;
    for (size_t i = 0; i < run_agents_polls(agents); i++)
        polls[i] = (struct pollfd){.fd = -1};
    if (!is_host_0(agents)) {
        polls[0] = run_link_poll(&agents->links[0]);
        return;
    }
    polls[0] = (struct pollfd){.fd = accepts ? agents->listener : -1, .events = POLLIN};
    for (int i = 0; i < agents->link_count; i++)
        polls[1 + i] = run_link_poll(&agents->links[i]);
}

void run_agents_serve(struct run_agents *agents, const struct pollfd *polls)
{
    if (agents->hosts == 1)
        return;
    if (is_host_0(agents))
        host_0_serve(agents, polls);
    else
        other_host_serve(agents, polls);
}

static void agents_earlier(uint64_t *at, uint64_t other)
{
    if (other < *at)
        *at = other;
}

uint64_t run_agents_deadline(const struct run_agents *agents)
{
    uint64_t at = agents->hosts == 1 || agents->has_left ? NEVER : agents->word_at;
    for (int i = 0; i < agents->link_count; i++)
        if (agents->links[i].fd >= 0)
            agents_earlier(&at, agents->links[i].until);
    if (agents->hosts == 1 || agents->has_left)
        return at;
    if (is_host_0(agents)) {
        agents_earlier(&at, run_hub_deadline(&agents->hub));
        if (agents->accept_at > agents_now_ms() || agents->listener < 0)
            agents_earlier(&at, agents->accept_at);
    } else if (agents->links[0].fd < 0) {
        agents_earlier(&at, agents->search.next_at);
    }
    return at;
}

/* A host that has lost host 0 gives the verdict itself, once its workers have ended. */
void run_agents_say(struct run_agents *agents, const struct run_message *message)
{
    agents->has_ended |= message->kind == RUN_ENDED;
    if (is_host_0(agents))
        run_hub_hear(&agents->hub, 0, message, agents_now_ms());
    else if (!agents->is_cut)
        run_link_say(&agents->links[0], message);
    else if (message->kind == RUN_ENDED)
        loss_queue(agents, RUN_VERDICT);
}

void run_agents_leave(struct run_agents *agents)
{
    agents->has_left = true;
    agents->search.next_at = NEVER;
    for (int i = 0; i < agents->link_count; i++) {
        struct run_link *link = &agents->links[i];
        if (link->fd < 0)
            continue;
        /* Host 0 waits until the others have closed: what it had still to read would end their connections before they have
         * read its last words. */
        if (is_host_0(agents) && link->host >= 0)
            link->until = agents_now_ms() + CLOSING_MS;
        else if (!link->out_bytes)
            run_link_close(link);
        else
            link->state = RUN_LINK_CLOSING;
        link->host = -1;
    }
}

bool run_agents_have_left(const struct run_agents *agents)
{
    for (int i = 0; i < agents->link_count; i++)
        if (agents->links[i].fd >= 0 && (is_host_0(agents) || agents->links[i].out_bytes))
            return false;
    return true;
}

/* ---- from begin to end ---- */

/* Distinguishes this job from one at the same meeting point. What a launcher calls its step counts where the step has one task
 * for each host: then it is this run. */
static void job_hash(struct run_agents *agents)
{
    static const struct {
        const char *size, *names[4];
    } sources[] = {{NULL, {"SHOAL_JOB_ID", "TORCHELASTIC_RUN_ID"}},
                   {"SLURM_STEP_NUM_TASKS", {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
                   {"OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE"}}};
    uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a */
    for (size_t s = 0; s < sizeof sources / sizeof sources[0]; s++) {
        const char *size = sources[s].size ? getenv(sources[s].size) : NULL;
        if (sources[s].size && (!size || atoi(size) != agents->hosts))
            continue;
        for (size_t n = 0; n < 4 && sources[s].names[n]; n++) {
            const char *value = getenv(sources[s].names[n]);
            for (size_t i = 0; value && i <= strlen(value); i++)
                hash = (hash ^ (unsigned char)value[i]) * UINT64_C(1099511628211);
        }
    }
    memcpy(agents->self.job, &hash, sizeof hash);
}

/* A name for the ranks' job, so that no other job, and no attempt before, is taken for it. */
static bool session_draw(char *session, size_t bytes)
{
    const char *given = getenv("SHOAL_JOB_ID");
    uint64_t number = 0;
    if (given && *given) {
        snprintf(session, bytes, "%s", given);
        return true;
    }
    if (shoal_auth_random(&number, sizeof number) != SHOAL_OK)
        return false;
    snprintf(session, bytes, "run-%016llx", (unsigned long long)number);
    return true;
}

static bool hub_prepare(struct run_agents *agents)
{
    char text[RUN_REFUSAL_MAX];
    struct run_hub_settings settings = {
        .hosts = agents->hosts,
        .restarts = agents->options->restarts,
        .meet_ms = agents->options->meet_ms,
        .end_ms = agents->options->grace_ms + END_MS_MORE,
        .send = hub_send_to,
        .arg = agents,
    };
    if (!session_draw(settings.session, sizeof settings.session))
        return false;
    return run_hub_open(&agents->hub, &settings, agents_now_ms()) &&
           run_hub_join(&agents->hub, &agents->self, agents_now_ms(), text);
}

static bool agents_prepare(struct run_agents *agents)
{
    const bool is_alone = agents->hosts == 1;
    agents->link_count = is_alone ? 0 : is_host_0(agents) ? agents->hosts + STRANGERS_MAX : 1;
    agents->queue = calloc(QUEUE_MAX, sizeof *agents->queue);
    agents->links = calloc((size_t)agents->link_count + 1, sizeof *agents->links);
    for (int i = 0; agents->links && i < agents->link_count; i++)
        agents->links[i] = (struct run_link){.fd = -1, .host = -1};
    return agents->queue && agents->links && (!is_host_0(agents) || hub_prepare(agents));
}

static void self_fill(struct run_agents *agents)
{
    struct run_hello *self = &agents->self;
    self->protocol = RUN_PROTOCOL;
    self->hosts = agents->hosts;
    self->index = agents->index;
    self->workers = agents->options->workers;
    self->has_secret = agents->secret.is_set;
    if (gethostname(self->name, sizeof self->name - 1))
        snprintf(self->name, sizeof self->name, "?");
    for (char *at = self->name; *at; at++)
        *at = *at > ' ' && *at < 0x7f ? *at : '?';
    job_hash(agents);
}

struct run_agents *run_agents_open(const struct run_options *options, struct run_output *output)
{
    struct run_agents *agents = calloc(1, sizeof *agents);
    char error[RUN_REFUSAL_MAX];
    if (!agents) {
        fputs("shoal run: no memory\n", stderr);
        return NULL;
    }
    agents->options = options;
    agents->output = output;
    agents->index = options->place.index;
    agents->hosts = options->place.hosts;
    agents->listener = -1;
    agents->word_at = agents_now_ms() + WORD_MS;
    agents->search.pause_ms = PAUSE_MS_MIN;
    agents->search.give_up_at = agents_now_ms() + options->meet_ms;
    if (agents->hosts > 1 && !run_secret_load(&agents->secret, error, sizeof error)) {
        fprintf(stderr, "shoal run: %s\n", error);
        run_agents_close(agents);
        return NULL;
    }
    self_fill(agents);
    if (agents_prepare(agents))
        return agents;
    fputs("shoal run: no memory for the hosts\n", stderr);
    run_agents_close(agents);
    return NULL;
}

void run_agents_close(struct run_agents *agents)
{
    if (!agents)
        return;
    for (int i = 0; agents->links && i < agents->link_count; i++)
        run_link_close(&agents->links[i]);
    if (agents->listener >= 0)
        close(agents->listener);
    run_hub_close(&agents->hub);
    explicit_bzero(&agents->secret, sizeof agents->secret);
    free(agents->queue);
    free(agents->links);
    free(agents);
}
