#include "store/kv_server.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"

#define ACCEPT_PAUSE_MS 100

#define EVENTS_MAX 256 /* most events fetched from the kernel at once */

struct shoal_kv_server {
    struct shoal_kv_core core;
    int listener;
    int stop_event;
    bool is_listening; /* the listener is in the epoll set */
    pthread_t thread;
    bool is_stopping;
    uint64_t stop_ns;   /* a server that stops waits at most until then, */
    uint64_t end_ns;    /* even while clients still ask */
    bool has_warned;    /* warned that no descriptors are left */
    uint64_t accept_ns; /* do not accept before this time (set after running out of descriptors) */
};

int shoal_kv_server_listen(const struct shoal_address *address)
{
    const int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    const int error = shoal_address_listen(fd, address);
    if (error == 0)
        return fd;
    close(fd);
    return error;
}

/* Returns false if the connection is over. */
static bool server_send_some(struct shoal_kv_session *session)
{
    const bool is_alive = session->link.state != SHOAL_LINK_ENDED && shoal_link_flush(&session->link);
    return is_alive && (session->link.state != SHOAL_LINK_CLOSING || shoal_link_unsent(&session->link) > 0);
}

/* Receives one piece per turn, so that a busy connection does not starve the others. */
static void serve_session(struct shoal_kv_server *server, struct shoal_kv_session *session, uint32_t events, uint64_t now_ns)
{
    bool is_alive = server_send_some(session);
    if (is_alive && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && shoal_kv_session_is_ready(session))
        is_alive = shoal_link_receive(&session->link) >= 0;
    else if (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
        is_alive = false;
    while (is_alive && shoal_kv_session_step(&server->core, session, now_ns)) {
        is_alive = server_send_some(session);
        server->stop_ns = shoal_min_size(now_ns + SHOAL_KV_FAREWELL_MS * SHOAL_NS_PER_MS, server->end_ns);
    }
    if (!is_alive)
        shoal_kv_session_close(&server->core, session);
}

/* The ranks that cannot connect see only that nothing answers, so warn here. */
static void pause_accepting(struct shoal_kv_server *server, int error, uint64_t now_ns)
{
    server->accept_ns = now_ns + ACCEPT_PAUSE_MS * SHOAL_NS_PER_MS;
    if (!server->has_warned)
        shoal_log_line(server->core.log, SHOAL_LOG_WARN, "bootstrap",
                       "rank %u's store has %zu of %u ranks and cannot take more for now: %s; see `ulimit -n`",
                       server->core.identity.link.hello.rank, server->core.member_count, server->core.identity.link.hello.size,
                       strerror(error));
    server->has_warned = true;
}

static void server_accept_one(struct shoal_kv_server *server, uint64_t now_ns)
{
    int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        const int error = errno;
        if (shoal_link_is_exhausted(error) && !shoal_kv_core_drop_stranger(&server->core))
            pause_accepting(server, error, now_ns);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (!shoal_kv_session_open(&server->core, fd, now_ns))
        close(fd);
}

static uint64_t server_earlier(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns == 0 || (b_ns != 0 && b_ns < a_ns) ? b_ns : a_ns;
}

/* Returns the milliseconds until a moment, or -1 (no timeout) if it is 0. */
static int until_ms(uint64_t moment_ns, uint64_t now_ns)
{
    if (moment_ns == 0)
        return -1;
    const uint64_t ms = moment_ns <= now_ns ? 0 : (moment_ns - now_ns + SHOAL_NS_PER_MS - 1) / SHOAL_NS_PER_MS;
    return (int)(ms < 1000000 ? ms : 1000000);
}

/* `whose` identifies the source of an event: the stop event or the listener (by their addresses in the server), or a
 * session. */
static bool server_await(const struct shoal_kv_server *server, int how, int fd, uint32_t events, void *whose)
{
    struct epoll_event event = {.events = events, .data.ptr = whose};
    return epoll_ctl(server->core.epoll, how, fd, &event) == 0;
}

static void await_connections(struct shoal_kv_server *server, uint64_t now_ns)
{
    const bool accepts = !server->is_stopping && server->accept_ns <= now_ns;
    if (accepts != server->is_listening &&
        server_await(server, accepts ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, server->listener, EPOLLIN, &server->listener))
        server->is_listening = accepts;
}

/* Updates only what has changed: there may be thousands of sessions, of which a turn touches few. */
static void await_sessions(struct shoal_kv_server *server)
{
    for (size_t i = 0; i < server->core.session_count; i++) {
        struct shoal_kv_session *session = server->core.sessions[i];
        uint32_t events = EPOLLRDHUP;
        if (shoal_kv_session_is_ready(session))
            events |= EPOLLIN;
        if (shoal_link_unsent(&session->link) > 0 || session->link.state == SHOAL_LINK_CLOSING)
            events |= EPOLLOUT;
        if (events != session->awaited &&
            !server_await(server, session->awaited ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, session->link.fd, events, session))
            shoal_kv_session_close(&server->core, session); /* out of memory: nothing could be received from it */
        session->awaited = events;
    }
}

static void begin_stop(struct shoal_kv_server *server, uint64_t now_ns)
{
    server->is_stopping = true;
    server->stop_ns = now_ns + SHOAL_KV_FAREWELL_MS * SHOAL_NS_PER_MS;
    server->end_ns = now_ns + SHOAL_KV_FAREWELL_MS_MAX * SHOAL_NS_PER_MS;
    (void)server_await(server, EPOLL_CTL_DEL, server->stop_event, 0, NULL);
}

/* Connections are accepted last, because that may end a session that has events here. */
static void serve_events(struct shoal_kv_server *server, const struct epoll_event *events, int count)
{
    const uint64_t now_ns = shoal_clock_ns();
    bool has_caller = false;
    for (int i = 0; i < count; i++) {
        struct shoal_kv_session *session = events[i].data.ptr;
        if (events[i].data.ptr == &server->listener)
            has_caller = true;
        else if (events[i].data.ptr == &server->stop_event)
            begin_stop(server, now_ns);
        else if (session->link.state != SHOAL_LINK_ENDED)
            serve_session(server, session, events[i].events, now_ns);
    }
    shoal_kv_core_sweep(&server->core);
    if (has_caller)
        server_accept_one(server, now_ns);
}

static void serve_turn(struct shoal_kv_server *server)
{
    struct epoll_event events[EVENTS_MAX];
    const uint64_t now_ns = shoal_clock_ns();
    uint64_t next_ns = shoal_kv_core_expire(&server->core, now_ns);
    shoal_kv_core_sweep(&server->core);
    next_ns = server_earlier(next_ns, server->accept_ns > now_ns ? server->accept_ns : 0);
    next_ns = server_earlier(next_ns, server->is_stopping ? server->stop_ns : 0);
    await_connections(server, now_ns);
    await_sessions(server);
    const int count = epoll_wait(server->core.epoll, events, EVENTS_MAX, until_ms(next_ns, now_ns));
    if (count > 0)
        serve_events(server, events, count);
}

static bool has_unsent(const struct shoal_kv_core *core)
{
    for (size_t i = 0; i < core->session_count; i++) {
        if (shoal_link_unsent(&core->sessions[i]->link) > 0)
            return true;
    }
    return false;
}

static void *server_serve(void *arg)
{
    struct shoal_kv_server *server = arg;
    while (!server->is_stopping ||
           ((server->core.member_count > 0 || has_unsent(&server->core)) && shoal_clock_ns() < server->stop_ns))
        serve_turn(server);
    return NULL;
}

static int server_start_thread(struct shoal_kv_server *server)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&server->thread, NULL, server_serve, server);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_setname_np(server->thread, "shoal-store");
    return error;
}

