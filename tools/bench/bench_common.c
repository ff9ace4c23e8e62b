#include "bench_common.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "bind.h"

static const char *const formats[] = {"table", "json", NULL};

bool bench_common_apply(int id, const struct tool_args *args, struct bench_common *common)
{
    switch ((enum bench_common_option)id) {
    case BENCH_OPTION_STEPS:
        return tool_number_read(args, 1, BENCH_STEPS_MAX, &common->steps);
    case BENCH_OPTION_FORMAT:
        return tool_word_read(args, formats, &common->json);
    case BENCH_OPTION_TRACE:
        common->trace = args->value;
        return true;
    case BENCH_OPTION_RANKS:
        return tool_number_read(args, 1, BENCH_RANKS_MAX, &common->ranks);
    case BENCH_OPTION_BIND:
        return tool_word_read(args, bind_words, &common->bind);
    case BENCH_OPTION_PIN:
        return common->pin = true;
    case BENCH_OPTION_TIMEOUT:
        return tool_number_read(args, 1, BENCH_SECONDS_MAX, &common->timeout_s);
    case BENCH_OPTION_HELP:
        break;
    }
    return common->help = true;
}

void bench_ranks_note(int wanted, int started)
{
    if (wanted && wanted != started)
        fprintf(stderr, "shoal bench: -n %d is not used: the launcher started %d\n", wanted, started);
}

void bench_failure_print(const struct shoal_context *context, int rank, enum shoal_status status, const char *why)
{
    struct shoal_failure failure = SHOAL_FAILURE_INIT;
    if (!why && context && shoal_last_failure(context, NULL, &failure) == SHOAL_OK && failure.status == status)
        why = failure.text;
    if (rank < 0)
        fprintf(stderr, "shoal bench: a worker could not join: %s: %s\n", shoal_status_name(status), shoal_status_text(status));
    else
        fprintf(stderr, "shoal bench: rank %d: %s: %s\n", rank, shoal_status_name(status),
                why ? why : shoal_status_text(status));
}

bool bench_file_check(const char *name)
{
    const bool was_there = name && access(name, F_OK) == 0;
    FILE *file = name ? fopen(name, "ae") : NULL;
    if (name && !file)
        fprintf(stderr, "shoal bench: cannot write %s: %s\n", name, strerror(errno));
    if (!file)
        return !name;
    fclose(file);
    if (!was_there)
        unlink(name);
    return true;
}
