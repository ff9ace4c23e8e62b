#include "transport/fabric/fabric_node.h"

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
_Static_assert(WRITES <= SHOAL_FABRIC_BOUNCED_MAX, "each write may need a bounce buffer");
/* More than this process has posted. What peers have written before it polls may be more still: 1,024 ranks in two all-to-alls
 * of depth 4 write 8,000 times. The provider sees to that (FI_RM_ENABLED): it keeps what does not fit in a list, as those do
 * that count in software, or lets the writes wait in the network. */
#define COMPLETIONS 4096
#define POLL_ENTRIES 16

enum job_kind { RECEIVE, SEND, WRITE };

/* What libfabric works at; it hands the context back. */
struct job {
    struct fi_context2 context; /* first: contexts are taken for jobs */
    enum job_kind kind;
    bool is_posted;  /* a receive; it is posted again when that did not work at once */
    bool is_bounced; /* a write, from bounce buffer number `bounced` */
    uint64_t bounced;
    unsigned *under_way; /* of a write: counts it until it is at its end */
    char *buffer;
    void *owner;
    struct job *next_free;
};

struct shoal_fabric_node {
    const struct shoal_fabric_library *library;
    struct shoal_log *log;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *peers;
    struct fid_cq *completions;
    struct fid_ep *endpoint;
    int wait_fd;
    bool emulates_writes;
    struct shoal_fabric_address address;
    char *buffers; /* of receives, then of sends */
    struct shoal_fabric_memory buffer_memory;
    struct shoal_fabric_bounce bounce; /* empty where sources need not be registered */
    struct shoal_fabric_memory bounce_memory;
    struct job jobs[RECEIVES + SENDS + WRITES];
    struct job *free_sends, *free_writes;
    uint64_t own_faults; /* of the completion queue, or of posting receives */
    int unposted;        /* receives that are not posted */
};

static enum shoal_status fail(struct shoal_fabric_node *node, const char *what, long error)
{
    return shoal_log_fail(node->log, SHOAL_ERR_SYSTEM, "fabric", "provider %s: %s failed: %s",
                          node->info->fabric_attr->prov_name, what, node->library->error_text((int)-error));
}

/* ---- Jobs ---------------------------------------------------------------------------------------------------------------- */

static void give_back(struct job **free_list, struct job *job)
{
    job->next_free = *free_list;
    *free_list = job;
}

static struct job *take(struct job **free_list)
{
    struct job *job = *free_list;
    if (job)
        *free_list = job->next_free;
    return job;
}

bool shoal_fabric_node_registers_sources(const struct shoal_fabric_node *node)
{
    return node->info->domain_attr->mr_mode & FI_MR_LOCAL;
}

static enum shoal_status register_for(struct shoal_fabric_node *node, uint64_t access, void *memory, size_t bytes,
                                      struct shoal_fabric_memory *memory_out);

/* Nobody else may write there. */
static enum shoal_status register_buffers(struct shoal_fabric_node *node, size_t bytes)
{
    SHOAL_TRY(register_for(node, FI_SEND | FI_RECV, node->buffers, bytes, &node->buffer_memory));
    if (!shoal_fabric_bounce_init(&node->bounce, SHOAL_FABRIC_BOUNCE_BYTES))
        return shoal_log_fail(node->log, SHOAL_ERR_MEMORY, "fabric", "no memory for %zu bytes of buffers",
                              SHOAL_FABRIC_BOUNCE_BYTES);
    return register_for(node, FI_SEND | FI_WRITE, node->bounce.memory, node->bounce.bytes, &node->bounce_memory);
}

static enum shoal_status make_jobs(struct shoal_fabric_node *node)
{
    const size_t bytes = SHOAL_FABRIC_BUFFER_BYTES;
    node->buffers = aligned_alloc(4096, bytes);
    if (!node->buffers)
        return shoal_log_fail(node->log, SHOAL_ERR_MEMORY, "fabric", "no memory for %zu bytes of buffers", bytes);
    memset(node->buffers, 0, bytes);
    for (int i = 0; i < RECEIVES + SENDS + WRITES; i++) {
        struct job *job = &node->jobs[i];
        job->kind = i < RECEIVES ? RECEIVE : i < RECEIVES + SENDS ? SEND : WRITE;
        job->buffer = job->kind == WRITE ? NULL : node->buffers + (size_t)i * SHOAL_FABRIC_MESSAGE_MAX;
        if (job->kind != RECEIVE)
            give_back(job->kind == SEND ? &node->free_sends : &node->free_writes, job);
    }
    node->unposted = RECEIVES;
    return shoal_fabric_node_registers_sources(node) ? register_buffers(node, bytes) : SHOAL_OK;
}

