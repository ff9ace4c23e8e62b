/* Engines over the simulated transport, all ranks in one thread, in virtual time: exact results in any weather, and a named
 * end of every operation when an event is lost, a rank dies, or calls do not agree. */
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "device/device_stage.h"
#include "engine/engine_state.h"
#include "operand/makers.h"
#include "operations.h"
#include "reference.h"
#include "seeds.h"
#include "sim/sim_device.h"
#include "sim/sim_transport.h"

#define RANKS_MAX 512
#define CALLS_MAX 24
#define MEMORY_BYTES ((size_t)768 << 10) /* of each area of a rank */
#define TICK_NS UINT64_C(1000000)
#define TIMEOUT_MS 20000

/* One call of a program on one rank. */
struct doing {
    struct operation_side operation;
    struct exchange_side exchange; /* instead */
    bool is_exchange;
    bool is_spoiled; /* it ended with the right result, and its operands were overwritten */
    char wrong[512]; /* it ended with a wrong result */
};

struct rank_of_world {
    struct shoal_engine *engine;
    struct shoal_log log;
    struct shoal_request requests[CALLS_MAX];
    struct doing doings[CALLS_MAX]; /* of a program */
    struct areas areas;
    struct sim_device *device; /* NULL: all operands are in host memory */
    bool is_gone;
};

struct world {
    int size;
    struct shoal_sim *sim;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    uint64_t device_random;
    size_t device_pace; /* a device copies in one of this many turns */
    struct rank_of_world *ranks;
    unsigned failures_logged;
    char last_line[1400];
};

/* A list of calls, one after the other: collectives and groups of messages. The same on every rank. */
struct program {
    struct operation operations[CALLS_MAX];
    struct exchange exchanges[CALLS_MAX];
    bool is_exchange[CALLS_MAX];
    int count;
    size_t room; /* of each call in the areas */
};

static uint64_t now_ns(void *arg)
{
    return shoal_sim_now_ns(arg);
}

static void hear(void *arg, int level, const char *line)
{
    struct world *world = arg;
    (void)level;
    world->failures_logged++;
    snprintf(world->last_line, sizeof world->last_line, "%s", line);
}

/* A rank reuses its areas of the previous world: memory from the kernel costs more than what most worlds do. */
static struct areas open_areas(struct shoal_sim *sim, int rank)
{
    static struct areas kept[RANKS_MAX];
    struct areas *areas = &kept[rank];
    areas->bytes = MEMORY_BYTES;
    for (int i = 0; i < 2; i++) {
        areas->plain[i] = areas->plain[i] ? areas->plain[i] : aligned_alloc(SHOAL_CACHE_LINE, MEMORY_BYTES);
        areas->shared[i] = areas->shared[i] ? areas->shared[i] : aligned_alloc(SHOAL_CACHE_LINE, MEMORY_BYTES);
        assert_true(areas->plain[i] && areas->shared[i]);
        assert_int_equal(shoal_sim_share(sim, rank, areas->shared[i], MEMORY_BYTES), SHOAL_OK);
    }
    return *areas;
}

static struct world *open_world(const struct shoal_sim_options *weather, const char *const *overrides)
{
    char error[256];
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    world->size = weather->size;
    world->ranks = calloc((size_t)world->size, sizeof *world->ranks);
    assert_non_null(world->ranks);
    assert_int_equal(shoal_settings_load(&world->settings, overrides, error, sizeof error), SHOAL_OK);
    assert_int_equal(shoal_tuning_load(&world->tuning, world->settings.tuning.algorithms, error, sizeof error), SHOAL_OK);
    struct shoal_sim_options options = *weather;
    options.counter_start = world->settings.engine.counter_start;
    assert_int_equal(shoal_sim_create(&options, &world->sim), SHOAL_OK);
    for (int r = 0; r < world->size; r++) {
        struct rank_of_world *rank = &world->ranks[r];
        shoal_log_init(&rank->log, &world->settings.log, hear, world);
        rank->areas = open_areas(world->sim, r);
        const struct shoal_engine_options engine_options = {.name = "sim",
                                                            .transport = shoal_sim_transport(world->sim, r),
                                                            .kernels = shoal_kernels_find("auto"),
                                                            .settings = &world->settings.engine,
                                                            .warn_ms = world->settings.bootstrap.warn_ms,
                                                            .tuning = &world->tuning,
                                                            .log = &rank->log,
                                                            .now_ns = now_ns,
                                                            .now_arg = world->sim,
                                                            .timeout_ms = TIMEOUT_MS};
        assert_int_equal(shoal_engine_create(&engine_options, &rank->engine), SHOAL_OK);
    }
    return world;
}

/* Gives every rank a device from now on; the seed decides which operands are on it. */
static void open_devices(struct world *world, uint64_t seed)
{
    world->device_random = seed;
    world->device_pace = 1 + reference_below(&world->device_random, 30);
    for (int r = 0; r < world->size; r++) {
        world->ranks[r].device =
            sim_device_open(seed * 31 + (uint64_t)r, shoal_engine_range_bytes(world->ranks[r].engine, false),
                            shoal_engine_range_bytes(world->ranks[r].engine, true));
        assert_non_null(world->ranks[r].device);
        if ((seed + (uint64_t)r / 3) % 3) /* most worlds, or some ranks of them, lend operands */
            sim_device_lend(world->ranks[r].device, world->sim, r);
    }
}

/* The engine is gone and has dropped all operands, however their operations ended. */
static void close_device(struct world *world, int r)
{
    struct sim_device *device = world->ranks[r].device;
    if (!device)
        return;
    const char *breach = sim_device_breach(device);
    if (breach)
        fail_msg("the engine of rank %d broke the device's contract: %s", r, breach);
    assert_int_equal(sim_device_open_count(device), 0);
    sim_device_close(device);
}

static void close_world(struct world *world)
{
    const char *breach = shoal_sim_breach(world->sim);
    if (breach)
        fail_msg("the engine broke the transport's contract: %s", breach);
    for (int r = 0; r < world->size; r++) {
        shoal_engine_destroy(world->ranks[r].engine);
        close_device(world, r);
        shoal_log_fini(&world->ranks[r].log);
    }
    shoal_sim_destroy(world->sim);
    shoal_tuning_fini(&world->tuning);
    free(world->ranks);
    free(world);
}

/* ---- Driving ---- */

static void post(struct world *world, int r, int index, const struct shoal_call *call)
{
    struct shoal_request *request = &world->ranks[r].requests[index];
    memset(request, 0, sizeof *request);
    shoal_engine_post(world->ranks[r].engine, call, request);
}

static enum shoal_status status_of(struct world *world, int r, int index)
{
    return shoal_request_status(&world->ranks[r].requests[index]);
}

static bool all_done(struct world *world, int count)
{
    for (int r = 0; r < world->size; r++) {
        for (int i = 0; i < count; i++) {
            if (!world->ranks[r].is_gone && status_of(world, r, i) == SHOAL_PENDING)
                return false;
        }
    }
    return true;
}

static bool progress_round(struct world *world)
{
    bool did = false;
    for (int r = 0; r < world->size; r++) {
        struct shoal_engine *engine = world->ranks[r].engine;
        if (world->ranks[r].is_gone)
            continue;
        did |= shoal_engine_progress(engine);
        shoal_engine_flush(engine);
    }
    return did;
}

static void check_round(struct world *world)
{
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r].is_gone)
            continue;
        shoal_engine_check(world->ranks[r].engine, shoal_engine_now_ns(world->ranks[r].engine));
        shoal_engine_flush(world->ranks[r].engine);
    }
}

/* In a world of several hundred ranks, delivers one event between two rounds: there each round is slow, and events are many.
 * Returns false if there was none. */
static bool advance(struct world *world)
{
    const int most = world->size <= 64 ? 1 : world->size / 8;
    int events = 0;
    while (events < most && shoal_sim_advance(world->sim))
        events++;
    return events > 0;
}

/* Devices are slow and take turns. */
static void turn_devices(struct world *world)
{
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r].device && !world->ranks[r].is_gone && !reference_below(&world->device_random, world->device_pace))
            sim_device_advance(world->ranks[r].device);
    }
}

/* Makes a copy on any device; returns false if no copy can be made. */
static bool advance_devices(struct world *world)
{
    const int first = (int)reference_below(&world->device_random, (size_t)world->size);
    for (int i = 0; i < world->size; i++) {
        const struct rank_of_world *rank = &world->ranks[(first + i) % world->size];
        if (!rank->device || rank->is_gone || !sim_device_advance(rank->device))
            continue;
        shoal_sim_advance_to(world->sim, shoal_sim_now_ns(world->sim) + reference_below(&world->device_random, 50000));
        return true;
    }
    return false;
}

/* Drives until all requests are done or the virtual time has passed. Returns true if they are done. */
static bool drive(struct world *world, int count, uint64_t until_ns)
{
    uint64_t next_check_ns = 0;
    while (!all_done(world, count) && shoal_sim_now_ns(world->sim) < until_ns) {
        const uint64_t before_ns = shoal_sim_now_ns(world->sim);
        if (before_ns >= next_check_ns) {
            check_round(world);
            next_check_ns = before_ns + 10 * TICK_NS;
        }
        turn_devices(world);
        if (progress_round(world))
            continue;
        if (!advance(world) && !advance_devices(world))
            shoal_sim_advance_to(world->sim, before_ns + 10 * TICK_NS);
    }
    return all_done(world, count);
}

/* ---- Programs ---- */

static struct program draw_program(uint64_t seed, int size, int count)
{
    struct program program = {.count = count, .room = MEMORY_BYTES / (size_t)count / SHOAL_CACHE_LINE * SHOAL_CACHE_LINE};
    uint64_t random = seed;
    for (int i = 0; i < count; i++) {
        program.is_exchange[i] = reference_below(&random, 8) == 0;
        if (program.is_exchange[i])
            program.exchanges[i] = exchange_draw(&random, size, program.room);
        else
            program.operations[i] = operation_draw(&random, size, program.room);
    }
    return program;
}

static size_t longest(const size_t *counts, int size, size_t least)
{
    for (int i = 0; counts && i < size; i++)
        least = shoal_max_size(least, counts[i]);
    return least;
}

static enum shoal_collective_type kind_of(enum operation_kind kind)
{
    static const enum shoal_collective_type kinds[OPERATION_KIND_END] = {
        [OPERATION_ALLREDUCE] = SHOAL_COLLECTIVE_ALLREDUCE,
        [OPERATION_REDUCE] = SHOAL_COLLECTIVE_REDUCE,
        [OPERATION_REDUCE_SCATTER] = SHOAL_COLLECTIVE_REDUCE_SCATTER,
        [OPERATION_BROADCAST] = SHOAL_COLLECTIVE_BROADCAST,
        [OPERATION_ALLGATHER] = SHOAL_COLLECTIVE_ALLGATHER,
        [OPERATION_GATHER] = SHOAL_COLLECTIVE_GATHER,
        [OPERATION_SCATTER] = SHOAL_COLLECTIVE_SCATTER,
        [OPERATION_ALLTOALL] = SHOAL_COLLECTIVE_ALLTOALL,
        [OPERATION_BARRIER] = SHOAL_COLLECTIVE_BARRIER,
    };
    return kinds[kind];
}

/* Fills in the arrays of a call with several tensors, or with parts of different lengths. */
static void lay_out(const struct operation *operation, const struct operation_arguments *arguments, int rank, int size,
                    struct shoal_call *call, struct shoal_call_arrays *arrays)
{
    if (operation->form == FORM_TENSORS) {
        *arrays = (struct shoal_call_arrays){
            .tensors = arguments->tensors, .tensor_count = (size_t)operation->tensors, .has_tensors = true};
        call->input = call->output = NULL;
        call->count = 0;
        for (int t = 0; t < operation->tensors; t++)
            call->count += arguments->tensors[t].count;
    } else if (operation->form == FORM_PARTS) {
        *arrays = (struct shoal_call_arrays){.sent = arguments->given,
                                             .sent_at = arguments->given_at,
                                             .received = arguments->taken,
                                             .received_at = arguments->taken_at};
        call->count = longest(arguments->given, size, longest(arguments->taken, size, 0));
    } else {
        return;
    }
    call->arrays = arrays;
    assert_true(shoal_call_lay_out(call, rank, size));
}

/* Makes the call as src/comm passes it to the engine: operands that the rank does not have are NULL. */
static struct shoal_call call_of(const struct operation_side *side, const struct operation_arguments *arguments,
                                 struct shoal_call_arrays *arrays)
{
    const struct operation *operation = &side->operation;
    const int rank = side->team.rank, size = side->team.size;
    struct shoal_call call = {.collective = kind_of(operation->kind),
                              .type = operation->type,
                              .op = operation->op,
                              .root = operation->root,
                              .count = operation->count,
                              .scale = operation->scale};
    const struct shoal_shape *shape = &shoal_collective_traits(call.collective)->shape;
    call.input = shoal_shape_contributes(shape, rank, call.root) ? arguments->input : NULL;
    call.output = shoal_shape_receives(shape, rank, call.root) ? arguments->output : NULL;
    lay_out(operation, arguments, rank, size, &call, arrays);
    return call;
}

/* When a call is done on a rank, its result must be complete, and its operands may be overwritten. */
static void end_call(void *arg, enum shoal_status status)
{
    struct doing *doing = arg;
    if (status != SHOAL_OK)
        return;
    doing->is_spoiled = doing->is_exchange ? exchange_check(&doing->exchange, doing->wrong, sizeof doing->wrong)
                                           : operation_check(&doing->operation, doing->wrong, sizeof doing->wrong);
    if (doing->is_spoiled && doing->is_exchange)
        exchange_spoil(&doing->exchange);
    else if (doing->is_spoiled)
        operation_spoil(&doing->operation);
}

