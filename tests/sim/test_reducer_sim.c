/* The gradient engine over the simulated transport: on 2 to 16 ranks, gradients have one result, whatever the order in which
 * they become ready, the threads, and the delays of messages. If a rank dies, leaves out a gradient, marks one twice, lacks
 * memory or gives up, all ranks learn the same failure, and none waits for a deadline. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "gradient_values.h"
#include "reference.h"
#include "seeds.h"
#include "shoal/gradients.h"
#include "sim_calls.h"
#include "threads/thread_checks.h"

#define RANKS_MAX 16
#define PARAMETERS 12
#define THREADS 3
#define STEPS 3
#define ELEMENTS_MAX 5000
#define RATE (1.0 / 1024)

enum fault { NO_FAULT, DIES, NEVER_MARKS, MARKS_TWICE, GIVES_UP, TWO_AT_FAULT, CANNOT_POST, STANDS_STILL };

/* What is drawn from a seed, for all ranks. */
struct drawn {
    uint64_t seed;
    struct sim_world_options world;
    struct shoal_parameter parameters[PARAMETERS];
    char names[PARAMETERS][16];
    struct shoal_reducer_options options;
    struct shoal_optimizer optimizer; /* SGD with rate RATE, which keeps values exact, if options.optimizer is set */
    struct shoal_optimizer_group group;
    double weights[RANKS_MAX]; /* if the optimizer has any */
    size_t granules[PARAMETERS];
    enum fault fault;
    int at_fault, also_at_fault; /* ranks */
    int fault_step;
    size_t fault_parameter;
    long fault_posts; /* that succeed before */
};

struct rank {
    const struct drawn *drawn;
    struct sim_world *world;
    struct shoal_context *context;
    int rank;
    struct shoal_reducer *reducer;
    void *memory[PARAMETERS];
    uint64_t random;
    int steps; /* that ended well */
    enum shoal_status status;
    struct shoal_failure failure;
    uint64_t hashes[STEPS]; /* of all averages */
    atomic_int *made;       /* ranks that have a reducer */
    atomic_int *ended;      /* ranks that have seen the failure */
};

/* ---- Drawing ------------------------------------------------------------------------------------------------------------- */

static int draw_hosts(uint64_t *random, int size)
{
    int hosts = 1 + (int)reference_below(random, 4);
    while (size % hosts)
        hosts--;
    return hosts;
}

static enum shoal_compression draw_compression(uint64_t *random, const struct drawn *drawn)
{
    return drawn->world.hosts > 1 ? (enum shoal_compression)reference_below(random, SHOAL_COMPRESS_INT8 + 1)
                                  : SHOAL_COMPRESS_NONE;
}

static void draw_parameters(uint64_t *random, struct drawn *drawn)
{
    static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};
    const size_t kinds = reference_below(random, 2) ? 1 : sizeof types / sizeof *types;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t most = i % 4 ? 200 : ELEMENTS_MAX;
        drawn->parameters[i] = (struct shoal_parameter){1 + reference_below(random, most - 1),
                                                        types[reference_below(random, kinds)], drawn->names[i]};
        snprintf(drawn->names[i], sizeof drawn->names[i], "layer%zu", i);
    }
}

/* A team's size: all ranks, a host's, or a divisor of their number. */
static int draw_degree(uint64_t *random, const struct drawn *drawn)
{
    const int size = drawn->world.size;
    int degree = 1 + (int)reference_below(random, (size_t)size);
    while (size % degree)
        degree--;
    const size_t kind = reference_below(random, 4);
    return kind == 0 ? 0 : kind == 1 ? SHOAL_DEGREE_HOST : degree;
}

/* Unequal shards, of which some are empty. */
static void draw_borders(uint64_t *random, struct drawn *drawn)
{
    for (int r = 0; r < RANKS_MAX; r++)
        drawn->weights[r] = (double)reference_below(random, 4) + (r ? 0 : 0.5);
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t granules[] = {1, 1 + reference_below(random, 40), 256, SIZE_MAX};
        drawn->granules[i] = granules[reference_below(random, 4)];
    }
    drawn->optimizer.weights = reference_below(random, 3) ? drawn->weights : NULL;
    drawn->optimizer.granules = reference_below(random, 3) ? drawn->granules : NULL;
}

