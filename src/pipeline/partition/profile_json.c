/* Profiles as JSON. */
#include <locale.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "pipeline/partition/partition.h"

/* The numbers of JSON have a point, whatever the program's locale. */
struct number_form {
    locale_t own, before;
};

static bool form_begin(struct number_form *form)
{
    form->own = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    form->before = form->own ? uselocale(form->own) : (locale_t)0;
    return form->own != (locale_t)0;
}

static void form_end(struct number_form *form)
{
    uselocale(form->before);
    freelocale(form->own);
}

/* ---- Printing ------------------------------------------------------------------------------------------------------------ */

static void print_size(const char *name, uint64_t bytes, FILE *out)
{
    if (bytes)
        fprintf(out, ", \"%s\": %llu", name, (unsigned long long)bytes);
}

/* Prints the outputs of a unit that skip the next one. at counts through all outputs, which are sorted. */
static void print_outputs(const struct shoal_profile *profile, const struct profile_output *outputs, size_t *at, uint32_t unit,
                          FILE *out)
{
    const size_t first = *at;
    for (; *at < profile->output_count && outputs[*at].from == unit; ++*at) {
        fputs(*at == first ? ", \"outputs\": [" : ", ", out);
        fputs("{\"to\": ", out);
        shoal_json_print_text(out, profile->units[outputs[*at].to].name);
        fprintf(out, ", \"bytes\": %llu}", (unsigned long long)outputs[*at].bytes);
    }
    if (*at > first)
        fputc(']', out);
}

static void print_unit(const struct shoal_unit *unit, FILE *out)
{
    fputs("{\"name\": ", out);
    shoal_json_print_text(out, unit->name);
    fprintf(out, ", \"forward_us\": %.17g", unit->forward);
    if (unit->backward_is_halved)
        fprintf(out, ", \"backward_us\": %.17g", unit->input_gradient + unit->weight_gradient);
    else
        fprintf(out, ", \"input_gradient_us\": %.17g, \"weight_gradient_us\": %.17g", unit->input_gradient,
                unit->weight_gradient);
    print_size("parameter_bytes", unit->parameter_bytes, out);
    print_size("kept_bytes", unit->kept_bytes, out);
    print_size("output_bytes", unit->output_bytes, out);
    if (unit->stage != SHOAL_ANY_STAGE)
        fprintf(out, ", \"stage\": %d", unit->stage);
}

static void print_tie(const struct shoal_profile *profile, const struct profile_tie *tie, FILE *out)
{
    fputs("{\"units\": [", out);
    for (uint32_t i = 0; i < tie->count; i++) {
        fputs(i ? ", " : "", out);
        shoal_json_print_text(out, profile->units[tie->units[i]].name);
    }
    fprintf(out, "], \"bytes\": %llu}", (unsigned long long)tie->bytes);
}

static int by_origin(const void *a, const void *b)
{
    const struct profile_output *x = a, *y = b;
    return x->from != y->from ? (x->from > y->from) - (x->from < y->from) : (x->to > y->to) - (x->to < y->to);
}

static void profile_write(const struct shoal_profile *profile, const struct profile_output *outputs, FILE *out)
{
    size_t at = 0;
    fputs("{\"name\": ", out);
    shoal_json_print_text(out, profile->name);
    fputs(",\n \"units\": [", out);
    for (uint32_t i = 0; i < profile->count; i++) {
        fputs(i ? ",\n  " : "\n  ", out);
        print_unit(&profile->units[i], out);
        print_outputs(profile, outputs, &at, i, out);
        fputc('}', out);
    }
    fputs("],\n \"ties\": [", out);
    for (size_t i = 0; i < profile->tie_count; i++) {
        fputs(i ? ",\n  " : "\n  ", out);
        print_tie(profile, &profile->ties[i], out);
    }
    fputs("]}\n", out);
}

