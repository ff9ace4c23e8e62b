#include "observe/recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"

#define RECORDS_BYTES (SHOAL_RECORDS * sizeof(struct shoal_record))
#define FLIGHT_BYTES (sizeof(struct shoal_flight) + RECORDS_BYTES)

/* Linux 6.3 and newer refuse a memfd without this flag if vm.memfd_noexec is 2; older kernels do not know it. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

/* ---- The file ------------------------------------------------------------------------------------------------------------ */

struct shoal_flights {
    pthread_mutex_t lock;
    int fd;        /* -1 if the system refused one */
    bool *is_used; /* [slots] */
    size_t slots;
};

size_t shoal_flight_stride(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (FLIGHT_BYTES + page - 1) / page * page;
}

struct shoal_flights *shoal_flights_create(void)
{
    struct shoal_flights *flights = calloc(1, sizeof *flights);
    if (!flights)
        return NULL;
    flights->fd = memfd_create(SHOAL_FLIGHT_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (flights->fd < 0)
        flights->fd = memfd_create(SHOAL_FLIGHT_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (flights->fd >= 0)
        fcntl(flights->fd, F_ADD_SEALS, F_SEAL_SHRINK);
    pthread_mutex_init(&flights->lock, NULL);
    return flights;
}

void shoal_flights_destroy(struct shoal_flights *flights)
{
    if (!flights)
        return;
    if (flights->fd >= 0)
        close(flights->fd);
    pthread_mutex_destroy(&flights->lock);
    free(flights->is_used);
    free(flights);
}

/* Needs the lock. Returns an unused slot, after growing the file if necessary, or -1. */
static long find_slot(struct shoal_flights *flights)
{
    size_t slot = 0;
    while (slot < flights->slots && flights->is_used[slot])
        slot++;
    if (slot < flights->slots)
        return (long)slot;
    bool *is_used = reallocarray(flights->is_used, slot + 1, sizeof *is_used);
    if (!is_used)
        return -1;
    flights->is_used = is_used;
    if (ftruncate(flights->fd, (off_t)((slot + 1) * shoal_flight_stride())) != 0)
        return -1;
    flights->is_used[slot] = false;
    flights->slots++;
    return (long)slot;
}

/* The kernel allocates pages only when they are touched, because a program may have many communicators that it hardly uses. */
static void *take_slot(struct shoal_flights *flights, long *slot_out)
{
    pthread_mutex_lock(&flights->lock);
    const long slot = flights->fd >= 0 ? find_slot(flights) : -1;
    void *memory = MAP_FAILED;
    if (slot >= 0)
        memory = mmap(NULL, FLIGHT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, flights->fd,
                      (off_t)slot * (off_t)shoal_flight_stride());
    if (memory != MAP_FAILED)
        flights->is_used[slot] = true;
    pthread_mutex_unlock(&flights->lock);
    *slot_out = slot;
    return memory;
}

/* Zeroes the slot's bytes, so that nobody reads a recorder there. */
static void give_slot_back(struct shoal_flights *flights, long slot)
{
    const off_t stride = (off_t)shoal_flight_stride();
    pthread_mutex_lock(&flights->lock);
    SHOAL_ASSERT((size_t)slot < flights->slots && flights->is_used[slot]);
    if (fallocate(flights->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)slot * stride, stride) == 0)
        flights->is_used[slot] = false;
    pthread_mutex_unlock(&flights->lock);
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

static void recorder_begin(struct shoal_recorder *recorder, void *memory)
{
    memset(recorder, 0, sizeof *recorder);
    recorder->flight = memory;
    recorder->records = (struct shoal_record *)(void *)(recorder->flight + 1);
    recorder->flight->layout = SHOAL_FLIGHT_LAYOUT;
    recorder->flight->head_bytes = sizeof *recorder->flight;
    recorder->flight->record_bytes = sizeof *recorder->records;
    recorder->flight->records = SHOAL_RECORDS;
    recorder->flight->pid = (int32_t)getpid();
}

enum shoal_status shoal_recorder_init(struct shoal_recorder *recorder)
{
    void *memory = mmap(NULL, FLIGHT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(recorder, 0, sizeof *recorder);
    if (memory == MAP_FAILED)
        return SHOAL_ERR_MEMORY;
    recorder_begin(recorder, memory);
    return SHOAL_OK;
}

enum shoal_status shoal_recorder_open(struct shoal_recorder *recorder, struct shoal_flights *flights)
{
    long slot = -1;
    void *memory = flights ? take_slot(flights, &slot) : MAP_FAILED;
    if (memory == MAP_FAILED)
        return shoal_recorder_init(recorder);
    recorder_begin(recorder, memory);
    recorder->flights = flights;
    recorder->slot = slot;
    return SHOAL_OK;
}

void shoal_recorder_fini(struct shoal_recorder *recorder)
{
    if (!recorder->flight)
        return;
    munmap(recorder->flight, FLIGHT_BYTES);
    if (recorder->flights)
        give_slot_back(recorder->flights, recorder->slot);
    recorder->flights = NULL;
    recorder->flight = NULL;
    recorder->records = NULL;
}

/* ---- Contents ------------------------------------------------------------------------------------------------------------ */

void shoal_recorder_name(struct shoal_recorder *recorder, const char *text)
{
    struct shoal_flight *flight = recorder->flight;
    for (uint32_t i = 0; i < flight->text_count; i++) {
        if (flight->texts[i].address == (uint64_t)(uintptr_t)text)
            return;
    }
    if (!text || flight->text_count == SHOAL_FLIGHT_TEXTS)
        return;
    struct shoal_flight_text *entry = &flight->texts[flight->text_count++];
    entry->address = (uint64_t)(uintptr_t)text;
    snprintf(entry->text, sizeof entry->text, "%s", text);
}

void shoal_recorder_identify(struct shoal_recorder *recorder, const struct shoal_recorder_identity *identity, uint64_t job,
                             const char *comm, int rank, double ns_per_tick)
{
    struct shoal_flight *flight = recorder->flight;
    recorder->identity = *identity;
    recorder->job = job;
    if (gethostname(flight->host, sizeof flight->host - 1) != 0)
        strcpy(flight->host, "?");
    snprintf(flight->version, sizeof flight->version, "%s", shoal_version());
    snprintf(flight->comm_name, sizeof flight->comm_name, "%s", comm);
    flight->comm = identity->comm;
    flight->job = job;
    flight->rank = rank;
    flight->size = identity->size;
    flight->world_rank = identity->world_rank;
    flight->ns_per_tick = ns_per_tick;
    /* release: pairs with the acquire in the reader, watch.c */
    atomic_store_explicit(&flight->magic, SHOAL_FLIGHT_MAGIC, memory_order_release);
}

void shoal_recorder_note_wait(struct shoal_recorder *recorder, int rank, uint64_t since)
{
    atomic_store_explicit(&recorder->flight->waits_since, since, memory_order_relaxed);
    atomic_store_explicit(&recorder->flight->waits_for, rank + 1, memory_order_relaxed);
}

void shoal_recorder_note_threads(struct shoal_recorder *recorder, int threads, int network_threads)
{
    if (atomic_load_explicit(&recorder->flight->threads, memory_order_relaxed) != threads)
        atomic_store_explicit(&recorder->flight->threads, threads, memory_order_relaxed);
    if (atomic_load_explicit(&recorder->flight->network_threads, memory_order_relaxed) != network_threads)
        atomic_store_explicit(&recorder->flight->network_threads, network_threads, memory_order_relaxed);
}

void shoal_recorder_note_rejected(struct shoal_recorder *recorder)
{
    atomic_store_explicit(&recorder->flight->rejected, shoal_rejections_total(recorder->rejections), memory_order_relaxed);
}

void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy)
{
    memcpy(copy->flight, recorder->flight, FLIGHT_BYTES);
    copy->identity = recorder->identity;
    copy->job = recorder->job;
    copy->rejections = recorder->rejections;
}