static void draw_optimizer(uint64_t *random, struct drawn *drawn)
{
    drawn->group = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    drawn->group.rate = RATE;
    drawn->group.beta1 = 0;
    drawn->optimizer = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    drawn->optimizer.rule = SHOAL_SGD;
    drawn->optimizer.groups = &drawn->group;
    drawn->optimizer.group_count = 1;
    drawn->optimizer.steps_early = (int)reference_below(random, 2);
    drawn->optimizer.is_atomic = (int)reference_below(random, 2);
    drawn->optimizer.degree = draw_degree(random, drawn);
    if (reference_below(random, 2))
        draw_borders(random, drawn);
    if (drawn->options.compression != SHOAL_COMPRESS_NONE || reference_below(random, 2))
        return;
    drawn->options.optimizer = &drawn->optimizer;
    drawn->options.checks_finite = (int)reference_below(random, 2);
}

/* Chooses the number of ranks: averages are exact over 2, 4, 8 and 16 ranks, sums over any number. */
static void draw(struct drawn *drawn, uint64_t seed, enum fault fault)
{
    uint64_t random = seed, *r = &random;
    memset(drawn, 0, sizeof *drawn);
    drawn->seed = seed;
    drawn->fault = fault;
    drawn->world.seed = reference_random(r);
    drawn->world.size = 2 + (int)reference_below(r, reference_below(r, 4) ? 5 : RANKS_MAX - 1);
    drawn->world.hosts = draw_hosts(r, drawn->world.size);
    drawn->world.delay_ns_max = reference_below(r, 4) ? 1000000 : 0;
    drawn->world.shares_memory = (int)reference_below(r, 2);
    draw_parameters(r, drawn);
    struct shoal_reducer_options *options = &drawn->options;
    *options = (struct shoal_reducer_options)SHOAL_REDUCER_OPTIONS_INIT;
    const bool is_power = (drawn->world.size & (drawn->world.size - 1)) == 0;
    options->op = is_power && reference_below(r, 2) ? SHOAL_AVG : SHOAL_SUM;
    options->buffer_bytes = 16 << 10;
    options->first_buffer_bytes = 2 << 10;
    options->rank_bytes = 128;
    options->flight_bytes = reference_below(r, 3) ? 0 : 1;
    options->keeps_layout = (int)reference_below(r, 2);
    options->results_in_views = (int)reference_below(r, 2);
    options->has_thread = (int)reference_below(r, 2);
    options->has_norms = (int)reference_below(r, 2);
    options->compression = draw_compression(r, drawn);
    drawn->at_fault = (int)reference_below(r, (size_t)drawn->world.size);
    drawn->also_at_fault = (drawn->at_fault + 1) % drawn->world.size;
    drawn->fault_step = (int)reference_below(r, STEPS);
    drawn->fault_parameter = reference_below(r, PARAMETERS);
    drawn->fault_posts = (long)reference_below(r, 12);
    draw_optimizer(r, drawn);
}

/* ---- A step -------------------------------------------------------------------------------------------------------------- */

static bool is_at_fault(const struct rank *rank, enum fault fault)
{
    const struct drawn *drawn = rank->drawn;
    if (rank->steps != drawn->fault_step)
        return false;
    if (drawn->fault == TWO_AT_FAULT)
        return fault == (rank->rank == drawn->at_fault        ? MARKS_TWICE
                         : rank->rank == drawn->also_at_fault ? NEVER_MARKS
                                                              : NO_FAULT);
    return drawn->fault == fault && rank->rank == drawn->at_fault;
}

struct marker {
    struct rank *rank;
    const uint32_t *order;
    size_t begin, end;
    uint64_t random;
    enum shoal_status status;
};

static enum shoal_status mark_in_parts(struct marker *marker, uint32_t parameter)
{
    const struct rank *rank = marker->rank;
    const struct shoal_parameter *each = &rank->drawn->parameters[parameter];
    const size_t first = reference_below(&marker->random, each->count), bytes = shoal_type_bytes(each->type);
    char *memory = rank->memory[parameter];
    const enum shoal_status status =
        shoal_reducer_ready_part(rank->reducer, parameter, memory + first * bytes, first, each->count - first);
    return status == SHOAL_OK ? shoal_reducer_ready_part(rank->reducer, parameter, memory, 0, first) : status;
}

