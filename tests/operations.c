#include "operations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tools/elements.h"
#include "reference.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define EDGE_BYTES 64 /* of guard before and after each area */
#define GUARD 0xA5
#define SPOILED 0x5A
#define GAP 2 /* elements between parts, and between tensors, that are separate */

/* ---- The kinds ----------------------------------------------------------------------------------------------------------- */

static const struct operation_row rows[OPERATION_KIND_END] = {
    [OPERATION_ALLREDUCE] = {"all-reduce", .is_reduced = true, .has_form = {true, false, true}},
    [OPERATION_REDUCE] = {"reduce", .root_receives = true, .is_reduced = true, .has_form = {true}},
    [OPERATION_REDUCE_SCATTER] = {"reduce-scatter", .is_input_partitioned = true, .is_reduced = true,
                                  .has_form = {true, true, true}},
    [OPERATION_BROADCAST] = {"broadcast", .root_contributes = true, .has_form = {true, false, true}},
    [OPERATION_ALLGATHER] = {"all-gather", .is_output_partitioned = true, .has_form = {true, true, true}},
    [OPERATION_GATHER] = {"gather", .root_receives = true, .is_output_partitioned = true, .has_form = {true}},
    [OPERATION_SCATTER] = {"scatter", .root_contributes = true, .is_input_partitioned = true, .has_form = {true}},
    [OPERATION_ALLTOALL] = {"all-to-all", .is_input_partitioned = true, .is_output_partitioned = true,
                            .has_form = {true, true}},
    [OPERATION_BARRIER] = {"barrier", .has_form = {true}},
};

const struct operation_row *operation_row(enum operation_kind kind)
{
    return &rows[kind];
}

bool operation_is_legal(enum shoal_type type, enum shoal_op op)
{
    return reference_is_integer(type) || !element_is_bitwise(op);
}

static bool has_operand(const struct operation *operation, bool is_output, int rank)
{
    const struct operation_row *row = &rows[operation->kind];
    const bool is_roots = is_output ? row->root_receives : row->root_contributes;
    return operation->kind != OPERATION_BARRIER && (!is_roots || rank == operation->root);
}

static bool is_partitioned(const struct operation *operation, bool is_output)
{
    return is_output ? rows[operation->kind].is_output_partitioned : rows[operation->kind].is_input_partitioned;
}

static int count_parts(const struct operation *operation, bool is_output, int size)
{
    return is_partitioned(operation, is_output) ? size : 1;
}

static size_t count_tensors(const struct operation *operation)
{
    return operation->form == FORM_TENSORS ? (size_t)operation->tensors : 1;
}

/* ---- Lengths and offsets ------------------------------------------------------------------------------------------------- */

static int number_of(const struct team *team, int rank)
{
    return team->numbers ? team->numbers[rank] : rank;
}

static size_t draw_length(const struct operation *operation, size_t key)
{
    return (size_t)(reference_mix(key * 977 + operation->salt + 1) % (operation->count + 1));
}

/* Returns the elements of the tensor, in each part; the first tensor is the longest, every fifth is empty. */
static size_t tensor_length(const struct operation *operation, size_t tensor)
{
    if (operation->form != FORM_TENSORS || tensor == 0)
        return operation->count;
    return tensor % 5 == 3 ? 0 : draw_length(operation, tensor);
}

/* Returns the elements from one rank to another if parts differ in length. In place, an all-to-all receives from each rank as
 * many as it sends to it. */
static size_t part_length(const struct operation *operation, int from, int to, int size)
{
    const bool is_mutual = operation->kind == OPERATION_ALLTOALL && operation->place != PLACE_APART;
    const int low = is_mutual && to < from ? to : from, high = is_mutual && to < from ? from : to;
    const int hot = (int)(operation->salt % (uint64_t)size);
    const int key = operation->kind == OPERATION_ALLGATHER        ? from
                    : operation->kind == OPERATION_REDUCE_SCATTER ? to
                                                                  : low * size + high;
    switch (operation->lengths) {
    case LENGTHS_ZEROS:
        return ((uint64_t)key + operation->salt) % 2 ? operation->count : 0;
    case LENGTHS_ONE:
        if (operation->kind == OPERATION_ALLTOALL)
            return from == hot || (is_mutual && to == hot) ? operation->count : 0;
        return key == hot ? operation->count : 0;
    case LENGTHS_RANDOM:
        return draw_length(operation, (size_t)key);
    default:
        return operation->count;
    }
}

/* Returns the elements of part `part` of an operand. */
static size_t length_at(const struct operation_side *side, bool is_output, int part, size_t tensor)
{
    const struct operation *operation = &side->operation;
    const int from = is_output ? part : side->team.rank, to = is_output ? side->team.rank : part;
    if (operation->form != FORM_PARTS)
        return tensor_length(operation, tensor);
    return part_length(operation, from, to, side->team.size);
}

/* Returns true if the tensor is in place on this rank. */
static bool is_in_place(const struct operation_side *side, size_t tensor)
{
    const struct operation *operation = &side->operation;
    if (!has_operand(operation, false, side->team.rank) || !has_operand(operation, true, side->team.rank))
        return false;
    if (operation->place == PLACE_MIXED)
        return ((uint64_t)number_of(&side->team, side->team.rank) + tensor + operation->salt) % 2;
    return operation->place == PLACE_SAME;
}

/* In a reduce-scatter the parts of the input follow each other. */
static enum operation_order order_of(const struct operation_side *side)
{
    const struct operation *operation = &side->operation;
    if (operation->form != FORM_PARTS || operation->kind == OPERATION_REDUCE_SCATTER)
        return ORDER_ROW;
    if (operation->order != ORDER_MIXED)
        return operation->order;
    return (enum operation_order)(((uint64_t)number_of(&side->team, side->team.rank) + operation->salt) % ORDER_MIXED);
}

