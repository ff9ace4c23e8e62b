/* Reducers with gradients on a device, over the stand-in driver. They produce the same bits as a reducer in host memory,
 * for all types, sizes, kinds of marks and of compression. Also tests what they refuse, and faults: afterwards all ranks
 * report the same cause, no stream waits and nothing is left. */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "device_bench.h"
#include "marking_threads.h"
#include "reference.h"
#include "shoal/gradients.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 11
#define ELEMENTS_MAX 5000
#define STEPS 4

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* ---- Two reducers of one model ------------------------------------------------------------------------------------------- */

/* One parameter's gradient: its input in a step and its result, on both sides. */
struct gradient {
    char *given, *before; /* sources of this step's upload and of the previous one's, which the stream may not have run yet */
    char *host, *device;
    char *back; /* the download's target */
    bool is_in_view;
    bool is_left_out; /* left out of the step; its average is in the view only */
};

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    struct gradient gradients[PARAMETERS];
    struct shoal_reducer_options options; /* of the reducer on the device */
    struct shoal_reducer *host, *device;
    void *stream;
    uint64_t random; /* this rank's own */
    uint64_t shared; /* the same on all ranks */
    bool leaves_out; /* steps leave some gradients out, different ones on each rank */
    bool has_wholes; /* gradients are marked whole; for parts the processor adds their squares in order of arrival */
};

static size_t bytes_of(const struct job *job, size_t parameter)
{
    return job->parameters[parameter].count * shoal_type_bytes(job->parameters[parameter].type);
}

static void open_job(struct job *job, struct world *world, const char *modes, uint64_t seed)
{
    memset(job, 0, sizeof *job);
    mock_device_start(modes);
    job->world = world;
    job->shared = seed;
    job->random = seed * 100 + (uint64_t)world->rank + 1;
    job->stream = mock_device_take_stream();
    job->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    job->options.buffer_bytes = 16 << 10;
    job->options.first_buffer_bytes = 4 << 10;
    job->options.rank_bytes = 1024;
    job->options.is_on_device = 1;
    job->options.stream = job->stream;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 4 ? 700 : ELEMENTS_MAX;
        const enum shoal_type type = i % 2 ? SHOAL_FLOAT32 : types[reference_below(&job->shared, COUNT_OF(types))];
        job->parameters[i] = (struct shoal_parameter){reference_below(&job->shared, most), type, NULL};
        struct gradient *gradient = &job->gradients[i];
        gradient->given = calloc(ELEMENTS_MAX, 8);
        gradient->before = calloc(ELEMENTS_MAX, 8);
        gradient->host = calloc(ELEMENTS_MAX, 8);
        gradient->back = calloc(ELEMENTS_MAX, 8);
        gradient->device = mock_device_allocate(ELEMENTS_MAX * 8);
    }
}

static enum shoal_status create_few(struct job *job, size_t count)
{
    return shoal_reducer_create(job->world->context, job->world->comm, job->parameters, count, &job->options, &job->device);
}

static enum shoal_status create_on_device(struct job *job)
{
    return create_few(job, PARAMETERS);
}

static void create_both(struct job *job)
{
    struct shoal_reducer_options options = job->options;
    options.is_on_device = 0;
    options.on_buffer = NULL;
    OK(job->world, create_on_device(job));
    OK(job->world,
       shoal_reducer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &options, &job->host));
}

/* Fails if anything is left in the driver. Ends the process. */
static void close_job(struct job *job)
{
    static const char *const kinds[] = {"registrations", "streams", "events", "operations", "allocations", "modules"};
    char text[256];
    mock_device_synchronize(job->stream);
    shoal_reducer_free(job->host);
    shoal_reducer_free(job->device);
    for (size_t i = 0; i < PARAMETERS; i++)
        mock_device_release(job->gradients[i].device);
    mock_device_stop();
    shoal_context_destroy(job->world->context);
    if (mock_device_is_real())
        exit(0);
    CHECK(job->world, control.faults_of(text, sizeof text) == 0, "%s", text);
    for (size_t i = 0; i < COUNT_OF(kinds); i++)
        CHECK(job->world, control.count_of(kinds[i]) == 0, "%zu %s are left", control.count_of(kinds[i]), kinds[i]);
    CHECK(job->world, control.count_of("blocks") <= 8, "a launch had %zu blocks", control.count_of("blocks"));
    exit(0);
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* Draws finite values whose sums stay finite. Rounding shows the order in which they were added. */
static void draw(struct job *job, size_t parameter)
{
    const size_t count = job->parameters[parameter].count;
    char *given = job->gradients[parameter].given;
    for (size_t i = 0; i < count; i++) {
        const float value = (float)((double)(int64_t)reference_random(&job->random) * 0x1p-60);
        uint32_t word;
        memcpy(&word, &value, sizeof word);
        if (job->parameters[parameter].type == SHOAL_FLOAT32)
            ((float *)(void *)given)[i] = value;
        else if (job->parameters[parameter].type == SHOAL_FLOAT64)
            ((double *)(void *)given)[i] = (double)value;
        else if (job->parameters[parameter].type == SHOAL_BFLOAT16)
            ((uint16_t *)(void *)given)[i] = (uint16_t)(word >> 16);
        else /* 1 to 2, or negative */
            ((uint16_t *)(void *)given)[i] = (uint16_t)((word >> 16 & 0x8000) | 0x3c00 | (word & 0x3ff));
    }
}

/* Stands in for the kernels of the backward pass: the stream writes the gradient before its mark. */
static void *give(struct job *job, size_t parameter)
{
    struct gradient *gradient = &job->gradients[parameter];
    char *given = gradient->given;
    gradient->given = gradient->before;
    gradient->before = given;
    draw(job, parameter);
    char *there = gradient->is_in_view ? shoal_reducer_view(job->device, parameter) : gradient->device;
    if (bytes_of(job, parameter))
        mock_device_upload(there, gradient->given, bytes_of(job, parameter), job->stream);
    memcpy(gradient->host, gradient->given, bytes_of(job, parameter));
    return there;
}

static enum shoal_status mark(struct job *job, struct shoal_reducer *reducer, size_t parameter, char *memory, size_t middle)
{
    const size_t count = job->parameters[parameter].count, element = shoal_type_bytes(job->parameters[parameter].type);
    if (!middle)
        return shoal_reducer_ready(reducer, parameter, memory, count);
    const enum shoal_status status =
        shoal_reducer_ready_part(reducer, parameter, memory + middle * element, middle, count - middle);
    return status == SHOAL_OK ? shoal_reducer_ready_part(reducer, parameter, memory, 0, middle) : status;
}

/* Marks a gradient on both sides, whole or in two parts. */
static void mark_both(struct job *job, size_t parameter)
{
    const size_t count = job->parameters[parameter].count;
    const bool is_whole = job->has_wholes || !count || reference_below(&job->random, 3);
    const size_t middle = is_whole ? 0 : reference_below(&job->random, count);
    OK(job->world, mark(job, job->device, parameter, give(job, parameter), middle));
    OK(job->world, mark(job, job->host, parameter, job->gradients[parameter].host, middle));
}

static bool is_zero(const char *bytes, size_t count)
{
    bool is_all = true;
    for (size_t i = 0; i < count; i++)
        is_all &= !bytes[i];
    return is_all;
}

/* Work put on the stream after finish sees the averages, without waiting first. */
static void expect_alike(struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        const struct gradient *gradient = &job->gradients[i];
        const bool is_in_view = gradient->is_in_view || gradient->is_left_out || job->options.results_in_views;
        const char *there = is_in_view ? shoal_reducer_view(job->device, i) : gradient->device;
        if (bytes_of(job, i))
            mock_device_download(gradient->back, there, bytes_of(job, i), job->stream);
    }
    OK(job->world, shoal_reducer_wait(job->device, SHOAL_FOREVER));
    mock_device_synchronize(job->stream);
    for (size_t i = 0; i < PARAMETERS; i++) {
        const struct gradient *gradient = &job->gradients[i];
        const bool is_in_view = gradient->is_left_out || job->options.results_in_views;
        const char *here = is_in_view ? shoal_reducer_view(job->host, i) : gradient->host;
        const size_t element = shoal_type_bytes(job->parameters[i].type);
        for (size_t e = 0; e < job->parameters[i].count; e++)
            CHECK(job->world, memcmp(gradient->back + e * element, here + e * element, element) == 0,
                  "parameter %zu of type %d, element %zu of %zu differs", i, (int)job->parameters[i].type, e,
                  job->parameters[i].count);
        const bool is_used = shoal_reducer_is_used(job->host, i);
        CHECK(job->world, shoal_reducer_is_used(job->device, i) == is_used, "is %zu used?", i);
        CHECK(job->world, is_used || is_zero(here, bytes_of(job, i)), "no rank used %zu, and it has an average", i);
    }
}

