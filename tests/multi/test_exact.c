/* Real processes, exact results: every collective, type and operator over sizes at every edge, in every kind of memory,
 * blocking and asynchronous, on communicators and their parts; then random programs of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "multi_world.h"
#include "reference.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define EDGE_BYTES 64 /* looked after on both sides of each output */
#define PIECE_BYTES ((size_t)262144)

/* ---- Operands ------------------------------------------------------------------------------------------------------------ */

enum memory { PLAIN, SHARED, MIXED, MEMORY_END };

/* Two areas of each kind per rank, for inputs and outputs. */
struct areas {
    size_t bytes;
    char *plain[2];
    char *shared[2];
};

static struct areas make_areas(struct world *world, size_t bytes)
{
    struct areas areas = {.bytes = bytes};
    for (int i = 0; i < 2; i++) {
        void *memory;
        areas.plain[i] = malloc(bytes + 4 * EDGE_BYTES);
        CHECK(world, areas.plain[i], "no memory");
        OK(world, shoal_mem_alloc(world->context, bytes + 4 * EDGE_BYTES, &memory));
        areas.shared[i] = memory;
    }
    return areas;
}

static void free_areas(struct world *world, struct areas *areas)
{
    for (int i = 0; i < 2; i++) {
        free(areas->plain[i]);
        OK(world, shoal_mem_free(world->context, areas->shared[i]));
    }
}

/* One call with its operands on this rank. */
struct operation {
    enum shoal_type type;
    enum shoal_op op;
    size_t count;
    int root; /* -1: an all-reduce */
    bool in_place;
    enum memory memory;
    bool is_offset; /* pointers one element off */
    uint64_t salt;
    char *input;
    char *output;
};

static bool is_shared(const struct operation *operation, int rank, int which)
{
    if (operation->memory != MIXED)
        return operation->memory == SHARED;
    return ((uint64_t)rank + operation->salt) % 2 != (which && rank % 3 == 1);
}

static void place_operands(struct operation *operation, const struct areas *areas, size_t begin, int rank)
{
    const size_t at = begin + EDGE_BYTES + (operation->is_offset ? shoal_type_bytes(operation->type) : 0);
    operation->input = (is_shared(operation, rank, 0) ? areas->shared[0] : areas->plain[0]) + at;
    operation->output =
        operation->in_place ? operation->input : (is_shared(operation, rank, 1) ? areas->shared[1] : areas->plain[1]) + at;
}

static void fill_operands(const struct operation *operation, int rank)
{
    const size_t bytes = operation->count * shoal_type_bytes(operation->type);
    const struct reference given = reference_input(operation->type, rank, operation->salt);
    memset(operation->output - EDGE_BYTES, 0xA5, bytes + 2 * EDGE_BYTES);
    reference_fill(&given, operation->input, operation->count);
}

static void check_edge(const struct world *world, const char *edge, const char *what)
{
    for (int i = 0; i < EDGE_BYTES; i++)
        CHECK(world, (unsigned char)edge[i] == 0xA5, "wrote beyond the %s of the output", what);
}

static void describe(const struct operation *operation, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s %d of %zu, type %d, op %d, %s, memory %d%s, salt %llu",
             operation->root < 0 ? "all-reduce" : "broadcast", operation->root, operation->count, (int)operation->type,
             (int)operation->op, operation->in_place ? "in place" : "apart", (int)operation->memory,
             operation->is_offset ? ", offset" : "", (unsigned long long)operation->salt);
}

/* For a communicator of `size` ranks whose rank i gave what the formula says for number numbers[i] (NULL: i). */
static struct reference expect(const struct operation *operation, int size, const int *numbers)
{
    if (operation->root >= 0)
        return reference_input(operation->type, numbers ? numbers[operation->root] : operation->root, operation->salt);
    if (!numbers)
        return reference_result(operation->type, operation->op, size, operation->salt);
    struct reference wanted = {.element = shoal_type_bytes(operation->type)};
    for (size_t i = 0; i < REFERENCE_PERIOD; i++) {
        int sum = 0, max = -100;
        for (int r = 0; r < size; r++) {
            const int value = reference_value(numbers[r], operation->salt, i);
            sum += value;
            max = value > max ? value : max;
        }
        reference_put(&wanted, operation->type, i, operation->op == SHOAL_MAX ? max : sum,
                      operation->op == SHOAL_AVG ? size : 1);
    }
    return wanted;
}

static void check_operands(const struct world *world, const struct operation *operation, int size, const int *numbers,
                           int number)
{
    char text[256];
    const size_t bytes = operation->count * shoal_type_bytes(operation->type);
    const struct reference wanted = expect(operation, size, numbers);
    const long wrong = reference_compare(&wanted, operation->output, operation->count);
    describe(operation, text, sizeof text);
    CHECK(world, wrong < 0, "%s: wrong from element %ld on", text, wrong);
    check_edge(world, operation->output - EDGE_BYTES, text);
    check_edge(world, operation->output + bytes, text);
    if (operation->in_place)
        return;
    const struct reference given = reference_input(operation->type, number, operation->salt);
    CHECK(world, reference_compare(&given, operation->input, operation->count) < 0, "%s: changed the input", text);
}