static enum shoal_status mark(struct marker *marker, uint32_t parameter)
{
    struct rank *rank = marker->rank;
    const size_t count = rank->drawn->parameters[parameter].count;
    const bool is_it = parameter == rank->drawn->fault_parameter;
    if (is_it && is_at_fault(rank, NEVER_MARKS))
        return SHOAL_OK;
    if (is_it && is_at_fault(rank, DIES)) {
        sim_die(rank->context);
        return SHOAL_ERR_ABORTED;
    }
    if (is_it && is_at_fault(rank, GIVES_UP))
        shoal_reducer_fail(rank->reducer, SHOAL_ERR_ABORTED, "the loss was not a number");
    if (!is_it && reference_below(&marker->random, 3) == 0 && count > 1)
        return mark_in_parts(marker, parameter);
    const enum shoal_status status = shoal_reducer_ready(rank->reducer, parameter, rank->memory[parameter], count);
    if (status != SHOAL_OK || !is_it || !is_at_fault(rank, MARKS_TWICE))
        return status;
    return shoal_reducer_ready(rank->reducer, parameter, rank->memory[parameter], count);
}

static void *run_marker(void *arg)
{
    struct marker *marker = arg;
    sim_enter(marker->rank->world);
    for (size_t i = marker->begin; i < marker->end && marker->status == SHOAL_OK; i++) {
        if (reference_below(&marker->random, 4) == 0)
            usleep((useconds_t)reference_below(&marker->random, 200));
        marker->status = mark(marker, marker->order[i]);
    }
    sim_leave(marker->rank->world);
    return NULL;
}

/* The threads are joined before finish; meanwhile this one rests. */
static enum shoal_status mark_all(struct rank *rank)
{
    uint32_t order[PARAMETERS];
    struct marker markers[THREADS];
    pthread_t threads[THREADS];
    const size_t used = 1 + reference_below(&rank->random, THREADS);
    enum shoal_status status = SHOAL_OK;
    reference_shuffle(&rank->random, order, PARAMETERS);
    for (size_t t = 0; t < used; t++) {
        markers[t] = (struct marker){
            rank, order, PARAMETERS * t / used, PARAMETERS * (t + 1) / used, reference_random(&rank->random), SHOAL_OK};
        CHECK(rank, pthread_create(&threads[t], NULL, run_marker, &markers[t]) == 0, "no thread");
    }
    sim_leave(rank->world);
    for (size_t t = 0; t < used; t++) {
        pthread_join(threads[t], NULL);
        status = status == SHOAL_OK ? markers[t].status : status;
    }
    sim_enter(rank->world);
    return status;
}

static double expect_of_step(const struct rank *rank, int step, size_t parameter, size_t element)
{
    double sum = 0;
    for (int r = 0; r < rank->drawn->world.size; r++)
        sum += gradient_value(step, r, parameter, element);
    return rank->drawn->options.op == SHOAL_AVG ? sum / rank->drawn->world.size : sum;
}

/* Returns a parameter's value after that many steps of the optimizer; parameters begin at zero. */
static double expect_after(const struct rank *rank, int steps, size_t parameter, size_t element)
{
    double value = 0;
    for (int s = 0; s < steps; s++)
        value -= RATE * expect_of_step(rank, s, parameter, element);
    return value;
}

/* Returns the average of this step or, with an optimizer, the parameter's value after it. */
static double expect(const struct rank *rank, size_t parameter, size_t element)
{
    if (rank->drawn->options.optimizer)
        return expect_after(rank, rank->steps + 1, parameter, element);
    return expect_of_step(rank, rank->steps, parameter, element);
}

static const void *result_of(const struct rank *rank, size_t parameter)
{
    const struct shoal_reducer_options *options = &rank->drawn->options;
    if (options->optimizer)
        return shoal_reducer_parameter(rank->reducer, parameter);
    return options->results_in_views ? shoal_reducer_view(rank->reducer, parameter) : rank->memory[parameter];
}

/* Results of 8 bits, and parameters that are rounded to 16 bits, are not exact, but the same on all ranks. */
static bool is_exact(const struct drawn *drawn, enum shoal_type type)
{
    if (drawn->options.optimizer)
        return type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64;
    return drawn->options.compression != SHOAL_COMPRESS_INT8 || type != SHOAL_FLOAT32;
}

static void check_step(struct rank *rank)
{
    const struct drawn *drawn = rank->drawn;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const struct shoal_parameter *each = &drawn->parameters[i];
        const void *memory = result_of(rank, i);
        const uint64_t hash = shoal_bytes_hash(memory, each->count * shoal_type_bytes(each->type));
        rank->hashes[rank->steps] = rank->hashes[rank->steps] * 31 + hash;
        if (!is_exact(drawn, each->type))
            continue;
        double period[GRADIENT_PERIOD];
        for (size_t e = 0; e < GRADIENT_PERIOD; e++)
            period[e] = expect(rank, i, e);
        const size_t other = gradient_find_other(each->type, period, memory, each->count);
        CHECK(rank, other == each->count, "seed %d, step %d, %s, element %zu: %g, not %g", (int)drawn->seed, rank->steps,
              each->name, other, gradient_get(each->type, memory, other), period[other % GRADIENT_PERIOD]);
    }
}