static void *descriptor_of(const struct shoal_fabric_memory *memory)
{
    return memory && memory->region ? fi_mr_desc(memory->region) : NULL;
}

/* As many as the provider takes now. */
static enum shoal_status post_receives(struct shoal_fabric_node *node)
{
    for (int i = 0; i < RECEIVES && node->unposted > 0; i++) {
        struct job *job = &node->jobs[i];
        if (job->is_posted)
            continue;
        const ssize_t result = fi_recv(node->endpoint, job->buffer, SHOAL_FABRIC_MESSAGE_MAX,
                                       descriptor_of(&node->buffer_memory), FI_ADDR_UNSPEC, &job->context);
        if (result == -FI_EAGAIN)
            return SHOAL_OK;
        if (result != 0)
            return fail(node, "fi_recv", result);
        job->is_posted = true;
        node->unposted--;
    }
    return SHOAL_OK;
}

/* ---- Life ---------------------------------------------------------------------------------------------------------------- */

/* efa has no descriptor before libfabric 2.5: it is polled. */
static enum shoal_status open_completions(struct shoal_fabric_node *node)
{
    struct fi_cq_attr attr = {.size = COMPLETIONS, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    node->wait_fd = -1;
    if (fi_cq_open(node->domain, &attr, &node->completions, NULL) == 0) {
        if (fi_control(&node->completions->fid, FI_GETWAIT, &node->wait_fd) != 0)
            node->wait_fd = -1;
        return SHOAL_OK;
    }
    attr.wait_obj = FI_WAIT_NONE;
    const int result = fi_cq_open(node->domain, &attr, &node->completions, NULL);
    return result == 0 ? SHOAL_OK : fail(node, "fi_cq_open", result);
}

static void put_port(struct fi_info *info, uint16_t port)
{
    struct sockaddr *address = info->src_addr;
    if (address->sa_family == AF_INET)
        ((struct sockaddr_in *)(void *)address)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)(void *)address)->sin6_port = htons(port);
}

static int enable(struct shoal_fabric_node *node)
{
    int result = fi_endpoint(node->domain, node->info, &node->endpoint, NULL);
    if (result == 0)
        result = fi_ep_bind(node->endpoint, &node->peers->fid, 0);
    if (result == 0)
        result = fi_ep_bind(node->endpoint, &node->completions->fid, FI_TRANSMIT | FI_RECV);
    return result == 0 ? fi_enable(node->endpoint) : result;
}

/* Of libfabric's newer versions, which have it in rdma/fi_ext.h. */
#define OPT_EFA_EMULATED_WRITE (-(0xefa << 16) + 2)

static bool emulates_writes(const struct shoal_fabric_node *node)
{
    bool answer = false;
    size_t bytes = sizeof answer;
    return strcmp(node->info->fabric_attr->prov_name, "efa") == 0 &&
           fi_getopt(&node->endpoint->fid, FI_OPT_ENDPOINT, OPT_EFA_EMULATED_WRITE, &answer, &bytes) == 0 && answer;
}

static void close_endpoint(struct shoal_fabric_node *node)
{
    if (node->endpoint)
        fi_close(&node->endpoint->fid);
    node->endpoint = NULL;
}

static enum shoal_status open_endpoint(struct shoal_fabric_node *node, uint16_t port_low, uint16_t port_high)
{
    const bool has_ports = port_low && node->info->src_addr && node->info->addr_format != FI_ADDR_EFA;
    int result = 0;
    for (unsigned port = port_low; port <= (has_ports ? port_high : port_low); port++) {
        if (has_ports)
            put_port(node->info, (uint16_t)port);
        result = enable(node);
        if (result == 0)
            return SHOAL_OK;
        close_endpoint(node);
        if (result != -FI_EADDRINUSE)
            return fail(node, "opening an endpoint", result);
    }
    return shoal_log_fail(node->log, SHOAL_ERR_SYSTEM, "fabric",
                          "provider %s: every port from %u to %u (SHOAL_PORTS) is in use on this host",
                          node->info->fabric_attr->prov_name, port_low, port_high);
}

