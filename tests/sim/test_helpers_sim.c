/* Engines with helper threads over the simulated transport: the same bits for every width, and no helper that touches an
 * operand after its request has ended, however the operation ends. Kernels of the test see which thread calls them and hold
 * helpers up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/settings.h"
#include "engine/engine_state.h"
#include "reference.h"
#include "sim/sim_transport.h"

#define RANKS_MAX 4
#define TIMEOUT_MS 20000
#define TICK_NS UINT64_C(1000000)
#define VIRTUAL_LIMIT_NS (100 * SHOAL_NS_PER_S)

/* ---- Kernels of the test ---- */

static struct shoal_kernels watched[RANKS_MAX]; /* the machine's, with a sum of float32 and a copy that watch */
static const struct shoal_kernels *real;
static pthread_t owner;
static atomic_uint helped;           /* calls by helpers */
static atomic_int inside[RANKS_MAX]; /* helpers of the rank in a call now */
static atomic_bool must_hold;        /* helpers of rank 0 wait in their call while this is set */
static atomic_uint hold_us;          /* the next call of a helper takes this long */

static void hold_helper(int rank)
{
    const unsigned us = atomic_exchange(&hold_us, 0);
    if (us)
        usleep(us);
    while (rank == 0 && atomic_load(&must_hold))
        usleep(200);
}

static bool begin_call(int rank)
{
    const bool is_helper = !pthread_equal(pthread_self(), owner);
    for (int i = 0; !is_helper && rank == 0 && atomic_load(&must_hold) && !atomic_load(&inside[0]) && i < 100; i++)
        usleep(100); /* so that a helper finds a part, if there are any */
    if (is_helper) {
        atomic_fetch_add(&helped, 1);
        atomic_fetch_add(&inside[rank], 1);
        hold_helper(rank);
    }
    return is_helper;
}

static void end_call(int rank, bool is_helper)
{
    if (is_helper)
        atomic_fetch_sub(&inside[rank], 1);
}

#define WATCH(rank)                                                                                                \
    static void watch_sum_##rank(void *const *dests, int dest_count, const void *const *sources, int source_count, \
                                 size_t count, double argument, enum shoal_stores stores)                          \
    {                                                                                                              \
        const bool is_helper = begin_call(rank);                                                                   \
        real->reduce[SHOAL_FLOAT32][SHOAL_SUM](dests, dest_count, sources, source_count, count, argument, stores); \
        end_call(rank, is_helper);                                                                                 \
    }                                                                                                              \
    static void watch_copy_##rank(void *const *dests, int dest_count, const void *source, size_t bytes,            \
                                  enum shoal_stores stores)                                                        \
    {                                                                                                              \
        const bool is_helper = begin_call(rank);                                                                   \
        real->copy(dests, dest_count, source, bytes, stores);                                                      \
        end_call(rank, is_helper);                                                                                 \
    }
WATCH(0)
WATCH(1)
WATCH(2)
WATCH(3)
static const shoal_copy_fn copiers[RANKS_MAX] = {watch_copy_0, watch_copy_1, watch_copy_2, watch_copy_3};
static const shoal_reduce_fn watchers[RANKS_MAX] = {watch_sum_0, watch_sum_1, watch_sum_2, watch_sum_3};

/* ---- Worlds ---- */

struct member {
    struct shoal_engine *engine;
    struct shoal_helpers *helpers;
    struct shoal_log log;
    struct shoal_request request;
    float *input, *output;
    int rank;
    bool was_inside; /* a helper of the rank was in a kernel when the request ended */
    bool has_told;   /* how many threads were chosen */
    char last_line[1400];
};

struct world {
    int size;
    struct shoal_sim *sim;
    struct shoal_settings settings;
    struct shoal_tuning tuning;
    struct member members[RANKS_MAX];
};

static uint64_t world_now_ns(void *arg)
{
    return shoal_sim_now_ns(arg);
}

