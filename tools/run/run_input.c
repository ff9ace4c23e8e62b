/* Rank 0's input, if it comes from a terminal. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "run.h"

int run_relay_open(struct run_relay *relay)
{
    int pair[2];
    relay->to = -1;
    if (!isatty(0) || pipe2(pair, O_CLOEXEC))
        return 0;
    fcntl(pair[1], F_SETFL, O_NONBLOCK);
    relay->to = pair[1];
    return pair[0];
}

void run_relay_close(struct run_relay *relay)
{
    if (relay->to >= 0)
        close(relay->to);
    relay->to = -1;
}

/* A terminal that is not the controlling one has no foreground group; any process may read it. */
static bool is_foreground(void)
{
    const pid_t group = tcgetpgrp(0);
    return group < 0 || group == getpgrp();
}

bool run_relay_is_in_background(const struct run_relay *relay)
{
    return relay->to >= 0 && !is_foreground();
}

void run_relay_fill(const struct run_relay *relay, struct pollfd *from, struct pollfd *to)
{
    const bool may_read = relay->to >= 0 && !relay->length && is_foreground();
    *from = (struct pollfd){.fd = may_read ? 0 : -1, .events = POLLIN};
    *to = (struct pollfd){.fd = relay->to, .events = relay->length ? POLLOUT : 0};
}

/* Returns true if a line has ended. */
static bool input_read(struct run_relay *relay)
{
    const ssize_t count = read(0, relay->bytes, sizeof relay->bytes);
    relay->start = 0;
    relay->length = count > 0 ? (size_t)count : 0;
    if (!relay->length && (count == 0 || errno != EINTR))
        run_relay_close(relay);
    return relay->length && relay->bytes[relay->length - 1] == '\n';
}

static void input_write(struct run_relay *relay)
{
    const ssize_t count = write(relay->to, relay->bytes + relay->start, relay->length);
    if (count > 0) {
        relay->start += (size_t)count;
        relay->length -= (size_t)count;
    } else if (errno != EAGAIN && errno != EINTR) {
        run_relay_close(relay);
    }
}

bool run_relay_serve(struct run_relay *relay, const struct pollfd *from, const struct pollfd *to)
{
    bool has_ended_line = false;
    if (relay->to >= 0 && (to->revents & (POLLERR | POLLHUP)))
        run_relay_close(relay);
    if (relay->to >= 0 && from->fd >= 0 && from->revents && is_foreground())
        has_ended_line = input_read(relay);
    if (relay->to >= 0 && relay->length)
        input_write(relay);
    return has_ended_line;
}
