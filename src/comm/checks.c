/* The checks with which each call begins: may it use this context, or this communicator? */
#include "comm/context.h"

enum shoal_status shoal_context_check(const struct shoal_context *context, const char *call)
{
    if (SHOAL_UNLIKELY(!context)) {
        fprintf(stderr, "shoal: [comm] %s: the context is NULL\n", call);
        return SHOAL_ERR_ARGUMENT;
    }
    if (SHOAL_UNLIKELY(!*context->is_parent)) {
        fprintf(stderr,
                "shoal: [comm] %s: the context was made before fork() and cannot be used in the child; make a new one there\n",
                call);
        return SHOAL_ERR_STATE;
    }
    return SHOAL_OK;
}

static SHOAL_NOINLINE enum shoal_status refuse_comm(const struct shoal_comm *comm, const char *call)
{
    if (!comm) {
        fprintf(stderr, "shoal: [comm] %s: the communicator is NULL\n", call);
        return SHOAL_ERR_ARGUMENT;
    }
    SHOAL_TRY(shoal_context_check(comm->context, call));
    return shoal_log_fail(&comm->context->log, SHOAL_ERR_STATE, "comm", "%s: communicator %s was finalized", call, comm->name);
}

enum shoal_status shoal_comm_check(const struct shoal_comm *comm, const char *call)
{
    const bool is_usable = comm && *comm->context->is_parent && !comm->is_finalized;
    return SHOAL_LIKELY(is_usable) ? SHOAL_OK : refuse_comm(comm, call);
}
