#include "membership/control_tree.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"

#define RETRY_MS 50
#define ORPHAN_MS 1000 /* time for an orphan to find its new parent, in addition to its waits for ranks that do not answer */
/* Like ORPHAN_MS, but after a silence: two ranks may notice it a heartbeat apart, a packet may be lost, and it is noticed only
 * at a heartbeat. */
#define SILENT_ORPHAN_MS (SHOAL_CONTROL_HEARTBEAT_MS * 5 / 2)
#define REFUSED_MS 1000 /* how long a parent that refuses is retried: one that has a tree listens */

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

void shoal_control_tree_end(struct shoal_control *control, int rank, enum shoal_control_cause cause)
{
    char who[256], how[128];
    pthread_mutex_lock(&control->core.lock);
    const bool is_news = shoal_control_state_end(&control->core.state, rank, SHOAL_CONTROL_LOST, cause);
    shoal_control_state_describe(&control->core.state, rank, 0, how, sizeof how);
    pthread_mutex_unlock(&control->core.lock);
    if (!is_news)
        return;
    print_rank(control, rank, who, sizeof who);
    shoal_log_line(control->core.log, SHOAL_LOG_INFO, "bootstrap", "control tree: %s: %s", who, how);
}

void shoal_control_tree_stop(struct shoal_control *control, int rank, bool is_stopped, uint64_t now_ns)
{
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_stop(&control->core.state, rank, is_stopped, now_ns);
    pthread_mutex_unlock(&control->core.lock);
}

bool shoal_control_tree_is_alive(const struct shoal_control *control, int rank)
{
    return shoal_control_state_life(&control->core.state, rank) == SHOAL_CONTROL_ALIVE;
}

/* ---- links ---- */

struct shoal_control_link *shoal_control_tree_link(const struct shoal_control *control, int rank)
{
    for (size_t i = 0; i < control->link_count; i++) {
        if (control->links[i]->peer == rank && control->links[i]->link.state < SHOAL_LINK_CLOSING)
            return control->links[i];
    }
    return NULL;
}

void shoal_control_tree_add(struct shoal_control *control, int fd, int peer, uint64_t now_ns)
{
    struct shoal_control_link *link =
        control->link_count < control->link_max ? shoal_control_link_create(&control->core, fd, peer, now_ns) : NULL;
    if (link)
        control->links[control->link_count++] = link;
    else
        shoal_control_socket_close(fd);
}

static void note_try(struct shoal_control *control, int error)
{
    struct shoal_control_attempt *attempt = &control->attempt;
    attempt->error = error;
    if (error != ECONNREFUSED)
        attempt->refused_ns = 0;
    else if (!attempt->refused_ns)
        attempt->refused_ns = shoal_clock_ns();
}

/* Decides what the end of a link means for its peer. */
static void mourn(struct shoal_control *control, const struct shoal_control_link *link)
{
    if (link->was_up && !link->is_shut && link->cause != SHOAL_CONTROL_NO_CAUSE) {
        shoal_control_tree_end(control, link->peer, link->cause);
    } else if (link->link.is_client && !link->was_up && link->peer == control->attempt.target) {
        note_try(control, link->link.error);
        control->attempt.verdict = link->link.verdict;
    }
}

void shoal_control_tree_sweep(struct shoal_control *control)
{
    size_t kept = 0;
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (link->link.state != SHOAL_LINK_ENDED) {
            control->links[kept++] = link;
            continue;
        }
        SHOAL_ASSERT(link->is_over); /* with a cause */
        mourn(control, link);
        shoal_control_socket_close(link->link.fd);
        shoal_control_link_destroy(link);
    }
    control->link_count = kept;
}

/* ---- the parent ---- */

static void fail_to_open(struct shoal_control *control, enum shoal_status status)
{
    pthread_mutex_lock(&control->core.lock);
    control->phase = SHOAL_CONTROL_FAILED;
    control->failure = status;
    (void)shoal_log_last_error(control->core.log, control->failure_text, sizeof control->failure_text);
    pthread_cond_signal(&control->opened);
    pthread_mutex_unlock(&control->core.lock);
}

