#include "bootstrap/control.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "bootstrap/control_link.h"
#include "bootstrap/control_socket.h"

#define RETRY_MS 50
#define REFUSED_MS 1000 /* how long a parent that refuses is asked again, when the tree is first made */
#define ACCEPT_PAUSE_MS 100
#define HELD_UP_MS 500 /* this thread did not run for so long: nobody else's silence counts */
#define LINKS_SPARE (SHOAL_CONTROL_STRANGERS_MAX + 16)

enum phase { OPENING, OPEN, FAILED };
enum ending { NOT_YET, IN_GOOD_ORDER, AT_ONCE };

/* The parent that is sought. */
struct attempt {
    int target; /* -1: none */
    uint64_t until_ns, retry_ns;
    int error; /* of the last try */
    enum shoal_tcp_verdict verdict;
};

struct watched {
    int fd; /* -1: not watched */
    int pid;
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
    enum phase phase;
    enum shoal_status failure;
    bool delivers;
    uint64_t own_number;
    struct watched *watched;

    atomic_int ending;
    atomic_bool is_woken;

    /* the control thread's */
    struct shoal_control_link **links; /* link_max places */
    size_t link_count, link_max;
    struct pollfd *polled;
    struct attempt attempt;
    uint64_t open_until_ns, beat_ns, looked_ns, accept_ns, leave_until_ns;
    bool is_leaving, is_shut;
    uint64_t notices_delivered, changes_delivered;
};

static int rank_of(const struct shoal_control *control)
{
    return control->core.state.rank;
}

static int size_of(const struct shoal_control *control)
{
    return control->core.state.size;
}

static bool is_forked(const struct shoal_control *control)
{
    return control->generation != shoal_control_socket_generation();
}

/* ---- addresses ---- */

static void address_of(const struct shoal_control *control, int rank, struct shoal_address *address)
{
    const struct shoal_control_contact *contact = &control->contacts[rank];
    memset(address, 0, sizeof *address);
    address->socket.ss_family = contact->family;
    if (contact->family == AF_INET6) {
        struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)(void *)&address->socket;
        memcpy(&in6->sin6_addr, contact->address, sizeof in6->sin6_addr);
        if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) && control->own.socket.ss_family == AF_INET6)
            in6->sin6_scope_id = ((const struct sockaddr_in6 *)(const void *)&control->own.socket)->sin6_scope_id;
        address->bytes = sizeof *in6;
    } else {
        struct sockaddr_in *in = (struct sockaddr_in *)(void *)&address->socket;
        memcpy(&in->sin_addr, contact->address, sizeof in->sin_addr);
        address->bytes = sizeof *in;
    }
    shoal_address_port_put(address, contact->port);
}

/* "rank 1 on hostA (10.0.0.1:4000)" */
static void print_rank(const struct shoal_control *control, int rank, char *text, size_t bytes)
{
    struct shoal_address address;
    char at[SHOAL_ADDRESS_TEXT_MAX];
    address_of(control, rank, &address);
    shoal_address_print(&address, at);
    snprintf(text, bytes, "rank %d on %.63s (%.80s)", rank, control->contacts[rank].host, at);
}

/* ---- facts that this rank finds ---- */

static void find_end(struct shoal_control *control, int rank, enum shoal_control_cause cause)
{
    char who[256], how[128];
    pthread_mutex_lock(&control->core.lock);
    const bool is_news = shoal_control_state_end(&control->core.state, rank, SHOAL_CONTROL_LOST, cause);
    shoal_control_state_describe(&control->core.state, rank, 0, how, sizeof how);
    pthread_mutex_unlock(&control->core.lock);
    print_rank(control, rank, who, sizeof who);
    if (is_news)
        shoal_log_line(control->core.log, SHOAL_LOG_INFO, "bootstrap", "control tree: %s: %s", who, how);
}

static void find_stop(struct shoal_control *control, int rank, bool is_stopped, uint64_t now_ns)
{
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_stop(&control->core.state, rank, is_stopped, now_ns);
    pthread_mutex_unlock(&control->core.lock);
}

static bool is_alive(const struct shoal_control *control, int rank)
{
    return shoal_control_state_life(&control->core.state, rank) == SHOAL_CONTROL_ALIVE;
}

/* ---- links ---- */

/* The link to or from a rank, proved or not, that is not at its end. */
static struct shoal_control_link *find_link(const struct shoal_control *control, int rank)
{
    for (size_t i = 0; i < control->link_count; i++) {
        if (control->links[i]->peer == rank && control->links[i]->state < SHOAL_CONTROL_LINK_CLOSING)
            return control->links[i];
    }
    return NULL;
}

static struct shoal_control_link *add_link(struct shoal_control *control, int fd, int peer, uint64_t now_ns)
{
    struct shoal_control_link *link =
        control->link_count < control->link_max ? shoal_control_link_create(&control->core, fd, peer, now_ns) : NULL;
    if (link)
        control->links[control->link_count++] = link;
    else
        shoal_control_socket_close(fd);
    return link;
}