/* Declares the gradient unused, or leaves it unmarked. */
static void leave_out(struct job *job, size_t parameter)
{
    job->gradients[parameter].is_in_view = false;
    if (reference_below(&job->random, 2))
        return;
    OK(job->world, shoal_reducer_unused(job->device, parameter));
    OK(job->world, shoal_reducer_unused(job->host, parameter));
}

static bool is_same(double one, double other)
{
    return one == other || (one != one && other != other);
}

static bool is_near(double one, double other)
{
    return is_same(one, other) || (one - other < 1e-12 * one && other - one < 1e-12 * one);
}

static void expect_results_alike(const struct job *job, const struct shoal_step_result *there,
                                 const struct shoal_step_result *here)
{
    CHECK(job->world, there->active == here->active, "%d active, not %d", there->active, here->active);
    CHECK(job->world, there->nonfinite_parameter == here->nonfinite_parameter && there->nonfinite_rank == here->nonfinite_rank,
          "parameter %lld of rank %d is not finite, not %lld of rank %d", (long long)there->nonfinite_parameter,
          there->nonfinite_rank, (long long)here->nonfinite_parameter, here->nonfinite_rank);
    CHECK(job->world, (job->has_wholes ? is_same : is_near)(there->local_squared, here->local_squared),
          "own norms are %a, not %a", there->local_squared, here->local_squared);
    CHECK(job->world, is_same(there->squared, here->squared), "the norm is %a, not %a", there->squared, here->squared);
    CHECK(job->world, there->clip == here->clip, "clipped by %a, not %a", there->clip, here->clip);
}

/* A LOCAL step leaves some gradients out. A view holds the sum of the LOCAL steps, so gradients are given in views only
 * without LOCAL steps. */
static void run_pass(struct job *job, enum shoal_step step, bool has_views)
{
    uint32_t order[PARAMETERS];
    reference_shuffle(&job->random, order, PARAMETERS);
    OK(job->world, shoal_reducer_begin(job->device, step));
    OK(job->world, shoal_reducer_begin(job->host, step));
    for (size_t i = 0; i < PARAMETERS; i++) {
        struct gradient *gradient = &job->gradients[order[i]];
        gradient->is_in_view = has_views && reference_below(&job->random, 3) == 0;
        gradient->is_left_out = step == SHOAL_STEP_REDUCE && job->leaves_out && reference_below(&job->random, 3) == 0;
        if (gradient->is_left_out)
            leave_out(job, order[i]);
        else if (step == SHOAL_STEP_REDUCE || reference_below(&job->random, 4))
            mark_both(job, order[i]);
    }
    struct shoal_step_result there = SHOAL_STEP_RESULT_INIT, here = SHOAL_STEP_RESULT_INIT;
    OK(job->world, shoal_reducer_finish(job->device, &there));
    OK(job->world, shoal_reducer_finish(job->host, &here));
    expect_results_alike(job, &there, &here);
}

struct kind {
    enum shoal_compression compression;
    const char *modes;
    bool is_local;               /* with LOCAL steps in between */
    const char *const *settings; /* make devices sum among themselves; NULL: they do not */
};

static void steps_body(struct world *world)
{
    const struct kind *kind = world->arg;
    struct job job;
    mock_device_ordinal = kind->settings ? mock_device_of(world->rank) : 0;
    open_job(&job, world, kind->modes, 7);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        world->seed = job.shared = seed;
        job.options.results_in_views = (int)reference_below(&job.shared, 2);
        job.options.keeps_layout = (int)reference_below(&job.shared, 2);
        job.options.op = seed == 2 ? SHOAL_SUM : SHOAL_AVG;
        job.options.forgets_error = seed == 3;
        job.options.compression = kind->compression;
        create_both(&job);
        for (int step = 0; step < STEPS; step++) {
            for (int pass = 0; kind->is_local && pass < 2; pass++) {
                run_pass(&job, SHOAL_STEP_LOCAL, false);
                mock_device_synchronize(job.stream); /* the next pass overwrites the gradients' sources */
            }
            run_pass(&job, SHOAL_STEP_REDUCE, !kind->is_local);
            expect_alike(&job);
        }
        shoal_reducer_free(job.host);
        shoal_reducer_free(job.device);
        job.host = job.device = NULL;
    }
    if (kind->settings && !mock_device_is_real()) /* nothing else in such a step launches a kernel */
        CHECK(world, control.count_of("blocks") > 0, "sums went through host memory");
    close_job(&job);
}

/* Takes part in the other ranks' steps until these have also joined. */
static void join_both(struct job *job)
{
    int more = 1, more_here;
    while (more) {
        struct shoal_step_result there = SHOAL_STEP_RESULT_INIT, here = SHOAL_STEP_RESULT_INIT;
        OK(job->world, shoal_reducer_join(job->device, &more, &there));
        OK(job->world, shoal_reducer_join(job->host, &more_here, &here));
        CHECK(job->world, more == more_here, "is there more?");
        expect_results_alike(job, &there, &here);
        for (size_t i = 0; i < PARAMETERS; i++) {
            job->gradients[i].is_left_out = true;
            job->gradients[i].is_in_view = false;
        }
        if (more)
            expect_alike(job);
    }
}