static void hear(void *arg, int level, const char *line)
{
    struct member *member = arg;
    (void)level;
    snprintf(member->last_line, sizeof member->last_line, "%s", line);
    member->has_told |= strstr(line, "for each rank of this host") || strstr(line, "receive of 800012 bytes: ");
}

static void open_member(struct world *world, int r, int width)
{
    struct member *member = &world->members[r];
    member->rank = r;
    shoal_log_init(&member->log, &world->settings.log, hear, member);
    const struct shoal_helpers_options helper_options = {.log = &member->log, .threads = width, .spin_ns = 10000};
    assert_int_equal(shoal_helpers_create(&helper_options, &member->helpers), SHOAL_OK);
    const struct shoal_engine_options options = {.name = "sim",
                                                 .transport = shoal_sim_transport(world->sim, r),
                                                 .kernels = &watched[r],
                                                 .helpers = member->helpers,
                                                 .settings = &world->settings.engine,
                                                 .warn_ms = world->settings.bootstrap.warn_ms,
                                                 .tuning = &world->tuning,
                                                 .log = &member->log,
                                                 .now_ns = world_now_ns,
                                                 .now_arg = world->sim,
                                                 .timeout_ms = TIMEOUT_MS};
    assert_int_equal(shoal_engine_create(&options, &member->engine), SHOAL_OK);
}

static struct world *open_world(int size, int width, const uint16_t *host, uint64_t seed, const char *const *overrides)
{
    char error[256];
    struct world *world = calloc(1, sizeof *world);
    const struct shoal_sim_options weather = {.seed = seed, .size = size, .delay_ns_max = seed % 3 * 100000, .host = host};
    world->size = size;
    assert_int_equal(shoal_settings_load(&world->settings, overrides, error, sizeof error), SHOAL_OK);
    assert_int_equal(shoal_tuning_load(&world->tuning, world->settings.tuning.algorithms, error, sizeof error), SHOAL_OK);
    assert_int_equal(shoal_sim_create(&weather, &world->sim), SHOAL_OK);
    for (int r = 0; r < size; r++)
        open_member(world, r, width);
    return world;
}

static void close_member(struct member *member)
{
    shoal_engine_destroy(member->engine);
    shoal_helpers_destroy(member->helpers);
    shoal_log_fini(&member->log);
    free(member->input);
    free(member->output);
}

static void close_world(struct world *world)
{
    for (int r = 0; r < world->size; r++)
        close_member(&world->members[r]);
    const char *breach = shoal_sim_breach(world->sim);
    if (breach)
        fail_msg("the engine broke the transport's contract: %s", breach);
    shoal_sim_destroy(world->sim);
    shoal_tuning_fini(&world->tuning);
    free(world);
}

static bool is_member_helped(const struct member *member)
{
    return member->engine &&
           (shoal_runner_is_helped(member->engine, &member->request) || shoal_p2p_is_helped(&member->request));
}

static bool is_helped(struct world *world)
{
    bool found = false;
    for (int r = 0; r < world->size; r++)
        found |= is_member_helped(&world->members[r]);
    return found;
}

static bool turn(struct world *world)
{
    bool did = false;
    for (int r = 0; r < world->size; r++) {
        struct member *member = &world->members[r];
        if (!member->engine)
            continue;
        did |= shoal_engine_progress(member->engine);
        shoal_engine_flush(member->engine);
    }
    return did;
}

static void check_engines(struct world *world)
{
    for (int r = 0; r < world->size; r++) {
        if (world->members[r].engine)
            shoal_engine_check(world->members[r].engine, shoal_sim_now_ns(world->sim));
    }
}

static bool has_ended(struct world *world, int r)
{
    return shoal_request_status(&world->members[r].request) != SHOAL_PENDING;
}

static bool have_ended(struct world *world)
{
    bool have = true;
    for (int r = 0; r < world->size; r++)
        have &= !world->members[r].engine || has_ended(world, r);
    return have;
}

