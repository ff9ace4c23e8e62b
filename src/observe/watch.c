/* Reads the flight recorders of another process on this host, which need not cooperate and may hang: they are in a memfd that
 * appears in /proc/PID/fd. The file is copied with pread instead of mapped, so that nothing the other process does to it can
 * harm this one. Nothing in it is trusted, because its owner may be another user. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/ranks.h"
#include "observe/recorder.h"

/* Further slots are ignored: the file may be anyone's, and of any length. */
#define SLOTS_MAX 65536

/* A copy of one recorder. */
struct copy {
    struct shoal_flight flight;
    struct shoal_record records[SHOAL_RECORDS];
};

struct watch {
    int pid;
    int inner_pid; /* as the process sees itself; 0 if unknown */
    DIR *folder;   /* /proc/PID/fd */
    struct copy *now, *before;
    uint64_t next_after; /* records begun by the time *now had been read */
    bool has_some;       /* a recorder was found */
    char *error;
    size_t error_bytes;
};

/* ---- Reading ------------------------------------------------------------------------------------------------------------- */

static bool watch_read_all(int fd, off_t from, void *into, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, (char *)into + done, bytes - done, from + (off_t)done);
        if (got <= 0 && !(got < 0 && errno == EINTR))
            return false;
        done += got > 0 ? (size_t)got : 0;
    }
    return true;
}

static void clean_text(char *text, size_t bytes)
{
    text[bytes - 1] = 0;
    for (; *text; text++) {
        if (*text < ' ' || *text > '~' || *text == '"' || *text == '\\')
            *text = '?';
    }
}

static const char *find_text(const struct shoal_flight *flight, const char *address)
{
    for (uint32_t i = 0; i < flight->text_count; i++) {
        if (flight->texts[i].address == (uint64_t)(uintptr_t)address)
            return flight->texts[i].text;
    }
    return "?";
}

/* Replaces the addresses of the other process's texts by this process's. A record that changed between the two readings is left
 * out (collective NULL): it may be half of one operation and half of the next. */
static void adopt_records(struct watch *watch)
{
    struct copy *now = watch->now;
    for (size_t i = 0; i < SHOAL_RECORDS; i++) {
        struct shoal_record *record = &now->records[i];
        const bool is_whole = memcmp(record, &watch->before->records[i], sizeof *record) == 0;
        record->collective = is_whole && record->posted ? find_text(&now->flight, record->collective) : NULL;
        record->algorithm = find_text(&now->flight, record->algorithm);
        record->owner = NULL;
    }
}

static void clean_head(struct shoal_flight *flight)
{
    flight->text_count = flight->text_count < SHOAL_FLIGHT_TEXTS ? flight->text_count : SHOAL_FLIGHT_TEXTS;
    for (uint32_t i = 0; i < flight->text_count; i++)
        clean_text(flight->texts[i].text, sizeof flight->texts[i].text);
    clean_text(flight->host, sizeof flight->host);
    clean_text(flight->comm_name, sizeof flight->comm_name);
    clean_text(flight->version, sizeof flight->version);
    if (!(flight->ns_per_tick > 0) || flight->ns_per_tick > 1e6)
        flight->ns_per_tick = 1;
}

/* Copies until two readings agree, at most three times: if a rank does millions of operations a second, no two agree. */
static bool read_records(struct watch *watch, int fd, off_t from)
{
    bool is_read = watch_read_all(fd, from, watch->before, sizeof *watch->before);
    for (int tries = 0; is_read && tries < 3; tries++) {
        is_read = watch_read_all(fd, from, watch->now, sizeof *watch->now);
        if (is_read && memcmp(watch->now->records, watch->before->records, sizeof watch->now->records) == 0)
            break;
        if (is_read && tries < 2)
            memcpy(watch->before, watch->now, sizeof *watch->before);
    }
    return is_read &&
           watch_read_all(fd, from + (off_t)offsetof(struct shoal_flight, next), &watch->next_after, sizeof watch->next_after);
}

