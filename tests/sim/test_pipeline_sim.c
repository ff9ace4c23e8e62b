/* Pipelines over the simulated transport: on 1 to 8 ranks, any schedule, any edges and any sizes give the same results, whatever
 * the delays of messages. If an action fails on a rank, or the rank lacks memory or makes another call, all ranks get the same
 * failure, and none waits for a deadline. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "reference.h"
#include "seeds.h"
#include "shoal/pipeline.h"
#include "sim_calls.h"
#include "threads/thread_checks.h"

#define RANKS_MAX 8
#define STAGES_MAX 24
#define MICROBATCHES_MAX 24
#define EDGES_MAX 40
#define STEPS 3
#define TICKS_FEW 200 /* of 100 ms: the deadline is after 30 s. Some pass when threads wait for a core */

enum fault { NO_FAULT, ACTION_FAILS, CANNOT_POST, CANNOT_ALLOCATE, OTHER_CALL };

/* What is drawn from a seed, for all ranks. */
struct drawn {
    uint64_t seed;
    struct sim_world_options world;
    struct shoal_schedule *schedule;
    uint32_t stages, microbatches;
    struct shoal_edge edges[EDGES_MAX];
    size_t edge_count;
    struct shoal_pipeline_options options;
    size_t counts[MICROBATCHES_MAX]; /* elements of each message */
    int is_forward_only[STEPS];
    enum fault fault;
    int at_fault; /* a rank */
    int fault_step;
    uint32_t fault_action; /* its action */
    long fault_after;      /* posts or allocations that succeed */
};

/* A value is factor * (17 * microbatch + element) + addend, wrapped. */
struct value {
    uint64_t factor, addend;
};

struct rank {
    const struct drawn *drawn;
    struct sim_world *world;
    struct shoal_context *context;
    int rank;
    struct shoal_pipeline *pipeline;
    const struct value *activations, *gradients; /* [stages]: what each stage hands on */
    uint64_t random;
    int steps; /* that ended well */
    uint32_t actions;
    long owned;
    enum shoal_status status;
    struct shoal_failure failure;
    int has_failed; /* an allocation */
};

/* ---- Drawing ------------------------------------------------------------------------------------------------------------- */

static void draw_edges(uint64_t *random, struct drawn *drawn)
{
    const bool is_chain = reference_below(random, 2);
    for (uint32_t from = 0; from < drawn->stages; from++)
        for (uint32_t to = from + 1; to < drawn->stages && drawn->edge_count < EDGES_MAX; to++)
            if (is_chain ? to == from + 1 : reference_below(random, 4) == 0 || (to == from + 1 && reference_below(random, 4)))
                drawn->edges[drawn->edge_count++] = (struct shoal_edge){from, to};
    drawn->options.edges = drawn->edges;
    drawn->options.edge_count = drawn->edge_count;
}

static void recompute_some(uint64_t *random, struct drawn *drawn)
{
    struct shoal_schedule *recomputed = NULL;
    unsigned char stages[STAGES_MAX];
    for (uint32_t s = 0; s < drawn->stages; s++)
        stages[s] = (unsigned char)reference_below(random, 2);
    assert_int_equal(shoal_schedule_recompute(drawn->schedule, stages, &recomputed), SHOAL_OK);
    shoal_schedule_free(drawn->schedule);
    drawn->schedule = recomputed;
}

static void draw_schedule(uint64_t *random, struct drawn *drawn)
{
    struct shoal_schedule_options options = SHOAL_SCHEDULE_OPTIONS_INIT;
    char text[256] = "";
    options.ranks = (uint32_t)drawn->world.size;
    options.kind = (enum shoal_schedule_kind)reference_below(random, SHOAL_SCHEDULE_AUTO);
    options.microbatches = options.kind == SHOAL_SCHEDULE_INTERLEAVED
                               ? options.ranks * (1 + (uint32_t)reference_below(random, 2))
                               : 1 + (uint32_t)reference_below(random, 12);
    if (shoal_schedule_create(&options, &drawn->schedule, text, sizeof text) != SHOAL_OK)
        fail_msg("seed %d: %s", (int)drawn->seed, text);
    drawn->stages = shoal_schedule_stages(drawn->schedule);
    if (reference_below(random, 3) == 0)
        recompute_some(random, drawn);
    drawn->microbatches = options.microbatches;
    assert_true(drawn->stages <= STAGES_MAX && drawn->microbatches <= MICROBATCHES_MAX);
}