/* Virtual time does not advance while helpers work, because they work in real time. */
static void drive(struct world *world)
{
    uint64_t next_check_ns = 0;
    while (!have_ended(world) && shoal_sim_now_ns(world->sim) < VIRTUAL_LIMIT_NS) {
        if (shoal_sim_now_ns(world->sim) >= next_check_ns) {
            check_engines(world);
            next_check_ns = shoal_sim_now_ns(world->sim) + 10 * TICK_NS;
        }
        if (turn(world) || shoal_sim_advance(world->sim))
            continue;
        if (is_helped(world))
            usleep(20);
        else
            shoal_sim_advance_to(world->sim, shoal_sim_now_ns(world->sim) + 10 * TICK_NS);
    }
    assert_true(have_ended(world));
}

/* ---- Calls ---- */

struct form {
    enum shoal_collective_type collective;
    size_t count;
    bool is_shared;
    bool is_in_place;
    bool is_tensors; /* as three tensors of odd lengths */
    enum shoal_op op;
};

static void note_inside(void *arg, enum shoal_status status)
{
    struct member *member = arg;
    (void)status;
    member->was_inside = atomic_load(&inside[member->rank]) > 0;
}

static size_t length_of_output(const struct world *world, const struct form *form)
{
    const bool is_longer = form->collective == SHOAL_COLLECTIVE_ALLGATHER || form->collective == SHOAL_COLLECTIVE_ALLTOALL;
    return is_longer ? form->count * (size_t)world->size : form->count;
}

static size_t length_of_input(const struct world *world, const struct form *form)
{
    const bool is_longer = form->collective == SHOAL_COLLECTIVE_REDUCE_SCATTER || form->collective == SHOAL_COLLECTIVE_ALLTOALL;
    return is_longer ? form->count * (size_t)world->size : form->count;
}

static float *make_area(struct world *world, int r, const struct form *form, size_t count)
{
    const size_t bytes = shoal_round_up((count + 1) * sizeof(float), SHOAL_CACHE_LINE);
    float *area = aligned_alloc(SHOAL_CACHE_LINE, bytes);
    assert_non_null(area);
    if (form->is_shared)
        assert_int_equal(shoal_sim_share(world->sim, r, area, bytes), SHOAL_OK);
    return area;
}

static void put_in_tensors(struct world *world, const struct form *form, struct shoal_call *call)
{
    const size_t first = form->count / 3, second = form->count / 2 - first + 1;
    const float *input = call->input;
    float *output = call->output;
    const struct shoal_tensor tensors[] = {{input, output, first},
                                           {input + first, output + first, second},
                                           {input + first + second, output + first + second, form->count - first - second}};
    call->input = call->output = NULL;
    call->arrays = &(struct shoal_call_arrays){.tensors = tensors, .tensor_count = 3, .has_tensors = true};
    assert_true(shoal_call_lay_out(call, 0, world->size));
}

static void post(struct world *world, int r, const struct form *form, uint64_t seed)
{
    struct member *member = &world->members[r];
    const size_t inputs = length_of_input(world, form), outputs = length_of_output(world, form);
    uint64_t random = seed * 64 + (uint64_t)r;
    member->input = make_area(world, r, form, inputs);
    member->output = form->is_in_place ? NULL : make_area(world, r, form, outputs);
    for (size_t i = 0; i < inputs; i++)
        member->input[i] = (float)((double)reference_below(&random, 1u << 30) / 3e5 - 1700);
    struct shoal_call call = {.collective = form->collective,
                              .type = SHOAL_FLOAT32,
                              .op = form->op,
                              .count = form->count,
                              .input = member->input,
                              .output = member->output ? member->output : member->input};
    if (form->is_tensors)
        put_in_tensors(world, form, &call);
    member->request = (struct shoal_request){.done_fn = note_inside, .done_arg = member};
    shoal_engine_post(member->engine, &call, &member->request);
}

