/* How the values that rank 0 has joined come down through Shoal's own store. Every 32nd rank serves them to the ranks below it,
 * so that no rank sends them to more than a few dozen others. With up to 32 ranks, all are directly below rank 0, and no other
 * rank serves. One call at a time. */
#ifndef SHOAL_STORE_KV_TREE_H
#define SHOAL_STORE_KV_TREE_H

#include "store/kv_client.h"
#include "store/kv_server.h"

#define SHOAL_KV_TREE_RADIX 32

struct shoal_kv_tree {
    struct shoal_kv_client *root; /* to rank 0's store, which has the other servers' addresses; owned by the caller */
    struct shoal_kv_identity identity;
    struct shoal_kv_server *server; /* NULL if no rank is below, or none can be served */
    struct shoal_kv_client below;   /* to this rank's own server; not connected if this rank serves nobody */
    struct shoal_kv_client above;   /* not connected if rank 0 is above, or stands in */
    bool has_looked;                /* for the server above */
};

/* Returns `rank` with its last nonzero digit in base 32 set to 0. rank > 0. */
int shoal_kv_tree_parent(int rank);

/* Serves the ranks below, if there are any; they find the address in the root's store. If this rank cannot or may not serve,
 * they ask rank 0. */
void shoal_kv_tree_open(struct shoal_kv_tree *tree, struct shoal_kv_client *root, const struct shoal_kv_identity *identity,
                        bool may_serve);
/* Like the server of rank 0, first waits briefly until the ranks below have said BYE. */
void shoal_kv_tree_close(struct shoal_kv_tree *tree);

/* As in struct shoal_store. Failures of get are also stored in tree->root->failure. */
long shoal_kv_tree_get_above(struct shoal_kv_tree *tree, const char *key, void *value, size_t capacity, uint32_t timeout_ms);
int shoal_kv_tree_set_below(struct shoal_kv_tree *tree, const char *key, const void *value, size_t bytes);

#endif
