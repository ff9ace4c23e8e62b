#include "fusion/layout/parameters.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES_MAX (SIZE_MAX / 4) /* of all gradients; sums with padding never overflow */

const char *fusion_type_name(enum shoal_type type)
{
    static const char *const names[] = {
        [SHOAL_FLOAT32] = "float32", [SHOAL_FLOAT64] = "float64", [SHOAL_BFLOAT16] = "bfloat16", [SHOAL_INT64] = "int64",
        [SHOAL_FLOAT16] = "float16", [SHOAL_INT32] = "int32",     [SHOAL_INT8] = "int8",         [SHOAL_UINT8] = "uint8"};
    return (unsigned)type < FUSION_COUNT_OF(names) ? names[type] : "no type";
}

static bool has_gradients(enum shoal_type type)
{
    return type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64 || type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
}

/* Makes a name that fits on one line of any message or file. */
static void copy_name(char *to, const char *from)
{
    size_t i = 0;
    for (; from && from[i] && i < FUSION_NAME_MAX - 1; i++)
        to[i] = (unsigned char)from[i] < ' ' || from[i] == 0x7f ? '?' : from[i];
    to[i] = 0;
}

static enum shoal_status check(const struct fusion_parameters *parameters, char *error, size_t error_bytes)
{
    size_t bytes = 0;
    char text[FUSION_TEXT_MAX];
    for (size_t i = 0; i < parameters->count; i++) {
        const struct shoal_parameter *each = &parameters->items[i];
        fusion_parameter_text(parameters, i, text, sizeof text);
        if (!has_gradients(each->type)) {
            snprintf(error, error_bytes, "%s has type %d (%s): gradients are float32, float64, bfloat16 or float16", text,
                     (int)each->type, fusion_type_name(each->type));
            return SHOAL_ERR_ARGUMENT;
        }
        if (each->count > BYTES_MAX / 8 || bytes + fusion_parameter_bytes(each) > BYTES_MAX) {
            snprintf(error, error_bytes, "%s has %zu elements: too many", text, each->count);
            return SHOAL_ERR_ARGUMENT;
        }
        bytes += fusion_parameter_bytes(each) + FUSION_ALIGNMENT;
    }
    return SHOAL_OK;
}

enum shoal_status fusion_parameters_copy(const struct shoal_parameter *parameters, size_t count,
                                         struct fusion_parameters *copy_out, char *error, size_t error_bytes)
{
    if (count > SHOAL_PARAMETERS_MAX || (count && !parameters)) {
        snprintf(error, error_bytes, count && !parameters ? "parameters is NULL" : "%zu parameters are more than %d", count,
                 SHOAL_PARAMETERS_MAX);
        return SHOAL_ERR_ARGUMENT;
    }
    struct fusion_parameters copy = {count, calloc(count + 1, sizeof *copy.items), calloc(count + 1, FUSION_NAME_MAX)};
    if (!copy.items || !copy.names) {
        fusion_parameters_free(&copy);
        snprintf(error, error_bytes, "no memory for %zu parameters", count);
        return SHOAL_ERR_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        char *name = copy.names + i * FUSION_NAME_MAX;
        copy_name(name, parameters[i].name);
        copy.items[i] = (struct shoal_parameter){parameters[i].count, parameters[i].type, name};
    }
    const enum shoal_status status = check(&copy, error, error_bytes);
    if (status != SHOAL_OK)
        fusion_parameters_free(&copy);
    else
        *copy_out = copy;
    return status;
}

void fusion_parameters_free(struct fusion_parameters *parameters)
{
    free(parameters->items);
    free(parameters->names);
    *parameters = (struct fusion_parameters){0, NULL, NULL};
}

const char *fusion_parameter_text(const struct fusion_parameters *parameters, size_t parameter, char *text, size_t text_bytes)
{
    const char *name = parameter < parameters->count ? parameters->items[parameter].name : "";
    snprintf(text, text_bytes, *name ? "parameter %zu (%s)" : "parameter %zu", parameter, name);
    return text;
}
