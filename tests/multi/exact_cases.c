#include "exact_cases.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "operations.h"
#include "reference.h"
#include "shoal/gradients.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define CHUNK_BYTES ((size_t)262144)
#define DIRECT_BYTES ((size_t)16384)
#define INLINE_BYTES ((size_t)16)
#define PAGE_BYTES ((size_t)4096)
#define WAYS (2 * 2 * MEMORY_END) /* in place or apart, aligned to a line or not, in each kind of memory */

/* ---- One by one ---------------------------------------------------------------------------------------------------------- */

static void check_side(const struct world *world, const struct operation_side *side)
{
    char text[512];
    CHECK(world, operation_check(side, text, sizeof text), "%s", text);
}

void exact_run_in(struct world *world, const struct world_group *group, const struct areas *areas,
                  const struct operation *operation)
{
    char text[256];
    const struct team team = world_team(group);
    CHECK(world, operation_room(operation, group->size) <= areas->bytes, "the test has too little memory");
    const struct operation_side side = operation_prepare(operation, &team, areas, 0);
    const enum shoal_status status = operation_call(&side, group->comm, NULL);
    operation_describe(operation, text, sizeof text);
    CHECK(world, status == SHOAL_OK, "%s gave %s", text, shoal_status_name(status));
    check_side(world, &side);
}

void exact_run_one(struct world *world, const struct areas *areas, const struct operation *operation)
{
    const struct world_group all = world_all(world);
    exact_run_in(world, &all, areas, operation);
}

#define THIRDS 3
#define NINTHS 9 /* on a device, through whose memory all types and operators take the same path */

/* Returns true if this world tests a combination; `sum` is the sum of the combination's numbers. A world tests a third of
 * all, on a device one in `on_device`. All values of any two dimensions still occur together, and worlds of other sizes
 * test the others. Operands in host memory are left to worlds without a device. */
static bool is_asked(const struct world *world, size_t on_device, const struct operation *operation, size_t sum)
{
    if (world->device && operation->memory == MEMORY_PLAIN)
        return false;
    return (sum + (size_t)world->size) % (world->device ? on_device : THIRDS) == 0;
}

/* Sets combination number `way` of place, offset and memory. Returns the sum of their numbers. */
static size_t set_way(struct operation *operation, uint64_t way)
{
    operation->place = way % 2 ? PLACE_SAME : PLACE_APART;
    operation->is_offset = way / 2 % 2;
    operation->memory = (enum operation_memory)(way / 4);
    return way % 2 + way / 2 % 2 + way / 4;
}

/* Draws type, operator, root and offset at random, so that they meet all values of the loops. */
static void set_lot(struct operation *operation, uint64_t turn, int size)
{
    static const double scales[] = {3, -2, 0.5};
    uint64_t random = turn;
    operation->salt = turn;
    operation->type = (enum shoal_type)reference_below(&random, SHOAL_TYPE_END);
    operation->op = SHOAL_SUM;
    if (operation_row(operation->kind)->is_reduced) {
        do
            operation->op = (enum shoal_op)reference_below(&random, SHOAL_OP_END);
        while (!operation_is_legal(operation->type, operation->op));
    }
    operation->scale = scales[reference_below(&random, reference_is_integer(operation->type) ? 2 : 3)];
    operation->root = (int)reference_below(&random, (size_t)size);
    operation->is_offset = reference_below(&random, 2);
}

/* Returns the number of parts of the larger operand. */
static size_t parts_of(enum operation_kind kind, int size)
{
    const struct operation_row *row = operation_row(kind);
    return row->is_input_partitioned || row->is_output_partitioned ? (size_t)size : 1;
}

/* Returns how many bytes one rank may publish inline, alongside its announcement. */
static size_t inline_bytes(enum operation_kind kind, int size)
{
    const size_t shared = 2 * DIRECT_BYTES / (size_t)size;
    if (size == 2 && (kind == OPERATION_ALLREDUCE || kind == OPERATION_ALLGATHER || kind == OPERATION_GATHER))
        return DIRECT_BYTES / 2;
    if (kind != OPERATION_ALLREDUCE || size == 1)
        return DIRECT_BYTES;
    return shared > DIRECT_BYTES / 4 ? shared : DIRECT_BYTES / 4;
}

/* Every size at the limits of data within and alongside announcements. */
static void run_small(struct world *world, const struct areas *areas, struct operation operation)
{
    const size_t element = shoal_type_bytes(operation.type);
    const size_t parts =
        operation_row(operation.kind)->is_input_partitioned ? (size_t)world->size : 1; /* of one rank's operand */
    const size_t inside = INLINE_BYTES / element / parts, beside = inline_bytes(operation.kind, world->size) / element / parts;
    const size_t counts[] = {0, 1, 3, inside, inside + 1, beside - 1, beside, beside + 1};
    for (size_t i = 0; i < COUNT_OF(counts) * WAYS; i++) {
        operation.count = counts[i / WAYS];
        operation.salt++;
        operation.root = (int)(operation.salt % (uint64_t)world->size);
        const size_t way = set_way(&operation, i % WAYS);
        if (is_asked(world, NINTHS, &operation, way + i / WAYS + operation.type + operation.op))
            exact_run_one(world, areas, &operation);
    }
}

void exact_small(struct world *world)
{
    struct areas areas = world_open_areas(world, 1 << 20);
    struct operation operation = {.kind = OPERATION_ALLREDUCE};
    for (; operation.kind < OPERATION_BARRIER; operation.kind++) {
        const enum shoal_op ops = operation_row(operation.kind)->is_reduced ? SHOAL_OP_END : 1;
        for (operation.type = 0; operation.type < SHOAL_TYPE_END; operation.type++) {
            for (operation.op = 0; operation.op < ops; operation.op++) {
                operation.scale = reference_is_integer(operation.type) ? -2 : 0.5;
                if (operation_is_legal(operation.type, operation.op))
                    run_small(world, &areas, operation);
            }
        }
        OK(world, shoal_barrier(world->comm, NULL));
    }
    world_close_areas(world, &areas);
}