/* What the end of a link says of its peer. */
static void mourn(struct shoal_control *control, const struct shoal_control_link *link)
{
    if (link->was_up && !link->is_shut && link->cause != SHOAL_CONTROL_NO_CAUSE) {
        find_end(control, link->peer, link->cause);
    } else if (link->is_outgoing && !link->was_up && link->peer == control->attempt.target) {
        control->attempt.error = link->error;
        control->attempt.verdict = link->verdict;
    }
}

static void sweep(struct shoal_control *control)
{
    size_t kept = 0;
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (link->state != SHOAL_CONTROL_LINK_DEAD) {
            control->links[kept++] = link;
            continue;
        }
        mourn(control, link);
        shoal_control_socket_close(link->fd);
        free(link);
    }
    control->link_count = kept;
}

static bool is_stranger(const struct shoal_control_link *link)
{
    return !link->is_outgoing && !shoal_control_link_is_member(link);
}

/* The oldest of too many. */
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
    sweep(control);
}

static void accept_one(struct shoal_control *control, uint64_t now_ns)
{
    drop_stranger(control);
    const int fd = shoal_control_socket_accept(control->listener);
    if (fd >= 0)
        add_link(control, fd, -1, now_ns);
    else if (fd == -EMFILE || fd == -ENFILE || fd == -ENOBUFS || fd == -ENOMEM)
        control->accept_ns = now_ns + ACCEPT_PAUSE_MS * SHOAL_NS_PER_MS;
}

static void finish_connect(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    link->error = shoal_control_socket_error(link->fd);
    if (link->error)
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_CLOSED);
    else
        shoal_control_link_greet(&control->core, link, now_ns);
}

static void end_of_socket(struct shoal_control *control, struct shoal_control_link *link, int error)
{
    const bool is_far = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
    link->error = error ? error : ECONNRESET;
    shoal_control_link_end(&control->core, link, is_far ? SHOAL_CONTROL_UNREACHABLE : SHOAL_CONTROL_CLOSED);
}

