/* The cores of each worker of `shoal run` and `shoal bench`. Each worker gets a share of the cores that this process may use,
 * so that the kernel cannot put two workers that wait for each other on one core. The workers' memory follows, because a page
 * is in the NUMA node of the core that first touches it.
 *
 *     2 workers, 2 sockets of 2 cores of 2 threads:   node 0: 0+4 1+5   node 1: 2+6 3+7
 *     --bind slice   worker 0: 0-1+4-5   worker 1: 2-3+6-7
 *     --bind core    worker 0: 0+4       worker 1: 2+6
 *
 * Needs only libc. For set-up; any thread. */
#ifndef SHOAL_TOOLS_BIND_H
#define SHOAL_TOOLS_BIND_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>

enum bind_mode { BIND_SLICE, BIND_CORE, BIND_NONE };

/* "slice", "core", "none", in the order of the modes; NULL ends them. */
extern const char *const bind_words[];

/* One hardware thread. The kernel calls it a CPU; the other tools call it a core. */
struct bind_cpu {
    int id;
    int node;    /* NUMA node */
    int package; /* socket */
    int core;    /* the lowest id of the hardware threads that share its physical core */
};

/* Reads the node, socket and core of each CPU of the mask from `sys` ("/sys"). Returns the number of CPUs. A CPU without an
 * entry there is its own core in node 0. */
int bind_machine_read(const char *sys, const cpu_set_t *allowed, struct bind_cpu cpus_out[CPU_SETSIZE]);

/* Sorts the CPUs by node, socket and physical core, and assigns each of `workers` a contiguous share; with BIND_CORE, the first
 * core of that share. Threads of one physical core stay together unless workers outnumber physical cores. Shares differ by at
 * most one core. Returns false if workers outnumber CPUs; masks_out is then not written. */
bool bind_cut(struct bind_cpu *cpus, int count, enum bind_mode mode, int workers, cpu_set_t *masks_out);

/* Reorders the shares so that worker w gets one in NUMA node nodes[w], the node of its GPU, as far as there are any. All others
 * keep their order. cpus must be sorted, as bind_cut leaves them. */
void bind_turn(const struct bind_cpu *cpus, int count, int workers, const int *nodes, cpu_set_t *masks);

/* Prints the mask: "0-3+64-67". Cut with "..." if text_out is too short. */
void bind_mask_print(const cpu_set_t *mask, char *text_out, size_t bytes);

enum { BIND_TEXT_MAX = 256 };

/* The masks of all workers. */
struct bind {
    cpu_set_t *masks;         /* [workers]; NULL: they are not bound */
    bool is_near_gpus;        /* each worker has a GPU */
    char text[BIND_TEXT_MAX]; /* one line about it for the user; "": none */
};

/* Reads this machine and computes the masks. If it has as many GPUs as workers, worker w is assumed to use the w-th by PCI id.
 * With one worker, or with BIND_NONE, binds nothing and prints nothing. */
void bind_make(struct bind *bind, enum bind_mode mode, int workers);
void bind_release(struct bind *bind);

/* Binds the calling process, a worker. Returns false with errno set if the system refuses; the kernel then chooses its
 * cores. */
bool bind_apply(const struct bind *bind, int worker);

#endif