/* Every type, operator and way, at sizes that are mostly not whole lines: those that two ranks do in one exchange, and
 * nearby ones. On a device only some combinations. Their distance is coprime to each dimension's number of values, so each
 * value is tested. */
void exact_one_shot(struct world *world)
{
    static const size_t bytes[] = {8200, 10008, 32768, 33000, 65536, 65544, 131080};
    struct areas areas = world_open_areas(world, 1 << 18);
    struct operation operation = {.kind = OPERATION_ALLREDUCE};
    const unsigned distance = world->device ? 11 : 1;
    for (unsigned i = 0; i < SHOAL_TYPE_END * SHOAL_OP_END * COUNT_OF(bytes) * WAYS; i += distance) {
        const size_t size = i / SHOAL_OP_END / SHOAL_TYPE_END % COUNT_OF(bytes);
        operation.op = (enum shoal_op)(i % SHOAL_OP_END);
        operation.type = (enum shoal_type)(i / SHOAL_OP_END % SHOAL_TYPE_END);
        const size_t way = set_way(&operation, i / SHOAL_OP_END / SHOAL_TYPE_END / COUNT_OF(bytes));
        if (!operation_is_legal(operation.type, operation.op) ||
            !is_asked(world, THIRDS, &operation, way + size + operation.type + operation.op))
            continue;
        operation.scale = reference_is_integer(operation.type) ? -2 : 0.5;
        operation.salt++;
        operation.count = bytes[size] / shoal_type_bytes(operation.type);
        exact_run_one(world, &areas, &operation);
    }
    world_close_areas(world, &areas);
}

/* Each way with each of these sizes of the larger operand, and with one element less and more. */
static void run_sizes(struct world *world, const struct areas *areas, const size_t *bytes, size_t sizes)
{
    struct operation operation = {.kind = OPERATION_ALLREDUCE};
    uint64_t turn = 0;
    for (; operation.kind < OPERATION_BARRIER; operation.kind++) {
        for (size_t i = 0; i < sizes * 3 * WAYS; i++, turn++) {
            set_lot(&operation, turn, world->size);
            const size_t way = set_way(&operation, i % WAYS);
            if (!is_asked(world, NINTHS, &operation, way + i / WAYS + operation.kind))
                continue;
            operation.count =
                bytes[i / WAYS / 3 % sizes] / shoal_type_bytes(operation.type) / parts_of(operation.kind, world->size);
            operation.count += i / WAYS % 3 - 1;
            exact_run_one(world, areas, &operation);
        }
    }
}

void exact_large(struct world *world)
{
    const size_t bytes[] = {CHUNK_BYTES / 2, CHUNK_BYTES, CHUNK_BYTES * (size_t)world->size, 4 * CHUNK_BYTES + PAGE_BYTES};
    struct areas areas = world_open_areas(world, CHUNK_BYTES * 9);
    run_sizes(world, &areas, bytes, COUNT_OF(bytes));
    world_close_areas(world, &areas);
}

#define HUGE_BYTES (((size_t)33 << 20) + 28)

/* Tens of megabytes in all forms. */
void exact_huge(struct world *world)
{
    static const size_t bytes[] = {12345678, HUGE_BYTES};
    struct areas areas = world_open_areas(world, HUGE_BYTES + (1 << 20));
    struct operation operation = {.tensors = 30};
    for (unsigned i = 0; i < OPERATION_BARRIER * FORM_END * COUNT_OF(bytes) * MEMORY_END; i++) {
        operation.kind = (enum operation_kind)(i % OPERATION_BARRIER);
        operation.form = (enum operation_form)(i / OPERATION_BARRIER % FORM_END);
        if (!operation_row(operation.kind)->has_form[operation.form])
            continue;
        const unsigned memory = i / OPERATION_BARRIER / FORM_END % MEMORY_END;
        const unsigned size = i / OPERATION_BARRIER / FORM_END / MEMORY_END;
        operation.memory = (enum operation_memory)memory;
        if (!is_asked(world, THIRDS, &operation, (unsigned)operation.kind + (unsigned)operation.form + memory + size))
            continue;
        set_lot(&operation, i, world->size);
        operation.place = (enum operation_place)(i / 3 % PLACE_END);
        operation.lengths = i % 2 ? LENGTHS_RANDOM : LENGTHS_ONE;
        operation.order = (enum operation_order)(i / 5 % ORDER_END);
        operation.count = bytes[size] / shoal_type_bytes(operation.type);
        operation.count /= parts_of(operation.kind, world->size) * (operation.form == FORM_TENSORS ? 20 : 1);
        while (operation_room(&operation, world->size) > areas.bytes)
            operation.count = operation.count / 8 * 7;
        exact_run_one(world, &areas, &operation);
    }
    world_close_areas(world, &areas);
}

void exact_roots(struct world *world)
{
    static const size_t bytes[] = {0, 8, 24, DIRECT_BYTES, DIRECT_BYTES + 8, CHUNK_BYTES + 8, 3 * CHUNK_BYTES};
    static const enum operation_kind kinds[] = {OPERATION_REDUCE, OPERATION_BROADCAST, OPERATION_GATHER, OPERATION_SCATTER};
    struct areas areas = world_open_areas(world, 4 * CHUNK_BYTES);
    struct operation operation = {.count = 0};
    uint64_t turn = 0;
    for (int root = 0; root < world->size; root++) {
        for (size_t i = 0; i < COUNT_OF(kinds) * COUNT_OF(bytes) * WAYS; i++, turn++) {
            operation.kind = kinds[i / WAYS / COUNT_OF(bytes)];
            set_lot(&operation, turn, world->size);
            const size_t way = set_way(&operation, i % WAYS);
            if (!is_asked(world, THIRDS, &operation, way + i / WAYS + (size_t)root))
                continue;
            operation.root = root;
            operation.count = bytes[i / WAYS % COUNT_OF(bytes)] / shoal_type_bytes(operation.type);
            operation.count /= parts_of(operation.kind, world->size);
            exact_run_one(world, &areas, &operation);
        }
        OK(world, shoal_barrier(world->comm, NULL));
    }
    world_close_areas(world, &areas);
}