static enum shoal_status watch_fail(const struct watch *watch, enum shoal_status status, const char *text, const char *why)
{
    snprintf(watch->error, watch->error_bytes, text, watch->pid, why);
    return status;
}

/* Callers may use these numbers as indices. */
static bool is_rank_of_something(const struct shoal_flight *flight)
{
    return flight->size >= 1 && flight->size <= SHOAL_RANKS_MAX && flight->rank >= 0 && flight->rank < flight->size &&
           flight->world_rank >= -1 && flight->world_rank < SHOAL_RANKS_MAX;
}

/* Returns OK with *watch->now filled, or PENDING if the recorder is not this process's or not ready. */
static enum shoal_status read_flight(struct watch *watch, int fd, off_t from)
{
    struct shoal_flight head;
    if (!watch_read_all(fd, from, &head, offsetof(struct shoal_flight, texts)) ||
        atomic_load_explicit(&head.magic, memory_order_acquire) != SHOAL_FLIGHT_MAGIC)
        return SHOAL_PENDING;
    if (watch->inner_pid && head.pid != watch->inner_pid) /* a forked child has its parent's descriptors */
        return SHOAL_PENDING;
    if (head.layout != SHOAL_FLIGHT_LAYOUT || head.head_bytes != sizeof head ||
        head.record_bytes != sizeof(struct shoal_record) || head.records != SHOAL_RECORDS) {
        clean_text(head.version, sizeof head.version);
        return watch_fail(
            watch, SHOAL_ERR_UNSUPPORTED,
            "process %d runs Shoal %s, whose flight recorder has another layout than this version's: use the `shoal` of that "
            "version",
            head.version);
    }
    if (!read_records(watch, fd, from) || !is_rank_of_something(&watch->now->flight))
        return SHOAL_PENDING; /* the process has just ended, or was never a rank */
    clean_head(&watch->now->flight);
    adopt_records(watch);
    return SHOAL_OK;
}

/* ---- Current state ------------------------------------------------------------------------------------------------------- */

static double watch_us_since(const struct shoal_flight *flight, uint64_t ticks)
{
    const double ns = (double)(int64_t)(shoal_clock_ticks() - ticks) * flight->ns_per_tick;
    return ns > 0 ? ns / 1e3 : 0;
}

static bool watch_is_message(const struct shoal_record *record)
{
    return !strcmp(record->collective, "send") || !strcmp(record->collective, "receive") ||
           !strcmp(record->collective, "drain");
}

/* Counts the operations that have ended: those that had begun before the records were read, minus those among them that had not
 * ended then. So the count never falls from one look to the next. Records that began in between count in neither. */
static uint64_t count_ended(const struct watch *watch)
{
    const uint64_t next = atomic_load_explicit(&watch->before->flight.next, memory_order_relaxed);
    const uint64_t newer = watch->next_after - next;
    uint64_t open = 0;
    for (uint64_t i = 0; i < SHOAL_RECORDS; i++) {
        const struct shoal_record *record = &watch->now->records[(next + i) % SHOAL_RECORDS];
        open += i >= newer && record->posted && !record->done;
    }
    return next > open ? next - open : 0;
}

