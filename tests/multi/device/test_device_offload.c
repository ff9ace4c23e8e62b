/* An optimizer in the reduction with parameters on a device, over the stand-in driver: the same bits as a reducer in host
 * memory, for all rules, types and kinds of steps. Also what it refuses, and faults: afterwards all ranks report the same
 * cause, no stream waits and nothing is left. */
#include <signal.h>
#include <unistd.h>

#include "device_bench.h"
#include "gradient_values.h"
#include "marking_threads.h"
#include "reference.h"
#include "shoal/checkpoints.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 13
#define ELEMENTS_MAX 4000
#define STEPS 3
#define LIMIT_MS 2000 /* while a device does nothing */

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* ---- Two reducers of one model ------------------------------------------------------------------------------------------- */

/* Gradient and parameter on the device, and what the stream copies to and from there. */
struct mirror {
    char *given, *before; /* sources of this step's gradient, and of the step before, which the stream may still read */
    char *gradient, *parameter;
    char *back; /* receives the parameter */
};

struct job {
    struct world *world;
    struct shoal_parameter parameters[PARAMETERS];
    struct mirror mirrors[PARAMETERS];
    struct shoal_optimizer_group group;
    struct shoal_optimizer optimizer;
    struct shoal_reducer_options options; /* of the reducer on the device */
    struct shoal_reducer *host, *device;
    void *stream;
    uint64_t random; /* this rank's own */
    uint64_t shared; /* the same on all ranks */
    int step;
    bool leaves_out; /* each rank leaves gradients of its own out of a step */
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
    job->group = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    job->group.rate = 0.03125;
    job->optimizer = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    job->optimizer.rule = SHOAL_ADAMW;
    job->optimizer.groups = &job->group;
    job->optimizer.group_count = 1;
    job->options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    job->options.buffer_bytes = 16 << 10;
    job->options.first_buffer_bytes = 4 << 10;
    job->options.rank_bytes = 1024;
    job->options.is_on_device = 1;
    job->options.stream = job->stream;
    job->options.optimizer = &job->optimizer;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 4 ? 700 : ELEMENTS_MAX;
        job->parameters[i] = (struct shoal_parameter){reference_below(&job->shared, most),
                                                      types[i % 2 ? 0 : reference_below(&job->shared, COUNT_OF(types))], NULL};
        struct mirror *mirror = &job->mirrors[i];
        mirror->given = calloc(ELEMENTS_MAX, 8);
        mirror->before = calloc(ELEMENTS_MAX, 8);
        mirror->back = calloc(ELEMENTS_MAX, 8);
        mirror->gradient = mock_device_allocate(ELEMENTS_MAX * 8);
        mirror->parameter = mock_device_allocate(ELEMENTS_MAX * 8);
    }
}

static enum shoal_status create_on_device(struct job *job)
{
    return shoal_reducer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &job->options,
                                &job->device);
}

/* Writes values to both sides, as kernels on the stream would. */
static void load_values(struct job *job, int shift)
{
    for (size_t i = 0; i < PARAMETERS; i++) {
        char *back = job->mirrors[i].back;
        for (size_t e = 0; e < job->parameters[i].count; e++)
            gradient_put(job->parameters[i].type, back, e, (double)((int)((i + e * 3) % 15) - 7 + shift) / 4);
        if (bytes_of(job, i) == 0)
            continue;
        mock_device_upload(job->mirrors[i].parameter, back, bytes_of(job, i), job->stream);
        if (job->host)
            memcpy(shoal_reducer_parameter(job->host, i), back, bytes_of(job, i));
    }
    OK(job->world, shoal_reducer_load_parameters(job->device));
    if (job->host)
        OK(job->world, shoal_reducer_load_parameters(job->host));
}

static void use_parameters(struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++)
        OK(job->world, shoal_reducer_use_parameter(job->device, i, job->mirrors[i].parameter));
}

static void create_both(struct job *job)
{
    struct shoal_reducer_options options = job->options;
    options.is_on_device = 0;
    OK(job->world, create_on_device(job));
    OK(job->world,
       shoal_reducer_create(job->world->context, job->world->comm, job->parameters, PARAMETERS, &options, &job->host));
    use_parameters(job);
    load_values(job, 0);
}