static enum shoal_status open_all(struct shoal_fabric_node *node, uint16_t port_low, uint16_t port_high)
{
    struct fi_av_attr peers = {.type = FI_AV_TABLE};
    size_t bytes = sizeof node->address.at;
    int result = node->library->fabric(node->info->fabric_attr, &node->fabric, NULL);
    if (result != 0)
        return fail(node, "fi_fabric", result);
    result = fi_domain(node->fabric, node->info, &node->domain, NULL);
    if (result != 0)
        return fail(node, "fi_domain", result);
    result = fi_av_open(node->domain, &peers, &node->peers, NULL);
    if (result != 0)
        return fail(node, "fi_av_open", result);
    SHOAL_TRY(open_completions(node));
    SHOAL_TRY(open_endpoint(node, port_low, port_high));
    node->emulates_writes = emulates_writes(node);
    SHOAL_TRY(make_jobs(node));
    SHOAL_TRY(post_receives(node));
    result = fi_getname(&node->endpoint->fid, node->address.at, &bytes);
    if (result != 0)
        return fail(node, "fi_getname", result);
    node->address.bytes = (uint16_t)bytes;
    return SHOAL_OK;
}

enum shoal_status shoal_fabric_node_open(const struct shoal_fabric_library *library,
                                         const struct shoal_fabric_provider *provider, uint16_t port_low, uint16_t port_high,
                                         struct shoal_log *log, struct shoal_fabric_node **node_out)
{
    struct shoal_fabric_node *node = calloc(1, sizeof *node);
    if (!node)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "fabric", "no memory for an endpoint");
    node->library = library;
    node->log = log;
    node->wait_fd = -1;
    node->info = library->dupinfo(provider->info);
    const enum shoal_status status =
        node->info ? open_all(node, port_low, port_high) : shoal_log_fail(log, SHOAL_ERR_MEMORY, "fabric", "no memory");
    if (status == SHOAL_OK)
        *node_out = node;
    else
        shoal_fabric_node_close(node);
    return status;
}

void shoal_fabric_node_stop(struct shoal_fabric_node *node)
{
    close_endpoint(node);
}

void shoal_fabric_node_close(struct shoal_fabric_node *node)
{
    if (!node)
        return;
    close_endpoint(node); /* before what is bound to it */
    shoal_fabric_node_unregister(node, &node->buffer_memory);
    shoal_fabric_node_unregister(node, &node->bounce_memory);
    if (node->completions)
        fi_close(&node->completions->fid);
    if (node->peers)
        fi_close(&node->peers->fid);
    if (node->domain)
        fi_close(&node->domain->fid);
    if (node->fabric)
        fi_close(&node->fabric->fid);
    if (node->info)
        node->library->freeinfo(node->info);
    free(node->buffers);
    shoal_fabric_bounce_fini(&node->bounce);
    free(node);
}

const struct shoal_fabric_address *shoal_fabric_node_address(const struct shoal_fabric_node *node)
{
    return &node->address;
}

enum shoal_status shoal_fabric_node_meet(struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                         shoal_fabric_peer *peer_out)
{
    fi_addr_t peer;
    const int result = fi_av_insert(node->peers, address->at, 1, &peer, 0, NULL);
    if (result != 1)
        return fail(node, "fi_av_insert", result < 0 ? result : -FI_EINVAL);
    *peer_out = peer;
    return SHOAL_OK;
}

int shoal_fabric_node_wait_fd(const struct shoal_fabric_node *node)
{
    return node->wait_fd;
}

bool shoal_fabric_node_may_wait(struct shoal_fabric_node *node)
{
    struct fid *completions = &node->completions->fid;
    return node->wait_fd >= 0 && fi_trywait(node->fabric, &completions, 1) == 0;
}