/* Reports the operation that has been under way longest, and how long ago the last one ended. */
static void tell_operations(const struct copy *copy, struct shoal_watched *watched)
{
    const struct shoal_record *oldest = NULL;
    uint64_t done = 0;
    for (size_t i = 0; i < SHOAL_RECORDS; i++) {
        const struct shoal_record *record = &copy->records[i];
        if (!record->collective)
            continue;
        if (!watched->is_span && !watch_is_message(record) && record->sequence > watched->called)
            watched->called = record->sequence;
        done = record->done > done ? record->done : done;
        if (record->done || record->status != SHOAL_PENDING)
            continue;
        watched->under_way++;
        if (!oldest || record->posted < oldest->posted)
            oldest = record;
    }
    watched->idle_us = done ? watch_us_since(&copy->flight, done) : -1;
    if (!oldest)
        return;
    watched->collective = oldest->collective;
    watched->algorithm = oldest->algorithm;
    watched->sequence = oldest->sequence;
    watched->count = oldest->count;
    watched->type = oldest->type < SHOAL_TYPE_END ? (enum shoal_type)oldest->type : SHOAL_FLOAT32;
    watched->op = oldest->op < SHOAL_OP_END ? (enum shoal_op)oldest->op : SHOAL_SUM;
    watched->root = oldest->root;
    watched->is_message = watch_is_message(oldest);
    watched->posted_us = watch_us_since(&copy->flight, oldest->posted);
    watched->arrived_us = oldest->arrived ? watch_us_since(&copy->flight, oldest->arrived) : -1;
    watched->trace_tag = oldest->trace_tag;
    if (watched->is_span && !oldest->arrived && oldest->peer >= 0 && oldest->peer < copy->flight.size) {
        watched->waits_for = oldest->peer;
        watched->waits_for_stage = oldest->step;
        watched->waits_us = watched->posted_us;
    }
}

static void watch_tell(const struct watch *watch, shoal_watch_fn fn, void *arg)
{
    const struct shoal_flight *flight = &watch->now->flight;
    struct shoal_watched watched = {
        .pid = watch->pid,
        .job = flight->job,
        .comm = flight->comm,
        .name = flight->comm_name,
        .host = flight->host,
        .version = flight->version,
        .rank = flight->rank,
        .size = flight->size,
        .world_rank = flight->world_rank,
        .status = (enum shoal_status)atomic_load_explicit(&flight->status, memory_order_relaxed),
        .operations = count_ended(watch),
        .bytes = atomic_load_explicit(&flight->bytes, memory_order_relaxed),
        .came_last = atomic_load_explicit(&flight->came_last, memory_order_relaxed),
        .late_us = (double)(int64_t)atomic_load_explicit(&flight->late, memory_order_relaxed) * flight->ns_per_tick / 1e3,
        .collective = "",
        .algorithm = "",
        .waits_for = -1,
        .waits_for_stage = -1,
        .is_span = flight->is_track != 0,
        .rejected = atomic_load_explicit(&flight->rejected, memory_order_relaxed),
        .waited_us = (double)atomic_load_explicit(&flight->waited, memory_order_relaxed) * flight->ns_per_tick / 1e3,
        .sent_bytes = atomic_load_explicit(&flight->sent, memory_order_relaxed),
        .batch = shoal_recorder_number(&flight->batch),
        .noise_scale = shoal_recorder_number(&flight->noise_scale),
        .noise_error = shoal_recorder_number(&flight->noise_error),
        .threads = atomic_load_explicit(&flight->threads, memory_order_relaxed),
        .network_threads = atomic_load_explicit(&flight->network_threads, memory_order_relaxed),
    };
    const int32_t said = atomic_load_explicit(&flight->waits_for, memory_order_relaxed);
    if (said >= 1 && said <= flight->size)
        watched.waits_for = said - 1;
    if (watched.waits_for >= 0)
        watched.waits_us = watch_us_since(flight, atomic_load_explicit(&flight->waits_since, memory_order_relaxed));
    tell_operations(watch->now, &watched);
    fn(arg, &watched);
}

static void print(const struct watch *watch, FILE *out)
{
    struct copy *copy = watch->now;
    const struct shoal_flight *flight = &copy->flight;
    const struct shoal_recorder recorder = {.flight = &copy->flight,
                                            .records = copy->records,
                                            .identity = {flight->comm, flight->size, flight->world_rank},
                                            .job = flight->job,
                                            .pid = watch->pid,
                                            .host = flight->host};
    shoal_recorder_print(&recorder, flight->comm_name, flight->rank, flight->ns_per_tick, out);
}

/* ---- Finding ------------------------------------------------------------------------------------------------------------- */

/* Returns the last number of "NSpid:", which is the process's number in its own PID namespace. */
static int read_inner_pid(int pid)
{
    char path[64], line[256];
    int inner = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        const char *last = strrchr(line, '\t');
        inner = last ? atoi(last + 1) : 0;
        break;
    }
    if (file)
        fclose(file);
    return inner;
}

