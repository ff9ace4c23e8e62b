/* Sharded checkpoints, between real processes: n ranks save and m ranks load, with reducers and shards, and train on as if
 * nothing had happened; a rank that ends between any two files, or a full disk, loses neither the old nor the new checkpoint;
 * and each damaged file has its error, on all ranks, before anything has changed. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gradient_values.h"
#include "multi_world.h"
#include "reference.h"
#include "shoal/checkpoints.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define PARAMETERS 14
#define ELEMENTS_MAX 40000 /* several blocks of a file */
#define STATES 3
#define SAVED_AT 2 /* steps before the checkpoint, and all steps */
#define STEPS 4
#define FOLDER_MAX 256

static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* ---- A crash between two files ------------------------------------------------------------------------------------------- */

/* The library's calls of these functions come here. A process that ends in one of them leaves what it has written before, as
 * one that is killed does. */
static int ends_at, fails_at, file_calls; /* the call in which this process ends, or that fails; 0: none */

#define IN_PLACE_OF_LIBC __attribute__((visibility("default")))

/* Returns true if this call fails. */
static bool count_call(void)
{
    if (++file_calls == ends_at)
        _exit(0);
    errno = EIO;
    return file_calls == fails_at;
}

IN_PLACE_OF_LIBC int rename(const char *from, const char *to)
{
    return count_call() ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

IN_PLACE_OF_LIBC int fsync(int fd)
{
    return count_call() ? -1 : (int)syscall(SYS_fsync, fd);
}

IN_PLACE_OF_LIBC int unlink(const char *path)
{
    return count_call() ? -1 : unlinkat(AT_FDCWD, path, 0);
}

IN_PLACE_OF_LIBC int mkdir(const char *path, mode_t mode)
{
    return count_call() ? -1 : mkdirat(AT_FDCWD, path, mode);
}

/* ---- What is saved ------------------------------------------------------------------------------------------------------- */

/* Who trains: a reducer or shards, of how many ranks. */
struct kind {
    const char *name;
    int ranks, is_shards, degree, steps_early, is_atomic;
    size_t buffer_bytes, whole_bytes;
};

/* The hashes that every trainer reaches: of each state after each step. Shared by all processes. */
struct expected {
    uint64_t hashes[STEPS + 1][PARAMETERS][STATES + 1]; /* the last one: the parameter itself */
};

/* The argument of a body. */
struct plan {
    struct kind kind;
    enum shoal_optimizer_rule rule;
    struct expected *expected;
    char folder[FOLDER_MAX];
    int ends_on, ends_at; /* the rank that ends, and its call */
    int order;            /* 1: parameters have other numbers */
    int is_other;         /* the model or the optimizer differs: enum other */
};

enum other { NOT_OTHER, OTHER_COUNT, OTHER_TYPE, OTHER_NAME, OTHER_NUMBER, OTHER_RULE, OTHER_STATES };

struct trainer {
    struct world *world;
    const struct plan *plan;
    struct shoal_parameter parameters[PARAMETERS];
    char names[PARAMETERS][24];
    uint32_t unit_of[PARAMETERS];
    struct shoal_optimizer_group group;
    struct shoal_optimizer optimizer;
    struct shoal_reducer *reducer;
    struct shoal_shards *shards;
    size_t count;
    void *memory;
    int step;
};

/* The parameter of the model that has number i in this trainer. */
static size_t model_number(const struct plan *plan, size_t i)
{
    return plan->order ? (i * 5 + 3) % PARAMETERS : i;
}

static void name_parameters(struct trainer *trainer)
{
    const struct plan *plan = trainer->plan;
    for (size_t i = 0; i < PARAMETERS; i++) {
        const size_t n = model_number(plan, i), most = n % 5 ? 70 : ELEMENTS_MAX;
        uint64_t random = n + 1;
        snprintf(trainer->names[i], sizeof trainer->names[i], "layer.%zu%s", n,
                 plan->is_other == OTHER_NAME && n == 4 ? "x" : "");
        trainer->parameters[i] =
            (struct shoal_parameter){n == 6 ? 0 : 1 + reference_below(&random, most), types[n % 4], trainer->names[i]};
        trainer->unit_of[i] = (uint32_t)i;
        if (n == 7)
            trainer->parameters[i].count += plan->is_other == OTHER_COUNT;
        if (n == 8 && plan->is_other == OTHER_TYPE)
            trainer->parameters[i].type = SHOAL_BFLOAT16;
    }
    trainer->count = PARAMETERS - (plan->is_other == OTHER_NUMBER);
}

static void trainer_describe(struct trainer *trainer, struct world *world)
{
    const struct plan *plan = world->arg;
    memset(trainer, 0, sizeof *trainer);
    trainer->world = world;
    trainer->plan = plan;
    trainer->memory = calloc(ELEMENTS_MAX + 2, 8);
    CHECK(world, trainer->memory, "no memory");
    name_parameters(trainer);
    trainer->group = (struct shoal_optimizer_group)SHOAL_OPTIMIZER_GROUP_INIT;
    trainer->group.rate = 0.0625;
    trainer->group.decay = 0.01;
    trainer->group.initial = 0.5;
    trainer->group.beta1 = plan->is_other == OTHER_STATES ? 0 : trainer->group.beta1;
    trainer->optimizer = (struct shoal_optimizer)SHOAL_OPTIMIZER_INIT;
    trainer->optimizer.rule = plan->is_other == OTHER_RULE ? SHOAL_ADAGRAD : plan->rule;
    trainer->optimizer.groups = &trainer->group;
    trainer->optimizer.group_count = 1;
    trainer->optimizer.degree = plan->kind.degree;
    trainer->optimizer.steps_early = plan->kind.steps_early;
    trainer->optimizer.is_atomic = plan->kind.is_atomic;
}

static void trainer_open(struct trainer *trainer, struct world *world)
{
    struct shoal_reducer_options reducer = SHOAL_REDUCER_OPTIONS_INIT;
    struct shoal_shards_options shards = SHOAL_SHARDS_OPTIONS_INIT;
    trainer_describe(trainer, world);
    const struct kind *kind = &trainer->plan->kind;
    reducer.optimizer = shards.optimizer = &trainer->optimizer;
    reducer.op = shards.op = SHOAL_SUM;
    reducer.buffer_bytes = kind->buffer_bytes;
    reducer.checks_finite = kind->steps_early;
    shards.unit_of = trainer->unit_of;
    shards.whole_bytes = kind->whole_bytes;
    if (kind->is_shards)
        OK(world,
           shoal_shards_create(world->context, world->comm, trainer->parameters, trainer->count, &shards, &trainer->shards));
    else
        OK(world,
           shoal_reducer_create(world->context, world->comm, trainer->parameters, trainer->count, &reducer, &trainer->reducer));
}

static void trainer_close(struct trainer *trainer)
{
    shoal_reducer_free(trainer->reducer);
    shoal_shards_free(trainer->shards);
    free(trainer->memory);
}

static enum shoal_type real_of(enum shoal_type type)
{
    return type == SHOAL_FLOAT64 ? SHOAL_FLOAT64 : SHOAL_FLOAT32;
}

static void fill(struct trainer *trainer, size_t i, enum shoal_type type, bool is_gradient)
{
    const size_t n = model_number(trainer->plan, i);
    for (size_t k = 0; k < trainer->parameters[i].count; k++) {
        const double value =
            is_gradient ? gradient_value(trainer->step, 0, n, k) : (double)((int)((n * 5 + k * 3) % 15) - 7) / 4;
        gradient_put(type, trainer->memory, k, value);
    }
}

/* Writes the first values. */
static void trainer_begin(struct trainer *trainer)
{
    for (size_t i = 0; i < trainer->count; i++) {
        const struct shoal_parameter *each = &trainer->parameters[i];
        fill(trainer, i, trainer->shards ? real_of(each->type) : each->type, false);
        if (trainer->shards)
            OK(trainer->world, shoal_shards_write(trainer->shards, i, SHOAL_STATE_MASTER, trainer->memory));
        else if (each->count)
            memcpy(shoal_reducer_parameter(trainer->reducer, i), trainer->memory, each->count * shoal_type_bytes(each->type));
    }
    if (trainer->reducer)
        OK(trainer->world, shoal_reducer_load_parameters(trainer->reducer));
}

/* Only rank 0 has gradients, so that sums have the same bits with any number of ranks. */
static void trainer_step(struct trainer *trainer)
{
    if (trainer->reducer)
        OK(trainer->world, shoal_reducer_begin(trainer->reducer, SHOAL_STEP_REDUCE));
    for (size_t i = trainer->count; i-- > 0;) {
        const struct shoal_parameter *each = &trainer->parameters[i];
        memset(trainer->memory, 0, ELEMENTS_MAX * 8);
        if (trainer->world->rank == 0)
            fill(trainer, i, each->type, true);
        OK(trainer->world, trainer->shards ? shoal_shards_ready(trainer->shards, i, trainer->memory, each->count)
                                           : shoal_reducer_ready(trainer->reducer, i, trainer->memory, each->count));
    }
    OK(trainer->world,
       trainer->shards ? shoal_shards_step(trainer->shards, NULL) : shoal_reducer_finish(trainer->reducer, NULL));
    trainer->step++;
}

static uint32_t states_of(enum shoal_optimizer_rule rule)
{
    return rule == SHOAL_ADAM || rule == SHOAL_ADAMW || rule == SHOAL_LAMB ? 2 : 1;
}

/* Collects a state, or with number STATES the parameter itself, in trainer->memory; returns the hash. */
static uint64_t hash_of(struct trainer *trainer, size_t i, size_t state)
{
    const struct shoal_parameter *each = &trainer->parameters[i];
    const enum shoal_optimizer_state wanted = (enum shoal_optimizer_state)state;
    if (state < STATES) {
        OK(trainer->world, trainer->shards ? shoal_shards_read(trainer->shards, i, wanted, trainer->memory)
                                           : shoal_reducer_read_state(trainer->reducer, i, wanted, trainer->memory));
        return shoal_bytes_hash(trainer->memory, each->count * shoal_type_bytes(real_of(each->type)));
    }
    if (trainer->reducer)
        return shoal_bytes_hash(shoal_reducer_parameter(trainer->reducer, i), each->count * shoal_type_bytes(each->type));
    OK(trainer->world, shoal_shards_gather(trainer->shards, (uint32_t)i, SHOAL_SHARDS_NONE));
    const uint64_t hash =
        shoal_bytes_hash(shoal_shards_parameter(trainer->shards, i), each->count * shoal_type_bytes(each->type));
    OK(trainer->world, shoal_shards_release(trainer->shards, (uint32_t)i));
    return hash;
}

/* Compares with the expected hashes of the step, or sets them. */
static void trainer_compare(struct trainer *trainer, bool sets)
{
    for (size_t i = 0; i < trainer->count; i++) {
        const size_t n = model_number(trainer->plan, i);
        const uint64_t steps = trainer->shards ? shoal_shards_parameter_steps(trainer->shards, i)
                                               : shoal_reducer_parameter_steps(trainer->reducer, i);
        CHECK(trainer->world, steps == (uint64_t)trainer->step, "parameter %zu has made %d steps, not %d", i, (int)steps,
              trainer->step);
        for (size_t s = 0; s <= STATES; s++) {
            uint64_t *wanted = &trainer->plan->expected->hashes[trainer->step][n][s];
            if (s > states_of(trainer->plan->rule) && s < STATES)
                continue;
            const uint64_t hash = hash_of(trainer, i, s);
            if (sets && trainer->world->rank == 0)
                *wanted = hash;
            CHECK(trainer->world, sets || hash == *wanted, "step %d: state %zu of parameter %zu differs", trainer->step, s, n);
        }
    }
}

static enum shoal_status trainer_save(struct trainer *trainer, const char *folder, const struct shoal_save_options *options)
{
    return trainer->shards ? shoal_shards_save(trainer->shards, folder, options)
                           : shoal_reducer_save(trainer->reducer, folder, options);
}

static enum shoal_status trainer_load(struct trainer *trainer, const char *folder, const struct shoal_load_options *options,
                                      struct shoal_load_result *result)
{
    return trainer->shards ? shoal_shards_load(trainer->shards, folder, options, result)
                           : shoal_reducer_load(trainer->reducer, folder, options, result);
}

static enum shoal_status save_step(struct trainer *trainer, uint64_t step, uint32_t keep)
{
    char extra[32];
    struct shoal_save_options options = SHOAL_SAVE_OPTIONS_INIT;
    options.step = step;
    options.keep = keep;
    options.extra = extra;
    options.extra_bytes = (size_t)snprintf(extra, sizeof extra, "rank %d, step %d", trainer->world->rank, (int)step);
    return trainer_save(trainer, trainer->plan->folder, &options);
}

/* Loads, and checks the program's own bytes. */
static void load_step(struct trainer *trainer, uint64_t step)
{
    char extra[32] = "", wanted[32];
    struct shoal_load_options options = SHOAL_LOAD_OPTIONS_INIT;
    struct shoal_load_result result = SHOAL_LOAD_RESULT_INIT;
    options.step = step;
    options.extra = extra;
    options.extra_room = sizeof extra - 1;
    OK(trainer->world, trainer_load(trainer, trainer->plan->folder, &options, &result));
    snprintf(wanted, sizeof wanted, "rank 0, step %d", (int)result.step);
    CHECK(trainer->world, !strcmp(extra, wanted) && result.extra_bytes == strlen(wanted), "%s instead of %s", extra, wanted);
    trainer->step = (int)result.step;
}

/* ---- Saved by n ranks, loaded by m --------------------------------------------------------------------------------------- */

static void saves_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    for (;; trainer_step(&trainer)) {
        trainer_compare(&trainer, true);
        OK(world, shoal_barrier(world->comm, NULL)); /* rank 0 has set the hashes */
        if (trainer.step == SAVED_AT)
            OK(world, save_step(&trainer, SAVED_AT, 0));
        if (trainer.step == STEPS)
            break;
    }
    trainer_close(&trainer);
}

