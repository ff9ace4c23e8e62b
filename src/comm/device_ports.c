#include "comm/device_ports.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/clock.h"
#include "comm/context.h"
#include "transport/shm/shm_link.h"

#define IDLE_WAIT_NS SHOAL_NS_PER_S

/* ---- Making and ending --------------------------------------------------------------------------------------------------- */

static enum shoal_status fill_port(struct shoal_context *context, void *driver_context, struct shoal_devices_port *port)
{
    struct shoal_gpu_port_options options = {.context = driver_context,
                                             .slots = port->slots,
                                             .slot_bytes = shoal_gpu_unit_bytes(&context->settings.gpu),
                                             .counter_start = context->settings.engine.counter_start};
    SHOAL_TRY(shoal_operand_memory_share(&context->log, context->memory,
                                         shoal_gpu_port_bytes(options.slots, options.slot_bytes), &port->memory));
    options.memory = shoal_operand_memory_rings(&port->memory);
    const enum shoal_status status = shoal_gpu_port_open(context->drivers.gpu, &options, &port->port);
    if (status == SHOAL_OK)
        shoal_operand_memory_describe(&port->memory, port->port);
    else
        shoal_operand_memory_unmap(&port->memory);
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
                   port->memory.bytes);
    port->next_made = drivers->made;
    drivers->made = port;
    port->next = drivers->spare;
    drivers->spare = port;
    return SHOAL_OK;
}

/* Makes a port that a call can do without. A failure does not become the thread's last failure. */
static bool try_to_make(struct shoal_context *context, void *driver_context, unsigned slots)
{
    shoal_log_hush(true);
    const enum shoal_status status = make_port(context, driver_context, slots);
    shoal_log_hush(false);
    return status == SHOAL_OK;
}

static bool is_port_at_work(const struct shoal_devices_port *port)
{
    return port->peers ? shoal_gpu_peers_is_at_work(port->peers) : shoal_gpu_port_is_at_work(port->port);
}

static bool is_port_idle(const struct shoal_devices_port *port)
{
    return port->peers ? !shoal_gpu_peers_is_at_work(port->peers) : shoal_gpu_port_is_idle(port->port);
}

/* Memory that a device may still write to is never freed. */
static void end_port(struct shoal_drivers *drivers, struct shoal_devices_port *port)
{
    struct shoal_devices_port **link = &drivers->made;
    SHOAL_ASSERT(!port->port != !port->peers); /* a port is one of the two */
    while (*link && *link != port)
        link = &(*link)->next_made;
    SHOAL_ASSERT(*link == port);
    *link = port->next_made;
    if (port->peers ? shoal_gpu_peers_close(port->peers) : shoal_gpu_port_close(port->port))
        shoal_operand_memory_unmap(&port->memory);
    free(port);
}

static bool is_any_at_work(const struct shoal_drivers *drivers)
{
    const struct shoal_devices_port *port = drivers->made;
    while (port && !is_port_at_work(port))
        port = port->next_made;
    return port != NULL;
}

