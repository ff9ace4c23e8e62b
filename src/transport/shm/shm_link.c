#include "transport/shm/shm_link.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"

#define MAGIC UINT64_C(0x5348304c4c494e4b) /* "SH0LLINK" */
#define FDS_MAX 2
/* How long a wait of the meeting sleeps before it looks at its deadline again. */
#define POLL_MS 20
/* How many connections of strangers may wait for a greeting, in addition to those of all ranks. If all are silent, the oldest
 * is closed after CALLER_NS. */
#define STRANGERS_MAX 32
#define CALLER_NS (100 * SHOAL_NS_PER_MS)

/* First message in each direction; carries the sender's pidfd and doorbell. */
struct hello {
    uint64_t magic;
    int32_t rank;
    uint32_t spare;
    unsigned char from[SHOAL_SHM_LINK_ID_BYTES];
    unsigned char to[SHOAL_SHM_LINK_ID_BYTES];
    uint64_t doorbell_pointer;
    unsigned char mac[SHOAL_AUTH_MAC_BYTES];
};

/* ---- Packets with descriptors -------------------------------------------------------------------------------------------- */

union control {
    char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    struct cmsghdr align;
};

static bool send_packet(int socket, const void *data, size_t bytes, const int *fds, size_t fd_count)
{
    union control control;
    struct iovec part = {(void *)(uintptr_t)data, bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count) {
        memset(&control, 0, sizeof control);
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(rights), fds, sizeof(int) * fd_count);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)bytes;
}

/* Closes descriptors beyond fd_count. Returns the bytes received, 0 at the end, -1 if nothing is there. */
static ssize_t link_receive_packet(int socket, void *data, size_t bytes, int *fds, size_t fd_count)
{
    union control control;
    struct iovec part = {data, bytes};
    struct msghdr header = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    for (size_t i = 0; i < fd_count; i++)
        fds[i] = -1;
    ssize_t received;
    do
        received = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    /* If a peer ends without reading all our data, one ECONNRESET precedes the data that it has sent. */
    while (received < 0 && (errno == EINTR || errno == ECONNRESET));
    if (received < 0)
        return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        const size_t got = c->cmsg_type == SCM_RIGHTS ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < got; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (i < fd_count)
                fds[i] = fd;
            else
                close(fd);
        }
    }
    return received;
}

bool shoal_shm_link_send(int socket, const struct shoal_shm_link_message *message, int fd)
{
    return send_packet(socket, message, sizeof *message, &fd, fd >= 0 ? 1 : 0);
}

bool shoal_shm_link_has_message(int socket)
{
    char byte;
    ssize_t there;
    do
        there = recv(socket, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT);
    while (there < 0 && (errno == EINTR || errno == ECONNRESET)); /* see link_receive_packet */
    return there > 0;
}

bool shoal_shm_link_receive(int socket, struct shoal_shm_link_message *message_out, int *fd_out)
{
    struct shoal_shm_link_message message;
    int fd;
    if (link_receive_packet(socket, &message, sizeof message, &fd, 1) != (ssize_t)sizeof message) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    *message_out = message;
    *fd_out = fd;
    return true;
}

void shoal_shm_link_wait(int socket, short events, int timeout_ms)
{
    struct pollfd entry = {socket, events, 0};
    poll(&entry, 1, timeout_ms);
}

/* ---- Address blobs --------------------------------------------------------------------------------------------------- */

static void fill_blob(struct shoal_shm_address_blob *blob, const unsigned char *endpoint_id, const char *host_id,
                      const char *host)
{
    memcpy(blob->id, endpoint_id, sizeof blob->id);
    shoal_membership_identity_fill(&blob->who, host_id, host);
    snprintf(blob->version, sizeof blob->version, "%s", shoal_version());
    blob->uid = (uint32_t)geteuid();
}

static socklen_t abstract_address(const unsigned char *name, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    size_t used =
        1 + (size_t)snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "shoal-"); /* a zero byte first: abstract */
    for (size_t i = 0; i < SHOAL_SHM_LINK_ID_BYTES; i++)
        used += (size_t)snprintf(address->sun_path + used, sizeof address->sun_path - used, "%02x", name[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + used);
}

