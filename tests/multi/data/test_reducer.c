/* The gradient engine between real processes: exact averages for any order, threads and parts in which gradients become
 * ready; steps of every kind; and each error, reported on every rank alike. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/data.h"
#include "shoal/outer.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 23
#define ELEMENTS_MAX 40000
#define THREADS 3

/* ---- A model and its gradients ------------------------------------------------------------------------------------------- */

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    char names[PARAMETERS][24];
    struct shoal_reducer_options options;
    struct shoal_reducer *reducer;
    void *memory[PARAMETERS]; /* the caller's gradients */
    uint64_t random;          /* this rank's own */
    uint64_t shared;          /* the same on all ranks */
    int step;
};

static void open_job(struct job *job, struct world *world, uint64_t seed)
{
    memset(job, 0, sizeof *job);
    job->world = world;
    job->shared = seed;
    job->random = seed * 100 + (uint64_t)world->rank + 1;
    job->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    job->options.buffer_bytes = 64 << 10;
    job->options.first_buffer_bytes = 8 << 10;
    job->options.rank_bytes = 1024;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 5 ? 300 : ELEMENTS_MAX;
        job->parameters[i] = (struct shoal_parameter){reference_below(&job->shared, most),
                                                      types[reference_below(&job->shared, 4)], job->names[i]};
        snprintf(job->names[i], sizeof job->names[i], "layer%zu", i);
        job->memory[i] = calloc(ELEMENTS_MAX + 1, 8);
        CHECK(world, job->memory[i], "no memory");
    }
}

static enum shoal_status create(struct job *job)
{
    return shoal_reducer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &job->options,
                                &job->reducer);
}

static void close_job(struct job *job)
{
    shoal_reducer_free(job->reducer);
    for (size_t i = 0; i < PARAMETERS; i++)
        free(job->memory[i]);
}

/* Returns where the gradient is computed: in the caller's memory, or sometimes in the view. */
static void *place_of(struct job *job, size_t parameter, bool in_view)
{
    return in_view ? shoal_reducer_view(job->reducer, parameter) : job->memory[parameter];
}

static void compute(struct job *job, size_t parameter, void *memory, double factor)
{
    double period[GRADIENT_PERIOD];
    for (size_t i = 0; i < GRADIENT_PERIOD; i++)
        period[i] = factor * gradient_value(job->step, job->world->rank, parameter, i);
    gradient_fill(job->parameters[parameter].type, period, memory, job->parameters[parameter].count);
}

static double expect(const struct job *job, size_t parameter, size_t element, uint64_t ranks)
{
    double sum = 0;
    for (int r = 0; r < job->world->size; r++) {
        if (ranks >> r & 1)
            sum += gradient_value(job->step, r, parameter, element);
    }
    return sum / job->world->size;
}

/* Checks the exact average over those ranks' values. */
static void check_values(struct job *job, size_t parameter, const void *memory, uint64_t ranks, double factor)
{
    const struct shoal_parameter *each = &job->parameters[parameter];
    double period[GRADIENT_PERIOD];
    for (size_t i = 0; i < GRADIENT_PERIOD; i++)
        period[i] = factor * expect(job, parameter, i, ranks);
    const size_t other = gradient_find_other(each->type, period, memory, each->count);
    CHECK(job->world, other == each->count, "step %d, %s, element %zu of %zu, type %d: %g, not %g", job->step,
          job->names[parameter], other, each->count, (int)each->type, gradient_get(each->type, memory, other),
          period[other % GRADIENT_PERIOD]);
}

#define ALL_RANKS UINT64_MAX

/* ---- Marks in any order, from any thread, whole and in parts ------------------------------------------------------------- */

struct marker {
    struct job *job;
    const uint32_t *order;
    size_t begin, end;
    uint64_t random;
    const bool *in_view;
    enum shoal_status status;
};

static enum shoal_status mark_in_parts(struct marker *marker, uint32_t parameter, char *memory)
{
    struct job *job = marker->job;
    const size_t count = job->parameters[parameter].count, bytes = shoal_type_bytes(job->parameters[parameter].type);
    const size_t first = reference_below(&marker->random, count),
                 second = first + reference_below(&marker->random, count - first);
    enum shoal_status status = SHOAL_OK;
    const size_t from[3] = {second, 0, first}, to[3] = {count, first, second};
    for (size_t k = 0; k < 3 && status == SHOAL_OK; k++)
        status = shoal_reducer_ready_part(job->reducer, parameter, memory + from[k] * bytes, from[k], to[k] - from[k]);
    return status;
}

static void *run_marker(void *arg)
{
    struct marker *marker = arg;
    for (size_t i = marker->begin; i < marker->end && marker->status == SHOAL_OK; i++) {
        const uint32_t parameter = marker->order[i];
        char *memory = place_of(marker->job, parameter, marker->in_view[parameter]);
        if (reference_below(&marker->random, 8) == 0)
            usleep((useconds_t)reference_below(&marker->random, 2000));
        marker->status =
            reference_below(&marker->random, 3) == 0 && marker->job->parameters[parameter].count > 2
                ? mark_in_parts(marker, parameter, memory)
                : shoal_reducer_ready(marker->job->reducer, parameter, memory, marker->job->parameters[parameter].count);
    }
    return NULL;
}

/* Joins the threads before finish. */
static void mark_all(struct job *job, const bool *in_view)
{
    uint32_t order[PARAMETERS];
    struct marker markers[THREADS];
    pthread_t threads[THREADS];
    const size_t used = 1 + reference_below(&job->random, THREADS);
    reference_shuffle(&job->random, order, PARAMETERS);
    for (size_t t = 0; t < used; t++) {
        markers[t] = (struct marker){
            job, order, PARAMETERS * t / used, PARAMETERS * (t + 1) / used, reference_random(&job->random), in_view, SHOAL_OK};
        CHECK(job->world, pthread_create(&threads[t], NULL, run_marker, &markers[t]) == 0, "no thread");
    }
    for (size_t t = 0; t < used; t++) {
        pthread_join(threads[t], NULL);
        OK(job->world, markers[t].status);
    }
}

static void draw_places(struct job *job, bool *in_view)
{
    const size_t kind = reference_below(&job->random, 3);
    for (size_t i = 0; i < PARAMETERS; i++)
        in_view[i] = kind == 0 || (kind == 1 && reference_below(&job->random, 2));
}

static void run_step(struct job *job)
{
    bool in_view[PARAMETERS];
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE));
    draw_places(job, in_view);
    for (size_t i = 0; i < PARAMETERS; i++)
        compute(job, i, place_of(job, i, in_view[i]), 1);
    mark_all(job, in_view);
    OK(job->world, shoal_reducer_finish(job->reducer, &result));
    for (size_t i = 0; i < PARAMETERS; i++) {
        const bool is_in_view = in_view[i] || job->options.results_in_views;
        check_values(job, i, place_of(job, i, is_in_view), ALL_RANKS, 1);
        CHECK(job->world, shoal_reducer_is_used(job->reducer, i), "%s is not used", job->names[i]);
    }
    CHECK(job->world, result.step == (uint64_t)job->step + 1 && result.active == job->world->size && result.clip == 1,
          "step %d of %d ranks, clip %g", (int)result.step, result.active, result.clip);
    job->step++;
}

/* If only one buffer fits in flight, each is posted after the previous one is done. */
static void check_flight(struct job *job)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_buffer_times before = SHOAL_BUFFER_TIMES_INIT, times = SHOAL_BUFFER_TIMES_INIT;
    const size_t buffers = shoal_gradient_layout_buffers(shoal_reducer_layout(job->reducer));
    OK(job->world, shoal_reducer_stats(job->reducer, &stats));
    CHECK(job->world, stats.flight_buffers == 1, "%zu buffers in flight", stats.flight_buffers);
    for (size_t b = 0; b < buffers; b++, before = times) {
        OK(job->world, shoal_reducer_buffer_times(job->reducer, b, &times));
        CHECK(job->world, b == 0 || times.posted_us >= before.done_us,
              "buffer %zu of %zu was posted at %g us, the one before "
              "was done at %g",
              b, buffers, times.posted_us, before.done_us);
    }
}

static void steps_body(struct world *world)
{
    struct job job;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        world->seed = seed;
        open_job(&job, world, seed);
        job.options.results_in_views = (int)reference_below(&job.shared, 2);
        job.options.keeps_layout = (int)reference_below(&job.shared, 2);
        job.options.has_thread = (int)reference_below(&job.shared, 2);
        job.options.has_norms = (int)reference_below(&job.shared, 2);
        job.options.flight_bytes = reference_below(&job.shared, 2) ? 1 : 0;
        job.options.compression = world->arg ? *(const enum shoal_compression *)world->arg : SHOAL_COMPRESS_NONE;
        OK(world, create(&job));
        for (int s = 0; s < 4; s++) {
            run_step(&job);
            if (job.options.flight_bytes == 1)
                check_flight(&job);
        }
        const unsigned most = job.options.keeps_layout ? 1 : 2;
        CHECK(world, shoal_reducer_layout_number(job.reducer) <= most, "layout number %u, keeps_layout is %d",
              shoal_reducer_layout_number(job.reducer), job.options.keeps_layout);
        close_job(&job);
    }
}

/* ---- Compression --------------------------------------------------------------------------------------------------------- */

#define LONG ((size_t)30000)
#define LONG_STEPS 200

/* Normally distributed values, different on each rank and the same in each step. */
static void draw_long(float *values, int rank)
{
    uint64_t random = 1000 + (uint64_t)rank;
    for (size_t i = 0; i < LONG; i++) {
        double sum = -6;
        for (int k = 0; k < 12; k++)
            sum += (double)(reference_random(&random) >> 11) / 0x1p53;
        values[i] = (float)sum;
    }
}