enum shoal_status shoal_profile_print(const struct shoal_profile *profile, FILE *out)
{
    struct number_form form;
    if (!profile || !out)
        return SHOAL_ERR_ARGUMENT;
    struct profile_output *outputs = calloc(profile->output_count + 1, sizeof *outputs);
    if (!outputs || !form_begin(&form)) {
        free(outputs);
        return SHOAL_ERR_MEMORY;
    }
    if (profile->output_count)
        memcpy(outputs, profile->outputs, profile->output_count * sizeof *outputs);
    qsort(outputs, profile->output_count, sizeof *outputs, by_origin);
    profile_write(profile, outputs, out);
    form_end(&form);
    free(outputs);
    return ferror(out) ? SHOAL_ERR_SYSTEM : SHOAL_OK;
}

/* ---- Reading: values ----------------------------------------------------------------------------------------------------- */

/* An output whose reader comes later in the text. */
struct late_output {
    uint32_t from, line;
    uint64_t bytes;
    char *to;
};

struct reader {
    struct json json;
    struct shoal_profile *profile;
    struct late_output *outputs;
    size_t output_count, output_room;
    struct partition_text text;
    enum shoal_status status;
};

/* Writes the first error, with its line. Returns false. */
__attribute__((format(printf, 3, 4))) static bool wrong(struct reader *reader, uint32_t line, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (reader->status == SHOAL_OK)
        reader->status = partition_refuse(reader->text, SHOAL_ERR_ARGUMENT, "line %u: %s", line, what);
    return false;
}

static bool reader_full(struct reader *reader)
{
    reader->status = partition_refuse(reader->text, SHOAL_ERR_MEMORY, "no memory for the profile");
    return false;
}

static bool read_kind(struct reader *reader, enum json_kind kind, const char *what, struct json_value *value)
{
    static const char *const names[] = {"an object", "an array", "a text", "a number"};
    if (json_value(&reader->json, value) == kind)
        return true;
    if (reader->json.error)
        return wrong(reader, reader->json.line, "%s", reader->json.error);
    return wrong(reader, reader->json.line, "%s is not %s", what, names[kind]);
}

static bool read_time(struct reader *reader, const char *key, double *time_out)
{
    struct json_value value;
    if (!read_kind(reader, JSON_NUMBER, key, &value))
        return false;
    *time_out = value.number;
    return (value.number >= 0 && value.number <= 1e15) ||
           wrong(reader, reader->json.line, "%s is %g: microseconds from 0 to 1e15 are meant", key, value.number);
}

static bool read_size(struct reader *reader, const char *key, uint64_t *bytes_out)
{
    struct json_value value;
    if (!read_kind(reader, JSON_NUMBER, key, &value))
        return false;
    if (!(value.number >= 0 && value.number <= (double)PROFILE_BYTES_MAX) || value.number != (double)(uint64_t)value.number)
        return wrong(reader, reader->json.line, "%s is %g: a whole number of bytes from 0 to 2^50 is meant", key, value.number);
    *bytes_out = (uint64_t)value.number;
    return true;
}

static bool read_name(struct reader *reader, const char *what, struct json_value *value)
{
    return read_kind(reader, JSON_TEXT, what, value) &&
           (profile_is_name(value->text) || wrong(reader, reader->json.line, "%s is empty, or has a control character", what));
}

/* ---- Reading: units ------------------------------------------------------------------------------------------------------ */

/* {"to": "head", "bytes": 512} */
static bool read_output(struct reader *reader)
{
    struct json_value value;
    char key[PROFILE_NAME_MAX + 1];
    struct late_output output = {.from = reader->profile->count, .line = reader->json.line};
    bool has_bytes = false, is_good = read_kind(reader, JSON_OBJECT, "an output", &value);
    for (bool first = true; is_good && json_member(&reader->json, first, key); first = false) {
        if (!strcmp(key, "to") && !output.to) {
            is_good = read_name(reader, "\"to\"", &value) && ((output.to = strdup(value.text)) != NULL || reader_full(reader));
        } else if (!strcmp(key, "bytes") && !has_bytes) {
            has_bytes = is_good = read_size(reader, "\"bytes\"", &output.bytes);
        } else {
            is_good = wrong(reader, reader->json.line, "an output has \"%s\" twice, or it is not known: to, bytes", key);
        }
    }
    if (is_good && reader->json.error)
        is_good = wrong(reader, reader->json.line, "%s", reader->json.error);
    if (is_good && (!output.to || !has_bytes))
        is_good = wrong(reader, output.line, "an output needs \"to\" and \"bytes\"");
    if (is_good && reader->output_count == reader->output_room) {
        const size_t room = reader->output_room ? 2 * reader->output_room : 16;
        struct late_output *more = reallocarray(reader->outputs, room, sizeof *more);
        is_good = more || reader_full(reader);
        reader->outputs = more ? more : reader->outputs;
        reader->output_room = more ? room : reader->output_room;
    }
    if (is_good)
        reader->outputs[reader->output_count++] = output;
    else
        free(output.to);
    return is_good;
}