/* A step that failed has changed nothing if it is atomic. */
static void check_kept(const struct rank *rank)
{
    const struct drawn *drawn = rank->drawn;
    for (size_t i = 0; i < PARAMETERS && drawn->options.optimizer && drawn->optimizer.is_atomic; i++) {
        const struct shoal_parameter *each = &drawn->parameters[i];
        double period[GRADIENT_PERIOD];
        if (!is_exact(drawn, each->type))
            continue;
        for (size_t e = 0; e < GRADIENT_PERIOD; e++)
            period[e] = expect_after(rank, rank->steps, i, e);
        const size_t other = gradient_find_other(each->type, period, result_of(rank, i), each->count);
        CHECK(rank, other == each->count, "seed %d: after %d steps and a failure, %s is not as before, from element %zu on",
              (int)drawn->seed, rank->steps, each->name, other);
    }
}

/* Waits outside the library until that many ranks have arrived. */
static void wait_for_ranks(struct rank *rank, atomic_int *ranks, int count)
{
    sim_leave(rank->world);
    while (atomic_load(ranks) < count)
        usleep(200);
    sim_enter(rank->world);
}

static enum shoal_status stand_still(struct rank *rank)
{
    wait_for_ranks(rank, rank->ended, rank->drawn->world.size - 1);
    return SHOAL_ERR_TIMEOUT;
}

static enum shoal_status run_step(struct rank *rank)
{
    if (is_at_fault(rank, STANDS_STILL))
        return stand_still(rank);
    uint32_t before[PARAMETERS], after[PARAMETERS];
    if (rank->steps > 0)
        OK(rank, shoal_reducer_order(rank->reducer, before));
    enum shoal_status status = shoal_reducer_begin(rank->reducer, SHOAL_STEP_REDUCE);
    if (rank->steps > 0 && status == SHOAL_OK) {
        OK(rank, shoal_reducer_order(rank->reducer, after)); /* rank 0's may have made a layout just now */
        CHECK(rank, memcmp(before, after, sizeof before) == 0, "seed %d: it is not what this rank saw", (int)rank->drawn->seed);
    }
    for (size_t i = 0; i < PARAMETERS && status == SHOAL_OK; i++) {
        const struct shoal_parameter *each = &rank->drawn->parameters[i];
        double period[GRADIENT_PERIOD];
        for (size_t e = 0; e < GRADIENT_PERIOD; e++)
            period[e] = gradient_value(rank->steps, rank->rank, i, e);
        gradient_fill(each->type, period, rank->memory[i], each->count);
    }
    if (status == SHOAL_OK)
        status = mark_all(rank);
    return status == SHOAL_OK ? shoal_reducer_finish(rank->reducer, NULL) : status;
}

static void *run_rank(void *arg)
{
    struct rank *rank = arg;
    const struct drawn *drawn = rank->drawn;
    sim_enter(rank->world);
    OK(rank, shoal_reducer_create(rank->context, sim_comm(rank->world, rank->rank), drawn->parameters, PARAMETERS,
                                  &drawn->options, &rank->reducer));
    atomic_fetch_add(rank->made, 1);
    wait_for_ranks(rank, rank->made, drawn->world.size); /* a fault while another is still creating it is a different case */
    while (rank->status == SHOAL_OK && rank->steps < STEPS) {
        if (is_at_fault(rank, CANNOT_POST))
            sim_fail_posts_after(rank->context, drawn->fault_posts);
        rank->status = run_step(rank);
        if (rank->status != SHOAL_OK)
            break;
        check_step(rank);
        rank->steps++;
    }
    rank->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    const bool is_dead = drawn->fault == DIES && rank->rank == drawn->at_fault;
    const bool is_still = drawn->fault == STANDS_STILL && rank->rank == drawn->at_fault;
    if (rank->status != SHOAL_OK && !is_dead && !is_still) {
        OK(rank, shoal_reducer_failure(rank->reducer, &rank->failure));
        check_kept(rank);
    }
    atomic_fetch_add(rank->ended, 1);
    shoal_reducer_free(rank->reducer);
    sim_leave(rank->world);
    return NULL;
}

