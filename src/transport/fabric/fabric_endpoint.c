#include "transport/fabric/fabric_endpoint.h"

#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"

#define RECEIVES SHOAL_FABRIC_RECEIVE_BUFFERS
#define SENDS SHOAL_FABRIC_SEND_BUFFERS
#define WRITES 256
#define LANE_RECEIVES 4 /* an endpoint for writes gets messages of strangers only; some adapters use a receive for a write */
_Static_assert(WRITES <= SHOAL_FABRIC_BOUNCED_MAX, "each write may need a bounce buffer");
/* More completions than this process posts. Peers may write even more before it polls: 1,024 ranks in two all-to-alls of depth
 * 4 write 8,000 times. The provider handles that (FI_RM_ENABLED): providers that count in software keep the rest in a list;
 * others let the writes wait in the network. */
#define COMPLETIONS 4096
#define POLL_ENTRIES 16

enum job_kind { RECEIVE, SEND, WRITE };

/* An operation of libfabric, which returns the context at completion. */
struct job {
    struct fi_context2 context; /* must be first: a context is cast to its job */
    enum job_kind kind;
    bool is_posted;  /* for a receive; it is posted again later if posting failed */
    bool is_bounced; /* for a write: its source is in bounce buffer number `bounced` */
    uint64_t bounced;
    unsigned *under_way; /* for a write: counts it until it ends */
    size_t bytes;        /* of a write */
    char *buffer;
    void *owner;
    struct job *next_free;
};

struct shoal_fabric_endpoint {
    const struct shoal_fabric_library *library;
    struct shoal_log *log;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *peers;
    struct fid_cq *completions;
    struct fid_ep *ep;
    int wait_fd;
    bool emulates_writes;
    bool reads_devices;
    struct shoal_fabric_address address;
    char *buffers; /* for receives, then for sends */
    struct shoal_fabric_memory buffer_memory;
    struct shoal_fabric_bounce bounce; /* empty if sources need not be registered */
    struct shoal_fabric_memory bounce_memory;
    struct job jobs[RECEIVES + SENDS + WRITES];
    struct job *free_sends, *free_writes;
    int receives, sends;      /* how many of each kind of job have a buffer */
    uint64_t bytes_under_way; /* of writes */
    uint64_t own_faults;      /* faults of the completion queue or of posting receives */
    int unposted;             /* receives that are not posted */
};

static enum shoal_status endpoint_fail(struct shoal_fabric_endpoint *endpoint, const char *what, long error)
{
    return shoal_log_fail(endpoint->log, SHOAL_ERR_SYSTEM, "fabric", "provider %s: %s failed: %s",
                          endpoint->info->fabric_attr->prov_name, what, endpoint->library->error_text((int)-error));
}

/* ---- Jobs ---------------------------------------------------------------------------------------------------------------- */

static void give_back(struct job **free_list, struct job *job)
{
    job->next_free = *free_list;
    *free_list = job;
}

static struct job *endpoint_take(struct job **free_list)
{
    struct job *job = *free_list;
    if (job)
        *free_list = job->next_free;
    return job;
}

bool shoal_fabric_endpoint_registers_sources(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->info->domain_attr->mr_mode & FI_MR_LOCAL;
}

static enum shoal_status register_for(struct shoal_fabric_endpoint *endpoint, uint64_t access, void *memory, size_t bytes,
                                      struct shoal_fabric_memory *memory_out);

/* Registers for this process only: no other process may write there. */
static enum shoal_status register_buffers(struct shoal_fabric_endpoint *endpoint, size_t bytes)
{
    SHOAL_TRY(register_for(endpoint, FI_SEND | FI_RECV, endpoint->buffers, bytes, &endpoint->buffer_memory));
    if (!shoal_fabric_bounce_init(&endpoint->bounce, SHOAL_FABRIC_BOUNCE_BYTES))
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "fabric", "no memory for %zu bytes of buffers",
                              SHOAL_FABRIC_BOUNCE_BYTES);
    return register_for(endpoint, FI_SEND | FI_WRITE, endpoint->bounce.memory, endpoint->bounce.bytes,
                        &endpoint->bounce_memory);
}