/* One piece per turn, so that a talkative neighbour does not starve the others. */
static void receive_some(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    const ssize_t got = recv(link->fd, link->in + link->in_bytes, sizeof link->in - link->in_bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (got <= 0) {
        end_of_socket(control, link, got < 0 ? errno : 0);
        return;
    }
    link->heard_ns = now_ns;
    link->in_bytes += (size_t)got;
    while (shoal_control_link_step(&control->core, link, now_ns))
        continue;
    if (shoal_control_link_is_member(link) && shoal_control_state_is_stopped(&control->core.state, link->peer))
        find_stop(control, link->peer, false, now_ns);
}

/* Errors of sending are left to the receiving side: what came before them is to be read first. */
static bool send_some(struct shoal_control_link *link)
{
    while (link->out_sent < link->out_bytes) {
        const ssize_t sent =
            send(link->fd, link->out + link->out_sent, link->out_bytes - link->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return false;
        link->out_sent += (size_t)sent;
    }
    link->out_bytes = link->out_sent = 0;
    return true;
}

static void flush(struct shoal_control *control, struct shoal_control_link *link)
{
    if (link->state == SHOAL_CONTROL_LINK_CONNECTING || link->state == SHOAL_CONTROL_LINK_DEAD)
        return;
    while (send_some(link)) {
        shoal_control_link_fill(&control->core, link);
        if (link->out_bytes == 0)
            break;
    }
    if (link->state == SHOAL_CONTROL_LINK_CLOSING && link->out_bytes == 0)
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_CLOSED);
}

static void serve_link(struct shoal_control *control, struct shoal_control_link *link, short events, uint64_t now_ns)
{
    if (link->state == SHOAL_CONTROL_LINK_CONNECTING) {
        if (events)
            finish_connect(control, link, now_ns);
    } else if ((events & (POLLIN | POLLHUP | POLLERR)) && link->state != SHOAL_CONTROL_LINK_DEAD) {
        receive_some(control, link, now_ns);
    }
}

/* ---- the parent ---- */

static void fail_to_open(struct shoal_control *control, enum shoal_status status)
{
    pthread_mutex_lock(&control->core.lock);
    control->phase = FAILED;
    control->failure = status;
    pthread_cond_signal(&control->opened);
    pthread_mutex_unlock(&control->core.lock);
}

static enum shoal_status say_unreached(struct shoal_control *control)
{
    const struct attempt *attempt = &control->attempt;
    const struct shoal_control_link *link = find_link(control, attempt->target);
    char here[256], there[256];
    print_rank(control, rank_of(control), here, sizeof here);
    print_rank(control, attempt->target, there, sizeof there);
    if (attempt->verdict != SHOAL_TCP_OK)
        return shoal_log_fail(
            control->core.log, shoal_tcp_verdict_status(attempt->verdict), "bootstrap",
            "control tree: %s and its parent, %s, do not prove to each other that they are of one job; see above", here, there);
    if (attempt->error == ECONNREFUSED)
        return shoal_log_fail(
            control->core.log, SHOAL_ERR_PEER_LOST, "bootstrap",
            "control tree: %s cannot reach its parent, %s: it refuses the connection; its process has ended, or "
            "a firewall rejects it: open the ports of SHOAL_PORTS",
            here, there);
    if (link && link->state != SHOAL_CONTROL_LINK_CONNECTING)
        return shoal_log_fail(
            control->core.log, SHOAL_ERR_TIMEOUT, "bootstrap",
            "control tree: %s is connected to its parent, %s, which has not answered within %u ms; is it stopped, "
            "or does another program listen there?",
            here, there, control->timeout_ms);
    return shoal_log_fail(control->core.log, SHOAL_ERR_TIMEOUT, "bootstrap",
                          "control tree: %s cannot reach its parent, %s, within %u ms (%s); a firewall drops packets: open the "
                          "ports of SHOAL_PORTS; or the address is one that other hosts do not reach: set SHOAL_NIC there",
                          here, there, control->timeout_ms, attempt->error ? strerror(attempt->error) : "no answer");
}

static void give_up(struct shoal_control *control)
{
    const struct attempt *attempt = &control->attempt;
    struct shoal_control_link *link = find_link(control, attempt->target);
    if (control->phase == OPENING) {
        fail_to_open(control, say_unreached(control));
        return;
    }
    if (link)
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
    find_end(control, attempt->target, attempt->error == ECONNREFUSED ? SHOAL_CONTROL_REFUSED : SHOAL_CONTROL_UNANSWERED);
}

static void start_connect(struct shoal_control *control, uint64_t now_ns)
{
    struct attempt *attempt = &control->attempt;
    struct shoal_address address;
    address_of(control, attempt->target, &address);
    const int fd = shoal_control_socket_connect(&address);
    attempt->retry_ns = now_ns + RETRY_MS * SHOAL_NS_PER_MS;
    if (fd >= 0)
        add_link(control, fd, attempt->target, now_ns);
    else
        attempt->error = -fd;
}

static void seek(struct shoal_control *control, int target, uint64_t now_ns)
{
    struct attempt *attempt = &control->attempt;
    if (attempt->target == target)
        return;
    const uint64_t limit_ms = control->phase == OPENING ? control->timeout_ms : SHOAL_CONTROL_UNREACHABLE_MS;
    *attempt = (struct attempt){.target = target, .until_ns = now_ns + limit_ms * SHOAL_NS_PER_MS};
}

/* One that answers, but whose process is silent, is not given up: it is stopped, and another is sought meanwhile. */
static bool is_hopeless(const struct shoal_control *control, const struct shoal_control_link *link, uint64_t now_ns)
{
    const struct attempt *attempt = &control->attempt;
    const bool is_final = control->phase == OPENING && (attempt->verdict != SHOAL_TCP_OK);
    const uint64_t since_ns = attempt->until_ns - control->timeout_ms * SHOAL_NS_PER_MS;
    if (is_final ||
        (control->phase == OPENING && attempt->error == ECONNREFUSED && now_ns >= since_ns + REFUSED_MS * SHOAL_NS_PER_MS))
        return true;
    const bool is_connected = link && link->state != SHOAL_CONTROL_LINK_CONNECTING;
    return now_ns >= attempt->until_ns && (control->phase == OPENING || !is_connected);
}

static void find_parent(struct shoal_control *control, uint64_t now_ns)
{
    const int rank = rank_of(control);
    const int first = rank > 0 ? (rank - 1) / 2 : -1;
    seek(control, control->phase == OPENING ? first : shoal_control_state_parent(&control->core.state), now_ns);
    const int target = control->attempt.target;
    if (target < 0 || control->core.linked[target])
        return;
    const struct shoal_control_link *link = find_link(control, target);
    if (is_hopeless(control, link, now_ns))
        give_up(control);
    else if (!link && now_ns >= control->attempt.retry_ns)
        start_connect(control, now_ns);
}

static void drop_useless(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (link->is_outgoing && !link->was_up && !is_alive(control, link->peer))
            shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
    }
}

/* ---- time ---- */

/* After it was stopped itself, a thread first listens before it says who is silent. */
static void excuse(struct shoal_control *control, uint64_t now_ns)
{
    const uint64_t expected_ns = (SHOAL_CONTROL_HEARTBEAT_MS + HELD_UP_MS) * SHOAL_NS_PER_MS;
    const uint64_t gap_ns = now_ns - control->looked_ns;
    control->looked_ns = now_ns;
    if (gap_ns < expected_ns)
        return;
    control->attempt.until_ns += gap_ns;
    for (size_t i = 0; i < control->link_count; i++) {
        control->links[i]->heard_ns = now_ns;
        control->links[i]->deadline_ns += control->links[i]->deadline_ns ? gap_ns : 0;
    }
    for (int r = 0; r < size_of(control); r++)
        control->watched[r].ended_ns += control->watched[r].ended_ns ? gap_ns : 0;
}

