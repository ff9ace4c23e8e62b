/* All-reduce over H hosts of any sizes. With S ranks on the largest host the piece is cut into S slices of H blocks. On each
 * host slice s is carried by one rank (the local rank s mod L of L). Within the host a carrier reduces its slices from all
 * local ranks; between hosts the carriers of a slice form a one-hop mesh: block h of the slice is owned by host h, whose
 * carrier gets a partial sum from each other host, adds them in the order of hosts, and puts the result back to all. Locally,
 * results are written to outputs that are shared, and copied by their ranks out of the carriers' windows where they are not.
 * Cost, n bytes and L ranks on each host: a rank sends and receives 2 n (H - 1) / (H L) in two crossings of the network; inside
 * the host as allreduce_owners.
 *
 * Windows of a carrier: part OWN holds its staged input, its host's partial sums and its own results; one part per other
 * host holds what that host's carriers put, partials of blocks owned here and results of blocks owned there. Local ranks copy
 * out of these parts too. So each rank gets one credit from each other host, and that says that the whole host has finished:
 * its sender, the carrier of the rank's first slice, gives it when all its neighbours are done. */
#include "collective/collective.h"

struct mesh {
    struct shoal_plan *plan;
    const struct shoal_view *view;
    int rank;
    int hosts;
    int slices;
    int host;                                 /* own; hosts are numbered in the order of their lowest ranks */
    int local;                                /* own number on the host */
    uint16_t start[SHOAL_PLAN_PARTS_MAX + 1]; /* the ranks of host g are member[start[g]] to member[start[g + 1] - 1] */
    uint16_t member[SHOAL_PLAN_RANKS_MAX];
};

static int host_size(const struct mesh *mesh, int host)
{
    return mesh->start[host + 1] - mesh->start[host];
}

static int carrier(const struct mesh *mesh, int host, int slice)
{
    return mesh->member[mesh->start[host] + slice % host_size(mesh, host)];
}

/* Peer i = 1, 2 ... of the own host, each rank beginning with the next one. */
static int neighbour(const struct mesh *mesh, int i)
{
    return carrier(mesh, mesh->host, mesh->local + i);
}

static int neighbour_count(const struct mesh *mesh)
{
    return host_size(mesh, mesh->host) - 1;
}

static bool is_first_of_host(const struct shoal_view *view, int rank)
{
    for (int i = 0; i < rank; i++) {
        if (shoal_view_reaches(view, i, rank))
            return false;
    }
    return true;
}

static void add_host(struct mesh *mesh, int first)
{
    uint16_t end = mesh->start[mesh->hosts];

    for (int i = first; i < mesh->view->size; i++) {
        if (!shoal_view_reaches(mesh->view, first, i))
            continue;
        if (i == mesh->rank) {
            mesh->host = mesh->hosts;
            mesh->local = end - mesh->start[mesh->hosts];
        }
        mesh->member[end++] = (uint16_t)i;
    }
    mesh->start[++mesh->hosts] = end;
    if (host_size(mesh, mesh->hosts - 1) > mesh->slices)
        mesh->slices = host_size(mesh, mesh->hosts - 1);
}

/* False, with the plan's status set, when there are more hosts or blocks than a plan can name. */
static bool find_hosts(struct mesh *mesh)
{
    for (int i = 0; i < mesh->view->size && mesh->hosts < SHOAL_PLAN_PARTS_MAX; i++) {
        if (is_first_of_host(mesh->view, i))
            add_host(mesh, i);
    }
    const bool fits = mesh->start[mesh->hosts] == mesh->view->size && mesh->slices * mesh->hosts <= UINT16_MAX &&
                      mesh->hosts - 1 + SHOAL_PART_MESH <= SHOAL_PLAN_PARTS_MAX;
    if (!fits && mesh->plan->status == SHOAL_OK)
        mesh->plan->status = SHOAL_ERR_UNSUPPORTED;
    return fits;
}

/* The block of a slice that a host owns, as a number, and as a block of several operands. */
static int number(const struct mesh *mesh, int slice, int owner)
{
    return slice * mesh->hosts + owner;
}

static struct shoal_block input_of(const struct mesh *mesh, int rank, int slice, int owner)
{
    return shoal_input(rank, number(mesh, slice, owner), mesh->slices * mesh->hosts);
}

static struct shoal_block output_of(const struct mesh *mesh, int rank, int slice, int owner)
{
    return shoal_output(rank, number(mesh, slice, owner), mesh->slices * mesh->hosts);
}

static struct shoal_block window_of(const struct mesh *mesh, int rank, int slice, int owner)
{
    return shoal_window(rank, SHOAL_PART_OWN, number(mesh, slice, owner), mesh->slices * mesh->hosts);
}

