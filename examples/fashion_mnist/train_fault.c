#include "train_fault.h"

#include <stdarg.h>
#include <stdio.h>

int fault_set(struct fault *fault, int exit_code, const char *format, ...)
{
    if (fault->exit_code)
        return -1;
    fault->exit_code = exit_code;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault->text, sizeof(fault->text), format, arguments);
    va_end(arguments);
    return -1;
}

int fault_agree(const struct fault *fault, struct shoal_comm *comm)
{
    int rank = shoal_comm_rank(comm);
    /* The largest entry wins: the lowest failed rank, with its exit code in the low 3 bits. */
    int64_t mine = fault->exit_code ? ((int64_t)(shoal_comm_size(comm) - rank) << 3) + fault->exit_code : 0;
    int64_t worst;
    if (shoal_allreduce(comm, &mine, &worst, 1, SHOAL_INT64, SHOAL_MAX, NULL))
        return EXIT_FAILED;
    if (worst && worst == mine)
        fprintf(stderr, "fashion_mnist: %s\n", fault->text);
    return (int)(worst & 7);
}
