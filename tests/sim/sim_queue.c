#include "sim/sim_queue.h"

#include <stdlib.h>

static bool is_sooner(const struct shoal_sim_event *a, const struct shoal_sim_event *b)
{
    return a->due != b->due ? a->due < b->due : a->serial < b->serial;
}

static void swap(struct shoal_sim_event **a, struct shoal_sim_event **b)
{
    struct shoal_sim_event *const kept = *a;
    *a = *b;
    *b = kept;
}

static bool queue_has_room(struct shoal_sim_queue *queue)
{
    if (queue->count < queue->capacity)
        return true;
    const size_t capacity = shoal_max_size(256, 2 * queue->capacity);
    struct shoal_sim_event **heap = realloc(queue->heap, capacity * sizeof(struct shoal_sim_event *));
    if (!heap)
        return false;
    queue->heap = heap;
    queue->capacity = capacity;
    return true;
}

void shoal_sim_queue_fini(struct shoal_sim_queue *queue)
{
    for (size_t i = 0; i < queue->count; i++)
        free(queue->heap[i]);
    free(queue->heap);
    *queue = (struct shoal_sim_queue){0};
}

bool shoal_sim_queue_push(struct shoal_sim_queue *queue, struct shoal_sim_event *event)
{
    if (!queue_has_room(queue))
        return false;
    struct shoal_sim_event **heap = queue->heap;
    size_t at = queue->count++;
    event->serial = queue->serial++;
    heap[at] = event;
    while (at > 0 && is_sooner(heap[at], heap[(at - 1) / 2])) {
        swap(&heap[at], &heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    return true;
}

struct shoal_sim_event *shoal_sim_queue_pop(struct shoal_sim_queue *queue)
{
    struct shoal_sim_event **heap = queue->heap;
    struct shoal_sim_event *const first = heap[0];
    heap[0] = heap[--queue->count];
    for (size_t at = 0, child = 1; child < queue->count; child = 2 * at + 1) {
        if (child + 1 < queue->count && is_sooner(heap[child + 1], heap[child]))
            child++;
        if (!is_sooner(heap[child], heap[at]))
            break;
        swap(&heap[child], &heap[at]);
        at = child;
    }
    return first;
}
