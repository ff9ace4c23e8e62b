/* The calls that ranks make together, as one table, and a rank's operands for one of them, so that tests can check every call
 * in the same way. Inputs and expected results are those of tests/operations.h. */
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

/* How the call is made; the same on every rank. Elements are float32. */
struct fault_load {
    const struct fault_call *call;
    int root;
    size_t count; /* of a whole, of the longest part, of the longest tensor or message */
    bool is_shared;
    bool is_in_place; /* if the call supports it */
};

struct fault_operands {
    struct areas areas;
    struct operation_side side;     /* or: */
    struct exchange_side *messages; /* NULL: not an exchange */
};

/* Returns the description of a call that is not an exchange. */
struct operation fault_operation(const struct fault_load *load);

/* Returns how many elements the longest part may have if the larger operand has `elements`. */
size_t fault_count_for(const struct fault_call *call, int size, size_t elements);

/* Fills the inputs. Returns false after a failed check. The caller frees with fault_operands_free. */
bool fault_operands_make(struct fault_rank *self, const struct fault_load *load, struct fault_operands *operands_out);
/* Does the same for any operation in plain or shared memory. */
bool fault_operands_make_as(struct fault_rank *self, const struct operation *operation, struct fault_operands *operands_out);
/* The context keeps shared memory. */
void fault_operands_free(struct fault_operands *operands);

/* request_out NULL: blocks. */
enum shoal_status fault_operands_call(const struct fault_operands *operands, struct shoal_comm *comm,
                                      struct shoal_request **request_out);
/* Makes the call once and checks its result; returns false after a failed check. */
bool fault_operands_call_well(struct fault_rank *self, const struct fault_operands *operands, struct shoal_comm *comm);

/* fault_operands_mark() writes a pattern over all operands. The other function returns false if the pattern has changed. */
void fault_operands_mark(struct fault_operands *operands);
bool fault_operands_are_marked(const struct fault_operands *operands);

#endif
