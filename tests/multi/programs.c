#include "programs.h"

#include <stdatomic.h>
#include <string.h>

#include "reference.h"

#define GROUPS 4
#define PHASES 3
#define ITEMS 32 /* in a phase */
#define ROOM ((size_t)48 << 10)
#define LARGE_ITEMS 2 /* the last items of a phase */
#define LARGE_ROOM ((size_t)1 << 20)

/* One action of the ranks, and its group. */
struct item {
    int group;
    bool is_exchange;
    struct operation operation;
    struct exchange exchange;
};

/* This rank's part in an item. */
struct doing {
    struct item item;
    struct operation_side operation;
    struct exchange_side exchange;
    struct shoal_request *request; /* NULL: done or detached */
    bool is_spoiled;               /* it is done and was right, and its operands were overwritten since */
    bool has_callback;
    atomic_int calls;
};

struct program {
    struct world *world;
    struct world_group groups[GROUPS];
    struct areas areas;
    struct doing doings[ITEMS];
    uint64_t shared; /* random numbers that are the same on all ranks */
    uint64_t local;  /* this rank's own */
};

/* ---- Drawing ------------------------------------------------------------------------------------------------------------- */

/* Groups are any subsets in any order; the last one is a part of an earlier one. */
static void split_groups(struct program *program)
{
    program->groups[0] = world_all(program->world);
    for (int g = 1; g < GROUPS; g++) {
        int colors[WORLD_RANKS_MAX], keys[WORLD_RANKS_MAX];
        const struct world_group *parent = &program->groups[g == GROUPS - 1 ? 1 : 0];
        for (int r = 0; r < WORLD_RANKS_MAX; r++) {
            colors[r] = (int)reference_below(&program->shared, 3) - 1;
            keys[r] = (int)reference_below(&program->shared, 9) - 4;
        }
        program->groups[g] = (struct world_group){NULL, 0, {0}};
        if (parent->comm)
            program->groups[g] = world_split(program->world, parent, colors, keys);
    }
}

/* All ranks draw alike, whatever their groups, because each item has a random sequence of its own. */
static struct item draw_item(struct program *program, size_t room)
{
    struct item item = {.group = reference_below(&program->shared, 2) ? 0 : (int)reference_below(&program->shared, GROUPS)};
    const struct world_group *group = &program->groups[item.group];
    uint64_t random = reference_random(&program->shared);
    if (!group->comm)
        return item;
    random += (uint64_t)group->members[0]; /* the groups of one split do different things */
    item.is_exchange = reference_below(&random, 4) == 0;
    if (item.is_exchange)
        item.exchange = exchange_draw(&random, group->size, room);
    else
        item.operation = operation_draw(&random, group->size, room);
    return item;
}

static void prepare_items(struct program *program)
{
    size_t begin = 0;
    for (int i = 0; i < ITEMS; i++) {
        struct doing *doing = &program->doings[i];
        const size_t room = i < ITEMS - LARGE_ITEMS ? ROOM : LARGE_ROOM;
        memset(doing, 0, sizeof *doing);
        doing->item = draw_item(program, room);
        const struct world_group *group = &program->groups[doing->item.group];
        if (!group->comm)
            continue;
        const struct team team = world_team(group);
        if (doing->item.is_exchange)
            doing->exchange = exchange_prepare(&doing->item.exchange, &team, &program->areas, begin);
        else
            doing->operation = operation_prepare(&doing->item.operation, &team, &program->areas, begin);
        begin += room;
    }
}

/* ---- Doing --------------------------------------------------------------------------------------------------------------- */

/* The operation is done on this rank, whatever the others do: its result is there, and its operands may be overwritten. */
static void end_item(struct program *program, struct doing *doing)
{
    char text[512];
    if (doing->is_spoiled || !program->groups[doing->item.group].comm)
        return;
    const bool is_ok = doing->item.is_exchange ? exchange_check(&doing->exchange, text, sizeof text)
                                               : operation_check(&doing->operation, text, sizeof text);
    CHECK(program->world, is_ok, "%s", text);
    if (doing->item.is_exchange)
        exchange_spoil(&doing->exchange);
    else
        operation_spoil(&doing->operation);
    doing->is_spoiled = true;
}

static void count_call(void *arg, enum shoal_status status)
{
    struct doing *doing = arg;
    atomic_fetch_add(&doing->calls, status == SHOAL_OK ? 1 : 1000);
}

/* Sends or receives one message after the other. If one rank sends and the others receive in the same order, nobody waits
 * forever. */
static void send_blocking(struct program *program, struct shoal_comm *comm, const struct shoal_message *messages, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct shoal_message *m = &messages[i];
        if (m->is_send)
            OK(program->world, shoal_send(comm, m->buffer, m->count, m->type, m->peer, m->tag, NULL));
        else
            OK(program->world, shoal_recv(comm, m->buffer, m->count, m->type, m->peer, m->tag, NULL));
    }
}

