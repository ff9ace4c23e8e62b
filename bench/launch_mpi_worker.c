/* Does what launch_worker.c does, but with MPI: measures how long a program of MPI takes to start under its own mpirun. */
#include <mpi.h>
#include <stdio.h>
#include <time.h>

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    float one = 1, sum = 0;
    int size = 0;
    MPI_Init(&argc, &argv);
    MPI_Allreduce(&one, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double first = now_s();
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Finalize();
    printf("launch %.6f %.6f\n", first, now_s());
    return (int)sum == size ? 0 : 1;
}
