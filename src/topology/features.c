#include "topology/features.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

static bool close_found(int fd)
{
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U /* Linux 6.3; Debian 12's headers are older */
#endif

int shoal_topology_memfd(const char *name)
{
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    const int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create(name, flags) : fd; /* the kernel is older than the flag */
}

static bool has_memfd(void)
{
    return close_found(shoal_topology_memfd("shoal-probe"));
}

static bool has_wipe_on_fork(void)
{
    void *page = mmap(NULL, SHOAL_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return false;
    const bool found = madvise(page, SHOAL_PAGE, MADV_WIPEONFORK) == 0;
    munmap(page, SHOAL_PAGE);
    return found;
}

/* With only the family given, the kernel chooses a free abstract name. */
static bool has_abstract_sockets(void)
{
    const struct sockaddr_un any = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    const bool found = fd >= 0 && bind(fd, (const struct sockaddr *)&any, sizeof any.sun_family) == 0;
    close_found(fd);
    return found;
}

static int open_self(void)
{
    return (int)syscall(SYS_pidfd_open, getpid(), 0);
}

static bool has_pidfd(void)
{
    return close_found(open_self());
}

/* The layout of struct pidfd_info in Linux 6.13 (include/uapi/linux/pidfd.h). Debian 12's headers are older. */
static bool has_pidfd_info(void)
{
    struct {
        uint64_t mask, cgroup;
        uint32_t ids[11];
        int32_t exit_code;
    } info = {.mask = 0};
    const int fd = open_self();
    const bool found = fd >= 0 && ioctl(fd, _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, sizeof info), &info) == 0;
    close_found(fd);
    return found;
}

static bool has_membarrier(void)
{
    const long commands = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    return commands > 0 && (commands & MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

/* Linux 5.13 is the first version that reports this to libibverbs (RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK). */
bool shoal_topology_release_copies_locked_pages(const char *release)
{
    int version, patch;
    return sscanf(release, "%d.%d", &version, &patch) == 2 && (version > 5 || (version == 5 && patch >= 13));
}

bool shoal_topology_copies_locked_pages(void)
{
    struct utsname name;
    return uname(&name) == 0 && shoal_topology_release_copies_locked_pages(name.release);
}

static const struct shoal_feature features[] = {
    {"memfd_create", has_memfd, true, "Linux 3.17", "there is no shared memory between ranks"},
    {"MADV_WIPEONFORK", has_wipe_on_fork, true, "Linux 4.14", "no context can be made"},
    {"abstract Unix sockets", has_abstract_sockets, true, "Linux 2.2", "ranks of one host cannot meet"},
    {"pidfd_open", has_pidfd, false, "Linux 5.3", "a peer's end is seen only when its socket closes"},
    {"PIDFD_GET_INFO", has_pidfd_info, false, "Linux 6.13", "how a peer ended is not always known"},
    {"membarrier", has_membarrier, false, "Linux 4.16", "each handshake costs a fence more"},
    {"fork() copies locked pages", shoal_topology_copies_locked_pages, false, "Linux 5.13",
     "registered private memory is copied before it is sent"},
};

const struct shoal_feature *shoal_feature_at(size_t index)
{
    return index < SHOAL_COUNT_OF(features) ? &features[index] : NULL;
}
