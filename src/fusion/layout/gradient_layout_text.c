/* Layouts as text:
 *
 *     shoal gradient layout 1
 *     ranks 8
 *     parameters 2
 *     buffers 1
 *     parameter 0 float32 1024 fc.weight
 *     parameter 1 float32 10 fc.bias
 *     buffer 0 float32 2 4608
 *     at 0 parameter 1
 *     at 64 parameter 0
 *     hash 0123456789abcdef
 *
 * A buffer's line has its type, its number of parameters and its bytes with padding. Facts that follow from others are
 * checked, so a file that is read without error is the layout that was written. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusion/layout/gradient_layout.h"

#define VERSION 1
#define LINE_MAX_BYTES 256

/* ---- Writing ------------------------------------------------------------------------------------------------------------- */

static void print_buffer(const struct shoal_gradient_layout *layout, size_t index, FILE *out)
{
    const struct fusion_buffer *buffer = &layout->buffers[index];
    fprintf(out, "buffer %zu %s %u %zu\n", index, fusion_type_name(buffer->type), buffer->count, buffer->bytes);
    for (uint32_t i = 0; i < buffer->count; i++) {
        const uint32_t parameter = layout->order[buffer->first + i];
        fprintf(out, "at %zu parameter %u\n", layout->places[parameter].offset, parameter);
    }
}

enum shoal_status shoal_gradient_layout_print(const struct shoal_gradient_layout *layout, FILE *out)
{
    if (!layout || !out)
        return SHOAL_ERR_ARGUMENT;
    fprintf(out, "shoal gradient layout %d\nranks %d\nparameters %zu\nbuffers %zu\n", VERSION, layout->ranks,
            layout->parameters.count, layout->buffer_count);
    for (size_t i = 0; i < layout->parameters.count; i++) {
        const struct shoal_parameter *each = &layout->parameters.items[i];
        fprintf(out, "parameter %zu %s %zu%s%s\n", i, fusion_type_name(each->type), each->count, *each->name ? " " : "",
                each->name);
    }
    for (size_t b = 0; b < layout->buffer_count; b++)
        print_buffer(layout, b, out);
    fprintf(out, "hash %016" PRIx64 "\n", layout->hash);
    return fflush(out) == 0 && !ferror(out) ? SHOAL_OK : SHOAL_ERR_SYSTEM;
}

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

struct reader {
    const char *at, *end;
    size_t line_number;
    char line[LINE_MAX_BYTES];
    const char *word; /* the unread rest of the line */
    char *error;
    size_t error_bytes;
};

FUSION_PRINTF(2, 3) static enum shoal_status refuse(const struct reader *reader, const char *format, ...)
{
    va_list args;
    const int length = snprintf(reader->error, reader->error_bytes, "line %zu: ", reader->line_number);
    if (length < 0 || (size_t)length >= reader->error_bytes)
        return SHOAL_ERR_ARGUMENT;
    va_start(args, format);
    vsnprintf(reader->error + length, reader->error_bytes - (size_t)length, format, args);
    va_end(args);
    return SHOAL_ERR_ARGUMENT;
}

static enum shoal_status next_line(struct reader *reader, const char *expected)
{
    reader->line_number++;
    if (reader->at == reader->end)
        return refuse(reader, "the text ends, where \"%s\" should follow", expected);
    const char *newline = memchr(reader->at, '\n', (size_t)(reader->end - reader->at));
    const size_t length = (size_t)((newline ? newline : reader->end) - reader->at);
    if (length >= sizeof reader->line)
        return refuse(reader, "longer than %zu bytes", sizeof reader->line - 1);
    if (memchr(reader->at, 0, length))
        return refuse(reader, "holds a byte of value 0: not a text");
    memcpy(reader->line, reader->at, length);
    reader->line[length] = 0;
    reader->at = newline ? newline + 1 : reader->end;
    reader->word = reader->line;
    return SHOAL_OK;
}

/* Expects this word next, followed by a space or the end. */
static enum shoal_status take(struct reader *reader, const char *word)
{
    const size_t length = strlen(word);
    if (strncmp(reader->word, word, length) != 0 || (reader->word[length] != ' ' && reader->word[length] != 0))
        return refuse(reader, "\"%.60s\" stands where \"%s\" should", reader->word, word);
    reader->word += length + (reader->word[length] == ' ');
    return SHOAL_OK;
}

static enum shoal_status take_number(struct reader *reader, const char *what, uint64_t most, uint64_t *number_out)
{
    uint64_t number = 0;
    const char *at = reader->word;
    *number_out = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (digit > most || number > (most - digit) / 10)
            return refuse(reader, "%s is more than %" PRIu64, what, most);
        number = number * 10 + digit;
    }
    if (at == reader->word || (*at != ' ' && *at != 0))
        return refuse(reader, "\"%.60s\" stands where a number should: %s", reader->word, what);
    reader->word = at + (*at == ' ');
    *number_out = number;
    return SHOAL_OK;
}

