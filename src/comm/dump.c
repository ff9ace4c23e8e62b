/* The handler writes to an eventfd, and a thread does the rest. The thread reads the recorders without a lock, as another
 * process would. So it works even if a thread of the program hangs inside Shoal, or has not called it for hours. */
#include "comm/dump.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "observe/recorder.h"

/* A context that requested the signal. */
struct asker {
    struct shoal_log *log;
    const struct shoal_settings *settings;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;        /* guards all variables below that the handler does not read */
static pthread_mutex_t askers_lock = PTHREAD_MUTEX_INITIALIZER; /* guards these two, which the thread reads; locked second */
static struct asker *askers; /* its settings name the place of the recorders; when it ends, the next one's do */
static size_t asker_count;
static pthread_t thread;
static int signal_number;
static atomic_bool must_stop;
static pthread_once_t forks_watched = PTHREAD_ONCE_INIT;

/* The handler reads these; they are set before it is installed. The descriptor stays open, because a handler may be about to
 * use it. */
static int wake_fd = -1;
static pid_t wake_pid;

static void wake(int number)
{
    const int error = errno;
    const uint64_t one = 1;
    (void)number;
    if (getpid() == wake_pid) /* a forked child has the handler, but not the thread */
        (void)!write(wake_fd, &one, sizeof one);
    errno = error;
}

/* ---- Writing ------------------------------------------------------------------------------------------------------------- */

static void note_job(void *arg, const struct shoal_watched *watched)
{
    *(uint64_t *)arg = watched->job;
}

/* Call with the askers' lock held, so that the log stays valid. */
static void dump(const struct asker *asker)
{
    struct shoal_log *owner = asker->log;
    struct shoal_recorder_file file = {owner, "SHOAL_RECORDER_FILE", asker->settings->engine.recorder_file, false};
    struct shoal_recorder recorder = {.flight = NULL};
    char pattern[SHOAL_RECORDER_NAME_MAX], all[SHOAL_RECORDER_NAME_MAX], name[SHOAL_RECORDER_NAME_MAX], error[300];
    const bool is_named = strcmp(file.pattern, "auto") != 0 && strcmp(file.pattern, "no") != 0;
    if (shoal_watch(getpid(), note_job, &recorder.job, error, sizeof error) != SHOAL_OK) {
        shoal_log_line(owner, SHOAL_LOG_WARN, "comm", "the flight recorder cannot be written: %s", error);
        return;
    }
    if (!is_named) {
        file.setting = "the flight recorder to";
        file.pattern = pattern;
        file.is_private = true;
        if (!shoal_recorder_find_path(&recorder, pattern, sizeof pattern, all, sizeof all)) {
            shoal_log_line(owner, SHOAL_LOG_WARN, "comm", "cannot write the flight recorder as %s: %m", all);
            return;
        }
    }
    if (shoal_recorder_append_process(getpid(), &file, name))
        shoal_log_line(owner, SHOAL_LOG_WARN, "comm", "a signal came: flight recorder written to %s", name);
}

static void *dump_serve(void *arg)
{
    uint64_t times;
    (void)arg;
    for (;;) {
        const ssize_t got = read(wake_fd, &times, sizeof times);
        if (atomic_load_explicit(&must_stop, memory_order_acquire) || (got < 0 && errno != EINTR))
            return NULL;
        pthread_mutex_lock(&askers_lock);
        if (got == (ssize_t)sizeof times && asker_count)
            dump(&askers[0]);
        pthread_mutex_unlock(&askers_lock);
    }
}

static bool dump_start_thread(void)
{
    sigset_t all, before;
    if (wake_fd < 0)
        wake_fd = eventfd(0, EFD_CLOEXEC);
    if (wake_fd < 0)
        return false;
    wake_pid = getpid();
    atomic_store_explicit(&must_stop, false, memory_order_release);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* the program's threads handle signals */
    errno = pthread_create(&thread, NULL, dump_serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return errno == 0;
}

/* ---- Forked children ----------------------------------------------------------------------------------------------------- */

static void dump_before_fork(void)
{
    pthread_mutex_lock(&lock);
    pthread_mutex_lock(&askers_lock);
}

static void dump_after_fork(void)
{
    pthread_mutex_unlock(&askers_lock);
    pthread_mutex_unlock(&lock);
}

/* A forked child has no thread for the parent's contexts, and the inherited descriptor would wake the parent. So the child's
 * first context starts again from nothing. */
static void begin_anew_in_child(void)
{
    free(askers);
    askers = NULL;
    asker_count = 0;
    if (wake_fd >= 0)
        close(wake_fd);
    wake_fd = -1;
    dump_after_fork();
}

static void dump_watch_forks(void)
{
    pthread_atfork(dump_before_fork, dump_after_fork, begin_anew_in_child);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static bool add_asker(struct shoal_log *log, const struct shoal_settings *settings)
{
    pthread_mutex_lock(&askers_lock);
    struct asker *more = reallocarray(askers, asker_count + 1, sizeof *more);
    if (more) {
        askers = more;
        askers[asker_count++] = (struct asker){log, settings};
    }
    pthread_mutex_unlock(&askers_lock);
    return more != NULL;
}

/* Returns true if it was in the list and was the last one. */
static bool remove_asker(const struct shoal_log *log)
{
    size_t kept = 0;
    pthread_mutex_lock(&askers_lock);
    const size_t before = asker_count;
    for (size_t i = 0; i < before; i++) {
        if (askers[i].log != log)
            askers[kept++] = askers[i];
    }
    asker_count = kept;
    if (!kept) {
        free(askers);
        askers = NULL;
    }
    pthread_mutex_unlock(&askers_lock);
    return before && !kept;
}

static bool is_handled_by_program(const struct shoal_settings *settings)
{
    struct sigaction found;
    signal_number = !strcmp(settings->comm.dump_signal, "USR1") ? SIGUSR1 : SIGUSR2;
    return sigaction(signal_number, NULL, &found) != 0 || (found.sa_handler != SIG_DFL && found.sa_handler != wake);
}

static void dump_start(struct shoal_log *log, const struct shoal_settings *settings)
{
    const struct sigaction ours = {.sa_handler = wake, .sa_flags = SA_RESTART};
    if (is_handled_by_program(settings)) {
        shoal_log_line(log, SHOAL_LOG_WARN, "comm",
                       "SHOAL_DUMP_SIGNAL is %s, which the program handles itself: it writes no flight recorder; `shoal top "
                       "--dump` does without a signal",
                       settings->comm.dump_signal);
        return;
    }
    if (add_asker(log, settings) && dump_start_thread() && sigaction(signal_number, &ours, NULL) == 0)
        return;
    shoal_log_line(log, SHOAL_LOG_WARN, "comm", "SHOAL_DUMP_SIGNAL: no thread can be started for it: %m");
    remove_asker(log);
}

void shoal_dump_start(struct shoal_log *log, const struct shoal_settings *settings)
{
    if (!strcmp(settings->comm.dump_signal, "no") || !settings->comm.dump_signal[0])
        return;
    pthread_once(&forks_watched, dump_watch_forks);
    pthread_mutex_lock(&lock);
    if (!asker_count)
        dump_start(log, settings);
    else if (!add_asker(log, settings))
        shoal_log_line(log, SHOAL_LOG_WARN, "comm", "SHOAL_DUMP_SIGNAL: no memory to ask for it");
    pthread_mutex_unlock(&lock);
}

/* The handler stays installed: a signal may be pending, and its default action would end the process. */
void shoal_dump_stop(struct shoal_log *log)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&lock);
    if (remove_asker(log) && wake_pid == getpid()) {
        atomic_store_explicit(&must_stop, true, memory_order_release);
        if (write(wake_fd, &one, sizeof one) == (ssize_t)sizeof one)
            pthread_join(thread, NULL);
    }
    pthread_mutex_unlock(&lock);
}