static enum shoal_status call_now(struct shoal_comm *comm, const struct operation *o)
{
    if (o->root < 0)
        return shoal_allreduce(comm, o->input, o->output, o->count, o->type, o->op, NULL);
    const void *input = o->root == shoal_comm_rank(comm) ? o->input : NULL;
    return shoal_broadcast(comm, input, o->output, o->count, o->type, o->root, NULL);
}

static enum shoal_status call_post(struct shoal_comm *comm, const struct operation *o, struct shoal_request **request_out)
{
    if (o->root < 0)
        return shoal_allreduce_post(comm, o->input, o->output, o->count, o->type, o->op, NULL, request_out);
    const void *input = o->root == shoal_comm_rank(comm) ? o->input : NULL;
    return shoal_broadcast_post(comm, input, o->output, o->count, o->type, o->root, NULL, request_out);
}

static void run_one(struct world *world, const struct areas *areas, struct operation operation)
{
    char text[256];
    place_operands(&operation, areas, 0, world->rank);
    fill_operands(&operation, world->rank);
    describe(&operation, text, sizeof text);
    const enum shoal_status status = call_now(world->comm, &operation);
    CHECK(world, status == SHOAL_OK, "%s gave %s", text, shoal_status_name(status));
    check_operands(world, &operation, world->size, NULL, world->rank);
}

/* ---- All-reduce and broadcast, one by one -------------------------------------------------------------------------------- */

static void allreduce_small(struct world *world, const struct areas *areas)
{
    uint64_t salt = 0;
    for (enum shoal_type type = 0; type < SHOAL_TYPE_END; type++) {
        const size_t edge = 4096 / shoal_type_bytes(type);
        const size_t counts[] = {
            0, 1, 3, 16 / shoal_type_bytes(type), 16 / shoal_type_bytes(type) + 1, 1023, 1024, 1025, edge - 1, edge, edge + 1};
        for (enum shoal_op op = 0; op < SHOAL_OP_END; op++) {
            for (size_t i = 0; i < COUNT_OF(counts) * MEMORY_END * 4; i++) {
                const struct operation operation = {.type = type,
                                                    .op = op,
                                                    .count = counts[i / MEMORY_END / 4],
                                                    .root = -1,
                                                    .memory = i / 4 % MEMORY_END,
                                                    .in_place = i % 2,
                                                    .is_offset = i / 2 % 2,
                                                    .salt = salt++};
                run_one(world, areas, operation);
            }
        }
    }
}

/* Each combination of memory, place and offset; type and operator take turns. */
static void allreduce_large(struct world *world, const struct areas *areas, const size_t *bytes, size_t sizes, bool is_full)
{
    uint64_t salt = 0;
    for (size_t i = 0; i < sizes; i++) {
        for (int way = 0; way < MEMORY_END * 4; way++, salt++) {
            for (unsigned turn = 0; turn < (is_full ? SHOAL_TYPE_END : 1); turn++) {
                const enum shoal_type type = (enum shoal_type)((salt + turn) % SHOAL_TYPE_END);
                const size_t element = shoal_type_bytes(type);
                const struct operation operation = {.type = type,
                                                    .op = (enum shoal_op)((salt / 4 + turn) % SHOAL_OP_END),
                                                    .count = bytes[i] / element + (i % 3) - 1,
                                                    .root = -1,
                                                    .memory = (enum memory)(way / 4),
                                                    .in_place = way % 2,
                                                    .is_offset = way / 2 % 2,
                                                    .salt = salt};
                run_one(world, areas, operation);
            }
        }
    }
}

static void allreduce_body(struct world *world)
{
    const size_t pieces[] = {PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES * (size_t)world->size, 4 * PIECE_BYTES + 4096};
    struct areas areas = make_areas(world, 12500000);
    allreduce_small(world, &areas);
    allreduce_large(world, &areas, pieces, COUNT_OF(pieces), world->size <= 4);
    const size_t huge[] = {12345678, (((size_t)1 << 20) + 7) * 4};
    if (world->size <= 4)
        allreduce_large(world, &areas, huge, COUNT_OF(huge), false);
    free_areas(world, &areas);
}

static void broadcast_body(struct world *world)
{
    static const size_t bytes[] = {
        0, 8, 16, 24, 4088, 4096, 4104, PIECE_BYTES - 8, PIECE_BYTES, PIECE_BYTES + 8, 5 * PIECE_BYTES + 4096};
    struct areas areas = make_areas(world, 2 << 20);
    uint64_t salt = 0;
    for (int root = 0; root < world->size; root++) {
        for (size_t i = 0; i < COUNT_OF(bytes) * MEMORY_END * 4; i++, salt++) {
            const enum shoal_type type = (enum shoal_type)(salt % SHOAL_TYPE_END);
            const struct operation operation = {.type = type,
                                                .count = bytes[i / MEMORY_END / 4] / shoal_type_bytes(type),
                                                .root = root,
                                                .memory = i / 4 % MEMORY_END,
                                                .in_place = i % 2,
                                                .is_offset = i / 2 % 2,
                                                .salt = salt};
            run_one(world, &areas, operation);
        }
        OK(world, shoal_barrier(world->comm, NULL));
    }
    free_areas(world, &areas);
}