static void look_at_silence(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    if (link->peer < 0 || link->state == SHOAL_CONTROL_LINK_CONNECTING || link->state >= SHOAL_CONTROL_LINK_CLOSING ||
        !is_alive(control, link->peer) || (control->phase == OPENING && !link->was_up))
        return;
    const uint32_t pauses = control->core.state.ranks[link->peer].pauses;
    if (pauses != link->pauses) { /* another has heard it */
        link->pauses = pauses;
        link->heard_ns = now_ns;
    }
    if (now_ns - link->heard_ns < SHOAL_CONTROL_SILENT_MS * SHOAL_NS_PER_MS ||
        shoal_control_state_is_stopped(&control->core.state, link->peer) || !shoal_control_socket_is_answered(link->fd))
        return;
    find_stop(control, link->peer, true, now_ns);
    link->pauses++;
}

static void expire(struct shoal_control *control, struct shoal_control_link *link, uint64_t now_ns)
{
    if (link->deadline_ns == 0 || now_ns < link->deadline_ns || link->state == SHOAL_CONTROL_LINK_DEAD)
        return;
    if (link->state != SHOAL_CONTROL_LINK_CLOSING)
        shoal_control_link_refuse(&control->core, link, SHOAL_CONTROL_SLOW);
    shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
}

static void look_at_watched(struct shoal_control *control, uint64_t now_ns)
{
    for (int r = 0; r < size_of(control); r++) {
        const uint64_t ended_ns = control->watched[r].ended_ns;
        if (ended_ns && now_ns - ended_ns >= SHOAL_CONTROL_ENDED_MS * SHOAL_NS_PER_MS && is_alive(control, r))
            find_end(control, r, SHOAL_CONTROL_ENDED);
    }
}

/* Field 3 of /proc/PID/stat (proc(5)); field 2 is a name in parentheses, which may hold anything. */
static bool is_stopped_process(int pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    const size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[got] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && (strncmp(name_end, ") T", 3) == 0 || strncmp(name_end, ") t", 3) == 0);
}

/* A rank that is alone on its host is found by its silence only. */
static void look_for_stopped(struct shoal_control *control, uint64_t now_ns)
{
    for (int r = 0; r < size_of(control); r++) {
        struct watched *watched = &control->watched[r];
        if (watched->fd < 0 || watched->ended_ns || !is_alive(control, r))
            continue;
        const bool is_stopped = is_stopped_process(watched->pid);
        if (is_stopped != watched->is_stopped)
            find_stop(control, r, is_stopped, now_ns);
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
}

/* ---- leaving ---- */

/* A way too many of this rank's: the other side need not wait for it, nor this one for the other side. */
static bool is_surplus(const struct shoal_control *control, const struct shoal_control_link *link)
{
    return link->is_outgoing && link->peer != control->attempt.target;
}

static size_t count_unreleased(const struct shoal_control *control)
{
    size_t count = 0;
    for (size_t i = 0; i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        count += shoal_control_link_is_member(link) && !link->is_released && !is_surplus(control, link);
    }
    return count;
}

/* Who stays lets a neighbour leave as soon as it has another way to the others. Who leaves does so when it has nothing more to
 * bring: when all its other neighbours have let it leave. So goodbyes pass from all sides to those who stay before anyone on
 * their way ends. */
static void release(struct shoal_control *control)
{
    const int parent = shoal_control_state_parent(&control->core.state);
    const bool has_way = parent < 0 || control->core.linked[parent];
    const size_t unreleased = count_unreleased(control);
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (link->state != SHOAL_CONTROL_LINK_UP)
            continue;
        const bool is_gone = shoal_control_state_life(&control->core.state, link->peer) == SHOAL_CONTROL_GONE;
        if (control->is_leaving)
            link->needs_release = is_surplus(control, link) || unreleased == (link->is_released ? 0 : 1);
        else
            link->needs_release = has_way && is_gone;
    }
}

static bool may_leave(struct shoal_control *control)
{
    bool may = count_unreleased(control) == 0;
    for (size_t i = 0; may && i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        if (shoal_control_link_is_member(link))
            may = link->has_released && shoal_control_link_is_told(&control->core, link);
    }
    return may;
}

/* Nothing more is sent, but what is under way to this rank is read: a socket closed over unread bytes takes back what was
 * sent. */
static void shut(struct shoal_control *control)
{
    control->is_shut = true;
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        link->is_shut = true;
        if (shoal_control_link_is_member(link))
            shutdown(link->fd, SHUT_WR);
        else
            shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
    }
}