static void draw(struct drawn *drawn, uint64_t seed, enum fault fault)
{
    uint64_t random = seed, *r = &random;
    uint32_t actions;
    memset(drawn, 0, sizeof *drawn);
    drawn->seed = seed;
    drawn->fault = fault;
    drawn->world.seed = reference_random(r);
    drawn->world.size = (fault == NO_FAULT ? 1 : 2) + (int)reference_below(r, RANKS_MAX - 1);
    drawn->world.hosts = 1 + (int)reference_below(r, 4);
    while (drawn->world.size % drawn->world.hosts)
        drawn->world.hosts--;
    drawn->world.delay_ns_max = reference_below(r, 4) ? 1000000 : 0;
    drawn->world.shares_memory = (int)reference_below(r, 2);
    drawn->options = (struct shoal_pipeline_options)SHOAL_PIPELINE_OPTIONS_INIT;
    drawn->options.ahead = (uint32_t)reference_below(r, 4);
    draw_schedule(r, drawn);
    draw_edges(r, drawn);
    for (uint32_t m = 0; m < drawn->microbatches; m++)
        drawn->counts[m] = reference_below(r, 3) ? reference_below(r, 200) : reference_below(r, 2500);
    for (int s = 0; s < STEPS; s++)
        drawn->is_forward_only[s] = reference_below(r, 3) == 0;
    drawn->at_fault = (int)reference_below(r, (size_t)drawn->world.size);
    drawn->fault_step = (int)reference_below(r, STEPS);
    (void)shoal_schedule_actions(drawn->schedule, (uint32_t)drawn->at_fault, &actions);
    drawn->fault_action = (uint32_t)reference_below(r, actions);
    drawn->fault_after = (long)reference_below(r, 30);
}

/* Computes what each stage hands on, for all microbatches. */
static void fill_values(const struct drawn *drawn, struct value *activations, struct value *gradients)
{
    for (uint32_t s = 0; s < drawn->stages; s++) {
        struct value sum = {s == 0, 0};
        for (size_t e = 0; e < drawn->edge_count; e++)
            if (drawn->edges[e].to == s) {
                sum.factor += activations[drawn->edges[e].from].factor;
                sum.addend += activations[drawn->edges[e].from].addend;
            }
        activations[s] = (struct value){3 * sum.factor, 3 * sum.addend + s + 1};
    }
    for (uint32_t s = drawn->stages; s-- > 0;) {
        struct value sum = {s == drawn->stages - 1, 0};
        for (size_t e = 0; e < drawn->edge_count; e++)
            if (drawn->edges[e].from == s) {
                sum.factor += gradients[drawn->edges[e].to].factor;
                sum.addend += gradients[drawn->edges[e].to].addend;
            }
        gradients[s] = (struct value){5 * sum.factor, 5 * sum.addend + s + 2};
    }
}

/* ---- Actions ------------------------------------------------------------------------------------------------------------- */

static uint64_t element_of(struct value value, uint32_t microbatch, size_t i)
{
    return value.factor * (17 * (uint64_t)microbatch + i) + value.addend;
}

/* Finds the stage at the other end of the k-th edge of an action's inputs. */
static uint32_t source_of(const struct drawn *drawn, const struct shoal_action *action, uint32_t k)
{
    const bool is_forward = action->kind == SHOAL_FORWARD || action->kind == SHOAL_RECOMPUTE;
    size_t e = 0;
    while ((is_forward ? drawn->edges[e].to : drawn->edges[e].from) != action->stage || k--)
        e++;
    return is_forward ? drawn->edges[e].from : drawn->edges[e].to;
}

