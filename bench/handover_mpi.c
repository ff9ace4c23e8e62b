/* MPI's side of bench_handover.py: handover_mpi BYTES TURNS, with two ranks. MPI_Send and MPI_Recv into a buffer that is used
 * again, as a program would. */
#include <mpi.h>

#include "handover.h"

static void turn_send(uint64_t *data, size_t count, uint64_t turn, struct handover *made)
{
    message_write(data, count, turn);
    made->written_ns = now_ns();
    MPI_Send(data, (int)count, MPI_UINT64_T, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(&made->there_ns, 1, MPI_UINT64_T, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    made->answered_ns = now_ns();
}

static void turn_receive(uint64_t *data, size_t count, uint64_t turn)
{
    MPI_Recv(data, (int)count, MPI_UINT64_T, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    const uint64_t there_ns = now_ns();
    message_read(data, count, turn);
    MPI_Send(&there_ns, 1, MPI_UINT64_T, 0, 1, MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    const size_t count = argc > 2 ? strtoull(argv[1], NULL, 10) / sizeof(uint64_t) : 0;
    const size_t turns = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint64_t *const data = calloc(count + 1, sizeof *data);
    struct handover *const made = calloc(turns + WARMUPS, sizeof *made);
    int rank;
    if (!turns || !data || !made)
        return 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (uint64_t turn = 0; turn < turns + WARMUPS; turn++) {
        if (rank == 0)
            turn_send(data, count, turn, &made[turn]);
        else
            turn_receive(data, count, turn);
    }
    if (rank == 0)
        handovers_print(made + WARMUPS, turns);
    MPI_Finalize();
    free(data);
    free(made);
    return 0;
}