static void free_both(struct job *job)
{
    shoal_reducer_free(job->host);
    shoal_reducer_free(job->device);
    job->host = job->device = NULL;
}

/* Fails if anything is left in the driver. Ends the process. */
static void close_job(struct job *job)
{
    mock_device_synchronize(job->stream);
    free_both(job);
    for (size_t i = 0; i < PARAMETERS; i++) {
        mock_device_release(job->mirrors[i].gradient);
        mock_device_release(job->mirrors[i].parameter);
    }
    mock_device_stop();
    shoal_context_destroy(job->world->context);
    if (!mock_device_is_real())
        expect_nothing_left(job->world);
    exit(0);
}

/* ---- Steps --------------------------------------------------------------------------------------------------------------- */

/* Stands in for the kernels of the backward pass: the stream writes the gradient before its mark. */
static void compute(struct job *job, size_t parameter)
{
    struct mirror *mirror = &job->mirrors[parameter];
    char *given = mirror->given;
    mirror->given = mirror->before;
    mirror->before = given;
    for (size_t e = 0; e < job->parameters[parameter].count; e++)
        gradient_put(job->parameters[parameter].type, mirror->given, e,
                     gradient_value(job->step, job->world->rank, parameter, e));
}

static void upload(struct job *job, size_t parameter)
{
    const struct mirror *mirror = &job->mirrors[parameter];
    if (bytes_of(job, parameter))
        mock_device_upload(mirror->gradient, mirror->given, bytes_of(job, parameter), job->stream);
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

/* Marks a gradient on both sides, whole or in two parts, or leaves it out on both. */
static void mark_both(struct job *job, size_t parameter)
{
    const size_t count = job->parameters[parameter].count;
    if (job->leaves_out && reference_below(&job->random, 3) == 0) {
        OK(job->world, shoal_reducer_unused(job->device, parameter));
        OK(job->world, shoal_reducer_unused(job->host, parameter));
        return;
    }
    const size_t middle = count && reference_below(&job->random, 3) == 0 ? reference_below(&job->random, count) : 0;
    upload(job, parameter);
    OK(job->world, mark(job, job->device, parameter, job->mirrors[parameter].gradient, middle));
    OK(job->world, mark(job, job->host, parameter, job->mirrors[parameter].given, middle));
}

/* Work put on the stream after finish sees the new parameters, without waiting first. */
static void expect_alike(struct job *job)
{
    for (size_t i = 0; i < PARAMETERS; i++)
        if (bytes_of(job, i))
            mock_device_download(job->mirrors[i].back, job->mirrors[i].parameter, bytes_of(job, i), job->stream);
    mock_device_synchronize(job->stream);
    for (size_t i = 0; i < PARAMETERS; i++)
        CHECK(job->world, memcmp(job->mirrors[i].back, shoal_reducer_parameter(job->host, i), bytes_of(job, i)) == 0,
              "step %d, rule %d: parameter %zu of type %d differs", job->step, (int)job->optimizer.rule, i,
              (int)job->parameters[i].type);
}

static bool is_near(double one, double other)
{
    return one == other || (one != one && other != other) || (one - other < 1e-12 * one && other - one < 1e-12 * one);
}

static void expect_results_alike(const struct job *job, const struct shoal_step_result *there,
                                 const struct shoal_step_result *here)
{
    CHECK(job->world, there->active == here->active && there->step == here->step, "%d active in step %d", there->active,
          (int)there->step);
    CHECK(job->world, there->nonfinite_parameter == here->nonfinite_parameter && there->is_skipped == here->is_skipped,
          "parameter %lld is not finite, not %lld", (long long)there->nonfinite_parameter,
          (long long)here->nonfinite_parameter);
    CHECK(job->world, is_near(there->local_squared, here->local_squared) && is_near(there->squared, here->squared),
          "norms are %a and %a, not %a and %a", there->local_squared, there->squared, here->local_squared, here->squared);
    CHECK(job->world, is_near(there->clip, here->clip), "clipped by %a, not %a", there->clip, here->clip);
}

static void expect_noise_alike(const struct job *job)
{
    struct shoal_noise_average there = SHOAL_NOISE_AVERAGE_INIT, here = SHOAL_NOISE_AVERAGE_INIT;
    if (job->options.noise_window == 0)
        return;
    OK(job->world, shoal_reducer_noise_average(job->device, &there));
    OK(job->world, shoal_reducer_noise_average(job->host, &here));
    CHECK(job->world,
          there.steps == here.steps && there.single == here.single && there.not_finite == here.not_finite &&
              there.steps + there.single + there.not_finite > 0,
          "%d steps and %d without norms, not %d and %d", (int)there.steps, (int)there.not_finite, (int)here.steps,
          (int)here.not_finite);
    const double near = 1e-9 * (fabs(here.squared) + fabs(here.variance));
    CHECK(job->world, fabs(there.squared - here.squared) <= near && fabs(there.variance - here.variance) <= near,
          "the averages are %a and %a, not %a and %a", there.squared, there.variance, here.squared, here.variance);
}

static void run_step(struct job *job, bool is_spoiled)
{
    struct shoal_step_result there = SHOAL_STEP_RESULT_INIT, here = SHOAL_STEP_RESULT_INIT;
    uint32_t order[PARAMETERS];
    reference_shuffle(&job->random, order, PARAMETERS);
    OK(job->world, shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE));
    OK(job->world, shoal_reducer_begin(job->host, SHOAL_STEP_REDUCE));
    for (size_t i = 0; i < PARAMETERS; i++)
        compute(job, i);
    if (is_spoiled && job->world->rank == job->world->size - 1)
        gradient_put(job->parameters[4].type, job->mirrors[4].given, job->parameters[4].count / 2, (double)INFINITY);
    for (size_t i = 0; i < PARAMETERS; i++)
        mark_both(job, order[i]);
    OK(job->world, shoal_reducer_finish(job->device, &there));
    OK(job->world, shoal_reducer_finish(job->host, &here));
    expect_results_alike(job, &there, &here);
    expect_noise_alike(job);
    expect_alike(job);
    job->step++;
}

