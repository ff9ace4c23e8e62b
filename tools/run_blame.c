#include "run_blame.h"

#include <stdio.h>
#include <string.h>

/* "rank 2 (process 73" gives 73; anything else 0. */
static int process_read(const char *text)
{
    int rank, pid;
    return sscanf(text, "rank %d (process %d", &rank, &pid) == 2 ? pid : 0;
}

void run_blame_hear(struct run_blame *blame, const char *line, size_t length)
{
    static const char begin[] = "shoal: rank ", broken[] = " is broken";
    char text[RUN_BLAME_TEXT_MAX + 160];
    int rank, pid;
    if (length < sizeof begin || memcmp(line, begin, sizeof begin - 1) != 0)
        return;
    snprintf(text, sizeof text, "%.*s", (int)(length < sizeof text ? length : sizeof text - 1), line);
    if (sscanf(text, "shoal: rank %d (%*[^:]:%d)", &rank, &pid) != 2)
        return;
    blame->own_pid = pid;
    const char *what = strstr(text, "[engine] communicator ");
    const char *why = what ? strstr(what, broken) : NULL;
    if (!why)
        return;
    why += sizeof broken - 1;
    blame->has_failed = true;
    blame->pid = strncmp(why, " by ", 4) == 0 ? process_read(why + 4) : strncmp(why, ": ", 2) == 0 ? process_read(why + 2) : 0;
    snprintf(blame->text, sizeof blame->text, "%s", what + sizeof "[engine]");
}

static int worker_of(const struct run_blame *blames, const pid_t *pids, int workers, int pid)
{
    for (int w = 0; w < workers; w++)
        if (pids[w] == pid || blames[w].own_pid == pid)
            return w;
    return -1;
}

int run_blame_find(const struct run_blame *blames, const pid_t *pids, int workers, int from)
{
    int at = from;
    for (int steps = 0; steps < workers && blames[at].has_failed; steps++) {
        if (!blames[at].pid)
            return -1;
        const int named = worker_of(blames, pids, workers, blames[at].pid);
        if (named < 0 || named == at)
            return at;
        at = named;
    }
    return at;
}
