/* The program that bench/bench_launch.py starts by each launcher: joins, sums one number, and prints when the sum was done and
 * when it ends. Times are CLOCK_MONOTONIC's, which is the same on all emulated hosts. Exit code 0: the sum is right. */
#include <stdio.h>
#include <time.h>

#include <shoal/shoal.h>

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(void)
{
    struct shoal_context *context = NULL;
    struct shoal_comm *world = NULL;
    float one = 1, sum = 0;
    enum shoal_status status = shoal_context_create(NULL, &context);
    if (status == SHOAL_OK)
        status = shoal_comm_create(context, NULL, &world);
    if (status == SHOAL_OK)
        status = shoal_allreduce(world, &one, &sum, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    const double first = now_s();
    const int size = world ? shoal_comm_size(world) : 0;
    if (status == SHOAL_OK)
        status = shoal_comm_finalize(world);
    shoal_comm_free(world);
    shoal_context_destroy(context);
    printf("launch %.6f %.6f\n", first, now_s());
    return status == SHOAL_OK && (int)sum == size ? 0 : 1;
}
