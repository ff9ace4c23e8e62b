#include "link/secret.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX 1024

static void file_close(FILE **file)
{
    if (*file)
        fclose(*file);
}

static enum shoal_status line_read(const char *name, char text[TEXT_MAX], char *error, size_t error_bytes)
{
    errno = 0;
    SHOAL_SCOPED(file_close) FILE *file = fopen(name, "re");
    if (!file || (!fgets(text, TEXT_MAX, file) && errno)) {
        snprintf(error, error_bytes, "SHOAL_SECRET_FILE \"%.200s\" cannot be read: %s", name, strerror(errno));
        return SHOAL_ERR_ARGUMENT;
    }
    text[strcspn(text, "\r\n")] = 0;
    if (text[0])
        return SHOAL_OK;
    snprintf(error, error_bytes, "SHOAL_SECRET_FILE \"%.200s\" has no secret in its first line", name);
    return SHOAL_ERR_ARGUMENT;
}

enum shoal_status shoal_secret_load(const char *value, const char *file, const unsigned char context[SHOAL_SECRET_BYTES],
                                    bool *is_set_out, unsigned char secret_out[SHOAL_SECRET_BYTES], char *error,
                                    size_t error_bytes)
{
    char text[TEXT_MAX] = "";
    const bool has_value = value && *value;
    *is_set_out = false;
    if (has_value)
        snprintf(text, sizeof text, "%s", value);
    else if (file && *file)
        SHOAL_TRY(line_read(file, text, error, error_bytes));
    if (!text[0] || !secret_out)
        return SHOAL_OK;
    const struct shoal_auth_span span = {text, strlen(text)};
    *is_set_out = shoal_auth_mac(context, &span, 1, secret_out);
    explicit_bzero(text, sizeof text);
    if (*is_set_out)
        return SHOAL_OK;
    snprintf(error, error_bytes, "%s is set, but libsodium, which proves it, is not installed; install libsodium23 or unset it",
             has_value ? "SHOAL_SECRET" : "SHOAL_SECRET_FILE");
    return SHOAL_ERR_AUTH;
}
