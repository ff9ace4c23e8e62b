#include "collective/rounds.h"

#include <stdlib.h>

#include "collective/rails.h"

struct builder {
    struct shoal_rounds *rounds;
    struct shoal_rails rails;
    int powers; /* P */
    uint16_t *next;
};

int shoal_rounds_count(int hosts)
{
    const int all = shoal_rails_powers(hosts);
    int rounds = 0;
    for (int powers = all; powers > 1; powers /= 2)
        rounds++;
    return rounds + (all < hosts ? 2 : 0);
}

/* ---- Lists of ranks ------------------------------------------------------------------------------------------------------ */

static void append_members(struct builder *builder, int host)
{
    for (int i = builder->rails.start[host]; i < builder->rails.start[host + 1]; i++)
        *builder->next++ = builder->rails.member[i];
}

static struct shoal_ranks list_since(const struct builder *builder, const uint16_t *start)
{
    return (struct shoal_ranks){start, (int)(builder->next - start)};
}

static struct shoal_ranks list_host(struct builder *builder, int host)
{
    const uint16_t *start = builder->next;
    append_members(builder, host);
    return list_since(builder, start);
}

/* Lists the ranks of a host that this rank serves. */
static struct shoal_ranks list_served(struct builder *builder, int host)
{
    const struct shoal_rails *rails = &builder->rails;
    const int stride = shoal_rails_size(rails, rails->own);
    const uint16_t *start = builder->next;
    for (int local = rails->local; local < shoal_rails_size(rails, host); local += stride)
        *builder->next++ = rails->member[rails->start[host] + local];
    return list_since(builder, start);
}

/* Lists the ranks whose data a host among the powers holds before the round with that distance: those of its group, and of the
 * hosts that handed their data to one of these. */
static struct shoal_ranks list_held(struct builder *builder, int host, int distance)
{
    const int first = host / distance * distance;
    const uint16_t *start = builder->next;
    for (int member = first; member < first + distance; member++) {
        const int other = shoal_rails_stand_by(builder->rails.count, member);
        append_members(builder, member);
        if (other >= 0)
            append_members(builder, other);
    }
    return list_since(builder, start);
}

/* Returns the rank of another host that serves this one. */
static int served_by(const struct builder *builder, int host)
{
    return shoal_rails_leader(&builder->rails, host, builder->rails.local);
}

/* ---- Rounds -------------------------------------------------------------------------------------------------------------- */

static void rounds_append(struct builder *builder, struct shoal_rounds_step round)
{
    builder->rounds->rounds[builder->rounds->count++] = round;
}

/* For a host beyond the powers: its data go to its partner, and the result comes back. */
static void stand_by(struct builder *builder)
{
    const int own = builder->rails.own, partner = shoal_rails_stand_by(builder->rails.count, own);
    rounds_append(builder, (struct shoal_rounds_step){.from = served_by(builder, partner),
                                                      .to = list_served(builder, partner),
                                                      .held = list_host(builder, own),
                                                      .came = list_held(builder, 0, builder->powers),
                                                      .is_result = true});
}

static void take_over(struct builder *builder, int partner)
{
    rounds_append(builder, (struct shoal_rounds_step){
                               .from = served_by(builder, partner), .came = list_host(builder, partner), .is_own_first = true});
}

static void hand_back(struct builder *builder, int partner)
{
    rounds_append(builder, (struct shoal_rounds_step){.from = -1,
                                                      .to = list_served(builder, partner),
                                                      .held = list_held(builder, 0, builder->powers)});
}

static void rounds_exchange(struct builder *builder, int distance)
{
    const int own = builder->rails.own, other = own ^ distance;
    rounds_append(builder, (struct shoal_rounds_step){.from = served_by(builder, other),
                                                      .to = list_served(builder, other),
                                                      .held = list_held(builder, own, distance),
                                                      .came = list_held(builder, other, distance),
                                                      .is_own_first = own < other,
                                                      .is_last_sum = 2 * distance == builder->powers});
}

static void build(struct builder *builder)
{
    const int partner = shoal_rails_stand_by(builder->rails.count, builder->rails.own);
    builder->rounds->local = list_host(builder, builder->rails.own);
    if (builder->rails.own >= builder->powers) {
        stand_by(builder);
        return;
    }
    if (partner >= 0)
        take_over(builder, partner);
    for (int distance = 1; distance < builder->powers; distance *= 2)
        rounds_exchange(builder, distance);
    if (partner >= 0)
        hand_back(builder, partner);
}

bool shoal_rounds_init(struct shoal_rounds *rounds, const struct shoal_view *view, int rank)
{
    struct builder builder = {.rounds = rounds};
    struct shoal_plan plan;
    *rounds = (struct shoal_rounds){.count = 0};
    shoal_plan_init(&plan, rank, view->size);
    const bool is_on_hosts = shoal_rails_find(&builder.rails, &plan, view, rank, 0);
    shoal_plan_fini(&plan);
    builder.powers = shoal_rails_powers(builder.rails.count);
    /* In all rounds together a rank serves each other rank at most once, and receives each part at most once. The data it holds
     * may belong to nearly all ranks in each round, if hosts differ in size. */
    rounds->pool = calloc((size_t)view->size * (4 + SHOAL_ROUNDS_MAX), sizeof *rounds->pool);
    if (!rounds->pool)
        return false;
    builder.next = rounds->pool;
    if (is_on_hosts)
        build(&builder);
    return true;
}

void shoal_rounds_fini(struct shoal_rounds *rounds)
{
    free(rounds->pool);
    rounds->pool = NULL;
}

void shoal_rounds_find_peers(const struct shoal_rounds *rounds, uint8_t *peers)
{
    for (int i = 0; i < rounds->count; i++) {
        const struct shoal_rounds_step *round = &rounds->rounds[i];
        if (round->from >= 0)
            peers[round->from] = 1;
        for (int j = 0; j < round->to.count; j++)
            peers[round->to.at[j]] = 1;
    }
}