/* Returns how often time had to be moved to a deadline. */
static long run_world(const struct drawn *drawn, struct rank *ranks)
{
    pthread_t threads[RANKS_MAX];
    atomic_int made = 0, ended = 0;
    struct sim_world *world = sim_world_open(&drawn->world);
    for (int r = 0; r < drawn->world.size; r++) {
        ranks[r] = (struct rank){.drawn = drawn,
                                 .world = world,
                                 .context = sim_context(world, r),
                                 .rank = r,
                                 .made = &made,
                                 .ended = &ended,
                                 .random = drawn->seed * 100 + (uint64_t)r};
        for (size_t i = 0; i < PARAMETERS; i++)
            assert_non_null(ranks[r].memory[i] = calloc(ELEMENTS_MAX, 8));
    }
    for (int r = 0; r < drawn->world.size; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (int r = 0; r < drawn->world.size; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; r < drawn->world.size; r++) {
        for (size_t i = 0; i < PARAMETERS; i++)
            free(ranks[r].memory[i]);
    }
    const long ticks = sim_ticks(world);
    sim_world_close(world);
    return ticks;
}

static void check_same_bits(const struct drawn *drawn, const struct rank *ranks)
{
    for (int r = 1; r < drawn->world.size; r++) {
        for (int s = 0; s < ranks[r].steps && s < ranks[0].steps; s++) {
            if (ranks[r].hashes[s] != ranks[0].hashes[s])
                fail_msg("seed %d, step %d: rank %d has other bits than rank 0", (int)drawn->seed, s, r);
        }
    }
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

static void any_order_gives_the_same_result(void **state)
{
    (void)state;
    const struct seeds seeds = seeds_of(200, 20);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed, NO_FAULT);
        run_world(&drawn, ranks);
        for (int r = 0; r < drawn.world.size; r++) {
            if (ranks[r].steps < STEPS)
                fail_msg("seed %d: rank %d of %d ends after %d steps: %s", (int)seed, r, drawn.world.size, ranks[r].steps,
                         ranks[r].failure.text);
        }
        check_same_bits(&drawn, ranks);
    }
}

struct told {
    enum shoal_status status;
    char text[160];
};

static struct told expect_told(const struct drawn *drawn)
{
    struct told told = {SHOAL_ERR_STATE, ""};
    const int step = drawn->fault_step + 1, rank = drawn->at_fault;
    const size_t parameter = drawn->fault_parameter;
    if (drawn->fault == NEVER_MARKS)
        snprintf(told.text, sizeof told.text,
                 "gradients, step %d, rank %d: 1 of 12 gradients were not marked when the step ended: parameter %zu (layer%zu)",
                 step, rank, parameter, parameter);
    else if (drawn->fault == MARKS_TWICE)
        snprintf(told.text, sizeof told.text, "gradients, step %d, rank %d: parameter %zu (layer%zu) was marked twice", step,
                 rank, parameter, parameter);
    else if (drawn->fault == GIVES_UP)
        snprintf(told.text, sizeof told.text, "gradients, step %d, rank %d: the loss was not a number", step, rank);
    else if (drawn->fault == CANNOT_POST)
        snprintf(told.text, sizeof told.text, ", rank %d: ", rank);
    else if (drawn->fault == DIES || drawn->fault == STANDS_STILL)
        snprintf(told.text, sizeof told.text, "rank %d", rank);
    told.status = drawn->fault == GIVES_UP       ? SHOAL_ERR_ABORTED
                  : drawn->fault == CANNOT_POST  ? SHOAL_ERR_MEMORY
                  : drawn->fault == DIES         ? SHOAL_ERR_PEER_LOST
                  : drawn->fault == STANDS_STILL ? SHOAL_ERR_TIMEOUT
                                                 : SHOAL_ERR_STATE;
    return told;
}

/* Returns the last step of the rank at fault: the drawn one, or a later one if the drawn step did not have the post that was
 * to fail. */
static int last_step(const struct drawn *drawn, const struct rank *ranks)
{
    return drawn->fault == CANNOT_POST ? ranks[drawn->at_fault].steps : drawn->fault_step;
}

/* A rank that has completed its last step needs nothing more from the rank at fault. A rank that cannot post the last stage of
 * a compressed buffer, which gathers inside its host, delays only its own host. A rank that marks twice may do so after the
 * buffer has been summed. */