/* ---- Meeting ------------------------------------------------------------------------------------------------------------- */

static enum shoal_status listen_at(struct shoal_shm_link_meeting *meeting, const unsigned char *name)
{
    struct sockaddr_un address;
    const socklen_t length = abstract_address(name, &address);
    meeting->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (meeting->listener < 0 || bind(meeting->listener, (struct sockaddr *)&address, length) != 0 ||
        listen(meeting->listener, SOMAXCONN) != 0)
        return shoal_log_fail(meeting->log, SHOAL_ERR_SYSTEM, "shm", "cannot listen on a Unix socket: %s%s", strerror(errno),
                              errno == EMFILE ? " (raise `ulimit -n`)" : "");
    return SHOAL_OK;
}

enum shoal_status shoal_shm_link_meeting_init(struct shoal_shm_link_meeting *meeting, struct shoal_log *log,
                                              const struct shoal_bootstrap *bootstrap, const unsigned char *endpoint_id,
                                              struct shoal_segment *doorbell, const char *host_id)
{
    const size_t size = (size_t)bootstrap->size;
    *meeting = (struct shoal_shm_link_meeting){.log = log, .bootstrap = bootstrap, .doorbell = doorbell, .listener = -1};
    meeting->blobs = calloc(size, sizeof *meeting->blobs);
    meeting->is_wanted = calloc(size, sizeof *meeting->is_wanted);
    meeting->contacts = calloc(size, sizeof *meeting->contacts);
    enum shoal_status status = SHOAL_OK;
    if (!meeting->blobs || !meeting->is_wanted || !meeting->contacts)
        status = shoal_log_fail(log, SHOAL_ERR_MEMORY, "shm", "no memory to meet %d ranks", bootstrap->size);
    for (size_t r = 0; status == SHOAL_OK && r < size; r++)
        meeting->contacts[r] = (struct shoal_shm_link_contact){-1, -1, -1, 0, false};
    if (status == SHOAL_OK) {
        struct shoal_shm_address_blob *own = &meeting->blobs[bootstrap->rank];
        fill_blob(own, endpoint_id, host_id, log->host);
        status = shoal_auth_random(own->name, sizeof own->name);
        if (status == SHOAL_OK)
            status = listen_at(meeting, own->name);
    }
    if (status != SHOAL_OK)
        shoal_shm_link_meeting_fini(meeting);
    return status;
}

void shoal_shm_link_meeting_fini(struct shoal_shm_link_meeting *meeting)
{
    for (int r = 0; meeting->contacts && r < meeting->bootstrap->size; r++) {
        const int fds[] = {meeting->contacts[r].socket, meeting->contacts[r].pidfd, meeting->contacts[r].doorbell};
        for (size_t i = 0; i < SHOAL_COUNT_OF(fds); i++) {
            if (fds[i] >= 0)
                close(fds[i]);
        }
    }
    if (meeting->listener >= 0)
        close(meeting->listener);
    free(meeting->blobs);
    free(meeting->is_wanted);
    free(meeting->contacts);
    *meeting = (struct shoal_shm_link_meeting){.listener = -1};
}

static void sign(const struct shoal_bootstrap *bootstrap, struct hello *hello)
{
    const struct shoal_auth_span span = {hello, offsetof(struct hello, mac)};
    memset(hello->mac, 0, sizeof hello->mac);
    if (bootstrap->has_secret)
        (void)shoal_auth_mac(bootstrap->secret, &span, 1, hello->mac);
}

/* Without a secret there is nothing to prove, and perhaps no libsodium to compare with. */
static bool is_signed(const struct shoal_bootstrap *bootstrap, const struct hello *hello)
{
    struct hello expected = *hello;
    sign(bootstrap, &expected);
    return !bootstrap->has_secret || shoal_auth_equal(expected.mac, hello->mac, sizeof hello->mac);
}

/* Returns the process that opened the other end, with its numbers in this namespace. A process number of 0 means that it is not
 * visible here. */
static struct ucred shm_link_owner_of(int socket)
{
    struct ucred owner;
    socklen_t length = sizeof owner;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &owner, &length) != 0)
        owner = (struct ucred){.pid = 0, .uid = (uid_t)-1, .gid = (gid_t)-1};
    return owner;
}