static enum shoal_status say_unreached(struct shoal_control *control)
{
    const struct shoal_control_attempt *attempt = &control->attempt;
    const struct shoal_control_link *link = shoal_control_tree_link(control, attempt->target);
    char here[256], there[256];
    print_rank(control, shoal_control_tree_rank(control), here, sizeof here);
    print_rank(control, attempt->target, there, sizeof there);
    if (attempt->verdict != SHOAL_LINK_OK)
        return shoal_log_fail(
            control->core.log, shoal_link_verdict_status(attempt->verdict), "bootstrap",
            "control tree: %s and its parent, %s, could not prove to each other that they belong to one job; see above", here,
            there);
    if (attempt->error == ECONNREFUSED)
        return shoal_log_fail(
            control->core.log, SHOAL_ERR_PEER_LOST, "bootstrap",
            "control tree: %s cannot reach its parent, %s: it refuses the connection; its process has ended, or "
            "a firewall rejects it: open the ports of SHOAL_PORTS",
            here, there);
    if (link && link->link.state != SHOAL_LINK_CONNECTING)
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
    const struct shoal_control_attempt *attempt = &control->attempt;
    struct shoal_control_link *link = shoal_control_tree_link(control, attempt->target);
    if (control->phase == SHOAL_CONTROL_OPENING) {
        fail_to_open(control, say_unreached(control));
        return;
    }
    if (link)
        shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
    shoal_control_tree_end(control, attempt->target,
                           attempt->error == ECONNREFUSED ? SHOAL_CONTROL_REFUSED : SHOAL_CONTROL_UNANSWERED);
}

static void start_connect(struct shoal_control *control, uint64_t now_ns)
{
    struct shoal_control_attempt *attempt = &control->attempt;
    struct shoal_address address;
    address_of(control, attempt->target, &address);
    const int fd = shoal_control_socket_connect(&address);
    attempt->retry_ns = now_ns + RETRY_MS * SHOAL_NS_PER_MS;
    if (fd >= 0)
        shoal_control_tree_add(control, fd, attempt->target, now_ns);
    else
        note_try(control, -fd);
}

static void seek(struct shoal_control *control, int target, uint64_t now_ns)
{
    struct shoal_control_attempt *attempt = &control->attempt;
    if (attempt->target == target)
        return;
    const uint64_t limit_ms = control->phase == SHOAL_CONTROL_OPENING ? control->timeout_ms : SHOAL_CONTROL_UNREACHABLE_MS;
    *attempt = (struct shoal_control_attempt){.target = target, .until_ns = now_ns + limit_ms * SHOAL_NS_PER_MS};
}

/* A refusal by the first parent is final. A later parent whose kernel answers but whose process is silent is not given up: it
 * is stopped, and the rank seeks another parent meanwhile. */
static bool is_hopeless(const struct shoal_control *control, const struct shoal_control_link *link, uint64_t now_ns)
{
    const struct shoal_control_attempt *attempt = &control->attempt;
    const bool is_connected = link && link->link.state != SHOAL_LINK_CONNECTING;
    if (attempt->refused_ns && now_ns >= attempt->refused_ns + REFUSED_MS * SHOAL_NS_PER_MS && !is_connected)
        return true;
    if (control->phase == SHOAL_CONTROL_OPENING)
        return attempt->verdict != SHOAL_LINK_OK || now_ns >= attempt->until_ns;
    return now_ns >= attempt->until_ns && !is_connected;
}

void shoal_control_tree_find_parent(struct shoal_control *control, uint64_t now_ns)
{
    const int rank = shoal_control_tree_rank(control);
    const int first = rank > 0 ? (rank - 1) / 2 : -1;
    seek(control, control->phase == SHOAL_CONTROL_OPENING ? first : shoal_control_state_parent(&control->core.state, rank),
         now_ns);
    const int target = control->attempt.target;
    if (target < 0 || control->core.linked[target])
        return;
    const struct shoal_control_link *link = shoal_control_tree_link(control, target);
    if (is_hopeless(control, link, now_ns))
        give_up(control);
    else if (!link && now_ns >= control->attempt.retry_ns)
        start_connect(control, now_ns);
}

/* Returns how long an orphan may take to connect to this rank. It gives up the ancestors before this rank one after the other,
 * and may have noticed the first loss later than this rank. After a silence all ranks wait equally long, so the first ancestor
 * is not counted: this rank has waited for it as well. */
static uint64_t patience_ms(const struct shoal_control_state *state, int orphan)
{
    const uint64_t passed = (uint64_t)shoal_control_state_passed(state, orphan);
    if (shoal_control_state_passed_in_silence(state, orphan))
        return SHOAL_CONTROL_UNREACHABLE_MS * (passed - 1) + SILENT_ORPHAN_MS;
    return SHOAL_CONTROL_UNREACHABLE_MS * (1 + passed) + ORPHAN_MS;
}