/* ---- Asynchronous -------------------------------------------------------------------------------------------------------- */

#define POSTED_MAX 64
#define POSTED_ROOM ((size_t)96 << 10)

static struct operation draw_operation(uint64_t *random, int size, size_t room)
{
    static const size_t bytes[] = {0, 8, 16, 40, 4096, 4104, 16384, 65536, 81920};
    const enum shoal_type type = (enum shoal_type)reference_below(random, SHOAL_TYPE_END);
    struct operation operation = {.type = type,
                                  .op = (enum shoal_op)reference_below(random, SHOAL_OP_END),
                                  .root = reference_below(random, 3) ? -1 : (int)reference_below(random, (size_t)size),
                                  .memory = (enum memory)reference_below(random, MEMORY_END),
                                  .in_place = reference_below(random, 2),
                                  .is_offset = reference_below(random, 2),
                                  .salt = reference_below(random, 31)};
    const size_t most = room - 4 * EDGE_BYTES;
    const size_t wanted =
        reference_below(random, 2) ? bytes[reference_below(random, COUNT_OF(bytes))] : reference_below(random, 50000);
    operation.count = (wanted < most ? wanted : most) / shoal_type_bytes(type);
    if (operation.root >= 0)
        operation.op = SHOAL_SUM;
    return operation;
}

static void shuffle(int *order, int count, uint64_t *random)
{
    for (int i = 0; i < count; i++)
        order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        const int j = (int)reference_below(random, (size_t)i + 1), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

static void post_and_wait(struct world *world, const struct areas *areas, int count, uint64_t seed)
{
    struct operation operations[POSTED_MAX];
    struct shoal_request *requests[POSTED_MAX];
    int order[POSTED_MAX];
    uint64_t random = seed, local = seed * 31 + (uint64_t)world->rank;
    for (int i = 0; i < count; i++) {
        operations[i] = draw_operation(&random, world->size, POSTED_ROOM);
        place_operands(&operations[i], areas, (size_t)i * POSTED_ROOM, world->rank);
        fill_operands(&operations[i], world->rank);
    }
    for (int i = 0; i < count; i++)
        OK(world, call_post(world->comm, &operations[i], &requests[i]));
    shuffle(order, count, &local);
    for (int n = 0; n < count; n++) {
        const int i = order[n];
        enum shoal_status status = shoal_request_wait(requests[i], (uint32_t)reference_below(&local, 3));
        CHECK(world, status == SHOAL_OK || status == SHOAL_PENDING, "seed %llu: %s", (unsigned long long)seed,
              shoal_status_name(status));
        if (reference_below(&local, 4) == 0)
            status = shoal_request_test(requests[i]);
        OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        check_operands(world, &operations[i], world->size, NULL, world->rank);
        shoal_request_free(requests[i]);
    }
}

static void async_body(struct world *world)
{
    struct areas areas = make_areas(world, POSTED_MAX * POSTED_ROOM);
    for (uint64_t seed = 1; seed <= 12; seed++)
        post_and_wait(world, &areas, seed % 3 == 0 ? 9 : seed % 3 == 1 ? 20 : POSTED_MAX, seed);
    free_areas(world, &areas);
}

/* Nobody waits for these: the progress thread brings them to their end, and the barrier comes after them. */
static void detached_body(struct world *world)
{
    struct areas areas = make_areas(world, POSTED_MAX * POSTED_ROOM);
    struct operation operations[POSTED_MAX];
    uint64_t random = 7;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 45; i++) {
            struct shoal_request *request;
            operations[i] = draw_operation(&random, world->size, POSTED_ROOM);
            place_operands(&operations[i], &areas, (size_t)i * POSTED_ROOM, world->rank);
            fill_operands(&operations[i], world->rank);
            OK(world, call_post(world->comm, &operations[i], &request));
            shoal_request_free(request);
        }
        OK(world, shoal_barrier(world->comm, NULL));
        for (int i = 0; i < 45; i++)
            check_operands(world, &operations[i], world->size, NULL, world->rank);
    }
    free_areas(world, &areas);
}

/* A chain: each operation's callback posts the next. All run on whichever thread drives. */
struct chain {
    struct world *world;
    struct areas *areas;
    struct operation operations[POSTED_MAX];
    struct shoal_request *requests[POSTED_MAX];
    int posted;
    int length;
    _Atomic int done;
};

static void go_on(void *arg, enum shoal_status status)
{
    struct chain *chain = arg;
    OK(chain->world, status);
    if (chain->posted < chain->length) {
        const int i = chain->posted++;
        OK(chain->world, call_post(chain->world->comm, &chain->operations[i], &chain->requests[i]));
        shoal_request_on_done(chain->requests[i], go_on, chain);
    }
    chain->done++;
}

