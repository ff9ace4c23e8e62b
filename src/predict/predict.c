#include "predict/predict.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "device/device_ring.h"
#include "predict/predict_copiers.h"
#include "predict/predict_script.h"
#include "predict/predict_wire.h"

/* Times per chunk have settled when they agree to within one part in SETTLED_PARTS. They are compared over windows of at most
 * WINDOW_DEPTHS times as many chunks as there are slots, and only after FIRST_DEPTHS times as many chunks. */
#define SETTLED_PARTS 500
#define WINDOW_DEPTHS 32
#define FIRST_DEPTHS 6

/* A rank's part of the script in a slot. Meeting has an additional slot with its own script. */
struct slot_run {
    bool is_used;
    bool is_at_work; /* its GPU is at work; the act is done when `left` bytes have passed the link */
    bool has_worked;
    uint64_t left;
    uint32_t leaving; /* its messages that have not left */
    uint32_t act;
    uint64_t chunk;
};

struct rank {
    bool is_busy;     /* or waiting for a core */
    bool is_called;   /* its event is queued, though it is not busy */
    bool is_handling; /* busy with handling messages */
    bool has_done;    /* anything in this round */
    bool has_met;
    unsigned turn;            /* position in the round */
    uint64_t want_ps;         /* core time it needs, while it waits for a core */
    uint64_t threads_free_ps; /* when its threads have done what they were given */
    uint32_t next;            /* 1 + the rank that waits after it */
    uint64_t started;         /* chunks */
    uint64_t done;
    uint32_t inbox_count;
    uint64_t inbox_bytes;
    struct shoal_wire_queue inbox;
    struct shoal_wire_queue handled; /* the messages it is handling */
};

struct cores {
    int idle;
    uint32_t first; /* 1 + the rank that is next; 0 if none waits */
    uint32_t last;
};

struct machine {
    const struct shoal_case *asked;
    const struct shoal_model *model;
    struct shoal_model adapter; /* like model, with the rate of one of a host's adapters */
    int adapters;               /* of all hosts */
    struct shoal_cast cast;
    struct shoal_events events;
    struct shoal_wire wire;
    struct shoal_copiers copies;
    unsigned slots;  /* of a rank, including the one for meeting */
    uint64_t chunks; /* fewer than the operation has, once times have settled */
    struct rank *ranks;
    struct slot_run *at;   /* [rank * slots + slot] */
    int32_t **counters;    /* [rank][slot * sources + i], minus earlier chunks' credits: negative if one is due */
    struct cores *cores;   /* [hosts] */
    uint16_t *finished;    /* [chunk] number of ranks that have done it */
    uint64_t *finished_ps; /* [chunk] */
    uint64_t *lacking_ps;  /* [chunk] what token buckets lacked at that time */
    size_t finished_capacity;
    uint64_t finished_by_all;
    uint64_t started_most;
    uint64_t ahead;      /* chunks by which copies are ahead of the ranks */
    uint64_t ring_units; /* units of a rank's ring, each way; ring_bytes can only add to them */
    uint64_t skipped;
    uint64_t skipped_ps;
    uint64_t chunk_ps;
    uint64_t end_ps;
    enum shoal_status status;
};

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static struct slot_run *predict_run_of(struct machine *machine, int rank, unsigned slot)
{
    return &machine->at[(size_t)rank * machine->slots + slot];
}

static unsigned meeting_slot(const struct machine *machine)
{
    return machine->slots - 1;
}

static int32_t *counter_of(struct machine *machine, int rank, int peer, unsigned slot)
{
    const uint16_t sources = machine->cast.ranks[rank].sources;
    return &machine->counters[rank][(size_t)slot * sources + shoal_cast_index(&machine->cast, rank, peer)];
}

static void predict_fail(struct machine *machine, enum shoal_status status)
{
    if (machine->status == SHOAL_OK)
        machine->status = status;
}

/* ---- Cores --------------------------------------------------------------------------------------------------------------- */

static void start_work(struct machine *machine, int rank, uint64_t work_ps)
{
    shoal_events_push(&machine->events, machine->events.now_ps + work_ps, (uint32_t)rank);
}

static struct cores *cores_of(struct machine *machine, int rank)
{
    return &machine->cores[machine->model->is_one_machine ? 0 : shoal_cast_host(&machine->cast, rank)];
}

/* Queues the rank's event for when it has had a core for work_ps. */
static void begin_work(struct machine *machine, int rank, uint64_t work_ps)
{
    struct cores *cores = cores_of(machine, rank);
    struct rank *own = &machine->ranks[rank];
    own->is_busy = true;
    if (machine->model->threads > 1) /* the others do without this thread */
        own->threads_free_ps = most(own->threads_free_ps, machine->events.now_ps) + work_ps / (uint64_t)machine->model->threads;
    if (cores->idle) {
        cores->idle--;
        start_work(machine, rank, work_ps);
        return;
    }
    own->want_ps = work_ps;
    own->next = 0;
    if (cores->first)
        machine->ranks[cores->last - 1].next = (uint32_t)rank + 1;
    else
        cores->first = (uint32_t)rank + 1;
    cores->last = (uint32_t)rank + 1;
}