static size_t own_bytes(const struct trainer *trainer)
{
    size_t bytes = 0;
    for (size_t i = 0; i < trainer->count; i++)
        bytes += trainer->parameters[i].count * shoal_type_bytes(real_of(trainer->parameters[i].type)) *
                 (1 + states_of(trainer->plan->rule));
    return bytes;
}

/* Each rank reads its share of the bytes of all values, and all shares together are the values once. */
static void check_read_bytes(struct trainer *trainer)
{
    const int given = trainer->plan->kind.degree;
    const int degree = given == SHOAL_DEGREE_HOST ? 2 : given ? given : trainer->world->size;
    struct shoal_load_result result = SHOAL_LOAD_RESULT_INIT;
    int64_t all = 0;
    OK(trainer->world, trainer_load(trainer, trainer->plan->folder, NULL, &result));
    const int64_t own = (int64_t)result.read_bytes;
    OK(trainer->world, shoal_allreduce(trainer->world->comm, &own, &all, 1, SHOAL_INT64, SHOAL_SUM, NULL));
    if (!trainer->plan->kind.whole_bytes)
        CHECK(trainer->world, (size_t)all == own_bytes(trainer) * (size_t)(trainer->world->size / degree),
              "all ranks have read %d bytes, the values have %zu", (int)all, own_bytes(trainer));
}