static bool read_outputs(struct reader *reader)
{
    struct json_value value;
    if (!read_kind(reader, JSON_ARRAY, "\"outputs\"", &value))
        return false;
    for (bool first = true; json_element(&reader->json, first); first = false)
        if (!read_output(reader))
            return false;
    return !reader->json.error || wrong(reader, reader->json.line, "%s", reader->json.error);
}

enum unit_key { NAME, FORWARD, BACKWARD, INPUT, WEIGHT, PARAMETERS, KEPT, OUTPUT, STAGE, OUTPUTS, UNIT_KEYS };
static const char *const unit_keys[UNIT_KEYS] = {
    "name",         "forward_us", "backward_us", "input_gradient_us", "weight_gradient_us", "parameter_bytes", "kept_bytes",
    "output_bytes", "stage",      "outputs"};

struct unit_read {
    struct shoal_unit unit;
    char name[PROFILE_NAME_MAX + 1];
    double backward;
    bool has[UNIT_KEYS];
};

static bool read_stage(struct reader *reader, int32_t *stage_out)
{
    struct json_value value;
    if (!read_kind(reader, JSON_NUMBER, "\"stage\"", &value))
        return false;
    if (!(value.number >= 0 && value.number < 65536) || value.number != (int32_t)value.number)
        return wrong(reader, reader->json.line, "\"stage\" is %g: a whole number from 0 to 65535 is meant", value.number);
    *stage_out = (int32_t)value.number;
    return true;
}

static bool read_unit_member(struct reader *reader, struct unit_read *read, enum unit_key key)
{
    struct json_value value;
    switch (key) {
    case NAME:
        if (!read_name(reader, "\"name\"", &value))
            return false;
        memcpy(read->name, value.text, sizeof read->name);
        read->unit.name = read->name;
        return true;
    case FORWARD:
        return read_time(reader, "\"forward_us\"", &read->unit.forward);
    case BACKWARD:
        return read_time(reader, "\"backward_us\"", &read->backward);
    case INPUT:
        return read_time(reader, "\"input_gradient_us\"", &read->unit.input_gradient);
    case WEIGHT:
        return read_time(reader, "\"weight_gradient_us\"", &read->unit.weight_gradient);
    case PARAMETERS:
        return read_size(reader, "\"parameter_bytes\"", &read->unit.parameter_bytes);
    case KEPT:
        return read_size(reader, "\"kept_bytes\"", &read->unit.kept_bytes);
    case OUTPUT:
        return read_size(reader, "\"output_bytes\"", &read->unit.output_bytes);
    case STAGE:
        return read_stage(reader, &read->unit.stage);
    default:
        return read_outputs(reader);
    }
}

/* Completes a unit's backward pass, and adds the unit. */
static bool add_unit(struct reader *reader, struct unit_read *read, uint32_t line)
{
    char why[400] = "";
    if (!read->has[NAME] || !read->has[FORWARD])
        return wrong(reader, line, "unit %u needs \"name\" and \"forward_us\"", reader->profile->count);
    if (read->has[BACKWARD] ? read->has[INPUT] || read->has[WEIGHT] : !read->has[INPUT] || !read->has[WEIGHT])
        return wrong(reader, line, "unit %s needs either \"backward_us\", or \"input_gradient_us\" and \"weight_gradient_us\"",
                     read->name);
    if (read->has[BACKWARD]) {
        read->unit.backward_is_halved = 1;
        read->unit.input_gradient = read->unit.weight_gradient = read->backward / 2;
    }
    const enum shoal_status status = shoal_profile_add_unit(reader->profile, &read->unit, why, sizeof why);
    if (status == SHOAL_ERR_MEMORY)
        return reader_full(reader);
    return status == SHOAL_OK || wrong(reader, line, "%s", why);
}