/* Each rank has a different number of steps and leaves out different gradients. */
static void uneven_body(struct world *world)
{
    const struct kind *kind = world->arg;
    struct job job;
    open_job(&job, world, kind->modes, 7);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        world->seed = job.shared = seed;
        job.options.results_in_views = (int)reference_below(&job.shared, 2);
        job.options.op = seed == 2 ? SHOAL_SUM : SHOAL_AVG;
        job.options.compression = kind->compression;
        job.options.allows_unused = job.leaves_out = seed != 3;
        job.options.is_uneven = seed != 4;
        job.options.divides_by_active = seed > 1;
        job.options.has_norms = seed != 3;
        job.options.max_norm = seed > 2 ? 1.5 : 0;
        create_both(&job);
        for (int step = job.options.is_uneven ? world->rank : 0; step < STEPS; step++) {
            if (kind->is_local)
                run_pass(&job, SHOAL_STEP_LOCAL, false);
            mock_device_synchronize(job.stream); /* the next pass overwrites the gradients' sources */
            run_pass(&job, SHOAL_STEP_REDUCE, !kind->is_local);
            expect_alike(&job);
        }
        if (job.options.is_uneven && kind->is_local)
            run_pass(&job, SHOAL_STEP_LOCAL, false); /* this sum is dropped */
        if (job.options.is_uneven)
            join_both(&job);
        shoal_reducer_free(job.host);
        shoal_reducer_free(job.device);
        job.host = job.device = NULL;
    }
    close_job(&job);
}

/* Puts a NaN or an infinity into one of this rank's gradients. Averages are not compared then, because NaNs may differ in
 * their bits. */
static void spoil(struct job *job, size_t parameter)
{
    static const float bad[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
    const size_t count = job->parameters[parameter].count;
    const float value = bad[reference_below(&job->random, COUNT_OF(bad))];
    if (!count || job->parameters[parameter].type != SHOAL_FLOAT32)
        return;
    struct gradient *gradient = &job->gradients[parameter];
    const size_t at = reference_below(&job->random, count);
    ((float *)(void *)gradient->given)[at] = ((float *)(void *)gradient->host)[at] = value;
    mock_device_upload(gradient->device, gradient->given, bytes_of(job, parameter), job->stream);
}

static void run_spoiled_pass(struct job *job)
{
    struct shoal_step_result there = SHOAL_STEP_RESULT_INIT, here = SHOAL_STEP_RESULT_INIT;
    OK(job->world, shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE));
    OK(job->world, shoal_reducer_begin(job->host, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++) {
        job->gradients[i].is_in_view = false;
        give(job, i);
        if (reference_below(&job->random, 8) == 0)
            spoil(job, i);
        OK(job->world, shoal_reducer_ready(job->device, i, job->gradients[i].device, job->parameters[i].count));
        OK(job->world, shoal_reducer_ready(job->host, i, job->gradients[i].host, job->parameters[i].count));
    }
    OK(job->world, shoal_reducer_finish(job->device, &there));
    OK(job->world, shoal_reducer_finish(job->host, &here));
    expect_results_alike(job, &there, &here);
    mock_device_synchronize(job->stream);
}

/* Both reducers average the same norms for the noise scale. */
static void expect_noise_alike(const struct job *job)
{
    struct shoal_noise_average there = SHOAL_NOISE_AVERAGE_INIT, here = SHOAL_NOISE_AVERAGE_INIT;
    if (job->options.noise_window == 0)
        return;
    OK(job->world, shoal_reducer_noise_average(job->device, &there));
    OK(job->world, shoal_reducer_noise_average(job->host, &here));
    CHECK(job->world, there.steps == STEPS && here.steps == STEPS, "%d and %d steps", (int)there.steps, (int)here.steps);
    CHECK(job->world, is_same(there.squared, here.squared) && is_same(there.variance, here.variance),
          "the averages are %a and %a, not %a and %a", there.squared, there.variance, here.squared, here.variance);
}

/* Norms, clipping and the search for values that are not finite. */
static void norms_body(struct world *world)
{
    const struct kind *kind = world->arg;
    struct job job;
    open_job(&job, world, kind->modes, 7);
    job.has_wholes = true;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        world->seed = job.shared = seed;
        job.options.results_in_views = (int)reference_below(&job.shared, 2);
        job.options.op = seed == 2 ? SHOAL_SUM : SHOAL_AVG;
        job.options.compression = kind->compression;
        job.options.has_norms = seed < 3;
        job.options.noise_window = seed < 3 ? 5 : 0;
        job.options.checks_finite = seed != 3;
        job.options.max_norm = seed == 2 ? 1e300 : seed == 3 ? 0.5 : 0;
        create_both(&job);
        for (int step = 0; step < STEPS; step++) {
            if (kind->is_local)
                run_pass(&job, SHOAL_STEP_LOCAL, false);
            mock_device_synchronize(job.stream); /* the next pass overwrites the gradients' sources */
            run_pass(&job, SHOAL_STEP_REDUCE, !kind->is_local);
            expect_alike(&job);
        }
        expect_noise_alike(&job);
        if (job.options.checks_finite && job.options.max_norm == 0)
            run_spoiled_pass(&job);
        shoal_reducer_free(job.host);
        shoal_reducer_free(job.device);
        job.host = job.device = NULL;
    }
    close_job(&job);
}

static void run_bits(const char *what, int size, int ranks_per_host, world_body_fn body, const struct kind *kind)
{
    char name[160];
    snprintf(name, sizeof name, "the same bits: %s, %d ranks, %d on a host, %s", what, size,
             ranks_per_host ? ranks_per_host : size, kind->modes);
    world_divide(ranks_per_host);
    world_run(&(const struct world_options){name, size, kind->settings, body, kind});
}

static void run_steps(const char *what, int size, int ranks_per_host, const struct kind *kind)
{
    run_bits(what, size, ranks_per_host, steps_body, kind);
}

/* ---- Errors of a call ---------------------------------------------------------------------------------------------------- */

static void expect_told(struct job *job, enum shoal_status status, enum shoal_status wanted, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    CHECK(job->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    OK(job->world, shoal_last_failure(job->world->context, NULL, &failure));
    CHECK(job->world, strstr(failure.text, word), "\"%s\" is not in: %s", word, failure.text);
}

/* A rank whose own calls have not failed learns the failure by waiting. */
static void expect_blame(struct job *job, enum shoal_status wanted, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    const enum shoal_status status = shoal_reducer_wait(job->device, SHOAL_FOREVER);
    CHECK(job->world, status == wanted, "%s, not %s", shoal_status_name(status), shoal_status_name(wanted));
    OK(job->world, shoal_reducer_failure(job->device, &failure));
    CHECK(job->world, strstr(failure.text, word), "\"%s\" is not in: %s", word, failure.text);
}

static void expect_cause(struct job *job, enum shoal_status wanted, const char *word)
{
    expect_blame(job, wanted, word);
    mock_device_synchronize(job->stream); /* returns: no stream waits */
}

/* Runs a step that fails on some rank; the others may have ended it before. */
static void try_step(struct job *job)
{
    enum shoal_status status = shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE);
    for (size_t i = PARAMETERS; i-- > 0 && status == SHOAL_OK;)
        status = shoal_reducer_ready(job->device, i, give(job, i), job->parameters[i].count);
    if (status == SHOAL_OK)
        (void)!shoal_reducer_finish(job->device, NULL);
}

/* ---- Residuals ----------------------------------------------------------------------------------------------------------- */

static char *export_residuals(struct world *world, struct shoal_reducer *reducer, size_t *bytes_out)
{
    *bytes_out = shoal_reducer_residual_bytes(reducer);
    char *state = malloc(*bytes_out);
    CHECK(world, *bytes_out && state, "no residuals");
    OK(world, shoal_reducer_export_residuals(reducer, state, *bytes_out));
    return state;
}