static void end_work(struct machine *machine, int rank)
{
    struct cores *cores = cores_of(machine, rank);
    machine->ranks[rank].is_busy = false;
    if (!cores->first) {
        cores->idle++;
        return;
    }
    const uint32_t next = cores->first - 1;
    cores->first = machine->ranks[next].next;
    start_work(machine, (int)next, machine->ranks[next].want_ps);
}

/* Lets a rank that is idle look again, now. */
static void call_rank(struct machine *machine, int rank)
{
    struct rank *own = &machine->ranks[rank];
    if (own->is_busy || own->is_called)
        return;
    own->is_called = true;
    shoal_events_push(&machine->events, machine->events.now_ps, (uint32_t)rank);
}

/* ---- Operands on GPUs ---------------------------------------------------------------------------------------------------- */

static bool is_on_gpu(const struct machine *machine)
{
    return machine->model->unit_bytes != 0 && !machine->asked->selection.is_by_owners;
}

/* Returns the bytes of an operand from its beginning to the end of a chunk. */
static uint64_t bytes_up_to(struct machine *machine, int rank, bool is_in, uint64_t chunks)
{
    const uint64_t all = *shoal_copiers_bytes(&machine->copies, rank, is_in);
    return shoal_min_size(all, chunks * shoal_cast_bytes(&machine->cast, rank, is_in, machine->cast.chunk_elements));
}

/* Returns the units of a ring as communicators make it: it has room for a chunk of any collective. With many ranks a chunk that
 * is in parts needs most, and the ring holds several chunks of an all-reduce. */
static unsigned usual_ring_units(const struct machine *machine)
{
    const struct shoal_case *asked = machine->asked;
    const int size = asked->view.size, hosts = asked->hosts;
    const size_t whole = shoal_select_most_chunk_bytes(asked->chunk_bytes, size, hosts, false);
    const size_t part = shoal_select_most_chunk_bytes(asked->chunk_bytes, size, hosts, true);
    return shoal_device_ring_slots(machine->model->unit_bytes, whole, size, part);
}

/* Returns that number, or the number asked for, if larger. At least, all data that travel with an announcement have room. */
static uint64_t ring_units(struct machine *machine, int rank, bool is_in)
{
    const uint64_t all = *shoal_copiers_bytes(&machine->copies, rank, is_in);
    const uint64_t range = machine->cast.chunks ? bytes_up_to(machine, rank, is_in, 1) : all;
    const uint64_t least = shoal_max_size(shoal_copiers_units(&machine->copies, range) + 3, machine->ring_units);
    return shoal_max_size(least, machine->model->ring_bytes / machine->model->unit_bytes);
}

/* Returns true if the units that an act needs have arrived, or if there is room for its output. */
static bool is_at_hand(struct machine *machine, int rank, const struct slot_run *run, bool is_meeting, bool is_in)
{
    const uint64_t all = *shoal_copiers_bytes(&machine->copies, rank, is_in);
    const uint64_t end = is_meeting ? all : bytes_up_to(machine, rank, is_in, run->chunk + 1);
    const uint64_t room = is_in ? 0 : ring_units(machine, rank, false);
    return shoal_copiers_units(&machine->copies, end) <= shoal_copiers_done(&machine->copies, rank, is_in) + room;
}

static bool can_begin(struct machine *machine, int rank, unsigned slot, const struct shoal_act *act)
{
    const struct slot_run *run = predict_run_of(machine, rank, slot);
    const bool is_meeting = slot == meeting_slot(machine);
    if (!is_on_gpu(machine) || !act->needs)
        return true;
    return (!(act->needs & SHOAL_ACT_NEEDS_INPUT) || is_at_hand(machine, rank, run, is_meeting, true)) &&
           (!(act->needs & SHOAL_ACT_NEEDS_OUTPUT) || is_at_hand(machine, rank, run, is_meeting, false));
}

/* Returns how many chunks, from the first on without a gap, the rank has done. */
static uint64_t done_in_order(struct machine *machine, int rank)
{
    uint64_t chunk = machine->ranks[rank].started;
    for (unsigned slot = 0; slot < machine->asked->depth; slot++) {
        const struct slot_run *run = predict_run_of(machine, rank, slot);
        if (run->is_used && run->chunk < chunk)
            chunk = run->chunk;
    }
    return chunk;
}

