/* One rank of a job on several hosts: started by cluster.py or any launcher, joined through the environment.
 *     host_rank exact [GROUP...]   exact results, a line for each group of cases; GROUP: only groups whose names begin so
 *     host_rank loop SECONDS [JOB] all-reduces, compared, until rank 0 reports that the time is over; 0: for ever. JOB is a
 *                                  number that the sums contain, so that two jobs cannot be confused
 *     host_rank abort              the same, but the last rank aborts in the middle
 *     host_rank busy SECONDS       an all-reduce for which the last rank is this late
 *     host_rank roots              gathers: each rank to the next one, after one gather that all make to rank 0
 * Failures are printed as one line, "failed: STATUS rank R host H: TEXT". Exit code 0: success, 1: failed, 2: wrong usage. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "exact_cases.h"
#include "host_rank.h"
#include "operations.h"
#include "reference.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

const struct twin_device *host_rank_device;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- Hosts --------------------------------------------------------------------------------------------------------------- */

struct places {
    int host[WORLD_RANKS_MAX];  /* the lowest rank with the same host name */
    int local[WORLD_RANKS_MAX]; /* the number of earlier ranks with that name */
};

#define NAME_BYTES 64

static struct places find_places(struct world *world)
{
    struct places places;
    char own[NAME_BYTES] = {0}, names[WORLD_RANKS_MAX][NAME_BYTES];
    CHECK(world, gethostname(own, sizeof own - 1) == 0, "no host name: %m");
    OK(world, shoal_allgather(world->comm, own, names, NAME_BYTES, SHOAL_UINT8, NULL));
    for (int r = 0; r < world->size; r++) {
        places.local[r] = 0;
        places.host[r] = r;
        for (int before = r - 1; before >= 0; before--) {
            if (strcmp(names[before], names[r]) != 0)
                continue;
            places.host[r] = before;
            places.local[r]++;
        }
    }
    return places;
}

static unsigned count_hosts(struct world *world)
{
    const struct places places = find_places(world);
    unsigned hosts = 0;
    for (int r = 0; r < world->size; r++)
        hosts += places.local[r] == 0;
    return hosts;
}

/* ---- Every collective, type and operator --------------------------------------------------------------------------------- */

#define WAYS 4 /* in place or apart, in plain or shared memory */

static void set_way(struct operation *operation, size_t way)
{
    operation->place = way % 2 ? PLACE_SAME : PLACE_APART;
    operation->memory = way / 2 % 2 ? MEMORY_SHARED : MEMORY_PLAIN;
}

/* Counts: zero, one, odd counts on and off a cache line, and one too large for an announcement, each in one way. The next
 * count, type and operator use the next way, and so do jobs with one rank more. */
static void run_row(struct world *world, const struct areas *areas, struct operation operation)
{
    static const size_t counts[] = {0, 1, 7, 1001};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        set_way(&operation, i + operation.type + operation.op + (size_t)world->size);
        operation.salt++;
        operation.count = counts[i];
        operation.root = operation.salt % 2 ? 0 : world->size - 1;
        operation.is_offset = i == 2;
        exact_run_one(world, areas, &operation);
    }
    operation.count = 131071 / shoal_type_bytes(operation.type) / (size_t)world->size;
    operation.place = (enum operation_place)(operation.salt / 3 % 2);
    operation.memory = (enum operation_memory)(operation.salt / 5 % MEMORY_END);
    exact_run_one(world, areas, &operation);
}

static void every_row(struct world *world)
{
    struct areas areas = world_open_areas(world, 1 << 18);
    struct operation operation = {.kind = OPERATION_ALLREDUCE};
    for (; operation.kind < OPERATION_BARRIER; operation.kind++) {
        const enum shoal_op ops = operation_row(operation.kind)->is_reduced ? SHOAL_OP_END : 1;
        for (unsigned i = 0; i < SHOAL_TYPE_END * ops; i++) {
            operation.type = (enum shoal_type)(i / ops);
            operation.op = (enum shoal_op)(i % ops);
            operation.scale = reference_is_integer(operation.type) ? -2 : 0.5;
            operation.salt = i * 100;
            if (operation_is_legal(operation.type, operation.op))
                run_row(world, &areas, operation);
        }
        OK(world, shoal_barrier(world->comm, NULL));
    }
    world_close_areas(world, &areas);
}

#define MEGABYTES ((size_t)5 << 20)

