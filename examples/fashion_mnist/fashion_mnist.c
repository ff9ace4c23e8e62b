/* Trains a network on Fashion-MNIST with any number of workers: each takes its share of every batch, Shoal adds up the
 * gradients, and all end with identical bits. Run: shoal run -n 2 build/examples/fashion_mnist (--help lists the options).
 *
 * This file is the run from start to end. trainer.c is a worker's share of the work, and stepper.h shows three ways to step
 * the parameters.
 */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "progress_bar.h"
#include "trainer.h"

#define LR_FALL_PER_EPOCH 0.85f

struct run {
    struct train_options options;
    struct trainer trainer;
    struct fault fault;
    struct checkpoint_header state; /* what makes two runs alike, and how far this one is */
    FILE *loss_csv;                 /* rank 0, if requested */
};

static int open_loss_csv(struct run *run)
{
    if (!run->options.loss_csv)
        return 0;
    run->loss_csv = fopen(run->options.loss_csv, "w");
    if (!run->loss_csv)
        return fault_set(&run->fault, EXIT_FAILED, "cannot write %s: %s; pass another --loss-csv FILE", run->options.loss_csv,
                         strerror(errno));
    fputs("step,loss\n", run->loss_csv);
    return 0;
}

static int close_loss_csv(struct run *run)
{
    if (!run->loss_csv)
        return 0;
    int failed = ferror(run->loss_csv);
    failed |= fclose(run->loss_csv);
    run->loss_csv = NULL;
    if (failed)
        return fault_set(&run->fault, EXIT_FAILED, "cannot write all of %s: %s", run->options.loss_csv, strerror(errno));
    return 0;
}

/* Prepares this worker for training. Rank 0 makes or reads the first parameters; the others receive them later. */
static int prepare(struct run *run, struct shoal_context *context, struct shoal_comm *comm)
{
    struct trainer *trainer = &run->trainer;
    openblas_set_num_threads(run->options.threads); /* workers share the cores, so each uses one thread unless the user chose
                                                     * more */
    if (trainer_init(trainer, context, comm, &run->options, &run->fault))
        return -1;
    run->state = checkpoint_header_make(&trainer->network, &run->options, trainer->train.count);
    if (trainer->rank != 0)
        return 0;
    network_draw(&trainer->network, run->options.seed);
    if (run->options.resume) {
        struct checkpoint_header expected = run->state;
        if (checkpoint_read(run->options.resume, &expected, &trainer->network, &run->state, &run->fault))
            return -1;
    }
    return open_loss_csv(run);
}

/* Checks that all workers have the same options and data: otherwise they would train different networks unnoticed. */
static int expect_alike(struct run *run)
{
    struct checkpoint_header alike = run->state;
    alike.step = 0;
    alike.epochs_done = 0;
    alike.hash = 0;
    uint64_t hash = hash_bytes(HASH_START, &alike, sizeof(alike));
    hash = hash_bytes(hash, &run->trainer.test.count, sizeof(run->trainer.test.count));
    hash = hash_bytes(hash, &run->options.epochs, sizeof(run->options.epochs));
    hash = hash_bytes(hash, &run->options.lr, sizeof(run->options.lr));
    bool alike_everywhere;
    if (trainer_is_identical(&run->trainer, hash, &alike_everywhere))
        return EXIT_FAILED;
    if (!alike_everywhere)
        fault_set(&run->fault, EXIT_FAILED, "the workers were started with different options or data; start all with the same");
    return fault_agree(&run->fault, run->trainer.comm);
}

static int share_state(struct run *run)
{
    int64_t progress[2] = {run->state.epochs_done, (int64_t)run->state.step};
    if (trainer_share_state(&run->trainer) || shoal_broadcast(run->trainer.comm, progress, progress, 2, SHOAL_INT64, 0, NULL))
        return EXIT_FAILED;
    run->state.epochs_done = (int32_t)progress[0];
    run->state.step = (uint64_t)progress[1];
    return 0;
}

static void print_start(const struct run *run)
{
    const struct network *network = &run->trainer.network;
    printf("fashion_mnist: %u training and %u test images, %d worker%s, batch %u, layers ", run->trainer.train.count,
           run->trainer.test.count, run->trainer.size, run->trainer.size == 1 ? "" : "s", run->options.batch);
    for (int l = 0; l <= network->layers; l++)
        printf("%s%d", l ? "-" : "", network->width[l]);
    printf(", %zu parameters\n", network_parameter_count(network));
    if (run->state.epochs_done)
        printf("going on from %s, after epoch %d\n", run->options.resume, run->state.epochs_done);
    fflush(stdout);
}

