#include "membership/control_tree.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/process.h"

#define ACCEPT_PAUSE_MS 100
#define HELD_UP_MS 500 /* if this thread did not run for that long, the silence of others does not count */

/* ---- links ---- */

static bool is_stranger(const struct shoal_control_link *link)
{
    return !link->link.is_client && !shoal_control_link_is_member(link);
}

/* Drops the oldest if there are too many. */
static void drop_stranger(struct shoal_control *control)
{
    struct shoal_control_link *oldest = NULL;
    int count = 0;
    for (size_t i = 0; i < control->link_count; i++) {
        if (!is_stranger(control->links[i]))
            continue;
        count++;
        if (!oldest)
            oldest = control->links[i];
    }
    if (count < SHOAL_CONTROL_STRANGERS_MAX)
        return;
    shoal_control_link_end(&control->core, oldest, SHOAL_CONTROL_NO_CAUSE);
    shoal_control_tree_sweep(control);
}

static void accept_one(struct shoal_control *control, uint64_t now_ns)
{
    drop_stranger(control);
    const int fd = shoal_control_socket_accept(control->listener);
    if (fd >= 0)
        shoal_control_tree_add(control, fd, -1, now_ns);
    else if (shoal_link_is_exhausted(-fd))
        control->accept_ns = now_ns + ACCEPT_PAUSE_MS * SHOAL_NS_PER_MS;
}

static void finish_connect(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    const int error = shoal_address_error(link->link.fd);
    if (error) {
        shoal_link_end(&link->link, error);
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_CLOSED);
        return;
    }
    shoal_control_link_greet(&control->core, link, now_ns);
}

static void end_of_socket(struct shoal_control *control, struct shoal_control_link *link, int error)
{
    const bool is_far = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
    shoal_link_end(&link->link, error);
    shoal_control_link_end(&control->core, link, is_far ? SHOAL_CONTROL_UNREACHABLE : SHOAL_CONTROL_CLOSED);
}

/* Receives one piece per turn, so that a busy neighbor does not starve the others. */
static void receive_some(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    const long got = shoal_link_receive(&link->link);
    if (got < 0)
        end_of_socket(control, link, link->link.error);
    if (got <= 0)
        return;
    link->received_ns = now_ns;
    while (shoal_control_link_step(&control->core, link, now_ns))
        continue;
    if (shoal_control_link_is_member(link) && shoal_control_state_is_stopped(&control->core.state, link->peer))
        shoal_control_tree_stop(control, link->peer, false, now_ns);
}

/* Ignores errors of sending: the receiving side handles them, after it has read what came before. */
static void flush(struct shoal_control *control, struct shoal_control_link *link)
{
    const struct shoal_link *out = &link->link;
    if (out->state == SHOAL_LINK_CONNECTING || out->state == SHOAL_LINK_ENDED)
        return;
    while (shoal_link_flush(&link->link) && shoal_link_unsent(out) == 0) {
        shoal_control_link_fill(&control->core, link);
        if (shoal_link_unsent(out) == 0)
            break;
    }
    if (out->state == SHOAL_LINK_CLOSING && shoal_link_unsent(out) == 0)
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_CLOSED);
}

static void flush_all(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++)
        flush(control, control->links[i]);
}

static void serve_link(struct shoal_control *control, struct shoal_control_link *link, short events, uint64_t now_ns)
{
    if (link->link.state == SHOAL_LINK_CONNECTING) {
        if (events)
            finish_connect(control, link, now_ns);
    } else if ((events & (POLLIN | POLLHUP | POLLERR)) && link->link.state != SHOAL_LINK_ENDED) {
        receive_some(control, link, now_ns);
    }
}

/* ---- time ---- */

/* After this process was itself stopped, the thread first listens before it judges which ranks are silent. */
static void excuse(struct shoal_control *control, uint64_t now_ns)
{
    const uint64_t expected_ns = (SHOAL_CONTROL_HEARTBEAT_MS + HELD_UP_MS) * SHOAL_NS_PER_MS;
    const uint64_t gap_ns = now_ns - control->looked_ns;
    control->looked_ns = now_ns;
    if (gap_ns < expected_ns)
        return;
    control->attempt.until_ns += gap_ns;
    control->attempt.refused_ns += control->attempt.refused_ns ? gap_ns : 0;
    memset(control->awaited_ns, 0, (size_t)shoal_control_tree_size(control) * sizeof *control->awaited_ns);
    for (size_t i = 0; i < control->link_count; i++) {
        control->links[i]->received_ns = now_ns;
        control->links[i]->link.deadline_ns += control->links[i]->link.deadline_ns ? gap_ns : 0;
    }
    for (int r = 0; r < shoal_control_tree_size(control); r++)
        control->watched[r].ended_ns += control->watched[r].ended_ns ? gap_ns : 0;
}