/* Both sides have the same bytes of residuals. A new pair of reducers that imports them continues with the same bits. */
static void residuals_body(struct world *world)
{
    struct job job;
    size_t bytes, host_bytes;
    open_job(&job, world, "late=30,torn=2,poison=1,seed=4", 4);
    job.options.compression = SHOAL_COMPRESS_INT8;
    job.options.keeps_layout = 1;
    create_both(&job);
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    char *state = export_residuals(world, job.device, &bytes), *there = export_residuals(world, job.host, &host_bytes);
    CHECK(world, bytes == host_bytes && memcmp(state, there, bytes) == 0, "residuals differ");
    expect_alike(&job);
    shoal_reducer_free(job.device);
    OK(world, create_on_device(&job));
    OK(world, shoal_reducer_import_residuals(job.device, state, bytes));
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    expect_alike(&job);
    free(state);
    free(there);
    close_job(&job);
}

/* A refused copy leaves the reducer as it was, and no copy is under way when export returns. */
static void refused_export_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=4", 4);
    job.options.compression = SHOAL_COMPRESS_INT8;
    job.options.keeps_layout = 1;
    create_both(&job);
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    expect_alike(&job);
    const size_t bytes = shoal_reducer_residual_bytes(job.device);
    char *state = calloc(1, bytes), *then = malloc(bytes);
    control.set_of("late=20000");
    control.fail_of("cuMemcpyDtoHAsync", 2, SHOAL_CU_OPERATING_SYSTEM);
    expect_told(&job, shoal_reducer_export_residuals(job.device, state, bytes), SHOAL_ERR_SYSTEM, "cuMemcpyDtoHAsync");
    control.fail_of(NULL, 0, 0);
    memcpy(then, state, bytes);
    usleep(50000);
    CHECK(world, memcmp(state, then, bytes) == 0, "a copy is under way");
    control.set_of("late=0");
    OK(world, shoal_reducer_export_residuals(job.device, state, bytes));
    OK(world, shoal_reducer_export_residuals(job.host, then, bytes));
    CHECK(world, memcmp(state, then, bytes) == 0, "residuals differ");
    free(state);
    free(then);
    close_job(&job);
}

/* Half of the residuals would be new, so the reducer fails on all ranks. */
static void refused_import_body(struct world *world)
{
    struct job job;
    size_t bytes;
    open_job(&job, world, "seed=4", 4);
    job.options.compression = SHOAL_COMPRESS_INT8;
    job.options.keeps_layout = 1;
    create_both(&job);
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    char *state = export_residuals(world, job.device, &bytes);
    control.set_of("late=20000");
    if (world->rank == 0)
        control.fail_of("cuMemcpyHtoDAsync", 2, SHOAL_CU_OPERATING_SYSTEM);
    const enum shoal_status status = shoal_reducer_import_residuals(job.device, state, bytes);
    free(state);
    control.fail_of(NULL, 0, 0);
    control.set_of("late=0");
    CHECK(world, status == SHOAL_ERR_SYSTEM || (world->rank && status == SHOAL_OK), "%s", shoal_status_name(status));
    try_step(&job);
    expect_cause(&job, SHOAL_ERR_SYSTEM, "cuMemcpyHtoDAsync");
    close_job(&job);
}

/* ---- What finish does, and what it does not wait for --------------------------------------------------------------------- */

struct calls {
    struct job *job;
    size_t next;
};

/* Work put on the stream now sees the averages. */
static enum shoal_status buffer_ready(void *arg, size_t buffer, const uint32_t *parameters, size_t parameter_count)
{
    struct calls *calls = arg;
    struct job *job = calls->job;
    CHECK(job->world, buffer == calls->next, "buffer %zu, not %zu", buffer, calls->next);
    calls->next++;
    for (size_t i = 0; i < parameter_count; i++) {
        const size_t parameter = parameters[i];
        if (bytes_of(job, parameter))
            mock_device_download(job->gradients[parameter].back, job->gradients[parameter].device, bytes_of(job, parameter),
                                 job->stream);
    }
    return SHOAL_OK;
}

static void callback_body(struct world *world)
{
    struct job job;
    struct calls calls = {&job, 0};
    open_job(&job, world, "late=50,torn=3,poison=1,seed=5", 5);
    job.options.on_buffer = buffer_ready;
    job.options.on_buffer_arg = &calls;
    job.options.keeps_layout = 1;
    create_both(&job);
    for (int step = 0; step < 2; step++) {
        calls.next = 0;
        OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
        OK(world, shoal_reducer_begin(job.host, SHOAL_STEP_REDUCE));
        for (size_t i = PARAMETERS; i-- > 0;)
            mark_both(&job, i);
        OK(world, shoal_reducer_finish(job.device, NULL));
        OK(world, shoal_reducer_finish(job.host, NULL));
        CHECK(world, calls.next == shoal_gradient_layout_buffers(shoal_reducer_layout(job.device)), "%zu buffers", calls.next);
        OK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER));
        mock_device_synchronize(job.stream);
        for (size_t i = 0; i < PARAMETERS; i++)
            CHECK(world, memcmp(job.gradients[i].back, job.gradients[i].host, bytes_of(&job, i)) == 0, "parameter %zu", i);
    }
    close_job(&job);
}

static void mark_all(struct job *job)
{
    OK(job->world, shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++)
        OK(job->world, shoal_reducer_ready(job->device, i, give(job, i), job->parameters[i].count));
}

/* Two whole steps are put on the stream while the device is held. */
static void waiting_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=3", 3);
    job.options.keeps_layout = 1;
    job.options.compression = SHOAL_COMPRESS_INT8; /* the next step's averages include what this one cuts off */
    create_both(&job);
    run_pass(&job, SHOAL_STEP_REDUCE, true); /* creates what can only be created while the device is idle */
    expect_alike(&job);
    control.hold_of(true);
    for (int step = 0; step < 2; step++)
        run_pass(&job, SHOAL_STEP_REDUCE, true);
    CHECK(world, shoal_reducer_wait(job.device, 1) == SHOAL_PENDING, "it does not wait for the device");
    OK(world, shoal_barrier(world->comm, NULL));
    control.hold_of(false);
    expect_alike(&job);
    close_job(&job);
}

static void mark_on_device(void *arg, size_t parameter)
{
    struct job *job = arg;
    char *gradient = job->gradients[parameter].device;
    OK(job->world, shoal_reducer_ready(job->device, parameter, gradient, job->parameters[parameter].count));
}

static void threads_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "late=20,seed=12", 12);
    create_both(&job);
    for (int step = 0; step < STEPS; step++) {
        OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
        OK(world, shoal_reducer_begin(job.host, SHOAL_STEP_REDUCE));
        for (size_t i = 0; i < PARAMETERS; i++) {
            give(&job, i);
            OK(world, shoal_reducer_ready(job.host, i, job.gradients[i].host, job.parameters[i].count));
        }
        mark_in_threads(world, mark_on_device, &job, PARAMETERS);
        OK(world, shoal_reducer_finish(job.device, NULL));
        OK(world, shoal_reducer_finish(job.host, NULL));
        expect_alike(&job);
    }
    close_job(&job);
}

/* ---- Refused ------------------------------------------------------------------------------------------------------------- */