/* Returns the relative error of the sum of all steps' averages. */
static double error_of_sum(struct world *world, int forgets_error, int results_in_views)
{
    static float own[LONG], back[LONG];
    static double exact[LONG], summed[LONG];
    const struct shoal_parameter parameter = {LONG, SHOAL_FLOAT32, "long"};
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_reducer *reducer;
    double squared = 0, wrong = 0;
    options.compression = SHOAL_COMPRESS_INT8;
    options.forgets_error = forgets_error;
    options.results_in_views = results_in_views;
    memset(exact, 0, sizeof exact);
    memset(summed, 0, sizeof summed);
    for (int r = 0; r < world->size; r++) {
        draw_long(own, r);
        for (size_t i = 0; i < LONG; i++)
            exact[i] += (double)own[i] / world->size * LONG_STEPS;
    }
    draw_long(own, world->rank);
    OK(world, shoal_reducer_create(world->context, world->comm, &parameter, 1, &options, &reducer));
    for (int step = 0; step < LONG_STEPS; step++) {
        memcpy(back, own, sizeof back);
        OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
        OK(world, shoal_reducer_ready(reducer, 0, back, LONG));
        OK(world, shoal_reducer_finish(reducer, NULL));
        const float *result = results_in_views ? shoal_reducer_view(reducer, 0) : back;
        for (size_t i = 0; i < LONG; i++)
            summed[i] += (double)result[i];
        if (step % 50)
            continue;
        const uint64_t hash = shoal_bytes_hash(result, LONG * sizeof *result);
        OK(world, shoal_reducer_compare(reducer, &hash)); /* the same bits on all ranks */
    }
    OK(world, shoal_reducer_stats(reducer, &stats));
    CHECK(world, stats.network_bytes * 3 < stats.sent_bytes, "%zu of %zu bytes leave the host", (size_t)stats.network_bytes,
          (size_t)stats.sent_bytes);
    shoal_reducer_free(reducer);
    for (size_t i = 0; i < LONG; i++) {
        squared += exact[i] * exact[i];
        wrong += (summed[i] - exact[i]) * (summed[i] - exact[i]);
    }
    return sqrt(wrong / squared);
}

/* The two roundings of a step have an error of about 1 %. With feedback, later steps compensate for it. */
static void error_body(struct world *world)
{
    const double kept = error_of_sum(world, 0, 0), forgotten = error_of_sum(world, 1, 1);
    if (world->rank == 0)
        printf("# error of the sum over %d steps: %.5f %% with feedback, %.3f %% without\n", LONG_STEPS, kept * 100,
               forgotten * 100);
    CHECK(world, kept < 0.0002, "the error of the sum is %g with feedback", kept);
    CHECK(world, forgotten > 0.003 && forgotten < 0.02, "the error of the sum is %g without feedback", forgotten);
}

/* ---- Bytes on the wire --------------------------------------------------------------------------------------------------- */

#define WIDE ((size_t)1 << 20) /* elements of each of four parameters */

static const struct shoal_parameter wide_parameters[] = {
    {WIDE, SHOAL_FLOAT32, "a"}, {WIDE - 77, SHOAL_FLOAT32, "b"}, {WIDE, SHOAL_FLOAT32, "c"}, {WIDE + 5, SHOAL_FLOAT32, "d"}};

struct wire {
    uint64_t sent, received;
};

/* Returns the bytes that this rank's transport has sent since the reducer was created, and those that the others' have sent
 * to it. */
static struct wire wire_count(struct world *world, const struct shoal_reducer *reducer)
{
    uint64_t to[WORLD_RANKS_MAX] = {0}, from[WORLD_RANKS_MAX] = {0};
    struct wire wire = {0, 0};
    OK(world, shoal_reducer_sent_to(reducer, to));
    CHECK(world, to[world->rank] == 0, "%zu bytes sent to itself", (size_t)to[world->rank]);
    OK(world, shoal_alltoall(world->comm, to, from, 1, SHOAL_INT64, NULL));
    for (int r = 0; r < world->size; r++) {
        wire.sent += to[r];
        wire.received += from[r];
    }
    return wire;
}

static void wide_step(struct world *world, struct shoal_reducer *reducer, float *memory, struct shoal_step_stats *stats)
{
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < COUNT_OF(wide_parameters); i++)
        OK(world, shoal_reducer_ready(reducer, i, memory, wide_parameters[i].count));
    OK(world, shoal_reducer_finish(reducer, NULL));
    OK(world, shoal_reducer_stats(reducer, stats));
}

/* Fails if one rank's count is more than 1 % above another's. */
static void expect_even(struct world *world, uint64_t own, const char *what)
{
    uint64_t all[WORLD_RANKS_MAX], most = 0, least = UINT64_MAX;
    OK(world, shoal_allgather(world->comm, &own, all, 1, SHOAL_INT64, NULL));
    for (int r = 0; r < world->size; r++) {
        most = all[r] > most ? all[r] : most;
        least = all[r] < least ? all[r] : least;
    }
    CHECK(world, (double)most < 1.01 * (double)least, "%zu to %zu bytes %s", (size_t)least, (size_t)most, what);
}

static void expect_near(struct world *world, uint64_t counted, uint64_t computed, const char *what)
{
    const double share = (double)counted / (double)computed;
    CHECK(world, share > 0.999 && share < 1.01, "%zu bytes %s, %zu computed", (size_t)counted, what, (size_t)computed);
}

/* Except for headers, the transport counts the bytes that the statistics compute from the layout, the same on all ranks. */
static void wire_body(struct world *world)
{
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *reducer;
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    float *memory = calloc(WIDE + 5, sizeof *memory);
    CHECK(world, memory, "no memory");
    options.buffer_bytes = 8 << 20;
    options.compression = *(const enum shoal_compression *)world->arg;
    OK(world,
       shoal_reducer_create(world->context, world->comm, wide_parameters, COUNT_OF(wide_parameters), &options, &reducer));
    for (int step = 0; step < 3; step++) {
        const struct wire before = wire_count(world, reducer);
        wide_step(world, reducer, memory, &stats);
        const struct wire after = wire_count(world, reducer);
        const struct wire wire = {after.sent - before.sent, after.received - before.received};
        expect_near(world, stats.wire_bytes, stats.network_bytes, "sent by the statistics");
        expect_near(world, wire.sent, stats.network_bytes, "sent");
        expect_near(world, wire.received, stats.network_bytes, "received");
        expect_even(world, wire.sent, "sent");
        expect_even(world, wire.received, "received");
        if (world->rank == 0 && step == 2)
            printf("# rank 0 sent %.2f MB in a step, and received %.2f MB\n", (double)wire.sent / 1e6,
                   (double)wire.received / 1e6);
    }
    shoal_reducer_free(reducer);
    free(memory);
}

/* ---- Layout: rank 0's order, once ---------------------------------------------------------------------------------------- */

static void mark_in(struct job *job, const uint32_t *order)
{
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++) {
        compute(job, order[i], job->memory[order[i]], 1);
        OK(job->world, shoal_reducer_ready(job->reducer, order[i], job->memory[order[i]], job->parameters[order[i]].count));
    }
    OK(job->world, shoal_reducer_finish(job->reducer, NULL));
    for (size_t i = 0; i < PARAMETERS; i++)
        check_values(job, i, job->memory[i], ALL_RANKS, 1);
    job->step++;
}

/* Creates the reducer again with a given layout or order. Its layout has this hash and does not change. */
static void keep_given(struct job *job, const uint32_t *own, uint64_t hash)
{
    shoal_reducer_free(job->reducer);
    OK(job->world, create(job));
    CHECK(job->world, shoal_gradient_layout_hash(shoal_reducer_layout(job->reducer)) == hash, "what was given was not taken");
    for (int s = 0; s < 3; s++)
        mark_in(job, own);
    CHECK(job->world, shoal_reducer_layout_number(job->reducer) == 1, "a given layout or order was made anew");
}

static void layout_body(struct world *world)
{
    struct job job;
    uint32_t order[PARAMETERS], own[PARAMETERS], seen[PARAMETERS];
    struct shoal_gradient_layout_options wanted = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    struct shoal_gradient_layout *expected;
    open_job(&job, world, 77);
    OK(world, create(&job));
    reference_shuffle(&job.shared, order, PARAMETERS); /* rank 0's; the others have their own orders */
    reference_shuffle(&job.random, own, PARAMETERS);
    const uint64_t before = shoal_gradient_layout_hash(shoal_reducer_layout(job.reducer));
    CHECK(world, shoal_reducer_order(job.reducer, seen) == SHOAL_ERR_STATE, "an order before the first step");
    mark_in(&job, world->rank ? own : order);
    OK(world, shoal_reducer_order(job.reducer, seen));
    CHECK(world, memcmp(seen, world->rank ? own : order, sizeof seen) == 0,
          "the order of readiness is not the one of the marks");
    CHECK(world, shoal_gradient_layout_hash(shoal_reducer_layout(job.reducer)) == before, "the layout changed too early");
    mark_in(&job, own);
    wanted.ranks = world->size;
    wanted.buffer_bytes = job.options.buffer_bytes;
    wanted.first_buffer_bytes = job.options.first_buffer_bytes;
    wanted.rank_bytes = job.options.rank_bytes;
    wanted.order = order;
    OK(world, shoal_gradient_layout_create(job.parameters, PARAMETERS, &wanted, &expected, NULL, 0));
    const uint64_t renewed = shoal_gradient_layout_hash(shoal_reducer_layout(job.reducer));
    CHECK(world, renewed == shoal_gradient_layout_hash(expected) && renewed != before, "the layout is not in rank 0's order");
    CHECK(world, shoal_reducer_layout_number(job.reducer) == 2, "number %u", shoal_reducer_layout_number(job.reducer));
    mark_in(&job, own);
    CHECK(world, shoal_reducer_layout_number(job.reducer) == 2, "it was made anew twice");
    job.options.layout = expected; /* as in a resumed job */
    keep_given(&job, own, renewed);
    job.options.layout = NULL;
    job.options.order = order; /* as recorded by a profile */
    keep_given(&job, own, renewed);
    shoal_gradient_layout_free(expected);
    close_job(&job);
}

