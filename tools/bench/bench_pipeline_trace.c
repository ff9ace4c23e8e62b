/* Writes the last step of `shoal bench pipeline`, for viewers of traces, in the form of shoal sim pipeline --trace. */
#include "bench_pipeline.h"

#include <errno.h>
#include <string.h>

static const struct {
    const char *name, *letter;
} kinds[] = {
    [SHOAL_FORWARD] = {"forward", "F"},
    [SHOAL_BACKWARD] = {"backward", "B"},
    [SHOAL_INPUT_GRADIENT] = {"input gradient", "I"},
    [SHOAL_WEIGHT_GRADIENT] = {"weight gradient", "W"},
    [SHOAL_RECOMPUTE] = {"recompute", "R"},
    [SHOAL_SUM_REPLICAS] = {"replica sum", "S"},
    [SHOAL_SUM_TIED] = {"tied sum", "T"},
    [SHOAL_UPDATE] = {"update", "U"},
};

static void action_print(FILE *out, int rank, const struct shoal_action *action, const struct pipeline_span *span)
{
    if (span->waited_us > 0)
        fprintf(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":2,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"waits\",\"cat\":\"wait\"}",
                rank + 1, span->begin_us - span->waited_us, span->waited_us);
    fprintf(out,
            ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":1,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"%u%s%u\",\"cat\":\"%s\",\"args\":{"
            "\"stage\":%u,\"microbatch\":%u,\"waited_us\":%.3f}}",
            rank + 1, span->begin_us, span->end_us - span->begin_us, action->stage, kinds[action->kind].letter,
            action->microbatch, kinds[action->kind].name, action->stage, action->microbatch, span->waited_us);
}

static void rank_print(FILE *out, const struct pipeline_result *result, int rank)
{
    uint32_t count, own = 0, replica;
    const enum shoal_status status = shoal_schedule_place(result->schedule, (uint32_t)rank, &own, &replica);
    (void)status; /* the pipeline has as many ranks as the schedule */
    const struct shoal_action *actions = shoal_schedule_actions(result->schedule, own, &count);
    fprintf(out, "%s\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d, host %.0f\"}}",
            rank ? "," : "", rank + 1, rank, result->reports[rank].host);
    for (uint32_t i = 0; i < count; i++)
        action_print(out, rank, &actions[i], &result->spans[(size_t)rank * result->span_count + i]);
}

bool bench_pipeline_trace_write(const struct pipeline_result *result, const char *name)
{
    FILE *out = fopen(name, "we");
    if (out) {
        fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", out);
        for (int r = 0; r < result->ranks; r++)
            rank_print(out, result, r);
        fputs("\n]}\n", out);
    }
    const bool is_written = out && !ferror(out);
    const bool is_whole = out && fclose(out) == 0 && is_written;
    if (!is_whole)
        fprintf(stderr, "shoal bench: cannot write %s: %s\n", name, strerror(errno));
    return is_whole;
}
