/* Which cores each worker of `shoal run` and `shoal bench` may use. Each gets a share of the cores that this process may use,
 * so that the kernel cannot put two workers that wait for each other on one core. The workers' memory follows: a page lies in
 * the NUMA node of the core that first touches it.
 *
 *     2 workers, 2 sockets of 2 cores of 2 threads:   node 0: 0+4 1+5   node 1: 2+6 3+7
 *     --bind slice   worker 0: 0-1+4-5   worker 1: 2-3+6-7
 *     --bind core    worker 0: 0+4       worker 1: 2+6
 *
 * It needs libc only. For set-up; any thread. */
#ifndef SHOAL_TOOLS_BIND_H
#define SHOAL_TOOLS_BIND_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>

enum bind_mode { BIND_SLICE, BIND_CORE, BIND_NONE };

/* "slice", "core", "none", in the order of the modes; NULL ends them. */
extern const char *const bind_words[];

/* One hardware thread: the kernel calls it a CPU, the rest of these tools a core. */
struct bind_cpu {
    int id;
    int node;    /* NUMA */
    int package; /* socket */
    int core;    /* the lowest id of the hardware threads that share its physical core */
};

/* Reads what `sys` ("/sys") says of each CPU of the mask. Returns how many there are. A CPU of which it says nothing is a core
 * of its own in node 0. */
int bind_machine_read(const char *sys, const cpu_set_t *allowed, struct bind_cpu cpus_out[CPU_SETSIZE]);

/* Sorts the CPUs by node, socket and physical core, and gives each of `workers` a contiguous share; BIND_CORE: the first core
 * of that share. Threads of one physical core stay together unless workers outnumber physical cores. Shares differ by one core
 * at most. Returns false where workers outnumber CPUs; masks_out is not written then. */
bool bind_cut(struct bind_cpu *cpus, int count, enum bind_mode mode, int workers, cpu_set_t *masks_out);

/* Hands the shares out again, so that worker w gets one in NUMA node nodes[w], as far as there are any: that of its GPU. All
 * others keep their order. cpus: sorted, as bind_cut leaves them. */
void bind_turn(const struct bind_cpu *cpus, int count, int workers, const int *nodes, cpu_set_t *masks);

/* "0-3+64-67". Cut with "..." where text_out is too short. */
void bind_mask_print(const cpu_set_t *mask, char *text_out, size_t bytes);

enum { BIND_TEXT_MAX = 256 };

/* The masks of all workers. */
struct bind {
    cpu_set_t *masks;         /* [workers]; NULL: they are not bound */
    bool is_near_gpus;        /* there is a GPU for each worker */
    char text[BIND_TEXT_MAX]; /* one line about it for the user, "" where there is nothing to say */
};

/* Reads this machine and cuts it. Where it has as many GPUs as there are workers, worker w is taken to use the w-th by PCI id.
 * One worker and BIND_NONE: nothing is bound, and nothing said. */
void bind_make(struct bind *bind, enum bind_mode mode, int workers);
void bind_release(struct bind *bind);

/* Binds the calling process, a worker. False with errno set where the system refuses; it then runs where the kernel puts it. */
bool bind_apply(const struct bind *bind, int worker);

#endif