/* LAMB adds up norms by shards, so its bits depend on the number of ranks: it is compared as loaded. */
static void loads_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    trainer_step(&trainer); /* what is there is replaced */
    load_step(&trainer, SHOAL_CHECKPOINT_LATEST);
    CHECK(world, trainer.step == SAVED_AT, "step %d was loaded", trainer.step);
    for (;; trainer_step(&trainer)) {
        trainer_compare(&trainer, false);
        if (trainer.step == STEPS || trainer.plan->rule == SHOAL_LAMB)
            break;
    }
    check_read_bytes(&trainer);
    trainer_close(&trainer);
}

static const struct kind kinds[] = {
    {"reducer of 3", 3, 0, 0, 0, 0, 8 << 10, 0},
    {"reducer of 4, teams of 2", 4, 0, 2, 0, 0, 64 << 10, 0},
    {"reducer of 2, early and atomic", 2, 0, 0, 1, 1, 0, 0},
    {"reducer of 1", 1, 0, 0, 0, 0, 0, 0},
    {"shards of 2", 2, 1, 0, 0, 0, 0, 0},
    {"shards of 3, small ones whole", 3, 1, 0, 0, 0, 0, 300},
};
static const struct kind host_teams = {"reducer of 4, teams of a host", 4, 0, SHOAL_DEGREE_HOST, 0, 0, 16 << 10, 0};

static struct plan plan_of(const struct kind *kind, enum shoal_optimizer_rule rule, struct expected *expected,
                           const char *folder)
{
    struct plan plan = {.kind = *kind, .rule = rule, .expected = expected};
    snprintf(plan.folder, sizeof plan.folder, "%s", folder);
    return plan;
}

static bool run_plan(const char *name, const struct plan *plan, world_body_fn body)
{
    return world_run(&(struct world_options){name, plan->kind.ranks, NULL, body, plan});
}

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *walk)
{
    (void)about, (void)type, (void)walk;
    return remove(path);
}

static void remove_tree(const char *path)
{
    (void)!nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* Makes an empty folder of the test, below the one of the program. */
static const char *new_folder(const char *top, const char *name)
{
    static char path[FOLDER_MAX];
    snprintf(path, sizeof path, "%.200s/%s", top, name);
    remove_tree(path);
    return path;
}

/* What each kind saves, each kind loads. */
static void run_pairs(const char *top, enum shoal_optimizer_rule rule, const char *rule_name, struct expected *expected,
                      size_t first, size_t step)
{
    char name[160];
    for (size_t a = first; a < COUNT_OF(kinds); a += step) {
        struct plan plan = plan_of(&kinds[a], rule, expected, new_folder(top, "pairs"));
        plan.kind.steps_early = rule == SHOAL_LAMB ? 0 : plan.kind.steps_early;
        snprintf(name, sizeof name, "checkpoint_of_%s, %s", kinds[a].name, rule_name);
        run_plan(name, &plan, saves_body);
        for (size_t b = 0; b < COUNT_OF(kinds); b++) {
            plan.kind = kinds[b];
            plan.kind.steps_early = rule == SHOAL_LAMB ? 0 : plan.kind.steps_early;
            plan.order = (a + b) % 2;
            snprintf(name, sizeof name, "checkpoint_of_%s, loaded by %s, %s", kinds[a].name, kinds[b].name, rule_name);
            run_plan(name, &plan, loads_body);
        }
    }
}

/* Each host has all states; one writes them. */
static void run_on_hosts(const char *top, struct expected *expected)
{
    struct plan plan = plan_of(&host_teams, SHOAL_ADAM, expected, new_folder(top, "hosts"));
    world_divide(2);
    run_plan("checkpoint_of_teams_of_a_host", &plan, saves_body);
    run_plan("checkpoint_of_teams_of_a_host, loaded by them", &plan, loads_body);
    plan.kind = kinds[4];
    plan.kind.ranks = 4;
    run_plan("checkpoint_of_teams_of_a_host, loaded by shards", &plan, loads_body);
    world_divide(0);
}

/* ---- Crashes ------------------------------------------------------------------------------------------------------------- */

static bool exists(const char *folder, const char *name)
{
    char path[FOLDER_MAX + 64];
    struct stat about;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &about) == 0;
}

