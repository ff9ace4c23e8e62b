/* The values of a program's parameters after an error, for each fault: exactly those of the last whole step. If the
 * optimizer steps buffer by buffer, the parameters of completed buffers are one step further. No value ever comes from an
 * incomplete sum. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "multi_world.h"
#include "shoal/gradients.h"

#define PARAMETERS 6
#define ELEMENTS 2000
#define AT_FAULT 1

enum fault { NONE, MARKED_TWICE, NEVER_MARKED, WRONG_LENGTH, CALLER_FAILS, CALLBACK_FAILS, RANK_DIES };

struct fault_case {
    enum fault fault;
    bool steps_in_callback;
    bool has_thread;
};

/* A model whose optimizer adds each average to its parameter: all values stay exact. */
struct trainer {
    struct world *world;
    const struct fault_case *at;
    struct shoal_parameter parameters[PARAMETERS];
    struct shoal_reducer *reducer;
    float gradients[PARAMETERS][ELEMENTS];
    double weights[PARAMETERS][ELEMENTS];
    int step;         /* the current step */
    int whole;        /* number of steps whose finish returned OK */
    size_t completed; /* buffers of this step that on_buffer has stepped */
    bool is_faulty;   /* this rank has the fault in this step */
};

/* ---- Values -------------------------------------------------------------------------------------------------------------- */

static double value(int step, double rank, size_t parameter, size_t element)
{
    return 7 * step + 4 * rank + (double)parameter + (double)(element % 5);
}

static void compute(struct trainer *trainer, size_t parameter)
{
    for (size_t e = 0; e < ELEMENTS; e++)
        trainer->gradients[parameter][e] = (float)value(trainer->step, trainer->world->rank, parameter, e);
}

static void optimize(struct trainer *trainer, size_t parameter)
{
    for (size_t e = 0; e < ELEMENTS; e++)
        trainer->weights[parameter][e] += (double)trainer->gradients[parameter][e];
}

static void expect_weights(const struct trainer *trainer, size_t parameter, int steps)
{
    const double mean_rank = (trainer->world->size - 1) / 2.0;
    for (size_t e = 0; e < ELEMENTS; e++) {
        double expected = 0;
        for (int step = 0; step < steps; step++)
            expected += value(step, mean_rank, parameter, e);
        CHECK(trainer->world, trainer->weights[parameter][e] == expected,
              "parameter %zu, element %zu after %d steps: %g, not %g", parameter, e, steps, trainer->weights[parameter][e],
              expected);
    }
}

/* Each buffer holds one parameter, and the last parameter becomes ready first. */
static void expect_all_weights(const struct trainer *trainer)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        const bool is_further = trainer->at->steps_in_callback && PARAMETERS - 1 - i < trainer->completed;
        expect_weights(trainer, i, trainer->whole + is_further);
    }
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status on_buffer(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    struct trainer *trainer = arg;
    CHECK(trainer->world, buffer == trainer->completed && count == 1 && parameters[0] == PARAMETERS - 1 - buffer,
          "buffer %zu after %zu", buffer, trainer->completed);
    if (trainer->is_faulty && trainer->at->fault == CALLBACK_FAILS && buffer == 2)
        return SHOAL_ERR_SYSTEM;
    optimize(trainer, parameters[0]);
    trainer->completed++;
    return SHOAL_OK;
}

static void open_trainer(struct trainer *trainer, struct world *world)
{
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    trainer->world = world;
    trainer->at = world->arg;
    for (size_t i = 0; i < PARAMETERS; i++)
        trainer->parameters[i] = (struct shoal_parameter){ELEMENTS, SHOAL_FLOAT32, NULL};
    options.buffer_bytes = options.first_buffer_bytes = ELEMENTS * sizeof(float);
    options.rank_bytes = 64;
    options.keeps_layout = 1; /* else a slow rank may still be in the exchange of layouts when the second step begins */
    options.has_thread = trainer->at->has_thread;
    options.on_buffer = trainer->at->steps_in_callback ? on_buffer : NULL;
    options.on_buffer_arg = trainer;
    OK(world, shoal_reducer_create(world->context, world->comm, trainer->parameters, PARAMETERS, &options, &trainer->reducer));
    CHECK(world, shoal_gradient_layout_buffers(shoal_reducer_layout(trainer->reducer)) == PARAMETERS, "buffers are shared");
}