/* ---- Accumulation, unused parameters, norms, uneven steps ---------------------------------------------------------------- */

/* Computes squares over all gradients, each times a factor (NULL: 1): the mean over the ranks of their own, and that of the
 * averages. */
static void expect_norms(const struct job *job, const double *factors, double *local, double *averaged)
{
    *local = *averaged = 0;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const double factor = factors ? factors[i] : 1;
        for (size_t e = 0; e < GRADIENT_PERIOD; e++) {
            const double times = (double)((job->parameters[i].count + GRADIENT_PERIOD - 1 - e) / GRADIENT_PERIOD);
            for (int r = 0; r < job->world->size; r++)
                *local += times * pow(factor * gradient_value(job->step, r, i, e), 2) / job->world->size;
            *averaged += times * pow(factor * expect(job, i, e, ALL_RANKS), 2);
        }
    }
}

static void check_near(const struct job *job, double found, double expected, double error, const char *what)
{
    CHECK(job->world, fabs(found - expected) <= error * expected, "step %d: %s is %.17g, not %.17g", job->step, what, found,
          expected);
}

static void check_norms(const struct job *job, const double *factors, const struct shoal_step_result *result)
{
    double local, averaged;
    expect_norms(job, factors, &local, &averaged);
    check_near(job, result->local_squared, local, 1e-9, "the ranks' own squared norm");
    check_near(job, result->squared, averaged, 1e-9, "the squared norm of the averages");
}

static void local_body(struct world *world)
{
    struct job job;
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    double factors[PARAMETERS];
    open_job(&job, world, 5);
    job.options.has_norms = 1;
    OK(world, create(&job));
    for (int step = 0; step < 3; step++) {
        for (int micro = 0; micro < 3; micro++) {
            OK(world, shoal_reducer_begin(job.reducer, micro < 2 ? SHOAL_STEP_LOCAL : SHOAL_STEP_REDUCE));
            for (size_t i = 0; i < PARAMETERS; i++) {
                if (micro < 2 && i % 4 == 0)
                    continue; /* no gradient in this pass */
                compute(&job, i, job.memory[i], micro == 2 ? 1 : 2);
                OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count));
            }
            OK(world, shoal_reducer_finish(job.reducer, &result));
        }
        for (size_t i = 0; i < PARAMETERS; i++) {
            factors[i] = i % 4 ? 5 : 1;
            check_values(&job, i, job.memory[i], ALL_RANKS, factors[i]);
        }
        check_norms(&job, factors, &result);
        job.step++;
    }
    close_job(&job);
}

/* Parameter i is used by the ranks whose bit is set in i. Untouched memory keeps its mark. */
static void unused_body(struct world *world)
{
    struct job job;
    for (int thread = 0; thread < 2; thread++) {
        open_job(&job, world, 6);
        job.options.allows_unused = 1;
        job.options.has_thread = thread;
        OK(world, create(&job));
        for (; job.step < 4; job.step++) {
            OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
            for (size_t i = 0; i < PARAMETERS; i++) {
                const bool is_used = (i + (size_t)job.step) >> world->rank & 1;
                compute(&job, i, job.memory[i], is_used ? 1 : 100);
                if (is_used)
                    OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count));
                else if (i % 2)
                    OK(world, shoal_reducer_unused(job.reducer, i));
            }
            OK(world, shoal_reducer_finish(job.reducer, NULL));
            for (size_t i = 0; i < PARAMETERS; i++) {
                const uint64_t ranks = (i + (size_t)job.step) & (((uint64_t)1 << world->size) - 1);
                check_values(&job, i, shoal_reducer_view(job.reducer, i), ranks, 1);
                if (ranks >> world->rank & 1)
                    check_values(&job, i, job.memory[i], ranks, 1);
                CHECK(world, shoal_reducer_is_used(job.reducer, i) == (ranks != 0), "%s is %sused", job.names[i],
                      ranks ? "not " : "");
            }
        }
        close_job(&job);
    }
}

/* Every second parameter is computed in its view if has_views is set. */
static void *norms_place(struct job *job, size_t parameter, bool has_views)
{
    return place_of(job, parameter, has_views && parameter % 2);
}

static void norms_step(struct job *job, bool has_views, struct shoal_step_result *result)
{
    bool in_view[PARAMETERS];
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++) {
        in_view[i] = has_views && i % 2;
        compute(job, i, norms_place(job, i, has_views), 1);
    }
    mark_all(job, in_view);
    OK(job->world, shoal_reducer_finish(job->reducer, result));
}

/* With clips 1 the averages' norm is below the limit, with clips 2 above it. */
static void open_norms(struct job *job, struct world *world, int clips, enum shoal_type type)
{
    open_job(job, world, 8);
    for (size_t i = 0; i < PARAMETERS; i++)
        job->parameters[i].type = type;
    job->options.has_norms = 1;
    job->options.max_norm = clips == 0 ? 0 : clips == 1 ? 1e9 : 10;
}

static void check_clip(const struct job *job, int clips, const struct shoal_step_result *result)
{
    const double clip = clips == 2 ? 10 / (sqrt(result->squared) + 1e-6) : 1;
    CHECK(job->world, fabs(result->clip - clip) <= 1e-15 * clip, "clip %.17g, not %.17g", result->clip, clip);
}

static void norms_body(struct world *world)
{
    struct job job;
    for (int kind = 0; kind < 6; kind++) {
        struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
        const int clips = kind / 2;
        const bool has_views = kind % 2;
        open_norms(&job, world, clips, SHOAL_FLOAT64); /* clipped values are compared with those computed in double */
        OK(world, create(&job));
        norms_step(&job, has_views, &result);
        check_norms(&job, NULL, &result);
        check_clip(&job, clips, &result);
        for (size_t i = 0; i < PARAMETERS; i++)
            check_values(&job, i, norms_place(&job, i, has_views), ALL_RANKS, result.clip);
        close_job(&job);
    }
}

/* With int8 each rank's own norm is still exact. The averages' norm is that of the values that all ranks find in place. */
static void compressed_norms_body(struct world *world)
{
    struct job job;
    double local, averaged;
    for (int kind = 0; kind < 6; kind++) {
        struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
        const int clips = kind / 2;
        const bool has_views = kind % 2;
        double squared = 0;
        open_norms(&job, world, clips, SHOAL_FLOAT32);
        job.options.compression = SHOAL_COMPRESS_INT8;
        OK(world, create(&job));
        norms_step(&job, has_views, &result);
        for (size_t i = 0; i < PARAMETERS; i++) {
            for (size_t e = 0; e < job.parameters[i].count; e++)
                squared += pow(gradient_get(SHOAL_FLOAT32, norms_place(&job, i, has_views), e), 2);
        }
        expect_norms(&job, NULL, &local, &averaged);
        check_near(&job, result.local_squared, local, 1e-9, "the ranks' own squared norm");
        check_near(&job, result.squared, averaged, 0.01, "the squared norm of the averages");
        check_near(&job, squared, result.squared * result.clip * result.clip, 1e-6, "the squared norm in place");
        check_clip(&job, clips, &result);
        close_job(&job);
    }
}

static void put_bits(enum shoal_type type, void *memory, size_t i, uint64_t bits)
{
    const size_t bytes = shoal_type_bytes(type);
    memcpy((char *)memory + bytes * i, &bits, bytes);
}

/* Writes NaN, infinity or its negative: every bit of the exponent is set. */
static void put_nonfinite(enum shoal_type type, void *memory, size_t i, int kind)
{
    static const uint64_t infinities[] = {[SHOAL_FLOAT32] = UINT64_C(0x7f800000),
                                          [SHOAL_FLOAT64] = UINT64_C(0x7ff) << 52,
                                          [SHOAL_BFLOAT16] = 0x7f80,
                                          [SHOAL_FLOAT16] = 0x7c00};
    const uint64_t sign = UINT64_C(1) << (8 * shoal_type_bytes(type) - 1);
    const uint64_t bits[] = {UINT64_MAX, infinities[type], infinities[type] | sign};
    put_bits(type, memory, i, bits[kind]);
}

/* Writes finite values whose squares, or their sum, are infinite in the type or in double. */
static void put_large(const struct job *job, size_t parameter)
{
    static const double large[] = {
        [SHOAL_FLOAT32] = 5e37, [SHOAL_FLOAT64] = 1e200, [SHOAL_BFLOAT16] = 5e37, [SHOAL_FLOAT16] = 4096};
    const enum shoal_type type = job->parameters[parameter].type;
    for (size_t i = 90; i < 100; i++)
        gradient_put(type, job->memory[parameter], i, large[type]);
}

/* All ranks name one rank's NaN or infinity, and the reducer continues. They do not report large values. */
static void finite_body(struct world *world)
{
    struct job job;
    struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
    open_job(&job, world, 9);
    for (size_t i = 0; i < PARAMETERS; i++)
        job.parameters[i] = (struct shoal_parameter){100, types[i % 4], job.names[i]};
    job.options.checks_finite = 1;
    OK(world, create(&job));
    for (int round = 0; round < 3 * PARAMETERS; round++) {
        const int bad = round % PARAMETERS;
        const bool has_bad = bad % 5 != 0;
        OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
        for (size_t i = 0; i < PARAMETERS; i++) {
            compute(&job, i, job.memory[i], 1);
            put_large(&job, i);
            if (has_bad && (int)i >= bad && (int)i % 3 == bad % 3 && world->rank >= world->size / 2)
                put_nonfinite(job.parameters[i].type, job.memory[i], (size_t)(bad * 4), round / PARAMETERS);
            OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], 100));
        }
        OK(world, shoal_reducer_finish(job.reducer, &result));
        const int rank = has_bad ? world->size / 2 : -1, parameter = has_bad ? bad : -1;
        CHECK(world, result.nonfinite_rank == rank && result.nonfinite_parameter == parameter,
              "round %d: rank %d, parameter %d are named, not %d, %d", round, result.nonfinite_rank,
              (int)result.nonfinite_parameter, rank, parameter);
    }
    close_job(&job);
}