static void say_goodbye(struct shoal_control *control, uint64_t now_ns)
{
    if (control->is_leaving ||
        atomic_load_explicit(&control->ending, memory_order_acquire) != IN_GOOD_ORDER) /* pairs with the store in close */
        return;
    control->is_leaving = true;
    control->leave_until_ns = now_ns + SHOAL_CONTROL_FAREWELL_MS * SHOAL_NS_PER_MS;
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_end(&control->core.state, rank_of(control), SHOAL_CONTROL_GONE, SHOAL_CONTROL_NO_CAUSE);
    pthread_mutex_unlock(&control->core.lock);
}

static bool is_over(const struct shoal_control *control)
{
    const int ending = atomic_load_explicit(&control->ending, memory_order_acquire); /* pairs with the store in close */
    return ending == AT_ONCE || (control->is_shut && control->link_count == 0) ||
           (control->is_leaving && shoal_clock_ns() >= control->leave_until_ns);
}

/* ---- opening ---- */

static void print_missing(const struct shoal_control *control, char *text, size_t bytes)
{
    size_t used = 0;
    for (int child = 2 * rank_of(control) + 1; child <= 2 * rank_of(control) + 2 && child < size_of(control); child++) {
        char who[256];
        if (control->core.linked[child])
            continue;
        print_rank(control, child, who, sizeof who);
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? " and " : "", who);
    }
}

static enum shoal_status say_missing(struct shoal_control *control)
{
    char who[600] = "", here[256];
    print_missing(control, who, sizeof who);
    print_rank(control, rank_of(control), here, sizeof here);
    return shoal_log_fail(
        control->core.log, SHOAL_ERR_TIMEOUT, "bootstrap",
        "control tree: %s did not connect to %s within %u ms; what do they log? A firewall may drop packets: "
        "open the ports of SHOAL_PORTS; or the address here is one that other hosts do not reach: set SHOAL_NIC",
        who, here, control->timeout_ms);
}

static bool has_children(const struct shoal_control *control)
{
    const int child = 2 * rank_of(control) + 1;
    return (child >= size_of(control) || control->core.linked[child]) &&
           (child + 1 >= size_of(control) || control->core.linked[child + 1]);
}

static int first_lost(const struct shoal_control *control)
{
    for (int r = 0; r < size_of(control); r++) {
        if (shoal_control_state_life(&control->core.state, r) == SHOAL_CONTROL_LOST)
            return r;
    }
    return -1;
}

static enum shoal_status say_lost(struct shoal_control *control, int rank)
{
    char who[256], how[128];
    print_rank(control, rank, who, sizeof who);
    shoal_control_state_describe(&control->core.state, rank, shoal_clock_ns(), how, sizeof how);
    return shoal_log_fail(control->core.log, SHOAL_ERR_PEER_LOST, "bootstrap", "control tree: while it was made, %s: %s", who,
                          how);
}

static void look_at_opening(struct shoal_control *control, uint64_t now_ns)
{
    const int target = control->attempt.target;
    if (control->phase != OPENING)
        return;
    const int lost = first_lost(control);
    if (lost >= 0) {
        fail_to_open(control, say_lost(control, lost));
    } else if ((target < 0 || control->core.linked[target]) && has_children(control)) {
        pthread_mutex_lock(&control->core.lock);
        control->phase = OPEN;
        pthread_cond_signal(&control->opened);
        pthread_mutex_unlock(&control->core.lock);
    } else if (now_ns >= control->open_until_ns && (target < 0 || control->core.linked[target])) {
        fail_to_open(control, say_missing(control));
    }
}

/* ---- what the handler hears ---- */

static void deliver_notices(struct shoal_control *control)
{
    const struct shoal_control_state *state = &control->core.state;
    unsigned char data[SHOAL_CONTROL_NOTICE_MAX];
    pthread_mutex_lock(&control->core.lock);
    while (control->notices_delivered < state->notice_end) {
        const struct shoal_control_notice *notice = shoal_control_state_notice(state, control->notices_delivered++);
        const int origin = notice->origin;
        const size_t bytes = notice->bytes;
        memcpy(data, notice->data, bytes);
        pthread_mutex_unlock(&control->core.lock);
        if (origin != rank_of(control) && control->handler.notice)
            control->handler.notice(control->handler.arg, origin, data, bytes);
        pthread_mutex_lock(&control->core.lock);
        if (control->notices_delivered < state->notice_first)
            control->notices_delivered = state->notice_first;
    }
    pthread_mutex_unlock(&control->core.lock);
}

