/* `shoal top`: what its files share. Each look reads all processes on this host that may be read (top_look.c), or asks other
 * hosts for that (top_hosts.c); two looks give rates; a look says who waits for whom (top_waits.c); then it is printed
 * (top_print.c). Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_TOP_H
#define SHOAL_TOOLS_TOP_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ask.h"

enum { TOP_SIZE_MAX = 65536 }; /* ranks of a communicator that another host tells of */

/* One communicator of one process. The texts of `at` lie behind it. */
struct top_comm {
    struct shoal_watched at;
    char name[32], kind[32], algorithm[32];
    size_t process_at;
    double operations_per_s, bytes_per_s; /* since the look before; 0 at the first */
};

struct top_process {
    int pid;
    int parent;
    uint64_t job; /* its largest communicator is of that job, */
    int size;     /* and has so many ranks */
    int world_rank;
    char host[64];
    char space[96];        /* from another host: the boot and the PID namespace in which pid names the process */
    char state;            /* of /proc/PID/stat */
    uint64_t memory_bytes; /* resident */
    uint64_t shared_bytes; /* shared memory that it has reserved for Shoal */
    size_t first, count;   /* in comms */
    bool is_wanted;
};

/* One look. */
struct top_look {
    struct top_process *processes; /* by job, world rank, process */
    size_t process_count;
    struct top_comm *comms; /* by process */
    size_t comm_count;
    double at_s;
    double span_s;  /* since the look before; 0 */
    char note[400]; /* about a process that could not be read, "" */
};

/* The jobs that are asked for: those that a process belongs to or has started, those of some numbers, or all. */
struct top_target {
    int pid;          /* 0: none */
    const char *jobs; /* the first digits of their numbers, with commas between; NULL: none */
    /* The only processes to look at, as long as one of them is of the job; NULL: all. Looking at all takes a hundred times as
     * long on a machine with many. */
    const struct top_look *known;
};

/* The ranks that a communicator's oldest operation waits for. */
enum { TOP_WAITS_SHOWN = 8 };
struct top_wait {
    int ranks[TOP_WAITS_SHOWN]; /* of the communicator */
    int count;                  /* of all; 0: for none that is known */
    bool is_for_device;         /* for itself: its own operand is not ready on its device */
    bool is_elsewhere;          /* for ranks on other hosts, which ones is not known */
    double us;
};

/* A process that others wait for, and that waits for none itself. */
struct top_blame {
    size_t process_at;
    int held; /* processes here that wait for it, directly or through others */
    double us;
};

/* Other hosts to ask. A member that is NULL or 0 before top_hosts_read gets its preset there. */
struct top_hosts {
    struct ask_hosts list;
    const char *via, *shoal;
    uint64_t timeout_ms;
    char path[ASK_PATH_MAX];
};

/* Returns 0, or the exit code when one line on stderr says why there is nothing to show. */
int top_look_take(const struct top_target *target, struct top_look *look_out);
/* All jobs of this host; none is no error. Returns false: there was no memory for some. */
bool top_look_all(struct top_look *look_out);
/* Looks at other hosts; rates are theirs. A process cannot be the target. */
int top_hosts_take(const struct top_hosts *hosts, const struct top_target *target, struct top_look *look_out);
int top_hosts_read(const char *file, struct top_hosts *hosts);
/* Room for one process and one communicator more; false: no memory. */
bool top_look_grow(struct top_look *look);
/* Brings processes into their order, and says to which each communicator belongs. */
void top_look_sort(struct top_look *look);
void top_look_compare(struct top_look *look, const struct top_look *before);
void top_look_fini(struct top_look *look);

struct top_wait top_wait_of(const struct top_look *look, size_t comm_at);
/* The one that holds up most; false: none is known. */
bool top_blame_find(const struct top_look *look, struct top_blame *blame_out);

/* Messages that the process's endpoint rejected. All its communicators share it, so the newest figure is the largest. */
uint64_t top_rejected(const struct top_look *look, const struct top_process *process);

/* "stopped" */
const char *top_state_name(char state);

void top_print_table(const struct top_look *look, FILE *out);
void top_print_json(const struct top_look *look, FILE *out);
void top_print_prometheus(const struct top_look *look, FILE *out);
void top_print_lines(const struct top_look *look, FILE *out);

#endif
