/* Checks the arguments of a call once, before the call does anything. The traits of its collective type define which operands a
 * rank has and which of them are partitioned. A refused call changes nothing. Any thread. */
#ifndef SHOAL_COMM_ARGUMENTS_H
#define SHOAL_COMM_ARGUMENTS_H

#include "comm/context.h"

/* Checks a collective call and fills in the fields that follow from the others: operands that the rank does not have become
 * NULL; the arrays become count and layout. ERR_ARGUMENT,
 * ERR_STATE, ERR_MEMORY. On OK the caller owns call->layout until the call is posted. */
SHOAL_MUST_USE enum shoal_status shoal_arguments_check(const struct shoal_comm *comm, struct shoal_call *call,
                                                       const struct shoal_options *options);

/* Like shoal_arguments_check(), but for a send or receive. */
SHOAL_MUST_USE enum shoal_status shoal_arguments_check_message(const struct shoal_comm *comm, const char *name,
                                                               const struct shoal_message *message,
                                                               const struct shoal_options *options, struct shoal_call *call);

/* Logs why the call is refused. Returns ERR_ARGUMENT. */
enum shoal_status shoal_arguments_refuse(const struct shoal_comm *comm, const char *call, const char *format, ...)
    SHOAL_PRINTF(3, 4);

#endif