/* Options that are the same on all ranks. */
static void draw_options(struct job *job)
{
    const uint64_t way = reference_below(&job->shared, 4);
    job->optimizer.steps_early = job->optimizer.rule != SHOAL_LAMB && reference_below(&job->shared, 2);
    job->optimizer.is_atomic = (int)reference_below(&job->shared, 2);
    job->optimizer.degree = job->world->size % 2 == 0 && reference_below(&job->shared, 2) ? 2 : 0;
    job->options.op = reference_below(&job->shared, 3) ? SHOAL_AVG : SHOAL_SUM;
    job->options.flight_bytes = reference_below(&job->shared, 2) ? 1 : 0;
    job->options.has_norms = (int)reference_below(&job->shared, 2);
    job->options.noise_window = job->options.has_norms ? 3 : 0;
    job->options.checks_finite = way & 1;
    job->options.max_norm = way & 2 ? 0.5 : 0;
    job->options.allows_unused = job->leaves_out = reference_below(&job->shared, 2);
}

static void steps_body(struct world *world)
{
    struct job job;
    open_job(&job, world, world->arg, 5);
    for (enum shoal_optimizer_rule rule = SHOAL_SGD; rule <= SHOAL_LAMB; rule++) {
        world->seed = job.shared = 40 + (uint64_t)rule;
        job.optimizer.rule = rule;
        draw_options(&job);
        create_both(&job);
        for (int step = 0; step < STEPS; step++)
            run_step(&job, job.options.checks_finite && step == 1 && job.parameters[4].count > 0);
        load_values(&job, 3); /* the program changes the parameters */
        run_step(&job, false);
        mock_device_synchronize(job.stream);
        free_both(&job);
    }
    close_job(&job);
}

