/* One look at the processes of this host: which of them have communicators and belong to the wanted jobs. */
#include "top.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- /proc --------------------------------------------------------------------------------------------------------------- */

/* Reads "PID (name) STATE PARENT ..."; the name may contain any character. */
static void stat_read(struct top_process *process)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process->pid);
    FILE *file = fopen(path, "re");
    const size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[got] = 0;
    const char *end = strrchr(text, ')');
    process->state = '?';
    if (end && sscanf(end + 1, " %c %d", &process->state, &process->parent) != 2)
        process->parent = 0;
}

static void memory_read(struct top_process *process)
{
    char path[64];
    unsigned long long all = 0, resident = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", process->pid);
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%llu %llu", &all, &resident) == 2)
        process->memory_bytes = resident * (uint64_t)sysconf(_SC_PAGESIZE);
    if (file)
        fclose(file);
}

/* Reads the bytes in Shoal's memfds. */
static void shared_read(struct top_process *process)
{
    char path[64], target[32];
    struct stat status;
    struct dirent *entry;
    snprintf(path, sizeof path, "/proc/%d/fd", process->pid);
    DIR *folder = opendir(path);
    while (folder && (entry = readdir(folder)) != NULL) {
        const ssize_t bytes = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        target[bytes > 0 ? bytes : 0] = 0;
        if (!strncmp(target, "/memfd:shoal", 12) && fstatat(dirfd(folder), entry->d_name, &status, 0) == 0)
            process->shared_bytes += (uint64_t)status.st_blocks * 512;
    }
    if (folder)
        closedir(folder);
}

/* ---- Growing ------------------------------------------------------------------------------------------------------------- */

static int memory_fail(void)
{
    fputs("shoal top: no memory\n", stderr);
    return 1;
}

/* Makes room for one more than count. Returns false if out of memory. */
static bool grow(void **list, size_t count, size_t bytes)
{
    if (count & (count - 1)) /* the capacity is a power of two */
        return true;
    void *larger = reallocarray(*list, count ? count * 2 : 1, bytes);
    if (larger)
        *list = larger;
    return larger != NULL;
}

bool top_look_grow(struct top_look *look)
{
    return grow((void **)&look->processes, look->process_count, sizeof *look->processes) &&
           grow((void **)&look->comms, look->comm_count, sizeof *look->comms);
}

struct filling {
    struct top_look *look;
    bool has_memory;
};

static void text_copy(char *to, size_t bytes, const char *from)
{
    snprintf(to, bytes, "%s", from);
}

static void comm_add(void *arg, const struct shoal_watched *watched)
{
    struct filling *filling = arg;
    struct top_look *look = filling->look;
    struct top_process *process = &look->processes[look->process_count];
    filling->has_memory = filling->has_memory && grow((void **)&look->comms, look->comm_count, sizeof *look->comms);
    if (!filling->has_memory)
        return;
    struct top_comm *comm = &look->comms[look->comm_count++];
    *comm = (struct top_comm){.at = *watched, .process_at = look->process_count};
    text_copy(comm->name, sizeof comm->name, watched->name);
    text_copy(comm->kind, sizeof comm->kind, watched->collective);
    text_copy(comm->algorithm, sizeof comm->algorithm, watched->algorithm);
    text_copy(process->host, sizeof process->host, watched->host);
    if (watched->size > process->size) { /* a communicator that a rank made alone has a number that no other rank knows */
        process->job = watched->job;
        process->world_rank = watched->world_rank;
        process->size = watched->size;
    }
    process->count++;
}

static bool process_add(struct filling *filling, int pid)
{
    struct top_look *look = filling->look;
    char error[300];
    if (!grow((void **)&look->processes, look->process_count, sizeof *look->processes))
        return false;
    look->processes[look->process_count] = (struct top_process){.pid = pid, .first = look->comm_count};
    stat_read(&look->processes[look->process_count]);
    const enum shoal_status status = shoal_watch(pid, comm_add, filling, error, sizeof error);
    if (status == SHOAL_ERR_UNSUPPORTED)
        text_copy(look->note, sizeof look->note, error);
    look->process_count++; /* also those without a communicator: they may be parents of others */
    return filling->has_memory;
}

/* ---- Choosing ------------------------------------------------------------------------------------------------------------ */

static const struct top_process *process_find(const struct top_look *look, int pid)
{
    for (size_t i = 0; i < look->process_count; i++)
        if (look->processes[i].pid == pid)
            return &look->processes[i];
    return NULL;
}

static bool is_started_by(const struct top_look *look, const struct top_process *process, int pid)
{
    for (int steps = 0; process && steps < 64; steps++) {
        if (process->pid == pid)
            return true;
        process = process->parent ? process_find(look, process->parent) : NULL;
    }
    return false;
}

/* jobs: see struct top_target. */
static bool is_listed(const char *number, const char *jobs)
{
    for (size_t length; *jobs; jobs += length + (jobs[length] == ',')) {
        length = strcspn(jobs, ",");
        if (!strncmp(number, jobs, length))
            return true;
    }
    return false;
}

static bool is_target(const struct top_look *look, const struct top_process *process, const struct top_target *target)
{
    char number[17];
    if (!process->count)
        return false;
    if (target->pid)
        return is_started_by(look, process, target->pid);
    snprintf(number, sizeof number, "%016" PRIx64, process->job);
    return !target->jobs || is_listed(number, target->jobs);
}