static void wait_until(struct world *world, _Atomic int *value, int wanted)
{
    for (int ms = 0; *value < wanted; ms++) {
        const struct timespec moment = {0, 1000000};
        CHECK(world, ms < 20000, "only %d of %d came", *value, wanted);
        nanosleep(&moment, NULL);
    }
}

static void callback_body(struct world *world)
{
    struct areas areas = make_areas(world, POSTED_MAX * POSTED_ROOM);
    for (int round = 0; round < 6; round++) {
        struct chain chain = {.world = world, .areas = &areas, .length = 40};
        uint64_t random = (uint64_t)round;
        for (int i = 0; i < chain.length; i++) {
            chain.operations[i] = draw_operation(&random, world->size, POSTED_ROOM);
            place_operands(&chain.operations[i], &areas, (size_t)i * POSTED_ROOM, world->rank);
            fill_operands(&chain.operations[i], world->rank);
        }
        chain.posted = 1;
        OK(world, call_post(world->comm, &chain.operations[0], &chain.requests[0]));
        shoal_request_on_done(chain.requests[0], go_on, &chain);
        wait_until(world, &chain.done, chain.length); /* nobody drives but the progress thread */
        for (int i = 0; i < chain.length; i++) {
            OK(world, shoal_request_wait(chain.requests[i], SHOAL_FOREVER));
            shoal_request_free(chain.requests[i]);
            check_operands(world, &chain.operations[i], world->size, NULL, world->rank);
        }
    }
    free_areas(world, &areas);
}

/* ---- Send and receive ---------------------------------------------------------------------------------------------------- */

static void check_message(struct world *world, const char *memory, size_t bytes, int from, uint64_t salt)
{
    struct reference wanted = reference_input(SHOAL_INT64, from, salt);
    wanted.element = 1; /* bytes of the sequence, whatever their number */
    struct reference whole = {.element = 1};
    memcpy(whole.bytes, wanted.bytes, REFERENCE_PERIOD);
    const long wrong = reference_compare(&whole, memory, bytes);
    CHECK(world, wrong < 0, "message of %zu bytes from rank %d, salt %llu: wrong from byte %ld on", bytes, from,
          (unsigned long long)salt, wrong);
    check_edge(world, memory + bytes, "message");
}

static void fill_message(char *memory, size_t bytes, int from, uint64_t salt)
{
    struct reference given = reference_input(SHOAL_INT64, from, salt);
    given.element = 1;
    reference_fill(&given, memory, bytes);
}

/* Bytes as bfloat16 where even, so that every number of bytes but odd ones can be named; else as they are, in two-byte
 * elements. */
static size_t elements_of(size_t bytes)
{
    return bytes / 2;
}

static const size_t message_bytes[] = {0, 2, 8190, 8192, 8194, 65536, (1 << 20) + 2};

/* A ring: each sends to the next, the even ones first, the odd ones after they have received. */
static void ring_blocking(struct world *world, const struct areas *areas, size_t bytes, int memory)
{
    const int next = (world->rank + 1) % world->size, last = (world->rank + world->size - 1) % world->size;
    char *from = memory % 2 ? areas->shared[0] : areas->plain[0], *to = memory / 2 ? areas->shared[1] : areas->plain[1];
    fill_message(from, bytes, world->rank, bytes);
    memset(to, 0xA5, bytes + EDGE_BYTES);
    for (int turn = 0; turn < 2; turn++) {
        if ((world->rank + turn) % 2 == 0)
            OK(world, shoal_send(world->comm, from, elements_of(bytes), SHOAL_BFLOAT16, next, 5, NULL));
        else
            OK(world, shoal_recv(world->comm, to, elements_of(bytes), SHOAL_BFLOAT16, last, 5, NULL));
    }
    check_message(world, to, bytes, last, bytes);
}

