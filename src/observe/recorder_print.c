/* The recorder's lines, and the files they go to. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json_text.h"
#include "observe/recorder.h"

/* ---- Host and time ------------------------------------------------------------------------------------------------------- */

/* Common to all lines of one printing. Ticks compare between all processes of one boot of a machine, and only there. */
struct stamp {
    char host[64];
    char clock[64]; /* identifies the boot */
    double ns_per_tick;
    uint64_t origin; /* of the times for people: when the oldest record was posted */
    uint64_t now_ticks;
    uint64_t now_unix_us;
};

static void read_boot(struct stamp *stamp)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!file || !fgets(stamp->clock, sizeof stamp->clock, file))
        strcpy(stamp->clock, stamp->host); /* a different clock per host: such lines are aligned by events */
    stamp->clock[strcspn(stamp->clock, "\n")] = 0;
    if (file)
        fclose(file);
}

static void read_stamp(struct stamp *stamp, double ns_per_tick)
{
    struct timespec now;
    memset(stamp, 0, sizeof *stamp);
    if (gethostname(stamp->host, sizeof stamp->host - 1) != 0)
        strcpy(stamp->host, "?");
    read_boot(stamp);
    clock_gettime(CLOCK_REALTIME, &now);
    stamp->now_ticks = shoal_clock_ticks();
    stamp->now_unix_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    stamp->ns_per_tick = ns_per_tick;
}

static double us_between(const struct stamp *stamp, uint64_t from, uint64_t to)
{
    return (double)(int64_t)(to - from) * stamp->ns_per_tick / 1e3;
}

/* ---- Parts of a line ----------------------------------------------------------------------------------------------------- */

static void print_text(FILE *out, const char *name, const char *text)
{
    fprintf(out, "\"%s\":", name);
    shoal_json_print_text(out, text);
}

static const char *recorder_print_type_name(uint8_t type)
{
    switch (type) {
#define TYPE_NAME(name, number, bytes) \
    case SHOAL_##name:                 \
        return #name;
        SHOAL_TYPE_LIST(TYPE_NAME)
#undef TYPE_NAME
    default:
        return "?";
    }
}

static const char *recorder_print_op_name(uint8_t op)
{
    switch (op) {
#define OP_NAME(name, number) \
    case SHOAL_##name:        \
        return #name;
        SHOAL_OP_LIST(OP_NAME)
#undef OP_NAME
    default:
        return "?";
    }
}

/* Avoids printf's %f, because the program's locale may have a decimal comma. digits after the point: 3 or 12. */
static void print_decimal(FILE *out, const char *name, double value, int digits)
{
    const uint64_t scale = digits == 3 ? UINT64_C(1000) : UINT64_C(1000000000000);
    const double size = value < 0 ? -value : value, most = 1.8e19 / (double)scale; /* another process's may be anything */
    const uint64_t number = (uint64_t)((size < most ? size : most) * (double)scale + 0.5);
    fprintf(out, ",\"%s\":%s%llu.%0*llu", name, value < 0 && number ? "-" : "", (unsigned long long)(number / scale), digits,
            (unsigned long long)(number % scale));
}

/* For people, in microseconds since the oldest record was posted. */
static void print_us(FILE *out, const struct stamp *stamp, const char *name, uint64_t ticks)
{
    if (ticks)
        print_decimal(out, name, us_between(stamp, stamp->origin, ticks), 3);
    else
        fprintf(out, ",\"%s\":null", name);
}

static void print_ticks(FILE *out, const char *name, uint64_t ticks)
{
    if (ticks)
        fprintf(out, ",\"%s\":%llu", name, (unsigned long long)ticks);
    else
        fprintf(out, ",\"%s\":null", name);
}

/* ---- Lines --------------------------------------------------------------------------------------------------------------- */

static void print_who(const struct shoal_recorder *recorder, const struct stamp *stamp, const char *comm, int rank, FILE *out)
{
    const struct shoal_recorder_identity *identity = &recorder->identity;
    fputc('{', out);
    print_text(out, "comm", comm);
    fprintf(out, ",\"comm_id\":\"%016llx\",\"rank\":%d,\"size\":%d,\"world_rank\":%d,", (unsigned long long)identity->comm,
            rank, identity->size, identity->world_rank);
    print_text(out, "host", recorder->host ? recorder->host : stamp->host);
    fprintf(out, ",\"pid\":%d", recorder->pid ? recorder->pid : (int)getpid());
}

