/* A simulated transport: all ranks of one communicator in one process, in virtual time, with delay, reordering, loss and death.
 * The same seed and the same calls give the same run, bit by bit. It knows no engine: its owner calls the ranks in turn and
 * advances the time.
 *
 * Everything that a rank publishes (announcements, completions, signals, puts, whom it waits for, failures) becomes visible to
 * each peer after a delay of its own, drawn from 0 to delay_ns_max, so in any order, but
 *   - increments of one counter become visible in order, and an increment never before the bytes put to that peer before it;
 *   - packets to a peer become visible in order; that the peer has taken some, and made room, is told with a delay too;
 *   - memory reached by load and store (staging buffers, shared memory of ranks on one host) is real memory: stores are seen at
 * once.
 *     Staging buffers begin filled with 0xFF, a NaN in every type, so that reading what nobody wrote shows.
 * The source of a put is captured when put is called: it may be overwritten afterwards.
 * A lost event never arrives, nor does any increment that must not become visible before it; then only a deadline helps.
 * Failures, the news that a rank is gone, and whom it waits for are not lost. An announcement is freed when its reader
 * completes the operation, so that the address sanitizer finds who reads it later.
 *
 * One thread drives all ranks; only `abort` may come from another thread or a signal handler. */
#ifndef SHOAL_TESTS_SIM_SIM_TRANSPORT_H
#define SHOAL_TESTS_SIM_SIM_TRANSPORT_H

#include "base/ranks.h"
#include "transport/transport.h"

#define SHOAL_SIM_RANKS_MAX SHOAL_RANKS_MAX
#define SHOAL_SIM_SEGMENTS_MAX 4096                     /* shared by one rank over its life */
#define SHOAL_SIM_SEGMENT_BYTES_MAX ((uint64_t)1 << 40) /* what the offset of a location holds */
#define SHOAL_SIM_DELAY_NS_MAX UINT64_C(3600000000000)

struct shoal_sim;

struct shoal_sim_options {
    uint64_t seed;
    int size;
    uint64_t delay_ns_max;     /* 0: everything arrives at the instant it was sent, in order, at the next advance */
    uint64_t detect_ns;        /* until the others know that a rank was killed; at least delay_ns_max is used */
    uint64_t counter_start;    /* first value of counters and of `completed` */
    unsigned drop_per_million; /* how many events are lost, of a million */
    unsigned busy_per_million; /* how many puts answer PENDING, of a million; below a million */
    const uint16_t *host;      /* host[rank]; ranks on different ones can only put. NULL: all on one. Copied. */
};

/* Errors: ERR_ARGUMENT (size, delays or probabilities out of range), ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_sim_create(const struct shoal_sim_options *options, struct shoal_sim **sim_out);

/* Frees the sim and the transports not yet destroyed. NULL is allowed. */
void shoal_sim_destroy(struct shoal_sim *sim);

/* The transport of a rank, NULL after it was destroyed. Its `destroy` leaves the sim in place. */
struct shoal_transport *shoal_sim_transport(struct shoal_sim *sim, int rank);

/* Virtual time, from 0. */
uint64_t shoal_sim_now_ns(const struct shoal_sim *sim);
/* Delivers the next event and moves the time to it; false when nothing is under way. */
bool shoal_sim_advance(struct shoal_sim *sim);
/* Delivers all that is due until then, and moves the time there. */
void shoal_sim_advance_to(struct shoal_sim *sim, uint64_t ns);

/* From now on nothing the rank does is seen. Its earlier messages arrive or not, by seed. */
void shoal_sim_kill(struct shoal_sim *sim, int rank);
/* The rank's messages are held back until shoal_sim_cont, and sent then. */
void shoal_sim_stop(struct shoal_sim *sim, int rank);
void shoal_sim_cont(struct shoal_sim *sim, int rank);
/* The next event from source to dest that can be lost is lost. */
void shoal_sim_drop_next(struct shoal_sim *sim, int source, int dest);

/* Makes memory of a rank locatable; it must stay until shoal_sim_unshare. Errors: ERR_ARGUMENT (empty or too large),
 * ERR_MEMORY. */
SHOAL_MUST_USE enum shoal_status shoal_sim_share(struct shoal_sim *sim, int rank, void *memory, size_t bytes);
/* Puts to it that are still under way are lost. */
void shoal_sim_unshare(struct shoal_sim *sim, int rank, const void *memory);

/* A hash over all events delivered so far (FNV-1a); the `posted` time of announcements does not count. */
uint64_t shoal_sim_trace_hash(const struct shoal_sim *sim);
/* The first breach of the transport's contract by a caller, such as a record reused too early; NULL while there is none. */
const char *shoal_sim_breach(const struct shoal_sim *sim);

#endif