static void add_up(struct job *job)
{
    const bool in_view[PARAMETERS] = {false};
    OK(job->world, shoal_reducer_begin(job->reducer, SHOAL_STEP_LOCAL));
    for (size_t i = 0; i < PARAMETERS; i++)
        compute(job, i, job->memory[i], 1);
    mark_all(job, in_view);
    OK(job->world, shoal_reducer_finish(job->reducer, NULL));
}

/* Rank r has 2 + r steps, and a LOCAL one whose sum is dropped. The others see how many ranks take part. Runs twice. */
static void uneven_body(struct world *world)
{
    struct job job;
    for (int by_active = 0; by_active < 2; by_active++) {
        open_job(&job, world, 10);
        job.options.is_uneven = 1;
        job.options.divides_by_active = by_active;
        job.options.has_thread = by_active;
        OK(world, create(&job));
        for (int epoch = 0; epoch < 2; epoch++) {
            int more = 1;
            for (int step = 0; more; step++, job.step++) {
                struct shoal_step_result result = SHOAL_STEP_RESULT_INIT;
                bool in_view[PARAMETERS] = {false};
                if (step < 2 + world->rank) {
                    OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
                    OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE)); /* a forward pass without a backward pass */
                    for (size_t i = 0; i < PARAMETERS; i++)
                        compute(&job, i, job.memory[i], 1);
                    mark_all(&job, in_view);
                    OK(world, shoal_reducer_finish(job.reducer, &result));
                } else {
                    if (step == 2 + world->rank)
                        add_up(&job);
                    OK(world, shoal_reducer_join(job.reducer, &more, &result));
                    CHECK(world, more == (step < 1 + world->size), "step %d: more is %d", step, more);
                }
                if (!more)
                    break;
                const int first = step < 2 ? 0 : step - 1; /* the lowest rank that has a gradient */
                CHECK(world, result.active == world->size - first, "%d active, not %d", result.active, world->size - first);
                for (size_t i = 0; i < PARAMETERS && (!by_active || world->size - first != 3); i++)
                    check_values(&job, i, step < 2 + world->rank ? job.memory[i] : shoal_reducer_view(job.reducer, i),
                                 ALL_RANKS << first, by_active ? (double)world->size / (world->size - first) : 1);
            }
        }
        close_job(&job);
    }
}

/* The sum of all ranks' values does not fit in 16 bits, their average does. Then rank 0 alone has another step. */
static void large_body(struct world *world)
{
    static const struct shoal_parameter parameters[2] = {{1000, SHOAL_FLOAT32, "single"}, {1000, SHOAL_FLOAT16, "half"}};
    const double large[GRADIENT_PERIOD] = {[0 ... GRADIENT_PERIOD - 1] = 40000};
    float memory[2][1000];
    for (int by_active = 0; by_active < 2; by_active++) {
        struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
        struct shoal_reducer *reducer;
        int more = 1;
        options.is_uneven = options.results_in_views = 1;
        options.divides_by_active = by_active;
        options.compression = *(const enum shoal_compression *)world->arg;
        OK(world, shoal_reducer_create(world->context, world->comm, parameters, 2, &options, &reducer));
        for (int step = 0; step < 2; step++) {
            if (step == 0 || world->rank == 0) {
                OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
                for (size_t i = 0; i < 2; i++) {
                    gradient_fill(parameters[i].type, large, memory[i], 1000);
                    OK(world, shoal_reducer_ready(reducer, i, memory[i], 1000));
                }
                OK(world, shoal_reducer_finish(reducer, NULL));
            } else {
                OK(world, shoal_reducer_join(reducer, &more, NULL));
            }
            const double expected = step == 0 || by_active ? 40000 : 40000.0 / world->size;
            for (size_t i = 0; i < 2; i++) {
                const double found = gradient_get(parameters[i].type, shoal_reducer_view(reducer, i), 999);
                CHECK(world, found == expected, "by_active %d, step %d, %s: %g, not %g", by_active, step, parameters[i].name,
                      found, expected);
            }
        }
        shoal_reducer_free(reducer);
    }
}

/* ---- Callbacks, statistics, comparison ----------------------------------------------------------------------------------- */

struct calls {
    struct job *job;
    size_t next;
    size_t fails_at;
    int seen[PARAMETERS];
};

static enum shoal_status on_buffer(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    struct calls *calls = arg;
    CHECK(calls->job->world, buffer == calls->next, "buffer %zu after %zu", buffer, calls->next);
    calls->next++;
    if (buffer == calls->fails_at)
        return SHOAL_ERR_SYSTEM;
    for (size_t i = 0; i < count; i++) {
        calls->seen[parameters[i]]++;
        check_values(calls->job, parameters[i], calls->job->memory[parameters[i]], ALL_RANKS, 1);
    }
    return SHOAL_OK;
}

static void check_stats(struct job *job)
{
    struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
    struct shoal_buffer_times times = SHOAL_BUFFER_TIMES_INIT;
    size_t bytes = 0, used = 0;
    const size_t buffers = shoal_gradient_layout_buffers(shoal_reducer_layout(job->reducer));
    OK(job->world, shoal_reducer_stats(job->reducer, &stats));
    for (size_t b = 0; b < buffers; b++) {
        struct shoal_gradient_buffer buffer = SHOAL_GRADIENT_BUFFER_INIT;
        OK(job->world, shoal_gradient_layout_buffer(shoal_reducer_layout(job->reducer), b, &buffer));
        OK(job->world, shoal_reducer_buffer_times(job->reducer, b, &times));
        CHECK(job->world,
              times.first_us <= times.full_us && times.full_us <= times.posted_us && times.posted_us <= times.done_us &&
                  times.done_us <= times.out_us && times.out_us <= stats.step_us,
              "buffer %zu: %g %g %g %g %g of %g us", b, times.first_us, times.full_us, times.posted_us, times.done_us,
              times.out_us, stats.step_us);
        bytes += buffer.bytes;
        used += buffer.used_bytes;
    }
    const uint64_t sent = (uint64_t)(2 * (job->world->size - 1)) * (bytes / (size_t)job->world->size);
    CHECK(job->world, stats.sent_bytes == sent && stats.received_bytes == sent, "%zu bytes sent, not %zu",
          (size_t)stats.sent_bytes, (size_t)sent);
    CHECK(job->world, stats.copied_bytes == 2 * used, "%zu bytes copied, not %zu", (size_t)stats.copied_bytes, 2 * used);
    CHECK(job->world,
          stats.balance == 1 && fabs(stats.backward_us + stats.exposed_us - stats.step_us) < 1 && stats.flight_buffers > 0,
          "balance %g, %g + %g us", stats.balance, stats.backward_us, stats.exposed_us);
    CHECK(job->world, shoal_reducer_ready_us(job->reducer, 0) >= 0 && shoal_reducer_ready_us(job->reducer, PARAMETERS) < 0,
          "times of readiness");
    CHECK(job->world, shoal_reducer_buffer_times(job->reducer, buffers, &times) == SHOAL_ERR_ARGUMENT, "a buffer too many");
}

static void callback_body(struct world *world)
{
    struct job job;
    for (int thread = 0; thread < 2; thread++) {
        struct calls calls = {.job = &job, .fails_at = SIZE_MAX};
        struct shoal_step_stats stats = SHOAL_STEP_STATS_INIT;
        bool in_view[PARAMETERS] = {false};
        open_job(&job, world, 11);
        job.options.on_buffer = on_buffer;
        job.options.on_buffer_arg = &calls;
        job.options.has_thread = thread;
        OK(world, create(&job));
        CHECK(world, shoal_reducer_stats(job.reducer, &stats) == SHOAL_PENDING, "statistics before the first step");
        for (; job.step < 3; job.step++) {
            calls.next = 0;
            OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
            for (size_t i = 0; i < PARAMETERS; i++)
                compute(&job, i, job.memory[i], 1);
            mark_all(&job, in_view);
            OK(world, shoal_reducer_finish(job.reducer, NULL));
            for (size_t i = 0; i < PARAMETERS; i++)
                CHECK(world, calls.seen[i] == job.step + 1, "%s was called %d times", job.names[i], calls.seen[i]);
            check_stats(&job);
        }
        close_job(&job);
    }
}

/* ---- Programs of an older header ----------------------------------------------------------------------------------------- */

#define OLD_BYTES 16 /* struct_bytes and the first field behind it */

/* The struct of such a program, at the end of a page behind which nothing may be read or written. */
static void *old_struct(struct world *world)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = OLD_BYTES;
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(world, memory != MAP_FAILED && mprotect(memory + page, page, PROT_NONE) == 0, "no memory");
    memcpy(memory + page - OLD_BYTES, &bytes, sizeof bytes);
    return memory + page - OLD_BYTES;
}

static void expect_old(struct world *world, const void *old, uint64_t first, const char *what)
{
    uint64_t words[2];
    memcpy(words, old, sizeof words);
    CHECK(world, words[0] == OLD_BYTES && words[1] == first, "%s: struct_bytes %d, then %d, not %d", what, (int)words[0],
          (int)words[1], (int)first);
}

