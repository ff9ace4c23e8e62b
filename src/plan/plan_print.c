#include "plan/plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

/* The destination of text: a file, or a buffer of `bytes` bytes with `used` of them filled. Text that does not fit is
 * dropped. */
struct sink {
    FILE *file;
    char *text;
    size_t bytes;
    size_t used;
};

static void emit(struct sink *sink, const char *format, ...) SHOAL_PRINTF(2, 3);

static void emit(struct sink *sink, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (sink->file) {
        vfprintf(sink->file, format, args);
    } else if (sink->used < sink->bytes) {
        const int wrote = vsnprintf(sink->text + sink->used, sink->bytes - sink->used, format, args);
        sink->used += wrote > 0 ? (size_t)wrote : 0;
    }
    va_end(args);
}

/* Marks cut text with dots, so that it does not look complete. */
static void mark_cut(const struct sink *sink)
{
    if (sink->used >= sink->bytes && sink->bytes > 3)
        memcpy(sink->text + sink->bytes - 4, "...", 4);
}

static void emit_block(struct sink *sink, const struct shoal_block *block)
{
    static const char *const names[] = {"in", "out", "stg", "gpu"}, *const parts[] = {"", ".out", ".back"};
    const char *name = block->operand < SHOAL_COUNT_OF(names) ? names[block->operand] : "?";

    emit(sink, "%s[%d]", name, block->rank);
    if (block->operand == SHOAL_STAGING)
        emit(sink, ".%d", block->part);
    if (block->operand == SHOAL_ON_DEVICE)
        emit(sink, "%s", block->part < SHOAL_COUNT_OF(parts) ? parts[block->part] : ".?");
    emit(sink, " %d/%d", block->index, block->of);
    if (block->bin)
        emit(sink, "@%d", block->bin - 1);
    if (block->run)
        emit(sink, "+%d", block->run);
}

static void emit_blocks(struct sink *sink, const struct shoal_block *blocks, int count, const char *between)
{
    for (int i = 0; i < count; i++) {
        if (i > 0)
            emit(sink, "%s", between);
        emit_block(sink, &blocks[i]);
    }
}

static void emit_move(struct sink *sink, const char *name, const struct shoal_plan *plan, const struct shoal_step *step)
{
    const struct shoal_block *blocks = plan->blocks + step->first_block;

    emit(sink, "%-7s ", name);
    emit_blocks(sink, blocks, step->source_count, " + ");
    emit(sink, " -> ");
    emit_blocks(sink, blocks + step->source_count, step->dest_count, ", ");
}

static void emit_step(struct sink *sink, const struct shoal_plan *plan, const struct shoal_step *step)
{
    switch (step->kind) {
    case SHOAL_STEP_REDUCE:
        emit_move(sink, step->source_count == 1 ? "copy" : step->is_partial ? "partial" : "reduce", plan, step);
        return;
    case SHOAL_STEP_PUT:
        emit_move(sink, "put", plan, step);
        return;
    case SHOAL_STEP_SIGNAL:
        emit(sink, "signal  %d", step->peer);
        return;
    case SHOAL_STEP_WAIT:
        if (step->peer == plan->rank) {
            emit(sink, "wait    puts");
            return;
        }
        emit(sink, "wait    %d ", step->peer);
        if (step->value == 0)
            emit(sink, "credit");
        else
            emit(sink, "#%" PRIu32, step->value);
        return;
    default:
        emit(sink, "unknown step %d", step->kind);
    }
}

void shoal_plan_print(const struct shoal_plan *plan, FILE *out)
{
    struct sink sink = {.file = out};
    for (uint32_t i = 0; i < plan->step_count; i++) {
        emit(&sink, "%3" PRIu32 "  ", i);
        emit_step(&sink, plan, &plan->steps[i]);
        emit(&sink, "\n");
    }
}

void shoal_plan_print_step(const struct shoal_plan *plan, uint32_t step, char *text, size_t bytes)
{
    struct sink sink = {.text = text, .bytes = bytes};
    emit_step(&sink, plan, &plan->steps[step]);
    mark_cut(&sink);
}

void shoal_plan_print_block(const struct shoal_block *block, char *text, size_t bytes)
{
    struct sink sink = {.text = text, .bytes = bytes};
    emit_block(&sink, block);
    mark_cut(&sink);
}
