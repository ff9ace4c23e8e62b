#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "bootstrap/sources.h"

/* PMI-1 is lines of text over the socket PMI_FD: "cmd=put kvsname=K key=A value=B\n" and an answer "cmd=put_result rc=0\n".
 * Other ranks see a value only after a barrier, so this source offers a gather and no store. Values are short texts, so bytes
 * are sent as hexadecimal, in chunks. */
#define LINE_MAX_BYTES 4096
#define CHUNK_BYTES 256
#define COMMAND_MS 10000

struct pmi1 {
    struct shoal_log *log;
    int fd;
    int rank, size;
    bool is_broken; /* an answer that the code no longer expects may still come */
    char name[256]; /* of the key space */
    char in[LINE_MAX_BYTES];
    size_t in_bytes;
};

static bool pmi1_is_set(const char *name)
{
    const char *value = getenv(name);
    return value && *value;
}

bool shoal_pmi1_is_present(void)
{
    return pmi1_is_set("PMI_FD") && pmi1_is_set("PMI_RANK") && pmi1_is_set("PMI_SIZE");
}

static bool send_line(const struct pmi1 *pmi, const char *line)
{
    const size_t bytes = strlen(line);
    size_t sent = 0;
    while (sent < bytes) {
        ssize_t now = send(pmi->fd, line + sent, bytes - sent, MSG_NOSIGNAL);
        if (now < 0 && errno == ENOTSOCK)
            now = write(pmi->fd, line + sent, bytes - sent);
        if (now < 0 && errno != EINTR)
            return false;
        sent += now > 0 ? (size_t)now : 0;
    }
    return true;
}

/* Moves one whole line out of the input. */
static bool take_line(struct pmi1 *pmi, char line[LINE_MAX_BYTES])
{
    const char *end = memchr(pmi->in, '\n', pmi->in_bytes);
    if (!end)
        return false;
    const size_t bytes = (size_t)(end - pmi->in);
    memcpy(line, pmi->in, bytes);
    line[bytes] = 0;
    pmi->in_bytes -= bytes + 1;
    memmove(pmi->in, end + 1, pmi->in_bytes);
    return true;
}

/* Returns 0, ETIMEDOUT or another errno. */
static int receive_line(struct pmi1 *pmi, char line[LINE_MAX_BYTES], uint64_t deadline_ns)
{
    while (!take_line(pmi, line)) {
        const uint64_t now_ns = shoal_clock_ns();
        if (now_ns >= deadline_ns)
            return ETIMEDOUT;
        if (pmi->in_bytes == sizeof pmi->in)
            return EPROTO;
        const uint64_t ms = (deadline_ns - now_ns) / SHOAL_NS_PER_MS + 1;
        struct pollfd polled = {.fd = pmi->fd, .events = POLLIN};
        if (poll(&polled, 1, (int)(ms < 1000000 ? ms : 1000000)) <= 0)
            continue;
        const ssize_t got = read(pmi->fd, pmi->in + pmi->in_bytes, sizeof pmi->in - pmi->in_bytes);
        if (got == 0)
            return ECONNRESET;
        if (got < 0 && errno != EINTR && errno != EAGAIN)
            return errno;
        pmi->in_bytes += got > 0 ? (size_t)got : 0;
    }
    return 0;
}

/* Copies the text after " word=" up to the next blank. Returns false if the word is absent or the text too long. */
static bool find_word(const char *line, const char *word, char *value, size_t value_bytes)
{
    const size_t word_bytes = strlen(word);
    for (const char *at = line; at; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strncmp(at, word, word_bytes) != 0 || at[word_bytes] != '=')
            continue;
        const char *start = at + word_bytes + 1;
        const size_t bytes = strcspn(start, " ");
        if (bytes >= value_bytes)
            return false;
        memcpy(value, start, bytes);
        value[bytes] = 0;
        return true;
    }
    return false;
}

/* Sends a command and waits for the named answer. The caller logs the error, if any. */
static int pmi1_ask(struct pmi1 *pmi, const char *command, const char *answer, char line[LINE_MAX_BYTES], uint64_t deadline_ns)
{
    char word[64], rc[16];
    if (pmi->is_broken)
        return ENOTCONN;
    int error = send_line(pmi, command) ? receive_line(pmi, line, deadline_ns) : errno;
    pmi->is_broken = error != 0;
    if (!error && (!find_word(line, "cmd", word, sizeof word) || strcmp(word, answer) != 0))
        error = EPROTO;
    if (!error && find_word(line, "rc", rc, sizeof rc) && strcmp(rc, "0") != 0)
        error = ENOENT;
    return error;
}