static enum shoal_status take_end(const struct reader *reader)
{
    return *reader->word ? refuse(reader, "\"%.60s\" follows, where the line should end", reader->word) : SHOAL_OK;
}

/* Reads "word number" as a whole line. */
static enum shoal_status read_number(struct reader *reader, const char *word, uint64_t most, uint64_t *number_out)
{
    FUSION_TRY(next_line(reader, word));
    FUSION_TRY(take(reader, word));
    FUSION_TRY(take_number(reader, word, most, number_out));
    return take_end(reader);
}

static enum shoal_status take_equal(struct reader *reader, const char *what, uint64_t expected)
{
    uint64_t number;
    FUSION_TRY(take_number(reader, what, UINT64_MAX, &number));
    if (number != expected)
        return refuse(reader, "%s is %" PRIu64 ", where %" PRIu64 " should stand", what, number, expected);
    return SHOAL_OK;
}

static enum shoal_status read_parameter(struct reader *reader, const struct fusion_parameters *own, size_t index)
{
    const struct shoal_parameter *expected = &own->items[index];
    char text[FUSION_TEXT_MAX];
    uint64_t count;
    FUSION_TRY(next_line(reader, "parameter"));
    FUSION_TRY(take(reader, "parameter"));
    FUSION_TRY(take_equal(reader, "the parameter's number", index));
    fusion_parameter_text(own, index, text, sizeof text);
    const char *type = fusion_type_name(expected->type);
    if (take(reader, type) != SHOAL_OK)
        return refuse(reader, "the file is of another model: %s is of type %s here, not of \"%.20s\"", text, type,
                      reader->word);
    FUSION_TRY(take_number(reader, "its number of elements", UINT64_MAX, &count));
    if (count != expected->count)
        return refuse(reader, "the file is of another model: %s has %zu elements here, %" PRIu64 " there", text,
                      expected->count, count);
    if (*reader->word && *expected->name && strcmp(reader->word, expected->name) != 0)
        return refuse(reader, "the file is of another model: %s is called \"%.127s\" there", text, reader->word);
    return SHOAL_OK;
}

static enum shoal_status read_place(struct reader *reader, struct shoal_gradient_layout *layout, struct fusion_buffer *buffer,
                                    bool *is_placed, size_t *end)
{
    uint64_t parameter;
    FUSION_TRY(next_line(reader, "at"));
    FUSION_TRY(take(reader, "at"));
    FUSION_TRY(take_equal(reader, "the place", *end));
    FUSION_TRY(take(reader, "parameter"));
    FUSION_TRY(take_number(reader, "the parameter's number", layout->parameters.count - 1, &parameter));
    FUSION_TRY(take_end(reader));
    const struct shoal_parameter *each = &layout->parameters.items[parameter];
    if (is_placed[parameter])
        return refuse(reader, "parameter %" PRIu64 " was placed before", parameter);
    if (each->type != buffer->type)
        return refuse(reader, "parameter %" PRIu64 " is of type %s, its buffer of %s", parameter, fusion_type_name(each->type),
                      fusion_type_name(buffer->type));
    is_placed[parameter] = true;
    layout->order[buffer->first + buffer->count++] = (uint32_t)parameter;
    *end = fusion_round_up(*end + fusion_parameter_bytes(each), FUSION_ALIGNMENT);
    return SHOAL_OK;
}

static enum shoal_status take_type(struct reader *reader, enum shoal_type *type_out)
{
    static const enum shoal_type types[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};
    for (size_t i = 0; i < FUSION_COUNT_OF(types); i++) {
        const char *name = fusion_type_name(types[i]), *word = reader->word;
        const size_t length = strlen(name);
        if (strncmp(word, name, length) != 0 || word[length] != ' ')
            continue;
        reader->word += length + 1;
        *type_out = types[i];
        return SHOAL_OK;
    }
    return refuse(reader, "\"%.20s\" stands where float32, float64, bfloat16 or float16 should", reader->word);
}