/* If a rank ends together with all its neighbors, no connection shows its end. Nor does one to a root that was cut off together
 * with its children. But such a rank does not connect to its new parent, which is this rank. */
void shoal_control_tree_await_orphans(struct shoal_control *control, uint64_t now_ns)
{
    const struct shoal_control_state *state = &control->core.state;
    for (int r = state->rank + 1; r < state->size && control->phase == SHOAL_CONTROL_OPEN; r++) {
        uint64_t *since_ns = &control->awaited_ns[r];
        const bool is_awaited = !control->core.linked[r] && shoal_control_tree_is_alive(control, r) &&
                                !shoal_control_state_is_stopped(state, r) &&
                                shoal_control_state_parent(state, r) == state->rank;
        if (!is_awaited || *since_ns == 0)
            *since_ns = is_awaited ? now_ns : 0;
        if (is_awaited && now_ns - *since_ns >= patience_ms(state, r) * SHOAL_NS_PER_MS)
            shoal_control_tree_end(control, r, SHOAL_CONTROL_ABSENT);
    }
}

void shoal_control_tree_drop_useless(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (link->link.is_client && !link->was_up && !shoal_control_tree_is_alive(control, link->peer))
            shoal_control_link_end(&control->core, link, SHOAL_CONTROL_NO_CAUSE);
    }
}

/* ---- leaving ----
 *
 * A goodbye must reach every rank that stays before the ranks on its path end. Otherwise a rank that stays would try to reach
 * one that has left, and report it as lost. So each link up (to a lower rank) that is a rank's path to the others is kept until
 * there is another, and a rank leaves when all its neighbors have released it. A leaving rank releases a neighbor when all its
 * other neighbors have released the leaving rank, and accepts no new neighbors from then on. Links up that are not the path do
 * not count: they would close cycles in which each rank waits for the other. A rank that has lost its path, and connects after
 * this rank has left, does not receive the goodbye: it is refused. */

/* Returns the link up that leads to the others: the link to the parent, or the last link up while there is no parent. */
static const struct shoal_control_link *find_way(const struct shoal_control *control)
{
    const int target = control->attempt.target;
    const struct shoal_control_link *way = NULL;
    if (target >= 0 && control->core.linked[target])
        return control->core.linked[target];
    for (size_t i = 0; i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        if (link->link.is_client && shoal_control_link_is_up(link) && (!way || link->id > way->id))
            way = link;
    }
    return way;
}

static bool counts(const struct shoal_control_link *link, const struct shoal_control_link *way)
{
    return shoal_control_link_is_member(link) && (!link->link.is_client || link == way);
}

static size_t count_unreleased(const struct shoal_control *control)
{
    const struct shoal_control_link *way = find_way(control);
    size_t count = 0;
    for (size_t i = 0; i < control->link_count; i++)
        count += counts(control->links[i], way) && !control->links[i]->is_released;
    return count;
}

/* A rank that stays lets a neighbor leave as soon as its own path does not use the link. Otherwise it waits until no rank on
 * the other side needs the link. This is also the rule for links down, and for the root's last link up, because some ranks may
 * not have found their new parent yet. */
static bool may_release(const struct shoal_control *control, const struct shoal_control_link *link)
{
    if (shoal_control_state_life(&control->core.state, link->peer) != SHOAL_CONTROL_GONE)
        return false;
    if (!link->link.is_client)
        return link->is_released;
    return link != find_way(control) || (control->attempt.target < 0 && link->is_released);
}

static void release_leaving(struct shoal_control *control)
{
    const struct shoal_control_link *way = find_way(control);
    const size_t unreleased = count_unreleased(control);
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        const bool is_last = unreleased == (link->is_released ? 0 : 1);
        if (!shoal_control_link_is_up(link) || (counts(link, way) && !is_last))
            continue;
        link->needs_release = true;
        control->is_closed |= is_last;
    }
    control->is_closed |= unreleased == 0;
}

void shoal_control_tree_release(struct shoal_control *control)
{
    if (control->is_leaving) {
        release_leaving(control);
        return;
    }
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        if (shoal_control_link_is_up(link))
            link->needs_release = may_release(control, link);
    }
}