static uint64_t hash_of_outputs(struct world *world, const struct form *form)
{
    uint64_t hash = SHOAL_HASH_START;
    for (int r = 0; r < world->size; r++) {
        const struct member *member = &world->members[r];
        assert_int_equal(shoal_request_status(&world->members[r].request), SHOAL_OK);
        assert_false(member->was_inside);
        hash = shoal_hash_bytes(hash, member->output ? member->output : member->input,
                                length_of_output(world, form) * sizeof(float));
    }
    return hash;
}

static uint64_t run(const struct form *form, int size, int width, const uint16_t *host, uint64_t seed,
                    const char *const *overrides)
{
    struct world *world = open_world(size, width, host, seed, overrides);
    for (int r = 0; r < size; r++)
        post(world, r, form, seed);
    drive(world);
    const uint64_t hash = hash_of_outputs(world, form);
    close_world(world);
    return hash;
}

/* ---- Equal bits ---- */

static const char *const preset[] = {NULL};
static const char *const one_slot[] = {"SHOAL_DEPTH=1", NULL};
static const char *const long_chunks[] = {"SHOAL_CHUNK_BYTES=1M", "SHOAL_DEPTH=2", "SHOAL_STORES=streaming", NULL};

static const struct form forms[] = {
    {SHOAL_COLLECTIVE_ALLREDUCE, 1, false, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLREDUCE, 300007, false, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLREDUCE, 300007, true, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLREDUCE, 262144, true, true, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLREDUCE, 200003, false, false, true, SHOAL_SUM},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, 100003, false, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, 65536, true, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLGATHER, 100003, false, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_BROADCAST, 250001, false, true, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_BROADCAST, 250001, true, true, true, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLTOALL, 60007, false, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLTOALL, 60007, true, false, false, SHOAL_SUM},
    {SHOAL_COLLECTIVE_ALLREDUCE, 200003, true, false, true, SHOAL_AVG},
    {SHOAL_COLLECTIVE_REDUCE_SCATTER, 65536, false, false, false, SHOAL_AVG},
};

static void no_width_changes_a_bit(void **state)
{
    static const int widths[] = {2, 3, 5};
    static const uint16_t two_hosts[] = {0, 0, 1, 1}, four_hosts[] = {0, 1, 2, 3};
    static const struct {
        int size;
        const uint16_t *host;
        const char *const *settings;
    } worlds[] = {
        {2, NULL, preset}, {3, NULL, one_slot}, {4, NULL, long_chunks}, {4, two_hosts, preset}, {4, four_hosts, long_chunks}};
    (void)state;
    atomic_store(&helped, 0);
    for (size_t f = 0; f < SHOAL_COUNT_OF(forms); f++) {
        for (size_t w = 0; w < SHOAL_COUNT_OF(worlds); w++) {
            const uint64_t one = run(&forms[f], worlds[w].size, 1, worlds[w].host, w + 1, worlds[w].settings);
            for (size_t i = 0; i < SHOAL_COUNT_OF(widths); i++) {
                const uint64_t many = run(&forms[f], worlds[w].size, widths[i], worlds[w].host, w + 1, worlds[w].settings);
                if (many != one)
                    fail_msg("form %zu, world %zu, %d threads: other bits than with one", f, w, widths[i]);
            }
        }
    }
    assert_true(atomic_load(&helped) > 0);
}

/* A helper of each rank does not run for a second, with a part claimed. */
static void a_late_helper_breaks_nothing(void **state)
{
    const struct form form = {SHOAL_COLLECTIVE_ALLREDUCE, 500009, false, false, false, SHOAL_SUM};
    const uint64_t one = run(&form, 2, 1, NULL, 7, preset);
    (void)state;
    atomic_store(&helped, 0);
    atomic_store(&hold_us, 1000000);
    assert_int_equal(run(&form, 2, 3, NULL, 7, preset), one);
    atomic_store(&hold_us, 0);
}

