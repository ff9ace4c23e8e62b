/* A list of parameters, copied and checked. Constant once made; any thread. */
#ifndef SHOAL_FUSION_PARAMETERS_H
#define SHOAL_FUSION_PARAMETERS_H

#include "fusion/fusion.h"

#define FUSION_NAME_MAX 128 /* with the terminating zero */

struct fusion_parameters {
    size_t count;
    struct shoal_parameter *items; /* the list owns the names: one line each, never NULL, may be "" */
    char *names;
};

/* Copies the list; unprintable characters in a name become '?'. On an error the caller frees nothing, and error holds one
 * line. */
SHOAL_MUST_USE enum shoal_status fusion_parameters_copy(const struct shoal_parameter *parameters, size_t count,
                                                        struct fusion_parameters *copy_out, char *error, size_t error_bytes);
void fusion_parameters_free(struct fusion_parameters *parameters);

/* Prints "parameter 3" or "parameter 3 (fc.weight)" into text. Returns text. */
const char *fusion_parameter_text(const struct fusion_parameters *parameters, size_t parameter, char *text, size_t text_bytes);

/* Returns "float32"; for numbers that are not a type, such as 99, "no type". Static storage. */
const char *fusion_type_name(enum shoal_type type);

static inline size_t fusion_parameter_bytes(const struct shoal_parameter *parameter)
{
    return parameter->count * shoal_type_bytes(parameter->type);
}

#endif