/* Saves step 1, trains, and saves step 2, in which one rank ends at one of its calls. The board counts its calls. */
static void crashes_body(struct world *world)
{
    const struct plan *plan = world->arg;
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    trainer_step(&trainer);
    OK(world, save_step(&trainer, 1, 1));
    trainer_step(&trainer);
    OK(world, shoal_barrier(world->comm, NULL));
    world_meet(world);
    file_calls = 0;
    ends_at = world->rank == plan->ends_on ? plan->ends_at : 0;
    const enum shoal_status status = save_step(&trainer, 2, 1);
    if (world->rank == plan->ends_on) {
        world->board[0] = (uint64_t)file_calls;
        CHECK(world, status == SHOAL_OK, "the save gave %s", shoal_status_name(status));
    }
    _exit(0); /* finalize would miss the rank */
}

/* Reads the newest checkpoint without ranks. Returns its step, or 0 if a value differs from the expected one. */
static uint64_t check_newest(const struct plan *plan, char *error, size_t error_bytes)
{
    struct shoal_checkpoint_about about = SHOAL_CHECKPOINT_ABOUT_INIT;
    struct shoal_checkpoint *checkpoint;
    char *memory = calloc(ELEMENTS_MAX + 1, 8);
    uint64_t step = 0;
    if (memory && shoal_checkpoint_open(plan->folder, SHOAL_CHECKPOINT_LATEST, &checkpoint, error, error_bytes) == SHOAL_OK) {
        bool is_equal = shoal_checkpoint_describe(checkpoint, &about) == SHOAL_OK && about.parameters == PARAMETERS;
        for (size_t i = 0; i < PARAMETERS && is_equal; i++) {
            struct shoal_checkpoint_parameter entry = SHOAL_CHECKPOINT_PARAMETER_INIT;
            is_equal = shoal_checkpoint_entry(checkpoint, i, &entry) == SHOAL_OK && entry.steps == about.step;
            for (uint32_t s = 0; s <= entry.states && is_equal; s++)
                is_equal = shoal_checkpoint_read(checkpoint, i, (enum shoal_optimizer_state)s, 0, entry.count, memory, error,
                                                 error_bytes) == SHOAL_OK &&
                           shoal_bytes_hash(memory, entry.count * shoal_type_bytes(real_of(entry.type))) ==
                               plan->expected->hashes[about.step][i][s];
        }
        step = is_equal ? about.step : 0;
        shoal_checkpoint_close(checkpoint);
    }
    free(memory);
    return step;
}

/* The next job continues, and leaves nothing of the crash behind. */
static void recovers_body(struct world *world)
{
    uint64_t steps[4];
    size_t count;
    struct trainer trainer;
    trainer_open(&trainer, world);
    load_step(&trainer, SHOAL_CHECKPOINT_LATEST);
    trainer_compare(&trainer, false);
    while (trainer.step < 3)
        trainer_step(&trainer);
    OK(world, save_step(&trainer, 3, 1));
    OK(world, shoal_checkpoint_steps(trainer.plan->folder, steps, COUNT_OF(steps), &count, NULL, 0));
    CHECK(world, count == 1 && steps[0] == 3, "%zu checkpoints, the first of step %d", count, (int)steps[0]);
    trainer_close(&trainer);
}

/* A rank ends at each of its calls in turn. */
static void run_crashes(const char *top, struct expected *expected, int rank)
{
    char error[512] = "", name[160];
    uint64_t seen[3] = {0, 0, 0};
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "crashes"));
    plan.ends_on = rank;
    for (plan.ends_at = 1; plan.ends_at < 60; plan.ends_at++) {
        new_folder(top, "crashes");
        world_board()[0] = 0;
        snprintf(name, sizeof name, "checkpoint_rank_%d_ends_at_call_%d", rank, plan.ends_at);
        if (!run_plan(name, &plan, crashes_body) || !exists(plan.folder, ""))
            return; /* or the words of the command line leave it out */
        const uint64_t step = check_newest(&plan, error, sizeof error);
        if (step != 1 && step != 2) {
            snprintf(name, sizeof name, "checkpoint_rank_%d_ended_at_call_%d: neither is there: %.60s", rank, plan.ends_at,
                     error);
            world_report(false, name);
            return;
        }
        seen[step]++;
        snprintf(name, sizeof name, "checkpoint_recovers_after_rank_%d_ended_at_call_%d", rank, plan.ends_at);
        if (!run_plan(name, &plan, recovers_body) || world_board()[0])
            break;
    }
    snprintf(name, sizeof name, "checkpoint_rank_%d_ended_at_all_its_calls", rank);
    world_report(plan.ends_at < 60 && plan.ends_at > 2 && seen[1] > 0 && seen[2] > 0 &&
                     !exists(plan.folder, "step-000000000001") && !exists(plan.folder, "step-000000000002"),
                 name);
}

/* ---- Errors -------------------------------------------------------------------------------------------------------------- */

#define REFUSED(world, call, wanted, word)                                                                     \
    do {                                                                                                       \
        struct shoal_failure refused_failure_ = SHOAL_FAILURE_INIT;                                            \
        const enum shoal_status refused_ = (call);                                                             \
        OK((world), shoal_last_failure((world)->context, NULL, &refused_failure_));                            \
        CHECK((world), refused_ == (wanted) && strstr(refused_failure_.text, (word)), "%s gave %s: %s", #call, \
              shoal_status_name(refused_), refused_failure_.text);                                             \
    } while (0)