/* ---- Helpers that are held ---- */

static void *release_later(void *arg)
{
    usleep(30000);
    atomic_store(&must_hold, false);
    return arg;
}

/* Drives until a helper of rank 0 is held in a kernel, and nothing else can be done. */
static void drive_to_hold(struct world *world)
{
    bool is_posted = false;
    while (!is_posted) {
        if (!turn(world))
            shoal_sim_advance(world->sim);
        is_posted = is_member_helped(&world->members[0]);
        assert_false(have_ended(world));
    }
    while (atomic_load(&inside[0]) == 0) /* one turn does one part of several, so the helpers find another */
        usleep(100);
    for (int idle = 0; idle < 50; idle++) {
        if (turn(world) || shoal_sim_advance(world->sim))
            idle = 0;
        else
            usleep(100);
    }
    assert_false(have_ended(world));
}

/* ---- Messages ---- */

/* Rank 1 sends to rank 0, whose helpers copy. With is_own, rank 0 receives from itself, and another request is the send. */
static void post_message(struct world *world, size_t count, struct shoal_request *own_send)
{
    const struct form form = {.count = count, .is_shared = true};
    struct member *receiver = &world->members[0], *sender = own_send ? receiver : &world->members[1];
    uint64_t random = count;
    sender->input = make_area(world, sender->rank, &form, count);
    receiver->output = make_area(world, 0, &form, count);
    for (size_t i = 0; i < count; i++)
        sender->input[i] = (float)reference_below(&random, 1u << 24);
    memset(receiver->output, 0, count * sizeof(float));
    const struct shoal_call send = {
        .collective = SHOAL_COLLECTIVE_SEND, .type = SHOAL_FLOAT32, .count = count, .input = sender->input, .root = 0};
    const struct shoal_call receive = {.collective = SHOAL_COLLECTIVE_RECV,
                                       .type = SHOAL_FLOAT32,
                                       .count = count,
                                       .output = receiver->output,
                                       .root = sender->rank};
    receiver->request = (struct shoal_request){.done_fn = note_inside, .done_arg = receiver};
    if (!own_send)
        sender->request = (struct shoal_request){.done_fn = note_inside, .done_arg = sender};
    shoal_engine_post(sender->engine, &send, own_send ? own_send : &sender->request);
    shoal_engine_post(receiver->engine, &receive, &receiver->request);
}

static void check_message(struct world *world, size_t count, bool is_own)
{
    const struct member *receiver = &world->members[0], *sender = is_own ? receiver : &world->members[1];
    assert_int_equal(shoal_request_status(&world->members[0].request), SHOAL_OK);
    assert_true(memcmp(receiver->output, sender->input, count * sizeof(float)) == 0);
    assert_false(receiver->was_inside);
}

/* Each length, with as many threads, arrives whole; helpers copy the long ones. */
static void helpers_copy_messages(void **state)
{
    static const size_t counts[] = {1, 5000, 32768, 100003, 262144, 3000017};
    (void)state;
    for (int width = 1; width <= 5; width += 2) {
        for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
            for (int is_own = 0; is_own < 2; is_own++) {
                struct world *world = open_world(is_own ? 1 : 2, width, NULL, c + 1, preset);
                struct shoal_request send = {.done_fn = NULL};
                const bool is_long = counts[c] >= 32768 && width > 1;
                atomic_store(&helped, 0);
                atomic_store(&must_hold, is_long);
                post_message(world, counts[c], is_own ? &send : NULL);
                if (is_long)
                    drive_to_hold(world);
                atomic_store(&must_hold, false);
                drive(world);
                check_message(world, counts[c], is_own);
                assert_true((atomic_load(&helped) > 0) == is_long);
                close_world(world);
            }
        }
    }
}

