#include "membership/control.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "membership/control_tree.h"

static bool is_forked(const struct shoal_control *control)
{
    return control->generation != shoal_control_socket_generation();
}

/* ---- opening and closing ---- */

static void nudge(struct shoal_control *control)
{
    const int error = errno;
    const uint64_t one = 1;
    if (control->event >= 0 && write(control->event, &one, sizeof one) < 0)
        errno = error; /* the counter is full, so the thread is already awake */
}

static void destroy(struct shoal_control *control)
{
    for (size_t i = 0; i < control->link_count; i++) {
        shoal_control_socket_close(control->links[i]->link.fd);
        shoal_control_link_destroy(control->links[i]);
    }
    for (int r = 0; control->watched && r < shoal_control_tree_size(control); r++) {
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
    free(control->awaited_ns);
    free(control);
}

static void fill_hello(const struct shoal_bootstrap *bootstrap, struct shoal_link_hello *hello)
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
    const size_t size = (size_t)shoal_control_tree_size(control);
    control->link_max = size + SHOAL_CONTROL_LINKS_SPARE;
    control->links = calloc(control->link_max, sizeof *control->links);
    control->polled = calloc(2 + control->link_max + size, sizeof *control->polled);
    control->watched = calloc(size, sizeof *control->watched);
    control->contacts = calloc(size, sizeof *control->contacts);
    control->awaited_ns = calloc(size, sizeof *control->awaited_ns);
    for (size_t r = 0; control->watched && r < size; r++)
        control->watched[r].fd = -1;
    return control->links && control->polled && control->watched && control->contacts && control->awaited_ns;
}

static enum shoal_status create(const struct shoal_bootstrap *bootstrap, const struct shoal_control_options *options,
                                struct shoal_control **control_out)
{
    struct shoal_link_hello hello;
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
            "control tree: cannot listen at %s: ports %u to %u are all in use; each rank of a host needs two, and one "
            "more for each further thread at the network: widen SHOAL_PORTS",
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
    mine->process = control->core.own.hello.process;
    memcpy(mine->host, control->core.own.hello.host, sizeof mine->host);
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

static enum shoal_status gather_contacts(struct shoal_control *control, struct shoal_bootstrap *bootstrap)
{
    struct shoal_control_contact mine;
    fill_contact(control, &mine);
    if (shoal_auth_random(&mine.job, sizeof mine.job) != SHOAL_OK)
        return shoal_log_fail(control->core.log, SHOAL_ERR_SYSTEM, "bootstrap", "no random bytes from the kernel (%m)");
    SHOAL_TRY(shoal_bootstrap_gather(bootstrap, control->core.log, "control", &mine, control->contacts, sizeof mine,
                                     control->timeout_ms));
    for (int r = 0; r < shoal_control_tree_size(control); r++)
        shoal_link_text_clean(control->contacts[r].host, sizeof control->contacts[r].host);
    control->core.own.hello.job = control->contacts[0].job;
    return SHOAL_OK;
}

/* The control thread enforces the deadline. */
static enum shoal_status await_opened(struct shoal_control *control)
{
    pthread_mutex_lock(&control->core.lock);
    while (control->phase == SHOAL_CONTROL_OPENING)
        pthread_cond_wait(&control->opened, &control->core.lock);
    const enum shoal_status status = control->phase == SHOAL_CONTROL_OPEN ? SHOAL_OK : control->failure;
    pthread_mutex_unlock(&control->core.lock);
    return status == SHOAL_OK ? SHOAL_OK : shoal_log_repeat(control->core.log, status, control->failure_text);
}

static enum shoal_status connect_all(struct shoal_control *control, struct shoal_bootstrap *bootstrap,
                                     const struct shoal_control_options *options)
{
    SHOAL_TRY(open_listener(control, options));
    SHOAL_TRY(gather_contacts(control, bootstrap));
    const int error = shoal_control_thread_start(control);
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
    atomic_store_explicit(&control->ending, in_good_order ? SHOAL_CONTROL_ENDS_IN_ORDER : SHOAL_CONTROL_ENDS_AT_ONCE,
                          memory_order_release);
    nudge(control);
    if (control->has_thread)
        pthread_join(control->thread, NULL);
    destroy(control);
}

/* ---- calls of any thread ---- */

void shoal_control_watch(struct shoal_control *control, int rank, int pidfd)
{
    if (rank < 0 || rank >= shoal_control_tree_size(control) || rank == shoal_control_tree_rank(control) || is_forked(control))
        return;
    pthread_mutex_lock(&control->core.lock);
    if (control->watched[rank].fd < 0)
        control->watched[rank].fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&control->core.lock);
    nudge(control);
}

bool shoal_control_publish(struct shoal_control *control, enum shoal_control_weight weight, const void *data, size_t bytes)
{
    if (bytes > SHOAL_CONTROL_NOTICE_MAX || is_forked(control))
        return false;
    if (shoal_control_tree_size(control) == 1)
        return true;
    pthread_mutex_lock(&control->core.lock);
    const struct shoal_control_notice_head head = {
        .number = control->own_number + 1, .origin = (uint32_t)shoal_control_tree_rank(control), .weight = (uint32_t)weight};
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

bool shoal_control_is_root(const struct shoal_control *control)
{
    const struct shoal_control_state *state = &control->core.state;
    return shoal_control_state_root(state) == state->rank;
}

bool shoal_control_is_lost(const struct shoal_control *control, int rank)
{
    return rank >= 0 && rank < shoal_control_tree_size(control) &&
           shoal_control_state_life(&control->core.state, rank) == SHOAL_CONTROL_LOST;
}

bool shoal_control_has_ended(const struct shoal_control *control, int rank)
{
    return rank >= 0 && rank < shoal_control_tree_size(control) &&
           shoal_control_state_life(&control->core.state, rank) != SHOAL_CONTROL_ALIVE;
}

bool shoal_control_is_cut_off(const struct shoal_control *control, int rank)
{
    return rank >= 0 && rank < shoal_control_tree_size(control) && shoal_control_state_is_cut_off(&control->core.state, rank);
}

void shoal_control_describe(struct shoal_control *control, int rank, char *text, size_t bytes)
{
    if (rank < 0 || rank >= shoal_control_tree_size(control) || is_forked(control)) {
        snprintf(text, bytes, "not known here");
        return;
    }
    pthread_mutex_lock(&control->core.lock);
    shoal_control_state_describe(&control->core.state, rank, shoal_clock_ns(), text, bytes);
    pthread_mutex_unlock(&control->core.lock);
}