static void message_body(struct world *world)
{
    struct areas areas = make_areas(world, 4 << 20);
    struct shoal_request *requests[32];
    for (size_t i = 0; i < COUNT_OF(message_bytes) && world->size % 2 == 0; i++) {
        for (int memory = 0; memory < 4; memory++)
            ring_blocking(world, &areas, message_bytes[i], memory);
    }
    /* Everybody with everybody at once, in both directions, four tags; received in another order than sent. */
    for (int round = 0; round < 24; round++) {
        const size_t bytes = message_bytes[(size_t)round % COUNT_OF(message_bytes)] % 200000;
        for (int step = 1; step < world->size; step++) {
            const int to = (world->rank + step) % world->size, from = (world->rank + world->size - step) % world->size;
            const size_t room = bytes + EDGE_BYTES;
            char *out = round % 2 ? areas.shared[0] : areas.plain[0], *in = round / 2 % 2 ? areas.shared[1] : areas.plain[1];
            for (int tag = 0; tag < 4; tag++) {
                fill_message(out + (size_t)tag * room, bytes, world->rank, (uint64_t)(round * 4 + tag));
                memset(in + (size_t)tag * room, 0xA5, room);
            }
            for (int tag = 0; tag < 4 && round % 3 == 0; tag++) /* receives are there before */
                OK(world, shoal_recv_post(world->comm, in + (size_t)(3 - tag) * room, elements_of(bytes), SHOAL_BFLOAT16, from,
                                          3 - tag, NULL, &requests[4 + 3 - tag]));
            for (int tag = 0; tag < 4; tag++)
                OK(world, shoal_send_post(world->comm, out + (size_t)tag * room, elements_of(bytes), SHOAL_BFLOAT16, to, tag,
                                          NULL, &requests[tag]));
            if (round % 3 == 1)
                OK(world, shoal_barrier(world->comm, NULL)); /* messages wait for their receives, collectives pass them */
            for (int tag = 3; tag >= 0 && round % 3 != 0; tag--)
                OK(world, shoal_recv_post(world->comm, in + (size_t)tag * room, elements_of(bytes), SHOAL_BFLOAT16, from, tag,
                                          NULL, &requests[4 + tag]));
            for (int i = 7; i >= 0; i--) {
                OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
                shoal_request_free(requests[i]);
            }
            for (int tag = 0; tag < 4; tag++)
                check_message(world, in + (size_t)tag * room, bytes, from, (uint64_t)(round * 4 + tag));
        }
    }
    /* First in, first out for one tag, small behind large. */
    for (int i = 0; i < 8; i++) {
        const size_t bytes = i % 2 ? 100 : 30000;
        char *out = areas.plain[0] + i * 40000, *in = areas.plain[1] + i * 40000;
        fill_message(out, bytes, world->rank, (uint64_t)i);
        memset(in, 0xA5, bytes + EDGE_BYTES);
        OK(world, shoal_send_post(world->comm, out, elements_of(bytes), SHOAL_BFLOAT16, (world->rank + 1) % world->size, 9,
                                  NULL, &requests[i]));
        OK(world, shoal_recv_post(world->comm, in, elements_of(bytes), SHOAL_BFLOAT16,
                                  (world->rank + world->size - 1) % world->size, 9, NULL, &requests[8 + i]));
    }
    for (int i = 0; i < 16; i++) {
        OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
    }
    for (int i = 0; i < 8; i++)
        check_message(world, areas.plain[1] + i * 40000, i % 2 ? 100 : 30000, (world->rank + world->size - 1) % world->size,
                      (uint64_t)i);
    free_areas(world, &areas);
}

/* A small send ends without its receive; one to itself is refused, and nothing is lost. */
static void eager_body(struct world *world)
{
    static char buffer[8192 + EDGE_BYTES], received[8192 + EDGE_BYTES];
    const int other = 1 - world->rank;
    CHECK(world, shoal_send(world->comm, buffer, 1, SHOAL_FLOAT32, world->rank, 0, NULL) == SHOAL_ERR_ARGUMENT,
          "sent to itself");
    CHECK(world, shoal_recv(world->comm, buffer, 1, SHOAL_FLOAT32, world->rank, 0, NULL) == SHOAL_ERR_ARGUMENT,
          "received from itself");
    for (int i = 0; i < 5; i++) {
        fill_message(buffer, 8192, world->rank, (uint64_t)i);
        OK(world, shoal_send(world->comm, buffer, 4096, SHOAL_BFLOAT16, other, i, NULL));
    }
    for (int i = 4; i >= 0; i--) {
        memset(received, 0xA5, sizeof received);
        OK(world, shoal_recv(world->comm, received, 4096, SHOAL_BFLOAT16, other, i, NULL));
        check_message(world, received, 8192, other, (uint64_t)i);
    }
}

/* Each receive's callback posts the next one: every message arrives once. */
struct receiver {
    struct world *world;
    struct shoal_request *requests[32];
    int64_t values[32];
    int posted;
    _Atomic int done;
};

static void receive_next(void *arg, enum shoal_status status)
{
    struct receiver *receiver = arg;
    struct world *world = receiver->world;
    OK(world, status);
    if (receiver->posted < 32) {
        const int i = receiver->posted++;
        OK(world, shoal_recv_post(world->comm, &receiver->values[i], 1, SHOAL_INT64, 1 - world->rank, 0, NULL,
                                  &receiver->requests[i]));
        shoal_request_on_done(receiver->requests[i], receive_next, receiver);
    }
    receiver->done++;
}

static void receive_callback_body(struct world *world)
{
    for (int round = 0; round < 20; round++) {
        struct receiver receiver = {.world = world};
        receiver.done = -1;
        receive_next(&receiver, SHOAL_OK);
        for (int64_t i = 0; i < 32; i++)
            OK(world, shoal_send(world->comm, &i, 1, SHOAL_INT64, 1 - world->rank, 0, NULL));
        wait_until(world, &receiver.done, 32);
        for (int i = 0; i < 32; i++) {
            OK(world, shoal_request_wait(receiver.requests[i], SHOAL_FOREVER));
            shoal_request_free(receiver.requests[i]);
            CHECK(world, receiver.values[i] == i, "message %d has %lld", i, (long long)receiver.values[i]);
        }
    }
}