/* Megabytes of the larger operand, in two ways, one of them in place and one in shared memory; not a multiple of the chunk.
 * The next collective uses the other two ways, and so do jobs with one host more. */
static void megabytes(struct world *world)
{
    const unsigned hosts = count_hosts(world);
    struct areas areas = world_open_areas(world, MEGABYTES + (1 << 20));
    struct operation operation = {.type = SHOAL_FLOAT32, .op = SHOAL_SUM};
    for (unsigned i = 0; i < OPERATION_BARRIER * WAYS; i++) {
        operation.kind = (enum operation_kind)(i / WAYS);
        set_way(&operation, i);
        if ((i + i / 2 + operation.kind + hosts) % 2)
            continue;
        const struct operation_row *row = operation_row(operation.kind);
        operation.count =
            (MEGABYTES + 12) / 4 / (row->is_input_partitioned || row->is_output_partitioned ? (size_t)world->size : 1);
        operation.root = i % 3 ? world->size - 1 : 0;
        operation.salt = i;
        exact_run_one(world, &areas, &operation);
    }
    world_close_areas(world, &areas);
}

/* ---- Groups -------------------------------------------------------------------------------------------------------------- */

enum shape { WITHIN_A_HOST, ONE_OF_EACH_HOST, SOME_HOSTS, ROUND_ROBIN, WITHOUT_FIRST_ONES, SHAPE_END };

static int color_of(enum shape shape, const struct places *places, int rank)
{
    switch (shape) {
    case WITHIN_A_HOST:
        return places->host[rank];
    case ONE_OF_EACH_HOST:
        return places->local[rank];
    case SOME_HOSTS: /* all ranks of the first host, and all others */
        return places->host[rank] != 0;
    case ROUND_ROBIN:
        return rank % 2;
    default:
        return places->local[rank] ? 0 : -1;
    }
}

static struct world_group split_by(struct world *world, const struct places *places, enum shape shape)
{
    const struct world_group all = world_all(world);
    int colors[WORLD_RANKS_MAX], keys[WORLD_RANKS_MAX];
    for (int r = 0; r < world->size; r++) {
        colors[r] = color_of(shape, places, r);
        keys[r] = shape == ROUND_ROBIN ? -r : 0;
    }
    return world_split(world, &all, colors, keys);
}

/* All exist together and are used in turns, with their parent in between. */
static void groups(struct world *world)
{
    const struct places places = find_places(world);
    const struct world_group all = world_all(world);
    struct areas areas = world_open_areas(world, EXACT_GROUP_ROOM);
    struct world_group groups[SHAPE_END];
    for (int shape = 0; shape < SHAPE_END; shape++)
        groups[shape] = split_by(world, &places, (enum shape)shape);
    for (int turn = 0; turn < 4 * SHAPE_END; turn++) {
        exact_use_group(world, &areas, &groups[turn % SHAPE_END], (uint64_t)turn);
        if (turn % 3 == 0)
            exact_use_group(world, &areas, &all, (uint64_t)turn);
    }
    for (int shape = 0; shape < SHAPE_END; shape++) {
        if (groups[shape].comm && shape % 2)
            OK(world, shoal_comm_finalize(groups[shape].comm));
        shoal_comm_free(groups[shape].comm);
    }
    world_close_areas(world, &areas);
}

/* ---- Identical bits on all ranks ----------------------------------------------------------------------------------------- */

static void same_bits(struct world *world)
{
    uint64_t hashes[WORLD_RANKS_MAX];
    exact_bits(world);
    OK(world, shoal_allgather(world->comm, &world->board[world->rank], hashes, 1, SHOAL_INT64, NULL));
    for (int r = 1; r < world->size; r++)
        CHECK(world, hashes[r] == hashes[0], "the bits of rank %d are not those of rank 0", r);
}

/* ---- Exact results ------------------------------------------------------------------------------------------------------- */