static bool same_process(int socket)
{
    return shm_link_owner_of(socket).pid == getpid();
}

static bool same_user(int socket)
{
    return shm_link_owner_of(socket).uid == geteuid();
}

static enum shoal_status say_hello(struct shoal_shm_link_meeting *meeting, int socket, int rank)
{
    const int own = meeting->bootstrap->rank;
    struct hello hello;
    memset(&hello, 0, sizeof hello);
    hello.magic = MAGIC;
    hello.rank = own;
    memcpy(hello.from, meeting->blobs[own].id, sizeof hello.from);
    memcpy(hello.to, meeting->blobs[rank].id, sizeof hello.to);
    if (same_process(socket))
        hello.doorbell_pointer = (uintptr_t)shoal_segment_get(meeting->doorbell);
    sign(meeting->bootstrap, &hello);
    const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    const int fds[] = {meeting->doorbell->fd, pidfd};
    bool sent = false;
    int reason = EAGAIN;
    /* The kernel counts descriptors under way for each user (ETOOMANYREFS); the count falls as the others read theirs. */
    while (!sent && (reason == EAGAIN || reason == ETOOMANYREFS) && shoal_clock_ns() < meeting->deadline_ns) {
        sent = send_packet(socket, &hello, sizeof hello, fds, pidfd >= 0 ? 2 : 1);
        reason = errno;
        if (!sent)
            poll(NULL, 0, 1);
    }
    if (pidfd >= 0)
        close(pidfd);
    if (sent)
        return SHOAL_OK;
    return shoal_log_fail(meeting->log, SHOAL_ERR_SYSTEM, "shm", "cannot greet rank %d (process %d): %s", rank,
                          meeting->blobs[rank].who.pid, strerror(reason));
}

static enum shoal_status connect_to(struct shoal_shm_link_meeting *meeting, int rank)
{
    struct shoal_shm_link_contact *contact = &meeting->contacts[rank];
    struct sockaddr_un address;
    const socklen_t length = abstract_address(meeting->blobs[rank].name, &address);
    contact->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (contact->socket < 0)
        return shoal_log_fail(meeting->log, SHOAL_ERR_SYSTEM, "shm", "cannot open a Unix socket: %s%s", strerror(errno),
                              errno == EMFILE ? " (raise `ulimit -n`)" : "");
    while (connect(contact->socket, (struct sockaddr *)&address, length) != 0) {
        if (errno == EAGAIN && shoal_clock_ns() < meeting->deadline_ns) { /* the listener's queue is full now */
            poll(NULL, 0, 1);
            continue;
        }
        if (errno != EINTR)
            return shoal_log_fail(
                meeting->log, SHOAL_ERR_PEER_LOST, "shm",
                "cannot reach rank %d (process %d on %s) over a Unix socket: %s; either it ended, or it is in "
                "another network namespace",
                rank, meeting->blobs[rank].who.pid, meeting->blobs[rank].who.host, strerror(errno));
    }
    if (!same_user(contact->socket))
        return shoal_log_fail(meeting->log, SHOAL_ERR_AUTH, "shm", "rank %d runs as another user (uid %u, here %u)", rank,
                              meeting->blobs[rank].uid, (unsigned)geteuid());
    return say_hello(meeting, contact->socket, rank);
}

/* A greeting is accepted only from a process that the address blobs name. Returns false for a stranger, which is ignored. */
static bool shm_link_is_expected(const struct shoal_shm_link_meeting *meeting, const struct hello *hello, int fd)
{
    const int own = meeting->bootstrap->rank;
    return hello->magic == MAGIC && hello->rank >= 0 && hello->rank < meeting->bootstrap->size && hello->rank != own &&
           meeting->is_wanted[hello->rank] && memcmp(hello->from, meeting->blobs[hello->rank].id, sizeof hello->from) == 0 &&
           memcmp(hello->to, meeting->blobs[own].id, sizeof hello->to) == 0 && same_user(fd);
}