/* The driver refuses the query for a gradient's location. */
static void expect_not_said(struct job *job, struct shoal_reducer *reducer)
{
    control.fail_of("cuPointerGetAttributes", 1, SHOAL_CU_ILLEGAL_ADDRESS);
    expect_told(job, shoal_reducer_ready(reducer, 1, job->gradients[1].device, job->parameters[1].count), SHOAL_ERR_SYSTEM,
                "is in memory that the driver cannot describe: cuPointerGetAttributes answered CUDA_ERROR_ILLEGAL_ADDRESS");
    control.fail_of(NULL, 0, 0);
}

static void marks_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "devices=2,seed=1", 1);
    char *other = mock_device_allocate_on_other(8 * ELEMENTS_MAX);
    const size_t count = job.parameters[1].count;
    create_both(&job);
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_begin(job.host, SHOAL_STEP_REDUCE));
    expect_told(&job, shoal_reducer_ready(job.device, 1, job.gradients[1].host, count), SHOAL_ERR_ARGUMENT,
                "the gradient of parameter 1 is in host memory");
    expect_told(&job, shoal_reducer_ready(job.device, 1, other, count), SHOAL_ERR_ARGUMENT,
                "is on device 1, but the reducer's stream is of device 0");
    expect_told(&job, shoal_reducer_ready(job.host, 1, job.gradients[1].device, count), SHOAL_ERR_ARGUMENT,
                "is on device 0: make the reducer with is_on_device");
    expect_told(&job, shoal_reducer_ready_part(job.host, 1, job.gradients[1].device, 0, 1), SHOAL_ERR_ARGUMENT,
                "is on device 0: make the reducer with is_on_device");
    expect_not_said(&job, job.device);
    expect_not_said(&job, job.host);
    for (size_t i = 0; i < PARAMETERS; i++)
        mark_both(&job, i); /* the refusals changed nothing */
    OK(world, shoal_reducer_finish(job.device, NULL));
    OK(world, shoal_reducer_finish(job.host, NULL));
    expect_alike(&job);
    mock_device_release(other);
    close_job(&job);
}

struct marker {
    struct job *job;
    atomic_int of_view, of_nothing, of_gradient; /* statuses of marks in a callback */
};

static void mark_in_callback(void *arg, enum shoal_status status)
{
    struct marker *marker = arg;
    struct job *job = marker->job;
    struct shoal_reducer *reducer = job->device;
    (void)status;
    atomic_store(&marker->of_view,
                 (int)shoal_reducer_ready(reducer, 0, shoal_reducer_view(reducer, 0), job->parameters[0].count));
    atomic_store(&marker->of_nothing, (int)shoal_reducer_ready(reducer, 1, NULL, 0));
    atomic_store(&marker->of_gradient,
                 (int)shoal_reducer_ready(reducer, 2, job->gradients[2].device, job->parameters[2].count));
}

/* Each of these marks would complete a buffer and call the driver. */
static void callback_marks_body(struct world *world)
{
    struct job job;
    struct marker marker = {&job, SHOAL_PENDING, SHOAL_PENDING, SHOAL_PENDING};
    struct shoal_request *request;
    char word = 0;
    const int peer = 1 - world->rank;
    open_job(&job, world, "seed=1", 1);
    for (size_t i = 0; i < PARAMETERS; i++)
        job.parameters[i] = (struct shoal_parameter){i == 1 ? 0 : ELEMENTS_MAX, SHOAL_FLOAT32, NULL};
    OK(world, create_on_device(&job));
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    OK(world, shoal_recv_post(world->comm, &word, 1, SHOAL_INT8, peer, 1, NULL, &request));
    shoal_request_on_done(request, mark_in_callback, &marker); /* not done yet: its sender first waits for our message */
    OK(world, shoal_send(world->comm, &word, 1, SHOAL_INT8, peer, 2, NULL));
    OK(world, shoal_recv(world->comm, &word, 1, SHOAL_INT8, peer, 2, NULL));
    OK(world, shoal_send(world->comm, &word, 1, SHOAL_INT8, peer, 1, NULL));
    OK(world, shoal_request_wait(request, SHOAL_FOREVER));
    while (atomic_load(&marker.of_gradient) == SHOAL_PENDING)
        continue;
    shoal_request_free(request);
    CHECK(world, atomic_load(&marker.of_view) == SHOAL_ERR_STATE, "a view: %d", atomic_load(&marker.of_view));
    CHECK(world, atomic_load(&marker.of_nothing) == SHOAL_ERR_STATE, "nothing: %d", atomic_load(&marker.of_nothing));
    CHECK(world, atomic_load(&marker.of_gradient) == SHOAL_ERR_STATE, "a gradient: %d", atomic_load(&marker.of_gradient));
    for (size_t i = 0; i < PARAMETERS; i++) /* the refusals changed nothing */
        OK(world, shoal_reducer_ready(job.device, i, give(&job, i), job.parameters[i].count));
    OK(world, shoal_reducer_finish(job.device, NULL));
    OK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER));
    close_job(&job);
}

static void options_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=1", 1);
    const struct shoal_reducer_options usual = job.options;
    job.options.has_thread = 1;
    expect_told(&job, create_on_device(&job), SHOAL_ERR_UNSUPPORTED, "has_thread is for gradients in host memory");
    job.options = usual;
    job.options.struct_bytes = offsetof(struct shoal_reducer_options, is_on_device); /* a program compiled before devices
                                                                                      * existed */
    OK(world, create_on_device(&job));
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_ready(job.device, 1, job.gradients[1].host, job.parameters[1].count));
    shoal_reducer_free(job.device);
    job.device = NULL;
    job.options = usual;
    job.options.stream = SHOAL_CU_STREAM_PER_THREAD;
    expect_told(&job, create_on_device(&job), SHOAL_ERR_ARGUMENT, "options.stream is the per-thread stream");
    job.options = usual;
    job.options.is_on_device = world->rank > 0;
    expect_told(&job, create_on_device(&job), SHOAL_ERR_MISMATCH, "is_on_device is 0 on rank 0, 1 on rank 1");
    job.options = usual;
    if (world->rank == 0)
        control.fail_of("cuEventCreate", 1, SHOAL_CU_OUT_OF_MEMORY);
    expect_told(&job, create_on_device(&job), SHOAL_ERR_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY");
    OK(world, create_on_device(&job));
    close_job(&job);
}

/* A driver that cannot load kernels serves reducers that need none. */
static void kernels_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=1", 1);
    control.hide_of("cuModuleLoadData");
    job.options.compression = SHOAL_COMPRESS_INT8; /* on one host nothing is compressed */
    create_both(&job);
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    expect_alike(&job);
    OK(world, shoal_barrier(world->comm, NULL)); /* the first rank that is refused also fails the others */
    expect_told(&job, shoal_reducer_begin(job.device, SHOAL_STEP_LOCAL), SHOAL_ERR_UNSUPPORTED,
                "the CUDA driver cannot load kernels");
    close_job(&job);
}

static void captured_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=1", 1);
    create_both(&job);
    control.capture_of((shoal_cu_stream)job.stream, SHOAL_CU_CAPTURE_ACTIVE);
    expect_told(&job, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE), SHOAL_ERR_UNSUPPORTED,
                "is being captured into a graph");
    control.capture_of((shoal_cu_stream)job.stream, SHOAL_CU_CAPTURE_NONE);
    run_pass(&job, SHOAL_STEP_REDUCE, true);
    expect_alike(&job);
    close_job(&job);
}