/* Each rank has a different number of steps, and then takes part in those of the others. */
static void uneven_body(struct world *world)
{
    struct job job;
    int more = 1, more_here = 1;
    open_job(&job, world, world->arg, 6);
    job.options.is_uneven = job.options.divides_by_active = 1;
    job.options.max_norm = 0.5;
    create_both(&job);
    for (int step = world->rank; step < STEPS; step++)
        run_step(&job, false);
    while (more) {
        struct shoal_step_result there = SHOAL_STEP_RESULT_INIT, here = SHOAL_STEP_RESULT_INIT;
        OK(world, shoal_reducer_join(job.device, &more, &there));
        OK(world, shoal_reducer_join(job.host, &more_here, &here));
        CHECK(world, more == more_here, "is there more?");
        expect_results_alike(&job, &there, &here);
        expect_alike(&job);
    }
    close_job(&job);
}

/* States are in host memory: read there, and taken over by a reducer without a device. */
static void states_body(struct world *world)
{
    static double there[ELEMENTS_MAX], here[ELEMENTS_MAX];
    struct job job;
    open_job(&job, world, "late=30,torn=2,seed=9", 9);
    create_both(&job);
    run_step(&job, false);
    for (size_t i = 0; i < PARAMETERS; i++)
        for (enum shoal_optimizer_state s = SHOAL_STATE_MASTER; s <= SHOAL_STATE_SECOND; s++) {
            OK(world, shoal_reducer_read_state(job.device, i, s, there));
            OK(world, shoal_reducer_read_state(job.host, i, s, here));
            CHECK(world, memcmp(there, here, sizeof here) == 0, "state %d of parameter %zu differs", (int)s, i);
        }
    CHECK(world, shoal_reducer_optimizer_bytes(job.device) == shoal_reducer_optimizer_bytes(job.host), "bytes of states");
    close_job(&job);
}

/* A checkpoint of the reducer on the device is loaded by both: values go up to the device at once. */
static void checkpoint_body(struct world *world)
{
    char folder[64];
    struct shoal_save_options options = SHOAL_SAVE_OPTIONS_INIT;
    struct job job;
    snprintf(folder, sizeof folder, "/tmp/shoal-offload-%d", (int)getppid());
    open_job(&job, world, "late=30,torn=2,seed=9", 9);
    create_both(&job);
    run_step(&job, false);
    OK(world, shoal_reducer_save(job.device, folder, &options));
    run_step(&job, false);
    OK(world, shoal_reducer_load(job.device, folder, NULL, NULL));
    OK(world, shoal_reducer_load(job.host, folder, NULL, NULL));
    expect_alike(&job);
    run_step(&job, false);
    OK(world, shoal_barrier(world->comm, NULL));
    options.step = 1;
    options.keep = 1;
    OK(world, shoal_reducer_save(job.host, folder, &options)); /* removes the other */
    if (world->rank == 0) {
        char path[160];
        for (int shard = 0; shard < world->size; shard++) {
            snprintf(path, sizeof path, "%s/step-000000000001/shard-%05d-of-%05d.shoal", folder, shard, world->size);
            CHECK(world, unlink(path) == 0, "no %s", path);
        }
        snprintf(path, sizeof path, "%s/step-000000000001/complete", folder);
        CHECK(world, unlink(path) == 0, "no %s", path);
        snprintf(path, sizeof path, "%s/step-000000000001", folder);
        CHECK(world, rmdir(path) == 0 && rmdir(folder) == 0, "other files in %s", folder);
    }
    close_job(&job);
}

static void mark_on_device(void *arg, size_t parameter)
{
    struct job *job = arg;
    char *gradient = job->mirrors[parameter].gradient;
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
            compute(&job, i);
            upload(&job, i);
            OK(world, shoal_reducer_ready(job.host, i, job.mirrors[i].given, job.parameters[i].count));
        }
        mark_in_threads(world, mark_on_device, &job, PARAMETERS);
        OK(world, shoal_reducer_finish(job.device, NULL));
        OK(world, shoal_reducer_finish(job.host, NULL));
        expect_alike(&job);
        job.step++;
    }
    close_job(&job);
}

/* ---- Refused ------------------------------------------------------------------------------------------------------------- */

