/* Shared by the files of run_agents.h: run_agents.c holds both sides together, run_agents_hub.c is host 0's side, and
 * run_agents_join.c that of the other hosts. One thread. */
#ifndef SHOAL_TOOLS_RUN_AGENTS_STATE_H
#define SHOAL_TOOLS_RUN_AGENTS_STATE_H

#include "run_agents.h"
#include "run_hub.h"
#include "run_link.h"

#define NEVER UINT64_MAX

enum { PORTS_AFTER_MEETING = 16 };
enum { CLOSING_MS = 2000, LOOKUP_MS = 500, LOOKUP_WAIT_MS = 500 };

enum { OWN_STOP_BY_SIGNAL = RUN_KIND_END, OWN_END };

/* The addresses of the meeting point. */
struct run_addresses {
    struct shoal_address_list list;
    const char *reason; /* why there are none, in static storage */
};

/* How an agent looks for host 0. */
struct run_search {
    struct shoal_timed_call *lookup; /* NULL: none under way */
    struct run_addresses found;
    int at, offset; /* the address and the port to try: PORT + 16 - offset */
    int round;
    bool is_wide; /* also other ports */
    uint64_t pause_ms, next_at, give_up_at, lookup_at;
    bool has_warned;
    char reason[RUN_REFUSAL_MAX]; /* why the most informative attempt failed */
    int weight;
};

struct run_agents {
    const struct run_options *options;
    struct run_output *output;
    struct shoal_link_identity own;
    int index, hosts;
    bool has_left;
    uint64_t word_at;
    /* for this host, from its own agent: the last message of each kind; a STOP for a signal is at OWN_STOP_BY_SIGNAL */
    struct run_message *queued;
    uint64_t queued_at[OWN_END], queued_count; /* the order in which they came; 0: none */
    /* on host 0 */
    struct run_hub hub;
    bool is_refusing; /* a connection was refused, and a line has reported it */
    int listener;
    uint64_t accept_at;
    /* on host 0: one for each host, then strangers; elsewhere one, to host 0 */
    struct run_link *links;
    int link_count;
    struct run_search search;
    struct run_start start;          /* the last that came */
    bool is_started, is_partitioned; /* host 0 was lost after START */
    bool has_ended;                  /* ENDED was sent for this attempt */
    bool has_stop;                   /* STOP has come in this attempt */
    uint64_t answer_at;              /* if host 0 sends nothing until then, it counts as lost */
};

/* Time for workers that hang in the kernel (run.c), plus this margin for slow hosts. */
enum { RUN_END_MS_MORE = 20000 };

uint64_t run_agents_now_ms(void);

static inline void run_agents_earlier(uint64_t *at, uint64_t other)
{
    if (other < *at)
        *at = other;
}

/* Queues a message from this host's own agent for run.c. It replaces one of its kind that run.c has not read yet. Only STOP
 * comes twice: for a failure or a loss, and then for signals, each with a higher count of requests. These two do not replace
 * each other. */
void run_agents_own(struct run_agents *agents, const struct run_message *message);
void run_agents_own_refusal(struct run_agents *agents, const char *text);

/* Looks up the meeting point's name, for LOOKUP_WAIT_MS at most; the next call uses a later answer. Returns false if no address
 * is known yet: names of Kubernetes' services appear with their pods. */
bool run_agents_look_up(struct run_agents *agents);

/* Returns the number of ports to meet at. The last one is tried first, because the ranks' store uses the first free one. */
int run_agents_ports(const struct run_agents *agents);
int run_agents_port(const struct run_agents *agents, int offset);

/* Prints why a link is refused. On host 0, "it" is the host that wants to join; elsewhere it is host 0. */
void run_agents_print_refusal(const struct shoal_link *link, char text[RUN_REFUSAL_MAX]);

/* Keeps the reason unless a more informative one is stored. */
void run_search_note(struct run_search *search, int weight, const char *reason);

/* On host 0: acts after poll(), and the function through which its hub sends. */
void run_agents_serve_hosts(struct run_agents *agents, const struct pollfd *polls);
void run_agents_hub_send(void *arg, int host, const struct run_message *message);

/* On the other hosts: acts after poll(); returns host 0's next message for run.c, which stays in the link until it is read; and
 * queues STOP or VERDICT for this host when it has lost host 0. */
void run_agents_serve_host_0(struct run_agents *agents, const struct pollfd *polls);
bool run_agents_host_0_next(struct run_agents *agents, struct run_message *message_out);

/* Sets the time at which host 0 counts as lost if it sends nothing. Host 0 answers the first TROUBLE of an attempt with STOP;
 * after STOP and ENDED it decides when it waits for no other host. kind: the message just sent. */
void run_agents_await(struct run_agents *agents, enum run_kind kind);
void run_agents_own_loss(struct run_agents *agents, enum run_kind kind);

#endif
