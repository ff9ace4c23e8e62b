#include "predict/predict_events.h"

#include <stdlib.h>

enum shoal_status shoal_events_init(struct shoal_events *events, uint32_t most)
{
    *events = (struct shoal_events){.heap = calloc(most, sizeof *events->heap)};
    return events->heap ? SHOAL_OK : SHOAL_ERR_MEMORY;
}

void shoal_events_fini(struct shoal_events *events)
{
    free(events->heap);
}

static bool is_before(const struct shoal_event *a, const struct shoal_event *b)
{
    return a->at_ps != b->at_ps ? a->at_ps < b->at_ps : a->order < b->order;
}

void shoal_events_push(struct shoal_events *events, uint64_t at_ps, uint32_t id)
{
    const struct shoal_event event = {at_ps, events->noted++, id};
    uint32_t at = events->count++;
    while (at > 0 && is_before(&event, &events->heap[(at - 1) / 2])) {
        events->heap[at] = events->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    events->heap[at] = event;
}

/* Moves the last event down from the top to its place. */
static void sink(struct shoal_events *events, struct shoal_event event)
{
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < events->count; at = child) {
        child += child + 1 < events->count && is_before(&events->heap[child + 1], &events->heap[child]);
        if (!is_before(&events->heap[child], &event))
            break;
        events->heap[at] = events->heap[child];
    }
    events->heap[at] = event;
}

bool shoal_events_pop(struct shoal_events *events, uint32_t *id_out)
{
    if (!events->count)
        return false;
    *id_out = events->heap[0].id;
    events->now_ps = events->heap[0].at_ps;
    events->count--;
    if (events->count)
        sink(events, events->heap[events->count]);
    return true;
}