/* ---- Parts of different lengths, several tensors ------------------------------------------------------------------------- */

static const enum operation_kind kinds_in_parts[] = {OPERATION_REDUCE_SCATTER, OPERATION_ALLGATHER, OPERATION_ALLTOALL};

/* Combinations of lengths, orders, places and memory. No part is longer than `bytes`, which is size number `number`. */
static void run_parts(struct world *world, const struct areas *areas, enum operation_kind kind, size_t number, size_t bytes)
{
    struct operation operation = {.kind = kind, .form = FORM_PARTS};
    for (unsigned i = 0; i < LENGTHS_END * ORDER_END * PLACE_END * MEMORY_END; i++) {
        set_lot(&operation, bytes * 1000 + i, world->size);
        operation.lengths = (enum operation_lengths)(i % LENGTHS_END);
        operation.order = (enum operation_order)(i / LENGTHS_END % ORDER_END);
        operation.place = (enum operation_place)(i / LENGTHS_END / ORDER_END % PLACE_END);
        operation.memory = (enum operation_memory)(i / LENGTHS_END / ORDER_END / PLACE_END);
        operation.count = (bytes + shoal_type_bytes(operation.type) - 1) / shoal_type_bytes(operation.type);
        const size_t sum = number + operation.lengths + operation.order + operation.place + operation.memory;
        if (is_asked(world, NINTHS, &operation, sum))
            exact_run_one(world, areas, &operation);
    }
}

void exact_parts(struct world *world)
{
    const size_t bytes[] = {0, 1, 15, DIRECT_BYTES / (size_t)world->size, DIRECT_BYTES, 30011, CHUNK_BYTES + 1};
    struct areas areas = world_open_areas(world, (CHUNK_BYTES + 4096) * 8);
    for (size_t k = 0; k < COUNT_OF(kinds_in_parts); k++) {
        for (size_t i = 0; i < COUNT_OF(bytes); i++)
            run_parts(world, &areas, kinds_in_parts[k], i, bytes[i]);
        OK(world, shoal_barrier(world->comm, NULL));
    }
    world_close_areas(world, &areas);
}

/* All places and kinds of memory. */
static void run_tensors(struct world *world, const struct areas *areas, int tensors, size_t bytes)
{
    struct operation operation = {.form = FORM_TENSORS, .tensors = tensors};
    for (unsigned i = 0; i < OPERATION_BARRIER * PLACE_END * MEMORY_END; i++) {
        operation.kind = (enum operation_kind)(i % OPERATION_BARRIER);
        if (!operation_row(operation.kind)->has_form[FORM_TENSORS])
            continue;
        set_lot(&operation, bytes * 1000 + i, world->size);
        operation.place = (enum operation_place)(i / OPERATION_BARRIER % PLACE_END);
        operation.memory = (enum operation_memory)(i / OPERATION_BARRIER / PLACE_END);
        operation.count = bytes / shoal_type_bytes(operation.type);
        const size_t sum = (size_t)tensors + bytes + operation.kind + operation.place + operation.memory;
        if (is_asked(world, NINTHS, &operation, sum))
            exact_run_one(world, areas, &operation);
    }
}

void exact_tensors(struct world *world)
{
    static const int tensors[] = {0, 1, 2, 7, 300};
    static const size_t bytes[] = {0, 8, 100, 600, 3000, 40000};
    struct areas areas = world_open_areas(world, 300 * 3000 * 8);
    for (size_t i = 0; i < COUNT_OF(tensors); i++) {
        for (size_t b = 0; b < COUNT_OF(bytes) && (size_t)tensors[i] * bytes[b] <= 300 * 3000; b++)
            run_tensors(world, &areas, tensors[i], bytes[b]);
        OK(world, shoal_barrier(world->comm, NULL));
    }
    world_close_areas(world, &areas);
}

/* ---- Asynchronous -------------------------------------------------------------------------------------------------------- */

#define POSTED_MAX 64
#define POSTED_ROOM EXACT_GROUP_ROOM

/* Draws operations, the same on all ranks, and prepares them next to each other. */
static void draw_sides(struct world *world, const struct areas *areas, struct operation_side *sides, int count,
                       uint64_t *random)
{
    const struct team team = {world->size, world->rank, NULL};
    for (int i = 0; i < count; i++) {
        const struct operation operation = operation_draw(random, world->size, POSTED_ROOM);
        sides[i] = operation_prepare(&operation, &team, areas, (size_t)i * POSTED_ROOM);
    }
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
    struct operation_side sides[POSTED_MAX];
    struct shoal_request *requests[POSTED_MAX];
    int order[POSTED_MAX];
    uint64_t random = seed, local = seed * 31 + (uint64_t)world->rank;
    draw_sides(world, areas, sides, count, &random);
    for (int i = 0; i < count; i++)
        OK(world, operation_call(&sides[i], world->comm, &requests[i]));
    shuffle(order, count, &local);
    for (int n = 0; n < count; n++) {
        const int i = order[n];
        enum shoal_status status = shoal_request_wait(requests[i], (uint32_t)reference_below(&local, 3));
        CHECK(world, status == SHOAL_OK || status == SHOAL_PENDING, "seed %llu: %s", (unsigned long long)seed,
              shoal_status_name(status));
        if (reference_below(&local, 4) == 0)
            status = shoal_request_test(requests[i]);
        OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        check_side(world, &sides[i]);
        shoal_request_free(requests[i]);
    }
}

