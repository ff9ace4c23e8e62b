#include "fault_calls.h"

#include <stdlib.h>
#include <string.h>

#define MARK 0x5C
#define MARK_EVERY 64 /* bytes: one cache line */
#define TENSORS 4     /* one of them empty */
#define PER_PAIR 2

const struct fault_call fault_calls[FAULT_CALLS] = {
    [FAULT_ALLREDUCE] = {"allreduce", false, OPERATION_ALLREDUCE, FORM_PLAIN},
    [FAULT_REDUCE] = {"reduce", false, OPERATION_REDUCE, FORM_PLAIN},
    [FAULT_REDUCE_SCATTER] = {"reduce_scatter", false, OPERATION_REDUCE_SCATTER, FORM_PLAIN},
    [FAULT_BROADCAST] = {"broadcast", false, OPERATION_BROADCAST, FORM_PLAIN},
    [FAULT_ALLGATHER] = {"allgather", false, OPERATION_ALLGATHER, FORM_PLAIN},
    [FAULT_GATHER] = {"gather", false, OPERATION_GATHER, FORM_PLAIN},
    [FAULT_SCATTER] = {"scatter", false, OPERATION_SCATTER, FORM_PLAIN},
    [FAULT_ALLTOALL] = {"alltoall", false, OPERATION_ALLTOALL, FORM_PLAIN},
    [FAULT_ALLGATHERV] = {"allgatherv", false, OPERATION_ALLGATHER, FORM_PARTS},
    [FAULT_REDUCE_SCATTERV] = {"reduce_scatterv", false, OPERATION_REDUCE_SCATTER, FORM_PARTS},
    [FAULT_ALLTOALLV] = {"alltoallv", false, OPERATION_ALLTOALL, FORM_PARTS},
    [FAULT_ALLREDUCE_COALESCED] = {"allreduce_coalesced", false, OPERATION_ALLREDUCE, FORM_TENSORS},
    [FAULT_REDUCE_SCATTER_COALESCED] = {"reduce_scatter_coalesced", false, OPERATION_REDUCE_SCATTER, FORM_TENSORS},
    [FAULT_BROADCAST_COALESCED] = {"broadcast_coalesced", false, OPERATION_BROADCAST, FORM_TENSORS},
    [FAULT_ALLGATHER_COALESCED] = {"allgather_coalesced", false, OPERATION_ALLGATHER, FORM_TENSORS},
    [FAULT_EXCHANGE] = {"exchange", true, OPERATION_KIND_END, FORM_PLAIN},
};

/* ---- Descriptions -------------------------------------------------------------------------------------------------------- */

struct operation fault_operation(const struct fault_load *load)
{
    return (struct operation){.kind = load->call->kind,
                              .form = load->call->form,
                              .type = SHOAL_FLOAT32,
                              .scale = 1,
                              .root = load->root,
                              .count = load->count,
                              .tensors = TENSORS,
                              .lengths = LENGTHS_RANDOM,
                              .order = ORDER_MIXED,
                              .place = load->is_in_place ? PLACE_SAME : PLACE_APART,
                              .memory = load->is_shared ? MEMORY_SHARED : MEMORY_PLAIN};
}

static struct exchange describe_exchange(const struct fault_load *load)
{
    return (struct exchange){.pattern = EXCHANGE_ALL,
                             .type = SHOAL_FLOAT32,
                             .count = load->count,
                             .per_pair = PER_PAIR,
                             .tags = 1,
                             .memory = load->is_shared ? MEMORY_SHARED : MEMORY_PLAIN};
}

size_t fault_count_for(const struct fault_call *call, int size, size_t elements)
{
    if (call->is_exchange)
        return elements / ((size_t)size * PER_PAIR);
    const struct operation_row *row = operation_row(call->kind);
    const size_t parts = row->is_input_partitioned || row->is_output_partitioned ? (size_t)size : 1;
    return elements / parts / (call->form == FORM_TENSORS ? TENSORS : 1);
}

/* ---- Operands ------------------------------------------------------------------------------------------------------------ */