static bool read_unit(struct reader *reader)
{
    struct unit_read read = {.unit = SHOAL_UNIT_INIT};
    struct json_value value;
    char key[PROFILE_NAME_MAX + 1];
    if (!read_kind(reader, JSON_OBJECT, "a unit", &value))
        return false;
    const uint32_t line = reader->json.line;
    for (bool first = true; json_member(&reader->json, first, key); first = false) {
        enum unit_key number = NAME;
        while (number < UNIT_KEYS && strcmp(unit_keys[number], key) != 0)
            number++;
        if (number == UNIT_KEYS)
            return wrong(reader, reader->json.line, "a unit has \"%s\", which is not known", key);
        if (read.has[number])
            return wrong(reader, reader->json.line, "a unit has \"%s\" twice", key);
        read.has[number] = true;
        if (!read_unit_member(reader, &read, number))
            return false;
    }
    if (reader->json.error)
        return wrong(reader, reader->json.line, "%s", reader->json.error);
    return add_unit(reader, &read, line);
}

static bool read_units(struct reader *reader)
{
    struct json_value value;
    if (!read_kind(reader, JSON_ARRAY, "\"units\"", &value))
        return false;
    for (bool first = true; json_element(&reader->json, first); first = false)
        if (!read_unit(reader))
            return false;
    return !reader->json.error || wrong(reader, reader->json.line, "%s", reader->json.error);
}

/* ---- Reading: ties and outputs ------------------------------------------------------------------------------------------- */

static bool unit_find(struct reader *reader, uint32_t line, const char *name, uint32_t *number_out)
{
    *number_out = shoal_profile_find(reader->profile, name);
    return *number_out != SHOAL_PROFILE_UNITS_MAX || wrong(reader, line, "there is no unit %s", name);
}

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* ["wte", "head"]: numbers of units into room for all units. */
static bool read_members(struct reader *reader, uint32_t *numbers, uint32_t *count_out)
{
    struct json_value value;
    *count_out = 0;
    if (!read_kind(reader, JSON_ARRAY, "\"units\" of a tie", &value))
        return false;
    for (bool first = true; json_element(&reader->json, first); first = false) {
        if (!read_name(reader, "a unit of a tie", &value))
            return false;
        if (*count_out == reader->profile->count)
            return wrong(reader, reader->json.line, "a tie has more units than there are");
        if (!unit_find(reader, reader->json.line, value.text, &numbers[(*count_out)++]))
            return false;
    }
    qsort(numbers, *count_out, sizeof *numbers, by_number);
    return !reader->json.error || wrong(reader, reader->json.line, "%s", reader->json.error);
}

static bool read_tie(struct reader *reader, uint32_t *numbers)
{
    struct json_value value;
    char key[PROFILE_NAME_MAX + 1], why[400] = "";
    uint32_t count = 0;
    uint64_t bytes = 0;
    bool has_units = false, has_bytes = false;
    if (!read_kind(reader, JSON_OBJECT, "a tie", &value))
        return false;
    const uint32_t line = reader->json.line;
    for (bool first = true; json_member(&reader->json, first, key); first = false) {
        const bool is_units = !strcmp(key, "units") && !has_units, is_bytes = !strcmp(key, "bytes") && !has_bytes;
        has_units |= is_units;
        has_bytes |= is_bytes;
        if (!is_units && !is_bytes)
            return wrong(reader, reader->json.line, "a tie has \"%s\" twice, or it is not known: units, bytes", key);
        if (is_units ? !read_members(reader, numbers, &count) : !read_size(reader, "\"bytes\" of a tie", &bytes))
            return false;
    }
    if (reader->json.error)
        return wrong(reader, reader->json.line, "%s", reader->json.error);
    if (!has_units || !has_bytes)
        return wrong(reader, line, "a tie needs \"units\" and \"bytes\"");
    const enum shoal_status status = shoal_profile_add_tie(reader->profile, numbers, count, bytes, why, sizeof why);
    if (status == SHOAL_ERR_MEMORY)
        return reader_full(reader);
    return status == SHOAL_OK || wrong(reader, line, "%s", why);
}