/* Where host `to`'s carrier of the slice finds what host `from`'s has put. */
static struct shoal_block inbox_of(const struct mesh *mesh, int to, int from, int slice, int owner)
{
    const int distance = (from - to + mesh->hosts) % mesh->hosts;
    return shoal_window(carrier(mesh, to, slice), SHOAL_PART_MESH + distance - 1, number(mesh, slice, owner),
                        mesh->slices * mesh->hosts);
}

/* The own host's sum: of a rank that is alone on its host, simply the input. */
static struct shoal_block partial_of(const struct mesh *mesh, int slice, int owner)
{
    return neighbour_count(mesh) > 0 ? window_of(mesh, mesh->rank, slice, owner) : input_of(mesh, mesh->rank, slice, owner);
}

static void stage_input(const struct mesh *mesh)
{
    for (int i = 1; i <= neighbour_count(mesh); i++)
        shoal_plan_wait_credit(mesh->plan, neighbour(mesh, i));
    for (int i = 1; i <= neighbour_count(mesh); i++) {
        const int first = (mesh->local + i) % host_size(mesh, mesh->host);

        for (int slice = first; slice < mesh->slices; slice += host_size(mesh, mesh->host)) {
            for (int owner = 0; owner < mesh->hosts; owner++)
                shoal_plan_copy(mesh->plan, input_of(mesh, mesh->rank, slice, owner),
                                window_of(mesh, mesh->rank, slice, owner));
        }
        shoal_plan_signal(mesh->plan, neighbour(mesh, i));
    }
}

static void reduce_partial(const struct mesh *mesh, int slice, int owner)
{
    struct shoal_block sources[SHOAL_PLAN_RANKS_MAX];
    const struct shoal_block dest = partial_of(mesh, slice, owner);
    const int count = host_size(mesh, mesh->host);

    for (int i = 0; i < count; i++) {
        const int rank = carrier(mesh, mesh->host, i);
        const bool direct = rank == mesh->rank || shoal_view_shares_input(mesh->view, rank);
        sources[i] = direct ? input_of(mesh, rank, slice, owner) : window_of(mesh, rank, slice, owner);
    }
    shoal_plan_reduce(mesh->plan, sources, count, &dest, 1);
}

/* Each host begins with another one, and does its own block last. */
static void send_partials(const struct mesh *mesh, int slice)
{
    for (int i = 1; i <= mesh->hosts; i++) {
        const int owner = (mesh->host + i) % mesh->hosts;

        if (neighbour_count(mesh) > 0)
            reduce_partial(mesh, slice, owner);
        if (owner != mesh->host)
            shoal_plan_put(mesh->plan, partial_of(mesh, slice, owner), inbox_of(mesh, owner, mesh->host, slice, owner));
    }
}

/* The outputs of this host that its carrier writes; how many they are. */
static int reached_outputs(const struct mesh *mesh, int slice, int owner, struct shoal_block *outputs)
{
    int count = 0;
    for (int i = 0; i < host_size(mesh, mesh->host); i++) {
        const int rank = carrier(mesh, mesh->host, i);
        if (rank == mesh->rank || shoal_view_shares_output(mesh->view, rank))
            outputs[count++] = output_of(mesh, rank, slice, owner);
    }
    return count;
}

/* The block owned here: partials of all hosts into the result, and the result to all hosts. */
static void finish_own_block(const struct mesh *mesh, int slice)
{
    struct shoal_block sources[SHOAL_PLAN_PARTS_MAX];
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX + 1];
    const int host = mesh->host;
    int dest_count = reached_outputs(mesh, slice, host, dests);

    for (int from = 0; from < mesh->hosts; from++) {
        sources[from] = from == host ? partial_of(mesh, slice, host) : inbox_of(mesh, host, from, slice, host);
        if (from != host)
            shoal_plan_wait(mesh->plan, carrier(mesh, from, slice));
    }
    if (dest_count < host_size(mesh, host))
        dests[dest_count++] = window_of(mesh, mesh->rank, slice, host);
    shoal_plan_reduce(mesh->plan, sources, mesh->hosts, dests, dest_count);
    for (int i = 1; i < mesh->hosts; i++) {
        const int to = (host + i) % mesh->hosts;
        shoal_plan_put(mesh->plan, output_of(mesh, mesh->rank, slice, host), inbox_of(mesh, to, host, slice, host));
    }
}

static void receive_results(const struct mesh *mesh, int slice)
{
    struct shoal_block dests[SHOAL_PLAN_RANKS_MAX];

    for (int i = 1; i < mesh->hosts; i++) {
        const int owner = (mesh->host + i) % mesh->hosts;
        const struct shoal_block result = inbox_of(mesh, mesh->host, owner, slice, owner);
        const int count = reached_outputs(mesh, slice, owner, dests);

        shoal_plan_wait(mesh->plan, carrier(mesh, owner, slice));
        shoal_plan_reduce(mesh->plan, &result, 1, dests, count);
    }
}