/* ---- Split --------------------------------------------------------------------------------------------------------------- */

/* A communicator and the world ranks of its members. */
struct group {
    struct shoal_comm *comm;
    int size;
    int members[WORLD_RANKS_MAX];
};

static int color_of(int shape, int rank, int size)
{
    switch (shape) {
    case 0:
        return rank % 2;
    case 1:
        return 3;
    case 2:
        return rank;
    case 3:
        return rank * 2 < size ? 0 : -1;
    case 4:
        return rank / 3;
    default:
        return 7;
    }
}

static int key_of(int shape, int rank)
{
    return shape == 5 ? -rank : shape == 4 ? rank * 7 % 4 : 0;
}

/* What the members must be, by plain counting: for each key in ascending order, ranks in ascending order. */
static struct group expect_group(const struct group *parent, int shape, int own)
{
    struct group group = {NULL, 0, {0}};
    for (int key = -100; key <= 100; key++) {
        for (int r = 0; r < parent->size; r++) {
            if (color_of(shape, r, parent->size) == color_of(shape, own, parent->size) && key_of(shape, r) == key)
                group.members[group.size++] = parent->members[r];
        }
    }
    return group;
}

static struct group split_group(struct world *world, const struct group *parent, int shape)
{
    const int own = shoal_comm_rank(parent->comm), color = color_of(shape, own, parent->size);
    struct group group = expect_group(parent, shape, own);
    OK(world, shoal_comm_split(parent->comm, color, key_of(shape, own), NULL, &group.comm));
    if (color < 0) {
        CHECK(world, !group.comm, "a negative color gave a communicator");
        group.size = 0;
        return group;
    }
    CHECK(world, shoal_comm_size(group.comm) == group.size, "shape %d: size %d, not %d", shape, shoal_comm_size(group.comm),
          group.size);
    CHECK(world, group.members[shoal_comm_rank(group.comm)] == world->rank, "shape %d: rank %d is not mine", shape,
          shoal_comm_rank(group.comm));
    return group;
}

static void use_group(struct world *world, const struct areas *areas, const struct group *group, uint64_t seed)
{
    uint64_t random = seed;
    for (int i = 0; i < 6 && group->comm; i++) {
        struct operation operation = draw_operation(&random, group->size, POSTED_ROOM);
        place_operands(&operation, areas, 0, world->rank);
        fill_operands(&operation, world->rank);
        OK(world, call_now(group->comm, &operation));
        check_operands(world, &operation, group->size, group->members, world->rank);
    }
}

static struct group whole(const struct world *world)
{
    struct group group = {world->comm, world->size, {0}};
    for (int r = 0; r < world->size; r++)
        group.members[r] = r;
    return group;
}

static void split_body(struct world *world)
{
    struct areas areas = make_areas(world, POSTED_ROOM);
    const struct group all = whole(world);
    for (int shape = 0; shape < 6; shape++) {
        struct group child = split_group(world, &all, shape);
        use_group(world, &areas, &child, (uint64_t)shape);
        for (int second = 0; second < 6 && child.comm; second += 2) {
            struct group grandchild = split_group(world, &child, second);
            use_group(world, &areas, &grandchild, (uint64_t)(shape * 10 + second));
            if (second == 2)
                shoal_comm_free(child.comm); /* its parts live on */
            else if (grandchild.comm)
                OK(world, shoal_comm_finalize(grandchild.comm));
            if (second == 2)
                child.comm = NULL;
            shoal_comm_free(grandchild.comm);
        }
        shoal_comm_free(child.comm);
        use_group(world, &areas, &all, (uint64_t)shape);
    }
    free_areas(world, &areas);
}

/* ---- Random programs ----------------------------------------------------------------------------------------------------- */

#define GROUPS 3
#define PER_GROUP 16
#define GROUP_ROOM ((size_t)40 << 10)

/* Posts on several communicators, on each in the order all ranks share, between them in an order of this rank's own. */
static void run_interleaved(struct world *world, const struct areas *areas, const struct group *groups, uint64_t seed)
{
    struct operation operations[GROUPS][PER_GROUP];
    struct shoal_request *requests[GROUPS][PER_GROUP];
    int next[GROUPS] = {0}, left = 0;
    uint64_t random = seed, local = seed * 1000 + (uint64_t)world->rank;
    for (int g = 0; g < GROUPS; g++) {
        random = seed * GROUPS + (uint64_t)g;
        for (int i = 0; i < PER_GROUP && groups[g].comm; i++, left++) {
            operations[g][i] = draw_operation(&random, groups[g].size, GROUP_ROOM);
            place_operands(&operations[g][i], areas, (size_t)(g * PER_GROUP + i) * GROUP_ROOM, world->rank);
            fill_operands(&operations[g][i], world->rank);
        }
    }
    while (left) {
        const int g = (int)reference_below(&local, GROUPS);
        if (!groups[g].comm || next[g] == PER_GROUP)
            continue;
        OK(world, call_post(groups[g].comm, &operations[g][next[g]], &requests[g][next[g]]));
        next[g]++;
        left--;
        if (reference_below(&local, 8) == 0)
            (void)!shoal_request_test(requests[g][next[g] - 1]);
    }
    for (int n = 0; n < GROUPS * PER_GROUP; n++) {
        const int g = (n + world->rank) % GROUPS, i = n / GROUPS;
        if (!groups[g].comm)
            continue;
        const enum shoal_status status = shoal_request_wait(requests[g][i], SHOAL_FOREVER);
        CHECK(world, status == SHOAL_OK, "seed %llu: %s", (unsigned long long)seed, shoal_status_name(status));
        shoal_request_free(requests[g][i]);
        check_operands(world, &operations[g][i], groups[g].size, groups[g].members, world->rank);
    }
}