void shoal_fabric_node_print_address(const struct shoal_fabric_node *node, const struct shoal_fabric_address *address,
                                     char *text, size_t bytes)
{
    size_t needed = bytes;
    fi_av_straddr(node->peers, address->at, text, &needed);
    text[bytes - 1] = 0;
    const char *scheme_end = strstr(text, "://");
    if (scheme_end)
        memmove(text, scheme_end + 3, strlen(scheme_end + 3) + 1);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* Where the application chooses keys, nobody guesses them. */
static uint64_t draw_key(const struct shoal_fabric_node *node)
{
    const size_t bytes = node->info->domain_attr->mr_key_size;
    uint64_t key = 0;
    if (node->info->domain_attr->mr_mode & FI_MR_PROV_KEY)
        return 0;
    if (getrandom(&key, bytes < sizeof key ? bytes : sizeof key, 0) < 0)
        key = shoal_clock_ticks(); /* before the system has gathered chance: better than none */
    return key;
}

/* 0, or libfabric's error. The providers that want local memory registered lock its pages; that brings them into being, as
 * FI_MR_ALLOCATED demands. */
static int try_register(struct shoal_fabric_node *node, uint64_t access, void *memory, size_t bytes,
                        struct shoal_fabric_memory *memory_out)
{
    struct fid_mr *region;
    *memory_out = (struct shoal_fabric_memory){.region = NULL};
    int result = fi_mr_reg(node->domain, memory, bytes, access, 0, draw_key(node), 0, &region, NULL);
    if (result != 0)
        return result;
    if (node->info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        result = fi_mr_bind(region, &node->endpoint->fid, 0);
        result = result == 0 ? fi_mr_enable(region) : result;
    }
    if (result != 0) {
        fi_close(&region->fid);
        return result;
    }
    const bool is_virtual = node->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    *memory_out = (struct shoal_fabric_memory){region, is_virtual ? (uint64_t)(uintptr_t)memory : 0, fi_mr_key(region)};
    return 0;
}

static enum shoal_status register_for(struct shoal_fabric_node *node, uint64_t access, void *memory, size_t bytes,
                                      struct shoal_fabric_memory *memory_out)
{
    const int result = try_register(node, access, memory, bytes, memory_out);
    if (result == -FI_ENOMEM && shoal_fabric_node_registers_sources(node))
        return fail(node, "registering memory (raise the limit of locked memory, ulimit -l?)", result);
    return result == 0 ? SHOAL_OK : fail(node, "registering memory", result);
}

enum shoal_status shoal_fabric_node_register(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                             struct shoal_fabric_memory *memory_out)
{
    return register_for(node, FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE, memory, bytes, memory_out);
}

const char *shoal_fabric_node_register_source(struct shoal_fabric_node *node, void *memory, size_t bytes,
                                              struct shoal_fabric_memory *memory_out)
{
    const int result = try_register(node, FI_SEND | FI_WRITE, memory, bytes, memory_out);
    return result == 0 ? NULL : node->library->error_text(-result);
}

void shoal_fabric_node_unregister(struct shoal_fabric_node *node, struct shoal_fabric_memory *memory)
{
    struct fid_mr *region = memory->region;
    (void)node;
    if (region)
        fi_close(&region->fid);
    memory->region = NULL;
}

/* ---- Sending and writing ------------------------------------------------------------------------------------------------- */

enum shoal_status shoal_fabric_node_send(struct shoal_fabric_node *node, shoal_fabric_peer peer, const void *data, size_t bytes,
                                         void *owner)
{
    struct job *job = take(&node->free_sends);
    if (!job)
        return SHOAL_PENDING;
    memcpy(job->buffer, data, bytes);
    job->owner = owner;
    const ssize_t result =
        fi_send(node->endpoint, job->buffer, bytes, descriptor_of(&node->buffer_memory), peer, &job->context);
    if (result == 0)
        return SHOAL_OK;
    give_back(&node->free_sends, job);
    return result == -FI_EAGAIN ? SHOAL_PENDING : fail(node, "fi_send", result);
}

bool shoal_fabric_node_emulates_writes(const struct shoal_fabric_node *node)
{
    return node->emulates_writes;
}

size_t shoal_fabric_node_write_max(const struct shoal_fabric_node *node, const struct shoal_fabric_memory *source_memory)
{
    const size_t most = node->info->ep_attr->max_msg_size;
    return source_memory || !shoal_fabric_node_registers_sources(node) ? most : shoal_min_size(most, node->bounce.bytes);
}

/* False: no buffer now. */
static bool bounce_source(struct shoal_fabric_node *node, struct job *job, struct shoal_fabric_write *write)
{
    char *buffer = shoal_fabric_bounce_take(&node->bounce, write->bytes, &job->bounced);
    if (!buffer)
        return false;
    if (write->bytes)
        memcpy(buffer, write->source, write->bytes);
    write->source = buffer;
    write->source_memory = &node->bounce_memory;
    job->is_bounced = true;
    return true;
}

static void give_back_write(struct shoal_fabric_node *node, struct job *job)
{
    if (job->is_bounced)
        shoal_fabric_bounce_give_back(&node->bounce, job->bounced);
    job->is_bounced = false;
    if (job->under_way)
        --*job->under_way;
    give_back(&node->free_writes, job);
}

/* One write for all: where writes overtake each other (efa) an immediate tells of the bytes of its own write only. It completes
 * when the peer's device has it (FI_TRANSMIT_COMPLETE, the default). With FI_DELIVERY_COMPLETE efa would have each write
 * answered, and nobody here asks when the peer hears of it. */
static ssize_t post_write(struct shoal_fabric_node *node, struct job *job, const struct shoal_fabric_write *write)
{
    return fi_writedata(node->endpoint, write->source, write->bytes, descriptor_of(write->source_memory), write->immediate,
                        write->peer, write->to->base + write->offset, write->to->key, &job->context);
}

enum shoal_status shoal_fabric_node_write(struct shoal_fabric_node *node, const struct shoal_fabric_write *write)
{
    struct job *job = take(&node->free_writes);
    struct shoal_fabric_write bounced = *write;
    if (!job)
        return SHOAL_PENDING;
    job->owner = write->owner;
    job->under_way = write->under_way;
    if (job->under_way)
        ++*job->under_way;
    const bool is_ready =
        write->source_memory || !shoal_fabric_node_registers_sources(node) || bounce_source(node, job, &bounced);
    const ssize_t result = is_ready ? post_write(node, job, &bounced) : -FI_EAGAIN;
    if (result == 0)
        return SHOAL_OK;
    give_back_write(node, job);
    return result == -FI_EAGAIN ? SHOAL_PENDING : fail(node, "fi_writedata", result);
}

/* ---- Completions --------------------------------------------------------------------------------------------------------- */

static void end_job(struct shoal_fabric_node *node, struct job *job)
{
    if (job->kind == RECEIVE) {
        job->is_posted = false;
        node->unposted++;
    } else if (job->kind == SEND) {
        give_back(&node->free_sends, job);
    } else {
        give_back_write(node, job);
    }
}

/* What a peer did has no job here; some providers hand out a context all the same. */
static struct job *job_of(struct shoal_fabric_node *node, void *context)
{
    const uintptr_t at = (uintptr_t)context, first = (uintptr_t)&node->jobs[0],
                    end = (uintptr_t)&node->jobs[SHOAL_COUNT_OF(node->jobs)];
    return at >= first && at < end ? context : NULL;
}

static void hear(struct shoal_fabric_node *node, const struct fi_cq_data_entry *entry,
                 const struct shoal_fabric_handler *handler)
{
    struct job *job = job_of(node, entry->op_context);
    const bool is_written = (entry->flags & FI_REMOTE_CQ_DATA) && (entry->flags & (FI_RMA | FI_REMOTE_WRITE));
    if (is_written)
        handler->written(handler->arg, (uint32_t)entry->data);
    if (!job)
        return;
    if (is_written && job->kind == RECEIVE) { /* some providers use a receive up for it */
        end_job(node, job);
        return;
    }
    if (job->kind == RECEIVE)
        handler->message(handler->arg, job->buffer, entry->len);
    void *const owner = job->owner;
    const bool is_told = job->kind == WRITE || (job->kind == SEND && owner);
    end_job(node, job);
    if (is_told)
        handler->left(handler->arg, owner);
}

static void hear_failure(struct shoal_fabric_node *node, const struct shoal_fabric_handler *handler)
{
    struct fi_cq_err_entry entry = {0};
    char detail[128] = "", text[320];
    if (fi_cq_readerr(node->completions, &entry, 0) < 1)
        return;
    struct job *job = job_of(node, entry.op_context);
    const char *more = fi_cq_strerror(node->completions, entry.prov_errno, entry.err_data, detail, sizeof detail);
    snprintf(text, sizeof text, "%s: %s (%s)", node->info->fabric_attr->prov_name, node->library->error_text(entry.err),
             more ? more : "no detail");
    void *const owner = job && job->kind != RECEIVE ? job->owner : NULL;
    if (job)
        end_job(node, job);
    handler->failed(handler->arg, owner, text);
}

/* No message and no peer is to blame. It may come at each poll: the 1st, 2nd, 4th, ... is logged. */
static void tell_own_fault(struct shoal_fabric_node *node, const char *text)
{
    const uint64_t count = ++node->own_faults;
    if ((count & (count - 1)) == 0)
        shoal_log_line(node->log, SHOAL_LOG_WARN, "fabric",
                       "the own endpoint (%s) fails, %llu times so far: %s; operations over it end at their deadlines",
                       node->info->fabric_attr->prov_name, (unsigned long long)count, text);
}

bool shoal_fabric_node_poll(struct shoal_fabric_node *node, const struct shoal_fabric_handler *handler)
{
    struct fi_cq_data_entry entries[POLL_ENTRIES];
    const ssize_t count = fi_cq_read(node->completions, entries, POLL_ENTRIES);
    for (ssize_t i = 0; i < count; i++)
        hear(node, &entries[i], handler);
    if (count == -FI_EAVAIL)
        hear_failure(node, handler);
    else if (count < 0 && count != -FI_EAGAIN)
        tell_own_fault(node, node->library->error_text((int)-count));
    if (node->unposted > 0 && post_receives(node) != SHOAL_OK)
        tell_own_fault(node, "receives cannot be posted");
    return count > 0;
}
