/* The first cause of a pipeline's failure, as this rank gives it to the others. */
#include <stdarg.h>
#include <stdio.h>

#include "pipeline/run/pipeline_run.h"

void run_share_cause(struct shoal_pipeline *pipeline, enum shoal_status status, const char *format, ...)
{
    struct shoal_failure cause = SHOAL_FAILURE_INIT;
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cause.status = status;
    cause.rank = cause.reporter = pipeline->rank;
    cause.is_given = 1;
    snprintf(cause.operation, sizeof cause.operation, "step %llu of %s", (unsigned long long)pipeline->step, pipeline->name);
    snprintf(cause.text, sizeof cause.text, "%s, rank %d: %s", pipeline->name, pipeline->rank, text);
    shoal_comm_fail(pipeline->comm, &cause);
}
