/* Passes what a diagnosis finds to the caller. */
#include <stdarg.h>
#include <string.h>

#include "inspect/diagnose.h"

#define FOUND_MAX 1400

static void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

static void diagnose_pass_on(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, char *found, const char *advice)
{
    make_printable(found);
    diagnosis->errors += level == SHOAL_FINDING_ERROR;
    diagnosis->fn(diagnosis->arg, level, diagnosis->subject, found, advice ? advice : "");
}

void shoal_diagnosis_tell(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *advice,
                          const char *format, ...)
{
    char found[FOUND_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    diagnose_pass_on(diagnosis, level, found, advice);
}

void shoal_diagnosis_tell_text(struct shoal_diagnosis *diagnosis, enum shoal_finding_level level, const char *text,
                               const char *advice)
{
    char found[FOUND_MAX];
    snprintf(found, sizeof found, "%s", text);
    make_printable(found);
    char *end = strstr(found, "; ");
    if (end && !advice) {
        *end = 0;
        advice = end + 2;
    }
    diagnose_pass_on(diagnosis, level, found, advice);
}
