#ifndef SHOAL_TESTS_FREE_PORT_H
#define SHOAL_TESTS_FREE_PORT_H

/* Free ports for ranks that meet at an address. They are those among which `shoal run` also chooses (tools/run/run_spawn.c):
 * below the ports that Linux assigns to connections, in slots that are locked by a name. So no other test, and no `shoal run`,
 * takes a port between this program's choice and its use. */
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { FREE_PORT_FIRST = 20000, FREE_PORT_STEP = 17, FREE_PORT_SLOTS = 750 };

/* Returns a socket that has the slot's name, or -1 if another process has it. */
static inline int free_port_lock(int port)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "shoal-run-port-%d", port);
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

static inline bool free_port_is_free(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    if (fd >= 0)
        close(fd);
    return is_free;
}

/* Returns a free port with 16 free ports after it, or -1. They are this process's until its next call or its end. */
static inline int free_port(void)
{
    static int lock = -1;
    uint32_t start;
    if (lock >= 0)
        close(lock);
    lock = -1;
    if (getrandom(&start, sizeof start, 0) != (ssize_t)sizeof start)
        return -1;
    for (uint32_t i = 0; i < FREE_PORT_SLOTS; i++) {
        const int port = FREE_PORT_FIRST + FREE_PORT_STEP * (int)((start + i) % FREE_PORT_SLOTS);
        int free_count = 0;
        lock = free_port_lock(port);
        while (lock >= 0 && free_count < FREE_PORT_STEP && free_port_is_free(port + free_count))
            free_count++;
        if (free_count == FREE_PORT_STEP)
            return port;
        if (lock >= 0)
            close(lock);
        lock = -1;
    }
    return -1;
}

#endif
