/* Survives lost ranks: a rank kills itself in step 5, and the others continue with a smaller communicator.
 * Run: shoal run -n 4 --keep-going build/examples/08_shrink 0     (rank 0 is lost; more numbers lose more ranks) */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include <shoal/shoal.h>

enum { STEPS = 10, FATAL_STEP = 5 };

/* The state of training: `before` is x before the last step. */
struct model {
    int64_t step, x, before;
};

static enum shoal_status take_step(struct shoal_comm *comm, int64_t gradient, struct model *model)
{
    int64_t sum;
    enum shoal_status status = shoal_allreduce(comm, &gradient, &sum, 1, SHOAL_INT64, SHOAL_SUM, NULL);
    if (status)
        return status;
    model->before = model->x;
    model->x += sum;
    model->step++;
    return SHOAL_OK;
}

/* Some ranks may have done the step in which others were lost. They undo it, so that all continue with one state. */
static enum shoal_status go_back(struct shoal_comm *comm, struct model *model)
{
    int64_t least;
    enum shoal_status status = shoal_allreduce(comm, &model->step, &least, 1, SHOAL_INT64, SHOAL_MIN, NULL);
    if (status || least == model->step)
        return status;
    model->x = model->before;
    model->step = least;
    return SHOAL_OK;
}

/* Replaces a broken communicator by one of the ranks that are left. */
static enum shoal_status recover(struct shoal_comm **comm, struct model *model)
{
    struct shoal_comm *smaller;
    enum shoal_status status = shoal_comm_shrink(*comm, NULL, 0, NULL, &smaller);
    if (status)
        return status;
    printf("rank %d of %d is now rank %d of %d\n", shoal_comm_rank(*comm), shoal_comm_size(*comm), shoal_comm_rank(smaller),
           shoal_comm_size(smaller));
    shoal_comm_free(*comm);
    *comm = smaller;
    return go_back(smaller, model);
}

/* If ranks are lost while the others recover, they recover again. */
static enum shoal_status train(struct shoal_comm **comm, int is_fatal, struct model *model)
{
    const int64_t gradient = shoal_comm_rank(*comm) + 1;
    enum shoal_status status = SHOAL_OK;
    while (model->step < STEPS && (!status || status == SHOAL_ERR_PEER_LOST)) {
        if (is_fatal && model->step == FATAL_STEP)
            raise(SIGKILL);
        status = status ? recover(comm, model) : take_step(*comm, gradient, model);
    }
    return status;
}

int main(int argc, char **argv)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct model model = {0};
    int is_fatal = 0;
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return 1;
    for (int i = 1; i < argc; i++)
        is_fatal |= atoi(argv[i]) == shoal_comm_rank(comm);
    if (train(&comm, is_fatal, &model) || shoal_comm_finalize(comm))
        return 1;
    printf("%lld steps, x = %lld\n", (long long)model.step, (long long)model.x);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return 0;
}
