#include "store/kv_tree.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

/* Short, because rank 0 stands in for a rank that cannot be reached by then. */
#define JOIN_MS 2000

int shoal_kv_tree_parent(int rank)
{
    int span = SHOAL_KV_TREE_RADIX;
    while (rank % span == 0)
        span *= SHOAL_KV_TREE_RADIX;
    return rank - rank % span;
}

static bool serves_others(const struct shoal_link_hello *hello)
{
    return hello->rank > 0 && hello->rank % SHOAL_KV_TREE_RADIX == 0 && hello->rank + 1 < hello->size;
}

static void kv_tree_print_key(int rank, char key[32])
{
    snprintf(key, 32, "shoal/store/%d", rank);
}

/* ---- below ---- */

/* Listens on the interface by which this rank reaches rank 0, because others can reach it there. Returns 0 or an errno. */
static int listen_beside(const struct shoal_kv_client *root, struct shoal_address *address, int *listener_out)
{
    *address = (struct shoal_address){.bytes = sizeof address->socket};
    if (getsockname(root->link.fd, (struct sockaddr *)&address->socket, &address->bytes) != 0)
        return errno;
    shoal_address_port_put(address, 0);
    const int listener = shoal_kv_server_listen(address);
    if (listener < 0)
        return -listener;
    *listener_out = listener;
    return getsockname(listener, (struct sockaddr *)&address->socket, &address->bytes) == 0 ? 0 : errno;
}

static bool start_server(struct shoal_kv_tree *tree, struct shoal_address *address)
{
    int listener = -1;
    const int error = listen_beside(tree->root, address, &listener);
    if (error)
        shoal_log_line(tree->root->log, SHOAL_LOG_INFO, "bootstrap",
                       "cannot listen, so rank 0 serves the ranks below this "
                       "one: %s",
                       strerror(error));
    else if (shoal_kv_server_start(listener, &tree->identity, tree->root->log, &tree->server) == SHOAL_OK)
        return true;
    if (listener >= 0)
        close(listener);
    return false;
}

static void serve_below(struct shoal_kv_tree *tree)
{
    struct shoal_address address;
    char key[32], reason[SHOAL_KV_REASON_MAX];
    if (!start_server(tree, &address))
        return;
    const uint64_t deadline_ns = shoal_clock_ns() + JOIN_MS * SHOAL_NS_PER_MS;
    kv_tree_print_key(tree->below.owner, key);
    if (shoal_kv_client_join(&tree->below, &address, &tree->identity, deadline_ns, deadline_ns, reason) == SHOAL_KV_JOIN_DONE)
        (void)shoal_kv_client_set(tree->root, key, &address, sizeof address); /* the next gather will fail as well */
}

int shoal_kv_tree_set_below(struct shoal_kv_tree *tree, const char *key, const void *value, size_t bytes)
{
    return shoal_kv_client_set(&tree->below, key, value, bytes);
}

/* ---- above ---- */

static bool is_address(const struct shoal_address *address, long bytes)
{
    return bytes == sizeof *address && address->bytes <= sizeof address->socket &&
           (address->socket.ss_family == AF_INET || address->socket.ss_family == AF_INET6);
}

/* When there is something to get from above, its address is either set or never will be, so one look is enough. */
static void look_above(struct shoal_kv_tree *tree)
{
    struct shoal_address address;
    char key[32], reason[SHOAL_KV_REASON_MAX];
    tree->has_looked = true;
    if (tree->above.owner == 0)
        return;
    kv_tree_print_key(tree->above.owner, key);
    if (!is_address(&address, shoal_kv_client_get(tree->root, key, &address, sizeof address, 0)))
        return;
    const uint64_t deadline_ns = shoal_clock_ns() + JOIN_MS * SHOAL_NS_PER_MS;
    if (shoal_kv_client_join(&tree->above, &address, &tree->identity, deadline_ns, deadline_ns, reason) ==
        SHOAL_KV_JOIN_ELSEWHERE)
        shoal_log_line(tree->root->log, SHOAL_LOG_INFO, "bootstrap",
                       "rank %d's store cannot be reached, so rank 0's is used instead: %s; is a firewall between them?",
                       tree->above.owner, reason);
}

long shoal_kv_tree_get_above(struct shoal_kv_tree *tree, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
{
    if (!tree->has_looked)
        look_above(tree);
    if (tree->above.link.fd < 0)
        return shoal_kv_client_get(tree->root, key, value, capacity, timeout_ms);
    const long got = shoal_kv_client_get(&tree->above, key, value, capacity, timeout_ms);
    if (got < -1)
        tree->root->failure = tree->above.failure;
    return got;
}

/* ---- above and below ---- */

void shoal_kv_tree_open(struct shoal_kv_tree *tree, struct shoal_kv_client *root, const struct shoal_kv_identity *identity,
                        bool may_serve)
{
    const int rank = (int)identity->link.hello.rank;
    tree->root = root;
    tree->identity = *identity;
    shoal_kv_client_init(&tree->below, root->log);
    shoal_kv_client_init(&tree->above, root->log);
    tree->below.owner = rank;
    tree->above.owner = rank > 0 ? shoal_kv_tree_parent(rank) : 0;
    if (may_serve && serves_others(&identity->link.hello))
        serve_below(tree);
}

void shoal_kv_tree_close(struct shoal_kv_tree *tree)
{
    shoal_kv_client_leave(&tree->above);
    shoal_kv_client_leave(&tree->below);
    if (tree->server)
        shoal_kv_server_stop(tree->server);
    shoal_kv_client_fini(&tree->above);
    shoal_kv_client_fini(&tree->below);
    explicit_bzero(tree->identity.link.secret, sizeof tree->identity.link.secret);
}