static void check_inputs(const struct rank *rank, const struct shoal_work *work)
{
    const struct drawn *drawn = rank->drawn;
    const uint32_t microbatch = work->action.microbatch;
    for (uint32_t k = 0; k < work->input_count; k++) {
        const uint32_t source = source_of(drawn, &work->action, k);
        const bool is_forward = work->action.kind == SHOAL_FORWARD || work->action.kind == SHOAL_RECOMPUTE;
        const struct value value = is_forward ? rank->activations[source] : rank->gradients[source];
        const uint64_t *data = work->inputs[k].data;
        CHECK(rank, work->inputs[k].bytes == drawn->counts[microbatch] * sizeof *data, "seed %d", (int)drawn->seed);
        CHECK(rank, work->inputs[k].note_bytes == sizeof source && !memcmp(work->inputs[k].note, &source, sizeof source),
              "seed %d: another note", (int)drawn->seed);
        for (size_t i = 0; i < drawn->counts[microbatch]; i++)
            CHECK(rank, data[i] == element_of(value, microbatch, i), "seed %d, stage %u, microbatch %u, element %zu",
                  (int)drawn->seed, work->action.stage, microbatch, i);
    }
}

static enum shoal_status make_output(struct rank *rank, const struct shoal_action *action, struct shoal_parcel *output)
{
    const struct value value =
        action->kind == SHOAL_FORWARD ? rank->activations[action->stage] : rank->gradients[action->stage];
    const size_t count = rank->drawn->counts[action->microbatch];
    const size_t bytes = count * sizeof(uint64_t);
    const bool is_owned = reference_below(&rank->random, 2);
    void *memory = is_owned ? malloc(bytes + 1) : NULL;
    if (!is_owned && bytes) {
        const enum shoal_status status = shoal_pipeline_alloc(rank->pipeline, bytes, &memory);
        if (status != SHOAL_OK)
            return status;
    }
    if (!memory && (bytes || is_owned))
        return SHOAL_ERR_MEMORY;
    for (size_t i = 0; i < count; i++)
        ((uint64_t *)memory)[i] = element_of(value, action->microbatch, i);
    output->data = bytes ? memory : NULL;
    output->bytes = bytes;
    output->owner = is_owned ? memory : NULL;
    output->note_bytes = sizeof action->stage;
    memcpy(output->note, &action->stage, sizeof action->stage);
    return SHOAL_OK;
}

static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct rank *const rank = user;
    const struct drawn *const drawn = rank->drawn;
    const uint32_t index = rank->actions++;
    enum shoal_status status = SHOAL_OK;
    check_inputs(rank, work);
    if (reference_below(&rank->random, 8) == 0)
        usleep((useconds_t)reference_below(&rank->random, 200));
    if (drawn->fault == ACTION_FAILS && rank->rank == drawn->at_fault && rank->steps == drawn->fault_step &&
        index == drawn->fault_action) {
        snprintf(text, text_bytes, "seed %d", (int)drawn->seed);
        return SHOAL_ERR_UNSUPPORTED;
    }
    for (uint32_t k = 0; k < work->output_count && status == SHOAL_OK; k++)
        status = make_output(rank, &work->action, &work->outputs[k]);
    for (uint32_t k = 0; k < work->output_count && status != SHOAL_OK; k++)
        free(work->outputs[k].owner); /* the pipeline does not take them */
    return status;
}

static void released(void *user, void *owner)
{
    (void)user;
    free(owner);
}

/* ---- Ranks --------------------------------------------------------------------------------------------------------------- */

