/* Profiles of pipelines in files. */
#include "pipeline_profile.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tool.h"

enum { FILE_BYTES_MAX = 64 << 20 };

/* Reads a file whole. Returns 0, or the exit code after printing one line. */
static int file_load(const char *command, const char *name, FILE *file, char **text_out, size_t *bytes_out)
{
    struct stat status;
    if (fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode))
        return tool_file_fail(command, "%s: is a folder", name);
    char *text = malloc(FILE_BYTES_MAX);
    if (!text) {
        fprintf(stderr, "shoal %s: no memory\n", command);
        return 1;
    }
    errno = 0;
    const size_t bytes = fread(text, 1, FILE_BYTES_MAX, file);
    if (!ferror(file) && bytes < FILE_BYTES_MAX) {
        *text_out = text;
        *bytes_out = bytes;
        return 0;
    }
    free(text);
    return tool_file_fail(command, "%s: %s", name, ferror(file) ? strerror(errno) : "is too long for a profile");
}

static int profile_file_open(const char *command, const char *name, struct shoal_profile **profile_out)
{
    char *text = NULL, why[1000] = "";
    size_t bytes = 0;
    FILE *file = fopen(name, "re");
    if (!file)
        return tool_file_fail(command,
                              "there is no profile %s (gpt2, bert-large and resnet50 are built in), and no such file: %s", name,
                              strerror(errno));
    int code = file_load(command, name, file, &text, &bytes);
    fclose(file);
    if (!code && shoal_profile_read(text, bytes, profile_out, why, sizeof why) != SHOAL_OK)
        code = tool_file_fail(command, "%s: %s", name, why);
    free(text);
    return code;
}

int pipeline_profile_open(const char *command, const char *word, const struct pipeline_model *how,
                          struct shoal_profile **profile_out, int *is_built_in_out)
{
    const int code = pipeline_model_open(command, word, how, profile_out);
    if (is_built_in_out)
        *is_built_in_out = code >= 0;
    return code >= 0 ? code : profile_file_open(command, word, profile_out);
}
