/* The one table of settings. A row is a name, a kind, a default and a sentence; parsing, printing and the hash that ranks
 * compare are made from it. Read once, when a context is made; constant afterwards. */
#ifndef SHOAL_BASE_SETTINGS_H
#define SHOAL_BASE_SETTINGS_H

#include "base/compiler.h"

#define SHOAL_SETTING_TEXT_MAX 256
#define SHOAL_SETTING_NAME_MAX 100

/* name, field, kind (NUMBER, BYTES, TEXT), default, agreed between ranks (1: part of the hash; not of texts), meaning */
#define SHOAL_SETTINGS_LIST(X)                                                                                                 \
    X(LOG, log, TEXT, "warn", 0, "log level: warn, info or debug; then, after commas, the modules that log (default: all)")    \
    X(LOG_FILE, log_file, TEXT, "", 0, "file for log lines instead of stderr; %h is the host, %p the process, %r the rank")    \
    X(RECORDER_FILE, recorder_file, TEXT, "auto", 0,                                                                           \
      "file that receives the flight recorder on failure; %h, %p, %r as above; auto: one in the temporary folder; no: none")   \
    X(TRACE_FILE, trace_file, TEXT, "", 0,                                                                                     \
      "file that receives the flight recorder when a communicator is finalized or freed; %h, %p, %r as above")                 \
    X(DUMP_SIGNAL, dump_signal, TEXT, "no", 0,                                                                                 \
      "USR1 or USR2: this signal writes the flight recorder at once, to SHOAL_RECORDER_FILE or the temporary folder")          \
    X(TIMEOUT_MS, timeout_ms, NUMBER, "600000", 0, "deadline of an operation, counted from posting")                           \
    X(WARN_MS, warn_ms, NUMBER, "10000", 0, "an operation, or the start, that waits so long logs which ranks are missing")     \
    X(BOOTSTRAP_TIMEOUT_MS, bootstrap_timeout_ms, NUMBER, "60000", 0, "how long ranks wait for each other at the start")       \
    X(PORT, port, NUMBER, "0", 0, "port where rank 0 listens at the start; 0: the first free one of the 16 after MASTER_PORT") \
    X(JOB_ID, job_id, TEXT, "", 0,                                                                                             \
      "a name for this job, the same on all its ranks; it tells apart two jobs at one MASTER_PORT")                            \
    X(SECRET, secret, TEXT, "", 0, "the job's secret; ranks prove to each other that they know it")                            \
    X(SECRET_FILE, secret_file, TEXT, "", 0, "file whose first line is the secret")                                            \
    X(HOST_ID, host_id, TEXT, "", 0, "ranks with equal values count as one host, ranks with different values as several")      \
    X(NIC, nic, TEXT, "", 0,                                                                                                   \
      "interfaces to other hosts, separated by commas: eth0, eth*, 10.0.0.0/16; ^ before a name excludes it")                  \
    X(LIBFABRIC, libfabric, TEXT, "", 0, "path of libfabric, instead of the newest one found")                                 \
    X(PROVIDER, provider, TEXT, "", 0, "libfabric's provider instead of the best one, see `shoal info --providers`")           \
    X(WRITES, writes, TEXT, "auto", 0,                                                                                         \
      "auto: libfabric writes into remote staging buffers where the adapter can; no: all data go in messages")                 \
    X(PORTS, ports, TEXT, "", 0, "ports to listen at for other hosts, such as 40000-40099, for firewalls")                     \
    X(CHUNK_BYTES, chunk_bytes, BYTES, "256K", 1, "size of a chunk, the range of a vector that one run of a plan covers")      \
    X(DEPTH, depth, NUMBER, "4", 1, "how many chunks are under way at once, 1 to 16")                                          \
    X(DIRECT_BYTES, direct_bytes, BYTES, "16K", 1,                                                                             \
      "most bytes of a rank that travel with its announcement, 0 to 16K; fewer in an all-reduce of many ranks")                \
    X(ALGORITHMS, algorithms, TEXT, "", 0,                                                                                     \
      "tuning overrides, such as reduce=owners,all-gather=direct@0-4K, or the name of a CSV file")                             \
    X(COUNTER_START, counter_start, NUMBER, "0", 1, "first value of sequence numbers and counters; for tests")                 \
    X(STORES, stores, TEXT, "auto", 0,                                                                                         \
      "how staging buffers are written: auto, cached (temporal stores) or streaming (non-temporal)")                           \
    X(KERNELS, kernels, TEXT, "auto", 0,                                                                                       \
      "instruction set of the reduction kernels: auto or a name from `shoal info --topology`")                                 \
    X(SPIN_US, spin_us, NUMBER, "50", 0, "how long a wait polls before it yields; 0 where ranks outnumber cores")              \
    X(YIELD_US, yield_us, NUMBER, "200", 0, "how long a wait then yields before it sleeps")                                    \
    X(MOVE, move, TEXT, "auto", 0, "auto: a rank that shares its core with another rank moves to a free core; no: it stays")   \
    X(MEMORY_LIMIT, memory_limit, BYTES, "0", 0,                                                                               \
      "limit of the shared memory that this process may reserve; 0: what the container leaves")                                \
    X(MEMORY_KEPT, memory_kept, BYTES, "256M", 0,                                                                              \
      "limit of the buffer cache, which keeps freed shared memory for the next use; 0: none")