static enum shoal_status run_step(struct rank *rank)
{
    const struct drawn *const drawn = rank->drawn;
    const bool is_at_fault = rank->rank == drawn->at_fault && rank->steps == drawn->fault_step;
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    calls.compute = compute;
    calls.released = released;
    calls.user = rank;
    rank->actions = 0;
    if (is_at_fault && drawn->fault == CANNOT_POST)
        sim_fail_posts_after(rank->context, drawn->fault_after);
    if (is_at_fault && drawn->fault == CANNOT_ALLOCATE)
        (void)sim_fail_allocation_after(drawn->fault_after);
    const bool is_forward_only = drawn->is_forward_only[rank->steps] != (is_at_fault && drawn->fault == OTHER_CALL);
    const enum shoal_status status =
        is_forward_only ? shoal_pipeline_forward(rank->pipeline, &calls) : shoal_pipeline_step(rank->pipeline, &calls);
    rank->has_failed |= sim_fail_allocation_after(-1);
    return status;
}

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    const struct drawn *drawn = rank->drawn;
    sim_enter(rank->world);
    OK(rank, shoal_pipeline_create(rank->context, sim_comm(rank->world, rank->rank), drawn->schedule, &drawn->options,
                                   &rank->pipeline));
    rank->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    while (rank->status == SHOAL_OK && rank->steps < STEPS) {
        rank->status = run_step(rank);
        rank->steps += rank->status == SHOAL_OK;
    }
    if (rank->status != SHOAL_OK)
        OK(rank, shoal_pipeline_failure(rank->pipeline, &rank->failure));
    shoal_pipeline_free(rank->pipeline);
    sim_leave(rank->world);
    return NULL;
}

/* Returns how often time had to be moved to a deadline. */
static long run_world(const struct drawn *drawn, struct rank *ranks)
{
    pthread_t threads[RANKS_MAX];
    struct value activations[STAGES_MAX], gradients[STAGES_MAX];
    struct sim_world *world = sim_world_open(&drawn->world);
    fill_values(drawn, activations, gradients);
    for (int r = 0; r < drawn->world.size; r++) {
        ranks[r] = (struct rank){.drawn = drawn,
                                 .world = world,
                                 .context = sim_context(world, r),
                                 .rank = r,
                                 .activations = activations,
                                 .gradients = gradients,
                                 .random = drawn->seed * 100 + (uint64_t)r};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < drawn->world.size; r++)
        pthread_join(threads[r], NULL);
    const long ticks = sim_ticks(world);
    sim_world_close(world);
    return ticks;
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void any_delays_give_the_same_results(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(300, 30);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed, NO_FAULT);
        const long ticks = run_world(&drawn, ranks);
        for (int r = 0; r < drawn.world.size; r++)
            if (ranks[r].steps < STEPS)
                fail_msg("seed %d: rank %d of %d ends after %d steps: %s", (int)seed, r, drawn.world.size, ranks[r].steps,
                         ranks[r].failure.text);
        if (ticks > TICKS_FEW)
            fail_msg("seed %d: waited for a deadline", (int)seed);
        shoal_schedule_free(drawn.schedule);
    }
}

/* The rank at fault has the failure in its step, if anything went wrong there. Others have it in that step or in a later one,
 * unless they had nothing left to wait for. */
static void check_failed(const struct drawn *drawn, const struct rank *ranks, enum shoal_status wanted)
{
    const struct rank *const at_fault = &ranks[drawn->at_fault];
    const char *text = NULL;
    for (int r = 0; r < drawn->world.size; r++) {
        const struct rank *const rank = &ranks[r];
        const bool may_end_well = r != drawn->at_fault || drawn->fault == OTHER_CALL; /* peers may notice after its last step */
        if (rank->status == SHOAL_OK && rank->steps == STEPS && may_end_well)
            continue;
        text = text ? text : rank->failure.text;
        const bool is_blamed = drawn->fault == OTHER_CALL || rank->failure.rank == drawn->at_fault;
        if (rank->status != wanted || rank->failure.status != wanted || !is_blamed || strcmp(rank->failure.text, text) != 0)
            fail_msg("seed %d, fault %d of rank %d in step %d: rank %d of %d has %s, blames %d after %d steps: %s",
                     (int)drawn->seed, (int)drawn->fault, drawn->at_fault, drawn->fault_step, r, drawn->world.size,
                     shoal_status_name(rank->status), rank->failure.rank, rank->steps, rank->failure.text);
    }
    assert_true(drawn->fault == OTHER_CALL || drawn->fault == CANNOT_POST || at_fault->steps == drawn->fault_step);
}