static bool read_ties(struct reader *reader)
{
    struct json_value value;
    if (!read_kind(reader, JSON_ARRAY, "\"ties\"", &value))
        return false;
    uint32_t *numbers = calloc((size_t)reader->profile->count + 1, sizeof *numbers);
    bool is_good = numbers || reader_full(reader);
    for (bool first = true; is_good && json_element(&reader->json, first); first = false)
        is_good = read_tie(reader, numbers);
    free(numbers);
    return is_good && (!reader->json.error || wrong(reader, reader->json.line, "%s", reader->json.error));
}

static bool add_outputs(struct reader *reader)
{
    for (size_t i = 0; i < reader->output_count; i++) {
        const struct late_output *output = &reader->outputs[i];
        char why[700] = "";
        uint32_t to;
        if (!unit_find(reader, output->line, output->to, &to))
            return false;
        const enum shoal_status status =
            shoal_profile_add_output(reader->profile, output->from, to, output->bytes, why, sizeof why);
        if (status == SHOAL_ERR_MEMORY)
            return reader_full(reader);
        if (status != SHOAL_OK)
            return wrong(reader, output->line, "%s", why);
    }
    return true;
}

/* ---- Reading: the profile ------------------------------------------------------------------------------------------------ */

static bool rename_profile(struct reader *reader)
{
    struct json_value value;
    if (!read_name(reader, "\"name\"", &value))
        return false;
    char *name = strdup(value.text);
    if (!name)
        return reader_full(reader);
    free(reader->profile->name);
    reader->profile->name = name;
    return true;
}

static bool read_profile(struct reader *reader)
{
    static const char *const keys[] = {"name", "units", "ties"};
    static bool (*const readers[])(struct reader *) = {rename_profile, read_units, read_ties};
    struct json_value value;
    char key[PROFILE_NAME_MAX + 1];
    bool has[3] = {false, false, false};
    if (!read_kind(reader, JSON_OBJECT, "a profile", &value))
        return false;
    for (bool first = true; json_member(&reader->json, first, key); first = false) {
        size_t number = 0;
        while (number < 3 && strcmp(keys[number], key) != 0)
            number++;
        if (number == 3 || has[number])
            return wrong(reader, reader->json.line, "a profile has \"%s\" twice, or it is not known: name, units, ties", key);
        if (number == 2 && !has[1])
            return wrong(reader, reader->json.line, "\"ties\" comes before the units that it names");
        has[number] = true;
        if (!readers[number](reader))
            return false;
    }
    if (reader->json.error)
        return wrong(reader, reader->json.line, "%s", reader->json.error);
    if (!json_ends(&reader->json))
        return wrong(reader, reader->json.line, "something follows the profile");
    if (reader->profile->count == 0)
        return wrong(reader, reader->json.line, "the profile has no units");
    return add_outputs(reader);
}

enum shoal_status shoal_profile_read(const char *bytes, size_t byte_count, struct shoal_profile **profile_out, char *text,
                                     size_t text_bytes)
{
    struct reader reader = {.text = {text, text_bytes}, .status = SHOAL_OK};
    struct number_form form;
    if (!bytes || !profile_out)
        return partition_refuse(reader.text, SHOAL_ERR_ARGUMENT, "bytes or profile_out is NULL");
    if (shoal_profile_create(NULL, &reader.profile) != SHOAL_OK || !form_begin(&form)) {
        shoal_profile_free(reader.profile);
        return partition_refuse(reader.text, SHOAL_ERR_MEMORY, "no memory for the profile");
    }
    json_open(&reader.json, bytes, byte_count);
    const bool is_good = read_profile(&reader);
    form_end(&form);
    for (size_t i = 0; i < reader.output_count; i++)
        free(reader.outputs[i].to);
    free(reader.outputs);
    if (is_good)
        *profile_out = reader.profile;
    else
        shoal_profile_free(reader.profile);
    return reader.status;
}
