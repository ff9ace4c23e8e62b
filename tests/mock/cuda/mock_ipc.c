/* Device memory of another process. A handle names the process, its file, and the part of the file; this process fetches the
 * file's descriptor from that process. A ledger at the file's beginning lists exported memory, so that freed memory cannot be
 * opened, and so that freeing memory that others have open is a fault. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mock_driver.h"

#define MAGIC UINT64_C(0x69706320636f6d6b)
#define LEDGER_BYTES ((size_t)1 << 20)
#define IMPORTERS 16

struct ledger_slot {
    _Atomic uint64_t generation;      /* odd: exported */
    _Atomic int importers[IMPORTERS]; /* processes that have it open, once per opening; 0: none */
    char unused[128 - 8 - 4 * IMPORTERS];
};
_Static_assert(sizeof(struct ledger_slot) == 128, "it is shared by processes");
#define SLOTS (LEDGER_BYTES / sizeof(struct ledger_slot))

struct handle_form {
    uint64_t magic;
    int pid, fd, device, slot;
    uint64_t offset, bytes, generation;
};
_Static_assert(sizeof(struct handle_form) <= sizeof(struct shoal_cu_ipc_handle), "a handle has its place");

struct mock_import {
    struct handle_form form;
    struct ledger_slot *ledger;
    unsigned opened;
};

/* ---- Ledgers ------------------------------------------------------------------------------------------------------------- */

static struct ledger_slot *map_ledger(int fd)
{
    void *at = mmap(NULL, LEDGER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static struct ledger_slot *own_ledger(int device)
{
    struct mock_arena *arena = mock_arena_of(device);
    if (arena && !arena->ledger)
        arena->ledger = map_ledger(arena->fd);
    return arena ? arena->ledger : NULL;
}

void mock_ledger_unmap(void *ledger)
{
    if (ledger)
        munmap(ledger, LEDGER_BYTES);
}

static bool take_slot(struct mock_region *region)
{
    struct ledger_slot *ledger = own_ledger(region->device);
    for (int i = 0; ledger && i < (int)SLOTS && region->slot < 0; i++) {
        if (atomic_load(&ledger[i].generation) % 2)
            continue;
        atomic_fetch_add(&ledger[i].generation, 1);
        region->slot = i;
    }
    return region->slot >= 0;
}

/* A killed process has nothing open, even if its parent has not waited for it yet. */
static bool is_alive(int pid)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const ssize_t bytes = read(fd, text, sizeof text - 1);
    close(fd);
    const char *state = bytes > 0 ? strrchr(text, ')') : NULL;
    return state && state[1] == ' ' && state[2] != 'Z' && state[2] != 'X';
}

void mock_ledger_close(struct mock_region *region)
{
    if (region->slot < 0)
        return;
    struct ledger_slot *slot = &own_ledger(region->device)[region->slot];
    atomic_fetch_add(&slot->generation, 1);
    region->slot = -1;
    for (int i = 0; i < IMPORTERS; i++) {
        const int pid = atomic_exchange(&slot->importers[i], 0);
        if (pid && is_alive(pid))
            mock_fault("device memory was freed while process %d has it open", pid);
    }
}

static void note_importer(struct ledger_slot *slot, int from, int to)
{
    for (int i = 0; i < IMPORTERS; i++) {
        int is = from;
        if (atomic_compare_exchange_strong(&slot->importers[i], &is, to))
            return;
    }
}

/* ---- Exporting ----------------------------------------------------------------------------------------------------------- */

shoal_cu_result mock_ipc_export(struct shoal_cu_ipc_handle *handle, shoal_cu_address at)
{
    ENTER("cuIpcGetMemHandle", MOCK_CURRENT);
    struct mock_region *region = mock_region_find(at);
    if (!region || region->kind != MOCK_PLAIN_MEMORY || region->is_dying)
        return SHOAL_CU_INVALID_VALUE;
    if (region->slot < 0 && !take_slot(region))
        return SHOAL_CU_OUT_OF_MEMORY;
    const struct handle_form form = {
        .magic = MAGIC,
        .pid = getpid(),
        .fd = mock_arena_of(region->device)->fd,
        .device = region->device,
        .slot = region->slot,
        .offset = region->offset,
        .bytes = region->bytes,
        .generation = atomic_load(&own_ledger(region->device)[region->slot].generation),
    };
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &form, sizeof form);
    return SHOAL_CU_SUCCESS;
}

/* ---- Opening ------------------------------------------------------------------------------------------------------------- */