/* The faulty rank does this instead of marking parameter i. */
static enum shoal_status mark_badly(struct trainer *trainer, size_t i)
{
    if (trainer->at->fault == RANK_DIES)
        _exit(0); /* the harness expects exit code 0 */
    if (trainer->at->fault == NEVER_MARKED)
        return SHOAL_OK;
    if (trainer->at->fault == WRONG_LENGTH) { /* refused, and not marked in any other way */
        CHECK(trainer->world,
              shoal_reducer_ready(trainer->reducer, i, trainer->gradients[i], ELEMENTS - 1) == SHOAL_ERR_ARGUMENT,
              "a gradient that is too short was not refused");
        return SHOAL_OK;
    }
    if (trainer->at->fault == CALLER_FAILS)
        shoal_reducer_fail(trainer->reducer, SHOAL_ERR_ABORTED, "the loss was not a number");
    const enum shoal_status status = shoal_reducer_ready(trainer->reducer, i, trainer->gradients[i], ELEMENTS);
    if (status != SHOAL_OK || trainer->at->fault != MARKED_TWICE)
        return status;
    return shoal_reducer_ready(trainer->reducer, i, trainer->gradients[i], ELEMENTS);
}

static enum shoal_status mark(struct trainer *trainer)
{
    enum shoal_status status = SHOAL_OK;
    for (size_t i = PARAMETERS; i-- > 0 && status == SHOAL_OK;) {
        compute(trainer, i);
        status = trainer->is_faulty && i == PARAMETERS / 2
                     ? mark_badly(trainer, i)
                     : shoal_reducer_ready(trainer->reducer, i, trainer->gradients[i], ELEMENTS);
    }
    return status;
}

