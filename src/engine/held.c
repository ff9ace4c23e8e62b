/* Inputs that are only put (operand/operand.h), after a failure. An adapter may still read one, and a peer that does not know
 * of the failure yet treats what arrives as the operation's data. So such an input is dropped only when all puts have completed
 * locally: its owner keeps its memory unchanged until then. If a peer is gone, puts may stay under way for long: then the wait
 * ends after HOLD_NS. */
#include "engine/engine_state.h"

#define HOLD_NS (2 * SHOAL_NS_PER_S)

static bool has_left(const struct shoal_engine *engine)
{
    bool has_all_left = true;
    for (unsigned slot = 0; slot < engine->depth && engine->ops->is_locally_complete; slot++)
        has_all_left &= engine->ops->is_locally_complete(engine->transport, slot);
    return has_all_left;
}

void shoal_engine_hold_inputs(struct shoal_engine *engine, struct shoal_request *list)
{
    SHOAL_ASSERT(!engine->held); /* an engine breaks once */
    if (has_left(engine))
        return;
    engine->held_until_ns = shoal_clock_ns() + HOLD_NS;
    for (struct shoal_request *request = list; request; request = request->next) {
        struct shoal_operand *const input = shoal_call_operand(&request->call, SHOAL_INPUT);
        if (!shoal_operand_is_only_put(input))
            continue;
        request->call.layout->operands[SHOAL_INPUT] = NULL;
        input->next_held = engine->held;
        engine->held = input;
    }
}

void shoal_engine_drop_held(struct shoal_engine *engine)
{
    while (engine->held) {
        struct shoal_operand *const input = engine->held;
        engine->held = input->next_held;
        shoal_operand_drop(input);
    }
}

void shoal_engine_look_at_held(struct shoal_engine *engine)
{
    const bool is_over = has_left(engine);
    if (!is_over && shoal_clock_ns() < engine->held_until_ns)
        return;
    if (!is_over)
        shoal_log_line(engine->log, SHOAL_LOG_WARN, "engine",
                       "communicator %s is broken, and two seconds later the adapter still reads inputs on a device: the "
                       "program continues to use that memory, and a peer that comes back may receive what it writes there",
                       engine->name);
    shoal_engine_drop_held(engine);
}

bool shoal_engine_is_holding(struct shoal_engine *engine)
{
    if (engine->held)
        shoal_engine_look_at_held(engine);
    return engine->held != NULL;
}
