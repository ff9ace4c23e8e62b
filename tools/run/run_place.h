/* Finds this host's place among the hosts of a job: the number of hosts, this host's index, the meeting point of rank 0, the
 * number of workers on each host. The source is the options of `shoal run`, or the variables of the program that started it
 * here:
 *
 *     started by               variables
 *     Open MPI                 OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_SIZE; one `shoal run` for each host
 *     MPICH (Hydra)            PMI_SIZE, PMI_RANK, MPI_LOCALNRANKS; one for each host
 *     Slurm                    SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST; one for each host
 *     Kubeflow, torchrun's     PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
 *     SageMaker                SM_HOSTS, SM_CURRENT_HOST, SM_MASTER_ADDR, SM_MASTER_PORT
 *     dstack                   DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP, DSTACK_GPUS_PER_NODE
 *
 * The innermost of the first three applies: mpirun under srun is mpirun. It and the last three must agree. MASTER_ADDR and
 * MASTER_PORT override the meeting point, and options override everything. Opens nothing and calls only libc; any thread. */
#ifndef SHOAL_TOOLS_RUN_PLACE_H
#define SHOAL_TOOLS_RUN_PLACE_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>

/* Each host has at least one rank. */
enum { RUN_HOSTS_MAX = SHOAL_RANKS_MAX, RUN_MEET_MAX = 256, RUN_PLACE_ERROR_MAX = 512 };

/* The values of the options. */
struct run_place_options {
    int hosts;        /* 0: not given */
    int index;        /* -1: not given */
    int workers;      /* 0: not given */
    const char *meet; /* "host:port", "[fd77::1]:port"; NULL: not given */
};

struct run_place {
    int hosts;   /* 1: no other host; then meet and port are not set */
    int index;   /* index of this host, from 0; rank 0 is on host 0 */
    int workers; /* on each host; 0: not known, and there is only one host */
    char meet[RUN_MEET_MAX];
    int port;
};

/* Returns the value of a variable, or NULL if it is not set. */
typedef const char *run_variable_fn(void *arg, const char *name);

/* Returns true with *place_out filled, or false with one line about the error, which names the variable or option. */
bool run_place_find(const struct run_place_options *options, run_variable_fn *variable, void *arg, struct run_place *place_out,
                    char error[RUN_PLACE_ERROR_MAX]);

#endif