static void look_at_silence(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    if (link->peer < 0 || link->link.state == SHOAL_LINK_CONNECTING || link->link.state >= SHOAL_LINK_CLOSING ||
        !shoal_control_tree_is_alive(control, link->peer) || (control->phase == SHOAL_CONTROL_OPENING && !link->was_up))
        return;
    const uint32_t pauses = control->core.state.ranks[link->peer].pauses;
    if (pauses != link->pauses) { /* another neighbor has received its heartbeat */
        link->pauses = pauses;
        link->received_ns = now_ns;
    }
    const uint64_t silent_ms = (now_ns - link->received_ns) / SHOAL_NS_PER_MS;
    if (silent_ms < SHOAL_CONTROL_SILENT_MS)
        return;
    const int64_t unanswered_ms = shoal_control_socket_unanswered_ms(link->link.fd);
    if (silent_ms >= SHOAL_CONTROL_UNREACHABLE_MS && unanswered_ms >= SHOAL_CONTROL_UNREACHABLE_MS) {
        end_of_socket(control, link, ETIMEDOUT); /* the kernel reports this only at a retry, maybe seconds later */
    } else if (unanswered_ms >= 0 && unanswered_ms < SHOAL_CONTROL_ANSWERED_MS &&
               !shoal_control_state_is_stopped(&control->core.state, link->peer)) {
        shoal_control_tree_stop(control, link->peer, true, now_ns);
        link->pauses++;
    }
}

static void expire(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    if (!shoal_link_is_late(&link->link, now_ns) || link->link.state == SHOAL_LINK_ENDED)
        return;
    if (link->link.state != SHOAL_LINK_CLOSING)
        shoal_control_link_refuse(&control->core, link, SHOAL_CONTROL_SLOW);
    shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
}

static void look_at_watched(struct shoal_control *control, uint64_t now_ns)
{
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
        const uint64_t ended_ns = control->watched[r].ended_ns;
        if (ended_ns && now_ns - ended_ns >= SHOAL_CONTROL_ENDED_MS * SHOAL_NS_PER_MS &&
            shoal_control_tree_is_alive(control, r))
            shoal_control_tree_end(control, r, SHOAL_CONTROL_ENDED);
    }
}

/* Returns true if a signal or a debugger has stopped the process. */
static bool is_stopped_process(int pidfd)
{
    int ignored;
    const int pid = shoal_process_number(pidfd);
    const char state = pid ? shoal_process_read_stat(pid, &ignored) : '?';
    return state == 'T' || state == 't';
}

/* The descriptor stays open from then on. */
static int watched_fd(struct shoal_control *control, int rank)
{
    pthread_mutex_lock(&control->core.lock);
    const int fd = control->watched[rank].fd;
    pthread_mutex_unlock(&control->core.lock);
    return fd;
}

/* Looks at watched processes of this host. If a rank is alone on its host, only its silence shows that it is stopped. */
static void look_for_stopped(struct shoal_control *control, uint64_t now_ns)
{
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
        struct shoal_control_watched *watched = &control->watched[r];
        const int fd = watched_fd(control, r);
        if (fd < 0 || watched->ended_ns || !shoal_control_tree_is_alive(control, r))
            continue;
        const bool is_stopped = is_stopped_process(fd);
        if (is_stopped != watched->is_stopped)
            shoal_control_tree_stop(control, r, is_stopped, now_ns);
        watched->is_stopped = is_stopped;
    }
}

static void beat(struct shoal_control *control, uint64_t now_ns)
{
    if (now_ns < control->beat_ns)
        return;
    control->beat_ns = now_ns + SHOAL_CONTROL_HEARTBEAT_MS * SHOAL_NS_PER_MS;
    look_for_stopped(control, now_ns);
    for (size_t i = 0; i < control->link_count; i++)
        control->links[i]->needs_beat = true;
    if (!control->is_leaving)
        shoal_control_tree_await_orphans(control, now_ns);
}