/* Results have the fields that the program knows. A struct of 16 bytes has less than any struct of this header. */
static void older_program_body(struct world *world)
{
    float gradient[64] = {0};
    const struct shoal_parameter parameter = {64, SHOAL_FLOAT32, "only"};
    struct shoal_outer_options outer_options = SHOAL_OUTER_OPTIONS_INIT;
    void *memory = gradient, *old = old_struct(world);
    struct shoal_reducer *reducer;
    struct shoal_outer *outer;
    struct shoal_context *context;
    struct shoal_comm *comm;
    OK(world, shoal_context_create(old, &context)); /* options are read no further either */
    shoal_context_destroy(context);
    OK(world, shoal_comm_split(world->comm, 0, 0, old, &comm));
    OK(world, shoal_reducer_create(world->context, comm, &parameter, 1, NULL, &reducer));
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_ready(reducer, 0, gradient, 64));
    OK(world, shoal_reducer_finish(reducer, old));
    expect_old(world, old, 1, "shoal_reducer_finish");
    OK(world, shoal_reducer_stats(reducer, old));
    expect_old(world, old, 1, "shoal_reducer_stats");
    OK(world, shoal_gradient_layout_buffer(shoal_reducer_layout(reducer), 0, old));
    OK(world, shoal_reducer_buffer_times(reducer, 0, old));
    shoal_reducer_fail(reducer, SHOAL_ERR_STATE, "enough");
    OK(world, shoal_reducer_failure(reducer, old));
    CHECK(world, *(const int *)((const char *)old + 8) == SHOAL_ERR_STATE, "shoal_reducer_failure");
    shoal_reducer_free(reducer);
    outer_options.every = 1;
    OK(world, shoal_outer_create(world->context, comm, &parameter, 1, &memory, &outer_options, &outer));
    OK(world, shoal_outer_step(outer, &memory, old));
    expect_old(world, old, 1, "shoal_outer_step");
    OK(world, shoal_outer_stats(outer, old));
    expect_old(world, old, 1, "shoal_outer_stats");
    shoal_outer_free(outer);
    OK(world, shoal_batch_divide(64, 1, 2, old, NULL, 0));
    expect_old(world, old, 32, "shoal_batch_divide");
    shoal_comm_free(comm);
}

/* ---- A callback that returns no error ------------------------------------------------------------------------------------ */

static enum shoal_status still_pending(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    (void)arg, (void)buffer, (void)parameters, (void)count;
    return SHOAL_PENDING;
}

static void pending_body(struct world *world)
{
    float gradient[64] = {0};
    const struct shoal_parameter parameter = {64, SHOAL_FLOAT32, "only"};
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    struct shoal_reducer *reducer;
    options.on_buffer = still_pending;
    OK(world, shoal_reducer_create(world->context, world->comm, &parameter, 1, &options, &reducer));
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_ready(reducer, 0, gradient, 64));
    const enum shoal_status status = shoal_reducer_finish(reducer, NULL);
    OK(world, shoal_reducer_failure(reducer, &failure));
    CHECK(world, status == SHOAL_ERR_ABORTED && failure.status == status && strstr(failure.text, "failed with SHOAL_PENDING"),
          "%s: %s", shoal_status_name(status), failure.text);
    shoal_reducer_free(reducer);
}

/* ---- What is said of an error -------------------------------------------------------------------------------------------- */

static void expect_text(struct world *world, const char *text, const char *said)
{
    CHECK(world, strstr(text, said), "\"%s\" does not say \"%s\"", text, said);
}

static void expect_last(struct world *world, enum shoal_status found, enum shoal_status status, const char *said)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    CHECK(world, found == status, "%s, not %s", shoal_status_name(found), shoal_status_name(status));
    OK(world, shoal_last_failure(world->context, NULL, &failure));
    CHECK(world, failure.status == status, "the last failure is %s: %s", shoal_status_name(failure.status), failure.text);
    expect_text(world, failure.text, said);
}

static void report_body(struct world *world)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    CHECK(world, shoal_report(world->context, SHOAL_OK, "test", "nothing") == SHOAL_OK, "a status of success");
    CHECK(world, shoal_report(NULL, SHOAL_ERR_STATE, "test", "nothing") == SHOAL_ERR_STATE, "no context");
    CHECK(world, shoal_last_failure(world->context, NULL, &failure) == SHOAL_PENDING, "a failure that nobody reported");
    expect_last(world, shoal_report(world->context, SHOAL_ERR_SYSTEM, "test", "a line of a module"), SHOAL_ERR_SYSTEM,
                "a line of a module");
    expect_last(world, shoal_report(world->context, SHOAL_ERR_STATE, NULL, "one that is not logged"), SHOAL_ERR_STATE,
                "one that is not logged");
}

static void compare_body(struct world *world)
{
    struct job job;
    uint64_t hashes[PARAMETERS];
    open_job(&job, world, 12);
    OK(world, create(&job));
    for (size_t i = 0; i < PARAMETERS; i++)
        hashes[i] = shoal_bytes_hash(&i, sizeof i);
    OK(world, shoal_reducer_compare(job.reducer, hashes));
    hashes[20] += (uint64_t)world->rank;
    hashes[7] += world->rank == 2;
    expect_last(world, shoal_reducer_compare(job.reducer, hashes), SHOAL_ERR_MISMATCH,
                "parameter 7 (layer7) is not the same on all ranks after step 0: rank 2 differs from most");
    hashes[7] -= world->rank == 2;
    hashes[20] -= (uint64_t)world->rank;
    OK(world, shoal_reducer_compare(job.reducer, hashes));
    OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
    expect_last(world, shoal_reducer_compare(job.reducer, hashes), SHOAL_ERR_STATE, "inside a step");
    close_job(&job);
}

/* ---- Residuals in a checkpoint ------------------------------------------------------------------------------------------- */

#define SAVED ((size_t)3)
#define SAVED_MOST ((size_t)20000)

static const struct shoal_parameter saved_parameters[SAVED] = {
    {5000, SHOAL_FLOAT32, "first"}, {300, SHOAL_FLOAT32, "second"}, {SAVED_MOST, SHOAL_FLOAT32, "third"}};

static struct shoal_reducer *saved_create(struct world *world, struct shoal_comm *comm, size_t buffer_bytes,
                                          enum shoal_compression compression, const struct shoal_gradient_layout *layout)
{
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *reducer = NULL;
    options.buffer_bytes = buffer_bytes;
    options.rank_bytes = 1024;
    options.compression = compression;
    options.layout = layout;
    options.keeps_layout = 1;
    OK(world, shoal_reducer_create(world->context, comm, saved_parameters, SAVED, &options, &reducer));
    return reducer;
}

/* Each step has other gradients. Returns a hash of the averages. */
static uint64_t saved_step(struct world *world, struct shoal_reducer *reducer, uint64_t step)
{
    static float values[SAVED_MOST];
    uint64_t random = 1000 * step + (uint64_t)world->rank, hash = 0;
    OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    for (size_t p = 0; p < SAVED; p++) {
        for (size_t i = 0; i < saved_parameters[p].count; i++)
            values[i] = (float)((double)(reference_random(&random) >> 11) / 0x1p53 - 0.5);
        memcpy(shoal_reducer_view(reducer, p), values, saved_parameters[p].count * sizeof *values);
        OK(world, shoal_reducer_ready(reducer, p, shoal_reducer_view(reducer, p), saved_parameters[p].count));
    }
    OK(world, shoal_reducer_finish(reducer, NULL));
    for (size_t p = 0; p < SAVED; p++)
        hash = hash * 31 + shoal_bytes_hash(shoal_reducer_view(reducer, p), saved_parameters[p].count * sizeof *values);
    return hash;
}

static uint64_t saved_steps(struct world *world, struct shoal_reducer *reducer, uint64_t from, uint64_t to)
{
    uint64_t hash = 0;
    for (uint64_t step = from; step < to; step++)
        hash = hash * 31 + saved_step(world, reducer, step);
    return hash;
}

/* Steps after a checkpoint have the same bits as steps without one, and other bits if residuals are left out. */
static void resumed_body(struct world *world)
{
    struct shoal_reducer *whole = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_INT8, NULL);
    (void)saved_steps(world, whole, 0, 3);
    const size_t bytes = shoal_reducer_residual_bytes(whole);
    char *state = malloc(bytes);
    CHECK(world, state && bytes > sizeof(float) * SAVED_MOST / 4, "residuals of %zu bytes", bytes);
    OK(world, shoal_reducer_export_residuals(whole, state, bytes));
    struct shoal_reducer *resumed = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_INT8, shoal_reducer_layout(whole));
    struct shoal_reducer *without = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_INT8, shoal_reducer_layout(whole));
    OK(world, shoal_reducer_import_residuals(resumed, state, bytes));
    const uint64_t expected = saved_steps(world, whole, 3, 6);
    CHECK(world, saved_steps(world, resumed, 3, 6) == expected, "other bits than without the checkpoint");
    CHECK(world, saved_steps(world, without, 3, 6) != expected, "residuals change nothing");
    free(state);
    shoal_reducer_free(whole);
    shoal_reducer_free(resumed);
    shoal_reducer_free(without);
}

static void refuse_residuals(struct world *world, struct shoal_reducer *reducer, const void *state, size_t bytes,
                             const char *said)
{
    expect_last(world, shoal_reducer_import_residuals(reducer, state, bytes), SHOAL_ERR_ARGUMENT, said);
}

/* Residuals of this reducer that are another rank's, truncated, damaged, or imported at the wrong time. */
static void refuse_damaged_residuals(struct world *world, struct shoal_reducer *whole, const char *own, size_t bytes)
{
    char *all = calloc((size_t)world->size, bytes), *room = calloc(1, bytes);
    CHECK(world, all && room, "no memory");
    OK(world, shoal_allgather(world->comm, own, all, bytes, SHOAL_UINT8, NULL));
    refuse_residuals(world, whole, all + bytes * (size_t)((world->rank + 1) % world->size), bytes, "each rank takes its own");
    refuse_residuals(world, whole, own, bytes - 1, "cut short");
    refuse_residuals(world, whole, NULL, 0, "cut short, or none");
    all[0] = 0;
    refuse_residuals(world, whole, all, bytes, "these are no residuals");
    memcpy(all, own, bytes);
    all[8]++;
    refuse_residuals(world, whole, all, bytes, "of another version");
    memcpy(all, own, bytes);
    all[bytes - 1] ^= world->rank == 2;
    refuse_residuals(world, whole, all, bytes, world->rank == 2 ? "damaged" : "rank 2 was given none that it can take");
    OK(world, shoal_reducer_begin(whole, SHOAL_STEP_REDUCE));
    expect_last(world, shoal_reducer_import_residuals(whole, own, bytes), SHOAL_ERR_STATE, "inside a step");
    expect_last(world, shoal_reducer_export_residuals(whole, room, bytes), SHOAL_ERR_STATE, "inside a step");
    free(all);
    free(room);
}