/* Puts three of four messages on the device. */
static void put_message_on_device(struct world *world, int r, struct shoal_call *call)
{
    const unsigned operand = 1u << (call->collective == SHOAL_COLLECTIVE_SEND ? SHOAL_INPUT : SHOAL_OUTPUT);
    sim_device_take(world->ranks[r].device, call, r, world->size, reference_below(&world->device_random, 4) ? operand : 0);
}

static void post_exchange(struct world *world, int r, const struct exchange_side *side, struct shoal_request *request)
{
    struct shoal_message messages[EXCHANGE_MESSAGES_MAX];
    struct shoal_call calls[EXCHANGE_MESSAGES_MAX];
    const size_t count = exchange_list(side, messages);
    for (size_t i = 0; i < count; i++)
        calls[i] = (struct shoal_call){.collective = messages[i].is_send ? SHOAL_COLLECTIVE_SEND : SHOAL_COLLECTIVE_RECV,
                                       .type = messages[i].type,
                                       .root = messages[i].peer,
                                       .tag = messages[i].tag,
                                       .input = messages[i].is_send ? messages[i].buffer : NULL,
                                       .output = messages[i].is_send ? NULL : messages[i].buffer,
                                       .count = messages[i].count};
    for (size_t i = 0; i < count && world->ranks[r].device; i++)
        put_message_on_device(world, r, &calls[i]);
    assert_int_equal(shoal_engine_post_group(world->ranks[r].engine, calls, count, request), SHOAL_OK);
}

/* Puts three of four operands that the rank has on the device. Calls of several tensors, which are packed there, and
 * operations in place have both there. */
static void put_on_device(struct world *world, int r, const struct operation *operation, struct shoal_call *call)
{
    const struct shoal_shape *shape = &shoal_collective_traits(call->collective)->shape;
    const unsigned given = shoal_shape_contributes(shape, r, call->root) ? 1u << SHOAL_INPUT : 0;
    const unsigned taken = shoal_shape_receives(shape, r, call->root) ? 1u << SHOAL_OUTPUT : 0;
    unsigned drawn = (unsigned)reference_below(&world->device_random, 4) | (unsigned)reference_below(&world->device_random, 4);
    if (drawn && (operation->form == FORM_TENSORS || operation->place != PLACE_APART))
        drawn = given | taken;
    sim_device_take(world->ranks[r].device, call, r, world->size, drawn & (given | taken));
}

static void post_item(struct world *world, const struct program *program, int r, int i)
{
    struct rank_of_world *rank = &world->ranks[r];
    struct doing *doing = &rank->doings[i];
    const struct team team = {world->size, r, NULL};
    const size_t begin = (size_t)i * program->room;
    memset(doing, 0, sizeof *doing);
    rank->requests[i] = (struct shoal_request){.done_fn = end_call, .done_arg = doing};
    doing->is_exchange = program->is_exchange[i];
    if (doing->is_exchange) {
        doing->exchange = exchange_prepare(&program->exchanges[i], &team, &rank->areas, begin);
        post_exchange(world, r, &doing->exchange, &rank->requests[i]);
        return;
    }
    doing->operation = operation_prepare(&program->operations[i], &team, &rank->areas, begin);
    struct operation_arguments arguments = operation_open_arguments(&doing->operation);
    struct shoal_call_arrays arrays;
    struct shoal_call call = call_of(&doing->operation, &arguments, &arrays);
    if (rank->device)
        put_on_device(world, r, &doing->operation.operation, &call);
    operation_close_arguments(&arguments);
    shoal_engine_post(rank->engine, &call, &rank->requests[i]);
}

static void post_program(struct world *world, const struct program *program)
{
    for (int i = 0; i < program->count; i++) {
        for (int r = 0; r < world->size; r++)
            post_item(world, program, r, i);
    }
}

/* Some ranks are far ahead of others: their messages wait for the others' calls. The more ranks there are, the fewer turns all
 * of them take for each post. Otherwise a world of hundreds would spend an hour posting. */
static void post_in_turns(struct world *world, const struct program *program, uint64_t seed)
{
    int next[RANKS_MAX] = {0};
    uint64_t random = seed;
    const size_t most_turns = world->size <= 32 ? 40 : 2 + 40 * 32 / (size_t)world->size;
    for (int left = program->count * world->size; left > 0;) {
        const int r = (int)reference_below(&random, (size_t)world->size);
        for (size_t posts = reference_below(&random, 6); posts > 0 && next[r] < program->count; posts--, left--)
            post_item(world, program, r, next[r]++);
        for (size_t turns = reference_below(&random, most_turns); turns > 0; turns--) {
            progress_round(world);
            turn_devices(world);
            shoal_sim_advance(world->sim);
        }
    }
}

static void assert_results(struct world *world, const struct program *program, uint64_t seed)
{
    for (int i = 0; i < program->count; i++) {
        for (int r = 0; r < world->size; r++) {
            struct doing *doing = &world->ranks[r].doings[i];
            if (status_of(world, r, i) != SHOAL_OK)
                fail_msg("seed %llu: call %d of rank %d ended with %s", (unsigned long long)seed, i, r,
                         shoal_status_name(status_of(world, r, i)));
            const bool is_ok =
                doing->is_spoiled &&
                (doing->is_exchange ? exchange_is_spoiled(&doing->exchange, doing->wrong, sizeof doing->wrong)
                                    : operation_is_spoiled(&doing->operation, doing->wrong, sizeof doing->wrong));
            if (!is_ok)
                fail_msg("seed %llu: call %d, %s", (unsigned long long)seed, i, doing->wrong);
        }
    }
}

static const char *const small_chunks[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=3", "SHOAL_INLINE_BYTES=2048", NULL};
static const char *const one_slot[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=1", "SHOAL_INLINE_BYTES=0", NULL};
static const char *const many_slots[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_DEPTH=16", "SHOAL_INLINE_BYTES=4096",
                                         "SHOAL_COUNTER_START=4294967290", NULL};
static const char *const preset[] = {NULL};

static bool has_devices; /* in the following programs */

/* host: NULL, or the host of each rank. */
static uint64_t run_program_on(uint64_t seed, const uint16_t *host, int size, int count, const char *const *overrides)
{
    const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = seed % 3 ? TICK_NS : 0, .host = host};
    struct world *world = open_world(&weather, overrides);
    const struct program program = draw_program(seed, size, count);
    if (has_devices)
        open_devices(world, seed);
    if (seed / 2 % 2)
        post_in_turns(world, &program, seed);
    else
        post_program(world, &program);
    if (!drive(world, count, 3600 * SHOAL_NS_PER_S))
        fail_msg("seed %llu: operations did not end", (unsigned long long)seed);
    assert_results(world, &program, seed);
    const uint64_t hash = shoal_sim_trace_hash(world->sim);
    close_world(world);
    return hash;
}

static uint64_t run_program(uint64_t seed, int size, int count, const char *const *overrides)
{
    return run_program_on(seed, NULL, size, count, overrides);
}

static void engine_runs_random_programs_exactly(void **state)
{
    (void)state;
    static const char *const *const settings[] = {small_chunks, one_slot, many_slots, preset};
    const struct seeds seeds = seeds_of(200, 28);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        run_program(seed, 2 + (int)(seed % 7), CALLS_MAX, settings[seed % SHOAL_COUNT_OF(settings)]);
}

static void engine_runs_all_reduces_in_one_exchange_exactly(void **state)
{
    static const char *const settings[] = {"SHOAL_ALGORITHMS=all-reduce=one-shot", "SHOAL_CHUNK_BYTES=4096",
                                           "SHOAL_INLINE_BYTES=0", NULL};
    (void)state;
    const struct seeds seeds = seeds_of(50, 14);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        run_program(seed, 2 + (int)(seed % 7), CALLS_MAX, settings);
}

#define EARLY_COUNT 2500

/* Element i of rank r's input to its operation number `turn`. */
static float early_value(int r, int turn, size_t i)
{
    return (float)(i % 13 + (size_t)(3 * r + 5 * turn));
}

static void post_early(struct world *world, int r, int turn, bool is_shared)
{
    const struct areas *areas = &world->ranks[r].areas;
    char *const *at = is_shared ? areas->shared : areas->plain;
    float *input = (float *)(void *)at[0];
    for (size_t i = 0; i < EARLY_COUNT; i++)
        input[i] = early_value(r, turn, i);
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                    .type = SHOAL_FLOAT32,
                                    .op = SHOAL_SUM,
                                    .count = EARLY_COUNT,
                                    .input = input,
                                    .output = at[1]};
    post(world, r, turn, &call);
}

static void expect_early_sum(struct world *world, int r, int turn, bool is_shared)
{
    const struct areas *areas = &world->ranks[r].areas;
    const float *output = (const float *)(const void *)(is_shared ? areas->shared : areas->plain)[1];
    assert_int_equal(status_of(world, r, turn), SHOAL_OK);
    for (size_t i = 0; i < EARLY_COUNT; i++)
        assert_true(output[i] == early_value(0, turn, i) + early_value(1, turn, i));
}

/* In the second operation a rank copies its input into its staging buffer before the other rank has arrived. The other's
 * operands may be the same as before, or not. */
static void engine_stages_before_others_have_arrived(void **state)
{
    (void)state;
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        const struct shoal_sim_options weather = {.seed = 1, .size = 2, .delay_ns_max = TICK_NS};
        struct world *world = open_world(&weather, preset);
        struct shoal_engine *first = world->ranks[0].engine;
        post_early(world, 0, 0, false);
        shoal_engine_progress(first);
        assert_int_equal(world->ranks[0].requests[0].early_steps, 0); /* nothing is known of the other's operands */
        post_early(world, 1, 0, false);
        assert_true(drive(world, 1, SHOAL_NS_PER_S));
        post_early(world, 0, 1, false);
        shoal_engine_progress(first);
        const char *staging = first->ops->staging(first->transport, 0, 1 % first->depth);
        assert_int_equal(world->ranks[0].requests[1].early_steps, 2);
        assert_memory_equal(staging, world->ranks[0].areas.plain[0], EARLY_COUNT * sizeof(float));
        post_early(world, 1, 1, is_shared);
        assert_true(drive(world, 2, 2 * SHOAL_NS_PER_S));
        expect_early_sum(world, 0, 1, false);
        expect_early_sum(world, 1, 1, is_shared);
        close_world(world);
    }
}

/* Small operations wrap inside a slot, and never write beyond it. */
static void engine_goes_round_in_a_slot(void **state)
{
    static const char *const settings[] = {"SHOAL_INLINE_BYTES=0", "SHOAL_DEPTH=2", "SHOAL_CHUNK_BYTES=32K", NULL};
    const struct shoal_sim_options weather = {.seed = 1, .size = 2, .delay_ns_max = TICK_NS};
    const size_t bytes = shoal_round_up(EARLY_COUNT * sizeof(float), SHOAL_CACHE_LINE), places = ((size_t)64 << 10) / bytes;
    (void)state;
    struct world *world = open_world(&weather, settings);
    struct shoal_engine *engine = world->ranks[0].engine;
    assert_int_equal(engine->slot_bytes, 64 << 10);
    for (int turn = 0; turn < 16; turn++) {
        post_early(world, 0, turn, false);
        post_early(world, 1, turn, false);
        assert_true(drive(world, turn + 1, (uint64_t)(turn + 1) * SHOAL_NS_PER_S));
        expect_early_sum(world, 0, turn, false);
        expect_early_sum(world, 1, turn, false);
        const char *staging = engine->ops->staging(engine->transport, 0, (unsigned)turn % 2);
        assert_memory_equal(staging + (size_t)turn / 2 % places * bytes, world->ranks[0].areas.plain[0],
                            EARLY_COUNT * sizeof(float));
    }
    close_world(world);
}

/* Several hosts: ranks in sequence or in turns, hosts of unequal sizes. */
static void draw_hosts(uint64_t seed, int size, int hosts, uint16_t *host)
{
    for (int r = 0; r < size; r++)
        host[r] = (uint16_t)(seed % 2 ? r % hosts : r * hosts / size);
    if (seed % 3 == 0)
        host[size - 1] = 0;
}

static void engine_runs_random_programs_over_hosts_exactly(void **state)
{
    static const char *const *const settings[] = {small_chunks, one_slot, many_slots, preset};
    (void)state;
    const struct seeds seeds = seeds_of(200, 42);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        const int size = 2 + (int)(seed % 7) + (seed % 20 == 0 ? 16 : 0), hosts = 2 + (int)(seed / 7 % 3);
        uint16_t host[RANKS_MAX];
        draw_hosts(seed, size, hosts < size ? hosts : size, host);
        run_program_on(seed, host, size, CALLS_MAX, settings[seed % SHOAL_COUNT_OF(settings)]);
    }
}

static const char *const tuning[] = {
    "SHOAL_ALGORITHMS=all-reduce=ring,all-gather=ring,reduce-scatter=ring",
    "SHOAL_ALGORITHMS=all-reduce=doubling,all-gather=bruck",
    "SHOAL_ALGORITHMS=all-reduce=halving,barrier=dissemination",
    "SHOAL_ALGORITHMS=all-reduce=rounds,all-gather=rounds,barrier=rounds",
    "SHOAL_ALGORITHMS=all-reduce=direct,all-gather=direct,barrier=direct",
};

