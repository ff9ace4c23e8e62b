/* Endpoints that carry messages and writes inside one process, as hostile as EFA and InfiniBand may be:
 *   - posted operations happen later, in random order, when their sender polls, and read their source until they complete;
 *   - the bytes of a write arrive more than once before its immediate does, and the immediate arrives before or after the
 *     operations that were posted earlier;
 *   - a source, and a receive's buffer, must be in the region of its descriptor (FI_MR_LOCAL), even if it is empty;
 *   - device memory is registered as a dma-buf, and read through that: the processor never has its address;
 *   - a region's memory must exist until the region is closed;
 *   - a write must be in the region of its key, in a domain that still has it;
 *   - few operations are accepted at once (-FI_EAGAIN), and there is no descriptor to wait on;
 *   - a full completion queue delays peers' writes if FI_RM_ENABLED was requested; otherwise their immediates are lost.
 * A violation by the sender fails its call; one that shows later fails the completion. */
#include "mock_fabric.h"

#include <pthread.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define UNDER_WAY_MAX 24 /* operations of one endpoint */
#define ADDRESS_BYTES 32
#define STEPS 6 /* of operations in progress, in each poll */

struct domain {
    struct fid_domain fid;
    char name[32]; /* of the adapter */
    uint64_t modes;
    bool manages_resources;
    bool reads_devices;
};

struct region {
    struct fid_mr fid;
    struct domain *domain;
    char *at;
    size_t bytes;
    uint64_t access;
    char *pages; /* of device memory, for the adapter; NULL: memory of the process */
    struct region *next;
};

struct completion {
    struct fi_cq_data_entry entry;
    int error;
    struct completion *next;
};

struct queue {
    struct fid_cq fid;
    struct completion *first, **end;
    size_t count, size;
};

struct peers {
    struct fid_av fid;
    uint64_t *numbers;
    size_t count;
};

/* The progress of an operation. */
enum state { POSTED, LANDED, HEARD };

struct operation {
    enum state state;
    bool is_write, is_held;
    uint64_t dest, key, at, data;
    char *buffer;
    size_t bytes;
    void *descriptor, *context;
    struct operation *next;
};

struct endpoint {
    struct fid_ep fid;
    struct domain *domain;
    struct peers *peers;
    struct queue *queue;
    uint64_t number;
    size_t bytes_max; /* of an operation */
    bool emulates_writes;
    struct operation *under_way, *receives;
    unsigned count;
    uint64_t sent; /* bytes of all posted operations */
    enum mock_way way;
    bool has_held; /* the one that MOCK_HELD holds */
    struct endpoint *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;
static struct endpoint *endpoints;
static uint64_t last_number, random_state = 1;
static size_t locked_bytes, locked_limit = SIZE_MAX;

/* splitmix64, https://prng.di.unimi.it/splitmix64.c */
static uint64_t draw(uint64_t limit)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % limit;
}

/* ---- Regions ---- */

static bool holds(const struct region *region, const char *at, size_t bytes, uint64_t access)
{
    const uintptr_t offset = (uintptr_t)at - (uintptr_t)region->at;
    return offset <= region->bytes && bytes <= region->bytes - offset && (region->access & access) == access;
}

static bool is_local_right(const struct domain *domain, const void *descriptor, const char *at, size_t bytes, uint64_t access)
{
    const struct region *region = regions;
    if (!(domain->modes & FI_MR_LOCAL))
        return true;
    while (region && region != descriptor)
        region = region->next;
    return region && region->domain == domain && holds(region, at, bytes, access);
}

/* Returns the address at which the adapter reads a source. */
static const char *bytes_of(const void *descriptor, const char *at)
{
    const struct region *region = regions;
    while (region && region != descriptor)
        region = region->next;
    return region && region->pages ? region->pages + (at - region->at) : at;
}

/* Returns NULL if that key is unknown there, or its region is too short. */
static char *find_target(const struct domain *domain, uint64_t key, uint64_t at, size_t bytes)
{
    const struct region *region = regions;
    while (region && !(region->domain == domain && region->fid.key == key))
        region = region->next;
    if (!region)
        return NULL;
    char *target = domain->modes & FI_MR_VIRT_ADDR ? (char *)(uintptr_t)at : region->at + at;
    return holds(region, target, bytes, FI_REMOTE_WRITE) ? target : NULL;
}