static bool needs_nothing_more(const struct drawn *drawn, const struct rank *rank)
{
    return (drawn->fault == CANNOT_POST || drawn->fault == MARKS_TWICE) && rank->rank != drawn->at_fault &&
           rank->status == SHOAL_OK && rank->steps == STEPS;
}

/* A rank may be in the previous step when it learns of the fault. */
static void check_told(const struct drawn *drawn, const struct rank *ranks, const struct told *told, const char *text)
{
    for (int r = 0; r < drawn->world.size; r++) {
        const struct rank *rank = &ranks[r];
        if ((drawn->fault == DIES || drawn->fault == STANDS_STILL) && r == drawn->at_fault)
            continue;
        if (needs_nothing_more(drawn, rank) && ranks[drawn->at_fault].steps == STEPS - 1)
            continue;
        const bool is_blamed = drawn->fault == TWO_AT_FAULT
                                   ? rank->failure.rank == drawn->at_fault || rank->failure.rank == drawn->also_at_fault
                                   : rank->failure.rank == drawn->at_fault;
        if (rank->status != told->status || rank->failure.status != told->status || !is_blamed ||
            !strstr(rank->failure.text, text) || abs(rank->steps - last_step(drawn, ranks)) > 1)
            fail_msg("seed %d, fault %d of rank %d in step %d: rank %d of %d has %s, blames %d after %d steps: %s",
                     (int)drawn->seed, (int)drawn->fault, drawn->at_fault, drawn->fault_step + 1, r, drawn->world.size,
                     shoal_status_name(rank->status), rank->failure.rank, rank->steps, rank->failure.text);
    }
}

static void tell_faults(enum fault fault, uint64_t count)
{
    const struct seeds seeds = seeds_of(count, count / 5);
    for (uint64_t seed = seeds.first; seed < seeds.end; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed + 1000 * fault, fault);
        (void)run_world(&drawn, ranks);
        struct told told = expect_told(&drawn);
        const struct rank *survivor = &ranks[drawn.at_fault ? 0 : 1];
        if (fault == DIES && survivor->status == SHOAL_ERR_TIMEOUT)
            told.status = survivor->status; /* some of the dead rank's messages were lost, so it seems to have finished */
        if (fault == CANNOT_POST && ranks[drawn.at_fault].status == SHOAL_OK)
            continue; /* it made no further post */
        check_told(&drawn, ranks, &told, fault == TWO_AT_FAULT ? ranks[0].failure.text : told.text);
        check_same_bits(&drawn, ranks);
    }
}

static void a_rank_dies(void **state)
{
    (void)state;
    tell_faults(DIES, 40);
}

static void a_rank_never_marks(void **state)
{
    (void)state;
    tell_faults(NEVER_MARKS, 40);
}

static void a_rank_marks_twice(void **state)
{
    (void)state;
    tell_faults(MARKS_TWICE, 40);
}

static void a_rank_gives_up(void **state)
{
    (void)state;
    tell_faults(GIVES_UP, 40);
}

static void two_ranks_are_at_fault(void **state)
{
    (void)state;
    tell_faults(TWO_AT_FAULT, 40);
}

static void a_rank_cannot_post(void **state)
{
    (void)state;
    tell_faults(CANNOT_POST, 60);
}

/* Nobody can notify the others then: they name the rank at their deadline, which is the reducer's. */
static void a_rank_stands_still(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct drawn drawn;
        struct rank ranks[RANKS_MAX];
        draw(&drawn, seed + 7000, STANDS_STILL);
        drawn.fault_step = 0;
        drawn.options.compression = SHOAL_COMPRESS_NONE;
        drawn.options.timeout_ms = 4000;
        const long ticks = run_world(&drawn, ranks);
        const struct told told = expect_told(&drawn);
        check_told(&drawn, ranks, &told, told.text);
        assert_in_range(ticks, 20, 200); /* of 100 ms: the reducer's deadline, not the 30 s of its communicator */
    }
}

/* ---- Out of memory ------------------------------------------------------------------------------------------------------- */

#define FEW 4 /* ranks, on two hosts; the second one lacks memory for something */
#define LISTED 3

/* The ranks' program. */
struct scarce {
    bool has_other_list; /* the third rank */
    bool is_made_before; /* memory is scarce after shoal_reducer_create and a step */
    bool is_compared;    /* and then replicas that differ are compared, instead of a step */
    bool has_optimizer;  /* that steps late, and whose states are read in the end */
    enum shoal_compression compression;
    enum shoal_status otherwise; /* the result if memory suffices */
};