static void engine_runs_every_algorithm_over_hosts_exactly(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(150, 30);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        const char *const overrides[] = {"SHOAL_CHUNK_BYTES=4096", seed % 2 ? "SHOAL_DEPTH=1" : "SHOAL_DEPTH=4",
                                         tuning[seed % SHOAL_COUNT_OF(tuning)], NULL};
        const int size = 2 + (int)(seed % 9);
        uint16_t host[RANKS_MAX];
        draw_hosts(seed, size, 2 + (int)(seed % 4) < size ? 2 + (int)(seed % 4) : size, host);
        run_program_on(seed, host, size, CALLS_MAX, overrides);
    }
}

/* ---- Averages of float16 over hosts ---- */

#define HALF_MOST 0x7bff  /* 65504, the largest */
#define HALF_40000 0x78e2 /* 40000 */

static double half_value(uint16_t half)
{
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return exponent == 31 ? (double)INFINITY : half >> 15 ? -magnitude : magnitude;
}

/* What a rank gives. Sums over ranks are far beyond the largest float16, and averages are not: element 0, 3, ... is that number on
 * all ranks, element 1, 4, ... is 40000, and the others are any finite numbers. */
static uint16_t half_of(uint64_t seed, int rank, size_t at)
{
    const uint16_t drawn = (uint16_t)reference_mix(seed * 64 + (uint64_t)rank + at * 4096);
    if (at % 3 < 2)
        return at % 3 ? HALF_40000 : HALF_MOST;
    return (drawn >> 10 & 31) == 31 ? (uint16_t)(drawn & 0x83ff) : drawn;
}

static struct shoal_call average_call(struct world *world, uint64_t seed, int r, size_t count)
{
    static const enum shoal_collective_type types[] = {SHOAL_COLLECTIVE_ALLREDUCE, SHOAL_COLLECTIVE_REDUCE,
                                                       SHOAL_COLLECTIVE_REDUCE_SCATTER};
    const struct areas *areas = &world->ranks[r].areas;
    char *const *in = seed % 4 == 0 || (seed % 4 == 1 && r % 2) ? areas->shared : areas->plain;
    const enum shoal_collective_type type = types[seed / 2 % 3];
    return (struct shoal_call){.collective = type,
                               .type = SHOAL_FLOAT16,
                               .op = SHOAL_AVG,
                               .count = count,
                               .input = in[0],
                               .output = type == SHOAL_COLLECTIVE_REDUCE && r ? NULL : in[1]};
}

/* Roundings of each host's sum, and of each sum on the way; and each rank may lose what is below the smallest float16. */
static void expect_average(uint64_t seed, int size, size_t at, uint16_t found)
{
    double sum = 0, sizes = 0;
    for (int r = 0; r < size; r++) {
        sum += half_value(half_of(seed, r, at));
        sizes += fabs(half_value(half_of(seed, r, at)));
    }
    const double bound = ldexp(sizes, -11) + size * ldexp(1, -24), error = fabs(half_value(found) - sum / size);
    if (!(error <= bound))
        fail_msg("seed %d, %d ranks: average %zu is %g, not %g", (int)seed, size, at, half_value(found), sum / size);
}

static void average_over_hosts(uint64_t seed, int size, const uint16_t *host, const char *const *overrides)
{
    static const size_t counts[] = {1, 8, 200, 5003};
    const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = TICK_NS, .host = host};
    const size_t count = counts[seed % SHOAL_COUNT_OF(counts)];
    struct world *world = open_world(&weather, overrides);
    for (int r = 0; r < size; r++) {
        const struct shoal_call call = average_call(world, seed, r, count);
        const size_t inputs = call.collective == SHOAL_COLLECTIVE_REDUCE_SCATTER ? count * (size_t)size : count;
        for (size_t at = 0; at < inputs; at++)
            ((uint16_t *)(uintptr_t)call.input)[at] = half_of(seed, r, at);
        post(world, r, 0, &call);
    }
    assert_true(drive(world, 1, 60 * SHOAL_NS_PER_S));
    for (int r = 0; r < size; r++) {
        const struct shoal_call call = average_call(world, seed, r, count);
        const size_t first = call.collective == SHOAL_COLLECTIVE_REDUCE_SCATTER ? count * (size_t)r : 0;
        assert_int_equal(status_of(world, r, 0), SHOAL_OK);
        for (size_t at = 0; at < count && call.output; at++)
            expect_average(seed, size, first + at, ((const uint16_t *)call.output)[at]);
        if (call.collective == SHOAL_COLLECTIVE_ALLREDUCE)
            assert_memory_equal(call.output, average_call(world, seed, 0, count).output, count * sizeof(uint16_t));
    }
    close_world(world);
}

static void engine_averages_float16_over_hosts_without_overflow(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(240, 60);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        const char *const overrides[] = {"SHOAL_CHUNK_BYTES=4096", seed % 7 < 5 ? tuning[seed % 7 % 5] : "SHOAL_DEPTH=4", NULL};
        const int size = 2 + (int)(seed % 11), hosts = 2 + (int)(seed / 3 % 5);
        uint16_t host[RANKS_MAX];
        draw_hosts(seed, size, hosts < size ? hosts : size, host);
        average_over_hosts(seed, size, host, overrides);
    }
}

/* 8 hosts of 4 ranks; 64 of 8, where SHOAL_TEST_LARGE asks for it. By the table, then by tuning overrides. */
static void engine_runs_many_hosts(void **state)
{
    const bool is_large = getenv("SHOAL_TEST_LARGE") != NULL;
    const int size = is_large ? RANKS_MAX : 32;
    uint16_t host[RANKS_MAX];
    (void)state;
    draw_hosts(2, size, size / (is_large ? 8 : 4), host);
    run_program_on(2, host, size, is_large ? 3 : 8, small_chunks);
    for (size_t i = 0; i < SHOAL_COUNT_OF(tuning); i++) {
        const char *const overrides[] = {"SHOAL_CHUNK_BYTES=4096", tuning[i], NULL};
        run_program_on(3 + i, host, size, is_large ? 2 : 6, overrides);
    }
}

static void engine_runs_with_64_ranks(void **state)
{
    (void)state;
    run_program(1000, 64, SEEDS_PART > 1 ? 4 : 8, small_chunks);
}

static void engine_same_seed_same_trace(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        const uint64_t hash = run_program(seed, 4, CALLS_MAX, small_chunks);
        assert_int_equal(hash, run_program(seed, 4, CALLS_MAX, small_chunks));
        assert_int_not_equal(hash, run_program(seed + 100, 4, CALLS_MAX, small_chunks));
    }
}

/* ---- Operands on devices ---- */

static void assert_all_failed(struct world *world, const struct program *program, enum shoal_status status, int blamed,
                              uint64_t seed);
static bool has_any_failed(struct world *world, int count, enum shoal_status status);

/* Runs on one host, on one with little inlined, and over several, with every algorithm. */
static void run_on_devices(uint64_t seed, bool is_apart)
{
    static const char *const *const settings[] = {small_chunks, one_slot, many_slots, preset};
    const int size = 2 + (int)(seed % 7), hosts = 2 + (int)(seed / 7 % 3);
    const char *const overrides[] = {"SHOAL_CHUNK_BYTES=4096", seed % 2 ? "SHOAL_DEPTH=1" : "SHOAL_DEPTH=4",
                                     tuning[seed / 3 % SHOAL_COUNT_OF(tuning)], NULL};
    uint16_t host[RANKS_MAX];
    draw_hosts(seed, size, hosts < size ? hosts : size, host);
    run_program_on(seed, is_apart ? host : NULL, size, CALLS_MAX,
                   seed % 3 == 0 && is_apart ? overrides : settings[seed % SHOAL_COUNT_OF(settings)]);
}

static void engine_runs_programs_on_devices_exactly(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(140, 28);
    has_devices = true;
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        run_on_devices(seed, false);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        run_on_devices(seed, true);
    has_devices = false;
}

/* Operands are larger than what a device keeps in host memory at once. */
static void engine_goes_round_in_a_devices_memory(void **state)
{
    static const char *const settings[] = {"SHOAL_CHUNK_BYTES=4096", "SHOAL_INLINE_BYTES=0", "SHOAL_DEPTH=3", NULL};
    (void)state;
    size_t reuses = 0;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        const struct shoal_sim_options weather = {.seed = seed, .size = 2 + (int)(seed % 3), .delay_ns_max = TICK_NS};
        struct world *world = open_world(&weather, settings);
        const struct program program = draw_program(seed, world->size, 3);
        open_devices(world, seed);
        post_program(world, &program);
        assert_true(drive(world, 3, 3600 * SHOAL_NS_PER_S));
        assert_results(world, &program, seed);
        for (int r = 0; r < world->size; r++)
            reuses += sim_device_reuses(world->ranks[r].device);
        close_world(world);
    }
    assert_true(reuses > 50);
}

/* Calls of float32 on devices on those ranks whose bit is set; the input is filled with the rank. */
static struct shoal_call device_call(struct world *world, int r, enum shoal_collective_type collective, size_t count,
                                     unsigned ranks)
{
    const struct shoal_shape *shape = &shoal_collective_traits(collective)->shape;
    float *input = (float *)(void *)world->ranks[r].areas.plain[0];
    struct shoal_call call = {
        .collective = collective, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = count, .timeout_ms = 15000};
    for (size_t i = 0; i < count * (shape->is_input_partitioned ? (size_t)world->size : 1); i++)
        input[i] = (float)r;
    call.input = shoal_shape_contributes(shape, r, 0) ? input : NULL;
    call.output = world->ranks[r].areas.plain[1];
    if (ranks & 1u << r)
        sim_device_take(world->ranks[r].device, &call, r, world->size,
                        1u << SHOAL_OUTPUT | (call.input ? 1u << SHOAL_INPUT : 0));
    return call;
}

/* The only rank copies range by range; the next call, in host memory, ends after it. */
static void engine_runs_alone_on_a_device(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 1, .size = 1};
    struct world *world = open_world(&weather, one_slot);
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER};
    open_devices(world, 5);
    sim_device_stop(world->ranks[0].device, 1u << SHOAL_OUTPUT);
    struct shoal_call call = device_call(world, 0, SHOAL_COLLECTIVE_ALLREDUCE, 100000, 1);
    call.op = SHOAL_SCALED_SUM;
    call.scale = 3;
    memset(world->ranks[0].areas.plain[0], 0, 400000);
    ((float *)(void *)world->ranks[0].areas.plain[0])[99999] = 2;
    post(world, 0, 0, &call);
    post(world, 0, 1, &barrier);
    assert_false(drive(world, 2, SHOAL_NS_PER_S));
    assert_int_equal(status_of(world, 0, 1), SHOAL_PENDING);
    sim_device_stop(world->ranks[0].device, 0);
    assert_true(drive(world, 2, 2 * SHOAL_NS_PER_S));
    const float *output = (const float *)(const void *)world->ranks[0].areas.plain[1];
    assert_true(output[99999] == 6 && output[99998] == 0);
    close_world(world);
}

/* Posts four operations: one with operands on the device, then one in host memory, and a send and a receive. */
static void post_beside_a_device(struct world *world, int r)
{
    const struct shoal_call late = device_call(world, r, SHOAL_COLLECTIVE_ALLREDUCE, 5000, 2);
    const struct shoal_call next = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                    .type = SHOAL_INT32,
                                    .op = SHOAL_SUM,
                                    .count = 5000,
                                    .input = world->ranks[r].areas.shared[0],
                                    .output = world->ranks[r].areas.shared[1]};
    char *const spare = world->ranks[r].areas.plain[0] + 400000;
    const struct shoal_call send = {
        .collective = SHOAL_COLLECTIVE_SEND, .type = SHOAL_INT32, .root = (r + 1) % 3, .count = 4, .input = spare};
    const struct shoal_call receive = {
        .collective = SHOAL_COLLECTIVE_RECV, .type = SHOAL_INT32, .root = (r + 2) % 3, .count = 4, .output = spare + 64};
    memset(world->ranks[r].areas.shared[0], r == 2, 20000);
    post(world, r, 0, &late);
    post(world, r, 1, &next);
    post(world, r, 2, r == 1 ? &receive : &send);
    post(world, r, 3, r == 1 ? &send : &receive);
}

/* One operation waits for the device of rank 1; those that do not need it continue on all ranks. */
static void engine_goes_on_while_a_device_is_late(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 3, .size = 3, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    open_devices(world, 7);
    sim_device_stop(world->ranks[1].device, 1u << SHOAL_INPUT);
    for (int r = 0; r < 3; r++)
        post_beside_a_device(world, r);
    assert_false(drive(world, 2, SHOAL_NS_PER_S));
    for (int r = 0; r < 3; r++) {
        const int32_t *sum = (const int32_t *)(const void *)world->ranks[r].areas.shared[1];
        assert_int_equal(status_of(world, r, 0), SHOAL_PENDING);
        assert_int_equal(world->ranks[r].requests[1].state, SHOAL_REQUEST_DONE); /* and ends in its turn */
        assert_int_equal(sum[4999], 0x01010101);
        assert_int_equal(status_of(world, r, 2), SHOAL_OK);
        assert_int_equal(status_of(world, r, 3), SHOAL_OK);
    }
    assert_true(world->ranks[1].engine->awaits_operand);
    assert_false(world->ranks[0].engine->awaits_operand);
    sim_device_stop(world->ranks[1].device, 0);
    assert_true(drive(world, 4, 2 * SHOAL_NS_PER_S));
    for (int r = 0; r < 3; r++) {
        assert_int_equal(status_of(world, r, 0), SHOAL_OK);
        assert_int_equal(status_of(world, r, 1), SHOAL_OK);
        assert_true(((const float *)(const void *)world->ranks[r].areas.plain[1])[4999] == 3);
    }
    close_world(world);
}

