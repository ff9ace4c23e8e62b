/* Where this host stands among the hosts of a job: how many there are, which one this is, where rank 0 is met, how many workers
 * each host starts. The options of `shoal run` say it, or the variables of what started it here:
 *
 *     what started it          variables
 *     Open MPI                 OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_SIZE; one `shoal run` for each host
 *     MPICH (Hydra)            PMI_SIZE, PMI_RANK, MPI_LOCALNRANKS; the same
 *     Slurm                    SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST; the same
 *     Kubeflow, torchrun's     PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
 *     SageMaker                SM_HOSTS, SM_CURRENT_HOST, SM_MASTER_ADDR, SM_MASTER_PORT
 *     dstack                   DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP, DSTACK_GPUS_PER_NODE
 *
 * Of the first three the innermost counts: mpirun under srun is mpirun. It and the last three must agree. MASTER_ADDR and
 * MASTER_PORT say the meeting point instead, and options come before all. It opens nothing and calls libc only; any thread. */
#ifndef SHOAL_TOOLS_RUN_PLACE_H
#define SHOAL_TOOLS_RUN_PLACE_H

#include <shoal/shoal.h>
#include <stdbool.h>
#include <stddef.h>

/* Each host has a rank at least. */
enum { RUN_HOSTS_MAX = SHOAL_RANKS_MAX, RUN_MEET_MAX = 256, RUN_PLACE_ERROR_MAX = 512 };

/* The values of the options. */
struct run_place_options {
    int hosts;        /* 0: not given */
    int index;        /* -1: not given */
    int workers;      /* 0: not given */
    const char *meet; /* "host:port", "[fd77::1]:port"; NULL: not given */
};

struct run_place {
    int hosts;   /* 1: no other host, and meet and port are not set */
    int index;   /* of this host, from 0; rank 0 is on host 0 */
    int workers; /* on each host; 0: nothing says, and there is one host only */
    char meet[RUN_MEET_MAX];
    int port;
};

/* Returns the value of a variable; NULL where it is not set. */
typedef const char *run_variable_fn(void *arg, const char *name);

/* Returns true with *place_out filled, or false with one line about what is wrong, which names the variable or option. */
bool run_place_find(const struct run_place_options *options, run_variable_fn *variable, void *arg, struct run_place *place_out,
                    char error[RUN_PLACE_ERROR_MAX]);

#endif
