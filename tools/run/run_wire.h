/* The messages between the `shoal run` of several hosts, the agents. Each agent keeps one link (link/link.h) to that of host 0.
 * After its handshake:
 *
 *     agent of host I                         agent of host 0
 *                                 <------  START  all have come; or REFUSED  one has not
 *     TROUBLE  a worker failed    ------>
 *                                 <------  STOP  to all hosts
 *     STOPPING  STOP has come     ------>
 *     ENDED  no worker is left    ------>
 *                                 <------  TELL  asks about a rank, to its host alone
 *     TOLD  how it ended          ------>
 *                                 <------  VERDICT  the first cause, to all hosts; then START again, or the end
 *
 * NOTE, a line for people, may come to any host between START and VERDICT. Messages about workers carry the number of the
 * workers' attempt, so a message that is late by an attempt changes nothing.
 *
 * A hello's rank is the host's index, its size the number of hosts, and its greeting the number of workers. The value of a
 * frame is the fields of its kind in a row (the table in run_wire.c): numbers of four bytes, and texts after their length. Pure
 * functions; libc only; any thread. */
#ifndef SHOAL_TOOLS_RUN_WIRE_H
#define SHOAL_TOOLS_RUN_WIRE_H

#include "link/link.h"

enum { RUN_PROTOCOL = SHOAL_LINK_PROTOCOL(SHOAL_LINK_AGENTS, 4), RUN_NAME_MAX = SHOAL_LINK_HOST_BYTES };
enum { RUN_WORDS_MAX = 768, RUN_TAIL_TEXT_MAX = 10304, RUN_REFUSAL_MAX = 768, RUN_SESSION_MAX = 160 };

enum run_kind {
    RUN_REFUSED = SHOAL_LINK_KIND_END,
    RUN_START,
    RUN_TROUBLE,
    RUN_STOP,
    RUN_ENDED,
    RUN_TELL,
    RUN_TOLD,
    RUN_VERDICT,
    RUN_STOPPING,
    RUN_NOTE,
    RUN_KIND_END
};

enum run_cause_kind {
    RUN_CAUSE_NONE,     /* all workers ended with code 0 */
    RUN_CAUSE_WORKER,   /* a worker failed */
    RUN_CAUSE_TOGETHER, /* the ranks failed together, none of them first */
    RUN_CAUSE_UNSTARTED,
    RUN_CAUSE_LOST, /* a host is lost */
    RUN_CAUSE_SIGNAL,
    RUN_CAUSE_TIMEOUT,
    RUN_CAUSE_END
};

/* The greeting of an agent. */
struct run_greeting {
    int32_t workers; /* number that this host starts */
    int32_t grace_ms;
};

/* A host that has come. */
struct run_host {
    int32_t index, workers, grace_ms;
    char name[RUN_NAME_MAX];
};

struct run_refusal {
    char text[RUN_REFUSAL_MAX];
};

struct run_start {
    int32_t attempt, restarts; /* attempt: 0, then one more after each failure, `restarts` at most */
    int32_t first_rank, ranks; /* first_rank of this host, ranks of the job */
    int32_t grace_ms;          /* the longest --grace of all hosts */
    int32_t answer_ms;         /* time in which an agent answers, also while it starts its workers */
    char session[RUN_SESSION_MAX];
};

/* An event that ends the run. */
struct run_event {
    int32_t cause; /* enum run_cause_kind */
    int32_t host;
    int32_t rank; /* the worker that was the first to fail there; -1: none */
    int32_t code; /* the resulting exit code */
    int32_t signal;
    int32_t asked; /* number of requests to this host to end */
    int32_t attempt;
};

enum run_blamed { RUN_BLAMED_OWN, RUN_BLAMED_ELSEWHERE, RUN_BLAMED_TOGETHER };

/* No worker is left on this host. */
struct run_ended {
    int32_t rank;     /* rank of this host to blame for the failure here; -1: nothing failed */
    int32_t blamed;   /* enum run_blamed: from the logs of its ranks */
    int32_t other;    /* the rank that they blame on another host; -1: they do not name it */
    int32_t is_clean; /* all its workers ended with code 0 */
    int32_t survived; /* at least one of them did */
    int32_t attempt;
};

struct run_tell {
    int32_t rank;
};

struct run_stopping {
    int32_t attempt;
};

struct run_note {
    char text[RUN_REFUSAL_MAX];
};

/* The cause of an attempt's end, which every host reports. */
struct run_cause {
    int32_t kind; /* enum run_cause_kind */
    int32_t host;
    int32_t rank, pid;
    int32_t code; /* exit code of `shoal run`, on every host */
    int32_t signal;
    int32_t is_clean;   /* all workers of all hosts ended with code 0 */
    int32_t is_retried; /* START follows */
    int32_t attempt;
    char name[RUN_NAME_MAX];
    char words[RUN_WORDS_MAX];    /* "killed by signal 9 (Killed)" */
    char tail[RUN_TAIL_TEXT_MAX]; /* the last lines of that worker, each with its end */
};

struct run_message {
    enum run_kind kind;
    union {
        struct run_refusal refusal;
        struct run_start start;
        struct run_event event; /* TROUBLE, STOP */
        struct run_ended ended;
        struct run_tell tell;
        struct run_cause cause; /* TOLD, VERDICT */
        struct run_stopping stopping;
        struct run_note note;
    };
};

enum { RUN_VALUE_BYTES_MAX = 12288 };

extern const struct shoal_link_service run_link_service;

/* Writes the value of a message's frame. Returns its number of bytes. */
size_t run_value_build(const struct run_message *message, unsigned char value[RUN_VALUE_BYTES_MAX]);

/* Reads the value of a frame. The numbers are within the limits of their fields. The texts are terminated and have no control
 * characters, except line ends and tabs in tails. Returns false if no agent sends such bytes. */
bool run_value_parse(enum run_kind kind, const unsigned char *value, size_t bytes, struct run_message *message_out);

/* Describes the host at the other side of a link whose hello has come. Returns false if no agent sends such a greeting. */
bool run_host_read(const struct shoal_link *link, struct run_host *host_out);

#endif