/* Blocking and posted calls of the world in one order, with messages between neighbours under way. */
static void run_mixed(struct world *world, const struct areas *areas, uint64_t seed)
{
    struct operation operations[24];
    struct shoal_request *requests[24], *messages[2];
    uint64_t random = seed, local = seed * 1000 + (uint64_t)world->rank;
    const size_t bytes = message_bytes[reference_below(&random, 6)];
    const int next = (world->rank + 1) % world->size, last = (world->rank + world->size - 1) % world->size;
    static char out[70000], in[70000];
    fill_message(out, bytes, world->rank, seed);
    memset(in, 0xA5, sizeof in);
    OK(world, shoal_send_post(world->comm, out, elements_of(bytes), SHOAL_BFLOAT16, next, 1, NULL, &messages[0]));
    for (int i = 0; i < 24; i++) {
        operations[i] = draw_operation(&random, world->size, GROUP_ROOM);
        place_operands(&operations[i], areas, (size_t)i * GROUP_ROOM, world->rank);
        fill_operands(&operations[i], world->rank);
    }
    for (int i = 0; i < 24; i++) {
        requests[i] = NULL;
        if (i == 12)
            OK(world, shoal_recv_post(world->comm, in, elements_of(bytes), SHOAL_BFLOAT16, last, 1, NULL, &messages[1]));
        if (reference_below(&local, 3) == 0) /* one rank may block where another posts */
            OK(world, call_now(world->comm, &operations[i]));
        else
            OK(world, call_post(world->comm, &operations[i], &requests[i]));
    }
    for (int i = 0; i < 24; i++) {
        if (requests[i])
            OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
        check_operands(world, &operations[i], world->size, NULL, world->rank);
    }
    for (int i = 0; i < 2; i++) {
        OK(world, shoal_request_wait(messages[i], SHOAL_FOREVER));
        shoal_request_free(messages[i]);
    }
    check_message(world, in, bytes, last, seed);
}

static void programs_body(struct world *world)
{
    const uint64_t *range = world->arg;
    struct areas areas = make_areas(world, GROUPS * PER_GROUP * GROUP_ROOM);
    const struct group all = whole(world);
    for (uint64_t seed = range[0]; seed < range[1]; seed++) {
        struct group groups[GROUPS] = {all};
        world->board[0] = seed;
        groups[1] = split_group(world, &all, (int)(seed % 6));
        groups[2] = split_group(world, &all, (int)((seed + 1) % 6));
        run_mixed(world, &areas, seed);
        run_interleaved(world, &areas, groups, seed);
        shoal_comm_free(groups[1].comm);
        shoal_comm_free(groups[2].comm);
    }
    free_areas(world, &areas);
}

/* ---- The same bits ------------------------------------------------------------------------------------------------------- */

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001B3);
    return hash;
}

/* Random floats of very different size: every other order of summation gives other bits. */
static void bits_body(struct world *world)
{
    static const size_t counts[] = {1, 7, 500, 1024, 5000, 70001, 400003};
    struct areas areas = make_areas(world, 400003 * 8);
    uint64_t random = 11 + (uint64_t)world->rank, hash = UINT64_C(0xCBF29CE484222325);
    for (unsigned turn = 0; turn < COUNT_OF(counts) * 4; turn++) {
        const bool is_shared = turn % 2, is_double = turn / 2 % 2;
        const size_t count = counts[turn / 4];
        char *input = is_shared ? areas.shared[0] : areas.plain[0], *output = is_shared ? areas.shared[1] : areas.plain[1];
        for (size_t i = 0; i < count; i++) {
            const double value =
                (double)(int64_t)reference_random(&random) / (double)(UINT64_C(1) << (reference_random(&random) % 62));
            const float single = (float)value;
            if (is_double)
                memcpy(input + i * 8, &value, 8);
            else
                memcpy(input + i * 4, &single, 4);
        }
        OK(world, shoal_allreduce(world->comm, input, output, count, is_double ? SHOAL_FLOAT64 : SHOAL_FLOAT32,
                                  turn % 3 ? SHOAL_SUM : SHOAL_AVG, NULL));
        hash = hash_of(hash, output, count * (is_double ? 8 : 4));
    }
    world->board[world->rank] = hash;
    free_areas(world, &areas);
}