/* Copies what a neighbour carries out of its window. */
static void copy_results(const struct mesh *mesh, int peer, int first)
{
    for (int slice = first; slice < mesh->slices; slice += host_size(mesh, mesh->host)) {
        for (int owner = 0; owner < mesh->hosts; owner++) {
            const struct shoal_block result =
                owner == mesh->host ? window_of(mesh, peer, slice, owner) : inbox_of(mesh, mesh->host, owner, slice, owner);
            shoal_plan_copy(mesh->plan, result, output_of(mesh, mesh->rank, slice, owner));
        }
    }
}

/* A neighbour's first signal says that its slices are there, and that it does not read this rank's input any more; the second
 * one that it has copied all that it needs. */
static void collect(const struct mesh *mesh)
{
    const bool staged = !shoal_view_shares_output(mesh->view, mesh->rank);

    for (int i = 1; i <= neighbour_count(mesh); i++)
        shoal_plan_signal(mesh->plan, neighbour(mesh, i));
    for (int i = 1; i <= neighbour_count(mesh); i++) {
        shoal_plan_wait(mesh->plan, neighbour(mesh, i));
        if (staged)
            copy_results(mesh, neighbour(mesh, i), (mesh->local + i) % host_size(mesh, mesh->host));
    }
    for (int i = 1; i <= neighbour_count(mesh) && staged; i++)
        shoal_plan_signal(mesh->plan, neighbour(mesh, i));
}

/* Whose credit speaks for a host, to a rank elsewhere with that local number. */
static int speaker(const struct mesh *mesh, int host, int local)
{
    return carrier(mesh, host, local);
}

static bool is_speaker(const struct mesh *mesh)
{
    for (int i = 1; i < mesh->hosts; i++) {
        if (host_size(mesh, (mesh->host + i) % mesh->hosts) > mesh->local)
            return true;
    }
    return false;
}

static void wait_credits(const struct mesh *mesh)
{
    for (int i = 1; i < mesh->hosts; i++)
        shoal_plan_wait_credit(mesh->plan, speaker(mesh, (mesh->host + i) % mesh->hosts, mesh->local));
}

static void give_credits(const struct mesh *mesh)
{
    for (int i = 1; i <= neighbour_count(mesh); i++) {
        if (shoal_view_shares_output(mesh->view, neighbour(mesh, i)))
            continue;
        if (is_speaker(mesh))
            shoal_plan_wait(mesh->plan, neighbour(mesh, i));
        else
            shoal_plan_expect_credit(mesh->plan, neighbour(mesh, i));
    }
    for (int i = 1; i < mesh->hosts; i++) {
        const int host = (mesh->host + i) % mesh->hosts;

        for (int local = mesh->local; local < host_size(mesh, host); local += host_size(mesh, mesh->host))
            shoal_plan_signal(mesh->plan, carrier(mesh, host, local));
        shoal_plan_expect_credit(mesh->plan, speaker(mesh, host, mesh->local));
    }
}

/* A neighbour that signals in this piece has read all that it read in the pieces before: waiting for its input is waiting for
 * its credit too. */
static void gather_input(const struct mesh *mesh)
{
    const bool staged = !shoal_view_shares_input(mesh->view, mesh->rank);

    if (staged)
        stage_input(mesh);
    for (int i = 1; i <= neighbour_count(mesh); i++) {
        if (!shoal_view_shares_input(mesh->view, neighbour(mesh, i)))
            shoal_plan_wait(mesh->plan, neighbour(mesh, i));
        else if (!staged)
            shoal_plan_wait_credit(mesh->plan, neighbour(mesh, i));
    }
}

void shoal_allreduce_mesh_build(struct shoal_plan *plan, const struct shoal_view *view, int rank, int root)
{
    struct mesh mesh = {.plan = plan, .view = view, .rank = rank};

    if (!find_hosts(&mesh))
        return;
    if (mesh.hosts == 1) {
        shoal_owners_build(plan, view, rank, root);
        return;
    }
    const int stride = host_size(&mesh, mesh.host);
    gather_input(&mesh);
    wait_credits(&mesh);
    for (int slice = mesh.local; slice < mesh.slices; slice += stride)
        send_partials(&mesh, slice);
    for (int slice = mesh.local; slice < mesh.slices; slice += stride)
        finish_own_block(&mesh, slice);
    for (int slice = mesh.local; slice < mesh.slices; slice += stride)
        receive_results(&mesh, slice);
    collect(&mesh);
    give_credits(&mesh);
}
