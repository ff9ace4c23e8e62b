#include "comm/device_ports.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "comm/context.h"
#include "transport/shm/shm_link.h"

#define IDLE_WAIT_NS SHOAL_NS_PER_S

/* ---- Making and ending --------------------------------------------------------------------------------------------------- */

/* Memory that a forked child does not share copies of: the device writes to these pages. */
static enum shoal_status map_rings(struct shoal_context *context, struct shoal_devices_port *port)
{
    port->memory = mmap(NULL, port->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (port->memory != MAP_FAILED)
        return SHOAL_OK;
    return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm",
                          "no %zu bytes of host memory for operands on a device (%s); a smaller SHOAL_GPU_UNIT_BYTES or "
                          "SHOAL_CHUNK_BYTES needs less",
                          port->bytes, strerror(errno));
}

static size_t slot_bytes_of(const struct shoal_context *context)
{
    return shoal_round_up((size_t)context->settings.gpu.unit_bytes, SHOAL_PAGE);
}

static enum shoal_status fill_port(struct shoal_context *context, void *driver_context, struct shoal_devices_port *port)
{
    struct shoal_gpu_port_options options = {.context = driver_context,
                                             .slots = port->slots,
                                             .slot_bytes = slot_bytes_of(context),
                                             .counter_start = context->settings.engine.counter_start};
    port->bytes = shoal_gpu_port_bytes(options.slots, options.slot_bytes);
    SHOAL_TRY(map_rings(context, port));
    options.memory = port->memory;
    const enum shoal_status status = shoal_gpu_port_open(context->drivers.gpu, &options, &port->port);
    if (status != SHOAL_OK)
        munmap(port->memory, port->bytes);
    return status;
}

/* Makes one more spare port. */
static enum shoal_status make_port(struct shoal_context *context, void *driver_context, unsigned slots)
{
    struct shoal_drivers *drivers = &context->drivers;
    struct shoal_devices_port *port = calloc(1, sizeof *port);
    if (!port)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for the way to a device");
    port->slots = slots;
    const enum shoal_status status = fill_port(context, driver_context, port);
    if (status != SHOAL_OK) {
        free(port);
        return status;
    }
    shoal_log_line(&context->log, SHOAL_LOG_INFO, "comm",
                   "operands on a device pass through %zu bytes of registered host memory, of one communicator at a time",
                   port->bytes);
    port->next_made = drivers->made;
    drivers->made = port;
    port->next = drivers->spare;
    drivers->spare = port;
    return SHOAL_OK;
}

/* Memory that a device may still write to is never given back. */
static void end_port(struct shoal_drivers *drivers, struct shoal_devices_port *port)
{
    struct shoal_devices_port **link = &drivers->made;
    while (*link != port)
        link = &(*link)->next_made;
    *link = port->next_made;
    if (shoal_gpu_port_close(port->port))
        munmap(port->memory, port->bytes);
    free(port);
}

/* ---- Coming back --------------------------------------------------------------------------------------------------------- */

static void push_retired(struct shoal_drivers *drivers, struct shoal_devices_port *port)
{
    port->next = atomic_load_explicit(&drivers->retired, memory_order_relaxed);
    /* release: pairs with the acquire of sweep, so that what the port is made of is seen. */
    while (!atomic_compare_exchange_weak_explicit(&drivers->retired, &port->next, port, memory_order_release,
                                                  memory_order_relaxed))
        continue;
}

