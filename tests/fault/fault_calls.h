/* The calls that ranks make together, as one table, and a rank's operands for one of them: tests ask the same of every call.
 * Inputs and expected results are those of tests/operations.h. */
#ifndef SHOAL_TESTS_FAULT_CALLS_H
#define SHOAL_TESTS_FAULT_CALLS_H

#include "fault_harness.h"
#include "operations.h"

struct fault_call {
    const char *name; /* of the function, without "shoal_" */
    bool is_exchange; /* messages from each rank to each; else: */
    enum operation_kind kind;
    enum operation_form form;
};

enum fault_call_id {
    FAULT_ALLREDUCE,
    FAULT_REDUCE,
    FAULT_REDUCE_SCATTER,
    FAULT_BROADCAST,
    FAULT_ALLGATHER,
    FAULT_GATHER,
    FAULT_SCATTER,
    FAULT_ALLTOALL,
    FAULT_ALLGATHERV,
    FAULT_REDUCE_SCATTERV,
    FAULT_ALLTOALLV,
    FAULT_ALLREDUCE_COALESCED,
    FAULT_REDUCE_SCATTER_COALESCED,
    FAULT_BROADCAST_COALESCED,
    FAULT_ALLGATHER_COALESCED,
    FAULT_EXCHANGE,
    FAULT_CALLS
};

extern const struct fault_call fault_calls[FAULT_CALLS];

/* How it is called; the same on every rank. Elements are float32. */
struct fault_load {
    const struct fault_call *call;
    int root;
    size_t count; /* of a whole, of the longest part, of the longest tensor or message */
    bool is_shared;
    bool is_in_place; /* where the call can be */
};

struct fault_operands {
    struct areas areas;
    struct operation_side side;     /* or: */
    struct exchange_side *messages; /* NULL: no exchange */
};

/* The description of a call that is no exchange. */
struct operation fault_operation(const struct fault_load *load);

/* How many elements the longest part may have when the larger operand is to have `elements`. */
size_t fault_count_for(const struct fault_call *call, int size, size_t elements);

/* Fills the inputs. False after a failed check. The caller frees with fault_operands_free. */
bool fault_operands_make(struct fault_rank *self, const struct fault_load *load, struct fault_operands *operands_out);
/* The same for any operation in plain or shared memory. */
bool fault_operands_make_as(struct fault_rank *self, const struct operation *operation, struct fault_operands *operands_out);
/* Shared memory stays the context's. */
void fault_operands_free(struct fault_operands *operands);

/* request_out NULL: blocks. */
enum shoal_status fault_operands_call(const struct fault_operands *operands, struct shoal_comm *comm,
                                      struct shoal_request **request_out);
/* Once, and all is as it must be; false after a failed check. */
bool fault_operands_call_well(struct fault_rank *self, const struct fault_operands *operands, struct shoal_comm *comm);

/* Writes a pattern over all operands, and looks whether it is still there; false where it is not. */
void fault_operands_mark(struct fault_operands *operands);
bool fault_operands_are_marked(const struct fault_operands *operands);

#endif