/* Rank 0's stream is captured in the middle of a step, while buffers are under way. */
static void captured_midway_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "late=50,seed=1", 1);
    OK(world, create_on_device(&job));
    for (size_t i = 0; i < PARAMETERS; i++)
        give(&job, i);
    enum shoal_status status = shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE);
    for (size_t i = PARAMETERS; i-- > 0 && status == SHOAL_OK;) {
        if (world->rank == 0 && i == PARAMETERS / 2)
            control.capture_of((shoal_cu_stream)job.stream, SHOAL_CU_CAPTURE_ACTIVE);
        status = shoal_reducer_ready(job.device, i, job.gradients[i].device, job.parameters[i].count);
    }
    (void)!shoal_reducer_finish(job.device, NULL);
    expect_blame(&job, SHOAL_ERR_UNSUPPORTED, "is being captured into a graph");
    if (world->rank == 0)
        control.capture_of((shoal_cu_stream)job.stream, SHOAL_CU_CAPTURE_NONE);
    close_job(&job);
}

/* The program captures another stream while the reducer waits for the device. */
static void captured_other_body(struct world *world)
{
    struct job job;
    size_t bytes;
    int status = SHOAL_CU_CAPTURE_NONE;
    open_job(&job, world, "seed=1", 1);
    job.options.compression = SHOAL_COMPRESS_INT8;
    shoal_cu_stream other = (shoal_cu_stream)mock_device_take_stream();
    OK(world, create_on_device(&job));
    mark_all(&job);
    OK(world, shoal_reducer_finish(job.device, NULL));
    OK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER));
    mock_device_synchronize(job.stream);
    control.capture_of(other, SHOAL_CU_CAPTURE_ACTIVE);
    free(export_residuals(world, job.device, &bytes));
    shoal_reducer_free(job.device);
    job.device = NULL;
    MOCK_DEVICE(stream_is_capturing(other, &status));
    CHECK(world, status == SHOAL_CU_CAPTURE_ACTIVE, "the capture is broken");
    CHECK(world, control.count_of("modules") == 0, "a module is left");
    control.capture_of(other, SHOAL_CU_CAPTURE_NONE);
    close_job(&job);
}

/* ---- Faults -------------------------------------------------------------------------------------------------------------- */

/* Without norms, finish returns before the device has run. The next call then finds the failure. */
struct fault {
    enum shoal_compression compression;
    bool has_norms;
};

static void open_faulty_job(struct job *job, struct world *world, const char *modes)
{
    const struct fault *fault = world->arg;
    open_job(job, world, modes, 2);
    job->options.compression = fault->compression;
    job->options.has_norms = fault->has_norms;
}

static void given_up_body(struct world *world)
{
    struct job job;
    open_faulty_job(&job, world, "late=50,seed=2");
    OK(world, create_on_device(&job));
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    if (world->rank == 1) {
        for (size_t i = PARAMETERS; i-- > PARAMETERS / 2;)
            OK(world, shoal_reducer_ready(job.device, i, give(&job, i), job.parameters[i].count));
        shoal_reducer_fail(job.device, SHOAL_ERR_ABORTED, "the loss is a kiwi");
    } else {
        for (size_t i = PARAMETERS; i-- > 0;)
            if (shoal_reducer_ready(job.device, i, give(&job, i), job.parameters[i].count) != SHOAL_OK)
                break;
        const enum shoal_status status = shoal_reducer_finish(job.device, NULL);
        CHECK(world, status != SHOAL_OK || !job.options.has_norms, "the result is of half the gradients");
    }
    expect_cause(&job, SHOAL_ERR_ABORTED, "rank 1: the loss is a kiwi");
    world_agree(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    close_job(&job);
}

static void missing_body(struct world *world)
{
    struct job job;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    uint32_t order[PARAMETERS];
    open_job(&job, world, "late=50,seed=2", 2);
    OK(world, create_on_device(&job));
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    for (size_t i = PARAMETERS; i-- > (world->rank == 1);)
        if (shoal_reducer_ready(job.device, i, give(&job, i), job.parameters[i].count) != SHOAL_OK)
            break; /* the other rank has ended its step */
    const enum shoal_status status = shoal_reducer_finish(job.device, NULL);
    CHECK(world, world->rank != 1 || status == SHOAL_ERR_STATE, "%s", shoal_status_name(status));
    if (status == SHOAL_OK) { /* finish did not wait; asking for the order waits and reports it */
        CHECK(world, shoal_reducer_order(job.device, order) == SHOAL_ERR_STATE, "an order of a step that has failed");
        CHECK(world, shoal_reducer_failure(job.device, &failure) == SHOAL_OK, "not the reducer's failure");
    }
    expect_cause(&job, SHOAL_ERR_STATE, "1 of 11 gradients were not marked when the step ended: parameter 0");
    close_job(&job);
}

static void killed_body(struct world *world)
{
    struct job job;
    open_faulty_job(&job, world, "seed=2");
    job.options.keeps_layout = 1;
    OK(world, create_on_device(&job));
    mark_all(&job);
    OK(world, shoal_reducer_finish(job.device, NULL));
    OK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER));
    mock_device_synchronize(job.stream);
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    if (world->rank == world->size - 1)
        raise(SIGKILL);
    try_step(&job);
    if (job.options.compression == SHOAL_COMPRESS_INT8) { /* a failed step has no residuals */
        const size_t bytes = shoal_reducer_residual_bytes(job.device);
        char *state = malloc(bytes);
        const enum shoal_status status = shoal_reducer_export_residuals(job.device, state, bytes);
        CHECK(world, status == SHOAL_ERR_PEER_LOST, "%s", shoal_status_name(status));
        free(state);
    }
    expect_cause(&job, SHOAL_ERR_PEER_LOST, "buffer");
    close_job(&job);
}

#define CAUSE_MS 3000 /* how long the library looks for a cause on a communicator that a step uses */

/* With norms nothing else is under way while all buffers are compressed. The library then looks for a cause for half a
 * second. */
static void killed_alone_body(struct world *world)
{
    struct job job;
    open_faulty_job(&job, world, "seed=2");
    for (size_t i = 0; i < PARAMETERS; i++)
        job.parameters[i].type = SHOAL_FLOAT32;
    OK(world, create_on_device(&job));
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    if (world->rank == world->size - 1)
        raise(SIGKILL);
    const uint64_t begin_ns = shoal_clock_ns();
    try_step(&job);
    expect_cause(&job, SHOAL_ERR_PEER_LOST, "buffer");
    const uint64_t ms = (shoal_clock_ns() - begin_ns) / 1000000;
    CHECK(world, ms < CAUSE_MS, "it took %llu ms", (unsigned long long)ms);
    close_job(&job);
}

/* One rank's context fails: nothing runs in it any longer and its memory is gone. No call hangs, and all ranks learn the
 * cause. The streams of the others continue. */
