#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const levels[] = {"warn", "info", "debug", NULL};
static const char *const modules[] = {"bootstrap", "comm",   "engine",  "fabric", "gpu", "helpers",
                                      "hosts",     "memory", "observe", "shm",    NULL};

#define OF(field) offsetof(struct shoal_log_settings, field)
static const struct shoal_setting settings_of_logs[] = {
    {.name = "SHOAL_LOG",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(log),
     .preset = "warn",
     .words = levels,
     .more = modules,
     .text = "log level: warn, info or debug; then, after commas, the modules that log (default: all)"},
    {.name = "SHOAL_LOG_FILE",
     .type = SHOAL_SETTING_TEXT,
     .offset = OF(log_file),
     .preset = "",
     .text = "file for log lines instead of stderr; %h is the host, %p the process, %r the rank"},
};
#undef OF
const struct shoal_setting_table shoal_log_setting_table = {settings_of_logs, SHOAL_COUNT_OF(settings_of_logs)};

static const char *const level_names[] = {"warn", "info", "debug"};

/* The last error of this thread, so that two threads that fail each see their own. A thread that uses several contexts keeps
 * only its last error. */
static _Thread_local struct {
    uint64_t log_id;
    enum shoal_status status;
    char text[SHOAL_LOG_TEXT_MAX];
} own_error;

static _Thread_local unsigned hushes;

void shoal_log_hush(bool is_on)
{
    hushes = is_on ? hushes + 1 : hushes - 1;
}

/* Parses "info,engine,shm" into level info and modules ",engine,shm,". The setting's check has validated the text. */
static void parse_levels(struct shoal_log *log, const char *text)
{
    const size_t word = strcspn(text, ",");
    for (size_t i = 0; i < SHOAL_COUNT_OF(level_names); i++) {
        if (strlen(level_names[i]) == word && strncmp(text, level_names[i], word) == 0)
            log->level = (enum shoal_log_level)i;
    }
    if (text[word] == ',')
        snprintf(log->modules, sizeof log->modules, "%.*s,", (int)sizeof log->modules - 2, text + word);
}

static void say_unopened(const char *name)
{
    fprintf(stderr, "shoal: cannot open SHOAL_LOG_FILE \"%s\" (%m); log lines go to stderr\n", name);
}

/* Returns true if a file can be opened for appending; otherwise errno has the reason. Does not create the file. */
static bool can_append(const char *name)
{
    char folder[512];
    struct stat file;
    const char *slash = strrchr(name, '/');
    if (stat(name, &file) == 0) {
        errno = EISDIR;
        return !S_ISDIR(file.st_mode) && access(name, W_OK) == 0;
    }
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - name) + 1 : 1, slash ? name : ".");
    return access(folder, W_OK | X_OK) == 0;
}

/* Reports an unusable file before the first line. That line creates the file, when the rank is known. */
static void check_file(struct shoal_log *log)
{
    char name[512];
    const char *rank = strstr(log->file_name, "%r");
    if (rank && strchr(rank, '/'))
        return; /* the folder is not known yet */
    shoal_log_expand(log, log->file_name, name, sizeof name);
    if (can_append(name))
        return;
    say_unopened(log->file_name);
    log->file = stderr;
}

void shoal_log_init(struct shoal_log *log, const struct shoal_log_settings *settings, shoal_log_fn callback, void *callback_arg)
{
    static _Atomic uint64_t made;
    memset(log, 0, sizeof *log);
    log->id = atomic_fetch_add_explicit(&made, 1, memory_order_relaxed) + 1; /* relaxed: the number only has to be unique */
    pthread_mutex_init(&log->lock, NULL);
    parse_levels(log, settings->log);
    strcpy(log->file_name, settings->log_file);
    log->callback = callback;
    log->callback_arg = callback_arg;
    log->rank = -1;
    if (gethostname(log->host, sizeof log->host - 1) != 0)
        strcpy(log->host, "?");
    if (log->file_name[0] && !callback)
        check_file(log);
}

