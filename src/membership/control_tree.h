/* A control tree from the inside: what its files share. control.c opens and closes it; control_tree.c says who is whose parent,
 * who may leave, what makes it open; control_thread.c moves bytes and time, and calls the handler. But for opening and closing,
 * and where a field says otherwise, everything belongs to the control thread. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_TREE_H
#define SHOAL_MEMBERSHIP_CONTROL_TREE_H

#include <poll.h>

#include "membership/control_link.h"
#include "membership/control_socket.h"

/* Connections beside one for each rank: strangers, those under way and those at their end. */
#define SHOAL_CONTROL_LINKS_SPARE (SHOAL_CONTROL_STRANGERS_MAX + 16)

enum shoal_control_phase { SHOAL_CONTROL_OPENING, SHOAL_CONTROL_OPEN, SHOAL_CONTROL_FAILED };
enum shoal_control_ending { SHOAL_CONTROL_STAYS, SHOAL_CONTROL_ENDS_IN_ORDER, SHOAL_CONTROL_ENDS_AT_ONCE };

/* The parent that is sought. */
struct shoal_control_attempt {
    int target; /* -1: none */
    uint64_t until_ns, retry_ns;
    int error;           /* of the last try */
    uint64_t refused_ns; /* since when all tries were refused; 0: the last was not */
    enum shoal_tcp_verdict verdict;
};

struct shoal_control_watched {
    int fd; /* -1: not watched. Set once, by any thread under the lock; all else is the control thread's */
    bool is_stopped;
    uint64_t ended_ns; /* 0: runs */
};

struct shoal_control {
    struct shoal_control_core core;
    struct shoal_control_handler handler;
    struct shoal_control_contact *contacts;
    struct shoal_address own;
    uint32_t timeout_ms;
    unsigned generation;
    int listener;
    int event;
    pthread_t thread;
    bool has_thread;

    /* under core.lock */
    pthread_cond_t opened;
    enum shoal_control_phase phase;
    enum shoal_status failure;
    char failure_text[SHOAL_LOG_TEXT_MAX];
    bool delivers;
    uint64_t own_number;
    struct shoal_control_watched *watched;

    atomic_int ending;
    atomic_bool is_woken;

    /* the control thread's */
    struct shoal_control_link **links; /* link_max places */
    size_t link_count, link_max;
    struct pollfd *polled;
    struct shoal_control_attempt attempt;
    uint64_t *awaited_ns; /* per rank: since when it should have come; 0: not awaited */
    uint64_t open_until_ns, beat_ns, looked_ns, accept_ns, leave_until_ns;
    uint64_t turn_ns; /* when the handler wants another turn; 0: whenever */
    bool is_leaving;  /* it has said goodbye, */
    bool is_closed;   /* takes no new links, */
    bool is_shut;     /* and sends nothing more */
    uint64_t notices_delivered, changes_delivered;
};

static inline int shoal_control_tree_rank(const struct shoal_control *control)
{
    return control->core.state.rank;
}

static inline int shoal_control_tree_size(const struct shoal_control *control)
{
    return control->core.state.size;
}

/* Facts that this rank has found out. */
void shoal_control_tree_end(struct shoal_control *control, int rank, enum shoal_control_cause cause);
void shoal_control_tree_stop(struct shoal_control *control, int rank, bool is_stopped, uint64_t now_ns);
bool shoal_control_tree_is_alive(const struct shoal_control *control, int rank);

/* Takes a socket over; peer as in shoal_control_link_create. */
void shoal_control_tree_add(struct shoal_control *control, int fd, int peer, uint64_t now_ns);
/* The link to or from a rank, proved or not, that is not at its end. */
struct shoal_control_link *shoal_control_tree_link(const struct shoal_control *control, int rank);
/* Frees the dead, and says what their end means. */
void shoal_control_tree_sweep(struct shoal_control *control);

/* Sees to it that there is a way to the parent, or that it is sought. */
void shoal_control_tree_find_parent(struct shoal_control *control, uint64_t now_ns);
/* A rank that should have come to this one and does not is lost. */
void shoal_control_tree_await_orphans(struct shoal_control *control, uint64_t now_ns);
/* Ends what seeks a rank that has ended. */
void shoal_control_tree_drop_useless(struct shoal_control *control);

/* Opening: done, failed, or neither yet. */
void shoal_control_tree_look_at_opening(struct shoal_control *control, uint64_t now_ns);

/* Leaving: says goodbye; releases neighbours that this rank needs no more; ends when no neighbour needs this rank. */
void shoal_control_tree_say_goodbye(struct shoal_control *control, uint64_t now_ns);
void shoal_control_tree_release(struct shoal_control *control);
void shoal_control_tree_depart(struct shoal_control *control);
bool shoal_control_tree_is_over(const struct shoal_control *control);

/* 0 or an error number. */
int shoal_control_thread_start(struct shoal_control *control);

#endif