/* ---- calling the handler --------- */

static void deliver_notices(struct shoal_control *control)
{
    const struct shoal_control_state *state = &control->core.state;
    unsigned char data[SHOAL_CONTROL_NOTICE_MAX];
    pthread_mutex_lock(&control->core.lock);
    while (control->notices_delivered < state->notice_end) {
        struct shoal_control_notice *notice = shoal_control_state_notice(state, control->notices_delivered++);
        if (notice->is_delivered) /* it has moved to another place */
            continue;
        notice->is_delivered = true;
        const int origin = notice->origin;
        const size_t bytes = notice->bytes;
        memcpy(data, notice->data, bytes);
        pthread_mutex_unlock(&control->core.lock);
        if (origin != shoal_control_tree_rank(control) && control->handler.notice)
            control->handler.notice(control->handler.arg, origin, data, bytes);
        pthread_mutex_lock(&control->core.lock);
        if (control->notices_delivered < state->notice_first)
            control->notices_delivered = state->notice_first;
    }
    pthread_mutex_unlock(&control->core.lock);
}

/* A change may also concern pauses, even after a loss. */
static void deliver_losses(struct shoal_control *control)
{
    struct shoal_control_fact fact;
    while (shoal_control_state_next(&control->core.state, control->changes_delivered, &fact, &control->changes_delivered)) {
        bool *is_handed_on = &control->core.state.ranks[fact.rank].is_loss_handed_on;
        if (fact.life != SHOAL_CONTROL_LOST || *is_handed_on)
            continue;
        *is_handed_on = true;
        if (control->handler.lost)
            control->handler.lost(control->handler.arg, (int)fact.rank);
    }
}

static void deliver(struct shoal_control *control)
{
    pthread_mutex_lock(&control->core.lock);
    const bool delivers = control->delivers;
    pthread_mutex_unlock(&control->core.lock);
    if (!delivers)
        return;
    deliver_notices(control);
    deliver_losses(control);
    /* acquire: pairs with the release in wake */
    if (atomic_exchange_explicit(&control->is_woken, false, memory_order_acquire) && control->handler.woken)
        control->handler.woken(control->handler.arg);
    if (control->handler.turn)
        control->turn_ns = control->handler.turn(control->handler.arg, shoal_clock_ns());
}

static void trim(struct shoal_control *control)
{
    uint64_t needed = control->notices_delivered;
    for (size_t i = 0; i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        if (shoal_control_link_is_up(link) && link->notices_sent < needed)
            needed = link->notices_sent;
    }
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_trim(&control->core.state, needed);
    pthread_mutex_unlock(&control->core.lock);
}

/* ---- the thread ---- */

static void work(struct shoal_control *control, uint64_t now_ns)
{
    beat(control, now_ns);
    look_at_watched(control, now_ns);
    shoal_control_tree_drop_useless(control);
    shoal_control_tree_sweep(control);
    shoal_control_tree_say_goodbye(control, now_ns);
    if (!control->is_leaving)
        shoal_control_tree_find_parent(control, now_ns);
    shoal_control_tree_release(control);
    for (size_t i = 0; i < control->link_count; i++) {
        look_at_silence(control, control->links[i], now_ns);
        expire(control, control->links[i], now_ns);
    }
    flush_all(control);
    shoal_control_tree_depart(control);
    shoal_control_tree_sweep(control);
    shoal_control_tree_look_at_opening(control, now_ns);
    deliver(control);
    trim(control);
}

static void put_earlier(uint64_t *next_ns, uint64_t moment_ns)
{
    if (moment_ns && moment_ns < *next_ns)
        *next_ns = moment_ns;
}