void exact_async(struct world *world)
{
    struct areas areas = world_open_areas(world, POSTED_MAX * POSTED_ROOM);
    for (uint64_t seed = 1; seed <= 24; seed++)
        post_and_wait(world, &areas, seed % 3 == 0 ? 9 : seed % 3 == 1 ? 20 : POSTED_MAX, seed);
    world_close_areas(world, &areas);
}

/* Nobody waits for these. The progress thread completes them, and the barrier comes after them. */
void exact_detached(struct world *world)
{
    struct areas areas = world_open_areas(world, POSTED_MAX * POSTED_ROOM);
    struct operation_side sides[POSTED_MAX];
    uint64_t random = 7;
    for (int round = 0; round < 8; round++) {
        draw_sides(world, &areas, sides, 45, &random);
        for (int i = 0; i < 45; i++) {
            struct shoal_request *request;
            OK(world, operation_call(&sides[i], world->comm, &request));
            shoal_request_free(request);
        }
        OK(world, shoal_barrier(world->comm, NULL));
        for (int i = 0; i < 45; i++)
            check_side(world, &sides[i]);
    }
    world_close_areas(world, &areas);
}

/* A chain: each operation's callback posts the next one. All run on the thread that makes progress. */
struct chain {
    struct world *world;
    struct operation_side sides[POSTED_MAX];
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
        OK(chain->world, operation_call(&chain->sides[i], chain->world->comm, &chain->requests[i]));
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

void exact_callbacks(struct world *world)
{
    struct areas areas = world_open_areas(world, POSTED_MAX * POSTED_ROOM);
    for (int round = 0; round < 8; round++) {
        struct chain chain = {.world = world, .length = 40};
        uint64_t random = (uint64_t)round;
        draw_sides(world, &areas, chain.sides, chain.length, &random);
        chain.posted = 1;
        OK(world, operation_call(&chain.sides[0], world->comm, &chain.requests[0]));
        shoal_request_on_done(chain.requests[0], go_on, &chain);
        wait_until(world, &chain.done, chain.length); /* only the progress thread makes progress */
        for (int i = 0; i < chain.length; i++) {
            OK(world, shoal_request_wait(chain.requests[i], SHOAL_FOREVER));
            shoal_request_free(chain.requests[i]);
            check_side(world, &chain.sides[i]);
        }
    }
    world_close_areas(world, &areas);
}

/* ---- Memory for one operand ---------------------------------------------------------------------------------------------- */

/* An operand as a test fills and checks it (`here`), and as the call uses it (`there`): the same memory, or its twin on a
 * device. */
struct buffer {
    const struct twin_device *device; /* NULL: both are the same memory */
    char *here, *there;
    struct shoal_options options; /* on a device: its own stream */
};

/* Returns byte `at` of an area: 0 is the area of inputs, 1 that of outputs. */
static struct buffer take_buffer(const struct areas *areas, bool is_shared, int area, size_t at)
{
    struct buffer buffer = {.here = (is_shared ? areas->shared : areas->plain)[area] + at, .options = SHOAL_OPTIONS_INIT};
    buffer.there = buffer.here;
    if (!is_shared || !areas->device)
        return buffer;
    buffer.device = areas->device;
    buffer.there = areas->twins[area] + at;
    buffer.options.stream = areas->device->take_stream();
    return buffer;
}

static const struct shoal_options *buffer_options(const struct buffer *buffer)
{
    return buffer->device ? &buffer->options : NULL;
}

/* Copies to the device before the call, and back after it, when the stream has reached the end. */
static void upload_buffer(const struct buffer *buffer, size_t bytes)
{
    if (buffer->device)
        buffer->device->upload(buffer->there, buffer->here, bytes, buffer->options.stream);
}

static void download_buffer(const struct buffer *buffer, size_t bytes)
{
    if (!buffer->device)
        return;
    buffer->device->download(buffer->here, buffer->there, bytes, buffer->options.stream);
    buffer->device->synchronize(buffer->options.stream);
}

/* ---- Send and receive ---------------------------------------------------------------------------------------------------- */

#define EDGE_BYTES 64 /* checked after the received data */

static struct reference message_of(size_t bytes, int from, uint64_t salt)
{
    struct reference reference;
    const struct reference_question question = {SHOAL_UINT8, REFERENCE_MOVED, 1, salt, 0, bytes};
    reference_give(&question, from, &reference);
    return reference;
}

static void fill_message(const struct buffer *buffer, size_t bytes, int from, uint64_t salt)
{
    const struct reference given = message_of(bytes, from, salt);
    reference_fill(&given, buffer->here, bytes);
    upload_buffer(buffer, bytes);
}

/* Clears a buffer before a message is received there. */
static void clear_message(const struct buffer *buffer, size_t bytes)
{
    memset(buffer->here, 0xA5, bytes + EDGE_BYTES);
    upload_buffer(buffer, bytes + EDGE_BYTES);
}

static void check_message(struct world *world, const struct buffer *buffer, size_t bytes, int from, uint64_t salt)
{
    const struct reference wanted = message_of(bytes, from, salt);
    download_buffer(buffer, bytes + EDGE_BYTES);
    const long wrong = reference_compare(&wanted, buffer->here, bytes);
    CHECK(world, wrong < 0, "message of %zu bytes from rank %d, salt %llu: wrong from byte %ld on", bytes, from,
          (unsigned long long)salt, wrong);
    for (int i = 0; i < EDGE_BYTES; i++)
        CHECK(world, (unsigned char)buffer->here[bytes + (size_t)i] == 0xA5, "wrote beyond the message");
}

static const size_t message_bytes[] = {0, 1, 8191, 8192, 8193, 65536, (1 << 20) + 1};

/* A ring in which each rank sends to the next one: even ranks send first, odd ones receive first. */
static void ring_blocking(struct world *world, const struct areas *areas, size_t bytes, int memory)
{
    const int next = (world->rank + 1) % world->size, last = (world->rank + world->size - 1) % world->size;
    const struct buffer from = take_buffer(areas, memory % 2, 0, 0), to = take_buffer(areas, memory / 2, 1, 0);
    fill_message(&from, bytes, world->rank, bytes);
    clear_message(&to, bytes);
    for (int turn = 0; turn < 2; turn++) {
        if ((world->rank + turn) % 2 == 0)
            OK(world, shoal_send(world->comm, from.there, bytes, SHOAL_INT8, next, 5, buffer_options(&from)));
        else
            OK(world, shoal_recv(world->comm, to.there, bytes, SHOAL_INT8, last, 5, buffer_options(&to)));
    }
    check_message(world, &to, bytes, last, bytes);
}

static void wait_all(struct world *world, struct shoal_request **requests, int count)
{
    for (int i = count - 1; i >= 0; i--) {
        OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
        shoal_request_free(requests[i]);
    }
}

#define TAGS 4

static void receive_tags(struct world *world, const struct buffer *in, size_t bytes, int from, struct shoal_request **requests)
{
    for (int tag = TAGS - 1; tag >= 0; tag--)
        OK(world, shoal_recv_post(world->comm, in[tag].there, bytes, SHOAL_UINT8, from, tag, buffer_options(&in[tag]),
                                  &requests[tag]));
}

/* A pair exchanges four tags in both directions. Receives come in another order than sends: before them, after them, or
 * after a barrier. */
static void exchange_tags(struct world *world, const struct areas *areas, int round, int step)
{
    struct shoal_request *requests[2 * TAGS];
    struct buffer out[TAGS], in[TAGS];
    const size_t bytes = message_bytes[(size_t)round % COUNT_OF(message_bytes)] % 200000, room = bytes + EDGE_BYTES;
    const int to = (world->rank + step) % world->size, from = (world->rank + world->size - step) % world->size;
    for (int tag = 0; tag < TAGS; tag++) {
        out[tag] = take_buffer(areas, round % 2, 0, (size_t)tag * room);
        in[tag] = take_buffer(areas, round / 2 % 2, 1, (size_t)tag * room);
        fill_message(&out[tag], bytes, world->rank, (uint64_t)(round * TAGS + tag));
        clear_message(&in[tag], bytes);
    }
    if (round % 3 == 0) /* receives are posted before */
        receive_tags(world, in, bytes, from, &requests[TAGS]);
    for (int tag = 0; tag < TAGS; tag++)
        OK(world, shoal_send_post(world->comm, out[tag].there, bytes, SHOAL_UINT8, to, tag, buffer_options(&out[tag]),
                                  &requests[tag]));
    if (round % 3 == 1)
        OK(world, shoal_barrier(world->comm, NULL)); /* messages wait for their receives, and collectives overtake them */
    if (round % 3 != 0)
        receive_tags(world, in, bytes, from, &requests[TAGS]);
    wait_all(world, requests, 2 * TAGS);
    for (int tag = 0; tag < TAGS; tag++)
        check_message(world, &in[tag], bytes, from, (uint64_t)(round * TAGS + tag));
}

/* First in, first out for one tag: small after large messages, in one kind of memory after the other. */
static void keep_order(struct world *world, const struct areas *areas)
{
    struct shoal_request *requests[16];
    struct buffer in[8];
    const int next = (world->rank + 1) % world->size, last = (world->rank + world->size - 1) % world->size;
    for (int i = 0; i < 8; i++) {
        const size_t bytes = i % 2 ? 100 : 30000;
        const struct buffer out = take_buffer(areas, i % 3 == 2, 0, (size_t)i * 40000);
        in[i] = take_buffer(areas, i % 3 == 1, 1, (size_t)i * 40000);
        fill_message(&out, bytes, world->rank, (uint64_t)i);
        clear_message(&in[i], bytes);
        OK(world, shoal_send_post(world->comm, out.there, bytes, SHOAL_UINT8, next, 9, buffer_options(&out), &requests[i]));
        OK(world,
           shoal_recv_post(world->comm, in[i].there, bytes, SHOAL_UINT8, last, 9, buffer_options(&in[i]), &requests[8 + i]));
    }
    wait_all(world, requests, 16);
    for (int i = 0; i < 8; i++)
        check_message(world, &in[i], i % 2 ? 100 : 30000, last, (uint64_t)i);
}

void exact_messages(struct world *world)
{
    struct areas areas = world_open_areas(world, 4 << 20);
    for (size_t i = 0; i < COUNT_OF(message_bytes) && world->size % 2 == 0; i++) {
        for (int memory = 0; memory < 4; memory++)
            ring_blocking(world, &areas, message_bytes[i], memory);
    }
    for (int round = 0; round < 24; round++) {
        for (int step = 1; step < world->size; step++)
            exchange_tags(world, &areas, round, step);
    }
    keep_order(world, &areas);
    world_close_areas(world, &areas);
}

/* A small send ends without its receive. */
static void send_ahead(struct world *world, const struct areas *areas, int peer, bool is_shared)
{
    const struct buffer out = take_buffer(areas, is_shared, 0, 0), in = take_buffer(areas, is_shared, 1, 0);
    for (int i = 0; i < 5; i++) {
        fill_message(&out, SHOAL_EAGER_BYTES, world->rank, (uint64_t)i);
        OK(world, shoal_send(world->comm, out.there, SHOAL_EAGER_BYTES, SHOAL_UINT8, peer, i, buffer_options(&out)));
    }
    for (int i = 4; i >= 0; i--) {
        clear_message(&in, SHOAL_EAGER_BYTES);
        OK(world, shoal_recv(world->comm, in.there, SHOAL_EAGER_BYTES, SHOAL_UINT8, peer, i, buffer_options(&in)));
        check_message(world, &in, SHOAL_EAGER_BYTES, peer, (uint64_t)i);
    }
}

void exact_eager(struct world *world)
{
    struct areas areas = world_open_areas(world, SHOAL_EAGER_BYTES + EDGE_BYTES);
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        for (int peer = 0; peer < world->size; peer++) /* itself as well */
            send_ahead(world, &areas, peer, is_shared);
    }
    world_close_areas(world, &areas);
}