static enum shoal_status pmi1_fail(const struct pmi1 *pmi, const char *what, int error)
{
    return shoal_log_fail(pmi->log, SHOAL_ERR_SYSTEM, "bootstrap", "the launcher's PMI-1 (PMI_FD=%d) refused %s: %s", pmi->fd,
                          what, strerror(error));
}

static uint64_t soon_ns(void)
{
    return shoal_clock_ns() + COMMAND_MS * SHOAL_NS_PER_MS;
}

static enum shoal_status put_chunk(struct pmi1 *pmi, const char *key, const unsigned char *data, size_t bytes)
{
    static const char digits[] = "0123456789abcdef";
    char hex[2 * CHUNK_BYTES + 1];
    for (size_t i = 0; i < bytes; i++) {
        hex[2 * i] = digits[data[i] >> 4];
        hex[2 * i + 1] = digits[data[i] & 15];
    }
    hex[2 * bytes] = 0;
    char command[LINE_MAX_BYTES], line[LINE_MAX_BYTES];
    snprintf(command, sizeof command, "cmd=put kvsname=%s key=%s value=%s\n", pmi->name, key, hex);
    const int error = pmi1_ask(pmi, command, "put_result", line, soon_ns());
    return error ? pmi1_fail(pmi, "put", error) : SHOAL_OK;
}

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse_hex(const char *hex, unsigned char *data, size_t bytes)
{
    if (strlen(hex) != 2 * bytes)
        return false;
    for (size_t i = 0; i < bytes; i++) {
        const int high = digit_of(hex[2 * i]), low = digit_of(hex[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        data[i] = (unsigned char)(high * 16 + low);
    }
    return true;
}

static enum shoal_status get_chunk(struct pmi1 *pmi, const char *key, unsigned char *data, size_t bytes)
{
    char command[LINE_MAX_BYTES], line[LINE_MAX_BYTES], hex[2 * CHUNK_BYTES + 1];
    snprintf(command, sizeof command, "cmd=get kvsname=%s key=%s\n", pmi->name, key);
    int error = pmi1_ask(pmi, command, "get_result", line, soon_ns());
    if (!error && (!find_word(line, "value", hex, sizeof hex) || !parse_hex(hex, data, bytes)))
        error = EPROTO;
    return error ? pmi1_fail(pmi, "get", error) : SHOAL_OK;
}

static enum shoal_status barrier(struct pmi1 *pmi, uint32_t timeout_ms)
{
    char line[LINE_MAX_BYTES];
    const int error = pmi1_ask(pmi, "cmd=barrier_in\n", "barrier_out", line, shoal_clock_ns() + timeout_ms * SHOAL_NS_PER_MS);
    if (error == ETIMEDOUT)
        return shoal_log_fail(
            pmi->log, SHOAL_ERR_TIMEOUT, "bootstrap",
            "not all of ranks 0 to %d came within %u ms (SHOAL_BOOTSTRAP_TIMEOUT_MS, or create_timeout_ms), and PMI-1 "
            "does not report which; did all start, and call shoal_comm_create?",
            pmi->size - 1, timeout_ms);
    return error ? pmi1_fail(pmi, "barrier", error) : SHOAL_OK;
}

static void pmi1_print_key(char key[128], const char *name, int rank, size_t chunk)
{
    snprintf(key, 128, "shoal/%.40s/%d/%zu", name, rank, chunk);
}

static enum shoal_status pmi1_gather(void *state, struct shoal_log *log, const char *name, const void *mine, void *all,
                                     size_t bytes, uint32_t timeout_ms)
{
    struct pmi1 *pmi = state;
    char key[128];
    if (strlen(name) > 40)
        return shoal_log_fail(log, SHOAL_ERR_ARGUMENT, "bootstrap", "\"%s\" is too long a name for PMI-1 (40 bytes)", name);
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        pmi1_print_key(key, name, pmi->rank, at / CHUNK_BYTES);
        SHOAL_TRY(put_chunk(pmi, key, (const unsigned char *)mine + at, shoal_min_size(bytes - at, CHUNK_BYTES)));
    }
    SHOAL_TRY(barrier(pmi, timeout_ms));
    for (int r = 0; r < pmi->size; r++) {
        unsigned char *value = (unsigned char *)all + (size_t)r * bytes;
        for (size_t at = 0; r != pmi->rank && at < bytes; at += CHUNK_BYTES) {
            pmi1_print_key(key, name, r, at / CHUNK_BYTES);
            SHOAL_TRY(get_chunk(pmi, key, value + at, shoal_min_size(bytes - at, CHUNK_BYTES)));
        }
    }
    return SHOAL_OK;
}

/* ---- the store, which PMI-1 does not have ---- */

static int no_set(void *arg, const char *key, const void *value, size_t bytes)
{
    (void)arg, (void)key, (void)value, (void)bytes;
    return -1;
}

static long no_get(void *arg, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    (void)arg, (void)key, (void)value, (void)capacity, (void)timeout_ms;
    return -2;
}

static int no_erase(void *arg, const char *key)
{
    (void)arg, (void)key;
    return -1;
}

/* If the program also uses MPI, ending the connection is MPI's task: after "finalize" the launcher reads nothing from it.
 * Without MPI this function ends it, because the launcher counts a process that leaves without "finalize" as crashed. */
static void close_pmi1(void *state)
{
    struct pmi1 *pmi = state;
    char line[LINE_MAX_BYTES];
    if (!dlsym(RTLD_DEFAULT, "MPI_Init"))
        (void)pmi1_ask(pmi, "cmd=finalize\n", "finalize_ack", line, shoal_clock_ns() + SHOAL_NS_PER_S);
    free(pmi);
}

static enum shoal_status greet(struct pmi1 *pmi)
{
    char line[LINE_MAX_BYTES];
    int error = pmi1_ask(pmi, "cmd=init pmi_version=1 pmi_subversion=1\n", "response_to_init", line, soon_ns());
    if (error == EPIPE || error == ECONNRESET)
        return shoal_log_fail(
            pmi->log, SHOAL_ERR_UNSUPPORTED, "bootstrap",
            "the launcher has closed PMI-1 (PMI_FD=%d): under MPICH's mpirun and srun --mpi=pmi2 a process can join once, and "
            "not after MPI_Finalize; make further communicators with shoal_comm_split",
            pmi->fd);
    if (error)
        return pmi1_fail(pmi, "init", error);
    error = pmi1_ask(pmi, "cmd=get_my_kvsname\n", "my_kvsname", line, soon_ns());
    if (!error && !find_word(line, "kvsname", pmi->name, sizeof pmi->name))
        error = EPROTO;
    return error ? pmi1_fail(pmi, "get_my_kvsname", error) : SHOAL_OK;
}

enum shoal_status shoal_pmi1_store_open(struct shoal_log *log, uint32_t timeout_ms, struct shoal_bootstrap *bootstrap)
{
    (void)timeout_ms;
    long fd = -1, rank = 0, size = 1;
    bool found;
    SHOAL_TRY(shoal_environment_number("PMI_FD", 0, 1 << 20, log, &found, &fd));
    SHOAL_TRY(shoal_environment_number("PMI_SIZE", 1, SHOAL_NUMBER_MAX, log, &found, &size));
    SHOAL_TRY(shoal_size_check(log, "bootstrap", "PMI_SIZE", 0, size));
    SHOAL_TRY(shoal_environment_number("PMI_RANK", 0, size - 1, log, &found, &rank));
    struct pmi1 *pmi = calloc(1, sizeof *pmi);
    if (!pmi)
        return shoal_log_fail(log, SHOAL_ERR_MEMORY, "bootstrap", "no memory for PMI-1");
    pmi->log = log;
    pmi->fd = (int)fd;
    pmi->rank = (int)rank;
    pmi->size = (int)size;
    const enum shoal_status status = greet(pmi);
    if (status != SHOAL_OK) {
        free(pmi);
        return status;
    }
    bootstrap->rank = pmi->rank;
    bootstrap->size = pmi->size;
    bootstrap->store = (struct shoal_store){no_set, no_get, no_erase, pmi};
    bootstrap->state = pmi;
    bootstrap->close = close_pmi1;
    bootstrap->gather = pmi1_gather;
    return SHOAL_OK;
}
