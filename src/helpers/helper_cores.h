/* How many cores a rank's helpers may use, and which. Reads kernel files: call it at set-up, and then at most once a second. */
#ifndef SHOAL_HELPERS_HELPER_CORES_H
#define SHOAL_HELPERS_HELPER_CORES_H

#include <sched.h>

#include "base/compiler.h"

/* A rank's part of the cores of its host. */
struct shoal_helper_share {
    int cores;             /* that the rank may use, after the container's quota: 1 or more */
    int framework_threads; /* cores that stay with the program; -1: all of them */
};

/* Exists on machines, and in containers, with a GPU of NVIDIA's. */
#define SHOAL_HELPER_GPU_FILE "/dev/nvidiactl"

/* Returns how many cores the program's own threads need: `omp_threads`, the value of OMP_NUM_THREADS, if it is a number.
 * Without it (NULL) an OpenMP program uses all of its cores: the result is -1, unless `gpu_file` exists. Then the program
 * computes on a GPU, and its main thread needs one core. */
int shoal_helper_cores_of_framework(const char *omp_threads, const char *gpu_file);

/* Returns how many of `allowed` cores the rank may use if local_ranks ranks share `together` cores (0: unknown) and the
 * container's quota. */
int shoal_helper_cores_count(int allowed, int together, int local_ranks);

/* Returns the width of a rank whose number of threads is not fixed: 1 to SHOAL_HELPERS_MAX. */
int shoal_helper_cores_width(struct shoal_helper_share share);

/* Narrows a set of cores that spans several NUMA nodes to those of the calling thread's node, if that node has at least `least`
 * of them. `sys` is the directory in which sysfs is mounted. */
void shoal_helper_cores_stay_near(const char *sys, int least, cpu_set_t *cores);

/* Parses a list of cores as the kernel prints it, "0-23,48-71". Returns false if it is not such a list. */
SHOAL_MUST_USE bool shoal_helper_cores_parse(const char *text, cpu_set_t *cores_out);

#endif
