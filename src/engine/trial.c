#include "engine/trial.h"

#include <stdlib.h>

#include "base/assert.h"
#include "transport/transport.h"

/* The first operations touch memory for the first time and are not timed. */
#define WARM_USES 4
/* Consecutive uses of one way, of which the last is timed: those before it find what the other way left in caches. */
#define BLOCK_USES 4
#define PAIR_USES (2 * BLOCK_USES)
/* PAIRS_ENOUGH pairs that agree decide; otherwise the majority of PAIRS_MOST does. A pair in which one way takes a quarter less
 * time than the other counts twice, so that the trial of a short run of large operations ends soon. */
#define PAIRS_ENOUGH 3
#define PAIRS_MOST 7
/* Operations until the next trial, and how often that number is doubled while trials agree. */
#define REST_USES 256
#define REST_DOUBLINGS 3

/* A trial ends after this many operations even if some of its times are missing. */
#define TRIAL_USES (PAIR_USES * PAIRS_MOST + 2 * SHOAL_ACTIVE_MAX)

static void begin_at(struct shoal_trial *trial, uint32_t use)
{
    trial->begin = use;
    trial->balance = 0;
    trial->pairs = trial->second_leads = 0;
}

/* A pair begins with the way that leads, so that most operations of a short run are done that way. If neither leads, it
 * begins with the way that is not chosen. */
static void order_pair(struct shoal_trial *trial, uint32_t pair)
{
    SHOAL_ASSERT(pair < PAIRS_MOST);
    const bool is_second = trial->balance ? trial->balance > 0 : !trial->is_second;
    trial->second_leads |= (uint8_t)(is_second << pair);
}

static bool is_block_second(const struct shoal_trial *trial, uint32_t block)
{
    const bool leads = trial->second_leads >> block / 2 & 1;
    return leads == (block % 2 == 0);
}

bool shoal_trial_next(struct shoal_trial *trial, uint32_t *use_out)
{
    const uint32_t use = *use_out = trial->uses++;
    if (use == 0 || (use >= trial->begin && use - trial->begin >= TRIAL_USES))
        begin_at(trial, use == 0 ? WARM_USES : use);
    const uint32_t at = use - trial->begin, pair = at / PAIR_USES;
    const bool is_tried = use >= trial->begin && pair < PAIRS_MOST;
    if (is_tried && at % PAIR_USES == 0)
        order_pair(trial, pair);
    return is_tried ? is_block_second(trial, at / BLOCK_USES) : trial->is_second;
}

static void trial_conclude(struct shoal_trial *trial)
{
    const bool is_second = trial->balance > 0, is_same = is_second == trial->is_second;
    trial->agreed = is_same ? (uint8_t)(trial->agreed + (trial->agreed < REST_DOUBLINGS)) : 0;
    trial->is_second = is_second;
    begin_at(trial, trial->uses + ((uint32_t)REST_USES << trial->agreed));
}

static int trial_weight(float second, float first)
{
    return second < first * 3 / 4 || first < second * 3 / 4 ? 2 : 1;
}

bool shoal_trial_is_under_way(const struct shoal_trial *trial)
{
    return trial->uses >= trial->begin && (trial->uses - trial->begin) / PAIR_USES < PAIRS_MOST;
}

bool shoal_trial_note(struct shoal_trial *trial, uint32_t use, float ticks)
{
    const uint32_t at = use - trial->begin, block = at / BLOCK_USES;
    if (use < trial->begin || block / 2 >= PAIRS_MOST || at % BLOCK_USES != BLOCK_USES - 1)
        return false;
    if (block % 2 == 0) {
        trial->first_ticks = ticks;
        return false;
    }
    const float second = is_block_second(trial, block) ? ticks : trial->first_ticks;
    const float first = is_block_second(trial, block) ? trial->first_ticks : ticks;
    const int weight = trial_weight(second, first);
    trial->balance = (int8_t)(trial->balance + (second < first * 15 / 16 ? weight : -weight));
    trial->pairs++;
    SHOAL_ASSERT(trial->pairs <= PAIRS_MOST);
    if (abs(trial->balance) < PAIRS_ENOUGH && trial->pairs < PAIRS_MOST)
        return false;
    trial_conclude(trial);
    return true;
}