/* A change may also be of pauses, also after a loss. */
static void deliver_losses(struct shoal_control *control)
{
    struct shoal_control_fact fact;
    while (shoal_control_state_next(&control->core.state, control->changes_delivered, &fact, &control->changes_delivered)) {
        bool *is_told = &control->core.state.ranks[fact.rank].is_loss_told;
        if (fact.life != SHOAL_CONTROL_LOST || *is_told)
            continue;
        *is_told = true;
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
}

static void trim(struct shoal_control *control)
{
    uint64_t needed = control->notices_delivered;
    for (size_t i = 0; i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        if (link->state == SHOAL_CONTROL_LINK_UP && link->notices_told < needed)
            needed = link->notices_told;
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
    drop_useless(control);
    sweep(control);
    say_goodbye(control, now_ns);
    if (!control->is_leaving)
        find_parent(control, now_ns);
    release(control);
    for (size_t i = 0; i < control->link_count; i++) {
        look_at_silence(control, control->links[i], now_ns);
        expire(control, control->links[i], now_ns);
    }
    for (size_t i = 0; i < control->link_count; i++)
        flush(control, control->links[i]);
    if (control->is_leaving && !control->is_shut && may_leave(control))
        shut(control);
    sweep(control);
    look_at_opening(control, now_ns);
    deliver(control);
    trim(control);
}

static void put_earlier(uint64_t *next_ns, uint64_t moment_ns)
{
    if (moment_ns && moment_ns < *next_ns)
        *next_ns = moment_ns;
}

/* When there is something to do though nothing comes. Silence is looked at with each heartbeat. */
static int next_ms(const struct shoal_control *control, uint64_t now_ns)
{
    uint64_t next_ns = control->beat_ns;
    put_earlier(&next_ns, control->is_leaving ? control->leave_until_ns : 0);
    put_earlier(&next_ns, control->phase == OPENING ? control->open_until_ns : 0);
    put_earlier(&next_ns, control->accept_ns > now_ns ? control->accept_ns : 0);
    if (control->attempt.target >= 0 && !control->core.linked[control->attempt.target]) {
        const bool is_trying = find_link(control, control->attempt.target) != NULL;
        put_earlier(&next_ns, is_trying ? control->attempt.until_ns : control->attempt.retry_ns);
    }
    for (size_t i = 0; i < control->link_count; i++)
        put_earlier(&next_ns, control->links[i]->deadline_ns);
    for (int r = 0; r < size_of(control); r++) {
        const uint64_t ended_ns = control->watched[r].ended_ns;
        if (ended_ns && is_alive(control, r))
            put_earlier(&next_ns, ended_ns + SHOAL_CONTROL_ENDED_MS * SHOAL_NS_PER_MS);
    }
    return next_ns <= now_ns ? 1 : (int)((next_ns - now_ns) / SHOAL_NS_PER_MS) + 1;
}

enum place { EVENT, LISTENER, LINKS };

static struct pollfd poll_of(const struct shoal_control_link *link)
{
    short events = POLLIN;
    if (link->state == SHOAL_CONTROL_LINK_CONNECTING)
        events = POLLOUT;
    else if (link->out_bytes > 0)
        events = POLLIN | POLLOUT;
    return (struct pollfd){.fd = link->fd, .events = events};
}

/* The event, the listener, the links in their order, then the watched in order of their ranks. */
static nfds_t fill_polled(struct shoal_control *control, uint64_t now_ns)
{
    const bool accepts = !control->is_shut && control->accept_ns <= now_ns;
    nfds_t count = LINKS;
    control->polled[EVENT] = (struct pollfd){.fd = control->event, .events = POLLIN};
    control->polled[LISTENER] = (struct pollfd){.fd = accepts ? control->listener : -1, .events = POLLIN};
    for (size_t i = 0; i < control->link_count; i++)
        control->polled[count++] = poll_of(control->links[i]);
    pthread_mutex_lock(&control->core.lock);
    for (int r = 0; r < size_of(control); r++) {
        if (control->watched[r].fd >= 0 && control->watched[r].ended_ns == 0)
            control->polled[count++] = (struct pollfd){.fd = control->watched[r].fd, .events = POLLIN};
    }
    pthread_mutex_unlock(&control->core.lock);
    return count;
}

static void note_ended(struct shoal_control *control, int fd, uint64_t now_ns)
{
    pthread_mutex_lock(&control->core.lock);
    for (int r = 0; r < size_of(control); r++) {
        if (control->watched[r].fd == fd)
            control->watched[r].ended_ns = now_ns;
    }
    pthread_mutex_unlock(&control->core.lock);
}

static void take_event(struct shoal_control *control)
{
    uint64_t count;
    if (read(control->event, &count, sizeof count) < 0)
        return; /* somebody's wake that was taken before */
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
    sweep(control);
    if (control->polled[LISTENER].revents)
        accept_one(control, now_ns);
}

static void *run(void *arg)
{
    struct shoal_control *control = arg;
    control->looked_ns = shoal_clock_ns();
    control->open_until_ns = control->looked_ns + control->timeout_ms * SHOAL_NS_PER_MS;
    while (!is_over(control)) {
        work(control, shoal_clock_ns());
        if (!is_over(control))
            turn(control);
    }
    return NULL;
}

static int start_thread(struct shoal_control *control)
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

/* ---- opening and closing ---- */

static void nudge(struct shoal_control *control)
{
    const int error = errno;
    const uint64_t one = 1;
    if (control->event >= 0 && write(control->event, &one, sizeof one) < 0)
        errno = error; /* the counter is full: it is awake anyway */
}

static void destroy(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++) {
        shoal_control_socket_close(control->links[i]->fd);
        free(control->links[i]);
    }
    for (int r = 0; control->watched && r < size_of(control); r++) {
        if (control->watched[r].fd >= 0)
            close(control->watched[r].fd);
    }
    if (control->listener >= 0)
        shoal_control_socket_close(control->listener);
    if (control->event >= 0)
        close(control->event);
    pthread_cond_destroy(&control->opened);
    shoal_control_core_fini(&control->core);
    free(control->links);
    free(control->polled);
    free(control->watched);
    free(control->contacts);
    free(control);
}

static void fill_hello(const struct shoal_bootstrap *bootstrap, struct shoal_tcp_hello *hello)
{
    memset(hello, 0, sizeof *hello);
    hello->protocol = SHOAL_CONTROL_PROTOCOL;
    hello->rank = (uint32_t)bootstrap->rank;
    hello->size = (uint32_t)bootstrap->size;
    hello->has_secret = bootstrap->has_secret;
    hello->process = (uint32_t)getpid();
    snprintf(hello->version, sizeof hello->version, "%s", shoal_version());
    if (gethostname(hello->host, sizeof hello->host - 1) != 0)
        strcpy(hello->host, "?");
}

static bool make_tables(struct shoal_control *control)
{
    const size_t size = (size_t)size_of(control);
    control->link_max = size + LINKS_SPARE;
    control->links = calloc(control->link_max, sizeof *control->links);
    control->polled = calloc(LINKS + control->link_max + size, sizeof *control->polled);
    control->watched = calloc(size, sizeof *control->watched);
    control->contacts = calloc(size, sizeof *control->contacts);
    for (size_t r = 0; control->watched && r < size; r++)
        control->watched[r].fd = -1;
    return control->links && control->polled && control->watched && control->contacts;
}

static enum shoal_status create(const struct shoal_bootstrap *bootstrap, const struct shoal_control_options *options,
                                struct shoal_control **control_out)
{
    struct shoal_tcp_hello hello;
    fill_hello(bootstrap, &hello);
    struct shoal_control *control = calloc(1, sizeof *control);
    if (!control || !shoal_control_core_init(&control->core, &hello, bootstrap->secret, options->log)) {
        free(control);
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for the control tree");
    }
    control->handler = options->handler;
    control->timeout_ms = options->timeout_ms;
    control->generation = shoal_control_socket_generation();
    control->listener = control->event = -1;
    control->attempt.target = -1;
    pthread_cond_init(&control->opened, NULL);
    if (!make_tables(control)) {
        destroy(control);
        return shoal_log_fail(options->log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for the control tree");
    }
    *control_out = control;
    return SHOAL_OK;
}

static enum shoal_status fail_to_listen(const struct shoal_control *control, const struct shoal_control_options *options,
                                        int error)
{
    char at[SHOAL_ADDRESS_TEXT_MAX];
    shoal_address_print(&control->own, at);
    if (error == EADDRINUSE && options->port_low)
        return shoal_log_fail(
            options->log, SHOAL_ERR_SYSTEM, "bootstrap",
            "control tree: cannot listen at %s: ports %u to %u are all in use; each rank of a host needs one: "
            "widen SHOAL_PORTS",
            at, options->port_low, options->port_high);
    return shoal_log_fail(options->log, SHOAL_ERR_SYSTEM, "bootstrap",
                          "control tree: cannot listen at %s: %s; is it an address of this host (SHOAL_NIC)?", at,
                          strerror(error));
}

static enum shoal_status open_listener(struct shoal_control *control, const struct shoal_control_options *options)
{
    int fd = -EADDRINUSE;
    memcpy(&control->own.socket, options->address, options->address_bytes);
    control->own.bytes = options->address_bytes;
    const unsigned high = options->port_low ? options->port_high : 0;
    for (unsigned port = options->port_low; fd == -EADDRINUSE && port <= high; port++) {
        shoal_address_port_put(&control->own, (uint16_t)port);
        fd = shoal_control_socket_listen(&control->own);
    }
    if (fd < 0)
        return fail_to_listen(control, options, -fd);
    control->listener = fd;
    control->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (control->event < 0 || getsockname(fd, (struct sockaddr *)&control->own.socket, &control->own.bytes) != 0)
        return shoal_log_fail(options->log, SHOAL_ERR_SYSTEM, "bootstrap",
                              "control tree: no event descriptor (%m); see `ulimit -n`");
    return SHOAL_OK;
}

static void fill_contact(const struct shoal_control *control, struct shoal_control_contact *mine)
{
    memset(mine, 0, sizeof *mine);
    mine->family = control->own.socket.ss_family;
    mine->process = control->core.hello.process;
    memcpy(mine->host, control->core.hello.host, sizeof mine->host);
    if (mine->family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)&control->own.socket;
        memcpy(mine->address, &in6->sin6_addr, sizeof in6->sin6_addr);
        mine->port = ntohs(in6->sin6_port);
    } else {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)&control->own.socket;
        memcpy(mine->address, &in->sin_addr, sizeof in->sin_addr);
        mine->port = ntohs(in->sin_port);
    }
}

