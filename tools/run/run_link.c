#include "run_link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* OUT_BYTES_MAX: a peer that reads so slowly that this many bytes are queued counts as lost. */
enum { OUT_BYTES_MAX = 1 << 20, PROBE_S = 1 };

static void socket_watch(int fd)
{
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){PROBE_S}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){PROBE_S}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &(int){RUN_LINK_SILENT_MS / 1000 / PROBE_S}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &(unsigned){RUN_LINK_SILENT_MS}, sizeof(unsigned));
}

bool run_link_open(struct run_link *link, int fd, enum run_link_state state, uint64_t until)
{
    *link = (struct run_link){.fd = fd, .state = state, .host = -1, .until = until, .in = malloc(RUN_FRAME_BYTES_MAX)};
    if (!link->in)
        run_link_close(link);
    else
        socket_watch(fd);
    return link->fd >= 0;
}

void run_link_close(struct run_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    free(link->in);
    free(link->out);
    *link = (struct run_link){.fd = -1, .host = -1};
}

int run_link_connect(struct run_link *link, const struct sockaddr_storage *address, socklen_t bytes, uint64_t until)
{
    const int fd = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    if (!run_link_open(link, fd, RUN_LINK_CONNECTING, until))
        return ENOMEM;
    if (connect(fd, (const struct sockaddr *)address, bytes) == 0 || errno == EINPROGRESS)
        return 0;
    const int error = errno;
    run_link_close(link);
    return error;
}

struct pollfd run_link_poll(const struct run_link *link)
{
    const bool is_writing = link->out_bytes || link->state == RUN_LINK_CONNECTING;
    const bool is_full = link->in_bytes == RUN_FRAME_BYTES_MAX;
    return (struct pollfd){.fd = link->error ? -1 : link->fd,
                           .events = (short)((is_writing ? POLLOUT : 0) | (is_full ? 0 : POLLIN))};
}

static bool out_reserve(struct run_link *link, size_t more)
{
    if (link->out_bytes + more <= link->out_capacity)
        return true;
    if (link->out_bytes + more > OUT_BYTES_MAX)
        return false;
    unsigned char *out = realloc(link->out, link->out_bytes + more);
    if (!out)
        return false;
    link->out = out;
    link->out_capacity = link->out_bytes + more;
    return true;
}

static int link_flush(struct run_link *link)
{
    while (link->out_bytes) {
        const ssize_t sent = send(link->fd, link->out, link->out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN ? 0 : errno;
        link->out_bytes -= (size_t)sent;
        memmove(link->out, link->out + sent, link->out_bytes);
    }
    return 0;
}

/* If the connection cannot be written to, the next poll() shows it. */
void run_link_say(struct run_link *link, const struct run_message *message)
{
    unsigned char frame[RUN_FRAME_BYTES_MAX];
    if (link->fd < 0)
        return;
    const size_t bytes = run_frame_build(message, frame);
    if (!out_reserve(link, bytes)) {
        shutdown(link->fd, SHUT_RDWR);
        return;
    }
    memcpy(link->out + link->out_bytes, frame, bytes);
    link->out_bytes += bytes;
    (void)link_flush(link);
}

static int link_receive(struct run_link *link)
{
    const size_t room = RUN_FRAME_BYTES_MAX - link->in_bytes;
    if (!room)
        return 0;
    const ssize_t got = recv(link->fd, link->in + link->in_bytes, room, MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : errno;
    link->in_bytes += (size_t)got;
    return got ? 0 : -1;
}

int run_link_serve(struct run_link *link, short events)
{
    const size_t before = link->in_bytes;
    const int error = events & (POLLIN | POLLERR | POLLHUP) ? link_receive(link) : 0;
    return error || link->in_bytes > before ? error : link_flush(link);
}

enum run_parsed run_link_next(struct run_link *link, struct run_message *message_out)
{
    size_t used = 0;
    const bool is_member = link->state == RUN_LINK_MEMBER;
    const enum run_parsed parsed = run_frame_parse(link->in, link->in_bytes, !is_member, message_out, &used);
    if (parsed == RUN_PARSED_FRAME) {
        link->in_bytes -= used;
        memmove(link->in, link->in + used, link->in_bytes);
    }
    return parsed;
}