static void server_destroy(struct shoal_kv_server *server)
{
    shoal_kv_core_fini(&server->core);
    if (server->stop_event >= 0)
        close(server->stop_event);
    if (server->core.epoll >= 0)
        close(server->core.epoll);
    free(server);
}

enum shoal_status shoal_kv_server_start(int listener, const struct shoal_kv_identity *identity, struct shoal_log *log,
                                        struct shoal_kv_server **server_out)
{
    struct shoal_kv_server *server = calloc(1, sizeof *server);
    if (!server)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for rank 0's store");
    if (shoal_kv_core_init(&server->core, identity, log) != SHOAL_OK) {
        free(server);
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for rank 0's store");
    }
    server->listener = listener;
    server->stop_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    server->core.epoll = epoll_create1(EPOLL_CLOEXEC);
    const bool is_ready = server_await(server, EPOLL_CTL_ADD, server->stop_event, EPOLLIN, &server->stop_event);
    const int error = is_ready ? server_start_thread(server) : EMFILE;
    if (error) {
        server_destroy(server);
        return shoal_log_fail(log, SHOAL_ERR_SYSTEM, "bootstrap",
                              "cannot start the thread of rank 0's store: %s; see `ulimit -a`", strerror(error));
    }
    *server_out = server;
    return SHOAL_OK;
}

void shoal_kv_server_stop(struct shoal_kv_server *server)
{
    const uint64_t one = 1;
    if (write(server->stop_event, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(server->thread, NULL);
    close(server->listener);
    server_destroy(server);
}
