#include "run_link.h"

#include <errno.h>
#include <unistd.h>

#include "base/clock.h"

void run_link_open(struct run_link *link, const struct shoal_link_identity *own, int fd, bool is_client, uint64_t now_ms)
{
    link->host = -1;
    shoal_link_open(&link->link, own, fd, is_client, now_ms * SHOAL_NS_PER_MS);
    shoal_link_watch(fd, RUN_LINK_SILENT_MS);
}

void run_link_close(struct run_link *link)
{
    if (link->link.fd >= 0)
        close(link->link.fd);
    shoal_link_close(&link->link);
    *link = (struct run_link){.link.fd = -1, .host = -1};
}

int run_link_connect(struct run_link *link, const struct shoal_link_identity *own, const struct shoal_address *address,
                     uint64_t until_ms)
{
    const int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    run_link_open(link, own, fd, true, 0);
    run_link_until(link, until_ms);
    const int error = shoal_address_connect(fd, address);
    if (error == 0 || error == EINPROGRESS)
        return 0;
    run_link_close(link);
    return error;
}

void run_link_until(struct run_link *link, uint64_t until_ms)
{
    link->link.deadline_ns = until_ms == UINT64_MAX ? 0 : until_ms * SHOAL_NS_PER_MS;
}

uint64_t run_link_deadline(const struct run_link *link)
{
    const uint64_t deadline_ns = link->link.deadline_ns;
    return deadline_ns ? (deadline_ns + SHOAL_NS_PER_MS - 1) / SHOAL_NS_PER_MS : UINT64_MAX;
}

bool run_link_is_late(const struct run_link *link, uint64_t now_ms)
{
    return shoal_link_is_late(&link->link, now_ms * SHOAL_NS_PER_MS);
}

/* A link whose error is known needs no event, except one that a message has ended: poll() then reports the hang-up. */
struct pollfd run_link_poll(const struct run_link *link)
{
    const bool is_writing = shoal_link_unsent(&link->link) > 0 || link->link.state == SHOAL_LINK_CONNECTING;
    const bool is_known = link->link.error && link->link.state != SHOAL_LINK_ENDED;
    return (struct pollfd){.fd = is_known ? -1 : link->link.fd,
                           .events = (short)(is_writing ? POLLOUT | POLLIN : POLLIN)};
}

void run_link_say(struct run_link *link, const struct run_message *message)
{
    unsigned char value[RUN_VALUE_BYTES_MAX];
    if (link->link.fd < 0)
        return;
    const size_t bytes = run_value_build(message, value);
    const struct shoal_link_frame frame = {.head = {.kind = (uint8_t)message->kind, .value_bytes = (uint32_t)bytes},
                                           .value = value};
    if (shoal_link_send(&link->link, &frame))
        (void)shoal_link_flush(&link->link);
    else
        shutdown(link->link.fd, SHUT_RDWR);
}

void run_link_serve(struct run_link *link, short events)
{
    const long got = events & (POLLIN | POLLERR | POLLHUP) ? shoal_link_receive(&link->link) : 0;
    if (link->link.state == SHOAL_LINK_CLOSING)
        link->link.in.begin = link->link.in.end = 0;
    if (got == 0 && !shoal_link_flush(&link->link))
        link->link.error = errno;
}

enum shoal_link_event run_link_next(struct run_link *link, uint64_t now_ms, struct run_message *message_out)
{
    struct shoal_link_frame frame;
    const enum shoal_link_event event = shoal_link_next(&link->link, now_ms * SHOAL_NS_PER_MS, &frame);
    if (event == SHOAL_LINK_SHAKEN || event == SHOAL_LINK_OPENED || event == SHOAL_LINK_REFUSED)
        (void)shoal_link_flush(&link->link);
    if (event != SHOAL_LINK_FRAME || run_value_parse(frame.head.kind, frame.value, frame.head.value_bytes, message_out))
        return event;
    shoal_link_end(&link->link, EPROTO);
    return SHOAL_LINK_BROKEN;
}
