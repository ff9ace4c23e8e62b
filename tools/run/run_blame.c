#include "run_blame.h"

#include <stdio.h>
#include <string.h>

enum { RUN_BLAME_HOST_MAX = 256 };

/* Reads "rank 2 (process 73 on host" or "rank 2 (process 73)". Any other text blames nobody. */
static void blame_read(struct run_blame *blame, const char *text, bool is_world, const char *own_host)
{
    char host[RUN_BLAME_HOST_MAX] = "";
    int rank, pid;
    if (sscanf(text, "rank %d (process %d on %255[^ ,)]", &rank, &pid, host) < 2)
        return;
    blame->pid = pid;
    blame->rank = is_world ? rank : -1;
    blame->is_elsewhere = *host && strcmp(host, own_host) != 0;
}

/* Communicators whose ranks are those of the world: torch.0 is PyTorch's group of all. */
static bool has_all_ranks(const char *what)
{
    static const char *const begins[] = {"[engine] communicator world is", "[engine] communicator torch.0 is"};
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++)
        if (strncmp(what, begins[i], strlen(begins[i])) == 0)
            return true;
    return false;
}

void run_blame_hear(struct run_blame *blame, const char *line, size_t length)
{
    static const char begin[] = "shoal: rank ", broken[] = " is broken";
    char text[RUN_BLAME_TEXT_MAX + 160];
    char host[RUN_BLAME_HOST_MAX];
    int rank, pid;
    if (length < sizeof begin || memcmp(line, begin, sizeof begin - 1) != 0)
        return;
    snprintf(text, sizeof text, "%.*s", (int)(length < sizeof text ? length : sizeof text - 1), line);
    if (sscanf(text, "shoal: rank %d (%255[^:]:%d)", &rank, host, &pid) != 3)
        return;
    blame->own_pid = pid;
    const char *what = strstr(text, "[engine] communicator ");
    const char *why = what ? strstr(what, broken) : NULL;
    if (!why)
        return;
    why += sizeof broken - 1;
    const bool is_world = has_all_ranks(what);
    blame->has_failed = true;
    blame->pid = 0;
    blame->rank = -1;
    blame->is_elsewhere = false;
    if (strncmp(why, " by ", 4) == 0 || strncmp(why, ": ", 2) == 0)
        blame_read(blame, why + (*why == ' ' ? 4 : 2), is_world, host);
    snprintf(blame->text, sizeof blame->text, "%s", what + sizeof "[engine]");
}

const char *run_blame_cause(const struct run_blame *blame)
{
    const char *broken = strstr(blame->text, " is broken"), *cause = broken ? strstr(broken, ": ") : NULL;
    return cause ? cause + 2 : "";
}

static int worker_of(const struct run_blame *blames, const pid_t *pids, int workers, int pid)
{
    for (int w = 0; w < workers; w++)
        if (pids[w] == pid || blames[w].own_pid == pid)
            return w;
    return -1;
}

/* With several hosts. The rank is more reliable than the process. */
static bool is_elsewhere(const struct run_blame *blame, int workers, int first_rank)
{
    if (first_rank < 0)
        return false;
    return blame->is_elsewhere || (blame->rank >= 0 && (blame->rank < first_rank || blame->rank >= first_rank + workers));
}

int run_blame_find(const struct run_blame *blames, const pid_t *pids, int workers, int first_rank, int from)
{
    int at = from;
    for (int steps = 0; steps < workers && blames[at].has_failed; steps++) {
        if (!blames[at].pid)
            return RUN_BLAME_NOBODY;
        if (is_elsewhere(&blames[at], workers, first_rank))
            return RUN_BLAME_ELSEWHERE;
        const int named = worker_of(blames, pids, workers, blames[at].pid);
        if (named < 0 || named == at)
            return at;
        at = named;
    }
    return at;
}
