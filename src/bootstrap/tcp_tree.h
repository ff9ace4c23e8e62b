/* How the values that rank 0 has joined come down where the store is its own: every 32nd rank serves them on to those below it,
 * so that no rank sends them to more than a few dozen others. Up to 32 ranks all are right below rank 0, and nobody else
 * serves. One call at a time. */
#ifndef SHOAL_BOOTSTRAP_TCP_TREE_H
#define SHOAL_BOOTSTRAP_TCP_TREE_H

#include "bootstrap/tcp_client.h"
#include "bootstrap/tcp_server.h"

#define SHOAL_TCP_TREE_RADIX 32

struct shoal_tcp_tree {
    struct shoal_tcp_client
        *root; /* to rank 0's store, where the addresses of the others are; its connection is the caller's */
    struct shoal_tcp_identity identity;
    struct shoal_tcp_server *server; /* NULL where nobody is below, or nobody can be served */
    struct shoal_tcp_client below;   /* to the own server; not connected: this rank serves nobody */
    struct shoal_tcp_client above;   /* not connected: rank 0 is above, or stands in */
    bool has_looked;                 /* for the one above */
};

/* The rank with its last digit in base 32 that is not 0 set to 0. rank > 0. */
int shoal_tcp_tree_parent(int rank);

/* Serves those below, where there are any: they find the address in the root's store. Where this rank cannot or may not, they
 * ask rank 0. */
void shoal_tcp_tree_open(struct shoal_tcp_tree *tree, struct shoal_tcp_client *root, const struct shoal_tcp_identity *identity,
                         bool may_serve);
/* As the server of rank 0: waits a little until those below have said that they are done. */
void shoal_tcp_tree_close(struct shoal_tcp_tree *tree);

/* As in struct shoal_store; failures of get are found in tree->root->failure too. */
long shoal_tcp_tree_get_above(struct shoal_tcp_tree *tree, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
int shoal_tcp_tree_set_below(struct shoal_tcp_tree *tree, const char *key, const void *value, size_t bytes);

#endif