struct shoal_settings {
#define SHOAL_SETTING_FIELD_NUMBER(field) uint64_t field;
#define SHOAL_SETTING_FIELD_BYTES(field) uint64_t field;
#define SHOAL_SETTING_FIELD_TEXT(field) char field[SHOAL_SETTING_TEXT_MAX];
#define SHOAL_SETTING_FIELD(name, field, kind, preset, agreed, text) SHOAL_SETTING_FIELD_##kind(field)
    SHOAL_SETTINGS_LIST(SHOAL_SETTING_FIELD)
#undef SHOAL_SETTING_FIELD
    uint64_t former_names; /* bits: which renamed settings were given by their former names */
    uint64_t tuning_hash;  /* of the tuning overrides that `algorithms` stands for: set by who reads them; part of the hash */
};

/* Fills *settings_out from the defaults, then the environment (SHOAL_<NAME>, or a former name of it), then overrides (a
 * NULL-terminated list of "SHOAL_NAME=value", or NULL). On ERR_ARGUMENT, error (of at least 256 bytes) says which value is
 * wrong and what is allowed. */
SHOAL_MUST_USE enum shoal_status shoal_settings_load(struct shoal_settings *settings_out, const char *const *overrides,
                                                     char *error, size_t error_bytes);

/* The same without overrides; but each variable that is wrong is told, and its default stays. */
void shoal_settings_load_right(struct shoal_settings *settings_out, void (*tell)(void *arg, const char *error), void *arg);

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/: adds bytes to a hash that began as SHOAL_HASH_START. */
#define SHOAL_HASH_START UINT64_C(14695981039346656037)
uint64_t shoal_hash_bytes(uint64_t hash, const void *data, size_t bytes);

/* The settings that must be equal on all ranks, as they travel: the values of the rows that say so, and the hash of the tuning
 * overrides. */
#define SHOAL_SETTING_COUNT_AGREED(name, field, kind, preset, agreed, text) +agreed
struct shoal_agreed {
    uint64_t values[1 SHOAL_SETTINGS_LIST(SHOAL_SETTING_COUNT_AGREED)];
};
#undef SHOAL_SETTING_COUNT_AGREED

struct shoal_agreed shoal_settings_agreed(const struct shoal_settings *settings);
bool shoal_agreed_is_same(const struct shoal_agreed *a, const struct shoal_agreed *b);
/* "SHOAL_DEPTH is 5 there, 4 on rank 0", where `where` is "on rank 0"; "" when they are the same. */
void shoal_agreed_print_difference(const struct shoal_agreed *there, const struct shoal_agreed *here, const char *where,
                                   char *text, size_t bytes);
/* A hash over the same, for the handshake. */
uint64_t shoal_settings_hash(const struct shoal_settings *settings);

/* The next variable of the environment that begins with SHOAL_ and is no setting, nor one that Shoal's programs set; false at
 * the end. *at begins as 0. *nearest_out is the setting it may be meant for, or NULL. */
bool shoal_settings_find_unknown(size_t *at, char name[SHOAL_SETTING_NAME_MAX], const char **nearest_out);

/* The next former name by which a value was given when these settings were loaded; false at the end. *at begins as 0. Both
 * names are static. */
bool shoal_settings_find_former(const struct shoal_settings *settings, size_t *at, const char **former_out,
                                const char **present_out);

/* "40000-40099", or one port; empty: both become 0. False when it is no such text. */
bool shoal_settings_parse_ports(const char *text, uint16_t *low_out, uint16_t *high_out);

/* The folder for files that nobody has named: TMPDIR, or /tmp. */
const char *shoal_settings_temporary_folder(void);

/* Prints the table. */
void shoal_settings_print(const struct shoal_settings *settings, FILE *out);

/* "256K" -> 262144. K, M, G are powers of 1024, an optional "iB" or "B" may follow. False when it is no such text. */
bool shoal_settings_parse_bytes(const char *text, uint64_t *bytes_out);

#endif
