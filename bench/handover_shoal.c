/* Shoal's side of bench_handover.py: handover_shoal BYTES TURNS, with two ranks. A pipeline of two stages and one microbatch:
 * stage 0 writes its output in memory of shoal_pipeline_alloc, and stage 1 answers with a gradient. */
#include <shoal/pipeline.h>
#include <string.h>

#include "handover.h"

struct relay {
    struct shoal_pipeline *pipeline;
    size_t count;
    uint64_t turn, there_ns;
    struct handover *made;
};

static void must(enum shoal_status status, const char *what)
{
    if (status == SHOAL_OK)
        return;
    fprintf(stderr, "handover_shoal: %s: %s\n", what, shoal_status_text(status));
    exit(1);
}

static void *output_begin(struct relay *relay, const struct shoal_work *work, size_t bytes)
{
    must(shoal_pipeline_alloc(relay->pipeline, bytes, &work->outputs[0].data), "shoal_pipeline_alloc");
    work->outputs[0].bytes = bytes;
    return work->outputs[0].data;
}

static enum shoal_status compute(void *user, const struct shoal_work *work, char *text, size_t text_bytes)
{
    struct relay *const relay = user;
    struct handover *const made = &relay->made[relay->turn];
    (void)text, (void)text_bytes;
    if (work->action.kind == SHOAL_FORWARD && work->action.stage == 0) {
        message_write(output_begin(relay, work, relay->count * sizeof(uint64_t)), relay->count, relay->turn);
        made->written_ns = now_ns();
    } else if (work->action.kind == SHOAL_FORWARD) {
        relay->there_ns = now_ns();
        message_read(work->inputs[0].data, relay->count, relay->turn);
    } else if (work->action.stage == 1) {
        memcpy(output_begin(relay, work, sizeof relay->there_ns), &relay->there_ns, sizeof relay->there_ns);
    } else {
        made->answered_ns = now_ns();
        memcpy(&made->there_ns, work->inputs[0].data, sizeof made->there_ns);
    }
    return SHOAL_OK;
}

static void turns_run(struct shoal_context *context, struct shoal_comm *comm, struct relay *relay, size_t turns)
{
    struct shoal_schedule_options wanted = SHOAL_SCHEDULE_OPTIONS_INIT;
    struct shoal_pipeline_calls calls = SHOAL_PIPELINE_CALLS_INIT;
    struct shoal_schedule *schedule = NULL;
    wanted.ranks = 2;
    wanted.microbatches = 1;
    calls.compute = compute;
    calls.user = relay;
    must(shoal_schedule_create(&wanted, &schedule, NULL, 0), "shoal_schedule_create");
    must(shoal_pipeline_create(context, comm, schedule, NULL, &relay->pipeline), "shoal_pipeline_create");
    for (relay->turn = 0; relay->turn < turns; relay->turn++)
        must(shoal_pipeline_step(relay->pipeline, &calls), "shoal_pipeline_step");
    shoal_pipeline_free(relay->pipeline);
    shoal_schedule_free(schedule);
}

int main(int argc, char **argv)
{
    struct relay relay = {.count = argc > 2 ? strtoull(argv[1], NULL, 10) / sizeof(uint64_t) : 0};
    const size_t turns = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    struct shoal_context *context = NULL;
    struct shoal_comm *comm = NULL;
    relay.made = calloc(turns + WARMUPS, sizeof *relay.made);
    if (!turns || !relay.made)
        return 1;
    must(shoal_context_create(NULL, &context), "shoal_context_create");
    must(shoal_comm_create(context, NULL, &comm), "shoal_comm_create");
    turns_run(context, comm, &relay, turns + WARMUPS);
    if (shoal_comm_rank(comm) == 0)
        handovers_print(relay.made + WARMUPS, turns);
    shoal_comm_free(comm);
    shoal_context_destroy(context);
    free(relay.made);
    return 0;
}