/* Input that was read makes room for more. Output that was written may be copied out. */
static void predict_allow_copies(struct machine *machine, int rank)
{
    const uint64_t chunks = done_in_order(machine, rank), unit = machine->model->unit_bytes;
    const uint64_t written = bytes_up_to(machine, rank, false, chunks);
    if (!is_on_gpu(machine))
        return;
    shoal_copiers_allow(&machine->copies, rank, true,
                        bytes_up_to(machine, rank, true, chunks) / unit + ring_units(machine, rank, true));
    if (machine->ranks[rank].has_met && chunks == machine->chunks)
        shoal_copiers_allow(&machine->copies, rank, false,
                            shoal_copiers_units(&machine->copies, *shoal_copiers_bytes(&machine->copies, rank, false)));
    else if (machine->cast.chunks)
        shoal_copiers_allow(&machine->copies, rank, false, written / unit);
}

/* Chunks that are left out are not copied. */
static void leave_out_copies(struct machine *machine, uint64_t chunks)
{
    for (int rank = 0; is_on_gpu(machine) && rank < machine->cast.size; rank++) {
        for (int is_in = 0; is_in <= 1; is_in++)
            *shoal_copiers_bytes(&machine->copies, rank, is_in) -=
                chunks * shoal_cast_bytes(&machine->cast, rank, is_in, machine->cast.chunk_elements);
    }
}

/* Returns by how many chunks, at most, the copies are ahead of the ranks. */
static uint64_t chunks_ahead(struct machine *machine)
{
    uint64_t ahead = 0;
    for (int rank = 0; is_on_gpu(machine) && rank < machine->cast.size; rank++) {
        const uint64_t chunk = shoal_cast_bytes(&machine->cast, rank, true, machine->cast.chunk_elements);
        const uint64_t ring = (ring_units(machine, rank, true) + 1) * machine->model->unit_bytes;
        ahead = chunk ? shoal_max_size(ahead, ring / chunk + 1) : ahead;
    }
    return ahead;
}

/* ---- Settling ------------------------------------------------------------------------------------------------------------ */

/* Grows the tables with an entry per chunk. */
static bool predict_has_room(struct machine *machine, uint64_t chunk)
{
    const size_t more = (size_t)chunk + (size_t)chunk / 2 + 64, before = machine->finished_capacity;
    if (chunk < before)
        return true;
    uint16_t *finished = realloc(machine->finished, more * sizeof *finished);
    machine->finished = finished ? finished : machine->finished;
    uint64_t *finished_ps = realloc(machine->finished_ps, more * sizeof *finished_ps);
    machine->finished_ps = finished_ps ? finished_ps : machine->finished_ps;
    uint64_t *lacking_ps = realloc(machine->lacking_ps, more * sizeof *lacking_ps);
    machine->lacking_ps = lacking_ps ? lacking_ps : machine->lacking_ps;
    if (!finished || !finished_ps || !lacking_ps)
        return false;
    memset(finished + before, 0, (more - before) * sizeof *finished);
    machine->finished_capacity = more;
    return true;
}

