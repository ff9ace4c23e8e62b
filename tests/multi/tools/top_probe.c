/* A job to look at. After 100 all-reduces of 1,024 floats each rank prints "ready", and then, until a signal ends it:
 *   late      rank 1 stays out of the last all-reduce, of 1,000 floats, that the others have called
 *   busy      all-reduces of 256 KiB; rank 1 comes to each 2 ms after rank 0
 *   receive   rank 0 receives from rank 1, which sends nothing; rank 1 waits for a signal
 *   mismatch  rank 1 gives 65,535 floats, the others 65,536; then the program ends with exit code 3
 *   fork      like late, and each rank has a child that has its descriptors
 *   groups    like late, and each rank has met the other one of its half in a group of its own, and has been alone in one
 *   training  like late, and the program publishes its batch and noise scale; what is impossible it may not publish */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <shoal/shoal.h>

#include "../../free_port.h"

static float *data;

static enum shoal_status sum(struct shoal_comm *comm, size_t count)
{
    return shoal_allreduce(comm, data, data, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
}

static void wait_for_signal(void)
{
    for (;;)
        pause();
}

/* Rank 0 sends rank 1 a message on a separate communicator after it has posted, so that rank 1 comes last on any busy
 * machine. */
static int run_busy(struct shoal_comm *comm)
{
    const struct timespec nap = {0, 2000000};
    struct shoal_comm *side;
    struct shoal_request *request = NULL;
    enum shoal_status status = shoal_comm_split(comm, 0, 0, NULL, &side);
    while (status == SHOAL_OK && shoal_comm_rank(comm) == 1) {
        status = shoal_recv(side, data, 1, SHOAL_UINT8, 0, 1, NULL);
        nanosleep(&nap, NULL);
        if (status == SHOAL_OK)
            status = sum(comm, 65536);
    }
    while (status == SHOAL_OK) {
        const uint8_t token = 1;
        status = shoal_allreduce_post(comm, data, data, 65536, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request);
        if (status == SHOAL_OK && (status = shoal_send(side, &token, 1, SHOAL_UINT8, 1, 1, NULL)) == SHOAL_OK)
            status = shoal_request_wait(request, SHOAL_FOREVER);
        shoal_request_free(request);
    }
    return 3;
}

static int run(struct shoal_comm *comm, const char *mode)
{
    const int rank = shoal_comm_rank(comm);
    if (!strcmp(mode, "busy"))
        return run_busy(comm);
    if (!strcmp(mode, "mismatch"))
        return sum(comm, rank == 1 ? 65535 : 65536) == SHOAL_OK ? 0 : 3;
    if (!strcmp(mode, "fork") && fork() == 0)
        wait_for_signal();
    if (rank == 1)
        wait_for_signal();
    if (!strcmp(mode, "receive") && rank == 0)
        return shoal_recv(comm, data, 77, SHOAL_FLOAT32, 1, 5, NULL) == SHOAL_OK ? 0 : 3;
    return sum(comm, 1000) == SHOAL_OK ? 0 : 3;
}

static bool publish(struct shoal_comm *comm)
{
    struct shoal_training training = SHOAL_TRAINING_INIT, wrong = SHOAL_TRAINING_INIT;
    training.batch = 300;
    training.noise_scale = 1000;
    training.noise_error = 52.5;
    wrong.noise_scale = -1;
    return shoal_comm_publish(comm, &training) == SHOAL_OK && shoal_comm_publish(comm, &wrong) == SHOAL_ERR_ARGUMENT &&
           shoal_comm_publish(comm, NULL) == SHOAL_ERR_ARGUMENT;
}

/* As process groups of PyTorch are made: each by a call of its own, not by a split. */
static bool make_groups(struct shoal_context *context, struct shoal_comm *comm)
{
    static struct shoal_comm *half, *alone;
    const int rank = shoal_comm_rank(comm), size = shoal_comm_size(comm);
    char ports[2][16] = {"", ""}, address[64];
    if (rank < 2) {
        const int port = free_port();
        if (port < 0)
            return false;
        snprintf(ports[rank], sizeof ports[rank], "%d", port);
    }
    for (int root = 0; root < 2; root++) {
        if (shoal_broadcast(comm, ports[root], ports[root], sizeof ports[root], SHOAL_UINT8, root, NULL))
            return false;
    }
    snprintf(address, sizeof address, "127.0.0.1:%s", ports[rank % 2]);
    if (shoal_comm_create_at(context, address, rank / 2, size / 2, NULL, &half) || sum(half, 1024))
        return false;
    return shoal_comm_create_at(context, "127.0.0.1:1", 0, 1, NULL, &alone) == SHOAL_OK && sum(alone, 1024) == SHOAL_OK;
}

int main(int argc, char **argv)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    data = calloc(65536, sizeof *data);
    if (argc != 2 || !data || shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 2;
    for (int i = 0; i < 100; i++) {
        if (sum(comm, 1024) != SHOAL_OK)
            return 2;
    }
    if (!strcmp(argv[1], "groups") && !make_groups(context, comm))
        return 2;
    if (!strcmp(argv[1], "training") && !publish(comm))
        return 2;
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    const int code = run(comm, argv[1]);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return code;
}