/* Residuals of a reducer, for reducers that are made differently. */
static void refuse_others_residuals(struct world *world, const char *own, size_t bytes)
{
    struct shoal_comm *pair;
    struct shoal_reducer *other = saved_create(world, world->comm, 8 << 10, SHOAL_COMPRESS_INT8, NULL);
    refuse_residuals(world, other, own, bytes, "of another layout");
    shoal_reducer_free(other);
    other = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_BFLOAT16, NULL);
    CHECK(world, shoal_reducer_residual_bytes(other) == 0, "residuals without int8");
    OK(world, shoal_reducer_export_residuals(other, NULL, 0));
    OK(world, shoal_reducer_import_residuals(other, NULL, 0));
    refuse_residuals(world, other, own, bytes, "this reducer keeps none");
    shoal_reducer_free(other);
    OK(world, shoal_comm_split(world->comm, world->rank % 2, 0, NULL, &pair));
    other = saved_create(world, pair, 1 << 20, SHOAL_COMPRESS_INT8, NULL);
    refuse_residuals(world, other, own, bytes, "a world of 4 ranks on 2 hosts, this one has 2 ranks on 2: leave");
    shoal_reducer_free(other);
    shoal_comm_free(pair);
}

/* Residuals of something else. A refusal changes nothing, on any rank. */
static void residuals_refused_body(struct world *world)
{
    struct shoal_reducer *whole = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_INT8, NULL);
    (void)saved_steps(world, whole, 0, 1);
    const size_t bytes = shoal_reducer_residual_bytes(whole);
    char *own = calloc(1, bytes);
    CHECK(world, own, "no memory");
    expect_last(world, shoal_reducer_export_residuals(whole, own, bytes - 1), SHOAL_ERR_ARGUMENT, "there is room for");
    OK(world, shoal_reducer_export_residuals(whole, own, bytes));
    refuse_damaged_residuals(world, whole, own, bytes);
    refuse_others_residuals(world, own, bytes);
    shoal_reducer_free(whole);
    whole = saved_create(world, world->comm, 1 << 20, SHOAL_COMPRESS_INT8, NULL);
    OK(world, shoal_reducer_import_residuals(whole, own, bytes)); /* these are valid */
    shoal_reducer_free(whole);
    free(own);
}

static void unequal_hosts_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 18);
    job.options.compression = SHOAL_COMPRESS_INT8;
    expect_last(world, create(&job), SHOAL_ERR_UNSUPPORTED, "compression needs as many ranks on each host: ");
    close_job(&job);
}

/* A wrong argument on one rank is reported on all ranks. */
static void expect_refused(struct job *job, enum shoal_status status, const char *said)
{
    expect_last(job->world, create(job), status, said);
    close_job(job);
}

static void refuse_parameters(struct world *world, bool is_odd)
{
    struct job job;
    open_job(&job, world, 13);
    job.parameters[17] = (struct shoal_parameter){is_odd ? 11 : 10, SHOAL_FLOAT32, "head"};
    expect_refused(&job, SHOAL_ERR_MISMATCH,
                   "parameter 17 differs: rank 0 has 10 elements of float32 (head), rank 2 has 11 elements of float32 (head)");
    open_job(&job, world, 13);
    job.parameters[3].type = is_odd ? SHOAL_BFLOAT16 : SHOAL_FLOAT16;
    job.parameters[2].name = is_odd || world->rank == 3 ? "other" : "same";
    expect_refused(&job, SHOAL_ERR_MISMATCH, "parameter 2 differs: rank 0 has");
    open_job(&job, world, 13);
    job.parameters[5].type = is_odd ? SHOAL_INT32 : SHOAL_FLOAT32;
    expect_refused(&job, SHOAL_ERR_ARGUMENT, "rank 2: parameter 5 (layer5) has type 5 (int32)");
}

static void refuse_options(struct world *world, bool is_odd)
{
    struct job job;
    open_job(&job, world, 13);
    job.options.buffer_bytes = is_odd ? 4096 : 8192;
    expect_refused(&job, SHOAL_ERR_MISMATCH, "options differ: buffer_bytes is 8192 on rank 0, 4096 on rank 2");
    open_job(&job, world, 13);
    job.options.max_norm = is_odd ? 1 : 0.5;
    expect_refused(&job, SHOAL_ERR_MISMATCH, "options differ: max_norm is 0.5 on rank 0, 1 on rank 2");
    open_job(&job, world, 13);
    job.options.op = is_odd ? SHOAL_MAX : SHOAL_AVG;
    expect_refused(&job, SHOAL_ERR_ARGUMENT, "rank 2: options->op is neither SHOAL_AVG nor SHOAL_SUM");
    open_job(&job, world, 13);
    job.options.struct_bytes = is_odd ? 8 : job.options.struct_bytes;
    expect_refused(&job, SHOAL_ERR_ARGUMENT, "rank 2: options->struct_bytes is not set");
}

static void refuse_layouts(struct world *world, bool is_odd)
{
    struct shoal_gradient_layout *layout;
    struct shoal_gradient_layout_options wanted = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    struct job job;
    open_job(&job, world, 13);
    wanted.ranks = world->size + is_odd;
    OK(world, shoal_gradient_layout_create(job.parameters, PARAMETERS, &wanted, &layout, NULL, 0));
    job.options.layout = layout;
    expect_refused(&job, SHOAL_ERR_ARGUMENT, "rank 2: options->layout is for 5 ranks, the communicator has 4");
    shoal_gradient_layout_free(layout);
    open_job(&job, world, 13);
    wanted.ranks = world->size;
    OK(world, shoal_gradient_layout_create(job.parameters, PARAMETERS, &wanted, &layout, NULL, 0));
    job.parameters[4].count++;
    job.options.layout = layout;
    expect_refused(&job, SHOAL_ERR_ARGUMENT, "rank 0: options->layout is of another model: parameter 4 (layer4) has");
    shoal_gradient_layout_free(layout);
    open_job(&job, world, 13);
    uint32_t order[PARAMETERS];
    for (uint32_t i = 0; i < PARAMETERS; i++)
        order[i] = is_odd ? PARAMETERS - 1 - i : i;
    job.options.order = order;
    expect_refused(&job, SHOAL_ERR_MISMATCH, "options differ: the hash of the layout is ");
}

/* A layout file of another model is refused where it is read. If that rank goes on without it, every rank is told. */
static void refuse_layout_file(struct world *world, bool is_odd)
{
    struct shoal_gradient_layout *layout = NULL;
    struct shoal_gradient_layout_options wanted = SHOAL_GRADIENT_LAYOUT_OPTIONS_INIT;
    struct job job;
    char *text = NULL, error[256] = "";
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    open_job(&job, world, 13);
    wanted.ranks = world->size;
    job.parameters[4].count += is_odd;
    OK(world, shoal_gradient_layout_create(job.parameters, PARAMETERS, &wanted, &layout, NULL, 0));
    OK(world, shoal_gradient_layout_print(layout, file));
    fclose(file);
    shoal_gradient_layout_free(layout);
    layout = NULL;
    job.parameters[4].count -= is_odd;
    const enum shoal_status status =
        shoal_gradient_layout_parse(text, bytes, job.parameters, PARAMETERS, &layout, error, sizeof error);
    CHECK(world, status == (is_odd ? SHOAL_ERR_ARGUMENT : SHOAL_OK), "%s: %s", shoal_status_name(status), error);
    if (is_odd)
        expect_text(world, error, "line 9: the file is of another model: parameter 4 (layer4) has ");
    free(text);
    job.options.layout = layout;
    expect_refused(&job, SHOAL_ERR_MISMATCH, "options differ: a given layout is 1 on rank 0, 0 on rank 2");
    shoal_gradient_layout_free(layout);
}

/* Rank 2 (is_odd) differs from the others or is wrong. Every rank gets the error. */
static void lists_body(struct world *world)
{
    refuse_parameters(world, world->rank == 2);
    refuse_options(world, world->rank == 2);
    refuse_layouts(world, world->rank == 2);
    refuse_layout_file(world, world->rank == 2);
}

/* Lists of different lengths. */
static void length_body(struct world *world)
{
    struct job job;
    open_job(&job, world, 14);
    expect_last(world,
                shoal_reducer_create(world->context, world->comm, job.parameters, world->rank == 1 ? 20 : PARAMETERS,
                                     &job.options, &job.reducer),
                SHOAL_ERR_MISMATCH, "parameter 20 differs: rank 0 has ");
    expect_last(world,
                shoal_reducer_create(world->context, world->comm, job.parameters, world->rank == 0 ? 20 : PARAMETERS,
                                     &job.options, &job.reducer),
                SHOAL_ERR_MISMATCH, "rank 0 has no such parameter (it has 20), rank 1 has ");
    close_job(&job);
}

/* Refusals leave the reducer as it was. */
static void refusals_body(struct world *world)
{
    struct job job;
    int more;
    open_job(&job, world, 15);
    job.parameters[3].count = 30;
    OK(world, create(&job));
    expect_last(world, shoal_reducer_finish(job.reducer, NULL), SHOAL_ERR_STATE, "no step has begun");
    expect_last(world, shoal_reducer_ready(job.reducer, 3, job.memory[3], 30), SHOAL_ERR_STATE,
                "shoal_reducer_ready of parameter 3 (layer3) outside a step");
    OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
    expect_last(world, shoal_reducer_ready(job.reducer, 3, job.memory[3], 31), SHOAL_ERR_ARGUMENT,
                "parameter 3 (layer3) has 30 elements, its gradient 31");
    expect_last(world, shoal_reducer_ready(job.reducer, 3, NULL, 30), SHOAL_ERR_ARGUMENT, "at NULL");
    expect_last(world, shoal_reducer_ready(job.reducer, PARAMETERS, job.memory[3], 30), SHOAL_ERR_ARGUMENT,
                "there is no parameter 23, as there are 23");
    expect_last(world, shoal_reducer_ready_part(job.reducer, 3, job.memory[3], 20, 11), SHOAL_ERR_ARGUMENT,
                "parameter 3 (layer3) has 30 elements, the part is of 11 from 20 on");
    expect_last(world, shoal_reducer_unused(job.reducer, 3), SHOAL_ERR_STATE, "without allows_unused");
    expect_last(world, shoal_reducer_join(job.reducer, &more, NULL), SHOAL_ERR_STATE, "without is_uneven");
    expect_last(world, shoal_reducer_begin(job.reducer, (enum shoal_step)7), SHOAL_ERR_ARGUMENT, "no kind of step 7");
    CHECK(world, !shoal_reducer_view(job.reducer, PARAMETERS), "a view of nothing");
    run_step(&job);
    OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
    compute(&job, 0, job.memory[0], 1);
    OK(world, shoal_reducer_ready(job.reducer, 0, job.memory[0], job.parameters[0].count));
    expect_last(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE), SHOAL_ERR_STATE,
                "step 2 was not finished: 1 of 23 gradients are ready in it, after 1 marks");
    close_job(&job);
}

