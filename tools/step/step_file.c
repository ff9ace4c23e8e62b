/* Profiles in files: a JSON array of flat objects, one for each tensor, in the order in which gradients become ready.
 *
 *     [{"name": "fc.bias", "elements": 1000, "ready": 0.0005, "index": 160},
 *      {"name": "fc.weight", "elements": 2048000, "ready": 0.0005, "index": 159}]
 *
 * "elements" is a whole number above 0. "ready" is a number from 0 to 1 that never falls from one tensor to the next. "index"
 * is the tensor's number among the parameters. If all tensors omit it, the last to be ready has number 0. Other members are
 * ignored.
 *
 * Before the first tensor there may be an object of facts that were measured of the model, which begins with its name:
 *
 *     [{"profile": "resnet", "batch": 32, "forward_ms": 51.2, "backward_ms": 98, "activation_bytes": 9e7, "batch_norms": 53},
 *
 * All of them must be there: a whole number above 0, three numbers above 0, a whole number. "activation_16_bytes" and
 * "recomputed_bytes", numbers above 0, may be there too. */
#include "step_profile.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "flat_json.h"
#include "tool.h"

enum { FILE_BYTES_MAX = 64 << 20, MEMBERS = 4, MEMBER_INDEX = 3, FACTS = 8, FACTS_NEEDED = 6 };

struct reader {
    const char *command, *name;
    char *text;     /* modified during reading */
    char *original; /* for line and column numbers */
    size_t at;
    struct step_profile *profile;
    size_t capacity, indexed;
    bool is_told;
};

/* Prints "shoal bench: model.json:3:14: ..." once; returns false. */
__attribute__((format(printf, 3, 4))) static bool wrong(struct reader *reader, size_t at, const char *format, ...)
{
    size_t line = 1, column = 1;
    char what[256];
    va_list args;
    for (size_t i = 0; i < at; i++) {
        column = reader->original[i] == '\n' ? 1 : column + 1;
        line += reader->original[i] == '\n';
    }
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    tool_file_fail(reader->command, "%s:%zu:%zu: %s", reader->name, line, column, what);
    reader->is_told = true;
    return false;
}

static void space_skip(struct reader *reader)
{
    reader->at += strspn(reader->text + reader->at, " \t\r\n");
}

/* ---- One tensor ---------------------------------------------------------------------------------------------------------- */

