#include "tool.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "base/spelling.h"
#include "topology/limits.h"

enum { OPTIONS_MAX = 32 };

int tool_usage_fail(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "shoal %s: ", command);
    vfprintf(stderr, format, args);
    fprintf(stderr, " (shoal %s --help explains)\n", command);
    va_end(args);
    return TOOL_EXIT_USAGE;
}

int tool_file_fail(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "shoal %s: ", command);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return TOOL_EXIT_USAGE;
}

bool tool_value_fail(const struct tool_args *args, const char *takes)
{
    tool_usage_fail(args->command, "%s takes %s, not '%s'", args->name, takes, args->value);
    return false;
}

/* Text that stops early, or has one additional letter, such as "-np" of other launchers. */
static bool is_beginning(const char *text, const char *word)
{
    const size_t length = strlen(text), word_length = strlen(word);
    return (length > 2 && !strncmp(text, word, length)) || (length == word_length + 1 && !strncmp(text, word, word_length));
}

/* A third of the letters may be wrong, not counting leading dashes. */
static bool is_near(const char *text, const char *word, size_t distance)
{
    const size_t letters = strlen(text + strspn(text, "-")), word_letters = strlen(word + strspn(word, "-"));
    return is_beginning(text, word) || distance <= (letters > word_letters ? letters : word_letters) / 3;
}

const char *tool_word_nearest(const char *text, const char *const *words)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    for (; *text && *words; words++) {
        const size_t distance = is_beginning(text, *words) ? 1 : shoal_spelling_changes(text, *words);
        if (distance < least && is_near(text, *words, distance)) {
            least = distance;
            nearest = *words;
        }
    }
    return nearest;
}

static int option_unknown(const struct tool_args *args, const struct tool_option *options, const char *name)
{
    const char *words[OPTIONS_MAX] = {NULL};
    for (size_t i = 0; options[i].name && i + 1 < OPTIONS_MAX; i++)
        words[i] = options[i].name;
    const char *nearest = tool_word_nearest(name, words);
    if (nearest)
        tool_usage_fail(args->command, "there is no option '%s'; did you mean %s?", name, nearest);
    else
        tool_usage_fail(args->command, "there is no option '%s'", name);
    return TOOL_OPTION_BAD;
}

/* Returns how much of text names the option: all of "--timeout", the first part of "--timeout=5" and of "-n4". Returns 0 for
 * another option, such as "-np", because -n takes a number. */
static size_t option_match(const struct tool_option *option, const char *text)
{
    const size_t length = strlen(option->name);
    if (strncmp(text, option->name, length) != 0)
        return 0;
    if (!text[length] || text[length] == '=')
        return length;
    const bool is_number = option->value && !strcmp(option->value, "N");
    return length == 2 && option->value && (!is_number || isdigit((unsigned char)text[length])) ? length : 0;
}

static int option_take(struct tool_args *args, const struct tool_option *option, const char *rest)
{
    args->name = option->name;
    args->value = NULL;
    if (!option->value && *rest) {
        tool_usage_fail(args->command, "%s takes no value", option->name);
        return TOOL_OPTION_BAD;
    }
    if (!option->value)
        return option->id;
    if (*rest)
        args->value = rest + (*rest == '=');
    else if (args->at < args->argc)
        args->value = args->argv[args->at++];
    else {
        tool_usage_fail(args->command, "%s wants a value: %s %s", option->name, option->name, option->value);
        return TOOL_OPTION_BAD;
    }
    return option->id;
}

int tool_option_next(struct tool_args *args, const struct tool_option *options)
{
    if (args->at >= args->argc || args->argv[args->at][0] != '-' || !args->argv[args->at][1])
        return TOOL_OPTION_END;
    const char *text = args->argv[args->at++];
    if (!strcmp(text, "--"))
        return TOOL_OPTION_END;
    for (const struct tool_option *option = options; option->name; option++) {
        const size_t length = option_match(option, text);
        if (length)
            return option_take(args, option, text + length);
    }
    return option_unknown(args, options, text);
}