static size_t count_made(const struct shoal_drivers *drivers)
{
    size_t count = 0;
    for (const struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        count += port->port != NULL;
    return count;
}

/* Ends spare ports while there are more than `kept` ports. Ends none while a call is under way, because the driver may wait for
 * that call. */
static void end_spares(struct shoal_drivers *drivers, size_t kept)
{
    while (drivers->spare && count_made(drivers) > kept && !is_any_at_work(drivers)) {
        struct shoal_devices_port *port = drivers->spare;
        drivers->spare = port->next;
        end_port(drivers, port);
    }
}

/* ---- Retiring ------------------------------------------------------------------------------------------------------------ */

static void push_retired(struct shoal_drivers *drivers, struct shoal_devices_port *port)
{
    port->next = atomic_load_explicit(&drivers->retired, memory_order_relaxed);
    /* release: pairs with the acquire of sweep, which thereby sees the port's fields. */
    while (!atomic_compare_exchange_weak_explicit(&drivers->retired, &port->next, port, memory_order_release,
                                                  memory_order_relaxed))
        continue;
}

/* Returns true if another communicator may use the port. */
static bool can_be_spare(const struct shoal_devices_port *port)
{
    return port->port && !port->is_borrowed;
}

/* Returns true if a retired port can leave the list now. Ports that cannot be spare end when they leave, and the driver may
 * delay that while a call is under way. */
static bool can_leave(const struct shoal_drivers *drivers, const struct shoal_devices_port *port)
{
    return is_port_idle(port) && (can_be_spare(port) || !is_any_at_work(drivers));
}

/* Looks at retired ports; call with the drivers' lock held. Returns true if none is left. A port that is not idle stays, unless
 * this is the last call. Ending a port may take as long as making one, so it keeps as many spare ports as are made early. */
static bool sweep(struct shoal_context *context, bool is_last)
{
    struct shoal_drivers *drivers = &context->drivers;
    bool is_clean = true;
    struct shoal_devices_port *port = atomic_exchange_explicit(&drivers->retired, NULL, memory_order_acquire);
    while (port) {
        struct shoal_devices_port *next = port->next;
        SHOAL_ASSERT(!port->port != !port->peers);
        const bool is_free = can_leave(drivers, port);
        if (is_free && can_be_spare(port)) {
            port->next = drivers->spare;
            drivers->spare = port;
        } else if (is_free || is_last) {
            end_port(drivers, port);
        } else {
            push_retired(drivers, port);
            is_clean = false;
        }
        port = next;
    }
    end_spares(drivers, context->settings.gpu.early);
    return is_clean;
}

static bool sweep_locked(struct shoal_context *context, bool is_last)
{
    pthread_mutex_lock(&context->drivers.lock);
    const bool is_clean = sweep(context, is_last);
    pthread_mutex_unlock(&context->drivers.lock);
    return is_clean;
}

void shoal_drivers_init(struct shoal_drivers *drivers)
{
    pthread_mutex_init(&drivers->lock, NULL);
}

enum shoal_status shoal_drivers_open(struct shoal_context *context)
{
    struct shoal_drivers *drivers = &context->drivers;
    pthread_mutex_lock(&drivers->lock);
    const enum shoal_status status = drivers->gpu ? SHOAL_OK : shoal_gpu_open(&context->log, &drivers->gpu);
    pthread_mutex_unlock(&drivers->lock);
    return status;
}

void shoal_drivers_fini(struct shoal_context *context)
{
    struct shoal_drivers *drivers = &context->drivers;
    const uint64_t deadline_ns = shoal_clock_ns() + IDLE_WAIT_NS;
    while (!sweep_locked(context, shoal_clock_ns() > deadline_ns))
        shoal_shm_link_wait(-1, 0, 1);
    while (drivers->spare) {
        struct shoal_devices_port *port = drivers->spare;
        drivers->spare = port->next;
        end_port(drivers, port);
    }
    SHOAL_ASSERT(!drivers->made && !context->comms); /* all communicators are freed, and so are their ports */
    shoal_gpu_close(drivers->gpu);
    pthread_mutex_destroy(&drivers->lock);
}

void shoal_devices_init(struct shoal_devices *devices)
{
    devices->ask = shoal_gpu_look();
    pthread_mutex_init(&devices->posting, NULL);
}

void shoal_devices_retire(struct shoal_context *context, struct shoal_devices_port *port)
{
    push_retired(&context->drivers, port);
    SHOAL_ASSERT(port);
    if (!shoal_progress_is_inside(context->progress))
        (void)sweep_locked(context, false);
}

/* Removes a port from its communicator's list and retires it. */
static void retire_from(struct shoal_context *context, struct shoal_devices_port **link, bool is_borrowed)
{
    struct shoal_devices_port *port = *link;
    *link = port->next;
    port->is_borrowed |= is_borrowed;
    shoal_devices_retire(context, port);
}

void shoal_devices_fini(struct shoal_comm *comm)
{
    while (comm->devices.ports)
        retire_from(comm->context, &comm->devices.ports, comm->devices.is_borrowed);
    if (comm->devices.peers)
        shoal_devices_retire(comm->context, comm->devices.peers);
    pthread_mutex_destroy(&comm->devices.posting);
}

/* ---- Making early -------------------------------------------------------------------------------------------------------- */

static unsigned slots_for(const struct shoal_comm *comm)
{
    const size_t whole = shoal_engine_range_bytes(comm->engine, false), part = shoal_engine_range_bytes(comm->engine, true);
    return shoal_device_ring_slots(shoal_gpu_unit_bytes(&comm->context->settings.gpu), whole, comm->size, part);
}

/* Lists the slots that the youngest communicators need, for at most SHOAL_GPU_EARLY of them. */
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

/* Returns the port with the fewest slots that meets a need and is not counted yet, or NULL. */
static struct shoal_devices_port *find_uncounted(const struct shoal_drivers *drivers, const void *driver_context,
                                                 unsigned slots)
{
    struct shoal_devices_port *best = NULL;
    for (struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        if (port->port && !port->is_counted && port->slots >= slots && shoal_gpu_port_context(port->port) == driver_context &&
            (!best || port->slots < best->slots))
            best = port;
    return best;
}

/* Makes ports until each communicator has one. Call with the drivers' lock held. */
static void make_early(struct shoal_context *context, void *driver_context)
{
    struct shoal_drivers *drivers = &context->drivers;
    unsigned needs[SHOAL_GPU_EARLY_MAX];
    const size_t count = list_needs(context, needs);
    for (struct shoal_devices_port *port = drivers->made; port; port = port->next_made)
        port->is_counted = false;
    for (size_t i = 0; i < count; i++) {
        struct shoal_devices_port *port = find_uncounted(drivers, driver_context, needs[i]);
        if (!port && (is_any_at_work(drivers) || !try_to_make(context, driver_context, needs[i])))
            return;
        port = port ? port : drivers->made; /* the youngest */
        SHOAL_ASSERT(port->slots >= needs[i] && !port->is_counted);
        port->is_counted = true;
    }
}

static bool has_port(const struct shoal_drivers *drivers, const void *driver_context)
{
    const struct shoal_devices_port *port = drivers->made;
    while (port && (!port->port || shoal_gpu_port_context(port->port) != driver_context))
        port = port->next_made;
    return port != NULL;
}

void shoal_devices_make_ports(struct shoal_context *context)
{
    struct shoal_drivers *drivers = &context->drivers;
    pthread_mutex_lock(&drivers->lock);
    void *current = drivers->gpu ? shoal_gpu_current_context(drivers->gpu) : NULL;
    (void)sweep(context, false);
    if (current && has_port(drivers, current))
        make_early(context, current);
    pthread_mutex_unlock(&drivers->lock);
}

/* ---- Finding ------------------------------------------------------------------------------------------------------------- */

/* Removes the spare port with the fewest slots that meets a need from the list and returns it, or NULL if there is none. */
static struct shoal_devices_port *take_spare(struct shoal_drivers *drivers, const void *driver_context, unsigned slots)
{
    struct shoal_devices_port **best = NULL;
    for (struct shoal_devices_port **link = &drivers->spare; *link; link = &(*link)->next)
        if ((*link)->slots >= slots && shoal_gpu_port_context((*link)->port) == driver_context &&
            (!best || (*link)->slots < (*best)->slots))
            best = link;
    struct shoal_devices_port *port = best ? *best : NULL;
    SHOAL_ASSERT(!port || port->port); /* ports of sums among GPUs are never spare */
    if (port)
        *best = port->next;
    return port;
}

/* Returns a spare port that works: the context in which a port was made may have failed or ended since then. */
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

/* Unusable spare ports may still hold the resource that a new one needs: free them and retry. */
static enum shoal_status make_needed(struct shoal_context *context, void *driver_context, unsigned slots)
{
    if (context->drivers.spare && try_to_make(context, driver_context, slots))
        return SHOAL_OK;
    end_spares(&context->drivers, 0);
    return make_port(context, driver_context, slots);
}

static enum shoal_status take_or_make(struct shoal_comm *comm, void *driver_context, struct shoal_devices_port **port_out)
{
    struct shoal_context *context = comm->context;
    const unsigned slots = slots_for(comm);
    (void)sweep(context, false);
    struct shoal_devices_port *port = take_usable(context, driver_context, slots);
    if (!port) {
        SHOAL_TRY(make_needed(context, driver_context, slots));
        port = take_spare(&context->drivers, driver_context, slots);
        SHOAL_ASSERT(port); /* it has just been made */
        make_early(context, driver_context);
    }
    port->next = comm->devices.ports;
    *port_out = comm->devices.ports = port;
    return SHOAL_OK;
}

struct shoal_devices_port *shoal_devices_port_of(const struct shoal_comm *comm, const void *driver_context)
{
    struct shoal_devices_port *port = comm->devices.ports;
    while (port && shoal_gpu_port_context(port->port) != driver_context)
        port = port->next;
    return port;
}

enum shoal_status shoal_devices_find_port(struct shoal_comm *comm, void *driver_context, struct shoal_devices_port **port_out)
{
    SHOAL_ASSERT(comm->context->drivers.gpu && driver_context);
    *port_out = shoal_devices_port_of(comm, driver_context);
    if (*port_out)
        return SHOAL_OK;
    pthread_mutex_lock(&comm->context->drivers.lock);
    const enum shoal_status status = take_or_make(comm, driver_context, port_out);
    pthread_mutex_unlock(&comm->context->drivers.lock);
    return status;
}

/* ---- Sums among GPUs ----------------------------------------------------------------------------------------------------- */

static enum shoal_status fill_peers(struct shoal_context *context, void *driver_context,
                                    const struct shoal_device_stage_options *stage, struct shoal_devices_port *port)
{
    struct shoal_gpu_peers_options options = {.context = driver_context, .stage = *stage};
    SHOAL_TRY(shoal_operand_memory_map(&context->log, context->memory, shoal_device_stage_bytes(stage), &port->memory));
    options.memory = port->memory.at;
    const enum shoal_status status = shoal_gpu_peers_open(context->drivers.gpu, &options, &port->peers);
    if (status != SHOAL_OK)
        shoal_operand_memory_unmap(&port->memory);
    return status;
}

/* Call with the drivers' lock held. */
static enum shoal_status make_peers(struct shoal_context *context, const struct shoal_device_stage_options *stage,
                                    struct shoal_devices_port **port_out)
{
    struct shoal_drivers *drivers = &context->drivers;
    void *current = shoal_gpu_current_context(drivers->gpu);
    (void)sweep(context, false);
    if (!current)
        return shoal_log_fail(&context->log, SHOAL_ERR_STATE, "comm",
                              "no context of the driver is current in the thread that makes the communicator");
    if (is_any_at_work(drivers))
        return shoal_log_fail(&context->log, SHOAL_ERR_STATE, "comm",
                              "a call on a GPU is under way while the communicator is made: the driver may wait for its end");
    struct shoal_devices_port *port = calloc(1, sizeof *port);
    if (!port)
        return shoal_log_fail(&context->log, SHOAL_ERR_MEMORY, "comm", "no memory for sums among GPUs");
    const enum shoal_status status = fill_peers(context, current, stage, port);
    if (status != SHOAL_OK) {
        free(port);
        return status;
    }
    port->next_made = drivers->made;
    *port_out = drivers->made = port;
    return SHOAL_OK;
}

/* A request completes before the streams have noted its end, and frameworks wait on streams alone. */
static void await_idle(struct shoal_drivers *drivers, uint32_t timeout_ms)
{
    const uint64_t timeout_ns = timeout_ms * SHOAL_NS_PER_MS;
    const uint64_t deadline_ns = shoal_clock_ns() + (timeout_ns < IDLE_WAIT_NS ? timeout_ns : IDLE_WAIT_NS);
    for (bool is_at_work = true; is_at_work && shoal_clock_ns() < deadline_ns;) {
        pthread_mutex_lock(&drivers->lock);
        is_at_work = is_any_at_work(drivers);
        pthread_mutex_unlock(&drivers->lock);
        if (is_at_work)
            shoal_shm_link_wait(-1, 0, 1);
    }
}

enum shoal_status shoal_devices_make_peers(struct shoal_context *context, const struct shoal_device_stage_options *stage,
                                           uint32_t timeout_ms, struct shoal_devices_port **port_out)
{
    await_idle(&context->drivers, timeout_ms);
    pthread_mutex_lock(&context->drivers.lock);
    const enum shoal_status status = make_peers(context, stage, port_out);
    pthread_mutex_unlock(&context->drivers.lock);
    return status;
}