static void expect_told(struct job *job, enum shoal_status status, enum shoal_status wanted, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    CHECK(job->world, status == wanted, "%s instead of %s", shoal_status_name(status), shoal_status_name(wanted));
    OK(job->world, shoal_last_failure(job->world->context, NULL, &failure));
    CHECK(job->world, strstr(failure.text, word), "\"%s\" is not in: %s", word, failure.text);
}

static void calls_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "devices=2,seed=1", 1);
    char *other = mock_device_allocate_on_other(8);
    OK(world, create_on_device(&job));
    expect_told(&job, shoal_reducer_begin(job.device, SHOAL_STEP_REDUCE), SHOAL_ERR_STATE, "has no memory on the device");
    expect_told(&job, shoal_reducer_load_parameters(job.device), SHOAL_ERR_STATE, "shoal_reducer_use_parameter");
    expect_told(&job, shoal_reducer_use_parameter(job.device, PARAMETERS, job.mirrors[0].parameter), SHOAL_ERR_ARGUMENT,
                "out of range");
    expect_told(&job, shoal_reducer_use_parameter(job.device, 0, NULL), SHOAL_ERR_ARGUMENT, "NULL");
    expect_told(&job, shoal_reducer_use_parameter(job.device, 0, job.mirrors[0].given), SHOAL_ERR_ARGUMENT, "host memory");
    expect_told(&job, shoal_reducer_use_parameter(job.device, 0, other), SHOAL_ERR_ARGUMENT, "device 1");
    free_both(&job);
    create_both(&job);
    expect_told(&job, shoal_reducer_use_parameter(job.host, 0, job.mirrors[0].parameter), SHOAL_ERR_STATE, "is_on_device");
    expect_told(&job, shoal_reducer_begin(job.device, SHOAL_STEP_LOCAL), SHOAL_ERR_UNSUPPORTED, "LOCAL");
    run_step(&job, false);
    mock_device_synchronize(job.stream);
    mock_device_release(other);
    close_job(&job);
}

static void options_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=1", 1);
    job.options.has_thread = 1;
    expect_told(&job, create_on_device(&job), SHOAL_ERR_UNSUPPORTED, "has_thread");
    job.options.has_thread = 0;
    job.options.compression = SHOAL_COMPRESS_INT8;
    expect_told(&job, create_on_device(&job), SHOAL_ERR_UNSUPPORTED, "compression");
    job.options.compression = SHOAL_COMPRESS_NONE;
    if (world->rank == 0)
        control.fail_of("cuMemHostRegister", 1, SHOAL_CU_OUT_OF_MEMORY);
    expect_told(&job, create_on_device(&job), SHOAL_ERR_MEMORY, "rank 0");
    control.fail_of(NULL, 0, 0);
    create_both(&job);
    run_step(&job, false);
    close_job(&job);
}

/* ---- Faults -------------------------------------------------------------------------------------------------------------- */

/* A step of the device alone, which may fail on some rank. */
static enum shoal_status try_step(struct job *job)
{
    enum shoal_status status = shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE);
    for (size_t i = PARAMETERS; i-- > 0 && status == SHOAL_OK;) {
        compute(job, i);
        upload(job, i);
        status = shoal_reducer_ready(job->device, i, job->mirrors[i].gradient, job->parameters[i].count);
    }
    const enum shoal_status finished = shoal_reducer_finish(job->device, NULL);
    job->step++;
    return status == SHOAL_OK ? finished : status;
}

static void expect_cause(struct job *job, enum shoal_status wanted, int rank, const char *word)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    OK(job->world, shoal_reducer_failure(job->device, &failure));
    CHECK(job->world, failure.status == wanted && failure.rank == rank && strstr(failure.text, word),
          "%s of rank %d, without \"%s\": %s", shoal_status_name(failure.status), failure.rank, word, failure.text);
    mock_device_synchronize(job->stream); /* returns: no stream waits */
    CHECK(job->world, shoal_reducer_begin(job->device, SHOAL_STEP_REDUCE) == wanted, "a failed reducer begins a step");
}

static void open_faulty_job(struct job *job, struct world *world, const char *modes)
{
    open_job(job, world, modes, 3);
    job->options.max_norm = 1; /* parameters go up in finish */
    OK(world, create_on_device(job));
    use_parameters(job);
    load_values(job, 0);
    OK(world, try_step(job));
    world_meet(world);
}