bool tool_number_read(const struct tool_args *args, int least, int most, int *number_out)
{
    char takes[64], *end;
    errno = 0;
    const long number = strtol(args->value, &end, 10);
    if (!isdigit((unsigned char)args->value[0]) || *end || errno || number < least || number > most) {
        snprintf(takes, sizeof takes, "a number from %d to %d", least, most);
        return tool_value_fail(args, takes);
    }
    *number_out = (int)number;
    return true;
}

bool tool_size_read(const struct tool_args *args, size_t *bytes_out)
{
    static const char units[] = "KMG";
    static const char takes[] = "a size such as 4096, 64K or 3MiB";
    char *end;
    unsigned shift = 0;
    errno = 0;
    const unsigned long long number = strtoull(args->value, &end, 10);
    if (!isdigit((unsigned char)args->value[0]) || errno)
        return tool_value_fail(args, takes);
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    if (unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        end += end[1] == 'i' && end[2] == 'B' ? 2 : 1;
    }
    end += *end == 'B';
    if (*end || number > SIZE_MAX >> shift)
        return tool_value_fail(args, takes);
    *bytes_out = (size_t)number << shift;
    return true;
}

bool tool_seconds_read(const struct tool_args *args, uint64_t *ms_out)
{
    char *end;
    const double seconds = strtod(args->value, &end);
    if (!isdigit((unsigned char)args->value[0]) || *end || !(seconds <= 1e7))
        return tool_value_fail(args, "a number of seconds");
    *ms_out = (uint64_t)(seconds * 1000.0 + 0.5);
    return true;
}

bool tool_word_find(const char *const *words, const char *text, int *index_out)
{
    for (int i = 0; words[i]; i++) {
        if (!strcmp(words[i], text)) {
            *index_out = i;
            return true;
        }
    }
    return false;
}

bool tool_word_read(const struct tool_args *args, const char *const *words, int *index_out)
{
    char takes[128] = "one of ";
    if (tool_word_find(words, args->value, index_out))
        return true;
    for (int i = 0; words[i]; i++)
        snprintf(takes + strlen(takes), sizeof takes - strlen(takes), "%s%s", i ? ", " : "", words[i]);
    return tool_value_fail(args, takes);
}

struct type_word {
    const char *word;
    enum shoal_type type;
};

static const struct type_word type_words[] = {
    {"f32", SHOAL_FLOAT32},   {"float32", SHOAL_FLOAT32},   {"f64", SHOAL_FLOAT64}, {"float64", SHOAL_FLOAT64},
    {"bf16", SHOAL_BFLOAT16}, {"bfloat16", SHOAL_BFLOAT16}, {"f16", SHOAL_FLOAT16}, {"float16", SHOAL_FLOAT16},
    {"i64", SHOAL_INT64},     {"int64", SHOAL_INT64},       {"i32", SHOAL_INT32},   {"int32", SHOAL_INT32},
    {"i8", SHOAL_INT8},       {"int8", SHOAL_INT8},         {"u8", SHOAL_UINT8},    {"uint8", SHOAL_UINT8},
};
enum { TYPE_WORDS = sizeof type_words / sizeof type_words[0] };

bool tool_type_read(const struct tool_args *args, enum shoal_type *type_out)
{
    for (size_t i = 0; i < TYPE_WORDS; i++) {
        if (!strcmp(args->value, type_words[i].word)) {
            *type_out = type_words[i].type;
            return true;
        }
    }
    return tool_value_fail(args, "one of float32, float64, bfloat16, float16, int64, int32, int8, uint8");
}

static bool is_unit(const char *text, const char *name)
{
    while (*name && tolower((unsigned char)*text) == *name)
        text++, name++;
    return !*name && !*text;
}

