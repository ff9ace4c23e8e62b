/* One rank of a job ruins it for all; the others report that as their own failure and exit with 1.
 *     blame_probe HOW RANK
 * HOW is mismatch (the rank makes a different call), leave (it exits with 0 too early), abort, or absent (it comes too late).
 * All ranks that notice end at the same time, so it is chance which of them exits first. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <shoal/shoal.h>

static enum shoal_status work(struct shoal_comm *comm, const char *how, int odd)
{
    static float x[1000];
    const bool is_odd = shoal_comm_rank(comm) == odd;
    const enum shoal_status status = shoal_barrier(comm, NULL);
    if (status != SHOAL_OK)
        return status;
    if (is_odd && !strcmp(how, "leave"))
        exit(0);
    if (is_odd && !strcmp(how, "abort"))
        shoal_comm_abort(comm);
    if (is_odd && !strcmp(how, "absent"))
        sleep(4);
    return shoal_allreduce(comm, x, x, is_odd && !strcmp(how, "mismatch") ? 999 : 1000, SHOAL_FLOAT32, SHOAL_SUM, NULL);
}

int main(int argc, char **argv)
{
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    if (argc < 3 || shoal_context_create(NULL, &context) != SHOAL_OK || shoal_comm_create(context, NULL, &comm) != SHOAL_OK)
        return 2;
    const enum shoal_status status = work(comm, argv[1], atoi(argv[2]));
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return status == SHOAL_OK ? 0 : 1;
}