static enum shoal_status read_buffer(struct reader *reader, struct shoal_gradient_layout *layout, bool *is_placed,
                                     size_t *placed)
{
    const size_t index = layout->buffer_count, left = layout->parameters.count - *placed;
    struct fusion_buffer *buffer = &layout->buffers[index];
    uint64_t count, bytes;
    size_t end = 0;
    FUSION_TRY(next_line(reader, "buffer"));
    FUSION_TRY(take(reader, "buffer"));
    FUSION_TRY(take_equal(reader, "the buffer's number", index));
    FUSION_TRY(take_type(reader, &buffer->type));
    FUSION_TRY(take_number(reader, "its number of parameters", left, &count));
    FUSION_TRY(take_number(reader, "its bytes", SIZE_MAX, &bytes));
    FUSION_TRY(take_end(reader));
    const size_t line = reader->line_number;
    buffer->first = (uint32_t)*placed;
    for (uint64_t i = 0; i < count; i++)
        FUSION_TRY(read_place(reader, layout, buffer, is_placed, &end));
    *placed += count;
    layout->buffer_count++;
    if (bytes == fusion_round_up(end, FUSION_ALIGNMENT * (size_t)layout->ranks) && count)
        return SHOAL_OK;
    reader->line_number = line;
    return refuse(reader,
                  count ? "buffer %zu has %" PRIu64 " bytes, its parameters and %d ranks need others"
                        : "buffer %zu has no parameters",
                  index, bytes, layout->ranks);
}

static enum shoal_status read_end(struct reader *reader, const struct shoal_gradient_layout *layout)
{
    char hash[24];
    FUSION_TRY(next_line(reader, "hash"));
    FUSION_TRY(take(reader, "hash"));
    snprintf(hash, sizeof hash, "%016" PRIx64, layout->hash);
    if (strcmp(reader->word, hash) != 0)
        return refuse(reader, "the hash is \"%.60s\", that of the lines above is %s: the file was changed", reader->word, hash);
    reader->line_number++;
    return reader->at == reader->end ? SHOAL_OK : refuse(reader, "text follows the layout");
}

static enum shoal_status read_body(struct reader *reader, struct shoal_gradient_layout *layout, size_t buffers, bool *is_placed)
{
    size_t placed = 0;
    for (size_t i = 0; i < layout->parameters.count; i++)
        FUSION_TRY(read_parameter(reader, &layout->parameters, i));
    while (layout->buffer_count < buffers)
        FUSION_TRY(read_buffer(reader, layout, is_placed, &placed));
    if (placed < layout->parameters.count)
        return refuse(reader, "after the last buffer %zu parameters have no place", layout->parameters.count - placed);
    fusion_layout_close(layout);
    return read_end(reader, layout);
}

static enum shoal_status read_all(struct reader *reader, const struct shoal_parameter *parameters, size_t count,
                                  struct shoal_gradient_layout **layout_out)
{
    uint64_t version, ranks, parameter_count, buffers;
    struct shoal_gradient_layout *layout;
    FUSION_TRY(read_number(reader, "shoal gradient layout", UINT32_MAX, &version));
    if (version != VERSION)
        return refuse(reader, "version %" PRIu64 " of the format; this library reads version %d", version, VERSION);
    FUSION_TRY(read_number(reader, "ranks", INT32_MAX, &ranks));
    if (ranks < 1 || ranks > SHOAL_RANKS_MAX)
        return refuse(reader, "%" PRIu64 " ranks: 1 to %d are possible", ranks, SHOAL_RANKS_MAX);
    FUSION_TRY(read_number(reader, "parameters", UINT64_MAX, &parameter_count));
    if (parameter_count != count)
        return refuse(reader, "the file is of another model: it has %" PRIu64 " parameters, there are %zu here",
                      parameter_count, count);
    FUSION_TRY(read_number(reader, "buffers", count, &buffers));
    FUSION_TRY(fusion_layout_open(parameters, count, (int)ranks, &layout, reader->error, reader->error_bytes));
    bool *is_placed = calloc(count + 1, sizeof *is_placed);
    enum shoal_status status = is_placed ? read_body(reader, layout, buffers, is_placed) : SHOAL_ERR_MEMORY;
    if (!is_placed)
        snprintf(reader->error, reader->error_bytes, "no memory for a layout of %zu parameters", count);
    free(is_placed);
    if (status != SHOAL_OK) {
        shoal_gradient_layout_free(layout);
        return status;
    }
    *layout_out = layout;
    return SHOAL_OK;
}

enum shoal_status shoal_gradient_layout_parse(const char *text, size_t bytes, const struct shoal_parameter *parameters,
                                              size_t parameter_count, struct shoal_gradient_layout **layout_out, char *error,
                                              size_t error_bytes)
{
    char unread[FUSION_TEXT_MAX];
    if (!error) {
        error = unread;
        error_bytes = sizeof unread;
    }
    if ((!text && bytes) || !layout_out) {
        snprintf(error, error_bytes, "%s is NULL", layout_out ? "text" : "layout_out");
        return SHOAL_ERR_ARGUMENT;
    }
    if (!text)
        text = "";
    struct reader reader = {.at = text, .end = text + bytes, .error = error, .error_bytes = error_bytes};
    return read_all(&reader, parameters, parameter_count, layout_out);
}