/* Returns when the thread has to run although nothing arrives. Silence is checked with each heartbeat. */
static int next_ms(const struct shoal_control *control, uint64_t now_ns)
{
    uint64_t next_ns = control->beat_ns;
    put_earlier(&next_ns, control->is_leaving ? control->leave_until_ns : 0);
    put_earlier(&next_ns, control->phase == SHOAL_CONTROL_OPENING ? control->open_until_ns : 0);
    put_earlier(&next_ns, control->accept_ns > now_ns ? control->accept_ns : 0);
    put_earlier(&next_ns, control->turn_ns);
    if (control->attempt.target >= 0 && !control->core.linked[control->attempt.target]) {
        const bool is_trying = shoal_control_tree_link(control, control->attempt.target) != NULL;
        const uint64_t until_ns =
            control->attempt.until_ns > now_ns ? control->attempt.until_ns : 0; /* there is time for one that is stopped */
        put_earlier(&next_ns, is_trying ? until_ns : control->attempt.retry_ns);
    }
    for (size_t i = 0; i < control->link_count; i++)
        put_earlier(&next_ns, control->links[i]->link.deadline_ns);
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
        const uint64_t ended_ns = control->watched[r].ended_ns;
        if (ended_ns && shoal_control_tree_is_alive(control, r))
            put_earlier(&next_ns, ended_ns + SHOAL_CONTROL_ENDED_MS * SHOAL_NS_PER_MS);
    }
    return next_ns <= now_ns ? 1 : (int)((next_ns - now_ns) / SHOAL_NS_PER_MS) + 1;
}

enum polled { EVENT, LISTENER, LINKS };

static struct pollfd poll_of(const struct shoal_control_link *link)
{
    short events = POLLIN;
    if (link->link.state == SHOAL_LINK_CONNECTING)
        events = POLLOUT;
    else if (shoal_link_unsent(&link->link) > 0)
        events = POLLIN | POLLOUT;
    return (struct pollfd){.fd = link->link.fd, .events = events};
}

/* Fills in the event, the listener, the links in their order, then the watched processes in the order of ranks. */
static nfds_t fill_polled(struct shoal_control *control, uint64_t now_ns)
{
    const bool accepts = !control->is_closed && control->accept_ns <= now_ns;
    nfds_t count = LINKS;
    control->polled[EVENT] = (struct pollfd){.fd = control->event, .events = POLLIN};
    control->polled[LISTENER] = (struct pollfd){.fd = accepts ? control->listener : -1, .events = POLLIN};
    for (size_t i = 0; i < control->link_count; i++)
        control->polled[count++] = poll_of(control->links[i]);
    pthread_mutex_lock(&control->core.lock);
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
        if (control->watched[r].fd >= 0 && control->watched[r].ended_ns == 0)
            control->polled[count++] = (struct pollfd){.fd = control->watched[r].fd, .events = POLLIN};
    }
    pthread_mutex_unlock(&control->core.lock);
    return count;
}

static void note_ended(struct shoal_control *control, int fd, uint64_t now_ns)
{
    pthread_mutex_lock(&control->core.lock);
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
        if (control->watched[r].fd == fd)
            control->watched[r].ended_ns = now_ns;
    }
    pthread_mutex_unlock(&control->core.lock);
}

static void take_event(struct shoal_control *control)
{
    uint64_t count;
    if (read(control->event, &count, sizeof count) < 0)
        return; /* an earlier read has also consumed this wake */
}

static void turn(struct shoal_control *control)
{
    uint64_t now_ns = shoal_clock_ns();
    const size_t link_count = control->link_count;
    const nfds_t count = fill_polled(control, now_ns);
    const int ready = poll(control->polled, count, next_ms(control, now_ns));
    now_ns = shoal_clock_ns();
    excuse(control, now_ns);
    if (ready <= 0)
        return;
    if (control->polled[EVENT].revents)
        take_event(control);
    for (size_t i = 0; i < link_count; i++) {
        if (control->polled[LINKS + i].revents)
            serve_link(control, control->links[i], control->polled[LINKS + i].revents, now_ns);
    }
    for (nfds_t i = LINKS + link_count; i < count; i++) {
        if (control->polled[i].revents)
            note_ended(control, control->polled[i].fd, now_ns);
    }
    shoal_control_tree_sweep(control);
    if (control->polled[LISTENER].revents)
        accept_one(control, now_ns);
}

static void *run(void *arg)
{
    struct shoal_control *control = arg;
    control->looked_ns = shoal_clock_ns();
    control->open_until_ns = control->looked_ns + control->timeout_ms * SHOAL_NS_PER_MS;
    while (!shoal_control_tree_is_over(control)) {
        work(control, shoal_clock_ns());
        if (!shoal_control_tree_is_over(control))
            turn(control);
    }
    flush_all(control); /* final messages, as far as they can be sent without waiting */
    return NULL;
}

int shoal_control_thread_start(struct shoal_control *control)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&control->thread, NULL, run, control);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    control->has_thread = !error;
    if (!error)
        pthread_setname_np(control->thread, "shoal-control");
    return error;
}