static enum shoal_status exchange(struct shoal_control *control, struct shoal_bootstrap *bootstrap)
{
    struct shoal_control_contact mine;
    fill_contact(control, &mine);
    if (shoal_auth_random(&mine.job, sizeof mine.job) != SHOAL_OK)
        return shoal_log_fail(control->core.log, SHOAL_ERR_SYSTEM, "bootstrap", "no random bytes from the kernel (%m)");
    SHOAL_TRY(shoal_bootstrap_exchange(bootstrap, control->core.log, "control", &mine, control->contacts, sizeof mine,
                                       control->timeout_ms));
    for (int r = 0; r < size_of(control); r++)
        shoal_tcp_text_clean(control->contacts[r].host, sizeof control->contacts[r].host);
    control->core.hello.job = control->contacts[0].job;
    return SHOAL_OK;
}

/* The thread keeps the deadline. */
static enum shoal_status await_opened(struct shoal_control *control)
{
    pthread_mutex_lock(&control->core.lock);
    while (control->phase == OPENING)
        pthread_cond_wait(&control->opened, &control->core.lock);
    const enum shoal_status status = control->phase == OPEN ? SHOAL_OK : control->failure;
    pthread_mutex_unlock(&control->core.lock);
    return status;
}

static enum shoal_status connect_all(struct shoal_control *control, struct shoal_bootstrap *bootstrap,
                                     const struct shoal_control_options *options)
{
    SHOAL_TRY(open_listener(control, options));
    SHOAL_TRY(exchange(control, bootstrap));
    const int error = start_thread(control);
    if (error)
        return shoal_log_fail(options->log, SHOAL_ERR_SYSTEM, "bootstrap",
                              "cannot start the control thread: %s; see `ulimit -a`", strerror(error));
    return await_opened(control);
}

