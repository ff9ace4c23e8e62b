/* The smallest program: every rank contributes its number, and every rank gets the sum. Run: shoal run -n 2
 * build/examples/01_hello */
#include <stdio.h>

#include <shoal/shoal.h>

int main(void)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 1; /* the reason has been logged on stderr */

    float x = (float)shoal_comm_rank(comm);
    if (shoal_allreduce(comm, &x, &x, 1, SHOAL_FLOAT32, SHOAL_SUM, NULL))
        return 1;
    printf("rank %d of %d: the sum of all ranks is %g\n", shoal_comm_rank(comm), shoal_comm_size(comm), (double)x);

    if (shoal_comm_finalize(comm))
        return 1;
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return 0;
}
