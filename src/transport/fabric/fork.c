#include "transport/fabric/fork.h"

#include <ctype.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "transport/fabric/link.h"

struct entry {
    const void *owner;
    struct shoal_address address;
};

static struct {
    pthread_mutex_t lock;
    struct entry *entries;
    size_t count, capacity;
} noted = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t noted_once = PTHREAD_ONCE_INIT;

/* ---- Sockets by their addresses: in a forked child, too, where little but system calls is allowed ------------------------ */

static bool is_same_ipv4(const struct sockaddr_in *a, const struct sockaddr_in *b)
{
    return a->sin_port == b->sin_port && a->sin_addr.s_addr == b->sin_addr.s_addr;
}

static bool is_same_ipv6(const struct sockaddr_in6 *a, const struct sockaddr_in6 *b)
{
    return a->sin6_port == b->sin6_port && memcmp(&a->sin6_addr, &b->sin6_addr, sizeof a->sin6_addr) == 0;
}

static bool is_same(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family)
        return false;
    return a->ss_family == AF_INET6 ? is_same_ipv6((const void *)a, (const void *)b)
                                    : is_same_ipv4((const void *)a, (const void *)b);
}

static bool is_noted(const struct sockaddr_storage *address)
{
    if (address->ss_family != AF_INET && address->ss_family != AF_INET6)
        return false;
    for (size_t i = 0; i < noted.count; i++) {
        if (is_same(&noted.entries[i].address.socket, address))
            return true;
    }
    return false;
}

static bool is_of_endpoint(int fd)
{
    struct sockaddr_storage side = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof side;
    if (getsockname(fd, (struct sockaddr *)&side, &bytes) != 0)
        return false; /* no socket */
    if (is_noted(&side))
        return true;
    bytes = sizeof side;
    return getpeername(fd, (struct sockaddr *)&side, &bytes) == 0 && is_noted(&side);
}

static void close_socket(int fd)
{
    close(fd);
}

static void seal_socket(int fd)
{
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/* As getdents64 writes it. */
struct name {
    uint64_t inode;
    int64_t offset;
    uint16_t bytes;
    uint8_t type;
    char text[];
};

/* opendir would take memory, whose lock a thread of the parent may hold. */
static void for_each_noted(void (*act)(int fd))
{
    char names[4096] __attribute__((aligned(8)));
    const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long bytes;
    while (folder >= 0 && (bytes = syscall(SYS_getdents64, folder, names, sizeof names)) > 0) {
        for (long at = 0; at < bytes;) {
            const struct name *name = (const void *)(names + at);
            if (isdigit((unsigned char)name->text[0]) && is_of_endpoint(atoi(name->text)))
                act(atoi(name->text));
            at += name->bytes;
        }
    }
    if (folder >= 0)
        close(folder);
}

static void after_fork_in_child(void)
{
    if (noted.count)
        for_each_noted(close_socket);
    noted.count = 0;
    pthread_mutex_unlock(&noted.lock);
}

/* ---- Before -------------------------------------------------------------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&noted.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&noted.lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Without memory for it nothing is lost but this. */
static void append(const struct entry *entry)
{
    if (noted.count == noted.capacity) {
        const size_t capacity = noted.capacity ? 2 * noted.capacity : 64;
        struct entry *entries = reallocarray(noted.entries, capacity, sizeof *entries);
        if (!entries)
            return;
        noted.entries = entries;
        noted.capacity = capacity;
    }
    noted.entries[noted.count++] = *entry;
}

void shoal_fabric_fork_note(const void *owner, const struct shoal_fabric_address *address)
{
    struct entry entry = {.owner = owner};
    if (!shoal_link_read_address(address, &entry.address))
        return;
    pthread_once(&noted_once, watch_forks);
    pthread_mutex_lock(&noted.lock);
    append(&entry);
    pthread_mutex_unlock(&noted.lock);
}

void shoal_fabric_fork_forget(const void *owner)
{
    size_t kept = 0;
    pthread_mutex_lock(&noted.lock);
    for (size_t i = 0; i < noted.count; i++) {
        if (noted.entries[i].owner != owner)
            noted.entries[kept++] = noted.entries[i];
    }
    noted.count = kept;
    pthread_mutex_unlock(&noted.lock);
}

void shoal_fabric_fork_seal(void)
{
    pthread_mutex_lock(&noted.lock);
    if (noted.count)
        for_each_noted(seal_socket);
    pthread_mutex_unlock(&noted.lock);
}
