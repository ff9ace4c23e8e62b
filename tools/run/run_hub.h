/* The decisions of host 0's agent for all hosts of a run: when workers start, what ends them, which failure was the first, and
 * whether all start again. It opens nothing and waits for nothing. Its caller passes in the agents' messages (run_wire.h), the
 * loss of a host and the time; it passes messages to a function. With one host it decides the same way.
 *
 *     MEETING --all hosts are here--> RUNNING --TROUBLE of a host, or one is lost--> STOPPING
 *                                        |                                              | all hosts have sent ENDED or are lost
 *                                        | all hosts have sent ENDED                    v
 *                                        |                                           TELLING  asks the host of the blamed rank
 *                                        v                                              |
 *                                      OVER <---VERDICT to all-------------------------'|
 *                                                                                       '--> RUNNING: START again (--restarts)
 *
 * The first cause is that of the host whose TROUBLE came first. If the ranks of that host blame a rank on another host, the hub
 * asks about that rank; if its host is lost, that is the cause. A host whose agent does not answer STOP is named on all hosts,
 * and the others end without it, unless all could start again: that needs every host. Messages about the workers of an earlier
 * attempt change nothing. With --keep-going no failure sends TROUBLE, and the loss of a host ends nothing: the run has failed
 * if no worker of any host has ended with 0. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_HUB_H
#define SHOAL_TOOLS_RUN_HUB_H

#include "run_wire.h"

enum run_hub_phase { RUN_HUB_MEETING, RUN_HUB_RUNNING, RUN_HUB_STOPPING, RUN_HUB_TELLING, RUN_HUB_OVER };

/* RUN_HUB_TELL_MS is the wait for an answer about a rank, RUN_HUB_ANSWER_MS that for any message after STOP, to which each
 * worker of the largest host adds RUN_HUB_WORKER_MS: an agent does not answer while it starts its workers. An agent whose
 * workers end late answers at once; one that is stopped or starved does not. */
enum { RUN_HUB_TELL_MS = 3000, RUN_HUB_ANSWER_MS = 4000, RUN_HUB_WORKER_MS = 10 };

/* How a host is lost. */
enum run_hub_loss { RUN_HUB_LEFT, RUN_HUB_SILENT };

struct run_hub_host {
    bool is_here, is_lost, has_ended;
    bool has_answered; /* it has answered the STOP of this attempt */
    enum run_hub_loss loss;
    int32_t workers, first_rank, grace_ms;
    struct run_ended ended;
    char name[RUN_NAME_MAX];
};

/* Takes a message for a host. */
typedef void run_hub_send_fn(void *arg, int host, const struct run_message *message);

struct run_hub_settings {
    int hosts;
    int restarts;
    bool keeps_going;                   /* the loss of a host ends only that host */
    uint64_t meet_ms;                   /* time for all hosts to come */
    uint64_t end_ms;                    /* after the longest grace time, all hosts have this long to end their workers */
    char session[RUN_SESSION_MAX - 16]; /* a name for the job; an attempt's name is this and a number */
    run_hub_send_fn *send;
    void *arg;
};

struct run_hub {
    struct run_hub_settings settings;
    enum run_hub_phase phase;
    int attempt;
    int ranks;
    int here;                            /* number of hosts that have come */
    int32_t grace_ms, answer_ms;         /* as in START */
    bool is_asked;                       /* a signal has requested the end: nothing starts again */
    int asked;                           /* number of requests to end sent to all hosts in this attempt */
    bool has_waited;                     /* the time for answers to STOP has passed */
    struct run_event first;              /* the event that ends this attempt; its cause is NONE while there is none */
    struct run_tell told;                /* the rank asked about, */
    int told_host;                       /* and its host */
    uint64_t meet_at, end_at, answer_at; /* UINT64_MAX: no deadline now */
    struct run_hub_host *at;
};

/* Returns false if out of memory. */
bool run_hub_open(struct run_hub *hub, const struct run_hub_settings *settings, uint64_t now_ms);
void run_hub_close(struct run_hub *hub);

/* A host has come and proved the secret; its index is less than the number of hosts. Returns true, or false with the reason for
 * its refusal in text. */
bool run_hub_join(struct run_hub *hub, const struct run_host *host, char text[RUN_REFUSAL_MAX]);

/* Handles a message from the agent of a host that has joined. */
void run_hub_hear(struct run_hub *hub, int host, const struct run_message *message, uint64_t now_ms);

/* Returns true if the host's agent has not answered STOP in time, and has sent nothing about an end since. */
bool run_hub_is_silent(const struct run_hub *hub, int host);

/* Handles the end of a host's connection. */
void run_hub_lose(struct run_hub *hub, int host, enum run_hub_loss loss, uint64_t now_ms);

/* Acts on deadlines that have passed; the next one is at run_hub_deadline (UINT64_MAX: none). */
void run_hub_expire(struct run_hub *hub, uint64_t now_ms);
uint64_t run_hub_deadline(const struct run_hub *hub);

/* Prints the missing hosts: "host 1" or "hosts 1, 3"; a long list is cut. */
void run_hub_missing_print(const struct run_hub *hub, char *text, size_t bytes);

#endif