/* Each receive's callback posts the next one. Every message arrives once. */
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

void exact_receive_callbacks(struct world *world)
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

/* ---- Several messages in one request ------------------------------------------------------------------------------------- */

static void check_exchange(const struct world *world, const struct exchange_side *side)
{
    char text[512];
    CHECK(world, exchange_check(side, text, sizeof text), "%s", text);
}

static void run_exchange(struct world *world, const struct areas *areas, const struct exchange *exchange, bool is_posted)
{
    const struct team team = {world->size, world->rank, NULL};
    struct shoal_message messages[EXCHANGE_MESSAGES_MAX];
    struct shoal_options options;
    struct shoal_request *request;
    CHECK(world, exchange_room(exchange, world->size) <= areas->bytes, "the test has too little memory");
    const struct exchange_side side = exchange_prepare(exchange, &team, areas, 0);
    const size_t count = exchange_list(&side, messages);
    if (!is_posted) {
        OK(world, shoal_exchange(world->comm, count ? messages : NULL, count, exchange_options(&side, &options)));
    } else {
        OK(world, shoal_exchange_post(world->comm, messages, count, exchange_options(&side, &options), &request));
        memset(messages, 0xFF, sizeof messages);
        OK(world, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
    }
    check_exchange(world, &side);
}

void exact_exchanges(struct world *world)
{
    static const int per_pair[] = {0, 1, 3};
    static const size_t bytes[] = {0, 1, 100, SHOAL_EAGER_BYTES - 1, SHOAL_EAGER_BYTES, SHOAL_EAGER_BYTES + 1, 100003};
    struct areas areas = world_open_areas(world, 3 * 8 * 100100);
    struct exchange exchange = {.salt = 0};
    for (unsigned i = 0; i < EXCHANGE_PATTERN_END * COUNT_OF(per_pair) * COUNT_OF(bytes) * MEMORY_END; i++) {
        exchange.pattern = (enum exchange_pattern)(i % EXCHANGE_PATTERN_END);
        exchange.per_pair = per_pair[i / EXCHANGE_PATTERN_END % COUNT_OF(per_pair)];
        exchange.type = (enum shoal_type)(i % SHOAL_TYPE_END);
        exchange.count = bytes[i / EXCHANGE_PATTERN_END / COUNT_OF(per_pair) % COUNT_OF(bytes)];
        exchange.count /= shoal_type_bytes(exchange.type);
        exchange.memory = (enum operation_memory)(i / EXCHANGE_PATTERN_END / COUNT_OF(per_pair) / COUNT_OF(bytes));
        exchange.tags = 1 + (int)(i / 5 % 2); /* with one tag the order of the pair decides */
        exchange.is_offset = i / 3 % 2;
        exchange.salt = i;
        run_exchange(world, &areas, &exchange, i / 2 % 2);
    }
    exchange = (struct exchange){EXCHANGE_ALL, SHOAL_INT8, 90000, 3, 1, MEMORY_MIXED, true, 17};
    run_exchange(world, &areas, &exchange, false);
    world_close_areas(world, &areas);
}

/* ---- Parts of a communicator --------------------------------------------------------------------------------------------- */

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

/* Odd and even ranks; all; each alone; the first half; threes in another order; all in reverse order. */
#define SHAPES 6

static struct world_group split_shape(struct world *world, const struct world_group *parent, int shape)
{
    int colors[WORLD_RANKS_MAX], keys[WORLD_RANKS_MAX];
    for (int r = 0; r < parent->size; r++) {
        colors[r] = color_of(shape, r, parent->size);
        keys[r] = shape == 5 ? -r : shape == 4 ? r * 7 % 4 : 0;
    }
    return world_split(world, parent, colors, keys);
}

void exact_use_group(struct world *world, const struct areas *areas, const struct world_group *group, uint64_t seed)
{
    uint64_t random = seed;
    for (int i = 0; i < 8 && group->comm; i++) {
        const struct operation operation = operation_draw(&random, group->size, POSTED_ROOM);
        exact_run_in(world, group, areas, &operation);
    }
}

void exact_splits(struct world *world)
{
    struct areas areas = world_open_areas(world, POSTED_ROOM);
    const struct world_group all = world_all(world);
    for (int shape = 0; shape < SHAPES; shape++) {
        struct world_group child = split_shape(world, &all, shape);
        exact_use_group(world, &areas, &child, (uint64_t)shape);
        for (int second = 0; second < SHAPES && child.comm; second += 2) {
            struct world_group grandchild = split_shape(world, &child, second);
            exact_use_group(world, &areas, &grandchild, (uint64_t)(shape * 10 + second));
            if (second == 2)
                shoal_comm_free(child.comm); /* its parts continue to exist */
            else if (grandchild.comm)
                OK(world, shoal_comm_finalize(grandchild.comm));
            if (second == 2)
                child.comm = NULL;
            shoal_comm_free(grandchild.comm);
        }
        shoal_comm_free(child.comm);
        exact_use_group(world, &areas, &all, (uint64_t)shape);
    }
    world_close_areas(world, &areas);
}

/* The ranks whose bit is set, in reverse order for odd turns. */
static struct world_group split_subset(struct world *world, unsigned subset, int turn)
{
    const struct world_group all = world_all(world);
    int colors[WORLD_RANKS_MAX], keys[WORLD_RANKS_MAX];
    for (int r = 0; r < world->size; r++) {
        colors[r] = subset >> r & 1 ? 0 : -1;
        keys[r] = turn % 2 ? -r : r;
    }
    return world_split(world, &all, colors, keys);
}

#define SUBSETS_MAX 32
#define SUBSET_ROOM ((size_t)24 << 10)

/* All subsets, in both orders, exist at once. Each rank posts to its groups in its own order. */
void exact_subsets(struct world *world)
{
    const int count = 2 << world->size;
    struct areas areas = world_open_areas(world, SUBSETS_MAX * SUBSET_ROOM);
    struct world_group groups[SUBSETS_MAX];
    uint64_t local = (uint64_t)world->rank;
    for (int i = 0; i < count; i++)
        groups[i] = split_subset(world, (unsigned)i / 2, i);
    for (int round = 0; round < 40; round++) {
        struct operation_side sides[SUBSETS_MAX];
        struct shoal_request *requests[SUBSETS_MAX];
        int order[SUBSETS_MAX];
        shuffle(order, count, &local);
        for (int n = 0; n < count; n++) {
            const int i = order[n];
            uint64_t random = (uint64_t)(round * SUBSETS_MAX + i);
            if (!groups[i].comm)
                continue;
            const struct team team = world_team(&groups[i]);
            const struct operation operation = operation_draw(&random, team.size, SUBSET_ROOM);
            sides[i] = operation_prepare(&operation, &team, &areas, (size_t)i * SUBSET_ROOM);
            OK(world, operation_call(&sides[i], groups[i].comm, &requests[i]));
        }
        for (int i = 0; i < count; i++) {
            if (!groups[i].comm)
                continue;
            OK(world, shoal_request_wait(requests[i], SHOAL_FOREVER));
            shoal_request_free(requests[i]);
            check_side(world, &sides[i]);
        }
    }
    for (int i = 0; i < count; i++)
        shoal_comm_free(groups[i].comm);
    world_close_areas(world, &areas);
}

/* ---- Many communicators -------------------------------------------------------------------------------------------------- */

#define COMMS 1000
#define COMMS_THERE 24 /* on a device, where each has its own streams and rings */

static int count_comms(const struct world *world)
{
    return world->device ? COMMS_THERE : COMMS;
}

/* Runs one operation on communicator n, of a kind that depends on n. */
static void use_comm(struct world *world, const struct areas *areas, const struct world_group *group, int n)
{
    uint64_t random = (uint64_t)n;
    if (!group->comm)
        return;
    struct operation operation = operation_draw(&random, group->size, areas->bytes);
    operation.kind = (enum operation_kind)(n % OPERATION_KIND_END);
    operation.form = FORM_PLAIN;
    operation.count = operation.kind == OPERATION_BARRIER ? 0 : 1 + reference_below(&random, 700);
    operation.root = (int)reference_below(&random, (size_t)group->size);
    exact_run_in(world, group, areas, &operation);
}

/* One after the other: nothing is left of the thousand earlier ones. */
void exact_comms_in_turn(struct world *world)
{
    const struct world_group all = world_all(world);
    struct areas areas = world_open_areas(world, 1 << 17);
    const int comms = count_comms(world);
    for (int n = 0; n < comms; n++) {
        struct world_group group = n % 3 ? split_shape(world, &all, n / 3 % SHAPES)
                                         : split_subset(world, 1 + (unsigned)n / 3 % ((1u << world->size) - 1), n);
        use_comm(world, &areas, &group, n);
        shoal_comm_free(group.comm);
    }
    world_close_areas(world, &areas);
}

/* All exist together, within the number of open files that most systems allow a process. */
void exact_comms_at_once(struct world *world)
{
    static struct world_group groups[COMMS];
    const struct rlimit limit = {1024, 1024};
    const struct world_group all = world_all(world);
    const int comms = count_comms(world);
    CHECK(world, setrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit: %m");
    struct areas areas = world_open_areas(world, 1 << 17);
    for (int n = 0; n < comms; n++)
        groups[n] = split_shape(world, &all, n % 2 ? 1 : 5);
    for (int n = 0; n < comms; n++)
        use_comm(world, &areas, &groups[n], n);
    for (int n = comms - 1; n >= 0; n--)
        use_comm(world, &areas, &groups[n], n + 1);
    for (int n = 0; n < comms; n++)
        shoal_comm_free(groups[n].comm);
    world_close_areas(world, &areas);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

#define THREADS 3

struct user {
    struct world *world;
    struct world_group group;
    struct areas areas;
    int number;
};

/* Each thread has its own communicator and does not depend on the others. */
static void *use_alone(void *arg)
{
    struct user *user = arg;
    uint64_t random = (uint64_t)user->number;
    for (int i = 0; i < 150 && user->group.comm; i++) {
        const struct operation operation = operation_draw(&random, user->group.size, user->areas.bytes);
        const struct team team = world_team(&user->group);
        const struct operation_side side = operation_prepare(&operation, &team, &user->areas, 0);
        struct shoal_request *request = NULL;
        OK(user->world, operation_call(&side, user->group.comm, i % 3 ? NULL : &request));
        if (request)
            OK(user->world, shoal_request_wait(request, SHOAL_FOREVER));
        shoal_request_free(request);
        check_side(user->world, &side);
    }
    return NULL;
}

void exact_threads(struct world *world)
{
    static const int shapes[THREADS] = {5, 0, 4};
    const struct world_group all = world_all(world);
    struct user users[THREADS + 1];
    pthread_t threads[THREADS + 1];
    for (int i = 0; i <= THREADS; i++) {
        users[i] = (struct user){world, all, world_open_areas(world, POSTED_ROOM), i};
        if (i < THREADS)
            users[i].group = split_shape(world, &all, shapes[i]);
    }
    for (int i = 0; i <= THREADS; i++)
        CHECK(world, pthread_create(&threads[i], NULL, use_alone, &users[i]) == 0, "no thread");
    for (int i = 0; i <= THREADS; i++) {
        pthread_join(threads[i], NULL);
        world_close_areas(world, &users[i].areas);
        if (i < THREADS)
            shoal_comm_free(users[i].group.comm);
    }
}

/* ---- Equal bits ---------------------------------------------------------------------------------------------------------- */

/* Random floats of very different sizes, so that every other order of summation has other bits. */
static void fill_random(char *memory, size_t count, bool is_double, uint64_t *random)
{
    for (size_t i = 0; i < count; i++) {
        const double value =
            (double)(int64_t)reference_random(random) / (double)(UINT64_C(1) << (reference_random(random) % 62));
        const float single = (float)value;
        if (is_double)
            memcpy(memory + i * 8, &value, 8);
        else
            memcpy(memory + i * 4, &single, 4);
    }
}

void exact_bits(struct world *world)
{
    static const size_t counts[] = {1, 7, 500, 1024, 5000, 70001, 400003};
    struct areas areas = world_open_areas(world, 400003 * 8);
    uint64_t random = 11 + (uint64_t)world->rank, hash = UINT64_C(0xCBF29CE484222325);
    for (unsigned turn = 0; turn < COUNT_OF(counts) * 4; turn++) {
        const bool is_shared = turn % 2, is_double = turn / 2 % 2;
        const size_t count = counts[turn / 4], bytes = count * (is_double ? 8 : 4);
        const struct buffer input = take_buffer(&areas, is_shared, 0, 0);
        struct buffer output = take_buffer(&areas, is_shared, 1, 0);
        output.options = input.options;
        fill_random(input.here, count, is_double, &random);
        upload_buffer(&input, bytes);
        OK(world, shoal_allreduce(world->comm, input.there, output.there, count, is_double ? SHOAL_FLOAT64 : SHOAL_FLOAT32,
                                  turn % 3 ? SHOAL_SUM : SHOAL_AVG, buffer_options(&input)));
        download_buffer(&output, bytes);
        hash = hash * UINT64_C(0x100000001B3) + shoal_bytes_hash(output.here, bytes);
    }
    world->board[world->rank] = hash;
    world_close_areas(world, &areas);
}

/* Of this thread, and of those that it starts. */
static void flush_subnormals(void)
{
#if defined(__x86_64__)
    const uint32_t state = 0x1f80 | 0x8040; /* FTZ, DAZ */
    __asm__ volatile("ldmxcsr %0" : : "m"(state) : "memory");
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)1 << 24) : "memory");
#endif
}