/* All ranks name a device that stops, whichever rank gives up first: with a plan, with the announcements, in rounds; if the
 * input does not arrive, or the output has no room. A rank on another host may not know why its rank waits. */
static void blame_device(uint64_t seed, const uint16_t *host, enum shoal_collective_type collective, size_t count,
                         unsigned stopped)
{
    const struct shoal_sim_options weather = {.seed = seed, .size = 4, .delay_ns_max = TICK_NS, .host = host};
    struct world *world = open_world(&weather, preset);
    const int stuck = (int)(seed % 4), first = (int)(seed / 4 % 4);
    open_devices(world, seed);
    sim_device_stop(world->ranks[stuck].device, stopped);
    for (int r = 0; r < 4; r++) {
        struct shoal_call call = device_call(world, r, collective, count, 15);
        call.timeout_ms = r == first ? 15000 : 20000;
        post(world, r, 0, &call);
    }
    drive(world, 1, 21 * SHOAL_NS_PER_S);
    for (int r = 0; r < 4; r++) {
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
        if (!failure && status_of(world, r, 0) == SHOAL_OK)
            continue; /* it needed nothing from that device */
        char name[120];
        const bool is_heard = failure && (!host || host[failure->reporter] == host[stuck]);
        snprintf(name, sizeof name, "rank %d (process %d on sim-%d, running%s", stuck, 1000 + stuck, host ? host[stuck] : 0,
                 is_heard ? "; its own operand is not ready on its device" : "");
        if (!failure || failure->status != SHOAL_ERR_TIMEOUT || failure->rank != stuck || !strstr(failure->text, name))
            fail_msg("seed %llu: rank %d says \"%s\", not \"%s\"", (unsigned long long)seed, r,
                     failure ? failure->text : "nothing", name);
    }
    close_world(world);
}

static void engine_names_a_device_that_stops(void **state)
{
    static const uint16_t hosts[] = {0, 0, 1, 1};
    static const size_t counts[] = {4, 5000};
    (void)state;
    for (uint64_t seed = 0; seed < 16; seed++) {
        for (int i = 0; i < 8; i++)
            blame_device(seed, i & 1 ? hosts : NULL, SHOAL_COLLECTIVE_ALLREDUCE, counts[i >> 1 & 1],
                         1u << (i & 4 ? SHOAL_OUTPUT : SHOAL_INPUT));
    }
}

static void engine_drops_devices_operands_at_a_failure(void **state)
{
    (void)state;
    int hit = 0;
    for (uint64_t seed = 1; seed <= 90; seed++) {
        const int size = 2 + (int)(seed % 6), count = 12, victim = (int)(seed * 5 % (uint64_t)size);
        uint16_t host[RANKS_MAX];
        draw_hosts(seed, size, size > 2 ? 2 : 1, host);
        const struct shoal_sim_options weather = {
            .seed = seed, .size = size, .delay_ns_max = TICK_NS, .detect_ns = 5 * TICK_NS, .host = seed % 4 < 2 ? NULL : host};
        struct world *world = open_world(&weather, seed % 2 ? small_chunks : one_slot);
        const struct program program = draw_program(seed, size, count);
        uint64_t random = seed * 77;
        open_devices(world, seed);
        post_program(world, &program);
        for (size_t turns = reference_below(&random, 300); turns > 0; turns--) {
            progress_round(world);
            turn_devices(world);
            shoal_sim_advance(world->sim);
        }
        const enum shoal_status wanted[] = {SHOAL_ERR_PEER_LOST, SHOAL_ERR_ABORTED, SHOAL_ERR_TIMEOUT};
        const enum shoal_status status = wanted[seed % 3];
        if (status == SHOAL_ERR_PEER_LOST)
            shoal_sim_kill(world->sim, victim);
        else if (status == SHOAL_ERR_ABORTED)
            shoal_engine_abort(world->ranks[victim].engine, NULL);
        else
            shoal_sim_drop_next(world->sim, victim, (victim + 1) % size);
        world->ranks[victim].is_gone = status == SHOAL_ERR_PEER_LOST;
        if (!drive(world, count, shoal_sim_now_ns(world->sim) + (TIMEOUT_MS + 2000) * TICK_NS))
            fail_msg("seed %llu: somebody waits for ever", (unsigned long long)seed);
        assert_all_failed(world, &program, status, -1, seed);
        hit += has_any_failed(world, count, status);
        for (int r = 0; r < size; r++) {
            if (r != victim || status != SHOAL_ERR_PEER_LOST)
                assert_int_equal(sim_device_open_count(world->ranks[r].device), 0);
        }
        close_world(world);
    }
    assert_true(hit > 40);
}

/* ---- Sends and receives ---- */

#define MESSAGE_ROOM ((size_t)48000)

/* Returns slot 0 to 3 of a rank's memory; a formula decides between plain and shared. */
static char *message_memory(struct world *world, int r, size_t slot, uint64_t seed)
{
    const struct areas *areas = &world->ranks[r].areas;
    return ((seed + (uint64_t)r + slot) % 2 ? areas->shared : areas->plain)[0] + slot * MESSAGE_ROOM;
}

static size_t message_count(uint64_t seed, int step)
{
    static const size_t counts[] = {0, 1, 1024, 1025, 6000};
    return counts[(seed + (uint64_t)step) % SHOAL_COUNT_OF(counts)];
}

/* Each rank sends to the next two ranks, and receives from the two before it. */
static void post_messages(struct world *world, uint64_t seed)
{
    const int size = world->size;
    for (int r = 0; r < size; r++) {
        for (int step = 1; step <= 2; step++) {
            const size_t count = message_count(seed, step), slot = (size_t)step - 1;
            const struct reference given = reference_input(SHOAL_INT64, r, (uint64_t)step);
            char *from = message_memory(world, r, slot, seed), *to = message_memory(world, r, slot + 2, seed);
            struct shoal_call send = {.collective = SHOAL_COLLECTIVE_SEND,
                                      .type = SHOAL_INT64,
                                      .root = (r + step) % size,
                                      .tag = step,
                                      .count = count,
                                      .input = from};
            struct shoal_call receive = {.collective = SHOAL_COLLECTIVE_RECV,
                                         .type = SHOAL_INT64,
                                         .root = (r + size - step) % size,
                                         .tag = step,
                                         .count = count,
                                         .output = to};
            reference_fill(&given, from, count);
            memset(to, 0xA5, MESSAGE_ROOM);
            if (world->ranks[r].device) {
                put_message_on_device(world, r, &send);
                put_message_on_device(world, r, &receive);
            }
            post(world, r, step * 2 - 2, r % 2 ? &send : &receive);
            post(world, r, step * 2 - 1, r % 2 ? &receive : &send);
        }
    }
}

static void assert_delivered(struct world *world, uint64_t seed)
{
    for (int r = 0; r < world->size; r++) {
        for (int step = 1; step <= 2; step++) {
            const int from = (r + world->size - step) % world->size;
            const struct reference wanted = reference_input(SHOAL_INT64, from, (uint64_t)step);
            const char *memory = message_memory(world, r, (size_t)step + 1, seed);
            assert_int_equal(status_of(world, r, step * 2 - 2), SHOAL_OK);
            assert_int_equal(status_of(world, r, step * 2 - 1), SHOAL_OK);
            assert_int_equal(reference_compare(&wanted, memory, message_count(seed, step)), -1);
        }
    }
}

static void deliver_messages(uint64_t seed, bool is_on_devices)
{
    const struct shoal_sim_options weather = {
        .seed = seed, .size = 3 + (int)(seed % 4), .delay_ns_max = seed % 4 ? TICK_NS : 0};
    struct world *world = open_world(&weather, preset);
    if (is_on_devices)
        open_devices(world, seed);
    post_messages(world, seed);
    if (!drive(world, 4, 10 * SHOAL_NS_PER_S))
        fail_msg("seed %llu: messages did not arrive", (unsigned long long)seed);
    assert_delivered(world, seed);
    close_world(world);
}

static void engine_delivers_messages_exactly(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(60, 20);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        deliver_messages(seed, false);
}

static void engine_delivers_messages_of_devices_exactly(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(60, 20);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++)
        deliver_messages(seed, true);
}

/* A message of float32 between ranks 0 and 1, on the devices of those ranks whose bit is set. */
static struct shoal_call device_message(struct world *world, int r, size_t count, int tag, unsigned ranks)
{
    struct shoal_call call = {.collective = r ? SHOAL_COLLECTIVE_RECV : SHOAL_COLLECTIVE_SEND,
                              .type = SHOAL_FLOAT32,
                              .root = !r,
                              .tag = tag,
                              .count = count,
                              .timeout_ms = 15000};
    *(r ? &call.output : (void **)(uintptr_t)&call.input) = world->ranks[r].areas.plain[0] + (size_t)tag * MESSAGE_ROOM;
    if (ranks & 1u << r)
        sim_device_take(world->ranks[r].device, &call, r, world->size, 3u & (r ? 2u : 1u));
    return call;
}

/* A message that waits for a device delays only messages with its tag; large ones in several packets block no queue. */
static void engine_passes_a_message_that_waits_for_a_device(void **state)
{
    static const int tags[] = {1, 1, 2, 3};
    (void)state;
    for (int i = 0; i < 8; i++) {
        const struct shoal_sim_options weather = {.seed = 3 + (uint64_t)i, .size = 2, .delay_ns_max = TICK_NS};
        const int stuck = i & 1;
        const size_t count = i & 2 ? 11000 : 100; /* in several packets, and with the record */
        struct world *world = open_world(&weather, preset);
        open_devices(world, 9);
        sim_device_stop(world->ranks[stuck].device, stuck ? 2 : 1);
        for (int r = 0; r < 2; r++) {
            for (int m = 0; m < 4; m++) {
                struct shoal_call call = device_message(world, r, m == 3 ? 11000 : count, tags[m], m ? 0 : 1u << stuck);
                if (!r)
                    memset((char *)(uintptr_t)(m ? call.input : world->ranks[0].areas.plain[0] + MESSAGE_ROOM), 1 + m % 2, 8);
                post(world, r, m, &call);
            }
        }
        assert_false(drive(world, 4, SHOAL_NS_PER_S));
        for (int r = 0; r < 2; r++) {
            assert_int_equal(status_of(world, r, 2), SHOAL_OK);
            assert_int_equal(status_of(world, r, 3), SHOAL_OK);
        }
        assert_int_equal(status_of(world, stuck, 0), SHOAL_PENDING);
        sim_device_stop(world->ranks[stuck].device, 0);
        assert_true(drive(world, 4, 2 * SHOAL_NS_PER_S));
        close_world(world);
    }
}

static void engine_names_a_device_that_a_message_waits_for(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        const struct shoal_sim_options weather = {.seed = 3 + (uint64_t)i, .size = 2, .delay_ns_max = TICK_NS};
        const int stuck = i & 1;
        struct world *world = open_world(&weather, preset);
        open_devices(world, 9);
        sim_device_stop(world->ranks[stuck].device, stuck ? 2 : 1);
        for (int r = 0; r < 2; r++) {
            struct shoal_call call = device_message(world, r, i & 2 ? 11000 : 100, 1, i & 4 ? 3 : 1u << stuck);
            call.timeout_ms = r == stuck ? 15000 : 20000; /* this one names the rank, and cannot know more */
            post(world, r, 0, &call);
        }
        drive(world, 1, 21 * SHOAL_NS_PER_S);
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[stuck].engine);
        assert_non_null(failure);
        assert_int_equal(failure->status, SHOAL_ERR_TIMEOUT);
        if (failure->rank != stuck || !strstr(failure->text, "its own operand is not ready on its device"))
            fail_msg("case %d: \"%s\"", i, failure->text);
        close_world(world);
    }
}

/* Both sides of a message to itself are called, and one of them waits for its device. The other one is the first to be late. */
static void engine_names_a_device_that_a_message_to_itself_waits_for(void **state)
{
    (void)state;
    for (int is_output = 0; is_output < 2; is_output++) {
        const struct shoal_sim_options weather = {.seed = 4, .size = 1};
        struct world *world = open_world(&weather, preset);
        open_devices(world, 9);
        sim_device_stop(world->ranks[0].device, is_output ? 2 : 1);
        for (int is_receive = 0; is_receive < 2; is_receive++) {
            struct shoal_call call = {.collective = is_receive ? SHOAL_COLLECTIVE_RECV : SHOAL_COLLECTIVE_SEND,
                                      .type = SHOAL_FLOAT32,
                                      .count = 11000,
                                      .timeout_ms = is_receive == is_output ? 20000 : 15000};
            *(is_receive ? &call.output : (void **)(uintptr_t)&call.input) = world->ranks[0].areas.plain[is_receive];
            if (is_receive == is_output)
                sim_device_take(world->ranks[0].device, &call, 0, 1, is_output ? 2 : 1);
            post(world, 0, is_receive, &call);
        }
        drive(world, 2, 21 * SHOAL_NS_PER_S);
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[0].engine);
        assert_non_null(failure);
        assert_int_equal(failure->status, SHOAL_ERR_TIMEOUT);
        assert_int_equal(failure->rank, 0);
        if (!strstr(failure->text, "its own operand is not ready on its device") || strstr(failure->text, "has not called"))
            fail_msg("output %d: \"%s\"", is_output, failure->text);
        close_world(world);
    }
}

/* Kinds of packets, as p2p.c numbers them. */
enum { PACKET_ASK = 2, PACKET_GO, PACKET_DATA, PACKET_TAKEN };