static enum shoal_status take_hello(struct shoal_shm_link_meeting *meeting, int socket, int *rank_out)
{
    struct hello hello;
    int fds[FDS_MAX];
    *rank_out = -1;
    const ssize_t received = link_receive_packet(socket, &hello, sizeof hello, fds, FDS_MAX);
    if (received < 0)
        return SHOAL_PENDING;
    if (received != (ssize_t)sizeof hello || !shm_link_is_expected(meeting, &hello, socket)) {
        for (int i = 0; i < FDS_MAX; i++) {
            if (fds[i] >= 0)
                close(fds[i]);
        }
        return SHOAL_OK;
    }
    if (fds[0] < 0)
        return shoal_log_fail(meeting->log, SHOAL_ERR_SYSTEM, "shm", "no descriptor left to meet rank %d: raise `ulimit -n`",
                              hello.rank);
    struct shoal_shm_link_contact *contact = &meeting->contacts[hello.rank];
    contact->doorbell = fds[0];
    contact->pidfd = fds[1];
    contact->doorbell_pointer = hello.doorbell_pointer;
    contact->is_same_process = same_process(socket);
    if (!is_signed(meeting->bootstrap, &hello))
        return shoal_log_fail(meeting->log, SHOAL_ERR_AUTH, "shm",
                              "rank %d (process %d) does not know the job's secret: SHOAL_SECRET must be the same on all ranks",
                              hello.rank, meeting->blobs[hello.rank].who.pid);
    *rank_out = hello.rank;
    return SHOAL_OK;
}

static int next_missing(const struct shoal_shm_link_meeting *meeting)
{
    for (int r = 0; r < meeting->bootstrap->size; r++) {
        if (meeting->is_wanted[r] && meeting->contacts[r].doorbell < 0)
            return r;
    }
    return -1;
}

static enum shoal_status check_deadline(struct shoal_shm_link_meeting *meeting, int missing)
{
    if (shoal_clock_ns() < meeting->deadline_ns)
        return SHOAL_OK;
    return shoal_log_fail(meeting->log, SHOAL_ERR_TIMEOUT, "shm", "rank %d (process %d on %s) did not answer in time", missing,
                          meeting->blobs[missing].who.pid, meeting->blobs[missing].who.host);
}

/* Waits for the greeting of a lower rank on this rank's connection to it. *rank_out is -1 if the connection closed. */
static enum shoal_status await_hello(struct shoal_shm_link_meeting *meeting, int socket, int missing, int *rank_out)
{
    enum shoal_status status;
    while ((status = take_hello(meeting, socket, rank_out)) == SHOAL_PENDING) {
        SHOAL_TRY(check_deadline(meeting, missing));
        shoal_shm_link_wait(socket, POLLIN, POLL_MS);
    }
    return status;
}

static enum shoal_status receive_lower(struct shoal_shm_link_meeting *meeting, int rank)
{
    int answered;
    SHOAL_TRY(await_hello(meeting, meeting->contacts[rank].socket, rank, &answered));
    if (answered == rank)
        return SHOAL_OK;
    return shoal_log_fail(
        meeting->log, SHOAL_ERR_PEER_LOST, "shm",
        "rank %d (process %d on %s) closed the connection during the greeting: it ended or refused this rank (see its log)",
        rank, meeting->blobs[rank].who.pid, meeting->blobs[rank].who.host);
}

/* ---- Accepting ----------------------------------------------------------------------------------------------------------- */

struct shm_link_caller {
    int socket;
    uint64_t since_ns;
};

/* Accepted connections that have not greeted yet, the oldest first. A peer greets as soon as it has connected. A stranger may
 * stay silent, so the meeting listens to all of these at once. */
struct shm_link_callers {
    int count, most;
    struct shm_link_caller *at; /* [most] */
    struct pollfd *entries;     /* [most + 1] scratch */
};

static void await_callers(const struct shm_link_callers *callers, int listener)
{
    for (int i = 0; i < callers->count; i++)
        callers->entries[i] = (struct pollfd){callers->at[i].socket, POLLIN, 0};
    callers->entries[callers->count] = (struct pollfd){callers->count < callers->most ? listener : -1, POLLIN, 0};
    poll(callers->entries, (nfds_t)callers->count + 1, POLL_MS);
}