/* size_least and size_most: the ranks it supports; 0: any number. */
static const struct group {
    const char *name;
    world_body_fn body;
    int size_least, size_most;
} list[] = {
    {"rows: every collective, type and operator", every_row, 1, 0},
    {"megabytes", megabytes, 1, 0},
    {"roots: every root", exact_roots, 1, 0},
    {"parts of different lengths", exact_parts, 1, 0},
    {"tensors: several in one call", exact_tensors, 1, 0},
    {"messages", exact_messages, 2, 0},
    {"eager messages", exact_eager, 2, 2},
    {"receives posted by callbacks", exact_receive_callbacks, 2, 2},
    {"exchanges: several messages in one request", exact_exchanges, 1, 0},
    {"asynchronous operations", exact_async, 1, 0},
    {"detached requests", exact_detached, 1, 0},
    {"callbacks that post", exact_callbacks, 1, 0},
    {"groups within and across hosts", groups, 1, 0},
    {"splits of splits", exact_splits, 1, 0},
    {"subsets: all at once", exact_subsets, 2, 4},
    {"threads: a communicator for each", exact_threads, 1, 0},
    {"bits: the same everywhere", same_bits, 1, 0},
};

static bool is_chosen(const struct group *group, const struct world *world, char **words)
{
    if (world->size < group->size_least || (group->size_most && world->size > group->size_most))
        return false;
    if (!*words)
        return true;
    for (; *words; words++) {
        if (strncmp(*words, group->name, strlen(*words)) == 0)
            return true;
    }
    return false;
}

static enum shoal_status run_exact(struct world *world, char **words)
{
    for (size_t i = 0; i < COUNT_OF(list); i++) {
        const double start = now_s();
        if (!is_chosen(&list[i], world, words))
            continue;
        list[i].body(world);
        printf("exact: %s (%.2f s)\n", list[i].name, now_s() - start);
        fflush(stdout);
    }
    return SHOAL_OK;
}

/* ---- The loop ------------------------------------------------------------------------------------------------------------ */

#define LOOP_MOST ((size_t)1 << 18)
#define TURNS_BEFORE_NEWS 32
#define TURNS_BEFORE_ABORT 500

struct loop {
    struct world *world;
    double end_s; /* 0: never */
    int job;
    bool is_aborting;
    float *input, *output;
};

static void check_sums(const struct loop *loop, size_t count, int given)
{
    const int size = loop->world->size, wanted = size * given + size * (size - 1) / 2;
    for (size_t i = 0; i < count; i++)
        CHECK(loop->world, loop->output[i] == (float)wanted, "sum %zu of %zu is %g, not %d", i, count, (double)loop->output[i],
              wanted);
}