/* Returns a part's position in the sequence. */
static int position_of(const struct operation_side *side, bool is_output, int part)
{
    const int size = side->team.size, turn = side->team.rank + (is_output && !is_in_place(side, 0));
    return order_of(side) == ORDER_PERMUTED ? (size - 1 - part + turn) % size : part;
}

/* Returns where a part begins, in elements from the start of its tensor. */
static size_t part_at(const struct operation_side *side, bool is_output, int part, size_t tensor)
{
    const struct operation *operation = &side->operation;
    if (!is_partitioned(operation, is_output))
        return 0;
    if (operation->form != FORM_PARTS)
        return (size_t)part * tensor_length(operation, tensor);
    const int position = position_of(side, is_output, part);
    size_t at = order_of(side) == ORDER_GAPS ? 1 + GAP * (size_t)part : 0;
    for (int i = 0; i < side->team.size; i++)
        at += position_of(side, is_output, i) < position ? length_at(side, is_output, i, tensor) : 0;
    return at;
}

/* Returns the elements from the start of a tensor to the end of its last part. */
static size_t tensor_end(const struct operation_side *side, bool is_output, size_t tensor)
{
    size_t end = 0;
    for (int part = 0; part < count_parts(&side->operation, is_output, side->team.size); part++) {
        const size_t length = length_at(side, is_output, part, tensor);
        const size_t part_end = part_at(side, is_output, part, tensor) + length;
        end = length && part_end > end ? part_end : end;
    }
    return end;
}

/* Every second tensor begins immediately after the one before it. */
static size_t tensor_room(const struct operation_side *side, bool is_output, size_t tensor)
{
    return tensor_end(side, is_output, tensor) + tensor % 2 * GAP;
}

static size_t area_elements(const struct operation_side *side, bool is_output)
{
    size_t elements = 0;
    for (size_t t = 0; t < count_tensors(&side->operation); t++)
        elements += tensor_room(side, is_output, t);
    return elements;
}

size_t operation_room(const struct operation *operation, int size)
{
    const bool has_parts = is_partitioned(operation, false) || is_partitioned(operation, true);
    size_t each = 0;
    for (size_t t = 0; t < count_tensors(operation); t++)
        each += tensor_length(operation, t) + 2 * GAP;
    const size_t bytes = each * (has_parts ? (size_t)size : 1) * shoal_type_bytes(operation->type);
    return (bytes + 4 * EDGE_BYTES) / EDGE_BYTES * EDGE_BYTES;
}