/* Without a number, the receiver tries one thread against all, and logs its choice. */
static void the_width_of_copies_is_tried(void **state)
{
    static const char *const told[] = {"SHOAL_LOG=info,engine", NULL};
    struct world *world = open_world(2, 0, NULL, 9, told);
    unsigned narrow = 0, wide = 0;
    const bool is_alone = shoal_helpers_width(world->members[0].helpers) == 1;
    (void)state;
    for (unsigned use = 0; use < 100 && !is_alone && !world->members[0].has_told; use++) {
        free(world->members[1].input);
        free(world->members[0].output);
        post_message(world, 200003, NULL);
        drive(world);
        check_message(world, 200003, false);
        narrow += world->members[0].request.message.copy.is_narrow;
        wide += !world->members[0].request.message.copy.is_narrow;
    }
    assert_true(is_alone || (world->members[0].has_told && narrow >= 4 && wide >= 8));
    close_world(world);
    if (is_alone)
        skip();
}

/* ---- The choice of the width ---- */

/* Posts the same call again, with the same operands. */
static void post_again(struct world *world, int r, size_t count)
{
    struct member *member = &world->members[r];
    const struct shoal_call call = {.collective = SHOAL_COLLECTIVE_ALLREDUCE,
                                    .type = SHOAL_FLOAT32,
                                    .op = SHOAL_SUM,
                                    .count = count,
                                    .input = member->input,
                                    .output = member->output};
    member->request = (struct shoal_request){.done_fn = note_inside, .done_arg = member};
    shoal_engine_post(member->engine, &call, &member->request);
}

static void call_all(struct world *world, const struct form *form, bool is_first)
{
    for (int r = 0; r < world->size; r++) {
        if (is_first)
            post(world, r, form, 4);
        else
            post_again(world, r, form->count);
    }
    drive(world);
}

static bool is_narrow(const struct world *world, int r)
{
    return world->members[r].request.announcement.descriptor.hints & SHOAL_HINT_NARROW;
}

/* Without a number, rank 0 tries one thread against all. All ranks of the host follow, no result depends on it, and the choice
 * is logged. */
static void the_width_is_tried(void **state)
{
    static const char *const told[] = {"SHOAL_LOG=info,engine", NULL};
    const struct form form = {SHOAL_COLLECTIVE_ALLREDUCE, 200003, false, false, false, SHOAL_SUM};
    struct world *world = open_world(3, 0, NULL, 9, told);
    unsigned narrow = 0, wide = 0;
    uint64_t first = 0;
    (void)state;
    if (shoal_helpers_width(world->members[0].helpers) == 1) {
        close_world(world);
        skip();
    }
    for (unsigned use = 0; use < 100 && !world->members[0].has_told; use++) {
        const unsigned before = atomic_load(&helped);
        call_all(world, &form, use == 0);
        const uint64_t hash = hash_of_outputs(world, &form);
        first = use ? first : hash;
        assert_true(hash == first);
        assert_true(is_narrow(world, 1) == is_narrow(world, 0) && is_narrow(world, 2) == is_narrow(world, 0));
        assert_true(!is_narrow(world, 0) || atomic_load(&helped) == before);
        narrow += is_narrow(world, 0);
        wide += !is_narrow(world, 0);
    }
    assert_true(world->members[0].has_told && narrow >= 4 && wide >= 8);
    close_world(world);
}

/* A number is obeyed. */
static void a_fixed_width_is_not_tried(void **state)
{
    const struct form form = {SHOAL_COLLECTIVE_ALLREDUCE, 200003, false, false, false, SHOAL_SUM};
    struct world *world = open_world(2, 2, NULL, 9, preset);
    (void)state;
    for (int use = 0; use < 40; use++) {
        call_all(world, &form, use == 0);
        assert_false(is_narrow(world, 0));
    }
    close_world(world);
}

/* ---- Failure while helpers work ---- */

