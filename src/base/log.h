/* Log lines, and the text of the last error: this thread's, or any thread's. One struct shoal_log per context; any thread. A
 * line reads "shoal: rank 2 (host:pid) [module] text". The function that first detects an error calls shoal_log_fail() once,
 * with the exact cause; its callers return the status silently. */
#ifndef SHOAL_BASE_LOG_H
#define SHOAL_BASE_LOG_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/setting.h"

enum shoal_log_level { SHOAL_LOG_WARN, SHOAL_LOG_INFO, SHOAL_LOG_DEBUG };

#define SHOAL_LOG_TEXT_MAX 1024

struct shoal_log_settings {
    char log[SHOAL_SETTING_TEXT_MAX];
    char log_file[SHOAL_SETTING_TEXT_MAX];
};
extern const struct shoal_setting_table shoal_log_setting_table;

struct shoal_log {
    pthread_mutex_t lock;
    enum shoal_log_level level;
    char modules[SHOAL_SETTING_TEXT_MAX]; /* ",engine,shm," or empty for all */
    char file_name[SHOAL_SETTING_TEXT_MAX];
    FILE *file; /* opened at the first line, when the rank is known */
    shoal_log_fn callback;
    void *callback_arg;
    atomic_int rank; /* -1 until known */
    char host[64];
    uint64_t id; /* unique among all logs that this process ever had */
    enum shoal_status last_status;
    char last_error[SHOAL_LOG_TEXT_MAX];
};

/* Prepares a log from SHOAL_LOG and SHOAL_LOG_FILE. `callback` may be NULL: lines then go to the file. If the file cannot be
 * opened, that is reported at once on stderr, and lines go there. */
void shoal_log_init(struct shoal_log *log, const struct shoal_log_settings *settings, shoal_log_fn callback,
                    void *callback_arg);
/* Prepares a log that discards its lines, for calls whose last error is reported in another way. */
void shoal_log_init_quiet(struct shoal_log *log);
void shoal_log_fini(struct shoal_log *log);

bool shoal_log_is_on(const struct shoal_log *log, enum shoal_log_level level, const char *module);

void shoal_log_line(struct shoal_log *log, enum shoal_log_level level, const char *module, const char *format, ...)
    SHOAL_PRINTF(4, 5);

/* Logs a warning, keeps it as the last error and returns status, so that callers can write `return shoal_log_fail(...)`. */
SHOAL_MUST_USE enum shoal_status shoal_log_fail(struct shoal_log *log, enum shoal_status status, const char *module,
                                                const char *format, ...) SHOAL_PRINTF(4, 5);

/* Until as many calls with false as with true, this thread's failures are only debug lines and are not kept. For attempts that
 * may fail without harm. */
void shoal_log_hush(bool is_on);

/* Makes an error that another thread has logged this thread's last error. Returns status. */
SHOAL_MUST_USE enum shoal_status shoal_log_repeat(struct shoal_log *log, enum shoal_status status, const char *text);

/* Copies this thread's last error, or any thread's if this one had none. Returns SHOAL_OK if there was none. */
enum shoal_status shoal_log_last_error(struct shoal_log *log, char *text, size_t text_bytes);

/* Restores what shoal_log_last_error() returned: failures since then are not failures of this thread's call. */
void shoal_log_restore(struct shoal_log *log, enum shoal_status status, const char *text);

/* Replaces %h, %p and %r in a file name. */
void shoal_log_expand(const struct shoal_log *log, const char *pattern, char *name, size_t name_bytes);

#endif