/* Rank 1 sends a packet by itself, and rank 0 accepts it. */
static void push_packet(struct world *world, const struct shoal_packet *packet)
{
    struct shoal_transport *from = world->ranks[1].engine->transport;
    assert_int_equal(from->ops->push(from, 0, packet, NULL), SHOAL_OK);
    while (shoal_sim_advance(world->sim))
        continue;
    (void)shoal_p2p_drain(world->ranks[0].engine);
    (void)shoal_engine_progress(world->ranks[0].engine);
}

/* Packets that no peer sends do no harm: an answer to nothing, a grant of a part of an element, an offer of a small message. */
static void engine_does_not_trust_packets(void **state)
{
    const struct shoal_sim_options weather = {.seed = 1, .size = 2};
    struct world *world = open_world(&weather, preset);
    struct shoal_transport *to = world->ranks[1].engine->transport;
    const struct shoal_call send = {.collective = SHOAL_COLLECTIVE_SEND,
                                    .type = SHOAL_FLOAT32,
                                    .root = 1,
                                    .count = 11000,
                                    .input = world->ranks[0].areas.plain[0]};
    const struct shoal_call receive = {.collective = SHOAL_COLLECTIVE_RECV,
                                       .type = SHOAL_FLOAT32,
                                       .root = 1,
                                       .count = 1,
                                       .output = world->ranks[0].areas.plain[1]};
    (void)state;
    for (uint32_t kind = PACKET_GO; kind <= PACKET_TAKEN + 1; kind++)
        push_packet(world, &(struct shoal_packet){.kind = kind, .id = 1});
    post(world, 0, 0, &send);
    (void)shoal_engine_progress(world->ranks[0].engine);
    push_packet(world, &(struct shoal_packet){.kind = PACKET_GO, .id = 1, .offset = 3});
    while (shoal_sim_advance(world->sim))
        continue;
    const struct shoal_packet *packet = to->ops->peek(to, 0);
    assert_true(packet && packet->kind == PACKET_ASK);
    to->ops->pop(to, 0);
    assert_null(to->ops->peek(to, 0));
    post(world, 0, 1, &receive);
    push_packet(world, &(struct shoal_packet){.kind = PACKET_ASK, .id = 1, .count = 1, .type = SHOAL_FLOAT32});
    assert_int_equal(status_of(world, 0, 1), SHOAL_ERR_MISMATCH);
    close_world(world);
}

static bool has_failed_elsewhere; /* as shared memory reports it before this rank has looked */
static int entered, left;

static bool enter_unless_failed(struct shoal_transport *transport)
{
    (void)transport;
    entered += !has_failed_elsewhere;
    return !has_failed_elsewhere;
}

static void leave_it(struct shoal_transport *transport)
{
    (void)transport;
    left++;
}

/* After a failure the sender frees its memory, and its mapping here may disappear: a copy of several turns must stop. */
static void engine_does_not_read_a_senders_memory_after_a_failure(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 2, .size = 2};
    for (int is_lost = 0; is_lost < 2; is_lost++) {
        struct world *world = open_world(&weather, preset);
        struct shoal_transport_ops ops = *world->ranks[1].engine->ops;
        char *from = world->ranks[0].areas.shared[0], *to = world->ranks[1].areas.plain[0];
        const struct shoal_call send = {
            .collective = SHOAL_COLLECTIVE_SEND, .type = SHOAL_UINT8, .root = 1, .count = MEMORY_BYTES, .input = from};
        const struct shoal_call receive = {
            .collective = SHOAL_COLLECTIVE_RECV, .type = SHOAL_UINT8, .count = MEMORY_BYTES, .output = to};
        ops.enter = enter_unless_failed;
        ops.leave = leave_it;
        world->ranks[1].engine->ops = &ops;
        has_failed_elsewhere = is_lost;
        entered = left = 0;
        memset(from, 1, MEMORY_BYTES);
        memset(to, 0, MEMORY_BYTES);
        post(world, 0, 0, &send);
        post(world, 1, 0, &receive);
        assert_int_equal(drive(world, 1, 100 * TICK_NS), !is_lost);
        assert_int_equal(to[0], !is_lost);
        assert_true(left == entered && (entered > 0) == !is_lost);
        close_world(world);
    }
}

static shoal_reduce_fn sum_for_real;
static shoal_copy_fn copy_for_real;
static char *of_failed; /* memory of rank 0, whose program writes there once its call has failed */

/* Rank 0 fails while rank 1 reads its operand. */
static void fail_here(void)
{
    has_failed_elsewhere = true;
    memset(of_failed, 0x55, MEMORY_BYTES);
}

static void sum_too_late(void *const *dests, int dest_count, const void *const *sources, int source_count, size_t count,
                         double argument, enum shoal_stores stores)
{
    fail_here();
    sum_for_real(dests, dest_count, sources, source_count, count, argument, stores);
}

static void copy_too_late(void *const *dests, int dest_count, const void *source, size_t bytes, enum shoal_stores stores)
{
    fail_here();
    copy_for_real(dests, dest_count, source, bytes, stores);
}

static bool has_failed_meanwhile(struct shoal_transport *transport)
{
    (void)transport;
    return has_failed_elsewhere;
}

/* A program may overwrite the operands of a call that has failed. Another rank's call does not succeed with these bytes. */
static void engine_counts_no_data_that_were_read_too_late(void **state)
{
    (void)state;
    for (int is_message = 0; is_message < 2; is_message++) {
        const struct shoal_sim_options weather = {.seed = 2, .size = 2};
        struct world *world = open_world(&weather, preset);
        struct shoal_engine *engine = world->ranks[1].engine;
        struct shoal_transport_ops ops = *engine->ops;
        struct shoal_kernels kernels = *engine->kernels;
        sum_for_real = kernels.reduce[SHOAL_FLOAT32][SHOAL_SUM];
        copy_for_real = kernels.copy;
        kernels.reduce[SHOAL_FLOAT32][SHOAL_SUM] = sum_too_late;
        kernels.copy = copy_too_late;
        engine->kernels = &kernels;
        ops.enter = enter_unless_failed;
        ops.leave = leave_it;
        ops.is_failing = has_failed_meanwhile;
        engine->ops = &ops;
        has_failed_elsewhere = false;
        entered = left = 0;
        of_failed = world->ranks[0].areas.shared[0];
        for (int r = 0; r < 2; r++) {
            const struct areas *areas = &world->ranks[r].areas;
            const struct shoal_call sum = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                           .type = SHOAL_FLOAT32,
                                           .count = EARLY_COUNT,
                                           .input = areas->shared[0],
                                           .output = areas->shared[1]};
            const struct shoal_call message = {.collective = r ? SHOAL_COLLECTIVE_RECV : SHOAL_COLLECTIVE_SEND,
                                               .type = SHOAL_UINT8,
                                               .root = !r,
                                               .count = 100003,
                                               .input = areas->shared[0],
                                               .output = areas->shared[1]};
            memset(areas->shared[0], 0, MEMORY_BYTES);
            post(world, r, 0, is_message ? &message : &sum);
        }
        drive(world, 1, 100 * TICK_NS);
        assert_true(has_failed_elsewhere && entered == left);
        assert_int_not_equal(status_of(world, 1, 0), SHOAL_OK);
        close_world(world);
    }
}

#define UNITS 3

/* Opens a stage of two ranks on one host whose device work has ended before it begins. */
static struct shoal_device_sum *open_worked(struct shoal_device_stage *stage, const struct shoal_engine *engine)
{
    const struct shoal_device_stage_options options = {
        .slots = engine->depth, .slot_bytes = SHOAL_PAGE, .rank = engine->rank, .ranks = 2, .hosts = 1};
    void *memory = aligned_alloc(SHOAL_PAGE, shoal_device_stage_bytes(&options));
    assert_non_null(memory);
    shoal_device_stage_init(stage, &options, memory);
    for (unsigned work = 0; work < stage->works; work++) {
        for (unsigned slot = 0; slot < options.slots; slot++)
            atomic_store(&stage->ended[work][slot].value, INT64_MAX / 2);
    }
    struct shoal_device_sum *sum = shoal_device_sum_open(stage, UNITS * SHOAL_PAGE / sizeof(float), sizeof(float));
    assert_non_null(sum);
    shoal_device_sum_reserve(sum);
    shoal_device_sum_put_on_streams(sum);
    return sum;
}

static bool enter_once(struct shoal_transport *transport)
{
    (void)transport;
    assert_int_equal(entered, left); /* not inside yet */
    entered++;
    return true;
}

static int looks_at_failure, good_looks;

static bool fail_after_good_looks(struct shoal_transport *transport)
{
    (void)transport;
    return looks_at_failure++ >= good_looks;
}

/* Returns true if the sum of two ranks ends, of which rank 1 sees a failure after this many looks. */
static bool run_worked(int looks_before)
{
    const struct shoal_sim_options weather = {.seed = 5, .size = 2};
    struct world *world = open_world(&weather, preset);
    struct shoal_transport_ops ops = *world->ranks[1].engine->ops;
    struct shoal_device_stage stages[2];
    ops.enter = enter_once;
    ops.leave = leave_it;
    ops.is_failing = fail_after_good_looks;
    world->ranks[1].engine->ops = &ops;
    entered = left = looks_at_failure = 0;
    good_looks = looks_before;
    for (int r = 0; r < 2; r++) {
        struct shoal_device_sum *sum = open_worked(&stages[r], world->ranks[r].engine);
        struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .count = sum->count};
        struct shoal_operand *both = shoal_operand_of_device_sum(sum);
        assert_non_null(both);
        struct shoal_layout *former;
        assert_true(shoal_call_put_operands(&call, r, 2, both, both, &former));
        assert_null(former);
        post(world, r, 0, &call);
        shoal_device_sum_leave(sum);
    }
    const bool is_done = drive(world, 1, 100 * TICK_NS);
    assert_true(entered > 0 && entered == left);
    close_world(world);
    for (int r = 0; r < 2; r++)
        free(stages[r].begin[0]);
    return is_done;
}

/* A rank that checks for a failure in the middle of a pass remains inside: the failed rank waits for it. */
static void engine_only_looks_after_a_device_has_worked(void **state)
{
    (void)state;
    assert_true(run_worked(INT_MAX));
    const int needed = looks_at_failure;
    assert_true(needed >= UNITS);
    for (int looks_before = 0; looks_before < needed; looks_before++)
        assert_false(run_worked(looks_before));
    assert_true(run_worked(needed));
}

static shoal_reduce_fn scale_for_real;
static int scalings;

static void count_scaling(void *const *dests, int dest_count, const void *const *sources, int source_count, size_t count,
                          double argument, enum shoal_stores stores)
{
    scalings++;
    scale_for_real(dests, dest_count, sources, source_count, count, argument, stores);
}

/* Returns how often inputs are scaled if this many puts in a million return PENDING. */
static int count_scalings(unsigned busy_per_million)
{
    static const uint16_t host[] = {0, 1};
    const struct shoal_sim_options weather = {
        .seed = 7, .size = 2, .delay_ns_max = TICK_NS, .busy_per_million = busy_per_million, .host = host};
    struct world *world = open_world(&weather, small_chunks);
    struct shoal_kernels kernels = *world->ranks[0].engine->kernels;
    scale_for_real = kernels.reduce[SHOAL_FLOAT32][SHOAL_SCALED_SUM];
    kernels.reduce[SHOAL_FLOAT32][SHOAL_SCALED_SUM] = count_scaling;
    scalings = 0;
    for (int r = 0; r < 2; r++) {
        const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                        .type = SHOAL_FLOAT32,
                                        .op = SHOAL_SCALED_SUM,
                                        .scale = 2,
                                        .count = 20000,
                                        .input = world->ranks[r].areas.plain[0],
                                        .output = world->ranks[r].areas.plain[1]};
        world->ranks[r].engine->kernels = &kernels;
        post(world, r, 0, &call);
    }
    assert_true(drive(world, 1, 3600 * SHOAL_NS_PER_S));
    close_world(world);
    return scalings;
}

/* A put packs its block once, not at each attempt. */
static void engine_packs_a_put_once(void **state)
{
    (void)state;
    const int needed = count_scalings(0);
    assert_true(needed > 0);
    assert_int_equal(count_scalings(950000), needed);
}

/* ---- Failures ---- */

/* Collectives end in order: none succeeds after a failed one. Messages may have ended before. */
static void assert_all_failed(struct world *world, const struct program *program, enum shoal_status status, int blamed,
                              uint64_t seed)
{
    for (int r = 0; r < world->size; r++) {
        if (world->ranks[r].is_gone)
            continue;
        bool has_failed = false, has_collective_failed = false;
        for (int i = 0; i < program->count; i++) {
            const enum shoal_status each = status_of(world, r, i);
            if (each != SHOAL_OK && each != status)
                fail_msg("seed %llu: call %d of rank %d ended with %s, not %s", (unsigned long long)seed, i, r,
                         shoal_status_name(each), shoal_status_name(status));
            has_failed |= each != SHOAL_OK;
            if (program->is_exchange[i])
                continue;
            assert_true(each != SHOAL_OK || !has_collective_failed);
            has_collective_failed = each != SHOAL_OK;
        }
        if (!has_failed)
            continue;
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
        assert_true(world->ranks[r].engine->is_broken);
        assert_int_equal(failure->status, status);
        assert_true(failure->text[0] != '\0');
        if (blamed >= 0 && failure->rank != blamed)
            fail_msg("seed %llu: rank %d blames rank %d, not %d: %s", (unsigned long long)seed, r, failure->rank, blamed,
                     failure->text);
    }
}