static int close_region(struct fid *fid)
{
    struct region **link = &regions;
    pthread_mutex_lock(&lock);
    while ((void *)*link != fid)
        link = &(*link)->next;
    struct region *region = *link;
    *link = region->next;
    locked_bytes -= region->bytes;
    pthread_mutex_unlock(&lock);
    for (size_t at = 0; at < region->bytes && !region->pages; at += 4096)
        (void)*(volatile char *)(region->at + at); /* faults if the memory was freed too early */
    if (region->pages)
        munmap(region->pages, region->bytes);
    free(region);
    return 0;
}

__attribute__((visibility("default"))) unsigned mock_count_regions(const void *at)
{
    unsigned count = 0;
    pthread_mutex_lock(&lock);
    for (const struct region *region = regions; region; region = region->next)
        count += holds(region, at, 1, 0);
    pthread_mutex_unlock(&lock);
    return count;
}

__attribute__((visibility("default"))) size_t mock_count_locked(void)
{
    pthread_mutex_lock(&lock);
    const size_t bytes = locked_bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

__attribute__((visibility("default"))) void mock_limit_locked(size_t bytes)
{
    pthread_mutex_lock(&lock);
    locked_limit = bytes;
    pthread_mutex_unlock(&lock);
}

static struct fi_ops region_ops = {.size = sizeof region_ops, .close = close_region};

static bool is_key_taken(const struct domain *domain, uint64_t key)
{
    const struct region *region = regions;
    while (region && !(region->domain == domain && region->fid.key == key))
        region = region->next;
    return region;
}

static int add_region(struct domain *domain, const struct region *wanted, uint64_t requested_key, struct fid_mr **mr)
{
    struct region *region = calloc(1, sizeof *region);
    const size_t bytes = wanted->bytes;
    if (!region)
        return -FI_ENOMEM;
    pthread_mutex_lock(&lock);
    *region = *wanted;
    region->domain = domain;
    region->fid.fid.fclass = FI_CLASS_MR;
    region->fid.fid.ops = &region_ops;
    region->fid.mem_desc = region;
    region->fid.key = domain->modes & FI_MR_PROV_KEY ? ++last_number * 7919 : requested_key;
    const bool is_too_much = locked_bytes > locked_limit || bytes > locked_limit - locked_bytes;
    const int result = is_key_taken(domain, region->fid.key) ? -FI_ENOKEY : is_too_much ? -FI_ENOMEM : 0;
    if (result == 0) {
        locked_bytes += bytes;
        region->next = regions;
        regions = region;
        *mr = &region->fid;
    }
    pthread_mutex_unlock(&lock);
    if (result != 0)
        free(region);
    return result;
}

static int register_region(struct fid *fid, const void *buffer, size_t bytes, uint64_t access, uint64_t offset,
                           uint64_t requested_key, uint64_t flags, struct fid_mr **mr, void *context)
{
    const struct region wanted = {.at = (char *)(uintptr_t)buffer, .bytes = bytes, .access = access};
    (void)offset, (void)flags, (void)context;
    return add_region((struct domain *)fid, &wanted, requested_key, mr);
}

/* As libfabric 1.20 declares it. */
#define MR_DMABUF (1ULL << 40)
struct dma_buf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base_addr;
};

/* The stand-in driver's dma-buf is a file that is read from its position on. */
static int register_attributes(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
    const struct dma_buf *buf = (const struct dma_buf *)(const void *)attr->mr_iov;
    struct domain *domain = (struct domain *)fid;
    if (flags != MR_DMABUF || attr->iov_count != 1 || attr->iface != FI_HMEM_CUDA || !domain->reads_devices)
        return -FI_EOPNOTSUPP;
    const off_t begin = lseek(buf->fd, 0, SEEK_CUR);
    void *pages = mmap(NULL, buf->len, PROT_READ, MAP_SHARED, buf->fd, begin + (off_t)buf->offset);
    if (pages == MAP_FAILED)
        return -FI_EINVAL;
    const struct region wanted = {
        .at = (char *)buf->base_addr + buf->offset, .bytes = buf->len, .access = attr->access, .pages = pages};
    const int result = add_region(domain, &wanted, attr->requested_key, mr);
    if (result != 0)
        munmap(pages, buf->len);
    return result;
}

/* ---- Completions ---- */

static void complete(struct queue *queue, struct fi_cq_data_entry entry, int error)
{
    struct completion *completion = calloc(1, sizeof *completion);
    if (!completion)
        abort();
    *completion = (struct completion){.entry = entry, .error = error};
    *queue->end = completion;
    queue->end = &completion->next;
    queue->count++;
}