static uint64_t apart(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

/* Returns by how much more token buckets lacked after the last chunk than three windows before. While buckets empty, times
 * agree, but they will not once the buckets are empty: a window will then take longer by what the buckets now lose in a
 * window. */
static uint64_t emptied_ps(const struct machine *machine, uint64_t window)
{
    const uint64_t *end = &machine->lacking_ps[machine->finished_by_all - 1];
    return end[0] > *(end - 3 * window) ? end[0] - *(end - 3 * window) : 0;
}

/* Returns the time of the last `window` chunks that all ranks have done, if three windows in a row took equally long; else 0.
 * Patterns repeat with the slots, so a window is a multiple of the number of slots. */
static uint64_t settled_ps(const struct machine *machine, uint64_t window)
{
    if (machine->finished_by_all <= 3 * window)
        return 0;
    const uint64_t *end = &machine->finished_ps[machine->finished_by_all - 1];
    const uint64_t late = end[0] - *(end - window), early = *(end - 2 * window) - *(end - 3 * window);
    const uint64_t whole = end[0] - *(end - 3 * window), parts = whole / 3 / SETTLED_PARTS;
    const bool is_steady = apart(late, early) <= parts && apart(late, whole / 3) <= parts;
    return is_steady && emptied_ps(machine, window) / 3 <= parts ? whole / 3 : 0;
}

/* Once times have settled, keeps the chunks that have begun, the last one (which may be short), and enough others that the
 * chunks left out are whole windows. */
static void settle(struct machine *machine)
{
    const uint64_t depth = machine->asked->depth, begun = machine->started_most + 1 + machine->ahead;
    if (machine->asked->is_whole || machine->skipped || machine->finished_by_all < FIRST_DEPTHS * depth)
        return;
    for (uint64_t window = depth; window <= WINDOW_DEPTHS * depth && begun + window <= machine->chunks; window += depth) {
        const uint64_t window_ps = settled_ps(machine, window);
        if (!window_ps)
            continue;
        const uint64_t windows = (machine->chunks - begun) / window;
        machine->skipped_ps = windows * window_ps;
        machine->chunk_ps = window_ps / window;
        machine->skipped = windows * window;
        machine->chunks -= machine->skipped;
        leave_out_copies(machine, machine->skipped);
        return;
    }
}

static void finish_chunk(struct machine *machine, uint64_t chunk)
{
    if (!predict_has_room(machine, chunk)) {
        predict_fail(machine, SHOAL_ERR_MEMORY);
        return;
    }
    machine->finished[chunk]++;
    while (machine->finished_by_all < machine->finished_capacity &&
           machine->finished[machine->finished_by_all] == machine->cast.size) {
        machine->lacking_ps[machine->finished_by_all] = shoal_wire_lacking(&machine->wire);
        machine->finished_ps[machine->finished_by_all++] = machine->events.now_ps;
        settle(machine);
    }
}

/* ---- Acts ---------------------------------------------------------------------------------------------------------------- */

static const struct shoal_script *script_of(const struct machine *machine, int rank, unsigned slot)
{
    const struct shoal_script_rank *part = &machine->cast.ranks[rank];
    return slot == meeting_slot(machine) ? &part->meet : &part->chunk;
}

static uint64_t predict_bytes_of(const struct machine *machine, const struct slot_run *run, const struct shoal_act *act)
{
    return act->bytes[run->chunk + 1 == machine->chunks ? SHOAL_LENGTH_LAST : SHOAL_LENGTH_FULL];
}

static uint64_t message_ps(const struct shoal_model *model, uint64_t messages, uint64_t bytes)
{
    return messages * model->message_ps + shoal_bytes_ps(bytes, model->stack_ps);
}

static uint64_t act_ps(const struct machine *machine, const struct slot_run *run, const struct shoal_act *act)
{
    const uint64_t bytes = predict_bytes_of(machine, run, act);
    if (act->kind == SHOAL_ACT_WORK)
        return shoal_bytes_ps(bytes, machine->model->memory_ps);
    return act->kind == SHOAL_ACT_SEND ? message_ps(machine->model, 1, bytes) : machine->model->signal_ps;
}

/* All ranks of a host share its memory. */
static uint64_t work_ps_of(struct machine *machine, int rank, const struct slot_run *run, const struct shoal_act *act)
{
    const uint64_t own_ps = act_ps(machine, run, act), now_ps = machine->events.now_ps;
    const int host = shoal_cast_host(&machine->cast, rank);
    if (act->kind != SHOAL_ACT_WORK || machine->model->host_ps <= 0)
        return own_ps;
    const uint64_t passed_at = shoal_copiers_pass_memory(&machine->copies, host, predict_bytes_of(machine, run, act));
    return most(own_ps, passed_at - now_ps);
}

static void predict_increment_counter(struct machine *machine, int rank, int peer, unsigned slot)
{
    ++*counter_of(machine, peer, rank, slot);
    call_rank(machine, peer);
}

static void predict_publish(struct machine *machine, int rank)
{
    const int first = shoal_cast_host(&machine->cast, rank) * machine->cast.local;
    for (int peer = first; peer < first + machine->cast.local; peer++) {
        if (peer != rank)
            predict_increment_counter(machine, rank, peer, meeting_slot(machine));
    }
}

static int adapter_of(const struct machine *machine, int rank)
{
    return machine->model->is_adapter_below ? shoal_copiers_switch_of(&machine->copies, rank)
                                            : shoal_cast_host(&machine->cast, rank);
}

static void send(struct machine *machine, int rank, unsigned slot, const struct shoal_act *act)
{
    struct slot_run *run = predict_run_of(machine, rank, slot);
    const struct shoal_wire_message message = {
        .from = (uint16_t)rank, .to = act->peer, .slot = (uint16_t)slot, .bytes = predict_bytes_of(machine, run, act)};
    run->leaving++;
    predict_fail(machine, shoal_wire_send(&machine->wire, adapter_of(machine, rank), adapter_of(machine, act->peer), &message));
}

/* Completes an act, after its time. */
static void end_act(struct machine *machine, int rank, unsigned slot)
{
    struct slot_run *run = predict_run_of(machine, rank, slot);
    const struct shoal_act *act = &script_of(machine, rank, slot)->acts[run->act];
    if (act->kind == SHOAL_ACT_INCREMENT)
        predict_increment_counter(machine, rank, act->peer, slot);
    else if (act->kind == SHOAL_ACT_PUBLISH)
        predict_publish(machine, rank);
    else if (act->kind == SHOAL_ACT_SEND)
        send(machine, rank, slot, act);
    run->act++;
    machine->ranks[rank].has_done = true;
}

static void end_script(struct machine *machine, int rank, unsigned slot)
{
    const struct shoal_script_rank *part = &machine->cast.ranks[rank];
    struct slot_run *run = predict_run_of(machine, rank, slot);
    struct rank *own = &machine->ranks[rank];
    run->is_used = false;
    own->has_done = true;
    machine->end_ps = machine->events.now_ps;
    if (slot == meeting_slot(machine)) {
        own->has_met = true;
        predict_allow_copies(machine, rank);
        return;
    }
    for (unsigned i = 0; i < part->sources; i++)
        machine->counters[rank][(size_t)slot * part->sources + i] -= (int32_t)part->owed[i];
    own->done++;
    finish_chunk(machine, run->chunk);
    predict_allow_copies(machine, rank);
}

/* ---- GPUs at work -------------------------------------------------------------------------------------------------------- */

static uint32_t device_event(const struct machine *machine, int rank, unsigned slot)
{
    const int before = machine->cast.size * (1 + SHOAL_COPY_STAGES) + 2 * machine->adapters;
    return (uint32_t)before + (uint32_t)rank * machine->asked->depth + slot;
}

/* Returns true if the GPU is done. Its work begins some time after the request. */
static bool predict_run_device(struct machine *machine, int rank, unsigned slot, const struct shoal_act *act)
{
    struct slot_run *run = predict_run_of(machine, rank, slot);
    if (run->has_worked) {
        run->has_worked = false;
        return true;
    }
    if (run->is_at_work)
        return false;
    run->is_at_work = true;
    run->left = predict_bytes_of(machine, run, act);
    shoal_events_push(&machine->events, machine->events.now_ps + machine->model->copy_ps, device_event(machine, rank, slot));
    return false;
}

/* ---- Several threads ----------------------------------------------------------------------------------------------------- */

/* As in src/engine/runner.c. */
#define HELPED_BYTES ((uint64_t)32 << 10)

static bool predict_is_helped(const struct machine *machine, unsigned slot, const struct slot_run *run,
                              const struct shoal_act *act)
{
    return act->kind == SHOAL_ACT_WORK && machine->model->threads > 1 && slot != meeting_slot(machine) &&
           predict_bytes_of(machine, run, act) >= 2 * HELPED_BYTES; /* it reads them and writes them */
}

/* Returns true if the threads are done. Giving them the work takes as long as a signal. */
static bool predict_run_helped(struct machine *machine, int rank, unsigned slot, const struct shoal_act *act)
{
    struct slot_run *run = predict_run_of(machine, rank, slot);
    struct rank *own = &machine->ranks[rank];
    const uint64_t now_ps = machine->events.now_ps;
    if (run->has_worked) {
        run->has_worked = false;
        return true;
    }
    if (run->is_at_work)
        return false;
    run->is_at_work = true;
    const uint64_t begin_ps = most(own->threads_free_ps, now_ps) + machine->model->signal_ps;
    own->threads_free_ps = begin_ps + act_ps(machine, run, act) / (uint64_t)machine->model->threads;
    if (machine->model->host_ps > 0)
        own->threads_free_ps =
            most(own->threads_free_ps, shoal_copiers_pass_memory(&machine->copies, shoal_cast_host(&machine->cast, rank),
                                                                 predict_bytes_of(machine, run, act)));
    shoal_events_push(&machine->events, own->threads_free_ps, device_event(machine, rank, slot));
    return false;
}

/* All traffic on a PCIe link shares it, frame by frame. */
static void predict_end_device(struct machine *machine, int id)
{
    const int number = id - (int)device_event(machine, 0, 0), depth = (int)machine->asked->depth, rank = number / depth;
    const unsigned slot = (unsigned)(number % depth);
    struct slot_run *run = predict_run_of(machine, rank, slot);
    const struct shoal_act *act = &script_of(machine, rank, slot)->acts[run->act];
    const enum shoal_copy_link link = (enum shoal_copy_link)act->link;
    run->left = act->kind == SHOAL_ACT_WORK ? 0 : run->left;
    const uint64_t frame = link == SHOAL_COPY_BETWEEN ? run->left : shoal_min_size(run->left, machine->model->frame_bytes);
    if (frame) {
        run->left -= frame;
        shoal_events_push(&machine->events, shoal_copiers_pass_link(&machine->copies, rank, link, frame), (uint32_t)id);
        return;
    }
    run->is_at_work = false;
    run->has_worked = true;
    machine->ranks[rank].has_done = true;
    call_rank(machine, rank);
}

/* Runs the script in a slot until it has to wait, or the rank is busy. */
static void run_slot(struct machine *machine, int rank, unsigned slot)
{
    const struct shoal_script *script = script_of(machine, rank, slot);
    struct slot_run *run = predict_run_of(machine, rank, slot);
    while (run->is_used && run->act < script->count) {
        const struct shoal_act *act = &script->acts[run->act];
        const bool is_wait = act->kind == SHOAL_ACT_WAIT, is_device = act->kind == SHOAL_ACT_DEVICE;
        const bool is_helped = predict_is_helped(machine, slot, run, act);
        if (is_device && !predict_run_device(machine, rank, slot, act))
            return;
        if (is_wait && *counter_of(machine, rank, act->peer, slot) < (int32_t)act->value)
            return;
        if (!can_begin(machine, rank, slot, act))
            return;
        if (is_helped && !predict_run_helped(machine, rank, slot, act))
            return;
        const uint64_t work_ps = is_wait || is_device || is_helped ? 0 : work_ps_of(machine, rank, run, act);
        if (work_ps) {
            begin_work(machine, rank, work_ps);
            return;
        }
        end_act(machine, rank, slot);
    }
    if (run->is_used && !run->leaving)
        end_script(machine, rank, slot);
}

/* ---- Ranks --------------------------------------------------------------------------------------------------------------- */

static void end_handling(struct machine *machine, int rank)
{
    uint32_t number;
    machine->ranks[rank].is_handling = false;
    machine->ranks[rank].has_done = true;
    while ((number = shoal_wire_pop(&machine->wire, &machine->ranks[rank].handled)) != SHOAL_NO_MESSAGE) {
        const struct shoal_wire_message *message = &machine->wire.messages[number];
        ++*counter_of(machine, rank, message->from, message->slot);
        shoal_wire_release(&machine->wire, number);
    }
}

/* Handles all messages that have arrived. */
static void begin_handling(struct machine *machine, int rank)
{
    struct rank *own = &machine->ranks[rank];
    const uint64_t work_ps = message_ps(machine->model, own->inbox_count, own->inbox_bytes);
    own->handled = own->inbox;
    own->inbox = (struct shoal_wire_queue){0, 0};
    own->inbox_count = 0;
    own->inbox_bytes = 0;
    own->is_handling = true;
    if (work_ps)
        begin_work(machine, rank, work_ps);
    else
        end_handling(machine, rank);
}

/* Assigns free slots to the next chunks, in order. */
static void predict_start_chunks(struct machine *machine, int rank)
{
    struct rank *own = &machine->ranks[rank];
    while (own->has_met && own->started < machine->chunks) {
        struct slot_run *run = predict_run_of(machine, rank, (unsigned)(own->started % machine->asked->depth));
        if (run->is_used)
            return;
        *run = (struct slot_run){.is_used = true, .chunk = own->started++};
        machine->started_most = own->started > machine->started_most ? own->started : machine->started_most;
        own->has_done = true;
    }
}

/* Returns the slot for this position in the round: first that of meeting, then the others from the oldest chunk on. */
static unsigned slot_of_turn(const struct machine *machine, const struct rank *rank)
{
    const unsigned depth = machine->asked->depth;
    return rank->turn == 0 ? meeting_slot(machine) : (unsigned)((rank->started + rank->turn - 1) % depth);
}

/* Runs rounds, as the engine does, until the rank is busy or a round finds nothing to do. */
static void predict_run_rank(struct machine *machine, int rank)
{
    struct rank *own = &machine->ranks[rank];
    while (!own->is_busy && machine->status == SHOAL_OK) {
        if (own->turn == 0 && own->inbox_count)
            begin_handling(machine, rank);
        if (own->is_busy)
            return;
        if (own->turn == 0)
            predict_start_chunks(machine, rank);
        for (; own->turn < machine->slots && !own->is_busy; own->turn += !own->is_busy)
            run_slot(machine, rank, slot_of_turn(machine, own));
        if (own->is_busy)
            return;
        own->turn = 0;
        if (!own->has_done && !own->inbox_count)
            return;
        own->has_done = false;
    }
}

static void wake_rank(struct machine *machine, int rank)
{
    struct rank *own = &machine->ranks[rank];
    own->is_called = false;
    if (own->is_busy) {
        end_work(machine, rank);
        if (own->is_handling)
            end_handling(machine, rank);
        else
            end_act(machine, rank, slot_of_turn(machine, own));
    }
    predict_run_rank(machine, rank);
}

/* ---- All together -------------------------------------------------------------------------------------------------------- */

static void end_sending(struct machine *machine, int adapter)
{
    int rank, slot;
    if (!shoal_wire_sent(&machine->wire, adapter, &rank, &slot))
        return;
    SHOAL_ASSERT(predict_run_of(machine, rank, (unsigned)slot)->leaving > 0);
    if (--predict_run_of(machine, rank, (unsigned)slot)->leaving == 0)
        call_rank(machine, rank);
}

static void end_receiving(struct machine *machine, int adapter)
{
    const uint32_t number = shoal_wire_received(&machine->wire, adapter);
    const struct shoal_wire_message *message = &machine->wire.messages[number];
    struct rank *rank = &machine->ranks[message->to];
    rank->inbox_count++;
    rank->inbox_bytes += message->bytes;
    call_rank(machine, message->to);
    shoal_wire_push(&machine->wire, &rank->inbox, number);
}

/* The operation is over when the last output is on its GPU. */
static void end_copying(struct machine *machine, int event)
{
    int rank;
    if (!shoal_copiers_run(&machine->copies, event, &rank))
        return;
    if (shoal_copiers_are_over(&machine->copies, rank))
        machine->end_ps = most(machine->end_ps, machine->events.now_ps);
    call_rank(machine, rank);
}

static void run_event(struct machine *machine, int id)
{
    const int size = machine->cast.size, adapters = machine->adapters;
    if (id < size)
        wake_rank(machine, id);
    else if (id < size + adapters)
        end_sending(machine, id - size);
    else if (id < size + 2 * adapters)
        end_receiving(machine, id - size - adapters);
    else if (id < (int)device_event(machine, 0, 0))
        end_copying(machine, id);
    else
        predict_end_device(machine, id);
}

/* A rank that has not finished when no events are left waits for something that never comes. */
static enum shoal_status predict_run(struct machine *machine)
{
    uint32_t id;
    for (int rank = 0; rank < machine->cast.size; rank++) {
        predict_run_of(machine, rank, meeting_slot(machine))->is_used = true;
        predict_allow_copies(machine, rank);
        call_rank(machine, rank);
    }
    while (machine->status == SHOAL_OK && shoal_events_pop(&machine->events, &id))
        run_event(machine, (int)id);
    for (int rank = 0; rank < machine->cast.size; rank++) {
        const bool is_copied = !is_on_gpu(machine) || shoal_copiers_are_over(&machine->copies, rank);
        if (!machine->ranks[rank].has_met || machine->ranks[rank].done != machine->chunks || !is_copied)
            predict_fail(machine, SHOAL_ERR_INTERNAL);
    }
    return machine->status;
}

static enum shoal_status predict_allocate(struct machine *machine)
{
    const size_t size = (size_t)machine->cast.size, hosts = (size_t)machine->asked->hosts;
    machine->ranks = calloc(size, sizeof *machine->ranks);
    machine->at = calloc(size * machine->slots, sizeof *machine->at);
    machine->counters = calloc(size, sizeof *machine->counters);
    machine->cores = calloc(hosts, sizeof *machine->cores);
    if (!machine->ranks || !machine->at || !machine->counters || !machine->cores)
        return SHOAL_ERR_MEMORY;
    for (size_t rank = 0; rank < size; rank++) {
        const size_t counters = (size_t)machine->cast.ranks[rank].sources * machine->slots;
        machine->counters[rank] = calloc(counters + 1, sizeof **machine->counters);
        if (!machine->counters[rank])
            return SHOAL_ERR_MEMORY;
    }
    for (size_t host = 0; host < hosts; host++)
        machine->cores[host].idle = machine->model->cores;
    return SHOAL_OK;
}

/* One adapter for each host, or one below each switch, with its share of the rate. */
static void find_adapters(struct machine *machine)
{
    const struct shoal_model *model = machine->model;
    const int each = model->is_adapter_below ? shoal_copiers_switches(model, machine->cast.local) : 1;
    machine->adapters = each * machine->asked->hosts;
    machine->adapter = *model;
    machine->adapter.wire_ps *= each;
    machine->adapter.line_ps *= each;
}

static enum shoal_status set_up(struct machine *machine)
{
    const int size = machine->asked->view.size;
    machine->slots = machine->asked->depth + 1;
    SHOAL_TRY(shoal_cast_init(&machine->cast, machine->asked));
    machine->chunks = machine->cast.chunks;
    find_adapters(machine);
    SHOAL_TRY(predict_allocate(machine));
    SHOAL_TRY(shoal_events_init(&machine->events, device_event(machine, size, 0)));
    SHOAL_TRY(shoal_wire_init(&machine->wire, &machine->adapter, machine->adapters, &machine->events, size));
    SHOAL_TRY(shoal_copiers_init(&machine->copies, machine->model, size, machine->cast.local, &machine->events,
                                 size + 2 * machine->adapters));
    machine->wire.copies = machine->model->is_adapter_below ? &machine->copies : NULL;
    for (int rank = 0; rank < size; rank++) {
        for (int is_in = 0; is_in <= 1; is_in++)
            *shoal_copiers_bytes(&machine->copies, rank, is_in) =
                shoal_cast_bytes(&machine->cast, rank, is_in, machine->asked->count);
    }
    machine->ring_units = is_on_gpu(machine) ? usual_ring_units(machine) : 0;
    machine->ahead = chunks_ahead(machine);
    return SHOAL_OK;
}

static void tear_down(struct machine *machine)
{
    for (int rank = 0; machine->counters && rank < machine->cast.size; rank++)
        free(machine->counters[rank]);
    shoal_copiers_fini(&machine->copies);
    shoal_wire_fini(&machine->wire);
    shoal_events_fini(&machine->events);
    free(machine->lacking_ps);
    free(machine->finished_ps);
    free(machine->finished);
    free(machine->cores);
    free(machine->counters);
    free(machine->at);
    free(machine->ranks);
    shoal_cast_fini(&machine->cast);
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

static void add_load(struct shoal_load *sum, const struct shoal_load *load)
{
    sum->work_bytes += load->work_bytes;
    sum->signals += load->signals;
    sum->sends += load->sends;
    sum->sent_bytes += load->sent_bytes;
    sum->receives += load->receives;
    sum->received_bytes += load->received_bytes;
}

static void add_host(const struct machine *machine, const struct shoal_load *load, struct shoal_forecast *forecast)
{
    const struct shoal_model *model = machine->model;
    const uint64_t sent = load->sent_bytes + load->sends * model->header_bytes;
    const uint64_t received = load->received_bytes + load->receives * model->header_bytes;
    add_load(&forecast->total, load);
    forecast->sent_bytes_most = most(forecast->sent_bytes_most, load->sent_bytes);
    forecast->received_bytes_most = most(forecast->received_bytes_most, load->received_bytes);
    forecast->sending_ps_most = most(forecast->sending_ps_most, (uint64_t)shoal_adapter_ps(model, (double)sent));
    forecast->receiving_ps_most = most(forecast->receiving_ps_most, (uint64_t)shoal_adapter_ps(model, (double)received));
}

/* Returns the bytes that a rank's GPU moves one way between its memory and the host's: all, or a slice if other hosts add to
 * it. */
static uint64_t copied_bytes(const struct machine *machine, int rank, bool is_in)
{
    const struct shoal_case *asked = machine->asked;
    const uint64_t all = shoal_cast_bytes(&machine->cast, rank, is_in, asked->count);
    return !asked->selection.is_by_owners ? all : asked->hosts > 1 ? all / (uint64_t)machine->cast.local : 0;
}

/* Returns the bytes that a rank and its adapter move one way through their switch. */
static uint64_t switch_bytes(const struct machine *machine, int rank, bool is_in)
{
    const struct shoal_load *load = &machine->cast.loads[rank];
    const uint64_t copied = copied_bytes(machine, rank, is_in);
    const uint64_t messages = is_in ? load->receives : load->sends, bytes = is_in ? load->received_bytes : load->sent_bytes;
    return copied + (machine->model->is_adapter_below ? bytes + messages * machine->model->header_bytes : 0);
}

static uint64_t link_ps(const struct machine *machine, int rank, bool is_in)
{
    const struct shoal_model *model = machine->model;
    const uint64_t bytes = copied_bytes(machine, rank, is_in);
    const uint64_t units = is_on_gpu(machine) ? shoal_copiers_units(&machine->copies, bytes) : 0;
    return shoal_bytes_ps(bytes, model->pcie_ps) + units * model->copy_ps;
}

/* Returns the time in which each GPU reads its part of its peers' memory. */
static uint64_t nvlink_ps(const struct machine *machine)
{
    const uint64_t all = machine->asked->count * machine->asked->element_bytes, own = all / (uint64_t)machine->cast.local;
    return machine->asked->selection.is_by_owners ? shoal_bytes_ps(2 * (all - own), machine->model->nvlink_ps) : 0;
}

static uint64_t copying_ps_most(const struct machine *machine)
{
    const struct shoal_cast *cast = &machine->cast;
    const int below = (cast->local + machine->copies.switches - 1) / machine->copies.switches;
    uint64_t busiest_ps = 0;
    for (int is_in = 0; machine->model->unit_bytes && is_in <= 1; is_in++) {
        uint64_t bytes = 0;
        for (int rank = 0; rank < cast->size; rank++) {
            bytes = rank % cast->local % below ? bytes : 0; /* the first one below a switch */
            bytes += switch_bytes(machine, rank, is_in);
            busiest_ps = most(busiest_ps, shoal_bytes_ps(bytes, machine->model->switch_ps));
            busiest_ps = most(busiest_ps, most(link_ps(machine, rank, is_in), nvlink_ps(machine)));
        }
    }
    return busiest_ps;
}

static void sum_up(struct machine *machine, struct shoal_forecast *forecast)
{
    const struct shoal_cast *cast = &machine->cast;
    shoal_cast_load(&machine->cast);
    for (int host = 0; host < machine->asked->hosts; host++) {
        struct shoal_load load = {0};
        for (int i = 0; i < cast->local; i++)
            add_load(&load, &cast->loads[host * cast->local + i]);
        add_host(machine, &load, forecast);
    }
    forecast->copying_ps_most = copying_ps_most(machine);
    forecast->time_ps = machine->end_ps + machine->skipped_ps;
    forecast->chunk_ps = machine->chunk_ps;
    forecast->chunks = cast->chunks;
    forecast->chunks_run = (size_t)machine->chunks;
}

enum shoal_status shoal_predict(const struct shoal_case *asked, struct shoal_forecast *forecast_out)
{
    struct machine machine = {.asked = asked, .model = &asked->model};
    struct shoal_forecast forecast = {0};
    enum shoal_status status = set_up(&machine);
    status = status == SHOAL_OK ? predict_run(&machine) : status;
    if (status == SHOAL_OK) {
        sum_up(&machine, &forecast);
        *forecast_out = forecast;
    }
    tear_down(&machine);
    return status;
}