bool tool_quantity_read(const struct tool_args *args, const struct tool_unit *units, const char *takes, double *value_out)
{
    char *end;
    const double number = strtod(args->value, &end);
    if (!isdigit((unsigned char)args->value[0]))
        return tool_value_fail(args, takes);
    for (; units->name; units++) {
        if (is_unit(end, units->name)) {
            *value_out = number * units->factor;
            return true;
        }
    }
    return tool_value_fail(args, takes);
}

bool tool_time_read(const struct tool_args *args, double *us_out)
{
    static const struct tool_unit units[] = {{"us", 1}, {"ms", 1e3}, {"s", 1e6}, {NULL, 0}};
    return tool_quantity_read(args, units, "a time such as 18.5ms or 300us", us_out);
}

bool tool_rate_read(const struct tool_args *args, double *gbit_s_out)
{
    static const struct tool_unit units[] = {{"kbit", 1e-6}, {"mbit", 1e-3}, {"gbit", 1}, {"kbit/s", 1e-6}, {"mbit/s", 1e-3},
                                             {"gbit/s", 1},  {"mb/s", 8e-3}, {"gb/s", 8}, {NULL, 0}};
    return tool_quantity_read(args, units, "bits per second, such as 1gbit, 25gbit or 400mbit", gbit_s_out);
}

bool tool_is_same_word(const char *text, const char *word)
{
    for (; *text; text++)
        if (*text != '-' && *text != *word++)
            return false;
    return !*word;
}

bool tool_collective_read(const char *command, const char *text, const char **collective_out)
{
    static const char *const collectives[] = {"allreduce", "reduce",  "reducescatter", "broadcast", "allgather",
                                              "gather",    "scatter", "alltoall",      "barrier",   NULL};
    if (*collective_out)
        return !tool_usage_fail(command, "'%s' is one collective too many after '%s'", text, *collective_out);
    for (const char *const *name = collectives; *name; name++)
        if (tool_is_same_word(text, *name))
            *collective_out = *name;
    if (*collective_out)
        return true;
    const char *nearest = tool_word_nearest(text, collectives);
    if (nearest)
        return !tool_usage_fail(command, "there is no collective '%s'; did you mean %s?", text, nearest);
    return !tool_usage_fail(command,
                            "there is no collective '%s'; there are allreduce, reduce, reducescatter, broadcast, allgather, "
                            "gather, scatter, alltoall and barrier",
                            text);
}

/* The long names are at the odd indexes of the table. */
const char *tool_type_name(enum shoal_type type)
{
    for (size_t i = 1; i < TYPE_WORDS; i += 2)
        if (type_words[i].type == type)
            return type_words[i].word;
    return "no type";
}

/* The only task of an srun step is more often a shell than a rank. */
static bool is_one_of_tasks(void)
{
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    return getenv("SLURM_PROCID") && tasks && strcmp(tasks, "1") != 0;
}

bool tool_is_launched(void)
{
    return (getenv("RANK") && getenv("WORLD_SIZE")) || getenv("PMIX_RANK") || getenv("PMI_RANK") || is_one_of_tasks();
}

const char *tool_memory_text(uint64_t before)
{
    return shoal_topology_oom_kills() > before ? ", probably for lack of memory (the kernel's oom_kill counter rose): give the "
                                                 "container more memory, or start fewer workers"
                                               : "";
}

bool tool_terminal_read(int fd, int *rows_out, int *columns_out)
{
    struct winsize size;
    if (ioctl(fd, TIOCGWINSZ, &size) || !size.ws_row || !size.ws_col)
        return false;
    *rows_out = size.ws_row;
    *columns_out = size.ws_col;
    return true;
}

int tool_output_finish(const char *command, int code)
{
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    fprintf(stderr, "shoal %s: cannot write to stdout: %s\n", command, errno ? strerror(errno) : "an earlier write failed");
    return 1;
}
