/* Prints a plan as a JSON array, one step a line. */
#include <inttypes.h>

#include "plan/plan.h"

#define BLOCK_TEXT_MAX 96

static void print_blocks(const char *name, const struct shoal_block *blocks, int count, FILE *out)
{
    char text[BLOCK_TEXT_MAX];
    fprintf(out, ",\"%s\":[", name);
    for (int i = 0; i < count; i++) {
        shoal_plan_print_block(&blocks[i], text, sizeof text);
        fprintf(out, "%s\"%s\"", i ? "," : "", text);
    }
    fputc(']', out);
}

static void print_move(const char *name, const struct shoal_plan *plan, const struct shoal_step *step, FILE *out)
{
    const struct shoal_block *blocks = plan->blocks + step->first_block;
    fprintf(out, "{\"step\":\"%s\"", name);
    print_blocks("from", blocks, step->source_count, out);
    print_blocks("to", blocks + step->source_count, step->dest_count, out);
    fputc('}', out);
}

static void print_wait(const struct shoal_plan *plan, const struct shoal_step *step, FILE *out)
{
    const bool lends_input = step->value & SHOAL_LEND_INPUT, lends_output = step->value & SHOAL_LEND_OUTPUT;
    if (step->peer == plan->rank && step->value)
        fprintf(out, "{\"step\":\"wait\",\"for\":\"lending\",\"input\":%s,\"output\":%s}", lends_input ? "true" : "false",
                lends_output ? "true" : "false");
    else if (step->peer == plan->rank)
        fputs("{\"step\":\"wait\",\"for\":\"puts\"}", out);
    else if (step->value == 0)
        fprintf(out, "{\"step\":\"wait\",\"for\":\"credit\",\"peer\":%d}", step->peer);
    else
        fprintf(out, "{\"step\":\"wait\",\"for\":\"signal\",\"peer\":%d,\"signal\":%" PRIu32 "}", step->peer, step->value);
}

static void print_step(const struct shoal_plan *plan, const struct shoal_step *step, FILE *out)
{
    switch (step->kind) {
    case SHOAL_STEP_REDUCE:
        print_move(step->source_count == 1 ? "copy" : step->is_partial ? "partial" : "reduce", plan, step, out);
        return;
    case SHOAL_STEP_PUT:
        print_move("put", plan, step, out);
        return;
    case SHOAL_STEP_SIGNAL:
        fprintf(out, "{\"step\":\"signal\",\"peer\":%d}", step->peer);
        return;
    default:
        print_wait(plan, step, out);
    }
}

void shoal_plan_print_json(const struct shoal_plan *plan, FILE *out)
{
    fputc('[', out);
    for (uint32_t i = 0; i < plan->step_count; i++) {
        fputs(i ? ",\n    " : "\n    ", out);
        print_step(plan, &plan->steps[i], out);
    }
    fputc(']', out);
}
