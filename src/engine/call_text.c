/* Calls as text, for failures and warnings. */
#include <ctype.h>
#include <stdarg.h>
#include <string.h>

#include "engine/engine_state.h"

void shoal_engine_append(char *text, size_t bytes, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

/* Adds the name of a type or operator in small letters: SCALED_SUM becomes "scaled sum". */
static void append_word(char *text, size_t bytes, const char *name)
{
    size_t used = strlen(text);
    for (; *name && used + 1 < bytes; name++)
        text[used++] = *name == '_' ? ' ' : (char)tolower((unsigned char)*name);
    text[used] = 0;
}

static const char *type_name(unsigned type)
{
    static const char *const names[] = {
#define TYPE_NAME(name, number, bytes) [number] = #name,
        SHOAL_TYPE_LIST(TYPE_NAME)
#undef TYPE_NAME
    };
    return type < SHOAL_COUNT_OF(names) ? names[type] : "elements of an unknown type";
}

static const char *op_name(unsigned op)
{
    static const char *const names[] = {
#define OP_NAME(name, number) [number] = #name,
        SHOAL_OP_LIST(OP_NAME)
#undef OP_NAME
    };
    return op < SHOAL_COUNT_OF(names) ? names[op] : "unknown operator";
}

void shoal_engine_print_call(const struct shoal_descriptor *d, char *text, size_t bytes)
{
    const struct shoal_collective_traits *traits = shoal_collective_traits((enum shoal_collective_type)d->collective);
    const struct shoal_shape *shape = &traits->shape;
    const bool has_peer = shoal_call_has_peer((enum shoal_collective_type)d->collective);
    if (d->collective == SHOAL_COLLECTIVE_SPLIT) {
        snprintf(text, bytes, "shoal_comm_split");
        return;
    }
    snprintf(text, bytes, "%s", traits->name);
    if (shape->is_empty)
        return;
    shoal_engine_append(text, bytes, " of %s%llu ", d->collective == SHOAL_COLLECTIVE_ALLTOALL && d->detail ? "up to " : "",
                        (unsigned long long)d->count);
    append_word(text, bytes, type_name(d->type));
    if (d->type_tag)
        shoal_engine_append(text, bytes, " tagged %d", d->type_tag);
    if (shape->is_input_partitioned || shape->is_output_partitioned)
        shoal_engine_append(text, bytes, " per rank");
    if (shape->is_reduced) {
        shoal_engine_append(text, bytes, ", ");
        append_word(text, bytes, op_name(d->op));
    }
    if (d->way == SHOAL_WAY_OWNERS)
        shoal_engine_append(text, bytes, ", summed by GPUs");
    if (shape->root_contributes || shape->root_receives || has_peer)
        shoal_engine_append(text, bytes, ", %s %d", has_peer ? "peer" : "root", d->root);
}

static struct shoal_descriptor describe_call(const struct shoal_request *request)
{
    const struct shoal_call *call = &request->call;
    return (struct shoal_descriptor){.sequence = request->sequence,
                                     .count = call->count,
                                     .detail = call->layout ? call->layout->detail : 0,
                                     .root = (int16_t)call->root,
                                     .collective = (uint8_t)call->collective,
                                     .type = (uint8_t)call->type,
                                     .op = (uint8_t)call->op,
                                     .type_tag = call->type_tag,
                                     .way = (uint8_t)shoal_call_way(call)};
}

void shoal_engine_print_request(const struct shoal_request *request, char *text, size_t bytes)
{
    const struct shoal_descriptor call = describe_call(request);
    shoal_engine_print_call(&call, text, bytes);
    if (shoal_call_has_peer(request->call.collective))
        shoal_engine_append(text, bytes, ", tag %d", request->call.tag);
}