/* The kernel refuses long files to one rank, as a full disk would. */
static void full_disk_body(struct world *world)
{
    struct rlimit before, tight;
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    trainer_step(&trainer);
    OK(world, save_step(&trainer, 1, 0));
    signal(SIGXFSZ, SIG_IGN);
    OK(world, getrlimit(RLIMIT_FSIZE, &before) == 0 ? SHOAL_OK : SHOAL_ERR_SYSTEM);
    tight = before;
    tight.rlim_cur = 100000;
    if (world->rank == 1)
        setrlimit(RLIMIT_FSIZE, &tight);
    REFUSED(world, save_step(&trainer, 2, 1), SHOAL_ERR_SYSTEM, "rank 1: cannot write");
    setrlimit(RLIMIT_FSIZE, &before);
    OK(world, shoal_barrier(world->comm, NULL)); /* rank 0 has removed what was written */
    CHECK(world, !exists(trainer.plan->folder, "step-000000000002"), "files of the failed checkpoint are left");
    load_step(&trainer, SHOAL_CHECKPOINT_LATEST);
    CHECK(world, trainer.step == 1, "step %d was loaded", trainer.step);
    trainer_compare(&trainer, false);
    OK(world, save_step(&trainer, 2, 1));
    trainer_close(&trainer);
}

/* Each call of one rank fails in turn: then all ranks return an error that names it, and the newest checkpoint is whole; or the
 * new one is, if only what is left of earlier ones could not be removed. */
static void failing_calls_body(struct world *world)
{
    const struct plan *plan = world->arg;
    struct trainer trainer;
    char name[32];
    uint64_t refused = 0, saved = 0;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    OK(world, save_step(&trainer, 1, 0));
    const uint64_t wanted = hash_of(&trainer, 5, SHOAL_STATE_MASTER);
    snprintf(name, sizeof name, "rank %d: cannot", plan->ends_on);
    for (int call = 1;; call++) {
        OK(world, shoal_barrier(world->comm, NULL));
        file_calls = 0;
        fails_at = world->rank == plan->ends_on ? call : 0;
        const enum shoal_status status = save_step(&trainer, 1 + (uint64_t)call, 1);
        fails_at = 0;
        int64_t calls = file_calls, most = 0;
        OK(world, shoal_allreduce(world->comm, &calls, &most, 1, SHOAL_INT64, SHOAL_MAX, NULL));
        if (status != SHOAL_OK)
            REFUSED(world, status, SHOAL_ERR_SYSTEM, name);
        refused += status != SHOAL_OK;
        saved += status == SHOAL_OK;
        load_step(&trainer, SHOAL_CHECKPOINT_LATEST);
        CHECK(world, hash_of(&trainer, 5, SHOAL_STATE_MASTER) == wanted, "call %d: a value differs", call);
        CHECK(world, (trainer.step == 1 + call) == (status == SHOAL_OK), "call %d gave %s, the latest step is %d", call,
              shoal_status_name(status), trainer.step);
        if (call > most)
            break;
    }
    CHECK(world, refused >= 3 && saved >= 1, "%d saves were refused, %d not", (int)refused, (int)saved);
    trainer_close(&trainer);
}

/* ---- Damaged files ------------------------------------------------------------------------------------------------------- */

static void path_in(const char *folder, uint64_t step, const char *name, char *path, size_t path_bytes)
{
    snprintf(path, path_bytes, "%.200s/step-%012d/%s", folder, (int)step, name);
}

static void flip(const char *path, off_t at)
{
    char byte;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (at < 0)
        at += lseek(fd, 0, SEEK_END);
    if (pread(fd, &byte, 1, at) == 1) {
        byte = (char)(byte ^ 4);
        (void)!pwrite(fd, &byte, 1, at);
    }
    close(fd);
}

static void copy_file(const char *from, const char *to)
{
    static char bytes[4 << 20];
    const int source = open(from, O_RDONLY | O_CLOEXEC), target = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    const ssize_t count = read(source, bytes, sizeof bytes);
    if (count > 0)
        (void)!write(target, bytes, (size_t)count);
    close(source);
    close(target);
}

static void cut(const char *path, off_t bytes)
{
    struct stat about;
    if (stat(path, &about) == 0)
        (void)!truncate(path, about.st_size - bytes);
}

#define SHARD "shard-00001-of-00003.shoal"

enum damage {
    IS_MISSING,
    COMPLETE_IS_MISSING,
    IS_CUT,
    IS_CUT_TO_NOTHING,
    HEAD_CHANGED,
    LIST_CHANGED,
    VALUE_CHANGED,
    COMPLETE_CHANGED,
    COMPLETE_CUT,
    OF_ANOTHER_STEP,
    OF_ANOTHER_MODEL,
    OF_ANOTHER_SAVE,
    OF_ANOTHER_SHARD,
    FOLDER_RENAMED,
    DAMAGES
};

static const char *const damage_words[DAMAGES] = {
    SHARD " is missing",  "complete is missing",        SHARD " was cut short", SHARD " was cut short",
    "first bytes",        "lists were changed",         "another checksum",     "complete: it was changed",
    "cut short",          SHARD " is of step 1",        "is of another model",  "another checkpoint of the same step",
    "holds shard 0 of 3", "has the folder been renamed"};

/* Damages step 2 of `folder`; `other` has checkpoints of other models and saves. */
static void damage(const char *folder, const char *other, enum damage kind)
{
    char path[FOLDER_MAX + 64], complete[FOLDER_MAX + 64], from[FOLDER_MAX + 64];
    path_in(folder, 2, SHARD, path, sizeof path);
    path_in(folder, 2, "complete", complete, sizeof complete);
    path_in(kind == OF_ANOTHER_STEP || kind == FOLDER_RENAMED || kind == OF_ANOTHER_SHARD ? folder : other,
            kind == OF_ANOTHER_STEP || kind == FOLDER_RENAMED ? 1
            : kind == OF_ANOTHER_MODEL                        ? 3
                                                              : 2,
            kind == FOLDER_RENAMED     ? "complete"
            : kind == OF_ANOTHER_SHARD ? "shard-00000-of-00003.shoal"
                                       : SHARD,
            from, sizeof from);
    if (kind == IS_MISSING || kind == COMPLETE_IS_MISSING)
        unlinkat(AT_FDCWD, kind == IS_MISSING ? path : complete, 0);
    if (kind == IS_CUT || kind == COMPLETE_CUT)
        cut(kind == IS_CUT ? path : complete, 5);
    if (kind == IS_CUT_TO_NOTHING)
        (void)!truncate(path, 0);
    if (kind == HEAD_CHANGED || kind == LIST_CHANGED || kind == VALUE_CHANGED)
        flip(path, kind == HEAD_CHANGED ? 20 : kind == LIST_CHANGED ? 200 : -3);
    if (kind == COMPLETE_CHANGED)
        flip(complete, -3);
    if (kind >= OF_ANOTHER_STEP)
        copy_file(from, kind == FOLDER_RENAMED ? complete : path);
}