static void broken_body(struct world *world)
{
    struct job job;
    open_faulty_job(&job, world, "seed=2");
    OK(world, create_on_device(&job));
    mark_all(&job);
    OK(world, shoal_reducer_finish(job.device, NULL));
    OK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER));
    mock_device_synchronize(job.stream);
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank == 0)
        control.break_of(0, SHOAL_CU_ILLEGAL_ADDRESS);
    enum shoal_status status = shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE);
    for (size_t i = 0; i < PARAMETERS && status == SHOAL_OK; i++)
        status = shoal_reducer_ready(job.device, i, job.gradients[i].device, job.parameters[i].count);
    if (status == SHOAL_OK)
        (void)!shoal_reducer_finish(job.device, NULL);
    expect_blame(&job, SHOAL_ERR_SYSTEM, "CUDA_ERROR_ILLEGAL_ADDRESS");
    OK(world, shoal_barrier(world->comm, NULL));
    if (world->rank > 0)
        close_job(&job);
    shoal_reducer_free(job.device);
    shoal_context_destroy(world->context);
    exit(0);
}

/* How rank 0 fails while its first buffer is under way. */
static void fail_refused(struct job *job)
{
    enum shoal_status status = SHOAL_OK;
    control.fail_of("cuMemcpyAsync", 1, SHOAL_CU_OPERATING_SYSTEM);
    for (size_t i = PARAMETERS - 1; i-- > 0 && status == SHOAL_OK;)
        status = shoal_reducer_ready(job->device, i, job->gradients[i].device, job->parameters[i].count);
    control.fail_of(NULL, 0, 0);
    CHECK(job->world, status == SHOAL_ERR_SYSTEM, "%s", shoal_status_name(status));
}

static void fail_given_up(struct job *job)
{
    shoal_reducer_fail(job->device, SHOAL_ERR_ABORTED, "the loss is a plum");
}

struct spoiler {
    void (*fail)(struct job *job);
    enum shoal_status status;
};

/* The step fails while the device is held. Then the caller reuses a gradient's memory. */
static void intact_body(struct world *world)
{
    const struct spoiler *spoiler = world->arg;
    struct job job;
    open_job(&job, world, "late=50,seed=6", 6);
    struct gradient *gradient = &job.gradients[PARAMETERS - 1]; /* fills the first buffer */
    const size_t bytes = job.options.first_buffer_bytes;
    for (size_t i = 0; i < PARAMETERS; i++)
        job.parameters[i] = (struct shoal_parameter){bytes / sizeof(float), SHOAL_FLOAT32, NULL};
    OK(world, create_on_device(&job));
    control.hold_of(true);
    OK(world, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE));
    OK(world, shoal_reducer_ready(job.device, PARAMETERS - 1, gradient->device, bytes / sizeof(float)));
    if (world->rank == 0) {
        spoiler->fail(&job);
        const enum shoal_status status = shoal_reducer_finish(job.device, NULL);
        CHECK(world, status == spoiler->status, "%s", shoal_status_name(status));
    } else {
        CHECK(world, shoal_reducer_wait(job.device, SHOAL_FOREVER) == spoiler->status, "it learns of the fault");
    }
    memset(gradient->given, 0x5a, bytes);
    mock_device_upload(gradient->device, gradient->given, bytes, job.stream);
    control.hold_of(false);
    mock_device_synchronize(job.stream);
    shoal_reducer_free(job.device);
    job.device = NULL;
    mock_device_download(gradient->back, gradient->device, bytes, job.stream);
    mock_device_synchronize(job.stream);
    CHECK(world, memcmp(gradient->back, gradient->given, bytes) == 0, "a failed step writes to memory of the caller");
    close_job(&job);
}

/* ---- Each call of the driver is refused ---------------------------------------------------------------------------------- */

#define REFUSED SHOAL_CU_OPERATING_SYSTEM
#define REFUSED_NAME "CUDA_ERROR_OPERATING_SYSTEM"
#define CALLS_MOST 200
#define FEW ((size_t)3) /* parameters */

static const char *const entry_points[] = {"cuStreamCreateWithPriority",
                                           "cuModuleLoadData",
                                           "cuModuleGetFunction",
                                           "cuStreamIsCapturing",
                                           "cuEventCreate",
                                           "cuMemAlloc",
                                           "cuMemcpyHtoDAsync",
                                           "cuStreamWaitEvent",
                                           "cuMemcpyAsync",
                                           "cuEventRecord",
                                           "cuMemcpyDtoHAsync",
                                           "cuStreamBatchMemOp",
                                           "cuPointerGetAttributes",
                                           "cuLaunchKernel"};

static enum shoal_status take_step(struct job *job, enum shoal_step step)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    enum shoal_status status = shoal_reducer_begin(job->device, step);
    for (size_t i = 0; i < FEW && status == SHOAL_OK; i++) {
        status = shoal_reducer_ready(job->device, i, job->gradients[i].device, job->parameters[i].count);
        if (status != SHOAL_OK &&
            shoal_reducer_failure(job->device, &failure) == SHOAL_PENDING) /* the query for its location was refused */
            status = shoal_reducer_ready(job->device, i, job->gradients[i].device, job->parameters[i].count);
    }
    if (status == SHOAL_OK)
        status = shoal_reducer_finish(job->device, NULL);
    return status == SHOAL_OK ? shoal_reducer_wait(job->device, SHOAL_FOREVER) : status;
}

/* Creates a reducer with few buffers and takes a LOCAL and a REDUCE step. Returns the status of the first fault. */
static enum shoal_status live(struct job *job)
{
    enum shoal_status status = create_few(job, FEW);
    if (status == SHOAL_OK)
        status = take_step(job, SHOAL_STEP_LOCAL);
    return status == SHOAL_OK ? take_step(job, SHOAL_STEP_REDUCE) : status;
}

/* Refuses rank 0's call number `nth` of an entry point. Returns false if there were fewer calls. */
static bool refuse_one(struct job *job, const char *call, int nth)
{
    struct world *world = job->world;
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    int32_t is_on = 1, has_failed, any;
    if (world->rank == 0)
        control.fail_of(call, nth, REFUSED);
    enum shoal_status status = live(job);
    if (world->rank == 0) {
        is_on = control.count_of("calls") >= (size_t)nth;
        control.fail_of(NULL, 0, 0);
    }
    OK(world, shoal_broadcast(world->comm, &is_on, &is_on, 1, SHOAL_INT32, 0, NULL));
    has_failed = status != SHOAL_OK;
    OK(world, shoal_allreduce(world->comm, &has_failed, &any, 1, SHOAL_INT32, SHOAL_MAX, NULL));
    if (any && !has_failed) /* all operations of the step were done: the next step reports the fault */
        status = take_step(job, SHOAL_STEP_REDUCE);
    if (job->device && status != SHOAL_OK) { /* the fault of another rank */
        OK(world, shoal_reducer_failure(job->device, &failure));
        status = failure.status;
    } else if (status != SHOAL_OK) {
        OK(world, shoal_last_failure(world->context, NULL, &failure));
    }
    world_agree(world, status);
    if (status != SHOAL_OK)
        CHECK(world, strstr(failure.text, REFUSED_NAME) && strstr(failure.text, call), "%s, call %d: %s", call, nth,
              failure.text);
    mock_device_synchronize(job->stream);
    OK(world, shoal_barrier(world->comm, NULL));
    shoal_reducer_free(job->device);
    job->device = NULL;
    return is_on != 0;
}