/* The driver refuses one call on the last rank: the argument. Copies up are the end of a step, so other ranks may learn in the
 * next one that one has failed. The test itself has copied gradients up before. */
static void refused_body(struct world *world)
{
    const char *call = world->arg;
    const bool is_up = !strcmp(call, "cuMemcpyHtoDAsync");
    int own = 0;
    struct job job;
    open_faulty_job(&job, world, "seed=2");
    for (size_t i = 0; is_up && i < PARAMETERS; i++)
        own += bytes_of(&job, i) > 0;
    if (world->rank == world->size - 1)
        control.fail_of(call, own + 2, SHOAL_CU_OPERATING_SYSTEM);
    enum shoal_status status = try_step(&job);
    control.fail_of(NULL, 0, 0);
    if (is_up && world->rank == 0 && status == SHOAL_OK)
        status = try_step(&job);
    CHECK(world, status == SHOAL_ERR_SYSTEM, "%s", shoal_status_name(status));
    expect_cause(&job, SHOAL_ERR_SYSTEM, world->size - 1, call);
    close_job(&job);
}

/* The device does nothing on one rank. */
static void hanging_body(struct world *world)
{
    struct job job;
    open_job(&job, world, "seed=3", 3);
    job.options.timeout_ms = world->size == 1 ? LIMIT_MS : 20000;
    OK(world, create_on_device(&job));
    use_parameters(&job);
    load_values(&job, 0);
    OK(world, try_step(&job));
    control.hold_of(true);
    CHECK(world, try_step(&job) == SHOAL_ERR_TIMEOUT, "finish waits for the device");
    control.hold_of(false);
    expect_cause(&job, SHOAL_ERR_TIMEOUT, 0, "have not come from the device 2000 ms after finish");
    close_job(&job);
}

static void killed_body(struct world *world)
{
    struct job job;
    open_faulty_job(&job, world, "late=50,seed=2");
    if (world->rank == world->size - 1)
        raise(SIGKILL);
    CHECK(world, try_step(&job) == SHOAL_ERR_PEER_LOST, "the step did not fail");
    expect_cause(&job, SHOAL_ERR_PEER_LOST, world->size - 1, "killed");
    close_job(&job);
}

/* ---- Worlds -------------------------------------------------------------------------------------------------------------- */

static void run(const char *name, int size, world_body_fn body, const char *arg)
{
    world_run(&(const struct world_options){name, size, NULL, body, arg});
}

static void run_steps(int size, int ranks_per_host, const char *modes)
{
    char name[160];
    snprintf(name, sizeof name, "the same bits: %d ranks, %d on a host, %s", size, ranks_per_host ? ranks_per_host : size,
             modes);
    world_divide(ranks_per_host);
    run(name, size, steps_body, modes);
    world_divide(0);
}

static void run_faults(void)
{
    static const char *const calls[] = {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery",
                                        "cuStreamWaitEvent"};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        char name[80];
        snprintf(name, sizeof name, "the driver refuses %s", calls[i]);
        run(name, 2, refused_body, calls[i]);
    }
    run("the device does nothing", 1, hanging_body, NULL);
    world_expect_kill(2);
    run("a rank is killed", 3, killed_body, NULL);
    world_expect_kill(0);
}

int main(int argument_count, char **arguments)
{
    world_choose(argument_count, arguments);
    mock_device_find();
    run_steps(1, 0, "seed=1");
    run_steps(2, 0, "late=30,torn=2,poison=1,seed=4");
    run_steps(3, 0, "values=0,late=20,torn=2,seed=13");
    run_steps(4, 2, "late=20,seed=5");
    run("uneven steps", 3, uneven_body, "late=30,torn=2,seed=6");
    run("states", 2, states_body, NULL);
    run("a checkpoint", 2, checkpoint_body, NULL);
    run("several threads", 2, threads_body, NULL);
    run("calls", 2, calls_body, NULL);
    run("options", 2, options_body, NULL);
    run_faults();
    return world_finish();
}
