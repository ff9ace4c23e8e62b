/* Shared by the files of `shoal top`. Each look reads all readable processes on this host (top_look.c), or runs the same
 * command on other hosts (top_hosts.c). Two looks make rates. top_waits.c finds which ranks wait for which, and top_print.c
 * prints the look. Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_TOP_H
#define SHOAL_TOOLS_TOP_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ask.h"

enum { TOP_SIZE_MAX = 65536 }; /* most ranks of a communicator that another host reports */

/* One communicator of one process. The texts of `at` are stored after it. */
struct top_comm {
    struct shoal_watched at;
    char name[32], kind[32], algorithm[32];
    size_t process_at;
    double operations_per_s, bytes_per_s; /* since the previous look; 0 at the first */
};

struct top_process {
    int pid;
    int parent;
    uint64_t job; /* job of its largest communicator, */
    int size;     /* and that one's number of ranks */
    int world_rank;
    char host[64];
    char space[96];        /* from another host: the boot and the PID namespace in which pid names the process */
    char state;            /* from /proc/PID/stat */
    uint64_t memory_bytes; /* resident */
    uint64_t shared_bytes; /* shared memory that it has allocated for Shoal */
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
    double span_s;  /* since the previous look; 0: none */
    char note[400]; /* about a process that could not be read; "": none */
};

/* The jobs to show: those that a process belongs to or has started, those with some numbers, or all. */
struct top_target {
    int pid;          /* 0: none */
    const char *jobs; /* the first digits of their numbers, with commas between; NULL: none */
    /* The only processes to look at, as long as one of them belongs to the job; NULL: all. Looking at all costs a hundred times
     * as much on a machine with many. */
    const struct top_look *known;
};

/* The ranks that a communicator's oldest operation waits for. */
enum { TOP_WAITS_SHOWN = 8 };
struct top_wait {
    int ranks[TOP_WAITS_SHOWN]; /* of the communicator */
    int count;                  /* number of all; 0: none known */
    bool is_for_device;         /* it waits for itself: its own operand is not ready on its device */
    bool is_elsewhere;          /* it waits for ranks on other hosts, which are not known */
    double us;
};

/* A process that others wait for and that waits for none itself. */
struct top_blame {
    size_t process_at;
    int held; /* processes here that wait for it, directly or through others */
    double us;
};

/* Other hosts. A member that is NULL or 0 before top_hosts_read gets its default there. */
struct top_hosts {
    struct ask_hosts list;
    const char *via, *shoal;
    uint64_t timeout_ms;
    char path[ASK_PATH_MAX];
};

/* Looks at this host. Returns 0, or the exit code after one line on stderr with the reason why there is nothing to show. */
int top_look_take(const struct top_target *target, struct top_look *look_out);
/* Looks at all jobs of this host; finding none is not an error. Returns false if out of memory for some. */
bool top_look_all(struct top_look *look_out);
/* Looks at other hosts, which compute the rates. A process cannot be the target. */
int top_hosts_take(const struct top_hosts *hosts, const struct top_target *target, struct top_look *look_out);
int top_hosts_read(const char *file, struct top_hosts *hosts);
/* Makes room for one process and one communicator. Returns false if out of memory. */
bool top_look_grow(struct top_look *look);
/* Sorts processes, and sets each communicator's process. */
void top_look_sort(struct top_look *look);
void top_look_compare(struct top_look *look, const struct top_look *before);
void top_look_fini(struct top_look *look);

struct top_wait top_wait_of(const struct top_look *look, size_t comm_at);
/* Finds the process that delays the most others. Returns false if none is known. */
bool top_blame_find(const struct top_look *look, struct top_blame *blame_out);

/* Returns the number of messages that the process's endpoint rejected. All its communicators share it, so the newest figure is
 * the largest. */
uint64_t top_rejected(const struct top_look *look, const struct top_process *process);

/* Returns the name of a state, such as "stopped". */
const char *top_state_name(char state);

/* On fewer than 130 columns each rank has two lines, so that what it does is on the screen. */
void top_print_table(const struct top_look *look, int columns, FILE *out);
void top_print_json(const struct top_look *look, FILE *out);
void top_print_prometheus(const struct top_look *look, FILE *out);
void top_print_lines(const struct top_look *look, FILE *out);

#endif