static enum shoal_status make_jobs(struct shoal_fabric_endpoint *endpoint)
{
    const int buffers = endpoint->receives + endpoint->sends;
    const size_t bytes = shoal_round_up((size_t)buffers * SHOAL_FABRIC_MESSAGE_MAX, 4096);
    endpoint->buffers = aligned_alloc(4096, bytes);
    if (!endpoint->buffers)
        return shoal_log_fail(endpoint->log, SHOAL_ERR_MEMORY, "fabric", "no memory for %zu bytes of buffers", bytes);
    memset(endpoint->buffers, 0, bytes);
    for (int i = 0; i < buffers + WRITES; i++) {
        struct job *job = &endpoint->jobs[i];
        job->kind = i < endpoint->receives ? RECEIVE : i < buffers ? SEND : WRITE;
        job->buffer = job->kind == WRITE ? NULL : endpoint->buffers + (size_t)i * SHOAL_FABRIC_MESSAGE_MAX;
        if (job->kind != RECEIVE)
            give_back(job->kind == SEND ? &endpoint->free_sends : &endpoint->free_writes, job);
    }
    endpoint->unposted = endpoint->receives;
    return shoal_fabric_endpoint_registers_sources(endpoint) ? register_buffers(endpoint, bytes) : SHOAL_OK;
}

static void *descriptor_of(const struct shoal_fabric_memory *memory)
{
    return memory && memory->region ? fi_mr_desc(memory->region) : NULL;
}

/* Posts as many receives as the provider accepts now. */
static enum shoal_status post_receives(struct shoal_fabric_endpoint *endpoint)
{
    for (int i = 0; i < endpoint->receives && endpoint->unposted > 0; i++) {
        struct job *job = &endpoint->jobs[i];
        if (job->is_posted)
            continue;
        const ssize_t result = fi_recv(endpoint->ep, job->buffer, SHOAL_FABRIC_MESSAGE_MAX,
                                       descriptor_of(&endpoint->buffer_memory), FI_ADDR_UNSPEC, &job->context);
        if (result == -FI_EAGAIN)
            return SHOAL_OK;
        if (result != 0)
            return endpoint_fail(endpoint, "fi_recv", result);
        job->is_posted = true;
        endpoint->unposted--;
    }
    return SHOAL_OK;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* efa has no descriptor before libfabric 2.5, so it is polled. */
static enum shoal_status open_completions(struct shoal_fabric_endpoint *endpoint)
{
    struct fi_cq_attr attr = {.size = COMPLETIONS, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    endpoint->wait_fd = -1;
    if (fi_cq_open(endpoint->domain, &attr, &endpoint->completions, NULL) == 0) {
        if (fi_control(&endpoint->completions->fid, FI_GETWAIT, &endpoint->wait_fd) != 0)
            endpoint->wait_fd = -1;
        return SHOAL_OK;
    }
    attr.wait_obj = FI_WAIT_NONE;
    const int result = fi_cq_open(endpoint->domain, &attr, &endpoint->completions, NULL);
    return result == 0 ? SHOAL_OK : endpoint_fail(endpoint, "fi_cq_open", result);
}

static void put_port(struct fi_info *info, uint16_t port)
{
    struct sockaddr *address = info->src_addr;
    if (address->sa_family == AF_INET)
        ((struct sockaddr_in *)(void *)address)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)(void *)address)->sin6_port = htons(port);
}

/* Declared by libfabric 1.18. */
#define OPT_CUDA_API_PERMITTED 10

/* The engine polls, and polling must not call the GPU's driver. A provider that needs the driver refuses this option. */
static void forbid_driver(struct shoal_fabric_endpoint *endpoint)
{
    const bool is_permitted = false;
    if (endpoint->reads_devices)
        endpoint->reads_devices =
            fi_setopt(&endpoint->ep->fid, FI_OPT_ENDPOINT, OPT_CUDA_API_PERMITTED, &is_permitted, sizeof is_permitted) == 0;
}

static int enable(struct shoal_fabric_endpoint *endpoint)
{
    int result = fi_endpoint(endpoint->domain, endpoint->info, &endpoint->ep, NULL);
    if (result == 0)
        forbid_driver(endpoint);
    if (result == 0)
        result = fi_ep_bind(endpoint->ep, &endpoint->peers->fid, 0);
    if (result == 0)
        result = fi_ep_bind(endpoint->ep, &endpoint->completions->fid, FI_TRANSMIT | FI_RECV);
    return result == 0 ? fi_enable(endpoint->ep) : result;
}