static bool is_subnormal_kept(void)
{
    volatile float smallest = 1e-38f;
    return smallest / 100 > 0;
}

/* The context's own thread inherits the state of rank 0: the first asynchronous post starts it. */
static void sum_subnormals(struct world *world, const struct areas *areas, size_t count)
{
    float *const input = (float *)(void *)areas->plain[0], *const output = (float *)(void *)areas->plain[1];
    const uint32_t small = 71362, wanted_bits = small * (uint32_t)world->size; /* the bits of subnormal numbers add up */
    float number, wanted, sum = 0.5f * (float)world->size;
    memcpy(&number, &small, sizeof number);
    memcpy(&wanted, &wanted_bits, sizeof wanted);
    struct shoal_request *request;
    for (size_t i = 0; i < count; i++)
        memcpy(&input[i], i % 2 ? &number : &(float){0.5f}, sizeof number);
    if (world->rank == 0)
        flush_subnormals();
    OK(world, shoal_allreduce_post(world->comm, input, output, count, SHOAL_FLOAT32, SHOAL_SUM, NULL, &request));
    OK(world, shoal_request_wait(request, SHOAL_FOREVER));
    shoal_request_free(request);
    CHECK(world, is_subnormal_kept() == (world->rank != 0), "a call changed the floating-point state");
    for (size_t i = 0; i < count; i++)
        CHECK(world, memcmp(&output[i], i % 2 ? &wanted : &sum, sizeof *output) == 0, "a sum was flushed, or is wrong");
}

