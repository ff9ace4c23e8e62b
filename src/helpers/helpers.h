/* Helper threads of a rank: they run parts of jobs that another thread has posted, outside the progress engine's lock. The
 * posting thread decides the order of jobs, and it alone learns that a job has ended. So if no part reads what another part of
 * its job writes, results do not depend on the number of threads.
 *
 *     owner (progress engine, or a caller of shoal_context_run)         helpers
 *     post: function, argument, parts        -> slot ->                 claim a part, run it, count it
 *     help: claims a part itself                                        the last one counted calls `wake`
 *     has_ended: all parts are counted, the slot is free again
 *
 * Threads are made by the first post, so a rank without large operations has none. An idle helper spins for a while and then
 * sleeps; a post wakes one helper, and each helper that finds more parts wakes the next before it runs its own. Nothing here
 * takes a lock. Any thread may call any function except create, note_ranks and destroy.
 *
 * The width is the number of threads that may work at once: the owner's and width - 1 helpers. Width 1 makes no thread. */
#ifndef SHOAL_HELPERS_HELPERS_H
#define SHOAL_HELPERS_HELPERS_H

#include <sched.h>

#include "base/log.h"
#include "helpers/helpers_settings.h"

#define SHOAL_HELPERS_PARTS_MAX 65535

struct shoal_helpers;

typedef void (*shoal_helpers_fn)(void *arg, uint32_t part);

struct shoal_helpers_options {
    struct shoal_log *log;
    int threads;                  /* fixed width, 1 to SHOAL_HELPERS_MAX; 0: what the cores leave (SHOAL_THREADS=auto) */
    int framework_threads;        /* cores of the rank that a width of 0 leaves to the program; -1: all of them */
    uint64_t spin_ns;             /* how long an idle helper spins before it sleeps, if there are as many cores as threads */
    cpu_set_t cores;              /* the rank's slice, to which helpers are bound; empty: they may run anywhere */
    void (*wake)(void *wake_arg); /* called by a helper after a job's last part has ended; NULL: none */
    void *wake_arg;
};

/* Makes no thread yet. */
SHOAL_MUST_USE enum shoal_status shoal_helpers_create(const struct shoal_helpers_options *options,
                                                      struct shoal_helpers **helpers_out);
/* Ends the threads. No job may be posted. NULL is allowed. Do not call it in a forked child, which has no such threads. */
void shoal_helpers_destroy(struct shoal_helpers *helpers);

/* Records that local_ranks ranks share `cores` cores with this one (0: unknown). The smallest share recorded counts. */
void shoal_helpers_note_ranks(struct shoal_helpers *helpers, int cores, int local_ranks);

/* Returns the width: 1 or more. It becomes smaller if threads cannot be made, or if the rank's cores become fewer. */
int shoal_helpers_width(const struct shoal_helpers *helpers);
/* Returns true if the number of threads is fixed, not chosen from the cores. */
bool shoal_helpers_is_fixed(const struct shoal_helpers *helpers);
/* Limits the width to `most` (at least 1) from now on, for trials. Jobs that are posted continue. */
void shoal_helpers_limit(struct shoal_helpers *helpers, int most);

/* Posts a job of 1 to SHOAL_HELPERS_PARTS_MAX parts: run(arg, part) is called once for each, in any order, on any thread.
 * Returns its ticket, or -1 if the width is 1 or too many jobs are posted: then the caller does the work itself. The ticket is
 * valid until has_ended returns true, or stop returns. */
int shoal_helpers_post(struct shoal_helpers *helpers, shoal_helpers_fn run, void *arg, uint32_t parts);
/* Runs one part of the job. Returns false if none is left; some may not have ended. */
bool shoal_helpers_help(struct shoal_helpers *helpers, int ticket);
/* Returns true if all parts of the job have ended; what they wrote is then visible to the caller. */
bool shoal_helpers_has_ended(struct shoal_helpers *helpers, int ticket);
/* Drops the parts that have not begun, and waits until those that have begun end. Returns true if all parts have run. */
bool shoal_helpers_stop(struct shoal_helpers *helpers, int ticket);
/* Posts a job, helps, and returns when all of its parts have ended. */
void shoal_helpers_run(struct shoal_helpers *helpers, shoal_helpers_fn run, void *arg, uint32_t parts);

#endif