/* Each damage is found by all ranks alike, and values stay as they were. */
static void damages_body(struct world *world)
{
    char path[FOLDER_MAX + 64], saved[FOLDER_MAX + 64], complete[FOLDER_MAX + 64], other[FOLDER_MAX];
    const struct plan *plan = world->arg;
    struct trainer trainer;
    trainer_open(&trainer, world);
    load_step(&trainer, 1);
    snprintf(other, sizeof other, "%.200s-other", plan->folder);
    path_in(plan->folder, 2, SHARD, path, sizeof path);
    path_in(plan->folder, 2, "complete", complete, sizeof complete);
    path_in(other, 2, "saved", saved, sizeof saved);
    for (enum damage kind = 0; kind < DAMAGES; kind++) {
        struct shoal_load_options options = SHOAL_LOAD_OPTIONS_INIT;
        const bool is_complete =
            kind == COMPLETE_IS_MISSING || kind == COMPLETE_CHANGED || kind == COMPLETE_CUT || kind == FOLDER_RENAMED;
        options.step = 2;
        if (world->rank == 0) {
            copy_file(is_complete ? complete : path, saved);
            damage(plan->folder, other, kind);
        }
        OK(world, shoal_barrier(world->comm, NULL));
        REFUSED(world, trainer_load(&trainer, plan->folder, &options, NULL), SHOAL_ERR_ARGUMENT, damage_words[kind]);
        trainer_compare(&trainer, false);
        if (world->rank == 0)
            copy_file(saved, is_complete ? complete : path);
        OK(world, shoal_barrier(world->comm, NULL));
    }
    load_step(&trainer, 2);
    trainer_close(&trainer);
}

/* Steps 1 and 2 of the model. */
static void two_steps_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    for (uint64_t step = 1; step <= 2; step++) {
        trainer_step(&trainer);
        OK(world, save_step(&trainer, step, 0));
    }
    trainer_close(&trainer);
}

static void step_of_another_model_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    OK(world, save_step(&trainer, 3, 0));
    trainer_close(&trainer);
}

static void run_damages(const char *top, struct expected *expected)
{
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "damages"));
    struct plan other = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "damages-other"));
    run_plan("checkpoint_two_steps", &plan, two_steps_body);
    run_plan("checkpoint_two_steps, again", &other, two_steps_body);
    other.is_other = OTHER_NAME;
    run_plan("checkpoint_of_another_model", &other, step_of_another_model_body);
    run_plan("checkpoint_damaged_files_are_named", &plan, damages_body);
    plan.kind = kinds[4];
    run_plan("checkpoint_damaged_files_are_named, shards", &plan, damages_body);
}

/* ---- Other models and calls ---------------------------------------------------------------------------------------------- */

static void other_model_body(struct world *world)
{
    static const char *const words[] = {"",
                                        "(layer.7) has",
                                        "float32, in the checkpoint",
                                        "does not have parameter 4 (layer.4x)",
                                        "14 parameters, this one 13",
                                        "its rule is SHOAL_ADAMW, this one's SHOAL_ADAGRAD",
                                        "has 0 states, in the checkpoint 1"};
    const struct plan *plan = world->arg;
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    const uint64_t before = hash_of(&trainer, 0, SHOAL_STATE_MASTER);
    REFUSED(world, trainer_load(&trainer, plan->folder, NULL, NULL), SHOAL_ERR_ARGUMENT,
            plan->is_other == OTHER_TYPE ? "bfloat16, in the checkpoint" : words[plan->is_other]);
    CHECK(world, hash_of(&trainer, 0, SHOAL_STATE_MASTER) == before, "a value has changed");
    trainer_step(&trainer);
    trainer_close(&trainer);
}

static void run_other_models(const char *top, struct expected *expected)
{
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "others"));
    run_plan("checkpoint_for_others", &plan, saves_body);
    plan.kind = kinds[4];
    for (int other = OTHER_COUNT; other <= OTHER_RULE; other++) {
        char name[96];
        snprintf(name, sizeof name, "checkpoint_of_another_model_is_refused, %d", other);
        plan.is_other = other;
        run_plan(name, &plan, other_model_body);
    }
    struct plan momentum = plan_of(&kinds[0], SHOAL_SGD, expected, new_folder(top, "others"));
    run_plan("checkpoint_with_momentum", &momentum, saves_body);
    momentum.is_other = OTHER_STATES;
    run_plan("checkpoint_of_other_states_is_refused", &momentum, other_model_body);
}

static enum shoal_status load_with(struct trainer *trainer, uint64_t step, size_t extra_room)
{
    static char extra[64];
    struct shoal_load_options options = SHOAL_LOAD_OPTIONS_INIT;
    options.step = step;
    options.extra = extra;
    options.extra_room = extra_room;
    return trainer_load(trainer, trainer->plan->folder, &options, NULL);
}