static struct completion pop(struct queue *queue)
{
    struct completion *first = queue->first;
    const struct completion copy = *first;
    queue->first = first->next;
    if (!queue->first)
        queue->end = &queue->first;
    free(first);
    queue->count--;
    return copy;
}

/* ---- Operations in progress ---- */

static struct endpoint *find_endpoint(uint64_t number)
{
    struct endpoint *endpoint = endpoints;
    while (endpoint && endpoint->number != number)
        endpoint = endpoint->next;
    return endpoint;
}

__attribute__((visibility("default"))) void mock_hinder(uint64_t number, enum mock_way way)
{
    pthread_mutex_lock(&lock);
    struct endpoint *endpoint = find_endpoint(number);
    if (endpoint) {
        endpoint->way = way;
        endpoint->has_held = false;
    }
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) uint64_t mock_count_sent(uint64_t number, char *adapter, size_t room)
{
    pthread_mutex_lock(&lock);
    const struct endpoint *endpoint = find_endpoint(number);
    const uint64_t sent = endpoint ? endpoint->sent : 0;
    snprintf(adapter, room, "%s", endpoint ? endpoint->domain->name : "");
    pthread_mutex_unlock(&lock);
    return sent;
}

/* Returns 0, or the error. */
static int land(const struct operation *operation, const struct endpoint *to)
{
    char *target = find_target(to->domain, operation->key, operation->at, operation->bytes);
    if (!target)
        return FI_EACCES;
    if (operation->bytes)
        memcpy(target, bytes_of(operation->descriptor, operation->buffer), operation->bytes);
    return 0;
}

static int hand_message(const struct operation *operation, struct endpoint *to)
{
    struct operation *receive = to->receives;
    if (operation->bytes > receive->bytes ||
        !is_local_right(to->domain, receive->descriptor, receive->buffer, receive->bytes, FI_RECV))
        return FI_ETRUNC;
    memcpy(receive->buffer, operation->buffer, operation->bytes);
    complete(to->queue,
             (struct fi_cq_data_entry){.op_context = receive->context, .flags = FI_MSG | FI_RECV, .len = operation->bytes}, 0);
    to->receives = receive->next;
    free(receive);
    return 0;
}

static int hand_over(const struct operation *operation, struct endpoint *to)
{
    if (!operation->is_write)
        return hand_message(operation, to);
    const int error = land(operation, to);
    if (error == 0 && to->queue->count < to->queue->size)
        complete(to->queue,
                 (struct fi_cq_data_entry){.flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, .data = operation->data}, 0);
    return error;
}

/* Advances the operation; returns true when it is complete and was reported. */
static bool step(const struct endpoint *from, struct operation *operation)
{
    struct endpoint *to = find_endpoint(operation->dest);
    const uint64_t access = operation->is_write ? FI_WRITE : FI_SEND;
    int error = 0;
    if (to && (to->way == MOCK_STALLED || (to->way == MOCK_HELD && operation->is_held)))
        return false;
    if (!is_local_right(from->domain, operation->descriptor, operation->buffer, operation->bytes, access))
        error = FI_EINVAL;
    else if ((!to || to->way == MOCK_CUT) && operation->state != HEARD)
        error = FI_EHOSTUNREACH;
    else if (operation->state == POSTED && operation->is_write)
        error = land(operation, to);
    else if (operation->state != HEARD && !operation->is_write && !to->receives)
        return false; /* until there is one */
    else if (operation->state == LANDED && operation->is_write && to->domain->manages_resources &&
             to->queue->count >= to->queue->size)
        return false; /* until there is room */
    else if (operation->state == LANDED)
        error = hand_over(operation, to);
    if (error == 0 && operation->state != HEARD) {
        operation->state++;
        return false;
    }
    complete(from->queue,
             (struct fi_cq_data_entry){.op_context = operation->context,
                                       .flags = operation->is_write ? FI_RMA | FI_WRITE : FI_MSG | FI_SEND},
             error);
    return true;
}

static void progress(struct endpoint *endpoint)
{
    for (int i = 0; i < STEPS && endpoint->count > 0; i++) {
        struct operation **link = &endpoint->under_way;
        for (uint64_t nth = draw(endpoint->count); nth > 0; nth--)
            link = &(*link)->next;
        struct operation *operation = *link;
        if (!step(endpoint, operation))
            continue;
        *link = operation->next;
        endpoint->count--;
        free(operation);
    }
}