/* The root of a broadcast over two hosts sums nothing: its helpers pack the tensors that it puts. */
static void helpers_pack_what_is_put(void **state)
{
    static const uint16_t hosts[] = {0, 1};
    const struct form form = {SHOAL_COLLECTIVE_BROADCAST, 500009, false, true, true, SHOAL_SUM};
    struct world *world = open_world(2, 3, hosts, 5, long_chunks);
    pthread_t thread;
    (void)state;
    atomic_store(&must_hold, true);
    for (int r = 0; r < 2; r++)
        post(world, r, &form, 5);
    drive_to_hold(world);
    assert_int_equal(pthread_create(&thread, NULL, release_later, NULL), 0);
    drive(world);
    pthread_join(thread, NULL);
    assert_true(memcmp(world->members[0].input, world->members[1].input, form.count * sizeof(float)) == 0);
    (void)hash_of_outputs(world, &form);
    close_world(world);
}

enum work { WORK_REDUCE, WORK_MESSAGE, WORK_PACK, WORK_END };
enum end { END_ABORTED, END_PEER_KILLED, END_DEADLINE, END_FREED };

static void break_world(struct world *world, enum end end)
{
    switch (end) {
    case END_ABORTED:
        shoal_engine_abort(world->members[1].engine, NULL);
        break;
    case END_PEER_KILLED:
        shoal_sim_kill(world->sim, 1);
        shoal_engine_destroy(world->members[1].engine);
        world->members[1].engine = NULL;
        break;
    case END_DEADLINE:
        shoal_sim_advance_to(world->sim, shoal_sim_now_ns(world->sim) + 2 * (uint64_t)TIMEOUT_MS * SHOAL_NS_PER_MS);
        check_engines(world);
        break;
    case END_FREED:
        shoal_engine_destroy(world->members[0].engine);
        world->members[0].engine = NULL;
        break;
    }
}

/* Ends an operation while a helper is held in a part of it, and lets the helper go a moment later. Requests end with an error,
 * after the helpers have left their operands. */
static void end_while_helped(enum end end, enum work work, const char *words)
{
    static const uint16_t two_hosts[] = {0, 1};
    const bool is_message = work == WORK_MESSAGE;
    struct form form = {SHOAL_COLLECTIVE_ALLREDUCE, 2000003, false, false, false, SHOAL_SUM};
    /* Long chunks: the first one has a border between tensors. */
    struct world *world = open_world(2, 3, work == WORK_PACK ? two_hosts : NULL, 3, work == WORK_PACK ? long_chunks : preset);
    pthread_t thread;
    if (work == WORK_PACK)
        form = (struct form){SHOAL_COLLECTIVE_BROADCAST, 500009, false, true, true, SHOAL_SUM};
    atomic_store(&must_hold, true);
    for (int r = 0; r < world->size && !is_message; r++)
        post(world, r, &form, 5);
    if (is_message)
        post_message(world, form.count, NULL);
    drive_to_hold(world);
    assert_int_equal(pthread_create(&thread, NULL, release_later, NULL), 0);
    break_world(world, end);
    drive(world);
    pthread_join(thread, NULL);
    for (int r = 0; r < world->size; r++) {
        struct member *member = &world->members[r];
        const enum shoal_status status = shoal_request_status(&member->request);
        /* A receiver needs only the dead sender's memory, and a root needs nothing of the others. */
        const bool may_end = work != WORK_REDUCE && end == END_PEER_KILLED && r == 0;
        assert_true((status != SHOAL_OK || may_end) && status != SHOAL_PENDING);
        assert_false(member->was_inside);
        if (words && !strstr(member->last_line, words))
            fail_msg("rank %d logged \"%s\", without \"%s\"", r, member->last_line, words);
    }
    close_world(world);
}

static void an_abort_waits_for_helpers(void **state)
{
    (void)state;
    for (enum work work = 0; work < WORK_END; work++)
        end_while_helped(END_ABORTED, work, "abort");
}