/* Lists each tensor's operands; one tensor for an operation without tensors. In place, the larger operand has the address. */
static void list_tensors(const struct operation_side *side, struct shoal_tensor *tensors)
{
    const struct operation *operation = &side->operation;
    const size_t element = shoal_type_bytes(operation->type);
    const bool in_output = !is_partitioned(operation, false) && is_partitioned(operation, true);
    char *input = side->input, *output = side->output;
    for (size_t t = 0; t < count_tensors(operation); t++) {
        tensors[t] = (struct shoal_tensor){input, output, tensor_length(operation, t)};
        if (is_in_place(side, t) && in_output)
            tensors[t].input = output + part_at(side, true, side->team.rank, t) * element;
        else if (is_in_place(side, t))
            tensors[t].output =
                input + (is_partitioned(operation, true) ? 0 : part_at(side, false, side->team.rank, t)) * element;
        input += tensor_room(side, false, t) * element;
        output += tensor_room(side, true, t) * element;
    }
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* The areas of inputs and outputs, after their guards. */
struct extent {
    char *begin;
    size_t bytes;
};

static void list_extents(const struct operation_side *side, struct extent *extents)
{
    const size_t element = shoal_type_bytes(side->operation.type);
    extents[0] = (struct extent){side->input, area_elements(side, false) * element};
    extents[1] = (struct extent){side->output, area_elements(side, true) * element};
}

/* A stretch of an operand: one part of one tensor. */
struct stretch {
    char *begin;
    size_t count;
    int part;
    size_t tensor;
};

/* Returns the stretches of an operand, none if the rank does not have it; the caller frees them. */
static struct stretch *list_stretches(const struct operation_side *side, bool is_output, size_t *count_out)
{
    const struct operation *operation = &side->operation;
    const size_t tensors = count_tensors(operation), parts = (size_t)count_parts(operation, is_output, side->team.size);
    struct stretch *stretches = malloc((tensors * parts + 1) * sizeof *stretches);
    struct shoal_tensor *all = malloc((tensors + 1) * sizeof *all);
    *count_out = 0;
    if (!stretches || !all)
        abort();
    list_tensors(side, all);
    for (size_t i = 0; i < tensors * parts && has_operand(operation, is_output, side->team.rank); i++) {
        const size_t t = i / parts;
        const int part = (int)(i % parts);
        char *base = is_output ? all[t].output : (char *)(uintptr_t)all[t].input;
        stretches[(*count_out)++] =
            (struct stretch){base + part_at(side, is_output, part, t) * shoal_type_bytes(operation->type),
                             length_at(side, is_output, part, t), part, t};
    }
    free(all);
    return stretches;
}

static bool is_shared(enum operation_memory memory, uint64_t salt, int number, bool is_output)
{
    if (memory != MEMORY_MIXED)
        return memory == MEMORY_SHARED;
    return ((uint64_t)number + salt) % 2 != (is_output && number % 3 == 1);
}

static char *place(const struct areas *areas, bool is_memory_shared, bool is_output, size_t at)
{
    return (is_memory_shared ? areas->shared : areas->plain)[is_output] + at + EDGE_BYTES;
}

static void overwrite(const struct extent *extents, int byte)
{
    for (int i = 0; i < 2; i++)
        memset(extents[i].begin - EDGE_BYTES, byte, extents[i].bytes + 2 * EDGE_BYTES);
}

/* ---- On a device --------------------------------------------------------------------------------------------------------- */

static struct twins find_twins(const struct areas *areas, const bool *is_memory_shared, size_t at)
{
    struct twins twins = {.device = NULL};
    if (!areas->device || (!is_memory_shared[0] && !is_memory_shared[1]))
        return twins;
    twins.device = areas->device;
    twins.stream = areas->device->take_stream();
    twins.input = is_memory_shared[0] ? areas->twins[0] + at + EDGE_BYTES : NULL;
    twins.output = is_memory_shared[1] ? areas->twins[1] + at + EDGE_BYTES : NULL;
    return twins;
}

static char *twin_of(const struct twins *twins, int i)
{
    return i ? twins->output : twins->input;
}

static void upload(const struct twins *twins, const struct extent *extents)
{
    for (int i = 0; i < 2; i++) {
        if (twin_of(twins, i))
            twins->device->upload(twin_of(twins, i) - EDGE_BYTES, extents[i].begin - EDGE_BYTES,
                                  extents[i].bytes + 2 * EDGE_BYTES, twins->stream);
    }
}

static void download(const struct twins *twins, const struct extent *extents)
{
    for (int i = 0; i < 2; i++) {
        if (twin_of(twins, i))
            twins->device->download(extents[i].begin - EDGE_BYTES, twin_of(twins, i) - EDGE_BYTES,
                                    extents[i].bytes + 2 * EDGE_BYTES, twins->stream);
    }
}

static void synchronize(const struct twins *twins)
{
    if (twins->device)
        twins->device->synchronize(twins->stream);
}

/* Describes the contents of a stretch: the same on the rank that sends it and the rank that receives it. */
static struct reference_question ask(const struct operation_side *side, const struct stretch *stretch, bool is_output)
{
    const struct operation *operation = &side->operation;
    const int to = !is_partitioned(operation, false) ? 0 : is_output ? side->team.rank : stretch->part;
    return (struct reference_question){.type = operation->type,
                                       .op = rows[operation->kind].is_reduced ? operation->op : REFERENCE_MOVED,
                                       .scale = operation->scale,
                                       .salt = operation->salt,
                                       .first = (size_t)to * 389 + stretch->tensor * 97,
                                       .count = stretch->count};
}

static void expect_input(const struct operation_side *side, const struct stretch *stretch, struct reference *reference_out)
{
    const struct reference_question question = ask(side, stretch, false);
    reference_give(&question, number_of(&side->team, side->team.rank), reference_out);
}

static void expect_output(const struct operation_side *side, const struct stretch *stretch, struct reference *reference_out)
{
    const struct operation *operation = &side->operation;
    const struct reference_question question = ask(side, stretch, true);
    if (rows[operation->kind].is_reduced) {
        reference_reduce(&question, side->team.numbers, side->team.size, reference_out);
        return;
    }
    const int giver = is_partitioned(operation, true) ? stretch->part : operation->root;
    reference_give(&question, number_of(&side->team, giver), reference_out);
}

struct operation_side operation_prepare(const struct operation *operation, const struct team *team, const struct areas *areas,
                                        size_t begin)
{
    struct operation_side side = {.operation = *operation, .team = *team};
    const size_t element = shoal_type_bytes(operation->type), at = begin + (operation->is_offset ? element : 0);
    const int number = number_of(team, team->rank);
    const bool is_together = areas->device && operation->form == FORM_TENSORS; /* on a device all tensors or none */
    const bool shared[] = {is_shared(operation->memory, operation->salt, number, false),
                           is_shared(operation->memory, operation->salt, number, !is_together)};
    struct extent extents[2];
    size_t count;
    side.input = place(areas, shared[0], false, at);
    side.output = place(areas, shared[1], true, at);
    side.twins = find_twins(areas, shared, at);
    list_extents(&side, extents);
    overwrite(extents, GUARD);
    struct stretch *stretches = list_stretches(&side, false, &count);
    for (size_t i = 0; i < count; i++) {
        struct reference given;
        expect_input(&side, &stretches[i], &given);
        reference_fill(&given, stretches[i].begin, stretches[i].count);
    }
    free(stretches);
    return side;
}

/* ---- Checking ------------------------------------------------------------------------------------------------------------ */

static int compare_stretches(const void *a, const void *b)
{
    const char *one = ((const struct stretch *)a)->begin, *other = ((const struct stretch *)b)->begin;
    return (one > other) - (one < other);
}

/* Returns -1 if all bytes are unchanged, else the first that is not. */
static long find_written(const char *begin, const char *end, int byte)
{
    const size_t bytes = (size_t)(end - begin);
    if (begin >= end || (begin[0] == (char)byte && memcmp(begin, begin + 1, bytes - 1) == 0))
        return -1;
    long at = 0;
    while (begin[at] == (char)byte)
        at++;
    return at;
}

/* Returns true if an area of that many bytes contains its guard everywhere outside the stretches, which are in order. */
static bool check_area(const struct extent *extent, const struct stretch *stretches, size_t count, size_t element, long *at_out)
{
    const char *area = extent->begin, *begin = area - EDGE_BYTES, *end = area + extent->bytes + EDGE_BYTES;
    for (size_t i = 0; i <= count; i++) {
        if (i < count && (stretches[i].begin < area || stretches[i].begin > area + extent->bytes))
            continue;
        const char *until = i < count ? stretches[i].begin : end;
        const long written = find_written(begin, until, GUARD);
        *at_out = begin - area + written;
        if (written >= 0)
            return false;
        const char *behind = i < count ? until + stretches[i].count * element : end;
        begin = behind > begin ? behind : begin;
    }
    return true;
}

/* Returns true if, in place, the output has replaced this part of the input. */
static bool is_replaced(const struct operation_side *side, const struct stretch *stretch)
{
    const struct operation_row *row = &rows[side->operation.kind];
    if (!is_in_place(side, stretch->tensor))
        return false;
    const bool is_own = stretch->part == side->team.rank;
    return row->is_reduced ? !row->is_input_partitioned || is_own
                           : row->is_input_partitioned && row->is_output_partitioned && !is_own;
}

static uint64_t read_element(const void *memory, size_t element)
{
    uint64_t bits = 0;
    memcpy(&bits, memory, element);
    return bits;
}

/* Checks a stretch; if it is wrong, describes the error and returns false. */
static bool check_stretch(const struct stretch *stretch, const struct reference *wanted, const char *operand, char *text,
                          size_t bytes)
{
    const long wrong = reference_compare(wanted, stretch->begin, stretch->count);
    if (wrong < 0)
        return true;
    const size_t element = wanted->element, at = (size_t)wrong % REFERENCE_PERIOD;
    snprintf(text, bytes, "%s, part %d, tensor %zu: element %ld of %zu is 0x%llx instead of 0x%llx", operand, stretch->part,
             stretch->tensor, wrong, stretch->count,
             (unsigned long long)read_element(stretch->begin + (size_t)wrong * element, element),
             (unsigned long long)read_element(wanted->bytes + at * element, element));
    return false;
}

static bool check_stretches(const struct operation_side *side, const struct stretch *stretches, size_t count, bool is_output,
                            char *text, size_t bytes)
{
    struct reference wanted;
    for (size_t i = 0; i < count; i++) {
        if (!is_output && is_replaced(side, &stretches[i]))
            continue;
        if (is_output)
            expect_output(side, &stretches[i], &wanted);
        else
            expect_input(side, &stretches[i], &wanted);
        if (!check_stretch(&stretches[i], &wanted, is_output ? "output" : "input", text, bytes))
            return false;
    }
    return true;
}

/* Checks that nothing except operands was written, in both areas. */
static bool check_guards(const struct extent *extents, struct stretch *stretches, size_t count, size_t element, char *text,
                         size_t bytes)
{
    long at;
    qsort(stretches, count, sizeof *stretches, compare_stretches);
    for (int i = 0; i < 2; i++) {
        if (check_area(&extents[i], stretches, count, element, &at))
            continue;
        snprintf(text, bytes, "byte %ld of the area of the %s, which belongs to no operand, was written", at,
                 i ? "outputs" : "inputs");
        return false;
    }
    return true;
}

static struct stretch *join(struct stretch *a, size_t a_count, struct stretch *b, size_t b_count)
{
    a = realloc(a, (a_count + b_count + 1) * sizeof *a);
    if (!a)
        abort();
    memcpy(a + a_count, b, b_count * sizeof *b);
    free(b);
    return a;
}

/* Appends the error to the description of the call. Returns false, which is the result of the failed check. */
static bool blame(const struct team *team, const char *wrong, char *text, size_t bytes)
{
    const size_t described = strlen(text);
    snprintf(text + described, bytes - described, "; rank %d of %d: %s", team->rank, team->size, wrong);
    return false;
}

static bool blame_operation(const struct operation_side *side, const char *wrong, char *text, size_t bytes)
{
    operation_describe(&side->operation, text, bytes);
    return blame(&side->team, wrong, text, bytes);
}

bool operation_check(const struct operation_side *side, char *text, size_t bytes)
{
    char wrong[256];
    size_t given, taken;
    struct stretch *inputs = list_stretches(side, false, &given), *outputs = list_stretches(side, true, &taken);
    struct extent extents[2];
    list_extents(side, extents);
    synchronize(&side->twins);
    const bool is_right = check_stretches(side, outputs, taken, true, wrong, sizeof wrong) &&
                          check_stretches(side, inputs, given, false, wrong, sizeof wrong);
    struct stretch *all = join(inputs, given, outputs, taken);
    const bool is_ok =
        is_right && check_guards(extents, all, given + taken, shoal_type_bytes(side->operation.type), wrong, sizeof wrong);
    free(all);
    return is_ok || blame_operation(side, wrong, text, bytes);
}

static bool is_spoiled(const struct extent *extents, char *text, size_t bytes)
{
    for (int i = 0; i < 2; i++) {
        const char *begin = extents[i].begin - EDGE_BYTES, *end = extents[i].begin + extents[i].bytes + EDGE_BYTES;
        const long written = find_written(begin, end, SPOILED);
        if (written < 0)
            continue;
        snprintf(text, bytes, "byte %ld of the area of the %s was written when all was done", written - EDGE_BYTES,
                 i ? "outputs" : "inputs");
        return false;
    }
    return true;
}

void operation_spoil(const struct operation_side *side)
{
    struct extent extents[2];
    list_extents(side, extents);
    synchronize(&side->twins);
    overwrite(extents, SPOILED);
    upload(&side->twins, extents);
    synchronize(&side->twins);
}

bool operation_is_spoiled(const struct operation_side *side, char *text, size_t bytes)
{
    struct extent extents[2];
    char wrong[256];
    list_extents(side, extents);
    download(&side->twins, extents);
    synchronize(&side->twins);
    return is_spoiled(extents, wrong, sizeof wrong) || blame_operation(side, wrong, text, bytes);
}

/* ---- Calling ------------------------------------------------------------------------------------------------------------- */

static void list_parts(const struct operation_side *side, bool is_output, size_t *counts, size_t *at)
{
    for (int part = 0; part < side->team.size; part++) {
        counts[part] = length_at(side, is_output, part, 0);
        at[part] = part_at(side, is_output, part, 0);
    }
}

struct operation_arguments operation_open_arguments(const struct operation_side *side)
{
    const struct operation *operation = &side->operation;
    const size_t size = (size_t)side->team.size, tensors = count_tensors(operation);
    struct operation_arguments arguments = {.bytes = (tensors + 1) * sizeof(struct shoal_tensor) + 4 * size * sizeof(size_t)};
    char *memory = arguments.memory = malloc(arguments.bytes);
    if (!memory)
        abort();
    arguments.tensors = (struct shoal_tensor *)memory;
    list_tensors(side, arguments.tensors);
    /* A pointer to an operand that the rank does not have is ignored, whatever its value. */
    void *const nothing = operation->salt % 2 ? NULL : (void *)(uintptr_t)1;
    for (size_t t = 0; t < tensors; t++) {
        if (!has_operand(operation, false, side->team.rank))
            arguments.tensors[t].input = nothing;
        else if (operation->salt % 2 && tensor_end(side, false, t) == 0)
            arguments.tensors[t].input = NULL;
        if (!has_operand(operation, true, side->team.rank))
            arguments.tensors[t].output = nothing;
        else if (operation->salt % 2 && tensor_end(side, true, t) == 0)
            arguments.tensors[t].output = NULL;
    }
    arguments.input = tensors ? arguments.tensors[0].input : NULL;
    arguments.output = tensors ? arguments.tensors[0].output : NULL;
    if (operation->form != FORM_PARTS)
        return arguments;
    size_t *arrays = (size_t *)(void *)(memory + (tensors + 1) * sizeof(struct shoal_tensor));
    const bool in_row = order_of(side) == ORDER_ROW && operation->salt % 3;
    if (is_partitioned(operation, false)) {
        arguments.given = arrays;
        arguments.given_at = in_row ? NULL : arrays + size;
        list_parts(side, false, arrays, arrays + size);
    }
    if (is_partitioned(operation, true)) {
        arguments.taken = arrays + 2 * size;
        arguments.taken_at = in_row ? NULL : arrays + 3 * size;
        list_parts(side, true, arrays + 2 * size, arrays + 3 * size);
    }
    return arguments;
}

void operation_close_arguments(struct operation_arguments *arguments)
{
    memset(arguments->memory, 0xFF, arguments->bytes);
    free(arguments->memory);
}

/* A call and its posted twin have the same arguments. */
#define CALL(function, ...) \
    (request_out ? function##_post(comm, __VA_ARGS__, options, request_out) : function(comm, __VA_ARGS__, options))

static enum shoal_status call_tensors(const struct operation *o, const struct operation_arguments *a, struct shoal_comm *comm,
                                      const struct shoal_options *options, struct shoal_request **request_out)
{
    const size_t tensors = (size_t)o->tensors;
    switch (o->kind) {
    case OPERATION_ALLREDUCE:
        return CALL(shoal_allreduce_coalesced, a->tensors, tensors, o->type, o->op);
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatter_coalesced, a->tensors, tensors, o->type, o->op);
    case OPERATION_BROADCAST:
        return CALL(shoal_broadcast_coalesced, a->tensors, tensors, o->type, o->root);
    default:
        return CALL(shoal_allgather_coalesced, a->tensors, tensors, o->type);
    }
}

static enum shoal_status call_parts(const struct operation *o, const struct operation_arguments *a, struct shoal_comm *comm,
                                    const struct shoal_options *options, struct shoal_request **request_out)
{
    switch (o->kind) {
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatterv, a->input, a->output, a->given, o->type, o->op);
    case OPERATION_ALLGATHER:
        return CALL(shoal_allgatherv, a->input, a->output, a->taken, a->taken_at, o->type);
    default:
        return CALL(shoal_alltoallv, a->input, a->given, a->given_at, a->output, a->taken, a->taken_at, o->type);
    }
}