static ssize_t post(struct endpoint *endpoint, const struct operation *wanted, uint64_t access)
{
    if (wanted->bytes > endpoint->bytes_max)
        return -FI_EMSGSIZE;
    ssize_t result = endpoint->count == UNDER_WAY_MAX ? -FI_EAGAIN : 0;
    struct operation *operation = result == 0 ? malloc(sizeof *operation) : NULL;
    if (!operation)
        return -FI_EAGAIN;
    pthread_mutex_lock(&lock);
    if (!is_local_right(endpoint->domain, wanted->descriptor, wanted->buffer, wanted->bytes, access)) {
        result = -FI_EINVAL;
        free(operation);
    } else {
        *operation = *wanted;
        struct endpoint *to = find_endpoint(operation->dest);
        operation->is_held = to && to->way == MOCK_HELD && !to->has_held;
        if (operation->is_held)
            to->has_held = true;
        endpoint->sent += operation->bytes;
        operation->next = endpoint->under_way;
        endpoint->under_way = operation;
        endpoint->count++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static ssize_t send_message(struct fid_ep *fid, const void *buffer, size_t bytes, void *descriptor, fi_addr_t dest,
                            void *context)
{
    struct endpoint *endpoint = (struct endpoint *)fid;
    const struct operation operation = {.dest = endpoint->peers->numbers[dest],
                                        .buffer = (char *)(uintptr_t)buffer,
                                        .bytes = bytes,
                                        .descriptor = descriptor,
                                        .context = context};
    return post(endpoint, &operation, FI_SEND);
}

static ssize_t write_data(struct fid_ep *fid, const void *buffer, size_t bytes, void *descriptor, uint64_t data, fi_addr_t dest,
                          uint64_t at, uint64_t key, void *context)
{
    struct endpoint *endpoint = (struct endpoint *)fid;
    const struct operation operation = {.is_write = true,
                                        .dest = endpoint->peers->numbers[dest],
                                        .key = key,
                                        .at = at,
                                        .data = data,
                                        .buffer = (char *)(uintptr_t)buffer,
                                        .bytes = bytes,
                                        .descriptor = descriptor,
                                        .context = context};
    if (endpoint->emulates_writes) /* a real one would emulate it: a caller that checked first does not want that */
        return -FI_EOPNOTSUPP;
    return data > UINT32_MAX ? -FI_EINVAL : post(endpoint, &operation, FI_WRITE);
}

/* Receives are not used in the order in which they were posted. */
static ssize_t post_receive(struct fid_ep *fid, void *buffer, size_t bytes, void *descriptor, fi_addr_t source, void *context)
{
    struct endpoint *endpoint = (struct endpoint *)fid;
    struct operation *receive = calloc(1, sizeof *receive);
    (void)source;
    if (!receive)
        return -FI_EAGAIN;
    *receive = (struct operation){.buffer = buffer, .bytes = bytes, .descriptor = descriptor, .context = context};
    pthread_mutex_lock(&lock);
    const bool is_right = is_local_right(endpoint->domain, descriptor, buffer, bytes, FI_RECV);
    if (is_right) {
        receive->next = endpoint->receives;
        endpoint->receives = receive;
    }
    pthread_mutex_unlock(&lock);
    if (!is_right)
        free(receive);
    return is_right ? 0 : -FI_EINVAL;
}

/* ---- Queues ---- */

static ssize_t read_queue(struct fid_cq *fid, void *buffer, size_t count)
{
    struct queue *queue = (struct queue *)fid;
    struct fi_cq_data_entry *entries = buffer;
    size_t got = 0;
    pthread_mutex_lock(&lock);
    for (struct endpoint *endpoint = endpoints; endpoint; endpoint = endpoint->next) {
        if (endpoint->queue == queue)
            progress(endpoint);
    }
    while (got < count && queue->first && !queue->first->error)
        entries[got++] = pop(queue).entry;
    const bool is_error = got == 0 && queue->first && queue->first->error;
    pthread_mutex_unlock(&lock);
    return got ? (ssize_t)got : is_error ? -FI_EAVAIL : -FI_EAGAIN;
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *entry, uint64_t flags)
{
    struct queue *queue = (struct queue *)fid;
    (void)flags;
    pthread_mutex_lock(&lock);
    const bool is_there = queue->first && queue->first->error;
    if (is_there) {
        const struct completion completion = pop(queue);
        entry->op_context = completion.entry.op_context;
        entry->flags = completion.entry.flags;
        entry->err = completion.error;
    }
    pthread_mutex_unlock(&lock);
    return is_there ? 1 : -FI_EAGAIN;
}

static const char *explain(struct fid_cq *fid, int error, const void *data, char *text, size_t bytes)
{
    (void)fid, (void)error, (void)data;
    snprintf(text, bytes, "the mock says so");
    return text;
}

static int close_queue(struct fid *fid)
{
    struct queue *queue = (struct queue *)fid;
    while (queue->first)
        pop(queue);
    free(queue);
    return 0;
}

static struct fi_ops queue_fid_ops = {.size = sizeof queue_fid_ops, .close = close_queue};
static struct fi_ops_cq queue_ops = {.size = sizeof queue_ops, .read = read_queue, .readerr = read_error, .strerror = explain};

static int open_queue(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **fid, void *context)
{
    (void)domain, (void)context;
    if (attr->wait_obj != FI_WAIT_NONE)
        return -FI_ENOSYS;
    struct queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return -FI_ENOMEM;
    queue->end = &queue->first;
    queue->size = attr->size;
    queue->fid.fid.fclass = FI_CLASS_CQ;
    queue->fid.fid.ops = &queue_fid_ops;
    queue->fid.ops = &queue_ops;
    *fid = &queue->fid;
    return 0;
}

/* ---- Peers ---- */

static int insert_peer(struct fid_av *fid, const void *address, size_t count, fi_addr_t *peer, uint64_t flags, void *context)
{
    struct peers *peers = (struct peers *)fid;
    uint64_t *numbers = reallocarray(peers->numbers, peers->count + 1, sizeof *numbers);
    (void)flags, (void)context;
    if (!numbers || count != 1)
        return -FI_ENOMEM;
    memcpy(&numbers[peers->count], address, sizeof *numbers);
    peers->numbers = numbers;
    *peer = peers->count++;
    return 1;
}

static const char *print_address(struct fid_av *fid, const void *address, char *text, size_t *bytes)
{
    uint64_t number;
    (void)fid;
    memcpy(&number, address, sizeof number);
    snprintf(text, *bytes, "fi_addr_mock://%llu", (unsigned long long)number);
    return text;
}

static int close_peers(struct fid *fid)
{
    free(((struct peers *)fid)->numbers);
    free(fid);
    return 0;
}

static struct fi_ops peers_fid_ops = {.size = sizeof peers_fid_ops, .close = close_peers};
static struct fi_ops_av peers_ops = {.size = sizeof peers_ops, .insert = insert_peer, .straddr = print_address};

static int open_peers(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **fid, void *context)
{
    struct peers *peers = calloc(1, sizeof *peers);
    (void)domain, (void)attr, (void)context;
    if (!peers)
        return -FI_ENOMEM;
    peers->fid.fid.fclass = FI_CLASS_AV;
    peers->fid.fid.ops = &peers_fid_ops;
    peers->fid.ops = &peers_ops;
    *fid = &peers->fid;
    return 0;
}

/* ---- Endpoints ---- */

static void free_operations(struct operation *operation)
{
    while (operation) {
        struct operation *next = operation->next;
        free(operation);
        operation = next;
    }
}

static int close_endpoint(struct fid *fid)
{
    struct endpoint **link = &endpoints;
    pthread_mutex_lock(&lock);
    while (*link && (void *)*link != fid)
        link = &(*link)->next;
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (*link)
        *link = endpoint->next;
    pthread_mutex_unlock(&lock);
    free_operations(endpoint->under_way);
    free_operations(endpoint->receives);
    free(endpoint);
    return 0;
}

static int bind_endpoint(struct fid *fid, struct fid *other, uint64_t flags)
{
    struct endpoint *endpoint = (struct endpoint *)fid;
    (void)flags;
    if (other->fclass == FI_CLASS_AV)
        endpoint->peers = (struct peers *)other;
    else
        endpoint->queue = (struct queue *)other;
    return 0;
}

static int control_endpoint(struct fid *fid, int command, void *arg)
{
    struct endpoint *endpoint = (struct endpoint *)fid;
    (void)arg;
    if (command != FI_ENABLE || !endpoint->peers || !endpoint->queue)
        return -FI_EINVAL;
    pthread_mutex_lock(&lock);
    endpoint->number = ++last_number;
    endpoint->next = endpoints;
    endpoints = endpoint;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int get_name(struct fid *fid, void *address, size_t *bytes)
{
    if (*bytes < ADDRESS_BYTES)
        return -FI_ETOOSMALL;
    memset(address, 0, ADDRESS_BYTES);
    memcpy(address, &((struct endpoint *)fid)->number, sizeof(uint64_t));
    *bytes = ADDRESS_BYTES;
    return 0;
}

static struct fi_ops endpoint_fid_ops = {
    .size = sizeof endpoint_fid_ops, .close = close_endpoint, .bind = bind_endpoint, .control = control_endpoint};
/* Adapters that cannot write are called efa_N, like the first EFA adapters. */
static int get_option(struct fid *fid, int level, int name, void *value, size_t *bytes)
{
    const struct endpoint *endpoint = (struct endpoint *)fid;
    if (level != FI_OPT_ENDPOINT || name != -(0xefa << 16) + 2 || *bytes < sizeof(bool))
        return -FI_ENOPROTOOPT;
    *(bool *)value = endpoint->emulates_writes;
    *bytes = sizeof(bool);
    return 0;
}

/* Some adapters read device memory by calls of the device's driver. */
static int set_option(struct fid *fid, int level, int name, const void *value, size_t bytes)
{
    const struct endpoint *endpoint = (struct endpoint *)fid;
    if (level != FI_OPT_ENDPOINT || name != 10 || bytes != sizeof(bool) || *(const bool *)value)
        return -FI_ENOPROTOOPT;
    return strncmp(endpoint->domain->name, "calls", 5) == 0 ? -FI_EOPNOTSUPP : 0;
}

static struct fi_ops_ep option_ops = {.size = sizeof option_ops, .getopt = get_option, .setopt = set_option};
static struct fi_ops_cm name_ops = {.size = sizeof name_ops, .getname = get_name};
static struct fi_ops_msg message_ops = {.size = sizeof message_ops, .recv = post_receive, .send = send_message};
static struct fi_ops_rma write_ops = {.size = sizeof write_ops, .writedata = write_data};

static int open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **fid, void *context)
{
    struct endpoint *endpoint = calloc(1, sizeof *endpoint);
    (void)context;
    if (!endpoint)
        return -FI_ENOMEM;
    endpoint->domain = (struct domain *)domain;
    endpoint->bytes_max = info->ep_attr->max_msg_size;
    endpoint->fid.fid.fclass = FI_CLASS_EP;
    endpoint->fid.fid.ops = &endpoint_fid_ops;
    endpoint->fid.ops = &option_ops;
    endpoint->emulates_writes = info->domain_attr->name && strncmp(info->domain_attr->name, "efa_", 4) == 0;
    endpoint->fid.cm = &name_ops;
    endpoint->fid.msg = &message_ops;
    endpoint->fid.rma = &write_ops;
    *fid = &endpoint->fid;
    return 0;
}

/* ---- Domains and fabrics ---- */

static int free_fid(struct fid *fid)
{
    free(fid);
    return 0;
}

static struct fi_ops plain_ops = {.size = sizeof plain_ops, .close = free_fid};
static struct fi_ops_mr register_ops = {.size = sizeof register_ops, .reg = register_region, .regattr = register_attributes};
static struct fi_ops_domain domain_ops = {
    .size = sizeof domain_ops, .av_open = open_peers, .cq_open = open_queue, .endpoint = open_endpoint};

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **fid, void *context)
{
    struct domain *domain = calloc(1, sizeof *domain);
    (void)fabric, (void)context;
    if (!domain)
        return -FI_ENOMEM;
    snprintf(domain->name, sizeof domain->name, "%s", info->domain_attr->name);
    domain->modes = (uint64_t)info->domain_attr->mr_mode;
    domain->reads_devices = info->caps & FI_HMEM;
    domain->manages_resources = info->domain_attr->resource_mgmt == FI_RM_ENABLED;
    domain->fid.fid.fclass = FI_CLASS_DOMAIN;
    domain->fid.fid.ops = &plain_ops;
    domain->fid.ops = &domain_ops;
    domain->fid.mr = &register_ops;
    *fid = &domain->fid;
    return 0;
}

static struct fi_ops_fabric fabric_ops = {.size = sizeof fabric_ops, .domain = open_domain};

int mock_open_fabric(struct fid_fabric **fabric)
{
    *fabric = calloc(1, sizeof **fabric);
    if (!*fabric)
        return -FI_ENOMEM;
    (*fabric)->fid.fclass = FI_CLASS_FABRIC;
    (*fabric)->fid.ops = &plain_ops;
    (*fabric)->ops = &fabric_ops;
    return 0;
}
