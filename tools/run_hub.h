/* What the agent of host 0 decides for all hosts of a run: when workers start, what ends them, which failure was the first, and
 * whether all start again. It opens nothing and waits for nothing: it is told what agents say (run_wire.h), when a host is lost
 * and what time it is, and hands messages to a function. With one host it decides the same way.
 *
 *     MEETING --all hosts are here--> RUNNING --TROUBLE of a host, or one is lost--> STOPPING
 *                                        |                                              | all hosts have said ENDED or are lost
 *                                        | all hosts have said ENDED                    v
 *                                        |                                           TELLING  asks the host of the blamed rank
 *                                        v                                              |
 *                                      OVER <---VERDICT to all-------------------------'|
 *                                                                                       '--> RUNNING: START again (--restarts)
 *
 * The first cause is that of the host whose TROUBLE came first. Where the ranks of that host blame a rank on another host, that
 * rank is asked about, and where its host is lost, that is the cause. A host whose agent does not answer STOP is named on all
 * hosts, and the others end without it, unless all could start again: that takes every host. Messages about the workers of an
 * earlier attempt change nothing. libc only; one thread. */
#ifndef SHOAL_TOOLS_RUN_HUB_H
#define SHOAL_TOOLS_RUN_HUB_H

#include "run_wire.h"

enum run_hub_phase { RUN_HUB_MEETING, RUN_HUB_RUNNING, RUN_HUB_STOPPING, RUN_HUB_TELLING, RUN_HUB_OVER };

/* How long it waits for an answer about a rank; and for any word after STOP: an agent that is merely late with the end of its
 * workers answers at once, one that is stopped or starved does not. */
enum { RUN_HUB_TELL_MS = 3000, RUN_HUB_ANSWER_MS = 4000 };

/* How a host is lost. */
enum run_hub_loss { RUN_HUB_LEFT, RUN_HUB_SILENT };

struct run_hub_host {
    bool is_here, is_lost, has_ended;
    bool has_answered; /* the STOP of this attempt */
    enum run_hub_loss loss;
    int32_t workers, first_rank;
    struct run_ended ended;
    char name[RUN_NAME_MAX];
};

/* Takes a message for a host. */
typedef void run_hub_send_fn(void *arg, int host, const struct run_message *message);

struct run_hub_settings {
    int hosts;
    int restarts;
    uint64_t meet_ms;                   /* until all hosts have to be there */
    uint64_t end_ms;                    /* from a STOP until all of them have to have ended their workers */
    char session[RUN_SESSION_MAX - 16]; /* a name for the job; that of an attempt has a number behind it */
    run_hub_send_fn *send;
    void *arg;
};

struct run_hub {
    struct run_hub_settings settings;
    enum run_hub_phase phase;
    int attempt;
    int ranks;
    int here;                            /* how many hosts have come */
    bool is_asked;                       /* by a signal, to end: nothing starts again */
    int asked;                           /* how often all hosts have been asked in this attempt */
    bool has_waited;                     /* for the answers to STOP */
    struct run_event first;              /* what ends this attempt; its cause is NONE while nothing does */
    struct run_tell told;                /* the rank asked about, */
    int told_host;                       /* and its host */
    uint64_t meet_at, end_at, answer_at; /* UINT64_MAX: no such deadline now */
    struct run_hub_host *at;
};

/* Returns false without memory. */
bool run_hub_open(struct run_hub *hub, const struct run_hub_settings *settings, uint64_t now_ms);
void run_hub_close(struct run_hub *hub);

/* A host has come and proved itself. Returns true, or false with why it is not taken. */
bool run_hub_join(struct run_hub *hub, const struct run_hello *hello, uint64_t now_ms, char text[RUN_REFUSAL_MAX]);

/* What the agent of a host that has joined says. */
void run_hub_hear(struct run_hub *hub, int host, const struct run_message *message, uint64_t now_ms);

/* Returns true if its agent has not answered STOP in time, nor said anything of an end since. */
bool run_hub_is_silent(const struct run_hub *hub, int host);

/* Its connection has ended. */
void run_hub_lose(struct run_hub *hub, int host, enum run_hub_loss loss, uint64_t now_ms);

/* Acts on deadlines that have passed; the next one is at run_hub_deadline (UINT64_MAX: none). */
void run_hub_expire(struct run_hub *hub, uint64_t now_ms);
uint64_t run_hub_deadline(const struct run_hub *hub);

/* Who is not there yet: "host 1" or "hosts 1, 3"; a long list is cut. */
void run_hub_missing_print(const struct run_hub *hub, char *text, size_t bytes);

#endif
