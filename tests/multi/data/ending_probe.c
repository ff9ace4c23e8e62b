/* Rank 1 ends in the middle of a job; rank 0 prints the failure that it gets.
 *     ending_probe HOW [USER GROUP_OF_0 GROUP_OF_1]
 * HOW is an exit code, or a '-' and a signal's number. With USER and the groups, all of them numbers, the ranks first become
 * that user, each in its group. Just before its end rank 1 runs the shell command ENDING_PROBE_COUNTS, if that is set. The exit
 * code is 0 if rank 0 learned that its peer was lost. */
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <shoal/shoal.h>

static void become(char **numbers, int rank)
{
    if (setgroups(0, NULL) != 0 || setgid((gid_t)atoi(numbers[1 + rank])) != 0 || setuid((uid_t)atoi(numbers[0])) != 0)
        exit(77);
    prctl(PR_SET_DUMPABLE, 1); /* as after an exec: setuid alone hides a process from others of its user */
}

/* The new name would confuse a careless reader of /proc/PID/stat. */
static void end(int how)
{
    const struct rlimit none = {0, 0};
    const char *counts = getenv("ENDING_PROBE_COUNTS");
    prctl(PR_SET_NAME, "a) R 1 (\n b) Z");
    setrlimit(RLIMIT_CORE, &none);
    if (counts && system(counts) != 0)
        _exit(78);
    if (how >= 0)
        _exit(how);
    signal(-how, SIG_DFL);
    raise(-how);
}

static enum shoal_status work(struct shoal_comm *comm, int how)
{
    float x = 1;
    const enum shoal_status status = shoal_allreduce(comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    if (status != SHOAL_OK)
        return status;
    if (shoal_comm_rank(comm) == 1)
        end(how);
    return shoal_barrier(comm, NULL);
}

int main(int argc, char **argv)
{
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    struct shoal_failure failure = {.struct_bytes = sizeof failure};
    const char *rank = getenv("RANK");
    if (argc > 4)
        become(argv + 2, rank ? atoi(rank) : 0);
    if (shoal_context_create(NULL, &context) != SHOAL_OK || shoal_comm_create(context, NULL, &comm) != SHOAL_OK)
        return 2;
    const enum shoal_status status = work(comm, argc > 1 ? atoi(argv[1]) : 0);
    const int is_told = status == SHOAL_ERR_PEER_LOST && shoal_last_failure(context, comm, &failure) == SHOAL_OK;
    printf("%s: %s\n", shoal_status_name(status), failure.text);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return is_told ? 0 : 1;
}