static bool has_any_failed(struct world *world, int count, enum shoal_status status)
{
    for (int i = 0; i < count * world->size; i++) {
        if (!world->ranks[i / count].is_gone && status_of(world, i / count, i % count) == status)
            return true;
    }
    return false;
}

static const struct shoal_transport_ops *puts_for_real;
static struct shoal_log *log_of_puts;
static int good_puts, puts_refused;

/* Refuses each put after the good ones, as a network does that is out of memory. */
static enum shoal_status put_until_refused(struct shoal_transport *transport, int peer, unsigned slot, size_t offset,
                                           const void *source, size_t bytes)
{
    if (good_puts-- > 0)
        return puts_for_real->put(transport, peer, slot, offset, source, bytes);
    puts_refused++;
    return shoal_log_fail(log_of_puts, SHOAL_ERR_MEMORY, "test", "the network is out of memory");
}

/* The step's failure is the cause on every rank, at once; the operation behind it fails as well, and no later put is tried. */
static void engine_fails_by_a_step_that_fails(void **state)
{
    (void)state;
    static const uint16_t host[] = {0, 1, 1};
    const struct shoal_sim_options weather = {.seed = 11, .size = 3, .delay_ns_max = TICK_NS, .host = host};
    for (int good = 0; good < 4; good++) {
        struct world *world = open_world(&weather, small_chunks);
        struct shoal_transport_ops ops = *(puts_for_real = world->ranks[0].engine->ops);
        ops.put = put_until_refused;
        world->ranks[0].engine->ops = &ops;
        log_of_puts = &world->ranks[0].log;
        good_puts = good;
        puts_refused = 0;
        for (int i = 0; i < 2 * world->size; i++) {
            const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                            .type = SHOAL_FLOAT32,
                                            .count = 30001,
                                            .input = world->ranks[i / 2].areas.plain[0],
                                            .output = world->ranks[i / 2].areas.plain[1]};
            post(world, i / 2, i % 2, &call);
        }
        assert_true(drive(world, 2, SHOAL_NS_PER_S)); /* long before the deadline */
        assert_int_equal(puts_refused, 1);
        for (int r = 0; r < world->size; r++) {
            const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
            assert_non_null(failure);
            assert_int_equal(failure->status, SHOAL_ERR_MEMORY);
            assert_int_equal(failure->reporter, 0);
            assert_int_equal(failure->sequence, 1);
            assert_true(failure->rank > 0 && failure->step >= 0);
            assert_non_null(strstr(failure->text, "the network is out of memory"));
            for (int i = 0; i < 2; i++)
                assert_int_equal(status_of(world, r, i), SHOAL_ERR_MEMORY);
        }
        close_world(world);
    }
}

static void engine_lost_event_ends_in_timeout_everywhere(void **state)
{
    (void)state;
    int hit = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        const int size = 2 + (int)(seed % 4), count = 12;
        const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = TICK_NS};
        struct world *world = open_world(&weather, small_chunks);
        const struct program program = draw_program(seed, size, count);
        uint64_t random = seed * 77;
        post_program(world, &program);
        for (size_t turns = reference_below(&random, 40); turns > 0; turns--) {
            progress_round(world);
            shoal_sim_advance(world->sim);
        }
        const int source = (int)reference_below(&random, (size_t)size);
        shoal_sim_drop_next(world->sim, source, (source + 1) % size);
        if (!drive(world, count, (TIMEOUT_MS + 1000) * TICK_NS))
            fail_msg("seed %llu: somebody waits for ever after an event was lost", (unsigned long long)seed);
        hit += has_any_failed(world, count, SHOAL_ERR_TIMEOUT);
        assert_all_failed(world, &program, SHOAL_ERR_TIMEOUT, -1, seed);
        close_world(world);
    }
    assert_true(hit > 20); /* otherwise the test lost nothing that mattered */
}

static void engine_killed_rank_is_named_by_all_others(void **state)
{
    (void)state;
    int hit = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        const int size = 2 + (int)(seed % 6), count = 12, victim = (int)(seed * 5 % (uint64_t)size);
        const struct shoal_sim_options weather = {
            .seed = seed, .size = size, .delay_ns_max = TICK_NS, .detect_ns = 5 * TICK_NS};
        struct world *world = open_world(&weather, seed % 2 ? small_chunks : one_slot);
        const struct program program = draw_program(seed, size, count);
        uint64_t random = seed * 77;
        post_program(world, &program);
        for (size_t turns = reference_below(&random, 300); turns > 0; turns--) {
            progress_round(world);
            shoal_sim_advance(world->sim);
        }
        shoal_sim_kill(world->sim, victim);
        world->ranks[victim].is_gone = true;
        if (!drive(world, count, shoal_sim_now_ns(world->sim) + 2 * SHOAL_NS_PER_S))
            fail_msg("seed %llu: somebody waits for a killed rank", (unsigned long long)seed);
        assert_all_failed(world, &program, SHOAL_ERR_PEER_LOST, victim, seed);
        hit += has_any_failed(world, count, SHOAL_ERR_PEER_LOST);
        for (int r = 0; r < size; r++) {
            char name[32];
            snprintf(name, sizeof name, "rank %d ", victim);
            if (r != victim && world->ranks[r].engine->is_broken)
                assert_non_null(strstr(shoal_engine_failure(world->ranks[r].engine)->text, name));
        }
        close_world(world);
    }
    assert_true(hit > 30);
}

static void engine_killed_rank_is_named_though_a_message_waits_for_another(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 5, .size = 3, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER};
    for (int r = 0; r < 2; r++) {
        const struct shoal_call receive = {.collective = SHOAL_COLLECTIVE_RECV,
                                           .type = SHOAL_INT64,
                                           .root = 1 - r,
                                           .count = 1,
                                           .output = world->ranks[r].areas.plain[0],
                                           .timeout_ms = TIMEOUT_MS - 1000}; /* it ends first */
        post(world, r, 0, &receive);
        post(world, r, 1, &barrier);
    }
    shoal_sim_kill(world->sim, 2);
    world->ranks[2].is_gone = true;
    assert_true(drive(world, 2, 2 * SHOAL_NS_PER_S));
    for (int r = 0; r < 2; r++) {
        assert_int_equal(status_of(world, r, 1), SHOAL_ERR_PEER_LOST);
        assert_int_equal(shoal_engine_failure(world->ranks[r].engine)->rank, 2);
    }
    close_world(world);
}

struct mismatch {
    struct shoal_call call;
    const char *text;
};

static void engine_mismatch_reaches_all_with_both_calls(void **state)
{
    (void)state;
    const struct mismatch others[] = {
        {{.collective = SHOAL_COLLECTIVE_BROADCAST, .type = SHOAL_FLOAT32, .root = 1, .count = 1000},
         "broadcast of 1000 float32, root 1"},
        {{.collective = SHOAL_COLLECTIVE_BARRIER}, "barrier"},
        {{.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = 1001},
         "all-reduce of 1001 float32, sum"},
        {{.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT64, .op = SHOAL_SUM, .count = 1000},
         "all-reduce of 1000 float64, sum"},
        {{.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_MAX, .count = 1000},
         "all-reduce of 1000 float32, max"},
        {{.collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = 5000},
         "all-reduce of 5000 float32, sum"},
    };
    for (uint64_t seed = 0; seed < 10 * SHOAL_COUNT_OF(others); seed++) {
        const struct mismatch *other = &others[seed % SHOAL_COUNT_OF(others)];
        const int size = 2 + (int)(seed % 5), odd = (int)(seed % (uint64_t)size);
        const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = TICK_NS};
        struct world *world = open_world(&weather, preset);
        for (int r = 0; r < size; r++) {
            struct shoal_call call = {
                .collective = SHOAL_COLLECTIVE_ALLREDUCE, .type = SHOAL_FLOAT32, .op = SHOAL_SUM, .count = 1000};
            if (r == odd)
                call = other->call;
            memset(world->ranks[r].areas.plain[0], r, MEMORY_BYTES);
            call.input = call.output = world->ranks[r].areas.plain[0];
            post(world, r, 0, &call);
        }
        assert_true(drive(world, 1, 2 * SHOAL_NS_PER_S));
        for (int r = 0; r < size; r++) {
            const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
            assert_int_equal(status_of(world, r, 0), SHOAL_ERR_MISMATCH);
            assert_non_null(strstr(failure->text, other->text));
            assert_non_null(strstr(failure->text, "all-reduce of 1000 float32, sum"));
            for (size_t i = 0; i < 8000; i++)
                assert_int_equal(world->ranks[r].areas.plain[0][i], r); /* no byte has changed */
        }
        close_world(world);
    }
}

/* All-reduces of 1000 elements, and of 999 on every rank with is_odd[rank]. */
static struct world *run_odd(const struct shoal_sim_options *weather, size_t count, const bool *is_odd,
                             const char *const *settings)
{
    struct world *world = open_world(weather, settings);
    for (int r = 0; r < world->size; r++) {
        const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                        .type = SHOAL_FLOAT32,
                                        .op = SHOAL_SUM,
                                        .count = is_odd[r] ? count - 1 : count,
                                        .input = world->ranks[r].areas.plain[0],
                                        .output = world->ranks[r].areas.plain[0]};
        post(world, r, 0, &call);
    }
    assert_true(drive(world, 1, 2 * SHOAL_NS_PER_S));
    return world;
}

/* The odd rank is named, whichever of eight ranks notices it first. */
static void engine_mismatch_names_the_odd_rank(void **state)
{
    static const uint16_t hosts[] = {0, 0, 0, 1, 1, 1, 2, 2};
    static const char *const direct[] = {"SHOAL_INLINE_BYTES=8192", NULL}, *const planned[] = {"SHOAL_INLINE_BYTES=0", NULL};
    (void)state;
    for (uint64_t seed = 0; seed < 64; seed++) {
        const int odd = (int)(seed % 8);
        const bool is_apart = seed / 8 % 2;
        bool is_odd[8] = {false};
        const struct shoal_sim_options weather = {
            .seed = seed, .size = 8, .delay_ns_max = TICK_NS, .host = is_apart ? hosts : NULL};
        is_odd[odd] = true;
        struct world *world = run_odd(&weather, 1000, is_odd, seed / 16 % 2 ? direct : planned);
        char others[96], own[160];
        snprintf(others, sizeof others, "7 of 8 ranks called all-reduce of 1000 float32, sum");
        snprintf(own, sizeof own, "; rank %d (process %d on sim-%d) called all-reduce of 999 float32, sum", odd, 1000 + odd,
                 is_apart ? hosts[odd] : 0);
        for (int r = 0; r < 8; r++) {
            const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
            if (failure->rank != odd || !strstr(failure->text, own) || (!is_apart && !strstr(failure->text, others)))
                fail_msg("seed %llu: rank %d names rank %d, not %d: %s", (unsigned long long)seed, r, failure->rank, odd,
                         failure->text);
            assert_int_equal(failure->pid, 1000 + odd);
            assert_string_equal(failure->operation, "all-reduce of 1000 float32, sum");
        }
        close_world(world);
    }
}

static void engine_mismatch_without_a_majority_names_nobody(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 8; seed++) {
        const struct shoal_sim_options weather = {.seed = seed, .size = 4, .delay_ns_max = TICK_NS};
        const bool is_odd[4] = {[1] = true, [3] = true};
        struct world *world = run_odd(&weather, seed % 2 ? 100 : 10000, is_odd, preset);
        for (int r = 0; r < 4; r++) {
            const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
            assert_int_equal(failure->rank, -1);
            assert_int_equal(failure->pid, 0);
            assert_non_null(strstr(failure->text, "2 of 4 ranks (0, 2) called"));
            assert_non_null(strstr(failure->text, "; 2 of 4 ranks (1, 3) called"));
        }
        close_world(world);
    }
}

/* Draws any collective, root and length, with a plan or without. */
static struct shoal_call draw_call(struct world *world, int r, uint64_t *random)
{
    static const enum shoal_collective_type kinds[] = {
        SHOAL_COLLECTIVE_GATHER,    SHOAL_COLLECTIVE_SCATTER,  SHOAL_COLLECTIVE_BROADCAST, SHOAL_COLLECTIVE_REDUCE,
        SHOAL_COLLECTIVE_ALLREDUCE, SHOAL_COLLECTIVE_ALLTOALL, SHOAL_COLLECTIVE_ALLGATHER};
    struct shoal_call call = {.collective = kinds[reference_below(random, SHOAL_COUNT_OF(kinds))], .type = SHOAL_FLOAT32};
    const struct shoal_shape *shape = &shoal_collective_traits(call.collective)->shape;
    call.count = reference_below(random, 4) ? 5000 : 4;
    if (shape->root_contributes || shape->root_receives)
        call.root = (int)reference_below(random, (size_t)world->size);
    call.input = shoal_shape_contributes(shape, r, call.root) ? world->ranks[r].areas.plain[0] : NULL;
    call.output = shoal_shape_receives(shape, r, call.root) ? world->ranks[r].areas.plain[1] : NULL;
    return call;
}

/* Draws a gather: a giving rank meets only the root. */
static struct shoal_call draw_gather(struct world *world, int r, uint64_t *random)
{
    const int root = (int)reference_below(random, (size_t)world->size);
    return (struct shoal_call){.collective = SHOAL_COLLECTIVE_GATHER,
                               .type = SHOAL_FLOAT32,
                               .root = root,
                               .count = 5000,
                               .input = world->ranks[r].areas.plain[0],
                               .output = r == root ? world->ranks[r].areas.plain[1] : NULL};
}

#define CALLS_ALIKE 6
#define CALLS_IN_ALL (2 * CALLS_ALIKE + 1)