/* Defined in rdma/fi_ext.h by newer versions of libfabric. */
#define OPT_EFA_EMULATED_WRITE (-(0xefa << 16) + 2)

static bool emulates_writes(const struct shoal_fabric_endpoint *endpoint)
{
    bool answer = false;
    size_t bytes = sizeof answer;
    return strcmp(endpoint->info->fabric_attr->prov_name, "efa") == 0 &&
           fi_getopt(&endpoint->ep->fid, FI_OPT_ENDPOINT, OPT_EFA_EMULATED_WRITE, &answer, &bytes) == 0 && answer;
}

static void close_endpoint(struct shoal_fabric_endpoint *endpoint)
{
    if (endpoint->ep)
        fi_close(&endpoint->ep->fid);
    endpoint->ep = NULL;
}

static enum shoal_status endpoint_open(struct shoal_fabric_endpoint *endpoint, uint16_t port_low, uint16_t port_high)
{
    const bool has_ports = port_low && endpoint->info->src_addr && endpoint->info->addr_format != FI_ADDR_EFA;
    int result = 0;
    for (unsigned port = port_low; port <= (has_ports ? port_high : port_low); port++) {
        if (has_ports)
            put_port(endpoint->info, (uint16_t)port);
        result = enable(endpoint);
        if (result == 0)
            return SHOAL_OK;
        close_endpoint(endpoint);
        if (result != -FI_EADDRINUSE)
            return endpoint_fail(endpoint, "opening an endpoint", result);
    }
    return shoal_log_fail(endpoint->log, SHOAL_ERR_SYSTEM, "fabric",
                          "provider %s: every port from %u to %u (SHOAL_PORTS) is in use on this host",
                          endpoint->info->fabric_attr->prov_name, port_low, port_high);
}

static enum shoal_status open_all(struct shoal_fabric_endpoint *endpoint, uint16_t port_low, uint16_t port_high)
{
    struct fi_av_attr peers = {.type = FI_AV_TABLE};
    size_t bytes = sizeof endpoint->address.at;
    int result = endpoint->library->fabric(endpoint->info->fabric_attr, &endpoint->fabric, NULL);
    if (result != 0)
        return endpoint_fail(endpoint, "fi_fabric", result);
    result = fi_domain(endpoint->fabric, endpoint->info, &endpoint->domain, NULL);
    if (result != 0)
        return endpoint_fail(endpoint, "fi_domain", result);
    result = fi_av_open(endpoint->domain, &peers, &endpoint->peers, NULL);
    if (result != 0)
        return endpoint_fail(endpoint, "fi_av_open", result);
    SHOAL_TRY(open_completions(endpoint));
    SHOAL_TRY(endpoint_open(endpoint, port_low, port_high));
    endpoint->emulates_writes = emulates_writes(endpoint);
    SHOAL_TRY(make_jobs(endpoint));
    SHOAL_TRY(post_receives(endpoint));
    result = fi_getname(&endpoint->ep->fid, endpoint->address.at, &bytes);
    if (result != 0)
        return endpoint_fail(endpoint, "fi_getname", result);
    endpoint->address.bytes = (uint16_t)bytes;
    return SHOAL_OK;
}

static struct shoal_fabric_endpoint *make_endpoint(const struct shoal_fabric_library *library, const struct fi_info *info,
                                                   bool reads_devices, struct shoal_log *log)
{
    struct shoal_fabric_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint)
        return NULL;
    endpoint->library = library;
    endpoint->log = log;
    endpoint->wait_fd = -1;
    endpoint->receives = RECEIVES;
    endpoint->sends = SENDS;
    endpoint->reads_devices = reads_devices;
    endpoint->info = library->dupinfo(info);
    return endpoint;
}

static enum shoal_status finish_open(struct shoal_fabric_endpoint *endpoint, uint16_t port_low, uint16_t port_high,
                                     struct shoal_log *log, struct shoal_fabric_endpoint **endpoint_out)
{
    const enum shoal_status status = endpoint && endpoint->info
                                         ? open_all(endpoint, port_low, port_high)
                                         : shoal_log_fail(log, SHOAL_ERR_MEMORY, "fabric", "no memory for an endpoint");
    if (status == SHOAL_OK)
        *endpoint_out = endpoint;
    else
        shoal_fabric_endpoint_close(endpoint);
    return status;
}