/* If the system does not let a process take another's descriptors, /proc may. */
static int fetch_file(const struct handle_form *form)
{
    char path[64];
    const int process = (int)syscall(SYS_pidfd_open, form->pid, 0);
    int fd = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, form->fd, 0);
    if (process >= 0)
        close(process);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", form->pid, form->fd);
    return fd >= 0 ? fd : open(path, O_RDWR | O_CLOEXEC);
}

static bool is_same(const struct handle_form *one, const struct handle_form *other)
{
    return memcmp(one, other, sizeof *one) == 0;
}

static shoal_cu_result check_form(const struct mock_context *context, const struct handle_form *form, unsigned flags)
{
    if (flags != SHOAL_CU_IPC_LAZY_PEER_ACCESS)
        return SHOAL_CU_INVALID_VALUE;
    if (form->magic != MAGIC || form->slot < 0 || form->slot >= (int)SLOTS)
        return SHOAL_CU_INVALID_HANDLE;
    if (form->pid == getpid())
        return SHOAL_CU_INVALID_CONTEXT;
    if (form->device >= mock.modes.devices)
        return SHOAL_CU_INVALID_DEVICE;
    return form->device != context->device && !mock.modes.peers ? SHOAL_CU_PEER_ACCESS_UNSUPPORTED : SHOAL_CU_SUCCESS;
}

static struct mock_region *map_import(const struct handle_form *form, int fd, struct ledger_slot *ledger)
{
    const size_t room = shoal_round_up(form->bytes, SHOAL_PAGE);
    if (atomic_load(&ledger[form->slot].generation) != form->generation)
        return NULL;
    void *alias = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)form->offset);
    const shoal_cu_address at = alias == MAP_FAILED ? 0 : mock_reserve(form->bytes);
    if (!at)
        return NULL;
    struct mock_region *region = mock_region_add(MOCK_IMPORTED_MEMORY, at, form->bytes, alias);
    region->room = room;
    region->device = form->device;
    region->import = mock_allocate_zeroed(sizeof *region->import);
    region->import->form = *form;
    region->import->ledger = ledger;
    note_importer(&ledger[form->slot], 0, getpid());
    return region;
}

static struct mock_region *make_import(const struct handle_form *form)
{
    const int fd = fetch_file(form);
    struct ledger_slot *ledger = fd < 0 ? NULL : map_ledger(fd);
    struct mock_region *region = ledger ? map_import(form, fd, ledger) : NULL;
    if (fd >= 0)
        close(fd);
    if (!region)
        mock_ledger_unmap(ledger);
    return region;
}

static struct mock_region *find_import(const struct handle_form *form)
{
    struct mock_region *region = NULL;
    while ((region = mock_region_next(region)))
        if (region->import && is_same(&region->import->form, form))
            return region;
    return NULL;
}

/* If the same context opens it again, it gets the same memory; no other context of the process may open it. */
shoal_cu_result mock_ipc_open(shoal_cu_address *address, struct shoal_cu_ipc_handle handle, unsigned flags)
{
    ENTER("cuIpcOpenMemHandle", MOCK_CURRENT | MOCK_UNSAFE);
    struct handle_form form;
    memcpy(&form, &handle, sizeof form);
    MOCK_TRY(check_form(call.context, &form, flags));
    struct mock_region *region = find_import(&form);
    if (region && region->context != call.context)
        return SHOAL_CU_INVALID_CONTEXT;
    if (!region)
        region = make_import(&form);
    if (!region)
        return SHOAL_CU_INVALID_VALUE;
    region->context = call.context;
    region->import->opened++;
    *address = region->at;
    return SHOAL_CU_SUCCESS;
}

/* ---- Closing ------------------------------------------------------------------------------------------------------------- */

void mock_import_forget(struct mock_region *region)
{
    struct mock_import *import = region->import;
    note_importer(&import->ledger[import->form.slot], getpid(), 0); /* a forked child has another process id */
    mock_ledger_unmap(import->ledger);
    munmap(region->alias, region->room);
    mock_unreserve(region->at, region->bytes);
    free(import);
    mock_region_drop(region);
}

shoal_cu_result mock_ipc_close(shoal_cu_address address)
{
    ENTER("cuIpcCloseMemHandle", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_region *region = mock_region_find(address);
    if (!region || !region->import || region->at != address || region->is_dying)
        return SHOAL_CU_INVALID_VALUE;
    if (--region->import->opened)
        return SHOAL_CU_SUCCESS;
    region->is_dying = true;
    mock_wait_idle(&call);
    mock_wait_unused(region);
    mock_import_forget(region);
    return call.context->sticky;
}
