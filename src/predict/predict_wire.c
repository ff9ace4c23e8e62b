#include "predict/predict_wire.h"

#include <stdlib.h>

enum shoal_status shoal_wire_init(struct shoal_wire *wire, const struct shoal_model *model, int hosts,
                                  struct shoal_events *events, int first_event)
{
    *wire = (struct shoal_wire){.model = model, .events = events, .hosts = hosts, .first_event = first_event};
    wire->adapters = calloc((size_t)hosts, sizeof *wire->adapters);
    wire->flows = calloc((size_t)hosts * (size_t)hosts, sizeof *wire->flows);
    if (!wire->adapters || !wire->flows)
        return SHOAL_ERR_MEMORY;
    for (int host = 0; host < hosts; host++)
        wire->adapters[host].out.full_at = wire->adapters[host].in.full_at = model->lacking_ps;
    return SHOAL_OK;
}

void shoal_wire_fini(struct shoal_wire *wire)
{
    free(wire->adapters);
    free(wire->flows);
    free(wire->messages);
}

/* ---- Messages ------------------------------------------------------------------------------------------------------------ */

void shoal_wire_push(struct shoal_wire *wire, struct shoal_wire_queue *queue, uint32_t message)
{
    wire->messages[message].next = 0;
    if (queue->head)
        wire->messages[queue->tail - 1].next = message + 1;
    else
        queue->head = message + 1;
    queue->tail = message + 1;
}

uint32_t shoal_wire_pop(struct shoal_wire *wire, struct shoal_wire_queue *queue)
{
    if (!queue->head)
        return SHOAL_NO_MESSAGE;
    const uint32_t message = queue->head - 1;
    queue->head = wire->messages[message].next;
    return message;
}

static uint32_t wire_take_message(struct shoal_wire *wire)
{
    const uint32_t more = wire->message_capacity + wire->message_capacity / 2 + 64;
    if (wire->unused) {
        const uint32_t message = wire->unused - 1;
        wire->unused = wire->messages[message].next;
        return message;
    }
    if (wire->message_count == wire->message_capacity) {
        struct shoal_wire_message *moved = realloc(wire->messages, more * sizeof *moved);
        if (!moved)
            return SHOAL_NO_MESSAGE;
        wire->messages = moved;
        wire->message_capacity = more;
    }
    return wire->message_count++;
}

void shoal_wire_release(struct shoal_wire *wire, uint32_t message)
{
    wire->messages[message].next = wire->unused;
    wire->unused = message + 1;
}

/* ---- Sending ------------------------------------------------------------------------------------------------------------- */