static void a_dead_peer_does_not_strand_helpers(void **state)
{
    (void)state;
    for (enum work work = 0; work < WORK_END; work++)
        end_while_helped(END_PEER_KILLED, work, NULL);
}

static void a_deadline_names_helpers(void **state)
{
    (void)state;
    for (enum work work = 0; work < WORK_END; work++)
        end_while_helped(END_DEADLINE, work, "helper threads");
}

static void freeing_waits_for_helpers(void **state)
{
    (void)state;
    for (enum work work = 0; work < WORK_END; work++)
        end_while_helped(END_FREED, work, NULL);
}

static void note_sent(void *arg, enum shoal_status status)
{
    bool *was_inside = arg;
    (void)status;
    *was_inside = atomic_load(&inside[0]) > 0;
}

/* Helpers copy a message of a rank to itself from the memory of its send, which is posted first. */
static void a_send_to_itself_ends_after_helpers(void **state)
{
    struct world *world = open_world(1, 3, NULL, 3, preset);
    bool was_inside = false;
    struct shoal_request send = {.done_fn = note_sent, .done_arg = &was_inside};
    pthread_t thread;
    (void)state;
    atomic_store(&must_hold, true);
    post_message(world, 2000003, &send);
    drive_to_hold(world);
    assert_int_equal(pthread_create(&thread, NULL, release_later, NULL), 0);
    break_world(world, END_FREED);
    pthread_join(thread, NULL);
    assert_int_equal(shoal_request_status(&send), SHOAL_ERR_PEER_LOST);
    assert_int_equal(shoal_request_status(&world->members[0].request), SHOAL_ERR_PEER_LOST);
    assert_false(was_inside || world->members[0].was_inside);
    close_world(world);
}

/* The send, which is posted first, passes its deadline while helpers copy. */
static void a_late_send_to_itself_names_helpers(void **state)
{
    struct world *world = open_world(1, 3, NULL, 3, preset);
    struct shoal_request send = {.done_fn = NULL};
    pthread_t thread;
    (void)state;
    atomic_store(&must_hold, true);
    post_message(world, 2000003, &send);
    drive_to_hold(world);
    assert_int_equal(pthread_create(&thread, NULL, release_later, NULL), 0);
    break_world(world, END_DEADLINE);
    pthread_join(thread, NULL);
    assert_int_equal(shoal_request_status(&send), SHOAL_ERR_TIMEOUT);
    if (!strstr(world->members[0].last_line, "helper threads") || strstr(world->members[0].last_line, "has not called"))
        fail_msg("logged \"%s\"", world->members[0].last_line);
    close_world(world);
}

static int make_kernels(void **state)
{
    (void)state;
    owner = pthread_self();
    real = shoal_kernels_find("auto");
    for (int r = 0; r < RANKS_MAX; r++) {
        watched[r] = *real;
        watched[r].reduce[SHOAL_FLOAT32][SHOAL_SUM] = watchers[r];
        watched[r].copy = copiers[r];
    }
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(helpers_copy_messages),
        cmocka_unit_test(the_width_of_copies_is_tried),
        cmocka_unit_test(no_width_changes_a_bit),
        cmocka_unit_test(a_late_helper_breaks_nothing),
        cmocka_unit_test(helpers_pack_what_is_put),
        cmocka_unit_test(the_width_is_tried),
        cmocka_unit_test(a_fixed_width_is_not_tried),
        cmocka_unit_test(an_abort_waits_for_helpers),
        cmocka_unit_test(a_dead_peer_does_not_strand_helpers),
        cmocka_unit_test(a_deadline_names_helpers),
        cmocka_unit_test(freeing_waits_for_helpers),
        cmocka_unit_test(a_send_to_itself_ends_after_helpers),
        cmocka_unit_test(a_late_send_to_itself_names_helpers),
    };
    return cmocka_run_group_tests(tests, make_kernels, NULL);
}