/* Marks all processes of each job that has a target among its processes. Returns the number of newly marked ones. */
static size_t processes_want(struct top_look *look, const struct top_target *target)
{
    size_t wanted = 0;
    for (size_t i = 0; i < look->process_count; i++) {
        if (!is_target(look, &look->processes[i], target))
            continue;
        for (size_t k = 0; k < look->process_count; k++) {
            struct top_process *process = &look->processes[k];
            if (!process->count || process->is_wanted || process->job != look->processes[i].job)
                continue;
            process->is_wanted = true;
            wanted++;
        }
    }
    return wanted;
}

static int by_rank(const void *a, const void *b)
{
    const struct top_process *x = a, *y = b;
    if (x->job != y->job)
        return x->job < y->job ? -1 : 1;
    if (x->world_rank != y->world_rank)
        return x->world_rank < y->world_rank ? -1 : 1;
    return (x->pid > y->pid) - (x->pid < y->pid);
}

void top_look_sort(struct top_look *look)
{
    qsort(look->processes, look->process_count, sizeof *look->processes, by_rank);
    for (size_t i = 0; i < look->comm_count; i++)
        look->comms[i].process_at = SIZE_MAX;
    for (size_t i = 0; i < look->process_count; i++)
        for (size_t k = look->processes[i].first; k < look->processes[i].first + look->processes[i].count; k++)
            look->comms[k].process_at = i;
}

static void processes_keep(struct top_look *look)
{
    size_t kept = 0;
    for (size_t i = 0; i < look->process_count; i++)
        if (look->processes[i].is_wanted)
            look->processes[kept++] = look->processes[i];
    look->process_count = kept;
    for (size_t i = 0; i < kept; i++) {
        memory_read(&look->processes[i]);
        shared_read(&look->processes[i]);
    }
    top_look_sort(look);
}

/* ---- Taking -------------------------------------------------------------------------------------------------------------- */

/* Does nothing: shoal_watch() is called only for its error. */
static void comm_ignore(void *arg, const struct shoal_watched *watched)
{
    (void)arg;
    (void)watched;
}

static int nothing_fail(const struct top_look *look, const struct top_target *target)
{
    char error[400] = "";
    /* A note may be about any process of the host: the error of the wanted process comes first. */
    const enum shoal_status status =
        target->pid ? shoal_watch(target->pid, comm_ignore, NULL, error, sizeof error) : SHOAL_PENDING;
    if (look->note[0] && status == SHOAL_PENDING && !target->jobs) {
        fprintf(stderr, "shoal top: %s\n", look->note);
    } else if (target->pid) {
        fprintf(stderr, "shoal top: %s%s\n", error, status == SHOAL_PENDING ? ", nor has a process that it has started" : "");
    } else if (target->jobs) {
        fprintf(stderr, "shoal top: no process that may be looked at belongs to a job %s (shoal top lists the jobs)\n",
                target->jobs);
    } else {
        fputs("shoal top: no process that may be looked at has a communicator of Shoal\n", stderr);
    }
    return 1;
}

static bool processes_read(struct top_look *look)
{
    struct filling filling = {look, true};
    struct dirent *entry;
    DIR *folder = opendir("/proc");
    while (folder && filling.has_memory && (entry = readdir(folder)) != NULL) {
        if (isdigit((unsigned char)entry->d_name[0]))
            filling.has_memory = process_add(&filling, atoi(entry->d_name));
    }
    if (folder)
        closedir(folder);
    return filling.has_memory;
}

static bool known_read(struct top_look *look, const struct top_look *known)
{
    struct filling filling = {look, true};
    for (size_t i = 0; i < known->process_count && filling.has_memory; i++)
        filling.has_memory = process_add(&filling, known->processes[i].pid);
    return filling.has_memory;
}

static void look_begin(struct top_look *look)
{
    struct timespec now;
    memset(look, 0, sizeof *look);
    clock_gettime(CLOCK_MONOTONIC, &now);
    look->at_s = (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int top_look_take(const struct top_target *target, struct top_look *look_out)
{
    look_begin(look_out);
    if (target->known && known_read(look_out, target->known) && processes_want(look_out, target)) {
        processes_keep(look_out);
        return 0;
    }
    top_look_fini(look_out);
    look_begin(look_out);
    if (!processes_read(look_out))
        return memory_fail();
    if (!processes_want(look_out, target))
        return nothing_fail(look_out, target);
    processes_keep(look_out);
    return 0;
}

bool top_look_all(struct top_look *look_out)
{
    memset(look_out, 0, sizeof *look_out);
    const bool has_memory = processes_read(look_out);
    processes_want(look_out, &(struct top_target){0});
    processes_keep(look_out);
    return has_memory;
}

void top_look_fini(struct top_look *look)
{
    free(look->processes);
    free(look->comms);
    memset(look, 0, sizeof *look);
}

/* Returns a rate per second. A counter of another process may also fall. */
static double rate(uint64_t now, uint64_t before, double span_s)
{
    return now > before ? (double)(now - before) / span_s : 0;
}

void top_look_compare(struct top_look *look, const struct top_look *before)
{
    look->span_s = look->at_s - before->at_s;
    for (size_t i = 0; i < look->comm_count && look->span_s > 0; i++) {
        struct top_comm *comm = &look->comms[i];
        for (size_t k = 0; k < before->comm_count; k++) {
            const struct shoal_watched *old = &before->comms[k].at;
            if (old->pid != comm->at.pid || old->comm != comm->at.comm || old->rank != comm->at.rank)
                continue;
            comm->operations_per_s = rate(comm->at.operations, old->operations, look->span_s);
            comm->bytes_per_s = rate(comm->at.bytes, old->bytes, look->span_s);
            break;
        }
    }
}
