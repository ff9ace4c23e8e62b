#include "membership/agreement.h"

#include <stdlib.h>

#include "base/clock.h"

/* Interval after which a rank repeats its messages, because the control tree drops notices when there are too many. */
#define REPEAT_NS SHOAL_NS_PER_S

struct shoal_agreement {
    struct shoal_survivors survivors;
    struct shoal_agreement_path path;
    uint64_t repeat_ns;
};

struct shoal_agreement *shoal_agreement_create(int rank, int size, const struct shoal_agreement_path *path)
{
    struct shoal_agreement *agreement = calloc(1, sizeof *agreement);
    if (!agreement || !shoal_survivors_init(&agreement->survivors, rank, size)) {
        free(agreement);
        return NULL;
    }
    agreement->path = *path;
    return agreement;
}

void shoal_agreement_destroy(struct shoal_agreement *agreement)
{
    if (agreement)
        shoal_survivors_fini(&agreement->survivors);
    free(agreement);
}

bool shoal_agreement_propose(struct shoal_agreement *agreement, const struct shoal_survivors_view *view)
{
    agreement->repeat_ns = shoal_clock_ns() + REPEAT_NS;
    return shoal_survivors_propose(&agreement->survivors, view);
}

void shoal_agreement_look(struct shoal_agreement *agreement)
{
    struct shoal_survivors *survivors = &agreement->survivors;
    for (int r = 0; survivors->is_open && r < survivors->size; r++) {
        if (r != survivors->rank && agreement->path.has_ended(agreement->path.arg, r))
            shoal_survivors_end(survivors, r);
    }
}

void shoal_agreement_receive(struct shoal_agreement *agreement, int from, const struct shoal_survivors_message *message)
{
    shoal_survivors_receive(&agreement->survivors, from, message);
}

uint64_t shoal_agreement_turn(struct shoal_agreement *agreement, uint64_t now_ns)
{
    struct shoal_survivors *survivors = &agreement->survivors;
    struct shoal_survivors_message message;
    if (survivors->is_open && now_ns >= agreement->repeat_ns) {
        shoal_survivors_repeat(survivors);
        agreement->repeat_ns = now_ns + REPEAT_NS;
    }
    shoal_survivors_step(survivors);
    while (shoal_survivors_take(survivors, &message))
        agreement->path.send(agreement->path.arg, &message);
    return survivors->is_open ? agreement->repeat_ns : 0;
}

enum shoal_status shoal_agreement_result(struct shoal_agreement *agreement, struct shoal_survivors_view *agreed_out)
{
    struct shoal_survivors *survivors = &agreement->survivors;
    const struct shoal_survivors_view *agreed = shoal_survivors_agreed(survivors);
    if (!agreed)
        return survivors->is_open && shoal_survivors_is_left_out(survivors) ? SHOAL_ERR_PEER_LOST : SHOAL_PENDING;
    *agreed_out = *agreed;
    shoal_survivors_finish(survivors);
    return shoal_survivors_has(agreed_out, survivors->rank) ? SHOAL_OK : SHOAL_ERR_PEER_LOST;
}

int shoal_agreement_missing(const struct shoal_agreement *agreement, int first)
{
    return shoal_survivors_missing(&agreement->survivors, first);
}