static enum shoal_status accept_caller(struct shoal_shm_link_meeting *meeting, struct shm_link_callers *callers, int missing)
{
    if (callers->count == callers->most)
        return SHOAL_OK;
    const int fd = accept4(meeting->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0 && same_user(fd)) {
        callers->at[callers->count++] = (struct shm_link_caller){fd, shoal_clock_ns()};
    } else if (fd >= 0) {
        close(fd);
    } else if (errno == EMFILE || errno == ENFILE) {
        return shoal_log_fail(meeting->log, SHOAL_ERR_SYSTEM, "shm", "no descriptor for rank %d: raise `ulimit -n`", missing);
    }
    return SHOAL_OK;
}

/* Returns SHOAL_PENDING if the caller has not greeted yet. Otherwise its socket now belongs to a contact, or is closed. */
static enum shoal_status answer_caller(struct shoal_shm_link_meeting *meeting, int socket)
{
    int rank;
    const enum shoal_status status = take_hello(meeting, socket, &rank);
    if (status == SHOAL_PENDING)
        return SHOAL_PENDING;
    if (status != SHOAL_OK || rank < 0) {
        close(socket);
        return status;
    }
    meeting->contacts[rank].socket = socket;
    return say_hello(meeting, socket, rank);
}

static void remove_caller(struct shm_link_callers *callers, int i)
{
    callers->count--;
    memmove(&callers->at[i], &callers->at[i + 1], (size_t)(callers->count - i) * sizeof callers->at[0]);
}

static enum shoal_status answer_callers(struct shoal_shm_link_meeting *meeting, struct shm_link_callers *callers)
{
    for (int i = callers->count - 1; i >= 0; i--) {
        const enum shoal_status status = answer_caller(meeting, callers->at[i].socket);
        if (status == SHOAL_PENDING)
            continue;
        remove_caller(callers, i);
        SHOAL_TRY(status);
    }
    return SHOAL_OK;
}

static void close_oldest_if_full(struct shm_link_callers *callers)
{
    if (callers->count < callers->most || shoal_clock_ns() - callers->at[0].since_ns < CALLER_NS)
        return;
    close(callers->at[0].socket);
    remove_caller(callers, 0);
}

static enum shoal_status accept_higher(struct shoal_shm_link_meeting *meeting, struct shm_link_callers *callers)
{
    for (int missing = next_missing(meeting); missing >= 0; missing = next_missing(meeting)) {
        SHOAL_TRY(check_deadline(meeting, missing));
        await_callers(callers, meeting->listener);
        SHOAL_TRY(answer_callers(meeting, callers));
        close_oldest_if_full(callers);
        SHOAL_TRY(accept_caller(meeting, callers, missing));
    }
    return SHOAL_OK;
}

static enum shoal_status meet_higher(struct shoal_shm_link_meeting *meeting)
{
    struct shm_link_callers callers = {.most = STRANGERS_MAX};
    for (int r = meeting->bootstrap->rank + 1; r < meeting->bootstrap->size; r++)
        callers.most += meeting->is_wanted[r] != 0;
    callers.at = calloc((size_t)callers.most, sizeof *callers.at);
    callers.entries = calloc((size_t)callers.most + 1, sizeof *callers.entries);
    const enum shoal_status status =
        callers.at && callers.entries ? accept_higher(meeting, &callers)
                                      : shoal_log_fail(meeting->log, SHOAL_ERR_MEMORY, "shm", "no memory to meet other ranks");
    for (int i = 0; i < callers.count; i++)
        close(callers.at[i].socket);
    free(callers.at);
    free(callers.entries);
    return status;
}

enum shoal_status shoal_shm_link_meet(struct shoal_shm_link_meeting *meeting)
{
    const int own = meeting->bootstrap->rank;
    /* Meets one rank after the other, so that few descriptors are under way. Rank 0 accepts at once; each other rank accepts
     * when it has met those below. */
    for (int r = 0; r < own; r++) {
        if (!meeting->is_wanted[r])
            continue;
        SHOAL_TRY(connect_to(meeting, r));
        SHOAL_TRY(receive_lower(meeting, r));
    }
    return meet_higher(meeting);
}