static void calls_body(struct world *world)
{
    struct trainer trainer;
    struct shoal_save_options options = SHOAL_SAVE_OPTIONS_INIT;
    const uint64_t rank = (uint64_t)world->rank;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    const char *folder = trainer.plan->folder;
    REFUSED(world, load_with(&trainer, SHOAL_CHECKPOINT_LATEST, 64), SHOAL_ERR_SYSTEM, "cannot read the folder");
    OK(world, save_step(&trainer, 0, 0));
    REFUSED(world, save_step(&trainer, 0, 0), SHOAL_ERR_STATE, "is a complete checkpoint already");
    REFUSED(world, save_step(&trainer, SHOAL_CHECKPOINT_LATEST, 0), SHOAL_ERR_ARGUMENT, "save another number");
    REFUSED(world, save_step(&trainer, rank, 0), SHOAL_ERR_MISMATCH, "rank 0 saves step 0, rank 1 step 1");
    REFUSED(world, trainer_save(&trainer, folder, rank ? NULL : &options), SHOAL_ERR_ARGUMENT, "rank 1: options is NULL");
    REFUSED(world, trainer_load(&trainer, folder, &(struct shoal_load_options){0}, NULL), SHOAL_ERR_ARGUMENT, "struct_bytes");
    REFUSED(world, trainer_save(&trainer, rank ? NULL : folder, &options), SHOAL_ERR_ARGUMENT, "rank 1: the folder is NULL");
    options.extra_bytes = SHOAL_CHECKPOINT_EXTRA_MAX + 1;
    REFUSED(world, trainer_save(&trainer, folder, &options), SHOAL_ERR_ARGUMENT, "extra has 67108865 bytes");
    REFUSED(world, load_with(&trainer, rank, 64), SHOAL_ERR_MISMATCH, "rank 1 loads another step than rank 0");
    REFUSED(world, load_with(&trainer, 7, 64), SHOAL_ERR_ARGUMENT, "step 7: ");
    REFUSED(world, load_with(&trainer, 0, rank == 1 ? 3 : 64), SHOAL_ERR_ARGUMENT, "rank 1: extra has 14 bytes");
    if (trainer.reducer)
        OK(world, shoal_reducer_begin(trainer.reducer, SHOAL_STEP_REDUCE));
    memset(trainer.memory, 0, ELEMENTS_MAX * 8);
    for (size_t i = trainer.count; i-- > 0;) {
        const size_t count = trainer.parameters[i].count;
        OK(world, trainer.shards ? shoal_shards_ready(trainer.shards, i, trainer.memory, count)
                                 : shoal_reducer_ready(trainer.reducer, i, trainer.memory, count));
        if (i == 3)
            REFUSED(world, save_step(&trainer, 5, 0), SHOAL_ERR_STATE,
                    trainer.shards ? "gradients are ready" : "was not finished");
    }
    OK(world, trainer.shards ? shoal_shards_step(trainer.shards, NULL) : shoal_reducer_finish(trainer.reducer, NULL));
    OK(world, save_step(&trainer, 5, 0));
    trainer_close(&trainer);
}

/* The last rank writes to a folder that rank 0 does not see, as on the disk of another host. */
static void apart_body(struct world *world)
{
    char other[FOLDER_MAX];
    struct shoal_save_options options = SHOAL_SAVE_OPTIONS_INIT;
    struct trainer trainer;
    const bool is_apart = world->rank == world->size - 1;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    snprintf(other, sizeof other, "%.200s-apart", trainer.plan->folder);
    const char *folder = is_apart ? other : trainer.plan->folder;
    REFUSED(world, trainer_save(&trainer, folder, &options), SHOAL_ERR_SYSTEM, "all hosts must share it");
    if (is_apart) {
        char step[FOLDER_MAX + 32];
        snprintf(step, sizeof step, "%s/step-000000000000", other);
        CHECK(world, mkdir(other, 0777) == 0 && mkdir(step, 0777) == 0, "no folder %s", step);
    }
    REFUSED(world, trainer_save(&trainer, folder, &options), SHOAL_ERR_SYSTEM, "all hosts must share the folder");
    trainer_close(&trainer);
}

/* Ranks whose parameters have made different numbers of steps do not save. */
static void uneven_steps_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    OK(world, shoal_reducer_set_parameter_steps(trainer.reducer, 2, (uint64_t)(world->rank == 2)));
    REFUSED(world, save_step(&trainer, 1, 0), SHOAL_ERR_MISMATCH, "other numbers of steps on rank 2 than on rank 0");
    trainer_close(&trainer);
}

/* Of six checkpoints and what a crash has left, the last two stay. Those of later steps are not touched. */
static void keeps_body(struct world *world)
{
    static const uint64_t order[] = {10, 1, 2, 3, 4, 5};
    uint64_t steps[8];
    size_t count;
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    for (size_t i = 0; i < COUNT_OF(order); i++)
        OK(world, save_step(&trainer, order[i], order[i] == 5 ? 2 : 0));
    OK(world, shoal_checkpoint_steps(trainer.plan->folder, steps, COUNT_OF(steps), &count, NULL, 0));
    CHECK(world, count == 3 && steps[0] == 4 && steps[1] == 5 && steps[2] == 10, "%zu checkpoints stay, the first of step %d",
          count, (int)steps[0]);
    trainer_close(&trainer);
}

static void run_calls(const char *top, struct expected *expected)
{
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "calls"));
    run_plan("checkpoint_calls_are_checked, reducer", &plan, calls_body);
    plan = plan_of(&kinds[4], SHOAL_SGD, expected, new_folder(top, "calls"));
    run_plan("checkpoint_calls_are_checked, shards", &plan, calls_body);
    plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "calls"));
    run_plan("checkpoint_of_uneven_steps_is_refused", &plan, uneven_steps_body);
    run_plan("checkpoint_in_a_folder_that_is_not_shared_is_refused", &plan, apart_body);
    plan = plan_of(&kinds[4], SHOAL_LION, expected, new_folder(top, "calls"));
    run_plan("checkpoint_keeps_the_last_ones", &plan, keeps_body);
}

/* ---- Without ranks ------------------------------------------------------------------------------------------------------- */

/* The model's parameters whole, with values only. */
static void write_whole_body(struct world *world)
{
    struct shoal_save_options options = SHOAL_SAVE_OPTIONS_INIT;
    struct shoal_checkpoint_values values[PARAMETERS];
    char error[512], *memory = calloc(PARAMETERS, (ELEMENTS_MAX + 1) * 8);
    struct trainer trainer;
    trainer_describe(&trainer, world);
    CHECK(world, memory, "no memory");
    for (size_t i = 0; i < PARAMETERS; i++) {
        char *own = memory + i * (ELEMENTS_MAX + 1) * 8;
        fill(&trainer, i, real_of(trainer.parameters[i].type), false);
        memcpy(own, trainer.memory, (ELEMENTS_MAX + 1) * 8);
        values[i] = (struct shoal_checkpoint_values)SHOAL_CHECKPOINT_VALUES_INIT;
        values[i].parameter = trainer.parameters[i];
        values[i].states[SHOAL_STATE_MASTER] = own;
    }
    options.step = SAVED_AT;
    enum shoal_status status =
        shoal_checkpoint_write(trainer.plan->folder, &options, SHOAL_ADAMW, values, PARAMETERS, error, sizeof error);
    CHECK(world, status == SHOAL_ERR_ARGUMENT && strstr(error, "has 0 states, but the rule keeps 2"), "%s: %s",
          shoal_status_name(status), error);
    values[3].states[SHOAL_STATE_MASTER] = NULL;
    status = shoal_checkpoint_write(trainer.plan->folder, &options, -1, values, PARAMETERS, error, sizeof error);
    CHECK(world, status == SHOAL_ERR_ARGUMENT && strstr(error, "(layer.3) has no values"), "%s: %s", shoal_status_name(status),
          error);
    values[3].states[SHOAL_STATE_MASTER] = memory + 3 * (ELEMENTS_MAX + 1) * 8;
    OK(world, shoal_checkpoint_write(trainer.plan->folder, &options, -1, values, PARAMETERS, error, sizeof error));
    free(memory);
    free(trainer.memory);
}