/* ---- Faults of one rank, reported on every rank -------------------------------------------------------------------------- */

/* WRONG_LENGTH: a gradient is refused, and the program continues without it. WRONG_LENGTH_TOLD: the program fails the step
 * with the refusal's text. */
enum fault {
    MARKED_TWICE,
    PART_TWICE,
    NEVER_MARKED,
    HALF_MARKED,
    CALLBACK_FAILS,
    CALLER_FAILS,
    WRONG_LENGTH,
    WRONG_LENGTH_TOLD,
    FAULTS
};

static const struct {
    enum shoal_status status;
    const char *text;
} told[FAULTS] = {
    [MARKED_TWICE] = {SHOAL_ERR_STATE, "gradients, step 2, rank 1: parameter 4 (layer4) was marked twice"},
    [PART_TWICE] = {SHOAL_ERR_STATE, "gradients, step 2, rank 1: parameter 5 (layer5) was marked twice"},
    [NEVER_MARKED] = {SHOAL_ERR_STATE, "gradients, step 2, rank 1: 2 of 23 gradients were not marked when the step ended: "
                                       "parameter 4 (layer4), parameter 9 (layer9)"},
    [HALF_MARKED] = {SHOAL_ERR_STATE, "gradients, step 2, rank 1: 1 of 23 gradients were not marked whole when the step ended: "
                                      "parameter 5 (layer5)"},
    [CALLBACK_FAILS] = {SHOAL_ERR_SYSTEM, "rank 1: the callback of buffer 1 (parameter "},
    [CALLER_FAILS] = {SHOAL_ERR_ABORTED, "gradients, step 2, rank 1: the loss was not a number"},
    [WRONG_LENGTH] = {SHOAL_ERR_STATE, "gradients, step 2, rank 1: 1 of 23 gradients were not marked when the step ended: "
                                       "parameter 4 (layer4)"},
    [WRONG_LENGTH_TOLD] = {SHOAL_ERR_ARGUMENT,
                           "rank 1: shoal_reducer_ready: parameter 4 (layer4) has 70 elements, its gradient 71"},
};

static enum shoal_status mark_whole(struct job *job, size_t parameter)
{
    return shoal_reducer_ready(job->reducer, parameter, job->memory[parameter], job->parameters[parameter].count);
}

static enum shoal_status mark_half(struct job *job, size_t parameter, bool overlaps)
{
    const size_t half = job->parameters[parameter].count / 2;
    const enum shoal_status status = shoal_reducer_ready_part(job->reducer, parameter, job->memory[parameter], 0, half);
    return status == SHOAL_OK && overlaps
               ? shoal_reducer_ready_part(job->reducer, parameter, job->memory[parameter], half - 1, 2)
               : status;
}

static void mark_too_long(struct job *job, size_t parameter, bool is_told)
{
    struct shoal_failure refusal = SHOAL_FAILURE_INIT;
    expect_last(job->world,
                shoal_reducer_ready(job->reducer, parameter, job->memory[parameter], job->parameters[parameter].count + 1),
                SHOAL_ERR_ARGUMENT, "parameter 4 (layer4) has 70 elements, its gradient 71");
    OK(job->world, shoal_last_failure(job->world->context, NULL, &refusal));
    if (is_told)
        shoal_reducer_fail(job->reducer, refusal.status, refusal.text);
}

/* The faulty rank does this instead of marking a parameter. */
static enum shoal_status mark_badly(struct job *job, enum fault fault, size_t parameter)
{
    if (fault == NEVER_MARKED && (parameter == 4 || parameter == 9))
        return SHOAL_OK;
    if ((fault == PART_TWICE || fault == HALF_MARKED) && parameter == 5)
        return mark_half(job, parameter, fault == PART_TWICE);
    if ((fault == WRONG_LENGTH || fault == WRONG_LENGTH_TOLD) && parameter == 4) {
        mark_too_long(job, parameter, fault == WRONG_LENGTH_TOLD);
        return SHOAL_OK;
    }
    if (fault == CALLER_FAILS && parameter == 12)
        shoal_reducer_fail(job->reducer, SHOAL_ERR_ABORTED, "the loss was not a number");
    const enum shoal_status status = mark_whole(job, parameter);
    return status == SHOAL_OK && fault == MARKED_TWICE && parameter == 4 ? mark_whole(job, parameter) : status;
}

static enum shoal_status mark_with(struct job *job, enum fault fault, bool is_at_fault)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        compute(job, i, job->memory[i], 1);
        const enum shoal_status status = is_at_fault ? mark_badly(job, fault, i) : mark_whole(job, i);
        if (status != SHOAL_OK)
            return status;
    }
    return shoal_reducer_finish(job->reducer, NULL);
}

static enum shoal_status step_with(struct job *job, enum fault fault, bool is_at_fault)
{
    const enum shoal_status status = shoal_reducer_begin(job->reducer, SHOAL_STEP_REDUCE);
    return status == SHOAL_OK ? mark_with(job, fault, is_at_fault) : status;
}

struct fault_case {
    enum fault fault;
    enum shoal_compression compression;
};

/* A rank whose step ended before another's callback failed gets the error in the next step. */
static void fault_body(struct world *world)
{
    const struct fault_case *at = world->arg;
    const enum fault fault = at->fault;
    struct job job;
    struct calls calls = {.job = &job, .fails_at = SIZE_MAX};
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    open_job(&job, world, 15);
    job.parameters[4].count = 70;
    job.parameters[5].count = 100;
    job.options.compression = at->compression;
    job.options.on_buffer = fault == CALLBACK_FAILS ? on_buffer : NULL;
    job.options.on_buffer_arg = &calls;
    OK(world, create(&job));
    OK(world, step_with(&job, FAULTS, false));
    job.step++;
    CHECK(world, shoal_reducer_failure(job.reducer, &failure) == SHOAL_PENDING, "a failure before the fault");
    OK(world, shoal_barrier(world->comm, NULL)); /* else a rank that is still in the first step may get the error there */
    calls.next = 0;
    calls.fails_at = world->rank == 1 ? 1 : SIZE_MAX;
    enum shoal_status status = step_with(&job, fault, world->rank == 1);
    if (status == SHOAL_OK && fault == CALLBACK_FAILS) {
        job.step++;
        calls.next = 0;
        status = step_with(&job, FAULTS, false);
    }
    expect_last(world, status, told[fault].status, told[fault].text);
    OK(world, shoal_reducer_failure(job.reducer, &failure));
    CHECK(world, failure.rank == 1 && failure.status == status, "rank %d is blamed", failure.rank);
    expect_text(world, failure.text, told[fault].text);
    if (fault == MARKED_TWICE || fault == NEVER_MARKED || fault == WRONG_LENGTH)
        expect_text(world, failure.operation, "parameter 4 (layer4)");
    expect_last(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE), told[fault].status, told[fault].text);
    close_job(&job);
}

/* Two ranks give up at once, each with its own text. All ranks name the same one of the two. */
static void both_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    char own[32], wanted[64];
    open_job(&job, world, 18);
    job.options.compression = *(const enum shoal_compression *)world->arg;
    OK(world, create(&job));
    OK(world, step_with(&job, FAULTS, false));
    job.step++;
    OK(world, shoal_barrier(world->comm, NULL));
    snprintf(own, sizeof own, "the reason of rank %d", world->rank);
    if (world->rank == 1 || world->rank == 2)
        shoal_reducer_fail(job.reducer, SHOAL_ERR_SYSTEM, own);
    CHECK(world, step_with(&job, FAULTS, false) == SHOAL_ERR_SYSTEM, "another status");
    OK(world, shoal_reducer_failure(job.reducer, &failure));
    snprintf(wanted, sizeof wanted, "gradients, step 2, rank %d: the reason of rank %d", failure.rank, failure.rank);
    CHECK(world, (failure.rank == 1 || failure.rank == 2) && failure.is_given && strcmp(failure.text, wanted) == 0, "%s",
          failure.text);
    int64_t least = failure.rank, most = failure.rank;
    OK(world, shoal_allreduce(world->comm, &least, &least, 1, SHOAL_INT64, SHOAL_MIN, NULL));
    OK(world, shoal_allreduce(world->comm, &most, &most, 1, SHOAL_INT64, SHOAL_MAX, NULL));
    CHECK(world, least == most, "some name rank %d, others rank %d", (int)least, (int)most);
    close_job(&job);
}