void exact_float_states(struct world *world)
{
    struct areas areas = world_open_areas(world, (size_t)1 << 20);
    sum_subnormals(world, &areas, 4);
    sum_subnormals(world, &areas, (size_t)1 << 18);
    world_close_areas(world, &areas);
}

void exact_half_averages(struct world *world)
{
    static const size_t counts[] = {1, 500, 5000, 70001, 400003};
    struct areas areas = world_open_areas(world, 400003 * 2);
    for (unsigned turn = 0; turn < COUNT_OF(counts) * 2; turn++) {
        const size_t count = counts[turn / 2], bytes = count * sizeof(uint16_t);
        const struct buffer input = take_buffer(&areas, turn % 2, 0, 0);
        struct buffer output = take_buffer(&areas, turn % 2, 1, 0);
        output.options = input.options;
        for (size_t i = 0; i < count; i++)
            memcpy(input.here + i * 2, &(uint16_t){0x78e2}, 2); /* 40000 */
        upload_buffer(&input, bytes);
        OK(world,
           shoal_allreduce(world->comm, input.there, output.there, count, SHOAL_FLOAT16, SHOAL_AVG, buffer_options(&input)));
        download_buffer(&output, bytes);
        for (size_t i = 0; i < count; i++)
            CHECK(world, memcmp(output.here + i * 2, &(uint16_t){0x78e2}, 2) == 0, "average %zu of %zu is not 40000", i, count);
    }
    world_close_areas(world, &areas);
}

/* Chunks of 4 KiB: every border of theirs is reached with little data. */
void exact_small_chunks(struct world *world)
{
    const size_t bytes[] = {8192, 12288, 4096 * (size_t)world->size, 40000};
    struct areas areas = world_open_areas(world, POSTED_ROOM * 20);
    run_sizes(world, &areas, bytes, COUNT_OF(bytes));
    for (size_t k = 0; k < COUNT_OF(kinds_in_parts); k++)
        run_parts(world, &areas, kinds_in_parts[k], k, 10007);
    run_tensors(world, &areas, 7, 10000);
    for (uint64_t seed = 100; seed < 104; seed++)
        post_and_wait(world, &areas, 20, seed);
    world_close_areas(world, &areas);
}

void exact_same_bits(struct world *world)
{
    struct world here = *world;
    here.device = NULL;
    exact_bits(&here);
    const uint64_t wanted = world->board[world->rank];
    exact_bits(world);
    CHECK(world, world->board[world->rank] == wanted, "the bits are not those of operands in host memory");
}