/* Ends the links of processes that are still in the handshake, so that they seek another parent. */
static void drop_strangers(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++) {
        if (!shoal_control_link_is_member(control->links[i]))
            shoal_control_link_end(&control->core, control->links[i], SHOAL_CONTROL_NO_CAUSE);
    }
}

static bool may_leave(struct shoal_control *control)
{
    bool may = count_unreleased(control) == 0;
    for (size_t i = 0; may && i < control->link_count; i++) {
        const struct shoal_control_link *link = control->links[i];
        if (shoal_control_link_is_member(link))
            may = link->has_released && shoal_control_link_is_up_to_date(&control->core, link);
    }
    return may;
}

/* Sends nothing further, but continues to read: the kernel discards sent data if a socket is closed with unread bytes. */
static void shut(struct shoal_control *control)
{
    control->is_shut = true;
    for (size_t i = 0; i < control->link_count; i++) {
        struct shoal_control_link *link = control->links[i];
        link->is_shut = true;
        if (shoal_control_link_is_member(link))
            shutdown(link->link.fd, SHUT_WR);
    }
}

void shoal_control_tree_depart(struct shoal_control *control)
{
    if (control->is_closed)
        drop_strangers(control);
    if (control->is_leaving && !control->is_shut && may_leave(control))
        shut(control);
}

void shoal_control_tree_say_goodbye(struct shoal_control *control, uint64_t now_ns)
{
    const int ending = atomic_load_explicit(&control->ending, memory_order_acquire); /* pairs with the store in close */
    if (control->is_leaving || ending != SHOAL_CONTROL_ENDS_IN_ORDER)
        return;
    control->is_leaving = true;
    control->leave_until_ns = now_ns + SHOAL_CONTROL_FAREWELL_MS * SHOAL_NS_PER_MS;
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_end(&control->core.state, shoal_control_tree_rank(control), SHOAL_CONTROL_GONE, SHOAL_CONTROL_NO_CAUSE);
    pthread_mutex_unlock(&control->core.lock);
}

bool shoal_control_tree_is_over(const struct shoal_control *control)
{
    const int ending = atomic_load_explicit(&control->ending, memory_order_acquire); /* pairs with the store in close */
    return ending == SHOAL_CONTROL_ENDS_AT_ONCE || (control->is_shut && control->link_count == 0) ||
           (control->is_leaving && shoal_clock_ns() >= control->leave_until_ns);
}

/* ---- opening ---- */

static void print_missing(const struct shoal_control *control, char *text, size_t bytes)
{
    size_t used = 0;
    for (int child = 2 * shoal_control_tree_rank(control) + 1;
         child <= 2 * shoal_control_tree_rank(control) + 2 && child < shoal_control_tree_size(control); child++) {
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
    print_rank(control, shoal_control_tree_rank(control), here, sizeof here);
    return shoal_log_fail(
        control->core.log, SHOAL_ERR_TIMEOUT, "bootstrap",
        "control tree: %s did not connect to %s within %u ms; what do they log? A firewall may drop packets: "
        "open the ports of SHOAL_PORTS; or the address here is one that other hosts do not reach: set SHOAL_NIC",
        who, here, control->timeout_ms);
}

static bool has_children(const struct shoal_control *control)
{
    const int child = 2 * shoal_control_tree_rank(control) + 1;
    return (child >= shoal_control_tree_size(control) || control->core.linked[child]) &&
           (child + 1 >= shoal_control_tree_size(control) || control->core.linked[child + 1]);
}

static int first_lost(const struct shoal_control *control)
{
    for (int r = 0; r < shoal_control_tree_size(control); r++) {
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
    return shoal_log_fail(control->core.log, SHOAL_ERR_PEER_LOST, "bootstrap", "building the control tree failed: %s: %s", who,
                          how);
}

void shoal_control_tree_look_at_opening(struct shoal_control *control, uint64_t now_ns)
{
    const int target = control->attempt.target;
    if (control->phase != SHOAL_CONTROL_OPENING)
        return;
    const int lost = first_lost(control);
    if (lost >= 0) {
        fail_to_open(control, say_lost(control, lost));
    } else if ((target < 0 || control->core.linked[target]) && has_children(control)) {
        pthread_mutex_lock(&control->core.lock);
        control->phase = SHOAL_CONTROL_OPEN;
        pthread_cond_signal(&control->opened);
        pthread_mutex_unlock(&control->core.lock);
    } else if (now_ns >= control->open_until_ns && (target < 0 || control->core.linked[target])) {
        fail_to_open(control, say_missing(control));
    }
}
