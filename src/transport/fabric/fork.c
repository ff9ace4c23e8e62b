#include "transport/fabric/fork.h"

#include <ctype.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "transport/fabric/reachability.h"

struct entry {
    const void *owner;
    struct shoal_address address;
};

static struct {
    pthread_mutex_t lock;
    struct entry *entries;
    size_t count, capacity;
    bool is_sorted; /* sorted before a fork, so that the child need not sort */
} noted = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t noted_once = PTHREAD_ONCE_INIT;

/* ---- Sockets by their addresses: also in a forked child, where little except system calls is allowed --------------------- */

static int compare_ports(uint16_t a, uint16_t b)
{
    return a < b ? -1 : a > b;
}

/* A total order of addresses. Addresses that are not internet addresses have no particular order. */
static int fork_compare(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    const struct sockaddr_in *a4 = (const void *)a, *b4 = (const void *)b;
    const struct sockaddr_in6 *a6 = (const void *)a, *b6 = (const void *)b;
    if (a->ss_family != b->ss_family)
        return a->ss_family < b->ss_family ? -1 : 1;
    const int ports =
        a->ss_family == AF_INET6 ? compare_ports(a6->sin6_port, b6->sin6_port) : compare_ports(a4->sin_port, b4->sin_port);
    if (ports)
        return ports;
    return a->ss_family == AF_INET6 ? memcmp(&a6->sin6_addr, &b6->sin6_addr, sizeof a6->sin6_addr)
                                    : memcmp(&a4->sin_addr, &b4->sin_addr, sizeof a4->sin_addr);
}

/* Returns the first entry that does not precede the address. */
static size_t fork_find_index(const struct sockaddr_storage *address)
{
    size_t low = 0, high = noted.count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (fork_compare(&noted.entries[middle].address.socket, address) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_noted(const struct sockaddr_storage *address)
{
    if (address->ss_family != AF_INET && address->ss_family != AF_INET6)
        return false;
    const size_t index = fork_find_index(address);
    return index < noted.count && fork_compare(&noted.entries[index].address.socket, address) == 0;
}

static bool is_of_endpoint(int fd)
{
    struct sockaddr_storage side = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof side;
    if (getsockname(fd, (struct sockaddr *)&side, &bytes) != 0)
        return false; /* not a socket */
    if (is_noted(&side))
        return true;
    bytes = sizeof side;
    return getpeername(fd, (struct sockaddr *)&side, &bytes) == 0 && is_noted(&side);
}

static void close_noted(int fd)
{
    if (is_of_endpoint(fd))
        close(fd);
}

/* A sealed descriptor's addresses are not read again. */
static void seal_noted(int fd)
{
    if (fcntl(fd, F_GETFD) == 0 && is_of_endpoint(fd))
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

/* opendir would allocate memory, whose lock a thread of the parent may hold. */
static void for_each_descriptor(void (*act)(int fd))
{
    char names[4096] __attribute__((aligned(8)));
    const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long bytes;
    while (folder >= 0 && (bytes = syscall(SYS_getdents64, folder, names, sizeof names)) > 0) {
        for (long at = 0; at < bytes;) {
            const struct name *name = (const void *)(names + at);
            if (isdigit((unsigned char)name->text[0]))
                act(atoi(name->text));
            at += name->bytes;
        }
    }
    if (folder >= 0)
        close(folder);
}

static void fork_done_in_child(void)
{
    if (noted.count)
        for_each_descriptor(close_noted);
    noted.count = 0;
    pthread_mutex_unlock(&noted.lock);
}

/* ---- Before a fork ------------------------------------------------------------------------------------------------------- */

static int compare_entries(const void *a, const void *b)
{
    return fork_compare(&((const struct entry *)a)->address.socket, &((const struct entry *)b)->address.socket);
}

static void sort(void)
{
    if (!noted.is_sorted)
        qsort(noted.entries, noted.count, sizeof *noted.entries, compare_entries);
    noted.is_sorted = true;
}

static void fork_prepare(void)
{
    pthread_mutex_lock(&noted.lock);
    if (noted.count)
        sort();
}

static void fork_done_in_parent(void)
{
    pthread_mutex_unlock(&noted.lock);
}

static void fork_watch_all(void)
{
    pthread_atfork(fork_prepare, fork_done_in_parent, fork_done_in_child);
}

/* If memory for the entry is missing, only its sockets stay open in children. */
static void fork_append(const struct entry *entry)
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
    noted.is_sorted = false;
}

void shoal_fabric_fork_note(const void *owner, const struct shoal_fabric_address *address)
{
    struct entry entry = {.owner = owner};
    if (!shoal_reachability_read_address(address, &entry.address))
        return;
    pthread_once(&noted_once, fork_watch_all);
    pthread_mutex_lock(&noted.lock);
    fork_append(&entry);
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
    if (noted.count) {
        sort();
        for_each_descriptor(seal_noted);
    }
    pthread_mutex_unlock(&noted.lock);
}