/* Runs the steps of one epoch. A loss that is not a number is the same on all workers, so all of them stop. */
static int run_steps(struct run *run, struct progress_bar *bar)
{
    struct trainer *trainer = &run->trainer;
    uint32_t images = trainer->train.count;
    float lr = run->options.lr * powf(LR_FALL_PER_EPOCH, (float)run->state.epochs_done);
    image_order_shuffle(trainer->order, images, run->options.seed, run->state.epochs_done);
    for (uint32_t at = 0; at < images;) {
        uint32_t batch = images - at < run->options.batch ? images - at : run->options.batch;
        float loss;
        if (trainer_step(trainer, trainer->order + at, batch, lr, &loss))
            return EXIT_FAILED;
        at += batch;
        run->state.step++;
        if (!isfinite(loss)) {
            fault_set(&run->fault, EXIT_FAILED, "the loss of step %llu is no number any more; use a smaller --lr than %g",
                      (unsigned long long)run->state.step, (double)run->options.lr);
            return fault_agree(&run->fault, trainer->comm);
        }
        if (run->loss_csv)
            fprintf(run->loss_csv, "%llu,%.9g\n", (unsigned long long)run->state.step, (double)loss);
        if (trainer->rank == 0)
            progress_bar_step(bar, batch, loss);
    }
    return 0;
}

static int run_epoch(struct run *run, double *accuracy_percent_out)
{
    struct trainer *trainer = &run->trainer;
    struct progress_bar bar;
    progress_bar_init(&bar, run->state.epochs_done + 1, run->options.epochs, trainer->train.count);
    int code = run_steps(run, &bar);
    if (code)
        return code;
    if (trainer_evaluate(trainer, accuracy_percent_out))
        return EXIT_FAILED;
    run->state.epochs_done++;
    if (trainer_collect_state(trainer))
        return EXIT_FAILED;
    if (trainer->rank == 0) {
        progress_bar_finish(&bar, *accuracy_percent_out);
        if (run->options.checkpoint)
            checkpoint_write(run->options.checkpoint, &run->state, &trainer->network, &run->fault);
    }
    return fault_agree(&run->fault, trainer->comm);
}

static void print_costs(const struct step_costs *costs)
{
    const double steps = (double)costs->steps;
    if (costs->steps == 0) /* a resumed run may have no steps left, and steps with --shard are not measured */
        return;
    printf("a step of worker 0: %.3f ms; sums run beside %.3f ms of the backward pass, it waits %.3f ms for them, and sends "
           "%.4f MB to other hosts\n",
           costs->step_us / steps / 1e3, costs->beside_us / steps / 1e3, costs->waiting_us / steps / 1e3,
           (double)costs->network_bytes / steps / 1e6);
}

static int expect_identical_bits(struct run *run)
{
    const struct network *network = &run->trainer.network;
    uint64_t hash = hash_bytes(HASH_START, network->parameters, network_parameter_count(network) * sizeof(float));
    bool identical;
    if (trainer_is_identical(&run->trainer, hash, &identical))
        return EXIT_FAILED;
    if (!identical)
        fault_set(&run->fault, EXIT_FAILED, "the workers ended with different parameters; please report it");
    else if (run->trainer.rank == 0)
        printf("identical bits on %d of %d workers, hash %016llx\n", run->trainer.size, run->trainer.size,
               (unsigned long long)hash);
    return fault_agree(&run->fault, run->trainer.comm);
}

static int train(struct run *run)
{
    double begun_s = clock_seconds();
    double accuracy_percent = 0;
    int first = run->state.epochs_done;
    while (run->state.epochs_done < run->options.epochs) {
        int code = run_epoch(run, &accuracy_percent);
        if (code)
            return code;
    }
    bool has_accuracy = run->state.epochs_done > first; /* a resumed run may have no epochs left */
    if (!has_accuracy && trainer_evaluate(&run->trainer, &accuracy_percent))
        return EXIT_FAILED;
    if (run->trainer.rank == 0) {
        printf("test accuracy %.2f %% after %d epochs, %.1f s\n", accuracy_percent, run->state.epochs_done,
               clock_seconds() - begun_s);
        print_costs(&run->trainer.stepper.costs);
    }
    return expect_identical_bits(run);
}

/* Every worker leaves this function with the same exit code, unless Shoal itself failed. */
static int run_all(struct run *run, int argc, char **argv, struct shoal_context *context, struct shoal_comm *comm)
{
    train_options_parse(argc, argv, &run->options, &run->fault);
    int code = fault_agree(&run->fault, comm);
    if (code)
        return code;
    if (run->options.help) {
        if (shoal_comm_rank(comm) == 0)
            train_options_print_help(stdout);
        return 0;
    }
    prepare(run, context, comm);
    if ((code = fault_agree(&run->fault, comm)) || (code = expect_alike(run)) || (code = share_state(run)))
        return code;
    if (run->trainer.rank == 0)
        print_start(run);
    code = train(run);
    if (code)
        return code;
    close_loss_csv(run);
    return fault_agree(&run->fault, comm);
}

int main(int argc, char **argv)
{
    struct shoal_context *context;
    struct shoal_comm *comm;
    struct run run = {0};
    if (shoal_context_create(NULL, &context) || shoal_comm_create(context, NULL, &comm))
        return EXIT_FAILED; /* the reason has been logged on stderr */

    int code = run_all(&run, argc, argv, context, comm);
    close_loss_csv(&run);
    trainer_fini(&run.trainer);
    if (shoal_comm_finalize(comm) && !code)
        code = EXIT_FAILED;
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    return code;
}