struct poor {
    const struct scarce *scarce;
    struct sim_world *world;
    int rank;
    long allocations; /* of the second rank that still succeed */
    int has_failed;
    enum shoal_status status;
    struct shoal_failure failure;
};

/* Marks in the order of numbers, which is not that of the first layout: the next begin makes another one. */
static enum shoal_status run_short_step(const struct poor *poor, struct shoal_reducer *reducer, bool is_finite)
{
    static const float zero;
    float values[LISTED][1000];
    enum shoal_status status = shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE);
    for (size_t i = 0; i < LISTED && status == SHOAL_OK; i++) {
        for (size_t e = 0; e < 1000; e++)
            values[i][e] = poor->rank == 2 && !is_finite ? zero / zero : 1;
        status = shoal_reducer_ready(reducer, i, values[i], 1000);
    }
    if (status == SHOAL_OK)
        status = shoal_reducer_finish(reducer, NULL);
    if (status == SHOAL_OK && poor->scarce->has_optimizer)
        status = shoal_reducer_read_state(reducer, 1, SHOAL_STATE_FIRST, values[0]);
    return status;
}

/* Its shards are unequal, so that borders need memory. */
static struct shoal_optimizer scarce_optimizer(const struct scarce *scarce, const struct shoal_optimizer_group *group)
{
    static const double weights[] = {1, 3, 2, 2};
    struct shoal_optimizer optimizer = SHOAL_OPTIMIZER_INIT;
    optimizer.rule = SHOAL_ADAM;
    optimizer.groups = group;
    optimizer.group_count = 1;
    optimizer.steps_early = scarce->is_made_before;
    optimizer.is_atomic = 1;
    optimizer.degree = scarce->is_made_before ? 0 : 2;
    optimizer.weights = weights;
    return optimizer;
}

static void *run_poor(void *arg)
{
    struct poor *poor = arg;
    const struct scarce *scarce = poor->scarce;
    struct shoal_context *context = sim_context(poor->world, poor->rank);
    struct shoal_reducer *reducer = NULL;
    struct shoal_parameter parameters[LISTED];
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    const uint64_t hashes[LISTED] = {1, (uint64_t)poor->rank, 3};
    const struct shoal_optimizer_group group = SHOAL_OPTIMIZER_GROUP_INIT;
    const struct shoal_optimizer optimizer = scarce_optimizer(scarce, &group);
    options.compression = scarce->compression;
    options.optimizer = scarce->has_optimizer ? &optimizer : NULL;
    options.checks_finite = 1;
    options.first_buffer_bytes = options.buffer_bytes = 5000;
    options.rank_bytes = 1;
    for (size_t i = 0; i < LISTED; i++)
        parameters[i] =
            (struct shoal_parameter){scarce->has_other_list && poor->rank == 2 && i == 1 ? 999 : 1000, SHOAL_FLOAT32, "listed"};
    const long allocations = poor->rank == 1 ? poor->allocations : -1;
    sim_enter(poor->world);
    (void)sim_fail_allocation_after(scarce->is_made_before ? -1 : allocations);
    poor->status = shoal_reducer_create(context, sim_comm(poor->world, poor->rank), parameters, LISTED, &options, &reducer);
    if (scarce->is_made_before) {
        OK(poor, poor->status);
        OK(poor, run_short_step(poor, reducer, true));
        (void)sim_fail_allocation_after(allocations);
        poor->status = scarce->is_compared ? shoal_reducer_compare(reducer, hashes) : run_short_step(poor, reducer, false);
    }
    poor->has_failed = sim_fail_allocation_after(-1);
    poor->failure = (struct shoal_failure)SHOAL_FAILURE_INIT;
    if (poor->status != SHOAL_OK)
        OK(poor, shoal_last_failure(context, NULL, &poor->failure));
    shoal_reducer_free(reducer);
    sim_leave(poor->world);
    return NULL;
}