/* Queues a flow that has something to send, after all others. */
static void queue_flow(struct shoal_wire *wire, struct shoal_adapter *adapter, uint32_t flow)
{
    wire->flows[flow].next = 0;
    if (adapter->first_flow)
        wire->flows[adapter->last_flow - 1].next = flow + 1;
    else
        adapter->first_flow = flow + 1;
    adapter->last_flow = flow + 1;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Returns when a frame that reaches the bucket at `from_ps` has passed. The frame takes tokens for all its bytes, which delays
 * the time at which the bucket is full. The last token is there once the bucket is no worse than empty, burst_ps before it is
 * full. Nothing is faster than the line. */
static uint64_t pass(const struct shoal_model *model, struct shoal_bucket *bucket, uint64_t from_ps, size_t frame)
{
    const uint64_t carried_at = from_ps + shoal_bytes_ps(frame, model->line_ps);
    bucket->full_at = later(bucket->full_at, from_ps) + shoal_bytes_ps(frame, model->wire_ps);
    return later(carried_at, bucket->full_at - shoal_min_size(bucket->full_at, model->burst_ps));
}

/* An adapter below the switch of a rank's GPU reads and writes host memory through that switch. */
static uint64_t pass_switch(struct shoal_wire *wire, int rank, bool is_up, uint64_t from_ps, size_t frame, uint64_t passed_at)
{
    return wire->copies ? later(passed_at, shoal_copiers_pass_switch(wire->copies, rank, is_up, from_ps, frame)) : passed_at;
}

/* Receiving begins when the first bit has arrived and all earlier frames have been received, and ends no earlier than the
 * arrival of the last bit. Frames from all hosts arrive in the order in which they were sent, because the latency is the same
 * everywhere. */
static uint64_t wire_receive(struct shoal_wire *wire, int host, int rank, size_t frame, uint64_t left_at)
{
    struct shoal_adapter *adapter = &wire->adapters[host];
    const uint64_t comes_at = wire->events->now_ps + wire->model->latency_ps;
    const uint64_t from_ps = later(adapter->received_at, comes_at);
    const uint64_t passed_at = pass_switch(wire, rank, true, from_ps, frame, pass(wire->model, &adapter->in, from_ps, frame));
    adapter->received_at = later(passed_at, left_at + wire->model->latency_ps);
    return adapter->received_at;
}

static void wire_arrive(struct shoal_wire *wire, int host, uint32_t message)
{
    struct shoal_adapter *adapter = &wire->adapters[host];
    if (!adapter->arriving.head)
        shoal_events_push(wire->events, wire->messages[message].received_at,
                          (uint32_t)(wire->first_event + wire->hosts + host));
    shoal_wire_push(wire, &adapter->arriving, message);
}

/* Sends one frame of the flow whose turn it is. */
static void wire_send_frame(struct shoal_wire *wire, int host)
{
    struct shoal_adapter *adapter = &wire->adapters[host];
    const uint32_t flow = adapter->first_flow - 1;
    struct shoal_flow *waiting = &wire->flows[flow];
    struct shoal_wire_message *message = &wire->messages[waiting->waiting.head - 1];
    const size_t frame = shoal_min_size(message->left, wire->model->frame_bytes);
    const uint64_t now_ps = wire->events->now_ps;
    const uint64_t left_at =
        pass_switch(wire, message->from, false, now_ps, frame, pass(wire->model, &adapter->out, now_ps, frame));
    const int to = (int)(flow % (uint32_t)wire->hosts);

    adapter->first_flow = waiting->next;
    adapter->is_sending = true;
    shoal_events_push(wire->events, left_at, (uint32_t)(wire->first_event + host));
    message->left -= frame;
    message->received_at = wire_receive(wire, to, message->to, frame, left_at);
    adapter->is_last_frame = message->left == 0;
    if (adapter->is_last_frame) {
        adapter->leaving_rank = message->from;
        adapter->leaving_slot = message->slot;
        wire_arrive(wire, to, shoal_wire_pop(wire, &waiting->waiting));
    }
    if (waiting->waiting.head)
        queue_flow(wire, adapter, flow);
}

enum shoal_status shoal_wire_send(struct shoal_wire *wire, int from_host, int to_host, const struct shoal_wire_message *message)
{
    const uint32_t taken = wire_take_message(wire), flow = (uint32_t)(from_host * wire->hosts + to_host);
    if (taken == SHOAL_NO_MESSAGE)
        return SHOAL_ERR_MEMORY;
    const bool is_idle = !wire->flows[flow].waiting.head;
    wire->messages[taken] = *message;
    wire->messages[taken].left = message->bytes + wire->model->header_bytes;
    shoal_wire_push(wire, &wire->flows[flow].waiting, taken);
    if (is_idle)
        queue_flow(wire, &wire->adapters[from_host], flow);
    if (!wire->adapters[from_host].is_sending)
        wire_send_frame(wire, from_host);
    return SHOAL_OK;
}

bool shoal_wire_sent(struct shoal_wire *wire, int host, int *rank_out, int *slot_out)
{
    struct shoal_adapter *adapter = &wire->adapters[host];
    const bool was_last = adapter->is_last_frame;
    *rank_out = adapter->leaving_rank;
    *slot_out = adapter->leaving_slot;
    adapter->is_sending = false;
    if (adapter->first_flow)
        wire_send_frame(wire, host);
    return was_last;
}

uint32_t shoal_wire_received(struct shoal_wire *wire, int host)
{
    struct shoal_adapter *adapter = &wire->adapters[host];
    const uint32_t message = shoal_wire_pop(wire, &adapter->arriving);
    if (adapter->arriving.head)
        shoal_events_push(wire->events, wire->messages[adapter->arriving.head - 1].received_at,
                          (uint32_t)(wire->first_event + wire->hosts + host));
    return message;
}

static uint64_t lacking(const struct shoal_wire *wire, const struct shoal_bucket *bucket)
{
    const uint64_t now_ps = wire->events->now_ps;
    return bucket->full_at > now_ps ? shoal_min_size(bucket->full_at - now_ps, wire->model->burst_ps) : 0;
}

uint64_t shoal_wire_lacking(const struct shoal_wire *wire)
{
    uint64_t sum_ps = 0;
    for (int host = 0; wire->model->burst_ps && host < wire->hosts; host++)
        sum_ps += lacking(wire, &wire->adapters[host].out) + lacking(wire, &wire->adapters[host].in);
    return sum_ps;
}