static void refused_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=9", 9);
    for (size_t i = 0; i < FEW; i++)
        job.parameters[i] = (struct shoal_parameter){300 + i, SHOAL_FLOAT32, NULL};
    job.options.compression = *(const enum shoal_compression *)world->arg;
    job.options.keeps_layout = 1;
    job.options.has_norms = job.options.compression == SHOAL_COMPRESS_NONE;
    job.options.max_norm = job.options.has_norms;
    for (size_t i = 0; i < COUNT_OF(entry_points); i++) {
        int nth = 1;
        const bool is_alike = strcmp(entry_points[i], "cuModuleGetFunction") == 0; /* called alike for each kernel: once is
                                                                                    * enough */
        while (refuse_one(&job, entry_points[i], nth) && !is_alike)
            CHECK(world, nth++ < CALLS_MOST, "%s is called without end", entry_points[i]);
    }
    close_job(&job);
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

static void run(const char *name, int size, world_body_fn body)
{
    world_run(&(const struct world_options){name, size, NULL, body, NULL});
}

static void run_intact(const char *what, void (*fail)(struct job *job), enum shoal_status status)
{
    const struct spoiler spoiler = {fail, status};
    char name[120];
    snprintf(name, sizeof name, "a failed step leaves gradients alone: %s", what);
    world_run(&(const struct world_options){name, 2, NULL, intact_body, &spoiler});
}

static void run_faulty(const char *what, int size, world_body_fn body, enum shoal_compression compression, bool has_norms)
{
    const struct fault fault = {compression, has_norms};
    char name[120];
    snprintf(name, sizeof name, "%s%s%s", what, compression == SHOAL_COMPRESS_INT8 ? ", int8" : "",
             has_norms ? ", with norms" : "");
    world_run(&(const struct world_options){name, size, NULL, body, &fault});
}

static void run_faults(void)
{
    static const enum shoal_compression none = SHOAL_COMPRESS_NONE, int8 = SHOAL_COMPRESS_INT8;
    run("a gradient is missing", 2, missing_body);
    for (int has_norms = 0; has_norms < 2; has_norms++) {
        run_faulty("a rank gives up", 3, given_up_body, none, has_norms);
        run_faulty("a context fails", 2, broken_body, none, has_norms);
        world_expect_kill(2);
        run_faulty("a rank is killed", 3, killed_body, none, has_norms);
        world_divide(1);
        run_faulty("a rank is killed", 3, killed_body, int8, has_norms);
        if (has_norms)
            run_faulty("a rank is killed, all float32", 3, killed_alone_body, int8, has_norms);
        world_divide(0);
        world_expect_kill(0);
    }
    run_intact("a rank gives up", fail_given_up, SHOAL_ERR_ABORTED);
    run_intact("the driver refuses", fail_refused, SHOAL_ERR_SYSTEM);
    world_run(&(const struct world_options){"each call of the driver is refused", 2, NULL, refused_body, &none});
    world_divide(1);
    world_run(&(const struct world_options){"each call of the driver is refused, int8", 2, NULL, refused_body, &int8});
}

static void run_kinds(void)
{
    static const char *const among_devices[] = {"SHOAL_GPU_PEER_BYTES=1", "SHOAL_GPU_UNIT_BYTES=4096", NULL};
    static const struct kind plain = {SHOAL_COMPRESS_NONE, "seed=1", false, NULL},
                             hostile = {SHOAL_COMPRESS_NONE, "late=30,torn=3,poison=1,seed=2", false, NULL},
                             queues = {SHOAL_COMPRESS_NONE, "queues=1,seed=3", false, NULL},
                             shallow = {SHOAL_COMPRESS_NONE, "depth=16,late=20,seed=10", true, NULL},
                             idle = {SHOAL_COMPRESS_NONE, "idle=1,pageable=1,reuse=1,seed=11", true, NULL},
                             functions = {SHOAL_COMPRESS_NONE, "values=0,seed=4", false, NULL},
                             local = {SHOAL_COMPRESS_NONE, "late=30,torn=2,poison=1,seed=5", true, NULL},
                             float16 = {SHOAL_COMPRESS_FLOAT16, "late=30,poison=1,seed=6", false, NULL},
                             bfloat16 = {SHOAL_COMPRESS_BFLOAT16, "seed=7", false, NULL},
                             int8 = {SHOAL_COMPRESS_INT8, "late=30,torn=2,poison=1,seed=8", true, NULL},
                             among = {SHOAL_COMPRESS_NONE, "devices=3,late=30,torn=3,poison=1,seed=10", false, among_devices};
    run_steps("steps", 2, 0, &plain);
    run_steps("steps", 3, 0, &hostile);
    run_steps("steps", 2, 0, &queues);
    run_steps("steps", 2, 0, &functions);
    run_steps("LOCAL steps", 2, 0, &local);
    run_steps("LOCAL steps", 2, 0, &shallow);
    run_steps("LOCAL steps", 2, 0, &idle);
    run_steps("steps among GPUs", 3, 0, &among);
    run_steps("steps", 3, 1, &hostile);
    run_steps("float16", 4, 2, &float16);
    run_steps("bfloat16", 2, 1, &bfloat16);
    run_steps("int8", 4, 2, &int8);
    run_steps("int8", 3, 1, &int8);
    run_bits("uneven steps", 3, 0, uneven_body, &hostile);
    run_bits("uneven steps", 2, 0, uneven_body, &local);
    run_bits("uneven steps, float16", 2, 1, uneven_body, &float16);
    run_bits("uneven steps, int8", 2, 1, uneven_body, &int8);
    run_bits("norms", 3, 0, norms_body, &hostile);
    run_bits("norms", 2, 0, norms_body, &local);
    run_bits("norms, int8", 2, 1, norms_body, &int8);
}

/* Looks for races between threads of the program, the library and the driver. */
static void run_raced(void)
{
    static const enum shoal_compression none = SHOAL_COMPRESS_NONE;
    static const struct kind late = {SHOAL_COMPRESS_NONE, "late=20,torn=2,seed=12", true, NULL},
                             functions = {SHOAL_COMPRESS_NONE, "values=0,late=20,torn=2,seed=13", false, NULL},
                             int8 = {SHOAL_COMPRESS_INT8, "late=20,torn=2,seed=14", false, NULL};
    run_steps("LOCAL steps", 2, 0, &late);
    run_steps("steps", 2, 0, &functions);
    run_steps("int8", 2, 1, &int8);
    world_divide(0);
    run("callbacks", 2, callback_body);
    run("several threads", 2, threads_body);
    run("marks in a callback", 2, callback_marks_body);
    run_faulty("a rank gives up", 2, given_up_body, none, false);
    world_expect_kill(1);
    run_faulty("a rank is killed", 2, killed_body, none, false);
    world_expect_kill(0);
}

static void run_all(void)
{
    run_kinds();
    run("residuals", 2, residuals_body);
    run("the driver refuses to export residuals", 2, refused_export_body);
    run("the driver refuses to import residuals", 2, refused_import_body);
    run("another stream is captured", 2, captured_other_body);
    world_divide(0);
    run("callbacks", 2, callback_body);
    world_divide(1);
    run("finish does not wait", 2, waiting_body);
    world_divide(0);
    run("several threads", 2, threads_body);
    run("gradients elsewhere", 2, marks_body);
    run("marks in a callback", 2, callback_marks_body);
    run("options", 2, options_body);
    run("no kernels", 2, kernels_body);
    run("a captured stream", 2, captured_body);
    run("a stream captured in mid-step", 2, captured_midway_body);
    run_faults();
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    mock_device_find();
    if (MOCK_DEVICE_IS_RACED)
        run_raced();
    else
        run_all();
    return world_finish();
}