enum shoal_status shoal_fabric_endpoint_open(const struct shoal_fabric_library *library,
                                             const struct shoal_fabric_provider *provider, uint16_t port_low,
                                             uint16_t port_high, struct shoal_log *log,
                                             struct shoal_fabric_endpoint **endpoint_out)
{
    return finish_open(make_endpoint(library, provider->info, provider->reads_devices, log), port_low, port_high, log,
                       endpoint_out);
}

enum shoal_status shoal_fabric_endpoint_open_lane(const struct shoal_fabric_library *library, const struct fi_info *info,
                                                  uint16_t port_low, uint16_t port_high, struct shoal_log *log,
                                                  struct shoal_fabric_endpoint **endpoint_out)
{
    struct shoal_fabric_endpoint *endpoint = make_endpoint(library, info, false, log);
    if (endpoint) {
        endpoint->receives = info->domain_attr->mr_mode & FI_MR_LOCAL ? RECEIVES : LANE_RECEIVES;
        endpoint->sends = 0;
    }
    return finish_open(endpoint, port_low, port_high, log, endpoint_out);
}

void shoal_fabric_endpoint_stop(struct shoal_fabric_endpoint *endpoint)
{
    close_endpoint(endpoint);
}

void shoal_fabric_endpoint_close(struct shoal_fabric_endpoint *endpoint)
{
    if (!endpoint)
        return;
    close_endpoint(endpoint); /* before the objects bound to it */
    shoal_fabric_endpoint_unregister(endpoint, &endpoint->buffer_memory);
    shoal_fabric_endpoint_unregister(endpoint, &endpoint->bounce_memory);
    if (endpoint->completions)
        fi_close(&endpoint->completions->fid);
    if (endpoint->peers)
        fi_close(&endpoint->peers->fid);
    if (endpoint->domain)
        fi_close(&endpoint->domain->fid);
    if (endpoint->fabric)
        fi_close(&endpoint->fabric->fid);
    if (endpoint->info)
        endpoint->library->freeinfo(endpoint->info);
    free(endpoint->buffers);
    shoal_fabric_bounce_fini(&endpoint->bounce);
    free(endpoint);
}

const struct shoal_fabric_address *shoal_fabric_endpoint_address(const struct shoal_fabric_endpoint *endpoint)
{
    return &endpoint->address;
}

enum shoal_status shoal_fabric_endpoint_meet(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_address *address,
                                             shoal_fabric_peer *peer_out)
{
    fi_addr_t peer;
    const int result = fi_av_insert(endpoint->peers, address->at, 1, &peer, 0, NULL);
    if (result != 1)
        return endpoint_fail(endpoint, "fi_av_insert", result < 0 ? result : -FI_EINVAL);
    *peer_out = peer;
    return SHOAL_OK;
}

void shoal_fabric_endpoint_part(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer)
{
    fi_addr_t address = peer;
    const int result = fi_av_remove(endpoint->peers, &address, 1, 0);
    if (result)
        shoal_log_line(endpoint->log, SHOAL_LOG_DEBUG, "fabric", "fi_av_remove failed: %d", result);
}

int shoal_fabric_endpoint_wait_fd(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->wait_fd;
}

bool shoal_fabric_endpoint_may_wait(struct shoal_fabric_endpoint *endpoint)
{
    struct fid *completions = &endpoint->completions->fid;
    return endpoint->wait_fd >= 0 && fi_trywait(endpoint->fabric, &completions, 1) == 0;
}

