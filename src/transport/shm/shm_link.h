/* Control connections between endpoints of one host: Unix sockets (SOCK_SEQPACKET) of abstract, random name. Defines how two
 * endpoints connect, and the messages that pass descriptors afterwards. Only shm_endpoint.c uses this. */
#ifndef SHOAL_TRANSPORT_SHM_LINK_H
#define SHOAL_TRANSPORT_SHM_LINK_H

#include "bootstrap/bootstrap.h"
#include "link/auth.h"
#include "membership/same_host.h"
#include "memory/segment.h"

#define SHOAL_SHM_LINK_ID_BYTES 16

/* Sent by each rank to all others through the store. */
struct shoal_shm_address_blob {
    unsigned char id[SHOAL_SHM_LINK_ID_BYTES];   /* the endpoint's */
    unsigned char name[SHOAL_SHM_LINK_ID_BYTES]; /* its socket's: random, in hex on the wire */
    struct shoal_membership_identity who;
    uint32_t uid;
    char version[16];
};

/* Received from a peer. Descriptors are -1 if there are none; the function that takes one sets it to -1. */
struct shoal_shm_link_contact {
    int socket;
    int pidfd;
    int doorbell;
    uint64_t doorbell_pointer; /* within one process: its doorbell segment, with a reference for this rank */
    bool is_same_process;
};

struct shoal_shm_link_meeting {
    struct shoal_log *log;
    const struct shoal_bootstrap *bootstrap;
    struct shoal_segment *doorbell;
    int listener;
    uint64_t deadline_ns;
    struct shoal_shm_address_blob *blobs;    /* of all ranks; init fills this rank's */
    bool *is_wanted;                         /* ranks to meet */
    struct shoal_shm_link_contact *contacts; /* filled by shoal_shm_link_meet */
};

/* Opens the listening socket and fills this rank's address blob. */
SHOAL_MUST_USE enum shoal_status shoal_shm_link_meeting_init(struct shoal_shm_link_meeting *meeting, struct shoal_log *log,
                                                             const struct shoal_bootstrap *bootstrap,
                                                             const unsigned char *endpoint_id, struct shoal_segment *doorbell,
                                                             const char *host_id);
/* Connects to the wanted ranks below this one and accepts those above; each side proves that it knows the secret. */
SHOAL_MUST_USE enum shoal_status shoal_shm_link_meet(struct shoal_shm_link_meeting *meeting);
/* Closes the descriptors of contacts that were not taken over. */
void shoal_shm_link_meeting_fini(struct shoal_shm_link_meeting *meeting);

/* Messages after the meeting: */
enum shoal_shm_link_type {
    SHOAL_SHM_LINK_MEMORY = 1, /* key: number of a region; with its descriptor */
    SHOAL_SHM_LINK_GONE,       /* key: number of a region that was freed */
    SHOAL_SHM_LINK_COMM,       /* key: number of a communicator; with the descriptor of the sender's segment */
    SHOAL_SHM_LINK_REFUSED,    /* key: number of a communicator for which the sender could not make a segment */
    SHOAL_SHM_LINK_DEVICE      /* key: number of a communicator; bytes: 1 with a descriptor of memory on its device, else 0 */
};

struct shoal_shm_link_message {
    uint32_t type;
    uint32_t spare;
    uint64_t key;
    uint64_t bytes;
    uint64_t offset;
    uint64_t pointer; /* within one process: the segment, with a reference for the receiver */
};

/* Sends with descriptor fd (-1 for none). Returns false if the link is full or closed. Never blocks. */
bool shoal_shm_link_send(int socket, const struct shoal_shm_link_message *message, int fd);
/* Returns true if there is something to receive. */
bool shoal_shm_link_has_message(int socket);
/* Receives if there is something; *fd_out is -1 or belongs to the caller. */
bool shoal_shm_link_receive(int socket, struct shoal_shm_link_message *message_out, int *fd_out);
/* Polls for at most timeout_ms. For set-up only. */
void shoal_shm_link_wait(int socket, short events, int timeout_ms);

#endif
