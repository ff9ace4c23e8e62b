/* Groups and messages: even and odd ranks form two groups, and each group sums. Then each rank of the whole job sends its
 * number to the right and receives from the left, round the ring. Run: shoal run -n 3 build/examples/03_groups */
#include <stdio.h>

#include <shoal/shoal.h>

/* Sums the world ranks of this rank's group. */
static enum shoal_status sum_in_group(struct shoal_comm *world)
{
    int rank = shoal_comm_rank(world);
    struct shoal_comm *group;
    enum shoal_status status = shoal_comm_split(world, rank % 2, rank, NULL, &group);
    if (status)
        return status;

    int64_t sum = rank;
    status = shoal_allreduce(group, &sum, &sum, 1, SHOAL_INT64, SHOAL_SUM, NULL);
    if (!status)
        printf("rank %d: member %d of %d in the %s group, whose ranks sum to %lld\n", rank, shoal_comm_rank(group),
               shoal_comm_size(group), rank % 2 ? "odd" : "even", (long long)sum);
    shoal_comm_free(group);
    return status;
}

/* The receive is posted before the send, so that the ring works for messages of any size. */
static enum shoal_status pass_to_right(struct shoal_comm *world)
{
    int rank = shoal_comm_rank(world);
    int size = shoal_comm_size(world);
    if (size == 1) {
        printf("rank 0: alone, so nobody to send to\n"); /* a rank may not send to itself */
        return SHOAL_OK;
    }

    int64_t mine = rank;
    int64_t received = -1;
    struct shoal_request *request;
    enum shoal_status status = shoal_recv_post(world, &received, 1, SHOAL_INT64, (rank + size - 1) % size, 0, NULL, &request);
    if (status)
        return status;
    status = shoal_send(world, &mine, 1, SHOAL_INT64, (rank + 1) % size, 0, NULL);
    if (!status)
        status = shoal_request_wait(request, SHOAL_FOREVER);
    if (!status)
        printf("rank %d: received %lld from the left\n", rank, (long long)received);
    shoal_request_free(request);
    return status;
}

int main(void)
{
    struct shoal_context *context;
    struct shoal_comm *world;
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &world))
        return 1;
    if (sum_in_group(world) || pass_to_right(world))
        return 1;
    if (shoal_comm_finalize(world))
        return 1;
    shoal_comm_free(world);
    shoal_context_destroy(context);
    return 0;
}
