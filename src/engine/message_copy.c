#include "engine/message_copy.h"

#include "base/clock.h"
#include "engine/engine_state.h"

/* Helpers claim parts of this size, and the thread that makes progress does one in each turn. */
#define PART_MIN ((size_t)32 << 10)
#define PART_MAX ((size_t)256 << 10)
#define PARTS_EACH 2 /* for each thread, so that one that is late delays the message less */
/* Posted at once: fewer than SHOAL_HELPERS_PARTS_MAX parts. */
#define RANGE_BYTES ((size_t)1 << 30)

static void copy_range(const struct shoal_engine *engine, const struct shoal_request *request, size_t begin, size_t end)
{
    const size_t element = request->element_bytes;
    for (size_t at = begin, run; at < end; at += run * element) {
        run = (end - at) / element;
        void *const to = shoal_call_address(&request->call, engine->rank, element, SHOAL_OUTPUT, 0, at / element, &run);
        engine->kernels->copy(&to, 1, (const char *)request->message.source + at, run * element, SHOAL_STORES_CACHED);
    }
}

static void run_part_of_message(void *arg, uint32_t part)
{
    const struct shoal_request *request = arg;
    const struct shoal_message_copy *copy = &request->message.copy;
    const size_t begin = request->message.offset + part * copy->part_bytes;
    copy_range(request->engine, request, begin, shoal_min_size(begin + copy->part_bytes, copy->end));
}

static void begin_copy(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_message_copy *copy = &request->message.copy;
    copy->begun_ticks = shoal_clock_ticks();
    copy->is_narrow = engine->helpers && shoal_trial_copy(engine, request->bytes, &copy->width);
}

static void advance_copy(struct shoal_engine *engine, struct shoal_request *request, size_t end)
{
    const struct shoal_message_copy *copy = &request->message.copy;
    request->message.offset = end;
    if (end == request->bytes)
        shoal_trial_learn_copy(engine, request->bytes, &copy->width, shoal_clock_ticks() - copy->begun_ticks);
}

/* Returns false if this thread copies. */
static bool message_post_copy(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_message_copy *copy = &request->message.copy;
    if (SHOAL_LIKELY(!engine->helpers) || shoal_call_operand(&request->call, SHOAL_OUTPUT) || copy->is_narrow)
        return false;
    const size_t bytes = shoal_min_size(request->bytes - request->message.offset, RANGE_BYTES);
    const size_t even = bytes / ((size_t)shoal_helpers_width(engine->helpers) * PARTS_EACH);
    copy->part_bytes = shoal_round_up(shoal_max_size(shoal_min_size(even, PART_MAX), PART_MIN), SHOAL_PAGE);
    copy->end = request->message.offset + bytes;
    const int ticket = shoal_helpers_post(engine->helpers, run_part_of_message, request,
                                          (uint32_t)((bytes + copy->part_bytes - 1) / copy->part_bytes));
    if (ticket < 0)
        return false;
    copy->posted = (uint8_t)(ticket + 1);
    engine->helped++;
    return true;
}

static void end_copy(struct shoal_engine *engine, struct shoal_request *request)
{
    request->message.copy.posted = 0;
    engine->helped--;
    shoal_engine_leave(engine);
}

static enum shoal_status await_copy(struct shoal_engine *engine, struct shoal_request *request)
{
    struct shoal_message_copy *copy = &request->message.copy;
    if (!shoal_engine_enter(engine)) {
        shoal_message_copy_stop(engine, request);
        return SHOAL_PENDING;
    }
    if (shoal_helpers_help(engine->helpers, copy->posted - 1))
        return SHOAL_OK;
    if (!shoal_helpers_has_ended(engine->helpers, copy->posted - 1))
        return SHOAL_PENDING;
    end_copy(engine, request);
    if (!shoal_engine_do_data_count(engine))
        return SHOAL_PENDING;
    advance_copy(engine, request, copy->end);
    return SHOAL_OK;
}

enum shoal_status shoal_message_copy(struct shoal_engine *engine, struct shoal_request *request, size_t most)
{
    struct shoal_message_copy *copy = &request->message.copy;
    if (copy->posted)
        return await_copy(engine, request);
    if (!shoal_engine_enter(engine))
        return SHOAL_PENDING;
    if (request->message.offset == 0)
        begin_copy(engine, request);
    if (message_post_copy(engine, request))
        return SHOAL_OK;
    copy_range(engine, request, request->message.offset, request->message.offset + most);
    shoal_engine_leave(engine);
    if (!shoal_engine_do_data_count(engine))
        return SHOAL_PENDING;
    advance_copy(engine, request, request->message.offset + most);
    return SHOAL_OK;
}

void shoal_message_copy_stop(struct shoal_engine *engine, struct shoal_request *request)
{
    if (!request->message.copy.posted)
        return;
    (void)shoal_helpers_stop(engine->helpers, request->message.copy.posted - 1);
    end_copy(engine, request);
}