static enum shoal_status add_up(const struct loop *loop, int turn)
{
    static const size_t counts[] = {1, 1024, LOOP_MOST, 16384};
    const size_t count = counts[(size_t)turn % COUNT_OF(counts)];
    const int given = loop->job + turn % 5;
    for (size_t i = 0; i < count; i++)
        loop->input[i] = (float)(given + loop->world->rank);
    const enum shoal_status status =
        shoal_allreduce(loop->world->comm, loop->input, loop->output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    if (status == SHOAL_OK)
        check_sums(loop, count, given);
    return status;
}

/* Rank 0's clock decides for all. */
static enum shoal_status ask_whether_over(const struct loop *loop, int32_t *is_over_out)
{
    const int32_t own = loop->world->rank == 0 && loop->end_s > 0 && now_s() > loop->end_s;
    return shoal_allreduce(loop->world->comm, &own, is_over_out, 1, SHOAL_INT32, SHOAL_MAX, NULL);
}

static enum shoal_status turn_on(const struct loop *loop)
{
    enum shoal_status status = SHOAL_OK;
    int32_t is_over = 0;
    for (int turn = 0; status == SHOAL_OK && !is_over; turn++) {
        status = add_up(loop, turn);
        if (turn % TURNS_BEFORE_NEWS == TURNS_BEFORE_NEWS - 1 && status == SHOAL_OK)
            status = ask_whether_over(loop, &is_over);
        if (turn == TURNS_BEFORE_NEWS) {
            printf("running\n");
            fflush(stdout);
        }
        if (loop->is_aborting && turn == TURNS_BEFORE_ABORT)
            shoal_comm_abort(loop->world->comm);
    }
    return status;
}

/* Allocates the buffers, takes turns, and frees them. */
static enum shoal_status run_turns(struct loop loop)
{
    loop.input = malloc(LOOP_MOST * sizeof *loop.input);
    loop.output = malloc(LOOP_MOST * sizeof *loop.output);
    CHECK(loop.world, loop.input && loop.output, "no memory");
    const enum shoal_status status = turn_on(&loop);
    free(loop.input);
    free(loop.output);
    return status;
}

static enum shoal_status run_loop(struct world *world, char **words)
{
    const double seconds = words[0] ? atof(words[0]) : 0;
    const int job = words[0] && words[1] ? atoi(words[1]) : 0;
    return run_turns((struct loop){.world = world, .end_s = seconds > 0 ? now_s() + seconds : 0, .job = job});
}

static enum shoal_status run_abort(struct world *world, char **words)
{
    (void)words;
    return run_turns((struct loop){.world = world, .is_aborting = world->rank == world->size - 1});
}

/* All ranks except the last wait for it, some indirectly. */
static enum shoal_status run_busy(struct world *world, char **words)
{
    float *values = calloc(LOOP_MOST, sizeof *values);
    CHECK(world, values && words[0], "no memory, or no SECONDS");
    enum shoal_status status = shoal_barrier(world->comm, NULL);
    if (world->rank == world->size - 1)
        usleep((useconds_t)(atof(words[0]) * 1e6));
    if (status == SHOAL_OK)
        status = shoal_allreduce(world->comm, values, values, LOOP_MOST, SHOAL_FLOAT32, SHOAL_SUM, NULL);
    free(values);
    return status;
}

/* ---- Ranks with different calls ------------------------------------------------------------------------------------------ */

#define GATHERED ((size_t)1 << 14) /* more than fits with an announcement, so only peers learn of it */

static enum shoal_status gather_to(struct world *world, const float *input, float *output, int root)
{
    return shoal_gather(world->comm, input, world->rank == root ? output : NULL, GATHERED, SHOAL_FLOAT32, root, NULL);
}

/* Each rank waits for the next one, which does not know of it. */
static enum shoal_status run_roots(struct world *world, char **words)
{
    float *input = calloc(GATHERED, sizeof *input), *output = calloc(GATHERED * (size_t)world->size, sizeof *output);
    (void)words;
    CHECK(world, input && output, "no memory");
    enum shoal_status status = gather_to(world, input, output, 0);
    if (status == SHOAL_OK)
        status = gather_to(world, input, output, (world->rank + 1) % world->size);
    free(input);
    free(output);
    return status;
}

/* ---- Main ---------------------------------------------------------------------------------------------------------------- */

static const struct verb {
    const char *name;
    enum shoal_status (*run)(struct world *world, char **words);
} verbs[] = {{"exact", run_exact}, {"loop", run_loop}, {"abort", run_abort}, {"busy", run_busy}, {"roots", run_roots}};

static const struct verb *find_verb(const char *name)
{
    for (size_t i = 0; name && i < COUNT_OF(verbs); i++) {
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    }
    return NULL;
}

static void print_failure(const struct world *world, enum shoal_status status)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    if (shoal_last_failure(world->context, world->comm, &failure) != SHOAL_OK)
        snprintf(failure.text, sizeof failure.text, "no failure is on record");
    printf("failed: %s rank %d host %s: %s\n", shoal_status_name(status), failure.rank, failure.host[0] ? failure.host : "-",
           failure.text);
    fflush(stdout);
}

static enum shoal_status join(struct world *world)
{
    const enum shoal_status status = shoal_context_create(NULL, &world->context);
    if (status != SHOAL_OK)
        return status;
    return shoal_comm_create(world->context, NULL, &world->comm);
}

static enum shoal_status work(struct world *world, const struct verb *verb, char **words)
{
    world->rank = shoal_comm_rank(world->comm);
    world->size = shoal_comm_size(world->comm);
    CHECK(world, world->size <= WORLD_RANKS_MAX, "the test is for %d ranks at most", WORLD_RANKS_MAX);
    const enum shoal_status status = verb->run(world, words);
    return status == SHOAL_OK ? shoal_comm_finalize(world->comm) : status;
}

int main(int argc, char **argv)
{
    static uint64_t board[WORLD_BOARD];
    struct world world = {.board = board, .device = host_rank_device};
    const struct verb *verb = find_verb(argc > 1 ? argv[1] : NULL);
    if (!verb) {
        fprintf(stderr, "usage: host_rank exact [GROUP...] | loop SECONDS [JOB] | abort | busy SECONDS | roots\n");
        return 2;
    }
    enum shoal_status status = join(&world);
    if (status == SHOAL_OK)
        status = work(&world, verb, argv + 2);
    if (status != SHOAL_OK)
        print_failure(&world, status);
    shoal_comm_free(world.comm);
    shoal_context_destroy(world.context);
    return status != SHOAL_OK;
}
