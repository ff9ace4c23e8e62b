/* Checks the arguments of a call once, before the call does anything. The traits of its collective type define which operands a
 * rank has and which of them are partitioned. A refused call changes nothing. Any thread. */
#ifndef SHOAL_COMM_ARGUMENTS_H
#define SHOAL_COMM_ARGUMENTS_H

#include "comm/context.h"

/* The arguments of a call beyond struct shoal_call: lengths and offsets of parts, or several tensors. The arrays are the
 * user's. */
struct shoal_extra {
    const size_t *sent, *sent_at;         /* the input's parts */
    const size_t *received, *received_at; /* the output's parts */
    const struct shoal_tensor *tensors;
    size_t tensor_count;
    bool has_tensors;
};

/* Checks a collective call and fills in the fields that follow from the others: operands that the rank does not have become
 * NULL; extra (NULL if none) becomes count and layout. `name` is the public function's name, for messages. ERR_ARGUMENT,
 * ERR_STATE, ERR_MEMORY. On OK the caller owns call->layout until the call is posted. */
SHOAL_MUST_USE enum shoal_status shoal_arguments_check(const struct shoal_comm *comm, const char *name, struct shoal_call *call,
                                                       const struct shoal_extra *extra, const struct shoal_options *options);

/* Like shoal_arguments_check(), but for a send or receive. */
SHOAL_MUST_USE enum shoal_status shoal_arguments_check_message(const struct shoal_comm *comm, const char *name,
                                                               const struct shoal_message *message,
                                                               const struct shoal_options *options, struct shoal_call *call);

/* Makes the layout of a call that extra describes once more, for callers that need one that lives longer. ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_arguments_lay_out(const struct shoal_comm *comm, const char *name,
                                                         struct shoal_call *call, const struct shoal_extra *extra);

/* Logs why the call is refused. Returns ERR_ARGUMENT. */
enum shoal_status shoal_arguments_refuse(const struct shoal_comm *comm, const char *call, const char *format, ...)
    SHOAL_PRINTF(3, 4);

#endif