/* Returns false if memory sufficed. */
static bool run_scarce(const struct scarce *scarce, long allocations)
{
    struct poor poors[FEW];
    pthread_t threads[FEW];
    struct sim_world *world = sim_world_open(
        &(struct sim_world_options){.seed = (uint64_t)allocations + 1, .size = FEW, .hosts = 2, .delay_ns_max = 1000});
    for (int r = 0; r < FEW; r++) {
        poors[r] = (struct poor){.scarce = scarce, .world = world, .rank = r, .allocations = allocations};
        assert_int_equal(pthread_create(&threads[r], NULL, run_poor, &poors[r]), 0);
    }
    for (int r = 0; r < FEW; r++)
        pthread_join(threads[r], NULL);
    sim_world_close(world);
    const enum shoal_status wanted = poors[1].has_failed ? SHOAL_ERR_MEMORY : scarce->otherwise;
    for (int r = 0; r < FEW; r++) {
        const char *text = poors[r].failure.text;
        const bool is_named = strstr(text, "rank 1") || strstr(text, "1 of 4 ranks") || r == 1;
        if (poors[r].status != wanted || (poors[1].has_failed && !is_named))
            fail_msg("allocation %ld of rank 1: rank %d has %s: %s", allocations, r, shoal_status_name(poors[r].status), text);
    }
    return poors[1].has_failed;
}

/* Each allocation of a rank fails once: all ranks learn of it, and none waits for its deadline. */
static void a_rank_lacks_memory(void **state)
{
    static const struct scarce cases[] = {
        {false, false, false, false, SHOAL_COMPRESS_NONE, SHOAL_OK},
        {true, false, false, false, SHOAL_COMPRESS_NONE, SHOAL_ERR_MISMATCH},
        {false, false, false, false, SHOAL_COMPRESS_INT8, SHOAL_OK},
        {false, true, false, false, SHOAL_COMPRESS_NONE, SHOAL_OK},
        {false, true, true, false, SHOAL_COMPRESS_NONE, SHOAL_ERR_MISMATCH},
        {false, false, false, true, SHOAL_COMPRESS_NONE, SHOAL_OK},
        {false, true, false, true, SHOAL_COMPRESS_NONE, SHOAL_OK},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        long allocations = 0;
        while (run_scarce(&cases[i], allocations))
            allocations++;
        assert_true(allocations >= 2);
        print_message("%ld allocations\n", allocations);
    }
}

/* ---- Waits --------------------------------------------------------------------------------------------------------------- */

#define LONG ((size_t)1 << 20)

static void *run_compressed(void *arg)
{
    struct poor *own = arg;
    const struct shoal_parameter parameter = {LONG, SHOAL_FLOAT32, "long"};
    struct shoal_reducer_options options = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_reducer *reducer;
    struct shoal_context *context = sim_context(own->world, own->rank);
    float *gradient = calloc(LONG, sizeof *gradient);
    CHECK(own, gradient, "no memory");
    options.compression = SHOAL_COMPRESS_INT8;
    sim_enter(own->world);
    OK(own, shoal_reducer_create(context, sim_comm(own->world, own->rank), &parameter, 1, &options, &reducer));
    OK(own, shoal_reducer_begin(reducer, SHOAL_STEP_REDUCE));
    OK(own, shoal_reducer_ready(reducer, 0, gradient, LONG));
    OK(own, shoal_reducer_finish(reducer, NULL));
    const long idle = sim_idle_waits(context);
    CHECK(own, idle <= 20, "%ld waits for what was done already", idle);
    shoal_reducer_free(reducer);
    sim_leave(own->world);
    free(gradient);
    return NULL;
}

/* Between two stages of a buffer the thread that finishes a step waits only for the one that compresses. */
static void finish_sleeps_while_a_buffer_is_compressed(void **state)
{
    (void)state;
    struct poor owns[2];
    pthread_t threads[2];
    struct sim_world *world = sim_world_open(&(struct sim_world_options){.seed = 1, .size = 2, .hosts = 2});
    for (int r = 0; r < 2; r++) {
        owns[r] = (struct poor){.world = world, .rank = r};
        assert_int_equal(pthread_create(&threads[r], NULL, run_compressed, &owns[r]), 0);
    }
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    sim_world_close(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_same_result),
        cmocka_unit_test(a_rank_dies),
        cmocka_unit_test(a_rank_never_marks),
        cmocka_unit_test(a_rank_marks_twice),
        cmocka_unit_test(a_rank_gives_up),
        cmocka_unit_test(two_ranks_are_at_fault),
        cmocka_unit_test(a_rank_cannot_post),
        cmocka_unit_test(a_rank_stands_still),
        cmocka_unit_test(a_rank_lacks_memory),
        cmocka_unit_test(finish_sleeps_while_a_buffer_is_compressed),
    };
    return cmocka_run_group_tests_name("reducer_sim", tests, NULL, NULL);
}
