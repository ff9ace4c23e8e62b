#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bootstrap/sources.h"
#include "link/auth.h"

#define SECRET_TEXT_MAX 1024

static void close_file(FILE **file)
{
    if (*file)
        fclose(*file);
}

static enum shoal_status secret_read_line(const char *name, struct shoal_log *log, char text[SECRET_TEXT_MAX])
{
    SHOAL_SCOPED(close_file) FILE *file = fopen(name, "re");
    if (!file)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "SHOAL_SECRET_FILE \"%s\" cannot be read: %s", name,
                              strerror(errno));
    errno = 0;
    if (!fgets(text, SECRET_TEXT_MAX, file) && errno)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "SHOAL_SECRET_FILE \"%s\" cannot be read: %s", name,
                              strerror(errno));
    text[strcspn(text, "\r\n")] = 0;
    if (!text[0])
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "SHOAL_SECRET_FILE \"%s\" has no secret in its first line",
                              name);
    return SHOAL_OK;
}

enum shoal_status shoal_bootstrap_secret_load(const struct shoal_bootstrap_settings *settings, struct shoal_log *log,
                                              struct shoal_bootstrap *bootstrap)
{
    static const unsigned char context[SHOAL_SECRET_BYTES] = "shoal job secret, version 1";
    char text[SECRET_TEXT_MAX] = "";
    if (settings->secret[0])
        snprintf(text, sizeof text, "%s", settings->secret);
    else if (settings->secret_file[0])
        SHOAL_TRY(secret_read_line(settings->secret_file, log, text));
    if (!text[0] || bootstrap->size == 1)
        return SHOAL_OK; /* a single rank needs no proof */
    const struct shoal_auth_span span = {text, strlen(text)};
    bootstrap->has_secret = shoal_auth_mac(context, &span, 1, bootstrap->secret);
    explicit_bzero(text, sizeof text);
    if (bootstrap->has_secret)
        return SHOAL_OK;
    return shoal_log_fail(log, SHOAL_ERR_AUTH, "bootstrap",
                          "%s is set, but libsodium, which proves it, is not installed; install libsodium23 or unset it",
                          settings->secret[0] ? "SHOAL_SECRET" : "SHOAL_SECRET_FILE");
}