static void keep_quiet(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

void shoal_log_init_quiet(struct shoal_log *log)
{
    static const struct shoal_log_settings none = {0};
    shoal_log_init(log, &none, keep_quiet, NULL);
}

void shoal_log_fini(struct shoal_log *log)
{
    if (log->file && log->file != stderr)
        fclose(log->file);
    pthread_mutex_destroy(&log->lock);
}

bool shoal_log_is_on(const struct shoal_log *log, enum shoal_log_level level, const char *module)
{
    if (level == SHOAL_LOG_WARN)
        return true;
    if (level > log->level)
        return false;
    if (!log->modules[0])
        return true;
    char wanted[64];
    snprintf(wanted, sizeof wanted, ",%s,", module);
    return strstr(log->modules, wanted) != NULL;
}

void shoal_log_expand(const struct shoal_log *log, const char *pattern, char *name, size_t name_bytes)
{
    size_t used = 0;
    name[0] = 0;
    for (const char *p = pattern; *p && used + 1 < name_bytes; p++) {
        int wrote = 1;
        if (p[0] == '%' && p[1] == 'h')
            wrote = snprintf(name + used, name_bytes - used, "%s", log->host);
        else if (p[0] == '%' && p[1] == 'p')
            wrote = snprintf(name + used, name_bytes - used, "%d", (int)getpid());
        else if (p[0] == '%' && p[1] == 'r')
            wrote = snprintf(name + used, name_bytes - used, "%d", log->rank);
        else {
            name[used++] = *p;
            name[used] = 0;
            continue;
        }
        used = shoal_min_size(used + (size_t)wrote, name_bytes - 1);
        p++;
    }
}

/* Needs the lock. Reports once, on stderr, that a file cannot be opened; lines then go to stderr. */
static FILE *open_file(struct shoal_log *log)
{
    if (log->file)
        return log->file;
    log->file = stderr;
    if (log->file_name[0]) {
        char name[512];
        shoal_log_expand(log, log->file_name, name, sizeof name);
        FILE *file = fopen(name, "ae");
        if (file)
            log->file = file;
        else
            say_unopened(name);
    }
    return log->file;
}

static void write_line(struct shoal_log *log, enum shoal_log_level level, const char *module, const char *text)
{
    char who[96] = "";
    if (log->rank >= 0)
        snprintf(who, sizeof who, "rank %d (%s:%d) ", log->rank, log->host, (int)getpid());
    char line[SHOAL_LOG_TEXT_MAX + 160];
    snprintf(line, sizeof line, "shoal: %s%s%s[%s] %s", who, level == SHOAL_LOG_WARN ? "" : level_names[level],
             level == SHOAL_LOG_WARN ? "" : " ", module, text);
    pthread_mutex_lock(&log->lock);
    if (log->callback) {
        log->callback(log->callback_arg, (int)level, line);
    } else {
        FILE *file = open_file(log);
        fprintf(file, "%s\n", line);
        fflush(file);
    }
    pthread_mutex_unlock(&log->lock);
}

void shoal_log_line(struct shoal_log *log, enum shoal_log_level level, const char *module, const char *format, ...)
{
    if (!shoal_log_is_on(log, level, module))
        return;
    char text[SHOAL_LOG_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    write_line(log, level, module, text);
}

enum shoal_status shoal_log_fail(struct shoal_log *log, enum shoal_status status, const char *module, const char *format, ...)
{
    char text[SHOAL_LOG_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (hushes) {
        shoal_log_line(log, SHOAL_LOG_DEBUG, module, "%s", text);
        return status;
    }
    status = shoal_log_repeat(log, status, text); /* before writing: the callback that receives the line may ask for it */
    write_line(log, SHOAL_LOG_WARN, module, text);
    return status;
}

void shoal_log_restore(struct shoal_log *log, enum shoal_status status, const char *text)
{
    own_error.log_id = log->id;
    own_error.status = status;
    snprintf(own_error.text, sizeof own_error.text, "%s", text);
    pthread_mutex_lock(&log->lock);
    log->last_status = status;
    snprintf(log->last_error, sizeof log->last_error, "%s", text);
    pthread_mutex_unlock(&log->lock);
}

enum shoal_status shoal_log_repeat(struct shoal_log *log, enum shoal_status status, const char *text)
{
    shoal_log_restore(log, status, text);
    return status;
}

enum shoal_status shoal_log_last_error(struct shoal_log *log, char *text, size_t text_bytes)
{
    if (own_error.log_id == log->id) {
        snprintf(text, text_bytes, "%s", own_error.text);
        return own_error.status;
    }
    pthread_mutex_lock(&log->lock);
    const enum shoal_status status = log->last_status;
    snprintf(text, text_bytes, "%s", log->last_error);
    pthread_mutex_unlock(&log->lock);
    return status;
}