static enum shoal_status call_plain(const struct operation *o, const struct operation_arguments *a, struct shoal_comm *comm,
                                    const struct shoal_options *options, struct shoal_request **request_out)
{
    switch (o->kind) {
    case OPERATION_ALLREDUCE:
        return CALL(shoal_allreduce, a->input, a->output, o->count, o->type, o->op);
    case OPERATION_REDUCE:
        return CALL(shoal_reduce, a->input, a->output, o->count, o->type, o->op, o->root);
    case OPERATION_REDUCE_SCATTER:
        return CALL(shoal_reduce_scatter, a->input, a->output, o->count, o->type, o->op);
    case OPERATION_BROADCAST:
        return CALL(shoal_broadcast, a->input, a->output, o->count, o->type, o->root);
    case OPERATION_ALLGATHER:
        return CALL(shoal_allgather, a->input, a->output, o->count, o->type);
    case OPERATION_GATHER:
        return CALL(shoal_gather, a->input, a->output, o->count, o->type, o->root);
    case OPERATION_SCATTER:
        return CALL(shoal_scatter, a->input, a->output, o->count, o->type, o->root);
    case OPERATION_ALLTOALL:
        return CALL(shoal_alltoall, a->input, a->output, o->count, o->type);
    default:
        return request_out ? shoal_barrier_post(comm, options, request_out) : shoal_barrier(comm, options);
    }
}

