#include "observe/recorder.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RECORDS_BYTES (SHOAL_RECORDS * sizeof(struct shoal_record))
#define FLIGHT_BYTES (sizeof(struct shoal_flight) + RECORDS_BYTES)

/* Linux 6.3 and newer refuse a memfd without it where vm.memfd_noexec is 2; older ones do not know it. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

static void begin(struct shoal_recorder *recorder, void *memory, int fd)
{
    memset(recorder, 0, sizeof *recorder);
    recorder->flight = memory;
    recorder->records = (struct shoal_record *)(void *)(recorder->flight + 1);
    recorder->fd = fd;
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
    begin(recorder, memory, -1);
    return SHOAL_OK;
}

/* Its pages are there before they are touched: no touch ends in SIGBUS. */
static void *map_file(int fd)
{
    if (ftruncate(fd, (off_t)FLIGHT_BYTES) != 0 || fallocate(fd, 0, 0, (off_t)FLIGHT_BYTES) != 0)
        return MAP_FAILED;
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    return mmap(NULL, FLIGHT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

enum shoal_status shoal_recorder_open(struct shoal_recorder *recorder)
{
    int fd = memfd_create(SHOAL_FLIGHT_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0)
        fd = memfd_create(SHOAL_FLIGHT_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *memory = fd >= 0 ? map_file(fd) : MAP_FAILED;
    if (memory == MAP_FAILED) {
        if (fd >= 0)
            close(fd);
        return shoal_recorder_init(recorder);
    }
    begin(recorder, memory, fd);
    return SHOAL_OK;
}

void shoal_recorder_fini(struct shoal_recorder *recorder)
{
    if (!recorder->flight)
        return;
    munmap(recorder->flight, FLIGHT_BYTES);
    if (recorder->fd >= 0)
        close(recorder->fd);
    recorder->flight = NULL;
    recorder->records = NULL;
}

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
    /* release: pairs with the acquire of the reader in watch.c */
    atomic_store_explicit(&flight->magic, SHOAL_FLIGHT_MAGIC, memory_order_release);
}

void shoal_recorder_note_wait(struct shoal_recorder *recorder, int rank, uint64_t since)
{
    atomic_store_explicit(&recorder->flight->waits_since, since, memory_order_relaxed);
    atomic_store_explicit(&recorder->flight->waits_for, rank + 1, memory_order_relaxed);
}

void shoal_recorder_copy(const struct shoal_recorder *recorder, struct shoal_recorder *copy)
{
    memcpy(copy->flight, recorder->flight, FLIGHT_BYTES);
    copy->identity = recorder->identity;
    copy->job = recorder->job;
    copy->rejections = recorder->rejections;
}