/* A rank dies in mid-step: the others name it, and what they were at. */
static void killed_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    open_job(&job, world, 16);
    job.options.compression = world->arg ? *(const enum shoal_compression *)world->arg : SHOAL_COMPRESS_NONE;
    job.options.keeps_layout = 1; /* else a slow rank may still be in the exchange at the begin of the second step */
    OK(world, create(&job));
    OK(world, step_with(&job, FAULTS, false));
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    if (world->rank == 2) { /* ends without a word; with code 0, as the harness wants it */
        job.step++;
        OK(world, shoal_reducer_begin(job.reducer, SHOAL_STEP_REDUCE));
        for (size_t i = PARAMETERS / 2; i < PARAMETERS; i++) {
            compute(&job, i, job.memory[i], 1);
            OK(world, shoal_reducer_ready(job.reducer, i, job.memory[i], job.parameters[i].count));
        }
        _exit(0);
    }
    const enum shoal_status status = step_with(&job, FAULTS, false);
    OK(world, shoal_reducer_failure(job.reducer, &failure));
    CHECK(world, status == SHOAL_ERR_PEER_LOST && failure.rank == 2, "%s: %s", shoal_status_name(status), failure.text);
    expect_text(world, failure.text, "gradients, step 2, buffer ");
    expect_text(world, failure.text, "parameter ");
    expect_text(world, failure.text, "rank 2");
    close_job(&job);
    _exit(0); /* the world's communicator is broken, too */
}

/* ---- Leaving a failed step ----------------------------------------------------------------------------------------------- */

enum leaving { FINISH_MISSES_A_GRADIENT, FINISH_AFTER_A_FAILURE, JOIN_AFTER_A_FAILURE, LEAVINGS };

struct slow_callback {
    atomic_bool has_begun, may_end, has_ended;
};

static enum shoal_status be_slow(void *arg, size_t buffer, const uint32_t *parameters, size_t count)
{
    struct slow_callback *slow = arg;
    (void)buffer, (void)parameters, (void)count;
    atomic_store(&slow->has_begun, true);
    while (!atomic_load(&slow->may_end))
        usleep(1000);
    usleep(100000);
    atomic_store(&slow->has_ended, true);
    return SHOAL_OK;
}

/* The caller frees its gradients after finish and join, so the reducer's thread may not be in the callback then. */
static void leaving_body(struct world *world)
{
    const struct shoal_parameter parameters[2] = {{64, SHOAL_FLOAT32, "first"}, {64, SHOAL_FLOAT32, "last"}};
    float gradients[2][64] = {{0}};
    for (enum leaving way = 0; way < LEAVINGS; way++) {
        struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
        struct slow_callback slow = {false, false, false};
        struct shoal_reducer *reducer;
        int more = 0;
        options.buffer_bytes = options.first_buffer_bytes = options.rank_bytes = 1;
        options.has_thread = options.is_uneven = 1;
        options.on_buffer = be_slow;
        options.on_buffer_arg = &slow;
        OK(world, shoal_reducer_create(world->context, world->comm, parameters, 2, &options, &reducer));
        OK(world, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
        OK(world, shoal_reducer_ready(reducer, 1, gradients[1], 64));
        while (!atomic_load(&slow.has_begun))
            usleep(1000);
        OK(world, shoal_barrier(world->comm, NULL)); /* a failure would keep the other rank's callback away */
        atomic_store(&slow.may_end, true);
        if (way != FINISH_MISSES_A_GRADIENT)
            shoal_reducer_fail(reducer, SHOAL_ERR_STATE, "the loss was not a number");
        const enum shoal_status status =
            way == JOIN_AFTER_A_FAILURE ? shoal_reducer_join(reducer, &more, NULL) : shoal_reducer_finish(reducer, NULL);
        CHECK(world, atomic_load(&slow.has_ended), "way %d: %s came during the callback", (int)way, shoal_status_name(status));
        CHECK(world, status == SHOAL_ERR_STATE, "way %d: %s", (int)way, shoal_status_name(status));
        shoal_reducer_free(reducer);
    }
}

/* What world_options.arg points to. */
static const enum shoal_compression float16 = SHOAL_COMPRESS_FLOAT16, bfloat16 = SHOAL_COMPRESS_BFLOAT16,
                                    int8 = SHOAL_COMPRESS_INT8, none = SHOAL_COMPRESS_NONE;

static void run_on_one_host(void)
{
    world_divide(0);
    world_run(&(struct world_options){"reducer_steps_are_exact, 2 ranks", 2, NULL, steps_body, NULL});
    world_run(&(struct world_options){"reducer_steps_are_exact, 4 ranks", 4, NULL, steps_body, NULL});
    world_run(&(struct world_options){"reducer_steps_are_exact, 1 rank", 1, NULL, steps_body, NULL});
    world_run(&(struct world_options){"reducer_layout_follows_rank_0_once", 4, NULL, layout_body, NULL});
    world_run(&(struct world_options){"reducer_local_steps_add_up", 2, NULL, local_body, NULL});
    world_run(&(struct world_options){"reducer_unused_parameters", 4, NULL, unused_body, NULL});
    world_run(&(struct world_options){"reducer_norms_and_clipping", 4, NULL, norms_body, NULL});
    world_run(&(struct world_options){"reducer_names_what_is_not_finite", 4, NULL, finite_body, NULL});
    world_run(&(struct world_options){"reducer_uneven_steps", 4, NULL, uneven_body, NULL});
    world_run(&(struct world_options){"reducer_averages_of_large_values", 4, NULL, large_body, &none});
    world_run(&(struct world_options){"reducer_callbacks_and_statistics", 2, NULL, callback_body, NULL});
    world_run(&(struct world_options){"reducer_serves_programs_of_an_older_header", 1, NULL, older_program_body, NULL});
    world_run(&(struct world_options){"reducer_fails_when_a_callback_returns_pending", 1, NULL, pending_body, NULL});
    world_run(&(struct world_options){"report_is_the_last_failure", 1, NULL, report_body, NULL});
    world_run(&(struct world_options){"reducer_compares_parameters", 4, NULL, compare_body, NULL});
    world_run(&(struct world_options){"reducer_lists_that_differ", 4, NULL, lists_body, NULL});
    world_run(&(struct world_options){"reducer_lists_of_other_lengths", 2, NULL, length_body, NULL});
    world_run(&(struct world_options){"reducer_refusals_change_nothing", 2, NULL, refusals_body, NULL});
    world_run(&(struct world_options){"reducer_steps_are_exact, one host, int8", 2, NULL, steps_body, &int8});
    world_run(&(struct world_options){"reducer_a_rank_dies_in_mid_step", 4, NULL, killed_body, NULL});
    world_run(&(struct world_options){"reducer_is_left_after_its_thread", 2, NULL, leaving_body, NULL});
    world_run(&(struct world_options){"reducer_two_ranks_give_up_at_once", 4, NULL, both_body, &none});
}

static const char *const fault_names[FAULTS] = {"marked twice",      "a part marked twice",    "never marked",
                                                "marked in half",    "a callback fails",       "the caller gives up",
                                                "of a wrong length", "of a wrong length, told"};

static void run_faults(void)
{
    for (enum fault fault = 0; fault < FAULTS; fault++) {
        char name[96];
        const struct fault_case here = {fault, SHOAL_COMPRESS_NONE}, between = {fault, SHOAL_COMPRESS_BFLOAT16};
        snprintf(name, sizeof name, "reducer_faults_are_told_on_all_ranks, %s", fault_names[fault]);
        world_divide(0);
        world_run(&(struct world_options){name, 4, NULL, fault_body, &here});
        world_divide(2);
        snprintf(name, sizeof name, "reducer_faults_are_told_on_all_ranks, 2 hosts, %s", fault_names[fault]);
        world_run(&(struct world_options){name, 4, NULL, fault_body, &between});
    }
}

static void run_on_two_hosts(void)
{
    world_divide(2);
    world_run(&(struct world_options){"reducer_steps_are_exact, 2 hosts", 4, NULL, steps_body, NULL});
    world_run(&(struct world_options){"reducer_steps_are_exact, 2 hosts, float16", 4, NULL, steps_body, &float16});
    world_run(&(struct world_options){"reducer_averages_of_large_values, 2 hosts, float16", 4, NULL, large_body, &float16});
    world_run(&(struct world_options){"reducer_errors_of_8_bits_come_back", 4, NULL, error_body, NULL});
    world_run(&(struct world_options){"reducer_counts_what_is_sent, 2 hosts", 4, NULL, wire_body, &none});
    world_run(&(struct world_options){"reducer_counts_what_is_sent, 2 hosts, bfloat16", 4, NULL, wire_body, &bfloat16});
    world_run(&(struct world_options){"reducer_counts_what_is_sent, 2 hosts, int8", 4, NULL, wire_body, &int8});
    world_run(&(struct world_options){"reducer_norms_and_clipping, 2 hosts", 4, NULL, norms_body, NULL});
    world_run(&(struct world_options){"reducer_norms_and_clipping, 2 hosts, int8", 4, NULL, compressed_norms_body, NULL});
    world_run(&(struct world_options){"reducer_resumes_with_residuals, 2 hosts", 4, NULL, resumed_body, NULL});
    world_run(&(struct world_options){"reducer_refuses_residuals_of_others", 4, NULL, residuals_refused_body, NULL});
    world_run(&(struct world_options){"reducer_refuses_unequal_hosts", 3, NULL, unequal_hosts_body, NULL});
    world_run(&(struct world_options){"reducer_two_ranks_give_up_at_once, 2 hosts, int8", 4, NULL, both_body, &int8});
    world_run(&(struct world_options){"reducer_a_rank_dies_in_mid_step, 2 hosts, int8", 4, NULL, killed_body, &int8});
}

static void run_on_four_hosts(void)
{
    world_divide(1); /* ranks on a host */
    world_run(&(struct world_options){"reducer_counts_what_is_sent, 4 hosts", 4, NULL, wire_body, &none});
    world_run(&(struct world_options){"reducer_counts_what_is_sent, 4 hosts, int8", 4, NULL, wire_body, &int8});
    world_run(&(struct world_options){"reducer_resumes_with_residuals, 4 hosts", 4, NULL, resumed_body, NULL});
    world_run(&(struct world_options){"reducer_steps_are_exact, 4 hosts, bfloat16", 4, NULL, steps_body, &bfloat16});
}

int main(void)
{
    run_on_one_host();
    run_faults();
    run_on_two_hosts();
    run_on_four_hosts();
    return world_finish();
}
