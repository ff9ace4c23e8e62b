/* The inside of a control tree, which its files share. control.c opens and closes it. control_tree.c decides which rank is
 * whose parent, which may leave, and when the tree is open. control_thread.c moves bytes and time, and calls the handler.
 * Everything belongs to the control thread, except opening and closing, and fields whose comment names another owner. */
#ifndef SHOAL_MEMBERSHIP_CONTROL_TREE_H
#define SHOAL_MEMBERSHIP_CONTROL_TREE_H

#include <poll.h>

#include "membership/control_link.h"
#include "membership/control_socket.h"

/* Connections in addition to one for each rank: strangers, those in progress and those that are ending. */
#define SHOAL_CONTROL_LINKS_SPARE (SHOAL_CONTROL_STRANGERS_MAX + 16)

enum shoal_control_phase { SHOAL_CONTROL_OPENING, SHOAL_CONTROL_OPEN, SHOAL_CONTROL_FAILED };
enum shoal_control_ending { SHOAL_CONTROL_STAYS, SHOAL_CONTROL_ENDS_IN_ORDER, SHOAL_CONTROL_ENDS_AT_ONCE };

/* The parent that this rank seeks. */
struct shoal_control_attempt {
    int target; /* -1 if none */
    uint64_t until_ns, retry_ns;
    int error;           /* why the latest try failed */
    uint64_t refused_ns; /* since when all tries were refused; 0: the latest was not */
    enum shoal_link_verdict verdict;
};

struct shoal_control_watched {
    int fd; /* -1: not watched. Any thread sets it once, under the lock; the control thread owns the other fields */
    bool is_stopped;
    uint64_t ended_ns; /* 0: it runs */
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

    /* owned by the control thread */
    struct shoal_control_link **links; /* array of link_max pointers */
    size_t link_count, link_max;
    struct pollfd *polled;
    struct shoal_control_attempt attempt;
    uint64_t *awaited_ns; /* [size] since when each rank should have connected; 0: not awaited */
    uint64_t open_until_ns, beat_ns, looked_ns, accept_ns, leave_until_ns;
    uint64_t turn_ns; /* when the handler wants another turn; 0: any time */
    bool is_leaving;  /* it has said goodbye */
    bool is_closed;   /* it accepts no new links */
    bool is_shut;     /* it sends nothing further */
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

/* Record facts that this rank has found. */
void shoal_control_tree_end(struct shoal_control *control, int rank, enum shoal_control_cause cause);
void shoal_control_tree_stop(struct shoal_control *control, int rank, bool is_stopped, uint64_t now_ns);
bool shoal_control_tree_is_alive(const struct shoal_control *control, int rank);

/* Takes over a socket; for peer see shoal_control_link_create(). */
void shoal_control_tree_add(struct shoal_control *control, int fd, int peer, uint64_t now_ns);
/* Returns the link to or from a rank, proved or not, that is not ending. */
struct shoal_control_link *shoal_control_tree_link(const struct shoal_control *control, int rank);
/* Frees dead links, and acts on their end. */
void shoal_control_tree_sweep(struct shoal_control *control);

/* Ensures that there is a link to the parent, or that one is sought. */
void shoal_control_tree_find_parent(struct shoal_control *control, uint64_t now_ns);
/* Marks a rank lost that should have connected to this rank and has not. */
void shoal_control_tree_await_orphans(struct shoal_control *control, uint64_t now_ns);
/* Ends the links that seek a rank that has ended. */
void shoal_control_tree_drop_useless(struct shoal_control *control);

/* While opening: checks whether it is done or has failed. */
void shoal_control_tree_look_at_opening(struct shoal_control *control, uint64_t now_ns);

/* Leaving: say goodbye; release neighbors that this rank no longer needs; end when no neighbor needs this rank. */
void shoal_control_tree_say_goodbye(struct shoal_control *control, uint64_t now_ns);
void shoal_control_tree_release(struct shoal_control *control);
void shoal_control_tree_depart(struct shoal_control *control);
bool shoal_control_tree_is_over(const struct shoal_control *control);

/* Returns 0 or an error number. */
int shoal_control_thread_start(struct shoal_control *control);

#endif