static void fail_with(enum fault fault, enum shoal_status wanted)
{
    const struct seeds seeds = seeds_of(100, 20);
    int failed = 0;
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        bool has_failed = false;
        draw(&drawn, seed + 1000 * fault, fault);
        const long ticks = run_world(&drawn, ranks);
        for (int r = 0; r < drawn.world.size; r++)
            has_failed |= ranks[r].status != SHOAL_OK;
        if (has_failed)
            check_failed(&drawn, ranks, wanted);
        else if (fault == CANNOT_ALLOCATE && ranks[drawn.at_fault].has_failed)
            fail_msg("seed %d: an allocation failed without notice", (int)seed);
        if (ticks > TICKS_FEW)
            fail_msg("seed %d, fault %d: waited for a deadline", (int)seed, (int)fault);
        failed += has_failed;
        shoal_schedule_free(drawn.schedule);
    }
    assert_true(failed > 0);
}

static void an_action_fails(void **state)
{
    (void)state;
    fail_with(ACTION_FAILS, SHOAL_ERR_UNSUPPORTED);
}

static void a_rank_cannot_post(void **state)
{
    (void)state;
    fail_with(CANNOT_POST, SHOAL_ERR_MEMORY);
}

static void a_rank_has_no_memory(void **state)
{
    (void)state;
    fail_with(CANNOT_ALLOCATE, SHOAL_ERR_MEMORY);
}

static void a_rank_makes_another_call(void **state)
{
    (void)state;
    fail_with(OTHER_CALL, SHOAL_ERR_MISMATCH);
}

/* ---- Without memory for a pipeline --------------------------------------------------------------------------------------- */

static void *create_rank(void *arg)
{
    struct rank *rank = arg;
    const struct drawn *const drawn = rank->drawn;
    sim_enter(rank->world);
    if (rank->rank == drawn->at_fault)
        (void)sim_fail_allocation_after(drawn->fault_after);
    rank->status = shoal_pipeline_create(rank->context, sim_comm(rank->world, rank->rank), drawn->schedule, &drawn->options,
                                         &rank->pipeline);
    rank->has_failed = sim_fail_allocation_after(-1);
    shoal_pipeline_free(rank->pipeline);
    sim_leave(rank->world);
    return NULL;
}

/* Returns true if an allocation failed. */
static bool create_without(const struct drawn *drawn)
{
    pthread_t threads[RANKS_MAX];
    struct rank ranks[RANKS_MAX];
    struct sim_world *world = sim_world_open(&drawn->world);
    for (int r = 0; r < drawn->world.size; r++) {
        ranks[r] = (struct rank){.drawn = drawn, .world = world, .context = sim_context(world, r), .rank = r};
        assert_int_equal(pthread_create(&threads[r], NULL, create_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < drawn->world.size; r++)
        pthread_join(threads[r], NULL);
    const long ticks = sim_ticks(world);
    sim_world_close(world);
    const bool has_failed = ranks[drawn->at_fault].has_failed;
    for (int r = 0; r < drawn->world.size; r++)
        if (ranks[r].status != (has_failed ? SHOAL_ERR_MEMORY : SHOAL_OK))
            fail_msg("%ld allocations: rank %d has %s", drawn->fault_after, r, shoal_status_name(ranks[r].status));
    assert_true(ticks <= TICKS_FEW);
    return has_failed;
}

static void a_rank_lacks_memory_to_begin(void **state)
{
    (void)state;
    struct drawn drawn;
    for (int at_fault = 0; at_fault < 3; at_fault++) {
        draw(&drawn, 4, NO_FAULT);
        drawn.world.size = (int)shoal_schedule_ranks(drawn.schedule);
        drawn.at_fault = at_fault % drawn.world.size;
        drawn.fault_after = 0;
        while (create_without(&drawn))
            drawn.fault_after++;
        assert_true(drawn.fault_after > 8);
        shoal_schedule_free(drawn.schedule);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_delays_give_the_same_results),
        cmocka_unit_test(an_action_fails),
        cmocka_unit_test(a_rank_cannot_post),
        cmocka_unit_test(a_rank_has_no_memory),
        cmocka_unit_test(a_rank_makes_another_call),
        cmocka_unit_test(a_rank_lacks_memory_to_begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
