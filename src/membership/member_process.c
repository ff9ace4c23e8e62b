#include "membership/member_process.h"

#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/process.h"
#include "topology/limits.h"

/* How long to wait to learn how a process ended: if /proc hides this, the pidfd shows it once the parent has collected the
 * process. */
#define REAP_NS (150 * SHOAL_NS_PER_MS)

/* Returns the process's number in /proc here, which may differ from the number that it knows itself. Returns 0 if it is not
 * visible. */
static int number_here(const struct shoal_membership_process *process)
{
    struct ucred owner;
    socklen_t length = sizeof owner;
    if (process->is_own)
        return (int)getpid();
    if (process->pidfd >= 0)
        return shoal_process_number(process->pidfd);
    return getsockopt(process->socket, SOL_SOCKET, SO_PEERCRED, &owner, &length) == 0 ? owner.pid : 0;
}

static bool process_is_over(const struct shoal_membership_process *process)
{
    struct pollfd entry = {process->pidfd, POLLIN, 0};
    if (process->pidfd >= 0)
        return poll(&entry, 1, 0) == 1;
    /* Without a pidfd, the end of the connection shows it. A forked child of the peer that holds the connection open delays
     * this. */
    entry = (struct pollfd){process->socket, POLLRDHUP, 0};
    return process->socket >= 0 && poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

/* PIDFD_GET_INFO of Linux 6.13, PIDFD_INFO_EXIT of 6.15 (include/uapi/linux/pidfd.h there); Debian 12's headers are older. */
struct pidfd_info {
    uint64_t mask;
    uint64_t cgroup;
    uint32_t ids[11];
    int32_t exit_code;
};
#define PIDFD_GET_INFO_REQUEST _IOWR(0xFF, 11, struct pidfd_info)
#define PIDFD_INFO_EXIT_BIT (UINT64_C(1) << 3)

/* The kernel requires the same permission to read this link as to read an exit code. Without it, the code reads as 0. */
static bool may_read_exit_code(int pid)
{
    char path[64], target[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    return readlink(path, target, sizeof target) > 0;
}

/* Until the parent has collected the process, /proc has its exit code. Afterwards the pidfd has it, if the kernel is new
 * enough. The number belongs to no other process as long as the pidfd names it. */
static bool read_uncollected(int pidfd, int *exit_code_out)
{
    const int pid = shoal_process_number(pidfd);
    return pid && shoal_process_read_stat(pid, exit_code_out) == 'Z' && (*exit_code_out != 0 || may_read_exit_code(pid)) &&
           shoal_process_number(pidfd) == pid;
}

static bool read_collected(int pidfd, int *exit_code_out)
{
    struct pidfd_info info = {.mask = PIDFD_INFO_EXIT_BIT};
    if (pidfd < 0 || ioctl(pidfd, PIDFD_GET_INFO_REQUEST, &info) != 0 || !(info.mask & PIDFD_INFO_EXIT_BIT))
        return false;
    *exit_code_out = info.exit_code;
    return true;
}

/* Writes "was killed by signal 9 (Killed)" or "exited with code 3". Returns false if the kernel does not report this now; the
 * text then has the reason. */
static bool process_read_end(int pidfd, char *text, size_t bytes)
{
    int code;
    if (!read_uncollected(pidfd, &code) && !read_collected(pidfd, &code)) {
        snprintf(text, bytes, "%s",
                 shoal_process_number(pidfd) ? "ended (its launcher has not collected it, so the reason is not known)"
                                             : "ended (the kernel does not report how)");
        return false;
    }
    if (WIFSIGNALED(code))
        snprintf(text, bytes, "was killed by signal %d (%s)", WTERMSIG(code), strsignal(WTERMSIG(code)));
    else
        snprintf(text, bytes, "exited with code %d", WEXITSTATUS(code));
    return true;
}

static void add_memory(const struct shoal_membership_process *process, char *how, size_t bytes)
{
    const size_t used = strlen(how);
    if (strstr(how, "by signal 9 ") && shoal_topology_oom_kills() > process->oom_kills)
        snprintf(how + used, bytes - used, ", probably for lack of memory (the kernel's oom_kill counter rose)");
}

bool shoal_membership_process_has_ended(struct shoal_membership_process *process)
{
    if (process->is_own)
        return false;
    if (process->ended[0])
        return true;
    if (!process_is_over(process))
        return false;
    const uint64_t now_ns = shoal_clock_ns();
    if (!process->ended_ns)
        process->ended_ns = now_ns;
    char how[sizeof process->ended];
    if (!process_read_end(process->pidfd, how, sizeof how) && now_ns - process->ended_ns < REAP_NS)
        return false; /* asked again soon; the result is reported only then */
    add_memory(process, how, sizeof how);
    memcpy(process->ended, how, sizeof how);
    return true;
}

void shoal_membership_process_describe(const struct shoal_membership_process *process, char *text, size_t bytes)
{
    int exit_code;
    char number[40] = "";
    const int pid = number_here(process);
    const char letter = pid ? shoal_process_read_stat(pid, &exit_code) : '?';
    if (pid && pid != process->pid) /* the process is in another PID namespace */
        snprintf(number, sizeof number, "process %d here, ", pid);
    snprintf(text, bytes, "%s%s", number,
             letter == 'T' || letter == 't' ? "stopped by a signal; `kill -CONT` continues it"
             : letter == 'Z'                ? "ended, not yet reaped"
             : letter == 'D'                ? "blocked in the kernel (I/O)"
             : letter != '?'                ? "alive"
             : pid                          ? "not visible from here"
                                            : "not visible from here: it is in another PID namespace, or has ended");
}
