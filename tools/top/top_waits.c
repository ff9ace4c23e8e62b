/* Finds the ranks that others wait for: from the ranks' own reports, or from the numbers of their newest operations. */
#include "top.h"

#include <stdlib.h>

/* Returns the communicator as another rank on this host sees it; SIZE_MAX if that rank is not here. */
static size_t comm_of_rank(const struct top_look *look, uint64_t comm, int rank)
{
    for (size_t i = 0; i < look->comm_count; i++)
        if (look->comms[i].at.comm == comm && look->comms[i].at.rank == rank && look->comms[i].process_at != SIZE_MAX)
            return i;
    return SIZE_MAX;
}

/* Adds a rank. The lowest ones are kept, in order. */
static void wait_add(struct top_wait *wait, int rank)
{
    int at = wait->count < TOP_WAITS_SHOWN ? wait->count : TOP_WAITS_SHOWN;
    wait->count++;
    for (; at > 0 && wait->ranks[at - 1] > rank; at--)
        if (at < TOP_WAITS_SHOWN)
            wait->ranks[at] = wait->ranks[at - 1];
    if (at < TOP_WAITS_SHOWN)
        wait->ranks[at] = rank;
}

/* Adds the ranks that have not called the operation yet. */
static void wait_for_missing(const struct top_look *look, const struct shoal_watched *at, struct top_wait *wait)
{
    int seen = 0;
    wait->us = at->posted_us;
    for (size_t i = 0; i < look->comm_count; i++) {
        const struct top_comm *other = &look->comms[i];
        if (other->at.comm != at->comm || other->process_at == SIZE_MAX)
            continue;
        seen++;
        if (other->at.called < at->sequence)
            wait_add(wait, other->at.rank);
    }
    wait->is_elsewhere = !wait->count && seen < at->size;
}

struct top_wait top_wait_of(const struct top_look *look, size_t comm_at)
{
    const struct shoal_watched *at = &look->comms[comm_at].at;
    struct top_wait wait = {.count = 0};
    if (at->status != SHOAL_OK || !at->under_way)
        return wait;
    if (at->is_span && at->waits_for < 0)
        return wait; /* it computes */
    if (at->is_message) {
        wait.us = at->posted_us;
        if (at->root >= 0)
            wait_add(&wait, at->root);
    } else if (at->waits_for >= 0) {
        wait.us = at->waits_us;
        wait_add(&wait, at->waits_for);
        wait.is_for_device = at->waits_for == at->rank;
    } else if (at->arrived_us < 0) {
        wait_for_missing(look, at, &wait);
    }
    return wait;
}

static bool is_in_span(const struct top_look *look, const struct top_process *process)
{
    bool is_found = false;
    for (size_t i = process->first; i < process->first + process->count; i++)
        is_found |= look->comms[i].at.is_span && look->comms[i].at.under_way;
    return is_found;
}

/* Returns the process of the first rank that a communicator of this process waits for; SIZE_MAX if it is not here. A process
 * in a span waits for what its span waits for: it has posted its other operations ahead of time. */
static size_t next_of(const struct top_look *look, size_t process_at, double *us_out)
{
    const struct top_process *process = &look->processes[process_at];
    const bool has_span = is_in_span(look, process);
    for (size_t i = process->first; i < process->first + process->count; i++) {
        if (has_span && !look->comms[i].at.is_span)
            continue;
        const struct top_wait wait = top_wait_of(look, i);
        const size_t other = wait.count ? comm_of_rank(look, look->comms[i].at.comm, wait.ranks[0]) : SIZE_MAX;
        *us_out = wait.us;
        if (other != SIZE_MAX && look->comms[other].process_at != process_at)
            return look->comms[other].process_at;
    }
    return SIZE_MAX;
}

/* Returns the process at the end of the chain of waits; SIZE_MAX if the process waits for none here, or the chain is a
 * circle. */
static size_t end_of(const struct top_look *look, size_t process_at, double *us_out)
{
    double us;
    size_t at = next_of(look, process_at, us_out), end = SIZE_MAX;
    for (size_t steps = 0; at != SIZE_MAX && steps <= look->process_count; steps++) {
        end = at;
        at = next_of(look, at, &us);
    }
    return at == SIZE_MAX ? end : SIZE_MAX;
}

bool top_blame_find(const struct top_look *look, struct top_blame *blame_out)
{
    struct top_blame *blames = calloc(look->process_count, sizeof *blames);
    *blame_out = (struct top_blame){.held = 0};
    for (size_t i = 0; i < look->process_count && blames; i++) {
        double us;
        const size_t end = end_of(look, i, &us);
        if (end == SIZE_MAX)
            continue;
        blames[end].process_at = end;
        blames[end].held++;
        blames[end].us = us > blames[end].us ? us : blames[end].us;
        if (blames[end].held > blame_out->held)
            *blame_out = blames[end];
    }
    free(blames);
    return blame_out->held > 0;
}