static enum shoal_status step(struct trainer *trainer)
{
    enum shoal_status status = shoal_reducer_begin(trainer->reducer, SHOAL_STEP_REDUCE);
    if (status == SHOAL_OK)
        status = mark(trainer);
    if (status == SHOAL_OK)
        status = shoal_reducer_finish(trainer->reducer, NULL);
    if (status != SHOAL_OK)
        return status;
    for (size_t i = 0; i < PARAMETERS && !trainer->at->steps_in_callback; i++)
        optimize(trainer, i);
    trainer->whole++;
    trainer->step++;
    trainer->completed = 0;
    return SHOAL_OK;
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

/* Called on surviving ranks: none is more than one step away from another. */
static void compare_steps(struct trainer *trainer)
{
    struct world *world = trainer->world;
    int least = 0, most = 0;
    OK(world, shoal_allreduce(world->comm, &trainer->whole, &least, 1, SHOAL_INT32, SHOAL_MIN, NULL));
    OK(world, shoal_allreduce(world->comm, &trainer->whole, &most, 1, SHOAL_INT32, SHOAL_MAX, NULL));
    CHECK(world, least >= 2 && most <= 3 && most - least <= 1, "ranks stopped between steps %d and %d", least, most);
}

/* After the failure, neither later calls nor the free step a parameter. */
static void expect_stopped(struct trainer *trainer, enum shoal_status status)
{
    struct world *world = trainer->world;
    const enum shoal_status later = shoal_reducer_begin(trainer->reducer, SHOAL_STEP_REDUCE);
    CHECK(world, later == status, "begin after the failure gave %s, not %s", shoal_status_name(later),
          shoal_status_name(status));
    if (!trainer->at->has_thread) /* else on_buffer may still be called for buffers completed before the failure */
        expect_all_weights(trainer);
    shoal_reducer_free(trainer->reducer);
    expect_all_weights(trainer);
}

static void fault_body(struct world *world)
{
    struct trainer *trainer = calloc(1, sizeof *trainer);
    CHECK(world, trainer, "no memory");
    open_trainer(trainer, world);
    OK(world, step(trainer));
    OK(world, step(trainer));
    expect_all_weights(trainer);
    OK(world, shoal_barrier(world->comm, NULL)); /* else a rank may learn of the fault in the previous step */
    world_meet(world);                           /* the fault may be the end of a rank */
    trainer->is_faulty = world->rank == AT_FAULT;
    enum shoal_status status = step(trainer);
    if (status == SHOAL_OK) /* this step ended before another rank's callback failed: the next one reports it */
        status = step(trainer);
    CHECK(world, status != SHOAL_OK, "the fault was not told");
    if (trainer->at->fault == CALLBACK_FAILS && world->rank == AT_FAULT)
        CHECK(world, trainer->whole == 2 && trainer->completed == 2, "%zu buffers were stepped", trainer->completed);
    expect_stopped(trainer, status);
    if (trainer->at->fault == RANK_DIES)
        _exit(0); /* the world's communicator is also broken */
    compare_steps(trainer);
    free(trainer);
}

/* Refused calls write neither to gradients nor to views, and the step continues to the same values. */
static void refused_body(struct world *world)
{
    struct trainer *trainer = calloc(1, sizeof *trainer);
    uint64_t hashes[PARAMETERS] = {0};
    CHECK(world, trainer, "no memory");
    open_trainer(trainer, world);
    OK(world, step(trainer));
    OK(world, shoal_reducer_begin(trainer->reducer, SHOAL_STEP_REDUCE));
    compute(trainer, 0);
    CHECK(world, shoal_reducer_ready(trainer->reducer, 0, trainer->gradients[0], ELEMENTS + 1) == SHOAL_ERR_ARGUMENT,
          "too long");
    CHECK(world, shoal_reducer_ready(trainer->reducer, PARAMETERS, trainer->gradients[0], 1) == SHOAL_ERR_ARGUMENT,
          "not there");
    for (size_t e = 0; e < ELEMENTS; e++)
        CHECK(world, trainer->gradients[0][e] == (float)value(1, world->rank, 0, e), "element %zu was written to", e);
    expect_all_weights(trainer);
    OK(world, step(trainer)); /* nothing was marked, so the step may begin again */
    expect_all_weights(trainer);
    hashes[3] = (uint64_t)world->rank;
    CHECK(world, shoal_reducer_compare(trainer->reducer, hashes) == SHOAL_ERR_MISMATCH, "replicas differ");
    expect_all_weights(trainer);
    OK(world, step(trainer));
    expect_all_weights(trainer);
    shoal_reducer_free(trainer->reducer);
    free(trainer);
}

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static const char *const fault_names[] = {
    [MARKED_TWICE] = "marked twice",        [NEVER_MARKED] = "never marked",       [WRONG_LENGTH] = "of a wrong length",
    [CALLER_FAILS] = "the caller gives up", [CALLBACK_FAILS] = "a callback fails", [RANK_DIES] = "a rank dies",
};

static void run_case(const struct fault_case *at, int ranks_per_host)
{
    char name[128];
    snprintf(name, sizeof name, "parameters_after_a_fault: %s, optimizer %s%s%s", fault_names[at->fault],
             at->steps_in_callback ? "per buffer" : "after finish", at->has_thread ? ", thread" : "",
             ranks_per_host ? ", 2 hosts" : "");
    world_divide(ranks_per_host);
    world_run(&(struct world_options){name, 4, NULL, fault_body, at});
}

int main(void)
{
    static const struct fault_case none = {NONE, false, false};
    world_run(&(struct world_options){"parameters_after_refusals", 4, NULL, refused_body, &none});
    for (enum fault fault = MARKED_TWICE; fault <= RANK_DIES; fault++) {
        if (fault != CALLBACK_FAILS)
            run_case(&(struct fault_case){fault, false, false}, 0);
        run_case(&(struct fault_case){fault, true, false}, 0);
        run_case(&(struct fault_case){fault, true, true}, 0);
        run_case(&(struct fault_case){fault, true, true}, 2);
    }
    return world_finish();
}
