#include "step_profile.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"

int step_profile_open(struct step_profile *profile_out, const char *command, const char *word)
{
    int code = step_model_open(profile_out, command, word);
    if (code < 0)
        code = step_file_open(profile_out, command, word);
    profile_out->element_bytes = STEP_ELEMENT_BYTES;
    return code;
}

static void facts_print(const struct step_profile *profile, FILE *out)
{
    const struct step_facts *facts = &profile->facts;
    fputs("[{\"profile\":", out);
    shoal_json_print_text(out, profile->name);
    fprintf(out, ",\"batch\":%zu,\"forward_ms\":%.17g,\"backward_ms\":%.17g,\"activation_bytes\":%.17g", facts->batch,
            facts->forward_ms, facts->backward_ms, facts->activation_bytes);
    if (facts->activation_16_bytes > 0)
        fprintf(out, ",\"activation_16_bytes\":%.17g", facts->activation_16_bytes);
    if (facts->recomputed_bytes > 0)
        fprintf(out, ",\"recomputed_bytes\":%.17g", facts->recomputed_bytes);
    fprintf(out, ",\"batch_norms\":%zu},\n ", facts->batch_norms);
}

/* 17 digits reproduce the number exactly. */
void step_profile_print(const struct step_profile *profile, FILE *out)
{
    if (profile->facts.is_there)
        facts_print(profile, out);
    for (size_t i = 0; i < profile->count; i++) {
        const struct step_tensor *tensor = &profile->tensors[i];
        fputs(i ? ",\n {\"name\":" : profile->facts.is_there ? "{\"name\":" : "[{\"name\":", out);
        shoal_json_print_text(out, tensor->name);
        fprintf(out, ",\"elements\":%zu,\"ready\":%.17g,\"index\":%zu}", tensor->elements, tensor->ready, tensor->index);
    }
    fputs("]\n", out);
}

double step_profile_ready(const struct step_profile *profile, double share)
{
    size_t elements = 0;
    for (size_t i = 0; i < profile->count && profile->tensors[i].ready <= share; i++)
        elements += profile->tensors[i].elements;
    return (double)elements / (double)profile->elements;
}

/* Tensors of one module become ready at the same time; report the largest, which matters most. */
static size_t largest_beside(const struct step_profile *profile, size_t first)
{
    const struct step_tensor *tensors = profile->tensors;
    size_t largest = first;
    for (size_t i = first; i < profile->count && tensors[i].ready <= tensors[first].ready; i++)
        largest = tensors[i].elements > tensors[largest].elements ? i : largest;
    return largest;
}

struct step_bound step_bound_find(const struct step_profile *profile, double backward_us, double wire_us_per_byte)
{
    struct step_bound bound = {.us = -1};
    double tail_bytes = 0;
    for (size_t i = profile->count; i-- > 0;) {
        tail_bytes += (double)(profile->tensors[i].elements * profile->element_bytes);
        const double us = profile->tensors[i].ready * backward_us + tail_bytes * wire_us_per_byte;
        if (us > bound.us)
            bound = (struct step_bound){us, i, tail_bytes};
    }
    bound.tensor = largest_beside(profile, bound.tensor);
    bound.us = bound.us > backward_us ? bound.us : backward_us;
    return bound;
}

double step_wire_us_per_byte(double hosts, double rate_gbit_s)
{
    return 2 * (hosts - 1) / hosts * 8e-3 / rate_gbit_s;
}