static bool make_areas(struct fault_rank *self, bool is_shared, size_t bytes, struct areas *areas)
{
    areas->bytes = bytes;
    for (int i = 0; i < 2; i++) {
        char *memory = (char *)fault_floats(self, is_shared, bytes / sizeof(float) + 1);
        if (!memory)
            return false;
        (is_shared ? areas->shared : areas->plain)[i] = memory;
    }
    return true;
}

bool fault_operands_make_as(struct fault_rank *self, const struct operation *operation, struct fault_operands *operands_out)
{
    const struct team team = {self->size, self->rank, NULL};
    const bool is_shared = operation->memory == MEMORY_SHARED;
    *operands_out = (struct fault_operands){0};
    if (!make_areas(self, is_shared, operation_room(operation, self->size), &operands_out->areas))
        return false;
    operands_out->side = operation_prepare(operation, &team, &operands_out->areas, 0);
    return true;
}

static bool make_messages(struct fault_rank *self, const struct fault_load *load, struct fault_operands *operands_out)
{
    const struct team team = {self->size, self->rank, NULL};
    const struct exchange exchange = describe_exchange(load);
    *operands_out = (struct fault_operands){.messages = malloc(sizeof *operands_out->messages)};
    if (!fault_check(self, operands_out->messages != NULL, "no memory") ||
        !make_areas(self, load->is_shared, exchange_room(&exchange, self->size), &operands_out->areas))
        return false;
    *operands_out->messages = exchange_prepare(&exchange, &team, &operands_out->areas, 0);
    return true;
}

bool fault_operands_make(struct fault_rank *self, const struct fault_load *load, struct fault_operands *operands_out)
{
    const struct operation operation = fault_operation(load);
    return load->call->is_exchange ? make_messages(self, load, operands_out)
                                   : fault_operands_make_as(self, &operation, operands_out);
}

void fault_operands_free(struct fault_operands *operands)
{
    free(operands->areas.plain[0]);
    free(operands->areas.plain[1]);
    free(operands->messages);
    *operands = (struct fault_operands){0};
}

/* ---- Calling ------------------------------------------------------------------------------------------------------------- */

enum shoal_status fault_operands_call(const struct fault_operands *operands, struct shoal_comm *comm,
                                      struct shoal_request **request_out)
{
    struct shoal_message messages[EXCHANGE_MESSAGES_MAX];
    if (!operands->messages)
        return operation_call(&operands->side, comm, request_out);
    const size_t count = exchange_list(operands->messages, messages);
    return request_out ? shoal_exchange_post(comm, messages, count, NULL, request_out)
                       : shoal_exchange(comm, messages, count, NULL);
}

bool fault_operands_call_well(struct fault_rank *self, const struct fault_operands *operands, struct shoal_comm *comm)
{
    char text[512] = "";
    const enum shoal_status status = fault_operands_call(operands, comm, NULL);
    if (!fault_check(self, status == SHOAL_OK, "a call that all made: %s", shoal_status_name(status)))
        return false;
    const bool is_right = operands->messages ? exchange_check(operands->messages, text, sizeof text)
                                             : operation_check(&operands->side, text, sizeof text);
    return fault_check(self, is_right, "%s", text);
}

/* ---- Marks --------------------------------------------------------------------------------------------------------------- */

static char *area_of(const struct fault_operands *operands, int i)
{
    const struct areas *areas = &operands->areas;
    return areas->plain[i] ? areas->plain[i] : areas->shared[i];
}

void fault_operands_mark(struct fault_operands *operands)
{
    for (int i = 0; i < 2; i++) {
        for (size_t at = 0; area_of(operands, i) && at < operands->areas.bytes; at += MARK_EVERY)
            area_of(operands, i)[at] = MARK;
    }
}

bool fault_operands_are_marked(const struct fault_operands *operands)
{
    bool is_marked = true;
    for (int i = 0; i < 2; i++) {
        for (size_t at = 0; area_of(operands, i) && at < operands->areas.bytes; at += MARK_EVERY)
            is_marked &= area_of(operands, i)[at] == MARK;
    }
    return is_marked;
}