static bool name_take(struct reader *reader, size_t at, const struct json_reader *json, struct step_tensor *tensor)
{
    if (json->kind != JSON_TEXT || !*json->text || strlen(json->text) >= sizeof tensor->name)
        return wrong(reader, at, "\"name\" is not a text of 1 to %zu bytes", sizeof tensor->name - 1);
    for (const char *c = json->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return wrong(reader, at, "\"name\" holds a control character");
    strcpy(tensor->name, json->text);
    return true;
}

static bool whole_take(struct reader *reader, size_t at, const struct json_reader *json, size_t least, size_t *to)
{
    char *end;
    errno = 0;
    const unsigned long long number = json->kind == JSON_NUMBER ? strtoull(json->text, &end, 10) : 0;
    if (json->kind != JSON_NUMBER || *json->text == '-' || *end || errno || number < least || number > SIZE_MAX >> 16)
        return wrong(reader, at, "\"%s\" is not a whole number from %zu on", json->key, least);
    *to = (size_t)number;
    return true;
}

static bool ready_take(struct reader *reader, size_t at, const struct json_reader *json, struct step_tensor *tensor)
{
    tensor->ready = json->kind == JSON_NUMBER ? strtod(json->text, NULL) : -1;
    return (tensor->ready >= 0 && tensor->ready <= 1) || wrong(reader, at, "\"ready\" is not a number from 0 to 1");
}

static bool member_take(struct reader *reader, size_t at, const struct json_reader *json, struct step_tensor *tensor,
                        bool given[MEMBERS])
{
    static const char *const names[] = {"name", "elements", "ready", "index", NULL};
    int member;
    if (!tool_word_find(names, json->key, &member))
        return true;
    if (given[member])
        return wrong(reader, at, "\"%s\" is there twice", json->key);
    given[member] = true;
    switch (member) {
    case 0:
        return name_take(reader, at, json, tensor);
    case 1:
        return whole_take(reader, at, json, 1, &tensor->elements);
    case 2:
        return ready_take(reader, at, json, tensor);
    default:
        return whole_take(reader, at, json, 0, &tensor->index);
    }
}

static bool tensor_check(struct reader *reader, size_t at, const struct step_tensor *tensor, const bool given[MEMBERS])
{
    static const char *const names[] = {"name", "elements", "ready"};
    const struct step_profile *profile = reader->profile;
    for (int i = 0; i < MEMBER_INDEX; i++)
        if (!given[i])
            return wrong(reader, at, "tensor %zu has no \"%s\"", profile->count, names[i]);
    if (profile->count && tensor->ready < profile->tensors[profile->count - 1].ready)
        return wrong(reader, at,
                     "tensor \"%s\" is ready before the one above it: list them in the order in which they become ready",
                     tensor->name);
    if (given[MEMBER_INDEX] != (reader->indexed > 0) && profile->count)
        return wrong(reader, at, "tensor \"%s\" has %s \"index\", unlike those above it", tensor->name,
                     given[MEMBER_INDEX] ? "an" : "no");
    if (profile->count == STEP_TENSORS_MAX)
        return wrong(reader, at, "there are more than %d tensors", STEP_TENSORS_MAX);
    reader->indexed += given[MEMBER_INDEX];
    return true;
}

static bool tensor_keep(struct reader *reader, const struct step_tensor *tensor)
{
    struct step_profile *profile = reader->profile;
    if (profile->count == reader->capacity) {
        const size_t capacity = reader->capacity ? 2 * reader->capacity : 256;
        struct step_tensor *larger = reallocarray(profile->tensors, capacity, sizeof *larger);
        if (!larger)
            return false;
        profile->tensors = larger;
        reader->capacity = capacity;
    }
    profile->tensors[profile->count++] = *tensor;
    profile->elements += tensor->elements;
    return true;
}

/* Called at a '{'. */
static bool tensor_read(struct reader *reader)
{
    const size_t begin = reader->at;
    struct step_tensor tensor;
    bool given[MEMBERS] = {false};
    struct json_reader json;
    enum json_step step;
    memset(&tensor, 0, sizeof tensor);
    json_open(&json, reader->text + begin);
    json.is_part = true;
    while ((step = json_next(&json)) == JSON_MEMBER) {
        if (!member_take(reader, begin + (size_t)(json.at - json.begin), &json, &tensor, given))
            return false;
    }
    reader->at = begin + (size_t)(json.at - json.begin);
    if (step == JSON_BAD)
        return wrong(reader, reader->at, "%s", json.error);
    return tensor_check(reader, begin, &tensor, given) && tensor_keep(reader, &tensor);
}

/* ---- Facts --------------------------------------------------------------------------------------------------------------- */

/* An object of facts begins with "profile". Called at a '{'. */
static bool is_facts(const struct reader *reader)
{
    static const char key[] = "\"profile\"";
    const char *text = reader->text + reader->at + 1;
    return !strncmp(text + strspn(text, " \t\r\n"), key, sizeof key - 1);
}

static bool amount_take(struct reader *reader, size_t at, const struct json_reader *json, double *to)
{
    *to = json->kind == JSON_NUMBER ? strtod(json->text, NULL) : 0;
    return (*to > 0 && *to <= 1e18) || wrong(reader, at, "\"%s\" is not a number above 0", json->key);
}

static bool fact_take(struct reader *reader, size_t at, const struct json_reader *json, bool given[FACTS])
{
    static const char *const names[FACTS + 1] = {
        "profile",          "batch", "forward_ms", "backward_ms", "activation_bytes", "batch_norms", "activation_16_bytes",
        "recomputed_bytes", NULL};
    struct step_facts *facts = &reader->profile->facts;
    double *const amounts[FACTS] = {NULL,
                                    NULL,
                                    &facts->forward_ms,
                                    &facts->backward_ms,
                                    &facts->activation_bytes,
                                    NULL,
                                    &facts->activation_16_bytes,
                                    &facts->recomputed_bytes};
    struct step_tensor named;
    int fact;
    if (!tool_word_find(names, json->key, &fact))
        return true;
    if (given[fact])
        return wrong(reader, at, "\"%s\" is there twice", json->key);
    given[fact] = true;
    if (fact == 0 && name_take(reader, at, json, &named)) {
        strcpy(reader->profile->name, named.name);
        return true;
    }
    if (fact == 0)
        return false;
    if (fact == 1)
        return whole_take(reader, at, json, 1, &facts->batch);
    if (!amounts[fact])
        return whole_take(reader, at, json, 0, &facts->batch_norms);
    return amount_take(reader, at, json, amounts[fact]);
}

static bool facts_read(struct reader *reader)
{
    const size_t begin = reader->at;
    bool given[FACTS] = {false};
    struct json_reader json;
    enum json_step step;
    if (reader->profile->facts.is_there || reader->profile->count)
        return wrong(reader, begin, "an object of facts, which begins with \"profile\", comes first and only once");
    json_open(&json, reader->text + begin);
    json.is_part = true;
    while ((step = json_next(&json)) == JSON_MEMBER) {
        if (!fact_take(reader, begin + (size_t)(json.at - json.begin), &json, given))
            return false;
    }
    reader->at = begin + (size_t)(json.at - json.begin);
    if (step == JSON_BAD)
        return wrong(reader, reader->at, "%s", json.error);
    for (int i = 0; i < FACTS_NEEDED; i++)
        if (!given[i])
            return wrong(reader, begin,
                         "the facts of a profile are batch, forward_ms, backward_ms, activation_bytes and "
                         "batch_norms: one is missing");
    return reader->profile->facts.is_there = true;
}

/* ---- The file ------------------------------------------------------------------------------------------------------------ */

static bool array_read(struct reader *reader)
{
    space_skip(reader);
    if (reader->text[reader->at] != '[')
        return wrong(reader, reader->at, "a profile is a JSON array of objects and begins with '['");
    do {
        reader->at++;
        space_skip(reader);
        if (reader->text[reader->at] != '{')
            return wrong(reader, reader->at, "an object that begins with '{' is missing");
        if (!(is_facts(reader) ? facts_read(reader) : tensor_read(reader)))
            return false;
        space_skip(reader);
    } while (reader->text[reader->at] == ',');
    if (reader->text[reader->at] != ']')
        return wrong(reader, reader->at, "a ',' or ']' is missing after an object");
    if (!reader->profile->count)
        return wrong(reader, reader->at, "there is no tensor");
    reader->at++;
    space_skip(reader);
    return !reader->text[reader->at] || wrong(reader, reader->at, "more follows after the array's end");
}

/* Checks that every index appears once. Without indexes, numbers the tensors from the last to be ready on. */
static bool indexes_check(struct reader *reader)
{
    struct step_profile *profile = reader->profile;
    bool *taken = calloc(profile->count, sizeof *taken);
    size_t i = 0;
    if (!taken)
        return false;
    for (; i < profile->count; i++) {
        struct step_tensor *tensor = &profile->tensors[i];
        if (!reader->indexed)
            tensor->index = profile->count - 1 - i;
        if (tensor->index >= profile->count || taken[tensor->index])
            break;
        taken[tensor->index] = true;
    }
    free(taken);
    return i == profile->count ||
           wrong(reader, reader->at, "\"index\" of tensor \"%s\" is %s", profile->tensors[i].name,
                 profile->tensors[i].index < profile->count ? "there twice" : "not below the number of tensors");
}

static int fail(const struct reader *reader, const char *what)
{
    return tool_file_fail(reader->command, "%s: %s", reader->name, what);
}

static int text_load(struct reader *reader, FILE *file)
{
    struct stat status;
    if (fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode))
        return fail(reader, "is a folder");
    reader->text = malloc(FILE_BYTES_MAX + 1);
    if (!reader->text)
        return fail(reader, "no memory");
    errno = 0;
    const size_t bytes = fread(reader->text, 1, FILE_BYTES_MAX, file);
    if (ferror(file))
        return fail(reader, strerror(errno));
    if (bytes == FILE_BYTES_MAX)
        return fail(reader, "is too long for a profile");
    reader->text[bytes] = 0;
    reader->original = strdup(reader->text);
    if (!reader->original)
        return fail(reader, "no memory");
    if (strlen(reader->text) != bytes)
        return wrong(reader, strlen(reader->text), "a zero byte") ? 0 : TOOL_EXIT_USAGE;
    return 0;
}

static int file_read(struct reader *reader, FILE *file)
{
    int code = text_load(reader, file);
    if (!code && !(array_read(reader) && indexes_check(reader)))
        code = reader->is_told ? TOOL_EXIT_USAGE : fail(reader, "no memory");
    free(reader->text);
    free(reader->original);
    return code;
}

int step_file_open(struct step_profile *profile_out, const char *command, const char *name)
{
    struct step_profile profile = {.count = 0};
    struct reader reader = {.command = command, .name = name, .profile = &profile};
    const char *slash = strrchr(name, '/');
    FILE *file = fopen(name, "re");
    if (!file)
        return tool_file_fail(command,
                              "there is no profile %s (resnet50, bert-large and gpt2 are built in), and no such file: %s", name,
                              strerror(errno));
    snprintf(profile.name, sizeof profile.name, "%s", slash ? slash + 1 : name);
    const int code = file_read(&reader, file);
    fclose(file);
    if (code)
        step_profile_free(&profile);
    else
        *profile_out = profile;
    return code;
}