static size_t count_made(const struct shoal_drivers *drivers)
{
    size_t count = 0;
    for (const struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        count++;
    return count;
}

/* An idle one. To end it may take as long as to make one, so as many are kept as are made early. */
static void keep_or_end(struct shoal_context *context, struct shoal_devices_port *port)
{
    struct shoal_drivers *drivers = &context->drivers;
    if (count_made(drivers) > context->settings.gpu.early) {
        end_port(drivers, port);
        return;
    }
    port->next = drivers->spare;
    drivers->spare = port;
}

/* Looks at retired ports. True: none is left; those that are not idle are, unless this is the last time. */
static bool sweep(struct shoal_context *context, bool is_last)
{
    struct shoal_drivers *drivers = &context->drivers;
    bool is_clean = true;
    pthread_mutex_lock(&drivers->lock);
    struct shoal_devices_port *port = atomic_exchange_explicit(&drivers->retired, NULL, memory_order_acquire);
    while (port) {
        struct shoal_devices_port *next = port->next;
        if (shoal_gpu_port_is_idle(port->port)) {
            keep_or_end(context, port);
        } else if (is_last) {
            end_port(drivers, port);
        } else {
            push_retired(drivers, port);
            is_clean = false;
        }
        port = next;
    }
    pthread_mutex_unlock(&drivers->lock);
    return is_clean;
}

void shoal_drivers_init(struct shoal_drivers *drivers)
{
    pthread_mutex_init(&drivers->lock, NULL);
}

void shoal_drivers_fini(struct shoal_context *context)
{
    struct shoal_drivers *drivers = &context->drivers;
    const uint64_t deadline_ns = shoal_clock_ns() + IDLE_WAIT_NS;
    while (!sweep(context, shoal_clock_ns() > deadline_ns))
        shoal_shm_link_wait(-1, 0, 1);
    while (drivers->spare) {
        struct shoal_devices_port *port = drivers->spare;
        drivers->spare = port->next;
        end_port(drivers, port);
    }
    shoal_gpu_close(drivers->gpu);
    pthread_mutex_destroy(&drivers->lock);
}

void shoal_devices_init(struct shoal_devices *devices)
{
    devices->ask = shoal_gpu_look();
    pthread_mutex_init(&devices->posting, NULL);
}

/* Takes a port off its communicator's list. */
static void retire(struct shoal_context *context, struct shoal_devices_port **link)
{
    struct shoal_devices_port *port = *link;
    *link = port->next;
    push_retired(&context->drivers, port);
    if (!shoal_progress_is_inside(context->progress))
        (void)sweep(context, false);
}

void shoal_devices_fini(struct shoal_comm *comm)
{
    while (comm->devices.ports)
        retire(comm->context, &comm->devices.ports);
    pthread_mutex_destroy(&comm->devices.posting);
}

void shoal_devices_give_up_port(struct shoal_comm *comm, struct shoal_devices_port *port)
{
    struct shoal_devices_port **link = &comm->devices.ports;
    while (*link != port)
        link = &(*link)->next;
    retire(comm->context, link);
}

/* ---- Making early -------------------------------------------------------------------------------------------------------- */

static unsigned slots_for(const struct shoal_comm *comm)
{
    const size_t whole = shoal_engine_range_bytes(comm->engine, false), part = shoal_engine_range_bytes(comm->engine, true);
    return shoal_device_ring_slots(slot_bytes_of(comm->context), whole, comm->size, part);
}

/* The slots that the youngest communicators need, at most SHOAL_GPU_EARLY of them. */
static size_t list_needs(struct shoal_context *context, unsigned *needs)
{
    size_t count = 0;
    shoal_progress_lock(context->progress);
    for (const struct shoal_comm *comm = context->comms; comm && count < context->settings.gpu.early; comm = comm->next)
        if (comm->devices.ask)
            needs[count++] = slots_for(comm);
    shoal_progress_unlock(context->progress);
    return count;
}

/* Of the ports that are not counted yet the one that serves a need with the fewest slots; NULL: none does. */
static struct shoal_devices_port *find_uncounted(const struct shoal_drivers *drivers, const void *driver_context,
                                                 unsigned slots)
{
    struct shoal_devices_port *best = NULL;
    for (struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        if (!port->is_counted && port->slots >= slots && shoal_gpu_port_context(port->port) == driver_context &&
            (!best || port->slots < best->slots))
            best = port;
    return best;
}

static bool is_any_at_work(const struct shoal_drivers *drivers)
{
    const struct shoal_devices_port *port = drivers->made;
    while (port && !shoal_gpu_port_is_at_work(port->port))
        port = port->next_made;
    return port != NULL;
}

/* Until there is a port for each communicator. Under the drivers' lock. */
static void make_early(struct shoal_context *context, void *driver_context)
{
    struct shoal_drivers *drivers = &context->drivers;
    unsigned needs[SHOAL_GPU_EARLY_MAX];
    const size_t count = list_needs(context, needs);
    for (struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        port->is_counted = false;
    for (size_t i = 0; i < count; i++) {
        struct shoal_devices_port *port = find_uncounted(drivers, driver_context, needs[i]);
        if (!port && (is_any_at_work(drivers) || make_port(context, driver_context, needs[i]) != SHOAL_OK))
            return;
        (port ? port : drivers->made)->is_counted = true;
    }
}

static bool has_port(const struct shoal_drivers *drivers, const void *driver_context)
{
    const struct shoal_devices_port *port = drivers->made;
    while (port && shoal_gpu_port_context(port->port) != driver_context)
        port = port->next_made;
    return port != NULL;
}

void shoal_devices_make_ports(struct shoal_context *context)
{
    struct shoal_drivers *drivers = &context->drivers;
    pthread_mutex_lock(&drivers->lock);
    void *current = drivers->gpu ? shoal_gpu_current_context(drivers->gpu) : NULL;
    if (current && has_port(drivers, current))
        make_early(context, current);
    pthread_mutex_unlock(&drivers->lock);
}

/* ---- Finding ------------------------------------------------------------------------------------------------------------- */

/* The spare port that serves a need with the fewest slots, off their list; NULL: none does. */
static struct shoal_devices_port *take_spare(struct shoal_drivers *drivers, const void *driver_context, unsigned slots)
{
    struct shoal_devices_port **best = NULL;
    for (struct shoal_devices_port **link = &drivers->spare; *link; link = &(*link)->next)
        if ((*link)->slots >= slots && shoal_gpu_port_context((*link)->port) == driver_context &&
            (!best || (*link)->slots < (*best)->slots))
            best = link;
    struct shoal_devices_port *port = best ? *best : NULL;
    if (port)
        *best = port->next;
    return port;
}

/* One that works: a context may have failed, or ended, since a port was made in it. */
static struct shoal_devices_port *take_usable(struct shoal_context *context, const void *driver_context, unsigned slots)
{
    struct shoal_drivers *drivers = &context->drivers;
    struct shoal_devices_port *port = take_spare(drivers, driver_context, slots);
    while (port && !shoal_gpu_port_renew(port->port, context->settings.engine.counter_start)) {
        end_port(drivers, port);
        port = take_spare(drivers, driver_context, slots);
    }
    return port;
}

static enum shoal_status take_or_make(struct shoal_comm *comm, void *driver_context, struct shoal_devices_port **port_out)
{
    struct shoal_context *context = comm->context;
    const unsigned slots = slots_for(comm);
    struct shoal_devices_port *port = take_usable(context, driver_context, slots);
    if (!port) {
        SHOAL_TRY(make_port(context, driver_context, slots));
        port = take_spare(&context->drivers, driver_context, slots);
        make_early(context, driver_context);
    }
    port->next = comm->devices.ports;
    *port_out = comm->devices.ports = port;
    return SHOAL_OK;
}

enum shoal_status shoal_devices_find_port(struct shoal_comm *comm, void *driver_context, struct shoal_devices_port **port_out)
{
    struct shoal_devices_port *port = comm->devices.ports;
    while (port && shoal_gpu_port_context(port->port) != driver_context)
        port = port->next;
    *port_out = port;
    if (port)
        return SHOAL_OK;
    pthread_mutex_lock(&comm->context->drivers.lock);
    const enum shoal_status status = take_or_make(comm, driver_context, port_out);
    pthread_mutex_unlock(&comm->context->drivers.lock);
    return status;
}
