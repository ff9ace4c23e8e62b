#include "membership/control_socket.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "link/link.h"
#include "membership/control.h"

/* The open sockets of this process. A forked child closes those that were its parent's at the fork. */
static struct {
    pthread_mutex_t lock;
    int *fds;
    size_t count, capacity;
    atomic_uint generation;
} sockets = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t sockets_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&sockets.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&sockets.lock);
}

static void after_fork_in_child(void)
{
    for (size_t i = 0; i < sockets.count; i++)
        close(sockets.fds[i]);
    sockets.count = 0;
    atomic_fetch_add_explicit(&sockets.generation, 1, memory_order_relaxed);
    pthread_mutex_unlock(&sockets.lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

unsigned shoal_control_socket_generation(void)
{
    /* relaxed: it changes only in a new process, before any other code runs there. */
    return atomic_load_explicit(&sockets.generation, memory_order_relaxed);
}

/* Under the lock, so that no fork happens between opening the socket and recording it. */
static int note(int fd)
{
    if (fd < 0)
        return -errno;
    if (sockets.count == sockets.capacity) {
        const size_t capacity = sockets.capacity ? 2 * sockets.capacity : 64;
        int *fds = realloc(sockets.fds, capacity * sizeof *fds);
        if (!fds) {
            close(fd);
            return -ENOMEM;
        }
        sockets.fds = fds;
        sockets.capacity = capacity;
    }
    sockets.fds[sockets.count++] = fd;
    return fd;
}

static int open_noted(int family)
{
    pthread_once(&sockets_once, watch_forks);
    pthread_mutex_lock(&sockets.lock);
    const int fd = note(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    pthread_mutex_unlock(&sockets.lock);
    return fd;
}

void shoal_control_socket_close(int fd)
{
    pthread_mutex_lock(&sockets.lock);
    for (size_t i = 0; i < sockets.count; i++) {
        if (sockets.fds[i] == fd) {
            sockets.fds[i] = sockets.fds[--sockets.count];
            break;
        }
    }
    close(fd);
    pthread_mutex_unlock(&sockets.lock);
}

int shoal_control_socket_listen(const struct shoal_address *address)
{
    const int fd = open_noted(address->socket.ss_family);
    if (fd < 0)
        return fd;
    const int error = shoal_address_listen(fd, address);
    if (error == 0)
        return fd;
    shoal_control_socket_close(fd);
    return error;
}

int shoal_control_socket_accept(int listener)
{
    pthread_mutex_lock(&sockets.lock);
    const int fd = note(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
    pthread_mutex_unlock(&sockets.lock);
    if (fd >= 0)
        shoal_link_watch(fd, SHOAL_CONTROL_UNREACHABLE_MS);
    return fd;
}

int shoal_control_socket_connect(const struct shoal_address *to)
{
    const int fd = open_noted(to->socket.ss_family);
    if (fd < 0)
        return fd;
    shoal_link_watch(fd, SHOAL_CONTROL_UNREACHABLE_MS);
    const int error = shoal_address_connect(fd, to);
    if (error == 0 || error == EINPROGRESS)
        return fd;
    shoal_control_socket_close(fd);
    return -error;
}

int64_t shoal_control_socket_unanswered_ms(int fd)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info; /* an emulator may return less */
    const bool is_known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
                          bytes >= offsetof(struct tcp_info, tcpi_last_ack_recv) + sizeof info.tcpi_last_ack_recv &&
                          info.tcpi_state == TCP_ESTABLISHED;
    return is_known ? (int64_t)info.tcpi_last_ack_recv : -1;
}