void shoal_fabric_endpoint_print_address(const struct shoal_fabric_endpoint *endpoint,
                                         const struct shoal_fabric_address *address, char *text, size_t bytes)
{
    size_t needed = bytes;
    fi_av_straddr(endpoint->peers, address->at, text, &needed);
    text[bytes - 1] = 0;
    const char *scheme_end = strstr(text, "://");
    if (scheme_end)
        memmove(text, scheme_end + 3, strlen(scheme_end + 3) + 1);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* Draws a random key if the application chooses keys, so that others cannot guess it. */
static uint64_t draw_key(const struct shoal_fabric_endpoint *endpoint)
{
    const size_t bytes = endpoint->info->domain_attr->mr_key_size;
    uint64_t key = 0;
    if (endpoint->info->domain_attr->mr_mode & FI_MR_PROV_KEY)
        return 0;
    if (getrandom(&key, bytes < sizeof key ? bytes : sizeof key, 0) < 0)
        key = shoal_clock_ticks(); /* the system has no random numbers yet: better than none */
    return key;
}

/* Completes a new region with the address of its first byte. Returns 0 or libfabric's error. */
static int begin_region(struct shoal_fabric_endpoint *endpoint, struct fid_mr *region, uint64_t at,
                        struct shoal_fabric_memory *memory_out)
{
    int result = 0;
    if (endpoint->info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        result = fi_mr_bind(region, &endpoint->ep->fid, 0);
        result = result == 0 ? fi_mr_enable(region) : result;
    }
    if (result != 0) {
        fi_close(&region->fid);
        return result;
    }
    const bool is_virtual = endpoint->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    *memory_out = (struct shoal_fabric_memory){region, is_virtual ? at : 0, fi_mr_key(region)};
    return 0;
}

/* Returns 0 or libfabric's error. Providers that want local memory registered lock its pages, which also allocates them, as
 * FI_MR_ALLOCATED requires. */
static int try_register(struct shoal_fabric_endpoint *endpoint, uint64_t access, void *memory, size_t bytes,
                        struct shoal_fabric_memory *memory_out)
{
    struct fid_mr *region;
    *memory_out = (struct shoal_fabric_memory){.region = NULL};
    const int result = fi_mr_reg(endpoint->domain, memory, bytes, access, 0, draw_key(endpoint), 0, &region, NULL);
    return result == 0 ? begin_region(endpoint, region, (uintptr_t)memory, memory_out) : result;
}

static enum shoal_status register_for(struct shoal_fabric_endpoint *endpoint, uint64_t access, void *memory, size_t bytes,
                                      struct shoal_fabric_memory *memory_out)
{
    const int result = try_register(endpoint, access, memory, bytes, memory_out);
    if (result == -FI_ENOMEM && shoal_fabric_endpoint_registers_sources(endpoint))
        return endpoint_fail(endpoint, "registering memory (raise the limit of locked memory, ulimit -l?)", result);
    return result == 0 ? SHOAL_OK : endpoint_fail(endpoint, "registering memory", result);
}

enum shoal_status shoal_fabric_endpoint_register(struct shoal_fabric_endpoint *endpoint, void *memory, size_t bytes,
                                                 struct shoal_fabric_memory *memory_out)
{
    return register_for(endpoint, FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE, memory, bytes, memory_out);
}

const char *shoal_fabric_endpoint_register_source(struct shoal_fabric_endpoint *endpoint, void *memory, size_t bytes,
                                                  struct shoal_fabric_memory *memory_out)
{
    const int result = try_register(endpoint, FI_SEND | FI_WRITE, memory, bytes, memory_out);
    return result == 0 ? NULL : endpoint->library->error_text(-result);
}

/* As libfabric 1.20 declares them; the attribute holds a dma-buf in place of its pointer to vectors. */
#define MR_DMABUF (UINT64_C(1) << 40)
struct mr_dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base_addr;
};

const char *shoal_fabric_endpoint_register_export(struct shoal_fabric_endpoint *endpoint,
                                                  const struct shoal_fabric_export *export,
                                                  struct shoal_fabric_memory *memory_out)
{
    const struct mr_dmabuf pages = {
        .fd = export->descriptor, .len = export->bytes, .base_addr = (void *)(uintptr_t) export->begin};
    const struct fi_mr_attr attr = {.mr_iov = (const struct iovec *)(const void *)&pages,
                                    .iov_count = 1,
                                    .access = FI_SEND | FI_WRITE,
                                    .requested_key = draw_key(endpoint),
                                    .iface = FI_HMEM_CUDA,
                                    .device.cuda = export->device};
    struct fid_mr *region;
    *memory_out = (struct shoal_fabric_memory){.region = NULL};
    int result = fi_mr_regattr(endpoint->domain, &attr, MR_DMABUF, &region);
    if (result == 0)
        result = begin_region(endpoint, region, export->begin, memory_out);
    return result == 0 ? NULL : endpoint->library->error_text(-result);
}