enum shoal_status shoal_control_open(struct shoal_bootstrap *bootstrap, const struct shoal_control_options *options,
                                     struct shoal_control **control_out)
{
    struct shoal_control *control = NULL;
    SHOAL_TRY(create(bootstrap, options, &control));
    const enum shoal_status status = bootstrap->size > 1 ? connect_all(control, bootstrap, options) : SHOAL_OK;
    if (status != SHOAL_OK) {
        shoal_control_close(control, false);
        return status;
    }
    *control_out = control;
    pthread_mutex_lock(&control->core.lock);
    control->delivers = true;
    pthread_mutex_unlock(&control->core.lock);
    nudge(control);
    return SHOAL_OK;
}

void shoal_control_close(struct shoal_control *control, bool in_good_order)
{
    if (!control || is_forked(control))
        return;
    /* release: pairs with the loads of the control thread */
    atomic_store_explicit(&control->ending, in_good_order ? IN_GOOD_ORDER : AT_ONCE, memory_order_release);
    nudge(control);
    if (control->has_thread)
        pthread_join(control->thread, NULL);
    destroy(control);
}

/* ---- calls of any thread ---- */

void shoal_control_watch(struct shoal_control *control, int rank, int pid, int pidfd)
{
    if (rank < 0 || rank >= size_of(control) || rank == rank_of(control) || is_forked(control))
        return;
    pthread_mutex_lock(&control->core.lock);
    control->watched[rank].pid = pid;
    if (control->watched[rank].fd < 0)
        control->watched[rank].fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&control->core.lock);
    nudge(control);
}

bool shoal_control_publish(struct shoal_control *control, const void *data, size_t bytes)
{
    if (bytes > SHOAL_CONTROL_NOTICE_MAX || is_forked(control))
        return false;
    if (size_of(control) == 1)
        return true;
    pthread_mutex_lock(&control->core.lock);
    const struct shoal_control_notice_head head = {.number = control->own_number + 1, .origin = (uint32_t)rank_of(control)};
    const bool is_added = shoal_control_state_add(&control->core.state, &head, data, bytes, 0);
    control->own_number += is_added;
    pthread_mutex_unlock(&control->core.lock);
    nudge(control);
    return is_added;
}

void shoal_control_wake(struct shoal_control *control)
{
    if (is_forked(control))
        return;
    atomic_store_explicit(&control->is_woken, true, memory_order_release); /* pairs with the exchange in deliver */
    nudge(control);
}

bool shoal_control_is_lost(const struct shoal_control *control, int rank)
{
    return rank >= 0 && rank < size_of(control) && shoal_control_state_life(&control->core.state, rank) == SHOAL_CONTROL_LOST;
}

void shoal_control_describe(struct shoal_control *control, int rank, char *text, size_t bytes)
{
    if (rank < 0 || rank >= size_of(control)) {
        snprintf(text, bytes, "no rank of this job");
        return;
    }
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_describe(&control->core.state, rank, shoal_clock_ns(), text, bytes);
    pthread_mutex_unlock(&control->core.lock);
}
