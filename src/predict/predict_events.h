/* The queue of events: a heap ordered by time, then by the order of insertion. An event is a number. Each is in the queue at
 * most once, so all memory is allocated at the start. */
#ifndef SHOAL_PREDICT_PREDICT_EVENTS_H
#define SHOAL_PREDICT_PREDICT_EVENTS_H

#include "base/compiler.h"

struct shoal_event {
    uint64_t at_ps;
    uint64_t order;
    uint32_t id;
};

struct shoal_events {
    uint64_t now_ps;
    uint64_t noted;
    struct shoal_event *heap;
    uint32_t count;
};

SHOAL_MUST_USE enum shoal_status shoal_events_init(struct shoal_events *events, uint32_t most);
void shoal_events_fini(struct shoal_events *events);

void shoal_events_push(struct shoal_events *events, uint64_t at_ps, uint32_t id);

/* Removes the next event; its time becomes now. Returns false if the queue is empty. */
bool shoal_events_pop(struct shoal_events *events, uint32_t *id_out);

#endif