/* Values without states begin the optimizer anew: the hashes are those of step 0. */
static void loads_values_body(struct world *world)
{
    struct trainer trainer;
    trainer_open(&trainer, world);
    trainer_begin(&trainer);
    trainer_step(&trainer);
    OK(world, trainer_load(&trainer, trainer.plan->folder, NULL, NULL));
    for (trainer.step = 0;; trainer_step(&trainer)) {
        trainer_compare(&trainer, false);
        if (trainer.step == STEPS)
            break;
    }
    trainer_close(&trainer);
}

/* The reader refuses what is out of range, and reads any range. */
static void reads_ranges_body(struct world *world)
{
    struct shoal_checkpoint_parameter entry = SHOAL_CHECKPOINT_PARAMETER_INIT;
    struct shoal_checkpoint *checkpoint;
    char error[512], extra[64] = "";
    const struct plan *plan = world->arg;
    uint64_t random = 9;
    double *all = calloc(ELEMENTS_MAX, 8), *some = calloc(ELEMENTS_MAX, 8);
    CHECK(world, all && some, "no memory");
    OK(world, shoal_checkpoint_open(plan->folder, SAVED_AT, &checkpoint, error, sizeof error));
    OK(world, shoal_checkpoint_entry(checkpoint, 5, &entry));
    CHECK(world, !strcmp(entry.name, "layer.5") && entry.type == SHOAL_FLOAT64 && entry.states == 2, "%s", entry.name);
    OK(world, shoal_checkpoint_read(checkpoint, 5, SHOAL_STATE_FIRST, 0, entry.count, all, error, sizeof error));
    for (int i = 0; i < 200; i++) {
        const size_t begin = reference_below(&random, entry.count), count = reference_below(&random, entry.count - begin + 1);
        OK(world, shoal_checkpoint_read(checkpoint, 5, SHOAL_STATE_FIRST, begin, count, some, error, sizeof error));
        CHECK(world, !memcmp(all + begin, some, count * 8), "elements %zu to %zu differ", begin, begin + count);
    }
    CHECK(world,
          shoal_checkpoint_read(checkpoint, 5, SHOAL_STATE_FIRST, 1, entry.count, some, error, sizeof error) ==
              SHOAL_ERR_ARGUMENT,
          "a range that is too long");
    CHECK(world, shoal_checkpoint_read(checkpoint, PARAMETERS, SHOAL_STATE_FIRST, 0, 0, some, NULL, 0) == SHOAL_ERR_ARGUMENT,
          "a parameter that is out of range");
    CHECK(world, shoal_checkpoint_entry(checkpoint, PARAMETERS, &entry) == SHOAL_ERR_ARGUMENT, "an entry out of range");
    OK(world, shoal_checkpoint_extra(checkpoint, extra, error, sizeof error));
    CHECK(world, !strcmp(extra, "rank 0, step 2"), "%s", extra);
    shoal_checkpoint_close(checkpoint);
    free(all);
    free(some);
}

static void run_without_ranks(const char *top, struct expected *expected)
{
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "ranges"));
    run_plan("checkpoint_for_ranges", &plan, saves_body);
    plan.kind = kinds[3];
    run_plan("checkpoint_ranges_are_read", &plan, reads_ranges_body);
    plan = plan_of(&kinds[3], SHOAL_ADAGRAD, expected, new_folder(top, "whole"));
    run_plan("checkpoint_before_whole_values", &plan, saves_body);
    snprintf(plan.folder, sizeof plan.folder, "%s", new_folder(top, "whole"));
    run_plan("checkpoint_of_whole_values", &plan, write_whole_body);
    for (size_t k = 0; k < COUNT_OF(kinds); k += 4) {
        char name[96];
        plan.kind = kinds[k];
        snprintf(name, sizeof name, "checkpoint_of_whole_values, loaded by %s", kinds[k].name);
        run_plan(name, &plan, loads_values_body);
    }
}

/* ---- Cases --------------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    char top[] = "/tmp/shoal-checkpoint-XXXXXX";
    struct expected *expected = mmap(NULL, sizeof *expected, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (expected == MAP_FAILED || !mkdtemp(top))
        return 1;
    world_choose(argc, argv);
    run_pairs(top, SHOAL_ADAMW, "ADAMW", expected, 0, 1);
    run_pairs(top, SHOAL_SGD, "SGD", expected, 0, 4);
    run_pairs(top, SHOAL_ADAGRAD, "ADAGRAD", expected, 1, 4);
    run_pairs(top, SHOAL_LION, "LION", expected, 2, 4);
    run_pairs(top, SHOAL_LAMB, "LAMB", expected, 4, 4);
    run_on_hosts(top, expected);
    struct plan plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "first"));
    run_plan("checkpoint_expected", &plan, saves_body); /* saves the hashes that the next runs expect */
    run_damages(top, expected);
    plan = plan_of(&kinds[0], SHOAL_ADAMW, expected, new_folder(top, "full"));
    run_plan("checkpoint_on_a_full_disk", &plan, full_disk_body);
    for (plan.ends_on = 0; plan.ends_on < 3; plan.ends_on += 2) {
        snprintf(plan.folder, sizeof plan.folder, "%s", new_folder(top, "failing"));
        run_plan(plan.ends_on ? "checkpoint_calls_of_rank_2_fail" : "checkpoint_calls_of_rank_0_fail", &plan,
                 failing_calls_body);
    }
    run_crashes(top, expected, 0);
    run_crashes(top, expected, 2);
    run_other_models(top, expected);
    run_calls(top, expected);
    run_without_ranks(top, expected);
    remove_tree(top);
    return world_finish();
}