enum shoal_status operation_call(const struct operation_side *side, struct shoal_comm *comm, struct shoal_request **request_out)
{
    const struct operation *operation = &side->operation;
    struct operation_side called = *side;
    called.input = side->twins.input ? side->twins.input : side->input;
    called.output = side->twins.output ? side->twins.output : side->output;
    struct operation_arguments arguments = operation_open_arguments(&called);
    struct shoal_options chosen = SHOAL_OPTIONS_INIT;
    struct extent extents[2];
    chosen.scale = operation->scale;
    chosen.stream = side->twins.stream;
    const bool is_scaled = rows[operation->kind].is_reduced && operation->op == SHOAL_SCALED_SUM;
    const struct shoal_options *options = is_scaled || side->twins.device ? &chosen : NULL;
    list_extents(side, extents);
    upload(&side->twins, extents);
    const enum shoal_status status =
        operation->form == FORM_TENSORS ? call_tensors(operation, &arguments, comm, options, request_out)
        : operation->form == FORM_PARTS ? call_parts(operation, &arguments, comm, options, request_out)
                                        : call_plain(operation, &arguments, comm, options, request_out);
    operation_close_arguments(&arguments);
    download(&side->twins, extents);
    return status;
}

/* ---- Drawing ------------------------------------------------------------------------------------------------------------- */