static struct shoal_call draw_unlike(struct world *world, int r, uint64_t seed)
{
    uint64_t random = seed * 97 + (uint64_t)r % (2 + seed % 3);
    return seed % 2 ? draw_gather(world, r, &random) : draw_call(world, r, &random);
}

/* All post the same call first; then one or several ranks post another one, and then all the same again. */
static void post_unlike(struct world *world, uint64_t seed, int r, int from, int until)
{
    uint64_t random = seed;
    for (int i = 0; i < until; i++) {
        const struct shoal_call alike = draw_call(world, r, &random);
        const struct shoal_call call = i == CALLS_ALIKE ? draw_unlike(world, r, seed) : alike;
        if (i >= from)
            post(world, r, i, &call);
    }
}

static bool are_unlike(struct world *world, uint64_t seed)
{
    const struct shoal_call first = draw_unlike(world, 0, seed);
    for (int r = 1; r < world->size; r++) {
        const struct shoal_call call = draw_unlike(world, r, seed);
        if (call.collective != first.collective || call.root != first.root || call.count != first.count)
            return true;
    }
    return false;
}

/* Sometimes one rank posts only after the others have done what they can. */
static bool run_unlike(struct world *world, uint64_t seed)
{
    const int late = seed % 4 < 2 ? -1 : (int)(seed / 4) % world->size;
    for (int r = 0; r < world->size; r++)
        post_unlike(world, seed, r, 0, r == late ? CALLS_ALIKE : CALLS_IN_ALL);
    if (late >= 0) {
        drive(world, CALLS_IN_ALL, SHOAL_NS_PER_S);
        post_unlike(world, seed, late, CALLS_ALIKE, CALLS_IN_ALL);
    }
    return drive(world, CALLS_IN_ALL, 3 * SHOAL_NS_PER_S);
}

/* The mismatch is found long before the deadline, even if the ranks that differ do not meet. */
static void engine_mismatch_is_found_over_hosts(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(200, 30);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        const int size = 3 + (int)(seed % 5), hosts = 2 + (int)(seed / 5 % 6);
        uint16_t host[RANKS_MAX];
        draw_hosts(seed, size, hosts < size ? hosts : size, host);
        const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = TICK_NS, .host = host};
        struct world *world = open_world(&weather, preset);
        if (!run_unlike(world, seed))
            fail_msg("seed %llu: operations did not end", (unsigned long long)seed);
        for (int r = 0; r < size && are_unlike(world, seed); r++) {
            assert_int_equal(status_of(world, r, CALLS_IN_ALL - 1), SHOAL_ERR_MISMATCH);
            assert_int_equal(shoal_engine_failure(world->ranks[r].engine)->sequence, CALLS_ALIKE + 1);
        }
        close_world(world);
    }
}

static void engine_absent_rank_is_named_at_the_deadline(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 3, .size = 4, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER, .timeout_ms = 15000};
    for (int r = 0; r < 4; r++) {
        if (r != 2)
            post(world, r, 0, &barrier);
    }
    assert_false(drive(world, 1, 9 * SHOAL_NS_PER_S));
    assert_int_equal(world->failures_logged, 0);
    drive(world, 1, 11 * SHOAL_NS_PER_S);
    assert_int_equal(world->failures_logged, 3); /* the warning after 10 s, once on each rank that waits */
    drive(world, 1, 16 * SHOAL_NS_PER_S);
    for (int r = 0; r < 4; r++) {
        if (r == 2)
            continue;
        assert_int_equal(status_of(world, r, 0), SHOAL_ERR_TIMEOUT);
        assert_int_equal(shoal_engine_failure(world->ranks[r].engine)->rank, 2);
        assert_true(shoal_engine_failure(world->ranks[r].engine)->waited_ms >= 15000);
    }
    close_world(world);
}

/* A log that is read after an hour still contains what the job waits for, and what to do next. */
static void engine_repeats_the_warning(void **state)
{
    static const struct {
        unsigned seconds, warnings;
    } times[] = {{9, 0}, {11, 1}, {59, 1}, {61, 2}, {121, 3}, {299, 3}, {301, 4}, {599, 4}, {601, 5}, {901, 6}};
    (void)state;
    const struct shoal_sim_options weather = {.seed = 3, .size = 2, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER, .timeout_ms = 1200000};
    post(world, 0, 0, &barrier);
    for (size_t i = 0; i < SHOAL_COUNT_OF(times); i++) {
        drive(world, 1, times[i].seconds * SHOAL_NS_PER_S);
        assert_int_equal(world->failures_logged, times[i].warnings);
        if (!times[i].warnings)
            continue;
        assert_non_null(strstr(world->last_line, "for rank 1 (process 1001 on sim-0, running)"));
        assert_non_null(strstr(world->last_line, "run on sim-0: py-spy dump --pid 1001 (Python) or gdb -p 1001"));
    }
    close_world(world);
}

static uint64_t (*completed_for_real)(struct shoal_transport *, int);
static unsigned looks;

static uint64_t count_looks(struct shoal_transport *transport, int peer)
{
    looks++;
    return completed_for_real(transport, peer);
}

/* While nothing moves, each rank looks around twice a second: the time must not grow with the square of the ranks. */
static void engine_looks_around_in_one_pass(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 3, .size = 64, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    struct shoal_engine *engine = world->ranks[0].engine;
    struct shoal_transport_ops ops = *engine->ops;
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER};
    for (int r = 0; r < 63; r++)
        post(world, r, 0, &barrier);
    drive(world, 1, 300 * TICK_NS);
    completed_for_real = ops.completed;
    ops.completed = count_looks;
    engine->ops = &ops;
    looks = 0;
    drive(world, 1, 700 * TICK_NS);
    assert_true(engine->is_wait_said);
    assert_in_range(looks, 1, 64 * 4);
    close_world(world);
}

static const struct shoal_transport_ops *ops_for_real;
static bool is_asked[64];

static uint64_t note_completed(struct shoal_transport *transport, int peer)
{
    is_asked[peer] = true;
    return ops_for_real->completed(transport, peer);
}

static const struct shoal_announcement *note_arrival(struct shoal_transport *transport, int peer, uint64_t sequence)
{
    is_asked[peer] = true;
    return ops_for_real->announcement(transport, peer, sequence);
}

/* Every rank is on its own host: in rounds a rank meets the logarithm of all ranks, and looks at no others. */
static void engine_looks_at_no_rank_that_it_does_not_meet(void **state)
{
    (void)state;
    uint16_t host[64];
    for (int r = 0; r < 64; r++)
        host[r] = (uint16_t)r;
    const struct shoal_sim_options weather = {.seed = 4, .size = 64, .delay_ns_max = TICK_NS, .host = host};
    struct world *world = open_world(&weather, preset);
    struct shoal_engine *engine = world->ranks[0].engine;
    struct shoal_transport_ops ops = *engine->ops;
    ops_for_real = engine->ops;
    ops.completed = note_completed;
    ops.announcement = note_arrival;
    engine->ops = &ops;
    memset(is_asked, 0, sizeof is_asked);
    for (int i = 0; i < 40; i++) { /* more than the announcements that a rank keeps */
        for (int r = 0; r < 64; r++) {
            const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                            .type = SHOAL_INT64,
                                            .op = SHOAL_SUM,
                                            .count = 1,
                                            .input = world->ranks[r].areas.plain[0],
                                            .output = world->ranks[r].areas.plain[1]};
            post(world, r, 0, &call);
        }
        assert_true(drive(world, 1, shoal_sim_now_ns(world->sim) + SHOAL_NS_PER_S));
    }
    int asked = 0;
    for (int r = 0; r < 64; r++)
        asked += is_asked[r];
    assert_in_range(asked, 6, 2 * 6 + 1);
    engine->ops = ops_for_real;
    close_world(world);
}

/* ---- Ranks that wait for each other ---- */

static void post_receive(struct world *world, int r, int from, int tag)
{
    const struct shoal_call receive = {.collective = SHOAL_COLLECTIVE_RECV,
                                       .type = SHOAL_INT64,
                                       .root = from,
                                       .tag = tag,
                                       .count = 1,
                                       .output = world->ranks[r].areas.plain[0],
                                       .timeout_ms = 15000};
    post(world, r, 0, &receive);
}

/* A thread of the rank waits for its first request and does nothing else. */
static void block(struct world *world, int r)
{
    atomic_store(&world->ranks[r].requests[0].awaited, 1);
}

/* A statement that a rank made before it was stopped may be out of date. */
static void engine_blames_a_stopped_rank_and_no_deadlock(void **state)
{
    const struct shoal_sim_options weather = {.seed = 21, .size = 3, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    (void)state;
    for (int r = 0; r < 3; r++) {
        post_receive(world, r, (r + 1) % 3, 5);
        block(world, r);
    }
    drive(world, 1, 11 * SHOAL_NS_PER_S);
    assert_non_null(strstr(world->last_line, "deadlock"));
    shoal_sim_stop(world->sim, 1);
    drive(world, 1, 16 * SHOAL_NS_PER_S);
    const struct shoal_failure *failure = shoal_engine_failure(world->ranks[0].engine);
    assert_int_equal(failure->status, SHOAL_ERR_TIMEOUT);
    assert_null(strstr(failure->text, "deadlock"));
    assert_int_equal(failure->rank, 1);
    close_world(world);
}

static void engine_calls_a_cycle_of_messages_a_deadlock(void **state)
{
    static const uint16_t hosts[] = {0, 1, 2, 2};
    (void)state;
    for (int i = 0; i < 4; i++) {
        const int size = 2 + i % 2; /* over hosts a rank knows only its own peers' waits */
        const struct shoal_sim_options weather = {
            .seed = 21, .size = size + 1, .delay_ns_max = TICK_NS, .host = i == 2 ? hosts : NULL};
        struct world *world = open_world(&weather, preset);
        if (i == 3) { /* nobody knows whether this one does something else */
            post_receive(world, 2, 0, 5);
        } else {
            for (int r = 0; r < size; r++) {
                post_receive(world, r, (r + 1) % size, 5);
                block(world, r);
            }
        }
        if (i == 3) {
            post_receive(world, 0, 2, 5);
            block(world, 0);
        }
        drive(world, 1, 11 * SHOAL_NS_PER_S);
        assert_int_equal(strstr(world->last_line, "deadlock") != NULL, i != 3);
        for (int r = 0; r < size && i != 3; r++) /* as other processes see it */
            assert_int_equal(atomic_load(&world->ranks[r].engine->recorder.flight->waits_for), 1 + (r + 1) % size);
        drive(world, 1, 16 * SHOAL_NS_PER_S);
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[0].engine);
        assert_int_equal(failure->status, SHOAL_ERR_TIMEOUT);
        assert_string_equal(failure->operation,
                            i == 3 ? "receive of 1 int64, peer 2, tag 5" : "receive of 1 int64, peer 1, tag 5");
        assert_int_equal(strstr(failure->text, "deadlock") != NULL, i != 3);
        assert_int_equal(failure->rank, i == 3 ? 2 : -1);
        for (int r = 0; r < size && i != 3; r++) {
            char hop[80];
            snprintf(hop, sizeof hop, "rank %d (process %d) waits for rank %d (process %d)", r, 1000 + r, (r + 1) % size,
                     1000 + (r + 1) % size);
            if (!strstr(failure->text, hop))
                fail_msg("no \"%s\" in \"%s\"", hop, failure->text);
        }
        close_world(world);
    }
}

static void engine_names_a_message_with_another_tag(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 22, .size = 2, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    const struct shoal_call send = {.collective = SHOAL_COLLECTIVE_SEND,
                                    .type = SHOAL_INT64,
                                    .root = 1,
                                    .tag = 7,
                                    .count = 1,
                                    .input = world->ranks[0].areas.plain[0]};
    post(world, 0, 0, &send);
    post_receive(world, 1, 0, 5);
    drive(world, 1, 11 * SHOAL_NS_PER_S);
    assert_non_null(strstr(world->last_line, "receive of 1 int64, peer 0, tag 5"));
    assert_non_null(strstr(world->last_line, "a message with tag 7 has come from rank 0, and no receive asks for it"));
    drive(world, 1, 16 * SHOAL_NS_PER_S);
    assert_non_null(strstr(shoal_engine_failure(world->ranks[1].engine)->text, "a message with tag 7 has come from rank 0"));
    close_world(world);
}

static bool is_never_flushed(struct shoal_transport *transport)
{
    (void)transport;
    return false;
}

static bool is_sending_to_2(struct shoal_transport *transport, int peer)
{
    (void)transport;
    return peer == 2;
}

/* Everything except sending is done: no rank waits for another operation. */
static void engine_names_who_does_not_take_what_is_sent(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 8, .size = 4, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    struct shoal_engine *engine = world->ranks[0].engine;
    struct shoal_transport_ops ops = *engine->ops;
    const struct shoal_call barrier = {.collective = SHOAL_COLLECTIVE_BARRIER, .timeout_ms = 15000};
    ops.is_flushed = is_never_flushed;
    ops.is_sending = is_sending_to_2;
    engine->ops = &ops;
    for (int r = 0; r < 4; r++)
        post(world, r, 0, &barrier);
    drive(world, 1, 16 * SHOAL_NS_PER_S);
    assert_int_equal(status_of(world, 1, 0), SHOAL_OK);
    assert_int_equal(shoal_engine_failure(engine)->status, SHOAL_ERR_TIMEOUT);
    assert_int_equal(shoal_engine_failure(engine)->rank, 2);
    assert_non_null(strstr(shoal_engine_failure(engine)->text, "waiting for its data to leave for rank 2 (process 1002 on "));
    close_world(world);
}