bool shoal_fabric_endpoint_reads_devices(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->reads_devices;
}

void shoal_fabric_endpoint_unregister(struct shoal_fabric_endpoint *endpoint, struct shoal_fabric_memory *memory)
{
    struct fid_mr *region = memory->region;
    (void)endpoint;
    if (region)
        fi_close(&region->fid);
    memory->region = NULL;
}

/* ---- Sending and writing ------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_fabric_endpoint_send(struct shoal_fabric_endpoint *endpoint, shoal_fabric_peer peer, const void *data,
                                             size_t bytes, void *owner)
{
    struct job *job = endpoint_take(&endpoint->free_sends);
    if (!job)
        return SHOAL_PENDING;
    memcpy(job->buffer, data, bytes);
    job->owner = owner;
    const ssize_t result =
        fi_send(endpoint->ep, job->buffer, bytes, descriptor_of(&endpoint->buffer_memory), peer, &job->context);
    if (result == 0)
        return SHOAL_OK;
    give_back(&endpoint->free_sends, job);
    return result == -FI_EAGAIN ? SHOAL_PENDING : endpoint_fail(endpoint, "fi_send", result);
}

bool shoal_fabric_endpoint_emulates_writes(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->emulates_writes;
}

size_t shoal_fabric_endpoint_write_max(const struct shoal_fabric_endpoint *endpoint,
                                       const struct shoal_fabric_memory *source_memory)
{
    const size_t most = endpoint->info->ep_attr->max_msg_size;
    return source_memory || !shoal_fabric_endpoint_registers_sources(endpoint) ? most
                                                                               : shoal_min_size(most, endpoint->bounce.bytes);
}

uint64_t shoal_fabric_endpoint_bytes(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->bytes_under_way;
}

uint64_t shoal_fabric_endpoint_copies(const struct shoal_fabric_endpoint *endpoint)
{
    return endpoint->bounce.next;
}

/* Returns false if no buffer is free now. */
static bool bounce_source(struct shoal_fabric_endpoint *endpoint, struct job *job, struct shoal_fabric_write *write)
{
    char *buffer = shoal_fabric_bounce_take(&endpoint->bounce, write->bytes, &job->bounced);
    if (!buffer)
        return false;
    if (write->bytes)
        memcpy(buffer, write->source, write->bytes);
    write->source = buffer;
    write->source_memory = &endpoint->bounce_memory;
    job->is_bounced = true;
    return true;
}

static void give_back_write(struct shoal_fabric_endpoint *endpoint, struct job *job)
{
    if (job->is_bounced)
        shoal_fabric_bounce_give_back(&endpoint->bounce, job->bounced);
    job->is_bounced = false;
    if (job->under_way)
        --*job->under_way;
    endpoint->bytes_under_way -= job->bytes;
    give_back(&endpoint->free_writes, job);
}

/* Posts one write for all bytes: on efa, writes overtake each other, so an immediate proves only the arrival of its own write.
 * The write completes when the peer's device has it (FI_TRANSMIT_COMPLETE, the default). With FI_DELIVERY_COMPLETE efa would
 * answer each write, but the caller does not need to know when the peer receives it. */
static ssize_t post_write(struct shoal_fabric_endpoint *endpoint, struct job *job, const struct shoal_fabric_write *write)
{
    return fi_writedata(endpoint->ep, write->source, write->bytes, descriptor_of(write->source_memory), write->immediate,
                        write->peer, write->to->base + write->offset, write->to->key, &job->context);
}

enum shoal_status shoal_fabric_endpoint_write(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_write *write)
{
    struct job *job = endpoint_take(&endpoint->free_writes);
    struct shoal_fabric_write bounced = *write;
    if (!job)
        return SHOAL_PENDING;
    job->owner = write->owner;
    job->bytes = write->bytes;
    endpoint->bytes_under_way += job->bytes;
    job->under_way = write->under_way;
    if (job->under_way)
        ++*job->under_way;
    const bool is_ready =
        write->source_memory || !shoal_fabric_endpoint_registers_sources(endpoint) || bounce_source(endpoint, job, &bounced);
    const ssize_t result = is_ready ? post_write(endpoint, job, &bounced) : -FI_EAGAIN;
    if (result == 0)
        return SHOAL_OK;
    give_back_write(endpoint, job);
    return result == -FI_EAGAIN ? SHOAL_PENDING : endpoint_fail(endpoint, "fi_writedata", result);
}