/* Draws sizes near every limit: of the bytes in a record, of cache lines, of small chunks. */
static size_t draw_bytes(uint64_t *random, size_t room)
{
    static const size_t bytes[] = {0, 8, 16, 24, 40, 4088, 4096, 4104, 12296, 16376, 16384, 16392, 40000, 81920};
    return reference_below(random, 2) ? bytes[reference_below(random, COUNT_OF(bytes))] : reference_below(random, room);
}

/* The 8 bits of bfloat16 hold the sums of many ranks, also between hosts, but not three times as much. */
static double draw_scale(uint64_t *random, enum shoal_type type, int size)
{
    static const double whole[] = {1, 3, -2, 1000003}, fractions[] = {1, 3, -2, 0.5}, powers[] = {1, 2, -2, 0.5};
    const double *scales = reference_is_integer(type) ? whole : type == SHOAL_BFLOAT16 && size > 8 ? powers : fractions;
    return scales[reference_below(random, COUNT_OF(whole))];
}

static enum shoal_op draw_op(uint64_t *random, enum shoal_type type)
{
    enum shoal_op op;
    do
        op = (enum shoal_op)reference_below(random, SHOAL_OP_END);
    while (!operation_is_legal(type, op));
    return op;
}

static enum operation_form draw_form(uint64_t *random, enum operation_kind kind)
{
    enum operation_form form;
    do
        form = (enum operation_form)reference_below(random, FORM_END);
    while (!rows[kind].has_form[form]);
    return form;
}

struct operation operation_draw(uint64_t *random, int size, size_t room)
{
    static const int tensors[] = {0, 1, 2, 5, 40};
    struct operation operation = {.kind = (enum operation_kind)reference_below(random, OPERATION_KIND_END),
                                  .type = (enum shoal_type)reference_below(random, SHOAL_TYPE_END),
                                  .lengths = (enum operation_lengths)reference_below(random, LENGTHS_END),
                                  .order = (enum operation_order)reference_below(random, ORDER_END),
                                  .place = (enum operation_place)reference_below(random, PLACE_END),
                                  .memory = (enum operation_memory)reference_below(random, MEMORY_END),
                                  .is_offset = reference_below(random, 2),
                                  .salt = reference_below(random, 997)};
    const struct operation_row *row = &rows[operation.kind];
    operation.form = draw_form(random, operation.kind);
    operation.op = row->is_reduced ? draw_op(random, operation.type) : SHOAL_SUM;
    operation.scale = draw_scale(random, operation.type, size);
    operation.root = row->root_contributes || row->root_receives ? (int)reference_below(random, (size_t)size) : 0;
    operation.tensors = tensors[reference_below(random, COUNT_OF(tensors))];
    operation.count = draw_bytes(random, room) / shoal_type_bytes(operation.type);
    if ((row->is_input_partitioned || row->is_output_partitioned) && reference_below(random, 2))
        operation.count /= (size_t)size;
    if (operation.kind == OPERATION_BARRIER)
        operation.count = 0;
    while (operation_room(&operation, size) > room) {
        operation.count /= 2;
        operation.tensors /= 2;
    }
    return operation;
}

static const char *const lengths_names[] = {"equal", "zero in turn", "all in one", "random"};
static const char *const order_names[] = {"in a row", "permuted", "with gaps", "placed by rank"};
static const char *const place_names[] = {"apart", "in place", "in place by rank"};
static const char *const memory_names[] = {"plain", "shared", "mixed"};

static const char *type_name(enum shoal_type type)
{
    static const char *const names[] = {
#define NAME(name, number, bytes) [SHOAL_##name] = #name,
        SHOAL_TYPE_LIST(NAME)
#undef NAME
    };
    return names[type];
}

static const char *op_name(enum shoal_op op)
{
    static const char *const names[] = {
#define NAME(name, number) [SHOAL_##name] = #name,
        SHOAL_OP_LIST(NAME)
#undef NAME
    };
    return names[op];
}