static void run_same_bits(int size)
{
    static const char *const sets[] = {"auto", "auto", "baseline", "avx2", "avx512"};
    uint64_t first = 0;
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        char setting[64], name[96];
        const char *settings[] = {setting, NULL};
        struct shoal_context *context;
        struct shoal_context_options options = SHOAL_CONTEXT_OPTIONS_INIT;
        snprintf(setting, sizeof setting, "SHOAL_KERNELS=%s", sets[i]);
        snprintf(name, sizeof name, "random floats, %d ranks, kernels %s", size, sets[i]);
        options.settings = settings;
        if (shoal_context_create(&options, &context) != SHOAL_OK) {
            printf("# this processor has no kernels %s\n", sets[i]);
            continue;
        }
        shoal_context_destroy(context);
        const struct world_options world = {name, size, settings, bits_body, NULL};
        memset(world_board(), 0, WORLD_BOARD * sizeof(uint64_t));
        world_run(&world);
        const uint64_t *board = world_board();
        bool is_same = board[0] != 0;
        for (int r = 1; r < size; r++)
            is_same &= board[r] == board[0];
        first = i == 0 ? board[0] : first;
        snprintf(name, sizeof name, "the same bits on %d ranks, and as in the first run, kernels %s", size, sets[i]);
        world_report(is_same && board[0] == first, name);
    }
}

/* ---- The list ------------------------------------------------------------------------------------------------------------ */

static void run(const char *subject, int size, const char *const *settings, world_body_fn body, const void *arg)
{
    char name[128];
    snprintf(name, sizeof name, "%s, %d rank%s%s%s", subject, size, size == 1 ? "" : "s", settings ? ", " : "",
             settings ? settings[0] : "");
    const struct world_options options = {name, size, settings, body, arg};
    world_run(&options);
}

static void small_settings_body(struct world *world)
{
    static const uint64_t range[] = {500, 504};
    const size_t sizes[] = {8192, 12288, 40000};
    struct areas areas = make_areas(world, 1 << 20);
    allreduce_large(world, &areas, sizes, COUNT_OF(sizes), true);
    free_areas(world, &areas);
    world->arg = range;
    programs_body(world);
}

int main(void)
{
    static const int sizes[] = {1, 2, 3, 4, 7, 8};
    static const char *const settings[][4] = {
        {"SHOAL_PIECE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=1", "SHOAL_PIECE_BYTES=4096", NULL},
        {"SHOAL_DEPTH=16", "SHOAL_PIECE_BYTES=4096", NULL},
        {"SHOAL_DIRECT_BYTES=0", "SHOAL_PIECE_BYTES=4096", NULL},
        {"SHOAL_COUNTER_START=4294967280", "SHOAL_PIECE_BYTES=4096", NULL},
        {"SHOAL_STORES=streaming", NULL},
        {"SHOAL_STORES=cached", NULL},
        {"SHOAL_SPIN_US=0", "SHOAL_YIELD_US=0", NULL},
    };
    static const uint64_t ranges[4][2] = {{0, 50}, {50, 100}, {100, 150}, {150, 200}};
    static const char *const kernels[][2] = {{"SHOAL_KERNELS=baseline", NULL}, {"SHOAL_KERNELS=auto", NULL}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        run("all-reduce", sizes[i], NULL, allreduce_body, NULL);
    for (size_t i = 0; i < COUNT_OF(kernels); i++)
        run("all-reduce", 3, kernels[i], allreduce_body, NULL);
    run("broadcast", 1, NULL, broadcast_body, NULL);
    run("broadcast", 2, NULL, broadcast_body, NULL);
    run("broadcast", 5, NULL, broadcast_body, NULL);
    run("asynchronous operations", 1, NULL, async_body, NULL);
    run("asynchronous operations", 2, NULL, async_body, NULL);
    run("asynchronous operations", 4, NULL, async_body, NULL);
    run("detached requests", 3, NULL, detached_body, NULL);
    run("callbacks that post", 1, NULL, callback_body, NULL);
    run("callbacks that post", 2, NULL, callback_body, NULL);
    run("callbacks that post", 3, NULL, callback_body, NULL);
    run("messages", 2, NULL, message_body, NULL);
    run("messages", 5, NULL, message_body, NULL);
    run("eager messages", 2, NULL, eager_body, NULL);
    run("receives posted by callbacks", 2, NULL, receive_callback_body, NULL);
    run("splits", 1, NULL, split_body, NULL);
    run("splits", 4, NULL, split_body, NULL);
    run("splits", 7, NULL, split_body, NULL);
    for (int i = 0; i < 4; i++)
        run("random programs", 2 + i, NULL, programs_body, ranges[i]);
    for (size_t i = 0; i < COUNT_OF(settings); i++)
        run("small settings", 3, settings[i], small_settings_body, NULL);
    run_same_bits(2);
    run_same_bits(3);
    return world_finish();
}