static void post_allreduce(struct world *world, int r, int index)
{
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                    .type = SHOAL_FLOAT32,
                                    .op = SHOAL_SUM,
                                    .count = 50000,
                                    .input = world->ranks[r].areas.plain[0],
                                    .output = world->ranks[r].areas.plain[1],
                                    .timeout_ms = r == 0 ? 15000 : 20000};
    post(world, r, index, &call);
}

/* On two hosts of two ranks, rank 3 calls something else. Rank 0 is the first to give up; it waits for rank 1, which waits for
 * rank 3. */
static void engine_names_the_end_of_a_chain(void **state)
{
    static const uint16_t host[] = {0, 0, 1, 1};
    (void)state;
    const struct shoal_sim_options weather = {.seed = 11, .size = 4, .delay_ns_max = TICK_NS, .host = host};
    struct world *world = open_world(&weather, preset);
    for (int r = 0; r < 3; r++)
        post_allreduce(world, r, 0);
    assert_true(drive(world, 1, 16 * SHOAL_NS_PER_S));
    for (int r = 0; r < 3; r++) {
        const struct shoal_failure *failure = shoal_engine_failure(world->ranks[r].engine);
        assert_int_equal(failure->reporter, 0);
        assert_int_equal(failure->rank, 3);
        assert_non_null(strstr(failure->text, "waiting for rank 3 (process 1003 on sim-1, running; rank 1 waits for it)"));
    }
    close_world(world);
}

/* Rank 2 has waited for rank 3, but no longer does: now rank 2 is the one that does something else. */
static void engine_does_not_name_the_end_of_a_chain_that_was(void **state)
{
    static const uint16_t host[] = {0, 0, 1, 1};
    (void)state;
    const struct shoal_sim_options weather = {.seed = 12, .size = 4, .delay_ns_max = TICK_NS, .host = host};
    struct world *world = open_world(&weather, preset);
    for (int r = 0; r < 3; r++)
        post_allreduce(world, r, 0);
    drive(world, 1, 5 * SHOAL_NS_PER_S);
    assert_true(world->ranks[2].engine->is_wait_said);
    post_allreduce(world, 3, 0);
    assert_true(drive(world, 1, 6 * SHOAL_NS_PER_S));
    world->ranks[2].is_gone = true; /* nobody drives it */
    for (int r = 0; r < 4; r++) {
        if (r != 2)
            post_allreduce(world, r, 1);
    }
    drive(world, 2, 25 * SHOAL_NS_PER_S);
    assert_int_equal(shoal_engine_failure(world->ranks[0].engine)->status, SHOAL_ERR_TIMEOUT);
    assert_int_equal(shoal_engine_failure(world->ranks[0].engine)->rank, 2);
    assert_null(strstr(shoal_engine_failure(world->ranks[0].engine)->text, "waits for it"));
    world->ranks[2].is_gone = false;
    close_world(world);
}

/* ---- Rooted operations: ranks that give run ahead */

static struct shoal_call broadcast_of(struct world *world, int r, int root, size_t count)
{
    return (struct shoal_call){.collective = SHOAL_COLLECTIVE_BROADCAST,
                               .type = SHOAL_FLOAT32,
                               .root = root,
                               .count = count,
                               .input = world->ranks[r].areas.plain[0],
                               .output = world->ranks[r].areas.plain[0],
                               .timeout_ms = 15000};
}

static void post_broadcasts(struct world *world, int r, int from, int until, int root, size_t count)
{
    const struct shoal_call call = broadcast_of(world, r, root, count);
    for (int i = from; i < until; i++)
        post(world, r, i, &call);
}

static void engine_absent_root_is_named_though_a_leaf_is_behind(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 4, .size = 4, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    post_broadcasts(world, 0, 0, 5, 3, 1);
    post_broadcasts(world, 1, 0, 5, 3, 1);
    post_broadcasts(world, 3, 0, 4, 3, 1);
    drive(world, 5, 16 * SHOAL_NS_PER_S);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(status_of(world, r, 3), SHOAL_OK);
        assert_int_equal(status_of(world, r, 4), SHOAL_ERR_TIMEOUT);
        assert_int_equal(shoal_engine_failure(world->ranks[r].engine)->rank, 3);
    }
    close_world(world);
}

/* The root may reuse its payloads up to the point at which all ranks' calls were compared, although not all of them could be.
 */
static void engine_root_runs_ahead_of_what_was_compared(void **state)
{
    (void)state;
    const size_t beside = SHOAL_PAYLOAD_INLINE; /* elements: more bytes than a record holds */
    const struct shoal_sim_options weather = {.seed = 9, .size = 3, .delay_ns_max = TICK_NS};
    struct world *world = open_world(&weather, preset);
    post_broadcasts(world, 0, 0, 9, 0, beside);
    post_broadcasts(world, 1, 0, 9, 0, beside);
    drive(world, 9, SHOAL_NS_PER_S);
    assert_int_equal(status_of(world, 0, SHOAL_PAYLOADS - 1), SHOAL_OK);
    assert_int_equal(status_of(world, 0, SHOAL_PAYLOADS), SHOAL_PENDING);
    post_broadcasts(world, 2, 0, 3, 0, beside);
    drive(world, 9, 2 * SHOAL_NS_PER_S);
    assert_int_equal(status_of(world, 0, SHOAL_PAYLOADS + 2), SHOAL_OK);
    assert_int_equal(status_of(world, 0, SHOAL_PAYLOADS + 3), SHOAL_PENDING);
    post_broadcasts(world, 2, 3, 9, 0, beside);
    assert_true(drive(world, 9, 3 * SHOAL_NS_PER_S));
    close_world(world);
}

/* Like a sharded optimizer's broadcasts: each rank is root in turn. Returns the plans that all ranks have built until then. */
static uint64_t rotate_roots(struct world *world)
{
    const int calls = world->size / 2;
    uint64_t built = 0;
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < world->size; r++) {
            for (int i = 0; i < calls; i++) {
                const struct shoal_call call = broadcast_of(world, r, half * calls + i, 5000);
                post(world, r, i, &call);
            }
        }
        assert_true(drive(world, calls, shoal_sim_now_ns(world->sim) + 100 * SHOAL_NS_PER_S));
    }
    for (int r = 0; r < world->size; r++)
        built += world->ranks[r].engine->cache.plans_built;
    return built;
}

static void engine_keeps_plans_of_rotating_roots(void **state)
{
    uint16_t host[RANKS_MAX];
    (void)state;
    draw_hosts(0, 40, 4, host);
    for (int is_apart = SEEDS_PART > 1; is_apart < 2; is_apart++) { /* the plain build runs both */
        const struct shoal_sim_options weather = {.seed = 9, .size = 40, .host = is_apart ? host : NULL};
        struct world *world = open_world(&weather, preset);
        const uint64_t built = rotate_roots(world);
        assert_true(built >= 40 * 40);
        for (int round = 0; round < (SEEDS_PART > 1 ? 1 : 3); round++)
            assert_int_equal(rotate_roots(world), built);
        close_world(world);
    }
}

/* If plans would need more memory than allowed, the least recently used ones are freed, but none in use. */
static void engine_bounds_what_it_keeps(void **state)
{
    uint16_t host[RANKS_MAX];
    (void)state;
    draw_hosts(0, 40, 4, host);
    const struct shoal_sim_options weather = {.seed = 9, .size = 40, .host = host};
    struct world *world = open_world(&weather, preset);
    for (int r = 0; r < world->size; r++)
        world->ranks[r].engine->cache.kept_bytes = 0;
    const uint64_t built = rotate_roots(world);
    assert_true(rotate_roots(world) > built);
    for (int r = 0; r < world->size; r++) {
        int peer_sets = 0, plans = 0;
        for (const struct shoal_peer_set *peer_set = world->ranks[r].engine->cache.peer_sets; peer_set;
             peer_set = peer_set->next)
            peer_sets++;
        for (const struct shoal_cached_plan *plan = world->ranks[r].engine->cache.plans; plan; plan = plan->next)
            plans++;
        assert_true(peer_sets <= SHOAL_ANNOUNCEMENTS + 2 && plans <= SHOAL_ACTIVE_MAX);
    }
    close_world(world);
}

/* The last look after a peer's end finds the mismatch, and ends the request that would have been blamed on that end. */
static void engine_mismatch_found_at_a_peers_end_is_the_cause(void **state)
{
    (void)state;
    const struct shoal_sim_options weather = {.seed = 6, .size = 2, .delay_ns_max = TICK_NS, .detect_ns = TICK_NS};
    struct world *world = open_world(&weather, preset);
    struct shoal_engine *engine = world->ranks[0].engine;
    const struct shoal_call call = broadcast_of(world, 0, 0, SHOAL_PAYLOAD_INLINE);
    post_broadcasts(world, 0, 0, SHOAL_PAYLOADS, 0, SHOAL_PAYLOAD_INLINE);
    struct shoal_request *held_back = calloc(1, sizeof *held_back);
    assert_non_null(held_back);
    held_back->is_detached = true;
    shoal_engine_post(engine, &call, held_back);
    while (shoal_engine_progress(engine))
        continue;
    post_broadcasts(world, 1, 0, 1, 0, 1);
    shoal_engine_progress(world->ranks[1].engine);
    while (shoal_sim_advance(world->sim))
        continue;
    shoal_sim_kill(world->sim, 1);
    world->ranks[1].is_gone = true;
    shoal_sim_advance_to(world->sim, shoal_sim_now_ns(world->sim) + 10 * TICK_NS);
    shoal_engine_check(engine, shoal_engine_now_ns(engine));
    assert_true(engine->is_broken);
    assert_int_equal(shoal_engine_failure(engine)->status, SHOAL_ERR_MISMATCH);
    close_world(world);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(engine_runs_random_programs_exactly),
    cmocka_unit_test(engine_runs_all_reduces_in_one_exchange_exactly),
    cmocka_unit_test(engine_stages_before_others_have_arrived),
    cmocka_unit_test(engine_goes_round_in_a_slot),
    cmocka_unit_test(engine_runs_random_programs_over_hosts_exactly),
    cmocka_unit_test(engine_runs_every_algorithm_over_hosts_exactly),
    cmocka_unit_test(engine_averages_float16_over_hosts_without_overflow),
    cmocka_unit_test(engine_runs_many_hosts),
    cmocka_unit_test(engine_runs_with_64_ranks),
    cmocka_unit_test(engine_same_seed_same_trace),
    cmocka_unit_test(engine_runs_programs_on_devices_exactly),
    cmocka_unit_test(engine_goes_round_in_a_devices_memory),
    cmocka_unit_test(engine_runs_alone_on_a_device),
    cmocka_unit_test(engine_goes_on_while_a_device_is_late),
    cmocka_unit_test(engine_names_a_device_that_stops),
    cmocka_unit_test(engine_drops_devices_operands_at_a_failure),
    cmocka_unit_test(engine_delivers_messages_exactly),
    cmocka_unit_test(engine_delivers_messages_of_devices_exactly),
    cmocka_unit_test(engine_passes_a_message_that_waits_for_a_device),
    cmocka_unit_test(engine_names_a_device_that_a_message_waits_for),
    cmocka_unit_test(engine_names_a_device_that_a_message_to_itself_waits_for),
    cmocka_unit_test(engine_does_not_trust_packets),
    cmocka_unit_test(engine_does_not_read_a_senders_memory_after_a_failure),
    cmocka_unit_test(engine_counts_no_data_that_were_read_too_late),
    cmocka_unit_test(engine_only_looks_after_a_device_has_worked),
    cmocka_unit_test(engine_packs_a_put_once),
    cmocka_unit_test(engine_fails_by_a_step_that_fails),
    cmocka_unit_test(engine_lost_event_ends_in_timeout_everywhere),
    cmocka_unit_test(engine_killed_rank_is_named_by_all_others),
    cmocka_unit_test(engine_killed_rank_is_named_though_a_message_waits_for_another),
    cmocka_unit_test(engine_mismatch_reaches_all_with_both_calls),
    cmocka_unit_test(engine_mismatch_names_the_odd_rank),
    cmocka_unit_test(engine_mismatch_without_a_majority_names_nobody),
    cmocka_unit_test(engine_mismatch_is_found_over_hosts),
    cmocka_unit_test(engine_absent_rank_is_named_at_the_deadline),
    cmocka_unit_test(engine_repeats_the_warning),
    cmocka_unit_test(engine_looks_around_in_one_pass),
    cmocka_unit_test(engine_looks_at_no_rank_that_it_does_not_meet),
    cmocka_unit_test(engine_calls_a_cycle_of_messages_a_deadlock),
    cmocka_unit_test(engine_blames_a_stopped_rank_and_no_deadlock),
    cmocka_unit_test(engine_names_a_message_with_another_tag),
    cmocka_unit_test(engine_names_who_does_not_take_what_is_sent),
    cmocka_unit_test(engine_names_the_end_of_a_chain),
    cmocka_unit_test(engine_does_not_name_the_end_of_a_chain_that_was),
    cmocka_unit_test(engine_absent_root_is_named_though_a_leaf_is_behind),
    cmocka_unit_test(engine_root_runs_ahead_of_what_was_compared),
    cmocka_unit_test(engine_keeps_plans_of_rotating_roots),
    cmocka_unit_test(engine_bounds_what_it_keeps),
    cmocka_unit_test(engine_mismatch_found_at_a_peers_end_is_the_cause),
};

int main(void)
{
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* memory that a world has freed is reused by the next, without the kernel */
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    return cmocka_run_group_tests_name("engine_sim", tests, NULL, NULL);
}