void operation_describe(const struct operation *operation, char *text, size_t bytes)
{
    const struct operation_row *row = &rows[operation->kind];
    char form[80] = "", op[64] = "", root[32] = "";
    if (operation->form == FORM_TENSORS)
        snprintf(form, sizeof form, "%d tensors of up to ", operation->tensors);
    if (operation->form == FORM_PARTS)
        snprintf(form, sizeof form, "parts %s, lengths %s, of up to ", order_names[operation->order],
                 lengths_names[operation->lengths]);
    if (row->is_reduced)
        snprintf(op, sizeof op, ", %s", op_name(operation->op));
    if (row->is_reduced && operation->op == SHOAL_SCALED_SUM)
        snprintf(op, sizeof op, ", %s by %g", op_name(operation->op), operation->scale);
    if (row->root_contributes || row->root_receives)
        snprintf(root, sizeof root, ", root %d", operation->root);
    snprintf(text, bytes, "%s of %s%zu %s%s%s, %s, %s memory%s, salt %llu", row->name, form, operation->count,
             type_name(operation->type), op, root, place_names[operation->place], memory_names[operation->memory],
             operation->is_offset ? ", off a line" : "", (unsigned long long)operation->salt);
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

static int count_messages(const struct exchange *exchange, int from, int to, int size)
{
    const bool is_sent = exchange->pattern == EXCHANGE_ALL || (exchange->pattern == EXCHANGE_RING && to == (from + 1) % size) ||
                         (exchange->pattern == EXCHANGE_ONE_TO_ALL && from == (int)(exchange->salt % (uint64_t)size));
    const bool is_to_other = from != to || exchange->pattern == EXCHANGE_ALL; /* which is to itself as well */
    return is_sent && is_to_other ? exchange->per_pair : 0;
}

static size_t message_length(const struct exchange *exchange, int from, int to, int index)
{
    const size_t key = ((size_t)from * 4096 + (size_t)to) * 64 + (size_t)index;
    const size_t lengths[] = {0, 1, exchange->count / 3, exchange->count};
    return lengths[reference_mix(key + exchange->salt * 7919) % COUNT_OF(lengths)];
}

/* One message from its rank's view. */
struct letter {
    int peer;
    int index; /* among the pair's messages */
    size_t at; /* elements from the start of the area */
    size_t count;
};

/* Returns which message of a pair is the i-th one in the order of tags. */
static int by_tag(const struct exchange *exchange, int i)
{
    int tag = 0, before = 0;
    for (; tag < exchange->tags; tag++) {
        const int with_tag = (exchange->per_pair - tag + exchange->tags - 1) / exchange->tags;
        if (i < before + with_tag)
            break;
        before += with_tag;
    }
    return tag + (i - before) * exchange->tags;
}

/* Lists the messages of one direction, in the order of peers. */
static size_t list_letters(const struct exchange_side *side, bool is_output, struct letter *letters)
{
    const struct exchange *exchange = &side->exchange;
    size_t listed = 0, at = 0;
    for (int peer = 0; peer < side->team.size; peer++) {
        const int from = is_output ? peer : side->team.rank, to = is_output ? side->team.rank : peer;
        for (int i = 0; i < count_messages(exchange, from, to, side->team.size) && listed < EXCHANGE_MESSAGES_MAX / 2; i++) {
            const int index = is_output ? by_tag(exchange, i) : i;
            letters[listed] = (struct letter){peer, index, at, message_length(exchange, from, to, index)};
            at += letters[listed++].count + GAP;
        }
    }
    return listed;
}

static void list_letter_extents(const struct exchange_side *side, struct extent *extents)
{
    for (int way = 0; way < 2; way++) {
        struct letter letters[EXCHANGE_MESSAGES_MAX / 2];
        const size_t count = list_letters(side, way, letters);
        const size_t elements = count ? letters[count - 1].at + letters[count - 1].count : 0;
        extents[way] = (struct extent){way ? side->output : side->input, elements * shoal_type_bytes(side->exchange.type)};
    }
}

static void expect_letter(const struct exchange_side *side, bool is_output, const struct letter *letter,
                          struct reference *reference_out)
{
    const int from = is_output ? letter->peer : side->team.rank, to = is_output ? side->team.rank : letter->peer;
    const struct reference_question question = {
        side->exchange.type, REFERENCE_MOVED, 1, side->exchange.salt, (size_t)to * 389 + (size_t)letter->index * 97,
        letter->count};
    reference_give(&question, number_of(&side->team, from), reference_out);
}

struct exchange exchange_draw(uint64_t *random, int size, size_t room)
{
    struct exchange exchange = {.pattern = (enum exchange_pattern)reference_below(random, EXCHANGE_PATTERN_END),
                                .type = (enum shoal_type)reference_below(random, SHOAL_TYPE_END),
                                .per_pair = (int)reference_below(random, 4),
                                .tags = 1 + (int)reference_below(random, 3),
                                .memory = (enum operation_memory)reference_below(random, MEMORY_END),
                                .is_offset = reference_below(random, 2),
                                .salt = reference_below(random, 997)};
    if (exchange.per_pair * size > 64)
        exchange.per_pair = 1;
    exchange.count = draw_bytes(random, room) / shoal_type_bytes(exchange.type);
    while (exchange_room(&exchange, size) > room)
        exchange.count /= 2;
    return exchange;
}

void exchange_describe(const struct exchange *exchange, char *text, size_t bytes)
{
    static const char *const patterns[] = {"nobody", "a ring", "one to all", "all to all"};
    snprintf(text, bytes, "messages, %s, %d each, up to %zu %s, %d tags, %s memory%s, salt %llu", patterns[exchange->pattern],
             exchange->per_pair, exchange->count, type_name(exchange->type), exchange->tags, memory_names[exchange->memory],
             exchange->is_offset ? ", off a line" : "", (unsigned long long)exchange->salt);
}

size_t exchange_room(const struct exchange *exchange, int size)
{
    const size_t messages = (size_t)exchange->per_pair * (size_t)size;
    return (messages * (exchange->count + GAP) * shoal_type_bytes(exchange->type) + 4 * EDGE_BYTES) / EDGE_BYTES * EDGE_BYTES;
}

struct exchange_side exchange_prepare(const struct exchange *exchange, const struct team *team, const struct areas *areas,
                                      size_t begin)
{
    struct exchange_side side = {.exchange = *exchange, .team = *team};
    struct letter letters[EXCHANGE_MESSAGES_MAX / 2];
    struct extent extents[2];
    const size_t element = shoal_type_bytes(exchange->type), at = begin + (exchange->is_offset ? element : 0);
    const size_t sent = list_letters(&side, false, letters);
    const int number = number_of(team, team->rank);
    const bool shared[] = {is_shared(exchange->memory, exchange->salt, number, false),
                           is_shared(exchange->memory, exchange->salt, number, true)};
    side.input = place(areas, shared[0], false, at);
    side.output = place(areas, shared[1], true, at);
    side.twins = find_twins(areas, shared, at);
    list_letter_extents(&side, extents);
    overwrite(extents, GUARD);
    for (size_t i = 0; i < sent; i++) {
        struct reference given;
        expect_letter(&side, false, &letters[i], &given);
        reference_fill(&given, side.input + letters[i].at * element, letters[i].count);
    }
    upload(&side.twins, extents);
    return side;
}

const struct shoal_options *exchange_options(const struct exchange_side *side, struct shoal_options *options)
{
    *options = (struct shoal_options)SHOAL_OPTIONS_INIT;
    options->stream = side->twins.stream;
    return side->twins.device ? options : NULL;
}

/* Sends and receives are mixed like two hands of cards, each beginning at another peer on each rank. */
size_t exchange_list(const struct exchange_side *side, struct shoal_message *messages)
{
    const struct exchange *exchange = &side->exchange;
    struct letter letters[2][EXCHANGE_MESSAGES_MAX / 2];
    const size_t counts[2] = {list_letters(side, false, letters[0]), list_letters(side, true, letters[1])};
    size_t next[2] = {0, 0}, listed = 0;
    uint64_t random = exchange->salt * 64 + (uint64_t)side->team.rank;
    while (next[0] < counts[0] || next[1] < counts[1]) {
        const size_t drawn = reference_below(&random, 2), way = next[drawn] < counts[drawn] ? drawn : 1 - drawn;
        const size_t begin = (size_t)side->team.rank * (size_t)exchange->per_pair;
        const struct letter *letter = &letters[way][(begin + next[way]++) % counts[way]];
        char *twin = twin_of(&side->twins, (int)way), *area = twin ? twin : way ? side->output : side->input;
        messages[listed++] = (struct shoal_message){.is_send = way == 0,
                                                    .buffer = area + letter->at * shoal_type_bytes(exchange->type),
                                                    .count = letter->count,
                                                    .type = exchange->type,
                                                    .peer = letter->peer,
                                                    .tag = (int)(exchange->salt % 3) + letter->index % exchange->tags};
    }
    return listed;
}

/* Lists the letters of one direction as stretches; returns false if one is wrong. */
static bool check_letters(const struct exchange_side *side, bool is_output, struct stretch *stretches, size_t *count_out,
                          char *text, size_t bytes)
{
    struct letter letters[EXCHANGE_MESSAGES_MAX / 2];
    struct reference wanted;
    const size_t element = shoal_type_bytes(side->exchange.type);
    char *area = is_output ? side->output : side->input;
    *count_out = list_letters(side, is_output, letters);
    for (size_t i = 0; i < *count_out; i++) {
        stretches[i] =
            (struct stretch){area + letters[i].at * element, letters[i].count, letters[i].peer, (size_t)letters[i].index};
        expect_letter(side, is_output, &letters[i], &wanted);
        if (!check_stretch(&stretches[i], &wanted, is_output ? "received" : "sent", text, bytes))
            return false;
    }
    return true;
}

static bool blame_exchange(const struct exchange_side *side, const char *wrong, char *text, size_t bytes)
{
    exchange_describe(&side->exchange, text, bytes);
    return blame(&side->team, wrong, text, bytes);
}

bool exchange_check(const struct exchange_side *side, char *text, size_t bytes)
{
    char wrong[256];
    struct stretch stretches[EXCHANGE_MESSAGES_MAX];
    struct extent extents[2];
    size_t received, sent;
    list_letter_extents(side, extents);
    download(&side->twins, extents);
    synchronize(&side->twins);
    if (check_letters(side, true, stretches, &received, wrong, sizeof wrong) &&
        check_letters(side, false, stretches + received, &sent, wrong, sizeof wrong) &&
        check_guards(extents, stretches, received + sent, shoal_type_bytes(side->exchange.type), wrong, sizeof wrong))
        return true;
    return blame_exchange(side, wrong, text, bytes);
}

void exchange_spoil(const struct exchange_side *side)
{
    struct extent extents[2];
    list_letter_extents(side, extents);
    synchronize(&side->twins);
    overwrite(extents, SPOILED);
    upload(&side->twins, extents);
    synchronize(&side->twins);
}

bool exchange_is_spoiled(const struct exchange_side *side, char *text, size_t bytes)
{
    char wrong[256];
    struct extent extents[2];
    list_letter_extents(side, extents);
    download(&side->twins, extents);
    synchronize(&side->twins);
    return is_spoiled(extents, wrong, sizeof wrong) || blame_exchange(side, wrong, text, bytes);
}