/* Posts each message with its own request. */
static void send_singly(struct program *program, struct shoal_comm *comm, const struct shoal_message *messages, size_t count)
{
    struct shoal_request *requests[EXCHANGE_MESSAGES_MAX];
    const size_t begin = count ? reference_below(&program->local, count) : 0;
    for (size_t i = 0; i < count; i++) {
        const struct shoal_message *m = &messages[i];
        if (m->is_send)
            OK(program->world, shoal_send_post(comm, m->buffer, m->count, m->type, m->peer, m->tag, NULL, &requests[i]));
        else
            OK(program->world, shoal_recv_post(comm, m->buffer, m->count, m->type, m->peer, m->tag, NULL, &requests[i]));
    }
    for (size_t i = 0; i < count; i++) {
        struct shoal_request *request = requests[(begin + i) % count];
        OK(program->world, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
    }
}

/* An exchange with a stream stays one request: single messages on that stream would wait for those before them. */
static void start_exchange(struct program *program, struct doing *doing, bool is_blocking)
{
    struct shoal_message messages[EXCHANGE_MESSAGES_MAX];
    struct shoal_options made;
    const struct shoal_options *options = exchange_options(&doing->exchange, &made);
    struct shoal_comm *comm = program->groups[doing->item.group].comm;
    const size_t count = exchange_list(&doing->exchange, messages);
    if (!is_blocking)
        OK(program->world, shoal_exchange_post(comm, messages, count, options, &doing->request));
    else if (reference_below(&program->local, 2) || options)
        OK(program->world, shoal_exchange(comm, messages, count, options));
    else if (doing->item.exchange.pattern == EXCHANGE_ONE_TO_ALL && doing->item.exchange.tags == 1)
        send_blocking(program, comm, messages, count);
    else
        send_singly(program, comm, messages, count);
}

static void start_item(struct program *program, struct doing *doing, bool is_blocking)
{
    struct shoal_comm *comm = program->groups[doing->item.group].comm;
    if (!comm)
        return;
    if (doing->item.is_exchange)
        start_exchange(program, doing, is_blocking);
    else
        OK(program->world, operation_call(&doing->operation, comm, is_blocking ? NULL : &doing->request));
    if (!doing->request) {
        end_item(program, doing);
        return;
    }
    if (reference_below(&program->local, 3) == 0) {
        doing->has_callback = true;
        shoal_request_on_done(doing->request, count_call, doing);
    }
    if (!doing->item.is_exchange && reference_below(&program->local, 6) == 0) { /* detached */
        shoal_request_free(doing->request);
        doing->request = NULL;
    }
}

/* All ranks go through the items in one order. A rank may block in an item that another one posts. */
static void do_in_order(struct program *program)
{
    for (int i = 0; i < ITEMS; i++) {
        start_item(program, &program->doings[i], reference_below(&program->local, 2));
        struct doing *earlier = &program->doings[reference_below(&program->local, (size_t)i + 1)];
        if (earlier->request && reference_below(&program->local, 4) == 0)
            (void)!shoal_request_test(earlier->request);
    }
}

/* Only posts: in the common order on each communicator, but the communicators alternate in this rank's own order. */
static void do_interleaved(struct program *program)
{
    int next[GROUPS] = {0};
    for (int left = ITEMS; left > 0;) {
        const int g = (int)reference_below(&program->local, GROUPS);
        while (next[g] < ITEMS && program->doings[next[g]].item.group != g)
            next[g]++;
        if (next[g] == ITEMS)
            continue;
        start_item(program, &program->doings[next[g]++], false);
        left--;
    }
}

/* ---- Ending -------------------------------------------------------------------------------------------------------------- */

static void finish_item(struct program *program, struct doing *doing)
{
    if (!doing->request)
        return;
    const enum shoal_status status = shoal_request_wait(doing->request, (uint32_t)reference_below(&program->local, 3));
    CHECK(program->world, status == SHOAL_OK || status == SHOAL_PENDING, "%s", shoal_status_name(status));
    OK(program->world, shoal_request_wait(doing->request, SHOAL_FOREVER));
    shoal_request_free(doing->request);
    doing->request = NULL;
    end_item(program, doing);
}

/* Runs when all ranks are done with the item. */
static void check_item(struct program *program, struct doing *doing)
{
    char text[512];
    end_item(program, doing);
    const bool is_ok =
        !doing->is_spoiled || (doing->item.is_exchange ? exchange_is_spoiled(&doing->exchange, text, sizeof text)
                                                       : operation_is_spoiled(&doing->operation, text, sizeof text));
    CHECK(program->world, is_ok, "%s", text);
    const int calls = doing->has_callback;
    CHECK(program->world, atomic_load(&doing->calls) == calls, "the callback was called %d times, not %d",
          atomic_load(&doing->calls), calls);
}

/* Each barrier also waits for the detached operations of its communicator. */
static void run_phase(struct program *program)
{
    const size_t begin = reference_below(&program->local, ITEMS);
    prepare_items(program);
    if (reference_below(&program->shared, 2))
        do_in_order(program);
    else
        do_interleaved(program);
    for (size_t i = 0; i < ITEMS; i++)
        finish_item(program, &program->doings[(begin + i) % ITEMS]);
    for (int g = 0; g < GROUPS; g++) {
        if (program->groups[g].comm)
            OK(program->world, shoal_barrier(program->groups[g].comm, NULL));
    }
    for (int i = 0; i < ITEMS; i++)
        check_item(program, &program->doings[i]);
}

static void run_program(struct program *program, uint64_t seed)
{
    program->shared = seed;
    program->local = seed * 1000 + (uint64_t)program->world->rank + 1;
    split_groups(program);
    for (int phase = 0; phase < PHASES; phase++)
        run_phase(program);
    for (int g = 1; g < GROUPS; g++) {
        if (program->groups[g].comm && seed % 3 == 0)
            OK(program->world, shoal_comm_finalize(program->groups[g].comm));
        shoal_comm_free(program->groups[g].comm);
    }
}

void programs_run(struct world *world, const struct programs *programs)
{
    static struct program program;
    program.world = world;
    program.areas = world_open_areas(world, (ITEMS - LARGE_ITEMS) * ROOM + LARGE_ITEMS * LARGE_ROOM);
    for (uint64_t seed = programs->first; seed < programs->end; seed += programs->step) {
        world->seed = world->board[world->rank] = seed;
        run_program(&program, seed);
    }
    world->seed = 0;
    world_close_areas(world, &program.areas);
}