static void print_what(const struct shoal_record *r, FILE *out)
{
    fprintf(out, ",\"sequence\":%llu,", (unsigned long long)r->sequence);
    print_text(out, "kind", r->collective); /* a span has the caller's words */
    fprintf(out,
            ",\"algorithm\":\"%s\",\"count\":%llu,\"type\":\"%s\",\"op\":\"%s\",\"root\":%d,\"tag\":%u,\"status\":\"%s\"",
            r->algorithm, (unsigned long long)r->count, recorder_print_type_name(r->type), recorder_print_op_name(r->op),
            r->root, r->trace_tag, shoal_status_name((enum shoal_status)r->status));
}

static void print_when(const struct shoal_record *r, const struct stamp *stamp, FILE *out)
{
    print_us(out, stamp, "posted_us", r->posted);
    print_us(out, stamp, "arrived_us", r->arrived);
    print_us(out, stamp, "done_us", r->done);
    fprintf(out, ",\"last_rank\":%d", r->last_rank);
    print_decimal(out, "late_us", (double)r->late * stamp->ns_per_tick / 1e3, 3);
    fprintf(out, ",\"step\":%d,\"peer\":%d,", r->step, r->peer);
    print_text(out, "clock", stamp->clock);
    print_decimal(out, "ns_per_tick", stamp->ns_per_tick, 12);
    print_ticks(out, "posted_ticks", r->posted);
    print_ticks(out, "arrived_ticks", r->arrived);
    print_ticks(out, "done_ticks", r->done);
    const double age_us = us_between(stamp, r->posted, stamp->now_ticks);
    const bool is_age = age_us > 0 && age_us < (double)stamp->now_unix_us;
    fprintf(out, ",\"unix_us\":%llu", (unsigned long long)(stamp->now_unix_us - (is_age ? (uint64_t)age_us : 0)));
}

static void print_rejections(const struct shoal_rejections *rejections, FILE *out)
{
    for (int i = 0; i < SHOAL_REJECTIONS; i++)
        fprintf(out, ",\"%s\":%llu", shoal_rejection_name((enum shoal_rejection)i), (unsigned long long)rejections->counts[i]);
}

void shoal_recorder_print(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick, FILE *out)
{
    const uint64_t next = atomic_load_explicit(&recorder->flight->next, memory_order_relaxed);
    const uint64_t first = next > SHOAL_RECORDS ? next - SHOAL_RECORDS : 0;
    struct stamp stamp;
    read_stamp(&stamp, ns_per_tick);
    stamp.origin = recorder->records[first % SHOAL_RECORDS].posted; /* 0 if that record is left out: any origin will do */
    for (uint64_t i = first; i < next; i++) {
        const struct shoal_record *record = &recorder->records[i % SHOAL_RECORDS];
        if (!record->collective) /* another process's record, changing at that moment */
            continue;
        print_who(recorder, &stamp, comm, rank, out);
        fprintf(out, ",\"record\":%llu", (unsigned long long)i);
        print_what(record, out);
        print_when(record, &stamp, out);
        if (i + 1 == next && recorder->rejections && shoal_rejections_total(recorder->rejections))
            print_rejections(recorder->rejections, out);
        fputs("}\n", out);
    }
}

/* ---- Files --------------------------------------------------------------------------------------------------------------- */

/* Returns false with errno set on failure. */
static bool recorder_print_append(const char *name, mode_t mode, const char *text, size_t bytes)
{
    const int fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, mode);
    size_t done = 0;
    while (fd >= 0 && done < bytes) {
        const ssize_t wrote = write(fd, text + done, bytes - done);
        if (wrote < 0 && errno != EINTR)
            break;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    const int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
    return fd >= 0 && done == bytes;
}

bool shoal_recorder_append(const struct shoal_recorder *recorder, const char *comm, int rank, double ns_per_tick,
                           const struct shoal_recorder_file *file, char name_out[SHOAL_RECORDER_NAME_MAX])
{
    char *text = NULL, name[SHOAL_RECORDER_NAME_MAX];
    size_t bytes = 0;
    if (!file->pattern[0])
        return false;
    FILE *memory = open_memstream(&text, &bytes);
    if (memory)
        shoal_recorder_print(recorder, comm, rank, ns_per_tick, memory);
    for (const struct shoal_recorder *track = recorder->track; track && memory; track = track->track) {
        pthread_mutex_lock(track->guard);
        shoal_recorder_print(track, track->flight->comm_name, rank, ns_per_tick, memory);
        pthread_mutex_unlock(track->guard);
    }
    const bool is_printed = memory && fclose(memory) == 0;
    shoal_log_expand(file->log, file->pattern, name, sizeof name);
    const bool is_written = is_printed && recorder_print_append(name, file->is_private ? 0600 : 0666, text, bytes);
    if (!is_written)
        shoal_log_line(file->log, SHOAL_LOG_WARN, "observe", "cannot write %s \"%s\": %m", file->setting, name);
    free(text);
    if (name_out)
        strcpy(name_out, name);
    return is_written;
}
