/* A simulated transport: all ranks of one communicator in one process, in virtual time, with delay, reordering, loss and death.
 * The same seed and the same calls result in the same run, bit by bit. It does not know the engine: its owner calls the ranks
 * in turn and advances the time.
 *
 * Everything that a rank publishes (announcements, completions, signals, puts, whom it waits for, failures) becomes visible to
 * each peer after a separate delay, drawn from 0 to delay_ns_max. So the order is arbitrary, except that
 *   - increments of one counter become visible in order, and never before the bytes put to that peer earlier;
 *   - packets to a peer become visible in order; the news that the peer has taken some, and so has room, is also delayed;
 *   - memory reached by load and store (staging buffers, shared memory of ranks on one host) is real memory: stores are visible
 *     at once. Staging buffers are first filled with 0xFF, a NaN in every type, so that reads of unwritten bytes show.
 * The source of a put is captured when put is called: it may be overwritten afterwards. A lost event never arrives, nor does
 * any increment that must not become visible before it; then only a deadline helps. Failures, the news that a rank is gone, and
 * whom it waits for are not lost. An announcement is freed when its reader completes the operation, so that the address
 * sanitizer finds later reads.
 *
 * One thread drives all ranks; only `abort` may come from another thread or a signal handler. */
#ifndef SHOAL_TESTS_SIM_SIM_TRANSPORT_H
#define SHOAL_TESTS_SIM_SIM_TRANSPORT_H

#include "base/ranks.h"
#include "transport/transport.h"

#define SHOAL_SIM_RANKS_MAX SHOAL_RANKS_MAX
#define SHOAL_SIM_SEGMENTS_MAX 4096                     /* shared by one rank in its life */
#define SHOAL_SIM_SEGMENT_BYTES_MAX ((uint64_t)1 << 40) /* the range of a location's offset */
#define SHOAL_SIM_DELAY_NS_MAX UINT64_C(3600000000000)

struct shoal_sim;

struct shoal_sim_options {
    uint64_t seed;
    int size;
    uint64_t delay_ns_max;     /* 0: everything arrives at the instant of sending, in order, at the next advance */
    uint64_t detect_ns;        /* until the others know that a rank was killed; at least delay_ns_max is used */
    uint64_t counter_start;    /* first value of counters and of `completed` */
    unsigned drop_per_million; /* lost events in a million */
    unsigned busy_per_million; /* puts that return PENDING, in a million; below a million */
    const uint16_t *host;      /* host[rank]; ranks on different hosts can only put. NULL: one host. Copied. */
};

/* Errors: ERR_ARGUMENT (size, delays or probabilities out of range), ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_sim_create(const struct shoal_sim_options *options, struct shoal_sim **sim_out);

/* Frees the sim and the transports not yet destroyed. NULL is allowed. */
void shoal_sim_destroy(struct shoal_sim *sim);

/* The transport of a rank, NULL after it was destroyed. Its `destroy` leaves the sim in place. */
struct shoal_transport *shoal_sim_transport(struct shoal_sim *sim, int rank);

/* Virtual time, from 0. */
uint64_t shoal_sim_now_ns(const struct shoal_sim *sim);
/* Delivers the next event and moves the time to it. Returns false if no event is pending. */
bool shoal_sim_advance(struct shoal_sim *sim);
/* Delivers all events due until then, and moves the time there. */
void shoal_sim_advance_to(struct shoal_sim *sim, uint64_t ns);

/* From now on none of the rank's actions is visible. Its earlier messages arrive or not, by seed. */
void shoal_sim_kill(struct shoal_sim *sim, int rank);
/* Holds the rank's messages back until shoal_sim_cont, which sends them. */
void shoal_sim_stop(struct shoal_sim *sim, int rank);
void shoal_sim_cont(struct shoal_sim *sim, int rank);
/* Loses the next event from source to dest that can be lost. */
void shoal_sim_drop_next(struct shoal_sim *sim, int source, int dest);

/* Makes memory of a rank locatable; it must exist until shoal_sim_unshare. Errors: ERR_ARGUMENT (empty or too large),
 * ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_sim_share(struct shoal_sim *sim, int rank, void *memory, size_t bytes);
/* Pending puts to it are lost. */
void shoal_sim_unshare(struct shoal_sim *sim, int rank, const void *memory);

/* Returns a hash over all events delivered until now (FNV-1a); the `posted` time of announcements does not count. */
uint64_t shoal_sim_trace_hash(const struct shoal_sim *sim);
/* Returns the first breach of the transport's contract by a caller, such as a record reused too early, or NULL. */
const char *shoal_sim_breach(const struct shoal_sim *sim);

#endif