/* Returns a descriptor of the next file of recorders, or -1. */
static int next_file(struct watch *watch)
{
    struct dirent *entry;
    while ((entry = readdir(watch->folder)) != NULL) {
        static const char wanted[] = "/memfd:" SHOAL_FLIGHT_NAME;
        char target[sizeof wanted + 16] = "";
        const ssize_t bytes = readlinkat(dirfd(watch->folder), entry->d_name, target, sizeof target - 1);
        if (bytes < (ssize_t)sizeof wanted - 1 || memcmp(target, wanted, sizeof wanted - 1) != 0)
            continue;
        const int fd = openat(dirfd(watch->folder), entry->d_name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd >= 0)
            return fd;
    }
    return -1;
}

static enum shoal_status open_watch(struct watch *watch)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", watch->pid);
    watch->folder = opendir(path);
    if (!watch->folder && (errno == ENOENT || errno == ESRCH))
        return watch_fail(watch, SHOAL_ERR_ARGUMENT, "there is no process %d on this host%s", "");
    if (!watch->folder)
        return watch_fail(
            watch, SHOAL_ERR_SYSTEM,
            "process %d cannot be read: %s (it belongs to another user, or its program has more rights than you: run this as "
            "that user, or as root)",
            strerror(errno));
    watch->inner_pid = read_inner_pid(watch->pid);
    watch->now = malloc(sizeof *watch->now);
    watch->before = malloc(sizeof *watch->before);
    return watch->now && watch->before ? SHOAL_OK
                                       : watch_fail(watch, SHOAL_ERR_MEMORY, "no memory to look at process %d%s", "");
}

/* Calls fn for each recorder in the file, or prints it if fn is NULL. */
static enum shoal_status look_into(struct watch *watch, int fd, shoal_watch_fn fn, void *arg, FILE *out)
{
    struct stat file;
    const off_t stride = (off_t)shoal_flight_stride(), slots = fstat(fd, &file) == 0 ? (file.st_size + stride - 1) / stride : 0;
    for (off_t slot = 0; slot < slots && slot < SLOTS_MAX; slot++) {
        const enum shoal_status status = read_flight(watch, fd, slot * stride);
        if (status == SHOAL_PENDING)
            continue;
        if (status != SHOAL_OK)
            return status;
        watch->has_some = true;
        if (fn)
            watch_tell(watch, fn, arg);
        else
            print(watch, out);
    }
    return SHOAL_OK;
}

static enum shoal_status watch_look(struct watch *watch, shoal_watch_fn fn, void *arg, FILE *out)
{
    enum shoal_status status = open_watch(watch);
    for (int fd; status == SHOAL_OK && (fd = next_file(watch)) >= 0;) {
        status = look_into(watch, fd, fn, arg, out);
        close(fd);
    }
    if (watch->folder)
        closedir(watch->folder);
    free(watch->now);
    free(watch->before);
    if (status == SHOAL_OK && !watch->has_some)
        return watch_fail(watch, SHOAL_PENDING, "process %d has no communicator of Shoal%s", "");
    return status;
}

enum shoal_status shoal_watch(int pid, shoal_watch_fn fn, void *arg, char *error, size_t error_bytes)
{
    struct watch watch = {.pid = pid, .error = error, .error_bytes = error ? error_bytes : 0};
    if (!fn)
        return watch_fail(&watch, SHOAL_ERR_ARGUMENT, "shoal_watch of process %d: fn is NULL%s", "");
    return watch_look(&watch, fn, arg, NULL);
}

enum shoal_status shoal_watch_print(int pid, FILE *out, char *error, size_t error_bytes)
{
    struct watch watch = {.pid = pid, .error = error, .error_bytes = error ? error_bytes : 0};
    if (!out)
        return watch_fail(&watch, SHOAL_ERR_ARGUMENT, "shoal_watch_print of process %d: out is NULL%s", "");
    return watch_look(&watch, NULL, NULL, out);
}