/* ---- Completions --------------------------------------------------------------------------------------------------------- */

static void end_job(struct shoal_fabric_endpoint *endpoint, struct job *job)
{
    if (job->kind == RECEIVE) {
        job->is_posted = false;
        endpoint->unposted++;
    } else if (job->kind == SEND) {
        give_back(&endpoint->free_sends, job);
    } else {
        give_back_write(endpoint, job);
    }
}

/* Returns the job of a completion. A peer's operation has no job here, although some providers return a context for it. */
static struct job *job_of(struct shoal_fabric_endpoint *endpoint, void *context)
{
    const uintptr_t at = (uintptr_t)context, first = (uintptr_t)&endpoint->jobs[0],
                    end = (uintptr_t)&endpoint->jobs[SHOAL_COUNT_OF(endpoint->jobs)];
    return at >= first && at < end ? context : NULL;
}

static void endpoint_hear(struct shoal_fabric_endpoint *endpoint, const struct fi_cq_data_entry *entry,
                          const struct shoal_fabric_handler *handler)
{
    struct job *job = job_of(endpoint, entry->op_context);
    const bool is_written = (entry->flags & FI_REMOTE_CQ_DATA) && (entry->flags & (FI_RMA | FI_REMOTE_WRITE));
    if (is_written)
        handler->written(handler->arg, (uint32_t)entry->data);
    if (!job)
        return;
    if (is_written && job->kind == RECEIVE) { /* some providers use a receive for it */
        end_job(endpoint, job);
        return;
    }
    if (job->kind == RECEIVE)
        handler->message(handler->arg, job->buffer, entry->len);
    void *const owner = job->owner;
    const bool is_told = job->kind == WRITE || (job->kind == SEND && owner);
    end_job(endpoint, job);
    if (is_told)
        handler->completed(handler->arg, owner);
}

static void hear_failure(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_handler *handler)
{
    struct fi_cq_err_entry entry = {0};
    char detail[128] = "", text[320];
    if (fi_cq_readerr(endpoint->completions, &entry, 0) < 1)
        return;
    struct job *job = job_of(endpoint, entry.op_context);
    const char *more = fi_cq_strerror(endpoint->completions, entry.prov_errno, entry.err_data, detail, sizeof detail);
    snprintf(text, sizeof text, "%s: %s (%s)", endpoint->info->fabric_attr->prov_name, endpoint->library->error_text(entry.err),
             more ? more : "no detail");
    void *const owner = job && job->kind != RECEIVE ? job->owner : NULL;
    if (job)
        end_job(endpoint, job);
    handler->failed(handler->arg, owner, text);
}

/* Logs a fault that concerns no message and no peer. It may recur at each poll, so the 1st, 2nd, 4th, ... is logged. */
static void tell_own_fault(struct shoal_fabric_endpoint *endpoint, const char *text)
{
    const uint64_t count = ++endpoint->own_faults;
    if ((count & (count - 1)) == 0)
        shoal_log_line(endpoint->log, SHOAL_LOG_WARN, "fabric",
                       "this process's endpoint (%s) fails, %llu times so far: %s; operations over it end at their deadlines",
                       endpoint->info->fabric_attr->prov_name, (unsigned long long)count, text);
}

bool shoal_fabric_endpoint_poll(struct shoal_fabric_endpoint *endpoint, const struct shoal_fabric_handler *handler)
{
    struct fi_cq_data_entry entries[POLL_ENTRIES];
    const ssize_t count = fi_cq_read(endpoint->completions, entries, POLL_ENTRIES);
    for (ssize_t i = 0; i < count; i++)
        endpoint_hear(endpoint, &entries[i], handler);
    if (count == -FI_EAVAIL)
        hear_failure(endpoint, handler);
    else if (count < 0 && count != -FI_EAGAIN)
        tell_own_fault(endpoint, endpoint->library->error_text((int)-count));
    if (endpoint->unposted > 0 && post_receives(endpoint) != SHOAL_OK)
        tell_own_fault(endpoint, "receives cannot be posted");
    return count > 0;
}
